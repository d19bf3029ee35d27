"""When a batch is closed; every event is in exactly one batch."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec.codec import find_repeats
from shipper.model.records import Batch, EncodedChunk, Span, Stream
from shipper.pipeline.batching import Batcher

STREAM = Stream(stream_id=1, kind="file", path="x")


def chunk(*pairs: tuple[str, int], pad: int = 0, is_known: bool = False) -> EncodedChunk:
    """A chunk of small events with these event and consumer ids."""
    lines = [
        json.dumps({"EventId": event_id, "c": consumer_id, "p": "x" * pad}, separators=(",", ":")).encode()
        for event_id, consumer_id in pairs
    ]
    return EncodedChunk(
        span=Span(stream=STREAM, start_offset=0, end_offset=1, tail=b"", read=len(pairs), unsettled=len(pairs)),
        lines=b"\n".join(lines),
        events=len(pairs),
        consumer_ids=[consumer_id for _, consumer_id in pairs],
        has_new_event_ids=is_known,
        repeats=find_repeats([consumer_id for _, consumer_id in pairs], b"\n".join(lines)),
    )


def batcher(**changes: object) -> Batcher:
    return Batcher(**{"max_events": 10, "max_bytes": 10_000, "linger_s": 1.0, **changes})  # type: ignore[arg-type]


def events(batch: Batch | None) -> list[tuple[str, int]]:
    assert batch is not None
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
    assert batch is not None
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
    assert batch is not None
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
    assert events(loose.take()) == [("a", 1)]


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
        assert batch is not None
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
