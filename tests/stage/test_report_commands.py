"""The report commands in this process: output, files, stderr and exit codes."""

from __future__ import annotations

import csv
import io
import json
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from shipper.model import wire
from shipper.report.document import read_report
from shipper.report.history import History
from shipper.report.metrics import METRICS
from shipper.report.ranges import DateRange, Part
from shipper.report.rows import ReportVersion, source_table
from shipper.sandbox.options import CallLimit
from tests.e2e.driver import Service, Shipper, Target, sandbox
from tests.report_documents import NOTHING_EARNED, brand, entry, pair
from tests.report_service import Asked, Reply, ReportService, document, ok, refusal
from tests.reporter import NO_PATIENCE, OCTOBER, QUARTER, Reporter, hook, keep, of_month
from tests.servers import reset


@pytest.fixture(scope="module")
def seeded() -> Iterator[Service]:
    with sandbox(figures="seeded") as service:
        yield service


@pytest.fixture
def shipper(tmp_path: Path) -> Shipper:
    """A shipper without a target."""
    return Shipper(tmp_path / "shipper", Target("http://127.0.0.1:9", "unused", "unused"))


@pytest.fixture
def sandboxed(shipper: Shipper, seeded: Service) -> Reporter:
    """Reports of a sandbox with invented figures, without restatements and faults."""
    seeded.reset()
    seeded.set_faults()
    return Reporter(shipper, seeded.target)


def restate_a_day_of_november(seeded: Service) -> None:
    url, days = f"{seeded.target.base_url}/_sandbox/restatements", {"start": "2026-11-05", "end": "2026-11-05"}
    httpx.post(url, json=days, trust_env=False, verify=False).raise_for_status()


def served(service: Service, start: str, end: str) -> str:
    """Fetch a document of account 1001 directly from the service."""
    headers = {
        "Authorization": f"Bearer {service.target.token}",
        "Ocp-Apim-Subscription-Key": service.target.subscription_key,
        "Content-Type": "application/json",
        "Cache-Control": "no-cache",
    }
    path = wire.REPORT_PATH.format(account_id=1001, start=start, end=end)
    answer = httpx.get(f"{service.target.base_url}{path}", headers=headers, trust_env=False, verify=False, timeout=10)
    return answer.raise_for_status().text


def figures(row: dict[str, Any]) -> list[Decimal | None]:
    """Return the figures of a flat row in any format."""
    names = [
        f"{metric.name}{part}"
        for metric in METRICS
        for part in (("_result", "_adjustment", "_total") if metric.has_adjustment else ("",))
    ]
    return [None if row[name] in {None, ""} else Decimal(str(row[name])) for name in names]


# Forms


@pytest.fixture(scope="module")
def exact(seeded: Service) -> list[list[Decimal | None]]:
    """The figures of October in the document, a list for each marketing source."""
    seeded.reset()
    made = read_report(served(seeded, *OCTOBER).encode(), account_id=1001).report
    rows = source_table([ReportVersion(made)]).rows
    assert len(rows) == 15
    figure_count = len(rows[0]) - 15
    return [[value for value in row[-figure_count:] if not isinstance(value, str | int)] for row in rows]


def _workbook_rows(path: Path) -> list[dict[str, Any]]:
    book = pytest.importorskip("openpyxl").load_workbook(path)
    assert book.sheetnames == ["sources", "accounts"]
    head, *rows = book["sources"].iter_rows(values_only=True)
    return [dict(zip(head, row, strict=True)) for row in rows]


READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "csv": lambda path: list(csv.DictReader(io.StringIO(path.read_text()))),
    "ndjson": lambda path: [json.loads(line, parse_float=Decimal) for line in path.read_text().splitlines()],
    "parquet": lambda path: pytest.importorskip("polars").read_parquet(path).to_dicts(),
    "xlsx": _workbook_rows,
}


@pytest.mark.parametrize("form", READERS)
def test_a_file_of_rows_has_the_figures_of_the_document(sandboxed: Reporter, exact: list[list[Decimal]], form: str):
    path = sandboxed.folder / f"october.{form}"
    sandboxed.good("1001", *OCTOBER, "--format", form, "-o", path)
    assert [figures(row) for row in READERS[form](path)] == exact


@pytest.mark.parametrize(
    "arguments",
    [("--account", "1001", "--format", "csv", *OCTOBER), ("--format", "csv", "--output", "-", "1001", *OCTOBER)],
    ids=["account", "in_front"],
)
def test_options_may_be_at_any_position(sandboxed: Reporter, exact: list[list[Decimal]], arguments: tuple[str, ...]):
    rows = list(csv.DictReader(io.StringIO(sandboxed.good(*arguments))))
    assert [figures(row) for row in rows] == exact


def test_csv_for_a_spreadsheet_has_bom_and_delimiter_in_a_private_file_that_is_replaced_atomically(
    sandboxed: Reporter, exact: list[list[Decimal]]
):
    path = sandboxed.folder / "october.csv"
    path.write_text("old")
    sandboxed.good("1001", *OCTOBER, "--format", "csv", "--delimiter", ";", "--bom", "--output", path)
    assert path.read_bytes().startswith(b"\xef\xbb\xbfaccount_id;account_name;")
    rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig")), delimiter=";"))
    assert [figures(row) for row in rows] == exact
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(each.name for each in path.parent.glob("*october*")) == ["october.csv"]


