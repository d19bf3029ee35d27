"""Where a partition is begun that was assigned: at its offset, unless what stands there is not what the group left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shipper.config.settings import KafkaSettings
from shipper.kafka.documents import read_metadata
from shipper.kafka.stream import Place

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition


class Found(NamedTuple):
    """
    What the brokers say of a partition.

    Attributes:
        committed: The group's offset; negative = it has none.
        metadata: What was committed beside it.
        low, high: Where the partition begins and ends.
        topic_id: Of the topic that has the name now.
        is_topic_known: Whether the group has an offset of any partition of the topic.
    """

    topic: str
    partition: int
    committed: int
    metadata: str | None
    low: int
    high: int
    topic_id: str
    is_topic_known: bool


def found_in(
    committed: Iterable[TopicPartition],
    topic_ids: Mapping[str, str],
    ranges: Mapping[Place, tuple[int, int]],
) -> dict[Place, Found]:
    """
    Put together what the brokers say.

    Args:
        committed: The group's offsets of all partitions of the topics.
        topic_ids: By the name of the topic.
        ranges: Where the partitions that are asked about begin and end.
    """
    offsets = {(each.topic, each.partition): each for each in committed}
    known = {topic for (topic, _), each in offsets.items() if each.offset >= 0}
    found = {}
    for place, (low, high) in ranges.items():
        own, topic = offsets[place], place[0]
        found[place] = Found(*place, own.offset, own.metadata, low, high, topic_ids[topic], topic in known)
    return found


class Begin(NamedTuple):
    """
    Where to begin.

    Attributes:
        offset: The first to read.
        gap: What is missing, in words; empty if nothing is.
        missing: How many records that are, if it is known.
        is_stopped: Whether the partition is not to be read.
    """

    offset: int
    gap: str = ""
    missing: int = 0
    is_stopped: bool = False


def begin(found: Found, settings: KafkaSettings) -> Begin:
    """Decide where to begin; never behind records that were not read without a word."""
    where = f"{found.topic}/{found.partition}"
    if found.committed < 0:
        # A partition that was added begins at its beginning: what `start` says is about the first start of a group.
        if settings.start == "beginning" or found.is_topic_known:
            return Begin(found.low)
        if settings.start == "end":
            return Begin(found.high)
        return Begin(found.low, f'{where}: the group has no offset, and input.kafka.start is "stop"', is_stopped=True)
    known = read_metadata(found.metadata)
    if known is not None and known.topic_id != found.topic_id:
        gap = (
            f"{where}: the topic was deleted and made again: the group was at offset {found.committed:,} of the one "
            "that is gone"
        )
        return _gap(Begin(found.high if settings.start == "end" else found.low, gap), settings)
    if found.committed < found.low:
        gap = (
            f"{where}: records {found.committed:,} to {found.low - 1:,} were deleted before they were read (retention)"
        )
        return _gap(Begin(found.low, gap, found.low - found.committed), settings)
    if found.committed > found.high:
        gap = (
            f"{where}: the group is at offset {found.committed:,}, and the partition ends at {found.high:,}: it was "
            "cut off or made again"
        )
        return _gap(Begin(found.high, gap), settings)
    return Begin(found.committed)


def _gap(at: Begin, settings: KafkaSettings) -> Begin:
    if settings.on_gap == "continue":
        return at
    advice = (
        'reading of this partition has stopped. To go on behind them: input.kafka.on_gap = "continue" and SIGHUP; they '
        "are reported as unreachable"
    )
    return at._replace(gap=f"{at.gap}; {advice}", is_stopped=True)
