"""The spool when things go wrong: crashes at odd moments, a full disk, inputs that are no pipe."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from shipper.errors import StateError
from shipper.records import Chunk, Marker, Stream
from shipper.sources import spool as spool_module
from shipper.sources.spool import Spool

LINES = b"".join(b"line %04d\n" % number for number in range(200))


class Bench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.forgotten: list[int] = []
        self.ids = count(100)

    def spool(self, descriptor: int, *known: Stream, **changes: Any) -> Spool:
        limits = {
            "max_record_bytes": 1000,
            "max_bytes": 1 << 20,
            "segment_bytes": 200,
            "fsync": "never",
            "fsync_interval_s": 1.0,
        }
        return Spool(
            self.directory,
            descriptor,
            wall_time=lambda: 1.0,
            known=known,
            next_stream_id=self.ids.__next__,
            forget=self.forgotten.extend,
            **{**limits, **changes},
        )

    async def ship(self, spool: Spool) -> bytes:
        """Read everything, and settle each chunk as soon as it comes."""
        data = b""
        tx, rx = anyio.create_memory_object_stream[Chunk](0)
        with rx, anyio.fail_after(10):
            async with anyio.create_task_group() as group:

                async def run() -> None:
                    with tx:
                        await spool.run(tx)

                group.start_soon(run)
                async for chunk in rx:
                    data += chunk.data
                    chunk.stream.move_checkpoint(chunk.end_offset, chunk.data[-64:])
                    await spool.after_save()
        await spool.after_save()
        return data

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    directory = tmp_path / "spool"
    directory.mkdir()
    return Bench(directory)


@pytest.fixture
def piped() -> Iterator[Callable[[bytes], int]]:
    """Gives the reading end of a pipe that holds some bytes and has ended."""
    ends: list[int] = []

    def pipe(data: bytes) -> int:
        rx_end, tx_end = os.pipe()
        ends.append(rx_end)
        assert os.write(tx_end, data) == len(data)
        os.close(tx_end)
        return rx_end

    yield pipe
    for end in ends:
        os.close(end)


async def test_a_segment_that_was_settled_before_a_crash_does_not_block_the_spool(
    bench: Bench, piped: Callable[[bytes], int]
):
    (bench.directory / "000000000001.ndjson").write_bytes(LINES)
    settled = Stream(stream_id=1, kind="spool", path="x", marker=Marker(len(LINES)))
    spool = bench.spool(piped(b"new\n"), settled, max_bytes=len(LINES))
    assert await bench.ship(spool) == b"new\n"
    assert (bench.names(), sorted(bench.forgotten)) == ([], [1, 100])


async def test_an_empty_segment_of_a_crash_goes_and_files_of_others_stay(bench: Bench, piped: Callable[[bytes], int]):
    (bench.directory / "000000000007.ndjson").touch()
    (bench.directory / "notes.ndjson").write_bytes(b"mine\n")
    (bench.directory / "8.tmp").write_bytes(b"mine\n")
    assert await bench.ship(bench.spool(piped(b"new\n"))) == b"new\n"
    assert bench.names() == ["8.tmp", "notes.ndjson"]


async def test_a_full_disk_makes_reading_wait_and_loses_and_doubles_nothing(
    bench: Bench, piped: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
):
    true_write = os.write
    faults = iter([errno.ENOSPC, None, errno.EDQUOT, errno.ENOSPC, None, None, errno.ENOSPC] + [None] * 10_000)

    def write(descriptor: int, data: bytes) -> int:
        """Take a part only, as a disk does that is nearly full; sometimes nothing."""
        fault = next(faults)
        if fault is not None:
            raise OSError(fault, os.strerror(fault))
        return true_write(descriptor, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
    source = piped(LINES + b"torn")
    monkeypatch.setattr(os, "write", write)
    assert await bench.ship(bench.spool(source)) == LINES + b"torn"
    assert next(faults) is None, "the disk was full in between"
    assert bench.names() == []


async def test_another_fault_of_the_disk_is_not_waited_out(
    bench: Bench, piped: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
):
    source = piped(LINES)

    def write(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ExceptionGroup) as caught:
        await bench.ship(bench.spool(source))
    assert caught.group_contains(
        StateError, match=rf"the spool {bench.directory} cannot be written \(Input/output error"
    )


async def test_a_full_spool_goes_on_when_the_last_chunk_of_a_segment_is_settled_at_once(bench: Bench):
    rx_end, tx_end = os.pipe()
    spool = bench.spool(rx_end, max_bytes=1, segment_bytes=1)
    tx, rx = anyio.create_memory_object_stream[Chunk](0)
    with rx, anyio.fail_after(5):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                with tx:
                    await spool.run(tx)

            group.start_soon(run)
            for number in range(20):
                os.write(tx_end, b"%d\n" % number)
                chunk = await rx.receive()
                assert chunk.data == b"%d\n" % number
                chunk.stream.move_checkpoint(chunk.end_offset, chunk.data)
                await spool.after_save()
            os.close(tx_end)
    os.close(rx_end)
    assert bench.names() == []


async def test_a_file_as_standard_input_is_read_from_where_it_stands(bench: Bench, tmp_path: Path):
    path = tmp_path / "input"
    path.write_bytes(b"skipped\n" + LINES)
    with path.open("rb", buffering=0) as opened:
        opened.seek(len(b"skipped\n"))
        assert await bench.ship(bench.spool(opened.fileno())) == LINES


async def test_no_input_at_all_is_an_input_that_has_ended(bench: Bench):
    nothing = os.open(os.devnull, os.O_RDONLY)
    spool = bench.spool(nothing)
    assert await bench.ship(spool) == b""
    os.close(nothing)
    assert (spool.is_exhausted, bench.names()) == (True, [])


async def test_a_hole_in_the_input_is_no_line_and_keeps_no_place(bench: Bench, tmp_path: Path):
    path = tmp_path / "input"
    with path.open("wb") as out:
        out.seek(5_000_000)
        out.write(LINES)
    with path.open("rb", buffering=0) as opened:
        data = await bench.ship(bench.spool(opened.fileno()))
    assert data.lstrip(b"\0") == LINES
    assert len(data) < 2_000_000


@pytest.mark.parametrize(("fsync", "at_least", "at_most"), [("always", 3, 99), ("interval", 1, 99), ("never", 0, 0)])
async def test_what_was_read_is_forced_to_disk_as_often_as_is_asked(
    bench: Bench,
    piped: Callable[[bytes], int],
    monkeypatch: pytest.MonkeyPatch,
    fsync: str,
    at_least: int,
    at_most: int,
):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    await bench.ship(bench.spool(piped(LINES), fsync=fsync))
    assert at_least <= len(synced) <= at_most


async def test_a_run_that_is_cut_off_is_not_exhausted_and_leaves_its_segments(bench: Bench):
    rx_end, tx_end = os.pipe()
    os.write(tx_end, LINES + b"torn")
    spool = bench.spool(rx_end)
    tx, rx = anyio.create_memory_object_stream[Chunk](1000)
    data = b""
    with tx, rx, anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(spool.run, tx)
            while len(data) < len(LINES):
                data += (await rx.receive()).data
            group.cancel_scope.cancel()
    os.close(rx_end)
    os.close(tx_end)
    assert data == LINES, "a torn line waits for its end"
    assert not spool.is_exhausted
    kept = b"".join((bench.directory / name).read_bytes() for name in bench.names())
    assert kept == LINES + b"torn"
