"""
Runs the rounds and prints the table.

Exits with 1 if a count is wrong or a row did not run, otherwise with 0, even if a row is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from shipper.system.native import NATIVE
from tests.bench import rows, table
from tests.bench.measure import Measurement, Pinning, RowError, find_pinning, lines_of, run_row, running_server
from tests.bench.peers import PEERS
from tests.bench.samples import sample_file
from tests.processes import running_program


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Measure throughput, row by row; see tests/bench/__init__.py."
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; the table shows medians (5)")
    parser.add_argument("--events", type=int, default=500_000, help="events in the sample file (500000)")
    parser.add_argument(
        "--rows", help="rows, separated by commas: NAME[@PROFILE][:pure]; names: " + ", ".join(rows.NAMES)
    )
    parser.add_argument("--peers", default="", help=f"also run these, separated by commas: {', '.join(PEERS)}, or all")
    parser.add_argument("--large-events", type=int, metavar="N", help="events in the file of backfill-rss (--events)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="latency of each answer of the server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all measurements")
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


def measure(args: argparse.Namespace, pinning: Pinning) -> tuple[dict[str, list[Measurement]], dict[str, str]]:
    """Run the rounds; return the measurements by row, and why rows were skipped or failed. Those are not run again."""
    runs: dict[str, list[Measurement]] = {}
    failed: dict[str, str] = {}
    samples = {profile: sample_file(args.events, profile) for profile in {row.profile for row in args.rows}}
    topics = sorted({str(samples[row.profile]) for row in args.rows if row.name == "kafka"})
    with running_server(pinning.server, args.latency_ms) as server, ExitStack() as stack:
        broker = ""
        if topics:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shipper-bench-"))
            program = ("tests.bench.programs", "broker", folder, *topics)
            broker = stack.enter_context(running_program(*program, pin=pinning.server))
            if " " in broker or not broker:
                failed = {str(row): f"skipped: {broker}" for row in args.rows if row.name == "kafka"}
        for number in range(1, args.rounds + 1):
            for row in args.rows:
                label = str(row)
                if label in failed:
                    continue
                print(f"round {number} of {args.rounds}: {label}", file=sys.stderr, flush=True)
                try:
                    with tempfile.TemporaryDirectory(prefix="shipper-bench-") as directory:
                        pin = () if row.name in rows.UNPINNED else pinning.row
                        bench = rows.Bench(samples[row.profile], server.urls, args.large_events, row.profile, broker)
                        command = [*pin, *rows.command_of(row, bench, Path(directory))]
                        events = rows.events_of(row, args.events, args.large_events)
                        lines_of(bench.sample)  # into the page cache, because Fluent Bit evicts what it has read
                        run = run_row(command, events=events, server=server, sends=row.name in rows.SENDING)
                    runs.setdefault(label, []).append(run)
                except RowError as error:
                    failed[label] = f"FAILED: {error}"
                    runs.pop(label, None)
    return runs, failed


def main(argv: list[str]) -> int:
    """Measure, print and save; return the exit code."""
    args = parse(argv)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # rows do not compile modules, like an installed program
    pinning = find_pinning()
    try:
        runs, failed = measure(args, pinning)
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
        print("without the native extension: every row is pure")
    print(f"{args.events:,} events, median of {args.rounds}; latency of the server {args.latency_ms:g} ms\n")
    if runs:
        print(table.render(runs))
    print("", *table.targets(runs), *(f"{name}: {reason}" for name, reason in failed.items()), sep="\n")

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
            "runs": {name: [run._asdict() for run in row] for name, row in runs.items()},
            "failed": failed,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if any(not reason.startswith("skipped: ") for reason in failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
