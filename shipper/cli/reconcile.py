"""`shipper reconcile ACCOUNT START END`: the ledger against the report's registrations."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shipper.cli.common import ConfigOption, LogFormatOption, LogLevelOption, SetOption, prepare, run_async, say
from shipper.cli.ledger import TimezoneOption, first_complete_day, read_dead_letters, read_rows
from shipper.cli.report.gathering import gather, tell_failures
from shipper.cli.report.options import (
    AccountArgument,
    ConcurrencyOption,
    EndArgument,
    RequestRateOption,
    SplitOption,
    StartArgument,
)
from shipper.cli.report.output import checked_target, iso, write
from shipper.config import Settings
from shipper.errors import ConfigError, StateError

if TYPE_CHECKING:
    from shipper.report.attributing import Attributed
    from shipper.report.days import Days
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Part
    from shipper.report.history import History
    from shipper.report.ranges import DateRange
    from shipper.report.reconcile_rows import Period, Reconciliation

Form = Literal["table", "csv", "json", "html"]


def reconcile(
    account: AccountArgument,
    start: StartArgument,
    end: EndArgument,
    split: SplitOption = "day",
    timezone: TimezoneOption = "UTC",
    settle_days: Annotated[
        int,
        typer.Option(
            "--settle-days",
            min=0,
            max=3660,
            metavar="N",
            help="A period that ended less than N days ago is provisional: its differences do not count.",
        ),
    ] = 2,
    form: Annotated[Form, typer.Option("--format", help="The form.")] = "table",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; - for stdout.")] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="List also what agrees, and what is not in this account's report.")
    ] = False,
    concurrency: ConcurrencyOption = 4,
    rate: RequestRateOption = 0.0,
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Compare the registrations in an account's report with what the service accepted, and say what explains differences.

    The fetched reports are kept as `shipper report fetch` keeps them, so that what is restated later is recognised.
    Exit code 3: a difference is unexplained; 1: a report could not be had.

    Example: shipper reconcile 1001 2026-10-01 2026-10-31 --timezone Europe/Malta
    """
    from shipper.report.days import days_of_zone
    from shipper.report.fetching import parts_of
    from shipper.report.ranges import DateRange
    from shipper.report.reconcile import reconcile as compare
    from shipper.report.reconcile_words import verdict

    wanted = DateRange(start.date(), end.date())
    parts = parts_of([account], *wanted, split)
    days = days_of_zone(timezone)
    target = checked_target(output, form)
    settings = prepare(config, overrides, log_level, log_format, needs="report")
    for day in wanted:
        days.day_of(f"{day}T12")  # a zone that will not do is told before anything is fetched

    _check_ledger(settings)
    _check_retention(settings, wanted, days)
    with _history(settings) as history:

        def use(part: Part, fetched: FetchedReport) -> Period:
            return _period(part, fetched, history)

        outcome = run_async(lambda: gather(settings, parts, use, concurrency=concurrency, rate=rate))
    has_failed = tell_failures(outcome)
    if not outcome.reports:
        raise typer.Exit(1)
    rows = read_rows(settings, wanted)
    _check_retention(settings, wanted, days)  # again: a shipper may run
    letters = read_dead_letters(settings)
    now_hour = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H")
    found = compare(
        account,
        [period for _, period in outcome.reports],
        {(row.hour, row.brand_id, row.affiliate_id, row.media): row.accepted for row in rows},
        letters.counts,
        days=days,
        today=datetime.strptime(days.day_of(now_hour), "%Y-%m-%d").date(),
        settle_days=settle_days,
    )
    notes = [*_notes(settings, letters, found), *_missing_notes(len(outcome.failed) + len(outcome.left_out))]
    write(_rendered(form, found, notes, target, shows_all=everything), target, form=form)
    if form == "csv" or target is not None:
        say(verdict(found))
    raise typer.Exit(1 if has_failed else 0 if found.is_explained else 3)


def _check_ledger(settings: Settings) -> None:
    """
    Check that there is a ledger to compare with: a wrong directory would agree with every empty report.

    Raises:
        ConfigError: Nothing was ever shipped from the state directory.
        StateError: The state cannot be read.
    """
    from shipper.state.overview import look_at
    from shipper.state.store import bring_state_up_to_date

    directory = settings.state.directory
    bring_state_up_to_date(directory)
    if look_at(directory) is None:
        raise ConfigError(
            f"{directory} has no ledger: no shipper has used it yet, so there is nothing to compare with; "
            "name the state directory of the shipper that sends the records",
            key="state.directory",
        )


