"""`shipper report ACCOUNT START END`: shows the affiliate daily report in several formats."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
import typer

from shipper.cli.commands import flag, option
from shipper.cli.common import OutputOption, SettingsOptions, format_option, prepare
from shipper.cli.report.common import fetch_reports, finish, open_history_if_usable
from shipper.cli.report.options import AllowPartialOption, CheckOptions, PartsOptions, RequestOptions
from shipper.cli.writing import capture, check_target, is_special, write
from shipper.config.settings import Settings
from shipper.model.errors import ReportError
from shipper.model.units import iso

if TYPE_CHECKING:
    from shipper.report.checks import CheckedReport
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Coverage
    from shipper.report.history import History
    from shipper.report.ranges import Part
    from shipper.report.rows import ReportVersion

Form = Literal["table", "json", "ndjson", "csv", "parquet", "xlsx", "html"]
_DELIMITER_NAMES: Final = {"tab": "\t", r"\t": "\t"}


def show(
    selection: PartsOptions,
    form: Annotated[
        Form, format_option("table, csv, ndjson, parquet, xlsx, html, or json: the service's document, unchanged.")
    ] = "table",
    output: OutputOption = "",
    allow_partial: AllowPartialOption = False,
    delimiter: Annotated[str | None, option("CHARACTER", "The delimiter of CSV: , ; tab or |.")] = None,
    bom: Annotated[bool, flag("Begin CSV with a byte order mark, for Excel.", "--bom")] = False,
    *,
    requests: RequestOptions,
    checks: CheckOptions,
    options: SettingsOptions,
) -> None:
    """
    Fetch the affiliate daily report and show it.

    Several accounts or periods are fetched concurrently. If one cannot be fetched, the others are shown, the missing
    one is listed on stderr, at the top and beside the totals, and the exit code is 1. Findings go to stderr, too.

    Further commands, each with --help: `shipper report fetch` stores every version, `history` lists them, `diff` shows
    restated fields, `watch` waits for restatements.

    Example: shipper report 1001 2026-10 --format json -o october.json
    """
    from shipper.report.checks import all_findings, check_fetched
    from shipper.report.exports import check_installed
    from shipper.report.fetching import Coverage

    parts, tolerance = selection.parts(), checks.amount()
    out = Output(form, _check_delimiter(delimiter, form, has_bom=bom), bom, is_single=len(parts) == 1)
    target = check_target(output, form)
    settings = prepare(options, needs="report")
    check_installed(form)
    with _history_for(settings, form) as history:

        def use(part: Part, fetched: FetchedReport) -> tuple[bytes | ReportVersion, CheckedReport]:
            rendered = out.render(fetched, is_restated=_is_restated(part, fetched, history))
            return rendered, check_fetched(part, fetched, tolerance)

        outcome = fetch_reports(settings, parts, use, requests)
    reports = dict(outcome.reports)
    coverage = Coverage(parts, [part for part in parts if part not in reports])
    checked = [report for _, report in reports.values()]
    findings = all_findings(checked, tolerance, has_infos=checks.checks)
    if reports:
        check_partial(target, is_partial=bool(coverage.missing), is_allowed=allow_partial)
        texts = [finding.text(part) for part, finding in findings]
        write(out.join([rendered for rendered, _ in reports.values()], texts, coverage, target), target, form=form)
    raise finish(checked, findings, checks, is_complete=not coverage.missing)


def check_partial(target: Path | None, *, is_partial: bool, is_allowed: bool) -> None:
    """Raise ReportError if an existing file would be replaced by an incomplete one."""
    if is_partial and not is_allowed and target is not None and target.exists() and not is_special(target):
        raise ReportError(
            f"{str(target)!r} is unchanged, because some reports could not be fetched; to replace it with an "
            "incomplete result, use --allow-partial"
        )


def _check_delimiter(delimiter: str | None, form: Form, *, has_bom: bool) -> str:
    """Check the options of CSV, and return the delimiter; raise typer.BadParameter if they are invalid."""
    from shipper.report.exports import DELIMITERS

    if form != "csv" and (delimiter is not None or has_bom):
        raise typer.BadParameter(f"--delimiter and --bom are for --format csv, not {form}")
    chosen = "," if delimiter is None else _DELIMITER_NAMES.get(delimiter, delimiter)
    if chosen not in DELIMITERS:
        raise typer.BadParameter(f"{delimiter!r} is not one of: , ; tab |", param_hint="--delimiter")
    return chosen


def _history_for(settings: Settings, form: Form) -> AbstractContextManager[History | None]:
    """Open the history if there is one and the format marks restatements."""
    from shipper.report.history import FILE_NAME

    if form in {"table", "html", "xlsx"} and os.path.exists(settings.state.directory / FILE_NAME):
        return open_history_if_usable(settings, "restated figures are not marked")
    return nullcontext()


def _is_restated(part: Part, fetched: FetchedReport, history: History | None) -> bool:
    """Return whether a figure differs from the first stored version of the report."""
    from shipper.report.changes import is_restated

    if history is None:
        return False
    versions = history.versions(part)
    return bool(versions) and is_restated(history.report(versions[0]).report, fetched.report)


class Output(NamedTuple):
    """The output format; a single JSON document is not put into an array."""

    form: Form
    delimiter: str = ","
    has_bom: bool = False
    is_single: bool = True

    def render(self, fetched: FetchedReport, *, is_restated: bool) -> bytes | ReportVersion:
        """Return a report as bytes, which take little memory, if the format can be concatenated."""
        from shipper.report import exports
        from shipper.report.rows import ReportVersion, source_table

        fetched_at = "" if fetched.fetched_at is None else iso(fetched.fetched_at)
        report = ReportVersion(fetched.report, fetched_at, is_restated)
        match self.form:
            case "json":
                return fetched.body
            case "csv":
                return exports.to_csv(source_table([report]), delimiter=self.delimiter, has_header=False)
            case "ndjson":
                return exports.to_ndjson(source_table([report]))
        return report

    def join(
        self,
        rendered: Sequence[bytes | ReportVersion],
        findings: Sequence[str],
        coverage: Coverage,
        target: Path | None,
    ) -> bytes:
        """Join the results of `render` into one document; only the page shows the findings."""
        from shipper.report import exports
        from shipper.report.rows import account_table, source_table

        data = [item for item in rendered if isinstance(item, bytes)]
        reports = [item for item in rendered if not isinstance(item, bytes)]
        match self.form:
            case "json":
                documents = b"[" + b",\n".join(data) + b"]"
                if coverage.missing:
                    missing = msgspec.json.encode([part.as_json() for part in coverage.missing])
                    return b'{"is_complete":false,"missing":' + missing + b',"reports":' + documents + b"}\n"
                return data[0] if self.is_single else documents + b"\n"
            case "csv":
                header = exports.to_csv(source_table([]), delimiter=self.delimiter, has_bom=self.has_bom)
                return b"".join([header, *data])
            case "ndjson":
                return b"".join(data)
            case "table":
                from shipper.report.table import render_tables

                return capture(lambda console: render_tables(reports, console, coverage), target)
            case "html":
                from shipper.report.page import render_page

                return render_page(reports, findings, coverage).encode()
            case "parquet":
                return exports.to_parquet(source_table(reports))
            case "xlsx":
                created = datetime.fromtimestamp(time.time(), UTC)
                tables = [source_table(reports), account_table(reports)]
                return exports.to_xlsx(tables, created=created, notice=" ".join(coverage.lines()))
