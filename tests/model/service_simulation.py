"""
A service and its senders in virtual time: which limit gets how much through, and with how many refusals.

Closed loop: the senders always have something to send and respect the limit. `python -m tests.model.service_simulation`
prints, for each kind of service, the best fixed limit and how the adaptive one compares.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

from shipper.delivery.concurrency import AdaptiveLimit, ConcurrencyLimit, FixedLimit

SENDERS: Final = 64
FIXED_LIMITS: Final = (1, 4, 8, 12, 16, 24, 32, 48, 64)
_REFUSAL_S: Final = 0.003
_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 60.0


class Service(NamedTuple):
    """
    Attributes:
        work_s: The latency of a request that is alone, drawn when it arrives at a time.
        speed: How fast each request is served among so many, at a time; 1 is as if it were alone.
        quota: Requests accepted in any second; more get 429 at once. 0 is no quota.
        places: Requests served at a time; more get 503 at once. 0 is no end.
    """

    name: str
    work_s: Callable[[float, Random], float]
    speed: Callable[[int, float], float] = lambda among, at: 1.0
    quota: int = 0
    places: int = 0
    run_s: float = 60.0


class Outcome(NamedTuple):
    """
    Attributes:
        answers: Time and latency of each acceptance.
        refusals: How many requests got each status that is no acceptance.
        limits: The limit at the start and after each change, with the time.
    """

    answers: list[tuple[float, float]]
    refusals: dict[int, int]
    limits: list[tuple[float, int]]

    @property
    def accepted(self) -> int:
        return len(self.answers)

    @property
    def error_rate(self) -> float:
        refused = sum(self.refusals.values())
        return refused / max(1, refused + self.accepted)

    def accepted_between(self, start: float, end: float) -> int:
        return sum(start <= at < end for at, _ in self.answers)

    def median_latency_s(self, start: float, end: float) -> float:
        latencies = sorted(seconds for at, seconds in self.answers if start <= at < end)
        return latencies[len(latencies) // 2]

    def mean_limit(self, start: float, end: float) -> float:
        total = 0.0
        for (since, limit), (until, _) in pairwise([*self.limits, (math.inf, 0)]):
            total += limit * max(0.0, min(until, end) - max(since, start))
        return total / (end - start)

    def least_limit(self, start: float, end: float) -> int:
        return min(
            limit
            for (since, limit), (until, _) in pairwise([*self.limits, (math.inf, 0)])
            if since < end and until > start
        )


class _Request(NamedTuple):
    sent_at: float
    in_flight: int
    attempt: int


class Simulation:
    """
    One run of a service under a limit.

    A request that is being served is done when the progress that every request made since the start, at the speeds of
    the time, has grown by its work: so that a change of speed need not touch the requests.
    """

    def __init__(self, service: Service, limit: ConcurrencyLimit, rng: Random, senders: int = SENDERS) -> None:
        self._service = service
        self._limit = limit
        self._rng = rng
        self._now = 0.0
        self._progress = 0.0
        self._in_flight = 0
        self._number = 0
        self._waiting = deque([1] * senders)  # the attempt that each sender is about to make
        self._serving: list[tuple[float, int, _Request]] = []  # by the progress at which it is done
        self._refusals: list[tuple[float, int, int, _Request]] = []  # by the time of the answer
        self._backoffs: list[tuple[float, int]] = []  # by the time of the attempt
        self._last_second: deque[float] = deque()
        self._outcome = Outcome([], {}, [(0.0, limit.limit)])

    def run(self) -> Outcome:
        """Run to the end of the service's time."""
        while True:
            self._send()
            speed = self._service.speed(len(self._serving), self._now) if self._serving else 1.0
            done = self._now + (self._serving[0][0] - self._progress) / speed if self._serving else math.inf
            refused = self._refusals[0][0] if self._refusals else math.inf
            retried = self._backoffs[0][0] if self._backoffs else math.inf
            at = min(done, refused, retried)
            if at >= self._service.run_s:
                return self._outcome
            self._progress += (at - self._now) * speed
            self._now = at
            if at == done:
                self._accept()
            elif at == refused:
                self._refuse()
            else:
                self._waiting.append(heapq.heappop(self._backoffs)[1])
            if self._limit.limit != self._outcome.limits[-1][1]:
                self._outcome.limits.append((at, self._limit.limit))

    def _send(self) -> None:
        while self._waiting and self._in_flight < self._limit.limit:
            self._in_flight += 1
            self._number += 1
            request = _Request(self._now, self._in_flight, self._waiting.popleft())
            status = self._status()
            if status:
                heapq.heappush(self._refusals, (self._now + _REFUSAL_S, self._number, status, request))
            else:
                self._last_second.append(self._now)
                done = self._progress + self._service.work_s(self._now, self._rng)
                heapq.heappush(self._serving, (done, self._number, request))

    def _status(self) -> int:
        while self._last_second and self._last_second[0] <= self._now - 1:
            self._last_second.popleft()
        if self._service.quota and len(self._last_second) >= self._service.quota:
            return 429
        return 503 if self._service.places and len(self._serving) >= self._service.places else 0

    def _accept(self) -> None:
        self._progress, _, request = heapq.heappop(self._serving)
        self._in_flight -= 1
        self._waiting.append(1)
        seconds = self._now - request.sent_at
        self._outcome.answers.append((self._now, seconds))
        self._limit.note_answer(seconds=seconds, in_flight=request.in_flight, now=self._now)

    def _refuse(self) -> None:
        _, _, status, request = heapq.heappop(self._refusals)
        self._in_flight -= 1
        self._outcome.refusals[status] = self._outcome.refusals.get(status, 0) + 1
        wait = self._rng.uniform(0, min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (request.attempt - 1)))
        heapq.heappush(self._backoffs, (self._now + wait, request.attempt + 1))
        self._limit.note_congestion(started_at=request.sent_at, now=self._now)


