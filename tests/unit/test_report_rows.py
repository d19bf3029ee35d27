"""The common parts of all report formats: flat rows, metrics, possible sums, currencies, and number formats."""

from __future__ import annotations

from decimal import Decimal
from itertools import groupby, product

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report import currencies
from shipper.report.currencies import currency_code
from shipper.report.formatting import clean, currency, label_of, moment, number, period, short_figure, short_period
from shipper.report.metrics import (
    ACTIVE,
    BALANCE,
    CLICKS,
    FEES,
    METRICS,
    NEW_CUSTOMERS,
    NO_FIGURE,
    REGISTRATIONS,
    RETURNING_CUSTOMERS,
    sum_of,
    upper_bound,
)
from shipper.report.rows import FlatTable, account_table, are_disjoint, by_account, lines_of, lines_over, source_table
from tests.cases import each
from tests.report_documents import FETCHED_AT, brand, entry, fetched, pair, report

ADDITIVE = [metric for metric in METRICS if metric.is_additive]
OTHERS = [metric for metric in METRICS if not metric.is_additive]
MONEY = [metric for metric in ADDITIVE if metric.is_money]


def records(table: FlatTable) -> list[dict[str, object]]:
    return [dict(zip((column.name for column in table.columns), row, strict=True)) for row in table.rows]


# Rows


def row_of(entry: wire.MarketingSource) -> dict[str, object]:
    (row,) = records(source_table([fetched(report(brand(entry)))]))
    return row


def test_row_has_the_fields_of_the_document_in_this_order():
    row = row_of(entry())
    expected = {
        "account_id": 1001,
        "account_name": "Example Affiliate",
        "operator_name": "Example Operator",
        "period_start": "2026-01-01T00:00:00",
        "period_end": "2026-01-31T23:59:59",
        "reporting_time": "2026-02-02T08:00:00.1234567Z",
        "fetched_at": FETCHED_AT,
        "check_sum": "ab" * 32,
        "account_currency": "Euro",
        "brand_id": 11,
        "brand_name": "Harbour Lights",
        "source_id": 50121,
        "source_name": "Source 50121",
        "source_currency": "Euro",
        "exchange_rate": Decimal(1),
        "clicks": 5000,
        **figures("registrations", "433", "-3", "430"),
        **figures("qualified_conversions", "32", "-2", "30"),
        **figures("active_customers", "31", "-1", "30"),
        **figures("new_depositing_customers", "34", "-4", "30"),
        **figures("returning_depositing_customers", "36", "6", "42"),
        **figures("new_deposits", "1035.5000", "-0.2500", "1035.2500"),
        **figures("returning_deposits", "1037.1234", "0.0001", "1037.1235"),
        **figures("net_revenue", "1038.0000", "-8.0000", "1030.0000"),
        **figures("rev_share", "339.0000", "0.0000", "339.0000"),
        **figures("cpa_revenue", "140.0000", "40.0000", "180.0000"),
        **figures("fees", "-41.4100", "1.0000", "-40.4100"),
        "outgoing_balance": Decimal("478.5900"),
    }
    assert list(row.items()) == list(expected.items())
    assert str(row["fees_total"]) == "-40.4100"


PARTS = ("result", "adjustment", "total")


def figures(name: str, *values: str) -> dict[str, Decimal]:
    return {f"{name}_{part}": Decimal(value) for part, value in zip(PARTS, values, strict=True)}


def test_there_is_one_row_per_brand_source_and_period_in_the_order_of_the_documents():
    documents = [
        report(brand(entry(3), entry(1), number=12), brand(entry(3), number=11)),
        report(brand(), brand(entry(2), number=9)),
    ]
    rows = records(source_table(map(fetched, documents)))
    assert [(row["brand_id"], row["source_id"]) for row in rows] == [(12, 3), (12, 1), (11, 3), (9, 2)]


def test_account_table_has_one_row_per_report():
    documents = [fetched(report(brand(entry(1), entry(2)), brand(number=12))), fetched(report(), is_restated=True)]
    first, second = records(account_table(documents))
    assert (first["brands"], first["marketing_sources"], first["is_restated"]) == (2, 2, False)
    assert (second["brands"], second["marketing_sources"], second["is_restated"]) == (0, 0, True)
    assert (first["opening_balance"], first["outgoing_balance"]) == (Decimal("10.0000"), Decimal("488.5900"))
    assert first["report_id"] == "00000000-0000-4000-8000-000000000001"


@each("metric", METRICS)
def test_every_metric_is_found_in_a_full_document(metric):
    assert metric.figure(entry()).total is not None
    assert len({other.figure(entry()).result for other in METRICS}) == len(METRICS)


def test_groups_of_metrics_are_contiguous():
    groups = [group for group, _ in groupby(metric.group for metric in METRICS)]
    assert len(groups) == len(set(groups))


def test_missing_figure_is_none_and_not_zero():
    holes = entry(conversions=None, fees=wire.AmountPair(None, None), net_revenue=None, outgoing_balance=None)
    missing = {name for name, value in row_of(holes).items() if value is None}
    names = product(("registrations", "qualified_conversions", "fees", "net_revenue"), PARTS)
    assert missing == {"clicks", "outgoing_balance", *map("_".join, names)}


