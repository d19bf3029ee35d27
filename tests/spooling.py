"""Runs a spool during a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from shipper.model.records import Chunk
from shipper.sources.spool import Spool


@asynccontextmanager
async def spooling(spool: Spool, *, room: int = 0) -> AsyncIterator[MemoryObjectReceiveStream[Chunk]]:
    """
    Yield the chunks that a spool sends; cancel the spool at the end of the block.

    Args:
        room: Number of chunks it may send before one is received.
    """
    tx, rx = anyio.create_memory_object_stream[Chunk](room)

    async def run() -> None:
        with tx:
            await spool.run(tx)

    with rx, anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            yield rx
            group.cancel_scope.cancel()
