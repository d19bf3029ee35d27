"""The ledger compared with the report: every difference is found, and only explained for a valid reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shipper.model import wire
from shipper.model.errors import ConfigError
from shipper.model.records import LedgerKey
from shipper.report.days import OFFSETS, Days, days_of_offset, days_of_zone, zone_of_offset
from shipper.report.ranges import DateRange, Split, split_range
from shipper.report.reconcile.compare import reconcile
from shipper.report.reconcile.model import Excluded, Pair, Period, Reconciliation, Row
from shipper.report.reconcile.owners import Claims, Owners, read_owners
from shipper.report.reconcile.summary import headlines, reasons_of, remarks
from tests.cases import each
from tests.report_documents import brand, entry, registered, report

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
    """Return the reports of a platform for these records by its days; `adjustments` by day and pair."""
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
    for number in sorted({pair.brand for pair in found}):
        entries = [
            registered(pair.source or 0, count, adjustments.get(pair, 0))
            for pair, count in sorted(found.items())
            if pair.brand == number and count
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
    return [explanation.cause for explanation in row.explanations]


def without(accepted: Counter[LedgerKey], rng: Random, count: int, day: date | None = None) -> Counter[LedgerKey]:
    """Remove a number of records from those received."""
    left = +accepted
    start, end = (day or FIRST), (day or LAST)
    keys = [key for key in left.elements() if start.isoformat() <= key[0][:10] <= end.isoformat()]
    left.subtract(rng.sample(keys, count))
    return left


# What is compared


@pytest.mark.parametrize("split", ["day", "month", "none"])
def test_equal_counts_agree(rng: Random, split: Split):
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


def test_lost_records_are_found_where_they_were_lost(rng: Random):
    accepted = ledger(rng)
    received = without(accepted, rng, 7, DAY_4.start)
    found = compare(accepted, reports(received))
    lost = Counter[Pair]()
    for key, count in (accepted - received).items():
        lost[Pair(key[1], int(key[3]))] += count
    assert {row.pair: -row.difference for row in differing(found)} == lost
    assert {(row.days, row.status) for row in differing(found)} == {(DAY_4, "unexplained")}
    assert headlines(found)[0].startswith("Verdict: differences. 7 accepted records are missing")


def test_a_surplus_of_the_report_is_unexplained(rng: Random):
    accepted = ledger(rng)
    key = next(key for key in accepted if key[0].startswith("2026-10-04"))
    found = compare(accepted, reports(accepted + Counter({key: 2})))
    (row,) = differing(found)
    assert (row.difference, row.unexplained, row.status) == (2, 2, "unexplained")
    assert "2 more registrations" in headlines(found)[0]


def test_a_source_without_records_or_without_a_report_is_a_row(rng: Random):
    accepted = ledger(rng)
    (first, *others) = reports(accepted)
    alone = brand(registered(99, 4), number=77)
    first.report.brands.append(alone)
    accepted["2026-10-02T05", 55, "", "99"] = 3
    found = compare(accepted, [first, *others])
    rows = {(row.days.start.day, row.pair): row for row in differing(found)}
    assert rows.keys() == {(1, Pair(77, 99)), (2, Pair(55, 99))}
    assert "nothing was accepted" in reasons_of(rows[1, Pair(77, 99)])
    assert "the report has no figure" in reasons_of(rows[2, Pair(55, 99)])
    assert (rows[1, Pair(77, 99)].difference, rows[2, Pair(55, 99)].difference) == (4, -3)


def test_a_source_without_a_figure_counts_as_nothing_reported():
    period = Period(DAY_4, report(brand(entry(5, conversions=None))))
    (row,) = compare({("2026-10-04T10", 11, "", "5"): 3}, [period]).rows
    assert (row.result, row.difference, row.status) == (None, -3, "unexplained")


def test_records_are_assigned_to_accounts_by_media_or_affiliate():
    period = Period(DAY_4, report(brand(registered(5, 1))))
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
    assert {records.pair.source: records.accepted for records in found.excluded if records.pair} == {7: 8, None: 16}
    assert found.unassigned == 24
    others = compare(accepted, [period], owners=Owners(named={2002: frozenset({7})}))
    assert {records.owner: records.accepted for records in others.excluded} == {2002: 8, None: 16}
    assert any("8 accepted records are of other accounts" in said for said in remarks(others))


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
    claims = Claims(Owners({7: 3003}, {"aff-3": 3003}, named))
    assert claims.of(("2026-10-04T10", 11, affiliate, media)) == (owner, claimants)


@each(
    ("text", "words"),
    [
        ("account,media\n1,2\n", "line 1: the first line is not account,media,affiliate_id"),
        ("account,media,affiliate_id\n1001,x,\n", "line 2: its media is not a number"),
        ("account,media,affiliate_id\n1001,,\n", "line 2: it has neither media nor affiliate_id"),
        ("account,media,affiliate_id\n1,5,\n2,5,\n", "line 3: it assigns 5 to account 2, but an earlier line to"),
        (None, "cannot read"),
    ],
)
def test_an_unusable_accounts_file_is_an_error_with_its_line(text: str | None, words: str, tmp_path: Path):
    path = tmp_path / "accounts.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_owners(path if text is not None else tmp_path / "none.csv")
    assert caught.value.key == "report.accounts"


@each(
    "text", ["account,media,affiliate_id\n1001,5,-5\n", "\ufeffaccount;media;affiliate_id;\r\n1001;5;'-5;\r\n;;;\r\n"]
)
def test_an_accounts_file_may_be_written_by_a_spreadsheet(text: str, tmp_path: Path):
    path = tmp_path / "accounts.csv"
    path.write_text(text, encoding="utf-8")
    assert read_owners(path) == Owners({5: 1001}, {"-5": 1001})


# What explains a difference


def test_an_adjustment_explains_at_most_its_own_amount(rng: Random):
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


def test_dead_letters_explain_a_surplus_and_never_a_lack(rng: Random):
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


def test_a_restatement_explains_rows_that_agreed_before(rng: Random):
    accepted = ledger(rng)
    agreed = reports(accepted)
    received = without(accepted, rng, 3, DAY_4.start)
    periods = [now._replace(earlier=[before.report]) for now, before in zip(reports(received), agreed, strict=True)]
    found = compare(accepted, periods)
    assert found.verdict == "explained"
    assert {row.days for row in differing(found)} == {DAY_4}
    for row in differing(found):
        assert causes(row) == ["restated"]
        assert reasons_of(row) == f"restated: the report had {row.accepted} before, as accepted"


@each(("before", "now"), [(-1, -4), (-1, 4), (0, 4)])
def test_a_restatement_explains_no_surplus_and_no_row_that_never_agreed(before: int, now: int, rng: Random):
    accepted = ledger(rng)
    key = ("2026-10-04T10", 11, "", "50121")
    accepted[key] += 5
    earlier, latest = (reports({**accepted, key: accepted[key] + lead}) for lead in (before, now))
    periods = [period._replace(earlier=[old.report]) for period, old in zip(latest, earlier, strict=True)]
    (row,) = differing(compare(accepted, periods))
    assert (causes(row), row.status, row.unexplained) == (["restated"], "unexplained", row.difference)


@pytest.mark.parametrize("adjustments", [(None, None), (None, "0"), ("0", None)], ids=str)
def test_a_missing_adjustment_counts_as_zero_in_a_restatement(adjustments: tuple[str | None, str | None]):
    def of(result: str, adjustment: str | None) -> wire.DailyReport:
        figure = wire.AmountPair(Decimal(result), adjustment and Decimal(adjustment))
        return report(brand(entry(5, conversions=wire.Conversions(registrations=figure))))

    before, now = of("100", adjustments[0]), of("96", adjustments[1])
    found = compare({("2026-10-04T10", 11, "", "5"): 100}, [Period(DAY_4, now, [before])])
    assert (found.verdict, found.is_alarmed) == ("explained", True)
    assert reasons_of(found.rows[0]) == "restated: the report had 100 before, as accepted"


def test_an_earlier_report_without_the_source_or_its_result_explains_nothing():
    without_result = report(brand(entry(5, conversions=wire.Conversions(registrations=wire.AmountPair()))))
    for before in (without_result, report()):
        (row,) = compare({}, [Period(DAY_4, report(brand(registered(5, 3))), [before])]).rows
        assert (causes(row), row.unexplained) == ([], 3)


def test_a_period_that_is_not_settled_is_provisional(rng: Random):
    accepted = ledger(rng)
    received = without(accepted, rng, 5, LAST)
    cases = [(settle_days, ago) for settle_days in (0, 1, 2, 5) for ago in range(8)]
    for settle_days, ago in cases:  # a day ends where the next one begins
        today = LAST + timedelta(days=ago)
        status = "unexplained" if ago - 1 >= settle_days else "provisional"
        found = compare(accepted, reports(received), today=today, settle_days=settle_days)
        assert {row.status for row in differing(found)} == {status}
        assert found.verdict == ("not yet judged" if status == "provisional" else "differences")
        retry = None if status == "unexplained" else LAST + timedelta(days=settle_days + 1)
        assert found.judgeable_on == retry
    adjusted = reports(accepted, adjustments={(DateRange(LAST, LAST), Pair(11, 50121)): -3})
    (row,) = differing(compare(accepted, adjusted, today=LAST))
    assert (row.status, row.explanations) == ("provisional", ())


def test_days_without_a_verdict_are_listed_with_the_reason_and_the_day_to_retry(rng: Random):
    received = ledger(rng)
    accepted = received + Counter({("2026-10-07T10", 11, "", "50121"): 5})
    later = Excluded("not begun", DateRange(LAST + timedelta(days=1), date(2026, 10, 31)), "")
    found = compare(accepted, reports(received), today=LAST, excluded=[later])
    assert found.verdict == "not yet judged"
    judged = sum(row.accepted for row in found.rows if row.days.end < date(2026, 10, 7))
    whole = sum(row.accepted for row in found.rows)
    assert headlines(found) == [
        "Verdict: not yet judged. There are no unexplained differences in the days that can be judged.",
        f"Total 2026-10-01 to 2026-10-08: accepted {whole:,}, reported {whole - 5:,}, difference -5.",
        f"Judged 2026-10-01 to 2026-10-06: accepted {judged:,}, reported {judged:,}, difference 0.",
        "Not yet judged: 2026-10-07 (ended less than 2 days ago), 2026-10-08 (not over), 2026-10-09 to 2026-10-31 (not "
        "begun). Run it again on 2026-11-03 or later.",
    ]
    over = compare(accepted, reports(accepted), today=LAST + timedelta(days=1))
    assert over.verdict == "agree", "a day that is over and has no difference is not left open"


@each(
    ("refused", "words"),
    [
        (0, "Nothing was sent and nothing is reported."),
        (1, "1 record was refused after it was sent, nothing was accepted and nothing is reported."),
        (3, "3 records were refused after they were sent, nothing was accepted and nothing is reported."),
    ],
)
def test_two_empty_sides_do_not_agree(refused: int, words: str):
    found = compare({}, [Period(DAY_4, report())], {("2026-10-04T10", 11, "1001", "5"): refused})
    assert found.verdict == "nothing to compare"
    assert headlines(found)[0] == f"Verdict: nothing to compare. {words}"


def test_a_difference_of_several_parts_is_broken_down(rng: Random):
    accepted = ledger(rng)
    received = moved(accepted, [2, 5], [3, 4])
    received["2026-10-07T12", 11, "", "50121"] = 0
    accepted["2026-10-07T12", 11, "", "50121"] = 9
    found = compare(accepted, reports(received, adjustments={(DAY_4, Pair(12, 50121)): -2}))
    assert headlines(found)[1].endswith(", difference -4 (-9 missing, +7 too many, -2 explained).")


def test_a_negative_result_of_a_recent_day_is_a_final_difference():
    found = compare({}, [Period(DAY_4, report(brand(registered(5, -5))))], today=DAY_4.start)
    assert (found.verdict, found.rows[0].unexplained) == ("differences", -5)


def test_figures_of_thirty_digits_are_added_and_broken_down_exactly():
    huge = "123456789012345678901234567890"
    taken_back = f"-{int(huge) - 1}"
    brands = [brand(registered(number, huge, taken_back)) for number in (5, 6)]
    found = compare({}, [Period(DAY_4, report(*brands))])
    totals = found.totals
    assert (totals.result, totals.adjustment) == (2 * int(huge), 2 * int(taken_back))
    found = compare({}, [Period(DAY_4, report(brand(registered(5, f"-{huge}"))))])
    assert found.totals.missing == int(huge)
    assert f"{int(huge):,} missing" in reasons_of(found.rows[0])


# Day boundaries


@pytest.mark.parametrize("hours", [hours for hours in OFFSETS if hours])
def test_days_of_another_zone_are_found_and_named(rng: Random, hours: int):
    accepted = ledger(rng)
    found = compare(accepted, reports(accepted, days_of_offset(hours)))
    assert [clock.option for clock in found.zone.zones] == [zone_of_offset(hours)]
    assert found.verdict == "explained"
    assert f"{days_of_offset(hours).name} (--timezone {zone_of_offset(hours)})" in headlines(found)[0]
    assert "a zone would match by coincidence in less than 1 of 1,000,000,000 cases" in headlines(found)[0]
    for row in differing(found):
        assert causes(row) == ["time_zone"]
        assert row.explanations[0].amount == row.difference
    again = compare(accepted, found.periods, days=days_of_zone(zone_of_offset(hours)))
    assert not differing(again)


@pytest.mark.parametrize("name", ["Europe/Malta", "Europe/London", "America/New_York"])
def test_a_clock_with_a_change_to_winter_time_is_named(rng: Random, name: str):
    """No number of hours fits the days before the change and those after it."""
    change = date(2026, 10, 25) if name.startswith("Europe") else date(2026, 11, 1)
    hours = [f"{change + timedelta(days=at // 24 - 14)}T{at % 24:02}" for at in range(24 * 22)]
    accepted = Counter({(hour, 11, "", "50121"): rng.randrange(2, 9) for hour in hours})
    by_clock: Counter[str] = Counter()
    for key, count in accepted.items():
        by_clock[days_of_zone(name).day_of(key[0])] += count
    days = [change + timedelta(days=at) for at in range(-12, 6)]
    periods = [Period(DateRange(day, day), report(brand(registered(50121, by_clock[f"{day}"])))) for day in days]
    found = compare(accepted, periods)
    assert (found.zone and [clock.option for clock in found.zone.zones], found.verdict) == ([name], "explained")
    assert f"with days in {name} (--timezone {name}), all differences disappear" in headlines(found)[0]
    assert not differing(compare(accepted, periods, days=days_of_zone(name)))


@pytest.mark.parametrize("split", ["month", "none"])
def test_no_zone_explains_periods_of_several_days(rng: Random, split: Split):
    accepted = ledger(rng)
    found = compare(accepted, reports(accepted, days_of_offset(5), split))
    assert (found.zone, found.verdict) == (None, "differences")


def test_a_zone_is_not_named_if_records_were_lost(rng: Random):
    accepted = ledger(rng)
    received = without(accepted, rng, 7, DAY_4.start)
    found = compare(accepted, reports(received, days_of_offset(2)))
    assert (found.zone, found.verdict) == (None, "differences")
    assert "Etc/GMT" not in " ".join([*headlines(found), *remarks(found)])
    assert any("--timezone" in said for said in remarks(found))


def test_other_explanations_still_apply_in_days_of_another_zone(rng: Random):
    accepted = ledger(rng)
    place = DAY_4, Pair(11, 50121)

    def row_of(found: Reconciliation) -> Row:
        (row,) = (row for row in found.rows if (row.days, row.pair) == place)
        return row

    by_clock = row_of(compare(accepted, reports(accepted, days_of_offset(3)))).difference
    taken_back = -2 if by_clock != 2 else -3  # if the two cancelled each other, there would be nothing to explain
    found = compare(accepted, reports(accepted, days_of_offset(3), adjustments={place: taken_back}))
    assert (found.zone and found.zone.zones[0].name, found.verdict, found.is_alarmed) == ("UTC+3", "explained", True)
    amounts = [explanation.amount for explanation in row_of(found).explanations]
    assert amounts == [amount for amount in (by_clock, taken_back) if amount]


def test_no_zone_is_named_for_few_records():
    """A record a day, moved each day by a clock: nineteen of them are too few, however well they fit."""
    pairs = [(11, 50121), (12, 50377)]
    accepted = Counter({(f"2026-10-{day:02}T22", *pairs[day % 2][:1], "", "50121"): 1 for day in range(1, 8)})
    accepted += Counter({(f"2026-10-{day:02}T12", 13, "", "50121"): 5 for day in range(1, 9)})
    found = compare(accepted, reports(accepted, days_of_offset(3)))
    assert (found.zone, found.verdict) == (None, "differences")


def test_no_zone_is_named_if_the_fit_may_be_chance():
    """Forty records in one hour: that they turn up the day after says as little as if it were one."""
    accepted = Counter({("2026-10-04T22", 11, "", "50121"): 40, ("2026-10-05T12", 11, "", "50121"): 9})
    found = compare(accepted, reports(accepted, days_of_offset(3)))
    assert (found.zone, found.verdict, found.count("unexplained")) == (None, "explained", 0)
    assert {cause for row in differing(found) for cause in causes(row)} == {"neighbours"}
    assert compare(accepted, reports(accepted, days_of_offset(3)), boundary_hours=1).verdict == "differences"


def test_losses_alone_are_no_day_boundary(rng: Random):
    """Records that were lost late in the evening would fit another zone; nothing turned up the day after."""
    accepted = Counter({(f"2026-10-04T{hour}", number, "", "50121"): 20 for number in (11, 12) for hour in (10, 23)})
    brands = [brand(registered(50121, 20), number=number) for number in (11, 12)]
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
        *(([-2, 2], True), ([2, -2], True), ([-5, 5], True), ([-6, 6], False), ([4, -4], False), ([-2, 1], False)),
        *(([-2, 0, 2], False), ([1, 2, -3], False), ([-2, 2, -2, 2], False)),
    ],
)
def test_neighbouring_days_are_excused_only_by_records_at_their_boundary(
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
            assert f"{some[-counts[0]]} within 2 h of the end of 2026-10-04" in reasons_of(differing(found)[0])


def test_a_single_record_at_a_boundary_is_described_in_the_singular():
    accepted = Counter({("2026-10-04T23", 11, "", "50121"): 1, ("2026-10-04T12", 11, "", "50121"): 7})
    received = Counter({("2026-10-05T00", 11, "", "50121"): 1, ("2026-10-04T12", 11, "", "50121"): 7})
    found = compare(accepted, reports(received))
    words = "day boundary: the only record within 2 h of the end of 2026-10-04 may count for 2026-10-05"
    assert reasons_of(differing(found)[0]) == words


def test_months_do_not_excuse_each_other(rng: Random):
    months = (date(2026, 9, 1), date(2026, 9, 30), 7), (date(2026, 10, 1), date(2026, 10, 31), 11)
    accepted = {("2026-09-30T23", 11, "", "50121"): 9, ("2026-10-01T00", 11, "", "50121"): 9}
    periods = [Period(DateRange(*days), report(brand(registered(50121, count)))) for *days, count in months]
    assert compare(accepted, periods).verdict == "differences"


def test_other_brands_do_not_cancel_each_other(rng: Random):
    accepted = ledger(rng)
    accepted["2026-10-05T12", 12, "", "50121"] += 2
    received = moved(accepted, [4], [2])
    received["2026-10-05T12", 12, "", "50121"] -= 2
    assert compare(accepted, reports(received)).verdict == "differences"
