"""The gateway of the sandbox: keys, rate limits, tokens, headers, bodies."""

from __future__ import annotations

import gzip
import zlib
from email.utils import parsedate_to_datetime
from random import Random

import anyio
import httpx
import jwt
import pytest

from shipper.model import wire
from shipper.sandbox import gateway
from shipper.sandbox.gateway import SUBSCRIPTION_KEY_HEADER
from shipper.sandbox.options import CallLimit, SandboxOptions
from shipper.sandbox.tokens import AUDIENCE, TOKEN_SECRET
from tests.cases import each
from tests.stage.sandbox.conftest import Start
from tests.stage.sandbox.driver import NOW, REPORT, Sandbox, body, eventually, gateway_answer, sample, told

BOTH = ["intake", "report"]
TOKEN_MISSING = "Unauthorized. Access token is missing."
TOKEN_INVALID = "Unauthorized. Access token is invalid."
WRONG_TYPE = "Unsupported content type. Content-Type must be application/json."
NO_TYPE = "Header Content-Type: application/json is required."
NO_CACHE = "Header Cache-Control: no-cache is required."
COMPRESSED = "Unsupported content encoding. The body must be sent as it is, without compression."
FORMS = ["seconds", "date"]


# Key, token, headers


@each("operation", BOTH)
@each(
    ("name", "value", "status", "message"),
    [
        (SUBSCRIPTION_KEY_HEADER, None, 401, gateway.KEY_MISSING),
        (SUBSCRIPTION_KEY_HEADER, "", 401, gateway.KEY_MISSING),
        (SUBSCRIPTION_KEY_HEADER, "another", 401, gateway.KEY_INVALID),
        (SUBSCRIPTION_KEY_HEADER, "SANDBOX-subscription-key", 401, gateway.KEY_INVALID),
        ("Authorization", None, 401, TOKEN_MISSING),
        ("Authorization", "", 401, TOKEN_MISSING),
        ("Authorization", "Bearer", 401, TOKEN_MISSING),
        ("Authorization", "Basic dXNlcjpwYXNz", 401, TOKEN_MISSING),
        ("Authorization", "Bearer no.jwt.atall", 401, TOKEN_INVALID),
        ("Authorization", "Bearer one two", 401, TOKEN_INVALID),
        ("Content-Type", None, 400, NO_TYPE),
        ("Content-Type", "", 400, NO_TYPE),
        ("Content-Type", "text/plain", 415, WRONG_TYPE),
        ("Content-Type", "application/jsonl", 415, WRONG_TYPE),
        ("Cache-Control", None, 400, NO_CACHE),
        ("Cache-Control", "max-age=0", 400, NO_CACHE),
        ("Cache-Control", "no-cachet", 400, NO_CACHE),
        ("Content-Encoding", "gzip", 415, COMPRESSED),
        ("Content-Encoding", "br", 415, COMPRESSED),
    ],
)
def test_gateway_refuses_a_request_that_lacks_a_header(sandbox: Sandbox, operation, name, value, status, message):
    answer = sandbox.call(operation, {name: value})
    assert told(answer) == gateway_answer(status, message)
    assert "Retry-After" not in answer.headers
    assert sandbox.stored() == []


@each("operation", BOTH)
@each(
    "more",
    [
        {"Content-Type": "Application/JSON; charset=utf-8"},
        {"Cache-Control": "no-store, No-Cache"},
        {"Content-Encoding": "identity"},
        {SUBSCRIPTION_KEY_HEADER: None, SUBSCRIPTION_KEY_HEADER.upper(): "sandbox-subscription-key"},
    ],
)
def test_headers_may_contain_more_than_required(sandbox: Sandbox, operation, more):
    assert sandbox.call(operation, more).is_success


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_scheme_of_the_token_is_case_insensitive(sandbox: Sandbox, scheme):
    token = sandbox.headers["Authorization"].split()[1]
    assert sandbox.call("report", {"Authorization": f"{scheme} {token}"}).status_code == 200


