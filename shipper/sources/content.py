"""The bytes of an open file, decompressed if need be, read by offset. All calls block."""

from __future__ import annotations

import errno
import math
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, cast

from shipper.model.errors import SourceError
from shipper.system.work import step

Compression = Literal["", "gzip", "zstd", "bzip2", "xz"]

_HEAD_BYTES: Final = 1024  # kept of the content for good, and of the raw bytes for telling whether they were replaced
_KEPT_BYTES: Final = 1024  # kept before the offset that was asked for last: a reader looks at the last bytes it saw
_STEP_BYTES: Final = 1 << 20  # decompressed at a time, whatever the archive says
_READ_BYTES_MIN: Final = 1 << 12  # the first read of a member: a log may be flushed as very many small members
_READ_BYTES_MAX: Final = 1 << 18
_COST_BYTES: Final = 1 << 14  # decompressed at the cost of one step more
_DEEP_BYTES: Final = 6 << 20  # of a member, from which on its window counts as wide
# 64 MiB, as `xz -9` wants. The kernel gives no page of it before that is written: it takes what was decompressed.
_WINDOW_LOG: Final = 26

_MAGICS: Final[dict[bytes, Compression]] = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([0x50 + number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(16)},  # frames to be skipped
    # "BZh9" alone may be the beginning of a text: the first block, or the end of an archive of nothing, has to follow.
    **{
        b"BZh%d" % level + bytes.fromhex(block): "bzip2"
        for level, block in product(range(1, 10), ("314159265359", "177245385090"))
    },
    b"\xfd7zXZ\0": "xz",
}


class UnfinishedError(Exception):
    """A turn has ended before its work, which goes on in the next turn."""


def begins_like_archive(head: bytes) -> bool:
    """Return whether the first bytes are too few to recognise an archive."""
    return any(magic.startswith(head) and magic != head for magic in _MAGICS)


def compression_of(head: bytes) -> Compression:
    """Return how a file is compressed, by its first bytes; empty if it is not, or if they are too few."""
    return next((compression for magic, compression in _MAGICS.items() if head.startswith(magic)), "")


def data_from(descriptor: int, offset: int) -> int:
    """Skip what the file system knows to be a hole from `offset` on; at most to the end of the file."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(descriptor).st_size if error.errno == errno.ENXIO else offset


class WideWindow:
    """The archive that is deep in a member whose window may be wide; one at a time, as each may take 64 MiB."""

    def __init__(self) -> None:
        self._holder: Callable[[], Archive | None] = lambda: None

    def take(self, archive: Archive) -> None:
        """Let an archive have it; the one before drops its decompressor, and begins again in its turn."""
        holder = self._holder()
        if holder is not archive:
            if holder is not None:
                holder.rest()
            self._holder = weakref.ref(archive)


class Content(Protocol):
    """
    What an open file holds, by offset in decompressed bytes.

    Attributes:
        compression: Empty = the file is read as it is.
        descriptor: The open file.
        steps_left: Of decompression, in this turn; infinite = as many as it takes.
        wide_window: Shared with the other archives that are open; None = it has one of its own.
    """

    compression: Compression
    descriptor: int
    steps_left: float
    wide_window: WideWindow | None

    def pread(self, length: int, offset: int) -> bytes:
        """
        Read up to `length` bytes from `offset` on; fewer only where the content ends as of now.

        Raises:
            SourceError: The archive is broken, and none of the bytes from `offset` on could be read.
            UnfinishedError: There are no more steps in this turn; the same call goes on in the next one.
        """

    def size(self) -> int:
        """Return how many bytes of content are known to exist; of an archive what was decompressed so far."""

    def status(self) -> os.stat_result:
        """Look at the open file, wherever its name points by now."""

    def is_ended(self) -> bool:
        """Return whether all was decompressed, down to the end of a member; if not, it was cut short or still grows."""

    def rest(self) -> None:
        """Free what memory can be had again when it is read on."""

    def is_intact(self) -> bool:
        """Return whether the raw bytes that were read still seem to be there."""

    def close(self) -> None: ...


class Plain:
    """
    A file that is read as it is.

    Args:
        descriptor: Open for reading; owned and closed here.
    """

    compression: Compression = ""
    steps_left = math.inf

    def __init__(self, descriptor: int, wide_window: WideWindow | None = None) -> None:
        self.descriptor = descriptor
        self.wide_window = wide_window

    def pread(self, length: int, offset: int) -> bytes:
        return os.pread(self.descriptor, length, offset)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def status(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def is_ended(self) -> bool:
        return True

    def rest(self) -> None:
        """Do nothing: there is no decompressor."""

    def is_intact(self) -> bool:
        """Leave it to the caller, who knows which bytes it has seen."""
        return True

    def close(self) -> None:
        os.close(self.descriptor)


class _Decompressor(Protocol):
    """What the four libraries have in common: reads one member."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _gzip_header_bytes(data: bytes) -> int | None:
    """Return how long the header of a gzip member is (RFC 1952, 2.3), None if `data` ends before it does."""
    flags, size = int.from_bytes(data[3:4]), 10
    if flags & 4:
        size += 2 + int.from_bytes(data[10:12], "little")
    for flag in (8, 16):  # a name and a comment, each up to a NUL
        if flags & flag:
            size = data.find(b"\0", size) + 1
            if not size:
                return None
    if flags & 2:
        size += 2
    return size if size <= len(data) else None


