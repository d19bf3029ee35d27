"""The controls of the sandbox: received events, clock, log, and invalid requests."""

from __future__ import annotations

import json

import httpx
import pytest

from shipper.model import wire
from shipper.sandbox import service
from shipper.sandbox.gateway import KEY_INVALID, SUBSCRIPTION_KEY_HEADER
from shipper.sandbox.options import SandboxOptions
from tests.cases import each
from tests.stage.sandbox.conftest import Start
from tests.stage.sandbox.driver import (
    NO_EVENTS,
    NOW,
    PATHS,
    REPORT,
    Sandbox,
    assert_refused,
    body,
    changed,
    event_id,
    gateway_answer,
    sample,
    told,
)

ROUTES = [
    *(("GET", "/"), ("GET", "/access"), ("POST", "/keys/rotate"), ("GET", "/counts")),
    *(("GET", "/events"), ("GET", "/events/{event_id}"), ("GET", "/event-ids"), ("GET", "/requests")),
    *(("GET", "/faults"), ("PUT", "/faults"), ("DELETE", "/faults"), ("GET", "/clock"), ("PUT", "/clock")),
    *(("POST", "/restatements"), ("POST", "/reset"), ("GET", "/openapi.json")),
]


def test_index_lists_every_control_and_what_it_does(sandbox: Sandbox):
    listed = sandbox.control("GET", "").json()
    assert [(entry["method"], entry["path"]) for entry in listed] == [(m, f"/_sandbox{path}") for m, path in ROUTES]
    assert all(entry["does"].endswith(".") or "{" in entry["does"] or ":" in entry["does"] for entry in listed)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_controls_need_neither_key_nor_token_nor_headers(sandbox: Sandbox, method, path):
    (event,) = sample(1)
    sandbox.post([event])
    content = {
        ("PUT", "/clock"): b'{"offset_seconds":0}',
        ("POST", "/restatements"): b'{"start":"2026-03-01","end":"2026-03-01"}',
    }
    url = f"{sandbox.base_url}/_sandbox{path.replace('{event_id}', event_id(event))}"
    answer = httpx.request(method, url, content=content.get((method, path)), trust_env=False, verify=False)
    assert answer.status_code == 200
    assert answer.headers["Date"] == "Sun, 15 Mar 2026 12:30:07 GMT"


def test_access_returns_everything_a_client_needs(sandbox: Sandbox):
    access = sandbox.control("GET", "access").json()
    token = access.pop("token")
    key = access.pop("subscription_key")
    secondary = access.pop("secondary_key")
    assert access == {
        "base_url": sandbox.base_url,
        "token_url": f"{sandbox.base_url}{PATHS['token']}",
        "client_id": "sandbox-client",
        "client_secret": "sandbox-client-secret",
        "scope": "api://shipper-sandbox/.default",
        "username": "sandbox-user",
        "password": "sandbox-password",
        "account_id": 1001,
    }
    for one in (key, secondary):
        headers = {SUBSCRIPTION_KEY_HEADER: one, "Authorization": f"Bearer {token}"}
        assert sandbox.ask("GET", REPORT, headers=headers).status_code == 200
    form = {name: access[name] for name in ("client_id", "client_secret", "scope", "username", "password")}
    answer = sandbox.http.post(access["token_url"], data={"grant_type": "password", **form})
    assert answer.status_code == 200


# Events


def test_pages_follow_one_another_to_the_last_event(sandbox: Sandbox):
    events = sample(25)
    sandbox.post_in_batches(events, 7)
    shown = [{"EventId": event_id(event), "times_received": 1, "raw": event.decode()} for event in events]
    for limit in (1, 7, 10, 24, 25, 26):
        assert sandbox.pages(f"limit={limit}") == [shown[first : first + limit] for first in range(0, 25, limit)]


def test_page_has_a_hundred_events_unless_more_are_asked_for(sandbox: Sandbox):
    sandbox.post_in_batches(sample(10_001), 5000)
    assert [len(sandbox.control("GET", f"events{q}").json()["events"]) for q in ("", "?limit=10000")] == [100, 10_000]
    assert sandbox.control("GET", "events?after=10001").json() == {"events": [], "next": None}
    assert sandbox.control("GET", f"events?after={2**53}").json() == {"events": [], "next": None}


