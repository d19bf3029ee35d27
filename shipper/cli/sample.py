"""The command `sample`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from shipper.cli.commands import option
from shipper.cli.common import OutputOption
from shipper.cli.writing import check_target, open_target
from shipper.sandbox.samples import SampleProfile, sample_lines

_WRITE_BYTES = 1 << 20


def sample(
    count: Annotated[int, option("N", "Number of events.", "--count", "-n", min=0, max=999999937)] = 1000,
    seed: Annotated[int, option("N", "The same seed gives the same EventIds.")] = 1,
    days: Annotated[
        int | None,
        option("N", "Number of days before today.", min=1, max=3650, show_default="easy 30, sparse 365, others 730"),
    ] = None,
    profile: Annotated[SampleProfile, option("NAME", "easy, operator, sparse or dirty; see above.")] = "easy",
    output: OutputOption = "",
) -> None:
    """
    Write invented events, one per line.

    Their timestamps are on the days before today (UTC). On the same day, the same options give the same output.

    \b
    easy      3 brands, 5 media, one affiliate; oldest first
    operator  an operator's export: 25 brands, 3,000 media and 800 affiliates of
              unequal size, repeated players, names that are not ASCII; oldest
              first
    sparse    40 brands, 900,000 media, in no order: almost every
              record has its own row in the ledger
    dirty     like operator; 10 % with keys in another order, 0.5 % to
              normalise, 0.1 % invalid, 0.05 % repeated

    Example: shipper sample --count 10000 --seed 7 -o events.ndjson
    """
    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    target = check_target(output)
    pending = bytearray()
    with open_target(target) as out:
        for line in sample_lines(count, seed=seed, end=end, days=days, profile=profile):
            pending += line
            if len(pending) >= _WRITE_BYTES:
                out.write(pending)
                pending.clear()
        out.write(pending)
