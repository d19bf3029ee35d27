"""What a source is, and several sources as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from shipper.model.records import Backlog, Checkpoint, Chunk, move_checkpoints


class Source(Protocol):
    """The first stage of a pipeline."""

    @property
    def is_exhausted(self) -> bool:
        """Whether all input has been read."""

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks, in order for each stream, until the input ends or the task is cancelled."""

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Apply saved checkpoints; no other code changes the checkpoints of its streams."""

    def backlog(self) -> Backlog:
        """Return the backlog; called every second, so it must be cheap."""


class JoinedSource:
    """Reads sources concurrently, such as files and the rest of an earlier `pipe` in the spool."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    @property
    def is_exhausted(self) -> bool:
        return all(source.is_exhausted for source in self._sources)

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        async with anyio.create_task_group() as tasks:
            for source in self._sources:
                tasks.start_soon(source.run, chunks_tx)

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move all checkpoints, and let each source handle its streams."""
        move_checkpoints(saved)
        for source in self._sources:
            await source.after_save(())

    def backlog(self) -> Backlog:
        backlogs = [source.backlog() for source in self._sources]
        totals = [backlog.total_bytes for backlog in backlogs if backlog.total_bytes is not None]
        return Backlog(
            lag_bytes=sum(backlog.lag_bytes for backlog in backlogs),
            spool_bytes=sum(backlog.spool_bytes for backlog in backlogs),
            total_bytes=sum(totals) if totals else None,
            unreachable_bytes=sum(backlog.unreachable_bytes for backlog in backlogs),
            unmatched=[message for backlog in backlogs for message in backlog.unmatched],
            unreadable=[message for backlog in backlogs for message in backlog.unreadable],
            unreadable_count=sum(backlog.unreadable_count for backlog in backlogs),
            has_scanned=all(backlog.has_scanned for backlog in backlogs),
            has_unopened=any(backlog.has_unopened for backlog in backlogs),
        )
