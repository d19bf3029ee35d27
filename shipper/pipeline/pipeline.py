"""
The flow from a source to the senders, and the ladder of a stop.

Stages end because their input ended: each owns its stream ends, and closing them is the only signal downstream. A stop
is a ladder: the first signal ends reading and gives the rest a deadline; the deadline or a second signal cuts the rest
off. What was settled by then is saved in any case.
"""

from __future__ import annotations

import math
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Final, Protocol

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from anyio.to_thread import run_sync

from shipper import __version__
from shipper.batching import Batcher
from shipper.codec import Codec, latest_timestamp, tally
from shipper.config import Settings, require_endpoint
from shipper.delivery.credentials import ClockSkew, Credentials, NoTokenError, credentials_of
from shipper.delivery.endpoint import Endpoint, make_ssl_context
from shipper.delivery.gate import Gate
from shipper.delivery.parting import sent_event
from shipper.delivery.sender import DeliveryCounts, Sender, Shared
from shipper.errors import ConfigError, DeliveryGaveUpError
from shipper.framing import CsvRows
from shipper.pipeline.observer import Observer
from shipper.pipeline.reload import Reloading, reloaded
from shipper.pipeline.saver import Saver
from shipper.pipeline.summary import Outcome, Summary
from shipper.records import Backlog, Batch, Chunk, Refusal, Rejection, Stream, Totals
from shipper.state.acks import Acks
from shipper.state.store import Store
from shipper.telemetry.live import Live, Phase
from shipper.wire import BODY_HEAD, BODY_TAIL

log = structlog.get_logger("pipeline")

Signals = AbstractContextManager[AsyncIterator[signal.Signals]]

_CHUNK_BUFFER: Final = 2
_BATCH_BUFFER: Final = 8
_MAX_OPEN_SPANS: Final = 4096
_READING_SHARE: Final = 0.8  # of the time for a drain; the rest is for what was read
_DUPLICATES_TOLD: Final = 5


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

    def backlog(self) -> Backlog:
        """Tell what it has before it; cheap, as it is asked every second."""


