"""`shipper backfill` and `shipper run` on gzip, zstd, bzip2 and xz, whole, cut short, broken and hostile."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Service, Shipper
from tests.e2e.fake_service import HANG, OK, FakeService
from tests.e2e.files import COMPRESSIONS, Tail, warnings_of, zstd

# Events that are in flight or not yet saved when a run is killed are sent again; on a busy disk a save takes long.
REPEATS_MAX = 4000
SLOW = {
    "batch.max_events": 20,
    "batch.linger_seconds": 0.02,
    "delivery.concurrency": 2,
    "state.commit_interval_seconds": 0.02,
}


def assert_named(result: Result, path: Path) -> None:
    """One error, and it names the file."""
    assert result.returncode == 4, result.stderr
    (line,) = warnings_of(result, path)
    assert line["level"] == "error"
    assert str(path) in line["error"]


def archive(shipper: Shipper, suffix: str, *parts: bytes) -> Path:
    """Write `SUFFIX.log`, with a member of its own for each part."""
    path = shipper.folder / f"{suffix}.log"
    path.write_bytes(b"".join(map(COMPRESSIONS[suffix], parts)))
    return path


def test_archives_of_several_members_are_delivered_once(shipper: Shipper, service: Service, sample: Sample):
    """Cut anywhere in a line; some are empty. Beyond a read of 1 MiB in one member and in all."""
    sizes = []
    for number, suffix in enumerate(COMPRESSIONS):
        data = b"".join(sample.lines[number * 6000 : number * 6000 + 6000])
        cuts = [0, 0, 1, 100, 101, 1_500_000, 1_500_000, len(data) - 1, len(data), len(data)]
        archive(shipper, suffix, *(data[start:end] for start, end in pairwise(cuts)))
        sizes.append(len(data))
    result = shipper.backfill(shipper.folder / "*.log")
    assert (result.returncode, result.counts()) == (0, (24_000, 24_000, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[:24_000], 1)
    checkpoints = [checkpoint for *_, checkpoint in shipper.read_state().checkpoints]
    assert sorted(checkpoints) == sorted(sizes), "not in bytes of the content"
    assert shipper.backfill(shipper.folder / "*.log").counts() == (0, 0, 0, 0, 0)
    for suffix in COMPRESSIONS:
        (shipper.folder / f"{suffix}.log").rename(shipper.folder / f"renamed-{suffix}")
    assert shipper.backfill("renamed-*").counts() == (0, 0, 0, 0, 0)


def test_what_the_tools_of_the_system_write_is_read(shipper: Shipper, service: Service, sample: Sample):
    tools = [tool for tool in ("gzip", "zstd", "bzip2", "xz") if shutil.which(tool)]
    if not tools:
        pytest.skip("there are none")
    for number, tool in enumerate(tools):
        data = b"".join(sample.lines[number * 1000 : number * 1000 + 1000])
        with (shipper.folder / f"{tool}.log").open("wb") as out:
            for level, part in (("-1", data[:1000]), ("-9", data[1000:])):  # from a pipe: no length in the header
                subprocess.run([tool, "-q", level, "-c"], input=part, stdout=out, check=True, timeout=20)
    total = len(tools) * 1000
    result = shipper.backfill(shipper.folder / "*.log")
    assert (result.returncode, result.counts()) == (0, (total, total, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:total])


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_backfill_killed_half_way_goes_on_in_the_archive_where_it_was(
    shipper: Shipper, service: Service, sample: Sample, rng: Random, suffix: str
):
    total = 12_000
    path = shipper.folder / "events.archive"
    data = b"".join(sample.lines[:total])
    path.write_bytes(b"".join(COMPRESSIONS[suffix](data[n : n + 1_800_000]) for n in range(0, len(data), 1_800_000)))
    goal = rng.randrange(5000, 7000)
    running = shipper.start("backfill", path, "--summary", "json", settings=SLOW)
    running.wait_until(lambda: service.received >= goal, f"{goal} events")
    running.kill()
    accepted, received = shipper.read_state().accepted, service.received
    assert 0 < accepted < total, "it was not killed in the middle"
    result = shipper.backfill(path)
    assert (result.returncode, result.counts()) == (0, (total - accepted, total - accepted, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:total])
    assert service.received - total == received - accepted <= REPEATS_MAX
    print(f"killed at {accepted} of {total} saved, {service.received - total} sent again")


def test_archives_that_are_cut_short_give_their_whole_lines_and_are_named_and_read_on_when_they_are_whole(
    shipper: Shipper, service: Service, sample: Sample
):
    wholes = {}
    for number, suffix in enumerate(COMPRESSIONS):
        lines = sample.lines[number * 3000 : number * 3000 + 3000]
        # In members, since of half a bzip2 block, or of an xz one, nothing can be read.
        path = archive(shipper, suffix, *(b"".join(lines[start : start + 250]) for start in range(0, 3000, 250)))
        wholes[path] = path.read_bytes()
        path.write_bytes(wholes[path][: len(wholes[path]) * 6 // 10])
    (shipper.folder / "plain.log").write_bytes(b"".join(sample.lines[20_000:20_010]))
    cut = shipper.backfill(shipper.folder / "*.log")
    for path in wholes:
        assert_named(cut, path)
    read, accepted, *_, pending = cut.counts()
    assert 6000 <= accepted - 10 < 12_000
    assert (read, pending) == (accepted, 0)
    arrived = set(service.event_ids())
    assert arrived >= set(sample.ids[20_000:20_010])
    for number in range(len(COMPRESSIONS)):
        of_file = [event_id in arrived for event_id in sample.ids[number * 3000 : number * 3000 + 3000]]
        assert 1500 <= sum(of_file) < 3000
        assert of_file == sorted(of_file, reverse=True), "not one stretch from the beginning on"
    assert shipper.read_state().dead_letters == (), "a torn line is no record"

    again = shipper.backfill(shipper.folder / "*.log")
    for path in wholes:
        assert_named(again, path)
    assert again.counts() == (0, 0, 0, 0, 0)

    for path, whole in wholes.items():
        path.write_bytes(whole)
    result = shipper.backfill(shipper.folder / "*.log")
    assert (result.returncode, result.counts()) == (0, (12_010 - accepted, 12_010 - accepted, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[:12_000] + sample.ids[20_000:20_010], 1)


def test_archives_without_their_last_byte_are_named(shipper: Shipper, service: Service, sample: Sample):
    paths = []
    for number, suffix in enumerate(COMPRESSIONS):
        paths.append(archive(shipper, suffix, b"".join(sample.lines[number * 100 : number * 100 + 100])))
        paths[-1].write_bytes(paths[-1].read_bytes()[:-1])
    result = shipper.backfill(shipper.folder / "*.log")
    for path in paths:
        assert_named(result, path)
    assert set(service.event_ids()) <= set(sample.ids[:400])


@pytest.mark.parametrize("what", ["text behind it", "flipped in the middle"])
def test_broken_archives_give_what_is_whole_and_are_named(
    shipper: Shipper, service: Service, sample: Sample, what: str
):
    paths, whole = [], [*sample.ids[9000:9010]]
    for number, suffix in enumerate(COMPRESSIONS):
        first = number * 1000
        parts = [b"".join(sample.lines[start : start + 500]) for start in (first, first + 500)]
        members = [COMPRESSIONS[suffix](part) for part in parts]
        if what == "text behind it":
            whole += sample.ids[first : first + 1000]
            data = b"".join(members) + b"this is not part of it\n" * 30
        else:
            whole += sample.ids[first : first + 500]
            middle = len(members[1]) // 2
            broken = members[1][:middle] + bytes(byte ^ 0x55 for byte in members[1][middle : middle + 64])
            data = members[0] + broken + members[1][middle + 64 :] + members[0]
        paths.append(shipper.folder / f"{suffix}.log")
        paths[-1].write_bytes(data)
    (shipper.folder / "plain.log").write_bytes(b"".join(sample.lines[9000:9010]))
    result = shipper.backfill(shipper.folder / "*.log")
    for path in paths:
        assert_named(result, path)
    assert service.holds(whole)
    if what == "text behind it":
        service.assert_holds_exactly(whole)
        assert shipper.read_state().dead_letters == ()
    # Otherwise a checksum tells that it is broken when some of it has been read: in gzip it stands at the very end.


def test_padding_behind_an_archive_is_no_error(shipper: Shipper, service: Service, sample: Sample):
    """A tape, or a block device, fills up with NULs."""
    path = shipper.folder / "a.gz"
    path.write_bytes(gzip.compress(b"".join(sample.lines[:100])) + b"\0" * 5000)
    result = shipper.backfill(path)
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:100])


def test_the_content_decides_and_not_the_name(shipper: Shipper, service: Service, sample: Sample):
    (shipper.folder / "plain.ndjson.gz").write_bytes(b"".join(sample.lines[:10]))
    for number, compression in enumerate(COMPRESSIONS.values(), 1):
        data = b"".join(sample.lines[number * 10 : number * 10 + 10])
        (shipper.folder / f"{number}.ndjson").write_bytes(compression(data))
    for number, suffix in enumerate(COMPRESSIONS, 5):
        data = b"".join(sample.lines[number * 10 : number * 10 + 10])
        other = next(name for name in COMPRESSIONS if name != suffix)
        (shipper.folder / f"{number}.ndjson.{other}").write_bytes(COMPRESSIONS[suffix](data))
    result = shipper.backfill("*.ndjson*")
    assert (result.returncode, result.counts()) == (0, (90, 90, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:90])


def test_an_archive_holds_what_a_file_may_hold(shipper: Shipper, service: Service, sample: Sample):
    """BOM, CRLF, blank lines, a last line without newline, a batch envelope, CSV; or nothing at all."""
    crlf = b"\xef\xbb\xbf" + b"".join(line.replace(b"\n", b"\r\n\r\n") for line in sample.lines[:50]).rstrip()
    (shipper.folder / "a.gz").write_bytes(gzip.compress(crlf))
    events = b",".join(line.strip() for line in sample.lines[50:100])
    (shipper.folder / "b.zst").write_bytes(zstd.compress(b'{"EventType":"Acquisition","events":[' + events + b"]}"))
    (shipper.folder / "c.bz2").write_bytes(COMPRESSIONS["bz2"](b"[" + b",\n".join(sample.lines[100:150]) + b"]"))
    for suffix, compression in COMPRESSIONS.items():
        (shipper.folder / f"empty.{suffix}").write_bytes(compression(b""))
    (shipper.folder / "bad.xz").write_bytes(COMPRESSIONS["xz"](b'{"bad": 1}\n' + sample.lines[150] + b"{}\n"))
    result = shipper.backfill("*.gz", "*.zst", "*.bz2", "*.xz")
    assert (result.returncode, result.counts()) == (3, (153, 151, 2, 0, 0))
    service.assert_holds_exactly(sample.ids[:151])
    letters = {(letter.raw, letter.start_offset) for letter in shipper.read_state().dead_letters}
    assert letters == {(b'{"bad": 1}', 0), (b"{}", 11 + len(sample.lines[150]))}, "offsets in the content"


def test_bombs_cost_no_memory_and_no_neighbour(shipper: Shipper, service: Service, sample: Sample):
    """200 MB in a line, then 100 MB of blanks, from some kilobytes; less from bzip2, which is slow."""
    for number, suffix in enumerate(COMPRESSIONS):
        count = 4 if suffix == "bz2" else 20
        first, last = sample.lines[number * 2 : number * 2 + 2]
        line, blanks = b"x" * 10_000_000, (b" " * 999 + b"\n") * 10_000
        packed = {part: COMPRESSIONS[suffix](part) for part in (line, blanks)}
        parts = [COMPRESSIONS[suffix](first), *[packed[line]] * count, *[packed[blanks]] * (count // 2)]
        path = shipper.folder / f"{suffix}.log"
        path.write_bytes(b"".join([*parts, COMPRESSIONS[suffix](last)]))
        assert path.stat().st_size < 1_000_000
    result = shipper.backfill(shipper.folder / "*.log", limit_s=20)
    assert (result.returncode, result.counts()) == (3, (12, 8, 4, 0, 0))
    service.assert_holds_exactly(sample.ids[:8])
    assert shipper.read_state().rules == ["oversized"] * 4
    assert result.peak_bytes < 150 << 20, f"{result.peak_bytes >> 20} MiB were held"


def test_one_member_that_unpacks_to_much_costs_no_memory(shipper: Shipper, service: Service, sample: Sample):
    """Its window is larger than what we hold, or its block is; so it is refused by name, or read in pieces."""
    if not shutil.which("zstd"):
        pytest.skip("there is no zstd to write it")
    for name, options in (("long", ["--long=31", "-1"]), ("deep", ["-1"])):
        with (shipper.folder / f"{name}.zst").open("wb") as out:
            packing = subprocess.Popen(["zstd", "-q", "-c", *options], stdin=subprocess.PIPE, stdout=out)
            assert packing.stdin
            packing.stdin.write(sample.lines[0] if name == "long" else sample.lines[1])
            for _ in range(256):
                packing.stdin.write(b"x" * (1 << 20))
            packing.stdin.close()
            assert packing.wait(20) == 0
    (shipper.folder / "plain").write_bytes(sample.lines[2])
    result = shipper.backfill("deep.zst", "long.zst", "plain", limit_s=20)
    assert result.returncode in {3, 4}
    assert result.returncode == 3 or "long.zst" in result.stderr
    assert service.holds(sample.ids[1:3])
    assert result.peak_bytes < 350 << 20, f"{result.peak_bytes >> 20} MiB were held"


def test_archives_that_are_put_into_the_folder_are_followed_to_their_end(
    shipper: Shipper, service: Service, sample: Sample
):
    tail = Tail(shipper, service, sample)
    tail.start("*")
    for number, suffix in enumerate(COMPRESSIONS):
        new = archive(shipper, suffix, b"".join(sample.lines[number * 3000 : number * 3000 + 3000]))
        new.rename(tail.folder / new.name)
        tail.wait(number * 3000 + 3000)
    for number, suffix in enumerate(COMPRESSIONS):  # a log that is flushed as members
        with (tail.folder / f"{suffix}.log").open("ab") as out:
            out.write(COMPRESSIONS[suffix](b"".join(sample.lines[12_000 + number * 10 : 12_010 + number * 10])))
    tail.wait(12_040)
    result = tail.stop(12_040)
    assert [line for line in result.stderr.splitlines() if '"level":"warning"' in line] == []
    tail.append(12_040, 12_050, "other")
    tail.pass_by("*", 12_050)


def test_an_archive_pending_at_a_kill_is_read_on_by_run(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    tail = Tail(shipper, service, sample)
    (tail.folder / "a").write_bytes(gzip.compress(b"".join(sample.lines[:5000])))
    shipper.target = fake.target
    fake.plan(*[OK] * 10)
    fake.default = HANG
    tail.start("*", batch__max_events=100, delivery__concurrency=1)
    tail.running.wait_until(lambda: shipper.read_state().accepted == 1000, "ten batches are saved")
    tail.running.kill()
    first = Counter(fake.event_ids())
    assert len(first) == 1000

    shipper.target = service.target
    tail.start("*")
    rest = set(sample.ids[:5000]) - set(first)
    tail.running.wait_until(lambda: service.holds(rest), "the rest")
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(rest)
    assert (shipper.read_state().read, shipper.read_state().duplicates) == (5000, 0)


def test_an_archive_replaced_in_place_by_another_one_is_read_from_its_start(
    shipper: Shipper, service: Service, sample: Sample
):
    """Same inode, another content: a nightly export that is written over the old one."""
    path = shipper.folder / "export.gz"
    sent = 0
    for count, suffix in ((300, "gz"), (100, "gz"), (500, "zst"), (50, "gz")):
        path.write_bytes(COMPRESSIONS[suffix](b"".join(sample.lines[sent : sent + count])))
        assert shipper.backfill(path).counts() == (count, count, 0, 0, 0)
        sent += count
    path.write_bytes(b"".join(sample.lines[sent : sent + 10]))
    assert shipper.backfill(path).counts() == (10, 10, 0, 0, 0)
    service.assert_holds_exactly(sample.ids[: sent + 10])


def test_files_compressed_between_two_backfills_go_on_where_they_were(
    shipper: Shipper, service: Service, sample: Sample
):
    def lines(number: int, count: int) -> bytes:
        return b"".join(sample.lines[number * 5000 : number * 5000 + count])

    for number, suffix in enumerate(COMPRESSIONS):
        (shipper.folder / f"{suffix}.ndjson").write_bytes(lines(number, 3000))
    assert shipper.backfill("*.ndjson").counts() == (12_000, 12_000, 0, 0, 0)
    for number, suffix in enumerate(COMPRESSIONS):
        archive(shipper, suffix, lines(number, 4000))
        (shipper.folder / f"{suffix}.ndjson").unlink()
    assert shipper.backfill(shipper.folder / "*.log").counts() == (4000, 4000, 0, 0, 0)
    assert shipper.backfill(shipper.folder / "*.log").counts() == (0, 0, 0, 0, 0)
    for number, suffix in enumerate(COMPRESSIONS):  # and unpacked again, where they go on
        (shipper.folder / f"{suffix}.ndjson").write_bytes(lines(number, 4500))
        (shipper.folder / f"{suffix}.log").unlink()
    assert shipper.backfill("*.ndjson").counts() == (2000, 2000, 0, 0, 0)
    wanted = [event_id for number in range(4) for event_id in sample.ids[number * 5000 : number * 5000 + 4500]]
    assert service.times_received() == dict.fromkeys(wanted, 1)
