"""
Check memory and repeated deliveries with awkward records: `python -m tests.soak.held --events 5000000`.

    sparse     `shipper backfill` of records that each need their own ledger key, at full speed: memory by million
    killed     the same, killed half-way and restarted: number of repeated records
    refused    invalid records behind a batch that is never answered: memory while nothing is settled
    full       the same with no room for dead letters
    in-flight  several numbers of requests in flight and sizes of batches: peak memory, and a line fitted to it;
               not run by default

Exit code 1 if a bound is broken, or if records are lost. Linux only, as it reads /proc.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import linear_regression
from typing import Final

from tests.bench.measure import BlackholeServer, running_server
from tests.bench.samples import sample_file
from tests.campaign import parser
from tests.e2e.driver import Running, Shipper, Target
from tests.processes import memory_bytes, read_bytes

PEAK_MAX_BYTES: Final = 160_000_000
GROWTH_MAX: Final = 1.10  # from the first to the last million
REPEATED_MAX: Final = 20_000
REFUSED_PEAK_MAX_BYTES: Final = 200_000_000
REFUSED: Final = 1_000_000
STILL_S: Final = 10.0  # reading counts as stopped after so long without progress
MILLION: Final = 1_000_000
MIB: Final = 1 << 20
SENDERS: Final = (2, 8, 32)
BATCH_BYTES: Final = (MIB >> 2, MIB, MIB << 2)
SERVED_PER_S: Final = 10_000_000  # bytes; slower than shipper, so that all senders wait for answers
LEAST_BYTES: Final = 400_000_000  # events to send: more than the dedupe window holds
_LOOK_S: Final = 0.05
_LIMIT_S: Final = 900.0
_NEVER_MS: Final = 3_600_000.0


@contextmanager
def backfilling(server: BlackholeServer, sample: Path, **settings: object) -> Iterator[Callable[[], Running]]:
    """Yield a function that starts a backfill of a sample, each time with the same state."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    with (
        tempfile.TemporaryDirectory(prefix="shipper-held-") as folder,
        Shipper(Path(folder) / "shipper", Target(server.urls["plain"], "key", "token")) as shipper,
    ):
        yield lambda: shipper.start("backfill", sample, "--summary", "json", settings=given, fresh=True)