class Pipeline:
    """
    One run from a source to the service.

    Args:
        is_one_shot: The input has an end, and the run is given up after `delivery.give_up_after_seconds`.
        wall_time: Seconds since the epoch.
        command: For the snapshots.
        publish: Called with a snapshot every second.
        reloading: What SIGHUP leads to.
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
        command: str = "",
        publish: Callable[[Live], None] = lambda live: None,
        reloading: Reloading | None = None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._wall_time = wall_time
        self._rng = rng
        self._command = command
        self._publish = publish
        self._reloading = reloading
        give_up_after_s = settings.delivery.give_up_after_seconds if is_one_shot else None
        self._gate = Gate(settings.delivery, give_up_after_s=give_up_after_s, rng=rng)
        self._reading = anyio.CancelScope()
        self._drain = anyio.CancelScope()
        self._renewing = anyio.CancelScope()
        self._draining = anyio.Event()
        self._stopping = anyio.Event()
        self._stopped_at = math.inf
        self._phase: Phase = "starting"
        self._progress = anyio.Event()
        self._acks = Acks()
        self._saver = Saver(
            self._acks,
            store,
            settings.state,
            on_saved=self._after_save,
            give_up_after_s=give_up_after_s,
            wall_time=wall_time,
        )
        self._waits_for_input_since: float | None = None
        self._reload_turn = anyio.Lock()
        self._reload_error = ""
        self._restart_needed: list[str] = []
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
            signals: Gives SIGTERM, SIGINT and SIGHUP while it is entered; None = they are somebody else's.
        Raises:
            StateError: The state store cannot be written; nothing is lost.
        """
        started_at = anyio.current_time()
        shared, senders = self._make_senders()
        observer = self._observer(shared, senders)
        gave_up = ""
        await self._saver.expire()
        try:
            with self._drain:
                async with anyio.create_task_group() as side:
                    if signals is not None:
                        await side.start(self._heed, signals, side, shared)
                    side.start_soon(self._read_until_idle)
                    side.start_soon(self._saver.run)
                    side.start_soon(self._keep_credentials, shared)
                    side.start_soon(observer.run)
                    async with anyio.create_task_group() as flow:
                        self._start_flow(flow, senders)
                        self._phase = "running" if self._phase == "starting" else self._phase
                    await self._until_saved()
                    side.cancel_scope.cancel()
        except* DeliveryGaveUpError as group:
            gave_up = (
                f"{_first_leaf(group)}. What was not delivered stays pending; run the same command again, or let it "
                "wait longer (delivery.give_up_after_seconds)"
            )
        finally:
            self._phase = "stopped"
            try:
                await self._saver.save()  # shields itself
            finally:
                observer.end("failed" if sys.exception() else self._outcome(gave_up))
        counts = shared.counts
        return Summary(
            **msgspec.structs.asdict(self._saver.saved(self._acks.totals)),
            batches=counts.batches,
            requests=counts.requests,
            retries=counts.retries,
            seconds=round(anyio.current_time() - started_at, 3),
            outcome=self._outcome(gave_up),
            message=gave_up,
        )

    def _make_senders(self) -> tuple[Shared, list[Sender]]:
        """
        Raises:
            ConfigError: A secret, certificate or key cannot be used.
        """
        endpoint, delivery = require_endpoint(self._settings, "intake"), self._settings.delivery
        ssl_context = make_ssl_context(endpoint, "intake")
        shared = Shared(
            gate=self._gate,
            credentials=self._credentials(self._settings, ssl_context),
            settings=delivery,
            settle=self._settle,
            reject=self._reject,
            counts=DeliveryCounts(),
            skew=ClockSkew(),
            rng=self._rng,
            wall_time=self._wall_time,
            is_compressing=delivery.compression == "gzip",
        )
        return shared, [
            Sender(Endpoint(endpoint, delivery, section="intake", ssl_context=ssl_context), shared, index)
            for index in range(delivery.senders)
        ]

    def _credentials(self, settings: Settings, ssl_context: ssl.SSLContext | None) -> Credentials:
        return credentials_of(
            require_endpoint(settings, "intake"),
            settings.delivery,
            section="intake",
            ssl_context=ssl_context,
            wall_time=self._wall_time,
            rng=self._rng,
        )

    async def _keep_credentials(self, shared: Shared) -> None:
        """Have tokens renewed, and others once there are others."""
        while True:
            with anyio.CancelScope() as self._renewing:
                await shared.credentials.run()

    def _observer(self, shared: Shared, senders: list[Sender]) -> Observer:
        def certificate_expires_at() -> float | None:
            return min((at for each in senders if (at := each.certificate_expires_at) is not None), default=None)

        now = self._wall_time()
        return Observer(
            Live(
                version=__version__,
                process_id=os.getpid(),
                command=self._command,
                destination=require_endpoint(self._settings, "intake").base_url,
                state_directory=str(self._settings.state.directory),
                phase=self._phase,
                started_at=now,
                at=now,
            ),
            phase=lambda: self._phase,
            reload_error=lambda: self._reload_error,
            restart_needed=lambda: self._restart_needed,
            acks=self._acks,
            gate=self._gate,
            saver=self._saver,
            shared=shared,
            backlog=self._source.backlog,
            is_exhausted=lambda: self._source.is_exhausted,
            certificate_expires_at=certificate_expires_at,
            publish=self._publish,
            wall_time=self._wall_time,
        )

    def _outcome(self, gave_up: str) -> Outcome:
        if gave_up:
            return "gave_up"
        if self._drain.cancelled_caught or self._saver.has_unsaved:
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
                if self._waits_for_input_since is None:
                    self._waits_for_input_since = anyio.current_time()
                try:
                    with anyio.move_on_at(math.inf if due_at is None else due_at) as lingering:
                        chunk = await chunks_rx.receive()
                except anyio.EndOfStream:
                    break
                if lingering.cancelled_caught:
                    await self._flush(batches_tx)
                    continue
                self._waits_for_input_since = None
                if not self._has_left_chunks:
                    await self._pack_chunk(chunk, batches_tx)
            while self._batcher.due_at is not None:
                await self._flush(batches_tx)

    async def _pack_chunk(self, chunk: Chunk, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        latest = latest_timestamp(self._wall_time(), self._settings.records.max_future_seconds)
        now = anyio.current_time()
        offset = chunk.start_offset
        while offset < chunk.end_offset:
            while self._acks.open_spans >= _MAX_OPEN_SPANS or self._saver.full_since is not None:
                if self._saver.full_since is not None and self._stopping.is_set():
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
            self._acks.open(encoded.span, now)
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
        self._saver.ask()
        if not self._stopping.is_set() or self._saver.full_since is None:
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
        while (self._acks.open_spans or self._saver.has_unsaved) and not self._stopping.is_set():
            await self._next_save()

    async def _after_save(self) -> None:
        self._tell_progress()
        await self._source.after_save()

    # Stopping and changing ---------------------------------------------------------------------------------------

    def stop(self, *, cause: str) -> None:
        """
        Read no more, and settle what was read, within `delivery.drain_timeout_seconds`.

        Args:
            cause: For the log.
        """
        delivery = self._settings.delivery
        limit_s = delivery.drain_timeout_seconds
        log.info("drain_started", cause=cause, timeout_seconds=limit_s, drain=delivery.drain)
        self._phase = "draining"
        self._stopped_at = anyio.current_time()
        self._drain.deadline = self._stopped_at + limit_s
        self._gate.hurry()
        self._draining.set()
        if delivery.drain == "input":
            self._end_reading()

    def abort(self, *, cause: str) -> None:
        """End at once; what is settled is saved, the rest stays pending."""
        log.warning("drain_aborted", cause=cause)
        self._drain.cancel()

    async def _heed(
        self, signals: Signals, side: TaskGroup, shared: Shared, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        with signals as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    side.start_soon(self._reload, shared)
                elif not self._draining.is_set():
                    self.stop(cause=number.name)
                else:
                    self.abort(cause=number.name)
                    return

    async def _read_until_idle(self) -> None:
        """Once it stops, go on reading until nothing new has come for a while; or until time grows short."""
        await self._draining.wait()
        delivery = self._settings.delivery
        last_call = self._stopped_at + delivery.drain_timeout_seconds * _READING_SHARE
        while (now := anyio.current_time()) < last_call and not self._stopping.is_set():
            since = self._waits_for_input_since
            idle_at = delivery.drain_idle_seconds + (now if since is None else max(since, self._stopped_at))
            if now >= idle_at:
                break
            await anyio.sleep_until(min(idle_at, last_call))
        if not self._stopping.is_set():
            log.info("reading_ended", is_idle=now < last_call)
            self._end_reading()

    def _end_reading(self) -> None:
        self._stopping.set()
        self._reading.cancel()
        self._tell_progress()  # who waits for room need not do so any longer

    async def _reload(self, shared: Shared) -> None:
        """Take over settings that were read again, all that can change or, if anything is wrong, nothing."""
        if self._reloading is None:
            return
        async with self._reload_turn:
            self._reloading.begin()
            try:
                await self._take_over(shared, self._reloading)
                self._reload_error = ""
            except (ConfigError, NoTokenError) as error:
                log.error("reload_refused", error=str(error), message="the settings are what they were")
                self._reload_error = str(error)
            finally:
                self._reloading.end()

    async def _take_over(self, shared: Shared, reloading: Reloading) -> None:
        # What reads may hang, as on a file system that is away; a stop need not wait for it.
        new = await run_sync(reloading.read, abandon_on_cancel=True)
        reload = reloaded(self._settings, new)
        endpoint = require_endpoint(reload.settings, "intake")
        credentials = self._credentials(reload.settings, make_ssl_context(endpoint, "intake"))
        await credentials.authorize()
        self._settings = reload.settings
        self._restart_needed = reload.waiting
        shared.credentials = credentials
        self._renewing.cancel()
        self._gate.reconfigure(reload.settings.delivery)
        self._batcher.max_events = _events_per_batch(reload.settings)
        reloading.apply(reload.settings)
        log.info("settings_reloaded", changed=reload.changed)
        if reload.waiting:
            log.warning("restart_needed", keys=reload.waiting, message="these take effect at the next start")


def _events_per_batch(settings: Settings) -> int:
    """A batch holds no more than the rate lets through in a second, so that a low rate is kept evenly."""
    rate = settings.delivery.rate_limit_events_per_second
    return min(settings.batch.max_events, max(1, int(rate))) if rate else settings.batch.max_events


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
