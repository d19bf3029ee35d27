"""The shippers under attack, each with a state directory of its own, and what feeds them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

import httpx
import pytest

from tests.e2e.driver import Result, Running, Shipper, Target
from tests.e2e.operated import Admin
from tests.e2e.surroundings import SmallDisk, small_disk
from tests.torture.books import READ_TIMEOUT_S, Process
from tests.torture.producing import Producer
from tests.torture.service import Service

SETTINGS: Final[dict[str, object]] = {
    "batch.linger_seconds": 0.05,
    "delivery.connect_timeout_seconds": READ_TIMEOUT_S,
    "delivery.read_timeout_seconds": READ_TIMEOUT_S,
    "delivery.drain_timeout_seconds": 2,
    "delivery.fail_fast": "false",  # whatever lets nobody in here is over within seconds
    "delivery.max_concurrency": 8,
    "delivery.retry_initial_seconds": 0.02,
    "delivery.retry_max_seconds": 0.5,
    "input.poll_interval_seconds": 0.2,
    "spool.max_bytes": 8_000_000,
    "spool.segment_bytes": 200_000,
}
# Of these, the seed chooses.
_CHOICES: Final[dict[str, list[object]]] = {
    "batch.max_events": [20, 50, 200],
    "delivery.concurrency": ["adaptive", 1, 3],
    "input.rotate_wait_seconds": [1.0, 3.0],
    "records.dedupe_window": [0, 100_000],
    "records.mistake_limit": [100, 1_000],
    "state.commit_interval_seconds": [0.01, 0.05, 0.5],
}
NO_FSYNC: Final = "ended as nothing could be forced to disk"
NO_ROOM: Final = "ended or not begun for want of room on the disk"
_DISK_BYTES: Final = 48 << 20
_END_LIMIT_S: Final = 60.0
_SUPERVISOR_PAUSE_S: Final = 0.3
_FAILING_FSYNC: Final = Path(__file__).with_name("failing_fsync.c")
_FAKETIME: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


def ask_for_tokens(shipper: Shipper, service: Service) -> None:
    """Configure the token endpoint; what the target has as a token is the client's secret."""
    config = shipper.config.read_text()
    oauth2 = f'[intake.oauth2]\ntoken_url = "{service.token_url}"\nclient_id = "torture"\n'
    secret = 'client_secret = { env = "INTAKE_TOKEN" }\n'
    shipper.config.write_text(config.replace('token = { env = "INTAKE_TOKEN" }\n', oauth2 + secret))


