"""Explains the differences of a reconciliation: by row, by another time zone, and between adjacent days."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from itertools import accumulate, pairwise
from math import prod
from typing import Final

from msgspec.structs import replace

from shipper.model.records import LedgerKey
from shipper.model.units import several
from shipper.report.days import Days, candidate_zones, hour_number
from shipper.report.formatting import number
from shipper.report.metrics import minus, plus
from shipper.report.ranges import DAY, DateRange
from shipper.report.reconcile.model import ZERO, Cause, Explanation, Pair, Row, ZoneFit, rows_by_pair

MOVED_MIN: Final = 20  # records; fewer are no evidence for a time zone
CHANCE_MAX: Final = 1e-3


def explain(row: Row, *, zone: Days | None = None, gained: int = 0) -> Row:
    """Explain a row's difference; by the days of another `zone`, its day has `gained` more records."""
    rest = row.difference
    explanations: list[Explanation] = []

    def add(cause: Cause, amount: Decimal, text: str) -> None:
        nonlocal rest
        rest = minus(rest, amount)
        explanations.append(Explanation(cause, amount, text))

    if zone is not None and gained:
        add("time_zone", Decimal(gained), f"day boundary: {gained:+,} with days in {zone.name}")
    # A source that is not in the report at all is missing, even if earlier versions had it.
    others = list(dict.fromkeys(total for total in row.reported_before if total != row.reported))
    if others and row.result is not None:
        totals = " and ".join(f"{total:,f}" for total in others)
        agreed = Decimal(row.accepted + gained) in others
        text = f"restated: the report had {totals} before" + (", as accepted" if agreed else "")
        add("restated", min(rest, ZERO) if agreed else ZERO, text)  # records that were counted explain no surplus
    if row.adjustment and minus(rest, row.adjustment).copy_abs() < rest.copy_abs():
        add("adjustment", row.adjustment, f"the platform adjusted its own result by {row.adjustment:+,f}")
    if rest > 0 and row.dead_letters:
        verb, pronoun = ("is a dead letter", "it") if row.dead_letters == 1 else ("are dead letters", "them")
        records = several(row.dead_letters, "record")
        text = f"{records} {verb} here; the service may have received {pronoun} anyway"
        add("dead_letters", min(rest, Decimal(row.dead_letters)), text)
    return replace(row, explanations=tuple(explanations), unexplained=rest)


def explain_provisional(row: Row, recent: int) -> Row:
    """Judge only missing records in excess of the row's `recent` ones, as the report may still count these."""
    unexplained = min(ZERO, minus(explain(row).unexplained, -recent))
    return replace(row, unexplained=unexplained, unjudged=minus(row.difference, unexplained))


def explain_by_zone(
    rows: list[Row], periods: Sequence[DateRange], settled_until: date, boundaries: Boundaries
) -> tuple[list[Row], ZoneFit | None]:
    """
    Explain all differences by the days of another time zone if one fits; otherwise return the rows unchanged.

    A zone fits if counting records by its days leaves no difference for any settled day, brand and source. It must move
    at least `MOVED_MIN` records between compared days, and the probability of a fit by chance must be below
    `CHANCE_MAX`.
    """
    settled = [days.start for days in periods if days.end <= settled_until]
    if not settled or any(days.start != days.end for days in periods):
        return rows, None
    by_cell = {(row.days.start, row.pair): row for row in rows}
    pairs = sorted({*boundaries.pairs, *(row.pair for row in rows)}, key=lambda pair: pair.order)

    def fits(zone: Days) -> bool:
        for day in settled:
            for pair in pairs:
                gained, row = boundaries.gained(pair, day, zone), by_cell.get((day, pair))
                difference = row.difference if row else ZERO
                if difference != gained and (row is None or explain(row, zone=zone, gained=gained).unexplained):
                    return False
        return True

    candidates = candidate_zones(settled[0], settled[-1])
    fitting = tuple(filter(fits, candidates))
    if not fitting:
        return rows, None
    zone = fitting[0]
    inner = [day for before, day in pairwise(settled) if day - before == DAY]
    moved = [abs(boundaries.moved_into(pair, day, zone)) for day in inner for pair in pairs]
    fit = ZoneFit(fitting, sum(moved), chance_of_fit(moved, len(candidates)))
    if fit.moved < MOVED_MIN or fit.chance >= CHANCE_MAX:
        return rows, None
    return [
        explain(row, zone=zone, gained=boundaries.gained(row.pair, row.days.start, zone))
        if row.difference and row.days.end <= settled_until
        else row
        for row in rows
    ], fit


