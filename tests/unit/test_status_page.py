"""The status page: self-contained, with a matching policy, and text never becomes markup."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

import pytest

from shipper.status.admin import page
from shipper.status.live import Live, Pause
from tests.cases import each

SOURCES = {
    each.name: each.read_text("utf-8")
    for each in files(page).iterdir()
    if each.name.rpartition(".")[2] in {"html", "css", "js"}
}
SCRIPT = "".join(text for name, text in SOURCES.items() if name.endswith(".js"))
STYLE = SOURCES["page.css"]


@pytest.fixture
def document() -> str:
    return page.render()[0].decode()


@pytest.fixture
def policy() -> dict[str, str]:
    return dict(each.split(" ", 1) for each in page.render()[1].split("; "))


def test_policy_allows_only_the_script_and_the_style_of_the_page(document: str, policy: dict[str, str]):
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}[^>]*>(.*?)</{element}>", document, re.DOTALL)
        assert len(text) > 1000
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{element}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }


def test_page_has_all_of_its_parts(document: str):
    assert {name for name in SOURCES if name.endswith(".js")} == set(page._SCRIPTS)
    assert "{script}" not in document
    assert "{style}" not in document


def test_page_has_no_network_address(document: str):
    assert set(re.findall(r"\w+://[^\"'\s]*", document)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|@font-face|url\(|<iframe|<img|<script \w", document)
    assert all(not each.startswith("/") for each in re.findall(r'(?:href|src)="([^"]*)"', document))


def test_page_is_small():
    assert len(page.render()[0]) < 60_000


@each("name", SOURCES)
def test_no_source_makes_text_into_markup_or_script(name: str):
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|createContextualFragment|DOMParser|srcdoc"
        r"|\beval\b|new Function|javascript:|\son[a-z]+\s*=|\.on[a-z]+ =|style=",
        SOURCES[name],
    )
    assert found == []


def test_script_and_style_do_not_end_their_element():
    assert not re.search("</|<!--|]]>", SCRIPT + STYLE)


def test_page_without_scripts_links_to_the_same_figures(document: str):
    (text,) = re.findall("<noscript>(.*?)</noscript>", document, re.DOTALL)
    assert set(re.findall('href="([^"]*)"', text)) == {"status", "metrics"}


def test_script_fills_only_existing_elements():
    wanted = set(re.findall(r'(?:fill|getElementById)\(\s*"([\w-]+)"', SCRIPT))
    assert len(wanted) > 10
    assert wanted <= set(re.findall(r'id="([\w-]+)"', SOURCES["page.html"]))


@pytest.mark.parametrize(("name", "kind"), [("live", Live), ("pause", Pause)])
def test_script_reads_only_existing_fields(name: str, kind: type[Live | Pause]):
    read = set(re.findall(rf"\b{name}\.([a-z]\w*)", SCRIPT))
    assert len(read) >= 5
    assert read <= set(kind.__struct_fields__)


# Contrast, as WCAG 2 has it: 4.5 for text, 3 for lines and shapes.

TEXT = [
    *[("ink", back) for back in ("page", "card", "track")],
    *[("muted", back) for back in ("page", "card")],
    *[(state, back) for state in ("good", "busy", "warn", "bad", "off") for back in ("page", f"{state}-back")],
    *[("ink", f"{state}-back") for state in ("good", "busy", "warn", "bad", "off")],
    *[
        ("page", "warn"),
        ("page", "bad"),
        ("bad", "card"),
        ("accent", "page"),
        ("accent", "accent-back"),
        ("c0", "page"),
    ],
]
SHAPES = [(colour, "card") for colour in ("c0", "c1", "c2", "c3")]


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(theme: int):
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", STYLE.split("prefers-color-scheme: dark")[theme]))
    for pairs, least in ((TEXT, 4.5), (SHAPES, 3)):
        for front, back in pairs:
            light, dark = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, (front, back)
