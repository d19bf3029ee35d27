"""`producer | shipper pipe`: standard input, through the spool, to its end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, event_ids
from tests.e2e.fake_service import HANG, FakeService
from tests.e2e.files import COMPRESSIONS
from tests.e2e.surroundings import csv_of, documents, spooled, unread_bytes


def test_an_endless_line_and_a_torn_last_line_take_no_memory_and_affect_no_other_record(
    shipper: Shipper, service: Service, sample: Sample
):
    torn = sample.lines[100][:150]
    data = shipper.folder / "written-by-the-producer"
    with data.open("wb") as out:
        out.write(sample.lines[0])
        for _ in range(80):
            out.write(b"x" * 1_000_000)
        out.write(b"\n" + b"".join(sample.lines[1:100]) + torn)
    script = 'cat "$0"; exec sleep 60'
    with subprocess.Popen(["sh", "-c", script, data], stdout=subprocess.PIPE) as producer:
        running = shipper.start(
            "pipe", "--summary", "json", stdin=producer.stdout, settings={"batch.linger_seconds": 0.05}, fresh=True
        )
        running.wait_until(lambda: service.stored == 100, "the complete lines are accepted")
        assert not running.has_ended, "its input had not ended"
        peak_bytes = running.peak_bytes
        producer.kill()
        assert producer.wait(10) == -signal.SIGKILL
        producer.stdout.close()
        result = running.finish()
    assert (result.returncode, result.counts()) == (3, (102, 100, 2, 0, 0))
    service.assert_holds_exactly(sample.ids[:100])
    oversized, letter = shipper.read_state().dead_letters
    assert (oversized.rule, letter.rule, letter.raw) == ("oversized", "json", torn)
    assert 10 << 20 < peak_bytes < 100 << 20


def test_input_without_records_is_no_error(shipper: Shipper, service: Service):
    result = shipper.pipe(b"\n\r\n \n")
    assert (result.returncode, result.counts()) == (0, (0, 0, 0, 0, 0))
    assert service.counts()["requests"] == 0


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_standard_input_is_refused_before_anything_is_spooled(shipper: Shipper, sample: Sample, suffix: str):
    data = COMPRESSIONS[suffix](b"".join(sample.lines[:2000]))
    result = shipper.pipe(data)
    result.assert_ended(2, "standard input is compressed", " -dc FILE | shipper pipe")
    assert spooled(shipper) == []
    assert shipper.pipe(*sample.lines[:5]).counts() == (5, 5, 0, 0, 0)


def test_a_record_that_begins_like_an_archive_affects_no_other_record(
    shipper: Shipper, service: Service, sample: Sample
):
    odd = b"\x1f\x8b\x08 no archive\n"
    data = b"".join([*sample.lines[:500], odd, *sample.lines[500:520]])
    settings = {"spool.segment_bytes": len(b"".join(sample.lines[:500]))}
    assert shipper.pipe(data, settings=settings).counts() == (521, 520, 1, 0, 0)
    service.assert_holds_exactly(sample.ids[:520])


def test_a_closed_standard_input_is_reported(shipper: Shipper):
    result = shipper.run("pipe", prefix=["sh", "-c", 'exec "$0" "$@" <&-'])
    result.assert_ended(2, "standard input")


def test_a_line_longer_than_a_segment_and_the_spool_is_delivered(shipper: Shipper, service: Service, sample: Sample):
    settings = {"spool.segment_bytes": 100, "spool.max_bytes": 100, "state.commit_interval_seconds": 0.01}
    running = shipper.open_pipe(sample.lines[0][:200], settings=settings)
    result = running.end_input(sample.lines[0][200:], *sample.lines[1:5])
    assert (result.returncode, result.counts()) == (0, (5, 5, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:5])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_leaves_the_rest_in_the_spool_for_the_next_run(
    shipper: Shipper, fake: FakeService, sample: Sample, number: signal.Signals
):
    fake.plan(HANG)
    count = 20_000  # more than the read-ahead
    file = shipper.write("events.ndjson", *sample.lines[:count])
    with file.open("rb") as stdin:
        running = shipper.start(
            "pipe", "--summary", "json", stdin=stdin, settings={"delivery.concurrency": 1, "batch.max_events": 100}
        )
        running.wait_until(lambda: fake.requests, "a first request")
        running.process.send_signal(number)
        running.wait_for("drain_started")
        if number == signal.SIGHUP:
            running.process.send_signal(number)  # a shell sends it, too, when its terminal is closed
        fake.release()
        stopped = running.finish()
    assert stopped.returncode == 4
    assert stopped.summary["outcome"] == "drained"
    read, accepted, *_, pending = stopped.counts()
    assert read == accepted < count, "the first run must stop before the end"
    assert pending == 0
    segments = list(Path(shipper.state, "spool").iterdir())
    assert segments

    whole = b"".join(path.read_bytes() for path in sorted(segments))
    assert whole.endswith(b"\n"), "the stop split a line"
    assert shipper.pipe().returncode == 0, "empty input is no error"
    assert Counter(event_ids(whole.splitlines())) <= Counter(fake.event_ids())
    assert max(Counter(fake.event_ids()).values()) == 1, "something was sent twice after a clean stop"


def test_nohup_is_respected(shipper: Shipper, fake: FakeService, sample: Sample):
    fake.plan(HANG)
    prefix = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"']
    file = shipper.write("events.ndjson", *sample.lines[:10])
    with file.open("rb") as stdin:
        running = shipper.start("pipe", "--summary", "json", stdin=stdin, prefix=prefix)
        running.wait_until(lambda: fake.requests, "a first request")
        running.process.send_signal(signal.SIGHUP)
        fake.release()
        result = running.finish()
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    assert "drain_started" not in result.stderr


@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_a_dead_letter_with_the_beginning_of_a_record_is_marked_and_never_sent(
    shipper: Shipper, service: Service, sample: Sample, form: str
):
    """The beginning of a CSV row may be a valid row; in both formats, the kept beginning is no record."""
    header, *rows = [b"", *sample.lines[:3]]
    if form == "csv":
        header, *rows = csv_of(documents(sample.lines[:3])).splitlines(keepends=True)
    status = json.loads(sample.lines[1])["ConsumerStatus"].encode()
    whole = rows[1] = rows[1].replace(status, status + b"x" * 3_000_000).rstrip() + b"\n"
    settings = {"input.format": form}
    result = shipper.pipe(header + b"".join(rows), settings=settings)
    assert (result.returncode, result.counts()) == (3, (3, 2, 1, 0, 0))
    (letter,) = shipper.read_state().dead_letters
    assert whole.startswith(letter.raw)
    kept, size = len(letter.raw), len(whole) - 1
    assert letter.rule == "oversized"
    assert 262_144 < kept < size
    words = f"truncated: only its first {kept:,} of {size:,} bytes"
    assert words in letter.message
    assert words in shipper.run("dead-letters", "list").stdout
    assert words in shipper.run("dead-letters", "show", str(letter.id)).stdout
    listed = json.loads(shipper.run("dead-letters", "list", "--format", "json").stdout)
    assert (listed["raw_bytes"], listed["whole_bytes"]) == (kept, size)
    exported = shipper.run("dead-letters", "export")
    assert exported.stdout.encode() in {b"", header}
    assert "cannot be sent or exported" in exported.stderr
    longer = {"input.max_record_bytes": 10_000_000, "batch.max_bytes": 20_000_000, "records.relax": '["status"]'}
    replayed = shipper.run("dead-letters", "replay", settings=longer)
    replayed.assert_ended(3, "cannot be sent or exported")
    assert shipper.read_state().dead_letters == (letter,)
    assert service.stored == 2


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_a_truncated_record_is_marked_however_the_pipe_ends(
    shipper: Shipper, service: Service, sample: Sample, ending: str
):
    """Even if the next run accepts records of that length."""
    running = shipper.open_pipe(sample.lines[0] + b"x" * 2_500_000)
    running.wait_until(lambda: unread_bytes(running.stdin) == 0, "everything is read")
    running.wait_until(lambda: service.stored == 1, "the kept part is in the spool")
    _ = running.stop() if ending == "SIGTERM" else running.kill()
    longer = {"input.max_record_bytes": 10_000_000, "batch.max_bytes": 20_000_000}
    assert shipper.pipe(settings=longer).returncode == 3
    (letter,) = shipper.read_state().dead_letters
    assert letter.rule == "oversized"
    kept = len(letter.raw)
    assert letter.raw == b"x" * kept
    assert 262_144 < kept < 2_500_000
    known = 2_500_000 if ending == "SIGTERM" else kept + 1  # its minimum length
    assert f"truncated: only its first {kept:,} of {known:,} bytes" in letter.message


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL", "its end"])
def test_rows_after_an_unclosed_quote_survive_every_end_of_the_pipe(
    shipper: Shipper, service: Service, sample: Sample, ending: str
):
    """The end of the row is unknown until the quote can no longer be closed, so everything read is kept."""
    header, *rows = csv_of(documents(sample.lines[:500])).splitlines(keepends=True)
    rows[2] = rows[2].replace(b",", b',"', 1)
    settings = {"input.format": "csv", "spool.segment_bytes": 20_000}
    running = shipper.open_pipe(header, *rows, settings=settings)
    running.wait_until(lambda: service.stored == 2, "the rows before the stray quote")
    last = sample.ids[499].encode()
    running.wait_until(lambda: any(last in part for _, part in spooled(shipper)), "everything is in the spool")
    assert not running.has_ended
    if ending == "its end":
        assert running.end_input().returncode == 3
    elif ending == "SIGTERM":
        assert running.stop().returncode == 4, "something is left over"
    else:
        running.kill()
    assert shipper.pipe().returncode == (0 if ending == "its end" else 3)
    state = shipper.read_state()
    assert state.rules == ["csv"]
    assert state.dead_letters[0].raw + b"\n" == rows[2]
    service.assert_holds_exactly([*sample.ids[:2], *sample.ids[3:500]])


@pytest.mark.parametrize("form", ["auto", "batch"])
@pytest.mark.parametrize("data", [b'{"EventId": "5', b'[{"a": 1}, {"b": "', b"EventId,IP,Co"])
def test_a_torn_first_record_is_kept_at_sigterm(shipper: Shipper, form: str, data: bytes):
    """Whether it is a line or an array element; a header without rows is no record."""
    running = shipper.open_pipe(data, settings={"input.format": form})
    running.wait_until(lambda: unread_bytes(running.stdin) == 0, "everything is read")
    assert running.stop().returncode == 4
    shipper.pipe(settings={"input.format": form})
    is_header = form == "auto" and data.startswith(b"E")
    letters = shipper.read_state().dead_letters
    assert b", ".join(letter.raw for letter in letters) == (b"" if is_header else data.removeprefix(b"["))
