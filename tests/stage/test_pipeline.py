"""The stages together: order of settlement, saving, the steps of a stop, and the summary."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from shipper.codec.dedupe import new_window
from shipper.delivery.answer import Answer
from shipper.model.errors import StateError, StateUnwritableError
from shipper.model.records import Checkpoint, Chunk, Span, Stream, Summary, Totals
from shipper.pipeline import pipeline as pipeline_module
from shipper.pipeline import settlement
from shipper.pipeline.settlement import Settlement
from shipper.state.store import SaveResult, Store
from shipper.system.native import NATIVE
from tests.cases import each
from tests.fakes import answer
from tests.stage.pipelines import (
    NOW_S,
    Maker,
    Source,
    add_up,
    good,
    ran,
    running,
    running_until_cancelled,
    settings,
    until,
    until_it_rests,
)

OPEN_SPANS = 512
SPAN_BYTES = 2048 + (80 if NATIVE else 320)  # one record, so one ledger key


def lines(count: int) -> list[bytes]:
    return [good(number) for number in range(count)]


class MemoryStore:
    """Records what is saved; fails a number of times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.saves: list[list[Checkpoint]] = []
        self.refused: list[list[Checkpoint]] = []

    def save(self, checkpoints: Sequence[Checkpoint], now_s: float) -> SaveResult:
        assert now_s == NOW_S
        if self.failures:
            self.failures -= 1
            self.refused.append(list(checkpoints))
            raise StateError("the disk is on fire")
        self.saves.append(list(checkpoints))
        return SaveResult(list(checkpoints), [])

    def accepted_ids(self) -> Sequence[bytes]:
        return []

    def totals(self) -> Totals:
        return Totals()

    def saved_up_to(self) -> int:
        return max((checkpoint.end_offset for save in self.saves for checkpoint in save), default=0)


# The order of settlement ----------------------------------------------------------------------------------------------


async def test_a_later_success_does_not_move_the_checkpoint_past_an_open_batch(make: Maker):
    release, store, source = anyio.Event(), MemoryStore(), Source(lines(30))
    pipeline = make(source, [release], [], store=store)
    async with running(pipeline):
        await until(lambda: pipeline.totals.accepted == 29)
        await anyio.sleep(0.01)  # some commit intervals, during which a save would happen if the rule were broken
        held_at = store.saved_up_to()
        release.set()
    assert held_at == 0, "the checkpoint passed the open batch"
    assert source.stream.checkpoint == store.saved_up_to() == source.size


async def test_a_later_save_does_not_pass_a_failed_one(make: Maker):
    store = MemoryStore(failures=1)
    pipeline = make(Source([b"not json\n", *lines(50)], is_followed=True), store=store, batch_linger_seconds=0)
    with pytest.raises(ExceptionGroup) as caught:
        await ran(pipeline)
    assert caught.group_contains(StateError)
    assert store.refused
    assert store.saves[0][: len(store.refused[0])] == store.refused[0]
    saved_rules = [rejection.rule for save in store.saves for each in save for rejection in each.rejections]
    assert saved_rules == ["json"]


async def test_a_partial_batch_is_sent_after_the_linger(make: Maker):
    pipeline = make(Source(lines(1), is_followed=True), batch_max_events=1000, batch_linger_seconds=0.01)
    async with running_until_cancelled(pipeline):
        await until(lambda: pipeline.totals.accepted)


async def test_an_oversized_line_is_a_dead_letter_between_its_neighbours(make: Maker, store: Store):
    class Oversized(Source):
        async def run(self, chunks_tx: Any) -> None:
            await self.send(chunks_tx, good(1))
            end = self.size + 5_000_000
            chunk = Chunk(stream=self.stream, start_offset=self.size, end_offset=end, data=b"", is_oversized=True)
            await chunks_tx.send(chunk)
            self.size = end
            await self.send(chunks_tx, good(2))
            self.is_exhausted = True

    pipeline = make(Oversized())
    summary = await ran(pipeline)
    assert (summary.accepted, summary.dead_lettered, summary.exit_code(is_one_shot=True)) == (2, 1, 3)
    assert pipeline.settlement.acks.reasons == {"oversized": 1}
    assert store.totals().dead_lettered == 1


# Waiting for room -----------------------------------------------------------------------------------------------------


async def test_many_spans_without_events_do_not_stop_the_pipeline(make: Maker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 400_000)
    summary = await ran(make(Source([b"{}\n"] * 600), store=MemoryStore()), limit_s=120)
    assert (summary.read, summary.dead_lettered, summary.exit_code(is_one_shot=True)) == (600, 600, 3)
    assert add_up(summary)


