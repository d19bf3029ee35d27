"""Formats moments, sizes and counts for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

_BYTES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS_S: Final = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"))


def iso(seconds: float) -> str:
    """Write a moment, which is given in seconds since the epoch."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return "at no time"


def moment(seconds: float, now: float) -> str:
    """Write a moment as briefly as can be: without the day if that is today."""
    day, _, time = iso(seconds).partition("T")
    return time if time and day == iso(now).partition("T")[0] else iso(seconds)


def size(count: float) -> str:
    """Write a number of bytes: three figures, and the unit that keeps them below a thousand."""
    power = 0
    while abs(count) >= 999.5 and power < len(_BYTES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:,.0f} {_BYTES[power]}" if abs(count) >= 99.95 else f"{count:.3g} {_BYTES[power]}"


def span(seconds: float) -> str:
    """Write a length of time in one unit, of which there are at least two."""
    size_s, unit = next((each for each in _UNITS_S if seconds >= 2 * each[0]), _UNITS_S[-1])
    return f"{max(0.0, seconds) // size_s:,.0f} {unit}"


def several(count: int, noun: str, plural: str = "") -> str:
    """Count things in words: `1 batch`, `2,000 batches are`; without a plural of its own, an `s` makes it."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
