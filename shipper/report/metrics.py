"""
The metrics of a marketing source: the one list that all renderings of the report share, and what may be added.

A metric that is missing in the document is None, never 0. A sum that would lack a figure, count a customer twice or
mix currencies is missing, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Final

from shipper.model import wire

# Figures have up to 30 digits on either side of the point; the default context would round their sum to 28.
_EXACT: Final = Context(prec=200, traps=[Inexact, InvalidOperation])


NOTHING: Final = wire.AmountPair()


@dataclass(frozen=True)
class Metric:
    """
    One figure of a marketing source.

    Attributes:
        name: Its column, or the stem of its columns.
        path: The attributes that lead to it.
        group: What it is about; metrics of one group stand together.
        title: Its name for a reader, under that of the group.
        short_title: Its name by itself where there is little room.
        is_additive: Whether a sum over marketing sources or periods makes sense. A customer is counted once in each:
            who came through two sources, or in two periods, would count twice. A balance is no flow.
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
        """Return the figure of a marketing source; an object that contains it may be missing as well."""
        value: object = entry
        for name in self.path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, Decimal):
            return wire.AmountPair(value, Decimal(0))
        return value if isinstance(value, wire.AmountPair) else NOTHING


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

# From the click to the balance, as a reader follows it.
METRICS: Final = (
    *(CLICKS, REGISTRATIONS, QUALIFIED, ACTIVE, NEW_CUSTOMERS, RETURNING_CUSTOMERS, NEW_DEPOSITS, RETURNING_DEPOSITS),
    *(NET_REVENUE, REV_SHARE, CPA, FEES, BALANCE),
)


def added(metric: Metric, entries: Iterable[wire.MarketingSource]) -> wire.AmountPair:
    """
    Add a metric over marketing sources, of one period or of several that do not overlap.

    Args:
        metric: Any metric; one that is not additive has no sum.
        entries: 0..n; one alone is its own sum, whatever the metric.
    Returns:
        The exact sum; `NOTHING` if there is no entry, a figure is missing, or money is in several currencies or has
        several exchange rates.
    """
    entries = list(entries)
    figures = [metric.figure(entry) for entry in entries]
    if len(figures) == 1:
        return figures[0]
    if not figures or not metric.is_additive or (metric.is_money and len(currencies(entries)) > 1):
        return NOTHING
    return wire.AmountPair(_sum(figure.result for figure in figures), _sum(figure.adjustment for figure in figures))


def at_most(metric: Metric, entries: Iterable[wire.MarketingSource]) -> Decimal | None:
    """
    Return how many customers several marketing sources of one period have at most: as if none came twice.

    Returns:
        None if a figure is missing or there is no entry.
    """
    totals = [metric.figure(entry).total for entry in entries]
    return _sum(totals) if totals else None


def plus(one: Decimal, other: Decimal) -> Decimal:
    """Add, exactly; `+` and the sign `-` round to 28 digits."""
    return _EXACT.add(one, other)


def difference(later: Decimal, earlier: Decimal) -> Decimal:
    """Subtract, exactly."""
    return _EXACT.subtract(later, earlier)


def currencies(entries: Iterable[wire.MarketingSource]) -> list[tuple[str | None, Decimal | None]]:
    """List the currencies of marketing sources with their rates, each once, in the order of their appearance."""
    return list(dict.fromkeys((entry.reporting_currency, entry.exchange_rate) for entry in entries))


def _sum(numbers: Iterable[Decimal | None]) -> Decimal | None:
    total: Decimal | None = None
    for number in numbers:
        if number is None:
            return None
        total = number if total is None else _EXACT.add(total, number)
    return total
