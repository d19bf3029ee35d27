"""
`python -m tests.soak --minutes 30`: exit code 1 names the curves that grow, or what was lost.

In less than five minutes the warm-up of the memory itself is found to grow.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.bench.measure import ROOT
from tests.soak.drawing import draw
from tests.soak.flatness import table
from tests.soak.life import PARTS, Plan, keep_logs, soak, write_csv

_CYCLE_S = 60.0
_LEAST_CYCLES = 8  # two in each quarter


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Does anything grow that must not?")
    parser.add_argument("parts", nargs="*", metavar="PART", help="run, pipe; both, if none is named")
    parser.add_argument("--minutes", type=float, default=30.0, help="from when all is under way (%(default)g)")
    parser.add_argument("--seed", type=int, help="of what goes wrong; drawn, if not given")
    parser.add_argument("--output", type=Path, default=ROOT / ".bench" / "soak", help="for samples, plot and logs")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    return arguments


def main() -> int:
    """Soak, and write what was found."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the shippers are ended, too
    seed = SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    seconds = arguments.minutes * 60
    plan = Plan(seconds, seed, min(_CYCLE_S, seconds / _LEAST_CYCLES), parts=arguments.parts or PARTS)
    print(f"{arguments.minutes:g} minutes, seed {seed}", flush=True)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shipper-soak-") as folder:
        try:
            outcome = soak(plan, Path(folder), lambda line: print(line, flush=True))
        finally:
            keep_logs(Path(folder), output)
    write_csv(outcome.looks, output / "samples.csv")
    (output / "curves.svg").write_text(draw(outcome.looks, outcome.judgements))
    for part, judgements in outcome.judgements.items():
        print(f"\n{part}\n{table(judgements)}")
    print("", *outcome.account, f"samples, curves and logs are in {output}", sep="\n")
    for name in outcome.growing:
        print(f"NOT FLAT  {name}")
    for part in outcome.unjudged:
        print(f"NOT JUDGED  {part}: the machine was too busy, or the time too short, to look often enough")
    return 1 if outcome.growing or outcome.unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
