"""
The state store: checkpoints, dead letters and totals in one SQLite database, moved by one transaction.

All calls block; stages call them in a worker thread, one at a time.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shipper.errors import StateError
from shipper.records import Checkpoint, Stream, StreamKind, Totals, digest

SCHEMA_VERSION: Final = 1
_APPLICATION_ID: Final = 0x53484950  # "SHIP"; tells our database from a foreign one
_SCHEMA: Final = """
CREATE TABLE streams (
    stream_id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    path TEXT NOT NULL,
    device INTEGER NOT NULL,
    inode INTEGER NOT NULL,
    checkpoint INTEGER NOT NULL,
    head_bytes INTEGER NOT NULL,
    head_digest BLOB NOT NULL,
    marker_bytes INTEGER NOT NULL,
    marker_digest BLOB NOT NULL,
    updated_at REAL NOT NULL
) STRICT;
CREATE INDEX streams_by_inode ON streams (device, inode);
CREATE TABLE totals (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    read INTEGER NOT NULL,
    accepted INTEGER NOT NULL,
    dead_lettered INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    youngest_stream_id INTEGER NOT NULL
) STRICT;
INSERT INTO totals VALUES (1, 0, 0, 0, 0, 0);
CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY,
    stream_id INTEGER NOT NULL,
    path TEXT NOT NULL,
    start_offset INTEGER NOT NULL,
    end_offset INTEGER NOT NULL,
    rule TEXT NOT NULL,
    message TEXT NOT NULL,
    delivery TEXT NOT NULL,
    event_id TEXT NOT NULL,
    raw BLOB NOT NULL,
    attempts INTEGER NOT NULL,
    first_at REAL NOT NULL,
    last_at REAL NOT NULL
) STRICT;
"""


class Store:
    """
    The database of one state directory, whose lock the caller holds.

    Raises:
        StateError: The file is not a shipper's database, is damaged, or was written by a newer version. It is left
            as it is.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "state.db"
        with self._understood():
            # SQLite gives its side files the permissions of the database, so this covers them too.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._open()

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Translate what goes wrong when the database is opened or read."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise StateError(
                f"{self._path} cannot be used ({error}). It was left as it is. To start over, move it away: "
                "every input is then read from its beginning and sent again with the same EventIds"
            ) from error

    def _open(self) -> None:
        tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        application_id = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if tables and application_id != _APPLICATION_ID:
            raise sqlite3.DatabaseError("it was not written by shipper")
        if version > SCHEMA_VERSION:
            raise sqlite3.DatabaseError(
                f"it was written by a newer shipper: schema {version}, this one knows {SCHEMA_VERSION}"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        # SQLite itself would notice that the end is missing only when it comes to read there.
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = self._db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()[0]
        if self._path.stat().st_size < size:
            raise sqlite3.DatabaseError(f"its end is missing: {self._path.stat().st_size} of {size} bytes are there")
        # A spool segment is deleted after the commit that settles it, so the commit must be on disk by then.
        self._db.execute("PRAGMA synchronous = FULL")
        if not tables:
            self._db.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id = {_APPLICATION_ID};"
                f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT"
            )

    def close(self) -> None:
        self._db.close()

    def streams(self, kind: StreamKind) -> list[Stream]:
        """Read the known streams of one kind, older ones first."""
        with self._understood():
            rows = self._db.execute(
                "SELECT stream_id, kind, path, device, inode, checkpoint, head_bytes, head_digest, marker_bytes, "
                "marker_digest FROM streams WHERE kind = ? ORDER BY stream_id",
                (kind,),
            )
            names = [column[0] for column in rows.description]
            return [Stream(**dict(zip(names, row, strict=True))) for row in rows]

    def youngest_stream_id(self) -> int:
        """Tell the greatest stream id that was ever saved."""
        with self._understood():
            return int(self._db.execute("SELECT youngest_stream_id FROM totals").fetchone()[0])

    def totals(self) -> Totals:
        """Read what became of all records before the checkpoints."""
        with self._understood():
            read, accepted, dead_lettered, duplicates = self._db.execute(
                "SELECT read, accepted, dead_lettered, duplicates FROM totals"
            ).fetchone()
        return Totals(read=read, accepted=accepted, dead_lettered=dead_lettered, duplicates=duplicates)

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> None:
        """
        Move the checkpoints, with the dead letters and the counts that they pass, in one transaction.

        Args:
            now_s: Seconds since the epoch.
        Raises:
            StateError: Nothing of it was saved.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for checkpoint in checkpoints:
                    self._save_one(checkpoint, now_s)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be written ({error}); nothing is lost: "
                "what was not saved is sent again at the next start"
            ) from error

    def _save_one(self, checkpoint: Checkpoint, now_s: float) -> None:
        stream = checkpoint.stream
        self._db.execute(
            "INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (stream_id) DO UPDATE SET "
            "path = excluded.path, checkpoint = excluded.checkpoint, head_bytes = excluded.head_bytes, "
            "head_digest = excluded.head_digest, marker_bytes = excluded.marker_bytes, "
            "marker_digest = excluded.marker_digest, updated_at = excluded.updated_at",
            (
                stream.stream_id,
                stream.kind,
                stream.path,
                stream.device,
                stream.inode,
                checkpoint.end_offset,
                stream.head_bytes,
                stream.head_digest,
                len(checkpoint.tail),
                digest(checkpoint.tail),
                now_s,
            ),
        )
        # A file that was truncated or whose inode was given to another one began a younger stream.
        self._db.execute(
            "DELETE FROM streams WHERE kind = ? AND device = ? AND inode = ? AND stream_id < ?",
            (stream.kind, stream.device, stream.inode, stream.stream_id),
        )
        self._db.executemany(
            "INSERT INTO dead_letters (stream_id, path, start_offset, end_offset, rule, message, delivery, event_id, "
            "raw, attempts, first_at, last_at) VALUES (?, ?, ?, ?, ?, ?, 'invalid', ?, ?, 0, ?, ?)",
            [
                (
                    stream.stream_id,
                    stream.path,
                    rejection.start_offset,
                    rejection.end_offset,
                    rejection.rule,
                    rejection.message,
                    rejection.event_id,
                    rejection.raw,
                    now_s,
                    now_s,
                )
                for rejection in checkpoint.rejections
            ],
        )
        self._db.execute(
            "UPDATE totals SET read = read + ?, accepted = accepted + ?, dead_lettered = dead_lettered + ?, "
            "duplicates = duplicates + ?, youngest_stream_id = max(youngest_stream_id, ?)",
            (
                checkpoint.read,
                checkpoint.accepted,
                len(checkpoint.rejections),
                checkpoint.duplicates,
                stream.stream_id,
            ),
        )

    def forget(self, stream_ids: Iterable[int]) -> None:
        """Drop streams whose input no longer exists; their dead letters and counts stay."""
        with self._understood():
            self._db.executemany("DELETE FROM streams WHERE stream_id = ?", [(each,) for each in stream_ids])
