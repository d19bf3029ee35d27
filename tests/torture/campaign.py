"""A long random run as a command: its seed, its limit of time, a folder of its own, and what is said at its end."""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom


def read_options(name: str, what: str | None, *, duration: float, rate: float) -> argparse.Namespace:
    """
    Parse `--seed`, `--duration` and `--rate`.

    Args:
        name: Of the package under `tests`.
        duration: By default, in seconds.
        rate: By default, in records a second.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.{name}", description=what)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**9), help="of everything random")
    parser.add_argument("--duration", type=float, default=duration, help="seconds for which things go wrong")
    parser.add_argument("--rate", type=float, default=rate, help="good records a second")
    options = parser.parse_args()
    options.again = f"{parser.prog} --seed {options.seed} --duration {options.duration:g} --rate {options.rate:g}"
    return options


def hold(name: str, options: argparse.Namespace, run: Callable[[Path], list[str]], *, limit_s: float) -> None:
    """
    Run it in a folder that stays if something is wrong, and then end with 1.

    Args:
        run: Gets the folder; returns what is wrong.
        limit_s: Beyond the duration, for all of it.
    """
    print(f"seed {options.seed}; again with: {options.again}", flush=True)
    signal.signal(signal.SIGTERM, _give_up)
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(int(options.duration + limit_s))
    folder = Path(tempfile.mkdtemp(prefix=f"shipper-{name}-"))
    if wrong := run(folder):
        print("\n".join(["", "FAILED", *wrong, f"logs and states: {folder}", f"again with: {options.again}"]))
        sys.exit(1)
    shutil.rmtree(folder)
    print("all of it held")


def _give_up(number: int, _: object) -> None:
    faulthandler.dump_traceback()
    raise AssertionError(f"{signal.Signals(number).name}: it did not come to an end")
