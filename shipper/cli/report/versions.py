"""`shipper report fetch`, `history` and `diff`: store, list and compare the versions of reports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer
from msgspec.structs import asdict

from shipper.cli.commands import option
from shipper.cli.common import (
    SettingsOptions,
    format_option,
    in_columns,
    prepare,
    print_json,
    say,
    tolerate_closed_stdout,
)
from shipper.cli.report.common import fetch_reports, finish, open_history
from shipper.cli.report.options import (
    AccountArgument,
    CheckOptions,
    EndArgument,
    OptionalStartArgument,
    PartsOptions,
    RequestOptions,
    StartArgument,
    days_between,
)
from shipper.cli.writing import write_lines
from shipper.model.errors import ReportError
from shipper.model.units import iso, several
from shipper.report.ranges import DateRange, Part

if TYPE_CHECKING:
    from shipper.report.changes import Change
    from shipper.report.checks import CheckedReport
    from shipper.report.document import FetchedReport
    from shipper.report.history import Comparison, History, Version


_ARROW = "\N{RIGHTWARDS ARROW}"
_JSON: Final = msgspec.json.Encoder(decimal_format="number")
_ALL_DAYS: Final = DateRange(date.min, date.max)
FormOption = Annotated[Literal["text", "json"], format_option("text, or json: one object.")]


def fetch(
    selection: PartsOptions,
    requests: RequestOptions,
    checks: CheckOptions,
    form: FormOption = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Fetch reports, store every version in the state directory, and show which are new, unchanged or restated.

    Can be used while shipper is running.

    Example: shipper report fetch 1001 2026-10-01 2026-12-31
    """
    from shipper.report.checks import all_findings, check_fetched

    parts, tolerance = selection.parts(), checks.amount()
    settings = prepare(options, needs="report")
    with open_history(settings) as history:

        def use(part: Part, fetched: FetchedReport) -> tuple[Comparison, CheckedReport]:
            comparison = history.add_and_compare(part, fetched)
            return comparison._replace(earlier=None), check_fetched(part, fetched, tolerance, comparison.earlier)

        outcome = fetch_reports(settings, parts, use, requests)
    missing = [
        *({**part.as_json(), "reason": str(error)} for part, error in outcome.failed),
        *({**part.as_json(), "reason": "not requested"} for part in outcome.not_requested),
    ]
    checked = [report for _, (_, report) in outcome.reports]
    findings = all_findings(checked, tolerance, has_infos=checks.checks)
    if form == "json":
        _write_json(
            {
                "is_complete": not missing,
                "reports": [
                    {
                        **part.as_json(),
                        "status": comparison.status,
                        "changed_fields": len(comparison.changes),
                        **_version_document(comparison.version),
                    }
                    for part, (comparison, _) in outcome.reports
                ],
                "missing": missing,
                "findings": [{**asdict(finding), "text": finding.text(part)} for part, finding in findings],
            }
        )
    else:
        write_lines(describe(part, comparison) for part, (comparison, _) in outcome.reports)
    raise finish(checked, findings, checks, is_complete=not missing)


def describe(part: Part, comparison: Comparison) -> str:
    match comparison.status:
        case "new":
            text = "new"
        case "unchanged":
            text = f"unchanged since {iso(comparison.version.first_fetched_at)}"
        case "restated" | "document changed":
            command = ["shipper", "report", "diff", str(part.account), *map(str, part.days)]
            text = f"{comparison.status}, {_count(len(comparison.changes))}; see: {shlex.join(command)}"
    return f"{part}: {text}"


def _count(changes: int) -> str:
    return several(changes, "field differs", "fields differ") if changes else "only undocumented fields differ"


