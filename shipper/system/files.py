"""Atomic replacement of files, names that outlast a crash, and detection of changes."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

_NO_DIRECTORY_SYNC: Final = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # file systems that do not need it


def stat_signature(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return values that change when a file changes, following symbolic links; None if it cannot be accessed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_dev, status.st_ino, status.st_size


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically; only its owner can read it."""
    with replacing_file(path) as file:
        file.write(data)


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to replace `path` atomically on exit; only its owner can read it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def sync_directory(directory: Path) -> None:
    """Sync the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)
