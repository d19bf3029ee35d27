"""Publishes the snapshots of a run: to systemd, at the admin address, and in the state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shipper.status.board import Board
from shipper.status.live_file import LiveFile
from shipper.status.systemd import Notifier
from shipper.status.watch import Watch

if TYPE_CHECKING:
    from shipper.state.stuck import StuckPlaces
    from shipper.status.live import Live


class Showing(NamedTuple):
    """The receivers of a pipeline's snapshots."""

    board: Board
    notifier: Notifier
    file: LiveFile
    watch: Watch

    def publish(self, live: Live) -> None:
        self.board.publish(live)
        self.notifier.note(live, stuck=self.watch.stuck)
        self.file.note(live)


@contextmanager
def showing(listen: str, directory: Path, places: StuckPlaces, *, hosts: Iterable[str]) -> Iterator[Showing]:
    """
    Show what a pipeline publishes while this is entered, and whether it is stuck.

    Args:
        listen: The admin address; empty = none.
        directory: The state directory.
        places: Remember where it gets stuck.
        hosts: Names that requests to it may call it by, beside the usual ones.
    Raises:
        ConfigError: The address cannot be had.
    """
    board = Board()
    watch = Watch(board, limit_s=places.limit_s, now=time.monotonic, places=places)
    shown = Showing(board, Notifier(os.environ, now=time.monotonic), LiveFile(directory), watch)
    with ExitStack() as stack:
        stack.enter_context(places.watched())
        stack.enter_context(watch.looking())
        if listen:
            from shipper.status.admin.server import serving

            stack.enter_context(
                serving(listen, board, watch, directory, hosts=hosts, wall_time=time.time, now=time.monotonic)
            )
        stack.callback(shown.file.write)
        yield shown
