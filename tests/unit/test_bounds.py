"""Hostile bytes cost time proportional to their number; the tests count bytes read instead of time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.codec import rules
from shipper.delivery import answer_words
from shipper.delivery.answer import Answer
from shipper.delivery.verdicts import Action, judge
from shipper.model import framing
from shipper.model.framing import BatchElements, CsvRows, Frame
from shipper.sources.reader import InputForm
from shipper.sources.stdin import SpoolFramer
from tests.cases import each


class CountingPattern:
    """
    A compiled pattern that counts how many bytes or characters its matches look at.

    Attributes:
        looked_at: A match that fails has looked at all that it was given.
    """

    def __init__(self, pattern: re.Pattern[Any]) -> None:
        self._pattern = pattern
        self.looked_at = 0

    def match(self, data: Any, start: int = 0, end: int = sys.maxsize) -> re.Match[Any] | None:
        return self._counted(self._pattern.match(data, start, end), data, start, end)

    def fullmatch(self, data: Any, start: int = 0, end: int = sys.maxsize) -> re.Match[Any] | None:
        return self._counted(self._pattern.fullmatch(data, start, end), data, start, end)

    def search(self, data: Any, start: int = 0, end: int = sys.maxsize) -> re.Match[Any] | None:
        return self._counted(self._pattern.search(data, start, end), data, start, end)

    def _counted(self, found: re.Match[Any] | None, data: Any, start: int, end: int) -> re.Match[Any] | None:
        self.looked_at += (found.end() if found else min(end, len(data))) - start
        return found

    def finditer(self, data: bytes, start: int) -> Iterator[re.Match[bytes]]:
        for found in self._pattern.finditer(data, start):
            # A lone quote is found only where no string ends.
            self.looked_at += (len(data) if found[0] == b'"' else found.end()) - start
            start = found.end()
            yield found
        self.looked_at += len(data) - start


def counting(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[CountingPattern]:
    """Make the patterns of a module count."""
    patterns = [CountingPattern(getattr(module, name)) for name in names]
    for name, pattern in zip(names, patterns, strict=True):
        monkeypatch.setattr(module, name, pattern)
    return patterns


class CountingRows(CountingPattern):
    """The pattern of whole rows, which looks as far as the other one, of the same values, finds any."""

    def __init__(self, pattern: re.Pattern[bytes], partial_row: re.Pattern[bytes]) -> None:
        super().__init__(pattern)
        self._partial_row = partial_row

    def match(self, data: bytes, start: int = 0, end: int = sys.maxsize) -> re.Match[bytes] | None:
        found = self._pattern.match(data, start, end)
        self._counted(found or self._partial_row.match(data, start, end), data, start, end)
        return found


def rows_that_count() -> tuple[CsvRows, CountingPattern, CountingPattern]:
    rows: Any = CsvRows(b"a,b,c\n", ",")
    rows._row, rows._partial_row = CountingRows(rows._row, rows._partial_row), CountingPattern(rows._partial_row)
    return rows, rows._row, rows._partial_row


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
def test_rows_with_stray_quotes_are_scanned_a_fixed_number_of_times(
    line: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(framing, "_OPEN_QUOTE_BYTES_MAX", 4_500)
    for size in (1_250, 5_000):  # the last is more than a quote may hold open
        data = b'"\n' + (line * size)[:size] + end
        rows, whole, partial_row = rows_that_count()
        cut = rows.cut(data, is_final=False)
        frames = list(rows.frames(data, 0))
        assert cut <= len(data) == frames[-1].cut
        assert whole.looked_at + partial_row.looked_at <= 8 * len(data), f"of {len(data)} bytes"


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
def test_the_search_for_the_end_of_an_element_is_bounded(element: bytes):
    for size in (12_000, 48_000):
        data = CountingBytes(b"[" + (element * size)[:size])
        elements = list(BatchElements().frames(data, 0))
        assert data.looked_at <= 2_048 * (len(elements) + 1) + size


def rows_tried_one_by_one(rows: CsvRows, data: bytes) -> Iterator[Frame]:
    """The rows, found slowly: each start is matched against everything that follows."""
    value = rb'(?:"[^"]*(?:""[^"]*)*"(?!")|(?!")[^,\n]*)'
    row = re.compile(rb"%b(?:,%b)*\r?(?:\n|\Z)" % (value, value))
    start = 0
    while start < len(data):
        found = row.match(data, start)
        end = found.end() if found else data.find(b"\n", start) + 1 or len(data)
        yield Frame(start, end - data.endswith(b"\n", start, end), end)
        start = end


@given(st.text(st.sampled_from('a",\r\n'), max_size=40).map(str.encode))
def test_a_remembered_fault_does_not_change_any_row(data: bytes):
    rows = CsvRows(b"a,b,c\n", ",")
    assert list(rows._rows(data, 0, is_final=True)) == list(rows_tried_one_by_one(rows, data))


def test_an_invalid_row_does_not_hold_back_the_following_ones():
    rows = CsvRows(b"a,b,c\n", ",")
    data = b'1,"2"x,"3\n4,5,6\n'
    assert rows.cut(data, is_final=False) == len(data)
    assert rows.cut(b'1,"2,3\n4,5,6\n', is_final=False) == 0, "an open quote may still be closed"


@given(st.binary(max_size=60) | st.text(st.sampled_from('"\\a{['), max_size=60).map(str.encode))
def test_each_quote_is_tried_once_when_strings_are_skipped(record: bytes):
    assert b'"' not in rules._STRING.sub(b"", record), "a quote was tried without a match, up to the end of the record"


@each("piece", [b'\\"', b'"\\', b"\\", b'"', b'"a', b'{"', b'["\\"'])
def test_unclosed_strings_hide_only_the_brackets_within_them(piece: bytes):
    opened: Any = b"[" * (rules.NESTING_MAX + 1)
    assert rules.nests_deeply(opened + b'"' + piece * 500)
    assert not rules.nests_deeply(b'"' + opened)


@each("piece", [b'a","\n', b"x\n", b'""'])
def test_an_open_quote_read_in_pieces_is_not_rescanned_for_each_piece(piece: bytes):
    looked_at = 0

    class Counting(CsvRows):
        def cut(self, data: bytes, *, is_final: bool) -> int:
            nonlocal looked_at
            looked_at += len(data)
            return super().cut(data, is_final=is_final)

    takes = 7_000
    framer = SpoolFramer(InputForm("csv"), max_record_bytes=1 << 20)
    framer.take(b"EventId,IP\n")
    framer._framing = Counting(framer.header, ",")
    given_bytes = sum(len(framer.take(part)) for part in [b'"', *[piece] * takes])
    assert given_bytes == 1 + takes * len(piece)
    assert framer.open_bytes > 0
    assert looked_at <= 8_192 * 8_192 // len(piece) + 4 * given_bytes


ENDLESS = [
    *(b"[", b"[ ", b"{", b"[]", b'{"a":[]},', b'"]",', b'"', b'"a', b'\\"', b"\\", b'"\\'),
    *(b"0", b"0 ", b"[0", b" ", b"\n", b"}"),
]
BEGINNINGS = [
    *(b"[", b"[[", b"[1,[", b'["', b'["\\', b"[0", b"[{}", b"[{} [", b'{"events":[{', b'{"events" ', b"{"),
    *(b"[] ", b"[],", b'[],"EventType":', b"[x]{[", b"x", b"\xef\xbb\xbf[[", b"\xef\xbb\xbf"),
]


@each("piece", ENDLESS)
@each("begin", BEGINNINGS)
def test_an_array_read_in_pieces_is_not_rescanned_for_each_piece(
    begin: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch
):
    for pieces in (60, 240):
        size = len(begin) + pieces * len(piece)
        with monkeypatch.context() as patch:
            names = ("_TOKEN", "_REST_OF_STRING", "_BARE", "_BLANK", "_HEAD")
            patterns = counting(patch, framing, *names)
            framer = SpoolFramer(InputForm("batch"), max_record_bytes=1 << 20)
            given = b"".join(framer.take(part) for part in [begin, *[piece] * pieces])
            # What may become the head of an envelope is compared as a whole, up to a limit.
            head_bytes = min(size, framing._HEAD_BYTES_MAX) if begin.endswith((b"{", b'"events" ')) else 0
            assert sum(pattern.looked_at for pattern in patterns) <= 4 * size + 100 + head_bytes**2
        given += framer.take(b"", is_final=True)
        at_once = SpoolFramer(InputForm("batch"), max_record_bytes=1 << 20)
        assert given == at_once.take(begin + piece * pieces, is_final=True), "wherever it was cut"


@each("piece", [b"\n", b"{", b"{\n", b" ", b"\0", b"\0\n", b"a,b", b"\t"])
@each("begin", [b"", b"{", b" \t{", b"\0" * 2_000 + b"{"])
@each("form", ["auto", "csv"])
def test_the_format_of_a_pipe_is_not_searched_from_the_start_for_each_piece(begin: bytes, piece: bytes, form: Any):
    looked_at = 0

    class Counting(InputForm):
        def framing_of(self, head: bytes, *, is_whole: bool) -> framing.Framing | None:
            nonlocal looked_at
            looked_at += len(head)
            return super().framing_of(head, is_whole=is_whole)

    for pieces in (1_000, 4_000):
        looked_at = 0
        framer = SpoolFramer(Counting(form), max_record_bytes=1 << 20)
        for part in [begin, *[piece] * pieces]:
            framer.take(part)
        assert 0 < looked_at <= 68 * (len(begin) + pieces * len(piece))


@each("text", ["a b ", "accepted ", "0 0 ", "no "])
@each("document", [lambda text: {"message": text}, lambda text: {"results": [{"message": text}]}, lambda text: [text]])
def test_a_long_text_in_an_answer_is_not_parsed_and_not_trusted(document: Any, text: str):
    for size in (5_000, 20_000):
        body = json.dumps(document((text * size)[:size])).encode()
        with pytest.MonkeyPatch.context() as patch:
            (counted,) = counting(patch, answer_words, "_FAILURE")
            verdict = judge(Answer(200, "application/json", "", body), events=1)
        assert verdict.action is not Action.ACCEPT or verdict.results.rejected
        assert counted.looked_at <= 4_096
