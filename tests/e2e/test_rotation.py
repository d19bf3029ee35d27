"""Files that are renamed, truncated, compressed, replaced and deleted: nothing is lost, nothing is read twice."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, event_ids
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
by_glob_and_by_name = pytest.mark.parametrize("include", [GLOB, NAME], ids=["glob", "name"])
running_and_stopped = pytest.mark.parametrize("is_running", [True, False], ids=["running", "stopped"])


@pytest.fixture
def tail(shipper: Shipper, service: Service, sample: Sample) -> Tail:
    return Tail(shipper, service, sample)


@pytest.fixture
def other_disk(tail: Tail) -> Iterator[Path]:
    """A folder on another device."""
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == tail.folder.stat().st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shipper-test-") as folder:
        yield Path(folder)


# Renamed ----------------------------------------------------------------------------------------------------------


def test_fifty_renames_under_load_lose_and_repeat_nothing(tail: Tail):
    """The writer finishes a torn line and some more into the old descriptor, when the new file is begun already."""
    rotations, lines_each, late_each = 50, 300, 20
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


@by_glob_and_by_name
def test_a_file_rotated_twice_while_stopped_is_read_from_sixty_percent_on(tail: Tail, include: str):
    tail.append(0, 60)
    tail.pass_by(include, 60)
    tail.append(60, 100)
    tail.file.rename(tail.folder / "app.ndjson.2")
    if include == GLOB:  # a file that had another name before anybody saw it cannot be found by its name
        tail.append(100, 200, "app.ndjson.1")
    tail.append(200, 250)
    wanted = [*range(100), *range(100, 200 if include == GLOB else 100), *range(200, 250)]
    tail.pass_by(include, wanted)


def test_a_file_rotated_out_of_the_glob_twice_while_stopped_is_found_by_what_it_holds(tail: Tail):
    """Each of them was read half; the second start has to tell them apart."""
    tail.append(0, 30)
    tail.start(NAME, input__rotate_wait_seconds=60)
    tail.wait(30)
    with tail.held():
        tail.file.rename(tail.folder / "app.ndjson.1")
        tail.append(30, 60)
    tail.wait(60)
    tail.stop(60)
    tail.append(60, 70, "app.ndjson.1")
    tail.append(70, 80)
    (tail.folder / "app.ndjson.1").rename(tail.folder / "2026-01-01.old")
    tail.file.rename(tail.folder / "2026-01-02.old")
    tail.append(80, 90)
    tail.pass_by(NAME, 90)


@by_glob_and_by_name
def test_late_lines_of_a_file_that_was_seen_to_be_rotated_before_a_restart_are_read(tail: Tail, include: str):
    """Its writer has it open still."""
    tail.append(0, 10)
    running = tail.start(include, input__rotate_wait_seconds=60)
    tail.wait(10)
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    tail.append(10, 20)
    tail.wait(20)
    tail.append(20, 30, old)
    tail.wait(30)
    assert open_files(running).count(str(old)) == 1
    tail.stop(30)
    tail.append(30, 40, old)
    tail.append(40, 50)
    tail.pass_by(include, 50)


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_a_random_life_under_logrotate_loses_nothing(
    tail: Tail, shipper: Shipper, service: Service, rng: Random, is_killed: bool
):
    """Rotations shift the numbers; the second of them compresses, as with delaycompress."""
    suffix = rng.choice(sorted(COMPRESSIONS))
    keep = 40
    sent = rotations = rests = 0
    for life in range(5):
        tail.start(GLOB)
        for _ in range(rng.randrange(1, 6)):
            count = rng.randrange(1, 60)
            tail.append(sent, sent + count)
            sent += count
            if rng.random() < 0.5:
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


@running_and_stopped
def test_what_only_the_copy_of_a_truncated_file_still_has_is_read_there(tail: Tail, is_running: bool):
    """The copy is in the glob or beside it; the original has shrunk, or grown past its old offset."""
    cases = [
        (number * 300, f"{number}.log", f"{number}.log{copy}", new_lines)
        for number, (copy, new_lines) in enumerate(product((".1", "-copy"), (20, 150)))
    ]
    wanted: list[int] = []

    def append(start: int, end: int) -> None:
        for first, name, *_ in cases:
            tail.append(first + start, first + end, name)
            wanted.extend(range(first + start, first + end))

    def rotate() -> None:
        append(60, 100)
        for first, name, copy, new_lines in cases:
            new = tail.sample.lines[first + 100 : first + 100 + new_lines]
            copytruncate(tail.folder / name, tail.folder / copy, new)
            wanted.extend(range(first + 100, first + 100 + new_lines))

    include = ["*.log", "*.log.1"]
    append(0, 60)
    tail.start(include)
    tail.wait(wanted)
    if is_running:
        with tail.held():
            rotate()
    else:
        tail.stop(wanted)
        rotate()
        tail.start(include)
    tail.wait(wanted)
    append(260, 270)  # the originals go on
    tail.wait(wanted)
    tail.stop(wanted)
    append(270, 280)
    tail.pass_by(include, wanted)


@running_and_stopped
def test_a_truncated_file_that_begins_as_it_did_and_has_outgrown_its_old_offset_is_noticed(
    tail: Tail, shipper: Shipper, service: Service, is_running: bool
):
    """The first lines are more than a fingerprint; only what stands before the old offset tells."""
    tail.append(0, 20)
    tail.start(GLOB)
    tail.wait(20)
    new = tail.sample.lines[:5] + tail.sample.lines[20:60]
    if is_running:
        with tail.held():
            copytruncate(tail.file, tail.folder / "copy", new)
    else:
        tail.stop(20)
        copytruncate(tail.file, tail.folder / "copy", new)
        tail.start(GLOB)
    tail.wait(60)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(60))
    assert shipper.read_state().read == 65


@running_and_stopped
def test_a_truncated_file_without_anything_new_still_gives_the_rest_in_its_copy(tail: Tail, is_running: bool):
    tail.append(0, 60)
    tail.start(GLOB)
    tail.wait(60)
    if not is_running:
        tail.stop(60)
        tail.append(60, 100)
        copytruncate(tail.file, tail.folder / "app.ndjson.1")
        tail.start(GLOB)
    else:
        with tail.held():
            tail.append(60, 100)
            copytruncate(tail.file, tail.folder / "app.ndjson.1")
    tail.wait(100)
    tail.append(100, 105)
    tail.wait(105)
    tail.stop(105)


def test_files_copied_and_truncated_twice_while_stopped_give_the_rests_of_both_copies(tail: Tail):
    """The older copy is plain, or compressed in one way or another."""
    files = {suffix: (number * 200, f"{number}.log") for number, suffix in enumerate(("", *COMPRESSIONS))}
    for start, name in files.values():
        tail.append(start, start + 60, name)
    tail.pass_by("*.log*", [start + number for start, _ in files.values() for number in range(60)])
    for suffix, (start, name) in files.items():
        file = tail.append(start + 60, start + 100, name)
        first, second = tail.folder / f"{name}.1", tail.folder / f"{name}.2"
        copytruncate(file, first, tail.sample.lines[start + 100 : start + 180])
        first.rename(second)
        if suffix:
            compress(second, suffix)
        copytruncate(file, first, tail.sample.lines[start + 180 : start + 190])
    tail.pass_by("*.log*", [start + number for start, _ in files.values() for number in range(190)])


def test_copytruncate_again_and_again_while_running_loses_and_repeats_nothing(tail: Tail):
    tail.append(0, 50)
    tail.start(GLOB)
    tail.wait(50)
    sent = 50
    for number in range(6):
        with tail.held():  # so that no line comes between the copy and the truncation, and some are unread
            tail.append(sent, sent + 40)
            new = tail.sample.lines[sent + 40 : sent + 40 + 15 * (number + 1)]
            copytruncate(tail.file, tail.folder / f"app.ndjson.{number}", new)
            sent += 40 + len(new)
        tail.wait(sent)
    tail.stop(sent)


def test_a_copy_waits_for_the_truncation_of_its_original(tail: Tail):
    """Between the two the copy is in the glob, and the original is as it was."""
    tail.append(0, 60)
    tail.start(GLOB, input__rotate_wait_seconds=30)
    tail.wait(60)
    shutil.copy(tail.file, tail.folder / "app.ndjson.1")
    for number in (60, 61):  # a look that found the second of them began after the first had been found
        tail.append(number, number + 1, f"app.ndjson.other-{number}")
        tail.wait(number + 1)
    with tail.file.open("r+b") as out:
        out.truncate(0)
    tail.append(62, 90)
    tail.wait(90)
    tail.stop(90)


def test_a_copy_of_a_file_that_stays_is_a_file_of_its_own(tail: Tail, shipper: Shipper, service: Service):
    """Somebody took the file as the beginning of another one: what it has besides must arrive."""
    tail.append(0, 60)
    tail.start(GLOB, input__rotate_wait_seconds=0.1)
    tail.wait(60)
    shutil.copy(tail.file, tail.folder / "app.ndjson.more")
    tail.append(60, 80, "app.ndjson.more")
    tail.append(80, 100)
    tail.wait(100)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(100))
    state = shipper.read_state()
    assert (state.read, state.accepted, state.duplicates) == (160, 100, 60)


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
        for number in (1, 2, 3):
            with tail.held():
                writer.write(b"".join(tail.sample.lines[sent : sent + 10]))
                shutil.copy(tail.file, tail.folder / f"app.ndjson.{number}")
                os.truncate(tail.file, 0)
                writer.write(b"".join(tail.sample.lines[sent + 10 : sent + 20]))
                sent += 20
            tail.wait(sent)
        assert tail.file.read_bytes().startswith(b"\0" * 20_000), "the case was not exercised"
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


@pytest.mark.parametrize("new_lines", [1, 40], ids=["smaller", "bigger"])
def test_a_file_that_got_the_inode_of_a_deleted_one_while_stopped_is_read_from_its_start(tail: Tail, new_lines: int):
    tail.append(0, 10, "app.ndjson.a")
    inode = (tail.folder / "app.ndjson.a").stat().st_ino
    tail.pass_by("app.ndjson.*", 10)
    (tail.folder / "app.ndjson.a").unlink()
    take_inode(tail.folder / "app.ndjson.b", inode)
    tail.append(10, 10 + new_lines, "app.ndjson.b")
    tail.pass_by("app.ndjson.*", 10 + new_lines)


@pytest.mark.parametrize("suffix", ["", "gz"])
def test_files_that_got_each_other_s_inodes_are_told_apart_by_what_they_hold(tail: Tail, suffix: str):
    """A rotation that copies and compresses frees inodes, and the next file is given one of them at once."""
    paths = [tail.append(number * 10, number * 10 + 5, f"app.ndjson.{number}") for number in range(3)]
    wanted = [number * 10 + index for number in range(3) for index in range(5)]
    tail.pass_by(GLOB, wanted)
    inodes = [path.stat().st_ino for path in paths]
    for number, path in enumerate(paths):  # each holds now what its neighbour did, and more
        start = (number + 1) % 3 * 10
        data = b"".join(tail.sample.lines[start : start + 10])
        path.write_bytes(COMPRESSIONS[suffix](data) if suffix else data)
    assert [path.stat().st_ino for path in paths] == inodes
    tail.append(30, 35)
    tail.pass_by(GLOB, 35)


def test_a_file_smaller_than_its_fingerprint_stays_the_same_stream_while_it_grows_and_moves(
    tail: Tail, shipper: Shipper
):
    """One line of 40 bytes, then a record at a time; in between it is renamed, or moved by copying."""
    file = tail.file
    file.write_bytes(b"#" * 39 + b"\n")
    sizes = [40]
    for number, move in enumerate(("rename", "copy", "rename", "copy", "copy")):
        sent = number * 2
        tail.append(sent, sent + 1, file.name)
        tail.start(GLOB)
        tail.wait(sent + 1)
        tail.append(sent + 1, sent + 2, file.name)
        tail.wait(sent + 2)
        tail.stop(sent + 2, dead_lettered=1)
        sizes.append(file.stat().st_size)
        new = tail.folder / f"app.ndjson.{number}"
        if move == "rename":
            file.rename(new)
        else:
            shutil.copy(file, new)
            file.unlink()
        file = new
    assert sizes[1] < 1024 < sizes[-1], "the case was not exercised"
    assert len(shipper.read_state().checkpoints) == 1


@running_and_stopped
def test_files_with_equal_heads_and_equal_ends_lose_nothing_when_one_of_them_goes(
    tail: Tail, shipper: Shipper, service: Service, is_running: bool
):
    """A batch of test events at the head of each, more than a fingerprint; the rest is each file's own."""
    head = b"".join(tail.sample.lines[:5])
    for number in range(1, 5):
        path = tail.folder / f"app.ndjson.{number}"
        path.write_bytes(head)
        tail.append(number * 10, number * 10 + 10, path)
    wanted = [*range(5), *range(10, 50)]
    tail.start(GLOB, input__rotate_wait_seconds=0.1)
    tail.wait(wanted)
    if not is_running:
        assert tail.running.stop().returncode == 0
    (tail.folder / "app.ndjson.1").unlink()
    for number in range(5, 8):
        path = tail.folder / f"new.{number}"
        path.write_bytes(head)
        tail.append(number * 20, number * 20 + 20, path)  # longer than the one that has gone
        path.rename(tail.folder / f"app.ndjson.{number}")
    if not is_running:
        tail.start(GLOB, input__rotate_wait_seconds=0.1)
    wanted += range(100, 160)
    tail.wait(wanted)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(wanted))
    assert shipper.read_state().dead_letters == ()


