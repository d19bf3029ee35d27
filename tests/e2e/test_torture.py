"""A short run of the adversary of `tests.torture`: every fault once, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

DURATION_S = 10  # or for as long as it takes until every fault was dealt
LIMIT_S = 700  # it gives up by itself before, and leaves nothing running


def test_nothing_is_lost_whatever_happens(rng: Random):
    command = [
        sys.executable,
        "-m",
        "tests.torture",
        "--seed",
        str(rng.randrange(10**9)),
        "--duration",
        str(DURATION_S),
    ]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
