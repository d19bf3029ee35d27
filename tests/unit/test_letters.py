"""The dead letters in the state store: quota, expiry and replay."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shipper.codec.codec import Codec
from shipper.config.settings import RecordsSettings, load_settings
from shipper.model.errors import StateError
from shipper.model.framing import CsvRows
from shipper.model.records import Checkpoint, Chunk, Rejection, ReplayStream, Stream, consumer_id_of
from shipper.pipeline.erasure import Erasure
from shipper.sources.replay import Replay
from shipper.state.letters import EVERYTHING, Selection, open_letters
from shipper.state.schema import LETTER_OVERHEAD_BYTES
from shipper.state.store import Store
from tests.cases import each
from tests.unit.test_codec import chunk_of, pieces_of


def rejection(at: int = 0, raw: bytes = b"{}", rule: str = "ip", **changes: Any) -> Rejection:
    return Rejection(start_offset=at, end_offset=at + len(raw), rule=rule, message="no", raw=raw, **changes)


def checkpoint(
    *rejections: Rejection, stream_id: int = 1, end: int = 100, path: str = "/a", **changes: Any
) -> Checkpoint:
    stream = changes.pop("stream", None) or Stream(stream_id=stream_id, kind="file", path=path, inode=stream_id)
    counts = {"accepted": 0, "duplicates": 0} | changes
    read = len(rejections) + counts["accepted"] + counts["duplicates"]
    return Checkpoint(stream=stream, end_offset=end, tail=b"t", rejections=list(rejections), read=read, **counts)


def erasure_of(store: Store, directory: Path, consumer_id: str, *overrides: str) -> Erasure:
    overrides = (f"state.directory={directory}", *overrides)
    return Erasure(load_settings(config_path=None, environ={}, overrides=overrides), store, consumer_id)


def size(*raws: bytes) -> int:
    return sum(len(raw) + LETTER_OVERHEAD_BYTES for raw in raws)


def totals(directory: Path) -> dict[str, int]:
    with closing(sqlite3.connect(directory / "state.db")) as db:
        db.row_factory = sqlite3.Row
        return dict(db.execute("SELECT * FROM totals").fetchone())


def assert_counted(store: Store, directory: Path) -> None:
    """Check the invariants."""
    found = totals(directory)
    rows = store.letters.ids(EVERYTHING)
    assert found["read"] == found["accepted"] + found["dead_lettered"] + found["duplicates"]
    assert found["dead_lettered"] == len(rows) + found["purged"]
    contents = list(store.letters.contents(EVERYTHING))
    assert found["dead_letter_bytes"] == size(*(content.raw + content.header for content in contents))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    stores = []

    def make(**options: Any) -> Store:
        stores.append(Store(tmp_path, **options))
        return stores[-1]

    yield make
    for store in stores:
        assert_counted(store, tmp_path)
        store.close()


@pytest.fixture
def store(make: Any) -> Store:
    return make()


def test_an_unreadable_database_is_not_treated_as_empty(tmp_path: Path):
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match="cannot be used"):
        open_letters(tmp_path)


def test_no_state_has_no_letters(tmp_path: Path):
    with closing(open_letters(tmp_path)) as letters:
        assert (letters.ids(EVERYTHING), letters.count_by_rule()) == ([], {})
    assert list(tmp_path.iterdir()) == []


# What is kept, and looking at it ------------------------------------------------------------------------------------


def test_a_letter_has_all_its_fields(store: Store):
    full = rejection(
        5, b'{"ConsumerID":9}', "status", event_id="e", status=422, delivery="ambiguous", attempts=3, header=b"a,b\n"
    )
    store.save([checkpoint(full, rejection(30, raw=b"x", consumer_id="8"))], 50.0)
    other, letter = store.letters.newest(EVERYTHING, 2)
    assert (letter.path, letter.start_offset, letter.end_offset, letter.stream_id) == ("/a", 5, 21, 1)
    assert (letter.status, letter.delivery, letter.attempts, letter.event_id) == (422, "ambiguous", 3, "e")
    assert (letter.consumer_id, other.consumer_id) == ("9", "8")
    assert (letter.first_at, letter.last_at) == (50.0, 50.0)
    assert store.letters.content(letter.id) == (b"a,b\n", b'{"ConsumerID":9}')


def test_a_message_is_truncated(store: Store):
    long = Rejection(start_offset=0, end_offset=1, rule="x", message="é" * 9000, raw=b"x")
    store.save([checkpoint(long)], 1.0)
    assert store.letters.newest(EVERYTHING, 1)[0].message == "é" * 2048


@each(
    ("raw", "wanted"),
    [
        (b'{"ConsumerID":42}', "42"),
        (b'{"IP":"x","ConsumerID" : "0042"', "42"),
        (b'{"ConsumerID":7,"ConsumerID":8}', "8"),
        (b'\xff\xfe{"ConsumerID":\t42,', "42"),
        *((b'{"ConsumerID":%b}' % value, "") for value in (b"4.2e1", b"-3", b"null", b"9" * 50)),
        (b'{"XConsumerID":42}', ""),
        (b'{"ConsumerID": 7, "referrer": {"ConsumerID": 8}}', "7"),
        (b'{"ConsumerID": "007", "note": "\\"ConsumerID\\":9"}', "7"),
        (b'{"ConsumerID": null, "who": {"ConsumerID": 8}}', "8"),
        *((raw, "") for raw in (b'{"ConsumerID": "' + b"9" * 5000 + b'"}', b"[" * 100_000, b"")),
    ],
)
def test_the_consumer_is_read_from_a_truncated_record(raw: bytes, wanted: str):
    assert consumer_id_of(raw) == wanted


def test_letters_are_found_by_their_fields(store: Store):
    store.save([checkpoint(rejection(0), rejection(5, rule="json"), path="/log/a.ndjson")], 100.0)
    store.save([checkpoint(rejection(delivery="rejected"), rejection(9, raw=b""), stream_id=2, path="/b")], 200.0)
    for selection, wanted in [
        (EVERYTHING, [1, 2, 3, 4]),
        (Selection(rule="ip"), [1, 3, 4]),
        (Selection(since_s=200.0), [3, 4]),
        (Selection(before_s=200.0), [1, 2]),
        (Selection(path="/log/*"), [1, 2]),
        (Selection(path="*.NDJSON"), []),
        (Selection(delivery="rejected"), [3]),
        (Selection(is_whole=True), [1, 2, 3]),
        (Selection(is_whole=False), [4]),
        (Selection(rule="ip", path="/b", is_whole=True), [3]),
    ]:
        assert store.letters.ids(selection) == wanted, selection
        assert list(store.letters.contents(selection)) == list(map(store.letters.content, wanted))
        assert [letter.id for letter in store.letters.newest(selection, 10)] == wanted[::-1]
        assert sum(store.letters.count_by_rule(selection).values()) == len(wanted)
    assert store.letters.ids(EVERYTHING, 2) == [1, 2]
    assert [letter.id for letter in store.letters.newest(EVERYTHING, 2)] == [4, 3]
    assert list(store.letters.count_by_rule().items()) == [("ip", 3), ("json", 1)]
    assert store.letters.get(99) is store.letters.content(99) is None


# Quota --------------------------------------------------------------------------------------------------------------


def test_streams_without_room_for_letters_wait_and_others_are_saved(make: Any):
    store = make(dead_letter_max_bytes=size(b"{}", b"{}"))
    first = checkpoint(rejection(), end=10)
    too_much = checkpoint(rejection(), rejection(5), end=20)
    behind = checkpoint(accepted=3, end=30)
    other = checkpoint(stream_id=2, accepted=4, end=40)
    small = checkpoint(rejection(), stream_id=3, end=50)
    saved = store.save([first, too_much, behind, other, small], 1.0)
    assert (saved.done, saved.waiting) == ([first, other, small], [too_much, behind])
    assert "dead-letters purge" in saved.reason
    assert {stream.stream_id: stream.checkpoint for stream in store.streams.load("file")} == {1: 10, 2: 40, 3: 50}

    assert store.save(saved.waiting, 2.0).waiting == [too_much, behind]
    assert store.purge([1, 2]) == 2
    saved = store.save([too_much, behind], 3.0)
    assert (saved.done, saved.waiting, saved.reason) == ([too_much, behind], [], "")


def test_letters_larger_than_the_quota_report_the_space_needed(make: Any):
    saved = make(dead_letter_max_bytes=600).save([checkpoint(rejection(raw=b"x" * 200))], 1.0)
    assert len(saved.waiting) == 1
    assert "at least 712" in saved.reason


# Their end ----------------------------------------------------------------------------------------------------------


def bytes_on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("length", [50, 20_000])
def test_purged_letters_are_removed_from_disk_and_stay_counted(store: Store, tmp_path: Path, length: int):
    raws = [b"canary-%d-" % number + b"x" * length for number in range(300)]
    store.save([checkpoint(*(rejection(number, raw) for number, raw in enumerate(raws)))], 1.0)
    assert bytes_on_disk(tmp_path).count(b"canary-") >= 300
    store.purge(store.letters.ids(EVERYTHING)[::3])
    store.purge(store.letters.ids(EVERYTHING))
    store.scrub()
    assert b"canary-" not in bytes_on_disk(tmp_path)
    assert totals(tmp_path)["purged"] == totals(tmp_path)["dead_lettered"] == 300
    store.save([checkpoint(rejection(), end=900)], 2.0)
    assert store.letters.ids(EVERYTHING) == [301]


def test_purging_missing_letters_counts_nothing(store: Store, tmp_path: Path):
    store.save([checkpoint(rejection())], 1.0)
    assert (store.purge([1, 2]), store.purge([1]), totals(tmp_path)["purged"]) == (1, 0, 1)


def test_letters_expire_by_their_first_refusal_when_two_checks_a_day_apart_agree(store: Store, tmp_path: Path):
    """Also if the process of the second check is another one."""
    store.save([checkpoint(rejection())], 100.0)
    store.save([checkpoint(rejection(), end=200)], 200.0)
    day = 86_400.0
    assert [store.expire(150.0, at) for at in (1000.0, 1000.0 + day - 1)] == [0, 0]
    assert store.letters.ids(EVERYTHING) == [1, 2], "one look is not enough"
    with closing(Store(tmp_path)) as another:
        assert [another.expire(150.0, 1000.0 + day), another.expire(150.0, 1000.0 + day)] == [1, 0]
    assert store.letters.ids(EVERYTHING) == [2]
    assert totals(tmp_path)["purged"] == 1


def test_a_clock_that_jumps_forward_and_back_expires_no_letter(store: Store):
    day, now = 86_400.0, 1_000 * 86_400.0
    store.save([checkpoint(rejection())], now)

    def look(at: float) -> int:
        return store.expire(at - 30 * day, at)

    assert [look(now + day), look(now + 2 * day)] == [0, 0], "the looks of the right clock"
    assert [look(now + 400 * day), look(now + 400 * day + 3600)] == [0, 0], "it has jumped"
    assert [look(now + 3 * day), look(now + 5 * day)] == [0, 0], "it is right again"
    assert [look(now + 31 * day), look(now + 32 * day)] == [0, 1], "its time has come"


def test_letters_expire_a_few_at_a_time(store: Store):
    store.save([checkpoint(*(rejection(number) for number in range(450)))], 1.0)
    assert store.expire(2.0, 10.0) == 0
    assert [store.expire(2.0, 90_000.0) for _ in range(4)] == [200, 200, 50, 0]
    big = [rejection(number, b"x" * 1_500_000) for number in range(5)]
    store.save([checkpoint(*big, end=900)], 100_000.0)
    assert store.expire(200_000.0, 200_000.0) == 0
    assert [store.expire(200_000.0, 300_000.0) for _ in range(4)] == [2, 2, 1, 0]


def test_an_erasure_matches_the_exact_consumer_id(store: Store, tmp_path: Path):
    """A number in another field is none of it; a record that cannot be read is named, never erased on a guess."""
    header = b"id,IP,Timestamp,BrandID\n"
    rows = [b"11,192.0.2.1,2026-01-31T12:30:00Z,7", b"7,192.0.2.11,2026-01-31T11:30:00Z,11", b'"11', b"12,1,1,011"]
    raws = [
        b'{"ConsumerID":11,"x":"', b'{"id":11}', b'{"id":"011"}', b'{"id":7,"ConsumerID":11}',
        b'{"id":7,"IP":"1.1.1.11"}', b"id=11 broken", b"id=1011;112", b'{"IP":"1.1.1.11"}', b'{"id":"\\u0031\\u0031"}',
    ]  # fmt: skip
    store.save([checkpoint(*(rejection(number, raw) for number, raw in enumerate(raws)))], 1.0)
    of_csv = [msgspec.structs.replace(rejection(number, row), header=header) for number, row in enumerate(rows)]
    store.save([checkpoint(*of_csv, end=900)], 1.0)
    (tmp_path / "spool").mkdir()
    segment = tmp_path / "spool" / "000000000001.2c.csv"
    segment.write_bytes(header + b"\n".join(rows) + b"\r\n")
    erasure = erasure_of(store, tmp_path, "11", 'records.mapping={ConsumerID="id"}')
    found = erasure.find()
    spooled = {(place.start, place.end) for place in found.spooled}
    assert found.letters == [1, 2, 3, 9, 10]
    assert spooled == {(len(header), len(header) + len(rows[0]))}
    assert found.doubtful[:-1] == ["dead letter 4", "dead letter 6", "dead letter 8", "dead letter 12"]
    assert found.doubtful[-1] == f"spool/{segment.name}, byte {segment.read_bytes().index(rows[2])}"
    assert erasure.erase(found) == 5
    assert segment.read_bytes() == header + b"\n".join([b" " * len(rows[0]), *rows[1:]]) + b"\r\n"
    assert erasure.find() == found._replace(letters=[], spooled=[])


@each("mode", ["strict", "normalize"])
@each("end", [b"}", b""])
@each(
    "number",
    [
        *(b'"0042"', b'8,"ConsumerID":42', b'42,"ConsumerID":[]', b'42,"Inner":{"ConsumerID":8}'),
        *(b'42,"Username":"torn{"ConsumerID":8', b'8,"Username":"torn{"ConsumerID":42', b'8,"player_no":42 8'),
    ],
)
def test_an_erasure_finds_every_spelling_of_the_number_of_an_invalid_record(
    store: Store, tmp_path: Path, mode: str, end: bytes, number: bytes
):
    data = b'{"ConsumerID":%b,"IP":"x"%b\n' % (number, end)
    (piece,) = pieces_of(Codec(RecordsSettings(mode=mode), max_record_bytes=1000), chunk_of(data))
    store.save([checkpoint(*piece.span.rejections)], 1.0)
    found = erasure_of(store, tmp_path, "42", f"records.mode={mode}").find()
    assert len(found.letters) + len(found.doubtful) == 1
    store.purge(store.letters.ids(EVERYTHING))


def test_a_record_is_blanked_in_place_up_to_the_end_of_its_line(store: Store, tmp_path: Path):
    lines = [b'{"ConsumerID":42,"IP":"1.2.3.4"}\r\n', b'{"ConsumerID":7,"x":42}\n', b'\0\0{"ConsumerID":"42"}']
    (tmp_path / "spool").mkdir()
    segment = tmp_path / "spool" / "000000000001.ndjson"
    segment.write_bytes(b"".join(lines))
    erasure = erasure_of(store, tmp_path, "42")
    assert erasure.erase(erasure.find()) == 0
    assert segment.read_bytes() == b" " * 32 + b"\r\n" + lines[1] + b"\0\0" + b" " * 19
    assert erasure.find() == ([], [], [])


# Replay -------------------------------------------------------------------------------------------------------------


def replayed(store: Store, directory: Path, *, ids: list[int] | None = None) -> list[Chunk]:
    with closing(open_letters(directory)) as letters:
        return list(Replay(letters, ids or store.letters.ids(EVERYTHING), itertools.count(50).__next__).chunks())


def settled(stream: Stream, start: int, end: int, *rejections: Rejection, **counts: int) -> Checkpoint:
    return msgspec.structs.replace(checkpoint(*rejections, stream=stream, end=end, **counts), start_offset=start)


def test_letters_are_read_one_per_line_and_identified_by_offset(store: Store, tmp_path: Path):
    raws = [b"\xef\xbb\xbf{}", b'{"a":\n1}', b"\xff"]
    store.save([checkpoint(*(rejection(number, raw) for number, raw in enumerate(raws)))], 1.0)
    (chunk,) = replayed(store, tmp_path)
    stream = chunk.stream
    assert isinstance(stream, ReplayStream)
    assert chunk.start_offset > 0, "a byte-order mark counts at the start of a stream only"
    assert chunk.data.split(b"\n") == [b"\xef\xbb\xbf{}", b'{"a":\r1}', b"\xff", b""]
    places = [chunk.start_offset + at for at in (0, 6, 15)]
    assert [stream.letter_at(place) for place in places] == [1, 2, 3]
    assert [stream.letter_at(place + 1) for place in places[:2]] == [1, 2]
    assert stream.letters_in(places[0], places[2]) == [1, 2]
    assert stream.letters_in(places[2], chunk.end_offset) == [3]


def test_many_letters_are_read_in_several_chunks_without_a_gap(store: Store, tmp_path: Path):
    raws = [b"%06d" % number + b"x" * 5000 for number in range(700)]
    store.save([checkpoint(*(rejection(number, raw) for number, raw in enumerate(raws)))], 1.0)
    store.purge([1, 300, 700])
    chunks = replayed(store, tmp_path, ids=list(range(1, 701)))
    assert len(chunks) > 2
    assert all(left.end_offset == right.start_offset for left, right in itertools.pairwise(chunks))
    lines = b"".join(chunk.data for chunk in chunks).splitlines()
    assert lines == [raw for number, raw in enumerate(raws, 1) if number not in {1, 300, 700}]


def test_each_csv_letter_is_read_with_its_header(store: Store, tmp_path: Path):
    rows = [rejection(0, b'a"b;1', header=b"x;y\n"), rejection(9, b'"c\nd";2', header=b"x;y\n"), rejection(20, b"{}")]
    store.save([checkpoint(*rows)], 1.0)
    first, second, third = replayed(store, tmp_path)
    assert isinstance(first.stream.framing, CsvRows)
    assert first.stream.framing.names == ["x", "y"]
    assert [first.data, second.data, third.data] == [b'a"b;1\n', b'"c\nd";2\n', b"{}\n"]
    assert first.stream is second.stream is not third.stream
    assert not isinstance(third.stream.framing, CsvRows)


def test_replayed_letters_move_in_the_totals_and_failed_ones_stay(store: Store, tmp_path: Path):
    store.save([checkpoint(*(rejection(number, b"{%d}" % number) for number in range(5)))], 1.0)
    (chunk,) = replayed(store, tmp_path)
    starts = chunk.stream.starts  # type: ignore[attr-defined]
    again = rejection(starts[1], rule="json", status=400, delivery="rejected")
    store.save([settled(chunk.stream, starts[0], starts[3], again, accepted=2)], 9.0)
    found = totals(tmp_path)
    assert (found["read"], found["accepted"], found["duplicates"], found["dead_lettered"]) == (5, 2, 0, 3)
    assert store.letters.ids(EVERYTHING) == [2, 4, 5]
    letter = store.letters.get(2)
    assert (letter.rule, letter.status, letter.delivery, letter.attempts) == ("json", 400, "rejected", 1)
    assert (letter.first_at, letter.last_at, letter.path, letter.start_offset) == (1.0, 9.0, "/a", 1)
    assert [stream.stream_id for stream in store.streams.load("file")] == [1]
    assert store.streams.load("replay") == []
    assert store.streams.newest_id() == 1


def test_a_letter_purged_while_in_flight_counts_by_its_result(store: Store, tmp_path: Path):
    store.save([checkpoint(rejection(0), rejection(5))], 1.0)
    (chunk,) = replayed(store, tmp_path)
    store.purge([1, 2])
    starts = chunk.stream.starts  # type: ignore[attr-defined]
    store.save([settled(chunk.stream, starts[0], chunk.end_offset, rejection(starts[1]), accepted=1)], 2.0)
    found = totals(tmp_path)
    assert (found["accepted"], found["dead_lettered"], found["purged"]) == (1, 1, 1)


def test_a_replay_needs_no_room(make: Any, tmp_path: Path):
    store = make(dead_letter_max_bytes=size(b"{}"))
    store.save([checkpoint(rejection())], 1.0)
    (chunk,) = replayed(store, tmp_path)
    again = rejection(chunk.start_offset)
    saved = store.save([settled(chunk.stream, chunk.start_offset, chunk.end_offset, again)], 2.0)
    assert saved.waiting == []


def test_letters_can_be_read_while_a_shipper_writes(store: Store, tmp_path: Path):
    store.save([checkpoint(rejection())], 1.0)
    with closing(open_letters(tmp_path)) as letters:
        store.save([checkpoint(rejection(), end=200)], 2.0)
        assert letters.ids(EVERYTHING) == [1, 2]
        store._db.execute("BEGIN IMMEDIATE")
        assert letters.count_by_rule() == {"ip": 2}
        store._db.execute("ROLLBACK")