@running_and_stopped
def test_a_new_file_that_begins_like_the_rotated_one_does_not_take_its_place(
    tail: Tail, shipper: Shipper, service: Service, is_running: bool
):
    """Every file begins with the same record, and of the old one no more had been read."""
    tail.append(0, 1)
    tail.start(NAME)
    tail.wait(1)
    if not is_running:
        tail.stop(1)
        _rotate_with_equal_heads(tail)
        tail.start(NAME)
    else:
        with tail.held():
            _rotate_with_equal_heads(tail)
    tail.wait(60)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(60))
    assert shipper.read_state().dead_letters == ()


def _rotate_with_equal_heads(tail: Tail) -> None:
    tail.append(1, 30)
    tail.file.rename(tail.folder / "app.ndjson.1")
    tail.append(0, 1)
    tail.append(30, 60)


@pytest.mark.parametrize("content", ["ndjson", "csv"])
def test_a_busy_file_that_begins_like_a_quiet_one_is_not_held_up(
    tail: Tail, shipper: Shipper, service: Service, content: str
):
    """It looks like a copy of the quiet one, and it never rests."""
    documents = [json.loads(line) for line in tail.sample.lines[:2000]]
    rows = [",".join(documents[0]).encode() + b"\n"] if content == "csv" else tail.sample.lines[:1]
    rows += [
        ",".join(str(value) for value in each.values()).encode() + b"\n" if content == "csv" else line
        for each, line in zip(documents[1:], tail.sample.lines[1:2000], strict=True)
    ]
    quiet, busy = tail.folder / "app.ndjson.quiet", tail.folder / "app.ndjson.busy"
    quiet.write_bytes(rows[0])
    tail.start(GLOB, input__rotate_wait_seconds=0.5)
    tail.running.wait_until(lambda: told(tail.running, "source_opened", quiet), "the quiet one is open")
    tail.append(2000, 2001, "app.ndjson.more")
    tail.wait([2000])
    written = 0

    def write_until_first_arrives() -> bool:
        nonlocal written
        with busy.open("ab") as out:
            out.write(rows[written])
        written += 1
        return written > 2 and service.holds(tail.ids([1]))

    tail.running.wait_until(write_until_first_arrives, "the first of its lines arrives while it grows", limit_s=5)
    wanted = [*range(1 if content == "csv" else 0, written), 2000]
    tail.wait(wanted)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(wanted))
    assert shipper.read_state().dead_letters == ()


