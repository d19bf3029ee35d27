"""
The codec on random chunks: each record gets the verdict of an oracle, independent of its neighbours.

The oracle and the checks come from the fuzzer, `tests/fuzz/records.py`. Records are generated from values that are
valid, can be normalised or are invalid, so that every path of the codec is taken.
"""

from __future__ import annotations

import json
from datetime import datetime
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec.codec import Codec
from shipper.codec.rules import are_btags, are_event_ids, are_ips, are_timestamps
from shipper.config.settings import RecordsSettings
from shipper.pipeline.batching import Batcher
from tests.fakes import strict_records
from tests.fuzz.records import LIMIT, MUTATE, ORACLE_SETTINGS, check_alone, check_verdicts
from tests.unit.test_codec import BTAG_HEX, LATEST, MISSING, encode, event, good_lines, line

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
SETTINGS = [
    RecordsSettings(mode=mode, unknown_fields=unknown, **more)
    for mode in ("normalize", "strict")
    for unknown in ("drop", "reject", "keep")
    for more in (
        {},
        {"event_id": "derive"},
        {"relax": ("event_id", "ip", "timestamp", "currency", "state", "consumer_id")},
        {"allowed_statuses": ("Verified", "Closed"), "assume_timezone": "Europe/Malta"},
        {"mapping": {"IP": "client.ip", "ConsumerStatus": {"from": "s", "values": {"1": "Open"}, "default": "New"}}},
        {"mapping": {"Username": {"template": "{Username}-{s}", "default": "u"}}, "event_id": "derive"},
    )
]

# Records --------------------------------------------------------------------------------------------------------------

