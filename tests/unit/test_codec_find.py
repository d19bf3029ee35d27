"""A record that the service refuses is found again as it came, whatever became of it on its way."""

from __future__ import annotations

import json

import pytest

from shipper.codec import Codec
from shipper.config import RecordsSettings
from shipper.framing import BatchElements, CsvRows, Framing, Lines
from shipper.records import Chunk, Rejection, Span, Stream
from shipper.wire import BODY_HEAD
from tests.unit.test_codec import LATEST, LIMIT, event, line

START = 1000  # of a chunk in the middle of its stream


def spans_of(
    codec: Codec, data: bytes, framing: Framing, *, start: int, room_events: int
) -> list[tuple[Span, list[str]]]:
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)
    found = []
    offset = start
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=room_events, room_bytes=1 << 20, latest=LATEST)
        assert piece is not None
        found.append((piece.span, piece.event_ids))
        offset = piece.span.end_offset
    return found


def found_raws(
    data: bytes, *, framing: Framing | None = None, start: int = START, room_events: int = 3, **settings: object
) -> list[bytes]:
    """Encode, then find each event again by the EventId with which it is sent."""
    codec = Codec(RecordsSettings(**settings), max_record_bytes=LIMIT)  # type: ignore[arg-type]
    raws = []
    for span, event_ids in spans_of(codec, data, framing or Lines(), start=start, room_events=room_events):
        for event_id in event_ids:
            frame = codec.find(span, {"EventId": event_id})
            assert frame is not None
            raws.append(data[frame.start : frame.end])
    return raws


LINES = [line(number, ConsumerID=number + 1) for number in range(8)]


def test_lines_that_leave_as_they_came():
    assert found_raws(b"\n".join(LINES) + b"\n") == LINES
    assert found_raws(b"\n".join(LINES)) == LINES


def test_lines_with_carriage_returns_blank_lines_bad_neighbours_and_holes_between():
    data = b"\0\0" + LINES[0] + b"\r\n\n  \n{bad\n" + LINES[1] + b"\n" + LINES[2] + b"\n\0\0\0" + LINES[3] + b"\n"
    assert found_raws(data) == [LINES[0] + b"\r", *LINES[1:4]]


def test_lines_behind_a_byte_order_mark():
    assert found_raws(b"\xef\xbb\xbf" + b"\n".join(LINES), start=0) == LINES


@pytest.mark.parametrize("form", ["{%s}", "urn:uuid:%s"])
def test_lines_whose_ids_are_put_right(form: str):
    lines = [
        json.dumps(event(EventId=form % f"0F8FAD5B-D9CB-469F-A165-{number:012X}", ConsumerID=number + 1)).encode()
        for number in range(4)
    ]
    assert found_raws(b"\n".join(lines)) == lines


def test_lines_whose_ids_are_derived():
    lines = [line(0, EventId="", ConsumerID=number + 1).replace(b'"EventId":"",', b"") for number in range(4)]
    assert found_raws(b"\n".join(lines), event_id="derive") == lines


def test_rows():
    names = list(event())
    rows = [
        ",".join(str(event(EventId=json.loads(each)["EventId"])[name]) for name in names).encode() for each in LINES
    ]
    header = ",".join(names).encode() + b"\n"
    data = header + b"\n".join(rows) + b"\n"
    framing = CsvRows(header, ",")
    assert found_raws(data, framing=framing, start=0) == rows
    assert found_raws(data[len(header) :], framing=framing, start=len(header)) == rows


def test_elements_of_arrays():
    data = BODY_HEAD + b",\n ".join(LINES) + b"]}"
    assert found_raws(data, framing=BatchElements(), start=0) == LINES


def test_of_two_records_with_one_id_each_is_found_once():
    twins = [line(1, ConsumerID=1), line(1, ConsumerID=2)]
    codec = Codec(RecordsSettings(dedupe_window=0), max_record_bytes=LIMIT)
    ((span, event_ids),) = spans_of(codec, b"\n".join(twins), Lines(), start=0, room_events=5)
    assert event_ids[0] == event_ids[1]

    first = codec.find(span, {"EventId": event_ids[0]})
    assert first is not None
    span.rejections.append(
        Rejection(start_offset=first.start, end_offset=first.end, rule="rejected", message="", raw=b"")
    )
    second = codec.find(span, {"EventId": event_ids[1]})
    assert second is not None
    assert second.start > first.start


def test_a_record_that_is_not_there_is_not_found():
    codec = Codec(RecordsSettings(), max_record_bytes=LIMIT)
    ((span, _),) = spans_of(codec, b"\n".join(LINES), Lines(), start=0, room_events=50)
    assert codec.find(span, {"EventId": "0f8fad5b-d9cb-469f-a165-ffffffffffff"}) is None
