"""Which files are read, from where on and in which order, how many at once, and what becomes of them afterwards."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.files import Tail, compress, copytruncate, open_files, told

HASTY = {
    "delivery.give_up_after_seconds": 0.3,
    "delivery.retry_initial_seconds": 0.05,
    "delivery.retry_max_seconds": 0.1,
}
NOT_NOW = Reply(status=503)


@pytest.fixture
def write(shipper: Shipper, sample: Sample) -> Callable[..., Path]:
    """Write lines of the sample into a file below the working directory."""

    def write(name: str, start: int, end: int, *, modified_at: float | None = None) -> Path:
        path = shipper.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(sample.lines[start:end]))
        if modified_at is not None:
            os.utime(path, (modified_at, modified_at))
        return path

    return write


# Which files ------------------------------------------------------------------------------------------------------


def test_globs_go_down_and_leave_out_what_is_excluded_also_when_it_comes_late(tail: Tail):
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
    """20 lines that are wanted, and 40 that are not: excluded, of another name, excluded with their folder, hidden."""
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


def test_files_that_are_left_out_for_a_while_keep_their_positions(tail: Tail):
    """By other globs, or as they are excluded. What comes after a first start from the beginning is read from there."""
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


# From where on ----------------------------------------------------------------------------------------------------


def test_from_the_end_on_means_what_is_written_after_a_pattern_s_own_first_start(tail: Tail):
    """
    Lines of before are not counted as read. A line that is torn at the start is whole later, and it is read.

    With nothing there at its first start, everything comes later. A pattern that was left out for a while is not new.
    """
    tail.append(0, 50, "a.1")
    tail.append(50, 60, "a.2")
    with (tail.folder / "a.1").open("ab", buffering=0) as writer:
        writer.write(tail.sample.lines[60][:50])
        running = tail.start("a.*", input__start="end")
        running.wait_until(lambda: len(told(running, "source_opened")) == 2, "both are open")
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
    running.wait_until(lambda: told(running, "source_opened", old), "a first look")
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


def test_from_the_end_on_is_saved_at_once_so_that_nothing_written_while_it_is_down_is_missed(
    tail: Tail, shipper: Shipper, service: Service
):
    """It had nothing to send before it was killed. What becomes of the files then is in their names."""
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


def test_backfill_reads_the_oldest_file_first_and_by_name_where_they_are_as_old(
    shipper: Shipper, fake: FakeService, write: Callable[..., Path], sample: Sample, rng: Random
):
    shipper.target = fake.target
    names = [f"logs/{rng.choice('abc')}/{number}-{rng.randrange(100)}.ndjson" for number in range(20)]
    ages = {name: 1_700_000_000 + rng.choice((0, 0.25, 1, 1000)) for name in names}
    ordered = sorted(names, key=lambda name: (ages[name], name))
    for name in rng.sample(names, len(names)):
        start = ordered.index(name) * 10
        write(name, start, start + 10, modified_at=ages[name])
    settings = {"delivery.concurrency": 1, "batch.unique_consumers": "false"}
    result = shipper.backfill("logs/c/*", "logs", *rng.sample(names, 5), settings=settings)
    assert (result.returncode, result.counts()) == (0, (200, 200, 0, 0, 0))
    assert fake.event_ids() == sample.ids[:200]


def test_a_quiet_file_is_not_held_up_by_busy_ones(tail: Tail, shipper: Shipper, fake: FakeService):
    """Two are long from the start; a line comes to the quiet one when as much of them was read ahead as may be."""
    shipper.target = fake.target
    fake.default = HANG
    tail.append(0, 24_900, "a.busy")
    tail.append(24_900, 49_800, "b.busy")
    tail.append(49_800, 49_801, "c.quiet")
    running = tail.start("*", delivery__concurrency=1)
    running.wait_until(lambda: fake.requests, "a first request")
    tail.append(49_801, 49_802, "c.quiet")
    fake.release()
    running.wait_until(lambda: len(fake.event_ids()) >= 49_802, "all events")
    assert running.stop().returncode == 0
    arrived = {event_id: number for number, event_id in enumerate(fake.event_ids())}
    assert sorted(arrived) == sorted(tail.ids(49_802))
    assert arrived[tail.sample.ids[49_800]] < 10_000
    assert arrived[tail.sample.ids[49_801]] < 46_000, "it had to wait for the end of the busy ones"
    of_a = sum(arrived[event_id] < 25_000 for event_id in tail.sample.ids[:24_900])
    assert 6_000 < of_a < 19_000, "the busy ones did not take turns"


# How many at once -------------------------------------------------------------------------------------------------


def test_more_files_than_descriptors_are_followed_in_turn_and_none_twice(tail: Tail):
    """Most of them are closed at any moment; what is appended to these is seen, and so is their rotation."""
    files = 200
    for number in range(files):
        tail.append(number, number + 1, f"app.ndjson.{number:03}")
    running = tail.start(prefix=["prlimit", "--nofile=100", "--"], input__rotate_wait_seconds=0.2)
    tail.wait(files)
    assert len(open_files(running)) < 100
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
    tail.start(prefix=["prlimit", "--nofile=100", "--"])
    tail.wait(sent + 1)
    tail.stop(sent + 1)


def test_backfill_holds_few_files_open(shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path]):
    for number in range(300):
        write(f"logs/{number:03}", number * 2, number * 2 + 2)
    result = shipper.backfill("logs", prefix=["prlimit", "--nofile=64", "--"])
    assert (result.returncode, result.counts()) == (0, (600, 600, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[:600], 1)


# What becomes of them: backfill -----------------------------------------------------------------------------------


def completion(shipper: Shipper, how: str, to: Path | None = None) -> dict[str, str]:
    """The settings; the folder is made for both, so that one can look into it."""
    done = to or shipper.folder / "done"
    done.mkdir(exist_ok=True)
    return {"input.on_complete": how} | ({"input.completed_directory": str(done)} if how == "move" else {})


def _done(shipper: Shipper) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (shipper.folder / "done").iterdir()}


def test_backfill_moves_what_is_settled_and_never_over_a_name_that_is_taken(
    shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path]
):
    """Dead letters and duplicates included, and what an earlier run had settled."""
    earlier = write("logs/earlier.ndjson", 0, 10)
    assert shipper.backfill("logs").counts() == (10, 10, 0, 0, 0)
    assert earlier.exists()

    settings = completion(shipper, "move")
    done = shipper.folder / "done"
    (done / "1.ndjson").write_bytes(b"somebody else's")
    (done / "2.ndjson").mkdir()
    paths = [write(f"logs/{number}.ndjson", number * 10, number * 10 + 10) for number in range(1, 4)]
    with paths[2].open("ab") as out:
        out.write(b'{"bad": 1}\n' + sample.lines[10])
    paths += [compress(write("logs/4.ndjson", 40, 50), "gz"), write("more/1.ndjson", 50, 60), earlier]
    contents = sorted(path.read_bytes() for path in paths)
    write("logs/empty.ndjson", 0, 0)
    result = shipper.backfill("logs", "more", settings=settings)
    assert (result.returncode, result.counts()) == (3, (52, 50, 1, 1, 0))
    assert [path for path in paths if path.exists()] == []
    (done / "2.ndjson").rmdir()
    assert (done / "1.ndjson").read_bytes() == b"somebody else's"
    (done / "1.ndjson").unlink()
    assert sorted(filter(None, _done(shipper).values())) == contents

    # The same name again is a new file; and what is moved into a folder that is read is not read again.
    settings = completion(shipper, "move", shipper.folder / "logs" / "done")
    write("logs/1.ndjson", 60, 70)
    for count in (10, 0):
        assert shipper.backfill("logs", settings=settings).counts() == (count, count, 0, 0, 0)
    assert (shipper.folder / "logs" / "done" / "1.ndjson").read_bytes() == b"".join(sample.lines[60:70])
    assert service.times_received() == dict.fromkeys(sample.ids[:70], 1)


def test_backfill_deletes_what_is_settled_and_not_what_has_grown_or_could_not_be_read_to_its_end(
    shipper: Shipper, fake: FakeService, sample: Sample, write: Callable[..., Path]
):
    shipper.target = fake.target
    fake.default = HANG
    settled = write("settled.ndjson", 0, 10)
    with settled.open("ab") as out:
        out.write(b'{"bad": 1}\n' + sample.lines[0])
    grown = write("grown.ndjson", 10, 20)
    cut = compress(write("cut.ndjson", 1000, 2000), "gz")
    with cut.open("r+b") as out:
        out.truncate(cut.stat().st_size - 10)
    arguments = ("backfill", "settled.ndjson", "grown.ndjson", cut, "--summary", "json")
    settings = completion(shipper, "delete")
    running = shipper.start(*arguments, settings=settings)
    running.wait_until(lambda: fake.requests, "a first request")
    with grown.open("ab") as out:
        out.writelines(sample.lines[20:30])
    fake.release()
    assert running.finish().returncode == 4
    assert cut.exists()
    assert not settled.exists()
    if not set(sample.ids[20:30]) <= set(fake.event_ids()):
        assert grown.exists(), "what came later was not read"
    again = [grown, cut] if grown.exists() else [cut]
    assert shipper.backfill(*again, settings=settings).returncode == 4
    assert cut.exists()
    assert not grown.exists()
    times = Counter(fake.event_ids())
    assert max(times.values()) == 1
    assert times.keys() >= set(sample.ids[:30])


def test_backfill_leaves_a_file_with_anything_pending(
    shipper: Shipper, fake: FakeService, sample: Sample, write: Callable[..., Path]
):
    """Of two files, the first is accepted and the second is not; the next run has to do with the second alone."""
    on_complete = completion(shipper, "move")
    shipper.target = fake.target
    first, second = write("1.ndjson", 0, 10, modified_at=1e9), write("2.ndjson", 10, 30, modified_at=2e9)
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


def test_a_file_is_moved_to_another_disk_whole(
    shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path], other_disk: Path
):
    path = write("a.ndjson", 0, 3000)
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
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shipper-test-") as folder:
        yield Path(folder)


def test_a_file_that_cannot_be_put_away_is_named_and_kept(
    shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path]
):
    path = write("a.ndjson", 0, 10)
    settings = completion(shipper, "move")
    (shipper.folder / "done").rmdir()
    (shipper.folder / "done").write_bytes(b"no folder")
    result = shipper.backfill(path, settings=settings)
    assert str(path) in result.stderr or str(shipper.folder / "done") in result.stderr
    assert path.read_bytes() == b"".join(sample.lines[:10])
    assert (shipper.folder / "done").read_bytes() == b"no folder"
    assert service.received in {0, 10}
    assert (result.returncode == 2) == (service.received == 0)


# What becomes of them: run ----------------------------------------------------------------------------------------


def test_run_puts_away_what_was_rotated_and_nothing_else(tail: Tail):
    """
    Only a file whose own name belongs to another one by now, or that was renamed, is rotated: within the glob, or out
    of it, as logrotate does it where input.include names one file.

    Half a line at its end is no record; and it would be gone with the file.
    """
    (tail.folder / "deep").mkdir()
    tail.append(0, 10)
    linked = tail.append(10, 20, "app.ndjson.other")
    kept = [tail.file, linked, tail.folder / "app.ndjson.linked"]
    os.link(linked, kept[-1])
    kept.append(tail.append(20, 30, "deep/app.ndjson"))
    kept.append(tail.append(30, 40, "single.log"))
    torn = tail.append(40, 50, "torn.ndjson")
    with torn.open("ab") as out:
        out.write(tail.sample.lines[50][:100])
    include = ["app.ndjson*", "deep/*", "single.log", "torn.*"]
    running = tail.start(include, input__on_complete="delete", input__rotate_wait_seconds=0.2)
    tail.wait(50)
    old = [path.rename(f"{path}.1") for path in (tail.file, tail.folder / "single.log")]
    torn = torn.rename(tail.folder / "torn.1")
    tail.append(51, 60)
    tail.append(60, 70, "single.log")
    for path in old:
        running.wait_until(lambda path=path: not path.exists(), f"{path.name} is put away")
    for number in (70, 71, 72):  # each of them found by a look of its own
        tail.append(number, number + 1, f"app.ndjson.other-{number}")
        tail.wait([*range(50), *range(51, number + 1)])
    assert torn.exists()
    with torn.open("ab") as out:
        out.write(tail.sample.lines[50][100:])
    running.wait_until(lambda: not torn.exists(), "it is put away when its last line is whole")
    tail.wait(73)
    tail.stop(73)
    assert [path for path in kept if not path.exists()] == []


@pytest.mark.early
def test_run_moves_what_was_rotated_while_it_was_stopped_and_not_what_is_still_written(tail: Tail, shipper: Shipper):
    """It stays until one that was rotated after it, and is not written any more, has been put away."""
    tail.append(0, 10)
    tail.pass_by("app.ndjson", 10)
    tail.append(10, 20)
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    tail.append(20, 30)
    settings = {key.replace(".", "__"): value for key, value in completion(shipper, "move").items()}
    running = tail.start("app.ndjson", **settings, input__rotate_wait_seconds=3)
    tail.wait(30)
    with tail.file.open("ab", buffering=0) as writer:
        written = tail.file.rename(tail.folder / "app.ndjson.2")
        tail.append(30, 40)
        tail.wait(40)
        quiet = tail.file.rename(tail.folder / "app.ndjson.3")
        tail.append(40, 50)
        sent = 50

        def is_put_away_while_the_other_is_written() -> bool:
            nonlocal sent
            writer.write(tail.sample.lines[sent])
            sent += 1
            tail.wait(sent)
            assert written.exists()
            return not quiet.exists()

        running.wait_until(is_put_away_while_the_other_is_written, f"{quiet.name} is put away", limit_s=30)
    for path in (old, written):
        running.wait_until(lambda path=path: not path.exists(), f"{path.name} is put away", limit_s=30)
    tail.stop(sent)
    assert tail.file.exists()
    lines = tail.sample.lines
    assert _done(shipper) == {
        "app.ndjson.1": b"".join(lines[:20]),
        "app.ndjson.2": b"".join(lines[20:30] + lines[50:sent]),
        "app.ndjson.3": b"".join(lines[30:40]),
    }


def test_run_leaves_a_rotated_file_with_anything_pending_and_puts_it_away_when_that_is_settled(
    tail: Tail, shipper: Shipper, fake: FakeService
):
    shipper.target = fake.target
    fake.default = HANG
    tail.append(0, 10)
    with tail.file.open("ab") as out:
        out.write(b'{"bad": 1}\n')
    running = tail.start(input__on_complete="delete", input__rotate_wait_seconds=0)
    running.wait_until(lambda: fake.requests, "a first request")
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    for number in (10, 11, 12):  # each of them found by a look of its own
        tail.append(number, number + 1, f"app.ndjson.other-{number}")
        running.wait_until(
            lambda number=number: told(running, "source_opened", tail.folder / f"app.ndjson.other-{number}"), "a look"
        )
    assert old.exists()
    fake.release()
    running.wait_until(lambda: not old.exists(), "the rotated file is put away")
    state = shipper.read_state()
    assert state.accepted >= 10
    assert state.rules == ["event_id"]
    result = running.stop()
    assert result.returncode in {0, 3}
    assert sorted(fake.event_ids()) == sorted(tail.ids(13))


def test_a_file_in_the_state_directory_is_refused_with_the_reason(shipper: Shipper, sample: Sample):
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "a.ndjson").write_bytes(sample.lines[0])
    for name, words in (("a.ndjson", "lies in the state directory"), ("b.ndjson", "no file matches")):
        result = shipper.backfill(shipper.state / name)
        assert result.returncode != 0
        assert words in result.stderr
        assert str(shipper.state / name) in result.stderr
