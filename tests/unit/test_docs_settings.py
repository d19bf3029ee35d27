"""docs/settings.md lists every setting as its type defines it; `make docs` writes the page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from shipper.cli.config import toml_value
from shipper.config.schema import Leaf, expectation, leaves
from shipper.config.settings import EndpointSettings, Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
OF_INTAKE = {leaf.key for leaf in leaves(EndpointSettings)}
HEAD = """# Every setting

This page is generated from the types of the settings: `make docs` writes it. `shipper config init` writes the same as
a commented settings file. [Configuration](configuration.md) explains where settings come from.
"""
REPORT = "The keys of `[intake]` for the service of the daily report, and:\n\n"


def shown_default(leaf: Leaf) -> str:
    if leaf.key == "state.directory":
        return "`/var/lib/shipper`, `~/.local/state/shipper`"
    if leaf.default is msgspec.NODEFAULT:
        return "required"
    return "" if leaf.default is None else f"`{toml_value(leaf.default)}`"


def rows(section: str) -> Iterator[str]:
    yield "| Key | Default | Values | Meaning |"
    yield "|---|---|---|---|"
    for leaf in leaves(Settings):
        name, _, key = leaf.key.partition(".")
        if name != section or (section == "report" and key in OF_INTAKE):
            continue
        bounds = leaf.bounds
        limits = expectation(leaf) if leaf.choices or (bounds.ge, bounds.gt, bounds.le) != (None, None, None) else ""
        yield f"| `{leaf.key}` | {shown_default(leaf)} | {limits} | {leaf.meta.description} |"


def page() -> str:
    sections = [name for name, _ in groupby(leaf.key.partition(".")[0] for leaf in leaves(Settings))]
    tables = (
        f"## [{section}]\n\n{REPORT if section == 'report' else ''}" + "\n".join(rows(section)) for section in sections
    )
    return HEAD + "".join(f"\n{table}\n" for table in tables)


def test_the_page_lists_every_setting_as_it_is():
    assert PAGE.read_text() == page(), "write it anew: make docs"


if __name__ == "__main__":
    PAGE.write_text(page())
