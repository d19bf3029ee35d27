"""The sandbox through a real socket: gateway, intake, report, controls, and the command around it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx
import jwt
import msgspec
import pytest

from shipper import wire
from shipper.errors import ConfigError
from shipper.report.client import read_report, report_path
from shipper.sandbox import gateway
from shipper.sandbox.app import SandboxOptions
from shipper.sandbox.samples import sample_lines
from shipper.sandbox.server import SandboxThread, configuration_snippet
from shipper.sandbox.store import EventStore

NOW = 1_773_577_807.25  # 2026-03-15T12:30:07.25Z
END = datetime.fromtimestamp(NOW, UTC)
REPORT = "/dpm/v1/dar/1001/2026-03-01/2026-03-31"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SandboxThread]:
    with SandboxThread(clock=lambda: NOW) as running:
        yield running


@pytest.fixture
def client(sandbox: SandboxThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sandbox.base_url, headers=headers(sandbox), trust_env=False) as ready:
        ready.post("/_sandbox/reset")
        yield ready


def headers(sandbox: SandboxThread) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "Cache-Control": "no-cache",
        "Authorization": f"Bearer {sandbox.token}",
        "Ocp-Apim-Subscription-Key": sandbox.subscription_key,
    }


def sample(count: int, **kwargs) -> list[bytes]:
    return [line.rstrip() for line in sample_lines(count, **{"end": END, "days": 10, **kwargs})]


def body(events: list[bytes]) -> bytes:
    return wire.BODY_HEAD + b",".join(events) + wire.BODY_TAIL


def changed(event: bytes, **fields: object) -> bytes:
    """Set fields of an event; `...` takes one out."""
    document = {**json.loads(event), **fields}
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode()


def event_id(event: bytes) -> str:
    return json.loads(event)["EventId"]


def post(client: httpx.Client, events: list[bytes]) -> httpx.Response:
    return client.post(wire.INTAKE_PATH, content=body(events))


def counts(client: httpx.Client) -> dict[str, int]:
    return client.get("/_sandbox/counts").json()


# The gateway

OPERATIONS = [("POST", wire.INTAKE_PATH), ("GET", REPORT)]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize(
    ("name", "value", "status", "message"),
    [
        ("Ocp-Apim-Subscription-Key", None, 401, gateway.KEY_MISSING),
        ("Ocp-Apim-Subscription-Key", "", 401, gateway.KEY_MISSING),
        ("Ocp-Apim-Subscription-Key", "another", 401, gateway.KEY_INVALID),
        ("Authorization", None, 401, "Unauthorized. Access token is missing."),
        ("Authorization", "Basic dXNlcjpwYXNz", 401, "Unauthorized. Access token is missing."),
        ("Authorization", "Bearer no.jwt.atall", 401, "Unauthorized. Access token is invalid."),
        ("Content-Type", None, 400, "Header Content-Type: application/json is required."),
        ("Content-Type", "text/plain", 415, "Unsupported content type. Content-Type must be application/json."),
        ("Cache-Control", None, 400, "Header Cache-Control: no-cache is required."),
        ("Cache-Control", "max-age=0", 400, "Header Cache-Control: no-cache is required."),
    ],
)
def test_gateway_refuses_what_lacks_a_header(sandbox, client, method, path, name, value, status, message):
    sent = {**headers(sandbox), name: value}
    answer = httpx.request(
        method,
        sandbox.base_url + path,
        headers={name: value for name, value in sent.items() if value is not None},
        content=body(sample(1)) if method == "POST" else None,
        trust_env=False,
    )
    assert (answer.status_code, answer.json()) == (status, {"statusCode": status, "message": message})
    assert counts(client)["events_stored"] == 0


def test_gateway_judges_key_before_token_before_headers(sandbox):
    answer = httpx.post(sandbox.base_url + wire.INTAKE_PATH, trust_env=False)
    assert answer.json()["message"] == gateway.KEY_MISSING
    key = {"Ocp-Apim-Subscription-Key": sandbox.subscription_key}
    answer = httpx.post(sandbox.base_url + wire.INTAKE_PATH, headers=key, trust_env=False)
    assert "token is missing" in answer.json()["message"]


@pytest.mark.parametrize(
    ("claims", "secret", "message"),
    [
        ({"exp": NOW}, None, "has expired"),
        ({"exp": NOW - 3600}, None, "has expired"),
        ({"nbf": NOW + 1}, None, "not valid yet"),
        ({"aud": "elsewhere"}, None, "another audience"),
        ({"exp": None}, None, "is invalid"),
        ({"nbf": None}, None, "is invalid"),
        ({"aud": None}, None, "is invalid"),
        ({"exp": "soon"}, None, "is invalid"),
        ({}, "a secret of thirty-two bytes that is not the right one", "is invalid"),
    ],
)
def test_gateway_refuses_tokens_that_are_not_its_own_or_not_of_now(client, claims, secret, message):
    payload = {"aud": gateway.AUDIENCE, "nbf": NOW - 10, "exp": NOW + 10, **claims}
    payload = {name: value for name, value in payload.items() if value is not None}
    token = jwt.encode(payload, secret or SandboxOptions().token_secret, algorithm="HS256")
    answer = client.get(REPORT, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    assert message in answer.json()["message"]
    assert "subscription key" not in answer.json()["message"]


def test_gateway_refuses_a_token_without_signature(client):
    token = jwt.encode({"aud": gateway.AUDIENCE, "nbf": 0, "exp": NOW + 10}, None, algorithm="none")
    assert client.get(REPORT, headers={"Authorization": f"Bearer {token}"}).status_code == 401


def test_headers_may_say_more_than_is_required(client):
    more = {"Content-Type": "Application/JSON; charset=utf-8", "Cache-Control": "no-store, No-Cache"}
    assert client.get(REPORT, headers=more).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", wire.INTAKE_PATH),
        ("PUT", wire.INTAKE_PATH),
        ("POST", wire.INTAKE_PATH + "/"),
        ("POST", REPORT),
        ("GET", "/dpm/v1/dar/1001/2026-03-01"),
        ("GET", "/"),
        ("DELETE", "/_sandbox/counts"),
    ],
)
def test_unknown_routes_and_methods_are_not_found(client, method, path):
    answer = client.request(method, path)
    assert answer.status_code == 404
    assert answer.json() == {"statusCode": 404, "message": "Resource not found"}


# The intake


def test_batch_is_accepted_and_stored_byte_for_byte(client):
    events = sample(50)
    spaced = changed(events[0])  # the same event with blanks after colons and commas
    answer = post(client, [spaced, *events[1:]])
    assert answer.status_code == 202
    assert answer.json() == {"accepted": 50, "duplicates": 0, "rejected": []}
    page = client.get("/_sandbox/events", params={"limit": 50}).json()
    assert [event["raw"].encode() for event in page["events"]] == [spaced, *events[1:]]


def test_repeated_event_is_counted_and_keeps_its_first_form(client):
    first, other = sample(2)
    again = changed(first, Username="somebody_else")
    assert post(client, [first, first]).json() == {"accepted": 1, "duplicates": 1, "rejected": []}
    assert post(client, [again, other]).json() == {"accepted": 1, "duplicates": 1, "rejected": []}
    stored = client.get(f"/_sandbox/events/{event_id(first)}").json()
    assert stored == {"EventId": event_id(first), "times_received": 3, "raw": first.decode()}
    assert counts(client) == {
        "requests": 2,
        "events_received": 4,
        "events_stored": 2,
        "duplicates": 2,
        "rejected": 0,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("EventId", "0" * 32),
        ("EventId", "C2CE6F44-7ED4-457B-BE2F-EB89414C343C"),
        ("EventId", "{" + "0" * 34 + "}"),
        ("EventId", None),
        ("EventId", ...),
        ("IP", "192.0.2.256"),
        ("IP", "192.0.2.01"),
        ("IP", "192.0.2"),
        ("IP", "::1"),
        ("IP", "192.0.2.1\n"),
        ("IP", "١٩٢.0.2.1"),
        ("Timestamp", "2026-03-01T00:00:00+"),
        ("Timestamp", "2026-02-29T00:00:00Z"),
        ("Timestamp", "2026-03-01T24:00:01Z"),
        ("Timestamp", "2026-03-01 00:00:00Z"),
        ("Timestamp", "2026-03-01T00:00:00.0Z"),
        ("BTag", "50121_" + "g" * 32),
        ("BTag", "50121_" + "a" * 31),
        ("BTag", "_" + "a" * 32),
        ("BTag", "50121-" + "a" * 32),
        ("ConsumerID", 0),
        ("ConsumerID", "5"),
        ("ConsumerID", 2**63),
        ("ConsumerCountry", "gb"),
        ("ConsumerCurrencyID", "EURO"),
        ("Username", ""),
        ("BrandID", 1.5),
        ("CustomerCurrencyID", 2),
        ("ConsumerStatus", ""),
        ("AffiliateID", None),
        ("ConsumerState", "N"),
        ("ConsumerState", ...),
        ("Surname", "unasked"),
    ],
)
def test_one_bad_event_is_rejected_with_its_field_and_its_neighbours_are_not(client, field, value):
    good, other, last = sample(3)
    bad = changed(other, **{field: value})
    answer = post(client, [good, bad, last])
    assert answer.status_code == 202
    assert (answer.json()["accepted"], answer.json()["duplicates"]) == (2, 0)
    (rejected,) = answer.json()["rejected"]
    sent_id = value if field == "EventId" and isinstance(value, str) else event_id(other)
    assert rejected["index"] == 1
    assert rejected["EventId"] == ("" if field == "EventId" and not isinstance(value, str) else sent_id)
    assert rejected["field"] == field
    assert rejected["message"]
    assert counts(client)["rejected"] == 1
    assert client.get("/_sandbox/event-ids").text.splitlines() == [event_id(good), event_id(last)]


@pytest.mark.parametrize("event", [b"null", b"5", b'"text"', b"[]", b"{}"])
def test_what_is_no_event_is_rejected_without_an_id(client, event):
    answer = post(client, [*sample(1), event])
    assert answer.json()["accepted"] == 1
    assert [(entry["index"], entry["EventId"]) for entry in answer.json()["rejected"]] == [(1, "")]


def test_text_that_is_not_utf_8_is_rejected(client):
    good, other = sample(2)
    answer = post(client, [other.replace(b'"Username":"', b'"Username":"\xff'), good])
    assert (answer.json()["accepted"], [entry["index"] for entry in answer.json()["rejected"]]) == (1, [0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no JSON",
        b"[]",
        b"{}",
        b'{"EventType":"Acquisition"}',
        b'{"EventType":"Acquisition","events":{}}',
        b'{"EventType":"Acquisition","events":[{]}',
        b'{"EventType":"Acquisition","events":[]}trailing',
        b'{"EventType":"Login","events":[]}',
        b'{"events":[]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_batch_is_a_bad_request(client, content):
    answer = client.post(wire.INTAKE_PATH, content=content)
    assert answer.status_code == 400
    assert answer.json()["statusCode"] == 400
    assert counts(client)["events_received"] == 0


def test_tag_with_more_digits_than_an_id_has_is_an_event_without_source(sandbox, client):
    tag = "9" * 5000 + "_" + "a" * 32
    assert post(client, [changed(sample(1)[0], BTag=tag)]).json()["accepted"] == 1
    assert [row.marketing_source for row in sandbox.store.registrations("0000", "9999")] == [0]


# The report


def test_report_counts_registrations_of_the_days_asked_for(client):
    events = sample(400, days=20)
    post(client, events)
    start, end = datetime(2026, 3, 1).date(), datetime(2026, 3, 10).date()
    answer = client.get(report_path(1001, start, end))
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "application/json"
    report = read_report(answer.content, account_id=1001)

    expected: dict[tuple[int, int], int] = {}
    for event in map(json.loads, events):
        if start.isoformat() <= event["Timestamp"][:10] <= end.isoformat():
            key = event["BrandID"], int(event["BTag"].split("_")[0])
            expected[key] = expected.get(key, 0) + 1
    assert 0 < sum(expected.values()) < 400
    assert expected == {
        (brand.id, entry.id): int(entry.conversions.registrations.result)
        for brand in report.brands
        for entry in brand.marketing_sources
    }
    assert report.reporting_time == "2026-03-15T12:30:07.2500000Z"


@pytest.mark.parametrize(
    ("second", "day"),
    [
        ("2026-03-04T23:59:59Z", 0),
        ("2026-03-05T00:00:00Z", 1),
        ("2026-03-05T23:59:59Z", 1),
        ("2026-03-06T00:00:00Z", 0),
    ],
)
def test_both_ends_of_the_period_are_included(client, second, day):
    post(client, [changed(sample(1)[0], Timestamp=second)])
    report = read_report(client.get("/dpm/v1/dar/1001/2026-03-05/2026-03-05").content, account_id=1001)
    assert len(report.brands) == day


def test_repeated_event_registers_once_and_keeps_the_checksum(client):
    events = sample(5)
    post(client, events)
    before = client.get(REPORT).json()
    post(client, events)
    after = client.get(REPORT).json()
    assert after == before
    post(client, sample(1, seed=9))
    assert client.get(REPORT).json()["lastCheckSum"] != before["lastCheckSum"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/dpm/v1/dar/1002/2026-03-01/2026-03-31", 404),
        ("/dpm/v1/dar/me/2026-03-01/2026-03-31", 404),
        ("/dpm/v1/dar/1001/2026-03-31/2026-03-01", 400),
        ("/dpm/v1/dar/1001/2026-02-30/2026-03-01", 400),
        ("/dpm/v1/dar/1001/20260301/20260302", 400),
        ("/dpm/v1/dar/1001/2026-W10-1/2026-W10-2", 400),
        ("/dpm/v1/dar/1001/today/2026-03-01", 400),
    ],
)
def test_unknown_account_and_bad_dates_are_refused(client, path, status):
    answer = client.get(path)
    assert (answer.status_code, answer.json()["statusCode"]) == (status, status)


# The controls


def test_controls_need_neither_key_nor_token(sandbox):
    for path in ("counts", "events", "event-ids"):
        assert httpx.get(f"{sandbox.base_url}/_sandbox/{path}", trust_env=False).status_code == 200


def test_pages_follow_one_another_to_the_last_event(client):
    events = sample(25)
    post(client, events)
    seen, after = [], 0
    while after is not None:
        page = client.get("/_sandbox/events", params={"limit": 10, "after": after}).json()
        seen += [event["EventId"] for event in page["events"]]
        after = page["next"]
    assert seen == list(map(event_id, events))


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=-1", "limit=x", "after=x", "after=%C2%B2"])
def test_page_that_cannot_be_is_refused(client, query):
    assert client.get(f"/_sandbox/events?{query}").status_code == 400


def test_event_ids_are_streamed_in_order_of_arrival(client):
    events = sample(25_000)
    for first in range(0, len(events), 5000):
        post(client, events[first : first + 5000])
    answer = client.get("/_sandbox/event-ids")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.text.splitlines() == list(map(event_id, events))


def test_unknown_event_is_not_found(client):
    assert client.get("/_sandbox/events/00000000-0000-4000-8000-000000000000").status_code == 404


def test_reset_forgets_events_and_counts(client):
    events = sample(3)
    post(client, [*events, b"{}"])
    nothing = {"requests": 0, "events_received": 0, "events_stored": 0, "duplicates": 0, "rejected": 0}
    assert client.post("/_sandbox/reset").json() == nothing
    assert post(client, events).json()["accepted"] == 3


# The store and the server around it


def test_store_file_survives_a_restart_and_is_private(tmp_path):
    path = tmp_path / "events.db"
    options = SandboxOptions(port=0, store_path=str(path))
    events = sample(10)
    for accepted in (10, 0):
        with (
            SandboxThread(options, clock=lambda: NOW) as sandbox,
            httpx.Client(base_url=sandbox.base_url, headers=headers(sandbox), trust_env=False) as client,
        ):
            assert post(client, events).json()["accepted"] == accepted
            after = counts(client)
    assert (after["events_stored"], after["duplicates"]) == (10, 10)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_file_of_something_else_is_left_alone(tmp_path):
    text, database = tmp_path / "notes.txt", tmp_path / "other.db"
    text.write_text("not a database, and longer than one header of SQLite would be" * 10)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
    connection.close()
    for path, message in ((text, "is not a sandbox store"), (database, "database of something else")):
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=message):
            EventStore(str(path))
        assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot open"):
        EventStore(str(tmp_path / "absent" / "events.db"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_only_loopback_is_listened_on(host):
    with (
        pytest.raises(ConfigError, match="loopback"),
        SandboxThread(SandboxOptions(host=host, port=0), clock=lambda: NOW),
    ):
        pass


def test_port_in_use_names_host_port_and_way_out(sandbox):
    port = httpx.URL(sandbox.base_url).port
    with (
        pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} is in use .* another port, 0"),
        SandboxThread(SandboxOptions(port=port), clock=lambda: NOW),
    ):
        pass


@pytest.mark.parametrize("wrong", [{"token_secret": "short"}, {"subscription_key": ""}, {"subscription_key": "ключ"}])
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        SandboxOptions(**wrong)


def test_thread_ends_while_a_connection_is_open_and_frees_its_port():
    with SandboxThread(clock=lambda: NOW) as sandbox:
        idle = socket.create_connection(("127.0.0.1", httpx.URL(sandbox.base_url).port))
    idle.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(sandbox.base_url, trust_env=False)


def test_snippet_is_toml_that_points_at_the_sandbox(sandbox):
    section = {
        "base_url": sandbox.base_url,
        "subscription_key": sandbox.subscription_key,
        "token": sandbox.token,
    }
    assert tomllib.loads(configuration_snippet(sandbox.access)) == {"intake": section, "report": section}


# The commands, each in a process of its own


def command(name: str, *arguments: str) -> list[str]:
    code = f"import typer; from shipper.cli.sandbox import {name}; typer.run({name})"
    return [sys.executable, "-c", code, *arguments]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_what_it_prints_until_a_signal(tmp_path, stop):
    file = tmp_path / "shipper.toml"
    process = subprocess.Popen(
        command("sandbox", "--port", "0", "--account-id", "7", "--write-config", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            lines = []
            while not (lines and "/_sandbox/counts" in lines[-1]):
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            text = "".join(lines)
            settings = tomllib.loads(text[text.index("[intake]") : text.index("# One event by hand")])
            assert tomllib.loads(file.read_text()) == settings
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert re.search(r"http://127\.0\.0\.1:\d+", lines[0])[0] == settings["intake"]["base_url"]

            # The printed request, taken apart as a shell would, so that no curl is needed here.
            words = shlex.split(next(line for line in lines if line.startswith("curl") and "-d" in line))
            given = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
            answer = httpx.post(words[2], headers=given, content=words[words.index("-d") + 1], trust_env=False)
            assert (answer.status_code, answer.json()["accepted"]) == (202, 1)
            day = datetime.now(UTC).date()
            answer = httpx.get(
                settings["report"]["base_url"] + report_path(7, day, day), headers=given, trust_env=False
            )
            assert read_report(answer.content, account_id=7)

            process.send_signal(stop)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_command_writes_its_own_configuration_anew_and_no_other(tmp_path):
    from shipper.cli.sandbox import _write_configuration
    from shipper.sandbox.server import Access

    file = tmp_path / "shipper.toml"
    for port in (1, 2):
        _write_configuration(file, Access(f"http://127.0.0.1:{port}", "key", "token"))
        assert tomllib.loads(file.read_text())["intake"]["base_url"] == f"http://127.0.0.1:{port}"
    file.write_text("[intake]\n")
    with pytest.raises(ConfigError, match="not the sandbox's own"):
        _write_configuration(file, Access("http://127.0.0.1:3", "key", "token"))
    assert file.read_text() == "[intake]\n"
    assert list(tmp_path.iterdir()) == [file]


def test_command_has_the_defaults_of_the_options():
    import inspect

    from shipper.cli.sandbox import sandbox

    defaults = {name: parameter.default for name, parameter in inspect.signature(sandbox).parameters.items()}
    options = SandboxOptions()
    for name in ("host", "port", "account_id", "subscription_key"):
        assert defaults[name] == getattr(options, name)


def test_sample_command_writes_events_of_the_days_before_today():
    run = subprocess.run(command("sample", "--count", "5000", "--seed", "3", "--days", "2"), capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")
    events = [msgspec.json.decode(line, type=wire.ActivityEvent) for line in run.stdout.splitlines()]
    assert len(events) == 5000
    assert max(event.Timestamp for event in events) < datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_sample_command_is_quiet_when_its_reader_leaves():
    process = subprocess.Popen(command("sample", "--count", "200000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout.readline().startswith(b'{"EventId"')
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_import_of_the_commands_does_not_load_the_server():
    code = (
        "import sys, shipper.cli.sandbox; print(*sorted({'starlette', 'uvicorn', 'jwt', 'sqlite3'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "")
