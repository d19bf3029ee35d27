"""Senders and their gate, in virtual time: what each answer leads to, for one batch and for all senders."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from math import ceil, log2
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shipper.delivery.answer import Answer
from shipper.delivery.endpoint import NoAnswerError
from shipper.model.errors import DeliveryGaveUpError, first_of
from tests.cases import each
from tests.fakes import answer
from tests.stage.service_model import Delivery, Reply, Request, ServiceModel, batch_of, in_virtual_time

UNTIL_IT_RECOVERS = 1_000.0


def numbered(count: int, *, events: int = 10) -> list[Any]:
    return [batch_of(range(events * n, events * (n + 1)), number=n + 1) for n in range(count)]


def script(*replies: Reply | None) -> Callable[[Request], Reply | None]:
    """Answer with one after the other, then accept."""
    left = list(replies)
    return lambda _: left.pop(0) if left else None


def until(end: float, reply: Reply | Callable[[], Reply]) -> Callable[[Request], Reply | None]:
    """Answer so before a moment, then accept."""
    return lambda request: (reply() if callable(reply) else reply) if request.at < end else None


def no_answer(cause: str = "read_timeout", **flags: Any) -> NoAnswerError:
    return NoAnswerError(cause, "no answer", **flags)


def run(delivery: Callable[[], Delivery], batches: list[Any]) -> Delivery:
    """Deliver in virtual time; the delivery is made within it."""

    async def main() -> Delivery:
        made = delivery()
        await made.deliver(batches)
        return made

    return in_virtual_time(main)


# One batch ------------------------------------------------------------


@each("status", [500, 502, 503, 504, 408, 425])
def test_a_batch_is_settled_once_after_as_many_attempts_as_it_takes(status: int):
    service = ServiceModel(script(answer(status), no_answer(), no_answer("read_error"), answer(status)))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert len({request.body for request in service.requests}) == 1, "the same bytes each time"
    assert (delivery.counts.batches, delivery.counts.requests, delivery.counts.retries) == (1, 5, 4)
    assert not delivery.refused


def test_backoff_grows_and_has_full_jitter():
    service = ServiceModel(until(1_000, answer(503)), latency_s=0)
    run(lambda: Delivery(service), [batch_of([1])])
    gaps = [later.at - earlier.at for earlier, later in pairwise(service.requests)]
    assert gaps[0] <= 0.5
    assert all(gap <= 5 for gap in gaps), "a service that is away is asked every few seconds"
    assert max(gaps) > 4
    assert min(gaps[10:]) < 1


def test_a_wait_that_was_asked_for_is_kept_by_a_single_failure():
    service = ServiceModel(script(answer(503, "7")), latency_s=0)
    run(lambda: Delivery(service), [batch_of([1])])
    assert service.requests[1].at >= 7


def test_a_stale_connection_is_no_failure_and_is_tried_again_at_once():
    service = ServiceModel(script(no_answer("read_error", is_stale=True)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert [request.at for request in service.requests] == [0, 0]
    assert delivery.counts.retries == 1


def test_what_breaks_again_on_a_new_connection_is_waited_out():
    service = ServiceModel(script(*[no_answer("read_error", is_stale=True)] * 2), latency_s=0)
    run(lambda: Delivery(service), [batch_of([1])])
    assert len(service.requests) == 3
    assert service.requests[2].at > 0


# The set-up: token, key, address ------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer(403), "forbidden"),
        (answer(404), "not_found"),
        (answer(405), "not_found"),
        (answer(302), "redirect"),
        (answer(418), "unexpected_answer"),
        (Answer(status=200, content_type="text/html", retry_after="", body=b"<html>"), "html_answer"),
        (no_answer("tls", is_tls=True), "tls"),
    ],
)
def test_a_fault_of_the_set_up_pauses_all_senders_and_one_at_a_time_probes(reply: Reply, reason: str):
    service = ServiceModel(until(UNTIL_IT_RECOVERS, reply))
    reasons = []

    def delivery() -> Delivery:
        made = Delivery(service, senders=8)
        inner = service.judge
        service.judge = lambda request: (reasons.append(made.gate.reason), inner(request))[1]
        return made

    with capture_logs() as logs:
        made = run(delivery, numbered(20))
    assert not made.refused
    assert reason in reasons
    events = [entry["event"] for entry in logs if entry["event"].startswith("delivery_")]
    assert events == ["delivery_paused", "delivery_resumed"], "told once, and it goes on by itself"
    probes = service.requests_between(1, UNTIL_IT_RECOVERS)
    assert {request.in_flight for request in probes} == {1}
    assert len({request.sender for request in probes}) > 1, "one bad batch must not keep the gate shut"
    assert 10 < len(probes) < 60


def test_a_refused_token_is_renewed_once_and_the_batch_sent_again_at_once():
    service = ServiceModel(script(answer(401)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert [(request.at, request.authorization.token) for request in service.requests] == [
        (0, "token-1"),
        (0, "token-2"),
    ]
    assert delivery.counts.retries == 1


def test_many_refusals_of_one_token_renew_it_once():
    service = ServiceModel(lambda request: answer(401) if request.authorization.token == "token-1" else None)
    delivery = run(lambda: Delivery(service, senders=64), numbered(64))
    assert len([request for request in service.requests if request.at == 0]) == 64
    assert delivery.credentials.tokens == 2


def test_a_second_refusal_pauses_and_each_probe_comes_with_a_new_token():
    service = ServiceModel(until(UNTIL_IT_RECOVERS, answer(401)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert [request.at for request in service.requests[:2]] == [0, 0]
    assert all(request.at > 0 for request in service.requests[2:])
    assert delivery.credentials.tokens == len(service.requests)
    assert len(service.requests) < 60


def test_a_refused_key_gives_way_to_the_secondary_without_a_word_to_the_token_endpoint():
    refused = answer(401, body=b'{"message":"Access denied due to invalid subscription key."}')
    service = ServiceModel(lambda request: refused if request.authorization.subscription_key == "key-1" else None)
    delivery = run(lambda: Delivery(service, senders=4, other_keys=1), numbered(8))
    assert delivery.gate.reason == ""
    assert delivery.credentials.tokens == 1
    assert {request.authorization.subscription_key for request in service.requests} == {"key-1", "key-2"}


def test_a_refused_key_without_another_pauses_with_that_reason_and_renews_no_token():
    refused = answer(401, body=b'{"message":"Access denied due to missing subscription key."}')
    service = ServiceModel(until(UNTIL_IT_RECOVERS, refused))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=8), numbered(20))
    assert [entry["reason"] for entry in logs if entry["event"] == "delivery_paused"] == ["subscription_key"]
    assert delivery.credentials.tokens == 1
    assert len(service.requests_between(1, UNTIL_IT_RECOVERS)) < 60


# The gate ------------------------------------------------------------


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
    seconds = 300.0
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
    assert 60 < counts[64] < 240, "uniform in 0 to 5 seconds: one in 2.5 on the average"
    assert 60 < counts[1] < 240


def test_adaptive_concurrency_comes_back_to_what_it_was_after_an_outage():
    service = ServiceModel(latency_s=1)
    service.judge = lambda request: answer(503) if 60 < request.at < 120 else None
    run(lambda: Delivery(service, concurrency="adaptive", max_concurrency=32), numbered(3000))
    assert max(request.in_flight for request in service.requests_between(50, 60)) == 32
    back_at = service.requests_between(120)[0].at
    again = service.requests_between(back_at + 8, back_at + 12)
    assert max(request.in_flight for request in again) >= 28


def test_an_hour_away_costs_requests_by_the_minute_and_no_event():
    service = ServiceModel(until(3600, answer(503)))
    run(lambda: Delivery(service, senders=16), numbered(300))
    assert 700 < len(service.requests_between(1, 3600)) < 2_500
    events = [(request.at, len(request.numbers)) for request in service.requests_between(3600)]
    assert sum(count for at, count in events if at < 3610) == 3000, "full speed again within ten seconds"


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
            await Delivery(service, senders=3, give_up_after_s=900, **options).deliver(numbered(9))
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
    assert at >= 900
    assert "delivery.give_up_after_seconds" in words


@each("reply", SET_UP_FAULTS)
def test_a_fault_of_the_set_up_after_the_first_acceptance_is_waited_out(reply: Reply):
    replies = script(None)
    service = ServiceModel()
    service.judge = lambda request: replies(request) if not service.stored else reply
    at, _ = given_up_at(service)
    assert at >= 900
    assert len(service.stored) > 0


@each("reply", PASSING_FAULTS)
def test_what_passes_by_itself_is_waited_out_from_the_first_request_on(reply: Reply):
    at, words = given_up_at(ServiceModel(lambda _: reply))
    assert at >= 900
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
        assert caught.group_contains(DeliveryGaveUpError, match="nothing was accepted for 60 s: .*fewer requests")
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


# What lies in the records ------------------------------------------------------------


def refuses(poison: set[int], status: int = 400, words: str = "IP is bad") -> Callable[[Request], Reply | None]:
    """Refuse a batch as a whole if it holds poison, without naming it."""
    body = b'{"statusCode":%d,"message":"%b"}' % (status, words.encode())
    return lambda request: answer(status, body=body) if poison & set(request.numbers) else None


@pytest.mark.parametrize("guilty", [0, 1, 249, 250, 377, 498, 499])
@pytest.mark.parametrize("status", [400, 409, 415, 422])
def test_one_bad_record_of_a_batch_is_found_in_few_requests_and_the_others_are_delivered(guilty: int, status: int):
    service = ServiceModel(refuses({guilty}, status))
    delivery = run(lambda: Delivery(service), [batch_of(range(500))])
    assert delivery.refused.keys() == {guilty}
    refusal = delivery.refused[guilty]
    assert (refusal.rule, refusal.message, refusal.status, refusal.is_ambiguous) == (
        "rejected",
        "IP is bad",
        status,
        False,
    )
    assert set(service.stored.values()) == {1}, "nothing good was sent twice"
    assert len(service.requests) <= 2 * ceil(log2(500)) + 2
    assert refusal.attempts <= 10


@settings(max_examples=30, deadline=None)
@given(poison=st.sets(st.integers(0, 99), max_size=30), size=st.integers(1, 100))
def test_exactly_the_bad_records_are_refused_however_they_lie(poison: set[int], size: int):
    service = ServiceModel(refuses(poison), latency_s=0.001)
    batches = [batch_of(range(start, min(start + size, 100)), number=start + 1) for start in range(0, 100, size)]
    delivery = run(lambda: Delivery(service, senders=3, poison_limit=100), batches)
    assert delivery.refused.keys() == poison
    assert service.stored.keys() == set(range(100)) - poison


def test_other_batches_are_not_held_up_by_one_that_is_taken_apart():
    service = ServiceModel(refuses({5}))
    run(lambda: Delivery(service, senders=2), numbered(40))
    apart = {request.sender for request in service.requests if request.at < 1 and 5 in request.numbers}
    assert len(apart) == 1
    last = max(request.at for request in service.requests if 5 in request.numbers)
    others = [request for request in service.requests if request.at <= last and request.sender not in apart]
    assert len(others) >= last / service.latency_s * 0.9


def test_records_that_a_refusal_names_are_sent_alone_at_once():
    body = b'{"errors":[{"index":3,"message":"bad"},{"index":7,"message":"bad"}]}'
    inner = refuses({3, 7})
    service = ServiceModel(lambda request: answer(422, body=body) if len(request.numbers) == 10 else inner(request))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {3, 7}
    assert [request.numbers for request in service.requests[1:]] == [[0, 1, 2, 4, 5, 6, 8, 9], [3], [7]]


def test_a_refusal_that_names_everybody_comes_to_an_end():
    body = b'{"errors":[%b]}' % b",".join(b"%d" % index for index in range(10))
    service = ServiceModel(lambda request: answer(422, body=body) if len(request.numbers) == 10 else None)
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert not delivery.refused
    assert len(service.requests) <= 2 * ceil(log2(10)) + 2


def test_a_success_that_names_refused_records_settles_each_as_it_says():
    body = b'{"accepted":8,"rejected":[{"index":3,"field":"IP","message":"bad"},{"index":7}]}'
    service = ServiceModel(script(answer(202, body=body)))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {3, 7}
    assert delivery.refused[3].message == "IP: bad"
    assert len(service.requests) == 1


def test_a_success_that_counts_refused_records_without_naming_them_is_taken_apart():
    def judge(request: Request) -> Reply:
        refused = len({4, 8} & set(request.numbers))
        taken = len(request.numbers) - refused
        return answer(202, body=b'{"accepted":%d,"rejected":%d}' % (taken, refused))

    delivery = run(lambda: Delivery(ServiceModel(judge)), [batch_of(range(10))])
    assert delivery.refused.keys() == {4, 8}


def test_a_part_that_the_service_could_not_take_for_now_is_sent_again():
    body = b'[{"index":1,"status":503},{"index":4,"status":422,"message":"bad"},{"index":6,"status":429}]'
    service = ServiceModel(script(answer(207, body=body)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {4}
    assert service.requests[1].numbers == [1, 6]
    assert service.requests[1].at > 0


def test_a_refusal_after_an_answer_that_was_lost_is_ambiguous():
    service = ServiceModel(script(no_answer(was_sent=True), answer(409, body=b'{"message":"EventId is known"}')))
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert delivery.refused[1].is_ambiguous
    assert delivery.refused[1].attempts == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"success":false}',
        b'{"accepted":9,"rejected":0}',
        b'{"accepted":9,"rejected":1}',
        b'{"status":"zork"}',
        b'{"results":[',
        b"<html>",
        b'{"statusCode":503}',
    ],
)
def test_a_repeat_after_a_success_that_was_none_is_ambiguous_and_does_not_feed_the_brake(body: bytes):
    known = answer(409, body=b'{"message":"EventId already exists"}')
    replies = script(answer(200, body=body))
    service = ServiceModel(lambda request: replies(request) or known)
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, poison_limit=3), [batch_of(range(10), number=1_000)])
    assert len(delivery.refused) == 10
    assert all(refusal.is_ambiguous for refusal in delivery.refused.values())
    assert "systematic_rejection" not in [entry.get("reason") for entry in logs]


def test_a_success_that_says_that_all_failed_and_names_some_accepts_nothing_but_sends_those_alone():
    body = b'{"success":false,"errors":[{"index":3,"message":"bad"}]}'
    inner = refuses({3})
    service = ServiceModel(lambda request: answer(200, body=body) if len(request.numbers) == 10 else inner(request))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {3}
    assert [request.numbers for request in service.requests[1:]] == [[0, 1, 2, 4, 5, 6, 7, 8, 9], [3]]


def test_a_success_that_asks_for_fewer_requests_holds_every_sender():
    body = b'{"statusCode":429,"message":"Rate limit is exceeded. Try again in 7 seconds."}'
    service = ServiceModel(script(None, None, None, answer(200, body=body)))
    run(lambda: Delivery(service, senders=16), numbered(200))
    held_from = service.requests[3].at + service.latency_s
    assert service.requests_between(held_from, held_from + 7) == []
    assert set(service.stored.values()) == {1}


def test_a_refusal_after_a_connection_that_never_stood_is_not_ambiguous():
    service = ServiceModel(script(no_answer("connect_error", was_sent=False), answer(400)))
    assert not run(lambda: Delivery(service), [batch_of([1])]).refused[1].is_ambiguous


# The brake ------------------------------------------------------------


def test_a_service_that_refuses_everything_gets_no_more_records_than_the_brake_allows():
    service = ServiceModel(until(UNTIL_IT_RECOVERS, answer(400)))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=4, poison_limit=20), numbered(100))
    assert len(delivery.refused) == 20
    assert [entry["reason"] for entry in logs if entry["event"] == "delivery_paused"] == ["systematic_rejection"]
    assert len(delivery.settled) == 980, "when it is mended, all others are delivered"
    first = next(number for number, request in enumerate(service.requests) if request.at > 5)
    assert len(service.requests_between(service.requests[first].at, UNTIL_IT_RECOVERS)) < 60


def names_everybody(request: Request, words: str = "no") -> Reply:
    named = b",".join(b'{"index":%d,"message":"%b"}' % (n, words.encode()) for n in range(len(request.numbers)))
    return answer(202, body=b'{"rejected":[%b]}' % named)


def test_a_success_that_names_everybody_is_braked_too():
    service = ServiceModel(lambda request: names_everybody(request) if request.at < UNTIL_IT_RECOVERS else None)
    delivery = run(lambda: Delivery(service, senders=2, poison_limit=25), numbered(10))
    assert len(delivery.refused) == 25
    assert len(delivery.settled) == 75


@pytest.mark.parametrize("status", [202, 409])
def test_a_repeat_is_no_sign_that_everything_is_refused(status: int):
    """A service that refuses repeats refuses all of a batch whose first answer was lost."""
    lost = script(no_answer(was_sent=True))
    repeated = answer(409, body=b'{"message":"the EventId was received before: it exists"}')
    service = ServiceModel(
        lambda request: lost(request) or (repeated if status == 409 else names_everybody(request, "EventId is known"))
    )
    delivery = run(lambda: Delivery(service, poison_limit=3), [batch_of(range(10))])
    assert len(delivery.refused) == 10
    assert all(refusal.is_ambiguous for refusal in delivery.refused.values())


def test_a_batch_of_nothing_but_bad_records_does_not_hold_up_those_of_other_senders():
    service = ServiceModel(refuses(set(range(100))))
    made: list[Delivery] = []

    async def main() -> None:
        made.append(Delivery(service, senders=2, poison_limit=10, give_up_after_s=900))
        with pytest.raises(ExceptionGroup) as caught:
            await made[0].deliver([batch_of(range(100)), *numbered(60)[10:]])
        assert caught.group_contains(DeliveryGaveUpError, match="one after the other")

    in_virtual_time(main)
    assert len(made[0].settled) == 500
    assert 10 <= len(made[0].refused) < 100, "what is left of it is pending"


def test_an_acceptance_between_refusals_begins_the_count_anew():
    poison = set(range(0, 400, 4))
    service = ServiceModel(refuses(poison))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, poison_limit=3), [batch_of(range(400))])
    assert delivery.refused.keys() == poison
    assert not [entry for entry in logs if entry["event"] == "delivery_paused"]


# Sizes ------------------------------------------------------------


def at_most(max_bytes: int) -> Callable[[Request], Reply | None]:
    return lambda request: answer(413) if len(request.body) > max_bytes else None


def test_a_batch_that_is_too_large_is_halved_and_the_size_that_works_is_remembered():
    service = ServiceModel(at_most(3_000))
    batches = [batch_of(range(100 * n, 100 * (n + 1)), number=n + 1) for n in range(20)]
    assert len(batches[0].body) > 6_000
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=2), batches)
    assert not delivery.refused
    too_large = [request for request in service.requests if len(request.body) > 3_000]
    assert 0 < len(too_large) <= 6, "only what was on its way when the size was learned"
    assert [entry["max_bytes"] > 1_500 for entry in logs if entry["event"] == "batch_size_lowered"] in (
        [True],
        [True] * 2,
    )
    assert set(service.stored.values()) == {1}


def test_a_record_that_is_too_large_alone_is_refused_and_its_neighbours_are_delivered():
    service = ServiceModel(at_most(300))
    large = batch_of([5], padding=500)
    batches = [batch_of(range(5)), large, batch_of(range(6, 11))]
    delivery = run(lambda: Delivery(service), batches)
    assert delivery.refused.keys() == {5}
    assert delivery.refused[5].rule == "too_large"


# Compression ------------------------------------------------------------


def takes_compressed(status: int, *, times: int = 0) -> Callable[[Request], Reply | None]:
    """Take so many compressed bodies, then refuse them."""
    taken = 0

    def judge(request: Request) -> Reply | None:
        nonlocal taken
        taken += bool(request.encoding)
        return answer(status) if request.encoding and taken > times else None

    return judge


@pytest.mark.parametrize(("status", "times"), [(415, 0), (400, 0), (415, 2)])
def test_bodies_are_sent_as_they_are_once_the_service_refuses_compressed_ones(status: int, times: int):
    service = ServiceModel(takes_compressed(status, times=times), latency_s=0)
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, is_compressing=True), numbered(5))
    assert [request.encoding for request in service.requests] == ["gzip"] * (times + 1) + [""] * (5 - times)
    assert not delivery.refused
    assert [entry["event"] for entry in logs if entry["event"] == "compression_refused"] == ["compression_refused"]


def test_a_service_that_understands_compressed_bodies_may_refuse_a_record_all_the_same():
    service = ServiceModel(refuses({13}))
    delivery = run(lambda: Delivery(service, is_compressing=True), numbered(3))
    assert delivery.refused.keys() == {13}
    assert {request.encoding for request in service.requests} == {"gzip"}


def test_compression_does_not_keep_a_token_from_being_renewed():
    service = ServiceModel(script(None, answer(401)), latency_s=0)
    delivery = run(lambda: Delivery(service, is_compressing=True), numbered(2))
    assert delivery.credentials.tokens == 2
    assert {request.encoding for request in service.requests} == {"gzip"}


# Traces ------------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False])
def test_each_attempt_has_a_trace_of_its_own_unless_they_are_switched_off(is_on: bool):
    service = ServiceModel(script(answer(503), answer(401)))
    run(lambda: Delivery(service, traceparent=is_on), [batch_of([1])])
    traces = [request.traceparent for request in service.requests]
    if is_on:
        assert len(set(traces)) == len(traces) == 3
        assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace) for trace in traces)
    else:
        assert set(traces) == {""}
