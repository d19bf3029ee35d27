"""The state of a Kafka group member, for logs, metrics and the status page."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class PartitionState(Struct, frozen=True, kw_only=True):
    """The progress of a partition."""

    topic: str
    partition: int
    offset: int | None = None  # the first unsettled offset; None = nothing was read yet
    end: int | None = None  # the end of the partition when last queried; None = unknown yet
    lag_records: int = 0  # number of offsets in between; 0 once everything up to the end is settled
    lag_seconds: float = 0.0  # age of the oldest message that was read but not settled
    delivered_until: float | None = None  # all messages as of this time are settled; None = unknown
    # `stopped` = not read until an operator decides, see `message`.
    state: Literal["reading", "paused", "stopped"] = "reading"
    message: str = ""  # why it is stopped, for people


class Obstacle(Struct, frozen=True):
    """An obstacle to reading: a key of `pauses.ADVICE`, a message, and since when (seconds since the epoch)."""

    reason: str
    message: str
    since: float


class GroupState(Struct, frozen=True, kw_only=True):
    """A group member. Counts are of this process, since its start."""

    group: str
    protocol: str
    partitions: list[PartitionState] = []  # owned partitions, in descending order of lag
    rebalances: dict[str, int] = {}  # number of partitions `assigned`, `revoked` and `lost`
    handed_over: int = 0  # records read here but left unsettled to the next owner of their partition
    tombstones_skipped: int = 0  # skipped messages without a value, see `input.kafka.tombstones`
    unreachable_records: int = 0  # records that were gone before they were read; reading continued after them
    transactions: dict[str, int] = {}  # number of transactions `committed`, `aborted` and `in_doubt` (outcome unknown)
    transaction_seconds: float = 0.0  # total duration of committed transactions
    broker_errors: dict[str, int] = {}  # counts by name of the error
    # A description, and seconds since the epoch; empty and None before the first.
    last_rebalance: str = ""
    last_rebalance_at: float | None = None
    obstacles: list[Obstacle] = []  # reasons why nothing, or not everything, is read

    @property
    def lag_records(self) -> int:
        return sum(partition.lag_records for partition in self.partitions)

    @property
    def delivered_until(self) -> float | None:
        """All messages as of this time are settled in all owned partitions; None = unknown, or it owns none."""
        times = [partition.delivered_until for partition in self.partitions]
        return None if None in times else min((time for time in times if time is not None), default=None)

    @property
    def lag_seconds(self) -> float:
        return max((partition.lag_seconds for partition in self.partitions), default=0.0)
