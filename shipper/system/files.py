"""Atomic replacement of files, small JSON files, names that outlast a crash, and detection of changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

T = TypeVar("T")

FULL_DISK: Final = {errno.ENOSPC, errno.EDQUOT}
GUARDED: Final = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # do not wait for a pipe, do not follow a link
_JSON_BYTES_MAX: Final = 1 << 20
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
    import tempfile  # every command loads this module, and few replace files

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


def read_json(path: Path, kind: type[T]) -> T | None:
    """Read a small JSON file; None if it is missing, a symbolic link, too long, or of another type."""
    try:
        with open(os.open(path, os.O_RDONLY | GUARDED), "rb") as file:
            return msgspec.json.decode(file.read(_JSON_BYTES_MAX), type=kind)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def replace_json(path: Path, value: object) -> None:
    """
    Replace a small JSON file with mode 0600 atomically, as its only writer, but not durably.

    On a full disk, overwrite it in place, which needs no space; a reader might see a mixture at that moment.
    """
    content = msgspec.json.encode(value)
    temporary = path.with_name(f".{path.name}")
    try:
        _write(temporary, content, os.O_CREAT | os.O_TRUNC)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        with suppress(OSError):
            temporary.unlink()
        if len(content) > path.stat().st_blocks * 512:
            raise
        _write(path, content, 0)
    else:
        temporary.replace(path)


def _write(path: Path, content: bytes, flags: int) -> None:
    with open(os.open(path, os.O_WRONLY | flags | GUARDED, 0o600), "wb") as file:
        file.write(content)
        file.truncate()


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
