"""`shipper run`: files that grow and come and go, signals, kills; test_rotation has what else becomes of files."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Running, Service, Shipper, wait_until
from tests.e2e.fake_service import HANG, FakeService

Follow = Callable[..., Running]


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


def wait_for_events(running: Running, service: Service, ids: list[str], *, limit_s: float = 60) -> None:
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
        wait_for_events(running, service, sample.ids[:end])
    new = folder / "app.ndjson.new"
    append(new, sample.lines[21:30])
    wait_for_events(running, service, sample.ids[:30])
    assert_clean_stop(running, service, sample.ids[:30])

    append(file, sample.lines[30:40])
    running = follow()
    wait_for_events(running, service, sample.ids[:40])
    assert_clean_stop(running, service, sample.ids[:40])
    state = shipper.read_state()
    assert (state.read, state.accepted, len(state.checkpoints)) == (40, 40, 2)


def test_rename_rotation_with_only_the_name_in_the_glob_loses_and_repeats_nothing(
    follow: Follow, folder: Path, service: Service, sample: Sample
):
    """The writer finishes its last lines into the old descriptor, after the new file was begun."""
    rotations, lines_each, late_each = 8, 50, 10
    file = folder / "app.ndjson"
    running = follow("app.ndjson", log__level="debug")  # with every repeat
    sent = 0
    old = file.open("ab", buffering=0)
    try:
        for rotation in range(rotations):
            for line in sample.lines[sent : sent + lines_each]:
                old.write(line)
            sent += lines_each
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
    assert running.stderr.count('"source_opened"') >= rotations


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


def test_the_drain_timeout_or_a_second_sigterm_ends_a_run_and_the_next_delivers(
    follow: Follow, folder: Path, shipper: Shipper, fake: FakeService, service: Service, sample: Sample
):
    """The service does not answer."""
    shipper.target = fake.target
    fake.default = HANG
    append(folder / "app.ndjson", sample.lines[:50])
    for timeout_s in (0.2, 60):
        seen = fake.requests
        running = follow(delivery__drain_timeout_seconds=timeout_s)
        running.wait_until(lambda seen=seen: fake.requests > seen, "a request is in flight")
        running.process.send_signal(signal.SIGTERM)
        if timeout_s == 60:
            running.wait_for("drain_started")
            assert not running.has_ended
            running.process.send_signal(signal.SIGTERM)
        result = running.finish()
        assert result.returncode == 4, timeout_s
        assert ("drain_aborted" in result.stderr) == (timeout_s == 60)
        assert shipper.read_state().read == 0, timeout_s

    shipper.target = service.target
    running = follow()
    wait_for_events(running, service, sample.ids[:50])
    assert_clean_stop(running, service, sample.ids[:50])


def test_a_run_killed_while_files_grow_and_rotate_loses_nothing(
    follow: Follow, folder: Path, shipper: Shipper, service: Service, sample: Sample, rng
):
    file = folder / "app.ndjson"
    sent = 0
    settings: Mapping[str, object] = {"batch__max_events": 20, "delivery__concurrency": 2}
    for rotation in range(3):
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
