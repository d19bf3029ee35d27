"""
A worker process: gets chunks from the parent, reports settled checkpoints to it, keeps no state.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from random import Random

import anyio
import anyio.from_thread
from anyio.abc import SocketStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from shipper.config.settings import Settings
from shipper.model.errors import ShipperError, StateError, first_of
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream
from shipper.pipeline.channel import Begin, Channel, End, Ended, Listening, LostError, Ready, Report, Work
from shipper.pipeline.pipeline import Pipeline, Signals
from shipper.state.accepted_ids import read_accepted_ids
from shipper.state.store import Saved
from shipper.status.live import Live


async def work(
    connection: socket.socket,
    signals: Signals,
    *,
    set_up: Callable[[int, Settings], None],
    wall_time: Callable[[], float],
    rng: Random,
) -> None:
    """
    Ship the chunks that come, until there are no more.

    Args:
        connection: To the parent process.
        signals: Each means that a stop was requested, so backoffs are skipped.
        set_up: Called with which worker this is, and its settings.
        wall_time: Seconds since the epoch.
    Raises:
        LostError: The parent process has gone.
    """
    async with await SocketStream.from_socket(connection) as stream:
        channel = Channel(stream)
        begin, _ = await channel.receive()
        assert isinstance(begin, Begin)
        set_up(begin.worker, begin.settings)
        arrived_tx, arrived_rx = anyio.create_memory_object_stream[Chunk | None](0)
        reports = _Reports(channel, begin.settings)
        pipeline = Pipeline(
            begin.settings,
            _Received(arrived_rx, channel),
            reports,
            is_one_shot=True,
            wall_time=wall_time,
            rng=rng,
            command="worker",
            publish=reports.note,
        )
        reports.records_read = lambda: pipeline.totals.read
        error: BaseException | None = None
        with arrived_rx, arrived_tx:
            async with anyio.create_task_group() as side:
                side.start_soon(_listen, channel, arrived_tx)
                side.start_soon(reports.tell)
                side.start_soon(_on_signals, signals, pipeline, channel)
                try:
                    await pipeline.run()
                    error = pipeline.gave_up
                except* ShipperError as group:
                    error = first_of(group)
                side.cancel_scope.cancel()
        await channel.send(reports.last())
        assert error is None or isinstance(error, ShipperError)
        await channel.send(Ended(error))
        await channel.drain()


async def _on_signals(signals: Signals, pipeline: Pipeline, channel: Channel) -> None:
    with signals as received:
        await channel.send(Listening())
        async for _ in received:
            pipeline.hurry()


async def _listen(channel: Channel, arrived_tx: MemoryObjectSendStream[Chunk | None]) -> None:
    """Receive messages to the end, so that the loss of the other process is noticed."""
    while True:
        message, data = await channel.receive()
        if isinstance(message, End):
            await arrived_tx.send(None)
            continue
        assert isinstance(message, Work)
        stream = Stream(
            stream_id=message.number,
            kind=message.kind,
            path=message.path,
            framing=message.framing,
            mistakes=message.mistakes,
        )
        await arrived_tx.send(
            Chunk(
                stream=stream,
                start_offset=message.start_offset,
                end_offset=message.end_offset,
                data=data,
                is_oversized=message.is_oversized,
            )
        )


class _Received:
    """The source: chunks as they arrive, without the state of their input."""

    def __init__(self, arrived_rx: MemoryObjectReceiveStream[Chunk | None], channel: Channel) -> None:
        self._arrived_rx = arrived_rx
        self._channel = channel
        self.is_exhausted = False

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        while (chunk := await self._arrived_rx.receive()) is not None:
            await chunks_tx.send(chunk)
            await self._channel.send(Ready())
        self.is_exhausted = True

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Resume nothing: a worker that is lost is another process."""

    def backlog(self) -> Backlog:
        return Backlog()


class _Reports:
    """The store: reports what is settled to the parent process, which has the real store."""

    def __init__(self, channel: Channel, settings: Settings) -> None:
        self._channel = channel
        self._settings = settings
        self._reported = 0
        self._live: Live | None = None
        self._noted = anyio.Event()
        self.records_read: Callable[[], int] = lambda: 0

    def note(self, live: Live) -> None:
        """Store a snapshot."""
        self._live = live
        self._noted.set()

    def last(self) -> Report:
        """Return the current snapshot."""
        return Report([], self.records_read() - self._reported, self._live)

    async def tell(self) -> None:
        """Send every snapshot, until cancelled."""
        while True:
            await self._noted.wait()
            self._noted = anyio.Event()
            await self._channel.send(self.last())

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> Saved:
        """Report; in a thread, as the real store does its work."""
        done = list(checkpoints)
        self._reported += sum(checkpoint.read for checkpoint in done)
        report = Report(done, self.records_read() - self._reported)
        try:
            anyio.from_thread.run(self._channel.send, report)
        except LostError:
            raise StateError("the parent process has gone") from None
        return Saved(done=done, waiting=[], why="")

    def expire(self, before_s: float, now_s: float) -> int:
        return 0

    def expire_ledger(self, before_s: float, now_s: float) -> int:
        return 0

    def accepted_ids(self) -> Iterable[bytes]:
        return read_accepted_ids(self._settings.state.directory, self._settings.records.dedupe_window)
