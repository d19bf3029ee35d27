"""
The invented figures of the daily report: plausible, and the same for the same seed.

Every day of every deal is drawn by itself from a hash, so a period is the sum of its days wherever it begins, and
a balance that is carried forward is the sum since `FIRST_DAY`. The sums of a month are kept: the first balance of
today draws some 40,000 days, the next one hardly any.
"""

from __future__ import annotations

from calendar import monthrange
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from typing import Final, NamedTuple

from shipper.model.wire import AmountPair, DepositFigures, Deposits

# Outside these days nothing happened; it bounds what a balance, or a period of thousands of years, draws.
FIRST_DAY: Final = date(2020, 1, 1)
LAST_DAY: Final = date(2039, 12, 31)

REVENUE_SHARE_PERCENT: Final = 30
CPA_RATE: Final = Decimal("40.0000")

_UNITS: Final = 10_000  # money is drawn and added in ten-thousandths, as integers, and made Decimal once a period
_CPA_UNITS: Final = int(CPA_RATE * _UNITS)
_FEE_DIVISOR: Final = 50
_RETURNS_DIVISOR: Final = 8  # of the returning customers beyond the busiest day's, one in so many is another person
_MONTHS_KEPT: Final = 8192  # all months of all sample deals are 3,600

_DRAWS: Final = Struct("<8I")  # the eight numbers of a digest


class Deal(NamedTuple):
    """Whose figures are drawn: one marketing source of an account under one brand."""

    seed: int
    account_id: int
    brand_id: int
    source_id: int


class Stretch(NamedTuple):
    """
    Consecutive days of one month.

    Attributes:
        first: Day of the month.
        last: Day of the month, included.
        revisions: Day of the month and how often it was restated, for those that were, ascending.
    """

    year: int
    month: int
    first: int
    last: int
    revisions: tuple[tuple[int, int], ...]


class PeriodFigures(NamedTuple):
    """
    The figures of one deal in one period; counts are whole, money has four decimals.

    Attributes:
        outgoing_balance: What the period adds to the account's balance.
    """

    clicks: Decimal
    active_customers: AmountPair
    qualified_conversions: AmountPair
    deposits: Deposits
    net_revenue: AmountPair
    rev_share: AmountPair
    cpa_revenue: AmountPair
    fees: AmountPair
    outgoing_balance: Decimal


class Sums(NamedTuple):
    """Figures of one or more days: customers and clicks in whole numbers, money in ten-thousandths."""

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
    """A stretch, added up; customers who return on several days are in the sum on each of them."""

    sums: Sums
    most_returning: int


_NO_SUMS: Final = Sums(*[0] * len(Sums._fields))


def stretches(start: date, end: date, restated: Mapping[date, int]) -> list[Stretch]:
    """
    Cut the period at the ends of months, and to `FIRST_DAY` and `LAST_DAY`.

    Args:
        start: First day.
        end: Last day, included; before `start` it is an empty period.
        restated: How often a day was restated; absent is 0.
    Returns:
        0..n stretches, ascending.
    """
    first, last = max(start, FIRST_DAY), min(end, LAST_DAY)
    revisions = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for day, times in sorted(restated.items()):
        if times and first <= day <= last:
            revisions[day.year, day.month].append((day.day, times))
    found = []
    while first <= last:
        closing = min(last, first.replace(day=monthrange(first.year, first.month)[1]))
        revised = tuple(revisions.get((first.year, first.month), ()))
        found.append(Stretch(first.year, first.month, first.day, closing.day, revised))
        first = closing + timedelta(days=1)
    return found


def figures_of(deal: Deal, period: Iterable[Stretch]) -> PeriodFigures:
    """
    Make the figures of one deal in a period; of one day if that is all the period has.

    Everything adds up over time but the distinct customers: who returns on two days is counted once, so a period has
    at least as many as its busiest day and at most as many as its days together.
    """
    months = [month_of(deal, stretch) for stretch in period]
    sums = _added(month.sums for month in months)
    most = max((month.most_returning for month in months), default=0)
    returning = most + (sums.returning_customers - most) // _RETURNS_DIVISOR
    new = _counts(sums.new_customers, sums.new_customers_adjustment)
    cpa_revenue = (sums.new_customers * _CPA_UNITS, sums.new_customers_adjustment * _CPA_UNITS)
    earned = (sums.rev_share, sums.rev_share_adjustment, *cpa_revenue, sums.fees, sums.fees_adjustment)
    return PeriodFigures(
        clicks=Decimal(sums.clicks),
        active_customers=_counts(sums.new_customers + returning, sums.new_customers_adjustment),
        qualified_conversions=new,
        deposits=Deposits(
            new_depositing_customers=DepositFigures(new, _money(sums.new_amount)),
            returning_depositing_customers=DepositFigures(_counts(returning), _money(sums.returning_amount)),
        ),
        net_revenue=_money(sums.net_revenue, sums.net_revenue_adjustment),
        rev_share=_money(sums.rev_share, sums.rev_share_adjustment),
        cpa_revenue=_money(*cpa_revenue),
        fees=_money(sums.fees, sums.fees_adjustment),
        outgoing_balance=Decimal(sum(earned)).scaleb(-4),
    )


@lru_cache(_MONTHS_KEPT)
def month_of(deal: Deal, stretch: Stretch) -> Month:
    """Draw and add the days of a stretch; a stretch that was drawn lately is remembered."""
    seed, account_id, brand_id, source_id = deal
    head, tail = f"{seed},{account_id},{stretch.year:04}-{stretch.month:02}-", f"{brand_id},{source_id}"
    size = 1 + sha256(f"{seed},{account_id},{tail}".encode()).digest()[0] % 6
    revisions = dict(stretch.revisions)
    days = [
        _day_of(sha256(f"{head}{day:02},{tail},{revisions.get(day, 0)}".encode()).digest(), size)
        for day in range(stretch.first, stretch.last + 1)
    ]
    return Month(_added(days), max(day.returning_customers for day in days))


def _day_of(digest: bytes, size: int) -> Sums:
    """
    Read the figures of one day off its hash.

    Args:
        digest: 32 bytes.
        size: How busy the marketing source is, 1..6.
    """
    visits, firsts, returns, first_stake, return_stake, luck, correction, refund = _DRAWS.unpack(digest)
    new = firsts % (size + 2)
    returning = returns % (9 * size)
    new_amount = new * (10 * _UNITS + first_stake % (90 * _UNITS))
    returning_amount = returning * (15 * _UNITS + return_stake % (185 * _UNITS))
    net = (new_amount + returning_amount) * (luck % 46 - 12) // 100  # the players win on one day in four
    net_adjustment = -net // 20 if correction % 16 == 0 else 0
    share = max(net, 0) * REVENUE_SHARE_PERCENT // 100
    corrected_share = max(net + net_adjustment, 0) * REVENUE_SHARE_PERCENT // 100
    fees = (share + new * _CPA_UNITS) // _FEE_DIVISOR
    return Sums(
        clicks=size * (15 + visits % 60),  # far above the new customers
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


def _counts(result: int, adjustment: int = 0) -> AmountPair:
    return AmountPair(Decimal(result), Decimal(adjustment))


def _money(result: int, adjustment: int = 0) -> AmountPair:
    return AmountPair(Decimal(result).scaleb(-4), Decimal(adjustment).scaleb(-4))
