"""What `reconcile` says of documents and losses made for it: it never says that records agree which are missing."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.history import History
from shipper.sandbox.samples import sample_lines
from shipper.state.ledger import read_ledger
from tests.conftest import SEED
from tests.e2e.driver import Result, Shipper, changed
from tests.e2e.fake_service import FakeService
from tests.report_documents import NOTHING_EARNED, brand, entry, pair, report
from tests.report_service import Asked, ReportService, ok, refusal

DAYS = ("2025-10-04", "2025-10-06")
A, B = 50121, 50377


class Books:
    """
    A shipper that has delivered what is given to it, and a platform whose report says what is given to it.

    Attributes:
        figures: Registrations by day, and then by brand and marketing source; `(result, adjustment)` or the result.
        refuses: Days of which there is no report.
        asked: The requests for reports.
        changes: What else becomes of a report.
    """

    def __init__(self, shipper: Shipper, fake: FakeService, service: ReportService) -> None:
        self.shipper = shipper
        self.figures: dict[str, dict[tuple[int, int], Any]] = {day: {} for day in days_of(*DAYS)}
        self.refuses: set[str] = set()
        self.changes: Callable[[wire.DailyReport], wire.DailyReport] = lambda made: made
        self.states: Callable[[Asked], tuple[str, str]] = lambda asked: (str(asked.start), str(asked.end))
        shipper.target = fake.target
        service.rule = self._answer
        self.asked = service.asked
        with shipper.config.open("a") as file:
            file.write(f'[report]\nbase_url = "{service.url}"\nsubscription_key = "key"\ntoken = "token"\n')

    def accept(self, count: int, hour: str, media: int, *, affiliate: str = "", number: int = 11) -> None:
        """Deliver so many records, which the service accepts."""
        known = len(list(self.shipper.folder.glob("*.ndjson")))
        lines = sample_lines(count, seed=SEED + known, end=datetime(2025, 11, 1, tzinfo=UTC), days=1)
        file = self.shipper.folder / f"{known}.ndjson"
        file.write_bytes(
            b"".join(
                changed(
                    line,
                    Timestamp=f"{hour}:00:00Z",
                    BTag=f"{media}_{'0' * 32}",
                    AffiliateID=affiliate,
                    BrandID=number,
                    EventId=str(UUID(int=(known << 64) + index, version=4)),
                )
                for index, line in enumerate(lines)
            )
        )
        result = self.shipper.run("backfill", file, "--summary", "json")
        assert result.counts() == (count, count, 0, 0, 0), result.stderr

    def report(self, day: str, **figures: Any) -> None:
        """Let the report of a day have these figures of brand 11, by name of the source."""
        self.figures[day] = {(11, {"a": A, "b": B}[name]): figure for name, figure in figures.items()}

    def reconcile(self, *options: str, days: tuple[str, ...] = DAYS, form: str = "json") -> Result:
        result = self.shipper.run("reconcile", "1001", *days, "--format", form, *options)
        assert "Traceback" not in result.stderr
        return result

    def judged(self, *options: str, days: tuple[str, ...] = DAYS) -> tuple[int, dict[str, Any]]:
        """The exit code, and the document."""
        result = self.reconcile(*options, days=days)
        return result.returncode, json.loads(result.stdout)

    def verdict(self, *options: str, **where: Any) -> tuple[int, str]:
        code, found = self.judged(*options, **where)
        return code, found["verdict"]

    def keep(self, account: int, day: str, *sources: int) -> None:
        """Let the history have a report as if it had been fetched long ago."""
        figures = wire.Conversions(registrations=pair("1"))
        entries = [entry(source, conversions=figures) for source in sources]
        body = wire.encode_report(report(brand(*entries), account=account, start=day, end=day))
        with closing(History(self.shipper.state)) as history:
            history.add(account, date.fromisoformat(day), date.fromisoformat(day), body, 1_700_000_000.0)

    def _answer(self, asked: Asked) -> bytes:
        wanted = days_of(str(asked.start), str(asked.end))
        if self.refuses & set(wanted):
            return refusal(404, "Resource not found")
        start, end = self.states(asked)
        found: dict[int, list[wire.MarketingSource]] = {}
        for place, figure in sorted(added(self.figures.get(day, {}) for day in wanted).items()):
            entries = found.setdefault(place[0], [])
            entries.append(entry(place[1], conversions=wire.Conversions(registrations=figure), **NOTHING_EARNED))
        brands = [brand(*entries, number=number) for number, entries in found.items()]
        made = report(*brands, account=asked.account, start=start, end=end)
        made = self.changes(replace(made, outgoing_balance=made.opening_balance))
        return ok(wire.encode_report(made))


def added(figures: Iterable[Mapping[tuple[int, int], Any]]) -> dict[tuple[int, int], wire.AmountPair]:
    sums: dict[tuple[int, int], Counter[str]] = {}
    for of_day in figures:
        for place, figure in of_day.items():
            result, adjustment = figure if isinstance(figure, tuple) else (figure, 0)
            sums.setdefault(place, Counter()).update(result=result, adjustment=adjustment)
    return {place: pair(str(each["result"]), str(each["adjustment"])) for place, each in sums.items()}


def days_of(start: str, end: str) -> list[str]:
    first, last = date.fromisoformat(start), date.fromisoformat(end)
    return [date.fromordinal(day).isoformat() for day in range(first.toordinal(), last.toordinal() + 1)]


@pytest.fixture
def books(shipper: Shipper, fake: FakeService) -> Iterator[Books]:
    with ReportService() as service:
        yield Books(shipper, fake, service)


# A missing source


def test_a_source_that_a_report_named_before_is_missing_if_it_names_it_no_more(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.accept(300, "2025-10-04T12", B)
    books.report("2025-10-04", a=30, b=300)
    assert books.verdict() == (0, "agree")
    books.report("2025-10-04", a=30)
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 300)
    books.report("2025-10-04")
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 330)


def test_a_source_that_a_report_of_another_day_named_is_missing_too(books: Books):
    books.keep(1001, "2025-08-01", B)
    books.accept(30, "2025-10-04T12", A)
    books.accept(300, "2025-10-04T12", B)
    books.report("2025-10-04", a=30)
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 300)


@pytest.mark.parametrize("sources", [("a",), ()])
def test_records_of_a_source_that_no_report_has_named_are_unassigned_in_every_form(
    books: Books, sources: tuple[str, ...]
):
    books.accept(30, "2025-10-04T12", A)
    books.accept(300, "2025-10-04T12", B)
    books.report("2025-10-04", **dict.fromkeys(sources, 30))
    unassigned = 300 if sources else 330
    code, found = books.judged()
    assert (code, found["verdict"], found["unassigned"]["accepted"]) == (1, "incomplete", unassigned)
    for form in ("table", "csv", "html"):
        result = books.reconcile(form=form)
        assert result.returncode == 1
        said = " ".join((result.stdout + result.stderr).split())
        assert f"Unassigned: {unassigned} accepted records are of marketing source" in said, form
        assert "The report and the ledger agree" not in said
    openpyxl = pytest.importorskip("openpyxl")
    path = books.shipper.folder / "october.xlsx"
    assert books.reconcile("--output", str(path), form="xlsx").returncode == 1
    facts = dict(openpyxl.load_workbook(path)["verdict"].iter_rows(values_only=True))
    assert (facts["verdict"], facts["unassigned"]) == ("incomplete", unassigned)
    rows = [row for row in books.reconcile(form="csv").stdout.splitlines() if '"unassigned"' in row]
    assert len(rows) == (1 if sources else 2)
    assert all('"incomplete"' in row for row in rows)


def test_settings_say_whose_records_are(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.accept(300, "2025-10-04T12", B)
    books.accept(5, "2025-10-04T13", 777)
    books.accept(7, "2025-10-04T13", 778, affiliate="aff-9")
    books.report("2025-10-04", a=30)
    code, found = books.judged("--set", f"report.media=[{B}, 777]")
    assert (code, found["totals"]["missing"], found["unassigned"]["accepted"]) == (3, 305, 7)
    accounts = books.shipper.folder / "accounts.csv"
    accounts.write_text(f"account,media,affiliate_id\n2002,{B},\n2002,777,\n2002,,aff-9\n")
    code, found = books.judged("--set", f"report.accounts={accounts}")
    assert (code, found["verdict"], found["of_other_accounts"]["accepted"]) == (0, "agree", 312)


def test_an_affiliate_that_the_ledger_keeps_as_a_hash_is_named_as_it_came_or_by_its_hash(books: Books):
    email = "jane@example.com"
    books.accept(30, "2025-10-04T12", A)
    books.accept(7, "2025-10-04T13", 778, affiliate=email)
    books.report("2025-10-04", a=30)
    assert books.judged()[1]["unassigned"]["accepted"] == 7
    accounts = books.shipper.folder / "accounts.csv"
    (hashed,) = {row.affiliate_id for row in read_ledger(books.shipper.state)} - {""}
    for name in (email, hashed):
        accounts.write_text(f"account,media,affiliate_id\n2002,,{name}\n")
        result = books.reconcile("--set", f"report.accounts={accounts}", "--all")
        found = json.loads(result.stdout)
        assert (result.returncode, found["verdict"], found["of_other_accounts"]["accepted"]) == (0, "agree", 7)
        assert email not in result.stdout + result.stderr
    assert hashed.startswith("hash:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("account,media\n1,2\n", "line 1: the first line is not account,media,affiliate_id"),
        ("account,media,affiliate_id\n1001,x,\n", "line 2: its media is not a number"),
        ("account,media,affiliate_id\n1001,,\n", "line 2: it has neither media nor affiliate_id"),
        ("account,media,affiliate_id\n1,5,\n2,5,\n", "line 3: it gives 5 to account 2, an earlier line to account 1"),
        (None, "cannot read"),
    ],
)
def test_a_file_of_accounts_that_will_not_do_is_an_error(books: Books, text: str | None, words: str):
    accounts = books.shipper.folder / "accounts.csv"
    if text is not None:
        accounts.write_text(text)
    result = books.reconcile("--set", f"report.accounts={accounts}")
    assert (result.returncode, result.stdout) == (2, "")
    assert "report.accounts" in result.stderr
    assert words in result.stderr


def test_what_two_accounts_claim_is_contested_and_counts_where_the_media_belongs(books: Books):
    books.keep(2002, "2025-08-01", B)
    books.accept(30, "2025-10-04T12", A)
    books.accept(4, "2025-10-04T12", A, affiliate="2002")
    books.accept(9, "2025-10-04T12", B, affiliate="1001")
    books.report("2025-10-04", a=34)
    code, found = books.judged("--all")
    assert (code, found["verdict"], found["contested"]) == (0, "agree", 13)
    assert found["totals"]["contested"] == 4
    assert [(row["account_id"], row["accepted"]) for row in found["of_other_accounts"]["rows"]] == [(2002, 9)]
    assert any(line.startswith("Contested: 13 accepted records") for line in found["headlines"])


# The day boundary


def test_a_hundred_lost_at_noon_are_not_explained_by_a_hundred_too_many_the_day_after(books: Books):
    books.accept(300, "2025-10-04T12", A)
    books.accept(300, "2025-10-05T12", A)
    books.report("2025-10-04", a=200)
    books.report("2025-10-05", a=400)
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 100)


def test_what_lies_at_the_end_of_a_day_may_count_as_of_the_next(books: Books):
    books.accept(300, "2025-10-04T12", A)
    books.accept(3, "2025-10-04T23", A)
    books.accept(300, "2025-10-05T12", A)
    books.report("2025-10-04", a=300)
    books.report("2025-10-05", a=303)
    code, found = books.judged()
    assert (code, found["verdict"]) == (0, "explained")
    words = "all 3 records within 2 h of the end of 2025-10-04 may count as of 2025-10-05"
    assert words in found["rows"][0]["explanation"]
    books.report("2025-10-04", a=299)
    books.report("2025-10-05", a=304)
    assert books.verdict() == (3, "differences")
    assert books.verdict("--boundary-hours", "12") == (0, "explained")
    assert books.verdict("--boundary-hours", "0") == (3, "differences")


# Dead letters


def test_only_dead_letters_that_were_sent_excuse_a_surplus(books: Books, fake: FakeService):
    books.accept(30, "2025-10-04T12", A)
    bad = b"".join(
        changed(line, IP="nowhere", Timestamp="2025-10-04T12:00:00Z", BTag=f"{A}_{'0' * 32}", BrandID=11)
        for line in sample_lines(5, seed=7, end=datetime(2025, 11, 1, tzinfo=UTC), days=1)
    )
    (books.shipper.folder / "bad.ndjson").write_bytes(bad)
    result = books.shipper.run("backfill", books.shipper.folder / "bad.ndjson", "--summary", "json")
    assert result.counts() == (5, 0, 5, 0, 0)
    books.report("2025-10-04", a=35)
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["surplus"]) == (3, "differences", 5)
    assert found["totals"]["dead_letters"] == 0


# Holes and periods


def test_a_day_whose_report_cannot_be_had_is_named_and_nothing_is_said_to_agree(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.accept(55, "2025-10-05T12", A)
    books.report("2025-10-04", a=30)
    books.refuses = {"2025-10-05"}
    code, found = books.judged()
    assert (code, found["verdict"], found["is_complete"]) == (1, "incomplete", False)
    assert found["periods"] == {"compared": 2, "asked": 3}
    (hole,) = found["not_compared"]
    assert (hole["start"], hole["end"], hole["accepted"]) == ("2025-10-05", "2025-10-05", 55)
    for form in ("table", "csv", "html"):
        result = books.reconcile(form=form)
        said = " ".join((result.stdout + result.stderr).split())
        assert result.returncode == 1
        day = "5 October 2025" if form == "html" else "2025-10-05"
        assert f"2 of 3 periods; not compared: {day}, as its report could not be fetched" in said, form
        assert "ledger agree" not in said
    assert "total (2 of 3 periods)" in books.reconcile(form="table").stdout


def test_a_partial_reconciliation_does_not_replace_a_file(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.report("2025-10-04", a=30)
    path = books.shipper.folder / "october.csv"
    assert books.reconcile("--output", str(path), form="csv").returncode == 0
    whole = path.read_bytes()
    books.refuses = {"2025-10-05"}
    result = books.reconcile("--output", str(path), form="csv")
    assert (result.returncode, path.read_bytes()) == (1, whole)
    assert "--allow-partial" in result.stderr
    assert books.reconcile("--output", str(path), "--allow-partial", form="csv").returncode == 1
    assert '"not compared"' in path.read_text()


@pytest.mark.parametrize("stated", [("2025-09-04", "2025-09-04"), ("2025-10-04", "2025-10-31")])
def test_a_report_of_another_period_is_an_error(books: Books, stated: tuple[str, str]):
    books.accept(30, "2025-10-04T12", A)
    books.report("2025-10-04", a=30)
    books.states = lambda _: stated
    result = books.reconcile(days=("2025-10-04", "2025-10-04"))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"the report is of {stated[0]}T00:00:00 to {stated[1]}T23:59:59, 2025-10-04 was asked for" in result.stderr
    with closing(History(books.shipper.state)) as history:
        assert not history.within(1001, date.min, date.max), "it was kept"
    books.states = lambda asked: stated if asked.start == date(2025, 10, 5) else (str(asked.start), str(asked.end))
    assert books.verdict() == (1, "incomplete")


# Verdicts


def test_what_the_platform_takes_back_is_explained_and_alarms(books: Books):
    books.accept(100, "2025-10-04T12", A)
    books.report("2025-10-04", a=(100, -3))
    code, found = books.judged()
    assert (code, found["verdict"], found["is_alarmed"]) == (6, "explained", True)
    assert found["headlines"][2].startswith("Alarm: the platform took back 3 registrations (3.0% of what was accepted)")
    assert "Alarm: the platform took back 3" in " ".join(books.reconcile(form="table").stdout.split())
    assert books.verdict("--alarm-below", "-5%") == (0, "explained")
    assert books.verdict("--alarm-below", "-2.5%") == (6, "explained")
    result = books.reconcile("--alarm-below", "5%")
    assert (result.returncode, result.stdout) == (2, "")


def test_what_was_restated_downwards_alarms(books: Books):
    books.accept(100, "2025-10-04T12", A)
    books.report("2025-10-04", a=100)
    assert books.verdict() == (0, "agree")
    books.report("2025-10-04", a=96)
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["taken_back"]) == (6, "explained", -4)


def test_a_month_is_not_judged_for_the_part_that_is_young_and_for_no_more(books: Books):
    today = date.today()
    first, old, young = (date.fromordinal(today.toordinal() - ago) for ago in (10, 9, 1))
    books.accept(100, f"{old}T12", A)
    books.accept(20, f"{young}T12", A)
    for lost, expected in {20: (4, "not yet judged"), 21: (3, "differences")}.items():
        books.figures = {str(old): {(11, A): 120 - lost}}
        found = books.verdict("--split", "none", days=(str(first), str(today)))
        assert found == expected, lost


# Days to come


@pytest.mark.parametrize("split", ["day", "month"])
def test_a_month_that_has_not_begun_is_not_judged_and_its_reports_are_not_fetched(books: Books, split: str):
    books.accept(3, "2025-10-04T12", A)
    table = books.reconcile("--split", split, days=("2999-12",), form="table")
    assert (table.returncode, table.stderr) == (4, "")
    assert (
        "Verdict: not yet judged. No day can be judged yet. Not yet judged: 2999-12-01 to 2999-12-31 (not "
        "begun). Run it again on 3000-01-02 or later."
    ) in " ".join(table.stdout.split())
    assert "agree" not in table.stdout
    code, found = books.judged("--split", split, days=("2999-12",))
    assert (code, found["verdict"], found["judged"]) == (4, "not yet judged", [])
    assert found["run_again_on"] == "3000-01-02"
    assert not books.asked


@pytest.mark.parametrize("split", ["day", "none"])
def test_a_month_that_is_not_over_is_not_said_to_agree(books: Books, split: str):
    today = datetime.now(UTC).date()
    first, old, before, last = (today + ago * timedelta(days=1) for ago in (-9, -8, -1, 5))
    books.accept(30, f"{old}T12", A)
    books.figures = {str(old): {(11, A): 30}}
    code, found = books.judged("--split", split, days=(str(first), str(last)))
    assert (code, found["verdict"], found["run_again_on"]) == (4, "not yet judged", str(last + timedelta(days=2)))
    not_yet = [(each["start"], each["end"], each["reason"]) for each in found["not_yet_judged"]]
    if split == "none":
        assert (found["judged"], not_yet) == ([], [(str(first), str(last), "not over")])
    else:
        tomorrow = today + timedelta(days=1)
        assert found["judged"] == [{"start": str(first), "end": str(before)}]
        assert not_yet == [(str(today), str(today), "not over"), (str(tomorrow), str(last), "not begun")]
        assert f"Judged {first} to {before}: accepted 30, reported 30, difference 0." in found["headlines"]
        assert max(each.end for each in books.asked) == today
    assert books.verdict("--split", split, days=(str(first), str(before))) == (0, "agree")


def test_a_month_of_which_neither_side_has_anything_is_not_said_to_agree(books: Books):
    books.accept(3, "2025-10-04T12", A)
    table = books.reconcile(days=("2025-08",), form="table")
    assert table.returncode == 0
    assert "Verdict: nothing to compare. Nothing was sent and nothing is reported.\n" in table.stdout
    assert "agree" not in table.stdout


# Totals and forms


def test_the_first_lines_have_the_totals_of_the_table(books: Books):
    books.accept(300, "2025-10-04T12", A)
    books.accept(30, "2025-10-05T12", B)
    books.report("2025-10-04", a=293)
    books.report("2025-10-05", b=32)
    table = books.reconcile(form="table").stdout
    said = " ".join(table.split())
    words = "Total 2025-10-04 to 2025-10-06: accepted 330, reported 325, difference -5 (-7 missing, +2 too many)."
    assert words in said
    assert said.index(words) < said.index("2025-10-04 11")
    assert "accepted 330, reported 325, difference -5" in said.partition(" total ")[2]
    assert words in books.reconcile(form="csv").stderr


def test_csv_names_the_time_zone_in_its_last_column_and_adds_up_to_the_totals(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.report("2025-10-04", a=28)
    rows = list(csv.DictReader(books.reconcile("--timezone", "Europe/Malta", form="csv").stdout.splitlines()))
    assert {row["timezone"] for row in rows} == {"Europe/Malta"}
    assert list(rows[0])[-1] == "timezone"
    assert [sum(int(row[name] or 0) for row in rows) for name in ("accepted", "reported", "difference")] == [30, 28, -2]


def test_explained_is_not_said_of_what_is_young(books: Books):
    yesterday = date.fromordinal(date.today().toordinal() - 1)
    books.accept(100, f"{yesterday}T12", A)
    books.figures = {str(yesterday): {(11, A): (100, -3)}}
    code, found = books.judged(days=(str(yesterday), str(yesterday)))
    assert (code, found["verdict"], found["is_alarmed"]) == (4, "not yet judged", False)
    assert "adjust" not in found["rows"][0]["explanation"]


# What is wrong in the reports


def test_a_source_that_is_listed_with_figures_and_without_is_counted_once_and_told(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.report("2025-10-04", a=30)
    bare = wire.MarketingSource(id=A, reporting_currency="Euro")
    books.changes = lambda made: replace(
        made, brands=[replace(each, marketing_sources=[bare, *each.marketing_sources]) for each in made.brands]
    )
    code, found = books.judged()
    assert (code, found["verdict"], found["totals"]["reported"]) == (0, "agree", 30)
    (finding,) = found["findings"]
    assert (finding["start"], finding["check"]) == ("2025-10-04", "sources_are_listed_once")
    assert finding["where"] == f"brands[id=11].marketingSources[id={A}]"
    assert "it is listed more than once" in " ".join(books.reconcile(form="table").stdout.split())


def test_a_balance_that_does_not_follow_stands_in_every_form_and_is_no_part_of_the_verdict(books: Books):
    books.accept(30, "2025-10-04T12", A)
    books.report("2025-10-04", a=30)
    assert books.judged()[1]["findings"] == []
    books.changes = lambda made: replace(made, outgoing_balance=Decimal("18.5900"))
    code, found = books.judged()
    assert (code, found["verdict"]) == (0, "agree")
    assert [(each["start"], each["severity"], each["residual"]) for each in found["findings"]] == [
        (day, "warning", 8.59) for day in days_of(*DAYS)
    ]
    words = "does not hold by 8.5900 (and 2 more)"
    path = books.shipper.folder / "october.xlsx"
    csv_form = books.reconcile(form="csv")
    assert words not in csv_form.stdout
    assert words in " ".join(csv_form.stderr.split())
    assert words in " ".join(books.reconcile(form="table").stdout.split())
    assert words in books.reconcile(form="html").stdout
    assert words in " ".join(found["notes"])
    books.reconcile("--output", str(path), form="xlsx")
    openpyxl = pytest.importorskip("openpyxl")
    facts = openpyxl.load_workbook(path)["verdict"].iter_rows(values_only=True)
    assert any(words in str(value) for _, value in facts)
