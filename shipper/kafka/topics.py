"""The topics of a group: whether they are what a member needs, and how those that it writes to are made."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, NewTopic, ResourceType

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    FORBIDDEN,
    KafkaError,
    error_of,
    needs,
    patiently,
    producer_properties,
    properties,
    refusal,
    right_on,
    words,
)
from shipper.model.errors import ConfigError

LETTER_ROOM: Final = 8 << 10
"""What a dead letter takes beside its value, at least."""
_CALL_S: Final = 10.0
_LOOK_S: Final = 0.02
_COMPACTION_LAG_MS: Final = 86_400_000  # after so long, what was deleted is gone for good


class Finding(NamedTuple):
    """
    What was found of one thing.

    Attributes:
        name: A topic, the group, or what else was looked at.
        problem: What is wrong and what to do; empty if nothing is.
        what: What is right.
        is_away: The brokers gave no answer, so that nothing is known.
    """

    name: str
    problem: str = ""
    what: str = ""
    is_away: bool = False


class Topics:
    """
    Looks at the topics of a group.

    Raises:
        ConfigError: A secret or a file cannot be had, or the client cannot use what is set.
    """

    def __init__(self, settings: KafkaSettings, *, max_record_bytes: int) -> None:
        self._settings = settings
        self._max_record_bytes = max_record_bytes
        self._refused: KafkaError | None = None
        try:
            self._admin = AdminClient(properties(settings, on_error=self._note))
        except KafkaException as exception:
            error = error_of(exception)
            raise ConfigError(refusal(settings, error) or words(error), key="input.kafka") from None

    def _note(self, error: KafkaError) -> None:
        if error.code() in FORBIDDEN:
            self._refused = error

    def _answer(self, future: Future[Any]) -> Any:
        """Wait for an answer, or for what says that there will be none."""
        while not future.done() and self._refused is None:
            self._admin.poll(0)
            wait([future], _LOOK_S)
        if self._refused is not None:
            raise KafkaException(self._refused)
        return future.result()

    def findings(self) -> Iterator[Finding]:
        """Look at the topics that are read, and at those that are written."""
        settings = self._settings
        for name in settings.topics:
            yield self._described(name)
        for key, name in (("dead_letter_topic", settings.letters), ("ledger_topic", settings.ledger)):
            found = self._described(name)
            yield found if found.problem else self._checked(key, name, found)

    def _described(self, name: str) -> Finding:
        try:
            asked = self._admin.describe_topics(
                TopicCollection([name]), include_authorized_operations=True, request_timeout=_CALL_S
            )
            topic = self._answer(asked[name])
        except KafkaException as exception:
            return self._failed(name, error_of(exception))
        right = right_on(self._settings, name)
        granted = topic.authorized_operations
        if granted and AclOperation[right.partition(" ")[0]] not in granted:
            return Finding(name, needs(self._settings, right))
        return Finding(name, what=f"{len(topic.partitions):,} partitions, id {topic.topic_id}")

    def _checked(self, key: str, name: str, found: Finding) -> Finding:
        resource = ConfigResource(ResourceType.TOPIC, name)
        try:
            (future,) = self._admin.describe_configs([resource], request_timeout=_CALL_S).values()
            config = {each: entry.value for each, entry in self._answer(future).items()}
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return found._replace(what=f"{found.what}; its settings cannot be read: DESCRIBE_CONFIGS is missing")
            return self._failed(name, error)
        if config.get("cleanup.policy") != "compact":
            problem = (
                f"cleanup.policy is {config.get('cleanup.policy')}, so that it would lose what is kept there; set it "
                f"to compact, or name another topic in input.kafka.{key}"
            )
            return Finding(name, problem)
        least = self._max_record_bytes + LETTER_ROOM
        if key == "dead_letter_topic" and int(config.get("max.message.bytes") or 0) < least:
            problem = (
                f"max.message.bytes is {config.get('max.message.bytes')}, too little for the longest record: raise it "
                f"to {least}, or lower input.max_record_bytes, which is {self._max_record_bytes}"
            )
            return Finding(name, problem)
        return found._replace(what=f"{found.what}, compacted")

    def _failed(self, name: str, error: KafkaError) -> Finding:
        if error.code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC}:
            written = name in {self._settings.letters, self._settings.ledger}
            how = "make it: shipper check --online --create-topics" if written else "check input.kafka.topics"
            return Finding(name, f"the topic does not exist; {how}")
        why = refusal(self._settings, error, right_on(self._settings, name))
        return Finding(name, why or f"cannot be looked at: {words(error)}", is_away=not why)

    def create(self) -> Iterator[Finding]:
        """Make the topics that are written, unless they are there."""
        least = self._max_record_bytes + LETTER_ROOM
        config = {"cleanup.policy": "compact", "max.compaction.lag.ms": str(_COMPACTION_LAG_MS)}
        wanted = [
            NewTopic(self._settings.letters, config=config | {"max.message.bytes": str(max(1_048_588, least))}),
            NewTopic(self._settings.ledger, config=config),
        ]
        for name, future in self._admin.create_topics(wanted, request_timeout=_CALL_S).items():
            try:
                self._answer(future)
            except KafkaException as exception:
                error = error_of(exception)
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    why = refusal(self._settings, error, f"CREATE on the topic {name}") or words(error)
                    yield Finding(name, f"cannot be made: {why}")
            else:
                yield Finding(name, what="was made: compacted")

    def _described_group(self) -> Any:
        (future,) = self._admin.describe_consumer_groups(
            [self._settings.group_id], include_authorized_operations=True, request_timeout=_CALL_S
        ).values()
        return self._answer(future)

    def rights(self) -> Iterator[Finding]:
        """Look at the group, and make a transaction without anything in it."""
        settings = self._settings
        name, right = f"group {settings.group_id}", f"READ on the group {settings.group_id}"
        try:
            group = patiently(self._described_group)
            granted = group.authorized_operations
            is_readable = not granted or AclOperation.READ in granted
            what = f"may be joined; members: {len(group.members):,}"
            yield Finding(name, what=what) if is_readable else Finding(name, needs(settings, right))
        except KafkaException as exception:
            yield self._failed(name, error_of(exception))
        name = "transactions"
        producer = Producer(
            properties(settings) | producer_properties(f"{settings.group_id}-check", self._max_record_bytes)
        )
        try:
            producer.init_transactions(2 * _CALL_S)
            producer.begin_transaction()
            producer.commit_transaction(_CALL_S)
            yield Finding(name, what="an empty one was committed")
        except KafkaException as exception:
            yield self._failed(name, error_of(exception))
