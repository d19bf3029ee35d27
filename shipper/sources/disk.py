"""Reserves disk space before reading, so that nothing is read that cannot be stored."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, Final

from shipper.model.errors import ConfigError
from shipper.system.files import FULL_DISK

if TYPE_CHECKING:
    from collections.abc import Callable

_STATE_BYTES: Final = 16 << 20  # at most a quarter of the disk
_STATE_BYTES_MIN: Final = 4 << 20  # at most half of the disk
_DISK_BYTES_MIN: Final = 5 << 20
_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE: do not change the file size


class NoSpaceError(Exception):
    """The disk has no space for the next bytes, which were not read."""


def state_reserve_bytes(directory: Path) -> int:
    """Return the disk space reserved for the state, without which the spool could not shrink."""
    size = disk_usage(directory).total
    return min(_STATE_BYTES, max(size // 4, min(_STATE_BYTES_MIN, size // 2)))


def check_disk(directory: Path) -> None:
    """Raise `ConfigError` if a disk is too small for the state and a spool beside it."""
    size = disk_usage(directory).total
    if 0 < size < _DISK_BYTES_MIN:  # some file systems report 0
        raise ConfigError(
            f"the disk of {directory} is too small to spool standard input: it has {size:,} bytes in total, and "
            f"{_DISK_BYTES_MIN:,} is the minimum; use a directory on a larger disk",
            key="state.directory",
        )


def is_full(directory: Path) -> bool:
    """Return whether a disk has only the space reserved for the state left."""
    disk = disk_usage(directory)
    return disk.total > 0 and disk.free < state_reserve_bytes(directory)


def reserve(descriptor: int, start: int, length: int) -> None:
    """
    Reserve space for a range of a file without changing its size.

    If the file system or the platform does not support that, only check that there is space.

    Raises:
        NoSpaceError: There is not enough space.
        OSError: Another disk error.
    """
    fallocate = _fallocate()
    error = fallocate(descriptor, _KEEP_SIZE, start, length) if fallocate else errno.ENOSYS
    if error in FULL_DISK:
        raise NoSpaceError(os.strerror(error))
    if error in {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}:
        if disk_usage(descriptor).free < length:
            raise NoSpaceError(os.strerror(errno.ENOSPC))
    elif error:
        raise OSError(error, os.strerror(error))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's `fallocate`, changed to return the error number; None if it does not exist."""
    import ctypes  # few commands need it

    library: Any = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def fallocate(descriptor: int, mode: int, start: int, length: int) -> int:
        while function(descriptor, mode, start, length):
            if ctypes.get_errno() != errno.EINTR:
                return ctypes.get_errno()
        return 0

    return fallocate
