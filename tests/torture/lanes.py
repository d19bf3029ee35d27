"""The shippers under attack, each with its own state directory."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, Self

import httpx
import pytest

from tests.e2e.driver import Result, Running, Shipper, Target
from tests.e2e.operated import Admin
from tests.e2e.surroundings import SmallDisk, small_disk
from tests.torture.journal import READ_TIMEOUT_S, Process, Producer
from tests.torture.service import Service

SETTINGS: Final[dict[str, object]] = {
    "batch.linger_seconds": 0.05,
    "delivery.connect_timeout_seconds": READ_TIMEOUT_S,
    "delivery.read_timeout_seconds": READ_TIMEOUT_S,
    "delivery.drain_timeout_seconds": 2,
    "delivery.fail_fast": "false",  # every refusal here ends within seconds
    "delivery.max_concurrency": 8,
    "delivery.retry_initial_seconds": 0.02,
    "delivery.retry_max_seconds": 0.5,
    "input.poll_interval_seconds": 0.2,
    "spool.max_bytes": 8_000_000,
    "spool.segment_bytes": 200_000,
}
# The seed chooses from these.
_CHOICES: Final[dict[str, list[object]]] = {
    "batch.max_events": [20, 50, 200],
    "delivery.concurrency": ["adaptive", 1, 3],
    "input.rotate_wait_seconds": [1.0, 3.0],
    "records.dedupe_window": [0, 100_000],
    "records.mistake_limit": [100, 1_000],
    "state.commit_interval_seconds": [0.01, 0.05, 0.5],
}
NO_FSYNC: Final = "ended because fsync failed"
NO_ROOM: Final = "ended or did not start because the disk was full"
_DISK_BYTES: Final = 48 << 20
_END_LIMIT_S: Final = 60.0
_SUPERVISOR_PAUSE_S: Final = 0.3
_FAILING_FSYNC: Final = Path(__file__).with_name("failing_fsync.c")
_FAKETIME: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))[:1]


def ask_for_tokens(shipper: Shipper, service: Service) -> None:
    """Configure the token endpoint; the token of the target becomes the client secret."""
    config = shipper.config.read_text()
    oauth2 = f'[intake.oauth2]\ntoken_url = "{service.token_url}"\nclient_id = "torture"\n'
    secret = 'client_secret = { env = "INTAKE_TOKEN" }\n'
    shipper.config.write_text(config.replace('token = { env = "INTAKE_TOKEN" }\n', oauth2 + secret))


class Lane(Producer):
    """
    One way to ship. One thread handles the process; another one may produce.

    Attributes:
        disk: The disk of the state; None = it cannot be filled, see `left_out`.
        removed: Inputs that were removed because they did not contain records.
        taken_away: Those that had been read partially.
        left_out: Faults that are not possible here, with the reasons.
    """

    name: ClassVar[str]
    good_ends: ClassVar[frozenset[int]] = frozenset({0})

    def __init__(self, folder: Path, number: int, service: Service, rng: Random, *, rate: float) -> None:
        super().__init__(number, service.journal, rate=rate)
        self.shipper = Shipper(folder / self.name, Target(service.base_url, "", "secret"))
        self.disk: SmallDisk | None = None
        self.removed: set[str] = set()
        self.taken_away: set[str] = set()
        self.left_out: dict[str, str] = {}
        self.running: Running | None = None
        self.rng = rng
        self.service = service
        self._process = Process("", 0)
        self._is_disk_full = self._is_fsync_failing = False
        self._ends_before_full = 0
        self._chosen = {key: rng.choice(values) for key, values in _CHOICES.items()}
        self._clock = self.shipper.folder / "clock"
        self._failing_fsync = self.shipper.folder / "fsync-fails"
        self._preloaded = [*_FAKETIME]
        self._stack = ExitStack()
        ask_for_tokens(self.shipper, service)

    def __enter__(self) -> Self:
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
        """Write the records that are due; called repeatedly."""

    def finish_producing(self) -> None:
        """Write the rest of incomplete lines at the end."""

    # Its process ----------------------------------------------------------------------------------------------------

    def arguments(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def settings(self) -> dict[str, object]:
        return {**SETTINGS, **self._chosen}

    def options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        number = self._process.number + 1
        self._process = Process(
            f"{self.name}-{number}",
            number,
            met_full_disk=self._is_disk_full,
            met_failed_fsync=self._is_fsync_failing,
        )
        self.service.journal.processes[self._process.tag] = self._process
        self.shipper.target = self.shipper.target._replace(subscription_key=self._process.tag)
        self.running = self.shipper.start(
            *self.arguments(), settings=self.settings(), env=self.environment(), **self.options()
        )

    def tend(self) -> None:
        """Start the process if it does not run; called repeatedly."""
        if self.running is None:
            self.start()
        elif self.running.has_ended:
            self.note_own_end(self.finish())

    def note_own_end(self, result: Result) -> None:
        """Count an unexpected end, which only a full disk or a failed fsync excuses."""
        if self._process.met_failed_fsync and result.returncode == 1:
            self.counts[NO_FSYNC] += 1
        else:
            is_excused = self._process.met_full_disk and result.returncode in {1, 4}
            assert is_excused, f"{self.name} ended unexpectedly with exit code {result.returncode}\n{result.stderr}"
            self.counts[NO_ROOM] += 1
        time.sleep(_SUPERVISOR_PAUSE_S)

    def finish(self) -> Result:
        """Wait for the end of the process; the driver checks its totals."""
        assert self.running is not None
        result = self.running.finish(limit_s=_END_LIMIT_S)
        is_drained = result.summary and not result.summary["pending"]
        self._process.is_dirty = not (result.returncode in self.good_ends or is_drained)
        _clear_up()
        self.running = None
        self.after_end(result, self._process)
        return result

    def after_end(self, result: Result, process: Process) -> None:
        """Inspect what an ended process has left behind."""

    def is_alive(self) -> bool:
        return self.running is not None and not self.running.has_ended

    def rest(self, seconds: float) -> None:
        """Wait while the process runs."""
        self.rest_until(lambda: False, limit_s=seconds)

    def rest_until(self, condition: Callable[[], object], *, limit_s: float) -> bool:
        """Wait until a condition holds while the process runs; return whether it does."""
        until = time.monotonic() + limit_s
        while not (holds := bool(condition())) and time.monotonic() < until:
            self.tend()
            time.sleep(0.02)
        return holds

    def end_by(self, number: signal.Signals) -> bool:
        """Send a terminating signal; return whether that ended the process."""
        if self.running is None or self.running.has_ended:
            return False
        self.running.process.send_signal(number)
        code = self.finish().returncode
        broken = {1} if self._process.met_failed_fsync or self._process.met_full_disk else set()
        assert code in {-number, 4, *self.good_ends, *broken}, f"{self.name} ended with {code} after {number.name}"
        return code == -number or number is not signal.SIGKILL

    def hold(self, seconds: float) -> bool:
        """Stop the process by SIGSTOP for a time, and continue it."""
        if self.running is None or self.running.has_ended:
            return False
        begin = time.monotonic()
        self.running.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.running.process.send_signal(signal.SIGCONT)
        self._process.stalls.append((begin, time.monotonic()))
        return True

    def status(self) -> dict[str, Any]:
        """Return the status served by the process; empty if it does not answer."""
        if self.running is None or "admin_listening" not in self.running.stderr:
            return {}
        try:
            return Admin(self.running).status()
        except (httpx.HTTPError, AssertionError):  # stopped, or has just ended
            return {}

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Fill the disk completely."""
        assert self.disk is not None
        self._ends_before_full = self.counts[NO_ROOM]
        self.disk.fill()
        self._is_disk_full = self._process.met_full_disk = True
        try:
            yield
        finally:
            self.disk.free()
            self._is_disk_full = False

    def misses_room(self) -> bool:
        """Return whether the process has noticed that its disk is full."""
        if self.counts[NO_ROOM] > self._ends_before_full:
            return True
        pauses = (self.status().get("live") or {}).get("pauses", [])
        return any(pause["reason"] == "state_unwritable" for pause in pauses) or (
            self.running is not None and "spool_disk_full" in self.running.stderr
        )

    @contextmanager
    def failing_fsync(self) -> Iterator[None]:
        """Make fsync fail."""
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
        """Set the offset of its wall clock."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(self._clock)

    def environment(self) -> dict[str, str]:
        preloaded = {"LD_PRELOAD": ":".join(map(str, self._preloaded)), "FAILING_FSYNC": str(self._failing_fsync)}
        faketime = {
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_CACHE_DURATION": "1",  # seconds; otherwise every clock call would read the file
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        return preloaded | (faketime if _FAKETIME else {})

    # Its end --------------------------------------------------------------------------------------------------------

    def close(self) -> Result:
        """Stop the process like a user once it reports that everything is settled."""
        assert self.running is not None
        wanted = {"accepted": self.owed, "dead_lettered": len(self.letters), "duplicates": 0}
        self.rest_until(lambda: wanted.items() <= (self.status().get("state") or {}).items(), limit_s=20)
        self.rest_until(self.has_found_all_inputs, limit_s=60)
        self.running.process.send_signal(signal.SIGTERM)
        return self.finish()

    def has_found_all_inputs(self) -> bool:
        """Return whether the process has found all its inputs."""
        return True

    def torn_letters(self, letters: Sequence[bytes]) -> list[bytes]:
        """Return the truncated records among these, which a crash inevitably leaves behind."""
        return []


def _clear_up() -> None:
    """Delete the files that libfaketime leaves after a kill; they would disturb a later process with the same id."""
    for leftover in [*Path("/dev/shm").glob("faketime_shm_*"), *Path("/dev/shm").glob("sem.faketime_sem_*")]:
        if not Path("/proc", leftover.name.rpartition("_")[2]).exists():
            leftover.unlink(missing_ok=True)
