"""
The partitions of this process in a consumer group: where reading them begins, and how they go to another member.

Before a rebalance continues, revoked partitions are handed over: records in flight may settle and are saved; after
that, this process counts nothing of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import structlog
from anyio.from_thread import BlockingPortal
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from msgspec.structs import replace

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import NO_LEADER, KafkaError, describe, error_of
from shipper.kafka.documents import Metadata, ledger_offsets
from shipper.kafka.member_status import MemberStatus
from shipper.kafka.offsets import PartitionOffsets, Start, diverged_at, read_offsets, start_of, topics_problem
from shipper.kafka.stream import KafkaStream, Partition, Session
from shipper.model.errors import ConfigError
from shipper.model.records import Checkpoint, Stream

log = structlog.get_logger("kafka")

_POLL_S: Final = 0.05
_RETRY_S: Final = 0.5
_CALL_S: Final = 5.0
_MEMBERSHIP_INTERVAL_S: Final = 0.1
_NO_GENERATION: Final = b"CGMDv2:\xff\xff\xff\xff"


class AttachedPipeline(Protocol):
    """The part of the pipeline that rebalances need."""

    async def hand_over(self, streams: Sequence[Stream], *, wait_s: float, is_lost: bool) -> None: ...

    async def save(self, idle: Sequence[Checkpoint] = ()) -> None: ...


class PipelineLink:
    """
    Calls the pipeline from the polling thread.

    Attributes:
        pipeline: None before the run.
        portal: To the event loop of the pipeline; None outside the run.
    """

    def __init__(self) -> None:
        self.portal: BlockingPortal | None = None
        self.pipeline: AttachedPipeline | None = None

    def start(self, function: Callable[..., Any], *arguments: object) -> Future[Any] | None:
        """Start a coroutine function in the event loop; return None if the run has ended."""
        if self.portal is None:
            return None
        try:
            return self.portal.start_task_soon(function, *arguments)
        except RuntimeError:
            self.portal = None
            return None


class Assignment:
    """
    The assigned partitions. Only the polling thread calls the methods; the client calls some of them within `consume`.

    Args:
        ranges: The offsets to read; None = all, without end.
        wakeup: Set to end a wait.
        closing: Set once the member leaves the group.

    Attributes:
        settings: Replaced after a reload.
        streams: One for each partition.
        revoked: Partitions revoked during the current call of `consume`.
        membership: The consumer's group metadata, which proves its generation to the brokers; None while this process
            is not a member. Only the thread reads it from the client, which blocks other callers while it polls.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        consumer: Consumer,
        admin: AdminClient,
        status: MemberStatus,
        link: PipelineLink,
        *,
        ranges: Mapping[Partition, range] | None,
        max_record_bytes: int,
        now: Callable[[], float],
        wall_time: Callable[[], float],
        wakeup: threading.Event,
        closing: threading.Event,
    ) -> None:
        self.settings = settings
        self._consumer = consumer
        self._admin = admin
        self._status = status
        self._link = link
        self._ranges = ranges
        self._max_record_bytes = max_record_bytes
        self._now = now
        self._wall_time = wall_time
        self._wakeup = wakeup
        self._closing = closing
        self._next_stream_id = count(1).__next__
        self._has_reported_topics = False
        self._membership_read_at = -_MEMBERSHIP_INTERVAL_S
        self._offsets_read_at = 0.0  # seconds since the epoch
        self.streams: dict[Partition, KafkaStream] = {}
        self.revoked: set[Partition] = set()
        self.is_paused = False
        self.membership: object = None

    def _wait(self, limit_s: float) -> None:
        self._wakeup.clear()
        self._wakeup.wait(limit_s)

    def subscribe(self) -> None:
        """Join the group; the client then assigns and revokes partitions while it is polled."""
        self._consumer.subscribe(
            list(self.settings.topics),
            on_assign=self._assign,
            on_revoke=partial(self._revoke, is_lost=False),
            on_lost=partial(self._revoke, is_lost=True),
        )

    def refresh_membership(self) -> None:
        """Read the membership, unless that was done a moment ago."""
        if self._now() >= self._membership_read_at + _MEMBERSHIP_INTERVAL_S:
            self._membership_read_at, self.membership = self._now(), self._read_membership()

    def _read_membership(self) -> object:
        """
        Return the group metadata of the consumer; None while it is not a member.

        The brokers accept offsets from a client that claims no membership at all, and this client does so as soon as it
        learns that it was removed.
        """
        metadata = self._consumer.consumer_group_metadata()
        is_removed = bytes(metadata).startswith(_NO_GENERATION) or not self._consumer.memberid()
        return None if is_removed else metadata

    def pause(self, is_paused: bool) -> None:
        """Stop or resume fetching."""
        self.is_paused = is_paused
        partitions = [TopicPartition(*key) for key, stream in self.streams.items() if not stream.is_halted]
        if partitions:
            (self._consumer.pause if is_paused else self._consumer.resume)(partitions)

    def seek(self, stream: KafkaStream) -> None:
        """Read a partition from its start."""
        stream.eof = -1
        try:
            self._consumer.seek(_start_of(stream))
        except KafkaException:  # the client has stopped reading it, or is still resolving its start offset
            self._consumer.incremental_unassign([_start_of(stream)])
            self._begin([stream])

    def _begin(self, streams: Sequence[KafkaStream]) -> None:
        """Assign partitions and seek to their starts, as only a seek makes the client check a leader epoch."""
        checked = [_start_of(stream) for stream in streams if stream.first_epoch >= 0]
        halted = [_start_of(stream) for stream in streams if self.is_paused or stream.is_halted]
        if paused := [*checked, *halted]:
            self._consumer.pause(paused)  # fetch nothing before the check
        self._consumer.incremental_assign([_start_of(stream) for stream in streams])
        limit = self._now() + _CALL_S
        for start in checked:
            while not self._closing.is_set():
                try:
                    self._consumer.seek(start)
                    break
                except KafkaException:  # the assignment takes effect in another thread
                    if self._now() >= limit:
                        raise
                    self._wait(_POLL_S)
        if reading := [start for start in checked if start not in halted]:
            self._consumer.resume(reading)

    def idle_checkpoints(self, streams: Iterable[KafkaStream]) -> list[Checkpoint]:
        """Return checkpoints without records, for the positions that must be saved although nothing is settled."""
        return [
            Checkpoint(stream=stream, start_offset=stream.read_offset, end_offset=stream.read_offset)
            for stream in streams
            if stream.is_waiting or stream.is_ahead
        ]

    def read_saved(self) -> None:
        """Read the partitions of which it is now saved where reading begins."""
        for key, stream in self.streams.items():
            if stream.is_waiting and stream.committed is not None:
                stream.is_waiting = False
                self.seek(stream)
                if not self.is_paused and not stream.is_halted:
                    self._consumer.resume([TopicPartition(*key)])

    # Rebalances; called by the client within `consume` ----------------------------------------------------------------

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(partition.topic, partition.partition) for partition in partitions]
        starts = self._find_starts(keys) if partitions else {}
        for key, (offsets, start) in starts.items():
            self.streams[key] = self._new_stream(offsets, start)
        if not starts:  # no partitions, or this process is ending
            self._status.remove_obstacles()
            consumer.incremental_assign(partitions)
            return
        self._begin([self.streams[key] for key in starts])
        self._status.remove_obstacles()
        self._note_rebalance("assigned", len(partitions))

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition], *, is_lost: bool) -> None:
        """Hand partitions over: unless they are lost, let records in flight settle, and save; then drop the streams."""
        keys = {(partition.topic, partition.partition) for partition in partitions}
        self.revoked |= keys
        streams = [self.streams[key] for key in keys & self.streams.keys()]
        self._hand_over(streams, is_lost=is_lost)
        for stream in streams:
            del self.streams[stream.topic_partition]
            self._status.tombstones_skipped += stream.tombstones_skipped
        consumer.resume(partitions)  # otherwise a paused partition would be paused when assigned again
        consumer.incremental_unassign(partitions)
        self._note_rebalance("lost" if is_lost else "revoked", len(keys))

    def _hand_over(self, streams: Sequence[KafkaStream], *, is_lost: bool) -> None:
        for stream in streams:
            stream.is_ending = True
        if self._link.portal is None or self._link.pipeline is None or not streams:
            return
        self.membership = self._read_membership()  # the new generation's, as the brokers refuse the old one
        if not is_lost:
            self._link.start(self._link.pipeline.save, self.idle_checkpoints(streams))
        wait_s = self.settings.revoke_wait_seconds
        done = self._link.start(partial(self._link.pipeline.hand_over, streams, wait_s=wait_s, is_lost=is_lost))
        if done is not None:
            with suppress(CancelledError):
                done.result()

    def _note_rebalance(self, kind: str, partitions: int) -> None:
        self._status.note_rebalance(kind, partitions, len(self.streams))
        self._membership_read_at = -_MEMBERSHIP_INTERVAL_S  # the membership has changed

    # Start offsets --------------------------------------------------------------------------------------------------

    def _find_starts(
        self, keys: Sequence[Partition], *, are_gone: bool = False
    ) -> dict[Partition, tuple[PartitionOffsets, Start]]:
        """
        Query where to begin until the brokers answer, as nothing may be read before; return {} if closed.

        A partition that does not exist or has no leader is stopped: the group may still assign it to the member.
        """
        # The brokers learn of a new partition later than their controller.
        limit = self._now() + (0 if are_gone else _CALL_S)
        while not self._closing.is_set():
            self._offsets_read_at = self._wall_time()
            try:
                is_last_try = self._now() >= limit
                offsets = self._read_offsets(keys, may_be_missing=is_last_try)
                if not all(partition.metadata.topic_id for partition in offsets.values()):
                    offsets = self._fill_from_ledger(keys, may_be_missing=is_last_try)
                return {
                    key: (offsets[key], self._start(offsets[key])) if key in offsets else _missing(key) for key in keys
                }
            except (KafkaException, TimeoutError, ConfigError) as exception:  # a changed secret may be unreadable
                error = error_of(exception)
                self._status.note_error(error)
                log.warning("offsets_unknown", error=describe(error))
                self._wait(_RETRY_S)
        return {}

    def _read_offsets(self, keys: Sequence[Partition], *, may_be_missing: bool) -> dict[Partition, PartitionOffsets]:
        """Query the offsets of partitions; leave out those that do not exist, or wait for them and for leaders."""
        offsets = read_offsets(self._admin, self.settings, sorted({key[0] for key in keys}), _CALL_S)
        for topic, number in () if may_be_missing else keys:
            if (topic, number) not in offsets:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"no partition {topic}/{number}"))
            if not offsets[topic, number].topic_id:
                raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, f"{topic}/{number}: {NO_LEADER}"))
        return {key: offsets[key] for key in keys if key in offsets}

    def _fill_from_ledger(
        self, keys: Sequence[Partition], *, may_be_missing: bool
    ) -> dict[Partition, PartitionOffsets]:
        """
        Query offsets; fill in missing ones of the group from the ledger or the start of the ranges.

        The ledger is read before the offsets. So if it contains a topic without offsets, they have expired, and another
        member has not begun to read it just now.
        """
        saved, topics = ledger_offsets(self.settings)
        topic_ids = {topic_id for topic_id, _ in saved}
        offsets = self._read_offsets(keys, may_be_missing=may_be_missing)

        def fill(partition: PartitionOffsets) -> PartitionOffsets:
            if partition.initial_partitions is None and partition.topic_id in topic_ids:
                first_unknown = next(number for number in count() if (partition.topic_id, number) not in saved)
                partition = partition._replace(initial_partitions=first_unknown)
            elif partition.initial_partitions is None and partition.topic in topics:  # the topic was recreated
                partition = partition._replace(initial_partitions=0)
            settled = saved.get((partition.topic_id, partition.partition))
            if partition.committed is not None:
                first = partition.low if settled is None and partition.is_added else settled
                if first is None or partition.metadata.topic_id:
                    return partition
                if first > partition.committed:
                    log.warning(
                        "offset_moved_back",
                        partition=f"{partition.topic}/{partition.partition}",
                        message=f"another program has moved the group from record {first} back to "
                        f"{partition.committed}: the records in between are sent and counted again",
                    )
                # What was deleted before `first` is settled, and there is nothing after the end.
                committed = max(partition.committed, min(first, partition.low))
                committed = min(committed, max(first, partition.high))
                return partition._replace(committed=committed, passed_over_from=first if first < committed else None)
            first = None if self._ranges is None else self._range(partition).start
            return partition._replace(committed=first if settled is None else settled)

        return {key: fill(partition) for key, partition in offsets.items()}

    def _range(self, offsets: PartitionOffsets) -> range:
        assert self._ranges is not None
        return self._ranges.get((offsets.topic, offsets.partition), range(offsets.high, offsets.high))

    def _start(self, offsets: PartitionOffsets) -> Start:
        return start_of(offsets, self.settings, None if self._ranges is None else self._range(offsets).stop)

    def _new_stream(self, offsets: PartitionOffsets, start: Start) -> KafkaStream:
        is_saved = not start.gap and (self._ranges is not None or offsets.metadata.topic_id == offsets.topic_id)
        stream = KafkaStream(
            stream_id=self._next_stream_id(),
            path=f"{offsets.topic}/{offsets.partition}",
            topic=offsets.topic,
            partition=offsets.partition,
            topic_id=offsets.topic_id,
            first=start.offset,
            first_epoch=start.epoch,
            end=offsets.end,
            committed=offsets.committed if is_saved else None,
            is_waiting=not is_saved and not start.is_stopped,
            initial_partitions=offsets.partitions if offsets.initial_partitions is None else offsets.initial_partitions,
            until=None if self._ranges is None else self._range(offsets).stop,
            session=Session(),
            stopped=start.gap if start.is_stopped else "",
            is_leaderless=start.is_leaderless,
            max_record_bytes=self._max_record_bytes,
            skips_tombstones=self.settings.tombstones == "skip",
        )
        if not start.gap:
            stream.settled_until = offsets.metadata.settled_until
            stream.mistakes = stream.saved_mistakes = dict(offsets.metadata.mistakes)
            stream.note_end(offsets.end, self._offsets_read_at)
        if not self._has_reported_topics and (problem := topics_problem(offsets, self.settings)):
            self._has_reported_topics = True  # likely the same in all partitions
            log.warning("settings_differ", message=problem)
        if start.is_stopped:
            log.error("partition_stopped", message=start.gap)
        elif start.gap:
            stream.unreachable = start.missing
            self._status.unreachable_records += start.missing
            log.error("source_unreachable", message=start.gap, records=start.missing)
        return stream

    def restart(
        self, stream: KafkaStream, *, is_lost: bool = False, is_gone: bool = False, reset: KafkaError | None = None
    ) -> None:
        """Restart a partition after a gap, which `reset` describes, a recreated topic, or a change of `on_gap`."""
        if self._link.portal is None:
            return
        self._hand_over([stream], is_lost=is_lost)
        starts = self._find_starts([stream.topic_partition], are_gone=is_gone)
        if not starts:
            return
        offsets, start = starts[stream.topic_partition]
        is_missing = not offsets.topic_id
        if is_missing:
            pass
        elif offsets.topic_id != stream.topic_id:  # the brokers have deleted the group's offset with the old topic
            offsets = offsets._replace(committed=stream.next_offset, metadata=Metadata(stream.topic_id))
            start = self._start(offsets)
        elif reset is not None:  # the client has checked the epoch
            at = diverged_at(reset.str())
            last = None if at is None else offsets.metadata.last
            offsets = offsets._replace(diverged_at=at, metadata=replace(offsets.metadata, last=last))
            start = self._start(offsets)._replace(epoch=-1)
        self.streams[stream.topic_partition] = new = self._new_stream(offsets, start)
        self._status.tombstones_skipped += stream.tombstones_skipped
        partition = TopicPartition(*stream.topic_partition)
        if new.is_halted:
            self._consumer.pause([partition])
        if not is_missing:
            self.seek(new)
        if not new.is_halted and not self.is_paused:
            self._consumer.resume([partition])


def _missing(key: Partition) -> tuple[PartitionOffsets, Start]:
    gap = (
        f"{key[0]}/{key[1]}: the partition does not exist any more: the topic was recreated with fewer partitions. To "
        "continue without it, restart this member"
    )
    return PartitionOffsets(*key, topic_id="", low=0, high=0, end=0), Start(0, gap, is_stopped=True)


def _start_of(stream: KafkaStream) -> TopicPartition:
    return TopicPartition(*stream.topic_partition, stream.first, leader_epoch=stream.first_epoch)
