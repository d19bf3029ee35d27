"""
The values that flow from stage to stage.

    sources ──Chunk──▶ codec ──EncodedChunk──▶ batcher ──Batch──▶ senders ──Settled──▶ settlement ──Checkpoint──▶ store

Bytes travel in pieces of many records; each piece knows the span of its stream that it covers, and a span is
settled when each of its records is accepted, in the dead letters, or a duplicate.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import PurePath
from typing import Any, Final, Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.json import Decoder

from shipper.model.framing import LINES, Framing
from shipper.model.group import GroupState

# Of an event: the hour of its Timestamp (`YYYY-MM-DDThh`, UTC), BrandID, AffiliateID, the digits of its BTag.
LedgerKey = tuple[str, int, str, str]


class Tally(Protocol):
    """Counts of events: a dict, or what the native part has counted."""

    def __len__(self) -> int: ...

    def items(self) -> Iterable[tuple[LedgerKey, int]]:
        """Return each key once, with its count, which may be below zero where it corrects another one."""


StreamKind = Literal["file", "spool", "replay", "kafka"]
DeliveryClass = Literal["invalid", "rejected", "ambiguous"]

# So much of a stream before its checkpoint tells it from others: more than a whole record, as the ends of records are
# much alike, and files that begin alike may have the same length.
MARKER_BYTES: Final = 512


def digest(data: bytes) -> bytes:
    """Hash the head or the tail of a stream: 16 bytes, so that no record's content stands in the state."""
    return blake2b(data, digest_size=16).digest()


def shown(path: str | PurePath) -> str:
    """Write a path for people, logs and JSON, also one that is not UTF-8; it may name no file any more."""
    return str(path).encode(errors="surrogateescape").decode(errors="backslashreplace")


class Head(NamedTuple):
    """Length and digest of the first bytes of a stream (at most 1 KiB); another one replaces it as the file grows."""

    length: int = 0
    digest: bytes = b""


class Marker(NamedTuple):
    """
    Where a stream is resumed, and what proves that it is the same stream.

    Attributes:
        checkpoint: Offset to resume at, bytes; every record before it is settled and saved.
        length, digest: Of the last bytes before the checkpoint, at most `MARKER_BYTES`.
    """

    checkpoint: int = 0
    length: int = 0
    digest: bytes = b""


class Stream(Struct, eq=False, kw_only=True):
    """
    One input and how to know it again. Owned and updated by its source; others only read it.

    The event loop moves the marker while threads read files and save: so what belongs together is one value that is
    replaced, never changed.

    Attributes:
        stream_id: Unique in one state directory, never used twice; greater ids are younger.
        path: Where it was last seen, as `os.fsdecode` has it; not for identity.
        device, inode: Of the file; 0 = another stream has its place, as it was truncated or its inode given out again.
        compression: How the file is compressed; empty = not. All offsets and lengths are of the content.
        size: Bytes of content that were known to exist at the last look.
        ended_size, ended_ns: Size and time of the file when its end was reached; while it has both, nothing is new.
        is_rotated: Whether it has left the place where it was written, so that it does not grow any more.
        is_gone: Whether it was put away, or looked for and is nowhere any more, so that nothing more can come of it.
        marker: Its checkpoint, and what proves it.
        read_offset: Offset up to which this process has read; where it goes on if it opens the stream again.
        head: How it begins, as far as that was seen.
        framing: How its records lie in it.
        settled_until: Everything that was in it at this moment is settled and saved; seconds since the epoch, None =
            not known.
        mark: The end of its content at a look, and when that was: what `settled_until` becomes once it is passed.
        mistakes: By rule, how many records in a row were refused here right before the place where this process began.
        is_ending: It goes to another process: no more of it is begun.
        is_over: Another process may have it, so that nothing of it counts here any more.
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
    is_over: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Device and inode."""
        return self.device, self.inode

    @property
    def key(self) -> str:
        """What tells it from all others at this moment and at the next start, whatever it is called."""
        return f"{self.device}:{self.inode}" if self.inode else self.shown_path

    @property
    def shown_path(self) -> str:
        """Where it was last seen, for people."""
        return shown(self.path)

    @property
    def checkpoint(self) -> int:
        """Offset to resume at, bytes."""
        return self.marker.checkpoint

    @property
    def is_settled(self) -> bool:
        """Whether everything that it was known to hold is settled and saved."""
        return self.checkpoint >= self.size

    def note_end(self, end: int, at: float) -> None:
        """
        Take note of where its content ended at a moment.

        A mark counts until it is passed, or a busy input would never pass one; but one that turns out to lie in a torn
        line gives way.
        """
        if self.settled_until is not None and at < self.settled_until:
            self.settled_until = None  # the clock was put back: that moment is still to come
        if self.checkpoint >= self.mark[0] or end < self.mark[0]:
            self.mark = end, at

    def settled_until_with(self, checkpoint: int) -> float | None:
        """Return up to when everything is settled if the checkpoint is there."""
        end, at = self.mark
        return at if checkpoint >= end and at is not None else self.settled_until

    def move_checkpoint(self, offset: int, tail: bytes) -> None:
        """Set the checkpoint that was saved; `tail` are the last bytes before it."""
        self.settled_until = self.settled_until_with(offset)
        self.marker = Marker(offset, len(tail), digest(tail))


