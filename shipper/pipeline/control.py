"""
Handles requests of other commands to a running pipeline, over the control socket of its state directory.

Clients cannot disturb the pipeline: their number and the size and time of their requests are limited, and an error ends
only the connection it occurs on.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from typing import Annotated, Final, TypeVar

import anyio
import msgspec
import structlog
from anyio.abc import ByteStream, SocketListener
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.to_thread import run_sync
from msgspec import Struct
from msgspec.structs import replace

from shipper.config.load import SettingsFile
from shipper.config.settings import RecordsSettings, Settings, require_endpoint
from shipper.model.errors import ConfigError, ShipperError, StateInUseError, first_of
from shipper.model.records import Summary
from shipper.model.version import __version__
from shipper.pipeline.erasure import Erasure
from shipper.pipeline.opening import OpenState
from shipper.pipeline.pipeline import Pipeline, poll_until
from shipper.sources.replay import Replay
from shipper.sources.segments import segments_in
from shipper.state.letters import Selection, open_letters
from shipper.status.live import Pause
from shipper.system.control import PROTOCOL, REQUEST_BYTES, Answer, Request, listening

log = structlog.get_logger("pipeline")

T = TypeVar("T")

_CLIENTS_MAX: Final = 8
_REQUEST_LIMIT_S: Final = 5.0
_SEND_LIMIT_S: Final = 5.0
_ACCEPT_RETRY_S: Final = 0.1  # when no file descriptor is free
_PROBE_LIMIT_S: Final = 10.0
_END_LIMIT_S: Final = 5.0
_FILE_LIMIT_S: Final = 5.0
_UNFINISHED, _IN_USE = 4, 5  # exit codes


class ReplayRequest(Struct, kw_only=True):
    """A request to send dead letters."""

    selection: Selection
    limit: int | None  # maximum number; None = all
    records: RecordsSettings  # validation settings of the client; all other settings are those of the running process
    destination: str  # the service named by the client's settings


class ReplayResult(Struct):
    """The summary of a replay, and the number of rejections by rule."""

    summary: Summary
    reasons: dict[str, int]


class EraseRequest(Struct, kw_only=True):
    """A request to erase a consumer's dead letters or, if not confirmed, to count them; `records` as for a replay."""

    consumer_id: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,40}$")]
    records: RecordsSettings
    is_confirmed: bool


class EraseResult(Struct):
    """The number of the consumer's letters, and descriptions of records that may be another consumer's."""

    letters: int
    doubtful: list[str]


@asynccontextmanager
async def control_server(
    pipeline: Pipeline, settings: Settings, state: OpenState, file: SettingsFile | None
) -> AsyncIterator[None]:
    """Answer requests until the context ends; if no socket can be created, log a warning and continue without it."""
    control = _Control(pipeline, settings, state, file)
    with ExitStack() as stack:
        async with anyio.create_task_group() as clients:
            try:
                listener = stack.enter_context(listening(state.directory))
            except OSError as error:
                log.warning("control_unavailable", message=f"other commands cannot send requests: {error}")
            else:
                clients.start_soon(control.serve, await SocketListener.from_socket(listener))
            yield
            with anyio.move_on_after(_END_LIMIT_S):
                await control.until_idle()
            clients.cancel_scope.cancel()


class _BadRequestError(ShipperError):
    exit_code = 2


class _Version(Struct):
    protocol: int
    version: str


class _Client:
    """A connection to a client; its methods raise on connection errors and timeouts."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.is_gone = False

    async def request(self) -> Request:
        with anyio.fail_after(_REQUEST_LIMIT_S):
            try:
                line = await BufferedByteReceiveStream(self._stream).receive_until(b"\n", REQUEST_BYTES)
            except anyio.DelimiterNotFound:
                raise _BadRequestError("the request is too long") from None
        client = _decode(line, _Version)
        if client.protocol != PROTOCOL:
            raise _BadRequestError(
                f"process {os.getpid()} is shipper {__version__}, and this is {client.version}, which uses another "
                "protocol: restart the running process, or use its version of the command"
            )
        return _decode(line, Request)

    async def watch(self) -> None:
        """Wait until the client disconnects, or closes its half to cancel its request."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await self._stream.receive()
        self.is_gone = True

    async def answer(self, message: str = "", code: int | None = None, content: object = None) -> None:
        """Send an answer; the last one has a code."""
        with anyio.fail_after(_SEND_LIMIT_S):
            answer = Answer(message=message, code=code, content=msgspec.Raw(msgspec.json.encode(content)))
            await self._stream.send(msgspec.json.encode(answer) + b"\n")


