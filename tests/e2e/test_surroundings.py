"""The environment: odd names, holes in files, many files, unread logs, signals at bad moments."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper, wait_until

NAMES = [b"caf\xe9.ndjson", "naïve →.ndjson".encode(), b"new\nline.ndjson", b"-c.ndjson"]


def test_a_run_follows_files_of_any_name_and_loses_no_record_after_a_hole(
    shipper: Shipper, service: Service, sample: Sample
):
    """A writer without O_APPEND continues at its old offset after a copytruncate: the file begins with a hole."""
    folder = shipper.folder / "logs"
    folder.mkdir()
    for index, name in enumerate(NAMES):
        lines = sample.lines[index * 10 : index * 10 + 10]
        (folder / os.fsdecode(name)).write_bytes(b"{}\n" + b"".join(lines) + lines[0])
    with (folder / "holes.ndjson").open("wb") as out:
        for index, hole_bytes in enumerate((500_000, 3_000_000, 100)):
            out.seek(hole_bytes, os.SEEK_CUR)
            out.writelines(sample.lines[40 + index * 10 : 50 + index * 10])
    running = shipper.start("run", settings={"input.include": f'["{folder}"]', **QUICK})
    running.wait_until(lambda: service.stored == 70, "all good records")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(sample.ids[:70])
    state = shipper.read_state()
    assert (state.read, state.dead_lettered, state.duplicates) == (78, 4, 4)


@pytest.mark.parametrize("is_there_before", [True, False])
def test_a_folder_with_an_undecodable_name_does_not_prevent_watching_the_others(
    shipper: Shipper, service: Service, sample: Sample, is_there_before: bool
):
    top = shipper.folder / "logs"
    odd, plain = top / os.fsdecode(b"caf\xe9"), top / "plain"
    plain.mkdir(parents=True)
    (plain / "a.ndjson").write_bytes(sample.lines[0])
    if is_there_before:
        odd.mkdir()
    settings = {"input.include": f'["{top}/**/*.ndjson"]', **QUICK, "input.poll_interval_seconds": 3600}
    running = shipper.start("run", settings=settings)
    running.wait_until(lambda: service.stored == 1, "the first poll")
    if not is_there_before:
        odd.mkdir()
    (odd / "b.ndjson").touch()
    running.wait_for("watch_unavailable")
    for number in range(1, 4):  # the watch without that folder may not exist yet
        with suppress(AssertionError):
            (plain / f"{number}.ndjson").write_bytes(sample.lines[number])
            wait_until(lambda: service.stored > 1, "the file is found, though the next poll is an hour away", limit_s=5)
            break
    assert service.stored > 1
    result = running.stop()
    assert result.returncode == 0
    told = [line for line in result.stderr.splitlines() if "watch_unavailable" in line]
    assert len(told) == 1
    assert "caf" in told[0]
    assert "plain" not in told[0]


def test_many_small_files_are_delivered(shipper: Shipper, service: Service, sample: Sample):
    folder = shipper.folder / "logs"
    folder.mkdir()
    for number in range(500):
        (folder / f"{number:05}.ndjson").write_bytes(sample.lines[number])
    result = shipper.backfill(folder)
    assert (result.returncode, result.counts()) == (0, (500, 500, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:500])


def test_a_run_continues_when_its_log_is_no_longer_read(shipper: Shipper, service: Service, sample: Sample):
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


def test_an_unread_log_does_not_change_the_exit_code_for_pending_records(
    shipper: Shipper, service: Service, sample: Sample
):
    """A script would delete the file on exit code 0."""
    shipper.target = service.target._replace(subscription_key="wrong")
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:10]))
    line = 'exec 3>&1; { "$0" "$@" 2>&4; echo code $? >&3; } 4>&1 1>/dev/null | true'
    result = shipper.run(
        "backfill", file, settings={"delivery.give_up_after_seconds": 0.3}, prefix=["bash", "-c", line]
    )
    assert result.stdout == "code 4\n"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_the_command_works_with_closed_standard_descriptors(
    shipper: Shipper, service: Service, sample: Sample, closed: str
):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"{}\n" + b"".join(sample.lines[:10]))
    result = shipper.run("backfill", file, "--summary", "json", prefix=["sh", "-c", f'exec "$0" "$@" {closed}'])
    assert result.returncode == 3
    service.assert_holds_exactly(sample.ids[:10])
    state = shipper.read_state()
    assert (state.read, state.accepted, state.rules) == (11, 10, ["event_id"])


@pytest.mark.parametrize(
    ("command", "code", "number"),
    [(["run"], 0, signal.SIGTERM), (["pipe"], 4, signal.SIGINT), (["backfill", "events.ndjson"], 4, signal.SIGTERM)],
    ids=str,
)
def test_a_stop_during_import_ends_with_a_documented_exit_code(
    shipper: Shipper, service: Service, sample: Sample, command: list[str], code: int, number: signal.Signals
):
    (shipper.folder / "events.ndjson").write_bytes(b"".join(sample.lines[:10]))
    settings = {"input.include": '["events.ndjson"]', **QUICK}
    for _ in range(20):
        running = shipper.start(*command, settings=settings, stdin=subprocess.PIPE, fresh=True)
        while not running.has_ended and not _catches(running.pid, number):
            os.sched_yield()
        running.process.send_signal(number)
        was_loaded = _has_loaded(running.pid, "uvloop")
        result = running.finish()
        if not was_loaded:  # on a busy machine, it may have continued before the check
            break
    assert not was_loaded, "no signal arrived during the import"
    assert result.returncode == code, result
    assert shipper.backfill("events.ndjson").returncode == 0
    service.assert_holds_exactly(sample.ids[:10])


def test_a_stop_during_exit_changes_nothing(shipper: Shipper, sample: Sample):
    """The interpreter removes its signal handlers while it exits."""
    (shipper.folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):\n"
        "        kill(pid, 15)\n"
        "        write(2, b'signalled')\n"
        "sys.last = Last()\n"
    )
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:10]))
    result = shipper.backfill(file, env={"PYTHONPATH": str(shipper.folder)})
    assert (result.returncode, result.stderr[-9:]) == (0, "signalled")


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process handles a signal with its own handler, not Python's default."""
    with suppress(FileNotFoundError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):  # Python always handles SIGINT; SIGTERM is set after it
                mask = int(line.split()[1], 16)
                return bool(mask >> (signal.SIGTERM - 1) & mask >> (number - 1) & 1)
    return False


def _has_loaded(pid: int, module: str) -> bool:
    try:
        return module in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_signal_during_startup_causes_no_traceback_and_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    file = shipper.folder / "events.ndjson"
    file.write_bytes(b"".join(sample.lines[:2000]))
    for number in (signal.SIGTERM, signal.SIGINT):
        (shipper.state / "lock").unlink(missing_ok=True)
        running = shipper.start("backfill", file, settings={"batch.max_events": 10}, fresh=True)
        running.wait_until((shipper.state / "lock").exists, "it starts")
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(rng.uniform(0, 0.1))
        running.process.send_signal(number)
        result = running.finish()
        assert result.returncode in {0, 4}, result
    assert shipper.backfill(file).returncode == 0
    service.assert_holds_exactly(sample.ids[:2000])
