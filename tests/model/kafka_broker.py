"""A broker with one topic as seen by a member of a consumer group: offsets, transactions, rebalances."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

TOPIC, TOPIC_ID = "events", "topic/id"  # an id may contain a slash
Outcome = Literal["ok", "abortable", "doubt-committed", "doubt-aborted", "moved", "moved-late", "fenced", "fenced-late"]
Owner = Literal["other", "coming", "member", "going"]


class Row(NamedTuple):
    """A document of a compacted topic."""

    value: bytes
    headers: Mapping[str, bytes]


class TinyBroker:
    """
    Attributes:
        logs: The values of each partition.
        committed: The committed offset and metadata of the group, by partition.
        tables: The committed documents of the topics that a member writes.
        owners: The owner of each partition: the member, or another one simulated by this class.
        outcome: The outcome of the next commit.
        commit_s: Duration of a commit.
        violations: Forbidden actions of the member.
    """

    def __init__(self, partitions: int) -> None:
        self.logs: list[list[bytes]] = [[] for _ in range(partitions)]
        self.committed: dict[int, tuple[int, str]] = {}
        self.tables: defaultdict[str, dict[str, Row]] = defaultdict(dict)
        self.owners: list[Owner] = ["other"] * partitions
        self.generation = 0
        self.outcome: Outcome = "ok"
        self.commit_s = 0.0
        self.violations: list[str] = []
        self.consumer: TinyConsumer | None = None
        self.producer: TinyProducer | None = None

    def assign(self, partition: int) -> bool:
        """Assign a partition of the other member to the member at its next poll."""
        if self.owners[partition] != "other" or self.consumer is None:
            return False
        self.owners[partition] = "coming"
        self.consumer.rebalances.append(("assign", [partition]))
        return True

    def revoke(self, partition: int) -> bool:
        """Revoke a partition at the member's next poll."""
        if self.owners[partition] != "member" or self.consumer is None:
            return False
        self.owners[partition] = "going"
        self.consumer.rebalances.append(("revoke", [partition]))
        return True

    def lose(self) -> None:
        """Remove the member from the group; it learns this at its next poll."""
        self.owners = ["other"] * len(self.owners)
        self.generation += 1
        self.consumer.rebalances = [("lost", [*self.consumer.positions])]

    def cut_off(self) -> None:
        """Kill the member: its further actions have no effect."""
        if self.consumer is not None:
            self.lose()
            self.consumer.rebalances.clear()
        if self.producer is not None:
            self.producer.is_cut_off = True
        self.consumer = self.producer = None
        self.outcome = "ok"

    def apply(self, producer: TinyProducer) -> None:
        for topic, key, value, headers in producer.written:
            if value is None:
                self.tables[topic].pop(key, None)
            else:
                self.tables[topic][key] = Row(value, dict(headers))
        for own in producer.offsets:
            if own.offset < self.committed.get(own.partition, (0, ""))[0]:
                self.violations.append(f"the offset of {own.partition} went back to {own.offset}")
            self.committed[own.partition] = own.offset, own.metadata


def failure(code: int, *, retriable: bool = False, fatal: bool = False) -> KafkaException:
    return KafkaException(KafkaError(code, "as the test wants it", retriable=retriable, fatal=fatal))


class TinyConsumer:
    """The consumer of the member. Like the real one, a call with a rebalance returns records fetched before it."""

    def __init__(self, broker: TinyBroker) -> None:
        self.broker = broker
        self.generation = -1
        self.positions: dict[int, int] = {}
        self.told_ends: dict[int, int] = {}
        self.paused: set[int] = set()
        self.rebalances: list[tuple[str, list[int]]] = []
        broker.consumer = self

    def subscribe(
        self, topics: Sequence[str], **callbacks: Callable[[TinyConsumer, list[TopicPartition]], None]
    ) -> None:
        self.callbacks = callbacks

    def consume(self, count: int, timeout: float) -> list[Message]:
        messages = self._fetch(count)
        rebalances, self.rebalances = self.rebalances, []
        for kind, numbers in rebalances:
            broker = self.broker
            self.generation = -1 if kind == "lost" else broker.generation + 1
            if kind != "lost":
                broker.generation += 1
            if kind == "assign":
                for number in numbers:
                    broker.owners[number] = "member"
            self.callbacks[f"on_{kind}"](self, [TopicPartition(TOPIC, number) for number in numbers])
            if kind == "revoke":
                for number in numbers:
                    broker.owners[number] = "other"
        return messages + (self._fetch(count) if rebalances else [])

    def _fetch(self, count: int) -> list[Message]:
        messages = []
        for number, position in self.positions.items():
            if number in self.paused:
                continue
            log = self.broker.logs[number]
            end = min(len(log), position + count)
            messages += [
                Message(topic=TOPIC, partition=number, offset=at, value=log[at], timestamp=(1, 1000), leader_epoch=1)
                for at in range(position, end)
            ]
            self.positions[number] = end
            if end == len(log) and self.told_ends.get(number) != end:
                self.told_ends[number] = end
                error = KafkaError(KafkaError._PARTITION_EOF)
                messages.append(Message(topic=TOPIC, partition=number, offset=end, error=error))
        return messages

    def incremental_assign(self, partitions: Iterable[TopicPartition]) -> None:
        for own in partitions:
            self.positions[own.partition] = own.offset
            self.told_ends.pop(own.partition, None)

    def incremental_unassign(self, partitions: Iterable[TopicPartition]) -> None:
        for own in partitions:
            del self.positions[own.partition]

    def seek(self, own: TopicPartition) -> None:
        self.positions[own.partition] = own.offset
        self.told_ends.pop(own.partition, None)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self.paused |= {own.partition for own in partitions}

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self.paused -= {own.partition for own in partitions}

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + self.generation.to_bytes(4, "big", signed=True)

    def memberid(self) -> str:
        return "me" if self.generation >= 0 else ""

    def close(self) -> None:
        pass


