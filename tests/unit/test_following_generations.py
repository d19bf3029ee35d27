"""Unmatched generations: files created and rotated between two scans."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from shipper.sources.completion import Completion
from tests.e2e.files import compress
from tests.unit.follower_bench import ROTATE_WAIT_S, Bench, lines, settle

NAME = "app.log"
LATER = 2000.0


def numbered(path: Path, generation: int) -> Path:
    """`rotate`: each is renamed to the next number."""
    for number in range(generation, 0, -1):
        old = path.with_name(f"{path.name}.{number}")
        if old.exists():
            old.rename(path.with_name(f"{path.name}.{number + 1}"))
    return path.rename(path.with_name(f"{path.name}.1"))


def dated(path: Path, generation: int) -> Path:
    """`dateext`"""
    return path.rename(path.with_name(f"{path.name}-2026110{generation}"))


def compressed(path: Path, generation: int) -> Path:
    return compress(numbered(path, generation), "gz", path.with_name(f"{path.name}.{generation}0.gz"))


def copied(path: Path, generation: int) -> Path:
    copy = shutil.copy(path, path.with_name(f"{path.name}-2026110{generation}"))
    path.write_bytes(b"")
    return Path(copy)


ROTATIONS = [numbered, dated, compressed, copied]
Rotate = Callable[[Path, int], Path]


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.write(NAME, lines(0, 10))
    bench.start(NAME)
    assert bench.ship(1.0, 2.0) == lines(0, 10)
    return bench


def ship_late(bench: Bench, now: float) -> bytes:
    """Ship until no wait is left, and give the lines in their order by number."""
    return b"".join(sorted(bench.ship(*(now + 3 * look for look in range(8))).splitlines(keepends=True)))


def copies_in(logs: list[MutableMapping[str, Any]]) -> list[str]:
    return sorted(Path(entry["path"]).name for entry in logs if entry["event"] == "source_is_copy")


def copy_once(bench: Bench) -> Path:
    """Read the file, and copy it; return the copy, which is not read."""
    bench.write(NAME, lines(10, 300))
    bench.ship(3.0)
    copy = Path(shutil.copy(bench.folder / NAME, bench.folder / f"{NAME}.1"))
    assert ship_late(bench, 10.0) == b""
    return copy


def lose_other(bench: Bench, data: bytes) -> Path:
    """Write another file of which nothing is read, and put it away; return where, so that its inode is not reused."""
    bench.stop()
    other = bench.write("other.log", data)
    bench.start("*.log")
    assert ship_late(bench, 10.0) == b""
    kept = other.rename(bench.folder.with_name("kept"))
    assert ship_late(bench, 50.0) == b""
    return kept


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_a_file_created_and_rotated_between_two_looks_is_read_once_and_not_reported_as_delivered_before(
    bench: Bench, rotate: Rotate, is_running: bool
):
    """Several generations come and go between two looks, of which each has records of its own; and what comes later."""
    assert bench.is_delivered(LATER)
    path = bench.folder / NAME
    with bench.stopped(not is_running):
        for generation in range(1, 5):
            bench.write(NAME, lines(10 * generation, 10 * generation + 10))
            rotate(path, generation)
            assert not bench.is_delivered(LATER)
        bench.write(NAME, lines(50, 60))
        assert not bench.is_delivered(LATER)
    assert ship_late(bench, 10.0) == lines(10, 60)
    assert bench.is_delivered(LATER)
    with bench.stopped():
        bench.write(NAME, lines(60, 70))
    assert ship_late(bench, 100.0) == lines(60, 70)
    assert bench.is_delivered(LATER)


def test_generations_of_a_glob_are_found_even_if_the_original_does_not_exist_now(bench: Bench):
    """The application has not begun its next file."""
    (bench.folder / "a").mkdir()
    bench.stop()
    live = bench.write("a/acquisitions-1.log", lines(100, 110))
    bench.start("*/acquisitions*.log")
    bench.ship(1.0, 2.0)
    with bench.stopped():
        bench.write("a/acquisitions-1.log", lines(110, 120))
        live.rename(f"{live}.2")
        bench.write("a/acquisitions-1.log", lines(120, 130))
        live.rename(f"{live}.1")
    assert ship_late(bench, 10.0) == lines(110, 130)


def test_a_copy_that_stays_beside_its_original_is_not_read(bench: Bench):
    """logrotate's `copy`: plain and compressed; when the original is truncated after all, its rest is read there."""
    bench.write(NAME, lines(10, 300))
    bench.ship(3.0)
    path = bench.folder / NAME
    with capture_logs() as logs:
        shutil.copy(path, bench.folder / f"{NAME}.1")
        compress(Path(shutil.copy(path, bench.folder / "to-be")), "gz", bench.folder / f"{NAME}.2.gz")
        bench.write(NAME, lines(300, 310))
        assert ship_late(bench, 10.0) == lines(300, 310)
    assert copies_in(logs) == [f"{NAME}.1", f"{NAME}.2.gz"]
    assert bench.is_delivered(LATER)
    with bench.stopped():
        bench.write(NAME, lines(310, 320))
    assert ship_late(bench, 100.0) == lines(310, 320)


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("suffix", ["", "gz"])
def test_a_copy_that_continues_a_deleted_copy_is_not_read(bench: Bench, suffix: str, is_running: bool):
    """logrotate's `copy`, which deletes the oldest copy: the newest one begins like it, and so does the original."""
    path, oldest, newest = bench.folder / NAME, copy_once(bench), bench.folder / f"{NAME}.2"
    bench.write(NAME, lines(300, 310))
    assert bench.ship(50.0) == lines(300, 310)
    with bench.stopped(not is_running):
        copy = Path(shutil.copy(path, bench.folder / "to-be"))
        if suffix:
            copy = compress(copy, suffix, bench.folder / f"to-be.{suffix}")
        oldest.unlink()  # now, so that the copy does not get its inode
        if is_running:
            bench.ship(51.0)
        bench.write(NAME, lines(310, 320))
        copy.rename(newest)
    with capture_logs() as logs:
        assert ship_late(bench, 60.0) == lines(310, 320)
    assert copies_in(logs) == [newest.name]


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("name", [f"{NAME}.1", f"{NAME}.2"])
def test_a_copy_with_the_inode_of_an_earlier_copy_is_not_read(bench: Bench, name: str, is_running: bool):
    """It overwrites the earlier copy, or the file system gives it the inode of the deleted one."""
    path, earlier, copy = bench.folder / NAME, copy_once(bench), bench.folder / name
    bench.write(NAME, lines(300, 310))
    assert bench.ship(50.0) == lines(300, 310)
    with bench.stopped(not is_running):
        inode = earlier.stat().st_ino
        earlier.rename(copy)
        shutil.copyfile(path, copy)
        assert copy.stat().st_ino == inode
        bench.write(NAME, lines(310, 320))
    assert ship_late(bench, 60.0) == lines(310, 320)
    bench.restart(NAME)
    assert ship_late(bench, 100.0) == b""
    assert bench.is_delivered(LATER)


