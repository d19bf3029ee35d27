"""Bytes that can no longer be read are reported once; `shipper status` shows how far each input was read."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from shipper.model.units import size
from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService
from tests.e2e.files import Tail, compress, copytruncate, log_lines


def unreachable_bytes(shipper: Shipper) -> int:
    """Return the unreachable bytes counted in the state store."""
    with closing(sqlite3.connect(f"file:{shipper.state}/state.db?mode=ro", uri=True)) as db:
        return db.execute("SELECT unreachable_bytes FROM totals").fetchone()[0]


def status(shipper: Shipper) -> dict[str, Any]:
    """Return the state part of `shipper status --json`."""
    result = shipper.run("status", "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["state"]


def see_without_settling(tail: Tail, shipper: Shipper, fake: FakeService, service: Service, fates: list[str]) -> None:
    """
    Settle the first 10 of 30 lines in a file for each fate; read the others in a separate run.

    Another file has only 10 lines and is deleted once they are settled.
    """
    shipper.target = service.target
    for number, fate in enumerate([*fates, "finished"]):
        tail.append(number * 100, number * 100 + 10, f"{fate}.log")
    tail.pass_by("*.log", lines_of([*fates, "finished"], 0, 10))
    (tail.folder / "finished.log").unlink()
    for number, fate in enumerate(fates):
        tail.append(number * 100 + 10, number * 100 + 30, f"{fate}.log")
    shipper.target = fake.target
    fake.default = HANG
    running = tail.start("*.log", delivery__drain_timeout_seconds=0.1, batch__unique_consumers="false")
    running.wait_until(lambda: sum(body.count(b'"EventId"') for body in fake.bodies) == 20 * len(fates), "all are sent")
    assert running.stop().returncode == 4
    shipper.target = service.target


def lines_of(fates: list[str], start: int, end: int) -> list[int]:
    return [number * 100 + index for number in range(len(fates)) for index in range(start, end)]


def test_unreachable_bytes_are_reported_once_unless_they_are_found_again(
    tail: Tail, shipper: Shipper, fake: FakeService, service: Service
):
    gone = ["deleted", "moved", "packed", "truncated", "replaced", "inode-reused"]
    found = ["renamed", "compressed", "copied", "restored", "beside"]
    fates = [*gone, *found]
    see_without_settling(tail, shipper, fake, service, fates)
    elsewhere = shipper.folder / "elsewhere"
    elsewhere.mkdir()
    files = {fate: tail.folder / f"{fate}.log" for fate in fates}
    wanted = [*lines_of([*fates, "finished"], 0, 10), *range(2000, 2065)]
    files["deleted"].unlink()
    files["moved"].rename(elsewhere / "moved.log")
    compress(files["packed"], "gz", elsewhere / "packed.log.gz")
    os.truncate(files["truncated"], 0)
    tail.append(2000, 2010, "new").rename(files["replaced"])
    files["inode-reused"].write_bytes(b"".join(tail.sample.lines[2010:2060]))
    tail.append(2060, 2065, "other.log")
    files["renamed"].rename(tail.folder / "renamed-1.log")
    compress(files["compressed"], "zst")
    copytruncate(files["copied"], tail.folder / "copy")
    data = files["restored"].read_bytes()
    files["restored"].rename(shipper.folder / "keeps-the-inode")
    files["restored"].write_bytes(data)
    files["beside"].rename(tail.folder / "something-else")
    for number, fate in enumerate(fates):
        if fate in found:
            tail.append(number * 100 + 30, number * 100 + 40, f"{fate}.log")
            wanted += range(number * 100 + 10, number * 100 + 40)

    running = tail.start("*.log", input__rotate_wait_seconds=0)
    tail.wait(wanted)
    running.wait_until(lambda: len(log_lines(running, "source_unreachable")) >= len(gone), "all are reported")
    result = tail.stop(wanted)
    reported = {line["path"]: line["bytes"] for line in log_lines(result, "source_unreachable")}
    assert reported == {
        str(files[fate]): sum(map(len, tail.sample.lines[number * 100 + 10 : number * 100 + 30]))
        for number, fate in enumerate(gone)
    }
    assert len(log_lines(result, "source_unreachable")) == len(gone)
    assert {line["level"] for line in log_lines(result, "source_unreachable")} <= {"warning", "error"}
    lost = sum(reported.values())
    assert unreachable_bytes(shipper) == lost
    seen = status(shipper)
    assert seen["unreachable_bytes"] == lost
    assert {each["path"]: each["bytes"] for each in seen["unreachable"]} == reported
    words = shipper.run("status")
    assert words.returncode == 0
    assert size(lost) in words.stdout
    assert "unreachable" in words.stdout
    assert str(files["deleted"]) in words.stdout

    # Reading resumes in a file that reappears.
    (elsewhere / "moved.log").rename(tail.folder / "restored-from-backup.log")
    wanted += range(110, 130)
    tail.start("*.log", input__rotate_wait_seconds=0)
    for number in (2065, 2066, 2067):  # each found by a separate poll
        wanted += range(number, number + 1)
        tail.append(number, number + 1, f"{number}.log")
        tail.wait(wanted)
    assert log_lines(tail.stop(wanted), "source_unreachable") == []
    assert unreachable_bytes(shipper) == lost


def test_the_bytes_known_at_the_last_save_are_reported_after_a_kill(
    tail: Tail, shipper: Shipper, fake: FakeService, service: Service
):
    """Bytes written after the last save are unknown."""
    fake.plan(OK)
    fake.default = HANG
    tail.append(0, 3000)
    size = tail.file.stat().st_size
    running = tail.start(delivery__concurrency=1)
    running.wait_until(lambda: shipper.read_state().accepted, "something is saved")
    running.kill()
    tail.file.unlink()
    shipper.target = service.target
    tail.append(3000, 3010, "app.ndjson.other")
    running = tail.start(input__rotate_wait_seconds=0)
    tail.wait(range(3000, 3010))
    running.wait_for("source_unreachable")
    (line,) = log_lines(running.stop(), "source_unreachable")
    assert 0 < line["bytes"] <= size
    assert unreachable_bytes(shipper) == line["bytes"]


def test_backfill_reports_unreachable_bytes_of_an_earlier_run(
    shipper: Shipper, fake: FakeService, service: Service, sample: Sample
):
    fake.plan(OK)
    fake.default = HANG
    path = shipper.write("a.ndjson", *sample.lines[:100])
    other = shipper.write("b.ndjson", *sample.lines[100:110])
    settings = {"batch.max_events": 30, "delivery.concurrency": 1, "delivery.drain_timeout_seconds": 0.1}
    running = shipper.start("backfill", path, settings=settings)
    running.wait_until(lambda: shipper.read_state().accepted, "the first batch is saved")
    assert running.stop().returncode == 4
    ((_, _, _, checkpoint),) = shipper.read_state().checkpoints
    lost = path.stat().st_size - checkpoint
    assert lost > 0
    path.unlink()
    shipper.target = service.target
    result = shipper.backfill(other)
    assert result.counts() == (10, 10, 0, 0, 0)
    (line,) = log_lines(result, "source_unreachable")
    assert (line["path"], line["bytes"]) == (str(path), lost)
    assert log_lines(shipper.backfill(other), "source_unreachable") == []


# `shipper status` -------------------------------------------------------------------------------------------------


def test_status_shows_the_lag_of_each_stream_of_a_stopped_and_of_a_running_shipper(
    tail: Tail, shipper: Shipper, fake: FakeService, service: Service
):
    tail.append(0, 300)
    fake.plan(OK)
    fake.default = HANG
    settings = {"batch.max_events": 100, "batch.unique_consumers": "false", "delivery.concurrency": 1}
    running = tail.start(settings=settings, delivery__drain_timeout_seconds=0.1)
    running.wait_until(lambda: shipper.read_state().accepted == 100, "the first batch is saved")
    assert running.stop().returncode == 4
    assert fake.event_ids() == tail.ids(100)
    shipper.target = service.target
    tail.append(300, 310, "app.ndjson.2")
    size = tail.file.stat().st_size
    lag = sum(map(len, tail.sample.lines[100:300]))

    def stream_of(path: Path) -> dict[str, Any]:
        (stream,) = [each for each in status(shipper)["streams"] if each["path"] == str(path)]
        return {key: stream[key] for key in ("size", "checkpoint", "lag_bytes")}

    assert stream_of(tail.file) == {"size": size, "checkpoint": size - lag, "lag_bytes": lag}
    running = tail.start()
    tail.wait(range(100, 310))
    assert running.peak_bytes
    for path in (tail.file, tail.folder / "app.ndjson.2"):
        all_read = {"size": path.stat().st_size, "checkpoint": path.stat().st_size, "lag_bytes": 0}
        running.wait_until(lambda path=path, all_read=all_read: stream_of(path) == all_read, "it is saved")
    with tail.held():
        tail.append(310, 320)
        grown = tail.file.stat().st_size
        assert stream_of(tail.file)["checkpoint"] == size
        assert stream_of(tail.file)["lag_bytes"] in {0, grown - size}
    tail.wait(range(100, 320))
    assert running.stop().returncode == 0
    assert stream_of(tail.file) == {"size": grown, "checkpoint": grown, "lag_bytes": 0}
