"""Every rule of the wire form, good and bad, each among good neighbours that must not suffer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from shipper.codec import FIELD_RULES, MESSAGES, Codec, accept_events, refuse_event
from shipper.config.settings import RecordsSettings
from shipper.model.records import Chunk, EncodedChunk, Stream
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
    """A good line with an EventId of its own, unless one is given."""
    changes.setdefault("EventId", f"0f8fad5b-d9cb-469f-a165-{number:012x}")
    return json.dumps(event(**changes), ensure_ascii=False, separators=(",", ":")).encode()


def encode(
    data: bytes, *, start: int = 0, codec: Codec | None = None, room_events: int = 1000, room_bytes: int = 1 << 20
) -> list[EncodedChunk]:
    codec = codec or Codec(strict_records(1000), max_record_bytes=LIMIT)
    stream = Stream(stream_id=1, kind="file", path="x")
    chunk = Chunk(stream=stream, start_offset=start, end_offset=start + len(data), data=data)
    pieces = []
    offset = start
    while offset < chunk.end_offset:
        piece = codec.encode(chunk, offset, room_events=room_events, room_bytes=room_bytes, latest=LATEST)
        assert piece is not None
        assert piece.span.start_offset == offset
        offset = piece.span.end_offset
        pieces.append(piece)
    assert offset == chunk.end_offset
    for piece in pieces:
        good = len(piece.event_ids)
        assert piece.span.records == good + len(piece.span.rejections) + piece.span.duplicates
        assert piece.span.unsettled == good == len(piece.consumer_ids)
        assert len(piece.lines.split(b"\n")) == good or (not good and not piece.lines)
    return pieces


def joined(pieces: Sequence[EncodedChunk]) -> EncodedChunk:
    """Make one piece of those of a chunk: how many there are is the codec's business."""
    spans = [piece.span for piece in pieces]
    span = replace(
        spans[0],
        end_offset=spans[-1].end_offset,
        records=sum(span.records for span in spans),
        unsettled=sum(span.unsettled for span in spans),
        duplicates=sum(span.duplicates for span in spans),
        rejections=[each for span in spans for each in span.rejections],
    )
    return replace(
        pieces[0],
        span=span,
        lines=b"\n".join(piece.lines for piece in pieces if piece.lines),
        events=sum(piece.events for piece in pieces),
        consumer_ids=[each for piece in pieces for each in piece.consumer_ids],
        waits=sum(piece.waits for piece in pieces),
    )


def good_lines(pieces: list[EncodedChunk]) -> list[bytes]:
    return [each for piece in pieces if piece.lines for each in piece.lines.split(b"\n")]


