"""Atomic replacement of files, and detection of changes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
