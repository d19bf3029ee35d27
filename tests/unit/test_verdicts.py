"""What each answer means, as a table."""

from __future__ import annotations

from random import Random

import pytest

from shipper.delivery.verdicts import Action, Answer, full_jitter_s, judge

JSON = "application/json"
KEY_BODY = b'{"statusCode":401,"message":"Access denied due to invalid subscription key."}'


def answer(status: int, body: bytes = b"", content_type: str = JSON, retry_after: str = "") -> Answer:
    return Answer(status=status, content_type=content_type, retry_after=retry_after, body=body)


@pytest.mark.parametrize(
    ("given", "action", "reason"),
    [
        (answer(200), Action.ACCEPT, ""),
        (answer(201, b"created", "text/plain"), Action.ACCEPT, ""),
        (answer(202, b'{"accepted":3,"duplicates":0,"rejected":[]}'), Action.ACCEPT, ""),
        (answer(204, content_type=""), Action.ACCEPT, ""),
        (answer(202, b"[" * 5000), Action.PAUSE, "unreadable_answer"),
        (answer(200, b"<html>", "text/html"), Action.PAUSE, "html_answer"),
        (answer(202, b'{"accepted":2,"rejected":[{"index":1}]}'), Action.PAUSE, "partly_rejected"),
        (answer(207, b"[]"), Action.PAUSE, "partly_rejected"),
        (answer(301), Action.PAUSE, "redirect"),
        (answer(400), Action.PAUSE, "rejected"),
        (answer(401, KEY_BODY), Action.PAUSE, "subscription_key"),
        (answer(401, b'{"message":"JWT not present."}'), Action.PAUSE, "token"),
        (answer(403), Action.PAUSE, "forbidden"),
        (answer(404), Action.PAUSE, "not_found"),
        (answer(405), Action.PAUSE, "not_found"),
        (answer(408), Action.RETRY, "http_408"),
        (answer(409), Action.PAUSE, "rejected"),
        (answer(413), Action.PAUSE, "too_large"),
        (answer(415), Action.PAUSE, "rejected"),
        (answer(418), Action.PAUSE, "unexpected_answer"),
        (answer(422), Action.PAUSE, "rejected"),
        (answer(425), Action.RETRY, "http_425"),
        (answer(429), Action.RETRY, "http_429"),
        (answer(500), Action.RETRY, "http_500"),
        (answer(501), Action.PAUSE, "unexpected_answer"),
        (answer(502), Action.RETRY, "http_502"),
        (answer(503), Action.RETRY, "http_503"),
        (answer(504, b"<html>", "text/html"), Action.RETRY, "http_504"),
    ],
    ids=lambda value: value.status if isinstance(value, Answer) else None,
)
def test_each_answer_has_a_verdict(given: Answer, action: Action, reason: str):
    verdict = judge(given)
    assert (verdict.action, verdict.reason) == (action, reason)


@pytest.mark.parametrize("status", range(200, 600))
def test_every_status_has_a_verdict_and_only_success_is_acceptance(status: int):
    verdict = judge(answer(status))
    assert (verdict.action is Action.ACCEPT) == (200 <= status < 300 and status != 207)
    assert verdict.action is Action.ACCEPT or str(status) in verdict.message


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0", 0.0), ("", None), ("soon", None), ("-1", None)])
def test_retry_after_is_read_in_seconds(header: str, seconds: float | None):
    assert judge(answer(503, retry_after=header)).retry_after_s == seconds


def test_known_words_of_a_gateway_are_quoted_and_nothing_else_of_a_body():
    assert "Resource not found" in judge(answer(404, b'{"message":"Resource not found: /x"}')).message
    assert "invalid subscription key" in judge(answer(401, KEY_BODY)).message
    assert "192.0.2.9" not in judge(answer(400, b'{"message":"IP 192.0.2.9 is bad"}')).message
    assert "192.0.2.9" not in judge(answer(404, b'{"message":"x","IP":"192.0.2.9"}')).message
    assert "192.0.2.9" not in judge(answer(400, b"bad IP 192.0.2.9", "text/plain")).message


def test_the_advice_names_the_section_that_is_to_be_checked():
    assert "report.token" in judge(answer(401), section="report").message
    assert "intake.base_url" in judge(answer(302)).message


@pytest.mark.parametrize("attempt", [1, 2, 5, 20, 5000])
def test_jitter_is_drawn_under_the_cap(attempt: int):
    rng = Random(attempt)
    waits = [full_jitter_s(attempt, initial_s=0.5, max_s=60, rng=rng) for _ in range(300)]
    cap = min(60, 0.5 * 2 ** min(attempt - 1, 50))
    assert 0 <= min(waits) < 0.1 * cap
    assert 0.9 * cap < max(waits) <= cap
