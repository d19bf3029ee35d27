"""The output formats of reports."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
import typer

from shipper.cli.writing import is_special
from shipper.model.errors import ReportError
from shipper.model.units import iso

if TYPE_CHECKING:
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Coverage
    from shipper.report.rows import Fetched

Form = Literal["table", "json", "ndjson", "csv", "parquet", "xlsx", "html"]
_DELIMITER_NAMES: Final = {"tab": "\t", r"\t": "\t"}


def check_partial(target: Path | None, *, is_partial: bool, is_allowed: bool) -> None:
    """
    Refuse to replace an existing file by an incomplete one.

    Raises:
        ReportError: It would.
    """
    if is_partial and not is_allowed and target is not None and target.exists() and not is_special(target):
        raise ReportError(
            f"{str(target)!r} is left as it was, as not every report could be fetched; to replace it with "
            "those that could, give --allow-partial"
        )


def checked_delimiter(delimiter: str | None, form: Form, *, has_bom: bool) -> str:
    """
    Check the options that are those of CSV alone.

    Raises:
        typer.BadParameter: They do not go with the form, or the delimiter is none.
    """
    from shipper.report.exports import DELIMITERS

    if form != "csv" and (delimiter is not None or has_bom):
        raise typer.BadParameter(f"--delimiter and --bom are for --format csv, not {form}")
    chosen = "," if delimiter is None else _DELIMITER_NAMES.get(delimiter, delimiter)
    if chosen not in DELIMITERS:
        raise typer.BadParameter(f"{delimiter!r} is not one of: , ; tab |", param_hint="--delimiter")
    return chosen


class Piece(NamedTuple):
    """
    What is kept of a report until all are there.

    Attributes:
        data: Its part of the output, in forms that are put together of such.
        fetched: The report itself, in the other forms.
    """

    data: bytes = b""
    fetched: Fetched | None = None


class Output(NamedTuple):
    """
    How reports are to be written.

    Attributes:
        target: A file; None = stdout.
        is_one: One report was asked for, so that the document stands alone and not in an array.
    """

    form: Form
    target: Path | None = None
    delimiter: str = ","
    has_bom: bool = False
    is_one: bool = True

    def piece(self, report: FetchedReport, *, is_restated: bool) -> Piece:
        """Return what the form needs of a report."""
        from shipper.report import exports
        from shipper.report.rows import Fetched, source_table

        fetched = Fetched(report.report, iso(report.fetched_at) if report.fetched_at is not None else "", is_restated)
        match self.form:
            case "json":
                return Piece(report.body)
            case "csv":
                return Piece(exports.to_csv(source_table([fetched]), delimiter=self.delimiter, has_header=False))
            case "ndjson":
                return Piece(exports.to_ndjson(source_table([fetched])))
        return Piece(fetched=fetched)

    def joined(self, pieces: Sequence[Piece], findings: Sequence[str], coverage: Coverage) -> bytes:
        """
        Join the pieces into one document.

        Args:
            findings: For the page.
            coverage: What is missing.
        Raises:
            ReportError: A figure does not fit.
        """
        from shipper.report import exports
        from shipper.report.rows import account_table, source_table

        data = [piece.data for piece in pieces]
        fetched = [piece.fetched for piece in pieces if piece.fetched]
        match self.form:
            case "json":
                documents = b"[" + b",\n".join(data) + b"]"
                if coverage.missing:
                    missing = msgspec.json.encode(coverage.as_json())
                    return b'{"is_complete":false,"missing":' + missing + b',"reports":' + documents + b"}\n"
                return data[0] if self.is_one else documents + b"\n"
            case "csv":
                header = exports.to_csv(source_table([]), delimiter=self.delimiter, has_bom=self.has_bom)
                return b"".join([header, *data])
            case "ndjson":
                return b"".join(data)
            case "table":
                return _table(fetched, self.target, coverage)
            case "html":
                from shipper.report.page import render_page

                return render_page(fetched, findings, coverage).encode()
            case "parquet":
                return exports.to_parquet(source_table(fetched))
            case "xlsx":
                created = datetime.fromtimestamp(time.time(), UTC)
                tables = [source_table(fetched), account_table(fetched)]
                return exports.to_xlsx(tables, created=created, notice=" ".join(coverage.lines()))


def _table(fetched: Sequence[Fetched], target: Path | None, coverage: Coverage) -> bytes:
    from rich.console import Console

    from shipper.report.table import render_tables

    screen = Console()
    text = io.StringIO()
    has_colors = target is None and screen.is_terminal
    render_tables(fetched, Console(file=text, width=screen.width, force_terminal=has_colors), coverage)
    return text.getvalue().encode(screen.encoding if target is None else "utf-8", "replace")
