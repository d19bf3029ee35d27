"""Where the snapshots of a shipper are put up, for readers in other threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from shipper.telemetry.live import Live, Moment

_MOMENT_S: Final = 2.0
_MOMENTS: Final = 900  # half an hour
_STILL_S: Final = 30.0


class Board:
    """
    The latest snapshot, and the points of the charts.

    Args:
        now: A clock that does not jump, seconds; the same in every thread.
    """

    def __init__(self, *, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._published_at = now()
        self._moments: deque[Moment] = deque(maxlen=_MOMENTS)
        self._requests = 0

    @property
    def live(self) -> Live | None:
        """The latest snapshot; None before the first."""
        return self._live

    @property
    def is_alive(self) -> bool:
        """Whether the loop that publishes has turned lately."""
        return self._now() - self._published_at < _STILL_S

    def publish(self, live: Live) -> None:
        """Put up a snapshot."""
        self._published_at = self._now()
        with self._lock:
            self._live = live
            if not self._moments or live.at >= self._moments[-1].at + _MOMENT_S or live.at < self._moments[-1].at:
                self._moments.append(self._moment(live))

    def _moment(self, live: Live) -> Moment:
        requests = sum(live.requests.values())
        is_quiet, self._requests = requests == self._requests, requests
        return Moment(
            round(live.at, 3),
            live.accepted_per_second,
            None if is_quiet else live.latency_p50_seconds,
            None if is_quiet else live.latency_p95_seconds,
            live.in_flight,
            live.lag_bytes,
            bool(live.pauses),
        )

    def moments(self, since: float) -> list[Moment]:
        """Give the points after a moment, oldest first; `since` in seconds since the epoch."""
        with self._lock:
            return [moment for moment in self._moments if moment.at > since]
