"""A stuck stage: probes fail, the log names the position, and later starts skip it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Running, Service, Shipper, changed
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.files import Tail, append, log_lines
from tests.e2e.operated import Admin, Manager
from tests.e2e.surroundings import site_of
from tests.tools import tool

SOON = {**QUICK, "admin.stuck_seconds": 0.5}
ALL = "*.ndjson"
# Simulates an unknown bug in the codec: an endless loop at a certain record.
SITE = """
import ctypes, os, time
if "STICKS" in os.environ:
    from shipper.codec.judge import Judge
    judged = Judge.validate
    def validate(self, lines, latest):
        if any(b"sticky" in line for line in lines):
            open(os.environ["STICKS"], "w").close()
            if "STICKS_IN_C" in os.environ:
                ctypes.PyDLL(None).sleep(10**6)  # holds the interpreter's lock, for days
            while True:
                time.sleep(0.01)
        return judged(self, lines, latest)
    Judge.validate = validate
"""


# How long a stop waits for a hanging read; a process with LD_PRELOAD is a real start with the original constants.
HASTE = "import shipper.sources.reader as reader; reader._LIMIT_S = 0.3"


class Hangs:
    """Makes reads of files with `.hung` in their path hang, as if the disk did not answer."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._flag = folder / "hangs"
        self._flag.touch()
        self.env = {"LD_PRELOAD": str(library), "HANGS": str(self._flag), **site_of(folder, HASTE)}

    @property
    def are_waited_for(self) -> bool:
        return self._flag.with_name("hangs.waiting").exists()

    def end(self) -> None:
        self._flag.unlink()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hangs") / "hangs.so"
    source = Path(__file__).with_name("hangs.c")
    subprocess.run([tool("cc"), "-shared", "-fPIC", "-o", path, source, "-ldl"], check=True, timeout=60)
    return path


@pytest.fixture
def hangs(library: Path, shipper: Shipper) -> Iterator[Hangs]:
    hangs = Hangs(library, shipper.folder)
    yield hangs
    hangs._flag.unlink(missing_ok=True)


@pytest.fixture
def sticks(shipper: Shipper) -> dict[str, str]:
    """The environment of a shipper that gets stuck at a record of the user `sticky`."""
    # It gets stuck in a rule in Python; the native scanner has its own rules.
    return {**site_of(shipper.folder, SITE), "STICKS": str(shipper.folder / "stuck"), "SHIPPER_NATIVE": "0"}


def lines_with(sample: Sample, index: int) -> list[bytes]:
    """Return the first records, including the one that gets it stuck."""
    return [*sample.lines[:index], changed(sample.lines[index], Username="sticky"), *sample.lines[index + 1 : 40]]


def wait_until_stuck(running: Running) -> None:
    running.wait_until(lambda: log_lines(running, "stuck"), "it is stuck")


def wait_for_liveness(running: Running, admin: Admin, status: int) -> str:
    running.wait_until(lambda: admin.get("/healthz").status_code == status, f"/healthz is {status}")
    return admin.get("/healthz").text


def test_a_hanging_read_fails_the_liveness_probe_with_file_and_offset_until_it_ends(
    tail: Tail, hangs: Hangs, sample: Sample
):
    file = tail.append(0, 10, "a.hung.ndjson")
    hangs.end()
    running = tail.start(ALL, settings=SOON, env=hangs.env)
    tail.wait(10)
    admin = Admin(running)
    assert admin.get("/healthz").text == "ok\n"
    hangs._flag.touch()
    tail.append(10, 20, file)
    running.wait_until(lambda: hangs.are_waited_for, "a read")
    words = f"reading {file} from byte {len(b''.join(sample.lines[:10]))}"
    assert words in wait_for_liveness(running, admin, 503)
    headline = admin.status()["headline"]
    assert (headline["state"], headline["title"]) == ("bad", "Stuck")
    assert words[1:] in headline["sub"]
    (line,) = log_lines(running, "stuck")
    assert (line["stage"], line["path"], line["message"]) == ("read", str(file), words)
    hangs.end()
    assert wait_for_liveness(running, admin, 200) == "ok\n"
    tail.wait(20)
    assert log_lines(running, "stuck_over")
    assert running.stop().returncode == 0


def test_an_outage_a_pause_and_an_idle_input_are_not_reported_as_stuck(tail: Tail, fake: FakeService):
    fake.default = HANG
    tail.append(0, 40)
    settings = {**SOON, "batch.max_events": 10, "delivery.concurrency": 1, "delivery.read_timeout_seconds": 60}
    running = tail.start(settings=settings)
    admin = Admin(running)

    def waits_for(seconds: float) -> bool:
        assert admin.get("/healthz").status_code == 200
        live = admin.status()["live"] or {}
        return (live.get("oldest_unsettled_seconds") or 0) > seconds

    running.wait_until(lambda: waits_for(1.5), "records wait for the service three times as long as the limit")
    running.kill()
    fake.default = Reply(status=404)
    running = tail.start(settings=settings)
    admin = Admin(running)
    running.wait_for("delivery_paused")
    running.wait_until(lambda: waits_for(1.5), "records wait for the end of a pause")
    assert not log_lines(running, "stuck")
    running.kill()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def test_a_blocked_interpreter_stops_the_watchdog_notifications(
    tail: Tail, sticks: dict[str, str], manager: Manager, sample: Sample
):
    running = tail.start(ALL, settings=SOON, env=manager.env | sticks | {"STICKS_IN_C": "1"})
    running.wait_until(lambda: "WATCHDOG=1" in manager.hear(0.1), "watchdog notifications")
    append(tail.folder / "a.ndjson", *lines_with(sample, 5))
    running.wait_until(Path(sticks["STICKS"]).exists, "it is stuck")
    manager.hear(0.1)  # discard earlier lines
    assert "WATCHDOG=1" not in manager.hear(1.5)
    running.kill()


