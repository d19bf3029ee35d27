"""What a look at a state directory shows: the process that holds it, what that says of itself, and the state."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from shipper.config import Settings
from shipper.records import shown
from shipper.report.history import latest_fetch
from shipper.sources.discovery import Patterns
from shipper.state.directory import holder_of
from shipper.state.live_file import read_live
from shipper.state.overview import Overview, Present, StreamState, earliest, look_at
from shipper.state.standing import STREAMS_SHOWN, Standing, in_brief, newest_letters
from shipper.state.store import bring_state_up_to_date
from shipper.telemetry.live import Live

_SETTLED_IN_S: Final = 10.0  # a process that has just started may not have looked at all of its inputs


class Look(Struct, frozen=True, kw_only=True):
    """
    A look at a state directory.

    Attributes:
        at: Its moment, seconds since the epoch.
        process_id: Of the process that holds the directory; None = no shipper is running, 0 = not known.
        live: What that process says of itself, or what the last one said.
        overview: None if there is no state yet.
        options: What a command needs on its line to look at the same state, for a shell, with a space in front.
    """

    at: float
    process_id: int | None = None
    live: Live | None = None
    overview: Overview | None = None
    options: str = ""

    @property
    def running(self) -> Live | None:
        """What the process that is running says of itself; None if none is, or if it says nothing."""
        return self.live if self.live is not None and self.process_id in {self.live.process_id, 0} else None

    @property
    def has_files_left(self) -> bool:
        """Whether files were named to the process that are not read to their ends: the state may not know of them."""
        return self.live is not None and self.live.total_bytes is not None and not self.live.input_ended

    @property
    def delivered_until(self) -> float | None:
        """All that was written to all inputs up to then is settled; None = not known."""
        return None if self.overview is None or self.has_files_left else self.overview.delivered_until

    @property
    def unreachable_streams(self) -> list[StreamState]:
        """The streams of inputs that were gone before they were read, and have not come back."""
        if self.overview is None:
            return []
        gone = {each.stream_id for each in self.overview.unreachable}
        return [each for each in self.overview.behind if each.stream_id in gone]

    @property
    def reachable_until(self) -> float | None:
        """As `delivered_until`, but for the inputs that were gone before they were read."""
        if self.overview is None or self.has_files_left:
            return None
        gone = {each.stream_id for each in self.unreachable_streams}
        reachable = [each.delivered_until for each in self.overview.streams if each.stream_id not in gone]
        return earliest([*reachable, self.overview.spool.delivered_until])

    @property
    def lag_bytes(self) -> int:
        """Of all inputs, also of those that only the process that is running knows of."""
        known = self._lag_bytes_of_state
        return max(known, self.running.lag_bytes) if self.running else known

    @property
    def _lag_bytes_of_state(self) -> int:
        return self.overview.lag_bytes + self.overview.spool.lag_bytes if self.overview else 0

    @property
    def open_line_bytes(self) -> int:
        """Of lines that have no end yet, where nothing else waits; 0 if something does, or if that is not known."""
        live = self.running
        if live is None or self.overview is None or live.phase != "running" or live.pauses:
            return 0
        has_looked = live.at - live.started_at >= _SETTLED_IN_S
        is_at_work = live.pending or live.settled_bytes_per_second > 0 or live.oldest_unsettled_seconds is not None
        is_lag_known = self._lag_bytes_of_state == live.lag_bytes and not self.overview.unreachable_bytes
        return live.lag_bytes if has_looked and not is_at_work and is_lag_known else 0

    @property
    def bytes_per_second(self) -> float:
        """How fast it goes; 0 if it does not, or if that is not known."""
        live = self.running
        return live.settled_bytes_per_second if live and not live.pauses else 0.0


def look(settings: Settings, at: float, options: str = "") -> Look:
    """
    Look at the state directory, and at the files of `input.include`; beside a shipper that runs, or without one.

    Args:
        at: The time, seconds since the epoch.
        options: See `Look`.
    Raises:
        StateError: As for `Store`.
    """
    directory = settings.state.directory
    process_id, live = holder_of(directory), read_live(directory)
    if process_id is None and live is not None and live.phase != "stopped":
        process_id = holder_of(directory)  # it may have started between the two
    bring_state_up_to_date(directory)
    overview = look_at(directory, at, _present(settings))
    return Look(at=at, process_id=process_id, live=live, overview=overview, options=options)


def _present(settings: Settings) -> Iterator[Present]:
    patterns = Patterns(settings.input.include, exclude=settings.input.exclude, own_directory=settings.state.directory)
    for found in patterns.find():
        if stat.S_ISREG(found.status.st_mode):
            yield Present(shown(found.path), *found.place, found.status.st_size, found.status.st_mtime_ns)


def document(seen: Look, directory: Path, *, shows_all: bool = False) -> dict[str, object]:
    """Write all that is known as what will be JSON: what `GET /status` answers, the process, and until when."""
    letters = newest_letters(directory)
    state = in_brief(seen.overview or Overview(), letters, None if shows_all else STREAMS_SHOWN)
    return {
        "process_id": seen.process_id,
        "delivered_until": seen.delivered_until,
        **msgspec.to_builtins(Standing(seen.live, state)),
        "report": msgspec.to_builtins(latest_fetch(directory)),
    }
