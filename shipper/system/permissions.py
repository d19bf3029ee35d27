"""Explanations of why this process cannot use a file: permissions, ownership, or the wrong file type."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

# Errors caused by missing permission or a read-only file system.
DENIALS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

_FILE_TYPES: Final = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe"}
_VERBS: Final = {os.R_OK: "read", os.W_OK: "written", os.X_OK: "entered", os.R_OK | os.W_OK: "read and written"}


def access_problem(path: Path, access: int = os.R_OK | os.W_OK) -> str:
    """
    Describe why this process cannot use a file or directory; empty if it can.

    If it does not exist, describe why it cannot be created, unless it is only to be read.

    Args:
        access: `os.R_OK`, `os.W_OK`, or both.
    """
    if can_access(path, access | (os.X_OK if os.path.isdir(path) else 0)):
        return ""
    parent: Path | None = None
    for folder in reversed(path.absolute().parents):
        if not os.path.lexists(folder):
            break
        if os.path.exists(folder) and not os.path.isdir(folder):
            return f"{folder} is not a directory"
        if not can_access(folder, os.X_OK):
            return _describe_denial(folder, os.X_OK)
        parent = folder
    if os.path.exists(path):
        return _describe_denial(path, access)
    if parent is None or not access & os.W_OK or can_access(parent, os.W_OK):
        return ""
    return _describe_denial(parent, os.W_OK)


def file_type_problem(path: Path) -> str:
    """Describe a path that exists but is not a regular file; empty otherwise."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    return f"{path} is {_FILE_TYPES.get(stat.S_IFMT(mode), 'not a regular file')}"


def link_problem(path: Path) -> str:
    """Describe a symbolic link that makes a path unusable, as its target does not exist; empty if there is none."""
    for place in (path, *path.absolute().parents):
        try:
            place.stat()
        except OSError as error:
            if os.path.islink(place):
                return f"{place} is a symbolic link to {os.readlink(place)}, which cannot be used ({error.strerror})"
    return ""


def describe_ownership(status: os.stat_result) -> str:
    """Describe the owner and the mode of a file, and the user of this process."""
    return (
        f"it belongs to user {status.st_uid}, group {status.st_gid} (mode {stat.S_IMODE(status.st_mode):04o}), "
        f"and this process runs as user {os.geteuid()}, group {os.getegid()}"
    )


def can_access(path: Path | str, access: int) -> bool:
    """Return whether this process has permissions such as `os.R_OK`; False if the path does not exist."""
    return os.access(path, access, effective_ids=os.access in os.supports_effective_ids)


def _describe_denial(path: Path, access: int) -> str:
    status = os.lstat(path)
    is_read_only = access & os.W_OK and os.statvfs(path).f_flag & os.ST_RDONLY
    reason = "its file system is read-only" if is_read_only else f"permission denied; {describe_ownership(status)}"
    return f"{path} cannot be {_VERBS[access]}: {reason}"
