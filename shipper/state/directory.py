"""The state directory: its permissions, and the lock that lets one process use it."""

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

from shipper.model.errors import ConfigError, StateInUseError, first_of
from shipper.system.permissions import DENIALS, disguise, obstacle, whose

# Never to use another directory: all inputs would be read from their beginnings and sent again.
ACCESS_ADVICE: Final = "It was left as it is: hand it over (chown, chmod), or run shipper as its owner"

# By database, how much was kept in it.
_COUNTS: Final = {"state.db": "SELECT read FROM totals", "reports.db": "SELECT count(*) FROM versions"}
_BESIDE: Final = {
    "state.db": (
        *("lock", "live.json", ".live.json", "ledger.key", ".ledger.key"),
        *("at-work", "traceback", "stuck.json"),
    ),
    "reports.db": ("reports.lock",),
}
_TRIES: Final = 3
_PAUSE_S: Final = 0.02


@contextmanager
def locked_directory(path: Path) -> Iterator[Path]:
    """
    Make the state directory (0700) if need be, and hold its lock.

    The lock is the kernel's (`flock`): it ends with the process, so a crash leaves nothing to clean up. The file's
    text, the holder's process id, is for the message only.

    Raises:
        ConfigError: The directory cannot be made or written.
        StateInUseError: Another process holds it.
    """
    with creating_nothing(path, "state.db"), _locked(path):
        yield path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
        if what := disguise(path / "lock"):
            raise ConfigError(f"{what}, where shipper keeps a regular file; remove it", key="state.directory")
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(why_unusable(path, error), key="state.directory") from error
    try:
        try:
            _lock(lock, path / "lock")
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StateInUseError(
                f"{path} is in use by another shipper (process {holder}); wait for its end, or stop it"
            ) from None
        with suppress(OSError):  # on a full disk, it will be missing in a message
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, path: Path) -> None:
    """Take the lock, unless somebody keeps it: `holder_of` has it for a moment."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        Event().wait(_PAUSE_S)
    else:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not path.exists() or not os.path.samestat(os.fstat(lock), path.stat()):
        raise BlockingIOError  # whoever held it has removed the directory that it had made, see `creating_nothing`


def why_unusable(path: Path, error: OSError) -> str:
    """Return what keeps this process from a state directory or its lock, and what to do about it."""
    if error.errno in DENIALS and os.path.lexists(path):
        why = obstacle(path) or obstacle(path / "lock") or f"{path} cannot be closed to others: {whose(path.stat())}"
        return f"{why}. {ACCESS_ADVICE}"
    if error.errno in DENIALS and (why := obstacle(path)):
        return f"cannot make {path}: {why}; name another directory"
    reason = f"{path / 'lock'} is a symbolic link" if error.errno == errno.ELOOP else error.strerror
    return f"cannot use {path} ({reason}); name another directory"


# What was made for nothing --------------------------------------------------------------------------------------------


@contextmanager
def creating_nothing(path: Path, database: str) -> Iterator[None]:
    """
    Remove what is made in a state directory, and it, if a setting turns out to be wrong before anything is kept.

    Args:
        database: The name of the one that may be made within; another one is somebody else's.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    before = set() if missing else set(os.listdir(path)) if os.access(path, os.R_OK | os.X_OK) else None
    try:
        yield
    except BaseException as error:
        if before is not None and isinstance(first_of(error), ConfigError):
            with suppress(OSError, sqlite3.Error):  # then it stays
                _remove_made(path, database, before, missing)
        raise


def _remove_made(path: Path, database: str, before: set[str], missing: list[Path]) -> None:
    if database in before:
        return
    if (path / database).exists():
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute() / database))}?mode=ro", uri=True)) as db:
            if db.execute(_COUNTS[database]).fetchone()[0]:
                return
    if database == "state.db" and "spool" not in before and (path / "spool").exists():
        (path / "spool").rmdir()  # fails if something is in it
    files = [database, f"{database}-wal", f"{database}-shm", *_BESIDE[database]]
    for name in set(files) - before:
        (path / name).unlink(missing_ok=True)
    for folder in missing:
        folder.rmdir()


def holder_of(path: Path) -> int | None:
    """Return the process that holds the lock of a state directory; None if nobody does."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.pread(lock, 32, 0).decode(errors="replace").strip()
        return int(written) if written.isdecimal() else 0
    finally:
        os.close(lock)
    return None
