"""
The flat tables of the report as CSV, JSON lines, Parquet and a workbook.

Every Decimal comes out with the value it has in the document: a form that cannot hold it says so, or holds its text.
Names come from outside, and a spreadsheet takes a text that begins like a formula for one, also behind what it may take
for the end of a cell. In CSV texts are quoted, and an apostrophe stands before each such beginning. JSON lines and
Parquet have the names as they are.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from decimal import MAX_PREC, Context, Decimal
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from shipper.model.errors import ReportError
from shipper.report.rows import Column, FlatTable, Value

DELIMITERS: Final = (",", ";", "\t", "|")
_PACKAGES: Final = {"parquet": ("polars", "Parquet"), "xlsx": ("xlsxwriter", "a workbook")}
# "CSV Injection", OWASP. A spreadsheet may take other delimiters than ours, and skip quotes and what cannot be seen.
# Whatever may stand before a formula is taken as a whole, so that the time is linear.
_FORMULA_START: Final = re.compile(
    r"((?:^|[;,|\t\n\v\f\r\x85\u2028\u2029])(?:[^\w!-~\uff1d\uff0b\uff0d\uff20]|[;,|\"])*+)([=+\-@\uff1d\uff0b\uff0d\uff20]?)"
)
_BLANK_STARTS: Final = ("\t", "\r", "\n")
_BOM: Final = b"\xef\xbb\xbf"

_JSON: Final = msgspec.json.Encoder(decimal_format="number")

_PARQUET_DIGITS: Final = 38
# So that the files of all days have one schema, unless a figure needs more decimals.
_PARQUET_SCALES: Final = {"count": 0, "money": 4, "rate": 4}

_EXCEL_DIGITS: Final = 15  # what a spreadsheet shows of a number, and keeps when a person edits it
_EXCEL_DECIMALS: Final = 30
_EXCEL_ROWS: Final = 2**20
_WIDEST_COLUMN: Final = 40


def to_csv(table: FlatTable, *, delimiter: str = ",", has_bom: bool = False, has_header: bool = True) -> bytes:
    """
    Write CSV as RFC 4180 describes it, in UTF-8: a header, one line per row, no totals.

    Args:
        delimiter: One of `DELIMITERS`.
        has_bom: Begin with the mark by which Excel knows UTF-8.
        has_header: Begin with the names of the columns.
    """
    assert delimiter in DELIMITERS, delimiter
    lines = [[column.name for column in table.columns]] if has_header else []
    lines += [[_csv_cell(value) for value in row] for row in table.rows]
    return (_BOM if has_bom else b"") + "".join(f"{delimiter.join(line)}\r\n" for line in lines).encode()


def _csv_cell(value: Value) -> str:
    match value:
        case Decimal():  # most of them
            return f"{value:f}"
        case None:
            return ""
        case bool():
            return str(value).lower()
        case str():
            quoted = _guarded(value).replace('"', '""')
            return f'"{quoted}"'
    return str(value)


def _guarded(text: str) -> str:
    """Put an apostrophe before whatever in a text a spreadsheet might take for the beginning of a formula."""
    before = "'" if text.startswith(_BLANK_STARTS) else ""
    return before + _FORMULA_START.sub(lambda found: f"{found[1]}'{found[2]}" if found[2] else found[1], text)


def to_ndjson(table: FlatTable) -> bytes:
    """Write one JSON object per row; Decimals are numbers with the scale of the document, what is missing is null."""
    names = [column.name for column in table.columns]
    return b"".join(_JSON.encode(dict(zip(names, row, strict=True))) + b"\n" for row in table.rows)


def to_parquet(table: FlatTable) -> bytes:
    """
    Write Parquet; Decimals have 38 digits, 4 of them behind the point, or as many more as the figures need.

    Raises:
        ReportError: polars is not installed, or a figure does not fit.
    """
    polars = _required("parquet")
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
        raise _no_place(column, "Parquet") from error
    if series.to_list() != values:  # polars rounds in silence
        raise _no_place(column, "Parquet")
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
    scale = max([_PARQUET_SCALES[column.kind], *(_scale(_shortest(value)) for value in decimals)])
    whole_digits = max([1, *(value.adjusted() + 1 for value in decimals if value)])
    if whole_digits + scale > _PARQUET_DIGITS:
        raise _no_place(column, "Parquet")
    return polars.Decimal(_PARQUET_DIGITS, scale)


def _scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "figures are finite"
    return max(0, -exponent)


def _shortest(value: Decimal) -> Decimal:
    """Leave out the zeros at the end, but do not round."""
    return value.normalize(Context(prec=MAX_PREC))


def to_xlsx(tables: Sequence[FlatTable], *, created: datetime, notice: str = "") -> bytes:
    """
    Write a workbook: one sheet per table.

    A spreadsheet counts in binary fractions and keeps 15 digits. A figure that has more is the nearest number, so that
    it is added up with the others, with a note; the column has one of text behind the others then, which has every
    figure exactly. A number of more digits that names something is text. Names are cells of text, so that none of them
    is a formula or a link.

    Args:
        created: What the workbook says when it was made.
        notice: What stands at the top of every sheet.
    Raises:
        ReportError: XlsxWriter is not installed, or a table or text is larger than a sheet or cell.
    """
    xlsxwriter = _required("xlsx")
    out = io.BytesIO()
    workbook = xlsxwriter.Workbook(out, {"in_memory": True})  # otherwise names would lie in temporary files
    workbook.set_properties({"created": created.replace(tzinfo=None)})
    for table in tables:
        _write_sheet(workbook, table, notice)
    workbook.close()
    return out.getvalue()


def _write_sheet(workbook: Any, table: FlatTable, notice: str) -> None:
    if len(table.rows) >= _EXCEL_ROWS:
        raise ReportError(f"a sheet has {_EXCEL_ROWS:,} lines at most, {table.name} has {len(table.rows):,} rows")
    sheet = workbook.add_worksheet(table.name)
    title = workbook.add_format({"bold": True, "bottom": 1, "text_wrap": True, "valign": "top"})
    format_of = lru_cache(None)(lambda pattern: workbook.add_format({"num_format": pattern}))

    columns = [(column, [row[index] for row in table.rows]) for index, column in enumerate(table.columns)]
    rounded = {column: cells for column, cells in columns if any(map(_is_rounded, cells))}
    columns += [(_exact(column), list(map(_as_text, cells))) for column, cells in rounded.items() if _is_figure(column)]
    top = 0  # the line of the titles
    if notice:
        sheet.write_string(top, 0, notice, workbook.add_format({"bold": True, "font_color": "#b00020"}))
        top += 1
    for index, (column, cells) in enumerate(columns):
        sheet.set_column(index, index, _width(column, cells))
        sheet.write_string(top, index, column.name, title)
        for line, value in enumerate(cells, start=top + 1):
            is_rounded = column in rounded and _is_rounded(value)
            if is_rounded and _is_figure(column):
                text = f"Exactly: {_as_text(value)}, as in the column {_exact(column).name}."
                sheet.write_comment(line, index, f"A spreadsheet keeps 15 digits. {text}", {"x_scale": 2})
            shown = _as_text(value) if is_rounded and not _is_figure(column) else value
            if _write_cell(sheet, line, index, shown, format_of) != 0:
                raise _no_place(column, "a sheet of a workbook")
    sheet.freeze_panes(top + 1, 0)
    if table.rows:
        sheet.autofilter(top, 0, top + len(table.rows), len(columns) - 1)


def _is_figure(column: Column) -> bool:
    """Return whether a column is to be added up; a whole number may be a name."""
    return column.kind in {"count", "money", "rate"}


def _exact(column: Column) -> Column:
    return Column(f"{column.name}_exact", "text")


def _as_text(value: Value) -> str | None:
    return None if value is None else f"{Decimal(value):f}"


def _is_rounded(value: Value) -> bool:
    """Return whether a spreadsheet keeps only a part of the digits of a number."""
    if isinstance(value, str | bool | None):
        return False
    exact = Decimal(value)
    return len(_shortest(exact).as_tuple().digits) > _EXCEL_DIGITS or _scale(exact) > _EXCEL_DECIMALS


def _write_cell(sheet: Any, line: int, index: int, value: Value, format_of: Callable[[str], Any]) -> int:
    """Write one cell; answers with 0, or with XlsxWriter's code for what it could not write."""
    match value:
        case None:
            return 0
        case bool():
            return int(sheet.write_boolean(line, index, value))
        case str():
            return int(sheet.write_string(line, index, value))
    exact = Decimal(value)
    scale = min(_scale(exact), _EXCEL_DECIMALS)
    pattern = "0" if isinstance(value, int) else "#,##0" + ("." + "0" * scale if scale else "")
    return int(sheet.write_number(line, index, float(exact), format_of(pattern)))


def _width(column: Column, cells: list[Value]) -> int:
    """Choose a width in characters; long titles wrap."""
    longest = max((len(_csv_cell(value)) for value in cells), default=0)
    return min(max(longest, len(column.name) // 2, 8) + 2, _WIDEST_COLUMN)


def check_installed(form: str) -> None:
    """
    Raise before anything is fetched if a form cannot be written.

    Raises:
        ReportError: Its package is not installed.
    """
    if form in _PACKAGES:
        _required(form)


def _required(form: str) -> Any:
    """Import a package of the extra `report`."""
    package, name = _PACKAGES[form]
    try:
        return import_module(package)
    except ImportError:
        raise ReportError(f"{name} needs {package}, which is not installed; run: {_way_to_install(package)}") from None


def _way_to_install(package: str) -> str:
    """Return the command that installs a package beside shipper, where this process runs."""
    if "pipx" in Path(sys.prefix).parts:
        return f"pipx inject acquisition-shipper {package}"
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


def _no_place(column: Column, form: str) -> ReportError:
    return ReportError(f"a value of {column.name} does not fit into {form}; CSV and JSON lines hold every value")