def test_table_and_page_have_the_figures_of_the_document(sandboxed: Reporter, exact: list[list[Decimal]]):
    page = sandboxed.good("1001", *OCTOBER, "--format", "html")
    assert page.startswith("<!doctype html>")
    shown = {Decimal(value) for value in re.findall(r'<data value="([^"]+)"', page)}
    assert {row[0] for row in exact} <= shown, "clicks of a marketing source are missing"
    assert "Euro (EUR)" in page
    table = sandboxed.good("1001", *OCTOBER, env={"COLUMNS": "400"})
    assert "Euro (EUR)" in table
    lines = [line for line in table.splitlines() if re.search(r" 50[0-9]{3} ", line)]
    assert [line.split("  50")[1].split()[1] for line in lines] == [f"{row[0]:,f}" for row in exact]


def test_document_is_exact(reporter: Reporter, origin: ReportService):
    body = b" " + of_month(10).replace(b",", b" ,\n")
    origin.rule = lambda _: ok(body)
    path = reporter.folder / "october.json"
    assert reporter.good("1001", *OCTOBER, "--format", "json").encode() == body
    assert reporter.good("1001", *OCTOBER, "--format", "json", "--output", path) == ""
    assert path.read_bytes() == body


def test_several_documents_are_an_array_of_exact_ones(reporter: Reporter, origin: ReportService):
    text = reporter.good("7", *QUARTER, "--account", "5", "--split", "month", "--format", "json")
    documents = [document(asked).decode() for asked in sorted(origin.asked, key=lambda asked: (-asked[0], asked[1]))]
    assert text == f"[{(',' + chr(10)).join(documents)}]\n"
    found = [(each["source"]["affilaiteAccountId"], each["reportingPeriod"]["start"][:7]) for each in json.loads(text)]
    assert found == [(account, f"2026-{month}") for account in (7, 5) for month in (10, 11, 12)]


def test_a_byte_order_mark_before_a_document_is_removed(reporter: Reporter, origin: ReportService):
    plain = reporter.good("1001", *QUARTER, "--format", "json")
    assert reporter.good("fetch", "1001", *QUARTER).count(": new\n") == 3
    origin.rule = lambda asked: ok(BOM_UTF8 + document(asked))
    assert reporter.good("1001", *QUARTER, "--format", "json") == plain
    assert reporter.good("1001", *OCTOBER, "--format", "json").encode() == of_month(10)
    assert reporter.good("fetch", "1001", *QUARTER).count(": unchanged since ") == 3


def test_a_month_has_all_its_days_and_their_flows_add_up_to_it(sandboxed: Reporter, seeded: Service):
    month = json.loads(served(seeded, "2026-02-01", "2026-02-28"), parse_float=Decimal)
    lines = sandboxed.good("1001", "2026-02-01", "2026-02-28", "--split", "day", "--format", "ndjson").splitlines()
    rows = [json.loads(line, parse_float=Decimal) for line in lines]
    days = sorted({row["period_start"][:10] for row in rows})
    assert days == [f"2026-02-{day:02}" for day in range(1, 29)]
    assert [row["period_start"] for row in rows] == sorted(row["period_start"] for row in rows)
    for made in month["brands"]:
        for source in made["marketingSources"]:
            mine = [row for row in rows if (row["brand_id"], row["source_id"]) == (made["id"], source["id"])]
            assert len(mine) == 28
            assert sum(row["clicks"] for row in mine) == source["conversions"]["clicks"]
            assert sum(row["net_revenue_result"] for row in mine) == source["netRevenue"]["result"]


def test_several_periods_are_in_one_table(sandboxed: Reporter):
    table = sandboxed.good("1001", *QUARTER, "--split", "month")
    assert table.count("Opening balance") == 3
    assert "all 3 periods, 2026-10-01T00:00:00 to 2026-12-31T23:59:59" in table
    assert "Restated" not in table
    assert not (sandboxed.state / "reports.db").exists(), "a combined table was stored"


def test_service_that_limits_ranges_to_a_month_is_asked_month_by_month(shipper: Shipper):
    with sandbox(profile="strict") as strict:
        sandboxed = Reporter(shipper, strict.target)
        refused = sandboxed("1001", *QUARTER, "--split", "none")
        assert refused.returncode == 1
        assert "if so, request each month separately: --split month (HTTP 400)" in refused.stderr
        assert len(json.loads(sandboxed.good("1001", *QUARTER, "--format", "json"))) == 3


def test_report_without_brands_is_valid(reporter: Reporter, origin: ReportService):
    origin.rule = lambda asked: ok(document(asked, brands=[]))
    assert "No brand has figures in this period." in reporter.good("1001", *OCTOBER)
    assert reporter.good("1001", *OCTOBER, "--format", "csv").count("\n") == 1
    assert reporter.good("1001", *OCTOBER, "--format", "ndjson") == ""
    assert "No brand has figures" in reporter.good("1001", *OCTOBER, "--format", "html")