def sparse(events: int) -> Iterator[str]:
    sample, by_million = sample_file(events, "sparse"), [0] * max(1, -(-events // MILLION))
    with running_server() as server, backfilling(server, sample) as start:
        begin, running = time.monotonic(), start()
        while not running.has_ended:
            at = min(server.counts()["events"] // MILLION, len(by_million) - 1)
            by_million[at] = max(by_million[at], memory_bytes(running.pid))
            _ = running.peak_bytes
            time.sleep(_LOOK_S)
        seconds, result = time.monotonic() - begin, running.finish(limit_s=_LIMIT_S)
        arrived = server.counts()["events"]
    yield f"sparse    {events:,} records in {seconds:.1f} s, {events / seconds:,.0f} a second"
    yield "          peak RSS by million, MB: " + " ".join(f"{rss / MILLION:.0f}" for rss in by_million)
    yield f"          peak RSS {result.peak_bytes / MILLION:.0f} MB"
    assert result.summary is not None, result.stderr
    if not result.summary["accepted"] == arrived == events:
        yield f"BROKEN    {result.summary['accepted']:,} accepted, {arrived:,} arrived"
    if result.peak_bytes > PEAK_MAX_BYTES:
        yield f"BROKEN    the peak is over {PEAK_MAX_BYTES / MILLION:.0f} MB"
    if by_million[-1] > by_million[0] * GROWTH_MAX:
        yield "BROKEN    memory grows"


def killed(events: int) -> Iterator[str]:
    with running_server() as server, backfilling(server, sample_file(events, "sparse")) as start:
        running = start()
        running.wait_until(lambda: server.counts()["events"] >= events // 2, "half has arrived", limit_s=_LIMIT_S)
        running.kill()
        time.sleep(0.5)  # until requests in flight have arrived
        before = server.counts()["events"]
        result = start().finish(limit_s=_LIMIT_S)
        arrived = server.counts()["events"]
    yield f"killed    after {before:,} had arrived: {arrived - events:,} repeated"
    if result.returncode or arrived < events or before >= events:
        yield f"BROKEN    the second run ended with {result.returncode}; {arrived:,} of {events:,} arrived"
    if arrived - events > REPEATED_MAX:
        yield f"BROKEN    more than {REPEATED_MAX:,} are repeated"


def refused(_: int, *, is_full: bool = False) -> Iterator[str]:
    """Read invalid records while nothing can be settled, until reading stops."""
    settings: dict[str, object] = {"delivery__give_up_after_seconds": 3600, "records__mistake_limit": 0}
    if is_full:
        settings["state__dead_letter_max_bytes"] = MILLION
    with tempfile.TemporaryDirectory(prefix="shipper-held-") as folder:
        sample = Path(folder) / "refused.ndjson"
        with sample_file(REFUSED).open("rb") as lines, sample.open("wb") as out:
            out.writelines(lines.readline() for _ in range(1000))
            out.writelines(line.replace(b'"IP":"', b'"IP":"x') for line in lines)
        latency_ms = 0.0 if is_full else _NEVER_MS
        with running_server(latency_ms=latency_ms) as server, backfilling(server, sample, **settings) as start:
            running, before, read = start(), -MILLION, 0
            while not running.has_ended and read - before >= MILLION:
                time.sleep(STILL_S)
                before, read = read, read_bytes(running.pid)
            peak, has_ended, size = running.peak_bytes, running.has_ended, sample.stat().st_size
    name = "full   " if is_full else "refused"
    yield f"{name}   peak RSS {peak / MILLION:.0f} MB after {read / MILLION:.0f} of {size / MILLION:.0f} MB"
    if has_ended or read >= size:
        yield "BROKEN    it did not wait"
    if peak > REFUSED_PEAK_MAX_BYTES:
        yield f"BROKEN    the peak is over {REFUSED_PEAK_MAX_BYTES / MILLION:.0f} MB"


def full(events: int) -> Iterator[str]:
    return refused(events, is_full=True)


def in_flight(_: int) -> Iterator[str]:
    """Ship with all senders waiting for answers, until each has received several."""
    on_their_way, peaks = [], []
    for senders, batch_bytes in ((senders, size) for senders in SENDERS for size in BATCH_BYTES):
        on_their_way.append(senders * batch_bytes)
        settings = {
            "delivery__concurrency": senders,
            "batch__max_bytes": batch_bytes,
            "batch__max_events": MILLION,
            "input__max_record_bytes": 1 << 16,  # limited by the batch size
        }
        with (
            running_server(latency_ms=on_their_way[-1] / SERVED_PER_S * 1000) as server,
            backfilling(server, sample_file(2 * MILLION), **settings) as start,
        ):
            running, wanted = start(), max(LEAST_BYTES, 4 * on_their_way[-1])
            running.wait_until(lambda: server.counts()["bytes"] >= wanted, "enough bytes are sent", limit_s=_LIMIT_S)  # noqa: B023
            peaks.append(running.peak_bytes)
        yield f"in-flight {senders:3} of {batch_bytes / MIB:4g} MiB: {peaks[-1] / MIB:6.1f} MiB"
    factor, base = linear_regression(on_their_way, peaks)
    yield f"          {base / MIB:.0f} MiB + {factor:.2f} x the bytes in flight"


PARTS: Final = {"sparse": sparse, "killed": killed, "refused": refused, "full": full, "in-flight": in_flight}


def main() -> int:
    options = parser("soak.held", __doc__)
    options.add_argument("--events", type=int, default=5 * MILLION, help="events in the sparse file (%(default)s)")
    options.add_argument("--parts", default="sparse,killed,refused,full", help="parts to run, by commas (%(default)s)")
    arguments = options.parse_args()
    is_broken = False
    for part in arguments.parts.split(","):
        for line in PARTS[part](arguments.events):
            print(line, flush=True)
            is_broken |= line.startswith("BROKEN")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
