"""
The last stage: counts accepted, rejected and duplicate records, and saves how far each input is settled.

The senders report settled batches through a stream; the packer settles records that need no request. `Acks`
tracks the contiguous settled prefix of each input; a task saves it once per interval and passes the saved checkpoints
to the source. The packer waits here for room and for answers.

The checkpoint of a stream is the end of that prefix. A record settled later in the stream never moves it past one that
is still open.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeVar

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream
from anyio.to_thread import run_sync

from shipper.codec.dedupe import DedupeWindow, accept_events, key_of
from shipper.codec.rules import Columns, tally
from shipper.config.settings import StateSettings
from shipper.delivery.parts import SentEvent, event_in, sent_event, sent_events
from shipper.model.errors import DeliveryGaveUpError, StateError, StateUnwritableError
from shipper.model.records import (
    NO_BOUNDS,
    Batch,
    BatchResult,
    Checkpoint,
    LedgerKey,
    Refusal,
    Rejection,
    Span,
    Stream,
    Tally,
    Totals,
)
from shipper.state.store import SaveResult

log = structlog.get_logger("pipeline")

T = TypeVar("T")

MAX_HELD_BYTES: Final = 6 << 20
"""Memory limit of data that is read but not saved (dead letters, ledger keys, chunks), except events in flight."""
_EARLY_SAVE_ENTRIES: Final = 8192  # trigger a save before the interval ends; four records count as one entry
_RETRY_PAUSE_MIN_S: Final = 0.1  # between attempts to save while something blocks it
_FINAL_ATTEMPTS: Final = 10
_FINAL_PAUSE_S: Final = 0.5
_EXPIRY_INTERVAL_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_DUPLICATES_LOGGED: Final = 5
# Estimated memory in bytes. Measured: 300 for a ledger key with its strings in a dict, 75 in a native tally, 330 for a
# dead letter without its bytes, 1,500 for a span with its marker.
_SPAN_BYTES: Final = 2048
_KEY_BYTES: Final = 320
_NATIVE_KEY_BYTES: Final = 80
_REJECTION_BYTES: Final = 400
_ID_BYTES: Final = 16


class StateStore(Protocol):
    """The `Store`, or a consumer group's store in the brokers."""

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> SaveResult: ...

    def expire(self, before_s: float, now_s: float) -> int: ...

    def expire_ledger(self, before_s: float, now_s: float) -> int: ...

    def accepted_ids(self) -> Iterable[bytes]: ...

    def totals(self) -> Totals: ...


class Blockage(NamedTuple):
    """Why settled records cannot be saved: a key of `pauses.ADVICE`, a message, since when on the loop's clock."""

    reason: str
    message: str
    since: float


