"""Locking the state directory, and opening its store and spool."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shipper.config.settings import Settings
from shipper.model.errors import ConfigError
from shipper.sources.reader import NDJSON, InputForm
from shipper.sources.segments import newest_segment_id
from shipper.sources.spool import Spool
from shipper.sources.stdin import Input
from shipper.state.directory import ACCESS_ADVICE, locked_directory
from shipper.state.store import Store
from shipper.system.permissions import access_problem
from shipper.system.work import StuckPlaces


class OpenState(NamedTuple):
    """A state directory locked by this process."""

    directory: Path
    store: Store
    next_stream_id: Callable[[], int]  # returns an unused id
    has_spool: bool  # whether an earlier process left anything in the spool
    stuck: StuckPlaces  # the places where earlier processes got stuck

    def spool(
        self,
        settings: Settings,
        origin: Input | int | None,
        *,
        wall_time: Callable[[], float],
        form: InputForm = NDJSON,
        give_up_after_s: float = math.inf,
    ) -> Spool:
        """
        Open the spool.

        Args:
            origin: Input to spool: a file descriptor, another input, or None.
            form: Format of the records from a file descriptor.
            give_up_after_s: How long to wait for room on the disk.
        """
        return Spool(
            self.directory / "spool",
            origin,
            settings.spool,
            known=self.store.streams.load("spool"),
            next_stream_id=self.next_stream_id,
            forget=self.store.streams.forget,
            max_record_bytes=settings.input.max_record_bytes,
            wall_time=wall_time,
            give_up_after_s=give_up_after_s,
            form=form,
        )


@contextmanager
def open_state(settings: Settings) -> Iterator[OpenState]:
    """
    Lock and open the state directory.

    Raises:
        ConfigError: The directory cannot be created or written.
        StateInUseError: Another process holds its lock.
        StateError: Its contents are damaged, foreign, or of another version.
    """
    with locked_directory(settings.state.directory) as directory:
        _check_spool(directory / "spool")
        store = Store(
            directory,
            dead_letter_max_bytes=settings.state.dead_letter_max_bytes,
            remembered_ids=settings.records.dedupe_window,
        )
        try:
            newest_segment = newest_segment_id(directory / "spool")
            ids = itertools.count(max(store.streams.newest_id(), newest_segment) + 1)
            stuck = StuckPlaces(directory, limit_s=settings.admin.stuck_seconds)
            yield OpenState(directory, store, ids.__next__, has_spool=bool(newest_segment), stuck=stuck)
        finally:
            store.close()


def _check_spool(spool: Path) -> None:
    """Raise `ConfigError` if this process cannot access the files that an earlier one left in the spool."""
    segments = sorted(spool.iterdir()) if spool.is_dir() and not access_problem(spool) else []
    for path in filter(os.path.lexists, (spool, *segments)):
        if problem := access_problem(path):
            raise ConfigError(f"{problem}. {ACCESS_ADVICE}", key="state.directory")
