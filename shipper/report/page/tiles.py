"""The key figures of the latest period, and how they changed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from typing import Final, NamedTuple

from shipper.model import wire
from shipper.report.metrics import (
    BALANCE,
    CLICKS,
    CPA,
    FEES,
    NET_REVENUE,
    NEW_CUSTOMERS,
    NOTHING,
    REGISTRATIONS,
    REV_SHARE,
    Metric,
    added,
    at_most,
    currencies,
    difference,
)
from shipper.report.page.account import Account
from shipper.report.page.markup import Html, data, minus, section, sub, tag
from shipper.report.rows import Fetched
from shipper.report.wording import at_a_glance, clean, currency, days_of, is_whole_month, period, with_sign

_SHOWN: Final = (CLICKS, REGISTRATIONS, NEW_CUSTOMERS, NET_REVENUE, REV_SHARE, CPA, FEES)


class _Value(NamedTuple):
    """A figure of the whole account; the unit is its currency, if it is money."""

    unit: str
    figure: wire.AmountPair


def key_figures(account: Account) -> Html:
    """Show the latest period's figures, each beside that of the period before, if there is one."""
    tiles = [_metric_tile(account, metric) for metric in _SHOWN]
    tiles.append(_balance_tile(account))
    return section(
        f"Key figures, {period(account.latest.report.reporting_period)}",
        sub(_compared(account)),
        tag("div", *tiles, class_="tiles"),
    )


def _compared(account: Account) -> str:
    figures = "Result and adjustment together, all brands."
    if not account.is_series:
        return figures
    previous = period(account.periods[-2].report.reporting_period)
    lengths = _lengths(account)
    longer = ""
    if len(set(lengths)) == 2:
        longer = f", which has {lengths[1]} {'day' if lengths[1] == 1 else 'days'} and not {lengths[0]}"
    if _is_comparable(account):
        return f"{figures} Compared with {previous}{longer}."
    return f"{figures} Not compared with {previous}{longer}; only the balance is."


def _lengths(account: Account) -> list[int]:
    """Count the days of the latest period and of the one before; fewer are known if one is not of whole days."""
    return [(last - first).days + 1 for first, last in _latest_two(account)]


def _is_comparable(account: Account) -> bool:
    """Return whether the latest period is as long as the one before, or both are months."""
    return len(set(_lengths(account))) < 2 or all(is_whole_month(*days) for days in _latest_two(account))


def _latest_two(account: Account) -> list[tuple[date, date]]:
    return list(filter(None, (days_of(item.report.reporting_period) for item in account.periods[:-3:-1])))


def _metric_tile(account: Account, metric: Metric) -> Html:
    history = [_values(metric, account.entries(item)) for item in account.periods]
    values = history[-1]
    is_bound = not metric.is_additive and len(account.entries(account.latest)) > 1
    notes: list[Html | None] = []
    if is_bound:
        notes.append(tag("p", "as if nobody came through two sources", class_="note"))
    elif len(values) == 1:
        notes.append(_note("of which adjustments", metric, values[0].figure.adjustment))
    may_compare = account.may_compare(metric)
    if account.is_series and metric.is_additive and account.may_add_periods and may_compare:
        everything = added(metric, [entry for item in account.periods for entry in account.entries(item)]).total
        notes.append(_note(account.covered or f"all {len(account.periods)} periods", metric, everything))
    is_one = all(len(found) == 1 and found[0].unit == values[0].unit for found in history) if values else False
    totals = (
        [found[0].figure.total for found in history]
        if is_one and may_compare and not is_bound and _is_comparable(account)
        else []
    )
    return _tile(metric, metric.title, values, totals, notes, is_bound=is_bound)


def _values(metric: Metric, entries: list[wire.MarketingSource]) -> list[_Value]:
    """Add a metric over all that may be added: everything, or the money of one currency and rate."""
    if not metric.is_additive and len(entries) > 1:
        return [_Value("", wire.AmountPair(at_most(metric, entries), Decimal(0)))]
    if not metric.is_money:
        return [_Value("", added(metric, entries))]
    return [
        _Value(
            currency(name, rate),
            added(metric, [one for one in entries if (one.reporting_currency, one.exchange_rate) == (name, rate)]),
        )
        for name, rate in currencies(entries)
    ]


def _balance_tile(account: Account) -> Html:
    def balance(item: Fetched) -> _Value:
        return _Value(clean(item.report.reporting_currency), wire.AmountPair(item.report.outgoing_balance, Decimal(0)))

    history = [balance(item) for item in account.periods]
    is_one = len({value.unit for value in history}) == 1
    notes = [_note("opened with", BALANCE, account.latest.report.opening_balance)]
    totals = [value.figure.total for value in history] if is_one else []
    return _tile(BALANCE, "Outgoing balance of the account", history[-1:], totals, notes)


def _tile(
    metric: Metric,
    title: str,
    values: list[_Value],
    totals: list[Decimal | None],
    notes: Iterable[Html | None],
    *,
    is_bound: bool = False,
) -> Html:
    """
    Args:
        values: Usually one; several if they may not be added.
        totals: Of all periods, ascending; empty if they cannot be compared.
    """
    shown = [
        tag(
            "p",
            tag("small", "at most ") if is_bound and value.figure.total is not None else None,
            _big(metric, value.figure.total),
            tag("small", f" {value.unit}") if value.unit else None,
            class_="value" if len(values) == 1 else "value several",
        )
        for value in values or [_Value("", NOTHING)]
    ]
    return tag(
        "div",
        tag("h3", title),
        *shown,
        _change(metric, *totals[:-3:-1]) if len(totals) > 1 else None,
        *notes,
        class_="tile",
        id=f"key-{metric.name}",
    )


def _big(metric: Metric, value: Decimal | None) -> Html:
    return tag("span", "missing", class_="none") if value is None else data(value, at_a_glance(metric, value))


def _note(words: str, metric: Metric, value: Decimal | None) -> Html | None:
    return tag("p", f"{words} ", data(value, at_a_glance(metric, value)), class_="note") if value else None


def _change(metric: Metric, value: Decimal | None, previous: Decimal | None) -> Html | None:
    """Show the difference to the period before; the document does not say whether more is better."""
    if value is None or previous is None:
        return None
    change = difference(value, previous)
    if not change:
        return tag("p", "unchanged", class_="change")
    arrow = "\N{BLACK UP-POINTING TRIANGLE}" if change > 0 else "\N{BLACK DOWN-POINTING TRIANGLE}"
    percent = f"{with_sign(minus(f'{change / abs(previous) * 100:,.1f}'), change)} %, " if previous else ""
    amount = with_sign(at_a_glance(metric, change), change)
    return tag("p", tag("span", arrow, class_="arrow"), f" {percent}", data(change, amount), class_="change")
