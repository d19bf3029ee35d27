"""Reserve disk space before reading, so that nothing is read that cannot be stored."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shipper.model.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

FULL_DISK: Final = {errno.ENOSPC, errno.EDQUOT}

_STATE_BYTES: Final = 16 << 20  # of the disk, at most a quarter of it
_STATE_BYTES_LEAST: Final = 4 << 20  # but at most half of it
_DISK_BYTES_LEAST: Final = 5 << 20
_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE: the file does not seem longer


class NoRoomError(Exception):
    """The disk has no room for what was to be read; nothing was read."""


def left_for_state(directory: Path) -> int:
    """Return how many bytes of a disk are reserved for the state, which needs a little room to let the spool shrink."""
    disk = os.statvfs(directory)
    size = disk.f_blocks * disk.f_frsize
    return min(_STATE_BYTES, max(size // 4, min(_STATE_BYTES_LEAST, size // 2)))


def check_disk(directory: Path) -> None:
    """
    Check that a disk can hold the state and a spool beside it at all.

    Raises:
        ConfigError: It is too small.
    """
    disk = os.statvfs(directory)
    size = disk.f_blocks * disk.f_frsize
    if 0 < size < _DISK_BYTES_LEAST:  # some file systems do not tell
        raise ConfigError(
            f"the disk of {directory} is too small to keep standard input: it has {size:,} bytes in all, and "
            f"{_DISK_BYTES_LEAST:,} is the least; name a directory on a larger one",
            key="state.directory",
        )


def is_full(directory: Path) -> bool:
    """Return whether a disk has but what is left to the state."""
    disk = os.statvfs(directory)
    return disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < left_for_state(directory)


def reserve(descriptor: int, start: int, length: int) -> None:
    """
    Keep room for some bytes of a file, whose size stays what it is.

    Where the file system or the platform cannot do that, there is only a look whether there is room.

    Raises:
        NoRoomError: There is none.
        OSError: Another fault of the disk.
    """
    fallocate = _fallocate()
    error = fallocate(descriptor, _KEEP_SIZE, start, length) if fallocate else errno.ENOSYS
    if error in FULL_DISK:
        raise NoRoomError(os.strerror(error))
    if error in {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}:
        disk = os.fstatvfs(descriptor)
        if disk.f_bavail * disk.f_frsize < length:
            raise NoRoomError(os.strerror(errno.ENOSPC))
    elif error:
        raise OSError(error, os.strerror(error))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return the function of the C library, which gives an error number; None if there is none."""
    import ctypes  # by few commands

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
