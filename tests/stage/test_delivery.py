"""Senders in virtual time: what each answer leads to, for one batch; the set-up, compression and traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from shipper.delivery.answer import Answer
from tests.cases import each
from tests.fakes import answer
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
