"""Common to all SQLite databases of shipper: opening, schema check, transactions, errors."""

from __future__ import annotations

import errno
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from shipper.model.errors import StateError, StateUnwritableError
from shipper.state.directory import ACCESS_ADVICE
from shipper.system.permissions import DENIALS, disguise, obstacle
from shipper.system.work import Piece, at_work, waiting

_DENIED: Final = {sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}
_IF_MOVED: Final = "every input is then read from its beginning and sent again with the same EventIds"


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
def understood(path: Path, *, if_moved: str = _IF_MOVED) -> Iterator[None]:
    """
    Translate the errors of opening and reading a database.

    Args:
        if_moved: What follows if the user moves it away.
    Raises:
        StateUnwritableError: There is no room for now.
        StateError: Says that the file was left as it is, and what to do.
    """
    try:
        yield
    # UnicodeDecodeError: where a damaged name is to be quoted.
    except (OSError, sqlite3.Error, zlib.error, UnicodeDecodeError) as error:
        if _is_full(error):
            raise StateUnwritableError(
                f"{path} cannot be written ({error}); nothing is lost: make room on its disk and run the command again"
            ) from error
        if why := _denial(path, error):
            raise StateError(why) from error
        raise StateError(
            f"{path} cannot be used ({error}). It was left as it is. To start over, move it away: {if_moved}"
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


def _denial(path: Path, error: Exception) -> str:
    """Return what keeps this process from a database, if that is permissions: these say nothing against its content."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what extends it
    if code not in _DENIED and not (isinstance(error, OSError) and error.errno in DENIALS):
        return ""
    there = [path.parent, *(each for each in _files_of(path) if os.path.lexists(each))]
    why = next(filter(None, map(obstacle, there)), "")
    if not why and code == sqlite3.SQLITE_CANTOPEN:
        return ""  # it is no file, for instance
    return f"{why or f'{path} cannot be used ({error})'}. {ACCESS_ADVICE}"


def open_read_only(path: Path, options: str = "") -> sqlite3.Connection | None:
    """Open a database without changing it; None if there is none."""
    check_files(path)
    try:
        path.stat()
    except FileNotFoundError:
        return None
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro{options}", uri=True, check_same_thread=False)


def check_schema(db: sqlite3.Connection, application_id: int, version: int) -> bool:
    """
    Return whether a database has its tables; False if it is empty.

    Raises:
        sqlite3.DatabaseError: It is foreign, or its tables are those of another version of shipper.
    """
    # In this order: all tables of a new database, its id and its version come in one transaction.
    has_tables = bool(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
    found_id = db.execute("PRAGMA application_id").fetchone()[0]
    if found_id != application_id and (has_tables or found_id):
        raise sqlite3.DatabaseError("it was not written by shipper")
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if has_tables and found != version:
        raise sqlite3.DatabaseError(
            f"its schema has number {found}, and this version of shipper needs number {version}: "
            "use the version that wrote it"
        )
    return has_tables


def create_schema(db: sqlite3.Connection, tables: str, application_id: int, version: int) -> None:
    """Make the tables of an empty database, in one transaction."""
    try:
        db.executescript(
            f"BEGIN IMMEDIATE; {tables}; PRAGMA application_id = {application_id}; "
            f"PRAGMA user_version = {version}; COMMIT"
        )
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
