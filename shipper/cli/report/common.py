"""Shared code of the report commands: fetching, the history, and printing failures and findings to stderr."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

import typer

from shipper.cli.common import run_async, say, several
from shipper.cli.report.options import CheckOptions, RequestOptions
from shipper.config.settings import Settings, require_endpoint
from shipper.model.errors import ShipperError

if TYPE_CHECKING:
    from shipper.report.checks import CheckedReport, Finding
    from shipper.report.client import ReportClient
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Outcome
    from shipper.report.history import History
    from shipper.report.ranges import DateRange, Part


T = TypeVar("T")

_SHOWN_PER_CHECK: Final = 10


def open_client(settings: Settings, requests: RequestOptions, *, reports: int) -> ReportClient:
    """Return a client for a number of reports; the caller enters it."""
    from shipper.report.client import GIVE_UP_AFTER_S, ReportClient

    return ReportClient(
        require_endpoint(settings, "report"),
        settings.delivery,
        concurrency=min(requests.concurrency, reports),
        requests_per_second=requests.rate,
        give_up_after_s=min(GIVE_UP_AFTER_S, settings.delivery.give_up_after_seconds),
        wall_time=time.time,
        rng=Random(),
    )


def fetch_reports(
    settings: Settings, parts: Sequence[Part], use: Callable[[Part, FetchedReport], T], requests: RequestOptions
) -> Outcome[T]:
    """Fetch all parts, and print failures; `use` as for `fetch_parts`."""
    from shipper.report.fetching import fetch_parts

    async def fetch() -> Outcome[T]:
        async with open_client(settings, requests, reports=len(parts)) as client:
            with _progress(len(parts)) as on_done:
                concurrency = requests.concurrency
                return await fetch_parts(client, parts, concurrency=concurrency, use=use, on_done=on_done)

    outcome = run_async(fetch)
    print_failures(outcome)
    return outcome


def print_failures(outcome: Outcome[T]) -> bool:
    """Print failures, grouped by reason; return whether there are any."""
    from shipper.report.ranges import join_ranges

    days_by_reason: dict[tuple[int, str], list[DateRange]] = {}
    for part, error in outcome.failed:
        days_by_reason.setdefault((part.account, str(error).removeprefix(f"{part}: ")), []).append(part.days)
    for (account, reason), days in days_by_reason.items():
        say(f"shipper: account {account}, {', '.join(map(str, join_ranges(days)))}: {reason}")
    if outcome.not_requested:
        reports = several(len(outcome.not_requested), "further report was", "further reports were")
        say(f"shipper: {reports} not requested")
    return bool(outcome.failed or outcome.not_requested)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr if it is a terminal and there are several reports."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("reports"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


@contextmanager
def open_history(settings: Settings, *, is_read_only: bool = False) -> Iterator[History]:
    """Open the history of the state directory; `is_read_only` as for `History`."""
    from shipper.report.history import FILE_NAME, History
    from shipper.state.directory import clean_up_on_config_error

    directory = settings.state.directory
    with (
        clean_up_on_config_error(directory, FILE_NAME),
        closing(History(directory, is_read_only=is_read_only)) as history,
    ):
        yield history


@contextmanager
def open_history_if_usable(settings: Settings, consequence: str) -> Iterator[History | None]:
    """Open the history of the state directory; if it cannot be used, print the consequence and yield None."""
    with ExitStack() as stack:
        history = None
        try:
            history = stack.enter_context(open_history(settings))
        except ShipperError as error:
            say(f"note: {consequence}: {error}")
        yield history


def finish(
    checked: Sequence[CheckedReport],
    findings: Sequence[tuple[Part, Finding]],
    options: CheckOptions,
    *,
    is_complete: bool,
) -> typer.Exit:
    """Print unknown fields and findings; return the exception that ends the command."""
    from shipper.report.formatting import clean

    names = dict.fromkeys(clean(name) for report in checked for name in report.unknown_fields)
    if names:
        say(f"note: undocumented fields, shown only by --format json: {', '.join(names)}")
    # A check that fails in one report may fail in all, so only its first findings are shown.
    counts = Counter[str]()
    for part, finding in findings:
        counts[finding.check] += 1
        if options.checks or counts[finding.check] <= _SHOWN_PER_CHECK:
            say(f"{finding.severity}: {finding.text(part)}")
    for check, count in counts.items():
        if not options.checks and count > _SHOWN_PER_CHECK:
            say(f"{several(count - _SHOWN_PER_CHECK, 'more finding')} of {check}; --checks shows all")
    if not is_complete:
        return typer.Exit(1)
    has_warnings = any(finding.severity == "warning" for _, finding in findings)
    return typer.Exit(3 if options.strict and has_warnings else 0)
