"""Creates and opens the database of the report history, also while other processes do the same."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from shipper.model.errors import ConfigError
from shipper.state import sqlite
from shipper.state.directory import why_unusable


class _Source(msgspec.Struct):
    id: int


class _Brand(msgspec.Struct):
    marketing_sources: list[_Source] = msgspec.field(name="marketingSources", default_factory=list)


class _Named(msgspec.Struct):
    brands: list[_Brand] = msgspec.field(default_factory=list)


FILE_NAME: Final = "reports.db"
HOOKS_LOCK: Final = "reports.lock"
SCHEMA_VERSION: Final = 1

_APPLICATION_ID: Final = 0x53485250  # "SHRP"; tells our database from a foreign one
_SCHEMA: Final = """
CREATE TABLE versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    account INTEGER NOT NULL,
    first_day TEXT NOT NULL,
    last_day TEXT NOT NULL,
    check_sum TEXT NOT NULL,
    first_fetched_at REAL NOT NULL,
    last_fetched_at REAL NOT NULL,
    fetches INTEGER NOT NULL,
    content_hash TEXT NOT NULL,
    body BLOB NOT NULL -- the first answer that had this content, by zlib
) STRICT;
CREATE INDEX versions_of_period ON versions (account, first_day, last_day, last_fetched_at);
CREATE TABLE hooks ( -- of `report watch --on-change`: the versions of a period that it has been run for
    account INTEGER NOT NULL,
    first_day TEXT NOT NULL,
    last_day TEXT NOT NULL,
    up_to INTEGER NOT NULL, -- the number of a version, it and those before it; 0 = none
    PRIMARY KEY (account, first_day, last_day)
) STRICT, WITHOUT ROWID;
CREATE TABLE sources ( -- the marketing sources that any version of an account's reports names
    account INTEGER NOT NULL,
    media INTEGER NOT NULL,
    PRIMARY KEY (account, media)
) STRICT, WITHOUT ROWID;
"""
_ADD_SOURCE: Final = "INSERT OR IGNORE INTO sources (account, media) VALUES (?, ?)"
_BUSY_LIMIT_S: Final = 30.0
_DECODER: Final = msgspec.json.Decoder(_Named)


def understood(path: Path) -> AbstractContextManager[None]:
    """Translate the errors of opening and reading the history, as `sqlite.understood`."""
    return sqlite.understood(
        path,
        if_moved="the versions in it are then not shown, and those of reports fetched from now on are kept anew",
    )


def open_database(directory: Path) -> sqlite3.Connection:
    """
    Open the history of a state directory; make both if need be, the directory 0700 and the file 0600.

    Raises:
        ConfigError: The directory cannot be made.
        StateError: The file is foreign, damaged, or was written by another version. It is left as it is.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise ConfigError(why_unusable(directory, error), key="state.directory") from error
    path = directory / FILE_NAME
    with understood(path), _alone(directory):
        return _opened(path)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """
    Keep other processes from opening the history meanwhile; two must not create it at once.

    The lock is on the directory itself, so it is not that of the records. SQLite's own lock is on the database, where
    closing any second descriptor would let go of it.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _opened(path: Path) -> sqlite3.Connection:
    sqlite.check_files(path)
    if not path.exists():
        # SQLite gives its side files the permissions of the database, so this covers them too.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    # First without writing: a foreign database is left as it is, with its log; opened for writing, it would be emptied.
    reading = sqlite.open_read_only(path)
    assert reading is not None, "it was made above"
    with closing(reading) as db:
        is_made = sqlite.check_schema(db, _APPLICATION_ID, SCHEMA_VERSION)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_LIMIT_S)
    try:
        if not is_made:
            db.execute("PRAGMA journal_mode = WAL")
            sqlite.create_schema(db, _SCHEMA, _APPLICATION_ID, SCHEMA_VERSION)
    except BaseException:
        db.close()
        raise
    return db


def note_sources(db: sqlite3.Connection, account: int, body: bytes) -> None:
    """Note the marketing sources that a report names, within a transaction."""
    report = _DECODER.decode(body)
    media = {(account, source.id) for brand in report.brands for source in brand.marketing_sources}
    db.executemany(_ADD_SOURCE, media)
