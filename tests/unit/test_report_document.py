"""Reading the daily report: documented fields are exact, missing ones stay missing, unknown ones are listed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shipper.model import wire
from shipper.model.errors import ReportError
from shipper.report.document import FetchedReport, merge_listings, read_report
from tests.cases import each
from tests.report_documents import brand, entry, pair, report

BODY = Path(__file__).with_name("daily_report.json").read_bytes()
SOURCE = ("brands", 0, "marketingSources", 0)
PAIRS = [
    (*SOURCE, "activeCustomers"),
    (*SOURCE, "conversions", "qualifiedConversions"),
    (*SOURCE, "conversions", "registrations"),
    *(
        (*SOURCE, "deposits", f"{whose}DepositingCustomers", what)
        for whose in ("new", "returning")
        for what in ("customers", "amount")
    ),
    *((*SOURCE, name) for name in ("netRevenue", "revShare", "cpaRevenue", "fees")),
]
MAY_BE_MISSING = [
    ("openingBalance",),
    ("outgoingBalance",),
    ("source", "affiliateAccountName"),
    ("source", "operatorName"),
    ("brands", 0, "name"),
    *((*SOURCE, name) for name in ("name", "reportingCurrency", "exchangeRate", "conversions", "deposits")),
    (*SOURCE, "conversions", "clicks"),
    (*SOURCE, "deposits", "newDepositingCustomers"),
    (*SOURCE, "deposits", "returningDepositingCustomers"),
    (*SOURCE, "outgoingBalance"),
    *PAIRS,
    *((*path, part) for path in PAIRS for part in ("result", "adjustment")),
]
FIGURES = [
    ("openingBalance",),
    ("outgoingBalance",),
    *((*SOURCE, name) for name in ("exchangeRate", "outgoingBalance")),
    (*SOURCE, "conversions", "clicks"),
    *((*path, part) for path in PAIRS for part in ("result", "adjustment")),
]
NEEDED = [
    *((name,) for name in ("id", "lastCheckSum", "source", "reportingTime", "reportingPeriod", "reportingCurrency")),
    ("source", "affilaiteAccountId"),
    ("reportingPeriod", "start"),
    ("reportingPeriod", "end"),
    ("brands",),
    ("brands", 0, "id"),
    ("brands", 0, "marketingSources"),
    (*SOURCE, "id"),
]


class Number(str):
    """A number as written."""


def parsed(body: bytes):
    return json.loads(body, parse_int=Number, parse_float=Number)


def holder(document, path: tuple[str | int, ...]):
    for name in path[:-1]:
        document = document[name]
    return document


def changed(path: tuple[str | int, ...], *values: object) -> bytes:
    """The example with another value at a path, or without one; raw JSON where it is bytes."""
    document = json.loads(BODY, parse_int=Decimal, parse_float=Decimal)
    place = holder(document, path)
    del place[path[-1]]
    for value in values:
        place[path[-1]] = msgspec.Raw(value) if isinstance(value, bytes) else value
    return msgspec.json.Encoder(decimal_format="number").encode(document)


def dotted(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


def at(value: object, path: tuple[str | int, ...]) -> object:
    """Walk the typed report by the names of the document."""
    for name in path:
        if value is not None:
            is_index = isinstance(name, int)
            value = value[name] if is_index else getattr(value, re.sub("[A-Z]", lambda a: "_" + a[0].lower(), name))
    return value


def read(body: bytes) -> FetchedReport:
    return read_report(body, account_id=1001)


# The whole document


def test_example_has_every_documented_field():
    def names(value: object) -> Iterator[str]:
        for inner in value if isinstance(value, list) else ():
            yield from names(inner)
        for name, inner in value.items() if isinstance(value, dict) else ():
            yield name
            yield from names(inner)

    kinds = [kind for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    documented = {name for kind in kinds for name in kind.__struct_encode_fields__ if "Activity" not in kind.__name__}
    assert len(documented) > 30
    assert set(names(json.loads(BODY))) == documented


def test_example_round_trip_keeps_values_and_decimals():
    fetched = read(BODY)
    assert parsed(wire.encode_report(fetched.report)) == parsed(BODY)
    assert fetched.unknown_fields == ()
    assert fetched.body == BODY


def test_times_and_names_are_kept_as_written():
    fetched = read_report(BODY, account_id=1001, fetched_at=12.5)
    made = fetched.report
    assert fetched.fetched_at == 12.5
    assert made.reporting_time == "2026-02-01T08:00:00.1234567Z"
    assert made.reporting_period.end == "2026-01-31T23:59:59"
    assert made.brands[1].name == made.brands[0].marketing_sources[0].name == ""


def test_body_is_not_shown_in_a_trace():
    assert repr(read(BODY)) == f"<FetchedReport of account 1001, {len(BODY)} bytes>"


@given(
    st.decimals(-(10**15), 10**15, places=4),
    st.one_of(st.none(), st.decimals(allow_nan=False, allow_infinity=False, min_value=-1, max_value=1, places=20)),
)
def test_figures_are_exact_and_keep_their_decimals(result, adjustment):
    made = report(brand(entry(fees=wire.AmountPair(result, adjustment))))
    fees = read(wire.encode_report(made)).report.brands[0].marketing_sources[0].fees
    assert (str(fees.result), str(fees.adjustment)) == (str(result), str(adjustment))


def test_total_is_exact_and_missing_if_a_part_is():
    least = "0.000000000000000000000000000001"
    assert str(pair("1" * 30, least).total) == "1" * 30 + least[1:]
    assert wire.AmountPair(Decimal(1), None).total is wire.AmountPair(None, Decimal(1)).total is None


# Missing


@each("path", MAY_BE_MISSING)
def test_missing_field_or_null_is_none_and_stays_missing(path):
    body = changed(path)
    made = read(body).report
    assert at(made, path) is None
    assert parsed(wire.encode_report(made)) == parsed(body)
    assert read(changed(path, None)).report == made


@each("path", NEEDED)
@each("is_null", [True, False])
def test_report_without_its_ids_and_period_is_refused(path, is_null):
    with pytest.raises(ReportError, match=re.escape(str(path[-1])) if not is_null else "not a daily report"):
        read(changed(path, None) if is_null else changed(path))


def test_brand_without_marketing_sources_and_report_without_brands_are_read():
    assert read(changed(("brands",), [])).report.brands == []


# Unknown


def test_unknown_fields_are_listed_once_in_the_order_of_their_places():
    document = json.loads(BODY)
    document["markedAt"] = None
    document["reportingPeriod"]["zone"] = "UTC"
    for number in range(3):
        document["brands"].append({"id": number, "name": "x", "extra": {"id": number}, "marketingSources": []})
    for source in document["brands"][0]["marketingSources"]:
        source["fees"]["tax"] = [1]
        source["tier[0]"] = "gold"
    assert read(json.dumps(document).encode()).unknown_fields == (
        "reportingPeriod.zone",
        "brands[].marketingSources[].fees.tax",
        "brands[].marketingSources[].tier[0]",
        "brands[].extra",
        "markedAt",
    )


def test_correct_spelling_of_the_account_field_is_accepted():
    body = BODY.replace(b"affilaiteAccountId", b"affiliateAccountId")
    fetched = read(body)
    assert fetched.report == read(BODY).report
    assert fetched.body == body
    assert fetched.unknown_fields == ()


def test_correct_spelling_keeps_the_figures_exact():
    made = report(brand(entry(fees=pair("0.1000000000000000055"))))
    body = wire.encode_report(made).replace(b"affilaiteAccountId", b"affiliateAccountId")
    assert read(body).report == made


def test_spelling_of_the_service_takes_precedence():
    body = BODY.replace(b'"affilaiteAccountId": 1001', b'"affilaiteAccountId": 1001, "affiliateAccountId": 7')
    assert read(body).report.source.affiliate_account_id == 1001


# Refused


def test_report_of_another_account_is_an_error():
    with pytest.raises(ReportError, match=r"account 7 was requested.* account 1001"):
        read_report(BODY, account_id=7)


@each(
    ("body", "message"),
    [
        *((body, "not JSON") for body in (b"", b"{", b"\xff")),
        (b'{"source":' + b"[" * 100_000, "nested deeper than 200 levels"),
        (b"\n <!doctype html><html></html>", "a web page"),
        *((body, "not a daily report") for body in (b"null", b"[]", b"{}", b'{"source":null}', b'{"source":{}}')),
        (changed(("source",), b"7"), r"not a daily report: .*\$\.source"),
        (b'{"statusCode":404,"message":"Resource not found"}', "not a daily report"),
        (BODY.replace(b'"brands": [', b'"brands": ["'), "not JSON"),
        (BODY[:-40], "not JSON"),
        (changed((*SOURCE, "fees", "result"), []), r"brands\[0\]\.marketingSources\[0\]\.fees\.result"),
        (changed((*SOURCE, "fees"), b"7"), r"brands\[0\]\.marketingSources\[0\]\.fees"),
        (changed((*SOURCE, "fees", "result"), b"NaN"), "not JSON"),
        (changed((*SOURCE, "id"), b"9223372036854775808"), r"brands\[0\]\.marketingSources\[0\]\.id"),
        (changed(("brands", 0, "id"), b'"11"'), r"brands\[0\]\.id"),
        # Decoders silently use the last value of a repeated field. Its name may be written with escapes.
        (BODY.replace(b'"result":', b'"result": 1.0000, "result":'), "'result' more than once"),
        (BODY.replace(b'"result":', rb'"r\u0065sult": 1.0000, "result":'), "'result' more than once"),
        (BODY.replace(b'"brands":', b'"brands": [], "brands":'), "'brands' more than once"),
        (BODY.replace(b"{", b'{"extra": [{"x": 1, "x": 1}], ', 1), "'x' more than once"),
    ],
)
def test_invalid_report_is_refused_with_the_reason(body, message):
    with pytest.raises(ReportError, match=message):
        read(body)


@each("path", FIGURES)
@each("text", [b'"1.0000"', b'"NaN"', b'"Infinity"', b"1e999999999"])
def test_figure_that_is_a_string_or_out_of_range_is_refused_with_its_path(path, text):
    why = "a string" if text.startswith(b'"') else "out of range"
    with pytest.raises(ReportError, match=re.escape(f" $.{dotted(path)} is {why}")):
        read(changed(path, text))


@each("text", [b"1e29", b"1E-30", b"9" * 30, b"-" + b"9" * 30 + b"." + b"9" * 30])
def test_figures_may_have_thirty_digits_on_either_side_of_the_point(text):
    found = read(changed((*SOURCE, "fees", "result"), text)).report
    assert found.brands[0].marketing_sources[0].fees.result == Decimal(text.decode())


@each("text", [b"1e30", b"1E-31", b"0e40", b"1e-999999999", b"1e99999999999999999999", b"9" * 31, b"0." + b"0" * 31])
def test_figures_with_more_digits_are_refused(text):
    with pytest.raises(ReportError, match=r"not a daily report: .*fees\.result"):
        read(changed((*SOURCE, "fees", "result"), text))


# Sources that are listed more than once

EMPTY = wire.MarketingSource(id=50121, name="", reporting_currency="Euro", exchange_rate=Decimal("1.0000"))


def sources(made: wire.DailyReport) -> list[list[wire.MarketingSource]]:
    return [each.marketing_sources for each in made.brands]


@pytest.mark.parametrize("listed", [(entry(), EMPTY), (EMPTY, entry()), (EMPTY, entry(), EMPTY)])
def test_listings_with_and_without_figures_are_one_source(listed: tuple[wire.MarketingSource, ...]):
    found, places = merge_listings(report(brand(*listed, entry(2)), brand(entry(), number=12)))
    assert sources(found) == [[entry(), entry(2)], [entry()]]
    assert places == ("brands[id=11].marketingSources[id=50121]",)


def test_a_source_is_merged_across_listings_of_its_brand():
    found, places = merge_listings(report(brand(EMPTY), brand(entry(2)), brand(entry())))
    assert sources(found) == [[entry()], [entry(2)], []]
    assert places == ("brands[id=11].marketingSources[id=50121]",)


def test_listings_of_different_figures_are_merged():
    money = ("deposits", "net_revenue", "rev_share", "cpa_revenue", "fees", "outgoing_balance")
    counts = entry(**dict.fromkeys(money), reporting_currency=None, exchange_rate=None)
    rest = entry(active_customers=None, conversions=wire.Conversions(), name=None)
    assert sources(merge_listings(report(brand(counts, rest)))[0]) == [[entry()]]


def test_money_keeps_the_currency_that_it_was_listed_with():
    krona = replace(EMPTY, reporting_currency="Swedish Krona", exchange_rate=Decimal("0.0889"))
    for listed in ((krona, entry()), (entry(), krona)):
        assert sources(merge_listings(report(brand(*listed)))[0]) == [[entry()]]


@each(
    "listed",
    [
        (entry(), entry()),
        (entry(), entry(fees=pair("1.0000"))),
        (entry(fees=None), entry(**dict.fromkeys(["conversions", "active_customers", "deposits"]))),
        (
            replace(EMPTY, fees=pair("1")),
            replace(EMPTY, rev_share=pair("1"), reporting_currency="Swedish Krona", exchange_rate=Decimal("0.0889")),
        ),
        (replace(EMPTY, fees=pair("0")), replace(EMPTY, fees=pair("0"))),
    ],
)
def test_listings_with_conflicting_figures_are_not_merged(listed):
    made = report(brand(*listed))
    assert merge_listings(made) == (made, ())


def test_a_report_is_read_with_merged_sources_and_stored_byte_for_byte():
    body = wire.encode_report(report(brand(entry(), EMPTY)))
    fetched = read_report(body, account_id=1001)
    assert fetched.body == body
    assert sources(fetched.report) == [[entry()]]
    assert fetched.merged == ("brands[id=11].marketingSources[id=50121]",)
    assert read_report(wire.encode_report(report(brand(entry()))), account_id=1001).merged == ()


def test_the_time_to_merge_is_linear():
    """With quadratic time this would take an hour."""
    made = report(brand(*[entry()] * 20_000, *[EMPTY] * 20_000))
    assert len(sources(merge_listings(made)[0])[0]) == 20_000
