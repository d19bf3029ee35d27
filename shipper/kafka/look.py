"""How far a whole group is, asked from the brokers; no member need be running."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient, OffsetSpec
from msgspec import Struct

from shipper.config.settings import KafkaSettings
from shipper.kafka.begin import Found, begin, found_in
from shipper.kafka.client import (
    bounds_of,
    offsets_at,
    outside_consumer,
    partitions_of,
    patiently,
    properties,
    understood,
)
from shipper.kafka.documents import read_metadata
from shipper.model.group import PartitionState

_CALL_S: Final = 15.0


class GroupLook(Struct, frozen=True, kw_only=True):
    """
    A group at one moment.

    Attributes:
        at: The moment, seconds since the epoch.
        state: As the brokers call it, such as `stable`.
        members: How many there are.
        partitions: All of the topics, the one with most lag first.
        until: The moment that was asked about; None = none was.
        late: Of which it is not known that all up to that moment is settled, as topic/number.
    """

    at: float
    group: str
    state: str
    members: int
    partitions: list[PartitionState]
    until: float | None = None
    late: list[str] = []

    @property
    def lag_records(self) -> int:
        return sum(each.lag_records for each in self.partitions)

    @property
    def is_delivered(self) -> bool:
        return self.until is not None and not self.late and self.until <= self.at and bool(self.partitions)


def look_at_group(settings: KafkaSettings, at: float, until: float | None = None) -> GroupLook:
    """
    Ask the brokers how far the group is.

    Args:
        at: The time, seconds since the epoch, taken before.
        until: Also tell whether everything up to then is settled.
    Raises:
        SourceError: The brokers cannot be asked.
    """
    with understood(settings, f"group {settings.group_id} cannot be looked at"):
        return _look(settings, at, until)


def _look(settings: KafkaSettings, at: float, until: float | None) -> GroupLook:
    admin = AdminClient(properties(settings))
    topic_ids, places = partitions_of(admin, settings.topics, _CALL_S)
    with closing(outside_consumer(settings)) as consumer:
        offsets = patiently(lambda: consumer.committed(places, _CALL_S))
    bounds = bounds_of(admin, places, _CALL_S)
    moment = OffsetSpec.for_timestamp(int((until or 0.0) * 1000))
    moments = {} if until is None else offsets_at(admin, places, moment, _CALL_S)
    partitions, late = [], []
    for place, found in found_in(offsets, topic_ids, bounds).items():
        state = _state(found, settings, at)
        partitions.append(state)
        if until is not None and not _is_settled(state, until, moments[place]):
            late.append(f"{place[0]}/{place[1]}")
    partitions.sort(key=lambda each: (-each.lag_records, each.topic, each.partition))
    (future,) = admin.describe_consumer_groups([settings.group_id], request_timeout=_CALL_S).values()
    group = future.result(_CALL_S)
    state_name = (
        "empty" if group.state in {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD} else group.state.name.lower()
    )
    return GroupLook(
        at=at,
        group=settings.group_id,
        state=state_name.replace("_", " "),
        members=len(group.members),
        partitions=partitions,
        until=until,
        late=late,
    )


def _state(found: Found, settings: KafkaSettings, at: float) -> PartitionState:
    where = begin(found, settings)
    position = where.offset if not where.gap else found.committed
    metadata = read_metadata(found.metadata) if found.committed >= 0 and not where.gap else None
    until = metadata.settled_until if metadata else None
    return PartitionState(
        topic=found.topic,
        partition=found.partition,
        offset=found.committed if found.committed >= 0 else None,
        end=found.high,
        lag_records=max(0, found.high - max(position, found.low)),
        delivered_until=at if position >= found.high and not where.gap else until,
        state="stopped" if where.is_stopped else "reading",
        message=where.gap,
    )


def _is_settled(state: PartitionState, until: float, at_moment: int) -> bool:
    """Return whether everything up to a moment is settled; `at_moment` is the first offset from then on."""
    if state.state == "stopped":
        return False
    if state.delivered_until is not None and state.delivered_until >= until:
        return True
    return at_moment >= 0 and (state.offset or 0) >= at_moment
