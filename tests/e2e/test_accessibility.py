"""Accessibility of the pages with keyboard and screen reader, as judged by axe-core; `make axe` fetches it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shipper.report.page import render_page
from shipper.report.reconcile.page import render_page as reconciled_page
from tests.e2e.browser import Browser, Page
from tests.report_documents import fetched, hostile, months
from tests.status_page_server import SCENES, StatusServer
from tests.unit.test_reconcile_forms import made

AXE = Path(__file__).parents[2] / ".axe" / "axe.min.js"

pytestmark = pytest.mark.skipif(not AXE.exists(), reason="axe-core is missing: make axe")

_VIOLATIONS = """;axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(
    each => each.id + ": " + each.help + ": " + each.nodes.map(node => node.html).join(" ")))"""


def violations(page: Page) -> list[str]:
    assert page.run("document.body.innerText.length") > 20, "nothing is shown"
    return list(page.run(AXE.read_text() + _VIOLATIONS))


@pytest.fixture(scope="module")
def server() -> Iterator[StatusServer]:
    with StatusServer({}) as server:
        yield server


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
@pytest.mark.parametrize("scene", SCENES)
def test_status_page_has_no_violations(browser: Browser, server: StatusServer, scene: str, width: int, scheme: str):
    server.document, server.history = SCENES[scene]
    assert violations(browser.open(server.url, width=width, scheme=scheme)) == []


def test_status_page_has_no_violations_before_the_first_answer(browser: Browser):
    with StatusServer(SCENES["healthy"][0]) as server:
        server.is_away = True
        assert violations(browser.open(server.url)) == []


PAGES = {
    "report": lambda: render_page(months(3), ["A finding."]),
    "report of hostile names": lambda: render_page([fetched(hostile())], []),
    "reconciliation": lambda: reconciled_page(
        replace(made("differences"), lists_all=True), [], made_at="2026-11-01T08:00:00Z"
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_report_page_has_no_violations(browser: Browser, tmp_path: Path, name: str):
    path = tmp_path / "page.html"
    path.write_text(PAGES[name](), "utf-8")
    browser.dom_of(path.as_uri())
    assert violations(Page(browser)) == []
