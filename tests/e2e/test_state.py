"""What is remembered between two runs: when it is broken, cannot be written, is held, grows; and how it is moved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed, event_ids, sandbox, wait_until
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.files import Tail, told, where_permissions_hold
from tests.e2e.surroundings import (
    SmallDisk,
    documents,
    folder_snapshot,
    no_longer_files,
    no_room_for_state,
    numbered,
    read_only_state,
    resident_bytes,
    small_disk,
    spooled,
)

QUICK = {"batch.linger_seconds": 0.02, "input.poll_interval_seconds": 0.1, "state.commit_interval_seconds": 0.05}
ORDERLY = {**QUICK, "delivery.concurrency": 1, "batch.max_events": 10, "batch.unique_consumers": "false"}
RETRY_SOON = {"delivery.retry_initial_seconds": 0.05, "delivery.retry_max_seconds": 0.1}


@pytest.fixture
def tail(shipper: Shipper, service: Service, sample: Sample) -> Tail:
    return Tail(shipper, service, sample)


@pytest.fixture
def file(shipper: Shipper, sample: Sample) -> Path:
    path = shipper.folder / "events.ndjson"
    path.write_bytes(b"".join(sample.lines[:300]))
    return path


# A state store that cannot be trusted -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def used_directory(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with a checkpoint, totals and dead letters."""
    with sandbox() as service, Shipper(tmp_path_factory.mktemp("used") / "shipper", service.target) as shipper:
        assert shipper.pipe(b"{}\n" * 100 + sample.lines[0]).returncode == 3
    return shipper.state


@pytest.fixture
def used_state(shipper: Shipper, used_directory: Path) -> Path:
    """The state store of a directory that was used."""
    shutil.copytree(used_directory, shipper.state)
    return shipper.state / "state.db"


def state_snapshot(shipper: Shipper) -> dict[str, tuple[int, bytes]]:
    """All that counts; a reader leaves the index of the log behind, and an empty log."""
    found = folder_snapshot(shipper.state, without=["lock", "state.db-shm"])
    return {name: (mode, data) for name, (mode, data) in found.items() if name != "state.db-wal" or data}


def assert_refused(shipper: Shipper, service: Service, *arguments: str | Path, **options: Any) -> None:
    """It ends with 1 and one line that names the file and says what to do; nothing is touched, nothing is sent."""
    before = state_snapshot(shipper)
    result = shipper.run(*arguments, check=False, limit_s=10, **options)
    assert (result.returncode, result.stdout) == (1, ""), result.stderr
    message = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(message) == 1, result.stderr
    assert str(shipper.state / "state.db") in message[0]
    assert "left as it is" in message[0]
    assert state_snapshot(shipper) == before
    assert service.counts()["requests"] == 0, "it began from the start by itself"


def test_a_state_store_that_was_cut_anywhere_is_refused(
    shipper: Shipper, service: Service, used_state: Path, file: Path
):
    data = used_state.read_bytes()
    for size in (2, 100, 4096, len(data) - 4096, len(data) - 1):
        used_state.write_bytes(data[:size])
        assert_refused(shipper, service, "backfill", file)
    used_state.write_bytes(data)
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


