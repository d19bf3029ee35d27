"""The shipper within an application: `send` writes records to the spool, and they are shipped from there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from random import Random
from types import TracebackType
from typing import Final, Self

import anyio
import msgspec
import structlog
from anyio.to_thread import run_sync

from shipper.config.settings import Settings
from shipper.model.errors import ShipperError, SourceError, StateError
from shipper.model.records import Totals
from shipper.pipeline import Pipeline, Summary
from shipper.pipeline.opening import OpenState, opened_state
from shipper.sources.feed import Feed, Record, line_of, pieces_of
from shipper.sources.spool import Spool
from shipper.state.store import Store
from shipper.status.live import Live, Pause
from shipper.status.live_file import LiveFile
from shipper.status.logs import configure_logs

log = structlog.get_logger("library")

_NOT_BEGUN: Final = "the block of the Shipper has not begun: async with Shipper(settings) as shipper: …"
_ENDED: Final = "the block of the Shipper has ended: it takes no more records"


class Shipper:
    """
    Ships the records of this process.

    When `send` returns, the record is in a file of the state directory: it survives a crash of the process, and
    one of the machine if `spool.fsync` is "always". In the end it is accepted by the service, in the dead letters with
    its reason, or pending; then the next one that uses the state directory delivers it, be it a `Shipper`, `shipper
    pipe`, `run` or `backfill`.

        import os

        import anyio

        from shipper import Shipper, load_settings

        RECORD = {
            "EventId": "0f8fad5b-d9cb-469f-a165-70867728950e",
            "IP": "192.0.2.1",
            "Timestamp": "2026-01-31T12:30:00Z",
            "BTag": "660123_0123456789abcdef0123456789abcdef",
            "ConsumerID": 1,
            "ConsumerCountry": "GB",
            "ConsumerCurrencyID": "GBP",
            "Username": "quiet_heron",
            "BrandID": 7,
            "CustomerCurrencyID": "1",
            "ConsumerStatus": "Verified",
            "AffiliateID": "",
            "ConsumerState": "",
        }

        async def main() -> None:
            settings = load_settings(config_path=None, environ=os.environ)
            async with Shipper(settings) as shipper:
                await shipper.send(RECORD)
            print(shipper.summary)

        anyio.run(main)

    Entering takes the state directory. Leaving, also by an exception, takes no more records and delivers what is there
    within `delivery.drain_timeout_seconds`; a cancellation does not shorten that. What is left is pending.

    A failure of the shipper itself, such as a disk that is broken, comes out of `send` and of the end of the block. A
    service that is away is none: the spool fills, and `send` waits once it is full.

    It runs on asyncio and on trio, in one event loop, and is not safe for threads: a worker thread calls
    `anyio.from_thread.run(shipper.send, record)`. The block has to end in the task in which it began. Signals are the
    application's own; so are the logs, if it has configured structlog, else they are set up as `[log]` says.

    Args:
        settings: As `load_settings` gives them; `intake` must be there.

    Raises:
        StateInUseError: On entering; another shipper uses the state directory.
        StateError: The state directory is damaged, or cannot be written.
        ConfigError: On entering; a setting is missing, or a secret or certificate cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._fed: Feed | None = None
        self._pipeline: Pipeline | None = None
        self._live: Live | None = None
        self._summary: Summary | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Shipper {self._fed!r} {self._pipeline!r}>"

    @property
    def totals(self) -> Totals:
        """What became of the records that were read from the spool so far, those that an earlier one left included."""
        return self._pipeline.totals if self._pipeline else Totals()

    @property
    def summary(self) -> Summary | None:
        """What became of all records, also of those that were not even read; None before the end of the block."""
        return self._summary

    @property
    def pause(self) -> Pause | None:
        """Why nothing is delivered at the moment, as of at most a second ago; None if all is well."""
        return self._live.pauses[0] if self._live and self._live.pauses else None

    # Sending ----------------------------------------------------------------------------------------------------

    async def send(self, record: Record) -> None:
        """
        Keep a record, to be shipped. Waits while the spool or its disk is full.

        Many tasks may do so at a time, and then it goes faster. If it is cancelled, or raises, the record may have been
        kept or not, but never a part of it.

        Args:
            record: The fields by name, or one line of JSON. What is wrong with the fields is found out later, and makes
                it a dead letter. Values are those of JSON; a UUID and a datetime are written as text, which for a
                datetime without a zone is no valid Timestamp.
        Raises:
            TypeError: It is no record, or has a value of another type, such as bytes, Decimal, date or set.
            ValueError: It cannot be written as one line, or is longer than `input.max_record_bytes`.
            SourceError: The block has not begun, or has ended.
            ShipperError: The shipper has failed.
        """
        await self._keep(line_of(record, self._settings.input.max_record_bytes))

    async def send_many(self, records: Iterable[Record]) -> None:
        """
        Keep records, as `send` does, in their order; if one of them cannot be a record, none is kept.

        Raises:
            Exception: As `send`; if that is no TypeError or ValueError, the first ones may have been kept.
        """
        if isinstance(records, str | bytes | Mapping):
            raise TypeError(f"a {type(records).__name__} is not a list of records; for one record there is send")
        limit = self._settings.input.max_record_bytes
        lines = [line_of(record, limit) for record in records]
        for piece in pieces_of(lines):
            await self._keep(piece)

    async def _keep(self, lines: bytes) -> None:
        if self._fed is None:
            raise SourceError(_NOT_BEGUN)
        await self._fed.append(lines)

    # The block --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._fed is not None:
            raise SourceError("this Shipper was used before; create another one")
        if not structlog.is_configured():
            configure_logs(self._settings.log.level, self._settings.log.format, now=time.monotonic)
        self._fed = Feed()
        self._has_ended = anyio.Event()
        self._life = anyio.CancelScope(shield=True)  # a cancellation of the block does not keep it from draining
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run, self._fed)
        try:
            await self._fed.is_awaited.wait()
        except BaseException:
            self._life.cancel()
            await self._leave()
            raise
        if self._error is not None:
            await self._leave()
            raise self._error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._fed is not None
        self._fed.close(SourceError(_ENDED))
        await self._leave()
        if self._error is not None and error is None:
            raise self._error

    async def _leave(self) -> None:
        """Wait until all is shipped, but not for too long."""
        assert self._fed is not None
        deadline = anyio.current_time() + self._settings.delivery.drain_timeout_seconds
        try:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_at(deadline):
                    await self._fed.is_left.wait()  # a stop ends reading
                    if self._pipeline is not None:
                        self._pipeline.stop(cause="end of the block")
                    await self._has_ended.wait()
                if self._pipeline is not None and not self._has_ended.is_set():
                    self._pipeline.abort(cause="delivery.drain_timeout_seconds")
                await self._has_ended.wait()
        finally:
            self._life.cancel()  # nothing is left to be cancelled, unless the wait was cut off in spite of the shield
            await self._tasks.__aexit__(None, None, None)

    async def _run(self, fed: Feed) -> None:
        """Lock the state directory and run the pipeline until the input ends or it is stopped."""
        try:
            with self._life, ExitStack() as held:
                state, spool = await run_sync(self._open, held, fed)
                read_before = state.store.totals().read
                file = LiveFile(state.directory)
                held.callback(file.write)

                def note(live: Live) -> None:
                    self._live = live
                    fed.is_awaited.set()
                    file.note(live)

                self._pipeline = Pipeline(
                    self._settings,
                    spool,
                    state.store,
                    is_one_shot=False,
                    wall_time=time.time,
                    rng=Random(),
                    command="library",
                    publish=note,
                )
                async with anyio.create_task_group() as side:
                    side.start_soon(file.keep_written)
                    summary = await self._pipeline.run()
                    side.cancel_scope.cancel()
                self._summary = await run_sync(_with_unread, summary, spool, state.store, read_before)
        except Exception as group:
            self._error = self._told(group)
        finally:
            fed.end(self._error or SourceError(_ENDED))
            self._has_ended.set()

    def _open(self, held: ExitStack, fed: Feed) -> tuple[OpenState, Spool]:
        state = held.enter_context(opened_state(self._settings))
        return state, state.spool(self._settings, fed, wall_time=time.time)

    def _told(self, error: BaseException) -> BaseException:
        """Describe an error for the log and for callers of `send`."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OSError):
            told = StateError(
                f"{self._settings.state.directory} cannot be used ({error.strerror}); correct that and start again: "
                "what was kept is still there"
            )
            told.__cause__ = error
            error = told
        log.error("shipper_failed", error=str(error) if isinstance(error, ShipperError) else type(error).__name__)
        return error


def _with_unread(summary: Summary, spool: Spool, store: Store, read_before: int) -> Summary:
    """Count records of the spool that were not read in time as read and pending."""
    if summary.outcome == "finished":
        return summary
    read = store.totals().read - read_before + spool.count_unsettled()
    return msgspec.structs.replace(summary, read=read, pending=summary.pending + read - summary.read)
