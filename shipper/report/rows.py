"""Documents as rows: flat tables for programs, and for readers the marketing sources under their brands with totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from shipper.model import wire
from shipper.report.currencies import is_same_currency
from shipper.report.metrics import METRICS, Metric, currencies
from shipper.report.wording import named

Value = str | int | Decimal | None


class Fetched(NamedTuple):
    """
    One version of a report.

    Attributes:
        fetched_at: When it was fetched, ISO 8601; empty if that is not known.
        is_restated: Whether its figures differ from those of an earlier version.
    """

    report: wire.DailyReport
    fetched_at: str = ""
    is_restated: bool = False


class Column(NamedTuple):
    """
    One column of a flat table.

    Attributes:
        kind: str, int or bool, and three kinds of Decimal; any of them may be missing.
    """

    name: str
    kind: Literal["text", "integer", "flag", "count", "money", "rate"]


class FlatTable(NamedTuple):
    """
    Attributes:
        columns: The same for every report.
        rows: Each has a value for every column, in their order.
    """

    name: str
    columns: tuple[Column, ...]
    rows: list[tuple[Value, ...]]


def _metric_columns(metric: Metric) -> tuple[Column, ...]:
    kind: Final = "money" if metric.is_money else "count"
    if not metric.has_adjustment:
        return (Column(metric.name, kind),)
    return tuple(Column(f"{metric.name}_{part}", kind) for part in ("result", "adjustment", "total"))


_HEAD_COLUMNS: Final = (
    Column("account_id", "integer"),
    Column("account_name", "text"),
    Column("operator_name", "text"),
    Column("period_start", "text"),
    Column("period_end", "text"),
    Column("reporting_time", "text"),
    Column("fetched_at", "text"),
    Column("check_sum", "text"),
    Column("account_currency", "text"),
)
SOURCE_COLUMNS: Final = (
    *_HEAD_COLUMNS,
    Column("brand_id", "integer"),
    Column("brand_name", "text"),
    Column("source_id", "integer"),
    Column("source_name", "text"),
    Column("source_currency", "text"),
    Column("exchange_rate", "rate"),
    *(column for metric in METRICS for column in _metric_columns(metric)),
)
ACCOUNT_COLUMNS: Final = (
    *_HEAD_COLUMNS,
    Column("report_id", "text"),
    Column("is_restated", "flag"),
    Column("opening_balance", "money"),
    Column("outgoing_balance", "money"),
    Column("brands", "integer"),
    Column("marketing_sources", "integer"),
)


def source_table(fetched: Iterable[Fetched]) -> FlatTable:
    """Return one row per brand, marketing source and period, in the order of the documents."""
    rows = [
        (*_head(item), brand.id, brand.name, *_source(entry))
        for item in fetched
        for brand in item.report.brands
        for entry in brand.marketing_sources
    ]
    return FlatTable("sources", SOURCE_COLUMNS, rows)


def account_table(fetched: Iterable[Fetched]) -> FlatTable:
    """Return one row per account and period."""
    rows = [
        (
            *_head(item),
            item.report.id,
            item.is_restated,
            item.report.opening_balance,
            item.report.outgoing_balance,
            len(item.report.brands),
            len(entries_of(item.report)),
        )
        for item in fetched
    ]
    return FlatTable("accounts", ACCOUNT_COLUMNS, rows)


def entries_of(report: wire.DailyReport) -> list[wire.MarketingSource]:
    """List the marketing sources of all brands."""
    return [entry for brand in report.brands for entry in brand.marketing_sources]


def by_account(fetched: Iterable[Fetched]) -> list[list[Fetched]]:
    """Group by account, in the order of their appearance; the periods of each ascend."""
    accounts: dict[int, list[Fetched]] = {}
    for item in fetched:
        accounts.setdefault(item.report.source.affiliate_account_id, []).append(item)
    return [sorted(items, key=_period) for items in accounts.values()]


def are_disjoint(fetched: Sequence[Fetched]) -> bool:
    """Return whether no two of ascending periods overlap, as far as their ends show; only then may they be added."""
    periods = [_period(item) for item in fetched]
    return all(earlier != later and earlier[1] <= later[0] for earlier, later in pairwise(periods))


def share_currency(fetched: Iterable[Fetched]) -> bool:
    """Return whether reports are certainly of one currency; only then may their money be added or compared."""
    first, *others = [item.report.reporting_currency for item in fetched]
    return all(is_same_currency(name, first) for name in others)


def _period(item: Fetched) -> tuple[str, str]:
    return item.report.reporting_period.start, item.report.reporting_period.end


def _head(item: Fetched) -> tuple[Value, ...]:
    report = item.report
    return (
        report.source.affiliate_account_id,
        report.source.affiliate_account_name,
        report.source.operator_name,
        report.reporting_period.start,
        report.reporting_period.end,
        report.reporting_time,
        item.fetched_at,
        report.last_check_sum,
        report.reporting_currency,
    )


def _source(entry: wire.MarketingSource) -> tuple[Value, ...]:
    figures = [value for metric in METRICS for value in _figures(metric, metric.figure(entry))]
    return (entry.id, entry.name, entry.reporting_currency, entry.exchange_rate, *figures)


def _figures(metric: Metric, figure: wire.AmountPair) -> tuple[Value, ...]:
    return (figure.result, figure.adjustment, figure.total) if metric.has_adjustment else (figure.result,)


class Line(NamedTuple):
    """
    One marketing source, or the total of a brand or of the account.

    Attributes:
        brand: Number and name.
        source: Number and name; empty in a total.
        entries: What to add, 1..n; one entry per period if it is a marketing source.
        has_next: Whether the next line is of the same brand.
    """

    kind: Literal["source", "brand", "account"]
    brand: str
    source: str
    entries: list[wire.MarketingSource]
    has_next: bool = False


# A brand's number and name, and the same of its marketing sources with their entries.
_Brands = list[tuple[str, list[tuple[str, list[wire.MarketingSource]]]]]


def lines_of(report: wire.DailyReport) -> list[Line]:
    """List the lines of one period, in the order of the document."""
    brands: _Brands = [
        (
            named(brand.id, brand.name),
            [(named(entry.id, entry.name), [entry]) for entry in brand.marketing_sources],
        )
        for brand in report.brands
    ]
    return list(_lines(brands))


def lines_over(fetched: Iterable[Fetched]) -> list[Line]:
    """List the lines of several ascending periods of one account; the latest names count."""
    entries: dict[int, dict[int, list[wire.MarketingSource]]] = {}
    names: dict[int, str] = {}
    for item in fetched:
        for brand in item.report.brands:
            names[brand.id] = named(brand.id, brand.name)
            for entry in brand.marketing_sources:
                entries.setdefault(brand.id, {}).setdefault(entry.id, []).append(entry)
    brands: _Brands = [
        (names[brand_id], [(named(source_id, found[-1].name), found) for source_id, found in sorted(sources.items())])
        for brand_id, sources in sorted(entries.items())
    ]
    return list(_lines(brands))


def _lines(brands: _Brands) -> Iterator[Line]:
    for brand, sources in brands:
        for source, entries in sources:
            yield Line("source", brand, source, entries, has_next=len(sources) > 1)
        if len(sources) > 1:
            yield Line("brand", brand, "", [entry for _, entries in sources for entry in entries])
    if len([brand for brand, sources in brands if sources]) > 1:
        yield Line("account", "", "", [entry for _, sources in brands for _, entries in sources for entry in entries])


def shows_currency(lines: Iterable[Line], reporting_currency: str | None) -> bool:
    """Return whether the lines need a currency of their own because some differ from that of the account."""
    return any(
        name != reporting_currency or (rate is not None and rate != 1)
        for name, rate in currencies(entry for line in lines for entry in line.entries)
    )
