"""`shipper report fetch`, `history` and `diff`: every version of a report is kept, so that a restatement is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from shipper.cli.common import (
    SettingsOptions,
    in_columns,
    prepare,
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
from shipper.cli.report.keeping import differing, in_words, keep, opened, read
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


class _Fetched(NamedTuple):
    """What is kept of a report until all are there: what became of it, in words, and what is told of it."""

    text: str
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
            return _Fetched(in_words(kept), checked, fetched.unknown_fields)

        outcome = run_async(lambda: gather(settings, parts, use, concurrency=concurrency, rate=rate))
    found = [fetched for _, fetched in outcome.reports]
    write_lines(fetched.text for fetched in found)
    print_unknown_fields(fetched.unknown_fields for fetched in found)
    findings = all_findings([fetched.checked for fetched in found], amount, has_infos=checks)
    calls = print_findings(findings, is_full=checks)
    if print_failures(outcome):
        raise typer.Exit(1)
    raise typer.Exit(3 if strict and calls else 0)


@with_settings_options
def history(
    account: AccountArgument,
    start: OptionalStartArgument = "",
    end: EndArgument = "",
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
        versions = kept.within(account, *days)
        table = _table(kept, versions)
    if versions:
        write_lines([table])
    else:
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
    old, new = change.old, change.new
    by = ""
    if isinstance(old, Decimal) and isinstance(new, Decimal):
        from shipper.report.metrics import difference

        by = f" ({difference(new, old):+f})"
    return f"{change.path}: {_value(old)} {_ARROW} {_value(new)}{by}"


def _value(value: object) -> str:
    from shipper.model import wire

    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, wire.Brand | wire.MarketingSource):
        return value.name or "there"
    return "missing" if value is None else str(value)


def _table(history: History, versions: Sequence[Version]) -> str:
    from shipper.report.changes import is_restated
    from shipper.report.wording import clean

    rows: list[tuple[str, ...]] = [("version", "period", "first fetched", "last fetched", "times", "state", "checksum")]
    for _, found in groupby(versions, key=lambda version: version.days):
        before: wire.DailyReport | None = None
        for each in found:
            report = read(history, each).report
            times = iso(each.first_fetched_at), iso(each.last_fetched_at), str(each.fetches)
            status = "first" if before is None else "restated" if is_restated(before, report) else "document changed"
            rows.append((str(each.number), str(each.days), *times, status, clean(each.check_sum)))
            before = report
    return in_columns(rows)
