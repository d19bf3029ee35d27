"""Random access to the bytes of an open file, decompressed if necessary. All calls block."""

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

_HEAD_BYTES: Final = 1024  # of the content, kept permanently; and of the raw bytes, to detect that they were replaced
_LOOKBACK_BYTES: Final = 1024  # kept before the offset of the last read: a reader compares the last bytes it saw
_STEP_BYTES: Final = 1 << 20  # maximum output of one decompression call
_READ_BYTES_MIN: Final = 1 << 12  # of the first read of a member, as a flushed log may have very many small members
_READ_BYTES_MAX: Final = 1 << 18
_STEP_OUTPUT_BYTES: Final = 1 << 14  # output bytes that count as one more step
_DEEP_BYTES: Final = 6 << 20  # decompressed bytes of a member after which its window may be large
# 64 MiB, as `xz -9` needs. Pages are allocated on first write, so memory grows with the decompressed bytes.
_WINDOW_LOG: Final = 26

_MAGICS: Final[dict[bytes, Compression]] = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([0x50 + number, 0x2A, 0x4D, 0x18]): "zstd" for number in range(16)},  # skippable frames
    # "BZh9" alone may be the beginning of a text: the first block, or the end of an empty archive, must follow.
    **{
        b"BZh%d" % level + bytes.fromhex(block): "bzip2"
        for level, block in product(range(1, 10), ("314159265359", "177245385090"))
    },
    b"\xfd7zXZ\0": "xz",
}
NOT_TEXT: Final = (
    "it is not text, but an archive, a spreadsheet or the like; unpack it, or export it as CSV or JSON lines"
)
# ZIP, also of spreadsheets; older spreadsheets; 7-Zip, lz4, lzma, compress, zlib, Parquet and Avro. No text begins like
# this.
_OTHER_KINDS: Final = (
    b"PK\x03\x04",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    b"7z\xbc\xaf\x27\x1c",
    b"\x04\x22\x4d\x18",
    b"\x5d\0\0",
    b"\x1f\x9d",
    b"x\x9c",
    b"PAR1\x15",
    b"Obj\x01",
)
_TAR_AT: Final = 257  # of the format name in the header of tar, which precedes the lines of a file
_TAR: Final = (b"ustar\0", b"ustar  \0")


class UnfinishedError(Exception):
    """The limit of this call was reached, so that other files are read, too; call again to continue."""


class OtherKindError(SourceError):
    """The lines of an input contain no records."""


def is_partial_magic(head: bytes) -> bool:
    """Return whether the head of a file is the incomplete magic number of an archive."""
    return any(magic.startswith(head) and magic != head for magic in _MAGICS)


def compression_of(head: bytes) -> Compression:
    """Detect the compression by the first bytes; empty for a plain file or too few bytes."""
    return next((compression for magic, compression in _MAGICS.items() if head.startswith(magic)), "")


def refuse_other_kinds(head: bytes, source: object) -> None:
    """Raise `OtherKindError` for an input of a kind whose lines contain no records, by its first bytes."""
    if head.startswith(_OTHER_KINDS) or head.startswith(_TAR, _TAR_AT):
        raise OtherKindError(f"{source}: {NOT_TEXT}")


def seek_data(descriptor: int, offset: int) -> int:
    """Return the end of a hole at `offset`, or `offset` if there is none or the file system cannot tell."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(descriptor).st_size if error.errno == errno.ENXIO else offset


class Content:
    """
    The bytes of a plain file.

    Args:
        descriptor: Open for reading; closed by `close`.

    Attributes:
        compression: Empty for a plain file. Otherwise all offsets count decompressed bytes.
        steps_left: Decompression steps left in this turn; infinite = no limit.
        is_independent: This archive suspends no others and is not suspended for them; used to compare two archives,
            which would otherwise restart each other.
    """

    compression: Compression = ""
    steps_left = math.inf
    is_independent = False

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def pread(self, length: int, offset: int) -> bytes:
        """
        Read up to `length` bytes at `offset`; fewer only at the current end of the content.

        After a short read, `is_ended()` returns whether this is the end of a complete archive. Otherwise the archive is
        truncated, still growing, or broken there; if broken, reading at `size()` raises.

        Raises:
            SourceError: The archive is broken and no bytes at `offset` are readable.
            UnfinishedError: No steps are left in this turn.
        """
        return os.pread(self.descriptor, length, offset)

    def size(self) -> int:
        """Return the size; of an archive, the number of bytes decompressed so far."""
        return self.status().st_size

    def status(self) -> os.stat_result:
        """Return the status of the open file, even if its path now leads elsewhere."""
        return os.fstat(self.descriptor)

    def is_ended(self) -> bool:
        """Return whether everything was decompressed, up to the end of a member."""
        return True

    def suspend(self) -> None:
        """Free the decompressor; if it is within a member, the next read decompresses from the beginning again."""

    def close(self) -> None:
        with suppress(OSError):  # of a network file system that is gone; nothing was written
            os.close(self.descriptor)


class _Decompressor(Protocol):
    """The common interface of the four libraries; one decompressor reads one member."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _gzip_header_bytes(data: bytes) -> int | None:
    """Return the length of a gzip header (RFC 1952, 2.3), or None if `data` is too short."""
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
    open: Callable[[], _Decompressor]  # for one member
    error: type[Exception]  # raised for broken data
    # Returns the bytes to skip at the start of a member; None if it needs more data.
    header_bytes: Callable[[bytes], int | None] = lambda _: 0


