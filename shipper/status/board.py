"""Holds the latest snapshots, for readers in other threads."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from shipper.status.live import Live, Moment

_MOMENT_S: Final = 2.0
_MOMENTS: Final = 900  # half an hour


class Board:
    """The latest snapshot, and the points of the charts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._moments: deque[Moment] = deque(maxlen=_MOMENTS)
        self._requests = 0

    @property
    def live(self) -> Live | None:
        """The latest snapshot; None before the first."""
        return self._live

    def publish(self, live: Live) -> None:
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
        """Return the points after a moment, oldest first; `since` in seconds since the epoch."""
        with self._lock:
            return [moment for moment in self._moments if moment.at > since]
