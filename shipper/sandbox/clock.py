"""The time of the sandbox's service, which may differ from the machine's, and the limits on calls in a span of it."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate

from shipper.sandbox.options import CallLimit


class ServiceClock:
    """
    A clock that is called for the time, seconds since the epoch.

    Args:
        machine: The clock that it goes by.
        offset_seconds: How far it is ahead; may be changed while it goes.
    """

    def __init__(self, machine: Callable[[], float], offset_seconds: float = 0.0) -> None:
        self.machine = machine
        self.offset_seconds = offset_seconds

    def __call__(self) -> float:
        return self.machine() + self.offset_seconds


def http_date(now_seconds: float) -> str:
    """Write an instant as HTTP headers have it, such as `Sun, 01 Mar 2026 00:00:00 GMT`."""
    return formatdate(now_seconds, usegmt=True)


class CallWindow:
    """
    A window of fixed length that begins with a call and admits so many.

    Args:
        limit: None admits every call.
        clock: Seconds; only differences matter.
    """

    def __init__(self, limit: CallLimit | None, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget every call."""
        self._end = float("-inf")
        self._calls = 0

    def admit(self) -> float:
        """
        Count a call that is within the limit.

        Returns:
            0.0, or the seconds until calls are admitted again; a call that is refused is not counted.
        """
        if self._limit is None:
            return 0.0
        now = self._clock()
        if not self._end - self._limit.seconds <= now < self._end:  # over, or the clock was put back
            self._end = now + self._limit.seconds
            self._calls = 0
        if self._calls >= self._limit.calls:
            return self._end - now
        self._calls += 1
        return 0.0
