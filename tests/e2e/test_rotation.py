"""Files that are renamed, truncated, compressed, replaced and deleted: nothing is lost, nothing is read twice."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Self

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, State, changed, event_ids, sandbox
from tests.e2e.fake_service import HANG, FakeService
from tests.e2e.files import (
    COMPRESSIONS,
    Tail,
    compress,
    copytruncate,
    open_files,
    take_inode,
    told,
    warnings_of,
    where_permissions_hold,
)

GLOB, NAME = "app.ndjson*", "app.ndjson"


# Many cases in one life --------------------------------------------------------------------------------------------

# What a case goes on after: the process sees only before and after, or it runs, or the next one does.
HELD, RUNNING, RESTART = "held", "running", "restart"
Steps = Iterator[str]


class Files:
    """
    The files of one case, in a folder of its own, beside those of other cases.

    Attributes:
        include: The globs in the folder; a case may have others.
        wanted: Which of its lines must have arrived by now.
        open_files: What the process held open, as far as the case took note.
        warned_of: What it complained of, likewise.
    """

    LINES = 300

    def __init__(self, tail: Tail, folder: Path, first: int) -> None:
        folder.mkdir()
        self.tail = tail
        self.folder = folder
        self.file = folder / NAME
        self.lines = tail.sample.lines[first:]
        self.include = [GLOB]
        self.wanted: set[int] = set()
        self.open_files: list[str] = []
        self.warned_of: set[str] = set()
        self._ids = tail.sample.ids[first:]

    @property
    def ids(self) -> set[str]:
        return {self._ids[number] for number in self.wanted}

    def append(self, start: int, end: int, to: str | Path = NAME) -> Path:
        path = self.folder / to
        with path.open("ab") as out:
            out.writelines(self.lines[start:end])
        self.wanted.update(range(start, end))
        return path

    def copytruncate(self, file: Path, copy: Path, start: int, end: int) -> None:
        copytruncate(file, copy, self.lines[start:end])
        self.wanted.update(range(start, end))


class Life:
    """
    One shipper, which is restarted, and all cases go on together: each fails or succeeds by its own files.

    Attributes:
        cases: Their files, by the name of the case.
        state: What it left behind.
    """

    def __init__(self, steps: Mapping[str, Callable[[Files], Steps]]) -> None:
        self.cases: dict[str, Files] = {}
        self.state = State()
        self._steps = steps
        self._given_up: set[str] = set()
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._times: dict[str, int] = {}

    def live(self, folder: Path, sample: Sample, **settings: Any) -> Self:
        with sandbox() as service, Shipper(folder, service.target) as shipper, ExitStack() as stack:
            tail = Tail(shipper, service, sample)
            going = {}
            for number, (name, case) in enumerate(self._steps.items()):
                self.cases[name] = Files(tail, tail.folder / f"case-{number}", number * Files.LINES)
                going[name] = stack.enter_context(closing(case(self.cases[name])))
            after = dict.fromkeys(going, RESTART)
            while RESTART in after.values():
                self._go_on(RESTART, going, after)
                include = [str(each.folder / glob) for each in self.cases.values() for glob in each.include]
                tail.start(include, **settings)
                self._wait(tail, service)
                while {HELD, RUNNING} & set(after.values()):
                    with tail.held():
                        self._go_on(HELD, going, after)
                    self._go_on(RUNNING, going, after)
                    self._wait(tail, service)
                assert tail.running.stop().returncode == 0
            self.state, self._times = shipper.read_state(), service.times_received()
        return self

    def _go_on(self, when: str, going: Mapping[str, Steps], after: dict[str, str]) -> None:
        for name in [name for name, what in after.items() if what == when]:
            try:
                after[name] = next(going[name], "")
            except pytest.skip.Exception as error:
                after[name], self._skipped[name] = "", str(error)
            except AssertionError as error:
                after[name], self._failed[name] = "", str(error)

    def _wait(self, tail: Tail, service: Service) -> None:
        ids = set().union(*(files.ids for files in self.cases.values())) - self._given_up
        with suppress(AssertionError):  # the case that lacks something is told by its own test
            tail.running.wait_until(lambda: service.stored >= len(ids) and service.holds(ids), "all events")
        self._given_up |= ids - set(service.event_ids())

    def times_received(self, name: str) -> dict[str, int]:
        """How often each line of a case came."""
        if name in self._skipped:
            pytest.skip(self._skipped[name])
        assert name not in self._failed, self._failed[name]
        ids = self.cases[name].ids
        assert ids, "the case was not exercised"
        return {key: self._times.get(key, 0) for key in ids}

    def checkpoints(self, name: str) -> list[int]:
        """Those of the files of a case."""
        folder = self.cases[name].folder
        return [offset for *_, path, offset in self.state.checkpoints if folder in Path(path).parents]

    @property
    def events(self) -> int:
        """How many different ones arrived."""
        ids: set[str] = set().union(*(files.ids for files in self.cases.values()))
        assert self._times.keys() <= ids, "invented"
        return len(self._times)


def rotated_twice(files: Files, include: str) -> Steps:
    """Which one is, is read from sixty percent on."""
    files.include = [include]
    files.append(0, 60)
    yield RESTART
    files.append(60, 100)
    files.file.rename(files.folder / "app.ndjson.2")
    if include == GLOB:  # a file that had another name before anybody saw it cannot be found by its name
        files.append(100, 200, "app.ndjson.1")
    files.append(200, 250)


def put_in_the_place_of_another(files: Files) -> Steps:
    """The old one is read to its end."""
    files.include = [NAME]
    files.append(0, 10)
    yield RUNNING
    other = files.append(20, 30, "prepared")
    with files.file.open("ab") as writer:
        other.rename(files.file)
        writer.writelines(files.lines[10:20])
    files.wanted.update(range(10, 20))


def a_stranger_outside_the_glob_with_a_known_inode(files: Files) -> Steps:
    """It is not read, as if another file had been given the inode."""
    files.include = [NAME]
    files.append(0, 5)
    yield RESTART
    files.file.write_bytes(b"".join(files.lines[100:200]))
    files.file.rename(files.folder / "private.txt")
    for number in (5, 6):  # a look that found the second of them began after the first had been found
        files.append(number, number + 1)
        yield RUNNING


def torn_lines(files: Files) -> Steps:
    """A line waits for its newline, also over a restart; what is in other files arrives meanwhile."""
    torn = files.append(0, 1)

    def tear(start: int, end: int) -> None:
        with torn.open("ab") as out:
            out.write(files.lines[1][start:end])

    tear(0, 100)
    yield RUNNING
    tear(100, 200)
    files.append(2, 3, "app.ndjson.other")
    yield RUNNING
    yield RESTART
    files.append(3, 4, "app.ndjson.other")
    yield RUNNING
    tear(200, len(files.lines[1]))
    files.wanted.add(1)


def rotated_out_of_the_glob_twice(files: Files) -> Steps:
    """Each of them was read half; the second start has to tell them apart."""
    files.include = [NAME]
    files.append(0, 30)
    yield HELD
    files.file.rename(files.folder / "app.ndjson.1")
    files.append(30, 60)
    yield RESTART
    files.append(60, 70, "app.ndjson.1")
    files.append(70, 80)
    (files.folder / "app.ndjson.1").rename(files.folder / "2026-01-01.old")
    files.file.rename(files.folder / "2026-01-02.old")
    files.append(80, 90)


def late_lines(files: Files, include: str) -> Steps:
    """It was seen to be rotated, and its writer has it open still, also over a restart."""
    files.include = [include]
    files.append(0, 10)
    yield HELD
    old = files.file.rename(files.folder / "app.ndjson.1")
    files.append(10, 20)
    yield HELD
    files.append(20, 30, old)
    yield HELD
    files.open_files = open_files(files.tail.running)
    yield RESTART
    files.append(30, 40, old)
    files.append(40, 50)


def copied_and_truncated(files: Files, when: str, copy: str, new_lines: int) -> Steps:
    """What only the copy has is read there, in the glob or beside it; the original shrank, or outgrew its offset."""
    files.include = ["app.log", "app.log.1"]
    file = files.append(0, 60, "app.log")
    yield when
    files.append(60, 100, file)
    files.copytruncate(file, files.folder / f"app.log{copy}", 100, 100 + new_lines)
    yield HELD
    files.append(260, 270, file)  # the original goes on
    yield RESTART
    files.append(270, 280, file)


def truncated_to_the_same_size(files: Files, when: str) -> Steps:
    files.lines[9] = changed(files.lines[9], Username="x" * 1000)
    files.append(0, 10)
    yield when
    new = [*files.lines[10:19], changed(files.lines[19], Username="")]
    missing = files.file.stat().st_size - sum(map(len, new))
    new[-1] = changed(new[-1], Username="y" * missing)
    assert sum(map(len, new)) == files.file.stat().st_size
    copytruncate(files.file, files.folder / "copy", new)
    files.wanted.update(range(10, 20))


def copied_and_truncated_again_and_again(files: Files) -> Steps:
    """No line comes between the copy and the truncation, and some are unread."""
    files.append(0, 30)
    end = 30
    for number in range(6):
        yield HELD
        files.append(end, end + 20)
        files.copytruncate(files.file, files.folder / f"app.ndjson.{number}", end + 20, end + 25 + 5 * number)
        end += 25 + 5 * number


def copied_some_time_before_it_is_truncated(files: Files) -> Steps:
    """Between the two the copy is in the glob, and the original is as it was: the copy waits."""
    files.append(0, 60)
    yield RUNNING
    shutil.copy(files.file, files.folder / "app.ndjson.1")
    for number in (60, 61):  # a look that found the second of them began after the first had been found
        files.append(number, number + 1, f"app.ndjson.other-{number}")
        yield RUNNING
    os.truncate(files.file, 0)
    files.append(62, 90)


def copied_and_truncated_twice(files: Files, suffix: str) -> Steps:
    """The older copy is plain, or compressed in one way or another; both give their rests."""
    files.include = ["app.log*"]
    file = files.append(0, 60, "app.log")
    yield RESTART
    files.append(60, 100, file)
    first, second = files.folder / "app.log.1", files.folder / "app.log.2"
    files.copytruncate(file, first, 100, 180)
    first.rename(second)
    if suffix:
        compress(second, suffix)
    files.copytruncate(file, first, 180, 190)


def given_the_inode_of_a_deleted_one(files: Files, new_lines: int) -> Steps:
    """It is read from its start."""
    old = files.append(0, 10, "app.ndjson.a")
    inode = old.stat().st_ino
    yield RESTART
    old.unlink()
    take_inode(files.folder / "app.ndjson.b", inode)
    files.append(10, 10 + new_lines, "app.ndjson.b")


def given_each_other_s_inodes(files: Files, suffix: str) -> Steps:
    """A rotation that copies and compresses frees inodes, and the next file is given one of them at once."""
    paths = [files.append(number * 10, number * 10 + 5, f"app.ndjson.{number}") for number in range(3)]
    yield RESTART
    inodes = [path.stat().st_ino for path in paths]
    for number, path in enumerate(paths):  # each holds now what its neighbour did, and more
        start = (number + 1) % 3 * 10
        data = b"".join(files.lines[start : start + 10])
        path.write_bytes(COMPRESSIONS[suffix](data) if suffix else data)
        files.wanted.update(range(start, start + 10))
    assert [path.stat().st_ino for path in paths] == inodes
    files.append(30, 35)


SHORT_LINE = b"#" * 39 + b"\n"


def growing_and_moving(files: Files, *moves: str) -> Steps:
    """A file smaller than its fingerprint: a line of 40 bytes, then a record at a time; between it may be moved."""
    file = files.file
    file.write_bytes(SHORT_LINE)
    sizes = [len(SHORT_LINE)]
    for number, move in enumerate(("", *moves)):
        if move:
            yield RESTART
            old, file = file, file if move == "stay" else files.folder / f"app.ndjson.{number}"
            if move == "rename":
                old.rename(file)
            elif move == "copy":
                shutil.copy(old, file)
                old.unlink()
        files.append(number * 2, number * 2 + 1, file)
        yield HELD
        files.append(number * 2 + 1, number * 2 + 2, file)
        sizes.append(file.stat().st_size)
    assert sizes[1] < 1024 < sizes[-1], "the case was not exercised"


def blank_in_its_head_and_at_its_end(files: Files, blank: bytes) -> Steps:
    """So is a new file, which is not taken for the known one; between the blanks lie records."""
    blanks = (blank * 4000)[:4000]
    files.file.write_bytes(blanks + b"".join(files.lines[:20]) + blanks + b"\n")
    files.wanted.update(range(20))
    yield RESTART
    size = files.file.stat().st_size
    files.file.rename(files.folder / "gone")  # so that its inode is not given out again
    new = blanks[:2000] + b"".join(files.lines[20:30])
    new += (blank * size)[: size - len(new) + 2000] + b"\n"
    assert len(new) > size
    (files.folder / "app.ndjson.new").write_bytes(new)
    files.wanted.update(range(20, 30))


def heads_that_are_equal(files: Files) -> Steps:
    """They are files of their own."""
    for number in range(5):
        path = files.folder / f"app.ndjson.{number}"
        path.write_bytes(b"\n" * 2000)
        files.append(number * 10, number * 10 + 10, path)
    yield RUNNING


def moved_by_copying(files: Files, include: str, lines: int) -> Steps:
    """Restored from a backup, or moved to a new disk with the same names: another inode, and it is read on."""
    files.include = [include]
    files.append(0, lines)
    yield RESTART
    files.append(lines, 100)
    copy = files.folder / "copy"
    shutil.copy(files.file, copy)
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
            files.append(number * 100, number * 100 + 60, f"app.ndjson.{number}")
        yield RESTART
        for number in range(3):
            path = files.append(number * 100 + 60, number * 100 + 100, f"app.ndjson.{number}")
            shutil.move(path, Path(other, path.name))
        yield RESTART


def a_symlink_turned_to_another_file(files: Files) -> Steps:
    """It gives the rest of the old one."""
    files.include = [NAME]
    _turn(files.file, files.append(0, 20, "1.log"))
    yield HELD
    files.append(20, 40, "1.log")
    _turn(files.file, files.append(40, 60, "2.log"))
    yield HELD
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
    """It is read on where it was left, the archive being in the glob or beside it."""
    files.include = [include]
    file = files.append(0, 60, "app.log")
    yield RESTART
    files.append(60, 100, file)
    compress(file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120, file)
    yield RESTART
    files.append(120, 130, file)


def compressed_when_read_to_its_end(files: Files, suffix: str) -> Steps:
    """It is not read again: not in the archive, not under the archive's next name, and not by the next start."""
    files.include = ["app.log*"]
    file = files.append(0, 100, "app.log")
    yield RESTART
    compress(file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120, file)
    yield HELD
    (files.folder / f"app.log.1.{suffix}").rename(files.folder / f"app.log.2.{suffix}")
    for end in (121, 122):  # a look that found the second line in a new file began after that
        files.append(end - 1, end, f"app.log.other-{end}")
        yield HELD
    yield RESTART
    files.append(122, 130, file)