def fields(brand: int, source: int, day: str) -> dict[str, object]:
    return {"BrandID": brand, "BTag": f"{source}_{'a' * 32}", "Timestamp": f"{day}T00:00:00Z"}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [0, 1, 2, 3, 4]),
        ("day=2026-03-01", [0, 1, 4]),
        ("brand=11", [0, 2, 4]),
        ("marketing_source=50121", [0, 1, 4]),
        ("marketing_source=0", [3]),
        ("day=2026-03-01&brand=11", [0, 4]),
        ("day=2026-03-02&brand=11&marketing_source=50234", [2]),
        ("brand=99", []),
        ("day=2026-02-30", []),
        ("times_received=1", [0, 1, 2, 3, 4]),
        ("times_received=2", [1, 4]),
        ("times_received=3", [4]),
        ("times_received=4", []),
        ("times_received=2&brand=11", [4]),
        ("limit=1&brand=11&after=1", [2]),
    ],
)
def test_events_are_filtered_by_their_fields(sandbox: Sandbox, query, expected):
    kinds = [
        fields(11, 50121, "2026-03-01"),
        fields(12, 50121, "2026-03-01"),
        fields(11, 50234, "2026-03-02"),
        {**fields(13, 1, "2026-03-02"), "BTag": "9" * 30 + "_" + "a" * 32},
        fields(11, 50121, "2026-03-01"),
    ]
    events = [changed(event, **kind) for event, kind in zip(sample(5), kinds, strict=True)]
    sandbox.post(events)
    sandbox.post([events[1], events[4], events[4]])
    found = sandbox.control("GET", f"events?{query}").json()["events"]
    assert [event["EventId"] for event in found] == [event_id(events[index]) for index in expected]


def test_pages_of_filtered_events_follow_one_another(sandbox: Sandbox):
    events = [changed(event, BrandID=index % 3 + 1) for index, event in enumerate(sample(30))]
    sandbox.post(events)
    assert sandbox.events("brand=2&limit=4") == events[1::3]


INVALID = {
    "events": [
        *("limit=0", "limit=10001", "limit=-1", "limit=x", "limit=", "limit=1.5"),
        *("after=x", "after=-1", "after=%C2%B2", "after=99999999999999999999"),
        *("day=2026-3-1", "day=20260301", "day=2026-03-01%0A", "day="),
        *("brand=x", "marketing_source=x", "times_received=0", "unknown=1", "status=202"),
    ],
    "requests": [
        *("limit=0", "limit=10001", "after=-1", "after=x", "operation=any", "operation="),
        *("status=x", "brand=11", "number=1"),
    ],
}


@each(("path", "query"), [(path, query) for path, queries in INVALID.items() for query in queries])
def test_an_invalid_query_is_refused(sandbox: Sandbox, path, query):
    assert_refused(sandbox.control("GET", f"{path}?{query}"), query.partition("=")[0])


def test_event_ids_are_streamed_in_order_of_arrival(sandbox: Sandbox):
    events = sample(25_000)
    sandbox.post_in_batches(events, 5000)
    answer = sandbox.control("GET", "event-ids")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.text.splitlines() == list(map(event_id, events))
    assert answer.text.endswith("\n")


def test_there_are_no_event_ids_before_an_event(sandbox: Sandbox):
    assert sandbox.control("GET", "event-ids").text == ""


@pytest.mark.parametrize("wanted", ["00000000-0000-4000-8000-000000000000", "x", "%00", "%F0%9F%98%80"])
def test_unknown_event_is_not_found(sandbox: Sandbox, wanted):
    assert told(sandbox.control("GET", f"events/{wanted}")) == gateway_answer(404, "Resource not found")


def test_reset_forgets_events_counts_and_log_and_keeps_clock_and_keys(sandbox: Sandbox):
    events = sample(3)
    sandbox.post([*events, b"{}"])
    sandbox.control("PUT", "clock", {"offset_seconds": 60})
    key = sandbox.control("POST", "keys/rotate").json()["key"]
    assert sandbox.control("POST", "reset").json() == NO_EVENTS
    assert (sandbox.stored(), sandbox.log()) == ([], [])
    assert sandbox.control("GET", "clock").json()["offset_seconds"] == 60
    assert sandbox.control("GET", "access").json()["subscription_key"] == key
    assert sandbox.post(events, {SUBSCRIPTION_KEY_HEADER: key}).json()["accepted"] == 3
    assert [entry["number"] for entry in sandbox.log()] == [1]


# Keys, restatements


@pytest.mark.parametrize(
    ("content", "which", "other"),
    [
        (None, "primary", "secondary"),
        (b"{}", "primary", "secondary"),
        (b'{"which":"secondary"}', "secondary", "primary"),
    ],
)
def test_a_rotated_key_is_refused_but_not_the_new_and_the_other_one(sandbox: Sandbox, content, which, other):
    before = sandbox.keys()
    answer = sandbox.control("POST", "keys/rotate", content).json()
    after = sandbox.keys()
    assert answer == {"which": which, "key": after[which]}
    assert after[which] not in before.values()
    assert after[other] == before[other]
    refused = sandbox.call("report", {SUBSCRIPTION_KEY_HEADER: before[which]})
    assert told(refused) == gateway_answer(401, KEY_INVALID)
    for key in after.values():
        assert sandbox.call("report", {SUBSCRIPTION_KEY_HEADER: key}).status_code == 200