def chance_of_fit(moved: Iterable[int], candidates: int) -> float:
    """
    Return an upper bound for the probability that a zone fits by chance.

    Args:
        moved: How many records a zone moves over the end of each day, by brand and source. If the differences had
            another cause, any number from none to all would be equally likely.
        candidates: How many zones could have fitted.
    """
    return min(1.0, candidates * prod(1 / (count + 1) for count in moved))


def explain_by_neighbours(rows: Sequence[Row], boundaries: Boundaries, hours: int) -> Iterator[Row]:
    """
    Explain the missing records of a day by the surplus of an adjacent day; yield the rows in order.

    Both must be the same number, and not exceed the records that the ledger has within `hours` of the boundary on the
    side where they are missing. Runs of three or more days are not explained.
    """
    texts: dict[tuple[DateRange, Pair], str] = {}
    for pair, pair_rows in rows_by_pair(rows):
        for run in _runs(pair_rows):
            if len(run) != 2 or plus(run[0].unexplained, run[1].unexplained):
                continue
            first, second = run
            is_late = first.unexplained < 0
            near = boundaries.near(pair, second.days.start, -hours if is_late else hours)
            count = first.unexplained.copy_abs()
            if count <= near and not (first.is_provisional or second.is_provisional):
                counted = second if is_late else first
                records = f"{_describe_share(count, near)} within {hours} h of the end of {first.days}"
                for row in run:
                    texts[row.days, pair] = f"day boundary: {records} may count for {counted.days}"
    for row in rows:
        if text := texts.get((row.days, row.pair)):
            explanation = Explanation("neighbours", row.unexplained, text)
            row = replace(row, explanations=(*row.explanations, explanation), unexplained=ZERO)
        yield row


def _describe_share(count: Decimal, whole: int) -> str:
    if count == whole:
        return "the only record" if whole == 1 else f"all {whole:,} records"
    return f"{number(count)} of the {whole:,} records"


def _runs(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Group adjacent days with unexplained differences."""
    run: list[Row] = []
    for row in rows:
        if not row.unexplained or row.days.start != row.days.end:
            continue
        if run and row.days.start - run[-1].days.end != DAY:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


class Boundaries:
    """An account's records by hour, brand and source, from two days before the compared days to two days after."""

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

    def near(self, pair: Pair, day: date, hours: int) -> int:
        """Count the records in the first hours of a day; negative hours = the last hours before it."""
        start = self._start_of(day)
        return abs(self._between(pair, start, start + hours))

    def moved_into(self, pair: Pair, day: date, zone: Days) -> int:
        """Count the records of the previous day that are in this day in a zone; negative = vice versa."""
        return self._between(pair, zone.start_of(day), self._start_of(day))

    def gained(self, pair: Pair, day: date, zone: Days) -> int:
        """Return how many more records a day has in a zone; negative = fewer."""
        next_day = day + DAY if day < date.max else day
        return self.moved_into(pair, day, zone) - self.moved_into(pair, next_day, zone)

    def _between(self, pair: Pair, start: int, end: int) -> int:
        """Count the records from one hour to another; negative if the end is before the start."""
        hours = self._hours.get(pair)
        if not hours:
            return 0
        sums = self._sums[pair]
        return sums[bisect_left(hours, end)] - sums[bisect_left(hours, start)]


def pair_of(key: LedgerKey) -> Pair:
    """Return the brand and marketing source of a ledger key."""
    return Pair(key[1], int(key[3]) if key[3] else None)