def test_blanks_alone_never_make_a_file_a_known_one(tail: Tail, shipper: Shipper):
    """The known one was blank in its head and before its checkpoint, and so is the new one; between lie records."""
    kinds = [b"\n", b"\0", b" \n", b"\r\n"]
    for number, blank in enumerate(kinds):
        blanks = (blank * 4000)[:4000]
        old = tail.folder / f"app.ndjson.{number}"
        old.write_bytes(blanks + b"".join(tail.sample.lines[number * 100 : number * 100 + 20]) + blanks + b"\n")
    wanted = [number * 100 + index for number in range(len(kinds)) for index in range(20)]
    tail.pass_by(GLOB, wanted)
    for number, blank in enumerate(kinds):
        old = tail.folder / f"app.ndjson.{number}"
        size = old.stat().st_size
        old.rename(shipper.folder / f"gone-{number}")  # so that its inode is not given out again
        new = (blank * 4000)[:2000] + b"".join(tail.sample.lines[number * 100 + 20 : number * 100 + 30])
        new += (blank * size)[: size - len(new) + 2000] + b"\n"
        assert len(new) > size
        (tail.folder / f"app.ndjson.new-{number}").write_bytes(new)
        wanted += range(number * 100 + 20, number * 100 + 30)
    tail.pass_by(GLOB, wanted)


