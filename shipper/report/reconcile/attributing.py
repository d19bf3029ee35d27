"""Where the ledger would count the dead letters, as far as their records can be read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from shipper.codec.mapping import SourceMapping
from shipper.codec.normalize import normalizers
from shipper.codec.rows import Unreadable, read_rows
from shipper.config.mapping import FIELDS
from shipper.config.settings import RecordsSettings
from shipper.model.framing import csv_rows
from shipper.model.records import LedgerKey
from shipper.state.affiliates import CountedAs
from shipper.state.letters import Content

_HOUR: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d):\d\d:\d\dZ", re.ASCII)
_MEDIA: Final = re.compile(r"(\d{1,20})_", re.ASCII)
_NEEDED: Final = ("Timestamp", "BrandID", "BTag", "AffiliateID")


class Attributed(NamedTuple):
    """
    Dead letters, counted.

    Attributes:
        counts: By where the ledger would count them.
        unattributed: Those without a Timestamp, BrandID or media that can be read.
    """

    counts: Mapping[LedgerKey, int]
    unattributed: int = 0


def attribute(
    contents: Iterable[Content], records: RecordsSettings, counted_as: CountedAs, *, csv_delimiter: str = ""
) -> Attributed:
    """
    Count dead letters.

    Args:
        records: How records are mapped and put right.
        counted_as: Names the affiliates, as in the ledger.
        csv_delimiter: Between the values of rows of CSV; empty = their header tells.
    """
    mapping = SourceMapping(records.field_sources)
    mending = normalizers(records.assume_timezone, relaxed=())
    counts: Counter[LedgerKey] = Counter()
    unattributed = 0
    for content in contents:
        document = _document(content, csv_delimiter)
        fields = {} if document is None else dict(zip(FIELDS, mapping.columns([document]), strict=True))
        key = _key({name: mending[name](fields[name])[0] for name in _NEEDED} if fields else {}, counted_as)
        if key is None:
            unattributed += 1
        else:
            counts[key] += 1
    return Attributed(counts, unattributed)


def _document(content: Content, csv_delimiter: str) -> Mapping[str, Any] | None:
    """Read the record of a letter; None if it is none, or only its position is known."""
    if content.header and content.raw:
        framing = csv_rows(content.header, is_whole=True, delimiter=csv_delimiter)
        row = read_rows([content.raw], framing)[0] if framing else None
        return None if isinstance(row, Unreadable) else row
    try:
        document = msgspec.json.decode(content.raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _key(fields: Mapping[str, Any], counted_as: CountedAs) -> LedgerKey | None:
    timestamp, brand_id, tag, affiliate_id = (fields.get(name) for name in _NEEDED)
    hour = _HOUR.fullmatch(timestamp) if isinstance(timestamp, str) else None
    media = _MEDIA.match(tag) if isinstance(tag, str) else None
    if hour is None or media is None or type(brand_id) is not int:
        return None
    return hour[1], brand_id, counted_as(affiliate_id) if isinstance(affiliate_id, str) else "", media[1]