def judge(raw: bytes) -> str:
    """Put a line between good ones and give the rule that it breaks, or an empty string."""
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
GOOD: list[tuple[str, Any]] = [
    ("IP", "0.0.0.0"),
    ("IP", "255.255.255.255"),
    ("IP", "10.0.249.250"),
    ("Timestamp", "2024-02-29T23:59:59Z"),
    ("Timestamp", LATEST),
    ("Timestamp", "1970-01-01T00:00:00Z"),
    ("BTag", f"1_{BTAG_HEX.upper()}"),
    ("BTag", f"{'9' * 60}_{BTAG_HEX}"),
    ("ConsumerID", 2**63 - 1),
    ("ConsumerCountry", "ZZ"),
    ("ConsumerCurrencyID", "XXX"),
    ("Username", "Žluťoučký kůň 🐴"),
    ("Username", 'quote " back \\ slash'),
    ("Username", "null,\n,null"),
    ("Username", " "),
    ("CustomerCurrencyID", ""),
    ("ConsumerStatus", "Something else"),
    ("AffiliateID", "a-17"),
    ("ConsumerState", "NY"),
]
BAD: list[tuple[str, Any]] = [
    ("EventId", "0F8FAD5B-D9CB-469F-A165-70867728950E"),
    ("EventId", "{0f8fad5b-d9cb-469f-a165-70867728950e}"),
    ("EventId", "0f8fad5bd9cb469fa16570867728950e"),
    ("EventId", "0f8fad5b-d9cb-469f-a165-70867728950"),
    ("EventId", "0f8fad5b-d9cb-469f-a165-70867728950g"),
    ("EventId", "0f8fad5bd-9cb-469f-a165-70867728950e"),
    ("EventId", "0f8fad5b-d9cb-469f-a165-7086772895\u0660e"),
    ("EventId", "0f8fad5b_d9cb_469f_a165_70867728950e"),
    ("EventId", ""),
    ("IP", "256.1.1.1"),
    ("IP", "1.2.3"),
    ("IP", "1.2.3.4.5"),
    ("IP", "01.2.3.4"),
    ("IP", "1.2.3.00"),
    ("IP", " 1.2.3.4"),
    ("IP", "1.2.3.4 "),
    ("IP", "1,2.3.4"),
    ("IP", "1.2.3.4,5.6.7.8"),
    ("IP", "1..3.4"),
    ("IP", "-1.2.3.4"),
    ("IP", "1e1.2.3.4"),
    ("IP", "::ffff:1.2.3.4"),
    ("IP", "\u0661.2.3.4"),
    ("IP", ""),
    ("Timestamp", "2026-11-20T24:00:00Z"),
    ("Timestamp", "2026-11-20T23:59:60Z"),
    ("Timestamp", "2026-02-29T00:00:00Z"),
    ("Timestamp", "2026-11-31T00:00:00Z"),
    ("Timestamp", "0000-11-20T00:00:00Z"),
    ("Timestamp", "2026-11-20T12:30:00+00:00"),
    ("Timestamp", "2026-11-20T12:30:00.0Z"),
    ("Timestamp", "2026-11-20t12:30:00Z"),
    ("Timestamp", "2026-11-20T12:30:00z"),
    ("Timestamp", "2026-11-20 12:30:00Z"),
    ("Timestamp", "2026-11-20T12:30:00"),
    ("Timestamp", "20261-1-20T12:30:00Z"),
    ("Timestamp", "2026-11-21T00:05:01Z"),
    ("Timestamp", '2026-11-20","2026Z--'),
    ("BTag", f"1_{BTAG_HEX[:-1]}"),
    ("BTag", f"1_{BTAG_HEX}0"),
    ("BTag", f"_{BTAG_HEX}"),
    ("BTag", f"a1_{BTAG_HEX}"),
    ("BTag", f"1{BTAG_HEX}"),
    ("BTag", f"1_{BTAG_HEX}\n2_{BTAG_HEX}"),
    ("BTag", f"1_{BTAG_HEX}\n"),
    ("BTag", f"\u0661_{BTAG_HEX}"),
    ("BTag", f" 1_{BTAG_HEX}"),
    ("ConsumerID", 0),
    ("ConsumerID", -1),
    ("ConsumerID", 2**63),
    ("ConsumerID", 10**30),
    ("ConsumerID", 1.0),
    ("ConsumerID", "5"),
    ("ConsumerID", True),
    ("BrandID", 0),
    ("BrandID", 1.5),
    ("BrandID", "7"),
    ("ConsumerCountry", "gb"),
    ("ConsumerCountry", "GBR"),
    ("ConsumerCountry", ""),
    ("ConsumerCountry", "G1"),
    ("ConsumerCurrencyID", "gbp"),
    ("ConsumerCurrencyID", "GB"),
    ("ConsumerCurrencyID", "GBPP"),
    ("Username", ""),
    ("Username", 5),
    ("CustomerCurrencyID", 1),
    ("ConsumerStatus", ""),
    ("AffiliateID", 12),
    ("ConsumerState", "ny"),
    ("ConsumerState", "N"),
]


def test_a_plain_good_line_passes():
    assert judge(line(1)) == ""


@each(("field", "value"), GOOD)
def test_a_good_value_passes(field: str, value: Any):
    assert judge(line(1, **{field: value})) == ""


@each(("field", "value"), BAD)
def test_a_bad_value_breaks_the_rule_of_its_field(field: str, value: Any):
    assert judge(line(1, **{field: value})) == FIELD_RULES[field]


@each("field", FIELD_RULES)
@each("value", [None, MISSING, [], {}])
def test_each_field_must_be_there_and_of_its_type(field: str, value: Any):
    assert judge(line(1, **{field: value})) == FIELD_RULES[field]


