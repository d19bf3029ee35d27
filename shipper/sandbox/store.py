"""
What the sandbox has received: a log of batches in SQLite, and an index of their events in memory.

The log is the truth and is only ever appended to. Index and counts are made from it while it grows, and made anew when
a file is opened again; so a batch costs one insert, however many events it has.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Final, NamedTuple, Self

import msgspec
from msgspec import Raw, Struct

from shipper.model.errors import ConfigError
from shipper.model.wire import ActivityBatch, ActivityEvent
from shipper.sandbox.options import IN_MEMORY
from shipper.sandbox.report import Registrations

_APPLICATION_ID: Final = 0x53424F32  # "SBO2": tells the sandbox's files from every other SQLite file
_TAG_DIGITS_MAX: Final = 18  # what surely fits a 64-bit id
_POSITION_BITS: Final = 32  # an event's place: the batch's number, then its position in the batch

_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS batch (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)"


class StoredEvent(NamedTuple):
    """One event as it was first received, and how often its EventId has come since."""

    event_id: str
    times_received: int
    raw: bytes


class Page(NamedTuple):
    """
    Some of the stored events, in the order of their arrival.

    Attributes:
        next: Where the following page begins, as `after`; None on the last page.
    """

    events: list[StoredEvent]
    next: int | None


class Added(NamedTuple):
    """What became of one call of `add`; the two sum up to the number of events given."""

    accepted: int
    duplicates: int


class _RawBatch(Struct, frozen=True):
    events: list[Raw]


_BATCH: Final = msgspec.json.Decoder(ActivityBatch)
_RAW_BATCH: Final = msgspec.json.Decoder(_RawBatch)


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
        counts_repeats: A repeated EventId is a registration of its own.
    Raises:
        ConfigError: The file cannot be opened, is not a sandbox's store, or is in use by another sandbox.
    """

    def __init__(self, path: str = IN_MEMORY, *, counts_repeats: bool = False) -> None:
        self._lock = threading.Lock()
        self._counts_repeats = counts_repeats
        self._forget()
        self._connection = _open(path)
        try:
            for seq, body in self._connection.execute("SELECT seq, body FROM batch ORDER BY seq"):
                self._newest = seq
                self._index(_BATCH.decode(body).events)
        except (sqlite3.Error, msgspec.DecodeError) as error:
            self._connection.close()
            raise ConfigError(f"is damaged: {error}; name another file", source=path) from error

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

    @property
    def stored(self) -> int:
        """Different EventIds."""
        return len(self._places)

    def add(self, body: bytes, events: Sequence[ActivityEvent]) -> Added:
        """
        Keep a batch; an EventId that is there already is counted and keeps its first event.

        Args:
            body: The batch as JSON, on disk when this returns.
            events: What `body` holds, in its order.
        """
        with self._lock:
            with self._connection:
                self._connection.execute("INSERT INTO batch VALUES (?, ?)", (self._newest + 1, body))
            self._newest += 1
            return self._index(events)

    def holds(self, event_id: str) -> bool:
        """Return whether an EventId has been received."""
        return event_id in self._places

    def get(self, event_id: str) -> StoredEvent | None:
        """Look one event up by its EventId."""
        with self._lock:
            place = self._places.get(event_id)
            return None if place is None else next(self._read([(event_id, place)]))

    def page(
        self, *, after: int = 0, limit: int, is_wanted: Callable[[StoredEvent], bool] = lambda event: True
    ) -> Page:
        """
        Return up to `limit` events.

        Args:
            after: How many stored events to pass over, wanted or not.
            is_wanted: Picks the events.
        """
        found: list[StoredEvent] = []
        with self._lock:
            for number, event in enumerate(self._read(islice(self._places.items(), after, None)), after + 1):
                if is_wanted(event):
                    found.append(event)
                    if len(found) == limit:
                        return Page(found, number if number < self.stored else None)
        return Page(found, None)

    def event_ids(self) -> list[str]:
        """Return the stored EventIds in the order of their arrival."""
        with self._lock:
            return list(self._places)

    def registrations(self, start: str, end: str) -> list[Registrations]:
        """Count the events of the UTC days `start` to `end` (`YYYY-MM-DD`, both included), in no order."""
        with self._lock:
            return [
                Registrations(day, brand_id, marketing_source_of(digits), registered)
                for (day, brand_id, digits), registered in self._registered.items()
                if start <= day <= end
            ]

    def reset(self) -> None:
        """Forget every event."""
        with self._lock:
            with self._connection:
                self._connection.execute("DELETE FROM batch")
            self._forget()

    def _forget(self) -> None:
        self._newest = 0
        self.duplicates = 0
        self._places: dict[str, int] = {}
        self._repeats: Counter[str] = Counter()
        self._registered: Counter[tuple[str, int, str]] = Counter()

    def _index(self, events: Sequence[ActivityEvent]) -> Added:
        """Index the events of the newest batch."""
        first = self._newest << _POSITION_BITS
        event_ids = [event.EventId for event in events]
        places = dict(zip(event_ids, range(first, first + len(events)), strict=True))
        fresh: Sequence[ActivityEvent] = events
        if len(places) == len(events) and self._places.keys().isdisjoint(places):
            self._places.update(places)
        else:
            fresh = [event for place, event in enumerate(events, first) if self._is_new(event.EventId, place)]
        counted = events if self._counts_repeats else fresh
        self._registered.update([(e.Timestamp[:10], e.BrandID, e.BTag.partition("_")[0]) for e in counted])
        repeated = len(events) - len(fresh)
        self.duplicates += repeated
        return Added(len(fresh), repeated)

    def _is_new(self, event_id: str, place: int) -> bool:
        if self._places.setdefault(event_id, place) == place:
            return True
        self._repeats[event_id] += 1
        return False

    def _read(self, places: Iterator[tuple[str, int]] | Sequence[tuple[str, int]]) -> Iterator[StoredEvent]:
        """Read events by their places, each batch once as long as they are in order."""
        read, raws = 0, list[Raw]()
        for event_id, place in places:
            seq, position = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
            if seq != read:
                (body,) = self._connection.execute("SELECT body FROM batch WHERE seq = ?", (seq,)).fetchone()
                read, raws = seq, _RAW_BATCH.decode(body).events
            yield StoredEvent(event_id, 1 + self._repeats[event_id], bytes(raws[position]))


def _open(path: str) -> sqlite3.Connection:
    try:
        if path != IN_MEMORY:
            # SQLite would create the file with the mode that the umask leaves; the raw events are personal data.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR))
        connection = sqlite3.connect(path, check_same_thread=False, timeout=0)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"cannot open the store: {error}", source=path) from error
    try:
        _prepare(connection)
    except sqlite3.Error as error:
        connection.close()
        is_locked = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
        reason = "is in use by another sandbox; name another file" if is_locked else f"is not a sandbox store: {error}"
        raise ConfigError(reason, source=path) from error
    except ConfigError as error:
        connection.close()
        raise ConfigError(error.message, source=path) from error
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    with closing(connection.cursor()) as cursor:
        # One process at a time: the index of another would not know of a batch that this one adds.
        cursor.execute("PRAGMA locking_mode = EXCLUSIVE")
        (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
        (tables,) = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and application_id != _APPLICATION_ID:
            raise ConfigError("is a database of something else; name another file")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        cursor.execute(_SCHEMA)
