"""From chunks to batches: validates records, packs them, and opens their spans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from shipper.codec import Codec, key_of, latest_timestamp
from shipper.config.settings import Settings
from shipper.model.records import Batch, Chunk, EncodedChunk
from shipper.pipeline.batching import Batcher
from shipper.pipeline.hold import Brake, Halt, Hold
from shipper.pipeline.settlement import Settlement
from shipper.state.stuck import Place
from shipper.system.work import Piece, at_work, noted

_SPAN_RECORDS_MAX: Final = 10_000  # so that no span alone passes far beyond what may be held


class Packer:
    """
    Args:
        hold: Where to wait with an input that must not be settled as it is.
        wall_time: Seconds since the epoch.
        suspects: By input, where records are that kept an earlier process from coming to an end; None = this packer
            works beside another one, which alone writes down where it is.

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
        suspects: Mapping[str, Sequence[Place]] | None,
    ) -> None:
        self._suspects = suspects or {}
        self._is_noting = suspects is not None
        self._settlement = settlement
        self._hold = hold
        self._wall_time = wall_time
        self._records = settings.records
        self._answers_seen = 0
        self._brake = Brake(settings.records.mistake_limit)
        self._codec = self._new_codec(settings)
        self._batcher = Batcher(
            max_events=_events_per_batch(settings),
            max_bytes=settings.batch.max_bytes,
            linger_s=settings.batch.linger_seconds,
            unique_consumers=settings.batch.unique_consumers,
        )
        self.waits_for_input_since: float | None = None

    def __repr__(self) -> str:
        return f"<Packer {self._batcher!r}>"

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings; with new rules, reset the count of mistakes."""
        self._batcher.max_events = _events_per_batch(settings)
        if settings.records == self._records:
            return
        self._records = settings.records
        self._brake = Brake(settings.records.mistake_limit)
        self._codec = self._new_codec(settings)

    def _new_codec(self, settings: Settings) -> Codec:
        return Codec(
            settings.records,
            max_record_bytes=settings.input.max_record_bytes,
            window=self._settlement.window,
            on_duplicate=self._settlement.note_duplicate,
        )

    async def run(self, chunks_rx: MemoryObjectReceiveStream[Chunk], batches_tx: MemoryObjectSendStream[Batch]) -> None:
        """Pack until there are no more chunks; codec and batcher await nothing, so both run in this one task."""
        with chunks_rx, batches_tx:
            while True:
                self._look_at_answers()
                if self.waits_for_input_since is None:
                    self.waits_for_input_since = anyio.current_time()
                try:
                    chunk = await self._next_chunk(chunks_rx)
                except anyio.EndOfStream:
                    break
                if chunk is None:
                    if (due_at := self._batcher.due_at) is not None and due_at <= anyio.current_time():
                        await self._flush(batches_tx)
                    continue
                self.waits_for_input_since = None
                if not self._settlement.has_left_chunks:
                    stream = chunk.stream
                    source = stream.key if self._is_noting else ""
                    with noted(Piece("validate", stream.path, source, chunk.start_offset, chunk.end_offset)):
                        await self._pack(chunk, batches_tx)
            await self._empty(batches_tx)

    async def _next_chunk(self, chunks_rx: MemoryObjectReceiveStream[Chunk]) -> Chunk | None:
        """Wait for a chunk; None = the open batch has lingered, or there is an answer that events may wait for."""
        due_at = self._batcher.due_at
        chunk: Chunk | None = None
        has_ended = False
        with anyio.CancelScope(deadline=math.inf if due_at is None else due_at) as waiting:
            if not self._batcher.waiting_ids:
                return await chunks_rx.receive()
            async with anyio.create_task_group() as race:
                race.start_soon(self._cancel_at_answer, waiting)
                try:
                    chunk = await chunks_rx.receive()
                except anyio.EndOfStream:
                    has_ended = True
                finally:
                    race.cancel_scope.cancel()
        if has_ended:
            raise anyio.EndOfStream
        return chunk  # also if an answer came at the same moment

    async def _cancel_at_answer(self, waiting: anyio.CancelScope) -> None:
        await self._settlement.until_progress()
        waiting.cancel()

    async def _pack(self, chunk: Chunk, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        now = anyio.current_time()
        latest = self._latest()
        path, key, offset = chunk.stream.path, chunk.stream.key, chunk.start_offset
        suspects = [
            each for each in self._suspects.get(key, ()) if each.offset < chunk.end_offset and offset < each.end
        ]
        while offset < chunk.end_offset:
            if not await self._has_room(batches_tx) or chunk.stream.is_ending:
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
                await self._flush(batches_tx)
                continue
            if encoded.span.rejections and (halt := await self._halt(encoded)):
                self._codec.forget(encoded)  # it is looked at once more
                await self._empty(batches_tx)
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
            self._settlement.open(encoded.span, now)
            self._batcher.add(encoded, now)
            while self._batcher.is_full or self._batcher.is_congested:
                await self._flush(batches_tx)

    async def _has_room(self, batches_tx: MemoryObjectSendStream[Batch]) -> bool:
        """Wait until the next records may be encoded; False = there will be no room, and the rest is to be skipped."""
        settlement, batcher = self._settlement, self._batcher
        while not settlement.has_left_chunks:
            self._look_at_answers()  # nothing is awaited from here on until the records are in the window
            if settlement.is_shut:
                settlement.leave_rest()
            elif batcher.is_full or batcher.is_congested:
                await self._flush(batches_tx)
            elif settlement.has_room:
                return True
            elif batcher.due_at is not None and settlement.acks.totals.pending <= batcher.events:
                await settlement.save()
                if not settlement.has_room:  # and nothing else can make any
                    await self._flush(batches_tx)
            else:
                with anyio.CancelScope(deadline=math.inf if batcher.due_at is None else batcher.due_at) as waiting:
                    await settlement.until_room()
                if waiting.cancelled_caught:
                    await self._flush(batches_tx)  # spans could stay open for what is in the open batch
        return False

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

    async def _empty(self, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        """Send all that is packed, and what becomes of the events that wait for an answer."""
        while True:
            self._look_at_answers()
            if self._batcher.due_at is not None:
                await self._flush(batches_tx)
            elif self._batcher.waiting_ids:
                await self._settlement.until_progress()
            else:
                return

    async def _flush(self, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        batch = self._batcher.take()
        if batch is None:
            return
        try:
            await batches_tx.send(batch)
        except anyio.BrokenResourceError:
            await anyio.sleep_forever()  # every sender has failed; their error cancels this task, too

    def _look_at_answers(self) -> None:
        """After an answer, send or leave out the events that waited for it."""
        settlement, batcher = self._settlement, self._batcher
        if settlement.answers == self._answers_seen:
            return
        self._answers_seen = settlement.answers
        for event_id in tuple(batcher.waiting_ids):
            key = key_of(event_id)
            if settlement.window.is_accepted(key):
                for event in batcher.drop(event_id):
                    settlement.settle_duplicate(event.span, event.ordinal, event.line)
            elif not settlement.window.is_unsettled(key) and batcher.release(event_id):
                settlement.window.admit(key)  # the others wait for the one that is sent now


def _events_per_batch(settings: Settings) -> int:
    """A batch holds no more than the rate lets through in a second, so that a low rate is kept evenly."""
    rate = settings.delivery.rate_limit_events_per_second
    return min(settings.batch.max_events, max(1, int(rate))) if rate else settings.batch.max_events
