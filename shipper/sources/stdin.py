"""Moves standard input (a pipe, a terminal, a socket or a file) into the segments of the spool."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import termios
from array import array
from contextlib import suppress
from typing import Final

import anyio
import structlog

from shipper.model.errors import SourceError, StateError
from shipper.model.framing import CR_LINES, CUT_MARK, LINES, OTHER_HEADER, CsvRows, ElementScan, Framing
from shipper.sources.content import compression_of, is_partial_magic, refuse_other_kinds
from shipper.sources.disk import NoSpaceError
from shipper.sources.reader import READ_BYTES, InputForm
from shipper.sources.segments import Segments

log = structlog.get_logger("sources")

_MOVE_BYTES_MAX: Final = 1 << 20
_PIPE_BYTES: Final = 1 << 20
_OPEN_ROW_BYTES: Final = 8_192
_BLANKS: Final = b" \t\r\0"
_MARK_BYTES: Final = 64
_LINE_WAIT_MS: Final = 1_000
_SNIFFED_SHARE: Final = 64  # maximum bytes sniffed for the format, per pending byte


class Input:
    """
    An input that fills a spool.

    Attributes:
        has_ended: Nothing is left to move.
        is_broken: It ended with a read error.
    """

    has_ended = False
    is_broken = False

    async def wait(self) -> None:
        """Wait until there is data to move, or the end."""

    def move(self, segments: Segments) -> None:
        """
        Append the available data. Called in a worker thread; must not wait for more.

        Raises:
            NoSpaceError: The disk has no space; nothing was read.
            OSError: From `Segments.append`.
        """

    def note_stored(self) -> None:
        """Note that all moved data is in the segments, synced to disk if so configured."""

    def finish(self, segments: Segments) -> None:
        """Stop: append what would otherwise be lost, if there is space. Called in a worker thread."""

    def note_finished(self) -> None:
        """Note that `finish` has returned or timed out."""


class StandardInput(Input):
    """Reads a descriptor into the spool."""

    def __init__(self, descriptor: int, form: InputForm, *, max_record_bytes: int) -> None:
        self._descriptor = descriptor
        self._framer = SpoolFramer(form, max_record_bytes=max_record_bytes)
        self._can_wait = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        if self._can_wait:
            _widen_pipe(descriptor)

    async def wait(self) -> None:
        if self._can_wait:
            try:
                await anyio.wait_readable(self._descriptor)
            except PermissionError:  # a device that cannot be polled, such as /dev/null
                self._can_wait = False

    def move(self, segments: Segments) -> None:
        readable = select.poll()
        if self._can_wait:
            readable.register(self._descriptor, select.POLLIN)
        moved = 0
        while moved < _MOVE_BYTES_MAX and (not self._can_wait or readable.poll(0)):  # never block in a read
            length = segments.read_bytes()
            segments.reserve(length + self._framer.extra_bytes)
            data = self._read(length)
            self._append(data, segments)
            if not data:
                self.has_ended = True
                return
            moved += len(data)

    def _append(self, data: bytes, segments: Segments) -> None:
        """Append data that was read; b"" ends the last record."""
        framed = self._framer.take(data, is_final=not data)
        segments.header, segments.delimiter = self._framer.header, self._framer.delimiter
        segments.append(framed, open_bytes=self._framer.open_bytes)

    def _read(self, length: int) -> bytes:
        try:
            return os.read(self._descriptor, length)
        except OSError as error:
            log.error("source_unreadable", path="standard input", error=error.strerror)
            self.is_broken = True
            return b""

    def finish(self, segments: Segments) -> None:
        """Append the rest, including what the pipe holds and a torn record: it cannot be read again."""
        try:
            with suppress(NoSpaceError):
                self._move_rest(segments)
            self._append(b"", segments)
        except OSError as error:
            if not segments.unwritten or segments.has_sync_failed:
                raise
            # The disk has failed, or the file system cannot reserve space.
            raise StateError(
                f"the last {len(segments.unwritten):,} bytes read from standard input are lost: the spool cannot be "
                f"written ({error.strerror}). Everything before them is in the spool"
            ) from error

    def _move_rest(self, segments: Segments) -> None:
        """Append what the pipe holds and then, if it follows within a second, the rest of the last line."""
        unread = _unread_bytes(self._descriptor) if self._can_wait else 0
        readable = select.poll()
        readable.register(self._descriptor, select.POLLIN)
        wait_ms = _LINE_WAIT_MS
        while not (self.has_ended or segments.unwritten or segments.has_sync_failed):
            if unread <= 0 and not self._framer.is_line_open:
                break
            if self._can_wait and not readable.poll(0):
                if unread > 0 or not readable.poll(wait_ms):
                    break
                wait_ms = 0
            length = max(1, min(unread, segments.read_bytes()))  # not beyond the line: the next process reads the rest
            segments.reserve(length + self._framer.extra_bytes)
            data = self._read(length)
            self._append(data, segments)
            self.has_ended = not data
            unread -= len(data)


def _unread_bytes(descriptor: int) -> int:
    """Return how many bytes can be read at once from a pipe, socket or terminal."""
    unread = array("i", [0])
    with suppress(OSError):
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
    return unread[0]


def _widen_pipe(descriptor: int) -> None:
    """Enlarge a pipe, if possible, for fewer context switches."""
    with suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


class SpoolFramer:
    """
    Frames bytes as they arrive in arbitrary pieces, so that each segment can be read on its own.

    Lines and rows of CSV are unchanged, even torn ones. Complete elements of arrays become lines.

    Attributes:
        header: The CSV header that begins each segment, with a newline; empty for other formats.
        delimiter: The delimiter of CSV.
    """

    def __init__(self, form: InputForm, *, max_record_bytes: int) -> None:
        self._form = form
        self._max_record_bytes = max_record_bytes
        self._framing: Framing | None = None
        self._pending = bytearray()  # not returned yet: too few bytes to detect the format, or part of an element
        self._sniffed_pending = self._sniffed = 0  # pending bytes at the last sniff, and the sum of all sniffs
        self._elements = ElementScan()
        self._open_row = bytearray()  # already returned
        self._open_row_searched = 0  # its length at the last search for its end
        self._open_line_bytes = 0
        self._is_line_cut = False
        self._is_other_header = False  # reached
        self.header = b""
        self.delimiter = ""

    @property
    def extra_bytes(self) -> int:
        """How many bytes `take` may return beyond its input: pending bytes, and a newline or a cut mark."""
        return len(self._pending) + _MARK_BYTES

    @property
    def open_bytes(self) -> int:
        """For CSV, how many of the last returned bytes may belong to an incomplete row."""
        return len(self._open_row)

    @property
    def is_line_open(self) -> bool:
        """Whether the last line has neither ended nor reached the limit."""
        return 0 < self._open_line_bytes <= self._max_record_bytes

    def take(self, data: bytes, *, is_final: bool = False) -> bytes:
        """
        Return the bytes to store, if any, after `data` has arrived.

        Args:
            is_final: The input has ended; return pending bytes, too.
        Raises:
            SourceError: The input is compressed, or an element of an array exceeds the maximum record size.
        """
        if self._framing is None:
            self._pending += data
            if not (is_final or self._is_worth_sniffing(data)):
                return b""
            data = bytes(self._pending)
            if compression := compression_of(data):
                raise SourceError(
                    f"standard input is compressed ({compression}), and shipper decompresses only files; decompress it "
                    f"first: `{compression} -dc FILE | shipper pipe`"
                )
            refuse_other_kinds(data, "standard input")
            if is_final or not is_partial_magic(data):
                self._framing = self._form.framing_of(data, is_whole=is_final or len(data) >= READ_BYTES)
            self._sniffed_pending = len(data)
            self._sniffed += len(data)
            if self._framing is None:
                return b""
            self._pending.clear()
            if isinstance(self._framing, CsvRows):
                if self._framing.is_unreadable:
                    raise SourceError(f"standard input: {CR_LINES}")
                self.header, self.delimiter = self._framing.header, self._framing.delimiter
                data = data[len(self.header) :]
        if isinstance(self._framing, CsvRows):
            return self._frame_rows(self._framing, data, is_final=is_final)
        if self._framing is LINES:
            return self._limit_line(data if self._open_line_bytes else data.lstrip(_BLANKS), is_final=is_final)
        return self._frame_elements(data, is_final=is_final)

    def _is_worth_sniffing(self, data: bytes) -> bool:
        pending_bytes = len(self._pending)
        if pending_bytes >= min(2 * self._sniffed_pending, READ_BYTES):
            return True
        # Only the end of a line or the beginning of an array can change the result; the share bounds useless attempts.
        return (b"\n" in data or b"[" in data) and self._sniffed <= _SNIFFED_SHARE * pending_bytes

    def _frame_rows(self, rows: CsvRows, data: bytes, *, is_final: bool) -> bytes:
        if self._is_other_header:
            raise SourceError(f"standard input: a line {OTHER_HEADER}")
        data = self._limit_line(data, is_final=is_final)
        # A longer line is no header; searching all of it again for each small piece would take quadratic time.
        last_line = bytes(self._open_row[-2 * len(rows.header) :]).rpartition(b"\n")[2]
        other = rows.find_other_header(last_line + data, self._form.columns)
        if other >= 0:  # first return what is before it
            self._is_other_header = True
            data = data[: max(0, other - len(last_line))]
        self._open_row += data
        # If a long row arrives in small pieces, do not search for its end after each of them.
        if is_final or not _OPEN_ROW_BYTES < len(self._open_row) < 2 * self._open_row_searched:
            del self._open_row[: rows.cut(bytes(self._open_row), is_final=is_final)]
            self._open_row_searched = len(self._open_row)
        return data

    def _frame_elements(self, data: bytes, *, is_final: bool) -> bytes:
        self._pending += data
        frames = self._elements.frames(self._pending, is_final=is_final)
        # In JSON a carriage return is equivalent to a newline: whitespace, or an error within a string.
        lines = b"".join(self._pending[frame.start : frame.end].replace(b"\n", b"\r") + b"\n" for frame in frames)
        del self._pending[: self._elements.consume()]
        if not lines and len(self._pending) > self._max_record_bytes + READ_BYTES:
            raise SourceError(
                "standard input: no record of the format batch ends within "
                f"input.max_record_bytes, which is {self._max_record_bytes}; is input.format correct?"
            )
        return lines

    def _limit_line(self, data: bytes, *, is_final: bool) -> bytes:
        """Truncate an overlong line to one byte more than the limit, so that the codec rejects it."""
        first = data.find(b"\n")
        part = len(data) if first < 0 else first
        left = max(0, self._max_record_bytes + 1 - self._open_line_bytes)
        mark = b""
        if part > left and not self._is_line_cut:
            mark, self._is_line_cut = CUT_MARK, True
        elif not self._is_line_cut:
            left = part
        self._open_line_bytes += part
        if self._is_line_cut and (first >= 0 or is_final):
            mark += b"%d" % self._open_line_bytes
            self._is_line_cut = False
        if first >= 0:
            # Leading blanks of a line, such as a hole in a file, do not count.
            self._open_line_bytes = len(data[data.rfind(b"\n") + 1 :].lstrip(_BLANKS))
        return data[:left] + mark + data[part:] if mark or left < part else data