class _Library(NamedTuple):
    """
    What reads one compression.

    Attributes:
        open: Makes a decompressor for one member.
        error: What it raises if the bytes are not what they should be.
        header_bytes: How many bytes of a member that begins like this are not for the decompressor; None if too few
            bytes are given to tell.
    """

    open: Callable[[], _Decompressor]
    error: type[Exception]
    header_bytes: Callable[[bytes], int | None] = lambda _: 0


def _library_of(compression: Compression) -> _Library:
    """Import what reads such an archive; only now, since most inputs are plain."""
    match compression:
        case "gzip":
            from isal import igzip_lib

            # The flag has the checksum and the length behind the data verified. The header is not for isal: a whole one
            # with a checksum, or with two optional fields, is broken for isal 1.9 if it comes in two pieces.
            opened = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP_NO_HDR_VER)
            return _Library(opened, cast("type[Exception]", igzip_lib.IsalError), _gzip_header_bytes)
        case "zstd":
            if sys.version_info >= (3, 14):
                from compression import zstd
            else:
                from backports import zstd
            key = int(zstd.DecompressionParameter.window_log_max)
            return _Library(partial(zstd.ZstdDecompressor, options={key: _WINDOW_LOG}), zstd.ZstdError)
        case "bzip2":
            import bz2

            return _Library(bz2.BZ2Decompressor, OSError)
        case "xz":
            import lzma

            limit = (1 << _WINDOW_LOG) + (1 << 20)  # what xz needs beside the window counts, too
            return _Library(partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=limit), lzma.LZMAError)
        case "":
            raise AssertionError("a plain file needs no library")