@pytest.mark.parametrize(("lines", "include"), [(1, GLOB), (60, NAME)], ids=["small", "longer than the fingerprint"])
def test_a_file_moved_by_copying_with_the_original_gone_is_read_on(tail: Tail, include: str, lines: int):
    """Restored from a backup, or moved to a new disk with the same names: another inode."""
    tail.append(0, lines)
    tail.pass_by(include, lines)
    tail.append(lines, 100)
    copy = tail.folder / "copy"
    shutil.copy(tail.file, copy)
    tail.file.unlink()
    copy.rename(tail.file)
    tail.pass_by(include, 100)
    tail.append(100, 120)
    tail.pass_by(include, 120)


def test_files_moved_to_another_disk_are_read_on(tail: Tail, other_disk: Path):
    for number in range(3):
        tail.append(number * 100, number * 100 + 60, f"app.ndjson.{number}")
    wanted = [n + i for n in (0, 100, 200) for i in range(60)]
    tail.pass_by([GLOB, str(other_disk / GLOB)], wanted)
    for number in range(3):
        path = tail.append(number * 100 + 60, number * 100 + 100, f"app.ndjson.{number}")
        shutil.move(path, other_disk / path.name)
    tail.pass_by([GLOB, str(other_disk / GLOB)], range(300))


