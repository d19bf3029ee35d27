"""`shipper report fetch`, `history` and `diff`: every version of a report is kept, so that a restatement is noticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from decimal import Decimal
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import typer
from msgspec.structs import asdict

from shipper.cli.common import (
    SettingsOptions,
    format_option,
    in_columns,
    prepare,
    print_json,
    reader_may_leave,
    run_async,
    say,
    with_settings_options,
)
from shipper.cli.report.fetching import (
    Checked,
    all_findings,
    check,
    gather,
    print_failures,
    print_findings,
    print_unknown_fields,
)
from shipper.cli.report.keeping import Kept, differing, in_words, keep, opened, read
from shipper.cli.report.options import (
    AccountArgument,
    AccountsFileOption,
    AccountsOption,
    ChecksOption,
    ConcurrencyOption,
    EndArgument,
    OptionalStartArgument,
    RequestRateOption,
    SplitOption,
    StartArgument,
    StrictOption,
    ToleranceOption,
    WordsArgument,
    days_between,
    selected,
    tolerance_of,
)
from shipper.cli.writing import write_lines
from shipper.model.errors import ReportError
from shipper.model.units import iso
from shipper.report.ranges import DateRange

if TYPE_CHECKING:
    from shipper.model import wire
    from shipper.report.changes import Change
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Part
    from shipper.report.history import History, Version


_ARROW = "\N{RIGHTWARDS ARROW}"
_JSON: Final = msgspec.json.Encoder(decimal_format="number")
FormOption = Annotated[Literal["text", "json"], format_option("text, or json: one object.")]


class _Fetched(NamedTuple):
    """What is kept of a report until all are there: what became of it, in both forms, and what is told of it."""

    text: str
    document: dict[str, Any]
    checked: Checked
    unknown_fields: tuple[str, ...]


@with_settings_options
def fetch(
    words: WordsArgument,
    accounts: AccountsOption = None,
    accounts_file: AccountsFileOption = "",
    split: SplitOption = "month",
    concurrency: ConcurrencyOption = 4,
    rate: RequestRateOption = 0.0,
    checks: ChecksOption = False,
    strict: StrictOption = False,
    tolerance: ToleranceOption = "0.01",
    form: FormOption = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Fetch reports, keep every version in the state directory, and show which are new, unchanged or restated.

    Works while a shipper runs.

    Example: shipper report fetch 1001 2026-10-01 2026-12-31
    """
    parts = selected(words, accounts, accounts_file, split)
    amount = tolerance_of(tolerance)
    settings = prepare(options, needs="report")
    with opened(settings) as history:

        def use(part: Part, fetched: FetchedReport) -> _Fetched:
            kept = keep(history, part, fetched)
            checked = check(part, fetched, amount, earlier=kept.earlier)
            return _Fetched(in_words(kept), _kept_document(kept), checked, fetched.unknown_fields)

        outcome = run_async(lambda: gather(settings, parts, use, concurrency=concurrency, rate=rate))
    found = [fetched for _, fetched in outcome.reports]
    findings = all_findings([fetched.checked for fetched in found], amount, has_infos=checks)
    if form == "json":
        missing = [
            *({**_part_document(part), "reason": str(error)} for part, error in outcome.failed),
            *({**_part_document(part), "reason": "not requested"} for part in outcome.left_out),
        ]
        _write_json(
            {
                "is_complete": not missing,
                "reports": [fetched.document for fetched in found],
                "missing": missing,
                "findings": [{**asdict(told.finding), "text": told.text} for told in findings],
            }
        )
    else:
        write_lines(fetched.text for fetched in found)
    print_unknown_fields(fetched.unknown_fields for fetched in found)
    calls = print_findings(findings, is_full=checks)
    if print_failures(outcome):
        raise typer.Exit(1)
    raise typer.Exit(3 if strict and calls else 0)


