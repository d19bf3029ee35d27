"""The tables of the state database, and its write-ahead log."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

from shipper.model.errors import StateError
from shipper.state.directory import LIVE_FILE
from shipper.state.sqlite import IF_MOVED, check_schema, create_schema, open_read_only, translate_errors

SCHEMA_VERSION: Final = 1
LETTER_OVERHEAD_BYTES: Final = 512
# What a dead letter counts against the quota.
LETTER_BYTES: Final = f"length(raw) + length(header) + {LETTER_OVERHEAD_BYTES}"

_CHECKED_BYTES_MAX: Final = 1 << 24  # takes milliseconds
_APPLICATION_ID: Final = 0x53484950  # "SHIP"; identifies our databases
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
    updated_at REAL NOT NULL,
    compression TEXT NOT NULL DEFAULT '',
    size INTEGER NOT NULL DEFAULT 0,
    ended_size INTEGER NOT NULL DEFAULT -1,
    ended_ns INTEGER NOT NULL DEFAULT -1,
    is_rotated INTEGER NOT NULL DEFAULT 0,
    settled_until REAL, -- everything it contained at this time is settled; NULL = unknown
    is_gone INTEGER NOT NULL DEFAULT 0 -- it no longer exists
) STRICT;
CREATE INDEX streams_by_inode ON streams (device, inode);
CREATE TABLE unreachable (
    stream_id INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    noticed_at REAL NOT NULL
) STRICT;
CREATE TABLE started_patterns ( -- of input.include; input.start applies to files that exist at a pattern's first use
    pattern TEXT PRIMARY KEY,
    started_at REAL NOT NULL
) STRICT;

CREATE TABLE totals (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    read INTEGER NOT NULL,
    accepted INTEGER NOT NULL,
    dead_lettered INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    youngest_stream_id INTEGER NOT NULL,
    purged INTEGER NOT NULL DEFAULT 0,           -- those of dead_lettered that were deleted
    dead_letter_bytes INTEGER NOT NULL DEFAULT 0, -- quota used by the stored ones
    unreachable_bytes INTEGER NOT NULL DEFAULT 0 -- unread bytes of inputs that no longer exist
) STRICT;
INSERT INTO totals (one, read, accepted, dead_lettered, duplicates, youngest_stream_id) VALUES (1, 0, 0, 0, 0, 0);

CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- never reuses the id of a deleted letter
    stream_id INTEGER NOT NULL,
    path TEXT NOT NULL,
    start_offset INTEGER NOT NULL,
    end_offset INTEGER NOT NULL,
    rule TEXT NOT NULL,
    message TEXT NOT NULL,
    status INTEGER NOT NULL,
    delivery TEXT NOT NULL,
    event_id TEXT NOT NULL,
    consumer_id TEXT NOT NULL,
    header BLOB NOT NULL,
    raw BLOB NOT NULL,
    attempts INTEGER NOT NULL,
    first_at REAL NOT NULL,
    last_at REAL NOT NULL,
    whole_bytes INTEGER NOT NULL DEFAULT 0 -- length of a truncated record; 0 = it was not truncated
) STRICT;
CREATE INDEX letters_without_record ON dead_letters (stream_id) WHERE length(raw) = 0;
CREATE TABLE letter_counts ( -- of dead_letters, as counting a million rows takes a third of a second
    rule TEXT PRIMARY KEY,
    kept INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TRIGGER letter_kept AFTER INSERT ON dead_letters BEGIN
    INSERT INTO letter_counts VALUES (new.rule, 1) ON CONFLICT (rule) DO UPDATE SET kept = kept + 1;
END;
CREATE TRIGGER letter_gone AFTER DELETE ON dead_letters BEGIN
    UPDATE letter_counts SET kept = kept - 1 WHERE rule = old.rule;
END;
CREATE TRIGGER letter_refused_anew AFTER UPDATE OF rule ON dead_letters BEGIN
    UPDATE letter_counts SET kept = kept - 1 WHERE rule = old.rule;
    INSERT INTO letter_counts VALUES (new.rule, 1) ON CONFLICT (rule) DO UPDATE SET kept = kept + 1;
END;
CREATE TABLE expiry ( -- dead letters past their retention at the last search
    one INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at REAL NOT NULL,
    up_to_id INTEGER NOT NULL
) STRICT;

CREATE TABLE ledger (
    hour TEXT NOT NULL, -- of the Timestamp, YYYY-MM-DDThh, UTC
    brand_id INTEGER NOT NULL,
    affiliate_id TEXT NOT NULL,
    media TEXT NOT NULL, -- the digits of the BTag
    accepted INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    PRIMARY KEY (hour, brand_id, affiliate_id, media)
) STRICT, WITHOUT ROWID;
CREATE TABLE ledger_parts ( -- appended counts, to be added to those of ledger
    id INTEGER PRIMARY KEY,
    first_hour TEXT NOT NULL, -- range of hours in it
    last_hour TEXT NOT NULL,
    data BLOB NOT NULL -- zlib of msgpack: the columns of ledger as arrays
) STRICT;
CREATE INDEX parts_by_hour ON ledger_parts (first_hour);
CREATE TABLE ledger_expiry (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at REAL NOT NULL,
    due TEXT NOT NULL, -- counts before this day were past their retention then
    kept_from TEXT NOT NULL -- counts before this day were deleted; empty = none were
) STRICT;
INSERT INTO ledger_expiry VALUES (1, 0, '', '');

CREATE TABLE accepted_ids ( -- files of recently accepted EventIds, 16 bytes each
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- name of the file
    bytes INTEGER NOT NULL, -- valid length
    first_at REAL NOT NULL -- when the first id was saved
) STRICT;

CREATE TABLE log_chain ( -- identifies the write-ahead log that belongs to this file: see `check_wal`
    one INTEGER PRIMARY KEY CHECK (one = 1),
    token BLOB NOT NULL, -- random; generated by the first transaction of each log
    previous BLOB NOT NULL
) STRICT;
INSERT INTO log_chain VALUES (1, x'', x'');
"""


