"""Fetches what a command line asks for, with a progress bar, and tells what could not be had."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from random import Random
from typing import TYPE_CHECKING, TypeVar

from shipper.cli import load_http_client
from shipper.cli.common import say
from shipper.config.settings import Settings, require_endpoint

if TYPE_CHECKING:
    from shipper.report.client import ReportClient
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Outcome, Part

T = TypeVar("T")


def open_client(settings: Settings, *, concurrency: int = 1, rate: float = 0.0) -> ReportClient:
    """
    Make a client of the settings; to be entered.

    Args:
        rate: Requests per second at most; 0 = no limit.
    Raises:
        ConfigError: The endpoint is missing, or a secret, certificate or key cannot be used.
    """
    load_http_client()
    from shipper.report.client import PATIENCE_S, ReportClient

    return ReportClient(
        require_endpoint(settings, "report"),
        settings.delivery,
        concurrency=concurrency,
        requests_per_second=rate,
        give_up_after_s=min(PATIENCE_S, settings.delivery.give_up_after_seconds),
        wall_time=time.time,
        rng=Random(),
    )


async def fetch_report(settings: Settings, account: int, start: date, end: date) -> FetchedReport:
    """
    Get one report.

    Raises:
        ReportError: It could not be had; says what the service answered.
    """
    async with open_client(settings) as client:
        return await client.fetch(account, start, end)


async def gather(
    settings: Settings,
    parts: Sequence[Part],
    use: Callable[[Part, FetchedReport], T],
    *,
    concurrency: int,
    rate: float,
) -> Outcome[T]:
    """Get all parts; `use` as of `fetch_parts`."""
    from shipper.report.fetching import fetch_parts

    async with open_client(settings, concurrency=min(concurrency, len(parts)), rate=rate) as client:
        with _progress(len(parts)) as on_done:
            return await fetch_parts(client, parts, concurrency=concurrency, use=use, on_done=on_done)


def tell_failures(outcome: Outcome[T]) -> bool:
    """Name what could not be had, and say whether there is anything."""
    for _, error in outcome.failed:
        say(f"shipper: {error}")
    if outcome.left_out:
        say(f"shipper: {len(outcome.left_out):,} further reports were not asked for")
    return bool(outcome.failed or outcome.left_out)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Keep a progress bar on stderr, if that is a terminal and there is more than one report."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("reports"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
