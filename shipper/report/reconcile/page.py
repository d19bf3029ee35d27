"""A reconciliation as a self-contained HTML page, in the style of the report's page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import groupby
from typing import Final

from shipper.report.formatting import format_days, moment, number, reformat_days, with_sign
from shipper.report.page.markup import Html, data, document, header, plain_table, secondary, section, tag
from shipper.report.ranges import DateRange
from shipper.report.reconcile.model import Excluded, Names, Pair, Reconciliation, Row, Totals, rows_by_pair, totals_of
from shipper.report.reconcile.summary import coverage, headlines, reasons_of, remarks

_FIGURES: Final = ("Accepted", "Result", "Adjustment", "Reported", "Difference", "Unexplained", "Dead letters")
_PLACE: Final = ("Period", "Brand", "Marketing source")
_TEXTS: Final = {*_PLACE, "Explanation", "Why"}


def render_page(result: Reconciliation, notes: Sequence[str], *, made_at: str) -> str:
    """Render the page; `made_at` is ISO 8601."""
    names = Names(result)
    differing = [row for row in result.rows if row.difference]
    sections = [
        _head(result, made_at),
        section("What differs", _rows(differing, names, "What differs") if differing else secondary("Nothing.")),
        section("Brands and marketing sources", _by_pair(result, names)),
        section("All periods", *_by_period(result, names)),
    ]
    for kind, records in groupby(result.listed, key=lambda records: records.kind):
        sections.append(section(kind.capitalize(), _excluded(records, names, kind)))
    items = [tag("li", reformat_days(note)) for note in [*remarks(result), *notes]]
    footer = tag("footer", section("Notes", tag("ul", *items)) if items else None)
    return document(f"Reconciliation: {result.name}", tag("main", *sections), footer)


def _head(result: Reconciliation, made_at: str) -> Html:
    facts = {
        "Account": str(result.account),
        "Time zone": result.days.name,
        "Reports": coverage(result) or f"{len(result.periods):,}",
        "Generated at": moment(made_at),
    }
    lines = [tag("p", reformat_days(line), class_="verdict") for line in headlines(result)]
    return header("Reconciliation of registrations", result.name, format_days(*result.span), facts, lines=lines)


def _by_pair(result: Reconciliation, names: Names) -> Html:
    lines = [
        tag("tr", *_texts(*names.labels(pair)), *_figures(totals_of(rows)), class_="source")
        for pair, rows in rows_by_pair(result.rows)
    ]
    title = f"All brands ({coverage(result)})" if coverage(result) else "All brands"
    lines.append(tag("tr", *_texts(title, ""), *_figures(result.totals), class_="account"))
    return plain_table("Brands and marketing sources", (*_PLACE[1:], *_FIGURES), lines, texts=_TEXTS)


def _by_period(result: Reconciliation, names: Names) -> list[Html]:
    parts = []
    for days, group in groupby(result.rows, key=lambda row: row.days):
        rows = list(group)
        statuses = [status for status in ("unexplained", "provisional") if any(row.status == status for row in rows)]
        title = format_days(*days)
        badges = [tag("span", status, class_="badge") for status in statuses]
        parts.append(tag("details", tag("summary", title, *badges), _rows(rows, names, title, is_card=False)))
    return parts or [secondary("Nothing was accepted or reported.")]


def _rows(rows: Iterable[Row], names: Names, title: str, *, is_card: bool = True) -> Html:
    lines = [
        tag(
            "tr",
            *_place(row.days, row.pair, names),
            *_figures(row, has_report=row.result is not None),
            tag("td", reformat_days(reasons_of(row)) or row.status, class_="text reason"),
            class_=f"source {row.status}",
        )
        for row in rows
    ]
    return plain_table(title, (*_PLACE, *_FIGURES, "Explanation"), lines, texts=_TEXTS, is_card=is_card)


def _excluded(excluded: Iterable[Excluded], names: Names, title: str) -> Html:
    lines = [
        tag(
            "tr",
            *_place(records.days, records.pair, names),
            tag("td", data(Decimal(records.accepted), f"{records.accepted:,}")),
            tag("td", reformat_days(records.reason), class_="text reason"),
            class_="source",
        )
        for records in excluded
    ]
    return plain_table(title, (*_PLACE, "Accepted", "Why"), lines, texts=_TEXTS)


def _place(days: DateRange, pair: Pair | None, names: Names) -> list[Html]:
    return _texts(format_days(*days), *names.labels(pair))


def _texts(first: str, *others: str) -> list[Html]:
    return [
        tag("th", tag("bdi", first), scope="row"),
        *(tag("td", tag("bdi", other), class_="text") for other in others),
    ]


def _figures(figures: Row | Totals, *, has_report: bool = True) -> Iterator[Html]:
    yield _cell(Decimal(figures.accepted))
    for value in (figures.result, figures.adjustment, figures.reported):
        yield _cell(value or Decimal(0)) if has_report else tag("td")
    yield _cell(figures.difference, is_signed=True)
    yield _cell(figures.unexplained, is_signed=True, class_="rest")
    yield _cell(Decimal(figures.dead_letters))


def _cell(value: Decimal, *, is_signed: bool = False, class_: str | None = None) -> Html:
    text = with_sign(number(value), value) if is_signed else number(value)
    return tag("td", data(value, text, class_=class_ if value else "nil"))
