"""The tables of the page: every figure, and the documents that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import groupby
from typing import Final

from shipper.model import wire
from shipper.report.metrics import METRICS, Metric, added, currencies
from shipper.report.page.account import Account
from shipper.report.page.markup import Html, minus, section, sub, table, tag
from shipper.report.rows import Fetched, Line, lines_of, lines_over, shows_currency
from shipper.report.wording import (
    SEVERAL_CURRENCIES,
    moment,
    money,
    period,
    short_period,
    with_code,
    with_sign,
    written,
)

_CENTS: Final = 2


def figures(account: Account) -> Html:
    """Show all figures of all periods, the latest first; before them what may be added over the periods."""
    parts = []
    if account.is_series and account.may_add_periods:
        additive = [metric for metric in METRICS if metric.is_additive and account.may_compare(metric)]
        first, last = (account.periods[end].report.reporting_period for end in (0, -1))
        which = account.covered or f"All {len(account.periods)} periods"
        title = f"{which}, {short_period(first)} to {short_period(last)}"
        parts.append(_details(title, account.latest, lines_over(account.periods), additive, is_open=False))
    for item in reversed(account.periods):
        title = period(item.report.reporting_period)
        is_latest = item is account.latest
        parts.insert(
            0 if is_latest else len(parts),
            _details(title, item, lines_of(item.report), METRICS, is_open=is_latest, is_restated=item.is_restated),
        )
    return section(
        "All figures",
        sub(
            "As the documents have them; an adjustment stands under its result. Customers and balances are not added, "
            "nor is money of several currencies or exchange rates, and there is no sum where a figure is missing."
        ),
        None if account.has_one_currency else sub(SEVERAL_CURRENCIES),
        *parts,
    )


def _details(
    title: str,
    item: Fetched,
    lines: list[Line],
    metrics: Sequence[Metric],
    *,
    is_open: bool,
    is_restated: bool = False,
) -> Html:
    shown = (
        _table(lines, metrics, item.report.reporting_currency, title)
        if lines
        else sub("No brand has figures in this period.")
    )
    return tag(
        "details",
        tag("summary", title, tag("span", "restated", class_="badge") if is_restated else None),
        shown,
        open="" if is_open else None,
    )


def _table(lines: list[Line], metrics: Sequence[Metric], reporting_currency: str, title: str) -> Html:
    has_currency = shows_currency(lines, reporting_currency)
    groups = [(group, list(found)) for group, found in groupby(metrics, key=lambda metric: metric.group)]
    first_of_group = {found[0].name for _, found in groups}
    names = ["Brand and marketing source", *(["Currency"] if has_currency else [])]
    head = [
        tag(
            "tr",
            *(tag("th", name, rowspan=2, scope="col", class_="name") for name in names),
            *(tag("th", group, colspan=len(found), scope="colgroup", class_="first") for group, found in groups),
        ),
        tag(
            "tr",
            *(
                tag("th", metric.title, scope="col", class_="first" if metric.name in first_of_group else None)
                for metric in metrics
            ),
        ),
    ]
    bodies = []
    for brand, found in groupby(lines, key=lambda line: line.brand):
        rows = [_row(line, metrics, first_of_group, has_currency=has_currency) for line in found]
        columns = len(metrics) + len(names)
        title_row = tag("tr", tag("th", tag("bdi", brand), colspan=columns, scope="rowgroup"), class_="head")
        bodies.append(tag("tbody", title_row if brand else None, *rows))
    return table(title, head, bodies, is_card=False)


def _row(line: Line, metrics: Sequence[Metric], first_of_group: set[str], *, has_currency: bool) -> Html:
    labels = {"source": line.source, "brand": "Total", "account": "All brands"}
    found = currencies(line.entries)
    return tag(
        "tr",
        tag("th", tag("bdi", labels[line.kind]), scope="row"),
        tag("td", with_code(*found[0]) if len(found) == 1 else "", class_="text") if has_currency else None,
        *(
            tag(
                "td",
                *_cell(metric, added(metric, line.entries)),
                class_="first" if metric.name in first_of_group else None,
            )
            for metric in metrics
        ),
        class_=line.kind,
    )


def _cell(metric: Metric, figure: wire.AmountPair) -> Iterator[Html]:
    if figure.result is not None:
        yield _exact(written(metric, figure.result), figure.result, None if figure.result else "nil")
    if figure.adjustment:
        text = with_sign(written(metric, figure.adjustment), figure.adjustment)
        yield tag("div", "adj ", _exact(text, figure.adjustment, None), class_="adj")


def _exact(text: str, value: Decimal, class_: str | None) -> Html:
    """Show all decimals; those beyond the cents step back."""
    whole, point, decimals = text.partition(".")
    tail = tag("i", decimals[_CENTS:]) if decimals[_CENTS:] else None
    return tag("data", minus(f"{whole}{point}{decimals[:_CENTS]}"), tail, value=f"{value:f}", class_=class_)


def documents(account: Account) -> Html:
    """List the documents, one a period: what they say of the whole account, and which version they are."""
    balances = ("Opening balance", "Outgoing balance")
    titles = ("Period", "Currency", *balances, "Made at", "Fetched at", "Checksum")
    columns = [tag("th", title, scope="col", class_=None if title in balances else "text") for title in titles]
    body = tag("tbody", *map(_document, reversed(account.periods)))
    return section("Documents", table("Documents", [tag("tr", *columns)], [body]))


def _document(item: Fetched) -> Html:
    report = item.report
    balances = [
        tag("td", None if amount is None else _exact(money(amount), amount, None))
        for amount in (report.opening_balance, report.outgoing_balance)
    ]
    stated = report.reporting_period
    return tag(
        "tr",
        tag(
            "th",
            tag("span", period(stated), title=f"{stated.start} to {stated.end}"),
            tag("span", "restated", class_="badge") if item.is_restated else None,
            scope="row",
        ),
        tag("td", tag("bdi", report.reporting_currency), class_="text"),
        *balances,
        *(
            tag("td", tag("span", moment(at), title=at), class_="text")
            for at in (report.reporting_time, item.fetched_at)
        ),
        tag("td", tag("code", (report.last_check_sum or "")[:12], title=report.last_check_sum), class_="text"),
    )
