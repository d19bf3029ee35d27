"""The pipeline when there is no room for dead letters, and when their retention has passed."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from shipper.model.records import Chunk, Stream
from shipper.state.letters import EVERYTHING
from shipper.state.schema import LETTER_OVERHEAD_BYTES
from shipper.state.store import Store
from tests.fakes import ScriptedEndpoint
from tests.stage.pipelines import (
    NOW_S,
    Maker,
    Source,
    accounted_store,
    add_up,
    good,
    ran,
    running,
    running_until_cancelled,
    until,
)
from tests.unit.test_letters import checkpoint, rejection

BAD = b"not json\n"
LETTER_BYTES = len(BAD) - 1 + LETTER_OVERHEAD_BYTES


class Streams(Source):
    """Sends lines with the number of their stream, one per chunk and not faster than saves; counts them."""

    def __init__(self, lines: Sequence[tuple[int, bytes]]) -> None:
        super().__init__()
        self.lines = lines
        self.streams = {number: Stream(stream_id=number, kind="file", path="x", inode=number) for number, _ in lines}

    async def run(self, chunks_tx: Any) -> None:
        ends = dict.fromkeys(self.streams, 0)
        for number, data in self.lines:
            await anyio.sleep(0.005)
            self.stream, self.size = self.streams[number], ends[number]
            await self.send(chunks_tx, data)
            ends[number] = self.size
        self.is_exhausted = True

    def checkpoints(self) -> dict[int, int]:
        return {number: stream.checkpoint for number, stream in self.streams.items()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with accounted_store(tmp_path, dead_letter_max_bytes=3 * LETTER_BYTES) as store:
        yield store


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def told(logs: list[Any], event: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event]


def is_paused(logs: list[Any]) -> bool:
    return len(told(logs, "delivery_paused")) > len(told(logs, "delivery_resumed"))


async def test_reading_stops_at_the_quota_and_resumes_when_there_is_room(
    make: Maker, store: Store, logs: list[Any], tmp_path: Path
):
    source = Streams([(1, BAD)] * 10 + [(1, good(number)) for number in range(100)])
    async with running(make(source), limit_s=20) as run:
        with closing(Store(tmp_path)) as other:  # like another process
            for _ in range(3):
                # Records settled during a slow save may need all the purged room: then the pause continues.
                await until(lambda: is_paused(logs) and len(other.letters.ids(EVERYTHING)) == 3)
                sent = -1
                while sent != (sent := source.sent):
                    await anyio.sleep(0.05)
                assert source.sent < 50, "reading did not stop"
                pauses = len(told(logs, "delivery_paused"))
                await anyio.sleep(0.3)
                assert len(told(logs, "delivery_paused")) == pauses, "the pause was not reported once"
                assert other.purge(other.letters.ids(EVERYTHING)) == 3
    summary = run.summary
    assert (summary.outcome, summary.dead_lettered, summary.accepted, summary.pending) == ("finished", 10, 100, 0)
    assert 1 <= len(told(logs, "delivery_paused")) == len(told(logs, "delivery_resumed")) <= 3
    assert told(logs, "delivery_paused")[0]["reason"] == "dead_letters_full"
    assert "state.dead_letter_max_bytes" in told(logs, "delivery_paused")[0]["message"]
    assert len(store.letters.ids(EVERYTHING)) == 1
    assert store.totals().dead_lettered == 10


async def test_a_one_shot_run_gives_up_and_leaves_the_rest_pending(make: Maker, store: Store, logs: list[Any]):
    source = Streams([(1, BAD)] * 3 + [(1, good(1)), (1, BAD), (1, good(2)), (1, good(3))])
    summary = await ran(make(source, delivery_give_up_after_seconds=0.2))
    assert (summary.outcome, summary.exit_code(is_one_shot=True)) == ("gave_up", 4)
    assert summary.dead_lettered == 3
    assert summary.pending >= 1
    assert add_up(summary)
    assert "dead-letters purge" in summary.message
    assert source.checkpoints() == {1: 3 * len(BAD) + len(good(1))}
    assert store.totals().dead_lettered == 3
    assert len(told(logs, "delivery_paused")) == 1


async def test_the_last_save_of_a_run_waits_for_room(make: Maker, store: Store, logs: list[Any]):
    """Everything has been read when the quota is reached, so only the save waits."""
    pipeline = make(Streams([(1, BAD * 3), (1, BAD)]))
    async with running(pipeline) as run:
        await until(lambda: told(logs, "delivery_paused"))
        store.purge(store.letters.ids(EVERYTHING))
    assert (run.summary.outcome, run.summary.dead_lettered, run.summary.pending) == ("finished", 4, 0)


async def test_streams_without_dead_letters_are_saved_meanwhile(make: Maker, store: Store):
    source = Streams([(1, good(1)), (2, BAD * 3), (2, BAD), (1, good(3))])
    summary = await ran(make(source, state_commit_interval_seconds=0.1, delivery_give_up_after_seconds=0.3))
    assert summary.outcome == "gave_up"
    assert source.checkpoints() == {1: len(good(1)) + len(good(3)), 2: 3 * len(BAD)}
    assert (store.totals().dead_lettered, summary.pending) == (3, 1)


async def test_dead_letters_larger_than_the_quota_are_reported(make: Maker, logs: list[Any]):
    summary = await ran(make(Streams([(1, b"x" * 1900 + b"\n")]), delivery_give_up_after_seconds=0.1))
    assert (summary.outcome, summary.pending, summary.dead_lettered) == ("gave_up", 1, 0)
    assert f"at least {1900 + LETTER_OVERHEAD_BYTES:,}" in told(logs, "delivery_paused")[0]["message"]


@pytest.mark.parametrize("is_one_shot", [True, False])
async def test_a_stop_does_not_wait_for_room(make: Maker, store: Store, logs: list[Any], is_one_shot: bool):
    source = Streams([(1, BAD)] * 5 + [(1, good(number)) for number in range(50)])
    async with running(make(source, is_one_shot=is_one_shot), limit_s=5) as run:
        await until(lambda: told(logs, "delivery_paused"))
        await anyio.sleep(0.05)
        run.signal(signal.SIGTERM)
    summary = run.summary
    assert (summary.outcome, summary.exit_code(is_one_shot=is_one_shot)) == ("aborted", 4)
    assert summary.pending
    assert add_up(summary)
    assert source.checkpoints() == {1: 3 * len(BAD)}
    assert store.totals().dead_lettered == 3


async def test_no_checkpoint_passes_skipped_chunks_when_room_is_found_late(
    make: Maker, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """Room found between the stop and the end must not let a chunk settle after a skipped one."""
    source = Streams([(1, BAD)] * 4 + [(1, good(number)) for number in range(30)])
    pipeline = make(source)
    packer = pipeline._packer
    left = packer._pack

    async def pack_chunk(chunk: Chunk, batches_tx: Any) -> None:
        await left(chunk, batches_tx)
        if pipeline.settlement.has_skipped_chunks:
            store.purge(store.letters.ids(EVERYTHING))
            await anyio.sleep(0.3)  # saves continue meanwhile

    monkeypatch.setattr(packer, "_pack", pack_chunk)

    async with running(pipeline, limit_s=5) as run:
        await until(lambda: pipeline.settlement.blockage)
        await anyio.sleep(0.05)  # until a chunk waits
        run.signal(signal.SIGTERM)
    summary = run.summary
    assert (summary.outcome, summary.exit_code(is_one_shot=True)) == ("drained", 4)
    assert summary.pending == 0
    assert add_up(summary)
    assert summary.accepted < 30
    settled = 4 * len(BAD) + sum(len(good(number)) for number in range(summary.accepted))
    assert source.checkpoints() == {1: settled}


async def test_expired_letters_are_deleted_after_two_checks_a_day_apart_without_delaying_anything(
    make: Maker, store: Store, logs: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """Saves run between two transactions of the expiry; neither a start nor a stop waits for it."""
    days = 86_400.0
    store._dead_letter_max_bytes = 1 << 30
    store.save([checkpoint(*(rejection(number) for number in range(1000)), stream_id=7)], NOW_S - 31 * days)
    store.save([checkpoint(rejection(), stream_id=7, end=200)], NOW_S - 29 * days)
    monkeypatch.setattr("shipper.pipeline.settlement._EXPIRY_INTERVAL_S", 0.01)
    true_expire = store.expire
    has_started = threading.Event()
    counts: list[int] = []

    def expire(before_s: float, now_s: float) -> int:
        assert has_started.wait(10), "the start waited for the expiry"
        counts.append(true_expire(before_s, now_s))
        return counts[-1]

    monkeypatch.setattr(store, "expire", expire)
    source = Streams([(1, good(number)) for number in range(50)])
    pipeline = make(source, state_dead_letter_retention_days=30, is_one_shot=False)
    true_run = pipeline._source.run

    async def run(chunks_tx: Any) -> None:
        has_started.set()
        await true_run(chunks_tx)
        await anyio.sleep_forever()

    pipeline._source.run = run
    async with running_until_cancelled(pipeline, limit_s=20):
        await until(lambda: counts and store.totals().accepted == 50)
        assert len(store.letters.ids(EVERYTHING)) == 1001, "letters expired before a day had passed"
        pipeline.settlement._wall_time = lambda: NOW_S + 1 * days - 1
        looks = len(counts)
        await until(lambda: len(counts) > looks + 2)
        assert len(store.letters.ids(EVERYTHING)) == 1001
        pipeline.settlement._wall_time = lambda: NOW_S + 1 * days + 1
        await until(lambda: told(logs, "dead_letters_expired"))
        assert store.letters.ids(EVERYTHING) == [1001]
    assert [count for count in counts if count] == [200] * 5, "the expiry was a single transaction"
    assert [entry["count"] for entry in told(logs, "dead_letters_expired")] == [1000]
    assert store.totals().dead_lettered == 1001


async def test_letters_do_not_expire_by_default(make: Maker, store: Store):
    store.save([checkpoint(rejection(), stream_id=7)], 1.0)
    await ran(make(Streams([(1, good(1))])))
    assert store.letters.ids(EVERYTHING) == [1]


async def test_no_packed_event_is_omitted_from_the_bodies(make: Maker):
    """The pause holds back chunks, not packed events."""
    endpoint = ScriptedEndpoint()
    source = Streams([(1, good(1)), (1, BAD * 3), (1, good(2)), (1, BAD), (1, good(3))])
    summary = await ran(make(source, endpoints=[endpoint], delivery_give_up_after_seconds=0.2))
    sent = [event["ConsumerID"] for body in endpoint.bodies for event in json.loads(body)["events"]]
    # Events packed before the store was full are accepted but pending, because they cannot be saved.
    assert summary.accepted <= len(sent) <= summary.accepted + summary.pending
    assert set(sent) >= {2, 3}
