"""The links and file names in the documentation exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cases import each

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each("page", PAGES)
def test_every_link_has_a_target(page: Path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@each("page", PAGES)
def test_every_file_of_the_project_that_is_named_exists(page: Path):
    text = page.read_text()
    for path in re.findall(r"`((?:shipper|tests|docs)/[\w./-]*|\w[\w/-]*/[\w.-]+\.(?:py|toml|md))`", text):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "shipper", page.parent)), path


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 170
    assert len(text.encode()) <= 9_216
