"""Ranges of days, and how a long one is split: a service may refuse one that crosses the end of a month."""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import Final, Literal, NamedTuple, assert_never

from shipper.model.errors import ReportError

Split = Literal["month", "day", "none"]


class DateRange(NamedTuple):
    """A range of days, both ends included; `start` is not after `end`."""

    start: date
    end: date

    def __str__(self) -> str:
        return str(self.start) if self.start == self.end else f"{self.start} to {self.end}"


PERIOD_WORDS: Final = ("today", "yesterday", "this-month", "last-month")


def period_of(word: str, today: date) -> DateRange | None:
    """
    Read a period: a day, `YYYY-MM-DD`, a month, `YYYY-MM`, or one of `PERIOD_WORDS`; None if it is none of these.

    Args:
        today: What the words count from. This month ends today.
    """
    yesterday = today - timedelta(days=1)
    match word:
        case "today":
            return DateRange(today, today)
        case "yesterday":
            return DateRange(yesterday, yesterday)
        case "this-month":
            return DateRange(today.replace(day=1), today)
        case "last-month":
            last = today.replace(day=1) - timedelta(days=1)
            return DateRange(last.replace(day=1), last)
    is_month = re.fullmatch(r"\d{4}-\d\d?", word, re.ASCII) is not None
    try:
        start = datetime.strptime(f"{word}-01" if is_month else word, "%Y-%m-%d").date()
    except ValueError:
        return None
    return DateRange(start, _last_day(start, date.max, "month") if is_month else start)


def check_order(start: date, end: date) -> None:
    """
    Raises:
        ReportError: `start` is after `end`.
    """
    if start > end:
        raise ReportError(f"the report's start {start.isoformat()} is after its end {end.isoformat()}")


def split_range(start: date, end: date, split: Split = "month") -> list[DateRange]:
    """
    Split a range into reports that are fetched one by one.

    Customers and balances of the parts do not add up to those of the whole range.

    Args:
        start: First day.
        end: Last day, included.
        split: At the ends of months, at those of days, or not at all.
    Returns:
        1..n ranges, ascending, without gaps, from `start` to `end`.
    Raises:
        ReportError: `start` is after `end`.
    """
    check_order(start, end)
    parts = []
    while True:
        last = min(end, _last_day(start, end, split))
        parts.append(DateRange(start, last))
        if last == end:  # asked before the next day is made: there is none behind the greatest date
            return parts
        start = last + timedelta(days=1)


def joined(days: Iterable[DateRange]) -> list[DateRange]:
    """Join ranges that follow one another without a gap; they ascend."""
    found: list[DateRange] = []
    for each in days:
        if found and each.start - found[-1].end == timedelta(days=1):
            found[-1] = DateRange(found[-1].start, each.end)
        else:
            found.append(each)
    return found


def _last_day(start: date, end: date, split: Split) -> date:
    match split:
        case "month":
            return start.replace(day=monthrange(start.year, start.month)[1])
        case "day":
            return start
        case "none":
            return end
    assert_never(split)
