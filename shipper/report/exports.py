"""
Writes flat tables as CSV, JSON lines, Parquet and workbooks.

Every Decimal keeps its exact value: if a format cannot represent it, the value is written as text, or an error raised.
Names are untrusted, and a spreadsheet evaluates text that begins like a formula, even after characters that it may
take for the end of a cell. So texts in CSV are quoted, with an apostrophe before every such beginning. JSON lines and
Parquet contain names unchanged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import MAX_PREC, Context, Decimal
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import msgspec

from shipper.model.errors import ReportError
from shipper.model.version import install_command
from shipper.report.rows import Column, FlatTable, Value

DELIMITERS: Final = (",", ";", "\t", "|")
_PACKAGES: Final = {"parquet": ("polars", "Parquet"), "xlsx": ("xlsxwriter", "a workbook")}
# "CSV Injection", OWASP. A spreadsheet may use other delimiters than ours, and skip quotes and invisible characters.
# Everything that may precede a formula is matched possessively, so that the time is linear.
_FORMULA_START: Final = re.compile(
    r"((?:^|[;,|\t\n\v\f\r\x85\u2028\u2029])(?:[^\w!-~\uff1d\uff0b\uff0d\uff20]|[;,|\"])*+)([=+\-@\uff1d\uff0b\uff0d\uff20]?)"
)
_BLANK_STARTS: Final = ("\t", "\r", "\n")
_BOM: Final = b"\xef\xbb\xbf"

_JSON: Final = msgspec.json.Encoder(decimal_format="number")

_PARQUET_DIGITS: Final = 38
# Fixed, so that the files of all days have the same schema, unless a figure needs more decimals.
_PARQUET_SCALES: Final = {"count": 0, "money": 4, "rate": 4}

_FIGURES: Final = {"count", "money", "rate"}  # can be added up; an integer may be an id
_EXCEL_DIGITS: Final = 15  # shown by a spreadsheet, and kept when a cell is edited
_EXCEL_DECIMALS: Final = 30
_EXCEL_ROWS: Final = 2**20
_WIDEST_COLUMN: Final = 40


def to_csv(table: FlatTable, *, delimiter: str = ",", has_bom: bool = False, has_header: bool = True) -> bytes:
    """Return CSV (RFC 4180) in UTF-8; Excel recognises UTF-8 only by a byte order mark."""
    assert delimiter in DELIMITERS, delimiter
    lines = [delimiter.join(column.name for column in table.columns)] if has_header else []
    lines += [delimiter.join(map(_csv_cell, row)) for row in table.rows]
    return (_BOM if has_bom else b"") + "".join(f"{line}\r\n" for line in lines).encode()


def _csv_cell(value: Value) -> str:
    match value:
        case Decimal():  # most of them
            return f"{value:f}"
        case None:
            return ""
        case bool():
            return str(value).lower()
        case str():
            quoted = _escape_formulas(value).replace('"', '""')
            return f'"{quoted}"'
    return str(value)


def _escape_formulas(text: str) -> str:
    """Put an apostrophe before everything that a spreadsheet may take for the beginning of a formula."""
    prefix = "'" if text.startswith(_BLANK_STARTS) else ""
    return prefix + _FORMULA_START.sub(lambda match: f"{match[1]}'{match[2]}" if match[2] else match[1], text)


def to_ndjson(table: FlatTable) -> bytes:
    """Return one JSON object per row; Decimals keep the scale of the document, missing values are null."""
    names = [column.name for column in table.columns]
    return b"".join(_JSON.encode(dict(zip(names, row, strict=True))) + b"\n" for row in table.rows)


def to_parquet(table: FlatTable) -> bytes:
    """Return Parquet, with 38 digits and 4 or more decimals as needed; raise ReportError if a value does not fit."""
    polars = _import_package("parquet")
    columns = [list(values) for values in zip(*table.rows, strict=True)] or [[] for _ in table.columns]
    frame = polars.DataFrame(
        [_series(polars, column, values) for column, values in zip(table.columns, columns, strict=True)]
    )
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def _series(polars: Any, column: Column, values: list[Value]) -> Any:
    try:
        series = polars.Series(column.name, values, dtype=_parquet_type(polars, column, values), strict=True)
    except (polars.exceptions.PolarsError, OverflowError, TypeError) as error:
        raise _misfit(column, "Parquet") from error
    if series.to_list() != values:  # polars rounds silently
        raise _misfit(column, "Parquet")
    return series


def _parquet_type(polars: Any, column: Column, values: list[Value]) -> Any:
    match column.kind:
        case "text":
            return polars.String()
        case "integer":
            return polars.Int64()
        case "flag":
            return polars.Boolean()
    decimals = [value for value in values if isinstance(value, Decimal)]
    scale = max([_PARQUET_SCALES[column.kind], *(_scale(_normalized(value)) for value in decimals)])
    whole_digits = max([1, *(value.adjusted() + 1 for value in decimals if value)])
    if whole_digits + scale > _PARQUET_DIGITS:
        raise _misfit(column, "Parquet")
    return polars.Decimal(_PARQUET_DIGITS, scale)


def _scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "figures are finite"
    return max(0, -exponent)


def _normalized(value: Decimal) -> Decimal:
    """Remove trailing zeros without rounding."""
    return value.normalize(Context(prec=MAX_PREC))


def to_xlsx(tables: Sequence[FlatTable], *, created: datetime, notice: str = "") -> bytes:
    """
    Return a workbook with one sheet per table.

    A spreadsheet uses binary floating point and keeps 15 digits. A figure with more digits is written as the nearest
    number, so that it can be added up, with a comment; an additional column contains the exact figures as text. An id
    with more digits is written as text. Names are text cells, so that none is a formula or a link.

    Args:
        notice: A line at the top of every sheet.
    Raises:
        ReportError: XlsxWriter is not installed, or a table or text is too large for a sheet or cell.
    """
    xlsxwriter = _import_package("xlsx")
    out = io.BytesIO()
    workbook = xlsxwriter.Workbook(out, {"in_memory": True})  # no temporary files with names
    workbook.set_properties({"created": created.replace(tzinfo=None)})
    for table in tables:
        _write_sheet(workbook, table, notice)
    workbook.close()
    return out.getvalue()


def _write_sheet(workbook: Any, table: FlatTable, notice: str) -> None:
    if len(table.rows) >= _EXCEL_ROWS:
        rows = f"{len(table.rows):,} rows and the column titles"
        raise ReportError(f"{table.name} does not fit into a sheet of {_EXCEL_ROWS:,} rows: it has {rows}")
    sheet = workbook.add_worksheet(table.name)
    title = workbook.add_format({"bold": True, "bottom": 1, "text_wrap": True, "valign": "top"})
    format_of = lru_cache(None)(lambda pattern: workbook.add_format({"num_format": pattern}))
    top = 0  # line of the titles
    if notice:
        sheet.write_string(top, 0, notice, workbook.add_format({"bold": True, "font_color": "#b00020"}))
        top += 1
    columns = [(column, [row[index] for row in table.rows]) for index, column in enumerate(table.columns)]
    columns += [
        (Column(f"{column.name}_exact", "text"), [None if value is None else _digits(value) for value in cells])
        for column, cells in columns
        if column.kind in _FIGURES and any(map(_is_rounded, cells))
    ]
    for index, (column, cells) in enumerate(columns):
        sheet.set_column(index, index, _width(column, cells))
        sheet.write_string(top, index, column.name, title)
        for line, value in enumerate(cells, start=top + 1):
            is_rounded = _is_rounded(value)
            if is_rounded and column.kind in _FIGURES:
                exact = f"Exactly: {_digits(value)}, as in the column {column.name}_exact."
                sheet.write_comment(line, index, f"Spreadsheets store 15 digits. {exact}", {"x_scale": 2})
            elif is_rounded:
                value = _digits(value)
            if not _write_cell(sheet, line, index, value, format_of):
                raise _misfit(column, "a sheet of a workbook")
    sheet.freeze_panes(top + 1, 0)
    if table.rows:
        sheet.autofilter(top, 0, top + len(table.rows), len(columns) - 1)


def _digits(value: Value) -> str:
    return f"{Decimal(value or 0):f}"


def _is_rounded(value: Value) -> bool:
    """Return whether a spreadsheet would lose digits of a number."""
    if isinstance(value, str | bool | None):
        return False
    exact = Decimal(value)
    has_more = len(exact.as_tuple().digits) > _EXCEL_DIGITS  # including trailing zeros
    return (has_more and len(_normalized(exact).as_tuple().digits) > _EXCEL_DIGITS) or _scale(exact) > _EXCEL_DECIMALS


def _write_cell(sheet: Any, line: int, index: int, value: Value, format_of: Callable[[str], Any]) -> bool:
    """Write a cell; return whether that was possible."""
    match value:
        case None:
            return True
        case bool():
            return bool(sheet.write_boolean(line, index, value) == 0)
        case str():
            return bool(sheet.write_string(line, index, value) == 0)
    exact = Decimal(value)
    scale = min(_scale(exact), _EXCEL_DECIMALS)
    pattern = "0" if isinstance(value, int) else "#,##0" + ("." + "0" * scale if scale else "")
    return bool(sheet.write_number(line, index, float(exact), format_of(pattern)) == 0)


def _width(column: Column, cells: list[Value]) -> int:
    """Return a width in characters; long titles wrap."""
    longest = max((len(_csv_cell(value)) for value in cells), default=0)
    return min(max(longest, len(column.name) // 2, 8) + 2, _WIDEST_COLUMN)


def check_installed(form: str) -> None:
    """Raise ReportError if the package that a format needs is not installed."""
    if form in _PACKAGES:
        _import_package(form)


def _import_package(form: str) -> Any:
    package, name = _PACKAGES[form]
    try:
        return import_module(package)
    except ImportError:
        raise ReportError(f"{name} needs {package}, which is not installed; run: {install_command(package)}") from None


def _misfit(column: Column, form: str) -> ReportError:
    return ReportError(f"a value of {column.name} does not fit into {form}; CSV and JSON lines have no such limit")