class Settlement:
    """
    Settles records, and saves checkpoints and dead letters.

    Args:
        window: The EventIds in flight and accepted; shared with the packer's codec.
        on_saved: Called with saved checkpoints.
        give_up_after_s: How long to retry saving; None = indefinitely.

    Attributes:
        answers: Number of answers that settled something.
        has_skipped_chunks: A chunk was skipped, so all later ones must be skipped, too.
        blockage: What blocks saving; None = nothing does.
        handed_over: Number of records of abandoned streams that were read but not settled.
    """

    def __init__(
        self,
        store: StateStore,
        settings: StateSettings,
        *,
        window: DedupeWindow,
        on_saved: Callable[[Sequence[Checkpoint]], Awaitable[None]],
        give_up_after_s: float | None,
        wall_time: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._on_saved = on_saved
        self._give_up_after_s = give_up_after_s
        self._wall_time = wall_time
        self._progress = anyio.Event()
        self._save_requested = anyio.Event()
        self._entries_at_request = 0
        # A separate limiter: all threads of an application may be waiting for room that a save makes.
        self._threads = anyio.CapacityLimiter(1)
        self._unsaved: list[Checkpoint] = []
        self._unsaved_bytes = 0
        self._ends_at = math.inf
        self._save_scope = anyio.CancelScope()
        self._is_stuck = False
        self._save_lock = anyio.Lock(fast_acquire=True)  # one save at a time, and none while streams are abandoned
        self._duplicates_logged = 0
        self.window = window
        self.acks = Acks()
        self.answers = 0
        self.is_stopping = False
        self.has_skipped_chunks = False
        self.blockage: Blockage | None = None
        self.commits = 0
        self.settled_bytes = 0
        self.handed_over = 0
        self._saved_read = store.totals().read

    def __repr__(self) -> str:
        return f"<Settlement {self.acks!r}>"

    def remember_accepted(self) -> None:
        """Add the EventIds accepted in earlier runs to the window."""
        if self.window.is_on:
            for keys in self._store.accepted_ids():
                self.window.accept(keys)

    # Limits ------------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Estimated memory of data that is read but not saved, bytes."""
        return self.acks.held_bytes + self._unsaved_bytes

    @property
    def has_room(self) -> bool:
        """Whether another span may be opened now."""
        return self.held_bytes < MAX_HELD_BYTES and self.blockage is None

    @property
    def is_closed(self) -> bool:
        """Whether there will be no more room, because a stop was requested while saving is blocked."""
        return self.blockage is not None and self.is_stopping

    def open(self, span: Span, now: float) -> None:
        """Add a span and log its rejections; request a save after many records, to limit repeats after a crash."""
        if span.rejections:
            _log_refused(span)
        self.acks.open(span, now)
        entries = self.acks.entries + self.acks.totals.read // 4
        if entries - self._entries_at_request >= _EARLY_SAVE_ENTRIES:
            self._entries_at_request = entries
            self._request_save()

    def _request_save(self) -> None:
        """Request a save before the interval ends; no effect while saving is blocked."""
        if self.blockage is None:
            self._save_requested.set()

    def end_reading(self) -> None:
        """Mark the input as ended, and wake tasks that wait for room."""
        self.is_stopping = True
        self._notify_progress()

    def _notify_progress(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def wait_for_progress(self) -> None:
        """Wait until something is settled or saved."""
        await self._progress.wait()

    async def wait_for_room(self) -> None:
        """Request a save, and wait for progress that may have made room."""
        progress = self._progress
        self._request_save()
        if not self.is_closed:
            await progress.wait()

    async def wait_until_saved(self) -> None:
        """Wait until everything is settled and saved, or a stop is requested, after which `save_rest` is called."""
        while (self.acks.open_spans or self._unsaved) and not self.is_stopping:
            await self.wait_for_room()

    # Settling ----------------------------------------------------------------------------------------------------

    async def run(self, settled_rx: MemoryObjectReceiveStream[BatchResult]) -> None:
        """Settle the senders' reports until the senders end."""
        with settled_rx:
            async for settled in settled_rx:
                self.settle(settled)
                self.settle_all(settled_rx)

    def settle_all(self, settled_rx: MemoryObjectReceiveStream[BatchResult]) -> None:
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while True:
                self.settle(settled_rx.receive_nowait())

    def settle(self, settled: BatchResult) -> None:
        """Settle the accepted and rejected events of a batch."""
        if settled.accepted is not None:
            self._accept(settled.accepted)
        for batch, refusal in settled.refused:
            self._refuse(batch, refusal)
        self.answers += 1
        self._notify_progress()

    def settle_duplicate(self, span: Span, ordinal: int, line: bytes) -> None:
        """Settle an event whose EventId was accepted after it had been encoded."""
        if span.stream.is_released:
            return
        event = event_in(line)
        if self._duplicates_logged < _DUPLICATES_LOGGED:  # computing the offset is slow
            assert span.chunk is not None
            self.log_duplicate(event.EventId, span.stream, span.chunk.start_offset + span.bounds_of(ordinal)[0])
        self.acks.repeat(span, _ledger_key(event))
        self._notify_progress()

    def log_duplicate(self, event_id: str, stream: Stream, offset: int) -> None:
        """Log the first few duplicates."""
        self._duplicates_logged += 1
        if self._duplicates_logged <= _DUPLICATES_LOGGED:
            log.info("duplicate_skipped", event_id=event_id, path=stream.shown_path, **stream.position_fields(offset))

    def _accept(self, batch: Batch) -> None:
        if batch.parts[0][0].stream.kind == "replay":
            self._count_repeated(batch)
        for span, ordinals in batch.parts:
            if not span.stream.is_released:
                accept_events(self.window, span, ordinals)
        self.acks.accept(batch)

    def _count_repeated(self, batch: Batch) -> None:
        """Count replayed events that had been accepted before as duplicates in the ledger."""
        spans = [span for span, ordinals in batch.parts for _ in ordinals]
        for span, event in zip(spans, sent_events(batch), strict=True):
            is_replayed = span.stream.kind == "replay" and not span.stream.is_released
            if is_replayed and self.window.is_accepted(key_of(event.EventId)):
                self.acks.count_repeated(span, _ledger_key(event))

    def _refuse(self, batch: Batch, refusal: Refusal) -> None:
        """Turn the single event of a batch into a dead letter with the original record."""
        ((span, (ordinal,)),), event = batch.parts, sent_event(batch)
        if span.stream.is_released:
            return
        assert span.chunk is not None
        start, end = span.bounds_of(ordinal)
        rejection = Rejection(
            start_offset=span.chunk.start_offset + start,
            end_offset=span.chunk.start_offset + end,
            rule=refusal.rule,
            message=refusal.message,
            raw=span.chunk.data[start:end],
            event_id=event.EventId,
            consumer_id=str(event.ConsumerID),
            status=refusal.status,
            delivery="ambiguous" if refusal.is_ambiguous else "rejected",
            attempts=refusal.attempts,
            header=span.stream.framing.header,
        )
        self.window.forget(key_of(event.EventId))  # the next record with this id may be a corrected one
        self.acks.reject(span, rejection, _ledger_key(event))
        log.warning(
            "record_rejected",
            event_id=event.EventId,
            path=span.stream.shown_path,
            **span.stream.position_fields(rejection.start_offset),
            rule=refusal.rule,
            status=refusal.status,
        )

    # Saving ------------------------------------------------------------------------------------------------------

    @property
    def has_unsaved(self) -> bool:
        """Whether settled records are not on disk yet."""
        return bool(self._unsaved)

    def saved_totals(self, totals: Totals) -> Totals:
        """Return the totals with unsaved records as pending, as they will be processed again."""
        unsaved = [*self._unsaved, *self.acks.spans()]
        accepted = sum(item.accepted for item in unsaved)
        duplicates = sum(item.duplicates for item in unsaved)
        dead_lettered = sum(len(item.rejections) for item in unsaved)
        return Totals(
            read=totals.read,
            accepted=totals.accepted - accepted,
            dead_lettered=totals.dead_lettered - dead_lettered,
            duplicates=totals.duplicates - duplicates,
            pending=totals.pending + accepted + dead_lettered + duplicates,
        )

    @property
    def ever_read(self) -> int:
        """Records read by all runs, saved or not; those of a replay count where they were first read."""
        return self._saved_read + _read_of(chain(self._unsaved, self.acks.spans()))

    async def save_periodically(self) -> None:
        """Save until cancelled; give up if saving is blocked for too long."""
        limit_s = math.inf if self._give_up_after_s is None else self._give_up_after_s
        while True:
            pause_s = self._settings.commit_interval_seconds
            with anyio.move_on_after(pause_s if self.blockage is None else max(pause_s, _RETRY_PAUSE_MIN_S)):
                await self._save_requested.wait()
            self._save_requested = anyio.Event()
            await self.save()
            if self.blockage is not None and anyio.current_time() >= self.blockage.since + limit_s:
                raise DeliveryGaveUpError(f"nothing could be saved for {limit_s:g} s: {self.blockage.message}")

    def set_deadline(self, deadline: float) -> None:
        """Set a deadline for saving, so that a hanging disk cannot block a stop."""
        self._ends_at = self._save_scope.deadline = deadline

    def has_unsaved_of(self, streams: Sequence[Stream]) -> bool:
        """Return whether records of the streams were read and are not on disk yet."""
        return self.acks.has_open(streams) or any(checkpoint.stream in streams for checkpoint in self._unsaved)

    async def abandon(self, streams: Sequence[Stream]) -> int:
        """
        Drop all unsaved records of streams that go to another process; return how many.

        Later answers are ignored. The EventIds are dropped, too: if a stream comes back, unsaved records must not count
        as duplicates. Those of dead letters are kept, as they may belong to accepted records.
        """
        abandoned = 0
        with anyio.CancelScope(shield=True):
            async with self._save_lock:
                for stream in streams:
                    stream.is_released = True
                    for span in self.acks.abandon(stream):
                        self.handed_over += span.unsettled
                        abandoned += span.read
                        self._drop(stream, span.accepted_keys)
                for checkpoint in self._unsaved:
                    if checkpoint.stream.is_released:
                        self._unsaved_bytes -= estimate_bytes(checkpoint)
                        abandoned += checkpoint.read
                        self._drop(checkpoint.stream, checkpoint.accepted_keys)
                self._unsaved = [checkpoint for checkpoint in self._unsaved if not checkpoint.stream.is_released]
                if not self._unsaved:  # no save follows that would end the pause
                    self._set_blockage()
        self.answers += 1
        self._notify_progress()
        return abandoned

    def _drop(self, stream: Stream, keys: bytes) -> None:
        if self.window.is_on and stream.kind != "replay":
            self.window.drop(keys)

    async def save(self, idle: Sequence[Checkpoint] = ()) -> None:
        """
        Save the settled prefixes. Shielded from cancellation: a started transaction must be finished and counted.

        Args:
            idle: Checkpoints without records, also to be saved; ignored for streams with unsaved records.
        Raises:
            StateError: The state store cannot be written, or not in time.
        """
        with anyio.CancelScope(shield=True):
            async with self._save_lock:
                for checkpoint in idle:
                    if not checkpoint.stream.is_released and not self.has_unsaved_of([checkpoint.stream]):
                        self._unsaved.append(checkpoint)
                        self._unsaved_bytes += estimate_bytes(checkpoint)
                await self._save()

    async def save_rest(self) -> None:
        """Save at the end of the run; retry while another process prevents it, as in a rebalance."""
        for _ in range(_FINAL_ATTEMPTS):
            await self.save()
            if not self._unsaved or self.blockage or self._is_stuck:
                return
            with anyio.CancelScope(shield=True):
                await anyio.sleep(_FINAL_PAUSE_S)

    async def _save(self) -> None:
        taken = self.acks.take()
        self._unsaved += taken
        self._unsaved_bytes += sum(map(estimate_bytes, taken))
        if not self._unsaved or self._is_stuck:  # a stuck transaction may still commit, and must not be repeated
            return
        with anyio.CancelScope(shield=True, deadline=self._ends_at) as self._save_scope:
            # After a failure, `_unsaved` is kept: a later checkpoint must not pass the dead letters in it.
            try:
                saved = await run_sync(
                    self._store.save,
                    self._unsaved,
                    self._wall_time(),
                    limiter=self._threads,
                    abandon_on_cancel=True,  # only the deadline can cancel it
                )
            except StateUnwritableError as error:
                self._set_blockage(error.reason, str(error))
                return
            self.settled_bytes += sum(checkpoint.end_offset - checkpoint.start_offset for checkpoint in saved.done)
            self.commits += 1
            self._saved_read += _read_of(saved.done)
            self._unsaved = saved.waiting
            self._unsaved_bytes = sum(map(estimate_bytes, saved.waiting))
            self._set_blockage("dead_letters_full" if saved.reason else "", saved.reason)
            if saved.done:
                self._notify_progress()
                await self._on_saved(saved.done)
        if self._save_scope.cancelled_caught:
            self._is_stuck = True
            raise StateError(
                "the state could not be saved in time: its disk does not respond. Unsaved records are sent again "
                "at the next start, with the same EventIds"
            )

    def _set_blockage(self, reason: str = "", message: str = "") -> None:
        """Begin, change or end a pause, and log a change; no reason = nothing blocks saving."""
        before = self.blockage
        since = before.since if before else anyio.current_time()
        self.blockage = Blockage(reason, message, since) if reason else None
        if before and before.reason != reason:
            log.info("delivery_resumed", reason=before.reason)
        if reason and (before is None or before.reason != reason):
            log.warning("delivery_paused", reason=reason, message=message)

    async def between_saves(self, work: Callable[[], T]) -> T:
        """Call a function in a thread while nothing else uses the store; saves wait for it."""
        return await run_sync(work, limiter=self._threads)

    async def expire_periodically(self) -> None:
        """Delete data past its retention, now and every hour, in transactions so small that saves run in between."""
        settings, store = self._settings, self._store
        while settings.dead_letter_retention_days or settings.ledger_retention_days:
            await self._expire("dead_letters_expired", store.expire, settings.dead_letter_retention_days)
            await self._expire("ledger_expired", store.expire_ledger, settings.ledger_retention_days)
            await anyio.sleep(_EXPIRY_INTERVAL_S)

    async def _expire(self, event: str, expire_some: Callable[[float, float], int], days: float) -> None:
        expired = 0
        with suppress(StateUnwritableError):  # the next save reports it
            while days:
                now_s = self._wall_time()
                count = await run_sync(expire_some, now_s - days * _DAY_S, now_s, limiter=self._threads)
                if not count:
                    break
                expired += count
        if expired:
            log.info(event, count=expired, retention_days=days)


def _read_of(parts: Iterable[Checkpoint]) -> int:
    return sum(part.read for part in parts if part.stream.kind != "replay")


def _log_refused(span: Span) -> None:
    """Log the broken rules and the positions of rejected records, but no values."""
    stream = span.stream
    path = stream.shown_path
    for rejection in span.rejections:
        rules, position = list(rejection.faults) or [rejection.rule], stream.position_fields(rejection.start_offset)
        log.warning("record_refused", rules=rules, path=path, **position, message=stream.explain(rejection))


def _ledger_key(event: SentEvent) -> LedgerKey | None:
    return next(iter(tally(Columns.of([event]))), None)


class Acks:
    """
    Tracks spans from the codec to their settlement, and counts records. No I/O, no await.

    Attributes:
        held_bytes: Estimated memory of the open spans, including the chunks of unsettled ones, but not their events in
            flight, which are bounded by the number of requests.
        entries: Number of ledger keys and dead letters of all spans so far.
        totals: Counts of this run's records so far.
        reasons: Number of dead letters by rule.
    """

    def __init__(self) -> None:
        self._open: dict[int, deque[Span]] = {}
        self._chunks: dict[int, int] = {}  # by id(chunk): number of unsettled spans that need it
        self.held_bytes = 0
        self.entries = 0
        self.open_spans = 0
        self.totals: Final = Totals()
        self.reasons: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Acks {self.open_spans} open spans, {self.totals}>"

    @property
    def oldest_at(self) -> float | None:
        """When the oldest open span was opened; None if there is none."""
        return min((spans[0].opened_at for spans in self._open.values()), default=None)

    def spans(self) -> Iterator[Span]:
        """Yield the open spans: each is unsettled, or follows an unsettled one and cannot be saved yet."""
        return chain.from_iterable(self._open.values())

    def has_open(self, streams: Iterable[Stream]) -> bool:
        """Return whether one of the streams has a span that is unsettled, or follows an unsettled one."""
        return any(stream.stream_id in self._open for stream in streams)

    def open(self, span: Span, now: float) -> None:
        """Add a span; the spans of a stream must be added in order."""
        span.opened_at = now
        spans = self._open.setdefault(span.stream.stream_id, deque())
        assert not spans or spans[-1].end_offset <= span.start_offset
        spans.append(span)
        self.open_spans += 1
        self.held_bytes += estimate_bytes(span)
        self.entries += sum(map(len, span.ledger)) + sum(map(len, span.repeated)) + len(span.rejections)
        if span.chunk is not None:
            users = self._chunks.get(id(span.chunk), 0)
            self._chunks[id(span.chunk)] = users + 1
            self.held_bytes += (0 if users else len(span.chunk.data)) - _bytes_in_flight(span)
        self.totals.read += span.read
        self.totals.duplicates += span.duplicates
        self.totals.pending += span.unsettled
        self._count_dead_letters(span.rejections)

    def _count_dead_letters(self, rejections: Iterable[Rejection]) -> None:
        for rejection in rejections:
            self.totals.dead_lettered += 1
            self.reasons[rejection.rule] = self.reasons.get(rejection.rule, 0) + 1

    def abandon(self, stream: Stream) -> Iterable[Span]:
        """Remove and return the open spans of a stream; their unsettled records no longer count as read."""
        spans = self._open.pop(stream.stream_id, ())
        for span in spans:
            self.open_spans -= 1
            self.held_bytes -= estimate_bytes(span)
            self.totals.read -= span.unsettled
            self.totals.pending -= span.unsettled
            span.accepted_keys += span.event_keys  # the caller drops all of them
            self._release(span)
        return spans

    def accept(self, batch: Batch) -> None:
        events = batch.events
        for span, ordinals in batch.parts:
            if span.stream.is_released:
                events -= len(ordinals)
                continue
            span.accepted += len(ordinals)
            self._settle(span, len(ordinals))
        self.totals.accepted += events
        self.totals.pending -= events

    def reject(self, span: Span, rejection: Rejection, key: LedgerKey | None) -> None:
        """Settle an event that the service rejected; `key` is its ledger key."""
        self._count(span.ledger, key, -1)
        insort(span.rejections, rejection, key=attrgetter("start_offset"))
        self.held_bytes += _estimate_rejection(rejection)
        self.entries += 1
        self._settle(span, 1)
        self._count_dead_letters([rejection])
        self.totals.pending -= 1

    def repeat(self, span: Span, key: LedgerKey | None) -> None:
        """Settle an event as a duplicate; `key` is its ledger key."""
        self.count_repeated(span, key)
        span.duplicates += 1
        self._settle(span, 1)
        self.totals.duplicates += 1
        self.totals.pending -= 1

    def count_repeated(self, span: Span, key: LedgerKey | None) -> None:
        """Count an event as a duplicate in the ledger only."""
        self._count(span.ledger, key, -1)
        self._count(span.repeated, key, 1)

    def _count(self, tallies: list[Tally], key: LedgerKey | None, count: int) -> None:
        if key is not None:
            tallies.append({key: count})
            self.held_bytes += _KEY_BYTES
            self.entries += 1

    def take(self) -> list[Checkpoint]:
        """
        Remove the settled prefix of each stream; return its checkpoints, in order for each stream.

        A checkpoint with dead letters covers a single span, so only one span's letters must fit into the quota at once.
        """
        checkpoints: list[Checkpoint] = []
        for stream_id, spans in list(self._open.items()):
            run: list[Span] = []
            while spans and not spans[0].unsettled:
                span = spans.popleft()
                self.open_spans -= 1
                self.held_bytes -= estimate_bytes(span)
                if run and (span.rejections or run[-1].rejections):
                    checkpoints.append(_merge(run))
                    run = []
                run.append(span)
            if run:
                checkpoints.append(_merge(run))
            if not spans:
                del self._open[stream_id]
        return checkpoints

    def _settle(self, span: Span, events: int) -> None:
        span.unsettled -= events
        assert span.unsettled >= 0
        if not span.unsettled:
            self._release(span)

    def _release(self, span: Span) -> None:
        """Release a settled span's chunk; the span may wait long for earlier ones."""
        if span.chunk is None:
            return
        chunk, span.chunk = span.chunk, None
        span.bounds, span.event_keys = NO_BOUNDS, b""
        users = self._chunks.pop(id(chunk)) - 1
        if users:
            self._chunks[id(chunk)] = users
        self.held_bytes -= (0 if users else len(chunk.data)) - _bytes_in_flight(span)


def _bytes_in_flight(span: Span) -> int:
    return min(span.sent_bytes, span.end_offset - span.start_offset)


def estimate_bytes(part: Checkpoint) -> int:
    """Estimate the memory of a span or checkpoint without its chunk, bytes."""
    tallies = sum(map(_estimate_tally, part.ledger)) + sum(map(_estimate_tally, part.repeated))
    return _SPAN_BYTES + tallies + _ID_BYTES * part.read + sum(map(_estimate_rejection, part.rejections))


def _estimate_tally(tally: Tally) -> int:
    return len(tally) * (_KEY_BYTES if isinstance(tally, dict) else _NATIVE_KEY_BYTES)


def _estimate_rejection(rejection: Rejection) -> int:
    return _REJECTION_BYTES + len(rejection.raw) + len(rejection.message)


def _merge(spans: list[Span]) -> Checkpoint:
    return Checkpoint(
        stream=spans[0].stream,
        start_offset=spans[0].start_offset,
        end_offset=spans[-1].end_offset,
        tail=spans[-1].tail,
        read=sum(span.read for span in spans),
        accepted=sum(span.accepted for span in spans),
        duplicates=sum(span.duplicates for span in spans),
        rejections=[rejection for span in spans for rejection in span.rejections],
        ledger=[tally for span in spans for tally in span.ledger],
        repeated=[tally for span in spans for tally in span.repeated],
        accepted_keys=b"".join(span.accepted_keys for span in spans),
    )
