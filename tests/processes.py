"""Helper programs of the harnesses, and figures of a process from Linux. Imports little to keep the benchmark small."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
SHIPPER: Final = Path(sys.executable).with_name("shipper")


def memory_bytes(pid: int, name: str = "VmRSS") -> int:
    """Return the memory of a process, or its peak if `name` is `VmHWM`; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def read_bytes(pid: int) -> int:
    """Return the number of bytes a process has read."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def leave_core() -> None:
    """Move this process off the core that its children are pinned to, if it is pinned there."""
    if others := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
        os.sched_setaffinity(0, others)


def clean_environment() -> dict[str, str]:
    """Return the environment without proxies and without settings for `shipper`."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and (not name.startswith("SHIPPER_") or name == "SHIPPER_NATIVE")
    }


@contextmanager
def running_program(module: str, *arguments: str, pin: Sequence[str] = ()) -> Iterator[str]:
    """Run `python -m MODULE` until the block ends; yield the first line of its output."""
    command = [*pin, sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


class Server:
    """A server on loopback that answers in JSON."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()
