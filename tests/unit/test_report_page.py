"""The report as a page: whole by itself, the same each time, and nothing from outside becomes markup."""

from __future__ import annotations

import re
from datetime import date
from decimal import Decimal
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.page import render_page
from shipper.report.page.charts import Column, Series, stacked_columns
from shipper.report.page.markup import tag
from tests.cases import each
from tests.report_documents import HOSTILE_NAMES, brand, entry, fetched, hostile, months, pair, report, seeded

FEBRUARY = {"start": "2026-02-01", "end": "2026-02-28"}
WORDS = re.compile(r"<style>.*?</style>|<[^>]*>", re.DOTALL)


def tile(page: str, name: str) -> str:
    """Cut one of the key figures out of a page."""
    return page.partition(f'id="key-{name}"')[2].partition('class="tile"')[0]


def words(page: str) -> str:
    """Read what a reader reads."""
    return " ".join(WORDS.sub(" ", page).split())


class Tags(HTMLParser):
    """The names of the elements and attributes of a page; all elements are closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.update([tag, *(f"{tag}.{name}" for name, _ in attrs)])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_the_same_for_the_same_reports_in_any_order():
    documents = months(3)
    assert render_page(documents, ["a finding"]) == render_page(documents[::-1], ["a finding"])


@pytest.mark.parametrize(
    "make",
    [lambda: months(3), lambda: months(1), lambda: [fetched(hostile())], lambda: [fetched(report())]],
    ids=["months", "a month", "hostile", "empty"],
)
def test_page_is_well_formed_and_needs_nothing_else(make):
    page = render_page(make(), HOSTILE_NAMES)
    names = Tags(page).names
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "a", "base", "foreignobject"}
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    assert not re.search(r"url\(|@import|@font-face|http", style)
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_page_has_no_address():
    assert not re.search("https?:", render_page(months(3)))


@each("name", HOSTILE_NAMES)
def test_name_from_outside_is_text(name):
    hostile_entry = entry(name=name, reporting_currency=name or "Euro")
    document = replace(
        report(brand(hostile_entry, entry(2), name=name), brand(entry(3), number=12)),
        source=wire.ReportSource(1001, name, name),
        reporting_time=name,
        last_check_sum=name,
        reporting_period=wire.ReportingPeriod(name, name),
        reporting_currency=name,
    )
    page = render_page([fetched(document)], [name])
    quiet = replace(document, source=wire.ReportSource(1001, "quiet", "quiet"))
    assert Tags(page).names == Tags(render_page([fetched(quiet)], ["quiet"])).names
    assert "<script" not in page
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)


def test_head_tells_account_operator_period_currency_and_time():
    text = words(render_page([fetched(report(brand(entry())))]))
    assert "Example Affiliate January 2026 Account 1001 Operator Example Operator Currency Euro" in text
    assert "Made at 2 February 2026, 08:00 UTC Fetched at 2 February 2026, 08:15 UTC" in text


def test_key_figures_tell_the_change_since_the_period_before():
    early = report(brand(entry(fees=pair("-40.0000"))))
    late = report(brand(entry(fees=pair("-50.0000", "0.5000"))), **FEBRUARY)
    text = words(render_page([fetched(early), fetched(late)]))
    assert "Compared with January 2026, which has 31 days and not 28." in text
    minus = "\N{MINUS SIGN}"
    assert f"Fees {minus}49.50 Euro" in text
    assert f"{minus}23.8 %, {minus}9.50 of which adjustments 0.50 all 2 periods {minus}89.50" in text


def test_key_figures_of_unequal_periods_are_not_compared():
    early, late = report(brand(entry())), report(brand(entry(fees=pair("-50"))), start="2026-02-01", end="2026-02-09")
    page = render_page([fetched(early), fetched(late)])
    assert "Not compared with January 2026, which has 31 days and not 9; only the balance is." in words(page)
    assert 'class="change"' not in tile(page, "fees")
    assert 'class="change"' in tile(page, "outgoing_balance")


def test_money_of_two_currencies_stands_side_by_side():
    text = words(render_page([fetched(report(brand(entry(1), entry(2, reporting_currency="Krona"))))]))
    assert "CPA 180.00 Euro 180.00 Krona" in text
    assert "Revenue in Euro" in text
    assert "Revenue in Krona" in text
    assert "360.00" not in text


def test_money_without_a_currency_stands_by_itself():
    brands = [brand(entry(1)), brand(entry(2, reporting_currency=None, cpa_revenue=pair("7")), number=12, name="Other")]
    page = render_page([fetched(report(*brands))])
    _, euro, unnamed = re.split("Revenue in Euro|Revenue, currency not given", words(page))
    assert "CPA Harbour Lights 180.00 Fees" in euro
    assert "CPA Other 7.00 Fees" in unnamed


def test_customers_of_several_sources_are_an_upper_bound():
    text = words(render_page([fetched(report(brand(entry(1), entry(2))))]))
    assert "New depositing customers at most 60" in text
    one = words(render_page([fetched(report(brand(entry(1))))]))
    assert "New depositing customers 30" in one
    assert "at most" not in one


def test_funnel_over_periods_leaves_customers_out_and_says_why():
    text = words(render_page([fetched(report(brand(entry()))), fetched(report(brand(entry()), **FEBRUARY))]))
    latest, over = text.split("All 2 periods, Jan 2026 to Feb 2026")[:2]
    assert "Clicks 5,000 Registrations 430 8.6% of clicks New depositing customers 30" in latest
    assert "one who deposits in two of them would be counted twice" in over
    assert "Clicks 10,000 Registrations 860 8.6% of clicks Revenue in Euro" in over


def test_nothing_is_added_over_periods_that_overlap():
    documents = [fetched(report(brand(entry()))), fetched(report(brand(entry()), start="2026-01-31"))]
    text = words(render_page(documents))
    assert "The periods overlap, so nothing is added over them." in text
    assert "10,000" not in text
    assert "all 2 periods" not in text


@pytest.mark.parametrize("source_currency", ["Euro", None])
def test_money_of_months_in_different_currencies_is_neither_added_nor_compared(source_currency: str | None):
    """Neither if each source says its own currency, nor if it leaves that to the account."""
    sources = brand(entry(reporting_currency=source_currency, exchange_rate=None))
    february = report(sources, **FEBRUARY)
    same, other = (
        render_page([fetched(report(sources)), fetched(replace(february, reporting_currency=name))])
        for name in ("EUR", "Swedish Krona")
    )

    for page in (same, other):
        assert "unchanged" in tile(page, "clicks")
        assert "all 2 periods" in tile(page, "clicks")
    assert ["unchanged" in tile(page, "rev_share") for page in (same, other)] == [True, False]
    assert "678.0" in words(same)
    assert "678.0" not in words(other)
    assert "10,000" in words(other)
    assert "The periods are in several currencies, so money is not added over them." in words(other)


def test_restated_periods_are_marked():
    marked = render_page(months(3))
    assert "Restated November 2025" in words(marked)
    assert words(marked).count("November 2025 restated") == 2  # the figures and the documents
    assert marked.count('class="mark"') == 5  # the charts
    plain = render_page([item._replace(is_restated=False) for item in months(3)])
    assert "estated" not in words(plain)


def test_what_is_missing_is_told_and_not_zero():
    holes = entry(fees=None, conversions=None)
    text = words(render_page([fetched(replace(report(brand(holes)), opening_balance=None, outgoing_balance=None))]))
    assert "Clicks missing" in text
    assert "Fees missing Euro" in text
    assert "Outgoing balance of the account missing" in text
    assert "Figures are missing, or may not be added." in text


def test_everything_may_be_missing():
    nothing = dict.fromkeys(
        (
            *("exchange_rate", "active_customers", "conversions", "deposits", "net_revenue", "rev_share"),
            *("cpa_revenue", "fees", "outgoing_balance"),
        )
    )
    documents = [fetched(report(brand(entry(1, **nothing), entry(2, **nothing)))), fetched(report(**FEBRUARY))]
    assert "missing" in words(render_page(documents))
    assert "missing" in words(render_page(documents[:1]))


def test_report_without_brands_says_so():
    assert "No brand has figures in this period." in words(render_page([fetched(report())]))


def test_findings_stand_at_the_end():
    assert words(render_page(months(2), ["one <b>", "two"])).endswith("Findings one &lt;b&gt; two")
    assert "Findings" not in words(render_page(months(2)))


def test_accounts_follow_each_other():
    page = render_page([fetched(report(brand(entry()))), fetched(report(brand(entry()), account=7))])
    assert page.count("<main>") == 2
    assert re.search("Account 1001 .* Account 7 ", words(page))


def test_brands_beyond_the_busiest_share_a_colour_and_a_series():
    registered = [pair(str(100 + number)) for number in range(10)]
    brands = [
        brand(
            entry(conversions=replace(entry().conversions, registrations=count)), number=number, name=f"Brand {number}"
        )
        for number, count in enumerate(registered, start=1)
    ]
    documents = [fetched(report(*brands)), fetched(report(*brands, **FEBRUARY))]
    legend = re.search('<ul class="legend">(.*?)</ul>', render_page(documents))[1]
    assert words(legend) == "Brand 4 Brand 5 Brand 6 Brand 7 Brand 8 Brand 9 Brand 10 3 other brands"
    assert "3 other brands, January 2026: 303" in render_page(documents)


def test_days_of_a_month_are_drawn_each():
    days = [fetched(seeded(date(2025, 10, day), date(2025, 10, day))) for day in range(1, 32)]
    page = render_page(days)
    titles = set(re.findall(r"Harbour Lights, (\d+ October 2025): ", page))
    assert titles == {f"{day} October 2025" for day in range(1, 32)}
    assert "1 October 2025 to 31 October 2025, 31 periods" in words(page)


# The charts


def chart(*values: list[str | None]) -> list[tuple[str, float, float]]:
    """Draw a chart; answers with title, top and height of every rectangle."""
    series = [
        Series(f"s{index}", f"c{index}", [None if value is None else Decimal(value) for value in row])
        for index, row in enumerate(values)
    ]
    columns = [Column(str(index), str(index), None, False) for index in range(len(values[0]))]
    drawn = stacked_columns(series, columns, str, caption="", labels_max=8)
    return [
        (title, float(top), float(height))
        for top, height, title in re.findall(
            r'<rect [^>]*?y="([^"]*)"[^>]*? height="([^"]*)"[^>]*><title>(.*?)</title>', drawn
        )
    ]


def test_columns_are_as_high_as_their_figures():
    (_, _, whole), (_, _, half) = chart(["100", "50"])
    assert (whole + 1) / (half + 1) == pytest.approx(2, abs=0.01)  # one pixel is the gap


def test_series_are_stacked_upwards_and_what_is_negative_downwards():
    (_, first_top, _), (_, second_top, second_height), (_, third_top, _) = chart(["40"], ["60"], ["-30"])
    assert second_top + second_height + 1 == pytest.approx(first_top, abs=0.02)
    assert third_top > first_top


@each("value", ["0.000001", "1", "99999", "123456789012345678901234567890", "-1", "7.5"])
def test_any_figure_stays_within_the_chart(value):
    ((_, top, height),) = chart([value])
    assert 19 <= top <= top + height <= 212


def test_small_figure_beside_a_large_one_can_be_seen():
    assert [height >= 1.5 for _, _, height in chart(["1", "1000000"])] == [True, True]


def test_zero_and_missing_figures_have_no_column_and_missing_ones_a_mark():
    assert chart(["0", None, "1"]) == chart(["0", "0", "1"])
    column = Column("a", "January", None, False)
    drawn = stacked_columns([Series("s", "c0", [None])], [column], str, caption="", labels_max=8)
    assert "January: a figure is missing, or may not be added" in drawn


def test_markup_escapes_text_and_attributes():
    assert tag("p", "<&>", title="\"'<") == '<p title="&quot;&#x27;&lt;">&lt;&amp;&gt;</p>'
    assert tag("p", tag("b", "x"), None, hidden=None) == "<p><b>x</b></p>"
