"""The daily report of the sandbox, made from the events that it has received."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import sha256
from itertools import groupby
from typing import Final
from uuid import NAMESPACE_OID, uuid5

from shipper import wire
from shipper.sandbox.samples import BRANDS
from shipper.sandbox.store import Registrations

CURRENCY: Final = "Euro"

_ZERO: Final = Decimal("0.0000")
_ONE: Final = Decimal("1.0000")
_NOTHING: Final = wire.AmountPair(_ZERO, _ZERO)
_NO_DEPOSITS: Final = wire.DepositFigures(customers=_NOTHING, amount=_NOTHING)


def build_report(
    registrations: Iterable[Registrations],
    *,
    source: wire.ReportSource,
    start: date,
    end: date,
    now_seconds: float,
) -> wire.DailyReport:
    """
    Make the report of one period.

    Registrations are real, every other figure is zero. The id and the checksum depend on the figures, the account
    and the period; the reporting time alone changes from one call to the next.

    Args:
        registrations: Counts per brand and marketing source, in the order of the two ids.
        source: Whose report it is.
        start: First day.
        end: Last day, included.
        now_seconds: When the report is made, seconds since the epoch.
    """
    brands = [
        wire.Brand(
            id=brand_id,
            name=BRANDS.get(brand_id, f"Brand {brand_id}"),
            marketing_sources=[_marketing_source(row.marketing_source, row.registered) for row in rows],
        )
        for brand_id, rows in groupby(registrations, key=lambda row: row.brand_id)
    ]
    period = wire.ReportingPeriod(f"{start.isoformat()}T00:00:00", f"{end.isoformat()}T23:59:59")
    check_sum = _check_sum(source, period, brands)
    made = datetime.fromtimestamp(now_seconds, UTC)
    return wire.DailyReport(
        id=str(uuid5(NAMESPACE_OID, check_sum)),
        last_check_sum=check_sum,
        source=source,
        reporting_time=f"{made:%Y-%m-%dT%H:%M:%S.%f}0Z",
        reporting_period=period,
        reporting_currency=CURRENCY,
        opening_balance=_ZERO,
        outgoing_balance=_ZERO,
        brands=brands,
    )


def _marketing_source(source_id: int, registered: int) -> wire.MarketingSource:
    return wire.MarketingSource(
        id=source_id,
        name="",
        reporting_currency=CURRENCY,
        exchange_rate=_ONE,
        active_customers=_NOTHING,
        conversions=wire.Conversions(
            clicks=_ZERO,
            qualified_conversions=_NOTHING,
            registrations=wire.AmountPair(Decimal(registered), _ZERO),
        ),
        deposits=wire.Deposits(new_depositing_customers=_NO_DEPOSITS, returning_depositing_customers=_NO_DEPOSITS),
        net_revenue=_NOTHING,
        rev_share=_NOTHING,
        cpa_revenue=_NOTHING,
        fees=_NOTHING,
        outgoing_balance=_ZERO,
    )


def _check_sum(source: wire.ReportSource, period: wire.ReportingPeriod, brands: list[wire.Brand]) -> str:
    """Hash one canonical record per brand and marketing source, behind a head of account and period."""
    records = [f"{source.affiliate_account_id},{period.start},{period.end}"]
    records += [
        f"{brand.id},{entry.id},{entry.conversions.registrations.result}"
        for brand in brands
        for entry in brand.marketing_sources
    ]
    return sha256("\n".join(records).encode()).hexdigest()
