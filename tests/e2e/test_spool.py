"""Standard input of every kind and format is kept in the spool until it is settled; the next start ships leftovers."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import HASTY, Service, Shipper, event_ids
from tests.e2e.fake_service import HANG, OK, FakeService
from tests.e2e.surroundings import csv_of, cut, documents, feeding, spooled, unread_bytes, write_in_pieces

QUICK = {"batch.linger_seconds": 0.02, "state.commit_interval_seconds": 0.02}
# One record at a time, in order, so that the records sent are known.
ORDERLY = {**QUICK, "delivery.concurrency": 1, "batch.max_events": 10, "batch.unique_consumers": "false"}
ODD_NAME = 'two\nlines, and "quotes"; blanks '


def written_as(form: str, lines: list[bytes]) -> bytes:
    """Return the events of these lines in an input format."""
    events = documents(lines)
    match form:
        case "ndjson":
            return b"".join(lines)
        case "csv with newlines":
            return csv_of([{**event, "Username": ODD_NAME} for event in events], delimiter=";")
        case "envelopes":
            halves = [events[: len(events) // 2], events[len(events) // 2 :]]
            return b"\n".join(json.dumps({"EventType": "Acquisition", "events": half}).encode() for half in halves)
        case "pretty array":
            return json.dumps(events, indent=2).encode()
    raise AssertionError(form)


def stored_name(service: Service, event_id: str) -> str:
    return json.loads(service.event(event_id)["raw"])["Username"]


def leave_behind(shipper: Shipper, fake: FakeService, data: bytes, last: bytes, **settings: Any) -> None:
    """
    Kill a `pipe` that has read all of this from a running producer and sent only the first ten events.

    Args:
        last: Bytes that are in the spool only if everything is.
    """
    fake.plan(OK)
    fake.default = HANG
    whole_batches = {**ORDERLY, "batch.linger_seconds": 60}
    running = shipper.open_pipe(settings={**whole_batches, **settings})
    write_in_pieces(running, cut(data, range(0, len(data), 2500)))  # a read is never split between segments
    running.wait_until(
        lambda: any(last in content for _, content in spooled(shipper)) and shipper.read_state().accepted == 10,
        "everything is spooled, and the first batch is saved",
    )
    running.kill()
    assert shipper.read_state().read < data.count(b'"EventId"') or b'"EventId"' not in data


# Kinds of standard input ------------------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[tuple[FileIO, FileIO]]:
    """The user's and the program's end of a terminal without echo."""
    user, program = (FileIO(descriptor, "r+") for descriptor in pty.openpty())
    attributes = termios.tcgetattr(program)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(program, termios.TCSANOW, attributes)
    with user, program:
        yield user, program


@pytest.mark.parametrize("ending", ["Ctrl-D", "hang-up"])
def test_input_typed_at_a_terminal_is_shipped_line_by_line(
    shipper: Shipper, service: Service, sample: Sample, terminal: tuple[FileIO, FileIO], ending: str
):
    user, program = terminal
    running = shipper.start("pipe", "--summary", "json", stdin=program, settings=QUICK)
    program.close()
    for count, line in enumerate(sample.lines[:3], 1):
        user.write(line)
        running.wait_until(lambda count=count: service.stored == count, "a typed line is shipped at once")
    user.write(sample.lines[3])
    if ending == "Ctrl-D":
        user.write(b"\x04")
    else:
        running.wait_until(lambda: service.stored == 4, "all lines")
        user.close()
    result = running.finish()
    assert (result.returncode, result.counts()) == (0, (4, 4, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:4])


@pytest.fixture
def fifo(shipper: Shipper) -> Path:
    path = shipper.folder / "fifo"
    os.mkfifo(path)
    return path


def test_a_named_pipe_held_open_accepts_several_writers_until_sigterm(
    shipper: Shipper, service: Service, sample: Sample, fifo: Path
):
    running = shipper.start(
        "pipe", "--summary", "json", prefix=["sh", "-c", f'exec "$0" "$@" <> {fifo}'], settings=QUICK
    )
    for start in (0, 100, 200):
        with fifo.open("wb") as out:
            out.writelines(sample.lines[start : start + 100])
        end = start + 100
        running.wait_until(lambda end=end: service.stored == end, "this writer's lines")
    with fifo.open("wb") as one, fifo.open("wb") as other:  # two at once, with complete lines
        for number in range(300, 340):
            out = one if number % 2 else other
            out.write(sample.lines[number])
            out.flush()
    running.wait_until(lambda: service.stored == 340, "both writers' lines")
    running.wait_until(lambda: shipper.read_state().accepted == 340, "everything is saved")
    assert not running.has_ended, "the end of a writer ended the input"
    result = running.stop()
    assert (result.returncode, result.counts()) == (4, (340, 340, 0, 0, 0)), "the input had not ended"
    assert result.summary["outcome"] == "drained"
    assert service.times_received() == dict.fromkeys(sample.ids[:340], 1)
    held = {str(path): len(content) for path, content in spooled(shipper)}
    settled = {path: offset for _, _, path, offset in shipper.read_state().checkpoints}
    assert held.items() <= settled.items(), "something is left over"


def test_a_stop_stores_what_a_named_pipe_holds_to_the_end_of_a_line_and_the_next_process_reads_the_rest(
    shipper: Shipper, fake: FakeService, sample: Sample, fifo: Path
):
    """Even if the spool is full."""
    fake.plan(HANG)
    count = 10_000  # more than the pipe holds and the first process has read by then
    with open(os.open(fifo, os.O_RDWR), "r+b", buffering=0) as holder:
        settings = {**ORDERLY, "spool.max_bytes": 100_000, "spool.segment_bytes": 100_000}
        running = shipper.start("pipe", "--summary", "json", stdin=holder, settings=settings)
        writer = threading.Thread(target=lambda: fifo.write_bytes(b"".join(sample.lines[:count])), daemon=True)
        writer.start()
        running.wait_until(lambda: fake.requests and unread_bytes(holder.fileno()), "the spool is full")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("drain_started")
        fake.release()
        assert running.finish().returncode == 4
        assert writer.is_alive(), "it was stopped before the end"
        again = shipper.start("pipe", "--summary", "json", stdin=holder, settings=QUICK)
        again.wait_until(lambda: len(fake.event_ids()) == count, "everything arrives")
        writer.join(10)
        assert not writer.is_alive()
        assert again.stop().returncode == 4
    assert shipper.read_state().dead_lettered == 0
    assert set(fake.event_ids()) == set(sample.ids[:count])


def test_a_socket_works_as_standard_input_even_if_it_is_non_blocking(
    shipper: Shipper, service: Service, sample: Sample
):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        running = shipper.start("pipe", "--summary", "json", stdin=theirs, settings=QUICK)
        ours.sendall(b"".join(sample.lines[:50]))
        running.wait_until(lambda: service.stored == 50, "the records sent so far")
        ours.sendall(b"".join(sample.lines[50:100]))
        ours.shutdown(socket.SHUT_WR)
        result = running.finish()
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:100])


def test_a_reset_input_connection_is_reported_and_loses_no_record(shipper: Shipper, service: Service, sample: Sample):
    """The input is incomplete, so the exit code must not be 0; records read are delivered now or later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        with theirs:
            running = shipper.start("pipe", "--summary", "json", stdin=theirs, settings=QUICK)
            ours.sendall(b"".join(sample.lines[:50]))
            running.wait_until(lambda: service.stored == 50, "the records sent so far")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ours.close()
            result = running.finish()
    assert result.returncode in {1, 2, 4}, result
    assert "standard input" in result.stderr
    service.assert_holds_exactly(sample.ids[:50])


