"""
The values passed between stages.

    sources ─Chunk─▶ codec ─EncodedChunk─▶ batcher ─Batch─▶ senders ─BatchResult─▶ settlement ─Checkpoint─▶ store

Each value contains many records, and refers to the span of its stream that it covers. A span is settled once each of
its records is accepted, in the dead letters, or a duplicate.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.json import Decoder

from shipper.model.framing import LINES, Framing
from shipper.model.group import GroupState

# The hour of an event's Timestamp (`YYYY-MM-DDThh`, UTC), its BrandID, AffiliateID, and the digits of its BTag.
LedgerKey = tuple[str, int, str, str]


class Tally(Protocol):
    """Counts of events, a dict or native; keys are unique. Negative counts are corrections."""

    def __len__(self) -> int: ...

    def items(self) -> Iterable[tuple[LedgerKey, int]]: ...


StreamKind = Literal["file", "spool", "replay", "kafka"]
DeliveryClass = Literal["invalid", "rejected", "ambiguous"]

# Bytes before a checkpoint that identify a stream: more than a record, as the ends of records are similar, and files
# with the same beginning may have the same length.
MARKER_BYTES: Final = 512
RECORD_GAP_BYTES: Final = 16  # maximum between adjacent records, exclusive; too small for another record


def digest(data: bytes) -> bytes:
    """Hash the head or the tail of a stream to 16 bytes, so that the state contains no data of records."""
    return blake2b(data, digest_size=16).digest()


def shown(path: str | PurePath) -> str:
    """Convert a path, possibly not UTF-8, to text for people, logs and JSON. Not reversible."""
    return str(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


class Head(NamedTuple):
    """Length and digest of the first bytes of a stream (at most 1 KiB); replaced as the file grows."""

    length: int = 0
    digest: bytes = b""


class Marker(NamedTuple):
    """
    A checkpoint, with a digest that identifies the stream.

    Attributes:
        checkpoint: Offset to resume at, bytes; every record before it is settled and saved.
        length, digest: Of the last bytes before the checkpoint, at most `MARKER_BYTES`.
    """

    checkpoint: int = 0
    length: int = 0
    digest: bytes = b""


class Stream(Struct, eq=False, kw_only=True):
    """
    An input, and the data by which it is recognised. Its source owns and updates it; others only read it.

    The event loop moves the marker while threads read files and save, so related fields form one immutable value that
    is replaced.

    Attributes:
        stream_id: Unique in a state directory, never reused; newer streams have greater ids.
        path: Where it was last seen, as from `os.fsdecode`; does not identify the stream.
        device, inode: Of the file; 0 = another stream has them, as the file was truncated or its inode reused.
        compression: Empty = none. All offsets and lengths count decompressed bytes.
        size: Known bytes of content, as of the last scan.
        ended_size, ended_ns: Size and modification time of the file when its end was reached; both are unchanged while
            there is no new data.
        is_rotated: The file was renamed by a rotation, so it will not grow any further.
        is_gone: The file was deleted, moved or not found again, so nothing more can be read from it.
        read_offset: The end of what this process has read.
        settled_until: All content as of this time is settled and saved; seconds since the epoch, None = unknown.
        mark: The end of its content at a scan, and the time of that scan, which becomes `settled_until` once the
            checkpoint reaches the end.
        mistakes: Consecutive rejections, by rule, right before the offset where this process began.
        is_ending: It is being handed over to another process, so no more records of it may be begun.
        is_released: Another process may own it, so this one must not count anything of it.
    """

    stream_id: int
    kind: StreamKind
    path: str
    device: int = 0
    inode: int = 0
    compression: str = ""
    size: int = 0
    ended_size: int = -1
    ended_ns: int = -1
    is_rotated: bool = False
    is_gone: bool = False
    marker: Marker = Marker()
    read_offset: int = 0
    head: Head = Head()
    framing: Framing = LINES
    settled_until: float | None = None
    mark: tuple[int, float | None] = (0, None)
    mistakes: dict[str, int] = {}
    is_ending: bool = False
    is_released: bool = False

    @property
    def file_id(self) -> tuple[int, int]:
        return self.device, self.inode

    @property
    def key(self) -> str:
        """A key that is stable across renames and restarts."""
        return f"{self.device}:{self.inode}" if self.inode else self.shown_path

    @property
    def shown_path(self) -> str:
        return shown(self.path)

    @property
    def checkpoint(self) -> int:
        return self.marker.checkpoint

    @property
    def is_settled(self) -> bool:
        """Whether all its known content is settled and saved."""
        return self.checkpoint >= self.size

    def note_end(self, end: int, at: float) -> None:
        """
        Record the end of its content at a time.

        A mark is replaced only once the checkpoint has reached it, or a busy input would never reach one; except that a
        mark within a torn line is replaced by a smaller one.
        """
        if self.settled_until is not None and at < self.settled_until:
            self.settled_until = None  # in the future, because the clock was set back
        if self.checkpoint >= self.mark[0] or end < self.mark[0]:
            self.mark = end, at

    def forget_end(self) -> None:
        """Forget when it was settled, because its content continues in a file that may have existed before."""
        self.settled_until, self.mark = None, (0, None)

    def settled_until_with(self, checkpoint: int) -> float | None:
        """Return the value of `settled_until` with a given checkpoint."""
        end, at = self.mark
        return at if checkpoint >= end and at is not None else self.settled_until

    def position_fields(self, offset: int) -> dict[str, object]:
        """Return the position of the record at an offset, for the log."""
        return {"offset": offset}

    def explain(self, rejection: Rejection) -> str:
        """Return why a record of this stream was rejected."""
        return rejection.message

    def move_checkpoint(self, offset: int, tail: bytes) -> None:
        """Set the saved checkpoint; `tail` contains the last bytes before it."""
        self.settled_until = self.settled_until_with(offset)
        self.marker = Marker(offset, len(tail), digest(tail))


class ReplayStream(Stream, kw_only=True):
    """
    Concatenated dead letters.

    Attributes:
        starts: Their offsets.
        name_letter: Returns the ID that commands show for a letter.
    """

    name_letter: Callable[[int], int | str]
    letter_ids: list[int]
    starts: list[int]

    def letters_in(self, start_offset: int, end_offset: int) -> list[int]:
        """Return the letters that start in a range of offsets."""
        return self.letter_ids[bisect_left(self.starts, start_offset) : bisect_left(self.starts, end_offset)]

    def letter_at(self, offset: int) -> int:
        """Return the letter at an offset."""
        return self.letter_ids[bisect_right(self.starts, offset) - 1]

    def position_fields(self, offset: int) -> dict[str, object]:
        return {"letter": self.name_letter(self.letter_at(offset))}


class Backlog(Struct, frozen=True, kw_only=True):
    """
    The backlog of a source. Snapshots have the same fields.

    Attributes:
        lag_bytes: Known bytes that are not settled.
        spool_bytes: Bytes in the spool, of an input that cannot be read twice.
        total_bytes: Size of a finite input; None if it is infinite or unknown.
        unreachable_bytes: Of inputs that were gone before this run could read them.
        unmatched: Messages about patterns that no file matches.
        unreadable: Messages about files that cannot be read; limited in number.
        has_scanned: False until the first scan for inputs.
    """

    lag_bytes: int = 0
    spool_bytes: int = 0
    total_bytes: int | None = None
    unreachable_bytes: int = 0
    unmatched: list[str] = []
    unreadable: list[str] = []
    unreadable_count: int = 0
    has_scanned: bool = True
    group: GroupState | None = None


class Chunk(Struct, frozen=True, kw_only=True, eq=False):
    """
    Records of a stream that were read together.

    Attributes:
        start_offset, end_offset: Bytes in the stream, end exclusive; the next chunk starts at the end.
        data: Complete records in the stream's framing, such as lines with newlines; the last record of an ended input
            may lack the newline. Empty if `is_oversized`.
        is_oversized: One line that is too long for memory; only its position is known.
        scan: The result of the native scanner; None = not scanned yet.
    """

    stream: Stream
    start_offset: int
    end_offset: int
    data: bytes
    is_oversized: bool = False
    scan: Any = None


class Rejection(Struct, frozen=True, kw_only=True, eq=False):
    """
    A permanently rejected record, for the dead letters.

    Attributes:
        rule: The first rule that it breaks, such as `ip`.
        message: Describes all broken rules; never contains a value of the record.
        faults: Messages by rule, if several are broken.
        raw: The unchanged line, without its newline; empty if only its position is known.
        whole_bytes: The length of the record if `raw` contains only its beginning; 0 = `raw` is complete.
        consumer_id: Decimal digits; empty = read it from `raw`.
        status: HTTP status of the refusal; 0 = never sent.
        delivery: `invalid` = rejected by shipper; `rejected` = refused by the service; `ambiguous` = refused, but an
            earlier attempt may have been accepted.
        header: The header of a CSV file, without which the record has no meaning.
    """

    start_offset: int
    end_offset: int
    rule: str
    message: str
    raw: bytes
    event_id: str = ""
    consumer_id: str = ""
    status: int = 0
    delivery: DeliveryClass = "invalid"
    attempts: int = 0
    header: bytes = b""
    whole_bytes: int = 0
    faults: Mapping[str, str] = {}


class Refusal(Struct, frozen=True, kw_only=True):
    """
    The service's refusal of a record.

    Attributes:
        rule: `rejected` or `too_large`.
        message: The message of the service, which may quote the record.
        is_ambiguous: An earlier attempt may have been accepted.
    """

    rule: str
    message: str
    status: int
    attempts: int
    is_ambiguous: bool = False


def flat_bounds(bounds: Iterable[tuple[int, int]]) -> array[int]:
    """Flatten pairs of start and end into an array, 8 bytes per pair."""
    return array("I", chain.from_iterable(bounds))


NO_BOUNDS: Final = flat_bounds(())


class Checkpoint(Struct, eq=False, kw_only=True):
    """
    A range of a stream, and the results of its records; saved once all of them are settled.

    Attributes:
        tail: Its last bytes, at most `MARKER_BYTES`, for the marker at its end.
        read: Number of complete records, without blank lines.
        ledger: Counts of events that are or will be accepted; to be summed.
        repeated: Counts of duplicates; to be summed.
        accepted_keys: Keys of the EventIds of accepted events, 16 bytes each.
    """

    stream: Stream
    start_offset: int = 0
    end_offset: int
    tail: bytes
    read: int = 0
    accepted: int = 0
    duplicates: int = 0
    rejections: list[Rejection] = []
    ledger: list[Tally] = []
    repeated: list[Tally] = []
    accepted_keys: bytes = b""


class Span(Checkpoint, kw_only=True):
    """
    A range of a chunk, whose records are not all settled yet.

    Attributes:
        unsettled: Number of records not yet accepted, rejected or found to be duplicates.
        opened_at: When it was passed to the batcher, on the event loop's clock.
        chunk: Contains the original records; None once all records are settled.
        stretches: Ranges of the chunk's data whose lines are events, in the order of `EncodedChunk.lines`; used while
            `bounds` is empty.
        bounds: Start and end of each event in the chunk's data, flat, in the same order.
        event_keys: Keys of the EventIds in the same order; empty if the dedupe window is off or all records are
            settled.
        sent_bytes: Total length of its events as sent, minus the memory of events that wait for an answer.
    """

    unsettled: int
    opened_at: float = 0.0
    chunk: Chunk | None = None
    stretches: Sequence[tuple[int, int]] = ()
    bounds: array[int] = NO_BOUNDS
    event_keys: bytes = b""
    sent_bytes: int = 0

    def bounds_of(self, ordinal: int) -> tuple[int, int]:
        """Return start and end of an unsettled event in the data of the chunk; ordinals start at 0."""
        assert self.chunk is not None
        if not self.bounds:
            self.bounds = array("I")
            for start, end in self.stretches:
                for line in self.chunk.data[start:end].removesuffix(b"\n").split(b"\n"):
                    self.bounds.extend((start, start + len(line)))
                    start += len(line) + 1
        return self.bounds[2 * ordinal], self.bounds[2 * ordinal + 1]


class _EventIdOnly(Struct):
    EventId: str


_decode_event_ids: Final = Decoder(list[_EventIdOnly]).decode
_decode_event_id: Final = Decoder(_EventIdOnly).decode


def event_id_of(line: bytes) -> str:
    """Return the EventId of an event in the wire form."""
    return _decode_event_id(line).EventId


class EncodedChunk(Struct, frozen=True, eq=False, kw_only=True):
    """
    Validated events of a span, ready to be inserted into a body.

    Attributes:
        lines: Events in the wire form, joined by newlines; empty if there are none.
        has_new_event_ids: The EventIds are unique in this chunk and among unsettled events, except for empty ones and
            those of waiting events.
        repeats: Events that repeat the ConsumerID of an earlier one: ordinal, start and end in `lines`.
        last_good: Offset in the stream of the last valid record, duplicates included; -1 = none. If all records are
            valid, the offset of any of them.
        waits: Number of events at the end that wait for the answer of an unsettled event with the same EventId.
    """

    span: Span
    lines: bytes
    events: int
    consumer_ids: Sequence[int]
    has_new_event_ids: bool
    repeats: Sequence[tuple[int, int, int]] = ()
    last_good: int = -1
    waits: int = 0

    @property
    def event_ids(self) -> list[str]:
        """The EventIds, parsed from the lines."""
        return [event.EventId for event in _decode_event_ids(b"[" + self.lines.replace(b"\n", b",") + b"]")]


class Batch(Struct, frozen=True, eq=False, kw_only=True):
    """
    Events sent in one request.

    Attributes:
        number: Number of the batch in this run, from 1.
        parts: The spans of its events with their ordinals, in the order of the body.
    """

    number: int
    body: bytes
    events: int
    parts: list[tuple[Span, Sequence[int]]]


class BatchResult(Struct, frozen=True, eq=False):
    """The result of a batch after one answer; each refused event is a separate batch."""

    accepted: Batch | None
    refused: Sequence[tuple[Batch, Refusal]] = ()


def move_checkpoints(saved: Iterable[Checkpoint]) -> None:
    """Move streams to their saved checkpoints."""
    for checkpoint in saved:
        checkpoint.stream.move_checkpoint(checkpoint.end_offset, checkpoint.tail)


class Totals(Struct, kw_only=True):
    """Counts of records; `read == accepted + dead_lettered + duplicates + pending`."""

    read: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0
    pending: int = 0


Outcome = Literal["finished", "drained", "aborted", "gave_up"]


class Summary(Totals, kw_only=True):
    """
    The summary of a run.

    Attributes:
        outcome: `finished` = read to the end; `drained` = ended before the end of the input; `aborted` = stopped with
            records pending; `gave_up` = nothing was accepted for too long.
        message: Why it ended early, or which dead letters an earlier run left of the same files; may be empty.
        engine: The scanner of ordinary records: `native` or `pure`.
    """

    batches: int
    requests: int
    retries: int
    seconds: float
    outcome: Outcome
    message: str = ""
    engine: str = ""

    def exit_code(self, *, is_one_shot: bool) -> int:
        """Return 0 = all accepted, 3 = some are dead letters, 4 = records are left."""
        if self.pending or self.outcome in {"aborted", "gave_up"}:
            return 4
        if not is_one_shot:
            return 0
        if self.outcome == "drained":
            return 4
        return 3 if self.dead_lettered else 0
