"""`shipper demo`: ships samples to a sandbox in one process, without configuration or account."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer

from shipper.cli.common import run_async, several
from shipper.config.settings import Settings, load_settings

if TYPE_CHECKING:
    from shipper.pipeline import Summary

_DAYS = 30


def demo(
    events: Annotated[int, typer.Option(min=1, max=10_000_000, help="Number of events to ship.")] = 10_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same EventIds.")] = 1,
) -> None:
    """
    Ship sample events to a sandbox in this process and show the report that it makes of them.

    Needs no configuration and leaves nothing behind.

    Example: shipper demo --events 100000
    """
    from rich.console import Console

    from shipper.cli.report import fetch_report
    from shipper.report.table import render_table
    from shipper.sandbox.options import Figures, SandboxOptions
    from shipper.sandbox.samples import sample_lines
    from shipper.sandbox.server import SandboxThread
    from shipper.status.logs import configure_logs

    console = Console()
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
        console.print(
            f"[bold]1.[/] {events:,} sample events, {file.stat().st_size / 1e6:.1f} MB of JSON lines, and the service "
            f"itself as a sandbox at {sandbox.base_url}"
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
        console.print(
            f"[bold]2.[/] shipped and accounted for: {first.read:,} read, {first.accepted:,} accepted in "
            f"{several(first.batches, 'batch', 'batches')}, {several(first.dead_lettered, 'dead letter')}, "
            f"{several(first.duplicates, 'duplicate')}, {first.pending:,} pending; {first.seconds:.2f} s"
        )
        second = _backfill(settings, file)
        stored = sandbox.store.stored
        console.print(
            f"[bold]3.[/] once more with the same file: {second.read:,} read, as the checkpoint stands at its end; "
            f"the sandbox holds {stored:,} events"
        )
        start, end = (today - timedelta(days=_DAYS)).date(), (today - timedelta(days=1)).date()
        fetched = run_async(lambda: fetch_report(settings, options.account_id, start, end))
        console.print(
            "[bold]4.[/] the affiliate daily report that the sandbox makes of them, with invented figures beside:\n"
        )
        render_table(fetched.report, console)
    is_whole = first.accepted == stored == events and second.read == 0
    console.print(
        "\nNext: [bold]shipper sandbox[/] in one terminal, [bold]shipper backfill[/] in another; see the README."
        if is_whole
        else "\n[bold red]The counts do not agree.[/]"
    )
    sys.exit(0 if is_whole else 1)


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
