"""The daily report: made by the sandbox, read by the client, shown as a table."""

from __future__ import annotations

import io
import re
from datetime import UTC, date, datetime
from decimal import Decimal

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from shipper import wire
from shipper.errors import ReportError
from shipper.report.client import read_report, report_path
from shipper.report.table import render_table
from shipper.sandbox.report import build_report
from shipper.sandbox.store import Registrations

START, END = date(2026, 1, 1), date(2026, 1, 31)
NOW = datetime(2026, 2, 1, 8, 0, 0, 123_456, tzinfo=UTC).timestamp()
SOURCE = wire.ReportSource(1001, "Example Affiliate", "Example Operator")
ROWS = [Registrations(11, 50121, 40), Registrations(11, 50234, 2), Registrations(77, 50121, 7)]


def report(rows=ROWS, **kwargs) -> wire.DailyReport:
    arguments = {"source": SOURCE, "start": START, "end": END, "now_seconds": NOW, **kwargs}
    return build_report(rows, **arguments)


def with_figures(**figures) -> wire.DailyReport:
    """Make a report whose first marketing source has the given figures."""
    made = report()
    first, *others = made.brands[0].marketing_sources
    brand = replace(made.brands[0], marketing_sources=[replace(first, **figures), *others])
    return replace(made, brands=[brand, *made.brands[1:]])


def pair(result: str, adjustment: str = "0.0000") -> wire.AmountPair:
    return wire.AmountPair(Decimal(result), Decimal(adjustment))


def rendered(made: wire.DailyReport, width: int = 240) -> str:
    out = io.StringIO()
    render_table(made, Console(file=out, width=width, color_system=None))
    return out.getvalue()


# What the sandbox makes


def test_registrations_stand_under_brand_and_marketing_source():
    made = report()
    figures = {
        (brand.id, entry.id): entry.conversions.registrations.result
        for brand in made.brands
        for entry in brand.marketing_sources
    }
    assert figures == {(11, 50121): 40, (11, 50234): 2, (77, 50121): 7}


def test_report_has_the_documented_form():
    text = wire.encode_report(report()).decode()
    document = msgspec.json.decode(text)
    assert list(document) == [
        *("id", "lastCheckSum", "source", "reportingTime", "reportingPeriod", "reportingCurrency"),
        *("openingBalance", "outgoingBalance", "brands"),
    ]
    assert document["source"]["affilaiteAccountId"] == 1001
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["id"])
    assert re.fullmatch(r"[0-9a-f]{64}", document["lastCheckSum"])
    assert document["reportingTime"] == "2026-02-01T08:00:00.1234560Z"
    assert document["reportingPeriod"] == {"start": "2026-01-01T00:00:00", "end": "2026-01-31T23:59:59"}
    assert document["reportingCurrency"] == "Euro"
    assert '"openingBalance":0.0000' in text
    assert '"netRevenue":{"result":0.0000,"adjustment":0.0000}' in text
    assert '"exchangeRate":1.0000' in text


def test_checksum_and_id_change_with_the_figures_only():
    first, later = report(), report(now_seconds=NOW + 60)
    assert (first.id, first.last_check_sum) == (later.id, later.last_check_sum)
    assert first.reporting_time != later.reporting_time
    others = [report([*ROWS[:2], Registrations(77, 50121, 8)]), report(end=date(2026, 1, 30)), report([])]
    assert len({made.last_check_sum for made in [first, *others]}) == 4


# What the client reads


def test_path_names_account_and_days():
    assert report_path(1001, START, END) == "/dpm/v1/dar/1001/2026-01-01/2026-01-31"
    assert report_path(1001, START, START) == "/dpm/v1/dar/1001/2026-01-01/2026-01-01"


def test_path_of_a_period_that_ends_before_it_starts_is_refused():
    with pytest.raises(ReportError, match="2026-01-31 is after its end 2026-01-01"):
        report_path(1001, END, START)


