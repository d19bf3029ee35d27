"""
The codec: takes chunks apart into pieces that fit a batch, validates each piece, and names what is refused.

The fast path decodes a whole piece in one call. It writes `,null,` behind each line and decodes the lot as one JSON
array of events and nulls. A null cannot stand inside an object, and the newline is kept, so it cannot stand inside a
string: an object over two lines fails, and two objects on one line give a wrong count. So each line is proven to be
one event by itself, and any lines may be joined by commas into a body.

Only a piece that fails is sorted out: blank lines are dropped, and what is left is halved until the bad lines stand
alone. Both paths ask the same decoder and the same column checks, so that they give one verdict by construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from shipper.codec.dedupe import DedupeWindow
from shipper.codec.rules import FIELD_RULES, MESSAGES, are_btags, are_event_ids, are_ips, are_timestamps
from shipper.records import Chunk, EncodedChunk, Rejection, Span
from shipper.wire import ActivityEvent

MARKER_BYTES: Final = 64
_BOM: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r\0"
_SEPARATOR: Final = b",null,\n"
_FIELD_IN_MESSAGE: Final = re.compile(r"`\$\.(\w+)`$|required field `(\w+)`$")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `(.{0,64})", re.DOTALL)
_EVENT_ID: Final = re.compile(rb'"EventId"\s*:\s*"([0-9A-Fa-f-]{36})"')
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_event_id = attrgetter("EventId")
_ip = attrgetter("IP")
_timestamp = attrgetter("Timestamp")
_btag = attrgetter("BTag")
_consumer_id = attrgetter("ConsumerID")


class _Record(NamedTuple):
    """A line that is not blank; `offset` in the stream, `line` without newline and leading NULs."""

    offset: int
    line: bytes


class _Columns(NamedTuple):
    """What the later stages need of validated events, one value per line."""

    event_ids: list[str]
    consumer_ids: list[int]


class Codec:
    """
    Validates chunks for one pipeline.

    Args:
        max_record_bytes: Longest line, without its newline, that is a record.
        dedupe_window: EventIds to remember; a repeated one is a duplicate. 0 = none.
        on_duplicate: Told the EventId and the stream's path of each duplicate.
    """

    def __init__(
        self,
        *,
        max_record_bytes: int,
        dedupe_window: int,
        on_duplicate: Callable[[str, str], None] | None = None,
    ) -> None:
        self._max_record_bytes = max_record_bytes
        self._window = DedupeWindow(dedupe_window)
        self._on_duplicate = on_duplicate
        self._decode_array = msgspec.json.Decoder(list[ActivityEvent | None]).decode
        self._decode_line = msgspec.json.Decoder(ActivityEvent).decode
        self._mean_line_bytes = 350.0

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
            The piece that starts at `offset`, at least one line; None if not one line fits into the room.
        """
        if chunk.is_oversized:
            return self._refuse_oversized(chunk)
        data = chunk.data
        start = offset - chunk.start_offset
        if offset == 0 and data.startswith(_BOM):
            start = len(_BOM)
        end, count, array = self._cut(data, start, room_events, room_bytes)
        if end == start and end < len(data):
            return None
        has_newline = data.endswith(b"\n", start, end)
        lines = data[start : end - 1] if has_newline else data[start:end]
        rejections: list[Rejection] = []
        columns = None
        if count and (len(lines) <= self._max_record_bytes or not self._may_have_long_line(lines)):
            columns = self._validate(array, count, latest)
        if columns is None:
            lines, columns, rejections = self._sort_out(lines, chunk.start_offset + start, latest)
        records = len(columns.event_ids) + len(rejections)
        if not self._window.admit(columns.event_ids):
            lines, columns = self._without_duplicates(lines, columns, chunk.stream.path)
            self._window.admit(columns.event_ids)
        events = len(columns.event_ids)
        span = Span(
            stream=chunk.stream,
            start_offset=offset,
            end_offset=chunk.start_offset + end,
            tail=data[max(0, end - MARKER_BYTES) : end],
            records=records,
            unsettled=events,
            duplicates=records - events - len(rejections),
            rejections=rejections,
        )
        return EncodedChunk(
            span=span,
            lines=lines,
            event_ids=columns.event_ids,
            consumer_ids=columns.consumer_ids,
            has_distinct_event_ids=self._window.is_on,
        )

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
        guessed = data[start:end].replace(b"\n", _SEPARATOR)
        count = (len(guessed) - (end - start)) // (len(_SEPARATOR) - 1)
        if count > room_events:
            end, guessed, count = start, b"", 0
        walked = end
        while count < room_events and walked < limit:
            newline = data.find(b"\n", walked, limit)
            if newline < 0:
                break
            walked = newline + 1
            count += 1
        rest = data[end:walked].replace(b"\n", _SEPARATOR)
        if walked < len(data) <= start + room_bytes and count < room_events and data.find(b"\n", walked) < 0:
            rest += data[walked:] + _SEPARATOR  # the last line of an input that has ended
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
        Tell whether a line may exceed the limit; False is certain.

        A line longer than the limit covers one of the windows of half that size, so a newline in each of them
        proves that there is none.
        """
        window = max(1, self._max_record_bytes // 2)
        return any(lines.find(b"\n", at, at + window) < 0 for at in range(0, len(lines) - window + 1, window))

    def _validate(self, array: bytes, count: int, latest: str) -> _Columns | None:
        """
        Check the array made of `count` lines; None if anything at all is wrong with any of them.

        Each line gives at least one item, each separator one null, and one null ends the array. So exactly
        `2 * count + 1` items means exactly one item a line.
        """
        try:
            items = self._decode_array(array)
            events = items[:-1:2]
            event_ids = list(map(_event_id, events))
            ips = list(map(_ip, events))
        except (*_DECODE_ERRORS, AttributeError):  # AttributeError: a line that reads `null`
            return None
        if (
            len(items) != 2 * count + 1
            or not are_event_ids(event_ids)
            or not are_ips(ips)
            or not are_timestamps(list(map(_timestamp, events)), latest)
            or not are_btags(list(map(_btag, events)))
        ):
            return None
        return _Columns(event_ids, list(map(_consumer_id, events)))

    def _sort_out(self, text: bytes, offset: int, latest: str) -> tuple[bytes, _Columns, list[Rejection]]:
        """Part the good lines of a piece from the bad ones; `offset` is where `text` starts in the stream."""
        records: list[_Record] = []
        rejections: list[Rejection] = []
        for raw in text.split(b"\n"):
            # A hole in a sparse file reads as NULs in front of the first line behind it.
            line = raw.lstrip(b"\0")
            record = _Record(offset + len(raw) - len(line), line)
            if len(line) > self._max_record_bytes and line.strip(_BLANKS):
                rejections.append(_rejection(record, "oversized"))
            elif line.strip(_BLANKS):
                records.append(record)
            offset += len(raw) + 1
        good: list[bytes] = []
        columns = _Columns([], [])
        self._halve(records, latest, good, columns, rejections)
        rejections.sort(key=attrgetter("start_offset"))
        return b"\n".join(good), columns, rejections

    def _halve(
        self,
        records: list[_Record],
        latest: str,
        good: list[bytes],
        columns: _Columns,
        rejections: list[Rejection],
    ) -> None:
        """Validate records together and, if that fails, each half by itself; the last two lists are added to."""
        if not records:
            return
        lines = [record.line for record in records]
        array = b"[" + _SEPARATOR.join(lines) + _SEPARATOR + b"null]"
        valid = self._validate(array, len(lines), latest)
        if valid is not None:
            good.extend(lines)
            columns.event_ids.extend(valid.event_ids)
            columns.consumer_ids.extend(valid.consumer_ids)
        elif len(records) == 1:
            rejections.append(self._explain(records[0], latest))
        else:
            middle = len(records) // 2
            self._halve(records[:middle], latest, good, columns, rejections)
            self._halve(records[middle:], latest, good, columns, rejections)

    def _explain(self, record: _Record, latest: str) -> Rejection:
        """Find the first rule that a record breaks."""
        try:
            record.line.decode()
            event = self._decode_line(record.line)
        except UnicodeDecodeError:
            return _rejection(record, "encoding")
        except msgspec.ValidationError as error:
            return _rejection(record, *_rule_of(str(error)))
        except _DECODE_ERRORS:
            return _rejection(record, "json")
        if not are_event_ids([event.EventId]):
            return _rejection(record, "event_id")
        if not are_ips([event.IP]):
            return _rejection(record, "ip")
        if not are_timestamps([event.Timestamp], latest):
            return _rejection(record, "timestamp")
        assert not are_btags([event.BTag]), "the fast path refused a line that breaks no rule"
        return _rejection(record, "btag")

    def _without_duplicates(self, lines: bytes, columns: _Columns, path: str) -> tuple[bytes, _Columns]:
        """Keep the first line of each EventId that is not in the window."""
        seen: set[str] = set()
        kept: list[bytes] = []
        unique = _Columns([], [])
        for line, event_id, consumer_id in zip(lines.split(b"\n"), *columns, strict=True):
            if event_id in seen or event_id in self._window:
                if self._on_duplicate is not None:
                    self._on_duplicate(event_id, path)
                continue
            seen.add(event_id)
            kept.append(line)
            unique.event_ids.append(event_id)
            unique.consumer_ids.append(consumer_id)
        return b"\n".join(kept), unique

    @staticmethod
    def _refuse_oversized(chunk: Chunk) -> EncodedChunk:
        """Settle a line of which only the position is known."""
        record = _Record(chunk.start_offset, b"")
        rejection = _rejection(record, "oversized", end_offset=chunk.end_offset)
        span = Span(
            stream=chunk.stream,
            start_offset=chunk.start_offset,
            end_offset=chunk.end_offset,
            tail=b"",
            records=1,
            unsettled=0,
            rejections=[rejection],
        )
        return EncodedChunk(span=span, lines=b"", event_ids=[], consumer_ids=[], has_distinct_event_ids=True)


def _rule_of(message: str) -> tuple[str, str]:
    """Translate the decoder's message into a rule and our words; the decoder's may quote a value."""
    if found := _UNKNOWN_FIELD.search(message):
        name = found[1].rstrip("`").encode("unicode_escape").decode()
        return "unknown_field", f"{MESSAGES['unknown_field']}: {name}"
    if found := _FIELD_IN_MESSAGE.search(message):
        if found[2]:
            return FIELD_RULES[found[2]], f"{found[2]} is missing"
        return FIELD_RULES[found[1]], ""
    return "json", ""


def _rejection(record: _Record, rule: str, message: str = "", *, end_offset: int | None = None) -> Rejection:
    event_id = _EVENT_ID.search(record.line)
    return Rejection(
        start_offset=record.offset,
        end_offset=record.offset + len(record.line) if end_offset is None else end_offset,
        rule=rule,
        message=message or MESSAGES[rule],
        raw=record.line,
        event_id=event_id[1].decode() if event_id else "",
    )
