"""The key figures of the latest period, and their changes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Final, NamedTuple

from shipper.model import wire
from shipper.model.units import several
from shipper.report.formatting import clean, currency, days_of, is_whole_month, period, short_figure, with_sign
from shipper.report.metrics import (
    BALANCE,
    CLICKS,
    CPA,
    FEES,
    NET_REVENUE,
    NEW_CUSTOMERS,
    REGISTRATIONS,
    REV_SHARE,
    Metric,
    currencies,
    minus,
    sum_of,
    upper_bound,
)
from shipper.report.page.account import Account
from shipper.report.page.markup import Html, data, secondary, section, tag, with_minus_signs
from shipper.report.rows import ReportVersion

_METRICS: Final = (CLICKS, REGISTRATIONS, NEW_CUSTOMERS, NET_REVENUE, REV_SHARE, CPA, FEES)


class _Value(NamedTuple):
    """A figure of the whole account; the unit is its currency, or empty."""

    unit: str
    total: Decimal | None
    adjustment: Decimal | None = None


def key_figures(account: Account) -> Html:
    """Render the latest period's figures, compared with the previous period's if possible."""
    lengths = [(last - first).days + 1 for first, last in _latest_days(account)]
    are_alike = len(set(lengths)) < 2 or all(is_whole_month(*days) for days in _latest_days(account))
    note = "Result plus adjustment, all brands."
    if account.is_series:
        previous = period(account.periods[-2].report.reporting_period)
        if len(set(lengths)) == 2:
            previous += f", which has {several(lengths[1], 'day')} and not {lengths[0]}"
        note += f" Compared with {previous}." if are_alike else f" Only the balance is compared with {previous}."
    tiles = [_metric_tile(account, metric, may_compare=are_alike) for metric in _METRICS]
    return section(
        f"Key figures, {period(account.latest.report.reporting_period)}",
        secondary(note),
        tag("div", *tiles, _balance_tile(account), class_="tiles"),
    )


def _latest_days(account: Account) -> list[tuple[date, date]]:
    """Return the days of the latest and the previous period, if they consist of whole days."""
    return list(filter(None, (days_of(item.report.reporting_period) for item in account.periods[:-3:-1])))


def _metric_tile(account: Account, metric: Metric, *, may_compare: bool) -> Html:
    values, *before = [_values(metric, account.entries(item)) for item in account.periods[:-3:-1]]
    is_bound = not metric.is_additive and len(account.entries(account.latest)) > 1
    notes: list[Html | None] = []
    if is_bound:
        notes.append(tag("p", "if nobody used two sources", class_="note"))
    elif len(values) == 1:
        notes.append(_note("of which adjustments", metric, values[0].adjustment))
    if account.is_series and metric.is_additive and account.may_add_periods and account.may_compare(metric):
        total = sum_of(metric, [entry for item in account.periods for entry in account.entries(item)]).total
        notes.append(_note(account.covered or f"all {len(account.periods)} periods", metric, total))
    may_compare = may_compare and account.may_compare(metric) and not is_bound
    return _tile(metric, metric.title, values, before[0] if before and may_compare else (), notes, is_bound=is_bound)


def _values(metric: Metric, entries: list[wire.MarketingSource]) -> list[_Value]:
    """Add a metric over all sources or, for money, by currency and rate."""
    if not metric.is_additive and len(entries) > 1:
        return [_Value("", upper_bound(metric, entries))]
    if not metric.is_money:
        figure = sum_of(metric, entries)
        return [_Value("", figure.total, figure.adjustment)]
    values = []
    for name, rate in currencies(entries):
        same = [entry for entry in entries if (entry.reporting_currency, entry.exchange_rate) == (name, rate)]
        figure = sum_of(metric, same)
        values.append(_Value(currency(name, rate, has_code=False), figure.total, figure.adjustment))
    return values or [_Value("", None)]


def _balance_tile(account: Account) -> Html:
    def balance(item: ReportVersion) -> list[_Value]:
        return [_Value(clean(item.report.reporting_currency), item.report.outgoing_balance)]

    values, *before = map(balance, account.periods[:-3:-1])
    notes = [_note("opened with", BALANCE, account.latest.report.opening_balance)]
    return _tile(BALANCE, "Outgoing balance of the account", values, before[0] if before else (), notes)


def _tile(
    metric: Metric,
    title: str,
    values: Sequence[_Value],
    before: Sequence[_Value],
    notes: Sequence[Html | None],
    *,
    is_bound: bool = False,
) -> Html:
    """Render a tile of one value or several that are not additive; `before` is empty if they cannot be compared."""
    shown = [
        tag(
            "p",
            tag("small", "at most ") if is_bound and value.total is not None else None,
            tag("span", "missing", class_="none")
            if value.total is None
            else data(value.total, short_figure(metric, value.total)),
            tag("small", f" {value.unit}") if value.unit else None,
            class_="value" if len(values) == 1 else "value several",
        )
        for value in values
    ]
    is_comparable = len(values) == len(before) == 1 and values[0].unit == before[0].unit
    change = _change(metric, values[0].total, before[0].total) if is_comparable else None
    return tag("div", tag("h3", title), *shown, change, *notes, class_="tile", id=f"key-{metric.name}")


def _note(label: str, metric: Metric, value: Decimal | None) -> Html | None:
    return tag("p", f"{label} ", data(value, short_figure(metric, value)), class_="note") if value else None


def _change(metric: Metric, value: Decimal | None, previous: Decimal | None) -> Html | None:
    """Render the difference to the previous period, neutrally: the document does not say whether more is better."""
    if value is None or previous is None:
        return None
    change = minus(value, previous)
    if not change:
        return tag("p", "unchanged", class_="change")
    arrow = "\N{BLACK UP-POINTING TRIANGLE}" if change > 0 else "\N{BLACK DOWN-POINTING TRIANGLE}"
    percent = f"{with_sign(with_minus_signs(f'{change / abs(previous) * 100:,.1f}'), change)} %, " if previous else ""
    amount = with_sign(short_figure(metric, change), change)
    return tag("p", tag("span", arrow, class_="arrow"), f" {percent}", data(change, amount), class_="change")