VALUES: dict[str, list[Any]] = {
    "EventId": [UUID.upper(), f"{{{UUID}}}", UUID.replace("-", ""), "", None, MISSING, f"{UUID}0", "\u0660" * 36, 5],
    "IP": [" 1.2.3.4 ", "::ffff:1.2.3.4", "::1", "01.2.3.4", "1.2.3.4\n1.2.3.4", None, MISSING, 5],
    "Timestamp": [
        *("2026-11-20T14:30:00+02:00", "2026-11-20T12:30:00.999999999Z", "2026-11-20 12:30:00", "2026-03-29T02:30:00"),
        *("2026-11-20T24:00:00Z", "2999-01-01T00:00:00Z", "2026-11-20T12:30:00+00:00\n", None),
    ],
    "BTag": [f" 5_{BTAG_HEX}", f"5_{BTAG_HEX}\n5_{BTAG_HEX}", f"5_{BTAG_HEX.upper()}", "5", None],
    "ConsumerID": ["17", "007", "1\n2", "+1", 0, 2**63 - 1, 2**63, 10**30, 1.5, True, None, MISSING, "1" * 40],
    "ConsumerCountry": ["gb", "ß", "gb\nfr", "GBR", 5, None],
    "ConsumerCurrencyID": ["eur", "\uff45\uff55\uff52", "", 978],
    "Username": ["Žluťoučký 🐴", "{,", 'a","b', "},null,\n{", "\u2028", "", None, "x" * 900, ["gb"]],
    "BrandID": ["7", "0", -1, 1.0, True, 2**63 - 1, 2**64, [], {"a": 1}],
    "CustomerCurrencyID": [8, "", 2**70, 8.5, None],
    "ConsumerStatus": ["Closed", "unknown field `x`", "", 1],
    "AffiliateID": [70012, None, MISSING, "a", []],
    "ConsumerState": ["nj", "NJ", None, MISSING, 5, "New Jersey"],
    "client": [{"ip": "192.0.2.9"}, {"ip": " ::ffff:192.0.2.9"}, {}, "x", None],
    "s": ["1", 1, "2", None, "", True, {"a": []}],
    "x": [1, None, {"IP": "x"}, [1.50, "{,"], "y" * 1200],
    "": [1],
}
DIGITS = st.integers(-1, 300).map(str) | st.sampled_from(["", "00", "01", " 1", "1 ", "1.1"])
NEAR: dict[str, st.SearchStrategy[Any]] = {
    "EventId": st.uuids().map(str) | st.text("0a-A", min_size=35, max_size=37),
    "IP": st.lists(DIGITS, min_size=3, max_size=5).map(".".join),
    "Timestamp": st.builds(
        "{:04}-{:02}-{:02}{}{:02}:{:02}:{:02}{}".format,
        *(st.sampled_from([1999, 2000, 2024, 2025, 2026]), st.integers(0, 13), st.integers(0, 32)),
        *(st.sampled_from("TTTTt "), st.integers(0, 24), st.integers(0, 60), st.integers(0, 61)),
        st.sampled_from("ZZZZz"),
    )
    | st.datetimes().map(datetime.isoformat),
    "BTag": st.from_regex(r"\A[0-9]{0,3}[_-]?[0-9a-gA-G]{31,33}\n?\Z"),
    "ConsumerID": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    "ConsumerCountry": st.text("ABZaz1 É", max_size=3),
    "ConsumerCurrencyID": st.text("ABZaz1 É", max_size=4),
    "Username": st.text(max_size=5),
    "ConsumerState": st.text("ABZaz1 É", max_size=3),
}
ANYTHING = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([[None], {"a": 1}])
SEPARATORS = st.sampled_from([(",", ":"), (",", ":"), (", ", ": "), (" , ", "\t: ")])
RAW_EXTRAS = [b"1e400", b"1" * 50, b"1.50", b'"\\u0041\\/"', b"[1 ,2]", b"NaN", b'"\\ud800"']
CLEAN = st.builds(lambda number, name: line(number, Username=name or "x"), st.integers(0, 99), st.text(max_size=9))


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """A record with up to three fields changed, missing, added or moved."""
    document = event(EventId=f"0f8fad5b-d9cb-469f-a165-{draw(st.integers(0, 99)):012x}")
    for field in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3)):
        value = draw(st.sampled_from(VALUES[field]) | NEAR.get(field, ANYTHING))
        document[field] = value
        if value is MISSING:
            del document[field]
    items = list(document.items())
    if draw(st.integers(0, 5)) == 0:
        draw(st.randoms(use_true_random=False)).shuffle(items)
    raw = json.dumps(dict(items), ensure_ascii=draw(st.booleans()), separators=draw(SEPARATORS)).encode()
    if draw(st.integers(0, 5)) == 0:
        raw = raw[:-1] + b',"raw":' + draw(st.sampled_from(RAW_EXTRAS)) + b"}"
    return raw + draw(st.sampled_from([b"", b"", b"", b"\r", b" "]))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A mutated valid line, possibly split into several lines."""
    return MUTATE(draw(st.randoms(use_true_random=False)), draw(CLEAN), [line(5)])


# Values whose halves, as two lines, would be valid only if the codec joined them with its separator.
HALVES = [
    ("[1", "2]"),
    ("[[1", "2]]"),
    ('[{"a":1}', '{"b":2}]'),
    ('[{"a":[1', "2]}]"),
    ('{"a":[', "1]}"),
    ('"a', 'b"'),
]


def straddling(number: int, halves: tuple[str, str], **changes: Any) -> list[bytes]:
    """Return two lines that together are one record, and a line of two records."""
    first, second = halves
    whole = line(number, **changes)[:-1] + f',"x":{first}\n{second}}}'.encode()
    return [*whole.split(b"\n"), line(number + 1, **changes) + b",null," + line(number + 2, **changes)]


NO_RECORDS = [b"null", b"[]", b"{}", b"{", b"x", b'{"a":1}{"a":1}', b"\xff", b'{"IP":"\\ud800"}', b"z" * (LIMIT + 1)]
BLANK = [b"", b"\r", b" \t", b"\0\0"]
CHUNKS = st.lists(
    st.one_of(
        *(CLEAN, CLEAN, records(), records(), mutated()),
        *(st.sampled_from([*NO_RECORDS, *BLANK]), st.binary(max_size=40)),
        st.builds(straddling, st.integers(0, 9), st.sampled_from(HALVES)).map(b"\n".join),
    ),
    min_size=1,
    max_size=14,
).map(b"\n".join)
ROOMS = st.sampled_from([1, 2, 3, 5, 1000])


# Tests ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(CHUNKS, st.sampled_from(ORACLE_SETTINGS), ROOMS)
def test_records_get_the_verdict_of_an_independent_oracle(data: bytes, how: RecordsSettings, room: int):
    check_verdicts(data, how, room)


@settings(max_examples=150, deadline=None)
@given(CHUNKS, st.sampled_from(SETTINGS), ROOMS)
def test_records_get_the_verdicts_and_bytes_that_each_gets_alone(data: bytes, how: RecordsSettings, room: int):
    check_alone(data, how, room)


@settings(max_examples=40, deadline=None)
@given(CLEAN, st.sampled_from([how for how in SETTINGS if not how.mapping]))
def test_a_clean_line_is_sent_byte_for_byte(clean: bytes, how: RecordsSettings):
    assert [each.data for each in check_alone(clean, how, 1)] == [clean]


@pytest.mark.parametrize("change", [{}, {"ConsumerCountry": "gb"}])
@pytest.mark.parametrize("unknown", ["drop", "reject", "keep"])
def test_an_object_on_two_lines_and_two_objects_on_one_line_are_refused_together(unknown: str, change: dict):
    mapping = {"IP": "IP", "Username": {"from": "x.y", "default": "nobody"}}
    for halves, more in product(HALVES, ({}, {"mode": "strict"}, {"mapping": mapping})):
        lines = [line(8), *straddling(1, halves, **change), line(9)]
        judged = check_alone(b"\n".join(lines), RecordsSettings(unknown_fields=unknown, **more), 1000)
        assert [each.rule for each in judged].count("json") == 3, (halves, more)


@pytest.mark.long
def test_thousands_of_mutated_lines_get_the_verdicts_that_each_gets_alone(rng: Random):
    for _ in range(20):
        spoiled_share = rng.choice([0, 0.01, 0.05, 0.3, 0.9])
        lines = [line(number, Username="u" * rng.randrange(1, 60), ConsumerID=number + 1) for number in range(300)]
        chunk = [MUTATE(rng, each, lines) if rng.random() < spoiled_share else each for each in lines]
        check_alone(b"\n".join(chunk), ORACLE_SETTINGS[1], rng.choice([1, 7, 100, 1000]))


@settings(max_examples=25, deadline=None)
@given(CHUNKS, st.sampled_from(SETTINGS), st.integers(1, 5))
def test_each_new_event_id_is_sent_before_its_repeats(data: bytes, how: RecordsSettings, room: int):
    every = [each for each in check_alone(data, how, 1000) if not each.rule]
    pieces = encode(data + b"\n", codec=Codec(how, max_record_bytes=LIMIT), room_events=room, room_bytes=LIMIT)
    new = [each for piece in pieces for each in piece.event_ids[: len(piece.event_ids) - piece.waits]]
    assert new == list(dict.fromkeys(json.loads(each.data)["EventId"] for each in every))
    assert sum(piece.span.duplicates for piece in pieces) == 0, "a repeat is sent before the first is accepted"
    assert len(good_lines(pieces)) == len(every)


@settings(max_examples=40, deadline=None)
@given(CHUNKS)
def test_bodies_are_json_and_hold_the_accepted_lines_byte_for_byte(data: bytes):
    accepted = [each.data for each in check_verdicts(data, ORACLE_SETTINGS[1], 1000) if not each.rule]
    batcher = Batcher(max_events=7, max_bytes=1 << 20, linger_s=1)
    bodies: list[bytes] = []

    def take() -> None:
        batch = batcher.take()
        document = json.loads(batch.body)
        assert document["EventType"] == "Acquisition"
        assert len(document["events"]) == batch.events == sum(len(ordinals) for _, ordinals in batch.parts)
        bodies.append(batch.body)

    codec = Codec(strict_records(), max_record_bytes=LIMIT)
    for piece in encode(b"\n".join(accepted) + b"\n", codec=codec, room_events=7) if accepted else []:
        while len(piece.event_ids) > batcher.room_events:
            take()
        batcher.add(piece, now=0)
    while batcher.due_at is not None:
        take()
    assert all(sum(body.count(each) for body in bodies) >= accepted.count(each) for each in accepted)
    assert sum(len(json.loads(body)["events"]) for body in bodies) == len(accepted)


# Columns --------------------------------------------------------------------------------------------------------------

COLUMNS = {
    are_ips: NEAR["IP"] | st.text("0129.,- []", max_size=9) | st.just("192.0.2.1"),
    are_btags: NEAR["BTag"] | st.text("1_a\n", max_size=6) | st.just(f"7_{BTAG_HEX}\n8_{BTAG_HEX}"),
    are_event_ids: st.uuids().map(str) | st.text("0a-G\u0660", min_size=36, max_size=36),
    lambda column: are_timestamps(column, LATEST): st.one_of(
        st.datetimes(datetime(1, 1, 1), datetime(2027, 1, 1)).map(lambda each: f"{each:%Y-%m-%dT%H:%M:%SZ}".zfill(20)),
        st.text("01256:", min_size=8, max_size=8).map(lambda each: f"2026-11-10T{each}Z"),
        st.text('01-T:Z",', min_size=20, max_size=20),
        st.sampled_from(
            [
                *('1-2-3T4:5:Z","--T::Z', "20261110123000202611", "2026-02-30T00:00:00Z", "2026-11-10T12:60:00Z"),
                *("2026-11-10T1:230:00Z", "2026-11-10T12:3:000Z", "2026-11-10T12:300:0Z", "2026-11-10T12:30:0Z0"),
                *("2026-11-1T012:30:00Z", "2026-11-10T24:00:00Z", "2026-11-10T12:30:60Z", "2026-11-10T12:30:00Z"),
            ]
        ),
    ),
}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_column_is_valid_if_and_only_if_each_of_its_values_is(data: st.DataObject):
    check = data.draw(st.sampled_from(list(COLUMNS)))
    column = data.draw(st.lists(COLUMNS[check], min_size=1, max_size=5))
    assert check(column) == all(check([value]) for value in column)
