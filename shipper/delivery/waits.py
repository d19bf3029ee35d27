"""Waits before the next attempt: the one that the service asks for, or a backoff."""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime
from random import Random
from typing import Final

import structlog

log = structlog.get_logger("delivery")

REQUESTED_MAX_S: Final = 3_600.0  # longer waits are capped: one request an hour is harmless
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600}
_SECONDS: Final = re.compile(r"\d{1,15}(?:\.\d{1,9})?", re.ASCII)
_IN_WORDS: Final = re.compile(
    r"\b(?:again|retry|replenished|wait)\D{0,20}?"
    r"(?:(?P<hours>\d{1,4}):(?P<minutes>\d\d):(?P<seconds>\d\d)|(?P<count>\d{1,9})\s*(?P<unit>s|m|h)?)",
    re.IGNORECASE | re.ASCII,
)


def requested_wait_s(retry_after: str, text: str, *, date: str, wall_time: float | None) -> float | None:
    """
    Return the wait that a service asks for.

    Args:
        retry_after: The `Retry-After` header: seconds, or an HTTP date.
        text: An error message, such as "Try again in 7 seconds."; used if the header is missing or invalid.
        date: The `Date` header, to which a date in `retry_after` is relative, because our clock may be wrong.
        wall_time: Our clock, seconds since the epoch; used if there is no `Date`.
    Returns:
        Seconds, from 0 to an hour; None if the service asks for no wait.
    """
    asked = _header_s(retry_after.strip(), date, wall_time)
    if asked is None:
        asked = _text_s(text)
    if asked is None:
        return None
    if asked > REQUESTED_MAX_S:
        log.warning("long_wait_capped", asked_seconds=round(asked), capped_seconds=REQUESTED_MAX_S)
    return min(max(asked, 0.0), REQUESTED_MAX_S)


def _header_s(value: str, date: str, wall_time: float | None) -> float | None:
    if _SECONDS.fullmatch(value):
        return float(value)
    until = epoch_s(value)
    since = epoch_s(date)
    if since is None:
        since = wall_time
    return None if until is None or since is None else until - since


def _text_s(text: str) -> float | None:
    match = _IN_WORDS.search(text)
    if match is None:
        return None
    if match["count"] is not None:
        return float(match["count"]) * _UNITS_S[(match["unit"] or "s").lower()]
    return int(match["hours"]) * 3_600.0 + int(match["minutes"]) * 60 + int(match["seconds"])


def epoch_s(date: str) -> float | None:
    """Parse an HTTP date, in any of its three forms, to seconds since the epoch; return None if it is invalid."""
    try:
        moment = parsedate_to_datetime(date)
        # One form has no time zone; HTTP dates are always in UTC.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError, OSError):
        return None


def full_jitter_s(attempt: int, *, initial_s: float, max_s: float, rng: Random) -> float:
    """
    Draw the wait before the next attempt, seconds; `attempt` is the number of those made, at least 1.

    As in "Exponential Backoff And Jitter", AWS Architecture Blog: jitter added before clamping would vanish at the cap.
    """
    assert attempt >= 1
    return rng.uniform(0, min(max_s, initial_s * 2 ** min(attempt - 1, 63)))
