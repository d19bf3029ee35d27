"""Complete pipelines with fakes: settings, sources, state, and running them beside a test."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from shipper.config.secrets import LiteralSecret
from shipper.config.settings import (
    BatchSettings,
    DeliverySettings,
    EndpointSettings,
    InputSettings,
    RecordsSettings,
    Settings,
    SpoolSettings,
    StateSettings,
)
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, Summary, Totals, move_checkpoints
from shipper.pipeline.pipeline import Pipeline
from shipper.state.store import Store
from tests.fakes import ScriptedEndpoint
from tests.unit.test_codec import line

NOW_S = 1_800_000_000.0


def settings(base_url: str = "http://127.0.0.1:9", *, senders: int = 1, **changes: Any) -> Settings:
    """Return settings of a fast pipeline; changes are named by section and key: `batch_max_events`."""

    def of(section: str, **defaults: Any) -> dict[str, Any]:
        own = {key.removeprefix(section): value for key, value in changes.items() if key.startswith(section)}
        return {**defaults, **own}

    quick = {"retry_initial_seconds": 0.001, "retry_max_seconds": 0.002}
    return Settings(
        intake=EndpointSettings(base_url=base_url, subscription_key=LiteralSecret("k"), token=LiteralSecret("t")),
        input=InputSettings(max_record_bytes=2000),
        records=RecordsSettings(**of("records_")),
        batch=BatchSettings(**of("batch_", linger_seconds=60.0)),
        delivery=DeliverySettings(**of("delivery_", concurrency=senders, **quick)),
        state=StateSettings(**of("state_", commit_interval_seconds=0.001)),
        spool=SpoolSettings(**of("spool_")),
    )


class Source:
    """
    Sends chunks of one stream; ends after them or, if followed, when it is closed.

    Attributes:
        sent, size: Number of chunks and bytes that the pipeline has taken.
    """

    def __init__(self, chunks: Iterable[bytes] = (), *, is_followed: bool = False) -> None:
        self.chunks = chunks
        self.stream = Stream(stream_id=1, kind="file", path="x")
        self.closed = anyio.Event()
        if not is_followed:
            self.closed.set()
        self.is_followed = is_followed
        self.is_exhausted = False
        self.sent = 0
        self.size = 0

    async def run(self, chunks_tx: Any) -> None:
        for data in self.chunks:
            await self.send(chunks_tx, data)
        await self.closed.wait()
        self.is_exhausted = True

    async def send(self, chunks_tx: Any, data: bytes) -> None:
        chunk = Chunk(stream=self.stream, start_offset=self.size, end_offset=self.size + len(data), data=data)
        await chunks_tx.send(chunk)
        self.sent += 1
        self.size += len(data)

    def backlog(self) -> Backlog:
        return Backlog()

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        move_checkpoints(saved)


def good(number: int) -> bytes:
    return line(number, ConsumerID=number + 1) + b"\n"


class Maker:
    """Creates pipelines with fakes; by default, each batch is one event."""

    def __init__(self, patch: pytest.MonkeyPatch, store: Store) -> None:
        self._patch = patch
        self._store = store

    def __call__(
        self,
        source: Source,
        *scripts: Sequence[Any],
        endpoints: Iterable[Any] | None = None,
        senders: int | None = None,
        store: Any = None,
        is_one_shot: bool | None = None,
        **changes: Any,
    ) -> Pipeline:
        """
        Create a pipeline with a sender for each script of an endpoint; without any, one that accepts everything.

        Args:
            endpoints: Other endpoints, in place of scripted ones.
            is_one_shot: Whether the run ends with its input; by default, if the source does.
            changes: Settings, named by section and key.
        """
        scripts = scripts or ([],)
        left = iter(endpoints or map(ScriptedEndpoint, scripts))
        self._patch.setattr("shipper.pipeline.senders.Endpoint", lambda *_, **__: next(left))
        made = settings(senders=senders or len(scripts), **{"batch_max_events": 1, **changes})
        is_one_shot = not source.is_followed if is_one_shot is None else is_one_shot
        store = self._store if store is None else store
        return Pipeline(made, source, store, is_one_shot=is_one_shot, wall_time=lambda: NOW_S, rng=Random(1))


class Run:
    """A pipeline that runs beside a test; has a summary once it has ended."""

    summary: Summary

    def __init__(self) -> None:
        self._numbers_tx, self._numbers_rx = anyio.create_memory_object_stream[signal.Signals](2)

    def signal(self, number: signal.Signals) -> None:
        self._numbers_tx.send_nowait(number)

    @contextmanager
    def received(self) -> Iterator[AsyncIterator[signal.Signals]]:
        async def receive() -> AsyncIterator[signal.Signals]:
            async for number in self._numbers_rx:
                yield number

        with self._numbers_rx:
            yield receive()


@asynccontextmanager
async def running(pipeline: Pipeline, *, limit_s: float = 10.0) -> AsyncIterator[Run]:
    """Run a pipeline during the block, and wait for its end."""
    run = Run()

    async def ship() -> None:
        run.summary = await pipeline.run(run.received())

    with run._numbers_tx, anyio.fail_after(limit_s):
        async with anyio.create_task_group() as group:
            group.start_soon(ship)
            yield run


async def ran(pipeline: Pipeline, *, limit_s: float = 10.0) -> Summary:
    """Run a pipeline to its end."""
    with anyio.fail_after(limit_s):
        return await pipeline.run()


@asynccontextmanager
async def running_until_cancelled(pipeline: Pipeline, *, limit_s: float = 10.0) -> AsyncIterator[None]:
    """Run a pipeline during the block, and cancel it at the end."""
    with anyio.fail_after(limit_s):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            yield
            group.cancel_scope.cancel()


async def until(condition: Callable[[], object], *, limit_s: float = 20.0) -> None:
    with anyio.fail_after(limit_s):
        while not condition():
            await anyio.sleep(0.002)


async def until_it_rests(pipeline: Pipeline, source: Source) -> None:
    """Wait until nothing changes any more; commit intervals are milliseconds here."""
    before = None
    while before != (before := (source.size, repr(pipeline))) or not source.sent:
        await anyio.sleep(0.04)


@contextmanager
def accounted_store(directory: Path, **options: Any) -> Iterator[Store]:
    """Open a store, and check that its totals add up when it is closed."""
    store = Store(directory, **options)
    yield store
    assert add_up(store.totals())
    store.close()


def add_up(totals: Totals) -> bool:
    return totals.read == totals.accepted + totals.dead_lettered + totals.duplicates + totals.pending


async def at_once(function: Any, *arguments: Any, limiter: Any, abandon_on_cancel: bool) -> Any:
    """Call blocking functions directly: virtual time would race ahead while a thread works."""
    await anyio.lowlevel.checkpoint()
    return function(*arguments)
