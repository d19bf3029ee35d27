"""The report as a page, in a browser: every figure that it shows is the one of the document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shipper.model import wire
from shipper.report.metrics import CLICKS, METRICS, REGISTRATIONS, added
from shipper.report.page import render_page
from shipper.report.reconcile.page import render_page as reconciled_page
from shipper.report.rows import Fetched, entries_of
from tests.e2e.browser import Browser, Page
from tests.report_documents import HOSTILE_NAMES, fetched, hostile, months
from tests.unit.test_reconcile_forms import made

VOID = {"meta", "link", "br"}


@dataclass
class Element:
    """One element of the tree that the browser made of the page."""

    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str, **attributes: str) -> list[Element]:
        """Find the elements below, in their order."""
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [one for one in self._below() if one.name == name and wanted.items() <= one.attributes.items()]

    def _below(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child._below()

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def figures(self) -> list[Decimal]:
        return [Decimal(one.attributes["value"]) for one in self.all("data")]


class Tree(HTMLParser):
    """Reads what the browser wrote."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.path = [Element("", {})]
        self.feed(dom)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.path[-1].children.append(element)
        if tag not in VOID:
            self.path.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.path[-1].children.append(data)


def browse(browser: Browser, page: str, folder: Path) -> tuple[str, Element]:
    """Open a page, with no way to any network; answers with what the browser made of it, as text and as a tree."""
    path = folder / "report.html"
    path.write_text(page, "utf-8")
    dom = browser.dom_of(path.as_uri())
    return dom, Tree(dom).path[0]


@pytest.fixture(scope="module")
def documents() -> list[Fetched]:
    return months(3)


@pytest.fixture(scope="module")
def seen(browser: Browser, documents: list[Fetched], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Element]:
    return browse(browser, render_page(documents, ["A finding."]), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def dom(seen: tuple[str, Element]) -> Element:
    return seen[1]


def tables(dom: Element) -> dict[str, Element]:
    return {details.all("summary")[0].text: details.all("table")[0] for details in dom.all("details")}


def shown(value: Decimal) -> str:
    """Write a figure as a reader sees it: thousands apart, the sign of minus, all decimals."""
    return f"{value:,f}".replace("-", "\N{MINUS SIGN}")


def rows_of(report: wire.DailyReport) -> Iterator[list[Decimal]]:
    """List the figures that the table of a report has, line by line: results, and adjustments that are not zero."""
    for brand in report.brands:
        for entry in brand.marketing_sources:
            figures = [metric.figure(entry) for metric in METRICS]
            yield [part for pair in figures for part in (pair.result, *([pair.adjustment] if pair.adjustment else []))]


def test_page_has_no_address_of_a_network(seen: tuple[str, Element]):
    dom, tree = seen
    assert set(re.findall(r"https?://[^\"'<\s]*", dom)) <= {"http://www.w3.org/2000/svg"}
    assert not [one for name in ("script", "link", "img", "iframe") for one in tree.all(name)]


def test_tables_have_every_figure_of_every_document(documents: list[Fetched], dom: Element):
    found = tables(dom)
    assert list(found) == [
        *("December 2025", "All 3 periods, Oct 2025 to Dec 2025", "November 2025restated", "October 2025")
    ]
    for item, title in zip(documents, ["October 2025", "November 2025restated", "December 2025"], strict=True):
        lines = found[title].all("tr", class_="source")
        assert [line.figures for line in lines] == list(rows_of(item.report))
        names = [entry.id for entry in entries_of(item.report)]
        assert [int(line.all("th")[0].text.split()[0]) for line in lines] == names


def test_figures_are_shown_with_all_their_decimals(documents: list[Fetched], dom: Element):
    first = documents[-1].report.brands[0].marketing_sources[0]
    texts = [one.text for one in tables(dom)["December 2025"].all("tr", class_="source")[0].all("data")]
    for metric in METRICS:
        result = metric.figure(first).result
        assert result is not None
        assert shown(result) in texts


def test_totals_are_those_of_the_documents(documents: list[Fetched], dom: Element):
    everything = [entry for item in documents for entry in entries_of(item.report)]
    (account,) = tables(dom)["All 3 periods, Oct 2025 to Dec 2025"].all("tr", class_="account")
    expected = []
    for metric in METRICS:
        if metric.is_additive:
            figures = [metric.figure(entry) for entry in everything]
            adjustment = sum(figure.adjustment for figure in figures)
            expected += [sum(figure.result for figure in figures), *([adjustment] if adjustment else [])]
    assert account.figures == expected
    assert len(account.all("td")) == len([metric for metric in METRICS if metric.is_additive])


def test_customers_and_balances_have_no_total(documents: list[Fetched], dom: Element):
    (account,) = tables(dom)["December 2025"].all("tr", class_="account")
    empty = [cell.text == "" for cell in account.all("td")]
    assert empty == [not metric.is_additive for metric in METRICS]


def test_key_figures_are_those_of_the_latest_period(documents: list[Fetched], dom: Element):
    latest, previous = (entries_of(item.report) for item in documents[:-3:-1])
    for metric in METRICS:
        for tile in dom.all("div", id=f"key-{metric.name}"):
            if metric.is_additive:
                now, before = added(metric, latest).total, added(metric, previous).total
                assert now is not None
                assert before is not None
                assert tile.figures[:2] == [now, now - before]
    (balance,) = dom.all("div", id="key-outgoing_balance")
    assert balance.figures[0] == documents[-1].report.outgoing_balance


def test_columns_of_the_charts_are_the_figures_of_the_documents(documents: list[Fetched], dom: Element):
    section = next(one for one in dom.all("section") if one.all("h2")[0].text == "Registrations")
    names = dict(zip(("October 2025", "November 2025", "December 2025"), documents, strict=True))
    titles = {one.all("title")[0].text for one in section.all("rect")}
    assert titles == {
        f"{brand.name}, {title}: {added(REGISTRATIONS, brand.marketing_sources).total:,}"
        for title, item in names.items()
        for brand in item.report.brands
    }


def test_funnel_over_periods_has_clicks_and_registrations_only(documents: list[Fetched], dom: Element):
    latest, over = dom.all("div", class_="funnels")
    for panels, items, steps in ((latest, documents[-1:], 3), (over, documents, 2)):
        for index, panel in enumerate(panels.all("div", class_="panel funnel")):
            entries = [entry for item in items for entry in item.report.brands[index].marketing_sources]
            assert len(panel.all("li")) == steps
            assert panel.figures[:2] == [added(CLICKS, entries).total, added(REGISTRATIONS, entries).total]


def test_names_with_markup_are_text_to_the_browser(browser: Browser, tmp_path: Path):
    _, dom = browse(browser, render_page([fetched(hostile())], HOSTILE_NAMES), tmp_path)
    assert not dom.all("script")
    assert not dom.all("b", onload="x")
    names = [row.all("bdi")[0].text for row in dom.all("tr", class_="head")]
    assert "7  <script>alert(1)</script>" in names
    assert "8  </style><b onload='x'>&amp;" in names
    assert len(names) == len(HOSTILE_NAMES)


# How it is laid out


PAGES = {
    "report": lambda: render_page(months(3), ["2026-10-01 to 2026-10-31: a finding."]),
    "reconciliation": lambda: reconciled_page(made("incomplete"), [], made_at="2026-11-01T08:00:00Z", shows_all=True),
}
NARROW = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth).length"