class Lane(Producer):
    """
    One way to ship. Its process is handled by one thread; its producer may be another.

    Attributes:
        disk: On which the state lies; None = it cannot be filled, as `left_out` says.
        removed: Inputs that were removed, as they were none.
        taken_away: Those of which something had been read.
        left_out: What cannot be done to it here, and why.
    """

    name: ClassVar[str]
    good_ends: ClassVar[frozenset[int]] = frozenset({0})

    def __init__(self, folder: Path, number: int, service: Service, rng: Random, *, rate: float) -> None:
        super().__init__(number, service.books, rate=rate)
        self.shipper = Shipper(folder / self.name, Target(service.base_url, "", "secret"))
        self.disk: SmallDisk | None = None
        self.removed: set[str] = set()
        self.taken_away: set[str] = set()
        self.left_out: dict[str, str] = {}
        self.noted: Counter[str] = Counter()
        self.running: Running | None = None
        self.rng = rng
        self.service = service
        self._process: Process | None = None
        self._starts = 0
        self._is_disk_full = self._is_fsync_failing = False
        self._ends_before_full = 0
        self._chosen = {key: rng.choice(values) for key, values in _CHOICES.items()}
        self._clock = self.shipper.folder / "clock"
        self._failing_fsync = self.shipper.folder / "fsync-fails"
        self._preloaded = [*_FAKETIME[:1]]
        self._stack = ExitStack()
        ask_for_tokens(self.shipper, service)

    def __enter__(self) -> Lane:
        self._stack.enter_context(self.shipper)
        try:
            self.disk = self._stack.enter_context(small_disk(self.shipper.state, _DISK_BYTES))
        except pytest.skip.Exception as why:
            self.left_out["disk full"] = str(why)
        if not _FAKETIME:
            self.left_out["clock stepped"] = "libfaketime is not installed"
        if shutil.which("cc"):
            library = self.shipper.folder / "failing_fsync.so"
            command = ["cc", "-shared", "-fPIC", "-Wall", "-o", library, _FAILING_FSYNC, "-ldl"]
            subprocess.run(command, check=True, timeout=60)
            self._preloaded.append(library)
        else:
            self.left_out["failed fsync"] = "there is no C compiler"
        self.step_clock(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self.running is not None:
            self.running.end()
            _clear_up()
        self._stack.close()

    # Records --------------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        """Write what is due; called again and again."""

    def finish_producing(self) -> None:
        """Write the rest of what is torn; no more comes."""

    # Its process ----------------------------------------------------------------------------------------------------

    def arguments(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def settings(self) -> dict[str, object]:
        return {**SETTINGS, **self._chosen}

    def options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        self._starts += 1
        process = Process(
            f"{self.name}-{self._starts}",
            self._starts,
            met_full_disk=self._is_disk_full,
            met_failed_fsync=self._is_fsync_failing,
        )
        self.service.books.processes[process.tag] = self._process = process
        self.shipper.target = self.shipper.target._replace(subscription_key=process.tag)
        self.running = self.shipper.start(
            *self.arguments(), settings=self.settings(), env=self.environment(), **self.options()
        )

    def tend(self) -> None:
        """See that the process lives; called again and again."""
        if self.running is None:
            self.start()
        elif self.running.has_ended:
            self.note_own_end(self.finish())

    def note_own_end(self, result: Result) -> None:
        """Take note of an end that nobody asked for, which only a full or broken disk excuses."""
        assert self._process is not None
        if self._process.met_failed_fsync and result.returncode == 1:
            self.noted[NO_FSYNC] += 1
            time.sleep(_SUPERVISOR_PAUSE_S)
            return
        is_excused = self._process.met_full_disk and result.returncode in {1, 4}
        assert is_excused, f"{self.name} ended by itself with exit code {result.returncode}\n{result.stderr}"
        self.noted[NO_ROOM] += 1
        time.sleep(_SUPERVISOR_PAUSE_S)

    def finish(self) -> Result:
        """Wait for its end, and hold it to the promise."""
        assert self.running is not None
        assert self._process is not None
        result = self.running.finish(limit_s=_END_LIMIT_S)
        summary = result.summary
        is_drained = summary and not summary["pending"]
        self._process.is_dirty = not (result.returncode in self.good_ends or is_drained)
        _clear_up()
        self.running = None
        self.after_end(result, self._process)
        return result

    def after_end(self, result: Result, process: Process) -> None:
        """Look at what it left behind."""

    def is_alive(self) -> bool:
        return self.running is not None and not self.running.has_ended

    def rest(self, seconds: float) -> None:
        """Let it work for a while."""
        self.rest_until(lambda: False, limit_s=seconds)

    def rest_until(self, condition: Callable[[], object], *, limit_s: float) -> bool:
        """Let it work until a condition holds; tells whether it does."""
        until = time.monotonic() + limit_s
        while not (holds := bool(condition())) and time.monotonic() < until:
            self.tend()
            time.sleep(0.02)
        return holds

    def end_by(self, number: signal.Signals) -> bool:
        """Send a signal that ends it; tells whether it was that which did."""
        if not self.is_alive():
            return False
        assert self.running is not None
        self.running.process.send_signal(number)
        code = self.finish().returncode
        assert self._process is not None
        broken = {1} if self._process.met_failed_fsync or self._process.met_full_disk else set()
        assert code in {-number, 4, *self.good_ends, *broken}, f"{self.name} ended with {code} after {number.name}"
        return code == -number or number is not signal.SIGKILL

    def hold(self, seconds: float) -> bool:
        """Stop it in the middle of whatever it does, and let it go on."""
        if not self.is_alive():
            return False
        assert self.running is not None
        assert self._process is not None
        begin = time.monotonic()
        self.running.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.running.process.send_signal(signal.SIGCONT)
        self._process.stalls.append((begin, time.monotonic()))
        return True

    def status(self) -> dict[str, Any]:
        """What the process says of itself; empty if it does not answer."""
        if self.running is None or "admin_listening" not in self.running.stderr:
            return {}
        try:
            return Admin(self.running).status()
        except (httpx.HTTPError, AssertionError):  # it is held, or has just ended
            return {}

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leave no byte of its disk free."""
        assert self.disk is not None
        assert self._process is not None
        self._ends_before_full = self.noted[NO_ROOM]
        self.disk.fill()
        self._is_disk_full = self._process.met_full_disk = True
        try:
            yield
        finally:
            self.disk.free()
            self._is_disk_full = False

    def misses_room(self) -> bool:
        """Return whether it has noticed that its disk is full."""
        if self.noted[NO_ROOM] > self._ends_before_full:
            return True
        pauses = (self.status().get("live") or {}).get("pauses", [])
        return any(pause["reason"] == "state_unwritable" for pause in pauses) or (
            self.running is not None and "spool_disk_full" in self.running.stderr
        )

    @contextmanager
    def failing_fsync(self) -> Iterator[None]:
        """Let nothing be forced to disk."""
        assert self._process is not None
        self._is_fsync_failing = self._process.met_failed_fsync = True
        self._failing_fsync.touch()
        try:
            yield
        finally:
            self._failing_fsync.unlink()
            self._is_fsync_failing = False

    @property
    def failed_fsyncs(self) -> int:
        note = self._failing_fsync.with_suffix(".failed")
        return note.stat().st_size if note.exists() else 0

    # Its clock ------------------------------------------------------------------------------------------------------

    def step_clock(self, seconds: int) -> None:
        """Let its wall clock be so far ahead from now on."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._clock)

    def environment(self) -> dict[str, str]:
        environment = {
            "LD_PRELOAD": ":".join(map(str, self._preloaded)),
            "FAILING_FSYNC": str(self._failing_fsync),
        }
        if not _FAKETIME:
            return environment
        return environment | {
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_CACHE_DURATION": "1",  # seconds; without, every look at a clock would read the file
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    # Its end --------------------------------------------------------------------------------------------------------

    def close(self) -> Result:
        """End it as a user does once everything is settled, by its own account."""
        assert self.running is not None
        wanted = {"accepted": self.owed, "dead_lettered": len(self.letters), "duplicates": 0}
        self.rest_until(lambda: wanted.items() <= (self.status().get("state") or {}).items(), limit_s=20)
        self.rest_until(self.has_looked_at_all, limit_s=60)
        self.running.process.send_signal(signal.SIGTERM)
        return self.finish()

    def has_looked_at_all(self) -> bool:
        """Return whether there is no input that it has not looked at yet."""
        return True

    def torn_letters(self, letters: Sequence[bytes]) -> list[bytes]:
        """Return which of these are no whole records, but the torn ends that a crash leaves behind by nature."""
        return []


def _clear_up() -> None:
    """Delete what libfaketime leaves of killed processes, on which later ones of the same number would stumble."""
    for leftover in [*Path("/dev/shm").glob("faketime_shm_*"), *Path("/dev/shm").glob("sem.faketime_sem_*")]:
        if not Path("/proc", leftover.name.rpartition("_")[2]).exists():
            leftover.unlink(missing_ok=True)
