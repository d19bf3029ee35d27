"""
How much memory: `python -m tests.soak.memory`, a few minutes.

`shipper backfill` sends to a server that takes seconds for each answer, so that all requests are in flight that may be;
with several numbers of them, and sizes of batches. What is printed is the most memory that each held, and the line
through them: a base, and so many times the bytes in flight.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from tests.bench.measure import Server, clean_environment, running_server
from tests.bench.rows import SHIPPER, sample_file, write_config

SENDERS: Final = (2, 8, 32)
BATCH_BYTES: Final = (1 << 18, 1 << 20, 1 << 22)
SERVED_PER_S: Final = 10_000_000  # bytes; slower than shipper is, so that all senders wait for answers
ROUNDS: Final = 4  # so often each of them is answered, and
LEAST_BYTES: Final = 400_000_000  # so many are sent: more than fills the dedupe window
LIMIT_S: Final = 180
EVENTS: Final = 2_000_000
MIB: Final = 1 << 20


class Found(NamedTuple):
    """What one setting took at most."""

    senders: int
    batch_bytes: int
    peak_bytes: int

    @property
    def in_flight_bytes(self) -> int:
        """What was on its way at a time."""
        return self.senders * self.batch_bytes


def measured(senders: int, batch_bytes: int, more: Iterable[str]) -> Found:
    """Measure one setting, with a server that is as slow as it has to be."""
    with running_server([], senders * batch_bytes / SERVED_PER_S * 1000) as server:
        return _peak_of(senders, batch_bytes, server, more)


def _peak_of(senders: int, batch_bytes: int, server: Server, more: Iterable[str]) -> Found:
    """Ship until all senders have had several batches, and tell the most memory that was held."""
    settings = {
        "delivery.concurrency": senders,
        "batch.max_bytes": batch_bytes,
        "batch.max_events": 1_000_000,
        "input.max_record_bytes": 1 << 16,  # must fit into a batch
    }
    wanted_bytes = max(LEAST_BYTES, ROUNDS * senders * batch_bytes)
    with tempfile.TemporaryDirectory(prefix="shipper-memory-") as folder:
        config = write_config(server.urls["plain"], Path(folder))
        command = [SHIPPER, "backfill", "--config", config, sample_file(EVENTS)]
        for setting in (*(f"{name}={value}" for name, value in settings.items()), *more):
            command += ["--set", setting]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean_environment()
        ) as process:
            try:
                begin = time.monotonic()
                while server.counts()["bytes"] < wanted_bytes and process.poll() is None:
                    assert time.monotonic() < begin + LIMIT_S, "it takes too long"
                    time.sleep(0.1)
                assert process.poll() is None, "it has ended: the sample is too small"
                return Found(senders, batch_bytes, _peak_bytes(process.pid))
            finally:
                process.kill()


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


def line_through(found: Sequence[Found]) -> tuple[float, float]:
    """The base in bytes, and the factor of the bytes in flight; least squares."""
    mean_x, mean_y = fmean(each.in_flight_bytes for each in found), fmean(each.peak_bytes for each in found)
    rise = sum((each.in_flight_bytes - mean_x) * (each.peak_bytes - mean_y) for each in found)
    factor = rise / sum((each.in_flight_bytes - mean_x) ** 2 for each in found)
    return mean_y - factor * mean_x, factor


def main() -> None:
    """Measure, and print a line for each setting."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of shipper")
    more: list[str] = parser.parse_args().set
    found = []
    for senders in SENDERS:
        for batch_bytes in BATCH_BYTES:
            found.append(measured(senders, batch_bytes, more))
            print(
                f"{senders:3} in flight of {batch_bytes / MIB:4g} MiB = {found[-1].in_flight_bytes / MIB:6.1f} MiB:"
                f"  {found[-1].peak_bytes / MIB:6.1f} MiB",
                flush=True,
            )
    base, factor = line_through(found)
    print(f"{base / MIB:.0f} MiB + {factor:.2f} x the bytes in flight")


if __name__ == "__main__":
    main()
