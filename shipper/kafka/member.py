"""
A member of a consumer group: one thread owns the consumer and polls it, which also lets the group rebalance.

The thread puts chunks into a bounded queue, from which the pipeline takes them. If the queue stays full, it pauses the
partitions and continues polling, for hours if necessary: a member that does not poll is removed from its group.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from typing import Any, Final

import structlog
from anyio import Event
from anyio.from_thread import BlockingPortal
from anyio.streams.memory import MemoryObjectSendStream
from confluent_kafka import Consumer, IsolationLevel, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, OffsetSpec

from shipper.config.settings import KafkaSettings
from shipper.kafka.assignment import Assignment, AttachedPipeline, PipelineLink
from shipper.kafka.client import (
    UNKNOWN_TOPIC,
    KafkaError,
    client_properties,
    consumer_properties,
    describe,
    error_of,
    name_taken_error,
    read_password,
    valid_properties,
)
from shipper.kafka.documents import Metadata
from shipper.kafka.member_status import MemberStatus
from shipper.kafka.offsets import committed_offsets
from shipper.kafka.stream import KafkaStream, Partition
from shipper.model.errors import ConfigError, DeliveryGaveUpError, ShipperError
from shipper.model.records import Backlog, Checkpoint, Chunk

log = structlog.get_logger("kafka")

_FETCH_BYTES: Final = 1 << 18  # fetched at once; more would need more memory, and is not faster
_FETCH_MESSAGES_MAX: Final = 5000
_POLL_S: Final = 0.05
_PAUSE_AFTER_S: Final = 1.0  # pausing discards fetched messages, so it is not worth it for short waits
_QUEUED_BYTES: Final = 2 << 20
_QUEUED_CHUNKS: Final = 64
_CALL_S: Final = 5.0
_END_INTERVAL_S: Final = 1.0  # between queries of the ends of partitions: the headline is as current as they are
_TOPIC_INTERVAL_S: Final = 30.0  # between queries of topic ids
_PASSWORD_INTERVAL_S: Final = 5.0  # between reads of the password while the brokers refuse it
_RANGE_INTERVAL_S: Final = 0.5
_POSITION_INTERVAL_S: Final = 1.0  # between saves of positions without records
_CLOSE_S: Final = 10.0


class Member:
    """
    A group member as a source of the pipeline.

    Args:
        ranges: The offsets to read; None = all, without end.
        give_up_after_s: Maximum wait for brokers that prevent reading `ranges`.

    Attributes:
        password: The password for the brokers that was read last; None = none is needed.
        is_exhausted: Whether the group has settled all ranges.
        failure: Why this process can no longer be a member; None while it can.
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
        self._now = now
        self._wall_time = wall_time
        self._ranges = ranges
        self._give_up_after_s = give_up_after_s
        self.status = MemberStatus(settings, wall_time=wall_time)
        properties = client_properties(settings)
        self.password: str | None = properties.get("sasl.password")
        self.admin = AdminClient(properties)
        properties |= consumer_properties(settings) | {"error_cb": self._note_client_error}
        with valid_properties(settings):
            self._consumer = Consumer(properties)
        self._thread = threading.Thread(target=self._run, name="kafka", daemon=True)
        self._wakeup = threading.Event()  # of the thread: the queue has room, the settings have changed, or the end
        self._closing = threading.Event()
        self._link = PipelineLink()
        self.assignment = Assignment(
            settings,
            self._consumer,
            self.admin,
            self.status,
            self._link,
            ranges=ranges,
            max_record_bytes=max_record_bytes,
            now=now,
            wall_time=wall_time,
            wakeup=self._wakeup,
            closing=self._closing,
        )
        self._is_reading = False
        self._fetch_count = 1000  # messages per call of `consume`
        self._full_since: float | None = None
        self._queue: deque[Chunk] = deque()
        self._arrived = Event()
        self._is_run_waiting = False

        self._answers: deque[Callable[[], None]] = deque()  # of the brokers, to be processed by the thread
        self._ends_queried_at = self._topics_queried_at = self._ranges_checked_at = self._password_read_at = now()
        self._next_positions_at = now()
        self._saving_positions: Future[Any] | None = None
        self._must_restart_stopped = False
        self._missing_topics: set[str] = set()
        self.is_exhausted = False
        self.failure: ShipperError | None = None

    # For the event loop -----------------------------------------------------------------------------------------------

    def attach(self, portal: BlockingPortal, pipeline: AttachedPipeline) -> None:
        """Join the group; the pipeline takes part in rebalances, in the event loop of the portal."""
        self._link.portal, self._link.pipeline = portal, pipeline
        self._is_reading = True  # now, not in `run`: resuming paused partitions takes a second
        self._thread.start()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """
        Send chunks up to the ends of the ranges; the process remains a member after them.

        Raises:
            DeliveryGaveUpError: The ranges cannot be read.
            ShipperError: This process can no longer be a member.
        """
        try:
            while self.failure is None and (self._queue or not self.is_exhausted):
                if self._queue:
                    chunk = self._queue.popleft()
                    if not self._wakeup.is_set():
                        self._wakeup.set()
                    if not chunk.stream.is_ending:  # otherwise another member reads it
                        await chunks_tx.send(chunk)
                    continue
                self._arrived, self._is_run_waiting = Event(), True
                if not self._queue and self.failure is None and not self.is_exhausted:  # may have changed meanwhile
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
        self._settings = self.assignment.settings = settings
        self._must_restart_stopped = True
        self._wakeup.set()

    def close(self) -> None:
        """Leave the group."""
        self._link.portal = self._link.pipeline = None
        self._closing.set()
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        else:
            self._consumer.close()

    def backlog(self) -> Backlog:
        streams, is_paused = tuple(self.assignment.streams.values()), self.assignment.is_paused
        return Backlog(group=self.status.state(streams, is_paused=is_paused))

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.assignment.subscribe()
            while not self._closing.is_set() and self.failure is None:
                self._poll_once()
        except ShipperError as error:
            self._fail(error)
        except KafkaException as exception:
            self._fail(self._fatal(error_of(exception)))
        except Exception as error:
            log.exception("kafka_thread_failed")
            self._fail(ShipperError(f"the thread polling the brokers has failed: {error!r}"))
        finally:
            if not self._closing.is_set() and self.failure is None:  # the client raised an invalid exception
                self._fail(ShipperError("the thread polling the brokers has failed"))
            self._closing.wait()
            self._consumer.close()

    def _fail(self, error: ShipperError) -> None:
        self.failure, self.assignment.membership = error, None
        self._notify()

    def _poll_once(self) -> None:
        """Poll once, or wait until the queue has room."""
        if self._must_restart_stopped:
            self._must_restart_stopped = False
            for stream in [stream for stream in self.assignment.streams.values() if stream.stopped]:
                self.assignment.restart(stream)
        if self._has_room():
            self._full_since = None
            if self.assignment.is_paused:
                self.assignment.pause(False)
        elif not self.assignment.is_paused:
            self._full_since = self._full_since or self._now()
            if self._is_reading and self._now() < self._full_since + _PAUSE_AFTER_S:
                self._wakeup.clear()
                if not self._has_room():
                    self._wakeup.wait(_POLL_S)
                return
            self._full_since = None
            self.assignment.pause(True)
        self.assignment.revoked.clear()
        messages = self._consumer.consume(self._fetch_count, _POLL_S)
        self.assignment.refresh_membership()
        self._enqueue(messages)
        self._save_positions()
        self._query_brokers()

    def _has_room(self) -> bool:
        queued = tuple(self._queue)
        is_full = len(queued) >= _QUEUED_CHUNKS or sum(len(chunk.data) for chunk in queued) >= _QUEUED_BYTES
        return self._is_reading and not is_full

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
        for key in self.assignment.revoked & (by_partition.keys() | set(map(_key_of, events))):
            by_partition.pop(key, None)
            if key in self.assignment.streams:
                self.assignment.seek(self.assignment.streams[key])
        size = 0
        for key, group in by_partition.items():
            if (stream := self.assignment.streams.get(key)) is not None and not stream.is_halted:
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

    def _save_positions(self) -> None:
        """
        Save positions that no settled record moves, at most once per interval.

        That is where reading begins in new partitions, which are read then, and offsets without records at the end.
        """
        self.assignment.read_saved()
        is_saving = self._saving_positions is not None and not self._saving_positions.done()
        if is_saving or self._now() < self._next_positions_at or self._link.pipeline is None:
            return
        if idle := self.assignment.idle_checkpoints(self.assignment.streams.values()):
            self._next_positions_at = self._now() + _POSITION_INTERVAL_S
            self._saving_positions = self._link.start(self._link.pipeline.save, idle)

    def _notify(self) -> None:
        async def set_arrived() -> None:
            self._arrived.set()

        if self._is_run_waiting:
            self._link.start(set_arrived)

    # Errors -----------------------------------------------------------------------------------------------------------

    def _handle_error(self, error: KafkaError, key: Partition, offset: int | None) -> None:
        stream = self.assignment.streams.get(key)
        if error.code() == KafkaError._PARTITION_EOF:
            is_unread = key in self.assignment.revoked or (stream is not None and (stream.is_waiting or stream.stopped))
            if stream is not None and offset is not None and not is_unread:
                stream.note_eof(offset)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and stream is not None:
            self.assignment.restart(stream, reset=error)
        elif error.code() == KafkaError._MAX_POLL_EXCEEDED:
            message = "the member did not poll the brokers for too long, and rejoins the group"
            log.warning("poll_interval_exceeded", message=message)
        elif error.fatal() or error.code() == KafkaError._FATAL:
            raise self._fatal(error)
        else:
            self.status.note_error(error, key[0] or "")

    def _note_client_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fail(self._fatal(error))
        self.status.note_error(error)

    def _fatal(self, error: KafkaError) -> ShipperError:
        is_taken = "fenced" in error.str() or "instance ID is still used" in error.str()
        if self._settings.group_instance_id and is_taken:
            return name_taken_error(self._settings)
        return ShipperError(f"this process cannot join group {self._settings.group_id}: {describe(error)}")

    # Periodic queries -------------------------------------------------------------------------------------------------

    def _query_brokers(self) -> None:
        """Query the ends of partitions, topics and ranges periodically. Only the ranges block."""
        now = self._now()
        while self._answers:
            self._answers.popleft()()
        if self.status.is_login_refused() and now >= self._password_read_at + _PASSWORD_INTERVAL_S:
            self._password_read_at = now
            self._read_password()
        if self._ranges is not None and self._is_reading:
            self._check_ranges(self._ranges, now)
        if now >= self._ends_queried_at + _END_INTERVAL_S and self.assignment.streams:
            self._ends_queried_at, at = now, self._wall_time()
            wanted = {TopicPartition(*key): OffsetSpec.latest() for key in self.assignment.streams}
            level = IsolationLevel.READ_UNCOMMITTED  # records behind an open transaction are not settled either
            for partition, end in self.admin.list_offsets(
                wanted, isolation_level=level, request_timeout=_CALL_S
            ).items():
                self._when_answered(end, partial(self._note_end, (partition.topic, partition.partition), at))
        if now >= self._topics_queried_at + _TOPIC_INTERVAL_S:
            self._topics_queried_at = now
            topics = TopicCollection(list(self._settings.topics))
            described = self.admin.describe_topics(topics, include_authorized_operations=True, request_timeout=_CALL_S)
            for topic, description in described.items():
                self._when_answered(description, partial(self._check_topic, topic))

    def _read_password(self) -> None:
        """Log in with the password that its file contains now; the clients try it with their next connection."""
        if self._settings.password is None:
            return
        try:
            password = read_password(self._settings.password)
        except ConfigError as error:
            log.warning("password_unreadable", message=str(error))
            return
        if password != self.password:
            self.password = password
            for client in (self._consumer, self.admin):
                client.set_sasl_credentials(self._settings.username, password)
            log.info("password_changed", message="the brokers refused the old one; shipper tries the new one")

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
        if key in self.assignment.streams:
            self.assignment.streams[key].note_end(end, at)

    def _check_topic(self, topic: str, answer: Future[Any]) -> None:
        """Detect a topic that was deleted or recreated, or may be read again."""
        try:
            description = answer.result()
        except KafkaException as exception:
            error = error_of(exception)
            self.status.note_error(error, topic)
            if error.code() in UNKNOWN_TOPIC:
                self._missing_topics.add(topic)
            return
        self.status.remove_obstacle("broker_unavailable")  # also of a member without partitions
        if AclOperation.READ in (description.authorized_operations or ()):
            self.status.note_readable(topic)
        self._missing_topics.discard(topic)
        if not self._missing_topics:
            self.status.remove_obstacle("input_gap")
        topic_id = str(description.topic_id)
        led = {partition.id: partition.leader is not None for partition in description.partitions}
        for stream in [stream for stream in self.assignment.streams.values() if stream.topic == topic]:
            is_back = not stream.topic_id and led.get(stream.partition, False)
            if stream.topic_id != topic_id and (is_back or not stream.stopped):
                self.assignment.restart(stream, is_lost=True, is_gone=stream.partition not in led)

    def _check_ranges(self, ranges: Mapping[Partition, range], now: float) -> None:
        """Check whether the group has settled the ranges, once this member has nothing left to do."""
        obstacle = self.status.oldest_obstacle()
        if obstacle is not None and self._wall_time() >= obstacle.since + self._give_up_after_s:
            raise DeliveryGaveUpError(obstacle.message)
        streams = self.assignment.streams.values()
        if self.assignment.membership is None or any(
            stream.blocks or stream.is_waiting or not stream.is_halted for stream in streams
        ):
            self._ranges_checked_at = now  # check without delay once this member is done
            if all(stream.is_halted for stream in streams) and self._link.pipeline is not None:
                self._link.start(self._link.pipeline.save)
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
        if unsettled <= self.assignment.streams.keys():
            if unsettled:
                message, _, remedy = self.assignment.streams[min(unsettled)].stopped.partition(". ")
                raise DeliveryGaveUpError(message, remedy)
            self.is_exhausted = True
            self._notify()


def _key_of(message: Any) -> Partition:
    return message.topic(), message.partition()
