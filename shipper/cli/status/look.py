"""What a look at a state directory shows: the process that holds it, what that says of itself, and the state."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from shipper.config.settings import Settings
from shipper.model.records import shown
from shipper.report.history import latest_fetch
from shipper.sources.discovery import Patterns
from shipper.sources.siblings import Siblings
from shipper.state.directory import holder_of
from shipper.status.headline import open_line_bytes, unaccepted
from shipper.status.live import Live
from shipper.status.live_file import read_live
from shipper.status.overview import Overview, Present, StreamState, earliest, followed_since, look_at
from shipper.status.standing import STREAMS_SHOWN, Standing, in_brief, newest_letters
from shipper.system.permissions import obstacle


class Look(Struct, frozen=True, kw_only=True):
    """
    A look at a state directory.

    Attributes:
        at: Its moment, seconds since the epoch.
        process_id: Of the process that holds the directory; None = no shipper is running, 0 = not known.
        live: What that process says of itself, or what the last one said.
        overview: None if there is no state yet.
        unmatched, unreadable: What was seen of the inputs at this look, see `Backlog`.
        beside: Files that begin like those that `input.include` names, and are not read: nobody knows what they are.
        options: What a command needs on its line to look at the same state, for a shell, with a space in front.
    """

    at: float
    process_id: int | None = None
    live: Live | None = None
    overview: Overview | None = None
    unmatched: list[str] = []
    unreadable: list[str] = []
    beside: list[str] = []
    options: str = ""

    @property
    def running(self) -> Live | None:
        """What the process that is running says of itself; None if none is, or if it says nothing."""
        return self.live if self.live is not None and self.process_id in {self.live.process_id, 0} else None

    @property
    def troubles(self) -> list[str]:
        """What keeps inputs from being read, in words: those of the process that runs, or else those of this look."""
        if self.running is not None:
            return self.running.troubles
        last = (
            [f"at its end, {words}" for words in self.live.unreadable if words not in self.unreadable]
            if self.live
            else []
        )
        return [*self.unreadable, *last, *self.unmatched]

    @property
    def unaccepted(self) -> str:
        """What became of all records if none was accepted; see there."""
        return "" if self.overview is None else unaccepted(self.live, self.overview)

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
        if self.running is None or self.overview is None or self._lag_bytes_of_state != self.running.lag_bytes:
            return 0
        return open_line_bytes(self.running, self.overview.unreachable_bytes)

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
    own, folder = settings.state.directory, live.working_directory if live else ""
    patterns = Patterns(settings.input.include, exclude=settings.input.exclude, own_directory=own, folder=folder)
    found = [each for each in patterns.find() if stat.S_ISREG(each.status.st_mode)]
    beside = Siblings(patterns).find([each.name for each in found], followed_since(own), at)
    found += [each.found for each in beside if each.is_generation]
    present = (Present(shown(each.path), *each.place, each.status.st_size, each.status.st_mtime_ns) for each in found)
    return Look(
        at=at,
        process_id=process_id,
        live=live,
        overview=look_at(directory, at, present),
        unmatched=list(patterns.unmatched().values()),
        unreadable=[shown(why) for each in found if (why := obstacle(each.path, os.R_OK))],
        beside=[shown(each.found.name) for each in beside if not each.is_generation],
        options=options,
    )


def document(seen: Look, directory: Path, *, shows_all: bool = False) -> dict[str, object]:
    """Write all that is known as what will be JSON: what `GET /status` answers, the process, and until when."""
    letters = newest_letters(directory)
    state = in_brief(seen.overview or Overview(), letters, None if shows_all else STREAMS_SHOWN)
    return {
        "process_id": seen.process_id,
        "delivered_until": seen.delivered_until,
        "troubles": seen.troubles,
        "beside": seen.beside,
        **msgspec.to_builtins(Standing(seen.live, state)),
        "report": msgspec.to_builtins(latest_fetch(directory)),
    }
