"""Parsing batches: each event is judged separately, by the code lists of the strict profile."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.model import wire
from shipper.sandbox.intake import Intake, read_batch
from shipper.sandbox.iso import COUNTRIES, CURRENCIES, US_STATES
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


# Code lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codes", "length"), [(COUNTRIES, 2), (CURRENCIES, 3), (US_STATES, 2)])
def test_codes_are_capital_letters(codes, length):
    assert [code for code in codes if not (len(code) == length and code.isascii() and code.isupper())] == []


def test_lists_are_as_long_as_their_standards():
    assert len(COUNTRIES) == 249
    assert len(US_STATES) == 50 + 1 + 6  # the states, the district, the outlying areas


@pytest.mark.parametrize(
    ("codes", "there", "absent"),
    [
        (COUNTRIES, "AX BQ CW GB IE MT SS SX TL US ZW", "AN CS EU SU TP UK XK XX YU ZR"),
        (CURRENCIES, "CHF EUR GBP SEK SLE USD VED XAF XXX ZAR ZWG", "ABC DEM FRF BTC SLL EEK LTL VEF XXY"),
        (US_STATES, "AK CA CO DC GU HI MI NJ NY PA PR WY", "AA AB ON PW US XX ZZ"),
    ],
)
def test_common_codes_are_listed_and_withdrawn_ones_are_not(codes, there, absent):
    assert set(there.split()) <= codes
    assert not set(absent.split()) & codes


def test_samples_have_codes_of_the_lists():
    events = [json.loads(line) for line in sample_lines(500, end=datetime(2026, 3, 15, tzinfo=UTC))]
    assert {event["ConsumerCountry"] for event in events} <= COUNTRIES
    assert {event["ConsumerCurrencyID"] for event in events} <= CURRENCIES
    assert {event["ConsumerState"] for event in events} - {""} <= US_STATES
