"""The codec: neighbouring lines, pieces and their room, duplicates. The corpus covers the rules of single records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from shipper.codec.codec import Codec
from shipper.codec.dedupe import accept_events
from shipper.codec.rules import FIELD_RULES, MESSAGES, latest_timestamp, may_repeat_keys
from shipper.config.settings import RecordsSettings
from shipper.model.framing import LINES, Framing
from shipper.model.records import MARKER_BYTES, Batch, Chunk, EncodedChunk, Stream
from shipper.pipeline.batching import Batcher
from tests.cases import each
from tests.fakes import strict_records

LATEST = "2026-11-21T00:05:00Z"
LIMIT = 2000
MISSING = object()


def event(**changes: Any) -> dict[str, Any]:
    fields = {
        "EventId": "0f8fad5b-d9cb-469f-a165-70867728950e",
        "IP": "192.0.2.1",
        "Timestamp": "2026-11-20T12:30:00Z",
        "BTag": "660123_0123456789abcdef0123456789abcdef",
        "ConsumerID": 1,
        "ConsumerCountry": "GB",
        "ConsumerCurrencyID": "GBP",
        "Username": "quiet_heron",
        "BrandID": 7,
        "CustomerCurrencyID": "1",
        "ConsumerStatus": "Verified",
        "AffiliateID": "",
        "ConsumerState": "",
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not MISSING}


def line(number: int = 0, **changes: Any) -> bytes:
    """A valid line with its own EventId, unless one is given."""
    changes.setdefault("EventId", f"0f8fad5b-d9cb-469f-a165-{number:012x}")
    return json.dumps(event(**changes), ensure_ascii=False, separators=(",", ":")).encode()


def chunk_of(data: bytes, *, start: int = 0, framing: Framing = LINES) -> Chunk:
    stream = Stream(stream_id=1, kind="file", path="x", framing=framing)
    return Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)


def pieces_of(
    codec: Codec, chunk: Chunk, *, room_events: int = 1000, room_bytes: int = 1 << 20, latest: str = LATEST
) -> Iterator[EncodedChunk]:
    """Encode a chunk as the pipeline does, with as much room for each piece."""
    offset = chunk.start_offset
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=room_events, room_bytes=room_bytes, latest=latest)
        assert piece.span.start_offset == offset < piece.span.end_offset
        offset = piece.span.end_offset
        yield piece
    assert offset == chunk.end_offset


def encode(data: bytes, *, start: int = 0, codec: Codec | None = None, **room: int) -> list[EncodedChunk]:
    codec = codec or Codec(strict_records(1000), max_record_bytes=LIMIT)
    pieces = list(pieces_of(codec, chunk_of(data, start=start), **room))
    for piece in pieces:
        good = len(piece.event_ids)
        assert piece.span.read == good + len(piece.span.rejections) + piece.span.duplicates
        assert piece.span.unsettled == good == len(piece.consumer_ids)
        assert len(piece.lines.split(b"\n")) == good or (not good and not piece.lines)
    return pieces


def joined(pieces: Sequence[EncodedChunk]) -> EncodedChunk:
    """Make one piece of those of a chunk: how many there are is the codec's business."""
    spans = [piece.span for piece in pieces]
    counts = {name: sum(getattr(span, name) for span in spans) for name in ("read", "unsettled", "duplicates")}
    rejections = [each for span in spans for each in span.rejections]
    return replace(
        pieces[0],
        span=replace(spans[0], end_offset=spans[-1].end_offset, rejections=rejections, **counts),
        lines=b"\n".join(piece.lines for piece in pieces if piece.lines),
        events=sum(piece.events for piece in pieces),
        consumer_ids=[each for piece in pieces for each in piece.consumer_ids],
        waits=sum(piece.waits for piece in pieces),
    )


def good_lines(pieces: list[EncodedChunk]) -> list[bytes]:
    return [each for piece in pieces if piece.lines for each in piece.lines.split(b"\n")]