@pytest.mark.parametrize("command", ["status", "dead-letters"])
def test_what_only_looks_at_a_broken_state_store_refuses_it_too(
    shipper: Shipper, service: Service, used_state: Path, command: str
):
    arguments = {"status": ["status"], "dead-letters": ["dead-letters", "list"]}[command]
    good = used_state.read_bytes()
    for spoiled in (b"this is no database\n" * 500, good[: len(good) // 2], bytes(len(good))):
        used_state.write_bytes(spoiled)
        assert_refused(shipper, service, *arguments)


def _make_newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1000")
        db.execute("CREATE TABLE of_tomorrow (thing TEXT)")


def _make_foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA journal_mode = WAL; CREATE TABLE recipes (name TEXT)")


@pytest.mark.parametrize("command", ["backfill", "status"])
@pytest.mark.parametrize("spoil", [_make_newer, _make_foreign], ids=["newer", "foreign"])
def test_not_even_the_log_of_a_newer_or_foreign_database_is_written_into_it(
    shipper: Shipper,
    service: Service,
    used_state: Path,
    file: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    command: str,
):
    """Its owner died within its work: what it had committed stands in the log beside the database."""
    spoil(used_state)
    with closing(sqlite3.connect(used_state)) as db:
        db.executescript("CREATE TABLE more (thing TEXT); INSERT INTO more VALUES ('precious')")
        log = used_state.with_name("state.db-wal").read_bytes()
        assert b"precious" in log
        shutil.copy(used_state, tmp_path)
    # Closing has emptied the log into the database; a crash would not have.
    shutil.copy(tmp_path / "state.db", used_state)
    used_state.with_name("state.db-wal").write_bytes(log)
    assert_refused(shipper, service, *([command, file] if command == "backfill" else [command]))


@pytest.mark.parametrize("kind", ["a folder", "not permitted"])
def test_a_state_store_that_cannot_be_opened_is_refused(shipper: Shipper, service: Service, file: Path, kind: str):
    prefix: list[str] = []
    shipper.state.mkdir(mode=0o700)
    path = shipper.state / "state.db"
    if kind == "a folder":
        path.mkdir()
    else:
        path.touch(mode=0)
        prefix = where_permissions_hold()
    assert_refused(shipper, service, "backfill", file, prefix=prefix)


def test_after_a_broken_state_store_was_moved_away_everything_is_sent_again_with_the_same_ids(
    shipper: Shipper, service: Service, file: Path, sample: Sample
):
    """What the message says to do."""
    assert shipper.backfill(file).returncode == 0
    database = shipper.state / "state.db"
    database.write_bytes(database.read_bytes()[:5000])
    assert shipper.run("backfill", file, check=False).returncode == 1
    database.rename(shipper.folder / "broken.db")
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[:300], 2)


# A state store that cannot be written for a while -----------------------------------------------------------------


Trouble = Callable[[Running], AbstractContextManager[None]]


@pytest.fixture
def disk(shipper: Shipper) -> Iterator[SmallDisk]:
    """The state directory is a disk of its own."""
    with small_disk(shipper.state, 24 << 20) as disk:
        yield disk


@pytest.fixture(params=["full", "limited", "read-only"])
def trouble(request: pytest.FixtureRequest, shipper: Shipper) -> Trouble:
    """A way in which nothing can be written for as long as it is entered."""
    if request.param == "full":
        disk = request.getfixturevalue("disk")
        return lambda running: no_room_for_state(running, disk)
    if request.param == "limited":
        return lambda running: no_longer_files(running, shipper)
    return read_only_state


def save_some(tail: Tail, shipper: Shipper, running: Running) -> int:
    """Have some commits, so that the log of the state store is longer than what is on stderr."""
    for end in (10, 20, 30):
        tail.append(end - 10, end)
        running.wait_until(lambda end=end: shipper.read_state().accepted == end, "it is saved")
    return 30


def test_an_unwritable_state_pauses_a_run_which_goes_on_by_itself(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail, trouble: Trouble
):
    events = 25_000
    shipper.target = fake.target
    running = tail.start()
    saved = save_some(tail, shipper, running)
    with trouble(running):
        tail.append(saved, saved + 100)
        running.wait_for("delivery_paused", limit_s=20)
        (told_once,) = told(running, "delivery_paused")
        assert told_once["reason"] == "state_unwritable"
        assert str(shipper.state) in told_once["message"]
        assert shipper.read_state().accepted == saved, "something was saved: the case was not exercised"
        tail.append(saved + 100, events)
        before = -1
        while before != fake.requests:  # until nothing more leaves
            before = fake.requests
            with pytest.raises(AssertionError, match="not within"):
                running.wait_until(lambda: False, "time passes", limit_s=0.3)
        sent = len(fake.event_ids())
        assert sent < events * 0.7, "reading did not stop"
        assert shipper.read_state().accepted == saved
        assert told(running, "delivery_resumed") == []
    running.wait_for("delivery_resumed", limit_s=20)
    assert told(running, "delivery_resumed")[0]["reason"] == "state_unwritable"
    running.wait_until(lambda: shipper.read_state().accepted == events, "everything is saved", limit_s=30)
    assert len(told(running, "delivery_paused")) == 1, "it is told once"
    result = running.stop()
    assert result.returncode == 0
    assert Counter(fake.event_ids()) == Counter(sample.ids[:events]), "nothing is sent twice within one process"


@pytest.mark.parametrize("end", ["kill", "SIGTERM"])
def test_an_end_while_the_state_is_unwritable_repeats_only_what_was_not_saved(
    shipper: Shipper, service: Service, tail: Tail, disk: SmallDisk, end: str
):
    running = tail.start()
    saved = save_some(tail, shipper, running)
    with no_room_for_state(running, disk):
        tail.append(saved, saved + 100)
        running.wait_for("delivery_paused", limit_s=20)
        running.wait_until(lambda: service.received == saved + 100, "what is not saved was sent")
        if end == "kill":
            running.kill()
        else:
            result = running.stop()
            assert result.returncode in {1, 4}, "what was not saved is pending"
        assert shipper.read_state().accepted == saved
    again = tail.start()
    tail.append(saved + 100, saved + 150)
    tail.wait(saved + 150)
    again.wait_until(lambda: shipper.read_state().accepted == saved + 150, "all is saved")
    assert again.stop().returncode == 0
    times = service.times_received()
    assert times == dict.fromkeys(tail.ids(saved), 1) | dict.fromkeys(tail.ids(range(saved, saved + 100)), 2) | (
        dict.fromkeys(tail.ids(range(saved + 100, saved + 150)), 1)
    )


@pytest.mark.parametrize("command", ["backfill", "pipe"])
def test_one_that_has_an_end_gives_up_when_the_state_stays_unwritable(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path, disk: SmallDisk, command: str
):
    shipper.target = fake.target
    fake.plan(OK, HANG)
    arguments = [command, *([file] if command == "backfill" else []), "--summary", "json"]
    settings = {**ORDERLY, "delivery.give_up_after_seconds": 0.5}
    with file.open("rb") as stdin:
        running = shipper.start(*arguments, settings=settings, stdin=stdin)
        running.wait_until(lambda: shipper.read_state().accepted == 10, "the first batch is saved")
        with no_room_for_state(running, disk):
            fake.release()
            result = running.finish()
            assert shipper.read_state().accepted == 10
    assert result.returncode == 4
    assert "delivery.give_up_after_seconds" in result.stderr
    assert str(shipper.state) in result.stderr
    assert result.counts()[0] == sum(result.counts()[1:])
    assert told(result, "delivery_paused")[0]["reason"] == "state_unwritable"
    with open(os.devnull, "rb") as nothing:
        again = shipper.run(*arguments, stdin=nothing)
    assert (again.returncode, again.counts()) == (0, (290, 290, 0, 0, 0))
    assert set(fake.event_ids()) == set(sample.ids[:300])


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "used"])
def test_a_start_without_any_room_is_told_and_the_next_one_has_lost_nothing(
    shipper: Shipper, service: Service, sample: Sample, file: Path, disk: SmallDisk, is_new: bool
):
    if not is_new:
        assert shipper.pipe(sample.lines[300]).returncode == 0
    disk.fill()
    result = shipper.backfill(file, settings={"delivery.give_up_after_seconds": 0.5}, limit_s=10)
    assert disk.free_bytes == 0
    assert result.returncode in {1, 4}, result
    assert str(shipper.state) in result.stderr
    disk.free()
    again = shipper.backfill(file)
    assert (again.returncode, again.counts()) == (0, (300, 300, 0, 0, 0))
    assert service.holds(sample.ids[:300])


