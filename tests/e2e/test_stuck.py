"""A stage that does not come to an end: probes say so, the log says where, and the next starts get past it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import QUICK, Running, Service, Shipper, changed
from tests.e2e.fake_service import HANG, FakeService, Reply
from tests.e2e.files import told
from tests.e2e.operated import Admin, Manager
from tests.e2e.test_follow import append, wait_for_events
from tests.tools import tool

SOON = {**QUICK, "admin.stuck_seconds": 0.5}
# Stands in for a fault of the codec that nobody knows of: it has no end as soon as it comes to a certain record.
SITE = """
import ctypes, os, time
if "STICKS" in os.environ:
    from shipper.codec.judge import Judge
    judged = Judge.validate
    def validate(self, array, count, latest):
        if b"sticky" in array:
            open(os.environ["STICKS"], "w").close()
            if "STICKS_IN_C" in os.environ:
                ctypes.PyDLL(None).sleep(10**6)  # holds the interpreter's lock, for days
            while True:
                time.sleep(0.01)
        return judged(self, array, count, latest)
    Judge.validate = validate
"""


class Hangs:
    """Files that hang as if their disk did not answer: those with `.hung` in their path."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._flag = folder / "hangs"
        self._flag.touch()
        self.env = {"LD_PRELOAD": str(library), "HANGS": str(self._flag)}

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
    site = shipper.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    # A rule in Python is what it gets stuck in; the native scanner has its own.
    return {"PYTHONPATH": str(site), "STICKS": str(shipper.folder / "stuck"), "SHIPPER_NATIVE": "0"}


@pytest.fixture
def run(shipper: Shipper, folder: Path) -> Callable[..., Running]:
    def start(*patterns: str, env: dict[str, str], **settings: object) -> Running:
        include = [str(folder / pattern) for pattern in patterns or ("*.ndjson",)]
        named = {key.replace("__", "."): value for key, value in settings.items()}
        return shipper.start("run", settings={"input.include": json.dumps(include), **SOON, **named}, env=env)

    return start


Run = Callable[..., Running]


def lines_with(sample: Sample, index: int) -> list[bytes]:
    """The first records, with the one that sticks."""
    return [*sample.lines[:index], changed(sample.lines[index], Username="sticky"), *sample.lines[index + 1 : 40]]


def wait_until_stuck(running: Running) -> None:
    running.wait_until(lambda: told(running, "stuck"), "it is stuck")


def wait_for_liveness(running: Running, admin: Admin, status: int) -> str:
    running.wait_until(lambda: admin.get("/healthz").status_code == status, f"/healthz is {status}")
    return admin.get("/healthz").text


def test_a_read_that_hangs_fails_the_liveness_with_file_and_offset_until_it_goes_on(
    run: Run, folder: Path, hangs: Hangs, service: Service, sample: Sample
):
    file = folder / "a.hung.ndjson"
    append(file, sample.lines[:10])
    hangs.end()
    running = run(env=hangs.env)
    wait_for_events(running, service, sample.ids[:10])
    admin = Admin(running)
    assert admin.get("/healthz").text == "ok\n"
    hangs._flag.touch()
    append(file, sample.lines[10:20])
    running.wait_until(lambda: hangs.are_waited_for, "a read")
    words = f"reading {file} from byte {len(b''.join(sample.lines[:10]))} on"
    assert words in wait_for_liveness(running, admin, 503)
    headline = admin.status()["headline"]
    assert (headline["state"], headline["title"]) == ("bad", "Stuck")
    assert words[1:] in headline["sub"]
    (line,) = told(running, "stuck")
    assert (line["stage"], line["path"], line["message"]) == ("read", str(file), words)
    hangs.end()
    assert wait_for_liveness(running, admin, 200) == "ok\n"
    wait_for_events(running, service, sample.ids[:20])
    assert told(running, "stuck_over")
    assert running.stop().returncode == 0


