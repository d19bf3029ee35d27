"""Lines that are good only together, as a value of one goes on in the next one, are each judged alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipper.codec import Codec
from shipper.config.settings import RecordsSettings
from tests.unit.test_codec import encode, line

SETTINGS: list[dict[str, Any]] = [
    {"unknown_fields": "keep"},
    {"unknown_fields": "keep", "mode": "strict"},
    {"unknown_fields": "drop"},
    {"unknown_fields": "drop", "mode": "strict"},
    {"unknown_fields": "reject"},
    {"unknown_fields": "drop", "mapping": {"IP": "IP", "Username": {"from": "x.y", "default": "nobody"}}},
]
# Openings that a newline may follow, and what closes them behind the separators that the codec puts there.
OPENINGS = [
    ("[1", "2]"),
    ("[[1", "2]]"),
    ('[{"a":1}', '{"b":2}]'),
    ('[{"a":[1', "2]}]"),
    ('{"a":[', "1]}"),
    ('"a', 'b"'),
]


def codec(records: dict[str, Any]) -> Codec:
    return Codec(RecordsSettings(dedupe_window=0, **records), max_record_bytes=5000)


def outcome(data: bytes, records: dict[str, Any]) -> list[tuple[int, bytes]]:
    """What is sent and what is refused, by offset."""
    found: list[tuple[int, bytes]] = []
    for piece in encode(data, start=1, codec=codec(records)):
        lines = piece.lines.split(b"\n") if piece.lines else []
        found += [(piece.span.bounds_of(ordinal)[0] + 1, each) for ordinal, each in enumerate(lines)]
        found += [(each.start_offset, each.rule.encode()) for each in piece.span.rejections]
    return sorted(found)


def outcome_of_each(lines: list[bytes], records: dict[str, Any]) -> list[tuple[int, bytes]]:
    found, offset = [], 1
    for each in lines:
        found += [(offset + at - 1, what) for at, what in outcome(each + b"\n", records)]
        offset += len(each) + 1
    return found


def with_unknown(number: int, value: str, **changes: Any) -> bytes:
    return line(number, **changes)[:-1] + b',"x":' + value.encode() + b"}"


@pytest.mark.parametrize("records", SETTINGS)
@pytest.mark.parametrize(("opening", "closing"), OPENINGS)
@pytest.mark.parametrize("change", [{}, {"ConsumerCountry": "gb"}])
def test_an_object_over_two_lines_and_two_objects_on_one_do_not_make_up_for_each_other(
    records: dict[str, Any], opening: str, closing: str, change: dict[str, Any]
):
    whole = with_unknown(1, opening + "\n" + closing, **change)
    two = line(2, **change) + b",null," + line(3, **change)
    lines = [line(8), *whole.split(b"\n"), two, line(9)]
    assert len(lines) == 5
    together = outcome(b"\n".join(lines) + b"\n", records)
    assert together == outcome_of_each(lines, records)
    assert [what for _, what in together if what == b"json"] == [b"json"] * 3


VALUES = st.recursive(
    st.sampled_from(["1", "null", '"s"', '"{"', '"]"', "1e400"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.lists(inner, max_size=2).map(
            lambda items: "{" + ",".join(f'"{name}":{value}' for name, value in zip("ab", items, strict=False)) + "}"
        ),
    ),
    max_leaves=8,
)


@st.composite
def straddling(draw: st.DrawFn) -> list[bytes]:
    """Lines with unknown values, some of which are cut by newlines, and some lines that hold more than one value."""
    lines: list[bytes] = []
    for number in range(draw(st.integers(1, 6))):
        country = draw(st.sampled_from(["GB", "gb"]))
        record = with_unknown(number, draw(VALUES), ConsumerCountry=country)
        match draw(st.sampled_from(["whole", "cut", "cut at a comma", "two", "three"])):
            case "cut":
                at = draw(st.integers(len(line(number)), len(record) - 1))
                lines += [record[:at], record[at:]]
            case "cut at a comma" if (at := record.find(b",", len(line(number)) + 4)) > 0:
                lines += [record[:at], record[at + 1 :]]  # there, the separator stands for it
            case "two":
                lines.append(record + b",null," + line(50 + number))
            case "three":
                lines.append(record + b",null," + line(60 + number) + b",null," + line(70 + number))
            case _:
                lines.append(record)
    return lines


@settings(max_examples=120, deadline=None)
@given(straddling(), st.sampled_from(SETTINGS))
def test_lines_get_together_what_each_gets_alone(lines: list[bytes], records: dict[str, Any]):
    assert outcome(b"\n".join(lines) + b"\n", records) == outcome_of_each(lines, records)