def test_missing_service_is_a_configuration_error(shipper: Shipper):
    result = shipper.run("report", "1001", *OCTOBER)
    assert (result.returncode, result.stdout) == (2, "")
    assert "report" in result.stderr


# Output files


def test_link_is_followed(sandboxed: Reporter):
    (sandboxed.folder / "reports").mkdir()
    target, link = sandboxed.folder / "reports" / "october.csv", sandboxed.folder / "latest.csv"
    for exists in (False, True):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert target.exists() is exists
        sandboxed.good("1001", *OCTOBER, "--format", "csv", "--output", link)
        assert link.is_symlink()
        assert target.read_text().startswith("account_id,")


def test_unwritable_file_is_an_error(sandboxed: Reporter):
    result = sandboxed("1001", *OCTOBER, "--output", "/proc/october")
    assert result.returncode == 1
    assert "cannot write '/proc/october'" in result.stderr
    full = sandboxed("1001", *OCTOBER, "--output", "/dev/full")
    assert (full.returncode, full.stderr) == (1, "shipper: cannot write '/dev/full': No space left on device\n")


# What goes wrong


def test_reports_that_cannot_be_fetched_are_named_and_no_file_is_changed(reporter: Reporter, origin: ReportService):
    replies = {1: (refusal(404), "the account is unknown to the service"), 2: (ok(b'{"id":'), "the answer is not JSON")}
    origin.rule = lambda asked: replies[asked.account][0]
    path = reporter.folder / "october.json"
    path.write_text("old")
    arguments = ["1", *OCTOBER, "--account", "2", "--format", "json", "--output", path]
    result = reporter(*arguments, settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    for account, line in enumerate(result.stderr.splitlines(), start=1):
        assert line.startswith(f"shipper: account {account}, 2026-10-01 to 2026-10-31: ")
        assert replies[account][1] in line
    assert path.read_text() == "old"
    assert [each.name for each in reporter.folder.glob("*october*")] == ["october.json"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refusal(401, "Access denied due to missing subscription key."), "check report.subscription_key"),
        (refusal(429), "the service asks for fewer requests"),
        (reset, "requested once"),
    ],
    ids=["key", "throttled", "reset"],
)
def test_service_without_access_is_not_asked_for_every_report(
    reporter: Reporter, origin: ReportService, reply: Reply, words: str
):
    origin.rule = lambda _: reply
    result = reporter("1001", *OCTOBER, "--split", "day", settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search("(?m)^shipper: account 1001, 2026-10-01(: | to |, )", result.stderr)
    assert words in result.stderr
    assert len(origin.asked) <= 8
    assert re.search(r"shipper: 2[789]|30 further reports were not requested", result.stderr)
    assert "the-key" not in result.stderr
    assert "the-token" not in result.stderr


def test_unreachable_service_is_an_error(shipper: Shipper):
    sandboxed = Reporter(shipper, Target("http://127.0.0.1:9", "the-key", "the-token"))
    result = sandboxed("1001", *QUARTER, "--split", "day", settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    assert "account 1001, 2026-10-01 to 2026-10-0" in result.stderr
    assert re.search(r"\n?shipper: (8[89]|9[01]) further reports were not requested", result.stderr)


def test_a_failed_report_is_named_and_the_others_are_shown(reporter: Reporter, origin: ReportService):
    bad = {(1001, date(2026, 11, 1)): refusal(500), (1002, date(2026, 10, 1)): refusal(404)}
    origin.rule = lambda asked: bad.get((asked.account, asked.start))
    path = reporter.folder / "quarter.ndjson"
    arguments = ["1001", *QUARTER, "--account", "1002", "--split", "month", "--format", "ndjson", "--output", path]
    result = reporter(*arguments, settings=NO_PATIENCE)
    assert result.returncode == 1
    assert [line.partition(": ")[2].split(":")[0] for line in result.stderr.splitlines()] == [
        "account 1001, 2026-11-01 to 2026-11-30",
        "account 1002, 2026-10-01 to 2026-10-31",
    ]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["account_id"], row["period_start"][:7]) for row in rows] == [
        *[(1001, "2026-10"), (1001, "2026-12")],
        *[(1002, "2026-11"), (1002, "2026-12")],
    ]


MISSING = "2 of 3 periods; November 2026 is missing"


@pytest.fixture
def holed(reporter: Reporter, origin: ReportService) -> Reporter:
    """A quarter whose middle month cannot be fetched."""
    origin.rule = lambda asked: refusal(404) if asked.start.month == 11 else None
    return reporter


def test_a_missing_month_is_named_above_the_table_and_beside_the_totals(holed: Reporter):
    result = holed("1001", *QUARTER, env={"COLUMNS": "300"})
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == f"Incomplete: account 1001, {MISSING}."
    assert f"Account 1001, * {MISSING}, 2026-10-01T00:00:00 to 2026-12-31T23:59:59" in lines
    assert "all 2 periods" not in result.stdout


