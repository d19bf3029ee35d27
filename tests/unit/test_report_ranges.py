"""Date ranges, their splitting, and the path of a report."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.model.errors import ReportError
from shipper.report.client import report_path
from shipper.report.ranges import DateRange, check_order, parse_period, split_range
from tests.cases import each

JAN_1, JAN_31 = date(2026, 1, 1), date(2026, 1, 31)


@each(
    ("start", "end", "split", "parts"),
    [
        ("2026-01-01", "2026-01-31", "month", ["2026-01-01 to 2026-01-31"]),
        ("2026-01-09", "2026-01-09", "month", ["2026-01-09"]),
        ("2025-12-31", "2026-01-01", "month", ["2025-12-31", "2026-01-01"]),
        (
            "2026-01-15",
            "2026-03-02",
            "month",
            ["2026-01-15 to 2026-01-31", "2026-02-01 to 2026-02-28", "2026-03-01 to 2026-03-02"],
        ),
        ("2024-02-28", "2024-03-01", "month", ["2024-02-28 to 2024-02-29", "2024-03-01"]),
        ("2024-02-28", "2024-03-01", "day", ["2024-02-28", "2024-02-29", "2024-03-01"]),
        ("2024-02-28", "2026-03-01", "none", ["2024-02-28 to 2026-03-01"]),
        ("9999-11-30", "9999-12-31", "month", ["9999-11-30", "9999-12-01 to 9999-12-31"]),
        ("9999-12-30", "9999-12-31", "day", ["9999-12-30", "9999-12-31"]),
        ("0001-01-31", "0001-02-01", "month", ["0001-01-31", "0001-02-01"]),
    ],
)
def test_range_is_split(start, end, split, parts):
    made = split_range(date.fromisoformat(start), date.fromisoformat(end), split)
    assert [str(part) for part in made] == parts


def test_range_is_split_at_the_ends_of_months_by_default():
    assert split_range(JAN_1, date(2026, 2, 28)) == [
        DateRange(JAN_1, JAN_31),
        DateRange(date(2026, 2, 1), date(2026, 2, 28)),
    ]


@given(st.dates(date(1990, 1, 1)), st.integers(0, 800), st.sampled_from(["month", "day", "none"]))
def test_parts_have_every_day_once_and_in_order(start, days, split):
    end = start + timedelta(days=min(days, (date.max - start).days))
    parts = split_range(start, end, split)
    assert [day for part in parts for day in range(part.start.toordinal(), part.end.toordinal() + 1)] == list(
        range(start.toordinal(), end.toordinal() + 1)
    )
    if split != "none":
        assert all((part.start.year, part.start.month) == (part.end.year, part.end.month) for part in parts)


@pytest.mark.parametrize(
    "call", [split_range, check_order, lambda start, end: report_path(1001, start, end)], ids=["split", "check", "path"]
)
def test_range_that_ends_before_it_starts_is_refused_with_both_days(call):
    with pytest.raises(ReportError, match="2026-01-31 is after its end 2026-01-01"):
        call(JAN_31, JAN_1)


def test_path_names_account_and_days():
    assert report_path(1001, JAN_1, JAN_31) == "/dpm/v1/dar/1001/2026-01-01/2026-01-31"
    assert report_path(1001, JAN_1, JAN_1) == "/dpm/v1/dar/1001/2026-01-01/2026-01-01"


@each(
    ("word", "found"),
    [
        ("today", "2026-03-01"),
        ("yesterday", "2026-02-28"),
        ("this-month", "2026-03-01"),
        ("last-month", "2026-02-01 to 2026-02-28"),
        ("2026-02", "2026-02-01 to 2026-02-28"),
        ("2024-2", "2024-02-01 to 2024-02-29"),
        ("9999-12", "9999-12-01 to 9999-12-31"),
        ("2026-10-31", "2026-10-31"),
    ],
)
def test_period_is_read(word, found):
    assert str(parse_period(word, date(2026, 3, 1))) == found


@each(
    "word", ["", "2026", "2026-13", "0000-01", "2026-02-29", "last-week", "10.2026", "2026-1\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_invalid_period_is_none(word):
    assert parse_period(word, date(2026, 3, 1)) is None
