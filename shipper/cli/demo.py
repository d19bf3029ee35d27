"""`shipper demo`: ships samples to a sandbox in one process, without configuration or account."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shipper.cli.common import run_async, several
from shipper.config.settings import Settings, load_settings

if TYPE_CHECKING:
    from rich.table import Table

    from shipper.model import wire
    from shipper.pipeline import Summary

_DAYS: Final = 30
_NEXT: Final = """
Next, in two terminals:

  shipper sandbox -o shipper.toml
  shipper sample > events.ndjson && shipper backfill events.ndjson

Then `shipper status`, `shipper ledger`, `shipper report 1001 last-month`;
docs/sandbox.md goes on from there."""


def demo(
    events: Annotated[int, typer.Option(min=1, max=10_000_000, metavar="N", help="Number of events to ship.")] = 10_000,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same EventIds.")] = 1,
) -> None:
    """
    Ship sample events to a sandbox in this process, and show totals of the report that it makes of them.

    Needs no configuration and leaves nothing behind.

    Example: shipper demo --events 100000
    """
    from rich.console import Console

    from shipper.cli.report import fetch_report
    from shipper.report.metrics import REGISTRATIONS, added
    from shipper.sandbox.options import Figures, SandboxOptions
    from shipper.sandbox.samples import sample_lines
    from shipper.sandbox.server import SandboxThread
    from shipper.status.logs import configure_logs

    console = Console(highlight=False)

    def say(number: int, text: str) -> None:
        console.print(f"[bold]{number}.[/] {text}")

    configure_logs("warning", "auto", now=time.monotonic)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    options = SandboxOptions(port=0, figures=Figures.SEEDED)
    with (
        tempfile.TemporaryDirectory(prefix="shipper-demo-") as folder,
        SandboxThread(options, clock=time.time) as sandbox,
    ):
        file = Path(folder, "acquisitions.ndjson")
        with file.open("wb") as out:
            out.writelines(sample_lines(events, seed=seed, end=today, days=_DAYS))
        say(
            1,
            f"{several(events, 'invented record')}, {file.stat().st_size / 1e6:.1f} MB, and the service itself as a "
            f"sandbox at {sandbox.base_url}",
        )
        endpoint = {
            "base_url": sandbox.base_url,
            "subscription_key": sandbox.subscription_key,
            "token": sandbox.token,
        }
        settings = load_settings(
            config_path=os.devnull,  # none of the usual places
            environ={},
            flags={
                "intake": endpoint,
                "report": endpoint,
                "state.directory": str(Path(folder, "state")),
            },
        )
        first = _backfill(settings, file)
        say(
            2,
            f"Shipped, and accounted for: {first.read:,} read = {first.accepted:,} accepted + "
            f"{several(first.dead_lettered, 'dead letter')} + {several(first.duplicates, 'duplicate')} + "
            f"{first.pending:,} pending; {several(first.batches, 'request')}, {first.seconds:.2f} s",
        )
        second = _backfill(settings, file)
        stored = sandbox.store.stored
        say(
            3,
            f"Once more with the same file: {second.read:,} read, because the checkpoint is at its end; "
            f"the sandbox has {several(stored, 'event')}",
        )
        start, end = (today - timedelta(days=_DAYS)).date(), (today - timedelta(days=1)).date()
        fetched = run_async(lambda: fetch_report(settings, options.account_id, start, end))
        registered = int(added(REGISTRATIONS, _sources(fetched.report)).total or 0)
        say(
            4,
            f"The affiliate daily report that the sandbox makes of them: {several(registered, 'registration')}, and "
            "invented figures beside them\n",
        )
        console.print(_totals(fetched.report))
    is_whole = first.accepted == stored == registered == events and second.read == 0
    console.print(_NEXT if is_whole else "\n[bold red]The counts do not agree.[/]")
    sys.exit(0 if is_whole else 1)


def _sources(report: wire.DailyReport) -> list[wire.MarketingSource]:
    return [source for brand in report.brands for source in brand.marketing_sources]


def _totals(report: wire.DailyReport) -> Table:
    """Make a table of a line for each brand, and one of all."""
    from shipper.report.metrics import CLICKS, NET_REVENUE, REGISTRATIONS, REV_SHARE, added
    from shipper.report.table import new_table
    from shipper.report.wording import at_a_glance, clean

    metrics = (CLICKS, REGISTRATIONS, NET_REVENUE, REV_SHARE)
    table = new_table(["Brand"], [metric.title for metric in metrics])

    def add(name: str, sources: list[wire.MarketingSource]) -> None:
        totals = ((metric, added(metric, sources).total) for metric in metrics)
        table.add_row(name, *(at_a_glance(metric, total or Decimal(0)) for metric, total in totals))

    for brand in report.brands:
        add(f"{brand.id} {clean(brand.name)}", brand.marketing_sources)
    table.add_section()
    add("all brands", _sources(report))
    return table


def _backfill(settings: Settings, file: Path) -> Summary:
    from shipper.pipeline import Pipeline
    from shipper.pipeline.opening import opened_state
    from shipper.sources.identity import StreamBook
    from shipper.sources.once import FilesOnce

    with opened_state(settings) as state:
        book = StreamBook(
            state.store.streams.known("file"),
            state.next_stream_id,
            max_record_bytes=settings.input.max_record_bytes,
        )
        source = FilesOnce([file], book, state.store.streams, wall_time=time.time)

        async def ship() -> Summary:
            pipeline = Pipeline(settings, source, state.store, is_one_shot=True, wall_time=time.time, rng=Random())
            return await pipeline.run()

        return run_async(ship)
