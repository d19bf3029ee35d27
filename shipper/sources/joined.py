"""Several sources as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from shipper.model.records import Backlog, Checkpoint, Chunk, move_checkpoints


class Part(Protocol):
    """A source; see the pipeline's, which stands above."""

    @property
    def is_exhausted(self) -> bool: ...
    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None: ...
    async def after_save(self, saved: Sequence[Checkpoint]) -> None: ...
    def backlog(self) -> Backlog: ...


class Joined:
    """Reads sources side by side, such as files and what an earlier `pipe` had to leave in the spool."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    @property
    def is_exhausted(self) -> bool:
        return all(part.is_exhausted for part in self._parts)

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send the chunks of all sources until each has ended."""
        async with anyio.create_task_group() as side_by_side:
            for part in self._parts:
                side_by_side.start_soon(part.run, chunks_tx)

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Move the checkpoints of all parts, and let each look at its own streams."""
        move_checkpoints(saved)
        for part in self._parts:
            await part.after_save(())

    def backlog(self) -> Backlog:
        """Add up what the parts have before them."""
        each = [part.backlog() for part in self._parts]
        totals = [one.total_bytes for one in each if one.total_bytes is not None]
        return Backlog(
            lag_bytes=sum(one.lag_bytes for one in each),
            spool_bytes=sum(one.spool_bytes for one in each),
            total_bytes=sum(totals) if totals else None,
            unreachable_bytes=sum(one.unreachable_bytes for one in each),
            unmatched=[words for one in each for words in one.unmatched],
            unreadable=[words for one in each for words in one.unreadable],
            unreadable_count=sum(one.unreadable_count for one in each),
            is_known=all(one.is_known for one in each),
        )
