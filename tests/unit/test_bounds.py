"""Bytes that attack cost in proportion to their number; what is counted is bytes looked at, not time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.codec import rules
from shipper.delivery import answer_words
from shipper.delivery.verdicts import Action, Answer, judge
from shipper.framing import BatchElements, CsvRows, Frame
from shipper.sources.incoming import Incoming
from shipper.sources.reader import InputForm
from tests.cases import each


class CountingPattern:
    """
    A compiled pattern that counts how many bytes its matches look at.

    Attributes:
        looked_at: A match that fails has looked at all that it was given.
    """

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self.looked_at = 0

    def match(self, data: bytes, start: int, end: int) -> re.Match[bytes] | None:
        found = self._pattern.match(data, start, end)
        self.looked_at += (found.end() if found else end) - start
        return found


def rows_that_count() -> tuple[CsvRows, CountingPattern]:
    rows = CsvRows(b"a,b,c\n", ",")
    counting = CountingPattern(rows._row)
    rows._row = counting  # type: ignore[assignment]
    return rows, counting


class CountingSearch:
    """A compiled pattern that counts how many characters it is given to search."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.looked_at = 0

    def search(self, text: str) -> re.Match[str] | None:
        self.looked_at += len(text)
        return self._pattern.search(text)


STRAY_QUOTES = [
    (b'a","\n', b""),  # opens a quote, and one that is open is closed and opened again
    (b'a","\n', b'"x'),
    (b'a",","\n', b""),
    (b'"\n', b""),
    (b'""\n', b'"'),
    (b'"a""\n', b""),
    (b'x","y\n""\n', b'"z'),
    (b'","\n', b'"x'),
    (b'"a"b\n', b""),
    (b',"', b"\n"),
    (b'""', b"\n\n"),
]


@each(("line", "end"), STRAY_QUOTES)
def test_rows_with_stray_quotes_are_looked_at_a_fixed_number_of_times(line: bytes, end: bytes):
    for size in (20_000, 40_000, 280_000):  # the last is more than a quote may hold open
        data = b'"\n' + (line * size)[:size] + end
        rows, counting = rows_that_count()
        cut = rows.cut(data, is_final=False)
        frames = list(rows.frames(data, 0))
        assert cut <= len(data) == frames[-1].cut
        assert counting.looked_at <= 6 * len(data), f"of {len(data)} bytes"


class CountingBytes(bytes):
    """
    Bytes that count how many of them are searched.

    Attributes:
        looked_at: A search that fails has looked at all that it was given.
    """

    looked_at: int

    def __new__(cls, data: bytes) -> CountingBytes:
        made = super().__new__(cls, data)
        made.looked_at = 0
        return made

    def find(self, sought: Any, start: Any = None, end: Any = None) -> int:
        found = super().find(sought, start, end)
        self.looked_at += (len(self) if end is None else min(end, len(self))) - (start or 0)
        return found

    def rfind(self, sought: Any, start: Any = None, end: Any = None) -> int:
        self.looked_at += (len(self) if end is None else min(end, len(self))) - (start or 0)
        return super().rfind(sought, start, end)


@each("element", [b"[1],", b"{],", b"{[],", b"{},", b'{"a":"\\"},', b'"a",', b"1,", b"]}{", b"[]\n"])
def test_the_end_of_an_element_is_not_searched_in_all_that_follows(element: bytes):
    for size in (50_000, 100_000, 200_000):
        data = CountingBytes(b"[" + (element * size)[:size])
        elements = list(BatchElements().frames(data, 0))
        assert data.looked_at <= 2_048 * (len(elements) + 1)


def rows_tried_one_by_one(rows: CsvRows, data: bytes) -> Iterator[Frame]:
    """What the rows are, however long it takes: each start is matched against all that follows."""
    value = rb'(?:"[^"]*(?:""[^"]*)*"(?!")|(?!")[^,\n]*)'
    row = re.compile(rb"%b(?:,%b)*\r?(?:\n|\Z)" % (value, value))
    start = 0
    while start < len(data):
        found = row.match(data, start)
        end = found.end() if found else data.find(b"\n", start) + 1 or len(data)
        yield Frame(start, end - data.endswith(b"\n", start, end), end)
        start = end


