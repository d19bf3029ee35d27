"""
How records lie in an input: one JSON object a line, rows of CSV, or elements of a JSON array.

Framing looks at bytes only; what a record means is the codec's business. The start of a chunk always is a place between
two records, so a framing carries no state from one chunk to the next.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Container, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from shipper.wire import EVENT_TYPE, ActivityEvent

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
_QUOTED: Final = rb'"[^"]*(?:""[^"]*)*"(?!")'
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_QUOTED_BYTES_MAX: Final = 262_144  # a quote that is not closed within so much is a fault of one line
_CUT: Final = re.compile(CUT_MARK + rb"(\d{0,18})(?=\n|\Z)")
_USUAL_OBJECT_BYTES: Final = 2_048  # of an element; one that is longer is read bracket by bracket
_TOKEN: Final = re.compile(_STRING + rb'|[{}\[\]"]', re.DOTALL)  # a lone quote opens a string that has no end
_SCALAR: Final = re.compile(_STRING + rb'|[^",\[\]{}\s]+', re.DOTALL)
# The head of an envelope, up to its first event, or of a bare array; and what follows the last event.
_EVENT_TYPE: Final = rb'"EventType"\s*:\s*"%b"' % EVENT_TYPE.encode()
_HEAD: Final = re.compile(rb'(?:\{\s*(?:%b\s*,\s*)?"events"\s*:\s*)?\[' % _EVENT_TYPE)
_HEADS: Final = (b'{"EventType":"%b","events":[' % EVENT_TYPE.encode(), b'{"events":[')  # without blanks
_FOOT: Final = re.compile(rb"\](?:\s*(?:,\s*%b\s*)?\})?" % _EVENT_TYPE)


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
        header: The first row as it came, with its newline; it is no record.
        names: The columns.
        delimiter: One character.
        repeated: The numbers, from 1, of two columns that have the same name; None if there are none.
    """

    format: Format = "csv"

    def __init__(self, header: bytes, delimiter: str) -> None:
        self.header = header
        self.delimiter = delimiter
        self._mark = delimiter.encode()
        text = header.removeprefix(codecs.BOM_UTF8).decode("utf-8", "backslashreplace")
        try:
            self.names = [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])]
        except csv.Error:
            self.names = []  # so that no row has as many values
        self.repeated = _repeated(self.names)
        mark = re.escape(self._mark)
        value = rb'(?:%b|(?!")[^%b\n]*)' % (_QUOTED, mark)
        # The group is missing if the values end with something that does not end a row.
        self._row = re.compile(rb"%b(?:%b%b)*(\r?(?:\n|\Z))?" % (value, mark, value))

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
        fault, so it is matched against its first line alone: the bytes up to a fault are looked at twice, not once for
        each of their lines.
        """
        fault, is_open = start, False
        while start < len(data):
            end = line_end = data.find(b"\n", start) + 1 or len(data)
            is_known = line_end <= fault
            row = self._row.match(data, start, line_end if is_known else len(data))
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
        return max((frame.cut for frame in self._elements(data, 0, is_final=False)), default=0)

    def frames(self, data: bytes, start: int) -> Iterator[Frame]:
        return self._elements(data, start, is_final=True)

    def _elements(self, data: bytes, start: int, *, is_final: bool) -> Iterator[Frame]:
        at = _skip_blanks(data, start)
        if data.startswith(codecs.BOM_UTF8, at):
            at = _skip_blanks(data, at + len(codecs.BOM_UTF8))
        is_within = data.startswith((b",", b"]"), at)  # behind an element, where `cut` ended the chunk before
        while at < len(data):
            end: int | None
            if not is_within:
                head = _HEAD.match(data, at)
                end, is_within = head.end() if head else None, True
            elif foot := _FOOT.match(data, at):
                end, is_within = foot.end(), False
            elif data.startswith(b",", at):
                end = at + 1
            else:
                end = _end_of_value(data, at)
                if end is not None:
                    yield Frame(at, end, end)  # the comma that follows says that it is within an array
            if end is None:
                if is_final:
                    yield Frame(at, len(data), len(data))
                return
            at = _skip_blanks(data, end)


class OpenValue:
    """
    A value of an array whose end has not come; it is looked for in what comes, not in what was there.

    Args:
        start: Where it begins in the data, which only grows.
    """

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0

    def ends_in(self, data: bytes) -> bool:
        """Look at what has come since the last time."""
        for token in _TOKEN.finditer(data, self._at):
            self._at = token.start()
            if token[0] == b'"':
                return False
            self._at = token.end()
            if token[0] in b"{[":
                self._depth += 1
            elif token[0] in b"}]":
                self._depth -= 1
                if self._depth == 0:
                    return True
        self._at = max(self._at, len(data))
        return False


def open_value(data: bytes) -> OpenValue | None:
    """Find the first value of an array, of which there is no whole one; None unless it is an object or an array."""
    at = _skip_blanks(data, 0)
    if data.startswith(codecs.BOM_UTF8, at):
        at = _skip_blanks(data, at + len(codecs.BOM_UTF8))
    if data.startswith(b",", at):
        at = _skip_blanks(data, at + 1)
    elif head := _HEAD.match(data, at):
        at = _skip_blanks(data, head.end())
    else:
        return None
    return OpenValue(at) if data.startswith((b"{", b"["), at) else None


def sniff(head: bytes, *, is_whole: bool, delimiter: str = "", columns: Container[str] = WIRE_COLUMNS) -> Format | None:
    """
    Tell the format by the first bytes; None as long as there are too few of them.

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
    """Tell whether a text is the beginning of an envelope's head, which may be written over several lines."""
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
    newline = head.find(b"\n")
    if newline < 0 and not is_whole:
        return None
    header = head if newline < 0 else head[: newline + 1]
    return CsvRows(header, delimiter or _delimiter_of(header))


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
    return text.startswith(b"{", start) and _end_of_value(text, start) == len(text.rstrip(_BLANKS))


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


def _skip_blanks(data: bytes, at: int) -> int:
    while at < len(data) and data[at] in _BLANKS:
        at += 1
    return at


def _end_of_value(data: bytes, start: int) -> int | None:
    """Find the end of a JSON value, or of something that is none; None if it may go on behind the data."""
    if data[start] not in b"{[":
        scalar = _SCALAR.match(data, start)
        if scalar is None:
            return None if data.startswith(b'"', start) else start + 1
        return scalar.end() if scalar.end() < len(data) else None
    end = data.find(b"}", start, start + _USUAL_OBJECT_BYTES) + 1
    if (
        end
        and data.rfind(b"{", start, end) == start
        and data.find(b"\\", start, end) < 0
        and data.count(b'"', start, end) % 2 == 0
    ):
        return end  # the usual object has none within it, and this brace is in no string
    depth = 0
    for token in _TOKEN.finditer(data, start):
        if token[0] in b"{[":
            depth += 1
        elif token[0] == b'"':
            return None
        elif token[0] in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return None
