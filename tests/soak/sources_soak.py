"""
Followed files against a model, thousands of steps: `python -m tests.soak.sources_soak [SEED [EXAMPLES]]`, some minutes.
"""

from __future__ import annotations

import sys
import time
from random import SystemRandom

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import get_state_machine_test

from tests.model.test_sources import Sources

EXAMPLES = 1500
STEPS = 40
MUST_HAPPEN = (
    *("found again in a copy", "found again in an archive", "read on in a copy", "read on in an archive"),
    *("truncation seen", "crash with unsaved settlements", "looked at a copy beside the original"),
    *("reported as unreachable", "line owed", "line not owed"),
)


def main() -> None:
    """Try them, and say what happened; ends with the shortest way to a fault if something does not hold."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else SystemRandom().randrange(10**9)
    examples = int(sys.argv[2]) if len(sys.argv) > 2 else EXAMPLES
    print(f"seed {number}", flush=True)
    begin = time.monotonic()
    Sources.reuses_inodes = True
    how = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    seed(number)(get_state_machine_test(Sources, settings=how))()
    for what, times in sorted(Sources.happened.items()):
        print(f"{times:9,} {what}")
    missing = [what for what in MUST_HAPPEN if not Sources.happened[what]]
    assert not missing, f"never happened: {missing}"
    print(f"{examples:,} examples, {Sources.happened['step']:,} steps, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