@pytest.mark.parametrize("is_seen_empty", [True, False])
@pytest.mark.parametrize("unread", [b"", b"{"])
@pytest.mark.parametrize("name", ["copy.log", "other.log"])
@pytest.mark.parametrize("suffix", ["", "gz"])
def test_a_copy_with_the_inode_of_a_file_of_which_nothing_was_read_is_not_read(
    bench: Bench, suffix: str, name: str, unread: bytes, is_seen_empty: bool
):
    """The file system gives it the inode of the deleted file; and it may be seen before it is written."""
    kept, path = lose_other(bench, unread), bench.folder / NAME
    whole = path.read_bytes()
    copy = kept.rename(bench.folder / name)  # as if the copy had been given its inode
    copy.write_bytes(b"")
    if is_seen_empty:
        assert bench.ship(80.0) == b""
    copy.write_bytes(gzip.compress(whole) if suffix else whole)
    path.unlink()
    assert ship_late(bench, 90.0) == b""
    bench.restart("*.log")
    assert ship_late(bench, 130.0) == b""
    assert bench.is_delivered(LATER)


def test_a_file_of_which_nothing_was_read_is_read_from_its_start_when_it_comes_back(bench: Bench):
    other = lose_other(bench, b"{").rename(bench.folder / "other.log")
    bench.write(other.name, lines(10, 20)[1:])
    assert ship_late(bench, 90.0) == lines(10, 20)
    bench.restart("*.log")
    assert ship_late(bench, 130.0) == b""
    assert bench.is_delivered(LATER)


def test_an_archive_with_the_inode_of_its_original_waits_while_there_is_a_copy(bench: Bench):
    """It was moved by copying and then compressed while shipper was stopped; the copy is deleted once it has looked."""
    bench.stop()
    path = bench.folder / NAME
    copy = Path(shutil.copy(path, bench.folder / "copy.log"))
    archive = path.rename(bench.folder / "archive.log")  # as if the archive had been given its inode
    archive.write_bytes(gzip.compress(copy.read_bytes()))
    bench.start("*.log")
    copy.unlink()
    assert ship_late(bench, 50.0) == b""
    bench.restart("*.log")
    assert ship_late(bench, 90.0) == b""


