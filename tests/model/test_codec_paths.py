"""The fast path over many lines and the slow path over one give the same verdict on every record."""

from __future__ import annotations

import ipaddress
import json
import re
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec import Codec
from shipper.pipeline.batching import Batcher
from tests.fakes import strict_records
from tests.unit.test_codec import BTAG_HEX, LATEST, encode, good_lines, line

MAX_RECORD_BYTES = 1500

GOOD_LINES = st.builds(
    lambda number, name, pad: line(number, Username=name or "x").replace(b",", b"," + pad),
    st.integers(0, 50),
    st.text(max_size=20),
    st.sampled_from([b"", b" ", b"  "]),
)


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """A good line to which something was done."""
    data = bytearray(draw(GOOD_LINES))
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "insert", "cut", "drop", "double"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(
                    st.sampled_from([b"{", b"}", b'"', b",", b"\\", b"null", b"0", b"\0", b"\xff", b"},{"])
                )
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 40))]
            case _:
                data += b"," + data[:at]
    return bytes(data)


LINES = st.lists(
    st.one_of(GOOD_LINES, GOOD_LINES, mutated_lines(), st.sampled_from([b"", b"\r", b"null", b"{}", b"x" * 2000])),
    min_size=1,
    max_size=30,
)
# Edits may have put newlines into a line: what counts is what stands between newlines in the end.
CHUNKS = LINES.map(b"\n".join)


def codec() -> Codec:
    return Codec(strict_records(0), max_record_bytes=MAX_RECORD_BYTES)


def alone(raw: bytes) -> tuple[bool, str]:
    """The verdict on one line: whether it is a record, and the rule that it breaks."""
    (piece,) = encode(raw + b"\n", start=1, codec=codec())
    rules = [rejection.rule for rejection in piece.span.rejections]
    return piece.span.records == 1, rules[0] if rules else ""


@settings(max_examples=60, deadline=None)
@given(CHUNKS, st.integers(1, 40), st.integers(2200, 20_000), st.booleans())
def test_many_lines_get_the_verdicts_that_each_gets_alone(
    data: bytes, room_events: int, room_bytes: int, has_newline: bool
):
    pieces = encode(data + b"\n" * has_newline, start=1, codec=codec(), room_events=room_events, room_bytes=room_bytes)
    raws = data.split(b"\n")
    verdicts = [(raw, *alone(raw)) for raw in raws]
    assert good_lines(pieces) == [raw.lstrip(b"\0") for raw, is_record, rule in verdicts if is_record and not rule]
    refused = [(rejection.raw, rejection.rule) for piece in pieces for rejection in piece.span.rejections]
    assert [rule for _, rule in refused] == [rule for _, is_record, rule in verdicts if is_record and rule]
    assert sum(piece.span.records for piece in pieces) == sum(is_record for _, is_record, _ in verdicts)
    for piece in pieces:
        assert len(piece.event_ids) + len(piece.span.rejections) <= room_events
        for rejection in piece.span.rejections:
            assert data[rejection.start_offset - 1 : rejection.end_offset - 1] == rejection.raw


@settings(max_examples=40, deadline=None)
@given(CHUNKS)
def test_bodies_are_json_and_hold_the_accepted_lines_byte_for_byte(data: bytes):
    pieces = encode(data, start=1, codec=codec())
    batcher = Batcher(max_events=7, max_bytes=1 << 20, linger_s=1)
    accepted = good_lines(pieces)
    sent: list[dict[str, Any]] = []
    for piece in encode(b"\n".join(accepted), start=1, codec=codec(), room_events=7) if accepted else []:
        while len(piece.event_ids) > batcher.room_events:
            _read(batcher, sent, accepted)
        batcher.add(piece, now=0)
    while batcher.due_at is not None:
        _read(batcher, sent, accepted)
    key = lambda document: json.dumps(document, sort_keys=True)  # noqa: E731
    assert sorted(sent, key=key) == sorted((json.loads(raw) for raw in accepted), key=key)


def _read(batcher: Batcher, sent: list[dict[str, Any]], accepted: list[bytes]) -> None:
    batch = batcher.take()
    assert batch is not None
    document = json.loads(batch.body)
    assert document["EventType"] == "Acquisition"
    assert len(document["events"]) == batch.events == sum(len(ordinals) for _, ordinals in batch.parts)
    assert sum(raw in batch.body for raw in set(accepted)) >= len({event["EventId"] for event in document["events"]})
    sent += document["events"]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_whatsoever_raise(data: bytes):
    encode(data, codec=codec()) if data else None


OCTETS = st.sampled_from(
    ["0", "1", "9", "10", "99", "100", "199", "249", "250", "255", "256", "300", "01", "", " 1", "-1", "1.1"]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "IP": st.lists(OCTETS, min_size=3, max_size=5).map(".".join),
    "Timestamp": st.builds(
        "{:04}-{:02}-{:02}{}{:02}:{:02}:{:02}{}".format,
        st.sampled_from([1999, 2000, 2024, 2025, 2026]),
        st.integers(0, 13),
        st.integers(0, 32),
        st.sampled_from("TTTTt "),
        st.integers(0, 24),
        st.integers(0, 60),
        st.integers(0, 61),
        st.sampled_from("ZZZZz"),
    ),
    "BTag": st.builds(
        lambda digits, tail: digits + tail,
        st.sampled_from(["", "1", "007", "x", "1_", "\n"]),
        st.sampled_from([f"_{BTAG_HEX}", BTAG_HEX, f"_{BTAG_HEX[1:]}", f"_{BTAG_HEX}\n", f"_{BTAG_HEX.upper()}"]),
    ),
    "EventId": st.text("0123456789abcdefA-", min_size=35, max_size=37)
    | st.uuids().map(str)
    | st.uuids().map(lambda each: str(each).upper()),
}


def is_good(field: str, value: str) -> bool:
    """Judge once more, plainly and slowly, with other means than the codec's."""
    match field:
        case "IP":
            try:
                return str(ipaddress.IPv4Address(value)) == value
            except ValueError:
                return False
        case "Timestamp":
            try:
                instant = datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            except ValueError:
                return False
            is_canonical = instant.strftime("%Y-%m-%dT%H:%M:%SZ") == value
            return is_canonical and instant <= datetime.fromisoformat(LATEST)
        case "BTag":
            return re.fullmatch(r"[0-9]+_[0-9a-fA-F]{32}", value) is not None
        case _:
            return re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value) is not None


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FIELDS)).flatmap(lambda field: st.tuples(st.just(field), FIELDS[field])))
def test_an_independent_oracle_agrees(case: tuple[str, str]):
    field, value = case
    _, rule = alone(line(1, **{field: value}))
    assert (rule == "") == is_good(field, value)
