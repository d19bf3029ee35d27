"""The tables of the state database, and how those of an earlier version are brought up to date."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from shipper.model.errors import StateError, StateUnwritableError
from shipper.state.directory import ACCESS_ADVICE
from shipper.system.permissions import DENIALS, disguise, obstacle
from shipper.system.work import Piece, at_work, waiting

SCHEMA_VERSION: Final = 11
LETTER_OVERHEAD_BYTES: Final = 512
# What a dead letter counts against the quota.
LETTER_BYTES: Final = f"length(raw) + length(header) + {LETTER_OVERHEAD_BYTES}"

_DENIED: Final = {sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}
_APPLICATION_ID: Final = 0x53484950  # "SHIP"; tells our database from a foreign one
_DEAD_LETTERS: Final = """
CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- so that the number of a letter that is gone never names another one
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
    last_at REAL NOT NULL
) STRICT;
"""
_COUNTS: Final = """
CREATE TABLE letter_counts ( -- of dead_letters, as counting a million of them takes a third of a second
    rule TEXT PRIMARY KEY,
    kept INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO letter_counts SELECT rule, count(*) FROM dead_letters GROUP BY rule;
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
"""
_INPUTS: Final = """
CREATE TABLE unreachable (
    stream_id INTEGER PRIMARY KEY,
    path TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    noticed_at REAL NOT NULL
) STRICT;
CREATE TABLE started_patterns ( -- of input.include: input.start holds for what is there when one is used first
    pattern TEXT PRIMARY KEY
) STRICT;
"""
_LEDGER: Final = """
CREATE TABLE ledger (
    hour TEXT NOT NULL, -- of the Timestamp, YYYY-MM-DDThh, UTC
    brand_id INTEGER NOT NULL,
    affiliate_id TEXT NOT NULL,
    media TEXT NOT NULL, -- the digits of the BTag
    accepted INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    PRIMARY KEY (hour, brand_id, affiliate_id, media)
) STRICT, WITHOUT ROWID;
"""
_ONCE: Final = """
CREATE TABLE log_chain ( -- which write-ahead log belongs to this file: see `log_belongs`
    one INTEGER PRIMARY KEY CHECK (one = 1),
    token BLOB NOT NULL, -- drawn by the first transaction of each log
    previous BLOB NOT NULL
) STRICT;
INSERT INTO log_chain VALUES (1, x'', x'');
CREATE TABLE expiry ( -- what a look at the dead letters found past its retention, and when
    one INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at REAL NOT NULL,
    up_to_id INTEGER NOT NULL
) STRICT;
"""
_LEDGER_PARTS: Final = """
CREATE TABLE ledger_parts ( -- counts that were appended, to be added to those of ledger
    id INTEGER PRIMARY KEY,
    first_hour TEXT NOT NULL, -- the least and the greatest one in it
    last_hour TEXT NOT NULL,
    data BLOB NOT NULL -- zlib of msgpack: the columns of ledger, each as an array
) STRICT;
"""
_FOLLOWED: Final = """
ALTER TABLE streams ADD COLUMN is_gone INTEGER NOT NULL DEFAULT 0; -- it was looked for, and is nowhere any more
ALTER TABLE started_patterns ADD COLUMN started_at REAL NOT NULL DEFAULT 0;
UPDATE started_patterns SET started_at = strftime('%s', 'now');
"""
_SCHEMA: Final = f"""
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
    settled_until REAL -- everything that was in it at this moment is settled; NULL = not known
) STRICT;
CREATE INDEX streams_by_inode ON streams (device, inode);
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
{_DEAD_LETTERS}
{_COUNTS}
{_INPUTS}
{_LEDGER}
{_ONCE}
{_LEDGER_PARTS}
{_FOLLOWED}
"""
_FROM_1: Final = f"""
ALTER TABLE totals ADD COLUMN purged INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN dead_letter_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE dead_letters RENAME TO old_dead_letters;
{_DEAD_LETTERS}
INSERT INTO dead_letters SELECT id, stream_id, path, start_offset, end_offset, rule, message, 0, delivery, event_id,
    consumer_id_of(raw), x'', raw, attempts, first_at, last_at FROM old_dead_letters;
