"""Read access to the dead letters."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import Struct

from shipper.model.records import DeliveryClass
from shipper.state.schema import open_for_reading, reading
from shipper.state.sqlite import fetch

_COLUMNS: Final = (
    "id, stream_id, path, start_offset, end_offset, rule, message, status, delivery, event_id, consumer_id, "
    "length(raw), whole_bytes, attempts, first_at, last_at"
)
_PAGE: Final = 64  # letters, each of at most `input.max_record_bytes`


class DeadLetter(Struct, frozen=True):
    """
    A dead letter without its bytes; other fields as in `Rejection`.

    Attributes:
        id: Ascending; never reused.
        raw_bytes: Stored bytes of the record; 0 if only its position is known.
        whole_bytes: Length of the original record if it was truncated; 0 = it was not.
    """

    id: int
    stream_id: int
    path: str
    start_offset: int
    end_offset: int
    rule: str
    message: str
    status: int
    delivery: DeliveryClass
    event_id: str
    consumer_id: str
    raw_bytes: int
    whole_bytes: int
    attempts: int
    first_at: float
    last_at: float


class Content(NamedTuple):
    """The bytes of a dead letter."""

    header: bytes
    raw: bytes


class Selection(Struct, frozen=True, kw_only=True):
    """
    A filter of dead letters; fields that are empty or None match everything.

    Attributes:
        since_s, before_s: Bounds of the time of the first rejection, seconds since the epoch; the first is inclusive.
        path: A glob over the whole path; `*` also matches slashes.
        is_whole: Whether the whole record is stored, rather than only its beginning or its position.
        like: The id of a letter with the same CSV header.
    """

    rule: str = ""
    since_s: float | None = None
    before_s: float | None = None
    path: str = ""
    delivery: str = ""
    is_whole: bool | None = None
    like: int | None = None

    def where(self) -> tuple[str, list[str | float]]:
        """Return the SQL condition and its parameters."""
        terms: dict[str, str | float | None] = {
            "rule = ?": self.rule or None,
            "first_at >= ?": self.since_s,
            "first_at < ?": self.before_s,
            "path GLOB ?": self.path or None,
            "delivery = ?": self.delivery or None,
            "(length(raw) > 0 AND whole_bytes = 0) = ?": self.is_whole,
            "header = (SELECT header FROM dead_letters WHERE id = ?)": self.like,
        }
        used = {term: value for term, value in terms.items() if value is not None}
        return " AND ".join(used) or "TRUE", list(used.values())


EVERYTHING: Final = Selection()


class Letters:
    """The dead letters of an open database."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def close(self) -> None:
        """Close the database that `open_letters` opened."""
        self._db.close()

    def _fetch(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        return fetch(self._db, self._path, f"SELECT {query}", values)

    def _select(self, columns: str, selection: Selection, rest: str, *values: object) -> list[Any]:
        where, parameters = selection.where()
        return self._fetch(f"{columns} FROM dead_letters WHERE {where} {rest}", (*parameters, *values))

    def count_by_rule(self, selection: Selection = EVERYTHING) -> dict[str, int]:
        """Return the counts by rule, most frequent first."""
        return dict(self._select("rule, count(*) AS n", selection, "GROUP BY rule ORDER BY n DESC, rule"))

    def newest_id(self) -> int:
        """Return the greatest id; 0 if there are no letters."""
        return int(self._fetch("coalesce(max(id), 0) FROM dead_letters")[0][0])

    def count_by_stream(self, newest_id: int) -> dict[int, int]:
        """Count the letters up to an id by stream."""
        return dict(self._fetch("stream_id, count(*) FROM dead_letters WHERE id <= ? GROUP BY stream_id", (newest_id,)))

    def newest(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Return the newest letters, newest first."""
        return [DeadLetter(*row) for row in self._select(_COLUMNS, selection, "ORDER BY id DESC LIMIT ?", limit)]

    def ids(self, selection: Selection, limit: int | None = None) -> list[int]:
        """Return ids, oldest first."""
        rows = self._select("id", selection, "ORDER BY id LIMIT ?", -1 if limit is None else limit)
        return [letter_id for (letter_id,) in rows]

    def headers(self, selection: Selection) -> list[tuple[bytes, int, str]]:
        """Return the headers needed to parse the records (b"" for JSON), with a letter and an input of each."""
        return self._select("header, min(id), path", selection, "GROUP BY header ORDER BY min(id)")

    def get(self, letter_id: int) -> DeadLetter | None:
        """Return a letter; None if it does not exist."""
        rows = self._fetch(f"{_COLUMNS} FROM dead_letters WHERE id = ?", (letter_id,))
        return DeadLetter(*rows[0]) if rows else None

    def at(self, path: str, offset: int) -> list[int]:
        """Return the ids of the letters of a record; there are several if a Kafka topic was recreated."""
        rows = self._fetch("id FROM dead_letters WHERE path = ? AND start_offset = ? ORDER BY id", (path, offset))
        return [letter_id for (letter_id,) in rows]

    def content(self, letter_id: int) -> Content | None:
        """Return the bytes of a letter; None if it does not exist."""
        rows = self._fetch("header, raw FROM dead_letters WHERE id = ?", (letter_id,))
        return Content(*rows[0]) if rows else None

    def contents(self, selection: Selection) -> Iterator[Content]:
        """Yield the bytes of letters, oldest first; in pages, so that the log of a running shipper can be merged."""
        last = 0
        while page := self._select("header, raw, id", selection, "AND id > ? ORDER BY id LIMIT ?", last, _PAGE):
            yield from (Content(header, raw) for header, raw, _ in page)
            last = page[-1][2]

    def needs_input(self, stream_id: int) -> bool:
        """Return whether a letter of the stream has only its record's position, not the bytes."""
        return bool(self._fetch("1 FROM dead_letters WHERE stream_id = ? AND length(raw) = 0 LIMIT 1", (stream_id,)))

    def candidates(self, consumer_id: str) -> list[tuple[int, bool]]:
        """Return the ids of letters that may be a consumer's, and whether they were stored as this consumer's."""
        # An invalid record may have zeros before the number, or contain several numbers.
        stored = "ltrim(consumer_id, '0')"
        return self._fetch(
            f"id, {stored} = ? FROM dead_letters WHERE {stored} IN (?, '') OR instr(raw, ?) ORDER BY id",
            (consumer_id, consumer_id, consumer_id.encode()),
        )


def open_letters(directory: Path) -> Letters:
    """Open the dead letters of a state directory; see `open_for_reading`."""
    return Letters(open_for_reading(directory), directory / "state.db")


def letter_counts(db: sqlite3.Connection) -> dict[str, int]:
    """Read the number of dead letters by rule, most frequent first, without counting rows."""
    return dict(db.execute("SELECT rule, kept FROM letter_counts WHERE kept > 0 ORDER BY kept DESC, rule"))


def count_letters(directory: Path) -> int:
    """Read the number of dead letters in a state directory; errors as for `open_letters`."""
    with reading(directory) as db:
        return sum(letter_counts(db).values())


def whole_number(digits: str) -> re.Pattern[bytes]:
    """Return a pattern that matches a number, but not within a longer one."""
    return re.compile(rb"(?<!\d)0*%b(?!\d)" % digits.encode())
