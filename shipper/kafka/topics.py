"""Checks the topics of a group, and creates those that members write."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NamedTuple

from confluent_kafka import ConsumerGroupType, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, NewTopic, ResourceType
from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    ASSIGNOR,
    LETTER_OVERHEAD_BYTES,
    NO_LEADER,
    UNKNOWN_TOPIC,
    ConnectionErrors,
    KafkaError,
    client_properties,
    describe,
    describe_group,
    describe_refusal,
    error_of,
    missing_right,
    missing_topic,
    other_members,
    producer_properties,
    required_right,
    valid_properties,
)
from shipper.kafka.documents import is_owner, letter_owners
from shipper.model.errors import ConfigError, StateUnwritableError

_CALL_S: Final = 10.0
_POLL_S: Final = 0.02
_CONFIG_MAX: Final = (1 << 31) - 1
_COMPACTION_LAG_MS: Final = 86_400_000  # maximum time until deleted documents are removed
_retry_while_unknown: Final = retry(  # the brokers learn of a new topic later than their controller
    retry=retry_if_exception(
        lambda error: isinstance(error, KafkaException) and error_of(error).code() in UNKNOWN_TOPIC
    ),
    stop=stop_after_delay(_CALL_S),
    wait=wait_fixed(_POLL_S),
    reraise=True,
)


class Finding(NamedTuple):
    """
    The result of one check.

    Attributes:
        name: A topic, the group, or another object of a check.
        problem: What is wrong and what to do; empty = no problem.
        is_unreachable: The brokers did not answer.
    """

    name: str
    problem: str = ""
    detail: str = ""
    is_unreachable: bool = False


class Topics:
    """
    Checks the topics of a group.

    Raises:
        ConfigError: A secret or a file cannot be read, or the client cannot use the settings.
    """

    def __init__(self, settings: KafkaSettings, *, max_record_bytes: int) -> None:
        self._settings = settings
        self._max_record_bytes = max_record_bytes
        self._connection_errors = ConnectionErrors()
        with valid_properties(settings):
            self._admin = AdminClient(client_properties(settings, on_error=self._connection_errors))

    @property
    def is_refused(self) -> bool:
        """Whether the brokers have refused this client, so that each further finding would repeat that."""
        return self._connection_errors.is_refused

    def _wait_for(self, future: Future[Any]) -> Any:
        return self._connection_errors.wait_for(self._admin, future)

    def require(self) -> None:
        """
        Check the topics that a member needs: all that it writes, and at least one that it reads.

        Raises:
            ConfigError: A topic is missing or unsuitable, or the brokers refuse this client.
            StateUnwritableError: The brokers are unreachable.
        """
        read = self._settings.topics
        problems = []
        for finding in self.findings(is_start=True):
            if self.is_refused:  # no topic is the cause
                raise ConfigError(finding.problem, key="input.kafka")
            if finding.is_unreachable:  # the others would be, too
                raise StateUnwritableError(f"{finding.name}: {finding.problem}", reason="broker_unavailable")
            problems += [finding] if finding.problem else []
        missing = [finding for finding in problems if finding.name in read]
        for finding in problems:
            if finding.name not in read:
                raise ConfigError(f"{finding.name}: {finding.problem}", key="input.kafka")
        if len(missing) == len(read):
            raise ConfigError(f"{missing[0].name}: {missing[0].problem}", key="input.kafka.topics")

    def findings(self, *, is_start: bool = False) -> Iterator[Finding]:
        """Check all topics; a member that starts tolerates too little room for dead letters, and missing leaders."""
        for name in self._settings.topics:
            finding = self._check_topic(name, is_start=is_start)
            if not finding.problem and not is_start:
                with suppress(KafkaException):  # members do not need this right
                    if "compact" in self._config_of(name)["cleanup.policy"]:
                        lost = "compacted: records with the key of a later one are deleted, even before they are read"
                        finding = finding._replace(detail=f"{finding.detail}, {lost}")
            yield finding
        for key, name in (("dead_letter_topic", self._settings.letters), ("ledger_topic", self._settings.ledger)):
            finding = self._check_topic(name, is_start=is_start)
            if not finding.problem:
                finding = self._check_config(key, finding, is_start=is_start)
            if name == self._settings.letters and not finding.problem and not is_start:
                finding = finding._replace(problem=self._owners_problem())
            yield finding

    def _check_topic(self, name: str, *, is_start: bool) -> Finding:
        try:
            topic = self._describe_topic(name)
        except KafkaException as exception:
            return self._finding_of(name, error_of(exception))
        granted = topic.authorized_operations
        rights = [required_right(self._settings, name)]
        if name == self._settings.ledger:
            rights.append(f"READ on the topic {name}")
        for right in rights:
            if granted and AclOperation[right.partition(" ")[0]] not in granted:
                return Finding(name, missing_right(self._settings, right))
        for partition in topic.partitions:
            if partition.leader is None and not is_start:
                return Finding(name, f"{name}/{partition.id}: {NO_LEADER}")
        return Finding(name, detail=f"{len(topic.partitions):,} partitions, id {topic.topic_id}")

    def _describe_topic(self, name: str) -> Any:
        futures = self._admin.describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=_CALL_S
        )
        return self._wait_for(futures[name])

    def _config_of(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        (future,) = self._admin.describe_configs([resource], request_timeout=_CALL_S).values()
        return {key: entry.value for key, entry in self._wait_for(future).items()}

    def _letter_bytes(self) -> int:
        """Return the size of the longest dead letter, as far as the settings of the topics can be read."""
        longest = self._max_record_bytes
        for topic in self._settings.topics:
            with suppress(KafkaException):
                longest = max(longest, int(self._config_of(topic)["max.message.bytes"]))
        return min(longest + LETTER_OVERHEAD_BYTES, _CONFIG_MAX)

    def _check_config(self, setting: str, finding: Finding, *, is_start: bool) -> Finding:
        name = finding.name
        try:
            config = self._config_of(name)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                missing = "its settings cannot be read: DESCRIBE_CONFIGS is not granted"
                return finding._replace(detail=f"{finding.detail}; {missing}")
            return self._finding_of(name, error)
        if (policy := config.get("cleanup.policy")) != "compact":
            problem = (
                f"cleanup.policy is {policy}, so stored data would be lost; set it to compact, or choose another topic "
                f"in input.kafka.{setting}"
            )
            return Finding(name, problem)
        finding = finding._replace(detail=f"{finding.detail}, compacted")
        if setting == "dead_letter_topic":
            max_bytes = int(config.get("max.message.bytes", 0))
            return finding._replace(problem=self._size_problem(max_bytes, is_start=is_start))
        return finding

    def _owners_problem(self) -> str:
        """Return a problem if there are dead letters of another group; empty if these may not be read."""
        settings = self._settings
        try:
            owners = letter_owners(settings)
        except (KafkaException, TimeoutError):  # members do not need this right
            return ""
        if others := sorted(owner for owner in owners if owner is not None and not is_owner(owner, settings.group_id)):
            return (
                f"it contains dead letters of group {others[0]}; groups with the same topic overwrite each other's "
                "letters, so choose another topic in input.kafka.dead_letter_topic"
            )
        return ""

    def _size_problem(self, max_bytes: int, *, is_start: bool) -> str:
        min_bytes = self._max_record_bytes + LETTER_OVERHEAD_BYTES
        if max_bytes < min_bytes:
            return (
                f"max.message.bytes is {max_bytes}, too small for the longest record: raise it to {min_bytes}, or "
                f"lower input.max_record_bytes, which is {self._max_record_bytes}"
            )
        if not is_start and max_bytes < (min_bytes := self._letter_bytes()):
            return (
                f"max.message.bytes is {max_bytes}, too small for the longest message that the topics of the group "
                f"accept: raise it to {min_bytes}, or only the beginning of such a message is stored as a dead letter"
            )
        return ""

    def _finding_of(self, name: str, error: KafkaError) -> Finding:
        if error.code() in UNKNOWN_TOPIC:
            return Finding(name, missing_topic(is_input=name not in {self._settings.letters, self._settings.ledger}))
        is_topic = error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        why = describe_refusal(self._settings, error, required_right(self._settings, name) if is_topic else "")
        reason = self._connection_errors.describe(self._settings, error) or describe(error)
        return Finding(name, why or f"cannot be examined: {reason}", is_unreachable=not why)

    def create(self) -> Iterator[Finding]:
        """Create the topics that members write, unless they exist."""
        for name in self._settings.topics:
            try:
                self._describe_topic(name)
            except KafkaException as exception:
                if error_of(exception).code() in UNKNOWN_TOPIC:  # the size of its messages is unknown
                    yield Finding(self._settings.letters, f"no topic is created before {name}, whose messages must fit")
                    return
        config = {"cleanup.policy": "compact", "max.compaction.lag.ms": str(_COMPACTION_LAG_MS)}
        topics = [
            NewTopic(
                self._settings.letters, config=config | {"max.message.bytes": str(max(1_048_588, self._letter_bytes()))}
            ),
            NewTopic(self._settings.ledger, config=config),
        ]
        for name, future in self._admin.create_topics(topics, request_timeout=_CALL_S).items():
            try:
                self._wait_for(future)
            except KafkaException as exception:
                error = error_of(exception)
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    why = describe_refusal(self._settings, error, f"CREATE on the topic {name}") or describe(error)
                    yield Finding(name, f"cannot be created: {why}")
                continue
            with suppress(KafkaException):  # reported by the checks that follow
                _retry_while_unknown(self._describe_topic)(name)
            yield Finding(name, detail="was created: compacted")

    def rights(self) -> Iterator[Finding]:
        """Check the right to join the group, and commit an empty transaction."""
        settings = self._settings
        name, right = f"group {settings.group_id}", f"READ on the group {settings.group_id}"
        try:
            group = describe_group(self._admin, settings.group_id, _CALL_S)
            if group.authorized_operations and AclOperation.READ not in group.authorized_operations:
                yield Finding(name, missing_right(settings, right))
            elif group.type is ConsumerGroupType.CLASSIC and group.partition_assignor not in {"", ASSIGNOR}:
                yield Finding(name, other_members(settings))
            else:
                yield Finding(name, detail=f"can be joined; members: {len(group.members):,}")
        except KafkaException as exception:
            yield self._finding_of(name, error_of(exception))
        transactional = producer_properties(f"{settings.group_id}-check", self._max_record_bytes)
        try:
            producer = Producer(client_properties(settings) | transactional)
            producer.init_transactions(2 * _CALL_S)
            producer.begin_transaction()
            producer.commit_transaction(_CALL_S)
            yield Finding("transactions", detail="an empty transaction was committed")
        except KafkaException as exception:
            yield self._finding_of("transactions", error_of(exception))


def unwritable_topics(admin: AdminClient, settings: KafkaSettings) -> list[str]:
    """Return which of the topics of dead letters and the ledger the group may not write; both if this is unknown."""
    topics = [settings.letters, settings.ledger]
    described = admin.describe_topics(
        TopicCollection(topics), include_authorized_operations=True, request_timeout=_CALL_S
    )
    unwritable = []
    for topic, future in described.items():
        try:
            granted = future.result(_CALL_S).authorized_operations
        except (KafkaException, TimeoutError):
            granted = None
        if not granted or AclOperation.WRITE not in granted:
            unwritable.append(topic)
    return unwritable or topics