def test_gateway_judges_key_then_rate_then_quota_then_token_then_headers_then_body(start: Start):
    sandbox = start(rate_limit=CallLimit(2, 60), quota=CallLimit(1, 600), max_body_bytes=10)
    wrong = {SUBSCRIPTION_KEY_HEADER: "wrong", "Authorization": "Bearer wrong", "Content-Type": "text/plain"}
    large = {"content": b" " * 11}

    def ask(*right: str) -> tuple[int, str]:
        sent = {**sandbox.headers, **{name: value for name, value in wrong.items() if name not in right}}
        answer = sandbox.ask("POST", wire.INTAKE_PATH, headers=sent, **large)
        return answer.status_code, answer.json()["message"]

    assert ask() == (401, gateway.KEY_INVALID)
    assert ask(SUBSCRIPTION_KEY_HEADER) == (401, TOKEN_INVALID)  # the only call within the quota
    assert ask(SUBSCRIPTION_KEY_HEADER)[0] == 403
    assert ask(SUBSCRIPTION_KEY_HEADER)[0] == 429
    assert ask() == (401, gateway.KEY_INVALID)
    sandbox.advance(600)
    assert ask(SUBSCRIPTION_KEY_HEADER, "Authorization") == (415, WRONG_TYPE)
    sandbox.advance(600)
    assert ask(*wrong) == (413, "Request body is too large. The limit is 10 bytes.")


@pytest.mark.parametrize("operation", BOTH)
def test_both_keys_are_valid_for_both_operations(sandbox: Sandbox, operation):
    for key in sandbox.keys().values():
        assert sandbox.call(operation, {SUBSCRIPTION_KEY_HEADER: key}).is_success


def test_key_in_the_query_is_ignored(sandbox: Sandbox):
    path = f"{REPORT}?subscription-key={sandbox.headers[SUBSCRIPTION_KEY_HEADER]}"
    answer = sandbox.ask("GET", path, headers={SUBSCRIPTION_KEY_HEADER: None})
    assert told(answer) == gateway_answer(401, gateway.KEY_MISSING)


def signed(secret: str | None = None, algorithm: str = "HS256", **claims: object) -> str:
    payload = {"aud": AUDIENCE, "nbf": NOW - 10, "exp": NOW + 10, **claims}
    payload = {name: value for name, value in payload.items() if value is not None}
    key = None if algorithm == "none" else secret or TOKEN_SECRET
    return jwt.encode(payload, key, algorithm=algorithm)


@each("operation", BOTH)
@each(
    ("how", "fault"),
    [
        ({}, ""),
        ({"nbf": NOW}, ""),
        ({"exp": NOW + 0.001}, ""),
        ({"exp": NOW}, "has expired"),
        ({"exp": NOW - 3600}, "has expired"),
        ({"nbf": NOW + 1}, "is not valid yet"),
        ({"aud": "elsewhere"}, "is for another audience"),
        ({"aud": AUDIENCE + "/"}, "is for another audience"),
        ({"exp": NOW - 1, "aud": "elsewhere"}, "is for another audience"),
        ({"exp": None}, "is invalid"),
        ({"nbf": None}, "is invalid"),
        ({"aud": None}, "is invalid"),
        ({"exp": "soon"}, "is invalid"),
        ({"exp": True}, "is invalid"),
        ({"secret": "a secret of thirty-two bytes that is not the right one"}, "is invalid"),
        ({"algorithm": "none"}, "is invalid"),
        ({"algorithm": "HS384", "secret": "x" * 64}, "is invalid"),
    ],
)
def test_token_is_judged_by_signature_audience_and_time(sandbox: Sandbox, operation, how, fault):
    answer = sandbox.call(operation, {"Authorization": f"Bearer {signed(**how)}"})
    if fault:
        assert told(answer) == gateway_answer(401, f"Unauthorized. Access token {fault}.")
    else:
        assert answer.is_success