# Formats ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """Input of a `pipe` before it is killed, with settings where detection would be wrong."""

    data: bytes
    settings: dict[str, object]


def test_leftovers_of_killed_pipes_are_shipped_in_order_in_every_format_without_mixing_inputs(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample, rng: Random
):
    """
    With any splits and any fsync setting: the kernel keeps what a killed process wrote.

    A table keeps its own header when the next input has another column order or is no table. A torn line is not joined
    with the next input: it may become a dead letter or be lost with the process. Only invalid records become dead
    letters.
    """
    bad = list(range(30, 600, 120))
    lines = [line.replace(b'"IP":"', b'"IP":"x') if at in bad else line for at, line in enumerate(sample.lines[:610])]
    parts = [lines[start : start + 120] for start in range(0, 600, 120)]
    other_events = documents(parts[1])
    other_table = csv_of(other_events, columns=[*reversed(other_events[0]), "No name!"], delimiter="#")
    torn = lines[600][:150]
    inputs = [
        Input(written_as("csv with newlines", parts[0]).rstrip(b"\n"), {"spool.fsync": "never"}),
        Input(other_table, {"input.format": "csv", "input.csv_delimiter": "#"}),
        Input(written_as("envelopes", parts[2]), {"spool.fsync": "always"}),
        Input(written_as("pretty array", parts[3]), {"spool.fsync": "interval", "spool.fsync_interval_seconds": 0.01}),
        Input(written_as("ndjson", parts[4]) + torn, {}),
    ]
    fake.default = HANG
    for number, each in enumerate(inputs):  # each is killed with the leftovers of earlier ones
        data = b"\xef\xbb\xbf" + each.data
        earlier = {path for path, _ in spooled(shipper)}
        requests = fake.requests
        settings = {**ORDERLY, "spool.segment_bytes": 4000, **each.settings}
        running = shipper.open_pipe(settings=settings)
        write_in_pieces(running, cut(data, [1, 2, 3, 4, *rng.sample(range(len(data)), 20)]))
        if not data.endswith(torn):
            running.stdin.close()  # the last record needs no terminator
        last = sample.ids[number * 120 + 119].encode()
        running.wait_until(lambda last=last: any(last in each for _, each in spooled(shipper)), "the input is spooled")
        running.wait_until(lambda requests=requests: fake.requests > requests, "sending has begun")
        running.kill()
        segments = [content for path, content in spooled(shipper) if path not in earlier]
        assert len(segments) > 3, f"input {number} is not in several segments"
        if number == 0:
            assert all(content.count(b'"') % 2 == 0 for content in segments), "a segment ends within quotes"
    assert shipper.read_state().accepted == 0

    shipper.target = service.target
    # Not detectable by its first bytes.
    batch = b'\n \n{"events" : ' + json.dumps(documents(lines[600:])).encode() + b"}"
    result = shipper.pipe(batch, settings={**ORDERLY, "batch.max_events": 100, "input.format": "batch"})
    letters = shipper.read_state().dead_letters
    assert [letter.raw for letter in letters[5:]] in ([], [torn])
    assert [letter.rule for letter in letters[:5]] == ["ip"] * 5
    assert all(sample.ids[at].encode() in letter.raw for at, letter in zip(bad, letters, strict=False))
    assert (result.returncode, result.counts()) == (3, (605 + len(letters), 605, len(letters), 0, 0))
    assert service.event_ids() == [event_id for at, event_id in enumerate(sample.ids[:610]) if at not in bad]
    assert stored_name(service, sample.ids[29]) == ODD_NAME
    for at in (121, 599, 609):
        assert stored_name(service, sample.ids[at]) == json.loads(sample.lines[at])["Username"]
    assert spooled(shipper) == []


