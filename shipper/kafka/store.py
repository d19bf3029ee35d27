"""
Saves what is settled in one Kafka transaction: dead letters, ledger, and the offsets of the group.

The brokers take an offset of a partition that is another member's by now, as long as this one is in the group. So the
pipeline lets go of such partitions before it lets the rebalance go on: a checkpoint that comes here is of a partition
that this process has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
import structlog
from confluent_kafka import KafkaException, Producer, TopicPartition

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    FENCED,
    PURGED,
    KafkaError,
    error_of,
    flushed,
    name_taken,
    producer_properties,
    properties,
    refusal,
    right_on,
    words,
)
from shipper.kafka.documents import Metadata, counted, letter, produce
from shipper.kafka.group import Member
from shipper.kafka.stream import KafkaStream, Session
from shipper.model.errors import ConfigError, StateError, StateUnwritableError
from shipper.model.records import Checkpoint
from shipper.state.store import Saved
from shipper.system.crash_points import crash_point
from shipper.system.work import Piece, at_work, step

log = structlog.get_logger("kafka")

_CALL_S: Final = 5.0  # for one answer of the brokers, before it counts as none
_HANGS_S: Final = 2 * _CALL_S + 2
_CONNECT_S: Final = 1.0
_START_S: Final = 30.0
_SESSION_KEYS_MAX: Final = 20_000  # then a new session begins, so that the sums of a long life stay small
# The group has moved on; the rebalance that follows decides whose the partitions are.
_GROUP_MOVED: Final = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}


class _Pending(NamedTuple):
    """What one transaction writes."""

    checkpoints: Sequence[Checkpoint]
    sessions: list[tuple[KafkaStream, Session]]


class TransactionStore:
    """
    A state store without a file.

    Args:
        name: The transactional id.
        member: Has the proof of the membership, and counts the transactions.
        now: The clock that does not jump, seconds.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        name: str,
        member: Member,
        *,
        max_record_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._member = member
        self._now = now
        self._properties = properties(settings, on_error=member.note_error) | producer_properties(
            name, max_record_bytes
        )
        self._failed: KafkaError | None = None
        self._is_name_taken = False  # a new producer would take it back, and end the other member
        self._written = ""  # the topic that a failure is about, if that is known
        self._producer: Producer | None = self._new_producer(_START_S)
        self._in_doubt: _Pending | None = None
        self._lock = threading.Lock()

    def _new_producer(self, limit_s: float) -> Producer:
        producer = Producer(self._properties)
        with suppress(KafkaException):  # not connected yet, it would look for its coordinator half a second later
            producer.list_topics(self._settings.letters, _CONNECT_S)
        try:
            producer.init_transactions(limit_s)
        except KafkaException as exception:
            raise self._translated(error_of(exception), "no transaction can be begun") from None
        return producer

    # What the pipeline asks for -----------------------------------------------------------------------------------

    def accepted_ids(self) -> Iterable[bytes]:
        """Return none: a member knows the EventIds that it saw itself."""
        return ()

    def expire(self, before_s: float, now_s: float) -> int:
        """Do nothing: what the topics keep is their business."""
        return 0

    def expire_ledger(self, before_s: float, now_s: float) -> int:
        """Do nothing, as for `expire`."""
        return 0

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> Saved:
        """
        Commit checkpoints with their dead letters and counts in one transaction.

        Raises:
            StateUnwritableError: Not for now. If the brokers do not say what became of a transaction, they are asked
                again by the next call, before anything else is begun.
            StateInUseError: Another member has this one's name.
        """
        wanted = list(checkpoints)
        with self._lock, at_work(Piece("save", f"the topics of group {self._settings.group_id}")):
            if self._in_doubt is None:
                crash_point("save.begin")
                self._in_doubt = self._prepared(wanted, now_s)
                if self._in_doubt is None:
                    return Saved([], wanted)
            begun_at = self._now()
            is_committed = self._commit()
            pending, self._in_doubt = self._in_doubt, None
            crash_point("save.done")
            if not is_committed:
                return Saved([], wanted)
            self._member.note_committed(self._now() - begun_at)
            for stream, session in pending.sessions:
                is_full = len(session.sums) > _SESSION_KEYS_MAX
                stream.session = Session() if is_full else session
                stream.unreachable = 0
            done = {id(each) for each in pending.checkpoints}
            return Saved(
                [each for each in wanted if id(each) in done], [each for each in wanted if id(each) not in done]
            )

    # The transaction ----------------------------------------------------------------------------------------------

    def _prepared(self, checkpoints: Sequence[Checkpoint], now_s: float) -> _Pending | None:
        """Begin a transaction and write everything into it; None if the group has moved on."""
        metadata = self._member.membership
        if metadata is None:
            return None
        if self._is_name_taken:
            raise name_taken(self._settings)
        if self._producer is None:
            self._producer = self._new_producer(_CALL_S)
        producer = self._producer
        pending = _Pending(checkpoints, [])
        by_stream: dict[int, list[Checkpoint]] = {}
        for each in checkpoints:
            by_stream.setdefault(each.stream.stream_id, []).append(each)
        self._failed = None
        try:
            producer.begin_transaction()
            offsets = []
            for own in by_stream.values():
                stream = own[0].stream
                assert isinstance(stream, KafkaStream)
                letters = [letter(stream, rejection, now_s) for each in own for rejection in each.rejections]
                session, rows = counted(stream, own)
                pending.sessions.append((stream, session))
                for topic, documents in ((self._settings.letters, letters), (self._settings.ledger, rows)):
                    self._written = topic
                    produce(producer, topic, documents, self._delivered)
                position = stream.position_at(own[-1].end_offset)
                about = Metadata(stream.topic_id, stream.settled_until_at(position))
                text = msgspec.json.encode(about).decode()
                offsets.append(TopicPartition(stream.topic, stream.partition, position, metadata=text))
            self._written = ""
            crash_point("save.written")
            flushed(producer, _CALL_S)
            if self._failed is not None:
                raise KafkaException(self._failed)
            _bounded(lambda: self._retried(lambda: producer.send_offsets_to_transaction(offsets, metadata, _CALL_S)))
            crash_point("save.commit")
        except TimeoutError:
            self._member.transactions["aborted"] += 1
            self._producer = None  # whoever takes its name next has the brokers abort what it has begun
            raise StateUnwritableError(
                f"the brokers do not take the offsets of group {self._settings.group_id}; it is tried again",
                reason="broker_unavailable",
            ) from None
        except KafkaException as exception:
            error = error_of(exception)
            self._abort(error)
            if error.code() in _GROUP_MOVED:
                return None
            raise self._translated(error, "what is settled cannot be saved") from None
        return pending

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and error.code() not in PURGED:
            self._failed, self._written = error, message.topic()

    def _retried(self, call: Callable[[], object]) -> None:
        """Call until it is done, or fails for good, or the time is up."""
        limit = self._now() + _CALL_S
        while True:
            step()
            try:
                call()
                return
            except KafkaException as exception:
                if not error_of(exception).retriable() or self._now() >= limit:
                    raise

    def _commit(self) -> bool:
        """
        Commit; asked again after a time-out, the client tells what has become of the same transaction.

        Returns:
            False: it was aborted, and nothing of it was saved.
        """
        producer = self._producer
        assert producer is not None
        try:
            self._retried(lambda: producer.commit_transaction(_CALL_S))
        except KafkaException as exception:
            error = error_of(exception)
            if error.retriable():
                self._member.transactions["in_doubt"] += 1
                raise StateUnwritableError(
                    f"the brokers do not say whether a transaction of group {self._settings.group_id} is committed "
                    f"({words(error)}); they are asked again",
                    reason="broker_unavailable",
                ) from None
            self._in_doubt = None
            self._abort(error)
            if error.code() in _GROUP_MOVED:
                return False
            raise self._translated(error, "what is settled cannot be saved") from None
        return True

    def _abort(self, error: KafkaError) -> None:
        """End a transaction that failed, so that the next one can begin; a new producer where that cannot be."""
        self._member.transactions["aborted"] += 1
        log.warning("transaction_aborted", error=words(error))
        producer, is_fatal = self._producer, error.fatal()
        assert producer is not None
        try:
            if not is_fatal:
                self._retried(lambda: producer.abort_transaction(_CALL_S))
        except KafkaException as exception:
            log.warning("transaction_not_aborted", error=words(error_of(exception)))
            is_fatal = True  # the brokers do it when its time is up, or for the producer that takes the name
        if is_fatal:
            self._producer = None

    def _translated(self, error: KafkaError, what: str) -> StateError | ConfigError:
        settings = self._settings
        if error.code() in FENCED and settings.group_instance_id:
            self._is_name_taken = True
            return name_taken(settings)
        both = f"WRITE on the topics {settings.letters} and {settings.ledger}"
        if why := refusal(settings, error, right_on(settings, self._written) if self._written else both):
            return StateUnwritableError(f"{what}: {why}", reason="broker_forbidden")
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            what += f"; raise max.message.bytes of {settings.letters}"
            return StateUnwritableError(f"{what}: {words(error)}", reason="state_unwritable")
        if error.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}:
            what += f"; make {settings.letters} and {settings.ledger}: shipper check --online --create-topics"
            return StateUnwritableError(f"{what}: {words(error)}", reason="state_unwritable")
        reason = "broker_unavailable" if error.retriable() or error.code() in _AWAY else "state_unwritable"
        return StateUnwritableError(f"{what}: {words(error)}", reason=reason)


def _bounded(call: Callable[[], object]) -> None:
    """
    Call in a thread of its own: of a group coordinator that was restarted, the client may wait for an answer for ever.

    Raises:
        TimeoutError: It did not come back; what it does later is of no effect.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="offsets", daemon=True).start()
    done.result(_HANGS_S)


_AWAY: Final = {
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
