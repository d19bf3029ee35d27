"""Daily reports: an invalid one is an error, and the figures of a valid one are read exactly."""

from __future__ import annotations

import json
from datetime import date
from decimal import Context, Decimal, InvalidOperation, localcontext
from typing import Any, Final

from msgspec.structs import replace

from shipper.model import wire
from shipper.model.errors import ReportError
from shipper.report.checks import check_opening_balance, check_report
from shipper.report.content import content_hash
from shipper.report.document import FetchedReport, read_report
from shipper.report.formatting import period
from shipper.report.ranges import DateRange
from shipper.report.rows import ReportVersion, account_table, source_table
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator
from tests.report_documents import brand, entry, hostile, report

_ACCOUNT: Final = 1001
_DAYS: Final = DateRange(date(2026, 1, 1), date(2026, 1, 31))
_EXACT: Final = Context(prec=200)


def check_document(data: bytes) -> object:
    """Check that the result is a report with its rows, or an error; no figure is rounded or invented."""
    try:
        fetched = read_report(data, account_id=_ACCOUNT)
    except ReportError as error:
        return str(error).partition("`")[0][:60]
    document = json.loads(data.decode("utf-8-sig", "replace"), parse_float=_number, parse_int=_number)
    assert fetched.report.source.affiliate_account_id == _ACCOUNT
    _check_figures(fetched, document)
    _check_rows(fetched, document)
    return len(fetched.unknown_fields), len(fetched.report.brands), fetched.report.opening_balance is None


def _number(text: str) -> Decimal | str:
    try:
        return Decimal(text)
    except InvalidOperation:
        return text  # an exponent too large for Decimal, in an unknown field


def _check_figures(fetched: FetchedReport, document: dict[str, Any]) -> None:
    report = fetched.report
    _assert_same(report.opening_balance, document.get("openingBalance"))
    _assert_same(report.outgoing_balance, document.get("outgoingBalance"))
    assert len(report.brands) == len(document["brands"])
    if fetched.merged:  # then its sources do not correspond to those of the document
        return
    for read, written in zip(report.brands, document["brands"], strict=True):
        assert read.id == written["id"]
        for source, raw in zip(read.marketing_sources, written["marketingSources"], strict=True):
            _assert_same(source.exchange_rate, raw.get("exchangeRate"))
            _assert_same(source.outgoing_balance, raw.get("outgoingBalance"))
            for name, pair in (
                ("netRevenue", source.net_revenue),
                ("fees", source.fees),
                ("revShare", source.rev_share),
            ):
                figures = raw.get(name)
                assert (pair is None) == (figures is None)
                if pair is not None:
                    _assert_same(pair.result, figures.get("result"))
                    _assert_same(pair.adjustment, figures.get("adjustment"))


def _assert_same(read: Decimal | None, written: Decimal | None) -> None:
    assert (read is None) == (written is None)
    if read is not None and written is not None:
        assert read.is_finite()
        assert read == written, "a digit is lost or invented"
        assert read.as_tuple().exponent == written.as_tuple().exponent, "the number of decimals has changed"


def _check_rows(fetched: FetchedReport, document: dict[str, Any]) -> None:
    report = fetched.report
    sources = source_table([ReportVersion(report)])
    accounts = account_table([ReportVersion(report)])
    listed = sum(len(each["marketingSources"]) for each in document["brands"])
    assert len(sources.rows) <= listed - len(fetched.merged)
    assert fetched.merged or len(sources.rows) == listed
    assert len(accounts.rows) == 1
    for table in (sources, accounts):
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all(value.is_finite() for row in table.rows for value in row if isinstance(value, Decimal))
    names = [column.name for column in sources.columns]
    with localcontext(_EXACT):
        for row in sources.rows:
            values = dict(zip(names, row, strict=True))
            if values["fees_result"] is not None and values["fees_adjustment"] is not None:
                assert values["fees_total"] == values["fees_result"] + values["fees_adjustment"]
    assert len(content_hash(fetched.body)) == 64
    assert read_report(wire.encode_report(report), account_id=_ACCOUNT).report == report, (
        "the report differs after a round trip"
    )
    findings = check_report(report, requested=_DAYS, earlier_version=replace(report, id="x"))
    for finding in [*findings, check_opening_balance(report, report)]:
        assert finding.check
        assert finding.message
    period(report.reporting_period)


_SEEDS: Final = [
    wire.encode_report(report(brand(entry()), brand(entry(7), entry(8, fees=None), number=12))),
    wire.encode_report(report()),
    b"\xef\xbb\xbf" + wire.encode_report(report(brand(entry(fees=None), entry(conversions=None, fees=None)))),
    wire.encode_report(report(brand(entry(), wire.MarketingSource(id=50121)), brand(wire.MarketingSource(id=50121)))),
    wire.encode_report(replace(hostile(), brands=hostile().brands[:3])),
    wire.encode_report(report(brand(entry()))).replace(b"affilaiteAccountId", b"affiliateAccountId"),
    b"<html>", b"{}", b"[]", b'{"source":{"affilaiteAccountId":1001}}',
]  # fmt: skip
_NUMBERS: Final = (
    *(b"0.1", b"-0.0000", b"1e5", b"1E-20", b"1e999999999", b"-1e-999999999", b"9" * 30, b"9" * 31, b"0." + b"3" * 31),
    *(
        b"1.50000",
        b"123456789012345678901234567890.123456789012345678901234567890",
        b"00",
        b"-",
        b'"1.5"',
        b"NaN",
        b"null",
    ),
)
_MUTATE: Final = mutator(
    words=[
        *(b":" + number + b"," for number in _NUMBERS),
        *_NUMBERS,
        b'"x":{"y":[1]},',
        b"1001",
        b"{}",
        b",",
        b"\xff",
        b"[" * 980 + b"]" * 980,
        b"\\ud800",
    ],
    values=[
        *(1001, 2**63, -(2**63), 1.5, "1.5", "NaN", "2026-01-31T23:59:59", "2026-01-32", "9999-12-31T23:59:59"),
        "Euro",
    ],
    names=[
        *("id", "brands", "marketingSources", "source", "affilaiteAccountId", "affiliateAccountId", "fees", "result"),
        *("adjustment", "netRevenue", "revShare", "exchangeRate", "openingBalance", "outgoingBalance", "name", "extra"),
        *("reportingPeriod", "start", "end", "conversions", "clicks", "deposits", "reportingCurrency", "lastCheckSum"),
    ],
)

TARGETS: Final = (Target("reports", check_document, _SEEDS, _MUTATE, share=3),)