def test_a_deleted_copy_that_continued_another_one_is_no_gap(bench: Bench):
    path, oldest, newest = bench.folder / NAME, copy_once(bench), bench.folder / f"{NAME}.2"
    with bench.stopped():
        bench.write(NAME, lines(300, 310))
        shutil.copy(path, newest)
        oldest.unlink()
    assert bench.look(50.0), "read, and not settled"
    bench.look(51.0)
    newest.unlink()
    bench.stop()
    with capture_logs() as logs:
        bench.start(NAME)
        assert ship_late(bench, 60.0) == lines(300, 310)
        bench.write(NAME, lines(310, 320))
        bench.look(90.0)
        bench.look(91.0)
        with bench.stopped():
            path.unlink()
        assert ship_late(bench, 100.0) == b""
    gaps = [(Path(entry["path"]).name, entry["bytes"]) for entry in logs if entry["event"] == "source_unreachable"]
    assert gaps == [(NAME, len(lines(310, 320)))], "only that of the original"


def test_a_truncated_file_continues_in_its_copy_although_an_earlier_copy_was_deleted(bench: Bench):
    """The file and the earlier copy are lost with the same checkpoint; only the file has records in flight."""
    path, earlier, copy = bench.folder / NAME, copy_once(bench), bench.folder / f"{NAME}.2"
    bench.write(NAME, lines(300, 310))
    in_flight = bench.look(50.0)
    assert b"".join(chunk.data for chunk in in_flight) == lines(300, 310)
    shutil.copy(path, copy)
    earlier.unlink()
    assert bench.read(51.0) == b"", "the earlier copy is lost"
    bench.write(NAME, lines(400, 405), mode="wb")
    with capture_logs() as logs:
        assert ship_late(bench, 52.0) == lines(400, 405)
    found = [Path(entry["formerly"]).name for entry in logs if entry["event"] == "source_found_again"]
    assert found == [NAME]
    settle(bench.store, in_flight)


def test_a_file_moved_by_copying_before_its_first_complete_line_was_read_is_read_once(bench: Bench):
    bench.start("*.log")
    path = bench.write("torn.log", lines(10, 11)[:1])
    assert bench.ship(10.0, 20.0) == b"", "it is open, and has no complete line"
    bench.write("torn.log", lines(10, 20)[1:])
    shutil.copy(path, f"{path}.1")
    path.unlink()
    assert ship_late(bench, 30.0) == lines(10, 20)


@pytest.mark.parametrize("has_successor", [False, True])
@pytest.mark.parametrize("suffix", ["", "gz"])
def test_a_copy_is_not_read_if_its_original_is_renamed_before_the_copy_is_identified(
    bench: Bench, suffix: str, has_successor: bool
):
    """The original grows until it is renamed, so its new name is not known yet when the copy is compared."""
    bench.write(NAME, lines(10, 300))
    bench.ship(3.0)
    path, copy = bench.folder / NAME, bench.folder / f"{NAME}-20261101"
    shutil.copy(path, copy)
    if suffix:
        compress(copy, suffix, copy.with_name(f"{copy.name}.{suffix}"))
    assert bench.ship(10.0) == b""
    bench.write(NAME, lines(300, 310))
    assert bench.ship(14.0) == lines(300, 310)
    path.rename(f"{path}.1")
    if has_successor:
        bench.write(NAME, lines(310, 320))
    with capture_logs() as logs:
        assert ship_late(bench, 15.5) == (lines(310, 320) if has_successor else b"")
    assert copies_in(logs)


def test_a_partly_read_generation_is_resumed_after_a_restart(bench: Bench):
    bench.stop()
    for number in (1, 2):
        bench.write(NAME, lines(10 * number, 10 * number + 10))
        dated(bench.folder / NAME, number)
    bench.write(NAME, lines(30, 40))
    bench.start(NAME)
    chunks = bench.look(20.0) + bench.look(40.0) + bench.look(60.0)
    assert b"".join(sorted(chunk.data for chunk in chunks)) == lines(10, 40)
    settle(bench.store, chunks[:2])
    bench.restart(NAME)
    assert ship_late(bench, 100.0) == chunks[2].data


