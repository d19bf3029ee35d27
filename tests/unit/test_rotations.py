"""Rotated, replaced, compressed and similar files: each line is read once, even across restarts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.e2e.files import COMPRESSIONS, compress
from tests.unit.follower_bench import Bench, settle

GLOB, NAME = "app.log*", "app.log"
LINES = [b'{"n":%06d,"name":"%b"}\n' % (number, b"x" * 300) for number in range(10_000)]
SHORT_LINE = b"#" * 39 + b"\n"

# How a case goes on after the follower has read what there was: while it runs, or before the next one starts.
LOOK, RESTART = "look", "restart"
Steps = Iterator[str]
Case = tuple[Any, ...]  # a function of the files, and its further arguments


class Files:
    """
    The files of a case, and the followers that read them one after the other.

    Attributes:
        include: The patterns.
        wanted: Lines that must have arrived, in any order.
        arrived: How often each line has.
    """

    def __init__(self, bench: Bench, rotate_wait_s: float) -> None:
        self.bench = bench
        self.rotate_wait_s = rotate_wait_s
        self.folder = bench.folder
        self.file = bench.folder / NAME
        self.include = [GLOB]
        self.wanted: set[bytes] = set()
        self.arrived: Counter[bytes] = Counter()

    def append(self, start: int, end: int, to: str | Path = NAME) -> Path:
        self.wanted.update(LINES[start:end])
        return self.write(b"".join(LINES[start:end]), to)

    def write(self, data: bytes, to: str | Path = NAME, mode: str = "ab") -> Path:
        return self.bench.write(str(to), data, mode=mode)

    def copytruncate(self, copy: str, start: int, end: int) -> Path:
        """Copy the file, truncate it in place, and write these lines."""
        path = Path(shutil.copy(self.file, self.folder / copy))
        self.write(b"", mode="wb")
        self.append(start, end)
        return path

    def live(self, case: Case) -> None:
        make, *arguments = case
        steps, what = make(self, *arguments), RESTART
        while what:
            if what == RESTART and self.bench.is_started:
                self.bench.follower.save(is_last=True)
                self.bench.stop()
            following = next(steps, "")
            if what == RESTART:
                self.bench.start(*self.include, rotate_wait_s=self.rotate_wait_s)
            self.look()
            what = following
        self.bench.follower.save(is_last=True)

    def look(self) -> None:
        """Look and read until nothing more is read and files that left are closed."""
        for _ in range(12):
            self.bench.now += 1.0
            chunks = self.bench.look(self.bench.now)
            while self.bench.follower.files.has_ready:
                chunks += self.bench.follower.files.read(self.bench.now)
            if chunks:
                settle(self.bench.store, chunks)
            for chunk in chunks:
                self.arrived.update(chunk.data.splitlines(keepends=True))

    def not_once(self) -> dict[bytes, int]:
        """Return how often the lines arrived that did not arrive once."""
        assert self.wanted, "the history has no lines"
        assert {line for line in self.arrived if line.strip(b"\0 \r\n")} <= self.wanted, "a line was invented"
        return {line[:14]: self.arrived[line] for line in sorted(self.wanted) if self.arrived[line] != 1}

    def checkpoints(self) -> list[int]:
        return [stream.checkpoint for stream in self.bench.store.streams.load("file")]


@pytest.fixture
def live(bench: Bench) -> Callable[..., Files]:
    def live(case: Case, rotate_wait_s: float = 600) -> Files:
        files = Files(bench, rotate_wait_s)
        files.live(case)
        return files

    return live


def name_of(case: Case) -> str:
    return " ".join([case[0].__name__, *map(str, case[1:])])


# Cases in which nothing is closed early: no wait is over before the end -------------------------------------------


def rotated_twice(files: Files, include: str) -> Steps:
    """Which one is which, is read from sixty percent on."""
    files.include = [include]
    files.append(0, 60)
    yield RESTART
    files.append(60, 100)
    files.file.rename(files.folder / "app.log.2")
    if include == GLOB:  # a file that had another name before anybody saw it cannot be found by its name
        files.append(100, 200, "app.log.1")
    files.append(200, 250)


def put_in_the_place_of_another(files: Files) -> Steps:
    """The replaced file is read to its end."""
    files.include = [NAME]
    files.append(0, 10)
    yield LOOK
    other = files.append(20, 30, "prepared")
    with files.file.open("ab") as writer:
        other.rename(files.file)
        writer.writelines(LINES[10:20])
    files.wanted.update(LINES[10:20])


def a_stranger_outside_the_glob_with_a_known_inode(files: Files) -> Steps:
    """It is not read: another file may have got the inode."""
    files.include = [NAME]
    files.append(0, 5)
    yield RESTART
    files.write(b"".join(LINES[100:200]), mode="wb").rename(files.folder / "private.txt")
    files.append(5, 7)
    yield LOOK
    assert files.arrived.keys().isdisjoint(LINES[100:200])


def torn_lines(files: Files) -> Steps:
    """An incomplete line waits for its newline, even across a restart; other files are read meanwhile."""
    files.append(0, 1)
    files.write(LINES[1][:100])
    yield LOOK
    files.write(LINES[1][100:200])
    files.append(2, 3, "app.log.other")
    yield LOOK
    assert files.arrived[LINES[2]]
    yield RESTART
    files.append(3, 4, "app.log.other")
    yield LOOK
    files.write(LINES[1][200:])
    files.wanted.add(LINES[1])


def rotated_out_of_the_glob_twice(files: Files) -> Steps:
    """Each was partly read; the second start must distinguish them."""
    files.include = [NAME]
    files.append(0, 30)
    yield LOOK
    files.file.rename(files.folder / "app.log.1")
    files.append(30, 60)
    yield RESTART
    files.append(60, 70, "app.log.1")
    files.append(70, 80)
    (files.folder / "app.log.1").rename(files.folder / "2026-01-01.old")
    files.file.rename(files.folder / "2026-01-02.old")
    files.append(80, 90)


def late_lines(files: Files, include: str) -> Steps:
    """The file was seen to be rotated, and its writer still has it open, even across a restart."""
    files.include = [include]
    files.append(0, 10)
    yield LOOK
    old = files.file.rename(files.folder / "app.log.1")
    files.append(10, 20)
    yield LOOK
    files.append(20, 30, old)
    yield LOOK
    open_paths = [each.reader.path for each in files.bench.follower.files]
    assert open_paths.count(old) == (include == GLOB), "it is open once, by the name that is matched"
    yield RESTART
    files.append(30, 40, old)
    files.append(40, 50)


def copied_and_truncated(files: Files, when: str, copy: str, new_lines: int) -> Steps:
    """Data only in the copy is read there, inside or outside the glob; the original shrank, or outgrew its offset."""
    files.include = [NAME, "app.log.1"]
    files.append(0, 60)
    yield when
    files.append(60, 100)
    files.copytruncate(f"app.log{copy}", 100, 100 + new_lines)
    yield LOOK
    files.append(260, 270)  # the original goes on
    yield RESTART
    files.append(270, 280)


def truncated_to_the_same_size(files: Files, when: str) -> Steps:
    files.append(0, 10)
    yield when
    files.copytruncate("copy", 10, 20)


def copied_and_truncated_again_and_again(files: Files) -> Steps:
    """No line is written between the copy and the truncation, and some are unread."""
    files.append(0, 30)
    end = 30
    for number in range(6):
        yield LOOK
        files.append(end, end + 20)
        files.copytruncate(f"app.log.{number}", end + 20, end + 25 + 5 * number)
        end += 25 + 5 * number


def copied_some_time_before_it_is_truncated(files: Files) -> Steps:
    """In between, the copy is in the glob and the original unchanged: the copy waits."""
    files.append(0, 60)
    yield LOOK
    shutil.copy(files.file, files.folder / "app.log.1")
    yield LOOK
    files.write(b"", mode="wb")
    files.append(62, 90)


def copied_and_truncated_twice(files: Files, suffix: str) -> Steps:
    """The older copy is plain or compressed; the rests of both are read."""
    files.append(0, 60)
    yield RESTART
    files.append(60, 100)
    second = files.copytruncate("app.log.1", 100, 180).rename(files.folder / "app.log.2")
    if suffix:
        compress(second, suffix)
    files.copytruncate("app.log.1", 180, 190)


def given_the_inode_of_a_deleted_one(files: Files, new_lines: int) -> Steps:
    """It is read from its start."""
    old = files.append(0, 10, "app.log.a")
    yield RESTART
    new = old.rename(files.folder / "app.log.b")
    files.write(b"", new, mode="wb")
    files.append(10, 10 + new_lines, new)


def given_each_other_s_inodes(files: Files, suffix: str) -> Steps:
    """A rotation that copies and compresses frees inodes, and the next file gets one of them at once."""
    paths = [files.append(number * 10, number * 10 + 5, f"app.log.{number}") for number in range(3)]
    yield RESTART
    inodes = [path.stat().st_ino for path in paths]
    for number, path in enumerate(paths):  # each holds now what its neighbour did, and more
        start = (number + 1) % 3 * 10
        data = b"".join(LINES[start : start + 10])
        files.write(COMPRESSIONS[suffix](data) if suffix else data, path, mode="wb")
        files.wanted.update(LINES[start : start + 10])
    assert [path.stat().st_ino for path in paths] == inodes
    files.append(30, 35)


def growing_and_moving(files: Files, *moves: str) -> Steps:
    """A file smaller than its fingerprint: a line of 40 bytes, then a record at a time; between it may be moved."""
    file = files.write(SHORT_LINE)
    files.wanted.add(SHORT_LINE)
    sizes = [len(SHORT_LINE)]
    for number, move in enumerate(("", *moves)):
        if move:
            yield RESTART
            old, file = file, file if move == "stay" else files.folder / f"app.log.{number}"
            if move == "rename":
                old.rename(file)
            elif move == "copy":
                shutil.copy(old, file)
                old.unlink()
        files.append(number * 2, number * 2 + 1, file)
        yield LOOK
        files.append(number * 2 + 1, number * 2 + 2, file)
        sizes.append(file.stat().st_size)
    assert sizes[1] < 1024 < sizes[-1], "the file must outgrow the head that identifies it"
    yield LOOK
    assert len(files.checkpoints()) == 1, "it stays the same stream"


def blank_in_its_head_and_at_its_end(files: Files, blank: bytes) -> Steps:
    """So is a new file, which is not taken for the known one; between the blanks are records."""
    blanks = (blank * 4000)[:4000] + b"\n"
    files.write(blanks)
    files.append(0, 20)
    files.write(blanks)
    yield RESTART
    size = files.file.stat().st_size
    files.file.rename(files.folder / "gone")  # so that its inode is not given out again
    files.write(blanks[2000:], "app.log.new")
    new = files.append(20, 30, "app.log.new")
    files.write((blank * size)[: size - new.stat().st_size + 2000] + b"\n", "app.log.new")
    assert new.stat().st_size > size


def heads_that_are_equal(files: Files) -> Steps:
    """They are separate files."""
    for number in range(5):
        files.write(b"\n" * 2000, f"app.log.{number}")
        files.append(number * 10, number * 10 + 10, f"app.log.{number}")
    yield LOOK


def moved_by_copying(files: Files, include: str, lines: int) -> Steps:
    """Restored from a backup, or moved to a new disk with the same names: another inode, and it is read on."""
    files.include = [include]
    files.append(0, lines)
    yield RESTART
    files.append(lines, 100)
    copy = Path(shutil.copy(files.file, files.folder / "copy"))
    files.file.unlink()
    copy.rename(files.file)
    yield RESTART
    files.append(100, 120)


def moved_to_another_disk(files: Files) -> Steps:
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == files.folder.stat().st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shipper-test-") as other:
        files.include = [GLOB, f"{other}/{GLOB}"]
        for number in range(3):
            files.append(number * 100, number * 100 + 60, f"app.log.{number}")
        yield RESTART
        for number in range(3):
            path = files.append(number * 100 + 60, number * 100 + 100, f"app.log.{number}")
            shutil.move(path, Path(other, path.name))
        yield RESTART


def a_symlink_turned_to_another_file(files: Files) -> Steps:
    """The rest of the old file is read."""
    files.include = [NAME]
    _turn(files.file, files.append(0, 20, "1.log"))
    yield LOOK
    files.append(20, 40, "1.log")
    _turn(files.file, files.append(40, 60, "2.log"))
    yield LOOK
    files.append(60, 70, "1.log")  # late
    files.append(70, 80, "2.log")
    yield RESTART
    files.append(80, 90, "2.log")
    _turn(files.file, files.append(90, 100, "3.log"))


def a_symlink_turned_to_another_folder(files: Files) -> Steps:
    """As the kubelet does it: the link is in one folder, and the files that it rotates in another."""
    files.include = [NAME]
    pods = files.folder / "pods"
    pods.mkdir()
    _turn(files.file, files.append(0, 20, pods / "0.log"))
    yield RESTART
    files.append(20, 40, pods / "0.log")
    (pods / "0.log").rename(pods / "0.log.20260101")
    files.append(40, 60, pods / "0.log")
    yield RESTART
    files.append(60, 70, pods / "0.log")
    _turn(files.file, files.append(70, 80, pods / "1.log"))


def _turn(link: Path, target: Path) -> None:
    new = link.with_name("link.new")
    new.symlink_to(target)
    new.rename(link)


def rotated_and_compressed(files: Files, include: str, suffix: str) -> Steps:
    """The archive is resumed at the checkpoint, inside or outside the glob."""
    files.include = [include]
    files.append(0, 60)
    yield RESTART
    files.append(60, 100)
    compress(files.file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120)
    yield RESTART
    files.append(120, 130)


def compressed_when_read_to_its_end(files: Files, suffix: str) -> Steps:
    """The file is not read again: not in the archive, not after a rename, and not after a restart."""
    files.append(0, 100)
    yield RESTART
    compress(files.file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120)
    yield LOOK
    (files.folder / f"app.log.1.{suffix}").rename(files.folder / f"app.log.2.{suffix}")
    yield LOOK
    yield RESTART
    files.append(122, 130)


def compressed_slowly(files: Files, suffix: str) -> Steps:
    """Unfinished archives are waited for: of a partly read file, and of a new file."""
    plain = files.append(0, 60)
    yield RESTART
    files.append(60, 150)
    files.wanted.update(LINES[150:200])
    rests = {}
    contents = {"1": plain.read_bytes(), "new": b"".join(LINES[150:200])}
    for name, data in contents.items():
        packed = COMPRESSIONS[suffix](data)
        path = files.write(packed[: len(packed) // 2], f"app.log.{name}.{suffix}")
        rests[path] = packed[len(packed) // 2 :]
    plain.unlink()
    with capture_logs() as logs:
        yield LOOK
    assert {entry["event"] for entry in logs if entry["log_level"] in {"warning", "error"}} <= {"source_replaced"}
    for path, rest in rests.items():
        files.write(rest, path)


def compressed_when_half_of_it_was_read(files: Files) -> Steps:
    """The file is so long that its rest starts far beyond what is decompressed in one turn."""
    files.include = [NAME]
    files.append(0, 7000)
    yield RESTART
    assert files.file.stat().st_size > 2 << 20
    files.append(7000, 10_000)
    compress(files.file.rename(files.folder / "old"), "gz")
    yield LOOK
    assert files.checkpoints() == [sum(map(len, LINES))], "the checkpoint counts decompressed bytes"


CASES: list[Case] = [
    *product([rotated_twice, late_lines], [GLOB, NAME]),
    *product([copied_and_truncated], [LOOK, RESTART], [".1", "-copy"], [0, 20, 150]),
    *product([copied_and_truncated_twice], ["", *COMPRESSIONS]),
    *product([given_the_inode_of_a_deleted_one], [1, 40]),
    *product([given_each_other_s_inodes], ["", "gz"]),
    *product([truncated_to_the_same_size], [LOOK, RESTART]),
    *product([compressed_slowly, compressed_when_read_to_its_end], COMPRESSIONS),
    *product([rotated_and_compressed], [GLOB, NAME], COMPRESSIONS),
    *product([blank_in_its_head_and_at_its_end], [b"\n", b"\0", b" \n", b"\r\n"]),
    *[(growing_and_moving, *moves) for moves in (("rename", "copy"), ("copy", "rename"), ("stay", "stay"))],
    *[(moved_by_copying, GLOB, 1), (moved_by_copying, NAME, 60), (moved_to_another_disk,)],
    *[(rotated_out_of_the_glob_twice,), (put_in_the_place_of_another,), (torn_lines,)],
    *[(a_stranger_outside_the_glob_with_a_known_inode,), (heads_that_are_equal,)],
    *[(copied_and_truncated_again_and_again,), (copied_some_time_before_it_is_truncated,)],
    *[(a_symlink_turned_to_another_file,), (a_symlink_turned_to_another_folder,)],
    (compressed_when_half_of_it_was_read,),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_line_is_read_once_whatever_happens_to_its_file(live: Callable[..., Files], case: Case):
    assert live(case).not_once() == {}


# Files that are closed soon ---------------------------------------------------------------------------------------


def hard_links(files: Files) -> Steps:
    files.append(0, 20)
    os.link(files.file, files.folder / "app.log.a")
    yield LOOK
    os.link(files.file, files.folder / "app.log.b")
    files.append(20, 40, "app.log.b")
    yield LOOK
    files.file.unlink()
    files.append(40, 60, "app.log.a")
    yield RESTART
    (files.folder / "app.log.a").unlink()
    files.append(60, 80, "app.log.b")
    yield LOOK
    assert len(files.checkpoints()) == 1, "they are one stream"


def given_the_inode_of_one_that_was_closed(files: Files) -> Steps:
    """It is read from its start."""
    files.append(0, 10)
    yield LOOK
    away = files.file.rename(files.bench.state / "away")
    yield LOOK
    assert not files.bench.follower.files
    new = away.rename(files.folder / "app.log.new")
    files.write(b"", new, mode="wb")
    files.append(10, 40, new)


def replaced_by_a_folder_and_back(files: Files) -> Steps:
    files.append(0, 10)
    yield LOOK
    files.append(10, 20)
    files.file.unlink()
    files.file.mkdir()
    yield LOOK
    assert not files.bench.follower.files
    files.file.rmdir()
    files.append(20, 30)


def rotated_and_compressed_twice(files: Files, suffix: str) -> Steps:
    """Unread lines were in it when it was compressed; and long after it had been read and closed."""
    files.append(0, 60)
    yield LOOK
    files.append(60, 100)
    compress(files.file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120)
    yield LOOK
    away = files.file.rename(files.folder / "outside-the-glob")
    files.append(120, 130)
    yield LOOK
    assert away not in [each.reader.path for each in files.bench.follower.files]
    compress(away, suffix, files.folder / f"app.log.2.{suffix}")
    yield LOOK


SOON_CLOSED: list[Case] = [
    *[(hard_links,), (given_the_inode_of_one_that_was_closed,), (replaced_by_a_folder_and_back,)],
    *product([rotated_and_compressed_twice], COMPRESSIONS),
]


@pytest.mark.parametrize("case", SOON_CLOSED, ids=name_of)
def test_each_line_of_a_soon_closed_file_is_read_once_whatever_happens_to_the_file(
    live: Callable[..., Files], case: Case
):
    assert live(case, rotate_wait_s=0.1).not_once() == {}


# Alike ------------------------------------------------------------------------------------------------------------


def equal_heads_and_equal_ends(files: Files, when: str) -> Steps:
    """The same records at the head of each, more than a fingerprint; the rest is its own. One of them goes."""
    for number in range(1, 5):
        files.append(0, 5, f"app.log.{number}")
        files.append(number * 10, number * 10 + 10, f"app.log.{number}")
    yield when
    (files.folder / "app.log.1").unlink()
    for number in range(5, 8):
        files.append(0, 5, f"new.{number}")
        path = files.append(number * 20, number * 20 + 20, f"new.{number}")  # longer than the one that has gone
        path.rename(files.folder / f"app.log.{number}")


def a_new_one_that_begins_like_the_rotated_one(files: Files, when: str) -> Steps:
    """All files begin with the same record, and only that record of the old file was read."""
    files.include = [NAME]
    files.append(0, 1)
    yield when
    files.append(1, 30)
    files.file.rename(files.folder / "app.log.1")
    files.append(0, 1)
    files.append(30, 60)


def copied_and_left(files: Files) -> Steps:
    """Somebody took the file as the beginning of another one: what it has besides must arrive."""
    files.append(0, 60)
    yield LOOK
    shutil.copy(files.file, files.folder / "app.log.more")
    files.append(60, 80, "app.log.more")
    files.append(80, 100)
    yield LOOK


def truncated_beginning_as_it_did(files: Files, when: str) -> Steps:
    """The first lines are more than a fingerprint; only the bytes before the old offset, which it outgrew, tell."""
    files.append(0, 20)
    yield when
    shutil.copy(files.file, files.folder / "copy")
    files.write(b"", mode="wb")
    files.append(0, 5)
    files.append(20, 60)


ALIKE: list[Case] = [
    (copied_and_left,),
    *product([truncated_beginning_as_it_did, equal_heads_and_equal_ends], [LOOK, RESTART]),
    *product([a_new_one_that_begins_like_the_rotated_one], [LOOK, RESTART]),
]


@pytest.mark.parametrize("case", ALIKE, ids=name_of)
def test_similar_files_lose_none_of_their_own_lines(live: Callable[..., Files], case: Case):
    """Their common lines may be read again."""
    assert 0 not in live(case, rotate_wait_s=0.1).not_once().values()
