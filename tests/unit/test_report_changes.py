"""Differences between two versions of a report, and equality of contents."""

from __future__ import annotations

import json
from decimal import Decimal
from random import Random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.changes import Change, diff, is_restated
from shipper.report.content import content_hash
from tests.cases import each
from tests.report_documents import brand, entry, pair, report

AMOUNTS = st.one_of(st.none(), st.sampled_from(["0", "0.0000", "-1.5", "7.25", "100"]).map(Decimal))
PAIRS = st.one_of(st.none(), st.builds(wire.AmountPair, AMOUNTS, AMOUNTS))
ENTRIES = st.builds(
    wire.MarketingSource,
    id=st.integers(1, 3),
    name=st.sampled_from([None, "", "a"]),
    fees=PAIRS,
    conversions=st.one_of(st.none(), st.builds(wire.Conversions, AMOUNTS, PAIRS)),
    outgoing_balance=AMOUNTS,
)
BRANDS = st.builds(
    wire.Brand,
    id=st.integers(1, 3),
    name=st.sampled_from(["", "b"]),
    marketing_sources=st.lists(ENTRIES, max_size=3, unique_by=lambda each: each.id),
)
REPORTS = st.builds(
    lambda brands, opening, check_sum: replace(report(*brands), opening_balance=opening, last_check_sum=check_sum),
    st.lists(BRANDS, max_size=3, unique_by=lambda each: each.id),
    AMOUNTS,
    st.sampled_from(["a", "b"]),
)


def shuffled(made: wire.DailyReport, rng: Random) -> wire.DailyReport:
    brands = [
        replace(each, marketing_sources=rng.sample(each.marketing_sources, len(each.marketing_sources)))
        for each in made.brands
    ]
    return replace(made, id="another", reporting_time="later", brands=rng.sample(brands, len(brands)))


# Differences


def test_changes_are_named_by_ids():
    old = report(brand(entry(1), entry(2)), brand(entry(1), number=12))
    new = report(
        brand(entry(1, fees=pair("-41.4100", "2.0000")), entry(2, conversions=None)),
        brand(entry(1, name="new"), number=12, name="Renamed"),
    )
    new = replace(new, opening_balance=Decimal(11), source=replace(new.source, operator_name="Other"))
    assert [(change.path, change.old, change.new) for change in diff(old, new)] == [
        ("source.operatorName", "Example Operator", "Other"),
        ("openingBalance", Decimal(10), Decimal(11)),
        ("brands[id=11].marketingSources[id=1].fees.adjustment", Decimal(1), Decimal(2)),
        ("brands[id=11].marketingSources[id=2].conversions.clicks", Decimal(5000), None),
        ("brands[id=11].marketingSources[id=2].conversions.qualifiedConversions.result", Decimal(32), None),
        ("brands[id=11].marketingSources[id=2].conversions.qualifiedConversions.adjustment", Decimal(-2), None),
        ("brands[id=11].marketingSources[id=2].conversions.registrations.result", Decimal(433), None),
        ("brands[id=11].marketingSources[id=2].conversions.registrations.adjustment", Decimal(-3), None),
        ("brands[id=12].name", "Harbour Lights", "Renamed"),
        ("brands[id=12].marketingSources[id=1].name", "Source 1", "new"),
    ]


def test_an_added_or_removed_brand_or_source_is_one_change():
    old, new = report(brand(entry(1), entry(2)), brand(number=12)), report(brand(entry(2), entry(3)), brand(number=13))
    assert diff(old, new) == [
        Change("", entry(1), None, 11, 1),
        Change("", None, entry(3), 11, 3),
        Change("", brand(number=12), None, 12),
        Change("", None, brand(number=13), 13),
    ]
    assert [change.path for change in diff(old, new)][::3] == ["brands[id=11].marketingSources[id=1]", "brands[id=13]"]


def test_repeated_ids_are_matched_in_order():
    old, new = report(brand(entry(1), entry(1, name="second"))), report(brand(entry(1), entry(1, name="changed")))
    assert diff(old, new) == [Change("name", "second", "changed", 11, 1)]


def test_zero_is_not_missing():
    old, new = report(brand(entry(fees=pair("0", "0")))), report(brand(entry(fees=None)))
    assert [change.field for change in diff(old, new)] == ["fees.result", "fees.adjustment"]


