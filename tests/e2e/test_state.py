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
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Running, Service, Shipper, changed, event_ids, sandbox, wait_until
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.files import Tail, told, where_permissions_hold
from tests.e2e.surroundings import (
    SmallDisk,
    folder_snapshot,
    no_longer_files,
    no_room_for_state,
    numbered,
    read_only_state,
    resident_bytes,
    small_disk,
    spooled,
)

ORDERLY = {**QUICK, "delivery.concurrency": 1, "batch.max_events": 10, "batch.unique_consumers": "false"}
RETRY_SOON = {"delivery.retry_initial_seconds": 0.05, "delivery.retry_max_seconds": 0.1}


# A state store that cannot be trusted -----------------------------------------------------------------------------


USED = b"{}\n" * 100


@dataclass(frozen=True)
class Used:
    """A state directory with a checkpoint, totals and dead letters, and the file that was shipped."""

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
    """The state store of a directory that was used."""
    shutil.copytree(used.state, shipper.state)
    return shipper.state / "state.db"


def state_snapshot(shipper: Shipper) -> dict[str, tuple[int, bytes]]:
    """All that counts; a reader leaves the index of the log behind, and an empty log."""
    found = folder_snapshot(shipper.state, without=["lock", "state.db-shm"])
    return {name: (mode, data) for name, (mode, data) in found.items() if name != "state.db-wal" or data}


def assert_refused(shipper: Shipper, service: Service, *arguments: str | Path, **options: Any) -> None:
    """It ends with 1 and one line that names the file and says what to do; nothing is touched, nothing is sent."""
    before = state_snapshot(shipper)
    result = shipper.run(*arguments, check=False, limit_s=10, **options)
    assert (result.returncode, result.stdout) == (1, ""), (arguments, result.stderr)
    message = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(message) == 1, result.stderr
    assert str(shipper.state / "state.db") in message[0]
    assert "left as it is" in message[0]
    assert state_snapshot(shipper) == before
    assert service.counts()["requests"] == 0, "it began from the start by itself"


def test_a_database_and_a_log_that_do_not_belong_together_are_refused(
    shipper: Shipper, service: Service, sample: Sample
):
    """As when one of the two is put back from a copy: what SQLite makes of them is neither state."""
    database, log = shipper.state / "state.db", shipper.state / "state.db-wal"

    def put_back(data: bytes, log_data: bytes) -> None:
        database.write_bytes(data)
        log.write_bytes(log_data)
        (shipper.state / "state.db-shm").unlink(missing_ok=True)

    copies: list[tuple[bytes, bytes]] = []
    for number in range(3):
        running = shipper.start("pipe", settings=QUICK, stdin=subprocess.PIPE)
        running.stdin.write(b"".join(sample.lines[number * 1000 : number * 1000 + 1000]))
        running.stdin.flush()
        read = (number + 1) * 1000
        running.wait_until(lambda read=read: shipper.read_state().read == read, "it is saved")
        running.kill()
        copies.append((database.read_bytes(), log.read_bytes()))
        assert copies[-1][1], "nothing stands in the log alone"
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
    put_back(old, b"")  # as the message says
    assert shipper.pipe(sample.lines[3000]).returncode == 0
    for pair, read in ((copies[0], 1000), (copies[2], 3000)):  # and both of one moment are what they were
        put_back(*pair)
        assert shipper.pipe(sample.lines[3000]).returncode == 0
        assert shipper.read_state().read == read + 1


