"""The tables of the state database, and its write-ahead log."""

from __future__ import annotations

import re
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import msgspec

from shipper.state.sqlite import check_schema, create_schema, open_read_only, understood

SCHEMA_VERSION: Final = 1
LETTER_OVERHEAD_BYTES: Final = 512
# What a dead letter counts against the quota.
LETTER_BYTES: Final = f"length(raw) + length(header) + {LETTER_OVERHEAD_BYTES}"

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
    updated_at REAL NOT NULL,
    compression TEXT NOT NULL DEFAULT '',
    size INTEGER NOT NULL DEFAULT 0,
    ended_size INTEGER NOT NULL DEFAULT -1,
    ended_ns INTEGER NOT NULL DEFAULT -1,
    is_rotated INTEGER NOT NULL DEFAULT 0,
    settled_until REAL, -- everything that was in it at this moment is settled; NULL = not known
    is_gone INTEGER NOT NULL DEFAULT 0 -- it was looked for and does not exist any more
) STRICT;
CREATE INDEX streams_by_inode ON streams (device, inode);
CREATE TABLE unreachable (
    stream_id INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    noticed_at REAL NOT NULL
) STRICT;
CREATE TABLE started_patterns ( -- of input.include: input.start applies to what exists when a pattern is used first
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
    purged INTEGER NOT NULL DEFAULT 0,           -- of dead_lettered: how many are no longer kept
    dead_letter_bytes INTEGER NOT NULL DEFAULT 0, -- what those that are kept count against the quota
    unreachable_bytes INTEGER NOT NULL DEFAULT 0 -- of inputs that were gone before they were read to their end
) STRICT;
INSERT INTO totals (one, read, accepted, dead_lettered, duplicates, youngest_stream_id) VALUES (1, 0, 0, 0, 0, 0);

CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- so that the number of a deleted letter is never used again
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
    whole_bytes INTEGER NOT NULL DEFAULT 0 -- of a record that was cut; 0 = it was not
) STRICT;
CREATE INDEX letters_without_record ON dead_letters (stream_id) WHERE length(raw) = 0;
CREATE TABLE letter_counts ( -- of dead_letters, as counting a million of them takes a third of a second
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
CREATE TABLE expiry ( -- which dead letters the last search found past their retention
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
CREATE TABLE ledger_parts ( -- counts that were appended, to be added to those of ledger
    id INTEGER PRIMARY KEY,
    first_hour TEXT NOT NULL, -- the least and the greatest one in it
    last_hour TEXT NOT NULL,
    data BLOB NOT NULL -- zlib of msgpack: the columns of ledger, each as an array
) STRICT;
CREATE INDEX parts_by_hour ON ledger_parts (first_hour);
CREATE TABLE ledger_expiry (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at REAL NOT NULL,
    due TEXT NOT NULL, -- the day before which counts were past their retention then
    kept_from TEXT NOT NULL -- the day before which counts were deleted; empty = none were
) STRICT;
INSERT INTO ledger_expiry VALUES (1, 0, '', '');

CREATE TABLE accepted_ids ( -- the EventIds that were accepted lately: files of 16 bytes each
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- names the file
    bytes INTEGER NOT NULL, -- so much of it counts
    first_at REAL NOT NULL -- when the first one was saved
) STRICT;

CREATE TABLE log_chain ( -- which write-ahead log belongs to this file: see `wal_belongs`
    one INTEGER PRIMARY KEY CHECK (one = 1),
    token BLOB NOT NULL, -- drawn by the first transaction of each log
    previous BLOB NOT NULL
) STRICT;
INSERT INTO log_chain VALUES (1, x'', x'');
"""


class _Consumer(msgspec.Struct):
    ConsumerID: int | str | None = None


_decode_consumer: Final = msgspec.json.Decoder(_Consumer).decode
_CONSUMER_ID: Final = re.compile(rb'"ConsumerID"\s*+:\s*+"?\s*+(\d{1,40}+)(?![\w.])')


def is_made(db: sqlite3.Connection) -> bool:
    """
    Return whether the database has its tables.

    Raises:
        sqlite3.DatabaseError: As for `check_schema`.
    """
    return check_schema(db, _APPLICATION_ID, SCHEMA_VERSION)


def make_tables(db: sqlite3.Connection) -> None:
    """Make the tables of an empty database."""
    create_schema(db, _SCHEMA, _APPLICATION_ID, SCHEMA_VERSION)


def open_for_reading(directory: Path) -> sqlite3.Connection | None:
    """
    Open the database of a state directory without its lock, also while a shipper writes.

    Returns:
        None if there is no state yet.
    Raises:
        StateError: It is foreign, damaged, or was written by another version.
    """
    path = directory / "state.db"
    with understood(path), ExitStack() as opened:
        db = open_read_only(path)
        if db is None:
            return None
        opened.enter_context(closing(db))
        if not is_made(db):
            return None
        opened.pop_all()  # it stays open
        return db


def wal_bytes(path: Path) -> int:
    """Return the size of the write-ahead log of a database."""
    try:
        return wal_path(path).stat().st_size
    except FileNotFoundError:
        return 0


def wal_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def chain_wal(db: sqlite3.Connection) -> None:
    """Begin a log, within its first transaction: draw its token, and name the log that was merged before."""
    db.execute("UPDATE log_chain SET previous = token, token = randomblob(16)")


def wal_belongs(path: Path) -> bool:
    """
    Return whether a database and its write-ahead log are of one making.

    SQLite applies any log that is whole in itself. But the file by itself, without its log, has to hold all of the log
    before this one: its token is that one's or, once a part of this log was merged, this one's. A file or a log that
    was put back alone has another one.
    """
    if not wal_bytes(path):
        return True
    db = open_read_only(path)
    if db is None:
        return False  # the log of a file that is gone
    with closing(db):
        try:
            chain = db.execute("SELECT token, previous FROM log_chain").fetchone()
        except sqlite3.OperationalError:
            return not _has_table(db)  # it is being made
        try:
            return _token_without_wal(path) in chain
        except sqlite3.DatabaseError:  # a crash came while the log was merged
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")


def _token_without_wal(path: Path) -> bytes:
    db = open_read_only(path, "&immutable=1")
    assert db is not None
    with closing(db):
        row = db.execute("SELECT token FROM log_chain").fetchone() if _has_table(db) else None
        return bytes(row[0]) if row else b""


def _has_table(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'log_chain'").fetchone()[0])


def consumer_id_of(raw: bytes) -> str:
    """
    Read the ConsumerID out of a record, also out of one that is broken elsewhere.

    Returns:
        Decimal digits without leading zeros: the record's own or, where it has none or is no JSON, of the last mention.
        Empty if there is none.
    """
    try:
        own = _decode_consumer(raw).ConsumerID
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        own = None
    if own is not None and re.fullmatch(r"[0-9]{1,40}", str(own)):
        return str(int(own))
    found = _CONSUMER_ID.findall(raw)
    return str(int(found[-1])) if found else ""
