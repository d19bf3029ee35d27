"""
The history of reports: every version of a period that was fetched, so that a restatement can be shown.

It has its own database in the state directory, outside the directory's lock: reports are fetched while a sidecar
runs, also by several processes at once.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from shipper.model.errors import StateError
from shipper.report.content import content_hash
from shipper.report.history_file import FILE_NAME, HOOKS_LOCK, note_sources, open_database, understood
from shipper.report.ranges import DateRange
from shipper.state.sqlite import all_or_nothing

_COLUMNS: Final = (
    "number, account, first_day, last_day, check_sum, content_hash, first_fetched_at, last_fetched_at, fetches"
)
_ACCOUNTS: Final = "SELECT DISTINCT account FROM versions"


class _CheckSum(Struct):
    lastCheckSum: str


class Version(Struct, frozen=True):
    """
    One version of the report of an account and period: what it said from one fetch to another.

    Attributes:
        number: Identifies it in this history.
        start: First day that was asked for.
        end: Last day that was asked for, included.
        check_sum: `lastCheckSum` as the service wrote it.
        content_hash: Of what the report says, see `content_hash`.
        first_fetched_at: When the content came first, seconds since the epoch.
        last_fetched_at: When the same content came last.
        fetches: How often it came.
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
        """The days that were asked for."""
        return DateRange(self.start, self.end)


class Added(NamedTuple):
    """
    What became of an answer.

    Attributes:
        is_new: Whether its content differs from what was fetched before it, if anything was.
    """

    version: Version
    is_new: bool


class LatestFetch(Struct, frozen=True):
    """The report that was fetched last: when, seconds since the epoch, and what was asked for."""

    fetched_at: float
    account: int
    start: date
    end: date


