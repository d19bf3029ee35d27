"""The gate in virtual time: who may send, and when, while the service is well, throttles, or is away."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from shipper.delivery.answer import Answer
from shipper.model.errors import DeliveryGaveUpError, first_of
from tests.cases import each
from tests.fakes import answer
from tests.stage.service_model import (
    Delivery,
    Reply,
    Request,
    ServiceModel,
    batch_of,
    in_virtual_time,
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
        answer(403, "7"),
        answer(403, body=b'{"message":"Out of call volume quota. Quota will be replenished in 00:00:07."}'),
        Answer(
            status=429,
            content_type="",
            retry_after="Wed, 21 Oct 2026 12:00:07 GMT",
            date="Wed, 21 Oct 2026 12:00:00 GMT",
            body=b"",
        ),
    ],
    ids=["429 seconds", "429 words", "403 seconds", "403 words", "429 date"],
)
def test_one_throttled_request_holds_every_sender_for_the_wait_then_they_come_back_one_by_one(reply: Reply):
    service = ServiceModel(script(None, None, None, reply))
    run(lambda: Delivery(service, senders=16), numbered(200))
    held_from = service.requests[3].at + service.latency_s
    assert service.requests_between(held_from, held_from + 7) == []
    after = service.requests_between(held_from)
    assert [request.in_flight for request in after[:3]] == [1, 1, 2]
    assert max(request.in_flight for request in after) == 16, "full speed again"
    assert_no_burst(after, service.latency_s)


def assert_no_burst(requests: list[Request], latency_s: float) -> None:
    """In each round trip at most twice as many requests as in the one before."""
    start = requests[0].at
    rounds: dict[int, int] = {}
    for request in requests:
        rounds[int((request.at - start) / latency_s + 1e-6)] = (
            rounds.get(int((request.at - start) / latency_s + 1e-6), 0) + 1
        )
    counts = [rounds.get(number, 0) for number in range(5)]
    assert all(later <= 2 * max(1, earlier) for earlier, later in pairwise(counts)), counts


def test_answers_of_older_requests_do_not_open_a_gate_that_is_held():
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
    made: list[Delivery] = []

    async def main() -> None:
        made.append(Delivery(impatient, senders=4, give_up_after_s=300))
        with pytest.raises(ExceptionGroup) as caught:
            await made[0].deliver(numbered(4))
        assert caught.group_contains(DeliveryGaveUpError, match="nothing was accepted for 300 s")
        assert anyio.current_time() == 300

    in_virtual_time(main)
    assert not made[0].settled
    assert not made[0].refused


@pytest.mark.parametrize("reply", [answer(503), no_answer("connect_error"), no_answer("read_timeout"), answer(429)])
def test_a_service_that_is_away_is_asked_at_the_rate_of_probes_however_many_senders_there_are(reply: Reply):
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
    assert 24 < counts[64] < 96, "uniform in 0 to 5 seconds: one in 2.5 on the average"
    assert 24 < counts[1] < 96


def test_adaptive_concurrency_comes_back_to_what_it_was_after_an_outage():
    service = ServiceModel(latency_s=1)
    service.judge = lambda request: answer(503) if 60 < request.at < 120 else None
    run(lambda: Delivery(service, concurrency="adaptive", max_concurrency=32), numbered(3000))
    assert max(request.in_flight for request in service.requests_between(50, 60)) == 32
    back_at = service.requests_between(120)[0].at
    again = service.requests_between(back_at + 8, back_at + 12)
    assert max(request.in_flight for request in again) >= 28


def test_twenty_minutes_away_cost_requests_by_the_minute_and_no_event():
    service = ServiceModel(until(1200, answer(503)))
    run(lambda: Delivery(service, senders=16), numbered(300))
    assert 240 < len(service.requests_between(1, 1200)) < 830
    events = [(request.at, len(request.numbers)) for request in service.requests_between(1200)]
    assert sum(count for at, count in events if at < 1210) == 3000, "full speed again within ten seconds"


def test_single_failures_do_not_hold_the_others():
    rng = Random(7)
    service = ServiceModel(lambda _: answer(503) if rng.random() < 0.05 else None)
    with capture_logs() as logs:
        run(lambda: Delivery(service, senders=8), numbered(2000))
    assert [entry for entry in logs if entry["event"] == "delivery_paused"] == []
    assert len([entry for entry in logs if entry["event"] == "retry_scheduled"]) > 50
    assert service.requests[-1].at < 2000 / 8 * service.latency_s * 1.5 + 1


def test_a_one_shot_run_gives_up_when_nothing_was_accepted_for_too_long():
    service = ServiceModel(until(10_000, answer(503)))

    async def main() -> None:
        delivery = Delivery(service, senders=3, give_up_after_s=900)
        with pytest.raises(ExceptionGroup) as caught:
            await delivery.deliver(numbered(3))
        assert caught.group_contains(DeliveryGaveUpError, match="nothing was accepted for 900 s")
        assert 900 <= anyio.current_time() <= 901

    in_virtual_time(main)


def test_a_batch_that_alone_fails_does_not_stop_the_others_but_the_patience_begins_with_the_last_acceptance():
    service = ServiceModel(lambda request: answer(500) if 3 in request.numbers else None)
    made: list[Delivery] = []

    async def main() -> None:
        made.append(Delivery(service, senders=2, give_up_after_s=900))
        with pytest.raises(ExceptionGroup) as caught:
            await made[0].deliver(numbered(300))
        assert caught.group_contains(DeliveryGaveUpError)

    in_virtual_time(main)
    assert len(made[0].settled) == 2990
    assert not made[0].refused


PATIENCE_S = 200.0
SET_UP_FAULTS = [
    answer(401),
    answer(401, body=b'{"message":"Access denied due to invalid subscription key."}'),
    *map(answer, (403, 404, 405, 302)),
    Answer(status=200, content_type="text/html", retry_after="", body=b"<html>"),
    no_answer("tls", is_tls=True),
    no_answer("unknown_host"),
]
# The service's own troubles, and what the network or a service that is being restarted looks like.
PASSING_FAULTS = [
    *map(answer, (429, 500, 503)),
    answer(403, "1"),
    answer(404, "1"),
    *map(no_answer, ("connect_error", "name_lookup", "read_timeout")),
]


def given_up_at(service: ServiceModel, **options: Any) -> tuple[float, str]:
    """Deliver until it is given up; return when that was, and why."""

    async def main() -> tuple[float, str]:
        with pytest.raises(ExceptionGroup) as caught:
            await Delivery(service, senders=3, give_up_after_s=PATIENCE_S, **options).deliver(numbered(9))
        error = first_of(caught.value)
        assert isinstance(error, DeliveryGaveUpError)
        return anyio.current_time(), f"{error}. {error.way_out}"

    return in_virtual_time(main)


@each("reply", SET_UP_FAULTS)
def test_a_fault_of_the_set_up_before_the_first_acceptance_ends_a_one_shot_run_within_seconds(reply: Reply):
    service = ServiceModel(lambda _: reply)
    at, words = given_up_at(service)
    assert 5 <= at < 10
    assert "nothing was accepted yet" in words
    assert "shipper check --online" in words
    assert "delivery.fail_fast" in words
    assert len(service.requests) > 3, "it is tried more than once, as secrets may just be put in place"


@each("reply", SET_UP_FAULTS)
def test_a_fault_of_the_set_up_is_waited_out_if_fail_fast_is_off(reply: Reply):
    at, words = given_up_at(ServiceModel(lambda _: reply), fail_fast=False)
    assert at >= PATIENCE_S
    assert "delivery.give_up_after_seconds" in words


@each("reply", SET_UP_FAULTS)
def test_a_fault_of_the_set_up_after_the_first_acceptance_is_waited_out(reply: Reply):
    replies = script(None)
    service = ServiceModel()
    service.judge = lambda request: replies(request) if not service.stored else reply
    at, _ = given_up_at(service)
    assert at >= PATIENCE_S
    assert len(service.stored) > 0


@each("reply", PASSING_FAULTS)
def test_what_passes_by_itself_is_waited_out_from_the_first_request_on(reply: Reply):
    at, words = given_up_at(ServiceModel(lambda _: reply))
    assert at >= PATIENCE_S
    assert "delivery.give_up_after_seconds" in words


def test_a_fault_of_the_set_up_that_is_over_within_seconds_ends_nothing():
    service = ServiceModel(until(4, answer(401)))
    run(lambda: Delivery(service, senders=3, give_up_after_s=900), numbered(9))
    assert len(service.stored) == 90


def test_a_run_that_follows_its_input_waits_for_a_mended_set_up_however_long_it_takes():
    service = ServiceModel(until(10_000, answer(401)))
    run(lambda: Delivery(service, senders=3), numbered(9))
    assert len(service.stored) == 90


@each("late", [answer(202), answer(400)])
def test_what_was_sent_before_a_wait_was_asked_for_does_not_end_the_patience(late: Answer):
    """Two in flight: the first is asked to wait for an hour, the second is answered a moment later."""
    service = ServiceModel(lambda request: late if request.sender else answer(429, "3600"), latency_s=1)
    made: list[Delivery] = []

    async def main() -> None:
        made.append(Delivery(service, senders=2, give_up_after_s=60))
        with pytest.raises(ExceptionGroup) as caught:
            await made[0].deliver([batch_of([n], number=n + 1) for n in range(6)])
        assert caught.group_contains(DeliveryGaveUpError, match="fewer requests .*; nothing was accepted for 60 s")
        assert 60 <= anyio.current_time() <= 62

    in_virtual_time(main)
    assert [request.at for request in service.requests] == [0, 0]
    assert (len(made[0].settled), len(made[0].refused)) == ((1, 0) if late.status == 202 else (0, 1))


def test_the_patience_begins_anew_with_what_is_accepted_although_a_wait_was_asked_for():
    """The first of two answers asks for a wait; the second accepts, half a minute later."""
    service = ServiceModel(latency_s=0)
    service.latency_of = lambda request: 30.0 if request.sender else 1.0  # both are on their way at once
    service.judge = lambda request: None if request.sender else answer(429, "3600")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await Delivery(service, senders=2, give_up_after_s=60).deliver(numbered(3))
        assert caught.group_contains(DeliveryGaveUpError)
        assert anyio.current_time() == 90

    in_virtual_time(main)


def test_a_stop_wakes_senders_from_their_backoff():
    service = ServiceModel(until(100, answer(503)), latency_s=0)

    async def main() -> None:
        delivery = Delivery(service, senders=2, retry_initial_seconds=3600.0, retry_max_seconds=3600.0)
        async with anyio.create_task_group() as group:
            group.start_soon(delivery.deliver, numbered(2))
            await anyio.sleep(101)
            assert not delivery.settled
            delivery.gate.hurry()
        assert anyio.current_time() < 103

    in_virtual_time(main)


def test_a_stop_does_not_break_a_wait_that_the_service_asked_for():
    service = ServiceModel(script(answer(429, "20")), latency_s=0)

    async def main() -> None:
        delivery = Delivery(service)
        async with anyio.create_task_group() as group:
            group.start_soon(delivery.deliver, numbered(1))
            await anyio.sleep(1)
            delivery.gate.hurry()
        assert anyio.current_time() >= 20

    in_virtual_time(main)


@pytest.mark.parametrize(
    "failure", [answer(503), answer(403), answer(429, "3600")], ids=["backoff", "pause", "throttled"]
)
def test_a_retry_ends_every_wait_and_later_failures_wait_as_long_as_before(failure: Answer):
    service = ServiceModel(script(failure, failure), latency_s=0)

    async def main() -> None:
        delivery = Delivery(service, retry_initial_seconds=3600.0, retry_max_seconds=3600.0)
        async with anyio.create_task_group() as group:
            group.start_soon(delivery.deliver, numbered(1))
            for retries in range(2):
                await anyio.sleep(1)
                assert len(service.requests) == retries + 1
                delivery.gate.retry()
        assert anyio.current_time() == 2
        assert delivery.settled

    in_virtual_time(main)


@pytest.mark.parametrize("rate", [100.0, 1000.0, 5000.0])
def test_the_rate_is_kept_by_all_senders_together(rate: float):
    service = ServiceModel(latency_s=0.001)
    run(lambda: Delivery(service, senders=8, rate_limit_events_per_second=rate), numbered(500))
    seconds = service.requests[-1].at
    assert seconds == pytest.approx(4990 / rate, rel=0.01)


def test_senders_beyond_the_limit_take_no_batch_and_still_end():
    service = ServiceModel(latency_s=1)
    delivery = run(lambda: Delivery(service, concurrency="adaptive", max_concurrency=256), numbered(3))
    assert len({request.sender for request in service.requests}) <= 4
    assert delivery.counts.batches == 3
