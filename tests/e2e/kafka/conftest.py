"""A broker for all tests of a process, and a group of its own for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.driver import Running, Service, Shipper
from tests.e2e.kafka.broker import Broker, missing

QUICK = {
    "batch.linger_seconds": 0.02,
    "state.commit_interval_seconds": 0.05,
    "input.kafka.session_timeout_seconds": 6,
    "input.kafka.revoke_wait_seconds": 2,
}


@pytest.fixture(scope="session")
def _broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    if why := missing():
        if os.environ.get("SHIPPER_NEEDS_KAFKA"):
            pytest.fail(why)
        pytest.skip(why)
    with Broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


class Group:
    """
    A group with a topic, and members of it.

    Attributes:
        name: Of the group.
        topic: What it reads, with two partitions.
    """

    def __init__(self, broker: Broker, shipper: Shipper, partitions: int = 2) -> None:
        self.broker = broker
        self.shipper = shipper
        self.name = f"g{uuid.uuid4().hex[:8]}"
        self.topic = f"{self.name}.events"
        self.letters, self.ledger = f"{self.name}.dead-letters", f"{self.name}.ledger"
        broker.create(self.topic, partitions)
        self._base = shipper.config.read_text().partition("[state]")[0]
        self.write()

    def write(self, **keys: object) -> None:
        """Write the settings of the members."""
        lines = "".join(
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n" for key, value in keys.items()
        )
        self.shipper.config.write_text(
            f"{self._base}\n[input.kafka]\nbrokers = ['{self.broker.address}']\ntopics = ['{self.topic}']\n"
            f"group_id = '{self.name}'\nsecurity = 'plaintext'\n{lines}"
        )

    def create_topics(self) -> None:
        self.broker.create(self.letters, 2, cleanup_policy="compact")
        self.broker.create(self.ledger, 2, cleanup_policy="compact")

    def member(self, settings: dict[str, object] | None = None, **options: Any) -> Running:
        wanted = {**QUICK, **(settings or {})}
        wanted = {key: value for key, value in wanted.items() if value is not ...}
        return self.shipper.start("run", settings=wanted, check=False, **options)

    def is_settled(self) -> bool:
        """Whether the group is at the end of its topic."""
        return self.broker.committed(self.name, self.topic) == {
            partition: end for partition, end in self.broker.ends(self.topic).items() if end
        }


@pytest.fixture
def broker(_broker: Broker) -> Broker:
    return _broker


@pytest.fixture
def group(_broker: Broker, shipper: Shipper, service: Service, tmp_path: Path) -> Group:
    """A group whose topics are all there."""
    group = Group(_broker, shipper)
    group.create_topics()
    return group