def test_an_input_larger_than_the_disk_of_the_spool_gets_through(
    shipper: Shipper, fake: FakeService, sample: Sample, disk: SmallDisk
):
    """The spool must not take the last bytes that the commit needs by which it would shrink."""
    shipper.target = fake.target
    fake.default = HANG
    disk.fill(leave_bytes=12 << 20)
    with sample.path.open("rb") as stdin:
        settings = {**QUICK, "spool.segment_bytes": 500_000, "delivery.give_up_after_seconds": 5}
        running = shipper.start("pipe", "--summary", "json", stdin=stdin, settings=settings)
        running.wait_for("disk_full", limit_s=20)
        assert 0 < os.lseek(stdin.fileno(), 0, os.SEEK_CUR) < sample.path.stat().st_size, "all of it had room"
        fake.default = OK
        fake.release()
        result = running.finish(limit_s=40)
    assert (result.returncode, result.counts()[1]) == (0, len(sample.ids)), result.stderr
    assert Counter(fake.event_ids()) == Counter(sample.ids)
    assert spooled(shipper) == []


def test_a_pipe_that_finds_no_room_for_its_spool_gives_up(
    shipper: Shipper, service: Service, sample: Sample, disk: SmallDisk
):
    ids = sample.ids[:10_000]
    file = shipper.folder / "long.ndjson"
    file.write_bytes(b"".join(sample.lines[: len(ids)]))
    disk.fill(leave_bytes=500_000)
    with file.open("rb") as stdin:
        settings = {**QUICK, "delivery.give_up_after_seconds": 0.5}
        result = shipper.run("pipe", "--summary", "json", stdin=stdin, settings=settings, limit_s=15)
        assert result.returncode == 4
        assert "disk_full" in result.stderr
        assert str(shipper.state) in result.stderr
        disk.free()
        # What was not read is still there, as it comes from a file.
        again = shipper.run("pipe", "--summary", "json", stdin=stdin)
    assert (again.returncode, again.counts()[0] + result.counts()[1]) == (0, len(ids))
    service.assert_holds_exactly(ids)


