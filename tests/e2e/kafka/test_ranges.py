"""`shipper backfill kafka://…` reads exactly the range, ends, and keeps the group's accounts."""

from __future__ import annotations

import re
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Running, Service, wait_until
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import QUICK, Group
from tests.e2e.kafka.test_member import values


def start(group: Group, *arguments: str, **settings: object) -> Running:
    return group.shipper.start("backfill", *arguments, "--summary", "json", settings={**QUICK, **settings}, check=False)


def backfill(group: Group, *arguments: str, **settings: Any) -> Result:
    return start(group, *arguments, **settings).finish(limit_s=60)


def test_a_range_of_offsets_is_read_exactly_once(group: Group, broker: Broker, service: Service, sample: Sample):
    broker.produce(group.topic, [*values(sample, 0, 150), b"bad", *values(sample, 150, 300)], partition=0)
    broker.produce(group.topic, values(sample, 300, 310), partition=1)
    address = f"kafka://{group.topic}/0:100-201"
    ended = backfill(group, address)
    assert (ended.returncode, ended.counts()) == (3, (101, 100, 1, 0, 0)), ended.stderr
    service.assert_holds_exactly(sample.ids[100:200])
    assert not group.shipper.state.exists()
    (letter,) = broker.table(group.letters).values()
    assert (letter.value, letter.headers["shipper.offset"]) == (b"bad", b"150")
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"], counts["rows_accepted"]) == (101, 100, 1, 100)
    again = group.shipper.run("backfill", address, settings=QUICK, check=False)
    assert (again.returncode, "nothing is left to read in this range" in again.stderr) == (0, True), again.stderr
    other = backfill(group, address, "--again", "once")
    assert other.counts() == (101, 100, 1, 0, 0), other.stderr
    assert service.received == 200
    assert not broker.committed(group.name, group.topic), "the members' own offsets moved"


