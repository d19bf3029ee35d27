"""How long requests take: a histogram for ever, and the latest ones exactly."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

# Upper ends, seconds; what is longer is counted beyond the last.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Latencies:
    """
    Attributes:
        counts: Requests by bucket, one more than there are `BUCKETS`.
        total_s: Sum of all, seconds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total_s = 0.0
        self._latest: list[float] = []

    def note(self, seconds: float) -> None:
        """Count a request."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total_s += seconds
        self._latest.append(seconds)

    def take_latest(self) -> list[float]:
        """Hand out, once, the requests since the last call, the shortest first."""
        latest, self._latest = self._latest, []
        latest.sort()
        return latest


def quantile(ordered: list[float], q: float) -> float | None:
    """Return the `q` quantile; None without values."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None