class History:
    """
    The reports of one state directory. Calls block, and are made one at a time.

    Raises:
        ConfigError: The directory cannot be made.
        StateError: The database is foreign, damaged, or was written by another version. It is left as it is.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._db = open_database(directory)

    def __repr__(self) -> str:
        return f"<History {self._path}>"

    def close(self) -> None:
        self._db.close()

    def add(self, account: int, start: date, end: date, body: bytes, fetched_at: float) -> Added:
        """
        Keep an answer, or count it if what was fetched before it had the same content.

        A content that comes back after another one is a version of its own: that is a restatement, too.

        Args:
            start: First day that was asked for.
            end: Last day that was asked for, included.
            body: The answer, as `read_report` could read it.
            fetched_at: Seconds since the epoch. Answers of several processes may come a little out of order.
        Raises:
            StateError: It could not be kept.
        """
        content = content_hash(body)
        with self._transaction():
            versions = self.versions(account, start, end)
            for neighbour in _neighbours(versions, fetched_at):
                # An earlier version of this program may have made the hash otherwise.
                if content == neighbour.content_hash or content == content_hash(self.body(neighbour)):
                    counted = replace(neighbour, content_hash=content)
                    return Added(self._count(counted, fetched_at), is_new=False)
            version = Version(
                number=0,
                account=account,
                start=start,
                end=end,
                check_sum=msgspec.json.decode(body, type=_CheckSum).lastCheckSum,
                content_hash=content,
                first_fetched_at=fetched_at,
                last_fetched_at=fetched_at,
                fetches=1,
            )
            note_sources(self._db, account, body)
            return Added(self._insert(version, body), is_new=True)

    def versions(self, account: int, start: date, end: date) -> list[Version]:
        """
        List the versions of an account and period, the latest at the end.

        Raises:
            StateError: The database cannot be read.
        """
        return self._select("first_day = ? AND last_day = ?", account, start, end)

    def within(self, account: int, start: date, end: date) -> list[Version]:
        """
        List the versions of all periods of an account that lie within two days.

        Returns:
            Period by period, ascending; of each the latest version at the end.
        Raises:
            StateError: The database cannot be read.
        """
        return self._select("first_day >= ? AND last_day <= ?", account, start, end)

    def _select(self, days: str, account: int, start: date, end: date) -> list[Version]:
        with understood(self._path):
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM versions WHERE account = ? AND {days}"
                " ORDER BY first_day, last_day, last_fetched_at, number",
                (account, start.isoformat(), end.isoformat()),
            ).fetchall()
        return [_version(row) for row in rows]

    def latest_of_all(self) -> LatestFetch | None:
        with understood(self._path):
            row = self._db.execute(
                "SELECT last_fetched_at, account, first_day, last_day FROM versions "
                "ORDER BY last_fetched_at DESC LIMIT 1"
            ).fetchone()
        return LatestFetch(row[0], row[1], date.fromisoformat(row[2]), date.fromisoformat(row[3])) if row else None

    def sources(self) -> dict[int, frozenset[int]]:
        """
        Return, by account, the marketing sources that any version of its reports names; of each account that is kept.

        Raises:
            StateError: The database cannot be read.
        """
        with understood(self._path):
            found: dict[int, set[int]] = {number: set() for (number,) in self._db.execute(_ACCOUNTS)}
            for account, media in self._db.execute("SELECT account, media FROM sources"):
                found.setdefault(account, set()).add(media)
        return {account: frozenset(media) for account, media in found.items()}

    def body(self, version: Version) -> bytes:
        """
        Return the answer that a version came with first, unchanged.

        Raises:
            StateError: The database cannot be read.
        """
        with understood(self._path):
            row = self._db.execute("SELECT body FROM versions WHERE number = ?", (version.number,)).fetchone()
            if row is None:
                raise sqlite3.DatabaseError(f"version {version.number} is not in it")
            return zlib.decompress(row[0])

    def begin_hook(self, account: int, start: date, end: date) -> None:
        """
        Make a hook due for versions of a period that come from now on, unless it was begun before.

        Raises:
            StateError: It cannot be kept.
        """
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO hooks SELECT ?1, ?2, ?3, coalesce(max(number), 0) FROM versions "
                "WHERE account = ?1 AND first_day = ?2 AND last_day = ?3",
                (account, start.isoformat(), end.isoformat()),
            )

    def since_hook(self, account: int, start: date, end: date) -> list[Version]:
        """
        List the versions of a period that a hook has not been run for, behind the one that it was run for last.

        Returns:
            Empty if there are none, or no hook was begun.
        Raises:
            StateError: The database cannot be read.
        """
        with understood(self._path):
            row = self._db.execute(
                "SELECT up_to FROM hooks WHERE account = ? AND first_day = ? AND last_day = ?",
                (account, start.isoformat(), end.isoformat()),
            ).fetchone()
        versions = self.versions(account, start, end) if row else []
        later = [version for version in versions if version.number > row[0]]
        return versions[-len(later) - 1 :] if later else []

    @contextmanager
    def hook_turn(self, account: int, start: date, end: date) -> Iterator[bool]:
        """
        Keep other processes from running a hook for a period meanwhile; yields whether none of them does already.

        The lock is that of a byte in a file of its own: it ends with the process.

        Raises:
            StateError: The file cannot be opened.
        """
        path = self._path.with_name(HOOKS_LOCK)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"{path} cannot be opened ({error.strerror}); no hook is run") from error
        try:
            is_free = True
            try:
                byte = zlib.crc32(f"{account} {start} {end}".encode())
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):  # which of the two is up to the system
                is_free = False
            yield is_free
        finally:
            os.close(descriptor)

    def end_hook(self, version: Version) -> None:
        """Note that a hook was run for a version, and so for those before it; raises as `begin_hook` does."""
        with self._transaction():
            self._db.execute(
                "UPDATE hooks SET up_to = max(up_to, ?) WHERE account = ? AND first_day = ? AND last_day = ?",
                (version.number, version.account, version.start.isoformat(), version.end.isoformat()),
            )

    def _count(self, version: Version, fetched_at: float) -> Version:
        counted = replace(
            version,
            first_fetched_at=min(version.first_fetched_at, fetched_at),
            last_fetched_at=max(version.last_fetched_at, fetched_at),
            fetches=version.fetches + 1,
        )
        self._db.execute(
            "UPDATE versions SET content_hash = ?, first_fetched_at = ?, last_fetched_at = ?, fetches = ? "
            "WHERE number = ?",
            (counted.content_hash, counted.first_fetched_at, counted.last_fetched_at, counted.fetches, counted.number),
        )
        return counted

    def _insert(self, version: Version, body: bytes) -> Version:
        values = [*astuple(version), zlib.compress(body)][1:]
        cursor = self._db.execute(
            f"INSERT INTO versions ({_COLUMNS}, body) VALUES (NULL{', ?' * len(values)})",
            [value.isoformat() if isinstance(value, date) else value for value in values],
        )
        assert cursor.lastrowid is not None
        return replace(version, number=cursor.lastrowid)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with all_or_nothing(self._db, self._path):
                yield
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be written ({error}); this version of the report is not kept, fetch it again"
            ) from error


def _version(row: Sequence[object]) -> Version:
    return msgspec.convert(dict(zip(Version.__struct_fields__, row, strict=True)), Version)


def _neighbours(versions: Sequence[Version], fetched_at: float) -> list[Version]:
    """Find what was fetched just before and just after; the latter only if answers come out of order."""
    before = [version for version in versions if version.first_fetched_at <= fetched_at]
    after = [version for version in versions if version.first_fetched_at > fetched_at]
    return before[-1:] + after[:1]


def latest_fetch(directory: Path) -> LatestFetch | None:
    """
    Return which report was fetched last into a state directory, without creating anything there.

    Returns:
        None if there is no history, or nothing in it.
    Raises:
        StateError: As for `History`.
    """
    path = directory / FILE_NAME
    if not os.path.lexists(path):
        return None
    history = History(directory)
    try:
        return history.latest_of_all()
    finally:
        history.close()