@settings(max_examples=25)
@given(REPORTS, st.randoms(use_true_random=False))
def test_order_id_and_time_are_no_change(made, rng):
    assert diff(made, shuffled(made, rng)) == []


@settings(max_examples=25)
@given(REPORTS, REPORTS)
def test_changes_backwards_are_the_same_changes(old, new):
    forwards = {(change.path, repr(change.old), repr(change.new)) for change in diff(old, new)}
    assert {(change.path, repr(change.new), repr(change.old)) for change in diff(new, old)} == forwards


# Restatements

ZERO = wire.MarketingSource(id=3, name="new", fees=pair("0", "0"), exchange_rate=Decimal(1))


@each(
    ("old", "new", "says_so"),
    [
        (entry(1), entry(1, fees=pair("-41.4101", "1.0000")), True),
        (entry(1), entry(1, fees=pair("-4141e-2", "1")), False),
        (entry(1), entry(1, fees=None), True),
        (entry(1), entry(1, exchange_rate=Decimal("1.1")), True),
        (entry(1), entry(1, outgoing_balance=Decimal(1)), True),
        (entry(1), entry(1, name="Renamed"), False),
        (entry(1), entry(1, reporting_currency="EUR"), False),
        (entry(1), entry(1, reporting_currency=None), False),
        (entry(1), entry(1, reporting_currency="Swedish Krona"), True),
        (entry(1), entry(2), True),
    ],
)
def test_a_report_is_restated_only_if_a_figure_or_its_currency_differs(old, new, says_so):
    assert is_restated(report(brand(old)), report(brand(new))) is says_so


def test_adding_or_removing_a_source_or_brand_without_figures_is_no_restatement():
    old, new = report(brand(entry(1))), report(brand(entry(1), ZERO), brand(number=12), brand(ZERO, number=13))
    assert len(diff(old, new)) == 3
    assert not is_restated(old, new)
    assert not is_restated(new, old)
    assert is_restated(old, report(brand(entry(1)), brand(entry(1), number=12)))


@each("changes", [{"last_check_sum": "cd" * 32}, {"source": wire.ReportSource(1001, "Renamed")}])
def test_changes_of_only_checksum_or_names_are_no_restatement(changes):
    made = report(brand(entry(1)))
    assert diff(made, replace(made, **changes))
    assert not is_restated(made, replace(made, **changes))


def in_source(fields: str) -> str:
    """Return the content of a report whose source has these fields."""
    return content_hash(b'{"brands":[{"id":1,"marketingSources":[{"id":2,%s}]}]}' % fields.encode())


# Content


@settings(max_examples=25)
@given(REPORTS, REPORTS)
def test_contents_are_equal_if_nothing_differs(old, new):
    hashes = [content_hash(wire.encode_report(each)) for each in (old, new)]
    if hashes[0] == hashes[1]:
        assert diff(old, new) == []
    elif not diff(old, new):
        # What is left is how much is missing: a pair, or the two figures in it.
        assert any(b"{}" in wire.encode_report(each) for each in (old, new))


@settings(max_examples=25)
@given(REPORTS, st.randoms(use_true_random=False))
def test_order_id_and_time_do_not_count_as_content(made, rng):
    other = shuffled(made, rng)
    document = json.loads(wire.encode_report(other), parse_float=Decimal)
    backwards = msgspec.json.Encoder(decimal_format="number").encode(dict(reversed(document.items())))
    bodies = [wire.encode_report(made), wire.encode_report(other), backwards, msgspec.json.format(backwards)]
    assert len(set(bodies)) == 4
    assert len({content_hash(body) for body in bodies}) == 1


def of_extra(value: str) -> str:
    return content_hash(b'{"id":"x","brands":[{"id":1,"extra":%s}]}' % value.encode())


@each(
    ("one", "other"),
    [
        *(("1.5", "1.5000"), ("-0.0000", "0"), ("100", "100.0"), ("1e2", "100.0000"), ("1E+2", "100")),
        *(("-25e-3", "-0.0250"), ("0e5", "0"), ("1e+0002", "100"), ("-0e-5", "0.000")),
    ],
)
def test_the_notation_of_a_value_is_no_content(one, other):
    assert of_extra(one) == of_extra(other)


