"""`shipper demo`: ships samples to a sandbox in the same process, without configuration or account."""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Annotated, Final

from shipper.cli.commands import option
from shipper.cli.common import private_folder, run_async, several
from shipper.config.settings import Settings, load_settings

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from shipper.model import wire
    from shipper.model.records import Summary

_DAYS: Final = 30
_NEXT: Final = """
Next, put shipper on the PATH and ship your own file, as in README.md; or ship
more sample events, in two terminals:

  shipper sandbox --port 8080 -o shipper.toml
  shipper sample -o events.ndjson && shipper backfill events.ndjson

Then `shipper status`, `shipper ledger`, `shipper report 1001 last-month`;
docs/sandbox.md has the details."""


def demo(
    events: Annotated[int, option("N", "Number of events to ship.", min=1, max=10000000)] = 10_000,
    seed: Annotated[int, option("N", "The same seed gives the same EventIds.")] = 1,
) -> None:
    """
    Ship sample events to a sandbox in this process, and show the totals of the resulting report.

    Needs no configuration and leaves nothing behind.

    Example: shipper demo --events 100000
    """
    from rich.console import Console

    from shipper.report.metrics import REGISTRATIONS, sum_of
    from shipper.report.rows import entries_of
    from shipper.sandbox.options import SandboxOptions
    from shipper.sandbox.samples import sample_lines
    from shipper.sandbox.server import sandbox_in_thread
    from shipper.status.logs import configure_logs

    console = Console(highlight=False)
    configure_logs("warning", "auto", now=time.monotonic)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    options = SandboxOptions(port=0, figures="seeded")
    with (
        private_folder() as folder,
        sandbox_in_thread(options, clock=time.time) as (access, store),
    ):
        file = folder / "acquisitions.ndjson"
        with file.open("wb") as out:
            out.writelines(sample_lines(events, seed=seed, end=today, days=_DAYS))
        console.print(
            f"[bold]1.[/] {several(events, 'invented record')}, {file.stat().st_size / 1e6:.1f} MB, and a sandbox of "
            f"the service at {access.base_url}"
        )
        flags = {"intake": access._asdict(), "report": access._asdict(), "state.directory": str(folder / "state")}
        settings = load_settings(config_path=os.devnull, environ={}, flags=flags)  # ignore existing settings
        first = _backfill(settings, file)
        console.print(
            f"[bold]2.[/] Shipped and accounted for: {first.read:,} read = {first.accepted:,} accepted + "
            f"{several(first.dead_lettered, 'dead letter')} + {several(first.duplicates, 'duplicate')} + "
            f"{first.pending:,} pending; {several(first.batches, 'request')}, {first.seconds:.2f} s"
        )
        second = _backfill(settings, file)
        stored = store.stored
        console.print(
            f"[bold]3.[/] The same file again: {second.read:,} read, because the checkpoint is at its end; "
            f"the sandbox has {several(stored, 'event')}"
        )
        start, end = (today - timedelta(days=_DAYS)).date(), (today - timedelta(days=1)).date()
        report = run_async(lambda: _fetch(settings, options.account_id, start, end))
        registered = int(sum_of(REGISTRATIONS, entries_of(report)).total or 0)
        console.print(
            f"[bold]4.[/] The daily report that the sandbox generates from them: "
            f"{several(registered, 'registration')}, and invented figures beside them\n"
        )
        console.print(_totals(report))
    agrees = first.accepted == stored == registered == events and second.read == 0
    console.print(_NEXT if agrees else "\n[bold red]The counts do not agree.[/]")
    sys.exit(0 if agrees else 1)


async def _fetch(settings: Settings, account: int, start: date, end: date) -> wire.DailyReport:
    from shipper.cli.report.common import open_client
    from shipper.cli.report.options import RequestOptions

    async with open_client(settings, RequestOptions(), reports=1) as client:
        return (await client.fetch(account, start, end)).report


def _totals(report: wire.DailyReport) -> Table:
    from shipper.report.formatting import clean, short_figure
    from shipper.report.metrics import CLICKS, NET_REVENUE, REGISTRATIONS, REV_SHARE, sum_of
    from shipper.report.rows import entries_of
    from shipper.report.table import new_table

    metrics = (CLICKS, REGISTRATIONS, NET_REVENUE, REV_SHARE)
    table = new_table(["Brand"], [metric.title for metric in metrics])

    def add(name: str, sources: list[wire.MarketingSource]) -> None:
        totals = ((metric, sum_of(metric, sources).total) for metric in metrics)
        table.add_row(name, *(short_figure(metric, total or Decimal(0)) for metric, total in totals))

    for brand in report.brands:
        add(f"{brand.id} {clean(brand.name)}", brand.marketing_sources)
    table.add_section()
    add("all brands", entries_of(report))
    return table


def _backfill(settings: Settings, file: Path) -> Summary:
    from shipper.cli.ship import stream_index
    from shipper.pipeline.opening import open_state
    from shipper.pipeline.pipeline import Pipeline
    from shipper.sources.once import FilesOnce

    with open_state(settings) as state:
        source = FilesOnce([file], stream_index(settings, state), state.store.streams, wall_time=time.time)

        async def ship() -> Summary:
            pipeline = Pipeline(settings, source, state.store, is_one_shot=True, wall_time=time.time, rng=Random())
            return await pipeline.run()

        return run_async(ship)
