"""The gate in virtual time: which senders may send and when, while the service works, throttles or fails."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import anyio
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from shipper.delivery.answer import Answer
from shipper.delivery.parts import merge_batches
from shipper.model.errors import DeliveryGaveUpError, first_of
from tests.cases import each
from tests.fakes import answer
from tests.stage.loops import in_virtual_time
from tests.stage.service_model import (
    Delivery,
    Reply,
    Request,
    ServiceModel,
    batch_of,
    no_answer,
    numbered,
    run,
    script,
    until,
)


@pytest.mark.parametrize(
    "reply",
    [
        answer(429, "7"),
        answer(429, body=b'{"message":"Rate limit is exceeded. Try again in 7 seconds."}'),
        answer(200, body=b'{"statusCode":429,"message":"Rate limit is exceeded. Try again in 7 seconds."}'),
        answer(403, "7"),
        answer(403, body=b'{"message":"Out of call volume quota. Quota will be replenished in 00:00:07."}'),
        Answer(429, "", "Wed, 21 Oct 2026 12:00:07 GMT", b"", date="Wed, 21 Oct 2026 12:00:00 GMT"),
    ],
    ids=["429 seconds", "429 words", "200 words", "403 seconds", "403 words", "429 date"],
)
def test_one_throttled_request_holds_every_sender_for_the_wait_then_they_resume_one_by_one(reply: Reply):
    service = ServiceModel(script(None, None, None, reply))
    run(lambda: Delivery(service, senders=16), numbered(200))
    held_from = service.requests[3].at + service.latency_s
    assert service.requests_between(held_from, held_from + 7) == []
    after = service.requests_between(held_from)
    assert [request.in_flight for request in after[:3]] == [1, 1, 2]
    assert max(request.in_flight for request in after) == 16, "full speed did not return"
    assert_no_burst(after, service.latency_s)
    assert set(service.stored.values()) == {1}


def assert_no_burst(requests: list[Request], latency_s: float) -> None:
    """Assert that the number of requests at most doubles with each round trip."""
    start = requests[0].at
    rounds = Counter(int((request.at - start) / latency_s + 1e-6) for request in requests)
    counts = [rounds[number] for number in range(5)]
    assert all(later <= 2 * max(1, earlier) for earlier, later in pairwise(counts)), counts


PATIENCE_S = 200.0


class GivenUp(NamedTuple):
    at: float
    message: str
    delivery: Delivery


@in_virtual_time
async def given_up(
    service: ServiceModel, batches: list[Any] | None = None, *, senders: int = 3, **options: Any
) -> GivenUp:
    """Deliver until the run gives up."""
    delivery = Delivery(service, senders=senders, **{"give_up_after_s": PATIENCE_S, **options})
    with pytest.raises(ExceptionGroup) as caught:
        await delivery.deliver(batches or numbered(9))
    error = first_of(caught.value)
    assert isinstance(error, DeliveryGaveUpError)
    return GivenUp(anyio.current_time(), f"{error}. {error.remedy}", delivery)


def test_answers_to_older_requests_do_not_open_a_held_gate():
    replies = script(answer(429, "7"))
    service = ServiceModel(replies)
    service.judge = lambda request: replies(request) if request.sender == 0 and request.at == 0 else None
    run(lambda: Delivery(service, senders=8), numbered(50))
    assert len([request for request in service.requests if request.at == 0]) == 8
    assert service.requests_between(0.05, 7) == []


def test_a_wait_longer_than_the_patience_drops_nothing():
    service = ServiceModel(until(600, answer(429, "600")), latency_s=0)
    run(lambda: Delivery(service), [batch_of([1])])
    assert len(service.requests) == 2
    impatient = ServiceModel(until(600, answer(429, "600")), latency_s=0)
    at, message, delivery = given_up(impatient, numbered(4), senders=4, give_up_after_s=300)
    assert at == 300
    assert "nothing was accepted for 300 s" in message
    assert not delivery.settled
    assert not delivery.refused


@pytest.mark.parametrize("reply", [answer(503), no_answer("connect_error"), no_answer("read_timeout"), answer(429)])
def test_an_unavailable_service_is_probed_at_a_rate_independent_of_the_number_of_senders(reply: Reply):
    seconds = 120.0
    counts = {}
    for senders in (1, 64):
        service = ServiceModel(until(seconds, reply))
        run(lambda service=service, senders=senders: Delivery(service, senders=senders), numbered(200))
        counts[senders] = len(service.requests_between(1, seconds))
        assert all(request.in_flight == 1 for request in service.requests_between(1, seconds))
        after = service.requests_between(seconds)
        assert max(request.in_flight for request in after) == senders
        assert_no_burst(after, service.latency_s)
        assert after[0].at < seconds + 5
    assert 24 < counts[64] < 96, "not one probe per 2.5 s on average"
    assert 24 < counts[1] < 96


def test_adaptive_concurrency_recovers_after_an_outage():
    service = ServiceModel(latency_s=1)
    service.judge = lambda request: answer(503) if 60 < request.at < 120 else None
    run(lambda: Delivery(service, concurrency="adaptive", max_concurrency=32), numbered(3000))
    assert max(request.in_flight for request in service.requests_between(50, 60)) == 32
    back_at = service.requests_between(120)[0].at
    again = service.requests_between(back_at + 8, back_at + 12)
    assert max(request.in_flight for request in again) >= 28


def test_single_failures_do_not_hold_the_others():
    rng = Random(7)
    service = ServiceModel(lambda _: answer(503) if rng.random() < 0.05 else None)
    with capture_logs() as logs:
        run(lambda: Delivery(service, senders=8), numbered(2000))
    assert [entry for entry in logs if entry["event"] == "delivery_paused"] == []
    assert len([entry for entry in logs if entry["event"] == "retry_scheduled"]) > 50
    assert service.requests[-1].at < 2000 / 8 * service.latency_s * 1.5 + 1


def test_a_one_shot_run_gives_up_when_nothing_was_accepted_for_too_long():
    with capture_logs() as logs:
        at, message, _ = given_up(ServiceModel(until(10_000, answer(503))), give_up_after_s=900)
    assert 900 <= at <= 901
    (paused,) = (entry for entry in logs if entry["event"] == "delivery_paused")
    assert 890 < paused["ends_in_seconds"] <= 900
    assert "nothing was accepted for 900 s" in message


def test_a_request_in_flight_is_awaited_before_giving_up():
    """As after a process was suspended: when it continues, the time is over and the first request is on its way."""
    service = ServiceModel(until(60, answer(503)), latency_s=30)
    run(lambda: Delivery(service, senders=3, give_up_after_s=50), numbered(9))
    assert len(service.stored) == 90


@each("count", [3, 300])
def test_a_record_that_always_fails_stops_no_other_and_the_patience_starts_with_the_last_acceptance(count: int):
    service = ServiceModel(lambda request: answer(500) if {3, 17} & set(request.numbers) else None)
    with capture_logs() as logs:
        delivery = given_up(service, numbered(count), senders=3, give_up_after_s=900).delivery
    assert sorted(delivery.settled) == sorted({*range(10 * count)} - {3, 17})
    assert not delivery.refused
    offsets = {entry["offset"] for entry in logs if entry["event"] == "record_keeps_failing"}
    assert offsets == {3 * 73, 7 * 74}, "the events before it in its chunk, with their newlines"


def test_an_outage_splits_a_batch_at_most_once():
    service = ServiceModel(lambda request: answer(503) if 0.5 < request.at < 3_000 else None, latency_s=0.1)
    service.latency_of = lambda request: 0.1 if request.sender else 1.0
    run(lambda: Delivery(service, senders=4), numbered(100))
    assert {len(request.numbers) for request in service.requests} == {5, 10}


SET_UP_FAULTS = [
    answer(401),
    answer(401, body=b'{"message":"Access denied due to invalid subscription key."}'),
    *map(answer, (403, 404, 405, 302)),
    Answer(status=200, content_type="text/html", retry_after="", body=b"<html>"),
    no_answer("tls"),
    no_answer("unknown_host"),
    no_answer("credentials"),  # a proxy's 407
]
# Faults of the service, and errors of the network or of a service that is being restarted.
PASSING_FAULTS = [
    *map(answer, (429, 500, 503)),
    answer(403, "1"),
    answer(404, "1"),
    *map(no_answer, ("connect_error", "name_lookup", "read_timeout")),
]


@each("reply", SET_UP_FAULTS)
def test_a_setup_fault_before_the_first_acceptance_ends_a_one_shot_run_within_seconds(reply: Reply):
    service = ServiceModel(lambda _: reply)
    at, words, _ = given_up(service)
    assert 5 <= at < 10
    assert "nothing has been accepted yet" in words
    assert "shipper check --online" in words
    assert "delivery.fail_fast" in words
    assert len(service.requests) > 3, "the request was not retried, although secrets may just be replaced"


@each("reply", SET_UP_FAULTS)
def test_a_setup_fault_is_waited_out_if_fail_fast_is_off(reply: Reply):
    at, words, _ = given_up(ServiceModel(lambda _: reply), fail_fast=False)
    assert at >= PATIENCE_S
    assert "delivery.give_up_after_seconds" in words


@each("reply", SET_UP_FAULTS)
def test_a_setup_fault_after_the_first_acceptance_is_waited_out(reply: Reply):
    replies = script(None)
    service = ServiceModel()
    service.judge = lambda request: replies(request) if not service.stored else reply
    assert given_up(service).at >= PATIENCE_S
    assert len(service.stored) > 0


@each("reply", PASSING_FAULTS)
def test_a_temporary_fault_is_waited_out_from_the_first_request_on(reply: Reply):
    at, words, _ = given_up(ServiceModel(lambda _: reply))
    assert at >= PATIENCE_S
    assert "delivery.give_up_after_seconds" in words


def test_a_setup_fault_that_ends_within_seconds_does_not_end_the_run():
    service = ServiceModel(until(4, answer(401)))
    run(lambda: Delivery(service, senders=3, give_up_after_s=900), numbered(9))
    assert len(service.stored) == 90


def test_a_run_that_follows_its_input_waits_for_a_corrected_setup_without_limit():
    service = ServiceModel(until(10_000, answer(401)))
    run(lambda: Delivery(service, senders=3), numbered(9))
    assert len(service.stored) == 90


@each("late", [answer(202), answer(400)])
def test_failures_sent_before_a_requested_wait_do_not_end_the_patience(late: Answer):
    """With two in flight: the first answer requests a wait of an hour, the second comes a moment later."""
    service = ServiceModel(lambda request: late if request.sender else answer(429, "3600"), latency_s=1)
    batches = [batch_of([n], number=n + 1) for n in range(6)]
    at, message, delivery = given_up(service, batches, senders=2, give_up_after_s=60)
    assert 60 <= at <= 62
    assert re.search("fewer requests .*; nothing was accepted for 60 s", message)
    assert [request.at for request in service.requests] == [0, 0]
    assert (len(delivery.settled), len(delivery.refused)) == ((1, 0) if late.status == 202 else (0, 1))


def test_an_acceptance_during_a_requested_wait_restarts_the_patience():
    """The first of two answers requests a wait; the second accepts, half a minute later."""
    service = ServiceModel(latency_s=0)
    service.latency_of = lambda request: 30.0 if request.sender else 1.0  # both are in flight at once
    service.judge = lambda request: None if request.sender else answer(429, "3600")
    assert given_up(service, numbered(3), senders=2, give_up_after_s=60).at == 90


@in_virtual_time
async def test_a_stop_wakes_senders_from_their_backoff():
    service = ServiceModel(until(100, answer(503)), latency_s=0)
    delivery = Delivery(service, senders=2, retry_initial_seconds=3600.0, retry_max_seconds=3600.0)
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.deliver, numbered(2))
        await anyio.sleep(101)
        assert not delivery.settled
        delivery.gate.hurry()
    assert anyio.current_time() < 103
    assert len(delivery.settled) == 20


@in_virtual_time
async def test_a_stop_does_not_cut_short_a_wait_requested_by_the_service():
    service = ServiceModel(script(answer(429, "20")), latency_s=0)
    delivery = Delivery(service)
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.deliver, numbered(1))
        await anyio.sleep(1)
        delivery.gate.hurry()
        await anyio.sleep(18)
        assert len(service.requests) == 1
    assert anyio.current_time() >= 20
    assert delivery.settled


@pytest.mark.parametrize(
    "failure", [answer(503), answer(403), answer(429, "3600")], ids=["backoff", "pause", "throttled"]
)
@in_virtual_time
async def test_a_retry_ends_every_wait_and_later_failures_wait_as_long_as_before(failure: Answer):
    service = ServiceModel(script(failure, failure), latency_s=0)
    delivery = Delivery(service, retry_initial_seconds=3600.0, retry_max_seconds=3600.0)
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.deliver, numbered(1))
        for retries in range(2):
            await anyio.sleep(1)
            assert len(service.requests) == retries + 1
            delivery.gate.retry()
    assert anyio.current_time() == 2
    assert delivery.settled


@pytest.mark.parametrize("rate", [100.0, 1000.0, 5000.0])
def test_all_senders_together_observe_the_rate(rate: float):
    service = ServiceModel(latency_s=0.001)
    run(lambda: Delivery(service, senders=8, rate_limit_events_per_second=rate), numbered(500))
    seconds = service.requests[-1].at
    assert seconds == pytest.approx(4990 / rate, rel=0.01)


@in_virtual_time
async def test_events_that_went_to_another_process_are_not_sent_and_use_nothing_of_the_rate():
    service = ServiceModel(latency_s=0.001)
    pairs = [merge_batches(pair) for pair in zip(numbered(40)[::2], numbered(40)[1::2], strict=True)]
    batches = [replace(batch, number=number) for number, batch in enumerate([*pairs[:10], *numbered(40)[20:]], 1)]
    delivery = Delivery(service, senders=8, rate_limit_events_per_second=100)
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.run, batches)
        await anyio.sleep(0.5)
        for batch in batches:
            batch.parts[0][0].stream.is_released = True
    before = [request for request in service.requests if request.at < 0.5]
    after = service.requests_between(0.5)
    assert [len(request.numbers) for request in before] == [20] * 3
    assert [request.numbers for request in after] == [[*range(n, n + 10)] for n in range(70, 200, 20)]
    assert after[-1].at == pytest.approx(0.6 + 0.1 * (len(after) - 1)), "what was dropped used the rate"
    assert delivery.counts.batches == 10
    assert set(delivery.settled) == set(service.stored)


def test_senders_beyond_the_limit_take_no_batch_and_end():
    service = ServiceModel(latency_s=1)
    delivery = run(lambda: Delivery(service, concurrency="adaptive", max_concurrency=256), numbered(3))
    assert len({request.sender for request in service.requests}) <= 4
    assert delivery.counts.batches == 3
