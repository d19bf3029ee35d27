"""
The control socket of a state directory: one request and its answers, one line of JSON each.

The process that holds the directory's lock owns the socket. Its mode is 0600: only the owner and root can connect.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from shipper.model.version import __version__

PROTOCOL: Final = 1
REQUEST_BYTES: Final = 1 << 18
SOCKET: Final = "control"
_PATH_BYTES: Final = 100  # fits into a socket address on Linux and elsewhere
_BACKLOG: Final = 16


class Request(Struct, kw_only=True):
    """A client's request: its program's version, for messages, and a command with its arguments as JSON."""

    protocol: int = PROTOCOL
    version: str = __version__
    command: str
    content: msgspec.Raw = msgspec.Raw(b"null")


class Answer(Struct, kw_only=True, omit_defaults=True):
    """An answer; one request may have several."""

    message: str = ""  # for humans; empty = none
    code: int | None = None  # exit code of the client's command, in the last answer only
    content: msgspec.Raw = msgspec.Raw(b"null")


@contextmanager
def listening(directory: Path) -> Iterator[socket.socket]:
    """Listen in a locked state directory, replacing a dead process's socket; raise `OSError` with the reason."""
    path = directory / SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise OSError(f"{path} is not a socket; remove it")
            path.unlink()
        with _short_path(path) as address:
            listener.bind(address)
        try:
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            yield listener
        finally:
            with suppress(OSError):
                path.unlink()


def connect(directory: Path) -> socket.socket:
    """
    Connect to the process that holds a state directory.

    Raises:
        FileNotFoundError, ConnectionRefusedError: No process is listening.
        OSError: The socket cannot be reached.
    """
    client = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(directory / SOCKET) as address:
            client.connect(address)
    except BaseException:
        client.close()
        raise
    return client


@contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yield a path that fits into a socket address, which holds about 100 bytes."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