def test_totals_that_lack_a_month_are_marked(holed: Reporter, origin: ReportService):
    brands = [brand(entry(1), entry(2), number=number) for number in (11, 12)]
    origin.rule = lambda asked: refusal(404) if asked.start.month == 11 else ok(document(asked, brands=brands))
    table = holed("1001", *QUARTER, env={"COLUMNS": "300"}).stdout
    of_months, _, together = table.partition(f"* {MISSING}")
    assert (of_months.count("total *"), of_months.count("all brands *")) == (0, 0)
    assert (together.count("total *"), together.count("all brands *")) == (2, 1)


def test_a_missing_month_is_named_on_the_page_and_beside_its_totals(holed: Reporter):
    page = holed("1001", *QUARTER, "--format", "html").stdout
    assert page.index(f"Incomplete: account 1001, {MISSING}.") < page.index("<header")
    assert page.count(MISSING) > 5, "a mark is missing in the head, the tiles, the funnel or the table"
    assert not re.search("[Aa]ll 2 periods", page)
    assert ", 2 periods" not in page


def test_a_missing_month_is_named_at_the_top_of_every_sheet(holed: Reporter):
    openpyxl = pytest.importorskip("openpyxl")
    path = holed.folder / "quarter.xlsx"
    assert holed("1001", *QUARTER, "--format", "xlsx", "-o", path).returncode == 1
    for sheet in openpyxl.load_workbook(path):
        first, titles, *rows = sheet.iter_rows(values_only=True)
        assert first[0] == f"Incomplete: account 1001, {MISSING}."
        assert titles[0] == "account_id"
        assert len(rows) == 2
        assert sheet.auto_filter.ref.startswith("A2:")


def test_incomplete_json_is_an_object_with_the_missing_parts(holed: Reporter, origin: ReportService):
    result = holed("1001", *QUARTER, "--account", "1002", "--format", "json")
    made = json.loads(result.stdout)
    assert (result.returncode, made["is_complete"], len(made["reports"])) == (1, False, 4)
    november = {"start": "2026-11-01", "end": "2026-11-30"}
    assert made["missing"] == [{"account_id": account, **november} for account in (1001, 1002)]
    origin.rule = lambda _: None
    assert isinstance(json.loads(holed("1001", *QUARTER, "--format", "json").stdout), list)


def test_an_account_without_any_report_is_named(holed: Reporter, origin: ReportService):
    origin.rule = lambda asked: refusal(404) if asked.account == 1002 else None
    for form in ("table", "html"):
        shown = holed("1001", *OCTOBER, "--account", "1002", "--format", form).stdout
        assert "Incomplete: account 1002, 0 of 1 period; October 2026 is missing." in " ".join(shown.split())


@pytest.mark.parametrize("form", ["csv", "ndjson", "json", "html", "table"])
def test_a_file_is_replaced_by_an_incomplete_one_only_on_request(holed: Reporter, form: str):
    path = holed.folder / "quarter"
    arguments = ["1001", *QUARTER, "--format", form, "--output", path]
    assert holed(*arguments).returncode == 1, "a new incomplete file was not written"
    path.write_text("all three months")
    result = holed(*arguments)
    assert (result.returncode, path.read_text()) == (1, "all three months")
    assert "is unchanged" in result.stderr
    assert "use --allow-partial" in result.stderr
    assert "account 1001, 2026-11-01 to 2026-11-30" in result.stderr
    assert holed(*arguments, "--allow-partial").returncode == 1
    assert path.read_text() != "all three months"


def test_rate_limit_is_observed(shipper: Shipper):
    with sandbox(rate_limit=CallLimit(5, 1)) as limited:
        sandboxed = Reporter(shipper, limited.target)
        arguments = ["1001", "2026-10-01", "2026-10-06", "--split", "day", "--format", "json", "--log-level", "error"]
        assert len(json.loads(sandboxed.good(*arguments, "--rate", "4"))) == 6
        assert limited.requests(status=429) == []
        assert len(json.loads(sandboxed.good(*arguments))) == 6
        assert limited.requests(status=429) != []


# What the checks find


BROKEN = brand(entry(active_customers=pair("-1"), **NOTHING_EARNED))


def test_findings_go_to_stderr_and_fail_only_a_strict_run(reporter: Reporter, origin: ReportService):
    origin.rule = lambda asked: ok(document(asked, brands=[BROKEN]))
    words = (
        "warning: account 1001, 2026-10-01 to 2026-10-31: brands[id=11].marketingSources[id=50121]: "
        "Active customers: the result -1 is below zero\n"
    )
    page = reporter("1001", *OCTOBER, "--format", "html")
    assert (page.returncode, page.stderr) == (0, words)
    assert "Active customers: the result -1 is below zero" in page.stdout
    strict = reporter("1001", *OCTOBER, "--format", "csv", "--strict")
    assert (strict.returncode, strict.stderr) == (3, words)
    assert strict.stdout.count("\n") == 2


