"""
The codec: splits chunks into pieces that fit into a batch, rewrites records to the wire form, and validates them.

The native scanner, if available, accepts ordinary lines, which are in the wire form already; the other lines are
validated here and merged with them. Without the scanner, all lines are first validated unchanged and together. Only if
that fails are they separated: blank lines are dropped, the others are rewritten column by column, as far as the
settings allow, and pieces that still fail are halved until each invalid line is found. Records that are not lines
always take this path.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate, chain, compress, islice
from operator import add, attrgetter, ne
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from shipper.codec.dedupe import KEY_BYTES, NO_KEY, DedupeWindow, key_of, keys_of, new_window, split_keys
from shipper.codec.documents import read_rows
from shipper.codec.judge import Judge, Records
from shipper.codec.rewrite import Changes, Rewriter
from shipper.codec.rules import MESSAGES, NESTING_MAX, Columns, may_nest_deeply, nests_deeply, tally
from shipper.config.settings import RecordsSettings
from shipper.model.framing import BLANKS, CUT_MARK, LINES, CsvRows, Frame, parse_cut_record
from shipper.model.records import (
    MARKER_BYTES,
    NO_BOUNDS,
    Chunk,
    EncodedChunk,
    Rejection,
    Span,
    Stream,
    Tally,
    flat_bounds,
)
from shipper.system.native import NATIVE

_HOLE: Final = b"\0"  # fills the hole of a sparse file, before the next line
_BLANK_LINES: Final = re.compile(rb"[ \t\r\0\n]*\n")
_PIECE_RECORDS: Final = 1000
_WAITING_BYTES: Final = 350  # of an event waiting for an answer, besides its line
_NO_COLUMNS: Final = Columns.of(())


class _Piece(NamedTuple):
    """Validated records of a chunk."""

    end: int
    lines: list[bytes]  # the valid records as they are sent; if all lines are valid unchanged, one text
    columns: Columns
    starts: list[int]  # offsets of the valid records in the stream; if all lines are valid unchanged, only the first
    ends: list[int]  # ends of the valid records in the stream; empty if all lines are valid unchanged
    rejections: list[Rejection]
    changes: Changes | None  # None if nothing was rewritten

    @classmethod
    def rejected(cls, end: int, rejections: list[Rejection]) -> _Piece:
        return cls(end, [], _NO_COLUMNS, [], [], rejections, None)


class _Scanned(NamedTuple):
    """Natively scanned lines of a chunk."""

    end: int  # of the lines in the chunk's data
    stretches: Sequence[tuple[int, int, int]]  # runs of ordinary lines: start, end and number of lines
    others: Sequence[tuple[int, int]]  # start and end of each line to validate here
    keys: bytes  # of the ordinary lines, like all that follows
    consumer_ids: bytes
    repeats: Sequence[tuple[int, int, int]]  # as in `EncodedChunk`, if there are no other lines
    ledger: Tally


class _Events(NamedTuple):
    """Consecutive events of a body; `stretches` as in their span."""

    stretches: Sequence[tuple[int, int]]
    lines: bytes
    keys: bytes
    consumer_ids: Sequence[int]


class Codec:
    """
    Validates chunks for one pipeline.

    Args:
        records: Which records are valid, and how they are normalised.
        max_record_bytes: Maximum length of a record, without its newline.
        on_duplicate: Called with the EventId, the stream and the offset of each duplicate.

    Attributes:
        changes: Counts of changes made to records.
    """

    def __init__(
        self,
        records: RecordsSettings,
        *,
        max_record_bytes: int,
        window: DedupeWindow | None = None,
        on_duplicate: Callable[[str, Stream, int], None] | None = None,
    ) -> None:
        self._max_record_bytes = max_record_bytes
        self.window = new_window(records.dedupe_window) if window is None else window
        self._on_duplicate = on_duplicate
        self._rewriter = Rewriter(records)
        self._expects_changes = self._rewriter.is_mapping
        self._keeps_unknown = records.unknown_fields == "keep"
        self._has_any_ids = "event_id" in records.relax
        self.changes = Changes()
        self._judge = Judge(records)
        self._is_scanning = isinstance(self.window, getattr(NATIVE, "DedupeWindow", ())) and records.passes_wire_form
        self._scan: tuple[Chunk, Any] | None = None  # of the last chunk
        self._frames: tuple[Chunk, int, Iterator[Frame]] | None = None  # of the last chunk, from an offset

    def encode(
        self, chunk: Chunk, offset: int, *, room_events: int, room_bytes: int, latest: str
    ) -> EncodedChunk | None:
        """
        Validate the next records of a chunk.

        Args:
            offset: Offset in the stream: the start of the chunk, or the end of the previous piece.
            room_events: Maximum number of events, at least 1.
            room_bytes: Maximum bytes, newlines included.
            latest: The latest valid Timestamp, `YYYY-MM-DDThh:mm:ssZ`.
        Returns:
            The piece that starts at `offset`, at least one line; None if not even one line fits, which is impossible if
            there is room for the longest record.
        """
        if chunk.is_oversized:
            return self._reject_oversized_line(chunk)
        start = _first_line(chunk, offset - chunk.start_offset)
        scanned: _Scanned | None = None
        piece: _Piece | None
        if chunk.stream.framing is not LINES:
            piece = self._take_frames(chunk, start, room_events, latest)
        elif (scanned := self._take_ordinary(chunk, start, room_events, room_bytes, latest)) is None:
            piece = self._take_lines(chunk, start, room_events, room_bytes, latest)
        else:
            raws = [chunk.data[begin:end] for begin, end in scanned.others]
            offsets = [chunk.start_offset + begin for begin, _ in scanned.others]
            piece = self._separate(chunk, raws, offsets, scanned.end, latest)
        if piece is None:
            return None
        if self._must_shrink(chunk, piece, scanned, room_bytes):
            records = len(piece.columns.event_ids) + len(piece.rejections)
            if scanned is not None:
                self.window.forget(scanned.keys)
                records += sum(count for _, _, count in scanned.stretches)
            if records == 1:
                return None
            return self.encode(chunk, offset, room_events=records // 2, room_bytes=room_bytes, latest=latest)
        return self._finish(chunk, offset, piece, scanned)

    def encode_all(self, chunk: Chunk, *, room_bytes: int, latest: str) -> Iterator[EncodedChunk]:
        """Validate a whole chunk in pieces of at most `room_bytes`, which the longest record must fit."""
        offset = chunk.start_offset
        while offset < chunk.end_offset:
            piece = self.encode(chunk, offset, room_events=_PIECE_RECORDS, room_bytes=room_bytes, latest=latest)
            assert piece is not None, "a record alone always fits"
            yield piece
            offset = piece.span.end_offset

    def reject_unread(self, chunk: Chunk, offset: int) -> EncodedChunk:
        """Reject the next record without parsing it; arguments and result as for `encode`."""
        data, framing = chunk.data, chunk.stream.framing
        frames = framing.frames(data, first_record(chunk, offset - chunk.start_offset))
        frame = next((frame for frame in frames if data[frame.start : frame.end].strip(BLANKS)), None)
        if frame is None:
            return self._finish(chunk, offset, _Piece.rejected(len(data), []))
        rejection = Rejection(
            start_offset=chunk.start_offset + frame.start,
            end_offset=chunk.start_offset + frame.end,
            rule="stuck",
            message=MESSAGES["stuck"],
            raw=data[frame.start : frame.end],
            header=framing.header,
        )
        return self._finish(chunk, offset, _Piece.rejected(frame.cut, [rejection]))

    def forget(self, encoded: EncodedChunk) -> None:
        """Forget the EventIds of a piece that will be encoded again."""
        if encoded.has_new_event_ids:
            self.window.forget(encoded.span.event_keys[: KEY_BYTES * (encoded.events - encoded.waits)])

    def is_current(self, encoded: EncodedChunk) -> bool:
        """Return whether the waiting events of a piece still have to wait."""
        waiting = encoded.span.event_keys[KEY_BYTES * (encoded.events - encoded.waits) :] if encoded.waits else b""
        return all(map(self.window.is_unsettled, split_keys(waiting)))

    # Take and validate the next records ------------------------------------------------------------------------------

    def _take_ordinary(
        self, chunk: Chunk, start: int, room_events: int, room_bytes: int, latest: str
    ) -> _Scanned | None:
        """Scan the next lines and admit the EventIds of ordinary ones; return None if there are none."""
        if not self._is_scanning or chunk.stream.kind == "replay":
            return None
        if self._scan is None or self._scan[0] is not chunk:
            self._scan = chunk, chunk.scan or NATIVE.scan(chunk.data)
        room_bytes = max(0, room_bytes)
        scanned = _Scanned(
            *self._scan[1].take(chunk.data, start, room_events, room_bytes, self._max_record_bytes, latest, self.window)
        )
        return scanned if scanned.stretches else None

    def _take_lines(self, chunk: Chunk, start: int, room_events: int, room_bytes: int, latest: str) -> _Piece | None:
        """Validate the next lines, first unchanged and together; return None if not even one fits."""
        data = chunk.data
        reader = BytesIO(data)  # does not copy the data, and is faster than `split`
        reader.seek(start)
        lines = list(islice(reader, room_events))
        length = sum(map(len, lines))
        while len(lines) > 1 and length - lines[-1].endswith(b"\n") > room_bytes:  # the last newline is not sent
            length -= len(lines.pop())
        end = start + length
        original = data[start:end].removesuffix(b"\n")
        if room_bytes < len(original) <= self._max_record_bytes:  # a longer one is rejected, so it needs no room
            return None
        offset = chunk.start_offset + start
        if (
            lines
            and not self._expects_changes
            and max(map(len, lines)) <= self._max_record_bytes
            and not (self._keeps_unknown and may_nest_deeply(original, len(lines)))
        ):
            columns = self._judge.validate(lines, latest)
            if columns is not None:
                return _Piece(end, [original], columns, [offset], [], [], None)
        raws = [line.removesuffix(b"\n") for line in lines]
        return self._separate(chunk, raws, _offsets_of(raws, offset), end, latest)

    def _take_frames(self, chunk: Chunk, start: int, room_events: int, latest: str) -> _Piece:
        """Validate the next records of an input whose records are not lines."""
        data = chunk.data
        if self._frames is not None and self._frames[0] is chunk and self._frames[1] == start:
            frames = self._frames[2]  # avoids searching the chunk again for each piece
        else:
            frames = chunk.stream.framing.frames(data, start)
        taken = list(islice(frames, room_events))
        end = taken[-1].cut if len(taken) == room_events else len(data)
        self._frames = chunk, end, frames
        raws = [data[frame.start : frame.end] for frame in taken]
        return self._separate(chunk, raws, [chunk.start_offset + frame.start for frame in taken], end, latest)

    def _separate(self, chunk: Chunk, raws: list[bytes], offsets: list[int], end: int, latest: str) -> _Piece:
        """Rewrite records to the wire form, and separate the valid from the invalid ones; `end` is their end."""
        if not raws:
            return _Piece.rejected(end, [])
        csv = chunk.stream.framing if isinstance(chunk.stream.framing, CsvRows) else None
        rejections: list[Rejection] = []
        if chunk.stream.kind == "spool" and any(CUT_MARK in raw for raw in raws):
            offsets, raws, _ = _reject_cut(Records(offsets, raws, raws), rejections)
        records = original = _reject_deep(self._drop_blanks(raws, offsets, rejections), rejections)
        changes = Changes()
        if records.raws and (csv is not None or self._rewriter.is_needed):
            records = self._rewrite(original, csv, changes, rejections)
            if csv is None:
                self._expects_changes = self._rewriter.is_mapping or records.wires != original.wires
        good, columns = self._judge.split(records, latest, rejections)
        if rejections and (changes.normalized or changes.unlisted):  # rejected records do not count as rewritten
            rejected, undone = {rejection.start_offset for rejection in rejections}, Changes()
            affected = original.select([index for index, offset in enumerate(original.offsets) if offset in rejected])
            self._rewrite(affected, csv, undone, [])
            changes.normalized.subtract(undone.normalized)
            changes.unlisted.subtract(undone.unlisted)
        rejections.sort(key=attrgetter("start_offset"))
        if csv is not None:
            rejections = [replace(rejection, header=csv.header) for rejection in rejections]
        ends = list(map(add, good.offsets, map(len, good.raws)))
        return _Piece(end, good.wires, columns, good.offsets, ends, rejections, changes)

    def _drop_blanks(self, raws: list[bytes], offsets: list[int], rejections: list[Rejection]) -> Records:
        if {raw[:1] for raw in raws} != {b"{"}:
            stripped = [raw.lstrip(_HOLE) for raw in raws]
            offsets = [offset + len(raw) - len(line) for offset, raw, line in zip(offsets, raws, stripped, strict=True)]
            kept = [index for index, line in enumerate(stripped) if line.strip(BLANKS)]
            raws, offsets = [stripped[index] for index in kept], [offsets[index] for index in kept]
        # Elements of an array may contain newlines. A carriage return is equivalent: whitespace, or an error within a
        # string.
        wires = [raw.replace(b"\n", b"\r") for raw in raws] if any(b"\n" in raw for raw in raws) else raws
        return self._reject_oversized(Records(offsets, raws, wires), rejections)

    def _rewrite(self, records: Records, csv: CsvRows | None, changes: Changes, rejections: list[Rejection]) -> Records:
        """Rewrite records to the wire form, as far as the settings allow; reject unreadable rows."""
        if csv is None:
            wires = self._rewriter.rewrite(records.wires, changes) if records.raws else []
        else:
            documents, faults = read_rows(records.raws, csv)
            records = records.reject(faults, rejections)
            wires = self._rewriter.write(documents, changes) if documents else []
        return self._reject_oversized(records._replace(wires=wires), rejections)

    def _reject_oversized(self, records: Records, rejections: list[Rejection]) -> Records:
        """Reject the records that are too long, before or after rewriting."""
        limit = self._max_record_bytes
        if max(map(len, chain(records.raws, records.wires)), default=0) <= limit:
            return records
        lengths = enumerate(zip(map(len, records.raws), map(len, records.wires), strict=True))
        return records.reject({index: ("oversized", "") for index, both in lengths if max(both) > limit}, rejections)

    def _reject_oversized_line(self, chunk: Chunk) -> EncodedChunk:
        """Reject a line of which only the position is known."""
        start, end, message = chunk.start_offset, chunk.end_offset, MESSAGES["oversized"]
        rejection = Rejection(start_offset=start, end_offset=end, rule="oversized", message=message, raw=b"")
        return self._finish(chunk, start, _Piece.rejected(end - start, [rejection]))

    # Finish a piece -----------------------------------------------------------------------------------------

    def _must_shrink(self, chunk: Chunk, piece: _Piece, scanned: _Scanned | None, room_bytes: int) -> bool:
        """
        Return whether to take fewer records.

        Either rewriting has made them too long, or a later ordinary line with the EventId of a validated record was
        wrongly admitted first.
        """
        length = sum(map(len, piece.lines)) + len(piece.lines)
        if scanned is None:
            return length - 1 > room_bytes
        if length + sum(end + 1 - start for start, end, _ in scanned.stretches) - 1 > room_bytes:
            return True
        if not self.window.is_on or not piece.lines:
            return False
        for key, start in zip(split_keys(keys_of(piece.columns.event_ids)), piece.starts, strict=True):
            if self.window.is_unsettled(key):
                before = sum(count for begin, _, count in scanned.stretches if chunk.start_offset + begin < start)
                if key in split_keys(scanned.keys[KEY_BYTES * before :]):
                    return True
        return False

    def _finish(self, chunk: Chunk, offset: int, piece: _Piece, scanned: _Scanned | None = None) -> EncodedChunk:
        """Remove duplicates, and return the result for the piece that starts at `offset`."""
        if piece.changes is not None:
            self.changes.add(piece.changes)
        last_good = piece.starts[-1] if piece.starts else -1
        is_watched = self.window.is_on and chunk.stream.kind != "replay"  # replayed letters are all sent
        keys = self._keys_of(piece.columns.event_ids) if self.window.is_on else b""
        repeated, waits = _NO_COLUMNS, 0
        if is_watched and keys and not self._admit(keys):
            piece, keys, repeated, waits = self._without_duplicates(piece, keys, chunk.stream)
            is_new = self._admit(keys[: len(keys) - KEY_BYTES * waits])
            assert is_new, "the keys are new and unique"
        bounds = NO_BOUNDS
        ledger: list[Tally] = [tally(piece.columns)] if piece.lines else []
        if scanned is not None:
            events = _merge(chunk, scanned, piece, keys, waits)
            last_good = max(last_good, chunk.start_offset + scanned.stretches[-1][0])
            ledger.insert(0, scanned.ledger)
        else:
            stretch = [(piece.starts[0] - chunk.start_offset, piece.end)] if piece.lines else []
            events = _Events(stretch, b"\n".join(piece.lines), keys, piece.columns.consumer_ids)
            places = zip(piece.starts, piece.ends, strict=False)
            bounds = flat_bounds((start - chunk.start_offset, end - chunk.start_offset) for start, end in places)
        count = len(events.consumer_ids)
        waiting_bytes = sum(2 * len(line) + _WAITING_BYTES for line in piece.lines[len(piece.lines) - waits :])
        span = Span(
            stream=chunk.stream,
            start_offset=offset,
            end_offset=chunk.start_offset + piece.end,
            tail=chunk.data[max(0, piece.end - MARKER_BYTES) : piece.end],
            read=count + len(piece.rejections) + len(repeated.event_ids),
            unsettled=count,
            duplicates=len(repeated.event_ids),
            rejections=piece.rejections,
            chunk=chunk if count else None,
            stretches=events.stretches,
            bounds=bounds,
            event_keys=events.keys,
            sent_bytes=len(events.lines) - waiting_bytes,
            ledger=ledger,
            repeated=[tally(repeated)] if repeated.event_ids else [],
        )
        return EncodedChunk(
            span=span,
            lines=events.lines,
            events=count,
            consumer_ids=events.consumer_ids,
            has_new_event_ids=is_watched,
            repeats=scanned.repeats
            if scanned is not None and not piece.lines
            else find_repeats(events.consumer_ids, events.lines),
            last_good=last_good,
            waits=waits,
        )

    def _keys_of(self, event_ids: list[str]) -> bytes:
        return b"".join(map(key_of, event_ids)) if self._has_any_ids else keys_of(event_ids)

    def _admit(self, keys: bytes) -> bool:
        if self._has_any_ids:
            keys = b"".join(key for key in split_keys(keys) if key != NO_KEY)
        return not keys or self.window.admit(keys)

    def _without_duplicates(
        self, piece: _Piece, event_keys: bytes, stream: Stream
    ) -> tuple[_Piece, bytes, Columns, int]:
        """
        Remove the events whose EventId was accepted, and move those whose EventId is unsettled to the end.

        Returns:
            The piece, the keys of its events, the removed events, and the number of events moved to the end.
        """
        lines, starts, ends = piece.lines, piece.starts, piece.ends
        if not ends:
            lines = lines[0].split(b"\n")
            starts = _offsets_of(lines, starts[0])
            ends = list(map(add, starts, map(len, lines)))
        keys = split_keys(event_keys)
        seen: set[bytes] = set()
        new: list[int] = []
        waiting: list[int] = []
        repeated: list[Any] = []
        for index, key in enumerate(keys):
            if self.window.is_accepted(key):
                repeated.append(piece.columns.events[index])
                if self._on_duplicate is not None:
                    self._on_duplicate(piece.columns.event_ids[index], stream, starts[index])
            elif key != NO_KEY and (key in seen or self.window.is_unsettled(key)):
                waiting.append(index)
            else:
                seen.add(key)
                new.append(index)
        kept = new + waiting
        kept_piece = piece._replace(
            lines=[lines[index] for index in kept],
            columns=Columns.of([piece.columns.events[index] for index in kept]),
            starts=[starts[index] for index in kept],
            ends=[ends[index] for index in kept],
        )
        return kept_piece, b"".join([keys[index] for index in kept]), Columns.of(repeated), len(waiting)


def first_record(chunk: Chunk, start: int) -> int:
    """Return the start of the first record from `start` on, skipping a byte-order mark or a header."""
    if chunk.start_offset + start:
        return start
    if header := chunk.stream.framing.header:
        return len(header)
    return len(BOM_UTF8) if chunk.data.startswith(BOM_UTF8) else 0


def _first_line(chunk: Chunk, start: int) -> int:
    """Return the start of the first nonblank line at or after `start`; there may be millions of blank lines."""
    start = first_record(chunk, start)
    blank = _BLANK_LINES.match(chunk.data, start) if chunk.stream.framing is LINES else None
    return blank.end() if blank else start


def find_repeats(consumer_ids: Sequence[int], lines: bytes) -> list[tuple[int, int, int]]:
    """Return the events that repeat the ConsumerID of an earlier one: ordinal, start and end in `lines`."""
    count = len(consumer_ids)
    first = dict(zip(reversed(consumer_ids), range(count - 1, -1, -1), strict=True))
    if len(first) == count:
        return []
    lengths = list(map(len, lines.split(b"\n")))
    repeats, start, passed = [], 0, 0
    for ordinal in compress(range(count), map(ne, map(first.__getitem__, consumer_ids), range(count))):
        start += sum(lengths[passed:ordinal]) + ordinal - passed
        repeats.append((ordinal, start, start + lengths[ordinal]))
        passed = ordinal
    return repeats


def _merge(chunk: Chunk, scanned: _Scanned, piece: _Piece, keys: bytes, waits: int) -> _Events:
    """Merge validated events with the ordinary lines in input order, and put waiting events at the end."""
    ordinary: list[_Events] = []
    consumer_ids = memoryview(scanned.consumer_ids).cast("q")
    done = 0
    for start, end, count in scanned.stretches:
        keys_there = scanned.keys[KEY_BYTES * done : KEY_BYTES * (done + count)]
        ordinary.append(_Events([(start, end)], chunk.data[start:end], keys_there, consumer_ids[done : done + count]))
        done += count
    if not piece.lines and len(ordinary) == 1:
        return ordinary[0]
    places = [
        [(start - chunk.start_offset, end - chunk.start_offset)]
        for start, end in zip(piece.starts, piece.ends, strict=True)
    ]
    each_key = split_keys(keys) or [b""] * len(places)
    singles = list(map(_Events, places, piece.lines, each_key, zip(piece.columns.consumer_ids, strict=True)))
    new = len(singles) - waits
    parts = sorted([*ordinary, *singles[:new]], key=attrgetter("stretches")) + singles[new:]
    return _Events(
        [part.stretches[0] for part in parts],
        b"\n".join([part.lines for part in parts]),
        b"".join([part.keys for part in parts]),
        list(chain.from_iterable(part.consumer_ids for part in parts)),
    )


def _reject_cut(records: Records, rejections: list[Rejection]) -> Records:
    """Reject the records of which the spool stored only the beginning."""
    complete: list[int] = []
    for index, (offset, raw, _) in enumerate(zip(*records, strict=True)):
        cut = parse_cut_record(raw)
        if cut is None:
            complete.append(index)
            continue
        beginning, whole_bytes = cut
        message = (
            f"{MESSAGES['oversized']}; truncated: only its first {len(beginning):,} of {whole_bytes:,} bytes are stored"
        )
        rejection = Records([offset], [beginning], [beginning]).rejection(0, "oversized", message)
        rejections.append(replace(rejection, end_offset=offset + len(raw), whole_bytes=whole_bytes))
    return records.select(complete)


def _offsets_of(lines: list[bytes], first: int) -> list[int]:
    ends = accumulate(map(len, lines), lambda offset, length: offset + length + 1, initial=first)
    return list(ends)[:-1]


def _reject_deep(records: Records, rejections: list[Rejection]) -> Records:
    objects = [raw[:1] for raw in records.raws].count(b"{")
    if not may_nest_deeply(b"".join(records.raws), objects):
        return records
    fault = "json", f"the line is nested deeper than {NESTING_MAX} levels"
    return records.reject({i: fault for i, raw in enumerate(records.raws) if nests_deeply(raw)}, rejections)
