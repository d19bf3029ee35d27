"""
Does what other commands ask a running pipeline for, over the control socket of its state directory.

Whatever a client sends, or does not, costs the pipeline nothing: requests are bounded in bytes and in time, clients in
number, and what goes wrong with one of them ends that one alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from typing import Annotated, Final

import anyio
import msgspec
import structlog
from anyio.abc import ByteStream, SocketListener
from anyio.to_thread import run_sync
from msgspec import Struct
from msgspec.structs import replace

from shipper.config.load import SettingsFile
from shipper.config.settings import RecordsSettings, Settings, require_endpoint
from shipper.model.errors import ConfigError, ShipperError, StateInUseError, first_of
from shipper.model.version import __version__
from shipper.pipeline.erasure import Erasure
from shipper.pipeline.opening import OpenState
from shipper.pipeline.pipeline import Pipeline
from shipper.pipeline.summary import Summary
from shipper.sources.replay import Replay
from shipper.sources.segments import segments_in
from shipper.state.letters import Selection, open_letters
from shipper.status.live import Pause
from shipper.system.control import PROTOCOL, REQUEST_BYTES, Answer, Request, listening

log = structlog.get_logger("pipeline")

_CLIENTS_MAX: Final = 8
_REQUEST_LIMIT_S: Final = 5.0
_SEND_LIMIT_S: Final = 5.0
_ROOM_S: Final = 0.1  # until the next look whether there is a descriptor for a client
_PROBE_LIMIT_S: Final = 10.0
_LOOK_S: Final = 0.02
_END_LIMIT_S: Final = 5.0
_LOOK_LIMIT_S: Final = 5.0
_LEFT_TO_DO, _IN_USE = 4, 5  # exit codes


class ReplayRequest(Struct, kw_only=True):
    """
    Which dead letters to send.

    Attributes:
        limit: So many at most; None = all.
        records: What a valid record is; everything else is as the running process has it.
        destination: The service that the client's settings name.
    """

    selection: Selection
    limit: int | None
    records: RecordsSettings
    destination: str


class EraseRequest(Struct, kw_only=True):
    """
    Whose dead letters to erase.

    Attributes:
        records: As for a replay.
        is_confirmed: False = tell what there is.
    """

    consumer_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,40}$")]
    records: RecordsSettings
    is_confirmed: bool


class Erased(Struct):
    """How many letters there were, and those that may be somebody else's, in words."""

    letters: int
    doubtful: list[str]


class Replayed(Struct):
    """What came of a replay: its summary, and how many letters broke which rule."""

    summary: Summary
    reasons: dict[str, int]


@asynccontextmanager
async def controlled(
    pipeline: Pipeline, settings: Settings, state: OpenState, file: SettingsFile | None
) -> AsyncIterator[None]:
    """
    Answer requests while this is entered; where there can be no socket, warn, and go on without.

    Args:
        settings: Of the process.
        file: Where they are from; None = it is not known.
    """
    with ExitStack() as stack:
        listener: socket.socket | None = None
        try:
            listener = stack.enter_context(listening(state.directory))
        except OSError as error:
            log.warning("control_unavailable", message=f"no command can ask this process for anything: {error}")
        async with anyio.create_task_group() as clients:
            control = _Control(pipeline, settings, state, file)
            if listener is not None:
                clients.start_soon(control.serve, await SocketListener.from_socket(listener))
            yield
            with anyio.move_on_after(_END_LIMIT_S):
                await control.until_idle()
            clients.cancel_scope.cancel()


class _NoRequestError(ShipperError):
    """What a client sent is no request that can be understood."""

    exit_code = 2


class _Version(Struct):
    protocol: int
    version: str


class _Client:
    """A client's end of a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.is_gone = False

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

    async def watch(self) -> None:
        """Note when the client goes, or closes its half to end what it has asked for; until then, or cancelled."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await self._stream.receive()
        self.is_gone = True

    async def answer(self, message: str = "", code: int | None = None, content: object = None) -> None:
        """
        Send an answer; one with a code is the last.

        Raises:
            TimeoutError, anyio.BrokenResourceError: The client does not listen.
        """
        with anyio.fail_after(_SEND_LIMIT_S):
            answer = Answer(message=message, code=code, content=msgspec.Raw(msgspec.json.encode(content)))
            await self._stream.send(msgspec.json.encode(answer) + b"\n")