def judge(raw: bytes) -> str:
    """Put a line between valid ones and return the rule that it breaks, or an empty string."""
    before, after = [line(1001), line(1002)], [line(1003), line(1004)]
    pieces = encode(b"\n".join([*before, raw, *after]) + b"\n", start=5000)
    rejections = [rejection for piece in pieces for rejection in piece.span.rejections]
    if not rejections:
        assert good_lines(pieces) == [*before, raw, *after]
        return ""
    assert good_lines(pieces) == before + after
    (rejection,) = rejections
    assert rejection.raw == raw
    assert rejection.start_offset == 5000 + sum(len(each) + 1 for each in before)
    assert rejection.end_offset == rejection.start_offset + len(raw)
    assert rejection.rule in MESSAGES
    return rejection.rule


BTAG_HEX = "0123456789abcdef0123456789abcdef"
L1, L2 = line(1), line(2)
TEXT_FIELDS = [field for field, value in event().items() if isinstance(value, str)]


def with_raw(field: str, token: bytes) -> bytes:
    """A line with these exact bytes as the value of one field."""
    marked = line(1, **{field: "@@@"})
    assert marked.count(b'"@@@"') == 1
    return marked.replace(b'"@@@"', token)


def with_length(number: int, length: int, **changes: Any) -> bytes:
    """A valid line of exactly this length."""
    shortest = line(number, Username="x", **changes)
    padded = shortest.replace(b'"x"', b'"' + b"x" * (length - len(shortest) + 1) + b'"')
    assert len(padded) == length
    return padded


# Records -------------------------------------------------------------------------------------------------------------


@each("field", FIELD_RULES)
@each("value", [None, MISSING, [], {}])
def test_each_field_must_exist_and_have_its_type(field: str, value: Any):
    assert judge(line(1, **{field: value})) == FIELD_RULES[field]


@each("field", TEXT_FIELDS)
@each(
    ("data", "rule"),
    [
        *((b"\xff", "encoding"), (b"\xc0\x80", "encoding"), (b"\xe9", "encoding"), (b"\xed\xa0\x80", "encoding")),
        *((b"\xf4\x90\x80\x80", "encoding"), (b"\xc3", "encoding"), (rb"\udc00", "json")),
    ],
)
def test_a_text_in_another_encoding_is_refused_in_every_field(field: str, data: bytes, rule: str):
    assert judge(with_raw(field, json.dumps(event()[field]).encode()[:-1] + data + b'"')) == rule


@each(
    ("raw", "rules", "message"),
    [
        (
            line(1, IP="x", BrandID=0),
            ["ip", "brand_id"],
            "IP must be an IPv4 address in dotted-decimal form, without leading zeros; "
            "BrandID must be a whole number from 1 to 9223372036854775807",
        ),
        (
            line(1, IP=MISSING, BTag=MISSING, Username=MISSING)[:-1] + b',"Email":"a@b","x":1}',
            ["ip", "btag", "username", "unknown_field"],
            None,
        ),
        (
            line(1, IP=MISSING, BTag=MISSING, Username=MISSING),
            ["ip", "btag", "username"],
            "IP, BTag and Username are missing",
        ),
        (
            line(1, ConsumerID=MISSING, Timestamp="2096-01-01T00:00:00Z").replace(b'"BrandID":7', b'"BrandID":1e400'),
            ["timestamp", "consumer_id", "brand_id"],
            None,
        ),
    ],
)
def test_each_rule_that_a_record_breaks_is_named(raw: bytes, rules: list[str], message: str | None):
    (piece,) = encode(raw)
    (rejection,) = piece.span.rejections
    assert list(rejection.faults) == rules
    assert rejection.rule == rules[0]
    assert message in {None, rejection.message}


