"""Read-only commands, erasure and replays on a group's data in the brokers."""

from __future__ import annotations

import json
import os
import subprocess
from codecs import BOM_UTF8

from tests.e2e.conftest import Sample
from tests.e2e.driver import SHIPPER, Service, Shipper, changed
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.kafka.broker import Broker, sums
from tests.e2e.kafka.conftest import Group
from tests.e2e.kafka.test_member import values


def test_the_commands_show_dead_letters_and_ledger_of_a_group_like_those_of_a_directory(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    bad = [
        changed(line, Timestamp="2026-01-15 10:00:00", AffiliateID="J. Doe").rstrip(b"\n")
        for line in sample.lines[500:503]
    ]
    named = changed(sample.lines[503], AffiliateID="J. Doe").rstrip(b"\n")
    for part in (values(sample, 0, 250), [*bad, None, named], values(sample, 250, 500)):
        broker.produce(group.topic, part)
        group.finish(group.member())
    run = group.shipper.run
    listed = run("dead-letters", "list", "--format", "json", check=False)
    letters = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [each["rule"] for each in letters].count("timestamp") == 3, listed
    assert {each["path"].rpartition("/")[0] for each in letters} == {group.topic}
    exported = run("dead-letters", "export", "--reason", "timestamp", check=False).stdout.encode()
    assert sorted(exported.splitlines()) == sorted(bad)
    ledger = run("ledger", "--format", "json", check=False)
    assert "J. Doe" not in ledger.stdout
    assert "(other)" in ledger.stdout
    assert sum(row["accepted"] for row in json.loads(ledger.stdout)["rows"]) == 501
    replay = ["dead-letters", "replay", "--summary", "json"]
    failed = run(*replay, "--limit", "1", check=False)
    assert (failed.returncode, failed.summary and failed.summary["dead_lettered"]) == (3, 1), failed
    listed = run("dead-letters", "list", "--format", "json", check=False)
    attempts = {each["start_offset"]: each["attempts"] for each in letters}
    changes = [
        each["attempts"] - attempts[each["start_offset"]] for each in map(json.loads, listed.stdout.splitlines())
    ]
    assert sorted(changes) == [0, 0, 0, 1]
    replayed = run(*replay, settings={"records.assume_timezone": "UTC"}, check=False)
    assert (replayed.returncode, replayed.summary and replayed.summary["accepted"]) == (3, 3), replayed
    service.assert_holds_exactly(sample.ids[:504])
    assert "1 dead letter is of a message that is empty or has no value" in replayed.stderr
    (left,) = run("dead-letters", "list", "--format", "json", check=False).stdout.splitlines()
    assert json.loads(left)["rule"] == "json"
    ledger = run("ledger", "--format", "json", check=False)
    assert sum(row["accepted"] for row in json.loads(ledger.stdout)["rows"]) == 504
    counts = sums(broker.table(group.ledger))
    assert counts["read"] == counts["accepted"] + counts["dead_lettered"] + counts["duplicates"]
    assert (counts["accepted"], counts["rows_accepted"], counts["dead_lettered"]) == (504, 504, 1)
    refused = run("dead-letters", "purge", "1", "--yes", check=False)
    assert (refused.returncode, "TOPIC/PARTITION:OFFSET" in refused.stderr) == (2, True), refused
    purged = run("dead-letters", "purge", json.loads(left)["id"], "--yes", check=False)
    assert (purged.returncode, "1 dead letter deleted; its bytes remain" in purged.stderr) == (0, True), purged
    left = run("dead-letters", "list", "--format", "json", check=False).stdout.splitlines()
    assert left == []
    assert not group.shipper.state.exists()


def test_a_consumer_is_erased_from_the_letters_of_a_group(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    own = [changed(line, ConsumerID=4711, IP="no").rstrip(b"\n") for line in sample.lines[:2]]
    other = changed(sample.lines[2], ConsumerID=47110, IP="no").rstrip(b"\n")
    doubtful = b"it says 4711"
    broker.produce(group.topic, [*own, other, doubtful, *values(sample, 3, 10)], partition=1)
    running = group.member()
    running.wait_until(group.is_settled, "the group is at the end")
    purge = ["dead-letters", "purge", "--consumer-id", "4711", "--yes"]
    purged = group.shipper.run(*purge, check=False)
    assert purged.returncode == 4, purged
    assert "consumer 4711: 2 dead letters erased" in purged.stderr
    assert f"  {group.topic}/1:3\n" in purged.stderr
    assert running.stop().returncode == 0
    assert {each.value for each in broker.table(group.letters).values()} == {other, doubtful}


def test_a_replay_reads_a_message_like_a_member(group: Group, broker: Broker, service: Service, sample: Sample):
    naive = [changed(line, Timestamp="2026-01-15 10:00:00").rstrip(b"\n") for line in sample.lines[:20]]
    prefixed = [(BOM_UTF8 if number else b"\0\0\0\0\x09") + line for number, line in enumerate(naive)]
    avro, blank = b"\0\0\0\0\x2aavro", b"  "
    broker.produce(group.topic, [*prefixed, avro, blank], partition=0)
    group.finish(group.member())
    assert {each.value for each in broker.table(group.letters).values()} == {*prefixed, avro, blank}
    exported = group.shipper.run("dead-letters", "export", "--reason", "timestamp", check=False)
    assert exported.stdout.encode() == b"".join(line + b"\n" for line in naive)
    for topic in (group.letters, group.ledger):  # the new versions of the letters must still be with the old ones
        broker.add_partitions(topic, 5)
    settings = {"records.assume_timezone": "UTC"}
    replayed = group.shipper.run("dead-letters", "replay", "--summary", "json", settings=settings, check=False)
    assert replayed.counts() == (21, 20, 1, 0, 0), replayed
    service.assert_holds_exactly(sample.ids[:20])
    assert "of a message that is empty or has no value" in replayed.stderr
    left = {each.value: each.headers["shipper.message"] for each in broker.table(group.letters).values()}
    assert left.keys() == {avro, blank}
    assert b"schema 42" in left[avro]
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (22, 20, 2)


def test_the_ids_of_dead_letters_are_the_positions_of_messages(
    group: Group, broker: Broker, service: Service, sample: Sample
):
    bad = [b"first", None, b"", changed(sample.lines[0], Timestamp="2026-01-15 10:00:00").rstrip(b"\n")]
    broker.produce(group.topic, bad, keys=[b"one"] * 4, headers={"a": b"b"})
    group.finish(group.member())
    (number,) = (partition for partition, end in broker.ends(group.topic).items() if end)
    run, ids = group.shipper.run, [f"{group.topic}/{number}:{offset}" for offset in range(4)]
    lines = run("dead-letters", "list", check=False).stdout.splitlines()
    assert lines[0].split() == ["id", "time", "rule", "EventId", "message"]
    assert sorted(line.split()[0] for line in lines[1:5]) == ids
    shown = run("dead-letters", "show", ids[1], ids[0], ids[2], check=False).stdout
    assert shown.count("dead letter ") == 3
    assert f"input:         {group.topic}/{number}, offset 0\n  key:           one\n  headers:       a: b\n" in shown
    assert "\n(the message has no value (a tombstone))\n" in shown
    assert "\n(the message is empty)\n" in shown
    document = json.loads(run("dead-letters", "show", ids[3], "--format", "json", check=False).stdout)
    assert (document["id"], document["key"], document["headers"]) == (ids[3], "one", [["a", "b"]])
    tried = run("dead-letters", "replay", "--dry-run", check=False)
    assert f"dead letter {ids[0]}: " in tried.stdout, tried
    replayed = run("dead-letters", "replay", check=False)
    assert f'"letter":"{ids[0]}"' in replayed.stderr, replayed
    assert f"stored as dead letters in the topic {group.letters}: " in replayed.stderr
    assert "shipper-view" not in replayed.stderr
    purged = run("dead-letters", "purge", ids[0], f"{group.topic}/{number}:9", "--yes", check=False)
    assert (purged.returncode, f"no dead letter {group.topic}/{number}:9; all: " in purged.stderr) == (2, True), purged
    purged = run("dead-letters", "purge", ids[0], ids[3], "--yes", check=False)
    assert (purged.returncode, "2 dead letters deleted" in purged.stderr) == (0, True), purged
    assert sorted(key.rpartition("/")[2] for key in broker.table(group.letters)) == ["1", "2"]
    counts = sums(broker.table(group.ledger))
    assert (counts["read"], counts["accepted"], counts["dead_lettered"]) == (4, 0, 4)


def test_the_later_of_two_replays_takes_over(group: Group, broker: Broker, fake: FakeService, sample: Sample):
    group.shipper.target = fake.target
    naive = [changed(line, Timestamp="2026-01-15 10:00:00").rstrip(b"\n") for line in sample.lines[:3]]
    broker.produce(group.topic, naive)
    group.finish(group.member())
    fake.default = HANG
    replay = ["dead-letters", "replay", "--summary", "json"]
    settings = {"records.assume_timezone": "UTC"}
    first = group.shipper.start(*replay, settings=settings, check=False)
    first.wait_until(lambda: fake.requests, "a request of the first replay hangs")
    fake.default = Reply()
    second = group.shipper.run(*replay, settings=settings, check=False)
    assert (second.returncode, second.counts()[:2]) == (0, (3, 3)), second
    fake.release()
    ended = first.finish()
    assert ended.returncode == 5, ended
    assert f"another replay or purge of group {group.name} has started" in ended.stderr
    assert broker.table(group.letters) == {}
    counts = sums(broker.table(group.ledger))
    assert (counts["accepted"], counts["rows_accepted"], counts["dead_lettered"]) == (3, 3, 0)


def test_a_purge_during_a_replay_is_not_undone(group: Group, broker: Broker, fake: FakeService, sample: Sample):
    group.shipper.target = fake.target
    naive, bad = (changed(line, Timestamp="2026-01-15 10:00:00").rstrip(b"\n") for line in sample.lines[:2])
    bad = changed(bad, IP="no", ConsumerID=4711).rstrip(b"\n")
    broker.produce(group.topic, [naive, bad])
    group.finish(group.member())
    fake.default = HANG
    settings = {"records.assume_timezone": "UTC"}
    replay = group.shipper.start("dead-letters", "replay", settings=settings, check=False)
    replay.wait_until(lambda: fake.requests, "a request of the replay hangs")
    purged = group.shipper.run("dead-letters", "purge", "--consumer-id", "4711", "--yes", check=False)
    assert (purged.returncode, "1 dead letter" in purged.stderr) == (0, True), purged
    fake.default = Reply()
    fake.release()
    ended = replay.finish()
    assert (ended.returncode, "another replay or purge" in ended.stderr) == (5, True), ended
    assert [each.value for each in broker.table(group.letters).values()] == [naive]


def test_a_purge_sees_letters_behind_an_open_transaction(group: Group, broker: Broker, sample: Sample):
    broker.begin(group.letters, b"x", timeout_ms=4000)
    broker.produce(group.topic, [b"bad"])
    group.finish(group.member())
    purged = group.shipper.run("dead-letters", "purge", "--all", "--yes", check=False)
    assert (purged.returncode, "1 dead letter deleted" in purged.stderr) == (0, True), purged
    assert broker.table(group.letters) == {}


def test_foreign_messages_among_the_dead_letters_are_skipped(group: Group, broker: Broker, sample: Sample):
    broker.produce(group.letters, [b"hello", b"you"], keys=[b"k", b"a/0/1"], headers={"shipper.rule": b"json"})
    broker.produce(group.topic, [b"bad"])
    group.finish(group.member())
    for command in (["list"], ["replay"], ["purge", "--all", "--yes"]):
        done = group.shipper.run("dead-letters", *command, check=False)
        assert f"the topic {group.letters} also contains 2 other messages: skipped" in done.stderr, done
        assert done.returncode == (3 if command == ["replay"] else 0), done
    assert "dead letters: 0 kept" in group.shipper.run("status", check=False).stdout
    assert set(broker.table(group.letters)) == {"k", "a/0/1"}


def test_foreign_messages_in_the_ledger_are_skipped(group: Group, broker: Broker, service: Service, sample: Sample):
    """By commands, and by a member whose offsets have expired."""
    broker.produce(group.topic, [*values(sample, 0, 9), b"bad"])
    group.finish(group.member())
    key, totals = next(each for each in broker.table(group.ledger).items() if each[0].endswith("/totals"))
    session, other = key.removesuffix("/totals"), key.rpartition("/")[0][:-12] + "other"
    counts = b'{"accepted":5,"duplicates":0}'
    rows = {
        "hello": b"you",
        f"{session}/totals2": b"{}",
        f"{session}2/totals": b"{}",
        f"{session}/part-1": b"x",
        f"{session}/2026-01-01T00/1/2/3": b"[]",
        f"{session}/1/1/2/3": counts,
        f"{other}/totals": (totals.value or b"").replace(group.name.encode() + b'",', b'another",'),
        f"{other}/2026-01-01T00/1/2/3": counts,
    }
    broker.produce(group.ledger, rows.values(), keys=[key.encode() for key in rows])
    broker.produce(group.ledger, [None], keys=[b"deleted"])
    done = group.shipper.run("ledger", "--format", "json")
    for messages in ("6 other messages", "2 messages of group another"):
        assert f"the topic {group.ledger} also contains {messages}: skipped" in done.stderr, done
    assert sum(row["accepted"] for row in json.loads(done.stdout)["rows"]) == 9
    (future,) = broker.admin.delete_consumer_groups([group.name]).values()
    future.result(10)
    broker.produce(group.topic, values(sample, 9, 20))
    group.finish(group.member())
    service.assert_holds_exactly(sample.ids[:20])
    assert service.received == 20


def test_the_letters_of_another_group_are_left_alone(broker: Broker, shipper: Shipper, service: Service):
    group = Group(broker, shipper)
    assert shipper.run("check", "--online", "--create-topics", check=False).returncode == 0
    broker.produce(group.topic, [b"bad"])
    group.finish(group.member())
    ((key, letter),) = broker.table(group.letters).items()
    assert letter.headers["shipper.group"] == group.name.encode()
    backfill, other = f"{group.name}.backfill.0", f"{group.name}2"
    for owner in (backfill, other):
        headers = letter.headers | {"shipper.group": owner.encode(), "shipper.offset": b"9"}
        broker.produce(group.letters, [b"other"], keys=[f"{key}{owner}".encode()], headers=headers)
    assert "dead letters: 2 kept" in shipper.run("status", check=False).stdout
    purged = shipper.run("dead-letters", "purge", "--all", "--yes", check=False)
    assert "2 dead letters deleted" in purged.stderr, purged
    assert f"the topic {group.letters} also contains 1 message of group {other}: skipped" in purged.stderr, purged
    assert [each.headers["shipper.group"].decode() for each in broker.table(group.letters).values()] == [other]
    checked = shipper.run("check", "--online", check=False)
    assert (checked.returncode, f"it contains dead letters of group {other}; " in checked.stdout) == (4, True), checked


def test_status_of_a_group_tolerates_a_reader_that_has_gone(group: Group):
    reader, writer = os.pipe()
    os.close(reader)
    command = [SHIPPER, "status", "--config", group.shipper.config, "--until", "now"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=group.shipper.environment(), check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
