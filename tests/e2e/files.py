"""Files that are written, rotated, compressed and moved, while `shipper run` follows them or while it is stopped."""

from __future__ import annotations

import bz2
import ctypes
import gzip
import json
import lzma
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.driver import QUICK, Result, Running, Service, Shipper, wait_until

if TYPE_CHECKING:  # which has a fixture of what is here
    from tests.e2e.conftest import Sample

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES_OF_FILES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def told(running: Running | Result, event: str, path: Path | None = None) -> list[dict[str, Any]]:
    """The lines of the log that speak of an event, and of a path."""
    lines = (json.loads(line) for line in running.stderr.splitlines() if line.startswith('{"') and line.endswith("}"))
    return [line for line in lines if line.get("event") == event and path in {None, Path(line.get("path", ""))}]


def warnings_of(running: Running | Result, path: Path) -> list[dict[str, Any]]:
    """What the log has to complain of about a path, but for records in it that a rule refuses."""
    lines = (json.loads(line) for line in running.stderr.splitlines() if line.startswith('{"') and line.endswith("}"))
    of_path = [line for line in lines if line["level"] in {"warning", "error"} and line.get("path") == str(path)]
    return [line for line in of_path if line["event"] != "record_refused"]


def compress(path: Path, suffix: str, to: Path | None = None) -> Path:
    """Compress a file as its rotator does: under a name in the same folder first, and the plain one goes last."""
    target = to or path.with_name(f"{path.name}.{suffix}")
    target.write_bytes(COMPRESSIONS[suffix](path.read_bytes()))
    shutil.copystat(path, target)
    path.unlink()
    return target


def copytruncate(path: Path, copy: Path, new: Iterable[bytes] = ()) -> None:
    """Copy a file and empty it in place; then its writer goes on with these lines."""
    shutil.copy(path, copy)
    with path.open("r+b") as out:
        out.truncate(0)
        out.writelines(new)


def open_files(running: Running) -> list[str]:
    """The files and folders that a process holds open; its sockets come and go."""
    found = []
    for descriptor in Path(f"/proc/{running.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed between the listing and the look
            found.append(os.readlink(descriptor))
    return sorted(name for name in found if name.startswith("/") and not name.startswith(("/dev/", "/proc/")))


def take_inode(path: Path, inode: int) -> Path:
    """Make a new file that is given this inode number, which is free."""
    for number in range(500):
        path.touch()
        if path.stat().st_ino == inode:
            return path
        path.rename(path.with_name(f"taken.{number}"))
    pytest.skip("this file system does not give an inode number again")


def where_permissions_hold() -> list[str]:
    """Words in front of a command under which the permissions of files hold, for root, too."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("permissions do not hold for root, and there is no setpriv to change that")
    capabilities = "-dac_override,-dac_read_search"
    return ["setpriv", "--bounding-set", capabilities, "--inh-caps", capabilities, "--"]


@contextmanager
def permissions_hold() -> Iterator[None]:
    """Let the permissions of files hold for root, too, in this thread and in those that it starts."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~_CAPABILITIES_OF_FILES
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0


class Tail:
    """
    `shipper run` on files in a folder, and the lines of the sample that are written into them.

    Attributes:
        folder: Where the files are.
        file: The one that the application writes.
        running: The process that was started last.
    """

    def __init__(self, shipper: Shipper, service: Service, sample: Sample) -> None:
        self.folder = shipper.folder / "logs"
        self.folder.mkdir()
        self.file = self.folder / "app.ndjson"
        self.sample = sample
        self.running: Running = None  # type: ignore[assignment]
        self._shipper = shipper
        self._service = service

    def append(self, start: int, end: int, to: str | Path = "app.ndjson") -> Path:
        """Write lines `start` to `end` of the sample to the end of a file."""
        path = self.folder / to
        with path.open("ab") as out:
            out.write(b"".join(self.sample.lines[start:end]))
        return path

    def start(self, include: str | Sequence[str] = "app.ndjson*", **options: Any) -> Running:
        """
        Start it on globs in the folder.

        Args:
            options: Those of `Shipper.start`, and settings: `input__start="end"`.
        """
        patterns = [include] if isinstance(include, str) else include
        settings = {key.replace("__", "."): options.pop(key) for key in list(options) if "__" in key}
        settings["input.include"] = json.dumps([str(self.folder / pattern) for pattern in patterns])
        self.running = self._shipper.start("run", settings={**QUICK, **settings}, **options)
        return self.running

    def ids(self, wanted: int | Iterable[int]) -> list[str]:
        return [self.sample.ids[n] for n in (range(wanted) if isinstance(wanted, int) else wanted)]

    def wait(self, wanted: int | Iterable[int], *, limit_s: float = 60) -> None:
        """Wait until these lines have arrived; a number = the first ones of the sample."""
        ids = set(self.ids(wanted))
        self.running.wait_until(
            lambda: self._service.stored >= len(ids) and self._service.holds(ids), f"{len(ids)} events", limit_s=limit_s
        )

    def stop(self, wanted: int | Iterable[int], *, dead_lettered: int = 0) -> Result:
        """SIGTERM: exit 0, each of these lines was read once and sent once by now, and nothing else."""
        result = self.running.stop()
        assert result.returncode == 0, result.stderr
        ids = self.ids(wanted)
        self._service.assert_holds_exactly(ids)
        times = self._service.times_received()
        assert times == dict.fromkeys(ids, 1), {key: count for key, count in times.items() if count != 1}
        state = self._shipper.read_state()
        assert state.duplicates == 0, f"{state.duplicates} records were read twice"
        assert (state.read, state.accepted, state.dead_lettered) == (len(ids) + dead_lettered, len(ids), dead_lettered)
        return result

    def pass_by(self, include: str | Sequence[str], wanted: int | Iterable[int], **options: Any) -> Result:
        """Start it, wait until these lines have arrived, and stop it."""
        self.start(include, **options)
        self.wait(wanted)
        return self.stop(wanted)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the running process, so that it surely sees the files only before and after."""
        self.running.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.running.pid}/task")
        wait_until(
            lambda: all(_state_of(thread) in "tT" for thread in threads.iterdir()), "the process is held by the kernel"
        )
        yield
        self.running.process.send_signal(signal.SIGCONT)


def _state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