def test_totals_are_exact_beyond_the_digits_of_the_default_context():
    long, short = "123456789012345678901234567890.1234", "0.000000000000000000000000000001"
    row, sum_ = row_of(entry(fees=pair(long, short))), sum_of(FEES, [entry(fees=pair(long)), entry(fees=pair(short))])
    assert {str(row["fees_total"]), str(sum_.result)} == {
        "123456789012345678901234567890.123400000000000000000000000001"
    }


# What may be added


@each("metric", ADDITIVE)
def test_flows_are_added(metric):
    one = metric.figure(entry())
    assert sum_of(metric, [entry(), entry(), entry()]) == wire.AmountPair(3 * one.result, 3 * one.adjustment)


def test_customers_and_balances_have_no_sum():
    assert set(OTHERS) == {ACTIVE, NEW_CUSTOMERS, RETURNING_CUSTOMERS, BALANCE}
    assert [sum_of(metric, [entry(), entry()]) for metric in OTHERS] == [NO_FIGURE] * 4


@each("metric", METRICS)
def test_one_entry_is_its_own_sum(metric):
    assert sum_of(metric, [entry()]) == metric.figure(entry())


@pytest.mark.parametrize("other", [{"reporting_currency": "Krona"}, {"exchange_rate": Decimal("1.0001")}])
def test_money_is_added_in_one_currency_and_rate_only(other):
    both = [entry(), entry(**other)]
    assert [sum_of(metric, both) for metric in MONEY] == [NO_FIGURE] * len(MONEY)
    assert sum_of(REGISTRATIONS, both).result == 866


def test_scale_of_the_rate_does_not_matter():
    assert sum_of(FEES, [entry(), entry(exchange_rate=Decimal(1))]) != NO_FIGURE


def test_sum_with_a_missing_figure_is_missing():
    assert sum_of(FEES, [entry(), entry(fees=None)]) == NO_FIGURE
    assert sum_of(CLICKS, [entry(conversions=None), entry()]).total is None
    assert sum_of(FEES, [entry(), entry(fees=wire.AmountPair(Decimal(1), None))]).adjustment is None
    assert sum_of(FEES, []) == NO_FIGURE


def test_bound_of_customers_is_their_sum():
    assert upper_bound(NEW_CUSTOMERS, [entry(), entry()]) == 60
    assert upper_bound(NEW_CUSTOMERS, [entry(), entry(deposits=None)]) is None
    assert upper_bound(NEW_CUSTOMERS, []) is None


@each(
    ("days", "disjoint"),
    [
        ([("01", "01"), ("02", "02")], True),
        ([("01", "09"), ("10", "31")], True),
        ([("01", "01"), ("05", "05")], True),
        ([("01", "10"), ("10", "31")], False),
        ([("01", "31"), ("05", "05")], False),
        ([("01", "31"), ("01", "31")], False),
        ([("01", "31")], True),
    ],
)
def test_overlapping_periods_are_detected(days, disjoint):
    periods = [fetched(report(start=f"2026-01-{start}", end=f"2026-01-{end}")) for start, end in days]
    assert are_disjoint(periods) == disjoint


def test_equal_periods_overlap_even_if_they_are_empty():
    instant = wire.ReportingPeriod("2026-01-01T00:00:00", "2026-01-01T00:00:00")
    once = fetched(replace(report(), reporting_period=instant))
    assert not are_disjoint([once, once])


def test_accounts_are_separate_and_their_periods_ascend():
    documents = [report(account=2, start="2026-02-01", end="2026-02-28"), report(account=1), report(account=2)]
    (second_late, first, second_early) = map(fetched, documents)
    assert by_account([second_late, first, second_early]) == [[second_early, second_late], [first]]


# Lines


def test_brand_of_several_sources_and_account_of_several_brands_have_totals():
    kinds = [line.kind for line in lines_of(report(brand(entry(1), entry(2)), brand(entry(1), number=12)))]
    assert kinds == ["source", "source", "brand", "source", "account"]
    assert [line.kind for line in lines_of(report(brand(entry()), brand(number=12)))] == ["source"]


def test_lines_over_periods_contain_each_source_once_with_its_latest_name():
    early = report(brand(entry(2, name="old"), number=12), brand(entry(5)))
    late = report(brand(entry(2, name="new"), entry(1), number=12), start="2026-02-01", end="2026-02-28")
    lines = lines_over([fetched(early), fetched(late)])
    assert [(line.kind, line.brand, line.source, len(line.entries)) for line in lines] == [
        ("source", "11  Harbour Lights", "5  Source 5", 1),
        ("source", "12  Harbour Lights", "1  Source 1", 1),
        ("source", "12  Harbour Lights", "2  new", 2),
        ("brand", "12  Harbour Lights", "", 3),
        ("account", "", "", 4),
    ]


# How it is written


