"""The rows of the table, and their commands."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self, cast, get_args

from shipper.sandbox.samples import BLOCK, DUPLICATES, INVALID, SampleProfile
from shipper.system.native import NATIVE
from tests.bench.blackhole import CA_FILE
from tests.bench.measure import DEAD_LETTERS, RowError
from tests.bench.peers import PEERS
from tests.bench.programs import INTAKE_PATH
from tests.bench.samples import MAPPING, POISON_ONE_IN, form_of, sample_file
from tests.processes import SHIPPER

FORMS: Final = ("sloppy", "csv", "many", "gz", "zst", "picky")  # of the backfilled records
BACKFILLS: Final = (
    *("backfill", "backfill-sloppy", "backfill-csv", "backfill-many", "backfill-gz", "backfill-zst", "backfill-rss"),
    *("backfill-slow", "backfill-faulty", "backfill-picky", "backfill-tls", "backfill-cores"),
)
SHIPPING: Final = (*BACKFILLS, "pipe", "kafka")
SENDING: Final = ("floor", *SHIPPING, "naive", *PEERS)  # to the local server
SANDBOXES: Final = {
    "sandbox": [],
    "sandbox-file": ["--store", "FOLDER/events.db"],
    "sandbox-blackhole": ["--blackhole"],
}


class Following(NamedTuple):
    """A row of `tail.py`."""

    files: int  # finished ones, in addition to the live one
    appends: int
    flags: tuple[str, ...] = ()

    @property
    def events(self) -> int:
        """Return the number of events: one per file at the start, and those appended."""
        return self.files + 1 + self.appends


FOLLOWING: Final = {
    "tail-idle": Following(0, 100, ("--rest-seconds", "0")),
    "tail-busy": Following(0, 100, ("--rest-seconds", "0", "--busy")),
    "idle-1": Following(0, 20),
    "idle-1000": Following(1000, 20),
    "idle-10000": Following(10_000, 20),
}
NAMES: Final = ("floor", "codec", *SHIPPING, "validate", "naive", *PEERS, *SANDBOXES, *FOLLOWING)
_PROFILES: Final = ("operator", "easy", "sparse", "dirty")  # the headline first
UNPINNED: Final = ("backfill-cores",)  # rows that use more than one core
PROFILED: Final = ("codec", "backfill", "pipe")  # run on every profile, native and pure, by default
_OPERATOR_ONLY: Final = tuple(
    name for name in NAMES if name not in (*PROFILED, *PEERS, *FOLLOWING) and name != "backfill-rss"
)
_LABEL: Final = re.compile(rf"({'|'.join(NAMES)})(?:@({'|'.join(get_args(SampleProfile))}))?(:pure)?")


class Row(NamedTuple):
    """A row: name, profile and engine."""

    name: str
    profile: SampleProfile = "operator"
    is_pure: bool = False  # without the native extension

    @classmethod
    def parse(cls, label: str) -> Self:
        """Parse `NAME[@PROFILE][:pure]`, or raise ValueError."""
        match = _LABEL.fullmatch(label)
        if not match:
            raise ValueError(f"no such row: {label}; rows are NAME[@PROFILE][:pure], names {', '.join(NAMES)}")
        return cls(match[1], cast(SampleProfile, match[2] or "operator"), bool(match[3]))

    def __str__(self) -> str:
        profile = "" if self.profile == "operator" else f"@{self.profile}"
        return f"{self.name}{profile}{':pure' if self.is_pure else ''}"


def default_rows(peers: Sequence[str]) -> list[Row]:
    """
    Return the rows of `make bench`: those in `PROFILED` on all profiles, the others on `operator`, peers on two.

    Without the native extension there are no rows `:pure`, because all are.
    """
    first = [Row(name, profile) for profile in _PROFILES for name in PROFILED]
    pure = [row._replace(is_pure=True) for row in first] if NATIVE is not None else []
    beside = [Row(peer, profile) for peer in peers for profile in ("operator", "sparse")]
    return [*first, *pure, *beside, *map(Row, _OPERATOR_ONLY)]


class Bench(NamedTuple):
    """
    Arguments for the commands of the rows.

    Attributes:
        urls: The URLs of the server, by mode.
        large_events: Number of events in the file of `backfill-rss`.
        profile: The profile of both files.
        broker: The address of a broker with the sample as a topic.
    """

    sample: Path
    urls: Mapping[str, str]
    large_events: int = 0
    profile: SampleProfile = "operator"
    broker: str = ""


def create_ledger(broker: str, topic: str) -> None:
    """Create a ledger for one run, because a new group reads the ledger, and it would grow with each run."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker})
    admin.create_topics([NewTopic(topic, 1, config={"cleanup.policy": "compact"})])[topic].result()


