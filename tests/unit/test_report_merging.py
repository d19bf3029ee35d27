"""A marketing source that a report lists more than once: with figures and without them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.document import read_report
from shipper.report.merging import merged
from tests.cases import each
from tests.report_documents import brand, entry, pair, report

EMPTY = wire.MarketingSource(id=50121, name="", reporting_currency="Euro", exchange_rate=Decimal("1.0000"))


def sources(made: wire.DailyReport) -> list[list[wire.MarketingSource]]:
    return [each.marketing_sources for each in made.brands]


@pytest.mark.parametrize("listed", [(entry(), EMPTY), (EMPTY, entry()), (EMPTY, entry(), EMPTY)])
def test_a_source_that_is_listed_with_and_without_figures_is_one_source(listed: tuple[wire.MarketingSource, ...]):
    found = merged(report(brand(*listed, entry(2)), brand(entry(), number=12)))
    assert sources(found.report) == [[entry(), entry(2)], [entry()]]
    assert found.places == ("brands[id=11].marketingSources[id=50121]",)


def test_a_source_is_found_again_in_another_listing_of_its_brand():
    found = merged(report(brand(EMPTY), brand(entry(2)), brand(entry())))
    assert sources(found.report) == [[entry()], [entry(2)], []]
    assert found.places == ("brands[id=11].marketingSources[id=50121]",)


def test_listings_of_different_figures_are_put_together():
    money = ("deposits", "net_revenue", "rev_share", "cpa_revenue", "fees", "outgoing_balance")
    counts = entry(**dict.fromkeys(money), reporting_currency=None, exchange_rate=None)
    rest = entry(active_customers=None, conversions=wire.Conversions(), name=None)
    assert sources(merged(report(brand(counts, rest))).report) == [[entry()]]


def test_money_keeps_the_currency_that_it_was_listed_with():
    krona = replace(EMPTY, reporting_currency="Swedish Krona", exchange_rate=Decimal("0.0889"))
    for listed in ((krona, entry()), (entry(), krona)):
        assert sources(merged(report(brand(*listed))).report) == [[entry()]]


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
def test_listings_that_say_two_things_of_one_figure_stay_apart(listed):
    made = report(brand(*listed))
    assert merged(made) == (made, ())


def test_a_report_is_read_with_its_sources_merged_and_kept_to_the_byte():
    body = wire.encode_report(report(brand(entry(), EMPTY)))
    fetched = read_report(body, account_id=1001)
    assert fetched.body == body
    assert sources(fetched.report) == [[entry()]]
    assert fetched.merged == ("brands[id=11].marketingSources[id=50121]",)
    assert read_report(wire.encode_report(report(brand(entry()))), account_id=1001).merged == ()


def test_the_time_to_merge_is_linear():
    """Quadratic, this one would take an hour."""
    made = report(brand(*[entry()] * 20_000, *[EMPTY] * 20_000))
    assert len(sources(merged(made).report)[0]) == 20_000
