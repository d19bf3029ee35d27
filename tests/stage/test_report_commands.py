"""The report commands in this process: what is shown, what is written, what is told, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Iterator
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
from shipper.report.rows import Fetched, source_table
from shipper.sandbox.options import CallLimit, Figures
from tests.e2e.driver import Service, Shipper, Target, sandbox
from tests.report_documents import NOTHING_EARNED, brand, entry, pair
from tests.report_service import Asked, Reply, ReportService, answer, cut_off, document, ok, refusal
from tests.reporter import NO_PATIENCE, OCTOBER, QUARTER, Reporter, hook, keep, of_month
from tests.stage.servers import reset


@pytest.fixture(scope="module")
def seeded() -> Iterator[Service]:
    with sandbox(figures=Figures.SEEDED) as service:
        yield service


@pytest.fixture
def shipper(tmp_path: Path) -> Shipper:
    """It ships to nowhere."""
    return Shipper(tmp_path / "shipper", Target("http://127.0.0.1:9", "unused", "unused"))


@pytest.fixture
def reporter(shipper: Shipper, seeded: Service) -> Reporter:
    """It asks a sandbox with invented figures; nothing is restated, nothing goes wrong."""
    seeded.reset()
    seeded.set_faults()
    return Reporter(shipper, seeded.target)


@pytest.fixture
def origin() -> Iterator[ReportService]:
    """A service that answers as it is told."""
    with ReportService() as origin:
        yield origin


@pytest.fixture
def told(shipper: Shipper, origin: ReportService) -> Reporter:
    """It asks the service that answers as it is told."""
    return Reporter(shipper, Target(origin.url, "the-key", "the-token"))


def restate(seeded: Service, start: str, end: str) -> None:
    url = f"{seeded.target.base_url}/_sandbox/restatements"
    httpx.post(url, json={"start": start, "end": end}, trust_env=False, verify=False).raise_for_status()


def served(service: Service, start: str, end: str) -> str:
    """Ask the service itself for a document of account 1001."""
    headers = {
        "Authorization": f"Bearer {service.target.token}",
        "Ocp-Apim-Subscription-Key": service.target.subscription_key,
        "Content-Type": "application/json",
        "Cache-Control": "no-cache",
    }
    path = wire.REPORT_PATH.format(account_id=1001, start=start, end=end)
    answer = httpx.get(f"{service.target.base_url}{path}", headers=headers, trust_env=False, verify=False, timeout=10)
    return answer.raise_for_status().text


def sources(text: str) -> list[tuple[object, ...]]:
    """List the rows of a document: its marketing sources with their figures."""
    made = read_report(text.encode(), account_id=json.loads(text)["source"]["affilaiteAccountId"]).report
    return source_table([Fetched(made)]).rows


def figures(row: dict[str, Any]) -> list[Decimal | None]:
    """Take the figures of a flat row, in whatever form they are."""
    names = [
        f"{metric.name}{part}"
        for metric in METRICS
        for part in (("_result", "_adjustment", "_total") if metric.has_adjustment else ("",))
    ]
    return [None if row[name] in {None, ""} else Decimal(str(row[name])) for name in names]


# Forms


@pytest.fixture(scope="module")
def exact(seeded: Service) -> list[list[Decimal | None]]:
    """The figures of October as the document has them, a list for each marketing source."""
    seeded.reset()
    rows = sources(served(seeded, *OCTOBER))
    assert len(rows) == 15
    figure_count = len(rows[0]) - 15
    return [[value for value in row[-figure_count:] if not isinstance(value, str | int)] for row in rows]


@pytest.mark.parametrize(
    "arguments",
    [("--account", "1001", "--format", "csv", *OCTOBER), ("--format", "csv", "--output", "-", "1001", *OCTOBER)],
    ids=["account", "in_front"],
)
def test_csv_has_the_figures_of_the_document_wherever_the_options_stand(
    reporter: Reporter, exact: list[list[Decimal]], arguments: tuple[str, ...]
):
    rows = list(csv.DictReader(io.StringIO(reporter.good(*arguments))))
    assert [figures(row) for row in rows] == exact


def test_csv_for_a_spreadsheet_has_mark_and_delimiter_in_a_private_file_that_is_replaced_as_a_whole(
    reporter: Reporter, exact: list[list[Decimal]]
):
    path = reporter.folder / "october.csv"
    path.write_text("old")
    reporter.good("1001", *OCTOBER, "--format", "csv", "--delimiter", ";", "--bom", "--output", path)
    assert path.read_bytes().startswith(b"\xef\xbb\xbfaccount_id;account_name;")
    rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig")), delimiter=";"))
    assert [figures(row) for row in rows] == exact
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(each.name for each in path.parent.glob("*october*")) == ["october.csv"]


def test_ndjson_has_the_figures_of_the_document(reporter: Reporter, exact: list[list[Decimal]]):
    lines = reporter.good("1001", *OCTOBER, "--format", "ndjson").splitlines()
    assert [figures(json.loads(line, parse_float=Decimal)) for line in lines] == exact


def test_parquet_has_the_figures_of_the_document(reporter: Reporter, exact: list[list[Decimal]]):
    polars = pytest.importorskip("polars")
    path = reporter.folder / "october.parquet"
    reporter.good("1001", *OCTOBER, "--format", "parquet", "-o", path)
    assert [figures(row) for row in polars.read_parquet(path).to_dicts()] == exact


def test_workbook_has_the_figures_of_the_document(reporter: Reporter, exact: list[list[Decimal]]):
    openpyxl = pytest.importorskip("openpyxl")
    path = reporter.folder / "october.xlsx"
    reporter.good("1001", *OCTOBER, "--format", "xlsx", "-o", path)
    book = openpyxl.load_workbook(path)
    assert book.sheetnames == ["sources", "accounts"]
    head, *rows = book["sources"].iter_rows(values_only=True)
    assert [figures(dict(zip(head, row, strict=True))) for row in rows] == exact


def test_page_has_the_figures_of_the_document(reporter: Reporter, exact: list[list[Decimal]]):
    page = reporter.good("1001", *OCTOBER, "--format", "html")
    assert page.startswith("<!doctype html>")
    shown = {Decimal(value) for value in re.findall(r'<data value="([^"]+)"', page)}
    assert {row[0] for row in exact} <= shown, "the clicks of each marketing source"
    assert "Euro (EUR)" in page


def test_table_has_the_figures_of_the_document(reporter: Reporter, exact: list[list[Decimal]]):
    table = reporter.good("1001", *OCTOBER, env={"COLUMNS": "400"})
    assert "Euro (EUR)" in table
    lines = [line for line in table.splitlines() if re.search(r" 50[0-9]{3} ", line)]
    assert [line.split("  50")[1].split()[1] for line in lines] == [f"{row[0]:,f}" for row in exact]


def test_document_is_exact(told: Reporter, origin: ReportService):
    body = b" " + of_month(10).replace(b",", b" ,\n")
    origin.rule = lambda _: ok(body)
    path = told.folder / "october.json"
    assert told.good("1001", *OCTOBER, "--format", "json").encode() == body
    assert told.good("1001", *OCTOBER, "--format", "json", "--output", path) == ""
    assert path.read_bytes() == body


def test_several_documents_are_an_array_of_exact_ones(told: Reporter, origin: ReportService):
    text = told.good("7", *QUARTER, "--account", "5", "--split", "month", "--format", "json")
    documents = [document(asked).decode() for asked in sorted(origin.asked, key=lambda asked: (-asked[0], asked[1]))]
    assert text == f"[{(',' + chr(10)).join(documents)}]\n"
    found = [(each["source"]["affilaiteAccountId"], each["reportingPeriod"]["start"][:7]) for each in json.loads(text)]
    assert found == [(account, f"2026-{month}") for account in (7, 5) for month in (10, 11, 12)]


def test_a_byte_order_mark_before_a_document_is_no_part_of_it(told: Reporter, origin: ReportService):
    plain = told.good("1001", *QUARTER, "--format", "json")
    assert told.good("fetch", "1001", *QUARTER).count(": new\n") == 3
    origin.rule = lambda asked: ok(BOM_UTF8 + document(asked))
    assert told.good("1001", *QUARTER, "--format", "json") == plain
    assert told.good("1001", *OCTOBER, "--format", "json").encode() == of_month(10)
    assert told.good("fetch", "1001", *QUARTER).count(": unchanged since ") == 3


def test_days_are_as_many_as_the_month_has_and_their_flows_add_up_to_it(reporter: Reporter, seeded: Service):
    month = json.loads(served(seeded, "2026-02-01", "2026-02-28"), parse_float=Decimal)
    lines = reporter.good("1001", "2026-02-01", "2026-02-28", "--split", "day", "--format", "ndjson").splitlines()
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


def test_periods_together_are_in_one_table(reporter: Reporter):
    table = reporter.good("1001", *QUARTER, "--split", "month")
    assert table.count("Opening balance") == 3
    assert "all 3 periods, 2026-10-01T00:00:00 to 2026-12-31T23:59:59" in table
    assert "Restated" not in table
    assert not (reporter.state / "reports.db").exists(), "what is only shown is not kept"


def test_service_that_takes_no_range_over_a_month_is_asked_month_by_month(shipper: Shipper):
    from shipper.sandbox.options import Profile

    with sandbox(profile=Profile.STRICT) as strict:
        reporter = Reporter(shipper, strict.target)
        refused = reporter("1001", *QUARTER, "--split", "none")
        assert refused.returncode == 1
        assert "then ask for each month by itself: --split month (HTTP 400)" in refused.stderr
        assert len(json.loads(reporter.good("1001", *QUARTER, "--format", "json"))) == 3


def test_report_without_brands_is_one(told: Reporter, origin: ReportService):
    origin.rule = lambda asked: ok(document(asked, brands=[]))
    assert "No brand has figures in this period." in told.good("1001", *OCTOBER)
    assert told.good("1001", *OCTOBER, "--format", "csv").count("\n") == 1
    assert told.good("1001", *OCTOBER, "--format", "ndjson") == ""
    assert "No brand has figures" in told.good("1001", *OCTOBER, "--format", "html")


# The plain form beside the verbs


def test_service_that_is_not_configured_is_a_wrong_setting(shipper: Shipper):
    result = shipper.run("report", "1001", *OCTOBER)
    assert (result.returncode, result.stdout) == (2, "")
    assert "report" in result.stderr


def test_accounts_of_a_file_are_added(told: Reporter, origin: ReportService):
    file = told.folder / "accounts.txt"
    file.write_text("\N{BOM}# partners\n1003\n\n 1002 # late payer\n1003\n")
    rows = told.good(*OCTOBER, "--accounts-file", file, "--account", "1001", "--format", "ndjson").splitlines()
    assert [json.loads(row)["account_id"] for row in rows] == [1001, 1003, 1002]
    assert len(origin.asked) == 3
    file.write_text("1003\n10o2\n")
    result = told(*OCTOBER, "--accounts-file", file)
    assert (result.returncode, len(origin.asked)) == (2, 3)
    assert f"{file}:2: '10o2' is not an account number" in result.stderr


# Where it is written to


def test_link_is_followed(reporter: Reporter):
    (reporter.folder / "reports").mkdir()
    target, link = reporter.folder / "reports" / "october.csv", reporter.folder / "latest.csv"
    for exists in (False, True):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert target.exists() is exists
        reporter.good("1001", *OCTOBER, "--format", "csv", "--output", link)
        assert link.is_symlink()
        assert target.read_text().startswith("account_id,")


def test_file_that_cannot_be_written_is_told(reporter: Reporter):
    result = reporter("1001", *OCTOBER, "--output", "/proc/october")
    assert result.returncode == 1
    assert "cannot write '/proc/october'" in result.stderr
    full = reporter("1001", *OCTOBER, "--output", "/dev/full")
    assert (full.returncode, full.stderr) == (1, "shipper: cannot write '/dev/full': No space left on device\n")


# What goes wrong


NO_REPORTS: list[tuple[Reply, str]] = [
    (refusal(403), "the service denied access"),
    (refusal(404), "the service does not know the account"),
    (refusal(500), "the service answered 500"),
    (answer(302, headers={"Location": "/login"}), "which shipper does not follow"),
    (ok(b"<html>Please log in</html>", "text/html"), "a web page answered"),
    (ok(b'{"id":'), "the answer is not JSON"),
    (ok(b'{"brands":[]}'), "the answer is not a daily report"),
    (ok(of_month(10)), "the report is of account 1001"),
    (lambda connection: connection.sendall(ok(b"[" + b" " * (64 << 20) + b"]")), "the report is larger than 64 MiB"),
]


def test_reports_that_cannot_be_had_are_named_and_no_file_is_touched(told: Reporter, origin: ReportService):
    accounts = [str(number) for number in range(1, len(NO_REPORTS) + 1)]
    origin.rule = lambda asked: NO_REPORTS[asked.account - 1][0]
    path = told.folder / "october.json"
    path.write_text("old")
    options = [word for account in accounts for word in ("--account", account)]
    result = told(*OCTOBER, *options, "--format", "json", "--output", path, settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    lines = [line for line in result.stderr.splitlines() if line.startswith("shipper: ")]
    for account, (_, words), line in zip(accounts, NO_REPORTS, lines, strict=True):
        assert line.startswith(f"shipper: account {account}, 2026-10-01 to 2026-10-31: ")
        assert words in line
    assert path.read_text() == "old"
    assert [each.name for each in told.folder.glob("*october*")] == ["october.json"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refusal(401, "Access denied due to missing subscription key."), "check report.subscription_key"),
        (refusal(401), "the service refused the access token"),
        (refusal(429), "the service asks for fewer requests"),
        (refusal(503, Retry_After="600"), "it asks to wait 600 s"),
        (cut_off, "asked for once"),
        (reset, "asked for once"),
    ],
    ids=["key", "token", "throttled", "long_wait", "cut_off", "reset"],
)
def test_service_that_lets_nobody_in_is_not_asked_for_everything(
    told: Reporter, origin: ReportService, reply: Reply, words: str
):
    origin.rule = lambda _: reply
    result = told("1001", *OCTOBER, "--split", "day", settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.search("(?m)^shipper: account 1001, 2026-10-01(: | to |, )", result.stderr)
    assert words in result.stderr
    assert len(origin.asked) <= 8
    assert re.search(r"shipper: 2[789]|30 further reports were not requested", result.stderr)
    assert "the-key" not in result.stderr
    assert "the-token" not in result.stderr


def test_service_that_is_not_there_is_told(shipper: Shipper):
    reporter = Reporter(shipper, Target("http://127.0.0.1:9", "the-key", "the-token"))
    result = reporter("1001", *QUARTER, "--split", "day", settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    assert "account 1001, 2026-10-01 to 2026-10-0" in result.stderr
    assert re.search(r"\n?shipper: (8[89]|9[01]) further reports were not requested", result.stderr)


def test_one_that_fails_is_named_and_the_others_are_shown(told: Reporter, origin: ReportService):
    bad = {(1001, date(2026, 11, 1)): refusal(500), (1002, date(2026, 10, 1)): refusal(404)}
    origin.rule = lambda asked: bad.get((asked.account, asked.start))
    path = told.folder / "quarter.ndjson"
    arguments = ["1001", *QUARTER, "--account", "1002", "--split", "month", "--format", "ndjson", "--output", path]
    result = told(*arguments, settings=NO_PATIENCE)
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
def holed(told: Reporter, origin: ReportService) -> Reporter:
    """Of a quarter, the month in the middle cannot be fetched."""
    origin.rule = lambda asked: refusal(404) if asked.start.month == 11 else None
    return told


def test_a_month_that_is_missing_stands_at_the_top_of_the_table_and_beside_the_totals(holed: Reporter):
    result = holed("1001", *QUARTER, env={"COLUMNS": "300"})
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0] == f"Incomplete: account 1001, {MISSING}."
    assert f"Account 1001, * {MISSING}, 2026-10-01T00:00:00 to 2026-12-31T23:59:59" in lines
    assert "all 2 periods" not in result.stdout


def test_totals_that_lack_a_month_carry_a_mark(holed: Reporter, origin: ReportService):
    brands = [brand(entry(1), entry(2), number=number) for number in (11, 12)]
    origin.rule = lambda asked: refusal(404) if asked.start.month == 11 else ok(document(asked, brands=brands))
    table = holed("1001", *QUARTER, env={"COLUMNS": "300"}).stdout
    of_months, _, together = table.partition(f"* {MISSING}")
    assert (of_months.count("total *"), of_months.count("all brands *")) == (0, 0)
    assert (together.count("total *"), together.count("all brands *")) == (2, 1)


def test_a_month_that_is_missing_stands_on_the_page_and_beside_its_totals(holed: Reporter):
    page = holed("1001", *QUARTER, "--format", "html").stdout
    assert page.index(f"Incomplete: account 1001, {MISSING}.") < page.index("<header")
    assert page.count(MISSING) > 5, "the head, the tiles of what is added, the funnel and the table"
    assert not re.search("[Aa]ll 2 periods", page)
    assert ", 2 periods" not in page


def test_a_month_that_is_missing_stands_at_the_top_of_every_sheet(holed: Reporter):
    openpyxl = pytest.importorskip("openpyxl")
    path = holed.folder / "quarter.xlsx"
    assert holed("1001", *QUARTER, "--format", "xlsx", "-o", path).returncode == 1
    for sheet in openpyxl.load_workbook(path):
        first, titles, *rows = sheet.iter_rows(values_only=True)
        assert first[0] == f"Incomplete: account 1001, {MISSING}."
        assert titles[0] == "account_id"
        assert len(rows) == 2
        assert sheet.auto_filter.ref.startswith("A2:")


def test_json_says_what_is_missing_and_is_no_array_then(holed: Reporter, origin: ReportService):
    result = holed("1001", *QUARTER, "--account", "1002", "--format", "json")
    made = json.loads(result.stdout)
    assert (result.returncode, made["is_complete"], len(made["reports"])) == (1, False, 4)
    november = {"start": "2026-11-01", "end": "2026-11-30"}
    assert made["missing"] == [{"account_id": account, **november} for account in (1001, 1002)]
    origin.rule = lambda _: None
    assert isinstance(json.loads(holed("1001", *QUARTER, "--format", "json").stdout), list)


def test_an_account_of_which_nothing_could_be_fetched_is_named(holed: Reporter, origin: ReportService):
    origin.rule = lambda asked: refusal(404) if asked.account == 1002 else None
    for form in ("table", "html"):
        shown = holed("1001", *OCTOBER, "--account", "1002", "--format", form).stdout
        assert "Incomplete: account 1002, 0 of 1 period; October 2026 is missing." in " ".join(shown.split())


@pytest.mark.parametrize("form", ["csv", "ndjson", "json", "html", "table"])
def test_a_file_is_not_replaced_by_one_that_lacks_a_month_unless_that_is_said(
    holed: Reporter, origin: ReportService, form: str
):
    path = holed.folder / "quarter"
    arguments = ["1001", *QUARTER, "--format", form, "--output", path]
    assert holed(*arguments).returncode == 1, "nothing is lost: there was no file"
    path.write_text("all three months")
    result = holed(*arguments)
    assert (result.returncode, path.read_text()) == (1, "all three months")
    assert "is left as it was" in result.stderr
    assert "give --allow-partial" in result.stderr
    assert "account 1001, 2026-11-01 to 2026-11-30" in result.stderr
    assert holed(*arguments, "--allow-partial").returncode == 1
    assert path.read_text() != "all three months"


def test_service_that_asks_for_fewer_requests_only_slows(reporter: Reporter, seeded: Service):
    seeded.set_faults(
        {"effect": "status", "operation": "report", "status": 429, "retry_after": "1", "requests": "3-4"},
        {"effect": "status", "operation": "report", "status": 503, "requests": "7"},
    )
    arguments = ["1001", "2026-10-01", "2026-10-12", "--split", "day", "--format", "json"]
    assert len(json.loads(reporter.good(*arguments, "--log-level", "error"))) == 12  # it may say that it pauses
    assert seeded.faults_applied() == [2, 1]
    assert len(seeded.requests(operation="report")) == 15


def test_limit_of_requests_is_kept(shipper: Shipper):
    with sandbox(rate_limit=CallLimit(5, 1)) as limited:
        reporter = Reporter(shipper, limited.target)
        arguments = ["1001", "2026-10-01", "2026-10-09", "--split", "day", "--format", "json", "--log-level", "error"]
        assert len(json.loads(reporter.good(*arguments, "--rate", "4"))) == 9
        assert limited.requests(status=429) == []
        assert len(json.loads(reporter.good(*arguments))) == 9
        assert limited.requests(status=429) != []


# What the checks find


def test_findings_go_to_stderr_and_cost_nothing_unless_told(told: Reporter, origin: ReportService):
    broken = brand(entry(active_customers=pair("-1"), **NOTHING_EARNED))
    origin.rule = lambda asked: ok(document(asked, brands=[broken]))
    words = (
        "warning: account 1001, 2026-10-01 to 2026-10-31: brands[id=11].marketingSources[id=50121]: "
        "Active customers: the result -1 is below zero\n"
    )
    page = told("1001", *OCTOBER, "--format", "html")
    assert (page.returncode, page.stderr) == (0, words)
    assert "Active customers: the result -1 is below zero" in page.stdout
    strict = told("1001", *OCTOBER, "--format", "csv", "--strict")
    assert (strict.returncode, strict.stderr) == (3, words)
    assert strict.stdout.count("\n") == 2


def test_checks_that_hold_are_told_on_request(reporter: Reporter):
    arguments = ["1001", *QUARTER, "--split", "month", "--checks", "--strict", "--format", "csv"]
    result = reporter(*arguments, "--output", "/dev/null")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.count("the opening balance is the outgoing balance of the period before: holds") == 2
    assert all(line.startswith("info: account 1001, 2026-1") for line in result.stderr.splitlines())


def test_a_balance_that_does_not_follow_is_shown_and_fails_a_strict_run(told: Reporter, origin: ReportService):
    origin.rule = lambda asked: ok(document(asked, outgoing_balance=Decimal("480.0000")))
    page = told("1001", *OCTOBER, "--format", "html")
    words = (
        "account 1001, 2026-10-01 to 2026-10-31: the account's outgoing balance is its opening balance plus the "
        "revenue share, CPA and fees of its marketing sources: does not hold by -8.5900"
    )
    assert (page.returncode, page.stderr) == (0, f"warning: {words}\n")
    assert words.partition("'")[2] in page.stdout
    strict = ["1001", *OCTOBER, "--format", "csv", "--strict"]
    assert told(*strict).returncode == 3
    assert told.good(*strict, "--tolerance", "8.59")


def test_a_source_that_is_listed_twice_is_one_row_and_a_warning(told: Reporter, origin: ReportService):
    plain = told.good("1001", *OCTOBER, "--format", "ndjson")
    twice = brand(entry(**NOTHING_EARNED), wire.MarketingSource(id=50121, reporting_currency="Euro"))
    origin.rule = lambda asked: ok(document(asked, brands=[twice]))
    once = told("1001", *OCTOBER, "--format", "ndjson", "--strict")
    assert re.sub(r'"fetched_at":"[^"]*"', "", once.stdout) == re.sub(r'"fetched_at":"[^"]*"', "", plain)
    assert once.returncode == 3
    assert once.stderr == (
        "warning: account 1001, 2026-10-01 to 2026-10-31: brands[id=11].marketingSources[id=50121]: it is listed more "
        "than once; what one listing lacks was taken from another\n"
    )
    assert told("1001", *OCTOBER, "--format", "json").stdout == of_month(10, brands=[twice]).decode()


def test_an_opening_balance_that_is_not_the_previous_one_is_a_note_and_fails_nothing(
    told: Reporter, origin: ReportService
):
    def rule(asked: Asked) -> bytes:
        month = Decimal(asked.start.month)
        return ok(document(asked, opening_balance=month, outgoing_balance=month))

    origin.rule = rule
    arguments = ["1001", *QUARTER, "--split", "month", "--strict", "--format", "csv"]
    noted = told(*arguments)
    assert (noted.returncode, len(noted.stderr.splitlines())) == (0, 2)
    for line, days in zip(
        noted.stderr.splitlines(), ("2026-11-01 to 2026-11-30", "2026-12-01 to 2026-12-31"), strict=True
    ):
        assert line == (
            f"note: account 1001, {days}: the opening balance is the outgoing balance of the period before: "
            "does not hold by 1; a payout between the two does that"
        )
    assert told.good(*arguments, "--tolerance", "1")


def test_finding_of_every_report_is_told_a_few_times(told: Reporter, origin: ReportService):
    broken = brand(entry(active_customers=pair("-1"), **NOTHING_EARNED))
    origin.rule = lambda asked: ok(document(asked, brands=[broken]))
    arguments = ["1001", *OCTOBER, "--split", "day", "--format", "csv"]
    lines = told(*arguments).stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "21 more findings of counts_are_not_negative; --checks shows all"
    assert len([line for line in told(*arguments, "--checks").stderr.splitlines() if "below zero" in line]) == 31


def test_unknown_fields_are_told_once(told: Reporter, origin: ReportService):
    def rule(asked: Asked) -> bytes:
        body = document(asked).replace(b'"brands"', b'"ready\\u001b[2J":1,"brands"')
        return ok(body.replace(b'"name":"Source', b'"x":1,"name":"Source'))

    origin.rule = rule
    result = told("1001", *OCTOBER, "--split", "day", "--format", "csv")
    assert result.returncode == 0
    (note,) = result.stderr.splitlines()
    assert note.startswith("note: undocumented fields")
    assert note.count(r"ready\x1b[2J") == 1
    assert "brands[].marketingSources[].x" in note


# Versions


def test_history_tells_new_unchanged_and_restated_and_reports_mark_it(reporter: Reporter, seeded: Service):
    quarter = ["1001", *QUARTER, "--split", "month"]
    fetch = ["fetch", *quarter]
    assert re.findall(r": (.*)", reporter.good(*fetch)) == ["new"] * 3
    assert "Restated" not in reporter.good(*quarter)
    restate(seeded, "2026-11-05", "2026-11-05")
    table = reporter.good(*quarter)
    assert table.count("Restated") == 2
    assert table.index("Restated") > table.index("2026-11-01")
    page = reporter.good(*quarter, "--format", "html")
    assert set(re.findall(r'(\w+) 2026<span class="badge">restated', page)) == {"November", "December"}

    october, november, december = reporter.good(*fetch).splitlines()
    assert re.fullmatch(r"account 1001, 2026-10-01 to 2026-10-31: unchanged since 20\S+Z", october)
    assert re.fullmatch(
        r"account 1001, 2026-11-01 to 2026-11-30: restated, \d+ fields differ; "
        r"see: shipper report diff 1001 2026-11-01 2026-11-30",
        november,
    )
    assert re.fullmatch(r".*: restated, 3 fields differ; .*", december), "its balances and its checksum"

    head, *lines = reporter.good("history", "1001").splitlines()
    names = ["version", "period", "first fetched", "last fetched", "times", "state", "checksum"]
    assert re.split("  +", head) == names
    rows = [line.split() for line in lines]
    assert [(row[1], row[-3], row[-2]) for row in rows] == [
        ("2026-10-01", "2", "first"),
        *[("2026-11-01", "1", "first"), ("2026-11-01", "1", "restated")],
        *[("2026-12-01", "1", "first"), ("2026-12-01", "1", "restated")],
    ]
    assert all(re.fullmatch(r"[0-9a-f]{12}", row[-1]) for row in rows)
    assert len(reporter.good("history", "1001", "2026-11-01", "2026-11-30").splitlines()) == 3

    _check_difference(reporter)


def _check_difference(reporter: Reporter) -> None:
    """The fields that are told are those that differ between the documents."""
    title, *changes = reporter.good("diff", "1001", "2026-11-01", "2026-11-30").splitlines()
    assert re.fullmatch(
        r"account 1001, 2026-11-01 to 2026-11-30: version \d+ of \S+Z → version \d+ of \S+Z, (\d+) fields differ", title
    )
    with closing(History(reporter.state)) as history:
        versions = history.versions(1001, date(2026, 11, 1), date(2026, 11, 30))
        old, new = (json.loads(history.body(version), parse_float=Decimal) for version in versions)
    place = r"  brands\[id=(\d+)\].marketingSources\[id=(\d+)\].netRevenue.result: (\S+) → (\S+) \((\S+)\)"
    told = {found.groups() for found in map(re.compile(place).fullmatch, changes) if found}
    expected = set()
    for brand_old, brand_new in zip(old["brands"], new["brands"], strict=True):
        for before, after in zip(brand_old["marketingSources"], brand_new["marketingSources"], strict=True):
            was, now = before["netRevenue"]["result"], after["netRevenue"]["result"]
            if was != now:
                expected.add((str(brand_old["id"]), str(before["id"]), f"{was}", f"{now}", f"{now - was:+f}"))
    assert told == expected
    assert expected


def test_what_is_kept_is_told_to_programs_as_one_object(told: Reporter, origin: ReportService):
    keep(told, of_month(10, opening_balance=Decimal("2.50")), of_month(10, opening_balance=Decimal(4)))
    origin.rule = lambda asked: refusal(500) if asked.start.month == 12 else None
    result = told("fetch", "1001", *QUARTER, "--concurrency", "1", "--format", "json", settings=NO_PATIENCE)
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

    listed = json.loads(told.good("history", "1001", "--format", "json"))
    assert listed["account_id"] == 1001
    assert [(each["version"], each["start"], each["state"], each["fetches"]) for each in listed["versions"]] == [
        *((1, "2026-10-01", "first", 1), (2, "2026-10-01", "restated", 1), (3, "2026-10-01", "restated", 1)),
        (4, "2026-11-01", "first", 1),
    ]
    assert listed["versions"][0]["first_fetched_at"] == "2023-11-14T22:13:20Z"

    (found,) = json.loads(told.good("diff", "1001", *OCTOBER, "--versions", "1", "2", "--format", "json"))[
        "differences"
    ]
    assert (found["start"], found["end"], found["old"]["version"], found["new"]["version"]) == (*OCTOBER, 1, 2)
    assert found["is_restated"]
    assert found["changes"] == [
        {
            "field": "openingBalance",
            "brand_id": None,
            "source_id": None,
            "old": 2.5,
            "new": 4,
            "difference": 1.5,
            "is_figure": True,
        }
    ]


def test_brands_that_came_or_went_are_told_to_programs_by_number_and_name(told: Reporter):
    keep(told, of_month(10), of_month(10, brands=[]))
    (found,) = json.loads(told.good("diff", "1001", *OCTOBER, "--format", "json"))["differences"]
    (change,) = found["changes"]
    assert (change["field"], change["brand_id"], change["new"]) == ("brands[id=11]", 11, None)
    assert change["old"] == {"id": 11, "name": "Harbour Lights"}


def test_what_is_not_kept_is_no_object_of_versions(told: Reporter):
    empty = told("history", "1001", "--format", "json")
    assert (empty.returncode, json.loads(empty.stdout)) == (0, {"account_id": 1001, "versions": []})
    keep(told, of_month(10))
    once = told("diff", "1001", *OCTOBER, "--format", "json")
    assert (once.returncode, json.loads(once.stdout)) == (0, {"account_id": 1001, "differences": []})


def test_days_that_fail_alike_are_told_in_one_line(told: Reporter, origin: ReportService):
    origin.rule = lambda asked: None if asked.start.day in {5, 6} else refusal(404)
    result = told("1001", *OCTOBER, "--split", "day", "--format", "ndjson")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    days = "2026-10-01 to 2026-10-04, 2026-10-07 to 2026-10-31"
    assert line.startswith(f"shipper: account 1001, {days}: there is no such report")


def test_history_that_is_damaged_does_not_stop_the_report(reporter: Reporter):
    reporter.state.mkdir(mode=0o700)
    (reporter.state / "reports.db").write_bytes(b"damaged" * 1000)
    result = reporter("1001", *OCTOBER)
    assert result.returncode == 0
    assert result.stderr.startswith("note: what was restated is not marked")
    assert reporter("fetch", "1001", *OCTOBER).returncode == 1
    assert (reporter.state / "reports.db").read_bytes() == b"damaged" * 1000


def test_change_of_undocumented_fields_alone_is_told_as_such(told: Reporter, origin: ReportService):
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked).replace(b'"brands"', b'"ready":true,"brands"'))
    result = told("fetch", "1001", *OCTOBER)
    assert "document changed, only undocumented fields differ; see: " in result.stdout
    (line,) = told.good("diff", "1001", *OCTOBER).splitlines()
    assert line.endswith(", only undocumented fields differ")
    assert told.good("history", "1001").splitlines()[-1].split("  ")[-2:] == ["document changed", "ab" * 6]


def _with_request_id(body: bytes, number: int) -> bytes:
    return body.replace(b'"brands"', b'"requestId":"r-%d","brands"' % number)


def test_the_id_of_a_request_and_another_spelling_of_a_figure_are_no_new_version(told: Reporter, origin: ReportService):
    made = of_month(10, opening_balance=Decimal("100.0000"))
    keep(told, _with_request_id(made, 1))
    origin.rule = lambda _: ok(_with_request_id(made.replace(b"100.0000", b"1e2"), len(origin.asked) + 1))
    assert "unchanged since " in told("fetch", "1001", *OCTOBER).stdout
    assert told.good("watch", "1001", *OCTOBER, "--once").count(": unchanged since ") == 1
    assert len(told.good("history", "1001").splitlines()) == 2
    assert "Restated" not in told("1001", *OCTOBER).stdout


def test_a_name_that_changed_is_no_restatement(told: Reporter, origin: ReportService):
    """It is told once, runs no hook, is no reason for an exit code, and marks nothing."""
    keep(told, of_month(10))
    log = told.folder / "hook.log"
    renamed = brand(entry(**NOTHING_EARNED), name="Renamed")
    origin.rule = lambda asked: ok(document(asked, brands=[renamed]))
    look = ["watch", "1001", *OCTOBER, "--once", "--on-change", hook(told.folder, f"echo >> {log}")]
    assert told.good(*look) == (
        "account 1001, 2026-10-01 to 2026-10-31: document changed, 1 field differs; "
        "see: shipper report diff 1001 2026-10-01 2026-10-31\n"
    )
    assert told.good(*look).count(": unchanged since ") == 1
    assert not log.exists()
    assert "Restated" not in told.good("1001", *OCTOBER)
    assert told.good("diff", "1001", *OCTOBER).splitlines()[1:] == ["  brands[id=11].name: Harbour Lights → Renamed"]


def test_any_two_versions_can_be_compared(told: Reporter):
    balances = ((10, 1), (10, 2), (10, 4), (11, 1))
    keep(told, *(of_month(month, opening_balance=Decimal(amount)) for month, amount in balances))
    changes = told.good("diff", "1001", *OCTOBER, "--versions", "1", "3").splitlines()
    assert changes[1:] == ["  openingBalance: 1 → 4 (+3)"]
    assert told.good("diff", "1001", *OCTOBER).splitlines()[1:] == ["  openingBalance: 2 → 4 (+2)"]
    assert told.good("diff", "1001", *OCTOBER, "--versions", "3", "1").splitlines()[1:] == [
        "  openingBalance: 4 → 1 (-3)"
    ]
    for numbers, words in ((("1", "9"), "there is no version 9"), (("1", "4"), "version 4 of 2026-11-01")):
        refused = told("diff", "1001", *QUARTER, "--versions", *numbers)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in re.sub(r"[\s│]+", " ", refused.stderr)


def test_brand_that_came_and_field_that_went_are_named(told: Reporter):
    brands = [brand(entry(cpa_revenue=None, **NOTHING_EARNED)), brand(entry(), number=12, name="Paper\x1bMoon")]
    keep(told, of_month(10), of_month(10, brands=brands))
    changes = told.good("diff", "1001", *OCTOBER).splitlines()[1:]
    assert changes == [
        "  brands[id=11].marketingSources[id=50121].cpaRevenue.result: 140.0000 → missing",
        "  brands[id=11].marketingSources[id=50121].cpaRevenue.adjustment: 40.0000 → missing",
        r"  brands[id=12]: missing → Paper\x1bMoon",
    ]


def test_nothing_to_list_or_compare_is_said(told: Reporter):
    empty = told("history", "1001")
    assert (empty.returncode, empty.stdout) == (0, "")
    assert empty.stderr == "no report of account 1001 is kept; to keep some: shipper report fetch\n"
    none = told("diff", "1001", *OCTOBER)
    assert (none.returncode, none.stdout) == (1, "")
    assert "no report of account 1001 within 2026-10-01 and 2026-10-31 is kept" in none.stderr
    keep(told, of_month(10))
    once = told("diff", "1001", *OCTOBER)
    assert (once.returncode, once.stdout, once.stderr) == (0, "", "nothing was restated\n")


def test_part_that_cannot_be_fetched_is_not_kept_and_the_others_are(told: Reporter, origin: ReportService):
    origin.rule = lambda asked: refusal(500) if asked.start.month == 11 else None
    result = told("fetch", "1001", *QUARTER, "--split", "month", settings=NO_PATIENCE)
    assert result.returncode == 1
    assert re.findall(r", (2026-\d\d)-.*: new", result.stdout) == ["2026-10", "2026-12"]
    assert "account 1001, 2026-11-01 to 2026-11-30: the service answered 500" in result.stderr
    assert len(told.good("history", "1001").splitlines()) == 3


def test_checksum_that_hides_a_restatement_is_told(told: Reporter, origin: ReportService):
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    result = told("fetch", "1001", *OCTOBER, "--strict")
    assert result.returncode == 3
    assert "1 field differs from an earlier version with the same checksum" in result.stderr


# Watching


def test_one_look_tells_by_its_exit_code_whether_anything_was_restated(reporter: Reporter, seeded: Service):
    log = reporter.folder / "hook.log"
    command = hook(reporter.folder, f'echo "$1 $# $REPORT_ACCOUNT $REPORT_START $REPORT_END" >> {log}')
    look = ["watch", "1001", *QUARTER, "--split", "month", "--once", "--on-change", command]
    assert reporter.good(*look).count(": new\n") == 3
    assert not log.exists()
    restate(seeded, "2026-11-05", "2026-11-05")
    changed = reporter(*look)
    assert (changed.returncode, changed.stderr) == (3, "")
    assert changed.stdout.count(": restated, ") == 2
    assert reporter.good(*look).count(": unchanged since ") == 3
    assert log.read_text().splitlines() == [
        "$HOME; 2 1001 2026-11-01 2026-11-30",
        "$HOME; 2 1001 2026-12-01 2026-12-31",
    ]


def test_look_that_fails_is_no_look(told: Reporter, origin: ReportService):
    keep(told, of_month(10))
    origin.rule = lambda _: refusal(500)
    result = told("watch", "1001", *OCTOBER, "--once", settings=NO_PATIENCE)
    assert (result.returncode, result.stdout) == (1, "")
    assert "the service answered 500" in result.stderr


def _restated(told: Reporter, origin: ReportService, body: str) -> tuple[list[str], Path]:
    """Restate October since the hook was begun; `body` is what the hook does after it has left a mark."""
    log = told.folder / "hook.log"
    look = [
        "watch",
        "1001",
        *OCTOBER,
        "--once",
        "--on-change",
        hook(told.folder, f"echo $REPORT_START >> {log}\n{body}"),
    ]
    assert told.good(*look).count(": new\n") == 1
    assert not log.exists()
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    return look, log


def test_a_hook_that_failed_runs_at_the_next_looks_until_it_succeeds_and_never_again(
    told: Reporter, origin: ReportService
):
    may_succeed = told.folder / "may_succeed"
    look, log = _restated(told, origin, f"test -e {may_succeed}")
    for words in (": restated, 1 field differs", ": unchanged since "):
        failed = told(*look)
        assert (failed.returncode, words in failed.stdout) == (3, True)
        assert "a hook.sh ended with 1 for account 1001, 2026-10-01 to 2026-10-31; it runs again" in failed.stderr
    may_succeed.touch()
    assert ": unchanged since " in told.good(*look)
    assert log.read_text().splitlines() == ["2026-10-01"] * 3
    assert told.good(*look)
    assert log.read_text().splitlines() == ["2026-10-01"] * 3


def test_a_hook_that_failed_runs_again_though_the_service_is_away(told: Reporter, origin: ReportService):
    look, log = _restated(told, origin, f"test $(wc -l < {told.folder / 'hook.log'}) = 2")
    assert told(*look).returncode == 3
    origin.rule = lambda _: refusal(500)
    away = told(*look, settings=NO_PATIENCE)
    assert (away.returncode, "a hook.sh" in away.stderr) == (1, False)
    assert told(*look, settings=NO_PATIENCE).returncode == 1
    assert len(log.read_text().splitlines()) == 2


def test_a_restatement_that_another_command_kept_first_reaches_the_hook(told: Reporter, origin: ReportService):
    look, log = _restated(told, origin, "")
    assert ": restated, " in told("fetch", "1001", *OCTOBER).stdout
    assert ": unchanged since " in told.good(*look)
    assert told.good(*look)
    assert log.read_text().splitlines() == ["2026-10-01"]


def test_restatements_from_before_the_hook_was_begun_do_not_run_it(told: Reporter, origin: ReportService):
    keep(told, of_month(10, opening_balance=Decimal(7)), of_month(10))
    log = told.folder / "hook.log"
    assert told.good("watch", "1001", *OCTOBER, "--once", "--on-change", hook(told.folder, f"echo >> {log}"))
    assert not log.exists()


def test_hook_that_fails_is_told(told: Reporter, origin: ReportService):
    look = ["watch", "1001", *OCTOBER, "--once", "--on-change", hook(told.folder, "exit 7")]
    keep(told, of_month(10))
    origin.rule = lambda asked: ok(document(asked, opening_balance=Decimal(1)))
    result = told(*look)
    assert result.returncode == 3
    assert "a hook.sh ended with 7 for account 1001, 2026-10-01 to 2026-10-31" in result.stderr
