"""
Generates plausible figures for the daily report, deterministic for a seed.

The figures of each day and deal are derived from a hash. So the figures of any period are the sums of its days, and a
balance is the sum since `FIRST_DAY`. Sums of months are cached, because a balance covers about 40,000 days of deals.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from typing import Final, NamedTuple

from shipper.model.wire import AmountPair, Conversions, DepositFigures, Deposits, MarketingSource

# All figures outside these days are zero, which limits the cost of balances and of very long periods.
FIRST_DAY: Final = date(2020, 1, 1)
LAST_DAY: Final = date(2039, 12, 31)

REVENUE_SHARE_PERCENT: Final = 30
CPA_RATE: Final = Decimal("40.0000")

_UNITS: Final = 10_000  # money is computed in integer ten-thousandths, and converted to Decimal once per period
_CPA_UNITS: Final = int(CPA_RATE * _UNITS)
_FEE_DIVISOR: Final = 50
_RETURNS_DIVISOR: Final = 8  # one in 8 returning customers beyond the busiest day's is a different person
_MONTHS_KEPT: Final = 8192  # more than the 3,600 months of all sample deals

CURRENCY: Final = "Euro"

_DRAWS: Final = Struct("<8I")  # a digest as eight integers


class Deal(NamedTuple):
    """A brand and marketing source of an account; `seed` selects its figures."""

    seed: int
    account_id: int
    brand_id: int
    source_id: int


class Stretch(NamedTuple):
    """Consecutive days of one month; both ends are included."""

    first: date
    last: date
    revisions: tuple[int, ...]  # how often each day was restated


class Sums(NamedTuple):
    """Figures of one or more days; money is in ten-thousandths."""

    clicks: int
    new_customers: int
    new_customers_adjustment: int
    new_amount: int
    returning_customers: int
    returning_amount: int
    net_revenue: int
    net_revenue_adjustment: int
    rev_share: int
    rev_share_adjustment: int
    fees: int
    fees_adjustment: int


class Month(NamedTuple):
    """The sums of a stretch; a customer who returns on several days is counted on each of them."""

    sums: Sums
    most_returning: int


_NO_SUMS: Final = Sums(*[0] * len(Sums._fields))


def stretches(start: date, end: date, restated: Mapping[date, int]) -> list[Stretch]:
    """Split a period, both ends included, by month, and limit it to `FIRST_DAY` and `LAST_DAY`."""
    first, end = max(start, FIRST_DAY), min(end, LAST_DAY)
    parts = []
    while first <= end:
        last = min(end, first.replace(day=monthrange(first.year, first.month)[1]))
        days = range((last - first).days + 1)
        parts.append(Stretch(first, last, tuple(restated.get(first + timedelta(day), 0) for day in days)))
        first = last + timedelta(days=1)
    return parts


def marketing_source(deal: Deal, period: Iterable[Stretch], registrations: AmountPair) -> MarketingSource:
    """
    Return a deal's entry in the report of a period; money has four decimals.

    All figures add up over time except distinct customers, as a customer who returns on two days is counted once: a
    period has at least as many as its busiest day, and at most the sum of its days.
    """
    months = [month_of(deal, stretch) for stretch in period]
    sums = _added(month.sums for month in months)
    most = max((month.most_returning for month in months), default=0)
    returning = most + (sums.returning_customers - most) // _RETURNS_DIVISOR
    new = _counts(sums.new_customers, sums.new_customers_adjustment)
    return MarketingSource(
        id=deal.source_id,
        name="",
        reporting_currency=CURRENCY,
        exchange_rate=Decimal("1.0000"),
        active_customers=_counts(sums.new_customers + returning, sums.new_customers_adjustment),
        conversions=Conversions(clicks=Decimal(sums.clicks), qualified_conversions=new, registrations=registrations),
        deposits=Deposits(
            new_depositing_customers=DepositFigures(new, _money(sums.new_amount)),
            returning_depositing_customers=DepositFigures(_counts(returning), _money(sums.returning_amount)),
        ),
        net_revenue=_money(sums.net_revenue, sums.net_revenue_adjustment),
        rev_share=_money(sums.rev_share, sums.rev_share_adjustment),
        cpa_revenue=_money(sums.new_customers * _CPA_UNITS, sums.new_customers_adjustment * _CPA_UNITS),
        fees=_money(sums.fees, sums.fees_adjustment),
        outgoing_balance=_earned(sums),
    )


def earned(deal: Deal, period: Iterable[Stretch]) -> Decimal:
    """Return the amount that a period adds to the account's balance."""
    return _earned(_added(month_of(deal, stretch).sums for stretch in period))


@lru_cache(_MONTHS_KEPT)
def month_of(deal: Deal, stretch: Stretch) -> Month:
    """Generate and add up the days of a stretch."""
    seed, account_id, brand_id, source_id = deal
    size = 1 + sha256(f"{seed},{account_id},{brand_id},{source_id}".encode()).digest()[0] % 6
    days = []
    for number, revision in enumerate(stretch.revisions):
        day = stretch.first + timedelta(number)
        text = f"{seed},{account_id},{day.isoformat()},{brand_id},{source_id},{revision}"
        days.append(_day_of(sha256(text.encode()).digest(), size))
    return Month(_added(days), max(day.returning_customers for day in days))


def _day_of(digest: bytes, size: int) -> Sums:
    """Derive the figures of one day from its hash; `size` is the marketing source's activity, 1..6."""
    visits, firsts, returns, first_stake, return_stake, luck, correction, refund = _DRAWS.unpack(digest)
    new = firsts % (size + 2)
    returning = returns % (9 * size)
    new_amount = new * (10 * _UNITS + first_stake % (90 * _UNITS))
    returning_amount = returning * (15 * _UNITS + return_stake % (185 * _UNITS))
    net = (new_amount + returning_amount) * (luck % 46 - 12) // 100  # negative on one day in four
    net_adjustment = -net // 20 if correction % 16 == 0 else 0
    share = max(net, 0) * REVENUE_SHARE_PERCENT // 100
    corrected_share = max(net + net_adjustment, 0) * REVENUE_SHARE_PERCENT // 100
    fees = (share + new * _CPA_UNITS) // _FEE_DIVISOR
    return Sums(
        clicks=size * (15 + visits % 60),  # far more than new customers
        new_customers=new,
        new_customers_adjustment=-1 if new and refund % 24 == 0 else 0,
        new_amount=new_amount,
        returning_customers=returning,
        returning_amount=returning_amount,
        net_revenue=net,
        net_revenue_adjustment=net_adjustment,
        rev_share=share,
        rev_share_adjustment=corrected_share - share,
        fees=-fees,
        fees_adjustment=fees if refund % 40 == 1 else 0,
    )


def _added(rows: Iterable[Sums]) -> Sums:
    return Sums(*map(sum, zip(_NO_SUMS, *rows, strict=True)))


def _earned(sums: Sums) -> Decimal:
    cpa_units = (sums.new_customers + sums.new_customers_adjustment) * _CPA_UNITS
    share = sums.rev_share + sums.rev_share_adjustment
    return Decimal(share + cpa_units + sums.fees + sums.fees_adjustment).scaleb(-4)


def _counts(result: int, adjustment: int = 0) -> AmountPair:
    return AmountPair(Decimal(result), Decimal(adjustment))


def _money(result: int, adjustment: int = 0) -> AmountPair:
    return AmountPair(Decimal(result).scaleb(-4), Decimal(adjustment).scaleb(-4))
