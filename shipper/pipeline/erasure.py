"""
Erases the stored data of one consumer: dead letters, and undelivered records in the spool.

A record belongs to the consumer in its ConsumerID, which is read with the input's framing and mapping. An unreadable
record that contains the number is reported but not erased, as it may be another consumer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

from shipper.codec.codec import first_record
from shipper.codec.documents import SourceMapping, read_document
from shipper.config.mapping import FIELDS
from shipper.config.settings import Settings
from shipper.model.errors import StateError
from shipper.model.framing import LINES, Framing, csv_rows
from shipper.model.records import Chunk, Stream
from shipper.sources.segments import open_segment, segments_in
from shipper.state.letters import Letters, whole_number
from shipper.state.store import Store

_DIGITS_MAX: Final = 40


class SpooledRecord(NamedTuple):
    segment: Path
    start: int
    end: int


class ConsumerData(NamedTuple):
    """A consumer's dead letters and spooled records, and descriptions of records that may be another consumer's."""

    letters: list[int]
    spooled: list[SpooledRecord]
    doubtful: list[str]


class Erasure:
    """
    Finds and erases a consumer's data in a state directory whose lock the caller holds.

    Args:
        consumer_id: Decimal digits without leading zeros.
        describe_letter: Returns the description of a dead letter, given its id.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        consumer_id: str,
        describe_letter: Callable[[int], str] = "dead letter {}".format,
    ) -> None:
        self._settings = settings
        self._store = store
        self._spool = settings.state.directory / "spool"
        self._consumer_id = consumer_id
        self._describe_letter = describe_letter
        self._number = whole_number(consumer_id)
        sources = settings.records.field_sources
        self._mapping, source = SourceMapping(sources), sources.get("ConsumerID")
        # Otherwise a record may not contain the number literally.
        self._is_literal = source is None or bool(source.path and not source.values and source.default is None)

    def find(self) -> ConsumerData:
        """Search dead letters and spool without changing them."""
        data = ConsumerData([], [], [])
        self._find_letters(self._store.letters, data)
        for _, path in sorted(segments_in(self._spool).items()):
            if path.is_file() and not path.is_symlink():
                self._find_spooled(path, data)
        return data

    def erase(self, data: ConsumerData) -> int:
        """
        Delete the letters, overwrite the spooled records with blanks, and flush both to disk.

        Blank lines are not records, so the erased ones are never delivered; the offsets of other records stay valid.

        Returns:
            The number of letters that still existed.
        Raises:
            StateError: Something cannot be written.
        """
        for segment, records in groupby(data.spooled, key=attrgetter("segment")):
            _blank(segment, records)
        purged = self._store.purge(data.letters)
        self._store.scrub()
        return purged

    def _consumer_of(self, raw: bytes, framing: Framing) -> str | None:
        """Return a record's ConsumerID; empty if it cannot be read, None if it is certainly another consumer's."""
        if self._is_literal and self._consumer_id.encode() not in raw and b"\\" not in raw:
            return None
        document = read_document(raw, framing)
        value = self._mapping.columns([document])[FIELDS.index("ConsumerID")][0] if document else None
        text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
        return str(int(text)) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX else ""

    def _find_letters(self, letters: Letters, data: ConsumerData) -> None:
        delimiter = self._settings.input.csv_delimiter
        for letter_id, is_stored_so in letters.candidates(self._consumer_id):
            content = letters.content(letter_id)
            if content is None:  # just purged; purging does not need the lock
                continue
            rows = csv_rows(content.header, is_whole=True, delimiter=delimiter) if content.header else None
            consumer_id = self._consumer_of(content.raw, rows or LINES)
            if consumer_id == self._consumer_id or (is_stored_so and not consumer_id):
                data.letters.append(letter_id)
            elif is_stored_so or (consumer_id == "" and self._number.search(content.raw)):
                data.doubtful.append(self._describe_letter(letter_id))

    def _find_spooled(self, path: Path, data: ConsumerData) -> None:
        stream = Stream(stream_id=0, kind="spool", path=str(path))
        limit = self._settings.input.max_record_bytes
        with closing(open_segment(path, stream, max_record_bytes=limit)) as reader:
            while (chunk := reader.read(is_final=True)) is not None:
                for start, end, raw in _records_of(chunk):
                    consumer_id = self._consumer_of(raw, stream.framing)
                    if consumer_id == self._consumer_id:
                        data.spooled.append(SpooledRecord(path, start, end))
                    elif consumer_id == "" and self._number.search(raw):
                        data.doubtful.append(_describe_position(path, start))
                if chunk.is_oversized:  # by a lower limit than that of the process that wrote it
                    line = reader.content.pread(chunk.end_offset - chunk.start_offset, chunk.start_offset)
                    if self._number.search(line):
                        data.doubtful.append(_describe_position(path, chunk.start_offset))


def _describe_position(path: Path, offset: int) -> str:
    return f"spool/{path.name}, byte {offset}"


def _records_of(chunk: Chunk) -> Iterator[tuple[int, int, bytes]]:
    """Yield (start, end, bytes) of the records in a chunk: offsets in the file, without line ends."""
    data = chunk.data
    for frame in chunk.stream.framing.frames(data, first_record(chunk, 0)):
        raw = data[frame.start : frame.end].removesuffix(b"\r")
        bare = raw.lstrip(b"\0")
        start = chunk.start_offset + frame.start + len(raw) - len(bare)
        yield start, start + len(bare), bare


def _blank(segment: Path, records: Iterable[SpooledRecord]) -> None:
    try:
        with segment.open("r+b") as file:
            for record in records:
                file.seek(record.start)
                file.write(b" " * (record.end - record.start))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(f"{segment} cannot be written ({error.strerror}); run the same command again") from error
