"""Positions of a group in its topics: settled offsets, where reading begins, and the ranges of a backfill."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from typing import Final, NamedTuple, final

import structlog
from confluent_kafka import Consumer, ConsumerGroupState, IsolationLevel, TopicCollection, TopicPartition
from confluent_kafka import KafkaException as KafkaException
from confluent_kafka.admin import AdminClient, MemberDescription, OffsetSpec
from msgspec import Struct
from msgspec.structs import replace

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    NO_LEADER,
    admin_client,
    client_properties,
    consumer_properties,
    describe_group,
    error_of,
    offsets_at,
    retry_transient,
    topic_exception,
    translate_errors,
)
from shipper.kafka.documents import UNKNOWN, Metadata, count_letters, read_metadata
from shipper.kafka.stream import Partition, Position
from shipper.model.errors import SourceError
from shipper.model.group import PartitionState

log = structlog.get_logger("kafka")

SCHEME: Final = "kafka://"
_TOPIC: Final = re.compile(r"[\w.-]+", re.ASCII)
_PARTITION: Final = re.compile(r"\d{1,9}", re.ASCII)
_OFFSETS: Final = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_FORMS: Final = f"{SCHEME}TOPIC, {SCHEME}TOPIC/PARTITION or {SCHEME}TOPIC/PARTITION:START-END"
_DIVERGED_AT: Final = re.compile(r"broker end offset is (-?\d+)")
_HIDDEN: Final = "the last records belong to or follow a producer's open transaction, and can be read once it has ended"
_FOREIGN: Final = "if records are missing, the log and /readyz of the member that reads it say so"
_CALL_S: Final = 15.0


# Offsets in the brokers -----------------------------------------------------------------------------------------------


class PartitionOffsets(NamedTuple):
    """
    The offsets of a partition in the brokers.

    Attributes:
        topic_id: The id of the topic that has the name now; empty if the partition has no leader to ask for offsets.
        low, high: Its first offset, and the one after its last record outside open transactions.
        end: The one after its last record, even one in or after an open transaction, hidden from members.
        committed: The offset of the group, or None.
        metadata: What the group has committed with it; `UNKNOWN` if shipper did not commit it.
        passed_over_from: The offset of the group in its ledger, if another program has committed a later one; or None.
        diverged_at: The offset from which the log is not the one that was read; None = unknown or nowhere.
        partitions: Number of partitions of the topic.
        initial_partitions: Their number when the group began to read the topic, 0 = unknown; None if it has not begun.
    """

    topic: str
    partition: int
    topic_id: str
    low: int
    high: int
    end: int
    committed: int | None = None
    metadata: Metadata = UNKNOWN
    passed_over_from: int | None = None
    diverged_at: int | None = None
    partitions: int = 0
    initial_partitions: int | None = None

    @property
    def is_added(self) -> bool:
        """Whether the partition was added after the group had begun to read the topic."""
        return self.initial_partitions is not None and self.partition >= self.initial_partitions


def read_offsets(
    admin: AdminClient,
    settings: KafkaSettings,
    topics: Sequence[str],
    limit_s: float,
    *,
    is_stable: bool = True,
    are_arguments: bool = False,
) -> dict[Partition, PartitionOffsets]:
    """
    Query the offsets of all partitions of topics.

    Args:
        is_stable: Wait for open transactions, which may commit greater offsets.
        are_arguments: The topics are from the command line, not from the settings.
    Raises:
        KafkaException, TimeoutError: The brokers do not answer, or a topic does not exist.
        ConfigError: As for `client_properties`.
    """
    described = admin.describe_topics(TopicCollection([*topics]), request_timeout=limit_s)
    topics_by_name = {}
    for name, future in described.items():
        try:
            topics_by_name[name] = future.result(limit_s)
        except KafkaException as exception:
            raise topic_exception(error_of(exception), name, is_input=True, is_argument=are_arguments) from None
    partitions = [
        TopicPartition(name, partition.id) for name, topic in topics_by_name.items() for partition in topic.partitions
    ]
    isolation = "read_committed" if is_stable else "read_uncommitted"
    properties = client_properties(settings) | consumer_properties(settings) | {"isolation.level": isolation}
    # A new client, as one that knows a coordinator keeps asking it even if another broker has taken over.
    with closing(Consumer(properties)) as consumer:
        try:
            committed = committed_offsets(consumer, partitions, limit_s)
        except KafkaException:
            # Without a right on the group, the call only times out; the reason arrives as a message.
            message = consumer.poll(0)
            if message is not None and (error := message.error()) is not None:
                raise KafkaException(error) from None
            raise
    metadata = {key: read_metadata(position.metadata) for key, position in committed.items() if position.offset >= 0}
    initial_partitions: dict[str, int] = {}
    for (name, _), known in metadata.items():
        if known.topic_id:
            initial_partitions[name] = min(known.initial_partitions, initial_partitions.get(name, sys.maxsize))
    led = [
        TopicPartition(name, partition.id)
        for name, topic in topics_by_name.items()
        for partition in topic.partitions
        if partition.leader is not None
    ]
    lows, ends = (offsets_at(admin, led, spec, limit_s) for spec in (OffsetSpec.earliest(), OffsetSpec.latest()))
    highs = offsets_at(admin, led, OffsetSpec.latest(), limit_s, IsolationLevel.READ_COMMITTED)
    offsets = {}
    for key, position in committed.items():
        topic = topics_by_name[key[0]]
        at = max(0, position.offset)  # of a partition without a leader, nothing else is known
        offsets[key] = PartitionOffsets(
            *key,
            topic_id=str(topic.topic_id) if key in lows else "",
            low=lows.get(key, at),
            high=highs.get(key, at),
            end=max(ends.get(key, at), highs.get(key, at)),
            committed=position.offset if position.offset >= 0 else None,
            metadata=metadata.get(key, UNKNOWN),
            partitions=len(topic.partitions),
            initial_partitions=initial_partitions.get(key[0]),
        )
    return offsets


@retry_transient
def committed_offsets(
    consumer: Consumer, partitions: Sequence[TopicPartition], limit_s: float
) -> dict[Partition, TopicPartition]:
    """
    Query the committed offsets of the consumer's group; negative = none.

    Requests of an AdminClient to a coordinator can abort the process when that fails (librdkafka issues 4605 and 5040).

    Raises:
        KafkaException: As for `read_offsets`.
    """
    committed = consumer.committed([*partitions], limit_s)
    for position in committed:
        if position.error is not None:
            raise KafkaException(position.error)
    return {(position.topic, position.partition): position for position in committed}


# Where reading begins -------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """
    Where reading begins.

    Attributes:
        gap: A description of the records missing before it; empty if none are.
        missing: Number of missing records; 0 = unknown or none.
        is_stopped: Do not read the partition.
        is_leaderless: It has no leader.
        epoch: The leader epoch of the record before `offset`, for the brokers to check; -1 = nothing to check.
    """

    offset: int
    gap: str = ""
    missing: int = 0
    is_stopped: bool = False
    is_leaderless: bool = False
    epoch: int = -1


def start_of(offsets: PartitionOffsets, settings: KafkaSettings, until: int | None = None) -> Start:
    """Decide where reading begins, up to an offset `until`; unread records are never skipped silently."""
    where, committed = f"{offsets.topic}/{offsets.partition}", offsets.committed
    low = offsets.low if until is None else min(offsets.low, until)
    if not offsets.topic_id:
        return Start(offsets.low, f"{where}: {NO_LEADER}", is_stopped=True, is_leaderless=True)
    if committed is None:
        # `start` applies only to the first start of a group; partitions added later, and those of a recreated topic,
        # begin at their beginning.
        if settings.start == "stop" and not offsets.is_added:
            gap = 'the group has no offset, and input.kafka.start is "stop". To read it, change that, and restart'
            return Start(offsets.low, f"{where}: {gap}", is_stopped=True)
        return Start(offsets.high if settings.start == "end" and not offsets.is_added else offsets.low)
    known = offsets.metadata
    last = known.last if known.last and known.last.offset >= offsets.low else Position(committed)
    if known.topic_id not in {"", offsets.topic_id}:
        position = f"the group was at offset {committed:,} of the old topic"
        start = Start(offsets.low, f"{where}: the topic was deleted and recreated: {position}")
    elif committed < low:
        gap = f"records {committed:,} to {low - 1:,} were deleted before they were read (retention)"
        start = Start(offsets.low, f"{where}: {gap}", low - committed)
    elif offsets.passed_over_from is not None:
        first = offsets.passed_over_from
        gap = f"another program has moved the group from record {first:,} to {committed:,}; to read them, move it back"
        start = Start(committed, f"{where}: {gap}", committed - first)
    elif offsets.diverged_at is not None and offsets.diverged_at < last.offset:
        first = max(offsets.low, offsets.diverged_at)
        gap = f"the brokers have lost records {first:,} to {last.offset - 1:,}, which the group has read"
        start = Start(first, f"{where}: {gap}; other records may be in their place")
    elif committed > offsets.high:
        gap = f"the group is at offset {committed:,}, and the partition ends at {offsets.high:,}"
        # If the epoch is known, the brokers tell where the log diverged once it is read.
        first, epoch = (offsets.high, -1) if last.epoch < 0 else last
        start = Start(first, f"{where}: {gap}: it was truncated or recreated", epoch=epoch)
    else:
        # Only transaction markers are between the last message and the committed offset, unless the log has diverged.
        return Start(last.offset, epoch=last.epoch)
    if settings.on_gap == "continue":
        return start
    advice = (
        'reading of this partition has stopped. To continue after the gap, set input.kafka.on_gap = "continue" and '
        f"{'reload (SIGHUP)' if until is None else 'run this again'}; the missing records are reported as unreachable"
    )
    return start._replace(gap=f"{start.gap}; {advice}", is_stopped=True, epoch=-1)


def diverged_at(text: str) -> int | None:
    """Return from which offset a log is not the one that was read, according to an error of the client; -1 = all."""
    match = _DIVERGED_AT.search(text)
    return None if match is None else int(match[1])


def topics_problem(offsets: PartitionOffsets, settings: KafkaSettings) -> str:
    """Return a message if the member that committed last writes to other topics than these settings name."""
    known = offsets.metadata
    topics = ("dead_letter_topic", known.letters, settings.letters), ("ledger_topic", known.ledger, settings.ledger)
    others = [f"{key} is {theirs} there and {ours} here" for key, theirs, ours in topics if theirs not in {"", ours}]
    if not others:
        return ""
    return (
        f"{offsets.topic}/{offsets.partition}: the last commit is of a member with other settings, input.kafka."
        f"{' and '.join(others)}; commands find only what is in the topics of their own settings, so all members need "
        "the same ones"
    )


# The state of a group -------------------------------------------------------------------------------------------------


class GroupStatus(Struct, frozen=True, kw_only=True):
    """
    The status of a group, as printed by `shipper status`.

    Attributes:
        state: The brokers' term, such as `stable`.
        partitions: Of all topics, in descending order of lag.
        late: Partitions, as topic/number, that may have unsettled records from before `until`.
        owners: Members by partition, as topic/number, for partitions that a member reads.
        dead_letters: Number of stored dead letters; None = unknown, see `problem`.
        problem: Why they could not be counted.
    """

    at: float
    group: str
    state: str
    members: int
    partitions: list[PartitionState]
    until: float | None = None
    late: list[str] = []
    owners: dict[str, str] = {}
    dead_letters: int | None = None
    problem: str = ""

    @property
    def lag_records(self) -> int:
        return sum(partition.lag_records for partition in self.partitions)

    @property
    def is_delivered(self) -> bool:
        return self.until is not None and not self.late and self.until <= self.at and bool(self.partitions)


def group_status(settings: KafkaSettings, at: float, until: float | None = None) -> GroupStatus:
    """
    Query the status of a group from the brokers; no member needs to be running.

    Args:
        at: The current time, taken before the call.
        until: Also determine whether everything up to this time is settled.
    Raises:
        SourceError: The query failed.
    """
    right = f"DESCRIBE on the group {settings.group_id} and the topics {', '.join(settings.topics)}"
    with _admin(settings, f"group {settings.group_id}", right) as admin:
        # First, as without a right on the group the offsets are refused only after the time limit.
        group = describe_group(admin, settings.group_id, _CALL_S)
        offsets = read_offsets(admin, settings, settings.topics, _CALL_S, is_stable=False)
        firsts: dict[Partition, int] = {}
        if until is not None:
            led = [key for key, partition in offsets.items() if partition.topic_id]
            firsts = _offsets_since(until, admin, led)
            for key, offset in _offsets_since(at, admin, led).items():
                if firsts[key] == offset:  # from a clock that is ahead, so what follows may be from before `until`
                    firsts[key] = -1
    dead_letters, problem = _count_letters(settings)
    states = [_partition_state(partition, settings, at) for partition in offsets.values()]
    states.sort(key=lambda state: (-state.lag_records, state.topic, state.partition))
    late = [
        f"{state.topic}/{state.partition}"
        for state in states
        if until is not None and not _is_settled(state, until, firsts.get((state.topic, state.partition), -1))
    ]
    is_empty = group.state in {ConsumerGroupState.EMPTY, ConsumerGroupState.DEAD}
    return GroupStatus(
        at=at,
        group=settings.group_id,
        state="empty" if is_empty else group.state.name.lower().replace("_", " "),
        members=len(group.members),
        partitions=states,
        until=until,
        late=late,
        owners={
            f"{partition.topic}/{partition.partition}": _describe_member(member)
            for member in group.members
            for partition in (member.assignment.topic_partitions if member.assignment else ())
        },
        dead_letters=dead_letters,
        problem=problem,
    )


@contextmanager
def _admin(settings: KafkaSettings, subject: str, right: str = "") -> Iterator[AdminClient]:
    """Yield a client to examine a subject; errors as for `translate_errors`."""
    with translate_errors(settings, f"{subject} cannot be examined", right), admin_client(settings, _CALL_S) as admin:
        yield admin


def _offsets_since(time_s: float, admin: AdminClient, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """Return the first offsets from a time on; -1 = none."""
    spec = OffsetSpec.for_timestamp(max(0, int(1000 * time_s)))  # negative ones are not times
    return offsets_at(admin, [TopicPartition(*key) for key in partitions], spec, _CALL_S)


def _describe_member(member: MemberDescription) -> str:
    name = member.group_instance_id or member.member_id.rpartition("-")[2]
    return f"{name} at {member.host.lstrip('/')}"


def _count_letters(settings: KafkaSettings) -> tuple[int | None, str]:
    """Count the dead letters; if this fails, return None and the reason."""
    right = f"READ on the topic {settings.letters}"
    try:
        with translate_errors(settings, f"the dead letters of group {settings.group_id} cannot be counted", right):
            return count_letters(settings), ""
    except SourceError as error:
        return None, str(error)


def _partition_state(offsets: PartitionOffsets, settings: KafkaSettings, at: float) -> PartitionState:
    start = start_of(offsets, settings)
    committed = offsets.committed if offsets.metadata.topic_id or not offsets.topic_id else None  # by another program
    if committed != offsets.committed:  # only the ledger tells what is missing
        start = Start(start.offset)
    position = max(offsets.low, start.offset if committed is None else committed)
    # Without an offset, it is open where reading begins, so what is there may be unsettled.
    is_begun = committed is not None or (offsets.committed is None and offsets.low >= offsets.end)
    is_at_end = is_begun and position >= offsets.end and not start.gap
    settled_until = offsets.metadata.settled_until
    if start.gap or (settled_until is not None and settled_until > at):  # the clock of a member is ahead
        settled_until = None
    where, note = f"{offsets.topic}/{offsets.partition}", ""
    if offsets.high <= position < offsets.end:
        note = f"{where}: {_HIDDEN}"
    elif committed != offsets.committed:
        note = f"{where}: another program has moved the group to {offsets.committed:,}; {_FOREIGN}"
    return PartitionState(
        topic=offsets.topic,
        partition=offsets.partition,
        offset=committed,
        end=offsets.end,
        lag_records=max(0, offsets.end - position),
        delivered_until=at if is_at_end else settled_until,
        state="stopped" if start.is_stopped else "reading",
        message=start.gap or note or topics_problem(offsets, settings),
    )


def _is_settled(partition: PartitionState, until: float, first: int) -> bool:
    """Return whether everything up to a time is settled; `first` is the first offset from then on, -1 = none."""
    if partition.state == "stopped":
        return False
    if partition.delivered_until is not None and partition.delivered_until >= until:
        return True
    return first >= 0 and (partition.offset or 0) >= first


# Ranges of a backfill -----------------------------------------------------------------------------------------------


@final  # so it is never false
class Selection(Struct, kw_only=True):
    """
    The parts of topics that `backfill kafka://…` reads.

    Attributes:
        parts: Offsets by topic and partition; None = all partitions, or all offsets.
        since_s, until_s: The time range of messages to read, seconds since the epoch.
        name: A hash of the arguments.
        is_empty: No offsets were in it when `ranges` was last called.
    """

    parts: Mapping[tuple[str, int | None], range | None]
    since_s: float | None
    until_s: float | None
    name: str
    is_empty: bool = False

    def settings(self, kafka: KafkaSettings) -> KafkaSettings:
        """Return settings for a separate group that shares dead letters and ledger with the configured group."""
        return replace(
            kafka,
            topics=tuple(dict.fromkeys(topic for topic, _ in self.parts)),
            group_id=f"{kafka.group_id}.backfill.{self.name}",
            dead_letter_topic=kafka.letters,
            ledger_topic=kafka.ledger,
        )

    def ranges(self, kafka: KafkaSettings) -> dict[Partition, range]:
        """Query the offsets up to the current end; raise `SourceError` if the selection does not exist."""
        with _admin(kafka, ", ".join(kafka.topics)) as admin:
            offsets = read_offsets(admin, kafka, kafka.topics, _CALL_S, is_stable=False, are_arguments=True)
            for partition in offsets.values():
                if not partition.topic_id:
                    raise SourceError(start_of(partition, kafka).gap)

            def offsets_from(time_s: float | None, bounds: Mapping[Partition, int]) -> Mapping[Partition, int]:
                if time_s is None:
                    return bounds
                found = _offsets_since(time_s, admin, offsets)
                return {key: offsets[key].end if offset < 0 else offset for key, offset in found.items()}

            firsts = offsets_from(self.since_s, {key: partition.low for key, partition in offsets.items()})
            lasts = offsets_from(self.until_s, {key: partition.end for key, partition in offsets.items()})
        ranges = {}
        for (topic, number), wanted in self.parts.items():
            keys = [key for key in offsets if key[0] == topic and number in {None, key[1]}]
            if not keys:
                raise SourceError(f"topic {topic} has no partition {number}")
            for key in keys:
                if wanted is not None and wanted.stop > offsets[key].end:
                    raise SourceError(f"{topic}/{number} ends at {offsets[key].end:,}, before {wanted.stop:,}")
                ranges[key] = wanted or range(firsts[key], max(firsts[key], lasts[key]))
        if hidden := [f"{key[0]}/{key[1]}" for key, part in ranges.items() if part and part.stop > offsets[key].high]:
            log.warning("transactions_open", message=f"{', '.join(hidden)}: {_HIDDEN}; the range ends after them")
        self.is_empty = not any(ranges.values())
        return ranges


def parse_addresses(
    addresses: Sequence[str], since_s: float | None, until_s: float | None, again: str = ""
) -> Selection:
    """
    Parse addresses such as `kafka://topic`, `kafka://topic/3` and `kafka://topic/3:1000-2000`.

    Args:
        again: Distinguishes this selection from the same one with another value.
    Raises:
        SourceError: An address is malformed, or two name the same partition.
    """
    parts: dict[tuple[str, int | None], range | None] = {}
    for address in addresses:
        topic, number, offsets = _parse_address(address)
        if any(other == topic and (number is None or other_number in {None, number}) for other, other_number in parts):
            raise SourceError(f"{address}: a partition is named twice")
        if offsets is not None and (since_s is not None or until_s is not None):
            raise SourceError(f"{address}: offsets cannot be combined with --since and --until; leave out one of them")
        parts[topic, number] = offsets
    text = repr((sorted(addresses), since_s, until_s, again))
    name = sha256(text.encode()).hexdigest()[:12]
    return Selection(parts=parts, since_s=since_s, until_s=until_s, name=name)


def _parse_address(address: str) -> tuple[str, int | None, range | None]:
    """Return topic, partition and offsets of an address; None = all."""
    place = address.removeprefix(SCHEME)
    topic, slash, rest = place.partition("/")
    partition, colon, bounds = rest.partition(":")
    if place == address or not _TOPIC.fullmatch(topic):
        raise SourceError(f"{address} names no topic; use {_FORMS}")
    if not slash:
        return topic, None, None
    if not _PARTITION.fullmatch(partition):
        raise SourceError(f"{address}: {partition!r} is not the number of a partition; use {_FORMS}")
    if not colon:
        return topic, int(partition), None
    match = _OFFSETS.fullmatch(bounds)
    if match is None:
        raise SourceError(f"{address}: {bounds!r} is not a range of offsets, such as 1000-2000; use {_FORMS}")
    offsets = range(int(match[1]), int(match[2]))
    if not offsets:
        raise SourceError(f"{address}: the offsets must increase; the second one is exclusive")
    return topic, int(partition), offsets
