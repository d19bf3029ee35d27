"""
What following costs and how late it is: `shipper run` at rest and at work, beside a service that notes what comes when.

    python -m tests.bench.tail                     # 1, 1,000 and 10,000 finished files beside one live file
    python -m tests.bench.tail --files 1 --busy    # the live file's events while another file grows at 20,000 a second

Latency is from the append to the service, without `batch.linger_seconds`. At rest: share of one core, and memory.
The rows `tail-…` and `idle-…` are this with `--json`; see `FOLLOWING` in `rows.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median

from .measure import RowError, clean_environment
from .rows import SHIPPER, sample_file, write_config

LINGER_S = 0.05
BUSY_EVENTS_PER_SECOND = 20_000
_STEPS_PER_SECOND = 50  # in which the busy file grows
_SETTLE_S = 12.0  # from the last arrival to being at rest, when looks become rarer, too
_LIMIT_S = 60.0
_EVENT_ID = re.compile(rb'"EventId":"([^"]+)"')


@dataclass
class Figures:
    """What was seen; None is not measured."""

    p50_ms: float  # from the append to the service, beyond the linger
    p99_ms: float
    worst_ms: float
    help_ms: float  # `shipper --help`
    start_ms: float  # from the start of `shipper run` to the first request, beyond the linger
    rest_percent: float | None  # of one core
    rest_mib: int | None
    busy_per_second: float | None  # events of the other file that came, while the appends went on
    behind: int | None  # events of the other file that had not yet come at the last append's arrival

    def describe(self) -> str:
        """Return it as the end of a line."""
        rest = "" if self.rest_percent is None else f"at rest {self.rest_percent:.1f}% of a core, {self.rest_mib} MiB; "
        busy = "" if self.busy_per_second is None else f"another file's {self.busy_per_second:,.0f} events/s; "
        late = f"p50 {self.p50_ms:.0f} ms, p99 {self.p99_ms:.0f} ms, worst {self.worst_ms:.0f} ms"
        return f"{rest}{busy}beyond the linger {late}"


class Service:
    """Accepts everything, and remembers when each EventId came."""

    def __init__(self) -> None:
        self.arrived: dict[bytes, float] = {}
        self.repeated = 0  # none is sent again while nothing fails
        self.port = 0
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen on loopback."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=1 << 21)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                now = time.perf_counter()
                event_ids = _EVENT_ID.findall(body)
                known = len(self.arrived)
                self.arrived.update(dict.fromkeys(event_ids, now))
                self.repeated += known + len(event_ids) - len(self.arrived)
                self._news.set()
                answer = json.dumps({"accepted": len(event_ids), "duplicates": 0, "rejected": []}).encode()
                writer.write(
                    b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(answer), answer)
                )

    async def arrival_of(self, line: bytes) -> float:
        """Wait for an event; tells when it came."""
        [event_id] = _EVENT_ID.findall(line)
        async with asyncio.timeout(_LIMIT_S):
            while event_id not in self.arrived:
                self._news.clear()
                await self._news.wait()
        return self.arrived[event_id]

    async def first(self) -> float:
        """Wait for the first event; tells when it came."""
        await self.has(1)
        return min(self.arrived.values())

    async def has(self, events: int) -> None:
        """Wait until so many have come."""
        async with asyncio.timeout(_LIMIT_S):
            while len(self.arrived) < events:
                self._news.clear()
                await self._news.wait()


def fresh_events(sample: Path) -> Iterator[bytes]:
    """The lines of the sample over and over, each time with EventIds of its own."""
    with sample.open("rb") as file:
        parts = [_EVENT_ID.split(line) for line in itertools.islice(file, 20_000)]
    numbers = itertools.count()
    for before, _, after in itertools.cycle(parts):
        yield b'%b"EventId":"%08x-0000-4000-8000-000000000000"%b' % (before, next(numbers), after)


class Grower:
    """Appends so many events a second to a file, as far as the machine can, until it is cancelled."""

    def __init__(self, path: Path, events: Iterator[bytes], service: Service) -> None:
        self.appended = 0
        self._path = path
        self._events = events
        self._service = service
        self._arrived_before = len(service.arrived)
        self._begin = time.perf_counter()

    async def run(self) -> None:
        """Append, a fiftieth of a second's events at a time."""
        step = BUSY_EVENTS_PER_SECOND // _STEPS_PER_SECOND
        with self._path.open("ab", buffering=0) as out:
            for number in itertools.count(1):
                out.write(b"".join(itertools.islice(self._events, step)))
                self.appended += step
                await asyncio.sleep(max(0.0, self._begin + number / _STEPS_PER_SECOND - time.perf_counter()))

    def figures(self, appends: int) -> tuple[float, int]:
        """Return how many of them came in a second, and how many have not come; `appends` went to the live file."""
        came = len(self._service.arrived) - self._arrived_before - appends
        return came / (time.perf_counter() - self._begin), self.appended - came


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _help_ms() -> float:
    """How long `shipper --help` takes, the median of a few."""
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        process = await asyncio.create_subprocess_exec(str(SHIPPER), "--help", stdout=asyncio.subprocess.DEVNULL)
        await process.wait()
        taken.append((time.perf_counter() - begin) * 1000)
    return median(taken)


