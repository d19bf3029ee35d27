"""Files are renamed, truncated, replaced and deleted under load: nothing is lost or read twice."""

from __future__ import annotations

import json
import os
import shutil
import socket
from functools import partial

import pytest

from tests.e2e.driver import Service, Shipper
from tests.e2e.files import Tail, append, log_lines, warnings_of, where_permissions_hold

GLOB = "app.ndjson*"

# Renamed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("include", "rotations"), [(GLOB, 30), ("app.ndjson", 8)])
def test_many_renames_under_load_lose_and_repeat_nothing(tail: Tail, include: str, rotations: int):
    """The writer finishes a torn line and writes more to the old descriptor after the new file was created."""
    lines_each, late_each = 150, 20
    lines = tail.sample.lines
    tail.start(include, input__rotate_wait_seconds=1, log__level="debug")  # logs repeated lines, too
    sent = 0
    old = tail.file.open("ab", buffering=0)
    try:
        for rotation in range(rotations):
            for start in range(sent, sent + lines_each, 10):
                old.write(b"".join(lines[start : start + 10]))
            sent += lines_each
            old.write(lines[sent][:100])
            # Keep the reader close to the writer; a file that leaves the glob unseen cannot be found.
            if rotation % 4 == 0 or include != GLOB:
                tail.wait([sent - lines_each])
            tail.file.rename(tail.folder / f"app.ndjson.{rotation}")
            new = tail.file.open("ab", buffering=0)
            old.write(lines[sent][100:])
            for line in lines[sent + 1 : sent + late_each]:
                old.write(line)
            sent += late_each
            old.close()
            old = new
    finally:
        old.close()
    tail.wait(sent)
    result = tail.stop(sent)
    assert len(log_lines(result, "source_opened")) >= rotations  # the last file is empty
    assert len(log_lines(result, "source_renamed")) >= (rotations / 4 - 1 if include == GLOB else 0)


# Copied and truncated ---------------------------------------------------------------------------------------------


def test_no_record_is_lost_if_a_writer_leaves_a_hole_after_a_truncation(tail: Tail, shipper: Shipper, service: Service):
    """
    A writer without O_APPEND continues at its old offset, so its file begins with NULs.

    The NULs do not identify the original of a copy. The copy may be read as a separate file, but must not be skipped.
    """
    with tail.file.open("wb", buffering=0) as writer:
        writer.write(b"".join(tail.sample.lines[:60]))
        tail.start(GLOB)
        tail.wait(60)
        sent = 60
        for number in (1, 2):
            with tail.held():
                writer.write(b"".join(tail.sample.lines[sent : sent + 10]))
                shutil.copy(tail.file, tail.folder / f"app.ndjson.{number}")
                os.truncate(tail.file, 0)
                writer.write(b"".join(tail.sample.lines[sent + 10 : sent + 20]))
                sent += 20
            tail.wait(sent)
        assert tail.file.read_bytes().startswith(b"\0" * 10_000), "the case did not occur"
        assert tail.running.stop().returncode == 0
        before = shipper.read_state()
        assert before.duplicates <= 60
        writer.write(b"".join(tail.sample.lines[sent : sent + 10]))
    tail.start(GLOB)
    tail.wait(sent + 10)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(sent + 10))
    after = shipper.read_state()
    assert after.dead_letters == ()
    assert (after.read - before.read, after.duplicates) == (10, before.duplicates), "its position identifies the file"


# Identification ---------------------------------------------------------------------------------------------------


def test_a_busy_file_that_begins_like_a_quiet_one_is_not_delayed(tail: Tail, shipper: Shipper, service: Service):
    """It looks like a copy of the quiet one and is written all the time."""
    documents = [json.loads(line) for line in tail.sample.lines[2000:4000]]
    rows = {
        "ndjson": tail.sample.lines[:2000],
        "csv": [",".join(each).encode() + b"\n" for each in (documents[0], *(map(str, d.values()) for d in documents))],
    }
    for content in rows:
        (tail.folder / f"quiet.{content}").write_bytes(rows[content][0])
    tail.start(["*.ndjson", "*.csv"], input__rotate_wait_seconds=0.5, input__format="auto")
    tail.running.wait_until(lambda: len(log_lines(tail.running, "source_opened")) == 2, "the quiet files are open")
    tail.append(4000, 4001, "more.ndjson")
    tail.wait([4000])
    written = 0

    def write_until_first_arrives() -> bool:
        nonlocal written
        for content, lines in rows.items():
            append(tail.folder / f"busy.{content}", lines[written])
        written += 1
        return written > 2 and service.holds(tail.ids([1, 2000]))

    tail.running.wait_until(write_until_first_arrives, "the first lines arrive while the files grow")
    wanted = [*range(written), *range(2000, 2000 + written - 1), 4000]
    tail.wait(wanted)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(wanted))
    assert shipper.read_state().dead_letters == ()


