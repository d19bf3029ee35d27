"""An input with systematic errors, or a clock that is behind, does not fill the dead letters."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import FAKETIME, QUICK, Result, Service, Shipper, changed, sandbox, with_clock
from tests.e2e.files import Tail, append, log_lines
from tests.e2e.operated import Admin
from tests.e2e.surroundings import spooled

LIMIT = 1_000  # the default of records.mistake_limit
FOREIGN = [b'level=info msg="request served" path=/health took=%dms\n' % number for number in range(2_500)]


def renamed(line: bytes) -> bytes:
    """Return the record under unknown field names."""
    return json.dumps({f"x_{name}": value for name, value in json.loads(line).items()}).encode() + b"\n"


def mapping(line: bytes) -> str:
    return "[records.mapping]\n" + "".join(f'{name} = "x_{name}"\n' for name in json.loads(line))


def add_to_config(shipper: Shipper, text: str) -> None:
    shipper.config.write_text(shipper.config.read_text() + text)


def assert_held_back(result: Result, *words: str) -> None:
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up"), result
    for each in ("records.mistake_limit", "shipper validate", "records.mapping", *words):
        assert each in result.summary["message"], result.summary["message"]


def test_a_file_with_wrong_column_names_causes_no_more_dead_letters_than_the_limit_in_all_attempts(
    shipper: Shipper, service: Service, sample: Sample
):
    out = io.StringIO()
    rows = csv.writer(out)
    rows.writerow([f"column_{name}" for name in json.loads(sample.lines[0])])
    rows.writerows(json.loads(line).values() for line in sample.lines[:20_000])
    file = shipper.write("export.csv", out.getvalue().encode())
    result = shipper.backfill(file)
    assert_held_back(result, str(file), "1,000 records of", f"shipper validate {file}")
    assert len(shipper.read_state().dead_letters) == LIMIT
    for _ in range(2):  # as a service manager does
        assert_held_back(shipper.backfill(file), "1,000 records of")
    assert len(shipper.read_state().dead_letters) == LIMIT
    assert service.stored == 0


def test_the_rest_is_delivered_after_a_corrected_mapping_and_dead_letters_by_a_replay(
    shipper: Shipper, service: Service, sample: Sample
):
    file = shipper.write("own.ndjson", *map(renamed, sample.lines[:3_000]))
    assert_held_back(shipper.backfill(file), "event_id")
    add_to_config(shipper, mapping(sample.lines[0]))
    assert shipper.backfill(file).counts() == (2_000, 2_000, 0, 0, 0)
    assert shipper.run("dead-letters", "replay").returncode == 0
    service.assert_holds_exactly(sample.ids[:3_000])


def test_good_records_before_the_bad_ones_are_delivered_once(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.write("mixed.ndjson", *sample.lines[:2_500], *FOREIGN)
    result = shipper.backfill(file)
    assert_held_back(result, "1,000 records of", "json")
    assert result.counts() == (2_500 + LIMIT, 2_500, LIMIT, 0, 0)
    assert service.times_received() == dict.fromkeys(sample.ids[:2_500], 1)


def test_bad_records_up_to_the_limit_become_dead_letters_and_later_good_ones_are_delivered(
    shipper: Shipper, service: Service, sample: Sample
):
    """From the start, or after a good record; one more exceeds the limit, unless it is raised or switched off."""
    file = shipper.write("a.ndjson", *FOREIGN[:LIMIT], *sample.lines[:1_500])
    assert shipper.run("backfill", file, "--summary", "json").counts() == (2_500, 1_500, LIMIT, 0, 0)
    more = shipper.write("b.ndjson", *sample.lines[5_000:5_001], *FOREIGN[: LIMIT + 1], *sample.lines[2_000:3_000])
    assert_held_back(shipper.backfill(more), str(more))
    assert shipper.backfill(more, settings={"records.mistake_limit": 1_500}).counts() == (1_001, 1_000, 1, 0, 0)
    assert service.stored == 2_501

    other = shipper.write("c.ndjson", *FOREIGN, *sample.lines[3_000:3_100])
    assert shipper.backfill(other, settings={"records.mistake_limit": 0}).counts() == (2_600, 100, 2_500, 0, 0)


def test_the_limit_counts_across_many_small_files(shipper: Shipper):
    for number in range(25):
        shipper.write(f"exports/{number:02}.log", *FOREIGN[100 * number : 100 * number + 100])
    assert_held_back(shipper.backfill("exports"), "of several inputs, the last of them")
    assert len(shipper.read_state().dead_letters) == LIMIT


def test_a_file_with_an_undecodable_name_is_named(shipper: Shipper):
    path = os.fsdecode(os.fsencode(shipper.folder) + b"/\xff\n\x1b.log")
    Path(path).write_bytes(b"".join(FOREIGN))
    result = shipper.backfill(path)
    assert_held_back(result, "\\xff")
    assert "\x1b" not in result.stderr
    assert "\\xff" in result.stderr.splitlines()[-1]


def test_piped_input_stays_in_the_spool(shipper: Shipper, sample: Sample):
    result = shipper.pipe(*FOREIGN[:2_000], *sample.lines[:100])
    assert_held_back(result, "producer | shipper validate -")
    assert len(shipper.read_state().dead_letters) == LIMIT
    assert sum(len(content) for _, content in spooled(shipper)) > 0
    assert shipper.pipe(settings={"records.mistake_limit": 0}).counts() == (1_100, 100, 1_000, 0, 0)


def test_validate_and_replay_have_no_limit(shipper: Shipper):
    file = shipper.write("foreign.log", *FOREIGN)
    shown = shipper.run("validate", file, "--format", "json", check=False)
    assert shown.returncode == 3
    assert "2500" in shown.stdout
    assert shipper.run("backfill", file, settings={"records.mistake_limit": 0}).returncode == 3
    replayed = shipper.run("dead-letters", "replay", "--summary", "json")
    assert (replayed.returncode, replayed.counts()) == (3, (2_500, 0, 2_500, 0, 0))


def test_run_pauses_with_a_reason_and_resumes_after_a_corrected_mapping_is_reloaded(
    tail: Tail, shipper: Shipper, service: Service, sample: Sample
):
    append(tail.file, *map(renamed, sample.lines[:3_000]))
    tail.configure()
    running = tail.start(None)
    running.wait_for("delivery_paused")
    admin = Admin(running)
    running.wait_until(lambda: admin.get("/readyz").status_code == 503, "it is not ready")
    assert "input_unlike_records" in admin.get("/readyz").text
    assert 'shipper_paused{reason="input_unlike_records"} 1.0' in admin.get("/metrics").text
    (pause,) = admin.status()["live"]["pauses"]
    assert str(tail.file) in pause["message"]
    assert "SIGHUP" in pause["advice"]
    # `status` reads the snapshot on the disk, which is written shortly afterwards.
    running.wait_until(
        lambda: "1,000 records of" in shipper.run("status", check=False).stdout, "status reports the pause"
    )

    running.process.send_signal(signal.SIGHUP)  # without a correction
    running.wait_for("settings_reloaded")
    add_to_config(shipper, mapping(sample.lines[0]))
    running.process.send_signal(signal.SIGHUP)
    running.wait_for("delivery_resumed")
    running.wait_until(lambda: service.stored == 2_000, "the rest is delivered")
    running.wait_until(lambda: admin.get("/readyz").status_code == 200, "it is ready")
    assert running.stop().returncode == 0
    assert len(shipper.read_state().dead_letters) == LIMIT
    (paused,) = log_lines(running, "delivery_paused")
    assert paused["reason"] == "input_unlike_records"


def test_a_run_that_is_held_back_stops_at_once_with_unread_records_pending(tail: Tail):
    append(tail.file, *FOREIGN)
    tail.start().wait_for("delivery_paused")
    assert tail.running.stop().returncode == 0
    tail.file.unlink()
    tail.append(0, 100, "app.ndjson.good")
    tail.start()
    tail.wait(100)
    tail.stop(100, dead_lettered=LIMIT)


# The clock --------------------------------------------------------------------------------------------------------


def now_by(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_good_records_are_not_dead_lettered_if_the_clock_is_a_year_behind(shipper: Shipper, sample: Sample):
    """The service's clock is correct, but unknown before the first request."""
    shipper.shortened |= {"shipper.pipeline.packer.FAIL_FAST_S": 0.3}
    year_s = 365 * 86_400.0
    lines = [changed(line, Timestamp=now_by(year_s - 60 - number)) for number, line in enumerate(sample.lines[:5])]
    file = shipper.write("events.ndjson", *lines)
    with sandbox(clock_offset_seconds=year_s) as service:
        shipper.target = service.target
        result = shipper.backfill(file)
        assert (result.returncode, result.summary["outcome"]) == (4, "gave_up")
        for words in ("clock", "behind the service's", "NTP", "records.max_future_seconds"):
            assert words in result.summary["message"]
        (paused,) = log_lines(result, "delivery_paused")
        assert paused["reason"] == "clock"
        assert shipper.read_state().dead_letters == ()
        settings = {"records.max_future_seconds": 366 * 86_400}
        assert shipper.backfill(file, settings=settings).counts() == (5, 5, 0, 0, 0)


