"""A cluster that loses one of three nodes, a storm of rebalances, and many events with all faults at once."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from datetime import UTC, datetime
from random import Random

import pytest
from confluent_kafka.admin import NewTopic

from shipper.sandbox.samples import sample_lines
from tests.conftest import SEED
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed, sandbox, wait_until
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_gaps import stopped
from tests.e2e.kafka.test_member import partitions, values
from tests.e2e.operated import Admin

pytestmark = pytest.mark.long

PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])
EVENTS = int(os.environ.get("SHIPPER_KAFKA_EVENTS") or 300_000)


def settings_of(protocol: str, **more: object) -> dict[str, object]:
    timeout = {"input.kafka.session_timeout_seconds": 3 if protocol == "classic" else ...}
    return {"input.kafka.group_protocol": protocol, "input.kafka.revoke_wait_seconds": 0.5, **timeout, **more}


@PROTOCOLS
def test_a_node_that_dies_costs_nothing(
    protocol: str, cluster: Broker, shipper: Shipper, service: Service, sample: Sample
):
    """Each node once, so that leaders, the coordinators and the controller are among them."""
    group = Group(cluster, shipper, 6)
    group.create_topics()
    members = [group.member(settings_of(protocol)) for _ in range(2)]
    bad = [b"bad %d" % number for number in range(30)]
    for node in range(3):
        start = 5000 * node
        cluster.produce(group.topic, [*values(sample, start, start + 2500), *bad[10 * node : 10 * node + 5]])
        wait_until(lambda start=start: service.stored > start, "members ship")
        cluster.stop(node)
        cluster.produce(
            group.topic, [*values(sample, start + 2500, start + 5000), *bad[10 * node + 5 : 10 * node + 10]]
        )
        members[0].wait_until(group.is_settled, "the group is at the end with two nodes", limit_s=120)
        cluster.start()
        wait_until(cluster.is_in_sync, "the node has caught up", limit_s=120)
    for running in members:
        assert running.stop(limit_s=60).returncode == 0, running.stderr
    service.assert_holds_exactly(sample.ids[:15_000])
    assert sorted(each.value or b"" for each in cluster.table(group.letters).values()) == sorted(bad)
    counts = sums(cluster.table(group.ledger))
    assert (counts["read"], counts["dead_lettered"]) == (15_030, 30)
    assert counts["accepted"] == counts["rows_accepted"] == 15_000, json.dumps(counts)


@pytest.mark.parametrize(("is_running", "transaction"), [(False, ""), (False, "producer"), (True, "")])
def test_records_that_are_lost_after_they_were_read_are_a_gap(
    is_running: bool, transaction: str, cluster: Broker, shipper: Shipper, service: Service, sample: Sample
):
    """An unclean election: the new log is shorter, and then longer than what the group has read."""
    group = Group(cluster, shipper)
    group.create_topics()
    group.topic += ".unclean"
    group.write()
    config = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    topic = NewTopic(group.topic, 1, replica_assignment=[[2, 3]], config=config)
    (future,) = cluster.admin.create_topics([topic]).values()
    future.result(30)
    cluster.produce(group.topic, values(sample, 0, 100), transaction=transaction)
    both = 101 if transaction else 100  # the end of what is in both logs, with the marker of the transaction
    wait_until(lambda: cluster.ends(group.topic)[0] == both, "both nodes have it")
    cluster.stop(2)
    cluster.produce(group.topic, values(sample, 100, 200), transaction=transaction)
    running = group.member()
    end = both + 100
    running.wait_until(lambda: cluster.committed(group.name, group.topic).get(0, 0) >= end, "it has settled all")
    committed = cluster.committed(group.name, group.topic)
    if not is_running:
        assert running.stop().returncode == 0
    cluster.stop(1)
    cluster.start(2)
    cluster.produce(group.topic, values(sample, 200, 350), transaction=transaction)
    assert cluster.ends(group.topic)[0] > committed[0]
    if not is_running:
        running = group.member()
    running.wait_until(lambda: stopped(running) or service.stored > 200, "it stops or reads on")
    assert stopped(running) == [f"{group.topic}/0"]
    # A running member may notice before the log has grown.
    lost = f"lost records {both} to {end - 1}, which the group has read"
    assert re.search(f"{lost}|it was truncated", running.stderr), running.stderr
    assert cluster.committed(group.name, group.topic) == committed
    group.write(on_gap="continue")
    running.process.send_signal(signal.SIGHUP)
    running.wait_until(lambda: service.stored == 350, "the new log is read from where it differs")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:350])


def test_a_partition_without_a_leader_stops_no_other(
    cluster: Broker, shipper: Shipper, service: Service, sample: Sample
):
    group = Group(cluster, shipper)
    shipper.shortened = shipper.shortened | {"shipper.kafka.member._TOPIC_INTERVAL_S": 2.0}
    group.create_topics()
    group.topic += ".single"
    group.write()
    topic = NewTopic(group.topic, 2, replica_assignment=[[2], [3]], config={"min.insync.replicas": "1"})
    (future,) = cluster.admin.create_topics([topic]).values()
    future.result(30)
    for partition in (0, 1):
        cluster.produce(group.topic, values(sample, 50 * partition, 50 * partition + 50), partition=partition)
    cluster.stop(2)
    described = cluster.admin.list_topics
    wait_until(lambda: described(group.topic, 10).topics[group.topic].partitions[1].leader < 0, "it has no leader")
    running = group.member()
    running.wait_until(lambda: service.stored == 50, "the other partition is read")
    answer = Admin(running).get("/readyz")
    without = f"{group.topic}/1: the partition has no leader"
    assert (answer.status_code, f"broker_unavailable: {without}" in answer.text) == (503, True), answer.text
    asked = shipper.run("status", "--until", "now", check=False)
    assert asked.returncode == 4, asked
    assert without in asked.stdout
    assert f"not confirmed for {group.topic}/1" in asked.stdout
    assert without in shipper.run("backfill", f"kafka://{group.topic}", check=False).stderr
    assert without in shipper.run("check", "--online", check=False).stdout
    cluster.start(2)
    running.wait_until(lambda: service.stored == 100, "it is read once it has a leader")
    group.finish(running)
    service.assert_holds_exactly(sample.ids[:100])


@PROTOCOLS
def test_no_partition_stands_still_after_a_storm(
    protocol: str, broker: Broker, shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    """For a minute, a member comes or goes every two seconds, every other one with a name of its own."""
    group = Group(broker, shipper, 6)
    group.create_topics()
    names = [f"m{number}" for number in range(4)]

    def join() -> Running:
        named = {"input.kafka.group_instance_id": names.pop()} if names and rng.random() < 0.5 else {}
        return group.member(settings_of(protocol, **named))

    members = [join() for _ in range(2)]
    ends_at, at = time.monotonic() + 60, 0
    while time.monotonic() < ends_at:
        next_at = time.monotonic() + 2
        broker.produce(group.topic, values(sample, at, at + 200))
        at += 200
        if len(members) < 4 and rng.random() < 0.5:
            members.append(join())
        elif len(members) > 1:
            assert members.pop(rng.randrange(len(members))).stop(limit_s=60).returncode in {0, 4}
        wait_until(lambda next_at=next_at: time.monotonic() >= next_at, "two seconds have passed")
    broker.produce(group.topic, values(sample, at, at + 200))
    members[0].wait_until(group.is_settled, "the group is at the end", limit_s=120)
    wait_until(lambda: sum(len(partitions(each)) for each in members) == 6, "each partition has an owner", limit_s=120)
    for running in members:
        assert running.stop(limit_s=60).returncode in {0, 4}, running.stderr
    service.assert_holds_exactly(sample.ids[: at + 200])
    counts = sums(broker.table(group.ledger))
    assert counts["read"] == counts["accepted"] == counts["rows_accepted"] == at + 200, json.dumps(counts)


@PROTOCOLS
def test_oracle(protocol: str, broker: Broker, shipper: Shipper, rng: Random):
    """
    Many events with keys, some broken in each way, a service with faults; members are killed and others come.

    Whoever received what, each event arrived, each broken one is one letter, and the ledger has all of them once.
    """
    lines = [line.rstrip(b"\n") for line in sample_lines(EVENTS, seed=SEED, end=datetime.now(UTC))]
    ids = [line[12:48].decode() for line in lines]
    ways = [b"bad %d", b"{%d", b'{"EventId":"%d"}', b"\xff\xfe %d"]
    broken = [way % number for number in range(EVENTS // 1000) for way in ways]
    broken += [
        changed(line, IP=f"no{number}").rstrip(b"\n") for number, line in enumerate(lines[: EVENTS // 1000])
    ]  # their EventIds come a second time, good
    mixed = [*lines, *broken]
    rng.shuffle(mixed)
    keys = [b"k%d" % rng.randrange(500) for _ in mixed]
    kills = joins = 0
    with sandbox() as service:
        shipper.target = service.target
        service.set_faults(
            {"effect": "status", "status": 503, "probability": 0.02},
            {"effect": "reset", "when": "after", "probability": 0.01},
            {"effect": "status", "status": 429, "retry_after": "1", "probability": 0.01},
            seed=SEED,
        )
        group = Group(broker, shipper, 6)
        group.create_topics()
        settings = settings_of(protocol)
        members = [group.member(settings) for _ in range(3)]
        steps = 31
        for step in range(steps):
            part = slice(len(mixed) * step // steps, len(mixed) * (step + 1) // steps)
            broker.produce(group.topic, mixed[part], keys=keys[part])
            stored = service.stored
            wait_until(lambda stored=stored: service.stored > stored or group.is_settled(), "the group goes on")
            if step % 3 == 2 and step < steps - 1:  # one comes, and so one goes at the end of the next step
                members.append(group.member(settings))
                joins += 1
            elif step < steps - 1:
                members.pop(rng.randrange(len(members))).kill()
                kills += 1
                while len(members) < 3:
                    members.append(group.member(settings))
        members[-1].wait_until(group.is_settled, "the group is at the end", limit_s=900)
        for running in members:
            assert running.stop(limit_s=60).returncode in {0, 4}, running.stderr
        assert (kills, joins) == (20, 10)
        service.assert_holds_exactly(ids)
        repeats = Counter(service.times_received())
    letters = broker.table(group.letters)
    assert sorted(each.value or b"" for each in letters.values()) == sorted(broken)
    assert len(broker.read(group.letters)) == len(broken)
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["dead_lettered"]) == (len(mixed), len(broken)), json.dumps(counts)
    assert counts["accepted"] + counts["duplicates"] == EVENTS
    assert counts["accepted"] == counts["rows_accepted"] == EVENTS, json.dumps(counts)
    print(f"{sum(repeats.values()) - EVENTS:,} of {EVENTS:,} were sent again")
