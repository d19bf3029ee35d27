"""
The limit of requests in flight: a fixed number, or one that adapts to what the service can handle.

Source:
    One more per round trip if all were used, a tenth less on congestion: Vector's adaptive request concurrency. Compare
    latency with the latency without queueing (as TCP Vegas). The minimum (Netflix's VegasLimit) is too low where
    latency varies; a long average (Gradient2Limit) includes our own queue. So, in doubt, it is measured with half as
    many in flight. The numbers were chosen with `python -m tests.model.service_simulation`.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Final, Protocol

_FLOOR: Final = 4  # for latency: with fewer nothing overlaps, and that of a local server is our own event loop's
_NOISE: Final = 0.07  # a round goes on until its mean latency is known this well,
_LONGEST_ROUND: Final = 4  # but not for more round trips, or the limit could not follow
_CALM: Final = 1.25  # a slowdown up to here is noise: that of the round and that of the baseline
_SUSPICIOUS: Final = 1.4  # beyond noise in a single round
_PATIENCE: Final = 20  # rounds until a doubtful baseline is measured again, or a limit that had a queue is tried
_HALVED: Final = 0.55  # half as many in flight take half the time: the others had only been waiting
_DECREASE: Final = 0.9
_ANSWERS_OWED: Final = 50  # for each congestion, before the limit where it began is tried: errors stay near 2 %


class ConcurrencyLimit(Protocol):
    @property
    def limit(self) -> int:
        """Requests that may be in flight now, at least 1."""

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None:
        """
        Note an answer that shows no congestion: an acceptance, or a refusal for the request's content.

        Args:
            seconds: From sending to the whole answer.
            in_flight: How many were in flight when it was sent, itself included.
            now: Seconds on a clock that does not jump.
        """

    def note_congestion(self, *, started_at: float, now: float) -> None:
        """Note that a request sent at `started_at` was throttled, found the service overloaded, or timed out."""


class FixedLimit:
    def __init__(self, limit: int) -> None:
        self.limit: Final = limit

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None: ...

    def note_congestion(self, *, started_at: float, now: float) -> None: ...


class AdaptiveLimit:
    """
    Doubles from a few until the first sign of congestion, then approaches `max_limit` step by step.

    A latency clearly above the baseline, or a little above it for long, starts a probe: half as many in flight. What is
    left of the latency is the new baseline. If it fell, the queue was ours, and the limit becomes what had been in
    service. If not, the service has become slower by itself, and the limit is what it was; soon it is looked at again.
    """

    def __init__(self, max_limit: int) -> None:
        self.limit = min(_FLOOR, max_limit)
        self._max_limit = self._ceiling = max_limit  # the ceiling holds as long as answers are owed
        self._owed_answers = self._doubtful_rounds = 0
        self._is_doubling = self._is_new_congestion = True
        self._is_used = self._is_baseline_raised = False
        self._settling_since = self._decreased_at = -math.inf
        self._logarithms: list[float] = []  # of the round's latencies: a few long ones do not move their mean much
        self._spread, self._latency, self._baseline = 0.0, 0.0, math.inf
        self._probe: tuple[int, float] | None = None  # limit and latency before it

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None:
        self._owed_answers = max(0, self._owed_answers - 1)
        if now - seconds <= self._settling_since:
            return
        self._settling_since = -math.inf
        self._is_used |= in_flight >= self.limit
        self._logarithms.append(math.log(max(seconds, 1e-6)))
        longest = self.limit * (1 if self._is_doubling and not self._probe else _LONGEST_ROUND)
        if len(self._logarithms) >= max(self.limit, min((self._spread / _NOISE) ** 2, longest)):
            self._close_round(now)

    def note_congestion(self, *, started_at: float, now: float) -> None:
        self._owed_answers = min(self._owed_answers + _ANSWERS_OWED, _ANSWERS_OWED * self._max_limit)
        if started_at < self._decreased_at:
            return
        self._decreased_at = now
        if self._is_new_congestion:
            self._ceiling = max(1, self.limit - 1)
        self._is_new_congestion = self._is_doubling = False
        self._probe = None
        self._jump(max(1, int(self.limit * _DECREASE)), now)

    def _close_round(self, now: float) -> None:
        mean = fmean(self._logarithms)
        self._spread += (math.sqrt(fmean((each - mean) ** 2 for each in self._logarithms)) - self._spread) / 4
        self._latency = math.exp(mean)
        if self._probe:
            self._conclude(*self._probe, now)
        elif self._is_used:
            self._adjust(now)
        self._is_new_congestion = True
        self._is_used = False
        self._logarithms.clear()

    def _adjust(self, now: float) -> None:
        if self._latency < self._baseline / _CALM:
            self._baseline = self._latency
        slowdown = self._latency / self._baseline
        self._doubtful_rounds += slowdown > _CALM or self._is_baseline_raised
        if slowdown > _SUSPICIOUS or self._doubtful_rounds >= _PATIENCE:
            self._halve(now)
        elif self._is_doubling:
            self._jump(min(2 * self.limit, self._max_limit), now)
            self._is_doubling = self.limit < self._max_limit
        elif slowdown <= _CALM:
            goal = self.limit + len(self._logarithms) // self.limit  # one more for each round trip
            self.limit = max(self.limit, min(goal, self._ceiling if self._owed_answers else self._max_limit))

    def _halve(self, now: float) -> None:
        self._probe = self.limit, self._latency
        self._jump(min(self.limit, max(_FLOOR, self.limit // 2)), now)

    def _conclude(self, limit: int, latency: float, now: float) -> None:
        fall = self._latency / latency
        self._is_doubling &= fall >= 1 / _CALM
        if fall < _HALVED and self.limit > _FLOOR:
            self._halve(now)
            return
        self._probe, self._doubtful_rounds = None, 0
        self._is_baseline_raised = self._latency > self._baseline * _CALM
        self._baseline = self._latency
        in_service = max(self.limit, math.ceil(limit * fall * _CALM))  # Little's law, and what is calm on top
        if in_service < limit:
            self._ceiling, self._owed_answers = in_service, _PATIENCE * in_service
        self._jump(min(limit, in_service), now)

    def _jump(self, limit: int, now: float) -> None:
        """Change the limit by much: the next round begins once a request has been answered that was sent under it."""
        self.limit = limit
        self._settling_since = now
        self._is_used = False
        self._logarithms.clear()
