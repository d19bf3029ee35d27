"""Records that were deleted before they were read, and recreated topics, are reported and never skipped silently."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import partitions, values
from tests.e2e.operated import Admin


def stopped(running: Running) -> list[str]:
    return [f"{each['topic']}/{each['partition']}" for each in partitions(running) if each["state"] == "stopped"]


def partition_of(running: Running, number: int) -> dict[str, Any]:
    return next(each for each in partitions(running) if each["partition"] == number)


def delivered(running: Running) -> str:
    return str(Admin(running).status()["headline"]["detail"])


def reads_anew(running: Running, group: Group, service: Service, records: int) -> None:
    """Wait until so many records are stored; if the member has stopped, let it go on."""
    if stopped(running):
        assert re.search("recreated|truncated", running.stderr)
        group.write(on_gap="continue")
        running.process.send_signal(signal.SIGHUP)
    running.wait_until(lambda: service.stored == records, "the new topic is read from its beginning")


def test_records_that_were_deleted_stop_their_partition_until_somebody_decides(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 100), partition=0)
    group.finish(group.member())
    broker.produce(group.topic, values(sample, 100, 200), partition=0)
    broker.produce(group.topic, values(sample, 200, 300), partition=1)
    broker.delete_records(group.topic, 0, 150)
    running = group.member()
    where = f"{group.topic}/0: records 100 to 149 were deleted before they were read"
    running.wait_for(where)
    running.wait_until(lambda: broker.committed(group.name, group.topic).get(1) == 100, "the other partition goes on")
    assert stopped(running) == [f"{group.topic}/0"]
    assert broker.committed(group.name, group.topic)[0] == 100
    started = time.time()
    running.wait_until(lambda: partition_of(running, 1)["delivered_until"] > started + 2, "the ends are queried again")
    gap = partition_of(running, 0)
    assert (gap["state"], gap["lag_records"], gap["delivered_until"]) == ("stopped", 50, None)
    ready = Admin(running).get("/readyz")
    assert ready.status_code == 503
    assert where in ready.text
    group.write(on_gap="continue")
    running.process.send_signal(signal.SIGHUP)
    running.wait_until(group.is_settled, "the group is at the end")
    assert Admin(running).metrics().get("shipper_unreachable_records_total") == 50
    running.wait_until(lambda: "except 50 records deleted unread" in delivered(running), "the page says so")
    group.finish(running)
    assert '"event":"source_unreachable"' in running.stderr
    service.assert_holds_exactly([*sample.ids[:100], *sample.ids[150:300]])
    assert sums(broker.table(group.ledger))["unreachable"] == 50


def test_records_that_are_deleted_while_the_partition_waits_are_a_gap_too(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    """The client itself notices: its position lies before the beginning."""
    broker.produce(group.topic, values(sample, 0, 10), partition=0)
    running = group.member({"input.kafka.max_fetched_bytes": 1_048_576})
    running.wait_until(group.is_settled, "the group is at the end")
    running.process.send_signal(signal.SIGSTOP)
    broker.produce(group.topic, values(sample, 10, 100), partition=0)
    broker.delete_records(group.topic, 0, 60)
    running.process.send_signal(signal.SIGCONT)
    running.wait_until(lambda: stopped(running) or group.is_settled(), "it has noticed, or had it all")
    if stopped(running):
        assert "records 10 to 59 were deleted before they were read" in running.stderr
        service.assert_holds_exactly(sample.ids[:10])
    else:  # what had been fetched before was not lost
        service.assert_holds_exactly(sample.ids[:100])
    assert running.stop().returncode == 0


def test_offsets_that_have_expired_are_found_in_the_ledger(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    """Neither `start` nor what a backfill of the same ledger has settled decides then."""
    broker.produce(group.topic, values(sample, 0, 100), partition=0)
    group.finish(group.member())
    broker.produce(group.topic, values(sample, 100, 200), partition=0)
    broker.produce(group.topic, values(sample, 200, 300), partition=1)
    ended = group.shipper.run("backfill", f"kafka://{group.topic}/0:150-200", "--summary", "json", check=False)
    assert ended.counts()[:2] == (50, 50), ended
    (future,) = broker.admin.delete_consumer_groups([group.name]).values()
    future.result(10)
    group.write(start="end")
    group.finish(group.member())
    service.assert_holds_exactly(sample.ids[:300])
    assert service.received == 350, "nothing was sent again but what the backfill had sent"
    assert sums(broker.table(group.ledger))["read"] == 350


def commit_as_another_program(group: Group, offsets: dict[int, int]) -> None:
    foreign = Consumer({"bootstrap.servers": group.broker.address, "group.id": group.name})
    foreign.commit(offsets=[TopicPartition(group.topic, *each) for each in offsets.items()], asynchronous=False)
    foreign.close()


def test_records_that_another_program_passed_over_are_a_gap_and_others_are_sent_again(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 100), partition=0)
    group.finish(group.member())
    broker.produce(group.topic, values(sample, 100, 150), partition=0)
    broker.add_partitions(group.topic, 3)
    broker.produce(group.topic, values(sample, 200, 220), partition=2)
    commit_as_another_program(group, {0: 150, 2: 20})
    assert group.shipper.run("status", "--until", "now", check=False).returncode == 4
    running = group.member()
    running.wait_for("another program has moved the group from record 100 to 150")
    running.wait_for("another program has moved the group from record 0 to 20")
    running.wait_until(lambda: len(stopped(running)) == 2, "the partitions are stopped")
    group.write(on_gap="continue")
    running.process.send_signal(signal.SIGHUP)
    broker.produce(group.topic, values(sample, 150, 160), partition=0)
    group.finish(running)
    service.assert_holds_exactly([*sample.ids[:100], *sample.ids[150:160]])
    assert sums(broker.table(group.ledger))["unreachable"] == 70
    assert group.shipper.run("status", "--until", "now", check=False).returncode == 0
    commit_as_another_program(group, {0: 155, 2: 90})
    broker.delete_records(group.topic, 0, 157)
    running = group.member()
    running.wait_for("another program has moved the group from record 160 back to 155")
    group.finish(running)
    counts = sums(broker.table(group.ledger))
    assert (service.received, counts["accepted"]) == (113, 113), "they are sent and counted"
    assert counts["unreachable"] == 70, "the deleted ones were settled, and nothing was after the end"


@pytest.mark.parametrize("records", [50, 150])
def test_a_topic_that_was_made_again_is_not_taken_for_the_old_one(
    records: int, group: Group, broker: Broker, service: Service, sample: Sample
):
    """With fewer records than were read of the old one, and with more."""
    broker.produce(group.topic, values(sample, 0, 100), partition=0)
    group.finish(group.member())
    broker.delete(group.topic)
    broker.create(group.topic, 2)
    broker.produce(group.topic, values(sample, 100, 100 + records), partition=0)
    running = group.member()
    running.wait_until(lambda: len(partitions(running)) == 2, "it has both partitions")
    running.wait_until(lambda: stopped(running) or service.stored > 100, "it stops or reads from the beginning")
    reads_anew(running, group, service, 100 + records)
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[: 100 + records])


@pytest.mark.parametrize("is_running", [False, True])
def test_a_topic_that_is_made_again_is_read_from_its_beginning_even_with_a_start_at_the_end(
    is_running: bool, group: Group, broker: Broker, service: Service, sample: Sample
):
    group.write(start="end", on_gap="continue")
    group.shipper.config.write_text(group.shipper.config.read_text() + REFRESHES)
    running = group.member()
    running.wait_until(lambda: len(broker.committed(group.name, group.topic)) == 2, "it has saved where it begins")
    broker.produce(group.topic, values(sample, 0, 10))
    running.wait_until(group.is_settled, "the group is at the end")
    if not is_running:
        assert running.stop().returncode == 0
    broker.delete(group.topic)
    broker.create(group.topic, 2)
    broker.produce(group.topic, values(sample, 10, 60))
    if not is_running:
        running = group.member()
    running.wait_until(lambda: service.stored == 60, "the new topic is read from its beginning")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:60])


def test_a_partition_that_is_added_is_read_from_its_beginning(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 10))
    group.finish(group.member())
    broker.add_partitions(group.topic, 3)
    broker.produce(group.topic, values(sample, 10, 20), partition=2)
    group.finish(group.member({"input.kafka.start": "end"}))
    service.assert_holds_exactly(sample.ids[:20])


def test_a_new_group_can_begin_at_the_end(group: Group, broker: Broker, service: Service, sample: Sample):
    broker.produce(group.topic, values(sample, 0, 10), partition=0)
    commit_as_another_program(group, {1: 0})  # says nothing about the other partition
    running = group.member({"input.kafka.start": "end"})
    running.wait_until(lambda: len(partitions(running)) == 2, "it has both partitions")
    broker.produce(group.topic, values(sample, 10, 20), partition=0)
    running.wait_until(lambda: service.stored == 10, "what is new is delivered")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[10:20])


# While it is read ---------------------------------------------------------------------------------------------------

REFRESHES = "client = { 'topic.metadata.refresh.interval.ms' = 1000 }\n"


def reads(group: Group, broker: Broker, sample: Sample, client: str = "") -> Running:
    """Start a member that has read a hundred records of the first partition."""
    group.shipper.config.write_text(group.shipper.config.read_text() + client)
    running = group.member()
    broker.produce(group.topic, values(sample, 0, 100), partition=0)
    running.wait_until(group.is_settled, "the group is at the end")
    return running


@pytest.mark.long
@pytest.mark.parametrize("records", [50, 150])
def test_a_topic_that_is_made_again_while_it_is_read_is_noticed(
    records: int, group: Group, broker: Broker, service: Service, sample: Sample
):
    running = reads(group, broker, sample, REFRESHES)
    broker.delete(group.topic)
    broker.create(group.topic, 2)
    broker.produce(group.topic, values(sample, 100, 100 + records), partition=0)
    running.wait_until(lambda: stopped(running) or service.stored == 100 + records, "it stops or reads all of it")
    reads_anew(running, group, service, 100 + records)
    group.finish(running)
    service.assert_holds_exactly(sample.ids[: 100 + records])


def test_a_topic_that_is_made_again_with_fewer_partitions_is_read(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    waits = {"shipper.kafka.member._TOPIC_INTERVAL_S": 2.0, "shipper.kafka.assignment._CALL_S": 600.0}
    group.shipper.shortened = group.shipper.shortened | waits  # nothing waits for partitions that are gone
    group.write(on_gap="continue")
    running = reads(group, broker, sample)
    broker.delete(group.topic)
    broker.create(group.topic, 1)
    broker.produce(group.topic, values(sample, 100, 150), partition=0)
    running.wait_until(lambda: service.stored == 150, "the new topic is read")
    running.wait_for("the partition does not exist any more")
    running.wait_until(lambda: stopped(running) in ([f"{group.topic}/1"], []), "the other partition is at most stopped")
    broker.produce(group.topic, values(sample, 150, 160), partition=0)
    group.finish(running)
    running = group.member()
    running.wait_until(lambda: len(partitions(running)) == 1, "a member that is restarted has only the new one")
    assert not stopped(running)
    group.finish(running)
    service.assert_holds_exactly(sample.ids[:160])


@pytest.mark.long
def test_a_topic_that_is_deleted_while_it_is_read_is_told(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    running = reads(group, broker, sample, REFRESHES)
    broker.delete(group.topic)
    running.wait_until(lambda: Admin(running).get("/readyz").status_code == 503, "it is not ready")
    assert group.topic in Admin(running).get("/readyz").text
    assert running.stop().returncode == 0


@pytest.mark.long
def test_a_partition_that_is_added_while_others_are_read_is_read_too(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    running = reads(group, broker, sample, REFRESHES)
    broker.add_partitions(group.topic, 3)
    broker.produce(group.topic, values(sample, 100, 110), partition=2)
    running.wait_until(lambda: len(partitions(running)) == 3, "it has the new one")
    group.finish(running)
    service.assert_holds_exactly(sample.ids[:110])