def test_passed_checks_are_shown_on_request(sandboxed: Reporter):
    arguments = ["1001", *QUARTER, "--split", "month", "--checks", "--strict", "--format", "csv"]
    result = sandboxed(*arguments, "--output", "/dev/null")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.count("the opening balance is the outgoing balance of the period before: holds") == 2
    assert all(line.startswith("info: account 1001, 2026-1") for line in result.stderr.splitlines())


def test_a_source_that_is_listed_twice_is_one_row_and_a_warning(reporter: Reporter, origin: ReportService):
    plain = reporter.good("1001", *OCTOBER, "--format", "ndjson")
    twice = brand(entry(**NOTHING_EARNED), wire.MarketingSource(id=50121, reporting_currency="Euro"))
    origin.rule = lambda asked: ok(document(asked, brands=[twice]))
    once = reporter("1001", *OCTOBER, "--format", "ndjson", "--strict")
    assert re.sub(r'"fetched_at":"[^"]*"', "", once.stdout) == re.sub(r'"fetched_at":"[^"]*"', "", plain)
    assert once.returncode == 3
    assert once.stderr == (
        "warning: account 1001, 2026-10-01 to 2026-10-31: brands[id=11].marketingSources[id=50121]: it is listed more "
        "than once; the listings were merged\n"
    )
    assert reporter("1001", *OCTOBER, "--format", "json").stdout == of_month(10, brands=[twice]).decode()


def test_an_opening_balance_that_differs_from_the_previous_closing_one_is_only_a_note(
    reporter: Reporter, origin: ReportService
):
    def rule(asked: Asked) -> bytes:
        month = Decimal(asked.start.month)
        return ok(document(asked, opening_balance=month, outgoing_balance=month))

    origin.rule = rule
    arguments = ["1001", *QUARTER, "--split", "month", "--strict", "--format", "csv"]
    noted = reporter(*arguments)
    assert noted.returncode == 0
    assert noted.stderr.splitlines() == [
        f"note: account 1001, {days}: the opening balance is the outgoing balance of the period before: off by 1; "
        "a payout in between explains this"
        for days in ("2026-11-01 to 2026-11-30", "2026-12-01 to 2026-12-31")
    ]
    assert reporter.good(*arguments, "--tolerance", "1")


def test_repeated_finding_is_shown_a_few_times(reporter: Reporter, origin: ReportService):
    origin.rule = lambda asked: ok(document(asked, brands=[BROKEN]))
    arguments = ["1001", *OCTOBER, "--split", "day", "--format", "csv"]
    lines = reporter(*arguments).stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "21 more findings of counts_are_not_negative; --checks shows all"
    assert len([line for line in reporter(*arguments, "--checks").stderr.splitlines() if "below zero" in line]) == 31


def test_unknown_fields_are_listed_once(reporter: Reporter, origin: ReportService):
    def rule(asked: Asked) -> bytes:
        body = document(asked).replace(b'"brands"', b'"ready\\u001b[2J":1,"brands"')
        return ok(body.replace(b'"name":"Source', b'"x":1,"name":"Source'))

    origin.rule = rule
    result = reporter("1001", *OCTOBER, "--split", "day", "--format", "csv")
    assert result.returncode == 0
    (note,) = result.stderr.splitlines()
    assert note.startswith("note: undocumented fields")
    assert note.count(r"ready\x1b[2J") == 1
    assert "brands[].marketingSources[].x" in note


# Versions


def test_new_unchanged_and_restated_reports_are_listed_and_marked(sandboxed: Reporter, seeded: Service):
    quarter = ["1001", *QUARTER, "--split", "month"]
    fetch = ["fetch", *quarter]
    assert re.findall(r": (.*)", sandboxed.good(*fetch)) == ["new"] * 3
    assert "Restated" not in sandboxed.good(*quarter)
    restate_a_day_of_november(seeded)
    table = sandboxed.good(*quarter)
    assert table.count("Restated") == 2
    assert table.index("Restated") > table.index("2026-11-01")
    page = sandboxed.good(*quarter, "--format", "html")
    assert set(re.findall(r'(\w+) 2026<span class="badge">restated', page)) == {"November", "December"}

    october, november, december = sandboxed.good(*fetch).splitlines()
    assert re.fullmatch(r"account 1001, 2026-10-01 to 2026-10-31: unchanged since 20\S+Z", october)
    assert re.fullmatch(
        r"account 1001, 2026-11-01 to 2026-11-30: restated, \d+ fields differ; "
        r"see: shipper report diff 1001 2026-11-01 2026-11-30",
        november,
    )
    assert re.fullmatch(r".*: restated, 3 fields differ; .*", december), "the balances or the checksum are missing"

    head, *lines = sandboxed.good("history", "1001").splitlines()
    names = ["version", "period", "first fetched", "last fetched", "times", "state", "checksum"]
    assert re.split("  +", head) == names
    rows = [line.split() for line in lines]
    assert [(row[1], row[-3], row[-2]) for row in rows] == [
        ("2026-10-01", "2", "first"),
        *[("2026-11-01", "1", "first"), ("2026-11-01", "1", "restated")],
        *[("2026-12-01", "1", "first"), ("2026-12-01", "1", "restated")],
    ]
    assert all(re.fullmatch(r"[0-9a-f]{12}", row[-1]) for row in rows)
    assert len(sandboxed.good("history", "1001", "2026-11-01", "2026-11-30").splitlines()) == 3

    _check_difference(sandboxed)


