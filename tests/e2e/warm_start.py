"""
Starts the command in a fifth of the time of a real start, by forking it from a process that has already imported it.

Imports take most of a start. `warm_parent.py`, one process for each pytest process, imports once; for each start it
receives the arguments, the folder, the environment and the three standard streams, and forks. It forks twice, and the
intermediate process exits at once, while the test's process adopts orphans. So the command is the test's own child,
which can be waited for and killed by its id.

Same as in a real start: arguments, folder, environment, standard streams and no other descriptor, signals, umask,
limits and process group. No code of shipper except its imports has run. The interpreter handles unhandled errors, and
the exit when standard output cannot be written.

Different, and therefore a real start (`fresh=True`, or `_can_start` returns False) if it matters:

- Nothing is imported. A signal during import, or a missing module, cannot be tested.
- The interpreter, the C library and modules have already read the environment: only variables that are known to be
  read later are allowed.
- The process is larger, and starts with shared pages.
- A program before the command, `prlimit` or `setpriv`, is not run; the process sets its limits itself.
- `/proc/PID/cmdline`, `environ` and `comm` are those of the parent.
- Hashes of strings are the same in all children of one parent.
- At exit, modules are not torn down.

`SHIPPER_TEST_STARTS=real` makes every start real. Outside pytest, every start is real.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import IO, Any

from tests.processes import SHIPPER

_PR_SET_CHILD_SUBREAPER = 36
_MOST_SECONDS_BETWEEN_LOOKS = 0.05
# Variables that shipper and its libraries read when a command runs, or that only tests use.
_HARMLESS = re.compile(
    r"HOME|PATH|TMPDIR|TERM|COLUMNS|LINES|NOTIFY_SOCKET|WATCHDOG_USEC|XDG_\w+|SHIPPER\w*|INTAKE_\w+|REPORT_\w+"
    r"|CLIENT_SECRET|(PROXY_)?PASSWORD"
)
# Programs before the command whose work the new process does itself.
_PREFIXES = re.compile(r"|prlimit --(nofile|fsize)=\d+ -- |setpriv --bounding-set (\S+) --inh-caps \2 -- ")


class Process:
    """
    A running command with the methods of `subprocess.Popen` that tests use.

    Args:
        command: `shipper` and its arguments, optionally after another program.
        stdin, stdout, stderr: Files or descriptors; `stdin` may also be DEVNULL or PIPE.
    """

    def __init__(
        self,
        command: list[str | Path],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: Any,
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
    ) -> None:
        self.stdin: IO[bytes] | None = None
        self.returncode: int | None = None
        with ExitStack() as opened:
            if stdin == subprocess.DEVNULL:
                stdin = opened.enter_context(open(os.devnull, "rb"))
            elif stdin == subprocess.PIPE:
                reading, writing = os.pipe()
                opened.callback(os.close, reading)
                stdin, self.stdin = reading, os.fdopen(writing, "wb")
            streams = [stream if isinstance(stream, int) else stream.fileno() for stream in (stdin, stdout, stderr)]
            assert _parent is not None
            words = [os.fsdecode(word) for word in command]
            start = command.index(SHIPPER)
            self.pid = _parent.start(words[:start], words[start:], cwd, env, streams)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while self.poll() is None:
            left = _MOST_SECONDS_BETWEEN_LOOKS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("shipper", timeout or 0)
            pause = min(2 * pause, left, _MOST_SECONDS_BETWEEN_LOOKS)
            time.sleep(pause)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Parent:
    """The process that forks commands; started for the first command, it ends when its socket is closed."""

    def __init__(self) -> None:
        self._socket, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def start(
        self, prefix: list[str], command: list[str], folder: Path, environment: Mapping[str, str], streams: list[int]
    ) -> int:
        """Return the id of the new process."""
        request = {"prefix": prefix, "command": command, "folder": str(folder), "environment": dict(environment)}
        body = json.dumps(request).encode()
        with self._lock:
            self._process = self._process or self._begin()
            with _adopting_orphans():
                socket.send_fds(self._socket, [len(body).to_bytes(4, "big")], streams)
                self._socket.sendall(body)
                number = int.from_bytes(self._socket.recv(4), "big")
        assert number, "the forking process has ended"
        return number

    def close(self) -> None:
        self._theirs.close()
        self._socket.close()
        if self._process is not None:
            self._process.wait(10)

    def _begin(self) -> subprocess.Popen[bytes]:
        with self._theirs as theirs:
            return subprocess.Popen(
                [sys.executable, Path(__file__).with_name("warm_parent.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in ("PATH", "SHIPPER_NATIVE") if name in os.environ},
            )


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Adopt orphaned processes within the block only, because other orphans would never be waited for."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_parent: _Parent | None = None


def are_allowed() -> bool:
    """Return whether warm starts are allowed."""
    return os.environ.get("SHIPPER_TEST_STARTS") != "real"


@contextmanager
def warm_starts() -> Iterator[None]:
    """Start commands warm within the block, unless that is forbidden or impossible."""
    global _parent
    if sys.platform == "linux" and are_allowed():
        _parent = _Parent()
    try:
        yield
    finally:
        if _parent is not None:
            _parent.close()
            _parent = None


def start(command: list[str | Path], *, fresh: bool = False, **options: Any) -> Process | subprocess.Popen[bytes]:
    """
    Start a command, warm if possible.

    Args:
        fresh: Whether the test concerns the start itself, which must be real.
        options: As for `subprocess.Popen`.
    """
    if fresh or not _can_start(command, options):
        return subprocess.Popen(command, **options)
    return Process(command, **options)


def _can_start(command: list[str | Path], options: Mapping[str, Any]) -> bool:
    """Return whether this command can be started warm without affecting the test."""
    return bool(
        _parent is not None
        and SHIPPER in command
        and _PREFIXES.fullmatch("".join(f"{word} " for word in command[: command.index(SHIPPER)]))
        and options.keys() == {"cwd", "env", "stdin", "stdout", "stderr"}
        and None not in options.values()
        and all(_HARMLESS.fullmatch(name) for name in options["env"])
    )
