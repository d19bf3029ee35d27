"""
The EventIds that were accepted lately, so that later runs know them: 16 bytes each, in files beside the database.

The database says how much of each file counts, and that moves with the checkpoints and the counts, in one transaction;
what was appended and not committed is overwritten. The database itself would write each of them three times.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from shipper.model.errors import StateUnwritableError
from shipper.state.schema import open_for_reading
from shipper.state.sqlite import understood

_ID_BYTES: Final = 16
_FILES: Final = 8  # that the window is parted into: one is deleted once the others hold enough
_FILE_IDS_MIN: Final = 4096
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_to_disk: Final = getattr(os, "fdatasync", os.fsync)


class Window(Struct, frozen=True):
    """How many accepted EventIds are remembered, and since when, seconds since the epoch; None = of no time."""

    event_ids: int = 0
    since: float | None = None


class AcceptedIds:
    """
    The remembered ids of the state whose lock the caller holds.

    Args:
        directory: Of the state.
        size: How many to remember at least; 0 = none, and those that there are go.
    """

    def __init__(self, db: sqlite3.Connection, directory: Path, size: int) -> None:
        self._db = db
        self._directory = _directory_in(directory)
        self._size = size
        self._file_bytes = _ID_BYTES * max(-(-size // _FILES), _FILE_IDS_MIN)
        self._descriptor: int | None = None  # of the file with this number
        self._number = 0
        self._may_have_forgotten = True

    def append(self, ids: bytes, now_s: float) -> None:
        """
        Add ids, within the transaction that saves what was accepted.

        Raises:
            StateUnwritableError: There is no room, or no permission, for now.
        """
        if not self._size and self._db.execute("DELETE FROM accepted_ids").rowcount:
            self._may_have_forgotten = True
        if not self._size or not ids:
            return
        row = self._db.execute("SELECT number, bytes FROM accepted_ids ORDER BY number DESC LIMIT 1").fetchone()
        try:
            number, start = row if row and row[1] < self._file_bytes and self._has(*row) else self._begin(now_s)
            assert self._descriptor is not None
            written = 0
            while written < len(ids):
                written += os.pwrite(self._descriptor, ids[written:], start + written)
            _to_disk(self._descriptor)
        except OSError as error:
            self.close()
            raise StateUnwritableError(
                f"{self._directory} cannot be written ({error}); nothing is lost: "
                "what was not saved is sent again at the next start"
            ) from error
        self._db.execute("UPDATE accepted_ids SET bytes = ? WHERE number = ?", (start + len(ids), number))
        if self._db.execute(_PRUNE, (_ID_BYTES * self._size,)).rowcount:
            self._may_have_forgotten = True

    def _has(self, number: int, size: int) -> bool:
        """Open a file, unless it is open; return whether it is there, with all that was committed."""
        if self._descriptor is None or self._number != number:
            self.close()
            self._descriptor, self._number = _open(self._directory / str(number), os.O_RDWR), number
        return self._descriptor is not None and os.fstat(self._descriptor).st_size >= size

    def _begin(self, now_s: float) -> tuple[int, int]:
        """Begin another file; a transaction that failed may have left one of its name."""
        self.close()
        number = self._db.execute("INSERT INTO accepted_ids (bytes, first_at) VALUES (0, ?)", (now_s,)).lastrowid
        assert number is not None
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self._directory / str(number)
        with suppress(FileNotFoundError):
            path.unlink()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
        self._number, self._may_have_forgotten = number, True
        for folder in (self._directory, self._directory.parent):  # or a crash of the machine may lose the name
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return number, 0

    def delete_forgotten(self) -> None:
        """Delete the files that no committed row names, once there may be any."""
        if not self._may_have_forgotten:
            return
        self._may_have_forgotten = False
        kept = {str(number) for (number,) in self._db.execute("SELECT number FROM accepted_ids")}
        with suppress(OSError):
            for name in os.listdir(self._directory):
                if name.isdecimal() and name not in kept:
                    os.unlink(self._directory / name)

    def close(self) -> None:
        """Close the file that is written to."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# Those without which the younger ones are still enough.
_PRUNE: Final = """
DELETE FROM accepted_ids WHERE number IN (
    SELECT number FROM (SELECT number, sum(bytes) OVER (ORDER BY number DESC) - bytes AS younger FROM accepted_ids)
    WHERE younger >= ?
)
"""


def read_accepted_ids(directory: Path, size: int) -> Iterator[bytes]:
    """
    Read the last ids, the oldest first, many at a time; what is missing of the files is left out.

    Raises:
        StateError: The database or a file cannot be read.
    """
    db = open_for_reading(directory) if size else None
    if db is None:
        return
    with closing(db), understood(directory / "state.db"):
        rows = db.execute("SELECT number, bytes FROM accepted_ids ORDER BY number").fetchall()
    skipped = max(0, sum(length for _, length in rows) - _ID_BYTES * size)
    for number, length in rows:
        start, skipped = min(skipped, length), max(0, skipped - length)
        if length > start and (ids := _read(_directory_in(directory) / str(number), start, length)):
            yield ids


def window_of(db: sqlite3.Connection) -> Window:
    """Return how many ids are remembered, and since when."""
    size, since = db.execute("SELECT coalesce(sum(bytes), 0), min(first_at) FROM accepted_ids").fetchone()
    return Window(size // _ID_BYTES, since)


def _directory_in(state_directory: Path) -> Path:
    return state_directory / "accepted_ids"


def _open(path: Path, flags: int) -> int | None:
    """Open a file; None if there is none, or something else, which is not followed or waited for."""
    try:
        descriptor = os.open(path, flags | _OPEN)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _read(path: Path, start: int, end: int) -> bytes:
    with understood(path):
        descriptor = _open(path, os.O_RDONLY)
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as file:
            file.seek(start)
            found = file.read(end - start)
    return found[: len(found) // _ID_BYTES * _ID_BYTES]
