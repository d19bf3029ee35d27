"""An untrustworthy state store is refused and left unchanged, and nothing is sent."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper, sandbox
from tests.e2e.files import where_permissions_hold
from tests.e2e.surroundings import folder_snapshot

USED = b"{}\n" * 100


@dataclass(frozen=True)
class Used:
    """A state directory with a checkpoint, totals and dead letters, and the shipped file."""

    state: Path
    file: Path


@pytest.fixture(scope="module")
def used(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Used:
    folder = tmp_path_factory.mktemp("used")
    file = folder / "events.ndjson"
    file.write_bytes(USED + sample.lines[0])
    with sandbox() as service, Shipper(folder / "shipper", service.target) as shipper:
        assert shipper.backfill(file).counts() == (101, 1, 100, 0, 0)
    return Used(shipper.state, file)


@pytest.fixture
def used_state(shipper: Shipper, used: Used) -> Path:
    """The state store of a used directory."""
    shutil.copytree(used.state, shipper.state)
    return shipper.state / "state.db"


def state_snapshot(shipper: Shipper) -> dict[str, tuple[int, bytes]]:
    """Return the relevant files; a reader leaves the index of the log and an empty log."""
    found = folder_snapshot(shipper.state, without=["lock", "state.db-shm"])
    return {name: (mode, data) for name, (mode, data) in found.items() if name != "state.db-wal" or data}


def assert_refused(shipper: Shipper, service: Service, *arguments: str | Path, **options: Any) -> None:
    """Assert exit code 1, one line with the file and the remedy, unchanged files, and that nothing is sent."""
    before = state_snapshot(shipper)
    result = shipper.run(*arguments, check=False, **options)
    assert (result.returncode, result.stdout) == (1, ""), (arguments, result.stderr)
    message = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(message) == 1, result.stderr
    assert str(shipper.state / "state.db") in message[0]
    assert "left unchanged" in message[0]
    assert state_snapshot(shipper) == before
    assert service.counts()["requests"] == 0, "it started from the beginning"


def test_a_database_with_a_foreign_log_is_refused(shipper: Shipper, service: Service, sample: Sample):
    """As when one of the two is restored from a backup: together they contain neither state."""
    database, log = shipper.state / "state.db", shipper.state / "state.db-wal"

    def put_back(data: bytes, log_data: bytes) -> None:
        database.write_bytes(data)
        log.write_bytes(log_data)
        (shipper.state / "state.db-shm").unlink(missing_ok=True)

    copies: list[tuple[bytes, bytes]] = []
    for number in range(3):
        running = shipper.open_pipe(*sample.lines[number * 1000 : number * 1000 + 1000], settings=QUICK)
        read = (number + 1) * 1000
        running.wait_until(lambda read=read: shipper.read_state().read == read, "it is saved")
        running.kill()
        copies.append((database.read_bytes(), log.read_bytes()))
        assert copies[-1][1], "nothing is only in the log"
    (old, old_log), _, (new, new_log) = copies
    assert old != new
    sent = service.counts()["requests"]
    for pair in ((old, new_log), (new, old_log)):
        put_back(*pair)
        before = state_snapshot(shipper)
        result = shipper.run("pipe", check=False)
        assert (result.returncode, result.stdout) == (1, ""), result.stderr
        assert f"{database} and {log} do not belong together" in result.stderr
        assert "move the log away" in result.stderr
        assert state_snapshot(shipper) == before
        assert service.counts()["requests"] == sent
    put_back(old, b"")  # as the message advises
    assert shipper.pipe(sample.lines[3000]).returncode == 0
    for pair, read in ((copies[0], 1000), (copies[2], 3000)):  # both from the same moment are valid
        put_back(*pair)
        assert shipper.pipe(sample.lines[3000]).returncode == 0
        assert shipper.read_state().read == read + 1


def _damaged_pages(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))


def _table_missing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE totals")


def _with_log(path: Path) -> None:
    """Its owner was killed: the committed data is in the log next to the database."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE more (thing TEXT); INSERT INTO more VALUES ('precious')")
        data, log = path.read_bytes(), path.with_name("state.db-wal").read_bytes()
        assert b"precious" in log
    # Closing has merged the log into the database; a crash would not have.
    path.write_bytes(data)
    path.with_name("state.db-wal").write_bytes(log)


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1000")
        db.execute("CREATE TABLE of_tomorrow (thing TEXT)")
    _with_log(path)


def _only_the_log_is_left(path: Path) -> None:
    _with_log(path)
    path.unlink()


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _not_permitted(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize(
    ("spoil", "command"),
    [
        (_damaged_pages, "run"),
        (_table_missing, "backfill"),
        (_newer, "pipe"),
        (_only_the_log_is_left, "pipe"),
        (_emptied, "run"),
        (_not_permitted, "backfill"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.lstrip("_"),
)
def test_an_untrustworthy_state_store_is_refused_and_left_unchanged(
    shipper: Shipper, service: Service, used: Used, used_state: Path, spoil: Callable[[Path], None], command: str
):
    spoil(used_state)
    arguments = {"backfill": [used.file], "pipe": [], "run": ["--set", f'input.include=["{used.file}"]']}[command]
    with used.file.open("rb") as stdin:
        prefix = where_permissions_hold() if spoil is _not_permitted else []
        assert_refused(shipper, service, command, *arguments, stdin=stdin, prefix=prefix)
    if spoil in {_newer, _only_the_log_is_left, _emptied}:
        assert_refused(shipper, service, "status")
        assert_refused(shipper, service, "ledger")
    checked = shipper.run("check", "--json", prefix=prefix, check=False)
    (failed,) = (item for item in json.loads(checked.stdout)["items"] if item["result"] == "fail")
    assert (checked.returncode, failed["name"]) == (2, "state.directory")
    assert str(used_state) in failed["what"]


def test_read_only_commands_refuse_a_broken_state_store_too(shipper: Shipper, service: Service, used_state: Path):
    good = used_state.read_bytes()
    broken = {
        "garbage": b"this is no database\n" * 500,
        "half": good[: len(good) // 2],
        "zeros": bytes(len(good)),
        "another version": good[:60] + b"\xff" + good[61:],
        "no page of tables": good[:100] + b"\xff" + good[101:],
    }
    for spoiled in broken.values():
        used_state.write_bytes(spoiled)
        for command in (["status"], ["dead-letters", "list"]):
            assert_refused(shipper, service, *command)


def test_everything_is_sent_again_with_the_same_ids_after_a_broken_state_store_was_moved_away(
    shipper: Shipper, service: Service, sample: Sample, used: Used, used_state: Path
):
    assert shipper.backfill(used.file).counts() == (0, 0, 0, 0, 0), "the file is known"
    used_state.write_bytes(used_state.read_bytes()[:5000])
    assert_refused(shipper, service, "dead-letters", "list")
    used_state.rename(shipper.folder / "broken.db")
    assert shipper.backfill(used.file).counts() == (101, 1, 100, 0, 0)
    service.assert_holds_exactly(sample.ids[:1])
