"""`shipper run`: files that grow, are rotated, truncated and deleted while it watches, and while it does not."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed, event_ids, wait_until
from tests.e2e.fake_service import HANG, FakeService

QUICK = {"batch.linger_seconds": 0.02, "input.poll_interval_seconds": 0.1, "state.commit_interval_seconds": 0.05}
Follow = Callable[..., Running]


@pytest.fixture
def folder(shipper: Shipper) -> Path:
    folder = shipper.folder / "logs"
    folder.mkdir()
    return folder


@pytest.fixture
def follow(shipper: Shipper, folder: Path) -> Follow:
    """Start `shipper run` on a glob in the folder."""

    def start(include: str = "app.ndjson*", **settings: object) -> Running:
        named = {key.replace("__", "."): value for key, value in settings.items()}
        return shipper.start("run", settings={"input.include": f'["{folder}/{include}"]', **QUICK, **named})

    return start


def append(path: Path, lines: list[bytes] | bytes) -> None:
    with path.open("ab") as out:
        out.write(lines if isinstance(lines, bytes) else b"".join(lines))


def wait_for_events(running: Running, service: Service, ids: list[str], *, limit_s: float = 15) -> None:
    running.wait_until(lambda: service.stored >= len(ids) and service.holds(ids), f"{len(ids)} events", limit_s=limit_s)


def _holds_at_least(service: Service, count: int) -> bool:
    return service.stored >= count


def assert_clean_stop(running: Running, service: Service, ids: list[str]) -> None:
    """SIGTERM: exit 0, and every event was sent exactly once."""
    result = running.stop()
    assert result.returncode == 0, result.stderr
    assert service.times_received() == dict.fromkeys(ids, 1)


def test_what_is_appended_arrives_and_a_clean_restart_repeats_nothing(
    follow: Follow, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    file = folder / "app.ndjson"
    append(file, sample.lines[:10])
    running = follow()
    for start, end in ((0, 10), (10, 11), (11, 20), (20, 21)):
        append(file, sample.lines[start:end] if start else b"")
        wait_for_events(running, service, sample.ids[:end], limit_s=10)
    new = folder / "app.ndjson.new"
    append(new, sample.lines[21:30])
    wait_for_events(running, service, sample.ids[:30], limit_s=10)
    assert_clean_stop(running, service, sample.ids[:30])

    append(file, sample.lines[30:40])
    running = follow()
    wait_for_events(running, service, sample.ids[:40])
    assert_clean_stop(running, service, sample.ids[:40])
    state = shipper.read_state()
    assert (state.read, state.accepted, len(state.checkpoints)) == (40, 40, 2)


def test_a_torn_line_waits_for_its_newline_also_over_a_restart(
    follow: Follow, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    torn, other = folder / "app.ndjson.torn", folder / "app.ndjson.other"
    append(torn, sample.lines[0] + sample.lines[1][:100])
    running = follow()
    wait_for_events(running, service, sample.ids[:1])
    append(torn, sample.lines[1][100:200])
    append(other, sample.lines[2])
    wait_for_events(running, service, [sample.ids[2]])
    assert sample.ids[1] not in service.event_ids(), "a torn line was sent"
    assert running.stop().returncode == 0
    assert shipper.read_state().read == 2

    running = follow()
    append(other, sample.lines[3])
    wait_for_events(running, service, [sample.ids[3]])
    assert sample.ids[1] not in service.event_ids(), "a torn line was sent"
    append(torn, sample.lines[1][200:])
    wait_for_events(running, service, sample.ids[:4])
    assert_clean_stop(running, service, sample.ids[:4])
    assert shipper.read_state().dead_letters == ()


@pytest.mark.parametrize("include", ["app.ndjson*", "app.ndjson"], ids=["glob", "name"])
def test_rename_rotation_loses_and_repeats_nothing(
    follow: Follow, folder: Path, service: Service, sample: Sample, include: str
):
    """The writer finishes its last lines into the old descriptor, after the new file was begun."""
    rotations, lines_each, late_each = 20, 100, 10
    file = folder / "app.ndjson"
    running = follow(include, log__level="debug")  # with every repeat
    sent = 0
    old = file.open("ab", buffering=0)
    try:
        for rotation in range(rotations):
            for line in sample.lines[sent : sent + lines_each]:
                old.write(line)
            sent += lines_each
            if include == "app.ndjson":
                # A file that had another name before anybody saw it cannot be found by its name.
                wait_for_events(running, service, [sample.ids[sent - lines_each]])
            file.rename(folder / f"app.ndjson.{rotation}")
            new = file.open("ab", buffering=0)
            for line in sample.lines[sent : sent + late_each]:
                old.write(line)
            sent += late_each
            old.close()
            old = new
    finally:
        old.close()
    wait_for_events(running, service, sample.ids[:sent])
    assert_clean_stop(running, service, sample.ids[:sent])
    if include == "app.ndjson":
        assert running.stderr.count('"source_opened"') >= rotations


def test_rotation_while_stopped_loses_and_repeats_nothing(
    follow: Follow, folder: Path, service: Service, sample: Sample
):
    file = folder / "app.ndjson"
    append(file, sample.lines[:60])
    running = follow()
    wait_for_events(running, service, sample.ids[:60])
    assert_clean_stop(running, service, sample.ids[:60])

    append(file, sample.lines[60:100])
    file = file.rename(folder / "app.ndjson.1")
    append(folder / "app.ndjson", sample.lines[100:200])
    file.rename(folder / "app.ndjson.2")
    (folder / "app.ndjson").rename(folder / "app.ndjson.1")
    append(folder / "app.ndjson", sample.lines[200:250])
    running = follow()
    wait_for_events(running, service, sample.ids[:250])
    assert_clean_stop(running, service, sample.ids[:250])


def test_the_rest_of_a_file_that_was_renamed_out_of_the_glob_while_stopped_is_found(
    follow: Follow, folder: Path, service: Service, sample: Sample
):
    file = folder / "app.ndjson"
    append(file, sample.lines[:60])
    running = follow("app.ndjson")
    wait_for_events(running, service, sample.ids[:60])
    assert_clean_stop(running, service, sample.ids[:60])

    append(file, sample.lines[60:100])
    file.rename(folder / "old.app.log")
    append(file, sample.lines[100:150])
    running = follow("app.ndjson")
    wait_for_events(running, service, sample.ids[:150])
    assert_clean_stop(running, service, sample.ids[:150])


def test_a_file_outside_the_glob_that_got_the_inode_of_a_known_one_is_not_read(
    follow: Follow, folder: Path, service: Service, sample: Sample
):
    file = folder / "app.ndjson"
    append(file, sample.lines[:5])
    running = follow("app.ndjson")
    wait_for_events(running, service, sample.ids[:5])
    assert_clean_stop(running, service, sample.ids[:5])

    inode = file.stat().st_ino
    file.write_bytes(b"".join(sample.lines[1000:1100]))  # as if another file had been given the inode
    private = file.rename(folder / "private.txt")
    assert private.stat().st_ino == inode
    append(file, sample.lines[5:10])
    running = follow("app.ndjson")
    wait_for_events(running, service, sample.ids[5:10])
    append(file, sample.lines[10])
    wait_for_events(running, service, sample.ids[10:11])
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:11])


def _shrink(file: Path, lines: list[bytes]) -> None:
    """Copytruncate: copy the file, truncate it in place, write on."""
    shutil.copy(file, file.with_name("copy-of-the-old"))
    with file.open("r+b") as out:
        out.truncate(0)
        out.writelines(lines)


@pytest.mark.parametrize("new_lines", [20, 100, 150], ids=["shrunk", "same size", "grown past the old offset"])
@pytest.mark.parametrize("while_running", [True, False], ids=["running", "stopped"])
def test_copytruncate_is_noticed(
    follow: Follow, folder: Path, service: Service, sample: Sample, new_lines: int, while_running: bool
):
    """The running one is held with SIGSTOP, so that it surely sees the file only before and after."""
    file = folder / "app.ndjson"
    first, second = sample.lines[:100], sample.lines[100 : 100 + new_lines]
    if new_lines == 100:
        first[-1] = changed(first[-1], Username="x" * 500)
        missing = sum(map(len, first)) - sum(map(len, second)) - len(changed(second[-1], Username="")) + len(second[-1])
        second[-1] = changed(second[-1], Username="y" * missing)
        assert sum(map(len, first)) == sum(map(len, second))
    ids = event_ids(first + second)
    append(file, first)
    running = follow("app.ndjson")
    wait_for_events(running, service, ids[:100])
    if while_running:
        running.process.send_signal(signal.SIGSTOP)
    else:
        assert_clean_stop(running, service, ids[:100])
    _shrink(file, second)
    if while_running:
        running.process.send_signal(signal.SIGCONT)
    else:
        running = follow("app.ndjson")
    wait_for_events(running, service, ids)
    assert_clean_stop(running, service, ids)


def test_a_file_smaller_than_its_fingerprint_stays_the_same_stream(
    follow: Follow, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    file = folder / "app.ndjson"
    for count in (1, 4, 20):
        append(file, sample.lines[len(event_ids(file.read_bytes().splitlines())) if file.exists() else 0 : count])
        running = follow()
        wait_for_events(running, service, sample.ids[:count])
        assert_clean_stop(running, service, sample.ids[:count])
    ((_, _, _, checkpoint),) = shipper.read_state().checkpoints
    assert checkpoint == file.stat().st_size


def test_files_with_equal_heads_are_files_of_their_own(follow: Follow, folder: Path, service: Service, sample: Sample):
    head = b"\n" * 2000
    for number in range(5):
        append(folder / f"app.ndjson.{number}", head + b"".join(sample.lines[number * 10 : number * 10 + 10]))
    running = follow()
    wait_for_events(running, service, sample.ids[:50])
    assert_clean_stop(running, service, sample.ids[:50])


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end_and_let_go(
    follow: Follow, folder: Path, shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.plan(HANG)
    file = folder / "app.ndjson"
    with file.open("wb", buffering=0) as writer:
        writer.write(b"".join(sample.lines[:10_000]))
        running = follow(delivery__concurrency=1, input__rotate_wait_seconds=0.2)
        running.wait_until(lambda: fake.requests, "a first request")
        file.unlink()
        writer.write(b"".join(sample.lines[10_000:10_100]))  # what nobody can have read before it was deleted
    fake.release()
    running.wait_until(lambda: set(sample.ids[:10_100]) <= set(fake.event_ids()), "all events")
    running.wait_until(lambda: not _has_open(running, file), "the descriptor is closed")
    assert running.stop().returncode == 0
    assert sorted(fake.event_ids()) == sorted(sample.ids[:10_100])


def _has_open(running: Running, file: Path) -> bool:
    for descriptor in Path(f"/proc/{running.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed between the listing and the look
            if os.readlink(descriptor).startswith(str(file)):
                return True
    return False


def test_a_file_that_got_the_inode_of_a_deleted_one_is_read_from_its_start(
    follow: Follow, folder: Path, service: Service, sample: Sample
):
    old, new = folder / "app.ndjson", folder / "app.ndjson.new"
    append(old, sample.lines[:10])
    inode = old.stat().st_ino
    running = follow(input__rotate_wait_seconds=0)
    wait_for_events(running, service, sample.ids[:10])
    old.unlink()
    running.wait_for("source_closed")
    for number in range(200):
        new.touch()
        if new.stat().st_ino == inode:
            break
        new.rename(folder / f"taken.{number}")
    else:
        pytest.skip("this file system does not give an inode number again")
    append(new, sample.lines[10:40])
    wait_for_events(running, service, sample.ids[:40])
    assert_clean_stop(running, service, sample.ids[:40])


def test_a_file_put_in_the_place_of_another_is_read_and_the_old_one_to_its_end(
    follow: Follow, folder: Path, service: Service, sample: Sample
):
    file, other = folder / "app.ndjson", folder / "prepared"
    append(file, sample.lines[:10])
    running = follow("app.ndjson")
    wait_for_events(running, service, sample.ids[:10])
    append(other, sample.lines[20:30])
    with file.open("ab") as writer:
        other.rename(file)
        writer.writelines(sample.lines[10:20])
    wait_for_events(running, service, sample.ids[:30])
    assert_clean_stop(running, service, sample.ids[:30])


def test_folders_and_files_that_come_later_are_found(
    follow: Follow, folder: Path, shipper: Shipper, service: Service, sample: Sample
):
    settings = {"input.include": f'["{folder}/later/**/*.ndjson"]', "input.exclude": f'["{folder}/**/not-*"]'}
    running = shipper.start("run", settings={**QUICK, **settings})
    running.wait_until((shipper.state / "state.db").exists, "it has begun")
    deep = folder / "later" / "still"
    deep.mkdir(parents=True)
    append(deep / "a.ndjson", sample.lines[:10])
    append(deep / "not-b.ndjson", sample.lines[10:20])
    append(deep / "c.txt", sample.lines[20:30])
    wait_for_events(running, service, sample.ids[:10])
    (deep / "deeper").mkdir()
    append(deep / "deeper" / "d.ndjson", sample.lines[30:40])
    wait_for_events(running, service, sample.ids[30:40])
    assert_clean_stop(running, service, sample.ids[:10] + sample.ids[30:40])


def test_a_file_that_leaves_the_glob_and_comes_back_while_its_records_are_pending(
    follow: Follow, folder: Path, shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.default = HANG
    file = folder / "app.ndjson"
    append(file, sample.lines[:10])
    running = follow("app.ndjson", input__rotate_wait_seconds=0)
    running.wait_until(lambda: fake.requests, "a first request")
    away = file.rename(folder / "away.txt")
    running.wait_for("source_closed")
    away.rename(file)
    append(file, sample.lines[10:20])
    wait_until(lambda: running.stderr.count("source_opened") == 2, "it is opened again")
    fake.release()
    running.wait_until(lambda: set(sample.ids[:20]) <= set(fake.event_ids()), "all events")
    result = running.stop()
    assert result.returncode == 0
    assert sorted(fake.event_ids()) == sorted(sample.ids[:20])


def test_the_state_directory_is_never_an_input(follow: Follow, shipper: Shipper, service: Service, sample: Sample):
    spool = shipper.state / "spool"
    spool.mkdir(parents=True)
    (spool / "foreign.txt").write_bytes(sample.lines[0])
    (shipper.state / "dead.ndjson").write_bytes(sample.lines[1])
    append(shipper.folder / "logs" / "app.ndjson", sample.lines[2])
    running = shipper.start("run", settings={"input.include": f'["{shipper.folder}/**"]', **QUICK})
    wait_for_events(running, service, sample.ids[2:3])
    append(shipper.folder / "logs" / "app.ndjson", sample.lines[3])
    wait_for_events(running, service, sample.ids[3:4])
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[2:4])


def test_an_idle_run_ends_at_once_on_sigterm_and_on_sigint(follow: Follow, service: Service, folder: Path):
    for number in (signal.SIGTERM, signal.SIGINT):
        running = follow()
        append(folder / "app.ndjson", b"\n")
        running.wait_for("source_opened")
        started = time.monotonic()
        running.process.send_signal(number)
        result = running.finish()
        assert result.returncode == 0
        # Far below the 25 s of the drain, and the 5 s in which the watching thread looks up by itself.
        assert time.monotonic() - started < 4


def test_a_first_sigterm_drains_what_was_read(
    follow: Follow, folder: Path, shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.default = HANG
    append(folder / "app.ndjson", sample.lines[:500])
    running = follow(batch__max_events=100, delivery__concurrency=5)
    running.wait_until(lambda: fake.requests == 5, "all requests are in flight")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    append(folder / "app.ndjson", sample.lines[500:510])
    fake.release()
    result = running.finish()
    assert result.returncode == 0
    assert sorted(fake.event_ids()) == sorted(sample.ids[:500]), "not what was read when the signal came"
    assert shipper.read_state().accepted == 500


def test_a_second_sigterm_aborts_and_the_next_run_delivers(
    follow: Follow, folder: Path, shipper: Shipper, fake: FakeService, service: Service, sample: Sample
):
    shipper.target = fake.target
    fake.default = HANG
    append(folder / "app.ndjson", sample.lines[:50])
    running = follow(delivery__drain_timeout_seconds=60)
    running.wait_until(lambda: fake.requests, "a request is in flight")
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    assert not running.has_ended
    running.process.send_signal(signal.SIGTERM)
    result = running.finish(limit_s=10)
    assert result.returncode == 4
    assert "drain_aborted" in result.stderr
    assert shipper.read_state().read == 0

    shipper.target = service.target
    running = follow()
    wait_for_events(running, service, sample.ids[:50])
    assert_clean_stop(running, service, sample.ids[:50])


def test_the_drain_timeout_ends_a_run_whose_service_does_not_answer(
    follow: Follow, folder: Path, shipper: Shipper, fake: FakeService, sample: Sample
):
    shipper.target = fake.target
    fake.default = HANG
    append(folder / "app.ndjson", sample.lines[:50])
    running = follow(delivery__drain_timeout_seconds=0.2)
    running.wait_until(lambda: fake.requests, "a request is in flight")
    result = running.stop(limit_s=10)
    assert result.returncode == 4
    assert shipper.read_state().read == 0


def test_a_run_killed_while_files_grow_and_rotate_loses_nothing(
    follow: Follow, folder: Path, shipper: Shipper, service: Service, sample: Sample, rng
):
    file = folder / "app.ndjson"
    sent = 0
    settings: Mapping[str, object] = {"batch__max_events": 20, "delivery__concurrency": 2}
    for rotation in range(5):
        running = follow(**settings)
        for _ in range(10):
            count = rng.randrange(1, 100)
            append(file, sample.lines[sent : sent + count])
            sent += count
            if rng.random() < 0.2:
                file.rename(folder / f"app.ndjson.{rotation}.{sent}")
        goal = min(sent, service.stored + rng.randrange(1, 100))
        running.wait_until(partial(_holds_at_least, service, goal), "some events")
        running.kill()
    assert shipper.read_state().accepted < sent, "the last run had finished when it was killed"
    running = follow()
    wait_for_events(running, service, sample.ids[:sent])
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:sent])
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (sent, sent, 0)
