"""Ranges of days, and splitting them: a service may refuse a range that crosses the end of a month."""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from shipper.model.errors import ReportError

Split = Literal["month", "day", "none"]

DAY: Final = timedelta(days=1)


class DateRange(NamedTuple):
    """A range of days, both ends included; `start` is not after `end`."""

    start: date
    end: date

    def __str__(self) -> str:
        return str(self.start) if self.start == self.end else f"{self.start} to {self.end}"


class Part(NamedTuple):
    """The account and days of one report."""

    account: int
    days: DateRange

    def __str__(self) -> str:
        return f"account {self.account}, {self.days}"

    def as_json(self) -> dict[str, Any]:
        return {"account_id": self.account, "start": self.days.start, "end": self.days.end}


def parts_of(accounts: Iterable[int], days: DateRange, split: Split = "none") -> list[Part]:
    """Return the reports to fetch, by unique account, periods ascending."""
    ranges = split_range(*days, split)
    return [Part(account, part) for account in dict.fromkeys(accounts) for part in ranges]


def parse_period(word: str, today: date) -> DateRange | None:
    """
    Parse a period: a day (`YYYY-MM-DD`), a month (`YYYY-MM`), `today`, `yesterday`, `this-month` or `last-month`.

    Args:
        today: Reference for the words; the last day of `this-month`.
    Returns:
        None if the word is not a period.
    """
    first_of_month = today.replace(day=1)
    match word:
        case "today":
            return DateRange(today, today)
        case "yesterday":
            return DateRange(today - DAY, today - DAY)
        case "this-month":
            return DateRange(first_of_month, today)
        case "last-month":
            return _month_of(first_of_month - DAY)
    is_month = re.fullmatch(r"\d{4}-\d\d?", word, re.ASCII) is not None
    try:
        start = datetime.strptime(f"{word}-01" if is_month else word, "%Y-%m-%d").date()
    except ValueError:
        return None
    return _month_of(start) if is_month else DateRange(start, start)


def check_order(start: date, end: date) -> None:
    """Raise ReportError if `start` is after `end`."""
    if start > end:
        raise ReportError(f"the report's start {start.isoformat()} is after its end {end.isoformat()}")


def split_range(start: date, end: date, split: Split = "month") -> list[DateRange]:
    """Split a range into those of single reports, ascending; customers and balances do not add up over them."""
    check_order(start, end)
    parts = []
    while True:
        last = {"month": _month_of(start).end, "day": start, "none": end}[split]
        parts.append(DateRange(start, min(end, last)))
        if last >= end:  # before computing the next day, as the maximum date has none
            return parts
        start = last + DAY


def join_ranges(ranges: Iterable[DateRange]) -> list[DateRange]:
    """Join adjacent ranges; they must be ascending."""
    result: list[DateRange] = []
    for days in ranges:
        if result and days.start - result[-1].end == DAY:
            result[-1] = DateRange(result[-1].start, days.end)
        else:
            result.append(days)
    return result


def _month_of(day: date) -> DateRange:
    return DateRange(day.replace(day=1), day.replace(day=monthrange(day.year, day.month)[1]))