def _decode(content: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _BadRequestError("invalid request") from None


class _Control:
    """Handles the clients of a pipeline; requests about dead letters run one at a time."""

    def __init__(self, pipeline: Pipeline, settings: Settings, state: OpenState, file: SettingsFile | None) -> None:
        self._pipeline = pipeline
        self._settings = settings
        self._state = state
        self._file = file
        self._clients = 0
        self._active_requests = 0
        self._is_busy = False
        self._commands = {"retry": self._retry, "replay": self._replay, "erase": self._erase}

    async def serve(self, listener: SocketListener) -> None:
        async with listener, anyio.create_task_group() as clients:
            while True:
                try:
                    stream = await listener.accept()
                except (OSError, anyio.BrokenResourceError):  # the client disconnected, or no file descriptor is free
                    await anyio.sleep(_ACCEPT_RETRY_S)
                else:
                    clients.start_soon(self._serve_client, stream)

    async def until_idle(self) -> None:
        """Wait until all requests are answered."""
        await poll_until(lambda: not self._active_requests)

    async def _serve_client(self, stream: ByteStream) -> None:
        self._clients += 1
        try:
            async with stream:
                await self._answer(_Client(stream))
        except* (OSError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            pass  # the client disconnected or timed out; `TimeoutError` is an `OSError`
        except* Exception as group:  # a bug here must not stop shipping
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
                raise _BadRequestError(f"process {os.getpid()} is shipper {__version__}, which lacks this command")
            log.info("request_received", command=request.command)
            await client.answer()  # acknowledges it; the command may take long
            self._active_requests += 1
            try:
                await command(client, request.content)
            finally:
                self._active_requests -= 1
        except* ShipperError as group:
            failure = first_of(group)
        if isinstance(failure, ShipperError):
            await client.answer(f"shipper: {failure}", failure.exit_code)

    async def _retry(self, client: _Client, _: bytes) -> None:
        """Probe now; report the result if it arrives in time, and changed settings that a retry does not apply."""
        message, code = await self._probe(client)
        await client.answer("\n".join([message, *await self._setting_notices()]), code)

    async def _probe(self, client: _Client) -> tuple[str, int]:
        pipeline, process = self._pipeline, f"process {os.getpid()}"
        pauses = pipeline.pauses
        if not pauses and pipeline.senders.gate.failing_since is None:
            return f"{process} is not paused: there is nothing to retry", 0
        pipeline.retry()
        if not pauses:
            return f"{process} was waiting for its next attempt; it tries again now", 0
        reasons = ", ".join(pause.reason for pause in pauses)  # the answer has the messages, if they still apply
        await client.answer(f"{process} was paused ({reasons}); it tries again now")
        with anyio.move_on_after(_PROBE_LIMIT_S):
            await poll_until(lambda: not pipeline.is_probing)
        if not (pauses := pipeline.pauses):
            return "delivery has resumed", 0
        if pipeline.is_probing:
            return "there is no answer yet; check again with: shipper status", _UNFINISHED
        advice = "".join(f"\n  what to do: {pause.advice}" for pause in pauses if pause.advice)
        return f"it is still {_describe_pauses(pauses)}{advice}", _UNFINISHED

    async def _setting_notices(self) -> list[str]:
        notices, has_changed = self._pipeline.notices, False
        if self._file is None:
            return notices
        with anyio.move_on_after(_FILE_LIMIT_S):  # a file system may hang
            has_changed = await run_sync(self._file.has_changed, abandon_on_cancel=True)
        if has_changed:
            notices.append(
                f"{self._file.path} has changed since process {os.getpid()} read it. For the new settings, "
                f"{self._pipeline.reload_advice.reload}"
            )
        return notices

    async def _replay(self, client: _Client, content: bytes) -> None:
        """Send dead letters and report the result; stop if the client disconnects."""
        request = _decode(content, ReplayRequest)
        if request.destination != require_endpoint(self._settings, "intake").base_url:
            raise ConfigError(
                f"process {os.getpid()}, which runs on {self._state.directory}, sends to another address",
                key="intake.base_url",
            )
        with self._busy("it is not `shipper run`, or is already sending dead letters"):
            pauses = self._pipeline.pauses
            pause = f"; it is {_describe_pauses(pauses)}" if pauses else ""
            await client.answer(f"process {os.getpid()}, which is running, sends them{pause}")
            with closing(await run_sync(open_letters, self._state.directory)) as letters:
                ids = await run_sync(letters.ids, replace(request.selection, is_whole=True), request.limit)
                delimiter = self._settings.input.csv_delimiter
                source = Replay(letters, ids, self._state.next_stream_id, csv_delimiter=delimiter)
                async with anyio.create_task_group() as side:
                    side.start_soon(client.watch)
                    summary, reasons = await self._pipeline.replay(source, request.records, lambda: not client.is_gone)
                    side.cancel_scope.cancel()
            code = summary.exit_code(is_one_shot=True)
            await client.answer(code=code, content=ReplayResult(summary, reasons))

    async def _erase(self, client: _Client, content: bytes) -> None:
        """Erase or count the dead letters of a consumer, between saves."""
        request = _decode(content, EraseRequest)
        spooled = await run_sync(segments_in, self._state.directory / "spool")
        reason = "it is not `shipper run`, still has spooled records, or is already sending or erasing dead letters"
        with self._busy(reason, is_possible=not spooled):
            erasure = Erasure(replace(self._settings, records=request.records), self._state.store, request.consumer_id)

            def work() -> EraseResult:
                data = erasure.find()
                letters = erasure.erase(data) if request.is_confirmed else len(data.letters)
                return EraseResult(letters, data.doubtful)

            await client.answer(code=0, content=await self._pipeline.settlement.between_saves(work))

    @contextmanager
    def _busy(self, refusal: str, *, is_possible: bool = True) -> Iterator[None]:
        """Allow one operation on dead letters at a time, and none if the pipeline may not replay."""
        if self._is_busy or not self._pipeline.may_replay or not is_possible:
            raise StateInUseError(
                f"{self._state.directory} is in use by a running shipper (process {os.getpid()}), which cannot do that "
                f"now: {refusal}. Wait until it ends, or stop it, and run the same command again. Nothing is lost "
                "meanwhile"
            )
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


def _describe_pauses(pauses: Sequence[Pause]) -> str:
    return "; ".join(f"paused ({pause.reason}): {pause.message}" for pause in pauses)
