"""Parsing batches: each event is judged separately."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.model import wire
from shipper.sandbox.intake import Intake, read_batch
from shipper.sandbox.samples import sample_lines

NOW = 1_773_577_807.25  # 2026-03-15T12:30:07.25Z
GOOD = [json.loads(line) for line in sample_lines(2, end=datetime.fromtimestamp(NOW, UTC))]


def event(**fields: object) -> bytes:
    return json.dumps({**GOOD[0], **fields}).encode()


def read(events: list[bytes], **how: object) -> Intake:
    batch = read_batch(
        wire.BODY_HEAD + b",".join(events) + wire.BODY_TAIL, **{"is_strict": False, "now_seconds": NOW, **how}
    )
    assert isinstance(batch, Intake)
    assert sorted([*batch.accepted, *(refused.index for refused in batch.rejected)]) == list(range(len(events)))
    return batch


def faults(events: list[bytes], **how: object) -> dict[int, str]:
    return {refused.index: f"{refused.field}: {refused.message}" for refused in read(events, **how).rejected}


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
def test_any_body_is_a_batch_or_refused(content: bytes):
    batch = read_batch(content, is_strict=True, now_seconds=NOW)
    assert isinstance(batch, Intake) or (batch.status == 400 and batch.message)


def test_first_broken_rule_is_named_in_the_order_form_public_rules_repeats():
    assert faults([event(BTag="x", IP="x", Timestamp="2026-02-30T00:00:00Z")]) == {
        0: "IP: must be an IPv4 address in dotted-decimal form"
    }
    events = [event(IP="x", ConsumerCountry="XX"), event(ConsumerCountry="XX", ConsumerState=""), event()]
    found = faults(events, is_strict=True, is_known=lambda event_id: True)
    assert [fault.partition(":")[0] for fault in found.values()] == ["IP", "ConsumerCountry", "EventId"]