def _check_difference(sandboxed: Reporter) -> None:
    """Check that the fields shown are those that differ between the documents."""
    title, *changes = sandboxed.good("diff", "1001", "2026-11-01", "2026-11-30").splitlines()
    assert re.fullmatch(
        r"account 1001, 2026-11-01 to 2026-11-30: version \d+ of \S+Z → version \d+ of \S+Z, (\d+) fields differ", title
    )
    with closing(History(sandboxed.state)) as history:
        versions = history.versions(Part(1001, DateRange(date(2026, 11, 1), date(2026, 11, 30))))
        old, new = (json.loads(history.body(version), parse_float=Decimal) for version in versions)
    place = r"  brands\[id=(\d+)\].marketingSources\[id=(\d+)\].netRevenue.result: (\S+) → (\S+) \((\S+)\)"
    shown = {match.groups() for match in map(re.compile(place).fullmatch, changes) if match}
    expected = set()
    for brand_old, brand_new in zip(old["brands"], new["brands"], strict=True):
        for before, after in zip(brand_old["marketingSources"], brand_new["marketingSources"], strict=True):
            was, now = before["netRevenue"]["result"], after["netRevenue"]["result"]
            if was != now:
                expected.add((str(brand_old["id"]), str(before["id"]), f"{was}", f"{now}", f"{now - was:+f}"))
    assert shown == expected
    assert expected


def test_json_of_the_history_commands_is_one_object(reporter: Reporter, origin: ReportService):
    keep(reporter, of_month(10, opening_balance=Decimal("2.50")), of_month(10, opening_balance=Decimal(4)))
    origin.rule = lambda asked: refusal(500) if asked.start.month == 12 else None
    result = reporter("fetch", "1001", *QUARTER, "--concurrency", "1", "--format", "json", settings=NO_PATIENCE)
    assert result.returncode == 1
    fetched = json.loads(result.stdout)
    assert fetched.keys() == {"is_complete", "reports", "missing", "findings"}
    october, november = fetched["reports"]
    assert (october["account_id"], october["start"], october["end"]) == (1001, *OCTOBER)
    assert (october["status"], october["version"], october["changed_fields"]) == ("restated", 3, 1)
    assert (november["status"], november["start"], november["changed_fields"]) == ("new", "2026-11-01", 0)
    (missing,) = fetched["missing"]
    assert not fetched["is_complete"]
    assert (missing["account_id"], missing["start"], missing["end"]) == (1001, "2026-12-01", "2026-12-31")
    assert "the service answered 500" in missing["reason"]
    assert [each["text"] for each in fetched["findings"]] == [
        line.partition(": ")[2] for line in result.stderr.splitlines() if line.startswith("warning: ")
    ]
    assert len(fetched["findings"]) == 1

    listed = json.loads(reporter.good("history", "1001", "--format", "json"))
    assert listed["account_id"] == 1001
    assert [(each["version"], each["start"], each["state"], each["fetches"]) for each in listed["versions"]] == [
        *((1, "2026-10-01", "first", 1), (2, "2026-10-01", "restated", 1), (3, "2026-10-01", "restated", 1)),
        (4, "2026-11-01", "first", 1),
    ]
    assert listed["versions"][0]["first_fetched_at"] == "2023-11-14T22:13:20Z"

    compared = reporter.good("diff", "1001", *OCTOBER, "--versions", "1", "2", "--format", "json")
    (found,) = json.loads(compared)["differences"]
    assert (found["start"], found["end"], found["old"]["version"], found["new"]["version"]) == (*OCTOBER, 1, 2)
    assert found["is_restated"]
    values = {"old": 2.5, "new": 4, "difference": 1.5, "is_figure": True}
    assert found["changes"] == [{"field": "openingBalance", "brand_id": None, "source_id": None, **values}]


def test_days_with_the_same_error_are_one_line(reporter: Reporter, origin: ReportService):
    origin.rule = lambda asked: None if asked.start.day in {5, 6} else refusal(404)
    result = reporter("1001", *OCTOBER, "--split", "day", "--format", "ndjson")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    days = "2026-10-01 to 2026-10-04, 2026-10-07 to 2026-10-31"
    assert line.startswith(f"shipper: account 1001, {days}: the report does not exist")
    assert line.endswith("; if days without activity have none, request whole months: --split month")
    origin.rule = lambda _: refusal(404)
    assert "--split" not in reporter("1001", *OCTOBER, "--split", "none").stderr


