"""The time of the sandbox's service, which may differ from the machine's."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate


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
