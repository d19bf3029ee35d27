"""Records are normalised, get derived EventIds and are counted; deep nesting does no harm."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid5

from shipper.codec.codec import Codec
from shipper.codec.dedupe import accept_events
from shipper.codec.documents import read_rows
from shipper.codec.rules import NESTING_MAX
from shipper.config.settings import RecordsSettings
from shipper.model.framing import CsvRows
from tests.cases import each
from tests.unit.test_codec import LATEST, LIMIT, MISSING, chunk_of, encode, good_lines, joined, line

NAMESPACE = UUID("6f1d6b0e-6c7c-5d4b-9c1e-0f6f2a1f7a55")
LOW = {"ConsumerCountry": "gb"}


def codec(*, limit: int = LIMIT, **settings: Any) -> Codec:
    return Codec(RecordsSettings(dedupe_window=settings.pop("dedupe_window", 0), **settings), max_record_bytes=limit)


# Counting ------------------------------------------------------------------------------------------------------------


def test_each_normalised_field_is_counted_once_per_record():
    normalizing = codec()
    lines = [line(1), line(2, **LOW), line(3, **LOW, ConsumerID="5"), line(4, AffiliateID=MISSING)]
    encode(b"\n".join(lines), codec=normalizing)
    assert +normalizing.changes.normalized == {"ConsumerCountry": 2, "ConsumerID": 1, "AffiliateID": 1}


def test_each_unknown_field_is_counted_once_per_record():
    dropping = codec()
    encode(b"\n".join([line(1, x=1), line(2, x=1, y=None), line(3)]) + b"\n", codec=dropping)
    assert +dropping.changes.unknown == {"x": 2, "y": 1}


def test_records_encoded_in_several_pieces_are_counted_once():
    normalizing = codec()
    # They grow, so that the first try takes more than there is room for, and is given up.
    lines = [line(number, AffiliateID=MISSING, ConsumerState=MISSING, Username="u") for number in range(40)]
    pieces = encode(b"\n".join(lines) + b"\n", codec=normalizing, room_bytes=LIMIT)
    assert len(good_lines(pieces)) == 40
    assert all(len(piece.lines) <= LIMIT for piece in pieces)
    assert +normalizing.changes.normalized == {"AffiliateID": 40, "ConsumerState": 40}


def test_nothing_is_counted_if_nothing_is_changed():
    normalizing = codec()
    encode(b"\n".join([line(1), b"x", line(2, IP="x")]) + b"\n", codec=normalizing)
    assert not +normalizing.changes.normalized
    assert not +normalizing.changes.unknown


# Room ----------------------------------------------------------------------------------------------------------------


def test_one_record_that_outgrows_the_room_is_left_for_later():
    normal, chunk = line(1), chunk_of(line(1, AffiliateID=MISSING) + b"\n")
    assert codec().encode(chunk, 0, room_events=5, room_bytes=len(normal) - 1, latest=LATEST) is None
    piece = codec().encode(chunk, 0, room_events=5, room_bytes=len(normal), latest=LATEST)
    assert len(piece.lines) == len(normal)


def test_duplicates_are_found_by_the_rewritten_ids():
    first, with_window = "0f8fad5b-d9cb-469f-a165-000000000001", codec(dedupe_window=10)
    spelled = [line(1), line(EventId=first.upper()), line(EventId=f"{{{first}}}"), line(2)]
    pieces = encode(b"\n".join(spelled) + b"\n", codec=with_window)
    assert (sorted(good_lines(pieces)), joined(pieces).waits) == ([line(1), line(1), line(1), line(2)], 2)
    for piece in pieces:
        accept_events(with_window.window, piece.span, range(piece.events))
    again = joined(encode(b"\n".join(spelled) + b"\n", codec=with_window))
    assert (good_lines([again]), again.span.duplicates) == ([], 4)


# Derived EventIds ----------------------------------------------------------------------------------------------------


@each(
    ("fields", "changes", "key"),
    [
        ((), {}, [7, 1]),
        ((), {"ConsumerID": "5", "BrandID": "11"}, [11, 5]),
        (("ConsumerID",), {"ConsumerID": 2**63 - 1}, [2**63 - 1]),
        (("Timestamp", "IP"), {"Timestamp": "2026-11-20T12:30:00.5+00:00"}, ["2026-11-20T12:30:00Z", "192.0.2.1"]),
        (("Username",), {"Username": 'é"\\\n🐴'}, ['é"\\\n🐴']),
        (("ConsumerCountry",), LOW, ["GB"]),
        (("AffiliateID",), {"AffiliateID": 5}, ["5"]),
    ],
)
def test_a_derived_id_is_a_uuid_over_the_values_as_they_are_sent(
    fields: tuple[str, ...], changes: dict[str, Any], key: list[Any]
):
    pieces = encode(line(EventId=MISSING, **changes) + b"\n", codec=codec(event_id="derive", event_id_fields=fields))
    name = json.dumps(["Acquisition", *key], ensure_ascii=False, separators=(",", ":"))
    (sent,) = good_lines(pieces)
    assert json.loads(sent)["EventId"] == str(uuid5(NAMESPACE, name))


def test_a_repeated_player_is_a_duplicate_by_the_derived_id():
    again = line(EventId=MISSING, Username="another", ConsumerID="1")
    with_window = codec(event_id="derive", dedupe_window=10)
    (first,) = encode(line(EventId=MISSING) + b"\n", codec=with_window)
    accept_events(with_window.window, first.span, range(1))
    (piece,) = encode(again + b"\n", codec=with_window)
    assert (good_lines([piece]), piece.span.duplicates) == ([], 1)


# Depth ---------------------------------------------------------------------------------------------------------------

OF_USERNAME = {"event_id": "derive", "event_id_fields": ("Username",)}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropped": ({}, {"x": "@@"}),
    "dropped, and something is normalised": ({}, {"x": "@@", **LOW}),
    "kept": ({"unknown_fields": "keep"}, {"x": "@@"}),
    "kept, strict": ({"unknown_fields": "keep", "mode": "strict"}, {"x": "@@"}),
    "kept, and something is normalised": ({"unknown_fields": "keep"}, {"x": "@@", **LOW}),
    "refused": ({"unknown_fields": "reject"}, {"x": "@@"}),
    "refused, and something is normalised": ({"unknown_fields": "reject"}, {"x": "@@", **LOW}),
    "in the place of a text": ({}, {"Username": "@@"}),
    "in the place of a text, and something is normalised": ({}, {"Username": "@@", **LOW}),
    "in the place of a number": ({}, {"ConsumerID": "@@", **LOW}),
    "what an id is made of": (OF_USERNAME, {"Username": "@@", "EventId": ""}),
    "mapped by values": ({"mapping": {"Username": {"from": "x", "values": {"a": "b"}, "default": "c"}}}, {"x": "@@"}),
    "mapped by a template": ({"mapping": {"Username": {"template": "{x}"}}}, {"x": "@@"}),
}


@each(
    ("row", "rules"),
    [
        (b'1,"x,3\n4,y",6', ["csv"]),
        (b'1,"x,3\n4,5,6\n7,y",9', ["csv"]),
        (b'1,"x, y\nz",3', []),
        (b'1,"\n,",""\n', []),
    ],
)
def test_a_value_that_swallowed_a_row_after_a_stray_quote_is_refused(row: bytes, rules: list[str]):
    _, faults = read_rows([row, b"1,2,3"], CsvRows(b"a,b,c\n", ","))
    assert [rule for rule, _ in faults.values()] == rules


@each("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
@each("way", WAYS)
@each("depth", [NESTING_MAX - 1, NESTING_MAX, 900, 1100])
def test_no_nesting_depth_raises_or_affects_a_neighbour(way: str, brackets: tuple[bytes, bytes], depth: int):
    settings, changes = WAYS[way]
    start, end = brackets
    good = line(2, x="a") if "mapping" in settings else line(2)
    deep = line(1, **changes).replace(b'"@@"', start * depth + b"1" + end * depth)
    lines = [b"x", deep, good]
    pieces = encode(b"\n".join(lines) + b"\n", codec=codec(limit=20_000, **settings), room_bytes=1 << 20)
    ids = [event_id for piece in pieces for event_id in piece.event_ids]
    assert "0f8fad5b-d9cb-469f-a165-000000000002" in ids
    refused = [rejection.rule for piece in pieces for rejection in piece.span.rejections]
    assert refused.count("json") == 1 + (depth >= NESTING_MAX)
