"""
The adaptive limit in virtual time: nearly as good as the best fixed limit with any kind of service.

The simulation is a closed loop: the senders always have something to send and respect the limit.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shipper.delivery.gate import AdaptiveLimit, ConcurrencyLimit

SENDERS: Final = 64
FIXED_LIMITS: Final = (1, 4, 8, 12, 16, 24, 32, 48, 64)
_REFUSAL_S: Final = 0.003
_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 60.0


class Service(NamedTuple):
    """
    Attributes:
        work_s: Returns the latency of a lone request that arrives at a time.
        speed: Returns the speed of each request among so many at a time; 1 is that of a lone request.
        quota: Maximum requests per second; others get 429 at once. 0 = no quota.
        places: Maximum concurrent requests; others get 503 at once. 0 = unlimited.
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
        refusals: Number of refused requests, by status.
        limits: The times and values of the limit, at the start and after each change.
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

    def limits_between(self, start: float, end: float) -> list[tuple[int, float]]:
        """Return the limits between two times, and for how long each was valid."""
        steps = pairwise([*self.limits, (math.inf, 0)])
        spans = ((limit, min(until, end) - max(since, start)) for (since, limit), (until, _) in steps)
        return [(limit, seconds) for limit, seconds in spans if seconds > 0]

    def mean_limit(self, start: float, end: float) -> float:
        return sum(limit * seconds for limit, seconds in self.limits_between(start, end)) / (end - start)

    def least_limit(self, start: float, end: float) -> int:
        return min(limit for limit, _ in self.limits_between(start, end))


class _Request(NamedTuple):
    sent_at: float
    in_flight: int
    attempt: int


class Simulation:
    """
    One run of a service under a limit.

    Progress is the work that one request would have completed since the start. A request is done when progress has
    grown by its work, so a change of speed does not affect the stored requests.
    """

    def __init__(self, service: Service, limit: ConcurrencyLimit, rng: Random, senders: int = SENDERS) -> None:
        self._service = service
        self._limit = limit
        self._rng = rng
        self._now = 0.0
        self._progress = 0.0
        self._in_flight = 0
        self._number = 0
        self._waiting = deque([1] * senders)  # the next attempt of each sender
        self._serving: list[tuple[float, int, _Request]] = []  # ordered by the progress at which each is done
        self._refusals: list[tuple[float, int, int, _Request]] = []  # ordered by the time of the answer
        self._backoffs: list[tuple[float, int]] = []  # ordered by the time of the attempt
        self._last_second: deque[float] = deque()
        self._outcome = Outcome([], {}, [(0.0, limit.limit)])

    def run(self) -> Outcome:
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
    """Return latencies with a long tail, independent of the time."""
    return lambda at, rng: median_s * rng.lognormvariate(0, sigma)


def shared(capacity: int) -> Callable[[int, float], float]:
    """Serve a number of requests at full speed; more requests share the same throughput."""
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
    return Simulation(service, AdaptiveLimit(SENDERS), Random(seed)).run()


@functools.cache
def fixed(service: Service) -> dict[int, Outcome]:
    """Run a service under each fixed limit."""
    return {limit: Simulation(service, ConcurrencyLimit(limit), Random(0)).run() for limit in FIXED_LIMITS}


BY_NAME = {service.name: service for service in SERVICES}


def _grows_with_the_limit(by_limit: Mapping[int, Outcome]) -> bool:
    return by_limit[64].accepted > 1.2 * by_limit[48].accepted


def _collapses(by_limit: Mapping[int, Outcome]) -> bool:
    return by_limit[64].accepted < 0.5 * max(each.accepted for each in by_limit.values())


def _only_queues(by_limit: Mapping[int, Outcome]) -> bool:
    return by_limit[64].accepted > 0.95 * by_limit[32].accepted and _median(by_limit[64]) > 1.8 * _median(by_limit[32])


