"""The stages together: order of settlement, saving, and the ladder of a stop."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from shipper.model.errors import StateError
from shipper.model.records import Checkpoint
from shipper.pipeline import Pipeline, Summary, settlement
from shipper.state.store import Saved
from tests.fakes import ScriptedEndpoint
from tests.stage.pipelines import NOW_S, Source, holds, pipeline_of, settings, signals_from
from tests.unit.test_codec import line


class MemoryStore:
    """Remembers what it was given to save; fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.saves: list[list[Checkpoint]] = []
        self.refused: list[list[Checkpoint]] = []

    def save(self, checkpoints: Sequence[Checkpoint], now_s: float) -> Saved:
        assert now_s == NOW_S
        if self.failures:
            self.failures -= 1
            self.refused.append(list(checkpoints))
            raise StateError("the disk is on fire")
        self.saves.append(list(checkpoints))
        return Saved(list(checkpoints), [])

    def accepted_ids(self) -> Sequence[bytes]:
        return []

    def saved_up_to(self) -> int:
        return max((checkpoint.end_offset for save in self.saves for checkpoint in save), default=0)


class ListSource(Source):
    """Sends lines, one chunk each; then ends, or waits for ever."""

    def __init__(self, lines: Sequence[bytes], *, is_followed: bool = False) -> None:
        super().__init__()
        self.lines = lines
        self.is_followed = is_followed

    async def run(self, chunks_tx: Any) -> None:
        for each in self.lines:
            await self.send(chunks_tx, each + b"\n")
        if self.is_followed:
            await anyio.sleep_forever()
        self.is_exhausted = True


def lines(count: int) -> list[bytes]:
    return [line(number, ConsumerID=number + 1) for number in range(count)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def make(
        source: ListSource,
        store: MemoryStore,
        *scripts: Sequence[Any],
        max_events: int = 1,
        linger_s: float = 60.0,
        drain_s: float = 25.0,
    ) -> Pipeline:
        made = settings(
            senders=len(scripts),
            batch_max_events=max_events,
            batch_linger_seconds=linger_s,
            delivery_drain_timeout_seconds=drain_s,
        )
        endpoints = map(ScriptedEndpoint, scripts)
        return pipeline_of(monkeypatch, made, source, store, endpoints, is_one_shot=not source.is_followed)

    return make


async def test_a_later_success_does_not_move_the_checkpoint_over_an_earlier_open_batch(make: Any):
    release = anyio.Event()
    store = MemoryStore()
    source = ListSource(lines(30))
    pipeline = make(source, store, [release], [])
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            while pipeline.totals.accepted < 29:
                await anyio.sleep(0.001)
            await anyio.sleep(0.01)  # some commit intervals: were the rule broken, a save would have come by now
            held_at = store.saved_up_to()
            release.set()
    assert held_at == 0, "the first batch was open"
    assert store.saved_up_to() == sum(len(each) + 1 for each in source.lines)
    assert source.stream.checkpoint == store.saved_up_to()


async def test_what_could_not_be_saved_is_not_passed_by_a_later_save(make: Any):
    store = MemoryStore(failures=1)
    pipeline = make(ListSource([b"not json", *lines(50)], is_followed=True), store, [], linger_s=0)
    with anyio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
        await pipeline.run()
    assert caught.group_contains(StateError)
    assert store.refused
    first_saved = store.saves[0]
    assert first_saved[: len(store.refused[0])] == store.refused[0]
    saved_rules = [rejection.rule for save in store.saves for each in save for rejection in each.rejections]
    assert saved_rules == ["json"]


async def test_linger_sends_a_batch_that_is_not_full(make: Any):
    store = MemoryStore()
    pipeline = make(ListSource(lines(1), is_followed=True), store, [], max_events=1000, linger_s=0.01)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            while not pipeline.totals.accepted:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()


async def test_more_spans_without_events_than_may_be_held_do_not_stop_the_line(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 400_000)
    store = MemoryStore()
    with anyio.fail_after(120):
        summary = await make(ListSource([b"{}"] * 600), store, []).run()
    assert (summary.read, summary.dead_lettered, summary.exit_code(is_one_shot=True)) == (600, 600, 3)
    assert holds(summary)


@pytest.mark.parametrize("ended_by", ["second signal", "deadline"])
async def test_a_stop_that_cannot_drain_is_cut_off_and_accounted_for(make: Any, ended_by: str):
    tx, rx = anyio.create_memory_object_stream[signal.Signals](2)
    never = anyio.Event()
    store = MemoryStore()
    source = ListSource(lines(20), is_followed=True)
    pipeline = make(source, store, [never], drain_s=3600 if ended_by == "second signal" else 0.05)
    summaries: list[Summary] = []
    with tx, rx, anyio.fail_after(10):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                summaries.append(await pipeline.run(signals_from(rx)))

            group.start_soon(run)
            while not pipeline.totals.pending:
                await anyio.sleep(0.001)
            tx.send_nowait(signal.SIGTERM)
            if ended_by == "second signal":
                tx.send_nowait(signal.SIGTERM)
    (summary,) = summaries
    assert (summary.outcome, summary.accepted, summary.exit_code(is_one_shot=False)) == ("aborted", 0, 4)
    assert summary.pending > 0
    assert holds(summary)
    assert store.saved_up_to() == 0


async def test_a_stop_that_can_drain_settles_what_was_read(make: Any):
    tx, rx = anyio.create_memory_object_stream[signal.Signals](2)
    store = MemoryStore()
    source = ListSource(lines(20), is_followed=True)
    pipeline = make(source, store, [], max_events=7)
    summaries: list[Summary] = []
    with tx, rx, anyio.fail_after(10):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                summaries.append(await pipeline.run(signals_from(rx)))

            group.start_soon(run)
            while pipeline.totals.read < 20:
                await anyio.sleep(0.001)
            tx.send_nowait(signal.SIGTERM)
    (summary,) = summaries
    assert (summary.outcome, summary.accepted, summary.pending) == ("drained", 20, 0)
    assert summary.exit_code(is_one_shot=False) == 0
    assert summary.exit_code(is_one_shot=True) == 4
    assert store.saved_up_to() == sum(len(each) + 1 for each in source.lines)
