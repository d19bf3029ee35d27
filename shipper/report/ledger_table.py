"""The ledger as a flat table, by time, brand, affiliate and media; and where dead letters belong in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from shipper.codec.mapping import SourceMapping
from shipper.codec.normalize import normalizers
from shipper.codec.rows import Unreadable, read_rows
from shipper.config.mapping import FIELDS
from shipper.config.settings import RecordsSettings
from shipper.model.framing import csv_rows
from shipper.model.records import LedgerKey
from shipper.report.days import Days
from shipper.report.ranges import DateRange
from shipper.report.rows import Column, FlatTable
from shipper.state.affiliates import CountedAs
from shipper.state.ledger import LedgerRow
from shipper.state.letters import Content

By = Literal["hour", "day", "month", "brand", "affiliate", "media"]

_NAMED: Final = (Column("brand_id", "integer"), Column("affiliate_id", "text"), Column("media", "text"))
_NAMES: Final = tuple(column.name for column in _NAMED)
_COUNTS: Final = ("accepted", "duplicates", "dead_letters")


class LedgerCounts(NamedTuple):
    """Events of one line of the table."""

    accepted: int = 0
    duplicates: int = 0
    dead_letters: int = 0

    def plus(self, other: LedgerCounts) -> LedgerCounts:
        return LedgerCounts(*(mine + its for mine, its in zip(self, other, strict=True)))


def ledger_table(
    ledger: Iterable[LedgerRow], dead_letters: Mapping[LedgerKey, int], *, days: Days, by: By, only: DateRange | None
) -> FlatTable:
    """
    Build the table.

    Args:
        dead_letters: By where the ledger would count them.
        days: Of which time zone.
        by: A line per hour, day or month has brand, affiliate and media beside it; one per brand, affiliate or media
            has the counts of all times.
        only: Days of that zone; None = all.
    Returns:
        In the order of time, brand, affiliate and media.
    Raises:
        ConfigError: The zone is not a whole number of hours apart from UTC.
    """
    columns = _columns(by)
    found: dict[tuple[str, tuple[Any, ...]], LedgerCounts] = {}

    def add(key: LedgerKey, counts: LedgerCounts) -> None:
        hour, *names = key
        day = days.day_of(hour)
        if only is None or only.start.isoformat() <= day <= only.end.isoformat():
            values = dict(zip(_NAMES, names, strict=True))
            match by:
                case "hour":
                    values["hour"] = days.hour_of(hour)
                case "day":
                    values["day"] = day
                case "month":
                    values["month"] = day[:7]
            # By the hour of UTC, in order: where clocks are set back, the hours of the zone are not.
            place = hour if by == "hour" else "", tuple(values[column.name] for column in columns)
            found[place] = found.get(place, LedgerCounts()).plus(counts)

    for row in ledger:
        key = (row.hour, row.brand_id, row.affiliate_id, row.media)
        add(key, LedgerCounts(accepted=row.accepted, duplicates=row.duplicates))
    for key, count in dead_letters.items():
        add(key, LedgerCounts(dead_letters=count))
    counts = [Column(name, "integer") for name in _COUNTS]
    return FlatTable("ledger", (*columns, *counts), [(*place[1], *found[place]) for place in sorted(found)])


def _columns(by: By) -> list[Column]:
    """List what a line is of."""
    if by in ("brand", "affiliate", "media"):
        return [column for column in _NAMED if column.name.removesuffix("_id") == by]
    return [Column(by, "text"), *_NAMED]


def totals_of(table: FlatTable) -> dict[str, int]:
    totals = Counter(dict.fromkeys(_COUNTS, 0))
    for row in table.rows:
        for name, value in zip(_COUNTS, row[-len(_COUNTS) :], strict=True):
            assert isinstance(value, int)
            totals[name] += value
    return dict(totals)


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
