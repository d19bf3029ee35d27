"""The stages together at their limits: a service that is away, one that hangs, and what a run says of itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from shipper.codec import new_window
from shipper.model.errors import StateError, StateUnwritableError
from shipper.model.records import Chunk, Span, Stream
from shipper.pipeline import Pipeline, Summary, settlement
from shipper.pipeline import pipeline as pipeline_module
from shipper.pipeline.settlement import Settlement
from shipper.sources.identity import StreamBook
from shipper.sources.once import FilesOnce
from shipper.state.store import Store
from shipper.system.native import NATIVE
from tests.cases import each
from tests.fakes import ScriptedEndpoint, answer
from tests.stage.pipelines import NOW_S, Source, good, pipeline_of, running, settings
from tests.stage.servers import ACCEPTED, Origin, close
from tests.unit.test_codec import line

OPEN_SPANS = 512
SPAN_BYTES = 2048 + (80 if NATIVE else 320)  # one record, so one key in the ledger


class Lines(Source):
    """A source of good lines, one a chunk, until somebody has enough of it."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last = last

    def line(self, number: int) -> bytes:
        return good(number)

    async def run(self, chunks_tx: Any) -> None:
        for number in count() if self.last is None else range(self.last):
            await self.send(chunks_tx, self.line(number))
        self.is_exhausted = True


@pytest.fixture
def store(tmp_path: Path):
    (tmp_path / "state").mkdir()
    store = Store(tmp_path / "state")
    yield store
    store.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, store: Store):
    def make(source: Any, *scripts: Sequence[Any], is_one_shot: bool = True, **changes: Any) -> Pipeline:
        made, endpoints = settings(senders=len(scripts), **changes), map(ScriptedEndpoint, scripts)
        return pipeline_of(monkeypatch, made, source, store, endpoints, is_one_shot=is_one_shot)

    return make


async def until_it_rests(pipeline: Pipeline, source: Lines) -> None:
    """Wait until nothing moves any more; commit intervals are a millisecond here."""
    before = None
    while before != (before := (source.sent, pipeline.totals.accepted, repr(pipeline))):
        await anyio.sleep(0.03)


async def test_reading_waits_while_the_service_answers_nothing(make: Any):
    source = Lines()
    never = anyio.Event()
    pipeline = make(source, [never], [never], batch_max_events=1)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            while not source.sent:
                await anyio.sleep(0.001)
            await until_it_rests(pipeline, source)
            group.cancel_scope.cancel()
    # Two in the senders' hands, two before them, one in the packer's hands, two chunks before it.
    assert source.sent <= 8
    assert pipeline.totals.read == pipeline.totals.pending <= 6


