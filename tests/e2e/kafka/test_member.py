"""`shipper run` as a member of a consumer group with a real broker: what it delivers, commits, keeps and reports."""

from __future__ import annotations

import json
import math
import time
from codecs import BOM_UTF8
from datetime import UTC, datetime

from confluent_kafka import Producer

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed
from tests.e2e.files import append
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.operated import Admin


def values(sample: Sample, start: int, end: int) -> list[bytes]:
    return [line.rstrip(b"\n") for line in sample.lines[start:end]]


def utc(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def test_a_member_delivers_a_topic_and_keeps_no_state(group: Group, broker: Broker, service: Service, sample: Sample):
    broker.produce(group.topic, values(sample, 0, 3000))
    group.finish(group.member())
    service.assert_holds_exactly(sample.ids[:3000])
    assert broker.committed(group.name, group.topic) == broker.ends(group.topic)
    counts = sums(broker.table(group.ledger))
    assert counts["read"] == counts["accepted"] == counts["rows_accepted"] == 3000
    assert not group.shipper.state.exists()


def test_the_next_member_resumes_where_the_last_one_stopped(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    for start in (0, 500):
        broker.produce(group.topic, values(sample, start, start + 500))
        group.finish(group.member())
    service.assert_holds_exactly(sample.ids[:1000])
    assert service.received == 1000
    assert sums(broker.table(group.ledger))["accepted"] == 1000


def test_each_bad_message_is_one_letter_byte_for_byte(group: Group, broker: Broker, service: Service, sample: Sample):
    good = values(sample, 0, 10)
    bad: list[bytes | None] = [
        b"not json",
        b"",
        b" \t ",
        None,
        b'{"EventId":\n"x"}',
        changed(sample.lines[10], ConsumerCountry="123").rstrip(b"\n"),
        b"\0\0\0\0\x07avro",
        b"\xff\xfe",
    ]
    prefixed = [b"\0\0\0\0\x09" + values(sample, 11, 12)[0], BOM_UTF8 + values(sample, 13, 14)[0]]
    spread = values(sample, 12, 13)[0].replace(b",", b",\n", 1)
    broker.produce(group.topic, [*good, *bad, *prefixed, spread], partition=1, headers={"trace": b"7"})
    running = group.member()
    group.finish(running)
    service.assert_holds_exactly([*sample.ids[:10], *sample.ids[11:14]])
    letters = sorted(broker.table(group.letters).values(), key=lambda each: int(each.headers["shipper.offset"]))
    assert [each.value for each in letters] == [b"null" if value is None else value for value in bad]
    assert [int(each.headers["shipper.offset"]) for each in letters] == list(range(10, 18))
    assert {each.headers["trace"] for each in letters} == {b"7"}
    assert {each.headers["shipper.partition"] for each in letters} == {b"1"}
    rules = [each.headers["shipper.rule"].decode() for each in letters]
    assert [rules[0], rules[5]] == ["json", "country"]
    assert letters[3].headers["shipper.tombstone"] == b"true"
    messages = [each.headers["shipper.message"].decode() for each in letters]
    assert messages[1:4] == ["the message is empty", "the message is blank", "the message has no value (a tombstone)"]
    assert "schema 7" in messages[6]
    logged = [each for each in map(json.loads, running.stderr.splitlines()) if each["event"] == "record_refused"]
    assert [(each["path"], each["offset"]) for each in logged] == [(f"{group.topic}/1", 10 + n) for n in range(8)]
    assert [each["message"] for each in logged] == messages
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (21, 13, 8)


def test_letters_contain_keys_and_tombstones_can_be_skipped(group: Group, broker: Broker, sample: Sample):
    broker.produce(group.topic, [b"{}", None, *values(sample, 0, 1)], keys=[b"one"] * 3)
    group.finish(group.member({"input.kafka.tombstones": "skip"}))
    (letter,) = broker.table(group.letters).values()
    assert (letter.value, letter.headers["shipper.key"]) == (b"{}", b"one")


def test_the_beginning_of_a_message_that_is_too_large_for_the_letters_is_stored(
    broker: Broker, shipper: Shipper, service: Service, sample: Sample
):
    group = Group(broker, shipper, 1)
    broker.create(group.letters, cleanup_policy="compact", max_message_bytes="40000")
    broker.create(group.ledger, cleanup_policy="compact")
    large = changed(sample.lines[0], Username="x" * 100_000).rstrip(b"\n")
    broker.produce(group.topic, [large, *values(sample, 1, 3)])
    broker.produce(group.topic, [b"bad"], headers={"long": b"y" * 100_000})
    broker.produce(group.topic, values(sample, 3, 5))
    settings: dict[str, object] = {"input.max_record_bytes": 20_000}
    running = group.member(settings)
    group.finish(running)
    assert "delivery_paused" not in running.stderr
    service.assert_holds_exactly(sample.ids[1:5])
    first, second = sorted(broker.table(group.letters).values(), key=lambda each: int(each.headers["shipper.offset"]))
    assert (first.value, first.headers["shipper.whole_bytes"]) == (large[:20_000], b"%d" % len(large))
    assert first.headers["shipper.consumer_id"].decode() == str(json.loads(large)["ConsumerID"])
    assert (second.value, "long" in second.headers, "shipper.whole_bytes" in second.headers) == (b"bad", False, False)
    replayed = shipper.run("dead-letters", "replay", "--summary", "json", settings=settings, check=False)
    assert (replayed.counts()[0], "1 dead letter was too long to be stored completely" in replayed.stderr) == (1, True)
    shown = shipper.run("dead-letters", "show", f"{group.topic}/0:0", check=False).stdout
    assert f"truncated: the first 20,000 of {len(large):,} bytes; it cannot be sent" in shown


def test_large_messages_are_letters_if_their_topic_accepts_them(
    broker: Broker, shipper: Shipper, service: Service, sample: Sample
):
    group = Group(broker, shipper, 1)
    group.topic += ".large"
    broker.create(group.topic, 1, max_message_bytes="4000000")
    group.write()
    assert shipper.run("check", "--online", "--create-topics", check=False).returncode == 0
    large = changed(sample.lines[0], Username="x" * 3_000_000).rstrip(b"\n")
    producer = Producer({"bootstrap.servers": broker.address, "message.max.bytes": 4_000_000})
    producer.produce(group.topic, large)
    assert not producer.flush(30)
    group.finish(group.member())
    (letter,) = broker.table(group.letters).values()
    assert letter.value == large


def test_check_says_how_large_dead_letters_may_be(group: Group, shipper: Shipper):
    checked = shipper.run("check", "--online", check=False)
    assert f"kafka:{group.letters}" in checked.stdout
    assert "max.message.bytes is 1048588, too small for the longest message" in checked.stdout
    assert "raise it to 1056780" in checked.stdout


def test_repeated_event_ids_are_sent_once(group: Group, broker: Broker, service: Service, sample: Sample):
    broker.produce(group.topic, values(sample, 0, 100) * 2, partition=0)
    running = group.member()
    group.finish(running)
    assert service.received == 100
    logged = [each for each in map(json.loads, running.stderr.splitlines()) if each["event"] == "duplicate_skipped"]
    assert [each["offset"] for each in logged] == [*range(100, 100 + len(logged))] != []
    counts = sums(broker.table(group.ledger))
    assert (counts["accepted"], counts["duplicates"], counts["rows_duplicates"]) == (100, 100, 100)


def test_two_members_share_the_partitions(group: Group, broker: Broker, service: Service, sample: Sample):
    first, second = group.member(), group.member()
    for running in (first, second):
        running.wait_until(lambda running=running: len(partitions(running)) == 1, "it has one partition")
    broker.produce(group.topic, values(sample, 0, 2000))
    first.wait_until(group.is_settled, "the group is at the end")
    for running in (first, second):
        admin = Admin(running)
        running.wait_until(
            lambda admin=admin: admin.metrics()["shipper_events_accepted_total"] == 1000, "half of them are accepted"
        )
    assert first.stop().returncode == 0
    second.wait_until(lambda: len(partitions(second)) == 2, "it has both partitions")
    assert second.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:2000])
    assert service.received == 2000


