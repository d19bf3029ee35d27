"""Every command and option is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from shipper.cli.app import command_line

ROOT = Path(__file__).parents[2]


def words_of(command: Any, name: str) -> Iterator[str]:
    """Yield the command's name and options, then those of the commands below it."""
    if name != "shipper report show":  # typed as `shipper report`
        yield name
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--") and not parameter.hidden)
    for each, below in getattr(command, "commands", {}).items():
        yield from words_of(below, f"{name} {each}")


def test_every_command_and_option_is_documented():
    text = " ".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    words = list(words_of(typer.main.get_command(command_line()), "shipper"))
    assert len(words) > 100
    assert [word for word in words if not re.search(rf"(?<![\w-]){word}(?![\w-])", text)] == []
