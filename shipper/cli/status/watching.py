"""`--watch`: repeats the status, in place in a terminal, as one line each elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shipper.cli.status.rendering import LISTED, compact, figures, headline, remains, stream_lines
from shipper.status.headline import headline_of
from shipper.status.snapshot import Snapshot

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_COLOURS: Final = {"good": "green", "busy": "green", "warn": "yellow"}  # all else is red
_HEADS: Final = 3  # lines of the list of inputs that are no input


def watch(
    look: Callable[[], Snapshot], interval_s: float, options: str, as_json: Callable[[Snapshot], str] | None
) -> None:
    """
    Show how it stands until Ctrl-C.

    Args:
        options: As for `report`.
        as_json: Writes a look as one line; None = for people.
    """
    with suppress(KeyboardInterrupt):
        if as_json is None and sys.stdout.isatty():
            _draw(look, interval_s, options)
        write = as_json or compact
        while True:
            print(write(look()), flush=True)
            time.sleep(interval_s)


def _draw(look: Callable[[], Snapshot], interval_s: float, options: str) -> None:
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(highlight=False)
    with Screen(console=console, auto_refresh=False) as screen:
        while True:
            screen.update(view(look(), console.width, console.height, options), refresh=True)
            time.sleep(interval_s)


def view(seen: Snapshot, width: int, height: int, options: str = "") -> Group:
    """Lay out a snapshot for a terminal; as many inputs are listed as there is room for."""
    from rich.console import Group
    from rich.text import Text

    top = [Text(line, _COLOURS.get(headline_of(seen).state, "red")) for line in headline(seen)]
    prose = [Text(line) for line in figures(seen)]
    rest = [Text(line) for line in remains(seen, options)]
    taken = sum(-(-len(text) // width) for text in (*top, *prose, *rest)) + _HEADS
    return Group(*top, *prose, *_table(stream_lines(seen, max(1, min(LISTED, height - taken - 1)))), *rest)


def _table(lines: Iterable[str]) -> list[Text]:
    from rich.text import Text

    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
