"""The token endpoint of the sandbox, and the validity of its tokens."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

import httpx
import jwt
import pytest

from shipper.sandbox.options import CallLimit, SandboxOptions
from shipper.sandbox.tokens import AUDIENCE, CLIENT_ID, CLIENT_SECRET, DEFAULT_SCOPE, PASSWORD, TOKEN_PATH, USERNAME
from tests.cases import each
from tests.stage.sandbox.conftest import Start
from tests.stage.sandbox.driver import NOW, Sandbox, gateway_answer, told

CLIENT = {
    "grant_type": "client_credentials",
    "client_id": CLIENT_ID,
    "client_secret": CLIENT_SECRET,
    "scope": DEFAULT_SCOPE,
}
USER = {**CLIENT, "grant_type": "password", "username": USERNAME, "password": PASSWORD}
GRANTS = [CLIENT, USER]
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def ask(sandbox: Sandbox, form: dict[str, str] | bytes, **headers: str) -> httpx.Response:
    """Request a token like a client without a key."""
    content = form if isinstance(form, bytes) else urlencode(form).encode()
    sent = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    return sandbox.http.post(sandbox.base_url + TOKEN_PATH, content=content, headers=sent)


def with_token(sandbox: Sandbox, token: str) -> httpx.Response:
    return sandbox.call("report", {"Authorization": f"Bearer {token}"})


def assert_not_stored(answer: httpx.Response) -> None:
    assert (answer.headers["Cache-Control"], answer.headers["Pragma"]) == ("no-store", "no-cache")
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("form", GRANTS)
def test_granted_token_is_accepted_by_the_gateway(sandbox: Sandbox, form):
    answer = ask(sandbox, form)
    assert answer.status_code == 200
    assert_not_stored(answer)
    document = answer.json()
    token = document.pop("access_token")
    assert document == {"token_type": "Bearer", "expires_in": 3600, "ext_expires_in": 3600}
    claims = jwt.decode(token, options={"verify_signature": False})
    assert {name: claims[name] for name in ("aud", "iat", "nbf", "exp")} == {
        "aud": AUDIENCE,
        "iat": int(NOW),
        "nbf": int(NOW),
        "exp": int(NOW) + 3600,
    }
    assert with_token(sandbox, token).status_code == 200
    assert sandbox.call("intake", {"Authorization": f"Bearer {token}"}).status_code == 202


@each("scope", [DEFAULT_SCOPE, f" {DEFAULT_SCOPE} ", f"{DEFAULT_SCOPE} offline_access"])
@each("form", GRANTS)
def test_scope_may_be_one_of_several(sandbox: Sandbox, form, scope):
    assert ask(sandbox, {**form, "scope": scope}).status_code == 200


def test_user_may_request_a_single_permission(sandbox: Sandbox):
    assert ask(sandbox, {**USER, "scope": f"{AUDIENCE}/Report.Read"}).status_code == 200


MISSING = (400, "invalid_request", 900144)
GRANT = (400, "unsupported_grant_type", 70003)
UNKNOWN_APP = (400, "unauthorized_client", 700016)
NO_SECRET = (401, "invalid_client", 7000218)
WRONG_SECRET = (401, "invalid_client", 7000215)
RESOURCE = (400, "invalid_resource", 500011)
USER_SCOPE = (400, "invalid_scope", 70011)
CLIENT_SCOPE = (400, "invalid_scope", 1002012)
WRONG_USER = (400, "invalid_grant", 50126)


@each(
    ("form", "changes", "expected"),
    [
        (CLIENT, {"grant_type": None}, MISSING),
        (CLIENT, {"grant_type": ""}, MISSING),
        (CLIENT, {"grant_type": "refresh_token"}, GRANT),
        (CLIENT, {"grant_type": "Client_Credentials"}, GRANT),
        (CLIENT, {"grant_type": "<script>"}, GRANT),
        (CLIENT, {"client_id": None}, MISSING),
        (CLIENT, {"client_id": "another"}, UNKNOWN_APP),
        (CLIENT, {"client_secret": None}, NO_SECRET),
        (CLIENT, {"client_secret": ""}, NO_SECRET),
        (CLIENT, {"client_secret": "wrong"}, WRONG_SECRET),
        (CLIENT, {"client_secret": "ключ"}, WRONG_SECRET),
        (CLIENT, {"scope": None}, MISSING),
        (CLIENT, {"scope": " "}, CLIENT_SCOPE),
        (CLIENT, {"scope": AUDIENCE}, CLIENT_SCOPE),
        (CLIENT, {"scope": f"{AUDIENCE}/Report.Read"}, CLIENT_SCOPE),
        (CLIENT, {"scope": f"{AUDIENCE}/"}, CLIENT_SCOPE),
        (CLIENT, {"scope": ".default"}, CLIENT_SCOPE),
        (CLIENT, {"scope": "api://elsewhere/.default"}, RESOURCE),
        (USER, {"scope": None}, MISSING),
        (USER, {"scope": "offline_access"}, USER_SCOPE),
        (USER, {"scope": "api://elsewhere/Report.Read"}, RESOURCE),
        (USER, {"username": None}, MISSING),
        (USER, {"password": None}, MISSING),
        (USER, {"username": "another"}, WRONG_USER),
        (USER, {"password": "wrong"}, WRONG_USER),
        (USER, {"password": f" {PASSWORD}"}, WRONG_USER),
        (USER, {"client_secret": "wrong", "password": "wrong"}, WRONG_SECRET),
        (USER, {"client_id": "another", "client_secret": None}, UNKNOWN_APP),
    ],
)
def test_invalid_request_is_answered_with_error_and_code(sandbox: Sandbox, form, changes, expected):
    answer = ask(sandbox, {name: value for name, value in {**form, **changes}.items() if value is not None})
    document: dict[str, Any] = answer.json()
    assert (answer.status_code, document["error"], document["error_codes"]) == (*expected[:2], [expected[2]])
    assert_not_stored(answer)
    assert "Retry-After" not in answer.headers
    assert list(document) == [*("error", "error_description", "error_codes", "timestamp", "trace_id", "correlation_id")]
    assert document["timestamp"] == "2026-03-15 12:30:07Z"
    assert document["error_description"].startswith(f"AADSTS{expected[2]}: ")
    ids = f"Trace ID: {document['trace_id']} Correlation ID: {document['correlation_id']}"
    assert document["error_description"].endswith(f"{ids} Timestamp: 2026-03-15 12:30:07Z")


@pytest.mark.parametrize("name", ["grant_type", "client_id", "scope"])
def test_missing_field_is_named(sandbox: Sandbox, name):
    answer = ask(sandbox, {key: value for key, value in CLIENT.items() if key != name})
    words = f"The request body must contain the following parameter: '{name}'."
    assert words in answer.json()["error_description"]


def test_ids_of_errors_differ_from_each_other_and_repeat_with_the_seed():
    def ids(seed: int) -> list[str]:
        with Sandbox(SandboxOptions(port=0, seed=seed)) as sandbox:
            documents = [ask(sandbox, {}).json() for _ in range(3)]
        return [document[name] for document in documents for name in ("trace_id", "correlation_id")]

    one, same, other = ids(1), ids(1), ids(2)
    assert len(set(one)) == 6
    assert [each for each in one if not re.fullmatch(UUID, each)] == []
    assert one == same != other


def test_secrets_are_not_echoed(sandbox: Sandbox):
    for changes in ({"client_secret": "s3cret-one"}, {"password": "s3cret-two"}):
        assert "s3cret" not in ask(sandbox, {**USER, **changes}).text


@each(
    "content",
    [
        *(
            b"",
            b"{}",
            b'{"grant_type":"client_credentials"}',
            b"\xff\xfe\x00",
            b"=&=&&&",
            b"grant_type",
            b"grant_type=%",
        ),
        *(b"grant_type=%ff%fe", b"a=b;" * 10_000, b"a=b&" * 16_384, b"x" * 65_536),
    ],
)
def test_body_that_is_not_a_form_lacks_all_fields(sandbox: Sandbox, content):
    answer = ask(sandbox, content)
    expected = "unsupported_grant_type" if content.startswith(b"grant_type=%") else "invalid_request"
    assert (answer.status_code, answer.json()["error"]) == (400, expected)


def test_form_above_64_kib_is_too_large(sandbox: Sandbox):
    answer = ask(sandbox, b"x" * 65_537)
    assert told(answer) == gateway_answer(413, "The form is too large. The limit is 65536 bytes.")
    assert ask(sandbox, CLIENT).status_code == 200


def test_last_value_of_a_repeated_field_counts(sandbox: Sandbox):
    good = urlencode(CLIENT).encode()
    assert ask(sandbox, b"client_id=wrong&" + good).status_code == 200
    assert ask(sandbox, good + b"&client_id=wrong").json()["error"] == "unauthorized_client"


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", ""])
def test_content_type_is_ignored(sandbox: Sandbox, content_type):
    assert ask(sandbox, urlencode(CLIENT).encode(), **{"Content-Type": content_type}).status_code == 200


def test_plus_and_percent_are_decoded(sandbox: Sandbox):
    assert ask(sandbox, urlencode(CLIENT).encode().replace(b"_", b"%5F")).status_code == 200
    assert ask(sandbox, urlencode({**CLIENT, "scope": f" {DEFAULT_SCOPE}"}).encode()).status_code == 200


# Time


def test_token_expires_by_the_service_s_clock(start: Start):
    sandbox = start(token_lifetime_seconds=60)
    sandbox.clock.now = int(NOW)
    answer = ask(sandbox, CLIENT).json()
    assert (answer["expires_in"], answer["ext_expires_in"]) == (60, 60)
    token = answer["access_token"]
    sandbox.advance(59.999)
    assert with_token(sandbox, token).status_code == 200
    sandbox.advance(0.001)
    expired = gateway_answer(401, "Unauthorized. Access token has expired.")
    assert told(with_token(sandbox, token)) == expired
    assert with_token(sandbox, ask(sandbox, CLIENT).json()["access_token"]).status_code == 200


@pytest.mark.parametrize(
    ("skew", "message"), [(0.0, ""), (30.0, "is not valid yet"), (-30.0, ""), (-60.0, "has expired")]
)
def test_a_token_from_an_endpoint_with_a_wrong_clock_may_be_early_or_expired(start: Start, skew, message):
    sandbox = start(token_lifetime_seconds=60, token_skew_seconds=skew)
    token = ask(sandbox, CLIENT).json()["access_token"]
    answer = with_token(sandbox, token)
    if message:
        assert told(answer) == gateway_answer(401, f"Unauthorized. Access token {message}.")
    else:
        assert answer.status_code == 200
    sandbox.advance(29.75 if skew > 0 else 0)
    assert with_token(sandbox, token).is_success == (not message or skew > 0)
    assert sandbox.call("report").status_code == 200  # the initially printed token has no skew


def test_initial_token_is_valid_for_thirty_days(sandbox: Sandbox):
    token = sandbox.access.token
    sandbox.advance(30 * 86_400 - 1)
    assert with_token(sandbox, token).status_code == 200
    sandbox.advance(1)
    assert with_token(sandbox, token).status_code == 401


def test_token_survives_a_restart():
    options = SandboxOptions(port=0)
    with Sandbox(options) as sandbox:
        token = ask(sandbox, CLIENT).json()["access_token"]
    with Sandbox(options) as sandbox:
        assert with_token(sandbox, token).status_code == 200


# Abuse


@pytest.mark.parametrize(("limit", "wait"), [(CallLimit(2, 10), "60"), (CallLimit(2, 600), "600")])
def test_too_many_calls_must_wait_at_least_a_minute(start: Start, limit, wait):
    sandbox = start(token_limit=limit)
    assert [ask(sandbox, form).status_code for form in (CLIENT, {})] == [200, 400]  # an invalid one counts, too
    answer = ask(sandbox, CLIENT)
    document = answer.json()
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, wait)
    assert (document["error"], document["error_codes"]) == ("temporarily_unavailable", [90055])
    assert_not_stored(answer)
    sandbox.advance(limit.seconds)
    assert ask(sandbox, CLIENT).status_code == 200


def test_operations_do_not_count_as_calls_of_the_token_endpoint(start: Start):
    sandbox = start(token_limit=CallLimit(1, 10))
    assert sandbox.statuses(3) == [202, 202, 202]
    assert [ask(sandbox, CLIENT).status_code for _ in range(2)] == [200, 429]
    sandbox.control("POST", "reset")
    assert ask(sandbox, CLIENT).status_code == 200
