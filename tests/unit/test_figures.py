"""The invented figures are plausible for each day and add up."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from itertools import product

import pytest

from shipper.model import wire
from shipper.sandbox.figures import (
    CPA_RATE,
    FIRST_DAY,
    LAST_DAY,
    REVENUE_SHARE_PERCENT,
    Deal,
    Stretch,
    marketing_source,
    month_of,
    stretches,
)
from shipper.sandbox.samples import BRANDS, MARKETING_SOURCES
from tests.cases import each

DEAL = Deal(seed=1, account_id=1001, brand_id=11, source_id=50121)
DEALS = [Deal(7, 1001, brand_id, source_id) for brand_id, source_id in product(BRANDS, MARKETING_SOURCES)]
DAY, A_DAY = date(2026, 1, 15), timedelta(days=1)
YEAR = [date(2026, 1, 1) + timedelta(days=day) for day in range(365)]
PERIODS = [(date(2026, 1, 1), date(2026, 1, 31)), (date(2025, 11, 17), date(2026, 3, 2)), (DAY, DAY)]


def figures(deal: Deal, start: date, end: date, restated=None) -> wire.MarketingSource:
    return marketing_source(deal, stretches(start, end, restated or {}), wire.AmountPair(Decimal(0), Decimal(0)))


def days_of(found: list[Stretch]) -> list[date]:
    return [part.first + timedelta(day) for part in found for day in range((part.last - part.first).days + 1)]


def new_customers(made: wire.MarketingSource) -> Decimal:
    return made.deposits.new_depositing_customers.customers.result


def returning_customers(made: wire.MarketingSource) -> Decimal:
    return made.deposits.returning_depositing_customers.customers.result


def parts(*pairs: wire.AmountPair) -> list[Decimal]:
    return [number for pair in pairs for number in (pair.result, pair.adjustment)]


def counts(made: wire.MarketingSource) -> list[Decimal]:
    new, returning = made.deposits.new_depositing_customers, made.deposits.returning_depositing_customers
    pairs = (made.active_customers, made.conversions.qualified_conversions, new.customers, returning.customers)
    return [made.conversions.clicks, *parts(*pairs)]


def money(made: wire.MarketingSource) -> list[Decimal]:
    new, returning = made.deposits.new_depositing_customers, made.deposits.returning_depositing_customers
    pairs = (made.net_revenue, made.rev_share, made.cpa_revenue, made.fees, new.amount, returning.amount)
    return [made.outgoing_balance, *parts(*pairs)]


def additive(made: wire.MarketingSource) -> list[Decimal]:
    return [made.conversions.clicks, *parts(made.deposits.new_depositing_customers.customers), *money(made)]


@pytest.fixture(scope="module")
def year() -> list[wire.MarketingSource]:
    """Every day of a year of every sample deal."""
    return [figures(deal, day, day) for deal in DEALS for day in YEAR]


# One day


def test_figures_of_a_seed_do_not_change_between_releases():
    made = figures(DEAL, DAY, DAY)
    assert [str(number) for number in counts(made)] == ["33", "4", "0", "2", "0", "2", "0", "2", "0"]
    assert [str(number) for number in money(made)] == [
        "84.4493",
        *("20.5757", "0.0000", "6.1727", "0.0000", "80.0000", "0.0000", "-1.7234", "0.0000"),
        *("48.3654", "0.0000", "363.1494", "0.0000"),
    ]


@each(
    ("deal", "day", "restated"),
    [
        (DEAL._replace(seed=2), DAY, {}),
        (DEAL._replace(account_id=1002), DAY, {}),
        (DEAL._replace(brand_id=12), DAY, {}),
        (DEAL._replace(source_id=50234), DAY, {}),
        (DEAL, DAY + A_DAY, {}),
        (DEAL, DAY, {DAY: 1}),
        (DEAL, DAY, {DAY: 2}),
    ],
)
def test_figures_depend_on_seed_account_brand_source_day_and_revision(deal, day, restated):
    assert figures(deal, day, day, restated) != figures(DEAL, DAY, DAY)


def test_each_revision_of_a_day_has_other_figures():
    assert len({tuple(money(figures(DEAL, DAY, DAY, {DAY: times}))) for times in range(5)}) == 5


@each("restated", [{DAY: 0}, {DAY + A_DAY: 1}, {DAY - A_DAY: 1}])
def test_a_day_is_changed_only_by_its_own_revisions(restated):
    assert figures(DEAL, DAY, DAY, restated) == figures(DEAL, DAY, DAY)


def test_counts_are_whole_and_money_has_four_decimals(year):
    assert {number.as_tuple().exponent for made in year for number in counts(made)} == {0}
    assert {number.as_tuple().exponent for made in year for number in money(made)} == {-4}


def test_new_customers_are_no_more_than_the_clicks(year):
    assert all(0 <= new_customers(made) <= made.conversions.clicks for made in year)
    assert any(new_customers(made) for made in year)


def test_active_customers_are_the_new_and_the_returning(year):
    for made in year:
        assert made.active_customers.result == new_customers(made) + returning_customers(made)
        assert made.active_customers.adjustment == made.deposits.new_depositing_customers.customers.adjustment


def test_customers_and_amounts_come_together(year):
    for made in year:
        for deposits in (made.deposits.new_depositing_customers, made.deposits.returning_depositing_customers):
            assert (deposits.amount.result > 0) == (deposits.customers.result > 0)


def test_revenue_share_is_its_share_of_a_positive_net_revenue_and_never_below_zero(year):
    for made in year:
        earned, revenue = made.rev_share, made.net_revenue
        for share, net in ((earned.result, revenue.result), (earned.total, revenue.total)):
            assert 0 <= max(net, Decimal(0)) * REVENUE_SHARE_PERCENT / 100 - share < Decimal("0.0001")
    assert 0.1 < sum(made.net_revenue.result < 0 for made in year) / len(year) < 0.4


def test_cpa_revenue_is_the_rate_for_every_new_customer(year):
    for made in year:
        customers = made.deposits.new_depositing_customers.customers
        assert made.conversions.qualified_conversions == customers
        assert made.cpa_revenue.result == CPA_RATE * customers.result
        assert made.cpa_revenue.adjustment == CPA_RATE * customers.adjustment


def test_fees_are_small_and_negative(year):
    for made in year:
        assert 0 <= -made.fees.result <= (made.rev_share.result + made.cpa_revenue.result) / 20
    assert sum(made.fees.result < 0 for made in year) / len(year) > 0.5


@pytest.mark.parametrize("name", ["net_revenue", "rev_share", "cpa_revenue", "fees"])
def test_adjustments_exist_and_are_rare(year, name):
    share = sum(getattr(made, name).adjustment != 0 for made in year) / len(year)
    assert 0 < share < 0.1


def test_adjustment_takes_back_at_most_the_total(year):
    for made in year:
        assert made.deposits.new_depositing_customers.customers.total >= 0
        assert made.fees.total <= 0


# A period


@each(("start", "end"), PERIODS)
@each("restated", [{}, {DAY: 1, date(2026, 2, 28): 3}])
def test_all_figures_except_distinct_customers_are_sums_of_the_days(start, end, restated):
    days = [day for day in days_of(stretches(start, end, restated)) if start <= day <= end]
    assert len(days) == (end - start).days + 1
    columns = zip(*(additive(figures(DEAL, day, day, restated)) for day in days), strict=True)
    assert additive(figures(DEAL, start, end, restated)) == [sum(column) for column in columns]


@each("deal", DEALS[:3])
@each(("start", "end"), PERIODS)
def test_returning_customers_lie_between_the_busiest_day_and_the_sum(deal, start, end):
    daily = [returning_customers(figures(deal, day, day)) for day in days_of(stretches(start, end, {}))]
    returning = returning_customers(figures(deal, start, end))
    assert max(daily) <= returning <= sum(daily)
    if len(daily) > 1:
        assert max(daily) < returning < sum(daily)


def test_longer_period_has_no_fewer_returning_customers():
    ends = [date(2026, 1, 1) + timedelta(days=days) for days in range(100)]
    found = [returning_customers(figures(DEAL, ends[0], end)) for end in ends]
    assert found == sorted(found)


@each(("start", "end"), [(date.min, FIRST_DAY - A_DAY), (LAST_DAY + A_DAY, date.max), (DAY, DAY - A_DAY)])
def test_period_without_days_has_zeros_of_the_same_form(start, end):
    made = figures(DEAL, start, end)
    assert [str(number) for number in counts(made)] == ["0"] * 9
    assert [str(number) for number in money(made)] == ["0.0000"] * 13


# Cutting a period


@each(
    ("start", "end", "expected"),
    [
        (DAY, DAY, ["2026-01-15 2026-01-15"]),
        (date(2026, 1, 1), date(2026, 1, 31), ["2026-01-01 2026-01-31"]),
        (date(2026, 1, 31), date(2026, 2, 1), ["2026-01-31 2026-01-31", "2026-02-01 2026-02-01"]),
        (
            date(2023, 12, 30),
            date(2024, 2, 29),
            ["2023-12-30 2023-12-31", "2024-01-01 2024-01-31", "2024-02-01 2024-02-29"],
        ),
        (date.min, date(2020, 1, 2), ["2020-01-01 2020-01-02"]),
        (date(2039, 12, 30), date.max, ["2039-12-30 2039-12-31"]),
        (date.min, date.min, []),
        (date.max, date.max, []),
        (date(2026, 2, 1), DAY, []),
    ],
)
def test_period_is_split_at_months_and_limited_to_days_with_figures(start, end, expected):
    assert [f"{part.first} {part.last}" for part in stretches(start, end, {})] == expected


def test_revisions_apply_only_to_the_part_that_contains_their_day():
    restated = {date(2026, 2, 2): 1, date(2026, 1, 31): 2, date(2026, 2, 1): 4, date(2026, 2, 3): 0, date.max: 1}
    found = stretches(date(2026, 1, 31), date(2026, 2, 4), restated | {date(2026, 1, 30): 5})
    assert [part.revisions for part in found] == [(2,), (4, 1, 0, 0)]


def test_all_days_of_the_longest_period_are_drawn_within_a_second():
    # About 2.5 µs a day and deal: `timeit` of `month_of.__wrapped__` over a month.
    days = days_of(stretches(date.min, date.max, {}))
    assert days == [FIRST_DAY + timedelta(days=day) for day in range(len(days))]
    assert days[-1] == LAST_DAY
    assert len(days) * len(DEALS) < 110_000


def test_month_is_drawn_once_and_again_after_a_restatement():
    month_of.cache_clear()
    for restated, drawn in (({}, 12), ({}, 12), ({DAY: 1}, 13), ({DAY: 1}, 13), ({DAY: 2}, 14), ({}, 14)):
        figures(DEAL, YEAR[0], YEAR[-1], restated)
        assert month_of.cache_info().misses == drawn


def test_all_months_of_the_sample_deals_fit_into_the_cache():
    months = len(stretches(date.min, date.max, {})) * len(DEALS)
    assert months < month_of.cache_info().maxsize
