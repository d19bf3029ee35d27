"""SIGKILL at any moment loses nothing, and only records not settled on disk are sent again."""

from __future__ import annotations

import itertools
import json
import sqlite3
import subprocess
from collections import Counter
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from shipper.sandbox.samples import sample_lines
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, event_ids, wait_until
from tests.e2e.surroundings import feeding, spooled

KILLS = 6
EVENTS = 8000
# Slow enough to be killed in mid-work, with many commits, segments and batches.
SLOW = {
    "batch.max_events": 20,
    "delivery.concurrency": 2,
    "state.commit_interval_seconds": 0.02,
    "spool.segment_bytes": 300_000,
    "batch.linger_seconds": 0.1,
}
# Events that a kill in mid-work may repeat: those in flight (2 x 20), and those settled since the last commit.
UNSAVED = 500


def is_at_start(kill: int) -> bool:
    """Return whether this kill is to hit the startup, as every third does."""
    return kill % 3 == 2


class Ledger:
    """Compares the events received by the service with the state store, while a shipper works and after each kill."""

    def __init__(self, shipper: Shipper, service: Service) -> None:
        self._shipper = shipper
        self._service = service
        self._received = self._accepted = self._seen = 0
        self.cuts = 0

    def unsaved(self) -> int:
        """Return how many events the service has received that the state of the running shipper does not count yet."""
        database = self._shipper.state / "state.db"
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as db,
        ):
            (self._seen,) = db.execute("SELECT accepted FROM totals").fetchone()
        return (self._service.received - self._received) - (self._seen - self._accepted)

    def note(self, *, is_kill: bool = True) -> None:
        """Compare both after a run has ended."""
        received, accepted = self._service.received, self._shipper.read_state().accepted
        assert accepted <= received, "a checkpoint passed an event that the service does not have"
        assert self._seen <= accepted, "what was saved is to be sent again"
        self.cuts += is_kill and received > self._received  # killed in mid-work, not during startup
        self._received, self._accepted = received, accepted


def kill_at_random(
    running: Running, ledger: Ledger, service: Service, rng: Random, kill: int, *, events: int = 1000
) -> bool:
    """
    Kill a shipper at a random moment of its startup, or of its work once few events are unsaved.

    Args:
        kill: The number of the kill.
        events: Minimum number of events to send, unless it ends.
    Returns:
        False if the process ended before.
    """
    if is_at_start(kill):
        moment = rng.uniform(0, 0.35)
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(moment)
    else:
        goal = service.received + rng.randint(1, min(1000, max(1, events)))
        wait_until(
            lambda: running.has_ended or (service.received >= goal and ledger.unsaved() <= UNSAVED),
            f"{goal} events, all but {UNSAVED} saved",
        )
    if running.has_ended:
        return False
    running.kill()
    return True


def test_backfill_killed_at_random_moments_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    lines = sample.lines[:EVENTS]
    bad = {index: b'{"bad": %d}\n' % index for index in rng.sample(range(EVENTS), 200)}
    file = shipper.write("events.ndjson", *(bad.get(index, b"") + line for index, line in enumerate(lines)))
    kills = cuts = 0
    while kills < KILLS:
        # Ship new files until one is finished after enough kills.
        service.reset()
        subprocess.run(["rm", "-rf", shipper.state], check=True, timeout=10)
        ledger = Ledger(shipper, service)
        while kills < KILLS:
            running = shipper.start("backfill", file, "--summary", "json", settings=SLOW)
            if not kill_at_random(running, ledger, service, rng, kills):
                assert running.finish().returncode in {0, 3}
                break
            kills += 1
            ledger.note()
        last = shipper.backfill(file)
        assert last.returncode in {0, 3}
        assert last.counts()[4] == 0
        cuts += ledger.cuts

        service.assert_holds_exactly(sample.ids[:EVENTS])
        state = shipper.read_state()
        assert (state.read, state.accepted, state.duplicates) == (EVENTS + len(bad), EVENTS, 0)
        assert sorted(letter.raw + b"\n" for letter in state.dead_letters) == sorted(bad.values())
    assert cuts >= KILLS / 2, "too few were killed in mid-work"
    file.with_suffix(".again").write_bytes(b"".join(lines))
    assert shipper.backfill(file.with_suffix(".again")).counts() == (EVENTS, 0, 0, EVENTS, 0)
    print(f"{kills} kills, {cuts} while events were sent, {service.received - EVENTS} events sent again")


