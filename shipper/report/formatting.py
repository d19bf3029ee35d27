"""Formats figures, names and periods for humans."""

from __future__ import annotations

import re
from calendar import month_abbr, month_name, monthrange
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Final

from shipper.model import wire
from shipper.model.printable import printable
from shipper.report.currencies import currency_code
from shipper.report.metrics import Metric

SEVERAL_CURRENCIES: Final = "The periods have different currencies, so amounts are not added up."
_DASH: Final = "\N{EN DASH}"
_DAYS: Final = re.compile(r"(?<![\w-])(\d{4}-\d\d-\d\d)(?: to (\d{4}-\d\d-\d\d))?(?![\w-])", re.ASCII)
_ENDS_OF_DAY: Final = (time(0, 0, 0), time(23, 59, 59))


def money(amount: Decimal) -> str:
    """Format an amount with all decimals of the service."""
    return f"{amount:,f}"


def number(count: Decimal) -> str:
    """Format a count; `12.0000` is twelve."""
    return f"{int(count):,}" if count == count.to_integral_value() else f"{count:,f}"


def figure(metric: Metric, value: Decimal) -> str:
    """Format a metric's value in full."""
    return money(value) if metric.is_money else number(value)


def short_figure(metric: Metric, value: Decimal) -> str:
    """Format a metric's value with at most two decimals."""
    return f"{value:z,.2f}" if metric.is_money else number(value)


def with_sign(text: str, value: Decimal) -> str:
    """Put a plus before a positive difference."""
    return f"+{text}" if value > 0 else text


def label_of(identifier: int, name: str | None) -> str:
    """Format a brand or marketing source; its name may be empty."""
    return f"{identifier}  {clean(name)}".rstrip()


def clean(text: str | None) -> str:
    """Escape control characters in text from the service; None becomes empty."""
    return printable(text or "")


def currency(name: str | None, rate: Decimal | None = None, *, has_code: bool = True) -> str:
    """Format a currency with its ISO 4217 code if known, and a rate other than 1: `Krona (SEK, rate 0.087)`."""
    code = currency_code(name) if has_code else None
    notes = [code] if code and code != name else []
    if rate is not None and rate != 1:  # the direction of a rate is not documented
        notes.append(f"rate {rate:f}")
    return f"{clean(name)} ({', '.join(notes)})" if notes else clean(name)


def period(stated: wire.ReportingPeriod) -> str:
    """Format a period, `January 2026` or `1-9 January 2026`; unchanged if it does not consist of whole days."""
    days = days_of(stated)
    return format_days(*days) if days else f"{clean(stated.start)} to {clean(stated.end)}"


def short_period(stated: wire.ReportingPeriod) -> str:
    """Format a period in short: `Jan 2026`, `9 Jan`, `1-9 Jan`, `28 Dec - 3 Jan`."""
    days = days_of(stated)
    return format_days(*days, is_short=True) if days else clean(stated.start)


def format_days(first: date, last: date, *, is_short: bool = False) -> str:
    """Format a range of days: `1 January 2026`, `1-9 January 2026`, `January 2026`."""
    names = month_abbr if is_short else month_name
    start_month, end_month = names[first.month], names[last.month]
    if is_whole_month(first, last):
        return f"{end_month} {last.year}"
    end = f"{last.day} {end_month}" if is_short else f"{last.day} {end_month} {last.year}"
    if first == last:
        return end
    if (first.year, first.month) == (last.year, last.month):
        return f"{first.day}{_DASH}{end}"
    start = f"{first.day} {start_month}"
    return f"{start} {_DASH} {end}" if is_short or first.year == last.year else f"{start} {first.year} {_DASH} {end}"


def reformat_days(sentence: str) -> str:
    """Apply `format_days` to the days (YYYY-MM-DD) in a sentence; invalid ones remain unchanged."""

    def replace(match: re.Match[str]) -> str:
        try:
            first, last = date.fromisoformat(match[1]), date.fromisoformat(match[2] or match[1])
        except ValueError:
            return match[0]
        return format_days(first, last) if first <= last else match[0]

    return _DAYS.sub(replace, sentence)


def moment(text: str | None) -> str:
    """Format a time to the minute, `2 February 2026, 08:15 UTC`; unchanged if it is not in UTC."""
    try:
        when = datetime.fromisoformat(text or "")
    except ValueError:
        return clean(text)
    if when.utcoffset() != timedelta(0):
        return clean(text)
    return f"{when.day} {month_name[when.month]} {when.year}, {when:%H:%M} UTC"


def days_of(stated: wire.ReportingPeriod) -> tuple[date, date] | None:
    """Return the first and last day of a period; None if it does not consist of whole days."""
    try:
        start, end = datetime.fromisoformat(stated.start), datetime.fromisoformat(stated.end)
    except (TypeError, ValueError):
        return None
    if start.tzinfo or end.tzinfo or start > end or start.time() != time.min or end.time() not in _ENDS_OF_DAY:
        return None
    return start.date(), end.date()


def is_whole_month(first: date, last: date) -> bool:
    return first == last.replace(day=1) and last.day == monthrange(last.year, last.month)[1]
