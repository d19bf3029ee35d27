"""Shared by the long random runs: seed, time limit, a folder that is kept after a failure, threads, tables."""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random, SystemRandom
from typing import Any


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--seed` for the program `python -m tests.NAME`."""
    made = argparse.ArgumentParser(
        prog=f"python -m tests.{name}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seed", type=int, help="seed of all random choices; default: random")
    return made


def seed_of(options: argparse.Namespace) -> int:
    return SystemRandom().randrange(10**9) if options.seed is None else options.seed


def run(
    name: str,
    description: str | None,
    check: Callable[[Path, int, float, float], list[str]],
    *,
    duration: float,
    rate: float,
    limit_s: float,
) -> None:
    """
    Run a campaign in a temporary folder; if it fails, keep the folder and exit with 1.

    Args:
        check: Takes folder, seed, duration and rate; returns the failures.
        duration, rate: Defaults: seconds, and good records per second.
        limit_s: Time limit of the whole run, in addition to the duration.
    """
    options = parser(name, description)
    options.add_argument("--duration", type=float, default=duration, help="seconds during which faults happen")
    options.add_argument("--rate", type=float, default=rate, help="good records per second")
    arguments = options.parse_args()
    seed, duration, rate = seed_of(arguments), arguments.duration, arguments.rate
    again = f"again with: {options.prog} --seed {seed} --duration {duration:g} --rate {rate:g}"
    print(f"seed {seed}; {again}", flush=True)
    signal.signal(signal.SIGTERM, _give_up)
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(int(duration + limit_s))
    folder = Path(tempfile.mkdtemp(prefix=f"shipper-{name}-"))
    if wrong := check(folder, seed, duration, rate):
        print("\n".join(["", "FAILED", *wrong, f"logs and states: {folder}", again]))
        sys.exit(1)
    shutil.rmtree(folder)
    print("passed")


def _give_up(number: int, _: object) -> None:
    faulthandler.dump_traceback()
    raise AssertionError(f"{signal.Signals(number).name}: the run did not end in time")


@contextmanager
def threads(loops: Mapping[str, Callable[[], None]], is_over: threading.Event, errors: list[str]) -> Iterator[None]:
    """
    Run functions in threads until the block ends.

    Args:
        is_over: Set when the block ends or a function fails; then all functions must return.
        errors: Receives the traceback of each function that fails.
    """

    def guarded(name: str, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException:
            errors.append(f"the thread {name} failed: {traceback.format_exc()}")
            is_over.set()

    started = [threading.Thread(target=guarded, args=each, name=each[0]) for each in loops.items()]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in started:
            thread.join()


class Shuffled:
    """Yields items in random order; none is repeated before all have been yielded."""

    def __init__(self, items: Iterable[Any], rng: Random) -> None:
        self._items = [*items]
        self._rng = rng
        self._left: list[Any] = []

    def next(self) -> Any:
        if not self._left:
            self._left = self._rng.sample(self._items, len(self._items))
        return self._left.pop()

    def keep(self, items: Collection[Any]) -> None:
        """Drop all items except these."""
        self._items = [item for item in self._items if item in items]
        self._left = [item for item in self._left if item in items]


def some(values: Iterable[Any], shown: int = 10) -> str:
    """Return the first values as text for a message."""
    listed = [*values]
    return ", ".join(map(str, listed[:shown])) + (", …" if len(listed) > shown else "")


def table(rows: Mapping[str, Any]) -> str:
    return "\n".join(f"{f'{value:,}' if isinstance(value, int) else value:>14}  {name}" for name, value in rows.items())
