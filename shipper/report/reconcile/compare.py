"""
Compares the ledger with the report: accepted records with the registrations counted by the platform.

Differences are explained in this order; the remainder is unexplained:

    time_zone       all differences vanish with the days of another time zone
    restated        an earlier version of the report agreed with the ledger, and the latest one has less
    adjustment      the platform adjusted its own result by this amount
    dead_letters    the report has more, and as many rejected records may have reached the service
    neighbours      adjacent days differ by opposite amounts, and as many records are near their boundary

Differences of periods that ended recently are not explained, as they may disappear.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Final

from shipper.model import wire
from shipper.model.records import LedgerKey
from shipper.report.days import Days
from shipper.report.metrics import REGISTRATIONS, sum_of
from shipper.report.ranges import DateRange
from shipper.report.reconcile.explain import (
    Boundaries,
    explain,
    explain_by_neighbours,
    explain_by_zone,
    explain_provisional,
    pair_of,
)
from shipper.report.reconcile.model import (
    KINDS,
    ZERO,
    Excluded,
    Kind,
    Pair,
    Period,
    Reconciliation,
    Row,
    days_to_settle,
)
from shipper.report.reconcile.owners import Claims, Owners

BOUNDARY_HOURS: Final = 2

_Cells = Counter[tuple[int, Pair]]  # by index of the period, and brand and marketing source
_NO_OWNERS: Final = Owners()


def reconcile(
    account: int,
    periods: Sequence[Period],
    accepted: Mapping[LedgerKey, int],
    dead_letters: Mapping[LedgerKey, int],
    *,
    days: Days,
    today: date,
    settle_days: int,
    owners: Owners = _NO_OWNERS,
    excluded: Iterable[Excluded] = (),
    boundary_hours: int = BOUNDARY_HOURS,
    alarm_below: Decimal = ZERO,
) -> Reconciliation:
    """
    Compare the registrations in an account's reports with the accepted records.

    Args:
        periods: 0..n, ascending, without overlaps.
        accepted: Counts by ledger key, from two days before the first period to two days after the last.
        dead_letters: The same for rejected records that may have reached the service.
        days: The days of the report's time zone.
        today: The current day in that zone.
        settle_days: How many days a day stays provisional after its end.
        owners: The owners of records, in addition to what these reports show.
        excluded: Periods without a report, not counted yet, without overlaps with each other or `periods`.
        boundary_hours: How near to midnight a record must be for the platform to count it on the adjacent day.
        alarm_below: The share of a marketing source's records that may be taken back without an alarm; 0 or less.
    Raises:
        ConfigError: The zone's offset from UTC is not a whole number of hours.
    """
    named = {
        entry.id
        for period in periods
        for report in (period.report, *period.earlier)
        for brand in report.brands
        for entry in brand.marketing_sources
    }
    claims = Claims(owners.with_named(account, named))
    own, refused = (
        {key: count for key, count in counts.items() if count and claims.of(key).owner == account}
        for counts in (accepted, dead_letters)
    )
    calendar = _Calendar([period.days for period in periods], days)
    settled_until = today - timedelta(days=days_to_settle(settle_days))
    rows = _rows(periods, calendar, own, refused, claims, settled_until)
    boundaries = Boundaries(own, days)
    zone = None
    if any(row.unexplained for row in rows):
        rows, zone = explain_by_zone(rows, calendar.periods, settled_until, boundaries)
    others = {key: count for key, count in accepted.items() if count and key not in own}
    all_excluded = [*_others(account, others, claims, calendar), *(_count(period, own, days) for period in excluded)]
    return Reconciliation(
        account=account,
        periods=tuple(periods),
        excluded=tuple(sorted(all_excluded, key=lambda records: KINDS.index(records.kind))),
        days=days,
        today=today,
        settle_days=settle_days,
        rows=tuple(explain_by_neighbours(rows, boundaries, boundary_hours)),
        dead_letters=calendar.cells(refused).total(),
        zone=zone,
        alarm_below=alarm_below,
    )


class _Calendar:
    """Maps hours to periods."""

    def __init__(self, periods: Sequence[DateRange], days: Days) -> None:
        self.periods = periods
        self.day_of = days.day_of
        self._starts = [period.start.isoformat() for period in periods]
        self._ends = [period.end.isoformat() for period in periods]

    def index_of(self, hour: str) -> int | None:
        day = self.day_of(hour)
        index = bisect_right(self._starts, day) - 1
        return index if index >= 0 and day <= self._ends[index] else None

    def cells(self, counts: Mapping[LedgerKey, int]) -> _Cells:
        """Add up counts by period and pair, ignoring hours outside the periods."""
        cells: _Cells = Counter()
        for key, count in counts.items():
            index = self.index_of(key[0])
            if index is not None:
                cells[index, pair_of(key)] += count
        return cells


def _rows(
    periods: Sequence[Period],
    calendar: _Calendar,
    own: Mapping[LedgerKey, int],
    refused: Mapping[LedgerKey, int],
    claims: Claims,
    settled_until: date,
) -> list[Row]:
    figures = [_figures(period.report) for period in periods]
    earlier = [[_figures(report) for report in period.earlier] for period in periods]
    accepted, dead_letters = calendar.cells(own), calendar.cells(refused)
    contested = calendar.cells({key: n for key, n in own.items() if len(claims.of(key).claimants) > 1})
    recent = calendar.cells({key: n for key, n in own.items() if calendar.day_of(key[0]) > settled_until.isoformat()})
    cells = accepted.keys() | {(index, pair) for index, pairs in enumerate(figures) for pair in pairs}
    rows = []
    for index, pair in sorted(cells, key=lambda cell: (cell[0], cell[1].order)):
        figure = figures[index].get(pair, wire.AmountPair())
        row = Row(
            days=periods[index].days,
            pair=pair,
            accepted=accepted[index, pair],
            contested=contested[index, pair],
            dead_letters=dead_letters[index, pair],
            result=figure.result,
            adjustment=figure.adjustment,
            earlier=[version[pair] for version in earlier[index] if pair in version],
            is_provisional=periods[index].days.end > settled_until,
        )
        if row.difference:
            row = explain_provisional(row, recent[index, pair]) if row.is_provisional else explain(row)
        rows.append(row)
    return rows


def _figures(report: wire.DailyReport) -> dict[Pair, wire.AmountPair]:
    """Return the registrations by brand and source, adding up duplicate listings."""
    entries: dict[Pair, list[wire.MarketingSource]] = {}
    for brand in report.brands:
        for entry in brand.marketing_sources:
            entries.setdefault(Pair(brand.id, entry.id), []).append(entry)
    return {pair: sum_of(REGISTRATIONS, pair_entries) for pair, pair_entries in entries.items()}


def _others(account: int, counts: Mapping[LedgerKey, int], claims: Claims, calendar: _Calendar) -> Iterator[Excluded]:
    """Yield the records of the compared periods that do not belong to the account, ascending."""
    accepted, contested = Counter[tuple[int, Pair, int | None]](), Counter[tuple[int, Pair, int | None]]()
    for key, count in counts.items():
        index = calendar.index_of(key[0])
        if index is not None:
            claim = claims.of(key)
            cell = index, pair_of(key), claim.owner
            accepted[cell] += count
            contested[cell] += count if account in claim.claimants else 0
    for cell in sorted(accepted, key=lambda cell: (cell[0], cell[1].order, cell[2] or 0)):
        index, pair, owner = cell
        kind: Kind = "unassigned" if owner is None else "of another account"
        reason = "this source has never appeared in a report" if owner is None else f"of account {owner}"
        if owner is not None and contested[cell]:
            reason += f"; {contested[cell]:,} of them contested"
        yield Excluded(kind, calendar.periods[index], reason, accepted[cell], pair, owner, contested[cell])


def _count(period: Excluded, own: Mapping[LedgerKey, int], days: Days) -> Excluded:
    first, last = map(str, period.days)
    return period._replace(accepted=sum(count for key, count in own.items() if first <= days.day_of(key[0]) <= last))
