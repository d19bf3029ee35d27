"""The state store after accidents: cut short, half written, without room, in the hands of another."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from shipper.model.errors import ConfigError, StateError, StateUnwritableError
from shipper.state.directory import locked_directory
from shipper.state.sqlite import understood
from shipper.state.store import Store
from tests.cases import each
from tests.unit.test_store import checkpoint, dead_letters

STREAMS = 299


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a database with some hundred streams and dead letters."""
    directory = tmp_path_factory.mktemp("whole")
    store = Store(directory)
    store.save([checkpoint(number, 100, inode=number, bad=2) for number in range(1, STREAMS + 1)], now_s=1.0)
    store.close()
    return (directory / "state.db").read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
@pytest.mark.parametrize("is_at_a_page", [True, False])
def test_a_database_that_was_cut_short_is_refused_and_left_as_it_is(
    tmp_path: Path, whole: bytes, share: float, is_at_a_page: bool
):
    length = int(len(whole) * share) + 1
    cut = whole[: (length // 4096 + 1) * 4096 if is_at_a_page else length]
    assert len(cut) < len(whole) or is_at_a_page
    if len(cut) >= len(whole):
        cut = whole[:-4096]
    path = tmp_path / "state.db"
    path.write_bytes(cut)

    def use() -> None:
        store = Store(tmp_path)
        try:
            store.streams.known("file")
            store.totals()
            store.save([checkpoint(1000, inode=1000)], now_s=2.0)
        finally:
            store.close()

    with pytest.raises(StateError):
        use()
    assert path.read_bytes() == cut


def test_a_process_that_died_within_a_transaction_left_nothing_of_it(tmp_path: Path):
    store = Store(tmp_path)
    store.save([checkpoint(end=10, bad=0)], now_s=1.0)
    child = os.fork()
    if not child:  # a crash: no exit handlers, no rollback
        db = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE streams SET checkpoint = 99999")
        os._exit(0)
    os.waitpid(child, 0)
    store.close()
    store = Store(tmp_path)
    assert [stream.checkpoint for stream in store.streams.known("file")] == [10]
    store.save([checkpoint(end=20, bad=1)], now_s=2.0)
    assert (store.totals().read, len(dead_letters(tmp_path))) == (11, 1)
    store.close()


def test_a_store_that_another_writer_holds_says_that_nothing_was_saved(tmp_path: Path):
    store = Store(tmp_path)
    other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._db.execute("PRAGMA busy_timeout = 1")
    with pytest.raises(StateError, match="nothing is lost"):
        store.save([checkpoint()], now_s=1.0)
    other.execute("ROLLBACK")
    other.close()
    assert (store.streams.known("file"), dead_letters(tmp_path)) == ([], [])
    store.save([checkpoint()], now_s=1.0)
    assert len(store.streams.known("file")) == 1
    store.close()


def test_many_rejections_are_saved_with_their_bytes_as_they_came(tmp_path: Path):
    store = Store(tmp_path)
    store.save([checkpoint(bad=1000), checkpoint(2, inode=2, bad=1)], now_s=1.0)
    rows = dead_letters(tmp_path)
    assert len(rows) == 1001
    assert {row[4] for row in rows} == {b"\xff{}"}
    assert sorted(row[1] for row in rows if row[0] == 1) == list(range(1000))
    store.close()


def test_saving_nothing_changes_nothing(tmp_path: Path):
    store = Store(tmp_path)
    store.save([], now_s=1.0)
    assert (store.totals().read, store.streams.known("file"), store.streams.youngest_id()) == (0, [], 0)
    store.close()


def test_a_directory_that_cannot_be_is_a_wrong_setting(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"state\.directory"), locked_directory(path):
            pass


def test_the_lock_is_gone_with_its_holder_whatever_the_file_says(tmp_path: Path):
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


@each(
    ("code", "is_full"),
    [
        (sqlite3.SQLITE_FULL, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, True),
        (sqlite3.SQLITE_IOERR_WRITE, True),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_IOERR_READ, False),
    ],
)
def test_a_disk_that_is_full_at_the_start_is_no_reason_to_move_the_state_away(code: int, is_full: bool):
    error = sqlite3.OperationalError("it did not work")
    error.sqlite_errorcode = code
    with pytest.raises(StateError) as caught, understood(Path("state.db")):
        raise error
    assert isinstance(caught.value, StateUnwritableError) == is_full
    assert ("make room" in str(caught.value)) == is_full
    assert ("move it away" in str(caught.value)) != is_full
