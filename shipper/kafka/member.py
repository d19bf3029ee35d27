"""
A member of a consumer group: one thread owns the consumer, polls it, and handles rebalances.

The thread puts chunks into a bounded queue, from which the pipeline takes them. While the queue is full, it pauses the
partitions and continues polling, for hours if necessary: a member that does not poll is removed from its group. Before
a rebalance continues, revoked partitions are handed over: records in flight may settle and are saved; after that, this
process counts nothing of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count, groupby
from typing import Any, Final, Protocol

import structlog
from anyio import Event
from anyio.from_thread import BlockingPortal
from anyio.streams.memory import MemoryObjectSendStream
from confluent_kafka import Consumer, IsolationLevel, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    UNKNOWN_TOPIC,
    KafkaError,
    client_properties,
    consumer_properties,
    describe,
    error_of,
    name_taken_error,
)
from shipper.kafka.documents import Metadata, ledger_offsets
from shipper.kafka.member_status import MemberStatus
from shipper.kafka.offsets import PartitionOffsets, Start, committed_offsets, diverged_at, read_offsets, start_of
from shipper.kafka.stream import KafkaStream, Partition, Session
from shipper.model.errors import ConfigError, DeliveryGaveUpError, ShipperError
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream

log = structlog.get_logger("kafka")

_FETCH_BYTES: Final = 3 << 18  # fetched at once, so that each partition yields one chunk
_FETCH_MESSAGES_MAX: Final = 5000
_POLL_S: Final = 0.05
_RETRY_S: Final = 0.5
_PAUSE_AFTER_S: Final = 1.0  # pausing discards fetched messages, so it is not worth it for short waits
_QUEUED_BYTES: Final = 2 << 20
_QUEUED_CHUNKS: Final = 64
_CALL_S: Final = 5.0
_END_INTERVAL_S: Final = 1.0  # between queries of the ends of partitions: the headline is as current as they are
_TOPIC_INTERVAL_S: Final = 30.0  # between queries of topic ids
_RANGE_INTERVAL_S: Final = 0.5
_MEMBERSHIP_INTERVAL_S: Final = 0.1
_NO_GENERATION: Final = b"CGMDv2:\xff\xff\xff\xff"
_CLOSE_S: Final = 10.0


class AttachedPipeline(Protocol):
    """The part of the pipeline that rebalances need."""

    async def hand_over(self, streams: Sequence[Stream], *, wait_s: float, is_lost: bool) -> None: ...

    async def save(self) -> None: ...


class Member:
    """
    A group member as a source of the pipeline.

    Args:
        ranges: The offsets to read; None = all, without end.
        give_up_after_s: Maximum wait for brokers that prevent reading `ranges`.

    Attributes:
        admin: Queries the brokers.
        status: The counts and obstacles of this member.
        unfinished: Once the group has settled all other ranges, the partitions whose ranges cannot be read to their
            end; None until then.
        failure: Why this process can no longer be a member; None while it can.
        membership: The consumer's group metadata, which proves its generation to the brokers; None while this process
            is not a member. Only the thread reads it, as the client blocks other callers while it polls.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        max_record_bytes: int,
        now: Callable[[], float],
        wall_time: Callable[[], float],
        ranges: Mapping[Partition, range] | None = None,
        give_up_after_s: float = 0.0,
    ) -> None:
        self._settings = settings
        self._max_record_bytes = max_record_bytes
        self._now = now
        self._wall_time = wall_time
        self._ranges = ranges
        self._give_up_after_s = give_up_after_s
        self.status = MemberStatus(settings, wall_time=wall_time)
        properties = client_properties(settings)
        self.admin = AdminClient(properties)
        self._consumer = Consumer(properties | consumer_properties(settings) | {"error_cb": self._note_client_error})
        self._thread = threading.Thread(target=self._run, name="kafka", daemon=True)
        self._portal: BlockingPortal | None = None
        self._pipeline: AttachedPipeline | None = None
        self._is_reading = self._is_closing = False

        self._streams: dict[Partition, KafkaStream] = {}
        self._next_stream_id = count(1).__next__
        self._revoked: set[Partition] = set()  # by rebalances during the current call of `consume`
        self._fetch_count = 1000  # messages per call of `consume`
        self._is_paused = False
        self._full_since: float | None = None
        self._wakeup = threading.Event()  # of the thread: the queue has room, the settings have changed, or the end
        self._queue: deque[Chunk] = deque()
        self._arrived = Event()
        self._is_run_waiting = False

        self._answers: deque[Callable[[], None]] = deque()  # of the brokers, to be processed by the thread
        self._ends_queried_at = self._topics_queried_at = self._ranges_checked_at = now()
        self._membership_read_at = -_MEMBERSHIP_INTERVAL_S
        self._offsets_read_at = 0.0  # seconds since the epoch
        self._must_restart_stopped = False
        self._missing_topics: set[str] = set()
        self.unfinished: set[Partition] | None = None
        self.failure: ShipperError | None = None
        self.membership: object = None

    # For the event loop -----------------------------------------------------------------------------------------------

    def attach(self, portal: BlockingPortal, pipeline: AttachedPipeline) -> None:
        """Join the group; the pipeline takes part in rebalances, in the event loop of the portal."""
        self._portal, self._pipeline = portal, pipeline
        self._is_reading = True  # now, not in `run`: resuming paused partitions takes a second
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        """Whether the group has settled all ranges."""
        return self.unfinished == set()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """
        Send chunks up to the ends of the ranges; the process remains a member after them.

        Raises:
            DeliveryGaveUpError: The ranges cannot be read.
            ShipperError: This process can no longer be a member.
        """
        try:
            while self.failure is None and (self._queue or self.unfinished is None):
                if self._queue:
                    chunk = self._queue.popleft()
                    if not self._wakeup.is_set():
                        self._wakeup.set()
                    if not chunk.stream.is_ending:  # otherwise another member reads it
                        await chunks_tx.send(chunk)
                    continue
                self._arrived, self._is_run_waiting = Event(), True
                if not self._queue and self.failure is None and self.unfinished is None:  # may have changed meanwhile
                    await self._arrived.wait()
                self._is_run_waiting = False
        finally:
            self._is_reading = False
            self._queue.clear()
        if self.failure is not None:
            raise self.failure

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Remove settled messages from the streams."""
        for checkpoint in saved:
            assert isinstance(checkpoint.stream, KafkaStream)
            checkpoint.stream.note_saved(checkpoint.end_offset)

    def reconfigure(self, settings: KafkaSettings) -> None:
        """Apply a changed `on_gap`: the thread restarts stopped partitions if it now allows that."""
        self._settings = settings
        self._must_restart_stopped = True
        self._wakeup.set()

    def close(self) -> None:
        """Leave the group."""
        self._portal = self._pipeline = None
        self._is_closing = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        else:
            self._consumer.close()

    def backlog(self) -> Backlog:
        """Return the state of this member."""
        return Backlog(group=self.status.state(tuple(self._streams.values()), is_paused=self._is_paused))

    # The thread -------------------------------------------------------------------------------------------------------

    def _subscribe(self) -> None:
        self._consumer.subscribe(
            list(self._settings.topics),
            on_assign=self._assign,
            on_revoke=partial(self._revoke, is_lost=False),
            on_lost=partial(self._revoke, is_lost=True),
        )

    def _run(self) -> None:
        try:
            self._subscribe()
            while not self._is_closing and self.failure is None:
                self._poll_once()
        except ShipperError as error:
            self._fail(error)
        except KafkaException as exception:
            self._fail(self._fatal(error_of(exception)))
        except Exception as error:
            log.exception("kafka_thread_failed")
            self._fail(ShipperError(f"the thread polling the brokers has failed: {error!r}"))
        finally:
            if not self._is_closing and self.failure is None:  # the client raised an invalid exception
                self._fail(ShipperError("the thread polling the brokers has failed"))
            while not self._is_closing:
                self._wait_for_wakeup(_POLL_S)
            self._consumer.close()

    def _fail(self, error: ShipperError) -> None:
        self.failure, self.membership = error, None
        self._notify()

    def _wait_for_wakeup(self, limit_s: float) -> None:
        self._wakeup.clear()
        self._wakeup.wait(limit_s)

    def _poll_once(self) -> None:
        """Poll once, or wait until the queue has room."""
        if self._must_restart_stopped:
            self._must_restart_stopped = False
            for stream in [stream for stream in self._streams.values() if stream.stopped]:
                self._restart(stream)
        if self._has_room():
            self._full_since = None
            if self._is_paused:
                self._pause(False)
        elif not self._is_paused:
            self._full_since = self._full_since or self._now()
            if self._is_reading and self._now() < self._full_since + _PAUSE_AFTER_S:
                self._wakeup.clear()
                if not self._has_room():
                    self._wakeup.wait(_POLL_S)
                return
            self._pause(True)
        self._revoked.clear()
        messages = self._consumer.consume(self._fetch_count, _POLL_S)
        if self._now() >= self._membership_read_at + _MEMBERSHIP_INTERVAL_S:
            self._membership_read_at, self.membership = self._now(), self._read_membership()
        self._enqueue(messages)
        self._query_brokers()

    def _read_membership(self) -> object:
        """
        Return the group metadata of the consumer; None while it is not a member.

        The brokers accept offsets from a client that claims no membership at all, and this client does so as soon as it
        learns that it was removed.
        """
        metadata = self._consumer.consumer_group_metadata()
        is_removed = bytes(metadata).startswith(_NO_GENERATION) or not self._consumer.memberid()
        return None if is_removed else metadata

    def _has_room(self) -> bool:
        queued = tuple(self._queue)
        is_full = len(queued) >= _QUEUED_CHUNKS or sum(len(chunk.data) for chunk in queued) >= _QUEUED_BYTES
        return self._is_reading and not is_full

    def _pause(self, is_paused: bool) -> None:
        self._is_paused, self._full_since = is_paused, None
        partitions = [TopicPartition(*key) for key, stream in self._streams.items() if not stream.is_halted]
        if partitions:
            (self._consumer.pause if is_paused else self._consumer.resume)(partitions)

    def _enqueue(self, messages: Sequence[Any]) -> None:
        """Queue messages in their order; those that may be of an earlier assignment are read again."""
        events: list[Any] = []
        if any(map(Message.error, messages)):
            events = [message for message in messages if message.error() is not None]
            messages = [message for message in messages if message.error() is None]
        by_partition: dict[Partition, list[Any]] = {}
        has_one_topic = len(self._settings.topics) == 1  # then numbers identify partitions, at half the cost
        for _, run in groupby(messages, key=Message.partition if has_one_topic else _key_of):
            group = [*run]
            by_partition.setdefault(_key_of(group[0]), []).extend(group)
        for key in self._revoked & (by_partition.keys() | set(map(_key_of, events))):
            by_partition.pop(key, None)
            if key in self._streams:
                self._seek(self._streams[key])
        size = 0
        for key, group in by_partition.items():
            if (stream := self._streams.get(key)) is not None and not stream.is_halted:
                chunks = stream.chunks(group)
                size += sum(len(chunk.data) for chunk in chunks)
                if self._is_reading:
                    self._queue.extend(chunks)
                if stream.is_complete:
                    self._consumer.pause([TopicPartition(*key)])
        if by_partition:
            self._fetch_count = min(_FETCH_MESSAGES_MAX, 1 + _FETCH_BYTES * len(messages) // max(size, 1))
            self.status.remove_obstacle("broker_forbidden")
            self._notify()
        for event in events:
            self._handle_error(event.error(), _key_of(event), event.offset())

    def _notify(self) -> None:
        async def set_arrived() -> None:
            self._arrived.set()

        if self._is_run_waiting:
            self._start_in_loop(set_arrived)

    def _start_in_loop(self, function: Callable[..., Any], *arguments: object) -> Future[Any] | None:
        """Start a coroutine function in the event loop; return None if the run has ended."""
        if self._portal is None:
            return None
        try:
            return self._portal.start_task_soon(function, *arguments)
        except RuntimeError:
            self._portal = None
            return None

    def _seek(self, stream: KafkaStream) -> None:
        """Read a partition from its start."""
        stream.eof = -1
        try:
            self._consumer.seek(_start_of(stream))
        except KafkaException:  # the client has stopped reading it, or is still resolving its start offset
            self._consumer.incremental_unassign([_start_of(stream)])
            self._begin([stream])

    def _begin(self, streams: Sequence[KafkaStream]) -> None:
        """
        Add partitions to the assignment, and read them from their starts.

        The client checks a leader epoch when a partition is sought or the leader changes, but not when it is assigned.

        Raises:
            KafkaException: The client does not assign the partitions.
        """
        checked = [_start_of(stream) for stream in streams if stream.first_epoch >= 0]
        halted = [_start_of(stream) for stream in streams if self._is_paused or stream.is_halted]
        if paused := [*checked, *halted]:
            self._consumer.pause(paused)  # fetch nothing before the check
        self._consumer.incremental_assign([_start_of(stream) for stream in streams])
        limit = self._now() + _CALL_S
        for start in checked:
            while not self._is_closing:
                try:
                    self._consumer.seek(start)
                    break
                except KafkaException:  # the assignment takes effect in another thread
                    if self._now() >= limit:
                        raise
                    self._wait_for_wakeup(_POLL_S)
        if reading := [start for start in checked if start not in halted]:
            self._consumer.resume(reading)

    # Errors -----------------------------------------------------------------------------------------------------------

    def _handle_error(self, error: KafkaError, key: Partition, offset: int | None) -> None:
        stream = self._streams.get(key)
        if error.code() == KafkaError._PARTITION_EOF:
            if stream is not None and offset is not None and key not in self._revoked:
                stream.note_eof(offset)  # after a rebalance the partition is read again
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and stream is not None:
            self._restart(stream, reset=error)
        elif error.code() == KafkaError._MAX_POLL_EXCEEDED:
            log.warning("poll_interval_exceeded", message="the member did not poll for too long and rejoins the group")
        elif error.fatal() or error.code() == KafkaError._FATAL:
            raise self._fatal(error)
        else:
            self.status.note_error(error, key[0] or "")

    def _note_client_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fail(self._fatal(error))
        self.status.note_error(error)

    def _fatal(self, error: KafkaError) -> ShipperError:
        if self._settings.group_instance_id and "fenced" in error.str():
            return name_taken_error(self._settings)
        return ShipperError(f"this process cannot join group {self._settings.group_id}: {describe(error)}")

    # Rebalances; called by the client within `consume` ----------------------------------------------------------------

    def _assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(partition.topic, partition.partition) for partition in partitions]
        starts = self._find_starts(keys) if partitions else {}
        for key, (offsets, start) in starts.items():
            self._streams[key] = self._new_stream(offsets, start)
        if not starts:  # this process is ending
            consumer.incremental_assign(partitions)
            return
        self._begin([self._streams[key] for key in starts])
        self.status.remove_obstacles()
        self._note_rebalance("assigned", len(partitions))

    def _revoke(self, consumer: Consumer, partitions: list[TopicPartition], *, is_lost: bool) -> None:
        """Hand partitions over: unless they are lost, let records in flight settle, and save; then drop the streams."""
        keys = {(partition.topic, partition.partition) for partition in partitions}
        self._revoked |= keys
        streams = [self._streams[key] for key in keys & self._streams.keys()]
        self._hand_over(streams, is_lost=is_lost)
        for stream in streams:
            del self._streams[stream.topic_partition]
            self.status.tombstones_skipped += stream.tombstones_skipped
        consumer.resume(partitions)  # otherwise a paused partition would be paused when assigned again
        consumer.incremental_unassign(partitions)
        self._note_rebalance("lost" if is_lost else "revoked", len(keys))

    def _hand_over(self, streams: Sequence[KafkaStream], *, is_lost: bool) -> None:
        for stream in streams:
            stream.is_ending = True
        if self._portal is None or self._pipeline is None or not streams:
            return
        self.membership = self._read_membership()  # the new generation's, as the brokers refuse the old one
        wait_s = self._settings.revoke_wait_seconds
        done = self._start_in_loop(partial(self._pipeline.hand_over, streams, wait_s=wait_s, is_lost=is_lost))
        if done is not None:
            with suppress(CancelledError):
                done.result()

    def _note_rebalance(self, kind: str, partitions: int) -> None:
        self.status.note_rebalance(kind, partitions, len(self._streams))
        self._membership_read_at = -_MEMBERSHIP_INTERVAL_S  # the membership has changed

    # Start offsets --------------------------------------------------------------------------------------------------

    def _find_starts(self, keys: Sequence[Partition]) -> dict[Partition, tuple[PartitionOffsets, Start]]:
        """Query where to begin until the brokers answer, as nothing may be read before; return {} if closed."""
        while not self._is_closing:
            self._offsets_read_at = self._wall_time()
            try:
                offsets = read_offsets(self.admin, self._settings, sorted({key[0] for key in keys}), _CALL_S)
                selected = {key: offsets[key] for key in keys}
                if any(partition.committed is None for partition in selected.values()):
                    selected = self._fill_from_ledger(selected)
                return {key: (partition, start_of(partition, self._settings)) for key, partition in selected.items()}
            except (KafkaException, TimeoutError, ConfigError) as exception:  # a changed secret may be unreadable
                error = error_of(exception)
                self.status.note_error(error)
                log.warning("offsets_unknown", error=describe(error))
                self._wait_for_wakeup(_RETRY_S)
        return {}

    def _fill_from_ledger(self, offsets: Mapping[Partition, PartitionOffsets]) -> dict[Partition, PartitionOffsets]:
        """Fill in missing committed offsets of the group from the ledger or the start of the ranges."""
        saved = ledger_offsets(self._settings)
        known = {topic_id for topic_id, _ in saved}

        def fill(partition: PartitionOffsets) -> PartitionOffsets:
            if partition.committed is not None:
                return partition
            first = None if self._ranges is None else self._range(partition).start
            return partition._replace(
                committed=saved.get((partition.topic_id, partition.partition), first),
                is_topic_known=partition.is_topic_known or partition.topic_id in known,
            )

        return {key: fill(partition) for key, partition in offsets.items()}

    def _range(self, offsets: PartitionOffsets) -> range:
        assert self._ranges is not None
        return self._ranges.get((offsets.topic, offsets.partition), range(offsets.high, offsets.high))

    def _new_stream(self, offsets: PartitionOffsets, start: Start) -> KafkaStream:
        stream = KafkaStream(
            stream_id=self._next_stream_id(),
            path=f"{offsets.topic}/{offsets.partition}",
            topic=offsets.topic,
            partition=offsets.partition,
            topic_id=offsets.topic_id,
            first=start.offset,
            first_epoch=start.epoch,
            end=offsets.high,
            until=None if self._ranges is None else self._range(offsets).stop,
            session=Session(),
            stopped=start.gap if start.is_stopped else "",
            max_record_bytes=self._max_record_bytes,
            skips_tombstones=self._settings.tombstones == "skip",
        )
        if not start.gap:
            stream.settled_until, stream.saved_mistakes = offsets.settled_until, dict(offsets.mistakes or {})
            stream.mistakes = stream.saved_mistakes
            stream.note_end(offsets.high, self._offsets_read_at)
        if start.is_stopped:
            log.error("partition_stopped", message=start.gap)
        elif start.gap:
            stream.unreachable = start.missing
            log.error("source_unreachable", message=start.gap, records=start.missing)
        return stream

    def _restart(self, stream: KafkaStream, *, is_lost: bool = False, reset: KafkaError | None = None) -> None:
        """Restart a partition after a gap, which `reset` describes, a recreated topic, or a change of `on_gap`."""
        if self._portal is None:
            return
        self._hand_over([stream], is_lost=is_lost)
        starts = self._find_starts([stream.topic_partition])
        if not starts:
            return
        offsets, start = starts[stream.topic_partition]
        if offsets.topic_id != stream.topic_id:  # the brokers have deleted the group's offset with the old topic
            offsets = offsets._replace(committed=stream.next_offset, committed_to=stream.topic_id)
            start = start_of(offsets, self._settings)
        elif reset is not None:  # the client has checked the epoch
            at = diverged_at(reset.str())
            offsets = offsets._replace(diverged_at=at, last=None if at is None else offsets.last)
            start = start_of(offsets, self._settings)._replace(epoch=-1)
        self._streams[stream.topic_partition] = new = self._new_stream(offsets, start)
        self.status.tombstones_skipped += stream.tombstones_skipped
        self._seek(new)
        partition = TopicPartition(*stream.topic_partition)
        if new.is_halted:
            self._consumer.pause([partition])
        elif not self._is_paused:
            self._consumer.resume([partition])

    # Periodic queries -------------------------------------------------------------------------------------------------

    def _query_brokers(self) -> None:
        """Query the ends of partitions, topics and ranges periodically. Only the ranges block."""
        now = self._now()
        while self._answers:
            self._answers.popleft()()
        if self._ranges is not None and self._is_reading:
            self._check_ranges(self._ranges, now)
        if now >= self._ends_queried_at + _END_INTERVAL_S and self._streams:
            self._ends_queried_at, at = now, self._wall_time()
            wanted = {TopicPartition(*key): OffsetSpec.latest() for key in self._streams}
            level = IsolationLevel.READ_COMMITTED
            for partition, end in self.admin.list_offsets(
                wanted, isolation_level=level, request_timeout=_CALL_S
            ).items():
                self._when_answered(end, partial(self._note_end, (partition.topic, partition.partition), at))
        if now >= self._topics_queried_at + _TOPIC_INTERVAL_S:
            self._topics_queried_at = now
            topics = TopicCollection(list(self._settings.topics))
            for topic, description in self.admin.describe_topics(topics, request_timeout=_CALL_S).items():
                self._when_answered(description, partial(self._check_topic_id, topic))

    def _when_answered(self, future: Future[Any], use: Callable[[Future[Any]], None]) -> None:
        """Have the thread process an answer once it arrives."""
        future.add_done_callback(lambda answer: self._answers.append(partial(use, answer)))

    def _note_end(self, key: Partition, at: float, answer: Future[Any]) -> None:
        try:
            end = answer.result().offset
        except KafkaException as exception:
            self.status.count_error(error_of(exception))
            return
        self.status.remove_obstacle("broker_unavailable")
        if key in self._streams:
            self._streams[key].note_end(end, at)

    def _check_topic_id(self, topic: str, answer: Future[Any]) -> None:
        """Detect a topic that was deleted or recreated."""
        try:
            topic_id = str(answer.result().topic_id)
        except KafkaException as exception:
            error = error_of(exception)
            self.status.note_error(error)
            if error.code() in UNKNOWN_TOPIC:
                self._missing_topics.add(topic)
            return
        self._missing_topics.discard(topic)
        if not self._missing_topics:
            self.status.remove_obstacle("input_gap")
        for stream in [stream for stream in self._streams.values() if stream.topic == topic]:
            if stream.topic_id != topic_id and not stream.stopped:
                self._restart(stream, is_lost=True)

    def _check_ranges(self, ranges: Mapping[Partition, range], now: float) -> None:
        """Check whether the group has settled the ranges, once this member has nothing left to do."""
        obstacle = self.status.oldest_obstacle()
        if obstacle is not None and self._wall_time() >= obstacle.since + self._give_up_after_s:
            raise DeliveryGaveUpError(obstacle.message)
        streams = self._streams.values()
        if self.membership is None or any(stream.blocks or not stream.is_halted for stream in streams):
            self._ranges_checked_at = now  # check without delay once this member is done
            if all(stream.is_halted for stream in streams) and self._pipeline is not None:
                self._start_in_loop(self._pipeline.save)
            return
        if now < self._ranges_checked_at:
            return
        self._ranges_checked_at = now + _RANGE_INTERVAL_S
        try:
            committed = committed_offsets(self._consumer, [TopicPartition(*key) for key in ranges], _CALL_S)
            unsettled = {key for key, position in committed.items() if position.offset < ranges[key].stop}
            # If a range is empty or does not end with a record, nothing else moves the offset to its end.
            at_range_end = [stream for stream in streams if stream.topic_partition in unsettled and not stream.stopped]
            if at_range_end:
                offsets = [
                    TopicPartition(
                        *stream.topic_partition, stream.until or 0, metadata=Metadata(stream.topic_id).text()
                    )
                    for stream in at_range_end
                ]
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as exception:
            self.status.note_error(error_of(exception))
            return
        self.status.remove_obstacle("broker_unavailable")
        unsettled -= {stream.topic_partition for stream in at_range_end}
        if unsettled <= self._streams.keys():
            self.unfinished = unsettled
            self._notify()


def _start_of(stream: KafkaStream) -> TopicPartition:
    return TopicPartition(*stream.topic_partition, stream.first, leader_epoch=stream.first_epoch)


def _key_of(message: Any) -> Partition:
    return message.topic(), message.partition()
