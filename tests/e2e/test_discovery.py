"""Which files are read, from which position, in which order, how many at once, and what happens to them afterwards."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import HASTY, Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.files import Tail, append, compress, copytruncate, log_lines, open_files

NOT_NOW = Reply(status=503)


def aged(path: Path, modified_at: float) -> Path:
    """Change the time of the last modification of a file."""
    os.utime(path, (modified_at, modified_at))
    return path


# Which files ------------------------------------------------------------------------------------------------------


def test_globs_are_recursive_and_skip_excluded_files_even_new_ones(tail: Tail):
    tail.append(0, 5, "top.ndjson")
    _write_tree(tail, "early", 10)
    tail.start(
        ["**/*.ndjson", "one.log"], input__exclude=json.dumps([f"{tail.folder}/**/not-*", f"{tail.folder}/x/**"])
    )
    wanted = [*range(5), *range(10, 30)]
    tail.wait(wanted)
    _write_tree(tail, "late", 110)
    tail.append(200, 205, "one.log")
    wanted += [*range(110, 130), *range(200, 205)]
    tail.wait(wanted)
    (tail.folder / "early" / "not-this.ndjson").rename(tail.folder / "early" / "but-now.ndjson")
    wanted += range(30, 40)
    tail.wait(wanted)
    tail.stop(wanted)


def _write_tree(tail: Tail, name: str, start: int) -> None:
    """Write 20 wanted lines, and 40 unwanted ones: excluded, in an excluded or hidden folder, or under another name."""
    deep = tail.folder / name / "a" / "b"
    deep.mkdir(parents=True)
    (tail.folder / "x" / name).mkdir(parents=True)
    (tail.folder / ".hidden" / name).mkdir(parents=True)
    tail.append(start + 20, start + 30, f"{name}/not-this.ndjson")
    tail.append(start + 30, start + 40, f"{name}/a/this.txt")
    tail.append(start + 40, start + 50, f"x/{name}/this.ndjson")
    tail.append(start + 50, start + 60, f".hidden/{name}/this.ndjson")
    tail.append(start, start + 10, deep / "this.ndjson")
    tail.append(start + 10, start + 20, f"{name}/this.ndjson")


def test_files_excluded_for_a_while_keep_their_positions(tail: Tail):
    """Excluded by other globs or by `input.exclude`. Files that appear later are read from the beginning."""
    names = ("a.log", "b.log", "c.log")
    for number, name in enumerate(names):
        tail.append(number * 10, number * 10 + 10, name)
    tail.pass_by("*", 30)
    for number, name in enumerate(names):
        tail.append(30 + number * 10, 40 + number * 10, name)
    excluded = json.dumps([f"{tail.folder}/b.log"])
    tail.pass_by(["b.*", "c.*"], [*range(30), *range(50, 60)], input__exclude=excluded)
    tail.append(60, 70, "d.log")
    tail.pass_by("*", 70, input__start="end")


# Start position ---------------------------------------------------------------------------------------------------


def test_starting_at_the_end_skips_what_was_written_before_the_first_start_of_a_pattern(tail: Tail):
    """
    Earlier lines are not counted as read. A line that is incomplete at the start is read once it is complete.

    A pattern without files at its first start is read from the beginning. A pattern left out for a while is not new.
    """
    tail.append(0, 50, "a.1")
    tail.append(50, 60, "a.2")
    with (tail.folder / "a.1").open("ab", buffering=0) as writer:
        writer.write(tail.sample.lines[60][:50])
        running = tail.start("a.*", input__start="end")
        running.wait_until(lambda: len(log_lines(running, "source_opened")) == 2, "both files are open")
        writer.write(tail.sample.lines[60][50:])
    tail.append(61, 70, "a.1")
    tail.append(70, 80, "a.2")
    tail.append(80, 90, "a.late")
    wanted = [*range(60, 90)]
    tail.wait(wanted)
    tail.stop(wanted)

    tail.append(90, 100, "a.1")
    tail.append(100, 110, "a.late-while-left-out")
    old = tail.append(110, 120, "b.1")
    running = tail.start(["b.*", "c.*"], input__start="end")
    running.wait_until(lambda: log_lines(running, "source_opened", old), "the first poll")
    tail.append(120, 130, "b.1")
    tail.append(130, 140, "b.2")
    tail.append(140, 150, "c.1")
    wanted += range(120, 150)
    tail.wait(wanted)
    tail.stop(wanted)

    tail.append(150, 160, "b.late-while-stopped")
    tail.start(["a.*", "b.*"], input__start="end")
    wanted += [*range(90, 110), *range(150, 160)]
    tail.wait(wanted)
    tail.stop(wanted)


def test_the_end_as_start_position_is_saved_at_once_so_that_nothing_written_during_downtime_is_missed(
    tail: Tail, shipper: Shipper, service: Service
):
    """Nothing was sent before the kill. The file names say what happens to the files afterwards."""
    names = ["written", "renamed", "compressed", "copied"]
    files = [tail.append(number * 100, number * 100 + 50, name) for number, name in enumerate(names)]
    sizes = sorted(file.stat().st_size for file in files)
    running = tail.start(names, input__start="end")
    running.wait_until(
        lambda: sorted(row[3] for row in shipper.read_state().checkpoints) == sizes, "their ends are saved"
    )
    running.kill()
    assert service.received == 0
    for number, file in enumerate(files):
        tail.append(number * 100 + 50, number * 100 + 60, file)
        if file.name == "copied":
            copytruncate(file, tail.folder / "copy")
        elif file.name != "written":
            old = file.rename(tail.folder / f"{file.name}.old")
            if file.name == "compressed":
                compress(old, "gz")
        tail.append(number * 100 + 60, number * 100 + 70, file)
    wanted = [number * 100 + line for number in range(len(files)) for line in range(50, 70)]
    tail.start(names, input__start="end")
    tail.wait(wanted)
    tail.stop(wanted)


# In which order ---------------------------------------------------------------------------------------------------


def test_backfill_reads_files_by_age_and_files_of_equal_age_by_name(
    shipper: Shipper, fake: FakeService, sample: Sample, rng: Random
):
    names = [f"logs/{rng.choice('abc')}/{number}-{rng.randrange(100)}.ndjson" for number in range(20)]
    ages = {name: 1_700_000_000 + rng.choice((0, 0.25, 1, 1000)) for name in names}
    ordered = sorted(names, key=lambda name: (ages[name], name))
    for name in rng.sample(names, len(names)):
        start = ordered.index(name) * 10
        aged(shipper.write(name, *sample.lines[start : start + 10]), ages[name])
    settings = {"delivery.concurrency": 1, "batch.unique_consumers": "false"}
    result = shipper.backfill("logs/c/*", "logs", *rng.sample(names, 5), settings=settings)
    assert (result.returncode, result.counts()) == (0, (200, 200, 0, 0, 0))
    assert fake.event_ids() == sample.ids[:200]


# How many at once -------------------------------------------------------------------------------------------------


def test_more_files_than_descriptors_are_followed_in_turn_without_repeats(tail: Tail):
    """Most files are closed at any moment; data appended to them and their rotation are noticed."""
    files = 200
    for number in range(files):
        tail.append(number, number + 1, f"app.ndjson.{number:03}")
    running = tail.start(prefix=["prlimit", "--nofile=64", "--"], input__rotate_wait_seconds=0.2)
    tail.wait(files)
    assert len(open_files(running)) < 64
    sent = files
    for _ in range(2):
        for number in range(0, files, 10):
            tail.append(sent, sent + 1, f"app.ndjson.{number:03}")
            sent += 1
        tail.wait(sent)
    (tail.folder / "app.ndjson.000").rename(tail.folder / "app.ndjson.old")
    tail.append(sent, sent + 1, "app.ndjson.old")
    tail.append(sent + 1, sent + 2, "app.ndjson.000")
    sent += 2
    tail.wait(sent)
    tail.stop(sent)
    tail.append(sent, sent + 1, "app.ndjson.150")
    tail.start(prefix=["prlimit", "--nofile=64", "--"])
    tail.wait(sent + 1)
    tail.stop(sent + 1)


def test_backfill_keeps_few_files_open(shipper: Shipper, service: Service, sample: Sample):
    for number in range(300):
        shipper.write(f"logs/{number:03}", *sample.lines[number * 2 : number * 2 + 2])
    result = shipper.backfill("logs", prefix=["prlimit", "--nofile=64", "--"])
    assert (result.returncode, result.counts()) == (0, (600, 600, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[:600], 1)


# Completed files -------------------------------------------------------------------------------------


def completion(shipper: Shipper, how: str, to: Path | None = None) -> dict[str, str]:
    """Return the settings; create the folder in both cases, so that it can be listed."""
    done = to or shipper.folder / "done"
    done.mkdir(exist_ok=True)
    return {"input.on_complete": how} | ({"input.completed_directory": str(done)} if how == "move" else {})


def _done(shipper: Shipper) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (shipper.folder / "done").iterdir()}


def test_backfill_moves_settled_files_and_overwrites_none(shipper: Shipper, service: Service, sample: Sample):
    """Including dead letters, duplicates and records settled by an earlier run."""
    earlier = shipper.write("logs/earlier.ndjson", *sample.lines[:10])
    assert shipper.backfill("logs").counts() == (10, 10, 0, 0, 0)
    assert earlier.exists()

    settings = completion(shipper, "move")
    done = shipper.folder / "done"
    (done / "1.ndjson").write_bytes(b"somebody else's")
    (done / "2.ndjson").mkdir()
    paths = [
        shipper.write(f"logs/{number}.ndjson", *sample.lines[number * 10 : number * 10 + 10]) for number in range(1, 4)
    ]
    append(paths[2], b'{"bad": 1}\n' + sample.lines[10])
    paths += [
        compress(shipper.write("logs/4.ndjson", *sample.lines[40:50]), "gz"),
        shipper.write("more/1.ndjson", *sample.lines[50:60]),
        earlier,
    ]
    contents = sorted(path.read_bytes() for path in paths)
    shipper.write("logs/empty.ndjson")
    result = shipper.backfill("logs", "more", settings=settings)
    assert (result.returncode, result.counts()) == (3, (52, 50, 1, 1, 0))
    assert [path for path in paths if path.exists()] == []
    (done / "2.ndjson").rmdir()
    assert (done / "1.ndjson").read_bytes() == b"somebody else's"
    (done / "1.ndjson").unlink()
    assert sorted(filter(None, _done(shipper).values())) == contents

    # A file with the same name is new, and a file moved into an input folder is not read again.
    settings = completion(shipper, "move", shipper.folder / "logs" / "done")
    shipper.write("logs/1.ndjson", *sample.lines[60:70])
    for count in (10, 0):
        assert shipper.backfill("logs", settings=settings).counts() == (count, count, 0, 0, 0)
    assert (shipper.folder / "logs" / "done" / "1.ndjson").read_bytes() == b"".join(sample.lines[60:70])
    assert service.times_received() == dict.fromkeys(sample.ids[:70], 1)


def test_backfill_deletes_settled_files_but_none_that_has_grown_or_could_not_be_read_to_the_end(
    shipper: Shipper, fake: FakeService, sample: Sample
):
    fake.default = HANG
    settled = shipper.write("settled.ndjson", *sample.lines[:10])
    append(settled, b'{"bad": 1}\n' + sample.lines[0])
    grown = shipper.write("grown.ndjson", *sample.lines[10:20])
    cut = compress(shipper.write("cut.ndjson", *sample.lines[1000:2000]), "gz")
    with cut.open("r+b") as out:
        out.truncate(cut.stat().st_size - 10)
    arguments = ("backfill", "settled.ndjson", "grown.ndjson", cut, "--summary", "json")
    settings = completion(shipper, "delete")
    running = shipper.start(*arguments, settings=settings)
    running.wait_until(lambda: fake.requests, "a first request")
    append(grown, *sample.lines[20:30])
    fake.release()
    assert running.finish().returncode == 4
    assert cut.exists()
    assert not settled.exists()
    if not set(sample.ids[20:30]) <= set(fake.event_ids()):
        assert grown.exists(), "the appended record was not read"
    again = [grown, cut] if grown.exists() else [cut]
    assert shipper.backfill(*again, settings=settings).returncode == 4
    assert cut.exists()
    assert not grown.exists()
    times = Counter(fake.event_ids())
    assert max(times.values()) == 1
    assert times.keys() >= set(sample.ids[:30])


def test_backfill_keeps_a_file_with_pending_records(shipper: Shipper, fake: FakeService, sample: Sample):
    """Of two files, the first is accepted and the second is not; the next run sends only the second."""
    on_complete = completion(shipper, "move")
    first, second = (
        aged(shipper.write("1.ndjson", *sample.lines[:10]), 1e9),
        aged(shipper.write("2.ndjson", *sample.lines[10:30]), 2e9),
    )
    data = second.read_bytes()
    fake.plan(OK)
    fake.default = NOT_NOW
    settings = {**on_complete, **HASTY, "batch.max_events": 10, "delivery.concurrency": 1}
    result = shipper.backfill(first, second, settings=settings)
    assert (result.returncode, result.counts()) == (4, (30, 10, 0, 0, 20))
    assert not first.exists()
    assert second.read_bytes() == data
    fake.default = OK
    result = shipper.backfill("*.ndjson", settings=settings)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0))
    assert not second.exists()
    assert sorted(fake.event_ids()) == sorted(sample.ids[:30])


def test_a_file_is_moved_completely_to_another_disk(shipper: Shipper, sample: Sample, other_disk: Path):
    path = shipper.write("a.ndjson", *sample.lines[:3000])
    (other_disk / "a.ndjson").write_bytes(b"somebody else's")
    result = shipper.backfill(path, settings=completion(shipper, "move", other_disk))
    assert (result.returncode, result.counts()) == (0, (3000, 3000, 0, 0, 0))
    contents = sorted((each.read_bytes() for each in other_disk.iterdir()), key=len)
    assert contents == [b"somebody else's", b"".join(sample.lines[:3000])]
    assert not path.exists()


@pytest.fixture
def other_disk(shipper: Shipper) -> Iterator[Path]:
    """A folder on another device."""
    if not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == shipper.folder.stat().st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shipper-test-") as folder:
        yield Path(folder)


def test_a_completed_file_that_cannot_be_moved_or_deleted_is_reported_and_kept(
    shipper: Shipper, service: Service, sample: Sample
):
    path = shipper.write("a.ndjson", *sample.lines[:10])
    settings = completion(shipper, "move")
    (shipper.folder / "done").rmdir()
    shipper.write("done", b"no folder")
    result = shipper.backfill(path, settings=settings)
    assert str(path) in result.stderr or str(shipper.folder / "done") in result.stderr
    assert path.read_bytes() == b"".join(sample.lines[:10])
    assert (shipper.folder / "done").read_bytes() == b"no folder"
    assert service.received in {0, 10}
    assert (result.returncode == 2) == (service.received == 0)


def test_backfill_does_not_move_a_file_that_is_still_written(shipper: Shipper, sample: Sample):
    live = shipper.write("live.ndjson", *sample.lines[:10])
    done = shipper.write("done.ndjson", *sample.lines[10:20])
    with live.open("ab"):
        result = shipper.backfill(live, done, settings={"input.on_complete": "delete"})
        assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0))
        assert (live.exists(), done.exists()) == (True, False)
        assert str(live) in result.stderr
    assert shipper.backfill(live, settings={"input.on_complete": "delete"}).counts()[0] == 0
    assert not live.exists()


@pytest.mark.parametrize("action", ["delete", "move"])
def test_status_reports_moved_and_deleted_files_as_delivered(shipper: Shipper, sample: Sample, action: str):
    export = shipper.write("exports/export.ndjson", *sample.lines[:10])
    archive = export.with_name("other.ndjson.gz")
    archive.write_bytes(gzip.compress(b"".join(sample.lines[10:20])))
    settings = {"input.on_complete": action, "input.completed_directory": str(shipper.folder / "done")}
    assert shipper.backfill(export, archive, settings=settings).counts()[0] == 20
    assert not any(export.parent.iterdir())
    result = shipper.run("status", "--until", "now", "--all", settings=settings)
    assert result.returncode == 0, result.stdout


def test_a_new_file_under_the_name_of_a_file_being_moved_is_not_overwritten(
    shipper: Shipper, service: Service, sample: Sample
):
    """A crash left the file under its private name; meanwhile the application created another file."""
    file = shipper.write("logs/app.ndjson", *sample.lines[:10])
    settings = {"input.on_complete": "delete"}
    running = shipper.start("backfill", file, settings=settings, env={"SHIPPER_CRASH_AT": "complete.taken"})
    assert running.finish().returncode < 0
    (left,) = file.parent.iterdir()
    assert left != file
    aged(shipper.write(file, *sample.lines[10:20]), 1)
    result = shipper.backfill("logs", settings=settings)
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    assert list(file.parent.iterdir()) == []
    assert service.times_received() == dict.fromkeys(sample.ids[:20], 1)


def test_a_file_in_the_state_directory_is_refused_with_a_reason(shipper: Shipper, sample: Sample):
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "a.ndjson").write_bytes(sample.lines[0])
    for name, words in (("a.ndjson", "is in the state directory"), ("b.ndjson", "no file matches")):
        result = shipper.backfill(shipper.state / name)
        assert result.returncode != 0
        assert words in result.stderr
        assert str(shipper.state / name) in result.stderr
