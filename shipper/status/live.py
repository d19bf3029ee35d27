"""
The snapshot of a running shipper; logs, metrics, the status page and `shipper status` render it.

It is made once a second by the event loop that ships, and kept in the state directory as `live.json`, so that it can
be read without asking the process, and after its end.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shipper.model.group import GroupState
from shipper.model.units import several, size

Phase = Literal["starting", "running", "draining", "stopped"]


class Pause(Struct, frozen=True):
    """
    Why nothing is delivered or saved at the moment.

    Attributes:
        reason: One word, a key of `pauses.ADVICE`.
        message: What happened, for a person.
        advice: What to do about it.
        since: Seconds since the epoch.
        next_probe_at: When it is tried again, seconds since the epoch; None if that is not known.
        gives_up_at: When the run ends if nothing changes by then, seconds since the epoch; None = never.
    """

    reason: str
    message: str
    advice: str
    since: float
    next_probe_at: float | None = None
    gives_up_at: float | None = None


class PauseBefore(Struct, frozen=True):
    """A pause that is over; its times are of the looks that saw it begin and end, seconds since the epoch."""

    reason: str
    since: float
    until: float


class Live(Struct, frozen=True, kw_only=True):
    """
    A shipper at one moment. Counts are of this process, from its start; `read` is the sum of the other four.

    Attributes:
        command: Such as `run`; `library` for an application that embeds it.
        destination: The service's address.
        working_directory: What relative paths are relative to; empty if its name is not UTF-8.
        at: When this was made, seconds since the epoch, like all moments here.
        outcome: How it ended, once it has: a word of `pipeline.Outcome`, or `failed`.
        input_ended: The input was read to its end.
        pending: Records that were read and are not settled yet.
        dead_letters: Records that were refused, by rule.
        settled_bytes: Of all inputs, by this process.
        engine: `native` or `pure`: what scans ordinary records.
        total_bytes: Of an input with an end, its size, if known.
        accepted_per_second, settled_bytes_per_second: Of the last ten seconds.
        lag_bytes: Known to exist and not settled, of all inputs.
        unmatched, unreadable, unreadable_count, has_looked: See `Backlog`.
        spool_bytes: Of standard input, on disk.
        oldest_unsettled_seconds: How long the oldest record that was read has been waiting; None if none has.
        unreachable_bytes: Of inputs that were gone before they were read, noticed by this process.
        commits: Transactions of the state store.
        requests: Answers by status, such as `202`, or `none` where there was none.
        retries: Repeated attempts, by reason.
        latency_p50_seconds, latency_p95_seconds: Of the answers of the last second that had some; None before any.
        latency_counts: Requests by bucket of `sender.BUCKETS`, and beyond the last.
        latency_total_seconds: Sum over all requests.
        concurrency_limit: Requests that may be in flight.
        token_expires_at, certificate_expires_at: None if there is no expiry, or it is not known (yet).
        pauses: Empty while all is well.
        last_pause: The one that ended last.
        reload_error: Why the last attempt to read the settings again changed nothing; empty if it did not fail.
        restart_needed: Settings that changed, and take effect at the next start.
        group: Of a member of a consumer group; None = there is none.
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
    dead_letters: dict[str, int] = {}
    settled_bytes: int = 0
    total_bytes: int | None = None
    accepted_per_second: float = 0.0
    settled_bytes_per_second: float = 0.0
    lag_bytes: int = 0
    unmatched: list[str] = []
    unreadable: list[str] = []
    unreadable_count: int = 0
    has_looked: bool = True
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
    last_pause: PauseBefore | None = None
    reload_error: str = ""
    restart_needed: list[str] = []
    group: GroupState | None = None

    @property
    def behind(self) -> str:
        """What is left to settle, in words: bytes, or records of a consumer group; empty if nothing is."""
        if self.group is not None:
            return several(self.group.lag_records, "record") if self.group.lag_records else ""
        return size(self.lag_bytes) if self.lag_bytes else ""

    @property
    def troubles(self) -> list[str]:
        """What keeps inputs from being read, in words."""
        more = self.unreadable_count - len(self.unreadable)
        rest = [f"{several(more, 'more file')} cannot be read"] if more > 0 else []
        return [*self.unreadable, *rest, *self.unmatched]


class Moment(Struct, frozen=True, array_like=True):
    """
    One point of the charts: `at`, seconds since the epoch; accepted per second; latency (median and 95th percentile of
    the answers since the last point, seconds; None without any); requests in flight; bytes of lag; whether it paused.
    """

    at: float
    accepted_per_second: float
    latency_p50_seconds: float | None
    latency_p95_seconds: float | None
    in_flight: int
    lag_bytes: int
    is_paused: bool
