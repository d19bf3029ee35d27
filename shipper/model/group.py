"""A member of a Kafka consumer group at one moment, for logs, metrics and the status page."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class PartitionState(Struct, frozen=True, kw_only=True):
    """
    How far a partition is settled.

    Attributes:
        offset: The first one that is not settled; None = nothing was read yet.
        end: The end of the partition at the last look; None = not known yet.
        lag_records: Offsets in between; 0 once everything up to the end is settled.
        lag_seconds: Age of the oldest message that was read and is not settled.
        delivered_until: Everything that was in it at this moment is settled; None = not known.
        state: `stopped` = it is not read until somebody decides, see `message`.
        message: Why it is stopped, for a person.
    """

    topic: str
    partition: int
    offset: int | None = None
    end: int | None = None
    lag_records: int = 0
    lag_seconds: float = 0.0
    delivered_until: float | None = None
    state: Literal["reading", "paused", "stopped"] = "reading"
    message: str = ""


class Obstacle(Struct, frozen=True):
    """Why a member does not read: a key of `pauses.ADVICE`, what happened, and since when (seconds since the epoch)."""

    reason: str
    message: str
    since: float


class GroupState(Struct, frozen=True, kw_only=True):
    """
    A member. Counts are of this process, from its start.

    Attributes:
        partitions: Those that it owns, the one with most lag first.
        rebalances: Partitions that were `assigned`, `revoked` and `lost`.
        handed_over: Records that were read here and left, unsettled, to the next owner of their partition.
        tombstones_skipped: Messages without a value that were skipped, see `input.kafka.tombstones`.
        transactions: `committed`, `aborted`, and `in_doubt`: how often the brokers left it open what became of one.
        transaction_seconds: Sum over all that were committed.
        broker_errors: By the name of the error.
        last_rebalance, last_rebalance_at: In words, and seconds since the epoch; empty and None before the first one.
        obstacles: Why it does not read, or not all.
    """

    group: str
    protocol: str
    partitions: list[PartitionState] = []
    rebalances: dict[str, int] = {}
    handed_over: int = 0
    tombstones_skipped: int = 0
    transactions: dict[str, int] = {}
    transaction_seconds: float = 0.0
    broker_errors: dict[str, int] = {}
    last_rebalance: str = ""
    last_rebalance_at: float | None = None
    obstacles: list[Obstacle] = []

    @property
    def lag_records(self) -> int:
        return sum(each.lag_records for each in self.partitions)

    @property
    def lag_seconds(self) -> float:
        return max((each.lag_seconds for each in self.partitions), default=0.0)
