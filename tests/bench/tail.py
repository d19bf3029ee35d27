"""
What following costs and how late it is: `shipper run` at rest and at work, beside a service that notes what comes when.

    python -m tests.bench.tail                     # 1, 1,000 and 10,000 finished files beside one live file
    python -m tests.bench.tail --files 1 --busy    # the live file's events while another file grows at 20,000 a second

Latency is from the append to the service, without `batch.linger_seconds`. At rest: share of one core, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import quantiles

from .measure import clean_environment
from .rows import SHIPPER, sample_file

LINGER_S = 0.05
REST_S = 10.0
BUSY_EVENTS_PER_SECOND = 20_000
_LIMIT_S = 120.0


class Service:
    """Accepts everything, and remembers when each EventId came."""

    def __init__(self) -> None:
        self.arrived: dict[str, float] = {}
        self._news = asyncio.Event()

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._answer, "127.0.0.1", 0)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = await reader.readexactly(length)
                now = time.perf_counter()
                events = json.loads(body)["events"]
                self.arrived.update((event["EventId"], now) for event in events)
                self._news.set()
                answer = json.dumps({"accepted": len(events), "duplicates": 0, "rejected": []}).encode()
                writer.write(
                    b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n%b" % (len(answer), answer)
                )

    async def arrival_of(self, line: bytes) -> float:
        """Wait for an event; tells when it came."""
        event_id = json.loads(line)["EventId"]
        async with asyncio.timeout(_LIMIT_S):
            while event_id not in self.arrived:
                self._news.clear()
                await self._news.wait()
        return self.arrived[event_id]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


async def _grow(path: Path, lines: list[bytes]) -> None:
    """Append so many a second, a tenth of it at a time."""
    step = BUSY_EVENTS_PER_SECOND // 10
    begin = time.perf_counter()
    for number, start in enumerate(range(0, len(lines), step), 1):
        with path.open("ab") as out:
            out.write(b"".join(lines[start : start + step]))
        await asyncio.sleep(max(0.0, begin + number / 10 - time.perf_counter()))


async def measure(files: int, appends: int, *, is_busy: bool) -> str:
    """Follow one live file among `files`; returns a line of the table."""
    with sample_file(500_000).open("rb") as sample:
        lines = list(islice(sample, files + appends + 300_000 * is_busy))
    live_lines = lines[files : files + appends]
    service = Service()
    server = await service.start()
    with tempfile.TemporaryDirectory(prefix="shipper-tail-") as name:
        folder = Path(name, "logs")
        folder.mkdir()
        for number in range(files):
            path = folder / f"{number}.ndjson"
            path.write_bytes(lines[number])
            os.utime(path, (time.time() - 3600,) * 2)
        config = Path(name, "shipper.toml")
        config.write_text(
            f'[intake]\nbase_url = "http://127.0.0.1:{server.sockets[0].getsockname()[1]}"\n'
            f'subscription_key = "bench"\ntoken = "bench"\n[batch]\nlinger_seconds = {LINGER_S}\n'
            f'[input]\ninclude = ["{folder}/*.ndjson"]\n[state]\ndirectory = "{name}/state"\n'
        )
        command = [str(SHIPPER), "run", "--config", str(config)]
        process = await asyncio.create_subprocess_exec(
            *command, env=clean_environment(), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            for line in lines[:files]:
                await service.arrival_of(line)
            await asyncio.sleep(2)
            used_s = _cpu_s(process.pid)
            await asyncio.sleep(REST_S)
            share = (_cpu_s(process.pid) - used_s) / REST_S
            rss = _rss_mib(process.pid)
            growing = asyncio.create_task(_grow(folder / "busy.ndjson", lines[files + appends :])) if is_busy else None
            late = []
            for line in live_lines:
                with (folder / "live.ndjson").open("ab") as out:
                    out.write(line)
                appended_at = time.perf_counter()
                late.append((await service.arrival_of(line) - appended_at - LINGER_S) * 1000)
                await asyncio.sleep(0.1)
            if growing is not None:
                growing.cancel()
        finally:
            process.terminate()
            await process.wait()
    server.close()
    cuts = quantiles(late, n=100)
    busy = f", another growing at {BUSY_EVENTS_PER_SECOND:,}/s" if is_busy else ""
    return (
        f"{files:>7,} files{busy}: at rest {share:.1%} of a core, {rss} MiB; beyond the linger "
        f"p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms of {appends} appends"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tail", description=__doc__)
    parser.add_argument("--files", default="1,1000,10000", help="finished files beside the live one (%(default)s)")
    parser.add_argument("--appends", type=int, default=100, help="how many, one after the other (%(default)s)")
    parser.add_argument("--busy", action="store_true", help="another file grows meanwhile")
    args = parser.parse_args()
    for files in map(int, args.files.split(",")):
        print(asyncio.run(measure(files, args.appends, is_busy=args.busy)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
