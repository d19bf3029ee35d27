"""
Runs one row as a process of its own and says what it cost; runs the server beside it.

This process must stay small: Linux starts a child's peak memory at that of the process it was forked from.
Hence no HTTP library here, and nothing that reads the sample file as a whole.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROW_LIMIT_SECONDS = 900
MANNERS = ("plain", "slow", "faulty", "picky", "tls")  # in which the server answers, each on a port of its own
CA_FILE = ROOT / ".bench" / "ca.pem"  # of the server that speaks TLS
DEAD_LETTERS, LEDGER = "dead-letters", "ledger"  # topics of all groups
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


class RowError(Exception):
    """A row could not be run, or its count is wrong; the text says which."""


@dataclass
class Pinning:
    """How a command is put on a core of its own; empty prefixes if that is not possible here."""

    row: list[str]
    server: list[str]

    def describe(self) -> str:
        """Return where the rows and the server run."""
        if not self.row:
            return "not pinned (needs taskset and two cores)"
        return f"rows on core {self.row[-1]}, server on core {self.server[-1]}"


@dataclass
class Measurement:
    """What one run of one row cost."""

    wall_seconds: float  # from the start of the process to its end
    inner_seconds: float  # as the process itself tells, without its start
    cpu_seconds: float  # user and system, with all children
    peak_rss_bytes: int
    server_cpu_seconds: float
    requests: int
    events: int
    figures: dict[str, float | None]  # what a row has found out besides


def find_pinning() -> Pinning:
    """Assign the rows the first core that this process may use and the server the second one."""
    taskset = shutil.which("taskset")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if taskset is None or len(cores) < 2:
        return Pinning([], [])
    row, server = ([taskset, "-c", str(core)] for core in cores[:2])
    works = all(subprocess.run([*pin, "true"], capture_output=True).returncode == 0 for pin in (row, server))
    return Pinning(row, server) if works else Pinning([], [])


def clean_environment() -> dict[str, str]:
    """The environment without what would lead a row elsewhere: proxies and settings of `shipper`."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and (not name.startswith("SHIPPER_") or name == "SHIPPER_NATIVE")
    }


class Server:
    """The running blackhole, seen from here."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        self.port = ports["plain"]
        self.urls = {
            manner: f"{'https' if manner == 'tls' else 'http'}://127.0.0.1:{port}" for manner, port in ports.items()
        }

    def reset(self) -> None:
        """Set its counts to nought."""
        self._ask("POST", "/reset")

    def counts(self) -> dict[str, Any]:
        """Fetch what it has taken since the last reset."""
        return self._ask("GET", "/counts")

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()


@contextmanager
def running_server(pin: Sequence[str], latency_ms: float) -> Iterator[Server]:
    """Start the blackhole on a free port; end it on the way out."""
    command = [
        *pin,
        sys.executable,
        "-m",
        "tests.bench.blackhole",
        "--port",
        "0",
        "--latency-ms",
        str(latency_ms),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ports = process.stdout.readline().split()
            if not ports:
                raise RowError("the server did not start")
            yield Server(dict(zip(MANNERS, map(int, ports), strict=True)))
        finally:
            process.terminate()


@contextmanager
def running_broker(pin: Sequence[str], samples: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """
    Start a broker that has samples as topics; end it on the way out.

    Returns:
        Its address, and why there is none.
    """
    with tempfile.TemporaryDirectory(prefix="shipper-bench-") as directory:
        command = [*pin, sys.executable, "-m", "tests.bench.topics", directory, *map(str, samples)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            try:
                yield ("", line or "the broker did not start") if " " in line or not line else (line, "")
            finally:
                process.stdin.close()


def run_row(command: Sequence[str], *, events: int, server: Server, sends: bool) -> Measurement:
    """
    Run a command to its end and hold its counts against the truth.

    Args:
        command: Prints a JSON object with `accepted` and `seconds` as the last line of its standard output, and
            `cpu_seconds` and `peak_rss_bytes`, if they are not those of all its processes.
        events: How many events it has to get accepted.
        sends: The events must also have arrived at the server.
    Raises:
        RowError: It failed, did not end, or did not account for exactly `events` events.
    """
    server.reset()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        limit = threading.Timer(ROW_LIMIT_SECONDS, process.kill)
        limit.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # Popen.wait() would keep no account of the child
            wall_seconds = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            limit.cancel()
        out_line, err_line = _last_line(out), _last_line(err)
    if process.returncode:
        raise RowError(f"exit code {process.returncode}: {err_line or out_line or 'no output'}")

    summary = _summary(out_line)
    counts = server.counts()
    if summary["accepted"] != events:
        raise RowError(f"wrong count: {summary['accepted']:,} of {events:,} events accepted")
    if sends and counts["events"] != events:
        raise RowError(f"wrong count: {counts['events']:,} of {events:,} events arrived at the server")
    return Measurement(
        wall_seconds=wall_seconds,
        inner_seconds=summary["seconds"],
        cpu_seconds=summary.get("cpu_seconds", usage.ru_utime + usage.ru_stime),
        peak_rss_bytes=summary.get("peak_rss_bytes", usage.ru_maxrss * RSS_UNIT),
        server_cpu_seconds=counts["cpu_seconds"],
        requests=counts["requests"],
        events=events,
        figures=summary.get("figures", {}),
    )


def lines_of(path: Path) -> int:
    """Count the lines of a file, a block at a time."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _last_line(file: Any) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _summary(line: str) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads(line)
        summary["accepted"], summary["seconds"]
    except (ValueError, TypeError, KeyError):
        raise RowError(f"the last line of its output is no summary: {line[:80]!r}") from None
    return summary
