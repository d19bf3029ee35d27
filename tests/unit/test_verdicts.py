"""The verdict on each answer, the wait that it asks for, and how it is quoted."""

from __future__ import annotations

import gzip
import json
from base64 import urlsafe_b64encode
from itertools import product
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization
from shipper.delivery.quoting import quotation
from shipper.delivery.verdicts import ANSWER_BYTES, STATEMENT_BYTES, Action, Verdict, judge
from shipper.delivery.waits import REQUESTED_MAX_S, full_jitter_s, requested_wait_s
from shipper.status.pauses import ADVICE
from tests.cases import each

JSON = "application/json"
KEY_BODY = b'{"statusCode":401,"message":"Access denied due to invalid subscription key."}'
QUOTA_BODY = b'{"statusCode":403,"message":"Out of call volume quota. Quota will be replenished in 00:10:05."}'
TLS_DEMANDS = (
    b"<html>\r\n<head><title>400 No required SSL certificate was sent</title></head>",
    b"<html>\r\n<head><title>400 The SSL certificate error</title></head>",
    b"<html>\r\n<head><title>400 The plain HTTP request was sent to HTTPS port</title></head>",
    b"Client sent an HTTP request to an HTTPS server.\n",
)
RATE_BODY = b'{"statusCode":429,"message":"Rate limit is exceeded. Try again in 7 seconds."}'


def judged(given: Answer, **arguments: Any) -> Verdict:
    """Judge an answer to a batch of three events."""
    return judge(given, **{"events": 3, **arguments})


def answer(status: int, body: bytes = b"", content_type: str = JSON, retry_after: str = "") -> Answer:
    return Answer(status=status, content_type=content_type, retry_after=retry_after, body=body)


ACCEPTED = [
    answer(200),
    answer(201, b"created", "text/plain"),
    answer(204, content_type=""),
    answer(202, content_type=""),
    answer(207, b'[{"status":201},{"status":201},{"status":201}]'),
    answer(202, b"OK", "text/plain"),
    *(answer(202, body) for body in (b"", b"{}", b"[]", b"null", b'{"rejected":0}', b'{"rejected":null}')),
    *(answer(202, body) for body in (b'{"success":true,"errors":[]}', b'{"accepted":3,"duplicates":0,"rejected":[]}')),
]


@each(
    ("given", "action", "reason"),
    [
        *((given, Action.ACCEPT, "") for given in ACCEPTED),
        *((answer(status), Action.BISECT, "rejected") for status in (400, 409, 415, 422)),
        *((answer(status), Action.RETRY, f"http_{status}") for status in (408, 425, 500, 502, 503, 599)),
        *((answer(status), Action.PAUSE, "unexpected_answer") for status in (418, 501)),
        *((answer(status), Action.PAUSE, "not_found") for status in (404, 405)),
        (answer(202, b"[" * 5000), Action.PAUSE, "unreadable_answer"),
        (answer(200, b"<html>", "text/html"), Action.PAUSE, "html_answer"),
        (answer(202, b'{"accepted":2,"rejected":1}'), Action.BISECT, "rejected"),
        (answer(200, b'{"success":false,"message":"no"}'), Action.PAUSE, "unreadable_answer"),
        (answer(200, b'{"statusCode":503}'), Action.RETRY, "http_503"),
        (answer(200, b'{"statusCode":429}'), Action.THROTTLE, "throttled"),
        (answer(200, b'{"status":"ok"}', "application/problem+json"), Action.PAUSE, "unreadable_answer"),
        (answer(207, b"[]"), Action.PAUSE, "unreadable_answer"),
        (answer(301), Action.PAUSE, "redirect"),
        *((answer(400, body, "text/html"), Action.PAUSE, "tls") for body in TLS_DEMANDS),
        (answer(400, b'{"message":"%s"}' % TLS_DEMANDS[0]), Action.BISECT, "rejected"),
        (answer(400, b"<title>400 Bad Request</title>", "text/html"), Action.BISECT, "rejected"),
        (answer(401, KEY_BODY), Action.CHANGE_KEY, "subscription_key"),
        (answer(401, b'{"message":"JWT not present."}'), Action.RENEW_TOKEN, "token"),
        (answer(403), Action.PAUSE, "forbidden"),
        (answer(403, retry_after="9"), Action.THROTTLE, "quota"),
        (answer(403, QUOTA_BODY), Action.THROTTLE, "quota"),
        (answer(413), Action.HALVE, "too_large"),
        (answer(429), Action.THROTTLE, "throttled"),
        (answer(504, b"<html>", "text/html"), Action.RETRY, "http_504"),
    ],
)
def test_each_answer_has_a_verdict(given: Answer, action: Action, reason: str):
    verdict = judged(given)
    assert (verdict.action, verdict.reason) == (action, reason)