def test_a_hanging_read_stops_the_watchdog_notifications(tail: Tail, hangs: Hangs, manager: Manager):
    tail.append(0, 10, "a.hung.ndjson")
    running = tail.start(ALL, settings=SOON, env=manager.env | hangs.env)
    running.wait_until(lambda: log_lines(running, "stuck"), "it is stuck")
    manager.hear(0.1)
    lines = manager.hear(1.5)
    assert "WATCHDOG=1" not in lines
    assert any(line.startswith("STATUS=Stuck. Reading ") for line in lines) or not lines
    running.kill()


@pytest.mark.early
def test_a_stop_saves_settled_records_without_waiting_for_a_hanging_read(
    tail: Tail, shipper: Shipper, hangs: Hangs, service: Service
):
    tail.append(0, 10, "a.ndjson")
    tail.append(10, 20, "b.hung.ndjson")
    hangs.end()
    running = tail.start(ALL, settings=SOON, env=hangs.env)
    tail.wait(20)
    hangs._flag.touch()
    tail.append(20, 30, "b.hung.ndjson")
    wait_until_stuck(running)
    result = running.stop()
    assert result.returncode == 0, result.stderr
    assert (shipper.read_state().accepted, shipper.read_state().read) == (20, 20)
    hangs.end()
    running = tail.start(ALL, settings=SOON, env=hangs.env)
    tail.wait(30)
    assert running.stop().returncode == 0
    assert set(service.times_received().values()) == {1}


@pytest.mark.early
def test_a_signal_stops_a_hanging_backfill(tail: Tail, shipper: Shipper, hangs: Hangs):
    tail.append(0, 10, "a.hung.ndjson")
    running = shipper.start("backfill", tail.folder, settings=SOON, env=hangs.env)
    running.wait_until(lambda: hangs.are_waited_for, "a read")
    result = running.stop()
    assert result.returncode == 4, result.stderr
    hangs.end()
    assert shipper.backfill(tail.folder).counts() == (10, 10, 0, 0, 0)


# No restart loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_c", [False, True], ids=["in Python", "in C"])
def test_the_third_start_skips_a_record_at_which_two_were_stuck(
    tail: Tail, shipper: Shipper, sticks: dict[str, str], sample: Sample, is_in_c: bool
):
    lines = lines_with(sample, 25)
    append(tail.folder / "a.ndjson", *lines)
    env = sticks | ({"STICKS_IN_C": "1"} if is_in_c else {})
    traceback = shipper.state / "traceback"
    for _ in range(2):
        running = tail.start(ALL, settings=SOON, env=env)
        running.wait_until(Path(sticks["STICKS"]).exists, "it reaches the record")
        if is_in_c:
            running.wait_until(lambda: traceback.stat().st_size, "the interpreter is blocked")
        else:
            text = wait_for_liveness(running, Admin(running), 503)
            (line,) = log_lines(running, "stuck")
            assert line["message"] == f"validating records of {tail.folder / 'a.ndjson'} from byte {line['offset']}"
            assert f"stuck: {line['message']}, for " in text
        running.kill()
        Path(sticks["STICKS"]).unlink()
    running = tail.start(ALL, settings=SOON, env=env)
    good = [*range(25), *range(26, 40)]
    tail.wait(good)
    if is_in_c:
        (line,) = log_lines(running, "stuck_before")
        assert line["offset"] == len(b"".join(lines[:25]))
    running.wait_until(lambda: shipper.read_state().dead_letters, "the record is a dead letter")
    tail.append(40, 50, "a.ndjson")
    tail.wait([*good, *range(40, 50)])
    assert running.stop().returncode == 0
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.raw + b"\n", letter.start_offset) == ("stuck", lines[25], len(b"".join(lines[:25])))
    assert not (shipper.state / "stuck.json").exists()


@pytest.mark.parametrize("names", [False, True], ids=["a read", "a poll"])
def test_after_two_stuck_starts_a_hanging_file_is_skipped_and_the_others_are_read(
    tail: Tail, hangs: Hangs, names: bool
):
    bad, good = tail.folder / "a.hung.ndjson", tail.folder / "b.ndjson"
    tail.append(0, 10, bad)
    env = hangs.env | ({"HANGS_NAMES": "1"} if names else {})
    for _ in range(2):
        running = tail.start([bad.name, good.name], settings=SOON, env=env)
        wait_until_stuck(running)
        running.kill()
    tail.append(10, 20, good)
    running = tail.start([bad.name, good.name], settings=SOON, env=env)
    tail.wait(range(10, 20))
    admin = Admin(running)
    assert admin.get("/healthz").status_code == 200

    def troubles() -> list[str]:
        live = admin.status()["live"]
        return live["unreadable"] + live["unmatched"]

    running.wait_until(troubles, "the problem is reported")
    (trouble,) = troubles()
    assert str(bad) in trouble
    assert "admin.stuck_seconds" in trouble
    assert running.stop().returncode == 0
    hangs.end()
    running = tail.start([bad.name, good.name], settings=SOON, env=env)
    tail.wait(20)
    assert running.stop().returncode == 0
