"""Standard input through the spool: what was read is on disk before it is sent, and goes when it is settled."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from shipper.model.framing import CUT_MARK
from shipper.model.records import Chunk, Marker, Stream
from shipper.sources.segments import youngest_segment_id
from shipper.sources.spool import Spool


class Bench:
    """A spool over a pipe, and the stages behind it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.forgotten: list[int] = []
        self.rx_end, self.tx_end = os.pipe()
        self.chunks: list[Chunk] = []
        self.ids: Callable[[], int] = count(youngest_segment_id(directory) + 1).__next__

    def spool(self, known: Iterable[Stream] = (), **changes: Any) -> Spool:
        limits = {
            "max_record_bytes": 1000,
            "max_bytes": 1 << 20,
            "segment_bytes": 200,
            "fsync": "never",
            "fsync_interval_s": 1.0,
        }
        return Spool(
            self.directory,
            self.rx_end,
            wall_time=lambda: 1.0,
            known=known,
            next_stream_id=self.ids,
            forget=self.forgotten.extend,
            **{**limits, **changes},
        )

    def write(self, data: bytes, *, close: bool = True) -> None:
        os.write(self.tx_end, data)
        if close:
            os.close(self.tx_end)

    async def run(self, spool: Spool) -> bytes:
        """Read everything, without settling anything."""
        tx, rx = anyio.create_memory_object_stream[Chunk](1000)
        with tx, rx, anyio.fail_after(5):
            await spool.run(tx)
            self.chunks = [rx.receive_nowait() for _ in range(rx.statistics().current_buffer_used)]
        return b"".join(chunk.data for chunk in self.chunks)

    def segments(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def bench(tmp_path: Path):
    bench = Bench(tmp_path / "spool")
    yield bench
    for descriptor in (bench.rx_end, bench.tx_end):
        try:
            os.close(descriptor)
        except OSError:
            continue


LINES = b"".join(b"line %d\n" % number for number in range(100))


async def test_everything_arrives_in_order_in_segments_that_end_at_a_newline(bench: Bench):
    bench.write(LINES)
    spool = bench.spool()
    assert await bench.run(spool) == LINES
    assert spool.is_exhausted
    assert len(bench.segments()) > 3
    for path in bench.directory.iterdir():
        assert path.read_bytes().endswith(b"\n")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {chunk.stream.stream_id for chunk in bench.chunks} == {int(name.split(".")[0]) for name in bench.segments()}


async def test_the_end_of_the_input_ends_its_last_line(bench: Bench):
    bench.write(b"one\ntwo")
    assert await bench.run(bench.spool()) == b"one\ntwo"


async def test_an_empty_input_leaves_nothing(bench: Bench):
    bench.write(b"")
    spool = bench.spool()
    assert await bench.run(spool) == b""
    assert (spool.is_exhausted, bench.segments()) == (True, [])


async def test_segments_go_when_their_checkpoint_has_passed_their_end_and_not_before(bench: Bench):
    bench.write(LINES)
    spool = bench.spool()
    await bench.run(spool)
    before = bench.segments()
    await spool.after_save(())
    assert bench.segments() == before, "nothing is settled yet"
    last = {chunk.stream.stream_id: chunk for chunk in bench.chunks}
    first_id, *rest = sorted(last)
    last[first_id].stream.marker = Marker(last[first_id].end_offset - 1)
    for stream_id in rest:
        last[stream_id].stream.marker = Marker(last[stream_id].end_offset)
    await spool.after_save(())
    assert bench.segments() == before[:1]
    assert sorted(bench.forgotten) == rest
    last[first_id].stream.marker = Marker(last[first_id].end_offset)
    await spool.after_save(())
    assert (bench.segments(), spool.spooled_bytes) == ([], 0)


async def test_what_an_earlier_process_left_comes_first_from_its_checkpoint_and_ids_are_not_used_again(bench: Bench):
    bench.directory.mkdir()
    (bench.directory / "000000000007.ndjson").write_bytes(b"settled\nleft\ntorn")
    known = [
        Stream(stream_id=7, kind="spool", path="x", marker=Marker(8)),
        Stream(stream_id=3, kind="spool", path="gone", marker=Marker(99)),
    ]
    bench.ids = count(youngest_segment_id(bench.directory) + 1).__next__
    bench.write(b"new\n")
    assert await bench.run(bench.spool(known)) == b"left\ntornnew\n"
    assert [chunk.data for chunk in bench.chunks] == [b"left\n", b"torn", b"new\n"]
    assert bench.forgotten == [3], "its segment was deleted and only its row was left"
    assert bench.segments() == ["000000000007.ndjson", "000000000008.ndjson"]


async def test_an_endless_line_is_cut_to_what_tells_that_it_is_too_long(bench: Bench):
    tx, rx = anyio.create_memory_object_stream[Chunk](1000)
    with tx, rx, anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(bench.spool().run, tx)
            for _ in range(40):
                await anyio.to_thread.run_sync(os.write, bench.tx_end, b"x" * 50_000)
            bench.write(b"\nnext\n")
        data = b"".join(rx.receive_nowait().data for _ in range(rx.statistics().current_buffer_used))
    long, following, end = data.split(b"\n")
    assert (following, end) == (b"next", b"")
    kept, mark, whole_bytes = long.partition(CUT_MARK)
    assert set(kept) == {ord("x")}
    assert 1000 < len(kept) <= 1_050_000, "more than the limit, and not all of the two million"
    assert (mark, int(whole_bytes)) == (CUT_MARK, 2_000_000)


async def test_reading_waits_when_the_spool_is_full_until_something_is_settled(bench: Bench):
    spool = bench.spool(segment_bytes=20_000, max_bytes=40_000)
    tx, rx = anyio.create_memory_object_stream[Chunk](1000)
    os.set_blocking(bench.tx_end, False)
    written = 0
    with tx, rx, anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(spool.run, tx)
            try:
                while True:
                    await anyio.sleep(0.001)
                    written += os.write(bench.tx_end, LINES)
                    assert written < 50_000_000, "reading never waits"
            except BlockingIOError:
                pass
            assert spool.spooled_bytes >= 40_000
            os.close(bench.tx_end)
            got = 0
            async for chunk in rx:
                got += len(chunk.data)
                chunk.stream.marker = Marker(chunk.end_offset)
                await spool.after_save(())
                if got == written:
                    break
    assert got == written
    assert spool.is_exhausted
