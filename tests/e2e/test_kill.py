"""SIGKILL at any moment: nothing is lost, and what is sent again is what was not settled on disk."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median

import pytest

from shipper.sandbox.samples import SampleProfile, sample_lines
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, event_ids, wait_until
from tests.e2e.fake_service import HANG, OK, FakeService

KILLS = 6
EVENTS = 8000
# Slow enough to be hit in the middle, and with many commits, segments and batches to be hit in.
SLOW = {
    "batch.max_events": 20,
    "delivery.concurrency": 2,
    "state.commit_interval_seconds": 0.02,
    "spool.segment_bytes": 300_000,
    "batch.linger_seconds": 0.1,
}
# Events that are sent again after one kill: those in flight (2 x 20) and those settled since the last commit, which are
# 0.02 s and the time of one commit. That may take long once, on a disk that is busy, but not most of the time.
USUAL_REPEATS = 4000


def is_at_start(kill: int) -> bool:
    """Return whether the kill of this number falls into the start of a process, as every third does."""
    return kill % 3 == 2


def kill_at_random(running: Running, service: Service, rng: Random, kill: int, *, events: int = 1000) -> bool:
    """
    Kill a shipper at a random moment of its start or of its work.

    Args:
        kill: The number of the kill.
        events: What it has to send at least, or end.
    Returns:
        False if it had ended before.
    """
    if is_at_start(kill):
        moment = rng.uniform(0, 0.35)
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(moment)
    else:
        goal = service.received + rng.randint(1, min(1000, max(1, events)))
        wait_until(lambda: running.has_ended or service.received >= goal, f"{goal} events")
    if running.has_ended:
        return False
    running.kill()
    return True


class Ledger:
    """Compares what the service received with what the state store knows, kill by kill."""

    def __init__(self, shipper: Shipper, service: Service) -> None:
        self._shipper = shipper
        self._service = service
        self._received = self._accepted = 0
        self.repeats: list[int] = []
        self.cuts = 0

    def note(self, *, is_kill: bool = True) -> None:
        """Look at both sides after the end of a run."""
        received, accepted = self._service.received, self._shipper.read_state().accepted
        assert accepted <= received, "a checkpoint passed an event that the service does not have"
        repeats = (received - self._received) - (accepted - self._accepted)
        self.repeats.append(repeats)
        self.cuts += is_kill and received > self._received  # it was cut in the middle of its work, not in its start
        self._received, self._accepted = received, accepted

    def assert_few_repeats(self) -> None:
        assert not self.repeats or median(self.repeats) <= USUAL_REPEATS, self.repeats


def test_backfill_killed_at_random_moments_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    lines = sample.lines[:EVENTS]
    bad = {index: b'{"bad": %d}\n' % index for index in rng.sample(range(EVENTS), 200)}
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(bad.get(index, b"") + line for index, line in enumerate(lines)))
    kills = cuts = 0
    while kills < KILLS:
        # A new file to ship, until one that was killed often enough is through.
        service.reset()
        subprocess.run(["rm", "-rf", shipper.state], check=True, timeout=10)
        ledger = Ledger(shipper, service)
        while kills < KILLS:
            running = shipper.start("backfill", file, "--summary", "json", settings=SLOW)
            if not kill_at_random(running, service, rng, kills):
                assert running.finish().returncode in {0, 3}
                break
            kills += 1
            ledger.note()
        last = shipper.backfill(file)
        assert last.returncode in {0, 3}
        assert last.counts()[4] == 0
        cuts += ledger.cuts
        ledger.assert_few_repeats()

        service.assert_holds_exactly(sample.ids[:EVENTS])
        state = shipper.read_state()
        assert (state.read, state.accepted, state.duplicates) == (EVENTS + len(bad), EVENTS, 0)
        assert sorted(letter.raw + b"\n" for letter in state.dead_letters) == sorted(bad.values())
    assert cuts >= KILLS / 2, "too few were cut in the middle of their work"
    print(f"{kills} kills, {cuts} while events were sent, {service.received - EVENTS} events sent again")


def test_a_kill_long_before_the_commit_interval_repeats_few_records_though_each_has_a_ledger_key_of_its_own(
    shipper: Shipper, service: Service
):
    """Much that is settled is saved at once; by the interval alone, all that had arrived would come again."""
    count = 40_000
    file = shipper.folder / "sparse.ndjson"
    file.write_bytes(b"".join(sample_lines(count, end=datetime.now(UTC), profile=SampleProfile.SPARSE)))
    slowly = {"state.commit_interval_seconds": 60, "delivery.rate_limit_events_per_second": 20_000}
    running = shipper.start("backfill", file, "--summary", "json", settings=slowly)
    wait_until(lambda: running.has_ended or service.received >= 26_000, "26,000 records")
    assert not running.has_ended
    running.kill()
    assert shipper.read_state().accepted, "nothing was saved"
    assert shipper.backfill(file).returncode == 0
    assert 0 <= service.received - count <= 18_000
    rows = json.loads(shipper.run("ledger", "--format", "json").stdout)["rows"]
    assert sum(row["accepted"] for row in rows) == shipper.read_state().accepted == count
    assert len(rows) > 0.99 * count, "the records share keys"


def test_pipe_killed_at_random_moments_loses_nothing_of_what_was_spooled(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    lines = sample.lines[: KILLS * EVENTS]
    everything = set(lines)
    ledger = Ledger(shipper, service)
    kills = filled = 0
    torn: list[bytes] = []
    spooled: set[bytes] = set()
    nexts = itertools.cycle(rng.sample(["killed recovery", "recovery", "more input"], 3))

    def recover() -> None:
        """Run it to its end with nothing to read: what earlier ones spooled must arrive without being fed again."""
        result = shipper.pipe()
        assert result.returncode in {0, 3}
        assert service.holds(event_ids(spooled)), "what had been spooled was lost"
        assert not list(Path(shipper.state, "spool").iterdir()), "the spool is not empty"
        spooled.clear()
        ledger.note(is_kill=False)

    while kills < KILLS:
        running = shipper.start("pipe", "--summary", "json", settings=SLOW, stdin=subprocess.PIPE)
        # The producer stops anywhere in a line, and its end of the pipe stays open: the input has not ended.
        # One that is killed at its work has more to read than it sends until then, and none of it was sent before.
        data = b"".join(lines[kills * EVENTS : (kills + 1) * EVENTS])
        least = len(lines[0]) if is_at_start(kills) else len(data) // 5
        fed = data[: rng.randrange(least, len(data))]
        producer = threading.Thread(target=_write, args=(running, fed))
        producer.start()
        was_killed = kill_at_random(running, service, rng, kills, events=fed.count(b"\n"))
        producer.join(10)
        assert was_killed, "its input had not ended"
        kills += 1
        ledger.note()

        found = _spooled_lines(shipper)
        torn += [line for line in found if not line.endswith(b"\n")]
        filled += bool(everything.intersection(found))
        spooled |= everything.intersection(found)
        what_next = next(nexts)
        if what_next == "killed recovery" and kills < KILLS:
            if kill_at_random(shipper.start("pipe", "--summary", "json", settings=SLOW), service, rng, kills):
                kills += 1
                ledger.note()
        elif what_next == "recovery":
            recover()  # otherwise the next one has to do with the rest and with new input
    recover()
    assert filled >= 3, "too few kills hit a filled spool"
    ledger.assert_few_repeats()
    assert ledger.cuts >= 3, "too few were cut in the middle of their work"

    last = shipper.pipe(b"".join(lines))
    read, accepted, dead_lettered, duplicates, pending = last.counts()
    assert (last.returncode, read, dead_lettered, pending) == (0, len(lines), 0, 0)
    assert accepted + duplicates == len(lines), "what an earlier one got accepted is a duplicate"
    assert accepted, "nothing was left to be accepted"
    assert duplicates, "nothing had been accepted"
    service.assert_holds_exactly(sample.ids[: len(lines)])
    letters = Counter(letter.raw for letter in shipper.read_state().dead_letters)
    assert letters <= Counter(torn), "a dead letter that is not the torn end of what was spooled"


def _write(running: Running, data: bytes) -> None:
    with suppress(BrokenPipeError, ValueError):  # the reader was killed
        running.stdin.write(data)
        running.stdin.flush()


def _spooled_lines(shipper: Shipper) -> list[bytes]:
    """The lines in the segments; the checkpoint may have passed some of them."""
    return [
        line
        for path in sorted(Path(shipper.state, "spool").glob("*"))
        for line in path.read_bytes().splitlines(keepends=True)
    ]


def test_an_answer_that_is_outstanding_holds_the_checkpoint_back(shipper: Shipper, fake: FakeService, sample: Sample):
    """Later batches are accepted, the first is not: everything from the first on is sent again."""
    shipper.target = fake.target
    fake.plan(HANG)
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:600]))
    settings = {"batch.max_events": 100, "delivery.concurrency": 4, "delivery.drain_timeout_seconds": 0.1}
    running = shipper.start("backfill", file, "--summary", "json", settings=settings)
    running.wait_until(lambda: fake.answered == 5, "five batches of six are accepted")
    stopped = running.stop()  # its end saves all that may be saved
    assert (stopped.returncode, stopped.summary["outcome"]) == (4, "aborted")
    assert stopped.counts() == (600, 500, 0, 0, 100)
    fake.release()
    first = fake.event_ids(fake.bodies[:1])

    again = shipper.backfill(file, settings=settings)
    assert again.returncode == 0
    position = sample.ids.index(first[0])
    assert again.counts() == (600 - position, 600 - position, 0, 0, 0)
    assert set(fake.event_ids(fake.bodies[6:])) == set(sample.ids[position:600])


@pytest.mark.parametrize("command", ["backfill", "pipe"])
def test_an_event_whose_answer_never_came_is_sent_again_after_a_kill(
    shipper: Shipper, fake: FakeService, sample: Sample, command: str
):
    shipper.target = fake.target
    fake.default = HANG
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:50]))
    arguments = [command, *([file] if command == "backfill" else [])]
    with file.open("rb") as stdin:
        running = shipper.start(*arguments, settings={"batch.linger_seconds": 0}, stdin=stdin)
        running.wait_until(lambda: fake.requests, "a first request")
        running.kill()
    assert shipper.read_state().accepted == 0
    fake.default = OK
    again = shipper.run(*arguments, "--summary", "json")
    assert (again.returncode, again.counts()) == (0, (50, 50, 0, 0, 0))
    assert fake.event_ids(fake.bodies[1:]) == sample.ids[:50]
