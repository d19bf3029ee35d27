"""After a kill, a lost membership or a rebalance, nothing is lost or counted twice, and no letter is repeated."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest
from confluent_kafka import Producer

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, wait_until
from tests.e2e.fake_service import HANG, FakeService
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import partitions, values
from tests.e2e.operated import Admin


@pytest.mark.parametrize("point", ["save.begin", "save.written", "save.commit", "save.done"])
def test_a_kill_during_the_commit_loses_and_repeats_nothing(
    point: str, group: Group, broker: Broker, service: Service, sample: Sample
):
    bad = [b"bad %d" % number for number in range(20)]
    broker.produce(group.topic, [*values(sample, 0, 1000), *bad])
    service.set_faults({"effect": "delay", "seconds": 0.1})  # so that not all is settled in the first save
    group.killed(f"{point}:2", {"batch.max_events": 50, "delivery.concurrency": 4})
    status = group.shipper.run("status", "--json", check=False)
    assert json.loads(status.stdout)["lag_records"] > 0, "an open transaction hides nothing"
    counts = sums(broker.table(group.ledger))
    assert counts["read"] == sum(broker.committed(group.name, group.topic).values())
    group.finish(group.member())
    service.assert_holds_exactly(sample.ids[:1000])
    assert sorted(each.value or b"" for each in broker.table(group.letters).values()) == sorted(bad)
    assert len(broker.read(group.letters)) == 20
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["dead_lettered"]) == (1020, 20)
    assert counts["accepted"] + counts["duplicates"] == counts["rows_accepted"] + counts["rows_duplicates"] == 1000
    assert counts["accepted"] == 1000


def test_records_in_flight_at_a_rebalance_settle_before_the_partition_is_revoked(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    broker.produce(group.topic, values(sample, 0, 200))
    fake.default = HANG
    first = group.member({"input.kafka.revoke_wait_seconds": 30})
    first.wait_until(lambda: fake.requests, "a request hangs")
    second = group.member()
    second.wait_until(lambda: _has_two(broker, group), "the first member commits in the next generation")
    fake.release()
    second.wait_until(lambda: len(partitions(second)) == 1, "it has one partition")
    second.wait_until(group.is_settled, "the group is at the end")
    assert first.stop().returncode == 0
    assert second.stop().returncode == 0
    assert sorted(fake.event_ids()) == sorted(sample.ids[:200])
    assert sums(broker.table(group.ledger))["accepted"] == 200


def test_unsettled_records_are_handed_over_and_a_late_answer_changes_nothing(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    broker.produce(group.topic, values(sample, 0, 200))
    fake.default = HANG
    first = group.member({"input.kafka.revoke_wait_seconds": 0})
    first.wait_until(lambda: fake.requests, "a request hangs")
    second = group.member({"input.kafka.revoke_wait_seconds": 0})
    second.wait_until(lambda: len(partitions(second)) == 1, "it has one partition")
    fake.release()
    second.wait_until(group.is_settled, "the group is at the end")
    ended = first.stop()
    assert ended.returncode == 0, ended.stderr
    assert '"handed_over":100' in ended.stderr
    assert second.stop().returncode == 0
    assert set(fake.event_ids()) == set(sample.ids[:200])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["rows_accepted"]) == (200, 200, 200)


def test_records_that_wait_for_the_rate_limit_are_sent_by_the_member_that_takes_them_over(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    broker.produce(group.topic, values(sample, 0, 16))
    at_once = {"input.kafka.revoke_wait_seconds": 0, "batch.max_events": 5}
    slow = {"delivery.rate_limit_events_per_second": 0.1, "delivery.drain_timeout_seconds": 0.5}
    first = group.member(at_once | slow | {"delivery.concurrency": 8})
    first.wait_until(lambda: (Admin(first).status()["live"] or {}).get("read") == 16, "records of both partitions wait")
    second = group.member(at_once)
    second.wait_until(lambda: len(partitions(second)) == 1, "it has one partition")
    ended = first.stop()
    assert ended.returncode == 4, ended.stderr
    second.wait_until(group.is_settled, "the group is at the end")
    assert second.stop().returncode == 0
    assert '"handed_over":0' not in ended.stderr, "the case was not exercised"
    times = Counter(fake.event_ids())
    assert set(times) == set(sample.ids[:16])
    assert times.total() - 16 <= 2, "more was sent twice than could be in flight"
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"]) == (16, 16)


def test_a_member_stopped_past_its_session_commits_nothing_for_lost_partitions(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    broker.produce(group.topic, values(sample, 0, 100))
    fake.default = HANG
    first = group.member({"input.kafka.session_timeout_seconds": 3})
    first.wait_until(lambda: fake.requests, "a request hangs")
    os.kill(first.pid, signal.SIGSTOP)
    second = group.member()
    fake.release()
    second.wait_until(lambda: len(partitions(second)) == 2, "it has both partitions")
    second.wait_until(group.is_settled, "the group is at the end")
    settled = sums(broker.table(group.ledger))
    assert settled["accepted"] == 100
    os.kill(first.pid, signal.SIGCONT)
    first.wait_for("partitions lost")
    first.wait_until(lambda: len(partitions(first)) == 1, "it is a member again")
    broker.produce(group.topic, values(sample, 100, 200))
    group.finish(first)
    assert second.stop().returncode == 0
    assert set(fake.event_ids()) == set(sample.ids[:200])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"]) == (200, 200)


def test_records_of_a_regained_partition_are_not_counted_as_duplicates(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    """Records are accepted but not saved, the partition is lost, and the same process reads them again."""
    group.shipper.target = fake.target
    broker.produce(group.topic, values(sample, 0, 100))
    running = group.member({"state.commit_interval_seconds": 60, "input.kafka.session_timeout_seconds": 3})
    running.wait_until(lambda: len(fake.event_ids()) == 100, "all are accepted, and nothing is saved")
    os.kill(running.pid, signal.SIGSTOP)
    admin = broker.admin
    wait_until(lambda: not _members(admin, group.name), "the group has removed the member")
    os.kill(running.pid, signal.SIGCONT)
    running.wait_for("partitions lost")
    running.wait_until(lambda: len(fake.event_ids()) == 200, "all are sent again")
    assert running.stop().returncode == 0
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["duplicates"]) == (100, 100, 0)


def _members(admin: object, group: str) -> int:
    (future,) = admin.describe_consumer_groups([group]).values()  # type: ignore[attr-defined]
    return len(future.result(10).members)


def _has_two(broker: Broker, group: Group) -> bool:
    """Return whether both members have joined the current generation of the group."""
    (future,) = broker.admin.describe_consumer_groups([group.name]).values()
    found = future.result(10)
    return found.state.name == "STABLE" and len(found.members) == 2


def test_a_second_member_with_the_same_name_ends_the_first(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    name: dict[str, object] = {"input.kafka.group_instance_id": "one"}
    first = group.member(name)
    first.wait_until(lambda: len(partitions(first)) == 2, "it has both partitions")
    second = group.member(name)
    broker.produce(group.topic, values(sample, 0, 100))
    first.wait_until(lambda: first.has_ended, "the first member ends")
    assert first.process.returncode == 5, first.stderr
    assert "another member" in first.stderr
    group.finish(second)
    service.assert_holds_exactly(sample.ids[:100])
    assert sums(broker.table(group.ledger))["accepted"] == 100


def test_with_the_new_protocol_a_second_member_with_the_same_name_ends(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    settings = {
        "input.kafka.group_instance_id": "one",
        "input.kafka.group_protocol": "consumer",
        "input.kafka.session_timeout_seconds": ...,
    }
    first = group.member(settings)
    first.wait_until(lambda: len(partitions(first)) == 2, "it has both partitions")
    second = group.member(settings)
    broker.produce(group.topic, values(sample, 0, 100))
    second.wait_until(lambda: second.has_ended, "the second member ends")
    assert (second.process.returncode, "another member" in second.stderr) == (5, True), second.stderr
    group.finish(first)
    service.assert_holds_exactly(sample.ids[:100])
    assert sums(broker.table(group.ledger))["accepted"] == 100


def test_a_static_member_whose_transaction_the_brokers_ended_continues(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    running = group.member({"input.kafka.group_instance_id": "one"})
    broker.produce(group.topic, values(sample, 0, 100))
    running.wait_until(group.is_settled, "the group is at the end")
    Producer({"bootstrap.servers": broker.address, "transactional.id": f"{group.name}-one"}).init_transactions(30)
    broker.produce(group.topic, values(sample, 100, 200))
    group.finish(running)
    service.assert_holds_exactly(sample.ids[:200])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"]) == (200, 200)


def test_a_stopped_member_commits_nothing_once_another_has_its_name(
    group: Group, broker: Broker, fake: FakeService, sample: Sample
):
    group.shipper.target = fake.target
    settings: dict[str, object] = {"input.kafka.group_instance_id": "one", "state.commit_interval_seconds": 2}
    broker.produce(group.topic, [b"bad", *values(sample, 0, 100)])
    first = group.member(settings)
    first.wait_until(lambda: len(fake.event_ids()) == 100, "all are accepted")
    os.kill(first.pid, signal.SIGSTOP)
    assert not any(broker.committed(group.name, group.topic).values()), "no record is saved yet"
    second = group.member(settings)
    second.wait_until(group.is_settled, "the group is at the end")
    saved, letters = sums(broker.table(group.ledger)), broker.read(group.letters)
    os.kill(first.pid, signal.SIGCONT)
    first.wait_until(lambda: first.has_ended, "the first member ends")
    assert (first.process.returncode, "another member" in first.stderr) == (5, True), first.stderr
    assert (sums(broker.table(group.ledger)), broker.read(group.letters)) == (saved, letters)
    broker.produce(group.topic, values(sample, 100, 200))
    group.finish(second)
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (201, 200, 1)


def test_no_read_committed_consumer_sees_a_letter_of_an_unfinished_transaction(
    group: Group, broker: Broker, sample: Sample
):
    running = group.member()
    running.wait_until(lambda: broker.committed(group.name, group.topic) == {0: 0, 1: 0}, "it has saved the start")
    assert running.stop().returncode == 0
    broker.produce(group.topic, [b"bad", *values(sample, 0, 10)], partition=0)
    group.killed("save.commit")
    wait_until(lambda: broker.read(group.letters, isolation="read_uncommitted"), "a letter was written")
    assert broker.committed(group.name, group.topic) == {0: 0, 1: 0}  # waits for the transaction to time out
    assert not broker.read(group.letters)
    group.finish(group.member())
    assert len(broker.read(group.letters)) == 1
