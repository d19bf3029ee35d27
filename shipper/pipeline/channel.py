"""What the process of a pipeline and those of its workers say to each other, over a pair of sockets."""

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
    To a worker, first of all.

    Attributes:
        worker: Which one it is, from 1.
        settings: With its own share of what there is a limit for.
    """

    worker: int
    settings: Settings


class Work(Struct, frozen=True, kw_only=True):
    """To a worker: a chunk, its bytes beside it. There, `number` is its stream; so what comes back names it."""

    number: int
    kind: StreamKind
    path: str
    framing: Framing
    start_offset: int
    end_offset: int
    is_oversized: bool
    mistakes: dict[str, int]


class End(Struct, frozen=True):
    """To a worker: there is no more."""


class Heeds(Struct, frozen=True):
    """From a worker, first of all: from now on it heeds the signal to hurry, which would have ended it before."""


class Ready(Struct, frozen=True):
    """From a worker: it has taken a chunk in, and there is room for another one."""


class Report(Struct, frozen=True):
    """
    From a worker.

    Attributes:
        settled: How far its chunks are settled without a gap, and what became of the records.
        pending: Records that it has read, and that stand in no report yet.
        live: How it stands.
    """

    settled: list[Checkpoint]
    pending: int
    live: Live | None = None


class Ended(Struct, frozen=True):
    """From a worker, last of all, with what went wrong, if anything did."""

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
            LostError: Nobody takes it.
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
        Wait for the next message; both ends are processes of one program, so it is taken for what it is.

        Raises:
            LostError: There are no more.
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

        Had this end been closed first, the other one would fail to send, and would not read what was said last.
        """
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await self._received.receive()