def compressed_slowly(files: Files, suffix: str) -> Steps:
    """Archives that are written still are waited for: that of a file that was read half, and of a new file."""
    files.include = ["app.log*"]
    plain = files.append(0, 60, "app.log")
    yield RESTART
    with plain.open("ab") as out:
        out.writelines(files.lines[60:150])
    rests = {}
    new = b"".join(files.lines[150:200])
    for name, data in ((f"app.log.1.{suffix}", plain.read_bytes()), (f"app.log.new.{suffix}", new)):
        packed = COMPRESSIONS[suffix](data)
        (files.folder / name).write_bytes(packed[: len(packed) // 2])
        rests[files.folder / name] = packed[len(packed) // 2 :]
    plain.unlink()
    for end in (201, 202):  # a look that found the second line in a new file began after the first had been found
        files.append(end - 1, end, f"app.log.other-{end}")
        yield RUNNING
    files.warned_of = {line["event"] for path in rests for line in warnings_of(files.tail.running, path)}
    for path, rest in rests.items():
        with path.open("ab") as out:
            out.write(rest)
    files.wanted.update(range(60, 200))


def compressed_when_half_of_it_was_read(files: Files) -> Steps:
    """It is long, so that its rest is far behind what is decompressed at once."""
    files.include = [NAME]
    files.append(0, LONG_LINES - 3000)
    yield RESTART
    assert files.file.stat().st_size > 2 << 20
    files.append(LONG_LINES - 3000, LONG_LINES)
    compress(files.file.rename(files.folder / "old"), "gz")


def each(case: Callable[..., Steps], *values: tuple[Any, ...]) -> dict[str, Callable[[Files], Steps]]:
    """A case with each of these for its arguments."""
    return {" ".join(map(str, (case.__name__, *those))): partial(_with, case, those) for those in values}


def _with(case: Callable[..., Steps], values: tuple[Any, ...], files: Files) -> Steps:
    return case(files, *values)


def _cases_of(case: Callable[..., Steps]) -> list[str]:
    return [name for name in CASES if name.split()[0] == case.__name__]


LONG = "compressed_when_half_of_it_was_read"
LONG_LINES = 10_000
CASES = {
    **each(rotated_twice, (GLOB,), (NAME,)),
    **each(rotated_out_of_the_glob_twice, ()),
    **each(late_lines, (GLOB,), (NAME,)),
    **each(copied_and_truncated, *product((HELD, RESTART), (".1", "-copy"), (0, 20, 150))),
    **each(copied_and_truncated_twice, ("",), *product(COMPRESSIONS)),
    **each(given_the_inode_of_a_deleted_one, (1,), (40,)),
    **each(given_each_other_s_inodes, ("",), ("gz",)),
    **each(put_in_the_place_of_another, ()),
    **each(a_stranger_outside_the_glob_with_a_known_inode, ()),
    **each(torn_lines, ()),
    **each(truncated_to_the_same_size, (HELD,), (RESTART,)),
    **each(copied_and_truncated_again_and_again, ()),
    **each(copied_some_time_before_it_is_truncated, ()),
    **each(heads_that_are_equal, ()),
    **each(compressed_slowly, *product(COMPRESSIONS)),
    **each(growing_and_moving, ("rename", "copy"), ("copy", "rename"), ("stay", "stay")),
    **each(blank_in_its_head_and_at_its_end, (b"\n",), (b"\0",), (b" \n",), (b"\r\n",)),
    **each(moved_by_copying, (GLOB, 1), (NAME, 60)),
    **each(moved_to_another_disk, ()),
    **each(a_symlink_turned_to_another_file, ()),
    **each(a_symlink_turned_to_another_folder, ()),
    **each(rotated_and_compressed, *product(("app.log*", "app.log"), COMPRESSIONS)),
    **each(compressed_when_read_to_its_end, *product(COMPRESSIONS)),
    **each(compressed_when_half_of_it_was_read, ()),  # the last one: it takes all lines that are left
}


@pytest.fixture(scope="module")
def life(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Life:
    # So long that nothing is closed meanwhile only because it is late.
    return Life(CASES).live(tmp_path_factory.mktemp("life") / "shipper", sample, input__rotate_wait_seconds=60)


@pytest.mark.parametrize("case", CASES)
def test_whatever_becomes_of_a_file_each_of_its_lines_is_sent_once(life: Life, case: str):
    times = life.times_received(case)
    assert times == dict.fromkeys(times, 1), {key: count for key, count in times.items() if count != 1}


def test_whatever_becomes_of_files_no_record_is_read_twice_and_none_is_invented(life: Life):
    state, short_lines = life.state, len(_cases_of(growing_and_moving))
    assert state.duplicates == 0, f"{state.duplicates} records were read twice"
    assert (state.read, state.accepted, state.dead_lettered) == (life.events + short_lines, life.events, short_lines)


@pytest.mark.parametrize("case", _cases_of(late_lines))
def test_a_renamed_file_that_is_waited_for_is_open_once(life: Life, case: str):
    files = life.cases[case]
    assert files.open_files.count(str(files.folder / "app.ndjson.1")) == 1


@pytest.mark.parametrize("case", _cases_of(compressed_slowly))
def test_a_compressed_file_that_is_still_being_written_is_no_error(life: Life, case: str):
    assert life.cases[case].warned_of <= {"source_replaced"}, "it may have been given the inode of another file"


@pytest.mark.parametrize("case", _cases_of(growing_and_moving))
def test_a_file_smaller_than_its_fingerprint_stays_the_same_stream_while_it_grows_and_moves(life: Life, case: str):
    assert len(life.checkpoints(case)) == 1
    letters = [letter for letter in life.state.dead_letters if life.cases[case].folder in Path(letter.path).parents]
    assert [letter.raw + b"\n" for letter in letters] == [SHORT_LINE]


def test_the_checkpoint_in_a_compressed_file_is_in_bytes_of_its_content(life: Life):
    (checkpoint,) = life.checkpoints(LONG)
    assert checkpoint == sum(map(len, life.cases[LONG].lines[:LONG_LINES]))


# Files that are soon let go of


def hard_links(files: Files) -> Steps:
    files.append(0, 20)
    os.link(files.file, files.folder / "app.ndjson.a")
    yield RUNNING
    os.link(files.file, files.folder / "app.ndjson.b")
    files.append(20, 40, "app.ndjson.b")
    yield RUNNING
    files.file.unlink()
    files.append(40, 60, "app.ndjson.a")
    yield RESTART
    (files.folder / "app.ndjson.a").unlink()
    files.append(60, 80, "app.ndjson.b")
    yield RUNNING
    files.warned_of = {line["event"] for line in warnings_of(files.tail.running, files.file)}


def given_the_inode_of_one_that_was_let_go(files: Files) -> Steps:
    """It is read from its start."""
    old = files.append(0, 10)
    inode = old.stat().st_ino
    yield RUNNING
    with old.open():  # so that nobody else is given it
        old.unlink()
        wait_until_closed(files, old)
    take_inode(files.folder / "app.ndjson.new", inode)
    files.append(10, 40, "app.ndjson.new")
    yield RUNNING


def replaced_by_a_folder_and_back(files: Files) -> Steps:
    files.append(0, 10)
    yield HELD
    files.append(10, 20)
    files.file.unlink()
    files.file.mkdir()
    yield RUNNING
    wait_until_closed(files, files.file)
    files.file.rmdir()
    files.append(20, 30)


def rotated_and_compressed_twice(files: Files, suffix: str) -> Steps:
    """Unread lines were in it when it was compressed; and long after it had been read and closed."""
    files.include = ["app.log*"]
    file = files.append(0, 60, "app.log")
    yield HELD
    files.append(60, 100, file)
    compress(file.rename(files.folder / "app.log.1"), suffix)
    files.append(100, 120, file)
    yield RUNNING
    away = file.rename(files.folder / "outside-the-glob")
    files.append(120, 130, file)
    yield RUNNING
    wait_until_closed(files, away)
    compress(away, suffix, files.folder / f"app.log.2.{suffix}")
    for end in (131, 132):  # a look that found the second line in a new file began after that
        files.append(end - 1, end, f"app.log.other-{end}")
        yield RUNNING


def wait_until_closed(files: Files, path: Path) -> None:
    """Wait until the process has let go of a file that it has read, be it deleted by now or not."""
    running, names = files.tail.running, {str(path), f"{path} (deleted)"}
    running.wait_until(lambda: names.isdisjoint(open_files(running)), f"{path} is closed")


LET_GO = {
    **each(hard_links, ()),
    **each(given_the_inode_of_one_that_was_let_go, ()),
    **each(replaced_by_a_folder_and_back, ()),
    **each(rotated_and_compressed_twice, *product(COMPRESSIONS)),
}


@pytest.fixture(scope="module")
def short_life(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life(LET_GO).live(tmp_path_factory.mktemp("short") / "shipper", sample, input__rotate_wait_seconds=0.1)


@pytest.mark.parametrize("case", LET_GO)
def test_whatever_becomes_of_a_file_that_is_soon_let_go_each_of_its_lines_is_sent_once(short_life: Life, case: str):
    times = short_life.times_received(case)
    assert times == dict.fromkeys(times, 1), {key: count for key, count in times.items() if count != 1}
    assert (short_life.state.duplicates, short_life.state.dead_letters) == (0, ())
    assert short_life.events == short_life.state.read


def test_hard_links_are_one_stream(short_life: Life):
    (case,) = each(hard_links, ())
    assert len(short_life.checkpoints(case)) == 1
    assert not short_life.cases[case].warned_of


# Alike ------------------------------------------------------------------------------------------------------------


def equal_heads_and_equal_ends(files: Files, when: str) -> Steps:
    """A batch of test events at the head of each, more than a fingerprint; the rest is its own. One of them goes."""
    head = b"".join(files.lines[:5])
    for number in range(1, 5):
        path = files.folder / f"app.ndjson.{number}"
        path.write_bytes(head)
        files.append(number * 10, number * 10 + 10, path)
    files.wanted.update(range(5))
    yield when
    (files.folder / "app.ndjson.1").unlink()
    for number in range(5, 8):
        path = files.folder / f"new.{number}"
        path.write_bytes(head)
        files.append(number * 20, number * 20 + 20, path)  # longer than the one that has gone
        path.rename(files.folder / f"app.ndjson.{number}")


def a_new_one_that_begins_like_the_rotated_one(files: Files, when: str) -> Steps:
    """Every file begins with the same record, and of the old one no more had been read."""
    files.include = [NAME]
    files.append(0, 1)
    yield when
    files.append(1, 30)
    files.file.rename(files.folder / "app.ndjson.1")
    files.append(0, 1)
    files.append(30, 60)


def copied_and_left(files: Files) -> Steps:
    """Somebody took the file as the beginning of another one: what it has besides must arrive."""
    files.append(0, 60)
    yield RUNNING
    shutil.copy(files.file, files.folder / "app.ndjson.more")
    files.append(60, 80, "app.ndjson.more")
    files.append(80, 100)
    yield RUNNING


def truncated_beginning_as_it_did(files: Files, when: str) -> Steps:
    """The first lines are more than a fingerprint; only what stands before the old offset, which it outgrew, tells."""
    files.append(0, 20)
    yield when
    shutil.copy(files.file, files.folder / "copy")
    files.file.write_bytes(b"".join(files.lines[:5] + files.lines[20:60]))  # in place
    files.wanted.update(range(60))


ALIKE = {
    **each(copied_and_left, ()),
    **each(truncated_beginning_as_it_did, (HELD,), (RESTART,)),
    **each(equal_heads_and_equal_ends, (HELD,), (RESTART,)),
    **each(a_new_one_that_begins_like_the_rotated_one, (HELD,), (RESTART,)),
}


@pytest.fixture(scope="module")
def life_of_alike(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life(ALIKE).live(tmp_path_factory.mktemp("alike") / "shipper", sample, input__rotate_wait_seconds=0.1)


@pytest.mark.parametrize("case", ALIKE)
def test_files_that_are_alike_lose_nothing_of_what_each_has_of_its_own(life_of_alike: Life, case: str):
    """What they have in common may be sent again."""
    assert 0 not in life_of_alike.times_received(case).values()
    assert life_of_alike.state.dead_letters == ()
    assert life_of_alike.events > 0


# Renamed ----------------------------------------------------------------------------------------------------------


def test_many_renames_under_load_lose_and_repeat_nothing(tail: Tail):
    """The writer finishes a torn line and some more into the old descriptor, when the new file is begun already."""
    rotations, lines_each, late_each = 30, 150, 20
    lines = tail.sample.lines
    tail.start(GLOB, input__rotate_wait_seconds=1, log__level="debug")  # with every repeat
    sent = 0
    old = tail.file.open("ab", buffering=0)
    try:
        for rotation in range(rotations):
            for start in range(sent, sent + lines_each, 10):
                old.write(b"".join(lines[start : start + 10]))
            sent += lines_each
            old.write(lines[sent][:100])
            if rotation % 4 == 0:  # so that the reader cannot come when all is over
                tail.wait([sent - lines_each])
            tail.file.rename(tail.folder / f"app.ndjson.{rotation}")
            new = tail.file.open("ab", buffering=0)
            old.write(lines[sent][100:])
            for line in lines[sent + 1 : sent + late_each]:
                old.write(line)
            sent += late_each
            old.close()
            old = new
    finally:
        old.close()
    tail.wait(sent)
    result = tail.stop(sent)
    assert len(told(result, "source_opened")) == rotations  # the last file is empty
    assert len(told(result, "source_renamed")) >= rotations / 4 - 1


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_random_life_under_logrotate_loses_nothing(
    tail: Tail, shipper: Shipper, service: Service, rng: Random, is_killed: bool
):
    """Rotations shift the numbers; the second of them compresses, as with delaycompress."""
    suffix = rng.choice(sorted(COMPRESSIONS))
    keep = 40
    sent = rotations = rests = 0
    for life in range(2):
        tail.start(GLOB, batch__max_events=20)
        for step in range(rng.randrange(1, 6)):
            count = rng.randrange(1, 60)
            tail.append(sent, sent + count)
            sent += count
            if step == 0 or rng.random() < 0.5:
                _logrotate(tail, keep, suffix)
                rotations += 1
                tail.append(sent, sent + 5)
                sent += 5
        if is_killed:
            goal = life * 10
            tail.running.wait_until(lambda goal=goal: service.stored > goal, "some events")
            tail.running.kill()
        else:
            tail.wait(sent)
            tail.stop(sent)
        tail.append(sent, sent + 20)
        sent += 20
        for _ in range(rng.randrange(3)):
            rests += 1
            _logrotate(tail, keep, suffix)
            rotations += 1
            tail.append(sent, sent + 5)
            sent += 5
    tail.start(GLOB)
    tail.wait(sent)
    if is_killed:
        assert tail.running.stop().returncode == 0
        service.assert_holds_exactly(tail.ids(sent))
        state = shipper.read_state()
        assert (state.accepted + state.duplicates, state.dead_lettered) == (state.read, 0)
    else:
        tail.stop(sent)
    assert rotations >= 2, "the case was not exercised"
    print(f"{sent} lines, {rotations} rotations, {rests} of them while stopped, {suffix}")


def _logrotate(tail: Tail, keep: int, suffix: str) -> None:
    for number in range(keep, 0, -1):
        for name in (f"app.ndjson.{number}", f"app.ndjson.{number}.{suffix}"):
            path = tail.folder / name
            if path.exists():
                path.rename(tail.folder / name.replace(f".{number}", f".{number + 1}"))
    second = tail.folder / "app.ndjson.2"
    if second.exists():
        compress(second, suffix)
    tail.file.rename(tail.folder / "app.ndjson.1")


# Copied and truncated ---------------------------------------------------------------------------------------------


def test_a_hole_where_a_writer_went_on_after_the_truncation_costs_no_record(
    tail: Tail, shipper: Shipper, service: Service
):
    """
    A writer without O_APPEND goes on at its old offset; the head of its file is NULs from then on.

    So nothing but NULs tells which file a copy is of. It may be read as a file of its own, but not be left out.
    """
    with tail.file.open("wb", buffering=0) as writer:
        writer.write(b"".join(tail.sample.lines[:60]))
        tail.start(GLOB)
        tail.wait(60)
        sent = 60
        for number in (1, 2):
            with tail.held():
                writer.write(b"".join(tail.sample.lines[sent : sent + 10]))
                shutil.copy(tail.file, tail.folder / f"app.ndjson.{number}")
                os.truncate(tail.file, 0)
                writer.write(b"".join(tail.sample.lines[sent + 10 : sent + 20]))
                sent += 20
            tail.wait(sent)
        assert tail.file.read_bytes().startswith(b"\0" * 10_000), "the case was not exercised"
        assert tail.running.stop().returncode == 0
        before = shipper.read_state()
        assert before.duplicates <= 60
        writer.write(b"".join(tail.sample.lines[sent : sent + 10]))
    tail.start(GLOB)
    tail.wait(sent + 10)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(sent + 10))
    after = shipper.read_state()
    assert after.dead_letters == ()
    assert (after.read - before.read, after.duplicates) == (10, before.duplicates), "its place tells which file it is"


# Told apart -------------------------------------------------------------------------------------------------------


def test_a_busy_file_that_begins_like_a_quiet_one_is_not_held_up(tail: Tail, shipper: Shipper, service: Service):
    """It looks like a copy of the quiet one, and it never rests."""
    documents = [json.loads(line) for line in tail.sample.lines[2000:4000]]
    rows = {
        "ndjson": tail.sample.lines[:2000],
        "csv": [",".join(each).encode() + b"\n" for each in (documents[0], *(map(str, d.values()) for d in documents))],
    }
    for content in rows:
        (tail.folder / f"quiet.{content}").write_bytes(rows[content][0])
    tail.start(["*.ndjson", "*.csv"], input__rotate_wait_seconds=2, input__format="auto")
    tail.running.wait_until(lambda: len(told(tail.running, "source_opened")) == 2, "the quiet ones are open")
    tail.append(4000, 4001, "more.ndjson")
    tail.wait([4000])
    written = 0

    def write_until_first_arrives() -> bool:
        nonlocal written
        for content, lines in rows.items():
            with (tail.folder / f"busy.{content}").open("ab") as out:
                out.write(lines[written])
        written += 1
        return written > 2 and service.holds(tail.ids([1, 2000]))

    tail.running.wait_until(write_until_first_arrives, "the first of their lines arrive while they grow", limit_s=15)
    wanted = [*range(written), *range(2000, 2000 + written - 1), 4000]
    tail.wait(wanted)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(wanted))
    assert shipper.read_state().dead_letters == ()


# Deleted and replaced ---------------------------------------------------------------------------------------------


def test_files_deleted_while_they_are_read_are_read_to_their_end_and_let_go(
    tail: Tail, shipper: Shipper, fake: FakeService
):
    shipper.target = fake.target
    tail.append(0, 10, "app.ndjson.begin")
    tail.start("app.ndjson.*", delivery__concurrency=1, input__rotate_wait_seconds=0.2)
    tail.running.wait_until(lambda: len(fake.event_ids()) == 10, "the first events")
    (tail.folder / "app.ndjson.begin").unlink()
    tail.running.wait_until(lambda: told(tail.running, "source_closed"), "the first file is closed")
    baseline = open_files(tail.running)
    assert baseline, "nothing is open?"

    fake.default = HANG
    per_file = 1000
    for number in range(4):
        start = 10 + number * per_file
        tail.append(start, start + per_file - 100, f"app.ndjson.{number}")
    tail.running.wait_until(lambda: fake.requests > 1, "a request")
    paths = [tail.folder / f"app.ndjson.{number}" for number in range(4)]
    tail.running.wait_until(lambda: sum(len(told(tail.running, "source_opened", p)) for p in paths) == 4, "all open")
    with tail.held():  # what is written now nobody can have read before it was deleted
        for number, path in enumerate(paths):
            end = 10 + (number + 1) * per_file
            tail.append(end - 100, end, path)
            path.unlink()
    fake.release()
    wanted = tail.ids(10 + 4 * per_file)
    tail.running.wait_until(lambda: len(fake.event_ids()) >= len(wanted), "all events", limit_s=20)
    tail.running.wait_until(lambda: open_files(tail.running) == baseline, "the descriptors are closed")
    result = tail.running.stop()
    assert result.returncode == 0
    assert sorted(fake.event_ids()) == sorted(wanted)
    assert shipper.read_state().read == len(wanted)


def test_a_permission_that_is_lost_for_a_while_is_said_once_and_costs_nothing(tail: Tail):
    """That of a file, and that of a folder: while it is stopped, and while it runs."""
    prefix = where_permissions_hold()
    locked, probe = tail.folder / "locked", tail.folder.parent / "probe"
    locked.mkdir()
    probe.mkdir()
    start = partial(
        tail.start,
        [GLOB, "locked/*", str(probe / "*")],
        prefix=prefix,
        input__rotate_wait_seconds=0.1,
        input__poll_interval_seconds=0.05,
    )
    inside = tail.append(0, 10, "locked/a.ndjson")
    tail.append(10, 20)
    start()
    tail.wait(20)
    tail.stop(20)
    tail.append(100, 110)
    tail.file.chmod(0)
    sent = 20
    for is_running in (False, True):
        with inside.open("ab") as writer:
            locked.chmod(0)
            try:
                if not is_running:
                    start()
                for number in range(sent, sent + 10):  # each of them found by a look of its own
                    tail.append(number, number + 1, probe / str(number))
                    tail.wait(number + 1)
                writer.write(b"".join(tail.sample.lines[sent + 10 : sent + 20]))
            finally:
                locked.chmod(0o700)
        sent += 20
        tail.wait(sent)
    (warning,) = warnings_of(tail.running, tail.file)
    assert warning["event"] == "source_refused"
    assert "ermission" in warning["error"]
    tail.file.chmod(0o600)
    wanted = [*range(sent), *range(100, 110)]
    tail.wait(wanted)
    tail.append(110, 120)
    wanted += range(110, 120)
    tail.wait(wanted)
    assert len(warnings_of(tail.stop(wanted), tail.file)) == 1


# Never an input ---------------------------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_refused_once_and_what_shipper_writes_itself_is_never_an_input(
    tail: Tail, shipper: Shipper, service: Service
):
    """Its log and its output lie in the glob, and its state, once by its own name and once behind a link."""
    spool = shipper.state / "spool"
    spool.mkdir(mode=0o700, parents=True)
    shipper.state.chmod(0o700)
    (spool / "foreign.txt").write_bytes(tail.sample.lines[1000])
    (shipper.state / "dead.ndjson").write_bytes(tail.sample.lines[1001])
    (tail.folder / "app.ndjson.state").symlink_to(shipper.state)
    (tail.folder / "app.ndjson.db").symlink_to(shipper.state / "state.db")
    os.mkfifo(tail.folder / "app.ndjson.fifo")
    (tail.folder / "app.ndjson.null").symlink_to("/dev/null")
    (tail.folder / "app.ndjson.zero").symlink_to("/dev/zero")
    (tail.folder / "app.ndjson.loop").symlink_to("app.ndjson.loop")
    (tail.folder / "app.ndjson.nowhere").symlink_to("nothing-there")
    tail.file.write_bytes(b'{"bad": 1}\n')
    tail.append(0, 10)
    os.link(tail.file, tail.folder / "app.ndjson.link")  # a second name of an input is none of its own files
    include = [GLOB, "app.ndjson.*/**", str(shipper.folder / "output" / "*"), str(shipper.state / "**")]
    with socket.socket(socket.AF_UNIX) as listener:
        descriptor = os.open(tail.folder, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/app.ndjson.socket")  # a socket's path has 107 bytes at most
        finally:
            os.close(descriptor)
        tail.start(include, input__poll_interval_seconds=0.05)
        assert list((shipper.folder / "output").iterdir()), "its log lies elsewhere"
        for number in range(10, 20):  # each of them found by a look of its own
            tail.append(number, number + 1, f"app.ndjson.{number}")
            tail.wait(number + 1)
        result = tail.stop(20, dead_lettered=1)
    for name in ("fifo", "null", "zero", "socket"):
        path = tail.folder / f"app.ndjson.{name}"
        (warning,) = warnings_of(result, path)
        assert warning["event"] == "source_refused", name
        assert str(path) in warning["error"], name
    assert len(warnings_of(result, tail.folder / "app.ndjson.loop")) <= 1
    assert not warnings_of(result, tail.folder / "app.ndjson.nowhere")
    assert len(shipper.read_state().dead_letters) == 1
    tail.start(include)
    tail.append(20, 30)
    tail.wait(30)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(30))


def test_dead_letters_that_were_exported_into_the_state_directory_are_never_an_input(
    tail: Tail, shipper: Shipper, service: Service
):
    tail.file.write_bytes(b"".join(tail.sample.lines[:10]) + b'{"bad": 1}\n')
    assert shipper.backfill(tail.file).counts() == (11, 10, 1, 0, 0)
    exported = shipper.run("dead-letters", "export")
    assert event_ids(tail.sample.lines[:1])[0] not in exported.stdout
    (shipper.state / "dead-letters.ndjson").write_text(exported.stdout)
    tail.append(10, 20)
    result = shipper.backfill(shipper.folder / "logs", shipper.folder / "**" / "*.ndjson")
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    tail.append(20, 30)
    tail.start([GLOB, str(shipper.state / "*"), str(shipper.folder / "**" / "*.ndjson")])
    tail.wait(30)
    tail.stop(30, dead_lettered=1)
    service.assert_holds_exactly(tail.ids(30))
