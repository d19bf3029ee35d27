"""From chunks to batches: what is read is validated, packed, and entered into the books."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from shipper.codec import Codec, Columns, latest_timestamp, tally
from shipper.config.settings import Settings
from shipper.delivery.parts import SentEvent, event_in, sent_event, sent_events
from shipper.model.framing import CsvRows
from shipper.model.records import Batch, Chunk, EncodedChunk, LedgerKey, Refusal, Rejection, Stream
from shipper.pipeline.batching import Batcher, Deferred
from shipper.pipeline.brake import Brake
from shipper.pipeline.hold import Halt, Hold
from shipper.pipeline.settlement import Settlement
from shipper.state.stuck import Place
from shipper.system.work import Piece, at_work, noted

log = structlog.get_logger("pipeline")

_DUPLICATES_TOLD: Final = 5
_SPAN_RECORDS_MAX: Final = 10_000  # so that no span alone passes far beyond what may be held


class Packer:
    """
    Args:
        hold: Where to wait with an input that must not be settled as it is.
        wall_time: Seconds since the epoch.
        suspects: By input, where records are that kept an earlier process from coming to an end.

    Attributes:
        waits_for_input_since: Nothing has come since then, on the event loop's clock; None while something is packed.
    """

    def __init__(
        self,
        settings: Settings,
        settlement: Settlement,
        hold: Hold,
        *,
        wall_time: Callable[[], float],
        suspects: Mapping[str, Sequence[Place]],
    ) -> None:
        self._suspects = suspects
        self._settlement = settlement
        self._hold = hold
        self._wall_time = wall_time
        self._records = settings.records
        self._duplicates_seen = 0
        self._brake = Brake(settings.records.mistake_limit)
        self._codec = self._new_codec(settings)
        self._batcher = Batcher(
            max_events=_events_per_batch(settings),
            max_bytes=settings.batch.max_bytes,
            linger_s=settings.batch.linger_seconds,
            unique_consumers=settings.batch.unique_consumers,
        )
        self._lingering = anyio.CancelScope()
        self.waits_for_input_since: float | None = None

    def __repr__(self) -> str:
        return f"<Packer {self._batcher!r}>"

    def remember(self, keys: bytes) -> None:
        """Add the EventIds that earlier runs got accepted."""
        self._codec.remember(keys)

    def reconfigure(self, settings: Settings) -> None:
        """Take over what may change; by other rules, what was refused by the old ones counts no more."""
        self._batcher.max_events = _events_per_batch(settings)
        if settings.records == self._records:
            return
        self._records = settings.records
        self._brake = Brake(settings.records.mistake_limit)
        codec = self._new_codec(settings)
        codec.take_over(self._codec)
        self._codec = codec

    def _new_codec(self, settings: Settings) -> Codec:
        return Codec(
            settings.records, max_record_bytes=settings.input.max_record_bytes, on_duplicate=self._tell_duplicate
        )

    async def run(self, chunks_rx: MemoryObjectReceiveStream[Chunk], batches_tx: MemoryObjectSendStream[Batch]) -> None:
        """Pack until there are no more chunks; codec and batcher await nothing, so both run in this one task."""
        with chunks_rx, batches_tx:
            while True:
                due_at = self._batcher.due_at
                if self.waits_for_input_since is None:
                    self.waits_for_input_since = anyio.current_time()
                try:
                    with anyio.move_on_at(math.inf if due_at is None else due_at) as self._lingering:
                        chunk = await chunks_rx.receive()
                except anyio.EndOfStream:
                    break
                if self._lingering.cancelled_caught:
                    await self._flush(batches_tx)
                    continue
                self.waits_for_input_since = None
                if not self._settlement.has_left_chunks:
                    stream = chunk.stream
                    with noted(Piece("validate", stream.path, stream.key, chunk.start_offset, chunk.end_offset)):
                        await self._pack(chunk, batches_tx)
            while self._batcher.due_at is not None or self._batcher.waiting_ids:
                if self._batcher.due_at is None:
                    await self._settlement.until_progress()
                await self._flush(batches_tx)

    async def _pack(self, chunk: Chunk, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        async def flush() -> None:
            await self._flush(batches_tx)

        now = anyio.current_time()
        latest = self._latest()
        path, key, offset = chunk.stream.path, chunk.stream.key, chunk.start_offset
        suspects = [
            each for each in self._suspects.get(key, ()) if each.offset < chunk.end_offset and offset < each.end
        ]
        while offset < chunk.end_offset:
            if self._settlement.has_left_chunks or not await self._settlement.room(flush):
                return
            room_events = min(self._batcher.room_events, _SPAN_RECORDS_MAX, self._brake.room(chunk.stream))
            if suspects:
                room_events = 1
            encoded: EncodedChunk | None
            if any(each.is_single and each.offset == offset for each in suspects):
                encoded = self._codec.refuse_unseen(chunk, offset)
            else:
                with at_work(Piece("validate", path, key, offset, chunk.end_offset, is_single=bool(suspects))):
                    encoded = self._codec.encode(
                        chunk, offset, room_events=room_events, room_bytes=self._batcher.room_bytes, latest=latest
                    )
            if encoded is None:
                await flush()
                continue
            if encoded.span.rejections and (halt := await self._halt(encoded)):
                self._codec.forget(encoded)  # it is looked at once more
                while self._batcher.due_at is not None:
                    await flush()
                await self._hold.wait(halt)
                latest = self._latest()
                continue
            if not self._codec.is_current(encoded):  # there was an answer while the service was asked for the time
                self._codec.forget(encoded)
                continue
            self._hold.end()
            if encoded.span.rejections or self._brake.is_watching:
                self._brake.note(encoded)
            offset = encoded.span.end_offset
            self._settlement.acks.open(encoded.span, now)
            self._batcher.add(encoded, now)
            while self._batcher.is_full or self._batcher.is_congested:
                await flush()

    def _latest(self) -> str:
        return latest_timestamp(self._wall_time(), self._records.max_future_seconds)

    async def _halt(self, encoded: EncodedChunk) -> Halt | None:
        """Return why a piece with refusals must not be settled; None if it may be."""
        if mistakes := self._brake.mistakes(encoded):
            return self._hold.unlike(encoded.span.stream, mistakes)
        records = self._brake.seems_late(encoded)
        halt = await self._hold.late_clock(records) if records else None
        if records and halt is None:
            self._brake.trust_the_clock()
        return halt

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
            log.info("duplicate_skipped", event_id=event_id, path=stream.shown_path, offset=offset)

    # What became of a batch --------------------------------------------------------------------------------------

    def settle(self, batch: Batch) -> None:
        """The service has taken it; what waited for that is a duplicate."""
        if batch.parts[0][0].stream.kind == "replay":
            self._count_once(batch)
        for span, ordinals in batch.parts:
            self._codec.accept(span, ordinals)
        waiting = self._batcher.waiting_ids
        settled = waiting & set(_event_ids(batch)) if waiting else ()
        self._settlement.acks.accept(batch)
        if settled:
            for event_id in settled:
                for event in self._batcher.drop(event_id):
                    self._settle_duplicate(event)
        self._settlement.tell_progress()

    def _count_once(self, batch: Batch) -> None:
        """Count replayed events that were accepted before as duplicates in the ledger; they are sent all the same."""
        spans = [span for span, ordinals in batch.parts for _ in ordinals]
        for span, event in zip(spans, sent_events(batch), strict=True):
            if span.stream.kind == "replay" and self._codec.is_accepted(event.EventId):
                self._settlement.acks.note_repeated(span, _ledger_key(event))

    def _settle_duplicate(self, event: Deferred) -> None:
        span = event.span
        assert span.chunk is not None
        offset = span.chunk.start_offset + span.bounds_of(event.ordinal)[0]
        self._tell_duplicate(event.event_id, span.stream, offset)
        self._settlement.acks.repeat(span, _ledger_key(event_in(event.line)))

    def reject(self, batch: Batch, refusal: Refusal) -> None:
        """The service refuses its one event: make a dead letter of it, as the record came."""
        ((span, (ordinal,)),), event = batch.parts, sent_event(batch)
        assert span.chunk is not None
        start, end = span.bounds_of(ordinal)
        framing = span.stream.framing
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
            header=framing.header if isinstance(framing, CsvRows) else b"",
        )
        self._codec.refuse(span, event.EventId)
        self._settlement.acks.reject(span, rejection, _ledger_key(event))
        self._let_next(event.EventId)
        self._settlement.tell_progress()
        log.warning(
            "record_rejected",
            event_id=event.EventId,
            path=span.stream.shown_path,
            offset=rejection.start_offset,
            rule=refusal.rule,
            status=refusal.status,
        )

    def _let_next(self, event_id: str) -> None:
        """After a refusal, let the next record of the same EventId be sent: it may be a corrected one."""
        if not self._batcher.release(event_id):
            self._codec.release(event_id)
        elif (due_at := self._batcher.due_at) is not None:
            self._lingering.deadline = min(self._lingering.deadline, due_at)  # it waits for input, maybe for long


def _event_ids(batch: Batch) -> list[str]:
    found: list[str] = []
    for span, ordinals in batch.parts:
        is_whole = len(ordinals) == len(span.event_ids)
        found += span.event_ids if is_whole else [span.event_ids[ordinal] for ordinal in ordinals]
    return found


def _ledger_key(event: SentEvent) -> LedgerKey | None:
    return next(iter(tally(Columns.of([event]))), None)


def _events_per_batch(settings: Settings) -> int:
    """A batch holds no more than the rate lets through in a second, so that a low rate is kept evenly."""
    rate = settings.delivery.rate_limit_events_per_second
    return min(settings.batch.max_events, max(1, int(rate))) if rate else settings.batch.max_events
