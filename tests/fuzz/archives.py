"""Compressed files that are truncated, corrupted, concatenated, or decompression bombs."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

from shipper.model.errors import SourceError
from shipper.sources.content import Archive, open_content
from tests.fuzz.engine import Target
from tests.fuzz.mutation import mutator

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_READ_MAX: Final = 4 << 20  # decompressed, of a bomb
_WINDOW_MAX: Final = 4 << 20
_PATH: Final = Path("/logs/app.log.1")
_READERS: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zstd": zstd.ZstdDecompressor,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}


@cache
def _memory() -> int:
    return os.memfd_create("archive")


def check_archive(data: bytes) -> object:
    """Check that the first member is read, followed by more data, the end, or an error that names the file."""
    os.ftruncate(_memory(), 0)
    os.pwrite(_memory(), data, 0)
    content = open_content(os.dup(_memory()), _PATH)
    try:
        if not isinstance(content, Archive):
            return "plain"
        read, message = _read(content, 1 << 16)
        assert _read(content, 777) == (read, message), "the result depends on the length of the reads"
        if not message and len(read) < _READ_MAX:
            assert content.size() == len(read)
        is_ended = content.is_ended()
        assert not (is_ended and message)
    finally:
        content.close()
    if message:
        assert str(_PATH) in message
        assert f"the first {len(read)} bytes of its content are readable" in message
    first = _first_member(data, content.compression)
    assert read[: len(first)] == first[: len(read)], "the data read differs from the content"
    # When asked for a single byte, bzip2 returns one more byte before it detects corrupt input.
    assert len(read) + (content.compression == "bzip2") >= min(len(first), _READ_MAX), (
        "an intact archive is not read completely"
    )
    return (
        content.compression,
        message.partition(str(_PATH))[2][:60].rstrip("0123456789 "),
        is_ended,
        len(read).bit_length(),
    )


def _read(content: Archive, length: int) -> tuple[bytes, str]:
    read = bytearray()
    try:
        while len(read) < _READ_MAX and (piece := content.pread(length, len(read))):
            assert len(piece) <= length
            read += piece
    except SourceError as error:
        return bytes(read), str(error)
    return bytes(read[:_READ_MAX]), ""


def _first_member(data: bytes, kind: str) -> bytes:
    """Return what the library decompresses of the first member, byte by byte, up to an error."""
    reader = _READERS[kind]()
    read = b""
    try:
        for at in range(len(data)):
            if reader.eof or len(read) >= _READ_MAX:
                break
            read += reader.decompress(data[at : at + 1])
    except (zlib.error, zstd.ZstdError, lzma.LZMAError, OSError, EOFError):
        pass
    return read


_LINES: Final = b"".join(b'{"EventId":"%032x","n":%d}\n' % (number * 7919, number) for number in range(12))
_ZEROS: Final = bytes(3 << 20)
_COMPRESS: Final[tuple[Callable[[bytes], bytes], ...]] = (
    lambda data: gzip.compress(data, 6, mtime=0),
    lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    lambda data: bz2.compress(data, 1),
    lambda data: lzma.compress(data, preset=0),
)
_NAMED: Final = (
    b"\x1f\x8b\x08\x1c" + bytes(6) + b"\3\0abc" + b"app.log\0" + b"a comment\0" + gzip.compress(_LINES, mtime=0)[10:]
)
SEEDS: Final = [
    _NAMED,
    *(
        data
        for make in _COMPRESS
        for data in (make(b""), make(_LINES), make(_LINES) * 2, make(_LINES) + make(b"") + b"\0" * 9)
    ),
    *(make(_LINES)[:-5] for make in _COMPRESS),
    b"\x53\x2a\x4d\x18\x04\0\0\0skip" + zstd.compress(_LINES),
]
_BOMBS: Final = [make(_ZEROS) for make in _COMPRESS]

TARGETS: Final = (
    Target(
        "archives",
        check_archive,
        SEEDS,
        mutator(
            words=[*SEEDS[1:5], b"\0\0\0\0", b"\x28\xb5\x2f\xfd", b"\xff\xff", b"\x1f\x8b\x08", b"BZh9", SEEDS[-1]]
        ),
        share=4,
    ),
    Target("bombs", check_archive, _BOMBS, mutator(words=_BOMBS), share=0.01),
)
