"""
Row `report`: a year of twenty accounts by day; `python -m tests.bench.report_row [--concurrency N]`.

The whole command against a server in another process that answers each request after a while with a report of fifteen
marketing sources. The ratio is that of the seconds to requests x latency / concurrency, below which nothing can be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import uvloop

from shipper.model import wire
from tests.report_documents import seeded

from .rows import SHIPPER

FIRST_DAY = date(2025, 1, 1)
TARGET_RATIO = 1.3
_REQUEST = re.compile(rb"GET /dpm/v1/dar/(\d+)/([\d-]{10})/([\d-]{10}) ")


def template() -> bytes:
    """Make a report of a day; account and period are to be filled in."""
    balance = Decimal("1234.5600")  # the next day opens with it
    day = date(2026, 1, 9)
    body = wire.encode_report(seeded(day, day, opening_balance=balance, outgoing_balance=balance))
    return body.replace(b"%", b"%%").replace(b":1001,", b":%d,").replace(b"2026-01-09", b"%b")


async def serve(latency_s: float) -> None:
    """Answer until the process is ended; prints the port first."""
    form = template()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            asked = _REQUEST.match(head)
            assert asked is not None, head
            await asyncio.sleep(latency_s)
            body = form % (int(asked[1]), asked[2], asked[3])
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def measure(args: argparse.Namespace, port: str) -> dict[str, object]:
    """Run the command once."""
    last = FIRST_DAY + timedelta(days=args.days - 1)
    with tempfile.TemporaryDirectory(prefix="shipper-bench-") as folder:
        accounts, out = Path(folder, "accounts"), Path(folder, "out")
        accounts.write_text("".join(f"{1001 + number}\n" for number in range(args.accounts)))
        settings = {
            "report.base_url": f"http://127.0.0.1:{port}",
            "report.subscription_key": "key",
            "report.token": "token",
            "state.directory": f"{folder}/state",
        }
        verb = ["fetch"] if args.fetch else ["--format", "csv"]
        command = [str(SHIPPER), "report", *verb, str(FIRST_DAY), str(last), "--accounts-file", str(accounts)]
        command += ["--split", "day", "--concurrency", str(args.concurrency), "--log-level", "error"]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        begin = time.perf_counter()
        with out.open("wb") as stdout:
            subprocess.run(command, stdout=stdout, check=True, cwd=folder)
        seconds = time.perf_counter() - begin
        lines = out.read_bytes().count(b"\n")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    requests = args.accounts * args.days
    floor = requests * args.latency_ms / 1000 / args.concurrency
    return {
        "requests": requests,
        "lines": lines,
        "seconds": round(seconds, 2),
        "floor_seconds": round(floor, 2),
        "ratio": round(seconds / floor, 3),
        "cpu_ms_per_report": round((usage.ru_utime + usage.ru_stime) / requests * 1000, 2),
        "peak_mb": usage.ru_maxrss >> 10,
    }


def main() -> None:
    """Serve, fetch, print what it took. Exit code 1 if the ratio is above the target."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.report_row", description=__doc__)
    parser.add_argument("--accounts", type=int, default=20)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fetch", action="store_true", help="keep them in a history instead of writing CSV")
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.latency_ms / 1000))
        return
    server = [sys.executable, "-m", "tests.bench.report_row", "--serve", "--latency-ms", str(args.latency_ms)]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            measured = measure(args, process.stdout.readline().strip())
        finally:
            process.terminate()
    print(json.dumps(measured))
    ratio = measured["ratio"]
    assert isinstance(ratio, float)
    sys.exit(ratio > TARGET_RATIO)


if __name__ == "__main__":
    main()
