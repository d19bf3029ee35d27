"""What `shipper status` and the status page say about the progress of a group."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from confluent_kafka import Consumer

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, wait_until
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import partitions, utc, values
from tests.e2e.operated import Admin

DONE = "Everything written to this member's partitions is delivered"


def headline(running: Running) -> tuple[str, str]:
    shown = Admin(running).status()["headline"]
    return shown["title"], shown["detail"]


def query_ends(running: Running, settled: int, after: float) -> int:
    """Wait until a member has queried the ends after a time; return how many transactions it has committed then."""
    committed = -1

    def are_queried() -> bool:
        nonlocal committed
        group = Admin(running).status()["live"]["group"]
        committed = group["transactions"]["committed"]
        (partition,) = (each for each in group["partitions"] if each["partition"] == settled)
        return partition["delivered_until"] > after

    running.wait_until(are_queried, "the ends are queried")
    return committed


def test_dead_letters_are_the_exception_to_everything_is_delivered(
    group: Group, broker: Broker, service: Service, shipper: Shipper, sample: Sample
):
    broker.produce(group.topic, [*values(sample, 0, 10), b"bad", b"worse"])
    running = group.member()
    running.wait_until(
        lambda: headline(running) == (DONE, ", except 2 dead letters of this process"), "the page has the exception"
    )
    until = "2026-01-01"
    answer = shipper.run("status", "--until", until, check=False)
    assert answer.returncode == 0, answer.stdout
    assert "is delivered, except 2 dead letters\n" in answer.stdout
    assert json.loads(shipper.run("status", "--json", check=False).stdout)["dead_letters"] == 2
    assert running.stop().returncode == 0
    assert shipper.run("dead-letters", "purge", "--all", "--yes", check=False).returncode == 0
    answer = shipper.run("status", "--until", until, check=False)
    assert answer.stdout.splitlines()[0].endswith(" is delivered")
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (12, 10, 2)


def test_nothing_is_up_to_date_while_a_topic_is_behind(
    group: Group, broker: Broker, service: Service, shipper: Shipper, sample: Sample
):
    """Not even if the clock of one producer is ahead."""
    slow = {"delivery.rate_limit_events_per_second": 50, "batch.max_events": 5}
    running = group.member(slow | {"delivery.drain_timeout_seconds": 1})
    running.wait_until(lambda: len(partitions(running)) == 2, "it has both partitions")
    broker.produce(group.topic, values(sample, 0, 2), timestamp_ms=1000 * int(time.time() + 3000))
    wait_until(lambda: shipper.run("status", "--until", "now", check=False).returncode == 0, "they are delivered")
    running.wait_until(lambda: headline(running)[0] == DONE, "the page says so, too")
    broker.produce(group.topic, values(sample, 2, 5000))
    assert shipper.run("status", "--until", "now", check=False).returncode == 4
    running.wait_until(lambda: "records behind, about" in headline(running)[1], "the page says how much is left")
    seen: dict[int, dict[str, Any]] = {}

    def look() -> bool:
        document = Admin(running).status()
        seen[sum(each["offset"] for each in document["live"]["group"]["partitions"])] = document
        return len(seen) == 10

    running.wait_until(look, "it has saved its position ten times")
    titles = {(each["headline"]["title"], "records behind" in each["headline"]["detail"]) for each in seen.values()}
    assert titles == {("Delivering", True)}
    live = seen[max(seen)]
    assert live["state"] is live["summary"]["dead_letters_kept"] is None
    assert live["summary"]["seconds_to_go"] > 0
    assert all(each["offset"] <= each["end"] for each in partitions(running))
    running.wait_until(lambda: Admin(running).get("/history").json()[-1][5] > 1000, "the backlog is in the history")
    running.stop()


def test_records_behind_an_open_transaction_are_not_delivered(
    group: Group, broker: Broker, service: Service, shipper: Shipper, sample: Sample
):
    """A member cannot read them before the transaction ends."""
    running = group.member()
    running.wait_until(lambda: headline(running)[0] == DONE, "the empty topic is delivered")
    producer = broker.begin(group.topic, values(sample, 0, 1)[0])
    broker.produce(group.topic, values(sample, 1, 7))
    running.wait_until(lambda: headline(running)[0] != DONE, "the page says that it is not")
    until = math.ceil(time.time())  # after the records
    wait_until(lambda: time.time() > until, "it is not in the future")
    for partition in (0, 1):
        broker.produce(group.topic, values(sample, 7 + partition, 8 + partition), partition=partition)
    running.wait_until(lambda: sum(each["lag_records"] for each in partitions(running)) == 10, "the ends are queried")
    assert running.stop().returncode == 0
    running = group.member()
    running.wait_until(lambda: len(partitions(running)) == 2, "it has both partitions")
    answer = shipper.run("status", "--until", utc(until), check=False)
    assert (answer.returncode, service.stored) == (4, 0), answer
    assert ", 10 records behind\n" in answer.stdout
    assert f"{group.topic}/0: the last records belong to or follow a producer's open transaction" in answer.stdout
    producer.abort_transaction(30)
    group.finish(running)
    service.assert_holds_exactly(sample.ids[1:9])
    assert shipper.run("status", "--until", utc(until), check=False).returncode == 0


def test_status_names_the_member_of_each_partition(group: Group, shipper: Shipper):
    def owners() -> list[str]:
        lines = shipper.run("status", check=False).stdout.splitlines()
        return [line.split(maxsplit=5)[-1] for line in lines if line.startswith(f"{group.topic}/")]

    assert owners() == ["none", "none"]
    assert "2 partitions (2 without a member)" in shipper.run("status", check=False).stdout
    first = group.member({"input.kafka.group_instance_id": "one"})
    second = group.member({"input.kafka.group_instance_id": "two"})
    for running in (first, second):
        running.wait_until(lambda running=running: len(partitions(running)) == 1, "it has one partition")
    assert sorted(owners()) == ["one at 127.0.0.1", "two at 127.0.0.1"]
    assert {first.stop().returncode, second.stop().returncode} == {0}


def test_a_member_with_another_ledger_is_reported_by_status_and_by_its_successor(
    group: Group, broker: Broker, service: Service, shipper: Shipper, sample: Sample
):
    other = f"{group.ledger}.other"
    broker.create(other, 2, cleanup_policy="compact")
    broker.produce(group.topic, values(sample, 0, 10), partition=0)
    group.finish(group.member({"input.kafka.ledger_topic": other}))
    words = f"input.kafka.ledger_topic is {other} there and {group.ledger} here"
    assert words in shipper.run("status", check=False).stdout
    successor = group.member()
    broker.produce(group.topic, values(sample, 10, 20), partition=0)
    group.finish(successor)
    assert words in successor.stderr
    lines = shipper.run("status", check=False).stdout.splitlines()
    assert [line.split(":")[0] for line in lines if words in line] == [f"{group.topic}/1"], "it has no record"


def test_members_of_another_program_are_named(group: Group, broker: Broker, service: Service, sample: Sample):
    foreign = Consumer({"bootstrap.servers": broker.address, "group.id": group.name, "auto.offset.reset": "earliest"})
    foreign.subscribe([group.topic])
    wait_until(
        lambda: foreign.poll(0.1) or foreign.assignment(), "it is a member, with another way to share partitions"
    )
    text = f"the group {group.name} has members of another program"
    assert text in group.shipper.run("check", "--online", check=False).stdout
    running = group.member()
    running.wait_until(lambda: text in Admin(running).get("/readyz").text, "it is told")
    foreign.close()
    broker.produce(group.topic, values(sample, 0, 50))
    group.finish(running)
    assert service.stored == 50


def test_missing_topics_are_named_with_what_to_do(broker: Broker, shipper: Shipper, service: Service):
    group = Group(broker, shipper)
    assert broker.ends(group.topic)  # a new topic is not known at once
    seen = shipper.run("status", check=False)
    assert seen.returncode == 0, seen.stderr
    assert f"topic {group.letters}: the topic does not exist; create it: shipper check --online" in seen.stdout
    group.topic += ".missing"
    group.write()
    seen = shipper.run("status", check=False)
    assert seen.returncode == 2
    assert f"topic {group.topic}: the topic does not exist; shipper does not create topics that it reads" in seen.stderr
    checked = shipper.run("check", "--online", "--create-topics", check=False)
    assert "the topic does not exist; shipper does not create topics that it reads" in checked.stdout
    assert f"no topic is created before {group.topic}, whose messages must fit" in checked.stdout
    broker.create(group.topic, max_message_bytes="2000000", cleanup_policy="compact")
    checked = shipper.run("check", "--online", "--create-topics", check=False)
    assert checked.returncode == 0, checked.stdout
    assert "compacted: records with the key of a later one are deleted, even before they are read" in checked.stdout


def test_properties_that_the_client_library_refuses_are_named(group: Group, shipper: Shipper):
    check = ["check", "--online"]
    for name, command, code in (
        ("max.in.flight", ["run"], 2),
        ("max.poll.interval.ms", ["run"], 2),
        ("retries", check, 4),
    ):
        group.security = f"security = 'plaintext'\nclient = {{ '{name}' = {6000 if '.' in name else 0} }}"
        group.write()
        refused = shipper.run(*command, check=False)
        assert (refused.returncode, f"`{name}`" in refused.stdout + refused.stderr) == (code, True), refused


def test_brokers_that_do_not_answer_are_named_with_the_setting_to_check(group: Group, broker: Broker, shipper: Shipper):
    limits = {
        f"shipper.kafka.{name}": 1.5
        for name in ("offsets._CALL_S", "documents._READ_S", "topics._CALL_S", "view._CALL_S")
    }
    shipper.shortened = shipper.shortened | limits
    commands = (["check", "--online"], ["status"], ["dead-letters", "list"], ["run"])
    group.security = ""
    group.write()
    for command in commands:
        result = shipper.run(*command, check=False)
        text = f"{broker.address} did not answer with TLS; correct the port in input.kafka.brokers"
        assert text in result.stdout + result.stderr, (command, result)
        assert 'input.kafka.security = "plaintext"' in result.stdout + result.stderr
    group.security, group.brokers = "security = 'plaintext'", ["127.0.0.1:1"]
    group.write()
    for command in commands:
        result = shipper.run(*command, check=False)
        assert "Connection refused; check input.kafka.brokers" in result.stdout + result.stderr, (command, result)


@pytest.mark.parametrize("kind", ["tombstones", "aborted", "marker"])
def test_the_offset_passes_an_end_without_records(
    kind: str, group: Group, broker: Broker, service: Service, shipper: Shipper, sample: Sample
):
    group.write(tombstones="skip")
    running = group.member()
    broker.produce(group.topic, values(sample, 0, 3), partition=0)
    running.wait_until(group.is_settled, "the group is at the end")
    if kind == "tombstones":
        broker.produce(group.topic, [None] * 5, partition=0)
    else:
        records = values(sample, 10, 15) if kind == "aborted" else values(sample, 3, 4)
        broker.produce(group.topic, records, partition=0, transaction=group.name, is_aborted=kind == "aborted")
    running.wait_until(group.is_settled, "the offset is at the end")
    until = math.ceil(time.time())
    before = query_ends(running, 0, until)
    assert query_ends(running, 0, until + 3) == before, "something is committed while nothing moves"
    assert shipper.run("status", "--until", utc(until), check=False).returncode == 0
    assert running.stop().returncode == 0
    broker.delete_records(group.topic, 0, broker.ends(group.topic)[0])
    broker.produce(group.topic, values(sample, 4, 6), partition=0)
    running = group.member()
    group.finish(running)
    assert "deleted before they were read" not in running.stderr
    service.assert_holds_exactly([*sample.ids[: 4 if kind == "marker" else 3], *sample.ids[4:6]])