def test_damaged_history_does_not_stop_the_report(sandboxed: Reporter):
    sandboxed.state.mkdir(mode=0o700)
    (sandboxed.state / "reports.db").write_bytes(b"damaged" * 1000)
    result = sandboxed("1001", *OCTOBER)
    assert result.returncode == 0
    assert result.stderr.startswith("note: restated figures are not marked")
    assert sandboxed("fetch", "1001", *OCTOBER).returncode == 1
    assert (sandboxed.state / "reports.db").read_bytes() == b"damaged" * 1000


def test_change_of_only_undocumented_fields_is_marked_as_such(reporter: Reporter, origin: ReportService):
    keep(reporter, of_month(10))
    origin.rule = lambda asked: ok(document(asked).replace(b'"brands"', b'"ready":true,"brands"'))
    result = reporter("fetch", "1001", *OCTOBER)
    assert "document changed, only undocumented fields differ; see: " in result.stdout
    (line,) = reporter.good("diff", "1001", *OCTOBER).splitlines()
    assert line.endswith(", only undocumented fields differ")
    assert reporter.good("history", "1001").splitlines()[-1].split("  ")[-2:] == ["document changed", "ab" * 6]


def _with_request_id(body: bytes, number: int) -> bytes:
    return body.replace(b'"brands"', b'"requestId":"r-%d","brands"' % number)


def test_a_new_request_id_or_number_format_is_no_new_version(reporter: Reporter, origin: ReportService):
    made = of_month(10, opening_balance=Decimal("100.0000"))
    keep(reporter, _with_request_id(made, 1))
    origin.rule = lambda _: ok(_with_request_id(made.replace(b"100.0000", b"1e2"), len(origin.asked) + 1))
    assert "unchanged since " in reporter("fetch", "1001", *OCTOBER).stdout
    assert reporter.good("watch", "1001", *OCTOBER, "--once").count(": unchanged since ") == 1
    assert len(reporter.good("history", "1001").splitlines()) == 2
    assert "Restated" not in reporter("1001", *OCTOBER).stdout


def test_a_changed_name_is_no_restatement(reporter: Reporter, origin: ReportService):
    """It is reported once, runs no hook, does not affect the exit code, and marks nothing."""
    keep(reporter, of_month(10))
    renamed = brand(entry(**NOTHING_EARNED), name="Renamed")
    origin.rule = lambda asked: ok(document(asked, brands=[renamed]))
    watch = Watch(reporter)
    assert reporter.good(*watch.look) == (
        "account 1001, 2026-10-01 to 2026-10-31: document changed, 1 field differs; "
        "see: shipper report diff 1001 2026-10-01 2026-10-31\n"
    )
    assert reporter.good(*watch.look).count(": unchanged since ") == 1
    assert watch.hooks_run == 0
    assert "Restated" not in reporter.good("1001", *OCTOBER)
    _, change = reporter.good("diff", "1001", *OCTOBER).splitlines()
    assert change == "  brands[id=11].name: Harbour Lights → Renamed"


def test_any_two_versions_can_be_compared(reporter: Reporter):
    balances = ((10, 1), (10, 2), (10, 4), (11, 1))
    keep(reporter, *(of_month(month, opening_balance=Decimal(amount)) for month, amount in balances))
    for numbers, change in (((), "2 → 4 (+2)"), (("1", "3"), "1 → 4 (+3)"), (("3", "1"), "4 → 1 (-3)")):
        chosen = ["--versions", *numbers] if numbers else []
        assert reporter.good("diff", "1001", *OCTOBER, *chosen).splitlines()[1:] == [f"  openingBalance: {change}"]
    for numbers, words in ((("1", "9"), "there is no version 9"), (("1", "4"), "version 4 of 2026-11-01")):
        refused = reporter("diff", "1001", *QUARTER, "--versions", *numbers)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in re.sub(r"[\s│]+", " ", refused.stderr)


def test_added_brand_and_removed_field_are_named(reporter: Reporter):
    brands = [brand(entry(cpa_revenue=None, **NOTHING_EARNED)), brand(entry(), number=12, name="Paper\x1bMoon")]
    keep(reporter, of_month(10), of_month(10, brands=brands))
    changes = reporter.good("diff", "1001", *OCTOBER).splitlines()[1:]
    assert changes == [
        "  brands[id=11].marketingSources[id=50121].cpaRevenue.result: 140.0000 → missing",
        "  brands[id=11].marketingSources[id=50121].cpaRevenue.adjustment: 40.0000 → missing",
        r"  brands[id=12]: missing → Paper\x1bMoon",
    ]
    (difference,) = json.loads(reporter.good("diff", "1001", *OCTOBER, "--format", "json"))["differences"]
    change = difference["changes"][-1]
    assert (change["field"], change["brand_id"], change["old"]) == ("brands[id=12]", 12, None)
    assert change["new"] == {"id": 12, "name": "Paper\x1bMoon"}


