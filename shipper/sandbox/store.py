"""What the sandbox has received: one row per EventId, in SQLite."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterable
from contextlib import closing
from typing import Final, NamedTuple, Self

from shipper.errors import ConfigError

IN_MEMORY: Final = ":memory:"

_APPLICATION_ID: Final = 0x53424F58  # "SBOX": tells the sandbox's files from every other SQLite file
_TAG_DIGITS_MAX: Final = 18  # what surely fits a 64-bit id

# `seq` counts the stored events without a gap, as nothing but a reset deletes: the newest seq is the row count.
# The large column stands last, so that a report reads over it.
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS event (
    seq              INTEGER PRIMARY KEY,
    event_id         TEXT    NOT NULL UNIQUE,
    day              TEXT    NOT NULL,
    brand_id         INTEGER NOT NULL,
    marketing_source INTEGER NOT NULL,
    times_received   INTEGER NOT NULL DEFAULT 1,
    raw              BLOB    NOT NULL
)
"""
_ADD: Final = """
INSERT INTO event (event_id, day, brand_id, marketing_source, raw) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (event_id) DO UPDATE SET times_received = times_received + 1
"""


class NewEvent(NamedTuple):
    """One valid event on its way into the store; the order is that of the columns."""

    event_id: str
    day: str
    brand_id: int
    marketing_source: int
    raw: bytes


class StoredEvent(NamedTuple):
    """One event as it was first received, and how often its EventId has come since."""

    seq: int
    event_id: str
    times_received: int
    raw: bytes


class Added(NamedTuple):
    """What became of one call of `add`; the two sum up to the number of events given."""

    accepted: int
    duplicates: int


class Registrations(NamedTuple):
    """How many events of one brand came from one marketing source."""

    brand_id: int
    marketing_source: int
    registered: int


def marketing_source_of(tag: str) -> int:
    """Read the marketing source off a BTag: the digits before `_`; 0 when they are too many for an id."""
    digits, _, _ = tag.partition("_")
    return int(digits) if len(digits) <= _TAG_DIGITS_MAX else 0


class EventStore:
    """
    The sandbox's events.

    The server's loop is the one that writes; the lock is there for a test or a demo that looks in from its own thread.

    Args:
        path: A file, created with mode 0600 when it is absent, or `IN_MEMORY`.
    Raises:
        ConfigError: The file cannot be opened or is not a sandbox's store.
    """

    def __init__(self, path: str = IN_MEMORY) -> None:
        self._lock = threading.Lock()
        self._connection = _open(path)
        self.stored, received = self._connection.execute(
            "SELECT count(*), coalesce(sum(times_received), 0) FROM event"
        ).fetchone()
        self.duplicates: int = received - self.stored

    def __repr__(self) -> str:
        return f"<EventStore stored={self.stored} duplicates={self.duplicates}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; a second time does nothing."""
        with self._lock:
            self._connection.close()

    def add(self, events: Iterable[NewEvent]) -> Added:
        """Store a batch in one transaction; an EventId that is there already is counted and keeps its first event."""
        rows = list(events)
        with self._lock, self._connection:
            self._connection.executemany(_ADD, rows)
            (newest,) = self._connection.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
        accepted = newest - self.stored
        self.stored = newest
        self.duplicates += len(rows) - accepted
        return Added(accepted, len(rows) - accepted)

    def get(self, event_id: str) -> StoredEvent | None:
        """Look one event up by its EventId."""
        with self._lock:
            row = self._connection.execute(
                "SELECT seq, event_id, times_received, raw FROM event WHERE event_id = ?", (event_id,)
            ).fetchone()
        return StoredEvent(*row) if row else None

    def page(self, *, after: int = 0, limit: int) -> list[StoredEvent]:
        """Return up to `limit` events whose `seq` is above `after`, in the order of their arrival."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT seq, event_id, times_received, raw FROM event WHERE seq > ? ORDER BY seq LIMIT ?",
                (after, limit),
            ).fetchall()
        return [StoredEvent(*row) for row in rows]

    def event_ids(self, *, after: int = 0, limit: int) -> list[str]:
        """Return up to `limit` EventIds; the first belongs to `seq` `after + 1`, the next to the one above it."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT event_id FROM event WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)
            ).fetchall()
        return [event_id for (event_id,) in rows]

    def registrations(self, start: str, end: str) -> list[Registrations]:
        """Count the events of the UTC days `start` to `end` (`YYYY-MM-DD`, both included), in the order of the ids."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT brand_id, marketing_source, count(*) FROM event WHERE day BETWEEN ? AND ? "
                "GROUP BY brand_id, marketing_source ORDER BY brand_id, marketing_source",
                (start, end),
            ).fetchall()
        return [Registrations(*row) for row in rows]

    def reset(self) -> None:
        """Forget every event."""
        with self._lock, self._connection:
            self._connection.execute("DELETE FROM event")
        self.stored = self.duplicates = 0


def _open(path: str) -> sqlite3.Connection:
    try:
        if path != IN_MEMORY:
            # SQLite would create the file with the mode that the umask leaves; the raw events are personal data.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR))
        connection = sqlite3.connect(path, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"cannot open the store: {error}", source=path) from error
    try:
        _prepare(connection)
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(f"is not a sandbox store: {error}", source=path) from error
    except ConfigError as error:
        connection.close()
        raise ConfigError(error.message, source=path) from error
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    with closing(connection.cursor()) as cursor:
        (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
        (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and application_id != _APPLICATION_ID:
            raise ConfigError("is a database of something else; name another file")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        cursor.execute(_SCHEMA)
