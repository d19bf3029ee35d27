"""Standard input of every kind and format, kept in the spool until it is settled; the next start ships what is left."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Result, Running, Service, Shipper, event_ids
from tests.e2e.fake_service import HANG, OK, FakeService, Reply
from tests.e2e.surroundings import csv_of, cut, documents, spooled, unread_bytes, write_in_pieces

QUICK = {"batch.linger_seconds": 0.02, "state.commit_interval_seconds": 0.02}
# A record at a time, in their order, so that it is known which ones have left.
ORDERLY = {**QUICK, "delivery.concurrency": 1, "batch.max_events": 10, "batch.unique_consumers": "false"}
HASTY = {
    "delivery.give_up_after_seconds": 0.3,
    "delivery.retry_initial_seconds": 0.05,
    "delivery.retry_max_seconds": 0.1,
}
ODD_NAME = 'two\nlines, and "quotes"; blanks '
FORMATS = ["ndjson", "csv with newlines", "envelopes", "pretty array"]


def written_as(form: str, lines: list[bytes]) -> bytes:
    """The events of these lines, in one of the formats of an input."""
    events = documents(lines)
    match form:
        case "ndjson":
            return b"".join(lines)
        case "csv":
            return csv_of(events)
        case "csv with newlines":
            return csv_of([{**event, "Username": ODD_NAME} for event in events], delimiter=";")
        case "envelopes":
            halves = [events[: len(events) // 2], events[len(events) // 2 :]]
            return b"\n".join(json.dumps({"EventType": "Acquisition", "events": half}).encode() for half in halves)
        case "array":
            return json.dumps(events, separators=(",", ":")).encode()
        case "pretty array":
            return json.dumps(events, indent=2).encode()
    raise AssertionError(form)


def stored_name(service: Service, event_id: str) -> str:
    return json.loads(service.event(event_id)["raw"])["Username"]


def feed(running: Running, data: bytes) -> None:
    """Write everything, from a thread: a pipe holds little, and the reader may wait."""

    def write() -> None:
        with suppress(BrokenPipeError, ValueError):  # it was killed
            running.stdin.write(data)
            running.stdin.flush()

    threading.Thread(target=write, daemon=True).start()


def leave_behind(shipper: Shipper, fake: FakeService, data: bytes, last: bytes, **settings: Any) -> None:
    """
    Kill a `pipe` that has taken all of this from a producer that lives on; only the first ten events had left.

    Args:
        last: What surely stands in the spool when everything does.
    """
    target, shipper.target = shipper.target, fake.target
    fake.plan(OK)
    fake.default = HANG
    running = shipper.start("pipe", settings={**ORDERLY, **settings}, stdin=subprocess.PIPE)
    write_in_pieces(running, cut(data, range(0, len(data), 2500)))  # a reading is never parted among segments
    running.wait_until(
        lambda: any(last in content for _, content in spooled(shipper)) and shipper.read_state().accepted == 10,
        "everything is spooled, and the first batch is saved",
    )
    running.kill()
    assert shipper.read_state().read < data.count(b'"EventId"') or b'"EventId"' not in data
    shipper.target = target


# What stands on standard input ------------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal that does not echo: the user's and the program's."""
    user, program = pty.openpty()
    attributes = termios.tcgetattr(program)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(program, termios.TCSANOW, attributes)
    yield user, program
    for descriptor in (user, program):
        with suppress(OSError):
            os.close(descriptor)


@pytest.mark.parametrize("ending", ["Ctrl-D", "hang-up"])
def test_what_is_typed_at_a_terminal_is_shipped_line_by_line(
    shipper: Shipper, service: Service, sample: Sample, terminal: tuple[int, int], ending: str
):
    user, program = terminal
    running = shipper.start("pipe", "--summary", "json", stdin=program, settings=QUICK)
    os.close(program)
    for count, line in enumerate(sample.lines[:3], 1):
        os.write(user, line)
        running.wait_until(lambda count=count: service.stored == count, "a line that was typed is shipped at once")
    os.write(user, sample.lines[3])
    if ending == "Ctrl-D":
        os.write(user, b"\x04")
    else:
        running.wait_until(lambda: service.stored == 4, "all lines")
        os.close(user)
    result = running.finish()
    assert (result.returncode, result.counts()) == (0, (4, 4, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:4])


