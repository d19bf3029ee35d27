"""
Runs the installed `shipper`, and reads its state and the service's events.

Every completed run is checked by `assert_accounted`: `read == accepted + dead_lettered + duplicates + pending` holds in
the summary and in the state store, and each dead letter is kept or counted as purged. No run may print a traceback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import httpx

from shipper.cli.config import toml_value
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.server import sandbox_in_thread
from tests import in_process
from tests.e2e import warm_start
from tests.processes import SHIPPER as SHIPPER
from tests.processes import memory_bytes

# Settings that keep a test from waiting for `shipper run`.
QUICK = {"batch.linger_seconds": 0.02, "input.poll_interval_seconds": 0.1, "state.commit_interval_seconds": 0.05}
# Intervals at which a running shipper reports its state; with the defaults, tests would wait a second.
_OFTEN = {
    "shipper.pipeline.observer.SNAPSHOT_INTERVAL_S": 0.1,
    "shipper.status.admin.app._FRESH_S": 0.1,
    "shipper.status.live._WRITE_INTERVAL_S": 0.1,
}
_PAGE_EVENTS = 10_000
# Variables that a command reads when it runs, not when it is imported.
_READ_LATE = re.compile(r"SHIPPER__\w+|INTAKE_\w+|REPORT_\w+|CLIENT_SECRET|(PROXY_)?PASSWORD|COLUMNS|\w+_(PROXY|proxy)")
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))


# Settings with which a command soon gives up.
HASTY = {
    "delivery.give_up_after_seconds": 0.3,
    "delivery.retry_initial_seconds": 0.05,
    "delivery.retry_max_seconds": 0.1,
}


def with_clock(clock: Path) -> dict[str, str]:
    """Return the environment of a process whose clock is off by what a file contains, such as `+3600`."""
    return {
        "LD_PRELOAD": str(FAKETIME[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def pauses() -> Iterator[float]:
    """Yield increasing pauses between polls, so that short waits are short and long waits cost few polls."""
    pause_s = 0.005
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, 0.05)


def wait_until(
    condition: Callable[[], object], what: str, *, limit_s: float = 60, running: Running | None = None
) -> None:
    """
    Poll until a condition holds.

    Args:
        running: The process that must fulfil the condition.
    """
    deadline, pause = time.monotonic() + limit_s, pauses()
    while not condition():
        stderr = f"\n{running.stderr}" if running and (running.has_ended or time.monotonic() > deadline) else ""
        assert not running or not running.has_ended or condition(), f"ended before this: {what}{stderr}"
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}{stderr}"
        time.sleep(next(pause))


def event_id(line: bytes) -> str:
    return json.loads(line)["EventId"]


def event_ids(lines: Iterable[bytes]) -> list[str]:
    return [event_id(line) for line in lines]


def changed(line: bytes, **fields: object) -> bytes:
    """Return an event with changed fields; `...` removes a field."""
    document = {**json.loads(line), **fields}
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode() + b"\n"


# State of a shipper -----------------------------------------------------------------------------------------------


class DeadLetter(NamedTuple):
    stream_id: int
    path: str
    start_offset: int
    end_offset: int
    rule: str
    raw: bytes
    id: int
    attempts: int
    message: str
    status: int
    delivery: str
    event_id: str


@dataclass(frozen=True)
class State:
    """The contents of the state store, as the next start will find them."""

    read: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0
    purged: int = 0
    dead_letters: tuple[DeadLetter, ...] = ()
    checkpoints: tuple[tuple[int, str, str, int], ...] = ()  # stream_id, kind, path, offset

    @property
    def rules(self) -> list[str]:
        return [letter.rule for letter in self.dead_letters]


def read_state(directory: Path) -> State:
    """
    Read the database if it has no log, otherwise a copy of both.

    Opening the original would recover its log, which the next start of shipper must do.
    """
    database = directory / "state.db"
    if not database.exists():
        return State()
    if not database.with_name("state.db-wal").exists():
        return _read_database(f"{database.absolute().as_uri()}?immutable=1")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("state.db", "state.db-wal"):
            with suppress(FileNotFoundError):
                shutil.copy(directory / name, folder)
        return _read_database(Path(folder, "state.db").as_uri())


def _read_database(uri: str) -> State:
    with closing(sqlite3.connect(uri, uri=True)) as db:
        db.text_factory = os.fsdecode  # paths need not be UTF-8
        if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            return State()  # killed before its first transaction
        totals = db.execute("SELECT read, accepted, dead_lettered, duplicates, purged FROM totals").fetchone()
        letters = db.execute(
            "SELECT stream_id, path, start_offset, end_offset, rule, raw, id, attempts, message, status, delivery, "
            "event_id FROM dead_letters ORDER BY id"
        )
        checkpoints = db.execute(
            "SELECT stream_id, kind, path, checkpoint FROM streams WHERE checkpoint > 0 ORDER BY stream_id"
        )
        return State(*totals, tuple(DeadLetter(*row) for row in letters), tuple(checkpoints))


def assert_accounted(
    summary: Mapping[str, Any] | None, before: State, after: State, *, is_replay: bool = False
) -> None:
    """
    Check the accounts after a run of shipper.

    Args:
        summary: The output of `--summary json`, if it was printed.
        before, after: The state store; pending records lie beyond its checkpoints.
        is_replay: Whether it read dead letters, which are already counted.
    """
    assert after.read == after.accepted + after.dead_lettered + after.duplicates, after
    assert after.dead_lettered == len(after.dead_letters) + after.purged
    changes = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("read", "accepted", "dead_lettered", "duplicates", "purged")
    }
    _assert_letters_kept(changes, before, after, is_replay=is_replay)
    settled = {name: changes[name] for name in ("accepted", "duplicates")}
    if is_replay:
        assert changes["read"] == 0
    else:
        settled |= {name: changes[name] for name in ("read", "dead_lettered")}
    assert min(settled.values()) >= 0, settled
    if summary is None:
        return
    assert min(value for value in summary.values() if isinstance(value, int)) >= 0, summary
    assert summary["read"] == sum(summary[name] for name in ("accepted", "dead_lettered", "duplicates", "pending"))
    saved = {**summary, "read": summary["read"] - summary["pending"]}
    assert settled == {name: saved[name] for name in settled}, summary


def _assert_letters_kept(changes: Mapping[str, int], before: State, after: State, *, is_replay: bool) -> None:
    """Assert that none has changed, and that missing ones are counted as purged or, in a replay, as accepted."""
    left = {letter.id: letter for letter in after.dead_letters}
    old = {letter.id: letter for letter in before.dead_letters}
    gone = len(old.keys() - left.keys())
    if is_replay:
        assert left.keys() <= old.keys()
        assert gone == changes["accepted"] + changes["duplicates"] + changes["purged"]
    else:
        new = left.keys() - old.keys()
        assert not new or not old or min(new) > max(old), "the id of a dead letter was reused"
        assert len(new) - gone == changes["dead_lettered"] - changes["purged"]
    for letter_id in left.keys() & old.keys():
        now, then = left[letter_id], old[letter_id]
        if is_replay:
            assert now.attempts - then.attempts in {0, 1}
            changeable = ("rule", "attempts", "message", "status", "delivery")
            then = then._replace(**{name: getattr(now, name) for name in changeable})
        assert now == then


# A running shipper ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """
    An ended process.

    Attributes:
        summary: The last line of stdout, if it is a summary.
        peak_bytes: Highest memory use observed; 0 if it ran in this process.
    """

    returncode: int
    stdout: str
    stderr: str
    summary: dict[str, Any] | None
    peak_bytes: int

    def assert_ended(self, code: int, *said: str) -> None:
        """Check the exit code, and that stderr contains these texts."""
        assert self.returncode == code, self
        assert [text for text in said if text not in self.stderr] == [], self.stderr

    def counts(self) -> tuple[int, ...]:
        """`read, accepted, dead_lettered, duplicates, pending`."""
        assert self.summary is not None, self.stdout + self.stderr
        names = ("read", "accepted", "dead_lettered", "duplicates", "pending")
        return tuple(self.summary[name] for name in names)


def _accounted(
    returncode: int,
    stdout: str,
    stderr: str,
    state: Path | None,
    before: State,
    is_replay: bool,
    peak_bytes: int = 0,
) -> Result:
    """Return the result of a process after checking its accounts."""
    last = stdout.rstrip().rpartition("\n")[2]
    summary = json.loads(last) if last.startswith('{"read"') else None
    assert "Traceback" not in stderr, stderr
    if state:
        assert_accounted(summary, before, read_state(state), is_replay=is_replay)
    return Result(returncode, stdout, stderr, summary, peak_bytes)


def _can_run_here(arguments: Sequence[str | Path], options: Mapping[str, Any]) -> bool:
    """Return whether the command can run in this process without affecting the test."""
    return (
        "PYTEST_CURRENT_TEST" in os.environ  # torture and siege run commands from threads
        and warm_start.are_allowed()
        and options.keys() <= {"settings", "configured", "check", "env"}
        and all(_READ_LATE.fullmatch(name) for name in options.get("env") or ())
    )


class Running:
    """
    A started process; its output goes to files, so that it never blocks on the test.

    Args:
        state: The state directory to read before and after; None = it has no state store of shipper.
        folder: The folder of the output files.
        options: As for `warm_start.start`.
    """

    def __init__(self, command: list[str | Path], state: Path | None, folder: Path, **options: Any) -> None:
        self._state = state
        self._is_replay = "replay" in command
        self._before = read_state(state) if state else State()
        self._peak_bytes = 0
        number = len(list(folder.glob("*.stderr")))
        self._stdout, self._stderr = folder / f"{number}.stdout", folder / f"{number}.stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = warm_start.start(command, stdout=out, stderr=err, **options)
        self.pid = self.process.pid

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(errors="backslashreplace")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def peak_bytes(self) -> int:
        """Highest memory use; once the process has ended, as of the last poll."""
        self._peak_bytes = max(self._peak_bytes, memory_bytes(self.pid, "VmHWM"))
        return self._peak_bytes

    def wait_until(self, condition: Callable[[], object], what: str, *, limit_s: float = 60) -> None:
        """Wait until a condition holds; fail if the process ends first."""
        wait_until(condition, what, limit_s=limit_s, running=self)

    def wait_for(self, text: str, *, limit_s: float = 60) -> None:
        """Wait for a text on stderr."""
        self.wait_until(lambda: text in self.stderr, f"{text!r} on stderr", limit_s=limit_s)

    def feed(self, *lines: bytes) -> None:
        """Write lines to its standard input."""
        self.stdin.write(b"".join(lines))
        self.stdin.flush()

    def end_input(self, *lines: bytes) -> Result:
        """Write the last lines to its standard input, close it, and wait for the end."""
        self.feed(*lines)
        self.stdin.close()
        return self.finish()

    def kill(self) -> Result:
        """Send SIGKILL; fail if the process had already ended, because then nothing was interrupted."""
        self.process.kill()
        result = self.finish()
        assert result.returncode == -signal.SIGKILL, f"had ended before it was killed: {result}"
        return result

    def stop(self, *, limit_s: float = 30) -> Result:
        """Send SIGTERM and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        return self.finish(limit_s=limit_s)

    def finish(self, *, limit_s: float = 30) -> Result:
        """Wait for the end and check the accounts."""
        deadline, pause = time.monotonic() + limit_s, pauses()
        while not self.has_ended:
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"did not end within {limit_s} s\n{self.stderr}")
            _ = self.peak_bytes
            time.sleep(min(next(pause), 0.02))  # also measure the memory use at the end
        self._close_stdin()
        stdout = self._stdout.read_text(errors="backslashreplace")
        code, peak_bytes = self.process.returncode, self._peak_bytes
        return _accounted(code, stdout, self.stderr, self._state, self._before, self._is_replay, peak_bytes)

    def end(self) -> None:
        """Kill the process if it is still running."""
        self.process.kill()
        self.process.wait(10)
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


