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

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Service, Shipper, changed, wait_until
from tests.e2e.fake_service import HANG, FakeService, Reply

POISON = b'"XX"'  # refused by the service, not by the rules
SLOW = {"batch.max_events": 20, "delivery.concurrency": 4, "state.commit_interval_seconds": 0.02}


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


def is_running(process_id: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return "State:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    return False


@pytest.mark.parametrize("count", [2, 3])
def test_what_one_process_ships_several_ship(shipper: Shipper, service: Service, sample: Sample, count: int):
    running = shipper.start("backfill", sample.path, "--workers", str(count), "--summary", "json", settings=SLOW)
    running.wait_until(lambda: len(workers_of(running)) == count and service.received > 1000, "all are at work")
    result = running.finish(limit_s=60)
    assert (result.returncode, result.summary["outcome"]) == (0, "finished")
    assert result.counts() == (len(sample.ids), len(sample.ids), 0, 0, 0)
    assert result.summary["requests"] == result.summary["batches"] >= len(sample.ids) / 20
    service.assert_holds_exactly(sample.ids)
    assert service.counts()["duplicates"] == 0
    again = shipper.backfill(sample.path, "--workers", str(count))
    assert (again.returncode, again.counts()) == (0, (0, 0, 0, 0, 0))


def test_many_small_files_and_archives_are_shared_out(shipper: Shipper, service: Service, sample: Sample):
    folder = shipper.folder / "exports"
    folder.mkdir()
    for number in range(40):
        part = b"".join(sample.lines[number * 200 : number * 200 + 200])
        if number % 2:
            (folder / f"{number:02}.ndjson.gz").write_bytes(gzip.compress(part))
        else:
            (folder / f"{number:02}.ndjson").write_bytes(part)
    result = shipper.backfill(folder, "--workers", "2")
    assert (result.returncode, result.counts()) == (0, (8000, 8000, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:8000])
    assert len(shipper.read_state().checkpoints) == 40


def test_other_formats_are_cut_as_ever(shipper: Shipper, service: Service, sample: Sample):
    documents = [json.loads(line) for line in sample.lines[:9000]]
    names = list(documents[0])
    rows = [",".join(names), *(",".join(str(each[name]) for name in names) for each in documents[:6000])]
    (shipper.folder / "a.csv").write_text("\n".join(rows) + "\n")
    (shipper.folder / "b.json").write_text(json.dumps(documents[6000:], indent=1))
    result = shipper.backfill("a.csv", "b.json", "--workers", "2", settings={"input.format": "auto"})
    assert (result.returncode, result.counts()) == (0, (9000, 9000, 0, 0, 0))
    service.assert_holds_exactly(sample.ids[:9000])


def test_dead_letters_are_those_of_one_process(shipper: Shipper, fake: FakeService, sample: Sample, tmp_path: Path):
    shipper.target = fake.target
    fake.default = lambda: Reply(status=400) if POISON in fake.bodies[-1] else Reply()
    bad = set(range(100, 20_000, 1500))
    poison = set(range(7, 20_000, 4000))
    lines = [
        b"{ no record\n" if index in bad else changed(line, ConsumerCountry="XX") if index in poison else line
        for index, line in enumerate(sample.lines[:20_000])
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
    running = shipper.start("backfill", sample.path, "--workers", "2", "--summary", "json", settings=SLOW)
    killed: set[int] = set()
    while not running.has_ended and len(killed) < 4:  # one more, all of one worker, might end the run
        goal = service.received + rng.randint(1, 1500)
        wait_until(lambda goal=goal: running.has_ended or service.received >= goal, "some more")
        victims = [] if running.has_ended else workers_of(running)
        if victims:
            killed.add(rng.choice(victims))
            for victim in killed.intersection(victims):
                kill(victim)
    result = running.finish(limit_s=60)
    assert len(killed) >= 2
    assert (result.returncode, result.summary["outcome"]) == (0, "finished")
    assert result.counts() == (len(sample.ids), len(sample.ids), 0, 0, 0)
    service.assert_holds_exactly(sample.ids)
    assert result.stderr.count("worker_lost") >= 2


def test_a_worker_that_is_lost_again_and_again_ends_the_run_with_a_reason(
    shipper: Shipper, service: Service, sample: Sample, tmp_path: Path
):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'shipper.cli.worker' in sys.orig_argv: os.kill(os.getpid(), 9)\n"
    )
    result = shipper.backfill(sample.path, "--workers", "2", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "ended 5 times in a row with nothing done, the last time with status -9" in result.stderr
    assert "what it had is pending" in result.stderr
    assert result.stderr.count("worker_lost") >= 5
    assert (shipper.read_state().read, service.received) == (0, 0)
    assert shipper.backfill(sample.path, "--workers", "2").counts()[:2] == (len(sample.ids), len(sample.ids))


@pytest.mark.parametrize("kills", [5])
def test_killed_as_a_whole_at_random_moments_it_loses_nothing(
    shipper: Shipper, service: Service, sample: Sample, rng: Random, kills: int
):
    cuts = 0
    for _ in range(kills):
        running = shipper.start("backfill", sample.path, "--workers", "2", "--summary", "json", settings=SLOW)
        goal = service.received + rng.randint(1, 1500)
        wait_until(lambda goal=goal, running=running: running.has_ended or service.received >= goal, "some more")
        if running.has_ended:
            running.finish()
            break
        workers = workers_of(running)
        running.kill()
        cuts += 1
        wait_until(lambda workers=workers: not any(map(is_running, workers)), "the workers have noticed")
    result = shipper.backfill(sample.path, "--workers", "3")
    assert result.returncode == 0
    assert cuts
    service.assert_holds_exactly(sample.ids)
    state = shipper.read_state()
    assert (state.read, state.accepted) == (len(sample.ids), len(sample.ids))


@pytest.mark.parametrize("to_all", [False, True], ids=["to the first", "to all, as a service manager does"])
def test_a_stop_drains_and_the_next_run_goes_on(shipper: Shipper, fake: FakeService, sample: Sample, to_all: bool):
    shipper.target = fake.target
    fake.default = HANG
    path = shipper.folder / "twice.ndjson"  # more than is read ahead
    path.write_bytes(b"".join(sample.lines) * 2)
    settings = {"delivery.concurrency": 2, "records.dedupe_window": 0}
    command = ("backfill", path, "--workers", "2", "--summary", "json")
    running = shipper.start(*command, settings=settings, start_new_session=True)
    running.wait_until(lambda: fake.requests == 2, "both are at work")
    if to_all:
        os.killpg(running.pid, signal.SIGTERM)
    else:
        running.process.send_signal(signal.SIGTERM)
    running.wait_for("drain_started")
    fake.release()
    result = running.finish(limit_s=60)
    assert (result.returncode, result.summary["outcome"]) == (4, "drained"), result.stderr
    assert result.summary["pending"] == 0
    assert len(fake.event_ids()) == result.summary["accepted"] < 2 * len(sample.ids), "what was sent is accounted for"
    rest = shipper.run(*command, settings=settings)
    assert (rest.returncode, rest.summary["accepted"]) == (0, 2 * len(sample.ids) - result.summary["accepted"])
    assert sorted(fake.event_ids()) == sorted(sample.ids * 2), "each of them once"


def test_a_stop_while_the_workers_begin_ends_none_of_them(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    running = shipper.start("backfill", sample.path, "--workers", "2", "--summary", "json")
    running.wait_until(lambda: len(workers_of(running)) == 2, "both are started")
    assert fake.requests == 0
    running.process.send_signal(signal.SIGTERM)
    result = running.finish(limit_s=60)
    assert (result.returncode, result.summary["outcome"]) in {(4, "drained"), (0, "finished")}
    assert "drain_started" in result.stderr
    assert "worker_lost" not in result.stderr
    assert len(fake.event_ids()) == result.summary["accepted"]


def test_a_service_that_stays_away_is_given_up(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    fake.default = Reply(status=503)
    settings = {"delivery.give_up_after_seconds": 1, "delivery.retry_initial_seconds": 0.01}
    result = shipper.backfill(sample.path, "--workers", "2", settings=settings)
    assert (result.returncode, result.summary["outcome"]) == (4, "gave_up")
    assert result.summary["accepted"] == 0
    assert "run the same command again" in result.stderr
    assert shipper.read_state().read == 0


def test_what_no_worker_can_begin_with_ends_the_run_as_it_ends_that_of_one_process(shipper: Shipper, sample: Sample):
    ends = []
    for workers in ("1", "2"):
        result = shipper.backfill(sample.path, "--workers", workers, env={"INTAKE_TOKEN": "two\nlines"})
        ends.append((result.returncode, result.stderr.splitlines()[-1]))
    assert ends[0] == ends[1]
    assert ends[0][0] == 2


def test_a_pause_of_the_workers_is_told(shipper: Shipper, fake: FakeService, sample: Sample):
    shipper.target = fake.target
    fake.default = Reply(status=403)
    running = shipper.start("backfill", sample.path, "--workers", "2", "--summary", "json")

    running.wait_for("delivery_paused")
    running.wait_until(lambda: '"forbidden"' in (shipper.state / "live.json").read_text(), "the snapshot tells")
    assert '"worker":' in running.stderr
    fake.default = Reply()
    assert running.finish(limit_s=60).returncode == 0


@pytest.mark.parametrize("value", ["0", "-1", "many", "257", "1.5", ""])
def test_a_number_of_workers_that_is_none_is_refused(shipper: Shipper, sample: Sample, value: str):
    result = shipper.backfill(sample.path, "--workers", value, check=False)
    assert result.returncode == 2
    assert "--workers" in result.stderr
    assert "1 to 256" in result.stderr
    assert "auto" in result.stderr
