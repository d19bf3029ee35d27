"""
The ledger against the report: what was accepted and what the platform counts as registered, and why they may differ.

A difference is looked at in this order; what is left of it at the end is unexplained:

    restated        an earlier version of the report agreed with the ledger
    adjustment      the platform has corrected its own result by so much
    dead_letters    the report has more, and as many records were refused here that may have reached the service
    time_zone       nothing is left of any difference if the days are those of another time zone
    neighbours      so many records lie near the boundary of two days that differ by as much

No difference of a period that has not been over for long is explained: time may do it.
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
from shipper.report.metrics import REGISTRATIONS, added
from shipper.report.reconcile.explain import Boundaries, explained, pair_of, provisional, with_neighbours, zone_of
from shipper.report.reconcile.owners import Owners
from shipper.report.reconcile.rows import (
    NOTHING,
    Elsewhere,
    Hole,
    Pair,
    Period,
    Reconciliation,
    Row,
    Zone,
    days_to_settle,
)

BOUNDARY_HOURS: Final = 2

_Figures = Mapping[Pair, wire.AmountPair]
_Counts = Counter[tuple[int, Pair]]  # by the index of a period, and what the report counts by
_NOTHING_KNOWN: Final = Owners()


def reconcile(
    account: int,
    periods: Sequence[Period],
    accepted: Mapping[LedgerKey, int],
    dead_letters: Mapping[LedgerKey, int],
    *,
    days: Days,
    today: date,
    settle_days: int,
    owners: Owners = _NOTHING_KNOWN,
    holes: Iterable[Hole] = (),
    later: Hole | None = None,
    boundary_hours: int = BOUNDARY_HOURS,
    alarm_below: Decimal = NOTHING,
) -> Reconciliation:
    """
    Compare the registrations of an account's report with what was accepted.

    Args:
        periods: 0..n, ascending, no two overlap.
        accepted: By hour, brand, affiliate and media, from two days before the first period to two days after the last.
        dead_letters: The same, of what was refused here and may have reached the service.
        days: The zone whose days those of the report are.
        today: In that zone.
        settle_days: For how long after its end a day is provisional. One that is not over is.
        owners: Whose records are whose, as far as these reports do not say it.
        holes: Periods that cannot be compared; none of them overlaps another or one of `periods`.
        later: Days that have not begun; they are after all others.
        boundary_hours: How near to the end of a day a record must lie for the platform to count it in the next one.
        alarm_below: What may be taken back of a marketing source without an alarm; a share of 0 or less.
    Raises:
        ConfigError: The zone is not a whole number of hours apart from UTC.
    """
    comparison = _Comparison(account, periods, days, owners, today - timedelta(days=days_to_settle(settle_days)))
    own, others = comparison.sorted_out(accepted)
    refused, _ = comparison.sorted_out(dead_letters)
    rows = comparison.rows(own, refused)
    boundaries = Boundaries(own, days)
    zone = None
    if any(row.unexplained for row in rows):
        rows, zone = comparison.by_another_clock(rows, boundaries)
    return Reconciliation(
        account=account,
        periods=tuple(periods),
        holes=tuple(_counted(hole, own, days) for hole in holes),
        later=later and _counted(later, own, days),
        days=days,
        today=today,
        settle_days=settle_days,
        rows=tuple(with_neighbours(rows, boundaries, boundary_hours)),
        elsewhere=tuple(comparison.elsewhere(others)),
        dead_letters=comparison.count(refused),
        zone=zone,
        alarm_below=alarm_below,
    )


class _Comparison:
    """The two sides; `settled_until` is the last day that has been over for long enough."""

    def __init__(
        self, account: int, periods: Sequence[Period], days: Days, owners: Owners, settled_until: date
    ) -> None:
        self._account = account
        self._periods = [period.days for period in periods]
        self._starts = [period.start.isoformat() for period in self._periods]
        self._ends = [period.end.isoformat() for period in self._periods]
        self._day_of = days.day_of
        self._settled_until = settled_until
        self._figures = [_figures(period.report) for period in periods]
        self._earlier = [[_figures(report) for report in period.earlier] for period in periods]
        known = [*self._figures, *(old for of_period in self._earlier for old in of_period)]
        named = {pair.source for figures in known for pair in figures if pair.source is not None}
        self._claim_of = owners.naming(account, named).claims().of

    def sorted_out(self, counts: Mapping[LedgerKey, int]) -> tuple[dict[LedgerKey, int], dict[LedgerKey, int]]:
        """Separate the account's counts from those of others."""
        parts: tuple[dict[LedgerKey, int], dict[LedgerKey, int]] = {}, {}
        for key, count in counts.items():
            if count:
                parts[self._claim_of(key).owner != self._account][key] = count
        return parts

    def rows(self, own: Mapping[LedgerKey, int], dead_letters: Mapping[LedgerKey, int]) -> list[Row]:
        accepted, refused = self._grouped(own), self._grouped(dead_letters)
        contested = self._grouped({key: n for key, n in own.items() if len(self._claim_of(key).claimants) > 1})
        young = self._grouped(own, from_day=self._settled_until)
        places = {(index, pair) for index, figures in enumerate(self._figures) for pair in figures}
        rows = []
        for index, pair in sorted(places | accepted.keys(), key=lambda place: (place[0], place[1].place)):
            figure = self._figures[index].get(pair, wire.AmountPair())
            row = Row(
                days=self._periods[index],
                pair=pair,
                accepted=accepted[index, pair],
                contested=contested[index, pair],
                dead_letters=refused[index, pair],
                result=figure.result,
                adjustment=figure.adjustment,
                is_provisional=self._periods[index].end > self._settled_until,
            )
            if row.difference:
                earlier = self._before(index, pair)
                row = provisional(row, earlier, young[index, pair]) if row.is_provisional else explained(row, earlier)
            rows.append(row)
        return rows

    def by_another_clock(self, rows: list[Row], boundaries: Boundaries) -> tuple[list[Row], Zone | None]:
        """Explain all that is unexplained by the days of another zone, if they do; otherwise change nothing."""
        indexes = {days.start: at for at, days in enumerate(self._periods) if days.end <= self._settled_until}
        if any(days.start != days.end for days in self._periods):
            return rows, None
        of_place = {(row.days.start, row.pair): row for row in rows}
        pairs = sorted({*boundaries.pairs, *(row.pair for row in rows)}, key=lambda pair: pair.place)

        def left(day: date, pair: Pair, clock: Days, gained: int) -> Decimal:
            row = of_place.get((day, pair))
            if row is None or row.difference == gained:
                return NOTHING if row else Decimal(-gained)
            return by_clock(row, clock, gained).unexplained

        def by_clock(row: Row, clock: Days, gained: int) -> Row:
            return explained(row, self._before(indexes[row.days.start], row.pair), clock=clock, gained=gained)

        zone = zone_of(left, list(indexes), pairs, boundaries)
        if zone is None:
            return rows, None
        clock = zone.clocks[0]
        return [
            by_clock(row, clock, boundaries.gained(row.pair, row.days.start, clock))
            if row.days.start in indexes and row.difference
            else row
            for row in rows
        ], zone

    def elsewhere(self, others: Mapping[LedgerKey, int]) -> Iterator[Elsewhere]:
        """List what is not the account's, and whose it is."""
        owners: dict[int | None, dict[LedgerKey, int]] = {}
        for key, count in others.items():
            owners.setdefault(self._claim_of(key).owner, {})[key] = count
        found = []
        for owner, counts in owners.items():
            mine = {key: n for key, n in counts.items() if self._account in self._claim_of(key).claimants}
            contested = self._grouped(mine)
            for (index, pair), accepted in self._grouped(counts).items():
                found.append((index, Elsewhere(self._periods[index], pair, owner, accepted, contested[index, pair])))
        found.sort(key=lambda each: (each[0], each[1].pair.place, each[1].owner or 0))
        yield from (each for _, each in found)

    def count(self, counts: Mapping[LedgerKey, int]) -> int:
        """Add the counts of the compared periods."""
        return self._grouped(counts).total()

    def _before(self, index: int, pair: Pair) -> list[wire.AmountPair]:
        return [figures[pair] for figures in self._earlier[index] if pair in figures]

    def _grouped(self, counts: Mapping[LedgerKey, int], *, from_day: date | None = None) -> _Counts:
        """Add counts by period and pair; only those after a day, if one is given."""
        bound = from_day.isoformat() if from_day else ""
        found: _Counts = Counter()
        for key, count in counts.items():
            day = self._day_of(key[0])
            index = bisect_right(self._starts, day) - 1
            if index >= 0 and bound < day <= self._ends[index]:
                found[index, pair_of(key)] += count
        return found


def _counted(hole: Hole, own: Mapping[LedgerKey, int], days: Days) -> Hole:
    first, last = map(str, hole.days)
    return hole._replace(accepted=sum(count for key, count in own.items() if first <= days.day_of(key[0]) <= last))


def _figures(report: wire.DailyReport) -> _Figures:
    """List the registrations by brand and source; of a source that is there twice, the sum."""
    found: dict[Pair, list[wire.MarketingSource]] = {}
    for brand in report.brands:
        for entry in brand.marketing_sources:
            found.setdefault(Pair(brand.id, entry.id), []).append(entry)
    return {pair: added(REGISTRATIONS, entries) for pair, entries in found.items()}
