"""Replay of dead letters by a running pipeline, beside its input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from shipper.config.settings import DeliverySettings
from shipper.model.records import Batch, Checkpoint, Chunk, Outcome, Totals
from shipper.pipeline.packer import CHUNK_BUFFER, Packer
from shipper.pipeline.senders import SenderPool
from shipper.pipeline.settlement import Settlement
from shipper.sources.replay import Replay

_POLL_S: Final = 0.02


class ReplayRun:
    """
    Sends dead letters through its own packer to the pipeline's senders.

    The packer may have different rules, is never held back, and does not mix letters with records of the input. Unlike
    these, letters are not deduplicated.

    Attributes:
        totals: Counts of letters whose results are saved; complete once `run` has returned.
        message: Why the replay gave up; empty if it did not.
        is_over: Set by the pipeline once its senders have ended.
    """

    def __init__(
        self,
        source: Replay,
        delivery: DeliverySettings,
        packer: Packer,
        *,
        senders: SenderPool,
        settlement: Settlement,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._source = source
        self._delivery = delivery
        self._packer = packer
        self._senders = senders
        self._settlement = settlement
        self._is_wanted = is_wanted
        self._read_scope = anyio.CancelScope()
        self.totals = Totals()
        self.reasons: dict[str, int] = {}
        self.message = ""
        self.is_over = False

    def add(self, saved: Iterable[Checkpoint]) -> None:
        """Count the letters whose results have been saved."""
        for checkpoint in saved:
            self.totals.read += checkpoint.read
            self.totals.accepted += checkpoint.accepted
            self.totals.dead_lettered += len(checkpoint.rejections)
            for rejection in checkpoint.rejections:
                self.reasons[rejection.rule] = self.reasons.get(rejection.rule, 0) + 1

    async def run(self, batches_tx: MemoryObjectSendStream[Batch]) -> Outcome:
        """
        Send the letters; those not settled at the end remain dead letters.

        Ends early when the pipeline stops, when the replay is no longer wanted, or when no letter was settled for
        `delivery.give_up_after_seconds`. Letters in flight are then drained as after a stop.
        """
        streams = self._source.streams
        try:
            async with anyio.create_task_group() as packing:
                packed = anyio.Event()
                packing.start_soon(self._pack, batches_tx, packed)
                await self._wait_until_settled(packed)
                packing.cancel_scope.cancel()
            await self._settlement.save()
        finally:
            for stream in streams:
                stream.is_ending = True
            self.totals.pending = await self._settlement.abandon(streams)
            self.totals.read += self.totals.pending
        if self.message:
            return "gave_up"
        has_read_all = self._source.is_exhausted and not self._read_scope.cancel_called
        has_sent_all = has_read_all and not self._settlement.has_skipped_chunks and not self.totals.pending
        return "finished" if has_sent_all else "drained"

    async def _pack(self, batches_tx: MemoryObjectSendStream[Batch], packed: anyio.Event) -> None:
        chunks_tx, chunks_rx = anyio.create_memory_object_stream[Chunk](CHUNK_BUFFER)
        with batches_tx, chunks_rx:
            async with anyio.create_task_group() as flow:
                flow.start_soon(self._packer.run, chunks_rx, batches_tx)
                with chunks_tx, self._read_scope:
                    await self._source.run(chunks_tx)
        packed.set()

    async def _wait_until_settled(self, packed: anyio.Event) -> None:
        """Wait until everything is saved, or until an early end and its drain timeout."""
        delivery = self._delivery
        settled, settled_at, ends_at = 0, anyio.current_time(), math.inf
        while not packed.is_set() or self._settlement.has_unsaved_of(self._source.streams):
            now = anyio.current_time()
            if self.totals.read > settled:
                settled, settled_at = self.totals.read, now
            if now >= settled_at + delivery.give_up_after_seconds:
                self.message = self.message or f"no letter was settled for {delivery.give_up_after_seconds:g} s"
            is_unwanted = bool(self.message) or not self._is_wanted()
            if ends_at == math.inf and (is_unwanted or self._settlement.is_stopping):
                self._read_scope.cancel()
                ends_at = now + delivery.drain_timeout_seconds
            if is_unwanted:
                for stream in self._source.streams:
                    stream.is_ending = True
            if now >= ends_at or self.is_over or (is_unwanted and self._senders.is_stuck):
                return
            await anyio.sleep(_POLL_S)
