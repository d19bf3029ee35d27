"""
The control socket of a state directory, and what is said over it: one request, then answers, a line of JSON each.

It belongs to the process that holds the directory's lock. Its mode is 0600, so nobody but its owner and root connects.
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
_NAME: Final = "control"
_PATH_BYTES: Final = 100  # a little less than what fits into a socket's address, also on other systems than Linux
_BACKLOG: Final = 16


class Request(Struct, kw_only=True):
    """
    What a client wants.

    Attributes:
        version: Of the client's program, for messages.
        content: What the command needs besides, as JSON.
    """

    protocol: int = PROTOCOL
    version: str = __version__
    command: str
    content: msgspec.Raw = msgspec.Raw(b"null")


class Answer(Struct, kw_only=True, omit_defaults=True):
    """
    What came of it so far.

    Attributes:
        message: For a person; empty = none.
        code: With the last answer, the exit code of the client's command.
        content: What the command is asked for, as JSON.
    """

    message: str = ""
    code: int | None = None
    content: msgspec.Raw = msgspec.Raw(b"null")


@contextmanager
def listening(directory: Path) -> Iterator[socket.socket]:
    """
    Listen in a state directory whose lock the caller holds; takes the place of a socket that a kill has left.

    Raises:
        OSError: That is not possible here; `str` says why.
    """
    path = directory / _NAME
    with socket.socket(socket.AF_UNIX) as listener:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise OSError(f"{path} is no socket; remove it")
            path.unlink()
        with _short(path) as address:
            listener.bind(address)
        try:
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            yield listener
        finally:
            with suppress(OSError):
                path.unlink()


def connected(directory: Path) -> socket.socket:
    """
    Connect to the process that holds a state directory.

    Raises:
        FileNotFoundError, ConnectionRefusedError: Nobody listens.
        OSError: It cannot be reached.
    """
    client = socket.socket(socket.AF_UNIX)
    try:
        with _short(directory / _NAME) as address:
            client.connect(address)
    except BaseException:
        client.close()
        raise
    return client


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Give a socket's path so that it fits into its address, which takes some 100 bytes."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