def partitions(running: object) -> list[dict[str, object]]:
    live = Admin(running).status()["live"]  # type: ignore[arg-type]
    return live["group"]["partitions"] if live and live["group"] else []


def test_status_covers_the_whole_group(group: Group, broker: Broker, shipper: Shipper, sample: Sample):
    broker.produce(group.topic, values(sample, 0, 100))
    seen = shipper.run("status", "--json", check=False)
    assert seen.returncode == 0, seen.stderr
    document = json.loads(seen.stdout)
    assert (document["members"], document["lag_records"]) == (0, 100)
    assert shipper.run("status", "--until", "now", check=False).returncode == 4
    running = group.member()
    running.wait_until(group.is_settled, "the group is at the end")
    document = json.loads(shipper.run("status", "--json", check=False).stdout)
    assert (document["members"], document["lag_records"]) == (1, 0)
    assert running.stop().returncode == 0
    answer = shipper.run("status", "--until", "now", check=False)
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.startswith("yes: ")


def test_held_records_are_no_dead_letters_after_a_restart_either(group: Group, broker: Broker):
    broker.produce(group.topic, [b"\0\0\0\0\x07avro"] * 40, partition=0)
    for _ in range(2):
        running = group.member({"records.mistake_limit": 20})
        running.wait_for("delivery_paused")
        ended = running.stop()
        assert (ended.returncode, "input_unlike_records" in ended.stderr, "schema 7" in ended.stderr) == (0, True, True)
        assert len(broker.table(group.letters)) == 20
    group.finish(group.member({"records.mistake_limit": 50}))
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["dead_lettered"], len(broker.table(group.letters))) == (40, 40, 40)


