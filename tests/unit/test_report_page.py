"""The report as a page: self-contained, reproducible, and foreign text never becomes markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import partial
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.metrics import CLICKS, METRICS, REGISTRATIONS, sum_of
from shipper.report.page import render_page
from shipper.report.page.charts import Bar, Segment, bar_chart
from shipper.report.page.markup import tag
from shipper.report.rows import ReportVersion, entries_of
from tests.cases import each
from tests.report_documents import HOSTILE_NAMES, brand, entry, fetched, hostile, months, pair, report, seeded

FEBRUARY = {"start": "2026-02-01", "end": "2026-02-28"}
WORDS = re.compile(r"<style>.*?</style>|<rect.*?</rect>|<[^>]*>", re.DOTALL)


def tile(page: str, name: str) -> str:
    """Return one of the key figures of a page."""
    return page.partition(f'id="key-{name}"')[2].partition('class="tile"')[0]


def words(page: str) -> str:
    """Return the visible text."""
    return " ".join(WORDS.sub(" ", page).split())


@dataclass
class Element:
    """One element of the page."""

    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str, **attributes: str) -> list[Element]:
        """Find the elements below, in their order."""
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [one for one in self.below() if one.name == name and wanted.items() <= one.attributes.items()]

    def below(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child.below()

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def figures(self) -> list[Decimal]:
        return [Decimal(one.attributes["value"]) for one in self.all("data")]


class Tree(HTMLParser):
    """The elements of a page; all of them are closed in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._path = [self.root]
        self.feed(page)
        self.close()
        assert self._path == [self.root]

    @property
    def names(self) -> set[str]:
        """The names of all elements and attributes."""
        elements = list(self.root.below())
        return {name for one in elements for name in (one.name, *(f"{one.name}.{key}" for key in one.attributes))}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self._path.append(self._path[-1].children[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._path[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._path.pop().name == tag

    def handle_data(self, data: str) -> None:
        self._path[-1].children.append(data)


def test_page_is_the_same_for_the_same_reports_in_any_order():
    documents = months(3)
    assert render_page(documents, ["a finding"]) == render_page(documents[::-1], ["a finding"])


@each("documents", [partial(months, 3), partial(months, 1), lambda: [fetched(hostile())], lambda: [fetched(report())]])
def test_page_is_well_formed_and_self_contained(documents):
    page = render_page(documents(), HOSTILE_NAMES)
    names = Tree(page).names
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "a", "base", "foreignobject"}
    style = re.search("<style>(.*?)</style>", page, re.DOTALL)[1]
    assert not re.search(r"url\(|@import|@font-face|http", style)
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert not re.search("https?:", render_page(months(3)))


@each("name", HOSTILE_NAMES)
def test_foreign_name_is_shown_as_text(name):
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
    assert Tree(page).names == Tree(render_page([fetched(quiet)], ["quiet"])).names
    assert "<script" not in page
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page)


def test_head_has_account_operator_period_currency_and_time():
    text = words(render_page([fetched(report(brand(entry())))]))
    assert "Example Affiliate January 2026 Account 1001 Operator Example Operator Currency Euro" in text
    assert "Generated at 2 February 2026, 08:00 UTC Fetched at 2 February 2026, 08:15 UTC" in text


def test_key_figures_have_the_change_since_the_period_before():
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
    assert "Only the balance is compared with January 2026, which has 31 days and not 9." in words(page)
    assert 'class="change"' not in tile(page, "fees")
    assert 'class="change"' in tile(page, "outgoing_balance")


def test_money_of_two_currencies_is_shown_side_by_side():
    text = words(render_page([fetched(report(brand(entry(1), entry(2, reporting_currency="Krona"))))]))
    assert "CPA 180.00 Euro 180.00 Krona" in text
    assert "Revenue in Euro" in text
    assert "Revenue in Krona" in text
    assert "360.00" not in text


def test_money_without_a_currency_is_shown_separately():
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


def test_conversions_over_periods_exclude_customers_with_the_reason():
    text = words(render_page([fetched(report(brand(entry()))), fetched(report(brand(entry()), **FEBRUARY))]))
    latest, note, over = text.split("All 2 periods, Jan 2026 to Feb 2026")[:3]
    assert "of registrations Harbour Lights 5,000 430 8.6% 30 7.0%" in latest
    assert "a customer who deposits in two periods would be counted twice" in note
    assert "Clicks Registrations of clicks Harbour Lights 10,000 860 8.6% Revenue in Euro" in over


def test_nothing_is_added_over_periods_that_overlap():
    documents = [fetched(report(brand(entry()))), fetched(report(brand(entry()), start="2026-01-31"))]
    text = words(render_page(documents))
    assert "The periods overlap, so their figures are not added up." in text
    assert "10,000" not in text
    assert "all 2 periods" not in text


@each("source_currency", ["Euro", None])
def test_money_of_months_in_different_currencies_is_neither_added_nor_compared(source_currency: str | None):
    """This applies to sources with a currency of their own, and to those with the account's currency."""
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
    assert "The periods have different currencies, so amounts are not added up." in words(other)


def test_restated_periods_are_marked():
    marked = render_page(months(3))
    assert "Restated November 2025" in words(marked)
    assert words(marked).count("November 2025 restated") == 2  # the figures and the documents
    assert marked.count('class="mark"') == 5  # the charts
    plain = render_page([item._replace(is_restated=False) for item in months(3)])
    assert "estated" not in words(plain)


def test_missing_figures_are_shown_as_missing_and_not_as_zero():
    holes = entry(fees=None, conversions=None)
    text = words(render_page([fetched(replace(report(brand(holes)), opening_balance=None, outgoing_balance=None))]))
    assert "Clicks missing" in text
    assert "Fees missing Euro" in text
    assert "Outgoing balance of the account missing" in text
    assert "Figures are missing or cannot be added." in text


def test_everything_may_be_missing():
    names = (
        "exchange_rate active_customers conversions deposits net_revenue rev_share cpa_revenue fees outgoing_balance"
    )
    nothing = dict.fromkeys(names.split())
    documents = [fetched(report(brand(entry(1, **nothing), entry(2, **nothing)))), fetched(report(**FEBRUARY))]
    assert "missing" in words(render_page(documents))
    assert "missing" in words(render_page(documents[:1]))
    assert "No brand has figures in this period." in words(render_page(documents[1:]))


def test_findings_are_at_the_end():
    assert words(render_page(months(2), ["one <b>", "two"])).endswith("Findings one &lt;b&gt; two")
    assert "Findings" not in words(render_page(months(2)))


def test_accounts_follow_each_other():
    page = render_page([fetched(report(brand(entry()))), fetched(report(brand(entry()), account=7))])
    assert page.count("<main>") == 2
    assert re.search("Account 1001 .* Account 7 ", words(page))


def test_all_but_the_busiest_brands_share_a_colour_and_a_series():
    sources = [entry(conversions=wire.Conversions(registrations=pair(str(100 + number)))) for number in range(10)]
    brands = [brand(one, number=number, name=f"Brand {number}") for number, one in enumerate(sources, start=1)]
    documents = [fetched(report(*brands)), fetched(report(*brands, **FEBRUARY))]
    legend = re.search('<ul class="legend">(.*?)</ul>', render_page(documents))[1]
    assert words(legend) == "Brand 4 Brand 5 Brand 6 Brand 7 Brand 8 Brand 9 Brand 10 3 other brands"
    assert "3 other brands, January 2026: 303" in render_page(documents)


def test_each_day_of_a_month_is_drawn():
    days = [fetched(seeded(date(2025, 10, day), date(2025, 10, day))) for day in range(1, 32)]
    page = render_page(days)
    titles = set(re.findall(r"Harbour Lights, (\d+ October 2025): ", page))
    assert titles == {f"{day} October 2025" for day in range(1, 32)}
    assert "1 October 2025 to 31 October 2025, 31 periods" in words(page)


# Every figure is the one of the document


@pytest.fixture(scope="module")
def documents() -> list[ReportVersion]:
    return months(3)


@pytest.fixture(scope="module")
def dom(documents: list[ReportVersion]) -> Element:
    return Tree(render_page(documents, ["A finding."])).root


def tables(dom: Element) -> dict[str, Element]:
    return {details.all("summary")[0].text: details.all("table")[0] for details in dom.all("details")}


def shown(value: Decimal) -> str:
    """Format a figure like the page: with thousands separators, minus sign and all decimals."""
    return f"{value:,f}".replace("-", "\N{MINUS SIGN}")


def rows_of(report: wire.DailyReport) -> Iterator[list[Decimal]]:
    """List the figures that the table of a report has, line by line: results, and adjustments that are not zero."""
    for source in entries_of(report):
        figures = [metric.figure(source) for metric in METRICS]
        yield [part for figure in figures for part in (figure.result, figure.adjustment or None) if part is not None]


def test_tables_have_every_figure_of_every_document(documents: list[ReportVersion], dom: Element):
    found = tables(dom)
    over = "All 3 periods, Oct 2025 to Dec 2025"
    assert list(found) == ["December 2025", over, "November 2025restated", "October 2025"]
    for item, title in zip(documents, ["October 2025", "November 2025restated", "December 2025"], strict=True):
        lines = found[title].all("tr", class_="source")
        assert [line.figures for line in lines] == list(rows_of(item.report))
        names = [entry.id for entry in entries_of(item.report)]
        assert [int(line.all("th")[0].text.split()[0]) for line in lines] == names


def test_figures_are_shown_with_all_their_decimals(documents: list[ReportVersion], dom: Element):
    first = documents[-1].report.brands[0].marketing_sources[0]
    texts = [one.text for one in tables(dom)["December 2025"].all("tr", class_="source")[0].all("data")]
    for metric in METRICS:
        result = metric.figure(first).result
        assert shown(result) in texts


def test_totals_are_those_of_the_documents(documents: list[ReportVersion], dom: Element):
    everything = [entry for item in documents for entry in entries_of(item.report)]
    (account,) = tables(dom)["All 3 periods, Oct 2025 to Dec 2025"].all("tr", class_="account")
    expected = []
    additive = [metric for metric in METRICS if metric.is_additive]
    for metric in additive:
        figures = [metric.figure(entry) for entry in everything]
        adjustment = sum(figure.adjustment for figure in figures)
        expected += [sum(figure.result for figure in figures), *([adjustment] if adjustment else [])]
    assert account.figures == expected
    assert len(account.all("td")) == len(additive)


def test_customers_and_balances_have_no_total(documents: list[ReportVersion], dom: Element):
    (account,) = tables(dom)["December 2025"].all("tr", class_="account")
    empty = [cell.text == "" for cell in account.all("td")]
    assert empty == [not metric.is_additive for metric in METRICS]


def test_key_figures_are_those_of_the_latest_period(documents: list[ReportVersion], dom: Element):
    latest, previous = (entries_of(item.report) for item in documents[:-3:-1])
    for metric in METRICS:
        for tile in dom.all("div", id=f"key-{metric.name}"):
            if metric.is_additive:
                now, before = sum_of(metric, latest).total, sum_of(metric, previous).total
                assert tile.figures[:2] == [now, now - before]
    (balance,) = dom.all("div", id="key-outgoing_balance")
    assert balance.figures[0] == documents[-1].report.outgoing_balance


def test_bars_of_the_charts_are_the_figures_of_the_documents(documents: list[ReportVersion], dom: Element):
    section = next(one for one in dom.all("section") if one.all("h2")[0].text == "Registrations")
    names = dict(zip(("October 2025", "November 2025", "December 2025"), documents, strict=True))
    titles = {one.all("title")[0].text for one in section.all("rect")}
    assert titles == {
        f"{brand.name}, {title}: {sum_of(REGISTRATIONS, brand.marketing_sources).total:,}"
        for title, item in names.items()
        for brand in item.report.brands
    }


def test_conversions_over_periods_are_of_clicks_and_registrations_only(documents: list[ReportVersion], dom: Element):
    section = next(one for one in dom.all("section") if one.all("h2")[0].text == "From click to customer")
    latest, over = section.all("tbody")
    for table, items, columns in ((latest, documents[-1:], 5), (over, documents, 3)):
        for index, line in enumerate(table.all("tr")):
            entries = [entry for item in items for entry in item.report.brands[index].marketing_sources]
            assert len(line.all("td")) == columns
            assert line.figures[:2] == [sum_of(CLICKS, entries).total, sum_of(REGISTRATIONS, entries).total]


# The charts


def chart(*values: list[str | None]) -> list[tuple[str, float, float]]:
    """Draw a bar for each position of the lists; return title, left end and width of every rectangle, in percent."""

    def segment(number: int, value: str | None) -> Segment:
        return Segment(f"s{number}", f"c{number}", None if value is None else Decimal(value))

    bars = [
        Bar(str(index), str(index), [segment(number, value) for number, value in enumerate(bar)], None)
        for index, bar in enumerate(zip(*values, strict=True))
    ]
    rectangle = r'<rect [^>]*?x="([^"]*)%"[^>]*? width="([^"]*)%"[^>]*><title>(.*?)</title>'
    found = re.findall(rectangle, bar_chart(bars, REGISTRATIONS))
    return [(title, float(left), float(width)) for left, width, title in found]


def test_positive_figures_are_stacked_to_the_right_and_negative_ones_to_the_left():
    (_, first_left, first_width), (_, second_left, _), (_, third_left, third_width) = chart(["40"], ["60"], ["-30"])
    assert first_left + first_width == pytest.approx(second_left, abs=0.002)
    assert third_left + third_width == pytest.approx(first_left, abs=0.002)


@each("value", ["0.000001", "1", "99999", "123456789012345678901234567890", "-1", "7.5"])
def test_any_figure_stays_within_the_chart(value):
    ((_, left, width),) = chart([value])
    assert 0 <= left <= left + width <= 100


def test_bar_lengths_are_proportional_to_the_figures_but_a_small_figure_is_visible():
    (_, _, whole), (_, _, half) = chart(["100", "50"])
    assert whole / half == pytest.approx(2, abs=0.001)
    assert [width >= 0.5 for _, _, width in chart(["1", "1000000"])] == [True, True]


def test_zero_and_missing_figures_have_no_bar_and_missing_ones_a_mark():
    assert chart(["0", None, "1"]) == chart(["0", "0", "1"])
    drawn = bar_chart([Bar("a", "January", [Segment("s", "c0", None)], None)], REGISTRATIONS)
    assert "January: a figure is missing or cannot be added" in drawn


def test_markup_escapes_text_and_attributes():
    assert tag("p", "<&>", title="\"'<") == '<p title="&quot;&#x27;&lt;">&lt;&amp;&gt;</p>'
    assert tag("p", tag("b", "x"), None, hidden=None) == "<p><b>x</b></p>"
