"""When a batch is closed, with every event in exactly one; the original record is found by its position in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec.codec import Codec, find_repeats
from shipper.config.settings import RecordsSettings
from shipper.delivery.parts import halves, merge_batches, parts
from shipper.kafka.stream import KafkaStream, Session
from shipper.model.framing import LINES as ONE_A_LINE
from shipper.model.framing import BatchElements, CsvRows, Framing
from shipper.model.records import Batch, EncodedChunk, Span, Stream
from shipper.model.wire import BODY_HEAD
from shipper.pipeline.batching import Batcher
from tests.cases import each
from tests.unit.test_codec import LIMIT, MISSING, chunk_of, event, line, pieces_of

STREAM = Stream(stream_id=1, kind="file", path="x")


def chunk(*pairs: tuple[str, int], pad: int = 0, is_known: bool = False) -> EncodedChunk:
    """A chunk of small events with these event and consumer ids."""
    lines = b"\n".join(
        b'{"EventId":"%b","c":%d,"p":"%b"}' % (key.encode(), number, b"x" * pad) for key, number in pairs
    )
    consumer_ids = [consumer_id for _, consumer_id in pairs]
    return EncodedChunk(
        span=Span(stream=STREAM, start_offset=0, end_offset=1, tail=b"", read=len(pairs), unsettled=len(pairs)),
        lines=lines,
        events=len(pairs),
        consumer_ids=consumer_ids,
        has_new_event_ids=is_known,
        repeats=find_repeats(consumer_ids, lines),
    )


def batcher(**changes: object) -> Batcher:
    return Batcher(**{"max_events": 10, "max_bytes": 10_000, "linger_s": 1.0, **changes})  # type: ignore[arg-type]


def events(batch: Batch | None) -> list[tuple[str, int]]:
    return [(event["EventId"], event["c"]) for event in json.loads(batch.body)["events"]]


def test_no_events_make_no_batch():
    empty = batcher()
    empty.add(chunk(), now=1)
    assert empty.take() is None
    assert empty.due_at is None


def test_a_batch_is_full_at_its_last_event_and_counts_from_one():
    full = batcher(max_events=2)
    full.add(chunk(("a", 1)), now=0)
    assert not full.is_full
    full.add(chunk(("b", 2)), now=0)
    assert full.is_full
    batch = full.take()
    assert (batch.number, batch.events, full.room_events) == (1, 2, 2)


def test_linger_counts_from_the_first_event_and_is_not_renewed():
    lingering = batcher(linger_s=1.5)
    lingering.add(chunk(("a", 1)), now=10)
    lingering.add(chunk(("b", 2)), now=11)
    assert lingering.due_at == 11.5
    lingering.take()
    assert lingering.due_at is None


def test_the_room_is_the_space_left_in_the_request_body():
    sized = batcher()
    room = sized.room_bytes
    sized.add(chunk(("a", 1), ("b", 2), pad=50), now=0)
    batch = sized.take()
    lines = chunk(("a", 1), ("b", 2), pad=50).lines
    assert len(batch.body) == 10_000 - room + len(lines)


def test_a_second_event_of_a_consumer_waits_without_delaying_others():
    unique = batcher()
    unique.add(chunk(("a", 1), ("b", 1), ("c", 2)), now=5)
    assert events(unique.take()) == [("a", 1), ("c", 2)]
    assert unique.due_at == 6, "it lingers since it came"
    unique.add(chunk(("d", 3)), now=7)
    assert events(unique.take()) == [("b", 1), ("d", 3)]


def test_consumers_may_repeat_if_allowed_but_event_ids_never():
    loose = batcher(unique_consumers=False)
    loose.add(chunk(("a", 1), ("b", 1)), now=0)
    loose.add(chunk(("a", 1), ("c", 1)), now=0)
    assert events(loose.take()) == [("a", 1), ("b", 1), ("c", 1)]
    second = loose.take()
    assert second is not None
    assert (events(second), second.events_before) == ([("a", 1)], 3)


def test_events_are_counted_anew_once_a_stream_is_taken_over():
    counting = batcher(max_events=1)
    other = KafkaStream(stream_id=2, path="t/0", topic="t", partition=0, topic_id="i", first=0, session=Session())
    before = []
    for number, stream in enumerate([STREAM, STREAM, other, other, STREAM]):
        encoded = chunk((f"{number}", number))
        encoded.span.stream = stream
        counting.add(encoded, now=0)
        batch = counting.take()
        assert batch is not None
        before.append(batch.events_before)
    assert before == [0, 1, 0, 1, 2]


def test_many_events_of_one_consumer_congest_the_batcher_and_are_sent_one_by_one():
    crowded = batcher(max_events=3)
    crowded.add(chunk(("a", 1), ("b", 1), ("c", 1)), now=0)
    assert not crowded.is_congested
    crowded.add(chunk(("d", 1), ("e", 1)), now=0)
    assert crowded.is_congested
    left = []
    while crowded.due_at is not None:
        left.append(events(crowded.take()))
    assert left == [[("a", 1)], [("b", 1)], [("c", 1)], [("d", 1)], [("e", 1)]]


def test_long_waiting_events_congest_the_batcher_by_their_bytes():
    crowded = batcher(max_events=1000, max_bytes=2000)
    crowded.add(chunk(("a", 1), pad=800), now=0)
    crowded.add(chunk(("b", 1), pad=800), now=0)
    crowded.add(chunk(("c", 1), pad=800), now=0)
    assert not crowded.is_congested
    crowded.add(chunk(("d", 1), pad=800), now=0)
    assert crowded.is_congested
    crowded.take()
    assert not crowded.is_congested


def test_waiting_events_are_sent_after_a_refusal_and_returned_as_duplicates_after_an_acceptance():
    waiting = batcher()
    twins = msgspec.structs.replace(chunk(("a", 1), ("b", 2), ("a", 3), ("a", 4), is_known=True), waits=2)
    waiting.add(twins, now=0)
    assert events(waiting.take()) == [("a", 1), ("b", 2)]
    assert (waiting.take(), waiting.due_at, waiting.waiting_ids) == (None, None, {"a"})
    assert not waiting.release("b")
    assert waiting.release("a")
    assert waiting.due_at == 1, "it lingers since it came"
    assert events(waiting.take()) == [("a", 3)]
    assert [event.ordinal for event in waiting.drop("a")] == [3]
    assert not waiting.waiting_ids
    assert list(waiting.drop("a")) == []


def test_events_with_empty_event_ids_may_share_a_batch():
    nameless = batcher()
    nameless.add(chunk(("", 1), ("", 2), is_known=True), now=0)
    nameless.add(chunk(("", 3), ("", 3)), now=0)
    nameless.add(chunk(("", 4), is_known=True), now=0)
    assert events(nameless.take()) == [("", 1), ("", 2), ("", 3), ("", 4)]
    assert events(nameless.take()) == [("", 3)]


PAIRS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 6)), max_size=6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(PAIRS, st.integers(0, 60)), max_size=12), st.integers(1, 6), st.booleans())
def test_every_event_is_sent_once_and_no_batch_exceeds_a_limit(
    chunks: list[tuple[list[tuple[str, int]], int]], max_events: int, unique_consumers: bool
):
    model = batcher(max_events=max_events, max_bytes=600, unique_consumers=unique_consumers)
    came: list[tuple[str, int]] = []
    left: list[tuple[str, int]] = []
    parts: dict[int, list[int]] = {}
    spans: dict[int, Span] = {}

    def take() -> None:
        batch = model.take()
        assert len(batch.body) <= 600
        out = events(batch)
        assert 0 < len(out) == batch.events <= max_events
        assert len({event_id for event_id, _ in out}) == len(out)
        assert not unique_consumers or len({consumer_id for _, consumer_id in out}) == len(out)
        for span, ordinals in batch.parts:
            spans[id(span)] = span
            parts.setdefault(id(span), []).extend(ordinals)
        left.extend(out)

    for pairs, pad in chunks:
        for pair in pairs:
            each = chunk(pair, pad=pad)
            while model.is_full or len(each.lines) + 1 > model.room_bytes:
                take()
            model.add(each, now=0)
            came.append(pair)
            while model.is_congested:
                take()
    while model.due_at is not None:
        take()
    assert sorted(left) == sorted(came)
    assert all(sorted(parts[key]) == list(range(span.unsettled)) for key, span in spans.items())
    assert model.take() is None


# Positions ------------------------------------------------------------------------------------------------------------


START = 1000  # of a chunk in the middle of its stream
LINES = [line(number, ConsumerID=number + 1) for number in range(8)]


def encoded(
    data: bytes, *, framing: Framing = ONE_A_LINE, start: int = START, room_events: int = 3, **records: Any
) -> Iterator[EncodedChunk]:
    codec = Codec(RecordsSettings(**records), max_record_bytes=LIMIT)
    return pieces_of(codec, chunk_of(data, start=start, framing=framing), room_events=room_events)


def raws_by_place(data: bytes, **options: Any) -> list[bytes]:
    """Encode, then cut each event out of the data again."""
    found = []
    for piece in encoded(data, **options):
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
        *((begin + b"\n".join(LINES), 0, LINES) for begin in (b"\xef\xbb\xbf", b"\n \n\n")),
        (b"\0\0%b\r\n\n  \n{bad\n%b\n\0\0\0%b\n" % tuple(LINES[:3]), START, [LINES[0] + b"\r", *LINES[1:3]]),
    ],
)
def test_a_line_has_its_position_wherever_it_stands(data: bytes, start: int, expected: list[bytes]):
    assert raws_by_place(data, start=start) == expected


@each("form", ["{%s}", "urn:uuid:%s"])
def test_a_line_whose_id_is_put_right_has_its_position(form: str):
    ids = [form % f"0F8FAD5B-D9CB-469F-A165-{number:012X}" for number in range(4)]
    lines = [line(EventId=event_id, ConsumerID=number) for number, event_id in enumerate(ids, start=1)]
    assert raws_by_place(b"\n".join(lines)) == lines


def test_a_line_whose_id_is_derived_has_its_position():
    lines = [line(EventId=MISSING, ConsumerID=number) for number in range(1, 5)]
    assert raws_by_place(b"\n".join(lines), event_id="derive") == lines


def test_a_row_has_its_position():
    names = list(event())
    rows = [",".join(map(str, json.loads(each).values())).encode() for each in LINES]
    header = ",".join(names).encode() + b"\n"
    data = header + b"\n".join(rows) + b"\n"
    framing = CsvRows(header, ",")
    assert raws_by_place(data, framing=framing, start=0) == rows
    assert raws_by_place(data[len(header) :], framing=framing, start=len(header)) == rows


def test_an_element_of_an_array_has_its_position():
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
        batches.append(batch)

    for piece in encoded(b"\n".join(lines), room_events=max_events):
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
    found: dict[str, list[bytes]] = defaultdict(list)
    for batch in singles:
        ((span, (ordinal,)),) = batch.parts
        start, end = span.bounds_of(ordinal)
        (event,) = json.loads(batch.body)["events"]
        raw = span.chunk.data[start:end]
        assert int(json.loads(raw)["ConsumerID"]) == event["ConsumerID"]
        found[event["EventId"]].append(raw)
    assert {key: sorted(raws) for key, raws in found.items()} == {key: sorted(raws) for key, raws in wanted.items()}


def _odd_and_even(batch: Batch) -> list[Batch]:
    return parts(batch, [range(0, batch.events, 2), range(1, batch.events, 2)])


def _parted_and_merged(batch: Batch) -> list[Batch]:
    return halves(merge_batches(list(reversed(halves(batch)))))
