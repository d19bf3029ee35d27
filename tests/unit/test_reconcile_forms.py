"""The same reconciliation in every form: the same verdict and the same numbers, whatever there is to say."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from html import unescape
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
from shipper.report.reconcile.forms import flat_table, print_table, to_json, to_workbook
from shipper.report.reconcile.owners import Owners
from shipper.report.reconcile.page import render_page
from shipper.report.reconcile.rows import Hole, Period, Reconciliation, Verdict
from tests.report_documents import brand, entry, pair, report

OLD, YOUNG = date(2026, 10, 4), date(2026, 10, 8)
A, B, OTHERS, NOBODYS = 501, 502, 777, 888
FIGURES = (
    *("accepted", "contested", "result", "adjustment", "reported", "difference"),
    *("dead_letters", "unexplained", "unjudged", "taken_back"),
)


class Shown(NamedTuple):
    """What a form says."""

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
    figures: dict[int, dict[tuple[int, int], tuple[int, int]]] = {
        4: {(11, A): (1_234, 0)},
        5: {(12, B): (100, -7 if is_alarmed else 0)},
        6: {},
        8: {},
    }
    holes = []
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
        holes = [Hole(day(7), "its report could not be fetched")]
    if verdict in {"differences", "not yet judged"}:
        accepted["2026-10-08T12", 11, "", str(A)] = 21
        figures[8] = {(11, A): (20, 0)}
    return reconcile(
        1001,
        [Period(day(number), document(found)) for number, found in figures.items()],
        accepted,
        dead_letters,
        days=Days(),
        today=YOUNG + timedelta(days=1),
        settle_days=2,
        owners=Owners(named={1001: frozenset({A, B}), 2002: frozenset({OTHERS})}),
        holes=holes,
    )


def document(figures: dict[tuple[int, int], tuple[int, int]]) -> wire.DailyReport:
    return report(
        *(
            brand(entry(source, conversions=wire.Conversions(registrations=pair(*map(str, figure)))), number=number)
            for (number, source), figure in figures.items()
        )
    )


def in_json(found: Reconciliation) -> Shown:
    read = json.loads(to_json(found, [], shows_elsewhere=False), parse_int=Decimal, parse_float=Decimal)
    totals = {name: Decimal(read["totals"][name]) for name in FIGURES}
    assert totals == {name: sum((Decimal(row[name] or 0) for row in read["rows"]), Decimal(0)) for name in FIGURES}
    assert sum(row["accepted"] for row in read["unassigned"]["rows"]) == read["unassigned"]["accepted"]
    assert read["is_complete"] == (not read["not_compared"])
    assert read["headlines"][0].startswith(f"Verdict: {read['verdict']}. ")
    assert totals == {**totals, **first_figures("\n".join(read["headlines"]))}
    not_compared = sum(hole["accepted"] for hole in read["not_compared"])
    return Shown(read["verdict"], read["is_alarmed"], totals, read["unassigned"]["accepted"], not_compared)


def of_rows(rows: list[dict[str, Any]]) -> Shown:
    """Read a form of rows: CSV, or a sheet."""

    def total(name: str, *statuses: str) -> Decimal:
        return sum((Decimal(row[name] or 0) for row in rows if row["status"] in statuses), Decimal(0))

    ((verdict, alarmed),) = {(row["verdict"], str(row["is_alarmed"]).lower()) for row in rows}
    totals = {name: total(name, "agrees", "explained", "provisional", "unexplained") for name in FIGURES}
    counts = (int(total("accepted", status)) for status in ("unassigned", "not compared"))
    return Shown(verdict, alarmed == "true", totals, *counts)


def in_csv(found: Reconciliation) -> Shown:
    return of_rows(list(csv.DictReader(io.StringIO(to_csv(flat_table(found, shows_elsewhere=False)).decode()))))


def in_workbook(found: Reconciliation) -> Shown:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.load_workbook(
        io.BytesIO(to_workbook(found, [], shows_elsewhere=False, created=datetime(2026, 11, 1, tzinfo=UTC)))
    )
    titles, *lines = book["reconciliation"].iter_rows(values_only=True)
    shown = of_rows([dict(zip(titles, line, strict=True)) for line in lines])
    facts = {what: value for what, value in book["verdict"].iter_rows(values_only=True) if what}
    mark = "" if found.is_complete else " (4 of 5 periods)"
    assert facts["verdict"] == shown.verdict
    assert {name: facts[f"{name}{mark}"] for name in FIGURES} == shown.totals
    assert facts["unassigned"] == shown.unassigned
    return shown


def first_figures(text: str) -> dict[str, Decimal]:
    """Read what stands below the verdict: it is what the total line has."""
    figures = re.search(
        r"Total [^:]*:\s+accepted\s+([\d,]+),\s+reported\s+([\d,]+),\s+difference\s+([-+]?[\d,]*\d)", text
    )
    assert figures
    numbers = [Decimal(figure.replace(",", "")) for figure in figures.groups()]
    return dict(zip(("accepted", "reported", "difference"), numbers, strict=True))


def in_text(text: str, totals: dict[str, Decimal]) -> Shown:
    """Read the lines that stand at the top of a page or table."""

    def count(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1].replace(",", "")) if found else 0

    assert totals == {**totals, **first_figures(text)}
    found = re.search(r"Verdict: (agree|explained|differences|not yet judged|incomplete)\. ", text)
    assert found
    assert -count(r"the platform took back ([\d,]+) registrations") == totals.get("taken_back", 0)
    unassigned = count(r"Unassigned: ([\d,]+) accepted records")
    return Shown(
        found[1], "Alarm: " in text, totals, unassigned, count(r"not compared: .*? fetched\. ([\d,]+) accepted records")
    )


def in_page(found: Reconciliation) -> Shown:
    page = render_page(found, [], made_at="2026-11-01T08:00:00Z", shows_all=False)
    total = re.search(r'<tr class="account">(.*?)</tr>', page)
    assert total
    values = [Decimal(value) for value in re.findall(r'<data value="([^"]+)"', total[1])]
    names = ("accepted", "result", "adjustment", "reported", "difference", "unexplained", "dead_letters")
    assert ("(4 of 5 periods)" in total[1]) == (not found.is_complete)
    text = unescape(re.sub("<[^>]+>", " ", page))
    totals = dict(zip(names, values, strict=True))
    taken_back = re.search(r"took back ([\d,]+)", text)
    return in_text(text, {**totals, "taken_back": Decimal(-int(taken_back[1]) if taken_back else 0)})


def in_table(found: Reconciliation) -> Shown:
    console = Console(width=400, file=io.StringIO())
    with console.capture() as captured:
        print_table(found, [], console, shows_all=True)
    text = captured.get()
    lines = text.splitlines()
    (at,) = (index for index, line in enumerate(lines) if line.strip().startswith("total"))
    assert ("(4 of 5 periods)" in lines[at]) == (not found.is_complete)
    figures = re.findall(r"[-+]?[\d,]+", lines[at].replace("(4 of 5 periods)", ""))
    numbers = [Decimal(figure.replace(",", "")) for figure in figures]
    totals = dict(zip(("accepted", "reported", "difference", "dead_letters"), numbers, strict=False))
    taken_back = re.search(r"took back ([\d,]+)", text)
    return in_text(text, {**totals, "taken_back": Decimal(-int(taken_back[1]) if taken_back else 0)})


@pytest.mark.parametrize(
    ("verdict", "is_alarmed"),
    [
        *(("agree", False), ("explained", False), ("explained", True), ("differences", False), ("differences", True)),
        *(("incomplete", False), ("incomplete", True), ("not yet judged", False), ("not yet judged", True)),
    ],
)
def test_all_forms_give_the_same_verdict_and_the_same_numbers(verdict: Verdict, is_alarmed: bool):
    found = made(verdict, is_alarmed=is_alarmed)
    whole = in_json(found)
    assert (whole.verdict, whole.is_alarmed) == (verdict, is_alarmed)
    assert whole.totals["accepted"] >= 1_334
    assert whole.totals["contested"] == 234
    assert (whole.unassigned, whole.not_compared) == ((33, 55) if verdict in {"differences", "incomplete"} else (0, 0))
    assert in_csv(found) == in_workbook(found) == whole
    for form in (in_page, in_table):
        shown = form(found)
        assert shown._replace(totals={}) == whole._replace(totals={}), form
        assert shown.totals == {name: whole.totals[name] for name in shown.totals}, form
        assert len(shown.totals) >= 4


def test_every_form_names_the_days_that_were_not_compared():
    found = made("incomplete")
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        print_table(found, [], console, shows_all=False)
    forms = {
        "table": captured.get(),
        "page": render_page(found, [], made_at="", shows_all=False),
        "csv": to_csv(flat_table(found, shows_elsewhere=False)).decode(),
        "json": to_json(found, [], shows_elsewhere=False).decode(),
    }
    for form, text in forms.items():
        assert ("7 October 2026" if form == "page" else "2026-10-07") in text, form
        assert "its report could not be fetched" in " ".join(text.split()), form


def test_a_day_of_nothing_is_a_row_so_that_no_file_is_empty():
    found = reconcile(1001, [Period(day(4), report())], {}, {}, days=Days(), today=YOUNG, settle_days=2)
    (row,) = flat_table(found, shows_elsewhere=False).rows
    assert (row[1], row[-3]) == ("2026-10-04", "nothing to compare")


def test_what_has_not_begun_stands_in_every_form_in_one_line():
    later = Hole(DateRange(day(9).start, day(11).end), "no report was fetched", accepted=0)
    found = reconcile(1001, [], {}, {}, days=Days(), today=YOUNG, settle_days=2, later=later)
    assert found.verdict == "not yet judged"
    (row,) = csv.DictReader(io.StringIO(to_csv(flat_table(found, shows_elsewhere=False)).decode()))
    assert (row["period_start"], row["period_end"], row["status"]) == ("2026-10-09", "2026-10-11", "not begun")
    assert (row["verdict"], row["timezone"]) == ("not yet judged", "UTC")
    read = json.loads(to_json(found, [], shows_elsewhere=False))
    assert read["not_yet_judged"] == [{"start": "2026-10-09", "end": "2026-10-11", "reason": "not begun"}]
    assert (read["judged"], read["run_again_on"], read["periods"]) == ([], "2026-10-13", {"compared": 0, "asked": 0})
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        print_table(found, [], console, shows_all=False)
    page = unescape(re.sub("<[^>]+>", " ", render_page(found, [], made_at="", shows_all=False)))
    for text, days in ((captured.get(), "2026-10-09 to 2026-10-11"), (page, "9\N{EN DASH}11 October 2026")):
        said = " ".join(text.split())
        assert f"Verdict: not yet judged. No day can be judged yet. Not yet judged: {days} (not begun). Run" in said
        assert "Account 1001 Account 1001" not in said


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
