"""Compressed files that were cut short, changed, joined, or made to unpack to very much."""

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

_READ_MAX: Final = 4 << 20  # of a bomb
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
    """What can be read is what the library reads of the first member; then the end, or an error that names the file."""
    os.ftruncate(_memory(), 0)
    os.pwrite(_memory(), data, 0)
    content = open_content(os.dup(_memory()), _PATH)
    try:
        if not isinstance(content, Archive):
            return "plain"
        read, words = _read(content, 1 << 16)
        assert _read(content, 777) == (read, words), "it depends on the length of the reads"
        if not words and len(read) < _READ_MAX:
            assert content.size() == len(read)
        is_ended = content.is_ended()
        assert not (is_ended and words)
    finally:
        content.close()
    if words:
        assert str(_PATH) in words
        assert f"{len(read)} bytes of content are readable before" in words
    first = _first_member(data, content.compression)
    assert read[: len(first)] == first[: len(read)], "something else is read than is there"
    # Asked for one byte alone, bzip2 gives one more before it finds the fault in what it was given.
    assert len(read) + (content.compression == "bzip2") >= min(len(first), _READ_MAX), "what is whole is not read"
    return (
        content.compression,
        words.partition(str(_PATH))[2][:60].rstrip("0123456789 "),
        is_ended,
        len(read).bit_length(),
    )


def _read(content: Archive, length: int) -> tuple[bytes, str]:
    found = bytearray()
    try:
        while len(found) < _READ_MAX and (piece := content.pread(length, len(found))):
            assert len(piece) <= length
            found += piece
    except SourceError as error:
        return bytes(found), str(error)
    return bytes(found[:_READ_MAX]), ""


def _first_member(data: bytes, kind: str) -> bytes:
    """What the library itself gives of the first member, byte by byte, up to its fault."""
    reader = _READERS[kind]()
    found = b""
    try:
        for at in range(len(data)):
            if reader.eof or len(found) >= _READ_MAX:
                break
            found += reader.decompress(data[at : at + 1])
    except (zlib.error, zstd.ZstdError, lzma.LZMAError, OSError, EOFError):
        pass
    return found


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