def test_what_is_delivered_stays_known_when_a_member_starts(group: Group, broker: Broker, sample: Sample):
    def seen() -> dict[str, object]:
        shown = group.shipper.run("status", "--json")
        assert shown.stdout, shown.stderr
        (partition,) = json.loads(shown.stdout)["partitions"][:1]
        return partition  # type: ignore[no-any-return]

    broker.produce(group.topic, values(sample, 0, 10), partition=0)
    running = group.member()
    running.wait_until(lambda: seen()["delivered_until"], "all are delivered, and the end was queried")
    assert running.stop().returncode == 0
    broker.produce(group.topic, values(sample, 10, 110), partition=0)
    before = seen()
    running = group.member({"delivery.rate_limit_events_per_second": 20, "batch.max_events": 5})
    running.wait_until(lambda: seen()["offset"] != before["offset"], "it has delivered some")
    assert seen()["delivered_until"] is not None
    group.finish(running)


def test_check_creates_the_topics_that_a_member_writes(broker: Broker, shipper: Shipper, service: Service):
    group = Group(broker, shipper)
    refused = shipper.run("run", check=False)
    assert refused.returncode == 2
    assert (
        f"{group.letters}: the topic does not exist; create it: shipper check --online --create-topics"
        in refused.stderr
    )
    checked = shipper.run("check", "--online", "--create-topics", check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "compacted" in checked.stdout
    assert "an empty transaction was committed" in checked.stdout
    running = group.member()
    running.wait_for("partitions_moved")
    assert running.stop().returncode == 0


def test_a_dead_letter_topic_with_deletion_by_age_is_refused(broker: Broker, shipper: Shipper, service: Service):
    group = Group(broker, shipper)
    broker.create(group.letters)
    broker.create(group.ledger, cleanup_policy="compact")
    refused = shipper.run("run", check=False)
    assert refused.returncode == 2
    assert "cleanup.policy is delete" in refused.stderr


def test_commands_that_need_a_state_directory_refuse_a_group(group: Group, shipper: Shipper):
    for command in (["ledger", "--erase-affiliate", "x"], ["pipe"], ["backfill", "events.ndjson"]):
        result = shipper.run(*command, check=False)
        assert result.returncode == 2, command
        assert group.letters in result.stderr


def test_records_move_from_files_to_a_topic_and_back_without_loss_or_repeat(
    group: Group, broker: Broker, service: Service, shipper: Shipper, sample: Sample
):
    """As `docs/kafka.md` describes it: inputs overlap in time, and each record is in one of them."""
    file = shipper.write("live/events.ndjson", *sample.lines[:100])
    intake = shipper.config.read_text().partition("[input.kafka]")[0]
    of_files = f"{intake}[state]\ndirectory = '{shipper.state}'\n[input]\ninclude = ['{file}']\n"
    settings = shipper.write("files.toml", of_files.encode())

    def run_with_files() -> Running:
        return shipper.start("run", "--config", settings, configured=False, env=shipper.environment())

    from_files = run_with_files()
    from_files.wait_until(lambda: service.received == 100, "the file is delivered")
    member = group.member()
    broker.produce(group.topic, [*values(sample, 100, 300), b"bad"])
    assert from_files.stop().returncode == 0
    member.wait_until(lambda: service.received == 300, "the topic is delivered")

    broker.produce(group.topic, values(sample, 300, 400))
    from_files = run_with_files()
    append(file, *sample.lines[400:500])
    until = math.ceil(time.time())
    member.wait_until(
        lambda: shipper.run("status", "--until", utc(until), check=False).returncode == 0, "the group is at the end"
    )
    assert member.stop().returncode == 0
    from_files.wait_until(lambda: service.received == 500, "the file is delivered")
    assert from_files.stop().returncode == 0

    service.assert_holds_exactly(sample.ids[:500])
    assert service.received == 500
    assert shipper.read_state().accepted == 200
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (301, 300, 1)
    assert "bad" in shipper.run("dead-letters", "export", check=False).stdout
