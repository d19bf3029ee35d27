"""What is read and not saved is bounded in bytes, whatever the input; counted in bytes, not by what a process shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from shipper.model.errors import StateUnwritableError
from shipper.model.records import Span, Stream
from shipper.pipeline import Pipeline, Summary, settlement
from shipper.pipeline.acks import weight
from shipper.state.ledger import read_ledger
from shipper.state.store import Store
from tests.fakes import ScriptedEndpoint
from tests.stage.pipelines import Source, at_once, good, pipeline_of, running, settings
from tests.unit.test_codec import line

BUDGET = 1 << 20
RECORDS_PER_CHUNK = 100
CHUNKS = 120  # far more than the budget has room for
GOOD_CHUNKS = 2


def refused(number: int) -> bytes:
    return line(number, ConsumerID=number + 1, IP="nowhere") + b"\n"


def sparse(number: int) -> bytes:
    """A record with a key of its own in the ledger."""
    return line(number, ConsumerID=number + 1, BTag=f"{number + 1}_{'0' * 32}") + b"\n"


def repeated(number: int) -> bytes:
    return line(1, ConsumerID=1) + b"\n"


class Records(Source):
    """Sends so many chunks of records, the first ones good."""

    def __init__(self, record: Callable[[int], bytes], chunks: int = CHUNKS) -> None:
        super().__init__()
        self.record = record
        self.chunks = chunks

    async def run(self, chunks_tx: Any) -> None:
        numbers = count()
        for at in range(self.chunks):
            record = good if at < GOOD_CHUNKS else self.record
            await self.send(chunks_tx, b"".join(record(next(numbers)) for _ in range(RECORDS_PER_CHUNK)))
        self.is_exhausted = True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    found = store.totals()
    assert found.read == found.accepted + found.dead_lettered + found.duplicates
    store.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, store: Store) -> Callable[..., Pipeline]:
    def make(source: Any, *scripts: Any, store_: Any = None, interval_s: float = 0.001, **changes: Any) -> Pipeline:
        monkeypatch.setattr(settlement, "MAX_HELD_BYTES", BUDGET)
        made = settings(
            senders=len(scripts),
            records_mistake_limit=0,
            state_commit_interval_seconds=interval_s,
            **{"batch_max_events": RECORDS_PER_CHUNK, **changes},
        )
        return pipeline_of(monkeypatch, made, source, store_ or store, map(ScriptedEndpoint, scripts))

    return make


async def until_it_rests(pipeline: Pipeline, source: Records) -> None:
    """Wait until nothing is read any more, though commit intervals pass."""
    before = None
    while before != (before := (source.size, repr(pipeline))) or not source.size:
        await anyio.sleep(0.05)


def held_in_memory(pipeline: Pipeline) -> int:
    """Add up what the open spans and the unsaved checkpoints really hold, of what may be much."""
    held = pipeline._settlement
    spans = [span for spans in held.acks._open.values() for span in spans]
    rejections = [each for part in (*spans, *held._unsaved) for each in part.rejections]
    tallies = [tally for part in (*spans, *held._unsaved) for tally in part.ledger]
    keys = sum(len(tally) * (250 if isinstance(tally, dict) else 60) for tally in tallies)
    chunks = {id(span.chunk): len(span.chunk.data) for span in spans if span.chunk is not None}
    waiting = [event for events in pipeline._stages._packer._batcher._waiting.values() for event in events]
    lines = sum(len(each.raw) for each in rejections) + sum(len(event.line) for event in waiting)
    return lines + keys + 250 * (len(rejections) + len(waiting)) + sum(chunks.values())


async def assert_waits_within_the_budget(
    pipeline: Pipeline,
    source: Records,
    release: Callable[[], None],
    *,
    is_obstructed: Callable[[], object] = lambda: True,
) -> Summary:
    """
    Run, wait until reading waits, look at what is held, and let it end.

    Args:
        is_obstructed: Whether what holds up the run has happened.
    """
    async with running(pipeline, limit_s=60) as summaries:
        while not is_obstructed() or pipeline._settlement.held_bytes <= BUDGET // 2:
            await anyio.sleep(0.01)  # for ever, if reading waits for another reason
        await until_it_rests(pipeline, source)
        assert not source.is_exhausted, "reading did not wait"
        assert held_in_memory(pipeline) <= pipeline._settlement.held_bytes + RECORDS_PER_CHUNK * 400 * 4
        assert pipeline._settlement.held_bytes <= BUDGET + RECORDS_PER_CHUNK * 1200, "more than a span too much"
        release()
    return summaries[0]


@pytest.mark.parametrize("record", [refused, sparse, repeated])
async def test_what_is_settled_behind_an_unanswered_batch_is_bounded_in_bytes(
    make: Any, store: Store, record: Callable[[int], bytes]
):
    never = anyio.Event()
    source = Records(record)
    pipeline = make(source, [never], [])
    summary = await assert_waits_within_the_budget(pipeline, source, never.set)
    assert (summary.outcome, summary.pending) == ("finished", 0)
    assert summary.read == CHUNKS * RECORDS_PER_CHUNK
    assert source.stream.checkpoint == source.size
    assert pipeline._settlement.held_bytes == 0


async def test_what_cannot_be_saved_is_bounded_in_bytes_even_while_saves_go_on_failing_late(make: Any, store: Store):
    """The store refuses only once much has come: what was read by then is what there was room for."""

    class Unwritable:
        is_open = False

        def save(self, checkpoints: Any, now_s: float) -> Any:
            if not self.is_open:
                raise StateUnwritableError("no room")
            return store.save(checkpoints, now_s)

        def accepted_ids(self) -> Any:
            return []

        def expire(self, before_s: float) -> int:
            return 0

        def open(self) -> None:
            self.is_open = True

    store_ = Unwritable()
    source = Records(refused)
    pipeline = make(source, [], store_=store_, interval_s=0.05)
    summary = await assert_waits_within_the_budget(
        pipeline, source, store_.open, is_obstructed=lambda: pipeline._settlement.obstacle.reason
    )
    assert (summary.outcome, summary.pending) == ("finished", 0)
    assert store.totals().dead_lettered == (CHUNKS - GOOD_CHUNKS) * RECORDS_PER_CHUNK


async def test_records_that_fill_the_budget_alone_pass_one_by_one(make: Any, store: Store, monkeypatch: Any):
    """No span fits, and still each is read once the one before it is saved."""
    source = Records(refused, chunks=20)
    pipeline = make(source, [])
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 1)
    with anyio.fail_after(60):
        summary: Summary = await pipeline.run()
    assert (summary.outcome, summary.read, summary.pending) == ("finished", 20 * RECORDS_PER_CHUNK, 0)


async def test_a_chunk_of_which_one_record_waits_counts_as_a_whole(make: Any, store: Store):
    """All others of it are duplicates; without a limit, a batch of 100 would hold 100 chunks."""
    never = anyio.Event()

    class Mixed(Records):
        def __init__(self) -> None:
            super().__init__(lambda number: good(number) if number % RECORDS_PER_CHUNK == 0 else repeated(number))

    source = Mixed()
    pipeline = make(source, [never])
    summary = await assert_waits_within_the_budget(pipeline, source, never.set)
    assert (summary.outcome, summary.pending) == ("finished", 0)
    assert summary.accepted == GOOD_CHUNKS * RECORDS_PER_CHUNK + CHUNKS - GOOD_CHUNKS


async def test_much_that_is_settled_is_saved_before_the_interval_has_passed(
    make: Any, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """An interval longer than the run: but for the saves that much asks for, there would be the last one alone."""
    monkeypatch.setattr(settlement, "run_sync", at_once)  # a busy event loop would leave a thread few saves
    source = Records(sparse)
    pipeline = make(source, [], interval_s=60.0)
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 1 << 30)
    monkeypatch.setattr(settlement, "_SAVED_TOGETHER", 1000)
    with anyio.fail_after(60):
        summary: Summary = await pipeline.run()
    assert summary.accepted == CHUNKS * RECORDS_PER_CHUNK
    assert pipeline._settlement.commits > 3
    assert sum(row.accepted for row in read_ledger(store._path.parent)) == summary.accepted


def test_an_estimate_is_no_less_than_what_is_measured():
    import tracemalloc

    from shipper.model.records import Rejection, Span

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
            records=1000,
            unsettled=0,
            rejections=rejections,
            ledger=[ledger],
        )

    tracemalloc.start()
    spans = [span(number) for number in range(20)]
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    estimated = sum(map(weight, spans))
    assert 0.7 * estimated < measured < 1.05 * estimated