def test_a_pipe_whose_spool_has_no_room_reads_on_when_there_is_some(
    shipper: Shipper, fake: FakeService, sample: Sample, disk: SmallDisk
):
    shipper.target = fake.target
    fake.default = HANG
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=QUICK)
    running.stdin.write(b"".join(sample.lines[:100]))
    running.stdin.flush()
    running.wait_until(lambda: fake.requests, "it works")
    disk.fill()
    producer = threading.Thread(target=running.stdin.write, args=[b"".join(sample.lines[100:10_000])], daemon=True)
    producer.start()
    running.wait_for("disk_full", limit_s=20)
    assert disk.free_bytes == 0
    assert not running.has_ended
    assert producer.is_alive(), "all of it had room"
    disk.free()
    fake.default = OK
    fake.release()
    producer.join(20)
    running.stdin.close()
    result = running.finish(limit_s=40)
    assert (result.returncode, result.counts()[:2]) == (0, (10_000, 10_000))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:10_000])


# A state store that somebody holds --------------------------------------------------------------------------------


@pytest.fixture
def holder(shipper: Shipper, service: Service, sample: Sample) -> Running:
    """A shipper that holds the state directory and has done something."""
    holder = shipper.start("pipe", stdin=subprocess.PIPE, settings=QUICK)
    holder.stdin.write(b"{}\n" + sample.lines[400])
    holder.stdin.flush()
    holder.wait_until(lambda: shipper.read_state().read == 2, "it works")
    return holder


