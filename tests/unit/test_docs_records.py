"""The codec follows the table of rules in docs/records.md: every example in it is tried."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from shipper.codec.codec import Codec
from shipper.codec.rules import FIELD_RULES
from shipper.config.settings import RecordsSettings
from shipper.model.records import EncodedChunk
from tests.cases import each
from tests.unit.test_codec import chunk_of, event, pieces_of

PAGE = Path(__file__).parents[2] / "docs" / "records.md"


class Row(NamedTuple):
    field: str
    rule: str
    mended: list[tuple[str, str]]  # value, normal form, both JSON; `absent` is none
    refused: list[str]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`(?! ahead|, if)", re.sub(r"\([^)]*\)", "", text))


def rows() -> list[Row]:
    section = PAGE.read_text().partition("\nFurther rules")[0]
    found = []
    for line in re.findall(r"^\| ([A-Z].*) \|$", section, re.MULTILINE):
        field, _, rule, mended, refused = (cell.strip() for cell in line.split("|"))
        if field == "Field":
            continue
        pairs = []
        for part in filter(None, mended.split(";")):
            given, _, form = part.partition("→")
            pairs += [(value, spans(form)[0]) for value in spans(given)]
        found.append(Row(field, spans(rule)[0], pairs, spans(refused)))
    return found


def encode(field: str, value: str, mode: str = "normalize") -> EncodedChunk:
    document = event()
    document.pop(field)
    if value != "absent":
        document[field] = json.loads(value)
    codec = Codec(RecordsSettings(mode=mode), max_record_bytes=10_000)
    (piece,) = pieces_of(codec, chunk_of(json.dumps(document).encode()))
    return piece


def test_the_table_has_every_field_with_its_rule():
    assert {row.field: row.rule for row in rows()} == FIELD_RULES


@each("row", rows())
def test_values_normalised_according_to_the_table_are_refused_in_strict_mode(row: Row):
    for value, form in row.mended:
        piece = encode(row.field, value)
        assert json.loads(piece.lines)[row.field] == json.loads(form), value
        (rejection,) = encode(row.field, value, "strict").span.rejections
        assert rejection.rule == row.rule, value
        assert encode(row.field, form, "strict").event_ids, "the normal form is the wire form"


@each("row", rows())
def test_values_refused_according_to_the_table_are_refused_by_its_rule(row: Row):
    assert row.refused
    for value in row.refused:
        (rejection,) = encode(row.field, value).span.rejections
        assert rejection.rule == row.rule, value