@each("status", range(200, 600))
def test_every_status_has_a_verdict_and_only_success_is_acceptance(status: int):
    verdict = judged(answer(status))
    assert (verdict.action is Action.ACCEPT) == (200 <= status < 300 and status not in {206, 207})
    assert verdict.action is Action.ACCEPT or str(status) in verdict.message


@each("status", range(300, 600))
def test_a_batch_is_split_only_for_errors_that_records_may_cause(status: int):
    is_taken_apart = judged(answer(status)).action in {Action.BISECT, Action.HALVE}
    assert is_taken_apart == (status in {400, 409, 413, 415, 422})


def test_an_answer_that_is_not_about_the_batch_names_no_events():
    assert judge(answer(200, b'{"openingBalance":0,"status":"zork"}'), events=None).action is Action.ACCEPT
    assert judge(answer(200, b"{"), events=None).action is Action.PAUSE


def test_the_verdict_has_the_requested_wait():
    assert judged(answer(503, retry_after="7")).retry_after_s == 7
    assert judged(answer(429, RATE_BODY)).retry_after_s == 7
    assert judged(answer(403, QUOTA_BODY)).retry_after_s == 605
    assert judged(answer(503)).retry_after_s is None


def test_an_answer_may_leave_open_whether_the_batch_was_accepted():
    assert {status for status in range(300, 600) if judged(answer(status)).is_ambiguous} >= {500, 502, 503, 504, 408}
    assert not any(judged(answer(status)).is_ambiguous for status in (400, 401, 403, 404, 413, 422, 429))
    for body in (
        b'{"success":false}',
        b'{"accepted":2}',
        b'{"accepted":2,"rejected":1}',
        b"{",
        b"<html>",
        b'{"code":503}',
    ):
        assert judged(answer(200, body)).is_ambiguous, body


def test_known_words_of_a_gateway_are_quoted_in_a_message_and_nothing_else_of_a_body():
    assert "Resource not found" in judged(answer(404, b'{"message":"Resource not found: /x"}')).message
    assert "invalid subscription key" in judged(answer(401, KEY_BODY)).message
    bodies = [b'{"message":"IP 192.0.2.9 is bad"}', b'{"message":"x","IP":"192.0.2.9"}', b"bad IP 192.0.2.9"]
    bodies.append(b'{"errors":[{"index":0,"message":"192.0.2.9"}]}')
    for body, status in product(bodies, (200, 400, 401, 403, 404, 413, 429, 500)):
        assert "192.0.2.9" not in judged(answer(status, body)).message


def test_dead_letters_quote_the_service_up_to_the_limit():
    assert judged(answer(422, b'{"statusCode":422,"message":"IP 192.0.2.9 is bad"}')).statement == "IP 192.0.2.9 is bad"
    assert judged(answer(422, b'{"error":{"code":7,"message":"no"}}')).statement == "no"
    plain = judged(answer(422, b"  plain \xff words ", "text/plain"))
    assert plain.statement == "plain \N{REPLACEMENT CHARACTER} words"
    assert len(judged(answer(400, b"x" * 100_000)).statement) == STATEMENT_BYTES


