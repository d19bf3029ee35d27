"""A partition as a stream: where each message stands, what a dead letter has, and where to begin."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.config.settings import KafkaSettings
from shipper.kafka.begin import Begin, Found, begin
from shipper.kafka.documents import Metadata, counted, letter, read_metadata
from shipper.kafka.ranges import wanted
from shipper.kafka.stream import KafkaStream, Session, new_stream
from shipper.model.errors import SourceError
from shipper.model.records import Checkpoint, Rejection
from shipper.state.ledger_upkeep import unpacked
from tests.cases import each

SETTINGS = KafkaSettings(brokers=("localhost:9092",), topics=("t",), group_id="g")


class Message(NamedTuple):
    at: int
    data: bytes | None
    name: bytes | None = None
    marks: list[tuple[str, bytes | None]] | None = None

    def value(self) -> bytes | None:
        return self.data

    def key(self) -> bytes | None:
        return self.name

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self.marks

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000 * self.at


def stream(**fields: object) -> KafkaStream:
    return new_stream(
        **{"stream_id": 1, "path": "t/0", "topic": "t", "partition": 0, "topic_id": "id", "first": 0, **fields},
        session=Session("s"),
    )


VALUES = st.one_of(
    st.none(),
    st.sampled_from([b"", b" ", b"\n", b"\0", b"{}\n{}", b"\0\0\0\0\1{}", b"\0\0\0\0\1x", b"a\r\nb"]),
    st.binary(max_size=40),
)


@given(st.lists(st.lists(st.tuples(VALUES, st.integers(1, 5)), min_size=1, max_size=8), max_size=5))
def test_each_line_leads_back_to_its_message(groups: list[list[tuple[bytes | None, int]]]):
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
        document = letter(partition, rejection(start, lines_at(partition, start, message)), 5.0)
        assert document.value == (b"null" if message.data is None else message.data)
        assert document.key == f"id/0/{message.at}"


def lines_of(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    for line in data.split(b"\n")[:-1]:
        found.append((at, line))
        at += len(line) + 1
    return found


def lines_at(partition: KafkaStream, start: int, message: Message) -> bytes:
    return message.data or b"" if partition.origin(start).is_line else b"anything"


def rejection(start: int, raw: bytes) -> Rejection:
    return Rejection(start_offset=start, end_offset=start + len(raw), rule="json", message="no", raw=raw)


def test_what_is_settled_is_dropped_and_the_end_of_the_partition_is_passed():
    partition = stream()
    (first,) = partition.chunks([Message(3, b"{}"), Message(7, b"{}")])
    (second,) = partition.chunks([Message(9, b"{}")])
    partition.eof = 12  # behind the last message stand records of aborted transactions
    partition.note_ends(12, 100.0)
    assert partition.lag_records == 12
    partition.note_saved(first.start_offset + 3)
    assert (partition.next_offset, len(partition.blocks)) == (4, 2)
    partition.note_saved(first.end_offset)
    assert (partition.next_offset, len(partition.blocks)) == (8, 1)
    partition.note_saved(second.end_offset)
    assert (partition.next_offset, len(partition.blocks), partition.lag_records) == (12, 0, 0)
    assert partition.settled_until == 100.0


def test_a_value_that_is_too_long_for_a_record_is_kept_for_its_letter():
    partition = stream(max_record_bytes=3)
    (chunk,) = partition.chunks([Message(0, b"abcdef"), Message(1, b"abc")])
    assert letter(partition, rejection(chunk.start_offset, b"abc"), 0.0).value == b"abcdef"


def test_tombstones_are_skipped_where_that_was_asked_for():
    partition = stream(skips_tombstones=True)
    assert not partition.chunks([Message(0, None)])
    (chunk,) = partition.chunks([Message(1, None), Message(2, b"{}")])
    assert (chunk.data, partition.position_at(chunk.end_offset), partition.tombstones_skipped) == (b"{}\n", 3, 2)


def test_the_ledger_has_the_sums_of_a_session():
    partition = stream()
    (chunk,) = partition.chunks([Message(0, b"{}"), Message(1, b"{}")])
    key, name = ("2026-01-01T00", 1, "aff", "5"), ("2026-01-01T00", 1, "J. Doe", "5")
    checkpoint = Checkpoint(
        stream=partition, end_offset=chunk.end_offset, tail=b"", read=4, accepted=2, duplicates=1,
        rejections=[rejection(chunk.start_offset, b"{}")], ledger=[{key: 1, name: 1}], repeated=[{key: 1}],
    )  # fmt: skip
    session, documents = counted(partition, [checkpoint])
    rows = {each.key: msgspec.json.decode(each.value) for each in documents}
    assert rows["id/0/s/2026-01-01T00/1/aff/5"] == {"accepted": 1, "duplicates": 1}
    assert rows["id/0/s/2026-01-01T00/1/(other)/5"] == {"accepted": 1, "duplicates": 0}
    assert rows["id/0/s/totals"] == {
        "read": 4, "accepted": 2, "dead_lettered": 1, "duplicates": 1, "unreachable": 0,
        "offset": 2, "topic": "t", "version": 1,
    }  # fmt: skip
    assert not partition.session.totals, "it counts once it is committed"
    partition.session = session
    assert counted(partition, [checkpoint])[0].totals["read"] == 8


def test_counts_of_keys_that_hardly_recur_are_a_document_of_their_own():
    partition = stream()
    (chunk,) = partition.chunks([Message(0, b"{}")])
    keys = [("2026-01-01T00", 1, f"a{media}", str(media)) for media in range(300)]
    name = ("2026-01-01T00", 1, "J. Doe", "5")
    checkpoint = Checkpoint(
        stream=partition, end_offset=chunk.end_offset, tail=b"", read=301, accepted=300, duplicates=1, rejections=[],
        ledger=[dict.fromkeys(keys, 1)], repeated=[{name: 1}],
    )  # fmt: skip
    session, (first, totals) = counted(partition, [checkpoint])
    assert (first.key, totals.key, session.sums) == ("id/0/s/part-0", "id/0/s/totals", {})
    rows = set(zip(*unpacked(first.value or b""), strict=True))
    assert rows == {*((*key, 1, 0) for key in keys), ("2026-01-01T00", 1, "(other)", "5", 0, 1)}
    assert not partition.session.parts, "it has its name once it is committed"
    partition.session = session
    assert counted(partition, [checkpoint])[1][0].key == "id/0/s/part-1"


def test_counts_that_are_too_large_for_a_message_are_halved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shipper.kafka.documents._PART_BYTES", 1000)
    partition = stream()
    (chunk,) = partition.chunks([Message(0, b"{}")])
    keys = [("2026-01-01T00", 1, f"{media * 7919:x}", str(media)) for media in range(1000)]
    checkpoint = Checkpoint(
        stream=partition, end_offset=chunk.end_offset, tail=b"", read=1000, accepted=1000, duplicates=0, rejections=[],
        ledger=[dict.fromkeys(keys, 1)],
    )  # fmt: skip
    session, (*parts, _) = counted(partition, [checkpoint])
    assert len(parts) == session.parts > 1
    assert [each.key for each in parts] == [f"id/0/s/part-{number}" for number in range(len(parts))]
    assert {row for each in parts for row in zip(*unpacked(each.value or b""), strict=True)} == {
        (*key, 1, 0) for key in keys
    }


def found(committed: int, **changes: object) -> Found:
    metadata = msgspec.json.encode(Metadata("id")).decode()
    fields = {
        "metadata": metadata,
        "low": 10,
        "high": 20,
        "topic_id": "id",
        "is_topic_known": committed >= 0,
        **changes,
    }
    return Found("t", 0, committed, **fields)  # type: ignore[arg-type]


@each(
    ("at", "start", "offset", "words"),
    [
        (found(15), "end", 15, ""),
        (found(10), "end", 10, ""),
        (found(20), "end", 20, ""),
        (found(-1001), "beginning", 10, ""),
        (found(-1001), "end", 20, ""),
        (found(-1001), "stop", 10, "the group has no offset"),
        (found(-1001, is_topic_known=True), "end", 10, ""),
        (found(7), "end", 10, "records 7 to 9 were deleted before they were read"),
        (found(21), "end", 20, "the group is at offset 21, and the partition ends at 20"),
        (found(15, topic_id="new"), "beginning", 10, "the topic was deleted and made again"),
        (found(15, metadata=""), "end", 15, ""),
    ],
)
def test_where_a_partition_begins(at: Found, start: str, offset: int, words: str):
    settings = msgspec.structs.replace(SETTINGS, start=start)
    where = begin(at, settings)
    assert (where.offset, bool(where.gap), where.is_stopped) == (offset, bool(words), bool(words))
    assert words in where.gap
    onward = begin(at, msgspec.structs.replace(settings, on_gap="continue"))
    assert onward.is_stopped == (start == "stop")
    assert onward.missing == (3 if "deleted before" in words else 0)


def test_metadata_of_others_is_none():
    assert read_metadata(None) is None
    assert read_metadata("other") is None
    assert read_metadata(msgspec.json.encode(Metadata("x", 5.0)).decode()) == Metadata("x", 5.0)
    assert Begin(3) == Begin(3, "", 0, False)


# Ranges -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), max_size=5), st.integers(0, 40))
def test_nothing_is_read_from_the_end_of_a_range_on_and_the_last_line_leads_to_it(groups: list[list[int]], until: int):
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


def test_an_end_of_the_partition_behind_the_range_is_not_taken_over():
    """What lies between is read by a further run."""
    partition = stream(until=10)
    (chunk,) = partition.chunks([Message(3, b"{}")])
    partition.note_eof(20)
    assert partition.is_complete
    assert partition.position_at(chunk.end_offset) == 10


def test_addresses_name_topics_partitions_and_offsets():
    found = wanted(["kafka://a", "kafka://b/3", "kafka://b/4:10-20"], None, None)
    assert found.parts == {("a", None): None, ("b", 3): None, ("b", 4): range(10, 20)}
    own = found.settings(SETTINGS)
    assert (own.topics, own.letters, own.ledger) == (("a", "b"), "g.dead-letters", "g.ledger")
    assert own.group_id == f"g.backfill.{found.name}"
    assert found.name == wanted(["kafka://b/4:10-20", "kafka://b/3", "kafka://a"], None, None).name
    assert found.name != wanted(["kafka://a", "kafka://b/3", "kafka://b/4:10-21"], None, None).name


@each(
    "addresses",
    [
        *(
            ["kafka://"],
            ["kafka://a/x"],
            ["kafka://a/1:5"],
            ["kafka://a/1:5-5"],
            ["kafka://a/1:2-\u0663"],
            ["a.ndjson"],
        ),
        *(["kafka://a", "kafka://a/1"], ["kafka://a/1", "kafka://a"], ["kafka://a/1", "kafka://a/1:2-3"]),
    ],
)
def test_addresses_that_name_none_or_one_twice_are_refused(addresses: list[str]):
    with pytest.raises(SourceError, match=re.escape(addresses[-1])):
        wanted(addresses, None, None)


def test_offsets_stand_without_times():
    with pytest.raises(SourceError, match="--since"):
        wanted(["kafka://a/1:2-3"], 0.0, None)


def test_headers_that_look_like_those_of_a_letter_are_left_out():
    partition = stream()
    marks = [("trace", b"1"), ("shipper.tombstone", b"true"), ("shipper.consumer_id", b"\xff")]
    partition.chunks([Message(3, b"x", marks=marks)])
    headers = letter(partition, rejection(1, b"x"), 5.0).headers
    assert [name for name, _ in headers if name in {"trace", "shipper.tombstone", "shipper.consumer_id"}] == ["trace"]
