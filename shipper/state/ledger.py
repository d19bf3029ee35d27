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
from typing import Final

import msgspec
from msgspec import Struct

from shipper.model.records import Checkpoint, LedgerKey
from shipper.state.affiliates import CountedAs, are_identifiers
from shipper.state.ledger_upkeep import Columns, packed, unpacked
from shipper.state.schema import open_for_reading
from shipper.state.sqlite import understood

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
    passed = list(checkpoints)
    accepted = _without_zeros(added(checkpoint.ledger for checkpoint in passed))
    repeated = _without_zeros(added(checkpoint.repeated for checkpoint in passed))
    if not accepted and not repeated:
        return
    columns = _columns(accepted, repeated)
    if not are_identifiers(set(columns[2])):
        columns = _columns(_renamed(accepted, counted_as), _renamed(repeated, counted_as))
    keys, events = len(columns[0]), accepted.total() + repeated.total()
    if keys >= _APPENDED_KEYS_MIN and events <= _EVENTS_PER_KEY * keys:
        db.execute(_APPEND, (min(columns[0]), max(columns[0]), packed(columns)))
    else:
        db.execute(_ADD, (msgspec.json.encode(list(zip(*columns, strict=True))).decode(),))


def _columns(accepted: Counter[LedgerKey], repeated: Counter[LedgerKey]) -> Columns:
    keys = [*accepted, *(repeated.keys() - accepted.keys())]
    return [*zip(*keys, strict=True), *(list(map(each.get, keys, repeat(0))) for each in (accepted, repeated))]


def _without_zeros(counts: Counter[LedgerKey]) -> Counter[LedgerKey]:
    """Leave out the keys of which all events were refused in the end."""
    return counts if all(counts.values()) else +counts


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


def added(ledgers: Iterable[Mapping[LedgerKey, int]]) -> Counter[LedgerKey]:
    """Add counts up."""
    total: Counter[LedgerKey] = Counter()
    for ledger in ledgers:
        add_to(total, ledger)
    return total


def add_to(total: Counter[LedgerKey], counts: Mapping[LedgerKey, int]) -> None:
    """Add counts to a total."""
    if total.keys().isdisjoint(counts):
        dict.update(total, counts)  # far cheaper, if they are many
    else:
        total.update(counts)
