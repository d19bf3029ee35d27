"""What becomes of files that are rotated: cases for a `Life` in which nothing is closed early."""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.driver import changed
from tests.e2e.files import COMPRESSIONS, compress, copytruncate, open_files, take_inode, warnings_of
from tests.e2e.lives_of_files import GLOB, HELD, NAME, RESTART, RUNNING, Files, Steps, each


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
