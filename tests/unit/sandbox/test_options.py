"""Valid and invalid options of the sandbox; rate limits, and counting calls."""

from __future__ import annotations

import pytest

from shipper.model.errors import ConfigError
from shipper.sandbox.clock import CallWindow, ServiceClock
from shipper.sandbox.options import IN_MEMORY, CallLimit, SandboxOptions
from tests.cases import each

PRINTABLE = "must be non-empty printable ASCII without surrounding spaces"
FINITE = "must be a finite number"


@each(
    ("wrong", "key", "message"),
    [
        *(({"subscription_key": key}, "subscription_key", PRINTABLE) for key in ("", "ключ", "a\nb", "a\x7f", " a")),
        *(({"secondary_key": key}, "secondary_key", PRINTABLE) for key in ("", "a ")),
        ({"subscription_key": "same", "secondary_key": "same"}, "secondary_key", "must differ from subscription_key"),
        ({"blackhole": True, "store_path": "events.db"}, "blackhole", "stores nothing"),
        *[
            ({name: value}, name, FINITE)
            for name in ("latency_seconds", "jitter_seconds", "token_skew_seconds", "clock_offset_seconds")
            for value in (float("nan"), float("inf"), float("-inf"))
        ],
    ],
)
def test_invalid_options_are_refused_by_name(wrong, key, message):
    with pytest.raises(ConfigError) as caught:
        SandboxOptions(**wrong)
    assert (caught.value.key, caught.value.source) == (key, "sandbox")
    assert message in str(caught.value)


@each(
    "right",
    [
        {},
        {"subscription_key": "a b"},
        {"subscription_key": "~!\"'\\"},
        {"blackhole": True},
        {"blackhole": True, "store_path": IN_MEMORY},
        {"token_skew_seconds": -1e9, "clock_offset_seconds": -1e9},
    ],
)
def test_options_at_their_bounds_are_accepted(right):
    options = SandboxOptions(**right)
    assert {name: getattr(options, name) for name in right} == right


# Limits ---------------------------------------------------------------------------------------------------------------


class HandClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("text", "limit"),
    [("100/60", (100, 60)), ("1/1", (1, 1)), ("007/08", (7, 8)), ("999999999/999999999", (999_999_999, 999_999_999))],
)
def test_limit_is_calls_and_seconds(text, limit):
    assert CallLimit.parse(text, key="--rate-limit") == limit


@each(
    "text",
    [
        *("", "x", "5", "/", "5/", "/5", "0/5", "5/0", "-1/5", "1.5/5", "1/2/3", " 1/2", "1/2\n", "1000000000/1"),
        *("²/1", "1e3/1"),
    ],
)
def test_invalid_limit_is_refused_with_an_example(text):
    with pytest.raises(ConfigError) as caught:
        CallLimit.parse(text, key="--quota")
    expected = f"sandbox: --quota: {text!r} is not CALLS/SECONDS with both above 0, such as 100/60"
    assert str(caught.value) == expected
    assert caught.value.key == "--quota"


def test_without_a_limit_every_call_is_admitted():
    window = CallWindow(None, HandClock())
    assert [window.admit() for _ in range(1000)] == [0.0] * 1000


def test_window_admits_the_limit_and_tells_further_calls_how_long_to_wait():
    clock = HandClock()
    window = CallWindow(CallLimit(2, 10), clock)
    assert [window.admit() for _ in range(100)] == [0.0, 0.0, *[10.0] * 98], "a refused call is not counted"
    clock.now += 7.25
    assert window.admit() == 2.75
    clock.now += 2.75
    assert window.admit() == 0.0


def test_window_begins_with_a_call_and_not_with_the_end_of_the_last():
    clock = HandClock()
    window = CallWindow(CallLimit(1, 10), clock)
    window.admit()
    clock.now += 95
    assert window.admit() == 0.0
    assert window.admit() == 10.0


@each("start", [0.0, -1e9, 1e9])
def test_only_differences_of_time_matter_and_a_reset_forgets_every_call(start):
    window = CallWindow(CallLimit(1, 10), HandClock(start))
    assert [window.admit(), window.admit()] == [0.0, 10.0]
    window.reset()
    assert [window.admit(), window.admit()] == [0.0, 10.0]


def test_wait_is_never_longer_than_the_window_even_if_the_clock_is_set_back():
    clock = HandClock()
    window = CallWindow(CallLimit(1, 10), clock)
    window.admit()
    clock.now -= 86_400
    assert window.admit() <= 10.0


def test_service_clock_is_ahead_of_the_machine_by_the_shift():
    machine = HandClock()
    clock = ServiceClock(machine, 5.5)
    assert clock() == 1005.5
    machine.now += 1
    clock.offset_seconds = -1.0
    assert clock() == 1000.0
    assert ServiceClock(machine)() == 1001.0
