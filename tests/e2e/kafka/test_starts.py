"""Where a group begins to read is saved before anything is read, so no crash or rebalance moves it."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service
from tests.e2e.fake_service import FakeService, Reply
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import partitions, values

END = {"input.kafka.start": "end"}


def has_begun(group: Group, broker: Broker) -> bool:
    return len(broker.committed(group.name, group.topic)) == len(broker.ends(group.topic))


def test_records_pending_since_a_start_at_the_end_are_sent_after_a_kill(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    """Also if another member takes the partition over; `status` does not say that they are delivered."""
    group.shipper.target = fake.target
    fake.default = Reply(status=503)
    broker.produce(group.topic, values(sample, 0, 10))
    group.write(start="end")
    assert group.shipper.run("status", "--until", "now", check=False).returncode == 4, "nobody has begun"
    first = group.member()
    first.wait_until(lambda: has_begun(group, broker), "it has saved where it begins")
    assert group.shipper.run("status", "--until", "now", check=False).returncode == 0
    broker.produce(group.topic, values(sample, 10, 20))
    first.wait_for("delivery_paused")
    until = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    time.sleep(1)  # not in the future
    assert group.shipper.run("status", "--until", until, check=False).returncode == 4
    second = group.member()
    second.wait_until(lambda: len(partitions(second)) == 1, "it has one partition")
    for running in (first, second):
        running.process.kill()
        running.wait_until(lambda running=running: running.has_ended, "it is killed")
    fake.default = Reply()
    group.finish(group.member())
    assert set(fake.event_ids()) == set(sample.ids[10:20])
    assert sums(broker.table(group.ledger))["read"] == 10


def test_a_restart_does_not_read_the_past_of_partitions_without_new_records(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 40))
    for start in (40, 50):
        running = group.member(END)
        running.wait_until(lambda: has_begun(group, broker), "it has saved where it begins")
        broker.produce(group.topic, values(sample, start, start + 10), partition=0)
        group.finish(running)
    service.assert_holds_exactly(sample.ids[40:60])
    assert broker.committed(group.name, group.topic) == {0: 40, 1: 20}


def test_members_that_start_at_the_same_time_all_begin_at_the_end(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 40))
    members = [group.member(END) for _ in range(2)]
    members[0].wait_until(lambda: has_begun(group, broker), "they have saved where they begin")
    broker.produce(group.topic, values(sample, 40, 60))
    members[0].wait_until(group.is_settled, "the group is at the end")
    assert [running.stop().returncode for running in members] == [0, 0]
    service.assert_holds_exactly(sample.ids[40:60])


def test_a_start_outlives_offsets_that_expire(group: Group, broker: Broker, service: Service, sample: Sample):
    broker.produce(group.topic, values(sample, 0, 10))
    running = group.member(END)
    running.wait_until(lambda: has_begun(group, broker), "it has saved where it begins")
    assert running.stop().returncode == 0
    (future,) = broker.admin.delete_consumer_groups([group.name]).values()
    future.result(10)
    broker.produce(group.topic, values(sample, 10, 20))
    group.finish(group.member(END))
    service.assert_holds_exactly(sample.ids[10:20])
