"""A slow input does not starve others: the work per file and turn is bounded for any content."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from shipper.model.records import Chunk
from shipper.sources.content import Archive, Content, open_content
from shipper.sources.identity import StreamIndex
from shipper.sources.once import FilesOnce
from shipper.sources.reader import READ_BYTES
from shipper.system.work import WorkItem, at_work
from tests.cases import each
from tests.unit.follower_bench import ROTATE_WAIT_S, Bench, settle

TURN_BYTES = 2 * READ_BYTES  # less than in earnest, so that what is huge need not be so
TURN_STEPS = 512
MANY = 12  # turns that the work on the huge file takes at least
HUGE = MANY * TURN_BYTES
GOOD = b"".join(b"line %06d\n" % number for number in range(10))
OTHER = GOOD.replace(b"line", b"word")


def endless_line(path: Path) -> None:
    """A line that has no end, which is nothing but a hole on the disk."""
    path.write_bytes(b"x")
    with path.open("r+b") as out:
        out.truncate(HUGE)
        out.seek(HUGE)
        out.write(b"x")


def nuls(path: Path) -> None:
    """NULs that are written, and reach the end: room that a writer keeps for later."""
    path.write_bytes(OTHER)
    with path.open("ab") as out:
        for _ in range(MANY):
            out.write(b"\0" * TURN_BYTES)


def endless_line_in_an_archive(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as out:
        for _ in range(MANY):
            out.write(b"x" * TURN_BYTES)


def empty_members(path: Path) -> None:
    """An archive of very many members in which there is nothing, before the first that holds something."""
    path.write_bytes(gzip.compress(b"") * (MANY * TURN_STEPS) + gzip.compress(OTHER))


def empty_members_between(path: Path) -> None:
    path.write_bytes(gzip.compress(OTHER) + gzip.compress(b"") * (MANY * TURN_STEPS) + gzip.compress(b"the last\n"))


ADVERSARIES = [endless_line, nuls, endless_line_in_an_archive, empty_members, empty_members_between]
RECORDS = {nuls: OTHER, empty_members: OTHER, empty_members_between: OTHER + b"the last\n"}


class Work:
    """Counts what is read of contents, and what is decompressed, in MiB and in members."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        plain, step = Content.pread, Archive._step

        def pread(content: Content, length: int, offset: int) -> bytes:
            data = plain(content, length, offset)
            self.done += len(data)
            return data

        def stepped(content: Archive, limit: int) -> bytes | None:
            piece = step(content, limit)
            self.done += max(TURN_BYTES // TURN_STEPS, len(piece or b""))
            return piece

        for module in ("reader", "identity"):
            monkeypatch.setattr(f"shipper.sources.{module}.TURN_BYTES", TURN_BYTES)
        for module in ("reader", "once", "open_files"):
            monkeypatch.setattr(f"shipper.sources.{module}.TURN_STEPS", TURN_STEPS)
        monkeypatch.setattr(Content, "pread", pread)
        monkeypatch.setattr(Archive, "_step", stepped)

    def take(self) -> int:
        done, self.done = self.done, 0
        return done


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def is_bounded(done: int) -> bool:
    # Of an archive, four times as much may be decompressed as is searched; it may be identified and read in one turn.
    return done <= 6 * TURN_BYTES


@each("make", ADVERSARIES)
def test_a_small_file_is_read_in_the_first_turn_beside_a_huge_one_that_takes_many(
    bench: Bench, work: Work, make: Callable[[Path], None]
):
    huge = bench.folder / "a.log"
    make(huge)
    (bench.folder / "b.log").write_bytes(GOOD)
    follower = bench.start()
    chunks: list[Chunk] = []
    turns = 0
    while turns == 0 or follower.files.has_ready or any(file.new_since is not None for file in follower.files):
        turns += 1
        assert turns < 1000
        assert is_bounded(work.take()), f"turn {turns - 1}"
        chunks += bench.look(float(turns))
        if turns in {1, 3, 5}:
            of_small = [chunk.data for chunk in chunks if chunk.stream.path.endswith("b.log")]
            assert of_small == [GOOD] * ((turns + 1) // 2)
            with (bench.folder / "b.log").open("ab") as out:
                out.write(GOOD)
            follower.files.touch([str(bench.folder / "b.log")])
    assert turns >= MANY // 4, "it took but a turn or two, and proves nothing"
    of_huge = b"".join(chunk.data for chunk in chunks if chunk.stream.path.endswith("a.log"))
    assert of_huge == RECORDS.get(make, b"")


@each("make", ADVERSARIES)
def test_a_file_read_to_its_end_is_read_in_turns_so_that_a_stop_can_interrupt(
    tmp_path: Path, bench: Bench, work: Work, make: Callable[[Path], None]
):
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    make(paths[0])
    paths[1].write_bytes(GOOD)
    index = StreamIndex([], count(1).__next__, max_record_bytes=1000)
    source = FilesOnce(paths, index, bench.store.streams, wall_time=lambda: 1.0)
    bench.start()
    work.take()
    chunks: list[Chunk] = []
    turns = 0
    while (some := source._read_next()) is not None:
        turns += 1
        chunks += some
        assert is_bounded(work.take()), f"turn {turns}"
    assert turns >= MANY // 4
    assert chunks[-1].data == GOOD
    assert b"".join(chunk.data for chunk in chunks[:-1]) == RECORDS.get(make, b"")
    assert [chunk.is_oversized for chunk in chunks[:-1]].count(True) == (make not in RECORDS)


def test_long_work_that_advances_is_not_stuck(tmp_path: Path):
    """Up to a checkpoint deep within, an archive is decompressed at one go."""
    path = tmp_path / "a.log"
    endless_line_in_an_archive(path)
    with closing(open_content(os.open(path, os.O_RDONLY), path)) as content, at_work(WorkItem("read")) as piece:
        assert content.pread(1, HUGE - 1) == b"x"
    assert piece.steps >= HUGE // READ_BYTES


def test_a_huge_copy_is_compared_in_turns_and_a_small_file_is_read_meanwhile(bench: Bench, work: Work):
    line = b"y" * (READ_BYTES - 1) + b"\n"
    huge = line * (4 * TURN_BYTES // READ_BYTES)
    bench.write("app.log", huge)
    bench.start("app.log", "b.log")
    while bench.follower.files.has_ready:
        settle(bench.store, bench.follower.files.read(1.0))
    copy = bench.write("app.log.1", huge)
    bench.look(2.0)
    work.take()
    looks = 0
    at = 3.0 + 20 * ROTATE_WAIT_S
    while any(file.new_since is not None for file in bench.follower.files):
        looks += 1
        at += 1
        bench.write("b.log", b"%d\n" % looks)
        data = bench.read(at)
        assert is_bounded(work.take())
        assert looks == 1 or data, "the small file is read at each look, once it is known"
        assert looks < 50
    assert looks >= 4
    assert os.path.exists(copy)


def test_a_small_file_does_not_wait_for_a_mib_of_each_large_one(bench: Bench):
    """Each read of a few MiB may take seconds, beside a slow service."""
    for number in range(40):
        bench.write(f"{number:02}.log", b"line %02d\n" % number * (READ_BYTES // 8))
    bench.write("small.log", GOOD)
    bench.start()
    bench.follower.scan(bench.follower.find(), bench.now)
    reads, found = 0, b""
    while not found:
        reads += 1
        chunks = bench.follower.files.read(bench.now)
        found = b"".join(chunk.data for chunk in chunks if chunk.stream.path.endswith("small.log"))
    assert (found, reads <= 2) == (GOOD, True), reads
