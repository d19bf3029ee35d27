"""
How records are separated in an input: one JSON object a line, rows of CSV, or elements of a JSON array.

Framing looks at bytes only; the codec reads the records. The start of a chunk always is a place between
two records, so a framing carries no state from one chunk to the next.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Container, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from shipper.model.wire import EVENT_TYPE, ActivityEvent

Format = Literal["ndjson", "csv", "batch"]

# Names of columns, folded to one case, that tell a header from any other first line.
WIRE_COLUMNS: Final = frozenset(name.casefold() for name in ActivityEvent.__struct_fields__)

# In the spool, behind what is kept of a line that is too long; the length of the whole line follows, once it is known.
CUT_MARK: Final = b"\0\0cut:"

_BLANKS: Final = b" \t\r\n\0"
_DELIMITERS: Final = ",;\t|"
_SNIFFED_BYTES: Final = 65_536
_HEAD_BYTES_MAX: Final = 1024
_KNOWN_COLUMNS_MIN: Final = 2  # a header has more; a line of something else that is cut at commas has none
# No possessive group around alternatives: the first releases of Python 3.11 match those wrongly (cpython#106052).
_QUOTED: Final = rb'"[^"]*(?:""[^"]*)*"'
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_QUOTED_BYTES_MAX: Final = 262_144  # a quote that is not closed within so much is a fault of one line
_CUT: Final = re.compile(CUT_MARK + rb"(\d{0,18})(?=\n|\Z)")
_BRACE: Final = ord("{")
_USUAL_OBJECT_BYTES: Final = 2_048  # of an element; one that is longer is read bracket by bracket
_TOKEN: Final = re.compile(_STRING + rb'|[{}\[\]"]', re.DOTALL)  # a lone quote opens a string that has no end
_REST_OF_STRING: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_BARE: Final = re.compile(rb'[^",\[\]{}\s]*')
_BLANK: Final = re.compile(rb"[ \t\r\n\0]*")
_BEFORE_HEADER: Final = re.compile(rb"(?:%b)?(?:[ \t]*\r?\n)*" % codecs.BOM_UTF8)
# The head of an envelope, up to its first event, or of a bare array; and what follows the last event.
_EVENT_TYPE: Final = rb'"EventType"\s*:\s*"%b"' % EVENT_TYPE.encode()
_HEAD: Final = re.compile(rb'(?:\{\s*(?:%b\s*,\s*)?"events"\s*:\s*)?\[' % _EVENT_TYPE)
_HEADS: Final = (b'{"EventType":"%b","events":[' % EVENT_TYPE.encode(), b'{"events":[')  # without blanks
# The same without blanks, and what may begin an input; and the feet that are longer than the bracket of a bare array.
_BEGINNINGS: Final = (b"[", *_HEADS, codecs.BOM_UTF8)
_FEET: Final = (b"]}", b'],"EventType":"%b"}' % EVENT_TYPE.encode())


class Frame(NamedTuple):
    """
    Where a record lies within some bytes.

    Attributes:
        end: Exclusive, without a newline that ends it.
        cut: Where a chunk may end behind it.
    """

    start: int
    end: int
    cut: int


class Framing(Protocol):
    """
    Attributes:
        format: Its name.
    """

    format: Format

    def cut(self, data: bytes, *, is_final: bool) -> int:
        """
        Find the end of the last whole record.

        Args:
            data: From a place between two records on.
            is_final: Nothing comes behind `data`, so that its end ends the last record.
        Returns:
            An offset in `data`, behind the newline if there is one; 0 if no record is whole.
        """

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        """Find the records in bytes that were cut, in order; without their separators, blank ones included."""


class Lines:
    """One record a line. There is one of it, `LINES`, in each process."""

    format: Format = "ndjson"

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
    Rows of CSV as RFC 4180 has it; a quoted value may hold newlines.

    Attributes:
        header: The first row as it came, with its newline and the blank lines before it; it is no record.
        names: The columns.
        delimiter: One character.
        repeated: The numbers, from 1, of two columns that have the same name; None if there are none.
    """

    format: Format = "csv"

    def __init__(self, header: bytes, delimiter: str) -> None:
        self.header = header
        self.delimiter = delimiter
        self._mark = delimiter.encode()
        text = header[_begin_of_header(header) :].decode("utf-8", "backslashreplace")
        try:
            self.names = [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])]
        except csv.Error:
            self.names = []  # so that no row has as many values
        self.repeated = _repeated(self.names)
        mark = re.escape(self._mark)
        value = rb'(?:%b|(?!")[^%b\n]*)'
        whole, begun = value % (_QUOTED, mark), value % (_QUOTED + rb'(?!")', mark)
        self._row = re.compile(rb"%b(?:%b%b)*\r?(?:\n|\Z)" % (whole, mark, whole))
        # The group is missing if the values end with something that does not end a row.
        self._begun = re.compile(rb"%b(?:%b%b)*(\r?(?:\n|\Z))?" % (begun, mark, begun))

    def __repr__(self) -> str:
        return f"<CsvRows {len(self.names)} columns>"

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
        Find the rows; unless it is final, stop in front of one that may go on behind the data.

        What is no row by the rules is a line, so that the rows behind it are found again. A row that fails has had each
        newline up to its fault within quotes. Another one that comes to such a newline within quotes fails at the same
        fault, so it is matched against its first line alone: the bytes up to a fault are looked at a fixed number of
        times, not once for each of their lines.
        """
        fault, is_open = start, False
        while start < len(data):
            row = self._row.match(data, start) if start >= fault else None
            if row is not None:
                end = row.end()
            else:
                end = line_end = data.find(b"\n", start) + 1 or len(data)
                is_known = line_end <= fault
                row = self._begun.match(data, start, line_end if is_known else len(data))
                if row is not None and row.lastindex:
                    end = row.end()
                else:
                    opens = row is None or data.startswith(self._mark, row.end())
                    if not is_known:
                        fault, is_open = len(data) if row is None or opens else row.end(), opens
                    if opens and is_open and not is_final and len(data) - start < _QUOTED_BYTES_MAX:
                        return  # the quote may be closed by what follows
            is_ended = data.endswith(b"\n", start, end)
            if not is_ended and not is_final:
                return
            yield Frame(start, end - is_ended, end)
            start = end


class BatchElements:
    """Elements of the arrays of batch envelopes `{"EventType":…,"events":[…]}`, or of bare arrays."""

    format: Format = "batch"

    def cut(self, data: bytes, *, is_final: bool) -> int:
        if is_final:
            return len(data)
        return max((frame.cut for frame in _scan_of(data, 0).frames(data, is_final=False)), default=0)

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        return _scan_of(data, start).frames(data, is_final=True)


def _scan_of(data: bytes, start: int) -> ElementScan:
    """Begin between two records; behind an element, where a chunk may end, a comma or a bracket follows."""
    at = _skip_blanks(data, start)
    return ElementScan(at, is_within=data.startswith((b",", b"]"), at))


class ElementScan:
    """
    A search for the elements of arrays in data that may grow: what was looked at is not looked at again.

    Args:
        start: Where it begins in the data.
        is_within: It begins within an array.
    """

    def __init__(self, start: int = 0, *, is_within: bool = False) -> None:
        self._start = self._at = start
        self._is_within = is_within
        self._is_behind = False  # an element, without a comma since
        self._between = b""  # what has come of a head or foot, without blanks
        self._is_strange = False  # that is none
        self._value: _OpenValue | None = None

    def frames(self, data: bytes | bytearray, *, is_final: bool) -> Iterator[Frame]:
        """
        Find the next elements that are whole.

        Args:
            data: The same as before, and what has come since behind it.
            is_final: Nothing comes behind it: what is left of it is one more.
        """
        while self._find_value(data):
            end = _usual_end(data, self._start) if self._value is None else None
            if end is None:
                self._value = self._value or _OpenValue(self._start, data)
                end = self._value.end_in(data)
                if end is None:
                    break
            start, self._start, self._at, self._value = self._start, end, end, None
            self._is_behind = True
            yield Frame(start, end, end)  # the comma that follows says that it is within an array
        if is_final and self._start < len(data):
            start, self._start = self._start, len(data)
            yield Frame(start, len(data), len(data))

    def pass_over(self) -> int:
        """Return how many bytes are done with; the data that is given next has to begin behind them."""
        done, self._start = self._start, 0
        self._at = max(0, self._at - done)
        if self._value is not None:
            self._value.at -= done
        return done

    def _find_value(self, data: bytes | bytearray) -> bool:
        """Go to where an element begins; False if none is there yet."""
        while self._value is None:
            if not self._is_within:
                if not self._is_past_head(data):
                    return False
            else:
                self._start = self._at = _skip_blanks(data, self._at)
                if self._at == len(data):
                    return False
                if data.startswith(b"]", self._at):
                    self._is_within, self._between = False, b"]"
                elif self._is_behind and (head := _HEAD.match(data, self._at)):
                    self._at = head.end() - 1  # as it would be one where a chunk began
                elif not data.startswith(b",", self._at):
                    return True
                self._start = self._at = self._at + 1
                self._is_behind = False
        return True

    def _is_past_head(self, data: bytes | bytearray) -> bool:
        """Go on in what stands between two arrays; False if its end has not come, or it is none."""
        while not self._is_within and not self._is_strange:
            if not self._between.count(b'"') % 2:
                self._at = _skip_blanks(data, self._at)
            if self._between in {b"", b"]"}:
                self._start = self._at
                begins = data.startswith((b"{", b"["), self._at)
                if begins and (head := _HEAD.match(data, self._at)):
                    self._at, self._between, self._is_within = head.end(), b"", True
                    break
            if self._at == len(data):
                return False
            byte = bytes(data[self._at : self._at + 1])
            if self._between == b"]" and byte not in b",}":
                self._between = b""
            texts = _FEET if self._between.startswith(b"]") else _BEGINNINGS
            self._between += byte
            self._is_strange = not any(text.startswith(self._between) for text in texts)
            self._at += 1
            if self._between in texts:
                self._between, self._is_within = b"", byte == b"["
        return self._is_within


class _OpenValue:
    """
    A JSON value, or something that is none, whose end is looked for.

    Attributes:
        at: How far it was looked for.
    """

    def __init__(self, start: int, data: bytes | bytearray) -> None:
        self._is_bare = not data.startswith((b"{", b"[", b'"'), start)
        self.at = start + self._is_bare  # whatever it begins with, such as a brace that closes nothing
        self._depth = 0
        self._is_in_string = False

    def end_in(self, data: bytes | bytearray) -> int | None:
        """Go on where nothing was when it was looked for last; None if it may go on behind the data."""
        if self._is_bare:
            self.at = _end_of(_BARE, data, self.at)
            return self.at if self.at < len(data) else None
        if self._is_in_string:
            if not self._ends_string(data):
                return None
            if not self._depth:
                return self.at
        depth = self._depth
        for token in _TOKEN.finditer(data, self.at):
            mark = token[0]
            if mark in b"{[":
                depth += 1
            elif mark in b"}]":
                depth -= 1
            elif mark == b'"':
                self._depth, self.at = depth, token.end()
                self._ends_string(data)
                return None
            if not depth:
                return token.end()
        self._depth, self.at = depth, len(data)
        return None

    def _ends_string(self, data: bytes | bytearray) -> bool:
        rest = _end_of(_REST_OF_STRING, data, self.at)
        self._is_in_string = not data.startswith(b'"', rest)
        self.at = rest if self._is_in_string else rest + 1
        return not self._is_in_string


def sniff(head: bytes, *, is_whole: bool, delimiter: str = "", columns: Container[str] = WIRE_COLUMNS) -> Format | None:
    """
    Return the format, by the first bytes; None as long as there are too few of them.

    Args:
        is_whole: There is no more.
        delimiter: As for `csv_rows`.
        columns: The names, folded to one case, by which a header is known.
    """
    text = head.removeprefix(codecs.BOM_UTF8).lstrip(_BLANKS)
    if text.startswith(b"[") or _HEAD.match(text):
        return "batch"
    line, newline, _ = text.partition(b"\n")
    if not is_whole and len(text) < _SNIFFED_BYTES and (not newline or _may_become_head(text)):
        return None
    names = CsvRows(line, delimiter or _delimiter_of(line)).names
    known = {name.casefold() for name in names if name.casefold() in columns}
    return "csv" if len(known) >= _KNOWN_COLUMNS_MIN else "ndjson"


def _may_become_head(text: bytes) -> bool:
    """Return whether a text is the beginning of an envelope's head, which may be written over several lines."""
    begun = b"".join(text[:_HEAD_BYTES_MAX].split())
    return any(head.startswith(begun) for head in _HEADS)


