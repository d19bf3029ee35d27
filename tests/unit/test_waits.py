"""Waits requested by a service in all forms, and backoff."""

from __future__ import annotations

from random import Random

import pytest
from structlog.testing import capture_logs

from shipper.delivery.waits import REQUESTED_MAX_S, full_jitter_s, requested_wait_s
from tests.cases import each

NOON = "Wed, 21 Oct 2026 12:00:00 GMT"
NOON_S = 1_792_584_000.0


def asked(retry_after: str = "", text: str = "", date: str = "", wall_time: float | None = None) -> float | None:
    return requested_wait_s(retry_after, text, date=date, wall_time=wall_time)


@each(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("7 s", None),
        ("\N{ARABIC-INDIC DIGIT SEVEN}", None),
    ],
)
def test_seconds_are_parsed(header: str, seconds: float | None):
    assert asked(header) == seconds


@each("until", ["Wed, 21 Oct 2026 12:00:30 GMT", "Wednesday, 21-Oct-26 12:00:30 GMT", "Wed Oct 21 12:00:30 2026"])
@each("our_clock", [None, NOON_S - 3600, NOON_S + 3600])
def test_a_date_is_measured_against_the_date_of_the_answer_however_wrong_our_clock_is(
    until: str, our_clock: float | None
):
    assert asked(until, date=NOON, wall_time=our_clock) == 30


def test_a_date_is_measured_against_our_clock_if_the_answer_has_none():
    assert asked("Wed, 21 Oct 2026 12:00:30 GMT", wall_time=NOON_S) == 30
    assert asked("Wed, 21 Oct 2026 12:00:30 GMT") is None
    assert asked("Wed, 21 Oct 2026 12:00:30 GMT", date="yesterday", wall_time=NOON_S) == 30


def test_a_date_that_has_passed_is_no_wait():
    assert asked("Wed, 21 Oct 2026 11:00:00 GMT", date=NOON) == 0


@each(
    ("text", "seconds"),
    [
        ("Rate limit is exceeded. Try again in 7 seconds.", 7),
        ("try again in 1 second", 1),
        ("Please retry after 2 minutes", 120),
        ("Quota will be replenished in 00:59:03.", 3543),
        ("Out of call volume quota. Quota will be replenished in 00:10:05.", 605),
        ("wait 5", 5),
        ("Rate limit of 100 calls is exceeded.", None),
        ("", None),
    ],
)
def test_the_text_is_parsed_if_there_is_no_header(text: str, seconds: float | None):
    assert asked(text=text) == seconds
    assert asked("9", text=text) == 9


@pytest.mark.parametrize("header", ["999999999", "3601", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_an_absurd_wait_is_capped_and_logged(header: str):
    with capture_logs() as logs:
        assert asked(header, date=NOON) == REQUESTED_MAX_S
    assert [entry["event"] for entry in logs] == ["long_wait_capped"]


@each("header", ["9" * 400, "1e9", "0x10", "Wed, 99 Oct 2026 12:00:00 GMT", "\0", "🕐", "nan", "inf"])
def test_an_invalid_wait_is_none(header: str):
    assert asked(header, date=NOON) is None


@each("attempt", [1, 2, 5, 20, 5000])
def test_jitter_is_drawn_under_the_cap(attempt: int):
    rng = Random(attempt)
    waits = [full_jitter_s(attempt, initial_s=0.5, max_s=60, rng=rng) for _ in range(300)]
    cap = min(60, 0.5 * 2 ** min(attempt - 1, 50))
    assert 0 <= min(waits) < 0.1 * cap
    assert 0.9 * cap < max(waits) <= cap
