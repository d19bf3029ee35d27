"""`shipper run` on growing, preallocated and unmatched files, with signals and kills; see also test_rotation."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper
from tests.e2e.files import Tail, append, log_lines


def test_appended_records_arrive_and_a_clean_restart_repeats_nothing(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    tail.start()
    tail.wait(10)
    for start, end in ((10, 11), (11, 20), (20, 21)):
        tail.append(start, end)
        tail.wait(end)
    tail.append(21, 30, "app.ndjson.new")
    tail.wait(30)
    tail.stop(30)
    tail.append(30, 40)
    tail.start()
    tail.wait(40)
    tail.stop(40)
    assert len(shipper.read_state().checkpoints) == 2


def test_an_idle_run_ends_at_once_on_sigterm_and_on_sigint(tail: Tail):
    for number in (signal.SIGTERM, signal.SIGINT):
        running = tail.start()
        append(tail.file, b"\n")
        running.wait_for("source_opened")
        started = time.monotonic()
        running.process.send_signal(number)
        assert running.finish().returncode == 0
        # Far below the drain timeout of 25 s and the watcher's fallback interval of 5 s.
        assert time.monotonic() - started < 4


def test_a_run_killed_while_files_grow_and_rotate_loses_nothing(
    tail: Tail, shipper: Shipper, service: Service, rng: Random
):
    def has_stored(count: int) -> bool:
        return service.stored >= count

    sent = 0
    for rotation in range(3):
        running = tail.start(batch__max_events=20, delivery__concurrency=2)
        for _ in range(10):
            count = rng.randrange(1, 100)
            tail.append(sent, sent + count)
            sent += count
            if rng.random() < 0.2:
                tail.file.rename(tail.folder / f"app.ndjson.{rotation}.{sent}")
        goal = min(sent, service.stored + rng.randrange(1, 100))
        running.wait_until(partial(has_stored, goal), "some events")
        running.kill()
        assert not (shipper.state / "stuck.json").exists(), "a record is suspect"
    assert shipper.read_state().accepted < sent, "the last run had finished when it was killed"
    running = tail.start()
    running.wait_until(lambda: shipper.read_state().accepted == sent, "all events are accounted for")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(sent))
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (sent, sent, 0)


# Names that match no pattern ----------------------------------------------------------------------------------------


NAME = "app.ndjson"


def test_files_other_than_generations_are_never_read_and_are_reported_unless_excluded_or_older(
    tail: Tail, shipper: Shipper
):
    tail.append(1000, 1010, f"{NAME}.7")  # before the name was followed
    os.utime(tail.folder / f"{NAME}.7", (1e9, 1e9))
    tail.append(0, 10)
    settings = {"input__rotate_wait_seconds": 0.2, "input__exclude": f'["{tail.folder}/*.tmp", "{tail.folder}/*-9"]'}
    tail.pass_by(NAME, 10, **settings)
    for number, name in enumerate(("bak", "tmp", "1.part", "old"), 101):
        tail.append(10 * number, 10 * number + 10, f"{NAME}.{name}")
    tail.append(1100, 1110, f"{NAME}-9")
    tail.append(1200, 1210, "other.ndjson.1")
    (tail.folder / f"{NAME}.empty").touch()
    running = tail.start(NAME, **settings)
    unread = {str(tail.folder / f"{NAME}.{name}") for name in ("bak", "1.part", "old")}
    running.wait_until(
        lambda: {line["path"] for line in log_lines(running, "source_beside_unread")} == unread,
        "the files are reported",
    )
    tail.append(10, 20)
    tail.wait(20)
    tail.stop(20)
    assert len(log_lines(running, "source_beside_unread")) == len(unread), "each is reported once"
    options = ("--set", f'input.include=["{tail.file}"]', "--set", f"input.exclude={settings['input__exclude']}")
    result = shipper.run("status", "--until", "now", *options)
    assert result.returncode == 0, result.stdout
    assert "3 files next to inputs match no pattern" in result.stdout
    assert {name for name in unread if name in result.stdout} == unread
    assert f"{NAME}.tmp" not in result.stdout


def test_a_deleted_file_counts_as_undelivered_until_a_command_has_searched_for_it(tail: Tail, shipper: Shipper):
    """By `run`, which searches the folder for its bytes, or by `backfill`, where no other file begins alike."""
    for number, name in enumerate(("a.ndjson", "b.ndjson", "c.ndjson")):
        tail.append(10 * number, 10 * number + 10, name)
    tail.pass_by("*.ndjson", 30)
    include = ("--set", f'input.include=["{tail.folder}/*.ndjson"]')
    (tail.folder / "a.ndjson").unlink()
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    tail.start("*.ndjson", input__rotate_wait_seconds=0.2)
    tail.running.wait_until(
        lambda: shipper.run("status", "--until", "now", *include).returncode == 0, "the search is complete"
    )
    tail.stop(30)
    (tail.folder / "b.ndjson").rename(shipper.folder / "away")
    assert shipper.run("status", "--until", "now", *include).returncode == 4
    assert shipper.backfill(tail.folder / "c.ndjson").counts() == (0, 0, 0, 0, 0)
    assert shipper.run("status", "--until", "now", *include).returncode == 0


def test_relative_patterns_mean_the_same_in_every_working_directory(tail: Tail, shipper: Shipper):
    """An unread file counts as undelivered, whether or not it is known."""
    settings = {"input.include": '["logs/*.ndjson"]'}
    tail.append(0, 10)
    running = shipper.start("run", settings={**settings, "batch.linger_seconds": 0.02})
    running.wait_until(lambda: tail.service.stored == 10, "it is delivered")
    assert running.stop().returncode == 0
    elsewhere = shipper.folder / "elsewhere"
    elsewhere.mkdir()

    def asked_elsewhere() -> int:
        shipper.folder, home = elsewhere, shipper.folder
        try:
            return shipper.run("status", "--until", "now", settings=settings).returncode
        finally:
            shipper.folder = home

    assert asked_elsewhere() == 0
    tail.append(10, 20)
    assert asked_elsewhere() == 4
    running = shipper.start("run", settings={**settings, "batch.linger_seconds": 0.02})
    running.wait_until(lambda: tail.service.stored == 20, "it is delivered")
    assert running.stop().returncode == 0
    assert asked_elsewhere() == 0
    tail.append(20, 30, "new.ndjson")
    assert asked_elsewhere() == 4


# Preallocated space -------------------------------------------------------------------------------------------------


MEGABYTE = 1_000_000


def sparse(path: Path, size: int) -> None:
    os.truncate(path, size)


def allocated(path: Path, size: int) -> None:
    with path.open("r+b") as out:
        os.posix_fallocate(out.fileno(), 0, size)


def zeros(path: Path, size: int) -> None:
    append(path, bytes(size - path.stat().st_size))


def fill(path: Path, data: bytes, at: int) -> int:
    """Write into the preallocated space; return the next offset."""
    with path.open("r+b") as out:
        out.seek(at)
        out.write(data)
    return at + len(data)


@pytest.mark.parametrize(("size", "reserve"), [(1, allocated), (9, zeros), (40, sparse)])
def test_records_written_into_preallocated_space_are_read(tail: Tail, size: int, reserve: Callable[[Path, int], None]):
    """Complete lines, a torn one, and lines written while no shipper runs."""
    lines = tail.sample.lines
    tail.append(0, 3)
    reserve(tail.file, size * MEGABYTE)
    tail.start()
    tail.wait(3)
    at = fill(tail.file, b"".join(lines[3:10]) + lines[10][:100], sum(map(len, lines[:3])))
    tail.wait(10)
    at = fill(tail.file, lines[10][100:] + b"".join(lines[11:2000]), at)
    tail.wait(2000)
    tail.stop(2000)

    at = fill(tail.file, b"".join(lines[2000:2010]), at)
    tail.start()
    tail.wait(2010)
    tail.file.rename(tail.file.with_name("app.ndjson.1"))
    at = fill(tail.file.with_name("app.ndjson.1"), b"".join(lines[2010:2020]), at)
    tail.append(2020, 2030)
    tail.wait(2030)
    os.truncate(tail.file.with_name("app.ndjson.1"), at)  # as its writer does at the end
    tail.stop(2030)


def test_a_file_of_only_preallocated_space_is_read_once_it_is_filled(tail: Tail):
    tail.file.touch()
    sparse(tail.file, 5 * MEGABYTE)
    running = tail.start()
    running.wait_for("source_opened")
    fill(tail.file, b"".join(tail.sample.lines[:5]), 0)
    tail.wait(5)
    tail.stop(5)


def test_a_hole_before_lines_is_skipped_though_preallocated_space_follows_them(tail: Tail):
    """Caused by a crash of the file system, or a writer that continues at its old offset after a truncation."""
    lines = tail.sample.lines
    tail.append(0, 3)
    sparse(tail.file, 4 * MEGABYTE)
    tail.append(3, 6)
    end = tail.file.stat().st_size
    sparse(tail.file, 9 * MEGABYTE)
    tail.start()
    tail.wait(6)
    fill(tail.file, b"".join(lines[6:9]), end)
    tail.wait(9)
    fill(tail.file, b"".join(lines[9:12]), 8 * MEGABYTE)  # it skips preallocated space
    tail.wait(12)
    tail.stop(12)


def test_starting_at_the_end_of_a_file_means_before_its_preallocated_space(tail: Tail):
    at = tail.append(0, 3).stat().st_size
    sparse(tail.file, 3 * MEGABYTE)
    running = tail.start(input__start="end")
    running.wait_for("source_opened")
    fill(tail.file, b"".join(tail.sample.lines[3:6]), at)
    tail.wait(range(3, 6))
    tail.stop(range(3, 6))


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_backfill_ends_at_preallocated_space_and_the_next_reads_what_fills_it(
    shipper: Shipper, service: Service, sample: Sample, ending: bytes
):
    path = shipper.write("a.ndjson", b"".join(sample.lines[:10]).rstrip() + ending)
    end = path.stat().st_size
    sparse(path, 3 * MEGABYTE)
    first = shipper.backfill(path)
    assert (first.returncode, first.counts()) == (0, (10, 10, 0, 0, 0))
    assert [checkpoint for *_, checkpoint in shipper.read_state().checkpoints] == [end]
    assert shipper.backfill(path).counts() == (0, 0, 0, 0, 0)
    assert status_of(shipper, path)["lag_bytes"] == 0
    fill(path, b"".join(sample.lines[10:20]), end)
    assert status_of(shipper, path)["lag_bytes"] > 0
    second = shipper.backfill(path)
    assert (second.returncode, second.counts()) == (0, (10, 10, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:20])


def status_of(shipper: Shipper, path: Path) -> dict[str, Any]:
    """Return the output of `shipper status` about an input."""
    status = json.loads(shipper.run("status", "--json", settings={"input.include": json.dumps([str(path)])}).stdout)
    (stream,) = status["state"]["streams"]
    return stream


def test_a_settled_file_with_preallocated_space_is_deleted(shipper: Shipper, sample: Sample):
    path = shipper.write("a.ndjson", *sample.lines[:10])
    sparse(path, 3 * MEGABYTE)
    result = shipper.backfill(path, settings={"input.on_complete": "delete", **QUICK})
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    assert not path.exists()