async def test_reading_waits_while_the_service_does_not_answer(make: Maker):
    source, never = Source(map(good, count())), anyio.Event()
    pipeline = make(source, [never], [never])
    async with running_until_cancelled(pipeline):
        await until_it_rests(pipeline, source)
    # Two batches at the senders, two queued, one at the packer, and two chunks queued before it.
    assert source.sent <= 8
    assert pipeline.totals.read == pipeline.totals.pending <= 6


async def test_reading_waits_when_too_much_is_settled_after_an_open_batch(
    make: Maker, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", OPEN_SPANS * SPAN_BYTES)
    source, release = Source(lines(OPEN_SPANS + 500)), anyio.Event()
    pipeline = make(source, [release], [])
    async with running(pipeline, limit_s=30):
        await until(lambda: pipeline.totals.accepted >= OPEN_SPANS - 10)
        await until_it_rests(pipeline, source)
        assert OPEN_SPANS - 10 <= pipeline.totals.read <= OPEN_SPANS
        assert store.streams.load("file") == [], "records after the first batch were saved"
        release.set()
    assert (pipeline.totals.accepted, pipeline.totals.pending) == (OPEN_SPANS + 500, 0)


async def test_a_batch_is_filled_while_answers_to_others_make_room(make: Maker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 12 * SPAN_BYTES)
    source, release = Source(lines(100)), anyio.Event()
    pipeline = make(source, [release], batch_max_events=5)
    async with running(pipeline, limit_s=30) as run:
        await until_it_rests(pipeline, source)
        assert 5 < pipeline.totals.read < 20, "there is room for all"
        release.set()
    assert (run.summary.accepted, run.summary.batches) == (100, 20)


# The end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended_by", ["second signal", "deadline"])
@pytest.mark.parametrize("held_by", [None, answer(429, "600")], ids=["no answer", "requested wait"])
async def test_a_stop_that_cannot_drain_is_aborted_and_accounted_for(
    make: Maker, ended_by: str, held_by: Answer | None
):
    store, drain_s = MemoryStore(), 3600 if ended_by == "second signal" else 0.05
    source = Source(lines(20), is_followed=True)
    pipeline = make(source, [held_by or anyio.Event()], store=store, delivery_drain_timeout_seconds=drain_s)
    async with running(pipeline) as run:
        await until(lambda: pipeline.totals.pending)
        run.signal(signal.SIGTERM)
        if ended_by == "second signal":
            run.signal(signal.SIGTERM)
    summary = run.summary
    assert (summary.outcome, summary.accepted, summary.exit_code(is_one_shot=False)) == ("aborted", 0, 4)
    assert summary.pending > 0
    assert add_up(summary)
    assert store.saved_up_to() == 0


async def test_records_accepted_behind_a_pending_one_are_pending_at_the_end_as_they_are_sent_again(make: Maker):
    store, source = MemoryStore(), Source(lines(20), is_followed=True)
    pipeline = make(source, [anyio.Event()], [], store=store, batch_max_events=10, delivery_drain_timeout_seconds=0.05)
    async with running(pipeline) as run:
        await until(lambda: pipeline.totals.accepted == 10)
        run.signal(signal.SIGTERM)
    assert (run.summary.outcome, run.summary.accepted, run.summary.pending) == ("aborted", 0, 20)
    assert store.saved_up_to() == 0


@pytest.mark.parametrize(("drain_s", "batch"), [(25, 7), (0, 5)])
async def test_a_stop_that_can_drain_or_has_nothing_to_drain_settles_all_records(make: Maker, drain_s: int, batch: int):
    store, source = MemoryStore(), Source(lines(20), is_followed=True)
    pipeline = make(source, store=store, batch_max_events=batch, delivery_drain_timeout_seconds=drain_s)
    async with running(pipeline) as run:
        await until(lambda: pipeline.totals.read == 20)
        await until(lambda: drain_s > 0 or store.saved_up_to() == source.size)
        run.signal(signal.SIGTERM)
    summary = run.summary
    assert (summary.outcome, summary.accepted, summary.pending) == ("drained", 20, 0)
    assert (summary.exit_code(is_one_shot=False), summary.exit_code(is_one_shot=True)) == (0, 4)
    assert store.saved_up_to() == source.size


async def test_a_run_that_gives_up_reports_it_and_saves_settled_records(make: Maker, store: Store):
    answers = [*[answer(202)] * 2, *[answer(503)] * 100_000]
    pipeline = make(Source(lines(300)), answers, batch_max_events=10, delivery_give_up_after_seconds=0.05)
    summary = await ran(pipeline)
    assert (summary.outcome, summary.accepted, summary.exit_code(is_one_shot=True)) == ("gave_up", 20, 4)
    assert "503" in summary.message
    assert add_up(summary)
    assert store.totals().accepted == 20
    delivered = sum(map(len, lines(20)))
    assert [stream.checkpoint for stream in store.streams.load("file")] == [delivered]


async def test_a_run_that_follows_its_input_never_gives_up(make: Maker):
    changes = {"batch_max_events": 10, "delivery_give_up_after_seconds": 0.001}
    summary = await ran(make(Source(lines(20)), [answer(503)] * 60, is_one_shot=False, **changes))
    assert (summary.outcome, summary.accepted, summary.retries) == ("finished", 20, 60)


async def test_a_cancelled_run_saves_settled_records(make: Maker, store: Store):
    pipeline = make(Source(lines(50)), [*[answer(202)] * 3, anyio.Event()], batch_max_events=10)
    async with running_until_cancelled(pipeline):
        while pipeline.totals.accepted < 30:
            await anyio.lowlevel.checkpoint()
    assert store.totals().accepted == 30


async def test_a_stop_does_not_hang_on_a_hung_disk(make: Maker, store: Store, monkeypatch: pytest.MonkeyPatch):
    """Unsaved records are not counted, and no second save is attempted."""
    monkeypatch.setattr(pipeline_module, "_LAST_SAVE_LIMIT_S", 0.1)
    has_begun, answers = threading.Event(), threading.Event()
    saves: list[int] = []

    def save(*_: Any) -> Any:
        saves.append(1)
        has_begun.set()
        assert answers.wait(20)
        raise StateUnwritableError("too late")

    monkeypatch.setattr(store, "save", save)
    pipeline = make(Source(lines(50)), [answer(202)] * 5, batch_max_events=10)
    try:
        with pytest.raises(ExceptionGroup) as caught:
            async with running(pipeline):
                await until(has_begun.is_set)
                pipeline.abort(cause="a second signal")
    finally:
        answers.set()
    assert caught.group_contains(StateError, match="its disk does not respond")
    assert len(saves) == 1


async def test_a_pause_ends_with_the_last_stream_that_could_not_be_saved(store: Store, monkeypatch: pytest.MonkeyPatch):
    """Streams given to another process are never saved here, so no save would show that there is room again."""

    def save(*_: Any) -> Any:
        raise StateUnwritableError("too late")

    monkeypatch.setattr(store, "save", save)
    kept = Settlement(
        store,
        settings().state,
        window=new_window(0),
        on_saved=lambda saved: anyio.lowlevel.checkpoint(),
        give_up_after_s=None,
        wall_time=lambda: NOW_S,
    )
    streams = [Stream(stream_id=number, kind="kafka", path="t/0") for number in (1, 2)]
    for stream in streams:
        span = Span(stream=stream, start_offset=0, end_offset=9, tail=b"", read=1, unsettled=0, duplicates=1)
        kept.open(span, 0.0)
    await kept.save()
    await kept.abandon(streams[:1])
    assert (kept.blockage and kept.blockage.reason, kept.has_room) == ("state_unwritable", False)
    await kept.abandon(streams[1:])
    assert (kept.blockage, kept.has_room) == (None, True)


@each(
    ("changes", "one_shot", "followed"),
    [
        ({"outcome": "finished"}, 0, 0),
        ({"outcome": "finished", "dead_lettered": 1}, 3, 0),
        ({"outcome": "finished", "pending": 1}, 4, 4),
        ({"outcome": "finished", "pending": 1, "dead_lettered": 1}, 4, 4),
        ({"outcome": "drained"}, 4, 0),
        ({"outcome": "drained", "dead_lettered": 1}, 4, 0),
        ({"outcome": "aborted"}, 4, 4),
        ({"outcome": "gave_up", "pending": 7}, 4, 4),
    ],
)
def test_the_exit_code_tells_whether_work_is_left(changes: dict[str, Any], one_shot: int, followed: int):
    summary = Summary(batches=0, requests=0, retries=0, seconds=0.0, **changes)
    assert (summary.exit_code(is_one_shot=True), summary.exit_code(is_one_shot=False)) == (one_shot, followed)
