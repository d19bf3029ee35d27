"""The state store: transactions, private files, and no trust in foreign data."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from shipper.model.errors import ConfigError, StateError, StateInUseError, StateUnwritableError
from shipper.model.records import Checkpoint, Head, Rejection, Stream, digest
from shipper.state.directory import lock_holder, locked_directory
from shipper.state.schema import SCHEMA_VERSION, open_for_reading
from shipper.state.sqlite import translate_errors
from shipper.state.store import Store
from tests.cases import each


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
    with closing(sqlite3.connect(directory / "state.db")) as db:
        return db.execute("SELECT stream_id, start_offset, rule, delivery, raw FROM dead_letters").fetchall()


def test_saved_data_survives_a_restart(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(end=100), checkpoint(2, 50, inode=7, bad=0)], now_s=1.0)
        store.save([checkpoint(end=180, bad=0)], now_s=2.0)
    with closing(Store(tmp_path)) as store:
        first, second = store.streams.load("file")
        assert (first.stream_id, first.marker) == (1, (180, 4, digest(b"tail")))
        assert (second.stream_id, second.checkpoint) == (2, 50)
        totals = store.totals()
        assert (totals.read, totals.accepted, totals.dead_lettered, totals.duplicates) == (16, 12, 1, 3)
        assert dead_letters(tmp_path) == [(1, 0, "ip", "invalid", b"\xff{}")]
        assert store.streams.newest_id() == 2


def test_a_file_system_that_cannot_sync_a_directory_holds_the_accepted_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fsync(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(Store(tmp_path, remembered_ids=10)) as store:
        store.save([checkpoint(bad=0, accepted_keys=b"k" * 16)], now_s=1.0)
        assert b"".join(store.accepted_ids()) == b"k" * 16


def test_a_save_that_fails_half_way_saves_nothing(store: Store, tmp_path: Path):
    store.save([checkpoint(end=10, bad=0)], now_s=1.0)
    with pytest.raises(StateError, match="nothing is lost"):
        store.save([checkpoint(end=100, bad=2), checkpoint(2, 50, inode=7, kind=None)], now_s=2.0)
    assert [stream.checkpoint for stream in store.streams.load("file")] == [10]
    assert store.totals().read == 5
    assert dead_letters(tmp_path) == []
    store.save([checkpoint(end=20, bad=1)], now_s=3.0)
    assert len(dead_letters(tmp_path)) == 1


def test_a_newer_stream_of_the_same_file_replaces_the_old_one_and_ids_are_not_reused(store: Store):
    store.save([checkpoint(1)], now_s=1.0)
    store.save([checkpoint(2)], now_s=2.0)
    store.save([checkpoint(1, 200)], now_s=3.0)
    assert [stream.stream_id for stream in store.streams.load("file")] == [1, 2]
    assert [stream.inode for stream in store.streams.load("file")][1]
    store.save([checkpoint(2, 300)], now_s=4.0)
    old, young = store.streams.load("file")
    assert (old.stream_id, old.device, old.inode) == (1, 0, 0), "it may live on in a copy"
    assert (young.stream_id, bool(young.inode)) == (2, True)
    store.streams.forget([1, 2])
    assert store.streams.load("file") == []
    assert store.streams.newest_id() == 2


def test_kinds_of_streams_are_separate(store: Store):
    store.save([checkpoint(1, kind="spool"), checkpoint(2)], now_s=1.0)
    assert [stream.stream_id for stream in store.streams.load("spool")] == [1]
    assert [stream.stream_id for stream in store.streams.load("file")] == [2]


@pytest.mark.usefixtures("unmasked")
def test_all_files_are_private(tmp_path: Path):
    with locked_directory(tmp_path / "a" / "state") as directory, closing(Store(directory)) as store:
        store.save([checkpoint()], now_s=1.0)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert set(modes) >= {"lock", "state.db", "state.db-wal"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "a" / "state").stat().st_mode) == 0o700


def garbage(path: Path) -> None:
    path.write_bytes(b"this is no database" * 300)


def foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE mine (x)")


@pytest.mark.parametrize("spoil", [garbage, foreign])
def test_a_foreign_database_is_refused_and_left_unchanged(tmp_path: Path, spoil: Any):
    path = tmp_path / "state.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(StateError, match="move it away"):
        Store(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, -1])
def test_a_database_of_another_version_is_refused_with_both_numbers_and_left_unchanged(tmp_path: Path, number: int):
    path = tmp_path / "state.db"
    Store(tmp_path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {number}")
    before = path.read_bytes()
    for use in (Store, open_for_reading):
        with pytest.raises(StateError) as caught:
            use(tmp_path)
        text = str(caught.value)
        assert text.startswith(f"{path} cannot be used (it has schema version {number}, ")
        assert f"needs schema version {SCHEMA_VERSION}: use the version that wrote it" in text
        assert text.endswith("; dead letters and counts stay in what was moved")
        assert "move it away" in text
    assert path.read_bytes() == before


def test_the_error_for_a_directory_in_use_names_the_first_process(tmp_path: Path):
    code = (
        "import sys, pathlib\nfrom shipper.state.directory import locked_directory\n"
        "with locked_directory(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StateInUseError, match=f"process {holder.pid}"), locked_directory(tmp_path):
            pass
        holder.kill()
        holder.wait(10)
        with locked_directory(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_new_directory_is_removed_after_a_configuration_error_unless_it_has_content(tmp_path: Path):
    """A configuration error found late, when records are in the spool or settled, loses none of them."""

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
    nothing = (lambda directory: Store(directory).close(), False)
    for use, is_kept in (nothing, (settle, True), (spool, True), (note, True)):
        with pytest.raises(ConfigError, match="wrong"), locked_directory(path) as directory:
            use(directory)
            raise ConfigError("wrong")
        assert path.exists() == is_kept
        assert (path / "state.db").exists() == (is_kept and use is not note)
        assert (tmp_path / "a").exists() == is_kept
        shutil.rmtree(tmp_path / "a", ignore_errors=True)


def test_a_process_that_waited_for_a_removed_directory_does_not_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lock on a deleted file excludes no other process."""
    path = tmp_path / "state"
    taken = fcntl.flock

    def flock(lock: int, how: int) -> None:
        taken(lock, how)
        (path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StateInUseError), locked_directory(path):
        pass


