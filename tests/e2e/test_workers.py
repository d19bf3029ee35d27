"""`shipper backfill --workers N`: the same promise, with several processes."""

from __future__ import annotations

import gzip
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import typer

from shipper.cli.ship import checked_workers
from shipper.sources.reader import READ_BYTES
from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed, wait_until
from tests.e2e.fake_service import HANG, FakeService, Reply

POISON = b'"XX"'  # refused by the service, not by the rules
SLOW = {"batch.max_events": 20, "delivery.concurrency": 2, "state.commit_interval_seconds": 0.02}
EVENTS = 10_000


def workers_of(running: Running) -> list[int]:
    """The processes that a shipper has started."""
    workers = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for child in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):
                if b"shipper.cli.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    workers.append(int(child))
    return workers


def kill(process_id: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def few(shipper: Shipper, sample: Sample) -> Path:
    path = shipper.folder / "few.ndjson"
    path.write_bytes(b"".join(sample.lines[:100]))
    return path


def is_running(process_id: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    return False


def exports(folder: Path, lines: list[bytes], each: int) -> Path:
    """Write lines into files, which are a chunk of work each; every other one is an archive."""
    folder.mkdir()
    for number, start in enumerate(range(0, len(lines), each)):
        part = b"".join(lines[start : start + each])
        if number % 2:
            (folder / f"{number:03}.ndjson.gz").write_bytes(gzip.compress(part, 1))
        else:
            (folder / f"{number:03}.ndjson").write_bytes(part)
    return folder


def test_what_one_process_ships_several_ship(shipper: Shipper, service: Service, sample: Sample):
    path = shipper.folder / "one.ndjson"
    path.write_bytes(b"".join(sample.lines[:EVENTS]))
    running = shipper.start("backfill", path, "--workers", "3", "--summary", "json", settings=SLOW)
    running.wait_until(lambda: len(workers_of(running)) == 3 and service.received > 100, "all are at work")
    result = running.finish(limit_s=60)
    assert (result.returncode, result.summary["outcome"]) == (0, "finished")
    assert result.counts() == (EVENTS, EVENTS, 0, 0, 0)
    assert result.summary["requests"] == result.summary["batches"] >= EVENTS / 20
    service.assert_holds_exactly(sample.ids[:EVENTS])
    assert service.counts()["duplicates"] == 0
    again = shipper.backfill(path, "--workers", "2")
    assert (again.returncode, again.counts()) == (0, (0, 0, 0, 0, 0))


def test_many_small_files_archives_and_other_formats_are_shared_out_and_cut_as_ever(
    shipper: Shipper, service: Service, sample: Sample
):
    folder = exports(shipper.folder / "exports", sample.lines[:2000], 50)
    documents = [json.loads(line) for line in sample.lines[2000:10_000]]
    names = list(documents[0])
    rows = [",".join(names), *(",".join(str(each[name]) for name in names) for each in documents[:7000])]
    (folder / "a.csv").write_text("\n".join(rows) + "\n")
    assert (folder / "a.csv").stat().st_size > READ_BYTES
    (folder / "b.json").write_text(json.dumps(documents[7000:], indent=1))
    result = shipper.backfill(folder, "--workers", "2", settings={"input.format": "auto"})
    assert (result.returncode, result.counts()) == (0, (10_000, 10_000, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:10_000])
    assert len(shipper.read_state().checkpoints) == 42


def test_dead_letters_are_those_of_one_process(shipper: Shipper, fake: FakeService, sample: Sample, tmp_path: Path):
    shipper.target = fake.target
    fake.default = lambda: Reply(status=400) if POISON in fake.bodies[-1] else Reply()
    bad = set(range(100, EVENTS, 1500))
    poison = set(range(7, EVENTS, 4000))
    lines = [
        b"{ no record\n" if index in bad else changed(line, ConsumerCountry="XX") if index in poison else line
        for index, line in enumerate(sample.lines[:EVENTS])
    ]
    path = shipper.folder / "mixed.ndjson"
    path.write_bytes(b"".join(lines))
    # Bodies arrive side by side: what is planned looks at the last one that came. So, one sender each.
    result = shipper.backfill(path, "--workers", "2", settings={"delivery.concurrency": 2})
    assert result.returncode == 3
    letters = shipper.read_state().dead_letters
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    by_rule = {rule: {each.start_offset for each in letters if each.rule == rule} for rule in ("json", "rejected")}
    assert by_rule["json"] == {offsets[index] for index in bad}
    assert by_rule["rejected"] >= {offsets[index] for index in poison}
    assert all(each.raw + b"\n" == lines[offsets.index(each.start_offset)] for each in letters)
    assert {each.path for each in letters} == {str(path)}


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    folder = exports(shipper.folder / "exports", sample.lines[:EVENTS], 500)
    running = shipper.start("backfill", folder, "--workers", "2", "--summary", "json", settings=SLOW)
    killed: set[int] = set()
    while not running.has_ended and len(killed) < 3:
        goal = service.received + rng.randint(1, 1000)
        wait_until(lambda goal=goal: running.has_ended or service.received >= goal, "some more")
        victims = [] if running.has_ended else workers_of(running)
        if victims:
            killed.add(rng.choice(victims))
            for victim in killed.intersection(victims):
                kill(victim)
    result = running.finish(limit_s=60)
    assert len(killed) >= 2
    assert (result.returncode, result.summary["outcome"]) == (0, "finished")
    assert result.counts() == (EVENTS, EVENTS, 0, 0, 0)
    service.assert_holds_exactly(sample.ids[:EVENTS])
    assert result.stderr.count("worker_lost") >= 2


def test_a_worker_that_is_lost_again_and_again_ends_the_run_with_a_reason(
    shipper: Shipper, service: Service, few: Path, tmp_path: Path
):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'shipper.cli.worker' in sys.orig_argv: os.kill(os.getpid(), 9)\n"
    )
    result = shipper.backfill(few, "--workers", "2", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "ended 5 times in a row without progress, the last time with status -9" in result.stderr
    assert "its records stay pending" in result.stderr
    assert result.stderr.count("worker_lost") >= 5
    assert (shipper.read_state().read, service.received) == (0, 0)
    assert shipper.backfill(few).counts() == (100, 100, 0, 0, 0)


def test_killed_as_a_whole_at_random_moments_it_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, rng: Random
):
    folder = exports(shipper.folder / "exports", sample.lines[:EVENTS], 500)
    for _ in range(2):
        running = shipper.start("backfill", folder, "--workers", "2", "--summary", "json", settings=SLOW)
        goal = service.received + rng.randint(1, 2000)
        running.wait_until(lambda goal=goal: service.received >= goal, "some more")
        workers = workers_of(running)
        running.kill()
        wait_until(lambda workers=workers: not any(map(is_running, workers)), "the workers have noticed")
    result = shipper.backfill(folder, "--workers", "3")
    assert result.returncode == 0
    service.assert_holds_exactly(sample.ids[:EVENTS])
    state = shipper.read_state()
    assert (state.read, state.accepted) == (EVENTS, EVENTS)


def test_a_stop_drains_and_the_next_run_goes_on(shipper: Shipper, sample: Sample, tmp_path: Path):
    """While the workers begin, which ends none of them; when they are at work, told to the first process or to all."""
    may_begin = tmp_path / "may-begin"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        f"while 'shipper.cli.worker' in sys.orig_argv and not os.path.exists({str(may_begin)!r}): time.sleep(0.02)\n"
    )
    wanted = sample.ids[:6000]
    folder = exports(shipper.folder / "exports", sample.lines[:6000], 50)  # far more than is read ahead
    command = ("backfill", folder, "--workers", "2", "--summary", "json")
    settings = {"batch.max_events": 20, "delivery.concurrency": 2}
    sent: list[str] = []
    for when, stop in (("begin", os.kill), ("at work", os.kill), ("at work", os.killpg)):  # as a service manager does
        with FakeService() as service:
            shipper.target = service.target
            service.default = HANG
            env = {"PYTHONPATH": str(tmp_path)}
            running = shipper.start(*command, settings=settings, env=env, start_new_session=True)
            if when == "begin":
                running.wait_until(lambda running=running: len(workers_of(running)) == 2, "both are started")
            else:
                running.wait_until(lambda service=service: service.requests == 2, "both are at work")
            stop(running.pid, signal.SIGTERM)
            running.wait_for("drain_started")
            assert (service.requests == 0) == (when == "begin")
            may_begin.touch()
            service.release()
            result = running.finish(limit_s=60)
            assert (result.returncode, result.summary["outcome"]) == (4, "drained"), result.stderr
            assert "worker_lost" not in result.stderr
            assert result.summary["pending"] == 0
            assert len(service.event_ids()) == result.summary["accepted"], "what was sent is accounted for"
            sent += service.event_ids()
    with FakeService() as service:
        shipper.target = service.target
        rest = shipper.run(*command)
        assert (rest.returncode, rest.summary["accepted"]) == (0, len(wanted) - len(sent))
        assert sorted(sent + service.event_ids()) == sorted(wanted), "each of them once"


