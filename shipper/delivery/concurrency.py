"""
How many requests may be in flight: a fixed number, or as many as the service shows that it copes with.

Source:
    One more a round trip if all were used, a tenth less on congestion: Vector's adaptive request concurrency. Latency is
    judged against that without a queue: TCP Vegas. For that, Netflix's concurrency-limits take the least latency (Vegas)
    or a long average (Gradient2). But where latency varies the least is far below the usual, and an average learns our
    own queue; so it is measured, in doubt, with half as many in flight.
    The constants were chosen by measurement: `python -m tests.model.service_simulation`.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Final, Protocol

_FLOOR: Final = 4  # for latency: with fewer nothing overlaps, and that of a local server is our own event loop's
_NOISE: Final = 0.07  # a round goes on until its mean latency is known this well,
_LONGEST_ROUND: Final = 4  # but not for more round trips, or the limit could not follow
_CALM: Final = 1.25  # a slowdown up to here is noise: that of the round and that of the baseline
_SUSPICIOUS: Final = 1.4
_SUSPICIOUS_AT_START: Final = 2.0  # what doubling does where all were busy before; short rounds are noisier
_TRUST: Final = 200  # rounds until the baseline is measured again; that costs a round trip's worth of requests
_DOUBT: Final = 10  # for how many of them a round counts that is not calm
_HALVED: Final = 0.55  # half as many in flight take half the time: the others had only been waiting
_DECREASE: Final = 0.9
_ANSWERS_OWED: Final = 50  # for each congestion, before trying again where it began: errors stay near 2 %
_ROUNDS_OWED: Final = 20  # likewise where only the latency rose


class ConcurrencyLimit(Protocol):
    @property
    def limit(self) -> int:
        """Requests that may be in flight now, at least 1."""

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None:
        """
        Note an answer that shows that the service copes: an acceptance, or a refusal for the request's content.

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
    Doubles from a few until the first sign of congestion, then feels its way.

    A latency clearly above the baseline, or a little above it for long, starts a probe: half as many in flight. What is
    left of the latency is the new baseline. If it fell, the queue was ours, and the limit becomes what had been in
    service; if not, the service itself has become slower, and the limit is what it was.

    Attributes:
        limit: Requests that may be in flight now, 1..max_limit.
    """

    def __init__(self, max_limit: int) -> None:
        self._max_limit = self._ceiling = max_limit
        self._owed_answers = 0  # until then the ceiling holds
        self._floor = self.limit = min(_FLOOR, max_limit)
        self._jumped_at = self._decreased_at = -math.inf
        self._is_doubling = self._is_new_congestion = True
        self._is_settling = self._is_used = False
        self._logarithms: list[float] = []  # of the round's latencies: a few long ones do not move their mean much
        self._spread = self._latency = 0.0
        self._baseline = math.inf
        self._trust = _TRUST
        self._probe: tuple[int, float] | None = None  # limit and latency before it

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None:
        self._owed_answers = max(0, self._owed_answers - 1)
        self._is_settling &= now - seconds <= self._jumped_at
        if not self._is_settling:
            self._is_used |= in_flight >= self.limit
            self._logarithms.append(math.log(max(seconds, 1e-6)))
            longest = 1 if self._is_doubling and not self._probe else _LONGEST_ROUND
            if len(self._logarithms) >= self.limit * min(longest, max(1, (self._spread / _NOISE) ** 2 / self.limit)):
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
        spread = math.sqrt(fmean((each - mean) ** 2 for each in self._logarithms))
        self._spread += 0.25 * (spread - self._spread)
        self._latency = math.exp(mean)
        if self._probe:
            self._conclude(*self._probe, now)
        else:
            self._adjust(now)
        self._is_new_congestion = True
        self._is_used = False
        self._logarithms.clear()

    def _adjust(self, now: float) -> None:
        if self._latency < self._baseline / _CALM:
            self._baseline = self._latency
        if not self._is_used:
            return
        slowdown = self._latency / self._baseline
        self._trust -= 1 if slowdown <= _CALM else _DOUBT
        if slowdown > (_SUSPICIOUS_AT_START if self._is_doubling else _SUSPICIOUS) or self._trust <= 0:
            self._halve(now)
        elif self._is_doubling:
            self._jump(min(2 * self.limit, self._max_limit), now)
            self._is_doubling = self.limit < self._max_limit
        elif slowdown <= _CALM:
            round_trips = len(self._logarithms) // self.limit
            top = self._ceiling if self._owed_answers else self._max_limit
            self.limit = max(self.limit, min(self.limit + round_trips, top))

    def _halve(self, now: float) -> None:
        self._probe = self.limit, self._latency
        self._jump(min(self.limit, max(self._floor, self.limit // 2)), now)

    def _conclude(self, limit: int, latency: float, now: float) -> None:
        fall = self._latency / latency
        self._is_doubling &= fall >= 1 / _CALM
        if fall < _HALVED and self.limit > self._floor:
            self._halve(now)
            return
        self._probe = None
        self._trust = _TRUST
        self._baseline = self._latency
        in_service = max(self.limit, math.ceil(limit * fall * _CALM))
        if in_service < limit:
            self._ceiling = in_service
            self._owed_answers = _ROUNDS_OWED * in_service
        self._jump(min(limit, in_service), now)

    def _jump(self, limit: int, now: float) -> None:
        """Change the limit by much: the next round begins once a request has been answered that was sent under it."""
        self.limit = limit
        self._jumped_at = now
        self._is_settling = True
        self._is_used = False
        self._logarithms.clear()