def test_an_unfinished_array_element_is_reported_and_earlier_records_are_not_lost(
    shipper: Shipper, service: Service, sample: Sample
):
    settings = {**QUICK, "input.max_record_bytes": 1000}
    running = shipper.open_pipe(settings=settings, fresh=True)
    head = b"[" + b",".join(line.rstrip() for line in sample.lines[:20])
    feeding(running, head + b',{"EventId":"' + b"x" * 4_000_000)
    result = running.finish()
    assert result.returncode not in {0, 3}
    assert "input.max_record_bytes" in result.stderr
    assert running.peak_bytes < 200 << 20
    again = shipper.pipe()
    assert again.returncode in {0, 3}
    service.assert_holds_exactly(sample.ids[:20])


# The end of the input ---------------------------------------------------------------------------------------------


TORN: dict[str, Callable[[list[bytes]], tuple[bytes, bytes]]] = {
    "row with an open quote": lambda lines: (
        csv_of(documents(lines)),
        csv_of([{**json.loads(lines[0]), "Username": ODD_NAME}], header=False).split(b"\n")[0] + b"\n and mo",
    ),
    "element within a string": lambda lines: (
        b"[" + b",".join(line.rstrip() for line in lines) + b", ",
        b'{"Username":"},{',
    ),
}


@pytest.mark.parametrize("torn", TORN)
def test_the_torn_last_record_of_an_input_becomes_a_dead_letter_byte_for_byte(
    shipper: Shipper, service: Service, sample: Sample, torn: str
):
    whole, rest = TORN[torn](sample.lines[:5])
    result = shipper.pipe(whole + rest)
    assert (result.returncode, result.counts()[1], result.counts()[4]) == (3, 5, 0)
    service.assert_holds_exactly(sample.ids[:5])
    # Text that is no row is kept as lines; an unclosed quote may span several.
    assert b"\n".join(letter.raw for letter in shipper.read_state().dead_letters) == rest
    assert spooled(shipper) == []


def test_the_exit_code_reports_the_worst_outcome_of_the_input_and_the_leftovers(
    shipper: Shipper, service: Service, sample: Sample
):
    """Leftovers may exceed a limit that was lowered; a header alone contains no records."""
    bad = b'{"bad": 1}\n'
    shipper.target = service.target._replace(token="wrong")
    pending = shipper.pipe(sample.lines[0] + bad + b"".join(sample.lines[1:20]), settings=HASTY)
    assert (pending.returncode, pending.counts()) == (4, (21, 0, 0, 0, 21)), "unsaved records are pending"
    assert "intake.token" in pending.stderr
    shipper.target = service.target
    smaller = {"spool.max_bytes": 1000, "spool.segment_bytes": 500}
    assert sum(len(content) for _, content in spooled(shipper)) > 1000, "the leftovers exceed the new limit"
    left_over = shipper.pipe(*sample.lines[20:40], settings=smaller)
    assert (left_over.returncode, left_over.counts()) == (3, (41, 40, 1, 0, 0)), "leftovers are counted"
    header = csv_of(documents(sample.lines[:1])).split(b"\n")[0]  # without newline
    nothing = shipper.pipe(header)
    assert (nothing.returncode, nothing.counts()) == (0, (0, 0, 0, 0, 0)), (
        "a dead letter of an earlier run does not count"
    )
    assert spooled(shipper) == []
    service.assert_holds_exactly(sample.ids[:40])