class TinyProducer:
    def __init__(self, broker: TinyBroker) -> None:
        self.broker = broker
        self.state: Literal["none", "open", "committed", "aborting", "fenced"] = "none"
        self.written: list[tuple[str, str, bytes | None, Sequence[tuple[str, bytes]]]] = []
        self.offsets: list[TopicPartition] = []
        self.is_cut_off = False
        broker.producer = self

    def list_topics(self, topic: str, timeout: float) -> None:
        pass

    def init_transactions(self, timeout: float) -> None:
        self._check()

    def begin_transaction(self) -> None:
        self._check("none")
        self.state, self.written, self.offsets = "open", [], []

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: str,
        partition: int,
        *,
        headers: Sequence[tuple[str, bytes]],
        on_delivery: object,
    ) -> None:
        self._check("open")
        self.written.append((topic, key, value, headers))

    def flush(self, timeout: float) -> int:
        return 0

    def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], metadata: bytes, timeout: float) -> None:
        self._check("open")
        generation = int.from_bytes(metadata[7:], "big", signed=True)
        if self.broker.outcome == "moved" or generation != self.broker.generation:
            raise failure(KafkaError.ILLEGAL_GENERATION)
        for own in offsets:
            # The real broker accepts it, so the member itself must check.
            if self.broker.owners[own.partition] not in {"member", "going"}:
                self.broker.violations.append(f"committed an offset of {own.partition}, which another member owns")
        self.offsets = [*offsets]

    def commit_transaction(self, timeout: float) -> None:
        self._check("open", "committed", "aborting")
        time.sleep(self.broker.commit_s)
        outcome, self.broker.outcome = self.broker.outcome, "ok"
        if self.state == "aborting" or outcome in {"abortable", "moved-late"}:
            self.state = "aborting"
            raise failure(KafkaError.ILLEGAL_GENERATION if outcome == "moved-late" else KafkaError.INVALID_TXN_STATE)
        if self.state != "committed" and outcome not in {"doubt-aborted", "fenced"}:
            self.broker.apply(self)
        if outcome.startswith("fenced"):  # after it the client refuses every call
            self.state = "fenced"
            raise failure(KafkaError._FENCED, fatal=True)
        if outcome.startswith("doubt"):
            self.state = "committed" if outcome == "doubt-committed" else "aborting"
            raise failure(KafkaError._TIMED_OUT, retriable=True)
        self.state = "none"

    def abort_transaction(self, timeout: float) -> None:
        self._check("open", "aborting")
        self.state = "none"

    def _check(self, *states: str) -> None:
        if self.is_cut_off:
            raise failure(KafkaError._TRANSPORT)
        if states and self.state not in states:
            self.broker.violations.append(f"a call in the state {self.state}, not {states}")


class TinyAdmin:
    """Answers at once."""

    def __init__(self, broker: TinyBroker) -> None:
        self.broker = broker

    def describe_topics(self, topics: object, **_: object) -> dict[str, Future[Any]]:
        numbers = [SimpleNamespace(id=number, leader=1) for number in range(len(self.broker.logs))]
        return {TOPIC: _done(SimpleNamespace(topic_id=TOPIC_ID, partitions=numbers, authorized_operations=None))}

    def list_offsets(
        self, wanted: Mapping[TopicPartition, OffsetSpec], **_: object
    ) -> dict[TopicPartition, Future[Any]]:
        is_end = isinstance(next(iter(wanted.values())), type(OffsetSpec.latest()))
        return {
            own: _done(SimpleNamespace(offset=len(self.broker.logs[own.partition]) if is_end else 0)) for own in wanted
        }


class TinyQuery:
    """A consumer that queries committed offsets."""

    def __init__(self, broker: TinyBroker) -> None:
        self.broker = broker

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        known = self.broker.committed
        return [TopicPartition(TOPIC, own.partition, *known.get(own.partition, (-1001, ""))) for own in partitions]

    def close(self) -> None:
        pass


def _done(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