class ReplayStream(Stream, kw_only=True):
    """
    Dead letters one behind the other, and which stands where.

    Attributes:
        letter_ids: In the order of the stream.
        starts: The offset of each.
    """

    letter_ids: list[int]
    starts: list[int]

    def letters_in(self, start_offset: int, end_offset: int) -> list[int]:
        """Return the letters that begin in a stretch, end exclusive."""
        return self.letter_ids[bisect_left(self.starts, start_offset) : bisect_left(self.starts, end_offset)]

    def letter_at(self, offset: int) -> int:
        """Return the letter that covers an offset."""
        return self.letter_ids[bisect_right(self.starts, offset) - 1]


class Backlog(Struct, frozen=True, kw_only=True):
    """
    What a source has before it.

    Attributes:
        lag_bytes: Known to exist and not settled.
        spool_bytes: Kept on disk of an input that cannot be read twice.
        total_bytes: Size of an input that has an end; None if it has none, or it is not known.
        unreachable_bytes: Of inputs that this run found gone before they were read.
        unmatched: In words, which patterns no file matches.
        unreadable: In words, which files cannot be read and why; not all of many.
        unreadable_count: Of all of those.
        is_known: Whether it was looked for inputs yet; until then, nothing of this is known.
        group: Of a member of a consumer group.
    """

    lag_bytes: int = 0
    spool_bytes: int = 0
    total_bytes: int | None = None
    unreachable_bytes: int = 0
    unmatched: Sequence[str] = ()
    unreadable: Sequence[str] = ()
    unreadable_count: int = 0
    is_known: bool = True
    group: GroupState | None = None


class Chunk(Struct, frozen=True, kw_only=True, eq=False):
    """
    Lines of one stream that were read together.

    Attributes:
        start_offset, end_offset: Bytes in the stream; end exclusive = where the next chunk starts.
        data: Whole records, as the stream's framing has them: lines, each ending with a newline; only the last line
            of an input that has ended may lack it. Empty when `is_oversized`.
        is_oversized: The span is one line too long to be held in memory; only its position is known.
        scan: What the native scanner has found in it; None if it was not scanned yet.
    """

    stream: Stream
    start_offset: int
    end_offset: int
    data: bytes
    is_oversized: bool = False
    scan: Any = None


class Rejection(Struct, frozen=True, kw_only=True, eq=False):
    """
    A record that was refused for good, as it will stand in the dead letters.

    Attributes:
        rule: The rule that it broke, such as `ip`; the first one that was found.
        message: What is wrong, in words, by all rules that it broke; never a value of the record.
        faults: By rule, what is wrong, in words, if it broke several.
        raw: The line as it came, without its newline; empty if only its position is known.
        whole_bytes: The length of the record if `raw` is but its beginning; 0 = it is not cut.
        consumer_id: Decimal digits; empty: what can be read from `raw`.
        status: HTTP status of the refusal; 0 = it was never sent.
        delivery: `invalid` = refused here; `rejected` = refused by the service; `ambiguous` = refused, but an earlier
            attempt may have been accepted.
        attempts: How often it was sent.
        header: What the record means nothing without, such as the first row of a CSV file.
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
    Why the service does not take a record.

    Attributes:
        rule: One word, `rejected` or `too_large`.
        message: The service's own words; they may quote the record.
        status: HTTP status.
        attempts: How often the record was sent.
        is_ambiguous: An earlier attempt may have been accepted.
    """

    rule: str
    message: str
    status: int
    attempts: int
    is_ambiguous: bool = False


def flat_bounds(bounds: Iterable[tuple[int, int]]) -> array[int]:
    """Put starts and ends one behind the other, in 8 bytes a pair."""
    return array("I", chain.from_iterable(bounds))


NO_BOUNDS: Final = flat_bounds(())


