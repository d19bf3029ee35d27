"""Verdicts of `reconcile` on constructed reports and losses: missing records are never reported as agreeing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.document import read_report
from shipper.report.history import History
from shipper.report.ranges import DateRange, Part
from shipper.sandbox.samples import sample_lines
from tests.conftest import SEED
from tests.e2e.driver import Result, Shipper, changed
from tests.e2e.fake_service import FakeService
from tests.ledgers import read_ledger
from tests.report_documents import NOTHING_EARNED, brand, entry, pair, report
from tests.report_service import Asked, ReportService, ok, refusal

DAYS = ("2025-10-04", "2025-10-06")
A, B = 50121, 50377


class Scenario:
    """
    A shipper that has delivered the given records, and a platform that reports the given figures.

    Attributes:
        figures: Registrations by day, then by brand and marketing source; `(result, adjustment)` or the result.
        refuses: Days without a report.
        asked: The report requests.
        changes: Other changes to a report.
        extra: Additional fields of its document, each with a comma after it.
    """

    def __init__(self, shipper: Shipper, fake: FakeService, service: ReportService) -> None:
        self.shipper = shipper
        self.figures: dict[str, dict[tuple[int, int], Any]] = {day: {} for day in days_of(*DAYS)}
        self.refuses: set[str] = set()
        self.extra = b""
        self.changes: Callable[[wire.DailyReport], wire.DailyReport] = lambda made: made
        self.states: Callable[[Asked], tuple[str, str]] = lambda asked: (str(asked.start), str(asked.end))
        service.rule = self._answer
        self.asked = service.asked
        with shipper.config.open("a") as file:
            file.write(f'[report]\nbase_url = "{service.url}"\nsubscription_key = "key"\ntoken = "token"\n')

    def accept(self, count: int, hour: str, media: int, *, affiliate: str = "", number: int = 11) -> None:
        """Deliver `count` records, which the service accepts."""
        file = self.write(count, hour, media, affiliate=affiliate, number=number)
        result = self.shipper.run("backfill", file, "--summary", "json")
        assert result.counts() == (count, count, 0, 0, 0), result.stderr

    def write(self, count: int, hour: str, media: int, *, affiliate: str = "", number: int = 11) -> Path:
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
        return file

    def report(self, day: str, **figures: Any) -> None:
        """Set the figures of brand 11 in the report of a day, by name of the source."""
        self.figures[day] = {(11, {"a": A, "b": B}[name]): figure for name, figure in figures.items()}

    def reconcile(self, *options: str, days: tuple[str, ...] = DAYS, form: str = "json") -> Result:
        result = self.shipper.run("reconcile", "1001", *days, "--format", form, *options)
        assert "Traceback" not in result.stderr
        return result

    def judged(self, *options: str, days: tuple[str, ...] = DAYS) -> tuple[int, dict[str, Any]]:
        """Return the exit code and the document."""
        result = self.reconcile(*options, days=days)
        return result.returncode, json.loads(result.stdout)

    def verdict(self, *options: str, **where: Any) -> tuple[int, str]:
        code, found = self.judged(*options, **where)
        return code, found["verdict"]

    def keep(
        self, account: int, day: str, *sources: int, count: int = 1, fetched_at: str = "2023-11-14T22:13:20Z"
    ) -> None:
        """Save a report in the history as if it had been fetched at another time, by default long ago."""
        figures = wire.Conversions(registrations=pair(str(count)))
        entries = [entry(source, conversions=figures) for source in sources]
        body = wire.encode_report(report(brand(*entries), account=account, start=day, end=day))
        with closing(History(self.shipper.state)) as history:
            part = Part(account, DateRange(date.fromisoformat(day), date.fromisoformat(day)))
            fetched = read_report(body, account_id=account, fetched_at=datetime.fromisoformat(fetched_at).timestamp())
            history.add(part, fetched)

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
        return ok(wire.encode_report(made).replace(b"{", b"{" + self.extra, 1))


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
def scenario(shipper: Shipper, fake: FakeService, origin: ReportService) -> Scenario:
    return Scenario(shipper, fake, origin)


# A missing source


def test_a_source_in_an_earlier_version_of_a_report_is_missing_if_the_new_version_omits_it(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(300, "2025-10-04T12", B)
    scenario.report("2025-10-04", a=30, b=300)
    assert scenario.verdict() == (0, "agree")
    scenario.report("2025-10-04", a=30)
    code, found = scenario.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 300)
    scenario.report("2025-10-04")
    code, found = scenario.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 330)


def test_a_source_in_the_report_of_another_day_is_missing_too(scenario: Scenario):
    scenario.keep(1001, "2025-08-01", B)
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(300, "2025-10-04T12", B)
    scenario.report("2025-10-04", a=30)
    code, found = scenario.judged()
    assert (code, found["verdict"], found["totals"]["missing"]) == (3, "differences", 300)


@pytest.mark.parametrize(
    ("fetched_at", "zone", "expected"),
    [
        ("2025-10-04T21:59:59Z", "Europe/Malta", (3, "differences")),
        ("2025-10-04T22:00:00Z", "Europe/Malta", (6, "explained")),
        ("2025-10-04T22:00:00Z", "UTC", (3, "differences")),
        ("2025-10-05T00:00:00Z", "UTC", (6, "explained")),
        ("2025-10-05T00:00:00Z", "America/New_York", (3, "differences")),
        ("2025-10-05T04:00:00Z", "America/New_York", (6, "explained")),
    ],
)
def test_a_restatement_explains_if_the_earlier_version_was_fetched_after_the_day_in_the_time_zone(
    scenario: Scenario, fetched_at: str, zone: str, expected: tuple[int, str]
):
    scenario.accept(100, "2025-10-04T12", A)
    scenario.keep(1001, "2025-10-04", A, count=100, fetched_at=fetched_at)
    scenario.report("2025-10-04", a=96)
    assert scenario.verdict("--timezone", zone) == expected


@pytest.mark.parametrize("sources", [("a",), ()])
def test_records_of_a_source_in_no_report_are_unassigned(scenario: Scenario, sources: tuple[str, ...]):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(300, "2025-10-04T12", B)
    scenario.report("2025-10-04", **dict.fromkeys(sources, 30))
    unassigned = 300 if sources else 330
    code, found = scenario.judged()
    assert (code, found["verdict"], found["unassigned"]["accepted"]) == (1, "incomplete", unassigned)
    result = scenario.reconcile(form="csv")
    result.assert_ended(1, f"Unassigned: {unassigned} accepted records are of marketing source")
    assert "The report and the ledger agree" not in result.stderr
    rows = [row for row in result.stdout.splitlines() if '"unassigned"' in row]
    assert len(rows) == (1 if sources else 2)


def test_settings_assign_records_to_accounts(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(300, "2025-10-04T12", B)
    scenario.accept(5, "2025-10-04T13", 777)
    scenario.accept(7, "2025-10-04T13", 778, affiliate="aff-9")
    scenario.report("2025-10-04", a=30)
    code, found = scenario.judged("--set", f"report.media=[{B}, 777]")
    assert (code, found["totals"]["missing"], found["unassigned"]["accepted"]) == (3, 305, 7)
    accounts = scenario.shipper.folder / "accounts.csv"
    accounts.write_text(f"account,media,affiliate_id\n2002,{B},\n2002,777,\n2002,,aff-9\n")
    code, found = scenario.judged("--set", f"report.accounts={accounts}")
    assert (code, found["verdict"], found["of_other_accounts"]["accepted"]) == (0, "agree", 312)


def test_an_accounts_file_can_name_a_hashed_affiliate_by_its_id_or_its_hash(scenario: Scenario):
    email = "jane@example.com"
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(7, "2025-10-04T13", 778, affiliate=email)
    scenario.report("2025-10-04", a=30)
    assert scenario.judged()[1]["unassigned"]["accepted"] == 7
    accounts = scenario.shipper.folder / "accounts.csv"
    (hashed,) = {row.affiliate_id for row in read_ledger(scenario.shipper.state)} - {""}
    for name in (email, hashed):
        accounts.write_text(f"account,media,affiliate_id\n2002,,{name}\n")
        result = scenario.reconcile("--set", f"report.accounts={accounts}", "--all")
        found = json.loads(result.stdout)
        assert (result.returncode, found["verdict"], found["of_other_accounts"]["accepted"]) == (0, "agree", 7)
        assert email not in result.stdout + result.stderr
    assert hashed.startswith("hash:")


def test_records_claimed_by_two_accounts_are_contested_and_counted_by_their_media(scenario: Scenario):
    scenario.keep(2002, "2025-08-01", B)
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(4, "2025-10-04T12", A, affiliate="2002")
    scenario.accept(9, "2025-10-04T12", B, affiliate="1001")
    scenario.report("2025-10-04", a=34)
    code, found = scenario.judged("--all")
    assert (code, found["verdict"], found["contested"]) == (0, "agree", 13)
    assert found["totals"]["contested"] == 4
    assert [(row["account_id"], row["accepted"]) for row in found["of_other_accounts"]["rows"]] == [(2002, 9)]
    assert any(line.startswith("Contested: 13 accepted records") for line in found["headlines"])


def test_records_that_are_delivered_after_the_report_was_made_are_not_missing(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    later = scenario.write(5, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=30)

    def deliver(made: wire.DailyReport) -> wire.DailyReport:
        assert scenario.shipper.start("backfill", later).finish().returncode == 0
        return made

    scenario.changes = deliver
    code, found = scenario.judged(days=("2025-10-04",))
    assert (code, found["verdict"], found["totals"]["accepted"]) == (0, "agree", 30)
    assert sum(row.accepted for row in read_ledger(scenario.shipper.state)) == 35


# The day boundary


def test_records_at_the_end_of_a_day_may_be_counted_on_the_next(scenario: Scenario):
    scenario.accept(300, "2025-10-04T12", A)
    scenario.accept(3, "2025-10-04T23", A)
    scenario.accept(300, "2025-10-05T12", A)
    scenario.report("2025-10-04", a=300)
    scenario.report("2025-10-05", a=303)
    code, found = scenario.judged()
    assert (code, found["verdict"]) == (0, "explained")
    words = "all 3 records within 2 h of the end of 2025-10-04 may count for 2025-10-05"
    assert words in found["rows"][0]["explanation"]
    scenario.report("2025-10-04", a=299)
    scenario.report("2025-10-05", a=304)
    assert scenario.verdict() == (3, "differences")
    assert scenario.verdict("--boundary-hours", "12") == (0, "explained")
    assert scenario.verdict("--boundary-hours", "0") == (3, "differences")


# Dead letters


def test_only_dead_letters_that_were_sent_explain_a_surplus(scenario: Scenario, fake: FakeService):
    scenario.accept(30, "2025-10-04T12", A)
    bad = b"".join(
        changed(line, IP="nowhere", Timestamp="2025-10-04T12:00:00Z", BTag=f"{A}_{'0' * 32}", BrandID=11)
        for line in sample_lines(5, seed=7, end=datetime(2025, 11, 1, tzinfo=UTC), days=1)
    )
    (scenario.shipper.folder / "bad.ndjson").write_bytes(bad)
    result = scenario.shipper.run("backfill", scenario.shipper.folder / "bad.ndjson", "--summary", "json")
    assert result.counts() == (5, 0, 5, 0, 0)
    scenario.report("2025-10-04", a=35)
    code, found = scenario.judged()
    assert (code, found["verdict"], found["totals"]["surplus"]) == (3, "differences", 5)
    assert found["totals"]["dead_letters"] == 0


def test_replayed_records_with_the_same_event_ids_are_not_from_before_the_ledger(scenario: Scenario):
    """The service accepts them twice, and the ledger counts them as duplicates the second time."""
    lines = sample_lines(2, seed=7, end=datetime(2025, 11, 1, tzinfo=UTC), days=1)
    good = [changed(line, Timestamp="2025-10-04T12:00:00Z", BTag=f"{A}_{'0' * 32}", BrandID=11) for line in lines]
    for address in ("::1", "::2"):
        file = scenario.shipper.folder / f"{address[-1]}.ndjson"
        file.write_bytes(b"".join(changed(line, IP=address) for line in good))
        assert scenario.shipper.run("backfill", file, "--summary", "json").counts() == (2, 0, 2, 0, 0)
    replayed = scenario.shipper.run("dead-letters", "replay", "--set", "records.relax=ip", "--summary", "json")
    assert replayed.counts() == (4, 4, 0, 0, 0)
    scenario.report("2025-10-04", a=5)
    code, found = scenario.judged()
    assert (code, found["totals"]["accepted"], found["totals"]["surplus"], found["notes"]) == (3, 2, 3, [])


# Missing days and periods


def test_a_day_without_a_report_makes_the_result_incomplete(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.accept(55, "2025-10-05T12", A)
    scenario.report("2025-10-04", a=30)
    scenario.refuses = {"2025-10-05"}
    code, found = scenario.judged()
    assert (code, found["verdict"], found["is_complete"]) == (1, "incomplete", False)
    assert found["periods"] == {"compared": 2, "asked": 3}
    (hole,) = found["not_compared"]
    assert (hole["start"], hole["end"], hole["accepted"]) == ("2025-10-05", "2025-10-05", 55)
    table = scenario.reconcile(form="table")
    text = " ".join(table.stdout.split())
    assert table.returncode == 1
    assert "2 of 3 periods; not compared: 2025-10-05, because its report could not be fetched" in text
    assert "total (2 of 3 periods)" in text
    assert "ledger agree" not in text


def test_a_partial_reconciliation_does_not_replace_a_file(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=30)
    path = scenario.shipper.folder / "october.csv"
    assert scenario.reconcile("--output", str(path), form="csv").returncode == 0
    whole = path.read_bytes()
    scenario.refuses = {"2025-10-05"}
    result = scenario.reconcile("--output", str(path), form="csv")
    assert (result.returncode, path.read_bytes()) == (1, whole)
    assert "--allow-partial" in result.stderr
    assert scenario.reconcile("--output", str(path), "--allow-partial", form="csv").returncode == 1
    assert '"not compared"' in path.read_text()


@pytest.mark.parametrize("stated", [("2025-09-04", "2025-09-04"), ("2025-10-04", "2025-10-31")])
def test_a_report_for_another_period_is_an_error(scenario: Scenario, stated: tuple[str, str]):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=30)
    scenario.states = lambda _: stated
    result = scenario.reconcile(days=("2025-10-04", "2025-10-04"))
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        f"the report covers {stated[0]}T00:00:00 to {stated[1]}T23:59:59, but 2025-10-04 was requested" in result.stderr
    )
    with closing(History(scenario.shipper.state)) as history:
        assert not history.within(Part(1001, DateRange(date.min, date.max))), "the report was saved"
    scenario.states = lambda asked: stated if asked.start == date(2025, 10, 5) else (str(asked.start), str(asked.end))
    assert scenario.verdict() == (1, "incomplete")


# Verdicts


def test_withdrawn_registrations_are_explained_and_alarm(scenario: Scenario):
    scenario.accept(100, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=(100, -3))
    code, found = scenario.judged()
    assert (code, found["verdict"], found["is_alarmed"]) == (6, "explained", True)
    assert found["headlines"][2].startswith("Alarm: the platform took back 3 registrations (3.0% of what was accepted)")
    assert "Alarm: the platform took back 3" in " ".join(scenario.reconcile(form="table").stdout.split())
    assert scenario.verdict("--alarm-below", "-5%") == (0, "explained")
    assert scenario.verdict("--alarm-below", "-2.5%") == (6, "explained")
    result = scenario.reconcile("--alarm-below", "5%")
    assert (result.returncode, result.stdout) == (2, "")


def test_only_the_most_recent_days_of_a_month_are_not_judged(scenario: Scenario):
    today = date.today()
    first, old, young = (date.fromordinal(today.toordinal() - ago) for ago in (10, 9, 1))
    scenario.accept(100, f"{old}T12", A)
    scenario.accept(20, f"{young}T12", A)
    options = {"days": (str(first), str(today))}
    for lost, expected in {21: (3, "differences"), 20: (4, "not yet judged")}.items():
        scenario.figures = {str(old): {(11, A): 120 - lost}}
        assert scenario.verdict("--split", "none", **options) == expected, lost
    assert scenario.verdict("--split", "none", "--settle-days", "0", **options) == (3, "differences")


# Future days


@pytest.mark.parametrize("split", ["day", "month"])
def test_a_month_that_has_not_begun_is_not_judged_and_its_reports_are_not_fetched(scenario: Scenario, split: str):
    scenario.accept(3, "2025-10-04T12", A)
    table = scenario.reconcile("--split", split, days=("2999-12",), form="table")
    assert (table.returncode, table.stderr) == (4, "")
    assert (
        "Verdict: not yet judged. No day can be judged yet. Not yet judged: 2999-12-01 to 2999-12-31 (not "
        "begun). Run it again on 3000-01-03 or later."
    ) in " ".join(table.stdout.split())
    assert "agree" not in table.stdout
    code, found = scenario.judged("--split", split, days=("2999-12",))
    assert (code, found["verdict"], found["judged"]) == (4, "not yet judged", [])
    assert found["run_again_on"] == "3000-01-03"
    assert not scenario.asked


@pytest.mark.parametrize("split", ["day", "none"])
def test_an_unfinished_month_does_not_agree_yet(scenario: Scenario, split: str):
    today = datetime.now(UTC).date()
    first, old, before, last = (today + ago * timedelta(days=1) for ago in (-9, -8, -1, 5))
    scenario.accept(30, f"{old}T12", A)
    scenario.figures = {str(old): {(11, A): 30}}
    code, found = scenario.judged("--split", split, days=(str(first), str(last)))
    assert (code, found["verdict"], found["run_again_on"]) == (4, "not yet judged", str(last + timedelta(days=3)))
    not_yet = [(each["start"], each["end"], each["reason"]) for each in found["not_yet_judged"]]
    if split == "none":
        assert (found["judged"], not_yet) == ([], [(str(first), str(last), "not over")])
    else:
        tomorrow = today + timedelta(days=1)
        assert found["judged"] == [{"start": str(first), "end": str(before)}]
        assert not_yet == [(str(today), str(today), "not over"), (str(tomorrow), str(last), "not begun")]
        assert f"Judged {first} to {before}: accepted 30, reported 30, difference 0." in found["headlines"]
        assert max(each.end for each in scenario.asked) == today
    assert scenario.verdict("--split", split, days=(str(first), str(before))) == (0, "agree")


def test_a_month_without_records_and_registrations_does_not_agree(scenario: Scenario):
    scenario.accept(3, "2025-10-04T12", A)
    table = scenario.reconcile(days=("2025-08",), form="table")
    assert table.returncode == 0
    assert "Verdict: nothing to compare. Nothing was sent and nothing is reported.\n" in table.stdout
    assert "agree" not in table.stdout


# Errors in the reports


def test_a_source_listed_twice_is_counted_once_with_a_finding(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=30)
    bare = wire.MarketingSource(id=A, reporting_currency="Euro")
    scenario.changes = lambda made: replace(
        made, brands=[replace(each, marketing_sources=[bare, *each.marketing_sources]) for each in made.brands]
    )
    code, found = scenario.judged()
    assert (code, found["verdict"], found["totals"]["reported"]) == (0, "agree", 30)
    (finding,) = found["findings"]
    assert (finding["start"], finding["check"]) == ("2025-10-04", "sources_are_listed_once")
    assert finding["where"] == f"brands[id=11].marketingSources[id={A}]"
    assert "it is listed more than once" in " ".join(scenario.reconcile(form="table").stdout.split())


def test_undocumented_fields_are_named_as_they_may_mean_that_a_report_is_incomplete(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=30)
    scenario.extra = b'"nextLink":"/page/2","\x1b[2J":1,'.replace(b"\x1b", b"\\u001b")
    code, found = scenario.judged()
    assert (code, found["verdict"]) == (0, "agree")
    assert {each["check"] for each in found["findings"]} == {"fields_are_documented"}
    words = "undocumented fields, which may mean that the report is incomplete: nextLink, \\x1b[2J (and 2 more)"
    assert words in " ".join(scenario.reconcile(form="table").stdout.split())


def test_an_inconsistent_balance_is_a_note_and_does_not_affect_the_verdict(scenario: Scenario):
    scenario.accept(30, "2025-10-04T12", A)
    scenario.report("2025-10-04", a=30)
    assert scenario.judged()[1]["findings"] == []
    scenario.changes = lambda made: replace(made, outgoing_balance=Decimal("18.5900"))
    code, found = scenario.judged()
    assert (code, found["verdict"]) == (0, "agree")
    assert [(each["start"], each["severity"], each["residual"]) for each in found["findings"]] == [
        (day, "warning", 8.59) for day in days_of(*DAYS)
    ]
    words = (
        "the account's outgoing balance is its opening balance plus the revenue share, CPA and fees of its marketing "
        "sources: off by 8.5900 (and 2 more)"
    )
    assert words in " ".join(found["notes"])
    assert words in " ".join(scenario.reconcile(form="csv").stderr.split())
