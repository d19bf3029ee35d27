"""
The history of reports: all fetched versions, so that restatements can be shown.

It has its own database in the state directory and does not need the directory's lock: several processes may fetch
reports while a shipper is running.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shipper.model import wire
from shipper.model.errors import StateError
from shipper.report.changes import Change, diff, is_restated
from shipper.report.content import content_hash
from shipper.report.document import FetchedReport, read_report
from shipper.report.formatting import format_days
from shipper.report.ranges import DateRange, Part
from shipper.state import sqlite
from shipper.state.directory import make_private

FILE_NAME: Final = "reports.db"
SCHEMA_VERSION: Final = 1

_HOOKS_LOCK: Final = "reports.lock"
_APPLICATION_ID: Final = 0x53485250  # "SHRP"; identifies our databases
_SCHEMA: Final = """
CREATE TABLE versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    account INTEGER NOT NULL,
    first_day TEXT NOT NULL,
    last_day TEXT NOT NULL,
    check_sum TEXT NOT NULL,
    first_fetched_at REAL NOT NULL,
    last_fetched_at REAL NOT NULL,
    fetches INTEGER NOT NULL,
    content_hash TEXT NOT NULL,
    body BLOB NOT NULL -- the first answer with this content, compressed by zlib
) STRICT;
CREATE INDEX versions_of_period ON versions (account, first_day, last_day, last_fetched_at);
CREATE TABLE hooks ( -- of `report watch --on-change`: the versions of a period for which it has run
    account INTEGER NOT NULL,
    first_day TEXT NOT NULL,
    last_day TEXT NOT NULL,
    up_to INTEGER NOT NULL, -- number of the last such version; 0 = none
    PRIMARY KEY (account, first_day, last_day)
) STRICT, WITHOUT ROWID;
CREATE TABLE sources ( -- all marketing sources in the versions of an account's reports
    account INTEGER NOT NULL,
    media INTEGER NOT NULL,
    PRIMARY KEY (account, media)
) STRICT, WITHOUT ROWID;
"""
_BUSY_LIMIT_S: Final = 30.0
_DISORDER_MAX_S: Final = 60.0  # between two answers that are stored in the wrong order
_COLUMNS: Final = (
    "number, account, first_day, last_day, check_sum, content_hash, first_fetched_at, last_fetched_at, fetches"
)


class Version(Struct, frozen=True):
    """
    A version of a report: consecutive fetches with the same content.

    Attributes:
        start, end: The requested days, both included.
    """

    number: int
    account: int
    start: date
    end: date
    check_sum: str
    content_hash: str
    first_fetched_at: float
    last_fetched_at: float
    fetches: int

    @property
    def days(self) -> DateRange:
        return DateRange(self.start, self.end)

    @property
    def part(self) -> Part:
        return Part(self.account, self.days)

    @property
    def is_new(self) -> bool:
        return self.fetches == 1


class Comparison(NamedTuple):
    """A stored report compared with the previous version, which is None if there is none or nothing changed."""

    version: Version
    status: Literal["new", "unchanged", "restated", "document changed"]
    earlier: wire.DailyReport | None = None
    changes: Sequence[Change] = ()


class LatestFetch(Struct, frozen=True):
    """The last fetch of a report: time in seconds since the epoch, account and days, also for people."""

    fetched_at: float
    account: int
    start: date
    end: date
    days: str


class History:
    """
    The stored reports of a state directory. Calls block; make them one at a time.

    All methods raise `StateError` if the database cannot be read or written.

    Args:
        is_read_only: Create and change nothing; without a database, it is empty.
    Raises:
        ConfigError: The directory cannot be created.
        StateError: The database is foreign, damaged, or was written by another version. It is left unchanged.
    """

    def __init__(self, directory: Path, *, is_read_only: bool = False) -> None:
        self._path = directory / FILE_NAME
        self._db = _open_read_only(self._path) if is_read_only else _open(directory)

    def close(self) -> None:
        self._db.close()

    # Versions

    def add_and_compare(self, part: Part, fetched: FetchedReport) -> Comparison:
        """Add a report, and compare it with the previous version."""
        version = self.add(part, fetched)
        if not version.is_new:
            return Comparison(version, "unchanged")
        versions = self.versions(part)
        before = versions[: versions.index(version)]
        if not before:
            return Comparison(version, "new")
        earlier = self.report(before[-1]).report
        changes = diff(earlier, fetched.report)
        is_restated = any(change.is_figure for change in changes)
        return Comparison(version, "restated" if is_restated else "document changed", earlier, changes)

    def add(self, part: Part, fetched: FetchedReport) -> Version:
        """
        Add a report as a new version, or count it as a fetch of an adjacent version with the same content.

        If earlier content returns after a different one, it is a new version, as that is a restatement, too. Answers of
        several processes may be slightly out of order. If the clock was set back by more than that, the report counts
        as fetched at the time of the last fetch, so that it is still the latest.
        """
        assert fetched.fetched_at is not None, "it came from the service"
        content = content_hash(fetched.body)
        with self._transaction():
            versions, at = self.versions(part), fetched.fetched_at
            if versions and at < versions[-1].last_fetched_at - _DISORDER_MAX_S:
                at = versions[-1].last_fetched_at
            for neighbour in _neighbours(versions, at):
                if neighbour.content_hash == content:
                    return self._count(neighbour, at)
            self._db.executemany(
                "INSERT OR IGNORE INTO sources (account, media) VALUES (?, ?)",
                {(part.account, entry.id) for brand in fetched.report.brands for entry in brand.marketing_sources},
            )
            version = Version(0, part.account, *part.days, fetched.report.last_check_sum, content, at, at, 1)
            return replace(version, number=self._insert(version, fetched.body))

    def versions(self, part: Part) -> list[Version]:
        """Return the versions of a report, oldest first."""
        return self._select("first_day = ? AND last_day = ?", part)

    def within(self, part: Part) -> list[Version]:
        """Return the versions of an account's reports whose periods lie within some days, by period, ascending."""
        return self._select("first_day >= ? AND last_day <= ?", part)

    def sources(self) -> dict[int, frozenset[int]]:
        """Return the marketing sources in all versions of reports by account."""
        with _translate_errors(self._path):
            sources: dict[int, set[int]] = {
                account: set() for (account,) in self._db.execute("SELECT DISTINCT account FROM versions")
            }
            for account, media in self._db.execute("SELECT account, media FROM sources"):
                sources.setdefault(account, set()).add(media)
        return {account: frozenset(media) for account, media in sources.items()}

    def report(self, version: Version) -> FetchedReport:
        return read_report(self.body(version), account_id=version.account, fetched_at=version.first_fetched_at)

    def body(self, version: Version) -> bytes:
        """Return the unchanged first answer of a version."""
        with _translate_errors(self._path):
            row = self._db.execute("SELECT body FROM versions WHERE number = ?", (version.number,)).fetchone()
            if row is None:
                raise sqlite3.DatabaseError(f"version {version.number} is not in it")
            return zlib.decompress(row[0])

    # Hooks

    def begin_hook(self, part: Part) -> None:
        """Start tracking a report's hook for new versions, unless it is tracked already."""
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO hooks SELECT ?1, ?2, ?3, coalesce(max(number), 0) FROM versions "
                "WHERE account = ?1 AND first_day = ?2 AND last_day = ?3",
                _key(part),
            )

    def since_hook(self, part: Part) -> list[Version]:
        """Return the last version for which the hook has run and all later ones; empty if there are none later."""
        with _translate_errors(self._path):
            row = self._db.execute(
                "SELECT up_to FROM hooks WHERE account = ? AND first_day = ? AND last_day = ?", _key(part)
            ).fetchone()
        versions = self.versions(part) if row else []
        later = [version for version in versions if version.number > row[0]]
        return versions[-len(later) - 1 :] if later else []

    def due_for_hook(self, part: Part) -> Version | None:
        """Return the latest version of a report if the report was restated since its hook ran."""
        versions = self.since_hook(part)
        for before, after in pairwise(versions):
            if is_restated(self.report(before).report, self.report(after).report):
                return versions[-1]
        if versions:
            self.end_hook(versions[-1])
        return None

    @contextmanager
    def hook_lock(self, part: Part) -> Iterator[bool]:
        """Lock the hook of a report for this process; yield False if another one is running it."""
        path = self._path.with_name(_HOOKS_LOCK)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"{path} cannot be opened ({error.strerror}); no command is run") from error
        try:
            is_free = True
            try:
                byte = zlib.crc32("{} {} {}".format(*_key(part)).encode())
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # depends on the system
                is_free = False
            yield is_free
        finally:
            os.close(descriptor)

    def end_hook(self, version: Version) -> None:
        """Record that the hook has run for a version and all earlier ones."""
        with self._transaction():
            self._db.execute(
                "UPDATE hooks SET up_to = max(up_to, ?) WHERE account = ? AND first_day = ? AND last_day = ?",
                (version.number, *_key(version.part)),
            )

    def _select(self, days: str, part: Part) -> list[Version]:
        with _translate_errors(self._path):
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM versions WHERE account = ? AND {days}"
                " ORDER BY first_day, last_day, last_fetched_at, number",
                _key(part),
            ).fetchall()
        return [msgspec.convert(dict(zip(Version.__struct_fields__, row, strict=True)), Version) for row in rows]

    def _count(self, version: Version, fetched_at: float) -> Version:
        counted = replace(
            version,
            first_fetched_at=min(version.first_fetched_at, fetched_at),
            last_fetched_at=max(version.last_fetched_at, fetched_at),
            fetches=version.fetches + 1,
        )
        self._db.execute(
            "UPDATE versions SET first_fetched_at = ?, last_fetched_at = ?, fetches = ? WHERE number = ?",
            (counted.first_fetched_at, counted.last_fetched_at, counted.fetches, counted.number),
        )
        return counted

    def _insert(self, version: Version, body: bytes) -> int:
        cursor = self._db.execute(
            f"INSERT INTO versions ({_COLUMNS}, body) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*list(msgspec.to_builtins(version).values())[1:], zlib.compress(body)),  # without the number
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with sqlite.transaction(self._db, self._path):
                yield
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be written ({error}); this version of the report was not stored, fetch it again"
            ) from error


