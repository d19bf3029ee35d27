"""
Erase what is kept of one consumer: dead letters, and records in the spool that were not delivered yet.

A record belongs to the consumer named by its ConsumerID, read with that input's framing and mapping. A record that
contains the number and cannot be read is reported and left as it is: it may belong to somebody else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from shipper.codec import Codec, first_record
from shipper.config.settings import Settings
from shipper.model.errors import StateError
from shipper.model.framing import LINES, Framing, csv_rows
from shipper.model.records import Chunk, Stream
from shipper.sources.content import Plain
from shipper.sources.reader import StreamReader
from shipper.sources.segments import form_of, segments_in
from shipper.state.letters import Letters, whole_number
from shipper.state.store import Store

_SEARCHED_BYTES: Final = 1 << 20
_DIGITS_MAX: Final = 40


class Place(NamedTuple):
    """Where a record lies in the spool."""

    segment: Path
    start: int
    end: int


class Found(NamedTuple):
    """
    What is kept of a consumer.

    Attributes:
        letters, places: The consumer's own.
        doubtful: Whose records nobody can tell, in words.
    """

    letters: list[int]
    places: list[Place]
    doubtful: list[str]


class Erasure:
    """
    Finds and erases one consumer in a state directory whose lock the caller holds.

    Args:
        consumer_id: Decimal digits without leading zeros.
        name_of: Gives the words for a dead letter, from its id.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        consumer_id: str,
        name_of: Callable[[int], str] = "dead letter {}".format,
    ) -> None:
        self._settings = settings
        self._store = store
        self._spool = settings.state.directory / "spool"
        self._consumer_id = consumer_id
        self._name_of = name_of
        self._number = whole_number(consumer_id)
        self._codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes)
        source = settings.records.field_sources.get("ConsumerID")
        # Otherwise the number need not stand in the record.
        self._is_copied = source is None or bool(source.path and not source.values and source.default is None)

    def find(self) -> Found:
        """Look through dead letters and spool; changes nothing."""
        found = Found([], [], [])
        self._find_letters(self._store.letters, found)
        for _, path in sorted(segments_in(self._spool).items()):
            if path.is_file() and not path.is_symlink():
                self._find_spooled(path, found)
        return found

    def erase(self, found: Found) -> int:
        """
        Delete the letters, and overwrite the records in the spool with blanks, forced to the disk.

        A blank line is no record, so what was not delivered yet will not be; the offsets of all others stay.

        Returns:
            How many letters there still were.
        Raises:
            StateError: Something cannot be written.
        """
        for segment in dict.fromkeys(place.segment for place in found.places):
            _blank(segment, [place for place in found.places if place.segment == segment])
        purged = self._store.purge(found.letters)
        self._store.scrub()
        return purged

    def _consumer_of(self, raw: bytes, framing: Framing) -> str | None:
        """Return whose a record is; empty if that cannot be read, None if it is surely somebody else's."""
        if self._is_copied and self._consumer_id.encode() not in raw and b"\\" not in raw:
            return None
        value = self._codec.document_of(raw, framing).get("ConsumerID")
        text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
        return str(int(text)) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX else ""

    def _find_letters(self, letters: Letters, found: Found) -> None:
        delimiter = self._settings.input.csv_delimiter
        for letter_id, is_noted in letters.candidates(self._consumer_id):
            content = letters.content(letter_id)
            if content is None:  # purged meanwhile, which takes no lock
                continue
            rows = csv_rows(content.header, is_whole=True, delimiter=delimiter) if content.header else None
            consumer_id = self._consumer_of(content.raw, rows or LINES)
            if consumer_id == self._consumer_id or (is_noted and not consumer_id):
                found.letters.append(letter_id)
            elif is_noted or (consumer_id == "" and self._number.search(content.raw)):
                found.doubtful.append(self._name_of(letter_id))

    def _find_spooled(self, path: Path, found: Found) -> None:
        stream = Stream(stream_id=0, kind="spool", path=str(path))
        limit = self._settings.input.max_record_bytes
        content = Plain(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        reader = StreamReader(content, stream, path, max_record_bytes=limit, form=form_of(path))
        try:
            while (chunk := reader.read(is_final=True)) is not None:
                for start, end, raw in _records_of(chunk):
                    consumer_id = self._consumer_of(raw, stream.framing)
                    if consumer_id == self._consumer_id:
                        found.places.append(Place(path, start, end))
                    elif consumer_id == "" and self._number.search(raw):
                        found.doubtful.append(_in_words(path, start))
                if chunk.is_oversized and self._holds_number(content, chunk):
                    found.doubtful.append(_in_words(path, chunk.start_offset))
        finally:
            reader.close()

    def _holds_number(self, content: Plain, chunk: Chunk) -> bool:
        """Return whether the number stands in a record that is too long to be read."""
        return any(
            self._number.search(content.pread(min(_SEARCHED_BYTES, chunk.end_offset - start), start))
            for start in range(chunk.start_offset, chunk.end_offset, _SEARCHED_BYTES - _DIGITS_MAX)
        )


def _in_words(path: Path, offset: int) -> str:
    return f"spool/{path.name}, byte {offset}"


def _records_of(chunk: Chunk) -> Iterator[tuple[int, int, bytes]]:
    """Yield start, end and bytes of each record in a chunk; offsets in the file, without the end of a line."""
    data = chunk.data
    for frame in chunk.stream.framing.frames(data, first_record(chunk, 0)):
        raw = data[frame.start : frame.end].removesuffix(b"\r")
        bare = raw.lstrip(b"\0")
        start = chunk.start_offset + frame.start + len(raw) - len(bare)
        yield start, start + len(bare), bare


def _blank(segment: Path, places: Sequence[Place]) -> None:
    try:
        with segment.open("r+b") as file:
            for place in places:
                file.seek(place.start)
                file.write(b" " * (place.end - place.start))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StateError(f"{segment} cannot be written ({error.strerror}); run the same command again") from error