L1, L2 = line(1), line(2)
HALF = L1.index(b',"BrandID"')
LINES: list[tuple[str, bytes, str]] = [
    ("two objects", L1 + L2, "json"),
    ("two objects with a blank", L1 + b" " + L2, "json"),
    ("two objects with a comma", L1 + b"," + L2, "json"),
    ("two objects with a null", L1 + b",null," + L2, "json"),
    ("an object and a null", L1 + b",null", "json"),
    ("null", b"null", "json"),
    ("an array", b"[" + L1 + b"]", "json"),
    ("a number", b"17", "json"),
    ("a string", b'"x"', "json"),
    ("an opened array", b"[", "json"),
    ("deep nesting", b"[" * 1900, "json"),
    ("an end of array", L1 + b"]", "json"),
    ("a torn line", L1[:100], "json"),
    ("NaN", L1.replace(b'"ConsumerID":1', b'"ConsumerID":NaN'), "json"),
    ("Infinity", L1.replace(b'"ConsumerID":1', b'"ConsumerID":Infinity'), "json"),
    ("a number that is too large", L1.replace(b'"ConsumerID":1', b'"ConsumerID":1e400'), "consumer_id"),
    ("a trailing comma", L1[:-1] + b",}", "json"),
    ("single quotes", L1.replace(b'"', b"'"), "json"),
    ("a raw tab in a string", L1.replace(b"quiet", b"qui\tet"), "json"),
    ("half a surrogate pair", L1.replace(b"quiet", rb"\ud800"), "json"),
    ("an unknown field", L1[:-1] + b',"Email":"a@b"}', "unknown_field"),
    ("a field with other letters", L1.replace(b"BrandID", b"brandID"), "unknown_field"),
    ("Latin-1 in a value", L1.replace(b"quiet", b"qui\xe9t"), "encoding"),
    ("Latin-1 in a key", L1[:-1] + b',"\xe9":1}', "encoding"),
    ("a surrogate in UTF-8", L1.replace(b"quiet", b"\xed\xa0\x80"), "encoding"),
    ("not JSON at all", b"Nov 20 12:00:00 host app[1]: started", "json"),
    ("an escaped key", L1.replace(b'"IP"', rb'"\u0049P"'), ""),
    ("blanks between tokens", json.dumps(event(EventId="0f8fad5b-d9cb-469f-a165-000000000009")).encode(), ""),
    ("blanks around", b"  " + L1 + b"\t ", ""),
    ("a carriage return at the end", L1 + b"\r", ""),
    ("fields in another order", json.dumps(dict(reversed(event().items()))).encode(), ""),
    ("a field twice, the last one good", L1[:-1] + b',"BrandID":9}', "repeated_key"),
    ("a field twice, the last one bad", L1[:-1] + b',"BrandID":0}', "repeated_key"),
]


@each(("raw", "rule"), [case[1:] for case in LINES])
def test_a_line_as_a_whole(raw: bytes, rule: str):
    assert judge(raw) == rule


@each(
    ("raw", "rules", "message"),
    [
        (
            line(1, IP="x", BrandID=0),
            ["ip", "brand_id"],
            "BrandID must be a whole number from 1 to 9223372036854775807; "
            "IP must be an IPv4 address in dotted-decimal form, without leading zeros",
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
            ["brand_id", "timestamp", "consumer_id"],
            None,
        ),
    ],
)
def test_each_rule_that_a_record_breaks_is_named(raw: bytes, rules: list[str], message: str | None):
    (piece,) = encode(raw)
    (rejection,) = piece.span.rejections
    assert set(rejection.faults) == set(rules)
    assert rejection.rule in rules
    assert message in {None, rejection.message}


@pytest.mark.parametrize(
    "halves",
    [
        (L1[:HALF], L1[HALF:]),
        (L1[:HALF], L1[HALF + 1 :]),  # the comma that a careless splice would put back is missing
        (L1[: L1.index(b"heron")], L1[L1.index(b"heron") :]),
    ],
    ids=["whole", "without its comma", "inside a string"],
)
def test_an_object_over_two_lines_is_refused_even_if_another_line_holds_two(halves: tuple[bytes, bytes]):
    pieces = encode(b"\n".join([line(5), *halves, L2 + b"," + line(3), line(6)]) + b"\n")
    assert [rejection.rule for piece in pieces for rejection in piece.span.rejections] == ["json"] * 3
    assert good_lines(pieces) == [line(5), line(6)]


def test_the_last_line_needs_no_newline():
    pieces = encode(L1 + b"\n" + L2)
    assert good_lines(pieces) == [L1, L2]
    assert pieces[-1].span.end_offset == len(L1) + 1 + len(L2)


def test_blank_lines_and_crlf_are_no_records():
    pieces = encode(b"\n\r\n" + L1 + b"\r\n\n \t\n" + L2 + b"\n\n")
    assert good_lines(pieces) == [L1 + b"\r", L2]
    assert sum(piece.span.records for piece in pieces) == 2


def test_a_chunk_of_nothing_is_a_span_of_nothing():
    (piece,) = encode(b"\n\n\n")
    assert (piece.span.records, piece.span.end_offset) == (0, 3)


