"""Following files step by step: regressions with lost, repeated or delayed data."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from shipper.model.records import Chunk, Stream
from shipper.sources.completion import Completion
from shipper.sources.content import Content
from shipper.sources.reader import READ_BYTES, compare
from tests.unit.follower_bench import ROTATE_WAIT_S, Bench, lines, settle


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.start()
    return bench


def leave_by_rename(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


@pytest.mark.parametrize("leave", [leave_by_rename, Path.unlink], ids=["renamed", "deleted"])
@pytest.mark.parametrize("later_s", [0.0, 1.0, 3600.0])
def test_data_written_before_a_file_left_is_read_even_after_a_long_time_without_looks(
    bench: Bench, leave: Callable[[Path], None], later_s: float
):
    path = bench.write("a.log", lines(0, 10))
    assert bench.read(1.0) == lines(0, 10)
    bench.look(2.0)
    # Now the service is away, and the reader waits to hand over a chunk of another file.
    bench.write("a.log", lines(10, 20))
    leave(path)
    assert bench.read(2.0 + later_s) == lines(10, 20)


@pytest.mark.parametrize("leave", [leave_by_rename, Path.unlink], ids=["renamed", "deleted"])
def test_a_file_that_left_is_closed_after_the_rotate_wait(bench: Bench, leave: Callable[[Path], None]):
    path = bench.write("a.log", lines(0, 10))
    bench.look(1.0)
    leave(path)
    bench.look(1.0 + ROTATE_WAIT_S - 0.1)
    assert len(bench.follower.files) == 1
    bench.look(1.0 + ROTATE_WAIT_S)
    assert not bench.follower.files


def return_after_the_wait(bench: Bench, path: Path) -> None:
    """Let a file leave until it is closed, and return."""
    leave_by_rename(path)
    bench.look(2.0 + ROTATE_WAIT_S)
    assert not bench.follower.files
    path.with_suffix(".old").rename(path)


def test_a_known_file_that_leaves_and_returns_is_resumed(bench: Bench):
    path = bench.write("a.log", lines(0, 100))
    settle(bench.store, bench.look(1.0))
    bench.restart()
    bench.write("a.log", lines(100, 200))
    chunks = bench.look(2.0)
    assert b"".join(chunk.data for chunk in chunks) == lines(100, 200)
    settle(bench.store, chunks)
    return_after_the_wait(bench, path)
    bench.write("a.log", lines(200, 210))
    assert bench.read(20.0) == lines(200, 210)


@pytest.mark.parametrize("count", [5, READ_BYTES // 4], ids=["shorter", "grown past the old end"])
def test_a_truncation_within_an_endless_line_is_detected(bench: Bench, count: int):
    bench.write("a.log", b"x" * (2 * READ_BYTES))
    assert bench.look(1.0) == []
    bench.write("a.log", lines(0, count), mode="wb")
    assert b"".join(bench.read(2.0 + look) for look in range(5)) == lines(0, count)


def test_a_file_that_starts_with_a_hole_is_read_after_it(bench: Bench):
    """What copytruncate leaves of a writer that does not append but writes on at its old offset."""
    path = bench.folder / "a.log"
    with path.open("wb") as out:
        out.seek((1 << 40) + 17)
        out.write(lines(0, 5))
    data = b""
    at = 1.0
    while chunks := bench.look(at):
        assert not any(chunk.is_oversized for chunk in chunks)
        data += b"".join(chunk.data for chunk in chunks)
        at += 1
    assert data.lstrip(b"\0") == lines(0, 5)
    assert len(data) < READ_BYTES, "the hole is read, instead of skipped"
    assert [each.reader.offset for each in bench.follower.files] == [path.stat().st_size]


def test_many_files_are_followed_with_few_of_them_open(bench: Bench):
    follower = bench.restart(max_open=3)
    names = [f"{number}.log" for number in range(10)]
    for turn in range(4):
        for name in names:
            bench.write(name, f"{name} {turn}\n".encode())
        got: list[bytes] = []
        unopened = []
        for look in range(20):
            got += bench.read(turn * 100.0 + look).splitlines()
            assert len(follower.files) <= 3
            unopened.append(follower.backlog.has_unopened)
        assert (unopened[0], unopened[-1]) == (not turn, False)
        assert sorted(got) == sorted(f"{name} {turn}".encode() for name in names)


def test_a_copy_that_waited_for_room_is_compared_only_after_its_original_was_searched_for(bench: Bench):
    follower = bench.restart(max_open=1)
    bench.write("a.log", lines(0, 300))
    assert bench.read(1.0) == lines(0, 300)
    bench.write("b.log", b"another\n")
    bench.write("c.log", lines(0, 300) + b"more\n")  # about to replace a.log
    assert bench.read(2.0) == b"another\n"
    assert follower.is_crowded
    (bench.folder / "a.log").unlink()
    follower.check(3.0)
    assert not follower.is_crowded
    follower.check(3.0 + 2 * ROTATE_WAIT_S)
    assert follower.files.read(4.0) == []
    assert bench.read(4.0 + 2 * ROTATE_WAIT_S) == b"more\n"


def test_with_many_files_a_deleted_file_is_not_closed_before_its_end_is_read(bench: Bench):
    bench.restart(max_open=1)
    path = bench.write("a.log", lines(0, 3))
    assert bench.read(1.0) == lines(0, 3)
    bench.write("a.log", lines(3, 6))
    path.unlink()
    bench.write("b.log", b"another\n")
    got = b"".join(bench.read(2.0 + look) for look in range(20))
    assert sorted(got.splitlines()) == sorted([*lines(3, 6).splitlines(), b"another"])


def test_a_file_that_leaves_and_returns_with_pending_records_is_resumed(bench: Bench):
    path = bench.write("a.log", lines(0, 10))
    assert bench.read(1.0) == lines(0, 10)
    return_after_the_wait(bench, path)
    bench.write("a.log", lines(10, 20))
    assert bench.read(20.0) == lines(10, 20)


def test_unsaved_data_of_a_file_that_left_the_glob_is_read_again_after_a_crash(bench: Bench):
    path = bench.write("a.log", lines(0, 5))
    assert bench.ship(1.0) == lines(0, 5)
    bench.write("a.log", lines(5, 10))
    leave_by_rename(path)
    assert bench.read(2.0) == lines(5, 10)
    bench.look(2.0 + ROTATE_WAIT_S)
    assert not bench.follower.files
    bench.start()
    assert bench.read(20.0) == lines(5, 10)


def test_a_loaded_stream_is_the_same_file_unless_its_bytes_differ(bench: Bench):
    path = bench.write("a.log", lines(0, 200))
    settle(bench.store, bench.look(1.0))
    (stream,) = bench.store.streams.load("file")
    assert isinstance(stream, Stream)
    with path.open("rb") as opened:
        assert compare(Content(opened.fileno()), stream) == "same"
    with path.open("r+b") as out:
        out.seek(stream.checkpoint - 2)
        out.write(b"?")
    with path.open("rb") as opened:
        assert compare(Content(opened.fileno()), stream) == "other"


def read_overview(bench: Bench, wall_time: float) -> list[Chunk]:
    bench.wall_time = wall_time
    return bench.look(wall_time)


def settled_until(bench: Bench) -> float | None:
    (stream,) = bench.store.streams.load("file")
    return stream.settled_until


@pytest.mark.parametrize("later", [lines(10, 20), b"torn"], ids=["lines", "a torn line"])
def test_delivered_data_stays_delivered_when_more_is_written(bench: Bench, later: bytes):
    bench.write("a.log", lines(0, 10))
    settle(bench.store, read_overview(bench, 100.0))
    for wall_time in (200.0, 300.0):
        assert read_overview(bench, wall_time) == []
    bench.write("a.log", later)
    chunks = read_overview(bench, 400.0)
    read_overview(bench, 401.0)
    assert settled_until(bench) == 300.0, "the last look at which nothing else had come"
    settle(bench.store, chunks)
    assert settled_until(bench) == (400.0 if chunks else 300.0)


def test_a_look_that_finds_unread_data_does_not_update_settled_until(bench: Bench):
    bench.write("a.log", lines(0, 10))
    settle(bench.store, read_overview(bench, 100.0))
    read_overview(bench, 200.0)
    bench.write("a.log", lines(10, 20))
    for bench.wall_time in (300.0, 400.0):  # delivery pauses: it is looked, and not read
        bench.follower.scan(bench.follower.find(), bench.wall_time)
    bench.wall_time = 500.0
    assert bench.follower.files.read(500.0)
    bench.follower.save()
    assert settled_until(bench) == 200.0


def test_a_file_closed_for_others_is_known_to_be_unchanged(bench: Bench):
    bench.restart(max_open=1)
    bench.write("a.log", lines(0, 10))
    settle(bench.store, read_overview(bench, 100.0))
    bench.write("b.log", lines(0, 10))
    settle(bench.store, read_overview(bench, 200.0))
    settle(bench.store, read_overview(bench, 300.0))
    bench.write("a.log", lines(10, 20))
    read_overview(bench, 400.0)
    read_overview(bench, 500.0)
    until = {Path(stream.path).name: stream.settled_until for stream in bench.store.streams.load("file")}
    assert until["a.log"] == 300.0


def test_what_a_replacement_adds_to_a_file_is_not_delivered_before_it_is_settled(bench: Bench):
    """As with `rsync`, which replaces a file by a longer one, here while the previous replacement is identified."""

    def replace(end: int) -> None:
        bench.write("longer", lines(0, end)).replace(bench.folder / "a.log")

    bench.write("a.log", lines(0, 10))
    settle(bench.store, read_overview(bench, 100.0))
    replace(20)
    read_overview(bench, 101.0)
    replace(30)
    written_at, delivered = 102.0, b""
    for now in count(103):
        chunks = read_overview(bench, float(now))
        bench.follower.save()
        assert not bench.snapshot(now).is_delivered(written_at)
        settle(bench.store, chunks)
        delivered += b"".join(chunk.data for chunk in chunks)
        if delivered.endswith(lines(29, 30)):
            break
    read_overview(bench, now + 1.0)
    assert bench.snapshot(now + 1).is_delivered(written_at)


def test_the_last_save_updates_settled_until_of_quiet_files(bench: Bench):
    bench.write("a.log", lines(0, 10))
    settle(bench.store, read_overview(bench, 100.0))
    read_overview(bench, 200.0)
    assert settled_until(bench) == 100.0
    bench.follower.save(is_last=True)
    assert settled_until(bench) == 200.0


def copy_to(path: Path, suffix: str) -> None:
    """Copy or compress a file beside itself."""
    data = path.read_bytes()
    path.with_name(f"{path.name}{suffix}").write_bytes(gzip.compress(data) if suffix == ".gz" else data)


def read_later(bench: Bench) -> bytes:
    """Look twice while the service is away, so that nobody reads; then read what there is."""
    for now in (3.0, 4.0):
        bench.follower.scan(bench.follower.find(), now)
    return b"".join(bench.read(float(now)) for now in range(5, 40))


@pytest.mark.parametrize("suffix", [".gz", ".copy"])
def test_a_file_copied_before_its_first_read_is_read_once(bench: Bench, suffix: str):
    follower = bench.restart("*.log*")
    path = bench.write("a.log", lines(0, 200))
    follower.scan(follower.find(), 1.0)  # opened; the service is away, so nobody reads
    old = path.rename(path.with_name("a.log.1"))
    follower.scan(follower.find(), 2.0)
    copy_to(old, suffix)
    old.unlink()
    assert read_later(bench) == lines(0, 200)


@pytest.mark.parametrize("suffix", [".gz", ".copy"])
@pytest.mark.parametrize("reads_at", [1, 4])
def test_a_copy_found_together_with_its_original_is_not_read(bench: Bench, suffix: str, reads_at: int):
    follower = bench.restart("*.log*")
    original = bench.write("a.log.1", lines(0, 200))
    copy_to(original, suffix)
    read = b""
    for now in range(1, 40):
        follower.scan(follower.find(), float(now))
        if now == 2:
            original.unlink()
        if now >= reads_at:
            read += b"".join(chunk.data for chunk in follower.files.read(float(now)))
    assert read == lines(0, 200)


@pytest.mark.parametrize("suffix", [".gz", ".copy"])
def test_a_file_copied_after_an_unnoticed_truncation_is_read_once(bench: Bench, suffix: str):
    bench.restart("*.log*")
    path = bench.write("a.log", lines(0, 200))
    read = bench.read(1.0)
    copy_to(path, ".1")
    bench.write("a.log", lines(200, 300), mode="wb")
    old = path.rename(path.with_name("a.log.2"))
    copy_to(old, suffix)
    old.unlink()
    assert sorted((read + read_later(bench)).splitlines()) == lines(0, 300).splitlines()


def test_a_pattern_is_not_reported_as_unmatched_if_its_files_were_completed(bench: Bench):
    follower = bench.start("*.log", "*.csv", completion=Completion("delete"))
    log, csv = (f"no file matches {bench.folder}/*.{name}: " for name in ("log", "csv"))
    none = f"{bench.folder} has no files yet"
    assert follower.backlog.unmatched == [log + none, csv + none], "there may be a mistake in it"
    file = bench.write("a.log", b"1\n")
    bench.ship(1.0)
    assert [words.startswith(f"{csv}1 other file is in") for words in follower.backlog.unmatched] == [True]
    file.unlink()
    bench.ship(2.0)
    assert follower.backlog.unmatched == [csv + none]


def test_a_pattern_is_reported_as_unmatched_if_its_files_were_removed_otherwise(bench: Bench):
    follower = bench.start("*.log")
    file = bench.write("a.log", b"1\n")
    bench.ship(1.0)
    assert follower.backlog.unmatched == []
    file.unlink()
    bench.ship(2.0)
    assert follower.backlog.unmatched == [f"no file matches {bench.folder}/*.log: {bench.folder} has no files yet"]


def test_new_patterns_are_searched_before_they_are_reported(bench: Bench):
    follower = bench.start("*.log")
    assert follower.backlog.has_scanned
    bench.rename_patterns("*.csv")
    assert not follower.backlog.has_scanned
    bench.ship(1.0)
    assert follower.backlog.has_scanned
    assert follower.backlog.unmatched == [f"no file matches {bench.folder}/*.csv: {bench.folder} has no files yet"]


@pytest.mark.parametrize("name", ["old.log", "a.log.1"])
def test_a_file_renamed_while_it_is_closed_gets_its_new_path(bench: Bench, name: str):
    path = bench.write("a.log", lines(0, 10))
    bench.ship(1.0, 2.0)
    bench.stop()
    bench.wall_time = 1000.0  # a settled and quiet file is not opened
    bench.start("*.log")
    assert not list(bench.follower.files)
    path.rename(path.with_name(name))
    assert bench.ship(3.0, 4.0) == b""
    (stream,) = bench.store.streams.load("file")
    assert (stream.path, stream.is_rotated) == (str(path.with_name(name)), True)