@each(
    ("field", "values"),
    [
        ("Timestamp", ['1-2-3T4:5:Z","--T::Z', "20261110123000202611"]),
        ("Timestamp", ["2026-11-10T12:30:00Z", '","2026-11-10T12:30:']),
        ("IP", ["1.2.3.4,5.6.7.8", ""]),
        ("IP", ["1,2.3.4"]),
        ("IP", ["1.2.3", "4.5.6.7.8"]),
        ("IP", ["1.2.3.", "4.5.6.7"]),
        ("BTag", [f"1_{BTAG_HEX}\n2_{BTAG_HEX}", ""]),
        ("BTag", [f"1_{BTAG_HEX}\n", f"2_{BTAG_HEX}"]),
        ("EventId", ["0f8fad5bd-9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950e"]),
    ],
)
def test_values_that_are_valid_only_when_joined_are_refused(field: str, values: list[str]):
    lines = [line(number, **{field: value}) for number, value in enumerate(values, 10)]
    alone = [judge(each) for each in lines]
    pieces = encode(b"\n".join([line(1), *lines, line(2)]) + b"\n")
    refused = [rejection.rule for piece in pieces for rejection in piece.span.rejections]
    assert refused == [rule for rule in alone if rule]
    assert FIELD_RULES[field] in alone


@pytest.mark.parametrize(
    ("now_s", "seconds", "expected"),
    [(0, 0, "1970-01-01T00:00:00Z"), (0.999, 300, "1970-01-01T00:05:00Z"), (951_782_399, 1, "2000-02-29T00:00:00Z")],
)
def test_the_latest_timestamp_is_the_clock_plus_the_allowance(now_s: float, seconds: int, expected: str):
    assert latest_timestamp(now_s, seconds) == expected


def test_messages_name_fields_and_never_values():
    secret = "Zx9-unmistakable"
    for field in FIELD_RULES:
        (piece,) = encode(line(1, **{field: secret if field not in {"Username", "ConsumerStatus"} else [secret]}))
        for rejection in piece.span.rejections:
            assert secret not in rejection.message
            assert field in rejection.message


@each(
    ("username", "may_repeat"),
    [
        (r"some", False),
        (r"some \"body\"", False),
        (r"\u0022", False),
        (r"\\", False),
        (r"\\ \"", True),
        (r"\\\"", True),
    ],
)
def test_a_quote_within_a_value_does_not_look_like_one_of_a_repeated_key(username: str, may_repeat: bool):
    """False positives are allowed, false negatives are not: a repeated key is found with any value."""
    written = with_raw("Username", b'"%b"' % username.encode())
    assert may_repeat_keys(written, 1) is may_repeat
    assert may_repeat_keys(written.replace(b'"IP":', b'"IP":"1","IP":'), 1)
    assert may_repeat_keys(written.replace(b'"BrandID":', b'"BrandID":1,"BrandID":'), 1)


# Lines ---------------------------------------------------------------------------------------------------------------


def test_lines_get_the_verdict_that_each_gets_alone():
    half = L1.index(b',"BrandID"')
    kinds = {
        "good": line(2),
        "two": line(3) + b"," + line(4),
        "two and a null": line(5) + b",null," + line(6),
        "a null": b"null",
        "first half": L1[:half],
        "second half": L1[half:],
        "second half, no comma": L1[half + 1 :],
        "blank": b"",
    }
    for names in ((*two, "good") for two in product(kinds, repeat=2)):
        pieces = encode(
            b"\n".join(kinds[name] for name in names) + b"\n", codec=Codec(strict_records(0), max_record_bytes=LIMIT)
        )
        records = [name for name in names if name != "blank"]
        assert good_lines(pieces) == [kinds["good"]] * names.count("good"), names
        assert sum(piece.span.read for piece in pieces) == len(records), names
        rejections = [rejection for piece in pieces for rejection in piece.span.rejections]
        assert [rejection.raw for rejection in rejections] == [kinds[name] for name in records if name != "good"]


def test_the_last_line_needs_no_newline():
    pieces = encode(L1 + b"\n" + L2)
    assert good_lines(pieces) == [L1, L2]
    assert pieces[-1].span.end_offset == len(L1) + 1 + len(L2)