# Leftovers of a killed pipe ---------------------------------------------------------------------------------------


def test_leftovers_survive_failed_starts_and_status_shows_them_until_they_are_shipped(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    def waiting() -> tuple[int, int]:
        result = shipper.run("status", "--json")
        assert result.returncode == 0, result.stderr
        spool = json.loads(result.stdout)["state"]["spool"]
        return spool["segments"], spool["bytes"]

    leave_behind(shipper, fake, b"".join(sample.lines[:50]), sample.ids[49].encode(), **{"spool.segment_bytes": 5000})
    left = [content for _, content in spooled(shipper)]
    assert waiting() == (len(left), sum(map(len, left)))
    empty = shipper.folder / "empty.ndjson"
    empty.touch()
    for command in (["backfill", empty], ["run", "--set", f'input.include=["{empty}"]']):
        requests = fake.requests
        running = shipper.start(*command, settings=ORDERLY)
        running.wait_until(lambda requests=requests: fake.requests > requests, "the leftovers are shipped")
        assert waiting() == (len(left), sum(map(len, left))), "while one is running, too"
        running.kill()
    shipper.target = service.target._replace(token="wrong")
    result = shipper.backfill(empty, settings={**QUICK, **HASTY})
    assert (result.returncode, result.counts()) == (4, (40, 0, 0, 0, 40)), "pending, whatever the source"
    assert [content for _, content in spooled(shipper)] == left

    shipper.target = service.target
    own = shipper.write("own.ndjson", *sample.lines[50:100])
    result = shipper.backfill(own)
    assert (result.returncode, result.counts()) == (0, (90, 90, 0, 0, 0))
    assert service.times_received() == dict.fromkeys(sample.ids[10:100], 1), "settled records were sent again"
    assert waiting() == (0, 0)


def test_a_spool_is_shipped_though_its_state_was_lost(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    """A broken state.db was moved away, as the message advises: spooled records are sent again."""
    leave_behind(shipper, fake, b"".join(sample.lines[:50]), sample.ids[49].encode(), **{"spool.segment_bytes": 5000})
    shipper.target = service.target
    held = b"".join(content for _, content in spooled(shipper)).splitlines()
    assert set(sample.ids[10:50]) <= set(event_ids(held))
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (shipper.state / name).unlink(missing_ok=True)
    service.reset()
    result = shipper.pipe(*sample.lines[50:60])
    assert (result.returncode, result.counts()[4]) == (0, 0)
    service.assert_holds_exactly({*event_ids(held), *sample.ids[50:60]})
    assert spooled(shipper) == []


# A full spool -----------------------------------------------------------------------------------------------------


def test_a_full_spool_makes_the_producer_wait(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.default = HANG
    settings = {**QUICK, "spool.max_bytes": 400_000, "spool.segment_bytes": 100_000}
    running = shipper.open_pipe(settings=settings, fresh=True)
    written = 0
    ids = sample.ids[:4000]
    data = b"".join(line[:-2] + b" " * 1300 + b"}\n" for line in sample.lines[: len(ids)])
    assert len(data) > 6_000_000

    def produce() -> None:
        nonlocal written
        with suppress(BrokenPipeError):
            for piece in cut(data, range(0, len(data), 10_000)):
                written += os.write(running.stdin.fileno(), piece)
        running.stdin.close()

    def held_bytes() -> int:
        return sum(len(content) for _, content in spooled(shipper))

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    running.wait_until(lambda: held_bytes() >= 400_000 and unread_bytes(running.stdin), "the spool is full")
    peak_bytes, before = running.peak_bytes, -1
    while before != written:  # until the producer is blocked
        before = written
        with pytest.raises(AssertionError, match="not within"):
            running.wait_until(lambda: False, "time passes", limit_s=0.2)
    # The limit, one read of a mebibyte in progress, and a pipe of a mebibyte.
    assert written < 400_000 + (3 << 20), "the producer was not blocked"
    assert held_bytes() < 400_000 + (2 << 20)
    # The table of the dedupe window may be allocated then.
    assert running.peak_bytes < peak_bytes + (8 << 20) + (9 << 20)
    assert shipper.read_state().accepted == 0
    fake.default = OK
    fake.release()
    result = running.finish()
    producer.join(10)
    assert (result.returncode, result.counts()) == (0, (len(ids), len(ids), 0, 0, 0))
    assert sorted(fake.event_ids()) == sorted(ids)
