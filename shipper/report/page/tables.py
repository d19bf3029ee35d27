"""The tables of the page: conversions by brand, all figures, and the documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import groupby, pairwise
from typing import Final

from shipper.model import wire
from shipper.report.formatting import SEVERAL_CURRENCIES, figure, moment, money, number, period, with_sign
from shipper.report.metrics import CLICKS, METRICS, NEW_CUSTOMERS, REGISTRATIONS, Metric, sum_of, upper_bound
from shipper.report.page.account import Account, BrandGroup
from shipper.report.page.markup import Html, data, plain_table, secondary, section, table, tag, with_minus_signs
from shipper.report.rows import Line, ReportVersion, lines_of, lines_over, shows_currency

_CENTS: Final = 2


def conversions(account: Account) -> Html:
    """Render how many clicks become customers of each brand, for the latest period and for all."""
    title = period(account.latest.report.reporting_period)
    metrics = (CLICKS, REGISTRATIONS, NEW_CUSTOMERS)
    parts = [_conversions(account, account.periods[-1:], metrics, title)]
    if account.is_series:
        parts.insert(0, tag("h3", title))
        if account.may_add_periods:
            note = (
                "Depositing customers are omitted, because a customer who deposits in two periods would be counted "
                "twice."
            )
            table_over = _conversions(account, account.periods, metrics[:-1], account.all_periods)
            parts += [tag("h3", account.all_periods), secondary(note), table_over]
        else:
            parts.append(secondary("The periods overlap, so their figures are not added up."))
    note = (
        "A customer may have used two sources of a brand, so new depositing customers of several sources are an upper "
        "bound."
    )
    return section("From click to customer", secondary(note), *parts)


def _conversions(account: Account, periods: Sequence[ReportVersion], metrics: Sequence[Metric], title: str) -> Html:
    columns = ["Brand", metrics[0].title]
    for before, metric in pairwise(metrics):
        columns += [metric.title, f"of {before.title.lower()}"]
    rows = []
    for brand in account.brands:
        entries = [entry for item in periods for entry in account.entries(item, brand)]
        if entries:
            rows.append(_conversion_row(brand, entries, metrics))
    return plain_table(f"From click to customer, {title}", columns, rows, texts={"Brand"})


def _conversion_row(brand: BrandGroup, entries: Sequence[wire.MarketingSource], metrics: Sequence[Metric]) -> Html:
    cells: list[Html] = []
    before: Decimal | None = None
    for metric in metrics:
        is_bound = not metric.is_additive and len(entries) > 1
        total = upper_bound(metric, entries) if is_bound else sum_of(metric, entries).total
        bound = "at most " if is_bound and total is not None else ""
        cells.append(tag("td", bound, "missing" if total is None else data(total, number(total))))
        if metric is not metrics[0]:
            share = f"{bound}{total / before:.1%}" if total is not None and before else ""
            cells.append(tag("td", with_minus_signs(share)))
        before = total
    return tag("tr", tag("th", tag("bdi", brand.name), scope="row"), *cells, class_="source")


def figures(account: Account) -> Html:
    """Render all figures, latest period first, followed by the sums over the periods."""
    parts = []
    for item in reversed(account.periods):
        is_latest = item is account.latest
        title = period(item.report.reporting_period)
        parts.append(_details(title, item, lines_of(item.report), METRICS, is_open=is_latest, badge=_badge(item)))
        if is_latest and account.is_series and account.may_add_periods:
            additive = [metric for metric in METRICS if metric.is_additive and account.may_compare(metric)]
            parts.append(_details(account.all_periods, item, lines_over(account.periods), additive))
    return section(
        "All figures",
        secondary(
            "Figures as in the reports; adjustments are below their results. Customers, balances, and amounts in "
            "different currencies or with different exchange rates are not added up, and there is no sum if a figure "
            "is missing."
        ),
        None if account.has_one_currency else secondary(SEVERAL_CURRENCIES),
        *parts,
    )


def _badge(item: ReportVersion) -> Html | None:
    return tag("span", "restated", class_="badge") if item.is_restated else None


def _details(
    title: str,
    item: ReportVersion,
    lines: list[Line],
    metrics: Sequence[Metric],
    *,
    is_open: bool = False,
    badge: Html | None = None,
) -> Html:
    content = (
        _figure_table(lines, metrics, item.report.reporting_currency, title)
        if lines
        else secondary("No brand has figures in this period.")
    )
    return tag("details", tag("summary", title, badge), content, open="" if is_open else None)


def _figure_table(lines: list[Line], metrics: Sequence[Metric], reporting_currency: str, title: str) -> Html:
    has_currency = shows_currency(lines, reporting_currency)
    groups = [(group, list(members)) for group, members in groupby(metrics, key=lambda metric: metric.group)]
    classes = {members[0].name: "first" for _, members in groups}
    names = ["Brand and marketing source", *(["Currency"] if has_currency else [])]
    head = [
        tag(
            "tr",
            *(tag("th", name, rowspan=2, scope="col", class_="name") for name in names),
            *(tag("th", group, colspan=len(members), scope="colgroup", class_="first") for group, members in groups),
        ),
        tag("tr", *(tag("th", metric.title, scope="col", class_=classes.get(metric.name)) for metric in metrics)),
    ]
    bodies = []
    for brand, brand_lines in groupby(lines, key=lambda line: line.brand):
        rows = []
        if brand:
            name = tag("th", tag("bdi", brand), colspan=len(metrics) + len(names), scope="rowgroup")
            rows.append(tag("tr", name, class_="head"))
        for line in brand_lines:
            cells = [
                tag("td", *_cell(metric, sum_of(metric, line.entries)), class_=classes.get(metric.name))
                for metric in metrics
            ]
            if has_currency:
                cells.insert(0, tag("td", line.currency, class_="text"))
            label = {"source": line.source, "brand": "Total", "account": "All brands"}[line.kind]
            rows.append(tag("tr", tag("th", tag("bdi", label), scope="row"), *cells, class_=line.kind))
        bodies.append(tag("tbody", *rows))
    return table(title, head, bodies, is_card=False)


def _cell(metric: Metric, value: wire.AmountPair) -> Iterator[Html]:
    if value.result is not None:
        yield _exact(figure(metric, value.result), value.result, None if value.result else "nil")
    if value.adjustment:
        text = with_sign(figure(metric, value.adjustment), value.adjustment)
        yield tag("div", "adj ", _exact(text, value.adjustment), class_="adj")


def _exact(text: str, value: Decimal, class_: str | None = None) -> Html:
    """Render all decimals; those beyond cents are less prominent."""
    whole, point, decimals = text.partition(".")
    tail = tag("i", decimals[_CENTS:]) if decimals[_CENTS:] else None
    return tag("data", with_minus_signs(f"{whole}{point}{decimals[:_CENTS]}"), tail, value=f"{value:f}", class_=class_)


def documents(account: Account) -> Html:
    """Render the documents, one per period: figures of the whole account, and the version."""
    texts = ("Period", "Currency", "Generated at", "Fetched at", "Checksum")
    columns = ("Period", "Currency", "Opening balance", "Outgoing balance", *texts[2:])
    return section(
        "Documents", plain_table("Documents", columns, map(_document, reversed(account.periods)), texts=texts)
    )


def _document(item: ReportVersion) -> Html:
    report, stated = item.report, item.report.reporting_period
    return tag(
        "tr",
        tag("th", tag("span", period(stated), title=f"{stated.start} to {stated.end}"), _badge(item), scope="row"),
        tag("td", tag("bdi", report.reporting_currency), class_="text"),
        *(
            tag("td", None if amount is None else _exact(money(amount), amount))
            for amount in (report.opening_balance, report.outgoing_balance)
        ),
        *(
            tag("td", tag("span", moment(at), title=at), class_="text")
            for at in (report.reporting_time, item.fetched_at)
        ),
        tag("td", tag("code", (report.last_check_sum or "")[:12], title=report.last_check_sum), class_="text"),
    )