@given(st.text(st.sampled_from('a",\r\n'), max_size=40).map(str.encode))
def test_what_is_known_of_a_fault_changes_no_row(data: bytes):
    rows = CsvRows(b"a,b,c\n", ",")
    assert list(rows._rows(data, 0, is_final=True)) == list(rows_tried_one_by_one(rows, data))


def test_a_row_with_a_fault_does_not_hold_back_those_behind_it():
    rows = CsvRows(b"a,b,c\n", ",")
    data = b'1,"2"x,"3\n4,5,6\n'
    assert rows.cut(data, is_final=False) == len(data)
    assert rows.cut(b'1,"2,3\n4,5,6\n', is_final=False) == 0, "an open quote may still be closed"


@given(st.binary(max_size=60) | st.text(st.sampled_from('"\\a{['), max_size=60).map(str.encode))
def test_each_quote_is_tried_once_when_strings_are_left_out(record: bytes):
    assert b'"' not in rules._STRING.sub(b"", record), "a quote was tried in vain, up to the end of the record"


@each("piece", [b'\\"', b'"\\', b"\\", b'"', b'"a', b'{"', b'["\\"'])
def test_strings_without_an_end_hide_the_brackets_within_them_alone(piece: bytes):
    opened: Any = b"[" * (rules.NESTING_MAX + 1)
    assert rules.nests_deeply(opened + b'"' + piece * 500)
    assert not rules.nests_deeply(b'"' + opened)


@each("piece", [b'a","\n', b"x\n", b'""'])
def test_an_open_quote_that_comes_in_pieces_is_not_looked_at_again_with_each(piece: bytes):
    looked_at = 0

    class Counting(CsvRows):
        def cut(self, data: bytes, *, is_final: bool) -> int:
            nonlocal looked_at
            looked_at += len(data)
            return super().cut(data, is_final=is_final)

    for takes in (5_000, 10_000, 20_000):
        looked_at = 0
        incoming = Incoming(InputForm("csv"), max_record_bytes=1 << 20)
        incoming.take(b"EventId,IP\n")
        incoming._framing = Counting(incoming.header, ",")
        given_bytes = sum(len(incoming.take(part)) for part in [b'"', *[piece] * takes])
        assert given_bytes == 1 + takes * len(piece)
        assert incoming.open_bytes > 0
        assert looked_at <= 8_192 * 8_192 // len(piece) + 4 * given_bytes


@each("piece", [b"[]", b"{", b"[ ", b'{"a":[]},', b'"]",'])
@each("begin", [b"[[", b'{"events":[{', b"[1,[", b"\xef\xbb\xbf[["])
def test_an_element_that_comes_in_pieces_is_not_looked_at_again_with_each(begin: bytes, piece: bytes):
    cuts = 0

    class Counting(BatchElements):
        def cut(self, data: bytes, *, is_final: bool) -> int:
            nonlocal cuts
            cuts += 1
            return super().cut(data, is_final=is_final)

    incoming = Incoming(InputForm("batch"), max_record_bytes=1 << 20)
    incoming.take(begin[:-1])
    incoming._framing = Counting()
    for part in [begin[-1:], *[piece] * 500]:
        incoming.take(part)
    assert cuts <= 3
    closing = b"]" * 502 if begin[-1:] == b"[" else b"}" * 502
    given = incoming.take(closing)
    assert given.count(b"\n") >= 1, "an element is given as soon as it has ended"


@each("text", ["a b ", "accepted ", "0 0 ", "no "])
@each("document", [lambda text: {"message": text}, lambda text: {"results": [{"message": text}]}, lambda text: [text]])
def test_a_long_text_in_an_answer_is_not_read_and_not_believed(document: Any, text: str):
    counted = CountingSearch(answer_words._SPEAKS_OF_FAILURE)
    for size in (5_000, 10_000, 20_000):
        body = json.dumps(document((text * size)[:size])).encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(answer_words, "_SPEAKS_OF_FAILURE", counted)
            verdict = judge(Answer(200, "application/json", "", body), events=1)
        assert verdict.action is not Action.ACCEPT or verdict.results.rejected
        assert counted.looked_at <= 4_096
