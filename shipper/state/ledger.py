"""
Counts of accepted records, by the dimensions of the platform's report: hour, brand, affiliate and media.

Counts with recurring keys are added up in the table `ledger`. If nearly every event has its own key, that table would
grow with the input and cost a random access per event; such counts are appended instead, one compressed row of
`ledger_parts` for each save, and added up when they are read. If keys recur only from save to save, the latest parts
are moved to the table from time to time.

Either way, a save is a single statement, which SQLite runs without the GIL. Beside a busy event loop, a thread waits
milliseconds for the GIL each time.

AffiliateIDs that are not identifiers are counted under a keyed hash, see `affiliates`.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, repeat, starmap
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from shipper.model.records import Checkpoint, LedgerKey, Tally
from shipper.state.affiliates import NameAffiliate, are_identifiers
from shipper.state.schema import reading
from shipper.system.native import NATIVE

_ON_CONFLICT: Final = (
    "ON CONFLICT DO UPDATE SET accepted = accepted + excluded.accepted, duplicates = duplicates + excluded.duplicates"
)
_ADD: Final = f"""
INSERT INTO ledger (hour, brand_id, affiliate_id, media, accepted, duplicates)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]')
FROM json_each(?) WHERE TRUE {_ON_CONFLICT}
"""
_CHANGED: Final = "renamed(affiliate_id) != affiliate_id"
_RENAME: Final = f"""
INSERT INTO ledger (hour, brand_id, affiliate_id, media, accepted, duplicates)
SELECT hour, brand_id, renamed(affiliate_id), media, accepted, duplicates FROM ledger WHERE {_CHANGED} {_ON_CONFLICT}
"""
_EXPIRE: Final = """
DELETE FROM ledger WHERE (hour, brand_id, affiliate_id, media) IN
    (SELECT hour, brand_id, affiliate_id, media FROM ledger WHERE hour < ? ORDER BY hour LIMIT ?)
"""
_APPENDED_KEYS_MIN: Final = 256  # updating fewer in place is as cheap
_EVENTS_PER_KEY: Final = 4  # above this, keys recur
_LATEST_PARTS: Final = 16  # searched for recurring keys together
_LATEST_BYTES_MAX: Final = 1 << 19  # adding up more would take too long
_EXPIRY_BATCH: Final = 1000  # small, so that saves do not wait long
_EXPIRY_INTERVAL_S: Final = 86_400.0


class LedgerRow(Struct, frozen=True):
    """
    Counts of the events of one hour, brand, affiliate and media.

    Attributes:
        hour: Of the Timestamp, `YYYY-MM-DDThh`, UTC.
        affiliate_id: Empty, an identifier, or the hash of an AffiliateID that is not one.
        media: The digits before the BTag's `_`, which identify the marketing source; empty if there are none.
        accepted: Events accepted by the service, each counted once.
        duplicates: Events whose EventId was accepted before; skipped, or sent nevertheless as replayed dead letters.
    """

    hour: str
    brand_id: int
    affiliate_id: str
    media: str
    accepted: int
    duplicates: int


Columns = Sequence[Sequence[Any]]
"""Hours, brands, affiliates, media, accepted, duplicates; one entry per key, and every key once."""

decode_columns: Final = msgspec.msgpack.Decoder(
    tuple[list[str], list[int], list[str], list[str], list[int], list[int]]
).decode
"""Reads columns in MessagePack."""


def compress_columns(columns: bytes) -> bytes:
    """Compress columns in MessagePack to the data of a ledger part."""
    from isal import isal_zlib  # five times as fast as zlib; rarely needed

    return isal_zlib.compress(columns, 1)


def unpack(data: bytes) -> Columns:
    """Decode the data of a ledger part; raise sqlite3.DatabaseError if it is damaged."""
    try:
        columns = decode_columns(zlib.decompress(data))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise sqlite3.DatabaseError(f"a part of its ledger is damaged: {error}") from None
    if len({len(column) for column in columns}) != 1:
        raise sqlite3.DatabaseError("a part of its ledger is damaged: its columns differ in length")
    return columns


def _pack(columns: Columns) -> bytes:
    return compress_columns(msgspec.msgpack.encode(columns))


def _columns_of(accepted: Mapping[LedgerKey, int], repeated: Mapping[LedgerKey, int]) -> Columns:
    keys = [*accepted, *(repeated.keys() - accepted.keys())]
    fields = map(list, zip(*keys, strict=True)) if keys else [[]] * 4
    return [*fields, *(list(map(counts.get, keys, repeat(0))) for counts in (accepted, repeated))]


# Counting -------------------------------------------------------------------------------------------------------------


class Sums(Protocol):
    """Counts added up by key: `_Sums`, or the native extension's `Tally`."""

    def __len__(self) -> int: ...

    def total(self) -> int:
        """Return the number of events."""

    def hours(self) -> tuple[str, str]:
        """Return the first and the last hour."""

    def columns(self) -> bytes:
        """Return `Columns` in MessagePack."""


