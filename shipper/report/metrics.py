"""
The metrics of a marketing source, in display order, and rules for adding them.

A missing figure is None, never 0. A sum is missing if it lacks a figure, would count a customer twice, or would mix
currencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Final

from shipper.model import wire

# Figures have up to 30 digits on either side of the decimal point; the default context rounds sums to 28.
_EXACT: Final = Context(prec=200, traps=[Inexact, InvalidOperation])


NO_FIGURE: Final = wire.AmountPair()


@dataclass(frozen=True)
class Metric:
    """
    A figure of a marketing source.

    Attributes:
        name: Name of its column, or prefix of its columns.
        group: Heading; the metrics of a group are adjacent.
        short_title: Title without the group's, for narrow tables.
        is_additive: Whether it may be added over marketing sources or periods. Customers may not, as one with two
            sources, or in two periods, would be counted twice; neither may balances.
        has_adjustment: Whether it is a pair of result and adjustment.
    """

    name: str
    path: str
    group: str
    title: str
    short_title: str
    is_money: bool = False
    is_additive: bool = True
    has_adjustment: bool = True

    def figure(self, entry: wire.MarketingSource) -> wire.AmountPair:
        """Return the figure of a marketing source; objects on its path may be missing."""
        value: object = entry
        for name in self.path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, Decimal):
            return wire.AmountPair(value, Decimal(0))
        return value if isinstance(value, wire.AmountPair) else NO_FIGURE


def _customers(name: str, path: str, title: str, short_title: str) -> Metric:
    return Metric(name, path, "Customers", title, short_title, is_additive=False)


def _money(name: str, path: str, group: str, title: str, short_title: str) -> Metric:
    return Metric(name, path, group, title, short_title, is_money=True)


_NEW: Final = "deposits.new_depositing_customers"
_RETURNING: Final = "deposits.returning_depositing_customers"

CLICKS: Final = Metric("clicks", "conversions.clicks", "Conversions", "Clicks", "Clicks", has_adjustment=False)
REGISTRATIONS: Final = Metric(
    "registrations", "conversions.registrations", "Conversions", "Registrations", "Regis-\ntrations"
)
QUALIFIED: Final = Metric(
    "qualified_conversions", "conversions.qualified_conversions", "Conversions", "Qualified conversions", "Qualified"
)
ACTIVE: Final = _customers("active_customers", "active_customers", "Active customers", "Active")
NEW_CUSTOMERS: Final = _customers("new_depositing_customers", f"{_NEW}.customers", "New depositing customers", "NDC")
RETURNING_CUSTOMERS: Final = _customers(
    "returning_depositing_customers", f"{_RETURNING}.customers", "Returning depositing customers", "RDC"
)
NEW_DEPOSITS: Final = _money("new_deposits", f"{_NEW}.amount", "Deposits", "Of new customers", "Deposits\nof NDC")
RETURNING_DEPOSITS: Final = _money(
    "returning_deposits", f"{_RETURNING}.amount", "Deposits", "Of returning customers", "Deposits\nof RDC"
)
NET_REVENUE: Final = _money("net_revenue", "net_revenue", "Revenue", "Net revenue", "Net\nrevenue")
REV_SHARE: Final = _money("rev_share", "rev_share", "Revenue", "Revenue share", "Revenue\nshare")
CPA: Final = _money("cpa_revenue", "cpa_revenue", "Revenue", "CPA", "CPA")
FEES: Final = _money("fees", "fees", "Revenue", "Fees", "Fees")
BALANCE: Final = Metric(
    "outgoing_balance",
    "outgoing_balance",
    "Balance",
    "Outgoing balance",
    "Outgoing\nbalance",
    is_money=True,
    is_additive=False,
    has_adjustment=False,
)

# In display order, from clicks to the balance.
METRICS: Final = (
    *(CLICKS, REGISTRATIONS, QUALIFIED, ACTIVE, NEW_CUSTOMERS, RETURNING_CUSTOMERS, NEW_DEPOSITS, RETURNING_DEPOSITS),
    *(NET_REVENUE, REV_SHARE, CPA, FEES, BALANCE),
)


def sum_of(metric: Metric, entries: Iterable[wire.MarketingSource]) -> wire.AmountPair:
    """
    Add a metric over marketing sources of one period, or of several that do not overlap.

    Returns:
        The exact sum. The figure of a single entry is returned for any metric. `NO_FIGURE` if there is no entry, the
        metric is not additive, a figure is missing, or money has several currencies or exchange rates.
    """
    entries = list(entries)
    figures = [metric.figure(entry) for entry in entries]
    if len(figures) == 1:
        return figures[0]
    if not figures or not metric.is_additive or (metric.is_money and len(currencies(entries)) > 1):
        return NO_FIGURE
    return wire.AmountPair(_sum(figure.result for figure in figures), _sum(figure.adjustment for figure in figures))


def upper_bound(metric: Metric, entries: Iterable[wire.MarketingSource]) -> Decimal | None:
    """Return an upper bound for the customers of several sources: their sum, as if no customer had two sources."""
    totals = [metric.figure(entry).total for entry in entries]
    return _sum(totals) if totals else None


def plus(one: Decimal, other: Decimal | int) -> Decimal:
    """Add exactly; the operators `+` and `-`, also unary, round to 28 digits."""
    return _EXACT.add(one, other)


def minus(one: Decimal, other: Decimal | int) -> Decimal:
    return _EXACT.subtract(one, other)


def currencies(entries: Iterable[wire.MarketingSource]) -> list[tuple[str | None, Decimal | None]]:
    """Return the distinct currencies and rates of marketing sources, in order of appearance."""
    return list(dict.fromkeys((entry.reporting_currency, entry.exchange_rate) for entry in entries))


def _sum(numbers: Iterable[Decimal | None]) -> Decimal | None:
    total: Decimal | None = None
    for number in numbers:
        if number is None:
            return None
        total = number if total is None else plus(total, number)
    return total
