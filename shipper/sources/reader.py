"""Reads one open input: splits it into chunks of whole records, and checks that it is still the same input."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from anyio.to_thread import run_sync

from shipper.model.errors import SourceError
from shipper.model.framing import (
    CR_LINES,
    LINES,
    OTHER_HEADER,
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
    compression_of,
    is_partial_magic,
    open_content,
    refuse_other_kinds,
    seek_data,
)
from shipper.system.native import NATIVE
from shipper.system.work import step

if TYPE_CHECKING:
    from shipper.config.settings import Settings

T = TypeVar("T")

READ_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 1024
TURN_BYTES: Final = 1 << 24  # to search for the end of a line or of NULs in one turn
_COLUMNS_MAX: Final = 1000  # of CSV
_HEADER_BYTES_MAX: Final = 1 << 16
TURN_STEPS: Final = 4096  # decompression steps in one turn, 64 MiB; limits very many empty members
_LIMIT_S: Final = 5.0


class InputForm(NamedTuple):
    """The configured format of the inputs."""

    format: Format | Literal["auto"] = "ndjson"  # auto: detected from the first bytes of each input
    csv_delimiter: str = ""  # empty: detected from the header
    columns: frozenset[str] = WIRE_COLUMNS  # known columns in lower case, by which a CSV header is recognised
    is_scanned: bool = False  # whether lines are scanned natively as they are read

    def framing_of(self, head: bytes, *, is_whole: bool) -> Framing | None:
        """Return the framing of an input by its first bytes; None if there are too few of them."""
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
    """Return the configured input format; its columns include those that `records.mapping` reads."""
    paths = (path for source in settings.records.field_sources.values() for path in source.paths)
    columns = WIRE_COLUMNS.union(path.casefold() for path in paths)
    return InputForm(
        settings.input.format,
        settings.input.csv_delimiter,
        columns,
        is_scanned=NATIVE is not None and settings.records.passes_wire_form,
    )


Likeness = Literal["same", "shorter", "other"]


def compare(content: Content, known: Stream) -> Likeness:
    """
    Compare a file with a stream.

    Inodes are reused, and files are truncated in place, copied and compressed, so the bytes are compared: the known
    head, and the last bytes before the checkpoint.

    Returns:
        `shorter` if the head matches but the file ends before the checkpoint, as does a copy in progress.
    """
    if not begins_alike(content, known):
        return "other"
    checkpoint, length, marker_digest = known.marker  # read once, because the event loop may replace it
    marker = content.pread(length, checkpoint - length)
    read_end = max(checkpoint, known.read_offset)
    if read_end and not content.pread(1, read_end - 1):
        return "shorter"
    return "same" if not marker or digest(marker) == marker_digest else "other"


def first_bytes(content: Content, length: int) -> bytes:
    """Read the first bytes; return b"" if an archive has very many empty members before them."""
    left, content.steps_left = content.steps_left, TURN_STEPS
    try:
        return content.pread(length, 0)
    except UnfinishedError:
        return b""
    finally:
        content.steps_left = left


def begins_alike(content: Content, known: Stream) -> bool:
    """Return whether a file begins with the head of a stream; it may still be a different one."""
    head = content.pread(known.head.length, 0)
    return len(head) == known.head.length and (not head or digest(head) == known.head.digest)


class _NulRun(NamedTuple):
    """NULs found after the data read at an offset; if `is_complete`, they extend to the end of the file."""

    offset: int
    start: int
    end: int
    is_complete: bool


class StreamReader:
    """
    Reads one stream forward from its checkpoint. All calls block.

    NULs at the end of a file are not content: its writer has reserved the space and fills it later. NULs before data
    are a hole, which is skipped.

    Args:
        content: Closed with the reader.
        framing: The framing according to `form`, if already known.
        max_record_bytes: Maximum length of a line that is read; for a longer line only its end is searched.

    Attributes:
        is_unfinished: The last read reached its limit of steps; there may be more.
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
        self._framing = framing
        self._is_framed = False
        self._max_record_bytes = max_record_bytes
        self._max_line_bytes = max_record_bytes + 1
        self._reserved_from: int | None = None  # start of the trailing NULs, as of the last read
        self._nul_run = _NulRun(-1, 0, 0, is_complete=True)
        self._data_seen_at = 0  # an offset of data after NULs
        self._scanned = 0  # how far an overlong line was searched for its end
        self._open_bytes = 0  # complete lines after the offset, within a record that has not ended
        self._foot_bytes = 0  # after the offset, without a record, such as the end of an array
        self._turn_bytes = math.inf
        self._length = READ_BYTES
        self.is_unfinished = False
        self.stream = stream
        self.path = path
        self.offset = max(stream.checkpoint, stream.read_offset)
        self._tail = self._last_bytes_seen()

    def close(self) -> None:
        self.content.close()

    def _last_bytes_seen(self) -> bytes:
        """Read the bytes before the offset, or before the place where the search for the end of a line stopped."""
        end = max(self.offset, self._scanned)
        length = min(MARKER_BYTES, end)
        return self.content.pread(length, end - length)

    def is_intact(self) -> bool:
        """Return whether the bytes read are unchanged; if not, the file was truncated, and may have grown again."""
        if isinstance(self.content, Archive):
            return self.content.is_intact()
        if self.content.size() < max(self.offset, self._scanned):
            return False
        head = self.content.pread(self.stream.head.length, 0)
        return self._last_bytes_seen() == self._tail and (not head or digest(head) == self.stream.head.digest)

    def note_size(self, status: os.stat_result, wall_time: float) -> None:
        """Record the current size, which is unknown for an archive."""
        if not self.content.compression:
            self.stream.size = status.st_size
            self.stream.note_end(status.st_size, wall_time)

    def note_end(self, status: os.stat_result, wall_time: float) -> None:
        """Record that the end was reached, with the file's status before the read; a torn line may remain."""
        end = self.content.size() if self._reserved_from is None else self._reserved_from
        is_whole = self.offset + self._foot_bytes >= end and self.content.is_ended()
        if is_whole or not self.content.compression:  # an incomplete archive may contain more
            self.stream.size = self.offset + self._open_bytes
            self.stream.note_end(self.stream.size, wall_time)
        if is_whole:
            self.stream.ended_size, self.stream.ended_ns = status.st_size, status.st_mtime_ns

    def skip_to_end(self) -> bytes:
        """Set the checkpoint to the end of the last complete line, and return the last bytes before it."""
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
        Read the next complete records.

        A torn last line is read again next time, so no partial data is kept, and the offset is always the start of a
        line.

        Args:
            is_final: Nothing will be appended, so the end of the input ends the last line, unless it is a truncated
                archive.
            is_quiet: Nothing was appended for a while to an archive or a rotated file. A member of an archive may end
                within a line, so a last line without a newline is read only if it is a complete JSON object. Complete
                lines of CSV or batches are read even within a quoted value or an element that has not ended.
            turn_steps: Maximum decompression steps; also limits a search to a few MiB. If this returns no chunk, check
                `is_unfinished`. Infinite = continue until there is a chunk.
            length: Bytes to read, at most 1 MiB.
        Returns:
            At most `length` bytes, or one longer line; None if there is no complete line yet.
        Raises:
            SourceError: The input has another format, a record other than a line is too long, or an archive is broken
                or truncated.
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
        ends_line = is_quiet and bool(self.content.compression) and self._ends_with_object()
        chunk = self._read(is_final=is_final or ends_line, is_quiet=is_quiet)
        if chunk is None and not self.content.is_ended():
            self.content.pread(1, self.content.size())  # raises if it is broken there
            if is_final or is_quiet:
                raise SourceError(
                    f"{self.path}: the {self.content.compression} archive is truncated; the complete records in it "
                    "were read. Replace it with the complete file and start again"
                )
        return chunk

    def _ends_with_object(self) -> bool:
        if self._scanned:
            return False  # too long; reading it again would decompress from the beginning
        data = self.content.pread(READ_BYTES, self.offset)
        is_end = len(data) < READ_BYTES and self.content.is_ended()
        return is_end and is_object(data[data.rfind(b"\n") + 1 :])

    def _pread(self, length: int, offset: int) -> bytes:
        """Read, but without NULs at the end of a file."""
        data = self.content.pread(length, offset)
        self._reserved_from = None
        if data.endswith(b"\0") and self.stream.kind == "file" and not self.content.compression:
            nuls_start = offset + len(data.rstrip(b"\0"))
            if not self._has_data_after(offset, nuls_start, offset + len(data)):
                self._reserved_from = nuls_start
                return data[: nuls_start - offset]
        return data

    def _has_data_after(self, offset: int, nuls_start: int, nuls_end: int) -> bool:
        """
        Return whether anything but NULs follows.

        A file may end with gigabytes of NULs. They are searched once while the file is filled in order. A read with the
        same result as the previous one searches them again, as data may have been written after them.
        """
        if nuls_end <= self._data_seen_at:
            return True
        previous = self._nul_run
        is_same_read = (offset, nuls_start) == (previous.offset, previous.start)
        at = nuls_end
        if previous.start <= nuls_start <= previous.end and not (is_same_read and previous.is_complete):
            at = max(at, previous.end)
        while data := self.content.pread(READ_BYTES, at := seek_data(self.content.descriptor, at)):
            nuls = len(data) - len(data.lstrip(b"\0"))
            at += nuls
            if nuls < len(data):
                self._data_seen_at = at
                return True
            self._nul_run = _NulRun(offset, nuls_start, at, is_complete=False)
            self._count_searched(len(data))
        self._nul_run = _NulRun(offset, nuls_start, at, is_complete=True)
        return False

    def _count_searched(self, length: int) -> None:
        step()
        self._turn_bytes -= length
        if self._turn_bytes <= 0:
            raise UnfinishedError

    def _read(self, *, is_final: bool, is_quiet: bool) -> Chunk | None:
        if not self._is_framed:
            self._is_framed = self._find_framing(is_final=is_final)
            if not self._is_framed:
                return None
        if self.stream.framing is not LINES:
            return self._read_framed(is_final=is_final, is_quiet=is_quiet)
        if self._scanned:
            return self._skip_long_line(is_final=is_final)
        length = self._length
        data = self._pread(length, self.offset)
        if len(data) == length and not data.strip(b"\0") and self._skip_hole():
            data = self._pread(length, self.offset)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == length and data.startswith(b"\0"):
            end = length - len(data.lstrip(b"\0"))  # a hole is neither a line nor part of the next one
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
        """Skip a hole, which is as long as the log was before another program truncated it."""
        end = self.offset if self.content.compression else seek_data(self.content.descriptor, self.offset)
        if end <= self.offset:
            return False
        self.offset = self.stream.read_offset = end
        self._tail = self._last_bytes_seen()
        return True

    def _find_framing(self, *, is_final: bool) -> bool:
        """Detect the framing by the first bytes; return False if there are too few of them."""
        framing = self._framing
        if self.stream.kind == "file":
            refuse_other_kinds(self.content.pread(HEAD_BYTES, 0), self.path)  # the file was empty when it was opened
        if framing is None:
            head = self._pread(READ_BYTES, 0)
            may_be_archive = self.stream.kind == "file" and not self.content.compression
            if not head or (may_be_archive and is_partial_magic(head) and not is_final):
                return False
            if may_be_archive and compression_of(head):  # the file was too short when it was opened
                self.content = open_content(self.content.descriptor, self.path)
                self.stream.compression = self.content.compression
                return self._find_framing(is_final=is_final)
            framing = self._form.framing_of(head, is_whole=is_final or len(head) == READ_BYTES)
        if framing is None:
            return False
        if isinstance(framing, CsvRows) and self.stream.kind == "file":  # input from a pipe could not be corrected
            self._check_header(framing)
        self.stream.framing = framing
        return True

    def _check_header(self, rows: CsvRows) -> None:
        """Raise for a header that is too large to keep in memory, is not CSV, or repeats a column."""
        columns, length = len(rows.names), len(rows.header)
        if columns > _COLUMNS_MAX or length > _HEADER_BYTES_MAX:
            raise SourceError(
                f"{self.path}: the header has {columns:,} columns in {length:,} bytes; there may be {_COLUMNS_MAX:,} "
                f"in {_HEADER_BYTES_MAX:,}. Is input.format right? If so, remove columns that are not needed"
            )
        if rows.is_unreadable:
            raise SourceError(f"{self.path}: {CR_LINES}")
        if rows.repeated:
            first, second = rows.repeated
            name = rows.names[first - 1]
            # Other names may be values of records.
            shown = f" ({name})" if name.casefold() in self._form.columns else ""
            raise SourceError(
                f"{self.path}: the columns {first} and {second} of the header have the same name{shown}; "
                "rename or remove one of them"
            )

    def _read_framed(self, *, is_final: bool, is_quiet: bool) -> Chunk | None:
        for length in (self._length, READ_BYTES + self._max_record_bytes):
            data = self._pread(length, self.offset)
            is_whole = is_final and len(data) < length and self.content.is_ended()
            end = self.stream.framing.cut(data, is_final=is_whole)
            if not end and len(data) == length:
                end = len(data) - len(data.lstrip(b"\0"))  # a hole
            if end:
                end = self._end_before_other_header(data[:end])
                return self._advance(data[:end], self.offset + end)
            if len(data) < length:
                lines = data[: data.rfind(b"\n") + 1]
                if next(self.stream.framing.frames(lines, 0), None) is None:
                    has_record = next(self.stream.framing.frames(data, 0), None) is not None
                    self._foot_bytes = 0 if has_record else len(data)
                    return None
                if is_quiet and self.content.is_ended():
                    return self._advance(lines, self.offset + len(lines))
                self._open_bytes = len(lines)
                return None
        raise SourceError(
            f"{self.path}: no record of the format {self.stream.framing.format} ends within input.max_record_bytes, "
            f"which is {self._max_record_bytes}, from byte {self.offset} on; is input.format correct?"
        )

    def _end_before_other_header(self, data: bytes) -> int:
        """Return how many bytes belong to the header of the file; raise if they begin with another header."""
        rows = self.stream.framing
        if not isinstance(rows, CsvRows) or self.stream.kind != "file":  # the spool was checked when it was written
            return len(data)
        end = rows.find_other_header(data, self._form.columns)
        if end == 0:
            raise SourceError(f"{self.path}: the line at byte {self.offset} {OTHER_HEADER}")
        return end if end > 0 else len(data)

    def _skip_long_line(self, *, is_final: bool) -> Chunk | None:
        """Search block by block for the end of an overlong line; its bytes are not kept."""
        at = max(self._scanned, self.offset)
        while data := self._pread(READ_BYTES, at):
            newline = data.find(b"\n")
            if newline >= 0:
                return self._advance(b"", at + newline + 1)
            at = self._scanned = at + len(data)
            self._tail = self._last_bytes_seen()
            self._count_searched(len(data))
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
        self._scanned = self._open_bytes = self._foot_bytes = 0
        self._tail = data[-MARKER_BYTES:] if len(data) >= MARKER_BYTES else self._last_bytes_seen()
        if isinstance(self.content, Archive):
            self.content.release(end_offset)
        return chunk

    def note_head(self) -> None:
        """Record the first bytes that were read or are complete lines: a file may be copied before it is read."""
        if self.stream.head.length < HEAD_BYTES:
            head = first_bytes(self.content, HEAD_BYTES).rstrip(b"\0")  # which may still be overwritten
            end = len(head) if len(head) == HEAD_BYTES else max(self.offset, head.rfind(b"\n") + 1)
            self.stream.head = Head(min(len(head), end), digest(head[:end]))


class Turns:
    """Makes one call at a time in a thread; a cancelled call is abandoned, as a read may never return."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        return await run_sync(self._call, function, arguments, abandon_on_cancel=True)

    def _call(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        with self._lock:
            return function(*arguments)

    def end(self) -> bool:
        """Wait up to 5 s for an abandoned call, and return whether it has ended; if not, its objects are in use."""
        return self._lock.acquire(timeout=_LIMIT_S)