class _Control:
    """Answers the clients of one pipeline; it does one thing with the dead letters at a time."""

    def __init__(self, pipeline: Pipeline, settings: Settings, state: OpenState, file: SettingsFile | None) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._state = state
        self._file = file
        self._clients = 0
        self._requests = 0  # that are not answered yet
        self._is_busy = False
        self._commands = {"retry": self._retry, "replay": self._replay, "erase": self._erase}

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
        except* (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            pass  # it has gone, or asks and takes nothing: a timeout is an OSError, too
        except* Exception as group:  # a defect, which is no reason to stop shipping
            log.error("request_failed", error=type(first_of(group)).__name__)
        finally:
            self._clients -= 1

    async def _answer(self, client: _Client) -> None:
        if self._clients > _CLIENTS_MAX:
            await client.answer(f"process {os.getpid()} has too many requests; try again", _IN_USE)
            return
        failure: BaseException | None = None
        try:
            request = await client.request()
            if (command := self._commands.get(request.command)) is None:
                raise _NoRequestError(f"process {os.getpid()} is shipper {__version__}, which cannot do that")
            log.info("request_received", command=request.command)
            self._requests += 1
            try:
                await command(client, request.content)
            finally:
                self._requests -= 1
        except* ShipperError as group:
            failure = first_of(group)
        if isinstance(failure, ShipperError):
            await client.answer(f"shipper: {failure}", failure.exit_code)

    async def _retry(self, client: _Client, _: bytes) -> None:
        """Probe now, and tell what came of it, if that is known soon, and what it does not know of its settings."""
        message, code = await self._retried(client)
        await client.answer("\n".join([message, *await self._unknown_settings()]), code)

    async def _retried(self, client: _Client) -> tuple[str, int]:
        pipeline, process = self._pipeline, f"process {os.getpid()}"
        pauses = pipeline.pauses
        if not pauses and not pipeline.is_failing:
            return f"{process} is not paused: there is nothing to retry", 0
        pipeline.retry()
        if not pauses:
            return f"{process} waited for its next attempt; it is made now", 0
        await client.answer(f"{process} was {_in_words(pauses)}; it tries again now")
        with anyio.move_on_after(_PROBE_LIMIT_S):
            while True:
                if not pipeline.is_probing:
                    break
                await anyio.sleep(_LOOK_S)
        if not (pauses := pipeline.pauses):
            return "delivery has resumed", 0
        if pipeline.is_probing:
            return "there is no answer yet; look again with: shipper status", _LEFT_TO_DO
        advice = "".join(f"\n  what to do: {pause.advice}" for pause in pauses if pause.advice)
        return f"it is still {_in_words(pauses)}{advice}", _LEFT_TO_DO

    async def _unknown_settings(self) -> list[str]:
        """Return, in sentences, which settings are written and not in effect: a retry does not read them again."""
        found, has_changed = self._pipeline.notices, False
        if self._file is None:
            return found
        with anyio.move_on_after(_LOOK_LIMIT_S):  # a file system may hang
            has_changed = await run_sync(self._file.has_changed, abandon_on_cancel=True)
        if has_changed:
            found.append(
                f"{self._file.path} has changed since process {os.getpid()} read it. For the new settings, "
                f"{self._pipeline.renewal.reload}"
            )
        return found

    async def _replay(self, client: _Client, content: bytes) -> None:
        """Send dead letters, and tell what became of them; a client that goes away ends that."""
        try:
            wanted = msgspec.json.decode(content, type=ReplayRequest)
        except msgspec.MsgspecError:
            raise _NoRequestError("this is no replay that can be understood") from None
        if wanted.destination != require_endpoint(self._settings, "intake").base_url:
            raise ConfigError(
                f"process {os.getpid()}, which runs on {self._state.directory}, sends to another address",
                key="intake.base_url",
            )
        if self._is_busy or not self._pipeline.may_replay:
            raise self._in_use("its input has an end, or it does so already")
        self._is_busy = True
        try:
            pauses = self._pipeline.pauses
            waits = f"; it is {_in_words(pauses)}" if pauses else ""
            await client.answer(f"process {os.getpid()}, which is running, sends them{waits}")
            opened = await run_sync(open_letters, self._state.directory)
            assert opened is not None, "the store has made it"
            with closing(opened) as letters:
                ids = await run_sync(letters.ids, replace(wanted.selection, is_whole=True), wanted.limit)
                delimiter = self._settings.input.csv_delimiter
                source = Replay(letters, ids, self._state.next_stream_id, csv_delimiter=delimiter)
                async with anyio.create_task_group() as side:
                    side.start_soon(client.watch)
                    summary, reasons = await self._pipeline.replay(source, wanted.records, lambda: not client.is_gone)
                    side.cancel_scope.cancel()
            code = summary.exit_code(is_one_shot=True)
            await client.answer(code=code, content=Replayed(summary, reasons))
        finally:
            self._is_busy = False

    async def _erase(self, client: _Client, content: bytes) -> None:
        """Erase the dead letters of a consumer, or count them, while nothing is saved."""
        try:
            wanted = msgspec.json.decode(content, type=EraseRequest)
        except msgspec.MsgspecError:
            raise _NoRequestError("this is no erasure that can be understood") from None
        spooled = await run_sync(segments_in, self._state.directory / "spool")
        if self._is_busy or not self._pipeline.may_replay or spooled:
            raise self._in_use("its input has an end, or is in the spool, or dead letters are being sent or erased")
        erasure = Erasure(replace(self._settings, records=wanted.records), self._state.store, wanted.consumer_id)

        def work() -> Erased:
            found = erasure.find()
            return Erased(erasure.erase(found) if wanted.is_confirmed else len(found.letters), found.doubtful)

        self._is_busy = True
        try:
            await client.answer(code=0, content=await self._pipeline.between_saves(work))
        finally:
            self._is_busy = False

    def _in_use(self, why: str) -> StateInUseError:
        return StateInUseError(
            f"{self._state.directory} is in use by a running shipper (process {os.getpid()}), which cannot do that "
            f"now: {why}. Wait for its end, or stop it, and run the same command again. Nothing is lost meanwhile"
        )

    async def until_idle(self) -> None:
        """Wait until a client knows what came of what it asked for."""
        while True:
            if not self._requests:
                break
            await anyio.sleep(_LOOK_S)


def _in_words(pauses: Sequence[Pause]) -> str:
    return "; ".join(f"paused ({pause.reason}): {pause.message}" for pause in pauses)
