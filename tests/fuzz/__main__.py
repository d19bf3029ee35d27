"""Run targets: `python -m tests.fuzz [TARGET…]`, or `TARGET --input FILE` to repeat one input."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.campaign import parser, seed_of
from tests.fuzz.engine import Target, fuzz, quiet, write_failure

_MODULES: Final = "answers records scanner framings archives settings reports state requests conversations slow".split()
TARGETS: Final[dict[str, Target]] = {
    target.name: target for module in _MODULES for target in import_module(f"tests.fuzz.{module}").TARGETS
}


def executions_of(targets: Sequence[Target], executions: int) -> list[int]:
    """Divide executions among targets by their shares; each target gets at least twice as many as it has seeds."""
    shares = sum(target.share for target in targets)
    return [max(2 * len(target.seeds), round(executions * target.share / shares)) for target in targets]


def main() -> int:
    """Run the targets; return 1 if one fails."""
    options = parser("fuzz", "Feed hostile input to everything that reads untrusted bytes.")
    options.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    options.add_argument(
        "--executions", type=int, default=1_000_000, help="inputs, divided among the targets by their shares"
    )
    options.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "shipper-fuzz")
    options.add_argument("--input", type=Path, help="pass only this input to the target")
    arguments = options.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        options.error(f"there is no target {', '.join(sorted(unknown))}")
    targets = [TARGETS[name] for name in arguments.targets or TARGETS]
    if arguments.input:
        with quiet():
            print(targets[0].check(arguments.input.read_bytes()))
        return 0
    seed = seed_of(arguments)
    print(f"seed {seed}; an execution passes one input to its target", flush=True)
    total, seconds, failed = 0, 0.0, 0
    for target, executions in zip(targets, executions_of(targets, arguments.executions), strict=True):
        report = fuzz(target, executions, seed)
        total, seconds, failed = total + report.executions, seconds + report.seconds, failed + len(report.failures)
        print(
            f"{target.name:14} {report.executions:>10,} executions {report.seconds:8.1f} s of CPU time "
            f"{report.kinds:>7,} kinds of outcome {len(report.failures)} failures",
            flush=True,
        )
        for failure in report.failures:
            print(write_failure(failure, target, seed, arguments.failures), flush=True)
    print(f"{'all':14} {total:>10,} executions {seconds:8.1f} s of CPU time", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
