"""Each body in the corpus of 2xx answers has its stated meaning; none that reports a failure is an acceptance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.delivery.answer import Answer
from shipper.delivery.verdicts import ANSWER_BYTES, Action, Verdict, judge
from tests.answer_bodies import EVENTS, IDS, SAMPLES, Sample
from tests.cases import each

ACTIONS = {
    "accepted": {Action.ACCEPT},
    "parts": {Action.ACCEPT},
    "apart": {Action.BISECT},
    "later": {Action.RETRY, Action.THROTTLE},
    "paused": {Action.PAUSE},
}


def verdict_on(body: bytes, status: int = 200, content_type: str = "application/json", events: int = EVENTS) -> Verdict:
    answer = Answer(status=status, content_type=content_type, retry_after="", body=body)
    return judge(answer, events=events, event_ids=lambda: IDS[:events])


def meaning(verdict: Verdict) -> tuple[Action, set[int], frozenset[int]]:
    is_accepted = verdict.action is Action.ACCEPT
    return verdict.action, set(verdict.results.rejected) if is_accepted else set(), verdict.results.retried


@each("sample", SAMPLES)
def test_each_body_has_the_meaning_stated_in_the_corpus(sample: Sample):
    verdict = verdict_on(sample.body, sample.status)
    assert verdict.action in ACTIONS[sample.whole], verdict
    if verdict.action is Action.ACCEPT:
        assert (verdict.results.rejected.keys(), verdict.results.retried) == (sample.refused, sample.again), verdict
    else:
        assert verdict.is_ambiguous, "the service may have taken what it denies"
        assert verdict.message


def test_the_corpus_is_large_and_contains_every_meaning():
    assert len(SAMPLES) >= 120
    assert len({(sample.status, sample.text) for sample in SAMPLES}) == len(SAMPLES), "a body stands in it twice"
    assert {sample.whole for sample in SAMPLES} == set(ACTIONS)


# Single events ------------------------------------------------------------


@each(
    "document",
    [
        {"rejected": [{"index": 1, "EventId": IDS[1], "field": "IP", "message": "bad"}]},
        {"Rejected": [{"EventId": IDS[1].upper(), "error": "IP: bad"}]},
        {"errors": [{"row": 4, "EventId": IDS[1], "reason": "IP: bad"}]},
        {"errors": {"1": "IP: bad"}},
        {"errors": {IDS[1]: "IP: bad"}},
        {IDS[1]: "IP: bad"},
        {"data": {"outcome": {"rejected": [{"eventId": IDS[1], "description": "IP: bad"}]}}},
        {"results": [{"index": 1, "status": 422, "message": "IP: bad"}]},
        [{"index": 1, "error": "IP: bad"}],
        [{"status": "ok"}, {"status": "rejected", "error": "IP: bad"}, {"status": "ok"}],
    ],
)
def test_the_reason_of_a_refused_event_is_its_field_and_the_words(document: Any):
    assert verdict_on(json.dumps(document).encode()).results.rejected == {1: "IP: bad"}


@each(
    ("document", "reasons"),
    [
        ({"rejected": [2, 1]}, {2: "", 1: ""}),
        ({"errors": {"events[2].IP": ["bad"]}}, {2: '{"pointer":"events[2].IP","errors":["bad"]}'}),
        ({"rejected": [{"index": 2, "EventId": IDS[1]}]}, {1: f'{{"index":2,"EventId":"{IDS[1]}"}}'}),
    ],
)
def test_without_words_the_reason_is_the_entry(document: Any, reasons: dict[int, str]):
    assert verdict_on(json.dumps(document).encode()).results.rejected == reasons


@each("again", [503, 503.0, "503", "429", "425", 408, 599, "503 Service Unavailable", "throttled"])
@each("refused", [400, "422", 409.0, "denied", "fail", False, "false", "Rejected", "INVALID_ARGUMENT"])
def test_an_event_to_be_sent_again_is_not_refused(again: Any, refused: Any):
    entries = [{"index": 0, "status": again}, {"index": 2, "status": refused, "error": "bad"}]
    results = verdict_on(json.dumps(entries).encode()).results
    assert (results.rejected, results.retried) == ({2: "bad"}, {0})


documents = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 600) | st.sampled_from([*IDS, "x", "3"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rejected", "errors", "results", "index", "EventId", "status", "message", "success", "3"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(documents)
def test_only_events_of_the_batch_are_named_by_any_answer(document: Any):
    results = verdict_on(json.dumps(document).encode()).results
    assert set(results.rejected) | results.retried <= set(range(EVENTS))
    assert results.unnamed >= 0


# What is added to a body ------------------------------------------------------------

HARMLESS: list[tuple[str, Any]] = [
    *(("requestId", "a-b-1"), ("request_id", 4711), ("traceparent", "00-1-2-01"), ("correlationId", "x"), ("id", "17")),
    *(("timestamp", "2026-11-01T10:00:00Z"), ("receivedAt", 1_790_000_000), ("processing_time_ms", 12), ("took", 3)),
    *(("links", {"self": "/batches/1", "errors": "/batches/1/errors"}), ("href", "/errors"), ("version", "1.2.3")),
    *(("_links", [{"rel": "failed", "href": "/x"}]), ("apiVersion", "2"), ("serverTime", "12:00"), ("etag", 'W/"1"')),
    *(("batchUuid", IDS[0][:-1] + "f"), ("cursor", "ZmFpbGVk"), ("durationSeconds", 0.25), ("region", "eu-1")),
    *(("zork", 17), ("zork", "blue"), ("zork", None), ("zork", True), ("zork", [1, "a"]), ("zork", {"a": {"b": 1.5}})),
]
MARKERS: list[tuple[str, Any]] = [
    *(("error", {"message": "x"}), ("error", "x"), ("error", True), ("errors", ["x"]), ("errors", {"IP": ["x"]})),
    *(("status", "failed"), ("state", "REJECTED"), ("statusCode", 400), ("status_code", "503"), ("code", 500.0)),
    *(("success", False), ("ok", "false"), ("isSuccess", 0), ("accepted", False), ("processed", "no")),
    *(("rejected", 1), ("failed_count", "2"), ("numErrors", 3), ("FailedRecordCount", 1), ("total", 2)),
    ("accepted", 1),
    *(("rejected", [7]), ("invalidEvents", [{"x": 1}]), ("failures", {"a": "b"}), ("hasErrors", True), ("failed", "x")),
    *(("message", "the batch was refused"), ("note", "event 2 is invalid"), ("zork", "could not be stored")),
    *(("data", {"success": False}), ("zork", {"zork": {"error": "x"}}), ("zork", [{"status": "failed"}])),
    *(("result", {"items": [{"status": "zork"}]}), ("fault", {"x": 1}), ("exception", "x"), ("zork", [["failed"]])),
]  # fmt: skip


def objects(*wholes: str) -> Iterator[tuple[Sample, dict[str, Any]]]:
    for sample in SAMPLES:
        if sample.whole in wholes and sample.text.startswith("{"):
            try:
                yield sample, json.loads(sample.body)
            except ValueError:
                assert sample.whole == "paused"


def planted(document: dict[str, Any], name: str, value: Any) -> bytes | None:
    """Add a field; None if there is one of that name, whose meaning it would change."""
    if name.lower() in {each.lower() for each in document}:
        return None
    return json.dumps({**document, name: value}).encode()


@each("field", HARMLESS)
def test_a_harmless_field_changes_no_meaning(field: tuple[str, Any]):
    for sample, document in objects("accepted", "parts", "apart", "later"):
        body = planted(document, *field)
        if body is not None:
            found = verdict_on(body, sample.status)
            assert meaning(found) == meaning(verdict_on(sample.body, sample.status)), (sample.text, found)


@each("field", MARKERS)
def test_no_body_that_reports_a_failure_is_a_full_acceptance(field: tuple[str, Any]):
    bodies = [(planted(document, *field), sample.status) for sample, document in objects("accepted")]
    bodies = [(body, status) for body, status in bodies if body is not None]
    assert len(bodies) > 20
    for body, status in bodies:
        assert verdict_on(body, status).action is not Action.ACCEPT, body


@each("field", MARKERS)
def test_no_result_that_reports_a_failure_is_an_acceptance_of_its_event(field: tuple[str, Any]):
    for name in ("results", "items", "responses"):
        results = [{"EventId": event_id, "status": "ok"} for event_id in IDS]
        results[1] = {"EventId": IDS[1], field[0]: field[1]}
        verdict = verdict_on(json.dumps({name: results}).encode())
        if field not in [("accepted", 1), ("total", 2)]:  # of one event, these are no failure
            is_named = {*verdict.results.rejected, *verdict.results.retried} == {1}
            assert verdict.action is not Action.ACCEPT or is_named, (name, verdict)


nested = st.recursive(
    st.dictionaries(*[st.sampled_from([name for name, _ in [*HARMLESS, *MARKERS]]), st.integers(0, 600)], max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "zork", "results"]), inner),
    max_leaves=8,
)


@settings(max_examples=100)
@given(document=nested, marker=st.sampled_from(MARKERS))
def test_a_failure_is_detected_at_any_depth(document: Any, marker: tuple[str, Any]):
    for _ in range(3):
        document = {"zork": document, "data": {marker[0]: marker[1]}}
        verdict = verdict_on(json.dumps(document).encode())
        assert verdict.action is not Action.ACCEPT or verdict.results.rejected or verdict.results.retried


# What is said to the operator ------------------------------------------------------------


@each(
    ("body", "words"),
    [
        (b'{"rejectedCount":0,"accepted":2}', "`accepted` (a number) does not add up: 2 of 3 events"),
        (b'{"status":"zork"}', "`status` (a text) is unknown"),
        (b'{"statusCode":401}', "`statusCode` (a number, 401) says that it failed"),
        (b'{"error":{"IP":"192.0.2.9"}}', "`error` (an object) says that it failed"),
        (b'{"192.0.2.9":"failed"}', "a field of unknown meaning (a text)"),
        (b'{"alice":"failed"}', "a field of unknown meaning (a text)"),
        (b"error: alice", "its text indicates a failure"),
        (b'["0f8fad5b-d9cb-469f-a165-708677289501"]', "the whole answer (a list) does not add up: 1 of 3 events"),
    ],
)
def test_a_pause_names_unknown_fields_and_no_values(body: bytes, words: str):
    verdict = verdict_on(body)
    assert (verdict.action, verdict.reason) == (Action.PAUSE, "unreadable_answer")
    assert words in verdict.message
    for value in ("192.0.2.9", "alice", "zork"):
        assert value not in verdict.message


@given(st.text(max_size=80), st.sampled_from(["failed", 400, False, {"x": 1}, ["x"]]))
def test_a_message_is_one_short_line_whatever_a_field_is_called(name: str, value: Any):
    verdict = verdict_on(json.dumps({name: value}).encode())
    assert len(verdict.message) < 300
    assert verdict.message.isprintable()


# Answers that are no trouble ------------------------------------------------------------


@each(
    "body",
    [
        b'{"accepted":' + b"9" * 5000 + b"}",
        b'{"code":-' + b"9" * 5000 + b"}",
        *(b'{"accepted":1e400}', b'{"accepted":3,"x":-1e-400}', b'{"accepted":NaN}'),
        *(b'{"status":"\\ud800"}', b'{"\\ud800":"failed"}', b'{"status":"\xff"}', b"\xff\xfe", b"\x00"),
        *(b"[" * 100_000, b'{"a":' * 100_000),
        b'{"a":' * 300 + b"0" + b"}" * 300,
        b"[" * 300 + b"]" * 300,
        b'{"results":[' + b"[" * 200 + b"]" * 200 + b"]}",
        b'{"rejected":[' + b"[1]," * 1000 + b"1]}",
        b'{"errors":' + b'{"errors":' * 200 + b"1" + b"}" * 200 + b"}",
        *(b'{"0":' + b"[" * depth + b"]" * depth + b"}" for depth in range(900, 1_000)),
        *(b'{"":""}', b'{"":[]}', b'{"index":99999999999999999999,"error":"x"}'),
        b'{"rejected":[99999999999999999999, 1e300, -0.0]}',
        b'{"rejected":[null,true,{}]}',
    ],
)
def test_no_content_is_an_error(body: bytes):
    for events in (0, 1, EVENTS):
        for status in (200, 207, 400, 422, 503):
            verdict_on(body, status, events=events)
    assert len(verdict_on(body).message) < 300


@each(
    "piece",
    [
        b'{"index":1,"EventId":"0f8fad5b-d9cb-469f-a165-708677289501","message":"bad"},',
        b'{"a":{"b":{"c":[{"d":"no"}]}}},',
        b'"x",',
        b"1,",
        b'{"error":"' + b"x " * 1000 + b'"},',
        b"[],",
    ],
)
@each("name", [b"rejected", b"results", b"zork", b"accepted"])
def test_the_time_to_read_an_answer_is_bounded_by_the_size_of_the_batch(name: bytes, piece: bytes):
    count = ANSWER_BYTES // 4 // len(piece)
    body = b'{"' + name + b'":[' + piece * count + b"0]}"
    verdict = verdict_on(body)
    assert verdict.action in {Action.PAUSE, Action.BISECT} or verdict.results.rejected