def test_records_that_are_validated_without_end_fail_the_liveness_with_file_and_offset(
    run: Run, folder: Path, sticks: dict[str, str], sample: Sample
):
    file = folder / "a.ndjson"
    append(file, lines_with(sample, 5))
    running = run(env=sticks)
    admin = Admin(running)
    words = f"validating records of {file} from byte 0 on"
    assert words in wait_for_liveness(running, admin, 503)
    (line,) = told(running, "stuck")
    assert (line["stage"], line["path"], line["offset"], line["message"]) == ("validate", str(file), 0, words)
    running.kill()


def test_an_outage_a_pause_and_nothing_to_read_are_not_taken_for_stuck(
    run: Run, shipper: Shipper, folder: Path, fake: FakeService, sample: Sample
):
    fake.default = HANG
    shipper.target = fake.target
    file = folder / "a.ndjson"
    append(file, sample.lines[:40])
    settings = {"batch__max_events": 10, "delivery__concurrency": 1, "delivery__read_timeout_seconds": 60}
    running = run(env={}, **settings)
    admin = Admin(running)

    def waits_for(seconds: float) -> bool:
        assert admin.get("/healthz").status_code == 200
        live = admin.status()["live"] or {}
        return (live.get("oldest_unsettled_seconds") or 0) > seconds

    running.wait_until(lambda: waits_for(1.5), "what was read waits for the service, three times as long as the limit")
    running.kill()
    fake.default = Reply(status=404)
    running = run(env={}, **settings)
    admin = Admin(running)
    running.wait_for("delivery_paused")
    running.wait_until(lambda: waits_for(1.5), "what was read waits for a pause to end")
    assert not told(running, "stuck")
    running.kill()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@pytest.mark.parametrize("is_in_c", [False, True], ids=["in Python", "in C"])
def test_a_stuck_shipper_gives_the_watchdog_no_sign_of_life(
    run: Run, folder: Path, sticks: dict[str, str], manager: Manager, sample: Sample, is_in_c: bool
):
    running = run(env=manager.env | sticks | ({"STICKS_IN_C": "1"} if is_in_c else {}))
    running.wait_until(lambda: "WATCHDOG=1" in manager.hear(0.1), "signs of life")
    append(folder / "a.ndjson", lines_with(sample, 5))
    running.wait_until(Path(sticks["STICKS"]).exists, "it is stuck")
    manager.hear(0.1)  # what was said before
    assert "WATCHDOG=1" not in manager.hear(3)
    running.kill()


def test_a_read_that_hangs_gives_the_watchdog_no_sign_of_life(
    run: Run, folder: Path, hangs: Hangs, manager: Manager, sample: Sample
):
    append(folder / "a.hung.ndjson", sample.lines[:10])
    running = run(env=manager.env | hangs.env)
    running.wait_until(lambda: told(running, "stuck"), "it is stuck")
    manager.hear(0.1)
    lines = manager.hear(3)
    assert "WATCHDOG=1" not in lines
    assert any(line.startswith("STATUS=Stuck. Reading ") for line in lines) or not lines
    running.kill()


@pytest.mark.early
def test_a_stop_saves_what_is_settled_and_does_not_wait_for_a_read_that_hangs(
    run: Run, shipper: Shipper, folder: Path, hangs: Hangs, service: Service, sample: Sample
):
    append(folder / "a.ndjson", sample.lines[:10])
    append(folder / "b.hung.ndjson", sample.lines[10:20])
    hangs.end()
    running = run(env=hangs.env)
    wait_for_events(running, service, sample.ids[:20])
    hangs._flag.touch()
    append(folder / "b.hung.ndjson", sample.lines[20:30])
    wait_until_stuck(running)
    result = running.stop()
    assert result.returncode == 0, result.stderr
    assert (shipper.read_state().accepted, shipper.read_state().read) == (20, 20)
    hangs.end()
    running = run(env=hangs.env)
    wait_for_events(running, service, sample.ids[:30])
    assert running.stop().returncode == 0
    assert set(service.times_received().values()) == {1}


@pytest.mark.early
def test_a_backfill_that_hangs_is_stopped_by_a_signal(
    shipper: Shipper, folder: Path, hangs: Hangs, service: Service, sample: Sample
):
    append(folder / "a.hung.ndjson", sample.lines[:10])
    running = shipper.start("backfill", folder, settings=SOON, env=hangs.env)
    running.wait_until(lambda: hangs.are_waited_for, "a read")
    result = running.stop()
    assert result.returncode == 4, result.stderr
    hangs.end()
    assert shipper.backfill(folder).counts() == (10, 10, 0, 0, 0)