def test_a_file_that_grows_behind_the_reader_is_standard_input_up_to_its_end(
    shipper: Shipper, service: Service, sample: Sample
):
    """`shipper pipe < file` ends; what is appended later is nobody's business, and a next one has its own position."""
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:10]))
    with file.open("rb") as stdin:
        assert shipper.run("pipe", "--summary", "json", stdin=stdin).counts() == (10, 10, 0, 0, 0)
        with file.open("ab") as out:
            out.writelines(sample.lines[10:20])
        # The same open file: its offset is where the first one stopped.
        assert shipper.run("pipe", "--summary", "json", stdin=stdin).counts() == (10, 10, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[:20], 1)


@pytest.fixture
def fifo(shipper: Shipper) -> Path:
    path = shipper.folder / "fifo"
    os.mkfifo(path)
    return path


def test_a_named_pipe_ends_with_its_writer(shipper: Shipper, service: Service, sample: Sample, fifo: Path):
    running = shipper.start(
        "pipe", "--summary", "json", prefix=["sh", "-c", f'exec "$0" "$@" < {fifo}'], settings=QUICK
    )
    with fifo.open("wb") as out:  # opens when the shell does
        out.writelines(sample.lines[:100])
    result = running.finish()
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:100])


def test_a_named_pipe_that_is_held_open_is_served_by_several_writers_in_turn_until_sigterm(
    shipper: Shipper, service: Service, sample: Sample, fifo: Path
):
    running = shipper.start(
        "pipe", "--summary", "json", prefix=["sh", "-c", f'exec "$0" "$@" <> {fifo}'], settings=QUICK
    )
    for start in (0, 100, 200):
        with fifo.open("wb") as out:
            out.writelines(sample.lines[start : start + 100])
        end = start + 100
        running.wait_until(lambda end=end: service.stored == end, "what this writer had to say")
    with fifo.open("wb") as one, fifo.open("wb") as other:  # and two at once, whole lines each
        for number in range(300, 340):
            out = one if number % 2 else other
            out.write(sample.lines[number])
            out.flush()
    running.wait_until(lambda: service.stored == 340, "what both had to say")
    running.wait_until(lambda: shipper.read_state().accepted == 340, "it is saved")
    assert not running.has_ended, "the end of a writer is not the end of the input"
    result = running.stop()
    assert (result.returncode, result.counts()) == (4, (340, 340, 0, 0, 0)), "the input had not ended"
    assert result.summary["outcome"] == "drained"
    assert service.times_received() == dict.fromkeys(sample.ids[:340], 1)
    assert shipper.pipe().counts() == (0, 0, 0, 0, 0), "nothing was left over"


def test_what_is_still_in_a_named_pipe_that_is_held_open_is_for_the_next_one(
    shipper: Shipper, fake: FakeService, sample: Sample, fifo: Path
):
    """Only the line within which reading stopped is in two parts, as nobody can know that they belong together."""
    shipper.target = fake.target
    fake.plan(HANG)
    with open(os.open(fifo, os.O_RDWR), "r+b", buffering=0) as holder:
        settings = {**ORDERLY, "spool.max_bytes": 4000, "spool.segment_bytes": 2000}
        running = shipper.start("pipe", "--summary", "json", stdin=holder, settings=settings)
        writer = threading.Thread(target=lambda: fifo.write_bytes(b"".join(sample.lines[:5000])), daemon=True)
        writer.start()
        running.wait_until(lambda: fake.requests and unread_bytes(holder.fileno()), "the spool is full")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("drain_started")
        fake.release()
        first = running.finish()
        assert first.returncode == 4
        assert unread_bytes(holder.fileno()), "it was stopped in the middle"
        again = shipper.start("pipe", "--summary", "json", stdin=holder, settings=QUICK)
        again.wait_until(
            lambda: (
                len(fake.event_ids()) == 5000
                or (len(fake.event_ids()) == 4999 and shipper.read_state().dead_lettered and not unread_bytes(holder))
            ),
            "everything arrives",
        )
        writer.join(10)
        assert not writer.is_alive()
        assert again.stop().returncode == 4
    torn = b"".join(letter.raw for letter in shipper.read_state().dead_letters)
    lost = set(sample.ids[:5000]) - set(fake.event_ids())
    assert torn == b"" if not lost else torn + b"\n" in sample.lines, "a part of the line is nowhere"
    assert len(lost) <= 1
    assert len(fake.event_ids()) + len(lost) == 5000