def test_token_whose_payload_was_changed_is_invalid(sandbox: Sandbox):
    head, payload, signature = signed().split(".")
    _, other, _ = signed(exp=NOW + 10**6).split(".")
    assert sandbox.call("report", {"Authorization": f"Bearer {head}.{payload}.{signature}"}).status_code == 200
    answer = sandbox.call("report", {"Authorization": f"Bearer {head}.{other}.{signature}"})
    assert told(answer) == gateway_answer(401, TOKEN_INVALID)


@each(
    ("method", "path"),
    [
        *((method, wire.INTAKE_PATH) for method in ("GET", "PUT", "OPTIONS")),
        *(("POST", path) for path in (wire.INTAKE_PATH + "/", wire.INTAKE_PATH.upper(), REPORT)),
        *(("DELETE", path) for path in (REPORT, "/_sandbox/counts")),
        *(("GET", path) for path in (REPORT + "/", "/dpm/v1/dar/1001/2026-03-01", REPORT + "/more")),
        *(("GET", path) for path in ("/oauth2/v2.0/token", "/", "/_sandbox", "/_sandbox/absent")),
    ],
)
def test_unknown_routes_and_methods_are_not_found(sandbox: Sandbox, method, path):
    assert told(sandbox.ask(method, path)) == gateway_answer(404, "Resource not found")
    without_key = httpx.request(method, sandbox.base_url + path, trust_env=False, verify=False)
    assert told(without_key) == gateway_answer(404, "Resource not found")
    assert sandbox.log() == []


@pytest.mark.parametrize("path", [REPORT, "/_sandbox/counts"])
def test_no_operation_supports_head(sandbox: Sandbox, path):
    answer = sandbox.ask("HEAD", path)
    assert (answer.status_code, answer.content) == (404, b"")
    assert sandbox.log() == []


# Rate and quota


def seconds_until(answer: httpx.Response) -> float:
    """Parse Retry-After in either form; a date is relative to the Date of the answer."""
    value = answer.headers["Retry-After"]
    if value.isdigit():
        return int(value)
    return (parsedate_to_datetime(value) - parsedate_to_datetime(answer.headers["Date"])).total_seconds()


LIMITED = [
    ("rate_limit", 429, "Rate limit is exceeded. Try again in {} seconds."),
    ("quota", 403, "Out of call volume quota. Quota will be replenished in 00:00:{:02}."),
]


@each("offset", [0.0, -86_400.0, 40_000_000.5])
@each("form", FORMS)
@each(("limit", "status", "message"), LIMITED)
def test_call_above_the_limit_is_answered_with_retry_after(start: Start, limit, status, message, form, offset):
    sandbox = start(**{limit: CallLimit(2, 10)}, retry_after=form, clock_offset_seconds=offset)
    assert sandbox.statuses(2) == [202, 202]
    sandbox.advance(3.5)
    refused = sandbox.call()
    assert told(refused) == gateway_answer(status, message.format(7))
    assert refused.headers["Retry-After"].isdigit() == (form == "seconds")
    # A date has whole seconds, so the rest of the current second is not counted.
    assert seconds_until(refused) == 7 if form == "seconds" else 7 <= seconds_until(refused) <= 8
    sandbox.advance(6.499)
    assert sandbox.call().status_code == status
    sandbox.advance(0.001)
    assert sandbox.call().status_code == 202


@each("form", FORMS)
@each("fraction", [0.0, 0.001, 0.5, 0.999])
def test_retry_at_the_requested_time_succeeds(start: Start, form, fraction):
    sandbox = start(rate_limit=CallLimit(1, 10), retry_after=form)
    sandbox.clock.now = int(NOW) + fraction
    assert sandbox.call().status_code == 202
    sandbox.advance(2.2)
    refused = sandbox.call()
    value = refused.headers["Retry-After"]
    if form == "seconds":
        sandbox.advance(int(value))
    else:
        sandbox.clock.now = parsedate_to_datetime(value).timestamp()
    assert sandbox.call().status_code == 202


