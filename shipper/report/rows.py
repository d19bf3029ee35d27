"""Reports as rows: flat tables for programs, and for humans the marketing sources of brands with totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from operator import attrgetter
from typing import Final, Literal, NamedTuple

from shipper.model import wire
from shipper.report.currencies import is_same_currency
from shipper.report.formatting import currency, label_of
from shipper.report.metrics import METRICS, Metric, currencies

Value = str | int | Decimal | None


class ReportVersion(NamedTuple):
    """A version of a report; `fetched_at` is ISO 8601, or empty if unknown."""

    report: wire.DailyReport
    fetched_at: str = ""
    is_restated: bool = False


class Column(NamedTuple):
    """A column of a flat table: str, int, bool, or three kinds of Decimal; any value may be None."""

    name: str
    kind: Literal["text", "integer", "flag", "count", "money", "rate"]


class FlatTable(NamedTuple):
    """A table whose rows have a value for every column."""

    name: str
    columns: tuple[Column, ...]
    rows: list[tuple[Value, ...]]


# Columns and their attributes.
_HEAD: Final = {
    Column("account_id", "integer"): "report.source.affiliate_account_id",
    Column("account_name", "text"): "report.source.affiliate_account_name",
    Column("operator_name", "text"): "report.source.operator_name",
    Column("period_start", "text"): "report.reporting_period.start",
    Column("period_end", "text"): "report.reporting_period.end",
    Column("reporting_time", "text"): "report.reporting_time",
    Column("fetched_at", "text"): "fetched_at",
    Column("check_sum", "text"): "report.last_check_sum",
    Column("account_currency", "text"): "report.reporting_currency",
}
_ACCOUNT: Final = {
    Column("report_id", "text"): "report.id",
    Column("is_restated", "flag"): "is_restated",
    Column("opening_balance", "money"): "report.opening_balance",
    Column("outgoing_balance", "money"): "report.outgoing_balance",
}
_SOURCE: Final = {
    Column("source_id", "integer"): "id",
    Column("source_name", "text"): "name",
    Column("source_currency", "text"): "reporting_currency",
    Column("exchange_rate", "rate"): "exchange_rate",
}
_head_values: Final = attrgetter(*_HEAD.values())
_account_values: Final = attrgetter(*_ACCOUNT.values())
_source_values: Final = attrgetter(*_SOURCE.values())


def _metric_columns(metric: Metric) -> Iterator[Column]:
    kind: Final = "money" if metric.is_money else "count"
    for part in ("_result", "_adjustment", "_total") if metric.has_adjustment else ("",):
        yield Column(f"{metric.name}{part}", kind)


_SOURCE_COLUMNS: Final = (
    *_HEAD,
    Column("brand_id", "integer"),
    Column("brand_name", "text"),
    *_SOURCE,
    *(column for metric in METRICS for column in _metric_columns(metric)),
)
_ACCOUNT_COLUMNS: Final = (*_HEAD, *_ACCOUNT, Column("brands", "integer"), Column("marketing_sources", "integer"))


def source_table(fetched: Iterable[ReportVersion]) -> FlatTable:
    """Return a table with one row per period, brand and marketing source, in document order."""
    rows = [
        (*_head_values(item), brand.id, brand.name, *_source_values(entry), *_figures(entry))
        for item in fetched
        for brand in item.report.brands
        for entry in brand.marketing_sources
    ]
    return FlatTable("sources", _SOURCE_COLUMNS, rows)


def _figures(entry: wire.MarketingSource) -> Iterator[Decimal | None]:
    for metric in METRICS:
        figure = metric.figure(entry)
        yield figure.result
        if metric.has_adjustment:
            yield figure.adjustment
            yield figure.total


def account_table(fetched: Iterable[ReportVersion]) -> FlatTable:
    """Return a table with one row per account and period."""
    rows = [
        (*_head_values(item), *_account_values(item), len(item.report.brands), len(entries_of(item.report)))
        for item in fetched
    ]
    return FlatTable("accounts", _ACCOUNT_COLUMNS, rows)


def entries_of(report: wire.DailyReport) -> list[wire.MarketingSource]:
    """Return the marketing sources of all brands."""
    return [entry for brand in report.brands for entry in brand.marketing_sources]


def by_account(fetched: Iterable[ReportVersion]) -> list[list[ReportVersion]]:
    """Group versions by account, in order of appearance, periods ascending."""
    accounts: dict[int, list[ReportVersion]] = {}
    for item in fetched:
        accounts.setdefault(item.report.source.affiliate_account_id, []).append(item)
    return [sorted(items, key=_period) for items in accounts.values()]


def are_disjoint(fetched: Sequence[ReportVersion]) -> bool:
    """Return whether ascending periods do not overlap; only then may their figures be added."""
    periods = [_period(item) for item in fetched]
    return all(earlier != later and earlier[1] <= later[0] for earlier, later in pairwise(periods))


def share_currency(fetched: Iterable[ReportVersion]) -> bool:
    """Return whether reports certainly have the same currency; only then may their money be added or compared."""
    first, *others = [item.report.reporting_currency for item in fetched]
    return all(is_same_currency(name, first) for name in others)


def _period(item: ReportVersion) -> tuple[str, str]:
    return item.report.reporting_period.start, item.report.reporting_period.end


class Line(NamedTuple):
    """
    A marketing source, or the total of a brand or the account.

    Attributes:
        source: Number and name; empty in a total.
        entries: 1..n entries to add; one per period for a marketing source.
    """

    kind: Literal["source", "brand", "account"]
    brand: str
    source: str
    entries: list[wire.MarketingSource]

    @property
    def currency(self) -> str:
        """The currency with its rate; empty if the entries have several."""
        pairs = currencies(self.entries)
        return currency(*pairs[0]) if len(pairs) == 1 else ""


# Labels of brands, with the labels and entries of their marketing sources.
_Brands = list[tuple[str, list[tuple[str, list[wire.MarketingSource]]]]]


def lines_of(report: wire.DailyReport) -> list[Line]:
    """Return the lines of one period, in document order."""
    return _lines(
        [
            (
                label_of(brand.id, brand.name),
                [(label_of(entry.id, entry.name), [entry]) for entry in brand.marketing_sources],
            )
            for brand in report.brands
        ]
    )


def lines_over(fetched: Iterable[ReportVersion]) -> list[Line]:
    """Return the lines of ascending periods of one account, with the latest names."""
    entries: dict[int, dict[int, list[wire.MarketingSource]]] = {}
    names: dict[int, str] = {}
    for item in fetched:
        for brand in item.report.brands:
            names[brand.id] = label_of(brand.id, brand.name)
            for entry in brand.marketing_sources:
                entries.setdefault(brand.id, {}).setdefault(entry.id, []).append(entry)
    return _lines(
        [
            (names[brand_id], [(label_of(number, items[-1].name), items) for number, items in sorted(sources.items())])
            for brand_id, sources in sorted(entries.items())
        ]
    )


def _lines(brands: _Brands) -> list[Line]:
    lines = []
    for brand, sources in brands:
        lines += [Line("source", brand, source, entries) for source, entries in sources]
        if len(sources) > 1:
            lines.append(Line("brand", brand, "", [entry for _, entries in sources for entry in entries]))
    if len([brand for brand, sources in brands if sources]) > 1:
        all_entries = [entry for line in lines if line.kind == "source" for entry in line.entries]
        lines.append(Line("account", "", "", all_entries))
    return lines


def shows_currency(lines: Iterable[Line], reporting_currency: str | None) -> bool:
    """Return whether a line has another currency than the account, or an exchange rate."""
    return any(
        name != reporting_currency or (rate is not None and rate != 1)
        for name, rate in currencies(entry for line in lines for entry in line.entries)
    )
