"""Lock the state directory; open store and spool."""

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
from shipper.sources.segments import youngest_segment_id
from shipper.sources.spool import Input, Spool
from shipper.state.directory import ACCESS_ADVICE, locked_directory
from shipper.state.store import Store
from shipper.state.stuck import StuckPlaces
from shipper.system.permissions import obstacle


class OpenState(NamedTuple):
    """
    A state directory that is this process's.

    Attributes:
        next_stream_id: Gives an id that was never given.
        has_spool: Whether an earlier process has left something in the spool.
        stuck: Where earlier processes got stuck.
    """

    directory: Path
    store: Store
    next_stream_id: Callable[[], int]
    has_spool: bool
    stuck: StuckPlaces

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
            origin: What fills it: a descriptor, another input, or nothing.
            wall_time: Seconds since the epoch.
            form: How records lie in what comes from a descriptor.
            give_up_after_s: How long to wait for room on the disk.
        """
        return Spool(
            self.directory / "spool",
            origin,
            known=self.store.streams.known("spool"),
            next_stream_id=self.next_stream_id,
            forget=self.store.streams.forget,
            max_record_bytes=settings.input.max_record_bytes,
            max_bytes=settings.spool.max_bytes,
            segment_bytes=settings.spool.segment_bytes,
            fsync=settings.spool.fsync,
            fsync_interval_s=settings.spool.fsync_interval_seconds,
            wall_time=wall_time,
            give_up_after_s=give_up_after_s,
            form=form,
        )


def _check_spool(spool: Path) -> None:
    """Refuse to pass over what an earlier process has left where this one may not look."""
    segments = sorted(spool.iterdir()) if spool.is_dir() and not obstacle(spool) else []
    for path in filter(os.path.lexists, (spool, *segments)):
        if why := obstacle(path):
            raise ConfigError(f"{why}. {ACCESS_ADVICE}", key="state.directory")


@contextmanager
def opened_state(settings: Settings) -> Iterator[OpenState]:
    """
    Take the state directory of the settings.

    Raises:
        ConfigError: The directory cannot be made or written.
        StateInUseError: Another process holds it.
        StateError: What is in it is damaged, foreign, or of another version.
    """
    with locked_directory(settings.state.directory) as directory:
        _check_spool(directory / "spool")
        store = Store(
            directory,
            dead_letter_max_bytes=settings.state.dead_letter_max_bytes,
            remembered_ids=settings.records.dedupe_window,
        )
        try:
            youngest = youngest_segment_id(directory / "spool")
            ids = itertools.count(max(store.streams.youngest_id(), youngest) + 1)
            stuck = StuckPlaces(directory, limit_s=settings.admin.stuck_seconds)
            yield OpenState(directory, store, ids.__next__, has_spool=bool(youngest), stuck=stuck)
        finally:
            store.close()
