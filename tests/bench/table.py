"""Summarise the measurements: medians, ratios, targets, and the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from shipper.system.native import ENGINE
from tests.bench.measure import Measurement
from tests.bench.peers import PEERS, release
from tests.bench.rows import FOLLOWING, SENDING, Row

LIBRARIES: Final = ("httpx", "httpcore", "h11", "anyio", "uvloop", "msgspec", "pydantic")
FLUENT_BIT: Final = ("fluent-bit", "fluent-bit-file")
FLUENT_BIT_SPARSE: Final = tuple(f"{label}@sparse" for label in FLUENT_BIT)
TARGETS: Final = (  # row, compared with the fastest of (none: events/s), minimum
    ("backfill", FLUENT_BIT, 2.0),
    ("backfill", ("naive",), 9.0),
    ("backfill:pure", ("fluent-bit-file",), 1.0),
    ("backfill:pure", ("naive",), 4.5),
    ("backfill@sparse", FLUENT_BIT_SPARSE, 1.6),
    ("backfill@sparse:pure", FLUENT_BIT_SPARSE, 0.8),
    ("backfill@dirty", FLUENT_BIT, 1.3),
    ("codec", (), 2_500_000.0),
    ("pipe", ("backfill",), 0.8),
    ("kafka", ("backfill",), 0.6),
    ("backfill-tls", ("backfill",), 0.6),
    ("backfill-cores", ("backfill",), 1.3),
    ("backfill-sloppy", ("backfill:pure",), 0.4),
    ("backfill-many", ("backfill",), 0.7),
    ("backfill-gz", ("backfill",), 0.7),
    ("backfill-slow", ("backfill",), 0.9),
    ("backfill-faulty", ("backfill",), 0.9),
    ("backfill-picky", ("backfill",), 0.85),  # one batch in ten is split
    ("validate", (), 500_000.0),
    ("sandbox", (), 150_000.0),
    ("sandbox-file", (), 150_000.0),
)
CEILINGS: Final = (  # row, figure, maximum, unit
    ("tail-idle", "p50_ms", 20.0, "ms"),
    ("tail-busy", "p50_ms", 50.0, "ms"),
    ("idle-1", "help_ms", 300.0, "ms"),
    ("idle-1", "start_ms", 250.0, "ms"),
    ("idle-1", "rest_percent", 0.5, "% of a core"),
    ("idle-1", "rest_mib", 60.0, "MiB"),
    ("idle-1000", "rest_percent", 1.0, "% of a core"),
    ("idle-10000", "rest_percent", 1.0, "% of a core"),
)
COMPARED_WITH: Final = ("naive", "codec", "backfill")
HEADINGS: Final = (
    "row",
    "events/s",
    "spread",
    "events/s without start",
    "CPU s/M events",
    "peak RSS MiB",
    *(f"x {name}" for name in COMPARED_WITH),
    "server busy",
)
FOLLOWING_FIGURES: Final = (  # heading, figure, decimals
    ("p50 ms", "p50_ms", 0),
    ("p99 ms", "p99_ms", 0),
    ("worst ms", "worst_ms", 0),
    ("help ms", "help_ms", 0),
    ("start ms", "start_ms", 0),
    ("at rest % of a core", "rest_percent", 2),
    ("at rest RSS MiB", "rest_mib", 0),
    ("events/s beside", "busy_per_second", 0),
    ("not arrived", "behind", 0),
)

Runs = Mapping[str, Sequence[Measurement]]


def is_among(label: str, names: Container[str]) -> bool:
    """Return whether a label names one of these rows."""
    return Row.parse(label).name in names


def rate(label: str, run: Measurement) -> float:
    """
    Return the events per second of the whole process; without its start for a row that does not send to the server.

    A peer is measured until the last event has arrived.
    """
    is_whole = is_among(label, SENDING) and not is_among(label, PEERS)
    return run.events / (run.wall_seconds if is_whole else run.inner_seconds)


def median_rates(runs: Runs) -> dict[str, float]:
    """Return the median rate by row, except for rows that follow files."""
    return {name: median(rate(name, run) for run in row) for name, row in runs.items() if not is_among(name, FOLLOWING)}


def median_figures(runs: Runs) -> dict[str, dict[str, float]]:
    """Return the median figures of the rows that follow files, by row and figure."""
    return {
        name: {
            figure: median(value for run in row if (value := run.figures[figure]) is not None)
            for figure, first in row[0].figures.items()
            if first is not None
        }
        for name, row in runs.items()
        if is_among(name, FOLLOWING)
    }


def render(runs: Runs) -> str:
    """Return the tables for throughput and for following; a table without rows is omitted."""
    tables = [_throughput(runs), _following(runs)]
    return "\n\n".join(_aligned(lines) for lines in tables if len(lines) > 1)


def _throughput(runs: Runs) -> list[tuple[str, ...]]:
    rates = median_rates(runs)
    lines = [HEADINGS]
    for name in rates:
        row = runs[name]
        each = [rate(name, run) for run in row]
        busy = median(run.server_cpu_seconds / run.wall_seconds for run in row)
        lines.append(
            (
                name,
                f"{rates[name]:,.0f}",
                f"{(max(each) - min(each)) / rates[name]:.0%}",
                f"{row[0].events / median(run.inner_seconds for run in row):,.0f}",
                f"{median(run.cpu_seconds for run in row) * 1e6 / row[0].events:.2f}",
                f"{median(run.peak_rss_bytes for run in row) / 2**20:.0f}",
                *(f"{rates[name] / rates[other]:.2f}" if other in rates else "-" for other in COMPARED_WITH),
                f"{busy:.0%}" if is_among(name, SENDING) else "-",
            )
        )
    return lines


def _following(runs: Runs) -> list[tuple[str, ...]]:
    medians = median_figures(runs)
    lines = [("append -> service, without linger", *(heading for heading, _, _ in FOLLOWING_FIGURES), "x tail-idle")]
    for name, figures in medians.items():
        cells = (f"{figures[key]:,.{digits}f}" if key in figures else "-" for _, key, digits in FOLLOWING_FIGURES)
        idle_ms = medians.get("tail-idle", {}).get("p50_ms")
        lines.append((name, *cells, f"{figures['p50_ms'] / idle_ms:.2f}" if idle_ms else "-"))
    return lines


def _aligned(lines: Sequence[Iterable[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def targets(runs: Runs) -> list[str]:
    """Return a line per target; a missed target is not a failure."""
    rates = median_rates(runs)
    lines = []
    for name, others, least in TARGETS:
        wanted = f"{name} >= {least:g} x {' or '.join(others)}" if others else f"{name} >= {least:,.0f} events/s"
        against = [rates[other] for other in others if other in rates]
        if name not in rates or (others and not against):
            lines.append(f"not measured  {wanted}")
            continue
        value = rates[name] / max(against) if others else rates[name]
        verdict = "met" if value >= least else "NOT met"
        lines.append(f"{verdict:<12}  {wanted}: {f'{value:.2f}' if others else f'{value:,.0f}'}")
    for name, figure, most, unit in CEILINGS:
        wanted = f"{name} {figure} <= {most:g} {unit}"
        found = median_figures(runs).get(name, {}).get(figure)
        if found is None:
            lines.append(f"not measured  {wanted}")
        else:
            lines.append(f"{'met' if found <= most else 'NOT met':<12}  {wanted}: {found:.1f}")
    return lines


def machine(peers: Iterable[str]) -> dict[str, Any]:
    """Describe the machine: processor, cores, Python, libraries, and versions of peers."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "engine": ENGINE,
        "libraries": {name: version(name) for name in LIBRARIES},
        "peers": {name: release(name) for name in peers},
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
