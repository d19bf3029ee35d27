"""
The values passed between stages.

    sources ─Chunk─▶ codec ─EncodedChunk─▶ batcher ─Batch─▶ senders ─BatchResult─▶ settlement ─Checkpoint─▶ store

Each value contains many records, and refers to the span of its stream that it covers. A span is settled once each of
its records is accepted, in the dead letters, or a duplicate.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple, Protocol

from msgspec import MsgspecError, Struct
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
    """A checkpoint, with a digest that identifies the stream."""

    checkpoint: int = 0  # offset to resume at, bytes; every record before it is settled and saved
    # Of the last bytes before the checkpoint, at most `MARKER_BYTES`.
    length: int = 0
    digest: bytes = b""


class Stream(Struct, eq=False, kw_only=True):
    """
    An input, and the data by which it is recognised. Its source owns and updates it; others only read it.

    The event loop moves the marker while threads read files and save, so related fields form one immutable value that
    is replaced.
    """

    stream_id: int  # unique in a state directory, never reused; newer streams have greater ids
    kind: StreamKind
    path: str  # where it was last seen, as from `os.fsdecode`; does not identify the stream
    # Of the file; 0 = another stream has them, as the file was truncated or its inode reused.
    device: int = 0
    inode: int = 0
    # Empty = none. All offsets and lengths count decompressed bytes.
    compression: str = ""
    size: int = 0  # known bytes of content, as of the last scan
    # Size and modification time of the file when its end was reached; both are unchanged while there is no new data.
    ended_size: int = -1
    ended_ns: int = -1
    is_rotated: bool = False  # the file was renamed by a rotation, so it will not grow any further
    is_gone: bool = False  # the file was deleted, moved or not found again, so nothing more can be read from it
    marker: Marker = Marker()
    read_offset: int = 0  # the end of what this process has read
    head: Head = Head()
    framing: Framing = LINES
    # All content as of this time is settled and saved; seconds since the epoch, None = unknown.
    settled_until: float | None = None
    # The end of its content at a scan, and the time of that scan, which becomes `settled_until` once the checkpoint
    # reaches the end.
    mark: tuple[int, float | None] = (0, None)
    mistakes: dict[str, int] = {}  # consecutive rejections, by rule, right before the offset where this process began
    is_taken_over: bool = False  # another process may have sent records of it; False once the first is packed
    is_ending: bool = False  # it is being handed over to another process, so no more records of it may be begun
    is_released: bool = False  # another process may own it, so this one must not count anything of it

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
    """Concatenated dead letters."""

    name_letter: Callable[[int], int | str]  # returns the ID that commands show for a letter
    letter_ids: list[int]
    starts: list[int]  # offsets of the letters

    def letters_in(self, start_offset: int, end_offset: int) -> list[int]:
        """Return the letters that start in a range of offsets."""
        return self.letter_ids[bisect_left(self.starts, start_offset) : bisect_left(self.starts, end_offset)]

    def letter_at(self, offset: int) -> int:
        """Return the letter at an offset."""
        return self.letter_ids[bisect_right(self.starts, offset) - 1]

    def position_fields(self, offset: int) -> dict[str, object]:
        return {"letter": self.name_letter(self.letter_at(offset))}


class Backlog(Struct, frozen=True, kw_only=True):
    """The backlog of a source. Snapshots have the same fields."""

    lag_bytes: int = 0  # known bytes that are not settled
    spool_bytes: int = 0  # bytes in the spool, of an input that cannot be read twice
    total_bytes: int | None = None  # size of a finite input; None if it is infinite or unknown
    unreachable_bytes: int = 0  # of inputs that were gone before this run could read them
    unmatched: list[str] = []  # messages about patterns that no file matches
    unreadable: list[str] = []  # messages about files that cannot be read; limited in number
    unreadable_count: int = 0
    has_scanned: bool = True  # False until the first scan for inputs
    has_unopened: bool = False  # new files wait to be opened, so the state does not know them
    group: GroupState | None = None


class Chunk(Struct, frozen=True, kw_only=True, eq=False):
    """Records of a stream that were read together."""

    stream: Stream
    # Bytes in the stream, end exclusive; the next chunk starts at the end.
    start_offset: int
    end_offset: int
    # Complete records in the stream's framing, such as lines with newlines; the last record of an ended input may lack
    # the newline. Empty if `is_oversized`.
    data: bytes
    is_oversized: bool = False  # one line that is too long for memory; only its position is known
    scan: Any = None  # the result of the native scanner; None = not scanned yet


class Rejection(Struct, frozen=True, kw_only=True, eq=False):
    """A permanently rejected record, for the dead letters."""

    start_offset: int
    end_offset: int
    rule: str  # the first rule that it breaks, such as `ip`
    message: str  # describes all broken rules; never contains a value of the record
    raw: bytes  # the unchanged line, without its newline; empty if only its position is known
    event_id: str = ""
    consumer_id: str = ""  # decimal digits; empty = read it from `raw`
    status: int = 0  # HTTP status of the refusal; 0 = never sent
    # `invalid` = rejected by shipper; `rejected` = refused by the service; `ambiguous` = refused, but an earlier
    # attempt may have been accepted.
    delivery: DeliveryClass = "invalid"
    attempts: int = 0
    header: bytes = b""  # the header of a CSV file, without which the record has no meaning
    whole_bytes: int = 0  # the length of the record if `raw` contains only its beginning; 0 = `raw` is complete
    faults: Mapping[str, str] = {}  # messages by rule, if several are broken
    first_at: float = 0.0  # when it was rejected, seconds since the epoch; 0 = when it is saved


class Refusal(Struct, frozen=True, kw_only=True):
    """The service's refusal of a record."""

    rule: str
    message: str  # the message of the service, which may quote the record
    status: int
    attempts: int
    is_ambiguous: bool = False  # an earlier attempt may have been accepted


