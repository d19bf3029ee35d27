"""Explains why this process cannot use a file: its owner, its mode, and our user; or that it is no file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

# What a process may not do for want of permission, or because nobody may.
DENIALS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

_KINDS: Final = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe"}
_WORDS: Final = {os.R_OK: "read", os.W_OK: "written", os.X_OK: "entered", os.R_OK | os.W_OK: "read and written"}


def obstacle(path: Path, access: int = os.R_OK | os.W_OK) -> str:
    """
    Return what keeps this process from a file or folder, in words.

    Args:
        access: What is to be done with it: `os.R_OK`, `os.W_OK`, or both.
    Returns:
        Empty if nothing does. Of what is not there, what keeps it from being made.
    """
    if _may(path, access | (os.X_OK if os.path.isdir(path) else 0)):
        return ""
    above: Path | None = None
    for folder in reversed(path.absolute().parents):
        if not os.path.lexists(folder):
            break
        if not _may(folder, os.X_OK):
            return _denied(folder, os.X_OK)
        above = folder
    if os.path.exists(path):
        return _denied(path, access)
    return "" if above is None or _may(above, os.W_OK) else _denied(above, os.W_OK)


def disguise(path: Path) -> str:
    """Return what is in the place of a regular file, in words; empty if it is one, or if there is nothing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    return f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}"


def whose(status: os.stat_result) -> str:
    """Return the owner and the mode of a file, and who asks."""
    return (
        f"it belongs to user {status.st_uid}, group {status.st_gid} (mode {stat.S_IMODE(status.st_mode):04o}), "
        f"and this is user {os.geteuid()}, group {os.getegid()}"
    )


def _may(path: Path, access: int) -> bool:
    return os.access(path, access, effective_ids=os.access in os.supports_effective_ids)


def _denied(path: Path, access: int) -> str:
    status = os.lstat(path)
    is_read_only = access & os.W_OK and os.statvfs(path).f_flag & os.ST_RDONLY
    why = "its file system is read-only" if is_read_only else f"permission denied; {whose(status)}"
    return f"{path} cannot be {_WORDS[access]}: {why}"
