"""The command `sample`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from shipper.cli.common import OutputOption
from shipper.cli.writing import checked_target, opened_target
from shipper.sandbox.samples import SampleProfile, sample_lines

_WRITE_BYTES = 1 << 20


def sample(
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, max=999_999_937, metavar="N", help="Number of events.")
    ] = 1000,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same EventIds.")] = 1,
    days: Annotated[
        int | None,
        typer.Option(
            min=1, max=3650, metavar="N", show_default="easy 30, sparse 365, others 730", help="Days before today."
        ),
    ] = None,
    profile: Annotated[
        SampleProfile,
        typer.Option(
            metavar="NAME",
            help="easy, operator, sparse or dirty: how much they vary, and what is wrong with them; see above.",
        ),
    ] = SampleProfile.EASY,
    output: OutputOption = "",
) -> None:
    """
    Write invented events, one per line.

    They are in the whole days (UTC) before today. On the same day the output is the same.

    \b
    easy      3 brands, 5 media, one affiliate; oldest first
    operator  an operator's export: 25 brands, 3,000 media and 800 affiliates of
              unequal size, repeated players, names that are not ASCII; oldest
              first
    sparse    40 brands, 900,000 media, in no order: nearly each record counts
              alone
    dirty     operator, with 10 % in another order of keys, 0.5 % to be
              normalised, 0.1 % invalid, 0.05 % repeated

    Example: shipper sample --count 10000 --seed 7 -o events.ndjson
    """
    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    target = checked_target(output)
    pending = bytearray()
    with opened_target(target) as out:
        for line in sample_lines(count, seed=seed, end=end, days=days, profile=profile):
            pending += line
            if len(pending) >= _WRITE_BYTES:
                out.write(pending)
                pending.clear()
        out.write(pending)
