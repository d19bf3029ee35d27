"""Which files are read, from where on and in which order, how many at once, and what becomes of them afterwards."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.files import Tail, compress, open_files, told

HASTY = {
    "delivery.give_up_after_seconds": 0.3,
    "delivery.retry_initial_seconds": 0.05,
    "delivery.retry_max_seconds": 0.1,
}
NOT_NOW = Reply(status=503)


@pytest.fixture
def tail(shipper: Shipper, service: Service, sample: Sample) -> Tail:
    return Tail(shipper, service, sample)


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


def test_an_excluded_file_that_was_read_before_keeps_its_position(tail: Tail):
    tail.append(0, 10)
    tail.pass_by("*", 10)
    tail.append(10, 20)
    tail.append(20, 30, "other.ndjson")
    tail.pass_by("*", [*range(10), *range(20, 30)], input__exclude=json.dumps([str(tail.file)]))
    tail.pass_by("*", 30)


def test_changed_globs_keep_the_positions_of_the_files_they_leave_out(tail: Tail):
    for number, name in enumerate(("a.log", "b.log", "c.log")):
        tail.append(number * 10, number * 10 + 10, name)
    tail.pass_by("a.*", 10)
    tail.pass_by(["b.*", "c.*"], 30)
    for number, name in enumerate(("a.log", "b.log", "c.log")):
        tail.append(30 + number * 10, 40 + number * 10, name)
    tail.pass_by("c.log", [*range(30), *range(50, 60)])
    tail.pass_by("[ab].*", 60)
    tail.append(60, 70, "d.log")
    tail.pass_by("*", 70)


# From where on ----------------------------------------------------------------------------------------------------


def test_from_the_end_on_means_what_is_written_after_the_first_start(tail: Tail):
    """Lines of before are not counted as read. A line that is torn at the start is whole later, and it is read."""
    tail.append(0, 50)
    tail.append(50, 60, "app.ndjson.2")
    with tail.file.open("ab", buffering=0) as writer:
        writer.write(tail.sample.lines[60][:50])
        running = tail.start(input__start="end")
        running.wait_until(lambda: len(told(running, "source_opened")) == 2, "both are open")
        writer.write(tail.sample.lines[60][50:])
    tail.append(61, 70)
    tail.append(70, 80, "app.ndjson.2")
    tail.append(80, 90, "app.ndjson.late")
    tail.wait(range(60, 90))
    tail.stop(range(60, 90))
    tail.append(90, 100)
    tail.append(100, 110, "app.ndjson.late-while-stopped")
    tail.start(input__start="end")
    tail.wait(range(60, 110))
    tail.stop(range(60, 110))


@pytest.mark.parametrize("rotation", ["", "renamed", "compressed", "copied"])
def test_from_the_end_on_is_saved_at_once_so_that_nothing_written_while_it_is_down_is_missed(
    tail: Tail, shipper: Shipper, service: Service, rotation: str
):
    """It had nothing to send before it was killed."""
    tail.append(0, 50)
    size = tail.file.stat().st_size
    running = tail.start("app.ndjson", input__start="end")
    running.wait_until(lambda: [row[3] for row in shipper.read_state().checkpoints] == [size], "the end is saved")
    running.kill()
    assert service.received == 0
    tail.append(50, 60)
    if rotation == "copied":
        shutil.copy(tail.file, tail.folder / "copy")
        os.truncate(tail.file, 0)
    elif rotation:
        old = tail.file.rename(tail.folder / "old")
        if rotation == "compressed":
            compress(old, "gz")
    tail.append(60, 70)
    tail.start("app.ndjson", input__start="end")
    tail.wait(range(50, 70))
    tail.stop(range(50, 70))


def test_from_the_end_on_holds_for_a_pattern_s_own_first_start(tail: Tail):
    """With nothing there at its first start, everything comes later; a pattern that is new has its own."""
    probe = tail.append(900, 901, "probe")
    running = tail.start(["a.*", "probe"], input__start="end")
    running.wait_until(lambda: told(running, "source_opened", probe), "a first look")
    tail.append(0, 10, "a.1")
    tail.wait(10)
    tail.stop(10)
    tail.append(10, 20, "a.2")
    tail.append(20, 30, "b.1")
    tail.start(["a.*", "b.*"], input__start="end")
    tail.wait(20)
    tail.append(30, 40, "b.1")
    tail.append(40, 50, "b.2")
    wanted = [*range(20), *range(30, 50)]
    tail.wait(wanted)
    tail.stop(wanted)
    tail.start("a.*", input__start="end")
    tail.append(50, 60, "b.1")
    tail.append(60, 70, "b.3")
    tail.append(70, 80, "a.3")
    wanted += range(70, 80)
    tail.wait(wanted)
    tail.stop(wanted)
    wanted += range(50, 70)  # a pattern that was left out for a while is not new
    tail.start(["b.*"], input__start="end")
    tail.wait(wanted)
    tail.stop(wanted)


def test_a_first_start_from_the_beginning_is_a_first_start_too(tail: Tail):
    tail.append(0, 10)
    tail.pass_by("*", 10)
    tail.append(10, 20)
    tail.append(20, 30, "late")
    tail.pass_by("*", 30, input__start="end")


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
    running.wait_until(lambda: len(fake.event_ids()) >= 49_802, "all events", limit_s=25)
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


@pytest.fixture(params=["delete", "move"])
def on_complete(request: pytest.FixtureRequest, shipper: Shipper) -> dict[str, str]:
    return completion(shipper, request.param)


def completion(shipper: Shipper, how: str, to: Path | None = None) -> dict[str, str]:
    """The settings; the folder is made for both, so that one can look into it."""
    done = to or shipper.folder / "done"
    done.mkdir(exist_ok=True)
    return {"input.on_complete": how} | ({"input.completed_directory": str(done)} if how == "move" else {})


def _done(shipper: Shipper) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (shipper.folder / "done").iterdir()}


def test_backfill_puts_away_what_is_settled_dead_letters_and_duplicates_included(
    shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path], on_complete: dict[str, str]
):
    paths = [write(f"logs/{number}.ndjson", number * 10, number * 10 + 10) for number in range(3)]
    with paths[1].open("ab") as out:
        out.write(b'{"bad": 1}\n' + sample.lines[0])
    paths.append(compress(write("logs/3.ndjson", 30, 40), "gz"))
    paths.append(write("logs/empty.ndjson", 0, 0))
    contents = {path.name: path.read_bytes() for path in paths}
    result = shipper.backfill("logs", settings=on_complete)
    assert (result.returncode, result.counts()) == (3, (42, 40, 1, 1, 0))
    service.assert_holds_exactly(sample.ids[:40])
    assert [path for path in paths if path.exists() and path.stat().st_size] == []
    is_move = on_complete["input.on_complete"] == "move"
    moved = {name: data for name, data in _done(shipper).items() if data}
    assert moved == ({name: data for name, data in contents.items() if data} if is_move else {})
    # The same names again are new files.
    write("logs/0.ndjson", 40, 50)
    again = shipper.backfill("logs", settings=on_complete)
    assert again.counts() == (10, 10, 0, 0, 0)
    assert not paths[0].exists()


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


def test_backfill_puts_away_nothing_that_it_could_not_read_to_its_end(
    shipper: Shipper, sample: Sample, write: Callable[..., Path]
):
    on_complete = completion(shipper, "delete")
    path = compress(write("a.ndjson", 0, 1000), "gz")
    with path.open("r+b") as out:
        out.truncate(path.stat().st_size - 10)
    for _ in range(2):
        result = shipper.backfill(path, settings=on_complete)
        assert result.returncode == 4
        assert path.exists()


def test_backfill_leaves_a_file_that_grew_while_it_was_sent(
    shipper: Shipper, fake: FakeService, sample: Sample, write: Callable[..., Path]
):
    on_complete = completion(shipper, "delete")
    shipper.target = fake.target
    fake.default = HANG
    path = write("a.ndjson", 0, 10)
    running = shipper.start("backfill", path, "--summary", "json", settings=on_complete)
    running.wait_until(lambda: fake.requests, "a first request")
    with path.open("ab") as out:
        out.writelines(sample.lines[10:20])
    fake.release()
    result = running.finish()
    assert result.counts() in {(10, 10, 0, 0, 0), (20, 20, 0, 0, 0)}
    if result.counts()[0] == 10:
        assert path.exists(), "what came later was not read"
    rest = 20 - result.counts()[0]
    if path.exists():
        assert shipper.backfill(path, settings=on_complete).counts() == (rest, rest, 0, 0, 0)
    assert sorted(fake.event_ids()) == sorted(sample.ids[:20])


def test_what_an_earlier_run_settled_is_put_away_by_the_next_one(
    shipper: Shipper, service: Service, write: Callable[..., Path]
):
    """It was shipped while on_complete was keep, or the run ended before it came to it."""
    on_complete = completion(shipper, "move")
    path = write("a.ndjson", 0, 10)
    assert shipper.backfill(path).counts() == (10, 10, 0, 0, 0)
    assert path.exists()
    assert shipper.backfill(path, settings=on_complete).counts() == (0, 0, 0, 0, 0)
    assert not path.exists()


def test_a_name_that_is_taken_at_the_target_is_never_overwritten(
    shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path]
):
    settings = completion(shipper, "move")
    taken = shipper.folder / "done" / "a.ndjson"
    taken.write_bytes(b"somebody else's")
    (shipper.folder / "done" / "b.ndjson").mkdir()
    for number in range(3):
        write("logs/a.ndjson", number * 10, number * 10 + 10)
        assert shipper.backfill("logs", settings=settings).counts() == (10, 10, 0, 0, 0)
        assert not (shipper.folder / "logs" / "a.ndjson").exists()
    path = write("logs/b.ndjson", 30, 40)
    write("more/b.ndjson", 40, 50)
    assert shipper.backfill("logs", "more", settings=settings).counts() == (20, 20, 0, 0, 0)
    assert not path.exists()
    (shipper.folder / "done" / "b.ndjson").rmdir()
    done = _done(shipper)
    assert done.pop("a.ndjson") == b"somebody else's"
    wanted = [b"".join(sample.lines[start : start + 10]) for start in range(0, 50, 10)]
    assert sorted(done.values()) == sorted(wanted)
    service.assert_holds_exactly(sample.ids[:50])


def test_what_was_moved_into_a_folder_that_is_read_is_not_read_again(
    shipper: Shipper, service: Service, write: Callable[..., Path]
):
    write("logs/a.ndjson", 0, 10)
    settings = completion(shipper, "move", shipper.folder / "logs" / "done")
    for count in (10, 0, 0):
        assert shipper.backfill("logs", settings=settings).counts() == (count, count, 0, 0, 0)
    assert [path.name for path in (shipper.folder / "logs" / "done").iterdir()] == ["a.ndjson"]


def test_a_file_is_moved_to_another_disk_whole(
    shipper: Shipper, service: Service, sample: Sample, write: Callable[..., Path], other_disk: Path
):
    path = write("a.ndjson", 0, 5000)
    (other_disk / "a.ndjson").write_bytes(b"somebody else's")
    result = shipper.backfill(path, settings=completion(shipper, "move", other_disk))
    assert (result.returncode, result.counts()) == (0, (5000, 5000, 0, 0, 0))
    contents = sorted((each.read_bytes() for each in other_disk.iterdir()), key=len)
    assert contents == [b"somebody else's", b"".join(sample.lines[:5000])]
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


def test_run_puts_away_rotated_files_and_never_the_one_that_is_written(
    tail: Tail, shipper: Shipper, on_complete: dict[str, str]
):
    settings = {key.replace(".", "__"): value for key, value in on_complete.items()}
    tail.append(0, 10)
    tail.append(10, 20, "app.ndjson.other")
    running = tail.start(**settings, input__rotate_wait_seconds=0.2)
    tail.wait(20)
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    tail.append(20, 30)
    running.wait_until(lambda: not old.exists(), "the rotated file is put away")
    tail.wait(30)
    tail.stop(30)
    assert tail.file.exists()
    assert (tail.folder / "app.ndjson.other").exists(), "it was not rotated"
    if on_complete["input.on_complete"] == "move":
        assert _done(shipper) == {"app.ndjson.1": b"".join(tail.sample.lines[:10])}


def test_run_puts_away_what_was_rotated_out_of_the_glob(tail: Tail):
    """As logrotate does it where input.include names one file."""
    tail.append(0, 10)
    running = tail.start("app.ndjson", input__on_complete="delete", input__rotate_wait_seconds=0.2)
    tail.wait(10)
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    tail.append(10, 20)
    tail.wait(20)
    running.wait_until(lambda: not old.exists(), "the rotated file is put away")
    tail.stop(20)
    assert tail.file.exists()


def test_run_puts_away_what_was_rotated_while_it_was_stopped(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    tail.pass_by("app.ndjson", 10)
    tail.append(10, 20)
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    tail.append(20, 30)
    running = tail.start("app.ndjson", input__on_complete="delete", input__rotate_wait_seconds=0.2)
    tail.wait(30)
    running.wait_until(lambda: not old.exists(), "the rotated file is put away")
    tail.stop(30)
    assert tail.file.exists()


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


def test_run_leaves_a_rotated_file_that_is_still_written(tail: Tail):
    tail.append(0, 10)
    with tail.file.open("ab", buffering=0) as writer:
        running = tail.start(input__on_complete="delete", input__rotate_wait_seconds=1)
        tail.wait(10)
        old = tail.file.rename(tail.folder / "app.ndjson.1")
        tail.append(10, 20)
        for number in range(20, 30):
            writer.write(tail.sample.lines[number])
            tail.wait(number + 1)
            assert old.exists()
    running.wait_until(lambda: not old.exists(), "the rotated file is put away")
    tail.stop(30)


def test_run_leaves_a_rotated_file_that_ends_in_half_a_line(tail: Tail):
    """That is no record; and it would be gone with the file."""
    tail.append(0, 10)
    with tail.file.open("ab") as out:
        out.write(tail.sample.lines[10][:100])
    tail.start(input__on_complete="delete", input__rotate_wait_seconds=0)
    tail.wait(10)
    old = tail.file.rename(tail.folder / "app.ndjson.1")
    for number in (11, 12, 13):  # each of them found by a look of its own
        tail.append(number, number + 1, f"app.ndjson.other-{number}")
        tail.wait([*range(10), *range(11, number + 1)])
    assert old.exists()
    with old.open("ab") as out:
        out.write(tail.sample.lines[10][100:])
    tail.wait(14)
    tail.running.wait_until(lambda: not old.exists(), "the rotated file is put away")
    tail.stop(14)


def test_run_puts_away_neither_a_hard_link_nor_a_file_of_the_same_name_in_another_folder(tail: Tail, shipper: Shipper):
    """Only a file whose own name belongs to another one by now, or that was renamed, is rotated."""
    (tail.folder / "deep").mkdir()
    tail.append(0, 10)
    tail.append(10, 20, "deep/app.ndjson")
    os.link(tail.file, tail.folder / "linked.ndjson")
    running = tail.start("**/*.ndjson", input__on_complete="delete", input__rotate_wait_seconds=0.1)
    tail.wait(20)
    gone = tail.append(20, 30, "gone.ndjson")
    tail.wait(30)
    moved = gone.rename(tail.folder / "gone-away.ndjson")
    running.wait_until(lambda: not moved.exists(), "the rotated file is put away")
    tail.stop(30)
    for kept in ("app.ndjson", "linked.ndjson", "deep/app.ndjson"):
        assert (tail.folder / kept).exists(), kept


def test_a_file_in_the_state_directory_is_refused_with_the_reason(shipper: Shipper, sample: Sample):
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "a.ndjson").write_bytes(sample.lines[0])
    for name, words in (("a.ndjson", "lies in the state directory"), ("b.ndjson", "no file is there to be read")):
        result = shipper.backfill(shipper.state / name)
        assert result.returncode != 0
        assert words in result.stderr
        assert str(shipper.state / name) in result.stderr