def flat_bounds(bounds: Iterable[tuple[int, int]]) -> array[int]:
    """Flatten pairs of start and end into an array, 8 bytes per pair."""
    return array("I", chain.from_iterable(bounds))


NO_BOUNDS: Final = flat_bounds(())


class Checkpoint(Struct, eq=False, kw_only=True):
    """A range of a stream, and the results of its records; saved once all of them are settled."""

    stream: Stream
    start_offset: int = 0
    end_offset: int
    tail: bytes = b""  # its last bytes, at most `MARKER_BYTES`, for the marker at its end
    read: int = 0  # number of complete records, without blank lines
    accepted: int = 0
    duplicates: int = 0
    rejections: list[Rejection] = []
    ledger: list[Tally] = []  # counts of events that are or will be accepted; to be summed
    repeated: list[Tally] = []  # counts of duplicates; to be summed
    accepted_keys: bytes = b""  # keys of the EventIds of accepted events, 16 bytes each


class Span(Checkpoint, kw_only=True):
    """A range of a chunk, whose records are not all settled yet."""

    unsettled: int  # number of records not yet accepted, rejected or found to be duplicates
    opened_at: float = 0.0  # when it was passed to the batcher, on the event loop's clock
    chunk: Chunk | None = None  # contains the original records; None once all records are settled
    # Ranges of the chunk's data whose lines are events, in the order of `EncodedChunk.lines`; used while `bounds` is
    # empty.
    stretches: Sequence[tuple[int, int]] = ()
    bounds: array[int] = NO_BOUNDS  # start and end of each event in the chunk's data, flat, in the same order
    # Keys of the EventIds in the same order; empty if the dedupe window is off or all records are settled.
    event_keys: bytes = b""
    sent_bytes: int = 0  # total length of its events as sent, minus the memory of events that wait for an answer

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


class _Consumer(Struct):
    ConsumerID: int | str | None = None


_decode_consumer: Final = Decoder(_Consumer).decode
_CONSUMER_ID: Final = re.compile(rb'"ConsumerID"\s*+:\s*+"?\s*+(\d{1,40}+)(?![\w.])')


def consumer_id_of(record: bytes) -> str:
    """Return a record's ConsumerID, or the only one in a malformed record; empty if there is none, or several."""
    try:
        consumer_id = _decode_consumer(record).ConsumerID
    except (MsgspecError, UnicodeDecodeError, RecursionError):
        consumer_id = None
    if consumer_id is not None and re.fullmatch(r"[0-9]{1,40}", str(consumer_id)):
        return str(int(consumer_id))
    found = {int(digits) for digits in _CONSUMER_ID.findall(record)}
    return str(found.pop()) if len(found) == 1 else ""


class EncodedChunk(Struct, frozen=True, eq=False, kw_only=True):
    """Validated events of a span, ready to be inserted into a body."""

    span: Span
    lines: bytes  # events in the wire form, joined by newlines; empty if there are none
    events: int
    consumer_ids: Sequence[int]
    # The EventIds are unique in this chunk and among unsettled events, except for empty ones and those of waiting
    # events.
    has_new_event_ids: bool
    # Events that repeat the ConsumerID of an earlier one: ordinal, start and end in `lines`.
    repeats: Sequence[tuple[int, int, int]] = ()
    # Offset in the stream of the last valid record, duplicates included; -1 = none. If all records are valid, the
    # offset of any of them.
    last_good: int = -1
    waits: int = 0  # number of events at the end that wait for the answer of an unsettled event with the same EventId

    @property
    def event_ids(self) -> list[str]:
        """The EventIds, parsed from the lines."""
        return [event.EventId for event in _decode_event_ids(b"[" + self.lines.replace(b"\n", b",") + b"]")]


class Batch(Struct, frozen=True, eq=False, kw_only=True):
    """Events sent in one request."""

    number: int
    body: bytes
    events: int
    parts: list[tuple[Span, Sequence[int]]]  # the spans of its events with their ordinals, in the order of the body
    events_before: int = 0  # in the batches before it, since the run began or last took over a stream


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
    """The summary of a run."""

    batches: int
    requests: int
    retries: int
    seconds: float
    # `finished` = read to the end; `drained` = ended before the end of the input; `aborted` = stopped with records
    # pending; `gave_up` = delivery could not continue.
    outcome: Outcome
    message: str = ""  # why it ended early, or which dead letters an earlier run left of the same files; may be empty
    engine: str = ""  # the scanner of ordinary records: `native` or `pure`

    def exit_code(self, *, is_one_shot: bool) -> int:
        """Return 0 = all accepted, 3 = some are dead letters, 4 = records are left."""
        if self.pending or self.outcome in {"aborted", "gave_up"}:
            return 4
        if not is_one_shot:
            return 0
        if self.outcome == "drained":
            return 4
        return 3 if self.dead_lettered else 0
