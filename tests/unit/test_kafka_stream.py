"""A partition as a stream: offsets of messages, contents of dead letters, and start offsets."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.config.settings import KafkaSettings
from shipper.kafka.documents import UNKNOWN, Metadata, add_checkpoints, letter_document, read_metadata
from shipper.kafka.member_status import MemberStatus
from shipper.kafka.offsets import PartitionOffsets, Start, _partition_state, diverged_at, parse_addresses, start_of
from shipper.kafka.stream import KafkaStream, Position, Session
from shipper.model.errors import SourceError
from shipper.model.records import Checkpoint, Rejection
from shipper.state.ledger import unpack
from tests.cases import each

UNREADABLE: list[tuple[str, bytes | None]] = [("not UTF-8", None)]
SETTINGS = KafkaSettings(brokers=("localhost:9092",), topics=("t",), group_id="g")


class Message(NamedTuple):
    at: int
    data: bytes | None
    name: bytes | None = None
    marks: list[tuple[str, bytes | None]] | None = None
    epoch: int | None = None

    def value(self) -> bytes | None:
        return self.data

    def key(self) -> bytes | None:
        return self.name

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        if self.marks == UNREADABLE:
            raise SystemError("returned a result with an exception set")
        return self.marks

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000 * self.at

    def leader_epoch(self) -> int | None:
        return self.epoch


def stream(**fields: object) -> KafkaStream:
    return KafkaStream(
        **{"stream_id": 1, "path": "t/0", "topic": "t", "partition": 0, "topic_id": "id", "first": 0, **fields},
        session=Session("s"),
    )


VALUES = st.one_of(
    st.none(),
    st.sampled_from([b"", b" ", b"\n", b"\0", b"{}\n{}", b"\0\0\0\0\1{}", b"\0\0\0\0\1x", b"a\r\nb"]),
    st.sampled_from([BOM_UTF8, BOM_UTF8 + b"{}"]),
    st.binary(max_size=40),
)


@given(st.lists(st.lists(st.tuples(VALUES, st.integers(1, 5)), min_size=1, max_size=8), max_size=5))
def test_each_line_maps_to_its_message(groups: list[list[tuple[bytes | None, int]]]):
    partition, offset = stream(), 0
    expected: list[tuple[int, int, Message]] = []
    for group in groups:
        messages = []
        for value, step in group:
            offset += step
            messages.append(Message(offset, value, b"k" if offset % 2 else None))
        chunks = partition.chunks(messages)
        lines = [(chunk.start_offset + at, line) for chunk in chunks for at, line in lines_of(chunk.data)]
        assert len(lines) == len(messages)
        for (start, line), message in zip(lines, messages, strict=True):
            assert line.strip(b" \t\r\n\0"), "no line is blank, or it would be no record"
            expected.append((start, start + len(line) + 1, message))
    for start, end, message in expected:
        origin = partition.origin(start)
        assert (origin.offset, origin.key) == (message.at, message.name)
        assert partition.position_at(end) == message.at + 1
        line = message.data or b"" if origin.is_line else b"anything"
        document = letter_document(partition, rejection(start, line), 5.0, "g")
        assert document.value == (b"null" if message.data is None else message.data)
        assert document.key == f"id/0/{message.at}"


def lines_of(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    for line in data.split(b"\n")[:-1]:
        found.append((at, line))
        at += len(line) + 1
    return found


def rejection(start: int, raw: bytes) -> Rejection:
    return Rejection(start_offset=start, end_offset=start + len(raw), rule="json", message="no", raw=raw)


def test_unreadable_headers_are_dropped_but_not_their_message():
    partition = stream()
    marks = [UNREADABLE, [("a", b"1")], None, UNREADABLE, [("b", b"2")], UNREADABLE]
    (chunk,) = partition.chunks([Message(offset, b"{}", marks=each) for offset, each in enumerate(marks)])
    origins = [partition.origin(chunk.start_offset + at) for at, _ in lines_of(chunk.data)]
    assert [origin.offset for origin in origins] == [*range(6)]
    assert [origin.headers for origin in origins] == [(), [("a", b"1")], (), (), [("b", b"2")], ()]


def test_settled_messages_are_dropped_and_the_end_of_the_partition_is_passed():
    partition = stream()
    (first,) = partition.chunks([Message(3, b"{}"), Message(7, b"{}")])
    (second,) = partition.chunks([Message(9, b"{}")])
    partition.eof = 12  # behind the last message stand records of aborted transactions
    partition.note_end(12, 100.0)
    assert partition.lag_records == 12
    partition.note_saved(first.start_offset + 3)
    assert (partition.next_offset, len(partition.blocks)) == (4, 2)
    partition.note_saved(first.end_offset)
    assert (partition.next_offset, len(partition.blocks)) == (8, 1)
    partition.note_saved(second.end_offset)
    assert (partition.next_offset, len(partition.blocks), partition.lag_records) == (12, 0, 0)
    assert partition.settled_until == 100.0


def test_the_epoch_of_a_position_is_that_of_the_message_before_it():
    partition = stream()
    (first,) = partition.chunks([Message(3, b"{}", epoch=1), Message(4, b"{}", epoch=1)])
    (second,) = partition.chunks([Message(5, b"{}", epoch=1), Message(6, b"{}", epoch=2)])
    (third,) = partition.chunks([Message(7, b"{}")])
    partition.note_eof(9)
    ends = [first.start_offset + 3, first.end_offset, second.start_offset + 3, second.end_offset, third.end_offset]
    assert [*map(partition.message_end, ends)] == [
        Position(4, 1), Position(5, 1), Position(6, -1), Position(7, 2), Position(8, -1),
    ]  # fmt: skip
    assert partition.position_at(third.end_offset) == 9


def test_offsets_without_records_are_to_be_committed_once_nothing_is_unsettled():
    partition = stream(committed=0)
    assert not partition.is_ahead
    (chunk,) = partition.chunks([Message(0, b"{}")])
    partition.note_eof(3)
    assert not partition.is_ahead, "a message is unsettled"
    partition.note_saved(chunk.end_offset)
    assert partition.is_ahead
    partition.committed = partition.position_at(chunk.end_offset)
    assert (partition.committed, partition.message_end(chunk.end_offset)) == (3, Position(1))
    assert not partition.is_ahead
    partition.note_eof(5)
    assert partition.is_ahead
    partition.stopped = "records are missing"
    assert not partition.is_ahead
    assert not stream(committed=0, until=3, eof=3).is_ahead, "a range moves its offset itself"


def test_an_oversized_value_is_kept_for_its_dead_letter():
    partition = stream(max_record_bytes=3)
    (chunk,) = partition.chunks([Message(0, b"abcdef"), Message(1, b"abc")])
    assert letter_document(partition, rejection(chunk.start_offset, b"abc"), 0.0, "g").value == b"abcdef"


def test_tombstones_are_skipped_on_request():
    partition = stream(skips_tombstones=True)
    assert not partition.chunks([Message(0, None)])
    (chunk,) = partition.chunks([Message(1, None), Message(2, b"{}")])
    assert (chunk.data, partition.position_at(chunk.end_offset), partition.tombstones_skipped) == (b"{}\n", 3, 2)


def checkpoint(partition: KafkaStream, messages: int, ledger: dict[Any, int], **fields: Any) -> Checkpoint:
    """Settle the first messages of a partition."""
    (chunk,) = partition.chunks([Message(at, b"{}") for at in range(messages)])
    counts = {"accepted": len(ledger), "duplicates": 0, "rejections": [], "tail": b"", **fields}
    counts["read"] = counts["accepted"] + counts["duplicates"] + len(counts["rejections"])
    return Checkpoint(stream=partition, end_offset=chunk.end_offset, ledger=[ledger], **counts)


def test_the_ledger_has_the_sums_of_a_session():
    partition = stream()
    key, name = ("2026-01-01T00", 1, "aff", "5"), ("2026-01-01T00", 1, "J. Doe", "5")
    refused = {"rejections": [rejection(1, b"{}")], "duplicates": 1, "repeated": [{key: 1}]}
    settled = checkpoint(partition, 2, {key: 1, name: 1}, **refused)
    session, documents = add_checkpoints(partition, [settled], "g")
    rows = {each.key: msgspec.json.decode(each.value) for each in documents}
    assert rows["id/0/s/2026-01-01T00/1/aff/5"] == {"accepted": 1, "duplicates": 1}
    assert rows["id/0/s/2026-01-01T00/1/(other)/5"] == {"accepted": 1, "duplicates": 0}
    assert rows["id/0/s/totals"] == {
        "read": 4, "accepted": 2, "dead_lettered": 1, "duplicates": 1, "unreachable": 0,
        "offset": 2, "topic": "t", "group": "g", "version": 1,
    }  # fmt: skip
    assert not partition.session.totals, "it counts once it is committed"
    partition.session = session
    assert add_checkpoints(partition, [settled], "g")[0].totals["read"] == 8


def test_counts_of_rare_keys_are_a_separate_document():
    partition = stream()
    keys = [("2026-01-01T00", 1, f"a{media}", str(media)) for media in range(300)]
    name = ("2026-01-01T00", 1, "J. Doe", "5")
    settled = checkpoint(partition, 1, dict.fromkeys(keys, 1), duplicates=1, repeated=[{name: 1}])
    session, (first, totals) = add_checkpoints(partition, [settled], "g")
    assert (first.key, totals.key, session.sums) == ("id/0/s/part-0", "id/0/s/totals", {})
    rows = set(zip(*unpack(first.value or b""), strict=True))
    assert rows == {*((*key, 1, 0) for key in keys), ("2026-01-01T00", 1, "(other)", "5", 0, 1)}
    assert not partition.session.parts, "it has its name once it is committed"
    partition.session = session
    assert add_checkpoints(partition, [settled], "g")[1][0].key == "id/0/s/part-1"


def test_counts_that_are_too_large_for_a_message_are_halved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shipper.kafka.documents._PART_BYTES", 1000)
    partition = stream()
    keys = [("2026-01-01T00", 1, f"{media * 7919:x}", str(media)) for media in range(1000)]
    session, (*parts, _) = add_checkpoints(partition, [checkpoint(partition, 1, dict.fromkeys(keys, 1))], "g")
    assert len(parts) == session.parts > 1
    assert [each.key for each in parts] == [f"id/0/s/part-{number}" for number in range(len(parts))]
    rows = {row for each in parts for row in zip(*unpack(each.value or b""), strict=True)}
    assert rows == {(*key, 1, 0) for key in keys}


OWN = Metadata("id")


def offsets(committed: int | None, metadata: Metadata = OWN, **changes: object) -> PartitionOffsets:
    at = PartitionOffsets("t", 0, topic_id="id", low=10, high=20, end=20, committed=committed, metadata=metadata)
    return at._replace(**{"initial_partitions": None if committed is None else 1, **changes})


def after(offset: int, epoch: int, settled_until: float | None = None) -> Metadata:
    return Metadata("id", settled_until, Position(offset, epoch))


@each(
    ("at", "start", "offset", "words"),
    [
        *((offsets(at), "end", at, "") for at in (10, 15, 20)),
        (offsets(None), "beginning", 10, ""),
        (offsets(None), "end", 20, ""),
        (offsets(None), "stop", 10, 'input.kafka.start is "stop". To read it, change that'),
        (offsets(None, initial_partitions=0), "end", 10, ""),
        (offsets(None, initial_partitions=1), "end", 20, ""),
        (offsets(None, initial_partitions=0), "stop", 10, ""),
        (offsets(7), "end", 10, "records 7 to 9 were deleted before they were read"),
        (offsets(21), "end", 20, "the group is at offset 21, and the partition ends at 20"),
        *((offsets(15, topic_id="new"), at, 10, "the topic was deleted and recreated") for at in ("beginning", "end")),
        (offsets(15, UNKNOWN), "end", 15, ""),
        (offsets(15, after(14, 1)), "end", 14, ""),
        (offsets(15, after(9, 1)), "end", 15, ""),
        (offsets(15, after(14, 1), diverged_at=14), "end", 14, ""),
        (offsets(15, after(14, 1), diverged_at=12), "end", 12, "lost records 12 to 13, which the group has"),
        (offsets(25, after(25, 1), diverged_at=12), "end", 12, "lost records 12 to 24, which the group has"),
        (offsets(15, diverged_at=-1), "end", 10, "lost records 10 to 14, which the group has read"),
    ],
)
def test_where_a_partition_begins(at: PartitionOffsets, start: str, offset: int, words: str):
    settings = msgspec.structs.replace(SETTINGS, start=start)
    where = start_of(at, settings)
    assert (where.offset, bool(where.gap), where.is_stopped) == (offset, bool(words), bool(words))
    assert words in where.gap
    onward = start_of(at, msgspec.structs.replace(settings, on_gap="continue"))
    assert onward.is_stopped == (at.committed is None and bool(words))
    assert onward.missing == (3 if "deleted before" in words else 0)


@each(
    ("others", "reason", "words"),
    [
        ([], "broker_unavailable", "t/0: the partition has no leader"),
        ([offsets(7, partition=1)], "input_gap", "t/1: records 7 to 9 were deleted"),
        ([offsets(7, partition=1), offsets(5, partition=2, low=8)], "input_gap", "t/2: records 5 to 7 were deleted"),
    ],
)
def test_a_gap_is_reported_before_a_partition_without_a_leader(others: list[PartitionOffsets], reason: str, words: str):
    starts = [(at, start_of(at, SETTINGS)) for at in (offsets(5, topic_id="", low=5, end=5), *others)]
    streams = [
        stream(
            path=f"t/{at.partition}",
            partition=at.partition,
            first=start.offset,
            end=at.end,
            stopped=start.gap,
            is_leaderless=start.is_leaderless,
        )
        for at, start in starts
    ]
    (obstacle,) = MemberStatus(SETTINGS, wall_time=lambda: 1.0).state(streams, is_paused=False).obstacles
    assert obstacle.reason == reason
    assert obstacle.message.startswith(words)
    assert obstacle.message.endswith(f"; and {len(others)} more partitions") == bool(others)
    for partition in streams:
        partition.note_end(partition.first, 1.0)
        assert partition.settled_until is None, "although nothing is left after the gap"


def test_the_brokers_check_the_epoch_unless_reading_begins_elsewhere():
    onward = msgspec.structs.replace(SETTINGS, on_gap="continue")
    assert start_of(offsets(15, after(14, 3)), SETTINGS) == Start(14, epoch=3)
    assert start_of(offsets(15, after(9, 3)), SETTINGS).epoch == -1
    assert start_of(offsets(15, after(14, 3), diverged_at=12), onward).epoch == -1
    assert start_of(offsets(25, after(24, 3)), SETTINGS).epoch == -1
    shorter = start_of(offsets(25, after(24, 3)), onward)
    assert shorter.gap
    assert (shorter.offset, shorter.epoch) == (24, 3), "the brokers tell where the log diverged"


def test_a_position_before_transaction_markers_is_not_a_backlog():
    at = offsets(20, after(19, 1, 5.0))
    state = _partition_state(at, SETTINGS, 9.0)
    assert (state.offset, state.lag_records, state.delivered_until) == (20, 0, 9.0)


@each(("at", "delivered_until"), [(9.0, 5.0), (4.0, None)])
def test_a_time_of_a_member_is_not_believed_before_it_has_come(at: float, delivered_until: float | None):
    assert _partition_state(offsets(15, after(14, 1, 5.0)), SETTINGS, at).delivered_until == delivered_until


@each(
    ("topics", "words"),
    [
        (("", ""), ""),
        (("g.dead-letters", "g.ledger"), ""),
        (("g.dead-letters", "x"), "input.kafka.ledger_topic is x there and g.ledger here; "),
        (("y", "x"), "input.kafka.dead_letter_topic is y there and g.dead-letters here and ledger_topic is x there"),
    ],
)
def test_a_commit_of_a_member_with_other_topics_is_reported(topics: tuple[str, str], words: str):
    known = Metadata("id", letters=topics[0], ledger=topics[1])
    message = _partition_state(offsets(15, read_metadata(known.text())), SETTINGS, 9.0).message
    assert words in message
    assert bool(message) == bool(words)


@each(("at", "low"), [(7, 10), (15, 10), (20, 20), (25, 10)])
def test_a_commit_of_another_program_is_reported_without_a_guess_at_what_is_missing(at: int, low: int):
    state = _partition_state(offsets(at, UNKNOWN, low=low), SETTINGS, 9.0)
    assert (state.state, state.delivered_until) == ("reading", None)
    assert state.message.startswith(f"t/0: another program has moved the group to {at}; ")


@each("start", ["beginning", "end"])
def test_nothing_is_delivered_before_a_member_has_saved_where_it_begins(start: str):
    settings = msgspec.structs.replace(SETTINGS, start=start)
    assert _partition_state(offsets(None), settings, 9.0).delivered_until is None
    assert _partition_state(offsets(None, low=20), settings, 9.0).delivered_until == 9.0, "it is empty"


def test_a_checkpoint_without_records_keeps_the_position():
    partition = stream(first=5, first_epoch=2)
    start = partition.read_offset
    assert (partition.position_at(start), partition.message_end(start)) == (5, Position(5, 2))
    (chunk,) = partition.chunks([Message(7, b"{}", epoch=3)])
    assert partition.position_at(start) == 5, "the message is not passed"
    partition.note_saved(chunk.end_offset)
    assert (partition.position_at(chunk.end_offset), partition.message_end(start)) == (8, Position(8, 3))
    assert partition.position_at(start) == 8, "it does not go back"


@each(
    ("text", "offset"),
    [
        ("Partition log truncation detected at offset 200 (leader epoch 0): broker end offset is 100 (offset leader "
         "epoch 0). Reset to INVALID.: Broker: Log truncation detected (broker 3)", 100),
        ("No epoch found less or equal to offset 200 (leader epoch 5): broker end offset is -1 (offset leader epoch "
         "-1). Reset using configured policy.: Broker: Log truncation detected (broker 3)", -1),
        ("fetch failed due to requested offset not available on the broker: Broker: Offset out of range", None),
    ],
)  # fmt: skip
def test_the_client_tells_where_a_log_diverged(text: str, offset: int | None):
    assert diverged_at(text) == offset


def test_foreign_metadata_is_ignored():
    assert read_metadata(None) is UNKNOWN
    assert read_metadata("other") is UNKNOWN
    for metadata in (Metadata("x", 5.0), Metadata("x", 5.0, Position(7, 2))):
        assert read_metadata(metadata.text()) == metadata


# Ranges -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), max_size=5), st.integers(0, 40))
def test_nothing_is_read_after_the_end_of_a_range_and_the_last_line_advances_to_it(groups: list[list[int]], until: int):
    partition, offset, wanted = stream(until=until), 0, 0
    for group in groups:
        if partition.is_complete:
            break
        messages = []
        for step in group:
            messages.append(Message(offset, b"{}"))
            offset += step
        chunks = partition.chunks(messages)
        wanted += sum(message.at < until for message in messages)
        assert sum(len(block.offsets) for block in partition.blocks) == wanted
        assert partition.is_complete == (until == 0 or messages[-1].at >= until - 1)
        if chunks:
            position = partition.position_at(chunks[-1].end_offset)
            assert position == until if partition.is_complete else position == messages[-1].at + 1


def test_the_end_of_the_partition_after_the_range_is_ignored():
    """What lies between is read by a further run."""
    partition = stream(until=10)
    (chunk,) = partition.chunks([Message(3, b"{}")])
    partition.note_eof(20)
    assert partition.is_complete
    assert partition.position_at(chunk.end_offset) == 10


def test_addresses_name_topics_partitions_and_offsets():
    selection = parse_addresses(["kafka://a", "kafka://b/3", "kafka://b/4:10-20"], None, None)
    assert selection.parts == {("a", None): None, ("b", 3): None, ("b", 4): range(10, 20)}
    own = selection.settings(SETTINGS)
    assert (own.topics, own.letters, own.ledger) == (("a", "b"), "g.dead-letters", "g.ledger")
    assert own.group_id == f"g.backfill.{selection.name}"
    assert selection.name == parse_addresses(["kafka://b/4:10-20", "kafka://b/3", "kafka://a"], None, None).name
    assert selection.name != parse_addresses(["kafka://a", "kafka://b/3", "kafka://b/4:10-21"], None, None).name


@each(
    ("address", "words"),
    [
        ("kafka://", " names no topic; use kafka://TOPIC, "),
        ("kafka:///3", " names no topic"),
        ("a.ndjson", " names no topic"),
        ("kafka://a/", ": '' is not the number of a partition; use kafka://TOPIC, "),
        ("kafka://a/x:1-2", ": 'x' is not the number of a partition"),
        ("kafka://a/-1", ": '-1' is not the number of a partition"),
        ("kafka://a/1:200", ": '200' is not a range of offsets, such as 1000-2000; use kafka://TOPIC, "),
        ("kafka://a/1:-", ": '-' is not a range of offsets"),
        ("kafka://a/1:2-\u0663", ": '2-\u0663' is not a range of offsets"),
        ("kafka://a/1:5-5", ": the offsets must increase; the second one is exclusive"),
        ("kafka://a/1:200-100", ": the offsets must increase"),
    ],
)
def test_the_malformed_part_of_an_address_is_named(address: str, words: str):
    with pytest.raises(SourceError, match=re.escape(address + words)):
        parse_addresses([address], None, None)


@each("addresses", [["kafka://a", "kafka://a/1"], ["kafka://a/1", "kafka://a"], ["kafka://a/1", "kafka://a/1:2-3"]])
def test_repeated_partitions_are_refused(addresses: list[str]):
    with pytest.raises(SourceError, match=re.escape(f"{addresses[-1]}: a partition is named twice")):
        parse_addresses(addresses, None, None)


def test_offsets_stand_without_times():
    with pytest.raises(SourceError, match="offsets cannot be combined with --since"):
        parse_addresses(["kafka://a/1:2-3"], 0.0, None)


def test_headers_that_look_like_those_of_a_letter_are_removed():
    partition = stream()
    marks = [("trace", b"1"), ("shipper.tombstone", b"true"), ("shipper.consumer_id", b"\xff")]
    partition.chunks([Message(3, b"x", marks=marks)])
    headers = letter_document(partition, rejection(1, b"x"), 5.0, "g").headers
    assert [name for name, _ in headers if name in {"trace", "shipper.tombstone", "shipper.consumer_id"}] == ["trace"]


def test_a_partition_that_waits_for_its_start_begins_there_though_its_end_is_known():
    partition = stream(first=7, is_waiting=True)
    partition.note_eof(510)
    assert partition.position_at(partition.read_offset) == 7