def test_a_compressed_answer_is_called_that():
    """As of a gateway that compresses although the request does not ask for it."""
    for given, name in (
        (answer(200, gzip.compress(b'{"accepted":2}')), "gzip"),
        (answer(200, gzip.compress(b"")), "gzip"),
        (Answer.of(200, {b"content-encoding": b"br"}, b"\x0b\x02\x80OK\x03"), "br"),
    ):
        verdict = judge(given, events=2)
        assert (verdict.action, verdict.reason) == (Action.PAUSE, "unreadable_answer")
        assert f"it is compressed ({name}), although the request does not ask for that (HTTP 200)" in verdict.message
    assert judge(Answer.of(202, {b"content-encoding": b"br"}, b""), events=2).action is Action.ACCEPT
    for status in (302, 400, 401, 403, 404, 429):
        details = f"(HTTP {status}; unreadable, as it is compressed: gzip)"
        assert details in judged(answer(status, gzip.compress(KEY_BODY))).message
        assert f"(HTTP {status})" in judged(Answer.of(status, {b"content-encoding": b"gzip"}, b"")).message


@each(
    ("location", "host"),
    [
        (b"https://user:Zx9@Login.example.com:8443/Zx9?Zx9=1", "login.example.com"),
        (b"//portal.example/Zx9", "portal.example"),
        (b"/Zx9", ""),
        (b"https://[Zx9", ""),
        (b"https://Zx9\xe9<b>/", ""),
    ],
)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_named_with_its_host_and_nothing_else_of_its_address(location: bytes, host: str, status: int):
    found = judged(Answer.of(status, {b"location": location}, b""))
    to = f" to {host}" if host else ""
    problem = f"the service redirects{to}, which shipper does not follow (HTTP {status})"
    assert (found.reason, found.problem) == ("redirect", problem)


def test_the_advice_names_the_section_to_check():
    assert "report.token" in judged(answer(401), section="report").message
    assert "intake.base_url" in judged(answer(302)).message


@each("body", [b"<html>Request blocked</html>", b"Request blocked"])
def test_a_403_that_is_not_json_may_be_that_of_a_firewall(body: bytes):
    found = judged(answer(403, body))
    assert (found.action, found.reason, "a firewall" in found.problem) == (Action.PAUSE, "forbidden", True)
    assert "firewall" not in judged(answer(403, b'{"message":"no"}')).problem


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405, 429, 501])
def test_the_message_and_the_advice_are_separate(status: int):
    """Beside the advice of the reason, the message would say it twice."""
    found = judged(answer(status))
    assert found.problem.endswith(f" (HTTP {status})")
    assert found.check in ADVICE[found.reason] or found.reason == "token"
    assert found.message == (f"{found.problem}; check {found.check}" if found.check else found.problem)


def test_refused_events_are_named_by_a_success_and_by_a_refusal():
    body = b'{"rejected":[{"index":1,"message":"no"}]}'
    assert judged(answer(202, body), events=2, event_ids=lambda: ["a", "b"]).results.rejected == {1: "no"}
    refused = judged(answer(400, body), events=2, event_ids=lambda: ["a", "b"])
    assert (refused.action, refused.results.rejected) == (Action.BISECT, {1: "no"})


@pytest.mark.parametrize("refused", [1, 10, 500, 1000, 5000, 100_000])
def test_an_answer_of_any_length_that_names_refused_events_is_never_a_full_acceptance(refused: int):
    event = {"index": 0, "EventId": "0f8fad5b-d9cb-469f-a165-70867728950e", "field": "BTag", "message": "unknown"}
    for document in (
        {"accepted": 0, "duplicates": 0, "rejected": [event] * refused},
        {"rejected": [event] * refused, "accepted": 0},
    ):
        cut = answer(202, json.dumps(document).encode()[:ANSWER_BYTES])
        verdict = judged(cut, events=1, event_ids=lambda: [event["EventId"]])
        assert verdict.action is not Action.ACCEPT or verdict.results.rejected