def test_a_range_of_times_is_resolved_by_the_brokers_and_later_records_are_read_by_the_next_run(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    # Today, because records older than a week are deleted.
    noon = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
    days = [noon - timedelta(days=age) for age in (4, 3, 2)]
    for number, day in enumerate(days):
        lines = values(sample, 100 * number, 100 * (number + 1))
        broker.produce(group.topic, lines, timestamp_ms=int(1000 * day.timestamp()))
    times = "--since", f"{days[1]:%Y-%m-%d}T00:00:00Z"
    bounded = [f"kafka://{group.topic}", *times, "--until", f"{days[1]:%Y-%m-%d}"]
    shown = group.shipper.run("backfill", *bounded, "--dry-run", check=False)
    assert [line.partition(": ")[2] for line in shown.stdout.splitlines()[:2]] == ["offsets 50 to 100"] * 2, shown
    ended = backfill(group, *bounded)
    assert (ended.returncode, ended.counts()) == (0, (100, 100, 0, 0, 0)), ended.stderr
    service.assert_holds_exactly(sample.ids[100:200])
    opened = [f"kafka://{group.topic}", *times]
    assert backfill(group, *opened).counts()[:2] == (200, 200)
    broker.produce(group.topic, values(sample, 300, 310))
    assert backfill(group, *opened).counts()[:2] == (10, 10)
    service.assert_holds_exactly(sample.ids[100:310])
    later, earlier = ("--since", f"{noon + timedelta(days=2):%Y-%m-%d}"), ("--until", "1969-12-30")
    for options in (later, (*later, "--dry-run"), (*earlier, "--dry-run")):
        nothing = group.shipper.run("backfill", f"kafka://{group.topic}", *options, settings=QUICK, check=False)
        said = nothing.stdout + nothing.stderr
        assert (nothing.returncode, "there are no messages in this range\n" in said) == (0, True), nothing
        assert "nothing is left" not in said


def test_a_range_ends_even_if_no_record_is_at_its_end(group: Group, broker: Broker, service: Service, sample: Sample):
    """A control record of the broker follows a transaction; a partition may be empty."""
    broker.produce(group.topic, values(sample, 0, 10), partition=0, transaction=f"{group.name}-producer")
    # The brokers write it after they have confirmed the transaction.
    wait_until(lambda: broker.ends(group.topic) == {0: 11, 1: 0}, "the control record is written")
    ended = backfill(group, f"kafka://{group.topic}")
    assert (ended.returncode, ended.counts()) == (0, (10, 10, 0, 0, 0)), ended.stderr


@pytest.mark.parametrize("until", ["", "2100-01-01"])
def test_records_behind_an_open_transaction_are_in_the_range(
    until: str, group: Group, broker: Broker, service: Service, sample: Sample
):
    producer = broker.begin(group.topic, b"bad")
    broker.produce(group.topic, values(sample, 0, 10))
    running = start(group, f"kafka://{group.topic}", *(["--until", until] if until else []))
    running.wait_for("transactions_open")
    producer.abort_transaction(30)
    ended = running.finish(limit_s=60)
    assert (ended.returncode, ended.counts()) == (0, (10, 10, 0, 0, 0)), ended.stderr


def test_missing_records_partitions_and_topics_are_named(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 100), partition=0)
    settled = f"kafka://{group.topic}/0:0-10"
    assert backfill(group, settled).counts() == (10, 10, 0, 0, 0)
    broker.delete_records(group.topic, 0, 60)
    again = backfill(group, settled)
    assert (again.returncode, "deleted" in again.stderr) == (0, False), again.stderr
    wrong = {
        f"kafka://{group.topic}/0:50-200": f"{group.topic}/0 ends at 100, before 200",
        f"kafka://{group.topic}/7": f"topic {group.topic} has no partition 7",
        f"kafka://{group.topic}/0:9-9": "must increase",
        "kafka://": "use kafka://TOPIC",
        "kafka://nowhere": "nowhere: the topic does not exist; correct its name",
    }
    for address, words in wrong.items():
        for options in ((), ("--dry-run",)):
            refused = group.shipper.run("backfill", address, *options, check=False)
            assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
            assert "input.kafka.topics" not in refused.stderr
    stopped = backfill(group, f"kafka://{group.topic}/0:50-100")
    assert (stopped.returncode, stopped.counts()) == (4, (0, 0, 0, 0, 0)), stopped.stderr
    assert stopped.summary is not None
    assert stopped.summary["outcome"] == "gave_up"
    assert "records 50 to 59 were deleted before they were read" in stopped.summary["message"]
    assert "give_up_after" not in stopped.summary["message"]
    group.write(on_gap="continue")
    assert backfill(group, f"kafka://{group.topic}/0:50-100").counts() == (40, 40, 0, 0, 0)
    gone = backfill(group, f"kafka://{group.topic}/0:10-30")
    assert (gone.returncode, "records 10 to 29 were deleted before" in gone.stderr) == (0, True), gone.stderr
    assert sums(broker.table(group.ledger))["unreachable"] == 30


def test_the_next_run_reads_the_rest_after_a_stop(group: Group, broker: Broker, service: Service, sample: Sample):
    broker.produce(group.topic, values(sample, 0, 2000))
    hindered = {"delivery.rate_limit_events_per_second": 200, "batch.max_events": 20}
    slow = start(group, f"kafka://{group.topic}", **hindered, **{"delivery.drain_timeout_seconds": 0.5})
    slow.wait_until(lambda: service.stored, "it delivers")
    slow.process.send_signal(signal.SIGTERM)
    first = slow.finish(limit_s=60)
    assert (first.returncode, first.counts()[4] > 0) == (4, True), first
    second = backfill(group, f"kafka://{group.topic}")
    assert second.returncode == 0, second.stderr
    service.assert_holds_exactly(sample.ids[:2000])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"] + counts["duplicates"]) == (2000, 2000)


@pytest.mark.long
def test_two_processes_share_a_range_and_one_finishes_it_alone(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    broker.produce(group.topic, values(sample, 0, 20_000))
    both = [start(group, f"kafka://{group.topic}", **{"delivery.rate_limit_events_per_second": 2000}) for _ in "12"]
    for running in both:
        running.wait_until(
            lambda running=running: re.search("1 partition (assigned|revoked)", running.stderr), "it has one partition"
        )
    both[0].kill()
    ended = both[1].finish(limit_s=120)
    assert ended.returncode == 0, ended.stderr
    service.assert_holds_exactly(sample.ids[:20_000])
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"]) == (20_000, 20_000)
