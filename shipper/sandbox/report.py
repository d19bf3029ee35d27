"""The sandbox's daily report: registrations are counts of received events, other figures are zero or generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from itertools import groupby, product
from typing import Final, NamedTuple
from uuid import NAMESPACE_OID, uuid5

from msgspec.structs import replace

from shipper.model import wire
from shipper.sandbox.figures import CURRENCY, FIRST_DAY, Deal, earned, marketing_source, stretches
from shipper.sandbox.options import Figures
from shipper.sandbox.samples import BRANDS, MARKETING_SOURCES

_ZERO: Final = Decimal("0.0000")
_NO_COUNTS: Final = wire.AmountPair(Decimal(0), Decimal(0))

_Pair = tuple[int, int]  # brand id, source id


class Registrations(NamedTuple):
    """The number of events received for a UTC day (`YYYY-MM-DD`), brand and marketing source."""

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
    figures: Figures,
    seed: int,
    restated: Mapping[date, int],
) -> wire.DailyReport:
    """
    Build the report of a period.

    Figures are generated only for the sample brands and marketing sources, because a balance covers all earlier
    periods, in which other sources may not appear. Those have registrations, and zeros for everything else.

    The id and the checksum depend on everything except the reporting time, so they change only with the data.

    Args:
        registrations: In any order; rows with the same key are added up, and other days are ignored.
        end: The last day, included; not before `start`.
        figures: The source of the figures other than registrations.
        restated: How often each day was restated. Every restatement takes back one registration of each brand and
            marketing source that has any left on that day, and generates other figures for the day.
    """
    received = _registrations(registrations, start, end, restated)
    invented = set(product(BRANDS, MARKETING_SOURCES)) if figures == "seeded" else set[_Pair]()
    deals = {pair: Deal(seed, source.affiliate_account_id, *pair) for pair in sorted(received.keys() | invented)}
    period = stretches(start, end, restated)
    entries = {
        pair: marketing_source(deal, period if pair in invented else (), received.get(pair, _NO_COUNTS))
        for pair, deal in deals.items()
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
        outgoing_balance=sum((earned(deals[pair], period) for pair in invented), opening),
        brands=_brands(entries),
    )
    return _signed(draft, now_seconds)


def _registrations(
    rows: Iterable[Registrations], start: date, end: date, restated: Mapping[date, int]
) -> dict[_Pair, wire.AmountPair]:
    """Add up the registrations of a period, and those taken back by restatements."""
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
    """Return the sum earned before the period, the outgoing balance of a period that ends the day before."""
    # `date.min` has no previous day, and days before `FIRST_DAY` have no figures.
    past = stretches(FIRST_DAY, max(start, FIRST_DAY) - timedelta(days=1), restated)
    return sum((earned(deal, past) for deal in deals), _ZERO)


def _brands(entries: Mapping[_Pair, wire.MarketingSource]) -> list[wire.Brand]:
    """Group entries, which are sorted by brand."""
    return [
        wire.Brand(
            id=brand_id,
            name=BRANDS.get(brand_id, f"Brand {brand_id}"),
            marketing_sources=[entries[pair] for pair in pairs],
        )
        for brand_id, pairs in groupby(entries, key=lambda pair: pair[0])
    ]


def _signed(draft: wire.DailyReport, now_seconds: float) -> wire.DailyReport:
    """Fill in id, checksum and reporting time, which are empty in the draft."""
    check_sum = sha256(wire.encode_report(draft)).hexdigest()
    made = datetime.fromtimestamp(now_seconds, UTC)
    return replace(
        draft,
        id=str(uuid5(NAMESPACE_OID, check_sum)),
        last_check_sum=check_sum,
        reporting_time=f"{made:%Y-%m-%dT%H:%M:%S.%f}0Z",
    )
