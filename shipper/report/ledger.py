"""The ledger as a flat table by time, brand, affiliate and media, including dead letters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import date
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from shipper.codec.documents import SourceMapping, read_document
from shipper.codec.normalize import normalizers
from shipper.config.mapping import FIELDS
from shipper.config.settings import RecordsSettings, Settings
from shipper.model.framing import LINES, csv_rows
from shipper.model.records import LedgerKey
from shipper.report.days import Days
from shipper.report.ranges import DAY, DateRange
from shipper.report.rows import Column, FlatTable
from shipper.state.affiliates import NameAffiliate, affiliate_namer, read_or_generate_key
from shipper.state.ledger import LedgerRow, kept_from, read_counts
from shipper.state.letters import Content, Selection, open_letters

By = Literal["hour", "day", "month", "brand", "affiliate", "media"]

_NAMES: Final = (Column("brand_id", "integer"), Column("affiliate_id", "text"), Column("media", "text"))
_PLACES: Final = {"brand": 1, "affiliate": 2, "media": 3}  # in a `LedgerKey`
_COUNTS: Final = ("accepted", "duplicates", "dead_letters")
_HOUR: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d):\d\d:\d\dZ", re.ASCII)
_MEDIA: Final = re.compile(r"(\d{1,20})_", re.ASCII)
_NEEDED: Final = ("Timestamp", "BrandID", "BTag", "AffiliateID")
_BATCH: Final = 64  # dead letters; one by one takes several times as long


class DeadLetterCounts(NamedTuple):
    """Dead letters by ledger key, and the number of those without a readable Timestamp, BrandID or media."""

    counts: Mapping[LedgerKey, int]
    unattributed: int = 0


def read_range(settings: Settings, period: DateRange | None) -> Iterator[LedgerRow]:
    """Read the ledger for a period, see `hours_around`; rows as in `read_counts`."""
    return read_counts(settings.state.directory, *hours_around(period))


def hours_around(period: DateRange | None) -> tuple[str, str]:
    """Return bounds of the hours of a period, None = all, with a margin that covers its days in any time zone."""
    with suppress(OverflowError):  # near the limits of the calendar
        if period is not None:
            return (period.start - 2 * DAY).isoformat(), (period.end + 2 * DAY).isoformat()
    return "", "~"


def first_complete_day(settings: Settings, days: Days) -> date | None:
    """Return the first day without expired counts, None = all; call it after reading the ledger."""
    start = kept_from(settings.state.directory)
    if not start:
        return None
    first = date.fromisoformat(start)
    day = date.fromisoformat(days.day_of(f"{first}T00"))
    is_partial = days.day_of(f"{first - DAY}T23") == str(day)
    return day + DAY if is_partial else day


def read_dead_letters(
    settings: Settings, period: DateRange | None, deliveries: Sequence[str] = ("",)
) -> DeadLetterCounts:
    """Count the dead letters of some delivery classes (`""` = any) by ledger key, for a period as in `read_range`."""
    with closing(open_letters(settings.state.directory)) as letters:
        contents = (content for delivery in deliveries for content in letters.contents(Selection(delivery=delivery)))
        name_affiliate = affiliate_namer(read_or_generate_key(settings.state.directory))
        delimiter = settings.input.csv_delimiter
        return count_dead_letters(
            contents, settings.records, name_affiliate, csv_delimiter=delimiter, hours=hours_around(period)
        )


def count_dead_letters(
    contents: Iterable[Content],
    records: RecordsSettings,
    name_affiliate: NameAffiliate,
    *,
    csv_delimiter: str = "",
    hours: tuple[str, str] = ("", "~"),
) -> DeadLetterCounts:
    """
    Count dead letters by ledger key.

    Args:
        csv_delimiter: Empty = detect it from the header.
        hours: Count from the first hour to before the second one; unattributed letters count in any case.
    """
    mapping = SourceMapping(records.field_sources)
    normalize = normalizers(records.assume_timezone, relaxed=())
    counts: Counter[LedgerKey] = Counter()
    unattributed = 0
    for header, group in groupby(contents, key=itemgetter(0)):
        framing = csv_rows(header, is_whole=True, delimiter=csv_delimiter) if header else None
        while documents := [read_document(content.raw, framing or LINES) for content in islice(group, _BATCH)]:
            fields = dict(zip(FIELDS, mapping.columns(documents), strict=True))
            columns = [normalize[name](fields[name]) for name in _NEEDED]
            for document, *values in zip(documents, *columns, strict=True):
                key = _key(name_affiliate, *values) if document else None
                if key is None:
                    unattributed += 1
                elif hours[0] <= key[0] < hours[1]:
                    counts[key] += 1
    return DeadLetterCounts(counts, unattributed)


def _key(name_affiliate: NameAffiliate, timestamp: Any, brand_id: Any, tag: Any, affiliate_id: Any) -> LedgerKey | None:
    hour = _HOUR.fullmatch(timestamp) if isinstance(timestamp, str) else None
    media = _MEDIA.match(tag) if isinstance(tag, str) else None
    if hour is None or media is None or type(brand_id) is not int:
        return None
    return hour[1], brand_id, name_affiliate(affiliate_id) if isinstance(affiliate_id, str) else "", media[1]


def ledger_table(
    ledger: Iterable[LedgerRow], dead_letters: Mapping[LedgerKey, int], *, days: Days, by: By, period: DateRange | None
) -> FlatTable:
    """
    Return the table, sorted by time, brand, affiliate and media.

    Args:
        days: The days of a time zone.
        by: The columns: hour, day or month, each with brand, affiliate and media; or only brand, affiliate or media,
            over all times.
        period: Days of that zone; None = all.
    Raises:
        ConfigError: The zone's offset from UTC is not a whole number of hours.
    """
    columns = [column for column in _NAMES if column.name.removesuffix("_id") == by] or [Column(by, "text"), *_NAMES]
    rows: dict[tuple[str, tuple[Any, ...]], list[int]] = {}
    first, last = map(str, period or ("", "~"))

    def add(key: LedgerKey, *counts: int) -> None:
        hour = key[0]
        day = days.day_of(hour)
        if not first <= day <= last:
            return
        if by in _PLACES:
            names: tuple[Any, ...] = (key[_PLACES[by]],)
        else:
            names = days.hour_of(hour) if by == "hour" else day if by == "day" else day[:7], *key[1:]
        # Sort hours in UTC: the zone's hours are out of order when clocks are set back.
        row = rows.setdefault((hour if by == "hour" else "", names), [0] * len(_COUNTS))
        for index, count in enumerate(counts):
            row[index] += count

    for row in ledger:
        add((row.hour, row.brand_id, row.affiliate_id, row.media), row.accepted, row.duplicates, 0)
    for key, count in dead_letters.items():
        add(key, 0, 0, count)
    counts = [Column(name, "integer") for name in _COUNTS]
    return FlatTable("ledger", (*columns, *counts), [(*key[1], *rows[key]) for key in sorted(rows)])


def totals_of(table: FlatTable) -> dict[str, int]:
    columns = [column.name for column in table.columns]
    return {name: sum(row[columns.index(name)] for row in table.rows) for name in _COUNTS}  # type: ignore[misc]