INVALID_BODIES = {
    "POST keys/rotate": [b'{"which":"third"}', b"[]", b'{"which":"\xff"}'],
    "PUT clock": [
        *(b"", b"{}", b"no JSON", b"[" * 100_000),
        *(b'{"offset_seconds":%b}' % value for value in (b'"1"', b"1e10", b"-1e10", b"NaN", b'1,"more":1')),
    ],
    "POST restatements": [
        *(b"", b'{"start":"2026-03-01"}', b'{"start":"2026-03-01","end":"today"}', b" " * ((1 << 20) + 1)),
        *(b'{"start":"2026-03-02","end":"2026-03-01"}', b'{"start":"0001-01-01","end":"9999-12-31"}'),
    ],
}


@each(("control", "content"), [(name, content) for name, contents in INVALID_BODIES.items() for content in contents])
def test_invalid_control_is_refused_and_changes_nothing(sandbox: Sandbox, control, content):
    def state() -> tuple[object, ...]:
        return sandbox.keys(), sandbox.control("GET", "clock").json()["offset_seconds"], sandbox.call("report").json()

    sandbox.post(sample(5))
    before = state()
    assert_refused(sandbox.control(*control.split(), content), "")
    assert state() == before


@pytest.mark.parametrize(
    ("first", "last", "days"),
    [("2026-03-01", "2026-03-01", 1), ("2026-03-01", "2026-03-31", 31), ("9990-01-01", "9999-12-31", 3652)],
)
def test_restatement_returns_its_number_of_days(sandbox: Sandbox, first, last, days):
    answer = sandbox.control("POST", "restatements", {"start": first, "end": last})
    assert (answer.status_code, answer.json()) == (200, {"days": days})


# The clock


def test_shifted_clock_applies_to_everything_that_uses_the_time(start: Start):
    sandbox = start(profile="strict")
    (event,) = sample(1)
    tomorrow = changed(event, Timestamp="2026-03-16T12:30:07Z")
    assert sandbox.control("GET", "clock").json() == {"now": NOW, "offset_seconds": 0.0}
    assert sandbox.post([tomorrow]).json()["rejected"][0]["field"] == "Timestamp"

    answer = sandbox.control("PUT", "clock", {"offset_seconds": 86_400})
    assert answer.json() == {"now": NOW + 86_400, "offset_seconds": 86_400.0}
    assert answer.headers["Date"] == "Mon, 16 Mar 2026 12:30:07 GMT"
    assert sandbox.post([tomorrow]).json()["accepted"] == 1
    report = sandbox.ask("GET", REPORT)
    assert report.headers["Date"] == "Mon, 16 Mar 2026 12:30:07 GMT"
    assert report.json()["reportingTime"] == "2026-03-16T12:30:07.2500000Z"
    assert [entry["at"] for entry in sandbox.log()] == [NOW, NOW + 86_400, NOW + 86_400]

    sandbox.control("PUT", "clock", {"offset_seconds": 30 * 86_400})
    expired = gateway_answer(401, "Unauthorized. Access token has expired.")
    assert told(sandbox.ask("GET", REPORT)) == expired
    token = sandbox.control("GET", "access").json()["token"]
    assert sandbox.ask("GET", REPORT, headers={"Authorization": f"Bearer {token}"}).status_code == 200
    sandbox.control("PUT", "clock", {"offset_seconds": -1})
    not_yet = gateway_answer(401, "Unauthorized. Access token is not valid yet.")
    assert told(sandbox.ask("GET", REPORT)) == not_yet


def test_every_answer_is_dated_once_by_the_service_s_clock(start: Start):
    sandbox = start(clock_offset_seconds=-1.0)
    for method, path in [("POST", PATHS["intake"]), ("GET", REPORT), ("POST", PATHS["token"]), ("GET", "/nowhere")]:
        assert sandbox.ask(method, path, b"").headers.get_list("Date") == ["Sun, 15 Mar 2026 12:30:06 GMT"]
    assert sandbox.control("GET", "counts").headers.get_list("Date") == ["Sun, 15 Mar 2026 12:30:06 GMT"]


@pytest.mark.parametrize("offset", [-(10**9), 10**9, 0.5])
def test_clock_can_be_shifted_far(sandbox: Sandbox, offset):
    sandbox.control("PUT", "clock", {"offset_seconds": offset})
    token = sandbox.control("GET", "access").json()["token"]
    assert sandbox.control("GET", "clock").json()["now"] == NOW + offset
    assert sandbox.ask("GET", REPORT, headers={"Authorization": f"Bearer {token}"}).status_code == 200


# The log of requests


