"""A reconciliation in words: names, verdict, and what is said of each row and of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Final, NamedTuple

from shipper.report.days import days_of_offset, zone_of_offset
from shipper.report.metrics import difference
from shipper.report.ranges import DateRange
from shipper.report.reconcile_rows import NOTHING, Pair, Reconciliation, Row, Status
from shipper.report.wording import clean, named, number

STATUS_WORDS: Final[dict[Status, str]] = {
    "agrees": "agrees",
    "explained": "explained",
    "provisional": "provisional",
    "unexplained": "unexplained",
}
_NO_MEDIA: Final = "no media"


class Totals(NamedTuple):
    """
    Of all rows together.

    Attributes:
        missing: What is unexplained and missing from the report.
        surplus: What is unexplained and the report has more.
    """

    accepted: Decimal
    result: Decimal
    adjustment: Decimal
    reported: Decimal
    difference: Decimal
    dead_letters: Decimal
    unexplained: Decimal
    missing: Decimal
    surplus: Decimal


class Names:
    """The names of brands and marketing sources; the latest report's count."""

    def __init__(self, found: Reconciliation) -> None:
        self.account = clean(found.periods[-1].report.source.affiliate_account_name) or f"Account {found.account}"
        self._brands: dict[int, str] = {}
        self._sources: dict[Pair, str] = {}
        for period in found.periods:
            for brand in period.report.brands:
                self._brands[brand.id] = brand.name or ""
                self._sources |= {Pair(brand.id, entry.id): entry.name or "" for entry in brand.marketing_sources}

    def brand_name(self, pair: Pair) -> str:
        return self._brands.get(pair.brand, "")

    def source_name(self, pair: Pair) -> str:
        return self._sources.get(pair, "")

    def brand(self, pair: Pair) -> str:
        """Number and name."""
        return named(pair.brand, self.brand_name(pair))

    def source(self, pair: Pair) -> str:
        """Number and name."""
        return _NO_MEDIA if pair.source is None else named(pair.source, self.source_name(pair))


def span_of(found: Reconciliation) -> DateRange:
    """Tell the days from the first period to the last."""
    return DateRange(found.periods[0].days.start, found.periods[-1].days.end)


def totals_of(rows: Iterable[Row]) -> Totals:
    """Add up rows, exactly."""
    totals = Totals(*[NOTHING] * len(Totals._fields))
    for row in rows:
        figures = Totals(
            Decimal(row.accepted),
            row.result or NOTHING,
            row.adjustment or NOTHING,
            row.reported,
            row.difference,
            Decimal(row.dead_letters),
            row.unexplained,
            max(NOTHING, -row.unexplained),
            max(NOTHING, row.unexplained),
        )
        totals = Totals(*(difference(mine, -its) for mine, its in zip(totals, figures, strict=True)))
    return totals


def verdict(found: Reconciliation) -> str:
    """Say in a sentence or two what came of it."""
    totals = totals_of(found.rows)
    sentences = []
    if totals.missing:
        sentences.append(
            f"Unexplained: {number(totals.missing)} accepted records are missing from the report's registrations."
        )
    if totals.surplus:
        sentences.append(f"Unexplained: the report has {number(totals.surplus)} registrations more than were accepted.")
    if found.is_boundary:
        sentences.append(f"The report's days are not those of {found.days.name}: {_offsets(found)}.")
    if not sentences:
        differing = found.count("explained") + found.count("provisional")
        sentences = ["All differences are explained." if differing else "The report and the ledger agree."]
    if found.count("provisional"):
        sentences.append(
            f"{found.count('provisional'):,} differences are provisional: their periods may not be settled yet."
        )
    return " ".join(sentences)


def remarks(found: Reconciliation, *, shows_elsewhere: bool) -> list[str]:
    """Say what is to be known besides, one sentence each."""
    said = []
    if found.offsets and not found.is_boundary:
        said.append(
            f"The report's days may be those of another time zone: {_offsets(found)}. Run it again with that one."
        )
    if any(explanation.cause == "neighbours" for row in found.rows for explanation in row.explanations):
        said.append(
            "Differences of neighbouring periods cancel each other, as if the report's days began at another hour; "
            "name its time zone with --timezone."
        )
    if found.elsewhere:
        count = sum(each.accepted for each in found.elsewhere)
        how = "" if shows_elsewhere else "; --all lists them"
        said.append(f"{count:,} accepted records are not in this account's report: of other marketing sources{how}.")
    return said


def said_of(row: Row) -> str:
    """Say what explains the difference of a row."""
    return "; ".join(_said_of(row))


def _said_of(row: Row) -> Iterator[str]:
    if not row.difference:
        return
    if row.is_provisional:
        yield "provisional: the period may not be settled yet"
    if row.unexplained:
        count = number(abs(row.unexplained))
        yield f"unexplained: {count} missing from the report" if row.unexplained < 0 else f"unexplained: {count} more"
    yield from (explanation.words for explanation in row.explanations)
    if row.result is None:
        yield "the report has no number for it"
    if not row.accepted:
        yield "nothing was accepted for it"


def _offsets(found: Reconciliation) -> str:
    first, *others = (f"{days_of_offset(hours).name} (--timezone {zone_of_offset(hours)})" for hours in found.offsets)
    also = f"; as well: {', '.join(others)}" if others else ""
    left = f"only {number(found.left)} of the differences are left" if found.left else "all differences vanish"
    return f"with those of {first} {left}{also}"
