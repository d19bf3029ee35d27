"""What the measurements come to: medians, ratios, targets, and the machine they hold for."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

from .measure import Measurement
from .rows import SENDING

LIBRARIES: Final = ("httpx", "httpcore", "h11", "anyio", "uvloop", "msgspec", "pydantic")
TARGETS: Final = (  # row, held against (empty: events/s), at least
    ("backfill", "naive", 4.0),
    ("backfill", "codec", 0.45),
    ("codec", "", 900_000.0),
    ("backfill-sloppy", "backfill", 0.4),
    ("backfill-many", "backfill", 0.7),
    ("backfill-gz", "backfill", 0.7),
    ("validate", "", 500_000.0),
    ("sandbox", "", 150_000.0),
    ("sandbox-file", "", 150_000.0),
)
HEADINGS: Final = (
    "row",
    "events/s",
    "spread",
    "events/s without start",
    "CPU s/M events",
    "peak RSS MiB",
    "x naive",
    "x codec",
    "server busy",
)

Runs = Mapping[str, Sequence[Measurement]]


def rate(name: str, run: Measurement, events: int) -> float:
    """Events per second: of the whole process, for a row that sends nothing to the server without its start."""
    return events / (run.wall_seconds if name in SENDING else run.inner_seconds)


def median_rates(runs: Runs, events: int) -> dict[str, float]:
    """The median over the rounds, by row."""
    return {name: median(rate(name, run, events) for run in row) for name, row in runs.items()}


def render(runs: Runs, events: int) -> str:
    """The table, one line a row."""
    rates = median_rates(runs, events)
    lines = [HEADINGS]
    for name, row in runs.items():
        each = [rate(name, run, events) for run in row]
        busy = median(run.server_cpu_seconds / run.wall_seconds for run in row)
        lines.append(
            (
                name,
                f"{rates[name]:,.0f}",
                f"{(max(each) - min(each)) / rates[name]:.0%}",
                f"{events / median(run.inner_seconds for run in row):,.0f}",
                f"{median(run.cpu_seconds for run in row) * 1e6 / events:.2f}",
                f"{median(run.peak_rss_bytes for run in row) / 2**20:.0f}",
                f"{rates[name] / rates['naive']:.2f}" if "naive" in rates else "-",
                f"{rates[name] / rates['codec']:.2f}" if "codec" in rates else "-",
                f"{busy:.0%}" if name in SENDING else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def targets(runs: Runs, events: int) -> list[str]:
    """One sentence per target; a target is a wish, never an assertion."""
    rates = median_rates(runs, events)
    lines = []
    for name, other, least in TARGETS:
        wanted = f"{name} >= {least:g} x {other}" if other else f"{name} >= {least:,.0f} events/s"
        if name not in rates or (other and other not in rates):
            lines.append(f"not measured  {wanted}")
            continue
        value = rates[name] / rates[other] if other else rates[name]
        verdict = "met" if value >= least else "NOT met"
        lines.append(f"{verdict:<12}  {wanted}: {f'{value:.2f}' if other else f'{value:,.0f}'}")
    return lines


def machine() -> dict[str, Any]:
    """What the figures hold for: processor, cores, Python, libraries."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": {name: version(name) for name in LIBRARIES},
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
