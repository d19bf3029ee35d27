"""The status at one moment: from the process, from its state, and from the inputs."""

from __future__ import annotations

import os
import stat
from typing import Final

from msgspec import Struct

from shipper.config.settings import Settings
from shipper.model.records import shown
from shipper.report.history import LatestFetch, latest_fetch
from shipper.sources.discovery import Patterns
from shipper.sources.siblings import Siblings
from shipper.state.directory import holder_of
from shipper.status.live import Live
from shipper.status.live_file import read_live
from shipper.status.overview import Overview, Present, StreamState, earliest, followed_since, look_at
from shipper.system.permissions import obstacle

_SETTLED_IN_S: Final = 10.0  # a process that has just started may not have looked at all of its inputs
_EXPIRES_SOON_S: Final = {"token": 300.0, "certificate": 7 * 86_400.0}


class Snapshot(Struct, frozen=True, kw_only=True):
    """
    A shipper and its state at one moment.

    Attributes:
        at: The moment, seconds since the epoch.
        process_id: Of the process that holds the state directory; None = no shipper is running, 0 = not known.
        live: What that process says of itself, or what the last one said.
        state: None if there is no state yet.
        report: The report that was fetched last; None if none is kept.
        stuck: What does not come to an end in the process, in words; empty while all is well.
        unmatched, unreadable: What was seen of the inputs from outside, see `Backlog`.
        beside: Files that begin like those that `input.include` names, and are not read: nobody knows what they are.
    """

    at: float
    process_id: int | None = None
    live: Live | None = None
    state: Overview | None = None
    report: LatestFetch | None = None
    stuck: str = ""
    unmatched: list[str] = []
    unreadable: list[str] = []
    beside: list[str] = []

    @property
    def running(self) -> Live | None:
        """What the process that is running says of itself; None if none is, or if it says nothing."""
        return self.live if self.live is not None and self.process_id in {self.live.process_id, 0} else None

    @property
    def troubles(self) -> list[str]:
        """What keeps inputs from being read, in words: by the running process, or else as seen from outside."""
        if self.running is not None:
            return self.running.troubles
        last = self.live.unreadable if self.live else []
        at_end = [f"at its end, {words}" for words in last if words not in self.unreadable]
        return [*self.unreadable, *at_end, *self.unmatched]

    @property
    def expiring(self) -> list[str]:
        """Which of token and certificate have expired, or will soon."""
        live = self.live
        moments = {
            "token": self.running.token_expires_at if self.running else None,
            "certificate": live.certificate_expires_at if live else None,
        }
        return [name for name, at in moments.items() if at is not None and at < self.at + _EXPIRES_SOON_S[name]]

    # How much is left ------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        return self.state.kept if self.state else 0

    @property
    def unreachable_bytes(self) -> int:
        """Of inputs that were gone before they were read, as far as process and state know."""
        known = self.state.unreachable_bytes if self.state else 0
        return max(known, self.running.unreachable_bytes) if self.running else known

    @property
    def lag_bytes(self) -> int:
        """Of all inputs, also of those that only the running process knows of."""
        return max(self._lag_bytes_of_state, self.running.lag_bytes) if self.running else self._lag_bytes_of_state

    @property
    def _lag_bytes_of_state(self) -> int:
        return self.state.lag_bytes + self.state.spool.lag_bytes if self.state else 0

    @property
    def bytes_per_second(self) -> float:
        """Bytes settled per second; 0 = none, or not known."""
        live = self.running
        return live.settled_bytes_per_second if live and not live.pauses else 0.0

    @property
    def seconds_to_go(self) -> float | None:
        """Time until everything is settled at this rate; None = not known."""
        return self.lag_bytes / self.bytes_per_second if self.bytes_per_second > 0 else None

    @property
    def open_line_bytes(self) -> int:
        """Of lines that have no end yet, where nothing else waits; 0 if something does, or if that is not known."""
        live = self.running
        if live is None or live.phase != "running" or live.pauses or live.troubles or self.unreachable_bytes:
            return 0
        if live.lag_bytes != self._lag_bytes_of_state:
            return 0
        has_looked = live.at - live.started_at >= _SETTLED_IN_S
        is_at_work = live.pending or live.settled_bytes_per_second > 0 or live.oldest_unsettled_seconds is not None
        return live.lag_bytes if has_looked and not is_at_work else 0

    # What is delivered -----------------------------------------------------------------------------------------------

    @property
    def has_files_left(self) -> bool:
        """Whether files were named to the process that are not read to their ends: the state may not know of them."""
        return self.live is not None and self.live.total_bytes is not None and not self.live.input_ended

    @property
    def delivered_until(self) -> float | None:
        """All that was written to all inputs up to then is settled; None = not known."""
        return None if self.state is None or self.has_files_left else self.state.delivered_until

    @property
    def unreachable_streams(self) -> list[StreamState]:
        """The streams of inputs that were gone before they were read, and have not come back."""
        if self.state is None:
            return []
        gone = {each.stream_id for each in self.state.unreachable}
        return [each for each in self.state.behind if each.stream_id in gone]

    @property
    def reachable_until(self) -> float | None:
        """As `delivered_until`, but for the inputs that were gone before they were read."""
        if self.state is None or self.has_files_left:
            return None
        gone = {each.stream_id for each in self.unreachable_streams}
        reachable = [each.delivered_until for each in self.state.streams if each.stream_id not in gone]
        return earliest([*reachable, self.state.spool.delivered_until])

    # --until ---------------------------------------------------------------------------------------------------------

    def late_streams(self, until: float) -> list[StreamState]:
        """Return the inputs of which something that was written by a moment may not be settled."""
        return [each for each in self.state.streams if self._is_late(each.delivered_until, until)] if self.state else []

    def is_spool_late(self, until: float) -> bool:
        """Return whether something that was read from standard input by a moment may not be settled."""
        return self.state is not None and self._is_late(self.state.spool.delivered_until, until)

    def _is_late(self, delivered_until: float | None, until: float) -> bool:
        return delivered_until is None or delivered_until < min(until, self.at)

    def is_delivered(self, until: float) -> bool:
        """Return whether everything that was written up to a moment is known to be settled."""
        if self.state is None or not self.state.has_inputs or until > self.at or self.has_files_left:
            return False
        return not self.is_spool_late(until) and not self.late_streams(until)


def take_snapshot(settings: Settings, at: float) -> Snapshot:
    """
    Look at the state directory, and at the files of `input.include`; beside a shipper that runs, or without one.

    Args:
        at: The time, seconds since the epoch.
    Raises:
        StateError: As for `Store`.
    """
    own = settings.state.directory
    process_id, live = holder_of(own), read_live(own)
    if process_id is None and live is not None and live.phase != "stopped":
        process_id = holder_of(own)  # it may have started between the two
    folder = live.working_directory if live else ""
    patterns = Patterns(settings.input.include, exclude=settings.input.exclude, own_directory=own, folder=folder)
    found = [each for each in patterns.find() if stat.S_ISREG(each.status.st_mode)]
    beside = Siblings(patterns).find([each.name for each in found], followed_since(own), at)
    found += [each.found for each in beside if each.is_generation]
    present = (Present(shown(each.path), *each.place, each.status.st_size, each.status.st_mtime_ns) for each in found)
    return Snapshot(
        at=at,
        process_id=process_id,
        live=live,
        state=look_at(own, at, present),
        report=latest_fetch(own),
        unmatched=list(patterns.unmatched().values()),
        unreadable=[shown(why) for each in found if (why := obstacle(each.path, os.R_OK))],
        beside=[shown(each.found.name) for each in beside if not each.is_generation],
    )