@each(
    ("start", "end", "full", "short"),
    [
        ("2026-01-01T00:00:00", "2026-01-31T23:59:59", "January 2026", "Jan 2026"),
        ("2024-02-01T00:00:00", "2024-02-29T00:00:00", "February 2024", "Feb 2024"),
        ("2025-02-01T00:00:00", "2025-02-27T23:59:59", "1-27 February 2025", "1-27 Feb"),
        ("2026-01-09T00:00:00", "2026-01-09T23:59:59", "9 January 2026", "9 Jan"),
        ("2026-01-09T00:00:00", "2026-02-01T00:00:00", "9 January - 1 February 2026", "9 Jan - 1 Feb"),
        ("2025-12-28T00:00:00", "2026-01-03T00:00:00", "28 December 2025 - 3 January 2026", "28 Dec - 3 Jan"),
        ("2026-01-01T06:00:00", "2026-01-02T06:00:00", "2026-01-01T06:00:00 to 2026-01-02T06:00:00", None),
        ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-01T00:00:00Z to 2026-01-02T00:00:00Z", None),
        ("2026-01-02T00:00:00", "2026-01-01T00:00:00", "2026-01-02T00:00:00 to 2026-01-01T00:00:00", None),
        ("some\x1bday", "", r"some\x1bday to ", r"some\x1bday"),
        ("9999-12-01T00:00:00", "9999-12-31T00:00:00", "December 9999", "Dec 9999"),
    ],
)
def test_periods_are_formatted_for_readers(start, end, full, short):
    stated = wire.ReportingPeriod(start, end)
    assert period(stated).replace("\N{EN DASH}", "-") == full
    assert short_period(stated).replace("\N{EN DASH}", "-") == (start if short is None else short)


@each(
    ("text", "shown"),
    [
        ("2026-02-02T08:15:59.1234567Z", "2 February 2026, 08:15 UTC"),
        ("2026-02-02T08:15:00+00:00", "2 February 2026, 08:15 UTC"),
        ("2026-02-02T08:15:00+02:00", "2026-02-02T08:15:00+02:00"),
        ("2026-02-02T08:15:00", "2026-02-02T08:15:00"),
        ("soon", "soon"),
        ("", ""),
    ],
)
def test_times_are_formatted_for_readers(text, shown):
    assert moment(text) == shown


def test_control_characters_of_names_are_escaped():
    assert clean("a\x1b[2J\u202eb\x00") == r"a\x1b[2J\u202eb\x00"
    assert clean("non\u00a0breaking\nline") == "non breaking line"
    assert clean("\N{FAMILY}\u200d\u200cx") == "\N{FAMILY}\u200d\u200cx"
    assert clean(None) == ""
    assert label_of(7, "") == "7"


def test_figures_are_formatted_for_readers():
    assert number(Decimal("12.0000")) == "12"
    assert number(Decimal("12.5")) == "12.5"
    assert short_figure(FEES, Decimal("-0.0001")) == "0.00"
    long = short_figure(FEES, Decimal("123456789012345678901234567890.125"))
    assert long == "123,456,789,012,345,678,901,234,567,890.12"
    assert currency("Krona", Decimal("1.0000")) == "Krona"
    assert currency("Krona", Decimal("0.0870")) == "Krona (rate 0.0870)"


# Currencies -----------------------------------------------------------------------------------------------------------


NAMES = {
    "EUR": ["Euro", "euros", "  EURO ", "eur"],
    "USD": ["US Dollar", "U.S. dollars", "United States Dollar"],
    "GBP": ["British Pound", "British Pounds", "Pound Sterling", "Pounds Sterling", "Great British Pound"],
    "JPY": ["Yen", "Japanese  Yen"],
    "ZAR": ["Rand", "South African Rand"],
    "SEK": ["Swedish kronor"],
    "DKK": ["Danish Kroner"],
    "NOK": ["Norwegian Krone"],
    "ISK": ["Icelandic Króna", "Icelandic Krona"],
    "PLN": ["Polish Zloty", "Polish Złoty"],
    "RON": ["Romanian Lei"],
    "STN": ["São Tomé & Príncipe Dobra", "Sao Tome and Principe Dobra"],
    "TOP": ["Tongan Pa\N{MODIFIER LETTER TURNED COMMA}anga", "Pa\N{RIGHT SINGLE QUOTATION MARK}anga"],
    "BGN": ["Bulgarian Lev"],
}


@each(("code", "name"), [(code, name) for code, names in NAMES.items() for name in names])
def test_name_has_its_code(code, name):
    assert currency_code(name) == code


@each(
    "name",
    [
        *(None, "", "s", "$", "XYZ", "US", "Euro Dollar", "Monopoly Money"),
        *("Dollar", "Dollars", "Pound", "Krona", "Crown", "Peso", "Franc", "Som", "Bolívar Soberano"),
        *("tops", "cups", "alls"),  # plurals of codes
    ],
)
def test_uncertain_name_has_no_code(name):
    assert currency_code(name) is None


def test_no_name_belongs_to_two_currencies():
    spellings = [
        (currencies._key(spelling), code)
        for code, names in currencies._NAMES_BY_CODE.items()
        for name in (code, *names)
        for spelling in {name, f"{name}s" if name != code else name}
    ]
    assert len(spellings) > 400
    assert len(dict(spellings)) == len(set(spellings))
