"""
How much is held, and how much is repeated, whatever the input: `python -m tests.soak.sparse --events 5000000`.

    sparse    `shipper backfill` of records that each need a ledger key of their own, at full speed: memory by million
    killed    the same, killed in the middle and started again: how many records arrive twice
    refused   records that are all refused here, behind a batch that is never answered: memory while nothing is settled
    full      the same where the dead letters have no room

Exit code 1 if a bound is broken, or if records are lost. Linux only, as it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from shipper.sandbox.samples import SampleProfile
from tests.bench.measure import Server, clean_environment, running_server
from tests.bench.rows import SHIPPER, sample_file, write_config

PEAK_MAX_BYTES: Final = 160_000_000
GROWTH_MAX: Final = 1.10  # of the last million over the first one
REPEATED_MAX: Final = 20_000
REFUSED_PEAK_MAX_BYTES: Final = 200_000_000
REFUSED: Final = 1_000_000
STILL_S: Final = 10.0  # so long no more is read before what is held is called still
MILLION: Final = 1_000_000
_LOOK_S: Final = 0.05
_NEVER_MS: Final = 3_600_000.0


class Look(NamedTuple):
    """At one moment: how many events have arrived, and the memory that is held."""

    events: int
    rss_bytes: int


@contextmanager
def backfill(server: Server, folder: Path, sample: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command with a state in `folder`; kill it on the way out, if it still runs."""
    config = write_config(server.urls["plain"], folder)
    command = [str(SHIPPER), "backfill", "--config", str(config), "--summary", "json", str(sample)]
    for setting in settings:
        command += ["--set", setting]
    with (
        (folder / "shipper.log").open("ab") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=clean_environment()) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def memory(pid: int, name: str) -> int:
    """Read a line of `/proc/PID/status`, in bytes; 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def sparse(sample: Path, events: int) -> Iterator[str]:
    """Ship to the end; yields the table, and words that begin with BROKEN for each bound that is."""
    looks: list[Look] = []
    with running_server([], 0.0) as server, tempfile.TemporaryDirectory(prefix="shipper-sparse-") as name:
        folder, peak, begin = Path(name), 0, time.monotonic()
        with backfill(server, folder, sample) as process:
            while process.poll() is None:
                looks.append(Look(server.counts()["events"], memory(process.pid, "VmRSS")))
                peak = max(peak, memory(process.pid, "VmHWM"))
                time.sleep(_LOOK_S)
            seconds = time.monotonic() - begin
            assert process.stdout is not None
            summary = json.loads(process.stdout.read().splitlines()[-1])
        arrived = server.counts()["events"]
        state = sum(path.stat().st_size for path in (folder / "state").rglob("*") if path.is_file())
    by_million = _peaks(looks, events)
    yield f"sparse    {events:,} records in {seconds:.1f} s, {events / seconds:,.0f} a second"
    yield "          peak RSS by million, MB: " + " ".join(f"{rss / MILLION:.0f}" for rss in by_million)
    yield f"          peak RSS {peak / MILLION:.0f} MB; state {state / MILLION:.1f} MB"
    if not summary["accepted"] == arrived == events:
        yield f"BROKEN    {summary['accepted']:,} accepted, {arrived:,} arrived"
    if peak > PEAK_MAX_BYTES:
        yield f"BROKEN    the peak is over {PEAK_MAX_BYTES / MILLION:.0f} MB"
    if by_million[-1] > by_million[0] * GROWTH_MAX:
        yield "BROKEN    memory grows"


def _peaks(looks: Sequence[Look], events: int) -> list[int]:
    """Find the most memory within each million of events; the last one may be a part."""
    count = max(1, -(-events // MILLION))
    peaks = [0] * count
    for look in looks:
        at = min(look.events // MILLION, count - 1)
        peaks[at] = max(peaks[at], look.rss_bytes)
    return peaks


def killed(sample: Path, events: int) -> Iterator[str]:
    """Kill in the middle, start again, and count what arrives twice."""
    with running_server([], 0.0) as server, tempfile.TemporaryDirectory(prefix="shipper-sparse-") as name:
        with backfill(server, Path(name), sample) as process:
            while server.counts()["events"] < events // 2 and process.poll() is None:
                time.sleep(0.01)
            process.kill()
            process.wait()
        time.sleep(0.5)  # what is under way arrives
        before = server.counts()["events"]
        with backfill(server, Path(name), sample) as process:
            status = process.wait()
        arrived = server.counts()["events"]
    yield f"killed    after {before:,} had arrived: {arrived - events:,} repeated"
    if status or arrived < events or not events // 2 <= before < events:
        yield f"BROKEN    the second run ended with {status}; {arrived:,} of {events:,} arrived, {before:,} at first"
    if arrived - events > REPEATED_MAX:
        yield f"BROKEN    more than {REPEATED_MAX:,} are repeated"


def refused(directory: Path, *, is_full: bool) -> Iterator[str]:
    """Read what is refused here while nothing can be settled, until no more is read; yields as `sparse` does."""
    sample = directory / "refused.ndjson"
    with sample_file(REFUSED).open("rb") as lines, sample.open("wb") as out:
        out.writelines(lines.readline() for _ in range(1000))
        out.writelines(line.replace(b'"IP":"', b'"IP":"x') for line in lines)
    settings = ["delivery.give_up_after_seconds=3600", "records.mistake_limit=0"]
    if is_full:
        settings.append("state.dead_letter_max_bytes=1000000")
    words = "full   " if is_full else "refused"
    latency_ms = 0.0 if is_full else _NEVER_MS
    with (
        running_server([], latency_ms) as server,
        tempfile.TemporaryDirectory(prefix="shipper-sparse-") as name,
        backfill(server, Path(name), sample, *settings) as process,
    ):
        read = _until_still(process)
        peak, has_ended = memory(process.pid, "VmHWM"), process.poll() is not None
    size = sample.stat().st_size
    yield f"{words}   peak RSS {peak / MILLION:.0f} MB after {read / MILLION:.0f} of {size / MILLION:.0f} MB"
    if has_ended or read >= size:
        yield "BROKEN    it did not wait"
    if peak > REFUSED_PEAK_MAX_BYTES:
        yield f"BROKEN    the peak is over {REFUSED_PEAK_MAX_BYTES / MILLION:.0f} MB"


def _until_still(process: subprocess.Popen[bytes]) -> int:
    """Wait until hardly anything is read any more; returns how many bytes were."""
    before = read = 0
    while process.poll() is None:
        time.sleep(STILL_S)
        before, read = read, _read_bytes(process.pid)
        if read - before < MILLION:
            break
    return read


def _read_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def main() -> int:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=5_000_000, help="in the sparse file (%(default)s)")
    parser.add_argument("--parts", default="sparse,killed,refused,full", help="which, by commas (%(default)s)")
    arguments = parser.parse_args()
    parts: list[str] = arguments.parts.split(",")
    is_broken = False
    with tempfile.TemporaryDirectory(prefix="shipper-sparse-") as folder:
        for part in parts:
            if part in ("sparse", "killed"):
                sample = sample_file(arguments.events, SampleProfile.SPARSE)
                found = (sparse if part == "sparse" else killed)(sample, arguments.events)
            else:
                found = refused(Path(folder), is_full=part == "full")
            for line in found:
                print(line, flush=True)
                is_broken |= line.startswith("BROKEN")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
