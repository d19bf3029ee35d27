"""
One partition, from the assignment to this process until it is taken away, as a stream of lines.

The messages stand one behind the other on an axis of virtual bytes, each as one line. An index tells which message
stands where; it keeps what a dead letter needs and the line does not have, until the message is settled. The thread
that polls appends to the index, the event loop drops what is settled, and the thread that saves reads it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import itemgetter
from secrets import token_hex
from struct import pack
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from msgspec import Struct, field

from shipper.model.records import Chunk, LedgerKey, Stream

CHUNK_BYTES: Final = 1 << 20
# Not 0: three bytes at the start of a stream may be a byte-order mark, which is no part of a record.
START_OFFSET: Final = 1
_NO_RECORD: Final = b"-"  # stands for a value that would be no line at all; it is no JSON, so it becomes a dead letter
_FIRST: Final = itemgetter(0)
_SECOND: Final = itemgetter(1)
_BRACE: Final = ord("{")
_FRAME_BYTES: Final = 5  # of a schema registry: a zero, and the number of a schema

if TYPE_CHECKING:
    from confluent_kafka import Message

T = TypeVar("T")

Headers = Sequence[tuple[str, bytes | None]]
Place = tuple[str, int]
"""A topic and the number of a partition."""


class Origin(NamedTuple):
    """
    A message as it came.

    Attributes:
        value: None = it had none; `...` stands for the line in the chunk.
        timestamp_ms: Milliseconds since the epoch; negative = it has none.
    """

    offset: int
    value: bytes | None
    is_line: bool
    key: bytes | None
    headers: Headers
    timestamp_ms: int


class _Block(Struct, eq=False):
    """
    The messages of one chunk.

    Attributes:
        start, end: On the axis.
        lengths: Of each line and those before it, together, without the newlines.
        offsets, timestamps: Of each message; milliseconds.
        keys, headers: Of those that have some.
        values: Of those that do not stand in the chunk as they came.
    """

    start: int
    end: int
    lengths: array[int]
    offsets: Sequence[int]
    timestamps: array[int]
    keys: dict[int, bytes]
    headers: dict[int, Headers]
    values: dict[int, bytes | None]

    def end_of(self, index: int) -> int:
        """Return where the line of a message ends on the axis."""
        return self.start + self.lengths[index] + index + 1


class Session(Struct):
    """
    What was counted of a partition by one owner, as it is in the ledger topic.

    Attributes:
        name: Unique.
        totals: `read`, `accepted`, `dead_lettered`, `duplicates` and `unreachable`.
        sums: Accepted and duplicates, by key of the ledger.
        parts: How many documents there are with counts of keys that hardly recur.
    """

    name: str = field(default_factory=partial(token_hex, 6))
    totals: dict[str, int] = {}
    sums: dict[LedgerKey, tuple[int, int]] = {}
    parts: int = 0


class KafkaStream(Stream, kw_only=True):
    """
    A partition while this process has it.

    Attributes:
        topic_id: Tells a topic from another one that had its name before.
        first: The offset at which it began; the next one to read if nothing was read.
        end: The end of the partition at the last look; None = not known yet.
        until: The first offset that is not to be read; None = there is no such.
        eof: The offset at which the last read message was known to be the last one; -1 = not known.
        stopped: Why nothing is read of it, for a person; empty if it is read.
        unreachable: Records that were gone before they were read, and are not in the ledger yet.
        blocks: Of messages that are not settled.
    """

    topic: str
    partition: int
    topic_id: str
    first: int
    session: Session
    end: int | None = None
    until: int | None = None
    eof: int = -1
    stopped: str = ""
    unreachable: int = 0
    settled: int | None = None
    max_record_bytes: int = 1 << 26
    skips_tombstones: bool = False
    tombstones_skipped: int = 0
    blocks: deque[_Block]

    @property
    def place_in_group(self) -> Place:
        return self.topic, self.partition

    @property
    def next_offset(self) -> int:
        """The offset behind what is settled."""
        return self.first if self.settled is None else self.settled

    @property
    def is_complete(self) -> bool:
        """Whether all that is to be read of it has been read."""
        return self.until is not None and max(self.first, self.eof) >= self.until

    @property
    def is_halted(self) -> bool:
        """Whether nothing is to be read of it for now."""
        return bool(self.stopped) or self.is_complete

    @property
    def lag_records(self) -> int:
        """Offsets that are not settled; what an aborted transaction left at the end is none."""
        if not self.blocks and self.eof >= (self.end or 0):
            return 0
        return max(0, (self.end or 0) - self.next_offset)

    @property
    def oldest_ms(self) -> int | None:
        """The timestamp of the oldest message that was read and is not settled; None if there is none."""
        blocks = tuple(self.blocks)
        return blocks[0].timestamps[0] if blocks else None

    def chunks(self, messages: Sequence[Message]) -> list[Chunk]:
        """Take messages, in the order of their offsets; cut into chunks of at most 1 MiB, or of one message."""
        is_last = self.until is not None and (messages[-1].offset() or 0) >= self.until - 1
        if is_last:
            messages = [message for message in messages if (message.offset() or 0) < (self.until or 0)]
        chunks = self._chunks(messages) if messages else []
        if is_last:  # not before the messages are in the index: it would be the position behind those that were
            self.eof = self.until or 0
        return chunks

    def _chunks(self, messages: Sequence[Message]) -> list[Chunk]:
        kind = type(messages[0])  # to call its methods from a map costs less than from a loop
        values = [*map(kind.value, messages)]
        if self.skips_tombstones and None in values:
            kept = [message for message, value in zip(messages, values, strict=True) if value is not None]
            self.tombstones_skipped += len(values) - len(kept)
            return self._chunks(kept) if kept else []
        data, lengths, odd = _lines(values, self.max_record_bytes)
        if len(data) > CHUNK_BYTES and len(values) > 1:
            half = len(messages) // 2
            return self._chunks(messages[:half]) + self._chunks(messages[half:])
        first, last = messages[0].offset() or 0, messages[-1].offset() or 0
        offsets: Sequence[int] = range(first, last + 1)
        if len(offsets) != len(messages):
            offsets = _packed([message.offset() or 0 for message in messages])
        start = self.read_offset
        block = _Block(
            start=start,
            end=start + len(data),
            lengths=_packed(accumulate(lengths)),
            offsets=offsets,
            timestamps=_packed(map(_SECOND, map(kind.timestamp, messages))),
            keys=_given([*map(kind.key, messages)]),
            headers=_given([*map(kind.headers, messages)]),  # type: ignore[list-item]
            values=odd,
        )
        self.read_offset = block.end
        self.blocks.append(block)
        return [Chunk(stream=self, start_offset=start, end_offset=block.end, data=data)]

    def origin(self, start_offset: int) -> Origin:
        """Return the message whose line begins at, or covers, a virtual offset."""
        block = self._block(start_offset)
        index = bisect_right(range(len(block.offsets)), start_offset, key=block.end_of)
        return Origin(
            offset=block.offsets[index],
            value=block.values.get(index),
            is_line=index not in block.values,
            key=block.keys.get(index),
            headers=block.headers.get(index, ()),
            timestamp_ms=block.timestamps[index],
        )

    def position_at(self, end_offset: int) -> int:
        """Return the offset at which to go on behind a virtual offset, which is the end of a line."""
        block = self._block(end_offset - 1)
        index = bisect_left(range(len(block.offsets)), end_offset, key=block.end_of)
        position = block.offsets[index] + 1
        return max(position, self.eof) if end_offset == self.read_offset else position

    def _block(self, offset: int) -> _Block:
        blocks = tuple(self.blocks)  # at one stroke: other threads append and drop
        return blocks[bisect_right(blocks, offset, key=lambda block: block.start) - 1]

    def note_saved(self, end_offset: int) -> None:
        """Drop what is settled and saved up to a virtual offset."""
        self.settled = self.position_at(end_offset)
        self.settled_until = self.settled_until_at(self.settled)
        while self.blocks and self.blocks[0].end <= end_offset:
            self.blocks.popleft()

    def note_eof(self, offset: int) -> None:
        """Take note that all before an offset was read."""
        self.eof = offset if self.until is None else min(offset, self.until)

    def note_ends(self, end: int, at: float) -> None:
        """Take note of where the partition ended at a moment."""
        if self.until is not None:
            self.end = self.until
            return
        self.end = end
        if self.settled_until is not None and at < self.settled_until:
            self.settled_until = None  # the clock was put back
        if self.next_offset >= end or (not self.blocks and self.eof >= end):
            self.settled_until = at
        elif self.mark[1] is None or self.next_offset >= self.mark[0]:
            self.mark = end, at

    def settled_until_at(self, position: int) -> float | None:
        """Return up to when everything is settled if all before a position is."""
        end, at = self.mark
        return at if at is not None and position >= end else self.settled_until


def new_stream(**fields: object) -> KafkaStream:
    """Make the stream of a partition that was assigned."""
    return KafkaStream(kind="kafka", read_offset=START_OFFSET, blocks=deque(), **fields)  # type: ignore[arg-type]


def _packed(numbers: Iterable[int]) -> array[int]:
    whole = [*numbers]
    return array("q", pack(f"{len(whole)}q", *whole))  # a fifth of what the array itself takes for it


def _given(values: Sequence[T | None]) -> dict[int, T]:
    if values.count(None) == len(values):
        return {}
    return {index: value for index, value in enumerate(values) if value is not None}


def _lines(
    values: Sequence[bytes | None], max_record_bytes: int
) -> tuple[bytes, Sequence[int], dict[int, bytes | None]]:
    """Return the lines of values, the length of each without its newline, and the values that are not their line."""
    with suppress(TypeError, IndexError):  # one is None, or empty
        lengths = [*map(len, values)]  # type: ignore[arg-type]
        # Nearly always each value is a line, and begins as an object does. A search is faster than to count newlines.
        is_plain = set(map(_FIRST, values)) == {_BRACE} and b"\n" not in b"".join(values)  # type: ignore[arg-type]
        if is_plain and max(lengths) <= max_record_bytes:
            return b"\n".join([*values, b""]), lengths, {}  # type: ignore[list-item]
    lines = [*map(_line, values)]
    pairs = enumerate(zip(lines, values, strict=True))
    odd = {at: value for at, (line, value) in pairs if line != value or len(line) > max_record_bytes}
    return b"\n".join([*lines, b""]), [*map(len, lines)], odd


def _line(value: bytes | None) -> bytes:
    if value is None or not value.strip(b" \t\r\n\0"):
        return _NO_RECORD
    if value.startswith(b"\0"):
        value = value[_FRAME_BYTES:] if value.startswith(b"{", _FRAME_BYTES) else _NO_RECORD
    # To JSON a carriage return is what a newline is: white space, or a fault within a string.
    return value.replace(b"\n", b"\r")


def schema_id(value: bytes | None) -> int | None:
    """Return the number of the schema that a schema registry's frame names; None if it is no such frame."""
    if value is None or len(value) < _FRAME_BYTES or value[0] or value.startswith(b"{", _FRAME_BYTES):
        return None
    return int.from_bytes(value[1:_FRAME_BYTES], "big")
