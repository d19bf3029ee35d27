"""`python -m tests.torture --seed N --duration S`: exit code 0 = nothing was lost; 1 = what was lost is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Final

from tests.torture import checking
from tests.torture.adversary import Adversary
from tests.torture.application import RunLane
from tests.torture.books import Books
from tests.torture.campaign import hold, read_options
from tests.torture.exports import BackfillLane
from tests.torture.lanes import Lane
from tests.torture.live import LiveLane
from tests.torture.pipe import PipeLane
from tests.torture.service import Service

FRESH_S: Final = 30.0  # in which a new record arrives once it is quiet
CALM_S: Final = 3.0
DRAIN_S: Final = 240.0
LIMIT_S: Final = 600.0  # beyond the duration, for all of it
SHARES: Final = {RunLane: 0.4, PipeLane: 0.3, BackfillLane: 0.2, LiveLane: 0.1}


def main() -> None:
    options = read_options("torture", __doc__, duration=600, rate=500)
    if os.geteuid() != 0 and not os.environ.get("TORTURE_IN_NAMESPACE") and _may_unshare():
        os.environ["TORTURE_IN_NAMESPACE"] = "1"  # where a small disk may be mounted
        os.execvp("unshare", ["unshare", "-rm", sys.executable, "-m", "tests.torture", *sys.argv[1:]])
    hold(
        "torture",
        options,
        lambda folder: torture(folder, options.seed, options.duration, options.rate),
        limit_s=LIMIT_S,
    )


def torture(folder: Path, seed: int, duration: float, rate: float) -> list[str]:
    """Do it all; gives what is wrong."""
    books = Books(seed, len(SHARES))
    with ExitStack() as stack:
        service = stack.enter_context(Service(books))
        lanes: list[Lane] = [
            stack.enter_context(kind(folder, number, service, Random(f"{seed} {number}"), rate=rate * share))
            for number, (kind, share) in enumerate(SHARES.items())
        ]
        adversary = Adversary(seed, service, lanes, seconds=duration)
        try:
            wrong = _live(adversary, lanes)
        except AssertionError as error:
            wrong = [str(error)]
        finally:
            adversary.close()
        totals = checking.totals(lanes, books)
        wrong += books.wrong
        if adversary.errors:
            wrong += adversary.errors  # it was cut short, so that what else is not as it should be says nothing
        else:
            wrong += [problem for lane in lanes for problem in checking.losses(lane, books)]
            wrong += [*checking.repeats(lanes, books), *checking.unseen(adversary, totals)]
        _report(adversary, lanes, totals)
        if wrong:
            _keep_evidence(folder, adversary, lanes)
    return wrong


def _live(adversary: Adversary, lanes: Sequence[Lane]) -> list[str]:
    """Faults, then quiet, then the end."""
    adversary.run()
    if adversary.errors:
        return []
    wrong = _quiet(lanes)
    adversary.close()
    if adversary.errors:
        return wrong
    wrong += _end(lanes)
    return wrong or [problem for lane in lanes for check in checking.OF_LANES for problem in check(lane)]


def _quiet(lanes: Sequence[Lane]) -> list[str]:
    """All faults are over: what is written from now on arrives soon."""
    before = {lane: lane.written for lane in lanes}

    def is_fresh(lane: Lane) -> bool:
        return any(lane.has(number) for number in range(before[lane], lane.latest + 1))

    late = _not_within(FRESH_S, lanes, is_fresh)
    time.sleep(CALM_S)
    return [f"{lane.name}: no new record arrived within {FRESH_S:g} s" for lane in late]


def _end(lanes: Sequence[Lane]) -> list[str]:
    """Everything arrives, and each process ends as it should."""

    def is_through(lane: Lane) -> bool:
        lane.tend()
        return lane.backlog == 0

    late = _not_within(DRAIN_S, lanes, is_through)
    wrong = [f"{lane.name}: {lane.backlog} records did not arrive within {DRAIN_S:g} s" for lane in late]
    if wrong:
        return wrong
    for lane in lanes:
        result = lane.close()
        if result.returncode not in lane.good_ends:
            wrong.append(f"{lane.name}: ended with exit code {result.returncode}\n{result.stderr[-2000:]}")
    return wrong


def _not_within(limit_s: float, lanes: Sequence[Lane], is_done: Callable[[Lane], bool]) -> list[Lane]:
    """Wait; gives the lanes of which it does not hold in time."""
    until = time.monotonic() + limit_s
    left = list(lanes)
    while (left := [lane for lane in left if not is_done(lane)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _report(adversary: Adversary, lanes: Sequence[Lane], totals: dict[str, int]) -> None:
    for where, deck in adversary.decks.items():
        print(f"\nfaults, {where}\n" + checking.table(sorted(deck.bitten.items())))
    print("\nrecords\n" + checking.table(sorted(totals.items())))
    lost = sum(lane.owed for lane in lanes) - totals["delivered"]
    print(checking.table([("losses", lost)]))
    for lane in lanes:
        for what, why in lane.left_out.items():
            print(f"left out for {lane.name}: {what}: {why}")


def _keep_evidence(folder: Path, adversary: Adversary, lanes: Sequence[Lane]) -> None:
    """Keep what lies on a disk in memory, and what was dealt when."""
    for lane in lanes:
        shutil.copytree(
            lane.shipper.state, lane.shipper.folder / "state-kept", ignore=shutil.ignore_patterns("ballast", "control")
        )
    for where, deck in adversary.decks.items():
        (folder / f"faults-{where}").write_text("\n".join(deck.history) + "\n")


def _may_unshare() -> bool:
    return (
        bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    )


if __name__ == "__main__":
    main()
