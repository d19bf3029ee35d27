"""The status at one time, from the process, its state and the inputs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from shipper.config.settings import Settings
from shipper.model.records import shown
from shipper.sources.discovery import Patterns
from shipper.sources.siblings import Siblings
from shipper.state.directory import lock_holder
from shipper.status.live import Live, read_live
from shipper.status.overview import Overview, StreamState, earliest, read_overview, started_patterns
from shipper.system.permissions import access_problem

if TYPE_CHECKING:
    from shipper.report.history import LatestFetch

_SILENT_S: Final = 60.0  # twice the interval at which an idle process reports
_STARTUP_S: Final = 10.0  # a process that has just started may not have looked at all inputs
_EXPIRES_SOON_S: Final = {"token": 300.0, "certificate": 7 * 86_400.0}


class Snapshot(Struct, frozen=True, kw_only=True):
    """
    A shipper and its state at one time.

    Attributes:
        process_id: The process that holds the state directory; None = no shipper is running, 0 = unknown.
        report: The report that was fetched last; None if none is stored.
        stuck: Description of work that is stuck in the process; empty if none is.
        unmatched, unreadable: Problems of the inputs as seen by this process, see `Backlog`.
        beside: Files whose names begin like those of `input.include`, but which are not read.
    """

    at: float
    process_id: int | None = None
    live: Live | None = None
    state: Overview = Overview()
    report: LatestFetch | None = None
    stuck: str = ""
    unmatched: list[str] = []
    unreadable: list[str] = []
    beside: list[str] = []

    @property
    def running(self) -> Live | None:
        """The snapshot of the running process; None if none is running or it has not written one."""
        return self.live if self.live is not None and self.process_id in {self.live.process_id, 0} else None

    @property
    def is_silent(self) -> bool:
        """Whether the running process no longer reports."""
        live = self.running
        return live is not None and live.phase != "stopped" and self.at - live.at > _SILENT_S

    @property
    def troubles(self) -> list[str]:
        """Messages about inputs that cannot be read, from the running process or, without one, as seen by this one."""
        if self.running is not None:
            return self.running.troubles
        last = self.live.unreadable if self.live else []
        at_end = [f"at its end, {message}" for message in last if message not in self.unreadable]
        return [*self.unreadable, *at_end, *self.unmatched]

    @property
    def expiring(self) -> list[str]:
        """Which of token and certificate have expired or expire soon."""
        live = self.live
        expiries = {
            "token": self.running.token_expires_at if self.running else None,
            "certificate": live.certificate_expires_at if live else None,
        }
        return [name for name, at in expiries.items() if at is not None and at < self.at + _EXPIRES_SOON_S[name]]

    # Lag -------------------------------------------------------------------------------------------------------------

    @property
    def unreachable_bytes(self) -> int:
        """Unread bytes of inputs that disappeared, according to process and state."""
        return max(self.state.unreachable_bytes, self.running.unreachable_bytes if self.running else 0)

    @property
    def lag_bytes(self) -> int:
        """Lag of all inputs, including those known only to the running process."""
        return max(self.state.total_lag_bytes, self.running.lag_bytes if self.running else 0)

    @property
    def bytes_per_second(self) -> float:
        """Bytes settled per second; 0 = none or unknown."""
        live = self.running
        return live.settled_bytes_per_second if live and not live.pauses else 0.0

    @property
    def seconds_to_go(self) -> float | None:
        """Time until everything is settled at the current rate; None = unknown."""
        live = self.running
        if live is not None and live.group is not None:
            rate = 0.0 if live.pauses else live.accepted_per_second
            return live.group.lag_records / rate if rate > 0 else None
        return self.lag_bytes / self.bytes_per_second if self.bytes_per_second > 0 else None

    @property
    def open_line_bytes(self) -> int:
        """Bytes of incomplete lines; 0 if anything else waits, or if unknown."""
        live = self.running
        if live is None or live.phase != "running" or live.pauses or live.troubles or self.unreachable_bytes:
            return 0
        if live.lag_bytes != self.state.total_lag_bytes:
            return 0
        is_started = live.at - live.started_at >= _STARTUP_S
        is_busy = live.pending or live.settled_bytes_per_second > 0 or live.oldest_unsettled_seconds is not None
        return live.lag_bytes if is_started and not is_busy else 0

    # Delivered data --------------------------------------------------------------------------------------------------

    @property
    def has_files_left(self) -> bool:
        """Whether the process knows of unread files that the state may not know."""
        live = self.live
        return live is not None and (live.has_unopened or (live.total_bytes is not None and not live.input_ended))

    @property
    def delivered_until(self) -> float | None:
        """Everything written to all inputs up to this time is settled; None = unknown."""
        return None if self.has_files_left else self.state.delivered_until

    @property
    def unreachable_streams(self) -> list[StreamState]:
        """The streams of inputs that disappeared unread and have not come back."""
        gone = {item.stream_id for item in self.state.unreachable}
        return [stream for stream in self.state.behind if stream.stream_id in gone]

    @property
    def reachable_until(self) -> float | None:
        """As `delivered_until`, but ignoring unreachable inputs."""
        if self.has_files_left:
            return None
        gone = {stream.stream_id for stream in self.unreachable_streams}
        reachable = [stream.delivered_until for stream in self.state.streams if stream.stream_id not in gone]
        return earliest([*reachable, self.state.spool.delivered_until])

    # --until ---------------------------------------------------------------------------------------------------------

    def late_streams(self, until: float) -> list[StreamState]:
        """Return the inputs that may have unsettled data written up to a time."""
        return [stream for stream in self.state.streams if self._is_late(stream.delivered_until, until)]

    def is_spool_late(self, until: float) -> bool:
        """Return whether standard input may have unsettled data read up to a time."""
        return self._is_late(self.state.spool.delivered_until, until)

    def _is_late(self, delivered_until: float | None, until: float) -> bool:
        return delivered_until is None or delivered_until < min(until, self.at)

    def is_delivered(self, until: float) -> bool:
        """Return whether everything written up to a time is known to be settled."""
        if not self.state.has_inputs or until > self.at or self.has_files_left:
            return False
        return not self.is_spool_late(until) and not self.late_streams(until)


def take_snapshot(settings: Settings, at: float) -> Snapshot:
    """Inspect the state directory and the inputs, with or without a running shipper; errors as for `Store`."""
    from shipper.report.history import latest_fetch  # delivering does not need reports

    directory = settings.state.directory
    process_id, live = lock_holder(directory), read_live(directory)
    if process_id is None and live is not None and live.phase != "stopped":
        process_id = lock_holder(directory)  # it may have started between the two calls
    folder = live.working_directory if live else ""
    patterns = Patterns(
        settings.input.include, exclude=settings.input.exclude, state_directory=directory, folder=folder
    )
    files = [file for file in patterns.find() if not file.is_special]
    generations, unknown = Siblings(patterns).find([file.name for file in files], started_patterns(directory), at)
    files += generations
    state = read_overview(directory, at, files)
    known = {stream.path for stream in state.streams}
    return Snapshot(
        at=at,
        process_id=process_id,
        live=live,
        state=state,
        report=latest_fetch(directory),
        unmatched=list(patterns.unmatched().values()),
        unreadable=[shown(problem) for file in files if (problem := access_problem(file.path, os.R_OK))],
        beside=[name for file in unknown if (name := shown(file.name)) not in known],
    )
