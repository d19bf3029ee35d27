"""Daily reports for tests: small ones written by hand, and large ones with the sandbox's generated figures."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache

from msgspec.structs import replace

from shipper.model import wire
from shipper.report.rows import ReportVersion
from shipper.sandbox.report import Registrations, build_report

FETCHED_AT = "2026-02-02T08:15:00Z"
NOW = datetime(2026, 2, 2, 8, tzinfo=UTC).timestamp()

# Texts that a spreadsheet, a browser or a terminal would interpret.
HOSTILE_NAMES = (
    '=HYPERLINK("https://example.com","x")',
    "+1+1",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "<script>alert(1)</script>",
    "</style><b onload='x'>&amp;",
    'quoted "name", with; both\r\nkinds | of line',
    "[red]bracket[/]",
    "esc\x1b[2Jape",
    "\N{RIGHT-TO-LEFT OVERRIDE}turned",
    "Größe ☕",
    "",
    "\uff1d1+1",
    "\ufeff \uff20SUM(A1)",
    "a;=1+1",
    'a\n;" \u200b-1',
    "É-Casino, with = and @",
)


def pair(result: str, adjustment: str = "0") -> wire.AmountPair:
    return wire.AmountPair(Decimal(result), Decimal(adjustment))


def entry(number: int = 50121, **figures: object) -> wire.MarketingSource:
    """Make a marketing source; every figure differs from the others."""
    made = wire.MarketingSource(
        id=number,
        name=f"Source {number}",
        reporting_currency="Euro",
        exchange_rate=Decimal("1.0000"),
        active_customers=pair("31", "-1"),
        conversions=wire.Conversions(
            clicks=Decimal(5000), qualified_conversions=pair("32", "-2"), registrations=pair("433", "-3")
        ),
        deposits=wire.Deposits(
            new_depositing_customers=wire.DepositFigures(pair("34", "-4"), pair("1035.5000", "-0.2500")),
            returning_depositing_customers=wire.DepositFigures(pair("36", "6"), pair("1037.1234", "0.0001")),
        ),
        net_revenue=pair("1038.0000", "-8.0000"),
        rev_share=pair("339.0000", "0.0000"),
        cpa_revenue=pair("140.0000", "40.0000"),
        fees=pair("-41.4100", "1.0000"),
        outgoing_balance=Decimal("478.5900"),
    )
    return replace(made, **figures)


def registered(number: int, result: object, adjustment: object = 0, **figures: object) -> wire.MarketingSource:
    """Make a marketing source with this many registrations."""
    registrations = pair(str(result), str(adjustment))
    return entry(number, conversions=wire.Conversions(registrations=registrations), **figures)


# For a marketing source without earnings: the account's outgoing balance equals its opening balance.
NOTHING_EARNED = {"fees": pair("-520.0000", "1.0000"), "outgoing_balance": Decimal("0.0000")}


def report(
    *brands: wire.Brand, account: int = 1001, start: str = "2026-01-01", end: str = "2026-01-31"
) -> wire.DailyReport:
    return wire.DailyReport(
        id="00000000-0000-4000-8000-000000000001",
        last_check_sum="ab" * 32,
        source=wire.ReportSource(account, "Example Affiliate", "Example Operator"),
        reporting_time="2026-02-02T08:00:00.1234567Z",
        reporting_period=wire.ReportingPeriod(f"{start}T00:00:00", f"{end}T23:59:59"),
        reporting_currency="Euro",
        opening_balance=Decimal("10.0000"),
        outgoing_balance=Decimal("488.5900"),
        brands=list(brands),
    )


def brand(*entries: wire.MarketingSource, number: int = 11, name: str = "Harbour Lights") -> wire.Brand:
    return wire.Brand(id=number, name=name, marketing_sources=list(entries))


def fetched(document: wire.DailyReport, *, is_restated: bool = False) -> ReportVersion:
    return ReportVersion(document, FETCHED_AT, is_restated)


def seeded(start: date, end: date, **changes: object) -> wire.DailyReport:
    """Make a report of all sample brands and marketing sources."""
    registrations = [
        Registrations(f"{start:%Y-%m}-{day:02}", brand_id, source, day % 7 + source % 5)
        for day in range(start.day, end.day + 1)
        for brand_id in (11, 12, 13)
        for source in (50121, 50234, 50377, 50418, 50590)
    ]
    made = build_report(
        registrations,
        source=wire.ReportSource(1001, "Example Affiliate", "Example Operator"),
        start=start,
        end=end,
        now_seconds=NOW,
        figures="seeded",
        seed=7,
        restated={start: 1},
    )
    return replace(made, **changes)


def months(count: int = 3) -> list[ReportVersion]:
    """Make monthly reports from October 2025 on; November's is restated."""
    ends = [date(2025, 10, 31), date(2025, 11, 30), date(2025, 12, 31), date(2026, 1, 31)][:count]
    return [_month(end) for end in ends]


@cache
def _month(end: date) -> ReportVersion:
    return fetched(seeded(end.replace(day=1), end), is_restated=end.month == 11)


def hostile() -> wire.DailyReport:
    """Make a report in which all names are hostile."""
    brands = [
        brand(entry(1, name=name), entry(2, name=name), number=number, name=name)
        for number, name in enumerate(HOSTILE_NAMES, start=1)
    ]
    made = report(*brands)
    return replace(made, source=wire.ReportSource(1001, HOSTILE_NAMES[0], HOSTILE_NAMES[6]))
