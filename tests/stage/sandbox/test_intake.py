"""The intake of the sandbox: which batches are accepted or refused, and with which answers."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from shipper.model import wire
from shipper.sandbox.options import AnswerShape
from tests.cases import each
from tests.stage.sandbox.conftest import Start
from tests.stage.sandbox.driver import (
    NO_EVENTS,
    NOW,
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

REFUSED_WHOLE = gateway_answer(400, "The batch was refused: it contains an invalid event.")
BAD_IP = "must be an IPv4 address in dotted-decimal form"
KNOWN = "has been received before"


def registered(sandbox: Sandbox) -> int:
    report = sandbox.ask("GET", REPORT).json()
    return sum(
        entry["conversions"]["registrations"]["result"] for b in report["brands"] for entry in b["marketingSources"]
    )


def rejected(index: int, event: bytes, field: str, message: str) -> dict[str, object]:
    return {"index": index, "EventId": event_id(event), "field": field, "message": message}


# Accepted


def test_batch_is_accepted_and_stored_byte_for_byte(sandbox: Sandbox):
    events = sample(50)
    spaced = changed(events[0])  # the same event with blanks after colons and commas
    answer = sandbox.post([spaced, *events[1:]])
    assert told(answer) == (202, "application/json", {"accepted": 50, "duplicates": 0, "rejected": []})
    assert sandbox.events() == [spaced, *events[1:]]


def test_empty_batch_is_accepted(sandbox: Sandbox):
    assert told(sandbox.post([])) == (202, "application/json", {"accepted": 0, "duplicates": 0, "rejected": []})
    assert sandbox.counts() == {**NO_EVENTS, "requests": 1}


def test_envelope_may_contain_whitespace_and_more_fields(sandbox: Sandbox):
    (event,) = sample(1)
    content = b' {\n"events" : [ ' + event + b' ],\t"more":[{}], "EventType" : "Acquisition" } \n'
    assert sandbox.ask("POST", wire.INTAKE_PATH, content).json()["accepted"] == 1
    assert sandbox.events() == [event]


def test_batches_up_to_the_size_limit_are_accepted(sandbox: Sandbox):
    events = sample(5000)
    assert sandbox.post(events).json()["accepted"] == 5000
    assert sandbox.stored() == list(map(event_id, events))


# Refused


INVALID: dict[str, list[object]] = {
    "EventId": ["0" * 32, "C2CE6F44-7ED4-457B-BE2F-EB89414C343C", "{" + "0" * 34 + "}", None, ...],
    "IP": [*("192.0.2.256", "192.0.2.01", "192.0.2", "::1", "", "192.0.2.1\n", "192.0.2.1\n192.0.2.2"), "١٩٢.0.2.1"],
    "Timestamp": [
        *("2026-03-01T00:00:00+", "2026-02-29T00:00:00Z", "2026-03-01T24:00:01Z"),
        *("2026-03-01 00:00:00Z", "2026-03-01T00:00:00.0Z", "2026-03-01T00:00:00z"),
    ],
    "BTag": [
        *("50121_" + "g" * 32, "50121_" + "a" * 31, "50121_" + "a" * 33, "_" + "a" * 32, "50121-" + "a" * 32),
        "50121_" + "a" * 32 + "\n50121_" + "a" * 32,
    ],
    "ConsumerID": [0, "5", 2**63],
    "ConsumerCountry": ["gb"],
    "ConsumerCurrencyID": ["EURO"],
    "Username": [""],
    "BrandID": [1.5, -1],
    "CustomerCurrencyID": [2],
    "ConsumerStatus": [""],
    "AffiliateID": [None],
    "ConsumerState": ["N", ...],
    "Surname": ["unasked"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in INVALID.items() for value in values])
def test_only_the_invalid_event_is_rejected_with_its_field(sandbox: Sandbox, field, value):
    good, other, last = sample(3)
    bad = changed(other, **{field: value})
    answer = sandbox.post([good, bad, last])
    assert answer.status_code == 202
    assert (answer.json()["accepted"], answer.json()["duplicates"]) == (2, 0)
    (entry,) = answer.json()["rejected"]
    sent_id = value if field == "EventId" and isinstance(value, str) else event_id(other)
    assert entry["index"] == 1
    assert entry["EventId"] == ("" if field == "EventId" and not isinstance(value, str) else sent_id)
    assert entry["field"] == field
    assert entry["message"]
    assert sandbox.counts() == {**NO_EVENTS, "requests": 1, "events_received": 3, "events_stored": 2, "rejected": 1}
    assert sandbox.stored() == [event_id(good), event_id(last)]


@pytest.mark.parametrize("event", [b"null", b"5", b'"text"', b"[]", b"{}", b'{"EventId":5}', b'{"EventId":"\xff"}'])
def test_value_that_is_not_an_event_is_rejected_without_an_id(sandbox: Sandbox, event):
    answer = sandbox.post([*sample(1), event])
    assert answer.json()["accepted"] == 1
    assert [(entry["index"], entry["EventId"]) for entry in answer.json()["rejected"]] == [(1, "")]


@pytest.mark.parametrize("name", [b"\xff", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_invalid_utf_8_is_rejected(sandbox: Sandbox, name):
    good, other = sample(2)
    answer = sandbox.post([other.replace(b'"Username":"', b'"Username":"' + name), good])
    assert (answer.json()["accepted"], [entry["index"] for entry in answer.json()["rejected"]]) == (1, [0])
    assert sandbox.stored() == [event_id(good)]


@pytest.mark.parametrize("name", ["é", "名前", "a\nb", '"', "\\", "\0", "\U0001f600"])
def test_text_in_any_script_is_accepted_and_stored(sandbox: Sandbox, name):
    event = changed(sample(1)[0], Username=name)
    assert sandbox.post([event]).json()["accepted"] == 1
    assert sandbox.events() == [event]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no JSON", b"[]", b"{}", b"null", b"[" * 100_000, b"\xef\xbb\xbf" + body([]), b'{"events":[]}'),
        b'{"EventType":"Acquisition"}',
        *(
            b'{"EventType":"Acquisition","events":' + rest
            for rest in (b"{}}", b"null}", b"[{]}", b"[{}", b"[]}trailing")
        ),
        b'{"EventType":"Acquisition","events":' + b"[" * 100_000,
        *(b'{"EventType":' + kind + b',"events":[]}' for kind in (b'"Login"', b'"acquisition"', b"5")),
        *(body(sample(1)).replace(b'"Username":"', b'"Username":"' + name) for name in (b"\0", b"\n", b"\\ud800")),
    ],
)
def test_body_that_is_not_a_batch_is_a_bad_request(sandbox: Sandbox, content):
    answer = sandbox.ask("POST", wire.INTAKE_PATH, content)
    assert_refused(answer, "" if content else "The body is not a batch of events: ")
    assert answer.json().keys() == {"statusCode", "message"}
    assert sandbox.counts() == {**NO_EVENTS, "requests": 1}


def test_unknown_event_type_is_refused_with_the_known_one(sandbox: Sandbox):
    content = body(sample(1)).replace(b"Acquisition", b"Deposit")
    answer = sandbox.ask("POST", wire.INTAKE_PATH, content)
    assert told(answer) == gateway_answer(400, "EventType must be Acquisition.")
    assert sandbox.stored() == []


def test_tag_with_too_many_digits_has_no_source(sandbox: Sandbox):
    tag = "9" * 5000 + "_" + "a" * 32
    assert sandbox.post([changed(sample(1)[0], BTag=tag)]).json()["accepted"] == 1
    assert [row.marketing_source for row in sandbox.store.registrations("0000", "9999")] == [0]


# The public rules

FUTURE = "must not be in the future"
COUNTRY = "must be an ISO 3166-1 country code"
CURRENCY = "must be an ISO 4217 currency code"
OUTSIDE = "must be empty outside the US"
STATE = "must be a US state, because the country is US"
RULES = [
    ({"Timestamp": "2026-03-15T12:30:08Z"}, "Timestamp", FUTURE),
    ({"Timestamp": "9999-12-31T23:59:59Z"}, "Timestamp", FUTURE),
    ({"Timestamp": "2026-03-15T12:30:07Z"}, "", ""),
    ({"Timestamp": "0001-01-01T00:00:00Z"}, "", ""),
    ({"ConsumerCountry": "XX", "ConsumerState": ""}, "ConsumerCountry", COUNTRY),
    ({"ConsumerCountry": "UK", "ConsumerState": ""}, "ConsumerCountry", COUNTRY),
    ({"ConsumerCountry": "AX", "ConsumerState": ""}, "", ""),
    ({"ConsumerCurrencyID": "ABC"}, "ConsumerCurrencyID", CURRENCY),
    ({"ConsumerCurrencyID": "DEM"}, "ConsumerCurrencyID", CURRENCY),
    ({"ConsumerCurrencyID": "ZAR"}, "", ""),
    ({"ConsumerCountry": "CA", "ConsumerState": "ON"}, "ConsumerState", OUTSIDE),
    ({"ConsumerCountry": "GB", "ConsumerState": "NJ"}, "ConsumerState", OUTSIDE),
    ({"ConsumerCountry": "GB", "ConsumerState": ""}, "", ""),
    ({"ConsumerCountry": "US", "ConsumerState": ""}, "ConsumerState", STATE),
    ({"ConsumerCountry": "US", "ConsumerState": "ZZ"}, "ConsumerState", STATE),
    ({"ConsumerCountry": "US", "ConsumerState": "NJ"}, "", ""),
    ({"ConsumerCountry": "US", "ConsumerState": "DC"}, "", ""),
]


@each("profile", ["document", "strict"])
@each(("fields", "field", "message"), RULES)
def test_only_the_strict_profile_enforces_the_public_rules(start: Start, profile, fields, field, message):
    sandbox = start(profile=profile)
    good, other, last = sample(3)
    event = changed(other, **fields)
    answer = sandbox.post([good, event, last])
    is_bad = field and profile == "strict"
    expected = [rejected(1, event, field, message)] if is_bad else []
    document = {"accepted": 3 - len(expected), "duplicates": 0, "rejected": expected}
    assert told(answer) == (202, "application/json", document)
    assert len(sandbox.stored()) == 3 - len(expected)


def test_sample_events_break_no_public_rule(start: Start):
    assert start(profile="strict").post(sample(2000)).json()["accepted"] == 2000


@each("neighbour", ["good", "bad"])
@each("profile", ["document", "strict"])
@each("field", ["EventId", "ConsumerID"])
def test_strict_refuses_a_request_with_repeated_values(start: Start, profile, field, neighbour):
    sandbox = start(profile=profile)
    first, second, third = sample(3)
    second = changed(second, **{field: json.loads(first)[field]})
    third = third if neighbour == "good" else changed(third, IP="x")  # judged one by one
    answer = sandbox.post([first, second, third])
    if profile == "strict":
        assert told(answer) == gateway_answer(400, f"Two events of the batch have the same {field}.")
        assert sandbox.counts() == {**NO_EVENTS, "requests": 1}
    else:
        good = 3 if neighbour == "good" else 2
        repeated = field == "EventId"
        assert (answer.json()["accepted"], answer.json()["duplicates"]) == (good - repeated, repeated)


def test_strict_allows_a_repeat_in_a_later_request(start: Start):
    sandbox = start(profile="strict")
    assert sandbox.post(sample(2)).json() == {"accepted": 2, "duplicates": 0, "rejected": []}
    assert sandbox.post(sample(2)).json() == {"accepted": 0, "duplicates": 2, "rejected": []}


# How it answers

SHAPES = {"counts": 202, "created": 201, "empty": 200, "no-content": 204, "per-event": 207}


def results(*entries: dict[str, object]) -> dict[str, object]:
    return {"results": list(entries)}


def taken(index: int, event: bytes) -> dict[str, object]:
    return {"index": index, "EventId": event_id(event), "status": 202}


@pytest.mark.parametrize(("shape", "status"), SHAPES.items())
def test_good_batch_is_answered_in_the_chosen_shape(start: Start, shape, status):
    sandbox = start(answer=shape)
    one, two = sample(2)
    answer = sandbox.post([one, two])
    assert answer.status_code == status
    if shape in {"empty", "no-content"}:
        assert answer.content == b""
        assert "Content-Type" not in answer.headers
    elif shape == "per-event":
        assert answer.json() == results(taken(0, one), taken(1, two))
    else:
        assert answer.json() == {"accepted": 2, "duplicates": 0, "rejected": []}
    assert sandbox.stored() == [event_id(one), event_id(two)]
    assert sandbox.post([one, two]).status_code == status
    assert sandbox.counts()["duplicates"] == 2


@pytest.mark.parametrize(("shape", "status"), SHAPES.items())
def test_batch_with_an_invalid_event_is_partly_accepted_if_the_shape_can_express_it(start: Start, shape, status):
    sandbox = start(answer=shape)
    one, bad, three = sample(3)
    bad = changed(bad, IP="x")
    answer = sandbox.post([one, bad, three])
    if shape in {"empty", "no-content"}:
        assert told(answer) == REFUSED_WHOLE
        assert sandbox.stored() == []
    else:
        entry = rejected(1, bad, "IP", BAD_IP)
        counted = {"accepted": 2, "duplicates": 0, "rejected": [entry]}
        single = results(taken(0, one), {**entry, "status": 400}, taken(2, three))
        expected = single if shape == "per-event" else counted
        assert told(answer) == (status, "application/json", expected)
        assert sandbox.stored() == [event_id(one), event_id(three)]
    assert sandbox.counts()["rejected"] == 1


@pytest.mark.parametrize("shape", get_args(AnswerShape))
def test_whole_rejection_accepts_and_names_no_event(start: Start, shape):
    sandbox = start(answer=shape, rejection="whole")
    one, bad = sample(2)
    assert told(sandbox.post([one, changed(bad, IP="x")])) == REFUSED_WHOLE
    assert sandbox.counts() == {**NO_EVENTS, "requests": 1, "events_received": 1, "rejected": 1}
    assert sandbox.post([one, bad]).status_code == SHAPES[shape]
    assert sandbox.stored() == [event_id(one), event_id(bad)]


# Repeats


def test_repeated_event_is_counted_and_its_first_form_kept(sandbox: Sandbox):
    first, other = sample(2)
    again = changed(first, Username="somebody_else")
    assert sandbox.post([first, first]).json() == {"accepted": 1, "duplicates": 1, "rejected": []}
    assert sandbox.post([again, other]).json() == {"accepted": 1, "duplicates": 1, "rejected": []}
    stored = sandbox.control("GET", f"events/{event_id(first)}").json()
    assert stored == {"EventId": event_id(first), "times_received": 3, "raw": first.decode()}
    assert sandbox.counts() == {**NO_EVENTS, "requests": 2, "events_received": 4, "events_stored": 2, "duplicates": 2}


@pytest.mark.parametrize(
    ("repeats", "answered", "counted", "received", "registrations"),
    [
        ("ignore", (1, 2, 0), (3, 2, 0), 2, 3),
        ("reject", (1, 0, 2), (3, 0, 2), 1, 3),
        ("accept", (3, 0, 0), (3, 2, 0), 2, 5),
    ],
)
def test_repeat_is_ignored_rejected_or_accepted(start: Start, repeats, answered, counted, received, registrations):
    sandbox = start(repeats=repeats)
    one, two, three = sample(3)
    assert sandbox.post([one, two]).json() == {"accepted": 2, "duplicates": 0, "rejected": []}
    answer = sandbox.post([two, three, one]).json()
    assert (answer["accepted"], answer["duplicates"], len(answer["rejected"])) == answered
    if repeats == "reject":
        assert answer["rejected"] == [rejected(0, two, "EventId", KNOWN), rejected(2, one, "EventId", KNOWN)]
    counts = sandbox.counts()
    assert (counts["events_stored"], counts["duplicates"], counts["rejected"]) == counted
    assert counts["events_received"] == 5
    assert sandbox.control("GET", f"events/{event_id(one)}").json()["times_received"] == received
    assert registered(sandbox) == registrations
    (_, entry) = [entry for entry in sandbox.log() if entry["operation"] == "intake"]
    assert (entry["accepted"], entry["duplicates"], entry["rejected"]) == answered


@pytest.mark.parametrize(
    ("repeats", "answered", "registrations"),
    [("ignore", (1, 1, 0), 1), ("reject", (1, 0, 1), 1), ("accept", (2, 0, 0), 2)],
)
def test_repeat_within_one_request_is_treated_alike(start: Start, repeats, answered, registrations):
    sandbox = start(repeats=repeats)
    (one,) = sample(1)
    answer = sandbox.post([one, one]).json()
    assert (answer["accepted"], answer["duplicates"], len(answer["rejected"])) == answered
    assert registered(sandbox) == registrations


def test_rejected_repeat_is_a_conflict_in_an_answer_for_each_event(start: Start):
    sandbox = start(repeats="reject", answer="per-event")
    one, two, bad = sample(3)
    bad = changed(bad, IP="x")
    sandbox.post([one])
    assert sandbox.post([one, two, bad]).json() == results(
        {**rejected(0, one, "EventId", KNOWN), "status": 409},
        taken(1, two),
        {**rejected(2, bad, "IP", BAD_IP), "status": 400},
    )


def test_rejected_repeat_fails_a_batch_in_whole_mode(start: Start):
    sandbox = start(repeats="reject", rejection="whole")
    one, two = sample(2)
    sandbox.post([one])
    assert told(sandbox.post([one, two])) == REFUSED_WHOLE
    assert sandbox.stored() == [event_id(one)]


# The black hole


def test_black_hole_counts_events_and_keeps_nothing(start: Start):
    sandbox = start(blackhole=True)
    bad = changed(sample(1)[0], IP="x")
    assert sandbox.post([*sample(3), bad]).json() == {"accepted": 4, "duplicates": 0, "rejected": []}
    assert sandbox.post(sample(3)).json() == {"accepted": 3, "duplicates": 0, "rejected": []}
    assert sandbox.counts() == {**NO_EVENTS, "requests": 2, "events_received": 7}
    assert sandbox.control("GET", "events").json() == {"events": [], "next": None}
    assert sandbox.stored() == []
    assert registered(sandbox) == 0
    assert sandbox.control("POST", "reset").json() == NO_EVENTS


def test_black_hole_still_has_a_gateway(start: Start):
    sandbox = start(blackhole=True, max_body_bytes=1000)
    assert sandbox.post(sample(1), {"Authorization": None}).status_code == 401
    assert sandbox.post(sample(10)).status_code == 413
    assert sandbox.counts() == {**NO_EVENTS, "requests": 2}


def test_log_contains_the_result_of_a_batch(sandbox: Sandbox):
    one, two, bad = sample(3)
    events = [one, two, two, changed(bad, IP="x")]
    sandbox.post(events)
    (entry,) = sandbox.log()
    assert entry.pop("seconds") >= 0
    assert entry == {
        "number": 1,
        "at": NOW,
        "operation": "intake",
        "method": "POST",
        "path": wire.INTAKE_PATH,
        "status": 202,
        "fault": "",
        "body_bytes": len(body(events)),
        "events": 4,
        "accepted": 2,
        "duplicates": 1,
        "rejected": 1,
    }
