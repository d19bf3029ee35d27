"""`shipper reconcile ACCOUNT START END`: the ledger against the report's registrations."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shipper.cli.common import (
    OutputOption,
    SettingsOptions,
    format_option,
    prepare,
    readable_state,
    run_async,
    say,
    several,
    with_settings_options,
)
from shipper.cli.ledger import TimezoneOption, first_complete_day, read_dead_letters, read_rows
from shipper.cli.report.fetching import check, gather, print_failures
from shipper.cli.report.keeping import opened_if_usable, read
from shipper.cli.report.options import (
    AccountArgument,
    AllowPartialOption,
    ConcurrencyOption,
    EndArgument,
    RequestRateOption,
    SplitOption,
    StartArgument,
    days_between,
)
from shipper.cli.report.output import check_partial
from shipper.cli.writing import checked_target, printed, write
from shipper.config.settings import Settings
from shipper.model.errors import ConfigError
from shipper.model.units import iso

if TYPE_CHECKING:
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Outcome, Part
    from shipper.report.history import History
    from shipper.report.ledger_table import Attributed
    from shipper.report.reconcile.owners import Owners
    from shipper.report.reconcile.rows import Hole, Period, Reconciliation

Form = Literal["table", "csv", "json", "html", "xlsx"]
_EXIT_CODES: Final[Mapping[str, int]] = MappingProxyType(
    {"agree": 0, "nothing to compare": 0, "explained": 0, "differences": 3, "not yet judged": 4, "incomplete": 1}
)
_ALARM: Final = 6
_PERCENT: Final = re.compile(r"(-\d{1,3}(?:\.\d{1,6})?|0)%?", re.ASCII)
_NOT_FETCHED: Final = "its report could not be fetched"
_NOT_BEGUN: Final = "no report was fetched"
_NOT_KEPT: Final = "their counts are past state.ledger_retention_days"
_MAY_HAVE_ARRIVED: Final = ("rejected", "ambiguous")  # dead letters of these classes were sent


@with_settings_options
def reconcile(
    account: AccountArgument,
    start: StartArgument,
    end: EndArgument = "",
    split: SplitOption = "day",
    timezone: TimezoneOption = "UTC",
    settle_days: Annotated[
        int,
        typer.Option(
            "--settle-days",
            min=0,
            max=3660,
            metavar="N",
            help="Differences of a day that ended less than N days ago are not judged yet.",
        ),
    ] = 2,
    boundary_hours: Annotated[
        int,
        typer.Option(
            "--boundary-hours",
            min=0,
            max=12,
            metavar="N",
            help="A record within N hours of the end of a day may count for the next day.",
        ),
    ] = 2,
    alarm_below: Annotated[
        str,
        typer.Option(
            "--alarm-below",
            metavar="PERCENT",
            help="Alarm only if the platform took back more of a marketing source than this, such as -5%.",
        ),
    ] = "0%",
    form: Annotated[Form, format_option("table, csv, json, html or xlsx.")] = "table",
    output: OutputOption = "",
    allow_partial: AllowPartialOption = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list what agrees, and records of other accounts.")
    ] = False,
    concurrency: ConcurrencyOption = 4,
    rate: RequestRateOption = 0.0,
    *,
    options: SettingsOptions,
) -> None:
    """
    Compare the registrations in an account's report with what the service accepted, and say what explains differences.

    The fetched reports are kept as by `shipper report fetch`, so that later restatements are recognised.
    Exit codes: 0 agree, explained or nothing to compare; 6 the same, but the platform took registrations back;
    3 differences; 4 not yet judged, run it again later; 1 incomplete: something could not be compared.

    Example: shipper reconcile 1001 2026-10 --timezone Europe/Malta
    """
    from shipper.report.days import days_of_zone
    from shipper.report.exports import check_installed
    from shipper.report.fetching import Outcome, parts_of
    from shipper.report.ranges import DateRange
    from shipper.report.reconcile.compare import reconcile as compare
    from shipper.report.reconcile.rows import Hole
    from shipper.report.reconcile.words import findings, headlines

    days = days_of_zone(timezone)
    today = days.today(time.time())
    wanted = days_between(start, end, today)
    asked = parts_of([account], *wanted, split)
    parts = [part for part in asked if part.days.start <= today]
    later = asked[len(parts) :]
    share = _share(alarm_below)
    target = checked_target(output, form)
    settings = readable_state(prepare(options, needs="report"))
    check_installed(form)
    owners = _owners(settings, account)
    for day in wanted:
        days.day_of(f"{day}T12")  # a zone that will not do is told before anything is fetched

    _check_ledger(settings)
    owners = _as_counted(owners, settings.state.directory)
    unknown = "neither what was restated nor the sources of earlier reports are recognised"
    with opened_if_usable(settings, unknown) as history:

        def use(part: Part, fetched: FetchedReport) -> Period:
            return _period(part, fetched, history)

        outcome: Outcome[Period] = Outcome([], [], [])
        if parts:
            outcome = run_async(lambda: gather(settings, parts, use, concurrency=concurrency, rate=rate))
        if history is not None:
            owners = owners._replace(named=history.sources())
    print_failures(outcome)
    if parts and not outcome.reports:
        raise typer.Exit(1)
    rows = read_rows(settings, wanted)
    complete_from = first_complete_day(settings, days)
    letters = read_dead_letters(settings, _MAY_HAVE_ARRIVED)
    found = compare(
        account,
        [period for part, period in outcome.reports if complete_from is None or part.days.start >= complete_from],
        {(row.hour, row.brand_id, row.affiliate_id, row.media): row.accepted for row in rows},
        letters.counts,
        days=days,
        today=today,
        settle_days=settle_days,
        owners=owners,
        holes=_holes(outcome, complete_from),
        later=Hole(DateRange(later[0].days.start, wanted.end), _NOT_BEGUN) if later else None,
        boundary_hours=boundary_hours,
        alarm_below=share,
    )
    notes = _notes(settings, letters, found)
    check_partial(target, is_partial=not found.is_complete, is_allowed=allow_partial)
    write(_rendered(form, found, notes, target, shows_all=everything), target, form=form)
    if form == "csv" or target is not None:
        say("\n".join([*headlines(found), *(f"note: {said}" for said in findings(found))]))
    code = _EXIT_CODES[found.verdict]
    raise typer.Exit(_ALARM if found.is_alarmed and code in {0, _EXIT_CODES["not yet judged"]} else code)


def _share(text: str) -> Decimal:
    """
    Read a share of 0 or less.

    Raises:
        typer.BadParameter: It is none.
    """
    found = _PERCENT.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a percentage of 0 or less, such as -5%", param_hint="--alarm-below")
    return Decimal(found[1]) / 100


def _owners(settings: Settings, account: int) -> Owners:
    """
    Read from the settings whose records are whose.

    Raises:
        ConfigError: The file of accounts cannot be used.
    """
    from shipper.report.reconcile.owners import Owners, read_owners

    assert settings.report is not None
    path = settings.report.accounts
    owners = read_owners(path) if path is not None else Owners()
    return owners.giving(account, settings.report.media)


def _as_counted(owners: Owners, directory: Path) -> Owners:
    from shipper.state.affiliates import counted_as, read_or_draw_key

    name = counted_as(read_or_draw_key(directory))
    return owners._replace(affiliates={name(each): owner for each, owner in owners.affiliates.items()})


def _check_ledger(settings: Settings) -> None:
    """
    Check that there is a ledger to compare with: a wrong directory would agree with every empty report.

    Raises:
        ConfigError: Nothing was ever shipped from the state directory.
        StateError: The state cannot be read.
    """
    from shipper.status.overview import look_at

    directory = settings.state.directory
    if look_at(directory) is None:
        raise ConfigError(
            f"{directory} has no ledger: no shipper has used it yet, so there is nothing to compare with; "
            "name the state directory of the shipper that sends the records",
            key="state.directory",
        )


def _holes(outcome: Outcome[Period], complete_from: date | None) -> list[Hole]:
    """List the periods that cannot be compared: there is no report, or the ledger has no counts of them any more."""
    from shipper.report.reconcile.rows import Hole

    missing = [*(part.days for part, _ in outcome.failed), *(part.days for part in outcome.left_out)]
    holes = [Hole(days, _NOT_FETCHED) for days in missing]
    if complete_from is not None:
        holes += [Hole(part.days, _NOT_KEPT) for part, _ in outcome.reports if part.days.start < complete_from]
    return sorted(holes)


def _period(part: Part, fetched: FetchedReport, history: History | None) -> Period:
    """Keep a report, and read what was fetched before for the same days, once they were over."""
    from shipper.model.errors import ReportError
    from shipper.report.checks import TOLERANCE, check_period
    from shipper.report.reconcile.rows import Period

    for finding in check_period(fetched.report, part.days):
        raise ReportError(f"{part}: {finding.message}")
    findings = [each for each in check(part, fetched, TOLERANCE).findings if each.severity != "info"]
    if history is None:
        return Period(part.days, fetched.report, findings=findings)
    assert fetched.fetched_at is not None, "it came from the service"
    added = history.add(part.account, *part.days, fetched.body, fetched.fetched_at)
    over = datetime.combine(part.days.end, datetime.max.time(), UTC).timestamp()
    others = [
        each
        for each in history.versions(part.account, *part.days)
        if each.number != added.version.number and each.last_fetched_at > over
    ]
    return Period(part.days, fetched.report, [read(history, each).report for each in others], findings)


def _notes(settings: Settings, letters: Attributed, found: Reconciliation) -> list[str]:
    from shipper.report.reconcile.words import totals_of
    from shipper.state.ledger import read_ledger
    from shipper.status.overview import look_at

    overview = look_at(settings.state.directory)
    assert overview is not None, "it was checked before anything was fetched"
    notes = []
    pending = sum(each.lag_bytes for each in overview.streams) + overview.spool.lag_bytes
    if pending:
        are = several(pending, "byte of the inputs is", "bytes of the inputs are")
        notes.append(
            f"Pending: {are} not settled yet; what is in them is not in the ledger, "
            "though the service may count some of it already."
        )
    if overview.unreachable_bytes:
        lost = several(overview.unreachable_bytes, "byte of inputs was gone", "bytes of inputs were gone")
        notes.append(f"{lost} before they were read.")
    if letters.unattributed:
        notes.append(f"Unattributed dead letters: {letters.unattributed:,}; their day, brand or media cannot be read.")
    if totals_of(found.rows).surplus:
        unknown = overview.accepted - sum(row.accepted for row in read_ledger(settings.state.directory))
        if unknown > 0:
            accepted = several(unknown, "record was accepted", "records were accepted")
            notes.append(f"{accepted} before the ledger begins; none of that is counted in it.")
    return notes


def _rendered(
    form: Form, found: Reconciliation, notes: Sequence[str], target: Path | None, *, shows_all: bool
) -> bytes:
    from shipper.report.reconcile import forms as forms

    match form:
        case "csv":
            from shipper.report.exports import to_csv

            return to_csv(forms.flat_table(found, shows_elsewhere=shows_all))
        case "json":
            return forms.to_json(found, notes, shows_elsewhere=shows_all)
        case "xlsx":
            created = datetime.fromtimestamp(time.time(), UTC)
            return forms.to_workbook(found, notes, shows_elsewhere=shows_all, created=created)
        case "html":
            from shipper.report.reconcile.page import render_page

            return render_page(found, notes, made_at=iso(time.time()), shows_all=shows_all).encode()
    return printed(lambda console: forms.print_table(found, notes, console, shows_all=shows_all), target)
