"""
Saves settled records in Kafka transactions: dead letters, ledger, and the offsets of the group.

As long as this process is in the group, the brokers accept offsets even for a partition of another member. So the
pipeline releases revoked partitions before the rebalance continues: every checkpoint that arrives here belongs to a
partition that this process owns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import Final, NamedTuple

import structlog
from confluent_kafka import KafkaException, Message, Producer, TopicPartition

from shipper.config.settings import KafkaSettings, Settings
from shipper.kafka.client import (
    FENCED,
    PURGED,
    UNKNOWN_TOPIC,
    KafkaError,
    client_properties,
    describe,
    describe_refusal,
    error_of,
    flush,
    name_taken_error,
    producer_properties,
    required_right,
    valid_properties,
)
from shipper.kafka.documents import Document, Metadata, add_checkpoints, letter_document, produce, shortened_letter
from shipper.kafka.member import Member
from shipper.kafka.offsets import Selection
from shipper.kafka.stream import KafkaStream, Session
from shipper.kafka.topics import Topics, unwritable_topics
from shipper.model.errors import ConfigError, StateError, StateUnwritableError
from shipper.model.records import Checkpoint, Totals
from shipper.state.store import SaveResult
from shipper.system.crash_points import crash_point
from shipper.system.memory import reuse_fetch_buffers
from shipper.system.work import WorkItem, at_work, step

log = structlog.get_logger("kafka")

_CALL_S: Final = 5.0  # for one call to the brokers
_HANGS_S: Final = 2 * _CALL_S + 2
_CONNECT_S: Final = 1.0
_START_S: Final = 30.0
_SESSION_KEYS_MAX: Final = 20_000  # then a new session begins, to bound the memory of a long-running process
_LETTER_BYTES_MIN: Final = 1024  # even a letter that its topic refuses is not shortened further
# A rebalance follows, which decides who owns the partitions.
_REBALANCING: Final = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
}
_UNREACHABLE: Final = {
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}


class _Pending(NamedTuple):
    """The contents of one transaction."""

    checkpoints: Sequence[Checkpoint]
    sessions: list[tuple[KafkaStream, Session, dict[str, int], int]]  # with `saved_mistakes` and the offset


class TransactionStore:
    """
    A state store in the brokers.

    Args:
        name: The transactional id.
        member: Provides the group membership, and counts transactions.
    Raises:
        StateUnwritableError: The brokers do not begin a transaction.
        StateInUseError: Another member has the same `group_instance_id`.
    """

    def __init__(
        self, settings: KafkaSettings, name: str, member: Member, *, max_record_bytes: int, now: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._member = member
        self._now = now
        common = client_properties(settings, on_error=member.status.note_error)
        self._properties = common | producer_properties(name, max_record_bytes)
        self._delivery_error: KafkaError | None = None
        self._max_record_bytes = max_record_bytes
        self._letter_limits: dict[str, int] = {}  # by key: bytes to store of letters that their topic has refused
        self._aborted_for: int | None = None
        self._is_name_taken = False  # a new producer would only disturb the other member
        self._producer: Producer | None = self._new_producer(_START_S)
        self._in_doubt: _Pending | None = None
        self._lock = threading.Lock()

    def _new_producer(self, limit_s: float) -> Producer:
        with valid_properties(self._settings):
            producer = Producer(self._properties)
        # Connect now, or it looks for its coordinator half a second later. The first answer may be of a connection to
        # an address in `brokers`, which is closed then.
        with suppress(KafkaException):
            for _ in range(2):
                producer.list_topics(self._settings.letters, _CONNECT_S)
        try:
            producer.init_transactions(limit_s)
        except KafkaException as exception:
            raise self._state_error(error_of(exception), "no transaction can be started") from None
        return producer

    # For the pipeline -------------------------------------------------------------------------------------------------

    def accepted_ids(self) -> Iterable[bytes]:
        """Return nothing: a member knows only the EventIds it has seen itself."""
        return ()

    def totals(self) -> Totals:
        """Return zeros: `GroupStatus` reads the totals of a group."""
        return Totals()

    def expire(self, before_s: float, now_s: float) -> int:
        """Do nothing: retention is a setting of the topics."""
        return 0

    def expire_ledger(self, before_s: float, now_s: float) -> int:
        """Do nothing, as `expire`."""
        return 0

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> SaveResult:
        """
        Commit checkpoints with their dead letters and counts in one transaction.

        Raises:
            StateUnwritableError: The transaction failed, try again later. If its outcome is unknown, the next call
                first asks the brokers again.
            StateInUseError: Another member has the same `group_instance_id`.
        """
        requested = list(checkpoints)
        with self._lock, at_work(WorkItem("save", f"the topics of group {self._settings.group_id}")):
            self._use_password(self._member.password)
            if self._in_doubt is None:
                crash_point("save.begin")
                self._in_doubt = self._begin_transaction(requested, now_s)
                if self._in_doubt is None:
                    return SaveResult([], requested)
            started_at = self._now()
            is_committed = self._commit()
            pending, self._in_doubt = self._in_doubt, None
            crash_point("save.done")
            if not is_committed:
                return SaveResult([], requested)
            self._member.status.note_committed(self._now() - started_at)
            self._letter_limits, self._aborted_for = {}, None
            for stream, session, mistakes, position in pending.sessions:
                stream.saved_mistakes, stream.committed = mistakes, position
                stream.session = Session() if len(session.sums) > _SESSION_KEYS_MAX else session
                stream.unreachable = 0
            saved = {id(checkpoint) for checkpoint in pending.checkpoints}
            return SaveResult(
                [checkpoint for checkpoint in requested if id(checkpoint) in saved],
                [checkpoint for checkpoint in requested if id(checkpoint) not in saved],
            )

    def _use_password(self, password: str | None) -> None:
        if password is not None and password != self._properties["sasl.password"]:
            self._properties["sasl.password"] = password
            if self._producer is not None:
                self._producer.set_sasl_credentials(self._settings.username, password)

    # The transaction --------------------------------------------------------------------------------------------------

    def _begin_transaction(self, checkpoints: Sequence[Checkpoint], now_s: float) -> _Pending | None:
        """Begin a transaction and write its contents; return None if a rebalance is due."""
        membership = self._member.assignment.membership
        if membership is None:
            return None
        if self._is_name_taken:
            raise name_taken_error(self._settings)
        if self._producer is None:
            self._producer = self._new_producer(_CALL_S)
        producer, pending, offsets = self._producer, _Pending(checkpoints, []), []
        by_stream: dict[int, list[Checkpoint]] = {}
        for checkpoint in checkpoints:
            by_stream.setdefault(checkpoint.stream.stream_id, []).append(checkpoint)
        self._delivery_error = None
        limits = dict(self._letter_limits)
        try:
            producer.begin_transaction()
            for group in by_stream.values():
                stream = group[0].stream
                assert isinstance(stream, KafkaStream)
                letters = [
                    self._limited(letter_document(stream, rejection, now_s, self._settings.group_id))
                    for checkpoint in group
                    for rejection in checkpoint.rejections
                ]
                session, rows = add_checkpoints(stream, group, self._settings.group_id)
                mistakes = stream.mistakes_with(group)
                for topic, documents in ((self._settings.letters, letters), (self._settings.ledger, rows)):
                    produce(producer, topic, documents, self._note_delivery)
                position = stream.position_at(group[-1].end_offset)
                last = stream.message_end(group[-1].end_offset)
                pending.sessions.append((stream, session, mistakes, position))
                settled_until, partitions = stream.settled_until_with(position), stream.initial_partitions
                topics = self._settings.letters, self._settings.ledger
                metadata = Metadata(stream.topic_id, settled_until, last, dict(mistakes), partitions, *topics)
                offsets.append(TopicPartition(*stream.topic_partition, position, metadata=metadata.text()))
            crash_point("save.written")
            flush(producer, _CALL_S)
            if self._delivery_error is not None:
                raise KafkaException(self._delivery_error)
            _call_with_timeout(
                lambda: self._retry(lambda: producer.send_offsets_to_transaction(offsets, membership, _CALL_S))
            )
            crash_point("save.commit")
        except TimeoutError:
            self._member.status.transactions["aborted"] += 1
            self._producer = None  # the brokers abort its transaction once another producer uses its id
            raise StateUnwritableError(
                f"the brokers do not accept the offsets of group {self._settings.group_id}; shipper retries",
                reason="broker_unavailable",
            ) from None
        except KafkaException as exception:
            error = error_of(exception)
            is_retried = error.code() == KafkaError.MSG_SIZE_TOO_LARGE and self._letter_limits != limits
            self._abort(error, is_retried=is_retried)
            return None
        return pending

    def _note_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is None or error.code() in PURGED:
            return
        self._delivery_error = error
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE and message.topic() == self._settings.letters:
            key = (message.key() or b"").decode()
            limit = self._letter_limits.get(key)
            self._letter_limits[key] = (
                self._max_record_bytes if limit is None else max(limit // 2, min(limit, _LETTER_BYTES_MIN))
            )

    def _limited(self, letter: Document) -> Document:
        limit = self._letter_limits.get(letter.key)
        return letter if limit is None else shortened_letter(letter, limit)

    def _retry(self, call: Callable[[], object]) -> None:
        """Repeat a call until it succeeds, fails permanently, or times out."""
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
        """Commit; return False if that aborted. After a timeout, call again to learn the outcome."""
        producer = self._producer
        assert producer is not None
        try:
            self._retry(lambda: producer.commit_transaction(_CALL_S))
        except KafkaException as exception:
            error = error_of(exception)
            if error.retriable():
                self._member.status.transactions["in_doubt"] += 1
                raise StateUnwritableError(
                    f"the brokers do not say whether a transaction of group {self._settings.group_id} is committed "
                    f"({describe(error)}); shipper asks again",
                    reason="broker_unavailable",
                ) from None
            self._in_doubt = None
            self._abort(error)
            return False
        return True

    def _abort(self, error: KafkaError, *, is_retried: bool = False) -> None:
        """
        Abort a failed transaction, so that the next one can begin.

        Args:
            is_retried: The next one will contain something else, so the reason is no obstacle.
        Raises:
            StateUnwritableError, StateInUseError: The reason is an obstacle, and not a rebalance.
        """
        self._member.status.transactions["aborted"] += 1
        is_repeated, self._aborted_for = error.code() == self._aborted_for, error.code()
        if is_repeated:
            log.debug("transaction_aborted", error=describe(error))
        elif is_retried:
            message = "a dead letter is too large for its topic; only its beginning is stored"
            log.warning("transaction_aborted", error=describe(error), message=message)
        elif error.code() in _REBALANCING:
            message = "harmless: the group is rebalancing; the records are saved later, or sent by the next owner"
            log.info("transaction_aborted", error=describe(error), message=message)
        else:
            log.warning("transaction_aborted", error=describe(error))
        producer = self._producer
        assert producer is not None
        try:
            if error.fatal():
                self._producer = None
            else:
                self._retry(lambda: producer.abort_transaction(_CALL_S))
        except KafkaException as exception:
            log.warning("transaction_not_aborted", error=describe(error_of(exception)))
            self._producer = None  # the brokers abort it after its timeout, or once another producer uses its id
        if is_retried:
            self._producer = None  # after a refused message, its next transaction would fail, too
        elif error.code() not in _REBALANCING:
            raise self._state_error(error, "settled records cannot be saved")

    def _state_error(self, error: KafkaError, failure: str) -> StateError:
        settings = self._settings
        if error.code() == KafkaError.FENCED_INSTANCE_ID:
            self._is_name_taken = True
            return name_taken_error(settings)
        if error.code() in FENCED:
            # By a member with the same name, or by the brokers, which end transactions that take too long. A new
            # producer can commit only if the membership is still valid: its name proves that to the brokers.
            failure += "; the brokers have ended the transaction, and the records are saved in the next one"
            return StateUnwritableError(f"{failure}: {describe(error)}", reason="broker_unavailable")
        right = ""
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:  # the client does not say of which topic
            right = " and ".join(
                required_right(settings, topic) for topic in unwritable_topics(self._member.admin, settings)
            )
        if why := describe_refusal(settings, error, right):
            return StateUnwritableError(f"{failure}: {why}", reason="broker_forbidden")
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            failure += f"; raise max.message.bytes of {settings.letters}"
        elif error.code() in UNKNOWN_TOPIC:
            failure += f"; create {settings.letters} and {settings.ledger}: shipper check --online --create-topics"
        elif error.retriable() or error.code() in _UNREACHABLE:
            return StateUnwritableError(f"{failure}: {describe(error)}", reason="broker_unavailable")
        return StateUnwritableError(f"{failure}: {describe(error)}", reason="state_unwritable")


def _call_with_timeout(call: Callable[[], object]) -> None:
    """Call in a new thread, or raise `TimeoutError`: the client may wait for ever for a restarted coordinator."""
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


# A member and its store -----------------------------------------------------------------------------------------------


@contextmanager
def open_group(
    settings: Settings, *, now: Callable[[], float], wall_time: Callable[[], float], selection: Selection | None = None
) -> Iterator[tuple[Member, TransactionStore]]:
    """
    Connect to the brokers; on exit, leave the group. The member joins it once a pipeline is attached.

    Args:
        selection: What to read; None = everything, without end.
    Raises:
        SourceError: The selection does not exist.
        ConfigError: A topic is missing or unsuitable, a secret cannot be fetched, or the brokers refuse this client.
        StateUnwritableError: The brokers are unreachable.
        StateInUseError: Another member has the same `group_instance_id`.
    """
    kafka, max_record_bytes = settings.input.kafka, settings.input.max_record_bytes
    assert kafka is not None
    Topics(kafka, max_record_bytes=max_record_bytes).require()
    reuse_fetch_buffers()
    member = Member(
        kafka,
        max_record_bytes=max_record_bytes,
        now=now,
        wall_time=wall_time,
        ranges=selection and selection.ranges(kafka),
        give_up_after_s=settings.delivery.give_up_after_seconds,
    )
    try:
        name = f"{kafka.group_id}-{kafka.group_instance_id or token_hex(6)}"
        try:
            store = TransactionStore(kafka, name, member, max_record_bytes=max_record_bytes, now=now)
        except StateUnwritableError as error:
            if error.reason == "broker_forbidden":
                raise ConfigError(str(error), key="input.kafka") from None
            raise
        yield member, store
    finally:
        member.close()
