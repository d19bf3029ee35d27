"""Faults on a real socket: what the client sees, what is stored, and which request is affected."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress

import anyio
import httpx
import pytest

from shipper.model import wire
from shipper.sandbox.faults import EFFECTS, Delay, Drip, FaultScript, Hang
from shipper.sandbox.gateway import KEY_INVALID, SUBSCRIPTION_KEY_HEADER
from shipper.sandbox.options import CallLimit, SandboxOptions
from tests.cases import each
from tests.stage.sandbox.conftest import Start
from tests.stage.sandbox.driver import (
    NO_EVENTS,
    PATHS,
    REPORT,
    Sandbox,
    assert_refused,
    body,
    changed,
    event_id,
    eventually,
    gateway_answer,
    sample,
    told,
)

EVENTS = sample(20)
BATCH = body(EVENTS[:1])
TAKEN = {"accepted": 1, "duplicates": 0, "rejected": []}
TOLD_SO = "The sandbox was configured to give this answer."
PAGE = b"<!doctype html><title>Sign in</title><h1>Sign in to the network</h1>\n"
WHEN = ["before", "after"]


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> list[tuple[float, int]]:
    """Replace the sleeping of the sandbox; record the durations and the number of events at that time."""
    noted: list[tuple[float, int]] = []

    async def note(seconds: float) -> None:
        noted.append((seconds, sandbox.store.stored))

    monkeypatch.setattr(anyio, "sleep", note)
    return noted


# Each effect


@pytest.mark.parametrize("when", WHEN)
def test_reset_resets_the_connection(sandbox: Sandbox, when):
    sandbox.go_wrong(f"reset when={when}")
    with pytest.raises(ConnectionResetError):
        sandbox.raw(sandbox.bare("POST", wire.INTAKE_PATH, BATCH))
    sandbox.go_wrong(f"reset when={when}")
    with pytest.raises(httpx.TransportError):  # which error depends on whether it was still sending
        sandbox.post(EVENTS[:1])
    assert [(entry["status"], entry["fault"]) for entry in sandbox.log()] == [(0, "reset")] * 2


@pytest.mark.parametrize(
    ("rule", "status", "content_type", "content"),
    [
        ("status status=500", 500, "application/json", {"statusCode": 500, "message": TOLD_SO}),
        ("status status=503 message=Down", 503, "application/json", {"statusCode": 503, "message": "Down"}),
        ("status status=418", 418, "application/json", {"statusCode": 418, "message": TOLD_SO}),
        ("status status=200", 200, "application/json", {"statusCode": 200, "message": TOLD_SO}),
        ("status status=204", 204, None, b""),
        ("status status=205", 205, None, b""),
        ("status status=304", 304, None, b""),
        ("html", 200, "text/html; charset=utf-8", PAGE),
    ],
)
@pytest.mark.parametrize("when", WHEN)
def test_answer_follows_the_rule(sandbox: Sandbox, rule, status, content_type, content, when):
    sandbox.go_wrong(f"{rule} when={when}")
    answer = sandbox.post(EVENTS[:1])
    assert (answer.status_code, answer.headers.get("Content-Type")) == (status, content_type)
    assert (answer.content if isinstance(content, bytes) else answer.json()) == content
    assert answer.headers["Date"] == "Sun, 15 Mar 2026 12:30:07 GMT"
    assert "Retry-After" not in answer.headers
    assert len(sandbox.stored()) == (when == "after")
    (entry,) = sandbox.log()
    assert (entry["status"], entry["fault"], entry["accepted"]) == (status, rule.split()[0], when == "after")


@pytest.mark.parametrize("value", ["7", "Sun, 15 Mar 2026 12:30:17 GMT", "soon"])
def test_retry_after_is_sent_unchanged(sandbox: Sandbox, value):
    rule = {"effect": "status", "status": 503, "retry_after": value}
    sandbox.control("PUT", "faults", {"fault": [rule]})
    assert sandbox.post(EVENTS[:1]).headers["Retry-After"] == value


def test_truncate_sends_the_head_and_half_the_body_and_closes(sandbox: Sandbox):
    whole = json.dumps(TAKEN, separators=(",", ":")).encode()
    sandbox.go_wrong("truncate")
    head, _, rest = sandbox.raw(sandbox.bare("POST", wire.INTAKE_PATH, BATCH)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 202 ")
    assert f"content-length: {len(whole)}".encode() in head.lower()
    assert rest == whole[: len(whole) // 2]
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
        sandbox.post(EVENTS[1:2])
    assert [(entry["status"], entry["fault"]) for entry in sandbox.log()] == [(202, "truncate")] * 2
    assert sandbox.stored() == [event_id(event) for event in EVENTS[:2]]


def test_drip_sends_the_whole_answer_with_a_wait_after_every_byte(sandbox: Sandbox, sleeps):
    sandbox.go_wrong("drip seconds=0.25")
    answer = sandbox.post(EVENTS[:1])
    assert (answer.status_code, answer.json()) == (202, TAKEN)
    assert sleeps == [(0.25, 1)] * len(answer.content)


@pytest.mark.parametrize(("when", "stored"), [("before", 0), ("after", 1)])
def test_delay_waits_and_continues(sandbox: Sandbox, sleeps, when, stored):
    sandbox.go_wrong(f"delay seconds=3.5 when={when}")
    assert sandbox.post(EVENTS[:1]).json() == TAKEN
    assert sleeps == [(3.5, stored)]
    (entry,) = sandbox.log()
    assert (entry["status"], entry["fault"], entry["accepted"]) == (202, "delay", 1)


@pytest.mark.parametrize(("when", "stored"), [("before", 0), ("after", 1)])
def test_hang_lasts_until_the_client_leaves(sandbox: Sandbox, when, stored):
    sandbox.go_wrong(f"hang when={when}")
    with socket.create_connection(("127.0.0.1", sandbox.port)) as connection:
        connection.sendall(sandbox.bare("POST", wire.INTAKE_PATH, BATCH))
        eventually(lambda: sandbox.log() and sandbox.counts()["events_stored"] == stored)
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        (entry,) = sandbox.log()
        assert (entry["status"], entry["fault"], entry["seconds"]) == (0, "hang", 0.0)
    eventually(lambda: sandbox.log()[0]["seconds"] > 0)
    assert sandbox.log()[0]["status"] == 0
    sandbox.control("DELETE", "faults")
    assert sandbox.post(EVENTS[1:2]).json() == TAKEN


@pytest.mark.parametrize(
    ("latency", "rules"),
    [(0, [Hang()]), (0, [Hang(when="after")]), (0, [Delay(seconds=600)]), (0, [Drip(seconds=600)]), (600, [])],
    ids=["hang before", "hang after", "delay", "drip", "latency"],
)
def test_waiting_request_does_not_prevent_the_sandbox_from_stopping(latency, rules):
    threads = threading.active_count()
    with Sandbox(SandboxOptions(port=0, latency_seconds=latency), FaultScript(fault=rules)) as sandbox:
        connection = socket.create_connection(("127.0.0.1", sandbox.port), timeout=5)
        connection.sendall(sandbox.bare("POST", wire.INTAKE_PATH, BATCH))
        eventually(sandbox.log)
        started = time.monotonic()
    with connection:
        assert time.monotonic() - started < 9, "the sandbox did not stop in time"
        assert threading.active_count() == threads
        with suppress(ConnectionResetError):
            while connection.recv(65_536):
                pass  # the part of a slow answer that was sent
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", sandbox.port))


@pytest.mark.parametrize("which", ["primary", "secondary"])
def test_key_is_rotated_during_the_request(sandbox: Sandbox, which):
    key = {SUBSCRIPTION_KEY_HEADER: sandbox.keys()[which]}
    sandbox.go_wrong(f"rotate_key key={which} requests=2")
    assert sandbox.post(EVENTS[:1], key).status_code == 202
    assert told(sandbox.post(EVENTS[1:2], key)) == gateway_answer(401, KEY_INVALID)
    assert told(sandbox.ask("GET", REPORT, headers=key)) == gateway_answer(401, KEY_INVALID)
    assert sandbox.post(EVENTS[1:2], {SUBSCRIPTION_KEY_HEADER: sandbox.keys()[which]}).status_code == 202
    assert [entry["fault"] for entry in sandbox.log("?operation=intake")] == ["", "rotate_key", ""]


def test_retries_survive_random_faults(sandbox: Sandbox, sleeps):
    sandbox.control("PUT", "faults", {"seed": 4, "fault": [{"effect": "chance", "probability": 0.9}]})
    for event in EVENTS:
        for _ in range(200):
            try:
                answer = sandbox.post([event])
            except httpx.TransportError:
                continue
            if answer.status_code == 202:
                break
    assert sandbox.stored() == list(map(event_id, EVENTS))
    log = sandbox.log("?limit=10000")
    faults = {entry["fault"] for entry in log}
    assert faults == {"", "status", "html", "delay", "reset", "truncate", "drip"} < {*EFFECTS, ""}
    assert {entry["status"] for entry in log} == {0, 200, 202, 429, 500, 502, 503}
    resets = [entry for entry in log if entry["fault"] == "reset"]
    assert any(entry["accepted"] for entry in resets), "no answer was lost after storing"
    assert any(not entry["events"] for entry in resets)


# Before or after


@pytest.mark.parametrize("rule", ["reset", "status status=500", "html", "delay seconds=0"])
@pytest.mark.parametrize("when", WHEN)
def test_batch_is_stored_only_if_the_fault_is_after_it(sandbox: Sandbox, rule, when):
    sandbox.go_wrong(f"{rule} when={when}")
    bad = changed(EVENTS[2], IP="x")
    try:
        sandbox.post([*EVENTS[:2], EVENTS[0], bad])
    except httpx.TransportError:
        assert rule == "reset"
    if when == "after" or rule.startswith("delay"):
        counts = {"events_received": 4, "events_stored": 2, "duplicates": 1, "rejected": 1}
        assert sandbox.counts() == {"requests": 1, **counts}
    else:
        assert sandbox.counts() == {**NO_EVENTS, "requests": 1}


def test_only_a_fault_after_the_gateway_requires_a_key(sandbox: Sandbox):
    sandbox.go_wrong("status status=503 requests=1", "status status=502 requests=2 when=after")
    answers = [sandbox.post(EVENTS[:1], {SUBSCRIPTION_KEY_HEADER: None}).status_code for _ in range(3)]
    assert answers == [503, 502, 401]
    assert sandbox.stored() == []


def test_request_with_a_fault_before_the_gateway_does_not_count_for_the_limits(start: Start):
    sandbox = start(rate_limit=CallLimit(1, 10))
    sandbox.go_wrong("status status=503 requests=1-3")
    assert sandbox.statuses(5) == [503, 503, 503, 202, 429]


# Which request


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("intake", {"intake": 503, "report": 200, "token": 400}),
        ("report", {"intake": 202, "report": 503, "token": 400}),
        ("token", {"intake": 202, "report": 200, "token": 503}),
        ("any", {"intake": 503, "report": 503, "token": 503}),
    ],
)
def test_fault_applies_only_to_the_operation_of_the_rule(sandbox: Sandbox, operation, expected):
    sandbox.go_wrong(f"status status=503 operation={operation}")
    assert {name: sandbox.call(name).status_code for name in PATHS} == expected


def test_controls_and_unknown_routes_have_no_faults_and_are_not_counted(sandbox: Sandbox):
    sandbox.go_wrong("reset operation=any")
    assert sandbox.counts() == NO_EVENTS
    assert sandbox.ask("GET", "/nowhere").status_code == 404
    assert sandbox.control("GET", "faults").json()["requests_seen"] == {"intake": 0, "report": 0, "token": 0}


def test_initial_script_is_active():
    script = FaultScript(seed=9, fault=[Hang(operation="token")])
    with Sandbox(SandboxOptions(port=0), script) as sandbox:
        shown = sandbox.control("GET", "faults").json()
    assert shown["seed"] == 9
    assert [rule["effect"] for rule in shown["fault"]] == ["hang"]


# At run time


def test_script_is_set_shown_counted_and_cleared(sandbox: Sandbox):
    none = {"seed": 1, "fault": [], "requests_seen": {"intake": 0, "report": 0, "token": 0}}
    assert sandbox.control("GET", "faults").json() == none
    rules = [
        {"effect": "status", "status": 503, "requests": "2-3"},
        {"effect": "html", "operation": "report", "times": 1},
    ]
    common = {"when": "before", "every": 1, "probability": 1.0, "applied": 0}
    told_so = {"message": TOLD_SO, "retry_after": "", "operation": "intake", "times": None}
    shown = [{**rules[0], **common, **told_so}, {**rules[1], **common, "requests": "1-"}]
    answer = sandbox.control("PUT", "faults", {"seed": 7, "fault": rules})
    assert (answer.status_code, answer.json()) == (200, {**none, "seed": 7, "fault": shown})

    assert sandbox.statuses(4) == [202, 503, 503, 202]
    assert [sandbox.ask("GET", REPORT).headers["Content-Type"] for _ in range(2)] == [
        "text/html; charset=utf-8",
        "application/json",
    ]
    shown[0]["applied"], shown[1]["applied"] = 2, 1
    now = {"seed": 7, "fault": shown, "requests_seen": {"intake": 4, "report": 2, "token": 0}}
    assert sandbox.control("GET", "faults").json() == now

    assert sandbox.control("DELETE", "faults").json() == none
    assert sandbox.statuses(4) == [202] * 4


@pytest.mark.parametrize(
    "document",
    [
        b'seed = 3\n[[fault]]\neffect = "status"\nstatus = 503\n',
        b'{"seed":3,"fault":[{"effect":"status","status":503}]}',
        b' \n{"seed":3,"fault":[{"effect":"status","status":503}]}',
    ],
)
def test_script_is_toml_or_json(sandbox: Sandbox, document):
    assert sandbox.control("PUT", "faults", document).json()["seed"] == 3
    assert sandbox.statuses(1) == [503]


@each(
    ("document", "place"),
    [
        (b"{", "truncated"),
        (b"{" * 100_000, ""),
        ({"faults": []}, "unknown field `faults`"),
        ({"fault": [{"effect": "reset"}, {"effect": "explode"}]}, "$.fault[1].effect"),
    ],
)
def test_invalid_script_is_refused_with_its_position_and_the_old_one_stays(sandbox: Sandbox, document, place):
    sandbox.go_wrong("status status=418")
    answer = sandbox.control("PUT", "faults", document)
    assert_refused(answer, place)
    assert answer.json()["message"].startswith("the body: is invalid: ")
    assert sandbox.statuses(1) == [418]