def _key(part: Part) -> tuple[int, str, str]:
    return part.account, part.days.start.isoformat(), part.days.end.isoformat()


def _neighbours(versions: Sequence[Version], fetched_at: float) -> list[Version]:
    """Return the versions fetched just before and just after a time; the latter exists if answers are reordered."""
    before = [version for version in versions if version.first_fetched_at <= fetched_at]
    after = [version for version in versions if version.first_fetched_at > fetched_at]
    return before[-1:] + after[:1]


def latest_fetch(directory: Path) -> LatestFetch | None:
    """Return the last fetch; None if there is none, or if it cannot be read. Creates nothing in the directory."""
    path = directory / FILE_NAME
    row = None
    with suppress(StateError), _translate_errors(path):
        if (read_only := sqlite.open_read_only(path)) is None:
            return None
        with closing(read_only) as db:
            if not sqlite.check_schema(db, _APPLICATION_ID, SCHEMA_VERSION):
                return None
            row = db.execute(
                "SELECT last_fetched_at, account, first_day, last_day FROM versions "
                "ORDER BY last_fetched_at DESC LIMIT 1"
            ).fetchone()
    if row is None:
        return None
    first, last = date.fromisoformat(row[2]), date.fromisoformat(row[3])
    return LatestFetch(row[0], row[1], first, last, format_days(first, last))


