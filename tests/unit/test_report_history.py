"""The history of reports: every version is stored, equal answers are counted, several processes may write."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import date
from decimal import Decimal
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shipper.model import wire
from shipper.model.errors import ConfigError, StateError
from shipper.report.document import FetchedReport, read_report
from shipper.report.history import SCHEMA_VERSION, History, LatestFetch, Version, latest_fetch
from shipper.report.ranges import DateRange, Part
from shipper.state.directory import locked_directory
from shipper.state.store import Store
from tests.report_documents import brand, entry, report

START, END = date(2026, 1, 1), date(2026, 1, 31)
PART = Part(1001, DateRange(START, END))


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with closing(History(tmp_path / "state")) as made:
        yield made


def body(amount: object = 1, request: int = 0) -> bytes:
    """Return an answer: `amount` is the content, `request` changes the fields that differ with each request."""
    made = report(brand(entry()))
    made = replace(made, opening_balance=Decimal(str(amount)), last_check_sum=f"{amount}", id=f"{request}")
    return wire.encode_report(replace(made, reporting_time=f"2026-02-01T08:00:00.{request:07}Z"))


def answer(body: bytes, at: float = 1) -> FetchedReport:
    return read_report(body, account_id=1001, fetched_at=at)


def add(history: History, amount: object = 1, at: float = 1, request: int = 0) -> Version:
    return history.add(PART, answer(body(amount, request), at))


def kept(history: History) -> list[tuple[str, float, float, int]]:
    versions = history.versions(PART)
    return [(each.check_sum, each.first_fetched_at, each.last_fetched_at, each.fetches) for each in versions]


# Versions


def test_first_answer_is_the_first_version(history: History):
    added = add(history, at=5.25)
    assert added.is_new
    assert [added] == history.versions(PART)
    assert (added.part, added.first_fetched_at, added.fetches) == (PART, 5.25, 1)


def test_last_fetch_is_known_with_its_days(history: History, tmp_path: Path):
    add(history, at=5.25)
    assert latest_fetch(tmp_path / "state") == LatestFetch(5.25, 1001, START, END, "January 2026")


def test_same_content_is_counted_and_the_first_answer_stored(history: History):
    first = add(history, at=1)
    again = add(history, at=2, request=1)
    assert not again.is_new
    assert again.number == first.number
    assert again == history.versions(PART)[-1]
    assert kept(history) == [("1", 1, 2, 2)]
    assert history.body(again) == body(request=0) != body(request=1)


def test_accounts_and_periods_are_separate(history: History):
    days = [DateRange(START, END), DateRange(START, START), DateRange(END, END)]
    parts = [Part(1001, days[0]), Part(1002, days[0]), Part(1001, days[1]), Part(1001, days[2])]
    for number, part in enumerate(parts):
        assert history.versions(part) == []
        assert history.add(part, answer(body(number))).is_new
    for number, part in enumerate(parts):
        assert [history.body(version) for version in history.versions(part)] == [body(number)]


def test_undocumented_fields_are_content(history: History):
    add(history)
    assert history.add(PART, answer(body().replace(b'"brands"', b'"extra":1,"brands"'), 2)).is_new


def test_answers_slightly_out_of_order_give_the_same_versions(history: History):
    for amount, at in [(1, 1), (2, 4), (1, 2), (2, 3), (2, 5)]:
        add(history, amount, at)
    assert kept(history) == [("1", 1, 2, 2), ("2", 3, 5, 3)]


def test_a_clock_that_was_ahead_hides_no_restatement(history: History):
    add(history, 1, at=10_000)
    history.begin_hook(PART)
    assert [add(history, 1, at).is_new for at in (100, 200)] == [False, False]
    restated = history.add_and_compare(PART, answer(body(2), 300))
    assert restated.status == "restated"
    assert history.due_for_hook(PART) == history.versions(PART)[-1] == restated.version
    history.end_hook(restated.version)
    assert [history.add_and_compare(PART, answer(body(2), at)).status for at in (400, 11_000)] == ["unchanged"] * 2
    assert history.due_for_hook(PART) is None
    assert kept(history) == [("1", 10_000, 10_000, 3), ("2", 10_000, 11_000, 3)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=12))
@example([1, 2, 1, 1])
def test_a_version_is_a_run_of_equal_contents(tmp_path_factory: pytest.TempPathFactory, amounts: list[int]):
    with closing(History(tmp_path_factory.mktemp("state"))) as history:
        added = [add(history, amount, at, request=at) for at, amount in enumerate(amounts)]
        news = [version.is_new for version in added]
        runs = [list(run) for _, run in groupby(enumerate(amounts), key=lambda pair: pair[1])]
        assert kept(history) == [(str(run[0][1]), run[0][0], run[-1][0], len(run)) for run in runs]
        assert news == [index == 0 for run in runs for index in range(len(run))]
        versions = history.versions(PART)
        assert versions[-1:] == added[-1:]
        assert [history.body(each) for each in versions] == [body(run[0][1], run[0][0]) for run in runs]


def test_history_survives_the_process(tmp_path: Path):
    with closing(History(tmp_path)) as history:
        version = add(history)
    with closing(History(tmp_path)) as history:
        assert history.versions(PART) == [version]
        assert history.body(version) == body()


def test_body_is_stored_byte_for_byte_and_compressed(tmp_path: Path):
    made = wire.encode_report(report(brand(*(entry(number) for number in range(2000)))))
    spaced = b" \n" + made + b"\r\n"
    with closing(History(tmp_path)) as history:
        assert history.body(history.add(PART, answer(spaced))) == spaced
    assert (tmp_path / "reports.db").stat().st_size < len(made) / 5


def test_a_hook_is_due_for_later_versions_until_it_is_done(history: History):
    add(history, 1, at=1)
    old = add(history, 2, at=2)
    history.begin_hook(PART)
    assert history.since_hook(PART) == []
    new = add(history, 3, at=3)
    for _ in range(2):
        history.begin_hook(PART)
        assert history.since_hook(PART) == [old, new]
    newest = add(history, 4, at=4)
    assert history.since_hook(PART) == [old, new, newest]
    history.end_hook(new)
    assert history.since_hook(PART) == [new, newest]
    history.end_hook(newest)
    history.end_hook(new)
    assert history.since_hook(PART) == []
    assert history.since_hook(Part(1001, DateRange(START, START))) == []


def test_a_hook_configured_before_the_first_version_is_not_due_for_it(history: History):
    history.begin_hook(PART)
    first = add(history, 1, at=1)
    assert history.since_hook(PART) == [first]
    second = add(history, 2, at=2)
    assert history.since_hook(PART) == [first, second]


# The file


@pytest.mark.parametrize(
    "make", [lambda place: place.symlink_to("elsewhere"), os.mkfifo, Path.mkdir], ids=["link", "fifo", "folder"]
)
@pytest.mark.parametrize("name", ["reports.db", "reports.db-wal", "reports.db-shm"])
def test_link_pipe_or_folder_in_place_of_a_file_is_never_opened(
    name: str, make: Callable[[Path], None], tmp_path: Path
):
    """SQLite would write through a link, and block on a pipe."""
    with closing(History(tmp_path)) as history:
        add(history)
    place = tmp_path / name
    place.unlink(missing_ok=True)
    make(place)
    with pytest.raises(StateError, match=f"{place} is a .*remove this one"):
        History(tmp_path)
    assert latest_fetch(tmp_path) is None, "status does not need it"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.usefixtures("unmasked")
def test_only_the_owner_may_read_the_history(tmp_path: Path):
    directory = tmp_path / "above" / "state"
    with closing(History(directory)) as history:
        add(history)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.iterdir()]}
    assert modes == {"state": 0o700, "reports.db": 0o600, "reports.db-wal": 0o600, "reports.db-shm": 0o600}


def test_directory_open_to_others_is_made_private(tmp_path: Path):
    tmp_path.chmod(0o755)
    History(tmp_path).close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_shipper_and_a_history_can_use_the_state_at_the_same_time(tmp_path: Path):
    with locked_directory(tmp_path), closing(Store(tmp_path)), closing(History(tmp_path)) as history:
        assert add(history).is_new
    with closing(History(tmp_path)) as history, locked_directory(tmp_path), closing(Store(tmp_path)):
        assert add(history, 2, at=2).is_new


def test_directory_that_cannot_be_created_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"state\.directory: cannot use .*file"):
        History(tmp_path / "file")


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


def foreign(path: Path) -> None:
    sql(path, "PRAGMA journal_mode = WAL", "CREATE TABLE theirs (one)")


def newer(path: Path) -> None:
    History(path.parent).close()
    sql(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def of_the_records(path: Path) -> None:
    with locked_directory(path.parent):
        Store(path.parent).close()
    path.with_name("state.db").rename(path)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (foreign, "not written by shipper"),
        (of_the_records, "not written by shipper"),
        (newer, f"{SCHEMA_VERSION + 1}, .* shipper needs schema version {SCHEMA_VERSION}: use the version"),
        (lambda path: path.write_bytes(b"text" * 1000), "not a database"),
    ],
)
def test_foreign_or_damaged_file_is_left_unchanged(tmp_path: Path, make, why):
    path = tmp_path / "reports.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StateError, match=rf"reports\.db cannot be used \(.*({why}).*left unchanged.*move it away"):
        History(tmp_path)
    assert path.read_bytes() == before


def test_empty_file_is_used(tmp_path: Path):
    (tmp_path / "reports.db").touch(0o600)
    with closing(History(tmp_path)) as history:
        assert add(history).is_new


def test_damage_is_named(tmp_path: Path):
    with closing(History(tmp_path)) as history:
        version = add(history)
    sql(tmp_path / "reports.db", "UPDATE versions SET body = x'00'")
    with closing(History(tmp_path)) as history, pytest.raises(StateError, match=r"reports\.db cannot be used"):
        history.body(version)
    with open(tmp_path / "reports.db", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)
    with closing(History(tmp_path)) as history:
        with pytest.raises(StateError, match=r"reports\.db cannot be (used|written)"):
            add(history)
        with pytest.raises(StateError, match=r"reports\.db cannot be used"):
            history.versions(PART)


def test_missing_version_is_named(history: History):
    version = Version(7, 1001, START, END, "", "", 1, 1, 1)
    with pytest.raises(StateError, match="version 7 is not in it"):
        history.body(version)


def test_answer_that_cannot_be_stored_leaves_the_history_intact(history: History, tmp_path: Path):
    add(history, 1, at=1)
    with closing(sqlite3.connect(tmp_path / "state" / "reports.db")) as db:
        db.execute("CREATE TRIGGER full BEFORE INSERT ON versions BEGIN SELECT RAISE(ABORT, 'no room'); END")
        with pytest.raises(StateError, match=r"reports\.db cannot be written \(no room\).*fetch it again"):
            add(history, 2, at=2)
        db.execute("DROP TRIGGER full")
    assert kept(history) == [("1", 1, 1, 1)]
    assert add(history, 2, at=3).is_new


# Several at once

WRITER = """
import sys
from contextlib import closing
from datetime import date
from pathlib import Path
from shipper.report.document import read_report
from shipper.report.history import History
from shipper.report.ranges import DateRange, Part
number, directory, rounds = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
body = sys.stdin.buffer.read()
for round in range(rounds):
    for at in range(3):
        with closing(History(directory / str(round))) as history:
            part = Part(1001, DateRange(date(2026, 1, 1), date(2026, 1, 31)))
            history.add(part, read_report(body, account_id=1001, fetched_at=10 * number + at))
