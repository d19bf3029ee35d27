"""The events received by the sandbox: in memory, and optionally in a log file."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, suppress
from itertools import islice
from typing import Final, Self

import msgspec
from msgspec import Raw, Struct

from shipper.model.errors import ConfigError
from shipper.model.wire import BODY_HEAD, BODY_TAIL, ActivityEvent
from shipper.sandbox.intake import ENVELOPE, EVENT
from shipper.sandbox.options import IN_MEMORY
from shipper.sandbox.report import Registrations

_APPLICATION_ID: Final = 0x53424F32  # "SBO2"; identifies the sandbox's SQLite files
_TAG_DIGITS_MAX: Final = 18  # always fits into a 64-bit id
_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS batch (seq INTEGER PRIMARY KEY, body BLOB NOT NULL)"


class StoredEvent(Struct):
    """An event as first received, and how often its EventId was received."""

    event_id: str
    raw: bytes
    times_received: int = 1


def marketing_source_of(tag: str) -> int:
    """Return the marketing source of a BTag, the digits before `_`; 0 if there are too many for an id."""
    digits, _, _ = tag.partition("_")
    return int(digits) if len(digits) <= _TAG_DIGITS_MAX else 0


class EventStore:
    """
    The sandbox's events.

    Only the server's event loop writes; the lock allows tests and the demo to read from other threads.

    Args:
        path: A file, created with mode 0600 if it is missing, or `IN_MEMORY`.
        counts_repeats: Whether a repeated EventId counts as another registration.
    Raises:
        ConfigError: The file cannot be opened, is not a sandbox store, or is in use by another sandbox.
    """

    def __init__(self, path: str = IN_MEMORY, *, counts_repeats: bool = False) -> None:
        self._lock = threading.Lock()
        self._counts_repeats = counts_repeats
        self._forget()
        self._log = _open(path) if path != IN_MEMORY else None
        if self._log is not None:
            try:
                for (body,) in self._log.execute("SELECT body FROM batch ORDER BY seq"):
                    self._keep([(EVENT.decode(raw), raw) for raw in ENVELOPE.decode(body).events])
            except (sqlite3.Error, msgspec.DecodeError) as error:
                self._log.close()
                raise ConfigError(f"is damaged: {error}; choose another file", source=path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    @property
    def stored(self) -> int:
        return len(self._events)

    def add(self, events: Collection[tuple[ActivityEvent, Raw]]) -> int:
        """Store events, also in the file if there is one, and return how many are new; others keep the first event."""
        with self._lock:
            if self._log is not None and events:
                body = BODY_HEAD + b",".join([bytes(raw) for _, raw in events]) + BODY_TAIL
                with self._log:
                    self._log.execute("INSERT INTO batch (body) VALUES (?)", (body,))
            return self._keep(events)

    def holds(self, event_id: str) -> bool:
        return event_id in self._events

    def get(self, event_id: str) -> StoredEvent | None:
        return self._events.get(event_id)

    def page(
        self, *, after: int = 0, limit: int, is_wanted: Callable[[StoredEvent], bool] = lambda event: True
    ) -> tuple[list[StoredEvent], int | None]:
        """
        Return up to `limit` wanted events, after skipping `after` events, wanted or not.

        Also returns `after` of the next page; None on the last one.
        """
        events: list[StoredEvent] = []
        with self._lock:
            for number, event in enumerate(islice(self._events.values(), after, None), after + 1):
                if is_wanted(event):
                    events.append(event)
                    if len(events) == limit:
                        return events, number if number < self.stored else None
        return events, None

    def event_ids(self) -> list[str]:
        with self._lock:
            return list(self._events)

    def registrations(self, start: str, end: str) -> list[Registrations]:
        """Return counts for the UTC days `start` to `end` (`YYYY-MM-DD`, both included), in no order."""
        with self._lock:
            return [
                Registrations(day, brand, marketing_source_of(tag), registered)
                for day, registrations in self._registered.items()
                if start <= day <= end
                for (brand, tag), registered in registrations.items()
            ]

    def reset(self) -> None:
        with self._lock:
            if self._log is not None:
                with self._log:
                    self._log.execute("DELETE FROM batch")
            self._forget()

    def _forget(self) -> None:
        self.duplicates = 0
        self._events: dict[str, StoredEvent] = {}
        self._registered: dict[str, Counter[tuple[int, str]]] = defaultdict(Counter)

    def _keep(self, events: Collection[tuple[ActivityEvent, Raw]]) -> int:
        before = len(self._events)
        for event, raw in events:
            known = self._events.get(event.EventId)
            if known is None:
                self._events[event.EventId] = StoredEvent(event.EventId, bytes(raw))
            else:
                known.times_received += 1
            if known is None or self._counts_repeats:
                self._registered[event.Timestamp[:10]][event.BrandID, event.BTag.partition("_")[0]] += 1
        accepted = len(self._events) - before
        self.duplicates += len(events) - accepted
        return accepted


def _open(path: str) -> sqlite3.Connection:
    """Open a file for this process only, as others would not see the events that it adds."""
    is_new = not os.path.lexists(path)
    try:
        # SQLite would create the file with the umask's mode, but events are personal data.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR))
        with ExitStack() as stack:
            connection = stack.enter_context(closing(sqlite3.connect(path, check_same_thread=False, timeout=0)))
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if tables and application_id != _APPLICATION_ID:
                raise sqlite3.DatabaseError("it is the database of another program")
            for statement in ("journal_mode = WAL", "synchronous = NORMAL", f"application_id = {_APPLICATION_ID}"):
                connection.execute(f"PRAGMA {statement}")
            connection.execute(_SCHEMA)
            stack.pop_all()
            return connection
    except (OSError, sqlite3.Error) as error:
        if is_new:
            with suppress(OSError):
                os.unlink(path)
        advice = "choose another file, or stop the sandbox that uses it"
        raise ConfigError(f"cannot be used as a store ({error}); {advice}", source=path) from error
