"""Whole pipelines on fakes: their settings, their sources, and what a stop is asked for with."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
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
    StateSettings,
)
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream, move_checkpoints
from shipper.pipeline import Pipeline, Summary
from tests.unit.test_codec import line

NOW_S = 1_800_000_000.0


def settings(base_url: str = "http://127.0.0.1:9", *, senders: int = 1, **changes: Any) -> Settings:
    """Return settings of a quick pipeline; a change is named by section and key: `batch_max_events`."""

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
    )


@asynccontextmanager
async def running(pipeline: Pipeline, *, limit_s: float) -> AsyncIterator[list[Summary]]:
    """Run a pipeline beside the block, and let it end behind that; the list has the summary then."""
    summaries: list[Summary] = []

    async def run() -> None:
        summaries.append(await pipeline.run())

    with anyio.fail_after(limit_s):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            yield summaries


class Source:
    """What a pipeline asks of a source; what is read is up to the test."""

    is_exhausted = False

    def __init__(self) -> None:
        self.stream = Stream(stream_id=1, kind="file", path="x")
        self.sent = 0
        self.size = 0

    async def send(self, chunks_tx: Any, data: bytes) -> None:
        """Send a chunk; `sent` counts them once the pipeline has taken them, `size` the bytes."""
        chunk = Chunk(stream=self.stream, start_offset=self.size, end_offset=self.size + len(data), data=data)
        await chunks_tx.send(chunk)
        self.sent += 1
        self.size += len(data)

    def backlog(self) -> Backlog:
        return Backlog()

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        move_checkpoints(saved)


def pipeline_of(
    patch: pytest.MonkeyPatch,
    settings: Settings,
    source: Any,
    store: Any,
    endpoints: Iterable[Any],
    *,
    is_one_shot: bool = True,
) -> Pipeline:
    """Make a pipeline whose senders use these endpoints, one each."""
    left = iter(endpoints)
    patch.setattr("shipper.pipeline.stages.Endpoint", lambda *_, **__: next(left))
    return Pipeline(settings, source, store, is_one_shot=is_one_shot, wall_time=lambda: NOW_S, rng=Random(1))


def good(number: int) -> bytes:
    return line(number, ConsumerID=number + 1) + b"\n"


def holds(summary: Summary) -> bool:
    return summary.read == summary.accepted + summary.dead_lettered + summary.duplicates + summary.pending


async def at_once(function: Any, *arguments: Any, limiter: Any, abandon_on_cancel: bool) -> Any:
    """Call what blocks as if a thread did it in no time: virtual time would run away while a real one works."""
    await anyio.lowlevel.checkpoint()
    return function(*arguments)


@contextmanager
def signals_from(numbers: anyio.abc.ObjectReceiveStream[signal.Signals]) -> Iterator[AsyncIterator[signal.Signals]]:
    async def receive() -> AsyncIterator[signal.Signals]:
        async for number in numbers:
            yield number

    yield receive()
