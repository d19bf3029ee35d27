"""
A partition as a stream of lines, from its assignment to this process until its revocation.

Each message is a line with a range of byte offsets, as if the partition were one file; these offsets exist only in this
process. An index maps lines to messages, and keeps what their dead letters would need besides the line until they are
settled. The polling thread appends to the index, the event loop removes settled messages, and the saving thread reads
it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from secrets import token_hex
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from msgspec import Struct, field

from shipper.model.framing import BLANKS
from shipper.model.records import RECORD_GAP_BYTES, Checkpoint, Chunk, LedgerKey, Rejection, Stream, StreamKind
from shipper.system.native import NATIVE

if TYPE_CHECKING:
    from confluent_kafka import Message

T = TypeVar("T")

Headers = Sequence[tuple[str, bytes | None]]
Partition = tuple[str, int]
"""The name of a topic and the number of a partition."""

CHUNK_BYTES: Final = 1 << 20
# Not 0: a byte-order mark at the start of a stream is not part of a record.
START_OFFSET: Final = 1
_NO_RECORD: Final = b"-"  # replaces a value without a record; it is not JSON, so it becomes a dead letter
_SECOND: Final = itemgetter(1)
_FRAME_BYTES: Final = 5  # of a schema registry: a zero byte and a schema id


class Origin(NamedTuple):
    """
    The message of a line.

    Attributes:
        value: None if the message has none, or if `is_line`.
        is_line: The line in the chunk is the value.
        timestamp_ms: Milliseconds since the epoch; negative = none.
    """

    offset: int
    value: bytes | None
    is_line: bool
    key: bytes | None
    headers: Headers
    timestamp_ms: int


class Position(NamedTuple):
    """
    The position after a message.

    Attributes:
        epoch: The leader epoch of the message, with which the brokers can tell whether their log still contains it; -1
            = unknown.
    """

    offset: int
    epoch: int = -1


class _Block(Struct, eq=False):
    """
    The messages of one chunk.

    Attributes:
        start, end: Virtual bytes.
        lengths: Cumulative lengths of the lines, without newlines.
        offsets, timestamps: Of each message; timestamps in milliseconds.
        keys, headers: By index, for messages that have them.
        values: By index, for messages whose line differs from their value.
        epochs: Leader epochs of the first and the last message.
    """

    start: int
    end: int
    lengths: Sequence[int]
    offsets: Sequence[int]
    timestamps: Sequence[int]
    keys: dict[int, bytes]
    headers: dict[int, Headers]
    values: dict[int, bytes | None]
    epochs: tuple[int, int]

    def end_of(self, index: int) -> int:
        """Return where the line of a message ends."""
        return self.start + self.lengths[index] + index + 1


class Session(Struct):
    """
    The counts of a partition in the ledger topic during one assignment.

    Attributes:
        totals: `read`, `accepted`, `dead_lettered`, `duplicates` and `unreachable`.
        sums: Accepted records and duplicates by key.
        parts: Number of documents with counts of keys that rarely recur.
    """

    name: str = field(default_factory=partial(token_hex, 6))
    totals: dict[str, int] = {}
    sums: dict[LedgerKey, tuple[int, int]] = {}
    parts: int = 0


class KafkaStream(Stream, kw_only=True):
    """
    A partition while this process owns it.

    Attributes:
        topic_id: Distinguishes the topic from an earlier one with the same name.
        first, first_epoch: The position where reading began.
        end: The end of the partition when last queried; None = unknown yet.
        until: End of the offsets to read, exclusive; None = no end.
        eof: Everything before this offset was read; -1 = unknown.
        committed: The offset of the group in the brokers; None = not even where reading begins.
        is_waiting: Nothing is read yet, as `committed` was None: a crash would lose where reading began.
        initial_partitions: Number of partitions of the topic when the group began to read it.
        stopped: A message for users, why the partition is not read; empty = it is read.
        is_leaderless: It is stopped as it has no leader.
        unreachable: Records deleted before they were read that are not in the ledger yet.
        settled: End of the settled offsets, exclusive; None = nothing is settled yet.
        last: The position after the last settled message; None = nothing is settled yet.
        blocks: Blocks of unsettled messages.
        saved_mistakes: Consecutive rejections, by rule, right before the saved offset.
    """

    kind: StreamKind = "kafka"
    read_offset: int = START_OFFSET
    is_taken_over: bool = True
    topic: str
    partition: int
    topic_id: str
    first: int
    session: Session
    first_epoch: int = -1
    end: int | None = None
    until: int | None = None
    eof: int = -1
    committed: int | None = None
    is_waiting: bool = False
    initial_partitions: int = 0
    stopped: str = ""
    is_leaderless: bool = False
    unreachable: int = 0
    settled: int | None = None
    last: Position | None = None
    max_record_bytes: int = 1 << 26
    skips_tombstones: bool = False
    tombstones_skipped: int = 0
    saved_mistakes: dict[str, int] = field(default_factory=dict)
    blocks: deque[_Block] = field(default_factory=deque)

    @property
    def topic_partition(self) -> Partition:
        """The key of the partition."""
        return self.topic, self.partition

    @property
    def next_offset(self) -> int:
        """The first unsettled offset."""
        return self.first if self.settled is None else self.settled

    @property
    def is_complete(self) -> bool:
        """Whether all offsets up to `until` were read."""
        return self.until is not None and max(self.first, self.eof) >= self.until

    @property
    def is_halted(self) -> bool:
        """Whether nothing is to be read."""
        return bool(self.stopped) or self.is_complete or self.is_waiting

    @property
    def is_ahead(self) -> bool:
        """Whether offsets without records follow the committed one and nothing is unsettled, so no record moves it."""
        if self.committed is None or self.until is not None or self.stopped or self.blocks:
            return False
        return max(self.next_offset, self.eof) > self.committed

    @property
    def lag_records(self) -> int:
        """Number of unsettled offsets, except those of aborted transactions at the end."""
        if not self.blocks and self.eof >= (self.end or 0):
            return 0
        return max(0, (self.end or 0) - self.next_offset)

    @property
    def oldest_ms(self) -> int | None:
        """The timestamp of the oldest message that was read but not settled, or None."""
        blocks = tuple(self.blocks)
        return blocks[0].timestamps[0] if blocks else None

    def chunks(self, messages: Sequence[Message]) -> list[Chunk]:
        """Append messages in offset order; return them in chunks of at most 1 MiB or one message."""
        is_last = self.until is not None and (messages[-1].offset() or 0) >= self.until - 1
        if is_last:
            messages = [message for message in messages if (message.offset() or 0) < (self.until or 0)]
        chunks = self._append(messages) if messages else []
        if is_last:  # only once the messages are in the index: it changes the position after the last one
            self.eof = self.until or 0
        return chunks

    def _append(self, messages: Sequence[Message]) -> list[Chunk]:
        kind = type(messages[0])  # mapping an unbound method is faster than a loop of calls
        values = [*map(kind.value, messages)]
        if self.skips_tombstones and None in values:
            remaining = [message for message, value in zip(messages, values, strict=True) if value is not None]
            self.tombstones_skipped += len(values) - len(remaining)
            return self._append(remaining) if remaining else []
        data, lengths, other_values = _lines(values, self.max_record_bytes)
        if len(data) > CHUNK_BYTES and len(values) > 1:
            half = len(messages) // 2
            return self._append(messages[:half]) + self._append(messages[half:])
        first, last = messages[0].offset() or 0, messages[-1].offset() or 0
        offsets: Sequence[int] = range(first, last + 1)
        if len(offsets) != len(messages):
            offsets = [message.offset() or 0 for message in messages]
        start = self.read_offset
        block = _Block(
            start=start,
            end=start + len(data),
            lengths=lengths,
            offsets=offsets,
            timestamps=[*map(_SECOND, map(kind.timestamp, messages))],
            keys=_without_none([*map(kind.key, messages)]),
            headers=_without_none(headers_of(messages)),
            values=other_values,
            epochs=(_epoch_of(messages[0]), _epoch_of(messages[-1])),
        )
        self.read_offset = block.end
        self.blocks.append(block)
        return [Chunk(stream=self, start_offset=start, end_offset=block.end, data=data)]

    def origin(self, start_offset: int) -> Origin:
        """Return the message whose line contains a virtual byte."""
        block = self._block_at(start_offset)
        index = bisect_right(range(len(block.offsets)), start_offset, key=block.end_of)
        return Origin(
            offset=block.offsets[index],
            value=block.values.get(index),
            is_line=index not in block.values,
            key=block.keys.get(index),
            headers=block.headers.get(index, ()),
            timestamp_ms=block.timestamps[index],
        )

    def position_fields(self, offset: int) -> dict[str, object]:
        return {"offset": self.origin(offset).offset}

    def explain(self, rejection: Rejection) -> str:
        origin = self.origin(rejection.start_offset)
        return rejection.message if origin.is_line else explain(origin.value) or rejection.message

    def position_at(self, end_offset: int) -> int:
        """Return the offset to continue from after the line that ends at a virtual byte."""
        if self.is_waiting:
            return self.next_offset
        eof = self.eof  # first, as other threads append messages before they change it
        position = max(self.next_offset, self.message_end(end_offset).offset)
        return max(position, eof) if end_offset == self.read_offset else position

    def message_end(self, end_offset: int) -> Position:
        """Return the position after the message whose line ends at a virtual byte, before any transaction markers."""
        blocks = tuple(self.blocks)
        if not blocks or end_offset <= blocks[0].start:  # nothing since the last save
            return self.last or Position(self.first, self.first_epoch)
        block = self._block_at(end_offset - 1)
        index = bisect_left(range(len(block.offsets)), end_offset, key=block.end_of)
        first, last = block.epochs  # epochs never decrease
        is_known = first == last or index == len(block.offsets) - 1
        return Position(block.offsets[index] + 1, last if is_known else -1)

    def _block_at(self, offset: int) -> _Block:
        blocks = tuple(self.blocks)  # an atomic copy, as other threads append and remove
        return blocks[bisect_right(blocks, offset, key=lambda block: block.start) - 1]

    def mistakes_with(self, checkpoints: Sequence[Checkpoint]) -> dict[str, int]:
        """Return `saved_mistakes` as they are after the next checkpoints; a member that resumes there needs them."""
        counts: Counter[str] = Counter()
        end = checkpoints[-1].end_offset
        for checkpoint in reversed(checkpoints):
            for rejection in reversed(checkpoint.rejections):
                if rejection.delivery != "invalid" or end - rejection.end_offset >= RECORD_GAP_BYTES:
                    return counts
                counts[rejection.rule] += 1
                end = rejection.start_offset
            if end - checkpoint.start_offset >= RECORD_GAP_BYTES:
                return counts
        return counts + Counter(self.saved_mistakes)

    def note_saved(self, end_offset: int) -> None:
        """Remove the messages that are settled and saved, up to a virtual byte."""
        self.settled, self.last = self.position_at(end_offset), self.message_end(end_offset)
        self.settled_until = self.settled_until_with(self.settled)
        while self.blocks and self.blocks[0].end <= end_offset:
            self.blocks.popleft()

    def note_eof(self, offset: int) -> None:
        """Record that everything before an offset was read."""
        self.eof = offset if self.until is None else min(offset, self.until)

    def note_end(self, end: int, at: float) -> None:
        """Record the end of the partition at a time, seconds since the epoch."""
        if self.until is not None:
            self.end = self.until
            return
        self.end = end
        if self.settled_until is not None and at < self.settled_until:
            self.settled_until = None  # the clock was set back
        if self.stopped:
            return
        if self.next_offset >= end or (not self.blocks and self.eof >= end):
            self.settled_until = at
        elif self.mark[1] is None or self.next_offset >= self.mark[0]:
            self.mark = end, at


def _epoch_of(message: Message) -> int:
    epoch = message.leader_epoch()
    return -1 if epoch is None else epoch


def headers_of(messages: Sequence[Message]) -> list[Headers | None]:
    """Return the headers of messages; None if a message has none, or one whose name is not UTF-8."""
    calls, headers = map(type(messages[0]).headers, messages), list[Headers | None]()
    while True:
        try:
            headers.extend(calls)  # type: ignore[arg-type]
            return headers
        except (SystemError, UnicodeDecodeError):
            headers.append(None)  # `extend` continues with the next message; a second call for this one would crash


def _without_none(values: Sequence[T | None]) -> dict[int, T]:
    if values.count(None) == len(values):
        return {}
    return {index: value for index, value in enumerate(values) if value is not None}


def _lines(
    values: Sequence[bytes | None], max_record_bytes: int
) -> tuple[bytes, Sequence[int], dict[int, bytes | None]]:
    """
    Return a line for each value.

    Returns:
        The lines with newlines; their cumulative lengths, without newlines; by index the values that differ from them.
    """
    # Nearly always each value is a line that begins like an object.
    if NATIVE is not None and (joined := NATIVE.join_lines(values, max_record_bytes)) is not None:
        return *joined, {}
    lines = [*map(_line, values)]
    pairs = enumerate(zip(lines, values, strict=True))
    others = {index: value for index, (line, value) in pairs if line != value or len(line) > max_record_bytes}
    return b"\n".join([*lines, b""]), [*accumulate(map(len, lines))], others


def _line(value: bytes | None) -> bytes:
    if value is None or not has_record(value):
        return _NO_RECORD
    value = without_prefix(value)
    if value.startswith(b"\0"):
        return _NO_RECORD
    # In JSON a carriage return is equivalent to a newline: whitespace, or an error within a string.
    return value.replace(b"\n", b"\r")


def without_prefix(value: bytes) -> bytes:
    """Return the JSON after a schema registry's frame or a byte-order mark; any other value is returned unchanged."""
    size = _FRAME_BYTES if value.startswith(b"\0") else len(BOM_UTF8) if value.startswith(BOM_UTF8) else 0
    return value[size:] if value.startswith(b"{", size) else value


def has_record(value: bytes | None) -> bool:
    """Return whether there is anything to send."""
    return value is not None and bool(value.strip(BLANKS))


def explain(value: bytes | None) -> str:
    """Return why a value has no record; empty if it has one."""
    if value is None:
        return "the message has no value (a tombstone)"
    if not value:
        return "the message is empty"
    if (schema := schema_id(value)) is not None:
        return f"it has the prefix of a schema registry (schema {schema}) but is not JSON"
    return "" if has_record(value) else "the message is blank"


def schema_id(value: bytes | None) -> int | None:
    """Return the schema id in a schema registry's frame; None without such a frame, or if it contains JSON."""
    if value is None or len(value) < _FRAME_BYTES or value[0] or value.startswith(b"{", _FRAME_BYTES):
        return None
    return int.from_bytes(value[1:_FRAME_BYTES], "big")
