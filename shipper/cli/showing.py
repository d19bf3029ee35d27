"""Publishes the snapshots of a run: to systemd, at the admin address, and in the state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shipper.state.letters import letters_kept
from shipper.status.board import Board
from shipper.status.live_file import LiveFile
from shipper.status.systemd import Notifier
from shipper.status.watch import Watch

if TYPE_CHECKING:
    from shipper.config.settings import AdminSettings
    from shipper.state.stuck import StuckPlaces
    from shipper.status.live import Live


class Showing(NamedTuple):
    """The receivers of a pipeline's snapshots."""

    board: Board
    notifier: Notifier
    file: LiveFile | None
    watch: Watch

    def publish(self, live: Live) -> None:
        self.board.publish(live)
        self.notifier.note(live, stuck=self.watch.stuck)
        if self.file is not None:
            self.file.note(live)

    async def keep_current(self) -> None:
        """Keep the snapshot in the state directory, where there is one, and what systemd reads, until cancelled."""
        import anyio

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.notifier.keep_counted)
            if self.file is not None:
                tasks.start_soon(self.file.keep_written)


@contextmanager
def showing(
    listen: str, directory: Path | None, places: StuckPlaces | None, settings: AdminSettings
) -> Iterator[Showing]:
    """
    Show what a pipeline publishes while this is entered, and whether it is stuck.

    Args:
        listen: The admin address; empty = none.
        directory: The state directory; None = there is none.
        places: Remember where it gets stuck.
    Raises:
        ConfigError: The address cannot be had.
    """
    board = Board()
    watch = Watch(board, limit_s=settings.stuck_seconds, now=time.monotonic, places=places)
    file = None if directory is None else LiveFile(directory)
    with ExitStack() as stack:
        if places is not None:
            stack.enter_context(places.watched())
        stack.enter_context(watch.looking())
        if listen:
            from shipper.status.admin.server import serving

            stack.enter_context(
                serving(listen, board, watch, directory, hosts=settings.hosts, wall_time=time.time, now=time.monotonic)
            )
        if file is not None:
            stack.callback(file.write)
        count_letters = None if directory is None else partial(letters_kept, directory)
        notifier = Notifier(os.environ, now=time.monotonic, count_letters=count_letters)
        yield Showing(board, notifier, file, watch)
