"""The ledger as a flat table: what was accepted, repeated or refused, by day or hour, brand, affiliate and media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from shipper.model.records import LedgerKey
from shipper.report.days import Days
from shipper.report.ranges import DateRange
from shipper.report.rows import Column, FlatTable
from shipper.state.ledger import LedgerRow

By = Literal["day", "hour"]

_NAMES: Final = ("brand_id", "affiliate_id", "media")
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
    Put the ledger together.

    Args:
        dead_letters: By where the ledger would count them.
        days: Of which time zone.
        only: Days of that zone; None = all.
    Returns:
        In the order of time, brand, affiliate and media. The first column is called `day` or `hour`.
    Raises:
        ConfigError: The zone is not a whole number of hours apart from UTC.
    """
    found: dict[tuple[str, LedgerKey], LedgerCounts] = {}

    def add(key: LedgerKey, counts: LedgerCounts) -> None:
        day = days.day_of(key[0])
        if only is None or only.start.isoformat() <= day <= only.end.isoformat():
            place = (
                (day, ("", *key[1:])) if by == "day" else (days.hour_of(key[0]), key)
            )  # by the hour of UTC, in order
            found[place] = found.get(place, LedgerCounts()).plus(counts)

    for row in ledger:
        key = (row.hour, row.brand_id, row.affiliate_id, row.media)
        add(key, LedgerCounts(accepted=row.accepted, duplicates=row.duplicates))
    for key, count in dead_letters.items():
        add(key, LedgerCounts(dead_letters=count))
    columns = (
        Column(by, "text"),
        Column("brand_id", "integer"),
        *(Column(name, "text") for name in _NAMES[1:]),
        *(Column(name, "integer") for name in _COUNTS),
    )
    ordered = sorted(found, key=lambda place: (place[1][0], place) if by == "hour" else ("", place))
    return FlatTable("ledger", columns, [(place[0], *place[1][1:], *found[place]) for place in ordered])


def totals_of(table: FlatTable) -> dict[str, int]:
    """Add the counts of a table of the ledger."""
    totals = Counter(dict.fromkeys(_COUNTS, 0))
    for row in table.rows:
        for name, value in zip(_COUNTS, row[-len(_COUNTS) :], strict=True):
            assert isinstance(value, int)
            totals[name] += value
    return dict(totals)
