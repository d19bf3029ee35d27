"""The ledger against the report: every difference is found, and explained only by what does explain it."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pytest
from rich.console import Console

from shipper.model import wire
from shipper.model.records import LedgerKey
from shipper.report.days import OFFSETS, Days, days_of_offset, days_of_zone, zone_of_offset
from shipper.report.exports import to_csv
from shipper.report.ranges import DateRange, Split, split_range
from shipper.report.reconcile.compare import reconcile
from shipper.report.reconcile.forms import flat_table, print_table, to_json
from shipper.report.reconcile.owners import Owners
from shipper.report.reconcile.page import render_page
from shipper.report.reconcile.rows import Hole, Pair, Period, Reconciliation, Row
from shipper.report.reconcile.words import headlines, remarks, said_of, totals_of
from tests.report_documents import HOSTILE_NAMES, brand, entry, hostile, pair, report

FIRST, LAST = date(2026, 10, 1), date(2026, 10, 8)
LATER = date(2026, 12, 1)
BRANDS, SOURCES = (11, 12, 13), (50121, 50377)
DAY_4 = DateRange(date(2026, 10, 4), date(2026, 10, 4))


def ledger(rng: Random, affiliate: str = "") -> Counter[LedgerKey]:
    """Make what was accepted from two days before the range to two days after it, hour by hour."""
    hours = 24 * ((LAST - FIRST).days + 5)
    found: Counter[LedgerKey] = Counter()
    for hour in range(hours):
        day = FIRST + timedelta(days=hour // 24 - 2)
        for number in BRANDS:
            for source in SOURCES:
                found[f"{day}T{hour % 24:02}", number, affiliate, str(source)] += rng.randrange(6)
    return found


def reports(
    counts: Mapping[LedgerKey, int], days: Days | None = None, split: Split = "day", adjustments: Any = ()
) -> list[Period]:
    """Make the reports that a platform makes of these records, in its days; `adjustments` by day and pair."""
    days = days or Days()
    adjusted = dict(adjustments)
    by_day: dict[str, Counter[Pair]] = defaultdict(Counter)
    for (hour, number, _, media), count in counts.items():
        by_day[days.day_of(hour)][Pair(number, int(media))] += count
    made = []
    for part in split_range(FIRST, LAST, split):
        found: Counter[Pair] = Counter()
        for day, of_day in by_day.items():
            if part.start.isoformat() <= day <= part.end.isoformat():
                found.update(of_day)
        made.append(Period(part, document(found, {p: n for (d, p), n in adjusted.items() if d == part})))
    return made


def document(found: Mapping[Pair, int], adjustments: Mapping[Pair, int]) -> wire.DailyReport:
    brands = []
    for number in sorted({each.brand for each in found}):
        entries = [
            entry(
                each.source or 0,
                conversions=wire.Conversions(registrations=pair(str(count), str(adjustments.get(each, 0)))),
            )
            for each, count in sorted(found.items())
            if each.brand == number and count
        ]
        brands.append(brand(*entries, number=number, name=f"Brand {number}"))
    return report(*brands)


def compare(
    accepted: Mapping[LedgerKey, int],
    periods: Iterable[Period],
    dead_letters: Mapping[LedgerKey, int] | None = None,
    **changes: Any,
) -> Reconciliation:
    options: dict[str, Any] = {"days": Days(), "today": LATER, "settle_days": 2, **changes}
    return reconcile(1001, list(periods), accepted, dead_letters or {}, **options)


def differing(found: Reconciliation) -> list[Row]:
    return [row for row in found.rows if row.difference]


def causes(row: Row) -> list[str]:
    return [each.cause for each in row.explanations]


def without(accepted: Counter[LedgerKey], rng: Random, count: int, day: date | None = None) -> Counter[LedgerKey]:
    """Lose so many of what a service has got."""
    left = +accepted
    start, end = (day or FIRST), (day or LAST)
    keys = [key for key in left.elements() if start.isoformat() <= key[0][:10] <= end.isoformat()]
    left.subtract(rng.sample(keys, count))
    return left


# What is compared


@pytest.mark.parametrize("split", ["day", "month", "none"])
def test_what_agrees_is_told_to_agree(rng: Random, split: Split):
    accepted = ledger(rng)
    found = compare(accepted, reports(accepted, split=split))
    assert found.verdict == "agree"
    assert not differing(found)
    count = sum(row.accepted for row in found.rows)
    assert count == sum(row.result or 0 for row in found.rows) > 100
    assert headlines(found) == [
        "Verdict: agree. The report and the ledger agree.",
        f"Total {FIRST} to {LAST}: accepted {count:,}, reported {count:,}, difference 0.",
    ]


def test_what_the_service_lost_is_found_where_it_was_lost(rng: Random):
    accepted = ledger(rng)
    received = without(accepted, rng, 7, DAY_4.start)
    found = compare(accepted, reports(received))
    lost = Counter[Pair]()
    for key, count in (accepted - received).items():
        lost[Pair(key[1], int(key[3]))] += count
    assert {row.pair: -row.difference for row in differing(found)} == lost
    assert {row.days for row in differing(found)} == {DAY_4}
    assert {row.status for row in differing(found)} == {"unexplained"}
    assert headlines(found)[0].startswith("Verdict: differences. 7 accepted records are missing")


def test_what_the_report_has_more_is_unexplained_too(rng: Random):
    accepted = ledger(rng)
    key = next(key for key in accepted if key[0].startswith("2026-10-04"))
    found = compare(accepted, reports(accepted + Counter({key: 2})))
    (row,) = differing(found)
    assert (row.difference, row.unexplained, row.status) == (2, 2, "unexplained")
    assert "2 registrations more" in headlines(found)[0]


def test_a_source_of_the_report_without_records_is_a_row_and_so_is_the_reverse(rng: Random):
    accepted = ledger(rng)
    (first, *others) = reports(accepted)
    alone = brand(entry(99, conversions=wire.Conversions(registrations=pair("4"))), number=77)
    first.report.brands.append(alone)
    accepted["2026-10-02T05", 55, "", "99"] = 3
    found = compare(accepted, [first, *others])
    rows = {(row.days.start.day, row.pair): row for row in differing(found)}
    assert rows.keys() == {(1, Pair(77, 99)), (2, Pair(55, 99))}
    assert "nothing was accepted" in said_of(rows[1, Pair(77, 99)])
    assert "the report has no figure" in said_of(rows[2, Pair(55, 99)])
    assert (rows[1, Pair(77, 99)].difference, rows[2, Pair(55, 99)].difference) == (4, -3)


def test_a_source_without_a_figure_counts_as_nothing_reported():
    period = Period(DAY_4, report(brand(entry(5, conversions=None))))
    (row,) = compare({("2026-10-04T10", 11, "", "5"): 3}, [period]).rows
    assert (row.result, row.difference, row.status) == (None, -3, "unexplained")


def test_records_are_the_accounts_by_media_or_by_affiliate():
    period = Period(DAY_4, report(brand(entry(5, conversions=wire.Conversions(registrations=pair("1"))))))
    accepted = {
        ("2026-10-04T10", 11, "", "0005"): 1,
        ("2026-10-04T10", 11, "1001", "6"): 2,
        ("2026-10-04T10", 11, "1001", ""): 4,
        ("2026-10-04T10", 11, "2002", "7"): 8,
        ("2026-10-04T10", 11, "", ""): 16,
        ("2026-10-05T10", 11, "", "7"): 32,
    }
    found = compare(accepted, [period])
    assert {row.pair.source: row.accepted for row in found.rows} == {5: 1, 6: 2, None: 4}
    assert {each.pair.source: each.accepted for each in found.elsewhere} == {7: 8, None: 16}
    assert found.unassigned == 24
    others = compare(accepted, [period], owners=Owners(named={2002: frozenset({7})}))
    assert {each.owner: each.accepted for each in others.elsewhere} == {2002: 8, None: 16}
    assert any("8 accepted records are of other accounts" in said for said in remarks(others, shows_elsewhere=False))


@pytest.mark.parametrize(
    ("affiliate", "media", "owner", "claimants"),
    [
        ("", "5", 1001, {1001}),
        ("", "0005", 1001, {1001}),
        ("2002", "5", 1001, {1001, 2002}),
        ("", "6", 1001, {1001, 2002}),
        ("2002", "6", 2002, {1001, 2002}),
        ("3003", "6", 1001, {1001, 2002, 3003}),
        ("", "7", 3003, {2002, 3003}),
        ("2002", "9", 2002, {2002}),
        ("aff-3", "9", 3003, {3003}),
        ("aff-3", "", 3003, {3003}),
        ("4004", "9", None, set()),
        ("", "", None, set()),
    ],
)
def test_a_record_belongs_to_one_account(affiliate: str, media: str, owner: int | None, claimants: set[int]):
    """By the settings for the media, then by the reports that name it, then by its AffiliateID."""
    named = {1001: frozenset({5, 6}), 2002: frozenset({6, 7})}
    claims = Owners({7: 3003}, {"aff-3": 3003}, named).claims()
    assert claims.of(("2026-10-04T10", 11, affiliate, media)) == (owner, claimants)


# What explains a difference


def test_an_adjustment_explains_no_more_than_itself(rng: Random):
    accepted = ledger(rng)
    place = DAY_4, Pair(11, 50121)
    (row,) = differing(compare(accepted, reports(accepted, adjustments={place: -2})))
    assert (row.difference, row.unexplained, causes(row), row.status) == (-2, 0, ["adjustment"], "explained")
    lost = +accepted
    lost["2026-10-04T10", 11, "", "50121"] -= 1
    accepted["2026-10-04T10", 11, "", "50121"] += 2
    (row,) = differing(compare(accepted, reports(lost, adjustments={place: -2})))
    assert (row.difference, row.unexplained, row.status) == (-5, -3, "unexplained")
    (row,) = differing(compare(accepted, reports(lost, adjustments={place: 1})))
    assert (row.difference, row.unexplained, causes(row)) == (-2, -2, [])


def test_dead_letters_explain_what_the_report_has_more_and_never_what_it_lacks(rng: Random):
    accepted = ledger(rng)
    key = ("2026-10-04T10", 11, "", "50121")
    received = accepted + Counter({key: 3})
    (row,) = differing(compare(accepted, reports(received), {key: 3}))
    assert (row.dead_letters, row.unexplained, causes(row)) == (3, 0, ["dead_letters"])
    (row,) = differing(compare(accepted, reports(received), {key: 2}))
    assert (row.unexplained, row.status) == (1, "unexplained")
    (row,) = differing(compare(accepted, reports(received), {("2026-10-05T10", *key[1:]): 3}))
    assert causes(row) == [], "of another day"
    (row,) = differing(compare(received, reports(accepted), {key: 3}))
    assert (row.unexplained, row.status) == (-3, "unexplained")


def test_a_restatement_explains_what_agreed_before(rng: Random):
    accepted = ledger(rng)
    agreed = reports(accepted)
    received = without(accepted, rng, 3, DAY_4.start)
    periods = [now._replace(earlier=[before.report]) for now, before in zip(reports(received), agreed, strict=True)]
    found = compare(accepted, periods)
    assert found.verdict == "explained"
    assert {row.days for row in differing(found)} == {DAY_4}
    for row in differing(found):
        assert causes(row) == ["restated"]
        assert said_of(row) == f"restated: the report said {row.accepted} before, as was accepted"


def test_a_restatement_of_what_never_agreed_is_named_and_explains_nothing(rng: Random):
    accepted = ledger(rng)
    key = ("2026-10-04T10", 11, "", "50121")
    before, now = accepted - Counter({key: 1}), accepted + Counter({key: 4})
    accepted[key] += 1
    earlier = [period.report for period in reports(before)]
    periods = [each._replace(earlier=[old]) for each, old in zip(reports(now), earlier, strict=True)]
    (row,) = differing(compare(accepted, periods))
    assert (causes(row), row.status, row.unexplained) == (["restated"], "unexplained", row.difference)


def test_a_report_that_said_nothing_before_explains_nothing():
    now = report(brand(entry(5, conversions=wire.Conversions(registrations=pair("3")))))
    (row,) = compare({}, [Period(DAY_4, now, [report()])]).rows
    assert (causes(row), row.unexplained) == ([], 3)


def test_a_period_that_is_not_settled_is_provisional(rng: Random):
    accepted = ledger(rng)
    received = without(accepted, rng, 5, LAST)
    for ago, status in ((0, "provisional"), (1, "provisional"), (2, "unexplained")):
        found = compare(accepted, reports(received), today=LAST + timedelta(days=ago))
        assert {row.status for row in differing(found)} == {status}
        assert found.verdict == ("not yet judged" if status == "provisional" else "differences")
    over = LAST + timedelta(days=1)
    assert compare(accepted, reports(received), today=over, settle_days=0).verdict == "differences"
    found = compare(accepted, reports(received), today=LAST, settle_days=0)
    assert (found.verdict, found.again_on) == ("not yet judged", over)


def test_days_that_are_not_judged_are_named_with_the_reason_and_the_day_to_ask_again(rng: Random):
    accepted = ledger(rng)
    accepted["2026-10-07T10", 11, "", "50121"] += 5
    received = accepted - Counter({("2026-10-07T10", 11, "", "50121"): 5})
    later = Hole(DateRange(LAST + timedelta(days=1), date(2026, 10, 31)), "")
    found = compare(accepted, reports(received), today=LAST, later=later)
    assert found.verdict == "not yet judged"
    judged = sum(row.accepted for row in found.rows if row.days.end < date(2026, 10, 7))
    whole = sum(row.accepted for row in found.rows)
    assert headlines(found) == [
        "Verdict: not yet judged. In what can be judged, nothing is unexplained.",
        f"Total 2026-10-01 to 2026-10-08: accepted {whole:,}, reported {whole - 5:,}, difference -5.",
        f"Judged 2026-10-01 to 2026-10-06: accepted {judged:,}, reported {judged:,}, difference 0.",
        "Not yet judged: 2026-10-07 (ended less than 2 days ago), 2026-10-08 (not over), 2026-10-09 to 2026-10-31 (not "
        "begun). Run it again on 2026-11-02 or later.",
    ]
    over = compare(accepted, reports(accepted), today=LAST + timedelta(days=1))
    assert over.verdict == "agree", "a day that is over and has no difference is not left open"


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_nothing_on_either_side_is_no_agreement(refused: int):
    found = compare({}, [Period(DAY_4, report())], {("2026-10-04T10", 11, "1001", "5"): refused})
    assert found.verdict == "nothing to compare"
    words = {
        0: "Nothing was sent and nothing is reported.",
        1: "1 record was refused after it was sent, nothing was accepted and nothing is reported.",
        3: "3 records were refused after they were sent, nothing was accepted and nothing is reported.",
    }
    assert headlines(found)[0] == f"Verdict: nothing to compare. {words[refused]}"


def test_a_difference_of_several_parts_is_taken_apart(rng: Random):
    accepted = ledger(rng)
    received = moved(accepted, [2, 5], [3, 4])
    received["2026-10-07T12", 11, "", "50121"] = 0
    accepted["2026-10-07T12", 11, "", "50121"] = 9
    found = compare(accepted, reports(received, adjustments={(DAY_4, Pair(12, 50121)): -2}))
    assert headlines(found)[1].endswith(", difference -4 (-9 missing, +7 too many, -2 explained).")


def test_a_result_below_zero_of_a_young_day_is_a_difference_that_no_time_mends():
    figures = wire.Conversions(registrations=pair("-5"))
    found = compare({}, [Period(DAY_4, report(brand(entry(5, conversions=figures))))], today=DAY_4.start)
    assert (found.verdict, found.rows[0].unexplained) == ("differences", -5)


def test_figures_of_thirty_digits_are_added_and_taken_apart_exactly():
    huge = "123456789012345678901234567890"
    taken_back = f"-{int(huge) - 1}"
    figures = wire.Conversions(registrations=pair(huge, taken_back))
    brands = [brand(entry(number, conversions=figures)) for number in (5, 6)]
    found = compare({}, [Period(DAY_4, report(*brands))])
    totals = totals_of(found.rows)
    assert (totals.result, totals.adjustment) == (2 * int(huge), 2 * int(taken_back))
    lacking = wire.Conversions(registrations=pair(f"-{huge}"))
    found = compare({}, [Period(DAY_4, report(brand(entry(5, conversions=lacking))))])
    assert totals_of(found.rows).missing == int(huge)
    assert f"{int(huge):,} missing" in said_of(found.rows[0])


# Day boundaries


@pytest.mark.parametrize("hours", [hours for hours in OFFSETS if hours])
def test_days_of_another_zone_are_found_and_named(rng: Random, hours: int):
    accepted = ledger(rng)
    found = compare(accepted, reports(accepted, days_of_offset(hours)))
    assert found.zone
    assert [clock.option for clock in found.zone.clocks] == [zone_of_offset(hours)]
    assert found.verdict == "explained"
    assert f"{days_of_offset(hours).name} (--timezone {zone_of_offset(hours)})" in headlines(found)[0]
    assert "by chance a zone fits in less than 1 of 1,000,000,000 cases" in headlines(found)[0]
    for row in differing(found):
        assert causes(row) == ["time_zone"]
        assert row.explanations[0].amount == row.difference
    again = compare(accepted, found.periods, days=days_of_zone(zone_of_offset(hours)))
    assert not differing(again)


@pytest.mark.parametrize("name", ["Europe/Malta", "Europe/London", "America/New_York"])
def test_a_clock_that_changed_for_the_winter_meanwhile_is_named(rng: Random, name: str):
    """No number of hours fits the days before the change and those after it."""
    change = date(2026, 10, 25) if name.startswith("Europe") else date(2026, 11, 1)
    accepted = Counter(
        {
            (f"{change + timedelta(days=at // 24 - 14)}T{at % 24:02}", 11, "", "50121"): rng.randrange(2, 9)
            for at in range(24 * 22)
        }
    )
    by_clock: Counter[date] = Counter()
    for key, count in accepted.items():
        by_clock[date.fromisoformat(days_of_zone(name).day_of(key[0]))] += count
    periods = []
    for day in (change + timedelta(days=at) for at in range(-12, 6)):
        figures = wire.Conversions(registrations=pair(str(by_clock[day])))
        periods.append(Period(DateRange(day, day), report(brand(entry(50121, conversions=figures)))))
    found = compare(accepted, periods)
    assert (found.zone and [clock.option for clock in found.zone.clocks], found.verdict) == ([name], "explained")
    assert f"with those of {name} (--timezone {name}) all differences vanish" in headlines(found)[0]
    assert not differing(compare(accepted, periods, days=days_of_zone(name)))


@pytest.mark.parametrize("split", ["month", "none"])
def test_no_zone_explains_what_is_not_counted_by_day(rng: Random, split: Split):
    accepted = ledger(rng)
    found = compare(accepted, reports(accepted, days_of_offset(5), split))
    assert (found.zone, found.verdict) == (None, "differences")


def test_a_zone_is_not_named_where_records_were_lost(rng: Random):
    accepted = ledger(rng)
    received = without(accepted, rng, 7, DAY_4.start)
    found = compare(accepted, reports(received, days_of_offset(2)))
    assert (found.zone, found.verdict) == (None, "differences")
    assert "Etc/GMT" not in " ".join([*headlines(found), *remarks(found, shows_elsewhere=False)])
    assert any("--timezone" in said for said in remarks(found, shows_elsewhere=False))


def test_other_differences_stay_explained_by_themselves_in_days_of_another_zone(rng: Random):
    accepted = ledger(rng)
    place = DAY_4, Pair(11, 50121)

    def row_of(found: Reconciliation) -> Row:
        (row,) = (row for row in found.rows if (row.days, row.pair) == place)
        return row

    by_clock = row_of(compare(accepted, reports(accepted, days_of_offset(3)))).difference
    taken_back = -2 if by_clock != 2 else -3  # if the two cancelled each other, there would be nothing to explain
    found = compare(accepted, reports(accepted, days_of_offset(3), adjustments={place: taken_back}))
    assert (found.zone and found.zone.clocks[0].name, found.verdict, found.is_alarmed) == ("UTC+3", "explained", True)
    assert [each.amount for each in row_of(found).explanations] == (
        [by_clock, taken_back] if by_clock else [taken_back]
    )


def test_few_records_name_no_zone():
    """A record a day, moved each day by a clock: nineteen of them are too few, however well they fit."""
    pairs = [(11, 50121), (12, 50377)]
    accepted = Counter({(f"2026-10-{day:02}T22", *pairs[day % 2][:1], "", "50121"): 1 for day in range(1, 8)})
    accepted += Counter({(f"2026-10-{day:02}T12", 13, "", "50121"): 5 for day in range(1, 9)})
    found = compare(accepted, reports(accepted, days_of_offset(3)))
    assert (found.zone, found.verdict) == (None, "differences")


def test_what_is_likely_by_chance_names_no_zone():
    """Forty records in one hour: that they turn up the day after says as little as if it were one."""
    accepted = Counter({("2026-10-04T22", 11, "", "50121"): 40, ("2026-10-05T12", 11, "", "50121"): 9})
    found = compare(accepted, reports(accepted, days_of_offset(3)))
    assert (found.zone, found.verdict, found.count("unexplained")) == (None, "explained", 0)
    assert {cause for row in differing(found) for cause in causes(row)} == {"neighbours"}
    assert compare(accepted, reports(accepted, days_of_offset(3)), boundary_hours=1).verdict == "differences"


def test_losses_alone_are_no_day_boundary(rng: Random):
    """Records that were lost late in the evening would fit another zone; nothing turned up the day after."""
    accepted = Counter({(f"2026-10-04T{hour}", number, "", "50121"): 20 for number in (11, 12) for hour in (10, 23)})
    figures = wire.Conversions(registrations=pair("20"))
    brands = [brand(entry(50121, conversions=figures), number=number) for number in (11, 12)]
    found = compare(accepted, [Period(DAY_4, report(*brands))])
    assert (found.zone, found.verdict) == (None, "differences")


def moved(accepted: Counter[LedgerKey], days: list[int], counts: list[int]) -> Counter[LedgerKey]:
    """Add to and take from one brand and source at noon of these days."""
    found = +accepted
    for day, count in zip(days, counts, strict=True):
        found[f"2026-10-{day:02}T12", 11, "", "50121"] += count
    return found


@pytest.mark.parametrize(
    ("counts", "is_explained"),
    [
        ([-2, 2], True),
        ([2, -2], True),
        ([-5, 5], True),
        ([-6, 6], False),
        ([4, -4], False),
        ([-2, 1], False),
        ([-2, 0, 2], False),
        ([1, 2, -3], False),
        ([-2, 2, -2, 2], False),
    ],
)
def test_two_neighbouring_days_are_excused_by_no_more_than_lies_at_their_boundary(
    rng: Random, counts: list[int], is_explained: bool
):
    """Five records lie in the two hours before each midnight, three in the two hours after it."""
    accepted = +ledger(rng)
    for day in range(1, 9):
        for hour, count in {"00": 1, "01": 2, "02": 50, "12": 300, "21": 50, "22": 0, "23": 5}.items():
            accepted[f"2026-10-{day:02}T{hour}", 11, "", "50121"] = count
    days = list(range(4, 4 + len(counts)))
    found = compare(accepted, reports(moved(accepted, days, counts)))
    assert [row.difference for row in differing(found)] == [count for count in counts if count]
    assert (found.verdict == "explained") == is_explained
    if is_explained:
        assert {cause for row in differing(found) for cause in causes(row)} == {"neighbours"}
        some = {2: "2 of the 5 records", 5: "all 5 records"}
        if counts[0] < 0:
            assert f"{some[-counts[0]]} within 2 h of the end of 2026-10-04" in said_of(differing(found)[0])


def test_the_only_record_at_a_boundary_is_called_so():
    accepted = Counter({("2026-10-04T23", 11, "", "50121"): 1, ("2026-10-04T12", 11, "", "50121"): 7})
    received = Counter({("2026-10-05T00", 11, "", "50121"): 1, ("2026-10-04T12", 11, "", "50121"): 7})
    found = compare(accepted, reports(received))
    words = "day boundary: the only record within 2 h of the end of 2026-10-04 may count as of 2026-10-05"
    assert said_of(differing(found)[0]) == words


def test_months_do_not_excuse_each_other(rng: Random):
    days = [DateRange(date(2026, 9, 1), date(2026, 9, 30)), DateRange(date(2026, 10, 1), date(2026, 10, 31))]
    accepted = {("2026-09-30T23", 11, "", "50121"): 9, ("2026-10-01T00", 11, "", "50121"): 9}
    periods = [
        Period(part, report(brand(entry(50121, conversions=wire.Conversions(registrations=pair(count))))))
        for part, count in zip(days, ("7", "11"), strict=True)
    ]
    assert compare(accepted, periods).verdict == "differences"


def test_other_brands_do_not_cancel_each_other(rng: Random):
    accepted = ledger(rng)
    accepted["2026-10-05T12", 12, "", "50121"] += 2
    received = moved(accepted, [4], [2])
    received["2026-10-05T12", 12, "", "50121"] -= 2
    assert compare(accepted, reports(received)).verdict == "differences"


# Forms


@pytest.fixture
def found(rng: Random) -> Reconciliation:
    accepted = ledger(rng)
    accepted["2026-10-03T01", 11, "", "777"] = 9
    received = without(accepted - Counter({("2026-10-03T01", 11, "", "777"): 9}), rng, 7, DAY_4.start)
    owners = Owners(named={2002: frozenset({777})})
    return compare(accepted, reports(received, adjustments={(DAY_4, Pair(13, 50377)): 0}), owners=owners)


def test_csv_has_every_row_and_with_all_those_of_others(found: Reconciliation):
    lines = to_csv(flat_table(found, shows_elsewhere=False)).decode().splitlines()
    assert len(lines) == 1 + len(found.rows)
    (other,) = to_csv(flat_table(found, shows_elsewhere=True)).decode().splitlines()[len(lines) :]
    assert next(csv.reader([other])) == [
        *("1001", "2026-10-03", "2026-10-03", "11", "", "777", "", "9", "0"),
        *("", "", "", "", "", "", "", "", "of another account", "of account 2002", "differences", "false", "UTC"),
    ]


def test_json_says_everything(found: Reconciliation):
    made = json.loads(to_json(found, ["A note."], shows_elsewhere=True))
    assert (made["account_id"], made["start"], made["end"], made["timezone"]) == (
        1001,
        "2026-10-01",
        "2026-10-08",
        "UTC",
    )
    assert (made["verdict"], made["totals"]["missing"], made["totals"]["difference"]) == ("differences", 7, -7)
    assert sum(row["accepted"] for row in made["rows"]) == made["totals"]["accepted"]
    assert sum(made["rows_by_status"].values()) == len(made["rows"])
    assert made["of_other_accounts"]["accepted"] == made["of_other_accounts"]["rows"][0]["accepted"] == 9
    assert "A note." in made["notes"]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_shows_what_differs_at_any_width(found: Reconciliation, width: int):
    console = Console(width=width)
    with console.capture() as captured:
        print_table(found, ["A note."], console, shows_all=False)
    text = captured.get()
    assert text.count("2026-10-04") == len(differing(found)) > 0
    assert "2026-10-05" not in text
    assert max(map(len, text.splitlines())) <= width
    for words in (
        "7 accepted records are missing",
        "9 accepted records are of other",
        "A note.",
        "further lines agree",
    ):
        assert words in " ".join(text.split())
    with console.capture() as captured:
        print_table(found, [], console, shows_all=True)
    assert "777" in captured.get()


def test_an_adjustment_is_part_of_what_the_table_shows_as_reported(rng: Random):
    accepted = ledger(rng)
    found = compare(accepted, reports(accepted, adjustments={(DAY_4, Pair(11, 50121)): -2}))
    (row,) = differing(found)
    for width in (80, 140):
        console = Console(width=width)
        with console.capture() as captured:
            print_table(found, [], console, shows_all=False)
        lines = captured.get().splitlines()
        assert f"reported {totals_of(found.rows).reported:,}, difference -2" in " ".join(captured.get().split())
        assert any(f"{row.reported:,}" in line and "-2" in line for line in lines)
        assert sum("incl. adj -2" in line for line in lines) == 2
        assert not [line for line in lines if width == 80 and line.startswith(("adj", "report "))]


def test_the_page_stands_alone_and_names_are_text():
    names = hostile()
    for each in names.brands:
        each.marketing_sources[:] = each.marketing_sources[:1]
    found = compare({}, [Period(DAY_4, names)])
    page = render_page(found, list(HOSTILE_NAMES), made_at="2026-12-01T08:00:00Z", shows_all=True)
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert "</style><b" not in page
    assert "\x1b" not in page
    assert "https://" not in page.replace("https://example.com", "")
    assert Decimal(page.split('<data value="')[2].split('"')[0]) == 433 * len(names.brands) - 3 * len(names.brands)
