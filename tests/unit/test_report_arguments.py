"""Arguments of the report commands: invalid ones are refused before anything is sent; ranges of days are split."""

from __future__ import annotations

import io
import re
from datetime import date, timedelta
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shipper.cli.app import command_line
from shipper.cli.report.options import PartsOptions
from shipper.model.errors import ReportError, ShipperError, SourceError
from shipper.report.client import report_path
from shipper.report.ranges import check_order, parse_period, split_range
from tests.cases import each

OCTOBER = ("2026-10-01", "2026-10-31")


SENSELESS_OPTIONS = {
    "--account x": "'x' is not an account number",
    "--split week": "week",
    "--format pdf": "pdf",
    "--concurrency 0": "concurrency",
    "--tolerance NaN": "'NaN' is not an amount",
    **dict.fromkeys(["--bom", "--delimiter tab"], "are for --format csv"),
    "--format csv --delimiter x": "'x' is not one of",
    **dict.fromkeys(["--format parquet", "--format xlsx"], "--output"),
    "--output .": "is a directory",
    "--output no/such/file": "there is no directory",
    "--accounts-file none.txt": "none.txt: cannot be read as a list of account numbers",
}
SENSELESS = [
    ([], "Missing argument"),
    (["1001"], "give ACCOUNT START END"),
    ([*OCTOBER], "name an account"),
    (["1001", *OCTOBER, "2026-11-01"], "give ACCOUNT START END"),
    (["fetsch", *OCTOBER], "'fetsch' is not an account number"),
    (["0", *OCTOBER], "'0' is not an account number"),
    (["1001", "2026-10-01", "2026-10-32"], "'2026-10-32' is not a date"),
    *((["1001", *OCTOBER, *options.split()], words) for options, words in SENSELESS_OPTIONS.items()),
    *((["diff", *period], f"'{period[0]}' is not an account number; give it") for period in (["2026-10"], OCTOBER)),
    (["history", "0"], "'0' is not an account number"),
    (["history", "1001", "2026-13"], "'2026-13' is not a date or a period"),
    (["diff", "1001", "last-week"], "'last-week' is not a date or a period"),
    (["watch", "1001", *OCTOBER, "--interval", "0"], "interval"),
    (["watch", "1001", *OCTOBER, "--on-change", "no-such-program"], "there is no command 'no-such-program'"),
    (["watch", "1001", *OCTOBER, "--on-change", "'"], "is not a command"),
]


@pytest.mark.parametrize(("arguments", "words"), SENSELESS)
def test_invalid_arguments_are_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHIPPER_CONFIG", "/there/is/no/such/file")  # it would be told if it was looked for
    result = CliRunner().invoke(command_line(), ["report", *arguments])
    if isinstance(result.exception, ShipperError):
        assert result.exception.exit_code == 2
        assert words in str(result.exception)
    else:
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in re.sub(r"\s+", " ", result.stderr)


def test_help_of_the_plain_form_names_the_verbs():
    text = CliRunner().invoke(command_line(), ["report", "-h"], prog_name="shipper").stdout
    assert text.startswith("Usage: shipper report [OPTIONS] [ACCOUNT] START [END]\n")
    for verb in ("fetch", "history", "diff", "watch"):
        assert f"`{verb}`" in text or f"`shipper report {verb}`" in text
        help_of_verb = CliRunner().invoke(command_line(), ["report", verb, "--help"], prog_name="shipper").stdout
        assert help_of_verb.startswith(f"Usage: shipper report {verb} [OPTIONS]")
        assert "Example: shipper report" in help_of_verb


def test_accounts_are_unique_and_in_the_order_given(tmp_path: Path):
    file = tmp_path / "accounts"
    file.write_text("\N{BOM}# partners\n1003\n\n 1002 # late payer\n1003\n7")
    parts = PartsOptions(["9", *OCTOBER], ["8", "9"], str(file)).parts()
    assert [part.account for part in parts] == [9, 8, 1003, 1002, 7]
    assert {part.days for part in parts} == {(date(2026, 10, 1), date(2026, 10, 31))}


def test_accounts_on_standard_input_may_start_with_a_byte_order_mark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("1003\n7\n".encode("utf-8-sig")), "utf-8"))
    select = PartsOptions([*OCTOBER], None, "-").selector()
    for _ in range(2):
        assert [part.account for part in select()] == [1003, 7]


@each("words", ["2026-02", "2026-02-01 2026-02-28", "2026-2-1 2026-2-28", "2026-02 2026-02"])
def test_period_stands_for_its_days_and_a_day_needs_no_leading_zero(words: str):
    february = [(9, (date(2026, 2, 1), date(2026, 2, 28)))]
    assert PartsOptions(["9", *words.split()]).parts() == february
    assert PartsOptions(words.split(), ["9"]).parts() == february


