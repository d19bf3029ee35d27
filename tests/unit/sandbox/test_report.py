"""The daily report of the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import product
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.sandbox.figures import FIRST_DAY, LAST_DAY, month_of
from shipper.sandbox.report import Registrations, build_report
from shipper.sandbox.samples import BRANDS, MARKETING_SOURCES
from tests.cases import each

START, END = date(2026, 1, 1), date(2026, 1, 31)
NOW = datetime(2026, 2, 1, 8, 0, 0, 123_456, tzinfo=UTC).timestamp()
SOURCE = wire.ReportSource(1001, "Example Affiliate", "Example Operator")
ROWS = [
    Registrations("2026-01-05", 11, 50121, 40),
    Registrations("2026-01-05", 11, 50234, 2),
    Registrations("2026-01-31", 77, 50121, 7),
]


both_figures = each("figures", ["received", "seeded"])


def report(rows=ROWS, **kwargs) -> wire.DailyReport:
    arguments = {"source": SOURCE, "start": START, "end": END, "now_seconds": NOW, "figures": "received", "seed": 1}
    return build_report(rows, **{**arguments, "restated": {}, **kwargs})


def seeded(start: date = START, end: date = END, rows=(), **kwargs) -> wire.DailyReport:
    return report(rows, start=start, end=end, figures="seeded", **{"seed": 7, **kwargs})


def entries(made: wire.DailyReport) -> dict[tuple[int, int], wire.MarketingSource]:
    return {(brand.id, entry.id): entry for brand in made.brands for entry in brand.marketing_sources}


def registered(made: wire.DailyReport) -> dict[tuple[int, int], tuple[Decimal, Decimal]]:
    pairs = {key: entry.conversions.registrations for key, entry in entries(made).items()}
    return {key: (pair.result, pair.adjustment) for key, pair in pairs.items()}


def shared_figures(one: wire.DailyReport, other: wire.DailyReport) -> set[tuple[int, int]]:
    """Return the brands and sources with the same figures in both."""
    theirs = entries(other)
    return {key for key, entry in entries(one).items() if entry == theirs[key]}


class Number(str):
    """A number as written."""


def numbers(made: wire.DailyReport) -> list[tuple[str, str]]:
    """List the numbers of a report as they are written, each behind the names on the way to it."""

    def walk(value: object, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        if isinstance(value, Number):
            yield ".".join(path), value
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield from walk(inner, (*path, name))
        for inner in value if isinstance(value, list) else ():
            yield from walk(inner, path)

    return list(walk(json.loads(wire.encode_report(made), parse_int=Number, parse_float=Number), ()))


# What the sandbox makes


def test_registrations_are_grouped_by_brand_and_marketing_source():
    assert registered(report()) == {(11, 50121): (40, 0), (11, 50234): (2, 0), (77, 50121): (7, 0)}


@both_figures
def test_order_and_repetition_of_the_rows_do_not_matter(figures, rng: Random):
    keys = product((3, 9, 30), (77, 12, 9), (50377, 1, 50121))
    rows = [Registrations(f"2026-01-{day:02}", brand, source, day) for day, brand, source in keys]
    shuffled = rng.sample([*rows, *rows], 2 * len(rows))
    doubled = [row._replace(registered=2 * row.registered) for row in rows]
    assert report(shuffled, figures=figures) == report(doubled, figures=figures)
    assert registered(report(shuffled, figures=figures))[9, 1] == (84, 0)


@both_figures
def test_brands_and_their_sources_are_listed_once_in_the_order_of_their_ids(figures):
    made = report([*ROWS[::-1], Registrations("2026-01-05", 9, 7, 1)], figures=figures)
    ids = [(brand.id, entry.id) for brand in made.brands for entry in brand.marketing_sources]
    assert ids == sorted(set(ids))
    assert [brand.id for brand in made.brands] == sorted({brand_id for brand_id, _ in ids})


def test_registrations_of_other_days_are_left_out():
    rows = [Registrations(day, 11, 50121, 1) for day in ("2025-12-31", "2026-01-01", "2026-01-31", "2026-02-01")]
    assert registered(report(rows)) == {(11, 50121): (2, 0)}


def test_only_registrations_are_not_zero_in_received_figures():
    paths = {path for path, number in numbers(report()) if Decimal(number)}
    others = {path for path in paths if not path.endswith(("registrations.result", "id"))}
    assert others == {"source.affilaiteAccountId", "brands.marketingSources.exchangeRate"}


@each("make", [report, lambda: seeded(rows=ROWS)])
def test_counts_are_whole_and_money_has_four_decimals(make):
    counts = ("id", "Id", "clicks", "Customers.result", "Customers.adjustment", "ons.result", "ons.adjustment")
    for path, number in numbers(make()):
        is_count = path.endswith((*counts, "customers.result", "customers.adjustment"))
        assert re.fullmatch(r"-?\d+" if is_count else r"-?\d+\.\d{4}", number), path


def test_report_has_the_documented_form():
    document = msgspec.json.decode(wire.encode_report(report()))
    assert list(document) == [
        *("id", "lastCheckSum", "source", "reportingTime", "reportingPeriod", "reportingCurrency"),
        *("openingBalance", "outgoingBalance", "brands"),
    ]
    assert document["source"]["affilaiteAccountId"] == 1001
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["id"])
    assert re.fullmatch(r"[0-9a-f]{64}", document["lastCheckSum"])
    assert document["reportingTime"] == "2026-02-01T08:00:00.1234560Z"
    assert report(now_seconds=0).reporting_time == "1970-01-01T00:00:00.0000000Z"
    assert document["reportingPeriod"] == {"start": "2026-01-01T00:00:00", "end": "2026-01-31T23:59:59"}
    assert document["reportingCurrency"] == "Euro"


@both_figures
def test_checksum_and_id_change_with_the_figures_only(figures):
    first, later = report(figures=figures), report(figures=figures, now_seconds=NOW + 60)
    assert first.reporting_time != later.reporting_time
    assert replace(later, reporting_time=first.reporting_time) == first
    others = [
        report([*ROWS[:2], ROWS[2]._replace(registered=8)], figures=figures),
        report(end=date(2026, 1, 30), figures=figures),
        report([], figures=figures),
        report(source=replace(SOURCE, operator_name="Another"), figures=figures),
    ]
    assert len({made.last_check_sum for made in [first, *others]}) == 5
    assert len({made.id for made in [first, *others]}) == 5


# What it invents


def test_sample_brands_and_sources_have_figures_and_other_received_ones_have_registrations():
    made = seeded(rows=ROWS)
    assert set(entries(made)) == {*product(BRANDS, MARKETING_SOURCES), (77, 50121)}
    assert [key for key, entry in entries(made).items() if not entry.net_revenue.result] == [(77, 50121)]
    assert {key: value for key, value in registered(made).items() if value[0]} == registered(report())


def test_figures_depend_on_seed_and_account():
    made = seeded()
    month_of.cache_clear()
    assert seeded() == made
    assert not shared_figures(made, seeded(seed=8))
    assert not shared_figures(made, seeded(source=replace(SOURCE, affiliate_account_id=1002)))


@pytest.mark.parametrize("restated", [{}, {date(2026, 1, 9): 2}])
def test_balances_add_up(restated):
    made = seeded(rows=ROWS, restated=restated)
    for entry in entries(made).values():
        assert entry.outgoing_balance == entry.rev_share.total + entry.cpa_revenue.total + entry.fees.total
    earned = sum(entry.outgoing_balance for entry in entries(made).values())
    assert earned > 0
    assert made.outgoing_balance == made.opening_balance + earned


@pytest.mark.parametrize(
    ("starts", "next_day"),
    [
        ((START, date(2026, 1, 31), date(2025, 11, 17), FIRST_DAY, date.min), date(2026, 2, 1)),
        ((START, date(2026, 1, 9)), date(2026, 1, 10)),
        ((FIRST_DAY, date.min), date(2020, 1, 2)),
        ((date(2019, 12, 31), date.min), FIRST_DAY),
        ((LAST_DAY, date.max - timedelta(days=1)), date.max),
    ],
)
@pytest.mark.parametrize("restated", [{}, {date(2020, 1, 1): 1, date(2026, 1, 9): 2, date(2026, 2, 1): 1}])
def test_opening_balance_is_the_closing_one_of_the_period_before(starts, next_day, restated):
    opening = seeded(next_day, next_day, restated=restated).opening_balance
    for start in starts:
        before = seeded(start, next_day - timedelta(days=1), ROWS, restated=restated)
        assert before.outgoing_balance == opening


def test_there_are_no_figures_before_the_first_day_nor_after_the_last_one():
    for start, end in ((date.min, date.min), (date(2019, 1, 1), date(2019, 12, 31))):
        made = seeded(start, end)
        assert (made.opening_balance, made.outgoing_balance) == (0, 0)
    assert seeded(FIRST_DAY, FIRST_DAY).opening_balance == 0
    made = seeded(LAST_DAY + timedelta(days=1), date.max)
    assert made.outgoing_balance == made.opening_balance == seeded(date.min, date.max).outgoing_balance


def test_second_report_of_a_period_draws_nothing():
    seeded(date.min, date.max)
    drawn = month_of.cache_info().misses
    seeded(date.min, date.max)
    seeded(date(2035, 12, 1), date(2035, 12, 31))
    assert month_of.cache_info().misses == drawn


# What a restatement does


@pytest.mark.parametrize(("times", "taken_back"), [(0, [0, 0, 0]), (1, [-1, -1, 0]), (3, [-3, -2, 0])])
@both_figures
def test_restatement_takes_back_at_most_the_registrations_of_its_day(figures, times, taken_back):
    made = registered(report(figures=figures, restated={date(2026, 1, 5): times}))
    keys = [(11, 50121), (11, 50234), (77, 50121)]
    assert [made[key] for key in keys] == list(zip((40, 2, 7), taken_back, strict=True))


def test_days_are_restated_one_by_one():
    rows = [Registrations(f"2026-01-{day:02}", 11, 50121, 1) for day in (1, 1, 2, 3)]
    assert registered(report(rows, restated={date(2026, 1, 1): 5, date(2026, 1, 3): 5})) == {(11, 50121): (4, -3)}


@both_figures
def test_restatement_changes_the_checksum_of_its_period_each_time(figures):
    sums = {report(figures=figures, restated={date(2026, 1, 5): times}).last_check_sum for times in range(4)}
    assert len(sums) == 4
    assert report(figures=figures, restated={date(2026, 2, 1): 1}) == report(figures=figures)


@pytest.mark.parametrize("day", [START, date(2026, 1, 9), END])
def test_restatement_changes_the_figures_of_its_period_and_the_balance_of_later_ones(day):
    restated = {day: 1}
    assert not shared_figures(seeded(day, day), seeded(day, day, restated=restated))
    assert seeded(restated=restated).opening_balance == seeded().opening_balance
    assert seeded(restated=restated).last_check_sum != seeded().last_check_sum
    before = {"start": date(2025, 12, 1), "end": START - timedelta(days=1)}
    assert seeded(**before, restated=restated) == seeded(**before)
    after = {"start": END + timedelta(days=1), "end": date(2026, 2, 28)}
    plain, later = seeded(**after), seeded(**after, restated=restated)
    assert later.opening_balance - plain.opening_balance == (
        seeded(restated=restated).outgoing_balance - seeded().outgoing_balance
    )
    assert later.opening_balance != plain.opening_balance
    assert later.brands == plain.brands
