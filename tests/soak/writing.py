"""
Events without end, as fast as they are taken: into files that are rotated, or into a pipe.

Events come in blocks of always the same lines; only the first eight digits of the EventIds differ, which are the number
of the block; the next four are the line. So a block is made by one replacement, and what has arrived is easily told.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from tests.bench.blackhole import POISON

BLOCK_LINES: Final = 4000  # more than a batch holds: no ConsumerID stands twice in one
SPOILED_EVERY: Final = 50  # so many blocks, one has a line twice, one that is invalid, and one that the service refuses
FILE_BYTES: Final = 8 << 20
_TURN_S: Final = 0.01
_NUMBER: Final = b"@@@@@@@@"
_TWICE, _INVALID, _POISONED = 10, 20, 30


class Written(NamedTuple):
    """What was written, and what has to become of it."""

    records: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(*map(sum, zip(self, other, strict=True)))


_CLEAN: Final = Written(BLOCK_LINES, BLOCK_LINES)
_SPOILED: Final = Written(BLOCK_LINES + 1, BLOCK_LINES - 2, dead_lettered=2, duplicates=1)


class Blocks:
    """
    Makes one block after the other.

    Args:
        lines: At least `BLOCK_LINES` sample events with different consumers, each with its newline.
        writer: A digit, the first of all numbers.
    """

    def __init__(self, lines: Iterable[bytes], writer: int = 0) -> None:
        marked = [
            line.replace(b'"EventId":"' + line[12:25], b'"EventId":"%b-%04x' % (_NUMBER, number), 1)
            for number, line in zip(range(BLOCK_LINES), lines, strict=False)
        ]
        assert len(marked) == BLOCK_LINES
        self._clean = b"".join(marked)
        marked[_TWICE] *= 2
        marked[_INVALID] = marked[_INVALID].replace(b'"ConsumerStatus":"', b'"ConsumerStatus":1,"Was":"')
        marked[_POISONED] = marked[_POISONED].replace(b'"Username":"', b'"Username":"%b' % POISON)
        self._spoiled = b"".join(marked)
        self._first = writer << 28
        self._next = 0

    def next(self) -> tuple[bytes, Written]:
        """Make the next block."""
        number, self._next = self._next, self._next + 1
        is_spoiled = number % SPOILED_EVERY == SPOILED_EVERY // 2
        template = self._spoiled if is_spoiled else self._clean
        return template.replace(_NUMBER, b"%08x" % (self._first + number)), _SPOILED if is_spoiled else _CLEAN


class Writer(threading.Thread, ABC):
    """
    Writes blocks until it is stopped.

    Attributes:
        written: So far.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.written = Written()
        self._blocks = blocks
        self._is_stopping = threading.Event()

    def run(self) -> None:
        while not self._is_stopping.is_set():
            if self._has_room():
                block, written = self._blocks.next()
                self._write(block)
                self.written += written
            else:
                self._is_stopping.wait(_TURN_S)
        self._end()

    def ask_to_stop(self) -> None:
        """Let it end after the block that is being written."""
        self._is_stopping.set()

    def stop(self, limit_s: float) -> None:
        """Have it end, and wait."""
        self.ask_to_stop()
        self.join(limit_s)
        assert not self.is_alive(), "what is written is taken no more"

    @abstractmethod
    def _has_room(self) -> bool: ...
    @abstractmethod
    def _write(self, block: bytes) -> None: ...
    @abstractmethod
    def _end(self) -> None: ...


class FileWriter(Writer):
    """
    Writes to `app.ndjson` in a folder and renames it away when it is large and some of it has arrived.

    What is renamed before `shipper run` has seen it under its first name is not known to be rotated, and stays.

    Args:
        arrived: Tells how many of its events have arrived.
        ahead: So many may be written and have not arrived; that bounds what lies on the disk.
    """

    def __init__(self, blocks: Blocks, folder: Path, *, arrived: Callable[[], int], ahead: int) -> None:
        super().__init__(blocks)
        self.rotations = 0
        self._path = folder / "app.ndjson"
        self._arrived = arrived
        self._ahead = ahead
        self._seen = 0
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._written_before = self.written.accepted  # once more than these have arrived, some of the file have

    def _has_room(self) -> bool:
        if self._is_ahead:
            self._seen = self._arrived()
        return not self._is_ahead

    @property
    def _is_ahead(self) -> bool:
        return self.written.accepted - self._seen >= self._ahead

    def _write(self, block: bytes) -> None:
        if self._file.tell() >= FILE_BYTES and self._arrived() > self._written_before:
            self._file.close()
            self.rotations += 1
            self._path.rename(self._path.with_name(f"app-{self.rotations:06}.ndjson"))
            self._open()
        self._file.write(block)

    def _end(self) -> None:
        self._file.close()


class PipeWriter(Writer):
    """Writes to a pipe, which holds it up as it is meant to. That its reader is gone is for others to tell."""

    def __init__(self, blocks: Blocks, pipe: IO[bytes]) -> None:
        super().__init__(blocks)
        self._pipe = pipe

    def _has_room(self) -> bool:
        return True

    def _write(self, block: bytes) -> None:
        try:
            self._pipe.write(block)
        except BrokenPipeError:
            self.ask_to_stop()

    def _end(self) -> None:
        with suppress(BrokenPipeError):
            self._pipe.close()


def write_finished(folder: Path, blocks: Blocks, files: int) -> tuple[list[Path], Written]:
    """Write files of one event each, which do not grow any more; at least as many as asked for, in whole blocks."""
    paths: list[Path] = []
    written = Written()
    while len(paths) < files:
        block, more = blocks.next()
        for line in block.splitlines(keepends=True):
            path = folder / f"old-{len(paths):06}.ndjson"
            path.write_bytes(line)
            paths.append(path)
        written += more
    return paths, written
