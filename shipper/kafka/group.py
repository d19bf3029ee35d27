"""
A member of a consumer group: one thread polls, owns the consumer, and answers rebalances.

The thread puts chunks into a bounded queue, from which the pipeline takes them. If nobody does, it pauses the
partitions and goes on polling, for hours if need be: a member that does not poll is removed from its group. A partition
that is taken away is handed over before the rebalance goes on: what is in flight may settle, is saved, and then nothing
of it counts here any more.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import count, groupby
from typing import Any, Final, Protocol

import msgspec
import structlog
from anyio import Event
from anyio.from_thread import BlockingPortal
from anyio.streams.memory import MemoryObjectSendStream
from confluent_kafka import Consumer, IsolationLevel, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from shipper.config.settings import KafkaSettings
from shipper.kafka.begin import Begin, Found, begin, found_in
from shipper.kafka.client import (
    FORBIDDEN,
    KafkaError,
    bounds_of,
    consumer_properties,
    error_of,
    name_taken,
    partitions_of,
    properties,
    refusal,
    right_on,
    words,
)
from shipper.kafka.documents import Metadata
from shipper.kafka.stream import KafkaStream, Place, Session, new_stream
from shipper.model.errors import DeliveryGaveUpError, ShipperError
from shipper.model.group import GroupState, Obstacle, PartitionState
from shipper.model.records import Backlog, Checkpoint, Chunk, Stream

log = structlog.get_logger("kafka")

_BATCH_BYTES: Final = 3 << 18  # so that what is of one partition is one chunk
_BATCH_MAX: Final = 5000
_POLL_S: Final = 0.05
_PAUSED_POLL_S: Final = 0.5
_PAUSE_AFTER_S: Final = 1.0  # a pause throws away what was fetched, so it is not made for every short wait
_QUEUED_BYTES: Final = 2 << 20
_QUEUED_CHUNKS: Final = 64
_CALL_S: Final = 5.0
_ENDS_S: Final = 5.0
_TOPICS_S: Final = 30.0
_RANGES_S: Final = 0.5
_PROOF_S: Final = 0.1
_NO_GENERATION: Final = b"CGMDv2:\xff\xff\xff\xff"
_CLOSE_S: Final = 10.0


class Attached(Protocol):
    """The pipeline, as far as it has to do with rebalances."""

    async def hand_over(self, streams: Sequence[Stream], *, wait_s: float, is_lost: bool) -> None: ...


class Member:
    """
    Args:
        now, wall_time: The clock that does not jump; seconds since the epoch.
        ranges: The offsets to read; None = all, for ever.
        give_up_after_s: With ranges: how long to wait for brokers that do not let them be read.

    Attributes:
        left: Of the ranges, the partitions that cannot be read to their ends, once the group has settled all others;
            None until then.
        failure: Why this process cannot be a member any more; None while it can.
        membership: Proves to the brokers which generation of the group this process belongs to. Only the thread asks
            for it, as the client lets nobody else in while it polls.
        transactions: By outcome.
        transaction_seconds: Sum over all that were committed.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        max_record_bytes: int,
        now: Callable[[], float],
        wall_time: Callable[[], float],
        ranges: Mapping[Place, range] | None = None,
        give_up_after_s: float = 0.0,
    ) -> None:
        self._settings = settings
        self._ranges = ranges
        self._give_up_after_s = give_up_after_s
        self._ranges_at = now()
        self.left: set[Place] | None = None
        self._max_record_bytes = max_record_bytes
        self._next_stream_id = count(1).__next__
        self._now = now
        self._wall_time = wall_time
        common = properties(settings, on_error=self._note_own_error)
        self._admin = AdminClient({name: value for name, value in common.items() if name != "error_cb"})
        self.consumer = Consumer(common | consumer_properties(settings))
        self._thread = threading.Thread(target=self._run, name="kafka", daemon=True)
        self._portal: BlockingPortal | None = None
        self._attached: Attached | None = None
        self._is_reading = self._is_closing = False
        self._streams: dict[Place, KafkaStream] = {}
        self._moved: set[Place] = set()  # by rebalances during the call of the client that is under way
        self._is_paused = False
        self._batch = 1000  # messages asked for at once: as many as make a chunk
        self._queue: deque[Chunk] = deque()
        self._has_room = threading.Event()
        self._arrived = Event()
        self._is_waited_for = False
        self._full_since: float | None = None
        self._ends_asked: tuple[float, dict[TopicPartition, Future[Any]]] | None = None
        self._topics_asked: dict[str, Future[Any]] | None = None
        self._ends_at = self._topics_at = now()
        self._proof_at = -_PROOF_S
        self._obstacles: dict[str, Obstacle] = {}
        self._rebalances: Counter[str] = Counter(assigned=0, revoked=0, lost=0)
        self._errors: Counter[str] = Counter()
        self._last_rebalance: tuple[str, float] | None = None
        self._decides_again = False
        self._tombstones_skipped = 0
        self._stopped_at: float | None = None
        self.transactions: Counter[str] = Counter(committed=0, aborted=0, in_doubt=0)
        self.transaction_seconds = 0.0
        self.failure: ShipperError | None = None
        self.membership: object = None

    def __repr__(self) -> str:
        return f"<Member of {self._settings.group_id}: {len(self._streams)} partitions>"

    # For the event loop -------------------------------------------------------------------------------------------

    def attach(self, portal: BlockingPortal, pipeline: Attached) -> None:
        """Join the group; rebalances are answered by this pipeline, in the event loop of the portal."""
        self._portal, self._attached = portal, pipeline
        self._is_reading = True  # what begins now soon takes chunks; behind a pause, the client rests for a second
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        """Whether the whole group has settled all that was to be read."""
        return self.left == set()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """
        Send chunks, up to the ends of the ranges; the process stays a member behind them.

        Raises:
            DeliveryGaveUpError: The ranges cannot be read.
            ShipperError: This process cannot be a member any more.
        """
        self._has_room.set()
        try:
            while self.failure is None and (self._queue or self.left is None):
                if self._queue:
                    chunk = self._queue.popleft()
                    if not self._has_room.is_set():
                        self._has_room.set()
                    if not chunk.stream.is_ending:  # it goes to another member
                        await chunks_tx.send(chunk)
                    continue
                self._arrived, self._is_waited_for = Event(), True
                if not self._queue and self.failure is None and self.left is None:  # looked at after it is said
                    await self._arrived.wait()
                self._is_waited_for = False
        finally:
            self._is_reading = False
            self._queue.clear()
        if self.failure is not None:
            raise self.failure

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Drop what is settled."""
        for each in saved:
            assert isinstance(each.stream, KafkaStream)
            each.stream.note_saved(each.end_offset)

    def reconfigure(self, settings: KafkaSettings) -> None:
        """Apply a changed `on_gap`: the thread decides anew about partitions that are stopped."""
        self._settings = settings
        self._decides_again = True
        self._has_room.set()

    def note_committed(self, seconds: float) -> None:
        """Count a transaction, which also proves the right to read: the brokers take offsets from nobody without it."""
        self.transactions["committed"] += 1
        self.transaction_seconds += seconds
        self._obstacles.pop("broker_forbidden", None)

    def close(self) -> None:
        """Leave the group."""
        self._portal = self._attached = None
        self._is_closing = True
        self._has_room.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        else:
            self.consumer.close()

    def backlog(self) -> Backlog:
        """Describe the group, as far as this member knows it."""
        now_ms = self._wall_time() * 1000
        partitions = [self._partition_state(each, now_ms) for each in tuple(self._streams.values())]
        partitions.sort(key=lambda each: (each.state != "stopped", -each.lag_records, each.topic, each.partition))
        gaps = [each.message for each in partitions if each.state == "stopped"]
        self._stopped_at = (self._stopped_at or self._wall_time()) if gaps else None
        obstacles = list(self._obstacles.values())
        if gaps:
            more = f"; and {len(gaps) - 1} more partitions" if len(gaps) > 1 else ""
            obstacles.append(Obstacle("input_gap", f"{gaps[0]}{more}", self._stopped_at or 0.0))
        state = GroupState(
            group=self._settings.group_id,
            protocol=self._settings.group_protocol,
            partitions=partitions,
            rebalances=dict(self._rebalances),
            tombstones_skipped=self._tombstones_skipped
            + sum(each.tombstones_skipped for each in self._streams.values()),
            transactions=dict(self.transactions),
            transaction_seconds=round(self.transaction_seconds, 3),
            broker_errors=dict(self._errors),
            last_rebalance=(self._last_rebalance and self._last_rebalance[0]) or "",
            last_rebalance_at=self._last_rebalance and self._last_rebalance[1],
            obstacles=obstacles,
        )
        return Backlog(group=state)

    def _partition_state(self, stream: KafkaStream, now_ms: float) -> PartitionState:
        oldest = stream.oldest_ms
        return PartitionState(
            topic=stream.topic,
            partition=stream.partition,
            offset=stream.next_offset,
            end=stream.end,
            lag_records=stream.lag_records,
            lag_seconds=0.0 if oldest is None or oldest < 0 else round(max(0.0, now_ms - oldest) / 1000, 3),
            delivered_until=stream.settled_until,
            state="stopped" if stream.stopped else "paused" if self._is_paused else "reading",
            message=stream.stopped,
        )

    # The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.consumer.subscribe(
                list(self._settings.topics),
                on_assign=self._assigned,
                on_revoke=partial(self._give, is_lost=False),
                on_lost=partial(self._give, is_lost=True),
            )
            while not self._is_closing and self.failure is None:
                self._turn()
        except ShipperError as error:
            self._fail(error)
        except KafkaException as exception:
            self._fail(self._fatal(error_of(exception)))
        except Exception as error:
            log.exception("kafka_thread_failed")
            self._fail(ShipperError(f"the thread that polls the brokers has failed: {error!r}"))
        finally:
            if not self._is_closing and self.failure is None:  # the client raises what is no exception to Python
                self._fail(ShipperError("the thread that polls the brokers has failed"))
            while not self._is_closing:
                self._has_room.clear()
                self._has_room.wait(_PAUSED_POLL_S)
            self.consumer.close()

    def _fail(self, error: ShipperError) -> None:
        self.failure, self.membership = error, None
        self._notify()

    def _turn(self) -> None:
        """Poll once, or wait for room."""
        self._look_at_stopped()
        is_full = not self._is_reading or self._is_queue_full()
        if not is_full:
            self._full_since = None
            if self._is_paused:
                self._pause(False)
        elif not self._is_paused:
            self._full_since = self._full_since or self._now()
            if self._is_reading and self._now() < self._full_since + _PAUSE_AFTER_S:
                self._has_room.clear()
                if self._is_queue_full():
                    self._has_room.wait(_POLL_S)
                return
            self._pause(True)
        self._moved.clear()
        messages = self.consumer.consume(self._batch, _PAUSED_POLL_S if self._is_paused else _POLL_S)
        if self._moved or self._now() >= self._proof_at + _PROOF_S:
            self._proof_at, self.membership = self._now(), self._proof()
        self._take(messages)
        self._look_around()

    def _proof(self) -> object:
        """
        Return what proves the membership; None while there is none. The client answers from a thread of its own, and
        keeps all others of this process waiting meanwhile.

        The brokers take offsets from a client that claims to be no member at all, which is what this one says of
        itself as soon as it hears that it was removed.
        """
        metadata = self.consumer.consumer_group_metadata()
        is_outside = bytes(metadata).startswith(_NO_GENERATION) or not self.consumer.memberid()
        return None if is_outside else metadata

    def _is_queue_full(self) -> bool:
        queued = tuple(self._queue)
        return len(queued) >= _QUEUED_CHUNKS or sum(len(chunk.data) for chunk in queued) >= _QUEUED_BYTES

    def _pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._full_since = None
        places = [TopicPartition(*place) for place, stream in self._streams.items() if not stream.is_halted]
        if places:
            (self.consumer.pause if is_paused else self.consumer.resume)(places)

    def _take(self, messages: Sequence[Any]) -> None:
        """Put messages into the queue, in their order; what may belong to an earlier assignment is read again."""
        events = [message for message in messages if message.error() is not None]
        if events:
            messages = [message for message in messages if message.error() is None]
        by_place: dict[Place, list[Any]] = {}
        is_one = len(self._settings.topics) == 1  # then the numbers tell the partitions, and cost half as much
        for _, run in groupby(messages, key=Message.partition if is_one else _place_of):
            own = [*run]
            by_place.setdefault(_place_of(own[0]), []).extend(own)
        for place in self._moved & (by_place.keys() | set(map(_place_of, events))):
            by_place.pop(place, None)
            if place in self._streams:
                self._seek(self._streams[place], self._streams[place].first)
        size = 0
        for place, own in by_place.items():
            if (stream := self._streams.get(place)) is not None and not stream.is_halted:
                chunks = stream.chunks(own)
                size += sum(len(chunk.data) for chunk in chunks)
                if self._is_reading:
                    self._queue.extend(chunks)
                if stream.is_complete:
                    self.consumer.pause([TopicPartition(*place)])
        if by_place:
            self._batch = min(_BATCH_MAX, 1 + _BATCH_BYTES * len(messages) // max(size, 1))
            self._obstacles.pop("broker_forbidden", None)
            self._notify()
        for event in events:
            self._note_event(event.error(), event.topic(), event.partition(), event.offset())

    def _notify(self) -> None:
        portal = self._portal
        if portal is not None and self._is_waited_for:
            try:
                portal.start_task_soon(self._set_arrived)
            except RuntimeError:  # the run is over
                self._portal = None

    async def _set_arrived(self) -> None:
        self._arrived.set()

    def _seek(self, stream: KafkaStream, offset: int) -> None:
        """Go on reading at an offset."""
        stream.eof = -1
        at = TopicPartition(stream.topic, stream.partition, offset)
        try:
            self.consumer.seek(at)
        except KafkaException:  # the client is still looking for the place where it was to begin
            self.consumer.incremental_unassign([at])
            self.consumer.incremental_assign([at])
            if self._is_paused or stream.is_halted:
                self.consumer.pause([at])

    def _note_event(self, error: KafkaError, topic: str | None, partition: int | None, offset: int | None) -> None:
        stream = self._streams.get((topic or "", -1 if partition is None else partition))
        if error.code() == KafkaError._PARTITION_EOF:
            if stream is not None and offset is not None and stream.place_in_group not in self._moved:
                stream.note_eof(offset)  # after a rebalance it is read again
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and stream is not None:
            self._begin_again(stream)
        elif error.code() == KafkaError._MAX_POLL_EXCEEDED:
            log.warning("poll_interval_exceeded", message="the member was not heard of for too long, and joins again")
        elif error.fatal() or error.code() == KafkaError._FATAL:
            raise self._fatal(error)
        else:
            self.note_error(error, topic or "")

    def _fatal(self, error: KafkaError) -> ShipperError:
        if self._settings.group_instance_id and "fenced" in error.str():
            return name_taken(self._settings)
        return ShipperError(f"this process cannot be a member of group {self._settings.group_id}: {words(error)}")

    def _note_own_error(self, error: KafkaError) -> None:
        if error.fatal():
            self._fail(self._fatal(error))
        self.note_error(error)

    def note_error(self, error: KafkaError, topic: str = "") -> None:
        """Count an error of the brokers; some are a reason why nothing is read. Any thread calls this."""
        self._errors[error.name()] += 1
        if error.code() in FORBIDDEN:
            self._obstruct(
                "broker_forbidden", refusal(self._settings, error, topic and right_on(self._settings, topic))
            )
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._obstruct("broker_unavailable", f"no broker of {', '.join(self._settings.brokers)} can be reached")
        elif error.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}:
            self._obstruct("input_gap", f"a topic of {', '.join(self._settings.topics)} does not exist: {error.str()}")

    def _obstruct(self, reason: str, message: str) -> None:
        if reason not in self._obstacles:
            self._obstacles[reason] = Obstacle(reason, message, self._wall_time())
            log.warning("reading_obstructed", reason=reason, message=message)

    # Rebalances; called by the client within `consume` --------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        places = [(each.topic, each.partition) for each in partitions]
        self._moved.update(places)
        begins = self._begins(places) if places else {}
        for place, (at, found) in begins.items():
            self._streams[place] = self._new_stream(found, at)
        if not begins:  # this process is at its end, and reads no more
            consumer.incremental_assign(partitions)
            return
        consumer.incremental_assign([TopicPartition(*place, begins[place][0].offset) for place in begins])
        halted = [TopicPartition(*place) for place in begins if self._is_paused or self._streams[place].is_halted]
        if halted:
            consumer.pause(halted)
        self._obstacles.clear()
        self._rebalances["assigned"] += len(places)
        self._note_rebalance(f"got {len(places)}")

    def _give(self, consumer: Consumer, partitions: list[TopicPartition], *, is_lost: bool) -> None:
        """Hand partitions over: what is in flight settles and is saved, then it counts here no more."""
        places = {(each.topic, each.partition) for each in partitions}
        self._moved |= places
        self._hand_over([self._streams[place] for place in places if place in self._streams], is_lost=is_lost)
        for place in places:
            if (stream := self._streams.pop(place, None)) is not None:
                self._tombstones_skipped += stream.tombstones_skipped
        consumer.resume(partitions)  # the client would have one that goes while it is paused come back paused
        consumer.incremental_unassign(partitions)
        self._rebalances["lost" if is_lost else "revoked"] += len(places)
        self._note_rebalance(f"{'lost' if is_lost else 'gave'} {len(places)}")

    def _hand_over(self, streams: Sequence[KafkaStream], *, is_lost: bool) -> None:
        portal, attached = self._portal, self._attached
        for stream in streams:
            stream.is_ending = True
        if portal is None or attached is None or not streams:
            return
        self.membership = self._proof()  # of the generation that takes them away: the brokers refuse the one before
        wait_s = self._settings.revoke_wait_seconds
        try:
            handed_over = portal.start_task_soon(partial(attached.hand_over, streams, wait_s=wait_s, is_lost=is_lost))
        except RuntimeError:  # the run is over
            self._portal = None
            return
        with suppress(CancelledError):
            handed_over.result()

    def _note_rebalance(self, what: str) -> None:
        self._last_rebalance = what, self._wall_time()
        log.info("partitions_moved", message=what, partitions=len(self._streams))

    # Where to begin ------------------------------------------------------------------------------------------------

    def _begins(self, places: Sequence[Place]) -> dict[Place, tuple[Begin, Found]]:
        """Ask the brokers where to begin, until they say; nothing may be read before."""
        while not self._is_closing:
            try:
                found = self._found(places)
                return {place: (self._begin(each), each) for place, each in found.items()}
            except (KafkaException, TimeoutError) as exception:
                error = error_of(exception)
                self.note_error(error)
                log.warning("offsets_unknown", error=words(error))
                self._has_room.clear()
                self._has_room.wait(_PAUSED_POLL_S)
        return {}

    def _begin(self, found: Found) -> Begin:
        if self._ranges is not None and found.committed < 0:
            found = found._replace(committed=self._range(found).start)
        return begin(found, self._settings)

    def _range(self, found: Found) -> range:
        assert self._ranges is not None
        return self._ranges.get((found.topic, found.partition), range(found.high, found.high))

    def _found(self, places: Sequence[Place]) -> dict[Place, Found]:
        topic_ids, whole = partitions_of(self._admin, sorted({topic for topic, _ in places}), _CALL_S)
        # Not by the consumer, which knows a leader that has gone for as long as it waits for this.
        bounds = bounds_of(self._admin, [TopicPartition(*place) for place in places], _CALL_S)
        return found_in(self._committed(whole), topic_ids, bounds)

    def _committed(self, places: list[TopicPartition]) -> list[TopicPartition]:
        committed = self.consumer.committed(places, _CALL_S)
        for each in committed:
            if each.error is not None:
                raise KafkaException(each.error)
        return committed

    def _new_stream(self, found: Found, at: Begin) -> KafkaStream:
        stream = new_stream(
            stream_id=self._next_stream_id(),
            path=f"{found.topic}/{found.partition}",
            topic=found.topic,
            partition=found.partition,
            topic_id=found.topic_id,
            first=at.offset,
            end=found.high,
            until=None if self._ranges is None else self._range(found).stop,
            session=Session(),
            stopped=at.gap if at.is_stopped else "",
            max_record_bytes=self._max_record_bytes,
            skips_tombstones=self._settings.tombstones == "skip",
        )
        if at.is_stopped:
            log.error("partition_stopped", message=at.gap)
        elif at.gap:
            stream.unreachable = at.missing
            log.error("source_unreachable", message=at.gap, records=at.missing)
        return stream

    def _begin_again(self, stream: KafkaStream, *, is_lost: bool = False) -> None:
        """Decide anew where a partition begins: what comes next is gone, the topic is another, or `on_gap` changed."""
        if self._portal is None:
            return
        place = stream.place_in_group
        self._hand_over([stream], is_lost=is_lost)
        begins = self._begins([place])
        if place not in begins:
            return
        at, found = begins[place]
        if found.topic_id != stream.topic_id:  # the brokers have dropped the group's offset with the old topic
            about = msgspec.json.encode(Metadata(stream.topic_id)).decode()
            at = begin(found._replace(committed=stream.next_offset, metadata=about), self._settings)
        self._streams[place] = again = self._new_stream(found, at)
        self._tombstones_skipped += stream.tombstones_skipped
        tp = TopicPartition(*place)
        self._seek(again, at.offset)
        if again.is_halted:
            self.consumer.pause([tp])
        elif not self._is_paused:
            self.consumer.resume([tp])

    def _look_at_stopped(self) -> None:
        if self._decides_again:
            self._decides_again = False
            for stream in [each for each in self._streams.values() if each.stopped]:
                self._begin_again(stream)

    def _look_at_ranges(self, ranges: Mapping[Place, range], now: float) -> None:
        """Look whether the group has settled the ranges, once this member has nothing left to do."""
        obstacle = min(self._obstacles.values(), key=lambda each: each.since, default=None)
        if obstacle is not None and self._wall_time() >= obstacle.since + self._give_up_after_s:
            raise DeliveryGaveUpError(obstacle.message)
        streams = self._streams.values()
        if self.membership is None or any(each.blocks or not each.is_halted for each in streams):
            self._ranges_at = now  # once it is over, they are looked at without delay
            return
        if now < self._ranges_at:
            return
        self._ranges_at = now + _RANGES_S
        try:
            committed = self._committed([TopicPartition(*place) for place in ranges])
            places = ((each.topic, each.partition) for each in committed)
            behind = {place for place, each in zip(places, committed, strict=True) if each.offset < ranges[place].stop}
            # Where a range ends with no record, or has none, nothing else moves the offset to its end.
            ended = [each for each in streams if each.place_in_group in behind and not each.stopped]
            if ended:
                self.consumer.commit(offsets=[_end_of(each) for each in ended], asynchronous=False)
        except KafkaException as exception:
            self.note_error(error_of(exception))
            return
        self._obstacles.pop("broker_unavailable", None)
        behind -= {each.place_in_group for each in ended}
        if behind <= self._streams.keys():
            self.left = behind
            self._notify()

    # Looking around; nothing here waits -----------------------------------------------------------------------------

    def _look_around(self) -> None:
        now = self._now()
        if self._ranges is not None and self._is_reading:
            self._look_at_ranges(self._ranges, now)
        if self._ends_asked is not None:
            at, asked = self._ends_asked
            if all(future.done() for future in asked.values()):
                self._ends_asked = None
                self._note_ends(at, asked)
        elif now >= self._ends_at + _ENDS_S and self._streams:
            self._ends_at = now
            wanted = {TopicPartition(*place): OffsetSpec.latest() for place in self._streams}
            self._ends_asked = (
                self._wall_time(),
                self._admin.list_offsets(
                    wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=_CALL_S
                ),
            )
        if self._topics_asked is not None:
            if all(future.done() for future in self._topics_asked.values()):
                answers, self._topics_asked = self._topics_asked, None
                self._note_topics(answers)
        elif now >= self._topics_at + _TOPICS_S:
            self._topics_at = now
            names = TopicCollection(list(self._settings.topics))
            self._topics_asked = self._admin.describe_topics(names, request_timeout=_CALL_S)

    def _note_ends(self, at: float, answers: dict[TopicPartition, Future[Any]]) -> None:
        for asked, future in answers.items():
            stream = self._streams.get((asked.topic, asked.partition))
            try:
                end = future.result().offset
            except KafkaException as exception:
                self._errors[error_of(exception).name()] += 1
                continue
            self._obstacles.pop("broker_unavailable", None)
            if stream is not None:
                stream.note_ends(end, at)

    def _note_topics(self, answers: dict[str, Future[Any]]) -> None:
        """Notice topics that were deleted, or made again under their name."""
        is_gone = False
        for name, future in answers.items():
            try:
                topic_id = str(future.result().topic_id)
            except KafkaException as exception:
                error = error_of(exception)
                self.note_error(error)
                is_gone = is_gone or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
                continue
            for stream in [each for each in self._streams.values() if each.topic == name]:
                if stream.topic_id != topic_id and not stream.stopped:
                    self._begin_again(stream, is_lost=True)
        if not is_gone:
            self._obstacles.pop("input_gap", None)


def _end_of(stream: KafkaStream) -> TopicPartition:
    about = msgspec.json.encode(Metadata(stream.topic_id)).decode()
    return TopicPartition(stream.topic, stream.partition, stream.until or 0, metadata=about)


def _place_of(message: Any) -> Place:
    return message.topic(), message.partition()
