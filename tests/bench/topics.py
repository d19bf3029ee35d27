"""
The broker of row `kafka`: `python -m tests.bench.topics DIRECTORY SAMPLE...`.

It starts a broker, writes each sample to a topic of four partitions that is called like the file, prints the address,
and runs until its standard input ends. Without what a broker needs, it prints a sentence instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .measure import DEAD_LETTERS, LEDGER

PARTITIONS = 4


def main() -> None:
    """Start it, load it, and wait."""
    directory, *samples = map(Path, sys.argv[1:])
    try:
        from tests.e2e.kafka.broker import Broker, missing
    except ImportError as error:
        print(f"needs {error.name}")
        return
    if why := missing():
        print(why)
        return
    with Broker(directory) as broker:
        for topic in (DEAD_LETTERS, LEDGER):
            broker.create(topic, 1, cleanup_policy="compact")
        for sample in samples:
            broker.create(sample.stem, PARTITIONS)
            with sample.open("rb") as lines:
                broker.produce(sample.stem, (line.rstrip(b"\n") for line in lines))
        print(broker.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
