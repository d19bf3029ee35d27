"""Conditions on a machine: full and read-only disks, producers that write in pieces; and ways to inspect them."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import itertools
import json
import os
import pty
import re
import resource
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import IO, Any, Self

import pytest

from tests.e2e.driver import Running, Shipper, wait_until
from tests.e2e.fake_service import RESET, FakeService, Reply, is_peer_gone
from tests.tools import tool

# Disks ------------------------------------------------------------------------------------------------------------


class SmallDisk:
    """A separate file system in memory that can be filled to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_bsize

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Fill the disk except for this many bytes."""
        self.free()
        with self._ballast.open("wb", buffering=0) as out:
            while (length := min(1 << 16, self.free_bytes - leave_bytes)) > 0:
                try:
                    out.write(bytes(length))
                except OSError as error:  # another writer was faster
                    if error.errno != errno.ENOSPC:
                        raise
        assert self.free_bytes <= leave_bytes

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a disk of this size at a new folder; for root only."""
    path.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=0700"
    mounted = subprocess.run([tool("mount"), "-t", "tmpfs", "-o", options, "shipper-test", path], capture_output=True)
    if mounted.returncode:
        path.rmdir()
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True, timeout=10)


@contextmanager
def no_room_for_state(running: Running, disk: SmallDisk) -> Iterator[None]:
    """Keep the disk full, except for the space of the write-ahead log, which a process checkpoints at its end."""
    disk.fill()
    log_bytes = sum(path.stat().st_blocks * 512 for path in disk.path.rglob("state.db-*"))
    yield
    assert disk.free_bytes <= log_bytes, "space became available before the test ended"
    disk.free()


@contextmanager
def no_longer_files(running: Running, shipper: Shipper) -> Iterator[None]:
    """Limit file sizes to the current size of the state store's log; needs neither root nor tools."""
    log_bytes = (shipper.state / "state.db-wal").stat().st_size
    assert log_bytes > 2 * len(running.stderr), "otherwise its log output would not fit either"
    _, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (log_bytes, hard))
    yield
    assert (shipper.state / "state.db-wal").stat().st_size <= log_bytes
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def read_only_state(running: Running) -> Iterator[None]:
    """
    Make all writes to the state store fail as on a file system that became read-only.

    The kernel refuses a real read-only remount while files are open for writing.
    """
    command = [tool("strace"), "-f", "-p", str(running.pid), "-o", "/dev/null"]
    command += ["-e", "trace=pwrite64", "-e", "inject=pwrite64:error=EROFS"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as tracer:
        try:
            wait_until(lambda: _is_traced(running.pid) or tracer.poll() is not None, "the process is traced")
            if tracer.poll() is not None:
                pytest.skip(f"tracing is not permitted here: {tracer.stderr.read().decode().strip()}")
            yield
        finally:
            tracer.terminate()  # detaches from the process
            tracer.wait(10)


def _is_traced(pid: int) -> bool:
    """Return whether every thread has a tracer."""
    return all(
        "TracerPid:\t0\n" not in (thread / "status").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()
    )


# Processes --------------------------------------------------------------------------------------------------------


def folder_snapshot(folder: Path, *, without: Iterable[str] = ()) -> dict[str, tuple[int, bytes]]:
    """Return mode and bytes of everything in a folder, recursively."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
        if path.name not in without
    }


def site_of(folder: Path, code: str) -> dict[str, str]:
    """Return the environment of a Python process that executes this code at startup."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(site)}


class Terminal:
    """
    A terminal that records its output.

    Attributes:
        descriptor: The end of the processes.
        shown: The output so far; complete once the terminal is closed.
    """

    def __init__(self) -> None:
        self._screen, self.descriptor = pty.openpty()
        self.shown = b""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self._thread.join(10)
        os.close(self._screen)

    @property
    def text(self) -> str:
        """The output without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown.decode(errors="replace"))

    def _read(self) -> None:
        with suppress(OSError):  # no process has the terminal open any more
            while data := os.read(self._screen, 65_536):
                self.shown += data


# Standard input ---------------------------------------------------------------------------------------------------


def spooled(shipper: Shipper) -> list[tuple[Path, bytes]]:
    """Return the spool segments in order, with their contents."""
    found = []
    for path in sorted((shipper.state / "spool").glob("[0-9]*")):
        try:
            found.append((path, path.read_bytes()))
        except FileNotFoundError:
            continue  # deleted after the listing
    return found


def unread_bytes(pipe: IO[bytes] | int) -> int:
    """Return the number of unread bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]


def write_in_pieces(running: Running, pieces: Iterable[bytes]) -> None:
    """Write pieces into a pipe, each after the previous one has been read."""
    for piece in pieces:
        running.stdin.write(piece)
        running.stdin.flush()
        running.wait_until(lambda: unread_bytes(running.stdin) == 0, "the piece is read")


def feeding(running: Running, data: bytes) -> threading.Thread:
    """Write everything from a thread: a pipe has little capacity, and its reader may block or be killed."""

    def write() -> None:
        with suppress(BrokenPipeError, ValueError):
            running.feed(data)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Split bytes at offsets."""
    ends = sorted({0, len(data), *places})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


# The service ------------------------------------------------------------------------------------------------------


class Lockstep(FakeService):
    """Answers a request only once the earlier requests of the same process are saved, so that each causes a save."""

    def __init__(self, shipper: Shipper) -> None:
        super().__init__()
        self._shipper = shipper
        self._of_this_thread = threading.local()
        self._storing = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Note that no process is running: later requests of a killed process are ignored."""
        with self._storing:
            self._stored_before = len(self.event_ids())
            self._saved_before = self._shipper.read_state().accepted

    def connected(self, connection: socket.socket) -> None:
        super().connected(connection)
        self._of_this_thread.connection = connection

    def arrived(self, headers: Message, body: bytes) -> Reply:
        while not self.is_closing:
            with self._storing:
                if is_peer_gone(self._of_this_thread.connection):
                    break
                saved = self._shipper.read_state().accepted - self._saved_before
                if saved >= len(self.event_ids()) - self._stored_before:
                    return super().arrived(headers, body)
            time.sleep(0.005)
        return RESET


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


# Records ----------------------------------------------------------------------------------------------------------


def documents(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def csv_of(
    events: Sequence[dict[str, Any]], *, columns: Sequence[str] = (), delimiter: str = ",", header: bool = True
) -> bytes:
    """Write events as CSV with a header; `columns` sets another order."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns or list(events[0]), delimiter=delimiter, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(events)
    return out.getvalue().encode()


def numbered(lines: Sequence[bytes], number: int) -> list[bytes]:
    """Return the same events with other EventIds, whose first eight digits are the number."""
    head = b'{"EventId":"'
    assert lines[0].startswith(head)
    return [head + b"%08x" % number + line[len(head) + 8 :] for line in lines]
