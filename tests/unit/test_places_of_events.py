"""The original record is found by its position in the batch, whatever was changed in between."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec.codec import Codec
from shipper.config.settings import RecordsSettings
from shipper.delivery.parts import halves, merge_batches, parts
from shipper.model.framing import LINES as ONE_A_LINE
from shipper.model.framing import BatchElements, CsvRows, Framing
from shipper.model.records import Batch, Chunk, EncodedChunk, Stream
from shipper.model.wire import BODY_HEAD
from shipper.pipeline.batching import Batcher
from tests.cases import each
from tests.unit.test_codec import LATEST, LIMIT, event, line

START = 1000  # of a chunk in the middle of its stream
LINES = [line(number, ConsumerID=number + 1) for number in range(8)]


def pieces_of(
    data: bytes, *, framing: Framing = ONE_A_LINE, start: int = START, room_events: int = 3, **records: Any
) -> Iterable[EncodedChunk]:
    codec = Codec(RecordsSettings(**records), max_record_bytes=LIMIT)
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    chunk = Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)
    offset = start
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=room_events, room_bytes=1 << 20, latest=LATEST)
        assert piece is not None
        yield piece
        offset = piece.span.end_offset


def raws_by_place(data: bytes, **options: Any) -> list[bytes]:
    """Encode, then cut each event out of the data again."""
    found = []
    for piece in pieces_of(data, **options):
        assert len(piece.event_ids) == piece.span.unsettled
        for ordinal in range(piece.span.unsettled):
            start, end = piece.span.bounds_of(ordinal)
            found.append(data[start:end])
    return found


@each(
    ("data", "start", "expected"),
    [
        (b"\n".join(LINES) + b"\n", START, LINES),
        (b"\n".join(LINES), START, LINES),
        (b"\xef\xbb\xbf" + b"\n".join(LINES), 0, LINES),
        (b"\n \n\n" + b"\n".join(LINES), 0, LINES),
        (
            b"\0\0" + LINES[0] + b"\r\n\n  \n{bad\n" + LINES[1] + b"\n" + LINES[2] + b"\n\0\0\0" + LINES[3] + b"\n",
            START,
            [LINES[0] + b"\r", *LINES[1:4]],
        ),
    ],
)
def test_lines_wherever_they_stand(data: bytes, start: int, expected: list[bytes]):
    assert raws_by_place(data, start=start) == expected


@each("form", ["{%s}", "urn:uuid:%s"])
def test_lines_whose_ids_are_put_right(form: str):
    lines = [
        json.dumps(event(EventId=form % f"0F8FAD5B-D9CB-469F-A165-{number:012X}", ConsumerID=number + 1)).encode()
        for number in range(4)
    ]
    assert raws_by_place(b"\n".join(lines)) == lines


def test_lines_whose_ids_are_derived():
    lines = [line(0, EventId="", ConsumerID=number + 1).replace(b'"EventId":"",', b"") for number in range(4)]
    assert raws_by_place(b"\n".join(lines), event_id="derive") == lines


def test_rows():
    names = list(event())
    rows = [
        ",".join(str(event(EventId=json.loads(each)["EventId"])[name]) for name in names).encode() for each in LINES
    ]
    header = ",".join(names).encode() + b"\n"
    data = header + b"\n".join(rows) + b"\n"
    framing = CsvRows(header, ",")
    assert raws_by_place(data, framing=framing, start=0) == rows
    assert raws_by_place(data[len(header) :], framing=framing, start=len(header)) == rows


def test_elements_of_arrays():
    data = BODY_HEAD + b",\n ".join(LINES) + b"]}"
    assert raws_by_place(data, framing=BatchElements(), start=0) == LINES


def test_records_with_the_same_id_have_separate_positions():
    twins = [line(1, ConsumerID=1), line(1, ConsumerID=2)]
    assert raws_by_place(b"\n".join(twins), dedupe_window=0) == twins


def test_the_first_record_of_each_id_precedes_those_that_wait_for_its_answer():
    twins = [line(0, ConsumerID=number) for number in (11, 12)]
    data = b"\n".join([LINES[0], twins[0], LINES[1], twins[1], LINES[2]])
    assert sorted(raws_by_place(data, room_events=10)) == sorted([*LINES[:3], *twins])


KINDS = st.sampled_from(["good", "repeated", "sloppy", "bad", "blank", "same consumer"])


@settings(max_examples=80, deadline=None)
@given(st.lists(KINDS, max_size=40), st.integers(1, 9), st.data())
def test_an_event_keeps_its_position_through_batching_and_splitting(
    kinds: list[str], max_events: int, data: st.DataObject
):
    lines: list[bytes] = []
    wanted: dict[str, list[bytes]] = {}
    for number, kind in enumerate(kinds):
        match kind:
            case "bad":
                lines.append(line(number, IP="no address"))
            case "blank":
                lines.append(b"")
            case "repeated" if wanted:
                first = next(iter(wanted))
                lines.append(line(0, EventId=first, ConsumerID=number + 1))
                wanted[first].append(lines[-1])
            case _:
                consumer: Any = 1 if kind == "same consumer" else str(number + 1) if kind == "sloppy" else number + 1
                lines.append(line(number, ConsumerID=consumer))
                wanted[json.loads(lines[-1])["EventId"]] = [lines[-1]]
    batcher = Batcher(max_events=max_events, max_bytes=1 << 20, linger_s=1)
    batches: list[Batch] = []
    came: set[str] = set()

    def take() -> None:
        batch = batcher.take()
        assert batch is not None
        batches.append(batch)

    for piece in pieces_of(b"\n".join(lines), room_events=max_events):
        assert piece.waits == piece.span.unsettled - len(set(piece.event_ids) - came)
        came |= set(piece.event_ids)
        while len(piece.event_ids) > batcher.room_events:
            take()
        batcher.add(piece, now=0)
    while batcher.due_at is not None or batcher.waiting_ids:
        if batcher.due_at is None:
            assert batcher.release(min(batcher.waiting_ids))  # the one before was refused
        take()
    singles: list[Batch] = []
    while batches:
        batch = batches.pop()
        if batch.events == 1:
            singles.append(batch)
            continue
        cut = data.draw(st.sampled_from([halves, _odd_and_even, _parted_and_merged]))
        batches += cut(batch)
    found: dict[str, list[bytes]] = {}
    for batch in singles:
        ((span, (ordinal,)),) = batch.parts
        assert span.chunk is not None
        start, end = span.bounds_of(ordinal)
        (event,) = json.loads(batch.body)["events"]
        raw = span.chunk.data[start:end]
        assert int(json.loads(raw)["ConsumerID"]) == event["ConsumerID"]
        found.setdefault(event["EventId"], []).append(raw)
    assert {event_id: sorted(raws) for event_id, raws in found.items()} == {
        event_id: sorted(raws) for event_id, raws in wanted.items()
    }


def _odd_and_even(batch: Batch) -> list[Batch]:
    return parts(batch, [range(0, batch.events, 2), range(1, batch.events, 2)])


def _parted_and_merged(batch: Batch) -> list[Batch]:
    return halves(merge_batches(list(reversed(halves(batch)))))
