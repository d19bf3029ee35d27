"""What a shipper shows of itself while it runs: to systemd, at its admin address, and in its state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shipper.state.live_file import LiveFile
from shipper.telemetry.board import Board
from shipper.telemetry.systemd import Notifier

if TYPE_CHECKING:
    from shipper.telemetry.live import Live


class Showing(NamedTuple):
    """Who is shown the snapshots of a pipeline."""

    board: Board
    notifier: Notifier
    file: LiveFile

    def publish(self, live: Live) -> None:
        """Show a snapshot."""
        self.board.publish(live)
        self.notifier.note(live)
        self.file.note(live)


@contextmanager
def showing(listen: str, directory: Path, *, hosts: Iterable[str]) -> Iterator[Showing]:
    """
    Show what a pipeline publishes while this is entered.

    Args:
        listen: The admin address; empty = none.
        directory: The state directory.
        hosts: Names that requests to it may call it by, beside the usual ones.
    Raises:
        ConfigError: The address cannot be had.
    """
    shown = Showing(Board(now=time.monotonic), Notifier(os.environ, now=time.monotonic), LiveFile(directory))
    with ExitStack() as stack:
        if listen:
            from shipper.admin.server import serving

            stack.enter_context(
                serving(listen, shown.board, directory, hosts=hosts, wall_time=time.time, now=time.monotonic)
            )
        stack.callback(shown.file.write)
        yield shown
