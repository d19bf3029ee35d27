"""A million random and mutated records through the codec: `python -m tests.soak.codec_soak [SEED]`, some minutes."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from random import Random, SystemRandom

from shipper.sandbox.samples import sample_lines
from tests.codec_fuzz import try_some

RECORDS = 1_000_000
TOLD_EVERY = 50_000


def main() -> None:
    """Try them, and say how far it is; ends with an assertion if something does not hold."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else SystemRandom().randrange(10**9)
    print(f"seed {seed}", flush=True)
    rng = Random(seed)
    samples = [line.rstrip() for line in sample_lines(2000, seed=seed, end=datetime(2026, 11, 20, tzinfo=UTC))]
    tried, told, begin = 0, 0, time.monotonic()
    while tried < RECORDS:
        tried += try_some(rng, samples)
        if tried - told >= TOLD_EVERY:
            told = tried
            print(f"{tried:,} records, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
