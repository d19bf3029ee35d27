"""Frame standard input so that each segment can be read on its own."""

from __future__ import annotations

from typing import Final

from shipper.model.errors import SourceError
from shipper.model.framing import CUT_MARK, LINES, CsvRows, ElementScan, Framing
from shipper.sources.reader import READ_BYTES, InputForm

_OPEN_ROW_BYTES: Final = 8_192
_BLANKS: Final = b" \t\r\0"
_MARK_BYTES: Final = 64
_LOOKS_IN_VAIN: Final = 64


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
        self._held = bytearray()  # not given yet: it does not tell the format, or is part of an element
        self._held_looked_at = self._looked_at = 0  # of it, when its format was looked for last, and in all
        self._elements = ElementScan()
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
            self._held += data
            if not (is_final or self._may_tell_format(data)):
                return b""
            data = bytes(self._held)
            self._framing = self._form.framing_of(data, is_whole=is_final or len(data) >= READ_BYTES)
            self._held_looked_at = len(data)
            self._looked_at += len(data)
            if self._framing is None:
                return b""
            self._held.clear()
            if isinstance(self._framing, CsvRows):
                self.header, self.delimiter = self._framing.header, self._framing.delimiter
                data = data[len(self.header) :]
        if isinstance(self._framing, CsvRows):
            return self._take_rows(self._framing, data, is_final=is_final)
        if self._framing is LINES:
            return self._bound_line(data if self._open_line_bytes else data.lstrip(_BLANKS), is_final=is_final)
        return self._take_elements(data, is_final=is_final)

    def _take_rows(self, rows: CsvRows, data: bytes, *, is_final: bool) -> bytes:
        data = self._bound_line(data, is_final=is_final)
        self._open_row += data
        # The end of a long row that comes in many small pieces is not looked for at each of them.
        if is_final or not _OPEN_ROW_BYTES < len(self._open_row) < 2 * self._open_row_looked_at:
            del self._open_row[: rows.cut(bytes(self._open_row), is_final=is_final)]
            self._open_row_looked_at = len(self._open_row)
        return data

    def _may_tell_format(self, data: bytes) -> bool:
        """Return whether it is worth looking at what is held, now that some more has come."""
        held_bytes = len(self._held)
        if held_bytes >= min(2 * self._held_looked_at, READ_BYTES):
            return True
        # Only the end of a line and the beginning of an array tell more; not many of them are in vain.
        return (b"\n" in data or b"[" in data) and self._looked_at <= _LOOKS_IN_VAIN * held_bytes

    def _take_elements(self, data: bytes, *, is_final: bool) -> bytes:
        self._held += data
        frames = self._elements.frames(self._held, is_final=is_final)
        # To JSON a carriage return is what a newline is: white space, or a fault within a string.
        given = b"".join(self._held[frame.start : frame.end].replace(b"\n", b"\r") + b"\n" for frame in frames)
        del self._held[: self._elements.pass_over()]
        if not given and len(self._held) > self._max_record_bytes + READ_BYTES:
            raise SourceError(
                "standard input: no record of the format batch ends within "
                f"input.max_record_bytes, which is {self._max_record_bytes}; is input.format right?"
            )
        return given

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
