"""`shipper backfill` and `shipper run` on gzip, zstd, bzip2 and xz: intact, truncated, corrupt and hostile."""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.e2e import files
from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Result, Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService
from tests.e2e.files import Tail, append, warnings_of, zstd
from tests.e2e.surroundings import csv_of, documents

# The default preset of xz takes ten times as long, and without a checksum zstd may not detect corruption. Archives by
# the system's tools are read in another test.
COMPRESSIONS = {
    **files.COMPRESSIONS,
    "xz": partial(lzma.compress, preset=0),
    "zst": partial(zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}),
}


def assert_named(result: Result, path: Path) -> None:
    """Assert that one error was logged, and that it names the file."""
    assert result.returncode == 4, result.stderr
    (line,) = warnings_of(result, path)
    assert line["level"] == "error"
    assert str(path) in line["error"]


def archive(shipper: Shipper, suffix: str, *parts: bytes) -> Path:
    """Write `SUFFIX.log` with a member for each part."""
    path = shipper.write(f"{suffix}.log", *map(COMPRESSIONS[suffix], parts))
    return path


def test_archives_of_several_members_are_delivered_once(shipper: Shipper, service: Service, sample: Sample):
    """Members end anywhere in a line; some are empty. One member, and all together, exceed a read of 1 MiB."""
    sizes = []
    for number, suffix in enumerate(COMPRESSIONS):
        data = b"".join(sample.lines[number * 4000 : number * 4000 + 4000])
        cuts = [0, 0, 1, 100, 101, 1_200_000, 1_200_000, len(data) - 1, len(data), len(data)]
        archive(shipper, suffix, *(data[start:end] for start, end in pairwise(cuts)))
        sizes.append(len(data))
    result = shipper.backfill(shipper.folder / "*.log")
    assert (result.returncode, result.counts()) == (0, (16_000, 16_000, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[:16_000], 1)
    checkpoints = [checkpoint for *_, checkpoint in shipper.read_state().checkpoints]
    assert sorted(checkpoints) == sorted(sizes), "the checkpoint does not count decompressed bytes"
    for suffix in COMPRESSIONS:
        (shipper.folder / f"{suffix}.log").rename(shipper.folder / f"renamed-{suffix}")
    assert shipper.backfill("renamed-*").counts() == (0, 0, 0, 0, 0)


def test_an_archive_is_read_whatever_its_writer_name_and_content(shipper: Shipper, service: Service, sample: Sample):
    """Written by the system's tools; with misleading suffixes; with padding; in any record format."""
    contents: dict[str, bytes] = {}
    ids: list[str] = []

    def lines(count: int) -> bytes:
        ids.extend(sample.ids[len(ids) : len(ids) + count])
        return b"".join(sample.lines[len(ids) - count : len(ids)])

    for tool in filter(shutil.which, ("gzip", "zstd", "bzip2", "xz")):
        data = lines(1000)
        for level, part in (("-1", data[:1000]), ("-9", data[1000:])):  # from a pipe, so without a length in the header
            written = subprocess.run([tool, "-q", level, "-c"], input=part, stdout=subprocess.PIPE, check=True)
            contents[f"{tool}.log"] = contents.get(f"{tool}.log", b"") + written.stdout
    contents["plain.gz"] = lines(10)
    for suffix, other in zip(COMPRESSIONS, [*[*COMPRESSIONS][1:], "gz"], strict=True):
        contents[f"{suffix}.ndjson"] = COMPRESSIONS[suffix](lines(10))
        contents[f"{suffix}.{other}"] = COMPRESSIONS[suffix](lines(10))
        contents[f"empty.{suffix}"] = COMPRESSIONS[suffix](b"")
    contents["from-a-tape.gz"] = gzip.compress(lines(100)) + b"\0" * 5000
    crlf = b"\xef\xbb\xbf" + lines(50).replace(b"\n", b"\r\n\r\n").rstrip()
    contents["crlf.gz"] = gzip.compress(crlf)
    events = lines(50).strip().replace(b"\n", b",\n")
    contents["batch.zst"] = zstd.compress(b'{"EventType":"Acquisition","events":[' + events + b"]}")
    contents["array.bz2"] = COMPRESSIONS["bz2"](b"[" + lines(50).strip().replace(b"\n", b",\n") + b"]")
    good = lines(1)
    contents["bad.xz"] = COMPRESSIONS["xz"](b'{"bad": 1}\n' + good + b"{}\n")
    for name, content in contents.items():
        shipper.write(f"archives/{name}", content)
    result = shipper.backfill("archives")
    assert (result.returncode, result.counts()) == (3, (len(ids) + 2, len(ids), 2, 0, 0))
    service.assert_holds_exactly(ids)
    letters = {(letter.raw, letter.start_offset) for letter in shipper.read_state().dead_letters}
    assert letters == {(b'{"bad": 1}', 0), (b"{}", 11 + len(good))}, "offsets count decompressed bytes"


def test_reading_resumes_in_every_archive_after_kills_of_run_and_backfill(
    tail: Tail, shipper: Shipper, service: Service, fake: FakeService, sample: Sample, rng: Random
):
    """Archives of 1.4 MB, some of whose members end within a line; they are read one after the other."""
    for number, suffix in enumerate(COMPRESSIONS):
        data = b"".join(sample.lines[number * 4000 : number * 4000 + 4000])
        members = (data[n : n + 500_000] for n in range(0, len(data), 500_000))
        (tail.folder / suffix).write_bytes(b"".join(map(COMPRESSIONS[suffix], members)))
    settings = {**QUICK, "batch.max_events": 200, "batch.linger_seconds": 5, "delivery.concurrency": 1}
    following = {"input.include": f'["{tail.folder}/*"]'}
    killed_at = [0, *(20 * number + rng.randrange(5, 10) for number in range(4)), 72]  # batches; each archive has 20
    in_the_middle: set[str] = set()
    for number, (before, after) in enumerate(pairwise(killed_at)):
        arguments, include = (["run"], following) if number < 4 else (["backfill", tail.folder], {})
        taken = after - before
        fake.plan(*[OK] * taken)
        fake.default = HANG
        hung_at = fake.requests + taken + 1
        running = shipper.start(*arguments, settings={**settings, **include})
        running.wait_until(
            lambda hung_at=hung_at: fake.requests == hung_at and len(fake.event_ids()) == shipper.read_state().accepted,
            "answered batches are saved",
        )
        running.kill()
        checkpoints = {path: checkpoint for _, _, path, checkpoint in shipper.read_state().checkpoints}
        in_the_middle |= {path for path, checkpoint in checkpoints.items() if checkpoint < 1_300_000}
    assert len(in_the_middle) == len(COMPRESSIONS), "an archive was not interrupted in the middle"
    first = Counter(fake.event_ids())
    assert max(first.values()) == 1
    assert len(first) == 72 * 200

    shipper.target = service.target
    rest = set(sample.ids[:16_000]) - set(first)
    result = shipper.backfill(tail.folder)
    assert (result.returncode, result.counts()) == (0, (len(rest), len(rest), 0, 0, 0))
    service.assert_holds_exactly(rest)
    assert (shipper.read_state().read, shipper.read_state().duplicates) == (16_000, 0)


def test_whole_lines_of_truncated_archives_are_delivered_and_the_rest_once_the_archives_are_complete(
    shipper: Shipper, service: Service, sample: Sample
):
    wholes = {}
    for number, suffix in enumerate(COMPRESSIONS):
        lines = sample.lines[number * 600 : number * 600 + 600]
        # In members, because half a block of bzip2 or xz cannot be read.
        path = archive(shipper, suffix, *(b"".join(lines[start : start + 50]) for start in range(0, 600, 50)))
        wholes[path] = path.read_bytes()
        path.write_bytes(wholes[path][: len(wholes[path]) * 6 // 10])
    shipper.write("plain.log", *sample.lines[3000:3010])
    cut = shipper.backfill(shipper.folder / "*.log")
    for path in wholes:
        assert_named(cut, path)
    read, accepted, *_, pending = cut.counts()
    assert 1200 <= accepted - 10 < 2400
    assert (read, pending) == (accepted, 0)
    arrived = set(service.event_ids())
    assert arrived >= set(sample.ids[3000:3010])
    for number in range(len(COMPRESSIONS)):
        of_file = [event_id in arrived for event_id in sample.ids[number * 600 : number * 600 + 600]]
        assert 300 <= sum(of_file) < 600
        assert of_file == sorted(of_file, reverse=True), "not a contiguous range from the beginning"
    assert shipper.read_state().dead_letters == (), "a torn line was taken for a record"

    again = shipper.backfill(shipper.folder / "*.log")
    for path in wholes:
        assert_named(again, path)
    assert again.counts() == (0, 0, 0, 0, 0)

    for path, whole in wholes.items():
        path.write_bytes(whole)
    result = shipper.backfill(shipper.folder / "*.log")
    assert (result.returncode, result.counts()) == (0, (2410 - accepted, 2410 - accepted, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[:2400] + sample.ids[3000:3010], 1)


def test_decompression_bombs_take_no_memory_and_affect_no_other_record(
    shipper: Shipper, service: Service, sample: Sample
):
    """A line of 80 MB, then 20 MB of blanks, from some kilobytes; less with bzip2, which is slow."""
    for number, suffix in enumerate(COMPRESSIONS):
        count = 4 if suffix == "bz2" else 8
        first, last = sample.lines[number * 2 : number * 2 + 2]
        line, blanks = b"x" * 10_000_000, (b" " * 999 + b"\n") * 10_000
        packed = {part: COMPRESSIONS[suffix](part) for part in (line, blanks)}
        parts = [COMPRESSIONS[suffix](first), *[packed[line]] * count, *[packed[blanks]] * (count // 4)]
        path = shipper.write(f"{suffix}.log", *parts, COMPRESSIONS[suffix](last))
        assert path.stat().st_size < 1_000_000
    result = shipper.backfill(shipper.folder / "*.log", fresh=True)
    assert (result.returncode, result.counts()) == (3, (12, 8, 4, 0, 0))
    service.assert_holds_exactly(sample.ids[:8])
    assert shipper.read_state().rules == ["oversized"] * 4
    assert result.peak_bytes < 100 << 20, f"{result.peak_bytes >> 20} MiB were held"


@pytest.mark.long
def test_the_memory_for_decompressed_data_does_not_grow_with_the_number_of_archives(tail: Tail, sample: Sample):
    """The archives are read in turn, a megabyte at a time."""
    blanks = gzip.compress((b" " * 1023 + b"\n") * (2 << 10))
    for number in range(100):
        (tail.folder / f"{number}.gz").write_bytes(blanks + gzip.compress(sample.lines[number]))
    tail.start("*.gz", fresh=True)
    tail.wait(100, limit_s=120)
    assert tail.stop(100).peak_bytes < 90 << 20


def test_archives_that_appear_in_the_folder_are_read_to_their_end(tail: Tail, shipper: Shipper, sample: Sample):
    tail.start("*")
    for number, suffix in enumerate(COMPRESSIONS):
        new = archive(shipper, suffix, b"".join(sample.lines[number * 300 : number * 300 + 300]))
        new.rename(tail.folder / new.name)
        tail.wait(number * 300 + 300)
    for number, suffix in enumerate(COMPRESSIONS):  # a log flushed as members
        append(
            tail.folder / f"{suffix}.log",
            COMPRESSIONS[suffix](b"".join(sample.lines[1200 + number * 10 : 1210 + number * 10])),
        )
    tail.wait(1240)
    result = tail.stop(1240)
    assert [line for line in result.stderr.splitlines() if '"level":"warning"' in line] == []
    tail.append(1240, 1250, "other")
    tail.pass_by("*", 1250)


def test_a_file_or_archive_that_is_rewritten_in_place_is_read_from_its_start(
    shipper: Shipper, service: Service, sample: Sample
):
    """Same inode, other content: an export that overwrites the old one, longer or shorter, compressed or not."""
    sent = 0
    for contents in (
        {"plain": ("", 20), "export": ("gz", 300), "other": ("gz", 100)},
        {"plain": ("", 5), "export": ("gz", 100), "other": ("zst", 500)},
        {"plain": ("", 30), "export": ("", 10), "other": ("gz", 50)},
    ):
        before = sent
        for name, (suffix, count) in contents.items():
            data = b"".join(sample.lines[sent : sent + count])
            shipper.write(name, COMPRESSIONS[suffix](data) if suffix else data)
            sent += count
        count = sent - before
        assert shipper.backfill("plain", "export", "other").counts() == (count, count, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[:sent], 1)


def test_reading_resumes_in_files_that_were_compressed_between_two_backfills(
    shipper: Shipper, service: Service, sample: Sample
):
    def lines(number: int, count: int) -> bytes:
        return b"".join(sample.lines[number * 500 : number * 500 + count])

    for number, suffix in enumerate(COMPRESSIONS):
        shipper.write(f"{suffix}.ndjson", lines(number, 300))
    assert shipper.backfill("*.ndjson").counts() == (1200, 1200, 0, 0, 0)
    for number, suffix in enumerate(COMPRESSIONS):
        archive(shipper, suffix, lines(number, 400))
        (shipper.folder / f"{suffix}.ndjson").unlink()
    assert shipper.backfill(shipper.folder / "*.log").counts() == (400, 400, 0, 0, 0)
    for number, suffix in enumerate(COMPRESSIONS):  # and decompressed again, which also resumes
        shipper.write(f"{suffix}.ndjson", lines(number, 450))
        (shipper.folder / f"{suffix}.log").unlink()
    assert shipper.backfill("*.ndjson").counts() == (200, 200, 0, 0, 0)
    wanted = [event_id for number in range(4) for event_id in sample.ids[number * 500 : number * 500 + 450]]
    assert service.times_received() == dict.fromkeys(wanted, 1)


def test_a_record_split_between_members_waits_for_its_rest_across_restarts(tail: Tail, sample: Sample):
    """Logs flushed as members whenever a buffer is full, and idle in between for longer than any wait."""
    names = [f"{form}.{suffix}" for form in ("ndjson", "csv", "batch") for suffix in COMPRESSIONS]
    contents = {
        name: written_as(name.partition(".")[0], sample.lines[number * 20 : number * 20 + 20])
        for number, name in enumerate(names)
    }
    count = len(names) * 20
    settings = {"input__rotate_wait_seconds": 0.2, "input__format": "auto"}
    tail.start("*", **settings)
    quiet = []
    for number, (start, end) in enumerate(pairwise((0, 20, 1000, 1100, 2000, 100_000))):
        for name, data in contents.items():
            append(tail.folder / name, COMPRESSIONS[name.partition(".")[2]](data[start:end]))
        # A complete object without newline is read once its archive has been idle; by then, earlier ones are read, too.
        quiet.append(count + number)
        (tail.folder / f"later.{number}").write_bytes(COMPRESSIONS["gz"](sample.lines[quiet[-1]].rstrip()))
        tail.wait(quiet)
        if number == 2:
            assert tail.running.stop().returncode == 0
            tail.start("*", **settings)
    tail.wait([*range(count), *quiet])
    tail.stop([*range(count), *quiet])


def written_as(form: str, lines: list[bytes]) -> bytes:
    if form == "batch":
        return b'{"EventType":"Acquisition","events":[' + b",".join(lines) + b"]}\n"
    if form == "ndjson":
        return b"".join(lines)
    return csv_of(documents(lines))
