"""Many archives are read in turns; few are decompressed at a time."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from weakref import WeakSet

import pytest
from backports import zstd

from shipper.sources.content import Archive
from tests.unit.follower_bench import Bench

LARGE = 20 << 20
WIDE = 6 << 20
FURTHER = 5 << 20  # maximum that an archive read from its beginning decompresses in one turn
BLANKS = (b" " * 1023 + b"\n") * 1024  # 1 MiB


@pytest.fixture
def bench(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Assert at each step that no more archives are being decompressed than allowed."""
    count_step = Archive._count_step

    def check(archive: Archive, length: int) -> None:
        count_step(archive, length)
        archives = [each.reader.content for each in bench.follower.files if isinstance(each.reader.content, Archive)]
        assert sum(each._decompressor is not None for each in archives) <= 3
        assert sum(each._decompressor is not None and each._end > FURTHER for each in archives) <= 1

    monkeypatch.setattr(Archive, "_count_step", check)
    return bench


def read(bench: Bench, *, until: Callable[[Counter[str]], bool] = lambda _: False) -> Counter[str]:
    """Scan and read by turns until several scans find nothing new, or a condition holds; count records by file."""
    found: Counter[str] = Counter()
    files = bench.follower.files
    quiet = 0
    while quiet < 8 and not until(found):
        bench.now += 2.0
        bench.follower.scan(bench.follower.find(), bench.now)
        quiet = 0 if files.has_ready else quiet + 1
        for chunk in files.read(bench.now):
            found[Path(chunk.stream.path).name] += len(chunk.data.split())
    return found


def pack_xz(data: bytes) -> bytes:
    """Pack fast, with the window of the default preset."""
    return lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 8 << 20}])


def records(first: int, count: int) -> bytes:
    return b"".join(b'{"n":%07d}\n' % number for number in range(first, first + count))


def pack_gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1)


def write(bench: Bench, name: str, first: int, mib: int, pack: Callable[[bytes], bytes] = pack_gzip) -> str:
    """Write an archive of ten records, with so much between them that it takes many turns; return its name."""
    bench.write(name, pack(records(first, 5) + BLANKS * mib + records(first + 100, 5)))
    return name


def test_each_of_many_archives_is_read_once(bench: Bench):
    names = [write(bench, f"{number}.log", number, number) for number in range(20)]
    bench.start()
    assert read(bench) == dict.fromkeys(names, 10)


def test_many_small_archives_are_read_together(bench: Bench):
    for number in range(40):
        bench.write(f"{number}.log", gzip.compress(records(number, 5)))
    bench.start()
    bench.follower.scan(bench.follower.find(), bench.now)
    files, found, reads = bench.follower.files, 0, 0
    while files.has_ready:
        found += sum(len(chunk.data.split()) for chunk in files.read(bench.now))
        reads += 1
    assert (found, reads <= 8) == (200, True), reads


def test_an_archive_that_ends_in_the_turn_of_another_one_is_finished(bench: Bench, rng: Random):
    """Otherwise each archive would be decompressed to its end again in every turn."""
    for number in range(6):
        bench.write(f"{number}.log", gzip.compress(records(number, 5) + BLANKS * (number + 2), 1))
    bench.start()
    assert read(bench).total() == 30
    files = bench.follower.files
    for _ in range(20):
        for file in rng.sample([*files], 6):
            files.wake(file)
        for _ in range(8):
            assert not files.read(bench.now)
        assert not files.has_ready


def test_a_small_archive_does_not_wait_for_one_with_a_slow_start(bench: Bench):
    bench.write("members.log", gzip.compress(b"") * 20_000 + gzip.compress(records(0, 5)))
    bench.start()
    files = bench.follower.files
    assert not read(bench, until=lambda _: any(file.unfinished_turns > 4 for file in files))
    for number in range(10):
        bench.write(f"{number}.log", gzip.compress(records(number, 5)))
    bench.follower.scan(bench.follower.find(), bench.now)
    found = sum(len(chunk.data.split()) for _ in range(6) for chunk in files.read(bench.now))
    assert found == 50
    assert read(bench) == {"members.log": 5}


