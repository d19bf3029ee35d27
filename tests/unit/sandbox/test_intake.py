"""Batches taken apart: the fast path and the single one are of one mind."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.model import wire
from shipper.sandbox.gateway import Refusal
from shipper.sandbox.intake import Intake, RejectedEvent, read_batch
from shipper.sandbox.samples import sample_lines
from tests.cases import each

NOW = 1_773_577_807.25  # 2026-03-15T12:30:07.25Z
GOOD = [json.loads(line) for line in sample_lines(6, end=datetime.fromtimestamp(NOW, UTC))]
NO_EVENT = b"{}"  # has its neighbours judged one by one
TAG = "a" * 32
NASTY = {
    "EventId": [
        *("", "0" * 36, "-" * 36, "x" * 36, GOOD[0]["EventId"].upper(), GOOD[0]["EventId"][:-1] + "\n"),
        *("\n" + GOOD[0]["EventId"][1:], GOOD[0]["EventId"] + "\n", GOOD[0]["EventId"][:-1] + "é", None, 5),
        *("00000000-0000-0000-0000-000000000000", "0000000-00000-0000-0000-000000000000"),
    ],
    "IP": [
        *(
            "0.0.0.0",
            "255.255.255.255",
            "256.0.0.1",
            "1.2.3",
            "1.2.3.4.5",
            "01.2.3.4",
            "1.2.3.4 ",
            "1.2.3.4\n",
            "\n1.2.3.4",
        ),
        *("1.2.3.4\n5.6.7.8", "1.2.3.4\r", "", "\n", ".", "...", "::1", "\u0661.2.3.4", "1.2.3.²", "1.2.3.4\u2028"),
        *(None, 1),
    ],
    "Timestamp": [
        *("2026-03-01T00:00:00Z", "2026-02-29T00:00:00Z", "2024-02-29T00:00:00Z", "2026-13-01T00:00:00Z"),
        *("2026-03-01T24:00:00Z", "2026-03-01T23:59:60Z", "2026-03-01T23:60:00Z", "0000-01-01T00:00:00Z"),
        *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-03-01t00:00:00z", "2026-03-01 00:00:00Z"),
        *("2026-03-01T00:00:00\n", "\n026-03-01T00:00:00Z", '2026-03-01T00:00:0"Z', "2026-03-01T00:00:0\u0660Z"),
        *("", None),
        *("2026-03-15T12:30:07Z", "2026-03-15T12:30:08Z", "2026-00-01T00:00:00Z", "2026-03-00T00:00:00Z"),
    ],
    "BTag": [
        *(
            f"1_{TAG}",
            f"1_{TAG.upper()}",
            f"{'9' * 99}_{TAG}",
            f"1_{TAG}\n",
            f"\n1_{TAG}",
            f"1_{TAG}\n2_{TAG}",
            f"_{TAG}",
        ),
        *(
            f"1__{TAG}",
            f"-1_{TAG}",
            f"1_{TAG}b",
            f"1_{TAG[1:]}",
            f"1_{TAG[1:]}g",
            f"²_{TAG}",
            f"1_{TAG[1:]}é",
            "",
            None,
        ),
    ],
    "ConsumerID": [0, 1, 2**63 - 1, 2**63, -1, 1.0, 1.5, "1", None, True, 10**30],
    "ConsumerCountry": ["GB", "US", "XX", "gb", "GBR", "", "G\n", None, "\uff27\uff22"],
    "ConsumerCurrencyID": ["EUR", "ABC", "eur", "EURO", "", "EU\n", None],
    "Username": ["x", "", "\n", "\0", "é", "\U0001f600", "x" * 10_000, None, 5],
    "BrandID": [0, 1, 2**63 - 1, 2**63, "11", None],
    "CustomerCurrencyID": ["", "1", 1, None],
    "ConsumerStatus": ["Verified", "", "other", None],
    "AffiliateID": ["", "7", 7, None],
    "ConsumerState": ["", "NJ", "ZZ", "nj", "N", "NJX", None],
    "Surname": ["unasked"],
}
CASES = [(field, value) for field, values in NASTY.items() for value in [*values, ...]]


def event(**fields: object) -> bytes:
    document = {**GOOD[0], **fields}
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode()


def body(events: list[bytes]) -> bytes:
    return wire.BODY_HEAD + b",".join(events) + wire.BODY_TAIL


def read(events: list[bytes], *, is_strict: bool = False, is_known=None) -> Intake:
    batch = read_batch(body(events), is_strict=is_strict, now_seconds=NOW, is_known=is_known)
    assert isinstance(batch, Intake)
    assert sorted([*batch.indexes, *(each.index for each in batch.rejected)]) == list(range(len(events)))
    stored = msgspec.json.decode(batch.body)["events"]
    assert stored == [json.loads(events[index]) for index in batch.indexes]
    assert [each.EventId for each in batch.events] == [each["EventId"] for each in stored]
    return batch


def verdicts(events: list[bytes], **how: object) -> list[str]:
    """Return for each event what is wrong with it: the field and the rule, or nothing."""
    found = dict.fromkeys(range(len(events)), "")
    for refused in read(events, **how).rejected:
        assert refused.message
        found[refused.index] = f"{refused.field}: {refused.message}"
    return list(found.values())


# One event, both ways


@each("is_strict", [False, True])
@each(("field", "value"), CASES)
def test_event_is_judged_the_same_alone_and_beside_a_bad_one(field, value, is_strict):
    if field == "Surname" and value is ...:
        return
    candidate = event(**{field: value})
    (alone,) = verdicts([candidate], is_strict=is_strict)
    (beside, other) = verdicts([candidate, NO_EVENT], is_strict=is_strict)
    assert alone == beside
    assert other
    assert alone == "" or alone.startswith(f"{field}: ") or (is_strict and alone.startswith("ConsumerState: "))


@each(("field", "value"), CASES)
def test_event_is_judged_the_same_first_and_last_among_good_ones(field, value):
    if field == "Surname" and value is ...:
        return
    candidate = event(**{field: value})
    good = [json.dumps(each).encode() for each in GOOD[1:]]
    (alone,) = verdicts([candidate])
    for place in (0, 3, len(good)):
        assert verdicts([*good[:place], candidate, *good[place:]])[place] == alone


# Chance finds values that no table has

ALPHABET = st.sampled_from(list('0123456789abcdefABCDEFgZT.:_-+ \n\r\0\u2028é٣²"'))


@st.composite
def mutated(draw: st.DrawFn, field: str) -> str:
    """Take a good value and change it in a few places, or put several together."""
    value = str(GOOD[draw(st.integers(0, 5))][field])
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(value)))
        match draw(st.sampled_from(["insert", "replace", "remove", "double"])):
            case "insert":
                value = value[:place] + draw(ALPHABET) + value[place:]
            case "replace":
                value = value[:place] + draw(ALPHABET) + value[place + 1 :]
            case "remove":
                value = value[:place] + value[place + 1 :]
            case "double":
                value = value + draw(ALPHABET) + value
    return value


FORMED = ("EventId", "IP", "Timestamp", "BTag")
EVENTS = st.builds(
    lambda base, fields: json.dumps({**GOOD[base], **fields}).encode(),
    st.integers(0, 5),
    st.one_of(
        st.fixed_dictionaries({}, optional={field: mutated(field) for field in FORMED}),
        st.sampled_from(CASES).filter(lambda case: case[1] is not ...).map(lambda case: {case[0]: case[1]}),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=4))
def test_no_event_s_verdict_depends_on_its_neighbours(events):
    together = verdicts(events)
    assert together == [verdicts([each])[0] for each in events]
    assert together == verdicts([*events, NO_EVENT])[:-1]


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_strict_verdict_is_the_same_both_ways(candidate):
    assert verdicts([candidate], is_strict=True) == verdicts([candidate, NO_EVENT], is_strict=True)[:1]


@settings(max_examples=80, deadline=None)
@given(
    st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["EventType", "events", "x"]), inner)
        ),
        max_leaves=5,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_a_batch_or_refused(content):
    batch = read_batch(content, is_strict=True, now_seconds=NOW)
    assert isinstance(batch, Intake) or (batch.status == 400 and batch.message)


# What is stored


def test_good_batch_is_kept_as_it_came():
    content = b' { "more": [1],\n"events":[ ' + event() + b' ] , "EventType":"Acquisition"}'
    batch = read_batch(content, is_strict=True, now_seconds=NOW)
    assert (batch.body, list(batch.indexes), batch.rejected) == (content, [0], [])


def test_of_a_mixed_batch_the_good_events_are_kept_byte_for_byte():
    spaced = b"{ " + event()[1:-1] + b"\n}"
    other = json.dumps(GOOD[1]).encode()
    batch = read_batch(body([NO_EVENT, spaced, b"5", other]), is_strict=False, now_seconds=NOW)
    assert batch.body == body([spaced, other])
    assert list(batch.indexes) == [1, 3]


def test_rejected_event_has_its_id_as_far_as_it_has_one():
    events = [event(IP="x"), event(EventId=5, IP="x"), b"[]", b'{"EventId":"\xff"}', b'{"EventId":"short"}']
    batch = read_batch(body(events), is_strict=False, now_seconds=NOW)
    assert [each.EventId for each in batch.rejected] == [GOOD[0]["EventId"], "", "", "", "short"]


def test_first_broken_field_is_named_in_the_order_of_the_rules():
    batch = read_batch(
        body([event(BTag="x", IP="x", Timestamp="2026-02-30T00:00:00Z")]), is_strict=False, now_seconds=0
    )
    message = "must be an IPv4 address in dotted-decimal form"
    assert batch.rejected == [RejectedEvent(0, GOOD[0]["EventId"], "IP", message)]


def test_form_comes_before_the_public_rules_and_those_before_repeats():
    events = [event(IP="x", ConsumerCountry="XX"), event(ConsumerCountry="XX", ConsumerState=""), event()]
    found = verdicts(events, is_strict=True, is_known=lambda event_id: True)
    assert [each.partition(":")[0] for each in found] == ["IP", "ConsumerCountry", "EventId"]


@pytest.mark.parametrize("neighbours", [[], [NO_EVENT]])
def test_known_event_is_a_fault_if_that_was_asked_for(neighbours):
    one, two = event(), json.dumps(GOOD[1]).encode()
    known = {GOOD[1]["EventId"]}
    assert verdicts([one, two, *neighbours])[:2] == ["", ""]
    found = verdicts([one, two, one, *neighbours], is_known=known.__contains__)
    assert found[:3] == ["", "EventId: has been received before", "EventId: has been received before"]


@each("content", [b"", b"{}", b'{"EventType":"Acquisition","events":[{]}', b"[" * 100_000, b"\xff"])
def test_what_is_no_batch_is_refused_with_the_reason(content):
    found = read_batch(content, is_strict=False, now_seconds=NOW)
    assert isinstance(found, Refusal)
    assert found.status == 400
    assert found.message.startswith("The body is not a batch of events: ")
