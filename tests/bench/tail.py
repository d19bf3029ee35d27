"""
Measure the cost and latency of following: `shipper run`, idle and busy, with a service that records arrival times.

    python -m tests.bench.tail                     # 1, 1,000 and 10,000 finished files beside one live file
    python -m tests.bench.tail --files 1 --busy    # the same while another file grows at 20,000 events/s

Latency is measured from the append to the service, without `batch.linger_seconds`. When idle: CPU share and memory.
The rows `tail-…` and `idle-…` use `--json`; see `FOLLOWING` in `rows.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import median

from tests.bench.blackhole import Connection
from tests.bench.measure import RowError
from tests.e2e.driver import Shipper, Target
from tests.processes import SHIPPER, cpu_seconds, leave_core, memory_bytes
from tests.soak.writing import Blocks, RateWriter

LINGER_S = 0.05
BUSY_EVENTS_PER_SECOND = 20_000
_SETTLE_S = 12.0  # from the last arrival until idle, when looks become rarer
_LIMIT_S = 60.0
_EVENT_ID = re.compile(rb'"EventId":"([^"]+)"')


class Arrivals(Connection):
    """A connection to a service that accepts everything and records the first arrival of each EventId."""

    at: dict[bytes, float]
    repeated: int  # no event is repeated while nothing fails

    def answer(self) -> None:
        now, ids, known = time.perf_counter(), _EVENT_ID.findall(self.body), len(self.at)
        for event_id in ids:
            self.at.setdefault(event_id, now)
        type(self).repeated += known + len(ids) - len(self.at)
        self.write("202 Accepted", {"accepted": len(ids), "duplicates": 0, "rejected": []})


@contextmanager
def listening() -> Iterator[str]:
    """Accept batches in a thread; yield the base URL."""
    Arrivals.at, Arrivals.repeated = {}, 0
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(Arrivals, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()


def _wait_for(events: int) -> None:
    until = time.monotonic() + _LIMIT_S
    while len(Arrivals.at) < events:
        if time.monotonic() > until:
            raise RowError(f"an event did not arrive within {_LIMIT_S:g} s")
        time.sleep(0.001)


def _help_ms() -> float:
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([SHIPPER, "--help"], stdout=subprocess.DEVNULL, check=True)
        taken.append((time.perf_counter() - begin) * 1000)
    return median(taken)


def measure(files: int, appends: int, rest_s: float, *, is_busy: bool) -> tuple[int, dict[str, float | None]]:
    """
    Follow one live file beside `files` that were finished an hour ago.

    Returns:
        The number of events that arrived, and the figures; milliseconds without the linger, None = not measured.
    """
    lines = Blocks(1).lines()
    chance = random.Random(1)
    late_ms: list[float] = []
    rest_percent = rest_mib = busy_per_second = behind = None
    with tempfile.TemporaryDirectory(prefix="shipper-tail-") as name, listening() as url:
        logs = Path(name, "logs")
        logs.mkdir()
        live = logs / "live.ndjson"
        live.write_bytes(next(lines))
        for number, line in enumerate(islice(lines, files)):
            path = logs / f"{number}.ndjson"
            path.write_bytes(line)
            os.utime(path, (time.time() - 3600,) * 2)
        figures: dict[str, float | None] = {"help_ms": _help_ms()}
        with Shipper(Path(name, "shipper"), Target(url, "bench", "bench")) as shipper:
            settings = {"batch.linger_seconds": LINGER_S, "input.include": json.dumps([f"{logs}/*.ndjson"])}
            started_at = time.perf_counter()
            running = shipper.start("run", settings=settings, fresh=True)
            leave_core()
            _wait_for(1)
            figures["start_ms"] = (min(Arrivals.at.values()) - started_at - LINGER_S) * 1000
            _wait_for(sent := files + 1)
            time.sleep(_SETTLE_S)
            if rest_s:
                used_s, begin = cpu_seconds(running.pid), time.perf_counter()
                time.sleep(rest_s)
                rest_percent = (cpu_seconds(running.pid) - used_s) / (time.perf_counter() - begin) * 100
                rest_mib = memory_bytes(running.pid) >> 20
            grower = RateWriter(lines if is_busy else iter(()), logs / "busy.ndjson", BUSY_EVENTS_PER_SECOND)
            if is_busy:
                grower.start()
                time.sleep(1)
            begin = time.perf_counter()
            before = grower.written
            for line in islice(Blocks(2).lines(), appends):
                time.sleep(chance.uniform(0.05, 0.15))  # at random times relative to looks and commits
                appended_at = time.perf_counter()
                with live.open("ab") as out:
                    out.write(line)
                [event_id] = _EVENT_ID.findall(line)
                while event_id not in Arrivals.at:
                    if time.perf_counter() > appended_at + _LIMIT_S:
                        raise RowError(f"an event did not arrive within {_LIMIT_S:g} s")
                    time.sleep(0.0005)
                late_ms.append((Arrivals.at[event_id] - appended_at - LINGER_S) * 1000)
            if is_busy:
                behind = sent + appends + grower.written - len(Arrivals.at)
                busy_per_second = (grower.written - behind - before) / (time.perf_counter() - begin)
                sent += grower.stop()
            _wait_for(sent + appends)
            result = running.stop()
    if result.returncode:
        raise RowError(f"shipper ended with exit code {result.returncode}: {result.stderr[-500:]}")
    if Arrivals.repeated or len(Arrivals.at) != sent + appends:
        raise RowError(f"wrong count: {len(Arrivals.at):,} of {sent + appends:,} arrived, {Arrivals.repeated:,} twice")
    ordered = sorted(late_ms)
    p99 = ordered[ceil(0.99 * appends) - 1]  # an observed value: of 20 it is the worst
    figures |= {"p50_ms": median(ordered), "p99_ms": p99, "worst_ms": ordered[-1]}
    figures |= {"rest_percent": rest_percent, "rest_mib": rest_mib}
    figures |= {"busy_per_second": busy_per_second, "behind": behind}
    return files + 1 + appends, figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.tail", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", default="1,1000,10000", help="number of finished files (%(default)s)")
    parser.add_argument("--appends", type=int, default=100, help="number of appends, one after the other (%(default)s)")
    parser.add_argument(
        "--rest-seconds", type=float, default=10.0, help="duration of the idle phase, 0 = none (%(default)g)"
    )
    parser.add_argument("--busy", action="store_true", help="let another file grow meanwhile")
    parser.add_argument("--json", action="store_true", help="print the output of a benchmark row")
    args = parser.parse_args()
    for files in map(int, args.files.split(",")):
        begin = time.perf_counter()
        try:
            accepted, figures = measure(files, args.appends, args.rest_seconds, is_busy=args.busy)
        except (RowError, AssertionError) as error:
            sys.exit(str(error))
        if args.json:
            print(json.dumps({"accepted": accepted, "seconds": time.perf_counter() - begin, "figures": figures}))
        else:
            shown = ", ".join(f"{name} {value:,.1f}" for name, value in figures.items() if value is not None)
            print(f"{files:>7,} files: {shown}", flush=True)


if __name__ == "__main__":
    main()