class Target(NamedTuple):
    """The destination."""

    base_url: str
    subscription_key: str
    token: str


class Shipper:
    """
    The command with its own configuration and state directory.

    Attributes:
        folder: The working directory of the processes.
        state: The state directory.
        target: The destination; may be changed between two runs.
        shortened: Shorter values, in seconds, of constants of shipper by their full names. A real start keeps the
            original values, so no test may rely on the short ones.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.config = folder / "settings.toml"
        self.target = target
        self.shortened = dict(_OFTEN)
        self._output = folder / "output"
        self._output.mkdir(parents=True)
        self._running: list[Running] = []
        self.config.write_text(
            "[intake]\n"
            'base_url = "http://127.0.0.1:9"\n'  # overridden by the environment
            'subscription_key = { env = "INTAKE_KEY" }\n'
            'token = { env = "INTAKE_TOKEN" }\n'
            f'[state]\ndirectory = "{self.state}"\n'
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            running.end()

    def read_state(self) -> State:
        return read_state(self.state)

    def write(self, name: str | Path, *lines: bytes) -> Path:
        """Write a file below the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))
        return path

    def use_oauth2(self, **entries: object) -> None:
        """Get the tokens from a token endpoint with these settings."""
        text = self.config.read_text().replace('token = { env = "INTAKE_TOKEN" }\n', "").partition("[intake.oauth2]")[0]
        settings = "".join(f"{key} = {toml_value(value)}\n" for key, value in entries.items())
        self.config.write_text(f"{text}[intake.oauth2]\n{settings}")

    def environment(self) -> dict[str, str]:
        """The test's environment without anything that could be a setting, plus this shipper's."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in {"PATH", "SHIPPER_NATIVE"} or name.startswith("COV")
        }
        shortened = " ".join(f"{name}={seconds}" for name, seconds in self.shortened.items())
        return kept | {
            "HOME": str(self.folder),
            "SHIPPER__INTAKE__BASE_URL": self.target.base_url,
            "SHIPPER__ADMIN__LISTEN": "127.0.0.1:0",  # other shippers run at the same time
            "INTAKE_KEY": self.target.subscription_key,
            "INTAKE_TOKEN": self.target.token,
            **({"SHIPPER_TEST_SECONDS": shortened} if shortened else {}),
            # Otherwise root would own the files in /proc that tests read.
            **({} if os.geteuid() == 0 else {"SHIPPER_DUMPABLE": "1"}),
        }

    def _command(
        self,
        arguments: Iterable[str | Path],
        settings: Mapping[str, object] | None = None,
        configured: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of the command and its environment."""
        words = [*map(os.fsdecode, arguments), *(["--config", str(self.config)] if configured else [])]
        words += [word for key, value in (settings or {}).items() for word in ("--set", f"{key}={value}")]
        environment = self.environment()
        if not configured:
            del environment["SHIPPER__INTAKE__BASE_URL"]
        return words, {**environment, **(env or {})}

    def shell(self, line: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
        """Run a line of bash that calls `shipper`."""
        own = {"PATH": f"{SHIPPER.parent}:{os.environ['PATH']}", "SHIPPER_CONFIG": str(self.config)}
        return subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            timeout=60,
            env=self.environment() | own | variables,
            cwd=self.folder,
        )

    def start(
        self,
        *arguments: str | Path,
        settings: Mapping[str, object] | None = None,
        configured: bool = True,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        prefix: Iterable[str] = (),
        stdin: Any = subprocess.DEVNULL,
        **options: Any,
    ) -> Running:
        """
        Start `shipper ARGUMENTS`.

        Args:
            settings: Passed as `--set KEY=VALUE`.
            configured: Whether to pass the configuration file and its environment.
            check: False if the state store is not shipper's or the test holds its lock.
            prefix: Words before the command, such as a program that executes it.
            options: As for `warm_start.start`, such as `fresh=True`.
        """
        words, environment = self._command(arguments, settings, configured, env)
        command = [*prefix, SHIPPER, *words]
        state = self.state if check else None
        running = Running(command, state, self._output, cwd=self.folder, env=environment, stdin=stdin, **options)
        self._running.append(running)
        return running

    def run(self, *arguments: str | Path, data: bytes | None = None, limit_s: float = 30, **options: Any) -> Result:
        """
        Run `shipper ARGUMENTS` to its end, in this process if possible.

        Args:
            data: Bytes to pipe in; None = /dev/null.
            options: As for `start`.
        """
        if not _can_run_here(arguments, options):
            running = self.start(*arguments, **(options if data is None else {"stdin": subprocess.PIPE, **options}))
            if data is not None:
                running.stdin.write(data)
                running.stdin.close()
            return running.finish(limit_s=limit_s)
        state = self.state if options.pop("check", True) else None
        words, environment = self._command(arguments, **options)
        before = read_state(state) if state else State()
        environment = {"COLUMNS": "80", **environment}
        ended = in_process.run(words, folder=self.folder, environment=environment, stdin=data, limit_s=limit_s)
        return _accounted(*ended, state, before, is_replay="replay" in arguments)

    def backfill(self, *paths: str | Path, **options: Any) -> Result:
        return self.run("backfill", *paths, "--summary", "json", **options)

    def pipe(self, *lines: bytes, **options: Any) -> Result:
        """Run `shipper pipe` with these lines piped in; none = /dev/null."""
        return self.run("pipe", "--summary", "json", data=b"".join(lines) if lines else None, **options)

    def open_pipe(self, *lines: bytes, **options: Any) -> Running:
        """Start `shipper pipe`, write these lines to its standard input, and leave that open."""
        running = self.start("pipe", "--summary", "json", stdin=subprocess.PIPE, **options)
        running.feed(*lines)
        return running


