"""
The middle of a pipeline, in processes of its own, one for each core.

Reading, settlement and the state stay in this process; a worker gets each chunk as it was read and reports what
became of its records. Until then the chunk is kept here: if the worker is lost, the next one does the rest of its work.
"""

from __future__ import annotations

import math
import signal
import socket
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from subprocess import DEVNULL
from typing import Final

import anyio
import structlog
from anyio.abc import Process, SocketStream
from anyio.streams.memory import MemoryObjectReceiveStream
from msgspec.structs import replace

from shipper.config.settings import Settings, require_endpoint
from shipper.delivery.endpoint import make_ssl_context
from shipper.model.errors import DeliveryGaveUpError, HeldBackError, ShipperError
from shipper.model.records import Chunk, Span
from shipper.pipeline.channel import Begin, Channel, End, Ended, Listening, LostError, Ready, Report, Work
from shipper.pipeline.counted_once import CountedOnce
from shipper.pipeline.settlement import Settlement
from shipper.status.live import Live, Pause

log = structlog.get_logger("pipeline")

HURRY_SIGNAL: Final = signal.SIGUSR1  # a worker that does not read yet what it is sent gets a signal
_LOSSES_MAX: Final = 5  # in a row, with nothing settled between them
_SENT_AHEAD: Final = 2  # chunks, so that a worker never waits for one
_REPORT_INTERVAL_S: Final = 0.1


class _Assigned:
    """
    A chunk that a worker has, or is to have; its span is what of it is not settled.

    Args:
        is_first: This process has read nothing of its stream before.
    """

    def __init__(self, number: int, span: Span, chunk: Chunk, *, is_first: bool) -> None:
        self.number = number
        self.is_first = is_first
        self.span = span
        self.chunk = chunk

    def rest(self) -> tuple[Work, bytes]:
        chunk, start = self.chunk, self.span.start_offset
        work = Work(
            number=self.number,
            kind=chunk.stream.kind,
            path=chunk.stream.shown_path,
            framing=chunk.stream.framing,
            start_offset=start,
            end_offset=chunk.end_offset,
            is_oversized=chunk.is_oversized,
            mistakes=chunk.stream.mistakes if self.is_first else {},
        )
        return work, chunk.data[start - chunk.start_offset :]