@each(("text", "words"), [("", "has no account numbers"), ("# 7", "has no"), ("7\n7 8", "2: '7 8'")])
def test_file_without_a_list_of_accounts_is_refused(tmp_path: Path, text: str, words: str):
    file = tmp_path / "accounts"
    file.write_text(text)
    with pytest.raises(SourceError, match=re.escape(words)):
        PartsOptions([*OCTOBER], None, str(file)).parts()


@each("word", ["-1", "0", "1e3", "1_000", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 19, "9" * 20])
def test_invalid_account_is_refused(word: str):
    with pytest.raises(typer.BadParameter, match="is not an account number"):
        PartsOptions([word, *OCTOBER]).parts()


# Ranges ---------------------------------------------------------------------------------------------------------------


JAN_1, JAN_31 = date(2026, 1, 1), date(2026, 1, 31)


@each(
    ("start", "end", "split", "parts"),
    [
        ("2026-01-01", "2026-01-31", "month", ["2026-01-01 to 2026-01-31"]),
        ("2026-01-09", "2026-01-09", "month", ["2026-01-09"]),
        ("2025-12-31", "2026-01-01", "month", ["2025-12-31", "2026-01-01"]),
        ("2026-01-15", "2026-02-02", "month", ["2026-01-15 to 2026-01-31", "2026-02-01 to 2026-02-02"]),
        ("2026-01-31", "2026-03-01", "month", ["2026-01-31", "2026-02-01 to 2026-02-28", "2026-03-01"]),
        ("2024-02-28", "2024-03-01", "month", ["2024-02-28 to 2024-02-29", "2024-03-01"]),
        ("2024-02-28", "2024-03-01", "day", ["2024-02-28", "2024-02-29", "2024-03-01"]),
        ("2024-02-28", "2026-03-01", "none", ["2024-02-28 to 2026-03-01"]),
        ("9999-11-30", "9999-12-31", "month", ["9999-11-30", "9999-12-01 to 9999-12-31"]),
        ("9999-12-30", "9999-12-31", "day", ["9999-12-30", "9999-12-31"]),
        ("0001-01-31", "0001-02-01", "month", ["0001-01-31", "0001-02-01"]),
    ],
)
def test_range_is_split(start, end, split, parts):
    days = date.fromisoformat(start), date.fromisoformat(end)
    assert [str(part) for part in split_range(*days, split)] == parts
    assert split_range(*days) == split_range(*days, "month"), "by default"


@given(st.dates(date(1990, 1, 1)), st.integers(0, 800), st.sampled_from(["month", "day", "none"]))
def test_parts_have_every_day_once_and_in_order(start, days, split):
    end = start + timedelta(days=min(days, (date.max - start).days))
    parts = split_range(start, end, split)
    days = [day for part in parts for day in range(part.start.toordinal(), part.end.toordinal() + 1)]
    assert days == list(range(start.toordinal(), end.toordinal() + 1))
    if split != "none":
        assert all((part.start.year, part.start.month) == (part.end.year, part.end.month) for part in parts)


@pytest.mark.parametrize(
    "call", [split_range, check_order, lambda start, end: report_path(1001, start, end)], ids=["split", "check", "path"]
)
def test_range_that_ends_before_it_starts_is_refused_with_both_days(call):
    with pytest.raises(ReportError, match="2026-01-31 is after its end 2026-01-01"):
        call(JAN_31, JAN_1)


def test_path_names_account_and_days():
    assert report_path(1001, JAN_1, JAN_31) == "/dpm/v1/dar/1001/2026-01-01/2026-01-31"
    assert report_path(1001, JAN_1, JAN_1) == "/dpm/v1/dar/1001/2026-01-01/2026-01-01"


@each(
    ("word", "found"),
    [
        ("today", "2026-03-01"),
        ("yesterday", "2026-02-28"),
        ("this-month", "2026-03-01"),
        ("last-month", "2026-02-01 to 2026-02-28"),
        ("2026-02", "2026-02-01 to 2026-02-28"),
        ("2024-2", "2024-02-01 to 2024-02-29"),
        ("9999-12", "9999-12-01 to 9999-12-31"),
        ("2026-10-31", "2026-10-31"),
    ],
)
def test_period_is_read(word, found):
    assert str(parse_period(word, date(2026, 3, 1))) == found


@each(
    "word", ["", "2026", "2026-13", "0000-01", "2026-02-29", "last-week", "10.2026", "2026-1\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_invalid_period_is_none(word):
    assert parse_period(word, date(2026, 3, 1)) is None
