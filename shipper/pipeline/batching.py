"""
The contents of a batch and when it closes; no I/O, no clock.

A batch contains an EventId once and, by default, a ConsumerID once. Repeated ones are deferred to a later batch without
delaying other events. An event with the EventId of a request in flight waits for its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import Final, NamedTuple

from shipper.model.records import Batch, EncodedChunk, Span, event_id_of
from shipper.model.wire import BODY_HEAD, BODY_TAIL, EMPTY_BODY

# Bounds the chunks in memory: a chunk is kept while one of its events is deferred.
_DEFERRED_BATCHES_MAX: Final = 64


class Deferred(NamedTuple):
    line: bytes
    event_id: str
    consumer_id: int
    span: Span
    ordinal: int
    arrived_at: float
    since_batch: int


class Batcher:
    """
    Collects events until one of three limits closes the batch.

    Args:
        max_events: Maximum events in a request, at least 1; may be changed.
        max_bytes: Maximum bytes of an uncompressed body; the settings ensure that any single record fits.
        unique_consumers: Whether a batch may contain a ConsumerID only once.
    """

    def __init__(self, *, max_events: int, max_bytes: int, linger_s: float, unique_consumers: bool = True) -> None:
        self.max_events = max_events
        self._max_bytes = max_bytes
        self._linger_s = linger_s
        self._unique_consumers = unique_consumers
        self._deferred: deque[Deferred] = deque()
        self._deferred_bytes = 0
        self._waiting: dict[str, deque[Deferred]] = {}
        self._batches = 0
        self._events_before = 0
        self._clear()

    def _clear(self) -> None:
        self._pieces: list[bytes] = [BODY_HEAD]
        self._bytes = len(EMPTY_BODY)
        self._events = 0
        self._parts: list[tuple[Span, Sequence[int]]] = []
        self._event_ids: set[str] = set()
        self._consumer_ids: set[int] = set()
        self._uncollected: list[EncodedChunk] = []
        self._oldest_at: float | None = None

    def __repr__(self) -> str:
        return f"<Batcher {self._events} events, {self._bytes} bytes, {len(self._deferred)} deferred>"

    @property
    def events(self) -> int:
        """Number of events in the open batch, deferred, or waiting for an answer."""
        return self._events + len(self._deferred) + sum(map(len, self._waiting.values()))

    @property
    def room_events(self) -> int:
        return max(0, self.max_events - self._events)

    @property
    def room_bytes(self) -> int:
        """Bytes left in the open batch for lines and their separators."""
        return self._max_bytes - self._bytes

    @property
    def is_full(self) -> bool:
        return self._events >= self.max_events

    @property
    def is_congested(self) -> bool:
        """Whether so many events are deferred that a batch must be sent before adding more."""
        if len(self._deferred) >= self.max_events or self._deferred_bytes >= self._max_bytes:
            return True
        return bool(self._deferred) and self._batches - self._deferred[0].since_batch >= _DEFERRED_BATCHES_MAX

    @property
    def waiting_ids(self) -> Set[str]:
        """EventIds of requests in flight that events are waiting for."""
        return self._waiting.keys()

    @property
    def due_at(self) -> float | None:
        """When the open batch must be sent, on the caller's clock; None if it is empty."""
        return None if self._oldest_at is None else self._oldest_at + self._linger_s

    # Adding ------------------------------------------------------------------------------------------------------

    def add(self, chunk: EncodedChunk, now: float) -> None:
        """Add all events of a chunk, which must fit; defer those that repeat an id."""
        if not chunk.events:
            return
        assert chunk.events <= self.room_events
        if chunk.span.stream.is_taken_over:
            chunk.span.stream.is_taken_over = False
            self._events_before = 0
        if self._are_event_ids_new(chunk):
            self._add_chunk(chunk, now)
            return
        for ordinal, line in enumerate(chunk.lines.split(b"\n")):
            self._add_or_defer(self._deferred_of(chunk, ordinal, line, now))

    def _are_event_ids_new(self, chunk: EncodedChunk) -> bool:
        """Return whether the EventIds of a chunk are unique in the chunk and the open batch."""
        if chunk.has_new_event_ids:
            return True
        event_ids = chunk.event_ids
        self._collect_ids()
        return len(set(event_ids)) == len(event_ids) and self._event_ids.isdisjoint(event_ids)

    def _add_chunk(self, chunk: EncodedChunk, now: float) -> None:
        """Add the events of a chunk except those that must wait for an answer; defer repeated ConsumerIDs."""
        start, ordinal, fresh, end = 0, 0, chunk.events - chunk.waits, len(chunk.lines)
        waiting = chunk.lines.rsplit(b"\n", chunk.waits)[-chunk.waits :] if chunk.waits else ()
        for other, line in enumerate(waiting, fresh):
            event = self._deferred_of(chunk, other, line, now)
            self._waiting.setdefault(event.event_id, deque()).append(event)
            end -= len(line) + 1
        if not fresh:
            return
        for other, other_start, other_end in self._repeats(chunk):
            if other < fresh:
                self._add_run(chunk, range(ordinal, other), chunk.lines[start : max(start, other_start - 1)])
                self._defer(self._deferred_of(chunk, other, chunk.lines[other_start:other_end], now))
                start, ordinal = other_end + 1, other + 1
        self._add_run(chunk, range(ordinal, fresh), chunk.lines[start:end])
        self._uncollected.append(chunk)
        self._update_oldest(now)

    def _repeats(self, chunk: EncodedChunk) -> Sequence[tuple[int, int, int]]:
        """Return the events whose ConsumerID is repeated in the chunk or the open batch, as (ordinal, start, end)."""
        if not self._unique_consumers:
            return ()
        if not self._events:
            return chunk.repeats
        self._collect_ids()
        if self._consumer_ids.isdisjoint(chunk.consumer_ids):
            return chunk.repeats
        repeated = {ordinal for ordinal, _, _ in chunk.repeats}
        repeats = []
        start = 0
        for ordinal, (line, consumer_id) in enumerate(zip(chunk.lines.split(b"\n"), chunk.consumer_ids, strict=True)):
            if ordinal in repeated or consumer_id in self._consumer_ids:
                repeats.append((ordinal, start, start + len(line)))
            start += len(line) + 1
        return repeats

    def _add_run(self, chunk: EncodedChunk, ordinals: range, lines: bytes) -> None:
        """Add consecutive events of a chunk to the open batch."""
        if ordinals:
            self._pieces += (lines.replace(b"\n", b","), b",")
            self._bytes += len(lines) + 1
            self._events += len(ordinals)
            self._parts.append((chunk.span, ordinals))

    def _deferred_of(self, chunk: EncodedChunk, ordinal: int, line: bytes, now: float) -> Deferred:
        return Deferred(line, event_id_of(line), chunk.consumer_ids[ordinal], chunk.span, ordinal, now, self._batches)

    def _defer(self, event: Deferred) -> None:
        self._deferred.append(event)
        self._deferred_bytes += len(event.line)

    def _add_or_defer(self, event: Deferred) -> None:
        """Add an event to the open batch; defer it if it repeats an id or does not fit."""
        self._collect_ids()
        if (
            self.is_full
            or event.event_id in self._event_ids
            or (self._unique_consumers and event.consumer_id in self._consumer_ids)
            or (self._events > 0 and len(event.line) > self.room_bytes)
        ):
            self._defer(event)
            return
        self._pieces += (event.line, b",")
        self._bytes += len(event.line) + 1
        self._events += 1
        if event.event_id:
            self._event_ids.add(event.event_id)
        self._consumer_ids.add(event.consumer_id)
        span, ordinals = self._parts[-1] if self._parts else (None, ())
        if span is not event.span or not isinstance(ordinals, list):
            ordinals = []
            self._parts.append((event.span, ordinals))
        ordinals.append(event.ordinal)
        self._update_oldest(event.arrived_at)

    def _collect_ids(self) -> None:
        """Build the sets of ids in the open batch; most batches consist of one chunk and never need them."""
        for chunk in self._uncollected:
            if not chunk.has_new_event_ids:
                self._event_ids.update(chunk.event_ids)
            if self._unique_consumers:
                self._consumer_ids.update(chunk.consumer_ids)
        self._event_ids.discard("")  # not an id; allowed by a relaxed rule
        self._uncollected.clear()

    def _update_oldest(self, at: float) -> None:
        if self._oldest_at is None or at < self._oldest_at:
            self._oldest_at = at

    # Answers, and closing the batch ---------------------------------------------------------------------------------

    def release(self, event_id: str) -> bool:
        """After a rejection, add the first event that waits for its EventId; return whether there was one."""
        waiting = self._waiting.pop(event_id, deque())
        while waiting:
            event = waiting.popleft()
            if event.span.stream.is_released:
                continue
            if waiting:
                self._waiting[event_id] = waiting
            self._add_or_defer(event)
            return True
        return False

    def drop(self, event_id: str) -> Iterable[Deferred]:
        """After an acceptance, remove and return the events that wait for its EventId: they are duplicates."""
        return self._waiting.pop(event_id, ())

    def take(self) -> Batch | None:
        """Close and return the open batch, or None if it is empty; add the deferred events to the next one."""
        if not self._events:
            return None
        self._batches += 1
        self._pieces[-1] = BODY_TAIL  # replaces the last separator
        batch = Batch(
            number=self._batches,
            events_before=self._events_before,
            body=b"".join(self._pieces),
            events=self._events,
            parts=self._parts,
        )
        self._events_before += self._events
        self._clear()
        deferred, self._deferred, self._deferred_bytes = self._deferred, deque(), 0
        for event in deferred:
            self._add_or_defer(event)
        return batch