def add(db: sqlite3.Connection, checkpoints: Iterable[Checkpoint], name_affiliate: NameAffiliate) -> None:
    """Add the counts of checkpoints, within the transaction that saves them."""
    sums = sum_checkpoints(checkpoints, name_affiliate)
    if is_sparse(sums):
        part = (*sums.hours(), compress_columns(sums.columns()))
        last = db.execute("INSERT INTO ledger_parts (first_hour, last_hour, data) VALUES (?, ?, ?)", part).lastrowid
        if last is not None and last % _LATEST_PARTS == 0:
            _move_recurring(db, (last - _LATEST_PARTS, last))
    elif len(sums):
        _add_columns(db, msgspec.msgpack.decode(sums.columns()))


def _add_columns(db: sqlite3.Connection, columns: Columns) -> None:
    db.execute(_ADD, (msgspec.json.encode(list(zip(*columns, strict=True))).decode(),))


def _move_recurring(db: sqlite3.Connection, ids: tuple[int, int]) -> None:
    """Move the counts of parts to the table if most of their keys recur, and they are not too many."""
    where = "FROM ledger_parts WHERE id > ? AND id <= ?"
    if db.execute(f"SELECT sum(length(data)) {where}", ids).fetchone()[0] > _LATEST_BYTES_MAX:
        return
    parts = [data for (data,) in db.execute(f"SELECT data {where}", ids)]
    accepted, repeated = Counter[LedgerKey](), Counter[LedgerKey]()
    try:
        first, last = (set(zip(*unpack(data)[:4], strict=True)) for data in (parts[0], parts[-1]))
        if len(first & last) < len(last) // 8:
            return
        for data in parts:
            for total, counts in zip((accepted, repeated), _counts_in(unpack(data)), strict=True):
                _add_to(total, counts)
    except sqlite3.DatabaseError:  # a part is damaged, which is reported when somebody reads it
        return
    columns = _columns_of(accepted, repeated)
    if accepted.total() + repeated.total() > _EVENTS_PER_KEY * len(columns[0]):
        _add_columns(db, columns)
        db.execute(f"DELETE {where}", ids)


def sum_checkpoints(checkpoints: Iterable[Checkpoint], name_affiliate: NameAffiliate) -> Sums:
    accepted: list[Tally] = []
    repeated: list[Tally] = []
    for checkpoint in checkpoints:
        accepted += checkpoint.ledger
        repeated += checkpoint.repeated
    sums: Sums | None = None if NATIVE is None else NATIVE.add_up(accepted, repeated)
    return _Sums(accepted, repeated, name_affiliate) if sums is None else sums


def is_sparse(sums: Sums) -> bool:
    """Return whether there are many keys with few events each."""
    return len(sums) >= _APPENDED_KEYS_MIN and sums.total() <= _EVENTS_PER_KEY * len(sums)


class _Sums:
    def __init__(self, accepted: Iterable[Tally], repeated: Iterable[Tally], name_affiliate: NameAffiliate) -> None:
        both = sum_tallies(accepted), sum_tallies(repeated)
        if not are_identifiers({key[2] for counts in both for key in counts}):
            both = _rename_keys(both[0], name_affiliate), _rename_keys(both[1], name_affiliate)
        self._columns = _columns_of(*both)

    def __len__(self) -> int:
        return len(self._columns[0])

    def total(self) -> int:
        return sum(self._columns[4]) + sum(self._columns[5])

    def hours(self) -> tuple[str, str]:
        return min(self._columns[0]), max(self._columns[0])

    def columns(self) -> bytes:
        return msgspec.msgpack.encode(self._columns)


def sum_tallies(tallies: Iterable[Tally]) -> Counter[LedgerKey]:
    """Add up counts, and drop keys whose count is zero."""
    total: Counter[LedgerKey] = Counter()
    for tally in tallies:
        _add_to(total, tally if isinstance(tally, dict) else dict(tally.items()))
    return total if all(total.values()) else +total


def _add_to(total: Counter[LedgerKey], counts: Mapping[LedgerKey, int]) -> None:
    if total.keys().isdisjoint(counts):
        dict.update(total, counts)  # far cheaper for many keys
    else:
        total.update(counts)


def _rename_keys(counts: Mapping[LedgerKey, int], name: Callable[[str], str]) -> Counter[LedgerKey]:
    renamed: Counter[LedgerKey] = Counter()
    for (hour, brand_id, affiliate_id, media), count in counts.items():
        renamed[hour, brand_id, name(affiliate_id), media] += count
    return renamed


# Reading --------------------------------------------------------------------------------------------------------------


