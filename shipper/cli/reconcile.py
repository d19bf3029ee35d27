"""`shipper reconcile ACCOUNT START END`: compares the ledger with the report's registrations."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shipper.cli.commands import flag, option
from shipper.cli.common import OutputOption, SettingsOptions, format_option, prepare, readable_state, say, several
from shipper.cli.ledger import TimezoneOption
from shipper.cli.report.common import fetch_reports, open_history_if_usable
from shipper.cli.report.options import (
    AccountArgument,
    AllowPartialOption,
    EndArgument,
    RequestOptions,
    SplitOption,
    StartArgument,
    days_between,
)
from shipper.cli.report.show import check_partial
from shipper.cli.writing import capture, check_target, write
from shipper.config.settings import Settings
from shipper.model.errors import ConfigError
from shipper.model.units import iso

if TYPE_CHECKING:
    from shipper.model.records import LedgerKey
    from shipper.report.days import Days
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Outcome
    from shipper.report.history import History
    from shipper.report.ledger import DeadLetterCounts
    from shipper.report.ranges import Part
    from shipper.report.reconcile.model import Excluded, Period, Reconciliation
    from shipper.report.reconcile.owners import Owners

Form = Literal["table", "csv", "json", "html", "xlsx"]
_EXIT_CODES: Final[Mapping[str, int]] = MappingProxyType(
    {"agree": 0, "nothing to compare": 0, "explained": 0, "differences": 3, "not yet judged": 4, "incomplete": 1}
)
_ALARM: Final = 6
_PERCENT: Final = re.compile(r"(-\d{1,3}(?:\.\d{1,6})?|0)%?", re.ASCII)
_MAY_HAVE_ARRIVED: Final = ("rejected", "ambiguous")  # dead letters of these classes were sent


def reconcile(
    account: AccountArgument,
    start: StartArgument,
    end: EndArgument = "",
    split: SplitOption = "day",
    timezone: TimezoneOption = "UTC",
    settle_days: Annotated[
        int, option("N", "Do not judge differences of days that ended less than N days ago.", min=0, max=3660)
    ] = 2,
    boundary_hours: Annotated[
        int, option("N", "Records within N hours of midnight may count for the neighbouring day.", min=0, max=12)
    ] = 2,
    alarm_below: Annotated[
        str,
        option(
            "PERCENT",
            "Raise the alarm only if the platform took back a larger share of a marketing source's accepted records "
            "than this, such as -5%.",
        ),
    ] = "0%",
    form: Annotated[Form, format_option("table, csv, json, html or xlsx.")] = "table",
    output: OutputOption = "",
    allow_partial: AllowPartialOption = False,
    everything: Annotated[bool, flag("Also list rows that agree, and records of other accounts.", "--all")] = False,
    *,
    requests: RequestOptions,
    options: SettingsOptions,
) -> None:
    """
    Compare the registrations in an account's report with what the service accepted, and explain the differences.

    Fetched reports are stored, as by `shipper report fetch`, so that later restatements are recognised.

    \b
    Exit code  Verdict
    0          agree, explained, or nothing to compare
    1          incomplete: something could not be compared
    3          differences
    4          not yet judged: run it again later
    6          as 0 or 4, but the platform took registrations back

    Example: shipper reconcile 1001 2026-10 --timezone Europe/Malta
    """
    from shipper.report.days import days_of_zone
    from shipper.report.exports import check_installed
    from shipper.report.fetching import Outcome
    from shipper.report.ledger import first_complete_day, read_dead_letters, read_range
    from shipper.report.ranges import DateRange, parts_of
    from shipper.report.reconcile.compare import reconcile as compare
    from shipper.report.reconcile.model import Excluded
    from shipper.report.reconcile.summary import findings, headlines
    from shipper.status.overview import read_overview

    days = days_of_zone(timezone)
    today = days.today(time.time())
    span = days_between(start, end, today)
    for day in span:
        days.day_of(f"{day}T12")  # raise before fetching if the zone is unusable
    requested = parts_of([account], span, split)
    parts = [part for part in requested if part.days.start <= today]
    share = _parse_share(alarm_below)
    target = check_target(output, form)
    configured = prepare(options, needs="report")
    settings = readable_state(configured, has_ledger=True)  # of a group, a temporary copy, without reports
    check_installed(form)
    owners = _owners(settings, account)
    # Read before the reports are fetched: they would lack records that are accepted meanwhile.
    pending_bytes = read_overview(settings.state.directory).total_lag_bytes
    if not (settings.state.directory / "state.db").exists():  # a wrong directory would agree with every empty report
        raise ConfigError(
            f"{settings.state.directory} has no ledger: no shipper has used it yet, so there is nothing to compare; "
            "use the state directory of the shipper that sends the records",
            key="state.directory",
        )
    owners = owners._replace(affiliates=_by_ledger_name(owners.affiliates, settings.state.directory))
    accepted: Counter[LedgerKey] = Counter()
    for row in read_range(settings, span):
        accepted[row.hour, row.brand_id, row.affiliate_id, row.media] += row.accepted
    complete_from = first_complete_day(settings, days)
    letters = read_dead_letters(settings, span, _MAY_HAVE_ARRIVED)
    consequence = "restatements, and sources of earlier reports, are not recognised"
    with open_history_if_usable(configured, consequence) as history:
        outcome: Outcome[Period] = Outcome([], [], [])
        if parts:
            outcome = fetch_reports(
                settings, parts, lambda part, fetched: _period(part, fetched, history, days), requests
            )
        if history is not None:
            owners = owners._replace(named=history.sources())
    if parts and not outcome.reports:
        raise typer.Exit(1)
    excluded = _not_compared(outcome, complete_from)
    if later := requested[len(parts) :]:
        excluded.append(Excluded("not begun", DateRange(later[0].days.start, span.end), "no report was fetched"))
    result = compare(
        account,
        [period for part, period in outcome.reports if complete_from is None or part.days.start >= complete_from],
        accepted,
        letters.counts,
        days=days,
        today=today,
        settle_days=settle_days,
        owners=owners,
        excluded=excluded,
        boundary_hours=boundary_hours,
        alarm_below=share,
    )
    result = replace(result, lists_all=everything)
    notes = _notes(settings, pending_bytes, letters, owners, result)
    check_partial(target, is_partial=bool(result.not_compared), is_allowed=allow_partial)
    write(_render(form, result, notes, target), target, form=form)
    if form == "csv" or target is not None:
        say("\n".join([*headlines(result), *(f"note: {finding}" for finding in findings(result))]))
    code = _EXIT_CODES[result.verdict]
    raise typer.Exit(_ALARM if result.is_alarmed and code in {0, _EXIT_CODES["not yet judged"]} else code)


def _parse_share(text: str) -> Decimal:
    """Parse a percentage of 0 or less; raise typer.BadParameter if it is invalid."""
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a percentage of 0 or less, such as -5%", param_hint="--alarm-below")
    return Decimal(match[1]) / 100


def _owners(settings: Settings, account: int) -> Owners:
    """Return the owners of records according to the settings; raise ConfigError if their file is unusable."""
    from shipper.report.reconcile.owners import Owners, read_owners

    assert settings.report is not None
    path = settings.report.accounts
    owners = read_owners(path) if path is not None else Owners()
    return owners._replace(media={**owners.media, **dict.fromkeys(settings.report.media, account)})


def _by_ledger_name(affiliates: Mapping[str, int], directory: Path) -> dict[str, int]:
    from shipper.state.affiliates import affiliate_namer, read_or_generate_key

    name = affiliate_namer(read_or_generate_key(directory))
    return {name(affiliate): owner for affiliate, owner in affiliates.items()}


def _not_compared(outcome: Outcome[Period], complete_from: date | None) -> list[Excluded]:
    """Return the periods without a report, or whose counts in the ledger have expired, ascending."""
    from shipper.report.reconcile.model import Excluded

    missing = [*(part.days for part, _ in outcome.failed), *(part.days for part in outcome.not_requested)]
    excluded = [Excluded("not compared", days, "its report could not be fetched") for days in missing]
    if complete_from is not None:
        excluded += [
            Excluded("not compared", part.days, "their counts have expired (state.ledger_retention_days)")
            for part, _ in outcome.reports
            if part.days.start < complete_from
        ]
    return sorted(excluded)


def _period(part: Part, fetched: FetchedReport, history: History | None, days: Days) -> Period:
    """Store a report; return it with earlier versions that were fetched after its days were over."""
    from shipper.model.errors import ReportError
    from shipper.report.checks import Finding, check_fetched, check_period
    from shipper.report.reconcile.model import Period, without_other_figures

    for finding in check_period(fetched.report, part.days):
        raise ReportError(f"{part}: {finding.message}")
    findings = [finding for finding in check_fetched(part, fetched).findings if finding.severity != "info"]
    if fetched.unknown_fields:
        names = ", ".join(fetched.unknown_fields)
        message = f"undocumented fields, which may mean that the report is incomplete: {names}"
        findings.append(Finding(check="fields_are_documented", severity="note", message=message))
    earlier = []
    if history is not None:
        version = history.add(part, fetched)
        earlier = [
            without_other_figures(history.report(other).report)
            for other in history.versions(part)
            if other.number != version.number and days.is_over(part.days.end, other.last_fetched_at)
        ]
    return Period(part.days, without_other_figures(fetched.report), earlier, findings)


def _notes(
    settings: Settings, pending_bytes: int, letters: DeadLetterCounts, owners: Owners, result: Reconciliation
) -> list[str]:
    from shipper.state.ledger import read_counts
    from shipper.status.overview import read_overview

    overview = read_overview(settings.state.directory)
    notes = []
    if pending_bytes:
        pending = several(pending_bytes, "byte of the inputs is", "bytes of the inputs are")
        notes.append(
            f"Pending: {pending} not settled yet; their records are not in the ledger, "
            "although the service may already count some of them."
        )
    if overview.unreachable_bytes:
        lost = several(overview.unreachable_bytes, "byte of inputs was gone", "bytes of inputs were gone")
        notes.append(f"{lost} before they were read.")
    if letters.unattributed:
        notes.append(f"Unattributed dead letters: {letters.unattributed:,}; their day, brand or media cannot be read.")
    if result.totals.surplus and overview.purged:
        letters_were = several(overview.purged, "dead letter of any day was", "dead letters of any day were")
        record = "record" if overview.purged == 1 else "records"
        notes.append(f"{letters_were} deleted; if the service had received the {record}, that explains a surplus.")
    if result.totals.surplus or not {"timestamp", "brand_id"}.isdisjoint(settings.records.relax):
        accepted = duplicates = 0
        for row in read_counts(settings.state.directory):
            accepted += row.accepted
            duplicates += row.duplicates
        # Replayed events whose EventIds had been accepted before are accepted in the totals, duplicates in the ledger.
        unknown = overview.accepted - accepted - max(0, duplicates - overview.duplicates)
        if unknown > 0:
            records = several(unknown, "record was accepted", "records were accepted")
            cause = "before the ledger begins, or with a relaxed Timestamp or BrandID that it cannot count"
            notes.append(f"{records} {cause}; no day includes them.")
    known = {*owners.media, *(media for account in owners.named.values() for media in account)}
    if count := sum(int(row.missing) for row in result.rows if row.result is None and row.pair.source not in known):
        records = several(count, "missing record counts", "missing records count")
        notes.append(
            f"{records} for this account only by AffiliateID: no report has the marketing source. If another account "
            "may have it, fetch that account's reports (shipper report fetch), and run it again."
        )
    return notes


def _render(form: Form, result: Reconciliation, notes: Sequence[str], target: Path | None) -> bytes:
    from shipper.report.exports import to_csv
    from shipper.report.reconcile import page, render

    match form:
        case "csv":
            return to_csv(render.flat_table(result))
        case "json":
            return render.to_json(result, notes)
        case "xlsx":
            return render.to_workbook(result, notes, created=datetime.fromtimestamp(time.time(), UTC))
        case "html":
            return page.render_page(result, notes, made_at=iso(time.time())).encode()
    return capture(lambda console: render.print_table(result, notes, console), target)
