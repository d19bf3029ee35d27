"""Shared code for SQLite databases: opening, schema checks, transactions, errors."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from shipper.model.errors import ConfigError, StateError, StateUnwritableError
from shipper.state.directory import ACCESS_ADVICE
from shipper.system.files import FULL_DISK
from shipper.system.permissions import DENIALS, access_problem, file_type_problem
from shipper.system.work import WorkItem, at_work, waiting

_DENIED: Final = {sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}
# Errors of the machine, not of the file.
_INTACT: Final = {
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PROTOCOL),
}
_INTACT_ADVICE: Final = (
    "It was left unchanged and may be intact, so keep it: check its disk, the free inodes of its file system (df -i) "
    "and the limit of open files, and run the command again"
)
IF_MOVED: Final = (
    "every input that still exists is then read from its beginning and sent again with the same EventIds; dead letters "
    "and counts stay in what was moved"
)


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Run a write transaction; roll back on any exception."""
    with waiting():  # for other writers
        db.execute("BEGIN IMMEDIATE")
    try:
        with at_work(WorkItem("save", str(path))):
            yield
            db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@contextmanager
def translate_errors(path: Path, *, if_moved: str = IF_MOVED) -> Iterator[None]:
    """
    Translate errors of opening and reading a database.

    Args:
        if_moved: Consequence of moving the file away, for the message.
    Raises:
        ConfigError: A folder in its path is a file.
        StateUnwritableError: The disk is full.
        StateError: The file cannot be used; it was left unchanged.
    """
    try:
        yield
    # UnicodeDecodeError: SQLite cannot quote a damaged name in its message.
    except (OSError, sqlite3.Error, zlib.error, UnicodeDecodeError) as error:
        if _is_full(error):
            raise StateUnwritableError(
                f"{path} cannot be written ({error}); nothing is lost: make room on its disk and run the command again"
            ) from error
        if isinstance(error, NotADirectoryError):
            raise ConfigError(f"{access_problem(path)}; name another directory", key="state.directory") from error
        if message := _explain_denial(path, error):
            raise StateError(message) from error
        raise StateError(f"{path} cannot be used ({error}). {advice_for(error, if_moved)}") from error


def fetch(db: sqlite3.Connection, path: Path, query: str, values: Sequence[object] = ()) -> list[Any]:
    """Return the rows of a query; errors as for `translate_errors`."""
    with translate_errors(path):
        return db.execute(query, values).fetchall()


def _is_full(error: Exception) -> bool:
    """Return whether the disk is full; a mapped file that cannot grow reports an I/O error."""
    if isinstance(error, OSError):
        return error.errno in FULL_DISK
    code = getattr(error, "sqlite_errorcode", 0)
    return code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_WRITE}


def advice_for(error: Exception, if_moved: str = IF_MOVED) -> str:
    """Return what to do about a file that cannot be used: only a damaged or foreign one should be moved away."""
    if isinstance(error, OSError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _INTACT:
        return _INTACT_ADVICE
    return f"It was left unchanged. To start over, move it away: {if_moved}"


def _explain_denial(path: Path, error: Exception) -> str:
    """Explain an error caused by permissions; empty for other errors."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary result code
    if code not in _DENIED and not (isinstance(error, OSError) and error.errno in DENIALS):
        return ""
    named = Path(getattr(error, "filename", None) or path)  # may be beside the database
    existing = [path.parent, named.parent, *filter(os.path.lexists, [*_files_of(path), named])]
    reason = next(filter(None, map(access_problem, existing)), "")
    if not reason and code == sqlite3.SQLITE_CANTOPEN:
        return ""  # it is not a regular file, for instance
    return f"{reason or f'{path} cannot be used ({error})'}. {ACCESS_ADVICE}"


def _files_of(path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}{suffix}") for suffix in ("", "-wal", "-shm", "-journal")]


def check_files(path: Path) -> None:
    """Raise StateError unless a database's files are regular files; SQLite would follow symbolic links."""
    for problem in filter(None, map(file_type_problem, _files_of(path))):
        raise StateError(
            f"{problem}, but shipper needs a regular file there. It was left unchanged and not opened: "
            "if the file was moved, put it back; otherwise remove this one"
        )


def open_read_only(path: Path, options: str = "") -> sqlite3.Connection | None:
    """Open a database read-only; None if it does not exist."""
    check_files(path)
    try:
        path.stat()
    except FileNotFoundError:
        return None
    if not options and not any(map(os.path.lexists, _files_of(path)[1:])) and os.statvfs(path).f_flag & os.ST_RDONLY:
        options = "&immutable=1"  # otherwise SQLite would create its side files
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro{options}", uri=True, check_same_thread=False)


def check_schema(db: sqlite3.Connection, application_id: int, version: int) -> bool:
    """Return whether a database has its tables; raise `DatabaseError` if it is foreign or of another version."""
    # Read the tables first: a new database gets its tables, id and version in one transaction.
    has_tables = bool(db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])
    actual_id = db.execute("PRAGMA application_id").fetchone()[0]
    if actual_id != application_id and (has_tables or actual_id):
        raise sqlite3.DatabaseError("it was not written by shipper")
    actual_version = db.execute("PRAGMA user_version").fetchone()[0]
    if has_tables and actual_version != version:
        raise sqlite3.DatabaseError(
            f"it has schema version {actual_version}, and this version of shipper needs schema version {version}: "
            "use the version that wrote it"
        )
    return has_tables


def create_schema(db: sqlite3.Connection, tables: str, application_id: int, version: int) -> None:
    """Create the tables of an empty database in one transaction."""
    try:
        db.executescript(
            f"BEGIN IMMEDIATE; {tables}; PRAGMA application_id = {application_id}; "
            f"PRAGMA user_version = {version}; COMMIT"
        )
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
