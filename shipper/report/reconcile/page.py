"""A reconciliation as one page of HTML that needs nothing else, in the manner of the report's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import groupby
from typing import Final

from shipper.model.units import several
from shipper.report.page.markup import Html, data, document, header, section, sub, table, tag
from shipper.report.ranges import DateRange
from shipper.report.reconcile.rows import Pair, Reconciliation, Row
from shipper.report.reconcile.words import (
    LeftOut,
    Names,
    coverage,
    headlines,
    left_out,
    remarks,
    said_of,
    span_of,
    totals_of,
)
from shipper.report.wording import days_in_words, moment, number, with_days_in_words, with_sign

_STYLE: Final = """
.said { white-space: normal; min-width: 220px; }
.verdict { font-size: 17px; font-weight: 600; margin-top: 22px; max-width: 80ch; }
thead tr:last-child th:first-child { padding-left: 18px; }
tr.unexplained data.rest { color: var(--accent); font-weight: 650; }
"""
_WORDS: Final = {"What explains it", "Why"}
_FIGURES: Final = ("Accepted", "Result", "Adjustment", "Reported", "Difference", "Unexplained", "Dead letters")


def render_page(found: Reconciliation, notes: Sequence[str], *, made_at: str, shows_all: bool) -> str:
    """
    Make the page.

    Args:
        notes: What is to be known besides, one sentence each.
        made_at: ISO 8601.
        shows_all: List also what is of other accounts.
    Returns:
        An HTML document, to be written as UTF-8.
    """
    names = Names(found)
    differing = [row for row in found.rows if row.difference]
    sections = [
        _head(found, names, made_at),
        section("Key figures", _tiles(found)),
        section("What differs", _rows(differing, names, "What differs") if differing else sub("Nothing.")),
        section("Brands and marketing sources", _by_pair(found, names)),
        section("All periods", *_by_period(found, names)),
    ]
    for why, lines in groupby(left_out(found, shows_elsewhere=shows_all), key=lambda each: each.why):
        sections.append(section(why.capitalize(), _left_out(lines, names, why)))
    said = [*remarks(found, shows_elsewhere=shows_all), *notes]
    footer = section("Notes", tag("ul", *(tag("li", with_days_in_words(each)) for each in said))) if said else None
    title = f"Reconciliation: {names.account}"
    return document(title, tag("main", *sections), tag("footer", footer), style=_STYLE)


def _head(found: Reconciliation, names: Names, made_at: str) -> Html:
    facts = {
        "Account": str(found.account),
        "Days are those of": found.days.name,
        "Reports": coverage(found) or f"{len(found.periods):,}",
        "Made at": moment(made_at),
    }
    verdict = [tag("p", with_days_in_words(line), class_="verdict") for line in headlines(found)]
    return header(
        "Reconciliation of registrations", names.account, days_in_words(*span_of(found)), facts, lines=verdict
    )


def _tiles(found: Reconciliation) -> Html:
    totals = totals_of(found.rows)
    covered = f"; {coverage(found)}" if coverage(found) else ""
    shown = {
        "Accepted by the service": (totals.accepted, "what the ledger counts"),
        "Registrations in the report": (totals.reported, "result and adjustment together"),
        "Difference": (totals.difference, "below zero: missing from the report"),
        "Unexplained": (totals.missing + totals.surplus, f"in {several(found.count('unexplained'), 'line')}"),
    }
    tiles = [
        tag(
            "div",
            tag("h3", title),
            tag("p", data(value, number(value)), class_="value"),
            tag("p", f"{words}{covered}", class_="note"),
            class_="tile",
        )
        for title, (value, words) in shown.items()
    ]
    return tag("div", *tiles, class_="tiles")


def _by_pair(found: Reconciliation, names: Names) -> Html:
    ordered = sorted(found.rows, key=lambda row: row.pair.place)
    lines = [
        tag("tr", *_names(names.brand(pair), names.source(pair)), *_figures(totals_of(rows)), class_="source")
        for pair, rows in groupby(ordered, key=lambda row: row.pair)
    ]
    title = f"All brands ({coverage(found)})" if coverage(found) else "All brands"
    total = tag("tr", *_names(title, ""), *_figures(totals_of(found.rows)), class_="account")
    return _table(("Brand", "Marketing source"), _FIGURES, [*lines, total], "Brands and marketing sources")


def _by_period(found: Reconciliation, names: Names) -> list[Html]:
    parts = []
    for days, group in groupby(found.rows, key=lambda row: row.days):
        rows = list(group)
        statuses = [status for status in ("unexplained", "provisional") if any(row.status == status for row in rows)]
        title = days_in_words(*days)
        badges = [tag("span", status, class_="badge") for status in statuses]
        parts.append(tag("details", tag("summary", title, *badges), _rows(rows, names, title, is_bare=True)))
    return parts or [sub("Nothing was accepted or reported.")]


def _rows(rows: Iterable[Row], names: Names, title: str, *, is_bare: bool = False) -> Html:
    lines = [
        tag(
            "tr",
            *_place(row.days, row.pair, names),
            *_figures(totals_of([row]), has_report=row.result is not None),
            tag("td", with_days_in_words(said_of(row)) or row.status, class_="text said"),
            class_=f"source {row.status}",
        )
        for row in rows
    ]
    heads = ("Period", "Brand", "Marketing source")
    return _table(heads, (*_FIGURES, "What explains it"), lines, title, is_bare=is_bare)


def _left_out(lines: Iterable[LeftOut], names: Names, title: str) -> Html:
    rows = [
        tag(
            "tr",
            *_place(each.days, each.pair, names),
            tag("td", data(Decimal(each.accepted), f"{each.accepted:,}")),
            tag("td", with_days_in_words(each.words), class_="text said"),
            class_="source",
        )
        for each in lines
    ]
    return _table(("Period", "Brand", "Marketing source"), ("Accepted", "Why"), rows, title)


def _table(
    names: Sequence[str], figures: Sequence[str], lines: Sequence[Html], title: str, *, is_bare: bool = False
) -> Html:
    heads = [tag("th", name, scope="col", class_="text") for name in names]
    heads += [tag("th", name, scope="col", class_="text" if name in _WORDS else None) for name in figures]
    return table(title, [tag("tr", *heads)], [tag("tbody", *lines)], is_card=not is_bare)


def _place(days: DateRange, pair: Pair | None, names: Names) -> list[Html]:
    return _names(days_in_words(*days), *names.place(days, pair)[1:])


def _names(first: str, *others: str) -> list[Html]:
    return [
        tag("th", tag("bdi", first), scope="row"),
        *(tag("td", tag("bdi", other), class_="text") for other in others),
    ]


def _figures(totals: tuple[Decimal, ...], *, has_report: bool = True) -> Iterable[Html]:
    accepted, result, adjustment, reported, difference, dead_letters, unexplained, *_ = totals
    yield _cell(accepted)
    for value in (result, adjustment, reported):
        yield _cell(value) if has_report else tag("td")
    yield _cell(difference, is_signed=True)
    yield _cell(unexplained, is_signed=True, class_="rest")
    yield _cell(dead_letters)


def _cell(value: Decimal, *, is_signed: bool = False, class_: str | None = None) -> Html:
    text = with_sign(number(value), value) if is_signed else number(value)
    return tag("td", data(value, text, class_=class_ if value else "nil"))
