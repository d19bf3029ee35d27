"""Unsaved records are bounded in bytes for any input; counted in bytes instead of process memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import anyio
import pytest

from shipper.model.errors import StateUnwritableError
from shipper.model.records import Rejection, Span, Stream, Summary
from shipper.pipeline import settlement
from shipper.pipeline.pipeline import Pipeline
from shipper.pipeline.settlement import estimate_bytes
from shipper.state.store import Store
from tests.ledgers import read_ledger
from tests.stage.pipelines import Maker, Source, at_once, good, ran, running, until, until_it_rests
from tests.unit.test_codec import line

BUDGET = 1 << 20
RECORDS_PER_CHUNK = 100
CHUNKS = 120  # far more than fits into the budget
GOOD_CHUNKS = 2
LIMIT_S = 300  # of a run; a busy machine must fail no test


def refused(number: int) -> bytes:
    return line(number, ConsumerID=number + 1, IP="nowhere") + b"\n"


def sparse(number: int) -> bytes:
    """A record with its own ledger key."""
    return line(number, ConsumerID=number + 1, BTag=f"{number + 1}_{'0' * 32}") + b"\n"


def repeated(number: int) -> bytes:
    return line(1, ConsumerID=1) + b"\n"


def records(record: Callable[[int], bytes], chunks: int = CHUNKS) -> Source:
    """Return a source of chunks of records; the first records are valid."""
    numbers = count()

    def chunk(at: int) -> bytes:
        make = good if at < GOOD_CHUNKS else record
        return b"".join(make(next(numbers)) for _ in range(RECORDS_PER_CHUNK))

    return Source(map(chunk, range(chunks)))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, make: Maker) -> Callable[..., Pipeline]:
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", BUDGET)
    return partial(make, batch_max_events=RECORDS_PER_CHUNK, records_mistake_limit=0)


def held_in_memory(pipeline: Pipeline) -> int:
    """Return the actual size of the open spans and the unsaved checkpoints."""
    held = pipeline.settlement
    spans = [span for spans in held.acks._open.values() for span in spans]
    rejections = [each for part in (*spans, *held._unsaved) for each in part.rejections]
    tallies = [tally for part in (*spans, *held._unsaved) for tally in part.ledger]
    keys = sum(len(tally) * (250 if isinstance(tally, dict) else 60) for tally in tallies)
    chunks = {id(span.chunk): len(span.chunk.data) for span in spans if span.chunk is not None}
    waiting = [event for events in pipeline._packer._batcher._waiting.values() for event in events]
    lines = sum(len(each.raw) for each in rejections) + sum(len(event.line) for event in waiting)
    return lines + keys + 250 * (len(rejections) + len(waiting)) + sum(chunks.values())


async def assert_waits_within_the_budget(
    pipeline: Pipeline,
    source: Source,
    release: Callable[[], None],
    *,
    is_obstructed: Callable[[], object] = lambda: True,
) -> Summary:
    """Run until reading waits, check the memory held, and let the run end."""
    async with running(pipeline, limit_s=LIMIT_S) as run:
        # Never true if reading waits for another reason.
        await until(lambda: is_obstructed() and pipeline.settlement.held_bytes > BUDGET // 2, limit_s=LIMIT_S)
        await until_it_rests(pipeline, source)
        assert not source.is_exhausted, "reading did not wait"
        assert held_in_memory(pipeline) <= pipeline.settlement.held_bytes + RECORDS_PER_CHUNK * 400 * 4
        assert pipeline.settlement.held_bytes <= BUDGET + RECORDS_PER_CHUNK * 1200, (
            "the budget is exceeded by more than one span"
        )
        release()
    return run.summary


@pytest.mark.parametrize("record", [refused, sparse, repeated])
async def test_records_settled_after_an_unanswered_batch_are_bounded_in_bytes(
    make: Any, record: Callable[[int], bytes]
):
    never = anyio.Event()
    source = records(record)
    pipeline = make(source, [never], [])
    summary = await assert_waits_within_the_budget(pipeline, source, never.set)
    assert (summary.outcome, summary.pending) == ("finished", 0)
    assert summary.read == CHUNKS * RECORDS_PER_CHUNK
    assert source.stream.checkpoint == source.size
    assert pipeline.settlement.held_bytes == 0


async def test_unsaved_records_are_bounded_in_bytes_while_saves_fail_late(make: Any, store: Store):
    """The store refuses only after much was read: up to the budget."""

    class Unwritable:
        is_open = False

        def save(self, checkpoints: Any, now_s: float) -> Any:
            if not self.is_open:
                # Reading waits from the first failure on, so it must not come early, however slow this machine is.
                deadline = time.monotonic() + LIMIT_S
                while pipeline.settlement.held_bytes <= BUDGET // 2 and time.monotonic() < deadline:
                    time.sleep(0.001)
                raise StateUnwritableError("no room")
            return store.save(checkpoints, now_s)

        def accepted_ids(self) -> Any:
            return []

        def totals(self) -> Any:
            return store.totals()

        def expire(self, before_s: float) -> int:
            return 0

        def open(self) -> None:
            self.is_open = True

    store_ = Unwritable()
    source = records(refused)
    pipeline = make(source, store=store_)
    summary = await assert_waits_within_the_budget(
        pipeline, source, store_.open, is_obstructed=lambda: pipeline.settlement.blockage
    )
    assert (summary.outcome, summary.pending) == ("finished", 0)
    assert store.totals().dead_lettered == (CHUNKS - GOOD_CHUNKS) * RECORDS_PER_CHUNK


async def test_records_larger_than_the_budget_are_shipped_one_by_one(make: Any, monkeypatch: Any):
    """No span fits, but each is read once the previous one is saved."""
    source = records(refused, chunks=20)
    pipeline = make(source)
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 1)
    summary = await ran(pipeline, limit_s=LIMIT_S)
    assert (summary.outcome, summary.read, summary.pending) == ("finished", 20 * RECORDS_PER_CHUNK, 0)


async def test_a_chunk_with_one_waiting_record_counts_as_a_whole(make: Any):
    """All other records are duplicates; without a limit, a batch of 100 would hold 100 chunks."""
    never = anyio.Event()
    source = records(lambda number: good(number) if number % RECORDS_PER_CHUNK == 0 else repeated(number))
    pipeline = make(source, [never])
    summary = await assert_waits_within_the_budget(pipeline, source, never.set)
    assert (summary.outcome, summary.pending) == ("finished", 0)
    assert summary.accepted == GOOD_CHUNKS * RECORDS_PER_CHUNK + CHUNKS - GOOD_CHUNKS


async def test_many_settled_records_are_saved_before_the_interval_has_passed(
    make: Any, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """With an interval longer than the run, there would be only the last save otherwise."""
    monkeypatch.setattr(settlement, "run_sync", at_once)  # a busy event loop would delay saves in a thread
    source = records(sparse)
    pipeline = make(source, state_commit_interval_seconds=60.0)
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 1 << 30)
    monkeypatch.setattr(settlement, "_EARLY_SAVE_ENTRIES", 1000)
    summary = await ran(pipeline, limit_s=LIMIT_S)
    assert summary.accepted == CHUNKS * RECORDS_PER_CHUNK
    assert pipeline.settlement.commits > 3
    assert sum(row.accepted for row in read_ledger(store._path.parent)) == summary.accepted


def test_an_estimate_is_not_less_than_the_measured_size():
    stream = Stream(stream_id=1, kind="file", path="x")

    def span(number: int) -> Span:
        ledger = {
            (f"2026-11-20T{n % 24:02}", n % 40 + 300, "", str(100_000 + number * 1000 + n)): 1 for n in range(500)
        }
        rejections = [
            Rejection(
                start_offset=10**9 + n, end_offset=10**9 + n + 350, rule="ip", message="m", raw=bytes([n % 256]) * 350
            )
            for n in range(500)
        ]
        return Span(
            stream=stream,
            start_offset=10**9 + number,
            end_offset=10**9 + number + 1,
            tail=bytes([number]) * 512,
            read=1000,
            unsettled=0,
            rejections=rejections,
            ledger=[ledger],
        )

    tracemalloc.start()
    spans = [span(number) for number in range(20)]
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    estimated = sum(map(estimate_bytes, spans))
    assert 0.7 * estimated < measured < 1.05 * estimated