# Deleted and replaced ---------------------------------------------------------------------------------------------


def test_a_file_that_replaces_a_deleted_one_of_its_name_is_read_as_soon_as_the_kernel_reports_it(tail: Tail):
    tail.append(0, 50)
    tail.start(input__poll_interval_seconds=3600)
    tail.wait(50)
    for _ in range(3):
        tail.file.unlink()
        tail.deliver(50)
    tail.stop(200)


def test_a_temporary_lack_of_permission_is_logged_once_and_loses_nothing(tail: Tail):
    """On a file and on a folder, while the shipper is stopped and while it runs."""
    prefix = where_permissions_hold()
    locked, probe = tail.folder / "locked", tail.folder.parent / "probe"
    locked.mkdir()
    probe.mkdir()
    start = partial(
        tail.start,
        [GLOB, "locked/*", str(probe / "*")],
        prefix=prefix,
        input__rotate_wait_seconds=0.1,
        input__poll_interval_seconds=0.05,
    )
    inside = tail.append(0, 10, "locked/a.ndjson")
    tail.append(10, 20)
    start()
    tail.wait(20)
    tail.stop(20)
    tail.append(100, 110)
    tail.file.chmod(0)
    sent = 20
    for is_running in (False, True):
        with inside.open("ab") as writer:
            locked.chmod(0)
            try:
                if not is_running:
                    start()
                for number in range(sent, sent + 10):  # each found by a separate poll
                    tail.append(number, number + 1, probe / str(number))
                    tail.wait(number + 1)
                writer.write(b"".join(tail.sample.lines[sent + 10 : sent + 20]))
            finally:
                locked.chmod(0o700)
        sent += 20
        tail.wait(sent)
    (warning,) = warnings_of(tail.running, tail.file)
    assert warning["event"] == "source_refused"
    assert "ermission" in warning["error"]
    tail.file.chmod(0o600)
    wanted = [*range(sent), *range(100, 110)]
    tail.wait(wanted)
    tail.append(110, 120)
    wanted += range(110, 120)
    tail.wait(wanted)
    assert len(warnings_of(tail.stop(wanted), tail.file)) == 1


# Excluded files ----------------------------------------------------------------------------------------------------


def test_special_files_are_refused_once_and_files_written_by_shipper_are_never_an_input(
    tail: Tail, shipper: Shipper, service: Service
):
    """The glob matches its log, its output and its state, directly and through a link."""
    spool = shipper.state / "spool"
    spool.mkdir(mode=0o700, parents=True)
    shipper.state.chmod(0o700)
    (spool / "foreign.txt").write_bytes(tail.sample.lines[1000])
    (shipper.state / "dead.ndjson").write_bytes(tail.sample.lines[1001])
    (tail.folder / "app.ndjson.state").symlink_to(shipper.state)
    (tail.folder / "app.ndjson.db").symlink_to(shipper.state / "state.db")
    os.mkfifo(tail.folder / "app.ndjson.fifo")
    (tail.folder / "app.ndjson.null").symlink_to("/dev/null")
    (tail.folder / "app.ndjson.zero").symlink_to("/dev/zero")
    (tail.folder / "app.ndjson.loop").symlink_to("app.ndjson.loop")
    (tail.folder / "app.ndjson.nowhere").symlink_to("nothing-there")
    tail.file.write_bytes(b'{"bad": 1}\n')
    tail.append(0, 10)
    os.link(tail.file, tail.folder / "app.ndjson.link")  # another name of an input is no file of shipper
    include = [GLOB, "app.ndjson.*/**", str(shipper.folder / "output" / "*"), str(shipper.state / "**")]
    with socket.socket(socket.AF_UNIX) as listener:
        descriptor = os.open(tail.folder, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{descriptor}/app.ndjson.socket")  # a socket's path is limited to 107 bytes
        finally:
            os.close(descriptor)
        tail.start(include, input__poll_interval_seconds=0.05)
        assert list((shipper.folder / "output").iterdir()), "its log is elsewhere"
        for number in range(10, 20):  # each found by a separate poll
            tail.append(number, number + 1, f"app.ndjson.{number}")
            tail.wait(number + 1)
        result = tail.stop(20, dead_lettered=1)
    for name in ("fifo", "null", "zero", "socket"):
        path = tail.folder / f"app.ndjson.{name}"
        (warning,) = warnings_of(result, path)
        assert warning["event"] == "source_refused", name
        assert str(path) in warning["error"], name
    assert len(warnings_of(result, tail.folder / "app.ndjson.loop")) <= 1
    assert not warnings_of(result, tail.folder / "app.ndjson.nowhere")
    assert len(shipper.read_state().dead_letters) == 1
    tail.start(include)
    tail.deliver(10)
    assert tail.running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(30))