def _half(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _damaged_pages(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xa5" * (len(data) - 4096))


def _table_missing(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE totals")


def _with_log(path: Path) -> None:
    """Its owner died within its work: what it had committed stands in the log beside the database."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE more (thing TEXT); INSERT INTO more VALUES ('precious')")
        data, log = path.read_bytes(), path.with_name("state.db-wal").read_bytes()
        assert b"precious" in log
    # Closing has emptied the log into the database; a crash would not have.
    path.write_bytes(data)
    path.with_name("state.db-wal").write_bytes(log)


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1000")
        db.execute("CREATE TABLE of_tomorrow (thing TEXT)")
    _with_log(path)


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA journal_mode = WAL; CREATE TABLE recipes (name TEXT)")
    _with_log(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _not_permitted(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize(
    ("spoil", "command"),
    [
        (_half, "pipe"),
        (_damaged_pages, "run"),
        (_table_missing, "backfill"),
        (_newer, "pipe"),
        (_foreign, "backfill"),
        (_folder, "backfill"),
        (_not_permitted, "backfill"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.lstrip("_"),
)
def test_a_state_store_that_cannot_be_trusted_is_refused_and_not_even_its_log_is_touched(
    shipper: Shipper, service: Service, used: Used, used_state: Path, spoil: Callable[[Path], None], command: str
):
    spoil(used_state)
    arguments = {"backfill": [used.file], "pipe": [], "run": ["--set", f'input.include=["{used.file}"]']}[command]
    with used.file.open("rb") as stdin:
        prefix = where_permissions_hold() if spoil is _not_permitted else []
        assert_refused(shipper, service, command, *arguments, stdin=stdin, prefix=prefix)
    if spoil in {_newer, _foreign}:
        assert_refused(shipper, service, "status")


def test_what_only_looks_at_a_broken_state_store_refuses_it_too(shipper: Shipper, service: Service, used_state: Path):
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


def test_after_a_broken_state_store_was_moved_away_everything_is_sent_again_with_the_same_ids(
    shipper: Shipper, service: Service, sample: Sample, used: Used, used_state: Path
):
    """What the message says to do."""
    assert shipper.backfill(used.file).counts() == (0, 0, 0, 0, 0), "it knows the file"
    used_state.write_bytes(used_state.read_bytes()[:5000])
    assert_refused(shipper, service, "dead-letters", "list")
    used_state.rename(shipper.folder / "broken.db")
    assert shipper.backfill(used.file).counts() == (101, 1, 100, 0, 0)
    service.assert_holds_exactly(sample.ids[:1])


# A state store that cannot be written for a while -----------------------------------------------------------------


@pytest.fixture
def disk(shipper: Shipper) -> Iterator[SmallDisk]:
    """The state directory is a disk of its own."""
    with small_disk(shipper.state, 24 << 20) as disk:
        yield disk


def save_some(tail: Tail, shipper: Shipper, running: Running) -> int:
    """Have some commits, so that the log of the state store is longer than what is on stderr."""
    for end in (10, 20, 30):
        tail.append(end - 10, end)
        running.wait_until(lambda end=end: shipper.read_state().accepted == end, "it is saved")
    return 30


def pause(
    tail: Tail, shipper: Shipper, running: Running, saved: int, trouble: AbstractContextManager[None], events: int = 100
) -> int:
    """Have some events written while nothing can be saved, and all of it saved when it can."""
    times = len(told(running, "delivery_paused"))
    with trouble:
        tail.append(saved, saved + 100)
        running.wait_until(lambda: len(told(running, "delivery_paused")) > times, "it pauses", limit_s=20)
        paused = told(running, "delivery_paused")[-1]
        assert paused["reason"] == "state_unwritable"
        assert str(shipper.state) in paused["message"]
        tail.append(saved + 100, saved + events)
        with pytest.raises(AssertionError, match="not within"):
            running.wait_until(lambda: len(told(running, "delivery_resumed")) > times, "it goes on", limit_s=0.3)
        assert shipper.read_state().accepted == saved, "something was saved: the case was not exercised"
    running.wait_until(lambda: len(told(running, "delivery_resumed")) > times, "it goes on", limit_s=20)
    assert told(running, "delivery_resumed")[-1]["reason"] == "state_unwritable"
    running.wait_until(lambda: shipper.read_state().accepted == saved + events, "all of it is saved", limit_s=30)
    assert len(told(running, "delivery_paused")) == times + 1, "it is told once"
    return saved + events


def test_a_state_that_may_not_grow_pauses_a_run_which_stops_sending_and_goes_on_by_itself(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail
):
    events = 3000
    shipper.target = fake.target
    running = tail.start()
    saved = save_some(tail, shipper, running)

    @contextmanager
    def limited() -> Iterator[None]:
        with no_longer_files(running, shipper):
            yield
            before = -1
            while before != fake.requests:  # until nothing more leaves
                before = fake.requests
                with pytest.raises(AssertionError, match="not within"):
                    running.wait_until(lambda: False, "time passes", limit_s=0.3)
            assert len(fake.event_ids()) < events * 0.7, "sending did not stop"

    pause(tail, shipper, running, saved, limited(), events - saved)
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(sample.ids[:events]), "nothing is sent twice within one process"


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
def test_a_full_or_read_only_state_pauses_a_run_which_goes_on_by_itself(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail, disk: SmallDisk, is_full: bool
):
    shipper.target = fake.target
    running = tail.start()
    saved = save_some(tail, shipper, running)
    trouble = no_room_for_state(running, disk) if is_full else read_only_state(running)
    saved = pause(tail, shipper, running, saved, trouble)
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(sample.ids[:saved]), "nothing is sent twice within one process"


def test_an_end_while_the_state_is_unwritable_repeats_only_what_was_not_saved(
    shipper: Shipper, service: Service, tail: Tail, disk: SmallDisk
):
    running = tail.start()
    saved = save_some(tail, shipper, running)
    times = dict.fromkeys(tail.ids(saved), 1)
    for end in ("SIGTERM", "kill"):
        received = service.received
        with no_room_for_state(running, disk):
            tail.append(saved, saved + 100)
            running.wait_for("delivery_paused", limit_s=20)
            running.wait_until(
                lambda received=received: service.received == received + 100, "what is not saved is sent"
            )
            if end == "kill":
                running.kill()
            else:
                assert running.stop().returncode in {1, 4}, "what was not saved is pending"
            assert shipper.read_state().accepted == saved
        running = tail.start()
        tail.append(saved + 100, saved + 150)
        running.wait_until(lambda saved=saved: shipper.read_state().accepted == saved + 150, "all is saved")
        times |= dict.fromkeys(tail.ids(range(saved, saved + 100)), 2)
        times |= dict.fromkeys(tail.ids(range(saved + 100, saved + 150)), 1)
        saved += 150
    assert running.stop().returncode == 0
    assert service.times_received() == times


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
    again = shipper.run(*arguments)
    assert (again.returncode, again.counts()) == (0, (290, 290, 0, 0, 0))
    assert set(fake.event_ids()) == set(sample.ids[:300])


def test_a_start_without_any_room_is_told_and_the_next_one_has_lost_nothing(
    shipper: Shipper, service: Service, sample: Sample, disk: SmallDisk
):
    """With a state that is new, and with one that was used."""
    for start in (0, 300):
        file = shipper.folder / f"{start}.ndjson"
        file.write_bytes(b"".join(sample.lines[start : start + 300]))
        disk.fill()
        result = shipper.backfill(file, settings={"delivery.give_up_after_seconds": 0.5}, limit_s=10)
        assert disk.free_bytes == 0
        assert result.returncode in {1, 4}, result
        assert str(shipper.state) in result.stderr
        disk.free()
        again = shipper.backfill(file)
        assert (again.returncode, again.counts()) == (0, (300, 300, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:600])


def test_an_input_larger_than_the_disk_of_the_spool_gets_through(
    shipper: Shipper, fake: FakeService, sample: Sample, disk: SmallDisk
):
    """The spool must not take the last bytes that the commit needs by which it would shrink."""
    shipper.target = fake.target
    fake.default = HANG
    ids = sample.ids[:12_000]
    file = shipper.folder / "long.ndjson"
    file.write_bytes(b"".join(sample.lines[: len(ids)]))
    disk.fill(leave_bytes=8 << 20)
    with file.open("rb") as stdin:
        settings = {**QUICK, "spool.segment_bytes": 500_000, "delivery.give_up_after_seconds": 5}
        running = shipper.start("pipe", "--summary", "json", stdin=stdin, settings=settings)
        running.wait_for("disk_full", limit_s=20)
        assert 0 < os.lseek(stdin.fileno(), 0, os.SEEK_CUR) < file.stat().st_size, "all of it had room"
        fake.default = OK
        fake.release()
        result = running.finish(limit_s=40)
    assert (result.returncode, result.counts()[1]) == (0, len(ids)), result.stderr
    assert Counter(fake.event_ids()) == Counter(ids)
    assert spooled(shipper) == []


@pytest.mark.parametrize("size_bytes", [6 << 20, 9 << 20])
def test_a_small_disk_is_enough_for_a_pipe(shipper: Shipper, service: Service, sample: Sample, size_bytes: int):
    """What is left to the state has to fit the disk, and the spool what is left then."""
    with small_disk(shipper.state, size_bytes):
        running = shipper.start(
            "pipe",
            "--summary",
            "json",
            stdin=subprocess.PIPE,
            settings={"state.commit_interval_seconds": 0.05, "delivery.give_up_after_seconds": 10},
        )
        producer = threading.Thread(target=running.stdin.write, args=[b"".join(sample.lines[:40_000])], daemon=True)
        producer.start()
        producer.join(60)
        assert not producer.is_alive(), running.stderr
        running.stdin.close()
        result = running.finish(limit_s=60)
        assert (result.returncode, result.counts()) == (0, (40_000, 40_000, 0, 0, 0))
        assert spooled(shipper) == []
    assert service.times_received() == dict.fromkeys(sample.ids[:40_000], 1)


def test_a_disk_that_is_too_small_for_a_pipe_is_told_with_sizes(shipper: Shipper, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(sample.lines[0])
    with small_disk(shipper.state, 2 << 20), file.open("rb") as stdin:
        result = shipper.run("pipe", stdin=stdin)
        assert result.returncode == 2, result.stderr
        assert str(shipper.state) in result.stderr
        assert "2,097,152" in result.stderr
        assert "5,242,880" in result.stderr
        assert os.lseek(stdin.fileno(), 0, os.SEEK_CUR) == 0, "it was read all the same"


def test_a_pipe_that_finds_no_room_for_its_spool_gives_up(
    shipper: Shipper, service: Service, sample: Sample, disk: SmallDisk
):
    ids = sample.ids[:3000]
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


def test_a_state_that_is_held_is_for_its_holder_even_if_the_kernel_stops_it_and_for_the_next_when_it_is_gone(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    holder = shipper.start("pipe", stdin=subprocess.PIPE, settings=QUICK)
    holder.stdin.write(b"{}\n" + sample.lines[400])
    holder.stdin.flush()
    holder.wait_until(lambda: shipper.read_state().read == 2, "it works")

    status = shipper.run("status", "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["state"]["spool"]["segments"] == 1, "what it has read"
    for arguments in (["status"], ["dead-letters", "list"], ["validate", file], ["config", "show"]):
        result = shipper.run(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)

    # Under whatever name the directory goes: nothing is taken for stale that is not.
    holder.process.send_signal(signal.SIGSTOP)
    link = shipper.folder / "link"
    link.symlink_to(shipper.state)
    ways = [
        (["backfill", file], link),
        (["pipe"], Path("state")),
        (["run", "--set", f'input.include=["{file}"]'], link),
    ]
    for command, directory in ways:
        result = shipper.run(*command, settings={"state.directory": directory})
        assert (result.returncode, result.stdout) == (5, ""), command
        assert f"process {holder.pid}" in result.stderr
        assert str(directory) in result.stderr
    assert service.stored == 1
    assert (shipper.state / "lock").read_text() == f"{holder.pid}\n"
    holder.process.send_signal(signal.SIGCONT)
    holder.kill()
    (shipper.state / "lock").write_text(f"{os.getpid()}\n")  # by now, its number belongs to another process
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


def test_of_many_that_start_at_once_one_works_and_the_others_name_it(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    """With a state store that is empty, as a crash at its very beginning leaves it: it is a new one."""
    shipper.target = fake.target
    fake.default = HANG
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "state.db").touch()
    started = [shipper.start("backfill", file, "--summary", "json", check=False) for _ in range(3)]
    wait_until(lambda: sum(each.has_ended for each in started) == 2, "all but one have ended")
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


def test_files_that_came_and_went_are_forgotten_but_for_the_youngest_and_those_that_are_not_read_to_their_end(
    shipper: Shipper, service: Service, fake: FakeService, tail: Tail
):
    """The two oldest: one is still there, and one comes back, from a disk that was not there, and is read on."""
    count = 20_000
    unread = tail.append(10, 110, "app.ndjson.1")
    shipper.target = fake.target
    fake.plan(OK, OK)
    fake.default = HANG
    old = tail.append(0, 10)
    os.utime(old, (1, 1))  # the oldest file is read first
    running = shipper.start("backfill", tail.folder, settings=ORDERLY)
    running.wait_until(
        lambda: shipper.read_state().accepted == 20, "the first file, and a part of the other, are saved"
    )
    running.kill()
    oldest = known_streams(shipper)
    assert sorted(path for _, path in oldest) == [str(old), str(unread)]
    shipper.target = service.target
    away = unread.rename(shipper.folder / "away.ndjson")
    add_gone_streams(shipper, count)
    size_bytes = (shipper.state / "state.db").stat().st_size

    tail.append(110, 120)
    new = tail.append(120, 130, "app.ndjson.2")
    result = shipper.backfill(tail.file, new, fresh=True)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0)), "the file that was known was read on"
    assert result.peak_bytes < 150 << 20
    left = known_streams(shipper)
    assert set(oldest) <= set(left)
    assert len(left) <= 10_003
    gone = [stream_id for stream_id, path in left if "/gone." in path]
    youngest = max(stream_id for stream_id, _ in oldest) + count
    assert gone == list(range(youngest + 1 - len(gone), youngest + 1)), "the oldest go first"
    assert len(gone) >= 9_000, "more were forgotten than need be"
    state = shipper.read_state()
    assert (state.read, state.accepted) == (40, 40), "the counts stay"
    assert (shipper.state / "state.db").stat().st_size < size_bytes + (4 << 20)

    away.rename(unread)
    assert shipper.backfill(unread).counts() == (90, 90, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(tail.ids(range(20, 130)), 1)
    with closing(sqlite3.connect(shipper.state / "state.db")) as db:
        missed = db.execute("SELECT unreachable_bytes FROM totals").fetchone()
    assert missed == (sum(map(len, tail.sample.lines[20:110])),), "what was settled is not missed"


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
def test_lines_that_are_no_records_and_no_text_are_dead_letters_with_their_place_and_move_the_checkpoint(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail, command: str
):
    """B11, J03: after a kill, none of them is read again, each is a dead letter once, and no neighbour is."""
    odd = [b"\xff\xfe{\x00", sample.lines[2].rstrip().replace(b'"Username":"', b'"Username":"\xe9'), b"\xc3"]
    lines = [*[b"not json"] * 37, *odd, sample.lines[0].rstrip(), *[b"[]\n\n "] * 59]
    data = b"".join(line + b"\n" for line in lines)
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
    letters = state.dead_letters[37:40]
    assert [letter.raw for letter in letters] == odd
    assert [data[letter.start_offset : letter.end_offset] for letter in letters] == odd
    assert {letter.rule for letter in letters} <= {"encoding", "json"}
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


def test_a_torn_last_line_is_read_once_whole_wherever_it_is_torn_and_whatever_ends_the_reader(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    """
    J01, J08: within the mark of byte order, within a letter of two bytes, at the brace, and before the newline.

    One file for each place; between two starts, each gets a byte and then the rest, so that it is torn twice.
    """
    places: list[Callable[[bytes], int]] = [
        lambda line: 1,
        lambda line: line.index("Æ".encode()) + 1,
        lambda line: len(line) - 2,
    ]
    other = tail.append(10, 11, "app.ndjson.other")
    torn: list[tuple[Path, bytes, int]] = []
    for number, place in enumerate(places):
        document = json.loads(changed(sample.lines[number], Username="Ærøskøbing"))
        line = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        line = b"\xef\xbb\xbf" + line if number == 0 else line
        torn.append((tail.folder / f"app.ndjson.{number}", line, place(line)))
    wanted = [10]
    for start in range(3):
        for path, line, place in torn:
            cuts = [0, place, place + 1, len(line)]
            with path.open("ab") as out:
                out.write(line[cuts[start] : cuts[start + 1]])
        running = tail.start()
        tail.append(11 + start, 12 + start, other.name)
        wanted += [11 + start] + [0, 1, 2] * (start == 2)
        tail.wait(wanted)
        running.wait_until(lambda wanted=tuple(wanted): shipper.read_state().accepted == len(wanted), "it is saved")
        if start == 0:
            running.kill()
        else:
            assert running.stop().returncode == 0
        assert service.times_received() == dict.fromkeys(tail.ids(wanted), 1), start
    assert {json.loads(service.event(each)["raw"])["Username"] for each in sample.ids[:3]} == {"Ærøskøbing"}
    assert shipper.read_state().dead_letters == ()


# How much it takes ------------------------------------------------------------------------------------------------


def test_a_service_that_is_away_while_the_input_goes_on_costs_no_memory(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail
):
    """G01."""
    shipper.target = fake.target
    fake.default = Reply(status=503)
    rounds, lines_each = 3, 2500
    wide = [line[:-2] + b" " * 1400 + b"}\n" for line in sample.lines[:lines_each]]  # bytes count, and few records do
    settings = {"batch__max_events": 200, "delivery__concurrency": 2}
    running = tail.start(**settings, delivery__retry_initial_seconds=0.02, delivery__retry_max_seconds=0.05, fresh=True)
    written: list[str] = []
    resident: list[int] = []
    for number in range(rounds):
        lines = numbered(wide, number)
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


LONG = 160 << 20


def write_long_line(path: Path, *, newline: bool = True) -> None:
    """Append a line that takes no room on the disk."""
    with path.open("r+b" if path.exists() else "wb") as out:
        out.seek(0, os.SEEK_END)
        start = out.tell()
        out.write(b"x")
        out.seek(start + LONG - 2)
        out.write(b"y\n" if newline else b"yz")


def test_a_line_of_160_megabytes_is_a_dead_letter_by_its_place_and_costs_no_memory_of_a_pipe(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    """G02."""
    tail.append(0, 10)
    start = tail.file.stat().st_size
    write_long_line(tail.file)
    tail.append(10, 20)
    with tail.file.open("rb") as stdin:
        result = shipper.run("pipe", "--summary", "json", stdin=stdin, fresh=True)
    assert (result.returncode, result.counts()) == (3, (21, 20, 1, 0, 0))
    assert 10 << 20 < result.peak_bytes < 130 << 20
    service.assert_holds_exactly(sample.ids[:20])
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.start_offset) == ("oversized", start)
    assert len(letter.raw) < 2 << 20
    assert letter.end_offset < start + (2 << 20), "the spool keeps no more than what tells that it is too long"


def test_a_line_of_160_megabytes_that_is_still_being_written_at_a_kill_is_one_dead_letter(
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
    running = tail.start(fresh=True)
    tail.wait(22, limit_s=30)
    tail.stop(22, dead_lettered=1)
    assert running.peak_bytes < 130 << 20
    (letter,) = shipper.read_state().dead_letters
    assert letter.start_offset == start
    assert letter.end_offset - start in {LONG + len(b"the end"), LONG + len(b"the end\n")}