class _Worker:
    """One of them, through all the processes that it may be."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.assigned: dict[int, _Assigned] = {}
        self.process: Process | None = None
        self.heeds_signals = False
        self.room = anyio.Semaphore(0)
        self.settled_parts = 0
        self.pending = 0
        self.live: Live | None = None

    def hurry(self) -> None:
        """Pass a stop on to the worker, once it can receive it."""
        if self.process is not None and self.heeds_signals:
            with suppress(ProcessLookupError):
                self.process.send_signal(HURRY_SIGNAL)


class InWorkers:
    """
    A `Middle`.

    Args:
        command: Starts a worker; the number of its end of a pair of sockets is added.
        count: Of workers, at least 1.
    """

    waits_for_input_since: Final = None

    def __init__(self, settings: Settings, settlement: Settlement, *, command: Sequence[str], count: int) -> None:
        self._settings = settings
        self._settlement = settlement
        self._command = command
        self._workers = [_Worker(index) for index in range(1, count + 1)]
        self._waiting: deque[_Assigned] = deque()
        self._changed = anyio.Event()
        self._has_ended = self._is_hurried = False
        self._numbers = 0
        self._begun: set[int] = set()
        self._counted_once = CountedOnce(settings)
        self._past: list[Live] = []  # of processes that are no more

    def __repr__(self) -> str:
        return f"<InWorkers {len(self._workers)}, {len(self._waiting)} chunks waiting>"

    @property
    def pending(self) -> int:
        return sum(worker.pending for worker in self._workers)

    @property
    def is_stuck(self) -> bool:
        """By what the workers said last, at most a second ago."""
        lives = [worker.live for worker in self._workers if worker.assigned]
        return bool(lives) and all(live and live.pauses and not live.in_flight for live in lives)

    def open(self) -> None:
        make_ssl_context(require_endpoint(self._settings, "intake"), "intake")  # so that it is told once

    async def run(self, chunks_rx: MemoryObjectReceiveStream[Chunk]) -> None:
        async with anyio.create_task_group() as tasks:
            for worker in self._workers:
                tasks.start_soon(self._attend, worker)
            await self._take(chunks_rx)

    @property
    def _has_accepted(self) -> bool:
        return self._settlement.acks.totals.accepted > 0

    def hurry(self) -> None:
        self._is_hurried = True
        for worker in self._workers:
            worker.hurry()

    # Chunks ------------------------------------------------------------------------------------------------------

    async def _take(self, chunks_rx: MemoryObjectReceiveStream[Chunk]) -> None:
        """Enter what was read into the books, in its order, and have it wait for a worker."""
        with chunks_rx:
            async for chunk in chunks_rx:
                while len(self._waiting) >= len(self._workers):
                    await self._changed.wait()
                while not self._settlement.has_room and not self._settlement.is_shut:
                    await self._settlement.until_room()
                if self._settlement.is_shut:
                    self._settlement.leave_rest()
                if self._settlement.has_left_chunks:
                    continue
                span = Span(
                    stream=chunk.stream,
                    start_offset=chunk.start_offset,
                    end_offset=chunk.end_offset,
                    tail=b"",
                    records=0,
                    unsettled=1,
                )
                self._settlement.acks.assign(span, anyio.current_time())
                self._numbers += 1
                is_first = chunk.stream.stream_id not in self._begun
                self._begun.add(chunk.stream.stream_id)
                self._waiting.append(_Assigned(self._numbers, span, chunk, is_first=is_first))
                self._tell_change()
        self._has_ended = True
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _next(self) -> _Assigned | None:
        """Wait for a chunk that no worker has; None if there are no more."""
        while not self._waiting:
            if self._has_ended:
                return None
            await self._changed.wait()
        assigned = self._waiting.popleft()
        self._tell_change()
        return assigned

    # Workers -----------------------------------------------------------------------------------------------------

    async def _attend(self, worker: _Worker) -> None:
        """
        Keep a worker at work; one process after the other, should it be lost.

        Raises:
            DeliveryGaveUpError: The service accepted nothing for too long.
            ShipperError: It failed, or is lost again and again.
        """
        losses, settled_parts = 0, 0
        while True:
            try:
                return await self._employ(worker)
            except LostError:
                pass
            if worker.live is not None:
                self._past.append(worker.live)
            worker.live, worker.pending = None, 0  # what it had read and not reported is read again
            losses = losses + 1 if worker.settled_parts == settled_parts else 1
            settled_parts = worker.settled_parts
            status = worker.process.returncode if worker.process is not None else None
            log.warning("worker_lost", worker=worker.index, status=status, chunks=len(worker.assigned))
            if losses == _LOSSES_MAX:
                raise ShipperError(
                    f"worker {worker.index} ended {losses} times in a row without progress, the last time with status "
                    f"{status}; its records stay pending. See the log, or try again with fewer workers"
                )

    async def _employ(self, worker: _Worker) -> None:
        """
        Start a process, give it work, and take in what it reports until it ends.

        Raises:
            LostError: It ended before its time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            process = await anyio.open_process(
                [*self._command, str(descriptor)], pass_fds=[descriptor], stdin=DEVNULL, stdout=DEVNULL, stderr=None
            )
        worker.process, worker.heeds_signals, worker.room = process, False, anyio.Semaphore(_SENT_AHEAD)
        is_lost = False
        async with process, await SocketStream.from_socket(ours) as stream:
            channel = Channel(stream)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._hand_out, worker, channel)
                    await self._listen(worker, channel)
                    tasks.cancel_scope.cancel()
            except* LostError:
                is_lost = True
                with suppress(ProcessLookupError):
                    process.kill()
        if is_lost:
            raise LostError

    async def _hand_out(self, worker: _Worker, channel: Channel) -> None:
        settings = _share(self._settings, len(self._workers), has_accepted=self._has_accepted)
        await channel.send(Begin(worker.index, settings))
        for left in list(worker.assigned.values()):  # by a process that was lost
            await worker.room.acquire()
            await channel.send(*left.rest())
        while True:
            await worker.room.acquire()
            assigned = await self._next()
            if assigned is None:
                break
            worker.assigned[assigned.number] = assigned
            await channel.send(*assigned.rest())
        await channel.send(End())

    async def _listen(self, worker: _Worker, channel: Channel) -> None:
        while True:
            message, _ = await channel.receive()
            if isinstance(message, Ended):
                if message.error is None:
                    return
                gave_up = message.error
                if isinstance(gave_up, HeldBackError):
                    self._settlement.leave_rest(gave_up)  # the others do what they have
                    return
                if isinstance(gave_up, DeliveryGaveUpError) and gave_up.is_set_up_fault and self._has_accepted:
                    raise LostError  # others were let in meanwhile: the next process is patient
                raise message.error
            if isinstance(message, Ready):
                worker.room.release()
                continue
            if isinstance(message, Listening):
                worker.heeds_signals = True
                if self._is_hurried:
                    worker.hurry()
                continue
            assert isinstance(message, Report)
            worker.pending = message.pending
            worker.live = message.live or worker.live
            for part in message.settled:
                assigned = worker.assigned[part.stream.stream_id]
                self._settlement.settle_part(assigned.span, self._counted_once.part(assigned.chunk, part))
                if assigned.span.start_offset == assigned.chunk.end_offset:
                    del worker.assigned[assigned.number]
            worker.settled_parts += len(message.settled)

    # What can be seen --------------------------------------------------------------------------------------------

    def seen(self, live: Live) -> Live:
        now = [worker.live for worker in self._workers if worker.live is not None]
        ever = self._past + now
        return replace(
            live,
            batches=sum(each.batches for each in ever),
            requests=_added(each.requests for each in ever),
            retries=_added(each.retries for each in ever),
            latency_p50_seconds=_most(each.latency_p50_seconds for each in now),
            latency_p95_seconds=_most(each.latency_p95_seconds for each in now),
            latency_counts=[sum(counts) for counts in zip(*(each.latency_counts for each in ever), strict=True)],
            latency_total_seconds=sum(each.latency_total_seconds for each in ever),
            in_flight=sum(each.in_flight for each in now),
            concurrency_limit=sum(each.concurrency_limit for each in now),
            token_expires_at=_least(each.token_expires_at for each in now),
            certificate_expires_at=_least(each.certificate_expires_at for each in now),
            pauses=[*_longest_pauses(now), *live.pauses],
        )


def _share(settings: Settings, workers: int, *, has_accepted: bool) -> Settings:
    """Return a worker's settings: its part of what there is a limit for, and patience once anything was accepted."""
    delivery = settings.delivery
    rate, fixed = delivery.rate_limit_events_per_second, delivery.concurrency
    return replace(
        settings,
        delivery=replace(
            delivery,
            fail_fast=delivery.fail_fast and not has_accepted,
            rate_limit_events_per_second=rate / workers if rate else rate,
            concurrency=math.ceil(fixed / workers) if isinstance(fixed, int) else fixed,
            max_concurrency=math.ceil(delivery.max_concurrency / workers),
        ),
        state=replace(
            settings.state,
            commit_interval_seconds=_REPORT_INTERVAL_S,
            dead_letter_retention_days=0,
            ledger_retention_days=0,
        ),
    )


def _longest_pauses(lives: Iterable[Live]) -> list[Pause]:
    """Return each reason once, with the time when the first worker paused for it."""
    pauses: dict[str, Pause] = {}
    for pause in sorted((pause for live in lives for pause in live.pauses), key=lambda pause: pause.since):
        pauses.setdefault(pause.reason, pause)
    return list(pauses.values())


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