@pytest.mark.parametrize("body", [b'{"accepted":3,"rejected":[{"index":0', b'{"rejected": [ {"index"'])
def test_a_truncated_list_of_refused_events_is_no_acceptance(body: bytes):
    assert judged(answer(202, body)).action is Action.PAUSE


def test_an_answer_that_names_an_event_counts_only_for_its_batch():
    named = "6f1d6b0e-6c7c-4d4b-9c1e-0f6f2a1f7a55"
    given = answer(200, b'{"results":[{"eventId":"%b","status":"accepted"}]}' % named.encode())
    own = judge(given, events=1, event_ids=lambda: [named])
    other = judge(given, events=1, event_ids=lambda: [named.replace("6", "7")])
    assert (own.action, other.action) == (Action.ACCEPT, Action.PAUSE)


# Waits ----------------------------------------------------------------------------------------------------------------


NOON = "Wed, 21 Oct 2026 12:00:00 GMT"
NOON_S = 1_792_584_000.0


UNTIL = "Wed, 21 Oct 2026 12:00:30 GMT"


def asked(retry_after: str = "", text: str = "", date: str = "", wall_time: float | None = None) -> float | None:
    return requested_wait_s(retry_after, text, date=date, wall_time=wall_time)


@each(
    ("header", "seconds"),
    [
        *(("7", 7.0), (" 7 ", 7.0), ("0", 0.0), ("1.5", 1.5)),
        *((text, None) for text in ("", "soon", "-1", "7 s", "\N{ARABIC-INDIC DIGIT SEVEN}")),
    ],
)
def test_seconds_are_parsed(header: str, seconds: float | None):
    assert asked(header) == seconds


@each("until", ["Wed, 21 Oct 2026 12:00:30 GMT", "Wednesday, 21-Oct-26 12:00:30 GMT", "Wed Oct 21 12:00:30 2026"])
@each("our_clock", [None, NOON_S - 3600, NOON_S + 3600])
def test_a_date_is_measured_against_the_date_of_the_answer_however_wrong_our_clock_is(
    until: str, our_clock: float | None
):
    assert asked(until, date=NOON, wall_time=our_clock) == 30


def test_a_date_is_measured_against_our_clock_if_the_answer_has_none():
    assert asked(UNTIL, wall_time=NOON_S) == 30
    assert asked(UNTIL) is None
    assert asked(UNTIL, date="yesterday", wall_time=NOON_S) == 30
    assert asked("Wed, 21 Oct 2026 11:00:00 GMT", date=NOON) == 0, "it has passed"


@each(
    ("text", "seconds"),
    [
        ("Rate limit is exceeded. Try again in 7 seconds.", 7),
        ("try again in 1 second", 1),
        ("Please retry after 2 minutes", 120),
        ("Quota will be replenished in 00:59:03.", 3543),
        ("Out of call volume quota. Quota will be replenished in 00:10:05.", 605),
        ("wait 5", 5),
        ("Rate limit of 100 calls is exceeded.", None),
        ("", None),
    ],
)
def test_the_text_is_parsed_if_there_is_no_header(text: str, seconds: float | None):
    assert asked(text=text) == seconds
    assert asked("9", text=text) == 9


