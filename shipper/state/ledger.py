"""What was accepted, by what the platform's report counts it by: hour, brand, affiliate and media."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from msgspec import Struct

from shipper.records import Checkpoint, LedgerKey
from shipper.state.schema import open_for_reading, understood

_ADD: Final = """
INSERT INTO ledger (hour, brand_id, affiliate_id, media, accepted, duplicates) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET accepted = accepted + excluded.accepted, duplicates = duplicates + excluded.duplicates
"""


class LedgerRow(Struct, frozen=True):
    """
    Events of one hour, brand, affiliate and media.

    Attributes:
        hour: Of the Timestamp, `YYYY-MM-DDThh`, UTC.
        affiliate_id: Of the events; may be empty.
        media: The digits in front of the BTag's `_`: the marketing source; empty if there are none.
        accepted: By the service, each once.
        duplicates: Skipped here, as their EventId had just been read.
    """

    hour: str
    brand_id: int
    affiliate_id: str
    media: str
    accepted: int
    duplicates: int


def add(db: sqlite3.Connection, checkpoints: Iterable[Checkpoint]) -> None:
    """Count what some checkpoints pass, within the transaction that saves them."""
    accepted: Counter[LedgerKey] = Counter()
    repeated: Counter[LedgerKey] = Counter()
    for checkpoint in checkpoints:
        accepted.update(checkpoint.ledger)
        repeated.update(checkpoint.repeated)
    rows = {key: (accepted[key], repeated[key]) for key in accepted | repeated}
    db.executemany(_ADD, [(*key, *counts) for key, counts in rows.items() if any(counts)])


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
        rows = db.execute(
            "SELECT hour, brand_id, affiliate_id, media, accepted, duplicates FROM ledger "
            "WHERE hour >= ? AND hour < ? ORDER BY hour, brand_id, affiliate_id, media",
            (start, end),
        )
        return [LedgerRow(*row) for row in rows]
