"""Encodes an application's records as lines of JSON, and queues them until they are in the spool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from types import NoneType
from typing import Final
from uuid import UUID

import anyio
import msgspec
from msgspec import structs

from shipper.model.framing import BLANKS
from shipper.model.wire import ActivityEvent
from shipper.sources.segments import Segments
from shipper.sources.stdin import Input

Record = Mapping[str, object] | ActivityEvent | bytes | str

_PIECE_BYTES: Final = 1 << 20  # minimum size of one write, if there are enough lines
_PLAIN: Final = frozenset({str, int, float, bool, NoneType})
_AS_BASE: Final[dict[type, Callable[..., object]]] = {  # for subclasses, even if they override the usual methods
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    datetime: datetime.isoformat,
}
_SIMPLE: Final = (*_AS_BASE, UUID)  # the last two become strings


class _PendingAppend:
    """Lines whose task waits until they are stored; `error` is set if that failed."""

    def __init__(self, lines: bytes) -> None:
        self.lines = lines
        self.is_done = anyio.Event()
        self.error: BaseException | None = None


class Feed(Input):
    """
    The input from an application: lines of concurrent tasks are written together, in the order of calls.

    Attributes:
        is_ready: Set once the spool waits for lines, or has failed.
    """

    def __init__(self) -> None:
        self._waiting: dict[_PendingAppend, None] = {}  # a queue that a task can leave
        self._moving: list[_PendingAppend] = []
        self._data = b""
        self._arrived = anyio.Event()
        self._closed_with: BaseException | None = None
        self._is_stored = False
        self.is_ready = anyio.Event()
        self.is_finished = anyio.Event()

    async def append(self, lines: bytes) -> None:
        """
        Queue lines, and wait until they are in the spool.

        If this is cancelled or raises, all, some or none of the lines are stored, but never a part of one.

        Args:
            lines: Complete lines, each with its newline.
        Raises:
            BaseException: The error passed to `close` or `end`.
        """
        if self._closed_with is not None:
            raise self._closed_with
        pending = _PendingAppend(lines)
        self._waiting[pending] = None
        self._arrived.set()
        try:
            await pending.is_done.wait()
        finally:
            self._waiting.pop(pending, None)
        if pending.error is not None:
            raise pending.error

    def close(self, error: BaseException) -> None:
        """Accept no more lines; queued ones are still written."""
        self._closed_with = self._closed_with or error
        self._arrived.set()

    def end(self, error: BaseException) -> None:
        """Raise an error in all waiting tasks: the spool no longer writes."""
        self._closed_with = error
        for pending in (*self._moving, *self._waiting):
            pending.error = error
            pending.is_done.set()
        self.is_ready.set()
        self.is_finished.set()

    # For the spool ----------------------------------------------------------------------------------------------------

    async def wait(self) -> None:
        self.is_ready.set()
        while not self._waiting and self._closed_with is None:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        self._moving, size = [], 0
        for pending in self._waiting:
            self._moving.append(pending)
            size += len(pending.lines)
            if size >= _PIECE_BYTES:
                break
        for pending in self._moving:
            del self._waiting[pending]
        self._data = b"".join(pending.lines for pending in self._moving)
        self.has_ended = not self._moving

    def move(self, segments: Segments) -> None:
        data, self._data = self._data, b""
        segments.append(data)

    def note_stored(self) -> None:
        for pending in self._moving:
            pending.is_done.set()
        self._moving = []

    def finish(self, segments: Segments) -> None:
        """Store all complete lines that fit; the task that waits for a torn line gets an error."""
        with suppress(OSError):
            self.move(segments)
        if segments.unwritten:
            segments.drop_torn_line()
        else:
            segments.close()
            self._is_stored = True

    def note_finished(self) -> None:
        if self._is_stored:
            self.note_stored()
        self.is_finished.set()


def encode_line(record: Record, max_bytes: int) -> bytes:
    """
    Encode a record as a line with its newline. Error messages contain no values of the record.

    Raises:
        TypeError: It is not a record, or contains a value that JSON cannot represent.
        ValueError: It cannot be encoded as one line, or is longer than `max_bytes`.
    """
    line = _encode_object(record) if isinstance(record, Mapping | ActivityEvent) else _encode_text(record)
    if len(line) > max_bytes:
        raise ValueError(
            f"the record takes {len(line):,} bytes, more than input.max_record_bytes, which is {max_bytes:,}"
        )
    return line + b"\n"


def _encode_object(record: Mapping[str, object] | ActivityEvent) -> bytes:
    try:
        document = structs.asdict(record) if isinstance(record, ActivityEvent) else dict(record)
        if not (_PLAIN.issuperset(map(type, document.values())) and {str}.issuperset(map(type, document))):
            _check_types(document)
        line = msgspec.json.encode(document, enc_hook=_base_value)
        if b"null" in line:  # NaN and infinity are encoded as null, too
            json.dumps(msgspec.to_builtins(document, str_keys=True, enc_hook=_base_value), allow_nan=False)
    except UnicodeEncodeError:
        raise ValueError(
            "a string of the record contains half of a surrogate pair, so it is not valid Unicode"
        ) from None
    except RecursionError:
        raise ValueError("the record is nested too deeply, or contains itself") from None
    except ValueError:
        raise ValueError("a number in the record is not finite, which JSON cannot represent") from None
    return line


def _check_types(value: object) -> None:
    """Raise `TypeError` for a value that JSON cannot represent, even if msgspec can encode it, such as bytes."""
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"a key of the record is a {type(name).__name__}; keys of JSON objects are str")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_types(item)
    elif value is not None and not isinstance(value, _SIMPLE):
        raise TypeError(
            f"a value in the record is a {type(value).__name__}, which JSON cannot represent; expected str, int, "
            "float, bool, None, list, dict, datetime or UUID"
        )


def _base_value(value: object) -> object:
    """Return the value of a subclass, such as `pandas.Timestamp` or `markupsafe.Markup`, as one of its base class."""
    return next(as_base(value) for base, as_base in _AS_BASE.items() if isinstance(value, base))


def _encode_text(record: bytes | str) -> bytes:
    if not isinstance(record, bytes | str):
        raise TypeError(
            f"a {type(record).__name__} is not a record; expected a dict, an ActivityEvent, or a line of JSON as bytes "
            "or str"
        )
    try:
        line = record.encode() if isinstance(record, str) else record
    except UnicodeEncodeError:
        raise ValueError("the line contains half of a surrogate pair, so it is not valid Unicode") from None
    line = line.removesuffix(b"\n")
    if b"\n" in line:
        raise ValueError("the record contains a newline; use send_many for several records")
    if not line.strip(BLANKS):
        raise ValueError("the line is blank")
    return line


def join_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines into pieces of about 1 MiB."""
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
