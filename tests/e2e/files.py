"""Writes, rotates, compresses and moves files while `shipper run` follows them or is stopped."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.driver import QUICK, Result, Running, Service, Shipper, wait_until
from tests.tools import tool

if TYPE_CHECKING:  # imports this module
    from tests.e2e.conftest import Sample
    from tests.e2e.fake_service import FakeService

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


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as out:
        out.writelines(lines)


def log_lines(running: Running | Result, event: str, path: Path | None = None) -> list[dict[str, Any]]:
    """Return the log lines of an event, optionally only those about a path."""
    lines = (json.loads(line) for line in running.stderr.splitlines() if line.startswith('{"') and line.endswith("}"))
    return [line for line in lines if line.get("event") == event and path in {None, Path(line.get("path", ""))}]


def warnings_of(running: Running | Result, path: Path) -> list[dict[str, Any]]:
    """Return the warnings and errors about a path, except those about refused records."""
    lines = (json.loads(line) for line in running.stderr.splitlines() if line.startswith('{"') and line.endswith("}"))
    of_path = [line for line in lines if line["level"] in {"warning", "error"} and line.get("path") == str(path)]
    return [line for line in of_path if line["event"] != "record_refused"]


def compress(path: Path, suffix: str, to: Path | None = None) -> Path:
    """Compress a file as its rotator does: write the archive in the same folder, then delete the plain file."""
    target = to or path.with_name(f"{path.name}.{suffix}")
    target.write_bytes(COMPRESSIONS[suffix](path.read_bytes()))
    shutil.copystat(path, target)
    path.unlink()
    return target


def copytruncate(path: Path, copy: Path, new: Iterable[bytes] = ()) -> None:
    """Copy a file and truncate it in place; then append these lines."""
    shutil.copy(path, copy)
    with path.open("r+b") as out:
        out.truncate(0)
        out.writelines(new)


def open_files(running: Running) -> list[str]:
    """Return the files and folders that a process holds open, but not its sockets."""
    found = []
    for descriptor in Path(f"/proc/{running.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed after the listing
            found.append(os.readlink(descriptor))
    return sorted(name for name in found if name.startswith("/") and not name.startswith(("/dev/", "/proc/")))


def where_permissions_hold() -> list[str]:
    """Return a command prefix under which file permissions apply to root, too."""
    if os.geteuid() != 0:
        return []
    tool("setpriv")
    capabilities = "-dac_override,-dac_read_search"
    return ["setpriv", "--bounding-set", capabilities, "--inh-caps", capabilities, "--"]


@contextmanager
def permissions_hold() -> Iterator[None]:
    """Make file permissions apply to root, too, in this thread and in threads that it starts."""
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
    `shipper run` on files in a folder, to which lines of the sample are written.

    Attributes:
        folder: The folder of the files.
        file: The file that the application writes.
        service: Where the records arrive.
        written: The end of the lines that were appended last.
        running: The latest process.
    """

    service: Service | FakeService

    def __init__(self, shipper: Shipper, service: Service, sample: Sample) -> None:
        self.folder = shipper.folder / "logs"
        self.folder.mkdir()
        self.file = self.folder / "app.ndjson"
        self.sample = sample
        self.service = service
        self.written = 0
        self.running: Running = None  # type: ignore[assignment]
        self._shipper = shipper
        self._settings_file = shipper.config.read_text()

    def append(self, start: int, end: int, to: str | Path = "app.ndjson") -> Path:
        """Append lines `start` to `end` of the sample to a file."""
        path = self.folder / to
        append(path, *self.sample.lines[start:end])
        self.written = end
        return path

    def deliver(self, count: int) -> None:
        """Append the next lines, and wait until all lines so far have arrived."""
        self.append(self.written, self.written + count)
        self.wait(self.written)

    def configure(self, include: str = "app.ndjson", text: str = "") -> None:
        """Write a glob in the folder, and other settings, into the settings file, which may be loaded again."""
        glob = f'[input]\ninclude = ["{self.folder}/{include}"]\n'
        self._shipper.config.write_text(self._settings_file + glob + text)

    def start(
        self,
        include: str | Sequence[str] | None = "app.ndjson*",
        *,
        settings: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Running:
        """
        Start the shipper on globs in the folder.

        Args:
            include: None = as configured.
            options: As for `Shipper.start`, and settings such as `input__start="end"`.
        """
        named = {key.replace("__", "."): options.pop(key) for key in list(options) if "__" in key}
        if include is not None:
            patterns = [include] if isinstance(include, str) else include
            named["input.include"] = json.dumps([str(self.folder / pattern) for pattern in patterns])
        self.running = self._shipper.start("run", settings={**QUICK, **(settings or {}), **named}, **options)
        return self.running

    def ids(self, wanted: int | Iterable[int]) -> list[str]:
        return [self.sample.ids[n] for n in (range(wanted) if isinstance(wanted, int) else wanted)]

    def wait(self, wanted: int | Iterable[int], *, limit_s: float = 60) -> None:
        """Wait until these lines have arrived; a number means the first lines of the sample."""
        ids = set(self.ids(wanted))
        self.running.wait_until(lambda: self.service.holds(ids), f"{len(ids)} events", limit_s=limit_s)

    def stop(self, wanted: int | Iterable[int], *, dead_lettered: int = 0) -> Result:
        """Stop with SIGTERM; assert exit code 0 and that exactly these lines were read and sent, each once."""
        result = self.running.stop()
        assert result.returncode == 0, result.stderr
        ids = self.ids(wanted)
        self.service.assert_holds_exactly(ids)
        times = self.service.times_received()
        assert times == dict.fromkeys(ids, 1), {key: count for key, count in times.items() if count != 1}
        state = self._shipper.read_state()
        assert state.duplicates == 0, f"{state.duplicates} records were read twice"
        assert (state.read, state.accepted, state.dead_lettered) == (len(ids) + dead_lettered, len(ids), dead_lettered)
        return result

    def status_of_now(self) -> int:
        """Return the exit code of `shipper status --until now`: 0 if everything written until now is delivered."""
        include = json.dumps([str(self.folder / "app.ndjson*")])
        settings = {"input.include": include}
        return self._shipper.run("status", "--until", "now", settings=settings, check=False).returncode

    def pass_by(self, include: str | Sequence[str], wanted: int | Iterable[int], **options: Any) -> Result:
        """Start the shipper, wait until these lines have arrived, and stop it."""
        self.start(include, **options)
        self.wait(wanted)
        return self.stop(wanted)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Suspend the running process, so that it sees the files only before and after."""
        self.running.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.running.pid}/task")
        wait_until(lambda: all(_state_of(thread) in "tT" for thread in threads.iterdir()), "the process is suspended")
        yield
        self.running.process.send_signal(signal.SIGCONT)


def _state_of(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
