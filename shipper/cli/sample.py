"""The command `sample`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shipper.cli.common import reader_may_leave

_WRITE_BYTES = 1 << 20


def sample(
    count: Annotated[int, typer.Option(min=0, max=999_999_937, help="Number of events.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same EventIds.")] = 1,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Spread over this many days before today.")] = 30,
) -> None:
    """
    Write invented events to standard output, one per line, oldest first.

    They are in the whole days (UTC) before today. On the same day the output is the same.

    Example: shipper sample --count 10000 --seed 7 > events.ndjson
    """
    from datetime import UTC, datetime

    from shipper.sandbox.samples import sample_lines

    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    out = sys.stdout.buffer
    pending = bytearray()
    with reader_may_leave():
        for line in sample_lines(count, seed=seed, end=end, days=days):
            pending += line
            if len(pending) >= _WRITE_BYTES:
                out.write(pending)
                pending.clear()
        out.write(pending)
        out.flush()