def csv_rows(head: bytes, *, is_whole: bool, delimiter: str = "") -> CsvRows | None:
    """
    Read the header of a CSV file; None as long as it has no end.

    Args:
        head: The first bytes of the file.
        is_whole: There is no more.
        delimiter: Empty: whichever of comma, semicolon, tab and bar stands in the header most.
    """
    newline = head.find(b"\n", _begin_of_header(head))
    if newline < 0 and not is_whole:
        return None
    header = head if newline < 0 else head[: newline + 1]
    return CsvRows(header, delimiter or _delimiter_of(header))


def _begin_of_header(head: bytes) -> int:
    before = _BEFORE_HEADER.match(head)
    assert before is not None
    return before.end()


def cut_record(raw: bytes) -> tuple[bytes, int] | None:
    """
    Take the mark of a cut from a record of the spool; None if it has none.

    Returns:
        What is kept of it, and how long it was; if its end never came, how much of it had come at least.
    """
    mark = _CUT.search(raw)
    if mark is None:
        return None
    line_start = raw.rfind(b"\n", 0, mark.start()) + 1  # in a value of CSV that has several lines
    line_bytes = max(int(mark[1] or 0), mark.start() - line_start + 1)
    return raw[: mark.start()], line_start + line_bytes + len(raw) - mark.end()


