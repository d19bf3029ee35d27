"""What a shipper may meet on a machine: full and read-only disks, producers that write in pieces; and looks at it."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import itertools
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import IO, Any

import pytest

from tests.e2e.driver import Running, Shipper, wait_until
from tests.e2e.fake_service import RESET, FakeService, Reply

# Disks ------------------------------------------------------------------------------------------------------------


class SmallDisk:
    """A file system of its own, in memory, that can be filled to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_bsize

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Leave so much; what was filled before is filled anew."""
        self.free()
        with self._ballast.open("wb", buffering=0) as out:
            while (length := min(1 << 16, self.free_bytes - leave_bytes)) > 0:
                try:
                    out.write(bytes(length))
                except OSError as error:  # who else writes there was quicker
                    if error.errno != errno.ENOSPC:
                        raise
        assert self.free_bytes <= leave_bytes

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Put a disk of this size in the place of a folder that is not there yet; for root only."""
    path.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "shipper-test", path], capture_output=True)
    if mounted.returncode:
        path.rmdir()
        pytest.skip(f"no small disk can be made here: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True, timeout=10)


@contextmanager
def no_room_for_state(running: Running, disk: SmallDisk) -> Iterator[None]:
    """The disk is full, but for the room of the log and its index, which a process that ends merges."""
    disk.fill()
    log_bytes = sum(path.stat().st_blocks * 512 for path in disk.path.rglob("state.db-*"))
    yield
    assert disk.free_bytes <= log_bytes, "there was room again before the end of the case"
    disk.free()


@contextmanager
def no_longer_files(running: Running, shipper: Shipper) -> Iterator[None]:
    """No file may grow beyond what the log of the state store has by now; this needs neither root nor tools."""
    log_bytes = (shipper.state / "state.db-wal").stat().st_size
    assert log_bytes > 2 * len(running.stderr), "or what it has to say would have no room either"
    _, hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (log_bytes, hard))
    yield
    assert (shipper.state / "state.db-wal").stat().st_size <= log_bytes
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def read_only_state(running: Running) -> Iterator[None]:
    """
    Everything that is written into the state store fails as on a file system that has become read-only.

    The kernel lets nobody make one read-only in earnest while files on it are open for writing.
    """
    if not shutil.which("strace"):
        pytest.skip("there is no strace")
    command = ["strace", "-f", "-p", str(running.pid), "-o", "/dev/null"]
    command += ["-e", "trace=pwrite64", "-e", "inject=pwrite64:error=EROFS"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as tracer:
        try:
            wait_until(lambda: _is_traced(running.pid) or tracer.poll() is not None, "it is traced")
            if tracer.poll() is not None:
                pytest.skip(f"nobody may be traced here: {tracer.stderr.read().decode().strip()}")
            yield
        finally:
            tracer.terminate()  # it lets go of the process
            tracer.wait(10)


def _is_traced(pid: int) -> bool:
    """Return whether every thread has a tracer by now."""
    return all(
        "TracerPid:\t0\n" not in (thread / "status").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()
    )


# Processes --------------------------------------------------------------------------------------------------------


def resident_bytes(running: Running) -> int:
    """Return how much memory a process holds now."""
    for line in Path(f"/proc/{running.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError("it has ended")


def folder_snapshot(folder: Path, *, without: Iterable[str] = ()) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of everything in a folder, and below."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
        if path.name not in without
    }


# Standard input ---------------------------------------------------------------------------------------------------


def spooled(shipper: Shipper) -> list[tuple[Path, bytes]]:
    """The segments that are there, in their order, and what is in them."""
    found = []
    for path in sorted((shipper.state / "spool").glob("[0-9]*")):
        try:
            found.append((path, path.read_bytes()))
        except FileNotFoundError:
            continue  # deleted between the listing and the look
    return found


def unread_bytes(pipe: IO[bytes] | int) -> int:
    """How much of what was written into a pipe is still in it."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]


def write_in_pieces(running: Running, pieces: Iterable[bytes]) -> None:
    """Write pieces one by one into a pipe, each when the one before has been read."""
    for piece in pieces:
        running.stdin.write(piece)
        running.stdin.flush()
        running.wait_until(lambda: unread_bytes(running.stdin) == 0, "a piece is read")


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Cut bytes at some places."""
    ends = sorted({0, len(data), *places})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


# The service ------------------------------------------------------------------------------------------------------


class Lockstep(FakeService):
    """Answers a request only when what the same process had sent before is saved, so that there is a save for each."""

    def __init__(self, shipper: Shipper) -> None:
        super().__init__()
        self._shipper = shipper
        self._of_this_thread = threading.local()
        self._storing = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Take note that there is no process: what comes from one that was killed is not taken any more."""
        with self._storing:
            self._stored_before = len(self.event_ids())
            self._saved_before = self._shipper.read_state().accepted

    def connected(self, connection: socket.socket) -> None:
        super().connected(connection)
        self._of_this_thread.connection = connection

    def arrived(self, headers: Message, body: bytes) -> Reply:
        while not self.is_closing:
            with self._storing:
                if self._is_sender_dead():
                    break
                saved = self._shipper.read_state().accepted - self._saved_before
                if saved >= len(self.event_ids()) - self._stored_before:
                    return super().arrived(headers, body)
            time.sleep(0.005)
        return RESET

    def _is_sender_dead(self) -> bool:
        try:
            return not self._of_this_thread.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


# Records ----------------------------------------------------------------------------------------------------------


def documents(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def csv_of(
    events: Sequence[dict[str, Any]], *, columns: Sequence[str] = (), delimiter: str = ",", header: bool = True
) -> bytes:
    """Write events as CSV, with a header; columns in another order if that is asked for."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns or list(events[0]), delimiter=delimiter, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(events)
    return out.getvalue().encode()


def numbered(lines: Sequence[bytes], number: int) -> list[bytes]:
    """The same events under EventIds of their own: the first eight digits are a number."""
    head = b'{"EventId":"'
    assert lines[0].startswith(head)
    return [head + b"%08x" % number + line[len(head) + 8 :] for line in lines]
