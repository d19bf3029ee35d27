"""Clients of the brokers: properties from the settings, librdkafka's log as ours, and what its errors mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any, Final, TypeVar

import anyio
import structlog

from shipper.config.secrets import Secret, check_secret, fetch_secret, resolve_secret
from shipper.config.settings import KafkaSettings
from shipper.delivery.token_sources import expiry_claim
from shipper.kafka.stream import Place
from shipper.model.errors import ConfigError, SourceError, StateInUseError
from shipper.model.version import __version__

try:
    from confluent_kafka import Consumer, IsolationLevel, KafkaException, Producer, TopicCollection, TopicPartition
    from confluent_kafka import KafkaError as KafkaError
    from confluent_kafka.admin import AdminClient, OffsetSpec
except ImportError:  # only this package needs it
    raise ConfigError(
        "needs confluent-kafka, which is not installed; run: pip install 'acquisition-shipper[kafka]'",
        key="input.kafka",
    ) from None

T = TypeVar("T")

log = structlog.get_logger("kafka")

TRANSACTION_S: Final = 10.0
"""Limit of a transaction: one that hangs keeps the next owner of a partition and all readers waiting."""
FORBIDDEN: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
}
FENCED: Final = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
"""Another client has taken the transactional id."""
PURGED: Final = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
"""What a message was not delivered for that belonged to a transaction which has failed for another reason."""
_MOVING: Final = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
}
_TRIES: Final = 20
_BETWEEN_TRIES_S: Final = 0.25
_HEADERS_ROOM: Final = 1 << 20  # for the headers of a dead letter and those that came with it


class _Log(logging.Handler):
    """Writes librdkafka's lines to our log; secrets do not stand in them, and would be masked."""

    def __init__(self, secrets: list[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("CONFWARN"):  # a property of the consumer that the others do not have
            return
        for secret in self._secrets:
            text = text.replace(secret, "***")
        # What is an error to a client heals by itself mostly; what does not is a pause.
        log.log(min(record.levelno, logging.WARNING), "kafka_client", message=text)


def properties(settings: KafkaSettings, *, on_error: Callable[[KafkaError], None] | None = None) -> dict[str, Any]:
    """
    Make the properties that all clients have.

    Args:
        on_error: Called with errors that are no answer to a call.
    Raises:
        ConfigError: The password cannot be had, or a file of TLS cannot be read.
    """
    sasl = bool(settings.sasl_mechanism)
    protocol = {("tls", False): "SSL", ("tls", True): "SASL_SSL", ("plaintext", True): "SASL_PLAINTEXT"}
    found: dict[str, Any] = {
        # Not five minutes, for which a client may hold on to a broker that has died.
        "topic.metadata.refresh.interval.ms": 10_000,
        **{name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.client.items()},
        "bootstrap.servers": ",".join(settings.brokers),
        "client.id": f"shipper-{__version__}",
        "security.protocol": protocol.get((settings.security, sasl), "PLAINTEXT"),
    }
    for key, name in (("ca_bundle", "ca"), ("client_certificate", "certificate"), ("client_key", "key")):
        path = getattr(settings, key)
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}", key=f"input.kafka.{key}") from None
            found[f"ssl.{name}.location"] = str(path)
    secrets = []
    if settings.password is not None:
        secrets.append(resolve_secret(settings.password, key="input.kafka.password", is_for_header=False))
        found |= {
            "sasl.mechanism": settings.sasl_mechanism,
            "sasl.username": settings.username,
            "sasl.password": secrets[0],
        }
    if settings.token is not None:
        check_secret(settings.token, key="input.kafka.token")
        found |= {"sasl.mechanism": settings.sasl_mechanism, "oauth_cb": partial(_fetch_token, settings.token)}
    logger = logging.Logger("shipper.kafka")  # of nobody else
    logger.addHandler(_Log(secrets))
    found["logger"] = logger
    if on_error is not None:
        found["error_cb"] = on_error
    return found


def _fetch_token(secret: Secret, _: str) -> tuple[str, float]:
    """Fetch a token and its expiry, seconds since the epoch; called by the client in a thread of its own."""
    token = anyio.run(partial(fetch_secret, secret, key="input.kafka.token"))
    expiry = expiry_claim(token)
    if expiry is None:
        raise ConfigError("is no JWT that says when it expires", key="input.kafka.token")
    return token, expiry


def consumer_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Make the properties of a member."""
    found: dict[str, Any] = {
        "group.id": settings.group_id,
        "group.protocol": settings.group_protocol,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "queued.max.messages.kbytes": max(1, settings.max_fetched_bytes >> 10),
        "fetch.message.max.bytes": min(1 << 18, settings.max_fetched_bytes),
        # Not a second, in which what was fetched is used up several times.
        "fetch.queue.backoff.ms": 20,
    }
    if settings.group_instance_id:
        found["group.instance.id"] = settings.group_instance_id
    if settings.group_protocol == "classic":
        found["partition.assignment.strategy"] = "cooperative-sticky"
        found["session.timeout.ms"] = int(1000 * (settings.session_timeout_seconds or 45))
        found["heartbeat.interval.ms"] = min(3000, found["session.timeout.ms"] // 3)
    return found


def outside_consumer(settings: KafkaSettings, **more: object) -> Consumer:
    """Make a consumer that looks at the group, and does not join it."""
    return Consumer(properties(settings) | {"group.id": settings.group_id, "enable.auto.commit": False} | more)


def producer_properties(name: str, max_record_bytes: int) -> dict[str, Any]:
    """Make the properties of what writes transactions; `name` is the transactional id."""
    return {
        "transactional.id": name,
        "transaction.timeout.ms": int(1000 * TRANSACTION_S),
        "enable.idempotence": True,
        "message.max.bytes": min(1_000_000_000, max_record_bytes + _HEADERS_ROOM),
        "linger.ms": 5,
    }


def error_of(exception: BaseException) -> KafkaError:
    """Return the error that an exception of the client carries."""
    found = exception.args[0] if exception.args else None
    return found if isinstance(found, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def flushed(producer: Producer, limit_s: float) -> bool:
    """Wait until all messages are dealt with; returns whether they are."""
    try:
        return not producer.flush(limit_s)
    except SystemError as error:  # the client was raising what is fatal to it, and told of a message meanwhile
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        raise cause or error from None


def patiently(call: Callable[[], T]) -> T:
    """Call; again a few times while the coordinator of a group is being found."""
    for _ in range(_TRIES):
        try:
            return call()
        except KafkaException as exception:
            if not error_of(exception).retriable() and error_of(exception).code() not in _MOVING:
                raise
            Event().wait(_BETWEEN_TRIES_S)
    return call()


def partitions_of(
    admin: AdminClient, topics: Sequence[str], limit_s: float
) -> tuple[dict[str, str], list[TopicPartition]]:
    """Ask for the ids of topics, by name, and for all their partitions."""
    described = admin.describe_topics(TopicCollection(list(topics)), request_timeout=limit_s)
    found = {name: future.result(limit_s) for name, future in described.items()}
    places = [TopicPartition(name, each.id) for name, topic in found.items() for each in topic.partitions]
    return {name: str(topic.topic_id) for name, topic in found.items()}, places


def offsets_at(admin: AdminClient, places: Sequence[TopicPartition], spec: Any, limit_s: float) -> dict[Place, int]:
    """Ask for the offset of each partition that an `OffsetSpec` means; -1 if there is none."""
    wanted = dict.fromkeys(places, spec)
    answers = admin.list_offsets(wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=limit_s)
    return {(each.topic, each.partition): future.result(limit_s).offset for each, future in answers.items()}


def bounds_of(admin: AdminClient, places: Sequence[TopicPartition], limit_s: float) -> dict[Place, tuple[int, int]]:
    """Ask where partitions begin and end; open transactions are behind their ends."""
    lows, ends = (offsets_at(admin, places, each, limit_s) for each in (OffsetSpec.earliest(), OffsetSpec.latest()))
    return {place: (low, ends[place]) for place, low in lows.items()}


def name_taken(settings: KafkaSettings) -> StateInUseError:
    """Return the error for a static name that another process has."""
    return StateInUseError(
        f"another member of group {settings.group_id} has the name {settings.group_instance_id}; give each its own "
        "input.kafka.group_instance_id"
    )


def words(error: KafkaError) -> str:
    """Write an error for a person."""
    return f"{error.str()} ({error.name()})"


@contextmanager
def understood(settings: KafkaSettings, what: str, right: str = "") -> Iterator[None]:
    """
    Translate what the brokers answer.

    Args:
        what: Is not done then.
        right: As for `refusal`.
    Raises:
        SourceError: They refuse, or do not answer.
        StateInUseError: Another process writes under the same name.
    """
    try:
        yield
    except (KafkaException, TimeoutError) as exception:
        error = error_of(exception)
        if error.code() in FENCED:
            message = f"another replay of group {settings.group_id} has begun, which sends the rest"
            raise StateInUseError(message) from None
        raise SourceError(f"{what}: {refusal(settings, error, right) or words(error)}") from None


def needs(settings: KafkaSettings, right: str) -> str:
    """Write that this client needs a right."""
    return f"{f'user {settings.username}' if settings.username else 'this client'} needs {right}"


def right_on(settings: KafkaSettings, topic: str) -> str:
    """Name the right that a member needs on a topic; on some other things, it follows from it."""
    return f"{'WRITE' if topic in {settings.letters, settings.ledger} else 'READ'} on the topic {topic}"


def refusal(settings: KafkaSettings, error: KafkaError, right: str = "") -> str:
    """
    Name the right that is missing; empty if none is.

    Args:
        right: Which one it is if it is about a topic, if that is known.
    """
    group, topics = settings.group_id, (*settings.topics, settings.letters, settings.ledger)
    rights: Mapping[int, str] = {
        KafkaError.TOPIC_AUTHORIZATION_FAILED: right or ", ".join(right_on(settings, each) for each in topics),
        KafkaError.GROUP_AUTHORIZATION_FAILED: f"READ on the group {group}",
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: f"WRITE on transactional ids from {group}-",
        KafkaError.CLUSTER_AUTHORIZATION_FAILED: "IDEMPOTENT_WRITE on the cluster",
    }
    if error.code() not in FORBIDDEN:
        return ""
    if error.code() not in rights:
        keys = "input.kafka.token" if settings.token else "input.kafka.username and input.kafka.password"
        if error.code() == KafkaError._SSL:
            keys = "input.kafka.ca_bundle and input.kafka.client_certificate"
        return f"{words(error)}: the brokers do not let this client in; check {keys}"
    return f"{words(error)}: {needs(settings, rights[error.code()])}"
