"""
The recently accepted EventIds, kept for deduplication in later runs: 16 bytes each, in files beside the database.

The database holds the valid length of each file, updated in the transaction that saves checkpoints and counts;
uncommitted data is overwritten. Storing the ids in the database itself would write each of them three times.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct

from shipper.model.errors import StateUnwritableError
from shipper.state.schema import reading
from shipper.state.sqlite import translate_errors
from shipper.system.files import GUARDED, sync_directory

log = structlog.get_logger("state")

_ID_BYTES: Final = 16
_FILES: Final = 8  # the oldest is deleted once the others hold enough
_FILE_IDS_MIN: Final = 4096
_to_disk: Final = getattr(os, "fdatasync", os.fsync)


class Window(Struct, frozen=True):
    """The number of remembered EventIds, and since when they are remembered, seconds since the epoch."""

    event_ids: int = 0
    since: float | None = None


class AcceptedIds:
    """
    The remembered ids of a state directory whose lock the caller holds.

    Args:
        size: Minimum number to remember; 0 = none, and existing ones are deleted.
    """

    def __init__(self, db: sqlite3.Connection, directory: Path, size: int) -> None:
        self._db = db
        self._directory = directory / "accepted_ids"
        self._size = size
        self._file_bytes = _ID_BYTES * max(-(-size // _FILES), _FILE_IDS_MIN)
        self._may_have_orphans = self._may_have_gaps = True

    def append(self, ids: bytes, now_s: float) -> None:
        """Add ids within the transaction that saves their checkpoints."""
        if not self._size and self._db.execute("DELETE FROM accepted_ids").rowcount:
            self._may_have_orphans = True
        if not self._size or not ids:
            return
        try:
            self._give_up_lost()
            number, start = self._newest() or self._create(now_s)
            with open(os.open(self._directory / str(number), os.O_RDWR | GUARDED), "r+b") as file:
                file.seek(start)
                file.write(ids)
                file.flush()
                _to_disk(file.fileno())
        except OSError as error:
            raise StateUnwritableError(
                f"{self._directory} cannot be written ({error}); nothing is lost: "
                "unsaved records are sent again at the next start"
            ) from error
        self._db.execute("UPDATE accepted_ids SET bytes = ? WHERE number = ?", (start + len(ids), number))
        if self._db.execute(_PRUNE, (_ID_BYTES * self._size,)).rowcount:
            self._may_have_orphans = True

    def _give_up_lost(self) -> None:
        """Adapt the lengths in the database to files that are gone or too short, once per process."""
        if self._may_have_gaps:
            rows = self._db.execute("SELECT number, bytes FROM accepted_ids").fetchall()
            stored = [(_stored_bytes(self._directory, number, length), number) for number, length in rows]
            self._db.executemany("UPDATE accepted_ids SET bytes = ? WHERE number = ?", stored)
            self._db.execute("DELETE FROM accepted_ids WHERE bytes = 0")
            self._may_have_gaps = False

    def _newest(self) -> tuple[int, int] | None:
        """Return the number and the committed length of the newest file if it can be continued."""
        row = self._db.execute("SELECT number, bytes FROM accepted_ids ORDER BY number DESC LIMIT 1").fetchone()
        is_usable = row and row[1] < self._file_bytes and _stored_bytes(self._directory, *row) == row[1]
        return row if is_usable else None

    def _create(self, now_s: float) -> tuple[int, int]:
        """Create the next file, replacing one left by a failed transaction."""
        number = self._db.execute("INSERT INTO accepted_ids (bytes, first_at) VALUES (0, ?)", (now_s,)).lastrowid
        assert number is not None
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self._directory / str(number)
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | GUARDED, 0o600))
        self._may_have_orphans = True
        for folder in (self._directory, self._directory.parent):  # so that a crash of the machine keeps the new file
            sync_directory(folder)
        return number, 0

    def delete_orphans(self) -> None:
        """Delete files without a committed row."""
        if not self._may_have_orphans:
            return
        self._may_have_orphans = False
        referenced = {str(number) for (number,) in self._db.execute("SELECT number FROM accepted_ids")}
        with suppress(OSError):
            for name in os.listdir(self._directory):
                if name.isdecimal() and name not in referenced:
                    os.unlink(self._directory / name)


# Deletes old files while the newer ones hold enough ids.
_PRUNE: Final = """
DELETE FROM accepted_ids WHERE number IN (
    SELECT number FROM (SELECT number, sum(bytes) OVER (ORDER BY number DESC) - bytes AS younger FROM accepted_ids)
    WHERE younger >= ?
)
"""


def read_accepted_ids(directory: Path, size: int) -> Iterator[bytes]:
    """Yield the newest `size` ids in large pieces, oldest first; log a warning if some are missing."""
    if not size:
        return
    with reading(directory) as db:
        rows = db.execute("SELECT number, bytes FROM accepted_ids ORDER BY number").fetchall()
    skipped = max(0, sum(length for _, length in rows) - _ID_BYTES * size)
    folder, lost = directory / "accepted_ids", 0
    for number, length in rows:
        start, skipped = min(skipped, length), max(0, skipped - length)
        ids = _read(folder, number, start, length)
        lost += length - start - len(ids)
        if ids:
            yield ids
    if lost:
        log.warning(
            "accepted_ids_lost",
            path=str(folder),
            count=lost // _ID_BYTES,
            message="records with these EventIds are no longer recognised as duplicates: if they are read again, they "
            "are sent again, and the ledger counts them again",
        )


def window_of(db: sqlite3.Connection, directory: Path) -> Window:
    """Read the number of remembered ids whose files exist, and the age of the oldest."""
    rows = db.execute("SELECT number, bytes, first_at FROM accepted_ids").fetchall()
    with translate_errors(directory / "state.db"):
        stored = [(_stored_bytes(directory / "accepted_ids", number, length), at) for number, length, at in rows]
    return Window(sum(size for size, _ in stored) // _ID_BYTES, min((at for size, at in stored if size), default=None))


def _stored_bytes(folder: Path, number: int, length: int) -> int:
    """Return how many of the committed bytes of a file exist, in whole ids."""
    try:
        status = os.lstat(folder / str(number))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return min(length, status.st_size) // _ID_BYTES * _ID_BYTES if stat.S_ISREG(status.st_mode) else 0


def _read(folder: Path, number: int, start: int, end: int) -> bytes:
    path = folder / str(number)
    with translate_errors(path):
        end = _stored_bytes(folder, number, end)
        if end <= start:
            return b""
        with open(os.open(path, os.O_RDONLY | GUARDED), "rb") as file:
            file.seek(start)
            return file.read(end - start)