def test_nothing_to_list_or_compare_is_a_message(reporter: Reporter):
    as_json = ("--format", "json")
    empty = reporter("history", "1001")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert empty.stderr == "no report of account 1001 is stored; to store some: shipper report fetch\n"
    assert json.loads(reporter("history", "1001", *as_json).stdout) == {"account_id": 1001, "versions": []}
    none = reporter("diff", "1001", *OCTOBER)
    assert (none.returncode, none.stdout) == (1, "")
    assert "no report of account 1001 within 2026-10-01 and 2026-10-31 is stored" in none.stderr
    assert not reporter.state.exists(), "looking creates nothing"
    keep(reporter, of_month(10))
    once = reporter("diff", "1001", *OCTOBER)
    assert (once.returncode, once.stdout, once.stderr) == (0, "", "nothing was restated\n")
    assert json.loads(reporter("diff", "1001", *OCTOBER, *as_json).stdout) == {"account_id": 1001, "differences": []}


def test_checksum_that_hides_a_restatement_is_a_warning(reporter: Reporter, origin: ReportService):
    keep(reporter, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    result = reporter("fetch", "1001", *OCTOBER, "--strict")
    assert result.returncode == 3
    assert "1 field differs from an earlier version with the same checksum" in result.stderr


# Watching


def test_exit_code_of_watch_once_is_3_if_anything_was_restated(sandboxed: Reporter, seeded: Service):
    log = sandboxed.folder / "hook.log"
    command = hook(sandboxed.folder, f'echo "$1 $# $REPORT_ACCOUNT $REPORT_START $REPORT_END" >> {log}')
    look = ["watch", "1001", *QUARTER, "--split", "month", "--once", "--on-change", command]
    assert sandboxed.good(*look).count(": new\n") == 3
    assert not log.exists()
    restate_a_day_of_november(seeded)
    changed = sandboxed(*look)
    assert (changed.returncode, changed.stderr) == (3, "")
    assert changed.stdout.count(": restated, ") == 2
    assert sandboxed.good(*look).count(": unchanged since ") == 3
    assert log.read_text().splitlines() == [
        "$HOME; 2 1001 2026-11-01 2026-11-30",
        "$HOME; 2 1001 2026-12-01 2026-12-31",
    ]


def test_failed_check_does_not_count(reporter: Reporter, origin: ReportService):
    keep(reporter, of_month(10))
    origin.rule = lambda _: refusal(500)
    result = reporter("watch", "1001", *OCTOBER, "--once", settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    assert "the service answered 500" in result.stderr


class Watch:
    """
    The arguments of a single look at October with a hook, which leaves a mark and then runs a program.

    Attributes:
        look: The arguments.
    """

    def __init__(self, reporter: Reporter, body: str = "") -> None:
        self._log = reporter.folder / "hook.log"
        command = hook(reporter.folder, f"echo $REPORT_START >> {self._log}\n{body}")
        self.look = ["watch", "1001", *OCTOBER, "--once", "--on-change", command]

    @property
    def hooks_run(self) -> int:
        marks = self._log.read_text().splitlines() if self._log.exists() else []
        assert marks == ["2026-10-01"] * len(marks)
        return len(marks)


def restated(reporter: Reporter, origin: ReportService, body: str = "") -> Watch:
    """Restate October after the hook was configured."""
    watch = Watch(reporter, body)
    assert reporter.good(*watch.look).count(": new\n") == 1
    assert watch.hooks_run == 0
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    return watch


def test_a_failed_hook_runs_again_at_each_check_until_it_succeeds(reporter: Reporter, origin: ReportService):
    may_succeed = reporter.folder / "may_succeed"
    watch = restated(reporter, origin, f"test -e {may_succeed}")
    for words in (": restated, 1 field differs", ": unchanged since "):
        failed = reporter(*watch.look)
        assert (failed.returncode, words in failed.stdout) == (3, True)
        assert "a hook.sh ended with 1 for account 1001, 2026-10-01 to 2026-10-31; it runs again" in failed.stderr
    may_succeed.touch()
    assert ": unchanged since " in reporter.good(*watch.look)
    assert watch.hooks_run == 3
    assert reporter.good(*watch.look)
    assert watch.hooks_run == 3


def test_a_failed_hook_runs_again_while_the_service_is_unavailable(reporter: Reporter, origin: ReportService):
    watch = restated(reporter, origin, f"test $(wc -l < {reporter.folder / 'hook.log'}) = 2")
    assert reporter(*watch.look).returncode == 3
    origin.rule = lambda _: refusal(500)
    away = reporter(*watch.look, settings=NO_PATIENCE)
    assert (away.returncode, "a hook.sh" in away.stderr) == (1, False)
    assert reporter(*watch.look, settings=NO_PATIENCE).returncode == 1
    assert watch.hooks_run == 2


def test_a_restatement_first_stored_by_another_command_reaches_the_hook(reporter: Reporter, origin: ReportService):
    watch = restated(reporter, origin)
    assert ": restated, " in reporter("fetch", "1001", *OCTOBER).stdout
    assert ": unchanged since " in reporter.good(*watch.look)
    assert reporter.good(*watch.look)
    assert watch.hooks_run == 1


def test_earlier_restatements_do_not_run_a_new_hook(reporter: Reporter):
    keep(reporter, of_month(10, opening_balance=Decimal(7)), of_month(10))
    watch = Watch(reporter)
    assert reporter.good(*watch.look)
    assert watch.hooks_run == 0
