"""
The state store: checkpoints, dead letters and totals in one SQLite database, updated in one transaction.

All calls block; stages make them in worker threads, one at a time.
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

from msgspec.structs import asdict

from shipper.model.errors import StateError, StateUnwritableError
from shipper.model.records import Checkpoint, Rejection, ReplayStream, Totals, consumer_id_of
from shipper.state import ledger
from shipper.state.accepted_ids import AcceptedIds, read_accepted_ids
from shipper.state.affiliates import ERASED, affiliate_namer, ensure_key
from shipper.state.directory import LIVE_FILE
from shipper.state.letters import Letters
from shipper.state.schema import (
    LETTER_BYTES,
    LETTER_OVERHEAD_BYTES,
    chain_wal,
    check_pages,
    check_wal,
    create_tables,
    is_initialized,
    open_for_reading,
    wal_bytes,
)
from shipper.state.sqlite import advice_for, fetch, transaction, translate_errors
from shipper.state.streams import StreamTable
from shipper.system.crash_points import crash_point
from shipper.system.work import WorkItem, at_work, waiting

# Transient errors, such as a full disk or a temporarily read-only file system.
_TRANSIENT: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY,
}
_MESSAGE_BYTES: Final = 4096
_WAL_BYTES: Final = 1 << 20
_EMPTY_WAL: Final = "PRAGMA wal_checkpoint(TRUNCATE)"
_BUSY_LIMIT_S: Final = 30.0
_LETTER_COLUMNS: Final = (
    *("stream_id", "path", "start_offset", "end_offset", "rule", "message", "status", "delivery", "event_id"),
    *("consumer_id", "header", "raw", "whole_bytes", "attempts", "first_at", "last_at"),
)
_INSERT_LETTER: Final = (
    f"INSERT INTO dead_letters ({', '.join(_LETTER_COLUMNS)}) VALUES (:{', :'.join(_LETTER_COLUMNS)})"
)
_DELETE_BATCH: Final = 200  # small, so that a running shipper does not wait long
_DELETE_BATCH_BYTES: Final = 1 << 22
_EXPIRY_INTERVAL_S: Final = 86_400.0


class SaveResult(NamedTuple):
    """
    The result of saving checkpoints.

    Attributes:
        done: Saved checkpoints.
        waiting: Checkpoints not saved because their dead letters, or those of earlier ones in the same stream, exceed
            the quota; in their original order.
        reason: Which limit was reached and what to do, for humans; empty if nothing waits.
    """

    done: list[Checkpoint]
    waiting: list[Checkpoint]
    reason: str = ""


class Store:
    """
    The database of a state directory, whose lock the caller must hold. Only `purge` of existing state does not need it.

    Args:
        dead_letter_max_bytes: Quota of the dead letters: their bytes and a fixed overhead for each.
        remembered_ids: Minimum number of accepted EventIds to remember; 0 = none, from the first save on.

    Attributes:
        letters: The dead letters, for reading.
        streams: The saved inputs.

    Raises:
        StateError: The file is foreign, damaged, or was written by another version. It is left unchanged.
    """

    def __init__(self, directory: Path, *, dead_letter_max_bytes: int = sys.maxsize, remembered_ids: int = 0) -> None:
        self._path = directory / "state.db"
        self._dead_letter_max_bytes = dead_letter_max_bytes
        self._lock = threading.Lock()
        # Read-only first: opening a foreign database for writing would empty its log.
        open_for_reading(directory).close()
        check_wal(self._path)
        with translate_errors(self._path):
            if not self._path.exists():
                (directory / LIVE_FILE).unlink(missing_ok=True)  # of a database that was moved away
            # SQLite gives its side files the permissions of the database, so this covers them too.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=_BUSY_LIMIT_S)
            self._inode = self._path.stat().st_ino
            is_new = not is_initialized(self._db)
        self._name_affiliate = affiliate_namer(ensure_key(directory, is_expected=not is_new))
        with translate_errors(self._path):
            self._open(is_new=is_new)
        self._accepted = AcceptedIds(self._db, directory, remembered_ids)
        self._remembered_ids = remembered_ids
        self.letters = Letters(self._db, self._path)
        self.streams = StreamTable(self._db, self._path, self._transaction)

    def _open(self, *, is_new: bool) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        # SQLite itself would notice a truncated file only when reading the missing pages. Those in a log, which another
        # process may be using, are no part of the file yet.
        self._db.execute(_EMPTY_WAL)
        self._db.execute("BEGIN")
        size = self._db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()[0]
        if not wal_bytes(self._path) and self._path.stat().st_size < size:
            raise sqlite3.DatabaseError(f"it is truncated: {self._path.stat().st_size} of {size} bytes are left")
        self._db.execute("COMMIT")
        # Otherwise each start might send records before it finds that it cannot save them.
        check_pages(self._db)
        self._db.execute("PRAGMA wal_autocheckpoint = 0")  # `_transaction` does it
        # A spool segment is deleted after the commit that settles it, so the commit must be on disk by then.
        self._db.execute("PRAGMA synchronous = FULL")
        # Dead letters are personal data: overwrite deleted ones.
        self._db.execute("PRAGMA secure_delete = ON")
        if is_new:
            create_tables(self._db)
            self._db.execute(_EMPTY_WAL)

    def _empty_wal(self) -> None:
        fetch(self._db, self._path, _EMPTY_WAL)

    def _bound_wal(self) -> None:
        """Merge a large log, without waiting for readers: the spool's reserve of disk space does not include it."""
        if wal_bytes(self._path) >= _WAL_BYTES:
            self._db.execute("PRAGMA busy_timeout = 0")
            try:
                self._db.execute(_EMPTY_WAL)
            except sqlite3.Error:
                pass  # committed data is safe; the next transaction tries again
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {_BUSY_LIMIT_S * 1000:.0f}")

    def close(self) -> None:
        """Close the database unless a thread is stuck in a transaction, which then ends with the process."""
        if self._lock.acquire(blocking=False):
            try:
                self._db.close()
            finally:
                self._lock.release()

    def accepted_ids(self) -> Iterator[bytes]:
        """Yield the remembered EventIds, 16 bytes each, in large pieces, oldest first."""
        return read_accepted_ids(self._path.parent, self._remembered_ids)

    def totals(self) -> Totals:
        """Return the totals of all records before the checkpoints."""
        ((read, accepted, dead_lettered, duplicates),) = fetch(
            self._db, self._path, "SELECT read, accepted, dead_lettered, duplicates FROM totals"
        )
        return Totals(read=read, accepted=accepted, dead_lettered=dead_lettered, duplicates=duplicates)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run a transaction; threads take turns."""
        with waiting():
            self._lock.acquire()
        try:
            self._check_place()
            with transaction(self._db, self._path):
                if not wal_bytes(self._path):
                    chain_wal(self._db)
                yield
            with at_work(WorkItem("save", str(self._path))):
                self._bound_wal()
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            is_damaged = code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
            raise (StateUnwritableError if code in _TRANSIENT else StateError)(
                f"{self._path} cannot be written ({error}); nothing is lost: unsaved records are sent again at the "
                f"next start{f'. {advice_for(error)}' if is_damaged else ''}"
            ) from error
        finally:
            self._lock.release()

    def _check_place(self) -> None:
        """Raise `StateError` if the path names another file: nobody would find what SQLite still writes."""
        try:
            inode = self._path.stat().st_ino
        except (FileNotFoundError, NotADirectoryError):
            inode = -1
        except OSError:
            return  # such as a folder that became inaccessible; the database is open
        if inode == self._inode:
            return
        raise StateError(
            f"{self._path} was deleted, moved or replaced while it was in use. Unsaved records are sent again at the "
            "next start; if the state was moved by mistake, put it back first"
        )

    def _count(self, **changes: int) -> None:
        terms = ", ".join(f"{name} = {name} + :{name}" for name in changes)
        self._db.execute(f"UPDATE totals SET {terms}", changes)

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> SaveResult:
        """Save checkpoints, in order for each stream, in one transaction; raise `StateError` if nothing was saved."""
        done: list[Checkpoint] = []
        waiting: list[Checkpoint] = []
        waiting_streams: set[int] = set()
        reason = ""
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
                if stream.stream_id in waiting_streams or (needed and used + needed > self._dead_letter_max_bytes):
                    reason = reason or self._explain_quota(used, needed)
                    waiting_streams.add(stream.stream_id)
                    waiting.append(checkpoint)
                else:
                    self._save_one(checkpoint, needed, now_s)
                    used += needed
                    done.append(checkpoint)
            ledger.add(self._db, done, self._name_affiliate)
            self._accepted.append(b"".join(checkpoint.accepted_keys for checkpoint in done), now_s)
            crash_point("save.commit")
        crash_point("save.done")
        self._accepted.delete_orphans()
        return SaveResult(done, waiting, reason)

    def _explain_quota(self, used: int, needed: int) -> str:
        quota = f"state.dead_letter_max_bytes, which is {self._dead_letter_max_bytes:,}"
        if needed > self._dead_letter_max_bytes:
            return (
                f"dead letters that must be saved together take {needed:,} bytes, more than {quota}; "
                f"set it to at least {needed:,}, and start again"
            )
        return (
            f"the dead letters take {used:,} bytes and {needed:,} more would exceed {quota}; "
            "list them with: shipper dead-letters list; make room with: shipper dead-letters purge; "
            "or stop, raise the limit or replay them, and start again"
        )

    def _save_one(self, checkpoint: Checkpoint, letter_bytes: int, now_s: float) -> None:
        stream = checkpoint.stream
        self.streams.save(stream, checkpoint.end_offset, checkpoint.tail, now_s)
        common = {"stream_id": stream.stream_id, "path": stream.shown_path}
        self._db.executemany(
            _INSERT_LETTER,
            [
                asdict(rejection)
                | common
                | {
                    "message": _truncate(rejection.message),
                    "consumer_id": rejection.consumer_id or consumer_id_of(rejection.raw),
                    "first_at": rejection.first_at or now_s,
                    "last_at": rejection.first_at or now_s,
                }
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
        """Delete the accepted letters; save the new reason of the others."""
        letter_ids = stream.letters_in(checkpoint.start_offset, checkpoint.end_offset)
        failed = {stream.letter_at(rejection.start_offset): rejection for rejection in checkpoint.rejections}
        accepted = [letter_id for letter_id in letter_ids if letter_id not in failed]
        assert (len(accepted), checkpoint.duplicates) == (checkpoint.accepted, 0), "a letter is one record, and is sent"
        deleted = self._delete(accepted)
        self._count(
            accepted=checkpoint.accepted,
            dead_lettered=-len(accepted),
            purged=deleted - len(accepted),  # letters purged while in flight count as accepted
        )
        self._db.executemany(
            "UPDATE dead_letters SET rule = ?, message = ?, status = ?, delivery = ?, attempts = attempts + 1, "
            "last_at = ? WHERE id = ?",
            [
                (rejection.rule, _truncate(rejection.message), rejection.status, rejection.delivery, now_s, letter_id)
                for letter_id, rejection in failed.items()
            ],
        )

    def _delete(self, letter_ids: Sequence[int]) -> int:
        """Delete letters within a transaction; return how many existed."""
        query = f"DELETE FROM dead_letters WHERE id = ? RETURNING {LETTER_BYTES}"
        freed = [size for letter_id in letter_ids for (size,) in self._db.execute(query, (letter_id,))]
        self._count(dead_letter_bytes=-sum(freed))
        return len(freed)

    def purge(self, letter_ids: Sequence[int]) -> int:
        """
        Delete dead letters permanently, a batch in each transaction; return how many still existed.

        The totals still count them as dead letters. After an error, some may have been deleted.
        """
        purged = 0
        for start in range(0, len(letter_ids), _DELETE_BATCH):
            with self._transaction():
                deleted = self._delete(letter_ids[start : start + _DELETE_BATCH])
                self._count(purged=deleted)
            purged += deleted
        self._empty_wal()
        return purged

    def expire(self, before_s: float, now_s: float) -> int:
        """
        Purge a batch of the dead letters that were first rejected before a time.

        Letters are purged only if their retention had ended a day ago, too, so that a clock jump purges nothing.

        Returns:
            How many were purged; 0 = nothing is left to do for now.
        """
        with self._transaction():
            looked_at, up_to_id = self._db.execute("SELECT looked_at, up_to_id FROM expiry").fetchone() or (None, 0)
            if looked_at is not None and looked_at <= now_s < looked_at + _EXPIRY_INTERVAL_S:
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
        self._empty_wal()
        return 0

    def _expired(self, before_s: float, up_to_id: int) -> list[int]:
        """Return the ids of the oldest letters past their retention, up to a number and a size."""
        ids: list[int] = []
        size = 0
        for letter_id, letter_bytes in self._db.execute(
            f"SELECT id, {LETTER_BYTES} FROM dead_letters WHERE id <= ? AND first_at < ? ORDER BY id LIMIT ?",
            (up_to_id, before_s, _DELETE_BATCH),
        ):
            if ids and size + letter_bytes > _DELETE_BATCH_BYTES:
                break
            ids.append(letter_id)
            size += letter_bytes
        return ids

    def expire_ledger(self, before_s: float, now_s: float) -> int:
        """Delete a batch of ledger counts of days that ended before a time; see `expire`."""
        day = datetime.fromtimestamp(before_s, UTC).date().isoformat()
        with self._transaction():
            deleted = ledger.expire(self._db, day, now_s)
        if not deleted:
            self._empty_wal()
        return deleted

    def erase_affiliate(self, affiliate_id: str) -> int:
        """Move the counts of an AffiliateID, given as such or as its name, to `ERASED`; return how many changed."""
        erased = self._name_affiliate(affiliate_id)
        with self._transaction():
            changed = ledger.rename(self._db, lambda name: ERASED if name == erased else name)
        self.scrub()
        return changed

    def scrub(self) -> None:
        """Rewrite the database, so that pages which SQLite rearranged keep no copies of deleted data."""
        try:
            self._db.execute("VACUUM")
            self._db.execute(_EMPTY_WAL)
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be rewritten ({error}), so it may still contain copies of deleted data; "
                "run the same command again"
            ) from error


def _letter_bytes(rejection: Rejection) -> int:
    return len(rejection.raw) + len(rejection.header) + LETTER_OVERHEAD_BYTES


def _truncate(message: str) -> str:
    return message.encode("utf-8", "backslashreplace")[:_MESSAGE_BYTES].decode("utf-8", "ignore")
