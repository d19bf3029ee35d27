"""The pipeline when the dead letters have no room, and when they are past their retention."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from shipper.model.records import Chunk, Stream
from shipper.pipeline import Pipeline, Summary
from shipper.state.letters import EVERYTHING
from shipper.state.schema import LETTER_OVERHEAD_BYTES
from shipper.state.store import Store
from tests.fakes import ScriptedEndpoint
from tests.stage.pipelines import NOW_S, Source, good, holds, pipeline_of, running, settings, signals_from

BAD = b"not json\n"
LETTER_BYTES = len(BAD) - 1 + LETTER_OVERHEAD_BYTES


class Streams(Source):
    """Sends lines, each with the number of its stream, one a chunk and no faster than saves come; counts them."""

    def __init__(self, lines: Sequence[tuple[int, bytes]]) -> None:
        super().__init__()
        self.lines = lines
        self.streams = {number: Stream(stream_id=number, kind="file", path="x", inode=number) for number, _ in lines}

    async def run(self, chunks_tx: Any) -> None:
        ends = dict.fromkeys(self.streams, 0)
        for number, data in self.lines:
            await anyio.sleep(0.005)
            start, end = ends[number], ends[number] + len(data)
            await chunks_tx.send(Chunk(stream=self.streams[number], start_offset=start, end_offset=end, data=data))
            self.sent += 1
            ends[number] = end
        self.is_exhausted = True

    def checkpoints(self) -> dict[int, int]:
        return {number: stream.checkpoint for number, stream in self.streams.items()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, dead_letter_max_bytes=3 * LETTER_BYTES)
    yield store
    found = store.totals()
    assert found.read == found.accepted + found.dead_lettered + found.duplicates
    store.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, store: Store) -> Any:
    def make(
        source: Any,
        *,
        is_one_shot: bool = True,
        retention_days: float = 0.0,
        commit_interval_s: float = 0.001,
        **changes: Any,
    ) -> Pipeline:
        made = settings(
            **{"batch_max_events": 1, **changes},
            state_dead_letter_retention_days=retention_days,
            state_commit_interval_seconds=commit_interval_s,
        )
        return pipeline_of(monkeypatch, made, source, store, [ScriptedEndpoint()], is_one_shot=is_one_shot)

    return make


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def told(logs: list[Any], event: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event]


def is_paused(logs: list[Any]) -> bool:
    return len(told(logs, "delivery_paused")) > len(told(logs, "delivery_resumed"))


async def until(condition: Any) -> None:
    while not condition():
        await anyio.sleep(0.002)


async def test_reading_stops_when_the_quota_is_reached_and_goes_on_when_there_is_room(
    make: Any, store: Store, logs: list[Any], tmp_path: Path
):
    source = Streams([(1, BAD)] * 10 + [(1, good(number)) for number in range(100)])
    summaries: list[Summary] = []
    pipeline = make(source)

    async def run() -> None:
        summaries.append(await pipeline.run())

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            other = Store(tmp_path)  # as another process would
            for _ in range(3):
                # What settled while a slow save ran may need all the room of a purge: the pause then goes on.
                await until(lambda: is_paused(logs) and len(other.letters.ids(EVERYTHING)) == 3)
                sent = -1
                while sent != (sent := source.sent):
                    await anyio.sleep(0.05)
                assert source.sent < 50, "reading went on"
                assert not summaries
                pauses = len(told(logs, "delivery_paused"))
                await anyio.sleep(0.3)
                assert len(told(logs, "delivery_paused")) == pauses, "told once"
                assert other.purge(other.letters.ids(EVERYTHING)) == 3
            other.close()
    (summary,) = summaries
    assert (summary.outcome, summary.dead_lettered, summary.accepted, summary.pending) == ("finished", 10, 100, 0)
    assert 1 <= len(told(logs, "delivery_paused")) == len(told(logs, "delivery_resumed")) <= 3
    assert told(logs, "delivery_paused")[0]["reason"] == "dead_letters_full"
    assert "state.dead_letter_max_bytes" in told(logs, "delivery_paused")[0]["message"]
    assert len(store.letters.ids(EVERYTHING)) == 1
    assert store.totals().dead_lettered == 10


async def test_a_one_shot_run_gives_up_and_keeps_all_that_is_pending(make: Any, store: Store, logs: list[Any]):
    source = Streams([(1, BAD)] * 3 + [(1, good(1)), (1, BAD), (1, good(2)), (1, good(3))])
    with anyio.fail_after(10):
        summary: Summary = await make(source, delivery_give_up_after_seconds=0.2).run()
    assert (summary.outcome, summary.exit_code(is_one_shot=True)) == ("gave_up", 4)
    assert summary.dead_lettered == 3
    assert summary.pending >= 1
    assert holds(summary)
    assert "dead-letters purge" in summary.message
    assert source.checkpoints() == {1: 3 * len(BAD) + len(good(1))}
    assert store.totals().dead_lettered == 3
    assert len(told(logs, "delivery_paused")) == 1


async def test_the_last_save_of_a_run_waits_for_room_too(make: Any, store: Store, logs: list[Any], tmp_path: Path):
    """All is read when the quota is met, so nothing but the save is left to wait."""
    pipeline = make(Streams([(1, BAD * 3), (1, BAD)]))
    async with running(pipeline, limit_s=10) as summaries:
        await until(lambda: told(logs, "delivery_paused"))
        store.purge(store.letters.ids(EVERYTHING))
    assert (summaries[0].outcome, summaries[0].dead_lettered, summaries[0].pending) == ("finished", 4, 0)


async def test_streams_that_need_no_room_are_saved_meanwhile(make: Any, store: Store):
    source = Streams([(1, good(1)), (2, BAD * 3), (2, BAD), (1, good(3))])
    with anyio.fail_after(10):
        summary: Summary = await make(source, commit_interval_s=0.1, delivery_give_up_after_seconds=0.3).run()
    assert summary.outcome == "gave_up"
    assert source.checkpoints() == {1: len(good(1)) + len(good(3)), 2: 3 * len(BAD)}
    assert (store.totals().dead_lettered, summary.pending) == (3, 1)


async def test_dead_letters_that_never_have_room_say_so(make: Any, store: Store, logs: list[Any]):
    with anyio.fail_after(10):
        summary: Summary = await make(Streams([(1, b"x" * 1900 + b"\n")]), delivery_give_up_after_seconds=0.1).run()
    assert (summary.outcome, summary.pending, summary.dead_lettered) == ("gave_up", 1, 0)
    assert f"at least {1900 + LETTER_OVERHEAD_BYTES:,}" in told(logs, "delivery_paused")[0]["message"]


@pytest.mark.parametrize("is_one_shot", [True, False])
async def test_a_stop_does_not_wait_for_room(make: Any, store: Store, logs: list[Any], is_one_shot: bool):
    tx, rx = anyio.create_memory_object_stream[signal.Signals](2)
    source = Streams([(1, BAD)] * 5 + [(1, good(number)) for number in range(50)])
    pipeline = make(source, is_one_shot=is_one_shot)
    summaries: list[Summary] = []

    async def run() -> None:
        summaries.append(await pipeline.run(signals_from(rx)))

    with tx, rx, anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await until(lambda: told(logs, "delivery_paused"))
            await anyio.sleep(0.05)
            tx.send_nowait(signal.SIGTERM)
    (summary,) = summaries
    assert (summary.outcome, summary.exit_code(is_one_shot=is_one_shot)) == ("aborted", 4)
    assert summary.pending
    assert holds(summary)
    assert source.checkpoints() == {1: 3 * len(BAD)}
    assert store.totals().dead_lettered == 3


async def test_what_was_left_behind_a_full_store_is_not_passed_when_room_comes_late(
    make: Any, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """Room that comes between the stop and the end must not let a later chunk settle behind one that was left."""
    tx, rx = anyio.create_memory_object_stream[signal.Signals](2)
    source = Streams([(1, BAD)] * 4 + [(1, good(number)) for number in range(30)])
    pipeline = make(source)
    summaries: list[Summary] = []
    packer = pipeline._stages._packer
    left = packer._pack

    async def pack_chunk(chunk: Chunk, batches_tx: Any) -> None:
        await left(chunk, batches_tx)
        if pipeline._settlement.has_left_chunks:
            store.purge(store.letters.ids(EVERYTHING))
            await anyio.sleep(0.3)  # saves go on meanwhile

    monkeypatch.setattr(packer, "_pack", pack_chunk)

    async def run() -> None:
        summaries.append(await pipeline.run(signals_from(rx)))

    with tx, rx, anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await until(lambda: pipeline._settlement.full_since is not None)
            await anyio.sleep(0.05)  # until a chunk waits
            tx.send_nowait(signal.SIGTERM)
    (summary,) = summaries
    assert (summary.outcome, summary.exit_code(is_one_shot=True)) == ("drained", 4)
    assert summary.pending == 0
    assert holds(summary)
    assert summary.accepted < 30
    settled = 4 * len(BAD) + sum(len(good(number)) for number in range(summary.accepted))
    assert source.checkpoints() == {1: settled}


async def test_expired_letters_go_when_two_looks_a_day_apart_found_them_and_hold_nothing_back(
    make: Any, store: Store, logs: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """A save takes its turn between two transactions of the expiry; neither a start nor a stop waits for it."""
    from tests.unit.test_letters import checkpoint, rejection

    days = 86_400.0
    store._dead_letter_max_bytes = 1 << 30
    store.save([checkpoint(*(rejection(number) for number in range(1000)), stream_id=7)], NOW_S - 31 * days)
    store.save([checkpoint(rejection(), stream_id=7, end=200)], NOW_S - 29 * days)
    monkeypatch.setattr("shipper.pipeline.settlement._EXPIRY_INTERVAL_S", 0.01)
    true_expire = store.expire
    has_started = threading.Event()
    counts: list[int] = []

    def expire(before_s: float, now_s: float) -> int:
        assert has_started.wait(10), "the start waits for the expiry"
        counts.append(true_expire(before_s, now_s))
        return counts[-1]

    monkeypatch.setattr(store, "expire", expire)
    pipeline = make(Streams([(1, good(number)) for number in range(50)]), retention_days=30, is_one_shot=False)
    true_run = pipeline._source.run

    async def run(chunks_tx: Any) -> None:
        has_started.set()
        await true_run(chunks_tx)
        await anyio.sleep_forever()

    pipeline._source.run = run
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            await until(lambda: counts and store.totals().accepted == 50)
            assert len(store.letters.ids(EVERYTHING)) == 1001, "a day has not passed"
            pipeline._settlement._wall_time = lambda: NOW_S + 1 * days - 1
            looks = len(counts)
            await until(lambda: len(counts) > looks + 2)
            assert len(store.letters.ids(EVERYTHING)) == 1001
            pipeline._settlement._wall_time = lambda: NOW_S + 1 * days + 1
            await until(lambda: told(logs, "dead_letters_expired"))
            assert store.letters.ids(EVERYTHING) == [1001]
            group.cancel_scope.cancel()
    assert [count for count in counts if count] == [200] * 5, "in several transactions"
    assert [entry["count"] for entry in told(logs, "dead_letters_expired")] == [1000]
    assert store.totals().dead_lettered == 1001


async def test_letters_are_kept_for_ever_by_default(make: Any, store: Store):
    from tests.unit.test_letters import checkpoint, rejection

    store.save([checkpoint(rejection(), stream_id=7)], 1.0)
    with anyio.fail_after(10):
        await make(Streams([(1, good(1))])).run()
    assert store.letters.ids(EVERYTHING) == [1]


async def test_nothing_that_is_sent_is_left_out_of_the_bodies(make: Any, store: Store):
    """The pause holds chunks back, not events that were packed already."""
    endpoint = ScriptedEndpoint()
    source = Streams([(1, good(1)), (1, BAD * 3), (1, good(2)), (1, BAD), (1, good(3))])
    pipeline = make(source, delivery_give_up_after_seconds=0.2)
    with pytest.MonkeyPatch.context() as patch, anyio.fail_after(10):
        patch.setattr("shipper.pipeline.stages.Endpoint", lambda *_, **__: endpoint)
        summary: Summary = await pipeline.run()
    sent = [event["ConsumerID"] for body in endpoint.bodies for event in json.loads(body)["events"]]
    # What was packed before the store was found full is accepted, and pending, as it cannot be saved.
    assert summary.accepted <= len(sent) <= summary.accepted + summary.pending
    assert set(sent) >= {2, 3}