def _varies(by_limit: Mapping[int, Outcome]) -> bool:
    latencies = sorted(seconds for _, seconds in by_limit[1].answers)
    return latencies[len(latencies) * 9 // 10] > 1.4 * _median(by_limit[1])


def _gets(*statuses: int) -> Callable[[Mapping[int, Outcome]], bool]:
    return lambda by_limit: sorted(by_limit[64].refusals) == list(statuses) and by_limit[64].error_rate > 0.05


def _doubles(by_limit: Mapping[int, Outcome]) -> bool:
    return by_limit[8].median_latency_s(30, 60) > 1.8 * by_limit[8].median_latency_s(0, 30)


def _drops(by_limit: Mapping[int, Outcome]) -> bool:
    before, between, after = (by_limit[24].accepted_between(start, start + 30) for start in (0, 30, 60))
    return between < 0.4 * min(before, after)


def _median(outcome: Outcome) -> float:
    return outcome.median_latency_s(0, math.inf)


IS_EXERCISED: dict[str, list[Callable[[Mapping[int, Outcome]], bool]]] = {
    "constant": [_grows_with_the_limit],
    "slow and jittery": [_grows_with_the_limit, _varies],
    "jittery": [_varies],
    "knee and jitter": [_collapses, _varies],
    "shared capacity and jitter": [_only_queues],
    "quota and jitter": [_gets(429)],
    "places": [_gets(503)],
    "quota and places": [_gets(429, 503)],
    "latency doubles": [_doubles],
    "capacity drops and recovers": [_drops],
    "local": [_only_queues],
}


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.name.replace(" ", "-"))
def test_the_throughput_is_close_to_that_of_the_best_fixed_limit_with_few_errors(service: Service):
    for is_exercised in IS_EXERCISED[service.name]:
        assert is_exercised(fixed(service)), "the service does not behave as its name says"
    most = max(outcome.accepted for outcome in fixed(service).values())
    for seed in (1, 2):
        outcome = adaptive(service, seed)
        told = f"seed {seed}: {outcome.accepted} of {most}, {outcome.error_rate:.1%} errors, {outcome.limits[-5:]}"
        assert outcome.accepted >= 0.8 * most, told
        assert outcome.error_rate < 0.05, told
        assert bool(outcome.refusals) == bool(service.quota or service.places), f"its limit was not tried: {told}"


def test_without_congestion_the_limit_reaches_its_maximum_within_two_seconds_and_stays():
    assert adaptive(BY_NAME["constant"], 1).least_limit(2, 60) >= 45


def test_with_a_local_server_the_limit_settles_at_a_few():
    limits = [limit for at, limit in adaptive(BY_NAME["local"], 1).limits if at > 1]
    assert limits
    assert min(limits) >= 4
    assert max(limits) <= 8


def test_a_service_that_has_become_slower_for_good_keeps_its_limit():
    outcome = adaptive(BY_NAME["latency doubles"], 1)
    assert outcome.least_limit(30, 31) <= 40, "the limit was not lowered to probe the queue"
    assert outcome.mean_limit(32, 60) >= 60


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_queue_of_the_senders_never_becomes_the_baseline(seed: int):
    service = Service("shared", varied(0.1, 0.3), shared(10), run_s=600)
    outcome = adaptive(service, seed)
    assert outcome.mean_limit(500, 600) <= 20
    assert outcome.median_latency_s(500, 600) <= 0.2
    assert outcome.accepted_between(500, 600) >= 0.85 * 100 * 100 / math.exp(0.3**2 / 2)


@pytest.mark.parametrize("first_s", [0.001, 0.02, 1.0, 5.0])
def test_unusual_first_answers_do_not_matter_for_long(first_s: float):
    service = Service("warming up", lambda at, rng: first_s if at == 0 else 0.1, shared(20))
    outcome = adaptive(service, 1)
    assert outcome.accepted_between(30, 60) >= 0.9 * 30 * 200
    assert outcome.mean_limit(30, 60) <= 40


def test_the_limit_grows_when_capacity_returns():
    outcome = adaptive(BY_NAME["capacity drops and recovers"], 1)
    assert outcome.mean_limit(40, 60) <= 12
    assert outcome.mean_limit(75, 90) >= 20


def test_the_limit_falls_if_a_service_loses_nearly_all_its_capacity():
    service = Service("drops", varied(0.1, 0.2), lambda among, at: min(1.0, (64 if at < 20 else 5) / among), run_s=90)
    outcome = adaptive(service, 1)
    assert outcome.mean_limit(10, 20) >= 45
    assert outcome.mean_limit(30, 90) <= 10
    assert outcome.median_latency_s(30, 90) <= 0.2


