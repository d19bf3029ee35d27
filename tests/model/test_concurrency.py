"""The adaptive limit in virtual time: nearly as good as the best fixed limit, whatever the service is like."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from shipper.delivery.concurrency import AdaptiveLimit, FixedLimit
from tests.model.service_simulation import (
    SENDERS,
    SERVICES,
    Outcome,
    Service,
    Simulation,
    adaptive,
    best_fixed_limit,
    fixed,
    shared,
    varied,
)

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
def test_it_gets_nearly_as_much_through_as_the_best_fixed_limit_with_few_errors(service: Service):
    for is_exercised in IS_EXERCISED[service.name]:
        assert is_exercised(fixed(service)), "the service is not what its name says"
    most = fixed(service)[best_fixed_limit(service)].accepted
    for seed in (1, 2):
        outcome = adaptive(service, seed)
        told = f"seed {seed}: {outcome.accepted} of {most}, {outcome.error_rate:.1%} errors, {outcome.limits[-5:]}"
        assert outcome.accepted >= 0.8 * most, told
        assert outcome.error_rate < 0.05, told
        assert bool(outcome.refusals) == bool(service.quota or service.places), f"its limit was not tried: {told}"


def test_where_nothing_is_in_the_way_it_is_up_within_two_seconds_and_stays():
    assert adaptive(BY_NAME["constant"], 1).least_limit(2, 60) >= 45


def test_on_a_local_server_it_settles_at_a_few():
    limits = [limit for at, limit in adaptive(BY_NAME["local"], 1).limits if at > 1]
    assert limits
    assert min(limits) >= 4
    assert max(limits) <= 8


def test_a_service_that_has_become_slower_for_good_keeps_its_limit():
    outcome = adaptive(BY_NAME["latency doubles"], 1)
    assert outcome.least_limit(30, 31) <= 40, "it looked whether the queue was its own"
    assert outcome.mean_limit(32, 60) >= 60


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_its_own_queue_never_becomes_the_baseline(seed: int):
    service = Service("shared", varied(0.1, 0.3), shared(10), run_s=600)
    outcome = adaptive(service, seed)
    assert outcome.mean_limit(500, 600) <= 20
    assert outcome.median_latency_s(500, 600) <= 0.2
    assert outcome.accepted_between(500, 600) >= 0.85 * 100 * 100 / math.exp(0.3**2 / 2)


@pytest.mark.parametrize("first_s", [0.001, 0.02, 1.0, 5.0])
def test_what_the_first_answers_were_like_does_not_matter_for_long(first_s: float):
    service = Service("warming up", lambda at, rng: first_s if at == 0 else 0.1, shared(20))
    outcome = adaptive(service, 1)
    assert outcome.accepted_between(30, 60) >= 0.9 * 30 * 200
    assert outcome.mean_limit(30, 60) <= 40


def test_it_takes_up_a_capacity_that_has_come_back():
    outcome = adaptive(BY_NAME["capacity drops and recovers"], 1)
    assert outcome.mean_limit(40, 60) <= 12
    assert outcome.mean_limit(75, 90) >= 20


def test_it_leaves_a_service_alone_that_has_lost_nearly_all_its_capacity():
    service = Service("drops", varied(0.1, 0.2), lambda among, at: min(1.0, (64 if at < 20 else 5) / among), run_s=90)
    outcome = adaptive(service, 1)
    assert outcome.mean_limit(10, 20) >= 45
    assert outcome.mean_limit(30, 90) <= 10
    assert outcome.median_latency_s(30, 90) <= 0.2


def test_a_stall_just_when_it_probes_does_not_make_its_queue_the_baseline_for_good():
    limit = AdaptiveLimit(32)  # where it cannot grow until its queue is seen in spite of the baseline

    def speed(among: int, at: float) -> float:
        is_stalled = 20 <= at < 23 and limit.limit < 20
        return min(1.0, (24 if at < 20 else 10) / among) * (0.4 if is_stalled else 1.0)

    outcome = Simulation(Service("stalls", lambda at, rng: 0.1, speed, run_s=90), limit, Random(1)).run()
    assert outcome.mean_limit(22, 26) > 20, "the latency did not fall in the probe"
    assert outcome.mean_limit(40, 90) <= 14


def test_a_limit_that_is_not_used_does_not_grow():
    service = Service("constant", lambda at, rng: 0.1, run_s=20)
    few = Simulation(service, AdaptiveLimit(SENDERS), Random(1), senders=10).run()
    assert max(limit for _, limit in few.limits) == 16, "doubled while it was used, and no more"


def test_congestion_alone_goes_below_the_floor():
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


def test_a_long_outage_is_not_held_against_the_service_for_long():
    limit = AdaptiveLimit(8)
    for at in range(100_000):
        limit.note_congestion(started_at=at, now=at + 0.5)
    assert limit.limit == 1
    for at in range(100_000, 101_000):
        limit.note_answer(seconds=0.1, in_flight=limit.limit, now=float(at))
    assert limit.limit == 8


def test_a_fixed_limit_stays():
    limit = FixedLimit(7)
    limit.note_answer(seconds=1, in_flight=7, now=1)
    limit.note_congestion(started_at=1, now=2)
    assert limit.limit == 7


STEPS = st.lists(
    st.tuples(
        st.booleans(),
        st.floats(0, 1e6) | st.sampled_from([0.0, 0.1, 0.2]),
        st.floats(0, 1),
        st.floats(0, 10),
        st.integers(1, 50),
    ),
    max_size=60,
)


@given(max_limit=st.integers(1, 100), steps=STEPS)
def test_whatever_happens_it_stays_between_one_and_its_maximum(max_limit, steps):
    limit = AdaptiveLimit(max_limit)
    assert 1 <= limit.limit <= max_limit
    now = 0.0
    for is_answer, seconds, used, passed, times in steps:
        for _ in range(times):
            now += passed
            before = limit.limit
            if is_answer:
                limit.note_answer(seconds=seconds, in_flight=max(1, round(used * before)), now=now)
            else:
                limit.note_congestion(started_at=now - seconds, now=now)
                assert limit.limit <= before
            event("rose" if limit.limit > before else "fell" if limit.limit < before else "stayed")
            assert 1 <= limit.limit <= max_limit


@given(max_limit=st.integers(2, 100), steps=STEPS)
def test_without_use_it_never_rises(max_limit, steps):
    limit = AdaptiveLimit(max_limit)
    now = 0.0
    for is_answer, seconds, used, passed, times in steps:
        for _ in range(times):
            now += passed
            before = limit.limit
            if not is_answer:
                limit.note_congestion(started_at=now - seconds, now=now)
            elif before > 1:
                limit.note_answer(seconds=seconds, in_flight=1 + int(used * (before - 2)), now=now)
            assert limit.limit <= before
