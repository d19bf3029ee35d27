"""The rows of the table: what each one runs, and the sample files that they read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from shipper.sandbox.profiles import BLOCK, DUPLICATES, INVALID
from shipper.sandbox.samples import SampleProfile
from shipper.system.native import NATIVE

from .measure import CA_FILE, DEAD_LETTERS, LEDGER, ROOT, RowError, clean_environment, lines_of
from .peers import PEERS
from .variants import MAPPING, POISON_ONE_IN, archive, csv_header, csv_row, many_files, poisoner, sloppy, variant

SHIPPER: Final = Path(sys.executable).with_name("shipper")
INTAKE_PATH: Final = "/dim/v1/player/activities"
BACKFILLS: Final = (
    *("backfill", "backfill-sloppy", "backfill-csv"),
    *("backfill-many", "backfill-gz", "backfill-zst", "backfill-rss"),
    *("backfill-slow", "backfill-faulty", "backfill-picky"),
    *("backfill-tls", "backfill-cores"),
)
SHIPPING: Final = (*BACKFILLS, "pipe", "kafka")
SENDING: Final = ("floor", *SHIPPING, "naive", *PEERS)  # to the server beside them
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
NAMES: Final = ("floor", "codec", *SHIPPING, "validate", "naive", *PEERS, *SANDBOXES, *FOLLOWING)
_PROFILES: Final = (
    SampleProfile.OPERATOR,
    SampleProfile.EASY,
    SampleProfile.SPARSE,
    SampleProfile.DIRTY,
)  # the headline first
UNPINNED: Final = ("backfill-cores",)  # rows that are about more than one core
PROFILED: Final = ("codec", "backfill", "pipe")  # run on every profile, native and pure, unless others are asked for
_OPERATOR_ONLY: Final = tuple(
    name for name in NAMES if name not in (*PROFILED, *PEERS, *FOLLOWING) and name != "backfill-rss"
)
_LABEL: Final = re.compile(rf"({'|'.join(NAMES)})(?:@({'|'.join(SampleProfile)}))?(:pure)?")


class Row(NamedTuple):
    """A line of the table."""

    name: str
    profile: SampleProfile = SampleProfile.OPERATOR
    is_pure: bool = False  # without the native part

    @classmethod
    def parse(cls, label: str) -> Self:
        """
        Read `NAME[@PROFILE][:pure]`.

        Raises:
            ValueError: It is no label.
        """
        found = _LABEL.fullmatch(label)
        if not found:
            raise ValueError(f"no such row: {label}; rows are NAME[@PROFILE][:pure], names {', '.join(NAMES)}")
        return cls(found[1], SampleProfile(found[2] or SampleProfile.OPERATOR), bool(found[3]))

    def __str__(self) -> str:
        profile = "" if self.profile is SampleProfile.OPERATOR else f"@{self.profile}"
        return f"{self.name}{profile}{':pure' if self.is_pure else ''}"


def default_rows(peers: Sequence[str]) -> list[Row]:
    """
    List what `make bench` runs: the rows in `PROFILED` on all profiles, the others on `operator`, peers on two of them.

    Where the native part is missing or switched off, there are no rows `:pure`: all are.
    """
    first = [Row(name, profile) for profile in _PROFILES for name in PROFILED]
    pure = [row._replace(is_pure=True) for row in first] if NATIVE is not None else []
    beside = [Row(peer, profile) for peer in peers for profile in (SampleProfile.OPERATOR, SampleProfile.SPARSE)]
    return [*first, *pure, *beside, *map(Row, _OPERATOR_ONLY)]


@dataclass
class Bench:
    """What the commands need to know."""

    sample: Path
    urls: Mapping[str, str]  # of the server, by the manner of its answers
    large_events: int = 0  # in the file of `backfill-rss`
    profile: SampleProfile = SampleProfile.OPERATOR  # of both
    broker: str = ""  # has the sample as a topic


def events_of(row: Row, events: int, large_events: int) -> int:
    """How many events a row has to get accepted; `events` are those of the sample."""
    if row.name in FOLLOWING:
        return FOLLOWING[row.name].events
    if row.name == "backfill-picky":
        return events - (events + POISON_ONE_IN // 2 - 1) // POISON_ONE_IN
    events = large_events if row.name == "backfill-rss" else events
    if row.profile is not SampleProfile.DIRTY:
        return events
    if events % BLOCK:
        raise RowError(f"{row}: it is known of whole blocks of {BLOCK:,} events alone how many are good")
    return events - events // BLOCK * (INVALID + DUPLICATES)


def command_of(row: Row, bench: Bench, directory: Path) -> list[str]:
    """The command line of a row; `bench` has the sample of its profile."""
    words = command(row.name, bench, directory)
    if row.profile is SampleProfile.DIRTY and row.name in SHIPPING:
        words = _with_dead_letters(words)
    return ["env", "SHIPPER_NATIVE=0", *words] if row.is_pure else words


def _with_dead_letters(words: list[str]) -> list[str]:
    """Take it for a success that the command ends with 3: there are dead letters."""
    return ["/bin/sh", "-c", '"$@"; [ $? -eq 3 ]', "sh", *words]


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
    if name in PEERS:
        return [sys.executable, "-m", "tests.bench.peers", name, sample, bench.urls["plain"], str(directory)]
    if name in FOLLOWING:
        files, appends, more = FOLLOWING[name]
        counts = ["--files", str(files), "--appends", str(appends)]
        return [sys.executable, "-m", "tests.bench.tail", "--json", "--sample", sample, *counts, *more]
    if name == "validate":
        return [sys.executable, "-m", "tests.bench.validate_row", sample]
    url = bench.urls.get(name.removeprefix("backfill-"), bench.urls["plain"])
    config = str(write_config(url, directory, MAPPING if name == "backfill-csv" else ""))
    if name == "kafka":
        return _of_group(bench, config, directory)
    if name in BACKFILLS:
        line = [str(SHIPPER), "backfill", "--config", config, "--summary", "json", str(_input_of(name, bench))]
        if name == "backfill-tls":
            line += ["--set", f"intake.ca_bundle={CA_FILE}"]
        return _with_dead_letters(line) if name == "backfill-picky" else line
    assert name == "pipe", name
    # The shell waits for both, so that the CPU time of `cat` is in the account too.
    script = 'cat "$1" | "$2" pipe --config "$3" --summary json'
    return ["/bin/sh", "-c", script, "sh", sample, str(SHIPPER), config]


def _of_group(bench: Bench, config: str, directory: Path) -> list[str]:
    topic = bench.sample.stem
    with Path(config).open("a") as file:
        file.write(
            f'\n[input.kafka]\nbrokers = ["{bench.broker}"]\ntopics = ["{topic}"]\ngroup_id = "{directory.name}"\n'
            f'security = "plaintext"\ndead_letter_topic = "{DEAD_LETTERS}"\nledger_topic = "{LEDGER}"\n'
        )
    return [str(SHIPPER), "backfill", "--config", config, "--summary", "json", f"kafka://{topic}"]


def _input_of(name: str, bench: Bench) -> Path:
    sample = bench.sample
    match name.removeprefix("backfill-"):
        case "sloppy":
            return variant(sample, ".sloppy", sloppy)
        case "csv":
            return variant(sample, ".csv", csv_row, csv_header())
        case "many":
            return many_files(sample)
        case "gz" | "zst" as compression:
            return archive(sample, compression)
        case "picky":
            return variant(sample, ".poisoned", poisoner())
        case "rss":
            return sample_file(bench.large_events, bench.profile)
    return sample


def write_config(url: str, directory: Path, more: str = "") -> Path:
    """Write the smallest configuration that ships, and what a row needs more; everything else is the default."""
    path = directory / "shipper.toml"
    state = json.dumps(str(directory / "state"))  # a JSON string is a TOML string
    path.write_text(
        f'[intake]\nbase_url = "{url}"\nsubscription_key = "bench"\ntoken = "bench"\n\n'
        f"[state]\ndirectory = {state}\n{more}"
    )
    return path


def sample_file(events: int, profile: SampleProfile = SampleProfile.OPERATOR) -> Path:
    """
    The sample events of a profile; made on the first use, then kept.

    Raises:
        RowError: `shipper sample` failed, or the file does not hold this many lines.
    """
    path = ROOT / ".bench" / f"{profile}-{events}.ndjson"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        make = [str(SHIPPER), "sample", "--profile", profile, "--count", str(events), "--seed", "1"]
        if not SHIPPER.exists():
            raise RowError(f"{SHIPPER} is missing; `make setup` installs it")
        with partial.open("wb") as file:
            done = subprocess.run(make, stdout=file, stderr=subprocess.PIPE, env=clean_environment())
        if done.returncode:
            partial.unlink()
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RowError(f"`{' '.join(make)}` ended with exit code {done.returncode}: {last}")
        partial.replace(path)
    lines = lines_of(path)
    if lines != events:
        raise RowError(f"{path} holds {lines:,} lines; delete it to have it made anew")
    return path
