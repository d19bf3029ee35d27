"""Refused batches in virtual time: bad records are found, their neighbours delivered, and input is held back."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shipper.config.settings import DeliverySettings
from shipper.model.errors import DeliveryGaveUpError
from tests.fakes import answer
from tests.stage.loops import in_virtual_time
from tests.stage.service_model import (
    UNTIL_IT_RECOVERS,
    Delivery,
    Reply,
    Request,
    ServiceModel,
    batch_of,
    no_answer,
    numbered,
    refuses,
    run,
    script,
    until,
)


@pytest.mark.parametrize("guilty", [0, 1, 249, 250, 377, 498, 499])
@pytest.mark.parametrize("status", [400, 409, 415, 422])
def test_one_bad_record_of_a_batch_is_found_in_few_requests_and_the_others_are_delivered(guilty: int, status: int):
    service = ServiceModel(refuses({guilty}, status))
    delivery = run(lambda: Delivery(service), [batch_of(range(500))])
    assert delivery.refused.keys() == {guilty}
    refusal = delivery.refused[guilty]
    assert (refusal.rule, refusal.message, refusal.status) == ("rejected", "IP is bad", status)
    assert not refusal.is_ambiguous
    assert set(service.stored.values()) == {1}, "a good record was accepted twice"
    assert len(service.requests) <= 2 * ceil(log2(500)) + 2
    assert refusal.attempts <= 10


@settings(max_examples=30, deadline=None)
@given(poison=st.sets(st.integers(0, 99), max_size=30), size=st.integers(1, 100))
def test_exactly_the_bad_records_are_refused_at_any_positions(poison: set[int], size: int):
    service = ServiceModel(refuses(poison), latency_s=0.001)
    batches = [batch_of(range(start, min(start + size, 100)), number=start + 1) for start in range(0, 100, size)]
    delivery = run(lambda: Delivery(service, senders=3, poison_limit=100), batches)
    assert delivery.refused.keys() == poison
    assert service.stored.keys() == set(range(100)) - poison


def test_a_batch_that_is_split_does_not_hold_up_others():
    service = ServiceModel(refuses({5}))
    run(lambda: Delivery(service, senders=2), numbered(40))
    apart = {request.sender for request in service.requests if request.at < 1 and 5 in request.numbers}
    assert len(apart) == 1
    last = max(request.at for request in service.requests if 5 in request.numbers)
    others = [request for request in service.requests if request.at <= last and request.sender not in apart]
    assert len(others) >= last / service.latency_s * 0.9


def test_records_named_by_a_refusal_are_sent_alone_at_once():
    body = b'{"errors":[{"index":3,"message":"bad"},{"index":7,"message":"bad"}]}'
    inner = refuses({3, 7})
    service = ServiceModel(lambda request: answer(422, body=body) if len(request.numbers) == 10 else inner(request))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {3, 7}
    assert [request.numbers for request in service.requests[1:]] == [[0, 1, 2, 4, 5, 6, 8, 9], [3], [7]]


def test_a_refusal_that_names_all_records_is_resolved():
    body = b'{"errors":[%b]}' % b",".join(b"%d" % index for index in range(10))
    service = ServiceModel(lambda request: answer(422, body=body) if len(request.numbers) == 10 else None)
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert not delivery.refused
    assert len(service.requests) <= 2 * ceil(log2(10)) + 2


def test_a_success_that_names_refused_records_settles_each_record():
    body = b'{"accepted":8,"rejected":[{"index":3,"field":"IP","message":"bad"},{"index":7}]}'
    service = ServiceModel(script(answer(202, body=body)))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {3, 7}
    assert delivery.refused[3].message == "IP: bad"
    assert len(service.requests) == 1


def test_a_batch_is_split_after_a_success_that_only_counts_refused_records():
    def judge(request: Request) -> Reply:
        refused = len({4, 8} & set(request.numbers))
        taken = len(request.numbers) - refused
        return answer(202, body=b'{"accepted":%d,"rejected":%d}' % (taken, refused))

    delivery = run(lambda: Delivery(ServiceModel(judge)), [batch_of(range(10))])
    assert delivery.refused.keys() == {4, 8}


def test_a_part_that_the_service_could_not_accept_yet_is_sent_again():
    body = b'[{"index":1,"status":503},{"index":4,"status":422,"message":"bad"},{"index":6,"status":429}]'
    service = ServiceModel(script(answer(207, body=body)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {4}
    assert service.requests[1].numbers == [1, 6]
    assert service.requests[1].at > 0


def test_a_refusal_after_a_lost_answer_is_ambiguous():
    service = ServiceModel(script(no_answer(was_sent=True), answer(409, body=b'{"message":"EventId is known"}')))
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert delivery.refused[1].is_ambiguous
    assert delivery.refused[1].attempts == 2


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"success":false}', b'{"accepted":9,"rejected":0}', b'{"accepted":9,"rejected":1}', b'{"status":"zork"}'),
        *(b'{"results":[', b"<html>", b'{"statusCode":503}', b'{"error":{"code":17}}'),
    ],
)
def test_a_refused_repeat_after_a_failed_success_is_ambiguous_and_does_not_count_for_the_brake(body: bytes):
    known = answer(409, body=b'{"message":"EventId already exists"}')
    replies = script(answer(200, body=body))
    service = ServiceModel(lambda request: replies(request) or known)
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, poison_limit=3), [batch_of(range(10), events_before=1_000_000)])
    assert len(delivery.refused) == 10
    assert all(refusal.is_ambiguous for refusal in delivery.refused.values())
    assert "systematic_rejection" not in [entry.get("reason") for entry in logs]


def test_a_success_that_reports_a_failure_and_names_records_accepts_none_and_sends_those_alone():
    body = b'{"success":false,"errors":[{"index":3,"message":"bad"}]}'
    inner = refuses({3})
    service = ServiceModel(lambda request: answer(200, body=body) if len(request.numbers) == 10 else inner(request))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert delivery.refused.keys() == {3}
    assert [request.numbers for request in service.requests[1:]] == [[0, 1, 2, 4, 5, 6, 7, 8, 9], [3]]


@pytest.mark.parametrize(("events_before", "is_ambiguous"), [(50_000, True), (1_000_000, False)])
def test_a_refused_repeat_beside_accepted_records_is_ambiguous_if_the_last_run_may_have_sent_it(
    events_before: int, is_ambiguous: bool
):
    """However small its batches are."""
    body = b'{"rejected":[{"index":1,"message":"EventId already exists"},{"index":2,"message":"IP is bad"}]}'
    batch = batch_of(range(4), number=5_000, events_before=events_before)
    delivery = run(lambda: Delivery(ServiceModel(script(answer(202, body=body)))), [batch])
    assert {n: refusal.is_ambiguous for n, refusal in delivery.refused.items()} == {1: is_ambiguous, 2: False}


def test_a_refusal_after_a_failed_connection_is_not_ambiguous():
    service = ServiceModel(script(no_answer("connect_error", was_sent=False), answer(400)))
    assert not run(lambda: Delivery(service), [batch_of([1])]).refused[1].is_ambiguous


# Too many mistakes ----------------------------------------------------


@pytest.mark.parametrize(("status", "reason"), [(400, "systematic_rejection"), (413, "too_large")])
def test_a_service_that_refuses_everything_gets_no_more_records_than_the_brake_allows(status: int, reason: str):
    service = ServiceModel(until(UNTIL_IT_RECOVERS, answer(status)))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=4, poison_limit=20), numbered(100))
    assert len(delivery.refused) == 20
    assert [entry["reason"] for entry in logs if entry["event"] == "delivery_paused"] == [reason]
    assert len(delivery.settled) == 980, "not all others were delivered after the repair"
    first = next(number for number, request in enumerate(service.requests) if request.at > 5)
    assert len(service.requests_between(service.requests[first].at, UNTIL_IT_RECOVERS)) < 60


def names_everybody(request: Request, words: str = "no") -> Reply:
    named = b",".join(b'{"index":%d,"message":"%b"}' % (n, words.encode()) for n in range(len(request.numbers)))
    return answer(202, body=b'{"rejected":[%b]}' % named)


def test_the_brake_counts_a_success_that_names_all_records():
    service = ServiceModel(lambda request: names_everybody(request) if request.at < UNTIL_IT_RECOVERS else None)
    delivery = run(lambda: Delivery(service, senders=2, poison_limit=25), numbered(10))
    assert len(delivery.refused) == 25
    assert len(delivery.settled) == 75


@pytest.mark.parametrize("status", [202, 409])
def test_refused_repeats_do_not_count_for_the_brake(status: int):
    """A service that refuses repeats refuses a whole batch after a lost answer."""
    lost = script(no_answer(was_sent=True))
    repeated = answer(409, body=b'{"message":"the EventId was received before: it exists"}')
    service = ServiceModel(
        lambda request: lost(request) or (repeated if status == 409 else names_everybody(request, "EventId is known"))
    )
    delivery = run(lambda: Delivery(service, poison_limit=3), [batch_of(range(10))])
    assert len(delivery.refused) == 10
    assert all(refusal.is_ambiguous for refusal in delivery.refused.values())


@in_virtual_time
async def test_a_batch_of_bad_records_does_not_hold_up_other_senders():
    delivery = Delivery(ServiceModel(refuses(set(range(100)))), senders=2, poison_limit=10, give_up_after_s=900)
    with pytest.raises(ExceptionGroup) as caught:
        await delivery.deliver([batch_of(range(100)), *numbered(60)[10:]])
    assert caught.group_contains(DeliveryGaveUpError, match="in a row")
    assert len(delivery.settled) == 500
    assert 10 <= len(delivery.refused) < 100, "the rest of the batch is not pending"


@in_virtual_time
async def test_a_reload_with_a_higher_limit_ends_the_pause_and_one_with_a_lower_limit_does_not():
    delivery = Delivery(ServiceModel(refuses(set(range(100)))), poison_limit=10)
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.deliver, [batch_of(range(100))])
        for limit in (10, 5):
            delivery.gate.reconfigure(DeliverySettings(poison_limit=limit))
            await anyio.sleep(600)
            assert len(delivery.refused) == 10
        delivery.gate.reconfigure(DeliverySettings(poison_limit=101))
        await anyio.sleep(10)
        assert len(delivery.refused) == 100


def test_an_acceptance_between_refusals_resets_the_count():
    poison = set(range(0, 400, 4))
    service = ServiceModel(refuses(poison))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, poison_limit=3), [batch_of(range(400))])
    assert delivery.refused.keys() == poison
    assert not [entry for entry in logs if entry["event"] == "delivery_paused"]


# Sizes ------------------------------------------------------------


def at_most(max_bytes: int) -> Callable[[Request], Reply | None]:
    refusal = answer(413, body=b'{"message":"Request body is too large."}')
    return lambda request: refusal if len(request.body) > max_bytes else None


def test_an_oversized_batch_is_halved_and_the_accepted_size_remembered():
    service = ServiceModel(at_most(3_000))
    batches = [batch_of(range(100 * n, 100 * (n + 1)), number=n + 1) for n in range(20)]
    assert len(batches[0].body) > 6_000
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=2), batches)
    assert not delivery.refused
    too_large = [request for request in service.requests if len(request.body) > 3_000]
    assert 0 < len(too_large) <= 6, "more than the batches in flight were too large"
    lowered = [entry["max_bytes"] for entry in logs if entry["event"] == "batch_size_lowered"]
    assert 1 <= len(lowered) <= 2
    assert min(lowered) > 1_500
    assert set(service.stored.values()) == {1}


def test_an_oversized_record_is_refused_and_its_neighbours_are_delivered():
    service = ServiceModel(at_most(300))
    large = batch_of([5], padding=500)
    batches = [batch_of(range(5)), large, batch_of(range(6, 11))]
    delivery = run(lambda: Delivery(service), batches)
    assert delivery.refused.keys() == {5}
    refusal = delivery.refused[5]
    assert (refusal.rule, refusal.status, refusal.message) == ("too_large", 413, "Request body is too large.")
