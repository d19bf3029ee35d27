"""Checks of a report: each finds what it is for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.checks import check_opening_balance, check_report
from shipper.report.document import read_report
from shipper.report.findings import Finding
from shipper.report.ranges import DateRange
from shipper.sandbox.options import Figures
from shipper.sandbox.report import build_report
from tests.cases import each
from tests.report_documents import NOW, brand, entry, pair, report, seeded

JANUARY = DateRange(date(2026, 1, 1), date(2026, 1, 31))
DECEMBER = DateRange(date(2025, 12, 1), date(2025, 12, 31))
HYPOTHESES = {
    "outgoing_balance_is_sources",
    "outgoing_balance_is_opening_and_sources",
    "outgoing_balance_of_source_is_revenue",
}
KRONA = {"reporting_currency": "Swedish Krona", "exchange_rate": Decimal("0.5000")}


def found(made: wire.DailyReport, requested: DateRange = JANUARY, **others) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for finding in check_report(made, requested=requested, **others):
        findings.setdefault(finding.check, []).append(finding)
    return findings


def only(made: wire.DailyReport, check: str, requested: DateRange = JANUARY, **others) -> Finding:
    (finding,) = found(made, requested, **others)[check]
    return finding


def with_entries(*entries: wire.MarketingSource, **changes) -> wire.DailyReport:
    return replace(report(brand(*entries)), **changes)


# A sound report


@pytest.mark.parametrize(
    "make",
    [lambda: seeded(*JANUARY), lambda: report(brand(entry())), lambda: replace(report(), outgoing_balance=Decimal(10))],
    ids=["seeded", "one", "empty"],
)
def test_of_a_sound_report_only_the_hypotheses_are_told(make: Callable[[], wire.DailyReport]):
    made = make()
    findings = found(made)
    assert set(findings) == (HYPOTHESES if made.brands else set(sorted(HYPOTHESES)[:2]))
    assert {finding.severity for of_check in findings.values() for finding in of_check} == {"info"}


def test_balances_of_invented_figures_hang_together():
    made = seeded(*JANUARY)
    assert only(made, "outgoing_balance_is_opening_and_sources").message.endswith("holds")
    assert only(made, "outgoing_balance_of_source_is_revenue").message.endswith("holds for 15 of 15")
    without_opening = only(made, "outgoing_balance_is_sources")
    assert "does not hold by" in without_opening.message
    assert without_opening.residual == made.opening_balance


# Balances


@each(
    ("outgoing", "is_sum", "is_opening_and_sum"),
    [
        ("957.18", True, False),
        ("957.1900", True, False),
        ("957.1901", False, False),
        ("957.1699", False, False),
        ("967.18", False, True),
        ("0", False, False),
    ],
)
def test_account_balance_is_compared_with_the_sum_and_with_the_opening_balance(outgoing, is_sum, is_opening_and_sum):
    made = with_entries(entry(1), entry(2), outgoing_balance=Decimal(outgoing))
    checks = ("outgoing_balance_is_sources", "outgoing_balance_is_opening_and_sources")
    for check, expected, holds in zip(checks, ("957.18", "967.18"), (is_sum, is_opening_and_sum), strict=True):
        finding = only(made, check)
        assert (finding.expected, finding.actual) == (Decimal(expected), Decimal(outgoing))
        assert finding.residual == Decimal(outgoing) - Decimal(expected)
        assert finding.message.endswith(": holds") is holds
        assert ("does not hold by" in finding.message) is not holds


def test_tolerance_is_an_argument():
    made = with_entries(entry(), outgoing_balance=Decimal("478.64"))
    assert "does not hold by 0.0500" in only(made, "outgoing_balance_is_sources").message
    assert only(made, "outgoing_balance_is_sources", tolerance=Decimal("0.05")).message.endswith("holds")


def test_balance_of_sources_is_told_once_with_the_one_that_is_furthest_off():
    off = [
        entry(number, outgoing_balance=Decimal(amount)) for number, amount in ((2, "479"), (3, "470"), (4, "478.59"))
    ]
    finding = only(with_entries(entry(1), *off), "outgoing_balance_of_source_is_revenue")
    assert finding.message.endswith("holds for 2 of 4, at the furthest not by -8.5900")
    assert finding.where == "brands[id=11].marketingSources[id=3]"
    assert (finding.expected, finding.actual, finding.residual) == tuple(map(Decimal, ("478.59", "470", "-8.59")))


def test_sources_that_are_alike_are_counted_each():
    off = entry(outgoing_balance=Decimal(0))
    finding = only(with_entries(off, off, off, entry()), "outgoing_balance_of_source_is_revenue")
    assert "holds for 1 of 4" in finding.message


def test_adjustments_belong_to_the_balance():
    made = with_entries(entry(rev_share=pair("339.0000", "-100.0000")))
    assert only(made, "outgoing_balance_of_source_is_revenue").residual == 100


@pytest.mark.parametrize(
    ("outgoing", "holding"),
    [("579", "outgoing_balance_is_sources_times_rate"), ("879", "outgoing_balance_is_sources_over_rate")],
)
def test_exchange_rates_are_tried_both_ways(outgoing, holding):
    made = with_entries(
        entry(1, outgoing_balance=Decimal(479)),
        entry(2, outgoing_balance=Decimal(200), **KRONA),
        outgoing_balance=Decimal(outgoing),
    )
    told = {name: only(made, name).message for name in found(made) if name.startswith("outgoing_balance_is_sources")}
    assert len(told) == 3
    assert [name for name, message in told.items() if message.endswith(": holds")] == [holding]


def test_balance_of_a_source_is_compared_with_exchange_rates_too():
    made = with_entries(entry(outgoing_balance=Decimal("239.295"), **KRONA))
    assert "holds for 1 of 1" in only(made, "outgoing_balance_of_source_is_revenue_times_rate").message
    assert "holds for 0 of 1" in only(made, "outgoing_balance_of_source_is_revenue_over_rate").message


def test_division_by_a_rate_is_told_with_twelve_decimals():
    made = with_entries(entry(exchange_rate=Decimal(11)), outgoing_balance=Decimal(0))
    assert str(only(made, "outgoing_balance_is_sources_over_rate").residual) == "-43.508181818182"


def test_large_figures_are_added_exactly():
    made = with_entries(
        entry(1, outgoing_balance=Decimal("9" * 30)),
        entry(2, outgoing_balance=Decimal("1e-30")),
        outgoing_balance=Decimal("9" * 29 + "8.99"),
    )
    assert "does not hold" in only(made, "outgoing_balance_is_sources").message
    tolerance = Decimal("0.010000000000000000000000000001")
    assert only(made, "outgoing_balance_is_sources", tolerance=tolerance).message.endswith("holds")


@each(
    ("made", "untold"),
    [
        (with_entries(entry(), outgoing_balance=None), ["is_sources", "is_opening_and_sources"]),
        (with_entries(entry(), opening_balance=None), ["is_opening_and_sources"]),
        (
            with_entries(entry(outgoing_balance=None)),
            ["is_sources", "is_opening_and_sources", "of_source_is_revenue"],
        ),
        (with_entries(entry(fees=None)), ["of_source_is_revenue"]),
        (with_entries(entry(fees=wire.AmountPair(Decimal(1)))), ["of_source_is_revenue"]),
    ],
)
def test_what_a_figure_is_missing_for_cannot_be_told(made, untold):
    findings = {name: finding for name, (finding,) in found(made).items()}
    silent = [name for name, finding in findings.items() if "cannot be told, a figure is missing" in finding.message]
    assert silent == [f"outgoing_balance_{name}" for name in untold]
    assert all(findings[name].residual is findings[name].expected is None for name in silent)
    assert all(not finding.where for finding in findings.values())


def test_sources_that_cannot_be_told_are_counted():
    message = only(with_entries(entry(1), entry(2, fees=None)), "outgoing_balance_of_source_is_revenue").message
    assert message.endswith("holds for 1 of 2; 1 cannot be told, a figure is missing")


@pytest.mark.parametrize("rate", [None, Decimal("0.0000")])
def test_missing_rate_and_rate_of_zero_cannot_be_told(rate):
    made = with_entries(entry(1, exchange_rate=rate), entry(2, exchange_rate=Decimal(2)))
    for way in ("times_rate", "over_rate"):
        assert "cannot be told" in only(made, f"outgoing_balance_is_sources_{way}").message


FOLLOWS = ("outgoing_balance_follows_from_figures", "outgoing_balance_follows_from_sources")


def follows(made: wire.DailyReport, **others) -> dict[str, str]:
    """Return what the balance does not follow from, with the residuals."""
    findings = found(made, **others)
    told = {check: finding for check in FOLLOWS for finding in findings.get(check, [])}
    assert {finding.severity for finding in told.values()} <= {"warning"}
    return {check.rpartition("_")[2]: f"{finding.residual:f}" for check, finding in told.items()}


@each(
    ("made", "expected"),
    [
        # Each source's balance is what it earned, or what it stands at: both are found in the field.
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("967.18")), {}),
        (with_entries(entry(1, outgoing_balance=Decimal("488.59"))), {}),
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("967.20")), {"figures": "0.0200"}),
        # Money that went within the period, and an account that has nothing to do with its sources.
        (with_entries(entry(1), entry(2), outgoing_balance=Decimal("957.18")), {"figures": "-10.0000"}),
        (with_entries(entry(1, outgoing_balance=Decimal("7000.00"))), {"sources": "-6511.4100"}),
        (
            with_entries(entry(1, outgoing_balance=Decimal("7000.00")), outgoing_balance=Decimal(0)),
            {"figures": "-488.5900", "sources": "-7000.00"},
        ),
        (replace(report(), outgoing_balance=Decimal("10.02")), {"figures": "0.0200"}),
        # What cannot be told is no finding.
        (with_entries(entry(1, fees=None), outgoing_balance=Decimal(1)), {"sources": "-477.5900"}),
        (with_entries(entry(1, outgoing_balance=None), outgoing_balance=Decimal(1)), {"figures": "-487.5900"}),
        (with_entries(entry(1), opening_balance=None), {"sources": "10.0000"}),
        (with_entries(entry(1), outgoing_balance=None), {}),
        (with_entries(entry(1, reporting_currency="Swedish Krona", exchange_rate=None)), {}),
    ],
)
def test_a_balance_that_does_not_follow_is_a_warning_with_its_residual(made, expected):
    assert follows(made) == expected


@each(
    ("outgoing", "expected"),
    [
        ("1485.6905", {}),  # 10 + 478.59 + 0.0892 * 11180.50 = 1485.8906 with a rate of four decimals
        ("1486.9905", {"figures": "1.09990000"}),
        ("11669.0900", {}),  # its amounts are converted already
        ("125830.1130", {}),  # divided by the rate
    ],
)
def test_a_balance_follows_if_it_does_so_by_any_use_of_the_exchange_rates(outgoing, expected):
    krona = entry(
        2,
        outgoing_balance=Decimal("11180.50"),
        rev_share=pair("11180.50"),
        cpa_revenue=pair("0"),
        fees=pair("0"),
        reporting_currency="Swedish Krona",
        exchange_rate=Decimal("0.0892"),
    )
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
        ("2025-12-31T00:00:00", "2026-01-31T23:59:59", False),
        ("2026-01-01T06:00:00", "2026-01-31T23:59:59", False),
        ("2026-01-01T00:00:00", "2026-01-30T23:59:59", False),
        ("2026-01-31T00:00:00", "2026-01-01T00:00:00", False),
        ("0001-01-01T00:00:00", "0001-01-01T00:00:00", False),
        ("9999-12-31T00:00:00", "9999-12-31T23:59:59", False),
        ("", "yesterday", False),
    ],
)
def test_period_is_compared_with_the_days_that_were_asked_for(start, end, is_right):
    made = replace(report(), reporting_period=wire.ReportingPeriod(start, end))
    findings = found(made).get("period_is_as_requested", [])
    assert [(each.severity, each.expected, each.actual) for each in findings] == (
        [] if is_right else [("warning", "2026-01-01 to 2026-01-31", f"{start} to {end}")]
    )


@pytest.mark.parametrize("day", [date.min, date.max])
def test_period_at_the_end_of_the_calendar_is_compared(day):
    made = report(start=day.isoformat(), end=day.isoformat())
    assert "period_is_as_requested" not in found(made, DateRange(day, day))
    assert "period_is_as_requested" in found(made)


# Ids, currencies, counts


def test_ids_that_are_there_twice_are_found_in_their_parent_only():
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


def test_currencies_that_are_both_unknown_are_told_apart_by_name():
    assert "currencies_have_rates" not in found(
        with_entries(entry(reporting_currency="house chips", exchange_rate=None), reporting_currency="House Chips")
    )


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"active_customers": pair("2.5")}, "counts_are_whole", "Active customers: the result 2.5 is not whole"),
        ({"active_customers": pair("3", "-0.5")}, "counts_are_whole", "Active customers: the adjustment -0.5 is not"),
        ({"conversions": wire.Conversions(Decimal("0.25"))}, "counts_are_whole", "Clicks: the result 0.25"),
        ({"conversions": wire.Conversions(Decimal(-1))}, "counts_are_not_negative", "Clicks: the result -1 is below"),
    ],
)
def test_counts_are_whole_and_not_negative(changes, check, message):
    findings = [each for name, of_check in found(with_entries(entry(**changes))).items() for each in of_check]
    (finding,) = [each for each in findings if each.severity != "info"]
    assert (finding.check, finding.severity, finding.where) == (
        check,
        "warning",
        "brands[id=11].marketingSources[id=50121]",
    )
    assert finding.message.startswith(message)


def test_counts_with_decimals_and_negative_adjustments_and_money_are_sound():
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
            figures=Figures.SEEDED,
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
    assert ("a payout between the two does that" in finding.message) is (severity == "note")
    assert finding.residual == Decimal(opening) - Decimal("488.59")


@each(
    ("end", "is_adjacent"),
    [
        ("2025-12-31T23:59:59", True),
        ("2025-12-31T00:00:00", True),
        ("2026-01-01T00:00:00", True),
        ("2025-12-30T23:59:59", False),
        ("2026-01-01T00:00:01", False),
        ("2026-01-31T23:59:59", False),
        ("soon", False),
    ],
)
def test_only_adjacent_periods_are_compared(end, is_adjacent):
    previous = replace(report(), reporting_period=wire.ReportingPeriod("2025-12-01T00:00:00", end))
    finding = check_opening_balance(report(), previous)
    assert (finding.severity, finding.residual is None) == (("note", False) if is_adjacent else ("info", True))


def test_missing_balance_of_the_period_before_is_no_warning():
    previous = replace(report(start="2025-12-01", end="2025-12-31"), outgoing_balance=None)
    assert check_opening_balance(report(), previous).severity == "info"


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


def test_report_that_lacks_whatever_may_be_missing_is_checked():
    body = wire.encode_report(report(wire.Brand(id=1, marketing_sources=[wire.MarketingSource(id=1)])))
    made = read_report(body, account_id=1001).report
    made = replace(made, opening_balance=None, outgoing_balance=None)
    severities = {
        finding.check: finding.severity for finding in check_report(made, requested=JANUARY, earlier_version=made)
    }
    assert {check for check, severity in severities.items() if severity != "info"} == {"currencies_have_rates"}
