"""The state store: one transaction, private files, and no trust in what it did not write."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shipper.model.errors import ConfigError, StateError, StateInUseError
from shipper.model.records import Checkpoint, Head, Rejection, Stream, digest
from shipper.state.directory import locked_directory
from shipper.state.schema import SCHEMA_VERSION, open_for_reading
from shipper.state.store import Store


def checkpoint(stream_id: int = 1, end: int = 100, *, bad: int = 1, **changes: Any) -> Checkpoint:
    stream = Stream(stream_id=stream_id, kind="file", path="/a", device=5, inode=6, head=Head(3, digest(b"abc")))
    for name in ("kind", "inode", "path"):
        if name in changes:
            setattr(stream, name, changes.pop(name))
    rejections = [
        Rejection(start_offset=at, end_offset=at + 3, rule="ip", message="no", raw=b"\xff{}", event_id="e")
        for at in range(bad)
    ]
    fields = {"read": 5 + bad, "accepted": 4, "duplicates": 1, "tail": b"tail", **changes}
    return Checkpoint(stream=stream, end_offset=end, rejections=rejections, **fields)


def dead_letters(directory: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(directory / "state.db") as db:
        rows = db.execute("SELECT stream_id, start_offset, rule, delivery, raw FROM dead_letters").fetchall()
    db.close()
    return rows


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path)
    yield store
    store.close()


def test_what_was_saved_is_there_after_a_restart(tmp_path: Path):
    store = Store(tmp_path)
    store.save([checkpoint(end=100), checkpoint(2, 50, inode=7, bad=0)], now_s=1.0)
    store.save([checkpoint(end=180, bad=0)], now_s=2.0)
    store.close()
    store = Store(tmp_path)
    first, second = store.streams.known("file")
    assert (first.stream_id, first.marker) == (1, (180, 4, digest(b"tail")))
    assert (second.stream_id, second.checkpoint) == (2, 50)
    totals = store.totals()
    assert (totals.read, totals.accepted, totals.dead_lettered, totals.duplicates) == (16, 12, 1, 3)
    assert totals.read == totals.accepted + totals.dead_lettered + totals.duplicates
    assert dead_letters(tmp_path) == [(1, 0, "ip", "invalid", b"\xff{}")]
    assert store.streams.youngest_id() == 2
    store.close()


def test_a_save_that_fails_half_way_saves_nothing(store: Store, tmp_path: Path):
    store.save([checkpoint(end=10, bad=0)], now_s=1.0)
    with pytest.raises(StateError, match="nothing is lost"):
        store.save([checkpoint(end=100, bad=2), checkpoint(2, 50, inode=7, kind=None)], now_s=2.0)
    assert [stream.checkpoint for stream in store.streams.known("file")] == [10]
    assert store.totals().read == 5
    assert dead_letters(tmp_path) == []
    store.save([checkpoint(end=20, bad=1)], now_s=3.0)
    assert len(dead_letters(tmp_path)) == 1


def test_a_younger_stream_of_the_same_file_takes_its_place_and_ids_are_never_used_again(store: Store):
    store.save([checkpoint(1)], now_s=1.0)
    store.save([checkpoint(2)], now_s=2.0)
    store.save([checkpoint(1, 200)], now_s=3.0)
    assert [stream.stream_id for stream in store.streams.known("file")] == [1, 2]
    assert [stream.inode for stream in store.streams.known("file")][1]
    store.save([checkpoint(2, 300)], now_s=4.0)
    old, young = store.streams.known("file")
    assert (old.stream_id, old.device, old.inode) == (1, 0, 0), "it may live on in a copy"
    assert (young.stream_id, bool(young.inode)) == (2, True)
    store.streams.forget([1, 2])
    assert store.streams.known("file") == []
    assert store.streams.youngest_id() == 2


def test_kinds_of_streams_stay_apart(store: Store):
    store.save([checkpoint(1, kind="spool"), checkpoint(2)], now_s=1.0)
    assert [stream.stream_id for stream in store.streams.known("spool")] == [1]
    assert [stream.stream_id for stream in store.streams.known("file")] == [2]


def test_all_files_are_for_their_owner_only(tmp_path: Path):
    old = os.umask(0)
    try:
        with locked_directory(tmp_path / "a" / "state") as directory:
            store = Store(directory)
            store.save([checkpoint()], now_s=1.0)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
            store.close()
    finally:
        os.umask(old)
    assert set(modes) >= {"lock", "state.db", "state.db-wal"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "a" / "state").stat().st_mode) == 0o700


def garbage(path: Path) -> None:
    path.write_bytes(b"this is no database" * 300)


def foreign(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.commit()
    db.close()


@pytest.mark.parametrize("spoil", [garbage, foreign])
def test_a_database_that_is_not_ours_is_refused_and_left_as_it_is(tmp_path: Path, spoil: Any):
    path = tmp_path / "state.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StateError, match="move it away"):
        Store(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, -1])
def test_a_database_of_another_version_is_named_with_both_numbers_and_left_as_it_is(tmp_path: Path, number: int):
    path = tmp_path / "state.db"
    Store(tmp_path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {number}")
    before = path.read_bytes()
    for use in (Store, open_for_reading):
        with pytest.raises(StateError) as caught:
            use(tmp_path)
        text = str(caught.value)
        assert text.startswith(f"{path} cannot be used (its schema has number {number}, ")
        assert f"needs number {SCHEMA_VERSION}: use the version that wrote it" in text
        assert "move it away" in text
    assert path.read_bytes() == before


def test_the_second_user_of_a_directory_is_told_who_the_first_is(tmp_path: Path):
    code = (
        "import sys, pathlib\nfrom shipper.state.directory import locked_directory\n"
        "with locked_directory(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StateInUseError, match=f"process {holder.pid}"), locked_directory(tmp_path):
            pass
        holder.kill()
        holder.wait(10)
        with locked_directory(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_what_was_made_is_removed_when_a_setting_is_wrong_unless_something_is_kept_in_it(tmp_path: Path):
    """A wrong setting that shows late, when records lie in the spool or are settled, costs none of them."""

    def settle(directory: Path) -> None:
        with closing(Store(directory)) as store:
            store.save([checkpoint()], now_s=1.0)

    def spool(directory: Path) -> None:
        Store(directory).close()
        (directory / "spool").mkdir()
        (directory / "spool" / "1.ndjson").touch()

    def note(directory: Path) -> None:
        (directory / "note").touch()

    path = tmp_path / "a" / "state"
    for use, is_kept in (
        (lambda directory: Store(directory).close(), False),
        (settle, True),
        (spool, True),
        (note, True),
    ):
        with pytest.raises(ConfigError, match="wrong"), locked_directory(path) as directory:
            use(directory)
            raise ConfigError("wrong")
        assert path.exists() == is_kept
        assert (path / "state.db").exists() == (is_kept and use is not note)
        assert (tmp_path / "a").exists() == is_kept
        shutil.rmtree(tmp_path / "a", ignore_errors=True)


def test_who_waited_for_a_directory_that_was_removed_does_not_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lock of a file that has no name any more keeps nobody out."""
    path = tmp_path / "state"
    taken = fcntl.flock

    def flock(lock: int, how: int) -> None:
        taken(lock, how)
        (path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StateInUseError), locked_directory(path):
        pass


def test_a_stream_is_settled_until_the_last_moment_whose_end_the_checkpoint_has_passed(store: Store):
    def save(end: int, now_s: float) -> float | None:
        store.save([Checkpoint(stream=stream, end_offset=end, **nothing)], now_s)
        stream.move_checkpoint(end, b"tail")
        (saved,) = store.streams.known("file")
        assert saved.settled_until == stream.settled_until
        return saved.settled_until

    stream = Stream(stream_id=1, kind="file", path="a", device=1, inode=5)
    nothing: dict[str, Any] = {"tail": b"tail", "read": 0, "accepted": 0, "duplicates": 0, "rejections": []}
    assert save(0, 1.0) is None, "nobody has looked yet"
    stream.note_end(100, 10.0)
    stream.note_end(150, 11.0)
    assert save(60, 12.0) is None
    assert save(100, 13.0) == 10.0, "the first mark counts until it is passed, or a busy file would never pass one"
    stream.note_end(210, 13.5)
    stream.note_end(200, 14.0)
    assert save(199, 15.0) == 10.0
    assert save(300, 16.0) == 14.0