def test_a_kill_long_before_the_commit_interval_repeats_few_records_though_each_has_its_own_ledger_key(
    shipper: Shipper, service: Service
):
    """Many settled records trigger a save; with the interval alone, all events received would be sent again."""
    count = 40_000
    file = shipper.write("sparse.ndjson", *sample_lines(count, end=datetime.now(UTC), profile="sparse"))
    service.set_faults({"effect": "hang", "requests": "17-"})  # of 1,000 records
    ledger = Ledger(shipper, service)
    rarely = {"state.commit_interval_seconds": 60, "batch.linger_seconds": 60, "delivery.concurrency": 2}
    running = shipper.start("backfill", file, "--summary", "json", settings=rarely)
    running.wait_until(lambda: service.faults_applied() != [0], "the last batch is held")
    running.wait_until(lambda: service.received >= 16_000, "the others are received")
    running.wait_until(lambda: ledger.unsaved() <= 9_000, "the others are saved", limit_s=45)
    running.kill()
    ledger.note()
    service.set_faults()
    unsaved = service.received - shipper.read_state().accepted
    assert shipper.backfill(file).returncode == 0
    assert service.received - count == unsaved <= 10_000
    rows = json.loads(shipper.run("ledger", "--format", "json").stdout)["rows"]
    assert sum(row["accepted"] for row in rows) == shipper.read_state().accepted == count
    assert len(rows) > 0.99 * count, "the records share keys"


def test_pipe_killed_at_random_moments_loses_no_spooled_record(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    lines = sample.lines[: KILLS * EVENTS]
    everything = set(lines)
    ledger = Ledger(shipper, service)
    kills = filled = 0
    torn: list[bytes] = []
    kept: set[bytes] = set()
    nexts = itertools.cycle(rng.sample(["killed recovery", "recovery", "more input"], 3))

    def recover() -> None:
        """Run it to its end without input: earlier spooled records must arrive."""
        result = shipper.pipe()
        assert result.returncode in {0, 3}
        assert service.holds(event_ids(kept)), "spooled records were lost"
        assert not list(Path(shipper.state, "spool").iterdir()), "the spool is not empty"
        kept.clear()
        ledger.note(is_kill=False)

    while kills < KILLS:
        running = shipper.open_pipe(settings=SLOW)
        # The producer stops within a line and keeps its end of the pipe open, so the input has not ended.
        # A process killed in mid-work has more input than it sends before the kill, and none was sent before.
        data = b"".join(lines[kills * EVENTS : (kills + 1) * EVENTS])
        least = len(lines[0]) if is_at_start(kills) else len(data) // 5
        fed = data[: rng.randrange(least, len(data))]
        producer = feeding(running, fed)
        was_killed = kill_at_random(running, ledger, service, rng, kills, events=fed.count(b"\n"))
        producer.join(10)
        assert was_killed, "its input had not ended"
        kills += 1
        ledger.note()

        found = [line for _, content in spooled(shipper) for line in content.splitlines(keepends=True)]
        torn += [line for line in found if not line.endswith(b"\n")]
        filled += bool(everything.intersection(found))
        kept |= everything.intersection(found)
        what_next = next(nexts)
        if what_next == "killed recovery" and kills < KILLS:
            running = shipper.start("pipe", "--summary", "json", settings=SLOW)
            if kill_at_random(running, ledger, service, rng, kills):
                kills += 1
                ledger.note()
        elif what_next == "recovery":
            recover()  # otherwise the next process has the leftovers and new input
    recover()
    assert filled >= 3, "too few kills hit a non-empty spool"
    assert ledger.cuts >= 3, "too few were killed in mid-work"

    last = shipper.pipe(*lines)
    read, accepted, dead_lettered, duplicates, pending = last.counts()
    assert (last.returncode, read, dead_lettered, pending) == (0, len(lines), 0, 0)
    assert accepted + duplicates == len(lines), "events accepted from an earlier process count as duplicates"
    assert accepted, "nothing was left to accept"
    assert duplicates, "nothing had been accepted"
    service.assert_holds_exactly(sample.ids[: len(lines)])
    letters = Counter(letter.raw for letter in shipper.read_state().dead_letters)
    assert letters <= Counter(torn), "a dead letter that is not the torn end of a spool"