def read_counts(directory: Path, start: str = "", end: str = "~") -> Iterator[LedgerRow]:
    """
    Yield the counts of a directory, which may be in use; hours from `start` to before `end`, or a prefix.

    They are in no order, and those of a key may be in several rows; there may be millions, so do not collect them.
    """
    with reading(directory) as db:
        rows = db.execute(
            "SELECT hour, brand_id, affiliate_id, media, accepted, duplicates FROM ledger WHERE hour >= ? AND hour < ?",
            (start, end),
        )
        yield from starmap(LedgerRow, rows)
        query = "SELECT data FROM ledger_parts WHERE last_hour >= ? AND first_hour < ? ORDER BY id"
        for (data,) in db.execute(query, (start, end)):
            part = unpack(data)
            is_selected = [start <= hour < end for hour in part[0]]
            yield from map(LedgerRow, *(compress(column, is_selected) for column in part))


def _counts_in(columns: Columns) -> tuple[dict[LedgerKey, int], dict[LedgerKey, int]]:
    """Return the accepted and the non-zero repeated counts by key."""
    keys = list(zip(*columns[:4], strict=True))
    repeated = {key: count for key, count in zip(keys, columns[5], strict=True) if count}
    return dict(zip(keys, columns[4], strict=True)), repeated


def kept_from(directory: Path) -> str:
    """Return the day (UTC) before which counts were deleted, empty = none; call it after reading the counts."""
    with reading(directory) as db:
        return str(db.execute("SELECT kept_from FROM ledger_expiry").fetchone()[0])


# Erasing and expiring -------------------------------------------------------------------------------------------------


def rename(db: sqlite3.Connection, name: Callable[[str], str]) -> int:
    """Rename affiliates within a transaction, merging equal new names; return how many counts changed."""
    db.create_function("renamed", 1, name, deterministic=True)
    db.execute(_RENAME)
    changed = db.execute(f"DELETE FROM ledger WHERE {_CHANGED}").rowcount
    for (part_id,) in db.execute("SELECT id FROM ledger_parts").fetchall():
        (data,) = db.execute("SELECT data FROM ledger_parts WHERE id = ?", (part_id,)).fetchone()
        columns = unpack(data)
        renamed = {affiliate_id for affiliate_id in set(columns[2]) if name(affiliate_id) != affiliate_id}
        if renamed:
            changed += sum(affiliate_id in renamed for affiliate_id in columns[2])
            accepted, repeated = _counts_in(columns)
            data = _pack(_columns_of(_rename_keys(accepted, name), _rename_keys(repeated, name)))
            db.execute("UPDATE ledger_parts SET data = ? WHERE id = ?", (data, part_id))
    return changed


def expire(db: sqlite3.Connection, before: str, now_s: float) -> int:
    """
    Delete a batch of counts of the days before a day (`YYYY-MM-DD`, UTC), within a transaction.

    Counts are deleted only if their retention had ended a day ago, too, so that a clock jump deletes nothing.

    Returns:
        How many were deleted; 0 = nothing is left to do for now.
    """
    looked_at, due, kept_from = db.execute("SELECT looked_at, due, kept_from FROM ledger_expiry").fetchone()
    if looked_at <= now_s < looked_at + _EXPIRY_INTERVAL_S:
        return 0
    before_both = min(before, due)
    if looked_at <= now_s and (deleted := _delete_some(db, before_both)):
        db.execute("UPDATE ledger_expiry SET kept_from = ?", (max(kept_from, before_both),))
        return deleted
    db.execute("UPDATE ledger_expiry SET looked_at = ?, due = ?", (now_s, before))
    return 0


def _delete_some(db: sqlite3.Connection, before: str) -> int:
    """Delete a batch of counts from the table or, if it has none, from one part."""
    deleted: int = db.execute(_EXPIRE, (before, _EXPIRY_BATCH)).rowcount
    if deleted:
        return deleted
    part = db.execute(
        "SELECT id, last_hour, data FROM ledger_parts WHERE first_hour < ? ORDER BY first_hour LIMIT 1", (before,)
    ).fetchone()
    if part is None:
        return 0
    part_id, last_hour, data = part
    rest, deleted = _drop_old(data, before)
    if last_hour < before:
        db.execute("DELETE FROM ledger_parts WHERE id = ?", (part_id,))
    else:
        db.execute("UPDATE ledger_parts SET first_hour = ?, data = ? WHERE id = ?", (before, rest, part_id))
    return deleted


def _drop_old(data: bytes, before: str) -> tuple[bytes, int]:
    """Drop the counts before a day from a part; return the rest, and how many were dropped, at least 1."""
    try:
        columns = unpack(data)
    except sqlite3.DatabaseError:  # deleted once all of its hours are old; until then, reading it is an error
        return data, 1
    is_kept = [hour >= before for hour in columns[0]]
    return _pack([list(compress(column, is_kept)) for column in columns]), max(1, is_kept.count(False))
