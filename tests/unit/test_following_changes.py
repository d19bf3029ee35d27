"""Following files while settings and clocks change, and the reported delivery status."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest

from shipper.model.errors import StateUnwritableError
from shipper.sources.completion import Completion
from shipper.sources.discovery import FoundFile
from tests.e2e.files import compress
from tests.unit.follower_bench import Bench, lines, settle

LATER = 2000.0


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.wall_time = 1000.0
    return bench


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as out:
        out.write(data)


# What is said to be delivered -------------------------------------------------------------------------------------


def follow(bench: Bench, last: int, pattern: str = "a.log") -> Path:
    """Write lines into a file, and ship them."""
    path = bench.folder / "a.log"
    write(path, lines(0, last))
    bench.start(pattern)
    assert bench.ship(1.0, 2.0) == lines(0, last)
    return path


def rename(path: Path) -> None:
    path.rename(path.with_suffix(".log.1"))
    path.touch()


def copy_and_truncate(path: Path) -> None:
    path.with_suffix(".log.1").write_bytes(path.read_bytes())
    os.truncate(path, 0)


@pytest.mark.parametrize("rotate", [rename, copy_and_truncate])
def test_a_file_rotated_while_stopped_is_not_reported_as_delivered(bench: Bench, rotate: Callable[[Path], None]):
    path = follow(bench, 200)
    with bench.stopped():
        write(path, lines(200, 300))
        rotate(path)
        assert bench.status(LATER).delivered_until != LATER
    assert bench.ship(1.0, 2.0, 8.0) == lines(200, 300)
    assert bench.status(LATER).delivered_until == LATER


def test_a_file_renamed_since_the_last_look_is_not_reported_as_delivered(bench: Bench):
    path = follow(bench, 10)
    write(path, lines(10, 20))
    rename(path)
    assert bench.status(LATER).delivered_until != LATER
    assert bench.ship(3.0) == lines(10, 20)


def test_a_new_name_that_could_not_be_saved_is_saved_by_the_next_scan(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    path = follow(bench, 10)
    path.rename(path.with_name("b.log"))
    with monkeypatch.context() as patch:
        patch.setattr(bench.store.streams, "note", Mock(side_effect=StateUnwritableError("the disk is full")))
        with pytest.raises(StateUnwritableError):
            bench.look(10.0)
    assert [Path(stream.path).name for stream in bench.store.streams.load("file")] == ["a.log"]
    bench.look(11.0)
    assert [Path(stream.path).name for stream in bench.store.streams.load("file")] == ["b.log"]


@pytest.mark.parametrize("share", [3e-6, 0.5, 1.0], ids=["one byte", "half of it", "all but its last newline"])
def test_an_archive_that_is_not_read_to_its_end_is_not_reported_as_delivered(bench: Bench, share: float):
    chance = Random(1)
    content = b"".join(b'{"n":"%s"}\n' % chance.randbytes(20).hex().encode() for _ in range(20_000))
    archive = gzip.compress(content + b'{"n":"the last"}')
    path = bench.folder / "a.gz"
    path.write_bytes(archive[: int(share * len(archive))])
    bench.start("a.gz")
    shipped = bench.ship(1.0, 1.5, 2.0)
    assert bool(shipped) == (share > 0.1)
    assert len(shipped) <= len(content)
    assert bench.status(LATER).delivered_until != LATER
    write(path, archive[int(share * len(archive)) :])
    shipped += bench.ship(3.0, 4.0, 10.0, 20.0)
    assert shipped.rstrip(b"\n") == content + b'{"n":"the last"}'
    assert bench.status(LATER).delivered_until == LATER


@pytest.mark.parametrize("is_half_shipped", [False, True])
def test_a_rotated_and_compressed_file_is_reported_as_delivered(bench: Bench, is_half_shipped: bool):
    path = follow(bench, 200, "a*")
    rename(path)
    if is_half_shipped:
        write(bench.folder / "a.log.1", lines(200, 300))
    compress(bench.folder / "a.log.1", "gz")
    assert bench.ship(3.0, 4.0, 9.0, 10.0, 20.0, 30.0) == (lines(200, 300) if is_half_shipped else b"")
    assert bench.status(LATER).delivered_until == LATER


def test_an_archive_whose_end_was_not_reached_is_opened_again_even_without_more_records(bench: Bench):
    path = follow(bench, 200)
    with bench.stopped():
        write(path, lines(200, 300))
        rename(path)
        compress(bench.folder / "a.log.1", "gz")
    chunks = bench.look(10.0)
    assert b"".join(chunk.data for chunk in chunks) == lines(200, 300)
    settle(bench.store, chunks)
    bench.stop()  # killed before it has looked whether there is more
    bench.start("a.log")
    assert bench.ship(30.0, 31.0, 40.0, 50.0) == b""
    assert bench.status(LATER).delivered_until == LATER


def test_an_unmatched_generation_with_the_inode_of_a_deleted_file_is_read(bench: Bench):
    other = bench.folder / "b.log"
    write(other, lines(0, 10))
    bench.start("*.log")
    assert bench.ship(1.0, 2.0) == lines(0, 10)
    (stream,) = bench.store.streams.load("file")
    with bench.stopped():
        other.rename(bench.folder / "a.log")  # as if another file had been given its inode
        (bench.folder / "a.log").write_bytes(lines(100, 150))
        rename(bench.folder / "a.log")
        write(bench.folder / "a.log", lines(150, 160))
        assert (bench.folder / "a.log.1").stat().st_ino == stream.inode
    assert bench.ship(*map(float, range(10, 40))) in {lines(100, 160), lines(150, 160) + lines(100, 150)}


def test_an_unmatched_copy_with_the_inode_of_a_deleted_file_is_resumed(bench: Bench):
    path, other = bench.folder / "a.log", bench.folder / "b.log"
    write(path, lines(0, 200))
    write(other, lines(500, 510))
    bench.start("*.log")
    bench.ship(1.0, 2.0)
    inode = other.stat().st_ino
    with bench.stopped():
        write(path, lines(200, 300))
        copy = other.rename(bench.folder / "copy")  # as if the copy had been given its inode
        copy.write_bytes(path.read_bytes())
        path.write_bytes(lines(300, 310))
        assert copy.stat().st_ino == inode
    assert sorted(bench.ship(10.0, 11.0, 12.0).splitlines()) == lines(200, 310).splitlines()


def test_files_that_are_renamed_between_finding_and_opening_them_are_read_once(bench: Bench):
    """As by a rotation that renames every generation; the name of one that was found leads to another one then."""
    path = follow(bench, 100, "a.log*")
    for name, first in (("a.log.1", 100), ("a.log.3", 200)):
        write(path.with_name(name), lines(first, first + 100))
    found = bench.follower.find()
    path.with_name("a.log.1").rename(path.with_name("a.log.2"))
    path.rename(path.with_name("a.log.1"))
    path.with_name("a.log.3").unlink()
    bench.follower.scan(found, 3.0)
    assert bench.follower.backlog.unreadable == []
    assert bench.ship(4.0, 5.0, 15.0) == lines(100, 200)
    assert bench.is_delivered(LATER)


def test_an_archive_is_recognised_although_its_deleted_original_s_inode_is_in_use_again(bench: Bench):
    """By a file that was renamed before it could be opened and compared."""
    path = follow(bench, 200, "a*")
    status = path.stat()
    compress(path, "gz")
    assert bench.ship(3.0, 4.0, 10.0) == b""
    renamed = FoundFile(str(path), status, bench.names[0])
    bench.follower.scan([*bench.follower.find(), renamed], 11.0)
    assert bench.ship(20.0, 30.0, 40.0) == b""
    assert bench.is_delivered(LATER)


def test_a_clock_set_back_does_not_report_delivery_too_early(bench: Bench):
    path = bench.folder / "a.log"
    write(path, lines(0, 10))
    bench.wall_time = 5000.0
    bench.start("a.log")
    bench.ship(1.0)
    write(path, lines(10, 11))
    bench.ship(2.0)
    bench.wall_time = 2000.0
    write(path, lines(11, 20))
    assert bench.look(3.0), "read, and not settled: the service is away"
    until = bench.status(2100.0).delivered_until
    assert until is None or until < 2050.0


def test_a_file_with_two_names_counts_once_in_the_lag(bench: Bench):
    path = bench.folder / "a.log"
    write(path, lines(0, 10))
    (bench.folder / "current.log").symlink_to(path)
    bench.start("*.log")
    bench.look(1.0)
    bench.look(2.0)
    assert bench.follower.backlog.lag_bytes == path.stat().st_size == bench.status(LATER).lag_bytes


# Other patterns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", lines(110, 120)], ids=["settled", "with news"])
def test_a_file_that_no_pattern_matches_any_more_is_ignored_even_when_rotated(bench: Bench, more: bytes):
    named, dropped = bench.folder / "a.log", bench.folder / "b.log"
    write(named, lines(0, 5))
    write(dropped, lines(100, 110))
    bench.start("a.log", "b.log", completion=Completion("delete"))
    bench.ship(1.0, 2.0, 3.0)
    bench.rename_patterns("a.log")
    bench.ship(4.0)
    write(dropped, more)
    dropped.rename(bench.folder / "b.log.1")
    named.rename(bench.folder / "a.log.1")
    write(named, lines(5, 6))
    assert bench.ship(5.0, 6.0, 12.0, 20.0, 30.0) == lines(5, 6)
    assert (bench.folder / "b.log.1").exists()
    assert not (bench.folder / "a.log.1").exists()


@pytest.mark.parametrize("name", ["a-2.log", "a.log.bak", "a.log.1"])
def test_a_file_that_no_pattern_matches_any_more_is_not_read_when_it_grows(bench: Bench, name: str):
    write(bench.folder / "a.log", lines(0, 5))
    write(bench.folder / name, lines(100, 110))
    bench.start("a.log", name)
    bench.ship(1.0, 2.0, 3.0)
    bench.rename_patterns("a.log")
    bench.ship(4.0)
    write(bench.folder / name, lines(110, 120))
    assert bench.ship(5.0, 6.0, 12.0, 20.0) == b""
    bench.restart("a.log")
    assert bench.ship(25.0, 30.0) == (lines(110, 120) if name == "a.log.1" else b"")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_archive_that_was_empty_at_first_is_no_longer_reported_once_it_is_excluded_or_deleted(
    bench: Bench, is_stopped: bool
):
    """Rotators create an archive before they write it, and the records in it were read before."""
    excluded, deleted = bench.folder / "a.log.1.zip", bench.folder / "a.log.2.zip"
    for path in (excluded, deleted):
        path.touch()
    follow(bench, 10, "a.log*")
    with bench.stopped(is_stopped):
        for path in (excluded, deleted):
            write(path, b"PK\x03\x04\n")
    assert bench.ship(3.0, 4.0, 5.0) == b""
    assert ["archive" in message for message in bench.follower.backlog.unreadable] == [True, True]
    assert bench.status(LATER).delivered_until != LATER
    deleted.unlink()
    bench.rename_patterns("a.log")
    assert bench.ship(6.0, 12.0, 20.0) == b""
    assert (bench.follower.backlog.unreadable, bench.follower.backlog.unreachable_bytes) == ([], 0)
    assert bench.status(LATER).delivered_until == LATER


def test_the_rest_of_a_file_that_no_pattern_matches_any_more_is_reported_until_it_is_read(bench: Bench):
    write(bench.folder / "a.log", lines(0, 5))
    path = bench.folder / "b.log"
    write(path, lines(100, 200_000))
    bench.start("a.log", "b.log")
    settle(bench.store, bench.look(1.0) + bench.look(2.0), bench.wall_time)  # not to its end
    bench.rename_patterns("a.log")
    for is_restarted in (False, True):
        if is_restarted:
            bench.restart("a.log")
        assert bench.ship(4.0, 5.0) == b""
        assert bench.follower.backlog.unreadable == [f"no pattern matches {path}, which was not read to its end"]
        assert bench.follower.backlog.lag_bytes == bench.status(LATER).lag_bytes > 0
    bench.rename_patterns("*.log")
    assert bench.ship(6.0, 7.0).endswith(lines(199_999, 200_000))
    assert not bench.follower.backlog.unreadable
    assert not bench.follower.backlog.lag_bytes


def test_an_already_matched_file_is_not_skipped_by_start_end_of_a_wider_pattern(bench: Bench):
    path = bench.folder / "a.log"
    write(path, lines(0, 5))
    bench.start("a.log", start="end")
    bench.ship(1.0, 2.0)
    path.rename(bench.folder / "a.log.1")
    write(path, lines(5, 10))
    bench.rename_patterns("*.log")
    assert bench.ship(3.0, 4.0, 9.0, 15.0) == lines(5, 10)


def test_an_undecided_copy_that_was_dropped_is_still_recognised(bench: Bench):
    path, copy = follow(bench, 300), bench.folder / "a.copy"
    bench.rename_patterns("a.log", "*.copy")
    copy.write_bytes(path.read_bytes())
    assert bench.ship(3.0) == b""
    bench.rename_patterns("a.log")
    assert bench.ship(3.5) == b""
    bench.rename_patterns("a.log", "*.copy")
    assert bench.ship(3.6) == b""
    os.truncate(path, 0)
    assert bench.ship(4.0, 5.0, 12.0) == b""


def test_a_pattern_that_is_not_a_valid_name_matches_nothing(bench: Bench):
    write(bench.folder / "a.log", lines(0, 5))
    bench.start("a\0.log", "a.log")
    assert bench.ship(1.0) == lines(0, 5)


# Files that are much alike ----------------------------------------------------------------------------------------


def test_a_file_with_the_same_start_as_a_deleted_one_and_similar_records_is_another_file(bench: Bench):
    """Of one length, too: only the middle of the last record tells them apart."""

    def alike(number: int) -> bytes:
        return b'{"id":"%06d","status":"Verified","affiliate":"70012","state":"","more":"%b"}\n' % (number, b"x" * 100)

    head = b"".join(map(alike, range(10)))
    (bench.folder / "a.log").write_bytes(head + alike(100))
    bench.start("*.log")
    assert bench.ship(1.0, 2.0, 10.0) == head + alike(100)
    (bench.folder / "a.log").unlink()
    (bench.folder / "b.log").write_bytes(head + alike(200) + alike(201))
    assert bench.ship(11.0, 12.0, 20.0) == head + alike(200) + alike(201)


def test_data_truncated_without_a_copy_delays_delivery_only_while_it_is_searched(bench: Bench):
    path = follow(bench, 200)
    os.truncate(path, 0)
    write(path, lines(200, 210))
    chunks = bench.look(3.0)
    assert bench.status(LATER).delivered_until != LATER
    for now in (4.0, 5.0, 12.0, 13.0):
        chunks += bench.look(now)
    settle(bench.store, chunks, bench.wall_time)
    bench.ship(14.0, 15.0)
    assert bench.status(LATER).delivered_until == LATER


@pytest.mark.parametrize(
    ("is_truncated", "failing"), [(False, "StreamIndex._find_lost"), (True, "open_content")], ids=["new", "truncated"]
)
def test_a_file_that_cannot_be_read_when_it_is_identified_is_read_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_truncated: bool, failing: str
):
    bench.start()
    path = bench.write("a.log", b"one\n")
    if is_truncated:
        assert b"".join(bench.read(1.0 + look / 10) for look in range(3)) == b"one\n"
        bench.write("a.log", b"", mode="wb")
        bench.write("a.log", b"two\n")

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(f"shipper.sources.identity.{failing}", fail)
        assert bench.read(2.0) + bench.read(2.1) == b""
        assert f"{path} cannot be read: Input/output error" in bench.follower.backlog.unreadable
    got = b"".join(bench.read(3.0 + look) for look in range(5))
    assert got == (b"two\n" if is_truncated else b"one\n")
    assert not bench.follower.backlog.unreadable


def fail_to_read(path: Path, descriptor: int) -> None:
    """Like a descriptor of a network file system after a new connection."""
    with path.open("ab") as other:
        os.dup2(other.fileno(), descriptor)


def lose(path: Path, descriptor: int) -> None:
    """Like a descriptor of a network file system that is gone."""
    os.close(descriptor)


def keep_replaced(path: Path, descriptor: int) -> None:
    """Like a descriptor of a network file system that identifies files by their paths, after a replacement."""
    with path.with_suffix(".old").open() as other:
        os.dup2(other.fileno(), descriptor)


@pytest.mark.parametrize("happen", [fail_to_read, lose, keep_replaced])
def test_a_file_is_read_on_after_its_descriptor_became_useless(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, happen: Callable[[Path, int], None]
):
    path = follow(bench, 200)
    path.with_suffix(".old").write_bytes(path.read_bytes())
    (file,) = bench.follower.files
    if happen is keep_replaced:
        monkeypatch.setattr("shipper.sources.content.Content.status", lambda _: path.stat())
    happen(path, file.reader.content.descriptor)
    write(path, lines(200, 300))
    bench.follower.check(2.5)
    assert bench.ship(3.0, 4.0, 5.0) == lines(200, 300)
    assert not bench.follower.backlog.unreadable
