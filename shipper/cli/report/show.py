"""`shipper report ACCOUNT START END`: the affiliate daily report, in several forms."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from shipper.cli.common import OutputOption, SettingsOptions, format_option, prepare, run_async, with_settings_options
from shipper.cli.report.fetching import (
    Checked,
    all_findings,
    check,
    gather,
    print_failures,
    print_findings,
    print_unknown_fields,
)
from shipper.cli.report.keeping import opened_if_usable, read
from shipper.cli.report.options import (
    AccountsFileOption,
    AccountsOption,
    AllowPartialOption,
    ChecksOption,
    ConcurrencyOption,
    RequestRateOption,
    SplitOption,
    StrictOption,
    ToleranceOption,
    WordsArgument,
    selected,
    tolerance_of,
)
from shipper.cli.report.output import Form, Output, Piece, check_partial, checked_delimiter
from shipper.cli.writing import checked_target, write
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Part
    from shipper.report.history import History


class _Shown(NamedTuple):
    """What is kept of a report until it is shown."""

    piece: Piece
    checked: Checked
    unknown_fields: tuple[str, ...]


@with_settings_options
def show(
    words: WordsArgument,
    accounts: AccountsOption = None,
    accounts_file: AccountsFileOption = "",
    split: SplitOption = "month",
    form: Annotated[
        Form, format_option("table, ndjson, csv, parquet, xlsx or html, or json: the exact document.")
    ] = "table",
    output: OutputOption = "",
    allow_partial: AllowPartialOption = False,
    delimiter: Annotated[
        str | None, typer.Option("--delimiter", metavar="CHARACTER", help="The delimiter of CSV: , ; tab or |.")
    ] = None,
    bom: Annotated[bool, typer.Option("--bom", help="Begin CSV with a byte order mark, for Excel.")] = False,
    concurrency: ConcurrencyOption = 4,
    rate: RequestRateOption = 0.0,
    checks: ChecksOption = False,
    strict: StrictOption = False,
    tolerance: ToleranceOption = "0.01",
    *,
    options: SettingsOptions,
) -> None:
    """
    Fetch the affiliate daily report and show it.

    Several accounts or periods are fetched at once. If one cannot be fetched, it is listed on stderr, at the top and
    beside the totals, the others are shown, and the exit code is 1. Findings of the checks are on stderr, too.

    Further commands, each with --help: `shipper report fetch` keeps every version, `history` lists them, `diff` shows
    what was restated, `watch` waits for restatements.

    Example: shipper report 1001 2026-10 --format json -o october.json
    """
    from shipper.report.exports import check_installed
    from shipper.report.fetching import Coverage

    parts = selected(words, accounts, accounts_file, split)
    amount = tolerance_of(tolerance)
    separator = checked_delimiter(delimiter, form, has_bom=bom)
    out = Output(form, checked_target(output, form), separator, bom, is_one=len(parts) == 1)
    settings = prepare(options, needs="report")
    check_installed(form)

    with _history(settings, form) as history:

        def use(part: Part, fetched: FetchedReport) -> _Shown:
            piece = out.piece(fetched, is_restated=_is_restated(part, fetched, history))
            return _Shown(piece, check(part, fetched, amount), fetched.unknown_fields)

        outcome = run_async(lambda: gather(settings, parts, use, concurrency=concurrency, rate=rate))

    has_failed = print_failures(outcome)
    found = [shown for _, shown in outcome.reports]
    missing = {part for part, _ in outcome.failed} | set(outcome.left_out)
    coverage = Coverage(parts, [part for part in parts if part in missing])
    findings = all_findings([shown.checked for shown in found], amount, has_infos=checks)
    if found:
        check_partial(out.target, is_partial=has_failed, is_allowed=allow_partial)
        pieces = [shown.piece for shown in found]
        write(out.joined(pieces, [told.text for told in findings], coverage), out.target, form=out.form)
    print_unknown_fields(shown.unknown_fields for shown in found)
    calls = print_findings(findings, is_full=checks)
    if has_failed:
        raise typer.Exit(1)
    raise typer.Exit(3 if strict and calls else 0)


def _history(settings: Settings, form: Form) -> AbstractContextManager[History | None]:
    """Open the history if there is one and the form marks what was restated."""
    from shipper.report.history_file import FILE_NAME

    if form in {"table", "html", "xlsx"} and os.path.exists(settings.state.directory / FILE_NAME):
        return opened_if_usable(settings, "what was restated is not marked")
    return nullcontext()


def _is_restated(part: Part, fetched: FetchedReport, history: History | None) -> bool:
    """Return whether a figure of a report differs from that of the first one that was kept."""
    from shipper.report.changes import is_restated

    if history is None:
        return False
    versions = history.versions(part.account, *part.days)
    return bool(versions) and is_restated(read(history, versions[0]).report, fetched.report)