@each(
    ("one", "other"),
    [
        *(("100", "10"), ("0.1", "0.10000000000000000001"), ("9" * 40, "9" * 39 + "8"), ("1.5", '"1.5"')),
        *(("0", "null"), ("[1,2]", "[2,1]"), ('{"id":"a"}', '{"id":"b"}'), ("1e999999999", "1e999999998")),
        *(("1.5e1000", "1.5e100"), ("1.50E1000", "1.5e1000"), ("1e2", "1e3"), (f"1e{'9' * 5000}", f"1e{'9' * 4999}8")),
    ],
)
def test_values_count_as_content(one, other):
    assert of_extra(one) != of_extra(other)


@each(
    ("one", "other"),
    [
        ('"reportingCurrency":null,"name":"a"', '"name":"a"'),
        ('"name":"\\u0061"', '"name":"a"'),
        ('"fees":{"result":1,"adjustment":null}', '"fees":{"result":1}'),
        ('"fees":{}', '"fees":null'),
        ('"outgoingBalance":1e2', '"outgoingBalance":100.0000'),
    ],
)
def test_missing_null_and_empty_fields_are_the_same_content(one, other):
    assert in_source(one) == in_source(other)


def test_both_spellings_of_the_account_id_are_the_same_content():
    bodies = [b'{"source":{"%s":1001},"brands":[]}' % name for name in (b"affilaiteAccountId", b"affiliateAccountId")]
    assert content_hash(bodies[0]) == content_hash(bodies[1])


REQUESTS = [
    ('"requestId":"0HMVFE0A284AM:00000001"', '"requestId":"0HMVFE0A284AM:00000002"'),
    ('"x-correlation-id":17', '"x-correlation-id":18'),
    ('"ref":"0b0c5c1e-1d3c-4d5e-8f00-000000000001"', '"ref":"0b0c5c1e-1d3c-4d5e-8f00-000000000002"'),
    (f'"trace":"00-{"a" * 32}-{"b" * 16}-01"', f'"trace":"00-{"c" * 32}-{"d" * 16}-01"'),
    (f'"etag":"{"a" * 64}"', f'"etag":"{"b" * 64}"'),
    ('"servedAt":"2026-02-01T08:00:00.1234567Z"', '"servedAt":"2026-02-01T09:00:00+00:00"'),
    ('"meta":{"elapsedMs":12,"links":["x",{"span_id":"q"}]}', '"meta":{"elapsedMs":9,"links":["x",{"span_id":"r"}]}'),
]


@each(("one", "other"), REQUESTS)
def test_ids_and_times_of_the_request_are_never_content(one, other):
    for content in (in_source, lambda fields: content_hash(b'{%s,"brands":[]}' % fields.encode())):
        assert content(one) == content(other)
        assert content(one) != content('"x":1')


@each(
    ("one", "other"),
    [
        ('"note":"a"', '"note":"b"'),
        ('"markedReadyForInvoicingTime":null', '"markedReadyForInvoicingTime":"2026-02-01T08:00:00Z"'),
        ('"bonus":{"result":1}', '"bonus":{"result":2}'),
        ('"name":"0b0c5c1e-1d3c-4d5e-8f00-000000000001"', '"name":"0b0c5c1e-1d3c-4d5e-8f00-000000000002"'),
        (f'"deep":{"[" * 150}1{"]" * 150}', f'"deep":{"[" * 150}2{"]" * 150}'),
    ],
)
def test_other_undocumented_fields_are_content(one, other):
    assert in_source(one) != in_source(other)


def test_only_the_id_and_time_of_the_report_itself_do_not_count():
    bodies = [b'{"id":%d,"reportingTime":%d,"brands":[{"id":1,"reportingTime":1}]}' % each for each in ((1, 1), (2, 2))]
    others = [b'{"brands":[{"id":1,"reportingTime":2}]}', b'{"brands":[{"id":2,"reportingTime":1}]}', b'{"brands":[]}']
    assert len({content_hash(body) for body in bodies}) == 1
    assert len({content_hash(body) for body in [*bodies, *others]}) == 4