def test_a_byte_order_mark_is_put_up_with_at_the_start_of_a_stream_only():
    assert good_lines(encode(b"\xef\xbb\xbf" + L1 + b"\n")) == [L1]
    assert encode(b"\xef\xbb\xbf" + L1 + b"\n", start=10)[0].span.rejections[0].rule == "json"


def test_nuls_in_front_of_a_line_are_a_hole_and_keep_the_offset_right():
    assert good_lines(encode(b"\0" * 500 + L1 + b"\n" + L2 + b"\n")) == [L1, L2]
    (piece,) = encode(b"\0" * 500 + b"x\n")
    assert (piece.span.rejections[0].start_offset, piece.span.rejections[0].raw) == (500, b"x")


@each("neighbours", [0, 1, 30])
@each(("length", "rule"), [(LIMIT - 1, None), (LIMIT, None), (LIMIT + 1, "oversized"), (9000, "oversized")])
def test_the_length_limit_is_exact(length: int, rule: str | None, neighbours: int):
    padded = line(7, Username="x")
    padded = padded.replace(b'"x"', b'"' + b"x" * (length - len(padded) + 1) + b'"')
    assert len(padded) == length
    around = [line(100 + number) for number in range(neighbours)]
    pieces = encode(b"\n".join([*around, padded, *[each.replace(b"-a165-", b"-b165-") for each in around]]) + b"\n")
    rules = [rejection.rule for piece in pieces for rejection in piece.span.rejections]
    assert rules == ([rule] if rule else [])
    assert sum(piece.span.records for piece in pieces) == 2 * neighbours + 1


def test_a_line_that_is_refused_for_its_length_needs_no_room():
    pieces = encode(L1 + b"\n" + b"x" * 5000 + b"\n" + L2 + b"\n", room_bytes=2100)
    assert [rejection.rule for piece in pieces for rejection in piece.span.rejections] == ["oversized"]
    assert good_lines(pieces) == [L1, L2]


def test_no_room_for_one_line_is_said_and_nothing_is_taken():
    codec = Codec(strict_records(10), max_record_bytes=LIMIT)
    stream = Stream(stream_id=1, kind="file", path="x")
    chunk = Chunk(stream=stream, start_offset=0, end_offset=len(L1) + 1, data=L1 + b"\n")
    assert codec.encode(chunk, 0, room_events=5, room_bytes=len(L1) - 1, latest=LATEST) is None
    assert codec.encode(chunk, 0, room_events=5, room_bytes=len(L1), latest=LATEST) is not None


@each("room_events", [1, 2, 7, 50, 1000])
def test_a_piece_is_filled_to_the_room_that_there_is(room_events: int):
    lines = [line(number, Username="x" * (number % 90 + 1)) for number in range(120)]
    pieces = encode(b"\n".join(lines) + b"\n", room_events=room_events)
    assert good_lines(pieces) == lines
    assert [len(piece.event_ids) for piece in pieces[:-1]] == [room_events] * (len(pieces) - 1)


def test_what_repeats_an_accepted_event_id_is_a_duplicate():
    told: list[str] = []
    codec = Codec(strict_records(10), max_record_bytes=LIMIT, on_duplicate=lambda event_id, *_: told.append(event_id))
    (first,) = encode(b"\n".join([L1, L2]) + b"\n", codec=codec)
    accept_events(codec.window, first.span, range(2))
    again = joined(encode(b"\n".join([line(3), L2, L1]) + b"\n", codec=codec))
    assert good_lines([again]) == [line(3)]
    assert (again.span.duplicates, again.waits) == (2, 0)
    assert told == [json.loads(L2)["EventId"], json.loads(L1)["EventId"]]


def test_what_repeats_an_unsettled_event_id_waits_behind_the_others():
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
    refuse_event(codec.window, first.span, first.event_ids[0])
    assert first.span.keys == b""
    (again,) = encode(L1 + b"\n", codec=codec)
    assert (good_lines([again]), again.waits) == ([L1], 0)


def test_an_empty_event_id_is_no_id():
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


def test_messages_name_fields_and_never_values():
    secret = "Zx9-unmistakable"
    for field in FIELD_RULES:
        (piece,) = encode(
            line(1, **{field: secret if field not in {"Username", "ConsumerStatus"} else [secret]}) + b"\n"
        )
        for rejection in piece.span.rejections:
            assert secret not in rejection.message
            assert field in rejection.message