def _rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@asynccontextmanager
async def running_shipper(config: Path, errors: Path) -> AsyncIterator[int]:
    """Start `shipper run` on the core of this process, which moves to the others. Yields its process id."""
    with errors.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            *(str(SHIPPER), "run", "--config", str(config)),
            env=clean_environment(),
            stderr=err,
        )
    if others := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
        os.sched_setaffinity(0, others)
    try:
        yield process.pid
    except TimeoutError:
        raise RowError(f"an event did not come within {_LIMIT_S:g} s: {errors.read_text()[-500:]}") from None
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        exit_code = await process.wait()
    if exit_code:
        raise RowError(f"shipper ended with exit code {exit_code}: {errors.read_text()[-500:]}")


def _prepare(folder: Path, events: Iterator[bytes], files: int) -> list[bytes]:
    """Write the finished files, an hour old, and the live one, an event each; returns those."""
    lines = list(itertools.islice(events, files + 1))
    folder.mkdir()
    for number, line in enumerate(lines[:-1]):
        path = folder / f"{number}.ndjson"
        path.write_bytes(line)
        os.utime(path, (time.time() - 3600,) * 2)
    (folder / "live.ndjson").write_bytes(lines[-1])
    return lines


async def measure(sample: Path, files: int, appends: int, rest_s: float, *, is_busy: bool) -> tuple[int, Figures]:
    """Follow one live file among `files`. Returns the number of events that came to these, and what was seen."""
    service = Service()
    events = fresh_events(sample)
    late_ms: list[float] = []
    rest_percent = rest_mib = grower = growing = None
    chance = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="shipper-tail-") as name:
        directory = Path(name)
        folder = directory / "logs"
        prepared = _prepare(folder, events, files)
        async with service.running():
            config = write_config(
                f"http://127.0.0.1:{service.port}",
                directory,
                f"[batch]\nlinger_seconds = {LINGER_S}\n[input]\ninclude = [{json.dumps(f'{folder}/*.ndjson')}]\n"
                '[admin]\nlisten = "127.0.0.1:0"\n',
            )
            help_ms = await _help_ms()
            started_at = time.perf_counter()
            async with running_shipper(config, directory / "errors") as pid:
                start_ms = (await service.first() - started_at - LINGER_S) * 1000
                await service.has(len(prepared))
                await asyncio.sleep(_SETTLE_S)
                if rest_s:
                    used_s, begin = _cpu_s(pid), time.perf_counter()
                    await asyncio.sleep(rest_s)
                    rest_percent = (_cpu_s(pid) - used_s) / (time.perf_counter() - begin) * 100
                    rest_mib = _rss_mib(pid)
                if is_busy:
                    grower = Grower(folder / "busy.ndjson", events, service)
                    growing = asyncio.create_task(grower.run())
                    await asyncio.sleep(1)
                for _ in range(appends):
                    # At any time between two looks, commits and steps of the busy file.
                    await asyncio.sleep(chance.uniform(0.05, 0.15))
                    line = next(events)
                    appended_at = time.perf_counter()
                    with (folder / "live.ndjson").open("ab") as out:
                        out.write(line)
                    late_ms.append((await service.arrival_of(line) - appended_at - LINGER_S) * 1000)
                busy_per_second, behind = grower.figures(appends) if grower else (None, None)
                if growing is not None:
                    growing.cancel()
                sent = len(prepared) + appends + (grower.appended if grower else 0)
                await service.has(sent)
    if service.repeated:
        raise RowError(f"wrong count: {service.repeated:,} events came twice")
    if len(service.arrived) != sent:
        raise RowError(f"wrong count: {len(service.arrived):,} of {sent:,} events came")
    ordered = sorted(late_ms)
    p99 = ordered[ceil(0.99 * appends) - 1]  # one that was seen: of 20 it is the worst
    figures = Figures(
        median(ordered), p99, ordered[-1], help_ms, start_ms, rest_percent, rest_mib, busy_per_second, behind
    )
    return len(prepared) + appends, figures


def main() -> None:
    """Measure, and print a line for each number of files."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.tail", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", default="1,1000,10000", help="finished files beside the live one (%(default)s)")
    parser.add_argument("--appends", type=int, default=100, help="how many, one after the other (%(default)s)")
    parser.add_argument("--rest-seconds", type=float, default=10.0, help="how long the rest is, 0: none (%(default)g)")
    parser.add_argument("--busy", action="store_true", help="another file grows meanwhile")
    parser.add_argument("--sample", type=Path, metavar="FILE", help="events to take, made if not given")
    parser.add_argument("--json", action="store_true", help="print what a row of the benchmark prints")
    args = parser.parse_args()
    if args.appends < 1:
        parser.error("--appends starts at 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `shipper` is ended, too
    sample = args.sample or sample_file(20_000)
    for files in map(int, args.files.split(",")):
        begin = time.perf_counter()
        try:
            accepted, figures = asyncio.run(measure(sample, files, args.appends, args.rest_seconds, is_busy=args.busy))
        except RowError as error:
            sys.exit(str(error))
        if args.json:
            seconds = time.perf_counter() - begin
            print(json.dumps({"accepted": accepted, "seconds": seconds, "figures": asdict(figures)}), flush=True)
        else:
            print(f"{files:>7,} files: {figures.describe()} of {args.appends} appends", flush=True)


if __name__ == "__main__":
    sys.exit(main())
