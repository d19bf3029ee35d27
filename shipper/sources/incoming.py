"""What comes in on standard input, brought into a form that can be kept in segments and read from each of them."""

from __future__ import annotations

from typing import Final

from shipper.errors import SourceError
from shipper.framing import CUT_MARK, LINES, CsvRows, Framing, OpenValue, open_value
from shipper.sources.reader import READ_BYTES, InputForm

_OPEN_ROW_BYTES: Final = 8_192
_BLANKS: Final = b" \t\r\0"
_MARK_BYTES: Final = 64


class Incoming:
    """
    Takes bytes as they arrive, whatever way they were cut, and gives what is to be kept of them.

    Lines and rows of CSV are kept as they come, also torn ones; of arrays whole elements are kept, as lines.

    Attributes:
        header: What each segment has to begin with, with its newline; empty unless it is CSV.
        delimiter: Between the values of CSV.
        open_bytes: Of CSV, how many of the bytes given so far may belong to a row whose end has not come; they are the
            last ones.
    """

    def __init__(self, form: InputForm, *, max_record_bytes: int) -> None:
        self._form = form
        self._max_record_bytes = max_record_bytes
        self._framing: Framing | None = None
        self._held = b""  # not given yet: it does not tell the format, or is part of an element
        self._open: OpenValue | None = None  # with which what is held begins
        self._open_row = bytearray()  # given already
        self._open_row_looked_at = 0  # of these, when the end of the row was looked for last
        self._open_line_bytes = 0
        self._is_line_cut = False
        self.header = b""
        self.delimiter = ""

    @property
    def held_bytes(self) -> int:
        """How many more bytes may be given than are taken: what is held, and a newline or the mark of a cut."""
        return len(self._held) + _MARK_BYTES

    @property
    def open_bytes(self) -> int:
        return len(self._open_row)

    def take(self, data: bytes, *, is_final: bool = False) -> bytes:
        """
        Take the next bytes.

        Args:
            is_final: There are no more: what is held is given, too.
        Returns:
            What is to be kept; it may be empty.
        Raises:
            SourceError: An element of an array is longer than a record may be. All of it is held.
        """
        if self._framing is None:
            data = self._held + data
            self._held = b""
            self._framing = self._form.framing_of(data, is_whole=is_final or len(data) >= READ_BYTES)
            if self._framing is None:
                self._held = data
                return b""
            if isinstance(self._framing, CsvRows):
                self.header, self.delimiter = self._framing.header, self._framing.delimiter
                data = data[len(self.header) :]
        if isinstance(self._framing, CsvRows):
            return self._take_rows(self._framing, data, is_final=is_final)
        if self._framing is LINES:
            return self._bound_line(data if self._open_line_bytes else data.lstrip(_BLANKS), is_final=is_final)
        return self._take_elements(self._framing, data, is_final=is_final)

    def _take_rows(self, rows: CsvRows, data: bytes, *, is_final: bool) -> bytes:
        data = self._bound_line(data, is_final=is_final)
        self._open_row += data
        # The end of a long row that comes in many small pieces is not looked for at each of them.
        if is_final or not _OPEN_ROW_BYTES < len(self._open_row) < 2 * self._open_row_looked_at:
            del self._open_row[: rows.cut(bytes(self._open_row), is_final=is_final)]
            self._open_row_looked_at = len(self._open_row)
        return data

    def _take_elements(self, framing: Framing, data: bytes, *, is_final: bool) -> bytes:
        data = self._held + data
        is_open = self._open is not None and not is_final and not self._open.ends_in(data)
        end = 0 if is_open else framing.cut(data, is_final=is_final)
        if len(data) - end > self._max_record_bytes + READ_BYTES:
            self._held = data
            raise SourceError(
                f"standard input: no record of the format {framing.format} ends within "
                f"input.max_record_bytes, which is {self._max_record_bytes}; is input.format right?"
            )
        self._held = data[end:]
        if not is_open:
            self._open = open_value(self._held)
        # To JSON a carriage return is what a newline is: white space, or a fault within a string.
        elements = (data[frame.start : frame.end] for frame in framing.frames(data[:end], 0))
        return b"".join(element.replace(b"\n", b"\r") + b"\n" for element in elements)

    def _bound_line(self, data: bytes, *, is_final: bool) -> bytes:
        """
        Cut what an endless line has too much, and mark the cut.

        One byte over the limit is kept, so that the codec finds it oversized.
        """
        first = data.find(b"\n")
        part = len(data) if first < 0 else first
        room = max(0, self._max_record_bytes + 1 - self._open_line_bytes)
        mark = b""
        if part > room and not self._is_line_cut:
            mark, self._is_line_cut = CUT_MARK, True
        elif not self._is_line_cut:
            room = part
        self._open_line_bytes += part
        if self._is_line_cut and (first >= 0 or is_final):
            mark += b"%d" % self._open_line_bytes
            self._is_line_cut = False
        if first >= 0:
            # Blanks in front of a line, such as a hole in a file, do not count.
            self._open_line_bytes = len(data[data.rfind(b"\n") + 1 :].lstrip(_BLANKS))
        return data[:room] + mark + data[part:] if mark or room < part else data
