"""
`python -m tests.soak --minutes 30`: exits with 1 if a curve grows or a record is lost.

In a run of less than five minutes, the warm-up of the memory counts as growth.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from tests.campaign import parser, seed_of
from tests.processes import ROOT
from tests.soak.flatness import table
from tests.soak.life import PARTS, Plan, keep_logs, soak, write_csv

_CYCLE_S = 60.0
_LEAST_CYCLES = 8  # two per quarter of the run


def main() -> int:
    options = parser("soak", "Check that nothing grows in a long run.")
    options.add_argument("parts", nargs="*", metavar="PART", help="run, pipe; default: both")
    options.add_argument("--minutes", type=float, default=30.0, help="duration once all parts run (%(default)g)")
    options.add_argument("--output", type=Path, default=ROOT / ".bench" / "soak", help="folder for samples and logs")
    arguments = options.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        options.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the shippers are stopped, too
    seconds, seed, output = arguments.minutes * 60, seed_of(arguments), arguments.output
    plan = Plan(seconds, seed, min(_CYCLE_S, seconds / _LEAST_CYCLES), parts=arguments.parts or PARTS)
    print(f"{arguments.minutes:g} minutes, seed {seed}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shipper-soak-") as folder:
        try:
            outcome = soak(plan, Path(folder), lambda line: print(line, flush=True))
        finally:
            keep_logs(Path(folder), output)
    write_csv(outcome.looks, output / "samples.csv")
    for part, judgements in outcome.judgements.items():
        print(f"\n{part}\n{table(judgements)}")
    print("", *outcome.account, f"samples and logs are in {output}", sep="\n")
    for name in outcome.growing:
        print(f"NOT FLAT  {name}")
    for part in outcome.unjudged:
        print(f"NOT JUDGED  {part}: too few samples; the machine was too busy or the run too short")
    return 1 if outcome.growing or outcome.unjudged else 0


if __name__ == "__main__":
    sys.exit(main())
