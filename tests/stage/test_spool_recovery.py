"""The spool when things go wrong: crashes at odd moments, a full disk, inputs that are no pipe."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from shipper.model.errors import SourceError, StateError
from shipper.model.records import Chunk, Marker, Stream
from shipper.sources import spool as spool_module
from shipper.sources.feed import Feed
from shipper.sources.spool import Spool
from tests.e2e.surroundings import small_disk
from tests.spooling import spooling

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
        async with spooling(spool) as rx:
            async for chunk in rx:
                data += chunk.data
                chunk.stream.move_checkpoint(chunk.end_offset, chunk.data[-64:])
                await spool.after_save(())
        await spool.after_save(())
        return data

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def holds(self, data: bytes) -> bool:
        """Return whether a file holds `data` and nothing else; the spool renames and removes files meanwhile."""
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
    async with spooling(spool) as rx:
        for number in range(20):
            os.write(tx_end, b"%d\n" % number)
            chunk = await rx.receive()
            assert chunk.data == b"%d\n" % number
            chunk.stream.move_checkpoint(chunk.end_offset, chunk.data)
            await spool.after_save(())
        os.close(tx_end)
        assert [chunk async for chunk in rx] == []
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
    data = b""
    async with spooling(spool) as rx:
        while len(data) < len(LINES):
            data += (await rx.receive()).data
    os.close(rx_end)
    os.close(tx_end)
    assert data == LINES, "a torn line waits for its end"
    assert not spool.is_exhausted
    kept = b"".join((bench.directory / name).read_bytes() for name in bench.names())
    assert kept == LINES + b"torn"


# Disks that are full, or broken ------------------------------------------------------------------------------------


def statvfs_that_says(monkeypatch: pytest.MonkeyPatch, *, is_full: Callable[[], bool]) -> None:
    """Let a look at the disk say what it is told, as with a quota, or with others who write there."""
    size = 1 << 30

    def statvfs(_: object) -> os.statvfs_result:
        free = 0 if is_full() else size
        return os.statvfs_result((4096, 1, size, free, free, 1000, 1000, 1000, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)


async def cut_off(spool: Spool, until: Callable[[], bool]) -> None:
    """Run a spool whose chunks nobody settles, until it is time to stop it."""
    async with spooling(spool, room=1000):
        while not until():
            await anyio.sleep(0.005)


@pytest.mark.parametrize("segment_bytes", [1 << 20, 16 << 20])
async def test_nothing_is_read_that_has_no_place(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
):
    """The disk looks empty and takes no more: what was read up to a stop is in the spool to the last byte."""
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
        kept = b"".join((bench.directory / name).read_bytes() for name in bench.names())
        assert kept == data[:read_bytes]


async def test_a_torn_line_does_not_keep_a_full_disk_from_getting_room(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """Nothing is read meanwhile; and what stands before the torn line can go."""
    is_full = False
    rx_end, tx_end = os.pipe()
    statvfs_that_says(monkeypatch, is_full=lambda: is_full)
    monkeypatch.setattr(spool_module, "_FULL_DISK_PAUSE_S", 0.001)
    spool = bench.spool(rx_end, segment_bytes=1 << 20)
    got = b""
    async with spooling(spool) as rx:
        os.write(tx_end, LINES)
        chunk = await rx.receive()
        is_full = True
        os.write(tx_end, b"to")  # there is room for it, as that was kept
        while not bench.holds(b"to"):
            await anyio.sleep(0.001)
        os.write(tx_end, b"rn\nmore\n")
        chunk.stream.move_checkpoint(chunk.end_offset, chunk.data[-64:])
        got += chunk.data
        settled = bench.names()[0]
        while settled in bench.names():
            await anyio.sleep(0.001)
        await anyio.sleep(0.02)
        assert select.select([rx_end], [], [], 0)[0] == [rx_end], "it reads on"
        assert spool.spooled_bytes == 2
        is_full = False
        os.close(tx_end)
        async for chunk in rx:
            got += chunk.data
    os.close(rx_end)
    assert got == LINES + b"torn\nmore\n"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_what_could_not_be_forced_to_disk_is_never_taken_for_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, failing: int
):
    """The kernel reports a lost write once, and the next try of the same file succeeds."""
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
        await fed.is_awaited.wait()
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
    assert caught.group_contains(StateError, match="could not be synchronised to its disk")
    assert outcomes[-1:] != ["kept"]
    assert syncs == failing, "it was tried again"


async def test_the_name_of_a_segment_is_forced_to_disk_with_its_first_bytes(
    bench: Bench, piped: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch
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
async def test_a_stop_forces_nothing_to_disk_on_the_event_loop_and_does_not_hang_on_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_hanging: bool
):
    threads: list[threading.Thread] = []
    answers = threading.Event()
    true_sync = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        threads.append(threading.current_thread())
        assert not is_hanging or answers.wait(20)
        true_sync(descriptor)

    rx_end, tx_end = os.pipe()
    os.write(tx_end, LINES)
    spool = bench.spool(rx_end, fsync="interval", fsync_interval_s=1e9, segment_bytes=1 << 20)
    spool._segments._synced_at = anyio.current_time()  # so that the only one left is that of the end
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(spool_module, "_LEAVE_LIMIT_S", 0.2)
    told: list[str] = []
    try:
        await cut_off(spool, lambda: spool.spooled_bytes == len(LINES))
    except* StateError as group:
        told += map(str, group.exceptions)
    finally:
        answers.set()
        os.close(tx_end)
        os.close(rx_end)
    assert ["does not respond" in words for words in told] == [True] * is_hanging
    assert len(threads) == 1
    assert threading.main_thread() not in threads
