"""
What the ledger's hours say about the boundary between two days: how many records lie so near to it that another clock
counts them on the other side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from itertools import accumulate

from shipper.model.records import LedgerKey
from shipper.report.days import Days, hour_number
from shipper.report.reconcile.rows import Pair

_DAY = timedelta(days=1)


class Boundaries:
    """
    The records of an account by hour, brand and marketing source.

    Args:
        accepted: From two days before the compared days to two days after them.
        days: The zone whose days are compared.
    """

    def __init__(self, accepted: Mapping[LedgerKey, int], days: Days) -> None:
        by_pair: dict[Pair, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for key, count in accepted.items():
            hour = hour_number(key[0])
            if hour is not None:
                by_pair[pair_of(key)][hour] += count
        self._hours = {pair: sorted(counts) for pair, counts in by_pair.items()}
        self._sums = {
            pair: [0, *accumulate(by_pair[pair][hour] for hour in hours)] for pair, hours in self._hours.items()
        }
        self._start_of = days.start_of

    @property
    def pairs(self) -> Iterable[Pair]:
        """All brands and marketing sources that have records."""
        return self._hours.keys()

    def before(self, pair: Pair, day: date, hours: int) -> int:
        """Count the records of the last hours before a day begins."""
        start = self._start_of(day)
        return self._between(pair, start - hours, start)

    def after(self, pair: Pair, day: date, hours: int) -> int:
        """Count the records of the first hours of a day."""
        start = self._start_of(day)
        return self._between(pair, start, start + hours)

    def moved_into(self, pair: Pair, day: date, clock: Days) -> int:
        """Count the records of the day before that a clock has in this day; below 0 = the other way round."""
        start, by_clock = self._start_of(day), clock.start_of(day)
        if by_clock <= start:
            return self._between(pair, by_clock, start)
        return -self._between(pair, start, by_clock)

    def gained(self, pair: Pair, day: date, clock: Days) -> int:
        """Return how many records more a day has by a clock; below 0 = fewer."""
        return self.moved_into(pair, day, clock) - self.moved_into(pair, _next(day), clock)

    def _between(self, pair: Pair, start: int, end: int) -> int:
        hours = self._hours.get(pair)
        if not hours:
            return 0
        sums = self._sums[pair]
        return sums[bisect_left(hours, end)] - sums[bisect_left(hours, start)]


def pair_of(key: LedgerKey) -> Pair:
    """Return the brand and marketing source of a key of the ledger."""
    return Pair(key[1], int(key[3]) if key[3] else None)


def _next(day: date) -> date:
    return day + _DAY if day < date.max else day
