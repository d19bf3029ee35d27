"""The flat tables as files: read back with other libraries, every figure equals the document."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import sys
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import pytest

from shipper.cli.writing import write
from shipper.model import wire
from shipper.model.errors import ReportError, ShipperError
from shipper.report.exports import DELIMITERS, to_csv, to_ndjson, to_parquet, to_xlsx
from shipper.report.rows import Column, FlatTable, account_table, source_table
from tests.cases import each
from tests.report_documents import HOSTILE_NAMES, brand, entry, fetched, hostile, months, pair, report

if TYPE_CHECKING:  # openpyxl takes a third of a second, which every process that collects tests would spend
    import openpyxl

CREATED = datetime(2026, 2, 2, 8, 15, tzinfo=UTC)
LONG = "123456789012345678901234567890.123400000000000000000000000001"  # 60 digits

# Figures that a binary fraction, 28 digits or four decimals cannot hold.
AWKWARD = ("0.1", "1.23456", "-0.0001", "1234567890123.4567", "99999999999999.9999", "1E+3", "0.0000", "-12.0000")


def awkward(figures: tuple[str, ...] = AWKWARD) -> FlatTable:
    """Make a table of figures that are easily lost, and one that is missing."""
    entries = [entry(number, fees=pair(figure, "0.0000")) for number, figure in enumerate(figures)]
    holes = entry(99, fees=None, conversions=None, name="")
    return source_table([fetched(report(brand(*entries, holes)))])


@cache
def tables() -> list[FlatTable]:
    return [source_table(months()), account_table(months())]


TABLES = {
    "sources": lambda: tables()[0],
    "accounts": lambda: tables()[1],
    "awkward": awkward,
    "long": lambda: awkward((LONG,)),
}


def column(table: FlatTable, name: str) -> list[object]:
    index = [one.name for one in table.columns].index(name)
    return [row[index] for row in table.rows]


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def of_source(source: wire.MarketingSource, number: int = 11) -> FlatTable:
    return source_table([fetched(report(brand(source, number=number)))])


def csv_rows(data: bytes, delimiter: str = ",") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode(), newline=""), delimiter=delimiter, strict=True))


def sheets(data: bytes) -> openpyxl.Workbook:
    import openpyxl

    return openpyxl.load_workbook(io.BytesIO(data))


def xlsx_rows(data: bytes, name: str) -> list[dict[str, openpyxl.cell.Cell]]:
    head, *rows = sheets(data)[name].iter_rows()
    return [{str(title.value): cell for title, cell in zip(head, row, strict=True)} for row in rows]


# CSV


@each("name", TABLES)
def test_csv_has_every_value(name: str):
    table = TABLES[name]()
    for row, values in zip(csv_rows(to_csv(table)), table.rows, strict=True):
        for one, value in zip(table.columns, values, strict=True):
            written = row[one.name]
            if isinstance(value, Decimal):
                assert Decimal(written) == value
                assert "e" not in written.lower()
            else:
                text = str(value).lower() if isinstance(value, bool) else str(value)
                assert written == ("" if value is None else text)


def test_csv_keeps_the_decimals_of_the_document():
    assert [row["fees_result"] for row in csv_rows(to_csv(awkward()))][:2] == ["0.1", "1.23456"]
    assert csv_rows(to_csv(tables()[0]))[0]["exchange_rate"] == "1.0000"


def test_csv_has_a_header_and_line_ends_of_rfc_4180():
    data = to_csv(tables()[1])
    assert data.count(b"\r\n") == data.count(b"\n") == 1 + len(tables()[1].rows)
    assert data.startswith(b"account_id,account_name,")
    assert to_csv(FlatTable("empty", tables()[1].columns, [])).count(b"\n") == 1


@pytest.mark.parametrize("delimiter", DELIMITERS)
def test_csv_with_any_delimiter_is_read_back(delimiter):
    data = to_csv(source_table([fetched(hostile())]), delimiter=delimiter, has_bom=True)
    assert data.startswith(b"\xef\xbb\xbf")
    names = [row["brand_name"].replace("'", "") for row in csv_rows(data[3:], delimiter)[::2]]
    assert names == [name.replace("'", "") for name in HOSTILE_NAMES]


def test_text_that_begins_like_a_formula_is_guarded_and_figures_are_not():
    table = source_table([fetched(hostile()), fetched(report(brand(entry(7, name="fine"))))])
    rows = csv_rows(to_csv(table))
    for one in table.columns:
        cells = [row[one.name] for row in rows]
        if one.kind == "text":
            assert not [cell for cell in cells if cell.startswith(FORMULA_STARTS)]
        else:
            assert not [cell for cell in cells if cell.startswith("'")]
    assert [row["source_name"] for row in rows][-1] == "fine"
    assert {row["fees_result"] for row in rows} == {"-41.4100"}


@pytest.mark.parametrize(
    ("name", "written"),
    [
        *(
            (text, f"'{text}")
            for text in ("=1", "+1", "-1", "@A1", "\tx", "\rx", "\nx", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20A1")
        ),
        *((f"{blank}=1", f"{blank}'=1") for blank in (" ", "\0", "\x1b", "\x85", "\ufeff", "\u200b", "\xa0", '"', "«")),
        *((f"a{mark}=1", f"a{mark}'=1") for mark in (";", ",", "|", "\t", "\n", "\r\n", "\u2028", '; "', ";;", "; \0")),
        *((name, name) for name in ("É-Casino", "a-b", "a+b", "a@b", "a = b", "Smith, J.", "'=1", "")),
    ],
)
def test_no_spreadsheet_interprets_a_name_as_a_formula_with_any_delimiter(name: str, written: str):
    (row,) = csv_rows(to_csv(of_source(entry(7, name=name))))
    assert row["source_name"] == written


def test_every_text_in_csv_is_quoted_and_no_figure_is():
    table = of_source(entry(7, name="fine"))
    lines = to_csv(table).decode().splitlines()
    for column, value, cell in zip(table.columns, table.rows[0], lines[1].split(","), strict=True):
        assert cell.startswith('"') == (column.kind == "text" and value is not None), column.name


@pytest.mark.parametrize("piece", ["\t", ";", "; ", " ", '"', ";=", "a;", "\ufeff"])
def test_the_time_to_guard_a_text_is_linear(piece: str):
    """With quadratic time this would take hours."""
    name = piece * (80_000 // len(piece))
    (row,) = csv_rows(to_csv(of_source(entry(7, name=name))))
    assert row["source_name"].replace("'", "") == name


# JSON lines


@each("name", TABLES)
def test_ndjson_has_every_value_with_its_decimals(name: str):
    table = TABLES[name]()
    for line, values in zip(to_ndjson(table).splitlines(), table.rows, strict=True):
        record = json.loads(line, parse_float=Decimal)
        assert list(record) == [one.name for one in table.columns]
        for value, read in zip(values, record.values(), strict=True):
            assert read == value
            if isinstance(value, Decimal) and isinstance(read, Decimal):
                assert str(read) == str(value)


def test_ndjson_has_numbers_for_decimals_and_null_for_missing_values():
    first, *_, last = to_ndjson(awkward()).splitlines()
    assert b'"fees_result":0.1,' in first
    assert b'"exchange_rate":1.0000,' in first
    assert b'"fees_result":null,' in last
    assert b'"clicks":null,' in last


def test_ndjson_leaves_names_as_they_are():
    records = [json.loads(line) for line in to_ndjson(source_table([fetched(hostile())])).splitlines()]
    assert [record["brand_name"] for record in records[::2]] == list(HOSTILE_NAMES)


# Parquet


@pytest.fixture
def polars() -> Any:
    return import_module("polars")  # takes a third of a second


@each("name", TABLES.keys() - {"long"})
def test_parquet_has_every_value(polars: Any, name: str):
    table = TABLES[name]()
    frame = polars.read_parquet(io.BytesIO(to_parquet(table)))
    assert frame.columns == [one.name for one in table.columns]
    assert frame.rows() == table.rows


def test_parquet_has_one_schema_unless_a_figure_needs_more_decimals(polars: Any):
    schemas = [polars.read_parquet_schema(io.BytesIO(to_parquet(table))) for table in (tables()[0], source_table([]))]
    assert schemas[0] == schemas[1]
    assert schemas[0]["fees_result"] == polars.Decimal(38, 4)
    assert schemas[0]["clicks"] == polars.Decimal(38, 0)
    assert schemas[0]["brand_id"] == polars.Int64()
    assert polars.read_parquet_schema(io.BytesIO(to_parquet(awkward())))["fees_result"] == polars.Decimal(38, 5)


def test_parquet_adds_exactly_and_holds_its_maximum_precision(polars: Any):
    frame = polars.read_parquet(io.BytesIO(to_parquet(awkward(("0.1",) * 1000))))
    assert frame["fees_result"].sum() == Decimal(100)
    figures = ("9" * 34 + ".9999", "-" + "9" * 34 + ".9999", "0.0001")
    frame = polars.read_parquet(io.BytesIO(to_parquet(awkward(figures))))
    assert frame["fees_result"].to_list()[:3] == list(map(Decimal, figures))


def test_a_value_that_parquet_cannot_hold_is_an_error_and_not_rounded():
    for figures in ((LONG,), ("1" + "0" * 29, "0.0000000001"), ("1E+34",)):
        with pytest.raises(ReportError, match=r"a value of fees_result does not fit into Parquet; CSV and JSON lines"):
            to_parquet(awkward(figures))
    with pytest.raises(ReportError, match="a value of brand_id does not fit"):
        to_parquet(of_source(entry(), number=2**63))


# Workbook


def test_workbook_has_a_sheet_per_table_and_every_value():
    data = to_xlsx(tables(), created=CREATED)
    book = sheets(data)
    assert book.sheetnames == ["sources", "accounts"]
    assert book["sources"].freeze_panes == "A2", "the header"
    assert book["sources"].auto_filter.ref is not None
    for table in tables():
        for row, values in zip(xlsx_rows(data, table.name), table.rows, strict=True):
            for one, value in zip(table.columns, values, strict=True):
                assert exact(row[one.name].value) == value, one.name


def exact(value: object) -> object:
    return Decimal(repr(value)) if isinstance(value, float) else value


def test_every_figure_of_a_workbook_is_a_number_and_longer_ones_are_also_text():
    table = awkward((*AWKWARD, LONG))
    rows = xlsx_rows(to_xlsx([table], created=CREATED), "sources")
    cells, exact = ([row[name] for row in rows] for name in ("fees_result", "fees_result_exact"))
    figures = column(table, "fees_result")
    assert {cell.data_type for cell in cells} == {"n"}
    assert cells[-1].value is figures[-1] is None
    assert [cell.value for cell in cells[:-1]] == pytest.approx([*map(float, figures[:-1])], rel=1e-15)
    assert {cell.data_type for cell in exact[:-1]} == {"s"}
    assert [None if cell.value is None else Decimal(str(cell.value)) for cell in exact] == figures
    assert [cell.comment is not None for cell in cells] == [False] * 3 + [True] * 2 + [False] * 3 + [True, False]
    assert cells[3].comment is not None
    assert cells[3].comment.text == (
        "Spreadsheets store 15 digits. Exactly: 1234567890123.4567, as in the column fees_result_exact."
    )
    assert [cell.number_format for cell in cells[:3]] == ["#,##0.0", "#,##0.00000", "#,##0.0000"]
    assert rows[0]["clicks"].number_format == "#,##0"
    assert rows[0]["brand_id"].number_format == "0"


def test_a_workbook_has_exact_columns_only_where_needed_and_at_the_end():
    head = list(xlsx_rows(to_xlsx([awkward()], created=CREATED), "sources")[0])
    names = [one.name for one in awkward().columns]
    assert head == [*names, "fees_result_exact", "fees_total_exact"]
    assert list(xlsx_rows(to_xlsx([awkward(("0.1",))], created=CREATED), "sources")[0]) == names


def test_a_spreadsheet_adds_up_the_figures_of_a_column():
    """SUM silently ignores text cells."""
    figures = ("1234567890123.4567", "99999999999999.9999", "0.0001", "-1234567890123.4567")
    data = to_xlsx([awkward(figures)], created=CREATED)
    head, *_ = sheets(data)["sources"].iter_rows(values_only=True)
    with ZipFile(io.BytesIO(data)) as archive:
        sheet = archive.read("xl/worksheets/sheet1.xml").decode()
    from openpyxl.utils import get_column_letter

    name = get_column_letter(head.index("fees_result") + 1)
    cells = re.findall(rf'<c r="{name}(\d+)"([^>]*)><v>([^<]*)</v>', sheet)
    assert [int(line) for line, _, _ in cells] == [1, *range(2, 2 + len(figures))]
    assert [' t="s"' in attributes for _, attributes, _ in cells] == [True] + [False] * len(figures)
    assert sum(float(value) for _, _, value in cells[1:]) == pytest.approx(1e14, rel=1e-14)


def test_long_id_is_text_in_a_workbook():
    (row,) = xlsx_rows(to_xlsx([of_source(entry(), number=2**62)], created=CREATED), "sources")
    assert row["brand_id"].value == str(2**62)


def test_names_in_a_workbook_are_neither_formulas_nor_links():
    from openpyxl.utils.escape import unescape

    data = to_xlsx([source_table([fetched(hostile())])], created=CREATED)
    cells = [row["brand_name"] for row in xlsx_rows(data, "sources")[::2]]
    assert {cell.data_type for cell in cells} == {"s"}
    assert [cell.hyperlink for cell in cells] == [None] * len(cells)
    assert [unescape(str(cell.value or "")) for cell in cells] == list(HOSTILE_NAMES)
    with ZipFile(io.BytesIO(data)) as archive:
        assert b"<f>" not in archive.read("xl/worksheets/sheet1.xml")


def test_workbook_of_the_same_table_is_the_same_and_made_without_temporary_files(monkeypatch):
    made = to_xlsx(tables(), created=CREATED)
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert to_xlsx(tables(), created=CREATED) == made


def test_text_longer_than_a_cell_or_table_longer_than_a_sheet_is_an_error_and_not_truncated():
    with pytest.raises(ReportError, match="a value of source_name does not fit into a sheet of a workbook"):
        to_xlsx([of_source(entry(name="x" * 32_768))], created=CREATED)
    table = FlatTable("long", (Column("number", "integer"),), [(1,)] * 2**20)
    with pytest.raises(ReportError, match="of 1,048,576 rows: it has 1,048,576 rows and the column titles"):
        to_xlsx([table], created=CREATED)


# Without the extra


@pytest.mark.parametrize(
    ("package", "write", "form"),
    [
        ("polars", lambda: to_parquet(tables()[0]), "Parquet needs polars"),
        ("xlsxwriter", lambda: to_xlsx(tables(), created=CREATED), "a workbook needs xlsxwriter"),
    ],
)
def test_missing_package_is_named_with_the_command_to_install_it(package, write, form, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ReportError) as raised:
        write()
    assert str(raised.value) == f"{form}, which is not installed; run: {sys.executable} -m pip install {package}"
    monkeypatch.setattr(sys, "prefix", "/home/me/.local/share/pipx/venvs/acquisition-shipper")
    with pytest.raises(ReportError, match=f"run: pipx inject acquisition-shipper {package}$"):
        write()


# Files


def test_file_is_written_for_its_owner_only(tmp_path: Path):
    path = tmp_path / "report.csv"
    write(b"content", path)
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["report.csv"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "report.csv"
    path.write_bytes(b"before")
    seen = []

    def full(descriptor: int) -> None:
        seen.append(sorted(os.listdir(tmp_path)))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ShipperError, match=r"cannot write '.*report.csv': No space left on device"):
        write(b"after", path)
    assert len(seen[0]) == 2
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["report.csv"]


def test_file_in_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(ShipperError, match="No such file or directory"):
        write(b"", tmp_path / "absent" / "report.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ShipperError, match="Is a directory"):
        write(b"", tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
