"""One open input: cuts it into chunks of whole lines, and proves that it is the input that it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal, NamedTuple

from shipper.errors import SourceError
from shipper.framing import LINES, BatchElements, Format, Framing, csv_rows, sniff
from shipper.records import Chunk, Stream, digest

READ_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 1024
TAIL_BYTES: Final = 64


class InputForm(NamedTuple):
    """
    How records lie in the inputs, as far as it is known beforehand.

    Attributes:
        format: `auto` = each input tells by its first bytes.
        csv_delimiter: Empty = the header tells.
    """

    format: Format | Literal["auto"] = "ndjson"
    csv_delimiter: str = ""

    def framing_of(self, head: bytes, *, is_whole: bool) -> Framing | None:
        """Tell the framing of an input by its first bytes; None as long as there are too few of them."""
        match sniff(head, is_whole=is_whole) if self.format == "auto" else self.format:
            case "ndjson":
                return LINES
            case "batch":
                return BatchElements()
            case "csv":
                return csv_rows(head, is_whole=is_whole, delimiter=self.csv_delimiter)
            case None:
                return None


NDJSON: Final = InputForm()


def is_same(descriptor: int, known: Stream) -> bool:
    """
    Tell whether an open file still is the known stream.

    Device and inode are reused and files are truncated in place, so the bytes have to agree: the head that was
    seen, and the last bytes before the checkpoint.
    """
    if os.fstat(descriptor).st_size < known.checkpoint:
        return False
    if known.head_bytes and digest(os.pread(descriptor, known.head_bytes, 0)) != known.head_digest:
        return False
    marker_start = known.checkpoint - known.marker_bytes
    marker = os.pread(descriptor, known.marker_bytes, marker_start)
    return not known.marker_bytes or digest(marker) == known.marker_digest


class StreamReader:
    """
    Reads one stream forward from its checkpoint. All calls block.

    Args:
        descriptor: Open for reading; owned and closed by the reader.
        path: Where the input is; for people.
        form: How its records lie in it.
        max_record_bytes: The longest line that has to be read as a whole; of a longer one only the end is looked for.
    """

    def __init__(
        self, descriptor: int, stream: Stream, path: Path, *, max_record_bytes: int, form: InputForm = NDJSON
    ) -> None:
        self._descriptor = descriptor
        self._form = form
        self._is_framed = form.format == "ndjson"
        self._max_record_bytes = max_record_bytes
        self._max_line_bytes = max_record_bytes + 1
        self._scanned = 0  # how far a line that is too long has been searched for its end
        self.stream = stream
        self.path = path
        self.offset = max(stream.checkpoint, stream.read_offset)
        self._tail = self._last_bytes_seen()

    def __repr__(self) -> str:
        return f"<StreamReader {self.path} at {self.offset}>"

    def close(self) -> None:
        os.close(self._descriptor)

    def restart(self, stream: Stream) -> None:
        """Go on with another stream in the same file: it was truncated in place."""
        self.stream = stream
        self.offset = stream.checkpoint
        self._tail = b""
        self._scanned = 0
        self._is_framed = self._form.format == "ndjson"

    def _last_bytes_seen(self) -> bytes:
        """Read what stands before the offset, or before the place up to which the end of a line was looked for."""
        end = max(self.offset, self._scanned)
        length = min(TAIL_BYTES, end)
        return os.pread(self._descriptor, length, end - length)

    def is_intact(self) -> bool:
        """Tell whether what was read is still there; if not, the file was truncated, and may have grown again."""
        if os.fstat(self._descriptor).st_size < max(self.offset, self._scanned):
            return False
        head = os.pread(self._descriptor, self.stream.head_bytes, 0)
        return self._last_bytes_seen() == self._tail and (not head or digest(head) == self.stream.head_digest)

    def status(self) -> os.stat_result:
        """Look at the open file, wherever its name points by now."""
        return os.fstat(self._descriptor)

    def read(self, *, is_final: bool) -> Chunk | None:
        """
        Read the next whole lines.

        The bytes of a torn last line are read again next time: so there is no state to carry, and the offset is
        always the start of a line.

        Args:
            is_final: Nothing will be appended any more, so that the end of the input ends the last line.
        Returns:
            At most 1 MiB, or one line that is longer; None if there is no whole line yet.
        Raises:
            SourceError: The input has another format, or a record that is no line is too long.
        """
        if not self._is_framed:
            self._is_framed = self._find_framing(is_final=is_final)
            if not self._is_framed:
                return None
        if self.stream.framing is not LINES:
            return self._read_framed(is_final=is_final)
        if self._scanned:
            return self._skip_long_line(is_final=is_final)
        data = os.pread(self._descriptor, READ_BYTES, self.offset)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == READ_BYTES and data.startswith(b"\0"):
            end = READ_BYTES - len(data.lstrip(b"\0"))  # a hole: no line, and no part of the line behind it
        if end == 0 and len(data) == READ_BYTES < self._max_line_bytes:
            data = os.pread(self._descriptor, self._max_line_bytes, self.offset)
            end = data.find(b"\n") + 1
        if end == 0:
            if len(data) >= max(READ_BYTES, self._max_line_bytes):
                return self._skip_long_line(is_final=is_final)
            if not data or not is_final:
                return None
            end = len(data)
        return self._advance(data if end == len(data) else data[:end], self.offset + end)

    def _find_framing(self, *, is_final: bool) -> bool:
        """Look at the head of the input; False as long as that does not tell how records lie in it."""
        head = os.pread(self._descriptor, READ_BYTES, 0)
        framing = self._form.framing_of(head, is_whole=is_final or len(head) == READ_BYTES)
        if framing is None:
            return False
        self.stream.framing = framing
        return True

    def _read_framed(self, *, is_final: bool) -> Chunk | None:
        for length in (READ_BYTES, READ_BYTES + self._max_record_bytes):
            data = os.pread(self._descriptor, length, self.offset)
            end = self.stream.framing.cut(data, is_final=is_final and len(data) < length)
            if end:
                return self._advance(data[:end], self.offset + end)
            if len(data) < length:
                return None
        raise SourceError(
            f"{self.path}: no record of the format {self.stream.framing.format} ends within input.max_record_bytes, "
            f"which is {self._max_record_bytes}, from byte {self.offset} on; is input.format right?"
        )

    def _skip_long_line(self, *, is_final: bool) -> Chunk | None:
        """Find the end of a line that is longer than a read, a block at a time; its bytes are not kept."""
        at = max(self._scanned, self.offset)
        while data := os.pread(self._descriptor, READ_BYTES, at):
            newline = data.find(b"\n")
            if newline >= 0:
                return self._advance(b"", at + newline + 1)
            at += len(data)
        if is_final:
            return self._advance(b"", at)
        self._scanned = at
        self._tail = self._last_bytes_seen()
        return None

    def _advance(self, data: bytes, end_offset: int) -> Chunk:
        chunk = Chunk(
            stream=self.stream,
            start_offset=self.offset,
            end_offset=end_offset,
            data=data,
            is_oversized=not data,
        )
        if self.stream.head_bytes < HEAD_BYTES:
            head = os.pread(self._descriptor, min(HEAD_BYTES, end_offset), 0)
            self.stream.head_bytes = len(head)
            self.stream.head_digest = digest(head)
        self.offset = self.stream.read_offset = end_offset
        self._scanned = 0
        self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else self._last_bytes_seen()
        return chunk
