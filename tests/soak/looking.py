"""What can be seen of a running shipper from outside: /proc, its state directory, its log, and `/metrics`."""

from __future__ import annotations

import http.client
import os
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_ANSWER_LIMIT_S: Final = 60  # of a machine that is busy

Look = dict[str, float]  # the curves of one moment, by name; a name of `flatness.CURVES`


def look_at_process(pid: int) -> Look:
    """Read memory, descriptors, threads and CPU seconds of a process."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "rss_mib": int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES / MIB,
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
        "cpu_s": (int(user) + int(system)) / _TICKS_PER_S,
    }


def look_at_state(directory: Path) -> Look:
    """Read what the files of a state directory take."""
    return {
        "database_mib": _size(directory / "state.db") / MIB,
        "wal_mib": _size(directory / "state.db-wal") / MIB,
        "shm_kib": _size(directory / "state.db-shm") / 1024,
        "live_bytes": _size(directory / "live.json"),
        "spool_mib": sum(map(_size, (directory / "spool").glob("*"))) / MIB,
    }


def look_at_metrics(port: int) -> Look:
    """Ask the admin address; what has labels is summed up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_LIMIT_S)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    sums: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums[name.partition("{")[0].removeprefix("shipper_").removesuffix("_total")] += float(value)
    return {
        "read": sums["records_read"],
        "accepted": sums["events_accepted"],
        "dead_lettered": sums["dead_letters"],
        "duplicates": sums["duplicates"],
        "pending": sums["pending_records"],
        "in_flight": sums["in_flight_requests"],
        "streams": sums["streams"],
        "lag_mib": sums["lag_bytes"] / MIB,
        "dead_letter_mib": sums["dead_letter_bytes"] / MIB,
        "retries": sums["retries"],
        "paused": sums["paused"],
    }


class Rates:
    """
    Makes rates of what only adds up, over a while.

    Args:
        window_s: As long as a cycle of the service's, so that each holds one outage.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._looks: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, at: float, look: Look) -> None:
        """Add the rates to a look; none, as long as the window is not full."""
        self._looks.append((at, look.copy()))
        while len(self._looks) > 2 and self._looks[1][0] <= at - self._window_s:
            self._looks.popleft()
        then, before = self._looks[0]
        passed_s, accepted = at - then, look["accepted"] - before["accepted"]
        if passed_s >= self._window_s and accepted:
            look["records_per_s"] = accepted / passed_s
            look["cpu_s_per_million"] = (look["cpu_s"] - before["cpu_s"]) / accepted * 1e6
            look["log_kib_per_minute"] = (look["log_bytes"] - before["log_bytes"]) / 1024 / passed_s * 60


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
