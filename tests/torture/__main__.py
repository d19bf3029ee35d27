"""`python -m tests.torture --seed N --duration S`: exits with 0 if all checks pass, 1 if not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from tests import campaign
from tests.torture import checking, faults
from tests.torture.application import RunLane
from tests.torture.exports import BackfillLane
from tests.torture.journal import Journal
from tests.torture.lanes import Lane
from tests.torture.live import LiveLane
from tests.torture.pipe import PipeLane
from tests.torture.records import Records
from tests.torture.schedule import Schedule
from tests.torture.service import Service

FRESH_S: Final = 30.0  # within which a new record must arrive after the faults
CALM_S: Final = 3.0
DRAIN_S: Final = 240.0
SEARCH_S: Final = 30.0  # for two scans of a busy machine, as what a truncated file contained may be in a copy
LIMIT_S: Final = 600.0  # for everything beyond the duration
SHARES: Final = {RunLane: 0.4, PipeLane: 0.3, BackfillLane: 0.2, LiveLane: 0.1}
_FULL_PAUSES_S: Final = 60.0  # duration of a run; in a shorter one the pauses between faults are shorter


def main() -> None:
    if os.geteuid() != 0 and not os.environ.get("TORTURE_IN_NAMESPACE") and _may_unshare():
        os.environ["TORTURE_IN_NAMESPACE"] = "1"  # in which a small disk can be mounted
        os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "tests.torture", *sys.argv[1:]])
    campaign.run("torture", __doc__, torture, duration=600, rate=500, limit_s=LIMIT_S)


def torture(folder: Path, seed: int, duration: float, rate: float) -> list[str]:
    """Inject faults for the duration, wait until everything has drained, and return the problems found."""
    journal = Journal(Records(seed, number) for number in range(len(SHARES)))
    errors: list[str] = []
    with ExitStack() as stack:
        service = stack.enter_context(Service(journal))
        lanes: list[Lane] = [
            stack.enter_context(kind(folder, number, service, Random(f"{seed} {number}"), rate=rate * share))
            for number, (kind, share) in enumerate(SHARES.items())
        ]
        adversary = Adversary(seed, service, lanes, duration)
        wrong: list[str] = []
        try:
            with campaign.threads(adversary.loops(), adversary.is_over, errors):
                adversary.wait()
                if not errors:
                    wrong += _quiet(lanes)
            wrong += [] if errors else _end(lanes)
            if not wrong and not errors:
                wrong = [problem for lane in lanes for check in checking.OF_LANES for problem in check(lane)]
        except AssertionError as error:
            wrong.append(str(error))
        totals = checking.totals(lanes, journal)
        wrong += journal.wrong
        if errors:
            wrong += errors  # the run was aborted, so the other checks would be misleading
        else:
            wrong += [*checking.losses(lanes), *checking.repeats(lanes, journal)]
            never = checking.unseen({name: schedule.effects for name, schedule in adversary.schedules.items()})
            wrong += [*never, *(f"never happened: {name}" for name in checking.MUST_HAPPEN if not totals[name])]
        _report(adversary.schedules, lanes, totals)
        if wrong:
            _keep_evidence(folder, adversary.schedules, lanes)
    return wrong


class Adversary:
    """
    Feeds the lanes and injects the faults of each schedule, in threads.

    Attributes:
        schedules: By name.
        is_over: Set when feeding and faults must end.
    """

    def __init__(self, seed: int, service: Service, lanes: Sequence[Lane], duration: float) -> None:
        self._seed = seed
        self._service = service
        self._lanes = lanes
        self._pace = min(1.0, duration / _FULL_PAUSES_S)
        self.is_over = threading.Event()
        until = time.monotonic() + duration
        self.schedules = {"service": Schedule(faults.SERVICE, Random(f"{seed} service"), until=until)}
        for lane in lanes:
            without = [name for name in faults.LANE if any(name.startswith(each) for each in lane.left_out)]
            self.schedules[lane.name] = Schedule(
                faults.of_lane(lane), Random(f"{seed} {lane.name}"), until=until, without=without
            )
            if table := faults.of_files(lane):
                self.schedules[f"files of {lane.name}"] = Schedule(
                    table, Random(f"{seed} files {lane.name}"), until=until
                )

    def loops(self) -> dict[str, Callable[[], None]]:
        attacks = {lane.name: partial(self._attack, lane) for lane in self._lanes}
        feeds = {f"feed {lane.name}": partial(self._feed, lane) for lane in self._lanes}
        return {"service": self._attack_service, **attacks, **feeds}

    def wait(self) -> None:
        """Wait until all faults are over; the lanes continue."""
        while not all(schedule.is_done for schedule in self.schedules.values()) and not self.is_over.is_set():
            self.is_over.wait(0.1)

    def _pauses(self, name: str) -> Random:
        return Random(f"{self._seed} pauses {name}")

    def _attack_service(self) -> None:
        schedule, rng = self.schedules["service"], self._pauses("service")
        while not schedule.is_done and not self.is_over.is_set():
            schedule.run_next(self._service)
            self.is_over.wait(rng.uniform(0.3, 1.5) * self._pace)

    def _attack(self, lane: Lane) -> None:
        schedule, rng = self.schedules[lane.name], self._pauses(lane.name)
        while not self.is_over.is_set():
            lane.rest(0.1 if schedule.is_done else rng.uniform(0.5, 3) * self._pace)
            if not schedule.is_done:
                schedule.run_next(lane)

    def _feed(self, lane: Lane) -> None:
        schedule, rng = self.schedules.get(f"files of {lane.name}"), self._pauses(f"files of {lane.name}")
        next_at = time.monotonic()
        while not self.is_over.is_set():
            lane.produce()
            time.sleep(0.01)
            if isinstance(lane, RunLane) and schedule and not schedule.is_done and time.monotonic() > next_at:
                schedule.run_next(lane, rng.choice(lane.files))
                next_at = time.monotonic() + rng.uniform(0.5, 2.5) * self._pace
        lane.finish_producing()


def _quiet(lanes: Sequence[Lane]) -> list[str]:
    """Check that new records arrive soon after the faults are over."""
    before = {lane: lane.written for lane in lanes}

    def is_fresh(lane: Lane) -> bool:
        return any(lane.has(number) for number in range(before[lane], lane.latest + 1))

    late = _not_within(FRESH_S, lanes, is_fresh)
    time.sleep(CALM_S)
    return [f"{lane.name}: no new record arrived within {FRESH_S:g} s" for lane in late]


def _end(lanes: Sequence[Lane]) -> list[str]:
    """Check that everything arrives and that each process ends as expected."""

    def is_through(lane: Lane) -> bool:
        lane.tend()
        return lane.backlog == 0

    late = _not_within(DRAIN_S, lanes, is_through)
    wrong = [f"{lane.name}: {lane.backlog} records did not arrive within {DRAIN_S:g} s" for lane in late]
    _not_within(SEARCH_S, [lane for lane in lanes if isinstance(lane, RunLane)], lambda lane: not checking.status(lane))
    for lane in lanes if not wrong else ():
        result = lane.close()
        if result.returncode not in lane.good_ends:
            wrong.append(f"{lane.name}: ended with exit code {result.returncode}\n{result.stderr[-2000:]}")
    return wrong


def _not_within(limit_s: float, lanes: Sequence[Lane], is_done: Callable[[Lane], bool]) -> list[Lane]:
    """Wait for a condition, and return the lanes for which it does not hold in time."""
    until = time.monotonic() + limit_s
    left = list(lanes)
    while (left := [lane for lane in left if not is_done(lane)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _report(schedules: Mapping[str, Schedule], lanes: Sequence[Lane], totals: dict[str, int]) -> None:
    for name, schedule in schedules.items():
        print(f"\nfaults, {name}\n{campaign.table(dict(sorted(schedule.effects.items())))}")
    print(f"\nrecords\n{campaign.table(dict(sorted(totals.items())))}")
    print(campaign.table({"losses": sum(lane.owed for lane in lanes) - totals["delivered"]}))
    for lane in lanes:
        for name, why in lane.left_out.items():
            print(f"skipped for {lane.name}: {name}: {why}")


def _keep_evidence(folder: Path, schedules: Mapping[str, Schedule], lanes: Sequence[Lane]) -> None:
    """Copy the state from the memory disk, and write the history of the faults to files."""
    ignored = shutil.ignore_patterns("ballast", "control")
    for lane in lanes:
        shutil.copytree(lane.shipper.state, lane.shipper.folder / "state-kept", ignore=ignored)
    for name, schedule in schedules.items():
        (folder / f"faults-{name}").write_text("\n".join(schedule.history) + "\n")


def _may_unshare() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rm", "true"], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
