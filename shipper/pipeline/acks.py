"""
Which spans are settled, and how far each stream is settled without a gap. No I/O, no await.

A later success never hides an earlier open end: the watermark of a stream is the end of its contiguous settled
prefix, and only what lies before it is handed to the store.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from shipper.model.records import NO_BOUNDS, Batch, Checkpoint, LedgerKey, Rejection, Span, Stream, Tally, Totals

# What lies in memory, estimated in bytes. Measured: 300 for a ledger key with its strings and its place in a dict, 75
# in a native tally, 330 for a dead letter beside its bytes, 1,500 for a span with its marker.
_SPAN_BYTES: Final = 2048
_KEY_BYTES: Final = 320
_NATIVE_KEY_BYTES: Final = 80
_REJECTION_BYTES: Final = 400
_ID_BYTES: Final = 16


def weight(part: Span | Checkpoint) -> int:
    """Estimate the bytes in memory of a span or a checkpoint, without its chunk."""
    tallies = sum(map(_tally_weight, part.ledger)) + sum(map(_tally_weight, part.repeated))
    records = part.records if isinstance(part, Span) else part.read
    return _SPAN_BYTES + tallies + _ID_BYTES * records + sum(map(_rejection_weight, part.rejections))


def _tally_weight(tally: Tally) -> int:
    return len(tally) * (_KEY_BYTES if isinstance(tally, dict) else _NATIVE_KEY_BYTES)


def _keys_in(tallies: Iterable[Tally]) -> int:
    return sum(map(len, tallies))


def _rejection_weight(rejection: Rejection) -> int:
    return _REJECTION_BYTES + len(rejection.raw) + len(rejection.message)


class Acks:
    """
    Follows every span from the codec to its settlement, and counts.

    Attributes:
        held_bytes: What the open spans hold in memory, estimated: all of them, and the chunks of the unsettled ones
            except for what of these is on its way, as the requests in flight bound that.
        entries: Ledger keys and dead letters of all spans so far.
    """

    def __init__(self) -> None:
        self._open: dict[int, deque[Span]] = {}
        self._chunks: dict[int, int] = {}  # how many unsettled spans need a chunk, by its id
        self._totals = Totals()
        self.held_bytes = 0
        self.entries = 0
        self.open_spans = 0
        self.reasons: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Acks {self.open_spans} open spans, {self.totals}>"

    @property
    def totals(self) -> Totals:
        """What became of the records of this run so far."""
        return self._totals

    @property
    def oldest_at(self) -> float | None:
        """When the oldest span was opened that is not settled, or lies behind one; None if there is none."""
        return min((spans[0].opened_at for spans in self._open.values()), default=None)

    @property
    def open_rejections(self) -> int:
        """How many records were refused that lie behind one that is unsettled, so that they cannot be saved yet."""
        return sum(len(span.rejections) for spans in self._open.values() for span in spans)

    def open(self, span: Span, now: float) -> None:
        """Add a span; the spans of one stream come in the order of their offsets."""
        span.opened_at = now
        spans = self._open.setdefault(span.stream.stream_id, deque())
        assert not spans or spans[-1].end_offset <= span.start_offset
        spans.append(span)
        self.open_spans += 1
        self.held_bytes += weight(span)
        self.entries += _keys_in(span.ledger) + _keys_in(span.repeated) + len(span.rejections)
        if span.chunk is not None:
            users = self._chunks.get(id(span.chunk), 0)
            self._chunks[id(span.chunk)] = users + 1
            self.held_bytes += (0 if users else len(span.chunk.data)) - _bytes_on_their_way(span)
        self._totals.read += span.records
        self._totals.duplicates += span.duplicates
        self._totals.pending += span.unsettled
        self._note_dead(span.rejections)

    def _note_dead(self, rejections: Iterable[Rejection]) -> None:
        for rejection in rejections:
            self._totals.dead_lettered += 1
            self.reasons[rejection.rule] = self.reasons.get(rejection.rule, 0) + 1

    def has_open(self, streams: Iterable[Stream]) -> bool:
        """Return whether a span of one of the streams is not settled, or lies behind one that is not."""
        return any(stream.stream_id in self._open for stream in streams)

    def abandon(self, stream: Stream) -> list[Span]:
        """
        Forget the open spans of a stream that is over: what of them is unsettled is no longer counted as read.

        Returns:
            The spans.
        """
        spans = self._open.pop(stream.stream_id, deque())
        for span in spans:
            self.open_spans -= 1
            self.held_bytes -= weight(span)
            self._totals.read -= span.unsettled
            self._totals.pending -= span.unsettled
            self._release(span)
        return list(spans)

    def accept(self, batch: Batch) -> None:
        """Settle events that the service took."""
        events = batch.events
        for span, ordinals in batch.parts:
            if span.stream.is_over:
                events -= len(ordinals)
                continue
            span.accepted += len(ordinals)
            self._settle(span, len(ordinals))
        self._totals.accepted += events
        self._totals.pending -= events

    def reject(self, span: Span, rejection: Rejection, key: LedgerKey | None) -> None:
        """Settle an event that the service refuses for good; `key` is where the ledger counts it."""
        self._count(span.ledger, key, -1)
        insort(span.rejections, rejection, key=attrgetter("start_offset"))
        self.held_bytes += _rejection_weight(rejection)
        self.entries += 1
        self._settle(span, 1)
        self._note_dead([rejection])
        self._totals.pending -= 1

    def note_repeated(self, span: Span, key: LedgerKey | None) -> None:
        """Count an event as a duplicate in the ledger, under `key`, whatever else becomes of it."""
        self._count(span.ledger, key, -1)
        self._count(span.repeated, key, 1)

    def _count(self, tallies: list[Tally], key: LedgerKey | None, count: int) -> None:
        if key is not None:
            tallies.append({key: count})
            self.held_bytes += _KEY_BYTES
            self.entries += 1

    def repeat(self, span: Span, key: LedgerKey | None) -> None:
        """Settle an event as a duplicate; `key` is where the ledger counts it."""
        self.note_repeated(span, key)
        span.duplicates += 1
        self._settle(span, 1)
        self._totals.duplicates += 1
        self._totals.pending -= 1

    def take(self) -> list[Checkpoint]:
        """
        Hand out, once, what has become settled without a gap since the last call.

        Returns:
            Checkpoints, those of one stream in order. One with dead letters covers one span, so that the store needs
            room for no more than a span's at a time.
        """
        checkpoints: list[Checkpoint] = []
        for stream_id, spans in list(self._open.items()):
            settled = []
            while spans and not spans[0].unsettled:
                settled.append(spans.popleft())
            if settled:
                self.open_spans -= len(settled)
                self.held_bytes -= sum(map(weight, settled))
                checkpoints += map(_merge, _runs(settled))
            if not spans:
                del self._open[stream_id]
        return checkpoints

    def _settle(self, span: Span, events: int) -> None:
        span.unsettled -= events
        assert span.unsettled >= 0
        if not span.unsettled:
            self._release(span)

    def _release(self, span: Span) -> None:
        """Let go of the chunk: it is needed no more, and the span may have to wait long for those before it."""
        if span.chunk is None:
            return
        chunk, span.chunk = span.chunk, None
        span.bounds, span.event_keys = NO_BOUNDS, b""
        users = self._chunks.pop(id(chunk)) - 1
        if users:
            self._chunks[id(chunk)] = users
        self.held_bytes -= (0 if users else len(chunk.data)) - _bytes_on_their_way(span)


def _bytes_on_their_way(span: Span) -> int:
    return min(span.sent_bytes, span.end_offset - span.start_offset)


def _runs(spans: list[Span]) -> list[list[Span]]:
    """Part the spans so that one with rejections stands alone."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and not span.rejections and not runs[-1][-1].rejections:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _merge(spans: list[Span]) -> Checkpoint:
    return Checkpoint(
        stream=spans[0].stream,
        start_offset=spans[0].start_offset,
        end_offset=spans[-1].end_offset,
        tail=spans[-1].tail,
        read=sum(span.records for span in spans),
        accepted=sum(span.accepted for span in spans),
        duplicates=sum(span.duplicates for span in spans),
        rejections=[rejection for span in spans for rejection in span.rejections],
        ledger=[tally for span in spans for tally in span.ledger],
        repeated=[tally for span in spans for tally in span.repeated],
        keys=b"".join(span.keys for span in spans),
    )
