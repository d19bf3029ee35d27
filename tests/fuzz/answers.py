"""Answers of the service and of the token endpoint: verdicts, waits, tokens."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from shipper.config.secrets import LiteralSecret
from shipper.config.settings import OAuth2Settings
from shipper.delivery.answer import Answer
from shipper.delivery.oauth2 import OAuth2Source
from shipper.delivery.tokens import NoTokenError
from shipper.delivery.verdicts import STATEMENT_BYTES, Action, judge
from shipper.delivery.waits import REQUESTED_MAX_S, epoch_s, requested_wait_s
from tests.answer_bodies import EVENTS, SAMPLES
from tests.answer_bodies import IDS as EVENT_IDS
from tests.fuzz.engine import Target, loop
from tests.fuzz.mutation import mutator

CANARY: Final = "canary-4711"  # stands for records and secrets in answers
WALL_S: Final = 1_790_000_000.0
_REFUSED_NAMES: Final = ("rejected", "errors", "failed", "failures", "invalid", "error", "failed_records")
_EMPTY_TEXTS: Final = {"", "0", "no", "none", "null", "nil", "false", "ok", "success", "na", "n/a"}
_FAILED_STATUSES: Final = {"failed", "fail", "error", "rejected", "refused", "denied", "invalid"}


def _answer(data: bytes) -> Answer:
    """Parse an input: a line `STATUS|CONTENT-TYPE|RETRY-AFTER|DATE`, and the body."""
    head, _, body = data.partition(b"\n")
    status, content_type, retry_after, date, *_ = [*head.decode("latin-1").split("|"), "", "", "", ""]
    return Answer(
        status=int(status[:3]) if status[:3].isascii() and status[:3].isdigit() else 200,
        content_type=content_type.partition(";")[0].strip().lower(),
        retry_after=retry_after,
        date=date,
        body=body,
    )


def check_verdict(data: bytes) -> object:
    """Check that each answer has a verdict, and that only an answer that accepts counts as acceptance."""
    answer = _answer(data)
    verdict = judge(answer, events=EVENTS, wall_time=WALL_S, event_ids=lambda: EVENT_IDS)
    results = verdict.results
    assert {*results.rejected, *results.retried} <= set(range(len(EVENT_IDS)))
    assert results.unnamed >= 0
    assert all(CANARY not in text for text in (verdict.message, verdict.reason)), "the log quotes an answer body"
    assert "\n" not in verdict.message
    assert len(verdict.statement) <= STATEMENT_BYTES
    assert_wait(verdict.retry_after_s)
    verdict.statement.encode()
    if verdict.action is Action.ACCEPT:
        check_acceptance(answer, events=EVENTS, is_whole=not (results.rejected or results.retried))
    else:
        assert verdict.reason
        assert verdict.message
    return verdict.action, verdict.reason, len(results.rejected), len(results.retried), min(results.unnamed, 3)


def check_acceptance(answer: Answer, *, events: int, is_whole: bool) -> None:
    """
    Assert that an answer judged an acceptance does not clearly report a failure.

    Args:
        events: Number of events sent.
        is_whole: Whether all of them were judged accepted.
    """
    assert 200 <= answer.status < 300
    text = answer.body.decode("utf-8-sig", "replace").strip(" \t\r\n\ufeff")
    assert answer.content_type != "text/html"
    assert not text.startswith("<"), "a web page was judged an acceptance"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        assert not text.startswith(("{", "[")), "truncated JSON was judged an acceptance"
        return
    if is_whole and isinstance(document, dict):
        fields = {str(name).lower(): value for name, value in document.items()}
        assert fields.get("success") is not False, "the answer reports a failure"
        assert fields.get("ok") is not False, "the answer reports a failure"
        assert str(fields.get("status")).lower() not in _FAILED_STATUSES, "the answer reports a failure"
        assert not 300 <= _number(fields.get("statuscode")) < 600, "the answer reports a failure"
        accepted, duplicates = (_number(fields.get(name)) for name in ("accepted", "duplicates"))
        if "accepted" in fields and fields.keys() <= {"accepted", "duplicates", "rejected"}:
            are_numbers = {type(fields["accepted"]), type(fields.get("duplicates", 0))} <= {int, float}
            assert not are_numbers or events in {accepted, accepted + duplicates}, "the counts do not match the batch"
        for name in _REFUSED_NAMES:
            assert not _is_count(fields.get(name)), f"the answer lists refused events under {name!r}"


def _number(value: Any) -> float:
    """Return a value if it is a number, else 0."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _is_count(value: Any) -> bool:
    """Return whether the value of such a field reports refused events."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value > 0
    if isinstance(value, dict):
        return any(_is_count(each) for each in value.values())
    if isinstance(value, str):
        return value.strip().lower() not in _EMPTY_TEXTS
    return bool(value) and isinstance(value, list)


def assert_wait(wait_s: float | None) -> None:
    """Assert that a wait, if any, is within bounds."""
    assert wait_s is None or 0 <= wait_s <= REQUESTED_MAX_S, wait_s


def check_wait(data: bytes) -> object:
    """Check that a wait requested by headers or text is a number from 0 to an hour."""
    retry_after, date, text, *_ = [*data.decode("latin-1").split("\n", 2), "", "", ""]
    text = text.encode("latin-1").decode("utf-8", "replace")
    moments = epoch_s(retry_after.strip()), epoch_s(date)
    assert all(moment is None or math.isfinite(moment) for moment in moments)
    waits = [requested_wait_s(retry_after, text, date=date, wall_time=wall) for wall in (WALL_S, None)]
    for wait_s in waits:
        assert_wait(wait_s)
    plain = retry_after.strip(" \t")
    if plain.isascii() and plain.isdigit() and len(plain) <= 15:
        assert waits == [min(float(plain), REQUESTED_MAX_S)] * 2, "leading zeros change the number of seconds"
    elif moments[0] is not None and moments[1] is not None:
        assert waits[1] == min(max(moments[0] - moments[1], 0.0), REQUESTED_MAX_S), (
            "a Retry-After date is not relative to the answer's Date"
        )
    kinds = tuple(None if each is None else (each > 0) + (each >= REQUESTED_MAX_S) for each in waits)
    return kinds, plain.isdigit(), moments[0] is None, moments[1] is None, len(data).bit_length()


_source: Final = OAuth2Source(
    OAuth2Settings(
        token_url="https://login.example.com/token", client_id="shipper", client_secret=LiteralSecret(CANARY)
    ),
    key="intake.oauth2",
    post_form=lambda _url, _form: _post_form(),
    now=lambda: 1000.0,
    wall_time=lambda: WALL_S,
)
_answers: list[Answer] = []


async def _post_form() -> Answer:
    return _answers.pop()


def check_token(data: bytes) -> object:
    """Check that the result is an expiring token valid in a header, or an error that does not quote the answer."""
    answer = _answer(data)
    _answers[:] = [answer]
    try:
        token = loop().run_until_complete(_source.fetch())
    except NoTokenError as error:
        return _check_no_token(error)
    assert 200 <= answer.status < 300
    assert token.value.isascii()
    assert token.value.isprintable()
    assert " " not in token.value
    assert CANARY not in repr(token)
    assert token.expires_at is not None
    assert token.refresh_at is not None
    assert 1000.0 < token.expires_at < math.inf
    assert 1000.0 <= token.refresh_at <= token.expires_at
    return "token", round(math.log2(token.expires_at - 1000.0))


def _check_no_token(error: NoTokenError) -> object:
    message = str(error)
    assert CANARY not in message, "the error quotes the answer"
    assert "\n" not in message
    assert "intake.oauth2" in message or "temporarily unable" in message
    assert_wait(error.retry_after_s)
    return error.reason, message.partition("(")[0]


BODIES: Final = (
    b"", b"{}", b"[]", b"null", b"OK", b'{"accepted":3,"duplicates":0,"rejected":[]}', b'{"accepted":2,"rejected":1}',
    b'{"rejected":[{"index":1,"EventId":"%b","message":"%b"}]}' % (EVENT_IDS[1].encode(), CANARY.encode()),
    b'{"errors":{"events[3].IP":["%b"],"$.events[1]":["no"]}}' % CANARY.encode(), b'{"failed_records":[0,4]}',
    b'[{"index":0,"status":201},{"index":1,"status":503},{"index":2,"status":"failed"}]',
    b'{"success":true,"errors":[]}',
    b'{"results":[{"EventId":"%b","status":422,"error":"x"}]}' % EVENT_IDS[0].encode(),
    b'{"success":false,"message":"no"}',
    b'{"statusCode":429,"message":"Rate limit is exceeded. Try again in 7 seconds."}',
    b"<html><body>Sign in</body></html>",
    b'{"statusCode":403,"message":"Out of call volume quota. Quota will be replenished in 00:10:05."}',
    b'{"statusCode":401,"message":"Access denied due to invalid subscription key."}',
    b'{"error":{"message":"%b"}}' % CANARY.encode(),
)  # fmt: skip
HEADS: Final = (
    b"200|application/json||", b"202|application/json||", b"207|application/json||", b"200|text/html||", b"204|||",
    b"400|application/problem+json||", b"401|||", b"403|||", b"413|||", b"422|application/json||", b"500|||", b"302|||",
    b"429|application/json|7|Wed, 21 Oct 2026 12:00:00 GMT", b"503||Wed, 21 Oct 2026 12:00:07 GMT|",
    b"201|text/plain||",
)  # fmt: skip
DATES: Final = (
    b"Wed, 21 Oct 2026 12:00:00 GMT", b"Wednesday, 21-Oct-26 12:00:07 GMT", b"Wed Oct 21 12:00:07 2026",
    b"-0000", b"+9999", b"99999999999999999999",
    b"21 Oct 2026 12:00 +2500", b"Sun, 06 Nov 0000 00:00:00 GMT", b"Thu, 01 Jan 9999 23:59:60 GMT",
)  # fmt: skip
GRANTS: Final = (
    *(
        b'{"token_type":"Bearer","expires_in":3600,"access_token":"%b"}' % token
        for token in (CANARY.encode(), b"a.eyJleHAiOjE3OTAwMDM2MDB9.c", b"a.eyJleHAiOjFlMzAwfQ.c")
    ),
    b'{"access_token":"x"}',
    b'{"expires_in":"60","token_type":"mac","access_token":"x"}',
)
NAMES: Final = (
    *("rejected", "errors", "Errors", "failed", "failed_records", "failures", "invalid", "results", "items", "events"),
    *("index", "row", "EventId", "eventid", "id", "status", "statusCode", "code", "success", "Success", "ok"),
    "accepted",
    *("message", "error", "detail", "title", "field", "duplicates", "3", "events[0]", EVENT_IDS[2]),
    EVENT_IDS[2].upper(),
)

TARGETS: Final = (
    Target(
        "answers",
        check_verdict,
        [head + b"\n" + body for head in HEADS for body in BODIES]
        + [b"%d|application/json||\n%b" % (sample.status, sample.body) for sample in SAMPLES],
        mutator(
            words=[*BODIES, *HEADS, *DATES, b"\xef\xbb\xbf", CANARY.encode()],
            values=[*EVENT_IDS, EVENT_IDS[0].upper(), CANARY, 4, 5, 200, 422, 500, 503],
            names=NAMES,
        ),
        share=28,
    ),
    Target(
        "waits",
        check_wait,
        [
            *(a + b"\n" + b + b"\n" for a in (*DATES, b"7", b" 120 ", b"0.5", b"1e9", b"") for b in (*DATES, b"")),
            b"\n\nTry again in 7 seconds.",
            b"\n\nQuota will be replenished in 01:10:05.",
            b"\n\nretry after 5 m",
        ],
        mutator(words=[*DATES, b"again in ", b"retry", b"9999:99:99", b"\xd9\xa3", b"h", b"\n", b"nan", b"inf", b"Z"]),
        share=34,
    ),
    Target(
        "tokens",
        check_token,
        [b"200|application/json||\n" + grant for grant in GRANTS]
        + [
            b'%b|||\n{"error":"%b","error_description":"%b","trace_id":"%b"}'
            % (status, error, CANARY.encode(), EVENT_IDS[0].encode())
            for status in (b"400", b"401", b"429", b"503", b"404", b"200")
            for error in (b"invalid_client", b"invalid_grant", b"slow_down", b"odd_error", b"")
        ],
        mutator(
            words=[*DATES, b"|", b"200", b"eyJleHAiOjE3OTAwMDM2MDB9", b"eyJleHAiOi0xfQ", b".", CANARY.encode()],
            values=[
                *(60, 1, 0.001, 1e-300, 5e-324, "3600", "0", "0.000000001", "1e5", "\u0663", "Bearer", "bearer"),
                CANARY,
            ],
            names=[
                *("access_token", "expires_in", "token_type", "error", "error_description", "trace_id"),
                "correlation_id",
            ],
        ),
        share=10,
    ),
)