def history(
    account: AccountArgument,
    start: OptionalStartArgument = "",
    end: EndArgument = "",
    form: FormOption = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    List the stored versions of an account's reports, of all days or of those within START and END.

    Example: shipper report history 1001
    """
    days = days_between(start, end) if start else _ALL_DAYS
    settings = prepare(options)
    with open_history(settings, is_read_only=True) as reports:
        versions = list(_with_states(reports, reports.within(Part(account, days))))
    if form == "json":
        documents = [{**_version_document(version), "state": state} for version, state in versions]
        _write_json({"account_id": account, "versions": documents})
    elif versions:
        write_lines([_table(versions)])
    if not versions:
        say(f"no report of account {account} is stored; to store some: shipper report fetch")


def _with_states(history: History, versions: Sequence[Version]) -> Iterator[tuple[Version, str]]:
    """Yield the versions with their states: first of the period, restated, or document changed."""
    from shipper.report.changes import is_restated

    for _, period_versions in groupby(versions, key=lambda version: version.days):
        previous = None
        for version in period_versions:
            report = history.report(version).report
            state = "restated" if previous is None or is_restated(previous, report) else "document changed"
            yield version, "first" if previous is None else state
            previous = report


def _table(versions: Sequence[tuple[Version, str]]) -> str:
    from shipper.report.formatting import clean

    rows: list[tuple[str, ...]] = [("version", "period", "first fetched", "last fetched", "times", "state", "checksum")]
    for version, state in versions:
        times = iso(version.first_fetched_at), iso(version.last_fetched_at), str(version.fetches)
        rows.append((str(version.number), str(version.days), *times, state, clean(version.check_sum)[:12]))
    return in_columns(rows)


def diff(
    account: AccountArgument,
    start: StartArgument,
    end: EndArgument = "",
    numbers: Annotated[
        tuple[int, int] | None,
        option("A B", "Two version numbers of `history` (default: the latest two).", "--versions"),
    ] = None,
    form: FormOption = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Show restated fields with their old and new values, from the stored reports of the periods within START and END.

    Example: shipper report diff 1001 2026-10-01 2026-10-31
    """
    from shipper.report.changes import diff as compare

    days = days_between(start, end)
    settings = prepare(options)
    with open_history(settings, is_read_only=True) as reports:
        versions = reports.within(Part(account, days))
        if not versions:
            raise ReportError(
                f"no report of account {account} within {days.start} and {days.end} is stored; to list the stored "
                f"ones: shipper report history {account}"
            )
        pairs = [_choose_pair(versions, *numbers)] if numbers else _latest_pairs(versions)
        differences = [
            _difference(old, new, compare(reports.report(old).report, reports.report(new).report)) for old, new in pairs
        ]
    if form == "json":
        _write_json({"account_id": account, "differences": differences})
    else:
        write_lines(_as_text(account, difference) for difference in differences)
    if not pairs:
        say("nothing was restated")


def _choose_pair(versions: Sequence[Version], *numbers: int) -> tuple[Version, Version]:
    """Return two versions by number; raise typer.BadParameter if one is missing or their periods differ."""
    by_number = {version.number: version for version in versions}
    for number in numbers:
        if number not in by_number:
            raise typer.BadParameter(
                f"there is no version {number}; there are: {', '.join(map(str, by_number))}", param_hint="--versions"
            )
    old, new = (by_number[number] for number in numbers)
    if old.days != new.days:
        raise typer.BadParameter(
            f"version {old.number} is of {old.days}, version {new.number} of {new.days}", param_hint="--versions"
        )
    return old, new


def _latest_pairs(versions: Sequence[Version]) -> list[tuple[Version, Version]]:
    """Return the two latest versions of every period that has several."""
    periods = [list(group) for _, group in groupby(versions, key=lambda version: version.days)]
    return [pair for period_versions in periods for pair in list(pairwise(period_versions))[-1:]]


def _difference(old: Version, new: Version, changes: Sequence[Change]) -> dict[str, Any]:
    return {
        "start": new.start,
        "end": new.end,
        "old": _version_document(old),
        "new": _version_document(new),
        "is_restated": any(change.is_figure for change in changes),
        "changes": list(map(_change, changes)),
    }


def _change(change: Change) -> dict[str, Any]:
    from shipper.model import wire
    from shipper.report.metrics import minus

    old, new = (
        {"id": value.id, "name": value.name} if isinstance(value, wire.Brand | wire.MarketingSource) else value
        for value in (change.old, change.new)
    )
    return {
        "field": change.path,
        "brand_id": change.brand,
        "source_id": change.marketing_source,
        "old": old,
        "new": new,
        "difference": minus(new, old) if isinstance(old, Decimal) and isinstance(new, Decimal) else None,
        "is_figure": change.is_figure,
    }


def _as_text(account: int, difference: dict[str, Any]) -> str:
    from shipper.report.formatting import clean

    old, new = (
        f"version {version['version']} of {version['first_fetched_at']}"
        for version in (difference["old"], difference["new"])
    )
    days = DateRange(difference["start"], difference["end"])
    lines = [f"account {account}, {days}: {old} {_ARROW} {new}, {_count(len(difference['changes']))}"]
    for change in difference["changes"]:
        by = "" if change["difference"] is None else f" ({change['difference']:+f})"
        lines.append(clean(f"{change['field']}: {_value(change['old'])} {_ARROW} {_value(change['new'])}{by}"))
    return "\n  ".join(lines)


def _value(value: object) -> str:
    match value:
        case None:
            return "missing"
        case Decimal():
            return f"{value:f}"
        case dict():
            return value["name"] or "there"
    return str(value)


def _write_json(document: object) -> None:
    with tolerate_closed_stdout():
        print_json(_JSON.encode(document))


def _version_document(version: Version) -> dict[str, Any]:
    return {
        "version": version.number,
        "start": version.start,
        "end": version.end,
        "first_fetched_at": iso(version.first_fetched_at),
        "last_fetched_at": iso(version.last_fetched_at),
        "fetches": version.fetches,
        "checksum": version.check_sum,
    }
