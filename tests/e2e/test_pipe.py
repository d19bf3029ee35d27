"""`producer | shipper pipe`: standard input to its end, through the spool."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, event_ids
from tests.e2e.fake_service import HANG, FakeService


def test_pipe_delivers_every_event_once(shipper: Shipper, service: Service, sample: Sample):
    with subprocess.Popen(["cat", sample.path], stdout=subprocess.PIPE) as producer:
        result = shipper.run("pipe", "--summary", "json", stdin=producer.stdout)
    assert (result.returncode, result.counts()) == (0, (len(sample.ids), len(sample.ids), 0, 0, 0))
    service.assert_holds_exactly(sample.ids)
    assert service.received == len(sample.ids)
    assert list(Path(shipper.state, "spool").iterdir()) == [], "what is settled stays on the disk"


def test_a_second_pipe_begins_with_nothing_left_over(shipper: Shipper, service: Service, sample: Sample):
    assert shipper.pipe(b"".join(sample.lines[:100])).counts() == (100, 100, 0, 0, 0)
    assert shipper.pipe(b"".join(sample.lines[100:150])).counts() == (50, 50, 0, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[:150], 1)


def test_the_torn_line_of_a_producer_that_was_killed_is_a_dead_letter(
    shipper: Shipper, service: Service, sample: Sample
):
    torn = sample.lines[100][:150]
    script = "import signal, sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read()); sys.stdout.flush(); "
    data = shipper.folder / "written-by-the-producer"
    data.write_bytes(b"".join(sample.lines[:100]) + torn)
    command = [sys.executable, "-c", f"{script} signal.pause()", data]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as producer:
        running = shipper.start(
            "pipe", "--summary", "json", stdin=producer.stdout, settings={"batch.linger_seconds": 0.05}
        )
        running.wait_until(lambda: service.stored == 100, "the complete lines are accepted")
        assert not running.has_ended, "its input had not ended"
        producer.kill()
        assert producer.wait(10) == -signal.SIGKILL
        producer.stdout.close()
        result = running.finish()
    assert (result.returncode, result.counts()) == (3, (101, 100, 1, 0, 0))
    service.assert_holds_exactly(sample.ids[:100])
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.raw) == ("json", torn)


def test_a_last_line_without_a_newline_is_delivered(shipper: Shipper, service: Service, sample: Sample):
    result = shipper.pipe(b"".join(sample.lines[:3]).rstrip())
    assert (result.returncode, result.counts()) == (0, (3, 3, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:3])


@pytest.mark.parametrize("data", [b"", None, b"\n\r\n \n"], ids=["empty pipe", "/dev/null", "blank lines"])
def test_input_without_records_is_no_error(shipper: Shipper, service: Service, data: bytes | None):
    result = shipper.pipe(data)
    assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0))
    assert service.counts()["requests"] == 0


def test_a_file_as_standard_input_is_read_from_where_it_stands(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:2000]))
    with file.open("rb") as stdin:
        stdin.seek(len(sample.lines[0]))
        stdin.flush()
        result = shipper.run("pipe", "--summary", "json", stdin=stdin)
    assert (result.returncode, result.counts()) == (0, (1999, 1999, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[1:2000])


def test_a_closed_standard_input_is_told_in_words(shipper: Shipper, service: Service):
    result = shipper.run("pipe", prefix=["sh", "-c", 'exec "$0" "$@" <&-'])
    assert result.returncode == 2
    assert "standard input" in result.stderr


def test_an_endless_line_costs_no_memory_and_no_neighbour(shipper: Shipper, service: Service, sample: Sample):
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings={"batch.linger_seconds": 0.05})
    running.stdin.write(sample.lines[0])
    for _ in range(20):
        running.stdin.write(b"x" * 1_000_000)
    running.stdin.write(b"\n" + b"".join(sample.lines[1:100]))
    running.stdin.flush()
    running.wait_until(lambda: service.stored == 100, "the good lines are accepted")
    peak_bytes = running.peak_bytes
    running.stdin.close()
    result = running.finish()
    assert (result.returncode, result.counts()) == (3, (101, 100, 1, 0, 0))
    assert shipper.read_state().rules == ["oversized"]
    assert 10 << 20 < peak_bytes < 200 << 20


def test_segments_are_deleted_while_the_input_goes_on(shipper: Shipper, service: Service, sample: Sample):
    """The spool is bounded: it never holds much more than it may, and the input is many times that."""
    settings = {
        "spool.segment_bytes": 200_000,
        "spool.max_bytes": 400_000,
        "state.commit_interval_seconds": 0.01,
        "batch.linger_seconds": 0.01,
    }
    largest = 0

    def spooled() -> int:
        try:
            return sum(path.stat().st_size for path in Path(shipper.state, "spool").glob("*"))
        except FileNotFoundError:
            return 0  # deleted between the listing and the look

    with sample.path.open("rb") as stdin:
        running = shipper.start("pipe", "--summary", "json", stdin=stdin, settings=settings)
        while not running.has_ended:
            largest = max(largest, spooled())
        result = running.finish()
    assert (result.returncode, result.counts()) == (0, (len(sample.ids), len(sample.ids), 0, 0, 0))
    service.assert_holds_exactly(sample.ids)
    # One reading of a mebibyte may come on top of the limit.
    assert 200_000 < largest < 400_000 + (2 << 20), largest


def test_a_line_longer_than_a_segment_and_than_the_spool_passes(shipper: Shipper, service: Service, sample: Sample):
    settings = {"spool.segment_bytes": 100, "spool.max_bytes": 100, "state.commit_interval_seconds": 0.01}
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    running.stdin.write(sample.lines[0][:200])
    running.stdin.flush()
    running.stdin.write(sample.lines[0][200:] + b"".join(sample.lines[1:5]))
    running.stdin.close()
    result = running.finish(limit_s=15)
    assert (result.returncode, result.counts()) == (0, (5, 5, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:5])


def test_sigterm_leaves_the_rest_in_the_spool_for_the_next_run(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    fake.plan(HANG)
    with sample.path.open("rb") as stdin:
        running = shipper.start(
            "pipe", "--summary", "json", stdin=stdin, settings={"delivery.concurrency": 1, "batch.max_events": 100}
        )
        running.wait_until(lambda: fake.requests, "a first request")
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("drain_started")
        fake.release()
        stopped = running.finish()
    assert stopped.returncode == 4
    assert stopped.summary["outcome"] == "drained"
    read, accepted, *_, pending = stopped.counts()
    assert read == accepted < len(sample.ids), "the first run must end in the middle"
    assert pending == 0
    segments = list(Path(shipper.state, "spool").iterdir())
    assert segments

    spooled = [line for path in sorted(segments) for line in path.read_bytes().splitlines(keepends=True)]
    whole = Counter(event_ids(line for line in spooled if line.endswith(b"\n")))
    shipper.pipe()
    assert whole <= Counter(fake.event_ids())
    assert max(Counter(fake.event_ids()).values()) == 1, "after a clean stop nothing is sent twice"


def test_it_ends_though_its_producer_lives_on(shipper: Shipper, service: Service, sample: Sample):
    """When it gives up, and at a signal: nobody waits for the end of the input."""
    settings = {"batch.linger_seconds": 0.01, "delivery.give_up_after_seconds": 0.2}
    right = shipper.target
    shipper.target = right._replace(token="wrong")
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    running.stdin.write(sample.lines[0])
    running.stdin.flush()
    result = running.finish(limit_s=10)
    assert (result.returncode, result.counts()) == (4, (1, 0, 0, 0, 1))

    shipper.target = right
    running = shipper.start("pipe", "--summary", "json", stdin=subprocess.PIPE, settings=settings)
    running.stdin.write(sample.lines[1])
    running.stdin.flush()
    running.wait_until(lambda: service.stored == 2, "what was left over and what is new")
    result = running.stop(limit_s=10)
    assert result.counts() == (2, 2, 0, 0, 0)
    assert result.returncode == 4, "the input had not ended"
    assert service.times_received() == dict.fromkeys(sample.ids[:2], 1)
