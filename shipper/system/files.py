"""Files that are replaced as a whole, and how to notice it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def identity_of(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return what changes when a file changes; symbolic links are followed. None = it cannot be accessed."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_dev, status.st_ino, status.st_size


def replace_file(path: Path, data: bytes) -> None:
    """Write a file as `replacing_file` does."""
    with replacing_file(path) as file:
        file.write(data)


@contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """
    Open a file for writing that only its owner can read; a reader sees what was there before, or all of it.

    Raises:
        OSError: It cannot be written.
    """
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
