"""
The flow from a source to the service, and how a stop escalates.

Stages end because their input ended: each stage owns its end of its streams and ends the next one by closing it. A
stop escalates: the first signal ends reading and sets a deadline for the rest; the deadline or a second signal cancels
the rest. What was settled by then is saved in any case.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import Final, Protocol, TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from anyio.to_thread import run_sync
from msgspec.structs import asdict, replace

from shipper.codec import new_window
from shipper.config.settings import RecordsSettings, Settings, require_endpoint
from shipper.delivery.credentials import NoTokenError
from shipper.model.errors import ConfigError, DeliveryGaveUpError, first_of
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, Totals, shown
from shipper.model.version import __version__
from shipper.pipeline.observer import Observer
from shipper.pipeline.reload import Reloading, reloaded
from shipper.pipeline.replaying import Replaying
from shipper.pipeline.settlement import Settlement, StateStore
from shipper.pipeline.stages import CHUNK_BUFFER, Stages
from shipper.pipeline.summary import Outcome, Summary
from shipper.sources.replay import Replay
from shipper.state.stuck import Place
from shipper.status.headline import notices
from shipper.status.live import Live, Pause
from shipper.status.pauses import Renewal
from shipper.system.native import ENGINE

log = structlog.get_logger("pipeline")

T = TypeVar("T")
Signals = AbstractContextManager[AsyncIterator[signal.Signals]]

_STUCK_LOOK_S: Final = 0.05
_HAND_OVER_LOOK_S: Final = 0.02
_LAST_SAVE_LIMIT_S: Final = 30.0  # a disk that takes longer does not answer any more
_READING_SHARE: Final = 0.8  # of the time for a drain; the rest is for what was read


class Source(Protocol):
    """
    A first stage.

    Attributes:
        is_exhausted: Whether everything that there was to read has been read.
    """

    @property
    def is_exhausted(self) -> bool: ...

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks, those of one stream in order, until there are no more or a cancellation comes."""

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Apply checkpoints that are on disk now; only the source moves those of its streams."""

    def backlog(self) -> Backlog:
        """Return the backlog; cheap, as it is called every second."""


class Pipeline:
    """
    One run from a source to the service.

    Args:
        is_one_shot: The input has an end, and the run is given up after `delivery.give_up_after_seconds`.
        wall_time: Seconds since the epoch.
        command: For the snapshots.
        publish: Called with a snapshot every second.
        reloading: What SIGHUP leads to.
        suspects: By input, the places of records that an earlier process got stuck on.

    Attributes:
        gave_up: Why the run was given up; None if it was not.
        renewal: How this process takes over changed settings.
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
        reloading: Reloading | None = None,
        suspects: Mapping[str, Sequence[Place]] | None = None,
    ) -> None:
        self._settings = settings
        self._is_one_shot = is_one_shot
        self._source = source
        self._wall_time = wall_time
        self._reloading = reloading
        give_up_after_s = settings.delivery.give_up_after_seconds if is_one_shot else None
        self._reading = anyio.CancelScope()
        self._drain = anyio.CancelScope()
        self._draining = anyio.Event()
        self._stopped_at = math.inf
        self._settlement = Settlement(
            store,
            settings.state,
            window=new_window(settings.records.dedupe_window),
            on_saved=self._after_save,
            give_up_after_s=give_up_after_s,
            wall_time=wall_time,
        )
        self.renewal = _renewal(can_reload=reloading is not None, is_one_shot=is_one_shot)
        self._stages = Stages(
            settings,
            self._settlement,
            give_up_after_s=give_up_after_s,
            renewal=self.renewal,
            wall_time=wall_time,
            rng=rng,
            suspects=suspects or {},
        )
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
            settlement=self._settlement,
            stages=self._stages,
            source=source,
            publish=publish,
            wall_time=wall_time,
        )
        self.gave_up: DeliveryGaveUpError | None = None
        self._reload_turn = anyio.Lock()
        self._replaying: Replaying | None = None

    def __repr__(self) -> str:
        return f"<Pipeline {self._settlement.acks!r} {self._stages!r}>"

    @property
    def totals(self) -> Totals:
        """What became of the records so far."""
        return self._observer.totals

    @property
    def handed_over(self) -> int:
        """How many records were read that are the business of another process now."""
        return self._settlement.handed_over

    @property
    def dead_letter_reasons(self) -> dict[str, int]:
        """How many records broke which rule."""
        return self._settlement.acks.reasons

    @property
    def pauses(self) -> list[Pause]:
        """Why delivery pauses at this moment; empty if it does not."""
        return self._observer.look().pauses

    @property
    def notices(self) -> list[str]:
        """What came of the last reload of the settings, in sentences."""
        return notices(self._observer.look())

    @property
    def is_failing(self) -> bool:
        """Whether nothing was accepted since an attempt failed, which is to be repeated."""
        return self._stages.is_failing

    def retry(self) -> None:
        """Try again now instead of waiting."""
        self._stages.retry()

    @property
    def is_probing(self) -> bool:
        """Whether delivery pauses, and what comes of the attempt at hand is not known yet."""
        return self._stages.is_probing

    @property
    def may_replay(self) -> bool:
        """Whether a replay may begin: there is no other one, and the input has no end that it would hold up."""
        return self._replaying is None and not self._is_one_shot

    async def replay(
        self, source: Replay, records: RecordsSettings, is_wanted: Callable[[], bool]
    ) -> tuple[Summary, dict[str, int]]:
        """
        Send dead letters beside the input, while `may_replay` holds.

        Args:
            records: What is a valid record.
            is_wanted: Asked now and then; the replay ends once it is not.
        Returns:
            The summary, in which batches, requests and retries are those of the input, too; and how many letters broke
            which rule.
        Raises:
            StateInUseError, StateError: As for `Replaying.run`.
        """
        assert self.may_replay
        started_at, before = anyio.current_time(), self._observer.look()
        settings = replace(self._settings, records=records)
        self._replaying = replaying = Replaying(
            source, settings, stages=self._stages, settlement=self._settlement, is_wanted=is_wanted
        )
        try:
            outcome = await replaying.run()
        finally:
            self._replaying = None
        log.info("dead_letters_replayed", outcome=outcome, **asdict(replaying.totals))
        last = self._observer.look()
        return Summary(
            **asdict(replaying.totals),
            batches=last.batches - before.batches,
            requests=sum(last.requests.values()) - sum(before.requests.values()),
            retries=sum(last.retries.values()) - sum(before.retries.values()),
            seconds=round(anyio.current_time() - started_at, 3),
            outcome=outcome,
            message=replaying.message,
            engine=ENGINE,
        ), replaying.reasons

    async def between_saves(self, work: Callable[[], T]) -> T:
        """Call something that uses the state store, in a thread, while nothing else does."""
        return await self._settlement.between_saves(work)

    async def _after_save(self, saved: Sequence[Checkpoint]) -> None:
        letters = [each for each in saved if each.stream.kind == "replay"]
        if self._replaying is not None:
            self._replaying.note(letters)
        await self._source.after_save([each for each in saved if each.stream.kind != "replay"] if letters else saved)

    async def run(self, signals: Signals | None = None) -> Summary:
        """
        Ship until the source ends or a signal stops it.

        Args:
            signals: Gives SIGTERM, SIGINT and SIGHUP while it is entered; None = the caller handles them.
        Raises:
            StateError: The state store cannot be written; nothing is lost.
        """
        started_at = anyio.current_time()
        self._stages.open()
        observer = self._observer
        try:
            with self._drain:
                async with anyio.create_task_group() as side:
                    if signals is not None:
                        await side.start(self._on_signals, signals, side)
                    side.start_soon(self._read_until_idle)
                    side.start_soon(self._read_until_held_back)
                    side.start_soon(self._settlement.keep_saving)
                    side.start_soon(self._settlement.keep_expiring)
                    side.start_soon(observer.run)
                    chunks_tx, chunks_rx = anyio.create_memory_object_stream[Chunk](CHUNK_BUFFER)
                    # One end stays here: if a stage fails, its error ends the reading, and no broken stream.
                    with chunks_rx:
                        async with anyio.create_task_group() as flow:
                            flow.start_soon(self._read, chunks_tx)
                            flow.start_soon(self._stages.run, chunks_rx.clone())
                            observer.phase = "running" if observer.phase == "starting" else observer.phase
                    await self._settlement.until_saved()
                    side.cancel_scope.cancel()
        except* DeliveryGaveUpError as group:
            error = first_of(group)
            assert isinstance(error, DeliveryGaveUpError)
            self.gave_up = error
        else:
            self.gave_up = self._settlement.held_back
        finally:
            observer.phase = "stopped"
            try:
                self._settlement.end_by(anyio.current_time() + _LAST_SAVE_LIMIT_S)
                await self._settlement.save_rest()  # shields itself
            finally:
                if self._replaying is not None:
                    self._replaying.is_over = True
                last = observer.end("failed" if sys.exception() else self._outcome())
        return Summary(
            **asdict(self._settlement.saved(self.totals)),
            batches=last.batches,
            requests=sum(last.requests.values()),
            retries=sum(last.retries.values()),
            seconds=round(anyio.current_time() - started_at, 3),
            outcome=self._outcome(),
            message=self._why_given_up(),
            engine=ENGINE,
        )

    def _outcome(self) -> Outcome:
        if self.gave_up is not None:
            return "gave_up"
        if self._drain.cancelled_caught or self._settlement.has_unsaved:
            return "aborted"
        is_all = self._source.is_exhausted and not self._settlement.has_left_chunks
        return "finished" if is_all else "drained"

    def _why_given_up(self) -> str:
        """Return why the run was given up, and what to do; empty if it was not."""
        if self.gave_up is None:
            return ""
        advice = self._stages.advice(self.gave_up.reason)
        return ". ".join([str(self.gave_up), *([f"What to do: {advice}"] if advice else []), self.gave_up.way_out])

    async def _read(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        with chunks_tx, self._reading:
            await self._source.run(chunks_tx)

    # Stopping and changing ---------------------------------------------------------------------------------------

    def stop(self, *, cause: str) -> None:
        """
        Read no more, and settle what was read, within `delivery.drain_timeout_seconds`.

        Args:
            cause: For the log.
        """
        delivery = self._settings.delivery
        limit_s = delivery.drain_timeout_seconds
        log.info("drain_started", cause=cause, timeout_seconds=limit_s, drain=delivery.drain)
        self._observer.phase = "draining"
        self._stopped_at = anyio.current_time()
        self._drain.deadline = self._stopped_at + limit_s
        self._settlement.end_by(self._drain.deadline + _LAST_SAVE_LIMIT_S)
        self.hurry()
        self._draining.set()
        if delivery.drain == "input":
            self._end_reading()

    def hurry(self) -> None:
        """Skip backoffs. Also for callers that stop by closing the input."""
        self._stages.hurry()

    def abort(self, *, cause: str) -> None:
        """End at once; what is settled is saved, the rest stays pending."""
        log.warning("drain_aborted", cause=cause)
        self._settlement.end_by(anyio.current_time() + _LAST_SAVE_LIMIT_S)
        self._drain.cancel()

    async def _on_signals(self, signals: Signals, side: TaskGroup, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with signals as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    side.start_soon(self._reload)
                elif not self._draining.is_set():
                    self.stop(cause=number.name)
                    if number == signal.SIGINT and self._is_one_shot:
                        side.start_soon(self._abort_once_stuck)
                else:
                    self.abort(cause=number.name)
                    return

    async def _abort_once_stuck(self) -> None:
        """Abort a drain that a person waits for as soon as it makes no progress."""
        while True:
            if self._stages.is_stuck:
                break
            await anyio.sleep(_STUCK_LOOK_S)
        self.abort(cause="delivery pauses, and nothing is in flight")

    async def hand_over(self, streams: Sequence[Stream], *, wait_s: float, is_lost: bool) -> None:
        """
        Let go of streams that another process is to have.

        Args:
            wait_s: How long what is in flight may still settle; not waited for while delivery pauses.
            is_lost: They are another process's already, so that nothing of them may be saved.
        """
        for stream in streams:
            stream.is_ending = True
        self._stages.look_again()
        try:
            with anyio.move_on_after(0 if is_lost else wait_s):
                while True:
                    if not self._settlement.acks.has_open(streams) or self._stages.is_stuck:
                        break
                    await anyio.sleep(_HAND_OVER_LOOK_S)
            if not is_lost:
                await self._settlement.save()
        finally:
            await self._settlement.abandon(streams)

    async def _read_until_idle(self) -> None:
        """After a stop, go on reading until no new input arrives, or most of the drain's time is used."""
        await self._draining.wait()
        delivery = self._settings.delivery
        last_call = self._stopped_at + delivery.drain_timeout_seconds * _READING_SHARE
        while (now := anyio.current_time()) < last_call and not self._settlement.stopping.is_set():
            since = self._stages.waits_for_input_since
            idle_at = delivery.drain_idle_seconds + (now if since is None else max(since, self._stopped_at))
            if now >= idle_at:
                break
            await anyio.sleep_until(min(idle_at, last_call))
        if not self._settlement.stopping.is_set():
            log.info("reading_ended", is_idle=now < last_call)
            self._end_reading()

    async def _read_until_held_back(self) -> None:
        await self._settlement.ending.wait()
        self._end_reading()

    def _end_reading(self) -> None:
        self._settlement.end_reading()
        self._reading.cancel()

    async def _reload(self) -> None:
        """Apply settings that were read again: all that can change or, if anything is wrong, none."""
        if self._reloading is None:
            return
        async with self._reload_turn:
            self._reloading.begin()
            try:
                await self._take_over(self._reloading)
                self._observer.reload_error = ""
            except (ConfigError, NoTokenError) as error:
                log.error("reload_refused", error=str(error), message="the previous settings stay in effect")
                self._observer.reload_error = str(error)
            finally:
                self._reloading.end()

    async def _take_over(self, reloading: Reloading) -> None:
        # Reading may hang, as on an unreachable file system; a stop need not wait for it.
        new = await run_sync(reloading.read, abandon_on_cancel=True)
        reload = reloaded(self._settings, new)
        await self._stages.reconfigure(reload.settings)
        self._settings = reload.settings
        self._observer.restart_needed = reload.waiting
        reloading.apply(reload.settings)
        log.info("settings_reloaded", changed=reload.changed)
        if reload.waiting:
            log.warning("restart_needed", keys=reload.waiting, message="these take effect at the next start")


def _renewal(*, can_reload: bool, is_one_shot: bool) -> Renewal:
    if is_one_shot:
        return Renewal("run the same command again", "run the same command again")
    return Renewal(f"reload it: kill -HUP {os.getpid()}" if can_reload else "restart it", "restart it")


def _working_directory() -> str:
    try:
        return shown(os.getcwd())
    except FileNotFoundError:  # it was deleted
        return ""
