"""The database of the report history: how its file is made and opened, beside other processes that do the same."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from shipper.model.errors import ConfigError, StateError
from shipper.state.directory import why_unusable
from shipper.state.schema import check_files, denial


class _Source(msgspec.Struct):
    id: int


class _Brand(msgspec.Struct):
    marketing_sources: list[_Source] = msgspec.field(name="marketingSources", default_factory=list)


class _Named(msgspec.Struct):
    brands: list[_Brand] = msgspec.field(default_factory=list)


FILE_NAME: Final = "reports.db"
HOOKS_LOCK: Final = "reports.lock"
SCHEMA_VERSION: Final = 3

_APPLICATION_ID: Final = 0x53485250  # "SHRP"; tells our database from a foreign one
_HOOKS: Final = """
CREATE TABLE hooks ( -- of `report watch --on-change`: the versions of a period that it has been run for
    account INTEGER NOT NULL,
    first_day TEXT NOT NULL,
    last_day TEXT NOT NULL,
    up_to INTEGER NOT NULL, -- the number of a version, it and those before it; 0 = none
    PRIMARY KEY (account, first_day, last_day)
) STRICT, WITHOUT ROWID;
"""
_VERSIONS: Final = """
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
"""
_SOURCES: Final = """
CREATE TABLE sources ( -- the marketing sources that any version of an account's reports names
    account INTEGER NOT NULL,
    media INTEGER NOT NULL,
    PRIMARY KEY (account, media)
) STRICT, WITHOUT ROWID;
"""
_ADD_SOURCE: Final = "INSERT OR IGNORE INTO sources (account, media) VALUES (?, ?)"
# By the version that is there; 0 = the database is empty.
_STEPS: Final = {0: _VERSIONS + _HOOKS + _SOURCES, 1: _HOOKS + _SOURCES, 2: _SOURCES}
_BUSY_LIMIT_S: Final = 30.0
_DECODER: Final = msgspec.json.Decoder(_Named)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """
    Translate what goes wrong when the history is opened or read.

    Raises:
        StateError: Says that the file was left as it is, and what to do.
    """
    try:
        yield
    except (OSError, sqlite3.Error, zlib.error) as error:
        if why := denial(path, error):
            raise StateError(why) from error
        raise StateError(
            f"{path} cannot be used ({error}). It was left as it is. To start over, move it away: "
            "the versions in it are then not shown, and those of reports fetched from now on are kept anew"
        ) from error


def open_database(directory: Path) -> sqlite3.Connection:
    """
    Open the history of a state directory; make both if need be, the directory 0700 and the file 0600.

    Raises:
        ConfigError: The directory cannot be made.
        StateError: The file is foreign, damaged, or was written by a newer version. It is left as it is.
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
    Keep other processes from opening the history for a moment: two that make it at once would get in their way.

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
    check_files(path)
    if not path.exists():
        # SQLite gives its side files the permissions of the database, so this covers them too.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    # First without writing: a foreign database is left as it is, with its log; opened for writing, it would be emptied.
    with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as db:
        version = _version(db)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_LIMIT_S)
    try:
        if step := _STEPS.get(version):
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN IMMEDIATE; {step} PRAGMA application_id = {_APPLICATION_ID};")
            for account, body in db.execute("SELECT account, body FROM versions"):
                note_sources(db, account, zlib.decompress(body))
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def note_sources(db: sqlite3.Connection, account: int, body: bytes) -> None:
    """Note the marketing sources that a report names, within a transaction."""
    report = _DECODER.decode(body)
    media = {(account, source.id) for brand in report.brands for source in brand.marketing_sources}
    db.executemany(_ADD_SOURCE, media)


def _version(db: sqlite3.Connection) -> int:
    """
    Read the version of the tables; 0 if the database is empty.

    Raises:
        sqlite3.DatabaseError: It is a foreign database, or one of a newer version.
    """
    tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if (tables or application_id) and application_id != _APPLICATION_ID:
        raise sqlite3.DatabaseError("it was not written by shipper")
    if version > SCHEMA_VERSION:
        raise sqlite3.DatabaseError(
            f"it was written by a newer shipper: schema {version}, this one knows {SCHEMA_VERSION}"
        )
    return version if tables else 0
