"""Everything at once, by chance: rotation, torn lines, kills, stops, and a service that fails in every way."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from random import Random

from tests.e2e.conftest import Sample
from tests.e2e.driver import Running, Shipper
from tests.e2e.fake_service import OK, RESET, STORE_AND_RESET, WEB_PAGE, FakeService, Reply

ROUNDS = 60
FAULTS = [
    RESET,
    STORE_AND_RESET,
    WEB_PAGE,
    Reply(status=503),
    Reply(status=429),
    Reply(status=403),
    Reply(fault="close"),
]
SETTINGS = {
    "batch.max_events": 50,
    "batch.linger_seconds": 0.01,
    "delivery.concurrency": 3,
    "delivery.drain_timeout_seconds": 1,
    "delivery.retry_initial_seconds": 0.005,
    "delivery.retry_max_seconds": 0.02,
    "input.poll_interval_seconds": 0.05,
    "input.rotate_wait_seconds": 0.2,
    "state.commit_interval_seconds": 0.01,
}


class Application:
    """Writes lines as an application does: piecemeal, and after a rotation for a while into the old file."""

    def __init__(self, folder: Path, lines: list[bytes], rng: Random) -> None:
        self._folder = folder
        self._lines = iter(lines)
        self._rng = rng
        self._rotations = 0
        self._old: list[tuple[Path, bytes]] = []
        self._torn = b""
        self.written = 0
        self.path = folder / "app.ndjson"

    def write(self) -> None:
        """Append some lines, the last of them perhaps torn."""
        count = self._rng.randrange(1, 80)
        data = self._torn + b"".join(next(self._lines) for _ in range(count))
        self.written += count
        cut = self._rng.randrange(1, 300) if self._rng.random() < 0.5 else 0
        self._append(self.path, data[: len(data) - cut])
        self._torn = data[len(data) - cut :]

    def rotate(self) -> None:
        """Rename the file and begin a new one; what is torn will be finished in the old one."""
        self._rotations += 1
        old = self.path.rename(self._folder / f"app.ndjson.{self._rotations}")
        self._old.append((old, self._torn))
        self._torn = b""
        self._append(self.path, b"")

    def truncate(self) -> None:
        """Copytruncate; only what was read before survives it."""
        with self.path.open("r+b") as file:
            file.truncate(0)

    @property
    def complete(self) -> int:
        """How many lines were written to their end."""
        return self.written - bool(self._torn) - sum(bool(torn) for _, torn in self._old)

    def finish(self) -> None:
        """Finish all torn lines."""
        self._append(self.path, self._torn)
        for path, torn in self._old:
            self._append(path, torn)
        self._torn = b""
        self._old.clear()

    @staticmethod
    def _append(path: Path, data: bytes) -> None:
        with path.open("ab") as file:
            file.write(data)


def test_nothing_is_lost_whatever_happens(shipper: Shipper, fake: FakeService, sample: Sample, rng: Random):
    shipper.target = fake.target
    fake.plan(STORE_AND_RESET)
    fake.default = lambda: rng_of_service.choice(FAULTS) if rng_of_service.random() < 0.3 else OK
    rng_of_service = Random(rng.random())
    folder = shipper.folder / "logs"
    folder.mkdir()
    application = Application(folder, sample.lines, rng)
    happened: Counter[str] = Counter()

    def start() -> Running:
        settings = {**SETTINGS, "input.include": f'["{folder}/app.ndjson*"]'}
        return shipper.start("run", settings=settings)

    def all_is_saved() -> bool:
        return shipper.read_state().accepted == application.complete

    running = start()
    while happened.total() < ROUNDS or min(happened[action] for action in ("cut", "rotate", "truncate", "kill")) < 2:
        application.write()
        action = rng.choices(["nothing", "rotate", "truncate", "kill", "stop"], [50, 20, 10, 12, 8])[0]
        happened[action] += 1
        if action == "rotate":
            application.rotate()
        elif action == "truncate":
            application.finish()
            running.wait_until(all_is_saved, "all is saved")
            application.truncate()
        elif action in {"kill", "stop"}:
            goal = fake.requests + rng.randrange(3)
            running.wait_until(lambda goal=goal: fake.requests >= goal or all_is_saved(), "some more requests")
            happened["cut"] += not all_is_saved()
            if action == "kill":
                running.kill()
            else:
                # The last: it had not come so far as to listen for signals.
                assert running.stop().returncode in {0, 4, -signal.SIGTERM}
            running = start()
    application.finish()
    fake.default = OK
    running.wait_until(all_is_saved, "all is delivered")
    assert running.stop().returncode == 0

    written = sample.ids[: application.written]
    received = Counter(fake.event_ids())
    assert received.keys() == set(written), "lost or invented"
    state = shipper.read_state()
    assert (state.read, state.accepted, state.dead_letters) == (len(written), len(written), ())
    print(f"{len(written)} events, {received.total() - len(written)} sent again, {fake.requests} requests, {happened}")
    assert received.total() > len(written), "no answer was lost"
