"""The pages of the report and of a reconciliation in a browser: their layout, and that names are shown as text."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from shipper.report.page import render_page
from shipper.report.reconcile.page import render_page as reconciled_page
from tests.e2e.browser import Browser, Page
from tests.report_documents import HOSTILE_NAMES, fetched, hostile, months
from tests.unit.test_reconcile_forms import made


def browse(browser: Browser, page: str, folder: Path) -> str:
    """Open a page without network access; return its DOM."""
    path = folder / "report.html"
    path.write_text(page, "utf-8")
    return browser.dom_of(path.as_uri())


def test_names_with_markup_are_shown_as_text(browser: Browser, tmp_path: Path):
    dom = browse(browser, render_page([fetched(hostile())], HOSTILE_NAMES), tmp_path)
    assert set(re.findall(r"https?://[^\"'<\s]*", dom)) <= {"http://www.w3.org/2000/svg", "https://example.com"}
    assert "<script" not in dom
    names = [unescape(name) for name in re.findall(r'<tr class="head"><th[^>]*><bdi>(.*?)</bdi>', dom)]
    assert "7  <script>alert(1)</script>" in names
    assert "8  </style><b onload='x'>&amp;" in names
    assert len(names) == len(HOSTILE_NAMES)


# Layout


PAGES = {
    "report": lambda: render_page(months(3), ["2026-10-01 to 2026-10-31: a finding."]),
    "reconciliation": lambda: reconciled_page(
        replace(made("incomplete"), lists_all=True), [], made_at="2026-11-01T08:00:00Z"
    ),
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
def test_the_page_never_scrolls_sideways_but_its_tables_may(name: str, scheme: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path)
    page.lay_out(width=360, scheme=scheme)
    assert page.run("document.documentElement.scrollWidth") <= 360
    is_dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 23)"
    assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("name", PAGES)
def test_the_printed_page_is_expanded_white_and_within_the_sheet(name: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path)
    page.run("document.querySelectorAll('details').forEach(one => { one.open = false })")
    page.lay_out(width=1032, media="print", scheme="dark")  # A4 landscape without margins
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    ends = "[...document.querySelectorAll('td:last-child')].map(one => one.getBoundingClientRect())"
    assert page.run(f"Math.max(...{ends}.map(one => one.right))") <= 1032
    assert page.run(f"Math.min(...{ends}.map(one => one.height))") > 0


@pytest.mark.parametrize("name", PAGES)
def test_dates_are_formatted_as_on_the_status_page(name: str, browser: Browser, tmp_path: Path):
    page = laid_out(browser, name, tmp_path)
    text = page.text()
    assert not re.search(r"\d{4}-\d\d-\d\d", text), text
    assert re.search(r"\d \w+ 20\d\d, \d\d:\d\d UTC", text), "a moment"
    assert ("7 October 2026" if name == "reconciliation" else "October 2026: a finding.") in text