def _check_retention(settings: Settings, wanted: DateRange, days: Days) -> None:
    """
    Check that the ledger has all of a range of days.

    Raises:
        StateError: Counts of it were deleted, so that the comparison would be incomplete.
    """
    first = first_complete_day(settings, days)
    if first is not None and wanted.start < first:
        raise StateError(
            f"the ledger is incomplete before {first}: older counts are past state.ledger_retention_days and were "
            f"deleted. Compare the days from {first} on"
        )


@contextmanager
def _history(settings: Settings) -> Iterator[History | None]:
    """Open the history of reports; one that cannot be used is no obstacle."""
    from shipper.report.history import History
    from shipper.report.history_file import FILE_NAME
    from shipper.state.directory import creating_nothing

    with ExitStack() as opened:
        opened.enter_context(creating_nothing(settings.state.directory, FILE_NAME))
        history = None
        try:
            history = opened.enter_context(closing(History(settings.state.directory)))
        except StateError as error:
            say(f"note: what was restated is not recognised: {error}")
        yield history


def _period(part: Part, fetched: FetchedReport, history: History | None) -> Period:
    """Keep a report, and read what was fetched before for the same days, once they were over."""
    from shipper.report.document import read_report
    from shipper.report.reconcile_rows import Period

    if history is None:
        return Period(part.days, fetched.report)
    assert fetched.fetched_at is not None, "it came from the service"
    added = history.add(part.account, *part.days, fetched.body, fetched.fetched_at)
    over = datetime.combine(part.days.end, datetime.max.time(), UTC).timestamp()
    others = [
        each
        for each in history.versions(part.account, *part.days)
        if each.number != added.version.number and each.last_fetched_at > over
    ]
    earlier = [read_report(history.body(each), account_id=part.account).report for each in others]
    return Period(part.days, fetched.report, earlier)


def _notes(settings: Settings, letters: Attributed, found: Reconciliation) -> list[str]:
    """Say what the state knows that may bear on the differences."""
    from shipper.report.reconcile_words import totals_of
    from shipper.state.ledger import read_ledger
    from shipper.state.overview import look_at

    overview = look_at(settings.state.directory)
    assert overview is not None, "it was checked before anything was fetched"
    notes = []
    pending = sum(each.lag_bytes for each in overview.streams) + overview.spool.lag_bytes
    if pending:
        notes.append(
            f"Pending: {pending:,} bytes of the inputs are not settled yet; what is in them is not in the ledger, "
            "though the service may count some of it already."
        )
    if overview.unreachable_bytes:
        notes.append(f"{overview.unreachable_bytes:,} bytes of inputs were gone before they were read.")
    if letters.unattributed:
        notes.append(f"Unattributed dead letters: {letters.unattributed:,}; their day, brand or media cannot be read.")
    if totals_of(found.rows).surplus:
        unknown = overview.accepted - sum(row.accepted for row in read_ledger(settings.state.directory))
        if unknown > 0:
            notes.append(f"{unknown:,} records were accepted before the ledger begins, and are not counted in it.")
    return notes


def _missing_notes(missing: int) -> list[str]:
    return [f"{missing:,} reports could not be had; their periods are left out."] if missing else []


def _rendered(
    form: Form, found: Reconciliation, notes: Sequence[str], target: Path | None, *, shows_all: bool
) -> bytes:
    from shipper.report import reconcile_forms as forms

    match form:
        case "csv":
            from shipper.report.exports import to_csv

            return to_csv(forms.flat_table(found, shows_elsewhere=shows_all))
        case "json":
            return forms.to_json(found, notes, shows_elsewhere=shows_all)
        case "html":
            from shipper.report.reconcile_page import render_page

            return render_page(found, notes, made_at=iso(time.time()), shows_all=shows_all).encode()
    from rich.console import Console

    console = Console() if target is None else Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        forms.print_table(found, notes, console, shows_all=shows_all)
    return captured.get().encode(console.encoding, "replace")
