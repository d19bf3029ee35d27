"""The terminal table: figures, totals, several periods and accounts, currencies, and missing values."""

from __future__ import annotations

import io
import re
from decimal import Decimal

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from shipper.report.rows import ReportVersion
from shipper.report.table import render_tables
from tests.report_documents import brand, entry, fetched, hostile, months, pair, report

ADDED = ["10,000", "866", "64", "2,071.0000", "2,074.2468", "2,076.0000", "678.0000", "280.0000", "-82.8200"]
FEBRUARY = {"start": "2026-02-01", "end": "2026-02-28"}


def rendered(*documents: ReportVersion, width: int = 240) -> str:
    out = io.StringIO()
    render_tables(documents, Console(file=out, width=width, color_system=None))
    return out.getvalue()


def line_with(text: str, word: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if word in line]
    return line.split()


def test_head_and_every_metric_are_shown_and_adjustments_beside_their_results():
    text = rendered(fetched(report(brand(entry()))))
    for fact in ("1001  Example Affiliate", "Example Operator", "Euro (EUR)", "2026-01-01T00:00:00", "Opening balance"):
        assert fact in text
    assert line_with(text, "50121") == [
        *("11", "Harbour", "Lights", "50121", "Source", "50121", "5,000", "433", "32", "31", "34", "36"),
        *("1,035.5000", "1,037.1234", "1,038.0000", "339.0000", "140.0000", "-41.4100", "478.5900"),
    ]
    for adjustment in ("adj -3", "adj -0.2500", "adj +40.0000"):
        assert adjustment in text
    assert "total" not in text, "of one source"


def test_account_of_several_brands_has_a_total_without_customers_and_balances():
    text = rendered(fetched(report(brand(entry(1)), brand(entry(2), number=12))))
    assert line_with(text, "all brands")[2:] == ADDED
    assert "adj +80.0000" in text
    assert "adj -16.0000" in text


def test_periods_ascend_and_end_with_the_possible_totals():
    late, early = fetched(report(brand(entry()), **FEBRUARY)), fetched(report(brand(entry())))
    text = rendered(late, early)
    assert re.findall(r"Period +(\S+)", text) == ["2026-01-01T00:00:00", "2026-02-01T00:00:00"]
    head, over = text.split("Account 1001, all 2 periods, 2026-01-01T00:00:00 to 2026-02-28T23:59:59")
    assert "NDC" in head
    assert line_with(over, "50121")[6:] == ADDED
    assert "Customers are counted per period and not added up." in over


def test_nothing_is_added_over_periods_that_overlap():
    text = rendered(fetched(report(brand(entry()))), fetched(report(brand(entry()), start="2026-01-31")))
    assert "The periods overlap, so their figures are not added up." in text
    assert "10,000" not in text


@pytest.mark.parametrize("source_currency", ["Euro", None])
def test_money_of_months_in_different_currencies_is_not_added(source_currency: str | None):
    """This applies to sources with a currency of their own, and to those with the account's currency."""
    sources = brand(entry(reporting_currency=source_currency, exchange_rate=None))
    euro, krona = report(sources), replace(report(sources, **FEBRUARY), reporting_currency="Swedish Krona")
    head, over = rendered(fetched(euro), fetched(krona)).split("all 2 periods")
    assert "339.0000" in head
    assert line_with(over, "50121")[-3:] == ["10,000", "866", "64"]
    assert "678.0000" not in over
    assert "The periods have different currencies, so amounts are not added up." in over
    same = rendered(fetched(euro), fetched(replace(krona, reporting_currency="EUR")))
    assert "678.0000" in same.split("all 2 periods")[1]


def test_accounts_follow_each_other_and_are_not_added():
    text = rendered(fetched(report(brand(entry()))), fetched(report(brand(entry()), account=7)))
    assert re.findall(r"Account +(\d+)", text) == ["1001", "7"]
    assert "10,000" not in text


def test_restated_period_and_time_of_fetching_are_shown():
    text = rendered(fetched(report(brand(entry())), is_restated=True))
    assert "Restated" in text
    assert re.search("Fetched at +2026-02-02T08:15:00Z", text)
    plain = rendered(ReportVersion(report(brand(entry()))))
    assert "Restated" not in plain
    assert "Fetched" not in plain


def test_currency_and_rate_are_named_if_they_differ_from_the_account():
    krona = entry(2, reporting_currency="Krona", exchange_rate=Decimal("0.0870"))
    text = rendered(fetched(report(brand(entry(1), krona))))
    assert "Krona (rate 0.0870)" in text
    assert line_with(text, "total") == ["total", "10,000", "866", "64"], "money of two currencies is not added"
    assert "Krona" not in rendered(fetched(report(brand(entry()))))
    total = line_with(rendered(fetched(report(brand(krona, krona)))), "total")
    assert total[1:5] == ["Krona", "(rate", "0.0870)", "10,000"]


def test_missing_figure_is_empty_and_an_adjustment_of_zero_is_not_shown():
    holes = entry(conversions=None, fees=None, outgoing_balance=None, active_customers=pair("31", "0"))
    document = replace(report(brand(holes, entry(2))), opening_balance=None, outgoing_balance=None)
    text = rendered(fetched(document))
    figures = "31 34 36 1,035.5000 1,037.1234 1,038.0000 339.0000 140.0000"
    assert line_with(text, "Source 50121")[6:] == figures.split()
    assert line_with(text, "total")[1:] == ["2,071.0000", "2,074.2468", "2,076.0000", "678.0000", "280.0000"]
    assert "None" not in text
    assert "adj 0" not in text
    half = fetched(report(brand(entry(fees=replace(pair("1", "-0.2500"), result=None)))))
    assert line_with(rendered(half), "50121")[-3:] == ["adj", "-0.2500", "478.5900"]
    assert "No brand has figures in this period." in rendered(fetched(report()))


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_figures_are_not_truncated_at_any_width(width: int):
    long = fetched(report(brand(entry(net_revenue=pair("123456789012.3456", "-98765.4321"))), start="2025-01-01"))
    text = rendered(*months(2), long, width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text
    assert "123,456,789,012.3456" in text
    assert "adj -98,765.4321" in text


def test_foreign_names_contain_neither_markup_nor_control_sequences():
    text = rendered(fetched(hostile()), width=400)
    assert "\x1b" not in text
    assert r"esc\x1b[2Jape" in text
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in text
    assert "[red]bracket[/]" in text
