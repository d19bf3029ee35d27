"""
Does what other commands ask a running pipeline for, over the control socket of its state directory.

Whatever a client sends, or does not, costs the pipeline nothing: requests are bounded in bytes and in time, clients in
number, and what goes wrong with one of them ends that one alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio.abc import ByteStream, SocketListener
from msgspec import Struct

from shipper.model.version import __version__
from shipper.pipeline.pipeline import Pipeline
from shipper.status.live import Pause
from shipper.system.control import PROTOCOL, REQUEST_BYTES, Answer, Request, listening

log = structlog.get_logger("pipeline")

_CLIENTS_MAX: Final = 8
_REQUEST_LIMIT_S: Final = 5.0
_SEND_LIMIT_S: Final = 5.0
_ROOM_S: Final = 0.1  # until the next look whether there is a descriptor for a client
_PROBE_LIMIT_S: Final = 10.0
_PROBE_LOOK_S: Final = 0.02
_USAGE, _LEFT_TO_DO, _IN_USE = 2, 4, 5  # exit codes


@asynccontextmanager
async def controlled(pipeline: Pipeline, directory: Path) -> AsyncIterator[None]:
    """Answer requests while this is entered; where there can be no socket, warn, and go on without."""
    with ExitStack() as stack:
        listener: socket.socket | None = None
        try:
            listener = stack.enter_context(listening(directory))
        except OSError as error:
            log.warning("control_unavailable", message=f"no command can ask this process for anything: {error}")
        async with anyio.create_task_group() as clients:
            if listener is not None:
                clients.start_soon(_Control(pipeline).serve, await SocketListener.from_socket(listener))
            yield
            clients.cancel_scope.cancel()


class _NoRequestError(Exception):
    """What a client sent is no request that can be understood; with the reason for a person."""


class _Version(Struct):
    protocol: int
    version: str


class _Client:
    """A client's end of a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def request(self) -> Request:
        """
        Receive the request.

        Raises:
            _NoRequestError: It is none.
            TimeoutError, anyio.EndOfStream: It does not come.
        """
        line = bytearray()
        with anyio.fail_after(_REQUEST_LIMIT_S):
            while not line.endswith(b"\n"):
                if len(line) >= REQUEST_BYTES:
                    raise _NoRequestError("the request is too long")
                line += await self._stream.receive(REQUEST_BYTES - len(line))
        try:
            spoken = msgspec.json.decode(line, type=_Version)
            if spoken.protocol != PROTOCOL:
                raise _NoRequestError(
                    f"process {os.getpid()} is shipper {__version__}, and this is {spoken.version}, which "
                    "cannot talk to it: restart the running one, or use its version of the command"
                )
            return msgspec.json.decode(line, type=Request)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise _NoRequestError("this is no request of shipper's") from None

    async def answer(self, message: str = "", code: int | None = None) -> None:
        """
        Send an answer; one with a code is the last.

        Raises:
            TimeoutError, anyio.BrokenResourceError: The client does not listen.
        """
        with anyio.fail_after(_SEND_LIMIT_S):
            await self._stream.send(msgspec.json.encode(Answer(message=message, code=code)) + b"\n")


class _Control:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._clients = 0
        self._commands = {"retry": self._retry}

    async def serve(self, listener: SocketListener) -> None:
        """Attend to clients until this is cancelled."""
        async with listener, anyio.create_task_group() as clients:
            while True:
                try:
                    stream = await listener.accept()
                except (OSError, anyio.BrokenResourceError):  # it has gone, or there is no descriptor
                    await anyio.sleep(_ROOM_S)
                else:
                    clients.start_soon(self._attend, stream)

    async def _attend(self, stream: ByteStream) -> None:
        self._clients += 1
        try:
            async with stream:
                await self._answer(_Client(stream))
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            pass  # it has gone, or asks and takes nothing: a timeout is an OSError, too
        finally:
            self._clients -= 1

    async def _answer(self, client: _Client) -> None:
        if self._clients > _CLIENTS_MAX:
            await client.answer(f"process {os.getpid()} has too many requests; try again", _IN_USE)
            return
        try:
            request = await client.request()
            if (command := self._commands.get(request.command)) is None:
                raise _NoRequestError(f"process {os.getpid()} is shipper {__version__}, which cannot do that")
            log.info("request_received", command=request.command)
            await command(client)
        except _NoRequestError as error:
            await client.answer(str(error), _USAGE)

    async def _retry(self, client: _Client) -> None:
        """Probe now, and tell what came of it, if that is known soon."""
        pipeline, process = self._pipeline, f"process {os.getpid()}"
        pauses, is_waiting = pipeline.pauses, pipeline.is_waiting
        if not is_waiting:
            await client.answer(f"{process} is not paused: there is nothing to retry", 0)
            return
        pipeline.retry()
        if not pauses:
            await client.answer(f"{process} waited for its next attempt; it is made now", 0)
            return
        await client.answer(f"{process} was {_in_words(pauses)}; it tries again now")
        with anyio.move_on_after(_PROBE_LIMIT_S):
            while True:
                if not pipeline.is_probing:
                    break
                await anyio.sleep(_PROBE_LOOK_S)
        if not (pauses := pipeline.pauses):
            await client.answer("delivery has resumed", 0)
        elif pipeline.is_probing:
            await client.answer("there is no answer yet; look again with: shipper status", _LEFT_TO_DO)
        else:
            advice = "".join(f"\n  what to do: {pause.advice}" for pause in pauses if pause.advice)
            await client.answer(f"it is still {_in_words(pauses)}{advice}", _LEFT_TO_DO)


def _in_words(pauses: Sequence[Pause]) -> str:
    return "; ".join(f"paused ({pause.reason}): {pause.message}" for pause in pauses)
