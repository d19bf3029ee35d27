"""Publishes the snapshots of a run: at the admin address, to systemd, and in the state directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio

from shipper.state.letters import count_letters
from shipper.status.live import Board, LiveFile
from shipper.status.systemd import Notifier
from shipper.status.watchdog import Watchdog

if TYPE_CHECKING:
    from shipper.config.settings import AdminSettings
    from shipper.status.live import Live
    from shipper.system.work import StuckPlaces


class Publisher(NamedTuple):
    """The receivers of a pipeline's snapshots."""

    board: Board
    notifier: Notifier
    file: LiveFile | None
    watchdog: Watchdog

    def publish(self, live: Live) -> None:
        self.board.publish(live)
        self.notifier.notify(live, stuck=self.watchdog.stuck)
        if self.file is not None:
            self.file.update(live)

    async def keep_current(self) -> None:
        """Update the snapshot file, and the count of dead letters for systemd, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.notifier.count_periodically)
            if self.file is not None:
                tasks.start_soon(self.file.write_periodically)


@contextmanager
def publishing(
    listen: str, directory: Path | None, places: StuckPlaces | None, settings: AdminSettings
) -> Iterator[Publisher]:
    """
    Create a publisher, watch for stuck stages, and serve the admin address.

    Args:
        listen: The admin address; empty = none.
        places: Remembers stuck places; None = nothing does.
    Raises:
        ConfigError: The address cannot be used.
    """
    board = Board()
    watchdog = Watchdog(board, limit_s=settings.stuck_seconds, now=time.monotonic, places=places)
    file = None if directory is None else LiveFile(directory)
    with ExitStack() as stack:
        if places is not None:
            stack.enter_context(places.recording())
        stack.enter_context(watchdog.running())
        if listen:
            from shipper.status.admin.server import serving

            stack.enter_context(
                serving(
                    listen, board, watchdog, directory, hosts=settings.hosts, wall_time=time.time, now=time.monotonic
                )
            )
        if file is not None:
            stack.callback(file.write)
        count = None if directory is None else partial(count_letters, directory)
        yield Publisher(board, Notifier(os.environ, now=time.monotonic, count_letters=count), file, watchdog)
