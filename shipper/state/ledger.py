"""
Counts of accepted records, by the dimensions of the platform's report: hour, brand, affiliate and media.

Counts that recur are added up in place, in the table `ledger`. Where nearly each event has a key of its own, that
table would grow with the input and cost a random access for each event; so such counts are appended, those of a save
as one compressed row of `ledger_parts`, and added up when they are read.

Both are a single statement each: SQLite runs it without Python's lock, which a thread beside a busy event loop waits
milliseconds for, each time.

An AffiliateID that is no identifier is counted under a keyed hash, see `affiliates`.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import compress, repeat
from pathlib import Path
from sys import intern
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from shipper.model.records import Checkpoint, LedgerKey, Tally
from shipper.state.affiliates import CountedAs, are_identifiers
from shipper.state.ledger_upkeep import Columns, compressed, unpacked
from shipper.state.schema import open_for_reading
from shipper.state.sqlite import understood
from shipper.system.native import NATIVE

_ADD: Final = """
INSERT INTO ledger (hour, brand_id, affiliate_id, media, accepted, duplicates)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]')
FROM json_each(?) WHERE TRUE
ON CONFLICT DO UPDATE SET accepted = accepted + excluded.accepted, duplicates = duplicates + excluded.duplicates
"""
_APPEND: Final = "INSERT INTO ledger_parts (first_hour, last_hour, data) VALUES (?, ?, ?)"
_APPENDED_KEYS_MIN: Final = 256  # fewer are as cheap in place
_EVENTS_PER_KEY: Final = 4  # with more than that, keys recur


class LedgerRow(Struct, frozen=True):
    """
    Events of one hour, brand, affiliate and media.

    Attributes:
        hour: Of the Timestamp, `YYYY-MM-DDThh`, UTC.
        affiliate_id: Of the events; may be empty, or a hash of one that is no identifier.
        media: The digits in front of the BTag's `_`: the marketing source; empty if there are none.
        accepted: By the service, each once.
        duplicates: Their EventId was accepted before; skipped here, or sent all the same as a dead letter.
    """

    hour: str
    brand_id: int
    affiliate_id: str
    media: str
    accepted: int
    duplicates: int


def add(db: sqlite3.Connection, checkpoints: Iterable[Checkpoint], counted_as: CountedAs) -> None:
    """
    Count what some checkpoints pass, within the transaction that saves them.

    Args:
        counted_as: Names the affiliates.
    """
    sums = summed(checkpoints, counted_as)
    if is_sparse(sums):
        db.execute(_APPEND, (*sums.hours(), compressed(sums.columns())))
    elif len(sums):
        columns = msgspec.msgpack.decode(sums.columns())
        db.execute(_ADD, (msgspec.json.encode(list(zip(*columns, strict=True))).decode(),))


class Sums(Protocol):
    """What some checkpoints pass, added up by key."""

    def __len__(self) -> int: ...

    def total(self) -> int:
        """Return how many events."""

    def hours(self) -> tuple[str, str]:
        """Return the first and the last one."""

    def columns(self) -> bytes:
        """Return `Columns` in MessagePack."""


def summed(checkpoints: Iterable[Checkpoint], counted_as: CountedAs) -> Sums:
    """Add up what checkpoints pass."""
    passed = list(checkpoints)
    accepted = [tally for each in passed for tally in each.ledger]
    repeated = [tally for each in passed for tally in each.repeated]
    sums: Sums | None = None if NATIVE is None else NATIVE.add_up(accepted, repeated)
    return _Sums.of(accepted, repeated, counted_as) if sums is None else sums


def is_sparse(sums: Sums) -> bool:
    """Return whether the keys are many that hardly recur."""
    return len(sums) >= _APPENDED_KEYS_MIN and sums.total() <= _EVENTS_PER_KEY * len(sums)


class _Sums:
    """Has the methods of the native part's `Tally`, with the same answers."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    @classmethod
    def of(cls, accepted: Iterable[Tally], repeated: Iterable[Tally], counted_as: CountedAs) -> _Sums:
        """Add up what was accepted and what was repeated."""
        both = added(accepted), added(repeated)
        if not are_identifiers({key[2] for counts in both for key in counts}):
            both = _renamed(both[0], counted_as), _renamed(both[1], counted_as)
        keys = [*both[0], *(both[1].keys() - both[0].keys())]
        fields = zip(*keys, strict=True) if keys else [()] * 4
        return cls([*fields, *(list(map(counts.get, keys, repeat(0))) for counts in both)])

    def __len__(self) -> int:
        return len(self._columns[0])

    def total(self) -> int:
        return sum(self._columns[4]) + sum(self._columns[5])

    def hours(self) -> tuple[str, str]:
        return min(self._columns[0]), max(self._columns[0])

    def columns(self) -> bytes:
        return msgspec.msgpack.encode(self._columns)


