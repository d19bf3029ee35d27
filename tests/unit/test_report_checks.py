"""Checks of a report: each finds its problem and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.checks import Finding, check_opening_balance, check_report
from shipper.report.ranges import DateRange
from shipper.sandbox.report import build_report
from tests.cases import each
from tests.report_documents import NOW, brand, entry, pair, report, seeded

JANUARY = DateRange(date(2026, 1, 1), date(2026, 1, 31))
DECEMBER = DateRange(date(2025, 12, 1), date(2025, 12, 31))
FOLLOWS = ("outgoing_balance_follows_from_figures", "outgoing_balance_follows_from_sources")
KRONA = {"reporting_currency": "Swedish Krona", "exchange_rate": Decimal("0.5000")}


def found(made: wire.DailyReport, requested: DateRange = JANUARY, **others) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for finding in check_report(made, requested=requested, **others):
        findings.setdefault(finding.check, []).append(finding)
    return findings


def with_entries(*entries: wire.MarketingSource, **changes) -> wire.DailyReport:
    return replace(report(brand(*entries)), **changes)


# Balances


@pytest.mark.parametrize(
    "make",
    [lambda: seeded(*JANUARY), lambda: report(brand(entry())), lambda: replace(report(), outgoing_balance=Decimal(10))],
    ids=["seeded", "one", "empty"],
)
def test_a_consistent_report_has_no_findings(make: Callable[[], wire.DailyReport]):
    made = make()
    findings = check_report(made, requested=JANUARY)
    assert [finding.check for finding in findings] == list(FOLLOWS[: 1 + bool(made.brands)])
    for finding in findings:
        assert (finding.severity, finding.message.endswith(": holds"), finding.where) == ("info", True, "")
        assert finding.residual == 0 == finding.actual - finding.expected


def follows(made: wire.DailyReport, **others) -> dict[str, str]:
    """Return the reasons why the balance is inconsistent, with the residuals."""
    findings = [finding for finding in check_report(made, requested=JANUARY, **others) if finding.check in FOLLOWS]
    warnings = {finding.check: finding for finding in findings if finding.severity == "warning"}
    assert all(f"off by {finding.residual:,f}" in finding.message for finding in warnings.values())
    return {check.rpartition("_")[2]: f"{finding.residual:f}" for check, finding in warnings.items()}


@each(
    ("made", "expected"),
    [
        # Each source's balance is what it earned, or what it stands at: both are found in the field.
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("967.18")), {}),
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("967.1900")), {}),
        (with_entries(entry(1, outgoing_balance=Decimal("488.59"))), {}),
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("967.1901")), {"figures": "0.0101"}),
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("967.20")), {"figures": "0.0200"}),
        # Money that went within the period, and an account that has nothing to do with its sources.
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("957.18")), {"figures": "-10.0000"}),
        (with_entries(entry(1, outgoing_balance=Decimal("7000.00"))), {"sources": "-6511.4100"}),
        (
            with_entries(entry(1, outgoing_balance=Decimal("7000.00")), outgoing_balance=Decimal(0)),
            {"figures": "-488.5900", "sources": "-7000.00"},
        ),
        (with_entries(entry(rev_share=pair("339.0000", "-100.0000"))), {"figures": "100.0000"}),
        (replace(report(), outgoing_balance=Decimal("10.02")), {"figures": "0.0200"}),
        # What cannot be told is no finding.
        (with_entries(entry(1, fees=None), outgoing_balance=Decimal(1)), {"sources": "-477.5900"}),
        (with_entries(entry(1, fees=wire.AmountPair(Decimal(1)))), {}),
        (with_entries(entry(1, outgoing_balance=None), outgoing_balance=Decimal(1)), {"figures": "-487.5900"}),
        (with_entries(entry(1), opening_balance=None), {"sources": "10.0000"}),
        (with_entries(entry(1), outgoing_balance=None), {}),
        (with_entries(entry(1, reporting_currency="Swedish Krona", exchange_rate=None)), {}),
        (with_entries(entry(1, **{**KRONA, "exchange_rate": Decimal(0)})), {}),
        # Divided by the rate, a figure has no end.
        (
            with_entries(entry(exchange_rate=Decimal(11)), outgoing_balance=Decimal("53.6")),
            {"figures": "0.091818181818"},
        ),
        # Figures of any length are added exactly.
        (
            with_entries(
                entry(1, outgoing_balance=Decimal("9" * 30)),
                entry(2, outgoing_balance=Decimal("1e-30")),
                outgoing_balance=Decimal("9" * 29 + "8.99"),
                opening_balance=None,
            ),
            {"sources": "-0.010000000000"},
        ),
    ],
)
def test_an_inconsistent_balance_is_a_warning_with_its_residual(made, expected):
    assert follows(made) == expected


def test_tolerance_is_an_argument():
    made = with_entries(entry(), outgoing_balance=Decimal("488.64"))
    assert follows(made) == {"figures": "0.0500"}
    assert follows(made, tolerance=Decimal("0.05")) == {}


@each("missing", [{"outgoing_balance": None}, {"opening_balance": None, "outgoing_balance": Decimal("478.59")}])
def test_a_check_without_its_figure_is_undecided(missing):
    findings = check_report(with_entries(entry(), **missing), requested=JANUARY)
    (untold,) = [finding for finding in findings if finding.check == FOLLOWS[0]]
    assert (untold.severity, untold.expected, untold.residual) == ("info", None, None)
    assert untold.message.endswith("cannot be checked, because a figure is missing")


@each(
    ("outgoing", "expected"),
    [
        ("1485.6905", {}),  # 10 + 478.59 + 0.0892 * 11180.50 = 1485.8906 with a rate of four decimals
        ("1486.9905", {"figures": "1.09990000"}),
        ("11669.0900", {}),  # its amounts are converted already
        ("125830.1130", {}),  # divided by the rate
    ],
)
def test_a_balance_is_consistent_if_any_use_of_the_exchange_rates_fits(outgoing, expected):
    earned = {"outgoing_balance": Decimal("11180.50"), "rev_share": pair("11180.50")}
    krona = entry(2, **earned, cpa_revenue=pair("0"), fees=pair("0"), **{**KRONA, "exchange_rate": Decimal("0.0892")})
    assert follows(with_entries(entry(1), krona, outgoing_balance=Decimal(outgoing))) == expected


def test_rounding_of_many_sources_is_no_finding():
    entries = [entry(number) for number in range(1000)]
    assert follows(with_entries(*entries, outgoing_balance=Decimal("478600.09"))) == {}
    assert follows(with_entries(*entries, outgoing_balance=Decimal("478600.11"))) == {"figures": "0.1100"}


# The period


@each(
    ("start", "end", "is_right"),
    [
        ("2026-01-01T00:00:00", "2026-01-31T23:59:59", True),
        ("2026-01-01T00:00:00", "2026-01-31T00:00:00", True),
        ("2026-01-01T00:00:00", "2026-02-01T00:00:00", True),
        ("2026-01-01T00:00:00Z", "2026-01-31T23:59:59Z", True),
        ("2026-01-01T00:00:00", "2026-02-01T00:00:01", False),
        ("2026-01-01T00:00:00", "2026-01-31T12:00:00", False),
        ("2025-12-31T00:00:00", "2026-01-31T23:59:59", False),
        ("2026-01-01T06:00:00", "2026-01-31T23:59:59", False),
        ("2026-01-01T00:00:00", "2026-01-30T23:59:59", False),
        ("2026-01-31T00:00:00", "2026-01-01T00:00:00", False),
        ("0001-01-01T00:00:00", "0001-01-01T00:00:00", False),
        ("9999-12-31T00:00:00", "9999-12-31T23:59:59", False),
        ("", "yesterday", False),
    ],
)
def test_period_is_compared_with_the_requested_days(start, end, is_right):
    made = replace(report(), reporting_period=wire.ReportingPeriod(start, end))
    findings = found(made).get("period_is_as_requested", [])
    assert [(each.severity, each.expected, each.actual) for each in findings] == (
        [] if is_right else [("warning", "2026-01-01 to 2026-01-31", f"{start} to {end}")]
    )


def test_report_that_was_made_on_its_last_day_may_end_in_the_middle_of_it():
    period = wire.ReportingPeriod("2026-01-01T00:00:00", "2026-01-31T12:00:00")
    made = replace(report(), reporting_period=period, reporting_time="2026-01-31T12:00:01.0000000Z")
    assert "period_is_as_requested" not in found(made)


@pytest.mark.parametrize("day", [date.min, date.max])
def test_period_at_the_end_of_the_calendar_is_compared(day):
    made = report(start=day.isoformat(), end=day.isoformat())
    assert "period_is_as_requested" not in found(made, DateRange(day, day))
    assert "period_is_as_requested" in found(made)


# Ids, currencies, counts


def test_repeated_ids_are_found_only_within_their_parent():
    made = report(brand(entry(1), entry(1), entry(1), entry(2)), brand(entry(1), number=12), brand(number=11))
    assert [(each.where, each.severity) for each in found(made)["ids_are_unique"]] == [
        ("brands[id=11]", "warning"),
        ("brands[id=11].marketingSources[id=1]", "warning"),
    ]


@each(
    ("currency", "rate", "is_right"),
    [
        ("Euro", None, True),
        ("EURO", None, True),
        ("EUR", None, True),
        ("Swedish Krona", "0.0889", True),
        ("Swedish Krona", None, False),
        ("Swedish Krona", "0.0000", False),
        ("Unheard Of", None, False),
        (None, None, False),
        (None, "1.0000", True),
    ],
)
def test_other_currency_needs_a_rate(currency, rate, is_right):
    odd = {"reporting_currency": currency, "exchange_rate": None if rate is None else Decimal(rate)}
    findings = found(with_entries(entry(1), entry(2, **odd), entry(3, **odd))).get("currencies_have_rates", [])
    assert [(each.where, each.severity, each.actual) for each in findings] == (
        [] if is_right else [("brands[id=11].marketingSources[id=2]", "warning", currency)]
    )
    assert all("2 marketing sources" in each.message for each in findings)


def test_unknown_currencies_are_compared_by_name():
    assert "currencies_have_rates" not in found(
        with_entries(entry(reporting_currency="house chips", exchange_rate=None), reporting_currency="House Chips")
    )


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"active_customers": pair("2.5")}, "counts_are_whole", "Active customers: the result 2.5 is not a whole"),
        ({"active_customers": pair("3", "-0.5")}, "counts_are_whole", "Active customers: the adjustment -0.5 is not"),
        ({"conversions": wire.Conversions(Decimal("0.25"))}, "counts_are_whole", "Clicks: the result 0.25"),
        ({"conversions": wire.Conversions(Decimal(-1))}, "counts_are_not_negative", "Clicks: the result -1 is below"),
    ],
)
def test_counts_are_whole_and_not_negative(changes, check, message):
    findings = [each for name, of_check in found(with_entries(entry(**changes))).items() for each in of_check]
    (finding,) = [each for each in findings if each.severity != "info"]
    assert (finding.check, finding.severity) == (check, "warning")
    assert finding.where == "brands[id=11].marketingSources[id=50121]"
    assert finding.message.startswith(message)


def test_counts_with_decimals_and_negative_adjustments_and_money_are_valid():
    made = with_entries(entry(active_customers=pair("12.0000", "-3"), fees=pair("-1.25")))
    assert not {name for name in found(made) if name.startswith("counts")}


# Against other reports


def test_seeded_months_follow_each_other():
    made, before = (
        build_report(
            [],
            source=wire.ReportSource(1001),
            start=start,
            end=end,
            now_seconds=NOW,
            figures="seeded",
            seed=1,
            restated={},
        )
        for start, end in (JANUARY, DECEMBER)
    )
    assert made.opening_balance
    finding = check_opening_balance(made, before)
    assert (finding.check, finding.severity, finding.residual) == ("opening_balance_is_previous", "info", 0)


@pytest.mark.parametrize(("opening", "severity"), [("488.60", "info"), ("488.61", "note")])
def test_opening_balance_is_compared_with_the_period_before(opening, severity):
    previous = report(start="2025-12-01", end="2025-12-31")
    made = replace(report(), opening_balance=Decimal(opening))
    finding = check_opening_balance(made, previous)
    assert finding.severity == severity
    assert ("a payout in between explains this" in finding.message) is (severity == "note")
    assert finding.residual == Decimal(opening) - Decimal("488.59")
    assert check_opening_balance(made, replace(previous, outgoing_balance=None)).severity == "info"


@each(
    ("end", "is_adjacent"),
    [
        *((end, True) for end in ("2025-12-31T23:59:59", "2025-12-31T00:00:00", "2026-01-01T00:00:00")),
        *((end, False) for end in ("2025-12-30T23:59:59", "2026-01-01T00:00:01", "2026-01-31T23:59:59", "soon")),
    ],
)
def test_only_adjacent_periods_are_compared(end, is_adjacent):
    previous = replace(report(), reporting_period=wire.ReportingPeriod("2025-12-01T00:00:00", end))
    finding = check_opening_balance(report(), previous)
    assert (finding.severity, finding.residual is None) == (("note", False) if is_adjacent else ("info", True))


@each(
    ("changes", "is_right"),
    [
        ({}, True),
        ({"id": "another", "reporting_time": "later"}, True),
        ({"opening_balance": Decimal("10.0")}, True),
        ({"opening_balance": Decimal("10.01")}, False),
        ({"opening_balance": Decimal("10.01"), "last_check_sum": "cd" * 32}, True),
        ({"source": wire.ReportSource(1001, "Renamed")}, True),
    ],
)
def test_same_checksum_means_same_figures(changes, is_right):
    findings = found(replace(report(), **changes), earlier_version=report()).get("check_sum_tells_changes", [])
    assert [(each.severity, each.where) for each in findings] == ([] if is_right else [("warning", "openingBalance")])


def test_report_without_any_optional_field_is_checked():
    made = report(wire.Brand(id=1, marketing_sources=[wire.MarketingSource(id=1)]))
    made = replace(made, opening_balance=None, outgoing_balance=None)
    findings = check_report(made, requested=JANUARY, earlier_version=made)
    assert {finding.check for finding in findings if finding.severity != "info"} == {"currencies_have_rates"}
