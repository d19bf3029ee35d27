"""Broker clients: their properties, librdkafka's log, and the meaning of broker errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import structlog
from confluent_kafka import IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka import KafkaError as KafkaError
from confluent_kafka.admin import AdminClient
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from shipper.config.secrets import Secret, check_secret, fetch_secret, resolve_secret
from shipper.config.settings import KafkaSettings
from shipper.delivery.tokens import expiry_claim
from shipper.model.errors import ConfigError, SourceError, StateInUseError
from shipper.model.version import __version__

T = TypeVar("T")

OnError = Callable[[KafkaError], None]

log = structlog.get_logger("kafka")

TRANSACTION_S: Final = 10.0
"""Transaction timeout: a hanging transaction blocks the next owner of a partition and all readers."""
FORBIDDEN: Final = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
}
LETTER_OVERHEAD_BYTES: Final = 8 << 10
"""Bytes reserved for a dead letter besides its value."""
UNKNOWN_TOPIC: Final = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}
FENCED: Final = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
"""Another client uses the same transactional id."""
ASSIGNOR: Final = "cooperative-sticky"
NO_LEADER: Final = "the partition has no leader: start a broker that has a replica; reading then continues"
PURGED: Final = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
"""Errors of messages whose transaction failed for another reason."""
_TRANSIENT: Final = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}
_UNCONNECTED: Final = {KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._ALL_BROKERS_DOWN}
REFUSED: Final = {KafkaError._AUTHENTICATION, KafkaError._SSL}
_BAD_CERTIFICATE: Final = re.compile("certificate verify failed|SSL alert number")  # of a broker, or of this client
_NO_MECHANISM: Final = "Unsupported SASL mechanism"  # likewise
_NO_TLS: Final = "PLAINTEXT broker listener"  # likewise
_MESSAGE_BYTES_MAX: Final = 1_000_000_000  # the client accepts no larger limit
_BATCH_BYTES: Final = 1_000_000  # the default
_POLL_S: Final = 0.02
_FILE_KEYS: Final = {"ca": "ca_bundle", "certificate": "client_certificate", "key": "client_key"}
_FILE_PROPERTY: Final = re.compile(r"ssl\.(ca|certificate|key)\.location")


class _Log(logging.Handler):
    """Writes librdkafka's messages to our log. Masks secrets, although librdkafka does not log them."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("CONFWARN"):  # a consumer property that other clients do not support
            return
        for secret in self._secrets:
            text = text.replace(secret, "***")
        # Most client errors are transient; the others cause a pause. Aborted transactions are logged by us.
        level = logging.DEBUG if text.startswith("TXNERR") else min(record.levelno, logging.WARNING)
        log.log(level, "kafka_client", message=text)


def client_properties(settings: KafkaSettings, *, on_error: OnError | None = None) -> dict[str, Any]:
    """Return the properties common to all clients; raise `ConfigError` if a secret or file cannot be read."""
    protocol = {"tls": "SSL", "plaintext": "PLAINTEXT"}[settings.security]
    if settings.sasl_mechanism:
        protocol = f"SASL_{protocol}"
    config: dict[str, Any] = {
        # With the default of five minutes, a client may keep using a dead broker for that long.
        "topic.metadata.refresh.interval.ms": 10_000,
        # A new client waits half of this between learning the brokers' addresses and using them (librdkafka: "sparse
        # connections"), 50 ms by default; after failures, the time doubles as usual.
        "reconnect.backoff.ms": 20,
        **{name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.client.items()},
        "bootstrap.servers": ",".join(settings.brokers),
        "client.id": f"shipper-{__version__}",
        "security.protocol": protocol,
    }
    for name, key in _FILE_KEYS.items():
        path = getattr(settings, key)
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}", key=f"input.kafka.{key}") from None
            config[f"ssl.{name}.location"] = str(path)
    secrets = []
    if settings.sasl_mechanism:
        config["sasl.mechanism"] = settings.sasl_mechanism
    if settings.password is not None:
        secrets.append(read_password(settings.password))
        config |= {"sasl.username": settings.username, "sasl.password": secrets[0]}
    if settings.token is not None:
        check_secret(settings.token, key="input.kafka.token")
        config["oauth_cb"] = partial(_fetch_token, settings.token)
    config["logger"] = logging.Logger("shipper.kafka")  # not a child of the root logger
    config["logger"].addHandler(_Log(secrets))
    return config if on_error is None else config | {"error_cb": on_error}


