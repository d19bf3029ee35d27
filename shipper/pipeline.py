"""
The pipeline: wires the stages, stops them, and tells what became of the records.

Stages end because their input ended: each owns its stream ends, and closing them is the only signal downstream. A stop
is a ladder: the first signal ends reading and gives the rest a deadline; the deadline or a second signal cuts the rest
off. What was settled by then is saved in any case.
"""

from __future__ import annotations

import math
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, suppress
from random import Random
from typing import Final, Literal, NamedTuple, Protocol

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper.batching import Batcher
from shipper.codec import Codec, latest_timestamp, tally
from shipper.config import Settings, require_endpoint
from shipper.delivery.credentials import ClockSkew, Credentials, credentials_of
from shipper.delivery.endpoint import Endpoint, make_ssl_context
from shipper.delivery.gate import Gate
from shipper.delivery.parting import sent_event
from shipper.delivery.sender import DeliveryCounts, Sender, Shared
from shipper.errors import DeliveryGaveUpError, StateUnwritableError
from shipper.framing import CsvRows
from shipper.records import Batch, Checkpoint, Chunk, Refusal, Rejection, Stream, Totals
from shipper.state.acks import Acks
from shipper.state.store import Store
from shipper.wire import BODY_HEAD, BODY_TAIL

log = structlog.get_logger("pipeline")

Outcome = Literal["finished", "drained", "aborted", "gave_up"]
Signals = AbstractContextManager[AsyncIterator[signal.Signals]]

_CHUNK_BUFFER: Final = 2
_BATCH_BUFFER: Final = 8
_MAX_OPEN_SPANS: Final = 4096
_SAVE_LIMIT_S: Final = 10.0
_EXPIRY_INTERVAL_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_LEAST_PAUSE_S: Final = 0.1  # between two looks whether the dead letters have room again
_DUPLICATES_TOLD: Final = 5


class _Why(NamedTuple):
    """Why what is settled cannot be saved: a word, and what to do about it; empty if it can."""

    reason: str
    message: str


