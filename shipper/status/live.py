"""
The snapshot of a running shipper; logs, metrics, the status page and `shipper status` render it.

The main event loop takes one every second. The latest is available to other threads, and written to `live.json` in the
state directory, where other processes can read it, also after the process has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

import anyio
from anyio.to_thread import run_sync
from msgspec import Struct
from msgspec.structs import replace

from shipper.model.group import GroupState
from shipper.model.units import several, size
from shipper.state.directory import LIVE_FILE as LIVE_FILE
from shipper.system.files import read_json, replace_json

_WRITE_INTERVAL_S: Final = 1.0
_UNCHANGED_S: Final = 30.0  # write interval without changes, as a sign of life
_POINT_INTERVAL_S: Final = 2.0
_POINTS_MAX: Final = 900  # half an hour

Phase = Literal["starting", "running", "draining", "stopped"]


class Pause(Struct, frozen=True):
    """
    Why nothing is delivered or saved at the moment.

    Attributes:
        reason: A key of `pauses.ADVICE`.
        next_probe_at: Time of the next attempt, seconds since the epoch; None if unknown.
        gives_up_at: When the run gives up if nothing changes, seconds since the epoch; None = never.
    """

    reason: str
    message: str
    advice: str
    since: float
    next_probe_at: float | None = None
    gives_up_at: float | None = None


class PastPause(Struct, frozen=True):
    """A pause that has ended; its times are those of snapshots, seconds since the epoch."""

    reason: str
    since: float
    until: float


class Live(Struct, frozen=True, kw_only=True):
    """
    A snapshot of a running shipper. Counts are those of this process; `read` is the sum of the other four.

    Attributes:
        engine: `native` or `pure`: what scans ordinary records.
        command: For example `run`; `library` if embedded in an application.
        working_directory: Base of relative paths; empty if its name is not UTF-8.
        at: Time of the snapshot, seconds since the epoch like all times here.
        outcome: How the run ended, a value of `pipeline.Outcome` or `failed`; empty while it is running.
        pending: Records read and not settled yet.
        ever_read: Records read by all runs, including those that the saved state does not count yet.
        dead_letters: Rejected records by rule.
        settled_bytes: Bytes of all inputs settled by this process.
        total_bytes: Size of an input with an end, if known.
        accepted_per_second, settled_bytes_per_second: Averages over the last ten seconds.
        lag_bytes: Known unsettled bytes of all inputs.
        unmatched, unreadable, unreadable_count, has_scanned, has_unopened: See `Backlog`.
        spool_bytes: Bytes of standard input on disk.
        oldest_unsettled_seconds: Age of the oldest record read and not settled; None if there is none.
        unreachable_bytes: Unread bytes of inputs that disappeared during this run.
        requests: Answers by status, such as `202`; `none` counts requests without an answer.
        retries: Retries by cause.
        latency_p50_seconds, latency_p95_seconds: Latency in the last second with answers; None before the first.
        latency_counts: Requests by bucket of `sender.BUCKETS`, and above the last.
        token_expires_at, certificate_expires_at: None if there is no expiry, or it is unknown.
        last_pause: The pause that ended last.
        reload_error: Why the last reload of the settings failed; empty if it did not.
        group: State of the consumer group member; None = not a member.
    """

    version: str
    engine: str = ""
    process_id: int
    command: str
    destination: str = ""
    state_directory: str = ""
    working_directory: str = ""
    phase: Phase
    started_at: float
    at: float
    outcome: str = ""
    input_ended: bool = False
    read: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0
    pending: int = 0
    ever_read: int = 0
    dead_letters: dict[str, int] = {}
    settled_bytes: int = 0
    total_bytes: int | None = None
    accepted_per_second: float = 0.0
    settled_bytes_per_second: float = 0.0
    lag_bytes: int = 0
    unmatched: list[str] = []
    unreadable: list[str] = []
    unreadable_count: int = 0
    has_scanned: bool = True
    has_unopened: bool = False
    spool_bytes: int = 0
    oldest_unsettled_seconds: float | None = None
    unreachable_bytes: int = 0
    last_accepted_at: float | None = None
    commits: int = 0
    batches: int = 0
    requests: dict[str, int] = {}
    retries: dict[str, int] = {}
    latency_p50_seconds: float | None = None
    latency_p95_seconds: float | None = None
    latency_counts: list[int] = []
    latency_total_seconds: float = 0.0
    in_flight: int = 0
    concurrency_limit: int = 0
    token_expires_at: float | None = None
    certificate_expires_at: float | None = None
    pauses: list[Pause] = []
    last_pause: PastPause | None = None
    reload_error: str = ""
    restart_needed: list[str] = []
    group: GroupState | None = None

    @property
    def behind(self) -> str:
        """Description of the lag: bytes, or records of a consumer group; empty if there is none."""
        if self.group is not None:
            return several(self.group.lag_records, "record") if self.group.lag_records else ""
        return size(self.lag_bytes) if self.lag_bytes else ""

    @property
    def troubles(self) -> list[str]:
        more = self.unreadable_count - len(self.unreadable)
        rest = [f"{several(more, 'more file')} cannot be read"] if more > 0 else []
        return [*self.unreadable, *rest, *self.unmatched]


class ChartPoint(Struct, frozen=True, array_like=True):
    """
    A point of the charts.

    Attributes:
        latency_p50_seconds, latency_p95_seconds: Of the answers since the last point; None if there were none.
        lag: In bytes, or in records of a group member.
    """

    at: float
    accepted_per_second: float
    latency_p50_seconds: float | None
    latency_p95_seconds: float | None
    in_flight: int
    lag: int
    is_paused: bool


class Board:
    """Holds the latest snapshot and the points of the charts, for readers in other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: deque[ChartPoint] = deque(maxlen=_POINTS_MAX)
        self._requests = 0
        self.live: Live | None = None

    def publish(self, live: Live) -> None:
        with self._lock:
            self.live = live
            if not self._points or live.at >= self._points[-1].at + _POINT_INTERVAL_S or live.at < self._points[-1].at:
                self._points.append(self._point(live))

    def _point(self, live: Live) -> ChartPoint:
        requests = sum(live.requests.values())
        is_quiet, self._requests = requests == self._requests, requests
        return ChartPoint(
            round(live.at, 3),
            live.accepted_per_second,
            None if is_quiet else live.latency_p50_seconds,
            None if is_quiet else live.latency_p95_seconds,
            live.in_flight,
            live.group.lag_records if live.group else live.lag_bytes,
            bool(live.pauses),
        )

    def points(self, since: float) -> list[ChartPoint]:
        """Return the points after a time in seconds since the epoch, oldest first."""
        with self._lock:
            return [point for point in self._points if point.at > since]


class LiveFile:
    """
    Writes the latest snapshot to a state directory, once a second while it changes.

    The file is replaced atomically, with mode 0600; it need not survive a power failure.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._latest: Live | None = None
        self._written: Live | None = None

    def update(self, live: Live) -> None:
        """Set the snapshot for the next write."""
        self._latest = live

    async def write_periodically(self) -> None:
        """Write once a second until cancelled; call `write` for the last snapshot."""
        while True:
            await run_sync(self.write)
            await anyio.sleep(_WRITE_INTERVAL_S)

    def write(self) -> None:
        """Write the latest snapshot if it has changed; ignore errors, as the state store reports a full disk."""
        live, before = self._latest, self._written
        if live is None:
            return
        if before is not None and live.at < before.at + _UNCHANGED_S and replace(live, at=before.at) == before:
            return
        with suppress(OSError):
            replace_json(self._directory / LIVE_FILE, live)
            self._written = live


def read_live(directory: Path) -> Live | None:
    """Read the last snapshot in a state directory; None if it is missing or was written by another version."""
    return read_json(directory / LIVE_FILE, Live)