async def test_reading_waits_when_too_much_is_settled_behind_a_batch_that_is_not(
    make: Any, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", OPEN_SPANS * SPAN_BYTES)
    source = Lines(last=OPEN_SPANS + 500)
    release = anyio.Event()
    pipeline = make(source, [release], [], batch_max_events=1)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            while pipeline.totals.accepted < OPEN_SPANS - 10:
                await anyio.sleep(0.01)
            await until_it_rests(pipeline, source)
            assert OPEN_SPANS - 10 <= pipeline.totals.read <= OPEN_SPANS
            assert store.streams.known("file") == [], "nothing is saved behind the first batch"
            release.set()
    assert pipeline.totals.accepted == OPEN_SPANS + 500
    assert pipeline.totals.pending == 0


async def test_a_batch_is_filled_before_it_is_sent_where_room_comes_with_the_answers_to_others(
    make: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settlement, "MAX_HELD_BYTES", 12 * SPAN_BYTES)
    source = Lines(last=100)
    release = anyio.Event()
    pipeline = make(source, [release], batch_max_events=5)
    async with running(pipeline, limit_s=30) as summaries:
        await until_it_rests(pipeline, source)
        assert 5 < pipeline.totals.read < 20, "there is no room for all"
        release.set()
    assert (summaries[0].accepted, summaries[0].batches) == (100, 20)


async def test_a_run_that_is_given_up_says_so_and_keeps_what_was_settled(make: Any, store: Store):
    source = Lines(last=300)
    pipeline = make(
        source, [*[answer(202)] * 2, *[answer(503)] * 100_000], batch_max_events=10, delivery_give_up_after_seconds=0.05
    )
    with anyio.fail_after(10):
        summary: Summary = await pipeline.run()
    assert (summary.outcome, summary.accepted, summary.exit_code(is_one_shot=True)) == ("gave_up", 20, 4)
    assert "503" in summary.message
    assert summary.read == summary.accepted + summary.pending
    assert store.totals().accepted == 20
    delivered = sum(len(source.line(number)) for number in range(20))
    assert [stream.checkpoint for stream in store.streams.known("file")] == [delivered]


async def test_a_followed_input_is_never_given_up(make: Any):
    source = Lines(last=20)
    pipeline = make(
        source, [answer(503)] * 60, batch_max_events=10, delivery_give_up_after_seconds=0.001, is_one_shot=False
    )
    with anyio.fail_after(10):
        summary: Summary = await pipeline.run()
    assert (summary.outcome, summary.accepted, summary.retries) == ("finished", 20, 60)


class OversizedSource(Lines):
    async def run(self, chunks_tx: Any) -> None:
        good = [line(1, ConsumerID=1) + b"\n", line(2, ConsumerID=2) + b"\n"]
        spans = [(good[0], len(good[0])), (b"", 5_000_000), (good[1], len(good[1]))]
        offset = 0
        for data, length in spans:
            await chunks_tx.send(
                Chunk(
                    stream=self.stream,
                    start_offset=offset,
                    end_offset=offset + length,
                    data=data,
                    is_oversized=not data,
                )
            )
            offset += length
        self.is_exhausted = True


async def test_a_line_that_was_not_even_read_is_a_dead_letter_between_its_neighbours(make: Any, store: Store):
    pipeline = make(OversizedSource(), [])
    with anyio.fail_after(10):
        summary: Summary = await pipeline.run()
    assert (summary.accepted, summary.dead_lettered, summary.exit_code(is_one_shot=True)) == (2, 1, 3)
    assert pipeline.dead_letter_reasons == {"oversized": 1}
    assert store.totals().dead_lettered == 1


async def test_a_run_that_is_cancelled_from_outside_saves_what_was_settled(make: Any, store: Store):
    source = Lines(last=50)
    never = anyio.Event()
    pipeline = make(source, [*[answer(202)] * 3, never], batch_max_events=10)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            while pipeline.totals.accepted < 30:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert store.totals().accepted == 30


async def test_a_stop_does_not_hang_on_a_disk_that_does_not_answer(
    make: Any, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """What was not saved is not counted, and nothing tries to save it a second time behind it."""
    monkeypatch.setattr(pipeline_module, "_LAST_SAVE_LIMIT_S", 0.1)
    has_begun, answers = threading.Event(), threading.Event()
    saves: list[int] = []

    def save(*_: Any) -> Any:
        saves.append(1)
        has_begun.set()
        assert answers.wait(20)
        raise StateUnwritableError("too late")

    monkeypatch.setattr(store, "save", save)
    pipeline = make(Lines(last=50), [answer(202)] * 5, batch_max_events=10)
    try:
        with anyio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
            async with anyio.create_task_group() as group:
                group.start_soon(pipeline.run)
                while not has_begun.is_set():
                    await anyio.sleep(0.001)
                pipeline.abort(cause="a second signal")
    finally:
        answers.set()
    assert caught.group_contains(StateError, match="its disk does not respond")
    assert len(saves) == 1


async def test_a_pause_ends_with_the_last_stream_of_which_something_could_not_be_saved(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    """What is left to another process is never saved here, so that no save would tell that there is room again."""

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
        kept.open(
            Span(stream=stream, start_offset=0, end_offset=9, tail=b"", records=1, unsettled=0, duplicates=1), 0.0
        )
    await kept.save()
    await kept.abandon(streams[:1])
    assert (kept.obstacle.reason, kept.has_room) == ("state_unwritable", False)
    await kept.abandon(streams[1:])
    assert (kept.obstacle.reason, kept.has_room) == ("", True)


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
def test_the_exit_code_says_whether_anything_is_left_to_do(changes: dict[str, Any], one_shot: int, followed: int):
    summary = Summary(batches=0, requests=0, retries=0, seconds=0.0, **changes)
    assert (summary.exit_code(is_one_shot=True), summary.exit_code(is_one_shot=False)) == (one_shot, followed)


# With a socket, files and the disk -----------------------------------------------------------------------------------

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


async def test_files_arrive_through_a_socket_whatever_the_service_does_at_first(tmp_path: Path, store: Store):
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    lines = [line(number, ConsumerID=number + 1) + b"\n" for number in range(400)]
    paths[0].write_bytes(b"".join(lines[:150]))
    paths[1].write_bytes(b"".join(lines[150:]))
    with Origin(BUSY, close, BUSY, close, ACCEPTED) as server:
        pipeline = Pipeline(
            settings(server.url, senders=3, batch_max_bytes=9000),
            FilesOnce(
                paths,
                StreamBook([], count(1).__next__, max_record_bytes=2000),
                store.streams,
                wall_time=lambda: 1.0,
            ),
            store,
            is_one_shot=True,
            wall_time=lambda: NOW_S,
            rng=Random(1),
        )
        summary = await pipeline.run()
    assert (summary.outcome, summary.accepted, summary.pending) == ("finished", 400, 0)
    bodies = [request.partition(b"\r\n\r\n")[2] for request in server.requests]
    assert max(map(len, bodies)) <= 9000
    sent = {event["ConsumerID"] for body in bodies for event in json.loads(body)["events"]}
    assert len(sent) == 400
    assert sum(len(json.loads(body)["events"]) for body in set(bodies)) == 400, "a batch is sent again as it was"
    assert [stream.checkpoint for stream in store.streams.known("file")] == [path.stat().st_size for path in paths]
