"""
The ledger against the report: what was accepted and what the platform counts as registered, and why they may differ.

A difference is looked at in this order; what is left of it at the end is unexplained:

    restated        an earlier version of the report agreed with the ledger
    adjustment      the platform has corrected its own result by so much
    dead_letters    the report has more, and as many records were refused here
    time_zone       all differences vanish if the days are those of another time zone
    neighbours      differences of neighbouring periods cancel each other
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Final

from shipper import wire
from shipper.records import LedgerKey
from shipper.report.days import OFFSETS, Days, days_of_offset
from shipper.report.metrics import REGISTRATIONS, added
from shipper.report.reconcile_explain import explained, of_another_zone, with_neighbours
from shipper.report.reconcile_rows import NOTHING, Elsewhere, Pair, Period, Reconciliation, Row

_BETTER: Final = 4  # another day boundary is worth a word if it leaves no more than a quarter of the differences


def reconcile(
    account: int,
    periods: Sequence[Period],
    accepted: Mapping[LedgerKey, int],
    dead_letters: Mapping[LedgerKey, int],
    *,
    days: Days,
    today: date,
    settle_days: int,
) -> Reconciliation:
    """
    Compare the registrations of an account's report with what was accepted.

    Records are the account's if their media is a marketing source of one of its reports, or their AffiliateID is the
    account's number.

    Args:
        periods: 1..n, ascending, no two overlap.
        accepted: By hour, brand, affiliate and media, from two days before the first period to two days after the last.
        dead_letters: The same, of what was refused.
        days: The zone whose days those of the report are.
        today: In that zone.
        settle_days: For how long after its end a period is provisional.
    Raises:
        ConfigError: The zone is not a whole number of hours apart from UTC.
    """
    comparison = _Comparison(account, periods, accepted, dead_letters, today - timedelta(days=settle_days))
    rows, elsewhere = comparison.rows(days), comparison.elsewhere(days)
    differing = [row.unexplained for row in rows if row.unexplained]
    offsets: tuple[int, ...] = ()
    least, is_boundary = NOTHING, False
    if len(differing) > 1:
        by_distance = sorted(OFFSETS, key=lambda hours: (abs(hours), -hours))
        limit = sum(map(abs, differing), NOTHING) / _BETTER
        left = {hours: comparison.unexplained(days_of_offset(hours), limit) for hours in by_distance}
        least = min(left.values())
        offsets = tuple(hours for hours in by_distance if left[hours] == least <= limit)
        is_boundary = not least and min(differing) < 0 < max(differing)
    rows = list(of_another_zone(rows, offsets[0]) if is_boundary else with_neighbours(rows))
    return Reconciliation(
        account=account,
        periods=tuple(periods),
        days=days,
        rows=tuple(rows),
        elsewhere=tuple(elsewhere),
        offsets=offsets,
        left=least,
        is_boundary=is_boundary,
    )


_Figures = Mapping[Pair, wire.AmountPair]


class _Comparison:
    """The two sides; `settled_until` is the first day whose end was too short a time ago."""

    def __init__(
        self,
        account: int,
        periods: Sequence[Period],
        accepted: Mapping[LedgerKey, int],
        dead_letters: Mapping[LedgerKey, int],
        settled_until: date,
    ) -> None:
        self._affiliate = str(account)
        self._periods = [period.days for period in periods]
        self._starts = [days.start.isoformat() for days in self._periods]
        self._ends = [days.end.isoformat() for days in self._periods]
        self._accepted = accepted
        self._dead_letters = dead_letters
        self._settled_until = settled_until
        self._figures = [_figures(period.report) for period in periods]
        self._earlier = [[_figures(report) for report in period.earlier] for period in periods]
        self._sources = {pair.source for figures in self._figures for pair in figures}

    def rows(self, days: Days) -> list[Row]:
        """Compare, and explain each row by itself."""
        return list(self._rows(days))

    def unexplained(self, days: Days, limit: Decimal) -> Decimal:
        """Add up what is unexplained with the days of another zone, up or down; beyond the limit, only so far."""
        total = NOTHING
        for row in self._rows(days):
            total += abs(row.unexplained)
            if total > limit:
                break
        return total

    def elsewhere(self, days: Days) -> list[Elsewhere]:
        found = self._grouped(self._accepted, days, lambda key: not self._is_own(key))
        return [
            Elsewhere(self._periods[index], pair, found[index, pair])
            for index, pair in sorted(found, key=lambda place: (place[0], place[1].place))
        ]

    def _rows(self, days: Days) -> Iterator[Row]:
        accepted = self._grouped(self._accepted, days, self._is_own)
        dead_letters = self._grouped(self._dead_letters, days, self._is_own)
        places = {(index, pair) for index, figures in enumerate(self._figures) for pair in figures}
        for index, pair in sorted(places | accepted.keys(), key=lambda place: (place[0], place[1].place)):
            figure = self._figures[index].get(pair, wire.AmountPair())
            row = Row(
                days=self._periods[index],
                pair=pair,
                accepted=accepted[index, pair],
                dead_letters=dead_letters[index, pair],
                result=figure.result,
                adjustment=figure.adjustment,
                is_provisional=self._periods[index].end > self._settled_until,
            )
            earlier = [figures[pair] for figures in self._earlier[index] if pair in figures]
            yield explained(row, earlier) if row.difference else row

    def _is_own(self, key: LedgerKey) -> bool:
        return key[2] == self._affiliate or (bool(key[3]) and int(key[3]) in self._sources)

    def _grouped(
        self, counts: Mapping[LedgerKey, int], days: Days, is_wanted: Callable[[LedgerKey], bool]
    ) -> Counter[tuple[int, Pair]]:
        """Add counts by period and pair."""
        found: Counter[tuple[int, Pair]] = Counter()
        for key, count in counts.items():
            day = days.day_of(key[0])
            index = bisect_right(self._starts, day) - 1
            if count and index >= 0 and day <= self._ends[index] and is_wanted(key):
                found[index, Pair(key[1], int(key[3]) if key[3] else None)] += count
        return found


def _figures(report: wire.DailyReport) -> _Figures:
    """List the registrations by brand and source; of a source that is there twice, the sum."""
    found: dict[Pair, list[wire.MarketingSource]] = {}
    for brand in report.brands:
        for entry in brand.marketing_sources:
            found.setdefault(Pair(brand.id, entry.id), []).append(entry)
    return {pair: added(REGISTRATIONS, entries) for pair, entries in found.items()}