@pytest.mark.parametrize("header", ["999999999", "3601", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_an_absurd_wait_is_capped_and_logged(header: str):
    with capture_logs() as logs:
        assert asked(header, date=NOON) == REQUESTED_MAX_S
    assert [entry["event"] for entry in logs] == ["long_wait_capped"]


@each("header", ["9" * 400, "1e9", "0x10", "Wed, 99 Oct 2026 12:00:00 GMT", "\0", "🕐", "nan", "inf"])
def test_an_invalid_wait_is_none(header: str):
    assert asked(header, date=NOON) is None


@each("attempt", [1, 2, 5, 20, 5000])
def test_jitter_is_drawn_under_the_cap(attempt: int):
    rng = Random(attempt)
    waits = [full_jitter_s(attempt, initial_s=0.5, max_s=60, rng=rng) for _ in range(300)]
    cap = min(60, 0.5 * 2 ** min(attempt - 1, 50))
    assert 0 <= min(waits) < 0.1 * cap
    assert 0.9 * cap < max(waits) <= cap


# Quotations -----------------------------------------------------------------------------------------------------------


PERSON = urlsafe_b64encode(json.dumps({"sub": "Ariadne", "name": "Ariadne Kowalski", "iss": "login"}).encode()).decode()
AUTHORIZATION = Authorization(f"eyJhbGciOiJIUzI1NiJ9.{PERSON.rstrip('=')}.c2lnbmF0dXJl", "hushhush")
RECORDS = json.dumps(
    {
        "EventType": "Acquisition",
        "events": [
            {"Username": "Otter", "ConsumerID": 4711, "AffiliateID": "Acme", "IP": "192.0.2.7", "BrandID": 17},
            {"Username": "Zo\N{LATIN SMALL LETTER E WITH DIAERESIS}", "FirstName": {"is": ["Anna"]}},
            {"Username": "Big Fish", "ConsumerID": 12, "AffiliateID": ""},
        ],
    }
).encode()


@each(
    ("said", "quoted"),
    [
        ("The subscription is suspended.", "The subscription is suspended."),
        ("Access denied: the unit isn't paid (code 17)", "Access denied: the unit isn't paid (code 17)"),
        ("Zugriff verweigert, bitte später", "Zugriff verweigert, bitte später"),
        ("IP 192.0.2.7 is not allowed", "IP *** is not allowed"),
        ("address 2001:db8::7 is blocked", "address *** is blocked"),
        ("user anna.b@example.com has no rights", "user *** has no rights"),
        ("no rights for brisk_otter17", "no rights for ***"),
        ("no rights for otter, and none for big fish", "no rights for ***, and none for ***"),
        ("consumer 4711 of Acme is closed", "consumer *** of *** is closed"),
        ("consumer 48151623 is closed", "consumer *** is closed"),
        ("otter's account, that of 'Otter' and of OTTER", "*** account, that of *** and of ***"),
        ("BIG is unknown, as are 47 11 and 192 . 0 . 2 . 7", "*** is unknown, as are *** and ***"),
        ("Zoe\N{COMBINING DIAERESIS} and Anna are unknown", "*** and *** are unknown"),
        ("key hushhush is refused", "key *** is refused"),
        ("key hush... is refused", "key *** is refused"),
        ("Bearer short is refused", "Bearer *** is refused"),
        ("token eyJhbGciOiJIUzI... is refused", "token *** is refused"),
        ("the token of Ariadne Kowalski expired", "the token of *** expired"),
        ("insufficient_scope", "insufficient_scope"),
        ('say "no"; or yes', "say 'no', or yes"),
        ("two\nlines\tand more", "two lines and more"),
        ("\x1b[2J turned \u202eround", "*** turned ***"),
        ('{"reason":"no"}', ""),
        ("4711 0815", ""),
        ("", ""),
        ("<html><head><title>Access Denied</title></head><body>secret</body></html>", "Access Denied"),
        ("<html>nothing", ""),
    ],
)
def test_plain_words_are_quoted_and_everything_else_is_masked(said: str, quoted: str):
    assert quotation(said, AUTHORIZATION, RECORDS) == quoted


def test_a_quotation_is_short():
    long = quotation("word " * 100_000, AUTHORIZATION)
    assert len(long) <= 162
    assert long.endswith(" word …")


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"events":[1]}', b"[" * 100_000])
def test_nothing_is_quoted_if_the_records_are_unknown(body: bytes):
    assert quotation("no", AUTHORIZATION, body) == ""


def test_a_token_of_any_form_is_accepted():
    for token in ("", "x", "a.b.c", "a.bm8.c", "a.W10.c", "." * 1000):
        assert quotation("no", Authorization(token, "key")) == "no"
