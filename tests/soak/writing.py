"""
Write endless events: to rotated files or a pipe as fast as they are read, or to a file at a fixed rate.

Every block has the same lines except for the EventIds: their first eight digits are the number of the block, the next
four that of the line. So a block is created by one replacement, and arrivals are cheap to count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import IO, Final, NamedTuple

from shipper.sandbox.samples import sample_lines
from tests.bench.blackhole import POISON

BLOCK_LINES: Final = 4000  # more than a batch holds, so that no batch repeats a ConsumerID
SPOILED_EVERY: Final = 50  # blocks, one has a repeated line, an invalid one, and one that the service refuses
FILE_BYTES: Final = 8 << 20
_TURN_S: Final = 0.01
_STEPS_PER_S: Final = 50  # between writes at a fixed rate
_NUMBER: Final = b"@@@@@@@@"
_TWICE, _INVALID, _POISONED = 10, 20, 30


class Written(NamedTuple):
    """The number of lines written, and their expected results."""

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
    Creates blocks, one after the other.

    Args:
        writer: The first digit of all block numbers.
    """

    def __init__(self, writer: int = 0, *, seed: int = 1) -> None:
        marked = [
            line.replace(b'"EventId":"' + line[12:25], b'"EventId":"%b-%04x' % (_NUMBER, number), 1)
            for number, line in enumerate(sample_lines(BLOCK_LINES, seed=seed, end=datetime.now(UTC)))
        ]
        self._clean = b"".join(marked)
        marked[_TWICE] *= 2
        marked[_INVALID] = marked[_INVALID].replace(b'"ConsumerStatus":"', b'"ConsumerStatus":1,"Was":"')
        marked[_POISONED] = marked[_POISONED].replace(b'"Username":"', b'"Username":"%b' % POISON)
        self._spoiled = b"".join(marked)
        self._numbers = count(writer << 28)

    def next(self) -> tuple[bytes, Written]:
        number = next(self._numbers)
        is_spoiled = number % SPOILED_EVERY == SPOILED_EVERY // 2
        template, written = (self._spoiled, _SPOILED) if is_spoiled else (self._clean, _CLEAN)
        return template.replace(_NUMBER, b"%08x" % number), written

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of clean blocks."""
        for number in self._numbers:
            yield from self._clean.replace(_NUMBER, b"%08x" % number).splitlines(keepends=True)


class Writer(threading.Thread):
    """
    Writes blocks in a thread until it is stopped.

    Attributes:
        written: The lines written so far.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.written = Written()
        self._blocks = blocks
        self._is_stopping = threading.Event()

    def run(self) -> None:
        while not self._is_stopping.is_set():
            if self.has_room():
                block, written = self._blocks.next()
                self.write(block)
                self.written += written
            else:
                self._is_stopping.wait(_TURN_S)
        self.end()

    def ask_to_stop(self) -> None:
        """Ask the writer to end after the current block."""
        self._is_stopping.set()

    def stop(self, limit_s: float) -> None:
        self.ask_to_stop()
        self.join(limit_s)
        assert not self.is_alive(), "the writer is blocked: its output is not read"

    def has_room(self) -> bool:
        return True

    def write(self, block: bytes) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError


class FileWriter(Writer):
    """
    Writes to `app.ndjson` in a folder, and rotates the file when it is large and partly delivered.

    A file renamed before `shipper run` has seen its first name would not be recognised as rotated, and would stay.

    Args:
        arrived: Returns the number of its events that have arrived.
        ahead: Maximum number of events that have not arrived; bounds the disk space.
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
        self._written_before = self.written.accepted  # once more have arrived, the file is partly delivered

    def has_room(self) -> bool:
        if self.written.accepted - self._seen >= self._ahead:
            self._seen = self._arrived()
        return self.written.accepted - self._seen < self._ahead

    def write(self, block: bytes) -> None:
        if self._file.tell() >= FILE_BYTES and self._arrived() > self._written_before:
            self._file.close()
            self.rotations += 1
            self._path.rename(self._path.with_name(f"app-{self.rotations:06}.ndjson"))
            self._open()
        self._file.write(block)

    def end(self) -> None:
        self._file.close()


class PipeWriter(Writer):
    """Writes to a pipe as fast as it is read; ignores a broken pipe, which is detected elsewhere."""

    def __init__(self, blocks: Blocks, pipe: IO[bytes]) -> None:
        super().__init__(blocks)
        self._pipe = pipe

    def write(self, block: bytes) -> None:
        try:
            self._pipe.write(block)
        except BrokenPipeError:
            self.ask_to_stop()

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._pipe.close()


class RateWriter(threading.Thread):
    """
    Appends lines to a file at a fixed rate, or as fast as the machine can.

    Attributes:
        written: Number of lines written.
    """

    def __init__(self, lines: Iterable[bytes], path: Path, rate: int) -> None:
        super().__init__(daemon=True)
        self.written = 0
        self._lines, self._path, self._rate = iter(lines), path, rate
        self._is_stopping = threading.Event()

    def run(self) -> None:
        begin = time.monotonic()
        with self._path.open("ab", buffering=0) as out:
            for step in count(1):
                out.write(b"".join(islice(self._lines, self._rate // _STEPS_PER_S)))
                self.written += self._rate // _STEPS_PER_S
                if self._is_stopping.wait(max(0.0, begin + step / _STEPS_PER_S - time.monotonic())):
                    return

    def stop(self) -> int:
        """Stop the writer, and return the number of lines written."""
        self._is_stopping.set()
        self.join()
        return self.written


def write_finished(folder: Path, blocks: Blocks, files: int) -> tuple[list[Path], Written]:
    """Write files of one event each that do not grow; at least `count`, rounded up to whole blocks."""
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
