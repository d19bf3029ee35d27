"""One open input: cuts it into chunks of whole lines, and checks that it is still the same input."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from shipper.model.errors import SourceError
from shipper.model.framing import (
    LINES,
    WIRE_COLUMNS,
    BatchElements,
    CsvRows,
    Format,
    Framing,
    csv_rows,
    is_object,
    sniff,
)
from shipper.model.records import MARKER_BYTES, Chunk, Head, Stream, digest
from shipper.sources.content import (
    Archive,
    Content,
    UnfinishedError,
    begins_like_archive,
    compression_of,
    data_from,
    open_content,
)
from shipper.system.native import NATIVE
from shipper.system.work import step

if TYPE_CHECKING:
    from shipper.config.settings import Settings

READ_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 1024
TURN_BYTES: Final = 1 << 24  # that are searched for the end of a line, or of NULs, before it is another file's turn
_COLUMNS_MAX: Final = 1000  # of CSV
_HEADER_BYTES_MAX: Final = 1 << 16
TURN_STEPS: Final = 4096  # of decompression, 64 MiB; very many members may be empty


class InputForm(NamedTuple):
    """
    How records lie in the inputs, as far as it is known beforehand.

    Attributes:
        format: `auto` = each input tells by its first bytes.
        csv_delimiter: Empty = the header tells.
        columns: The names, folded to one case, by which the header of CSV is known.
        is_scanned: Whether lines are scanned natively as they are read, if that is possible.
    """

    format: Format | Literal["auto"] = "ndjson"
    csv_delimiter: str = ""
    columns: frozenset[str] = WIRE_COLUMNS
    is_scanned: bool = False

    def framing_of(self, head: bytes, *, is_whole: bool) -> Framing | None:
        """Return the framing of an input, by its first bytes; None while there are too few of them."""
        form: Format | None = None if self.format == "auto" else self.format
        match form or sniff(head, is_whole=is_whole, delimiter=self.csv_delimiter, columns=self.columns):
            case "ndjson":
                return LINES
            case "batch":
                return BatchElements()
            case "csv":
                return csv_rows(head, is_whole=is_whole, delimiter=self.csv_delimiter)
            case None:
                return None


NDJSON: Final = InputForm()


def input_form(settings: Settings) -> InputForm:
    """Take from the settings what is known of the inputs; a header may also name what `records.mapping` reads."""
    paths = (path for source in settings.records.field_sources.values() for path in source.paths)
    columns = WIRE_COLUMNS.union(path.casefold() for path in paths)
    return InputForm(
        settings.input.format,
        settings.input.csv_delimiter,
        columns,
        is_scanned=NATIVE is not None and settings.records.passes_wire_form,
    )


Likeness = Literal["same", "shorter", "other"]


def likeness(content: Content, known: Stream) -> Likeness:
    """
    Compare what a file holds with what is known of a stream.

    Device and inode are reused, files are truncated in place, copied and compressed; so the bytes have to agree: the
    head that was seen, and the last bytes before the checkpoint.

    Returns:
        `shorter` = the head agrees, and the checkpoint lies behind the end, as in a copy that is being made.
    """
    if not begins_alike(content, known):
        return "other"
    checkpoint, length, marker_digest = known.marker  # which the event loop may replace meanwhile
    marker = content.pread(length, checkpoint - length)
    read_end = max(checkpoint, known.read_offset)
    if read_end and not content.pread(1, read_end - 1):
        return "shorter"
    return "same" if not marker or digest(marker) == marker_digest else "other"


def first_bytes(content: Content, length: int) -> bytes:
    """Read the first bytes; none if an archive has them behind very many members in which there is nothing."""
    left, content.steps_left = content.steps_left, TURN_STEPS
    try:
        return content.pread(length, 0)
    except UnfinishedError:
        return b""
    finally:
        content.steps_left = left


def begins_alike(content: Content, known: Stream) -> bool:
    """Return whether a file begins as a stream does, as far as that was seen; it may still be another one."""
    head = content.pread(known.head.length, 0)
    return len(head) == known.head.length and (not head or digest(head) == known.head.digest)


class StreamReader:
    """
    Reads one stream forward from its checkpoint. All calls block.

    NULs that reach the end of a file are no content: its writer has reserved the room and fills it later. NULs in
    front of data are a hole, which is read over.

    Args:
        content: Owned and closed by the reader.
        path: Where the input is; for people.
        form: How its records lie in it.
        framing: What `form` said of its first bytes, if it was asked already.
        max_record_bytes: The longest line that has to be read as a whole; of a longer one only the end is looked for.

    Attributes:
        is_unfinished: The last read has ended with its turn; there may be more.
    """

    def __init__(
        self,
        content: Content,
        stream: Stream,
        path: Path,
        *,
        max_record_bytes: int,
        form: InputForm = NDJSON,
        framing: Framing | None = None,
    ) -> None:
        self.content = content
        self._form = form
        self._is_framed = framing is not None
        if framing is not None:
            stream.framing = framing
        self._max_record_bytes = max_record_bytes
        self._max_line_bytes = max_record_bytes + 1
        self._reserved_from: int | None = None  # where NULs begin that reach the end, as of the last read
        self._nuls = (-1, 0, 0)  # the read that found them, and where there was nothing else
        self._data_at = 0  # where there is something else
        self._scanned = 0  # how far a line that is too long has been searched for its end
        self._searched = (-1, 0, 0)  # as `_nuls`, of a search whose turn has ended before it
        self._turn_bytes = math.inf
        self._length = READ_BYTES
        self.is_unfinished = False
        self.stream = stream
        self.path = path
        self.offset = max(stream.checkpoint, stream.read_offset)
        self._tail = self._last_bytes_seen()

    def __repr__(self) -> str:
        return f"<StreamReader {self.path} at {self.offset}>"

    def close(self) -> None:
        self.content.close()

    def _last_bytes_seen(self) -> bytes:
        """Read what stands before the offset, or before the place up to which the end of a line was looked for."""
        end = max(self.offset, self._scanned)
        length = min(MARKER_BYTES, end)
        return self.content.pread(length, end - length)

    def is_intact(self) -> bool:
        """Return whether what was read is still there; if not, the file was truncated, and may have grown again."""
        if self.content.compression:
            return self.content.is_intact()
        if self.content.size() < max(self.offset, self._scanned):
            return False
        head = self.content.pread(self.stream.head.length, 0)
        return self._last_bytes_seen() == self._tail and (not head or digest(head) == self.stream.head.digest)

    def note_size(self, status: os.stat_result, wall_time: float) -> None:
        """Remember how much there is to read at that moment; of an archive, nobody knows."""
        if not self.content.compression:
            self.stream.size = status.st_size
            self.stream.note_end(status.st_size, wall_time)

    def note_end(self, status: os.stat_result, wall_time: float) -> None:
        """Remember that the end was reached, and what the file looked like before; a torn line is no record yet."""
        end = self.content.size() if self._reserved_from is None else self._reserved_from
        is_whole = self.offset >= end and self.content.is_ended()
        if is_whole or not self.content.compression:  # behind what an archive has given so far there may be more
            self.stream.size = self.offset
            self.stream.note_end(self.offset, wall_time)
        if is_whole:
            self.stream.ended_size, self.stream.ended_ns = status.st_size, status.st_mtime_ns

    def skip_to_end(self) -> bytes:
        """
        Go to behind the last whole line, and take that for the checkpoint.

        Returns:
            The last bytes before it.
        """
        end = self.content.size()
        while data := self.content.pread(READ_BYTES, end):
            step()
            end += len(data)
        while end and not self.content.compression:
            start = max(0, end - READ_BYTES)
            step()
            data = self.content.pread(end - start, start).rstrip(b"\0")
            end = start + len(data)
            if data:
                break
        start = max(0, end - self._max_line_bytes)
        newline = self.content.pread(end - start, start).rfind(b"\n")
        self.offset = start + newline + 1 if newline >= 0 or start == 0 else end
        self._tail = self._last_bytes_seen()
        self.note_head()
        self.stream.size = self.stream.read_offset = self.offset
        self.stream.move_checkpoint(self.offset, self._tail)
        return self._tail

    def read(
        self, *, is_final: bool, is_quiet: bool = False, turn_steps: float = math.inf, length: int = READ_BYTES
    ) -> Chunk | None:
        """
        Read the next whole lines.

        The bytes of a torn last line are read again next time: so there is no state to carry, and the offset is
        always the start of a line.

        Args:
            is_final: Nothing will be appended any more, so that the end of the input ends the last line; but not that
                of an archive that is cut short.
            is_quiet: Nothing was appended to an archive for long. The end of a member may be that of a flush, in the
                middle of a line; so it ends the last line only if that is a whole object.
            turn_steps: Take so many steps of decompression at most, and search no more than a few MiB; if there is no
                chunk then, see `is_unfinished`. Infinite = go on until there is one.
            length: Bytes to read, at most 1 MiB.
        Returns:
            At most `length`, or one line that is longer; None if there is no whole line yet.
        Raises:
            SourceError: The input has another format, a record that is no line is too long, or an archive is broken or
                ends too early.
        """
        self.is_unfinished = False
        self._turn_bytes = TURN_BYTES if turn_steps < math.inf else math.inf
        self._length = length
        self.content.steps_left = turn_steps
        try:
            return self._read_whole(is_final=is_final, is_quiet=is_quiet)
        except UnfinishedError:
            self.is_unfinished = True
            return None
        finally:
            self.content.steps_left = math.inf

    def _read_whole(self, *, is_final: bool, is_quiet: bool) -> Chunk | None:
        chunk = self._read(is_final=is_final or (is_quiet and self._ends_with_object()))
        if chunk is None and not self.content.is_ended():
            self.content.pread(1, self.content.size())  # raises if it is broken there
            if is_final or is_quiet:
                raise SourceError(
                    f"{self.path}: the {self.content.compression} archive is cut short; its whole records up to there "
                    "are read. Put the whole file in its place and start again"
                )
        return chunk

    def _ends_with_object(self) -> bool:
        if self._scanned:
            return False  # it is longer than that; and an archive would be read from its beginning again
        data = self.content.pread(READ_BYTES, self.offset)
        is_end = len(data) < READ_BYTES and self.content.is_ended()
        return is_end and is_object(data[data.rfind(b"\n") + 1 :])

    def _pread(self, length: int, offset: int) -> bytes:
        """Read, but none of the NULs that reach the end of a file."""
        data = self.content.pread(length, offset)
        self._reserved_from = None
        if data.endswith(b"\0") and self.stream.kind == "file" and not self.content.compression:
            nuls_from = offset + len(data.rstrip(b"\0"))
            if not self._has_data_behind(offset, nuls_from, offset + len(data)):
                self._reserved_from = nuls_from
                return data[: nuls_from - offset]
        return data

    def _has_data_behind(self, offset: int, nuls_from: int, nuls_end: int) -> bool:
        """
        Return whether anything but NULs follows.

        A file may end with gigabytes of them. While it is filled in order, those behind are not looked at again; they
        are if a read gives the same as the one before, as then something else may have been written.
        """
        if nuls_end <= self._data_at:
            return True
        seen_offset, seen_from, seen_end = self._nuls
        at = nuls_end
        if seen_from <= nuls_from <= seen_end and (offset, nuls_from) != (seen_offset, seen_from):
            at = max(at, seen_end)
        if (offset, nuls_from) == self._searched[:2]:
            at = max(at, self._searched[2])
        while data := self.content.pread(READ_BYTES, at := data_from(self.content.descriptor, at)):
            nuls = len(data) - len(data.lstrip(b"\0"))
            at += nuls
            if nuls < len(data):
                self._data_at = at
                return True
            self._searched = offset, nuls_from, at
            self._note_searched(len(data))
        self._nuls, self._searched = (offset, nuls_from, at), (-1, 0, 0)
        return False

    def _note_searched(self, length: int) -> None:
        step()
        self._turn_bytes -= length
        if self._turn_bytes <= 0:
            raise UnfinishedError

    def _read(self, *, is_final: bool) -> Chunk | None:
        if not self._is_framed:
            self._is_framed = self._find_framing(is_final=is_final)
            if not self._is_framed:
                return None
        self._refuse_header()
        if self.stream.framing is not LINES:
            return self._read_framed(is_final=is_final)
        if self._scanned:
            return self._skip_long_line(is_final=is_final)
        length = self._length
        data = self._pread(length, self.offset)
        if len(data) == length and not data.strip(b"\0") and self._skip_hole():
            data = self._pread(length, self.offset)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == length and data.startswith(b"\0"):
            end = length - len(data.lstrip(b"\0"))  # a hole: no line, and no part of the line behind it
        if end == 0 and len(data) == length < self._max_line_bytes:
            data = self._pread(self._max_line_bytes, self.offset)
            end = data.find(b"\n") + 1
        if end == 0:
            if len(data) >= max(length, self._max_line_bytes):
                return self._skip_long_line(is_final=is_final)
            if not data or not is_final or not self.content.is_ended():
                return None
            end = len(data)
        return self._advance(data if end == len(data) else data[:end], self.offset + end)

    def _skip_hole(self) -> bool:
        """Go to the end of a hole, which is as long as a log was that another program has truncated."""
        end = self.offset if self.content.compression else data_from(self.content.descriptor, self.offset)
        if end <= self.offset:
            return False
        self.offset = self.stream.read_offset = end
        self._tail = self._last_bytes_seen()
        return True

    def _find_framing(self, *, is_final: bool) -> bool:
        """Look at the head of the input; False as long as that does not tell how records lie in it."""
        head = self._pread(READ_BYTES, 0)
        if not head or (begins_like_archive(head) and not is_final):
            return False
        if not self.content.compression and compression_of(head):  # it was too short to tell when it was opened
            self.content = open_content(self.content.descriptor, self.path, self.content.wide_window)
            head = self._pread(READ_BYTES, 0)
        framing = self._form.framing_of(head, is_whole=is_final or len(head) == READ_BYTES)
        if framing is None:
            return False
        self.stream.framing = framing
        return True

    def _refuse_header(self) -> None:
        """
        Refuse a file whose header takes much memory as long as it is known, or names a column twice.

        What came through a pipe is kept; nobody could mend it.
        """
        framing = self.stream.framing
        if not isinstance(framing, CsvRows) or self.stream.kind != "file":
            return
        columns, length = len(framing.names), len(framing.header)
        if columns > _COLUMNS_MAX or length > _HEADER_BYTES_MAX:
            self.stream.framing, self._is_framed = LINES, False  # so that it is not kept
            raise SourceError(
                f"{self.path}: the header has {columns:,} columns in {length:,} bytes; there may be {_COLUMNS_MAX:,} "
                f"in {_HEADER_BYTES_MAX:,}. Is input.format right? If so, leave columns out that are not needed"
            )
        if framing.repeated:
            first, second = framing.repeated
            name = framing.names[first - 1]
            shown = f" ({name})" if name.casefold() in self._form.columns else ""  # others may be values
            raise SourceError(
                f"{self.path}: the columns {first} and {second} of the header have the same name{shown}; "
                "rename or remove one of them"
            )

    def _read_framed(self, *, is_final: bool) -> Chunk | None:
        for length in (self._length, READ_BYTES + self._max_record_bytes):
            data = self._pread(length, self.offset)
            is_whole = is_final and len(data) < length and self.content.is_ended()
            end = self.stream.framing.cut(data, is_final=is_whole)
            if not end and len(data) == length:
                end = len(data) - len(data.lstrip(b"\0"))  # a hole
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
        while data := self._pread(READ_BYTES, at):
            newline = data.find(b"\n")
            if newline >= 0:
                return self._advance(b"", at + newline + 1)
            at = self._scanned = at + len(data)
            self._tail = self._last_bytes_seen()
            self._note_searched(len(data))
        if is_final and self.content.is_ended():
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
            scan=NATIVE.scan(data) if self._form.is_scanned and self.stream.framing is LINES else None,
        )
        self.offset = self.stream.read_offset = end_offset
        self.note_head()
        self._scanned = 0
        self._tail = data[-MARKER_BYTES:] if len(data) >= MARKER_BYTES else self._last_bytes_seen()
        if isinstance(self.content, Archive):
            self.content.release(end_offset)
        return chunk

    def note_head(self) -> None:
        """Remember how it begins, as far as it was read or ends with a line: a copy may be made before it is read."""
        if self.stream.head.length < HEAD_BYTES:
            head = first_bytes(self.content, HEAD_BYTES).rstrip(b"\0")  # which may still be written over
            end = len(head) if len(head) == HEAD_BYTES else max(self.offset, head.rfind(b"\n") + 1)
            self.stream.head = Head(min(len(head), end), digest(head[:end]))