def test_report_is_read_as_it_was_written():
    made = with_figures(net_revenue=pair("1234.5000", "-0.2500"))
    read = read_report(wire.encode_report(made), account_id=1001)
    assert read == made
    assert str(read.brands[0].marketing_sources[0].net_revenue.result) == "1234.5000"


def test_right_spelling_of_the_account_field_is_read_too():
    made = with_figures(net_revenue=pair("0.1000000000000000055"))
    body = wire.encode_report(made).replace(b"affilaiteAccountId", b"affiliateAccountId")
    assert read_report(body, account_id=1001) == made


def test_report_of_another_account_is_an_error():
    with pytest.raises(ReportError, match=r"account 7 was asked for.* account 1001"):
        read_report(wire.encode_report(report()), account_id=7)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"source":' + b"[" * 100_000, "not JSON"),
        (b"\n <!doctype html><html></html>", "a web page"),
        (b"[]", "not a daily report"),
        (b"{}", "not a daily report"),
        (b'{"source":{}}', "not a daily report"),
        (b'{"source":7}', "not a daily report"),
        (b'{"statusCode":404,"message":"Resource not found"}', "not a daily report"),
        (wire.encode_report(report()).replace(b'"brands":[', b'"brands":["'), "not JSON"),
        (wire.encode_report(report()).replace(b'"result":40', b'"result":[]'), r"registrations\.result"),
    ],
)
def test_what_is_no_report_is_named(body, message):
    with pytest.raises(ReportError, match=message):
        read_report(body, account_id=1001)


@pytest.mark.parametrize("figure", [b"1e999999999", b"1e-999999999", b'"NaN"', b'"Infinity"'])
def test_figures_out_of_range_are_an_error(figure):
    body = wire.encode_report(report()).replace(b'"result":40', b'"result":' + figure)
    with pytest.raises(ReportError, match=r"registrations\.result"):
        read_report(body, account_id=1001)


# What the table shows


def test_table_shows_head_and_one_row_per_brand_and_source():
    text = rendered(report())
    for part in ("1001", "Example Affiliate", "Example Operator", "Euro", "2026-01-01T00:00:00", "Opening balance"):
        assert part in text
    assert re.search(r"11  Harbour Lights +50121 +40 ", text)
    assert re.search(r"77  Brand 77 +50121 +7 ", text)


def test_total_adds_flows_and_leaves_customers_and_balances_out():
    many = wire.DepositFigures(customers=pair("31"), amount=pair("9000.5000"))
    made = with_figures(
        deposits=wire.Deposits(new_depositing_customers=many, returning_depositing_customers=many),
        outgoing_balance=Decimal("555.0000"),
    )
    (total,) = [line for line in rendered(made).splitlines() if "total" in line]
    assert total.split() == ["total", "42", "0", "9,000.5000", "9,000.5000", "0.0000", "0.0000", "0.0000", "0.0000"]


def test_money_of_several_currencies_is_not_added():
    (total,) = [line for line in rendered(with_figures(reporting_currency="Krona")).splitlines() if "total" in line]
    assert total.split() == ["total", "42", "0"]


def test_adjustment_is_shown_beside_its_result_if_there_is_one():
    text = rendered(with_figures(fees=pair("-5.1000", "0.2000"), net_revenue=pair("8.0000", "-1.0000")))
    assert "adj +0.2000" in text
    assert "adj -1.0000" in text
    assert "adj" not in rendered(report())


def test_brand_of_one_source_has_no_total():
    assert "total" not in rendered(report(ROWS[2:]))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_figures_are_never_cut(width):
    text = rendered(with_figures(net_revenue=pair("123456789012.3456", "-98765.4321")), width)
    assert "123,456,789,012.3456" in text
    assert "adj -98,765.4321" in text
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width


def test_names_from_outside_neither_mark_up_nor_steer_the_terminal():
    text = rendered(with_figures(name="[red]a\x1b[2Jb"))
    assert "[red]a\N{REPLACEMENT CHARACTER}[2Jb" in text
    assert "\x1b" not in text


def test_report_without_brands_says_so():
    assert "No brand has figures" in rendered(report([]))