def _library_of(compression: Compression) -> _Library:
    """Return the library of a compression; imported lazily, as most inputs are plain."""
    match compression:
        case "gzip":
            from isal import igzip_lib

            # The flag makes isal verify the trailing checksum and length. The header is skipped here: isal 1.9
            # rejects one with a checksum, or with two optional fields, if it is split between two calls.
            open_ = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP_NO_HDR_VER)
            return _Library(open_, cast("type[Exception]", igzip_lib.IsalError), _gzip_header_bytes)
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

            limit = (1 << _WINDOW_LOG) + (1 << 20)  # xz counts its other memory, too
            return _Library(partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=limit), lzma.LZMAError)
        case "":
            raise AssertionError("a plain file needs no library")


class Archive(Content):
    """
    A compressed file of one or more concatenated members, which may be growing.

    Optimised for forward reading: it keeps the head, and a window from a little before the offset of the last read to
    its end. Reading before the window decompresses everything from the beginning again. Between members, nothing is
    buffered, so the only state is the raw offset and the decompressor.
    """

    def __init__(self, descriptor: int, compression: Compression, path: Path) -> None:
        super().__init__(descriptor)
        self.compression = compression
        self._path = path
        self._library = _library_of(compression)
        self._raw_head = os.pread(descriptor, _HEAD_BYTES, 0)
        self._head = b""
        self._broken_end = -1  # of the content, where it is broken; -1 = unknown; kept when it is read again
        self._why_broken = ""
        self._size = self._end = 0
        self.forget()

    def forget(self) -> None:
        """Start over at the beginning; keep only the head and the known size."""
        self._size = self.size()
        self._decompressor: _Decompressor | None = None  # None between members
        if len(self._head) < _HEAD_BYTES:
            self._head = b""
        self._window = b""
        self._start = 0  # of the window
        self._end = 0  # of the window and of the decompressed bytes
        self._broken = ""  # why nothing can be read beyond the end
        self._raw_offset = 0
        self._read_bytes = _READ_BYTES_MIN
        self._member_raw_offset = self._member_offset = 0
        self._block_raw_offset = 0  # of the last raw bytes passed to the decompressor

    def pread(self, length: int, offset: int) -> bytes:
        stop = offset + length
        if stop <= len(self._head):
            return self._head[offset:stop]
        if offset < self._start:
            self.forget()
        self._fill(offset, stop)
        data = self._window[offset - self._start : stop - self._start]
        if self._broken and length and not data:
            raise SourceError(self._broken)
        return data

    def suspend(self) -> None:
        if self._decompressor is not None:
            self.forget()

    def release(self, offset: int) -> None:
        """Free the bytes before an offset, except the last 1024."""
        if dropped := min(max(0, offset - _LOOKBACK_BYTES - self._start), len(self._window)):
            self._window = self._window[dropped:]
            self._start += dropped

    def size(self) -> int:
        return max(self._size, self._end)

    def is_ended(self) -> bool:
        is_between_members = self._decompressor is None and not self._broken
        return is_between_members and self._raw_offset >= os.fstat(self.descriptor).st_size

    def is_intact(self) -> bool:
        """Return whether the raw bytes that were read seem unchanged."""
        if os.fstat(self.descriptor).st_size < self._raw_offset:
            return False
        return os.pread(self.descriptor, len(self._raw_head), 0) == self._raw_head

    def close(self) -> None:
        self._decompressor = None
        super().close()

    def _fill(self, offset: int, stop: int) -> None:
        """Move the window to a little before `offset`, and decompress up to `stop` or the end."""
        self.release(offset)
        pieces = [self._window]
        try:
            while self._end < stop and not self._broken:
                if self._end == self._broken_end:  # the same place as in an earlier pass
                    self._broken = self._why_broken
                    break
                piece = self._step(min(_STEP_BYTES, stop - self._end))
                if piece is None:
                    break
                if self._broken_end >= 0:
                    piece = piece[: self._broken_end - self._end]
                if piece:  # do not collect the empty pieces of very many empty members
                    pieces.append(piece)
                    self._end += len(piece)
                if len(self._head) < _HEAD_BYTES:
                    self._head += piece[: _HEAD_BYTES - len(self._head)]
                if self._end <= offset - _LOOKBACK_BYTES:
                    pieces.clear()
                self._count_step(len(piece))
        finally:
            self._window = b"".join(pieces)
            self._start = self._end - len(self._window)

    def _suspend_others(self) -> None:
        """Become the only archive deep in a member: suspend the previous one."""
        if not self.is_independent and self not in _deep_archives:
            for other in list(_deep_archives):
                other.suspend()
            _deep_archives.clear()
            _deep_archives.add(self)

    def _count_step(self, length: int) -> None:
        step()
        is_deep = self._decompressor is not None and self._end - self._member_offset >= _DEEP_BYTES
        if is_deep and self.compression in {"zstd", "xz"}:
            self._suspend_others()
        self.steps_left -= 1 + length // _STEP_OUTPUT_BYTES
        if self.steps_left <= 0:
            raise UnfinishedError

    def _step(self, limit: int) -> bytes | None:
        """Decompress up to `limit` bytes; return b"" if more steps are needed, None at the current end of the input."""
        if self._decompressor is None:
            return b"" if self._find_member() else None
        data = b""
        if needs_input := self._decompressor.needs_input:
            data = os.pread(self.descriptor, self._read_bytes, self._raw_offset)
            # If the input ends with a block, bzip2 reports needs_input although output of that block is pending.
            if not data and self.compression != "bzip2":
                return None
            self._block_raw_offset = self._raw_offset
            self._raw_offset += len(data)
            self._read_bytes = min(2 * self._read_bytes, _READ_BYTES_MAX)
        try:
            piece = self._decompressor.decompress(data, limit)
        except self._library.error as error:
            self._decompressor = None
            piece = self._salvage()
            self._break(f"{error}, near byte {self._block_raw_offset} of the file", len(piece))
        else:
            if self._decompressor.eof:
                self._raw_offset -= len(self._decompressor.unused_data)
                self._decompressor = None
        return None if needs_input and not data and not piece else piece

    def _find_member(self) -> bool:
        """Skip NUL padding and begin the next member; return False at the current end of the input."""
        data = os.pread(self.descriptor, _READ_BYTES_MIN, self._raw_offset)
        padding = len(data) - len(data.lstrip(b"\0"))
        if padding:
            self._raw_offset += padding
            return True  # the bytes read after it may be too few to recognise a member
        if compression_of(data) == self.compression:
            return self._begin_member(data)
        if not any(magic.startswith(data) for magic, kind in _MAGICS.items() if kind == self.compression):
            surplus = os.fstat(self.descriptor).st_size - self._raw_offset
            self._break(f"{surplus} bytes from byte {self._raw_offset} of the file on are not {self.compression} data")
        return False  # an incomplete magic number may still grow

    def _begin_member(self, data: bytes) -> bool:
        header_bytes = self._library.header_bytes(data)
        if header_bytes is None:
            data = os.pread(self.descriptor, _READ_BYTES_MAX, self._raw_offset)
            header_bytes = self._library.header_bytes(data)
        if header_bytes is None:
            if len(data) == _READ_BYTES_MAX:
                self._break(f"the header at byte {self._raw_offset} of the file has no end")
            return False
        self._raw_offset += header_bytes
        self._decompressor = self._library.open()
        self._member_raw_offset = self._raw_offset
        self._member_offset = self._end
        self._read_bytes = _READ_BYTES_MIN
        return True

    def _break(self, reason: str, salvaged_bytes: int = 0) -> None:
        hint = "replace it with a complete one, or decompress it by hand"
        if "memory" in reason.lower():
            hint = f"at most {1 << _WINDOW_LOG >> 20} MiB are used for it; compress it with a smaller window"
        self._broken = (
            f"{self._path}: the {self.compression} archive is broken: {reason}; "
            f"the first {self._end + salvaged_bytes} bytes of its content are readable; {hint}"
        )
        if self._broken_end < 0:
            self._broken_end, self._why_broken = self._end + salvaged_bytes, self._broken

    def _salvage(self) -> bytes:
        """
        Decompress the broken member again to recover the bytes that the failed call decompressed but did not return.

        Its last input and output are processed byte by byte, so that no output is lost with the error. This may recover
        more bytes than the call was asked for, as libraries decompress ahead.
        """
        self._suspend_others()
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


# The archive deep in a member with a possibly large window: one per process, as each may take 64 MiB.
_deep_archives: Final[weakref.WeakSet[Archive]] = weakref.WeakSet()


def open_content(descriptor: int, path: Path) -> Content:
    """
    Return the content of an open file, plain or compressed; it owns the descriptor.

    A file shorter than a magic number counts as plain: call again while nothing was read.
    """
    compression = compression_of(os.pread(descriptor, _HEAD_BYTES, 0))
    return Archive(descriptor, compression, path) if compression else Content(descriptor)
