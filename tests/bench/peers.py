"""
Rows of other shippers that are installed: `python -m tests.bench.peers NAME FILE URL DIRECTORY`.

Their configuration is taken from `docs/performance.md`. The time is measured from the start of the process to the
arrival of the last event; then the process is terminated, because it would wait for more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.bench.measure import RSS_UNIT, BlackholeServer, RowError, lines_of
from tests.processes import ROOT, leave_core

PEERS: Final = {  # by name in the table: the program and its arguments
    "fluent-bit": ("fluent-bit", "-c CONFIG"),
    "fluent-bit-file": ("fluent-bit", "-c CONFIG"),
    "syslog-ng": (
        "syslog-ng",
        "-F --no-caps -f CONFIG -R STATE/persist -p STATE/pid -c STATE/control",
    ),
    "rsyslog": ("rsyslogd", "-n -f CONFIG -i STATE/pid"),
}
_PAGE: Final = ROOT / "docs" / "performance.md"
_STILL_S: Final = 20.0  # without arrivals before the run fails
_LOOK_S: Final = 0.02


def program(name: str) -> str:
    """
    Find the program of a peer; FLUENT_BIT, SYSLOG_NG and RSYSLOGD in the environment name its path.

    Raises:
        RowError: It is not installed.
    """
    called, _ = PEERS[name]
    variable = called.upper().replace("-", "_")
    path = os.environ.get(variable) or shutil.which(called, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise RowError(f"{called} is not installed; {variable}=/path/to/{called} names it")
    return path


def release(name: str) -> str:
    """Return the version reported by a peer, or why there is none."""
    try:
        option = "-v" if name == "rsyslog" else "--version"
        done = subprocess.run([program(name), option], capture_output=True, text=True, timeout=10)
        return next(iter((done.stdout + done.stderr).splitlines()), "says no version")
    except RowError as error:
        return str(error)


def configuration(name: str, **values: object) -> str:
    """Return the configuration of a peer from the documentation, with the words in capitals replaced."""
    found = re.search(rf"<!-- {name} -->\n+```\w*\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    assert found, f"{_PAGE} has no configuration of {name}"
    return re.sub(r"\b(FILE|PORT|STATE)\b", lambda word: str(values[word[0]]), found[1])


def main() -> None:
    """Run a peer until everything has arrived, and print its resource usage."""
    name, sample, url, folder = sys.argv[1:]
    port = urlsplit(url).port
    assert port
    server, events = BlackholeServer({"plain": port}), lines_of(Path(sample))
    config = Path(folder, f"{name}.{'yaml' if name.startswith('fluent-bit') else 'conf'}")
    config.write_text(configuration(name, FILE=sample, PORT=port, STATE=folder))
    arguments = PEERS[name][1].replace("CONFIG", str(config)).replace("STATE", folder)
    with Path(folder, "output").open("w+b") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [program(name), *arguments.split()], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        leave_core()
        arrived, seconds = _until_all_has_arrived(server, events, begin, process)
        os.kill(process.pid, signal.SIGTERM)  # `terminate` could reap the process and lose its resource usage
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
        if arrived < events:
            output.seek(0)
            sys.exit(f"{arrived:,} of {events:,} events arrived: {output.read().decode(errors='replace')[-500:]}")
    print(
        json.dumps(
            {
                "accepted": arrived,
                "seconds": seconds,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_rss_bytes": usage.ru_maxrss * RSS_UNIT,
            }
        )
    )


def _until_all_has_arrived(
    server: BlackholeServer, events: int, begin: float, process: subprocess.Popen[bytes]
) -> tuple[int, float]:
    arrived, changed = 0, begin
    while arrived < events and time.perf_counter() < changed + _STILL_S:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break  # it has already ended
        time.sleep(_LOOK_S)
        now = server.counts()["events"]
        if now != arrived:
            arrived, changed = now, time.perf_counter()
    return arrived, changed - begin


if __name__ == "__main__":
    try:
        main()
    except RowError as error:
        sys.exit(str(error))
