"""The state directory: its permissions, and the lock that restricts it to one process."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Final
from urllib.parse import quote

from shipper.model.errors import ConfigError, StateInUseError, StateUnwritableError, first_of
from shipper.system.files import FULL_DISK, GUARDED
from shipper.system.permissions import (
    DENIALS,
    access_problem,
    describe_ownership,
    file_type_problem,
    link_problem,
)

# Never advise to use another directory: all inputs would be read and sent again.
ACCESS_ADVICE: Final = (
    "It was left unchanged: change its owner or mode (chown, chmod), run shipper as its owner, or make a read-only "
    "file system writable"
)

# For each database: a query that counts its contents, and the files created beside it.
_COUNTS: Final = {"state.db": "SELECT read FROM totals", "reports.db": "SELECT count(*) FROM versions"}
# Written while the database has its tables.
LIVE_FILE: Final = "live.json"
_SIDE_FILES: Final = {
    "state.db": (
        *("lock", LIVE_FILE, f".{LIVE_FILE}", "ledger.key"),
        *("at-work", "traceback", "stuck.json"),
    ),
    "reports.db": ("reports.lock",),
}
_LOCK_ATTEMPTS: Final = 3
_LOCK_RETRY_S: Final = 0.02


@contextmanager
def locked_directory(path: Path) -> Iterator[Path]:
    """
    Create the state directory (0700) if it is missing, and hold its lock.

    The kernel releases the lock (`flock`) when the process ends, so a crash leaves nothing to clean up. The lock file
    contains the holder's process id, for messages only.

    Raises:
        ConfigError: The directory cannot be created or written.
        StateUnwritableError: Its disk is full, read-only or broken.
        StateInUseError: Another process holds the lock.
    """
    with clean_up_on_config_error(path, "state.db"), _locked(path):
        yield path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    make_private(path)
    try:
        if problem := file_type_problem(path / "lock"):
            raise ConfigError(f"{problem}, but shipper needs a regular file there; remove it", key="state.directory")
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        try:
            _lock(lock, path / "lock")
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StateInUseError(
                f"{path} is in use by another shipper (process {holder}); wait until it ends, or stop it"
            ) from None
        except OSError as error:  # such as a network file system that is mounted without locks
            raise ConfigError(_explain_lock(path, error), key="state.directory") from error
        with suppress(OSError):  # on a full disk, messages lack the process id
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def make_private(path: Path) -> None:
    """Create a state directory (0700), or close an existing one to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise _unusable(path, error) from error


def _lock(lock: int, path: Path) -> None:
    """Acquire the lock; retry, as `lock_holder` takes it for a moment."""
    for attempts_left in reversed(range(_LOCK_ATTEMPTS)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not attempts_left:
                raise
            Event().wait(_LOCK_RETRY_S)
    if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
        raise BlockingIOError  # the holder has removed the directory, see `clean_up_on_config_error`


def lock_problem(path: Path) -> str:
    """Return why a start cannot lock a state directory; empty if it can. Leaves no file behind."""
    from tempfile import TemporaryFile  # imported lazily, so that other commands start faster

    folder = next(folder for folder in (path, *path.absolute().parents) if os.path.isdir(folder))
    with suppress(OSError), TemporaryFile(dir=folder) as file:  # the lock file may not exist yet
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return _explain_lock(path, error)
    return ""


def _explain_lock(path: Path, error: OSError) -> str:
    return (
        f"cannot lock {path / 'lock'} ({error.strerror}); name a directory on a file system with locks (flock), "
        "such as a local disk"
    )


def has_state(directory: Path) -> bool:
    """Return whether a state directory exists; raise ConfigError if this process may not know."""
    try:
        return directory.exists()
    except OSError as error:
        message = f"{access_problem(directory) or error}. {ACCESS_ADVICE}"
        raise ConfigError(message, key="state.directory") from error


def _unusable(path: Path, error: OSError) -> ConfigError | StateUnwritableError:
    """Return an error that says why a state directory or its lock cannot be used; a disk needs no other settings."""
    if error.errno in {*FULL_DISK, errno.EIO} or (error.errno == errno.EROFS and os.path.lexists(path)):
        return StateUnwritableError(
            f"{path} cannot be written ({error.strerror}); nothing is lost: make room on its disk, or make it writable "
            "again, and run the command again"
        )
    return ConfigError(_why_unusable(path, error), key="state.directory")


def _why_unusable(path: Path, error: OSError) -> str:
    if error.errno in DENIALS and os.path.lexists(path):
        reason = access_problem(path) or access_problem(path / "lock")
        reason = reason or f"{path} cannot be closed to others: {describe_ownership(path.stat())}"
        return f"{reason}. {ACCESS_ADVICE}"
    if error.errno in DENIALS and (reason := access_problem(path)):
        return f"cannot create {path}: {reason}; name another directory"
    if reason := link_problem(path):
        return f"{reason}; create its target, or name another directory"
    cause = f"{path / 'lock'} is a symbolic link" if error.errno == errno.ELOOP else error.strerror
    return f"cannot use {path} ({cause}); name another directory"


def lock_holder(path: Path) -> int | None:
    """Return the id of the process that holds the lock of a state directory, 0 if unknown; None if it is free."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | GUARDED)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(lock, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0
    except OSError:  # the file system has no locks
        return None
    finally:
        os.close(lock)
    return None


@contextmanager
def clean_up_on_config_error(path: Path, database: str) -> Iterator[None]:
    """
    Remove the files created in a state directory, and the directory, if a ConfigError is raised before any data is
    saved. `database` is the one that may be created inside; the other one is not touched.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    before = set() if missing else set(os.listdir(path)) if os.access(path, os.R_OK | os.X_OK) else None
    try:
        yield
    except BaseException as error:
        if before is not None and isinstance(first_of(error), ConfigError):
            with suppress(OSError, sqlite3.Error):
                _remove_created(path, database, before, missing)
        raise


def _remove_created(path: Path, database: str, before: set[str], missing: list[Path]) -> None:
    if database in before:
        return
    if (path / database).exists():
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute() / database))}?mode=ro", uri=True)) as db:
            if db.execute(_COUNTS[database]).fetchone()[0]:
                return
    if database == "state.db" and "spool" not in before and (path / "spool").exists():
        (path / "spool").rmdir()  # fails if it is not empty
    files = [database, f"{database}-wal", f"{database}-shm", *_SIDE_FILES[database]]
    for name in set(files) - before:
        (path / name).unlink(missing_ok=True)
    for folder in missing:
        folder.rmdir()
