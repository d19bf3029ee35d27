"""
Splits an input into records: one JSON object per line, rows of CSV, or elements of a JSON array.

Framing looks only at bytes; the codec parses the records. A chunk always begins between two records, so no state is
carried from one chunk to the next.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Container, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from shipper.model.wire import EVENT_TYPE, ActivityEvent

Format = Literal["ndjson", "csv", "batch"]

# Case-folded names of columns that distinguish a header from any other first line.
WIRE_COLUMNS: Final = frozenset(name.casefold() for name in ActivityEvent.__struct_fields__)

CR_LINES: Final = "its lines end with CR alone; convert them: tr '\\r' '\\n'"
OTHER_HEADER: Final = (
    "is a header with other columns or in another order, so the rows after it would be misread; move them into a file "
    "of their own, with this header"
)

# In the spool, follows the beginning of an overlong line; the length of the line follows once known.
CUT_MARK: Final = b"\0\0cut:"

# Around records: zeros fill the holes of a sparse file.
BLANKS: Final = b" \t\r\n\0"

_DELIMITERS: Final = ",;\t|"
_SNIFFED_BYTES: Final = 65_536
_HEAD_BYTES_MAX: Final = 1024
_LONGEST_COLUMN: Final = max(ActivityEvent.__struct_fields__, key=len).encode()
_KNOWN_COLUMNS_MIN: Final = 2  # a header has more; other lines split at commas have none
# No possessive group around alternatives: the first releases of Python 3.11 match those wrongly (cpython#106052).
_QUOTED: Final = rb'"[^"]*(?:""[^"]*)*"'
_STRING: Final = rb'"[^"\\\n]*(?:\\[^\n][^"\\\n]*)*"'
_OPEN_QUOTE_BYTES_MAX: Final = 262_144  # a quote not closed within this many bytes is an error in one line
_CUT: Final = re.compile(CUT_MARK + rb"(\d{0,18})(?=\n|\Z)")
_BRACE: Final = ord("{")
_SIMPLE_OBJECT_BYTES: Final = 2_048  # longer elements are scanned bracket by bracket
_TOKEN: Final = re.compile(_STRING + rb'|[{}\[\]"]')  # a lone quote opens an unterminated string
_REST_OF_STRING: Final = re.compile(rb'[^"\\\n]*(?:\\[^\n][^"\\\n]*)*')
_LINE_END: Final = re.compile(rb"\\?(\n[ \t\r\n]{0,64})")  # within a string, where JSON does not allow a newline
_BARE: Final = re.compile(rb'[^",\[\]{}\s]*')
_BLANK: Final = re.compile(rb"[ \t\r\n\0]*")
_BEFORE_HEADER: Final = re.compile(rb"(?:%b)?(?:[ \t]*\r?\n)*" % codecs.BOM_UTF8)
# The head of an envelope up to its first event, or of a bare array; and what follows the last event.
_EVENT_TYPE: Final = rb'"EventType"\s*:\s*"%b"' % EVENT_TYPE.encode()
_HEAD: Final = re.compile(rb'(?:\{\s*(?:%b\s*,\s*)?"events"\s*:\s*)?\[' % _EVENT_TYPE)
_HEADS: Final = (b'{"EventType":"%b","events":[' % EVENT_TYPE.encode(), b'{"events":[')  # without blanks
# Beginnings of heads, and the feet longer than the bracket of a bare array.
_HEAD_STARTS: Final = (b'{"EventType"', b'{"events"', *(b"{%c" % blank for blank in b" \t\r\n"))
_HEAD_START_BYTES: Final = 12
_FEET: Final = (b"]}", b'],"EventType":"%b"}' % EVENT_TYPE.encode())


class Frame(NamedTuple):
    """The position of a record in some bytes, without its newline; a chunk may end at `cut`."""

    start: int
    end: int
    cut: int


class Framing(Protocol):
    format: Format
    header: bytes  # of CSV, without which its records have no meaning; else empty

    def cut(self, data: bytes, *, is_final: bool) -> int:
        """Return the end of the last complete record, 0 if there is none; final data ends with its last record."""

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        """Yield the records in complete bytes, in order, without separators; includes blank records."""


class Lines:
    """One record per line; `LINES` is the only instance."""

    format: Format = "ndjson"
    header = b""

    def __reduce__(self) -> str:
        return "LINES"

    def cut(self, data: bytes, *, is_final: bool) -> int:
        return len(data) if is_final else data.rfind(b"\n") + 1

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        while start < len(data):
            newline = data.find(b"\n", start)
            end = len(data) if newline < 0 else newline
            yield Frame(start, end, min(end + 1, len(data)))
            start = end + 1


LINES: Final = Lines()


class CsvRows:
    """
    Rows of CSV (RFC 4180); a quoted value may contain newlines.

    Attributes:
        header: The unchanged first row, with its newline and the blank lines before it; it is not a record.
        is_unreadable: Whether the header is not a row of CSV, for example as its line ends with CR alone.
        repeated: The numbers, from 1, of the first two columns with the same name; None if there are none.
    """

    format: Format = "csv"

    def __init__(self, header: bytes, delimiter: str) -> None:
        self.header = header
        self.delimiter = delimiter
        self._mark = delimiter.encode()
        self.names = self._names_in(header)
        self.is_unreadable = not self.names and bool(header[_header_start(header) :].strip(BLANKS))
        self.repeated = _find_repeated(self.names)
        mark = re.escape(self._mark)
        value = rb'(?:%b|(?!")[^%b\n]*)'
        whole, partial = value % (_QUOTED, mark), value % (_QUOTED + rb'(?!")', mark)
        self._row = re.compile(rb"%b(?:%b%b)*\r?(?:\n|\Z)" % (whole, mark, whole))
        # The group does not match if the values are not followed by the end of a row.
        self._partial_row = re.compile(rb"%b(?:%b%b)*(\r?(?:\n|\Z))?" % (partial, mark, partial))

    def _names_in(self, header: bytes) -> list[str]:
        text = header[_header_start(header) :].decode("utf-8", "backslashreplace")
        try:
            return [name.strip() for name in next(csv.reader([text], delimiter=self.delimiter), [])]
        except csv.Error:
            return []  # no row has this number of values

    def find_other_header(self, data: bytes, columns: Container[str] = ()) -> int:
        """
        Return the start of the first line that is another header; -1 if there is none.

        Such a line has the names of the header in another order, or several names that are all known. Only lines with
        the longest name of the header or of the wire form are examined.

        Args:
            columns: Case-folded known names.
        """
        marks = {max(self.names, key=len, default="").encode(), _LONGEST_COLUMN} - {b""}
        return min((at for mark in marks if (at := self._find_other_header(data, mark, columns)) >= 0), default=-1)

    def _find_other_header(self, data: bytes, mark: bytes, columns: Container[str]) -> int:
        at = data.find(mark)
        while at >= 0:
            start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at) + 1 or len(data)
            names = self._names_in(data[start:end])
            if names != self.names and sorted(names) == sorted(self.names):
                return start
            folded = [name.casefold() for name in names]
            are_known = len(folded) >= _KNOWN_COLUMNS_MIN and all(name in columns for name in folded)
            if are_known and folded != [name.casefold() for name in self.names]:
                return start
            at = data.find(mark, end)
        return -1

    def cut(self, data: bytes, *, is_final: bool) -> int:
        if is_final:
            return len(data)
        end = data.rfind(b"\n") + 1
        if not _may_have_newlines_in_quotes(data[:end]):
            return end
        end = 0
        for row in self._rows(data, 0, is_final=False):
            end = row.cut
        return end

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        if not _may_have_newlines_in_quotes(data[start:]):
            return LINES.frames(data, start)
        return self._rows(data, start, is_final=True)

    def _rows(self, data: bytes, start: int, *, is_final: bool) -> Iterator[Frame]:
        """
        Yield the rows; unless final, stop before a row that may continue after the data.

        A row that breaks the rules is treated as a line, so that later rows are found again. In such a row, all
        newlines up to the fault are quoted. Another row that reaches one of these newlines within quotes fails at the
        same fault, so only its first line is matched: otherwise the bytes before a fault would be read once per line.
        """
        fault, is_open = start, False
        while start < len(data):
            row = self._row.match(data, start) if start >= fault else None
            if row is not None:
                end = row.end()
            else:
                end = line_end = data.find(b"\n", start) + 1 or len(data)
                is_known = line_end <= fault
                row = self._partial_row.match(data, start, line_end if is_known else len(data))
                if row is not None and row.lastindex:
                    end = row.end()
                else:
                    opens = row is None or data.startswith(self._mark, row.end())
                    if not is_known:
                        fault, is_open = len(data) if row is None or opens else row.end(), opens
                    if opens and is_open and not is_final and len(data) - start < _OPEN_QUOTE_BYTES_MAX:
                        return  # the following data may close the quote
            is_ended = data.endswith(b"\n", start, end)
            if not is_ended and not is_final:
                return
            yield Frame(start, end - is_ended, end)
            start = end


class BatchElements:
    """Elements of the arrays of batch envelopes `{"EventType":…,"events":[…]}`, or of bare arrays."""

    format: Format = "batch"
    header = b""

    def cut(self, data: bytes, *, is_final: bool) -> int:
        if is_final:
            return len(data)
        # After a torn element, only what follows it shows that it was in an array.
        scan = _scan_of(data, 0)
        return max((frame.cut for frame in scan.frames(data, is_final=False) if not scan.is_torn), default=0)

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        return _scan_of(data, start).frames(data, is_final=True)


def _scan_of(data: bytes, start: int) -> ElementScan:
    """Begin a scan between two records; after an element, where a chunk may end, a comma or a bracket follows."""
    at = _skip_blanks(data, start)
    return ElementScan(at, is_in_array=data.startswith((b",", b"]"), at))


class ElementScan:
    """Finds the elements of arrays in growing data, reading each byte once."""

    def __init__(self, start: int = 0, *, is_in_array: bool = False) -> None:
        self._start = self._at = start
        self._is_in_array = is_in_array
        self._is_after_element = False  # and no comma has followed yet
        self.is_torn = False  # the last element
        self._envelope = b""  # the read part of a byte-order mark or foot, without blanks
        self._is_invalid = False  # neither a head nor a foot
        self._value: _OpenValue | None = None

    def frames(self, data: bytes | bytearray, *, is_final: bool) -> Iterator[Frame]:
        """
        Yield the next complete elements of data that has grown; if it is final, the rest is an element, too.

        Objects and lines outside of an array that are no part of an envelope are elements, too.
        """
        while self._find_value(data) or self._is_invalid:
            if self._is_invalid:
                newline = data.find(b"\n", self._at)
                if newline < 0:
                    self._at = len(data)
                    break
                start, self._start, self._at = self._start, newline + 1, newline + 1
                self._is_invalid, self._envelope = False, b""
                yield Frame(start, newline, newline + 1)
                continue
            end = _simple_object_end(data, self._start) if self._value is None else None
            if end is None:
                self._value = self._value or _OpenValue(self._start, data)
                end = self._value.end_in(data)
                if end is None:
                    break
            self.is_torn = self._value is not None and self._value.is_torn
            start, self._start, self._at, self._value = self._start, end, end, None
            self._is_after_element = True
            yield Frame(start, end, end)  # the following comma shows that the position is within an array
        if is_final and self._start < len(data):
            start, self._start = self._start, len(data)
            yield Frame(start, len(data), len(data))

    def consume(self) -> int:
        """Return how many bytes are processed; the caller must remove them from the data."""
        done, self._start = self._start, 0
        self._at = max(0, self._at - done)
        if self._value is not None:
            self._value.at -= done
        return done

    def _find_value(self, data: bytes | bytearray) -> bool:
        """Advance to the next element; return False if there is none yet."""
        while self._value is None:
            if not self._is_in_array:
                if not self._enter_array(data):
                    return False
                if not self._is_in_array:
                    return True
            else:
                self._start = self._at = _skip_blanks(data, self._at)
                if self._at == len(data):
                    return False
                if data.startswith(b"]", self._at):
                    self._is_in_array, self._envelope = False, b"]"
                elif not data.startswith(b",", self._at):
                    if not self._is_after_element and not data.startswith(_HEAD_STARTS, self._at):
                        return len(data) - self._at >= _HEAD_START_BYTES or not _may_begin_head(data, self._at)
                    head = _HEAD.match(data, self._at)  # as at the beginning of a chunk, or after a torn envelope
                    if head is None:
                        return not _may_begin_head(data, self._at)
                    self._at = head.end() - 1
                self._start = self._at = self._at + 1
                self._is_after_element = False
        return True

    def _enter_array(self, data: bytes | bytearray) -> bool:
        """Advance into the next array or to an object; return False if neither has begun, or a line is invalid."""
        if self._is_after_element:
            self._at = _skip_blanks(data, self._at)
            if self._at == len(data):
                return False
            self._is_after_element = False
            if data.startswith((b",", b"]"), self._at):  # the object before it was in an array
                self._is_in_array = self._is_after_element = True
        while not self._is_in_array and not self._is_invalid:
            if not self._envelope.count(b'"') % 2:
                self._at = _skip_blanks(data, self._at)
            if self._envelope in {b"", b"]"}:
                self._start = self._at
                begins = data.startswith((b"{", b"["), self._at)
                if begins and (head := _HEAD.match(data, self._at)):
                    self._at, self._envelope, self._is_in_array = head.end(), b"", True
                    break
                if data.startswith(b"{", self._at):  # an object, unless it is the beginning of a head
                    if _may_begin_head(data, self._at):
                        return False
                    self._envelope = b""
                    return True
            if self._at == len(data):
                return False
            byte = bytes(data[self._at : self._at + 1])
            if self._envelope == b"]" and byte not in b",}":
                self._envelope = b""
            texts = _FEET if self._envelope.startswith(b"]") else (codecs.BOM_UTF8,)
            self._envelope += byte
            self._is_invalid = not any(text.startswith(self._envelope) for text in texts)
            self._at += 1
            if self._is_invalid and (newline := data.rfind(b"\n", self._start, self._at)) >= 0:
                self._at = newline
            if self._envelope in texts:
                self._envelope = b""
        return self._is_in_array


class _OpenValue:
    """
    A value, valid JSON or not, whose end is searched; `at` is the position of the search.

    A value whose writer stopped in the middle is torn: it ends at a newline within a string if an object or array
    follows, or before the head of an envelope at the beginning of a line.
    """

    is_torn = False

    def __init__(self, start: int, data: bytes | bytearray) -> None:
        self._is_bare = not data.startswith((b"{", b"[", b'"'), start)
        self.at = start + self._is_bare  # skip any first byte, such as an unmatched brace
        self._depth = 0
        self._is_in_string = False

    def end_in(self, data: bytes | bytearray) -> int | None:
        """Return the end of the value; None if it may continue after the data."""
        if self._is_bare:
            self.at = _end_of(_BARE, data, self.at)
            return self.at if self.at < len(data) else None
        while True:
            if self._is_in_string:
                if not self._ends_string(data):
                    return self.at if self.is_torn else None
                if not self._depth:
                    return self.at
            end = self._end_of_brackets(data)
            if not self._is_in_string:
                return end

    def _end_of_brackets(self, data: bytes | bytearray) -> int | None:
        """Search for the last bracket, or for a string that does not end on its line."""
        depth = self._depth
        for token in _TOKEN.finditer(data, self.at):
            mark = token[0]
            if mark in b"{[":
                if depth and data.startswith(b"\n{", token.start() - 1):
                    if _HEAD.match(data, token.start()):
                        self.is_torn = True
                        return token.start()
                    if _may_begin_head(data, token.start()):
                        self._depth, self.at = depth, token.start()
                        return None
                depth += 1
            elif mark in b"}]":
                depth -= 1
            elif mark == b'"':
                self._depth, self.at, self._is_in_string = depth, token.end(), True
                return None
            if not depth:
                return token.end()
        self._depth, self.at = depth, len(data)
        return None

    def _ends_string(self, data: bytes | bytearray) -> bool:
        """Advance to the end of a string; return False if it is torn or may continue after the data."""
        while True:
            self.at = _end_of(_REST_OF_STRING, data, self.at)
            if data.startswith(b'"', self.at):
                self.at += 1
                self._is_in_string = False
                return True
            line_end = _LINE_END.match(data, self.at)
            if line_end is None or line_end.end() == len(data):
                return False
            if data.startswith((b"{", b"["), line_end.end()):
                self.at, self.is_torn = line_end.start(1), True
                return False
            self.at = line_end.end()


def sniff(head: bytes, *, is_whole: bool, delimiter: str = "", columns: Container[str] = WIRE_COLUMNS) -> Format | None:
    """
    Detect the format from the first bytes; return None if there are too few of them.

    Args:
        is_whole: `head` is the whole input.
        delimiter: Empty = the most frequent of comma, semicolon, tab and bar.
        columns: Case-folded names by which a header is recognised.
    """
    text = head.removeprefix(codecs.BOM_UTF8).lstrip(BLANKS)
    if text.startswith(b"["):
        first = text[1:].lstrip(BLANKS)[:1]  # a line of a log may begin with [INFO] or [2026-11-01 10:00:00]
        if first in {b"{", b"]"} or (not first and is_whole):
            return "batch"
        if not first and len(text) < _SNIFFED_BYTES:
            return None
    elif _HEAD.match(text):
        return "batch"
    line, newline, _ = text.partition(b"\n")
    if not is_whole and len(text) < _SNIFFED_BYTES and (not newline or _may_be_partial_head(text)):
        return None
    names = CsvRows(line.rstrip(b"\0"), delimiter or _delimiter_of(line)).names  # reserved space may follow
    known = {name.casefold() for name in names if name.casefold() in columns}
    return "csv" if len(known) >= _KNOWN_COLUMNS_MIN else "ndjson"


def _may_be_partial_head(text: bytes) -> bool:
    """Return whether a text may be the beginning of an envelope's head, possibly on several lines."""
    partial = b"".join(text[:_HEAD_BYTES_MAX].split())
    return any(head.startswith(partial) for head in _HEADS)


