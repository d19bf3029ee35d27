"""Fetching and checking the reports of a command line; what is missing or wrong is printed to stderr."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from decimal import Decimal
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from shipper.cli.common import say, several
from shipper.config.settings import Settings, require_endpoint

if TYPE_CHECKING:
    from shipper.model import wire
    from shipper.report.client import ReportClient
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Outcome, Part
    from shipper.report.findings import Finding


T = TypeVar("T")


def open_client(settings: Settings, *, concurrency: int = 1, rate: float = 0.0) -> ReportClient:
    """
    Make a client of the settings; to be entered.

    Args:
        rate: Requests per second at most; 0 = no limit.
    Raises:
        ConfigError: The endpoint is missing, or a secret, certificate or key cannot be used.
    """
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
    """Fetch all parts; `use` as for `fetch_parts`."""
    from shipper.report.fetching import fetch_parts

    async with open_client(settings, concurrency=min(concurrency, len(parts)), rate=rate) as client:
        with _progress(len(parts)) as on_done:
            return await fetch_parts(client, parts, concurrency=concurrency, use=use, on_done=on_done)


def print_failures(outcome: Outcome[T]) -> bool:
    """Print what could not be fetched, the days of one reason together; return whether there is any."""
    from shipper.report.ranges import DateRange, joined

    alike: dict[tuple[int, str], list[DateRange]] = {}
    for part, error in outcome.failed:
        alike.setdefault((part.account, str(error).removeprefix(f"{part}: ")), []).append(part.days)
    for (account, why), days in alike.items():
        say(f"shipper: account {account}, {', '.join(map(str, joined(days)))}: {why}")
    if outcome.left_out:
        say(f"shipper: {several(len(outcome.left_out), 'further report was', 'further reports were')} not requested")
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


_SHOWN_PER_CHECK: Final = 10


class FoundText(NamedTuple):
    finding: Finding
    text: str


class Checked(NamedTuple):
    """
    A report that was checked by itself.

    Attributes:
        head: The report without its brands, to be compared with its neighbours.
    """

    part: Part
    head: wire.DailyReport
    findings: list[Finding]


def check(
    part: Part, fetched: FetchedReport, tolerance: Decimal, *, earlier: wire.DailyReport | None = None
) -> Checked:
    """
    Check a report by itself.

    Args:
        earlier: What was fetched before for the same part, if it says something else.
    """
    from msgspec.structs import replace

    from shipper.report.checks import check_merged, check_report

    report = fetched.report
    findings = check_report(report, requested=part.days, earlier_version=earlier, tolerance=tolerance)
    return Checked(part, replace(report, brands=[]), [*check_merged(fetched.merged), *findings])


def all_findings(reports: Sequence[Checked], tolerance: Decimal, *, has_infos: bool) -> list[FoundText]:
    """
    List what was found, also in comparing each report with the one of the days before.

    Args:
        reports: Those of one account stand together, their periods ascend.
        has_infos: Include those that only inform.
    """
    from shipper.report.checks import check_opening_balance

    found: list[FoundText] = []
    for before, each in zip([None, *reports], reports, strict=False):
        findings = each.findings
        if before is not None and _follows(each.part, before.part):
            findings = [*findings, check_opening_balance(each.head, before.head, tolerance)]
        found += [FoundText(one, one.text(each.part)) for one in findings if has_infos or one.severity != "info"]
    return found


def print_findings(findings: Sequence[FoundText], *, is_full: bool) -> bool:
    """
    Print findings; return whether there is an error or a warning.

    Args:
        is_full: Otherwise only the first few of a check, as what does not hold in one report may hold in none.
    """
    times = Counter[str]()
    for told in findings:
        times[told.finding.check] += 1
        if is_full or times[told.finding.check] <= _SHOWN_PER_CHECK:
            say(f"{told.finding.severity}: {told.text}")
    for check, count in times.items():
        if not is_full and count > _SHOWN_PER_CHECK:
            say(f"{several(count - _SHOWN_PER_CHECK, 'more finding')} of {check}; --checks shows all")
    return any(told.finding.severity in {"error", "warning"} for told in findings)


def print_unknown_fields(fields: Iterable[tuple[str, ...]]) -> None:
    """Print the undocumented fields, each once."""
    from shipper.report.wording import clean

    names = dict.fromkeys(clean(name) for each in fields for name in each)
    if names:
        say(f"note: undocumented fields, which only --format json shows: {', '.join(names)}")


def _follows(part: Part, before: Part) -> bool:
    return part.account == before.account and part.days.start - before.days.end == timedelta(days=1)
