"""
A crash at each place where the order of two writes matters, at its first and at later passings: nothing is lost, and
nothing that was saved is sent again.

`SHIPPER_CRASH_AT=name:n` ends the process by SIGKILL to itself when it comes to a place for the n-th time.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
# One batch after the other, and a commit as soon as there is something to save.
SETTINGS = {
    "batch.max_events": BATCH,
    "batch.linger_seconds": 0.02,
    "batch.unique_consumers": "false",
    "delivery.concurrency": 1,
    "state.commit_interval_seconds": 0.001,
    "spool.segment_bytes": SEGMENT_BYTES,
    "spool.fsync": "never",  # the kernel has what a killed process wrote, and all is spooled before much is settled
    "input.poll_interval_seconds": 0.05,
    "input.rotate_wait_seconds": 0.1,
}
BAD = b'{"bad": true}\n'
SAVES = ("save.begin", "save.commit", "save.done")
SPOOL = ("spool.append", "spool.appended", "spool.delete", "spool.deleted")
BROKERS = ("save.written",)  # with a broker, see kafka/test_kills.py
COMPLETION = ("complete.delete", "complete.taken", "complete.done")


def test_every_crash_point_is_tried():
    assert {*SAVES, *SPOOL, *BROKERS, *COMPLETION} == set(get_args(CrashPoint))


def crash(shipper: Shipper, point: str, passing: int, *arguments: str | Path, **options: object) -> State:
    """Run into a crash, and give what is saved; fails if it ended in another way or did not come there."""
    at = f"{point}:{passing}" if passing > 1 else point
    settings = {**SETTINGS, **options.pop("settings", {})}  # type: ignore[dict-item]
    running = shipper.start(*arguments, settings=settings, env={"SHIPPER_CRASH_AT": at}, **options)
    result = running.finish()
    assert result.returncode == -signal.SIGKILL, f"it did not come to {at}: {result}"
    return shipper.read_state()


def known_streams(shipper: Shipper, kind: str) -> dict[int, tuple[Path, int]]:
    """By id: path and checkpoint."""
    return {
        stream_id: (Path(path), checkpoint)
        for stream_id, found, path, checkpoint in shipper.read_state().checkpoints
        if found == kind
    }


@pytest.fixture
def lockstep(shipper: Shipper) -> Iterator[Lockstep]:
    """What the shipper ships to."""
    with Lockstep(shipper) as lockstep:
        shipper.target = lockstep.target
        yield lockstep


class Account:
    """What has to be there in the end, and how much may have been sent twice on the way."""

    def __init__(self, shipper: Shipper, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        lockstep.begin()
        self._received, self._accepted = len(lockstep.event_ids()), shipper.read_state().accepted
        self._unsaved = 0

    def note_crash(self, state: State) -> int:
        """
        Compare what arrived since the last look with what was saved.

        Returns:
            How many events the service has that the state store does not know of; they will come again.
        """
        self._lockstep.begin()  # from here on, nothing of the one that was killed is taken any more
        received = len(self._lockstep.event_ids())
        unsaved = (received - self._received) - (state.accepted - self._accepted)
        assert unsaved >= 0, "a checkpoint has passed an event that the service does not have"
        assert unsaved <= BATCH, "more than one batch was not saved"
        self._unsaved += unsaved
        self._received, self._accepted = received, state.accepted
        return unsaved

    def assert_holds_exactly(self, ids: Iterable[str]) -> None:
        """None lost, none invented, and none sent again but what had not been saved."""
        ids, times = set(ids), Counter(self._lockstep.event_ids())
        assert times.keys() == ids, f"{len(ids - times.keys())} lost, {len(times.keys() - ids)} invented"
        assert times.total() - len(ids) == self._unsaved, "not what had not been saved was sent again"


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
def test_a_crash_about_a_save_loses_nothing_and_repeats_only_what_was_not_saved(
    shipper: Shipper, lockstep: Lockstep, sample: Sample, command: str, passings: tuple[int, ...]
):
    """Crashes one after the other, each of another process; with a dead letter in every batch."""
    lines = [line for number in range(120) for line in ([BAD] * (number % BATCH == 0) + [sample.lines[number]])]
    ids, letters = sample.ids[:120], 12
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(lines))
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
            assert state.read < len(lines), "all was done: the case was not exercised"
            before = state
        if command == "pipe":
            assert spooled(shipper)
            assert stdin.read() == b"", "all of it was in the spool at the first crash"
    if command == "run":
        result = stop_when_saved(shipper, shipper.start(*arguments, settings=SETTINGS), len(lines))
        assert result.returncode == 0
    else:
        result = shipper.run(*arguments, "--summary", "json", settings=SETTINGS)
        assert (result.returncode, result.counts()[4]) == (3 if before.dead_lettered < letters else 0, 0)
        assert result.counts()[0] == len(lines) - before.read, "it went on where it was saved"
    account.assert_holds_exactly(ids)
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered, state.duplicates) == (132, 120, 12, 0)
    assert [letter.raw + b"\n" for letter in state.dead_letters] == [BAD] * letters
    assert len({letter.start_offset for letter in state.dead_letters}) == letters or command == "pipe"
    assert spooled(shipper) == []


# The spool --------------------------------------------------------------------------------------------------------


def _nothing_appended(shipper: Shipper, passing: int) -> None:
    """The segment is there, and what was to be written into it is not."""
    assert spooled(shipper)[-1][1] == b""


def _appended(shipper: Shipper, passing: int) -> None:
    """All that was taken from the input is there."""
    assert len(spooled(shipper)) >= passing
    assert spooled(shipper)[-1][1].endswith(b"\n")


def _settled_and_there(shipper: Shipper, passing: int) -> None:
    """A segment is there of which everything is saved as settled."""
    sizes = {path: len(content) for path, content in spooled(shipper)}
    streams = known_streams(shipper, "spool").values()
    assert any(sizes.get(path) == checkpoint for path, checkpoint in streams)


def _deleted_and_known(shipper: Shipper, passing: int) -> None:
    """The segment is gone, and its stream is not forgotten."""
    assert any(not path.exists() for path, _ in known_streams(shipper, "spool").values())


EVIDENCE: dict[str, Callable[[Shipper, int], None]] = {
    "spool.append": _nothing_appended,
    "spool.appended": _appended,
    "spool.delete": _settled_and_there,
    "spool.deleted": _deleted_and_known,
}


@pytest.mark.parametrize("points", [SPOOL[:2], SPOOL[2:]], ids=["append", "delete"])
def test_a_crash_about_a_segment_loses_nothing_that_was_spooled(
    shipper: Shipper, lockstep: Lockstep, sample: Sample, points: tuple[str, ...]
):
    """Each process finds what those before it left, and has an input of its own."""
    account = Account(shipper, lockstep)
    held: set[str] = set()
    for number, (passing, point) in enumerate(product((1, 3), points), 1):
        own, before = sample.lines[number * 60 : number * 60 + 60], held.copy()
        file = shipper.folder / f"{number}.ndjson"
        file.write_bytes(b"".join(own))
        with file.open("rb") as stdin:
            state = crash(shipper, point, passing, "pipe", stdin=stdin)
        account.note_crash(state)
        EVIDENCE[point](shipper, passing)
        held |= {each for _, content in spooled(shipper) for each in event_ids(content.splitlines())}
        held |= set(lockstep.event_ids())
        if point in {"spool.append", "spool.appended"}:
            # What a process has read and not yet written is lost with it; of what it had written, nothing is.
            kept = own[: len(held - before)]
            assert held - before == set(event_ids(kept)), f"{point}:{passing}: not the first lines of its input"
            segments = passing - (point == "spool.append")
            assert SEGMENT_BYTES * (segments - 1) < sum(map(len, kept)) <= SEGMENT_BYTES * segments
    last = shipper.pipe(b"".join(sample.lines[:60]), settings=SETTINGS)
    assert (last.returncode, last.counts()[4]) == (0, 0)
    held |= set(sample.ids[:60])
    account.assert_holds_exactly(held)
    if "spool.delete" in points:
        assert held == set(sample.ids[:300]), "all inputs had been spooled before anything was settled"
    state = shipper.read_state()
    assert (state.read, state.accepted) == (len(held), len(held))
    assert state.dead_letters == (), "segments end with whole lines"
    assert spooled(shipper) == []
    assert known_streams(shipper, "spool") == {}, "what is deleted is forgotten"


def test_a_crash_of_another_command_about_a_segment_that_was_left_over_loses_nothing(
    shipper: Shipper, lockstep: Lockstep, sample: Sample
):
    """Of a run, and then of a backfill; each of them has a file of its own."""
    data = shipper.folder / "input.ndjson"
    data.write_bytes(b"".join(sample.lines[:60]))
    account = Account(shipper, lockstep)
    with data.open("rb") as stdin:
        account.note_crash(crash(shipper, "save.begin", 1, "pipe", stdin=stdin))
    assert len(spooled(shipper)) > 4
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[60:80]))
    other = shipper.folder / "events.ndjson.other"
    other.write_bytes(b"".join(sample.lines[80:100]))
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
    assert known_streams(shipper, "spool") == {}


# Files that are done with -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "action", "passings"),
    [("backfill", "delete", (3,)), ("backfill", "move", (2,)), ("run", "delete", (1,))],
    ids=["backfill-delete", "backfill-move", "run-delete"],
)
def test_a_crash_about_the_putting_away_of_a_file_loses_nothing(
    shipper: Shipper,
    lockstep: Lockstep,
    sample: Sample,
    command: str,
    action: str,
    passings: tuple[int, ...],
):
    """A file goes only when everything in it is saved, and one that was to go when it crashed goes later."""
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
        # They are rotated while it knows them under the name of a file that is written.
        _rotate_under(shipper, sample, current, files)
        wanted = [*wanted, sample.ids[500]]
        arguments = follow(shipper, current)
    account = Account(shipper, lockstep)
    gone = 0
    for passing, point in crashes:
        state = crash(shipper, point, passing, *arguments, settings=settings)
        account.note_crash(state)
        gone += passing - (point != "complete.done")
        taken = int(point == "complete.taken")  # its name is a private one, until the next start
        assert sum(file.exists() for file in files) == count - gone - taken, f"{point}:{passing}"
        assert len(list(folder.glob(".*"))) == taken
        assert state.accepted >= 10 * gone, "a file is gone that is not settled"
        if action == "move":
            assert len(list(done.glob("*"))) == gone
    if command == "run":
        running = shipper.start(*arguments, settings=settings)
        running.wait_until(lambda: not any(file.exists() for file in files), "all are put away")
        assert stop_when_saved(shipper, running, len(wanted)).returncode == 0
        assert current.exists(), "the one that is written stays"
    else:
        assert shipper.backfill(folder, settings=settings).returncode == 0
        assert list(folder.iterdir()) == []
    account.assert_holds_exactly(wanted)
    if action == "move":
        moved = sorted(path.read_bytes() for path in done.iterdir())
        assert moved == sorted(b"".join(sample.lines[at : at + 10]) for at in range(0, 10 * count, 10))


def _rotate_under(shipper: Shipper, sample: Sample, current: Path, files: list[Path]) -> None:
    """Let a run see each of these files as the one that is written first, and then under its own name."""
    aside = [file.rename(shipper.folder / f"aside.{number}") for number, file in enumerate(files)]
    running = shipper.start(*follow(shipper, current), settings=SETTINGS)
    for count, (source, file) in enumerate(zip(aside, files, strict=True), 1):
        source.rename(current)
        running.wait_until(lambda count=count: shipper.read_state().accepted == count * 10, "it is read and saved")
        current.rename(file)
    current.write_bytes(sample.lines[500])
    running.wait_until(lambda: shipper.read_state().accepted == 10 * len(files) + 1, "the new one is read")
    assert running.stop().returncode == 0
    assert len(known_streams(shipper, "file")) == len(files) + 1
