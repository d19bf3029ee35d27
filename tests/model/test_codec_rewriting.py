"""
Rewriting and the paths: a record's verdict and bytes are its own, whatever the settings, the neighbours and the cuts.

The records are put together from values of which some are clean, some can be put right and some are wrong, so that
each chunk is a mix, and each path of the codec is taken.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shipper.codec import Codec
from shipper.config.settings import RecordsSettings
from shipper.model.records import Rejection
from tests.unit.test_codec import BTAG_HEX, MISSING, encode, event, good_lines

LIMIT = 900
UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"

SETTINGS = [
    RecordsSettings(mode=mode, unknown_fields=unknown, dedupe_window=0, **more)
    for mode in ("normalize", "strict")
    for unknown in ("drop", "reject", "keep")
    for more in (
        {},
        {"event_id": "derive"},
        {"relax": ("event_id", "ip", "timestamp", "currency", "state", "consumer_id")},
        {"allowed_statuses": ("Verified", "Closed"), "assume_timezone": "Europe/Malta"},
        {
            "mapping": {
                "IP": "client.ip",
                "ConsumerStatus": {"from": "s", "values": {"1": "Verified"}, "default": "New"},
            }
        },
        {"mapping": {"Username": {"template": "{Username}-{s}", "default": "u"}}, "event_id": "derive"},
    )
]

VALUES: dict[str, list[Any]] = {
    "EventId": [UUID.upper(), f"{{{UUID}}}", UUID.replace("-", ""), "", None, MISSING, f"{UUID}0", "\u0660" * 36, 5],
    "IP": [" 1.2.3.4 ", "::ffff:1.2.3.4", "::1", "01.2.3.4", "1.2.3.4\n1.2.3.4", None, MISSING, 5],
    "Timestamp": [
        "2026-11-20T14:30:00+02:00",
        "2026-11-20T12:30:00.999999999Z",
        "2026-11-20 12:30:00",
        "2026-03-29T02:30:00",
        "2026-11-20T24:00:00Z",
        "2999-01-01T00:00:00Z",
        "2026-11-20T12:30:00+00:00\n",
        None,
    ],
    "BTag": [f" 5_{BTAG_HEX}", f"5_{BTAG_HEX}\n5_{BTAG_HEX}", "5", None],
    "ConsumerID": ["17", "007", "1\n2", "+1", 0, 2**63, 10**30, 1.5, True, None, MISSING, "1" * 40],
    "ConsumerCountry": ["gb", "ß", "gb\nfr", "GBR", 5, None],
    "ConsumerCurrencyID": ["eur", "\uff45\uff55\uff52", "", 978],
    "Username": ["Žluťoučký 🐴", "{,", 'a","b', "},null,\n{", "\u2028", "", None, "x" * 300, ["gb"]],
    "BrandID": ["7", "0", -1, 2**64, [], {"a": 1}],
    "CustomerCurrencyID": [8, "", 2**70, 8.5, None],
    "ConsumerStatus": ["Closed", "unknown field `x`", "", 1],
    "AffiliateID": [70012, None, MISSING, "a", []],
    "ConsumerState": ["nj", "NJ", None, MISSING, 5, "New Jersey"],
    "client": [{"ip": "192.0.2.9"}, {"ip": " ::ffff:192.0.2.9"}, {}, "x", None],
    "s": ["1", 1, "2", None, "", True, {"a": []}],
    "x": [1, None, {"IP": "x"}, [1.50, "{,"], "y" * 400],
    "": [1],
}
FIELDS = sorted(VALUES)
NO_OBJECTS = [b"null", b"[]", b"{}", b"{", b"x", b'{"a":1}{"a":1}', b"\xff", b'{"IP":"\\ud800"}', b"z" * (LIMIT + 1)]
BLANK = [b"", b"\r", b" \t", b"\0\0"]
RAW_EXTRAS = [b"1e400", b"1" * 50, b"1.50", b'"\\u0041\\/"', b"[1 ,2]", b"NaN", b'"\\ud800"']


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """A line: clean, to be put right, or wrong in up to three fields."""
    document = event(EventId=f"0f8fad5b-d9cb-469f-a165-{draw(st.integers(0, 99)):012x}")
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        value = draw(st.sampled_from(VALUES[field]))
        if value is MISSING:
            document.pop(field, None)
        else:
            document[field] = value
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ": ")]))
    raw = json.dumps(document, ensure_ascii=draw(st.booleans()), separators=separators).encode()
    if draw(st.integers(0, 4)) == 0:
        raw = raw[:-1] + b',"raw":' + draw(st.sampled_from(RAW_EXTRAS)) + b"}"
    return raw + draw(st.sampled_from([b"", b"", b"", b"\r", b" "]))


CLEAN = st.builds(
    lambda number, name: json.dumps(
        event(EventId=f"1f8fad5b-d9cb-469f-a165-{number:012x}", Username=name or "x"), ensure_ascii=False
    ).encode(),
    st.integers(0, 99),
    st.text(st.characters(codec="utf-8"), max_size=9),
)
LINES = st.lists(
    st.one_of(CLEAN, CLEAN, records(), records(), st.sampled_from([*NO_OBJECTS, *BLANK])), min_size=1, max_size=14
)
EACH_SETTINGS = st.sampled_from(SETTINGS)


# Of lines that are judged alone; without a window, a codec remembers nothing of what it has judged.
CODECS = {id(how): Codec(how, max_record_bytes=LIMIT) for how in SETTINGS}


class Verdicts(NamedTuple):
    """
    What became of some lines: the good ones as they leave, the others, and how many records there were.

    Nothing is accepted yet, so what repeats an EventId waits; `new_ids` are those of the others, in their order.
    """

    good: list[bytes]
    refused: list[tuple[str, bytes]]
    records: int
    duplicates: int
    new_ids: list[str]


def verdicts(
    lines: list[bytes], how: RecordsSettings, *, room_events: int = 1000, room_bytes: int = 1 << 20
) -> Verdicts:
    data = b"\n".join(lines) + b"\n"
    codec = CODECS.get(id(how)) if len(lines) == 1 else None
    codec = codec or Codec(how, max_record_bytes=LIMIT)
    pieces = encode(data, start=1, codec=codec, room_events=room_events, room_bytes=room_bytes)
    rejections: list[Rejection] = [rejection for piece in pieces for rejection in piece.span.rejections]
    for piece in pieces:
        assert len(piece.event_ids) <= room_events
        assert len(piece.lines) <= room_bytes
        assert piece.span.records == len(piece.event_ids) + len(piece.span.rejections) + piece.span.duplicates
    for rejection in rejections:
        assert data[rejection.start_offset - 1 : rejection.end_offset - 1] == rejection.raw
    assert [each.start_offset for each in rejections] == sorted(each.start_offset for each in rejections)
    return Verdicts(
        good=good_lines(pieces),
        refused=[(each.rule, each.raw) for each in rejections],
        records=sum(piece.span.records for piece in pieces),
        duplicates=sum(piece.span.duplicates for piece in pieces),
        new_ids=[each for piece in pieces for each in piece.event_ids[: len(piece.event_ids) - piece.waits]],
    )


@settings(max_examples=40, deadline=None)
@given(LINES, EACH_SETTINGS, st.sampled_from([1, 2, 3, 5, 1000]), st.integers(LIMIT, 4 * LIMIT))
def test_many_records_get_the_verdicts_and_bytes_that_each_gets_alone(
    lines: list[bytes], how: RecordsSettings, room_events: int, room_bytes: int
):
    together = verdicts(lines, how, room_events=room_events, room_bytes=room_bytes)
    alone = [verdicts([each], how) for each in lines]
    assert together.good == [line for each in alone for line in each.good]
    assert together.refused == [refused for each in alone for refused in each.refused]
    assert together.records == sum(each.records for each in alone) == len(together.good) + len(together.refused)


@settings(max_examples=30, deadline=None)
@given(LINES, EACH_SETTINGS)
def test_what_leaves_goes_through_unchanged_when_it_comes_again(lines: list[bytes], how: RecordsSettings):
    sent = verdicts(lines, how).good
    if sent and not how.mapping:
        again = verdicts(sent, how)
        assert (again.good, again.refused) == (sent, [])


@settings(max_examples=30, deadline=None)
@given(LINES, EACH_SETTINGS)
def test_what_leaves_is_json_with_the_fields_of_the_wire_form_once_each(lines: list[bytes], how: RecordsSettings):
    for sent in verdicts(lines, how).good:
        pairs = json.loads(sent, object_pairs_hook=lambda found: found, parse_constant=lambda name: 1 / 0)
        names = [name for name, _ in pairs]
        assert set(event()) <= set(names)
        assert len(set(names)) == len(names)
        if how.unknown_fields != "keep":
            assert set(names) == set(event())


@settings(max_examples=30, deadline=None)
@given(st.lists(CLEAN, min_size=1, max_size=6), LINES, st.randoms(use_true_random=False), EACH_SETTINGS)
def test_a_clean_line_leaves_byte_for_byte_among_anything(
    clean: list[bytes], others: list[bytes], rng: Any, how: RecordsSettings
):
    if how.mapping:
        return
    lines = [*clean, *others]
    rng.shuffle(lines)
    sent = verdicts(lines, how).good
    for line in clean:
        assert sent.count(line) >= clean.count(line)


@settings(max_examples=25, deadline=None)
@given(LINES, EACH_SETTINGS, st.integers(1, 5))
def test_records_are_good_or_refused_and_each_new_event_id_leaves_before_its_repeats_do(
    lines: list[bytes], how: RecordsSettings, room_events: int
):
    every = verdicts(lines, how)
    once = verdicts(lines, replace(how, dedupe_window=1000), room_events=room_events)
    ids = [json.loads(line)["EventId"] for line in every.good]
    assert once.new_ids == list(dict.fromkeys(ids))
    assert once.refused == every.refused
    assert (once.duplicates, len(once.good)) == (0, len(every.good))
    assert once.records == every.records == len(once.good) + len(once.refused)