class Source(Protocol):
    """
    A first stage.

    Attributes:
        is_exhausted: Whether everything that there was to read has been read.
    """

    @property
    def is_exhausted(self) -> bool: ...

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks, those of one stream in order, until there are no more or a cancellation comes."""

    async def after_save(self) -> None:
        """The checkpoints of the streams have moved, on disk."""


class Summary(Totals, kw_only=True):
    """
    What a run did; `read == accepted + dead_lettered + duplicates + pending`.

    Attributes:
        outcome: `finished` = read to the end; `drained` = ended before the end of the input; `aborted` = cut off
            with records pending; `gave_up` = the service took nothing for too long.
        message: Why it ended early; empty otherwise.
    """

    batches: int
    requests: int
    retries: int
    seconds: float
    outcome: Outcome
    message: str = ""

    def exit_code(self, *, is_one_shot: bool) -> int:
        """0 all accepted, 3 some are dead letters, 4 something is left to do; a followed input is never at its end."""
        if self.pending or self.outcome in {"aborted", "gave_up"}:
            return 4
        if not is_one_shot:
            return 0
        if self.outcome == "drained":
            return 4
        return 3 if self.dead_lettered else 0


class Pipeline:
    """
    One run from a source to the service.

    Args:
        is_one_shot: The input has an end, and the run is given up after `delivery.give_up_after_seconds`.
        wall_time: Seconds since the epoch.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        store: Store,
        *,
        is_one_shot: bool,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        self._settings = settings
        self._source = source
        self._store = store
        self._is_one_shot = is_one_shot
        self._wall_time = wall_time
        self._rng = rng
        self._counts = DeliveryCounts()
        self._gate = Gate(
            settings.delivery,
            give_up_after_s=settings.delivery.give_up_after_seconds if is_one_shot else None,
            rng=rng,
        )
        self._reading = anyio.CancelScope()
        self._drain = anyio.CancelScope()
        self._stopping = anyio.Event()
        self._progress = anyio.Event()
        self._save_asked = anyio.Event()
        self._acks = Acks()
        self._unsaved: list[Checkpoint] = []
        self._full_since: float | None = None  # when something settled could not be saved first
        self._why_full = _Why("", "")
        self._expires_at = -math.inf
        self._has_left_chunks = False
        self._duplicates_seen = 0
        self._codec = Codec(
            settings.records,
            max_record_bytes=settings.input.max_record_bytes,
            on_duplicate=self._tell_duplicate,
        )
        self._batcher = Batcher(
            max_events=_events_per_batch(settings),
            max_bytes=settings.batch.max_bytes,
            linger_s=settings.batch.linger_seconds,
            unique_consumers=settings.batch.unique_consumers,
        )

    def __repr__(self) -> str:
        return f"<Pipeline {self._acks!r} {self._batcher!r} {self._gate!r}>"

    @property
    def totals(self) -> Totals:
        """What became of the records so far."""
        return self._acks.totals

    @property
    def dead_letter_reasons(self) -> dict[str, int]:
        """How many records broke which rule."""
        return self._acks.reasons

    async def run(self, signals: Signals | None = None) -> Summary:
        """
        Ship until the source ends or a signal stops it.

        Args:
            signals: Gives SIGTERM and SIGINT while it is entered; None = they are somebody else's.
        Raises:
            StateError: The state store cannot be written; nothing is lost.
        """
        started_at = anyio.current_time()
        credentials, senders = self._make_senders()
        gave_up = ""
        await self._expire()
        try:
            with self._drain:
                async with anyio.create_task_group() as side:
                    if signals is not None:
                        await side.start(self._stop_ladder, signals)
                    side.start_soon(self._save_every)
                    side.start_soon(credentials.run)
                    async with anyio.create_task_group() as flow:
                        self._start_flow(flow, senders)
                    await self._until_saved()
                    side.cancel_scope.cancel()
        except* DeliveryGaveUpError as group:
            gave_up = (
                f"{_first_leaf(group)}. What was not delivered stays pending; run the same command again, or let it "
                "wait longer (delivery.give_up_after_seconds)"
            )
        finally:
            with anyio.move_on_after(_SAVE_LIMIT_S, shield=True):
                await self._save()
        totals = self._acks.totals
        # What is not saved is done again at the next start, whatever has become of it.
        accepted = sum(checkpoint.accepted for checkpoint in self._unsaved)
        duplicates = sum(checkpoint.duplicates for checkpoint in self._unsaved)
        dead_lettered = sum(len(checkpoint.rejections) for checkpoint in self._unsaved) + self._acks.open_rejections
        return Summary(
            read=totals.read,
            accepted=totals.accepted - accepted,
            dead_lettered=totals.dead_lettered - dead_lettered,
            duplicates=totals.duplicates - duplicates,
            pending=totals.pending + accepted + dead_lettered + duplicates,
            batches=self._counts.batches,
            requests=self._counts.requests,
            retries=self._counts.retries,
            seconds=round(anyio.current_time() - started_at, 3),
            outcome=self._outcome(gave_up),
            message=gave_up,
        )

    def _make_senders(self) -> tuple[Credentials, list[Sender]]:
        """
        Raises:
            ConfigError: A secret, certificate or key cannot be used.
        """
        endpoint, delivery = require_endpoint(self._settings, "intake"), self._settings.delivery
        ssl_context = make_ssl_context(endpoint, "intake")
        credentials = credentials_of(
            endpoint,
            delivery,
            section="intake",
            ssl_context=ssl_context,
            wall_time=self._wall_time,
            rng=self._rng,
        )
        shared = Shared(
            gate=self._gate,
            credentials=credentials,
            settings=delivery,
            settle=self._settle,
            reject=self._reject,
            counts=self._counts,
            skew=ClockSkew(),
            rng=self._rng,
            wall_time=self._wall_time,
            is_compressing=delivery.compression == "gzip",
        )
        return credentials, [
            Sender(Endpoint(endpoint, delivery, section="intake", ssl_context=ssl_context), shared, index)
            for index in range(delivery.senders)
        ]

    def _outcome(self, gave_up: str) -> Outcome:
        if gave_up:
            return "gave_up"
        if self._drain.cancelled_caught or self._unsaved:
            return "aborted"
        return "finished" if self._source.is_exhausted and not self._has_left_chunks else "drained"

    def _start_flow(self, flow: TaskGroup, senders: list[Sender]) -> None:
        chunks_tx, chunks_rx = anyio.create_memory_object_stream[Chunk](_CHUNK_BUFFER)
        batches_tx, batches_rx = anyio.create_memory_object_stream[Batch](min(len(senders), _BATCH_BUFFER))
        flow.start_soon(self._read, chunks_tx)
        flow.start_soon(self._pack, chunks_rx, batches_tx)
        with batches_rx:  # the clones live in the senders
            for sender in senders:
                flow.start_soon(sender.run, batches_rx.clone())

    async def _read(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        with chunks_tx, self._reading:
            await self._source.run(chunks_tx)

    # Chunks to batches ------------------------------------------------------------------------------------------

    async def _pack(
        self, chunks_rx: MemoryObjectReceiveStream[Chunk], batches_tx: MemoryObjectSendStream[Batch]
    ) -> None:
        """Validate and batch; the codec and the policy await nothing, so both run in this one task."""
        with chunks_rx, batches_tx:
            while True:
                due_at = self._batcher.due_at
                try:
                    with anyio.move_on_at(math.inf if due_at is None else due_at) as lingering:
                        chunk = await chunks_rx.receive()
                except anyio.EndOfStream:
                    break
                if lingering.cancelled_caught:
                    await self._flush(batches_tx)
                elif not self._has_left_chunks:
                    await self._pack_chunk(chunk, batches_tx)
            while self._batcher.due_at is not None:
                await self._flush(batches_tx)

    async def _pack_chunk(self, chunk: Chunk, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        latest = latest_timestamp(self._wall_time(), self._settings.records.max_future_seconds)
        now = anyio.current_time()
        offset = chunk.start_offset
        while offset < chunk.end_offset:
            while self._acks.open_spans >= _MAX_OPEN_SPANS or self._full_since is not None:
                if self._full_since is not None and self._stopping.is_set():
                    self._has_left_chunks = True  # for good: behind a gap nothing may be settled
                    return
                await self._room_for_spans(batches_tx)
            encoded = self._codec.encode(
                chunk,
                offset,
                room_events=self._batcher.room_events,
                room_bytes=self._batcher.room_bytes,
                latest=latest,
            )
            if encoded is None:
                await self._flush(batches_tx)
                continue
            offset = encoded.span.end_offset
            self._acks.open(encoded.span)
            self._batcher.add(encoded, now)
            while self._batcher.is_full or self._batcher.is_congested:
                await self._flush(batches_tx)

    async def _room_for_spans(self, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        """Ask for a save, which closes spans; what the batcher holds must be on its way, or they would stay open."""
        await self._flush(batches_tx)
        await self._next_save()

    async def _next_save(self) -> None:
        """Ask for a save, and wait until something happens that the caller may wait for."""
        progress = self._progress
        if self._full_since is None:  # else the next one comes when the interval has passed
            self._save_asked.set()
        if not self._stopping.is_set() or self._full_since is None:
            await progress.wait()

    async def _flush(self, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        batch = self._batcher.take()
        if batch is None:
            return
        try:
            await batches_tx.send(batch)
        except anyio.BrokenResourceError:
            await anyio.sleep_forever()  # every sender has failed; their error cancels this task, too

    def _tell_duplicate(self, event_id: str, stream: Stream, offset: int) -> None:
        self._duplicates_seen += 1
        if self._duplicates_seen <= _DUPLICATES_TOLD:
            log.info("duplicate_skipped", event_id=event_id, path=stream.path, offset=offset)

    # Settlement -------------------------------------------------------------------------------------------------

    def _settle(self, batch: Batch) -> None:
        self._acks.accept(batch)
        self._tell_progress()

    def _reject(self, batch: Batch, refusal: Refusal) -> None:
        """Make a dead letter of the one event of a batch, as the record came."""
        (span, _), event = batch.parts[0], sent_event(batch)
        assert span.chunk is not None
        (document,) = msgspec.json.decode(batch.body)["events"]
        frame = self._codec.find(span, document)
        data, origin = span.chunk.data, span.chunk.start_offset
        framing = span.stream.framing
        rejection = Rejection(
            start_offset=origin + frame.start if frame else span.start_offset,
            end_offset=origin + frame.end if frame else span.end_offset,
            rule=refusal.rule,
            message=refusal.message,
            raw=data[frame.start : frame.end] if frame else batch.body[len(BODY_HEAD) : -len(BODY_TAIL)],
            event_id=event.EventId,
            consumer_id=str(event.ConsumerID),
            status=refusal.status,
            delivery="ambiguous" if refusal.is_ambiguous else "rejected",
            attempts=refusal.attempts,
            header=framing.header if isinstance(framing, CsvRows) else b"",
        )
        self._acks.reject(span, rejection, next(iter(tally([event])), None))
        self._tell_progress()
        log.warning(
            "record_rejected",
            event_id=event.EventId,
            path=span.stream.path,
            offset=rejection.start_offset,
            rule=refusal.rule,
            status=refusal.status,
        )

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def _until_saved(self) -> None:
        """Wait until all that is settled is saved, or until a stop is asked for; then there is a last try."""
        while (self._acks.open_spans or self._unsaved) and not self._stopping.is_set():
            await self._next_save()

    async def _save_every(self) -> None:
        while True:
            pause_s = self._settings.state.commit_interval_seconds
            with anyio.move_on_after(pause_s if self._full_since is None else max(pause_s, _LEAST_PAUSE_S)):
                await self._save_asked.wait()
            self._save_asked = anyio.Event()
            await self._expire()
            await self._save()
            self._lose_patience()

    async def _save(self) -> None:
        """Save what is settled without a gap; shielded, as a transaction that was begun must be accounted for."""
        self._unsaved += self._acks.take()
        if not self._unsaved:
            return
        with anyio.CancelScope(shield=True):
            # Kept until they are on disk: a later checkpoint must not pass the dead letters of one that failed.
            try:
                saved = await run_sync(self._store.save, self._unsaved, self._wall_time())
            except StateUnwritableError as error:
                self._note_room(_Why("state_unwritable", str(error)))
                return
            for checkpoint in saved.done:
                checkpoint.stream.move_checkpoint(checkpoint.end_offset, checkpoint.tail)
            self._unsaved = saved.waiting
            self._note_room(_Why("dead_letters_full" if saved.why else "", saved.why))
            if saved.done:
                self._tell_progress()
                await self._source.after_save()

    def _note_room(self, why: _Why) -> None:
        """Begin or end a pause because what is settled cannot be saved; told once each."""
        before, self._why_full = self._why_full, why
        if why.reason and self._full_since is None:
            self._full_since = anyio.current_time()
        elif not why.reason:
            self._full_since = None
        if why.reason != before.reason:
            if before.reason:
                log.info("delivery_resumed", reason=before.reason)
            if why.reason:
                log.warning("delivery_paused", reason=why.reason, message=why.message)

    def _lose_patience(self) -> None:
        """
        End a one-shot run that has waited long enough for what is settled to be saved.

        Raises:
            DeliveryGaveUpError: What was not saved is pending.
        """
        limit_s = self._settings.delivery.give_up_after_seconds
        if not self._is_one_shot or self._full_since is None or anyio.current_time() < self._full_since + limit_s:
            return
        raise DeliveryGaveUpError(f"nothing could be saved for {limit_s:g} s: {self._why_full.message}")

    async def _expire(self) -> None:
        """Remove the dead letters that are past their retention: at the first call, then once an hour."""
        days = self._settings.state.dead_letter_retention_days
        if not days or anyio.current_time() < self._expires_at:
            return
        self._expires_at = anyio.current_time() + _EXPIRY_INTERVAL_S
        expired = 0
        with suppress(StateUnwritableError):  # the next save tells
            expired = await run_sync(self._store.expire, self._wall_time() - days * _DAY_S)
        if expired:
            log.info("dead_letters_expired", count=expired, retention_days=days)

    # Stop -------------------------------------------------------------------------------------------------------

    async def _stop_ladder(self, signals: Signals, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with signals as received:
            task_status.started()
            async for number in received:
                if self._stopping.is_set():
                    log.warning("drain_aborted", signal=number.name)
                    self._drain.cancel()
                    return
                limit_s = self._settings.delivery.drain_timeout_seconds
                log.info("drain_started", signal=number.name, timeout_seconds=limit_s)
                self._stopping.set()
                self._reading.cancel()
                self._gate.hurry()
                self._drain.deadline = anyio.current_time() + limit_s
                self._tell_progress()  # who waits for room need not do so any longer


def _events_per_batch(settings: Settings) -> int:
    """A batch holds no more than the rate lets through in a second, so that a low rate is kept evenly."""
    rate = settings.delivery.rate_limit_events_per_second
    return min(settings.batch.max_events, max(1, int(rate))) if rate else settings.batch.max_events


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
