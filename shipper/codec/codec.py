"""
The codec: takes chunks apart into pieces that fit a batch, brings records into the wire form, and has them judged.

A piece of lines is first judged as it stands, all lines at once. Only if that fails it is sorted out: blank lines are
dropped, the others are rewritten as far as the settings allow, all at once and column by column, and what still fails
is halved until the bad lines stand alone. Records that are no lines are always sorted out.
"""

from __future__ import annotations

import re
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, compress, islice
from operator import add, attrgetter, ne
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from shipper.codec.columns import Columns, tally
from shipper.codec.dedupe import ADMITTED_MAX, KEY_BYTES, NO_KEY, DedupeWindow, key_of, keys_of, new_window, split_keys
from shipper.codec.judge import SEPARATOR, Judge, Records, document_in
from shipper.codec.rewrite import Changes, Rewriter
from shipper.codec.rows import Unreadable, read_rows
from shipper.codec.rules import MESSAGES, NESTING_MAX, may_nest_deeply, nests_deeply
from shipper.config.settings import RecordsSettings
from shipper.model.framing import CUT_MARK, LINES, CsvRows, Frame, Framing, cut_record
from shipper.model.records import MARKER_BYTES, NO_BOUNDS, Chunk, EncodedChunk, Rejection, Span, Stream, flat_bounds
from shipper.system.native import NATIVE

_HOLE: Final = b"\0"  # in a sparse file, it stands in front of the first line behind it
_BLANKS: Final = b" \t\r\n" + _HOLE
_NONE: Final = Columns.of(())
_WAITING_BYTES: Final = 350  # of an event that waits for an answer, beside its line
_BLANK_LINES: Final = re.compile(rb"[ \t\r\0\n]*\n")
_PIECE_RECORDS: Final = 1000
# Ordinary lines for which it pays to ask the scanner. So many others are judged together that the brake notices a clock
# that is behind before any of them is refused.
_RUN_MIN: Final = 32
_OTHERS_MIN: Final = (
    4  # that may stand before ordinary lines and between them, and how many ordinary ones for each more
)
_OTHERS_SHARE: Final = 8


class _Piece(NamedTuple):
    """
    Some records of a chunk, judged.

    Attributes:
        end: Where it ends in the chunk's data.
        lines: The good ones as they are to be sent, joined by newlines.
        starts: Where the good ones begin in the stream; of lines that are all good, the first alone.
        ends: Where they end; none of lines that are all good.
    """

    end: int
    lines: bytes
    columns: Columns
    starts: list[int]
    ends: list[int]
    rejections: list[Rejection]
    changes: Changes

    @property
    def records(self) -> int:
        return len(self.columns.event_ids) + len(self.rejections)


class _Part(NamedTuple):
    """Events that follow one another in a body; `stretches`, `keys` and `consumer_ids` as in their span and piece."""

    stretches: Sequence[tuple[int, int]]
    lines: bytes
    keys: bytes
    consumer_ids: Sequence[int]


class _Walk(NamedTuple):
    """What no piece of a chunk has taken yet, so that the chunk is not searched again for each piece."""

    chunk: Chunk
    start: int
    first: Frame | None
    others: Iterator[Frame]


