"""An input through the spool: on disk before it is sent, and deleted once it is settled, despite any faults."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from shipper.config.settings import SpoolSettings
from shipper.model.errors import SourceError, StateError
from shipper.model.framing import CUT_MARK
from shipper.model.records import Chunk, Marker, Stream
from shipper.sources import spool as spool_module
from shipper.sources.feed import Feed
from shipper.sources.reader import StreamReader
from shipper.sources.segments import newest_segment_id
from shipper.sources.spool import Spool
from tests.e2e.surroundings import small_disk
from tests.fakes import failing
from tests.spooling import spooling

LINES = b"".join(b"line %04d\n" % number for number in range(200))


class Bench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.forgotten: list[int] = []
        self.ids = count(100)

    def spool(self, descriptor: int, *known: Stream, **changes: Any) -> Spool:
        settings = SpoolSettings(**{"max_bytes": 1 << 20, "segment_bytes": 200, "fsync": "never", **changes})
        return Spool(
            self.directory,
            descriptor,
            settings,
            max_record_bytes=1000,
            wall_time=lambda: 1.0,
            known=known,
            next_stream_id=self.ids.__next__,
            forget=self.forgotten.extend,
        )

    async def read(self, spool: Spool) -> list[Chunk]:
        """Read everything, without settling anything."""
        async with spooling(spool, room=1000) as rx:
            return [chunk async for chunk in rx]

    async def ship(self, spool: Spool) -> bytes:
        """Read everything, and settle each chunk at once."""
        data = b""
        async with spooling(spool) as rx:
            async for chunk in rx:
                data += chunk.data
                chunk.stream.move_checkpoint(chunk.end_offset, chunk.data[-64:])
                await spool.after_save(())
        await spool.after_save(())
        return data

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def kept(self) -> bytes:
        return b"".join((self.directory / name).read_bytes() for name in self.names())

    def holds(self, data: bytes) -> bool:
        """Return whether a file contains exactly `data`; the spool renames and removes files meanwhile."""
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                if path.read_bytes() == data:
                    return True
        return False


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    directory = tmp_path / "spool"
    directory.mkdir()
    return Bench(directory)


class Pipe:
    """A pipe as an input; `tx` writes to it."""

    def __init__(self) -> None:
        self.end, descriptor = os.pipe()
        self.tx = os.fdopen(descriptor, "wb", buffering=0)

    def close(self) -> None:
        self.tx.close()
        os.close(self.end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with closing(Pipe()) as pipe:
        yield pipe


Piped = Callable[[bytes], int]


@pytest.fixture
def piped(pipe: Pipe) -> Piped:
    """Return the read end of a closed pipe that contains some bytes."""

    def fill(data: bytes) -> int:
        assert pipe.tx.write(data) == len(data)
        pipe.tx.close()
        return pipe.end

    return fill


def data_of(chunks: list[Chunk]) -> bytes:
    return b"".join(chunk.data for chunk in chunks)


async def test_everything_is_delivered_in_order_in_segments_that_end_at_a_newline(bench: Bench, piped: Piped):
    spool = bench.spool(piped(LINES))
    chunks = await bench.read(spool)
    assert data_of(chunks) == LINES
    assert spool.is_exhausted
    assert len(bench.names()) > 3
    for path in bench.directory.iterdir():
        assert path.read_bytes().endswith(b"\n")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {chunk.stream.stream_id for chunk in chunks} == {int(name.split(".")[0]) for name in bench.names()}


async def test_the_end_of_the_input_ends_its_last_line(bench: Bench, piped: Piped):
    assert data_of(await bench.read(bench.spool(piped(b"one\ntwo")))) == b"one\ntwo"


async def test_a_segment_is_deleted_only_when_the_checkpoint_has_passed_its_end(bench: Bench, piped: Piped):
    spool = bench.spool(piped(LINES))
    chunks = await bench.read(spool)
    before = bench.names()
    await spool.after_save(())
    assert bench.names() == before, "a segment was deleted before it was settled"
    last = {chunk.stream.stream_id: chunk for chunk in chunks}
    first_id, *rest = sorted(last)
    last[first_id].stream.marker = Marker(last[first_id].end_offset - 1)
    for stream_id in rest:
        last[stream_id].stream.marker = Marker(last[stream_id].end_offset)
    await spool.after_save(())
    assert bench.names() == before[:1]
    assert sorted(bench.forgotten) == rest
    last[first_id].stream.marker = Marker(last[first_id].end_offset)
    await spool.after_save(())
    assert (bench.names(), spool.spooled_bytes) == ([], 0)


async def test_segments_of_an_earlier_process_come_first_and_ids_are_not_reused(bench: Bench, piped: Piped):
    (bench.directory / "000000000007.ndjson").write_bytes(b"settled\nleft\ntorn")
    bench.ids = count(newest_segment_id(bench.directory) + 1)
    known = Stream(stream_id=7, kind="spool", path="x", marker=Marker(8))
    gone = Stream(stream_id=3, kind="spool", path="gone", marker=Marker(99))
    chunks = await bench.read(bench.spool(piped(b"new\n"), known, gone))
    assert [chunk.data for chunk in chunks] == [b"left\n", b"torn", b"new\n"]
    assert bench.forgotten == [3], "the row of a deleted segment was used"
    assert bench.names() == ["000000000007.ndjson", "000000000008.ndjson"]


async def test_an_endless_line_is_truncated_just_above_the_limit(bench: Bench, pipe: Pipe):
    async with spooling(bench.spool(pipe.end), room=1000) as rx:
        for _ in range(40):
            await anyio.to_thread.run_sync(pipe.tx.write, b"x" * 50_000)
        pipe.tx.write(b"\nnext\n")
        pipe.tx.close()
        chunks = [chunk async for chunk in rx]
    long, following, end = data_of(chunks).split(b"\n")
    assert (following, end) == (b"next", b"")
    kept, mark, whole_bytes = long.partition(CUT_MARK)
    assert set(kept) == {ord("x")}
    assert 1000 < len(kept) <= 1_050_000, "the line was not truncated just above the limit"
    assert (mark, int(whole_bytes)) == (CUT_MARK, 2_000_000)


async def test_reading_waits_when_the_spool_is_full_until_something_is_settled(bench: Bench, pipe: Pipe):
    os.set_blocking(pipe.tx.fileno(), False)
    spool = bench.spool(pipe.end, segment_bytes=20_000, max_bytes=40_000)
    written = received = 0
    async with spooling(spool, room=1000) as rx:
        while count := pipe.tx.write(LINES):  # None if the pipe is full
            written += count
            assert written < 50_000_000, "reading never waited"
            await anyio.sleep(0.001)
        assert spool.spooled_bytes >= 40_000
        pipe.tx.close()
        async for chunk in rx:
            received += len(chunk.data)
            chunk.stream.marker = Marker(chunk.end_offset)
            await spool.after_save(())
    assert received == written
    assert spool.is_exhausted


async def test_a_segment_that_was_settled_before_a_crash_does_not_block_the_spool(bench: Bench, piped: Piped):
    (bench.directory / "000000000001.ndjson").write_bytes(LINES)
    settled = Stream(stream_id=1, kind="spool", path="x", marker=Marker(len(LINES)))
    spool = bench.spool(piped(b"new\n"), settled, max_bytes=len(LINES))
    assert await bench.ship(spool) == b"new\n"
    assert (bench.names(), sorted(bench.forgotten)) == ([], [1, 100])


async def test_an_empty_segment_left_by_a_crash_is_deleted_and_foreign_files_stay(bench: Bench, piped: Piped):
    (bench.directory / "000000000007.ndjson").touch()
    (bench.directory / "notes.ndjson").write_bytes(b"mine\n")
    (bench.directory / "8.tmp").write_bytes(b"mine\n")
    assert await bench.ship(bench.spool(piped(b"new\n"))) == b"new\n"
    assert bench.names() == ["8.tmp", "notes.ndjson"]


async def test_reading_waits_for_a_full_disk_and_nothing_is_lost_or_repeated(
    bench: Bench, piped: Piped, monkeypatch: pytest.MonkeyPatch
):
    true_write = os.write
    faults = iter([errno.ENOSPC, None, errno.EDQUOT, errno.ENOSPC, None, None, errno.ENOSPC] + [None] * 10_000)

    def write(descriptor: int, data: bytes) -> int:
        """Write only a part, sometimes nothing, like an almost full disk."""
        fault = next(faults)
        if fault is not None:
            raise OSError(fault, os.strerror(fault))
        return true_write(descriptor, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
    source = piped(LINES + b"torn")
    monkeypatch.setattr(os, "write", write)
    assert await bench.ship(bench.spool(source)) == LINES + b"torn"
    assert next(faults) is None, "the disk was never full"
    assert bench.names() == []


async def test_other_disk_errors_are_not_waited_out(bench: Bench, piped: Piped, monkeypatch: pytest.MonkeyPatch):
    source = piped(LINES)
    monkeypatch.setattr(os, "write", failing(errno.EIO))
    with pytest.raises(ExceptionGroup) as caught:
        await bench.ship(bench.spool(source))
    words = rf"the spool {bench.directory} cannot be written \(Input/output error"
    assert caught.group_contains(StateError, match=words)


async def test_a_spool_that_cannot_be_read_is_named(bench: Bench, piped: Piped, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StreamReader, "read", failing(errno.EIO))
    with pytest.raises(ExceptionGroup) as caught:
        await bench.ship(bench.spool(piped(LINES)))
    assert caught.group_contains(StateError, match=rf"the spool {bench.directory} cannot be read \(Input/output error")
    assert bench.kept()
    assert LINES.startswith(bench.kept())


def test_a_spool_that_cannot_be_created_is_named(bench: Bench, piped: Piped, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "mkdir", failing(errno.ENOSPC))
    bench.directory.rmdir()
    with pytest.raises(StateError, match=rf"the spool {bench.directory} cannot be opened \(No space left on device"):
        bench.spool(piped(LINES))


async def test_a_full_spool_resumes_when_the_last_chunk_of_a_segment_is_settled_at_once(bench: Bench, pipe: Pipe):
    spool = bench.spool(pipe.end, max_bytes=1, segment_bytes=1)
    async with spooling(spool) as rx:
        for number in range(20):
            pipe.tx.write(b"%d\n" % number)
            chunk = await rx.receive()
            assert chunk.data == b"%d\n" % number
            chunk.stream.move_checkpoint(chunk.end_offset, chunk.data)
            await spool.after_save(())
        pipe.tx.close()
        assert [chunk async for chunk in rx] == []
    assert bench.names() == []


async def test_a_file_as_standard_input_is_read_from_its_current_position(bench: Bench, tmp_path: Path):
    path = tmp_path / "input"
    path.write_bytes(b"skipped\n" + LINES)
    with path.open("rb", buffering=0) as opened:
        opened.seek(len(b"skipped\n"))
        assert await bench.ship(bench.spool(opened.fileno())) == LINES


async def test_a_closed_standard_input_counts_as_ended(bench: Bench):
    with open(os.devnull, "rb") as nothing:
        spool = bench.spool(nothing.fileno())
        assert await bench.ship(spool) == b""
    assert (spool.is_exhausted, bench.names()) == (True, [])


async def test_a_hole_in_the_input_is_no_line_and_takes_no_space(bench: Bench, tmp_path: Path):
    path = tmp_path / "input"
    with path.open("wb") as out:
        out.seek(5_000_000)
        out.write(LINES)
    with path.open("rb", buffering=0) as opened:
        data = await bench.ship(bench.spool(opened.fileno()))
    assert data.lstrip(b"\0") == LINES
    assert len(data) < 2_000_000


@pytest.mark.parametrize(("fsync", "at_least", "at_most"), [("always", 3, 99), ("interval", 1, 99), ("never", 0, 0)])
async def test_fsync_is_called_as_configured(
    bench: Bench, piped: Piped, monkeypatch: pytest.MonkeyPatch, fsync: str, at_least: int, at_most: int
):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    await bench.ship(bench.spool(piped(LINES), fsync=fsync))
    assert at_least <= len(synced) <= at_most


async def test_an_aborted_run_is_not_exhausted_and_leaves_its_segments(bench: Bench, pipe: Pipe):
    pipe.tx.write(LINES + b"torn")
    spool = bench.spool(pipe.end)
    data = b""
    async with spooling(spool) as rx:
        while len(data) < len(LINES):
            data += (await rx.receive()).data
    assert data == LINES, "a partial line was not kept"
    assert not spool.is_exhausted
    assert bench.kept() == LINES + b"torn"


# Full and broken disks ---------------------------------------------------------------------------------------------


def statvfs_that_says(monkeypatch: pytest.MonkeyPatch, *, is_full: Callable[[], bool]) -> None:
    """Fake the free space of the disk, as with a quota or other writers."""
    size = 1 << 30

    def statvfs(_: object) -> os.statvfs_result:
        free = 0 if is_full() else size
        return os.statvfs_result((4096, 1, size, free, free, 1000, 1000, 1000, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)


async def cut_off(spool: Spool, until: Callable[[], bool]) -> None:
    """Run a spool whose chunks are never settled, until a stop condition holds."""
    async with spooling(spool, room=1000):
        while not until():
            await anyio.sleep(0.005)


@pytest.mark.parametrize("segment_bytes", [1 << 20, 16 << 20])
async def test_data_without_space_on_disk_is_not_read(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
):
    """The disk seems empty but accepts no more: all data read before a stop is in the spool."""
    data = b"".join(b"%0100d\n" % number for number in range(60_000))
    source = tmp_path / "input"
    source.write_bytes(data)
    bench.directory.rmdir()
    with small_disk(bench.directory, 4_000_000), source.open("rb", buffering=0) as opened:
        statvfs_that_says(monkeypatch, is_full=lambda: False)
        monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
        spool = bench.spool(opened.fileno(), segment_bytes=segment_bytes, max_bytes=1 << 30)
        refusals: list[str] = []
        monkeypatch.setattr(spool, "_log_full", refusals.append)
        await cut_off(spool, lambda: len(refusals) > 3)
        read_bytes = os.lseek(opened.fileno(), 0, os.SEEK_CUR)
        assert 1_000_000 < read_bytes < len(data), "the disk was never full"
        assert bench.kept() == data[:read_bytes]


async def test_a_partial_line_does_not_prevent_a_full_disk_from_being_freed(
    bench: Bench, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is read meanwhile, and data before the partial line can be deleted."""
    is_full = False
    statvfs_that_says(monkeypatch, is_full=lambda: is_full)
    monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
    spool = bench.spool(pipe.end, segment_bytes=1 << 20)
    got = b""
    async with spooling(spool) as rx:
        pipe.tx.write(LINES)
        chunk = await rx.receive()
        is_full = True
        pipe.tx.write(b"to")  # there is room, because space was reserved
        while not bench.holds(b"to"):
            await anyio.sleep(0.001)
        pipe.tx.write(b"rn\nmore\n")
        chunk.stream.move_checkpoint(chunk.end_offset, chunk.data[-64:])
        got += chunk.data
        settled = bench.names()[0]
        while settled in bench.names():
            await anyio.sleep(0.001)
        await anyio.sleep(0.02)
        assert select.select([pipe.end], [], [], 0)[0] == [pipe.end], "reading went on"
        assert spool.spooled_bytes == 2
        is_full = False
        pipe.tx.close()
        async for chunk in rx:
            got += chunk.data
    assert got == LINES + b"torn\nmore\n"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_data_is_never_considered_stored_after_a_failed_fsync(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, failing: int
):
    """The kernel reports a lost write once, and the next fsync of the same file succeeds."""
    true_sync, syncs = os.fdatasync, 0

    def fdatasync(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == failing:
            raise OSError(number, os.strerror(number))
        true_sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
    fed = Feed()
    spool = bench.spool(0, fsync="always")
    spool._input = fed
    outcomes: list[object] = []

    async def send() -> None:
        await fed.is_ready.wait()
        for start in range(0, len(LINES), 500):  # more than a segment holds
            try:
                await fed.append(LINES[start : start + 500])
                outcomes.append("kept")
            except SourceError:
                outcomes.append("refused")
                return

    tx, rx = anyio.create_memory_object_stream[Chunk](1000)
    with tx, rx, anyio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(send)
            try:
                await spool.run(tx)
            finally:
                fed.end(SourceError("it has ended"))
    assert caught.group_contains(StateError, match="could not be synced to its disk")
    assert outcomes == ["kept"] * (len(outcomes) - 1) + ["refused"]
    assert syncs == failing, "fsync was called again"


async def test_the_directory_is_synced_with_the_first_bytes_of_a_segment(
    bench: Bench, piped: Piped, monkeypatch: pytest.MonkeyPatch
):
    done: list[str] = []

    def note(name: str, true_sync: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            done.append(f"{name} {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
            true_sync(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", note("fsync", os.fsync))
    monkeypatch.setattr(os, "fdatasync", note("fdatasync", os.fdatasync))
    await bench.ship(bench.spool(piped(LINES[:300]), fsync="always"))
    first, second = "000000000100.ndjson", "000000000101.ndjson"
    assert [each for number, each in enumerate(done) if number == 0 or done[number - 1] != each] == [
        f"fdatasync {first}",
        "fsync spool",
        f"fdatasync {second}",
        "fsync spool",
        *([f"fdatasync {second}"] if done[-1] == f"fdatasync {second}" else []),
    ]


@pytest.mark.parametrize("is_hanging", [False, True])
async def test_a_stop_does_not_call_fsync_on_the_event_loop_nor_hang_on_it(
    bench: Bench, pipe: Pipe, monkeypatch: pytest.MonkeyPatch, is_hanging: bool
):
    threads: list[threading.Thread] = []
    answers = threading.Event()
    true_sync = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        threads.append(threading.current_thread())
        assert not is_hanging or answers.wait(20)
        true_sync(descriptor)

    pipe.tx.write(LINES)
    spool = bench.spool(pipe.end, fsync="interval", fsync_interval_seconds=1e9, segment_bytes=1 << 20)
    spool._segments._synced_at = anyio.current_time()  # so that only the final one is left
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(spool_module, "_CLOSE_LIMIT_S", 0.2)
    told: list[str] = []
    try:
        await cut_off(spool, lambda: spool.spooled_bytes == len(LINES))
    except* StateError as group:
        told += map(str, group.exceptions)
    finally:
        answers.set()
    assert ["does not respond" in words for words in told] == [True] * is_hanging
    assert len(threads) == 1
    assert threading.main_thread() not in threads