def test_what_only_looks_is_not_held_up_by_a_running_shipper(
    shipper: Shipper, holder: Running, file: Path, sample: Sample
):
    status = shipper.run("status", "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["state"]["spool"]["segments"] == 1, "what it has read"
    for arguments in (["status"], ["dead-letters", "list"], ["validate", file], ["config", "show"]):
        result = shipper.run(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)
    assert str(sample.lines[400][:10]) not in holder.stderr
    assert not holder.has_ended
    assert (shipper.state / "lock").read_text() == f"{holder.pid}\n"


def test_a_shipper_that_is_stopped_by_the_kernel_still_holds_its_state(
    shipper: Shipper, service: Service, holder: Running, file: Path
):
    """And under whatever name the directory goes: nothing is taken for stale that is not."""
    holder.process.send_signal(signal.SIGSTOP)
    link = shipper.folder / "link"
    link.symlink_to(shipper.state)
    for directory in (link, Path("state")):
        result = shipper.run("backfill", file, settings={"state.directory": directory})
        assert (result.returncode, result.stdout) == (5, "")
        assert f"process {holder.pid}" in result.stderr
    assert service.stored == 1
    holder.process.send_signal(signal.SIGCONT)
    holder.kill()
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


def test_of_many_that_start_at_once_one_works_and_the_others_name_it(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    shipper.target = fake.target
    fake.default = HANG
    started = [shipper.start("backfill", file, "--summary", "json", check=False) for _ in range(4)]
    wait_until(lambda: sum(each.has_ended for each in started) == 3, "all but one have ended")
    (worker,) = [each for each in started if not each.has_ended]
    for each in started:
        if each is not worker:
            result = each.finish()
            assert result.returncode == 5
            assert f"process {worker.pid}" in result.stderr
    fake.default = OK
    fake.release()
    assert worker.finish().counts() == (300, 300, 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


def test_a_lock_file_of_a_crash_holds_nobody_up_even_if_its_number_belongs_to_another_process(
    shipper: Shipper, service: Service, file: Path
):
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "lock").write_text(f"{os.getpid()}\n")
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


# A state store that grows -----------------------------------------------------------------------------------------


def known_streams(shipper: Shipper) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(f"file:{shipper.state}/state.db?mode=ro", uri=True, timeout=10)) as db:
        return db.execute("SELECT stream_id, path FROM streams ORDER BY stream_id").fetchall()


def add_gone_streams(shipper: Shipper, count: int) -> None:
    """Have the state store know so many files that were read to their end and are gone by now."""
    device = shipper.folder.stat().st_dev
    with closing(sqlite3.connect(shipper.state / "state.db")) as db, db:
        first = db.execute("SELECT youngest_stream_id FROM totals").fetchone()[0] + 1
        db.executemany(
            "INSERT INTO streams (stream_id, kind, path, device, inode, checkpoint, head_bytes, head_digest, "
            "marker_bytes, marker_digest, updated_at, size) VALUES (?, 'file', ?, ?, ?, 400, 400, ?, 64, ?, ?, 400)",
            [
                (
                    number,
                    f"{shipper.folder}/logs/gone.{number}.ndjson",
                    device,
                    10**15 + number,
                    number.to_bytes(16),
                    number.to_bytes(16),
                    1.7e9 + number,
                )
                for number in range(first, first + count)
            ],
        )
        db.execute("UPDATE totals SET youngest_stream_id = ?", (first + count - 1,))


@pytest.mark.parametrize(("command", "count"), [("run", 100_000), ("backfill", 20_000)])
def test_files_that_came_and_went_are_forgotten_but_for_the_youngest(
    shipper: Shipper, service: Service, tail: Tail, command: str, count: int
):
    """The oldest stream of all is that of a file that is still there: it is not forgotten."""
    tail.append(0, 10)
    assert shipper.backfill(tail.file).counts() == (10, 10, 0, 0, 0)
    (oldest,) = known_streams(shipper)
    add_gone_streams(shipper, count)
    size_bytes = (shipper.state / "state.db").stat().st_size
    tail.append(10, 20)
    new = tail.append(20, 30, "app.ndjson.2")
    if command == "run":
        running = tail.start()
        tail.wait(30)
        running.wait_until(lambda: len(known_streams(shipper)) < 11_000, "they are forgotten")
        result = running.stop()
    else:
        running = shipper.start("backfill", tail.file, new, "--summary", "json", settings=QUICK)
        result = running.finish()
        assert result.counts() == (20, 20, 0, 0, 0), "the file that was known was read on"
    assert result.returncode == 0
    assert running.peak_bytes < 250 << 20
    service.assert_holds_exactly(tail.ids(30))
    assert set(service.times_received().values()) == {1}
    left = known_streams(shipper)
    assert oldest in left
    assert len(left) <= 10_002
    gone = [stream_id for stream_id, path in left if ".gone" not in path and "gone." in path]
    assert gone == list(range(oldest[0] + count + 1 - len(gone), oldest[0] + count + 1)), "the oldest go first"
    assert len(gone) >= 9_000, "more were forgotten than need be"
    state = shipper.read_state()
    assert (state.read, state.accepted) == (30, 30), "the counts stay"
    assert (shipper.state / "state.db").stat().st_size < size_bytes + (4 << 20)
    with closing(sqlite3.connect(shipper.state / "state.db")) as db:
        assert db.execute("SELECT unreachable_bytes FROM totals").fetchone() == (0,), "what was settled is not missed"


def test_files_that_come_and_go_while_it_runs_do_not_add_up(shipper: Shipper, service: Service, tail: Tail):
    """For months, with no start between."""
    tail.append(0, 10)
    assert shipper.backfill(tail.file).returncode == 0
    add_gone_streams(shipper, 10_950)
    running = tail.start(input__rotate_wait_seconds=0.1, log__level="debug")  # with every repeat
    paths = [tail.append(number, number + 1, f"app.ndjson.{number}") for number in range(10, 110)]
    tail.wait(110)
    running.wait_until(lambda: shipper.read_state().accepted == 110, "they are read and settled")
    for path in paths:
        path.unlink()
    running.wait_until(lambda: len(told(running, "source_closed")) == 100, "they are let go")
    tail.append(110, 111, "app.ndjson.110")
    tail.wait(111)
    running.wait_until(lambda: len(known_streams(shipper)) < 10_400, "the oldest are forgotten")
    assert len(known_streams(shipper)) >= 10_000
    assert running.stop().returncode == 0
    assert set(service.times_received().values()) == {1}


def test_a_file_that_is_gone_with_something_unread_is_not_forgotten_among_many(
    shipper: Shipper, service: Service, fake: FakeService, tail: Tail
):
    """It comes back, from a disk that was not there, and is read on where it was."""
    tail.append(0, 100)
    shipper.target = fake.target
    fake.plan(OK)
    fake.default = HANG
    running = shipper.start("backfill", tail.file, settings=ORDERLY)
    running.wait_until(lambda: shipper.read_state().accepted == 10, "a part of it is saved")
    running.kill()
    shipper.target = service.target
    away = tail.file.rename(shipper.folder / "away.ndjson")
    add_gone_streams(shipper, 12_000)
    tail.append(100, 110, "app.ndjson.2")
    assert shipper.backfill(tail.folder / "app.ndjson.2").counts() == (10, 10, 0, 0, 0)
    assert 10_000 <= len(known_streams(shipper)) < 10_010, "nothing was forgotten: the case was not exercised"
    away.rename(tail.file)
    assert shipper.backfill(tail.file).counts() == (90, 90, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(tail.ids(range(10, 110)), 1)


# When it is written -----------------------------------------------------------------------------------------------


def test_no_checkpoint_passes_an_answer_that_is_outstanding(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample, tail: Tail
):
    """B02, B03: later batches are accepted while one hangs, a commit goes by, and it is killed."""
    shipper.target = fake.target
    fake.plan(HANG)
    tail.append(0, 500)
    running = tail.start(batch__max_events=100, delivery__concurrency=4, batch__unique_consumers="false")
    running.wait_until(lambda: fake.answered == 4, "all batches but one are accepted")
    (tail.folder / "app.ndjson.2").write_bytes(b"{}\n")
    running.wait_until(lambda: shipper.read_state().dead_lettered == 1, "a commit goes by, as another file shows")
    position = sample.ids.index(fake.event_ids(fake.bodies[:1])[0])
    assert shipper.read_state().accepted == position < 400, "a checkpoint has passed what was not answered"
    running.kill()
    shipper.target = service.target
    again = tail.start()
    again.wait_until(lambda: service.stored >= 500 - position, "all from there on is sent again")
    assert again.stop().returncode == 0
    assert service.times_received() == dict.fromkeys(sample.ids[position:500], 1)
    assert shipper.read_state().accepted == 500


@pytest.mark.parametrize("command", ["run", "pipe"])
def test_lines_that_are_no_records_move_the_checkpoint_too(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail, command: str
):
    """B11: after a kill, none of them is read again, and each is a dead letter once."""
    data = b"not json\n" * 40 + sample.lines[0] + b"[]\n\n \n" * 59
    if command == "run":
        tail.file.write_bytes(data)
        running = tail.start()
    else:
        running = shipper.start("pipe", stdin=subprocess.PIPE, settings=QUICK)
        running.stdin.write(data)
        running.stdin.flush()
    running.wait_until(lambda: shipper.read_state().read == 100, "all are handled")
    running.kill()
    state = shipper.read_state()
    assert (state.accepted, state.dead_lettered) == (1, 99)
    if command == "run":
        running = tail.start()
        tail.append(1, 2)
        running.wait_until(lambda: service.stored == 2, "what came later")
        assert running.stop().returncode == 0
    else:
        assert shipper.pipe(sample.lines[1]).counts() == (1, 1, 0, 0, 0)
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (101, 2, 99)
    assert service.times_received() == dict.fromkeys(sample.ids[:2], 1)


# What stands in the input -----------------------------------------------------------------------------------------


def test_a_mark_of_byte_order_is_no_part_of_the_first_record_whatever_the_format(
    shipper: Shipper, service: Service, sample: Sample
):
    """J01."""
    mark = b"\xef\xbb\xbf"
    events = documents(sample.lines[:40])
    header = ",".join(events[0])
    rows = "\n".join(",".join(str(value) for value in event.values()) for event in events[10:20])
    files = {
        "a.ndjson": b"".join(sample.lines[:10]),
        "b.csv": f"{header}\n{rows}\n".encode(),
        "c.json": json.dumps(events[20:30]).encode(),
        "d.json": json.dumps({"EventType": "Acquisition", "events": events[30:]}).encode(),
    }
    folder = shipper.folder / "marked"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(mark + data)
    result = shipper.backfill(folder)
    assert (result.returncode, result.counts()) == (0, (40, 40, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:40])


def test_a_mark_of_byte_order_that_comes_in_parts_and_over_a_restart_is_one(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    """J01, J08: a file that begins with a part of it is waited for."""
    other = tail.append(10, 11, "app.ndjson.2")
    tail.file.write_bytes(b"\xef\xbb")
    running = tail.start()
    tail.wait([10])
    running.wait_until(lambda: shipper.read_state().accepted == 1, "it is saved")
    running.kill()
    with tail.file.open("ab") as out:
        out.write(b"\xbf" + sample.lines[0][:100])
    running = tail.start()
    tail.append(11, 12, other.name)
    tail.wait([10, 11])
    with tail.file.open("ab") as out:
        out.write(sample.lines[0][100:])
    tail.wait([0, 10, 11])
    tail.append(1, 5)
    tail.wait([0, 1, 2, 3, 4, 10, 11])
    tail.stop([0, 1, 2, 3, 4, 10, 11])


@pytest.mark.parametrize("command", ["run", "pipe"])
def test_bytes_that_are_no_text_are_a_dead_letter_with_their_place_and_no_neighbour_is(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail, command: str
):
    """J03."""
    odd = [b"\xff\xfe{\x00", sample.lines[2].rstrip().replace(b'"Username":"', b'"Username":"\xe9'), b"\xc3"]
    lines = [sample.lines[0], odd[0] + b"\n", sample.lines[1], odd[1] + b"\n", odd[2] + b"\n", sample.lines[3]]
    data = b"".join(lines)
    if command == "run":
        tail.file.write_bytes(data)
        running = tail.start()
        running.wait_until(lambda: shipper.read_state().read == 6, "all are handled")
        assert running.stop().returncode == 0
    else:
        assert shipper.pipe(data).counts() == (6, 3, 3, 0, 0)
    service.assert_holds_exactly([sample.ids[number] for number in (0, 1, 3)])
    letters = shipper.read_state().dead_letters
    assert [letter.raw for letter in letters] == odd
    assert [data[letter.start_offset : letter.end_offset] for letter in letters] == odd
    assert {letter.rule for letter in letters} <= {"encoding", "json"}


def test_a_torn_last_line_is_read_once_whole_wherever_it_is_torn(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    """J08: within a name of two bytes a letter, at the brace, and before the newline; one start for each."""
    line = changed(sample.lines[1], Username="Ærøskøbing").decode()
    torn = json.dumps(json.loads(line), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    places = [torn.index("Æ".encode()) + 1, len(torn) - 2, len(torn) - 1]
    tail.append(0, 1)
    other = tail.append(10, 11, "app.ndjson.2")
    wanted = [0, 10]
    for number, (start, stop) in enumerate(zip([0, *places], [*places, len(torn)], strict=True), 11):
        with tail.file.open("ab") as out:
            out.write(torn[start:stop])
        running = tail.start()
        tail.append(number, number + 1, other.name)
        wanted += [number] + ([1] if stop == len(torn) else [])
        tail.wait(wanted)
        running.wait_until(lambda wanted=wanted: shipper.read_state().accepted == len(wanted), "it is saved")
        if number % 2:
            running.kill()
        else:
            assert running.stop().returncode == 0
        assert service.times_received() == dict.fromkeys(tail.ids(wanted), 1)
    assert json.loads(service.event(sample.ids[1])["raw"])["Username"] == "Ærøskøbing"
    assert shipper.read_state().dead_letters == ()


# How much it takes ------------------------------------------------------------------------------------------------


def test_a_service_that_is_away_while_the_input_goes_on_costs_no_memory(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail
):
    """G01."""
    shipper.target = fake.target
    fake.default = Reply(status=503)
    rounds, lines_each = 3, 12_000
    settings = {"batch__max_events": 200, "delivery__concurrency": 2}
    running = tail.start(**settings, delivery__retry_initial_seconds=0.02, delivery__retry_max_seconds=0.05)
    written: list[str] = []
    resident: list[int] = []
    for number in range(rounds):
        lines = numbered(sample.lines[:lines_each], number)
        with tail.file.open("ab") as out:
            out.writelines(lines)
        written += event_ids(lines)
        before = fake.requests
        running.wait_until(lambda before=before: fake.requests >= before + 20, "it tries again and again")
        resident.append(resident_bytes(running))
    assert tail.file.stat().st_size > 12_000_000
    # The first round has filled whatever may be filled.
    assert max(resident) - resident[0] < 6 << 20, [size >> 20 for size in resident]
    assert shipper.read_state().read == 0, "the offset has moved"
    assert len(set(fake.event_ids(fake.bodies))) <= 400, "only what is in flight is tried"
    fake.default = OK
    running.wait_until(lambda: shipper.read_state().accepted == len(written), "it catches up", limit_s=40)
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(written)


LONG = 300 << 20


def write_long_line(path: Path, *, newline: bool = True) -> None:
    """Append a line of 300 MB, which takes no room on the disk."""
    with path.open("r+b" if path.exists() else "wb") as out:
        out.seek(0, os.SEEK_END)
        start = out.tell()
        out.write(b"x")
        out.seek(start + LONG - 2)
        out.write(b"y\n" if newline else b"yz")


@pytest.mark.parametrize("command", ["backfill", "pipe"])
def test_a_line_of_300_megabytes_is_a_dead_letter_by_its_place_and_costs_no_memory(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail, command: str
):
    """G02."""
    tail.append(0, 10)
    start = tail.file.stat().st_size
    write_long_line(tail.file)
    tail.append(10, 20)
    with tail.file.open("rb") as stdin:
        paths = [tail.file] if command == "backfill" else []
        result = shipper.run(command, *paths, "--summary", "json", stdin=stdin)
    assert (result.returncode, result.counts()) == (3, (21, 20, 1, 0, 0))
    assert 10 << 20 < result.peak_bytes < 130 << 20
    service.assert_holds_exactly(sample.ids[:20])
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.start_offset) == ("oversized", start)
    assert len(letter.raw) < 2 << 20
    if command == "backfill":
        assert letter.path == str(tail.file)
        assert letter.end_offset in {start + LONG - 1, start + LONG}
    else:
        assert letter.end_offset < start + (2 << 20), "the spool keeps no more than what tells that it is too long"


def test_a_line_of_300_megabytes_that_is_still_being_written_at_a_kill_is_one_dead_letter(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    """G02, of a file that is followed."""
    tail.append(0, 10)
    start = tail.file.stat().st_size
    write_long_line(tail.file, newline=False)
    other = tail.append(20, 21, "app.ndjson.2")
    running = tail.start()
    tail.wait([*range(10), 20])
    tail.append(21, 22, other.name)
    tail.wait([*range(10), 20, 21])
    running.wait_until(lambda: shipper.read_state().accepted == 12, "it is saved")
    running.kill()
    assert shipper.read_state().dead_letters == ()
    with tail.file.open("ab") as out:
        out.write(b"the end\n")
    tail.append(10, 20)
    running = tail.start()
    tail.wait(22, limit_s=30)
    tail.stop(22, dead_lettered=1)
    assert running.peak_bytes < 130 << 20
    (letter,) = shipper.read_state().dead_letters
    assert letter.start_offset == start
    assert letter.end_offset - start in {LONG + len(b"the end"), LONG + len(b"the end\n")}
