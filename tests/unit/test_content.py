"""The content of an archive equals the plain file: at any offset, while it grows, and up to a fault."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import igzip_lib

from shipper.model.errors import SourceError
from shipper.sources import content as content_module
from shipper.sources.content import Archive, Content, compression_of, open_content
from tests.cases import each

MIB = 1 << 20
STEP = 1 << 16  # what is decompressed at a time where the steps are small
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": lambda data: zstd.compress(data, options=CHECKED),
    "bzip2": lambda data: bz2.compress(data, 1),
    "xz": lambda data: lzma.compress(data, preset=1),
}
KINDS = sorted(COMPRESS)
SKIPPED = b"\x53\x2a\x4d\x18\x0a\0\0\0skipped..."  # what `pzstd` writes before each frame looks like this


def lines(rng: Random, count: int) -> bytes:
    return b"".join(b'{"EventId":"%032x","n":%d}\n' % (rng.getrandbits(128), number) for number in range(count))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@contextmanager
def opened(path: Path) -> Iterator[Content]:
    content = open_content(os.open(path, os.O_RDONLY), path)
    try:
        yield content
    finally:
        content.close()


def read_on(content: Content, offset: int = 0, *, length: int = MIB, into: bytearray | None = None) -> bytes:
    """Read forward down to what is the end as of now."""
    found = bytearray() if into is None else into
    while data := content.pread(length, offset + len(found)):
        found += data
    return bytes(found)


def outcome(path: Path, *, length: int = MIB) -> tuple[bytes, str, bool]:
    """Read everything; return the data, the error after it, and whether the archive has ended."""
    found = bytearray()
    with opened(path) as content:
        try:
            return read_on(content, length=length, into=found), "", content.is_ended()
        except SourceError as error:
            assert not content.is_ended()
            assert content.size() == len(found)
            return bytes(found), str(error), False


@contextmanager
def small_steps() -> Iterator[None]:
    """Let archives be read in steps of 64 KiB, so that a few hundred KiB are as many steps as some MiB would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_module, "_STEP_BYTES", STEP)
        patch.setattr(content_module, "_READ_BYTES_MAX", 1 << 14)
        yield


# --- what a file is


@each("kind", KINDS)
def test_an_archive_is_detected_by_its_first_bytes(kind: str):
    for data in (b"", b"text\n", bytes(5000)):
        assert compression_of(COMPRESS[kind](data)) == kind
        assert compression_of(COMPRESS[kind](data)[:16]) == kind
    assert compression_of(SKIPPED) == "zstd"


@each(
    "head",
    [
        *(b"", b"\x1f", b"\x1f\x8b", b"BZh9", b"BZh91AY is a text\n", b"BZh0" + bytes.fromhex("314159265359")),
        *(b'{"a":1}\n', b"[1]", b"(\xb5/ not", b"\xfd7zXY\0", b"\0" * 20, b"PK\3\4", b"x\x9c"),
    ],
)
def test_other_bytes_are_plain(head: bytes, path: Path):
    assert compression_of(head) == ""
    path.write_bytes(head)
    with opened(path) as content:
        assert not isinstance(content, Archive)
        assert (content.compression, content.size(), content.is_ended()) == ("", len(head), True)
        assert content.pread(100, 0) == head
        assert content.pread(100, 2) == head[2:]
        assert content.status().st_ino == path.stat().st_ino


def test_a_plain_file_imports_no_library():
    code = "import sys, shipper.sources.content; print({'isal', 'bz2', 'lzma', 'backports.zstd'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


# --- the content of whole archives


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_archive_is_ended(kind: str, path: Path):
    path.write_bytes(COMPRESS[kind](b""))
    with opened(path) as content:
        assert not content.is_ended(), "nothing was looked at yet"
        assert content.pread(MIB, 0) == b""
        assert (content.is_ended(), content.size(), content.compression) == (True, 0, kind)
        assert content.status().st_size == path.stat().st_size


