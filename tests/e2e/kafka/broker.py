"""Apache Kafka on loopback: one node, started from the jars of `make kafka`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.e2e.driver import wait_until

JARS = Path(__file__).parents[3] / ".kafka"
_START_S = 60.0
_JAVA_LEAST = 17

# Small and quick: no wait for further members, internal topics with few partitions.
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={folder}/data
auto.create.topics.enable=false
num.partitions=2
offsets.topic.num.partitions=2
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=2
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=6000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=1000
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
log.retention.check.interval.ms=1000
file.delete.delay.ms=100
"""


def missing() -> str:
    """What a broker needs and is not here; empty if nothing is."""
    if not list(JARS.glob("kafka_2.13-*.jar")):
        return 'no broker here: needs Java 17 and "make kafka"'
    java = shutil.which("java")
    if java is None:
        return "no broker here: needs Java 17"
    words = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', words)
    return "" if found and int(found[1]) >= _JAVA_LEAST else "no broker here: needs Java 17"


class Read(NamedTuple):
    """A record of a topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]


class Broker:
    """
    Attributes:
        address: HOST:PORT.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        port, controller = _free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._config = folder / "server.properties"
        self._config.write_text(_PROPERTIES.format(port=port, controller=controller, folder=folder))
        self._java("kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(self._config))
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self, main: str, *arguments: str) -> list[str]:
        memory = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return ["java", *memory, "-cp", f"{JARS}/*", main, *arguments]

    def _java(self, main: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(main, *arguments), capture_output=True, text=True, timeout=_START_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        with (self._folder / "broker.log").open("ab") as out:
            self._process = subprocess.Popen(
                self._command("kafka.Kafka", str(self._config)), stdout=out, stderr=out, cwd=self._folder
            )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                AdminClient({"bootstrap.servers": self.address, "log_level": 0}).list_topics(timeout=1)
                return
            except KafkaException:
                assert self._process.poll() is None, (self._folder / "broker.log").read_text()[-4000:]
                assert time.monotonic() < deadline, "the broker did not start"

    def stop(self) -> None:
        """Kill it: what was committed is in its log."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        """Let it answer nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    # What tests do ----------------------------------------------------------------------------------------------------

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.address})

    def create(self, topic: str, partitions: int = 2, **config: str) -> None:
        _done(
            self.admin.create_topics(
                [NewTopic(topic, partitions, config={k.replace("_", "."): v for k, v in config.items()})]
            )
        )

    def delete(self, topic: str) -> None:
        _done(self.admin.delete_topics([topic], operation_timeout=10))

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        _done(self.admin.delete_records([TopicPartition(topic, partition, before)]))

    def produce(
        self,
        topic: str,
        values: Iterable[bytes | None],
        *,
        partition: int = -1,
        keys: Sequence[bytes] | None = None,
        headers: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write values; without a partition in turn, or by the keys."""
        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 5})
        partitions = len(_partitions(producer, topic))
        for number, value in enumerate(values):
            where: dict[str, Any] = {"partition": partition if partition >= 0 else number % partitions}
            if keys is not None:
                where = {"key": keys[number]}
            while True:
                try:
                    producer.produce(topic, value, headers=list((headers or {}).items()), **where)
                    break
                except BufferError:
                    producer.poll(0.05)
        assert not producer.flush(60)

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """The offsets of a group; those of pending transactions are waited for."""
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group, "enable.auto.commit": False})
        try:
            partitions = _partitions(consumer, topic)
            deadline = time.monotonic() + 60
            while True:
                try:
                    found = consumer.committed([TopicPartition(topic, each) for each in partitions], 30)
                except KafkaException:  # its coordinator may be on the move
                    found = []
                if found and not any(each.error for each in found):
                    return {each.partition: each.offset for each in found if each.offset >= 0}
                assert time.monotonic() < deadline, found
        finally:
            consumer.close()

    def ends(self, topic: str) -> dict[int, int]:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "ends"})
        try:
            return {each: _end(consumer, topic, each) for each in _partitions(consumer, topic)}
        finally:
            consumer.close()

    def read(self, topic: str, *, isolation: str = "read_committed") -> list[Read]:
        """Read a topic from its beginning to its end."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "reader",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "isolation.level": isolation,
            }
        )
        try:
            left = set(_partitions(consumer, topic))
            consumer.assign([TopicPartition(topic, each, 0) for each in left])
            found: list[Read] = []
            deadline = time.monotonic() + 60
            while left:
                assert time.monotonic() < deadline, f"no end of {topic}"
                for each in consumer.consume(1000, 0.2):
                    if each.error() is not None:
                        left.discard(each.partition())
                    else:
                        headers = dict(each.headers() or [])
                        found.append(Read(each.partition(), each.offset(), each.key(), each.value(), headers))
            return found
        finally:
            consumer.close()

    def _wait_until_closed(self, topic: str) -> None:
        """Wait until no transaction is open: one of a member that was killed hides what was committed behind it."""
        options: dict[str, Any] = {"bootstrap.servers": self.address, "group.id": "reader"}
        readers = [Consumer({**options, "isolation.level": f"read_{kind}committed"}) for kind in ("", "un")]
        try:
            for partition in _partitions(readers[0], topic):
                wait_until(
                    lambda partition=partition: len({_end(reader, topic, partition) for reader in readers}) == 1,
                    f"no transaction is open in {topic}",
                    limit_s=120,
                )
        finally:
            for reader in readers:
                reader.close()

    def table(self, topic: str) -> dict[str, Read]:
        """The latest record of each key, without those that were deleted, once no transaction is open."""
        self._wait_until_closed(topic)
        latest = {(each.key or b"").decode(): each for each in self.read(topic)}
        return {key: each for key, each in latest.items() if each.value is not None}


def _partitions(client: Producer | Consumer, topic: str) -> list[int]:
    """The numbers of a topic's partitions, once the broker tells them: after a start or a change it takes its time."""
    deadline = time.monotonic() + _START_S
    while not (found := list(client.list_topics(topic, 10).topics[topic].partitions)):
        assert time.monotonic() < deadline, f"{topic} has no partitions"
    return found


def _end(consumer: Consumer, topic: str, partition: int) -> int:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return consumer.get_watermark_offsets(TopicPartition(topic, partition), 10)[1]
        except KafkaException:  # as for `_partitions`
            if time.monotonic() >= deadline:
                raise


def sums(ledger: Mapping[str, Read]) -> Counter[str]:
    """The accounts of all sessions of a ledger together."""
    import json

    found: Counter[str] = Counter()
    for key, each in ledger.items():
        row = json.loads(each.value or b"{}")
        if key.endswith("/totals"):
            found.update(
                {name: row[name] for name in ("read", "accepted", "dead_lettered", "duplicates", "unreachable")}
            )
        else:
            found.update({"rows_accepted": row["accepted"], "rows_duplicates": row["duplicates"]})
    return found


def _done(futures: Mapping[Any, Any]) -> None:
    for future in futures.values():
        future.result(30)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
