"""
The flow from a source to the service, and how a stop escalates.

A stage ends when its input ends: it owns its ends of the streams, and closing them ends the next stage. A stop
escalates: the first signal ends reading and sets a deadline for draining; the deadline or a second signal cancels the
drain. Settled records are saved in any case.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync
from msgspec.structs import asdict, replace

from shipper.codec.dedupe import new_window
from shipper.config.settings import RecordsSettings, Settings, require_endpoint
from shipper.delivery.credentials import NoTokenError
from shipper.model.errors import ConfigError, DeliveryGaveUpError, StateInUseError, first_of
from shipper.model.records import Batch, BatchResult, Checkpoint, Chunk, Outcome, Stream, Summary, Totals, shown
from shipper.model.version import __version__
from shipper.pipeline.observer import Observer
from shipper.pipeline.packer import CHUNK_BUFFER, Hold, Packer
from shipper.pipeline.reload import ReloadHooks, reload_settings
from shipper.pipeline.replaying import ReplayRun
from shipper.pipeline.senders import SenderPool
from shipper.pipeline.settlement import Settlement, StateStore
from shipper.sources.joined import Source
from shipper.sources.replay import Replay
from shipper.status.headline import notices
from shipper.status.live import Live, Pause
from shipper.status.pauses import ReloadAdvice
from shipper.system.native import ENGINE
from shipper.system.work import StuckPlace

log = structlog.get_logger("pipeline")

Signals = AbstractContextManager[AsyncIterator[signal.Signals]]

_BATCH_BUFFER: Final = 8
_POLL_S: Final = 0.02
_LAST_SAVE_LIMIT_S: Final = 30.0  # a disk that takes longer is hanging
_READING_SHARE: Final = 0.8  # of the drain timeout; the rest is for delivering what was read


class Pipeline:
    """
    One run from a source to the service.

    Args:
        is_one_shot: The input has an end, and the run gives up after `delivery.give_up_after_seconds`.
        command: Name of the command, for snapshots.
        publish: Called with a snapshot every second.
        reload_hooks: What SIGHUP does; None = it stops the pipeline, as its terminal was closed.
        suspects: By input, the places of records that an earlier process got stuck on.

    Attributes:
        gave_up: Why the run gave up; None if it did not.

    Raises:
        ConfigError: A secret, certificate or key cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        source: Source,
        store: StateStore,
        *,
        is_one_shot: bool,
        wall_time: Callable[[], float],
        rng: Random,
        command: str = "",
        publish: Callable[[Live], None] = lambda live: None,
        reload_hooks: ReloadHooks | None = None,
        suspects: Mapping[str, Sequence[StuckPlace]] | None = None,
    ) -> None:
        self._settings = settings
        self._is_one_shot = is_one_shot
        self._source = source
        self._wall_time = wall_time
        self._reload_hooks = reload_hooks
        give_up_after_s = settings.delivery.give_up_after_seconds if is_one_shot else None
        self._read_scope = anyio.CancelScope()
        self._drain_scope = anyio.CancelScope()
        self._is_draining = anyio.Event()
        self._stopped_at = math.inf
        self._reload_lock = anyio.Lock()
        self._replay_run: ReplayRun | None = None
        self._batches_tx: MemoryObjectSendStream[Batch] | None = None
        self.gave_up: DeliveryGaveUpError | None = None
        self.reload_advice = _reload_advice(can_reload=reload_hooks is not None, is_one_shot=is_one_shot)
        self.settlement = Settlement(
            store,
            settings.state,
            window=new_window(settings.records.dedupe_window),
            on_saved=self._after_save,
            give_up_after_s=give_up_after_s,
            wall_time=wall_time,
        )
        self.senders = SenderPool(
            settings, give_up_after_s=give_up_after_s, reload_advice=self.reload_advice, wall_time=wall_time, rng=rng
        )
        self._hold = Hold(
            settings, self.settlement, self.senders, give_up_after_s=give_up_after_s, give_up=self._give_up
        )
        self._packer = Packer(settings, self.settlement, self._hold, wall_time=wall_time, suspects=suspects or {})
        now = wall_time()
        self._observer = Observer(
            Live(
                version=__version__,
                engine=ENGINE,
                process_id=os.getpid(),
                command=command,
                destination=require_endpoint(settings, "intake").base_url,
                state_directory="" if settings.input.kafka else str(settings.state.directory),
                working_directory=_working_directory(),
                phase="starting",
                started_at=now,
                at=now,
            ),
            source=source,
            hold=self._hold,
            senders=self.senders,
            settlement=self.settlement,
            publish=publish,
            wall_time=wall_time,
        )

    def __repr__(self) -> str:
        return f"<Pipeline {self._packer!r} {self.settlement!r} {self.senders!r}>"

    @property
    def totals(self) -> Totals:
        return self.settlement.acks.totals

    @property
    def pauses(self) -> list[Pause]:
        """Why delivery is paused; empty if it is not."""
        return self._observer.update().pauses

    @property
    def notices(self) -> list[str]:
        """Sentences about the last reload of the settings."""
        return notices(self._observer.update())

    @property
    def is_probing(self) -> bool:
        """Whether delivery is paused or input held back, and the result of the current attempt is not known yet."""
        return self.senders.gate.is_probing or self._hold.is_rechecking

    def retry(self) -> None:
        """Try again now instead of waiting."""
        self.senders.gate.retry()
        self._hold.recheck()

    # The flow ----------------------------------------------------------------------------------------------------

    async def run(self, signals: Signals | None = None) -> Summary:
        """
        Ship until the source ends or a signal stops it.

        Args:
            signals: Yields SIGTERM, SIGINT and SIGHUP; None = the caller handles them.
        Raises:
            StateError: The state store cannot be written; nothing is lost.
        """
        started_at, observer = anyio.current_time(), self._observer
        self.settlement.remember_accepted()
        first = observer.update()
        try:
            with self._drain_scope:
                async with anyio.create_task_group() as side:
                    if signals is not None:
                        await side.start(self._on_signals, signals, side)
                    side.start_soon(self._read_until_idle)
                    side.start_soon(self.settlement.save_periodically)
                    side.start_soon(self.settlement.expire_periodically)
                    side.start_soon(observer.run)
                    await self._flow()
                    await self.settlement.wait_until_saved()
                    side.cancel_scope.cancel()
        except* DeliveryGaveUpError as group:
            error = first_of(group)
            assert isinstance(error, DeliveryGaveUpError)
            self.gave_up = error
        finally:
            observer.phase = "stopped"
            try:
                self.settlement.set_deadline(anyio.current_time() + _LAST_SAVE_LIMIT_S)
                await self.settlement.save_rest()  # shields itself
            finally:
                if self._replay_run is not None:
                    self._replay_run.is_over = True
                last = observer.end("failed" if sys.exception() else self._outcome())
        totals = self.settlement.saved_totals(self.totals)
        return _summary(totals, first, last, started_at, self._outcome(), self._give_up_message())

    async def _flow(self) -> None:
        senders, observer = self.senders, self._observer
        chunks_tx, chunks_rx = anyio.create_memory_object_stream[Chunk](CHUNK_BUFFER)
        batches_tx, batches_rx = anyio.create_memory_object_stream[Batch](min(len(senders), _BATCH_BUFFER))
        settled_tx, settled_rx = anyio.create_memory_object_stream[BatchResult](2 * len(senders))
        self._batches_tx = batches_tx
        # Keep one end open here, so that a failing stage ends reading by its error, not by a broken stream.
        with chunks_rx, settled_rx:
            try:
                async with anyio.create_task_group() as flow:
                    flow.start_soon(self._read, chunks_tx)
                    flow.start_soon(self._packer.run, chunks_rx.clone(), batches_tx)
                    flow.start_soon(self.settlement.run, settled_rx.clone())
                    observer.phase = "running" if observer.phase == "starting" else observer.phase
                    await senders.run(batches_rx, settled_tx)
            finally:
                self.settlement.settle_all(settled_rx)  # after a cancellation, answers may still be queued

    async def _read(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        with chunks_tx, self._read_scope:
            await self._source.run(chunks_tx)

    async def _after_save(self, saved: Sequence[Checkpoint]) -> None:
        letters = [checkpoint for checkpoint in saved if checkpoint.stream.kind == "replay"]
        if self._replay_run is not None:
            self._replay_run.add(letters)
        if letters:
            saved = [checkpoint for checkpoint in saved if checkpoint.stream.kind != "replay"]
        await self._source.after_save(saved)

    def _outcome(self) -> Outcome:
        if self.gave_up is not None:
            return "gave_up"
        has_work = self._is_one_shot or self.totals.pending > 0 or self._replay_run is not None
        if (self._drain_scope.cancelled_caught and has_work) or self.settlement.has_unsaved:
            return "aborted"
        is_complete = self._source.is_exhausted and not self.settlement.has_skipped_chunks
        return "finished" if is_complete else "drained"

    def _give_up_message(self) -> str:
        """Return why the run gave up and what to do; empty if it did not."""
        if self.gave_up is None:
            return ""
        advice = self.senders.advice(self.gave_up.reason)
        return ". ".join([str(self.gave_up), *([f"What to do: {advice}"] if advice else []), self.gave_up.remedy])

    # Replays -----------------------------------------------------------------------------------------------------

    @property
    def may_replay(self) -> bool:
        """Whether a replay may begin: none is running, and it would not delay the end of a one-shot run."""
        return self._replay_run is None and not self._is_one_shot

    async def replay(
        self, source: Replay, records: RecordsSettings, is_wanted: Callable[[], bool]
    ) -> tuple[Summary, dict[str, int]]:
        """
        Send dead letters beside the input; `may_replay` must be true.

        Args:
            records: Validation settings.
            is_wanted: Polled; the replay ends once it returns False.
        Returns:
            The summary, whose batches, requests and retries include those of the input; and the rejections by rule.
        Raises:
            StateInUseError: The senders have not started yet, or have ended.
        """
        assert self.may_replay
        try:
            batches_tx = self._batches_tx.clone() if self._batches_tx else None
        except anyio.ClosedResourceError:
            batches_tx = None
        if batches_tx is None:
            raise StateInUseError("the running shipper is starting or stopping; try again")
        started_at, before = anyio.current_time(), self._observer.update()
        settings = replace(self._settings, records=records)
        self._replay_run = run = ReplayRun(
            source,
            settings.delivery,
            Packer(settings, self.settlement, None, wall_time=self._wall_time, suspects={}),
            senders=self.senders,
            settlement=self.settlement,
            is_wanted=is_wanted,
        )
        try:
            outcome = await run.run(batches_tx)
        finally:
            if not self._drain_scope.cancel_called:  # otherwise it was cut short
                self._replay_run = None
        log.info("dead_letters_replayed", outcome=outcome, **asdict(run.totals))
        last = self._observer.update()
        return _summary(run.totals, before, last, started_at, outcome, run.message), run.reasons

    # Stopping and changing ---------------------------------------------------------------------------------------

    def stop(self, *, cause: str) -> None:
        """Stop reading and drain within `delivery.drain_timeout_seconds`; `cause` is for the log."""
        delivery = self._settings.delivery
        limit_s = delivery.drain_timeout_seconds
        log.info("drain_started", cause=cause, timeout_seconds=limit_s, drain=delivery.drain)
        self._observer.phase = "draining"
        self._stopped_at = anyio.current_time()
        self._drain_scope.deadline = self._stopped_at + limit_s
        self.settlement.set_deadline(self._drain_scope.deadline + _LAST_SAVE_LIMIT_S)
        self.senders.gate.hurry()
        self._is_draining.set()
        if delivery.drain == "input":
            self._end_reading()

    def abort(self, *, cause: str) -> None:
        """End immediately; save settled records and leave the rest pending."""
        log.warning("drain_aborted", cause=cause)
        self.settlement.set_deadline(anyio.current_time() + _LAST_SAVE_LIMIT_S)
        self._drain_scope.cancel()

    async def _on_signals(self, signals: Signals, side: TaskGroup, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with signals as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP and self._reload_hooks is not None:
                    side.start_soon(self._reload, self._reload_hooks)
                elif not self._is_draining.is_set():
                    self.stop(cause=number.name)
                    if number == signal.SIGINT and self._is_one_shot:
                        side.start_soon(self._abort_once_stuck)
                elif number != signal.SIGHUP:  # which the kernel and a shell may both send
                    self.abort(cause=number.name)
                    return

    async def _abort_once_stuck(self) -> None:
        """Abort a drain once it makes no progress, because a user is waiting for it."""
        await poll_until(lambda: self.senders.is_stuck)
        self.abort(cause="delivery pauses, and nothing is in flight")

    async def hand_over(self, streams: Sequence[Stream], *, wait_s: float, is_lost: bool) -> None:
        """
        Release streams that go to another process.

        Args:
            wait_s: How long to wait for records in flight; no wait while delivery is paused.
            is_lost: Another process owns the streams already, so nothing of them may be saved.
        """
        for stream in streams:
            stream.is_ending = True
        self._hold.recheck()
        try:
            with anyio.move_on_after(0 if is_lost else wait_s):
                await poll_until(lambda: not self.settlement.acks.has_open(streams) or self.senders.is_stuck)
            if not is_lost:
                await self.settlement.save()
        finally:
            await self.settlement.abandon(streams)

    async def save(self, idle: Sequence[Checkpoint] = ()) -> None:
        """Save settled records, and checkpoints without records of streams of which nothing is unsaved."""
        await self.settlement.save(idle)

    async def _read_until_idle(self) -> None:
        """After a stop, continue reading until no new input arrives or most of the drain timeout has passed."""
        await self._is_draining.wait()
        delivery = self._settings.delivery
        reading_deadline = self._stopped_at + delivery.drain_timeout_seconds * _READING_SHARE
        while (now := anyio.current_time()) < reading_deadline and not self.settlement.is_stopping:
            since = self._packer.waits_for_input_since
            idle_at = delivery.drain_idle_seconds + (now if since is None else max(since, self._stopped_at))
            if now >= idle_at:
                break
            await anyio.sleep_until(min(idle_at, reading_deadline))
        if not self.settlement.is_stopping:
            log.info("reading_ended", is_idle=now < reading_deadline)
            self._end_reading()

    def _give_up(self, error: DeliveryGaveUpError) -> None:
        self.gave_up = error
        self._end_reading()

    def _end_reading(self) -> None:
        self.settlement.end_reading()
        self._hold.recheck()
        self._read_scope.cancel()

    async def _reload(self, hooks: ReloadHooks) -> None:
        """Reload the settings: apply all that may change, or none of them on any error."""
        async with self._reload_lock:
            hooks.begin()
            try:
                await self._apply_reload(hooks)
                self._observer.reload_error = ""
            except (ConfigError, NoTokenError) as error:
                log.error("reload_refused", error=str(error), message="the previous settings stay in effect")
                self._observer.reload_error = str(error)
            finally:
                hooks.end()

    async def _apply_reload(self, hooks: ReloadHooks) -> None:
        # Reading may hang, for example on an unreachable file system; a stop must not wait for it.
        new = await run_sync(hooks.read, abandon_on_cancel=True)
        reload = reload_settings(self._settings, new)
        await self.senders.reconfigure(reload.settings)
        self._packer.reconfigure(reload.settings)
        self._settings = reload.settings
        self._observer.restart_needed = reload.deferred
        hooks.apply(reload.settings)
        log.info("settings_reloaded", changed=reload.changed)
        if reload.deferred:
            log.warning("restart_needed", keys=reload.deferred, message="these take effect at the next start")


async def poll_until(is_done: Callable[[], bool]) -> None:
    while not is_done():  # noqa: ASYNC110 it changes in too many places to notify of it
        await anyio.sleep(_POLL_S)


def _summary(totals: Totals, before: Live, last: Live, started_at: float, outcome: Outcome, message: str) -> Summary:
    return Summary(
        **asdict(totals),
        batches=last.batches - before.batches,
        requests=sum(last.requests.values()) - sum(before.requests.values()),
        retries=sum(last.retries.values()) - sum(before.retries.values()),
        seconds=round(anyio.current_time() - started_at, 3),
        outcome=outcome,
        message=message,
        engine=ENGINE,
    )


def _reload_advice(*, can_reload: bool, is_one_shot: bool) -> ReloadAdvice:
    if is_one_shot:
        return ReloadAdvice("run the same command again", "run the same command again")
    return ReloadAdvice(f"reload it: kill -HUP {os.getpid()}" if can_reload else "restart it", "restart it")


def _working_directory() -> str:
    try:
        return shown(os.getcwd())
    except FileNotFoundError:  # it was deleted
        return ""
