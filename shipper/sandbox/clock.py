"""The clock of the simulated service, which may differ from the machine's, and call limits that use it."""

from __future__ import annotations

from collections.abc import Callable

from shipper.sandbox.options import CallLimit


class ServiceClock:
    """A callable that returns seconds since the epoch, `offset_seconds` ahead of the machine's clock."""

    def __init__(self, machine: Callable[[], float], offset_seconds: float = 0.0) -> None:
        self.machine = machine
        self.offset_seconds = offset_seconds

    def __call__(self) -> float:
        return self.machine() + self.offset_seconds


class CallWindow:
    """A fixed-window rate limit whose window starts with a call; None = no limit."""

    def __init__(self, limit: CallLimit | None, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self._end = float("-inf")
        self._calls = 0

    def admit(self) -> float:
        """Admit a call and return 0.0; above the limit, return the seconds until the next window."""
        if self._limit is None:
            return 0.0
        now = self._clock()
        if not self._end - self._limit.seconds <= now < self._end:  # the window has ended, or the clock was set back
            self._end = now + self._limit.seconds
            self._calls = 0
        if self._calls >= self._limit.calls:
            return self._end - now
        self._calls += 1
        return 0.0
