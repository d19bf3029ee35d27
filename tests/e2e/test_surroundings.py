"""The machine around it: odd names, holes in files, many files, logs that nobody reads, signals at bad moments."""

from __future__ import annotations

import os
import signal
import subprocess
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper

QUICK = {"batch.linger_seconds": 0.02, "input.poll_interval_seconds": 0.1, "state.commit_interval_seconds": 0.05}


NAMES = [b"caf\xe9.ndjson", "naïve →.ndjson".encode(), b"new\nline.ndjson", b"-c.ndjson"]


@pytest.mark.parametrize("command", ["backfill", "run"])
def test_any_name_of_a_file_will_do(shipper: Shipper, service: Service, sample: Sample, command: str):
    folder = shipper.folder / "logs"
    folder.mkdir()
    files = [folder / os.fsdecode(name) for name in NAMES]
    for index, file in enumerate(files):
        lines = sample.lines[index * 10 : index * 10 + 10]
        file.write_bytes(b"{}\n" + b"".join(lines) + lines[0])
    if command == "backfill":
        result = shipper.backfill(folder)
        assert (result.returncode, result.counts()) == (3, (48, 40, 4, 4, 0))
        assert shipper.backfill(*files).counts() == (0, 0, 0, 0, 0)
        assert shipper.run("validate", *files).returncode == 3
    else:
        running = shipper.start("run", settings={"input.include": f'["{folder}"]', **QUICK})
        running.wait_until(lambda: service.stored == 40, "all good records")
        assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:40])


@pytest.mark.parametrize("command", ["backfill", "pipe", "run"])
def test_a_hole_in_front_of_a_line_costs_no_record(shipper: Shipper, service: Service, sample: Sample, command: str):
    """A writer without O_APPEND goes on at its old offset after a copytruncate: the file begins with a hole."""
    file = shipper.folder / "events.ndjson"
    with file.open("wb") as out:
        for index, hole_bytes in enumerate((500_000, 3_000_000, 100)):
            out.seek(hole_bytes, os.SEEK_CUR)
            out.writelines(sample.lines[index * 10 : index * 10 + 10])
    if command == "run":
        running = shipper.start("run", settings={"input.include": f'["{file}"]', **QUICK})
        running.wait_until(lambda: service.stored == 30, "all records")
        assert running.stop().returncode == 0
    else:
        with file.open("rb") as stdin:
            paths = [file] if command == "backfill" else []
            result = shipper.run(command, *paths, "--summary", "json", stdin=stdin)
        assert (result.returncode, result.counts()) == (0, (30, 30, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:30])
    assert shipper.read_state().dead_letters == ()


def test_many_small_files_are_no_burden(shipper: Shipper, service: Service, sample: Sample):
    folder = shipper.folder / "logs"
    folder.mkdir()
    for number in range(1500):
        (folder / f"{number:05}.ndjson").write_bytes(sample.lines[number])
    result = shipper.backfill(folder, limit_s=20)
    assert (result.returncode, result.counts()) == (0, (1500, 1500, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:1500])


def test_more_files_than_may_be_open_are_all_followed(shipper: Shipper, service: Service, sample: Sample):
    folder = shipper.folder / "logs"
    folder.mkdir()
    for number in range(150):
        (folder / f"{number:05}.ndjson").write_bytes(sample.lines[number])
    running = shipper.start(
        "run", settings={"input.include": f'["{folder}"]', **QUICK}, prefix=["prlimit", "--nofile=100", "--"]
    )
    running.wait_until(lambda: service.stored == 150, "all records")
    assert running.stop().returncode == 0


def test_a_log_that_nobody_reads_any_more_does_not_end_a_run(shipper: Shipper, service: Service, sample: Sample):
    file = shipper.folder / "events.ndjson"
    file.touch()
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    command = f'exec "$0" "$@" 2>&{writing_end}'
    running = shipper.start(
        "run",
        "--log-level",
        "debug",
        settings={"input.include": f'["{file}"]', **QUICK},
        prefix=["bash", "-c", command],
        pass_fds=[writing_end],
    )
    os.close(writing_end)
    for count in (10, 20):
        with file.open("ab") as out:
            out.writelines(sample.lines[count - 10 : count])
        running.wait_until(lambda count=count: service.stored == count, "the records")
    result = running.stop()
    assert result.returncode == 0
    assert service.times_received() == dict.fromkeys(sample.ids[:20], 1)
    assert shipper.read_state().accepted == 20


def test_a_log_that_nobody_reads_does_not_hide_what_is_pending(shipper: Shipper, service: Service, sample: Sample):
    """Exit code 0 would tell a script to delete the file."""
    shipper.target = service.target._replace(subscription_key="wrong")
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:10]))
    line = 'exec 3>&1; { "$0" "$@" 2>&4; echo code $? >&3; } 4>&1 1>/dev/null | true'
    result = shipper.run(
        "backfill", file, settings={"delivery.give_up_after_seconds": 0.3}, prefix=["bash", "-c", line]
    )
    assert result.stdout == "code 4\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_do_not_matter(shipper: Shipper, service: Service, sample: Sample, closed: str):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"{}\n" + b"".join(sample.lines[:10]))
    result = shipper.run("backfill", file, "--summary", "json", prefix=["sh", "-c", f'exec "$0" "$@" {closed}'])
    assert result.returncode == 3
    service.assert_holds_exactly(sample.ids[:10])
    state = shipper.read_state()
    assert (state.read, state.accepted, state.rules) == (11, 10, ["event_id"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_while_it_starts_leaves_no_traceback_and_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, rng: Random, number: signal.Signals
):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:5000]))
    early = 0
    for _ in range(3):
        subprocess.run(["rm", "-f", shipper.state / "lock"], check=True, timeout=10)
        running = shipper.start("backfill", file, settings={"batch.max_events": 10})
        running.wait_until((shipper.state / "lock").exists, "it begins")
        try:
            running.process.wait(rng.uniform(0, 0.1))
        except subprocess.TimeoutExpired:
            running.process.send_signal(number)
        result = running.finish()
        assert result.returncode in {0, 4, 130, 143, -number}, result
        early += result.returncode not in {0, 4}
    assert shipper.backfill(file).returncode == 0
    service.assert_holds_exactly(sample.ids[:5000])


def test_a_foreign_file_in_the_spool_is_left_alone(shipper: Shipper, service: Service, sample: Sample):
    assert shipper.pipe(sample.lines[0]).returncode == 0
    foreign = shipper.state / "spool" / "notes.ndjson"
    foreign.write_bytes(sample.lines[1])
    assert shipper.pipe(sample.lines[2]).counts() == (1, 1, 0, 0, 0)
    assert shipper.run("backfill", shipper.folder / "settings.toml").returncode == 3
    assert foreign.read_bytes() == sample.lines[1]
    assert service.event_ids() == [sample.ids[0], sample.ids[2]]