def laid_out(browser: Browser, name: str, folder: Path, font: str = "") -> Page:
    html = PAGES[name]()
    style = f'<style>body {{ font-family: "{font}" }}</style></head>' if font else "</head>"
    browse(browser, html.replace("</head>", style), folder)
    page = Page(browser)
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
    return page


@pytest.mark.parametrize("font", ["DejaVu Sans", "DejaVu Serif", "Liberation Sans", "sans-serif"])
@pytest.mark.parametrize("name", PAGES)
def test_no_column_is_cut_off_on_a_desktop_in_any_font(name: str, font: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path, font)
    for width in (1280, 1366, 1440, 1920):
        page.lay_out(width=width)
        assert page.run(NARROW) == 0, (width, font)
        ends = "[...document.querySelectorAll('td:last-child')].map(one => getComputedStyle(one).paddingRight)"
        assert set(page.run(ends)) == {"14px"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page_never_scrolls_sideways_but_its_tables_may(name: str, scheme: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path)
    page.lay_out(width=360, scheme=scheme)
    assert page.run("document.documentElement.scrollWidth") <= 360
    is_dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("name", PAGES)
def test_on_paper_all_is_open_white_and_within_the_sheet(name: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path)
    page.run("document.querySelectorAll('details').forEach(one => { one.open = false })")
    page.lay_out(width=1032, media="print", scheme="dark")  # A4 across, without its margins
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    ends = "[...document.querySelectorAll('td:last-child')].map(one => one.getBoundingClientRect())"
    assert page.run(f"Math.max(...{ends}.map(one => one.right))") <= 1032
    assert page.run(f"Math.min(...{ends}.map(one => one.height))") > 0


@pytest.mark.parametrize("name", PAGES)
def test_days_are_written_in_words_as_on_the_status_page(name: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path)
    text = page.text()
    assert not re.search(r"\d{4}-\d\d-\d\d", text), text
    assert re.search(r"\d \w+ 20\d\d, \d\d:\d\d UTC", text), "a moment"
    assert ("7 October 2026" if name == "reconciliation" else "October 2026: a finding.") in text
