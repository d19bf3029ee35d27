"""How figures, names and periods are written for a reader."""

from __future__ import annotations

import re
from calendar import monthrange
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Final

from shipper.model import wire
from shipper.model.printable import printable
from shipper.report.currencies import currency_code
from shipper.report.metrics import Metric

SEVERAL_CURRENCIES: Final = "The periods are in several currencies, so money is not added over them."
_MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_TO: Final = "\N{EN DASH}"
_DAYS: Final = re.compile(r"(?<![\w-])(\d{4}-\d\d-\d\d)(?: to (\d{4}-\d\d-\d\d))?(?![\w-])", re.ASCII)
_ENDS_OF_DAY: Final = (time(0, 0, 0), time(23, 59, 59))


def money(amount: Decimal) -> str:
    """Write an amount with the decimals that the service wrote, and thousands apart."""
    return f"{amount:,f}"


def number(count: Decimal) -> str:
    """Write a count; `12.0000` is twelve."""
    return f"{int(count):,}" if count == count.to_integral_value() else f"{count:,f}"


def written(metric: Metric, value: Decimal) -> str:
    """Write a metric's value in full."""
    return money(value) if metric.is_money else number(value)


def at_a_glance(metric: Metric, value: Decimal) -> str:
    """Write a metric's value with two decimals at most."""
    return f"{value:z,.2f}" if metric.is_money else number(value)


def with_sign(text: str, value: Decimal) -> str:
    """Write a positive difference with its sign, too."""
    return f"+{text}" if value > 0 else text


def named(identifier: int, name: str | None) -> str:
    """Write a brand or marketing source; its name may be empty."""
    return f"{identifier}  {clean(name)}".rstrip()


def clean(text: str | None) -> str:
    """Escape control characters in a text of the service; None is empty."""
    return printable(text or "")


def currency(name: str | None, rate: Decimal | None) -> str:
    """Write a currency and, unless it is 1, the exchange rate that is given with it; which way is not documented."""
    return clean(name) if rate is None or rate == 1 else f"{clean(name)} (rate {rate:f})"


def with_code(name: str | None, rate: Decimal | None = None) -> str:
    """Write a currency as `currency` does, with its ISO 4217 code where that is certain: `Swedish Krona (SEK)`."""
    code = currency_code(name)
    rated = None if rate is None or rate == 1 else f"rate {rate:f}"
    notes = ", ".join(note for note in (code if code != name else None, rated) if note)
    return f"{clean(name)} ({notes})" if notes else clean(name)


def period(period: wire.ReportingPeriod) -> str:
    """Write a period, `January 2026` or `1-9 January 2026`; as the document has it if it is not of whole days."""
    days = days_of(period)
    if days is None:
        return f"{clean(period.start)} to {clean(period.end)}"
    return days_in_words(*days)


def days_in_words(first: date, last: date) -> str:
    """Write days as the pages do: `1 January 2026`, `1-9 January 2026`, `January 2026`."""
    if is_whole_month(first, last):
        return f"{_MONTHS[first.month - 1]} {first.year}"
    end = f"{last.day} {_MONTHS[last.month - 1]} {last.year}"
    if first == last:
        return end
    if (first.year, first.month) == (last.year, last.month):
        return f"{first.day}{_TO}{end}"
    year = "" if first.year == last.year else f" {first.year}"
    return f"{first.day} {_MONTHS[first.month - 1]}{year} {_TO} {end}"


def with_days_in_words(sentence: str) -> str:
    """Write the days that a sentence has as YYYY-MM-DD as the pages do; what looks like one and is none stays."""

    def written(found: re.Match[str]) -> str:
        try:
            first, last = date.fromisoformat(found[1]), date.fromisoformat(found[2] or found[1])
        except ValueError:
            return found[0]
        return days_in_words(first, last) if first <= last else found[0]

    return _DAYS.sub(written, sentence)


def short_period(period: wire.ReportingPeriod) -> str:
    """Write a period where there is little room: `Jan 2026`, `9 Jan`, `1-9 Jan`, `28 Dec - 3 Jan`."""
    days = days_of(period)
    if days is None:
        return clean(period.start)
    first, last = days
    month = _MONTHS[last.month - 1][:3]
    if is_whole_month(first, last):
        return f"{month} {last.year}"
    if first == last:
        return f"{last.day} {month}"
    if (first.year, first.month) == (last.year, last.month):
        return f"{first.day}{_TO}{last.day} {month}"
    return f"{first.day} {_MONTHS[first.month - 1][:3]} {_TO} {last.day} {month}"


def moment(text: str | None) -> str:
    """Write a time to the minute, `2 February 2026, 08:15 UTC`; as it stands if it is not in UTC."""
    try:
        when = datetime.fromisoformat(text or "")
    except ValueError:
        return clean(text)
    if when.utcoffset() != timedelta(0):
        return clean(text)
    return f"{when.day} {_MONTHS[when.month - 1]} {when.year}, {when:%H:%M} UTC"


def days_of(period: wire.ReportingPeriod) -> tuple[date, date] | None:
    """Read the first and the last day of a period; None if it is not made of whole days."""
    try:
        start, end = datetime.fromisoformat(period.start), datetime.fromisoformat(period.end)
    except (TypeError, ValueError):
        return None
    if start.tzinfo or end.tzinfo or start > end or start.time() != time.min or end.time() not in _ENDS_OF_DAY:
        return None
    return start.date(), end.date()


def is_whole_month(first: date, last: date) -> bool:
    """Return whether these are the first and the last day of a month."""
    return first == last.replace(day=1) and last.day == monthrange(last.year, last.month)[1]
