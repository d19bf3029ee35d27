"""The watermark against a small model: it never passes an unsettled span, whatever the order of settlement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shipper.model.records import Batch, Chunk, Rejection, Span, Stream
from shipper.pipeline.settlement import Acks, estimate_bytes
from shipper.state.ledger import sum_tallies

CHUNK_BYTES = 1000


def counted(spans: list[Span]) -> Counter[str]:
    return Counter(
        read=sum(span.read for span in spans),
        accepted=sum(span.accepted for span in spans),
        duplicates=sum(span.duplicates for span in spans),
        rejections=sum(len(span.rejections) for span in spans),
    )


class Settling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.acks = Acks()
        self.streams = [Stream(stream_id=number, kind="file", path="x") for number in (1, 2)]
        self.spans: dict[int, list[Span]] = {1: [], 2: []}
        self.owed: list[tuple[Span, Sequence[int]]] = []
        self.saved = {1: 0, 2: 0}
        self.handed: Counter[str] = Counter()
        self.chunks = {1: self.chunk(1), 2: self.chunk(2)}

    def chunk(self, number: int) -> Chunk:
        return Chunk(stream=self.streams[number - 1], start_offset=0, end_offset=0, data=b"x" * CHUNK_BYTES)

    @rule(number=st.sampled_from([1, 2]))
    def read_on(self, number: int) -> None:
        self.chunks[number] = self.chunk(number)

    @rule(number=st.sampled_from([1, 2]), good=st.integers(0, 3), bad=st.integers(0, 2), repeated=st.integers(0, 2))
    def open(self, number: int, good: int, bad: int, repeated: int) -> None:
        spans = self.spans[number]
        start = spans[-1].end_offset if spans else 0
        rejections = [
            Rejection(start_offset=start, end_offset=start + 1, rule="ip", message="", raw=b"") for _ in range(bad)
        ]
        span = Span(
            stream=self.streams[number - 1],
            start_offset=start,
            end_offset=start + 10,
            tail=b"t",
            read=good + bad + repeated,
            unsettled=good,
            duplicates=repeated,
            rejections=rejections,
            chunk=self.chunks[number] if good else None,
            sent_bytes=good,
            ledger=[{("2026-10-01T22", each, "", "1"): 1 for each in range(good)}],
        )
        spans.append(span)
        self.acks.open(span, 0.0)
        self.owed += [(span, [ordinal]) for ordinal in range(good)]

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(3, len(self.owed))))
        parts = [self.owed.pop(data.draw(st.integers(0, len(self.owed) - 1))) for _ in range(count)]
        self.acks.accept(Batch(number=1, body=b"", events=count, parts=parts))

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        span, _ = self.owed.pop(data.draw(st.integers(0, len(self.owed) - 1)))
        refused = Rejection(start_offset=span.start_offset, end_offset=span.end_offset, rule="x", message="y", raw=b"z")
        self.acks.reject(span, refused, None)

    @precondition(lambda self: self.owed)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        span, _ = self.owed.pop(data.draw(st.integers(0, len(self.owed) - 1)))
        key = next((key for key, count in sum_tallies(span.ledger).items()), None)
        self.acks.repeat(span, key)

    @rule(number=st.sampled_from([1, 2]))
    def abandon(self, number: int) -> None:
        """Give the stream to another process; requests in flight may still be answered."""
        before, stream = self.acks.totals.read, self.streams[number - 1]
        stream.is_released = True
        spans = self.acks.abandon(stream)
        unsettled = sum(span.unsettled for span in spans)
        late = [owing for owing in self.owed if owing[0].stream is stream]
        assert unsettled == len(late) == before - self.acks.totals.read
        self.owed = [owing for owing in self.owed if owing[0].stream is not stream]
        if late:
            self.acks.accept(Batch(number=1, body=b"", events=len(late), parts=late))
        # From now on, the same number denotes another stream.
        self.spans[number], self.saved[number] = [], 0
        self.handed = counted(self.passed(3 - number))
        self.streams[number - 1] = Stream(stream_id=number, kind="file", path="x")
        self.chunks[number] = self.chunk(number)

    def passed(self, number: int) -> list[Span]:
        return [span for span in self.spans[number] if span.end_offset <= self.saved[number]]

    @rule()
    def take(self) -> None:
        for checkpoint in self.acks.take():
            number = checkpoint.stream.stream_id
            assert checkpoint.end_offset > self.saved[number]
            self.saved[number] = checkpoint.end_offset
            self.handed.update(
                read=checkpoint.read,
                accepted=checkpoint.accepted,
                duplicates=checkpoint.duplicates,
                rejections=len(checkpoint.rejections),
            )
        for number, spans in self.spans.items():
            prefix = 0
            for span in spans:
                if any(owing is span for owing, _ in self.owed):
                    break
                prefix = span.end_offset
            assert self.saved[number] == prefix, "the checkpoint is not the end of the settled prefix"
        assert self.handed == counted([*self.passed(1), *self.passed(2)])
        assert self.handed["read"] == self.handed["accepted"] + self.handed["duplicates"] + self.handed["rejections"]

    @invariant()
    def counts_add_up(self) -> None:
        totals = self.acks.totals
        assert totals.read == totals.accepted + totals.dead_lettered + totals.duplicates + totals.pending
        assert totals.pending == len(self.owed)

    @invariant()
    def only_open_spans_are_held(self) -> None:
        """Chunks are held while one of their spans is unsettled, except parts in flight."""
        spans = [span for number, of in self.spans.items() for span in of if span.end_offset > self.saved[number]]
        unsettled = [span for span in spans if span.chunk is not None]
        assert all(span.unsettled for span in unsettled)
        chunks = len({id(span.chunk) for span in unsettled})
        on_their_way = sum(span.sent_bytes for span in unsettled)
        assert self.acks.held_bytes == sum(map(estimate_bytes, spans)) + chunks * CHUNK_BYTES - on_their_way


TestSettling = Settling.TestCase
TestSettling.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
