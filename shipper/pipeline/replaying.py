"""Dead letters that a running pipeline sends beside its input, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

import anyio

from shipper.config.settings import Settings
from shipper.model.records import Checkpoint, Totals
from shipper.pipeline.settlement import Settlement
from shipper.pipeline.stages import Stages
from shipper.pipeline.summary import Outcome
from shipper.sources.replay import Replay

_LOOK_S: Final = 0.02


class Replaying:
    """
    One replay.

    Args:
        settings: In effect for these letters.
        is_wanted: Asked now and then; the replay ends once it is not.

    Attributes:
        totals: What became of the letters, as far as it is on disk; complete once `run` has ended.
        reasons: How many of them broke which rule.
        message: Why it was given up; empty if it was not.
        is_over: The pipeline says by this that there are no senders any more.
    """

    def __init__(
        self,
        source: Replay,
        settings: Settings,
        *,
        stages: Stages,
        settlement: Settlement,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._source = source
        self._settings = settings
        self._stages = stages
        self._settlement = settlement
        self._reading = anyio.CancelScope()
        self.totals = Totals()
        self.reasons: dict[str, int] = {}
        self.message = ""
        self._is_wanted = is_wanted
        self.is_over = False

    def note(self, saved: Iterable[Checkpoint]) -> None:
        """Count letters of which it is on disk what became of them."""
        for each in saved:
            self.totals.read += each.read
            self.totals.accepted += each.accepted
            self.totals.dead_lettered += len(each.rejections)
            for rejection in each.rejections:
                self.reasons[rejection.rule] = self.reasons.get(rejection.rule, 0) + 1

    async def run(self) -> Outcome:
        """
        Send the letters; what is not settled when this ends is a dead letter as before.

        It ends early when the pipeline stops, when it is wanted no more, and when nothing of it was settled for
        `delivery.give_up_after_seconds`. What is in flight then has the time of a drain to be settled.

        Raises:
            StateInUseError: The pipeline has no senders yet, or no more.
            StateError: Letters cannot be read, or it cannot be saved what became of them.
        """
        packed = anyio.Event()

        async def pack() -> None:
            await self._stages.replay(self._source, self._settings, self._reading)
            packed.set()

        streams = self._source.streams
        try:
            async with anyio.create_task_group() as packing:
                packing.start_soon(pack)
                await self._until_settled(packed)
                packing.cancel_scope.cancel()
            await self._settlement.save()
        finally:
            for stream in streams:
                stream.is_ending = True
            self.totals.pending = await self._settlement.abandon(streams)
            self.totals.read += self.totals.pending
        if self.message:
            return "gave_up"
        is_all = self._source.is_exhausted and not self._settlement.has_left_chunks and not self._reading.cancel_called
        return "finished" if is_all and not self.totals.pending else "drained"

    async def _until_settled(self, packed: anyio.Event) -> None:
        """Wait until all is saved, or until it is to end early and its time is over."""
        delivery = self._settings.delivery
        settled, settled_at, ends_at = 0, anyio.current_time(), math.inf
        while not packed.is_set() or self._settlement.has_unsaved_of(self._source.streams):
            now = anyio.current_time()
            if self.totals.read > settled:
                settled, settled_at = self.totals.read, now
            if now >= settled_at + delivery.give_up_after_seconds:
                self.message = self.message or f"nothing of it was settled for {delivery.give_up_after_seconds:g} s"
            is_unwanted = bool(self.message) or not self._is_wanted()
            if ends_at == math.inf and (is_unwanted or self._settlement.stopping.is_set()):
                self._reading.cancel()
                ends_at = now + delivery.drain_timeout_seconds
            if is_unwanted:
                for stream in self._source.streams:
                    stream.is_ending = True
            if now >= ends_at or self.is_over or (is_unwanted and self._stages.is_stuck):
                return
            await anyio.sleep(_LOOK_S)
