"""docs/settings.md lists every setting as its type has it; `python -m tests.unit.test_docs_settings` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shipper.cli.config import toml_value
from shipper.config.schema import Leaf, expectation, leaves
from shipper.config.settings import EndpointSettings, Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
OF_INTAKE = {leaf.key for leaf in leaves(EndpointSettings)}
PLACE = re.compile(r"(<!-- settings: [^\n]*-->\n).*(<!-- end of settings -->)", re.DOTALL)


def shown_default(leaf: Leaf) -> str:
    if leaf.key == "state.directory":
        return "`/var/lib/shipper`, `~/.local/state/shipper`"
    if leaf.default is msgspec.NODEFAULT:
        return "needed"
    return "" if leaf.default is None else f"`{toml_value(leaf.default)}`"


def rows() -> Iterator[str]:
    yield "| Key | Default | Values | |"
    yield "|---|---|---|---|"
    for leaf in leaves(Settings):
        if leaf.key.startswith("report.") and leaf.key.removeprefix("report.") in OF_INTAKE:
            continue
        bounds = leaf.bounds
        limits = expectation(leaf) if leaf.choices or (bounds.ge, bounds.gt, bounds.le) != (None, None, None) else ""
        yield f"| `{leaf.key}` | {shown_default(leaf)} | {limits} | {leaf.meta.description} |"


def table() -> str:
    return "\n" + "\n".join(rows()) + "\n\n`[report]` has the keys of `[intake]`, too, for the daily report.\n\n"


def test_the_page_lists_every_setting_as_it_is():
    found = PLACE.search(PAGE.read_text())
    assert found
    assert found[0] == f"{found[1]}{table()}{found[2]}", "write it anew: python -m tests.unit.test_docs_settings"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda found: f"{found[1]}{table()}{found[2]}", PAGE.read_text()))
