"""Senders in virtual time: the effect of each answer on a batch; setup problems, compression and traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization, NoTokenError
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
def test_a_batch_is_settled_once_after_any_number_of_attempts(status: int):
    service = ServiceModel(script(answer(status), no_answer(), no_answer("read_error"), answer(status)))
    delivery = run(lambda: Delivery(service), [batch_of(range(10))])
    assert len({request.body for request in service.requests}) == 1, "the body differs between attempts"
    assert (delivery.counts.batches, delivery.counts.by_status.total(), delivery.counts.by_cause.total()) == (1, 5, 4)
    assert not delivery.refused


def test_backoff_grows_and_has_full_jitter():
    service = ServiceModel(until(1_000, answer(503)), latency_s=0)
    run(lambda: Delivery(service), [batch_of([1])])
    gaps = [later.at - earlier.at for earlier, later in pairwise(service.requests)]
    assert gaps[0] <= 0.5
    assert all(gap <= 5 for gap in gaps), "an unavailable service is not asked every few seconds"
    assert max(gaps) > 4
    assert min(gaps[10:]) < 1


def test_a_single_failure_observes_the_requested_wait():
    service = ServiceModel(script(answer(503, "7")), latency_s=0)
    run(lambda: Delivery(service), [batch_of([1])])
    assert service.requests[1].at >= 7


def test_a_stale_connection_is_retried_at_once_and_not_counted_as_a_failure():
    service = ServiceModel(script(no_answer("read_error", is_stale=True)), latency_s=0)
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert [request.at for request in service.requests] == [0, 0]
    assert len({request.body for request in service.requests}) == 1
    assert delivery.counts.by_cause.total() == 1
    assert not {"retry_scheduled", "delivery_paused"}.intersection(entry["event"] for entry in logs)


def test_a_request_that_fails_again_on_a_new_connection_backs_off():
    service = ServiceModel(script(*[no_answer("read_error", is_stale=True)] * 2), latency_s=0)
    with capture_logs() as logs:
        run(lambda: Delivery(service), [batch_of([1])])
    assert "retry_scheduled" in {entry["event"] for entry in logs}
    assert len(service.requests) == 3
    assert service.requests[2].at > 0


# Setup faults: token, key, address --------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (answer(403), "forbidden"),
        (answer(404), "not_found"),
        (answer(405), "not_found"),
        (answer(302), "redirect"),
        (answer(418), "unexpected_answer"),
        (Answer(status=200, content_type="text/html", retry_after="", body=b"<html>"), "html_answer"),
        (no_answer("tls"), "tls"),
        (no_answer("credentials"), "credentials"),
    ],
)
def test_a_setup_fault_pauses_all_senders_and_one_at_a_time_probes(reply: Reply, reason: str):
    service = ServiceModel(until(UNTIL_IT_RECOVERS, reply))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=8), numbered(20))
    assert not delivery.refused
    paused, resumed = (entry for entry in logs if entry["event"].startswith("delivery_"))
    assert (paused["event"], paused["reason"]) == ("delivery_paused", reason)
    assert resumed["event"] == "delivery_resumed"
    probes = service.requests_between(1, UNTIL_IT_RECOVERS)
    assert {request.in_flight for request in probes} == {1}
    assert len({request.sender for request in probes}) > 1, "a bad batch keeps the gate shut"
    assert 10 < len(probes) < 60


def test_a_refused_token_is_renewed_once_and_the_batch_retried_at_once():
    service = ServiceModel(script(answer(401)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    attempts = [(request.at, request.authorization.token) for request in service.requests]
    assert attempts == [(0, "token-1"), (0, "token-2")]
    assert delivery.counts.by_cause.total() == 1


def test_waiting_for_a_secret_is_not_a_retry_as_nothing_was_sent():
    def make() -> Delivery:
        made, outcomes = Delivery(service), iter([NoTokenError("credentials", "no such file")] * 3)

        async def authorize() -> Authorization:
            for error in outcomes:
                raise error
            return Authorization(token="token-1", subscription_key="key-1")

        made.credentials.authorize = authorize  # type: ignore[method-assign]
        return made

    service = ServiceModel(script(answer(503)))
    delivery = run(make, [batch_of([1])])
    assert (len(service.requests), delivery.counts.by_cause) == (2, {"http_503": 1})


def test_a_token_that_is_refused_many_times_is_renewed_once():
    service = ServiceModel(lambda request: answer(401) if request.authorization.token == "token-1" else None)
    delivery = run(lambda: Delivery(service, senders=64), numbered(64))
    assert len([request for request in service.requests if request.at == 0]) == 64
    assert delivery.credentials.tokens == 2


def test_a_second_refusal_pauses_delivery_and_each_probe_has_a_new_token():
    service = ServiceModel(until(UNTIL_IT_RECOVERS, answer(401)), latency_s=0)
    delivery = run(lambda: Delivery(service), [batch_of([1])])
    assert [request.at for request in service.requests[:2]] == [0, 0]
    assert all(request.at > 0 for request in service.requests[2:])
    assert delivery.credentials.tokens == len(service.requests)
    assert len(service.requests) < 60


def test_a_refused_key_is_replaced_by_the_secondary_without_a_token_request():
    refused = answer(401, body=b'{"message":"Access denied due to invalid subscription key."}')
    service = ServiceModel(lambda request: refused if request.authorization.subscription_key == "key-1" else None)
    delivery = run(lambda: Delivery(service, senders=4, other_keys=1), numbered(8))
    assert delivery.gate.reason == ""
    assert delivery.credentials.tokens == 1
    assert {request.authorization.subscription_key for request in service.requests} == {"key-1", "key-2"}


def test_a_refused_key_without_a_secondary_pauses_delivery_and_renews_no_token():
    refused = answer(401, body=b'{"message":"Access denied due to missing subscription key."}')
    service = ServiceModel(until(UNTIL_IT_RECOVERS, refused))
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, senders=8), numbered(20))
    assert [entry["reason"] for entry in logs if entry["event"] == "delivery_paused"] == ["subscription_key"]
    assert delivery.credentials.tokens == 1
    assert len(service.requests_between(1, UNTIL_IT_RECOVERS)) < 60


# Compression ------------------------------------------------------------


def takes_compressed(status: int, *, times: int = 0) -> Callable[[Request], Reply | None]:
    """Accept a number of compressed bodies, then refuse them."""
    taken = 0

    def judge(request: Request) -> Reply | None:
        nonlocal taken
        taken += bool(request.encoding)
        return answer(status) if request.encoding and taken > times else None

    return judge


@pytest.mark.parametrize(("status", "times"), [(415, 0), (400, 0), (415, 2)])
def test_bodies_are_sent_uncompressed_once_the_service_refuses_compressed_ones(status: int, times: int):
    service = ServiceModel(takes_compressed(status, times=times), latency_s=0)
    with capture_logs() as logs:
        delivery = run(lambda: Delivery(service, compression="gzip"), numbered(5))
    assert [request.encoding for request in service.requests] == ["gzip"] * (times + 1) + [""] * (5 - times)
    assert not delivery.refused
    assert [entry["event"] for entry in logs if entry["event"] == "compression_refused"] == ["compression_refused"]


def test_a_refused_record_does_not_disable_compression():
    service = ServiceModel(refuses({13}))
    delivery = run(lambda: Delivery(service, compression="gzip"), numbered(3))
    assert delivery.refused.keys() == {13}
    assert {request.encoding for request in service.requests} == {"gzip"}


def test_a_refused_token_is_renewed_with_compression():
    service = ServiceModel(script(None, answer(401)), latency_s=0)
    delivery = run(lambda: Delivery(service, compression="gzip"), numbered(2))
    assert delivery.credentials.tokens == 2
    assert {request.encoding for request in service.requests} == {"gzip"}


# Traces ------------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False])
def test_each_attempt_has_its_own_trace_unless_traces_are_off(is_on: bool):
    service = ServiceModel(script(answer(503), answer(401)))
    run(lambda: Delivery(service, traceparent=is_on), [batch_of([1])])
    traces = [request.traceparent for request in service.requests]
    if is_on:
        assert len(set(traces)) == len(traces) == 3
        assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace) for trace in traces)
    else:
        assert set(traces) == {""}
