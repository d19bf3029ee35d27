"""
Run a row as a separate process and measure it; run the server.

This process must stay small, because Linux initialises the peak memory of a child with that of its parent. So this
module imports no HTTP library and never reads the whole sample file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.processes import ROOT, Server, clean_environment, running_program

ROW_LIMIT_SECONDS = 900
MODES = ("plain", "slow", "faulty", "picky", "tls")  # of the server, each on a port of its own
DEAD_LETTERS = "dead-letters"  # topic of all groups
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


class RowError(Exception):
    """A row could not be run, or its count is wrong."""


class Pinning(NamedTuple):
    """Command prefixes that pin a process to a core; empty if that is not possible here."""

    row: list[str]
    server: list[str]

    def describe(self) -> str:
        if not self.row:
            return "not pinned (needs taskset and two cores)"
        return f"rows on core {self.row[-1]}, server on core {self.server[-1]}"


class Measurement(NamedTuple):
    """
    One run of one row.

    Attributes:
        wall_seconds: From the start of the process to its end.
        inner_seconds: As reported by the process, without its start.
        cpu_seconds: User and system time, including all children.
        figures: Other measurements of the row.
    """

    wall_seconds: float
    inner_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    server_cpu_seconds: float
    requests: int
    events: int
    figures: dict[str, float | None]


def find_pinning() -> Pinning:
    """Assign the first usable core to the rows and the second one to the server."""
    taskset = shutil.which("taskset")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if taskset is None or len(cores) < 2:
        return Pinning([], [])
    row, server = ([taskset, "-c", str(core)] for core in cores[:2])
    works = all(subprocess.run([*pin, "true"], capture_output=True).returncode == 0 for pin in (row, server))
    return Pinning(row, server) if works else Pinning([], [])


class BlackholeServer(Server):
    """
    The running blackhole.

    Attributes:
        urls: By mode.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        super().__init__(ports["plain"])
        self.urls = {mode: f"{'https' if mode == 'tls' else 'http'}://127.0.0.1:{port}" for mode, port in ports.items()}

    def counts(self) -> dict[str, Any]:
        """Return the counts since the last reset."""
        return self.ask("GET", "/counts")


@contextmanager
def running_server(pin: Sequence[str] = (), latency_ms: float = 0.0) -> Iterator[BlackholeServer]:
    with running_program("tests.bench.blackhole", "--latency-ms", str(latency_ms), pin=pin) as line:
        if not line:
            raise RowError("the server did not start")
        yield BlackholeServer(dict(zip(MODES, map(int, line.split()), strict=True)))


def run_row(command: Sequence[str], *, events: int, server: BlackholeServer, sends: bool) -> Measurement:
    """
    Run a command to its end, and check its counts.

    Args:
        command: Prints a JSON object with `accepted` and `seconds` as the last line of its standard output, and
            `cpu_seconds` and `peak_rss_bytes`, if they are not those of all its processes.
        events: Number of events that must be accepted.
        sends: Whether the events must have arrived at the server.
    Raises:
        RowError: It failed, did not end, or did not account for exactly `events` events.
    """
    server.ask("POST", "/reset")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        limit = threading.Timer(ROW_LIMIT_SECONDS, process.kill)
        limit.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)  # Popen.wait() would not return the resource usage
            wall_seconds = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            limit.cancel()
        out_line, err_line = _last_line(out), _last_line(err)
    if process.returncode:
        raise RowError(f"exit code {process.returncode}: {err_line or out_line or 'no output'}")
    try:
        summary = json.loads(out_line)
        accepted, seconds = summary["accepted"], summary["seconds"]
    except (ValueError, TypeError, KeyError):
        raise RowError(f"the last line of the output is not a summary: {out_line[:80]!r}") from None
    counts = server.counts()
    if accepted != events:
        raise RowError(f"wrong count: {accepted:,} of {events:,} events accepted")
    if sends and counts["events"] != events:
        raise RowError(f"wrong count: {counts['events']:,} of {events:,} events arrived at the server")
    return Measurement(
        wall_seconds=wall_seconds,
        inner_seconds=seconds,
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