def test_a_small_archive_does_not_wait_for_large_ones(bench: Bench):
    large = [write(bench, f"{number}.log", number, LARGE >> 20) for number in range(3)]
    bench.start()
    files = bench.follower.files
    found = read(bench, until=lambda _: any(each.reader.content.size() >= LARGE // 2 for each in files))
    bench.write("small.log", gzip.compress(records(1000, 5)))
    found += read(bench, until=lambda found: bool(found["small.log"]))
    assert found["small.log"] == 5
    assert sum(found[name] == 10 for name in large) < 2, "most of the large ones are still to be read"
    assert found + read(bench) == {"small.log": 5, **dict.fromkeys(large, 10)}


def test_an_archive_with_an_endless_line_does_not_block_others(bench: Bench):
    write(bench, "large.log", 0, 60)
    bench.start()
    found = read(bench, until=lambda _: any(each.reader.offset >= LARGE for each in bench.follower.files))
    bench.write("line.log", gzip.compress(b" " * (3 * LARGE) + b"\n" + records(1000, 5), 1))
    assert found + read(bench) == {"large.log": 10, "line.log": 5}


@pytest.mark.parametrize("pack", [pack_xz, zstd.compress], ids=["xz", "zstd"])
def test_only_one_window_is_large_even_while_files_are_compared(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
):
    decompressed, seen, count_step = Counter[str](), WeakSet[Archive](), Archive._count_step

    def check(archive: Archive, length: int) -> None:
        count_step(archive, length)
        decompressed[archive._path.name] += length
        seen.add(archive)
        assert sum(each._decompressor is not None and each._end > WIDE for each in seen) <= 1

    monkeypatch.setattr(Archive, "_count_step", check)
    write(bench, "0.log", 0, 30, pack)
    bench.start()
    assert read(bench) == {"0.log": 10}
    write(bench, "1.log", 50, 60, pack)
    files = bench.follower.files
    found = read(
        bench, until=lambda _: any(each.reader.path.name == "1.log" and each.reader.offset >= LARGE for each in files)
    )
    bench.write("2.log", pack(records(0, 5) + BLANKS * 40 + records(200, 5)))
    bench.write("3.log", pack(records(0, 5) + BLANKS * 40 + records(300, 5)))
    assert found + read(bench) == dict.fromkeys(["1.log", "2.log", "3.log"], 10)
    compared = max(decompressed["2.log"], decompressed["3.log"])
    assert 40 << 20 < compared < 160 << 20, "compared once, and begun again a few times"


def test_the_large_archive_read_least_goes_first(bench: Bench):
    large = [write(bench, f"{number}.log", number, 60) for number in range(3)]
    bench.start()
    found = read(bench, until=lambda _: any(each.reader.offset >= LARGE for each in bench.follower.files))
    bench.write("smaller.log", pack_gzip(BLANKS * 6 + records(1000, 5)))
    found += read(bench, until=lambda found: bool(found["smaller.log"]))
    assert all(found[name] == 5 for name in large), "each of the large ones is still to be read"
    assert found + read(bench) == {"smaller.log": 5, **dict.fromkeys(large, 10)}


def test_a_smaller_archive_waits_only_seconds_for_large_ones(bench: Bench):
    for number in range(2):
        write(bench, f"{number}.log", number, 90)
    bench.start()
    found = read(bench, until=lambda _: any(each.reader.offset >= 46 << 20 for each in bench.follower.files))
    bench.write("smaller.log", pack_gzip(BLANKS * 3 + records(1000, 5)))
    before = bench.now
    found += read(bench, until=lambda found: bool(found["smaller.log"]))
    assert bench.now - before < 22
    assert found + read(bench) == {"0.log": 10, "1.log": 10, "smaller.log": 5}


def test_an_archive_that_grows_within_a_member_is_suspended_and_resumed(bench: Bench):
    packer = zlib.compressobj(wbits=31)
    bench.write("grows.log", packer.compress(records(0, 5)) + packer.flush(zlib.Z_SYNC_FLUSH))
    bench.start()
    assert read(bench) == {"grows.log": 5}
    (growing,) = bench.follower.files
    assert growing.reader.content._decompressor is not None
    bench.write("other.log", gzip.compress(records(100, 5)))
    assert read(bench) == {"other.log": 5}
    assert growing.reader.content._decompressor is None
    bench.write("grows.log", packer.compress(records(5, 3)) + packer.flush())
    assert read(bench) == {"grows.log": 3}
