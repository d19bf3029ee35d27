"""`python -m tests.fuzz [TARGET…] [--executions N] [--seed S]`, or `TARGET --input FILE` to repeat one input."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.fuzz.engine import fuzz, quiet, write_failure
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run the targets; 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Hostile input.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--executions", type=int, default=1_000_000, help="inputs, over all targets by their shares")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(10**9))
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "shipper-fuzz")
    parser.add_argument("--input", type=Path, help="run this one input through the target")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    targets = [TARGETS[name] for name in arguments.targets or TARGETS]
    if arguments.input:
        with quiet():
            print(targets[0].check(arguments.input.read_bytes()))
        return 0
    print(f"seed {arguments.seed}; an execution is one input that goes through its target", flush=True)
    shares = sum(target.share for target in targets)
    total, seconds, failed = 0, 0.0, 0
    for target in targets:
        found = fuzz(target, round(arguments.executions * target.share / shares), arguments.seed)
        total, seconds, failed = total + found.executions, seconds + found.seconds, failed + len(found.failures)
        print(
            f"{target.name:10} {found.executions:>10,} executions {found.seconds:8.1f} s of the processor "
            f"{found.kinds:>7,} kinds of outcome {len(found.failures)} failures",
            flush=True,
        )
        for failure in found.failures:
            print(write_failure(failure, target, arguments.seed, arguments.failures), flush=True)
    print(f"{'all':10} {total:>10,} executions {seconds:8.1f} s of the processor", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
