"""Outages of the service or the brokers, and rapid rebalances: the group waits and resumes."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, wait_until
from tests.e2e.fake_service import FakeService, Reply
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import partitions, values
from tests.e2e.operated import Admin


def rebalances(running: Running) -> dict[str, int]:
    return Admin(running).status()["live"]["group"]["rebalances"]


def test_a_member_stays_in_the_group_while_the_service_is_down(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    fake.default = Reply(status=503)
    text = group.shipper.config.read_text() + "client = { 'max.poll.interval.ms' = 3000 }\n"
    group.shipper.config.write_text(text)
    broker.produce(group.topic, values(sample, 0, 40_000))  # more than a member keeps in memory
    running = group.member({"delivery.retry_max_seconds": 1, "input.kafka.session_timeout_seconds": 3})
    running.wait_for('"delivery_paused"')
    wait_until(lambda: {each["state"] for each in partitions(running)} == {"paused"}, "its partitions are paused")
    since = time.monotonic()
    wait_until(lambda: time.monotonic() > since + 7, "two poll intervals have passed")
    assert rebalances(running) == {"assigned": 2, "revoked": 0, "lost": 0}
    fake.default = Reply()
    running.wait_until(group.is_settled, "the group is at the end")
    assert rebalances(running) == {"assigned": 2, "revoked": 0, "lost": 0}
    assert running.stop().returncode == 0
    assert set(fake.event_ids()) == set(sample.ids[:40_000])
    assert sums(broker.table(group.ledger))["accepted"] == 40_000


def test_a_partition_revoked_while_paused_is_read_when_it_is_reassigned(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    fake.default = Reply(status=503)
    broker.produce(group.topic, values(sample, 0, 40_000))  # more than a member keeps in memory
    settings = {"delivery.retry_max_seconds": 0.5, "input.kafka.revoke_wait_seconds": 0}
    first = group.member(settings)
    first.wait_until(lambda: {each["state"] for each in partitions(first)} == {"paused"}, "its partitions are paused")
    second = group.member(settings)
    second.wait_until(lambda: len(partitions(second)) == 1, "it has one partition")
    fake.default = Reply()
    first.wait_until(group.is_settled, "the group is at the end")
    first.wait_until(lambda: {each["state"] for each in partitions(first)} == {"reading"}, "it reads again")
    assert second.stop().returncode == 0
    first.wait_until(lambda: len(partitions(first)) == 2, "it has both partitions again")
    broker.produce(group.topic, values(sample, 40_000, 40_100))
    first.wait_until(group.is_settled, "the group is at the end", limit_s=30)
    assert first.stop().returncode == 0
    assert set(fake.event_ids()) == set(sample.ids[:40_100])


@pytest.mark.long
def test_a_member_waits_for_unavailable_brokers(group: Group, broker: Broker, service: Service, sample: Sample):
    running = group.member({"input.kafka.session_timeout_seconds": 45})
    broker.produce(group.topic, values(sample, 0, 500))
    running.wait_until(group.is_settled, "the group is at the end")
    broker.stop()
    running.wait_until(lambda: "broker_unavailable" in _pauses(running), "it reports the outage")
    broker.start()
    broker.produce(group.topic, values(sample, 500, 1000))
    running.wait_until(group.is_settled, "the group is at the end", limit_s=120)
    running.wait_until(lambda: not _pauses(running), "the outage is no longer reported")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:1000])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"]) == (1000, 1000)


@pytest.mark.long
def test_a_member_without_partitions_is_ready_again_after_an_outage(broker: Broker, shipper: Shipper, service: Service):
    group = Group(broker, shipper, partitions=1)
    group.create_topics()
    shipper.shortened = shipper.shortened | {"shipper.kafka.member._TOPIC_INTERVAL_S": 2.0}
    settings = {"input.kafka.session_timeout_seconds": 45}
    first = group.member(settings)
    first.wait_until(lambda: len(partitions(first)) == 1, "it has the partition")
    standby = group.member(settings)
    standby.wait_until(
        lambda: json.loads(shipper.run("status", "--json").stdout)["members"] == 2, "the other one has joined"
    )
    broker.stop()
    for running in (first, standby):
        running.wait_until(lambda running=running: "broker_unavailable" in _pauses(running), "it reports the outage")
    broker.start()
    standby.wait_until(lambda: Admin(standby).get("/readyz").status_code == 200, "it is ready again")
    assert len(partitions(standby)) == 0
    assert [running.stop().returncode for running in (standby, first)] == [0, 0]


def test_a_transaction_without_an_answer_has_one_outcome(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    """The broker does not answer while records are settled."""
    group.shipper.shortened |= {"shipper.kafka.store._CALL_S": 2.0, "shipper.kafka.store._HANGS_S": 6.0}
    running = group.member({"input.kafka.session_timeout_seconds": 45, "state.commit_interval_seconds": 1})
    running.wait_until(lambda: len(partitions(running)) == 2, "it has both partitions")
    broker.produce(group.topic, [*values(sample, 0, 500), b"bad"])
    running.wait_until(lambda: service.stored, "it delivers")
    broker.freeze()
    try:
        running.wait_until(
            lambda: "broker_unavailable" in _pauses(running) or service.stored == 500, "it has noticed the outage"
        )
        since = time.monotonic()
        wait_until(lambda: time.monotonic() > since + 7, "the broker was frozen for longer than _HANGS_S")
    finally:
        broker.thaw()
    running.wait_until(group.is_settled, "the group is at the end")
    assert running.stop(limit_s=60).returncode == 0
    service.assert_holds_exactly(sample.ids[:500])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (501, 500, 1)
    assert len(broker.table(group.letters)) == 1


def _pauses(running: Running) -> list[str]:
    live = Admin(running).status()["live"]
    return [each["reason"] for each in live["pauses"]] if live else []
