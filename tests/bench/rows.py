"""The rows of the table: what each one runs, and the sample file that all of them read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from .measure import CA_FILE, ROOT, RowError, clean_environment
from .variants import (
    MAPPING,
    POISON_ONE_IN,
    archive,
    csv_header,
    csv_row,
    many_files,
    poisoner,
    sloppy,
    sparser,
    variant,
)

SHIPPER: Final = Path(sys.executable).with_name("shipper")
INTAKE_PATH: Final = "/dim/v1/player/activities"
BACKFILLS: Final = (
    *("backfill", "backfill-sloppy", "backfill-sparse", "backfill-csv"),
    *("backfill-many", "backfill-gz", "backfill-zst", "backfill-rss"),
    *("backfill-slow", "backfill-faulty", "backfill-picky"),
    *("backfill-tls", "backfill-cores"),
)
SENDING: Final = ("floor", *BACKFILLS, "pipe", "naive")  # to the server beside them
SANDBOXES: Final = {"sandbox": "", "sandbox-file": "--store", "sandbox-blackhole": "--blackhole"}


class Following(NamedTuple):
    """A row of `tail.py`."""

    files: int  # finished, beside the live one
    appends: int
    flags: tuple[str, ...] = ()

    @property
    def events(self) -> int:
        """One in each file to begin with, and those that are appended."""
        return self.files + 1 + self.appends


FOLLOWING: Final = {
    "tail-idle": Following(0, 100, ("--rest-seconds", "0")),
    "tail-busy": Following(0, 100, ("--rest-seconds", "0", "--busy")),
    "idle-1": Following(0, 20),
    "idle-1000": Following(1000, 20),
    "idle-10000": Following(10_000, 20),
}
NAMES: Final = ("floor", "codec", *BACKFILLS, "pipe", "validate", "naive", *SANDBOXES, *FOLLOWING)
UNPINNED: Final = ("backfill-cores",)  # rows that are about more than one core
DEFAULT: Final = tuple(name for name in NAMES if name not in FOLLOWING and name != "backfill-rss")


@dataclass
class Bench:
    """What the commands need to know."""

    sample: Path
    urls: Mapping[str, str]  # of the server, by the manner of its answers
    large_events: int = 0  # in the file of `backfill-rss`


def events_of(name: str, events: int, large_events: int) -> int:
    """How many events a row has to get accepted; `events` are those of the sample."""
    if name in FOLLOWING:
        return FOLLOWING[name].events
    if name == "backfill-picky":
        return events - (events + POISON_ONE_IN // 2 - 1) // POISON_ONE_IN
    return large_events if name == "backfill-rss" else events


def command(name: str, bench: Bench, directory: Path) -> list[str]:
    """
    The command line of a row.

    Args:
        directory: Fresh and empty; configuration and state of `shipper` go there.
    """
    sample = str(bench.sample)
    if name == "codec":
        return [sys.executable, "-m", "tests.bench.codec_row", sample]
    if name in SANDBOXES:
        flags = [SANDBOXES[name]] if SANDBOXES[name] else []
        if name == "sandbox-file":
            flags.append(str(directory / "events.db"))
        return [sys.executable, "-m", "tests.bench.sandbox_row", sample, str(directory), *flags]
    if name in ("floor", "naive"):
        return [sys.executable, "-m", f"tests.bench.{name}", sample, bench.urls["plain"] + INTAKE_PATH]
    if name in FOLLOWING:
        files, appends, flags = FOLLOWING[name]
        counts = ["--files", str(files), "--appends", str(appends)]
        return [sys.executable, "-m", "tests.bench.tail", "--json", "--sample", sample, *counts, *flags]
    if name == "validate":
        return [sys.executable, "-m", "tests.bench.validate_row", sample]
    url = bench.urls.get(name.removeprefix("backfill-"), bench.urls["plain"])
    config = str(write_config(url, directory, MAPPING if name == "backfill-csv" else ""))
    if name in BACKFILLS:
        line = [str(SHIPPER), "backfill", "--config", config, "--summary", "json", str(_input_of(name, bench))]
        if name == "backfill-tls":
            line += ["--set", f"intake.ca_bundle={CA_FILE}"]
        # Exit code 3: there are dead letters.
        return ["/bin/sh", "-c", '"$@"; [ $? -eq 3 ]', "sh", *line] if name == "backfill-picky" else line
    assert name == "pipe", name
    # The shell waits for both, so that the CPU time of `cat` is in the account too.
    line = 'cat "$1" | "$2" pipe --config "$3" --summary json'
    return ["/bin/sh", "-c", line, "sh", sample, str(SHIPPER), config]


def _input_of(name: str, bench: Bench) -> Path:
    sample = bench.sample
    match name.removeprefix("backfill-"):
        case "sloppy":
            return variant(sample, ".sloppy", sloppy)
        case "sparse":
            return sparse_file(sample)
        case "csv":
            return variant(sample, ".csv", csv_row, csv_header())
        case "many":
            return many_files(sample)
        case "gz" | "zst" as compression:
            return archive(sample, compression)
        case "picky":
            return variant(sample, ".poisoned", poisoner())
        case "rss":
            return sample_file(bench.large_events)
    return sample


def sparse_file(sample: Path) -> Path:
    """Make the sample sparse: nearly every record with a key of its own in the ledger."""
    return variant(sample, ".sparse", sparser())


def write_config(url: str, directory: Path, more: str = "") -> Path:
    """Write the smallest configuration that ships, and what a row needs more; everything else is the default."""
    path = directory / "shipper.toml"
    state = json.dumps(str(directory / "state"))  # a JSON string is a TOML string
    path.write_text(
        f'[intake]\nbase_url = "{url}"\nsubscription_key = "bench"\ntoken = "bench"\n\n'
        f"[state]\ndirectory = {state}\n{more}"
    )
    return path


def sample_file(events: int) -> Path:
    """
    The sample events; made on the first use, then kept.

    Raises:
        RowError: `shipper sample` failed, or the file does not hold this many lines.
    """
    path = ROOT / ".bench" / f"events-{events}.ndjson"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        make = [str(SHIPPER), "sample", "--count", str(events), "--seed", "1"]
        if not SHIPPER.exists():
            raise RowError(f"{SHIPPER} is missing; `make setup` installs it")
        with partial.open("wb") as file:
            done = subprocess.run(make, stdout=file, stderr=subprocess.PIPE, env=clean_environment())
        if done.returncode:
            partial.unlink()
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RowError(f"`{' '.join(make)}` ended with exit code {done.returncode}: {last}")
        partial.replace(path)
    with path.open("rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    if lines != events:
        raise RowError(f"{path} holds {lines:,} lines; delete it to have it made anew")
    return path
