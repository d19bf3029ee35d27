"""Formats times, sizes, durations and counts for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_BYTES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS_S: Final = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"))


def iso(seconds: float) -> str:
    """Format a time in seconds since the epoch."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return "at no time"


def moment(seconds: float, now: float) -> str:
    """Format a time, without the date if it is today."""
    day, _, time = iso(seconds).partition("T")
    return time if time and day == iso(now).partition("T")[0] else iso(seconds)


def size(count: float) -> str:
    """Format a number of bytes with three digits and a unit."""
    power = 0
    while abs(count) >= 999.5 and power < len(_BYTES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:,.0f} {_BYTES[power]}" if abs(count) >= 99.95 else f"{count:.3g} {_BYTES[power]}"


def span(seconds: float) -> str:
    """Format a duration in the largest unit of which it contains at least two."""
    size_s, unit = next((unit for unit in _UNITS_S if seconds >= 2 * unit[0]), _UNITS_S[-1])
    return f"{max(0.0, seconds) // size_s:,.0f} {unit}"


def several(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: `1 batch`, `2,000 batches are`; the default plural appends an `s`."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
