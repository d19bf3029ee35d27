"""The codec's edges: numbers, escapes, encodings, limits, and lines that together would pass for good ones."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from shipper.codec import FIELD_RULES, Codec, latest_timestamp
from shipper.codec.rules import may_repeat_keys
from shipper.model.records import MARKER_BYTES, Batch, Chunk, Stream
from shipper.pipeline.batching import Batcher
from tests.cases import each
from tests.fakes import strict_records
from tests.unit.test_codec import BTAG_HEX, LATEST, LIMIT, encode, event, good_lines, judge, line

L1 = line(1)
TEXT_FIELDS = [field for field, value in event().items() if isinstance(value, str)]


def with_raw(field: str, token: bytes) -> bytes:
    """A line in which the value of one field is written with these very bytes."""
    marked = line(1, **{field: "@@@"})
    assert marked.count(b'"@@@"') == 1
    return marked.replace(b'"@@@"', token)


def with_length(number: int, length: int, **changes: Any) -> bytes:
    """A good line of exactly so many bytes."""
    shortest = line(number, Username="x", **changes)
    padded = shortest.replace(b'"x"', b'"' + b"x" * (length - len(shortest) + 1) + b'"')
    assert len(padded) == length
    return padded


# Values --------------------------------------------------------------------------------------------------------------


FRACTIONS = [b"1.0", b"1e3", b"1E0", b"0.1e1", b"100e-2", b"1e-400"]
OUT_OF_RANGE = [
    b"0",
    b"-0",
    b"-1",
    b"9223372036854775808",
    b"18446744073709551615",
    b"18446744073709551616",
    b"1" * 400,
]
OTHER_TYPES = [b"true", b'"1"', b"[1]"]


@each("token", [*FRACTIONS, *OUT_OF_RANGE, *OTHER_TYPES])
@each("field", ["ConsumerID", "BrandID"])
def test_an_id_is_a_whole_number_written_as_one(field: str, token: bytes):
    assert judge(with_raw(field, token)) == FIELD_RULES[field]


@each("token", [b"01", b"1.", b"+1", b"1_0", b"-", b".5", b"1e", b"--1", b"NaN", b"-Infinity"])
def test_what_is_no_number_of_json_is_no_json(token: bytes):
    assert judge(with_raw("ConsumerID", token)) == "json"


@pytest.mark.parametrize("token", [b"1", b"9223372036854775807", b" 5", b"5\t"])
def test_an_id_reaches_up_to_the_largest_signed_number(token: bytes):
    assert judge(with_raw("ConsumerID", token)) == ""


@each(
    ("escape", "rule"),
    [
        (rb"\u0000", ""),
        (rb"\/\b\f\n\r\t\"\\", ""),
        (rb"\ud83d\udc34", ""),
        (rb"\uDBFF\uDFFF", ""),
        ("\u2028\u2029\x7f\ufeff".encode(), ""),
        (rb"\ud800", "json"),
        (rb"\udc00", "json"),
        (rb"\ud800\ud800", "json"),
        (rb"\udc00\ud800", "json"),
        (rb"\ud800\u0041", "json"),
        (rb"\x41", "json"),
        (rb"\u12", "json"),
        (b"\x00", "json"),
        (b"\x1f", "json"),
    ],
)
def test_escapes_and_control_characters(escape: bytes, rule: str):
    assert judge(with_raw("Username", b'"a' + escape + b'z"')) == rule


@each("field", TEXT_FIELDS)
@each(
    "data",
    [b"\xff", b"\xc0\x80", b"\xe9", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc3"],
)
def test_what_is_not_utf8_is_told_as_such_in_every_field(field: str, data: bytes):
    value = json.dumps(event()[field]).encode()
    assert judge(with_raw(field, value[:-1] + data + b'"')) == "encoding"


@each("field", TEXT_FIELDS)
def test_half_a_surrogate_pair_is_refused_in_every_field(field: str):
    assert judge(with_raw(field, json.dumps(event()[field]).encode()[:-1] + rb'\udc00"')) == "json"


@pytest.mark.parametrize("value", ["2000-02-29T00:00:00Z", "1900-02-28T23:59:59Z", "0001-01-01T00:00:00Z"])
def test_a_real_instant_passes(value: str):
    assert judge(line(1, Timestamp=value)) == ""


NO_SUCH_DAY = ["1900-02-29", "2023-02-29", "2026-02-30", "2026-04-31", "2026-00-10", "2026-13-10", "2026-10-00"]
NO_SUCH_TIME = ["24:00:00", "25:00:00", "00:60:00", "00:00:60", "23:59:60", "00:00:61"]
OTHER_FORMS = [
    "2026-10-10T00:00:00-00:00",
    "2026-10-10T00:00Z",
    "2026-10-10T00:00:00,0Z",
    "26-10-10T00:00:00Z",
    "+026-10-10T00:00:00Z",
    "2026-10-10T00:00:00\u0005",
    "\u0662026-10-10T00:00:00Z",
    "2026/10/10T00:00:00Z",
    "2026-W42-6T00:00:00Z",
    "2026-293T00:00:00.0Z",
    "",
]


@each(
    "value",
    [
        *(f"{day}T00:00:00Z" for day in NO_SUCH_DAY),
        *(f"2026-10-10T{time}Z" for time in NO_SUCH_TIME),
        *OTHER_FORMS,
        "9999-12-31T23:59:59Z",
    ],
)
def test_what_is_no_instant_of_the_past_is_refused(value: str):
    assert judge(line(1, Timestamp=value)) == "timestamp"


@each(
    ("field", "values"),
    [
        ("Timestamp", ['1-2-3T4:5:Z","--T::Z', "20261110123000202611"]),
        ("Timestamp", ["2026-11-10T12:30:00Z", '","2026-11-10T12:30:']),
        ("IP", ["1.2.3.4,5.6.7.8", ""]),
        ("IP", ["1.2.3", "4.5.6.7.8"]),
        ("IP", ["1.2.3.", "4.5.6.7"]),
        ("BTag", [f"1_{BTAG_HEX}\n2_{BTAG_HEX}", ""]),
        ("BTag", [f"1_{BTAG_HEX}\n", f"2_{BTAG_HEX}"]),
        ("EventId", ["0f8fad5bd-9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950e"]),
    ],
)
def test_values_that_are_good_only_together_are_refused_each(field: str, values: list[str]):
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
def test_the_last_instant_is_the_clock_plus_what_is_allowed(now_s: float, seconds: int, expected: str):
    assert latest_timestamp(now_s, seconds) == expected


# Lines ---------------------------------------------------------------------------------------------------------------


LINES = [
    ("NUL at the end", L1 + b"\0", "json"),
    ("blank and NUL in front", b" \0" + L1, "json"),
    ("vertical tab", L1 + b"\x0b", "json"),
    ("form feed", b"\x0c" + L1, "json"),
    ("byte order mark", b"\xef\xbb\xbf" + L1, "json"),
    ("no-break space", b"\xc2\xa0" + L1, "json"),
    ("comment in front", b"//" + L1, "json"),
    ("comment behind", L1 + b"//", "json"),
    ("comma in front", b"," + L1, "json"),
    ("comma behind", L1 + b",", "json"),
    ("null in front", b"null," + L1, "json"),
    ("two nulls", b"null,null", "json"),
    ("empty array", b"[]", "json"),
    ("true", b"true", "json"),
    ("opened", b"{", "json"),
    ("closed", b"}", "json"),
    ("empty object", b"{}", "event_id"),
    ("empty name only", b'{"":1}', "unknown_field"),
    ("empty name", L1[:-1] + b',"":1}', "unknown_field"),
    ("newline within the name of an unknown field", L1[:-1] + rb',"a\nb":1}', "unknown_field"),
    ("newline at the start of the name of an unknown field", L1[:-1] + rb',"\nfoo":1}', "unknown_field"),
    ("name like a message", L1[:-1] + b',"x - at `$.IP`":1}', "unknown_field"),
    ("deep unknown value", L1[:-1] + b',"x":' + b"[" * 800 + b"}", "json"),
    ("a batch", b'[{"EventType":"Acquisition","events":[' + L1 + b"]}]", "json"),
]


@each(("raw", "rule"), [case[1:] for case in LINES])
def test_a_line_as_a_whole(raw: bytes, rule: str):
    assert judge(raw) == rule


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"Username":[', b'{"EventId":{"EventId":'])
def test_the_deepest_nesting_is_refused_like_any_other_line(opening: bytes):
    deep = opening * 100_000
    codec = Codec(strict_records(10), max_record_bytes=len(deep))
    pieces = encode(b"\n".join([line(5), deep, line(6)]) + b"\n", codec=codec, room_bytes=1 << 24)
    assert good_lines(pieces) == [line(5), line(6)]
    assert [rejection.raw == deep for piece in pieces for rejection in piece.span.rejections] == [True]


@each("at", range(1, len(L1)))
def test_an_object_cut_by_a_newline_anywhere_is_two_bad_lines(at: int):
    two = line(7) + b"," + line(8)
    pieces = encode(b"\n".join([line(5), L1[:at], L1[at:], two, line(6)]) + b"\n")
    assert sum(len(piece.span.rejections) for piece in pieces) == 3
    assert good_lines(pieces) == [line(5), line(6)]


def test_every_short_sequence_of_odd_lines_gets_the_verdicts_of_its_lines():
    """Two objects on one line and one object over two lines must not make up for each other."""
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
    is_good = {name: name == "good" for name in kinds}
    for names in ((*three, "good") for three in product(kinds, repeat=3)):
        pieces = encode(
            b"\n".join(kinds[name] for name in names) + b"\n", codec=Codec(strict_records(0), max_record_bytes=LIMIT)
        )
        good = [kinds[name] for name in names if is_good[name]]
        assert good_lines(pieces) == good, names
        records = sum(piece.span.records for piece in pieces)
        assert records == sum(name != "blank" for name in names), names
        assert sum(len(piece.span.rejections) for piece in pieces) == records - len(good), names


def test_a_refused_line_keeps_its_carriage_return_and_knows_its_event():
    refused = line(1, IP="") + b"\r"
    (piece,) = encode(refused + b"\n" + line(2) + b"\r\n", start=70)
    (rejection,) = piece.span.rejections
    assert (rejection.raw, rejection.start_offset, rejection.end_offset) == (refused, 70, 70 + len(refused))
    assert rejection.event_id == json.loads(refused)["EventId"]
    assert piece.lines == line(2) + b"\r"


@each("data", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"\xef\xbb\xbf\r\n\r\n", b"\0" * 300, b" \0\n"])
def test_nothing_but_marks_blanks_and_holes_is_no_record(data: bytes):
    (piece,) = encode(data)
    assert (piece.span.start_offset, piece.span.end_offset, piece.span.records) == (0, len(data), 0)


def test_the_tail_of_a_piece_is_what_stands_before_its_end():
    data = b"\n".join([line(1), b"bad", line(2), b""])
    for piece in encode(data, start=900, room_events=1):
        end = piece.span.end_offset - 900
        assert piece.span.tail == data[max(0, end - MARKER_BYTES) : end]


def test_a_line_of_which_only_the_position_is_known_is_one_dead_letter():
    chunk = Chunk(
        stream=Stream(stream_id=1, kind="file", path="x"), start_offset=7, end_offset=99, data=b"", is_oversized=True
    )
    piece = Codec(strict_records(10), max_record_bytes=10).encode(chunk, 7, room_events=1, room_bytes=1, latest=LATEST)
    assert piece is not None
    assert (piece.span.records, piece.span.unsettled, piece.span.end_offset) == (1, 0, 99)
    (rejection,) = piece.span.rejections
    assert (rejection.rule, rejection.start_offset, rejection.end_offset) == ("oversized", 7, 99)


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [500, 501, 777])
def test_a_long_line_is_found_wherever_it_stands_in_the_windows_of_the_search(limit: int):
    codec = Codec(strict_records(0), max_record_bytes=limit)
    for shift in range(0, limit, 7):
        for length, rules in ((limit, []), (limit + 1, ["oversized"])):
            # Blank lines in front move the long line over the edges of the windows.
            lines = [b" " * 10] * (shift // 11) + [b" " * (shift % 11), with_length(1, length), line(2), line(3)]
            pieces = encode(b"\n".join(lines) + b"\n", codec=codec)
            assert [each.rule for piece in pieces for each in piece.span.rejections] == rules, (shift, length)


def pack(data: bytes, *, max_record_bytes: int, max_bytes: int) -> list[Batch]:
    """Pack a chunk as the pipeline does."""
    codec = Codec(strict_records(10), max_record_bytes=max_record_bytes)
    batcher = Batcher(max_events=100, max_bytes=max_bytes, linger_s=1)
    stream = Stream(stream_id=1, kind="file", path="x")
    chunk = Chunk(stream=stream, start_offset=0, end_offset=len(data), data=data)
    offset, batches = 0, []
    while offset < len(data):
        piece = codec.encode(
            chunk, offset, room_events=batcher.room_events, room_bytes=batcher.room_bytes, latest=LATEST
        )
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
def test_a_line_of_exactly_the_limit_needs_room_like_any_other(length: int, spare: int, end: bytes):
    lines = [
        line(1, ConsumerID=1),
        with_length(2, length, ConsumerID=2),
        line(3, ConsumerID=3),
        with_length(4, length, ConsumerID=4),
    ]
    max_bytes = LIMIT + ENVELOPE + spare
    batches = pack(b"\n".join(lines) + end, max_record_bytes=LIMIT, max_bytes=max_bytes)
    assert [len(batch.body) for batch in batches if len(batch.body) > max_bytes] == []
    sent = [each for batch in batches for each in json.loads(batch.body)["events"]]
    assert sent == [json.loads(each) for each in lines]


@pytest.mark.parametrize("hole", [1, LIMIT - 500, LIMIT, 3 * LIMIT])
def test_a_hole_longer_than_a_record_does_not_make_the_record_oversized(hole: int):
    pieces = encode(line(5) + b"\n" + b"\0" * hole + L1 + b"\n" + line(6) + b"\n")
    assert good_lines(pieces) == [line(5), L1, line(6)]


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
    """Certain it has to be only that there is none: every second key is found, whatever stands in the values."""
    written = with_raw("Username", b'"%b"' % username.encode())
    assert may_repeat_keys(written, 1) is may_repeat
    assert may_repeat_keys(written.replace(b'"IP":', b'"IP":"1","IP":'), 1)
    assert may_repeat_keys(written.replace(b'"BrandID":', b'"BrandID":1,"BrandID":'), 1)
