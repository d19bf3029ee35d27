"""
The state store: checkpoints, dead letters and totals in one SQLite database, moved by one transaction.

All calls block; stages call them in a worker thread, one at a time.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from shipper.model.errors import StateError, StateUnwritableError
from shipper.model.records import Checkpoint, Rejection, ReplayStream, Totals
from shipper.state import ledger, ledger_upkeep
from shipper.state.accepted_ids import AcceptedIds, read_accepted_ids
from shipper.state.affiliates import ERASED, counted_as, ensure_key
from shipper.state.letters import Letters
from shipper.state.schema import (
    LETTER_BYTES,
    LETTER_OVERHEAD_BYTES,
    chain_wal,
    consumer_id_of,
    is_made,
    make_tables,
    open_for_reading,
    wal_belongs,
    wal_bytes,
    wal_path,
)
from shipper.state.sqlite import all_or_nothing, understood
from shipper.state.streams import StreamTable
from shipper.system.crash_points import crash_point
from shipper.system.work import Piece, at_work, waiting

# What passes by itself, or when somebody makes room: a full disk, a file system that is read-only for a while.
_FOR_NOW: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,
}
_MESSAGE_BYTES: Final = 4096
_WAL_BYTES: Final = 1 << 20
_BUSY_LIMIT_S: Final = 30.0
_DELETED_TOGETHER: Final = 200  # few, so that a running shipper soon has its turn
_DELETED_BYTES: Final = 1 << 22
_BETWEEN_LOOKS_S: Final = 86_400.0  # before what is past its retention goes


class Saved(NamedTuple):
    """
    What became of some checkpoints.

    Attributes:
        done: Those that were saved.
        waiting: Those that were not, as the quota has no room for their dead letters or for ones before them in the
            same stream; in their order.
        why: What has no room and what to do, in words; empty if nothing waits.
    """

    done: list[Checkpoint]
    waiting: list[Checkpoint]
    why: str = ""


class Store:
    """
    The database of one state directory, whose lock the caller holds; without it, only `purge` may be called, and only
    where `open_letters` found a state.

    Args:
        dead_letter_max_bytes: Quota of the dead letters: their bytes and a fixed number for each.
        remembered_ids: How many accepted EventIds to remember at least; 0 = none, once anything is saved.

    Attributes:
        letters: The dead letters, for looking at.
        streams: What is known of inputs.

    Raises:
        StateError: The file is not a shipper's database, is damaged, or was written by another version. It is left
            as it is.
    """

    def __init__(self, directory: Path, *, dead_letter_max_bytes: int = sys.maxsize, remembered_ids: int = 0) -> None:
        self._path = directory / "state.db"
        self._dead_letter_max_bytes = dead_letter_max_bytes
        self._lock = threading.Lock()
        if (other := open_for_reading(directory)) is not None:
            other.close()  # a foreign database is left as it is, with its log; opened for writing, it would be emptied
        self._check_wal()
        with understood(self._path):
            # SQLite gives its side files the permissions of the database, so this covers them too.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=_BUSY_LIMIT_S)
            is_ready = is_made(self._db)
        self._counted_as = counted_as(ensure_key(directory, is_expected=is_ready))
        with understood(self._path):
            self._open(is_ready=is_ready)
        self._accepted = AcceptedIds(self._db, directory, remembered_ids)
        self._remembered_ids = remembered_ids
        self.letters = Letters(self._db, self._path)
        self.streams = StreamTable(self._db, self._path, self._transaction)

    def _open(self, *, is_ready: bool) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        # SQLite itself would notice that the end is missing only when it comes to read there.
        self._empty_wal()
        size = self._db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()[0]
        if self._path.stat().st_size < size:
            raise sqlite3.DatabaseError(f"its end is missing: {self._path.stat().st_size} of {size} bytes are there")
        self._db.execute("PRAGMA wal_autocheckpoint = 0")  # `_transaction` does it
        # A spool segment is deleted after the commit that settles it, so the commit must be on disk by then.
        self._db.execute("PRAGMA synchronous = FULL")
        # A dead letter is somebody's data: when it goes, its bytes go, too.
        self._db.execute("PRAGMA secure_delete = ON")
        if not is_ready:
            make_tables(self._db)
            self._empty_wal()

    def _check_wal(self) -> None:
        """
        Raise if the database and its log do not belong together.

        Raises:
            StateError: They do not. Both are left as they are.
        """
        with understood(self._path):
            # More than once: beside a running shipper, its log may be merged between two looks.
            if any(wal_belongs(self._path) for _ in range(3)):
                return
        raise StateError(
            f"{self._path} and {wal_path(self._path)} do not belong together: one of them was restored or copied "
            "without the other. Both were left as they were. Restore both as of one moment; or move the log away to "
            "go on with the database alone: what was saved since then is sent again with the same EventIds"
        )

    def _empty_wal(self) -> None:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _bound_wal(self) -> None:
        """Merge a log that has grown, without waiting for readers: it takes room that the spool leaves on the disk."""
        if wal_bytes(self._path) >= _WAL_BYTES:
            self._db.execute("PRAGMA busy_timeout = 0")
            try:
                self._empty_wal()
            except sqlite3.Error:
                pass  # what was committed stands; the next transaction tries again
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {_BUSY_LIMIT_S * 1000:.0f}")

    def close(self) -> None:
        """Close the database, unless a thread is stuck in a transaction: then that ends with the process."""
        if self._lock.acquire(blocking=False):
            try:
                self._accepted.close()
                self._db.close()
            finally:
                self._lock.release()

    def accepted_ids(self) -> Iterator[bytes]:
        """Read the remembered EventIds, 16 bytes each, many at a time; the oldest first."""
        return read_accepted_ids(self._path.parent, self._remembered_ids)

    def totals(self) -> Totals:
        """Read what became of all records before the checkpoints."""
        with understood(self._path):
            read, accepted, dead_lettered, duplicates = self._db.execute(
                "SELECT read, accepted, dead_lettered, duplicates FROM totals"
            ).fetchone()
        return Totals(read=read, accepted=accepted, dead_lettered=dead_lettered, duplicates=duplicates)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with waiting():
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """
        Do all of it or nothing; one at a time, whatever thread it comes from.

        Raises:
            StateUnwritableError: There is no room, or no permission, for now.
            StateError: It cannot be written for another reason.
        """
        try:
            with self._alone():
                with all_or_nothing(self._db, self._path):
                    if not wal_bytes(self._path):
                        chain_wal(self._db)
                    yield
                with at_work(Piece("save", str(self._path))):
                    self._bound_wal()
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            raise (StateUnwritableError if code in _FOR_NOW else StateError)(
                f"{self._path} cannot be written ({error}); nothing is lost: "
                "what was not saved is sent again at the next start"
            ) from error

    def _count(self, **changes: int) -> None:
        """Add to the totals."""
        terms = ", ".join(f"{name} = {name} + :{name}" for name in changes)
        self._db.execute(f"UPDATE totals SET {terms}", changes)

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> Saved:
        """
        Move the checkpoints, with the dead letters and the counts that they pass, in one transaction.

        Args:
            checkpoints: Those of one stream in order.
            now_s: Seconds since the epoch.
        Raises:
            StateError: Nothing of it was saved.
        """
        done: list[Checkpoint] = []
        waiting: list[Checkpoint] = []
        held: set[int] = set()
        why = ""
        crash_point("save.begin")
        with self._transaction():
            used = int(self._db.execute("SELECT dead_letter_bytes FROM totals").fetchone()[0])
            for checkpoint in checkpoints:
                stream = checkpoint.stream
                if isinstance(stream, ReplayStream):
                    self._settle_replayed(checkpoint, stream, now_s)
                    done.append(checkpoint)
                    continue
                needed = sum(map(_letter_bytes, checkpoint.rejections))
                if stream.stream_id in held or (needed and used + needed > self._dead_letter_max_bytes):
                    why = why or self._no_room(used, needed)
                    held.add(stream.stream_id)
                    waiting.append(checkpoint)
                else:
                    self._save_one(checkpoint, needed, now_s)
                    used += needed
                    done.append(checkpoint)
            ledger.add(self._db, done, self._counted_as)
            self._accepted.append(b"".join(checkpoint.keys for checkpoint in done), now_s)
            crash_point("save.commit")
        crash_point("save.done")
        self._accepted.delete_forgotten()
        return Saved(done, waiting, why)

    def _no_room(self, used: int, needed: int) -> str:
        quota = f"state.dead_letter_max_bytes, which is {self._dead_letter_max_bytes:,}"
        if needed > self._dead_letter_max_bytes:
            return (
                f"dead letters that have to be kept together take {needed:,} bytes, more than {quota}; "
                f"set it to at least {needed:,}, and start again"
            )
        return (
            f"the dead letters take {used:,} bytes and {needed:,} more would pass {quota}; "
            "look at them with: shipper dead-letters list; make room with: shipper dead-letters purge; "
            "or stop, raise it or replay them, and start again"
        )

    def _save_one(self, checkpoint: Checkpoint, letter_bytes: int, now_s: float) -> None:
        stream = checkpoint.stream
        self.streams.save(stream, checkpoint.end_offset, checkpoint.tail, now_s)
        self._db.executemany(
            "INSERT INTO dead_letters (stream_id, path, start_offset, end_offset, rule, message, status, delivery, "
            "event_id, consumer_id, header, raw, whole_bytes, attempts, first_at, last_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    stream.stream_id,
                    stream.shown_path,
                    rejection.start_offset,
                    rejection.end_offset,
                    rejection.rule,
                    _bounded(rejection.message),
                    rejection.status,
                    rejection.delivery,
                    rejection.event_id,
                    rejection.consumer_id or consumer_id_of(rejection.raw),
                    rejection.header,
                    rejection.raw,
                    rejection.whole_bytes,
                    rejection.attempts,
                    now_s,
                    now_s,
                )
                for rejection in checkpoint.rejections
            ],
        )
        self._count(
            read=checkpoint.read,
            accepted=checkpoint.accepted,
            dead_lettered=len(checkpoint.rejections),
            duplicates=checkpoint.duplicates,
            dead_letter_bytes=letter_bytes,
        )

    def _settle_replayed(self, checkpoint: Checkpoint, stream: ReplayStream, now_s: float) -> None:
        """Delete the letters that were accepted; note the new reason of the others."""
        letter_ids = stream.letters_in(checkpoint.start_offset, checkpoint.end_offset)
        failed = {stream.letter_at(rejection.start_offset): rejection for rejection in checkpoint.rejections}
        gone = [letter_id for letter_id in letter_ids if letter_id not in failed]
        assert (len(gone), checkpoint.duplicates) == (checkpoint.accepted, 0), "a letter is one record, and is sent"
        deleted = self._delete(gone)
        self._count(
            accepted=checkpoint.accepted,
            dead_lettered=-len(gone),
            purged=deleted - len(gone),  # a letter that was purged while it was on its way has arrived after all
        )
        self._db.executemany(
            "UPDATE dead_letters SET rule = ?, message = ?, status = ?, delivery = ?, attempts = attempts + 1, "
            "last_at = ? WHERE id = ?",
            [
                (each.rule, _bounded(each.message), each.status, each.delivery, now_s, letter_id)
                for letter_id, each in failed.items()
            ],
        )

    def _delete(self, letter_ids: Sequence[int]) -> int:
        """Delete letters within a transaction, and tell how many of them there were."""
        freed: list[int] = []
        for letter_id in letter_ids:
            freed += (
                size
                for (size,) in self._db.execute(
                    f"DELETE FROM dead_letters WHERE id = ? RETURNING {LETTER_BYTES}", (letter_id,)
                )
            )
        self._count(dead_letter_bytes=-sum(freed))
        return len(freed)

    def purge(self, letter_ids: Sequence[int]) -> int:
        """
        Delete dead letters for good, a few in each transaction; they stay counted as dead letters.

        Returns:
            How many of them there still were.
        Raises:
            StateError: Some may be deleted.
        """
        purged = 0
        for start in range(0, len(letter_ids), _DELETED_TOGETHER):
            with self._transaction():
                deleted = self._delete(letter_ids[start : start + _DELETED_TOGETHER])
                self._count(purged=deleted)
            purged += deleted
        with understood(self._path):
            self._empty_wal()
        return purged

    def expire(self, before_s: float, now_s: float) -> int:
        """
        Purge a few of the dead letters that were first refused before an instant.

        A letter goes if a look a day ago found it past its retention, too: a clock that has jumped purges nothing.

        Args:
            now_s: Seconds since the epoch.
        Returns:
            How many; 0 = there is nothing more to do for now. Errors as `purge`.
        """
        with self._transaction():
            looked_at, up_to_id = self._db.execute("SELECT looked_at, up_to_id FROM expiry").fetchone() or (None, 0)
            if looked_at is not None and looked_at <= now_s < looked_at + _BETWEEN_LOOKS_S:
                return 0
            if looked_at is not None and now_s >= looked_at and (ids := self._expired(before_s, up_to_id)):
                purged = self._delete(ids)
                self._count(purged=purged)
                return purged
            first_kept = self._db.execute(
                "SELECT id FROM dead_letters WHERE first_at >= ? ORDER BY id LIMIT 1", (before_s,)
            ).fetchone()
            (last_id,) = self._db.execute("SELECT max(id) FROM dead_letters").fetchone()
            up_to_id = first_kept[0] - 1 if first_kept else last_id or 0
            self._db.execute("REPLACE INTO expiry VALUES (1, ?, ?)", (now_s, up_to_id))
        with understood(self._path):
            self._empty_wal()
        return 0

    def _expired(self, before_s: float, up_to_id: int) -> list[int]:
        """Name the oldest letters that are past their retention, a few and not too many bytes."""
        ids: list[int] = []
        size = 0
        for letter_id, letter_bytes in self._db.execute(
            f"SELECT id, {LETTER_BYTES} FROM dead_letters WHERE id <= ? AND first_at < ? ORDER BY id LIMIT ?",
            (up_to_id, before_s, _DELETED_TOGETHER),
        ):
            if ids and size + letter_bytes > _DELETED_BYTES:
                break
            ids.append(letter_id)
            size += letter_bytes
        return ids

    def expire_ledger(self, before_s: float, now_s: float) -> int:
        """
        Delete a few counts of the ledger, of the days that ended before an instant.

        Args, Returns, Raises:
            As `expire`.
        """
        day = datetime.fromtimestamp(before_s, UTC).date().isoformat()
        with self._transaction():
            deleted = ledger_upkeep.expire(self._db, day, now_s)
        if not deleted:
            with understood(self._path):
                self._empty_wal()
        return deleted

    def erase_affiliate(self, affiliate_id: str) -> int:
        """
        Count what is counted under an AffiliateID without it, and leave no copy of it.

        Args:
            affiliate_id: As it came, or as the ledger shows it.
        Returns:
            How many counts that were.
        Raises:
            StateError: It cannot be written, a part of the ledger is damaged, or copies may be left.
        """
        erased = self._counted_as(affiliate_id)
        with self._transaction():
            changed = ledger_upkeep.rename(self._db, lambda name: ERASED if name == erased else name)
        self.scrub()
        return changed

    def scrub(self) -> None:
        """
        Write the database anew, so that not even copies of deleted bytes, in pages that SQLite reordered, are left.

        Raises:
            StateError: There is no room for it, or somebody else uses the database.
        """
        try:
            self._db.execute("VACUUM")
            self._empty_wal()
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be written anew ({error}), so copies of deleted bytes may be left in it; "
                "run the same command again"
            ) from error


def _letter_bytes(rejection: Rejection) -> int:
    return len(rejection.raw) + len(rejection.header) + LETTER_OVERHEAD_BYTES


def _bounded(message: str) -> str:
    return message.encode("utf-8", "backslashreplace")[:_MESSAGE_BYTES].decode("utf-8", "ignore")
