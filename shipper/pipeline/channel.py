"""Messages between a worker and its parent process, over a pair of sockets."""

from __future__ import annotations

import pickle
import struct
from contextlib import suppress
from typing import Any, Final

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from msgspec import Struct

from shipper.config.settings import Settings
from shipper.model.errors import ShipperError
from shipper.model.framing import Framing
from shipper.model.records import Checkpoint, StreamKind
from shipper.status.live import Live

_HEAD: Final = struct.Struct("!QQ")  # length of the message, and of the bytes beside it


class LostError(Exception):
    """The other process has gone."""


class Begin(Struct, frozen=True):
    """
    First message to a worker.

    Attributes:
        worker: Which one it is, from 1.
        settings: With its own share of what there is a limit for.
    """

    worker: int
    settings: Settings


class Work(Struct, frozen=True, kw_only=True):
    """To a worker: a chunk, its bytes beside it. The worker uses `number` as its stream id, and reports name it."""

    number: int
    kind: StreamKind
    path: str
    framing: Framing
    start_offset: int
    end_offset: int
    is_oversized: bool
    mistakes: dict[str, int]


class End(Struct, frozen=True):
    """To a worker: there are no more chunks."""


class Listening(Struct, frozen=True):
    """First message from a worker: its signal handler is installed."""


class Ready(Struct, frozen=True):
    """From a worker: it has taken a chunk, and there is room for another one."""


class Report(Struct, frozen=True):
    """
    From a worker.

    Attributes:
        settled: How far its chunks are settled without a gap, and what became of the records.
        pending: Records that it has read and not reported yet.
        live: Its latest snapshot.
    """

    settled: list[Checkpoint]
    pending: int
    live: Live | None = None


class Ended(Struct, frozen=True):
    """Last message from a worker, with its error, if there was one."""

    error: ShipperError | None = None


class Channel:
    """Carries whole messages: a value, and bytes beside it that are not copied more often than has to be."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._received = BufferedByteReceiveStream(stream)
        self._turn = anyio.Lock(fast_acquire=True)

    async def send(self, value: object, data: bytes = b"") -> None:
        """
        Raises:
            LostError: The other process has gone.
        """
        message = pickle.dumps(value)
        try:
            async with self._turn:
                await self._stream.send(_HEAD.pack(len(message), len(data)) + message)
                if data:
                    await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise LostError from None

    async def receive(self) -> tuple[Any, bytes]:
        """
        Wait for the next message; both ends are this program, so unpickling is safe.

        Raises:
            LostError: The other process has gone.
        """
        try:
            length, data_length = _HEAD.unpack(await self._received.receive_exactly(_HEAD.size))
            message = await self._received.receive_exactly(length)
            data = await self._received.receive_exactly(data_length) if data_length else b""
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            raise LostError from None
        return pickle.loads(message), data

    async def drain(self) -> None:
        """
        Discard what still comes until the other process closes its end.

        If this end were closed first, the other process would fail to send, and would not read the last messages.
        """
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await self._received.receive()
