"""The state between two runs: who holds it, how it grows, when it is written, and how much memory it takes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper, changed, event_ids, wait_until
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.files import Tail, append, log_lines
from tests.e2e.surroundings import numbered
from tests.processes import memory_bytes

ORDERLY = {**QUICK, "delivery.concurrency": 1, "batch.max_events": 10, "batch.unique_consumers": "false"}


# A locked state store ---------------------------------------------------------------------------------------------


def test_a_locked_state_directory_is_refused_even_if_its_holder_is_stopped_and_free_after_its_end(
    shipper: Shipper, service: Service, sample: Sample, file: Path
):
    holder = shipper.open_pipe(b"{}\n" + sample.lines[400], settings=QUICK)
    holder.wait_until(lambda: shipper.read_state().read == 2, "it works")

    status = shipper.run("status", "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["state"]["spool"]["segments"] == 1, "the records it has read"
    for arguments in (["status"], ["dead-letters", "list"], ["validate", file], ["config", "show"]):
        result = shipper.run(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)

    # Whatever path is used for the directory: a live lock is never considered stale.
    holder.process.send_signal(signal.SIGSTOP)
    link = shipper.folder / "link"
    link.symlink_to(shipper.state)
    ways = [
        (["backfill", file], link),
        (["pipe"], Path("state")),
        (["run", "--set", f'input.include=["{file}"]'], link),
    ]
    for command, directory in ways:
        result = shipper.run(*command, settings={"state.directory": directory})
        assert (result.returncode, result.stdout) == (5, ""), command
        assert f"process {holder.pid}" in result.stderr
        assert str(directory) in result.stderr
    assert service.stored == 1
    assert (shipper.state / "lock").read_text() == f"{holder.pid}\n"
    holder.process.send_signal(signal.SIGCONT)
    holder.kill()
    (shipper.state / "lock").write_text(f"{os.getpid()}\n")  # its process id now belongs to another process
    assert shipper.backfill(file).counts() == (300, 300, 0, 0, 0)


def test_one_of_many_simultaneous_starts_works_and_the_others_name_it(
    shipper: Shipper, fake: FakeService, sample: Sample, file: Path
):
    """With an empty state store, as left by a crash at creation: it counts as new."""
    fake.default = HANG
    shipper.state.mkdir(mode=0o700)
    (shipper.state / "state.db").touch()
    started = [shipper.start("backfill", file, "--summary", "json", check=False) for _ in range(3)]
    wait_until(lambda: sum(each.has_ended for each in started) == 2, "all but one have ended")
    (worker,) = [each for each in started if not each.has_ended]
    for each in started:
        if each is not worker:
            result = each.finish()
            result.assert_ended(5, f"process {worker.pid}")
    fake.default = OK
    fake.release()
    assert worker.finish().counts() == (300, 300, 0, 0, 0)
    assert Counter(fake.event_ids()) == Counter(sample.ids[:300])


def test_a_state_that_was_used_with_another_service_is_reported_by_check_and_at_the_next_start(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample, file: Path
):
    """What the first service accepted is not sent to the second, for example after a test with a sandbox."""
    shipper.target = service.target
    assert shipper.backfill(file).returncode == 0
    warning = f"was last used with {shipper.target.base_url},"
    shipper.target = fake.target
    assert warning in shipper.run("check").stdout
    texts = [shipper.backfill(file).stderr, shipper.backfill(file).stderr, shipper.run("check").stdout]
    assert [warning in text for text in texts] == [True, False, False], "it is said once"
    assert not fake.stored


# Growth of the state store ----------------------------------------------------------------------------------------


def read_file_streams(shipper: Shipper) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(f"file:{shipper.state}/state.db?mode=ro", uri=True, timeout=10)) as db:
        return db.execute("SELECT stream_id, path FROM streams ORDER BY stream_id").fetchall()


def add_gone_streams(shipper: Shipper, count: int) -> None:
    """Add streams of files that were read to the end and are deleted to the state store."""
    device = shipper.folder.stat().st_dev
    with closing(sqlite3.connect(shipper.state / "state.db")) as db, db:
        first = db.execute("SELECT youngest_stream_id FROM totals").fetchone()[0] + 1
        db.executemany(
            "INSERT INTO streams (stream_id, kind, path, device, inode, checkpoint, head_bytes, head_digest, "
            "marker_bytes, marker_digest, updated_at, size) VALUES (?, 'file', ?, ?, ?, 400, 400, ?, 64, ?, ?, 400)",
            [
                (
                    number,
                    f"{shipper.folder}/logs/gone.{number}.ndjson",
                    device,
                    10**15 + number,
                    number.to_bytes(16),
                    number.to_bytes(16),
                    1.7e9 + number,
                )
                for number in range(first, first + count)
            ],
        )
        db.execute("UPDATE totals SET youngest_stream_id = ?", (first + count - 1,))


def test_deleted_files_are_forgotten_except_the_most_recent_and_those_not_read_to_their_end(
    shipper: Shipper, service: Service, fake: FakeService, tail: Tail
):
    """Of the two oldest, one still exists, and the other reappears with a missing disk and is read further."""
    count = 20_000
    unread = tail.append(10, 110, "app.ndjson.1")
    fake.plan(OK, OK)
    fake.default = HANG
    old = tail.append(0, 10)
    os.utime(old, (1, 1))  # the oldest file is read first
    running = shipper.start("backfill", tail.folder, settings=ORDERLY)
    running.wait_until(lambda: shipper.read_state().accepted == 20, "the first file and a part of the other are saved")
    running.kill()
    oldest = read_file_streams(shipper)
    assert sorted(path for _, path in oldest) == [str(old), str(unread)]
    shipper.target = service.target
    away = unread.rename(shipper.folder / "away.ndjson")
    add_gone_streams(shipper, count)
    size_bytes = (shipper.state / "state.db").stat().st_size

    tail.append(110, 120)
    new = tail.append(120, 130, "app.ndjson.2")
    result = shipper.backfill(tail.file, new, fresh=True)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0)), "reading resumed in the known file"
    assert result.peak_bytes < 150 << 20
    left = read_file_streams(shipper)
    assert set(oldest) <= set(left)
    assert len(left) <= 10_003
    gone = [stream_id for stream_id, path in left if "/gone." in path]
    youngest = max(stream_id for stream_id, _ in oldest) + count
    assert gone == list(range(youngest + 1 - len(gone), youngest + 1)), "the oldest are forgotten first"
    assert len(gone) >= 9_000, "more were forgotten than necessary"
    state = shipper.read_state()
    assert (state.read, state.accepted) == (40, 40), "the counts are kept"
    assert (shipper.state / "state.db").stat().st_size < size_bytes + (4 << 20)

    away.rename(unread)
    assert shipper.backfill(unread).counts() == (90, 90, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(tail.ids(range(20, 130)), 1)
    with closing(sqlite3.connect(shipper.state / "state.db")) as db:
        missed = db.execute("SELECT unreachable_bytes FROM totals").fetchone()
    assert missed == (sum(map(len, tail.sample.lines[20:110])),), "settled files are not reported as missing"


def test_files_deleted_during_a_run_do_not_accumulate_in_the_state(shipper: Shipper, service: Service, tail: Tail):
    tail.append(0, 10)
    assert shipper.backfill(tail.file).returncode == 0
    add_gone_streams(shipper, 10_950)
    running = tail.start(input__rotate_wait_seconds=0.1, log__level="debug")  # logs repeated lines, too
    paths = [tail.append(number, number + 1, f"app.ndjson.{number}") for number in range(10, 110)]
    tail.wait(110)
    running.wait_until(lambda: shipper.read_state().accepted == 110, "they are read and settled")
    for path in paths:
        path.unlink()
    running.wait_until(lambda: len(log_lines(running, "source_closed")) == 100, "they are closed")
    tail.append(110, 111, "app.ndjson.110")
    tail.wait(111)
    running.wait_until(lambda: len(read_file_streams(shipper)) < 10_400, "the oldest are forgotten")
    assert len(read_file_streams(shipper)) >= 10_000
    assert running.stop().returncode == 0
    assert set(service.times_received().values()) == {1}


# When it is saved --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "pipe"])
def test_lines_that_are_no_records_become_dead_letters_with_their_position_and_move_the_checkpoint(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail, command: str
):
    """After a kill, none is read again, each is one dead letter, and no other line is."""
    odd = [b"\xff\xfe{\x00", sample.lines[2].rstrip().replace(b'"Username":"', b'"Username":"\xe9'), b"\xc3"]
    lines = [*[b"not json"] * 37, *odd, sample.lines[0].rstrip(), *[b"[]\n\n "] * 59]
    data = b"".join(line + b"\n" for line in lines)
    if command == "run":
        tail.file.write_bytes(data)
        running = tail.start()
    else:
        running = shipper.open_pipe(data, settings=QUICK)
    running.wait_until(lambda: shipper.read_state().read == 100, "all are settled")
    running.kill()
    state = shipper.read_state()
    assert (state.accepted, state.dead_lettered) == (1, 99)
    letters = state.dead_letters[37:40]
    assert [letter.raw for letter in letters] == odd
    assert [data[letter.start_offset : letter.end_offset] for letter in letters] == odd
    assert {letter.rule for letter in letters} <= {"encoding", "json"}
    if command == "run":
        running = tail.start()
        tail.append(1, 2)
        running.wait_until(lambda: service.stored == 2, "the later records")
        assert running.stop().returncode == 0
    else:
        assert shipper.pipe(sample.lines[1]).counts() == (1, 1, 0, 0, 0)
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (101, 2, 99)
    assert service.times_received() == dict.fromkeys(sample.ids[:2], 1)


# Incomplete lines ------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_read_once_when_complete_wherever_it_is_torn_and_however_the_reader_ends(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    """
    Within the byte order mark, within a two-byte character, at the brace, and before the newline.

    One file for each position; between two starts, each gets a byte and then the rest, so it is torn twice.
    """
    places: list[Callable[[bytes], int]] = [
        lambda line: 1,
        lambda line: line.index("Æ".encode()) + 1,
        lambda line: len(line) - 2,
    ]
    other = tail.append(10, 11, "app.ndjson.other")
    torn: list[tuple[Path, bytes, int]] = []
    for number, place in enumerate(places):
        document = json.loads(changed(sample.lines[number], Username="Ærøskøbing"))
        line = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        line = b"\xef\xbb\xbf" + line if number == 0 else line
        torn.append((tail.folder / f"app.ndjson.{number}", line, place(line)))
    wanted = [10]
    for start in range(3):
        for path, line, place in torn:
            cuts = [0, place, place + 1, len(line)]
            append(path, line[cuts[start] : cuts[start + 1]])
        running = tail.start()
        tail.append(11 + start, 12 + start, other.name)
        wanted += [11 + start] + [0, 1, 2] * (start == 2)
        tail.wait(wanted)
        running.wait_until(lambda wanted=tuple(wanted): shipper.read_state().accepted == len(wanted), "it is saved")
        if start == 0:
            running.kill()
        else:
            assert running.stop().returncode == 0
        assert service.times_received() == dict.fromkeys(tail.ids(wanted), 1), start
    assert {json.loads(service.event(each)["raw"])["Username"] for each in sample.ids[:3]} == {"Ærøskøbing"}
    assert shipper.read_state().dead_letters == ()


# Memory -----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_while_the_service_is_down_and_input_arrives(
    shipper: Shipper, fake: FakeService, sample: Sample, tail: Tail
):
    fake.default = Reply(status=503)
    rounds, lines_each = 3, 2500
    wide = [line[:-2] + b" " * 1400 + b"}\n" for line in sample.lines[:lines_each]]  # many bytes in few records
    settings = {"batch__max_events": 200, "delivery__concurrency": 2}
    running = tail.start(**settings, delivery__retry_initial_seconds=0.02, delivery__retry_max_seconds=0.05, fresh=True)
    written: list[str] = []
    resident: list[int] = []
    for number in range(rounds):
        lines = numbered(wide, number)
        append(tail.file, *lines)
        written += event_ids(lines)
        before = fake.requests
        running.wait_until(lambda before=before: fake.requests >= before + 20, "it retries")
        resident.append(memory_bytes(running.pid))
    assert tail.file.stat().st_size > 12_000_000
    # The first round has filled all buffers.
    assert max(resident) - resident[0] < 6 << 20, [size >> 20 for size in resident]
    assert shipper.read_state().read == 0, "the offset moved"
    assert len(set(fake.event_ids(fake.bodies))) <= 400, "only batches in flight are retried"
    fake.default = OK
    running.wait_until(lambda: shipper.read_state().accepted == len(written), "it catches up")
    assert running.stop().returncode == 0
    assert Counter(fake.event_ids()) == Counter(written)


LONG = 160 << 20


def write_long_line(path: Path, *, newline: bool = True) -> None:
    """Append a sparse line."""
    with path.open("r+b" if path.exists() else "wb") as out:
        out.seek(0, os.SEEK_END)
        start = out.tell()
        out.write(b"x")
        out.seek(start + LONG - 2)
        out.write(b"y\n" if newline else b"yz")


def test_a_line_of_160_megabytes_becomes_a_dead_letter_by_position_and_takes_no_memory(
    shipper: Shipper, service: Service, sample: Sample, tail: Tail
):
    tail.append(0, 10)
    start = tail.file.stat().st_size
    write_long_line(tail.file)
    tail.append(10, 20)
    with tail.file.open("rb") as stdin:
        result = shipper.run("pipe", "--summary", "json", stdin=stdin, fresh=True)
    assert (result.returncode, result.counts()) == (3, (21, 20, 1, 0, 0))
    assert 10 << 20 < result.peak_bytes < 130 << 20
    service.assert_holds_exactly(sample.ids[:20])
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.start_offset) == ("oversized", start)
    assert len(letter.raw) < 2 << 20
    assert letter.end_offset < start + (2 << 20), "the spool keeps only as much as proves that the line is too long"


def test_a_line_of_160_megabytes_being_written_at_a_kill_becomes_one_dead_letter(shipper: Shipper, tail: Tail):
    tail.append(0, 10)
    start = tail.file.stat().st_size
    write_long_line(tail.file, newline=False)
    other = tail.append(20, 21, "app.ndjson.2")
    running = tail.start()
    tail.wait([*range(10), 20])
    tail.append(21, 22, other.name)
    tail.wait([*range(10), 20, 21])
    running.wait_until(lambda: shipper.read_state().accepted == 12, "it is saved")
    running.kill()
    assert shipper.read_state().dead_letters == ()
    append(tail.file, b"the end\n")
    tail.append(10, 20)
    running = tail.start(fresh=True)
    tail.wait(22, limit_s=30)
    tail.stop(22, dead_lettered=1)
    assert running.peak_bytes < 130 << 20
    (letter,) = shipper.read_state().dead_letters
    assert letter.start_offset == start
    assert letter.end_offset - start in {LONG + len(b"the end"), LONG + len(b"the end\n")}
