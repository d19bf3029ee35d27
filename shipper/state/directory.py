"""The state directory: its permissions, and the lock that lets one process use it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Final

from shipper.errors import ConfigError, StateInUseError

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
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = f"{path / 'lock'} is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"cannot use {path} ({reason}); name another directory", key="state.directory") from error
    try:
        try:
            _lock(lock)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StateInUseError(
                f"{path} is in use by another shipper (process {holder}); wait for it to end, "
                "or give this one a state.directory of its own"
            ) from None
        with suppress(OSError):  # on a full disk, it will be missing in a message
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield path
    finally:
        os.close(lock)


def _lock(lock: int) -> None:
    """Take the lock, unless somebody keeps it: `holder_of` has it for a moment."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            Event().wait(_PAUSE_S)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder_of(path: Path) -> int | None:
    """Tell the process that holds the lock of a state directory; None if nobody does."""
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