def test_a_socket_is_a_standard_input(shipper: Shipper, service: Service, sample: Sample):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = shipper.start("pipe", "--summary", "json", stdin=theirs, settings=QUICK)
        ours.sendall(b"".join(sample.lines[:50]))
        running.wait_until(lambda: service.stored == 50, "what was sent so far")
        ours.sendall(b"".join(sample.lines[50:100]))
        ours.shutdown(socket.SHUT_WR)
        result = running.finish()
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:100])


def test_a_connection_that_is_reset_is_told_and_costs_no_record(shipper: Shipper, service: Service, sample: Sample):
    """It is no end of the input, so that exit code 0 would be a lie; what was read is delivered by now or later."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
        with theirs:
            running = shipper.start("pipe", "--summary", "json", stdin=theirs, settings=QUICK)
            ours.sendall(b"".join(sample.lines[:50]))
            running.wait_until(lambda: service.stored == 50, "what was sent so far")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ours.close()
            result = running.finish()
    assert result.returncode in {1, 2, 4}, result
    assert "standard input" in result.stderr
    assert shipper.pipe(sample.lines[50]).returncode == 0
    service.assert_holds_exactly(sample.ids[:51])


def test_standard_input_that_others_made_non_blocking_is_waited_for(shipper: Shipper, service: Service, sample: Sample):
    reading_end, writing_end = os.pipe()
    os.set_blocking(reading_end, False)
    with open(reading_end, "rb") as stdin, open(writing_end, "wb", buffering=0) as out:
        running = shipper.start("pipe", "--summary", "json", stdin=stdin, settings=QUICK)
        for number in range(3):
            out.write(sample.lines[number])
            running.wait_until(lambda number=number: service.stored == number + 1, "a line")
        out.close()
        assert running.finish().counts() == (3, 3, 0, 0, 0)


# Formats ----------------------------------------------------------------------------------------------------------


def test_every_format_is_shipped_over_several_segments_however_it_is_cut(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    """Each by a process of its own, and the next one ships them all; the last record needs nothing behind it."""
    shipper.target = service.target._replace(token="wrong")  # nothing leaves, so that all segments stay for a look
    settings = {**QUICK, "delivery.drain_timeout_seconds": 0.1, "spool.segment_bytes": 4000}
    for number, form in enumerate(FORMATS):
        start, end = number * 120, number * 120 + 120
        data = b"\xef\xbb\xbf" + written_as(form, sample.lines[start:end]).rstrip(b"\n")
        pieces = cut(data, [1, 2, 3, 4, *rng.sample(range(len(data)), 20)])
        earlier = {path for path, _ in spooled(shipper)}
        running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
        write_in_pieces(running, pieces)
        running.stdin.close()
        last = sample.ids[end - 1].encode()
        running.wait_until(lambda last=last: last in spooled(shipper)[-1][1], f"the last record of {form} is spooled")
        segments = [content for path, content in spooled(shipper) if path not in earlier]
        assert len(segments) > 3, f"{form} is not in several segments"
        if form == "csv with newlines":
            assert all(content.count(b'"') % 2 == 0 for content in segments), "a segment ends within quotes"
        assert running.stop().returncode == 4

    shipper.target = service.target
    result = shipper.pipe()
    wanted = 120 * len(FORMATS)
    assert (result.returncode, result.counts()) == (0, (wanted, wanted, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:wanted])
    table = FORMATS.index("csv with newlines") * 120
    assert {stored_name(service, each) for each in sample.ids[table : table + 120 : 40]} == {ODD_NAME}
    assert spooled(shipper) == []


@pytest.mark.parametrize("form", ["csv", "batch"])
def test_a_format_that_is_set_is_not_guessed(shipper: Shipper, service: Service, sample: Sample, form: str):
    """By its first bytes each of these would be something else."""
    events = documents(sample.lines[:10])
    if form == "csv":
        data = b"# " + csv_of(events, delimiter="#", columns=["EventId", *list(events[0])[1:], "No name!"])
        data = data.removeprefix(b"# ")
        settings = {"input.format": "csv", "input.csv_delimiter": "#"}
    else:
        data = b'\n \n{"events" : ' + json.dumps(events).encode() + b"}"
        settings = {"input.format": "batch"}
    result = shipper.pipe(data, settings=settings)
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:10])


@pytest.mark.parametrize("form", ["ndjson", "csv with newlines", "pretty array"])
def test_what_is_no_record_among_them_is_a_dead_letter_and_no_neighbour_is(
    shipper: Shipper, service: Service, sample: Sample, form: str
):
    """Nor does the last record need anything behind it."""
    lines = sample.lines[:60]
    lines[30] = lines[30].replace(b'"IP":"', b'"IP":"x')
    result = shipper.pipe(written_as(form, lines).rstrip(b"\n"), settings={"spool.segment_bytes": 3000})
    assert (result.returncode, result.counts()) == (3, (60, 59, 1, 0, 0))
    service.assert_holds_exactly(sample.ids[:30] + sample.ids[31:60])
    (letter,) = shipper.read_state().dead_letters
    assert letter.rule == "ip"
    assert sample.ids[30].encode() in letter.raw


def test_a_quote_that_is_never_closed_costs_its_row_only(shipper: Shipper, service: Service, sample: Sample):
    """Nor does the last row need anything behind it."""
    rows = csv_of(documents(sample.lines[:2000])).rstrip(b"\n").splitlines(keepends=True)
    rows[6] = rows[6].replace(b",", b',"', 1)
    result = shipper.pipe(b"".join(rows), settings={"spool.segment_bytes": 20_000})
    assert (result.returncode, result.counts()) == (3, (2000, 1999, 1, 0, 0))
    service.assert_holds_exactly(sample.ids[:5] + sample.ids[6:2000])


def test_an_element_without_an_end_is_told_and_what_came_before_it_is_not_lost(
    shipper: Shipper, service: Service, sample: Sample
):
    settings = {**QUICK, "input.max_record_bytes": 1000}
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    head = b"[" + b",".join(line.rstrip() for line in sample.lines[:20])
    feed(running, head + b',{"EventId":"' + b"x" * 4_000_000)
    result = running.finish()
    assert result.returncode not in {0, 3}
    assert "input.max_record_bytes" in result.stderr
    assert running.peak_bytes < 200 << 20
    again = shipper.pipe()
    assert again.returncode in {0, 3}
    service.assert_holds_exactly(sample.ids[:20])


# The end of the input ---------------------------------------------------------------------------------------------


TORN: dict[str, Callable[[list[bytes]], tuple[bytes, bytes]]] = {
    "row": lambda lines: (csv_of(documents(lines)), csv_of(documents(lines[:1]), header=False)[:60]),
    "row with an open quote": lambda lines: (
        csv_of(documents(lines)),
        csv_of([{**json.loads(lines[0]), "Username": ODD_NAME}], header=False).split(b"\n")[0] + b"\n and mo",
    ),
    "element": lambda lines: (
        b'{"EventType":"Acquisition","events":[' + b",".join(line.rstrip() for line in lines) + b",",
        lines[0][:60],
    ),
    "element within a string": lambda lines: (
        b"[" + b",".join(line.rstrip() for line in lines) + b", ",
        b'{"Username":"},{',
    ),
}


@pytest.mark.parametrize("torn", TORN)
def test_the_torn_last_record_of_an_input_is_a_dead_letter_as_it_came(
    shipper: Shipper, service: Service, sample: Sample, torn: str
):
    whole, rest = TORN[torn](sample.lines[:5])
    result = shipper.pipe(whole + rest)
    assert (result.returncode, result.counts()[1], result.counts()[4]) == (3, 5, 0)
    service.assert_holds_exactly(sample.ids[:5])
    # What is no row is a line, and in quotes that stay open there may be more than one.
    assert b"\n".join(letter.raw for letter in shipper.read_state().dead_letters) == rest
    assert spooled(shipper) == []


def test_an_array_that_is_never_closed_has_its_records_all_the_same(shipper: Shipper, service: Service, sample: Sample):
    result = shipper.pipe(b"[" + b",".join(line.rstrip() for line in sample.lines[:5]))
    assert result.counts()[1] == 5
    assert result.counts()[0] == sum(result.counts()[1:4])
    service.assert_holds_exactly(sample.ids[:5])


def test_a_header_alone_holds_no_records(shipper: Shipper, service: Service, sample: Sample):
    header = csv_of(documents(sample.lines[:1])).split(b"\n")[0]
    for data in (header, header + b"\n\n\r\n"):
        result = shipper.pipe(data)
        assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0))
    assert spooled(shipper) == []
    assert service.counts()["requests"] == 0


def test_the_exit_code_tells_the_worst_of_what_became_of_the_input(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    bad = b'{"bad": 1}\n'
    assert shipper.pipe(sample.lines[0]).returncode == 0
    assert shipper.pipe(sample.lines[1] + bad).returncode == 3
    shipper.target = service.target._replace(token="wrong")
    pending = shipper.pipe(sample.lines[2] + bad + sample.lines[3], settings=HASTY)
    assert (pending.returncode, pending.counts()) == (4, (3, 0, 0, 0, 3)), "what is not saved is pending"
    shipper.target = service.target
    left_over = shipper.pipe()
    assert (left_over.returncode, left_over.counts()) == (3, (3, 2, 1, 0, 0)), "what was left over counts"
    assert shipper.pipe().returncode == 0, "a dead letter of an earlier run is no news"
    service.assert_holds_exactly(sample.ids[:4])


def test_a_service_that_comes_back_in_time_makes_it_a_success(shipper: Shipper, fake: FakeService, sample: Sample):
    """The input has long ended by then."""
    shipper.target = fake.target
    fake.default = Reply(status=503)
    settings = {**QUICK, **HASTY, "delivery.give_up_after_seconds": 60}
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    running.stdin.write(b"".join(sample.lines[:100]))
    running.stdin.close()
    running.wait_until(lambda: fake.requests >= 3, "it is tried again")
    fake.default = OK
    result = running.finish()
    assert (result.returncode, result.counts()) == (0, (100, 100, 0, 0, 0))
    assert sorted(fake.event_ids()) == sorted(sample.ids[:100])


# What a killed one has left ---------------------------------------------------------------------------------------


def ship_the_rest(shipper: Shipper, service: Service, command: str, other: Path, *, wanted: int) -> Result:
    """Start a command that finds something in the spool, and something of its own."""
    if command == "backfill":
        return shipper.backfill(other)
    if command == "pipe":
        return shipper.pipe(other.read_bytes())
    settings = {"input.include": f'["{other}"]', "input.poll_interval_seconds": 0.1, **QUICK}
    running = shipper.start("run", settings=settings)
    running.wait_until(lambda: service.stored == wanted, "what was left over and what is its own")
    running.wait_until(lambda: not spooled(shipper), "the spool is emptied while it runs on")
    return running.stop()


@pytest.mark.parametrize(
    ("form", "command", "fsync"),
    [
        ("ndjson", "pipe", "always"),
        ("csv with newlines", "backfill", "never"),
        ("pretty array", "run", "interval"),
        ("envelopes", "backfill", "always"),
    ],
)
def test_what_a_killed_pipe_had_spooled_is_shipped_by_the_next_start_of_any_kind(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample, form: str, command: str, fsync: str
):
    """Whatever the policy of forcing to the disk: the kernel has what a killed process wrote."""
    settings = {"spool.segment_bytes": 5000, "spool.fsync": fsync, "spool.fsync_interval_seconds": 0.01}
    data = written_as(form, sample.lines[:100])
    leave_behind(shipper, fake, data, sample.ids[99].encode(), **settings)
    assert fake.event_ids(fake.bodies[:1]) == sample.ids[:10]
    assert len(spooled(shipper)) > 3, "several segments"

    other = shipper.folder / "other.ndjson"
    other.write_bytes(b"".join(sample.lines[100:120]))
    result = ship_the_rest(shipper, service, command, other, wanted=110)
    assert result.returncode == 0
    # Nothing of what was settled is sent again, and everything else is sent once.
    assert service.times_received() == dict.fromkeys(sample.ids[10:120], 1)
    if form == "csv with newlines":
        assert stored_name(service, sample.ids[99]) == ODD_NAME
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (120, 120, 0)
    assert spooled(shipper) == []


def test_what_is_left_over_comes_before_what_is_new_and_is_not_mixed_with_it(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    """
    A table keeps its own header when the next input has other columns in another order, or is no table at all.

    And a torn line is not joined with the next input: it may be a dead letter or gone with the process.
    """
    events = documents(sample.lines[30:60])
    other_table = csv_of(events, columns=list(reversed(events[0])), delimiter="\t")
    assert b"\n\t\t" in other_table, "its first columns are empty"
    torn = sample.lines[95][:150]
    inputs = [
        written_as("csv with newlines", sample.lines[:30]),
        other_table,
        b"".join(sample.lines[60:90]) + torn,
    ]
    target, shipper.target = shipper.target, fake.target
    fake.default = HANG
    for number, data in enumerate(inputs):  # each one is killed with the leftovers of those before it
        requests = fake.requests
        running = shipper.start("pipe", settings=ORDERLY, stdin=subprocess.PIPE)
        write_in_pieces(running, data.splitlines(keepends=True))
        last = sample.ids[number * 30 + 29].encode()
        running.wait_until(lambda last=last: spooled(shipper) and last in spooled(shipper)[-1][1], "it is spooled")
        running.wait_until(lambda requests=requests: fake.requests > requests, "it had begun to send")
        running.kill()
    assert shipper.read_state().accepted == 0
    shipper.target = target
    result = shipper.pipe(written_as("array", sample.lines[90:100]), settings=ORDERLY)
    letters = [letter.raw for letter in shipper.read_state().dead_letters]
    assert letters in ([], [torn])
    assert (result.returncode, result.counts()) == (3 if letters else 0, (100 + len(letters), 100, len(letters), 0, 0))
    assert service.event_ids() == sample.ids[:100]
    assert stored_name(service, sample.ids[29]) == ODD_NAME
    assert stored_name(service, sample.ids[59]) == events[-1]["Username"]
    assert stored_name(service, sample.ids[99]) == json.loads(sample.lines[99])["Username"]


def test_a_next_start_that_is_killed_too_and_one_that_cannot_deliver_lose_nothing_either(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    leave_behind(shipper, fake, b"".join(sample.lines[:50]), sample.ids[49].encode())
    left = [content for _, content in spooled(shipper)]
    empty = shipper.folder / "empty.ndjson"
    empty.touch()
    target = shipper.target
    for command in (["backfill", empty], ["run", "--set", f'input.include=["{empty}"]']):
        shipper.target = fake.target
        requests = fake.requests
        running = shipper.start(*command, settings=ORDERLY)
        running.wait_until(lambda requests=requests: fake.requests > requests, "it ships what is left over")
        running.kill()
    shipper.target = target._replace(token="wrong")
    for command in (["pipe"], ["backfill", empty]):
        result = shipper.run(*command, "--summary", "json", settings={**QUICK, **HASTY})
        assert (result.returncode, result.counts()) == (4, (40, 0, 0, 0, 40)), "pending, wherever it came from"
    assert [content for _, content in spooled(shipper)] == left
    shipper.target = target
    assert shipper.pipe().counts() == (40, 40, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[10:50], 1)


@pytest.mark.parametrize("way", ["moved away", "emptied"])
def test_a_spool_whose_state_was_lost_is_shipped_all_the_same(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample, way: str
):
    """Somebody moved a broken state.db away, as the message says: what is spooled is still there, and comes again."""
    leave_behind(shipper, fake, b"".join(sample.lines[:50]), sample.ids[49].encode(), **{"spool.segment_bytes": 5000})
    held = b"".join(content for _, content in spooled(shipper)).splitlines()
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (shipper.state / name).unlink(missing_ok=True)
    if way == "emptied":
        (shipper.state / "state.db").touch(mode=0o600)
    result = shipper.pipe(b"".join(sample.lines[50:60]))
    assert (result.returncode, result.counts()[4]) == (0, 0)
    service.assert_holds_exactly({*event_ids(held), *sample.ids[50:60]})
    assert set(sample.ids[10:50]) <= set(event_ids(held))


# A spool that is full ---------------------------------------------------------------------------------------------


def test_a_full_spool_makes_the_producer_wait_and_goes_on(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    fake.default = HANG
    settings = {**QUICK, "spool.max_bytes": 400_000, "spool.segment_bytes": 100_000}
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    written = 0
    ids = sample.ids[:20_000]
    data = b"".join(sample.lines[: len(ids)])
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
    while before != written:  # until the producer stands still
        before = written
        with pytest.raises(AssertionError, match="not within"):
            running.wait_until(lambda: False, "time passes", limit_s=0.2)
    # The limit, one reading of a mebibyte that was under way, and a pipe of a mebibyte.
    assert written < 400_000 + (3 << 20), "the producer was not held up"
    assert held_bytes() < 400_000 + (2 << 20)
    assert running.peak_bytes < peak_bytes + (8 << 20)
    assert shipper.read_state().accepted == 0
    fake.default = OK
    fake.release()
    result = running.finish()
    producer.join(10)
    assert (result.returncode, result.counts()) == (0, (len(ids), len(ids), 0, 0, 0))
    assert sorted(fake.event_ids()) == sorted(ids)


# Settings and status ----------------------------------------------------------------------------------------------


def test_an_unknown_policy_is_refused_before_anything_is_read(shipper: Shipper, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(sample.lines[0])
    with file.open("rb") as stdin:
        result = shipper.run("pipe", stdin=stdin, settings={"spool.fsync": "sometimes"})
        assert os.lseek(stdin.fileno(), 0, os.SEEK_CUR) == 0
    assert result.returncode == 2
    assert "spool.fsync" in result.stderr


def test_status_shows_what_waits_in_the_spool_until_a_start_with_a_smaller_limit_has_emptied_it(
    shipper: Shipper, service: Service, fake: FakeService, sample: Sample
):
    def status() -> dict[str, Any]:
        result = shipper.run("status", "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["state"]["spool"]

    leave_behind(shipper, fake, b"".join(sample.lines[:100]), sample.ids[99].encode(), **{"spool.segment_bytes": 5000})
    waiting = status()
    held = spooled(shipper)
    assert (waiting["segments"], waiting["bytes"]) == (len(held), sum(len(content) for _, content in held))
    target, shipper.target = shipper.target, fake.target
    requests = fake.requests
    running = shipper.start("pipe", stdin=subprocess.PIPE, settings=ORDERLY)  # and of one that runs
    running.wait_until(lambda: fake.requests > requests, "it runs")
    assert status() == waiting
    running.kill()
    shipper.target = target
    result = shipper.pipe(
        b"".join(sample.lines[100:200]), settings={**QUICK, "spool.max_bytes": 1000, "spool.segment_bytes": 500}
    )
    assert (result.returncode, result.counts()) == (0, (190, 190, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[10:200])
    empty = status()
    assert (empty["segments"], empty["bytes"]) == (0, 0)
