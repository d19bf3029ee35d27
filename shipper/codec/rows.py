"""Parse rows of CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shipper.codec.judge import document_in
from shipper.model.framing import CsvRows, Framing

csv.field_size_limit(2**31 - 1)  # how long a record may be is the settings' business


class Unreadable(NamedTuple):
    """Why a row cannot be read: the rule, and what is wrong."""

    rule: str
    message: str


def read_rows(raws: Sequence[bytes], framing: CsvRows) -> list[dict[str, str] | Unreadable]:
    """
    Read rows into documents of text, with the columns' names.

    Args:
        raws: One row each, with or without its newline; none is blank.
    """
    if framing.repeated:
        first, second = framing.repeated
        return [Unreadable("csv", f"the columns {first} and {second} of the header have the same name")] * len(raws)
    try:
        texts = [raw.decode() for raw in raws]
        rows = list(csv.reader(texts, delimiter=framing.delimiter, strict=True))
    except (UnicodeDecodeError, csv.Error):
        return [_read_row(raw, framing) for raw in raws]
    if len(rows) != len(raws):
        return [_read_row(raw, framing) for raw in raws]
    return [_document(row, framing) for row in rows]


def read_document(raw: bytes, framing: Framing) -> Mapping[str, Any]:
    """Read a record as it came, before any mapping; empty if it cannot be read."""
    if isinstance(framing, CsvRows):
        (row,) = read_rows([raw], framing)
        return {} if isinstance(row, Unreadable) else row
    return document_in(raw.replace(b"\n", b"\r")) or {}


def _read_row(raw: bytes, framing: CsvRows) -> dict[str, str] | Unreadable:
    try:
        rows = list(csv.reader([raw.decode()], delimiter=framing.delimiter, strict=True))
    except UnicodeDecodeError:
        return Unreadable("encoding", "the row is not UTF-8")
    except csv.Error as error:
        return Unreadable("csv", f"the row is not CSV: {error}")
    return _document(rows[0] if len(rows) == 1 else [], framing)


def _document(row: list[str], framing: CsvRows) -> dict[str, str] | Unreadable:
    if len(row) != len(framing.names):
        return Unreadable("csv", f"the row has {len(row)} values, the header {len(framing.names)}")
    return dict(zip(framing.names, row, strict=True))
