"""
Runs the rounds and prints the table.

Exit code 1 if a count is wrong or a row did not run, 0 otherwise: slowness is shown, not punished.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from shipper.system.native import NATIVE

from . import rows, table
from .measure import Measurement, Pinning, RowError, find_pinning, lines_of, run_row, running_broker, running_server
from .peers import PEERS


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Measure throughput, row by row; see tests/bench/__init__.py."
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all rows; medians are shown (5)")
    parser.add_argument("--events", type=int, default=500_000, help="events in the sample file (500000)")
    parser.add_argument("--rows", help="which rows, by commas: NAME[@PROFILE][:pure]; names: " + ", ".join(rows.NAMES))
    parser.add_argument("--peers", default="", help=f"run these, too, by commas: {', '.join(PEERS)}, or all")
    parser.add_argument("--large-events", type=int, metavar="N", help="events in the file of backfill-rss (--events)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="the server waits so long with each answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every measurement there")
    args = parser.parse_args(argv)
    args.peers = [*PEERS] if args.peers == "all" else [name for name in args.peers.split(",") if name]
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    try:
        labels = [label for label in (args.rows or "").split(",") if label]
        args.rows = [rows.Row.parse(label) for label in labels] or rows.default_rows(args.peers)
    except ValueError as error:
        parser.error(str(error))
    args.large_events = args.events if args.large_events is None else args.large_events
    if min(args.rounds, args.events, args.large_events) < 1:
        parser.error("--rounds, --events and --large-events start at 1")
    return args


class Found(NamedTuple):
    """The measurements of the rows that ran, and the reasons for those that failed or were skipped."""

    runs: dict[str, list[Measurement]]
    failed: dict[str, str]
    skipped: dict[str, str]


def measure(args: argparse.Namespace, pinning: Pinning) -> Found:
    """Run the rounds; a row that failed is not run again."""
    runs: dict[str, list[Measurement]] = {}
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    samples = {profile: rows.sample_file(args.events, profile) for profile in {row.profile for row in args.rows}}
    topics = {samples[row.profile] for row in args.rows if row.name == "kafka"}
    with running_server(pinning.server, args.latency_ms) as server, ExitStack() as stack:
        broker = ""
        if topics:
            broker, why = stack.enter_context(running_broker(pinning.server, topics))
            skipped = {str(row): why for row in args.rows if why and row.name == "kafka"}
        for number in range(1, args.rounds + 1):
            for row in args.rows:
                label = str(row)
                if label in failed or label in skipped:
                    continue
                print(f"round {number} of {args.rounds}: {label}", file=sys.stderr, flush=True)
                try:
                    with tempfile.TemporaryDirectory(prefix="shipper-bench-") as directory:
                        pin = () if row.name in rows.UNPINNED else pinning.row
                        bench = rows.Bench(samples[row.profile], server.urls, args.large_events, row.profile, broker)
                        command = [*pin, *rows.command_of(row, bench, Path(directory))]
                        events = rows.events_of(row, args.events, args.large_events)
                        lines_of(bench.sample)  # from the page cache, of which Fluent Bit puts out what it has read
                        run = run_row(command, events=events, server=server, sends=row.name in rows.SENDING)
                    runs.setdefault(label, []).append(run)
                except RowError as error:
                    failed[label] = str(error)
                    runs.pop(label, None)
    return Found(runs, failed, skipped)


def main(argv: list[str]) -> int:
    """Measure, print, save. Returns the exit code."""
    args = parse(argv)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # no row compiles its modules anew, as what is installed does not
    pinning = find_pinning()
    try:
        runs, failed, skipped = measure(args, pinning)
    except RowError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1

    machine = table.machine([name for name in PEERS if name in {row.name for row in args.rows}])
    command = shlex.join(["python", "-m", "tests.bench", *argv])
    libraries = ", ".join(f"{name} {number}" for name, number in machine["libraries"].items())
    print(f"\n{command}")
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {pinning.describe()}")
    print(f"{machine['python']}; {libraries}")
    for name, release in machine["peers"].items():
        print(f"{name}: {release}")
    if NATIVE is None:
        print("without the native part: every row is pure")
    print(f"{args.events:,} events, median of {args.rounds}; latency of the server {args.latency_ms:g} ms\n")
    if runs:
        print(table.render(runs))
    print()
    for line in table.targets(runs):
        print(line)
    for name, reason in skipped.items():
        print(f"skipped       {name}: {reason}")
    for name, reason in failed.items():
        print(f"FAILED        {name}: {reason}")

    if args.json:
        document = {
            "command": command,
            "machine": machine,
            "pinning": pinning.describe(),
            "events": args.events,
            "rounds": args.rounds,
            "latency_ms": args.latency_ms,
            "large_events": args.large_events,
            "events_per_second": table.median_rates(runs),
            "following": table.median_figures(runs),
            "runs": {name: [asdict(run) for run in row] for name, row in runs.items()},
            "failed": failed,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
