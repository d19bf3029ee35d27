"""A state store or a spool that is temporarily unwritable: settled records wait, and nothing is lost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Running, Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService
from tests.e2e.files import Tail, log_lines
from tests.e2e.surroundings import (
    SmallDisk,
    feeding,
    no_longer_files,
    no_room_for_state,
    read_only_state,
    small_disk,
    spooled,
)

ORDERLY = {**QUICK, "delivery.concurrency": 1, "batch.max_events": 10, "batch.unique_consumers": "false"}


@pytest.fixture
def disk(shipper: Shipper) -> Iterator[SmallDisk]:
    """Mount the state directory as a separate disk."""
    with small_disk(shipper.state, 24 << 20) as disk:
        yield disk


def started(tail: Tail, shipper: Shipper) -> tuple[Running, int]:
    """Start a run, and make some commits, so that the log of the state store is longer than the output on stderr."""
    running = tail.start()
    for end in (10, 20, 30):
        tail.append(end - 10, end)
        running.wait_until(lambda end=end: shipper.read_state().accepted == end, "it is saved")
    return running, 30


def pause(
    tail: Tail, shipper: Shipper, running: Running, saved: int, trouble: AbstractContextManager[None], events: int = 100
) -> int:
    """Write events while nothing can be saved, and check that all are saved once it is possible."""
    times = len(log_lines(running, "delivery_paused"))
    with trouble:
        tail.append(saved, saved + 100)
        running.wait_until(lambda: len(log_lines(running, "delivery_paused")) > times, "it pauses")
        paused = log_lines(running, "delivery_paused")[-1]
        assert paused["reason"] == "state_unwritable"
        assert str(shipper.state) in paused["message"]
        tail.append(saved + 100, saved + events)
        with pytest.raises(AssertionError, match="not within"):
            running.wait_until(lambda: len(log_lines(running, "delivery_resumed")) > times, "it resumes", limit_s=0.3)
        assert shipper.read_state().accepted == saved, "something was saved: the case did not occur"
    running.wait_until(lambda: len(log_lines(running, "delivery_resumed")) > times, "it resumes")
    assert log_lines(running, "delivery_resumed")[-1]["reason"] == "state_unwritable"
    running.wait_until(lambda: shipper.read_state().accepted == saved + events, "everything is saved")
    assert len(log_lines(running, "delivery_paused")) == times + 1, "the pause is logged once"
    return saved + events


def test_a_run_pauses_and_stops_sending_while_the_state_cannot_grow_and_then_resumes(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail
):
    events = 3000
    running, saved = started(tail, shipper)

    @contextmanager
    def limited() -> Iterator[None]:
        with no_longer_files(running, shipper):
            yield
            before = -1
            while before != fake.requests:  # until sending stops
                before = fake.requests
                with pytest.raises(AssertionError, match="not within"):
                    running.wait_until(lambda: False, "time passes", limit_s=0.3)
            assert len(fake.event_ids()) < events * 0.7, "sending did not stop"

    pause(tail, shipper, running, saved, limited(), events - saved)
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(sample.ids[:events]), "something was sent twice by one process"


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
def test_a_run_pauses_while_the_state_is_full_or_read_only_and_then_resumes(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail, disk: SmallDisk, is_full: bool
):
    running, saved = started(tail, shipper)
    trouble = no_room_for_state(running, disk) if is_full else read_only_state(running)
    saved = pause(tail, shipper, running, saved, trouble)
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(sample.ids[:saved]), "something was sent twice by one process"


def test_status_shows_pause_and_advice_while_the_disk_of_the_state_is_full(
    shipper: Shipper, tail: Tail, disk: SmallDisk
):
    running, saved = started(tail, shipper)
    running.wait_until(lambda: "running since" in shipper.run("status").stdout, "it has reported")
    with no_room_for_state(running, disk):
        tail.append(saved, saved + 100)
        running.wait_for("delivery_paused")
        running.wait_until(lambda: "(state_unwritable)" in shipper.run("status").stdout.splitlines()[0], "it is shown")
        assert "what to do: make room on the disk" in shipper.run("status").stdout
    running.wait_until(lambda: "paused" not in shipper.run("status").stdout, "it has resumed")
    assert running.stop().returncode == 0


def test_only_unsaved_records_are_repeated_after_a_run_ended_with_an_unwritable_state(
    shipper: Shipper, service: Service, tail: Tail, disk: SmallDisk
):
    running, saved = started(tail, shipper)
    times = dict.fromkeys(tail.ids(saved), 1)
    for end in ("SIGTERM", "kill"):
        received = service.received
        with no_room_for_state(running, disk):
            tail.append(saved, saved + 100)
            running.wait_for("delivery_paused")
            running.wait_until(
                lambda received=received: service.received == received + 100, "the unsaved records are sent"
            )
            if end == "kill":
                running.kill()
            else:
                assert running.stop().returncode in {1, 4}, "unsaved records are pending"
            assert shipper.read_state().accepted == saved
        running = tail.start()
        tail.append(saved + 100, saved + 150)
        running.wait_until(lambda saved=saved: shipper.read_state().accepted == saved + 150, "everything is saved")
        times |= dict.fromkeys(tail.ids(range(saved, saved + 100)), 2)
        times |= dict.fromkeys(tail.ids(range(saved + 100, saved + 150)), 1)
        saved += 150
    assert running.stop().returncode == 0
    assert service.times_received() == times


@pytest.mark.parametrize("command", ["backfill", "pipe"])
def test_backfill_and_pipe_give_up_if_the_state_stays_unwritable(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path, disk: SmallDisk, command: str
):
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
    result.assert_ended(4, "delivery.give_up_after_seconds", str(shipper.state))
    assert result.counts()[0] == sum(result.counts()[1:])
    assert log_lines(result, "delivery_paused")[0]["reason"] == "state_unwritable"
    again = shipper.run(*arguments)
    assert (again.returncode, again.counts()) == (0, (290, 290, 0, 0, 0))
    assert set(fake.event_ids()) == set(sample.ids[:300])


def test_a_start_on_a_full_disk_fails_and_the_next_start_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, disk: SmallDisk
):
    """With a new state and a used one."""
    for start in (0, 300):
        file = shipper.write(f"{start}.ndjson", *sample.lines[start : start + 300])
        disk.fill()
        result = shipper.backfill(file, settings={"delivery.give_up_after_seconds": 0.5}, limit_s=10)
        assert disk.free_bytes == 0
        assert result.returncode in {1, 4}, result
        assert str(shipper.state) in result.stderr
        disk.free()
        again = shipper.backfill(file)
        assert (again.returncode, again.counts()) == (0, (300, 300, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:600])


def test_an_input_larger_than_the_spool_s_disk_is_delivered(
    shipper: Shipper, fake: FakeService, sample: Sample, disk: SmallDisk
):
    """The spool must leave the space that the commit needs to shrink it."""
    fake.default = HANG
    ids = sample.ids[:12_000]
    file = shipper.write("long.ndjson", *sample.lines[: len(ids)])
    disk.fill(leave_bytes=8 << 20)
    with file.open("rb") as stdin:
        settings = {**QUICK, "spool.segment_bytes": 500_000, "delivery.give_up_after_seconds": 5}
        running = shipper.start("pipe", "--summary", "json", stdin=stdin, settings=settings)
        running.wait_for("disk_full")
        assert 0 < os.lseek(stdin.fileno(), 0, os.SEEK_CUR) < file.stat().st_size, "everything fitted on the disk"
        fake.default = OK
        fake.release()
        result = running.finish(limit_s=40)
    assert (result.returncode, result.counts()[1]) == (0, len(ids)), result.stderr
    assert Counter(fake.event_ids()) == Counter(ids)
    assert spooled(shipper) == []


@pytest.mark.parametrize("size_bytes", [6 << 20, 9 << 20])
def test_a_small_disk_is_enough_for_a_pipe(shipper: Shipper, service: Service, sample: Sample, size_bytes: int):
    """The space reserved for the state must fit on the disk, and the spool in the rest."""
    with small_disk(shipper.state, size_bytes):
        settings = {"state.commit_interval_seconds": 0.05, "delivery.give_up_after_seconds": 10}
        running = shipper.open_pipe(settings=settings)
        producer = feeding(running, b"".join(sample.lines[:40_000]))
        producer.join(60)
        assert not producer.is_alive(), running.stderr
        running.stdin.close()
        result = running.finish(limit_s=60)
        assert (result.returncode, result.counts()) == (0, (40_000, 40_000, 0, 0, 0))
        assert spooled(shipper) == []
    assert service.times_received() == dict.fromkeys(sample.ids[:40_000], 1)


def test_a_disk_too_small_for_a_pipe_is_reported_with_sizes(shipper: Shipper, sample: Sample):
    file = shipper.write("events.ndjson", sample.lines[0])
    with small_disk(shipper.state, 2 << 20), file.open("rb") as stdin:
        result = shipper.run("pipe", stdin=stdin)
        result.assert_ended(2, str(shipper.state), "2,097,152", "5,242,880")
        assert os.lseek(stdin.fileno(), 0, os.SEEK_CUR) == 0, "the input was read"


def test_a_pipe_without_room_for_its_spool_gives_up(
    shipper: Shipper, service: Service, sample: Sample, disk: SmallDisk
):
    ids = sample.ids[:3000]
    file = shipper.write("long.ndjson", *sample.lines[: len(ids)])
    disk.fill(leave_bytes=500_000)
    with file.open("rb") as stdin:
        settings = {**QUICK, "delivery.give_up_after_seconds": 0.5}
        result = shipper.run("pipe", "--summary", "json", stdin=stdin, settings=settings, limit_s=15)
        result.assert_ended(4, "disk_full", str(shipper.state))
        disk.free()
        # Unread input is still available because it is a file.
        again = shipper.run("pipe", "--summary", "json", stdin=stdin)
    assert (again.returncode, again.counts()[0] + result.counts()[1]) == (0, len(ids))
    service.assert_holds_exactly(ids)


def test_a_pipe_resumes_reading_when_its_spool_has_room_again(
    shipper: Shipper, fake: FakeService, sample: Sample, disk: SmallDisk
):
    fake.default = HANG
    running = shipper.open_pipe(*sample.lines[:100], settings=QUICK)
    running.wait_until(lambda: fake.requests, "it works")
    disk.fill()
    producer = feeding(running, b"".join(sample.lines[100:10_000]))
    running.wait_for("disk_full")
    assert disk.free_bytes == 0
    assert not running.has_ended
    assert producer.is_alive(), "everything fitted on the disk"
    disk.free()
    fake.default = OK
    fake.release()
    producer.join(20)
    running.stdin.close()
    result = running.finish(limit_s=40)
    assert (result.returncode, result.counts()[:2]) == (0, (10_000, 10_000))
    assert Counter(fake.event_ids()) == Counter(sample.ids[:10_000])