def _may_begin_head(data: bytes | bytearray, at: int) -> bool:
    is_short = len(data) - at < _HEAD_BYTES_MAX
    return is_short and data.startswith(b"{", at) and _may_be_partial_head(bytes(data[at:]))


def csv_rows(head: bytes, *, is_whole: bool, delimiter: str = "") -> CsvRows | None:
    """Read the header of CSV from its first bytes; return None if it is incomplete. Arguments as for `sniff`."""
    newline = head.find(b"\n", _header_start(head))
    if newline < 0 and not is_whole:
        return None
    header = head if newline < 0 else head[: newline + 1]
    return CsvRows(header, delimiter or _delimiter_of(header))


def _header_start(head: bytes) -> int:
    match = _BEFORE_HEADER.match(head)
    assert match is not None
    return match.end()


def parse_cut_record(raw: bytes) -> tuple[bytes, int] | None:
    """
    Return the stored beginning of a record that the spool cut, and its original length; None for a complete record.

    If the end of the record never arrived, the length is a lower bound.
    """
    mark = _CUT.search(raw)
    if mark is None:
        return None
    line_start = raw.rfind(b"\n", 0, mark.start()) + 1  # in a value of CSV that has several lines
    line_length = max(int(mark[1] or 0), mark.start() - line_start + 1)
    return raw[: mark.start()], line_start + line_length + len(raw) - mark.end()


