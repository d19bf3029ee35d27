"""Records that an application passes in: written as lines of JSON, and queued until they are in the spool."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import chain
from types import NoneType
from typing import Final
from uuid import UUID

import anyio
import msgspec
from msgspec import structs

from shipper.model.wire import ActivityEvent
from shipper.sources.segments import Segments

Record = Mapping[str, object] | ActivityEvent | bytes | str

_PIECE_BYTES: Final = 1 << 20  # that are written in one go, at least
_BLANKS: Final = b" \t\r\n\0"
_PLAIN: Final = frozenset({str, int, float, bool, NoneType})
_SIMPLE: Final = (str, int, float, datetime, UUID)  # the last two have a text that every reader of JSON knows


class _Handed:
    """Lines, and whoever waits for them to be kept; `error` says why they are not."""

    def __init__(self, lines: bytes) -> None:
        self.lines = lines
        self.is_done = anyio.Event()
        self.error: BaseException | None = None


class Feed:
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
        return f"<Feed {len(self._waiting)} waiting, {len(self._moving)} being written>"

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
            if size >= _PIECE_BYTES:
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


def line_of(record: Record, max_bytes: int) -> bytes:
    """
    Write a record as a line. No message quotes a value of the record.

    Returns:
        With its newline.
    Raises:
        TypeError: It is no record, or has a value that JSON has no form for.
        ValueError: It cannot be written as one line, or is longer than `max_bytes`.
    """
    line = _json(record) if isinstance(record, Mapping | ActivityEvent) else _text(record)
    if len(line) > max_bytes:
        raise ValueError(
            f"the record takes {len(line):,} bytes, more than input.max_record_bytes, which is {max_bytes:,}"
        )
    return line + b"\n"


def _json(record: Mapping[str, object] | ActivityEvent) -> bytes:
    try:
        document = structs.asdict(record) if isinstance(record, ActivityEvent) else dict(record)
        if not _PLAIN.issuperset(chain(map(type, document.values()), map(type, document))):
            _check(document)
        line = msgspec.json.encode(document)
        if b"null" in line:  # which is also what a number that JSON does not have is written as
            json.dumps(msgspec.to_builtins(document, str_keys=True), allow_nan=False)
    except UnicodeEncodeError:
        raise ValueError("a text of the record has half of a surrogate pair, so it is not valid Unicode") from None
    except RecursionError:
        raise ValueError("the record is nested too deeply, or within itself") from None
    except ValueError:
        raise ValueError(
            "a number of the record is not finite (NaN or infinity), which JSON cannot represent"
        ) from None
    return line


def _check(value: object) -> None:
    """
    Raise for a value that JSON has no form for, also where the encoder has one, such as base64 for bytes.

    Raises:
        TypeError: There is one in it.
    """
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"a name in the record is a {type(name).__name__}; the names of JSON are str")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            _check(each)
    elif value is not None and not isinstance(value, _SIMPLE):
        raise TypeError(
            f"a value of the record is a {type(value).__name__}, which JSON cannot represent; expected str, int, "
            "float, bool, None, list, dict, datetime or UUID"
        )


def _text(record: bytes | str) -> bytes:
    if not isinstance(record, bytes | str):
        raise TypeError(
            f"a {type(record).__name__} is not a record; expected a dict, an ActivityEvent, or a line of JSON as bytes "
            "or str"
        )
    try:
        line = record.encode() if isinstance(record, str) else record
    except UnicodeEncodeError:
        raise ValueError("the line has half of a surrogate pair, so it is not valid Unicode") from None
    line = line.removesuffix(b"\n")
    if b"\n" in line:
        raise ValueError(
            "the record contains a newline, so it is more than one line; use send_many for several records"
        )
    if not line.strip(_BLANKS):
        raise ValueError("the line is blank")
    return line


def pieces_of(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines to pieces that are written in one go."""
    piece: list[bytes] = []
    size = 0
    for line in lines:
        piece.append(line)
        size += len(line)
        if size >= _PIECE_BYTES:
            yield b"".join(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece)