@with_settings_options
def history(
    account: AccountArgument,
    start: OptionalStartArgument = "",
    end: EndArgument = "",
    form: FormOption = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    List the kept versions of an account's reports: of all, or of those within START and END.

    Example: shipper report history 1001
    """
    days = days_between(start, end) if start else DateRange(date.min, date.max)
    settings = prepare(options)
    with opened(settings) as kept:
        found = list(_listed(kept, kept.within(account, *days)))
    if form == "json":
        versions = [{**_version_document(each), "state": state} for each, state in found]
        _write_json({"account_id": account, "versions": versions})
    elif found:
        write_lines([_table(found)])
    if not found:
        say(f"no report of account {account} is kept; to keep some: shipper report fetch")


@with_settings_options
def diff(
    account: AccountArgument,
    start: StartArgument,
    end: EndArgument = "",
    numbers: Annotated[
        tuple[int, int] | None,
        typer.Option("--versions", metavar="A B", help="Two version numbers of `history` (default: the latest two)."),
    ] = None,
    form: FormOption = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Show which fields were restated, old and new, in the kept reports of the periods within START and END.

    Example: shipper report diff 1001 2026-10-01 2026-10-31
    """
    days = days_between(start, end)
    settings = prepare(options)
    with opened(settings) as kept:
        versions = kept.within(account, *days)
        if not versions:
            raise ReportError(
                f"no report of account {account} within {days.start} and {days.end} is kept; "
                f"there are: shipper report history {account}"
            )
        pairs = [_chosen(versions, *numbers)] if numbers else _latest_pairs(versions)
        if form == "json":
            differences = [_difference_document(kept, old, new) for old, new in pairs]
            _write_json({"account_id": account, "differences": differences})
        else:
            write_lines(_difference(kept, old, new) for old, new in pairs)
    if not pairs:
        say("nothing was restated")


def _chosen(versions: Sequence[Version], *numbers: int) -> tuple[Version, Version]:
    """
    Raises:
        typer.BadParameter: A number is that of no version, or they are of two periods.
    """
    known = {version.number: version for version in versions}
    for number in numbers:
        if number not in known:
            raise typer.BadParameter(
                f"there is no version {number} of these; there are: {', '.join(map(str, known))}",
                param_hint="--versions",
            )
    old, new = (known[number] for number in numbers)
    if (old.start, old.end) != (new.start, new.end):
        raise typer.BadParameter(
            f"version {old.number} is of {old.days}, version {new.number} of {new.days}", param_hint="--versions"
        )
    return old, new


def _latest_pairs(versions: Sequence[Version]) -> list[tuple[Version, Version]]:
    periods = [list(found) for _, found in groupby(versions, key=lambda version: version.days)]
    return [pair for found in periods for pair in list(pairwise(found))[-1:]]


def _difference(history: History, old: Version, new: Version) -> str:
    from shipper.report.changes import diff
    from shipper.report.wording import clean

    changes = diff(read(history, old).report, read(history, new).report)
    title = (
        f"account {new.account}, {new.days}: version {old.number} of {iso(old.first_fetched_at)} {_ARROW} "
        f"version {new.number} of {iso(new.first_fetched_at)}, {differing(tuple(changes))}"
    )
    return "\n".join([title, *(f"  {clean(_in_words(change))}" for change in changes)])


def _in_words(change: Change) -> str:
    by = _by(change)
    difference = "" if by is None else f" ({by:+f})"
    return f"{change.path}: {_value(change.old)} {_ARROW} {_value(change.new)}{difference}"


def _by(change: Change) -> Decimal | None:
    """Return by how much a figure changed; None if it is none, or was or is missing."""
    from shipper.report.metrics import difference

    if isinstance(change.old, Decimal) and isinstance(change.new, Decimal):
        return difference(change.new, change.old)
    return None


def _value(value: object) -> str:
    from shipper.model import wire

    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, wire.Brand | wire.MarketingSource):
        return value.name or "there"
    return "missing" if value is None else str(value)


def _listed(history: History, versions: Sequence[Version]) -> Iterator[tuple[Version, str]]:
    """Yield each version, and whether it is the first of its period, restated or a changed document."""
    from shipper.report.changes import is_restated

    for _, found in groupby(versions, key=lambda version: version.days):
        before: wire.DailyReport | None = None
        for each in found:
            report = read(history, each).report
            yield each, "first" if before is None else "restated" if is_restated(before, report) else "document changed"
            before = report


def _table(versions: Iterable[tuple[Version, str]]) -> str:
    from shipper.report.wording import clean

    rows: list[tuple[str, ...]] = [("version", "period", "first fetched", "last fetched", "times", "state", "checksum")]
    for each, state in versions:
        times = iso(each.first_fetched_at), iso(each.last_fetched_at), str(each.fetches)
        rows.append((str(each.number), str(each.days), *times, state, clean(each.check_sum)[:12]))
    return in_columns(rows)


def _write_json(document: object) -> None:
    with reader_may_leave():
        print_json(_JSON.encode(document))


def _part_document(part: Part) -> dict[str, Any]:
    return {"account_id": part.account, "start": part.days.start, "end": part.days.end}


def _kept_document(kept: Kept) -> dict[str, Any]:
    status = "document changed" if kept.status == "changed" else kept.status
    changes = {"status": status, "changed_fields": len(kept.changes)}
    return {**_part_document(kept.part), **changes, **_version_document(kept.version)}


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


def _difference_document(history: History, old: Version, new: Version) -> dict[str, Any]:
    from shipper.report.changes import diff

    changes = diff(read(history, old).report, read(history, new).report)
    return {
        "start": new.start,
        "end": new.end,
        "old": _version_document(old),
        "new": _version_document(new),
        "is_restated": any(change.is_figure for change in changes),
        "changes": [_change_document(change) for change in changes],
    }


def _change_document(change: Change) -> dict[str, Any]:
    from shipper.model import wire

    def value(of: object) -> object:
        return {"id": of.id, "name": of.name} if isinstance(of, wire.Brand | wire.MarketingSource) else of

    return {
        "field": change.path,
        "brand_id": change.brand,
        "source_id": change.marketing_source,
        "old": value(change.old),
        "new": value(change.new),
        "difference": _by(change),
        "is_figure": change.is_figure,
    }
