"""What comes in on standard input, brought into a form that can be kept in segments and read from each of them."""

from __future__ import annotations

from typing import Final

from shipper.errors import SourceError
from shipper.framing import LINES, CsvRows, Framing
from shipper.sources.reader import READ_BYTES, InputForm

_BLANKS: Final = b" \t\r\0"


class Incoming:
    """
    Takes bytes as they arrive, whatever way they were cut, and gives what is to be kept of them.

    Lines are kept as they come, also torn ones; of CSV whole rows, and of arrays whole elements, as lines.

    Attributes:
        header: What each segment has to begin with, with its newline; empty unless it is CSV.
        delimiter: Between the values of CSV.
    """

    def __init__(self, form: InputForm, *, max_record_bytes: int) -> None:
        self._form = form
        self._max_record_bytes = max_record_bytes
        self._framing: Framing | None = None
        self._held = b""  # what does not tell the format yet, or is part of a record
        self._open_line_bytes = 0
        self.header = b""
        self.delimiter = ""

    def take(self, data: bytes, *, is_final: bool = False, ends_whole: bool = False) -> bytes:
        """
        Take the next bytes.

        Args:
            is_final: There are no more; what is open is ended.
            ends_whole: Hold back a torn line, too.
        Returns:
            What is to be kept; it may be empty.
        Raises:
            SourceError: An element of an array is longer than a record may be.
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
        if self._framing is LINES:
            data = self._held + self._bound_line(data if self._open_line_bytes else data.lstrip(_BLANKS))
            end = data.rfind(b"\n") + 1 if ends_whole and not is_final else len(data)
            self._held = data[end:]
            return data + b"\n" if is_final and self._open_line_bytes else data[:end]
        is_rows = isinstance(self._framing, CsvRows)
        data = self._held + (self._bound_line(data) if is_rows else data)
        end = self._framing.cut(data, is_final=is_final)
        self._held = data[end:]
        if is_rows:
            return data + b"\n" if is_final and data[-1:] not in b"\n" else data[:end]
        if len(self._held) > self._max_record_bytes + READ_BYTES:
            raise SourceError(
                f"standard input: no record of the format {self._framing.format} ends within "
                f"input.max_record_bytes, which is {self._max_record_bytes}; is input.format right?"
            )
        elements = (data[frame.start : frame.end] for frame in self._framing.frames(data[:end], 0))
        return b"".join(element.replace(b"\n", b" ") + b"\n" for element in elements)

    def take_rest(self) -> bytes:
        """Give up what is held of a line, for whoever has to stop in its middle."""
        rest, self._held = (self._held, b"") if self._framing is LINES else (b"", self._held)
        return rest

    def _bound_line(self, data: bytes) -> bytes:
        """
        Cut what an endless line has too much.

        One byte over the limit is kept, so that the codec finds it oversized.
        """
        first = data.find(b"\n")
        part = len(data) if first < 0 else first
        room = max(0, self._max_record_bytes + 1 - self._open_line_bytes)
        if first < 0:
            self._open_line_bytes += part
        else:
            # Blanks in front of a line, such as a hole in a file, do not count.
            self._open_line_bytes = len(data[data.rfind(b"\n") + 1 :].lstrip(_BLANKS))
        return data if part <= room else data[:room] + data[part:]