def is_object(text: bytes) -> bool:
    """Return whether a text is one whole JSON object, as far as braces tell."""
    start = _skip_blanks(text, 0)
    return text.startswith(b"{", start) and _OpenValue(start, text).end_in(text) == len(text.rstrip(_BLANKS))


def _repeated(names: Sequence[str]) -> tuple[int, int] | None:
    """Find the first two columns of one name; what has no name is read by nobody."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if name and numbers.setdefault(name, number) != number:
            return numbers[name], number
    return None


def _delimiter_of(header: bytes) -> str:
    return max(_DELIMITERS, key=lambda mark: header.count(mark.encode()))


def _may_have_newlines_in_quotes(data: bytes) -> bool:
    return b'"' in data and any(line.count(b'"') % 2 for line in data.split(b"\n"))


def _skip_blanks(data: bytes | bytearray, at: int) -> int:
    blanks = _BLANK.match(data, at) if at < len(data) and data[at] in _BLANKS else None
    return blanks.end() if blanks else at


def _end_of(pattern: re.Pattern[bytes], data: bytes | bytearray, at: int) -> int:
    """Find where a match ends of a pattern that matches anywhere, be it nothing."""
    found = pattern.match(data, at)
    return found.end() if found else at


def _usual_end(data: bytes | bytearray, start: int) -> int | None:
    """Find the end of a value if it is the usual object: short, with no other within it and no escape."""
    if data[start] != _BRACE:
        return None
    end = data.find(b"}", start, start + _USUAL_OBJECT_BYTES) + 1
    if (
        end
        and data.rfind(b"{", start, end) == start
        and data.find(b"\\", start, end) < 0
        and data.count(b'"', start, end) % 2 == 0
    ):
        return end  # this brace is in no string
    return None
