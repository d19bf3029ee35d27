"""
A crash at each point where the order of two writes matters, at the first and at later passes: nothing is lost, and
nothing saved is sent again.

With `SHIPPER_CRASH_AT=name:n` the process kills itself with SIGKILL when it reaches a point for the n-th time.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from shipper.system.crash_points import CrashPoint
from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Running, Shipper, State, event_ids
from tests.e2e.surroundings import Lockstep, spooled

BATCH = 10
SEGMENT_BYTES = 4000
# One batch at a time, and a commit as soon as there is something to save.
SETTINGS = {
    "batch.max_events": BATCH,
    "batch.linger_seconds": 0.02,
    "batch.unique_consumers": "false",
    "delivery.concurrency": 1,
    "state.commit_interval_seconds": 0.001,
    "spool.segment_bytes": SEGMENT_BYTES,
    "spool.fsync": "never",  # a kill loses no written data, and all is spooled before much is settled
    "input.poll_interval_seconds": 0.05,
    "input.rotate_wait_seconds": 0.1,
}
BAD = b'{"bad": true}\n'
SAVES = ("save.begin", "save.commit", "save.done")
SPOOL = ("spool.append", "spool.appended", "spool.delete", "spool.deleted")
BROKERS = ("save.written",)  # these need a broker, see kafka/test_kills.py
COMPLETION = ("complete.delete", "complete.taken", "complete.done")


def test_every_crash_point_is_tried():
    assert {*SAVES, *SPOOL, *BROKERS, *COMPLETION} == set(get_args(CrashPoint))


def crash(shipper: Shipper, point: str, passing: int, *arguments: str | Path, **options: object) -> State:
    """Run until the crash and return the saved state; fail if the process ends in another way."""
    at = f"{point}:{passing}" if passing > 1 else point
    settings = {**SETTINGS, **options.pop("settings", {})}  # type: ignore[dict-item]
    running = shipper.start(*arguments, settings=settings, env={"SHIPPER_CRASH_AT": at}, **options)
    result = running.finish()
    assert result.returncode == -signal.SIGKILL, f"{at} was not reached: {result}"
    return shipper.read_state()


def read_file_streams(shipper: Shipper, kind: str) -> dict[int, tuple[Path, int]]:
    """Return path and checkpoint of each stream by id."""
    return {
        stream_id: (Path(path), checkpoint)
        for stream_id, found, path, checkpoint in shipper.read_state().checkpoints
        if found == kind
    }


class Account:
    """Tracks which events must arrive, and how many may be sent twice."""

    def __init__(self, shipper: Shipper, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        lockstep.begin()
        self._received, self._accepted = len(lockstep.event_ids()), shipper.read_state().accepted
        self._unsaved = 0

    def note_crash(self, state: State) -> int:
        """
        Compare the events received since the last call with the saved ones.

        Returns:
            The number of received but unsaved events; they will be sent again.
        """
        self._lockstep.begin()  # ignore late requests of the killed process
        received = len(self._lockstep.event_ids())
        unsaved = (received - self._received) - (state.accepted - self._accepted)
        assert unsaved >= 0, "a checkpoint passed an event that the service does not have"
        assert unsaved <= BATCH, "more than one batch was not saved"
        self._unsaved += unsaved
        self._received, self._accepted = received, state.accepted
        return unsaved

    def assert_holds_exactly(self, ids: Iterable[str]) -> None:
        """Assert that exactly these events are stored, and that only unsaved ones were sent again."""
        ids, times = set(ids), Counter(self._lockstep.event_ids())
        assert times.keys() == ids, f"{len(ids - times.keys())} lost, {len(times.keys() - ids)} invented"
        assert times.total() - len(ids) == self._unsaved, "the events sent again are not the unsaved ones"


def follow(shipper: Shipper, file: Path) -> list[str]:
    return ["run", "--set", f'input.include=["{file}*"]']


def stop_when_saved(shipper: Shipper, running: Running, read: int) -> Result:
    running.wait_until(lambda: shipper.read_state().read == read, f"{read} records are saved")
    return running.stop()


# Saves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "passings"),
    [("backfill", (1,)), ("run", (3,)), ("pipe", (2,))],
    ids=["backfill", "run", "pipe"],
)
def test_a_crash_during_a_save_loses_nothing_and_repeats_only_unsaved_records(
    shipper: Shipper, lockstep: Lockstep, sample: Sample, command: str, passings: tuple[int, ...]
):
    """Several processes crash in turn; every batch has a dead letter."""
    lines = [line for number in range(120) for line in ([BAD] * (number % BATCH == 0) + [sample.lines[number]])]
    ids, letters = sample.ids[:120], 12
    file = shipper.write("events.ndjson", *lines)
    arguments = {"backfill": ["backfill", file], "run": follow(shipper, file), "pipe": ["pipe"]}[command]
    account = Account(shipper, lockstep)
    before = State()
    with file.open("rb") as stdin:
        for point, passing in product(SAVES, passings):
            state = crash(shipper, point, passing, *arguments, stdin=stdin)
            unsaved = account.note_crash(state)
            saves = passing if point == "save.done" else passing - 1
            if saves == 0:
                assert state.read == before.read, f"something was saved before the first {point}"
            else:
                assert state.read > before.read, f"nothing was saved before {point}:{passing}"
            if point != "save.done" and command != "run":
                assert unsaved or state.dead_lettered < letters, f"{point}:{passing}: there was nothing to save"
            assert state.read < len(lines), "everything was settled: the case did not occur"
            before = state
        if command == "pipe":
            assert spooled(shipper)
            assert stdin.read() == b"", "everything must be in the spool at the first crash"
    if command == "run":
        result = stop_when_saved(shipper, shipper.start(*arguments, settings=SETTINGS), len(lines))
        assert result.returncode == 0
    else:
        result = shipper.run(*arguments, "--summary", "json", settings=SETTINGS)
        assert (result.returncode, result.counts()[4]) == (3 if before.dead_lettered < letters else 0, 0)
        assert result.counts()[0] == len(lines) - before.read, "it did not resume at the saved position"
    account.assert_holds_exactly(ids)
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered, state.duplicates) == (132, 120, 12, 0)
    assert [letter.raw + b"\n" for letter in state.dead_letters] == [BAD] * letters
    assert len({letter.start_offset for letter in state.dead_letters}) == letters or command == "pipe"
    assert spooled(shipper) == []


# The spool --------------------------------------------------------------------------------------------------------


def _nothing_appended(shipper: Shipper, passing: int) -> None:
    """The segment exists, but the data is not written."""
    assert spooled(shipper)[-1][1] == b""


def _appended(shipper: Shipper, passing: int) -> None:
    """Everything read from the input is spooled."""
    assert len(spooled(shipper)) >= passing
    assert spooled(shipper)[-1][1].endswith(b"\n")


def _settled_and_there(shipper: Shipper, passing: int) -> None:
    """A completely settled segment still exists."""
    sizes = {path: len(content) for path, content in spooled(shipper)}
    streams = read_file_streams(shipper, "spool").values()
    assert any(sizes.get(path) == checkpoint for path, checkpoint in streams)


def _deleted_and_known(shipper: Shipper, passing: int) -> None:
    """The segment is deleted, but its stream is still known."""
    assert any(not path.exists() for path, _ in read_file_streams(shipper, "spool").values())


EVIDENCE: dict[str, Callable[[Shipper, int], None]] = {
    "spool.append": _nothing_appended,
    "spool.appended": _appended,
    "spool.delete": _settled_and_there,
    "spool.deleted": _deleted_and_known,
}


@pytest.mark.parametrize("points", [SPOOL[:2], SPOOL[2:]], ids=["append", "delete"])
def test_a_crash_during_a_segment_operation_loses_no_spooled_record(
    shipper: Shipper, lockstep: Lockstep, sample: Sample, points: tuple[str, ...]
):
    """Each process finds the leftovers of earlier ones and has its own input."""
    account = Account(shipper, lockstep)
    held: set[str] = set()
    for number, (passing, point) in enumerate(product((1, 3), points), 1):
        own, before = sample.lines[number * 60 : number * 60 + 60], held.copy()
        file = shipper.write(f"{number}.ndjson", *own)
        with file.open("rb") as stdin:
            state = crash(shipper, point, passing, "pipe", stdin=stdin)
        account.note_crash(state)
        EVIDENCE[point](shipper, passing)
        held |= {each for _, content in spooled(shipper) for each in event_ids(content.splitlines())}
        held |= set(lockstep.event_ids())
        if point in {"spool.append", "spool.appended"}:
            # A process loses only data that it has read but not yet written.
            kept = own[: len(held - before)]
            assert held - before == set(event_ids(kept)), f"{point}:{passing}: not the first lines of its input"
            segments = passing - (point == "spool.append")
            assert SEGMENT_BYTES * (segments - 1) < sum(map(len, kept)) <= SEGMENT_BYTES * segments
    last = shipper.pipe(*sample.lines[:60], settings=SETTINGS)
    assert (last.returncode, last.counts()[4]) == (0, 0)
    held |= set(sample.ids[:60])
    account.assert_holds_exactly(held)
    if "spool.delete" in points:
        assert held == set(sample.ids[:300]), "everything was spooled before anything was settled"
    state = shipper.read_state()
    assert (state.read, state.accepted) == (len(held), len(held))
    assert state.dead_letters == (), "a segment ends within a line"
    assert spooled(shipper) == []
    assert read_file_streams(shipper, "spool") == {}, "a deleted segment is still known"


def test_a_crash_of_another_command_on_a_leftover_segment_loses_nothing(
    shipper: Shipper, lockstep: Lockstep, sample: Sample
):
    """First a run, then a backfill; each has its own file."""
    data = shipper.write("input.ndjson", *sample.lines[:60])
    account = Account(shipper, lockstep)
    with data.open("rb") as stdin:
        account.note_crash(crash(shipper, "save.begin", 1, "pipe", stdin=stdin))
    assert len(spooled(shipper)) > 4
    file = shipper.write("events.ndjson", *sample.lines[60:80])
    other = shipper.write("events.ndjson.other", *sample.lines[80:100])
    run = follow(shipper, file)
    for point, arguments in (("spool.delete", run), ("spool.deleted", ["backfill", other])):
        account.note_crash(crash(shipper, point, 2, *arguments))
        EVIDENCE[point](shipper, 2)
    running = shipper.start(*run, settings=SETTINGS)
    running.wait_until(lambda: not spooled(shipper), "the spool is emptied")
    assert stop_when_saved(shipper, running, 100).returncode == 0
    account.assert_holds_exactly(sample.ids[:100])
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_letters) == (100, 100, ())
    assert spooled(shipper) == []
    assert read_file_streams(shipper, "spool") == {}


# Completed files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "action", "passings"),
    [("backfill", "delete", (3,)), ("backfill", "move", (2,)), ("run", "delete", (1,))],
    ids=["backfill-delete", "backfill-move", "run-delete"],
)
def test_a_crash_while_a_completed_file_is_moved_or_deleted_loses_nothing(
    shipper: Shipper,
    lockstep: Lockstep,
    sample: Sample,
    command: str,
    action: str,
    passings: tuple[int, ...],
):
    """A file is moved or deleted only when all of it is saved, and after a crash by the next process."""
    folder, done = shipper.folder / "logs", shipper.folder / "done"
    folder.mkdir()
    crashes = list(product(passings, COMPLETION))
    count = sum(passing for passing, _ in crashes) + 1
    files = [folder / f"app.ndjson.{number}" for number in range(count)]
    for number, file in enumerate(files):
        file.write_bytes(b"".join(sample.lines[number * 10 : number * 10 + 10]))
    wanted = sample.ids[: 10 * count]
    settings = {**SETTINGS, "input.on_complete": action}
    if action == "move":
        settings["input.completed_directory"] = done
    current = folder / "app.ndjson"
    arguments = ["backfill", folder]
    if command == "run":
        # The files are rotated while they are known under the name of the current file.
        _rotate_under(shipper, sample, current, files)
        wanted = [*wanted, sample.ids[500]]
        arguments = follow(shipper, current)
    account = Account(shipper, lockstep)
    gone = 0
    for passing, point in crashes:
        state = crash(shipper, point, passing, *arguments, settings=settings)
        account.note_crash(state)
        gone += passing - (point != "complete.done")
        taken = int(point == "complete.taken")  # it has a private name until the next start
        assert sum(file.exists() for file in files) == count - gone - taken, f"{point}:{passing}"
        assert len(list(folder.glob(".*"))) == taken
        assert state.accepted >= 10 * gone, "a file that is not settled is gone"
        if action == "move":
            assert len(list(done.glob("*"))) == gone
    if command == "run":
        running = shipper.start(*arguments, settings=settings)
        running.wait_until(lambda: not any(file.exists() for file in files), "all files are moved or deleted")
        assert stop_when_saved(shipper, running, len(wanted)).returncode == 0
        assert current.exists(), "the current file stays"
    else:
        assert shipper.backfill(folder, settings=settings).returncode == 0
        assert list(folder.iterdir()) == []
    account.assert_holds_exactly(wanted)
    if action == "move":
        moved = sorted(path.read_bytes() for path in done.iterdir())
        assert moved == sorted(b"".join(sample.lines[at : at + 10]) for at in range(0, 10 * count, 10))


def _rotate_under(shipper: Shipper, sample: Sample, current: Path, files: list[Path]) -> None:
    """Make a run see each of these files first as the current file and then under its rotated name."""
    aside = [file.rename(shipper.folder / f"aside.{number}") for number, file in enumerate(files)]
    running = shipper.start(*follow(shipper, current), settings=SETTINGS)
    for count, (source, file) in enumerate(zip(aside, files, strict=True), 1):
        source.rename(current)
        running.wait_until(
            lambda count=count: shipper.read_state().accepted == count * 10, "the file is read and saved"
        )
        current.rename(file)
    current.write_bytes(sample.lines[500])
    running.wait_until(lambda: shipper.read_state().accepted == 10 * len(files) + 1, "the new file is read")
    assert running.stop().returncode == 0
    assert len(read_file_streams(shipper, "file")) == len(files) + 1