# No loop of restarts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_c", [False, True], ids=["in Python", "in C"])
def test_the_third_start_gets_past_a_record_that_two_were_stuck_at(
    run: Run, shipper: Shipper, folder: Path, sticks: dict[str, str], service: Service, sample: Sample, is_in_c: bool
):
    lines = lines_with(sample, 25)
    append(folder / "a.ndjson", lines)
    env = sticks | ({"STICKS_IN_C": "1"} if is_in_c else {})
    traceback = shipper.state / "traceback"
    for _ in range(2):
        running = run(env=env)
        running.wait_until(Path(sticks["STICKS"]).exists, "it comes to the record")
        if is_in_c:
            running.wait_until(lambda: traceback.stat().st_size, "the interpreter stands still")
        else:
            wait_until_stuck(running)
        running.kill()
        Path(sticks["STICKS"]).unlink()
    running = run(env=env)
    good = [*sample.ids[:25], *sample.ids[26:40]]
    wait_for_events(running, service, good)
    if is_in_c:
        (line,) = told(running, "stuck_before")
        assert line["offset"] == len(b"".join(lines[:25]))
    running.wait_until(lambda: shipper.read_state().dead_letters, "the record is a dead letter")
    append(folder / "a.ndjson", sample.lines[40:50])
    wait_for_events(running, service, [*good, *sample.ids[40:50]])
    assert running.stop().returncode == 0
    (letter,) = shipper.read_state().dead_letters
    assert (letter.rule, letter.raw + b"\n", letter.start_offset) == ("stuck", lines[25], len(b"".join(lines[:25])))
    assert service.holds([*good, *sample.ids[40:50]])
    assert not (shipper.state / "stuck.json").exists()


@pytest.mark.parametrize("names", [False, True], ids=["a read", "a look"])
def test_after_two_stuck_starts_a_file_that_hangs_stands_aside_and_the_others_go_on(
    run: Run, shipper: Shipper, folder: Path, hangs: Hangs, service: Service, sample: Sample, names: bool
):
    bad, good = folder / "a.hung.ndjson", folder / "b.ndjson"
    append(bad, sample.lines[:10])
    env = hangs.env | ({"HANGS_NAMES": "1"} if names else {})
    for _ in range(2):
        running = run(bad.name, good.name, env=env)
        wait_until_stuck(running)
        running.kill()
    append(good, sample.lines[10:20])
    running = run(bad.name, good.name, env=env)
    wait_for_events(running, service, sample.ids[10:20])
    admin = Admin(running)
    assert admin.get("/healthz").status_code == 200

    def troubles() -> list[str]:
        live = admin.status()["live"]
        return live["unreadable"] + live["unmatched"]

    running.wait_until(troubles, "it is told")
    (trouble,) = troubles()
    assert str(bad) in trouble
    assert "admin.stuck_seconds" in trouble
    assert running.stop().returncode == 0
    hangs.end()
    running = run(bad.name, good.name, env=env)
    wait_for_events(running, service, sample.ids[:20])
    assert running.stop().returncode == 0


def test_a_shipper_that_is_killed_over_and_over_suspects_nothing(
    run: Run, shipper: Shipper, folder: Path, service: Service, sample: Sample
):
    append(folder / "a.ndjson", sample.lines[:2000])
    for start in range(3):
        append(folder / "a.ndjson", sample.lines[2000 + 100 * start : 2100 + 100 * start])
        running = run(env={}, batch__max_events=50, admin__stuck_seconds=30)
        running.wait_until(lambda low=service.stored: service.stored > low, "it delivers")
        running.kill()
        assert not (shipper.state / "stuck.json").exists()
    running = run(env={})
    Admin(running)  # all of it may have arrived before
    wait_for_events(running, service, sample.ids[:2300])
    assert running.stop().returncode == 0
    assert not shipper.read_state().dead_letters