def test_a_service_that_stays_away_is_given_up(shipper: Shipper, fake: FakeService, few: Path):
    shipper.target = fake.target
    fake.default = Reply(status=503)
    settings = {"delivery.give_up_after_seconds": 1, "delivery.retry_initial_seconds": 0.01}
    result = shipper.backfill(few, "--workers", "2", settings=settings)
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up")
    assert result.summary["accepted"] == 0
    assert "run the same command again" in result.stderr
    assert shipper.read_state().read == 0


def test_what_no_worker_can_begin_with_ends_the_run_as_it_ends_that_of_one_process(shipper: Shipper, few: Path):
    ends = []
    for workers in ("1", "2"):
        result = shipper.backfill(few, "--workers", workers, env={"INTAKE_TOKEN": "two\nlines"})
        ends.append((result.returncode, result.stderr.splitlines()[-1]))
    assert ends[0] == ends[1]
    assert ends[0][0] == 2


def test_a_pause_of_the_workers_is_told(shipper: Shipper, fake: FakeService, few: Path):
    shipper.target = fake.target
    fake.default = Reply(status=403)
    command = ("backfill", few, "--workers", "2", "--summary", "json")
    running = shipper.start(*command, settings={"delivery.retry_max_seconds": 0.5})
    running.wait_for("delivery_paused")
    running.wait_until(lambda: '"forbidden"' in (shipper.state / "live.json").read_text(), "the snapshot tells")
    assert '"worker":' in running.stderr
    fake.default = Reply()
    assert running.finish(limit_s=60).returncode == 0


def test_a_number_of_workers_that_is_none_is_refused(shipper: Shipper, few: Path):
    result = shipper.backfill(few, "--workers", "0", check=False)
    assert result.returncode == 2
    assert "--workers is '0'; it is a number from 1 to 256, or auto" in " ".join(result.stderr.split())
    for value in ("-1", "many", "257", "1.5", ""):
        with pytest.raises(typer.BadParameter, match="1 to 256, or auto"):
            checked_workers(value, [few])
