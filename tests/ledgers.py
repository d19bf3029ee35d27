"""Reads a ledger for tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from shipper.model.records import LedgerKey
from shipper.state.ledger import LedgerRow, read_counts


def read_ledger(directory: Path, start: str = "", end: str = "~") -> list[LedgerRow]:
    """Return the sorted counts of a directory, one row per key."""
    accepted, repeated = Counter[LedgerKey](), Counter[LedgerKey]()
    for row in read_counts(directory, start, end):
        key = row.hour, row.brand_id, row.affiliate_id, row.media
        accepted[key] += row.accepted
        repeated[key] += row.duplicates
    return [LedgerRow(*key, accepted[key], repeated[key]) for key in sorted(accepted)]