def test_delivery_waits_for_a_service_that_cannot_be_asked_for_the_time(shipper: Shipper, sample: Sample):
    file = shipper.write("events.ndjson", *[changed(line, Timestamp=now_by(86_400)) for line in sample.lines[:300]])
    right, shipper.target = shipper.target, shipper.target._replace(base_url="http://127.0.0.1:9")
    shipper.shortened |= {"shipper.pipeline.packer.FAIL_FAST_S": 0.3}
    result = shipper.backfill(file, settings={"delivery.give_up_after_seconds": 1})
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up")
    assert result.summary["seconds"] >= 1, "this is no setup problem"
    assert "the service's time is unknown" in result.summary["message"]
    shipper.target = shipper.target._replace(base_url="https://intake.invalid")
    assert "was not found" in shipper.backfill(file).summary["message"]
    assert shipper.read_state().dead_letters == ()
    shipper.target = right
    result = shipper.backfill(file)
    assert (result.returncode, result.counts()) == (3, (300, 0, 300, 0, 0)), "they are from the future"
    assert {letter.rule for letter in shipper.read_state().dead_letters} == {"timestamp"}
    assert "max_future_seconds" in shipper.read_state().dead_letters[0].message


@pytest.mark.skipif(not FAKETIME, reason="libfaketime is not installed")
def test_a_run_resumes_when_its_clock_is_corrected(shipper: Shipper, service: Service, sample: Sample):
    clock = shipper.write("clock", b"-365d\n")
    file = shipper.write("events.ndjson", *[changed(line, Timestamp=now_by(-60)) for line in sample.lines[:300]])
    running = shipper.start(
        "run",
        settings={**QUICK, "input.include": json.dumps([str(file)])},
        env=with_clock(clock),
    )
    running.wait_for("delivery_paused")
    assert '"reason":"clock"' in running.stderr
    clock.write_text("+0\n")
    running.wait_until(lambda: service.stored == 300, "all is delivered", limit_s=30)
    assert running.stop().returncode == 0
    assert shipper.read_state().dead_letters == ()