READS = st.lists(
    st.tuples(
        st.sampled_from(["forward", "forward", "forward", "again", "tail", "head", "skip", "anywhere"]),
        st.integers(0, 2 * STEP),
    ),
    max_size=25,
)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.sampled_from([0, 1, 700, 1024, 5000, STEP, STEP + 1, 3 * STEP]), min_size=1, max_size=4),
    lengths=st.sampled_from([64, 4096, STEP]),
    reads=READS,
)
def test_reads_return_the_bytes_of_the_plain_file(
    kind: str, seed: int, sizes: list[int], lengths: int, reads: list[tuple[str, int]]
):
    rng = Random(seed)
    members = [rng.choice([rng.randbytes, bytes, lambda n: lines(rng, n // 50)])(size) for size in sizes]
    plain = b"".join(members)
    with TemporaryDirectory() as folder, small_steps():
        path = Path(folder, "file")
        path.write_bytes(b"".join(map(COMPRESS[kind], members)))
        with opened(path) as content:
            at = 0
            for way, number in reads:
                offset, length = at, lengths
                match way:
                    case "forward":
                        length = rng.choice([lengths, STEP, STEP + 5000])
                    case "again":  # a torn last line
                        offset = max(0, at - number % 500)
                    case "tail":
                        offset, length = max(0, at - 64), 64
                    case "head":
                        offset, length = 0, number % 1025
                    case "skip":
                        offset = at + number
                    case "anywhere":
                        offset = number
                data = content.pread(length, offset)
                assert data == plain[offset : offset + length], (way, offset, length)
                if way in ("forward", "again", "skip"):
                    at = offset + len(data)
            assert read_on(content, at, length=STEP) == plain[at:]
            assert (content.is_ended(), content.size()) == (True, len(plain))
            assert content.pread(1024, 0) == plain[:1024]


@pytest.mark.parametrize("kind", KINDS)
def test_forward_reading_decompresses_once(kind: str, path: Path):
    plain = lines(Random(1), 40_000)
    path.write_bytes(COMPRESS[kind](plain))
    with opened(path) as content:
        offset = largest = 0
        while data := content.pread(MIB, offset):
            assert content.pread(1024, 0) == plain[:1024]
            offset += data.rfind(b"\n") + 1
            assert content.pread(64, offset - 64) == plain[offset - 64 : offset]
            assert content.size() >= largest, "it started over"
            largest = content.size()
        assert offset == len(plain)


def test_skipped_frames_have_no_content(path: Path):
    path.write_bytes(SKIPPED + COMPRESS["zstd"](b"one\n") + SKIPPED + SKIPPED + COMPRESS["zstd"](b"two\n") + SKIPPED)
    assert outcome(path) == (b"one\ntwo\n", "", True)


@each("kind", KINDS)
@each("padding", [1, 4, 512, 4095, 4096, 4097, 300_000])
def test_padding_after_members_is_ignored(kind: str, padding: int, path: Path):
    one, two = COMPRESS[kind](b"one\n"), COMPRESS[kind](b"two\n")
    path.write_bytes(one + bytes(padding) + two + bytes(padding))
    assert outcome(path) == (b"one\ntwo\n", "", True)


# --- growth


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), largest=st.sampled_from([1, 7, 300, 3_000]))
def test_a_growing_archive_yields_a_growing_prefix(kind: str, seed: int, largest: int):
    rng = Random(seed)
    members = [lines(rng, rng.randrange(largest)) for _ in range(rng.randint(1, 4))]
    plain = b"".join(members)
    raw = b"".join(COMPRESS[kind](member) + bytes(rng.choice([0, 0, 4, 512])) for member in members)
    with TemporaryDirectory() as folder, small_steps():
        path = Path(folder, "file")
        raw_size = min(16, len(raw))  # fewer bytes might not tell what it is
        path.write_bytes(raw[:raw_size])
        with opened(path) as content, path.open("ab", buffering=0) as out:
            found = read_on(content)
            while raw_size < len(raw):
                raw_size += out.write(raw[raw_size : raw_size + rng.randint(1, max(1, largest))])
                back = min(len(found), rng.randrange(200))
                found = found[: len(found) - back] + read_on(content, len(found) - back, length=rng.choice([100, MIB]))
                assert plain.startswith(found)
                assert content.is_intact()
            assert found == plain
            assert content.is_ended()


def test_flushed_data_can_be_read(path: Path):
    compressor = zlib.compressobj(wbits=31)
    with path.open("ab", buffering=0) as out:
        out.write(compressor.compress(b"one\n") + compressor.flush(zlib.Z_SYNC_FLUSH))
        with opened(path) as content:
            assert content.pread(MIB, 0) == b"one\n"
            assert content.pread(MIB, 4) == b""
            assert not content.is_ended()
            out.write(compressor.compress(b"two\n") + compressor.flush(zlib.Z_SYNC_FLUSH))
            assert content.pread(MIB, 0) == b"one\ntwo\n"
            out.write(compressor.flush())
            assert content.pread(MIB, 8) == b""
            assert content.is_ended()


@pytest.mark.parametrize("kind", KINDS)
def test_an_incomplete_magic_number_is_no_error(kind: str, path: Path):
    one, two = COMPRESS[kind](b"one\n"), COMPRESS[kind](b"two\n")
    for whole in range(1, len(two)):
        path.write_bytes(one + two[:whole])
        with opened(path) as content, path.open("ab") as out:
            assert b"one\ntwo\n".startswith(read_on(content))
            assert not content.is_ended()
            out.write(two[whole:])
            out.flush()
            assert not content.is_ended(), "there are bytes that were not read"
            assert read_on(content) == b"one\ntwo\n"
            assert content.is_ended()


def gzip_with_header(flags: int, data: bytes, *, extra: bytes = b"extra", name: bytes = b"a.log") -> bytes:
    header = b"\x1f\x8b\x08" + bytes([flags]) + b"time\0\3"
    if flags & 4:
        header += len(extra).to_bytes(2, "little") + extra
    if flags & 8:
        header += name + b"\0"
    if flags & 16:
        header += b"a comment\0"
    if flags & 2:
        header += (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little")
    return header + gzip.compress(data)[10:]


@each("flags", range(32))
def test_a_gzip_header_may_be_read_in_pieces(flags: int, path: Path):
    raw = gzip.compress(b"zero\n") + gzip_with_header(flags, b"one\n") + gzip_with_header(flags, b"two\n")
    path.write_bytes(raw[:10])
    with opened(path) as content, path.open("ab", buffering=0) as out:
        found = b""
        for at in range(10, len(raw)):
            out.write(raw[at : at + 1])
            found += read_on(content, len(found))
        assert found == b"zero\none\ntwo\n"
        assert content.is_ended()


def test_a_gzip_header_may_be_long_but_not_endless(path: Path):
    path.write_bytes(gzip_with_header(12, b"one\n", extra=bytes(65535), name=b"n" * 100_000))
    assert outcome(path) == (b"one\n", "", True)
    path.write_bytes(gzip_with_header(12, b"one\n", name=b"n" * 100_000)[:90_000])
    assert outcome(path) == (b"", "", False)
    path.write_bytes(gzip_with_header(8, b"one\n", name=b"n" * 300_000))
    assert "has no end" in outcome(path)[1]


# --- what is cut short, and what is broken


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_archive_yields_a_prefix(kind: str, path: Path, rng: Random):
    members = [lines(rng, 30), b"", lines(rng, 5)]
    plain = b"".join(members)
    raw = [COMPRESS[kind](member) for member in members]
    ends = dict(zip(accumulate(map(len, raw)), accumulate(map(len, members)), strict=True))
    for size in range(16 if kind == "bzip2" else 6, sum(map(len, raw)) + 1):
        path.write_bytes(b"".join(raw)[:size])
        found, error, is_ended = outcome(path)
        assert plain.startswith(found)
        assert (error, is_ended) == ("", size in ends), size
        if size in ends:
            assert len(found) == ends[size]


@pytest.mark.parametrize("kind", KINDS)
def test_other_bytes_after_a_member_are_an_error(kind: str, path: Path):
    raw = COMPRESS[kind](b"one\n")
    other = next(other for name, other in COMPRESS.items() if name != kind)(b"x")
    for padding in (b"", bytes(8)):
        for surplus in (b"x", b"one more line\n", b"BZh9 ", b"\x1f\x8b\x07", other):
            path.write_bytes(raw + padding + surplus)
            found, error, _ = outcome(path)
            assert found == b"one\n"
            assert f"{path}: the {kind} archive" in error
            assert f"{len(surplus)} bytes from byte {len(raw + padding)} of the file on" in error


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_archive_yields_everything_before_the_fault(kind: str, path: Path, rng: Random):
    plain = lines(rng, 15_000)
    raw = bytearray(COMPRESS[kind](plain))
    broken_at = len(raw) * 2 // 3
    raw[broken_at : broken_at + 2000] = rng.randbytes(2000)
    path.write_bytes(COMPRESS[kind](b"one\n") + raw)
    with small_steps(), opened(path) as content:
        found = bytearray()
        with pytest.raises(SourceError) as caught:
            read_on(content, length=STEP, into=found)
        expected = b"one\n" + plain
        right = next((at for at in range(len(found)) if found[at] != expected[at]), len(found))
        # A block of zstd is 128 KiB. One of bzip2 is 100 kB here, and has a checksum; the others find out at the end.
        assert right > len(plain) * 2 // 3 - 150_000
        assert kind != "bzip2" or len(found) - right < 150_000
        assert str(path) in str(caught.value)
        assert kind in str(caught.value)
        assert f"the first {len(found)} bytes of its content are readable" in str(caught.value)
        # The rest stays readable, also from the beginning, and the error stays.
        assert content.pread(1024, 0) == expected[:1024]
        assert content.pread(64, len(found) - 64) == found[-64:]
        assert content.pread(3000, 5000) == expected[5000:8000]
        for _ in range(2):
            with pytest.raises(SourceError, match="is broken"):
                content.pread(1, len(found))
        with pytest.raises(SourceError):
            content.pread(STEP, len(found) + 1000)
        assert content.pread(100, 5000) == expected[5000:5100]
        assert not content.is_ended()
        assert content.size() == len(found)


@pytest.mark.parametrize("size", [1, 5, 70_000, STEP + 5_000])
def test_a_wrong_checksum_loses_no_byte(size: int, path: Path, rng: Random):
    plain = lines(rng, size // 40) or b"x\n"
    for position in (-8, -1):
        raw = bytearray(gzip.compress(plain))
        raw[position] ^= 0x40
        path.write_bytes(raw)
        found, error, _ = outcome(path)
        assert found == plain
        assert "checksum" in error


@pytest.mark.parametrize("before", [0, 1, 1000, 100_000, MIB + 5_000])
def test_an_invalid_block_loses_no_byte_before_it(before: int, path: Path, rng: Random):
    """Flushed, so that it is known which bytes stand before the block of a type that does not exist."""
    plain = rng.choice([rng.randbytes, bytes])(before)
    compressor = zlib.compressobj(wbits=31)
    raw = compressor.compress(plain) + compressor.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(raw + b"\x07" + rng.randbytes(1000))
    for length in (50, 4096, MIB) if before < MIB else (MIB,):
        found, error, _ = outcome(path, length=length)
        assert found == plain
        assert "is broken" in error


@cache
def lines_compressed(kind: str, count: int) -> tuple[bytes, bytes]:
    plain = lines(Random(count), count)
    return plain, COMPRESS[kind](plain)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    count=st.sampled_from([1, 10, 1000]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3),
)
def test_a_corrupted_archive_does_not_count_as_intact(kind: str, count: int, flips: list[tuple[float, int]]):
    plain, whole = lines_compressed(kind, count)
    raw = bytearray(whole)
    for where, mask in flips:
        raw[int(where * len(raw))] ^= mask
    with TemporaryDirectory() as folder, small_steps():
        path = Path(folder, "file")
        path.write_bytes(raw)
        if compression_of(raw):
            found, error, is_ended = outcome(path)
            assert error or found == plain or not is_ended


def xz(window: str) -> bytes:
    """The letter x, in a block whose header asks for a window; written down, as to make one takes ten times of it."""
    tail = "01000078 00000000 45aeef83 f8ee160a 00011901 a52c81cc 1fb6f37d 01000000 0004595a"
    return bytes.fromhex(f"fd377a58 5a000004 e6d6b446 02002101 {window} {tail}")


def zstd_of_nothing(window: str) -> bytes:
    """A frame header that asks for a window, and a last block of nothing."""
    return bytes.fromhex(f"28b52ffd 00 {window} 010000")


def test_a_window_of_64_mib_is_accepted_and_one_of_128_mib_is_refused(path: Path):
    for raw, data in ((xz("1c000000 10cf58cc"), b"x"), (zstd_of_nothing("80"), b"")):
        path.write_bytes(raw)
        assert outcome(path) == (data, "", True)
    for raw in (xz("1e000000 9b075166"), zstd_of_nothing("88")):
        path.write_bytes(raw)
        with opened(path) as content, pytest.raises(SourceError, match="64 MiB"):
            content.pread(MIB, 0)


BOMB = """
import json, os, re, sys
from pathlib import Path
from shipper.sources.content import open_content

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

path = Path(sys.argv[1])
content = open_content(os.open(path, os.O_RDONLY), path)
content.pread(1, 0)
before = peak_kib()
offset = 0
while data := content.pread(1 << 20, offset):
    offset += len(data)
content.pread(1, 0)
content.pread(1, offset - 100)
print(json.dumps([offset, peak_kib() - before, content.is_ended()]))
"""


# As one member, fast.
BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: igzip_lib.compress(data, flag=igzip_lib.COMP_GZIP),
    "zstd": zstd.compress,
    "bzip2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded_for_any_archive(kind: str, path: Path):
    path.write_bytes(BOMBS[kind](bytes(32 * MIB)))
    words = [sys.executable, "-c", BOMB, str(path)]
    done = subprocess.run(words, capture_output=True, check=True, text=True, timeout=120)
    size, grown_kib, is_ended = json.loads(done.stdout)
    assert (size, is_ended) == (32 * MIB, True)
    assert grown_kib < 16 * 1024


# --- whether it is the file that it was


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_that_was_truncated_or_overwritten_is_not_intact(kind: str, path: Path, rng: Random):
    raw = COMPRESS[kind](lines(rng, 1000))
    path.write_bytes(raw)
    with opened(path) as content:
        assert content.is_intact()
        read_on(content)
        assert content.is_intact()
        with path.open("ab") as out:
            out.write(COMPRESS[kind](b"more\n"))
        assert content.is_intact()
        os.truncate(path, len(raw) - 1)
        assert not content.is_intact()
        path.write_bytes(COMPRESS[kind](lines(rng, 2000)))
        assert not content.is_intact()
