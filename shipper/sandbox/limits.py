"""Counts calls against a limit."""

from __future__ import annotations

from collections.abc import Callable

from shipper.sandbox.options import CallLimit


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