def is_object(text: bytes) -> bool:
    """Return whether a text is one complete JSON object, judging by its braces."""
    start = _skip_blanks(text, 0)
    return text.startswith(b"{", start) and _OpenValue(start, text).end_in(text) == len(text.rstrip(BLANKS))


def _find_repeated(names: Sequence[str]) -> tuple[int, int] | None:
    """Return the numbers of the first two columns with the same name; columns without a name are never read."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if name and numbers.setdefault(name, number) != number:
            return numbers[name], number
    return None


def _delimiter_of(header: bytes) -> str:
    return max(_DELIMITERS, key=lambda mark: header.count(mark.encode()))


def _may_have_newlines_in_quotes(data: bytes | bytearray) -> bool:
    return b'"' in data and any(line.count(b'"') % 2 for line in data.split(b"\n"))


def _skip_blanks(data: bytes | bytearray, at: int) -> int:
    blanks = _BLANK.match(data, at) if at < len(data) and data[at] in BLANKS else None
    return blanks.end() if blanks else at


def _end_of(pattern: re.Pattern[bytes], data: bytes | bytearray, at: int) -> int:
    """Return the end of the match of a pattern that always matches, if only the empty string."""
    match = pattern.match(data, at)
    return match.end() if match else at


def _simple_object_end(data: bytes | bytearray, start: int) -> int | None:
    """Return the end of a value if it is a simple object: short, and without nesting, escapes and torn strings."""
    if data[start] != _BRACE:
        return None
    end = data.find(b"}", start, start + _SIMPLE_OBJECT_BYTES) + 1
    if (
        end
        and data.rfind(b"{", start, end) == start
        and data.find(b"[", start, end) < 0
        and data.find(b"\\", start, end) < 0
        and data.count(b'"', start, end) % 2 == 0
        and not (data.find(b"\n", start, end) >= 0 and _may_have_newlines_in_quotes(data[start:end]))
    ):
        return end  # the brace is not in a string
    return None
