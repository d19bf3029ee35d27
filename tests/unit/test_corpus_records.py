"""Every record of the corpus gets its verdict on every path: alone, among others, and on the fast path."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from itertools import zip_longest

import pytest

from shipper.codec.codec import Codec
from shipper.codec.judge import Judge
from shipper.codec.rules import FIELD_RULES, MESSAGES
from shipper.model.records import EncodedChunk, Rejection
from tests.cases import each
from tests.corpus import ENTRIES, LATEST, Entry, Mode, Neighbour, Outcome
from tests.unit.test_codec import chunk_of, joined, pieces_of

START = 5000
BROKEN = b"no JSON"

# What is normalised according to the table in docs/records.md.
NORMALISATIONS = {
    *("EventId: lower-case", "EventId: braces", "EventId: urn", "EventId: 32 digits", "EventId: derived"),
    *("IP: mapped", "IP: blanks"),
    *("Timestamp: offset", "Timestamp: fraction", "Timestamp: +00:00", "Timestamp: naive"),
    "BTag: blanks",
    *("ConsumerID: digits", "BrandID: digits"),
    *("ConsumerCountry: upper-case", "ConsumerCurrencyID: upper-case", "ConsumerState: upper-case"),
    "CustomerCurrencyID: integer",
    *("AffiliateID: null", "AffiliateID: absent", "AffiliateID: integer"),
    *("ConsumerState: null", "ConsumerState: absent"),
}

both_modes = pytest.mark.parametrize("mode", ["normalize", "strict"])
each_entry = each("entry", ENTRIES)


def encode(codec: Codec, lines: Sequence[bytes], start: int) -> EncodedChunk:
    chunk = chunk_of(b"\n".join(lines) + b"\n", start=start)
    piece = joined(list(pieces_of(codec, chunk, room_bytes=1 << 24, latest=LATEST)))
    assert piece.span.unsettled == len(piece.event_ids) == len(piece.consumer_ids)
    assert piece.span.read == len(piece.event_ids) + len(piece.span.rejections)
    return piece


def check_rejection(rejection: Rejection, entry: Entry, expected: Outcome, offset: int) -> None:
    record = entry.line.removeprefix(BOM_UTF8 if entry.is_at_start else b"").lstrip(b"\0")
    assert rejection.rule == expected.rule
    assert rejection.rule in MESSAGES
    assert expected.says in rejection.message
    assert "\n" not in rejection.message
    assert rejection.raw == record
    assert rejection.start_offset == offset + len(entry.line) - len(record)
    assert rejection.end_offset == offset + len(entry.line)


def check_among(
    codec: Codec, entry: Entry, mode: Mode, before: Sequence[bytes], after: Sequence[bytes], good: Sequence[bytes]
) -> None:
    """Put the entry's line between others, of which the `good` ones leave, and `BROKEN` is refused."""
    expected = entry.outcome(mode)
    start = 0 if entry.is_at_start else START
    piece = encode(codec, [*before, entry.line, *after], start)
    leaving = piece.lines.split(b"\n") if piece.event_ids else []
    if expected.line is not None:
        assert [line for line in leaving if line not in good] == [expected.line]
        assert leaving.index(expected.line) == sum(line != BROKEN and bool(line) for line in before)
        leaving.remove(expected.line)
    assert leaving == list(good)
    own = [rejection for rejection in piece.span.rejections if rejection.raw != BROKEN]
    assert len(piece.span.rejections) - len(own) == [*before, *after].count(BROKEN)
    assert len(own) == bool(expected.rule)
    for rejection in own:
        check_rejection(rejection, entry, expected, start + sum(len(line) + 1 for line in before))


def sloppy(good: Neighbour) -> Neighbour:
    """Return a record that mode `normalize` corrects, even with relaxed rules: its number is in quotes."""
    return Neighbour(re.sub(rb'"ConsumerID":([0-9]+)', rb'"ConsumerID":"\1"', good.line), good.becomes)


@both_modes
@each_entry
def test_a_record_gets_its_verdict_on_every_path(entry: Entry, mode: Mode):
    codec = Codec(entry.records(mode), max_record_bytes=entry.max_record_bytes)
    before, after = ([] if entry.is_at_start else entry.neighbours(1, 3)), entry.neighbours(100, 3)

    def among(before: Sequence[Neighbour], after: Sequence[Neighbour], *, bad: Sequence[bytes] = ()) -> None:
        before_lines = [each.line for each in before]
        after_lines = [
            line for pair in zip_longest([each.line for each in after], bad) for line in pair if line is not None
        ]
        if not entry.is_at_start:
            before_lines += bad
        check_among(codec, entry, mode, before_lines, after_lines, [each.becomes for each in (*before, *after)])

    among([], [])
    among(before, after)
    among([], after)
    among(before, [])
    among([], after, bad=[b"", BROKEN])
    among(before, after, bad=[BROKEN])  # so that bisecting separates them
    if mode == "normalize":
        among(list(map(sloppy, before)), list(map(sloppy, after)))
        among(list(map(sloppy, before)), after)
    among(before, after)  # again, as the codec adapts to the lines it has seen


@both_modes
@each("entry", [entry for entry in ENTRIES if entry.outcome("strict").line == entry.line])
def test_records_sent_unchanged_take_the_fast_path(entry: Entry, mode: Mode):
    lines = [each.line for each in entry.neighbours(1, 2)] + [entry.line]
    columns = Judge(entry.records(mode)).validate(lines, LATEST)
    is_clean = entry.outcome(mode).line == entry.line
    assert is_clean == (columns is not None)


@each_entry
def test_normalised_records_are_valid(entry: Entry):
    settings = entry.records("strict")
    normal = entry.outcome("normalize").line
    if normal is None or settings.mapping:
        return
    for mode in ("normalize", "strict"):
        piece = encode(Codec(entry.records(mode), max_record_bytes=entry.max_record_bytes), [normal], START)
        assert piece.lines == normal


def test_the_corpus_is_large_and_its_names_are_sentences():
    assert len(ENTRIES) >= 500
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def test_the_corpus_has_no_line_twice_under_the_same_settings():
    seen: dict[object, str] = {}
    for entry in ENTRIES:
        if entry.name.startswith("empty: "):
            continue  # complete in itself; two of its fields are empty in the record that all start from
        key = (entry.line, repr(entry.records("normalize")), entry.max_record_bytes, entry.is_at_start)
        assert seen.setdefault(key, entry.name) == entry.name


def test_the_corpus_has_every_rule_and_every_normalisation():
    rules = {entry.outcome(mode).rule for entry in ENTRIES for mode in ("normalize", "strict")}
    assert rules - {""} == set(MESSAGES) - {"csv", "stuck"}  # which rows have, and what no content alone breaks
    assert {entry.shows for entry in ENTRIES if entry.shows} == NORMALISATIONS


@each("field", FIELD_RULES)
def test_the_corpus_has_each_field_absent_null_and_empty(field: str):
    names = [
        entry.name for entry in ENTRIES if entry.name.startswith("empty: ") and entry.name.split()[-3:].count(field)
    ]
    assert len(names) == 3 - (field == "CustomerCurrencyID")
