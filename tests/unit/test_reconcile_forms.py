"""A reconciliation has the same verdict and numbers in every output format."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from rich.console import Console

from shipper.model import wire
from shipper.model.records import LedgerKey
from shipper.report.days import Days
from shipper.report.exports import to_csv
from shipper.report.ranges import DateRange
from shipper.report.reconcile.compare import reconcile
from shipper.report.reconcile.model import Excluded, Period, Reconciliation, Verdict
from shipper.report.reconcile.owners import Owners
from shipper.report.reconcile.page import render_page
from shipper.report.reconcile.render import flat_table, print_table, to_json, to_workbook
from tests.report_documents import HOSTILE_NAMES, brand, hostile, registered, report

YOUNG = date(2026, 10, 8)
A, B, OTHERS, NOBODYS = 501, 502, 777, 888
FIGURES = (
    *("accepted", "contested", "result", "adjustment", "reported", "difference"),
    *("dead_letters", "unexplained", "unjudged", "taken_back"),
)


class Shown(NamedTuple):
    """The content of an output format."""

    verdict: str
    is_alarmed: bool
    totals: dict[str, Decimal]
    unassigned: int
    not_compared: int


def day(number: int) -> DateRange:
    return DateRange(date(2026, 10, number), date(2026, 10, number))


def made(verdict: Verdict, *, is_alarmed: bool = False) -> Reconciliation:
    """Make one that ends in a verdict, with as much as may be in it besides."""
    accepted: dict[LedgerKey, int] = {
        ("2026-10-04T12", 11, "", str(A)): 1_000,
        ("2026-10-04T12", 11, "2002", str(A)): 234,
        ("2026-10-05T12", 12, "", str(B)): 100,
        ("2026-10-05T12", 12, "1001", str(OTHERS)): 9,
    }
    figures: dict[int, dict[tuple[int, int], tuple[int, int]]] = {4: {(11, A): (1_234, 0)}, 6: {}, 8: {}}
    figures[5] = {(12, B): (100, -7 if is_alarmed else 0)}
    left_out = []
    dead_letters: dict[LedgerKey, int] = {}
    if verdict in {"explained", "differences"}:
        figures[4][11, B] = (5, 0)
        dead_letters["2026-10-04T10", 11, "", str(B)] = 6
    if verdict == "differences":
        figures[5][12, A] = (40, 2)
        accepted["2026-10-06T12", 11, "", str(B)] = 70
    if verdict in {"differences", "incomplete"}:
        accepted["2026-10-06T12", 11, "", str(NOBODYS)] = 33
        accepted["2026-10-07T12", 11, "", str(A)] = 55
        left_out = [Excluded("not compared", day(7), "its report could not be fetched")]
    if verdict in {"differences", "not yet judged"}:
        accepted["2026-10-08T12", 11, "", str(A)] = 21
        figures[8] = {(11, A): (20, 0)}
    owners = Owners(named={1001: frozenset({A, B}), 2002: frozenset({OTHERS})})
    periods = [Period(day(number), document(of_day)) for number, of_day in sorted(figures.items())]
    return compared(periods, accepted, dead_letters, owners=owners, excluded=left_out)


def compared(periods: list[Period], *counts: dict[LedgerKey, int], **options: Any) -> Reconciliation:
    accepted, dead_letters = (*counts, {}, {})[:2]
    options = {"days": Days(), "today": YOUNG + timedelta(days=1), "settle_days": 2, **options}
    return reconcile(1001, periods, accepted, dead_letters, **options)


def document(figures: dict[tuple[int, int], tuple[int, int]]) -> wire.DailyReport:
    return report(*(brand(registered(source, *figure), number=number) for (number, source), figure in figures.items()))


def as_json(result: Reconciliation, *notes: str) -> dict[str, Any]:
    return json.loads(to_json(result, notes), parse_int=Decimal, parse_float=Decimal)


def as_csv(result: Reconciliation) -> list[dict[str, Any]]:
    return list(csv.DictReader(io.StringIO(to_csv(flat_table(result)).decode())))


def as_table(result: Reconciliation, *notes: str, width: int = 400) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        print_table(result, notes, console)
    return captured.get()


def as_page(result: Reconciliation, *notes: str) -> str:
    return render_page(result, notes, made_at="2026-11-01T08:00:00Z")


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub("<[^>]+>", " ", page)).split())


# The numbers in each form


def in_json(result: Reconciliation) -> Shown:
    read = as_json(result)
    totals = {name: Decimal(read["totals"][name]) for name in FIGURES}
    assert totals == {name: sum((Decimal(row[name] or 0) for row in read["rows"]), Decimal(0)) for name in FIGURES}
    assert sum(row["accepted"] for row in read["unassigned"]["rows"]) == read["unassigned"]["accepted"]
    assert sum(read["rows_by_status"].values()) == sum(row["brand_id"] is not None for row in read["rows"])
    assert read["is_complete"] == (not read["not_compared"])
    assert read["headlines"][0].startswith(f"Verdict: {read['verdict']}. ")
    assert totals == {**totals, **first_figures("\n".join(read["headlines"]))}
    not_compared = sum(period["accepted"] for period in read["not_compared"])
    return Shown(read["verdict"], read["is_alarmed"], totals, read["unassigned"]["accepted"], not_compared)


def in_rows(rows: list[dict[str, Any]]) -> Shown:
    """Read a form of rows: CSV, or a sheet."""

    def total(name: str, *statuses: str) -> Decimal:
        return sum((Decimal(row[name] or 0) for row in rows if row["status"] in statuses), Decimal(0))

    ((verdict, alarmed),) = {(row["verdict"], str(row["is_alarmed"]).lower()) for row in rows}
    totals = {name: total(name, "agrees", "explained", "provisional", "unexplained") for name in FIGURES}
    counts = (int(total("accepted", status)) for status in ("unassigned", "not compared"))
    return Shown(verdict, alarmed == "true", totals, *counts)


def in_workbook(result: Reconciliation) -> Shown:
    openpyxl = pytest.importorskip("openpyxl")
    created = datetime(2026, 11, 1, tzinfo=UTC)
    book = openpyxl.load_workbook(io.BytesIO(to_workbook(result, [], created=created)))
    titles, *lines = book["reconciliation"].iter_rows(values_only=True)
    shown = in_rows([dict(zip(titles, line, strict=True)) for line in lines])
    facts = {what: value for what, value in book["verdict"].iter_rows(values_only=True) if what}
    mark = " (4 of 5 periods)" if result.not_compared else ""
    assert facts["verdict"] == shown.verdict
    assert {name: facts[f"{name}{mark}"] for name in FIGURES} == shown.totals
    assert facts["unassigned"] == shown.unassigned
    return shown


def first_figures(text: str) -> dict[str, Decimal]:
    """Read the totals in the headlines."""
    words = r"Total [^:]*:\s+accepted\s+([\d,]+),\s+reported\s+([\d,]+),\s+difference\s+([-+]?[\d,]*\d)"
    figures = re.search(words, text)
    numbers = [Decimal(figure.replace(",", "")) for figure in figures.groups()]
    return dict(zip(("accepted", "reported", "difference"), numbers, strict=True))


def in_headlines(text: str, totals: dict[str, Decimal]) -> Shown:
    """Read the lines at the top of a page or table; `totals` are those of its last line."""

    def count(pattern: str) -> int:
        match = re.search(pattern, text)
        return int(match[1].replace(",", "")) if match else 0

    assert totals == {**totals, **first_figures(text)}
    verdict = re.search(r"Verdict: (agree|explained|differences|not yet judged|incomplete)\. ", text)
    totals = {**totals, "taken_back": -Decimal(count(r"the platform took back ([\d,]+) registrations"))}
    unassigned = count(r"Unassigned: ([\d,]+) accepted records")
    not_compared = count(r"not compared: .*? fetched\. ([\d,]+) accepted records")
    return Shown(verdict[1], "Alarm: " in text, totals, unassigned, not_compared)


def in_page(result: Reconciliation) -> Shown:
    page = as_page(result)
    total = re.search(r'<tr class="account">(.*?)</tr>', page)
    values = [Decimal(value) for value in re.findall(r'<data value="([^"]+)"', total[1])]
    names = ("accepted", "result", "adjustment", "reported", "difference", "unexplained", "dead_letters")
    assert ("(4 of 5 periods)" in total[1]) == bool(result.not_compared)
    return in_headlines(text_of(page), dict(zip(names, values, strict=True)))


def in_table(result: Reconciliation) -> Shown:
    text = as_table(replace(result, lists_all=True))
    (total,) = (line for line in text.splitlines() if line.strip().startswith("total"))
    assert ("(4 of 5 periods)" in total) == bool(result.not_compared)
    figures = re.findall(r"[-+]?[\d,]+", total.replace("(4 of 5 periods)", ""))
    numbers = [Decimal(figure.replace(",", "")) for figure in figures]
    names = ("accepted", "reported", "difference", "dead_letters")
    return in_headlines(text, dict(zip(names, numbers, strict=False)))


@pytest.mark.parametrize(
    ("verdict", "is_alarmed"),
    [("agree", False), *product(("explained", "differences", "incomplete", "not yet judged"), (False, True))],
)
def test_all_forms_give_the_same_verdict_and_the_same_numbers(verdict: Verdict, is_alarmed: bool):
    result = made(verdict, is_alarmed=is_alarmed)
    whole = in_json(result)
    assert (whole.verdict, whole.is_alarmed) == (verdict, is_alarmed)
    assert whole.totals["accepted"] >= 1_334
    assert whole.totals["contested"] == 234
    assert (whole.unassigned, whole.not_compared) == ((33, 55) if verdict in {"differences", "incomplete"} else (0, 0))
    assert in_rows(as_csv(result)) == in_workbook(result) == whole
    for form in (in_page, in_table):
        shown = form(result)
        assert shown._replace(totals={}) == whole._replace(totals={}), form
        assert shown.totals == {name: whole.totals[name] for name in shown.totals}, form
        assert len(shown.totals) >= 4


# What each form has besides


def test_records_of_other_accounts_are_listed_only_on_request():
    result = made("differences")
    listing_all = replace(result, lists_all=True)
    few, every = as_csv(result), as_csv(listing_all)
    (other,) = every[len(few) :]
    assert list(other.values()) == [
        *("1001", "2026-10-05", "2026-10-05", "12", "", "777", "", "9", "9", *[""] * 8),
        *("of another account", "of account 2002; 9 of them contested", "differences", "false", "UTC"),
    ]
    read = as_json(listing_all, "A note.")
    assert (read["account_id"], read["start"], read["end"]) == (1001, "2026-10-04", "2026-10-08")
    assert read["timezone"] == "UTC"
    assert read["of_other_accounts"]["accepted"] == read["of_other_accounts"]["rows"][0]["accepted"] == 9
    assert "A note." in read["notes"]
    for form, shown in ((as_table, "of account 2002"), (as_page, "Of another account")):
        assert (shown in form(result), shown in form(listing_all)) == (False, True)


def test_every_form_names_the_days_that_were_not_compared():
    result = made("incomplete")
    for text in (as_table(result, width=100), as_page(result), str(as_csv(result)), str(as_json(result))):
        assert ("7 October 2026" if text.startswith("<") else "2026-10-07") in text
        assert "its report could not be fetched" in " ".join(text.split())


def test_an_empty_day_is_a_row_so_that_no_file_is_empty():
    (row,) = as_csv(compared([Period(day(4), report())]))
    assert (row["period_start"], row["verdict"]) == ("2026-10-04", "nothing to compare")


def test_future_days_are_one_line_in_every_form():
    later = Excluded("not begun", DateRange(day(9).start, day(11).end), "no report was fetched")
    result = compared([], today=YOUNG, excluded=[later])
    assert result.verdict == "not yet judged"
    (row,) = as_csv(result)
    assert (row["period_start"], row["period_end"], row["status"]) == ("2026-10-09", "2026-10-11", "not begun")
    assert (row["verdict"], row["timezone"]) == ("not yet judged", "UTC")
    read = as_json(result)
    assert read["not_yet_judged"] == [{"start": "2026-10-09", "end": "2026-10-11", "reason": "not begun"}]
    assert (read["judged"], read["run_again_on"], read["periods"]) == ([], "2026-10-14", {"compared": 0, "asked": 0})
    table, page = " ".join(as_table(result, width=80).split()), text_of(as_page(result))
    for text, days in ((table, "2026-10-09 to 2026-10-11"), (page, "9\N{EN DASH}11 October 2026")):
        assert f"Verdict: not yet judged. No day can be judged yet. Not yet judged: {days} (not begun). Run" in text
        assert "Account 1001 Account 1001" not in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_table_shows_differences_at_any_width(width: int):
    text = as_table(made("explained", is_alarmed=True), "A note.", width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("2026-10-04 ") == 3, "in the headings, and where something differs"
    assert sum("incl. adj -7" in line for line in text.splitlines()) == 2, "of the row, and of all"
    assert not [line for line in text.splitlines() if width < 110 and line.startswith(("adj", "report "))]
    for words in ("A note.", "1 further line agrees; --all lists", "the platform took back 7 registrations"):
        assert words in " ".join(text.split())


@pytest.mark.parametrize("width", [400, 60])
def test_a_table_too_long_for_a_terminal_is_cut_before_its_total(monkeypatch: pytest.MonkeyPatch, width: int):
    result = made("differences")
    whole = as_table(result, width=width)
    monkeypatch.setattr("shipper.report.table.LINES_MAX", 3)
    lines = as_table(result, width=width)
    assert whole.count("2026-10-0") > lines.count("2026-10-0")
    assert "more lines; --format csv has all." in lines
    assert [line for line in whole.splitlines() if line.startswith("total")] == [
        line for line in lines.splitlines() if line.startswith("total")
    ]


def test_the_page_is_self_contained_and_names_are_text():
    names = hostile()
    for each in names.brands:
        each.marketing_sources[:] = each.marketing_sources[:1]
    page = as_page(compared([Period(day(4), names)]), *HOSTILE_NAMES)
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert "</style><b" not in page
    assert "\x1b" not in page
    assert "https://" not in page.replace("https://example.com", "")
    assert f'<data value="{430 * len(names.brands)}"' in page


def test_the_page_for_finance_has_an_example_of_every_verdict_and_no_code():
    root = Path(__file__).parents[2]
    text = (root / "docs/finance.md").read_text().partition("\n## The daily report\n")[0]
    assert "`" not in text
    assert "--" not in text.replace("|---", "")
    sections = {part.partition("\n")[0].lower(): part for part in text.split("\n## ")}
    for verdict in get_args(Verdict):
        (section,) = (part for title, part in sections.items() if title.split(",")[0] == verdict)
        assert re.search("(?m)^> ", section), verdict
    assert "(docs/finance.md" in (root / "README.md").read_text()