DROP TABLE old_dead_letters;
UPDATE totals SET dead_letter_bytes = (SELECT coalesce(sum({LETTER_BYTES}), 0) FROM dead_letters);
"""
_FROM_2: Final = f"""
ALTER TABLE totals ADD COLUMN unreachable_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE streams ADD COLUMN compression TEXT NOT NULL DEFAULT '';
ALTER TABLE streams ADD COLUMN size INTEGER NOT NULL DEFAULT 0;
ALTER TABLE streams ADD COLUMN ended_size INTEGER NOT NULL DEFAULT -1;
ALTER TABLE streams ADD COLUMN ended_ns INTEGER NOT NULL DEFAULT -1;
ALTER TABLE streams ADD COLUMN is_rotated INTEGER NOT NULL DEFAULT 0;
{_INPUTS}
"""
_FROM_4: Final = f"""
ALTER TABLE streams ADD COLUMN settled_until REAL;
{_COUNTS}
{_ONCE}
{_LEDGER_PARTS}
{_FOLLOWED}
"""
_CUT_LETTERS: Final = """
ALTER TABLE dead_letters ADD COLUMN whole_bytes INTEGER NOT NULL DEFAULT 0; -- of a record that was cut; 0 = it was not
CREATE INDEX letters_without_record ON dead_letters (stream_id) WHERE length(raw) = 0;
"""
_LEDGER_EXPIRY: Final = """
CREATE TABLE ledger_expiry (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    looked_at REAL NOT NULL,
    due TEXT NOT NULL, -- the day before which counts were past their retention then
    kept_from TEXT NOT NULL -- the day before which counts were deleted; empty = none were
) STRICT;
INSERT INTO ledger_expiry VALUES (1, 0, '', '');
CREATE INDEX parts_by_hour ON ledger_parts (first_hour);
"""
_ACCEPTED_IDS: Final = """
CREATE TABLE accepted_ids ( -- the EventIds that were accepted lately: files of 16 bytes each
    number INTEGER PRIMARY KEY AUTOINCREMENT, -- names the file
    bytes INTEGER NOT NULL, -- so much of it counts
    first_at REAL NOT NULL -- when the first one was saved
) STRICT;
"""
_FROM_8: Final = _CUT_LETTERS + _LEDGER_EXPIRY + _ACCEPTED_IDS
_STEPS: Final = {
    0: _SCHEMA + _FROM_8,
    1: _FROM_1 + _FROM_2 + _LEDGER + _FROM_4 + _FROM_8,
    2: _FROM_2 + _LEDGER + _FROM_4 + _FROM_8,
    3: _LEDGER + _FROM_4 + _FROM_8,
    4: _FROM_4 + _FROM_8,
    5: _ONCE + _LEDGER_PARTS + _FOLLOWED + _FROM_8,
    6: _LEDGER_PARTS + _FOLLOWED + _FROM_8,
    7: _FOLLOWED + _FROM_8,
    8: _FROM_8,
    9: _LEDGER_EXPIRY + _ACCEPTED_IDS,
    10: _ACCEPTED_IDS,
}  # by the version that is there
_NAMES_ARE_KEPT_FROM: Final = 10  # in the ledger of an earlier one, AffiliateIDs stand as they came


class _Consumer(msgspec.Struct):
    ConsumerID: int | str | None = None


_decode_consumer: Final = msgspec.json.Decoder(_Consumer).decode
_CONSUMER_ID: Final = re.compile(rb'"ConsumerID"\s*+:\s*+"?\s*+(\d{1,40}+)(?![\w.])')


@contextmanager
def all_or_nothing(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """
    Do what is within in one transaction, or nothing of it.

    Args:
        path: Of the database; to wait until others are done with it is no work.
    """
    with waiting():
        db.execute("BEGIN IMMEDIATE")
    try:
        with at_work(Piece("save", str(path))):
            yield
            db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """
    Translate what goes wrong when the database is opened or read.

    Raises:
        StateUnwritableError: There is no room for now.
        StateError: Says that the file was left as it is, and what to do.
    """
    try:
        yield
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:  # the last where a damaged name is to be quoted
        if _is_full(error):
            raise StateUnwritableError(
                f"{path} cannot be written ({error}); nothing is lost: make room on its disk and run the command again"
            ) from error
        if why := denial(path, error):
            raise StateError(why) from error
        raise StateError(
            f"{path} cannot be used ({error}). It was left as it is. To start over, move it away: "
            "every input is then read from its beginning and sent again with the same EventIds"
        ) from error


def _is_full(error: Exception) -> bool:
    """Return whether a disk was full; a mapped file that cannot grow reports that as an input/output error."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    code = getattr(error, "sqlite_errorcode", 0)
    return code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_WRITE}


