"""Reads the dead letters. Nothing here writes."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from shipper.model.records import DeliveryClass
from shipper.state.schema import open_for_reading
from shipper.state.sqlite import understood

_COLUMNS: Final = (
    "id, stream_id, path, start_offset, end_offset, rule, message, status, delivery, event_id, consumer_id, "
    "length(raw), whole_bytes, attempts, first_at, last_at"
)


class DeadLetter(Struct, frozen=True):
    """
    A dead letter without its bytes; the words are those of `Rejection`.

    Attributes:
        id: Greater ids are younger; never used twice.
        raw_bytes: How much of the record is kept; 0 if only its position is known.
        whole_bytes: How long the record was, if it is cut; 0 = it is not.
        attempts: How often it was sent or replayed.
        first_at, last_at: When it was refused, seconds since the epoch.
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
    Which dead letters; what is empty or None asks for nothing.

    Attributes:
        since_s, before_s: Bounds of the time of the first refusal, seconds since the epoch; the first one inclusive.
        path: A glob over the whole path; `*` takes slashes, too.
        is_whole: Whether the record itself is kept, and not only its beginning or its position.
    """

    rule: str = ""
    since_s: float | None = None
    before_s: float | None = None
    path: str = ""
    delivery: str = ""
    is_whole: bool | None = None

    def where(self) -> tuple[str, list[str | float]]:
        """Write the condition in SQL, with the values of its parameters."""
        terms: dict[str, str | float | None] = {
            "rule = ?": self.rule or None,
            "first_at >= ?": self.since_s,
            "first_at < ?": self.before_s,
            "path GLOB ?": self.path or None,
            "delivery = ?": self.delivery or None,
            "(length(raw) > 0 AND whole_bytes = 0) = ?": self.is_whole,
        }
        asked = {term: value for term, value in terms.items() if value is not None}
        return " AND ".join(asked) or "TRUE", list(asked.values())


EVERYTHING: Final = Selection()


class Letters:
    """
    The dead letters of one database.

    Args:
        db: Borrowed.
        path: Of the database; for messages.
    Raises:
        StateError: By every method, if the database cannot be read.
    """

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def close(self) -> None:
        """Close the database, for whoever opened it with `open_letters`."""
        self._db.close()

    def count_by_rule(self, selection: Selection = EVERYTHING) -> dict[str, int]:
        """Count, the most frequent rule first."""
        where, values = selection.where()
        with understood(self._path):
            return dict(
                self._db.execute(
                    f"SELECT rule, count(*) AS n FROM dead_letters WHERE {where} GROUP BY rule ORDER BY n DESC, rule",
                    values,
                )
            )

    def youngest_id(self) -> int:
        """Return the greatest id; 0 of none."""
        with understood(self._path):
            return int(self._db.execute("SELECT coalesce(max(id), 0) FROM dead_letters").fetchone()[0])

    def count_by_stream(self, youngest_id: int) -> dict[int, int]:
        """Count those up to an id by the stream that they are of."""
        with understood(self._path):
            return dict(
                self._db.execute(
                    "SELECT stream_id, count(*) FROM dead_letters WHERE id <= ? GROUP BY stream_id", [youngest_id]
                )
            )

    def newest(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """Describe the newest ones, newest first."""
        where, values = selection.where()
        with understood(self._path):
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM dead_letters WHERE {where} ORDER BY id DESC LIMIT ?", [*values, limit]
            )
            return [DeadLetter(*row) for row in rows]

    def ids(self, selection: Selection, limit: int | None = None) -> list[int]:
        """Name the dead letters, oldest first."""
        where, values = selection.where()
        with understood(self._path):
            rows = self._db.execute(
                f"SELECT id FROM dead_letters WHERE {where} ORDER BY id LIMIT ?",
                [*values, -1 if limit is None else limit],
            )
            return [letter_id for (letter_id,) in rows]

    def forms(self, selection: Selection) -> dict[bytes, str]:
        """Return what is needed to read the records, such as CSV headers (b"" for JSON), each with an input."""
        where, values = selection.where()
        with understood(self._path):
            return dict(
                self._db.execute(
                    f"SELECT header, min(path) FROM dead_letters WHERE {where} GROUP BY header ORDER BY min(id)", values
                )
            )

    def get(self, letter_id: int) -> DeadLetter | None:
        """Describe one; None if it is gone."""
        with understood(self._path):
            row = self._db.execute(f"SELECT {_COLUMNS} FROM dead_letters WHERE id = ?", (letter_id,)).fetchone()
            return row and DeadLetter(*row)

    def content(self, letter_id: int) -> Content | None:
        """Read the bytes of one; None if it is gone."""
        with understood(self._path):
            row = self._db.execute("SELECT header, raw FROM dead_letters WHERE id = ?", (letter_id,)).fetchone()
            return row and Content(*row)

    def needs_input(self, stream_id: int) -> bool:
        """Return whether the record of a letter stands in its input alone, of which the position is known."""
        with understood(self._path):
            query = "SELECT 1 FROM dead_letters WHERE stream_id = ? AND length(raw) = 0 LIMIT 1"
            return self._db.execute(query, (stream_id,)).fetchone() is not None

    def candidates(self, consumer_id: str) -> list[tuple[int, bool]]:
        """Name the letters of a consumer, and those of nobody knows whom; with whether the consumer is noted."""
        with understood(self._path):
            return self._db.execute(
                "SELECT id, consumer_id != '' FROM dead_letters WHERE consumer_id IN (?, '') ORDER BY id",
                (consumer_id,),
            ).fetchall()


def whole_number(digits: str) -> re.Pattern[bytes]:
    """Make a pattern that finds a number, but not as a part of a longer one."""
    return re.compile(rb"(?<!\d)0*%b(?!\d)" % digits.encode())


def kept_by_rule(db: sqlite3.Connection) -> dict[str, int]:
    """Read how many dead letters there are, without counting them; the most frequent rule first."""
    return dict(db.execute("SELECT rule, kept FROM letter_counts WHERE kept > 0 ORDER BY kept DESC, rule"))


def letters_kept(directory: Path) -> int:
    """
    Read how many dead letters there are in a state directory; without its lock, as `open_letters`.

    Raises:
        StateError: As for `Store`.
    """
    db = open_for_reading(directory)
    if db is None:
        return 0
    with closing(db), understood(directory / "state.db"):
        return sum(kept_by_rule(db).values())


def open_letters(directory: Path) -> Letters | None:
    """
    Look at the dead letters of a state directory without its lock, also while a shipper writes.

    Returns:
        None if there is no state yet.
    Raises:
        StateError: As for `Store`.
    """
    db = open_for_reading(directory)
    return None if db is None else Letters(db, directory / "state.db")