class Codec:
    """
    Validates chunks for one pipeline.

    Args:
        records: What a valid record is, and what is done to make one.
        max_record_bytes: Longest line, without its newline, that is a record.
        window: Of the EventIds that are known; None = one of its own.
        on_duplicate: Told the EventId, the stream and the offset of each duplicate.
        notes_unlisted: Whether to note `Changes.unlisted`.

    Attributes:
        changes: What was done to records to bring them into the wire form.
        window: Of the EventIds that are known.
    """

    def __init__(
        self,
        records: RecordsSettings,
        *,
        max_record_bytes: int,
        window: DedupeWindow | None = None,
        on_duplicate: Callable[[str, Stream, int], None] | None = None,
        notes_unlisted: bool = False,
    ) -> None:
        self._max_record_bytes = max_record_bytes
        self.window = new_window(records.dedupe_window) if window is None else window
        self._on_duplicate = on_duplicate
        self._rewriter = Rewriter(records, notes_unlisted=notes_unlisted)
        self._expects_rewriting = self._rewriter.is_mapping
        self._keeps_unknown = records.unknown_fields == "keep"
        self._has_any_ids = "event_id" in records.relax
        self.changes = Changes()
        self._judge = Judge(records)
        self._mean_line_bytes = 350.0
        self._walk: _Walk | None = None
        self._scans = isinstance(self.window, getattr(NATIVE, "DedupeWindow", ())) and records.passes_wire_form
        self._scanned: tuple[Chunk, Any] | None = None  # the chunk that was scanned last, and what was found in it
        self._not_scanned = 0  # so many lines are judged here before the scanner is asked again
        self._not_scanned_next = 1

    def encode(
        self, chunk: Chunk, offset: int, *, room_events: int, room_bytes: int, latest: str
    ) -> EncodedChunk | None:
        """
        Validate the next lines of a chunk.

        Args:
            offset: Where in the stream to go on: the chunk's start, or the last piece's end.
            room_events: Most events to take, at least 1.
            room_bytes: Most bytes to take, newlines included.
            latest: Last instant that a Timestamp may name, `YYYY-MM-DDThh:mm:ssZ`.
        Returns:
            The piece that starts at `offset`, at least one line; None if not one line fits into the room, which
            does not happen while that is as much as the longest record.
        """
        if chunk.is_oversized:
            return self._refuse_oversized(chunk)
        start = offset - chunk.start_offset
        room_events = min(room_events, ADMITTED_MAX)
        if chunk.stream.framing is LINES:
            if self._scans and chunk.stream.kind != "replay":
                encoded = None if self._not_scanned else self._scan(chunk, offset, room_events, room_bytes, latest)
                if encoded is not None:
                    return encoded
                room_events, self._not_scanned = min(room_events, self._not_scanned or 1), 0
            piece = self._take_lines(chunk, start, room_events, room_bytes, latest)
        else:
            piece = self._take_frames(chunk, start, room_events, latest)
        if piece is None:
            return None
        if len(piece.lines) > room_bytes:  # rewriting made them longer
            if piece.records == 1:
                return None
            fewer = max(1, piece.records // 2)
            return self.encode(chunk, offset, room_events=fewer, room_bytes=room_bytes, latest=latest)
        return self._finished(chunk, offset, piece)

    def encode_all(
        self, chunk: Chunk, *, room_bytes: int, latest: str, start_offset: int | None = None
    ) -> Iterator[EncodedChunk]:
        """
        Validate a chunk to its end piece by piece, where nothing is sent.

        Args:
            room_bytes: Most bytes of a piece; as much as the longest record.
            latest: As for `encode`.
            start_offset: Of the first record; None = the chunk's own.
        """
        offset = chunk.start_offset if start_offset is None else start_offset
        while offset < chunk.end_offset:
            piece = self.encode(chunk, offset, room_events=_PIECE_RECORDS, room_bytes=room_bytes, latest=latest)
            assert piece is not None, "a record alone always fits"
            yield piece
            offset = piece.span.end_offset

    def refuse_unseen(self, chunk: Chunk, offset: int) -> EncodedChunk:
        """Refuse the next record without a look at what is in it; arguments and result as for `encode`."""
        data, framing = chunk.data, chunk.stream.framing
        start = _first_line(chunk, offset - chunk.start_offset)
        frame = next(framing.frames(data, start), None)
        if frame is None:
            return self._finished(chunk, offset, _Piece(len(data), b"", _NONE, [], [], [], Changes()))
        rejection = Rejection(
            start_offset=chunk.start_offset + frame.start,
            end_offset=chunk.start_offset + frame.end,
            rule="stuck",
            message=MESSAGES["stuck"],
            raw=data[frame.start : frame.end],
            header=framing.header if isinstance(framing, CsvRows) else b"",
        )
        return self._finished(chunk, offset, _Piece(frame.cut, b"", _NONE, [], [], [rejection], Changes()))

    def forget(self, encoded: EncodedChunk) -> None:
        """Take a piece back, which is to be encoded once more."""
        span = encoded.span
        if span.slot >= 0:
            self.window.take_back(span.slot, span.keys)
        else:
            for key in split_keys(span.event_keys[: KEY_BYTES * span.fresh]):
                self.window.forget(key)

    def is_current(self, encoded: EncodedChunk) -> bool:
        """Return whether the answers that events of a piece wait for are still to come."""
        waiting = encoded.span.event_keys[KEY_BYTES * (encoded.events - encoded.waits) :] if encoded.waits else b""
        return all(map(self.window.is_unsettled, split_keys(waiting)))

    def document_of(self, raw: bytes, framing: Framing) -> dict[str, object]:
        """Return a record as the rules see it, as far as it can be read at all; for messages to people."""
        changes = Changes()
        if isinstance(framing, CsvRows):
            (row,) = read_rows([raw], framing)
            lines = [] if isinstance(row, Unreadable) else self._rewriter.write([row], changes)
        else:
            lines = self._rewriter.rewrite([raw.replace(b"\n", b"\r")], changes)
        return (document_in(lines[0]) if lines else None) or {}

    def _finished(self, chunk: Chunk, offset: int, piece: _Piece) -> EncodedChunk:
        """Leave out duplicates, and tell what became of the piece that starts at `offset`."""
        self.changes.add(piece.changes)
        last_good = piece.starts[-1] if piece.starts else -1
        repeated, waits, waiting_bytes = _NONE, 0, 0
        is_watched = self.window.is_on and chunk.stream.kind != "replay"  # each of the letters is sent
        event_keys = self._keys_of(piece.columns.event_ids) if self.window.is_on else b""
        keys, slot = self._admit(event_keys) if is_watched else (b"", -1)
        if slot is None:
            piece, repeated, waiting = self._without_duplicates(piece, event_keys, chunk.stream)
            waits = len(waiting)
            waiting_bytes = 2 * sum(map(len, waiting)) + _WAITING_BYTES * waits  # in the chunk, and each by itself
            event_keys = self._keys_of(piece.columns.event_ids)
            keys, slot = self._admit(event_keys[: len(event_keys) - KEY_BYTES * waits])
            assert slot is not None
        columns = piece.columns
        events = len(columns.event_ids)
        span = Span(
            stream=chunk.stream,
            start_offset=offset,
            end_offset=chunk.start_offset + piece.end,
            tail=chunk.data[max(0, piece.end - MARKER_BYTES) : piece.end],
            records=piece.records + len(repeated.event_ids),
            unsettled=events,
            duplicates=len(repeated.event_ids),
            rejections=piece.rejections,
            chunk=chunk if events else None,
            stretches=[(piece.starts[0] - chunk.start_offset, piece.end)] if events else (),
            bounds=_bounds_of(piece, chunk.start_offset),
            event_keys=event_keys,
            keys=keys,
            slot=slot,
            fresh=events - waits if is_watched else 0,
            sent_bytes=len(piece.lines) - waiting_bytes,
            ledger=[tally(columns)],
            repeated=[tally(repeated)] if repeated.event_ids else [],
        )
        return EncodedChunk(
            span=span,
            lines=piece.lines,
            events=events,
            consumer_ids=columns.consumer_ids,
            has_new_event_ids=is_watched,
            repeats=repeats_in(columns.consumer_ids, piece.lines),
            last_good=last_good,
            waits=waits,
        )

    def _keys_of(self, event_ids: list[str]) -> bytes:
        return b"".join(map(key_of, event_ids)) if self._has_any_ids else keys_of(event_ids)

    def _admit(self, event_keys: bytes) -> tuple[bytes, int | None]:
        """Return the keys of ids that are some, and the slot of the first; -1 = not together, None = one is known."""
        keys = event_keys
        if self._has_any_ids:
            keys = b"".join(key for key in split_keys(event_keys) if key != NO_KEY)
        slot = self.window.admit(keys) if keys else -1
        return keys, slot if len(keys) == len(event_keys) or slot is None else -1

    def _scan(self, chunk: Chunk, offset: int, room_events: int, room_bytes: int, latest: str) -> EncodedChunk | None:
        """
        Take the next lines natively as far as nearly all of them are ordinary; the others between them are judged here.

        None if the first lines are not, or have no room. Where two that are not follow one another, they begin the next
        piece: with many others, should there be more of them.
        """
        data = chunk.data
        start = end = _first_line(chunk, offset - chunk.start_offset)
        runs: list[EncodedChunk] = []
        others: list[tuple[int, int]] = []
        taken, is_left, others_min = 0, False, 0 if self._not_scanned_next else _OTHERS_MIN
        while True:
            room = room_events - taken - len(others)
            run, is_stopped = self._scan_run(chunk, end, room, room_bytes - (end - start), latest)
            if run is not None:
                runs.append(run)
                taken += run.events
                end = run.span.end_offset - chunk.start_offset
            elif is_stopped and taken:
                end, _ = others.pop()
                is_left = True
            is_left = is_left or (is_stopped and len(others) == others_min + taken // _OTHERS_SHARE)
            if is_left or not is_stopped:
                break
            newline = data.find(b"\n", end)
            line_end = len(data) if newline < 0 else newline
            if line_end - start > room_bytes:
                break
            others.append((end, line_end))
            end = min(line_end + 1, len(data))
        # Where few lines are ordinary, more and more of them are judged before the scanner is asked again.
        is_few = is_left and taken < _RUN_MIN
        self._not_scanned = min(max(_RUN_MIN, 2 * self._not_scanned_next), ADMITTED_MAX) if is_few else 0
        self._not_scanned_next = self._not_scanned
        if not taken:
            return None
        runs[0].span.start_offset = offset
        if not others:
            return runs[0]
        raws = [data[begin:stop] for begin, stop in others]
        starts = [chunk.start_offset + begin for begin, _ in others]
        piece = self._sorted_out(raws, starts, end, latest, may_be_cut=_may_be_cut(chunk, start, end))
        length = len(piece.lines) + sum(len(run.lines) + 1 for run in runs)
        if length > room_bytes or self._comes_before(piece, runs):
            for run in reversed(runs):
                self.forget(run)
            self._not_scanned = taken + len(others)
            return None
        return self._joined(offset, runs, self._finished(chunk, offset, piece))

    def _scan_run(
        self, chunk: Chunk, start: int, room_events: int, room_bytes: int, latest: str
    ) -> tuple[EncodedChunk | None, bool]:
        """Take ordinary lines that follow one another; also tells whether the next one is not, or is known."""
        data = chunk.data
        if self._scanned is None or self._scanned[0] is not chunk:
            self._scanned = chunk, chunk.scan or NATIVE.scan(data)
        events, end, slot, keys, consumer_ids, repeats, ledger, is_stopped = self._scanned[1].take(
            data, start, room_events, max(0, room_bytes), self._max_record_bytes, latest, self.window
        )
        if not events:
            return None, is_stopped
        lines = data[start : end - 1] if data.endswith(b"\n", start, end) else data[start:end]
        span = Span(
            stream=chunk.stream,
            start_offset=chunk.start_offset + start,
            end_offset=chunk.start_offset + end,
            tail=data[max(0, end - MARKER_BYTES) : end],
            records=events,
            unsettled=events,
            chunk=chunk,
            stretches=((start, end),),
            event_keys=keys,
            keys=keys,
            slot=slot,
            fresh=events if self.window.is_on else 0,
            sent_bytes=len(lines),
            ledger=[ledger],
        )
        run = EncodedChunk(
            span=span,
            lines=lines,
            events=events,
            consumer_ids=memoryview(consumer_ids).cast("q"),
            has_new_event_ids=self.window.is_on,
            repeats=[(ordinal, begin - start, stop - start) for ordinal, begin, stop in repeats],
            last_good=span.start_offset,
        )
        return run, is_stopped

    def _comes_before(self, piece: _Piece, runs: list[EncodedChunk]) -> bool:
        """Return whether a record has the EventId of one in a run behind it, which has taken its place."""
        if not self.window.is_on:
            return False
        return any(
            self.window.is_unsettled(key)
            and any(key in split_keys(run.span.keys) for run in runs if run.span.start_offset > start)
            for key, start in zip(split_keys(keys_of(piece.columns.event_ids)), piece.starts, strict=True)
        )

    def _joined(self, offset: int, runs: list[EncodedChunk], others: EncodedChunk) -> EncodedChunk:
        """Put records that were judged by themselves into their places between runs; those that wait to the end."""
        span = others.span
        bounds = zip(span.bounds[::2], span.bounds[1::2], strict=True)
        keys = split_keys(span.event_keys) or (b"",) * others.events
        singles = zip(bounds, others.lines.split(b"\n"), keys, others.consumer_ids, strict=False)
        parts = [_Part((place,), line, key, (consumer_id,)) for place, line, key, consumer_id in singles]
        fresh = others.events - others.waits
        parts[:fresh] = sorted(
            [*parts[:fresh], *(_Part(run.span.stretches, run.lines, run.span.keys, run.consumer_ids) for run in runs)],
            key=attrgetter("stretches"),
        )
        for each in (others, *reversed(runs)):
            self.forget(each)
        events = others.events + sum(run.events for run in runs)
        lines, event_keys = b"\n".join([part.lines for part in parts]), b"".join([part.keys for part in parts])
        consumer_ids = list(chain.from_iterable(part.consumer_ids for part in parts))
        admitted = event_keys[: len(event_keys) - KEY_BYTES * others.waits]
        slot = self.window.admit(admitted) if self.window.is_on else -1
        assert slot is not None, "each of them was new by itself, and none stands twice"
        joined = replace(
            span,
            start_offset=offset,
            records=span.records + sum(run.events for run in runs),
            unsettled=events,
            chunk=runs[0].span.chunk,
            stretches=[place for part in parts for place in part.stretches],
            bounds=NO_BOUNDS,
            event_keys=event_keys,
            keys=admitted,
            slot=slot,
            fresh=events - others.waits if self.window.is_on else 0,
            sent_bytes=span.sent_bytes + sum(run.span.sent_bytes for run in runs),
            ledger=[tally for each in (*runs, others) for tally in each.span.ledger],
        )
        return EncodedChunk(
            span=joined,
            lines=lines,
            events=events,
            consumer_ids=consumer_ids,
            has_new_event_ids=self.window.is_on,
            repeats=repeats_in(consumer_ids, lines),
            last_good=max(others.last_good, runs[-1].last_good),
            waits=others.waits,
        )

    def _take_lines(self, chunk: Chunk, start: int, room_events: int, room_bytes: int, latest: str) -> _Piece | None:
        """Judge the next lines, all at once if they are good; None if not one of them fits."""
        data = chunk.data
        start = _first_line(chunk, start)
        end, count, array = self._cut(data, start, room_events, room_bytes)
        if end == start and end < len(data):
            return None
        lines = data[start : end - 1] if data.endswith(b"\n", start, end) else data[start:end]
        if (
            count
            and not self._expects_rewriting
            and (len(lines) <= self._max_record_bytes or not self._may_have_long_line(lines))
            and not (self._keeps_unknown and may_nest_deeply(lines, count))
        ):
            columns = self._judge.validate(array, count, latest)
            if columns is not None:
                return _Piece(end, lines, columns, [chunk.start_offset + start], [], [], Changes())
        raws = lines.split(b"\n")
        offsets = _line_offsets(raws, chunk.start_offset + start)
        return self._sorted_out(raws, offsets, end, latest, may_be_cut=_may_be_cut(chunk, start, end))

    def _take_frames(self, chunk: Chunk, start: int, room_events: int, latest: str) -> _Piece:
        """Judge the next records of an input in which a record is not a line."""
        data, framing = chunk.data, chunk.stream.framing
        start = first_record(chunk, start)
        walk, self._walk = self._walk, None
        if walk is None or walk.chunk is not chunk or walk.start != start:
            frames = framing.frames(data, start)
            walk = _Walk(chunk, start, next(frames, None), frames)
        taken = [] if walk.first is None else [walk.first, *islice(walk.others, room_events - 1)]
        raws = [data[begin:end] for begin, end, _ in taken]
        starts = [chunk.start_offset + begin for begin, _, _ in taken]
        end = len(data)
        if (following := next(walk.others, None)) is not None:
            end = taken[-1].cut
            self._walk = _Walk(chunk, end, following, walk.others)
        csv = framing if isinstance(framing, CsvRows) else None
        return self._sorted_out(raws, starts, end, latest, csv, may_be_cut=_may_be_cut(chunk, start, end))

    def _sorted_out(
        self,
        raws: list[bytes],
        offsets: list[int],
        end: int,
        latest: str,
        csv: CsvRows | None = None,
        *,
        may_be_cut: bool = False,
    ) -> _Piece:
        """Bring records into the wire form and part the good ones from the bad ones; `end` is where they end."""
        rejections: list[Rejection] = []
        if may_be_cut:
            raws, offsets = _without_cut(raws, offsets, rejections)
        records = whole = _shallow(self._without_blanks(raws, offsets, rejections), rejections)
        changes = Changes()
        if records.raws and (csv is not None or self._rewriter.is_needed):
            records = self._rewritten(whole, csv, changes, rejections)
            if csv is None:
                self._expects_rewriting = self._rewriter.is_mapping or records.wires != whole.wires
        good = self._judge.part(records, latest, rejections)
        if rejections and (changes.normalized or changes.unlisted):  # what is refused was not rewritten in the end
            refused, undone = {rejection.start_offset for rejection in rejections}, Changes()
            at_fault = whole.only([at for at, offset in enumerate(whole.offsets) if offset in refused])
            self._rewritten(at_fault, csv, undone, [])
            changes.normalized.subtract(undone.normalized)
            changes.unlisted.subtract(undone.unlisted)
        rejections.sort(key=attrgetter("start_offset"))
        if csv is not None:
            rejections = [replace(rejection, header=csv.header) for rejection in rejections]
        return _Piece(end, good.lines, good.columns, good.starts, good.ends, rejections, changes)

    def _rewritten(
        self, records: Records, csv: CsvRows | None, changes: Changes, rejections: list[Rejection]
    ) -> Records:
        """Bring records into the wire form, as far as the settings say."""
        if not records.raws:
            return records
        if csv is not None:
            return self._read_rows(records, csv, changes, rejections)
        wires = self._rewriter.rewrite(records.wires, changes)
        return self._fitting(records._replace(wires=wires), rejections)

    def _without_blanks(self, raws: list[bytes], offsets: list[int], rejections: list[Rejection]) -> Records:
        """Leave out what is no record, and what is too long for one."""
        if {raw[:1] for raw in raws} != {b"{"}:
            bare = [raw.lstrip(_HOLE) for raw in raws]
            offsets = [offset + len(raw) - len(line) for offset, raw, line in zip(offsets, raws, bare, strict=True)]
            kept = [index for index, line in enumerate(bare) if line.strip(_BLANKS)]
            raws, offsets = [bare[index] for index in kept], [offsets[index] for index in kept]
        # Elements of an array may be written over several lines. A carriage return is as good as that newline where it
        # is white space, and as bad within a string.
        wires = [raw.replace(b"\n", b"\r") for raw in raws] if any(b"\n" in raw for raw in raws) else raws
        return self._fitting(Records(offsets, raws, wires), rejections)

    def _fitting(self, records: Records, rejections: list[Rejection]) -> Records:
        """Refuse the records that are too long, as they came or as they would be sent."""
        if max(map(len, chain(records.raws, records.wires)), default=0) <= self._max_record_bytes:
            return records
        fitting = []
        for index, forms in enumerate(zip(records.raws, records.wires, strict=True)):
            if max(map(len, forms)) > self._max_record_bytes:
                rejections.append(records.refused(index, "oversized"))
            else:
                fitting.append(index)
        return records.only(fitting)

    def _read_rows(self, records: Records, csv: CsvRows, changes: Changes, rejections: list[Rejection]) -> Records:
        """Make JSON of rows; those that cannot be read are added to `rejections`."""
        readable: list[int] = []
        documents: list[dict[str, str]] = []
        for index, row in enumerate(read_rows(records.raws, csv)):
            if isinstance(row, Unreadable):
                rejections.append(records.refused(index, *row))
            else:
                readable.append(index)
                documents.append(row)
        wires = self._rewriter.write(documents, changes) if documents else []
        return self._fitting(records.only(readable)._replace(wires=wires), rejections)

    def _cut(self, data: bytes, start: int, room_events: int, room_bytes: int) -> tuple[int, int, bytes]:
        """
        Find where a piece of at most `room_events` lines ends, and make the array that the fast path decodes.

        Counting newlines costs as much as checking a column. So the end is guessed from the mean line length, a
        little short; how many lines that was is told by the splicing that has to be done anyway; the few missing
        ones are walked.

        Returns:
            The end (after a newline or at the end of the data; `start` if no line fits), the number of lines,
            and the array: `[line,null,\\nline,null,\\n ... null]`.
        """
        limit = min(len(data), start + room_bytes + 1)  # the last newline of a piece does not come into a body
        guess = min(limit, start + int(self._mean_line_bytes * room_events * 0.98))
        end = max(start, data.rfind(b"\n", start, guess) + 1)
        guessed = data[start:end].replace(b"\n", SEPARATOR)
        count = (len(guessed) - (end - start)) // (len(SEPARATOR) - 1)
        if count > room_events:
            end, guessed, count = start, b"", 0
        walked = end
        while count < room_events and walked < limit:
            newline = data.find(b"\n", walked, limit)
            if newline < 0:
                break
            walked = newline + 1
            count += 1
        rest = data[end:walked].replace(b"\n", SEPARATOR)
        if walked < len(data) <= start + room_bytes and count < room_events and data.find(b"\n", walked) < 0:
            rest += data[walked:] + SEPARATOR  # the last line of an input that has ended
            walked = len(data)
            count += 1
        if not count:
            newline = data.find(b"\n", start)
            line_end = len(data) if newline < 0 else newline
            if line_end - start > self._max_record_bytes:  # it will be refused, so it needs no room
                walked, count = min(line_end + 1, len(data)), 1
        if count:
            self._mean_line_bytes = min((walked - start) / count, self._max_record_bytes)
        return walked, count, b"".join((b"[", guessed, rest, b"null]"))

    def _may_have_long_line(self, lines: bytes) -> bool:
        """
        Return whether a line may exceed the limit; False is certain.

        A line longer than the limit covers one of the windows of half that size, so a newline in each of them
        proves that there is none.
        """
        window = max(1, self._max_record_bytes // 2)
        return any(lines.find(b"\n", at, at + window) < 0 for at in range(0, len(lines) - window + 1, window))

    def _without_duplicates(
        self, piece: _Piece, event_keys: bytes, stream: Stream
    ) -> tuple[_Piece, Columns, list[bytes]]:
        """
        Leave out the events whose EventId was accepted, and put those whose EventId is unsettled to the end.

        Returns:
            The piece, the events that are left out, and the lines of those at the end.
        """
        lines = piece.lines.split(b"\n")
        starts, ends = piece.starts, piece.ends
        if not ends:
            starts = _line_offsets(lines, starts[0])
            ends = list(map(add, starts, map(len, lines)))
        seen: set[bytes] = set()
        new: list[int] = []
        waiting: list[int] = []
        repeated: list[Any] = []
        for index, key in enumerate(split_keys(event_keys)):
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
        left = piece._replace(
            lines=b"\n".join([lines[index] for index in kept]),
            columns=Columns.of([piece.columns.events[index] for index in kept]),
            starts=[starts[index] for index in kept],
            ends=[ends[index] for index in kept],
        )
        return left, Columns.of(repeated), [lines[index] for index in waiting]

    @staticmethod
    def _refuse_oversized(chunk: Chunk) -> EncodedChunk:
        """Settle a line of which only the position is known."""
        rejection = Rejection(
            start_offset=chunk.start_offset,
            end_offset=chunk.end_offset,
            rule="oversized",
            message=MESSAGES["oversized"],
            raw=b"",
        )
        span = Span(
            stream=chunk.stream,
            start_offset=chunk.start_offset,
            end_offset=chunk.end_offset,
            tail=b"",
            records=1,
            unsettled=0,
            rejections=[rejection],
        )
        return EncodedChunk(
            span=span,
            lines=b"",
            events=0,
            consumer_ids=(),
            has_new_event_ids=True,
        )


def first_record(chunk: Chunk, start: int) -> int:
    """Return where the first record after `start` begins: behind a byte-order mark or the header of the input."""
    if chunk.start_offset + start:
        return start
    framing = chunk.stream.framing
    if isinstance(framing, CsvRows):
        return len(framing.header)
    return len(BOM_UTF8) if chunk.data.startswith(BOM_UTF8) else 0


def _first_line(chunk: Chunk, start: int) -> int:
    """Return where the first line after `start` begins that is not blank; there may be millions that are."""
    start = first_record(chunk, start)
    blank = _BLANK_LINES.match(chunk.data, start)
    return blank.end() if blank else start


def repeats_in(consumer_ids: Sequence[int], lines: bytes) -> list[tuple[int, int, int]]:
    """Find the events whose ConsumerID stands in an event before: ordinal, start and end in `lines`."""
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


def _bounds_of(piece: _Piece, origin: int) -> array[int]:
    """Return where the good records stand in the chunk's data; nothing if they are its lines from the first one on."""
    if not piece.ends:
        return NO_BOUNDS
    return flat_bounds((start - origin, end - origin) for start, end in zip(piece.starts, piece.ends, strict=True))


def _may_be_cut(chunk: Chunk, start: int, end: int) -> bool:
    """Return whether the spool has kept only the beginning of some record."""
    return chunk.stream.kind == "spool" and chunk.data.find(CUT_MARK, start, end) >= 0


def _without_cut(raws: list[bytes], offsets: list[int], rejections: list[Rejection]) -> tuple[list[bytes], list[int]]:
    """Refuse the records of which only the beginning is there, whatever it may look like."""
    left: list[int] = []
    for index, (raw, offset) in enumerate(zip(raws, offsets, strict=True)):
        cut = cut_record(raw)
        if cut is None:
            left.append(index)
            continue
        kept, whole_bytes = cut
        message = f"{MESSAGES['oversized']}; cut: its first {len(kept):,} of {whole_bytes:,} bytes are kept"
        refused = Records([offset], [kept], [kept]).refused(0, "oversized", message)
        rejections.append(replace(refused, end_offset=offset + len(raw), whole_bytes=whole_bytes))
    return [raws[index] for index in left], [offsets[index] for index in left]


def _line_offsets(lines: list[bytes], first: int) -> list[int]:
    """Return where each line begins."""
    ends = accumulate(map(len, lines), lambda offset, length: offset + length + 1, initial=first)
    return list(ends)[:-1]


def _shallow(records: Records, rejections: list[Rejection]) -> Records:
    """Refuse the records that are nested too deep."""
    objects = [raw[:1] for raw in records.raws].count(b"{")
    if not may_nest_deeply(b"".join(records.raws), objects):
        return records
    is_deep = list(map(nests_deeply, records.raws))
    message = f"the line is nested deeper than {NESTING_MAX} levels"
    rejections += (records.refused(index, "json", message) for index, deep in enumerate(is_deep) if deep)
    return records.only([index for index, deep in enumerate(is_deep) if not deep])
