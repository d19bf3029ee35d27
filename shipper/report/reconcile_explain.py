"""What explains the differences of a reconciliation: of each row by itself, and of neighbouring periods together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import groupby

from msgspec.structs import replace

from shipper import wire
from shipper.report.days import days_of_offset
from shipper.report.metrics import difference
from shipper.report.ranges import DateRange
from shipper.report.reconcile_rows import NOTHING, Cause, Explanation, Pair, Row


def explained(row: Row, earlier: Iterable[wire.AmountPair]) -> Row:
    """Explain the difference of a row by what is known of the row itself."""
    rest = row.difference
    found: list[Explanation] = []

    def explain(cause: Cause, amount: Decimal, words: str) -> None:
        nonlocal rest
        rest = difference(rest, amount)
        found.append(Explanation(cause, amount, words))

    others = list(dict.fromkeys(figure.total for figure in earlier if figure.total not in {None, row.reported}))
    if others:
        was = " and ".join(f"{total:,f}" for total in others)
        agreed = Decimal(row.accepted) in others
        words = f"restated: the report said {was} before" + (", as was accepted" if agreed else "")
        if agreed:
            explain("restated", rest, words)
        else:
            found.append(Explanation("restated", NOTHING, words))
    if row.adjustment and abs(difference(rest, row.adjustment)) < abs(rest):
        explain("adjustment", row.adjustment, f"the platform adjusted its own result by {row.adjustment:+,f}")
    if rest > 0 and row.dead_letters:
        covered = min(rest, Decimal(row.dead_letters))
        explain(
            "dead_letters",
            covered,
            f"{row.dead_letters:,} records of it are dead letters here; the service may have got them all the same",
        )
    return replace(row, explanations=tuple(found), unexplained=NOTHING if row.is_provisional else rest)


def of_another_zone(rows: Iterable[Row], hours: int) -> Iterator[Row]:
    """Explain what is left by days that begin so many hours ahead of UTC."""
    words = f"day boundary: it vanishes if the days of the report are those of {days_of_offset(hours).name}"
    for row in rows:
        yield _and_so(row, Explanation("time_zone", row.unexplained, words)) if row.unexplained else row


def with_neighbours(rows: Sequence[Row]) -> Iterator[Row]:
    """Explain what cancels out over neighbouring periods of the same brand and source; in the order of `rows`."""
    cancelling: dict[tuple[DateRange, Pair], DateRange] = {}
    by_pair = sorted(rows, key=lambda row: (row.pair.place, row.days))
    for pair, of_pair in groupby(by_pair, key=lambda row: row.pair):
        for run in _cancelling_runs(list(of_pair)):
            together = DateRange(run[0].days.start, run[-1].days.end)
            cancelling |= {(row.days, pair): together for row in run}
    for row in rows:
        if whole := cancelling.get((row.days, row.pair)):
            words = f"day boundary: over {whole} the differences cancel each other; see --timezone"
            row = _and_so(row, Explanation("neighbours", row.unexplained, words))
        yield row


def _cancelling_runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Find periods, one directly after the other, whose unexplained differences add up to nothing."""
    run: list[Row] = []
    sum_ = NOTHING
    for row in rows:
        is_next = bool(run) and row.days.start - run[-1].days.end == timedelta(days=1)
        if not row.unexplained or (run and not is_next):
            run, sum_ = [], NOTHING
        if row.unexplained:
            run.append(row)
            sum_ = difference(sum_, -row.unexplained)
            if not sum_:
                yield run
                run = []


def _and_so(row: Row, explanation: Explanation) -> Row:
    return replace(row, explanations=(*row.explanations, explanation), unexplained=NOTHING)