def test_a_rotated_file_whose_number_is_before_the_extension_is_only_reported_if_it_was_not_read(bench: Bench):
    """Some rotators keep the extension last; compressed or not, a file that was read is no unknown one."""
    path, unread = bench.folder / NAME, bench.folder / "app-2026-11-01T14-00-03.123.log"
    with capture_logs() as logs:
        bench.write(NAME, lines(10, 20))
        assert bench.ship(3.0) == lines(10, 20)
        path.rename(bench.folder / "app-2026-11-01T14-00-00.123.log")
        bench.write(NAME, lines(20, 30))
        assert bench.ship(4.0, 5.0) == lines(20, 30)
        with bench.stopped():
            compress(path, "gz", bench.folder / "app-2026-11-01T14-00-01.123.log.gz")
            bench.write(NAME, lines(30, 40))
        assert ship_late(bench, 10.0) == lines(30, 40)
        with bench.stopped():
            path.rename(bench.folder / "app.2.log")
            bench.write(NAME, lines(40, 50)).rename(unread)
            bench.write(NAME, lines(50, 60))
        assert ship_late(bench, 50.0) == lines(50, 60)
    assert bench.snapshot(LATER).beside == [str(unread)]
    assert {entry["path"] for entry in logs if entry["event"] == "source_beside_unread"} == {str(unread)}


@pytest.mark.parametrize("name", [f"{NAME}.1", "app.1.log"])
def test_what_is_written_to_a_rotated_file_long_after_it_was_closed_is_read(bench: Bench, name: str):
    """The application does not reopen its file; or the rotator uses its files in turn, and overwrites the oldest."""
    (bench.folder / NAME).rename(bench.folder / name)
    assert ship_late(bench, 10.0) == b""
    bench.write(name, lines(10, 20))
    assert not bench.is_delivered(LATER)
    bench.write(NAME, lines(20, 30))
    assert ship_late(bench, 50.0) == lines(10, 30)
    assert bench.is_delivered(LATER)
    if name.startswith(NAME):
        bench.write(name, lines(30, 45), mode="wb")
        assert ship_late(bench, 100.0) == lines(30, 45)


def test_a_rotated_file_with_an_incomplete_last_line_does_not_stay_open(bench: Bench):
    (bench.folder / NAME).rename(bench.folder / f"{NAME}.1")
    bench.write(f"{NAME}.1", b'{"EventId":"torn')
    bench.write(NAME, lines(10, 20))
    assert ship_late(bench, 10.0) == lines(10, 20)
    for now in (100.0, 110.0, 120.0, 130.0):
        ship_late(bench, now)
        open_names = {file.name for file in bench.follower.files}
    assert open_names == {str(bench.folder / NAME)}


# What is said of it -----------------------------------------------------------------------------------------------


def test_a_file_compressed_while_stopped_delays_delivery_until_it_is_read(bench: Bench):
    bench.stop()
    bench.write(NAME, lines(10, 20))
    compress(bench.folder / NAME, "gz", bench.folder / "2026-11-01.gz")
    snapshot = bench.snapshot(LATER)
    assert not snapshot.is_delivered(LATER)
    assert [Path(stream.path).name for stream in snapshot.late_streams(LATER)] == [NAME]
    bench.start(NAME)
    assert ship_late(bench, 10.0) == lines(10, 20)
    assert bench.is_delivered(LATER)


def forget_the_ends(bench: Bench) -> None:
    """What is left by a process that ended after the last record was settled, and before it looked for more."""
    bench.stop()
    with bench.store._db as db:
        db.execute("UPDATE streams SET ended_size = -1, ended_ns = -1, settled_until = NULL")
        db.execute("UPDATE streams SET size = 0 WHERE compression != ''")


def test_a_settled_archive_is_reported_as_delivered_after_its_end_was_found(bench: Bench):
    bench.stop()
    for generation in (1, 2):
        bench.write(NAME, lines(10 * generation, 10 * generation + 10))
        compressed(bench.folder / NAME, generation)
    bench.start(NAME)
    assert ship_late(bench, 10.0) == lines(10, 30)
    forget_the_ends(bench)
    assert not bench.is_delivered(LATER)
    bench.start(NAME)
    assert ship_late(bench, 100.0) == b""
    assert bench.is_delivered(LATER)


def test_a_settled_rotated_file_is_completed_after_a_restart_finds_its_end(bench: Bench):
    bench.restart(NAME, completion=Completion("delete"))
    bench.ship(3.0)
    old = (bench.folder / NAME).rename(bench.folder / f"{NAME}.1")
    bench.write(NAME, lines(10, 20))
    assert bench.ship(4.0, 4.5) == lines(10, 20)
    forget_the_ends(bench)
    assert old.exists()
    bench.start(NAME, completion=Completion("delete"))
    bench.ship(5.0, 5.0 + ROTATE_WAIT_S, 6.0 + ROTATE_WAIT_S)
    assert not old.exists()
    assert (bench.folder / NAME).exists()