def test_a_stall_during_a_probe_does_not_make_the_queue_the_baseline_for_good():
    limit = AdaptiveLimit(32)  # too low for growth to reveal the queue despite the baseline

    def speed(among: int, at: float) -> float:
        is_stalled = 20 <= at < 23 and limit.limit < 20
        return min(1.0, (24 if at < 20 else 10) / among) * (0.4 if is_stalled else 1.0)

    outcome = Simulation(Service("stalls", lambda at, rng: 0.1, speed, run_s=90), limit, Random(1)).run()
    assert outcome.mean_limit(22, 26) > 20, "the latency fell during the probe"
    assert outcome.mean_limit(40, 90) <= 14


def test_an_unused_limit_does_not_grow():
    service = Service("constant", lambda at, rng: 0.1, run_s=20)
    few = Simulation(service, AdaptiveLimit(SENDERS), Random(1), senders=10).run()
    assert max(limit for _, limit in few.limits) == 16, "the limit did not double exactly once"


def test_only_congestion_lowers_the_limit_below_the_floor():
    limit = AdaptiveLimit(64)
    for at in range(10):
        limit.note_congestion(started_at=at, now=at + 0.5)
    assert limit.limit == 1


def test_requests_sent_before_the_last_decrease_do_not_decrease_again():
    limit = AdaptiveLimit(64)
    limit.note_congestion(started_at=1, now=2)
    once = limit.limit
    assert once < 4
    for now in (3, 4, 5):
        limit.note_congestion(started_at=1.9, now=now)
    assert limit.limit == once
    limit.note_congestion(started_at=2.1, now=6)
    assert limit.limit < once


def test_the_limit_recovers_soon_after_a_long_outage():
    limit = AdaptiveLimit(8)
    for at in range(100_000):
        limit.note_congestion(started_at=at, now=at + 0.5)
    assert limit.limit == 1
    for at in range(100_000, 101_000):
        limit.note_answer(seconds=0.1, in_flight=limit.limit, now=float(at))
    assert limit.limit == 8


def test_a_fixed_limit_does_not_change():
    limit = ConcurrencyLimit(7)
    limit.note_answer(seconds=1, in_flight=7, now=1)
    limit.note_congestion(started_at=1, now=2)
    assert limit.limit == 7


Steps = list[tuple[bool, float, float, float, int]]
STEPS: st.SearchStrategy[Steps] = st.lists(
    st.tuples(
        st.booleans(),
        st.floats(0, 1e6) | st.sampled_from([0.0, 0.1, 0.2]),
        st.floats(0, 1),
        st.floats(0, 10),
        st.integers(1, 50),
    ),
    max_size=60,
)


def taken(limit: AdaptiveLimit, steps: Steps, in_flight: Callable[[float, int], int]) -> Iterator[tuple[bool, int]]:
    """Take these steps; yield after each whether it was an answer, and the limit before it."""
    now = 0.0
    for is_answer, seconds, used, passed, times in steps:
        for _ in range(times):
            now += passed
            before = limit.limit
            if not is_answer:
                limit.note_congestion(started_at=now - seconds, now=now)
            elif number := in_flight(used, before):
                limit.note_answer(seconds=seconds, in_flight=number, now=now)
            yield is_answer, before


@given(max_limit=st.integers(1, 100), steps=STEPS)
def test_the_limit_always_stays_between_one_and_its_maximum(max_limit, steps):
    limit = AdaptiveLimit(max_limit)
    assert 1 <= limit.limit <= max_limit
    for is_answer, before in taken(limit, steps, lambda used, now: max(1, round(used * now))):
        event("rose" if limit.limit > before else "fell" if limit.limit < before else "stayed")
        assert 1 <= limit.limit <= max_limit
        assert is_answer or limit.limit <= before


@given(max_limit=st.integers(2, 100), steps=STEPS)
def test_an_unused_limit_never_rises(max_limit, steps):
    limit = AdaptiveLimit(max_limit)
    for _, before in taken(limit, steps, lambda used, now: 1 + int(used * (now - 2)) if now > 1 else 0):
        assert limit.limit <= before