def test_long_quota_is_reported_in_hours_minutes_and_seconds(start: Start):
    sandbox = start(quota=CallLimit(1, 100_000))
    sandbox.call()
    refused = sandbox.call()
    message = "Out of call volume quota. Quota will be replenished in 27:46:40."
    assert told(refused) == gateway_answer(403, message)
    assert refused.headers["Retry-After"] == "100000"


def test_call_refused_by_the_rate_does_not_count_towards_the_quota(start: Start):
    sandbox = start(rate_limit=CallLimit(1, 10), quota=CallLimit(2, 1000))
    assert sandbox.statuses(4) == [202, 429, 429, 429]
    sandbox.advance(10)
    assert sandbox.statuses(2) == [202, 429]
    sandbox.advance(10)
    assert sandbox.call().status_code == 403


def test_both_keys_and_both_operations_share_the_limit(start: Start):
    sandbox = start(rate_limit=CallLimit(2, 10))
    secondary = {SUBSCRIPTION_KEY_HEADER: "sandbox-secondary-key"}
    assert sandbox.call("intake").status_code == 202
    assert sandbox.call("report", secondary).status_code == 200
    for operation in BOTH:
        for key in ({}, secondary):
            assert sandbox.call(operation, key).status_code == 429


def test_only_a_call_with_a_valid_key_counts(start: Start):
    sandbox = start(rate_limit=CallLimit(2, 10))
    for _ in range(3):
        sandbox.call("intake", {SUBSCRIPTION_KEY_HEADER: "wrong"})
        sandbox.call("report", {SUBSCRIPTION_KEY_HEADER: None})
        sandbox.ask("GET", "/nowhere")
        sandbox.call("token")
        sandbox.counts()
    refused = sandbox.call("report", {"Authorization": None})  # refused by the token, which is checked after counting
    assert (refused.status_code, sandbox.call().status_code, sandbox.call().status_code) == (401, 202, 429)


def test_reset_and_a_shifted_clock_end_a_window(start: Start):
    sandbox = start(rate_limit=CallLimit(1, 10))
    assert sandbox.statuses(2) == [202, 429]
    sandbox.control("POST", "reset")
    assert sandbox.statuses(2) == [202, 429]
    sandbox.control("PUT", "clock", {"offset_seconds": 10})
    assert sandbox.statuses(2) == [202, 429]


# The body

EVENTS = sample(2)
LIMIT = len(body(EVENTS))
TOO_LARGE = gateway_answer(413, f"Request body is too large. The limit is {LIMIT} bytes.")


def chunks(content: bytes):
    yield content[:100]
    yield content[100:]


@pytest.mark.parametrize("whole", [True, False], ids=["with Content-Length", "chunked"])
def test_body_of_exactly_the_limit_passes_and_one_byte_more_does_not(start: Start, whole):
    sandbox = start(max_body_bytes=LIMIT)
    send = bytes if whole else chunks
    answer = sandbox.ask("POST", wire.INTAKE_PATH, send(body(EVENTS) + b" "))
    assert told(answer) == TOO_LARGE
    assert sandbox.stored() == []
    answer = sandbox.ask("POST", wire.INTAKE_PATH, send(body(EVENTS)))
    assert (answer.status_code, answer.json()["accepted"]) == (202, 2)


