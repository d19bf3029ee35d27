"""What a group member reports about itself: counts, and obstacles to reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    FORBIDDEN,
    REFUSED,
    UNKNOWN_TOPIC,
    KafkaError,
    describe_refusal,
    required_right,
    translate_tls,
)
from shipper.kafka.stream import KafkaStream
from shipper.model.group import GroupState, Obstacle, PartitionState
from shipper.model.units import several

log = structlog.get_logger("kafka")

_LOGIN_RETRY_S: Final = 45.0  # the client retries at least every ten seconds, but reports the same error every 30


class MemberStatus:
    """
    The counts of a member since its start, and what keeps it from reading now.

    Attributes:
        tombstones_skipped: In partitions that this process has handed over.
        unreachable_records: Records that were gone before they were read, in gaps that reading continued after.
        transactions: Counts by outcome.
    """

    def __init__(self, settings: KafkaSettings, *, wall_time: Callable[[], float]) -> None:
        self._settings = settings
        self._wall_time = wall_time
        self._obstacles: dict[str, Obstacle] = {}
        self._forbidden_topics: set[str] = set()  # "" = a right that is not of a topic
        self._stopped_at: float | None = None
        self._rebalances: Counter[str] = Counter(assigned=0, revoked=0, lost=0)
        self._last_rebalance: tuple[str, float | None] = ("", None)
        self._errors: Counter[str] = Counter()
        self._transaction_seconds = 0.0
        self.tombstones_skipped = 0
        self.unreachable_records = 0
        self.transactions: Counter[str] = Counter(committed=0, aborted=0, in_doubt=0)
        self._login_refused_at: float | None = None

    def state(self, streams: Sequence[KafkaStream], *, is_paused: bool) -> GroupState:
        """Return the state of the member, which owns the partitions of these streams."""
        now_ms = self._wall_time() * 1000
        partitions = [_partition_state(stream, now_ms, is_paused=is_paused) for stream in streams]
        partitions.sort(key=lambda each: (each.state != "stopped", -each.lag_records, each.topic, each.partition))
        # A client that is refused also says that it reaches no broker.
        obstacles = sorted(self._obstacles.values(), key=lambda obstacle: obstacle.reason != "broker_forbidden")
        stopped = [stream for stream in streams if stream.stopped]
        self._stopped_at = (self._stopped_at or self._wall_time()) if stopped else None
        if stopped:
            first = min(stopped, key=lambda stream: (stream.is_leaderless, -stream.lag_records, stream.path))
            more = f"; and {len(stopped) - 1} more partitions" if len(stopped) > 1 else ""
            reason = "broker_unavailable" if first.is_leaderless else "input_gap"
            obstacles.append(Obstacle(reason, f"{first.stopped}{more}", self._stopped_at or 0.0))
        return GroupState(
            group=self._settings.group_id,
            protocol=self._settings.group_protocol,
            partitions=partitions,
            rebalances=dict(self._rebalances),
            tombstones_skipped=self.tombstones_skipped + sum(stream.tombstones_skipped for stream in streams),
            unreachable_records=self.unreachable_records,
            transactions=dict(self.transactions),
            transaction_seconds=round(self._transaction_seconds, 3),
            broker_errors=dict(self._errors),
            last_rebalance=self._last_rebalance[0],
            last_rebalance_at=self._last_rebalance[1],
            obstacles=obstacles,
        )

    def note_rebalance(self, kind: str, moved: int, owned: int) -> None:
        """Count and log partitions that were assigned, revoked or lost."""
        self._rebalances[kind] += moved
        self._last_rebalance = f"{several(moved, 'partition')} {kind}", self._wall_time()
        log.info("partitions_moved", message=self._last_rebalance[0], partitions=owned)

    def note_committed(self, seconds: float) -> None:
        """Count a transaction. It also proves the right to read, without which the brokers accept no offsets."""
        self.transactions["committed"] += 1
        self._transaction_seconds += seconds
        self.remove_obstacle("broker_forbidden")

    # Errors and obstacles ---------------------------------------------------------------------------------------------

    def note_error(self, error: KafkaError, topic: str = "") -> None:
        """Count a broker error; some are obstacles to reading. Thread-safe."""
        settings = self._settings
        self.count_error(error)
        error = translate_tls(error)
        if error.code() in REFUSED:
            self._login_refused_at = self._wall_time()
        if error.code() in FORBIDDEN:
            self._forbidden_topics.add(topic)
            message = describe_refusal(settings, error, topic and required_right(settings, topic))
            if error.code() == KafkaError._SSL:
                message += "; new certificates are used once this member is restarted"
            self._add_obstacle("broker_forbidden", message)
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._add_obstacle("broker_unavailable", f"no broker of {', '.join(settings.brokers)} can be reached")
        elif error.code() in UNKNOWN_TOPIC:
            self._add_obstacle("input_gap", f"a topic of {', '.join(settings.topics)} does not exist: {error.str()}")

    def _add_obstacle(self, reason: str, message: str) -> None:
        if reason not in self._obstacles:
            self._obstacles[reason] = Obstacle(reason, message, self._wall_time())
            log.warning("reading_obstructed", reason=reason, message=message)

    def count_error(self, error: KafkaError) -> None:
        self._errors[error.name()] += 1

    def is_login_refused(self) -> bool:
        """Return whether the brokers have refused this client lately; otherwise, that is no obstacle any more."""
        at = self._login_refused_at
        if at is not None and not at <= self._wall_time() < at + _LOGIN_RETRY_S:
            self._login_refused_at = None
            self.remove_obstacle("broker_forbidden")
        return self._login_refused_at is not None

    def note_readable(self, topic: str) -> None:
        """Note that this client may read a topic."""
        if self._forbidden_topics == {topic}:
            self.remove_obstacle("broker_forbidden")
        self._forbidden_topics.discard(topic)

    def remove_obstacle(self, reason: str) -> None:
        self._obstacles.pop(reason, None)
        if reason == "broker_forbidden":
            self._forbidden_topics.clear()

    def remove_obstacles(self) -> None:
        self._obstacles.clear()
        self._forbidden_topics.clear()

    def oldest_obstacle(self) -> Obstacle | None:
        return min(self._obstacles.values(), key=lambda obstacle: obstacle.since, default=None)


def _partition_state(stream: KafkaStream, now_ms: float, *, is_paused: bool) -> PartitionState:
    oldest = stream.oldest_ms
    return PartitionState(
        topic=stream.topic,
        partition=stream.partition,
        offset=stream.next_offset,
        end=None if stream.end is None else max(stream.end, stream.next_offset),
        lag_records=stream.lag_records,
        lag_seconds=0.0 if oldest is None or oldest < 0 else round(max(0.0, now_ms - oldest) / 1000, 3),
        delivered_until=stream.settled_until,
        state="stopped" if stream.stopped else "paused" if is_paused else "reading",
        message=stream.stopped,
    )