def test_settled_until_is_the_last_time_whose_end_the_checkpoint_has_passed(store: Store):
    def save(end: int, now_s: float) -> float | None:
        store.save([Checkpoint(stream=stream, end_offset=end, **nothing)], now_s)
        stream.move_checkpoint(end, b"tail")
        (saved,) = store.streams.load("file")
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


# After accidents ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a database with some hundred streams and dead letters."""
    directory = tmp_path_factory.mktemp("whole")
    with closing(Store(directory)) as store:
        store.save([checkpoint(number, 100, inode=number, bad=2) for number in range(1, 300)], now_s=1.0)
    return (directory / "state.db").read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("is_at_a_page", [True, False])
def test_a_truncated_database_is_refused_and_left_unchanged(
    tmp_path: Path, whole: bytes, share: float, is_at_a_page: bool
):
    length = int(len(whole) * share) + 1
    cut = whole[: min((length // 4096 + 1) * 4096, len(whole) - 4096) if is_at_a_page else length]
    path = tmp_path / "state.db"
    path.write_bytes(cut)
    with pytest.raises(StateError), closing(Store(tmp_path)) as store:
        store.streams.load("file")
        store.totals()
        store.save([checkpoint(1000, inode=1000)], now_s=2.0)
    assert path.read_bytes() == cut


def test_a_database_that_is_in_use_is_not_mistaken_for_a_truncated_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As `purge` beside a running shipper and `status` finds it: the log has pages that the file does not have yet."""
    monkeypatch.setattr("shipper.state.store._BUSY_LIMIT_S", 0.01)
    with closing(open_for_reading(tmp_path)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM dead_letters").fetchone() == (0,)
        store.save([checkpoint(bad=2000)], now_s=1.0)
        with closing(Store(tmp_path)) as beside:
            assert beside.totals().dead_lettered == 2000
        assert (tmp_path / "state.db-wal").stat().st_size, "the log was emptied"


def test_an_interrupted_transaction_leaves_nothing(tmp_path: Path):
    with closing(Store(tmp_path)) as store:
        store.save([checkpoint(end=10, bad=0)], now_s=1.0)
        child = os.fork()
        if not child:  # a crash: no exit handlers, no rollback
            db = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE streams SET checkpoint = 99999")
            os._exit(0)
        os.waitpid(child, 0)
    with closing(Store(tmp_path)) as store:
        assert [stream.checkpoint for stream in store.streams.load("file")] == [10]
        store.save([checkpoint(end=20, bad=1)], now_s=2.0)
        assert (store.totals().read, len(dead_letters(tmp_path))) == (11, 1)


def test_a_store_locked_by_another_writer_raises_that_nothing_was_saved(store: Store, tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        store._db.execute("PRAGMA busy_timeout = 1")
        with pytest.raises(StateError, match="nothing is lost"):
            store.save([checkpoint()], now_s=1.0)
    assert (store.streams.load("file"), dead_letters(tmp_path)) == ([], [])
    store.save([checkpoint()], now_s=1.0)
    assert len(store.streams.load("file")) == 1


def test_nothing_is_saved_into_a_database_that_was_replaced_or_deleted(store: Store, tmp_path: Path):
    store.save([checkpoint(1)], now_s=1.0)
    shutil.copy(tmp_path / "state.db", tmp_path / "copy")
    for change in (lambda path: os.replace(tmp_path / "copy", path), os.unlink):
        change(tmp_path / "state.db")
        with pytest.raises(StateError, match="deleted, moved or replaced"):
            store.save([checkpoint(2)], now_s=2.0)


def test_many_rejections_are_saved_with_their_original_bytes(store: Store, tmp_path: Path):
    store.save([checkpoint(bad=1000), checkpoint(2, inode=2, bad=1)], now_s=1.0)
    rows = dead_letters(tmp_path)
    assert len(rows) == 1001
    assert {row[4] for row in rows} == {b"\xff{}"}
    assert sorted(row[1] for row in rows if row[0] == 1) == list(range(1000))


def test_saving_nothing_changes_nothing(store: Store):
    store.save([], now_s=1.0)
    assert (store.totals().read, store.streams.load("file"), store.streams.newest_id()) == (0, [], 0)


def test_an_impossible_directory_is_a_configuration_error(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"state\.directory"), locked_directory(path):
            pass


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EIO])
def test_a_disk_that_cannot_be_written_at_startup_is_no_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    """Its exit code tells supervisors to try again."""
    monkeypatch.setattr("shipper.state.directory.file_type_problem", Mock(side_effect=OSError(code, os.strerror(code))))
    with pytest.raises(StateUnwritableError, match=re.escape(f"{tmp_path} cannot be written ({os.strerror(code)})")):
        locked_directory(tmp_path).__enter__()


def test_the_lock_is_released_with_its_holder_whatever_the_file_contains(tmp_path: Path):
    with locked_directory(tmp_path):
        pass
    (tmp_path / "lock").write_text("1\n")  # init is alive, and does not hold it
    with locked_directory(tmp_path) as held:
        assert held == tmp_path
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    with pytest.raises(KeyError), locked_directory(tmp_path):
        raise KeyError
    with locked_directory(tmp_path):
        pass


def failure(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("it did not work")
    error.sqlite_errorcode = code
    return error


@each(
    ("error", "advice"),
    [
        (failure(sqlite3.SQLITE_FULL), "make room"),
        (failure(sqlite3.SQLITE_IOERR_SHMSIZE), "make room"),
        (failure(sqlite3.SQLITE_IOERR_WRITE), "make room"),
        (failure(sqlite3.SQLITE_CORRUPT), "move it away"),
        (failure(sqlite3.SQLITE_NOTADB), "move it away"),
        (failure(sqlite3.SQLITE_IOERR_READ), "may be intact, so keep it"),
        (failure(sqlite3.SQLITE_CANTOPEN), "may be intact, so keep it"),  # no free inode, or too many open files
        (failure(sqlite3.SQLITE_BUSY), "may be intact, so keep it"),
        (OSError(errno.EIO, "Input/output error"), "may be intact, so keep it"),
    ],
)
def test_only_a_damaged_database_is_to_be_moved_away_and_a_full_disk_is_not_one(error: Exception, advice: str):
    with pytest.raises(StateError) as caught, translate_errors(Path("state.db")):
        raise error
    assert isinstance(caught.value, StateUnwritableError) == (advice == "make room")
    for words in ("make room", "move it away", "may be intact, so keep it"):
        assert (words in str(caught.value)) == (words == advice)


def test_damage_inside_a_database_is_found_before_anything_is_sent(tmp_path: Path):
    Store(tmp_path).close()
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'dead_letters'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"it is damaged: .*left unchanged.*move it away"):
        Store(tmp_path)
    assert path.read_bytes() == before


def test_damage_found_while_saving_is_reported_with_advice(store: Store):
    with pytest.raises(StateError, match=r"left unchanged.*move it away") as caught, store._transaction():
        raise failure(sqlite3.SQLITE_CORRUPT)
    assert not isinstance(caught.value, StateUnwritableError)


# In the directory of somebody else ------------------------------------------------------------------------------------


NOBODY = 65_534


def as_nobody(action: Callable[[], str]) -> str:
    """Run a function in an unprivileged process, and return its result."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are not in the child, nor needed there
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, action().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_state_directory_of_another_user_is_refused_and_left_unchanged(mode: int):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        path = Path(name, "state")
        path.mkdir()
        path.chmod(mode)

        def use() -> str:
            try:
                with locked_directory(path):
                    return "used"
            except ConfigError as error:
                return f"{error.key}: {error.message}"

        said = as_nobody(use)
        assert said.startswith(f"state.directory: {path} cannot be ")
        assert (
            f"it belongs to user 0, group 0 (mode {mode:04o}), and this process runs as user {NOBODY}, group {NOBODY}. "
            in said
        )
        assert "another directory" not in said, "from which all would be sent again"
        assert path.stat().st_mode & 0o7777 == mode
        assert list(path.iterdir()) == []


def test_an_own_directory_open_to_others_is_made_private(tmp_path: Path):
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(0o777)
    with locked_directory(path):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_file_system_without_locks_is_refused_with_advice_and_has_no_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "lock").touch()
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match=f"cannot lock {tmp_path}/lock .* such as a local disk"):
        locked_directory(tmp_path).__enter__()
    assert lock_holder(tmp_path) is None


@pytest.mark.parametrize("target", ["there", "not there"])
def test_a_link_instead_of_the_lock_is_refused_with_its_name(tmp_path: Path, target: str):
    outside = tmp_path / "outside"
    if target == "there":
        outside.write_text("precious")
    state = tmp_path / "state"
    state.mkdir()
    (state / "lock").symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{state}/lock is a symbolic link"), locked_directory(state):
        pass
    assert not outside.exists() if target == "not there" else outside.read_text() == "precious"
