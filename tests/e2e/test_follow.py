"""`shipper run` on growing files, with signals and kills; for rotation see test_rotation."""

from __future__ import annotations

import signal
import time
from functools import partial
from random import Random

from tests.e2e.driver import Service, Shipper
from tests.e2e.files import Tail


def test_appended_records_arrive_and_a_clean_restart_repeats_nothing(tail: Tail, shipper: Shipper):
    tail.append(0, 10)
    tail.start()
    tail.wait(10)
    for start, end in ((10, 11), (11, 20), (20, 21)):
        tail.append(start, end)
        tail.wait(end)
    tail.append(21, 30, "app.ndjson.new")
    tail.wait(30)
    tail.stop(30)
    tail.append(30, 40)
    tail.start()
    tail.wait(40)
    tail.stop(40)
    assert len(shipper.read_state().checkpoints) == 2


def test_an_idle_run_ends_at_once_on_sigterm_and_on_sigint(tail: Tail):
    for number in (signal.SIGTERM, signal.SIGINT):
        running = tail.start()
        with tail.file.open("ab") as out:
            out.write(b"\n")
        running.wait_for("source_opened")
        started = time.monotonic()
        running.process.send_signal(number)
        assert running.finish().returncode == 0
        # Far below the drain timeout of 25 s and the watcher's fallback interval of 5 s.
        assert time.monotonic() - started < 4


def test_a_run_killed_while_files_grow_and_rotate_loses_nothing(
    tail: Tail, shipper: Shipper, service: Service, rng: Random
):
    def has_stored(count: int) -> bool:
        return service.stored >= count

    sent = 0
    for rotation in range(3):
        running = tail.start(batch__max_events=20, delivery__concurrency=2)
        for _ in range(10):
            count = rng.randrange(1, 100)
            tail.append(sent, sent + count)
            sent += count
            if rng.random() < 0.2:
                tail.file.rename(tail.folder / f"app.ndjson.{rotation}.{sent}")
        goal = min(sent, service.stored + rng.randrange(1, 100))
        running.wait_until(partial(has_stored, goal), "some events")
        running.kill()
        assert not (shipper.state / "stuck.json").exists(), "a record is suspect"
    assert shipper.read_state().accepted < sent, "the last run had finished when it was killed"
    running = tail.start()
    running.wait_until(lambda: shipper.read_state().accepted == sent, "all events are accounted for")
    assert running.stop().returncode == 0
    service.assert_holds_exactly(tail.ids(sent))
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_lettered) == (sent, sent, 0)
