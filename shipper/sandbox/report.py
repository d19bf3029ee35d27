"""The daily report of the sandbox: registrations as received, the other figures zero or invented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from itertools import groupby, product
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from msgspec.structs import replace

from shipper.model import wire
from shipper.sandbox.figures import FIRST_DAY, Deal, PeriodFigures, figures_of, stretches
from shipper.sandbox.options import Figures
from shipper.sandbox.samples import BRANDS, MARKETING_SOURCES

CURRENCY: Final = "Euro"

_ZERO: Final = Decimal("0.0000")
_ONE: Final = Decimal("1.0000")
_NEVER: Final[Mapping[date, int]] = MappingProxyType({})
_NO_COUNTS: Final = wire.AmountPair(Decimal(0), Decimal(0))

_Pair = tuple[int, int]  # brand id, source id


class Registrations(NamedTuple):
    """How many events came for one UTC day (`YYYY-MM-DD`), brand and marketing source."""

    day: str
    brand_id: int
    marketing_source: int
    registered: int


def build_report(
    registrations: Iterable[Registrations],
    *,
    source: wire.ReportSource,
    start: date,
    end: date,
    now_seconds: float,
    figures: Figures = Figures.RECEIVED,
    seed: int = 1,
    restated: Mapping[date, int] = _NEVER,
) -> wire.DailyReport:
    """
    Make the report of one period.

    Figures are invented for the sample brands and marketing sources alone: a balance that is carried forward knows
    nothing of the others, which are in the report of some periods only. They have registrations and zeros.

    Id and checksum depend on all that the report says but the reporting time, which alone changes from one call to
    the next while the data are the same.

    Args:
        registrations: What was received, in any order; rows that are alike add up, those of other days are left out.
        source: Whose report it is.
        start: First day.
        end: Last day, included, not before `start`.
        now_seconds: When the report is made, seconds since the epoch.
        figures: Where all but the registrations comes from.
        seed: Of the invented figures.
        restated: How often a day was restated. Each time takes back one registration per brand and marketing source
            that has some left on that day, and invents the figures of the day anew.
    """
    received = _registrations(registrations, start, end, restated)
    invented = set(product(BRANDS, MARKETING_SOURCES)) if figures is Figures.SEEDED else set[_Pair]()
    deals = {pair: Deal(seed, source.affiliate_account_id, *pair) for pair in sorted(received.keys() | invented)}
    period = stretches(start, end, restated)
    drawn = {pair: figures_of(deal, period if pair in invented else ()) for pair, deal in deals.items()}
    entries = {
        pair: _marketing_source(pair[1], received.get(pair, _NO_COUNTS), of_pair) for pair, of_pair in drawn.items()
    }
    opening = _opening_balance([deals[pair] for pair in invented], start, restated)
    draft = wire.DailyReport(
        id="",
        last_check_sum="",
        source=source,
        reporting_time="",
        reporting_period=wire.ReportingPeriod(f"{start.isoformat()}T00:00:00", f"{end.isoformat()}T23:59:59"),
        reporting_currency=CURRENCY,
        opening_balance=opening,
        outgoing_balance=sum((of_pair.outgoing_balance for of_pair in drawn.values()), opening),
        brands=_brands(entries),
    )
    return _signed(draft, now_seconds)


def _registrations(
    rows: Iterable[Registrations], start: date, end: date, restated: Mapping[date, int]
) -> dict[_Pair, wire.AmountPair]:
    """Add up the days, and what the restatements took back from each."""
    first, last = start.isoformat(), end.isoformat()
    daily = Counter[tuple[str, int, int]]()
    for day, brand_id, source_id, registered in rows:
        if first <= day <= last:
            daily[day, brand_id, source_id] += registered
    times = {day.isoformat(): count for day, count in restated.items()}
    received, taken_back = Counter[_Pair](), Counter[_Pair]()
    for (day, brand_id, source_id), registered in daily.items():
        received[brand_id, source_id] += registered
        taken_back[brand_id, source_id] += min(times.get(day, 0), registered)
    return {pair: wire.AmountPair(Decimal(received[pair]), Decimal(-taken_back[pair])) for pair in received}


def _opening_balance(deals: Iterable[Deal], start: date, restated: Mapping[date, int]) -> Decimal:
    """Add up what was earned before the period; it is what any period that ends the day before leaves."""
    # The least date has no day before it, and no day before the first one has figures.
    past = stretches(FIRST_DAY, max(start, FIRST_DAY) - timedelta(days=1), restated)
    return sum((figures_of(deal, past).outgoing_balance for deal in deals), _ZERO)


def _brands(entries: Mapping[_Pair, wire.MarketingSource]) -> list[wire.Brand]:
    """Group what is ordered by brand."""
    return [
        wire.Brand(
            id=brand_id,
            name=BRANDS.get(brand_id, f"Brand {brand_id}"),
            marketing_sources=[entries[pair] for pair in pairs],
        )
        for brand_id, pairs in groupby(entries, key=lambda pair: pair[0])
    ]


def _marketing_source(source_id: int, registrations: wire.AmountPair, figures: PeriodFigures) -> wire.MarketingSource:
    return wire.MarketingSource(
        id=source_id,
        name="",
        reporting_currency=CURRENCY,
        exchange_rate=_ONE,
        active_customers=figures.active_customers,
        conversions=wire.Conversions(
            clicks=figures.clicks,
            qualified_conversions=figures.qualified_conversions,
            registrations=registrations,
        ),
        deposits=figures.deposits,
        net_revenue=figures.net_revenue,
        rev_share=figures.rev_share,
        cpa_revenue=figures.cpa_revenue,
        fees=figures.fees,
        outgoing_balance=figures.outgoing_balance,
    )


def _signed(draft: wire.DailyReport, now_seconds: float) -> wire.DailyReport:
    """Put the checksum of the draft into it, and what else was left empty for that."""
    check_sum = sha256(wire.encode_report(draft)).hexdigest()
    made = datetime.fromtimestamp(now_seconds, UTC)
    return replace(
        draft,
        id=str(uuid5(NAMESPACE_OID, check_sum)),
        last_check_sum=check_sum,
        reporting_time=f"{made:%Y-%m-%dT%H:%M:%S.%f}0Z",
    )
