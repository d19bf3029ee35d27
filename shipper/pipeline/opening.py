"""Locking the state directory, and opening its store and spool."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import structlog

from shipper.config.settings import Settings
from shipper.model.errors import ConfigError
from shipper.sources.reader import input_form
from shipper.sources.segments import newest_segment_id
from shipper.sources.spool import Spool
from shipper.sources.stdin import Input
from shipper.state.directory import ACCESS_ADVICE, locked_directory
from shipper.state.store import Store
from shipper.status.live import read_live
from shipper.system.permissions import access_problem
from shipper.system.work import StuckPlaces

log = structlog.get_logger("pipeline")


class OpenState(NamedTuple):
    """A state directory locked by this process."""

    directory: Path
    store: Store
    next_stream_id: Callable[[], int]  # returns an unused id
    has_spool: bool  # whether an earlier process left anything in the spool
    stuck: StuckPlaces  # the places where earlier processes got stuck

    def spool(self, settings: Settings, origin: Input | int | None, *, wall_time: Callable[[], float]) -> Spool:
        """Open the spool; `origin` is as for `Spool`. Only standard input gives up if the disk stays full."""
        return Spool(
            self.directory / "spool",
            origin,
            settings.spool,
            known=self.store.streams.load("spool"),
            next_stream_id=self.next_stream_id,
            forget=self.store.streams.forget,
            max_record_bytes=settings.input.max_record_bytes,
            wall_time=wall_time,
            give_up_after_s=settings.delivery.give_up_after_seconds if isinstance(origin, int) else math.inf,
            form=input_form(settings),
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
        if message := service_change(settings):
            log.warning("service_changed", message=message)
        try:
            newest_segment = newest_segment_id(directory / "spool")
            ids = itertools.count(max(store.streams.newest_id(), newest_segment) + 1)
            stuck = StuckPlaces(directory, limit_s=settings.admin.stuck_seconds)
            yield OpenState(directory, store, ids.__next__, has_spool=bool(newest_segment), stuck=stuck)
        finally:
            store.close()


def service_change(settings: Settings) -> str:
    """Return a warning if the state directory was last used with another service; "" otherwise."""
    live, address = read_live(settings.state.directory), settings.intake and settings.intake.base_url
    if live is None or not live.destination or not address or live.destination == address:
        return ""
    return (
        f"this state was last used with {live.destination}, and what that service accepted is not sent to {address}; "
        "unless that is the same service at a new address, use another state.directory"
    )


def _check_spool(spool: Path) -> None:
    """Raise `ConfigError` if this process cannot access the files that an earlier one left in the spool."""
    segments = sorted(spool.iterdir()) if spool.is_dir() and not access_problem(spool) else []
    for path in filter(os.path.lexists, (spool, *segments)):
        if problem := access_problem(path):
            raise ConfigError(f"{problem}. {ACCESS_ADVICE}", key="state.directory")
