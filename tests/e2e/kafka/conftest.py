"""A broker for all tests of this folder in a process, and a separate group for each test."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, ResourceType

from tests.e2e.driver import Running, Service, Shipper
from tests.e2e.kafka.broker import PASSWORD, USER, Broker, missing, right

QUICK = {
    "batch.linger_seconds": 0.02,
    "state.commit_interval_seconds": 0.05,
    "input.kafka.session_timeout_seconds": 6,
    "input.kafka.revoke_wait_seconds": 2,
}
# What a member asks and saves once a second, or once in 30 seconds, in a real start.
_OFTEN = {
    f"shipper.kafka.member._{name}_INTERVAL_S": each for name, each in (("END", 0.2), ("POSITION", 0.2), ("TOPIC", 1.0))
}


@pytest.fixture(scope="session")
def _start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Broker]:
    if why := missing():
        if os.environ.get("SHIPPER_NEEDS_KAFKA"):
            pytest.fail(why)
        pytest.skip(why)
    return lambda **options: Broker(tmp_path_factory.mktemp("kafka"), **options)


@pytest.fixture(scope="package")  # an idle broker takes a thirtieth of a core
def _broker(_start: Callable[..., Broker]) -> Iterator[Broker]:
    with _start(is_secure=True) as broker:
        yield broker


@pytest.fixture(scope="session")
def _cluster(_start: Callable[..., Broker]) -> Iterator[Broker]:
    with _start(nodes=3) as broker:
        yield broker


class Group:
    """
    A group with a topic and members.

    Attributes:
        name: Name of the group.
        topic: Its topic with two partitions.
    """

    def __init__(self, broker: Broker, shipper: Shipper, partitions: int = 2) -> None:
        self.broker = broker
        self.shipper = shipper
        shipper.shortened = shipper.shortened | _OFTEN
        self.name = f"g{uuid.uuid4().hex[:8]}"
        self.topic = f"{self.name}.events"
        self.letters, self.ledger = f"{self.name}.dead-letters", f"{self.name}.ledger"
        self.brokers, self.security = broker.address.split(","), "security = 'plaintext'"
        broker.create(self.topic, partitions)
        self._base = shipper.config.read_text().partition("[state]")[0]
        self.write()

    def write(self, **keys: object) -> None:
        """Write the settings of the members."""
        lines = "".join(
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n" for key, value in keys.items()
        )
        self.shipper.config.write_text(
            f"{self._base}\n[input.kafka]\nbrokers = {self.brokers}\ntopics = ['{self.topic}']\n"
            f"group_id = '{self.name}'\n{self.security}\n{lines}"
        )

    def create_topics(self) -> None:
        self.broker.create(self.letters, 2, cleanup_policy="compact")
        self.broker.create(self.ledger, 2, cleanup_policy="compact")

    @property
    def rights(self) -> dict[str, AclBinding]:
        """The rights that a member needs according to `docs/kafka.md`."""
        topic, read, write = ResourceType.TOPIC, AclOperation.READ, AclOperation.WRITE
        transactions = right(ResourceType.TRANSACTIONAL_ID, f"{self.name}-", write, is_prefix=True)
        return {
            "topic": right(topic, self.topic, read),
            "group": right(ResourceType.GROUP, self.name, read),
            "letters": right(topic, self.letters, write),
            "ledger": right(topic, self.ledger, write),
            "reading the ledger": right(topic, self.ledger, read),
            "transactions": transactions,
        }

    def member(self, settings: dict[str, object] | None = None, **options: Any) -> Running:
        wanted = {**QUICK, **(settings or {})}
        wanted = {key: value for key, value in wanted.items() if value is not ...}
        return self.shipper.start("run", settings=wanted, check=False, **options)

    def killed(self, point: str, settings: dict[str, object] | None = None) -> Running:
        """Run a member that kills itself at a crash point of the commit; its open transaction times out soon."""
        transaction = {"shipper.kafka.client.TRANSACTION_S": 3.0}
        with patch.object(self.shipper, "shortened", self.shipper.shortened | transaction):
            killed = self.member(settings, env={"SHIPPER_CRASH_AT": point})
        killed.wait_until(lambda: killed.has_ended, "it is killed")
        assert killed.process.returncode == -signal.SIGKILL
        return killed

    def finish(self, running: Running) -> None:
        """Stop a member when the group has reached the end of its topic."""
        running.wait_until(self.is_settled, "the group is at the end")
        result = running.stop()
        assert result.returncode == 0, result.stderr

    def is_settled(self) -> bool:
        """Return whether the group has reached the end of its topic."""
        committed, ends = self.broker.committed(self.name, self.topic), self.broker.ends(self.topic)
        return all(committed.get(partition, 0) == end for partition, end in ends.items())


@pytest.fixture
def broker(_broker: Broker) -> Broker:
    return _broker


@pytest.fixture
def cluster(_cluster: Broker) -> Broker:
    _cluster.start()  # restart nodes killed by an earlier test
    return _cluster


@pytest.fixture
def secure(_broker: Broker, shipper: Shipper) -> Group:
    """A group at the listener with TLS and SCRAM, with exactly the rights that it needs."""
    group = Group(_broker, shipper)
    group.create_topics()
    group.brokers = [_broker.secure_address]
    password = shipper.folder / "password"
    password.touch(0o600)
    password.write_text(PASSWORD)
    group.security = (
        f"ca_bundle = '{_broker.authority}'\nsasl_mechanism = 'SCRAM-SHA-512'\n"
        f"username = '{USER}'\npassword = {{ file = '{password}' }}"
    )
    group.write()
    _broker.grant(*group.rights.values())
    return group


@pytest.fixture
def group(_broker: Broker, shipper: Shipper, service: Service, tmp_path: Path) -> Group:
    """A group whose topics exist."""
    group = Group(_broker, shipper)
    group.create_topics()
    return group
