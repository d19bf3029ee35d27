"""Lines that are handed over within this process; whoever hands some over waits until they stand in the spool."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import anyio

from shipper.sources.segments import Segments

_MOVED_BYTES: Final = 1 << 20


class _Handed:
    """Lines, and whoever waits for them to be kept; `error` says why they are not."""

    def __init__(self, lines: bytes) -> None:
        self.lines = lines
        self.is_done = anyio.Event()
        self.error: BaseException | None = None


class Fed:
    """
    An `Input` of the spool: what several tasks hand over at a time is appended in one go, in the order of their calls.

    Attributes:
        is_awaited: Set once the spool has begun to wait for lines, or never will.
        is_left: Set once the spool has come to its end: all that it holds was read, or it was stopped before.
    """

    is_broken: Final = False

    def __init__(self) -> None:
        self._waiting: dict[_Handed, None] = {}  # a queue that one can leave
        self._moving: list[_Handed] = []
        self._data = b""
        self._arrived = anyio.Event()
        self._why_closed: BaseException | None = None
        self.is_awaited = anyio.Event()
        self.is_left = anyio.Event()
        self.has_ended = False
        self._are_kept = False

    def __repr__(self) -> str:
        return f"<Fed {len(self._waiting)} waiting, {len(self._moving)} being written>"

    async def append(self, lines: bytes) -> None:
        """
        Hand over lines, and wait until they stand in the spool.

        If it is cancelled, or raises, all of them may have been kept, or some, or none; but never a part of a line.

        Args:
            lines: Whole ones, each with its newline.
        Raises:
            BaseException: What `close` or `end` was given.
        """
        if self._why_closed is not None:
            raise self._why_closed
        handed = _Handed(lines)
        self._waiting[handed] = None
        self._arrived.set()
        try:
            await handed.is_done.wait()
        finally:
            self._waiting.pop(handed, None)
        if handed.error is not None:
            raise handed.error

    def close(self, why: BaseException) -> None:
        """Take nothing more; what was handed over is still written."""
        self._why_closed = self._why_closed or why
        self._arrived.set()

    def end(self, why: BaseException) -> None:
        """The spool writes nothing more: tell it to everybody who waits."""
        self._why_closed = why
        for handed in (*self._moving, *self._waiting):
            handed.error = why
            handed.is_done.set()
        self.is_awaited.set()
        self.is_left.set()

    # For the spool ----------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        self.is_awaited.set()
        while not self._waiting and self._why_closed is None:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        self._moving, size = [], 0
        for handed in self._waiting:
            self._moving.append(handed)
            size += len(handed.lines)
            if size >= _MOVED_BYTES:
                break
        for handed in self._moving:
            del self._waiting[handed]
        self._data = b"".join(handed.lines for handed in self._moving)
        self.has_ended = not self._moving

    def move(self, segments: Segments) -> None:
        data, self._data = self._data, b""
        segments.append(data)

    def note_kept(self) -> None:
        for handed in self._moving:
            handed.is_done.set()
        self._moving = []

    def leave(self, segments: Segments) -> None:
        """Keep what can be kept, but no torn line: whoever waits for it is told that it was not."""
        with suppress(OSError):
            self.move(segments)
        if segments.unwritten:
            segments.drop_torn_line()
        else:
            segments.close()
            self._are_kept = True

    def note_left(self) -> None:
        if self._are_kept:
            self.note_kept()
        self.is_left.set()
