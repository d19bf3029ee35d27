"""Explains the differences of a reconciliation: in each row by itself, and between neighbouring days."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Final

from msgspec.structs import replace

from shipper.model import wire
from shipper.model.records import LedgerKey
from shipper.model.units import several
from shipper.report.days import Days, clocks, hour_number
from shipper.report.metrics import difference, plus
from shipper.report.ranges import DateRange
from shipper.report.reconcile.rows import NOTHING, Cause, Explanation, Pair, Row, Zone
from shipper.report.wording import number

MOVED_MIN: Final = 20  # records; fewer say nothing about a clock
CHANCE_MAX: Final = 1e-3

_DAY: Final = timedelta(days=1)


def explained(row: Row, earlier: Iterable[wire.AmountPair], *, clock: Days | None = None, gained: int = 0) -> Row:
    """
    Explain the difference of a row that is not provisional.

    Args:
        earlier: What the report said of it before.
        clock: Whose days the report has.
        gained: How many records more the period has by that clock.
    """
    rest = row.difference
    found: list[Explanation] = []

    def explain(cause: Cause, amount: Decimal, words: str) -> None:
        nonlocal rest
        rest = difference(rest, amount)
        found.append(Explanation(cause, amount, words))

    if clock is not None and gained:
        explain("time_zone", Decimal(gained), f"day boundary: {gained:+,} by the days of {clock.name}")
    # What the report does not name at all is missing from it, whatever it said before.
    others = list(dict.fromkeys(figure.total for figure in earlier if figure.total not in {None, row.reported}))
    if others and row.result is not None:
        was = " and ".join(f"{total:,f}" for total in others)
        agreed = Decimal(row.accepted + gained) in others
        words = f"restated: the report said {was} before" + (", as was accepted" if agreed else "")
        explain("restated", rest if agreed else NOTHING, words)
    if row.adjustment and difference(rest, row.adjustment).copy_abs() < rest.copy_abs():
        explain("adjustment", row.adjustment, f"the platform adjusted its own result by {row.adjustment:+,f}")
    if rest > 0 and row.dead_letters:
        are, them = ("is a dead letter", "it") if row.dead_letters == 1 else ("are dead letters", "them")
        words = f"{several(row.dead_letters, 'record')} of it {are} here; the service may have got {them} all the same"
        explain("dead_letters", min(rest, Decimal(row.dead_letters)), words)
    return replace(row, explanations=tuple(found), unexplained=rest)


def provisional(row: Row, earlier: Iterable[wire.AmountPair], young: int) -> Row:
    """
    Judge only what time cannot mend in a provisional row: a lack beyond the records of the most recent days.

    Args:
        young: How many of the accepted records are of those days.
    """
    unexplained = min(NOTHING, difference(explained(row, earlier).unexplained, Decimal(-young)))
    return replace(row, unexplained=unexplained, unjudged=difference(row.difference, unexplained))


def zone_of(
    left: Callable[[date, Pair, Days, int], Decimal],
    days: Sequence[date],
    pairs: Sequence[Pair],
    boundaries: Boundaries,
) -> Zone | None:
    """
    Find the zone whose days explain all differences.

    It explains them if nothing is left of any compared day, brand and source once the records that its clock moves are
    counted where that clock has them. It has to move `MOVED_MIN` records between compared days at least, and such a
    fit has to be less likely by chance than `CHANCE_MAX`.

    Args:
        left: What is unexplained of a day and pair by a clock that gives it so many records more.
        days: All that are compared and not provisional, ascending.
        pairs: All that have records or figures.
    """

    if not days:
        return None

    def fits(clock: Days) -> bool:
        return not any(left(day, pair, clock, boundaries.gained(pair, day, clock)) for day in days for pair in pairs)

    tried = clocks(days[0], days[-1])
    fitting = tuple(filter(fits, tried))
    if not fitting:
        return None
    inner = [day for before, day in pairwise(days) if day - before == _DAY]
    moved = [abs(boundaries.moved_into(pair, day, fitting[0])) for day in inner for pair in pairs]
    zone = Zone(fitting, sum(moved), chance_of(moved, len(tried)))
    return zone if zone.moved >= MOVED_MIN and zone.chance < CHANCE_MAX else None


def chance_of(moved: Iterable[int], tried: int) -> float:
    """
    Return how likely some zone fits by chance, at most.

    Args:
        moved: How many records a clock moves over the end of each day, of each brand and source. Had the differences
            another reason, any number of them from none to all would be as likely.
        tried: How many zones had the chance to fit.
    """
    return min(1.0, tried * prod(1 / (count + 1) for count in moved))


def with_neighbours(rows: Sequence[Row], boundaries: Boundaries, hours: int) -> Iterator[Row]:
    """
    Explain what two days that border on each other lack and have too much; in the order of `rows`.

    The lack of the one has to be the surplus of the other, and no more than the records that the ledger has within so
    many hours of the boundary, on the side where they are missing. In a run of three days nothing is explained.
    """
    words: dict[tuple[DateRange, Pair], str] = {}
    by_pair = sorted(rows, key=lambda row: (row.pair.place, row.days))
    for pair, of_pair in groupby(by_pair, key=lambda row: row.pair):
        for run in _runs(of_pair):
            if len(run) != 2 or plus(run[0].unexplained, run[1].unexplained):
                continue
            first, second = run
            is_late = first.unexplained < 0
            near = (boundaries.before if is_late else boundaries.after)(pair, second.days.start, hours)
            if first.unexplained.copy_abs() <= near and not (first.is_provisional or second.is_provisional):
                counted = second if is_late else first
                some = f"{_of_all(first.unexplained.copy_abs(), near)} within {hours} h of the end of {first.days}"
                for row in run:
                    words[row.days, pair] = f"day boundary: {some} may count as of {counted.days}"
    for row in rows:
        if said := words.get((row.days, row.pair)):
            explanation = Explanation("neighbours", row.unexplained, said)
            row = replace(row, explanations=(*row.explanations, explanation), unexplained=NOTHING)
        yield row


def _of_all(count: Decimal, whole: int) -> str:
    if count == whole:
        return "the only record" if whole == 1 else f"all {whole:,} records"
    return f"{number(count)} of the {whole:,} records"


def _runs(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group the days of a pair, one directly after the other, of which something is unexplained."""
    run: list[Row] = []
    for row in rows:
        if not row.unexplained or row.days.start != row.days.end:
            continue
        if run and row.days.start - run[-1].days.end != _DAY:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


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
