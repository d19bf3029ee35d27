"""
Rows of other shippers, if they are installed: `python -m tests.bench.peers NAME FILE URL DIRECTORY`.

They are configured as `docs/performance.md` shows, from which the configuration is taken. The time is that from the
start of the process to the arrival of the last event; then it is ended, because it would wait for more.
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

from .measure import ROOT, RSS_UNIT, RowError, Server, lines_of

PEERS: Final = {  # name in the table: the program, and its arguments
    "fluent-bit": ("fluent-bit", "-c CONFIG"),
    "fluent-bit-file": ("fluent-bit", "-c CONFIG"),
    "syslog-ng": (
        "syslog-ng",
        "-F --no-caps -f CONFIG -R STATE/persist -p STATE/pid -c STATE/control",
    ),
    "rsyslog": ("rsyslogd", "-n -f CONFIG -i STATE/pid"),
}
_PAGE: Final = ROOT / "docs" / "performance.md"
_STILL_S: Final = 20.0  # so long nothing arrives before it is given up
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
    """Return the version that a peer tells, or why there is none."""
    try:
        option = "-v" if name == "rsyslog" else "--version"
        done = subprocess.run([program(name), option], capture_output=True, text=True, timeout=10)
        return next(iter((done.stdout + done.stderr).splitlines()), "says no version")
    except RowError as error:
        return str(error)


def configuration(name: str, **values: object) -> str:
    """Take the block of a peer from the documentation, and replace the words in capitals."""
    found = re.search(rf"<!-- {name} -->\n+```\w*\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    assert found, f"{_PAGE} does not show how {name} is configured"
    return re.sub(r"\b(FILE|PORT|STATE)\b", lambda word: str(values[word[0]]), found[1])


def main() -> None:
    """Run a peer until all has arrived, and print what it cost."""
    name, sample, url, folder = sys.argv[1:]
    port = urlsplit(url).port
    assert port
    server, events = Server({"plain": port}), lines_of(Path(sample))
    config = Path(folder, f"{name}.{'yaml' if name.startswith('fluent-bit') else 'conf'}")
    config.write_text(configuration(name, FILE=sample, PORT=port, STATE=folder))
    arguments = PEERS[name][1].replace("CONFIG", str(config)).replace("STATE", folder)
    with Path(folder, "output").open("w+b") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [program(name), *arguments.split()], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        # This process looks from another core than the one where the peer is.
        if others := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
            os.sched_setaffinity(0, others)
        arrived, seconds = _until_all_has_arrived(server, events, begin, process)
        os.kill(process.pid, signal.SIGTERM)  # `terminate` would take note of its end, and keep no account
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
    server: Server, events: int, begin: float, process: subprocess.Popen[bytes]
) -> tuple[int, float]:
    arrived, changed = 0, begin
    while arrived < events and time.perf_counter() < changed + _STILL_S:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break  # it has ended by itself
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