def test_declared_length_above_the_limit_is_refused_before_the_body_arrives(start: Start):
    sandbox = start(max_body_bytes=LIMIT)
    head = sandbox.bare("POST", wire.INTAKE_PATH).replace(b"Content-Length: 0", b"Content-Length: 9" + b"9" * 12)
    assert sandbox.raw(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 413 ")


def test_connection_is_usable_after_an_oversized_body(start: Start):
    sandbox = start(max_body_bytes=LIMIT)
    assert sandbox.ask("POST", wire.INTAKE_PATH, b" " * (1 << 20)).status_code == 413
    assert sandbox.post(EVENTS).status_code == 202


def test_default_limit_is_two_mebibytes(sandbox: Sandbox):
    for size, status in ((2 << 20, 202), ((2 << 20) + 1, 413)):
        assert sandbox.ask("POST", wire.INTAKE_PATH, body([]).ljust(size)).status_code == status


def test_gzip_is_accepted_if_enabled(start: Start):
    sandbox = start(accept_gzip=True, max_body_bytes=LIMIT)
    for encoding, content in [
        ("gzip", gzip.compress(body(EVENTS))),
        ("GZip", gzip.compress(body(EVENTS))),
        ("identity", body(EVENTS)),
        (None, body(EVENTS)),
    ]:
        sandbox.renew()
        answer = sandbox.ask("POST", wire.INTAKE_PATH, content, {"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()["accepted"]) == (202, 2)
        assert sandbox.events() == EVENTS
        assert sandbox.log()[0]["body_bytes"] == LIMIT


NOT_GZIP = gateway_answer(400, "The body is not valid gzip.")
NOT_ONE_GZIP = gateway_answer(400, "The body is not one complete gzip stream.")


@each(
    ("content", "expected"),
    [
        (gzip.compress(body(EVENTS) + b" "), TOO_LARGE),
        (gzip.compress(b" " * (10 * LIMIT)), TOO_LARGE),
        (gzip.compress(body(EVENTS), compresslevel=0) + b" " * LIMIT, TOO_LARGE),
        (b"", NOT_ONE_GZIP),
        (gzip.compress(body(EVENTS))[:-1], NOT_ONE_GZIP),
        (gzip.compress(body(EVENTS))[:50], NOT_ONE_GZIP),
        (gzip.compress(body(EVENTS)) + b"\n", NOT_ONE_GZIP),
        (gzip.compress(body([])) * 2, NOT_ONE_GZIP),
        (body(EVENTS), NOT_GZIP),
        (zlib.compress(body(EVENTS)), NOT_GZIP),
        (gzip.compress(body(EVENTS))[:-8] + bytes(8), NOT_GZIP),
    ],
)
def test_oversized_or_broken_gzip_is_refused(start: Start, content, expected):
    sandbox = start(accept_gzip=True, max_body_bytes=LIMIT)
    answer = sandbox.ask("POST", wire.INTAKE_PATH, content, {"Content-Encoding": "gzip"})
    assert told(answer) == expected
    assert sandbox.stored() == []


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "x-gzip"])
def test_other_encodings_are_refused_even_if_gzip_is_enabled(start: Start, encoding):
    sandbox = start(accept_gzip=True, max_body_bytes=LIMIT)
    answer = sandbox.ask("POST", wire.INTAKE_PATH, body([]), {"Content-Encoding": encoding})
    assert told(answer) == gateway_answer(415, COMPRESSED)


# The wait


@pytest.mark.parametrize("seed", [1, 2])
def test_wait_is_latency_and_seeded_jitter(monkeypatch: pytest.MonkeyPatch, seed):
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(anyio, "sleep", note)
    with Sandbox(SandboxOptions(port=0, latency_seconds=0.5, jitter_seconds=0.25, seed=seed)) as sandbox:
        for _ in range(3):
            sandbox.call("intake")
            sandbox.call("report")
    rng = Random(seed)
    assert waited[:6] == [0.5 + rng.uniform(0, 0.25) for _ in range(6)]  # and perhaps the grace period of the stop
    assert len(set(waited[:6])) == 6


def test_answer_is_not_sent_before_the_latency_has_passed(start: Start):
    sandbox = start(latency_seconds=0.3)
    sandbox.call("intake")
    sandbox.call("report")
    eventually(lambda: all(entry["seconds"] for entry in sandbox.log()))  # recorded when the answer is sent
    # A timer fires early by the time the loop was busy when it was set.
    assert all(entry["seconds"] >= 0.2 for entry in sandbox.log())
    assert len(sandbox.log()) == 2
