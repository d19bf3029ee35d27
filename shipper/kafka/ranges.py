"""What `backfill kafka://…` reads: of each partition, from an offset up to another one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from confluent_kafka.admin import AdminClient, OffsetSpec
from msgspec.structs import replace

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import bounds_of, offsets_at, partitions_of, properties, understood
from shipper.kafka.stream import Place
from shipper.model.errors import SourceError

SCHEME: Final = "kafka://"
_ADDRESS: Final = re.compile(SCHEME + r"([\w.-]+)(?:/(\d{1,9})(?::(\d{1,18})-(\d{1,18}))?)?", re.ASCII)
_CALL_S: Final = 15.0


class Wanted(NamedTuple):
    """
    What to read.

    Attributes:
        parts: The offsets by topic and partition; None = all partitions, and all offsets.
        since_s, until_s: Of what was written from a time on, up to another one; seconds since the epoch.
        name: The same for the same arguments.
    """

    parts: dict[tuple[str, int | None], range | None]
    since_s: float | None
    until_s: float | None
    name: str

    def settings(self, kafka: KafkaSettings) -> KafkaSettings:
        """Return the settings of a group of its own, which keeps its dead letters and its ledger with the other's."""
        return replace(
            kafka,
            topics=tuple(dict.fromkeys(topic for topic, _ in self.parts)),
            group_id=f"{kafka.group_id}.backfill.{self.name}",
            dead_letter_topic=kafka.letters,
            ledger_topic=kafka.ledger,
        )

    def ranges(self, kafka: KafkaSettings) -> dict[Place, range]:
        """
        Ask the brokers which offsets these are, up to the present end.

        Raises:
            SourceError: They cannot be asked, or have no such partition or offset.
        """
        with understood(kafka, f"{', '.join(kafka.topics)} cannot be looked at"):
            admin = AdminClient(properties(kafka))
            _, whole = partitions_of(admin, kafka.topics, _CALL_S)
            bounds = bounds_of(admin, whole, _CALL_S)

            def at(time_s: float | None, side: int) -> dict[Place, int]:
                if time_s is None:
                    return {place: each[side] for place, each in bounds.items()}
                found = offsets_at(admin, whole, OffsetSpec.for_timestamp(int(1000 * time_s)), _CALL_S)
                return {place: bounds[place][1] if offset < 0 else offset for place, offset in found.items()}

            firsts, lasts = at(self.since_s, 0), at(self.until_s, 1)
            found = {}
            for (topic, number), offsets in self.parts.items():
                places = [place for place in bounds if place[0] == topic and number in {None, place[1]}]
                if not places:
                    raise SourceError(f"topic {topic} has no partition {number}")
                for place in places:
                    if offsets is not None and offsets.stop > bounds[place][1]:
                        raise SourceError(f"{topic}/{number} ends at {bounds[place][1]:,}, before {offsets.stop:,}")
                    found[place] = offsets or range(firsts[place], max(firsts[place], lasts[place]))
            return found


def wanted(addresses: Sequence[str], since_s: float | None, until_s: float | None, again: str = "") -> Wanted:
    """
    Read addresses such as `kafka://topic`, `kafka://topic/3` and `kafka://topic/3:1000-2000`.

    Args:
        again: Is not the same as without it, or with another one.
    Raises:
        SourceError: One is none, or two name the same partition.
    """
    parts: dict[tuple[str, int | None], range | None] = {}
    for address in addresses:
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise SourceError(
                f"{address} names no topic; write {SCHEME}TOPIC, {SCHEME}TOPIC/PARTITION or "
                f"{SCHEME}TOPIC/PARTITION:OFFSET-END"
            )
        topic, partition, *bounds = found.groups()
        number = None if partition is None else int(partition)
        if any(each[0] == topic and (number is None or each[1] in {None, number}) for each in parts):
            raise SourceError(f"{address}: a partition is named twice")
        offsets = range(*map(int, bounds)) if bounds[0] else None
        if offsets is not None and (not offsets or since_s is not None or until_s is not None):
            raise SourceError(f"{address}: the offsets must rise, and stand without --since and --until")
        parts[topic, number] = offsets
    text = repr((sorted(addresses), since_s, until_s, again))
    return Wanted(parts, since_s, until_s, sha256(text.encode()).hexdigest()[:12])
