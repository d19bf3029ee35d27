"""Standard input: a pipe, a terminal, a socket or a file, moved into the segments of the spool."""

from __future__ import annotations

import os
import select
import stat
from contextlib import suppress
from typing import Final

import anyio
import structlog

from shipper.model.errors import StateError
from shipper.sources.incoming import Incoming
from shipper.sources.segments import Segments

log = structlog.get_logger("sources")

_MOVED_BYTES: Final = 1 << 20
_PIPE_BYTES: Final = 1 << 20


class StandardInput:
    """
    Reads a descriptor for the spool, of which it is an `Input`.

    Args:
        incoming: Brings what is read into a form that can be kept.
    """

    def __init__(self, descriptor: int, incoming: Incoming) -> None:
        self._descriptor = descriptor
        self._incoming = incoming
        self._can_wait = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        self.has_ended = False
        self.is_broken = False
        if self._can_wait:
            _widen_pipe(descriptor)

    async def wait(self) -> None:
        if self._can_wait:
            try:
                await anyio.wait_readable(self._descriptor)
            except PermissionError:  # a device that cannot be waited for, such as /dev/null
                self._can_wait = False

    def move(self, segments: Segments) -> None:
        """
        Move what there is to read, but at most `_MOVED_BYTES`, so that a thread never hangs in a read.

        Raises:
            NoRoomError: The disk has none for the next bytes, which were not read.
        """
        readable = select.poll()
        if self._can_wait:
            readable.register(self._descriptor, select.POLLIN)
        moved = 0
        while moved < _MOVED_BYTES and (not self._can_wait or readable.poll(0)):
            length = segments.read_bytes()
            segments.reserve(length + self._incoming.held_bytes)
            data = self._read(length)
            self._keep(data, segments)
            if not data:  # the end of the input has ended its last record
                self.has_ended = True
                return
            moved += len(data)

    def _keep(self, data: bytes, segments: Segments) -> None:
        """Append what was read; nothing ends the last record."""
        kept = self._incoming.take(data, is_final=not data)
        segments.header, segments.delimiter = self._incoming.header, self._incoming.delimiter
        segments.append(kept, open_bytes=self._incoming.open_bytes)

    def _read(self, length: int) -> bytes:
        try:
            return os.read(self._descriptor, length)
        except OSError as error:
            log.error("source_unreadable", path="standard input", error=error.strerror)
            self.is_broken = True
            return b""

    def note_kept(self) -> None:
        pass

    def leave(self, segments: Segments) -> None:
        """Keep what is held of a torn record, too: what was read is nowhere else."""
        try:
            self._keep(b"", segments)
        except OSError as error:
            if not segments.unwritten or segments.is_doubtful:
                raise
            # A disk that has broken, or a file system without a way to keep room.
            raise StateError(
                f"the last {len(segments.unwritten):,} bytes that were read from standard input are lost: the spool "
                f"cannot be written ({error.strerror}). What came before them is in it"
            ) from error

    def note_left(self) -> None:
        pass


def _widen_pipe(descriptor: int) -> None:
    """Ask for a larger pipe: fewer turns between the producer and us. Refused or no pipe: no matter."""
    import fcntl

    with suppress(OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