def varied(median_s: float, sigma: float) -> Callable[[float, Random], float]:
    """Latencies with a long tail, whatever the time."""
    return lambda at, rng: median_s * rng.lognormvariate(0, sigma)


def shared(capacity: int) -> Callable[[int, float], float]:
    """So many are served at full speed; more share it, and the throughput stays the same."""
    return lambda among, at: min(1.0, capacity / among)


def _drop_and_recovery(among: int, at: float) -> float:
    return min(1.0, (6 if 30 <= at < 60 else 24) / among)


SERVICES: Final = [
    Service("constant", lambda at, rng: 0.1),
    Service("slow and jittery", varied(1.0, 0.3), run_s=120),
    Service("jittery", varied(0.1, 0.6)),
    Service("knee and jitter", varied(0.1, 0.3), lambda among, at: min(1.0, (16 / among) ** 3)),
    Service("shared capacity and jitter", varied(0.1, 0.5), shared(24)),
    Service("quota and jitter", varied(0.1, 0.5), quota=100, run_s=120),
    Service("places", varied(0.1, 0.5), places=12),
    Service("quota and places", varied(0.1, 0.5), quota=100, places=12),
    Service("latency doubles", lambda at, rng: (0.1 if at < 30 else 0.2) * rng.lognormvariate(0, 0.2)),
    Service("capacity drops and recovers", varied(0.1, 0.2), _drop_and_recovery, run_s=90),
    Service("local", lambda at, rng: 0.001, lambda among, at: 1 / among, run_s=5),
]


def adaptive(service: Service, seed: int) -> Outcome:
    """Run a service under an adaptive limit."""
    return Simulation(service, AdaptiveLimit(SENDERS), Random(seed)).run()


@functools.cache
def fixed(service: Service) -> dict[int, Outcome]:
    """Run a service under each of the fixed limits."""
    return {limit: Simulation(service, FixedLimit(limit), Random(0)).run() for limit in FIXED_LIMITS}


def best_fixed_limit(service: Service) -> int:
    return max(FIXED_LIMITS, key=lambda limit: fixed(service)[limit].accepted)


def main(seeds: range = range(1, 9)) -> None:
    """Print what the adaptive limit reaches: the worst and the mean of some seeds."""
    print(f"{'service':28} {'best fixed limit':>22} {'throughput':>14} {'errors':>14} {'mean limit':>11}")
    for service in SERVICES:
        best = best_fixed_limit(service)
        most = fixed(service)[best].accepted
        outcomes = [adaptive(service, seed) for seed in seeds]
        ratios = [outcome.accepted / most for outcome in outcomes]
        errors = [outcome.error_rate for outcome in outcomes]
        limit = sum(outcome.mean_limit(0, service.run_s) for outcome in outcomes) / len(seeds)
        print(
            f"{service.name:28} {best:>8} at {most / service.run_s:7.1f} /s"
            f" {min(ratios):7.0%} {sum(ratios) / len(seeds):6.0%}"
            f" {max(errors):7.1%} {sum(errors) / len(seeds):6.1%} {limit:11.1f}"
        )


if __name__ == "__main__":
    main()