# The service ------------------------------------------------------------------------------------------------------


class Service:
    """A client of the sandbox's control operations."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # Plain HTTP needs no certificates, and loading them takes time.
        self._client = httpx.Client(base_url=target.base_url, trust_env=False, verify=False, timeout=10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def reset(self) -> None:
        self._client.post("/_sandbox/reset").raise_for_status()

    def counts(self) -> dict[str, int]:
        return self._client.get("/_sandbox/counts").raise_for_status().json()

    @property
    def received(self) -> int:
        """Number of valid events received, including repeats."""
        counts = self.counts()
        return counts["events_stored"] + counts["duplicates"]

    @property
    def stored(self) -> int:
        return self.counts()["events_stored"]

    def event_ids(self) -> list[str]:
        """The stored EventIds, in order of arrival."""
        return self._client.get("/_sandbox/event-ids").raise_for_status().text.split()

    def holds(self, ids: Iterable[str]) -> bool:
        wanted = set(ids)
        return self.stored >= len(wanted) and wanted <= set(self.event_ids())

    def event(self, wanted: str) -> dict[str, Any]:
        return self._client.get(f"/_sandbox/events/{wanted}").raise_for_status().json()

    def times_received(self) -> dict[str, int]:
        """How often each stored event was received."""
        times: dict[str, int] = {}
        after: int | None = 0
        while after is not None:
            page = self._client.get("/_sandbox/events", params={"limit": _PAGE_EVENTS, "after": after}).json()
            times.update((event["EventId"], event["times_received"]) for event in page["events"])
            after = page["next"]
        return times

    def requests(self, **query: object) -> list[dict[str, Any]]:
        """The latest requests, filtered by fields such as `operation="token"` or `status=401`."""
        answer = self._client.get("/_sandbox/requests", params={"limit": _PAGE_EVENTS, **query})
        return answer.raise_for_status().json()["requests"]

    def access(self) -> dict[str, Any]:
        """The credentials: subscription keys and those for the token endpoint."""
        return self._client.get("/_sandbox/access").raise_for_status().json()

    def rotate_key(self, which: str) -> str:
        """Replace the subscription key `primary` or `secondary`, and return the new key."""
        return self._client.post("/_sandbox/keys/rotate", json={"which": which}).raise_for_status().json()["key"]

    def set_faults(self, *rules: Mapping[str, object], seed: int = 1) -> None:
        """Set the fault rules; without rules, no request fails."""
        self._client.put("/_sandbox/faults", json={"seed": seed, "fault": rules}).raise_for_status()

    def faults_applied(self) -> list[int]:
        """How often each rule was applied."""
        return [rule["applied"] for rule in self._client.get("/_sandbox/faults").raise_for_status().json()["fault"]]

    def assert_holds_exactly(self, ids: Iterable[str]) -> None:
        """Assert that exactly these events are stored."""
        wanted, stored = set(ids), self.event_ids()
        assert len(stored) == len(set(stored))
        lost, invented = wanted - set(stored), set(stored) - wanted
        assert not lost, f"{len(lost)} lost, such as {sorted(lost)[:3]}"
        assert not invented, f"{len(invented)} invented, such as {sorted(invented)[:3]}"


@contextmanager
def sandbox_process(folder: Path, *flags: str) -> Iterator[Target]:
    """Run `shipper sandbox`."""
    config = folder / "sandbox.toml"
    command = [SHIPPER, "sandbox", "--port", "0", "--write-config", config, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: config.exists() or process.poll() is not None, "the sandbox has started")
            intake = tomllib.loads(config.read_text())["intake"]
            yield Target(intake["base_url"], intake["subscription_key"], intake["token"])
        finally:
            process.terminate()


@contextmanager
def sandbox(**options: Any) -> Iterator[Service]:
    """Run a separate sandbox, with its own options or faults."""
    with (
        sandbox_in_thread(SandboxOptions(port=0, **options), clock=time.time) as (access, _),
        Service(Target(*access)) as service,
    ):
        yield service
