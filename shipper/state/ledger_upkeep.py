"""Later changes to the ledger: erases affiliates, and expires hours past the retention."""

from __future__ import annotations

import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Final

import msgspec

_CHANGED: Final = "renamed(affiliate_id) != affiliate_id"
_RENAME: Final = f"""
INSERT INTO ledger (hour, brand_id, affiliate_id, media, accepted, duplicates)
SELECT hour, brand_id, renamed(affiliate_id), media, accepted, duplicates FROM ledger WHERE {_CHANGED}
ON CONFLICT DO UPDATE SET accepted = accepted + excluded.accepted, duplicates = duplicates + excluded.duplicates
"""
_EXPIRE: Final = """
DELETE FROM ledger WHERE (hour, brand_id, affiliate_id, media) IN
    (SELECT hour, brand_id, affiliate_id, media FROM ledger WHERE hour < ? ORDER BY hour LIMIT ?)
"""
_EXPIRED_TOGETHER: Final = 1000  # few, so that a save soon has its turn
_BETWEEN_LOOKS_S: Final = 86_400.0  # before what is past its retention goes

Columns = Sequence[Sequence[Any]]
"""Hours, brands, affiliates, media, accepted, duplicates; one entry each per key, and each key once."""

decoded: Final = msgspec.msgpack.Decoder(tuple[list[str], list[int], list[str], list[str], list[int], list[int]]).decode
"""Reads columns in MessagePack."""


def packed(columns: Columns) -> bytes:
    """Make the data of a part of the ledger."""
    return compressed(msgspec.msgpack.encode(columns))


def compressed(data: bytes) -> bytes:
    """Make the data of a part of the ledger from columns in MessagePack."""
    from isal import isal_zlib  # five times as fast, and needed by few

    return isal_zlib.compress(data, 1)


def unpacked(data: bytes) -> Columns:
    """
    Read the data of a part of the ledger.

    Raises:
        sqlite3.DatabaseError: It is damaged.
    """
    try:
        columns = decoded(zlib.decompress(data))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise sqlite3.DatabaseError(f"a part of its ledger is damaged: {error}") from None
    if len({len(column) for column in columns}) != 1:
        raise sqlite3.DatabaseError("a part of its ledger is damaged: its columns differ in length")
    return columns


def rename(db: sqlite3.Connection, name: Callable[[str], str]) -> int:
    """
    Count under other names of affiliates, within a transaction; what gets the same name is added up.

    Args:
        name: Returns the new name; that of a new one is the same.
    Returns:
        How many counts have another name now.
    Raises:
        sqlite3.DatabaseError: A part is damaged.
    """
    db.create_function("renamed", 1, name, deterministic=True)
    db.execute(_RENAME)
    changed = db.execute(f"DELETE FROM ledger WHERE {_CHANGED}").rowcount
    for (part_id,) in db.execute("SELECT id FROM ledger_parts").fetchall():
        (data,) = db.execute("SELECT data FROM ledger_parts WHERE id = ?", (part_id,)).fetchone()
        columns = unpacked(data)
        names = {each: new for each in set(columns[2]) if (new := name(each)) != each}
        if names:
            changed += sum(each in names for each in columns[2])
            data = packed(_added([*columns[:2], [names.get(each, each) for each in columns[2]], *columns[3:]]))
            db.execute("UPDATE ledger_parts SET data = ? WHERE id = ?", (data, part_id))
    return changed


def _added(columns: Columns) -> Columns:
    """Add up the counts of equal keys."""
    accepted: Counter[tuple[Any, ...]] = Counter()
    repeated: Counter[tuple[Any, ...]] = Counter()
    for *key, count, repeats in zip(*columns, strict=True):
        accepted[tuple(key)] += count
        repeated[tuple(key)] += repeats
    return [*map(list, zip(*accepted, strict=True)), list(accepted.values()), list(repeated.values())]


def expire(db: sqlite3.Connection, before: str, now_s: float) -> int:
    """
    Delete some counts of the days before one, within a transaction.

    They go if a look a day ago found them past their retention, too: a clock that has jumped deletes nothing.

    Args:
        before: `YYYY-MM-DD`, UTC.
        now_s: Seconds since the epoch.
    Returns:
        How many; 0 = there is nothing more to do for now.
    """
    looked_at, due, kept_from = db.execute("SELECT looked_at, due, kept_from FROM ledger_expiry").fetchone()
    if looked_at <= now_s < looked_at + _BETWEEN_LOOKS_S:
        return 0
    before_both = min(before, due)
    if looked_at <= now_s and (deleted := _delete_some(db, before_both)):
        db.execute("UPDATE ledger_expiry SET kept_from = ?", (max(kept_from, before_both),))
        return deleted
    db.execute("UPDATE ledger_expiry SET looked_at = ?, due = ?", (now_s, before))
    return 0


def _delete_some(db: sqlite3.Connection, before: str) -> int:
    """Delete a few counts of the table; once there are none, those of one part."""
    deleted: int = db.execute(_EXPIRE, (before, _EXPIRED_TOGETHER)).rowcount
    if deleted:
        return deleted
    part = db.execute(
        "SELECT id, last_hour, data FROM ledger_parts WHERE first_hour < ? ORDER BY first_hour LIMIT 1", (before,)
    ).fetchone()
    if part is None:
        return 0
    part_id, last_hour, data = part
    kept, deleted = _without_old(data, before)
    if last_hour < before:
        db.execute("DELETE FROM ledger_parts WHERE id = ?", (part_id,))
    else:
        db.execute("UPDATE ledger_parts SET first_hour = ?, data = ? WHERE id = ?", (before, kept, part_id))
    return deleted


def _without_old(data: bytes, before: str) -> tuple[bytes, int]:
    """Leave the counts of the days before one out of a part; return the rest, and how many they were, 1 at least."""
    try:
        columns = unpacked(data)
    except sqlite3.DatabaseError:  # it goes when all of its hours do; until then, whoever reads it is told
        return data, 1
    is_kept = [hour >= before for hour in columns[0]]
    return packed([list(compress(column, is_kept)) for column in columns]), max(1, is_kept.count(False))