class Span(Struct, eq=False, kw_only=True):
    """
    A stretch of one stream and what became of its records.

    Attributes:
        opened_at: When it was handed to the batcher, on the event loop's clock.
        chunk: Where its records stand as they came; None once no record is unsettled.
        stretches: Of the chunk's data, start and end: each line in them is an event, in the order of
            `EncodedChunk.lines`, as long as `bounds` is empty.
        bounds: Start and end in the chunk's data of each event, flat, in the same order.
        event_keys: Of the EventIds of its events, 16 bytes each, in the same order; none if the window is off, or no
            record is unsettled any more.
        keys: Of EventIds, 16 bytes each: of its events that are, or are to be, accepted.
        slot: Where the dedupe window has the first one, the others follow; -1 = nowhere together.
        fresh: So many events, the first ones, had a new EventId; those of the others are added to `keys` once accepted.
        sent_bytes: Length of its events as they are sent, less what those take in memory that wait for an answer.
        records: Complete records in the stretch; blank lines are none.
        unsettled: Records that are neither accepted nor rejected nor duplicates, yet.
        tail: The last bytes of the stretch, at most `MARKER_BYTES`: the marker, should the checkpoint come to its end.
        ledger: How many of its events are, or are to be, accepted; to be added up.
        repeated: How many of its records are duplicates; to be added up.
    """

    stream: Stream
    start_offset: int
    end_offset: int
    tail: bytes
    records: int
    unsettled: int
    opened_at: float = 0.0
    chunk: Chunk | None = None
    stretches: Sequence[tuple[int, int]] = ()
    bounds: array[int] = NO_BOUNDS
    event_keys: bytes = b""
    keys: bytes = b""
    slot: int = -1
    fresh: int = 0
    sent_bytes: int = 0
    accepted: int = 0
    duplicates: int = 0
    rejections: list[Rejection] = []
    ledger: list[Tally] = []
    repeated: list[Tally] = []

    def bounds_of(self, ordinal: int) -> tuple[int, int]:
        """
        Find an unsettled event as it came, by its place alone.

        Args:
            ordinal: Of the event among those of the span, from 0.
        Returns:
            Start and end in the data of the chunk.
        """
        assert self.chunk is not None
        if not self.bounds:
            self.bounds = array("I")
            for start, end in self.stretches:
                for line in self.chunk.data[start:end].removesuffix(b"\n").split(b"\n"):
                    self.bounds.extend((start, start + len(line)))
                    start += len(line) + 1
        return self.bounds[2 * ordinal], self.bounds[2 * ordinal + 1]


class _Identified(Struct):
    EventId: str


_identified: Final = Decoder(list[_Identified]).decode
_one_identified: Final = Decoder(_Identified).decode


def event_id_of(line: bytes) -> str:
    """Read the EventId of an event in the wire form."""
    return _one_identified(line).EventId


class EncodedChunk(Struct, frozen=True, eq=False, kw_only=True):
    """
    Validated events of one span, ready to be spliced into a body.

    Attributes:
        lines: Events in the wire form joined by a newline, none at the end; empty if no record was good.
        consumer_ids: One for each event, in order.
        has_new_event_ids: Whether each EventId is known to stand in no other unsettled event, and once in this chunk,
            but for empty ones and those that wait.
        repeats: The events whose ConsumerID stands in an event before: ordinal, start and end in `lines`.
        last_good: Where the last good record begins in the stream, duplicates included; -1 if there is none. Of
            records that are all good, where any of them begins.
        waits: So many events at the end have the EventId of one whose answer is not there: until then they wait.
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
        """The EventIds of its events, read from their lines."""
        return [event.EventId for event in _identified(b"[" + self.lines.replace(b"\n", b",") + b"]")]


class Batch(Struct, frozen=True, eq=False, kw_only=True):
    """
    Events that are sent in one request.

    Attributes:
        number: Counts the batches of a run, from 1.
        body: The request body, JSON.
        parts: Which span each run of events came from, and their ordinals there; in the order of the body.
    """

    number: int
    body: bytes
    events: int
    parts: list[tuple[Span, Sequence[int]]]


class Settled(Struct, frozen=True, eq=False):
    """
    What one answer of the service settles of a batch.

    Attributes:
        accepted: The events that it took.
        refused: Events that it refuses for good, each as a batch of its own, and why.
    """

    accepted: Batch | None
    refused: Sequence[tuple[Batch, Refusal]] = ()


class Checkpoint(Struct, frozen=True, eq=False, kw_only=True):
    """How far one stream is settled, with what became of the records since the last checkpoint, at `start_offset`."""

    stream: Stream
    end_offset: int
    tail: bytes
    read: int
    accepted: int
    duplicates: int
    rejections: list[Rejection]
    start_offset: int = 0
    ledger: Sequence[Tally] = ()
    repeated: Sequence[Tally] = ()
    keys: bytes = b""


def move_checkpoints(saved: Iterable[Checkpoint]) -> None:
    """Let streams resume at checkpoints that were saved."""
    for each in saved:
        each.stream.move_checkpoint(each.end_offset, each.tail)


class Totals(Struct, kw_only=True):
    """What became of records; `read == accepted + dead_lettered + duplicates + pending`."""

    read: int = 0
    accepted: int = 0
    dead_lettered: int = 0
    duplicates: int = 0
    pending: int = 0
