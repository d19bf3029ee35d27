"""`--watch`: the same look again and again, drawn over itself in a terminal, one line each elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shipper.cli.status.inputs import stream_lines
from shipper.cli.status.look import Look
from shipper.cli.status.rendering import LISTED, compact, figures, headline, remains

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_HEADS: Final = 3  # lines of the list of inputs that are no input


def watch(look: Callable[[], Look], interval_s: float, as_json: Callable[[Look], str] | None) -> None:
    """
    Show how it stands until Ctrl-C.

    Args:
        as_json: Writes a look as one line; None = for people.
    """
    with suppress(KeyboardInterrupt):
        if as_json is None and sys.stdout.isatty():
            _draw(look, interval_s)
        write = as_json or compact
        while True:
            print(write(look()), flush=True)
            time.sleep(interval_s)


def _draw(look: Callable[[], Look], interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(highlight=False)
    with Screen(console=console, auto_refresh=False) as screen:
        while True:
            screen.update(view(look(), console.width, console.height), refresh=True)
            time.sleep(interval_s)


def view(seen: Look, width: int, height: int) -> Group:
    """Lay it out for a terminal; as many inputs are listed as there is room for."""
    from rich.console import Group
    from rich.text import Text

    top = [Text(line, _colour(seen)) for line in headline(seen)]
    prose = [Text(line) for line in figures(seen)]
    rest = [Text(line) for line in remains(seen)]
    taken = sum(-(-len(text) // width) for text in (*top, *prose, *rest)) + _HEADS
    return Group(*top, *prose, *_table(stream_lines(seen, max(1, min(LISTED, height - taken - 1)))), *rest)


def _colour(seen: Look) -> str:
    if seen.running is None or seen.running.pauses:
        return "red"
    overview = seen.overview
    is_flawed = overview is not None and bool(overview.dead_letters or overview.unreachable_bytes)
    return "yellow" if is_flawed or seen.troubles or seen.unaccepted else "green"


def _table(lines: Iterable[str]) -> list[Text]:
    """Keep a row on one line."""
    from rich.text import Text

    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