def five_requests(sandbox: Sandbox) -> None:
    sandbox.go_wrong("status status=503 operation=report requests=2")
    sandbox.post(sample(2))
    sandbox.post(sample(1), {"Authorization": None})
    sandbox.call("report")
    sandbox.call("report")
    sandbox.call("token")


def test_log_has_every_request_to_an_operation_and_none_to_a_control(sandbox: Sandbox):
    five_requests(sandbox)
    sandbox.ask("GET", "/nowhere")
    entries = sandbox.log()
    assert [
        (entry["number"], entry["operation"], entry["method"], entry["path"], entry["status"], entry["fault"])
        for entry in entries
    ] == [
        (1, "intake", "POST", wire.INTAKE_PATH, 202, ""),
        (2, "intake", "POST", wire.INTAKE_PATH, 401, ""),
        (3, "report", "GET", REPORT, 200, ""),
        (4, "report", "GET", REPORT, 503, "status"),
        (5, "token", "POST", PATHS["token"], 400, ""),
    ]
    assert sandbox.counts()["requests"] == 2


@pytest.mark.parametrize(
    ("query", "numbers", "following"),
    [
        ("", [1, 2, 3, 4, 5], None),
        ("?operation=intake", [1, 2], None),
        ("?operation=token", [5], None),
        ("?status=202", [1], None),
        ("?status=0", [], None),
        ("?fault=status", [4], None),
        ("?fault=", [1, 2, 3, 5], None),
        ("?fault=reset", [], None),
        ("?operation=report&status=200", [3], None),
        ("?limit=2", [1, 2], 2),
        ("?limit=2&after=2", [3, 4], 4),
        ("?limit=2&after=4", [5], None),
        ("?limit=5", [1, 2, 3, 4, 5], None),
        ("?limit=1&operation=report", [3], 3),
        ("?limit=1&operation=report&after=3", [4], None),
        ("?after=5", [], None),
        ("?after=99", [], None),
    ],
)
def test_log_is_filtered_and_paged(sandbox: Sandbox, query, numbers, following):
    five_requests(sandbox)
    page = sandbox.control("GET", f"requests{query}").json()
    assert [entry["number"] for entry in page["requests"]] == numbers
    assert page["next"] == following


def test_log_keeps_the_latest_ten_thousand(monkeypatch: pytest.MonkeyPatch):
    assert service._REQUESTS_KEPT == 10_000
    monkeypatch.setattr(service, "_REQUESTS_KEPT", 100)  # as that many requests would take seconds
    with Sandbox(SandboxOptions(port=0)) as sandbox:
        request = sandbox.bare("POST", wire.INTAKE_PATH).replace(b"sandbox-subscription-key", b"wrong")
        last = request.replace(b"Host: sandbox", b"Host: sandbox\r\nConnection: close")
        answers = sandbox.raw(request * 104 + last)
        assert answers.count(b"HTTP/1.1 401 ") == 105
        entries = sandbox.log("?limit=10000")
    assert (len(entries), entries[0]["number"], entries[-1]["number"]) == (100, 6, 105)


def test_log_contains_nothing_secret_or_personal(sandbox: Sandbox):
    event = changed(
        sample(1)[0], Username="player_of_ours", IP="203.0.113.77", ConsumerID=987_654_321, BTag="5_" + "c" * 32
    )
    bad = changed(sample(2)[1], Username="other_of_ours", IP="203.0.113.78x")
    form = {"grant_type": "password", "client_id": "sandbox-client", "client_secret": "s3cret", "username": "someone"}
    sandbox.post([event, bad])
    sandbox.post([event], {SUBSCRIPTION_KEY_HEADER: "key-of-somebody"})
    sandbox.ask("GET", f"{REPORT}?subscription-key=key-in-query&name=player_of_ours")
    sandbox.http.post(sandbox.base_url + PATHS["token"], data=form)
    text = sandbox.control("GET", "requests").text
    assert len(json.loads(text)["requests"]) == 4
    personal = ["of_ours", "203.0.113", "987654321", "c" * 32, event_id(event), event_id(bad)]
    secret = [sandbox.headers[SUBSCRIPTION_KEY_HEADER], sandbox.headers["Authorization"].split()[1]]
    for word in [*personal, *secret, "key-of-somebody", "key-in-query", "s3cret", "someone", "eyJ"]:
        assert word not in text
    assert len(body([event, bad])) == json.loads(text)["requests"][0]["body_bytes"]


def test_openapi_document_contains_the_address_of_this_sandbox(sandbox: Sandbox):
    document = sandbox.control("GET", "openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert sandbox.base_url in json.dumps(document["servers"])
    assert {wire.INTAKE_PATH, "/dpm/v1/dar/{affiliate_account_id}/{start_date}/{end_date}"} <= set(document["paths"])
