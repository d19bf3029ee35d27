"""The environment: odd and hostile names, holes in files, unread logs, signals at bad moments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Service, Shipper, wait_until
from tests.e2e.files import Tail, append, compress, copytruncate
from tests.e2e.surroundings import site_of


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
        append(file, *sample.lines[count - 10 : count])
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
    file = shipper.write("events.ndjson", *sample.lines[:10])
    line = 'exec 3>&1; { "$0" "$@" 2>&4; echo code $? >&3; } 4>&1 1>/dev/null | true'
    result = shipper.run(
        "backfill", file, settings={"delivery.give_up_after_seconds": 0.3}, prefix=["bash", "-c", line]
    )
    assert result.stdout == "code 4\n"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_the_command_works_with_closed_standard_descriptors(
    shipper: Shipper, service: Service, sample: Sample, closed: str
):
    file = shipper.write("events.ndjson", b"{}\n" + b"".join(sample.lines[:10]))
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
    shipper.write("events.ndjson", *sample.lines[:10])
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
    code = (
        "import os, sys\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):\n"
        "        kill(pid, 15)\n"
        "        write(2, b'signalled')\n"
        "sys.last = Last()\n"
    )
    file = shipper.write("events.ndjson", *sample.lines[:10])
    result = shipper.backfill(file, env=site_of(shipper.folder, code))
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
    file = shipper.write("events.ndjson", *sample.lines[:2000])
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


# Hostile file names -------------------------------------------------------------------------------------------------


FORGED = 'x.ndjson\n{"event":"delivery_paused","level":"error","reason":"forged"}'
ODD_NAMES = [
    FORGED,
    "clear\x1b[2J\x1b]0;title\x07.ndjson",
    "turned\u202e\u2066.ndjson",
    "carriage\rreturn.ndjson",
    "next\x85line\u2028.ndjson",
    "[red]markup[bold].ndjson",
    os.fsdecode(b"bytes\xff\xfe.ndjson"),
    "--set intake.base_url=http:x",
    "%s{0}$HOME`id`.ndjson",
    os.fsdecode(b"caf\xe9.ndjson"),
    "naïve →.ndjson",
    "-c.ndjson",
]
COMMANDS = ("\x1b", "\x07", "\r", "\x85", "\u2028", "\u202e", "\u2066")  # interpreted by a terminal


@pytest.fixture
def folder(shipper: Shipper, sample: Sample) -> Path:
    """Files with odd names, each with three good records and a refused one."""
    for index, name in enumerate(ODD_NAMES):
        shipper.write(f"logs/{name}", b"{}\n", *sample.lines[index * 3 : index * 3 + 3])
    return shipper.folder / "logs"


def _check_text(text: str) -> None:
    """Assert that a text contains no control characters and no line forged by a name."""
    for command in COMMANDS:
        assert command not in text, repr(text)
    assert not any(line.startswith(('{"event":"delivery_paused"', 'ndjson"')) for line in text.split("\n")), text


def test_no_file_name_can_forge_a_log_line_or_move_the_cursor(
    shipper: Shipper, service: Service, sample: Sample, folder: Path
):
    """For a run on their folder, a backfill of each by its name, and the commands that show them."""
    count = len(ODD_NAMES)
    debug = ("--log-level", "debug", "--log-format")
    running = shipper.start("run", folder, *debug, "json", settings=QUICK)
    running.wait_until(lambda: shipper.read_state().read == 4 * count, "everything is saved")
    result = running.stop()
    state = shipper.read_state()
    assert (result.returncode, state.accepted, state.dead_lettered) == (0, 3 * count, count)
    _check_text(result.stderr)
    events = [json.loads(line)["event"] for line in result.stderr.splitlines() if line.startswith("{")]
    assert "delivery_paused" not in events

    for index, name in enumerate(ODD_NAMES, 3 * count):
        append(folder / name, b"{}\n" + sample.lines[index])
    result = shipper.backfill(*(folder / name for name in ODD_NAMES), *debug, "console")
    assert (result.returncode, result.counts()[:3]) == (3, (2 * count, count, count))
    _check_text(result.stderr)
    service.assert_holds_exactly(sample.ids[: 4 * count])

    for command in (["status", "--all"], ["dead-letters", "list"], ["dead-letters", "show", "1"], ["validate", "logs"]):
        result = shipper.run(*command)
        assert result.returncode in {0, 3}, result.stderr
        assert "ndjson" in result.stdout, command
        _check_text(result.stdout + result.stderr)


def test_a_pattern_may_follow_cycles_and_match_a_file_twice(shipper: Shipper, service: Service, sample: Sample):
    """Each file is read once, whatever path leads to it."""
    folder = shipper.folder / "logs"
    shipper.write("logs/a.ndjson", *sample.lines[:10])
    shipper.write("logs/deep/b.ndjson", *sample.lines[10:20])
    (folder / "deep" / "up").symlink_to("..")
    (folder / "deep" / "itself").symlink_to("itself")
    os.link(folder / "a.ndjson", folder / "deep" / "linked.ndjson")
    (folder / "soft.ndjson").symlink_to("deep/../a.ndjson")
    patterns = ["logs/**", "logs/deep/../*.ndjson", "logs/deep/up/deep/up/*.ndjson", "./logs/a.ndjson", folder]
    result = shipper.backfill(*patterns)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0)), result.stderr
    service.assert_holds_exactly(sample.ids[:20])


def test_folders_reachable_by_many_links_are_entered_once(shipper: Shipper, service: Service, sample: Sample):
    """Two links to parents in one folder create two to the power of forty paths of forty links."""
    folder = shipper.folder / "logs"
    shipper.write("logs/a.ndjson", *sample.lines[:10])
    shipper.write("logs/deep/b.ndjson", *sample.lines[10:20])
    for number in range(3):
        (folder / f"around{number}").symlink_to(".")
        (folder / "deep" / f"up{number}").symlink_to("..")
    settings = {"input.exclude": '["logs/**/*.gz"]'}
    result = shipper.backfill("logs/**", folder, "logs/**/*.ndjson", limit_s=60, settings=settings)
    assert (result.returncode, result.counts()) == (0, (20, 20, 0, 0, 0)), result.stderr
    service.assert_holds_exactly(sample.ids[:20])
    paths = {path for _, _, path, _ in shipper.read_state().checkpoints}
    assert paths == {str(folder / "a.ndjson"), str(folder / "deep" / "b.ndjson")}, "found by the paths without links"


def test_a_name_that_looks_like_an_option_is_a_file_after_two_dashes(
    shipper: Shipper, service: Service, sample: Sample
):
    for number, name in enumerate(("--config", "-", "--set=batch.max_events=0")):
        shipper.write(name, sample.lines[number])
    arguments = ["--summary", "json", "--config", shipper.config, "--", "--config", "--set=batch.max_events=0", "./-"]
    result = shipper.run(
        "backfill", *arguments, configured=False, env={"SHIPPER__INTAKE__BASE_URL": service.target.base_url}
    )
    assert (result.returncode, result.counts()) == (0, (3, 3, 0, 0, 0)), result.stderr
    service.assert_holds_exactly(sample.ids[:3])


def test_a_file_with_a_name_that_is_not_utf_8_is_followed_rotated_moved_and_reported(tail: Tail, shipper: Shipper):
    """In a folder with such a name; renamed while the shipper is stopped."""
    folder = tail.folder / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    tail.file = folder / os.fsdecode(b"app\xff.ndjson")
    tail.append(0, 10, tail.file)
    include = "caf*/app*.ndjson"
    tail.pass_by(include, 10)
    tail.append(10, 20, tail.file)
    rotated = tail.file.rename(folder / os.fsdecode(b"app\xff.ndjson.1"))
    tail.append(20, 30, tail.file)
    assert shipper.run("status", "--until", "now").returncode == 4
    os.mkfifo(folder / os.fsdecode(b"app\xff.fifo"))
    tail.start([include, "caf*/*.fifo"], input__on_complete="delete", input__rotate_wait_seconds=0)
    tail.wait(30)
    tail.running.wait_until(lambda: not rotated.exists(), "it is moved")
    tail.running.wait_for("is not a regular file")
    result = tail.stop(30)
    assert "app\\\\xff.ndjson" in result.stderr
    for line in result.stderr.splitlines():
        json.loads(line)
    state = json.loads(shipper.run("status", "--json", "--all").stdout)
    name = str(shipper.folder / "logs/caf\\xe9/app\\xff.ndjson")
    assert sorted(each["path"] for each in state["state"]["streams"]) == [name, f"{name}.1"]


def test_reading_resumes_in_the_copy_and_the_archive_of_a_file_with_a_name_that_is_not_utf_8(
    tail: Tail, sample: Sample
):
    tail.file = tail.folder / os.fsdecode(b"app\xff.log")
    tail.append(0, 10, tail.file)
    for number, suffix in enumerate(("1", "2.gz"), 1):
        tail.pass_by("app*.log", 20 * number - 10)
        tail.append(20 * number - 10, 20 * number, tail.file)
        copy = tail.folder / os.fsdecode(b"app\xff.log." + suffix.encode())
        copytruncate(tail.file, copy, sample.lines[20 * number : 20 * number + 10])
        if suffix.endswith(".gz"):
            compress(copy.rename(copy.with_suffix("")), "gz")
    tail.pass_by("app*.log", 50)
