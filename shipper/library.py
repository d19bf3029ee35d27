"""The embedded shipper: `send` writes records to the spool, and a pipeline ships them from there."""

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
from shipper.model.errors import ShipperError, SourceError, StateError, first_of
from shipper.model.records import Summary, Totals
from shipper.pipeline.opening import OpenState, open_state
from shipper.pipeline.pipeline import Pipeline
from shipper.sources.feed import Feed, Record, encode_line, join_lines
from shipper.sources.spool import Spool
from shipper.state.store import Store
from shipper.status.live import Live, LiveFile, Pause
from shipper.status.logs import configure_logs

log = structlog.get_logger("library")

_NOT_ENTERED: Final = "the Shipper was not entered; use: async with Shipper(settings) as shipper: …"
_CLOSED: Final = "the Shipper is closed and accepts no more records"


class Shipper:
    """
    Ships the records of this process.

    When `send` returns, the record is in a file of the state directory. It survives a crash of the process, and also of
    the machine if `spool.fsync` is "always". In the end it is accepted by the service, stored in the dead letters with
    the reason, or pending. The next user of the state directory (a `Shipper`, `shipper pipe`, `run` or `backfill`)
    delivers pending records.

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

    Entering the context locks the state directory. Leaving it, also by an exception, refuses further records and drains
    the spool within `delivery.drain_timeout_seconds`; only asyncio's own cancellation while it drains ends that at
    once. The rest stays pending.

    A failure of the shipper itself, such as a broken disk, is raised by `send` and at the end of the context. An
    unavailable service is not a failure: the spool fills, and `send` waits once it is full.

    It runs on asyncio and trio, in one event loop, and is not thread-safe: call
    `anyio.from_thread.run(shipper.send, record)` from a worker thread. Enter and leave the context in the same task.
    Signals are left to the application. If it has not configured structlog, logs are set up as `[log]` says.

    Args:
        settings: Result of `load_settings`; `intake` is required.

    Raises:
        StateInUseError: On entering; another shipper uses the state directory.
        StateError: The state directory is damaged or cannot be written.
        ConfigError: On entering; a setting is missing, or a secret or certificate cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._feed: Feed | None = None
        self._pipeline: Pipeline | None = None
        self._live: Live | None = None
        self._summary: Summary | None = None
        self._error: BaseException | None = None

    @property
    def totals(self) -> Totals:
        """Counts of the records read from the spool so far, including those left by an earlier run."""
        return self._pipeline.totals if self._pipeline else Totals()

    @property
    def summary(self) -> Summary | None:
        """Counts of all records, including unread ones; None until the context has ended."""
        return self._summary

    @property
    def pause(self) -> Pause | None:
        """Why nothing is being delivered, at most a second old; None if deliveries are working."""
        return self._live.pauses[0] if self._live and self._live.pauses else None

    # Sending ----------------------------------------------------------------------------------------------------

    async def send(self, record: Record) -> None:
        """
        Write a record to the spool. Wait while the spool or its disk is full.

        Concurrent calls are faster than one after another. If a call is cancelled or raises, the record may or may not
        have been written, but never a part of it.

        Args:
            record: The fields by name, or one line of JSON. Fields are validated later; an invalid record becomes a
                dead letter. Values must be JSON types, UUID or datetime; these two are written as text, and a datetime
                without a time zone does not make a valid Timestamp.
        Raises:
            TypeError: The record has an unsupported type or a value of one, such as bytes, Decimal, date or set.
            ValueError: It cannot be written as one line, or is longer than `input.max_record_bytes`.
            SourceError: The context has not been entered, or has ended.
            ShipperError: The shipper has failed.
        """
        await self._append(encode_line(record, self._settings.input.max_record_bytes))

    async def send_many(self, records: Iterable[Record]) -> None:
        """
        Write records in order, as `send` does; if one of them is invalid, write none.

        Raises:
            Exception: As `send`; unless it is a TypeError or ValueError, some of the first may have been written.
        """
        if isinstance(records, str | bytes | Mapping):
            raise TypeError(f"a {type(records).__name__} is not a list of records; use send for one record")
        limit = self._settings.input.max_record_bytes
        lines = [encode_line(record, limit) for record in records]
        for piece in join_lines(lines):
            await self._append(piece)

    async def _append(self, lines: bytes) -> None:
        if self._feed is None:
            raise SourceError(_NOT_ENTERED)
        await self._feed.append(lines)

    # Context manager --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._feed is not None:
            raise SourceError("this Shipper has been used before; create another one")
        if not structlog.is_configured():
            configure_logs(self._settings.log.level, self._settings.log.format, now=time.monotonic)
        self._feed = Feed()
        self._has_ended = anyio.Event()
        self._run_scope = anyio.CancelScope(shield=True)  # cancelling the context must not prevent draining
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run, self._feed)
        try:
            await self._feed.is_ready.wait()
        except BaseException:
            self._run_scope.cancel()
            await self._leave()
            raise
        if self._error is not None:
            await self._leave()
            raise self._error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._feed is not None
        self._feed.close(SourceError(_CLOSED))
        await self._leave()
        if self._error is not None and error is None:
            raise self._error

    async def _leave(self) -> None:
        """Drain until the deadline."""
        assert self._feed is not None
        deadline = anyio.current_time() + self._settings.delivery.drain_timeout_seconds
        try:
            with anyio.CancelScope(shield=True):
                with anyio.move_on_at(deadline):
                    await self._feed.is_finished.wait()  # a stop ends reading
                    if self._pipeline is not None:
                        self._pipeline.stop(cause="end of the block")
                    await self._has_ended.wait()
                if self._pipeline is not None and not self._has_ended.is_set():
                    self._pipeline.abort(cause="delivery.drain_timeout_seconds")
                await self._has_ended.wait()
        finally:
            self._run_scope.cancel()  # no effect unless the wait was interrupted despite the shield
            await self._tasks.__aexit__(None, None, None)

    async def _run(self, feed: Feed) -> None:
        """Lock the state directory and run the pipeline until the input ends or it is stopped."""
        try:
            with self._run_scope, ExitStack() as stack:
                state, spool = await run_sync(self._open, stack, feed)
                read_before = state.store.totals().read
                file = LiveFile(state.directory)
                stack.callback(file.write)

                def note(live: Live) -> None:
                    self._live = live
                    feed.is_ready.set()
                    file.update(live)

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
                    side.start_soon(file.write_periodically)
                    summary = await self._pipeline.run()
                    side.cancel_scope.cancel()
                self._summary = await run_sync(_with_unread, summary, spool, state.store, read_before)
        except Exception as group:
            self._error = self._describe(group)
        finally:
            feed.end(self._error or SourceError(_CLOSED))
            self._has_ended.set()

    def _open(self, stack: ExitStack, feed: Feed) -> tuple[OpenState, Spool]:
        state = stack.enter_context(open_state(self._settings))
        return state, state.spool(self._settings, feed, wall_time=time.time)

    def _describe(self, error: BaseException) -> BaseException:
        """Log an error and return the one to raise to callers."""
        error = first_of(error)
        if isinstance(error, OSError):
            directory, cause = self._settings.state.directory, error
            error = StateError(
                f"{directory} cannot be used ({cause.strerror}); fix this and restart: records already written are "
                "still there"
            )
            error.__cause__ = cause
        log.error("shipper_failed", error=str(error) if isinstance(error, ShipperError) else type(error).__name__)
        return error


def _with_unread(summary: Summary, spool: Spool, store: Store, read_before: int) -> Summary:
    """Add the spooled records that were not read before the deadline, as read and pending."""
    if summary.outcome == "finished":
        return summary
    read = store.totals().read - read_before + spool.count_unsettled()
    return msgspec.structs.replace(summary, read=read, pending=summary.pending + read - summary.read)