def is_initialized(db: sqlite3.Connection) -> bool:
    """Return whether the database has its tables; errors as for `check_schema`."""
    return check_schema(db, _APPLICATION_ID, SCHEMA_VERSION)


def create_tables(db: sqlite3.Connection) -> None:
    create_schema(db, _SCHEMA, _APPLICATION_ID, SCHEMA_VERSION)


def open_for_reading(directory: Path) -> sqlite3.Connection:
    """
    Open the database without its lock, or an empty one in memory if there is no state yet.

    Raises:
        StateError: The database is foreign, damaged, lost, or was written by another version.
    """
    path = directory / "state.db"
    with translate_errors(path), ExitStack() as opened:
        db = open_read_only(path)
        if db is not None:
            opened.enter_context(closing(db))
            if is_initialized(db):
                opened.pop_all()  # keep it open
                return db
            if os.path.lexists(directory / LIVE_FILE):  # a crash at the creation does not leave it
                raise sqlite3.DatabaseError("it has lost its content: restore the whole directory from a copy")
        elif wal_bytes(path):
            raise StateError(
                f"{path} is missing, but its log {wal_path(path)} is there. It was left unchanged: put the database "
                f"back. To start over, move the log away: {IF_MOVED}"
            )
    db = sqlite3.connect(":memory:", check_same_thread=False)
    create_tables(db)
    return db


@contextmanager
def reading(directory: Path) -> Iterator[sqlite3.Connection]:
    """Open the database of a state directory as `open_for_reading` does, in a read transaction."""
    with closing(open_for_reading(directory)) as db, translate_errors(directory / "state.db"):
        db.execute("BEGIN")
        yield db


# The write-ahead log --------------------------------------------------------------------------------------------------


def wal_bytes(path: Path) -> int:
    """Return the size of a database's write-ahead log."""
    try:
        return wal_path(path).stat().st_size
    except FileNotFoundError:
        return 0


def wal_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def chain_wal(db: sqlite3.Connection) -> None:
    """Start a log, within its first transaction: generate its token and keep the previous log's."""
    db.execute("UPDATE log_chain SET previous = token, token = randomblob(16)")


def check_wal(path: Path) -> None:
    """Raise StateError if a database and its log do not belong together."""
    with translate_errors(path):
        # Repeat: a running shipper may merge its log between our two reads.
        if any(_wal_matches(path) for _ in range(3)):
            return
    raise StateError(
        f"{path} and {wal_path(path)} do not belong together: one of them was restored or copied "
        "without the other. Both were left unchanged. Restore both from the same moment, or move the log away to "
        "continue with the database alone: everything saved after it is sent again with the same EventIds"
    )


def check_pages(db: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError if a database is damaged; a large one is not read."""
    size = db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()[0]
    if size <= _CHECKED_BYTES_MAX and (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(f"it is damaged: {' '.join(found.split())}")


def _wal_matches(path: Path) -> bool:
    """
    Return whether a database and its write-ahead log belong together.

    SQLite applies any log that is intact. A matching file, read without its log, contains all of the previous log: its
    token is that log's or, once part of the current log has been merged, the current one. If the file or the log was
    restored alone, the file has another token.
    """
    if not wal_bytes(path):
        return True
    db = open_read_only(path)
    assert db is not None, "see open_for_reading"
    with closing(db):
        try:
            chain = db.execute("SELECT token, previous FROM log_chain").fetchone()
        except sqlite3.OperationalError:
            return not _has_table(db)  # it is being created
        try:
            return _token_without_wal(path) in chain
        except sqlite3.DatabaseError:  # a crash interrupted merging the log
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")


def _token_without_wal(path: Path) -> bytes:
    db = open_read_only(path, "&immutable=1")
    assert db is not None
    with closing(db):
        row = db.execute("SELECT token FROM log_chain").fetchone() if _has_table(db) else None
        return bytes(row[0]) if row else b""


def _has_table(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'log_chain'").fetchone()[0])