"""
WRITERS, ROUNDS = 3, 10


def test_processes_may_create_and_write_it_concurrently(tmp_path: Path):
    with ExitStack() as running:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words = [sys.executable, "-c", WRITER]
        writers = [
            running.enter_context(subprocess.Popen([*words, str(number), str(tmp_path), str(ROUNDS)], **pipes))
            for number in range(WRITERS)
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        for number, writer in enumerate(writers):
            writer.stdin.write(body(number))
            writer.stdin.close()
            writer.stdin = None
        assert [(writer.communicate()[1].decode(), writer.returncode) for writer in writers] == [("", 0)] * WRITERS
    for number in range(ROUNDS):
        with closing(History(tmp_path / str(number))) as history:
            assert kept(history) == [(str(writer), 10 * writer, 10 * writer + 2, 3) for writer in range(WRITERS)]


def test_two_histories_in_one_process_do_not_conflict(tmp_path: Path):
    with closing(History(tmp_path)) as one:
        add(one, 1, at=1)
        History(tmp_path).close()
        with closing(History(tmp_path)) as other:
            add(other, 2, at=2)
            assert kept(one) == kept(other) == [("1", 1, 1, 1), ("2", 2, 2, 1)]
        add(one, 3, at=3)
    with closing(History(tmp_path)) as again:
        assert len(kept(again)) == 3