def test_hard_links_are_one_stream(tail: Tail, shipper: Shipper):
    tail.append(0, 20)
    os.link(tail.file, tail.folder / "app.ndjson.a")
    tail.start(GLOB, input__rotate_wait_seconds=0.1)
    tail.wait(20)
    os.link(tail.file, tail.folder / "app.ndjson.b")
    tail.append(20, 40, "app.ndjson.b")
    tail.wait(40)
    tail.file.unlink()
    tail.append(40, 60, "app.ndjson.a")
    tail.wait(60)
    tail.stop(60)
    (tail.folder / "app.ndjson.a").unlink()
    tail.append(60, 80, "app.ndjson.b")
    result = tail.pass_by(GLOB, 80)
    assert not warnings_of(result, tail.file)
    assert len(shipper.read_state().checkpoints) == 1


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
    per_file = 12_000
    for number in range(4):
        tail.append(10 + number * per_file, 10 + (number + 1) * per_file, f"app.ndjson.{number}")
    tail.running.wait_until(lambda: fake.requests > 1, "a request")
    paths = [tail.folder / f"app.ndjson.{number}" for number in range(4)]
    tail.running.wait_until(lambda: sum(len(told(tail.running, "source_opened", p)) for p in paths) == 4, "all open")
    for path in paths:
        path.unlink()
    tail.running.wait_until(lambda: sum("(deleted)" in name for name in open_files(tail.running)) == 4, "all are held")
    fake.release()
    wanted = tail.ids(10 + 4 * per_file)
    tail.running.wait_until(lambda: len(fake.event_ids()) >= len(wanted), "all events", limit_s=20)
    tail.running.wait_until(lambda: open_files(tail.running) == baseline, "the descriptors are closed")
    result = tail.running.stop()
    assert result.returncode == 0
    assert sorted(fake.event_ids()) == sorted(wanted)
    assert shipper.read_state().read == len(wanted)


def test_a_symlink_that_is_turned_to_another_file_gives_the_rest_of_the_old_one(tail: Tail):
    link = tail.folder / "app.ndjson"
    _turn(link, tail.append(0, 20, "1.log"))
    tail.start(NAME)
    tail.wait(20)
    with tail.held():
        tail.append(20, 40, "1.log")
        _turn(link, tail.append(40, 60, "2.log"))
    tail.wait(60)
    tail.append(60, 70, "1.log")  # late
    tail.append(70, 80, "2.log")
    tail.wait(80)
    tail.stop(80)
    tail.append(80, 90, "2.log")
    _turn(link, tail.append(90, 100, "3.log"))
    tail.pass_by(NAME, 100)