def _files_of(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{suffix}") for suffix in ("", "-wal", "-shm", "-journal")]


def check_files(path: Path) -> None:
    """
    Raise if a file of a database is something else, before SQLite opens it: it would follow a link, or wait at a pipe.

    Raises:
        StateError: It is. It is left as it is.
    """
    for what in filter(None, map(disguise, _files_of(path))):
        raise StateError(
            f"{what}, where shipper keeps a regular file. It was left as it is, and not opened: "
            "put the file back if it was moved, or else remove what is there"
        )


def denial(path: Path, error: Exception) -> str:
    """Return what keeps this process from a database, if that is permissions: these say nothing against its content."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what extends it
    if code not in _DENIED and not (isinstance(error, OSError) and error.errno in DENIALS):
        return ""
    there = [path.parent, *(each for each in _files_of(path) if os.path.lexists(each))]
    why = next(filter(None, map(obstacle, there)), "")
    if not why and code == sqlite3.SQLITE_CANTOPEN:
        return ""  # it is no file, for instance
    return f"{why or f'{path} cannot be used ({error})'}. {ACCESS_ADVICE}"


def is_current(db: sqlite3.Connection) -> bool:
    """
    Tell whether the tables are those of this version; False if they are to be made or brought up to date.

    Raises:
        sqlite3.DatabaseError: It is a foreign database, or one of a newer version.
    """
    has_tables = _has_tables(db)
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if has_tables and application_id != _APPLICATION_ID:
        raise sqlite3.DatabaseError("it was not written by shipper")
    if version < 0:
        raise sqlite3.DatabaseError(f"its schema is {version}, which there never was")
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(
            f"it was written by a newer shipper: schema {version}, this one knows {SCHEMA_VERSION}"
        )
    return has_tables and version == SCHEMA_VERSION


def open_for_reading(directory: Path) -> sqlite3.Connection | None:
    """
    Open the database of a state directory without its lock, also while a shipper writes.

    Returns:
        None if there is no state, or if its tables are to be made or brought up to date first.
    Raises:
        StateError: It is foreign, damaged, or was written by a newer version.
    """
    path = directory / "state.db"
    with understood(path), ExitStack() as opened:
        db = _open_read_only(path)
        if db is None:
            return None
        opened.enter_context(closing(db))
        if not is_current(db):
            return None
        opened.pop_all()  # it stays open
        return db


def is_outdated(directory: Path) -> bool:
    """
    Tell whether the tables of a state directory are to be brought up to date; False if there are none yet.

    Raises:
        StateError: As for `open_for_reading`.
    """
    path = directory / "state.db"
    with understood(path):
        db = _open_read_only(path)
        if db is None:
            return False
        with closing(db):
            # In this order: all tables of a new state come in one transaction.
            return _has_tables(db) and not is_current(db)


def _open_read_only(path: Path, options: str = "") -> sqlite3.Connection | None:
    check_files(path)
    try:
        path.stat()
    except FileNotFoundError:
        return None
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro{options}", uri=True, check_same_thread=False)


def log_bytes(path: Path) -> int:
    """Return the size of the write-ahead log of a database."""
    try:
        return log_path(path).stat().st_size
    except FileNotFoundError:
        return 0


def log_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def chain_log(db: sqlite3.Connection) -> None:
    """Begin a log, within its first transaction: draw its token, and name the log that was merged before."""
    db.execute("UPDATE log_chain SET previous = token, token = randomblob(16)")


def log_belongs(path: Path) -> bool:
    """
    Return whether a database and its write-ahead log are of one making.

    SQLite applies any log that is whole in itself. But the file by itself, without its log, has to hold all of the log
    before this one: its token is that one's or, once a part of this log was merged, this one's. A file or a log that
    was put back alone has another one.
    """
    if not log_bytes(path):
        return True
    db = _open_read_only(path)
    if db is None:
        return False  # the log of a file that is gone
    with closing(db):
        try:
            chain = db.execute("SELECT token, previous FROM log_chain").fetchone()
        except sqlite3.OperationalError:
            return not _has_table(db)  # of an earlier version, or being made
        try:
            return _token_without_log(path) in chain
        except sqlite3.DatabaseError:  # a crash came while the log was merged
            return bool(db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")


def _token_without_log(path: Path) -> bytes:
    db = _open_read_only(path, "&immutable=1")
    assert db is not None
    with closing(db):
        row = db.execute("SELECT token FROM log_chain").fetchone() if _has_table(db) else None
        return bytes(row[0]) if row else b""


def _has_table(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'log_chain'").fetchone()[0])


def _has_tables(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])


def bring_up_to_date(db: sqlite3.Connection, rename: Callable[[sqlite3.Connection], int]) -> bool:
    """
    Make the tables, or bring those of an earlier version up to date, in one transaction.

    Args:
        rename: Names the affiliates in the ledger as they are counted now; returns how many counts it has changed.
    Returns:
        Whether something was written over that may not stay on the disk.
    """
    version = db.execute("PRAGMA user_version").fetchone()[0]
    db.create_function("consumer_id_of", 1, consumer_id_of, deterministic=True)
    try:
        db.executescript(f"BEGIN IMMEDIATE; {_STEPS[version]}")
        is_overwritten = version < _NAMES_ARE_KEPT_FROM and rename(db) > 0
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
        return is_overwritten
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


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