def events_of(row: Row, events: int, large_events: int) -> int:
    """Return the number of events that a row must get accepted; `events` is that of the sample."""
    if row.name in FOLLOWING:
        return FOLLOWING[row.name].events
    if row.name == "backfill-picky":
        return events - (events + POISON_ONE_IN // 2 - 1) // POISON_ONE_IN
    events = large_events if row.name == "backfill-rss" else events
    if row.profile != "dirty":
        return events
    if events % BLOCK:
        raise RowError(
            f"{row}: the number of events must be a multiple of {BLOCK:,}, so that the number of valid ones is known"
        )
    return events - events // BLOCK * (INVALID + DUPLICATES)


def command_of(row: Row, bench: Bench, directory: Path) -> list[str]:
    """
    Return the command line of a row.

    Args:
        bench: Has the sample of its profile.
        directory: An empty directory for configuration and state of `shipper`.
    """
    words = command(row.name, bench, directory)
    if row.name in SHIPPING and (row.profile == "dirty" or row.name == "backfill-picky"):
        words = ["/bin/sh", "-c", '"$@"; [ $? -eq 3 ]', "sh", *words]  # dead letters are expected
    return ["env", "SHIPPER_NATIVE=0", *words] if row.is_pure else words


def command(name: str, bench: Bench, directory: Path) -> list[str]:
    python, sample, url = [sys.executable, "-m"], str(bench.sample), bench.urls["plain"]
    program = [*python, "tests.bench.programs"]
    if name in ("codec", "validate"):
        return [*program, name, sample]
    if name == "floor":
        return [*program, name, sample, url + INTAKE_PATH]
    if name == "naive":
        return [*python, "tests.bench.naive", sample, url + INTAKE_PATH]
    if name in SANDBOXES:
        flags = [word.replace("FOLDER", str(directory)) for word in SANDBOXES[name]]
        return [*program, "sandbox", sample, str(directory), *flags]
    if name in PEERS:
        return [*python, "tests.bench.peers", name, sample, url, str(directory)]
    if name in FOLLOWING:
        files, appends, more = FOLLOWING[name]
        return [*python, "tests.bench.tail", "--json", "--files", str(files), "--appends", str(appends), *more]
    variant = name.removeprefix("backfill-")
    config = str(write_config(bench.urls.get(variant, url), directory, MAPPING if variant == "csv" else ""))
    if name == "pipe":
        # The shell waits for both, so that the CPU time of `cat` is included.
        script = 'cat "$1" | "$2" pipe --config "$3" --summary json'
        return ["/bin/sh", "-c", script, "sh", sample, str(SHIPPER), config]
    line = [str(SHIPPER), "backfill", "--config", config, "--summary", "json"]
    if name == "kafka":
        topic, ledger = bench.sample.stem, f"ledger-{directory.name}"
        create_ledger(bench.broker, ledger)
        group = {
            "brokers": json.dumps([bench.broker]), "topics": json.dumps([topic]), "group_id": directory.name,
            "security": "plaintext", "dead_letter_topic": DEAD_LETTERS, "ledger_topic": ledger,
        }  # fmt: skip
        settings = [word for key, value in group.items() for word in ("--set", f"input.kafka.{key}={value}")]
        return [*line, *settings, f"kafka://{topic}"]
    if variant in FORMS:
        return [*line, str(form_of(bench.sample, variant))]
    if variant == "rss":
        return [*line, str(sample_file(bench.large_events, bench.profile))]
    return [*line, *(["--set", f"intake.ca_bundle={CA_FILE}"] if variant == "tls" else []), sample]


def write_config(url: str, directory: Path, more: str = "") -> Path:
    """Write a minimal configuration and what a row needs in addition; everything else is the default."""
    path = directory / "shipper.toml"
    state = json.dumps(str(directory / "state"))  # a JSON string is a valid TOML string
    path.write_text(
        f'[intake]\nbase_url = "{url}"\nsubscription_key = "bench"\ntoken = "bench"\n\n'
        f"[state]\ndirectory = {state}\n{more}"
    )
    return path
