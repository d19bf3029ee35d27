"""What `input.on_complete` takes away: what was rotated and is settled, and never a file that is live."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper
from tests.e2e.files import Tail, told

SETTINGS = {"input__on_complete": "delete", "input__rotate_wait_seconds": 0.2}


def restored(tail: Tail) -> Path:
    """A new inode of the same name, as after a restore or on another disk."""
    copy = shutil.copy2(tail.file, tail.folder / "backup")
    tail.file.unlink()
    return Path(copy).rename(tail.file)


def restored_in_a_folder_that_was_renamed(tail: Tail) -> Path:
    """The patterns name both folders, as where one of several disks is mounted elsewhere."""
    folder = tail.folder / "disk-2"
    (tail.folder / "disk-1").rename(folder)
    return folder / "app.ndjson"


def begun_anew_like_the_one_that_went(tail: Tail) -> Path:
    """Its predecessor had no record yet, only what they all begin with."""
    tail.file.unlink()
    new = tail.folder / "app-new.ndjson"
    new.write_bytes(b"\n".join([b'{"comment": "one line that all files begin with"}', b""]))
    return new


@pytest.mark.parametrize("is_running", [True, False], ids=["running", "stopped"])
@pytest.mark.parametrize("replace", [restored, restored_in_a_folder_that_was_renamed])
def test_a_live_file_is_not_put_away_whatever_became_of_its_inode_and_folder(
    tail: Tail, replace: Callable[[Tail], Path], is_running: bool
):
    """Another one that is rotated goes meanwhile, so there was time for it."""
    (tail.folder / "disk-1").mkdir()
    if replace is restored_in_a_folder_that_was_renamed:
        tail.file = tail.folder / "disk-1" / "app.ndjson"
    tail.append(0, 10, tail.file)
    other = tail.append(10, 20, "other.ndjson")
    include = ["app.ndjson", "disk-*/app.ndjson", "other.ndjson"]
    running = tail.start(include, **SETTINGS)
    tail.wait(20)
    if not is_running:
        tail.stop(20)
    live = replace(tail)
    if not is_running:
        running = tail.start(include, **SETTINGS)
        tail.append(20, 21, other)
        tail.wait(21)
    for number in (1, 2):  # the second of them is known to be quiet for longer than the live one was
        rotated = other.rename(tail.folder / f"other.ndjson.{number}")
        tail.append(20 + number, 21 + number, other)
        running.wait_until(lambda rotated=rotated: not rotated.exists(), f"{rotated.name} is put away")
    assert live.exists()
    tail.append(30, 40, live)
    expected = [*range(20), *([] if is_running else [20]), 21, 22, *range(30, 40)]
    tail.wait(expected)
    tail.stop(expected)
    assert live.exists()
    assert not told(running, "source_deleted", live)


def test_a_rotated_file_is_not_put_away_as_long_as_its_writer_has_it_open(tail: Tail):
    """However long nothing has come; it goes when it is closed, with what came late."""
    tail.append(0, 10)
    other = tail.append(10, 20, "other.ndjson")
    running = tail.start(["app.ndjson", "other.ndjson"], **SETTINGS)
    tail.wait(20)
    with tail.file.open("ab") as writer:
        rotated = tail.file.rename(tail.folder / "app.ndjson.1")
        running.wait_until(lambda: told(running, "source_still_written", rotated), "it is left alone")
        gone = other.rename(tail.folder / "other.ndjson.1")
        running.wait_until(lambda: not gone.exists(), "another one is put away")
        assert rotated.exists()
        writer.writelines(tail.sample.lines[20:30])
    running.wait_until(lambda: not rotated.exists(), "it is put away")
    tail.wait(30)
    tail.stop(30)
    assert len(told(running, "source_still_written")) == 1


def test_backfill_does_not_put_away_what_is_still_written(shipper: Shipper, service: Service, sample: Sample):
    live, done = shipper.folder / "live.ndjson", shipper.folder / "done.ndjson"
    live.write_bytes(b"".join(sample.lines[:10]))
    done.write_bytes(b"".join(sample.lines[10:20]))
    with live.open("ab"):
        result = shipper.backfill(live, done, settings={"input.on_complete": "delete"})
        assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0))
        assert (live.exists(), done.exists()) == (True, False)
        assert str(live) in result.stderr
    assert shipper.backfill(live, settings={"input.on_complete": "delete"}).counts()[0] == 0
    assert not live.exists()


@pytest.mark.parametrize("action", ["delete", "move"])
def test_what_backfill_has_put_away_is_delivered_by_its_status(
    shipper: Shipper, service: Service, sample: Sample, action: str
):
    export = shipper.folder / "exports" / "export.ndjson"
    export.parent.mkdir()
    export.write_bytes(b"".join(sample.lines[:10]))
    archive = export.with_name("other.ndjson.gz")
    archive.write_bytes(gzip.compress(b"".join(sample.lines[10:20])))
    settings = {"input.on_complete": action, "input.completed_directory": str(shipper.folder / "done")}
    assert shipper.backfill(export, archive, settings=settings).counts()[0] == 20
    assert not any(export.parent.iterdir())
    result = shipper.run("status", "--until", "now", "--all", settings=settings)
    assert result.returncode == 0, result.stdout


def test_what_takes_the_name_of_a_file_that_was_being_put_away_is_not_overwritten(
    shipper: Shipper, service: Service, sample: Sample
):
    """A crash left the file with its private name; meanwhile the application has begun another one."""
    folder = shipper.folder / "logs"
    folder.mkdir()
    file = folder / "app.ndjson"
    file.write_bytes(b"".join(sample.lines[:10]))
    settings = {"input.on_complete": "delete"}
    running = shipper.start("backfill", file, settings=settings, env={"SHIPPER_CRASH_AT": "complete.taken"})
    assert running.finish().returncode < 0
    (left,) = folder.iterdir()
    assert left != file
    file.write_bytes(b"".join(sample.lines[10:20]))
    os.utime(file, (1, 1))
    result = shipper.backfill(folder, settings=settings)
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    assert list(folder.iterdir()) == []
    assert service.times_received() == dict.fromkeys(sample.ids[:20], 1)