@contextmanager
def valid_properties(settings: KafkaSettings) -> Iterator[None]:
    """Raise `ConfigError` if a client cannot be created with its properties."""
    try:
        yield
    except KafkaException as exception:
        error = error_of(exception)
        raise ConfigError(describe_refusal(settings, error) or describe(error), key="input.kafka") from None


def read_password(secret: Secret) -> str:
    """Read the password for the brokers; raise a `ConfigError` if that fails."""
    return resolve_secret(secret, key="input.kafka.password", is_for_header=False)


def _fetch_token(secret: Secret, _: str) -> tuple[str, float]:
    """Return a token and its expiry, seconds since the epoch. Called in a thread of the client."""
    token = anyio.run(partial(fetch_secret, secret, key="input.kafka.token"))
    expiry = expiry_claim(token)
    if expiry is None:
        raise ConfigError("is not a JWT with an expiry (exp)", key="input.kafka.token")
    return token, expiry


def consumer_properties(settings: KafkaSettings) -> dict[str, Any]:
    """Return the additional properties of a group member."""
    config: dict[str, Any] = {
        "group.id": settings.group_id,
        "group.protocol": settings.group_protocol,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "queued.max.messages.kbytes": max(1, settings.max_fetched_bytes >> 10),
        "fetch.max.bytes": settings.max_fetched_bytes,
        "fetch.message.max.bytes": min(1 << 20, settings.max_fetched_bytes),
        # Within the default of a second, the fetched messages would be consumed several times over.
        "fetch.queue.backoff.ms": 20,
    }
    if settings.group_instance_id:
        config["group.instance.id"] = settings.group_instance_id
    if settings.group_protocol == "classic":
        config["partition.assignment.strategy"] = ASSIGNOR
        config["session.timeout.ms"] = int(1000 * (settings.session_timeout_seconds or 45))
        config["heartbeat.interval.ms"] = min(3000, config["session.timeout.ms"] // 3)
    return config


def producer_properties(name: str, max_record_bytes: int, *, limit_s: float | None = None) -> dict[str, Any]:
    """Return the additional properties of a transactional producer; `name` is the transactional id."""
    return {
        "transactional.id": name,
        "transaction.timeout.ms": int(1000 * (limit_s or TRANSACTION_S)),
        "enable.idempotence": True,
        "message.max.bytes": _MESSAGE_BYTES_MAX,  # so that max.message.bytes of the topic decides
        "batch.size": min(_BATCH_BYTES, max_record_bytes + LETTER_OVERHEAD_BYTES),  # the least that the topic accepts
        "linger.ms": 5,
    }


def flush(producer: Producer, limit_s: float) -> bool:
    """Wait until all messages are acknowledged or failed; return False on a timeout."""
    try:
        return not producer.flush(limit_s)
    except SystemError as error:  # a callback ran while the client raised a fatal error, which that hides or even loses
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        lost = KafkaError(KafkaError._FATAL, "the client failed, and the reason is unknown", fatal=True)
        raise cause or KafkaException(lost) from None


def _is_transient(exception: BaseException) -> bool:
    error = error_of(exception)
    return isinstance(exception, KafkaException) and (error.retriable() or error.code() in _TRANSIENT)


retry_transient: Final = retry(
    retry=retry_if_exception(_is_transient), stop=stop_after_delay(5), wait=wait_fixed(0.25), reraise=True
)
"""Decorator: repeat a call for up to 5 s while the group coordinator is unavailable or a transaction is open."""


def offsets_at(
    admin: AdminClient,
    partitions: Iterable[TopicPartition],
    spec: Any,
    limit_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> dict[tuple[str, int], int]:
    """Query the offsets of an `OffsetSpec` by topic and partition, -1 = none."""
    wanted = dict.fromkeys(partitions, spec)
    if not wanted:  # the client refuses an empty request
        return {}
    answers = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=limit_s)
    return {
        (partition.topic, partition.partition): future.result(limit_s).offset for partition, future in answers.items()
    }


@retry_transient
def describe_group(admin: AdminClient, group_id: str, limit_s: float) -> Any:
    """Query the state, the members and the granted operations of a group."""
    (future,) = admin.describe_consumer_groups(
        [group_id], include_authorized_operations=True, request_timeout=limit_s
    ).values()
    return future.result(limit_s)


# Errors ---------------------------------------------------------------------------------------------------------------


def error_of(exception: BaseException) -> KafkaError:
    """Return the error in a client exception."""
    error = exception.args[0] if exception.args else None
    if isinstance(exception, TimeoutError):
        return KafkaError(KafkaError._TIMED_OUT, str(exception) or "the brokers do not answer")
    return error if isinstance(error, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def translate_tls(error: KafkaError) -> KafkaError:
    """Return an error with the code for TLS if a certificate caused it; the client may call it a failed connection."""
    return KafkaError(KafkaError._SSL, error.str()) if _BAD_CERTIFICATE.search(error.str()) else error


class ConnectionErrors:
    """
    Notes why a client cannot connect, for `client_properties`; the calls that wait for it only say that they timed out.

    Attributes:
        last: The last of the most specific reasons; None = none is known.
    """

    def __init__(self) -> None:
        self.last: KafkaError | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the brokers have refused this client."""
        return self.last is not None and self.last.code() in REFUSED

    def wait_for(self, admin: AdminClient, future: Future[T]) -> T:
        """Wait for the result of a call, but not once the brokers have refused this client, which would repeat it."""
        while not future.done() and not self.is_refused:
            admin.poll(0)
            wait([future], _POLL_S)
        if self.is_refused:
            raise KafkaException(self.last)
        return future.result()

    def __call__(self, error: KafkaError) -> None:
        error = translate_tls(error)
        if error.code() in _UNCONNECTED | REFUSED and (
            self.last is None or _specificity(error) >= _specificity(self.last)
        ):
            self.last = error

    def describe(self, settings: KafkaSettings, error: KafkaError) -> str:
        """Return why a call got no answer and which setting to check; empty if the brokers did answer."""
        if self.last is None or error.code() not in {*_UNCONNECTED, KafkaError._TIMED_OUT}:
            return ""
        reason, brokers = self.last.str().partition(" (after")[0], ", ".join(settings.brokers)
        if self.is_refused:
            return describe_refusal(settings, KafkaError(self.last.code(), reason))
        if self.last.code() == KafkaError._ALL_BROKERS_DOWN:
            tls = "" if settings.security == "tls" else '; if they expect TLS, set input.kafka.security = "tls"'
            login = "" if settings.sasl_mechanism else "; if they expect a login, set input.kafka.sasl_mechanism"
            return f"no broker of {brokers} can be reached; check input.kafka.brokers{tls}{login}"
        if _NO_TLS in reason:
            return (
                f"{brokers} did not answer with TLS; correct the port in input.kafka.brokers or, if they do not use "
                'TLS, set input.kafka.security = "plaintext"'
            )
        return f"{reason}; check input.kafka.brokers"

    @contextmanager
    def explaining(self, settings: KafkaSettings, poll: Callable[[float], object]) -> Iterator[None]:
        """Replace the message of a timeout by its cause, which the client reports only while it is polled."""
        try:
            yield
        except (KafkaException, TimeoutError) as exception:
            error = error_of(exception)
            poll(0)
            if reason := self.describe(settings, error):
                raise KafkaException(KafkaError(error.code(), reason, retriable=error.retriable())) from None
            raise


def _specificity(error: KafkaError) -> int:
    is_specific = error.code() in REFUSED or _NO_TLS in error.str()
    return 2 if is_specific else error.code() != KafkaError._ALL_BROKERS_DOWN


def topic_exception(error: KafkaError, topic: str, *, is_input: bool, is_argument: bool = False) -> KafkaException:
    """Return the exception for an error that concerns a topic; its message names the topic."""
    is_missing = error.code() in UNKNOWN_TOPIC
    text = missing_topic(is_input=is_input, is_argument=is_argument) if is_missing else error.str()
    text = f"topic {topic}: {text}"
    return KafkaException(KafkaError(error.code(), text, retriable=error.retriable()))


def missing_topic(*, is_input: bool, is_argument: bool = False) -> str:
    """Return the message for a topic that does not exist; `is_argument`: it is from the command line."""
    advice = "create it: shipper check --online --create-topics"
    if is_argument:
        advice = "correct its name"
    elif is_input:
        advice = (
            "shipper does not create topics that it reads: create it with the tools of Kafka, with at least as many "
            "partitions as there will be members; or correct its name, in input.kafka.topics"
        )
    return f"the topic does not exist; {advice}"


def describe(error: KafkaError) -> str:
    """Return the message, with our names of settings, and the name of an error."""
    return f"{_FILE_PROPERTY.sub(lambda match: f'input.kafka.{_FILE_KEYS[match[1]]}', error.str())} ({error.name()})"


@contextmanager
def translate_errors(settings: KafkaSettings, failure: str, right: str = "") -> Iterator[None]:
    """
    Translate broker errors.

    Args:
        failure: What failed, for the message.
        right: As for `describe_refusal`.
    Raises:
        SourceError: The brokers refuse or do not answer.
        StateInUseError: Another process uses the same transactional id.
    """
    try:
        yield
    except (KafkaException, TimeoutError) as exception:
        error = error_of(exception)
        if error.code() in FENCED:
            message = (
                f"another replay or purge of group {settings.group_id} has started; the letters of this one are kept"
            )
            raise StateInUseError(message) from None
        raise SourceError(f"{failure}: {describe_refusal(settings, error, right) or describe(error)}") from None


@contextmanager
def admin_client(settings: KafkaSettings, limit_s: float) -> Iterator[AdminClient]:
    """
    Yield a client that has logged in.

    Raises:
        KafkaException: The brokers refuse or do not answer, also within the context; its message names the cause.
    """
    errors = ConnectionErrors()
    admin = AdminClient(client_properties(settings, on_error=errors))
    with errors.explaining(settings, admin.poll):
        errors.wait_for(admin, admin.describe_cluster(request_timeout=limit_s))
        yield admin


def name_taken_error(settings: KafkaSettings) -> StateInUseError:
    """Return the error for a `group_instance_id` that another process uses."""
    killed = ", or was killed and keeps it until its session expires" if settings.group_protocol == "consumer" else ""
    return StateInUseError(
        f"another member of group {settings.group_id} uses the name {settings.group_instance_id}{killed}; each member "
        "needs its own input.kafka.group_instance_id"
    )


def missing_right(settings: KafkaSettings, right: str) -> str:
    """Return the message for a missing permission."""
    return f"{f'user {settings.username}' if settings.username else 'this client'} needs {right}"


def other_members(settings: KafkaSettings) -> str:
    """Return the message for a group that shipper cannot join, as the other members share partitions differently."""
    return (
        f"the group {settings.group_id} has members of another program: stop them, or choose "
        "another input.kafka.group_id"
    )


def required_right(settings: KafkaSettings, topic: str) -> str:
    """Return the right that a member needs on a topic, such as `WRITE on the topic …`."""
    return f"{'WRITE' if topic in {settings.letters, settings.ledger} else 'READ'} on the topic {topic}"


def describe_refusal(settings: KafkaSettings, error: KafkaError, right: str = "") -> str:
    """Describe the missing right, `right` if it is known; return "" for any other error."""
    group, topics = settings.group_id, (*settings.topics, settings.letters, settings.ledger)
    rights = {
        KafkaError.TOPIC_AUTHORIZATION_FAILED: right or ", ".join(required_right(settings, topic) for topic in topics),
        KafkaError.GROUP_AUTHORIZATION_FAILED: right or f"READ on the group {group}",
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: f"WRITE on transactional ids from {group}-",
        KafkaError.CLUSTER_AUTHORIZATION_FAILED: "IDEMPOTENT_WRITE on the cluster",
    }
    if error.code() not in FORBIDDEN:
        return ""
    if error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
        return f"{describe(error)}: {other_members(settings)}"
    if error.code() in rights:
        return f"{describe(error)}: {missing_right(settings, rights[error.code()])}"
    keys = "input.kafka.token" if settings.token else "input.kafka.username and input.kafka.password"
    if _NO_MECHANISM in error.str():
        keys = "input.kafka.sasl_mechanism"
    elif error.code() == KafkaError._SSL:
        keys = "input.kafka.ca_bundle and input.kafka.client_certificate"
    return f"{describe(error)}: the brokers refuse this client; check {keys}"