class Archive:
    """
    A compressed file: one member or several, one behind the other, and perhaps growing.

    It is made for a reader that goes forward. The bytes from a little before the offset that was asked for last up to
    the end of that read are at hand, and so is the head; to go back further, all is decompressed again from the
    beginning. What lies between members is looked at where it is in the file and never carried along, so that the raw
    offset and the decompressor are all the state there is.

    Args:
        descriptor: Open for reading; owned and closed here.
        path: Where the file is; for people.
    """

    def __init__(
        self, descriptor: int, compression: Compression, path: Path, wide_window: WideWindow | None = None
    ) -> None:
        self.descriptor = descriptor
        self.wide_window = wide_window
        self._path = path
        self._size = self._end = 0
        self._library = _library_of(compression)
        self._raw_head = os.pread(descriptor, _HEAD_BYTES, 0)
        self._broken_end = -1  # of the content, once it was found to be broken; stays so when it is read again
        self._why_broken = ""
        self.compression = compression
        self.steps_left = math.inf
        self._rewind()

    def __repr__(self) -> str:
        return f"<Archive {self._path} {self.compression} at {self._end}>"

    def _rewind(self) -> None:
        self._size = self.size()
        self._drop_decompressor()
        self._head = b""
        self._window = b""
        self._start = 0  # of the window
        self._end = 0  # of the window, and of all that was decompressed
        self._broken = ""  # why nothing can be read behind the end
        self._raw_offset = 0
        self._read_bytes = _READ_BYTES_MIN
        self._member_raw_offset = self._member_offset = 0
        self._block_raw_offset = 0  # of the raw bytes that the decompressor was given last

    def pread(self, length: int, offset: int) -> bytes:
        """
        Read up to `length` bytes from `offset` on; fewer only where the content ends as of now.

        After a short read `is_ended()` tells whether that was the end of a whole archive. If not, it was cut short,
        still grows, or is broken there: then reading from `size()` on raises.

        Raises:
            SourceError: The archive is broken, and none of the bytes from `offset` on could be read.
        """
        stop = offset + length
        if stop <= len(self._head):
            return self._head[offset:stop]
        if offset < self._start:
            self._rewind()
        self._fill(offset, stop)
        data = self._window[offset - self._start : stop - self._start]
        if self._broken and length and not data:
            raise SourceError(self._broken)
        return data

    def rest(self) -> None:
        """Drop the decompressor; within a member, all is decompressed again from the beginning when its turn comes."""
        if self._decompressor is not None:
            self.forget()

    def forget(self) -> None:
        """Forget all but the head: it was looked at, and is decompressed from the beginning when its turn comes."""
        head = self._head if len(self._head) == _HEAD_BYTES else b""
        self._rewind()
        self._head = head

    def release(self, offset: int) -> None:
        """Forget what lies before an offset, but for a little: reading goes on there, after others were read."""
        if dropped := min(max(0, offset - _KEPT_BYTES - self._start), len(self._window)):
            self._window = self._window[dropped:]
            self._start += dropped

    def size(self) -> int:
        return max(self._size, self._end)

    def status(self) -> os.stat_result:
        return os.fstat(self.descriptor)

    def is_ended(self) -> bool:
        is_between_members = self._decompressor is None and not self._broken
        return is_between_members and self._raw_offset >= os.fstat(self.descriptor).st_size

    def is_intact(self) -> bool:
        """Return whether the raw bytes that were read still seem to be there."""
        if os.fstat(self.descriptor).st_size < self._raw_offset:
            return False
        return os.pread(self.descriptor, len(self._raw_head), 0) == self._raw_head

    def close(self) -> None:
        self._drop_decompressor()
        os.close(self.descriptor)

    def _drop_decompressor(self) -> None:
        self._decompressor: _Decompressor | None = None  # None between members

    def _fill(self, offset: int, stop: int) -> None:
        """Move the window to a little before `offset`, and decompress up to `stop` or as far as it goes."""
        dropped = min(max(0, offset - _KEPT_BYTES - self._start), len(self._window))
        pieces = [self._window[dropped:]]
        try:
            while self._end < stop and not self._broken:
                if self._end == self._broken_end:  # as it was when it was read before
                    self._broken = self._why_broken
                    break
                piece = self._step(min(_STEP_BYTES, stop - self._end))
                if piece is not None and self._broken_end >= 0:
                    piece = piece[: self._broken_end - self._end]
                if piece is None:
                    break
                if piece:  # or the list would grow by each of very many empty members
                    pieces.append(piece)
                    self._end += len(piece)
                if len(self._head) < _HEAD_BYTES:
                    self._head += piece[: _HEAD_BYTES - len(self._head)]
                if self._end <= offset - _KEPT_BYTES:
                    pieces.clear()
                self._note_step(len(piece))
        finally:
            self._window = b"".join(pieces)
            self._start = self._end - len(self._window)

    def _note_step(self, length: int) -> None:
        step()
        is_deep = self._decompressor is not None and self._end - self._member_offset >= _DEEP_BYTES
        if is_deep and self.wide_window is not None and self.compression in {"zstd", "xz"}:
            self.wide_window.take(self)
        self.steps_left -= 1 + length // _COST_BYTES
        if self.steps_left <= 0:
            raise UnfinishedError

    def _step(self, limit: int) -> bytes | None:
        """Decompress up to `limit` bytes; none if they need more input, None if there is no more as of now."""
        if self._decompressor is None:
            return b"" if self._find_member() else None
        data = b""
        if needs_input := self._decompressor.needs_input:
            data = os.pread(self.descriptor, self._read_bytes, self._raw_offset)
            # If the input ends with a block, bzip2 says that it needs more while output of that block waits.
            if not data and self.compression != "bzip2":
                return None
            self._block_raw_offset = self._raw_offset
            self._raw_offset += len(data)
            self._read_bytes = min(2 * self._read_bytes, _READ_BYTES_MAX)
        try:
            piece = self._decompressor.decompress(data, limit)
        except self._library.error as error:
            self._drop_decompressor()
            piece = self._salvage()
            self._break(f"{error}, about raw byte {self._block_raw_offset}", len(piece))
        else:
            if self._decompressor.eof:
                self._raw_offset -= len(self._decompressor.unused_data)
                self._drop_decompressor()
        return None if needs_input and not data and not piece else piece

    def _find_member(self) -> bool:
        """Go on to the next member, over padding of NULs; False if there is none as of now."""
        data = os.pread(self.descriptor, _READ_BYTES_MIN, self._raw_offset)
        padding = len(data) - len(data.lstrip(b"\0"))
        if padding:
            self._raw_offset += padding
            return True  # what was read behind it may be too short to tell anything
        if compression_of(data) == self.compression:
            return self._begin_member(data)
        if not any(magic.startswith(data) for magic, kind in _MAGICS.items() if kind == self.compression):
            surplus = os.fstat(self.descriptor).st_size - self._raw_offset
            self._break(f"{surplus} bytes from raw byte {self._raw_offset} on belong to no {self.compression} data")
        return False  # a magic that is not whole may still grow

    def _begin_member(self, data: bytes) -> bool:
        header_bytes = self._library.header_bytes(data)
        if header_bytes is None:
            data = os.pread(self.descriptor, _READ_BYTES_MAX, self._raw_offset)
            header_bytes = self._library.header_bytes(data)
        if header_bytes is None:
            if len(data) == _READ_BYTES_MAX:
                self._break(f"the header at raw byte {self._raw_offset} has no end")
            return False
        self._raw_offset += header_bytes
        self._decompressor = self._library.open()
        self._member_raw_offset = self._raw_offset
        self._member_offset = self._end
        self._read_bytes = _READ_BYTES_MIN
        return True

    def _break(self, reason: str, salvaged_bytes: int = 0) -> None:
        hint = "put a whole one in its place, or decompress it by hand"
        if "memory" in reason.lower():
            hint = f"no more than {1 << _WINDOW_LOG >> 20} MiB are spent on it; compress it with a smaller window"
        self._broken = (
            f"{self._path}: the {self.compression} archive is broken: {reason}; "
            f"{self._end + salvaged_bytes} bytes of content are readable before; {hint}"
        )
        if self._broken_end < 0:
            self._broken_end, self._why_broken = self._end + salvaged_bytes, self._broken

    def _salvage(self) -> bytes:
        """
        Decompress the broken member once more, for the bytes that the step that failed had decompressed and not given.

        The bytes that it was given last go in one by one, and so do those that come out: none is lost with the error.
        They may be more than that step was asked for, as libraries decompress ahead.
        """
        if self.wide_window is not None:
            self.wide_window.take(self)
        decompressor = self._library.open()
        raw_offset, offset = self._member_raw_offset, self._member_offset
        salvaged = bytearray()
        with suppress(self._library.error, OSError):
            while len(salvaged) < 2 * _STEP_BYTES and not decompressor.eof:
                data = b""
                if decompressor.needs_input:
                    length = max(1, min(self._block_raw_offset - raw_offset, _READ_BYTES_MAX))
                    data = os.pread(self.descriptor, length, raw_offset)
                    if not data:
                        break
                    raw_offset += len(data)
                known = max(0, self._end - offset)
                piece = decompressor.decompress(data, min(known, _STEP_BYTES) or 1)
                offset += len(piece)
                if not known:
                    salvaged += piece
        return bytes(salvaged)


def open_content(descriptor: int, path: Path, wide_window: WideWindow | None = None) -> Plain | Archive:
    """
    Look at the first bytes of an open file, and give what reads it.

    A file that is empty, or shorter than a magic, is plain as of now: look again as long as nothing was read.

    Args:
        descriptor: Open for reading; owned and closed by what is returned.
        path: Where the file is; for people.
        wide_window: Of all archives that are open together.
    """
    compression = compression_of(os.pread(descriptor, _HEAD_BYTES, 0))
    return Archive(descriptor, compression, path, wide_window) if compression else Plain(descriptor, wide_window)
