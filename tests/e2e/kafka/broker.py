"""Apache Kafka on loopback, started from the jars of `make kafka`: one node or three, also with TLS and rights."""

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
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import trustme
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tests.e2e.driver import wait_until

JARS = Path(__file__).parents[3] / ".kafka"
_START_S = 60.0
_JAVA_LEAST = 17

# Small and quick: no wait for further members, internal topics with few partitions.
_PROPERTIES = """
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{listener}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}{listener}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL
log.dirs={folder}/data
auto.create.topics.enable=false
num.partitions=2
offsets.topic.num.partitions={coordinators}
default.replication.factor={copies}
min.insync.replicas={least}
offsets.topic.replication.factor={copies}
transaction.state.log.num.partitions={coordinators}
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={least}
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=300
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=6000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=1000
transaction.abort.timed.out.transaction.cleanup.interval.ms=200
log.retention.check.interval.ms=1000
file.delete.delay.ms=100
"""

# The tests themselves are nobody at the other listener, and may do everything there.
_SECURE = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
sasl.enabled.mechanisms=SCRAM-SHA-512,OAUTHBEARER
listener.name.secure.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.secure.oauthbearer.sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule \
  required unsecuredLoginStringClaim_sub="nobody";
ssl.keystore.type=PEM
ssl.keystore.location={folder}/server.pem
"""
USER, PASSWORD = "shipper", "Sesame-open-9"


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
    One or several nodes.

    Args:
        is_secure: Add a listener with TLS and SCRAM, on which `USER` has no rights until they are granted.

    Attributes:
        address: HOST:PORT of each node, separated by commas.
        secure_address: HOST:PORT of the listener with TLS.
        authority: The CA certificate that clients must trust.
    """

    def __init__(self, folder: Path, *, nodes: int = 1, is_secure: bool = False) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.authority = folder / "ca.pem"
        folder.mkdir(parents=True, exist_ok=True)
        ports, controllers, (secure,) = _free_ports(nodes), _free_ports(nodes), _free_ports(1)
        self.address = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.secure_address = f"127.0.0.1:{secure}"
        if is_secure:
            _make_certificates(folder)
        self._configs = []
        for number in range(nodes):
            text = _PROPERTIES.format(
                node=number + 1,
                voters=",".join(f"{each + 1}@127.0.0.1:{port}" for each, port in enumerate(controllers)),
                port=ports[number],
                controller=controllers[number],
                listener=f",SECURE://{self.secure_address}" if is_secure else "",
                copies=nodes,
                least=min(nodes, 2),
                coordinators=min(nodes, 2),
                folder=folder / str(number),
            )
            self._configs.append(folder / f"{number}.properties")
            self._configs[-1].write_text(text + (_SECURE.format(folder=folder) if is_secure else ""))
            user = ["--add-scram", f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"] if is_secure else []
            cluster = ["-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(self._configs[-1])]
            self._java("kafka.tools.StorageTool", "format", *cluster, *user)
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

    def start(self, *numbers: int) -> None:
        """Start nodes that do not run, by default all, and wait until the brokers agree on which are alive."""
        for number, config in enumerate(self._configs):
            if number not in self._processes and (not numbers or number in numbers):
                with (self._folder / f"{number}.log").open("ab") as out:
                    self._processes[number] = subprocess.Popen(
                        self._command("kafka.Kafka", str(config)), stdout=out, stderr=out, cwd=self._folder
                    )
        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0, "reconnect.backoff.max.ms": 100})
        deadline = time.monotonic() + _START_S
        while True:
            for number, process in self._processes.items():
                assert process.poll() is None, (self._folder / f"{number}.log").read_text()[-4000:]
            assert time.monotonic() < deadline, "the broker did not start"
            with suppress(KafkaException):
                if len(admin.list_topics(timeout=1).brokers) == len(self._processes):
                    return
            time.sleep(0.05)

    def stop(self, *numbers: int) -> None:
        """Kill nodes, by default all: what was committed is in their logs."""
        for number in numbers or tuple(self._processes):
            process = self._processes.pop(number)
            process.send_signal(signal.SIGKILL)
            process.wait(10)

    def is_in_sync(self) -> bool:
        """Whether each node has a whole copy of its partitions."""
        topics = AdminClient({"bootstrap.servers": self.address}).list_topics(timeout=10).topics.values()
        return all(set(each.isrs) == set(each.replicas) for topic in topics for each in topic.partitions.values())

    def freeze(self) -> None:
        """Let it answer nothing."""
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for process in self._processes.values():
            os.kill(process.pid, signal.SIGCONT)

    # What tests do ----------------------------------------------------------------------------------------------------

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    @cached_property
    def _observer(self) -> Consumer:
        return Consumer({"bootstrap.servers": self.address, "group.id": "ends", "log_level": 2})

    def create(self, topic: str, partitions: int = 2, **config: str) -> None:
        _done(
            self.admin.create_topics(
                [NewTopic(topic, partitions, config={k.replace("_", "."): v for k, v in config.items()})]
            )
        )
        wait_until(  # the brokers learn of it later than the controller
            lambda: len(self.admin.list_topics(topic, 10).topics[topic].partitions) == partitions, "the topic exists"
        )

    def add_partitions(self, topic: str, partitions: int) -> None:
        _done(self.admin.create_partitions([NewPartitions(topic, partitions)]))

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
        timestamp_ms: int = 0,
        transaction: str = "",
        is_aborted: bool = False,
    ) -> None:
        """
        Write values; without a partition in turn, or by the keys.

        Args:
            timestamp_ms: Of all of them; 0 = now.
            transaction: Write them in one of this name, which leaves a record of its own behind them.
            is_aborted: Abort it.
        """
        properties: dict[str, Any] = {"bootstrap.servers": self.address, "linger.ms": 5}
        producer = Producer(properties | ({"transactional.id": transaction} if transaction else {}))
        if transaction:
            producer.init_transactions(30)
            producer.begin_transaction()
        partitions = len(_partitions(producer, topic))
        for number, value in enumerate(values):
            where: dict[str, Any] = {"partition": partition if partition >= 0 else number % partitions}
            if keys is not None:
                where = {"key": keys[number]}
            if timestamp_ms:
                where["timestamp"] = timestamp_ms
            while True:
                try:
                    producer.produce(topic, value, headers=list((headers or {}).items()), **where)
                    break
                except BufferError:
                    producer.poll(0.05)
        assert not producer.flush(60)
        if transaction:
            (producer.abort_transaction if is_aborted else producer.commit_transaction)(30)

    def begin(self, topic: str, value: bytes, *, timeout_ms: int = 60_000) -> Producer:
        """Write a value with a key to both partitions, in a transaction that stays open until its timeout."""
        name = f"open-{topic}"
        producer = Producer(
            {"bootstrap.servers": self.address, "transactional.id": name, "transaction.timeout.ms": timeout_ms}
        )
        producer.init_transactions(30)
        producer.begin_transaction()
        for partition in (0, 1):
            producer.produce(topic, value, key="k", partition=partition)
        assert not producer.flush(30)
        return producer

    def grant(self, *rights: AclBinding) -> None:
        _done(self.admin.create_acls([*rights]))

    def revoke(self, right: AclBinding) -> None:
        filters = AclBindingFilter(
            right.restype, right.name, right.resource_pattern_type, None, None, right.operation, right.permission_type
        )
        _done(self.admin.delete_acls([filters]))

    def set_password(self, password: str) -> None:
        """Change the password of `USER`; its open connections remain."""
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        changed = UserScramCredentialUpsertion(USER, scram, password.encode())
        _done(self.admin.alter_user_scram_credentials([changed]))

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """Return the committed offsets of a group, once its pending transactions have ended."""
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
        return {each: _end(self._observer, topic, each) for each in _partitions(self._observer, topic)}

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
                "fetch.wait.max.ms": 10,
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


def right(kind: ResourceType, name: str, operation: AclOperation, *, is_prefix: bool = False) -> AclBinding:
    """Make a right of `USER`."""
    pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
    return AclBinding(kind, name, pattern, f"User:{USER}", "*", operation, AclPermissionType.ALLOW)


def _make_certificates(folder: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    form = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()  # the only one that the broker reads
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    (folder / "server.pem").write_bytes(key.private_bytes(*form) + chain)


def sums(ledger: Mapping[str, Read]) -> Counter[str]:
    """The accounts of all sessions of a ledger together."""
    import json

    from shipper.kafka.documents import PART
    from shipper.state.ledger import unpack

    found: Counter[str] = Counter()
    for key, each in ledger.items():
        last = key.rpartition("/")[2]
        if last.startswith(PART):
            *_, accepted, duplicates = unpack(each.value or b"")
            found.update({"rows_accepted": sum(accepted), "rows_duplicates": sum(duplicates)})
            continue
        row = json.loads(each.value or b"{}")
        if last == "totals":
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