@each("data", [b"\n\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\xef\xbb\xbf\r\n\r\n", b"\0" * 300, b" \0\n"])
def test_byte_order_marks_blanks_and_holes_are_not_records(data: bytes):
    (piece,) = encode(data)
    assert (piece.span.start_offset, piece.span.end_offset, piece.span.read) == (0, len(data), 0)


def test_nuls_before_a_refused_line_count_in_its_offset():
    (piece,) = encode(b"\0" * 500 + b"x\n")
    assert (piece.span.rejections[0].start_offset, piece.span.rejections[0].raw) == (500, b"x")


def test_a_refused_line_knows_its_event():
    (piece,) = encode(line(1, IP="") + b"\n")
    (rejection,) = piece.span.rejections
    assert rejection.event_id == json.loads(line(1))["EventId"]


def test_the_tail_of_a_piece_is_its_last_bytes():
    data = b"\n".join([line(1), b"bad", line(2), b""])
    for piece in encode(data, start=900, room_events=1):
        end = piece.span.end_offset - 900
        assert piece.span.tail == data[max(0, end - MARKER_BYTES) : end]


def test_an_oversized_line_is_one_dead_letter():
    chunk = replace(chunk_of(b"", start=7), end_offset=99, is_oversized=True)
    piece = Codec(strict_records(10), max_record_bytes=10).encode(chunk, 7, room_events=1, room_bytes=1, latest=LATEST)
    assert (piece.span.read, piece.span.unsettled, piece.span.end_offset) == (1, 0, 99)
    (rejection,) = piece.span.rejections
    assert (rejection.rule, rejection.start_offset, rejection.end_offset) == ("oversized", 7, 99)


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"Username":[', b'{"EventId":{"EventId":'])
def test_very_deep_nesting_is_refused_like_any_invalid_line(opening: bytes):
    deep = opening * 100_000
    codec = Codec(strict_records(10), max_record_bytes=len(deep))
    pieces = encode(b"\n".join([line(5), deep, line(6)]) + b"\n", codec=codec, room_bytes=1 << 24)
    assert good_lines(pieces) == [line(5), line(6)]
    assert [rejection.raw == deep for piece in pieces for rejection in piece.span.rejections] == [True]


def test_an_oversized_line_needs_no_room():
    pieces = encode(L1 + b"\n" + b"x" * 5000 + b"\n" + L2 + b"\n", room_bytes=2100)
    assert [rejection.rule for piece in pieces for rejection in piece.span.rejections] == ["oversized"]
    assert good_lines(pieces) == [L1, L2]


def test_without_room_for_a_line_nothing_is_encoded():
    codec, chunk = Codec(strict_records(10), max_record_bytes=LIMIT), chunk_of(L1 + b"\n")
    assert codec.encode(chunk, 0, room_events=5, room_bytes=len(L1) - 1, latest=LATEST) is None
    assert codec.encode(chunk, 0, room_events=5, room_bytes=len(L1), latest=LATEST) is not None


@each("room_events", [1, 2, 7, 50, 1000])
def test_a_piece_fills_the_available_room(room_events: int):
    lines = [line(number, Username="x" * (number % 90 + 1)) for number in range(120)]
    pieces = encode(b"\n".join(lines) + b"\n", room_events=room_events)
    assert good_lines(pieces) == lines
    assert [len(piece.event_ids) for piece in pieces[:-1]] == [room_events] * (len(pieces) - 1)


def pack(data: bytes, *, max_record_bytes: int, max_bytes: int) -> list[Batch]:
    """Pack a chunk as the pipeline does."""
    codec = Codec(strict_records(10), max_record_bytes=max_record_bytes)
    batcher = Batcher(max_events=100, max_bytes=max_bytes, linger_s=1)
    chunk, offset, batches = chunk_of(data), 0, []
    while offset < len(data):
        room = {"room_events": batcher.room_events, "room_bytes": batcher.room_bytes}
        piece = codec.encode(chunk, offset, **room, latest=LATEST)
        if piece is None:
            batch = batcher.take()
            assert batch is not None, "an empty batch has room for each valid line"
            batches.append(batch)
        else:
            offset = piece.span.end_offset
            batcher.add(piece, now=0)
    while batch := batcher.take():
        batches.append(batch)
    return batches


ENVELOPE = len(b'{"EventType":"Acquisition","events":[]}')


@each("length", [LIMIT - 2, LIMIT - 1, LIMIT])
@each("spare", [0, 1, 2, 200, 400])
@each("end", [b"\n", b""])
def test_a_line_of_the_maximum_length_needs_room(length: int, spare: int, end: bytes):
    lines = [line(1), with_length(2, length, ConsumerID=2), line(3, ConsumerID=3), with_length(4, length, ConsumerID=4)]
    max_bytes = LIMIT + ENVELOPE + spare
    batches = pack(b"\n".join(lines) + end, max_record_bytes=LIMIT, max_bytes=max_bytes)
    assert [len(batch.body) for batch in batches if len(batch.body) > max_bytes] == []
    sent = [each for batch in batches for each in json.loads(batch.body)["events"]]
    assert sent == [json.loads(each) for each in lines]


# Duplicates ----------------------------------------------------------------------------------------------------------


def test_a_record_that_repeats_an_accepted_event_id_is_a_duplicate():
    told: list[str] = []
    codec = Codec(strict_records(10), max_record_bytes=LIMIT, on_duplicate=lambda event_id, *_: told.append(event_id))
    (first,) = encode(b"\n".join([L1, L2]) + b"\n", codec=codec)
    accept_events(codec.window, first.span, range(2))
    again = joined(encode(b"\n".join([line(3), L2, L1]) + b"\n", codec=codec))
    assert good_lines([again]) == [line(3)]
    assert (again.span.duplicates, again.waits) == (2, 0)
    assert told == [json.loads(L2)["EventId"], json.loads(L1)["EventId"]]


def test_a_record_that_repeats_an_unsettled_event_id_waits():
    codec = Codec(strict_records(10), max_record_bytes=LIMIT)
    pieces = encode(b"\n".join([L1, L1, L2]) + b"\n", codec=codec)
    assert sorted(good_lines(pieces)) == [L1, L1, L2]
    assert [good_lines([piece])[-1] for piece in pieces if piece.waits] == [L1]
    again = joined(encode(b"\n".join([L2, line(3)]) + b"\n", codec=codec))
    assert (sorted(good_lines([again])), again.waits) == ([L2, line(3)], 1)
    assert (again.span.duplicates, again.span.unsettled) == (0, 2)


def test_a_refused_record_does_not_make_its_correction_a_duplicate():
    codec = Codec(strict_records(10), max_record_bytes=LIMIT)
    encode(line(1, IP="999.0.0.1") + b"\n", codec=codec)
    (first,) = encode(L1 + b"\n", codec=codec)
    assert (good_lines([first]), first.waits) == ([L1], 0)
    codec.window.forget(first.span.event_keys)
    (again,) = encode(L1 + b"\n", codec=codec)
    assert (good_lines([again]), again.waits) == ([L1], 0)


def test_an_empty_event_id_is_never_a_duplicate():
    records = RecordsSettings(relax=("event_id",))
    codec = Codec(records, max_record_bytes=LIMIT)
    nameless = [line(number, EventId="", ConsumerID=number + 1) for number in range(5)]
    for duplicates in range(2):
        (piece,) = encode(b"\n".join([*nameless, L1]) + b"\n", codec=codec)
        assert (good_lines([piece])[:5], piece.waits, piece.span.duplicates) == (nameless, 0, duplicates)
        accept_events(codec.window, piece.span, range(piece.events))


def test_without_a_window_nothing_is_a_duplicate():
    pieces = encode(b"\n".join([L1, L1]) + b"\n", codec=Codec(strict_records(0), max_record_bytes=LIMIT))
    assert good_lines(pieces) == [L1, L1]
    assert not pieces[0].has_new_event_ids