def test_a_symlink_to_another_folder_that_was_turned_while_stopped_gives_the_rest_of_the_old_one(tail: Tail):
    """As the kubelet does it: the link is in one folder, and the files that it rotates in another."""
    pods = tail.folder.parent / "pods"
    pods.mkdir()
    link = tail.folder / "app.ndjson"
    _turn(link, tail.append(0, 20, pods / "0.log"))
    tail.pass_by(NAME, 20)
    tail.append(20, 40, pods / "0.log")
    (pods / "0.log").rename(pods / "0.log.20260101")
    tail.append(40, 60, pods / "0.log")
    tail.pass_by(NAME, 60)
    tail.append(60, 70, pods / "0.log")
    _turn(link, tail.append(70, 80, pods / "1.log"))
    tail.pass_by(NAME, 80)


def _turn(link: Path, target: Path) -> None:
    new = link.with_name("link.new")
    new.symlink_to(target)
    new.rename(link)


def test_what_is_no_regular_file_is_refused_once_and_the_others_go_on(tail: Tail):
    os.mkfifo(tail.folder / "app.ndjson.fifo")
    (tail.folder / "app.ndjson.null").symlink_to("/dev/null")
    (tail.folder / "app.ndjson.zero").symlink_to("/dev/zero")
    (tail.folder / "app.ndjson.loop").symlink_to("app.ndjson.loop")
    (tail.folder / "app.ndjson.nowhere").symlink_to("nothing-there")
    refused = ["fifo", "null", "zero", "socket"]
    with socket.socket(socket.AF_UNIX) as listener:
        descriptor = os.open(tail.folder, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/app.ndjson.socket")  # a socket's path has 107 bytes at most
        finally:
            os.close(descriptor)
        tail.start(GLOB, input__poll_interval_seconds=0.05)
        for number in range(10):  # each of them found by a look of its own
            tail.append(number, number + 1, f"app.ndjson.{number}")
            tail.wait(number + 1)
        result = tail.stop(10)
    for name in refused:
        path = tail.folder / f"app.ndjson.{name}"
        (warning,) = warnings_of(result, path)
        assert warning["event"] == "source_refused", name
        assert str(path) in warning["error"], name
    assert len(warnings_of(result, tail.folder / "app.ndjson.loop")) <= 1
    assert not warnings_of(result, tail.folder / "app.ndjson.nowhere")


def test_a_file_replaced_by_a_folder_and_back_ends_nothing(tail: Tail):
    tail.append(0, 10)
    tail.start(GLOB, input__rotate_wait_seconds=0.1)
    tail.wait(10)
    with tail.held():
        tail.append(10, 20)
        tail.file.unlink()
        tail.file.mkdir()
    tail.append(20, 30, "app.ndjson.other")
    tail.wait(30)
    tail.running.wait_until(lambda: told(tail.running, "source_closed", tail.file), "the file is closed")
    tail.file.rmdir()
    tail.append(30, 40)
    tail.wait(40)
    tail.stop(40)


def test_a_file_whose_permission_is_lost_is_said_once_and_read_on_when_it_comes_back(tail: Tail):
    prefix = where_permissions_hold()
    tail.append(0, 10)
    tail.start(GLOB, prefix=prefix)
    tail.wait(10)
    tail.stop(10)
    tail.append(10, 20)
    tail.file.chmod(0)
    tail.start(GLOB, prefix=prefix, input__poll_interval_seconds=0.05)
    for number in range(20, 30):  # each of them found by a look of its own
        tail.append(number, number + 1, f"app.ndjson.{number}")
        tail.wait([*range(10), *range(20, number + 1)])
    (warning,) = warnings_of(tail.running, tail.file)
    assert warning["event"] == "source_refused"
    assert "ermission" in warning["error"]
    tail.file.chmod(0o600)
    tail.wait(30)
    tail.append(30, 40)
    tail.wait(40)
    assert len(warnings_of(tail.stop(40), tail.file)) == 1


@running_and_stopped
def test_a_folder_whose_permission_is_lost_for_a_while_costs_nothing(tail: Tail, is_running: bool):
    prefix = where_permissions_hold()
    tail.append(0, 10)
    probe = tail.folder.parent / "probe"
    probe.mkdir()
    include = [GLOB, str(probe / "*")]
    start = partial(tail.start, include, prefix=prefix, input__rotate_wait_seconds=0.1)
    start()
    tail.wait(10)
    if not is_running:
        tail.stop(10)
    with tail.file.open("ab") as writer:
        tail.folder.chmod(0)
        try:
            if not is_running:
                start()
            for number in range(10, 20):  # each of them found by a look of its own
                tail.append(number, number + 1, probe / str(number))
                tail.wait(number + 1)
            writer.write(b"".join(tail.sample.lines[20:30]))
        finally:
            tail.folder.chmod(0o700)
    tail.wait(30)
    tail.append(30, 40)
    tail.wait(40)
    tail.stop(40)


# Compressed -------------------------------------------------------------------------------------------------------

ARCHIVED = {suffix: number * 1000 for number, suffix in enumerate(COMPRESSIONS)}  # `gz.log` has lines 0 to 999, ...


def lines_of_all(*ranges: tuple[int, int]) -> list[int]:
    """These lines of each of the files."""
    return [first + number for first in ARCHIVED.values() for start, end in ranges for number in range(start, end)]


def append_to_all(tail: Tail, start: int, end: int) -> None:
    for suffix, first in ARCHIVED.items():
        tail.append(first + start, first + end, f"{suffix}.log")


def compress_all(tail: Tail, number: int = 1) -> None:
    for suffix in ARCHIVED:
        plain = (tail.folder / f"{suffix}.log").rename(tail.folder / f"{suffix}.log.{number}")
        compress(plain, suffix)


@pytest.mark.parametrize(
    "include",
    ["*.log*", [f"{suffix}.log" for suffix in COMPRESSIONS]],
    ids=["archives in the glob", "archives beside it"],
)
def test_a_file_rotated_and_compressed_while_stopped_is_read_on_where_it_was_left(tail: Tail, include: str | list[str]):
    append_to_all(tail, 0, 60)
    tail.pass_by(include, lines_of_all((0, 60)))
    append_to_all(tail, 60, 100)
    compress_all(tail)
    append_to_all(tail, 100, 120)
    tail.pass_by(include, lines_of_all((0, 120)))
    append_to_all(tail, 120, 130)
    tail.pass_by(include, lines_of_all((0, 130)))


def test_the_half_of_a_long_file_that_was_not_read_is_found_in_the_compressed_one(tail: Tail, shipper: Shipper):
    """Far behind what is decompressed at once."""
    tail.append(0, 12_000)
    tail.pass_by(NAME, 12_000)
    position = tail.file.stat().st_size
    assert position > 4 << 20
    tail.append(12_000, 20_000)
    compress(tail.file.rename(tail.folder / "old"), "gz")
    tail.pass_by(NAME, 20_000)
    ((*_, checkpoint),) = shipper.read_state().checkpoints
    assert checkpoint == sum(map(len, tail.sample.lines[:20_000])), "not in bytes of the content"


def test_a_file_that_was_read_to_its_end_and_then_compressed_is_not_read_again(tail: Tail):
    append_to_all(tail, 0, 100)
    tail.pass_by("*.log*", lines_of_all((0, 100)))
    compress_all(tail)
    append_to_all(tail, 100, 120)
    tail.start("*.log*")
    tail.wait(lines_of_all((0, 120)))
    for suffix in ARCHIVED:
        (tail.folder / f"{suffix}.log.1.{suffix}").rename(tail.folder / f"{suffix}.log.2.{suffix}")
    for end in (121, 122):  # a look that found the second lines in new files began after that
        for suffix, first in ARCHIVED.items():
            tail.append(first + end - 1, first + end, f"{suffix}.log.other-{end}")
        tail.wait(lines_of_all((0, end)))
    tail.stop(lines_of_all((0, 122)))
    append_to_all(tail, 122, 130)
    tail.pass_by("*.log*", lines_of_all((0, 130)))


def test_a_file_rotated_and_compressed_while_it_is_followed_is_read_once(tail: Tail):
    """Twice: unread lines were in it when it was compressed, and long after it had been read and closed."""
    append_to_all(tail, 0, 60)
    tail.start("*.log*", input__rotate_wait_seconds=0.1)
    tail.wait(lines_of_all((0, 60)))
    with tail.held():
        append_to_all(tail, 60, 100)
        compress_all(tail)
        append_to_all(tail, 100, 120)
    tail.wait(lines_of_all((0, 120)))
    for suffix in ARCHIVED:
        (tail.folder / f"{suffix}.log").rename(tail.folder / f"{suffix}-outside-the-glob")
    append_to_all(tail, 120, 130)
    tail.wait(lines_of_all((0, 130)))
    tail.running.wait_until(lambda: len(told(tail.running, "source_closed")) >= 2 * len(ARCHIVED), "all are closed")
    for suffix in ARCHIVED:
        compress(tail.folder / f"{suffix}-outside-the-glob", suffix, tail.folder / f"{suffix}.log.2.{suffix}")
    for end in (131, 132):  # a look that found the second lines in new files began after that
        for suffix, first in ARCHIVED.items():
            tail.append(first + end - 1, first + end, f"{suffix}.log.other-{end}")
        tail.wait(lines_of_all((0, end)))
    tail.stop(lines_of_all((0, 132)))


def test_a_compressed_file_that_is_still_being_written_is_waited_for(tail: Tail):
    """One of a file that was read half, one of a new file; it is no error, and nothing is read twice."""
    append_to_all(tail, 0, 60)
    tail.pass_by("*.log*", lines_of_all((0, 60)))
    rests = {}
    for suffix, first in ARCHIVED.items():
        plain = tail.append(first + 60, first + 700, f"{suffix}.log")
        new = b"".join(tail.sample.lines[first + 700 : first + 900])
        for name, data in ((f"{suffix}.log.1.{suffix}", plain.read_bytes()), (f"{suffix}.log.new.{suffix}", new)):
            packed = COMPRESSIONS[suffix](data)
            (tail.folder / name).write_bytes(packed[: len(packed) // 2])
            rests[tail.folder / name] = packed[len(packed) // 2 :]
        plain.unlink()
    tail.start("*.log*")
    for number in (9000, 9001):  # a look that found the second of them began after the first had been found
        tail.append(number, number + 1, f"{number}.log")
        tail.wait([*lines_of_all((0, 60)), *range(9000, number + 1)])
    for path, rest in rests.items():
        with path.open("ab") as out:
            out.write(rest)
    tail.wait([*lines_of_all((0, 900)), 9000, 9001])
    result = tail.stop([*lines_of_all((0, 900)), 9000, 9001])
    said = {line["event"] for path in rests for line in warnings_of(result, path)}
    assert said <= {"source_replaced"}, "it may have been given the inode of another file"


# Never an input ---------------------------------------------------------------------------------------------------


def test_what_shipper_writes_itself_is_never_an_input(tail: Tail, shipper: Shipper, service: Service):
    """Its log and its output lie in the glob, and its state, once by its own name and once behind a link."""
    shipper.state.mkdir(mode=0o700)
    (tail.folder / "app.ndjson.state").symlink_to(shipper.state)
    (tail.folder / "app.ndjson.db").symlink_to(shipper.state / "state.db")
    tail.file.write_bytes(b'{"bad": 1}\n')
    tail.append(0, 10)
    os.link(tail.file, tail.folder / "app.ndjson.link")  # a second name of an input is none of its own files
    include = [GLOB, "app.ndjson.*/**", str(shipper.folder / "output" / "*"), str(shipper.state / "**")]
    tail.start(include, input__poll_interval_seconds=0.05)
    assert list((shipper.folder / "output").iterdir()), "its log lies elsewhere"
    for number in range(10, 20):  # each of them found by a look of its own
        tail.append(number, number + 1, f"app.ndjson.{number}")
        tail.wait(number + 1)
    tail.stop(20, dead_lettered=1)
    assert len(shipper.read_state().dead_letters) == 1
    tail.start(include)
    tail.append(20, 30)
    tail.wait(30)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(30))


@pytest.mark.parametrize("command", ["backfill", "run"])
def test_dead_letters_that_were_exported_into_the_state_directory_are_never_an_input(
    tail: Tail, shipper: Shipper, service: Service, command: str
):
    tail.file.write_bytes(b"".join(tail.sample.lines[:10]) + b'{"bad": 1}\n')
    assert shipper.backfill(tail.file).counts() == (11, 10, 1, 0, 0)
    exported = shipper.run("dead-letters", "export")
    assert event_ids(tail.sample.lines[:1])[0] not in exported.stdout
    (shipper.state / "dead-letters.ndjson").write_text(exported.stdout)
    tail.append(10, 20)
    if command == "backfill":
        result = shipper.backfill(shipper.folder / "logs", shipper.folder / "**" / "*.ndjson")
        assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    else:
        tail.start([GLOB, str(shipper.state / "*"), str(shipper.folder / "**" / "*.ndjson")])
        tail.wait(20)
        tail.stop(20, dead_lettered=1)
    service.assert_holds_exactly(tail.ids(20))