def _translate_errors(path: Path) -> AbstractContextManager[None]:
    return sqlite.translate_errors(
        path, if_moved="its versions are then not shown, and new versions are stored in a new file"
    )


def _open_read_only(path: Path) -> sqlite3.Connection:
    with _translate_errors(path):
        db = sqlite.open_read_only(path)
        if db is None or not sqlite.check_schema(db, _APPLICATION_ID, SCHEMA_VERSION):
            if db is not None:
                db.close()
            db = sqlite3.connect(":memory:", check_same_thread=False)
            db.executescript(_SCHEMA)
        return db


def _open(directory: Path) -> sqlite3.Connection:
    """Open the database; create it (0600) and the directory (0700) if missing."""
    make_private(directory)
    path = directory / FILE_NAME
    with _translate_errors(path), _exclusive(directory):
        sqlite.check_files(path)
        if not path.exists():
            # SQLite gives its side files the permissions of the database, so this covers them too.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # Read-only first: opening a foreign database for writing would empty its log.
        read_only = sqlite.open_read_only(path)
        assert read_only is not None, "it was created above"
        with closing(read_only) as db:
            has_tables = sqlite.check_schema(db, _APPLICATION_ID, SCHEMA_VERSION)
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_LIMIT_S)
        try:
            if not has_tables:
                db.execute("PRAGMA journal_mode = WAL")
                sqlite.create_schema(db, _SCHEMA, _APPLICATION_ID, SCHEMA_VERSION)
        except BaseException:
            db.close()
            raise
        return db


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """
    Prevent other processes from opening the history, so that two do not create it at the same time.

    The lock is on the directory itself, so it is independent of the shipper's lock. A lock on the database would
    interfere with SQLite's own, which closing any other descriptor of the file releases.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