def _renamed(counts: Counter[LedgerKey], counted_as: CountedAs) -> Counter[LedgerKey]:
    found: Counter[LedgerKey] = Counter()
    for (hour, brand_id, affiliate_id, media), count in counts.items():
        found[hour, brand_id, counted_as(affiliate_id), media] += count
    return found


def read_ledger(directory: Path, start: str = "", end: str = "~") -> list[LedgerRow]:
    """
    Read the ledger of a state directory, also beside a shipper that runs.

    Args:
        start, end: Hours, `YYYY-MM-DDThh` or the beginning of one; the end is not included.
    Returns:
        In the order of hour, brand, affiliate and media; none if there is no state yet.
    Raises:
        StateError: The database cannot be read.
    """
    db = open_for_reading(directory)
    if db is None:
        return []
    with closing(db), understood(directory / "state.db"):
        db.execute("BEGIN")  # so that both tables are of one moment
        rows = db.execute(
            "SELECT hour, brand_id, affiliate_id, media, accepted, duplicates FROM ledger "
            "WHERE hour >= ? AND hour < ? ORDER BY hour, brand_id, affiliate_id, media",
            (start, end),
        )
        parts = db.execute(
            "SELECT data FROM ledger_parts WHERE last_hour >= ? AND first_hour < ? ORDER BY id", (start, end)
        )
        return _merged([LedgerRow(*row) for row in rows], map(unpacked, (data for (data,) in parts)), start, end)


def kept_from(directory: Path) -> str:
    """
    Return the day, `YYYY-MM-DD` of UTC, before which counts were deleted; empty if none were.

    Read it after what it is to be said of. Errors as `read_ledger`.
    """
    db = open_for_reading(directory)
    if db is None:
        return ""
    with closing(db), understood(directory / "state.db"):
        return str(db.execute("SELECT coalesce(max(kept_from), '') FROM ledger_expiry").fetchone()[0])


def _merged(rows: list[LedgerRow], parts: Iterator[Columns], start: str, end: str) -> list[LedgerRow]:
    """Add the parts, one after the other, to the rows of the table."""
    accepted: Counter[LedgerKey] = Counter()
    repeated: Counter[LedgerKey] = Counter()
    for part in parts:
        is_asked = [start <= hour < end for hour in part[0]]
        hours, *rest = (list(compress(column, is_asked)) for column in part)
        keys = list(zip(map(intern, hours), *rest[:3], strict=True))
        add_to(accepted, dict(zip(keys, rest[3], strict=True)))
        add_to(repeated, {key: count for key, count in zip(keys, rest[4], strict=True) if count})
    if not accepted and not repeated:
        return rows
    for row in rows:
        key = (row.hour, row.brand_id, row.affiliate_id, row.media)
        accepted[key] += row.accepted
        repeated[key] += row.duplicates
    found = sorted(accepted.keys() | repeated.keys())
    return [LedgerRow(*key, accepted.get(key, 0), repeated.get(key, 0)) for key in found]


def added(tallies: Iterable[Tally]) -> Counter[LedgerKey]:
    """Add counts up; without the keys of which none is left."""
    total: Counter[LedgerKey] = Counter()
    for tally in tallies:
        add_to(total, tally if isinstance(tally, dict) else dict(tally.items()))
    return total if all(total.values()) else +total


def add_to(total: Counter[LedgerKey], counts: Mapping[LedgerKey, int]) -> None:
    """Add counts to a total."""
    if total.keys().isdisjoint(counts):
        dict.update(total, counts)  # far cheaper, if they are many
    else:
        total.update(counts)
