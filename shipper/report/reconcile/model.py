"""
The result of a reconciliation, and its verdict.

A `Row` contains the accepted and reported counts of a period, brand and marketing source, and explanations of their
difference. `Excluded` records could not be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from functools import cached_property, reduce
from itertools import groupby
from typing import Final, Literal, NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.checks import Finding
from shipper.report.days import Days
from shipper.report.formatting import clean, label_of
from shipper.report.metrics import REGISTRATIONS, minus, plus
from shipper.report.ranges import DateRange

Cause = Literal["restated", "adjustment", "dead_letters", "time_zone", "neighbours"]
Status = Literal["agrees", "explained", "provisional", "unexplained"]
Verdict = Literal["agree", "nothing to compare", "explained", "differences", "not yet judged", "incomplete"]
Kind = Literal["unassigned", "not compared", "not begun", "of another account"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
ZERO: Final = Decimal(0)


def days_to_settle(settle_days: int) -> int:
    """Return how many days later a day can be judged: one until it has ended, and those that it stays provisional."""
    return 1 + settle_days


class Pair(NamedTuple):
    """A brand and a marketing source: the media of the records' BTags, None if they have none."""

    brand: int
    source: int | None

    @property
    def order(self) -> tuple[int, bool, int]:
        return self.brand, self.source is None, self.source or 0


class Period(NamedTuple):
    """
    The report of a period, earlier versions with other content (latest last), and findings of checks.

    Of the marketing sources, only names and registrations are used, see `without_other_figures`.
    """

    days: DateRange
    report: wire.DailyReport
    earlier: Sequence[wire.DailyReport] = ()
    findings: Sequence[Finding] = ()


def without_other_figures(report: wire.DailyReport) -> wire.DailyReport:
    """Return a report with nothing but names and registrations, which takes a tenth of the memory."""
    brands = [
        replace(
            brand,
            marketing_sources=[
                wire.MarketingSource(
                    id=entry.id,
                    name=entry.name,
                    conversions=wire.Conversions(registrations=REGISTRATIONS.figure(entry)),
                )
                for entry in brand.marketing_sources
            ],
        )
        for brand in report.brands
    ]
    return replace(report, brands=brands)


class Excluded(NamedTuple):
    """
    Accepted records that are not compared: their period has no report, or they belong to another account.

    Attributes:
        pair: None = all brands and marketing sources.
        owner: The other account that they belong to.
        contested: How many of them this account also claims; None = not counted.
    """

    kind: Kind
    days: DateRange
    reason: str
    accepted: int = 0
    pair: Pair | None = None
    owner: int | None = None
    contested: int | None = None


class Explanation(Struct, frozen=True):
    cause: Cause
    amount: Decimal
    text: str


class Row(Struct, frozen=True, kw_only=True):
    """
    The comparison of a period, brand and marketing source.

    Attributes:
        contested: Those of them that another account also claims.
        dead_letters: Rejected records that the service may have received nevertheless.
        result, adjustment: The report's figures; None if it has none.
        earlier: Figures of earlier versions of the report.
        is_provisional: The period ended recently, so the platform may still be counting; nothing is explained.
        unexplained: The part of the difference without an explanation.
        unjudged: The part of the difference that may still disappear.
    """

    days: DateRange
    pair: Pair
    accepted: int
    contested: int = 0
    dead_letters: int = 0
    result: Decimal | None
    adjustment: Decimal | None
    earlier: Sequence[wire.AmountPair] = ()
    is_provisional: bool = False
    explanations: tuple[Explanation, ...] = ()
    unexplained: Decimal = ZERO
    unjudged: Decimal = ZERO

    @property
    def reported(self) -> Decimal:
        """Sum of result and adjustment; missing figures count as zero."""
        return _reported(self.result, self.adjustment)

    @property
    def reported_before(self) -> list[Decimal]:
        """The same in the earlier versions of the report that had a result."""
        return [_reported(figure.result, figure.adjustment) for figure in self.earlier if figure.result is not None]

    @property
    def difference(self) -> Decimal:
        """Reported minus accepted; negative = registrations are missing from the report."""
        return minus(self.reported, self.accepted)

    @property
    def missing(self) -> Decimal:
        """Unexplained records missing from the report."""
        return max(ZERO, self.unexplained.copy_negate())

    @property
    def surplus(self) -> Decimal:
        """Unexplained additional registrations in the report."""
        return max(ZERO, self.unexplained)

    @property
    def taken_back(self) -> Decimal:
        """Registrations that the platform counted and then took back; 0 or less."""
        explanations = [part for part in self.explanations if part.cause in {"restated", "adjustment"}]
        return _sum(part.amount for part in explanations if part.amount < 0)

    @property
    def status(self) -> Status:
        if not self.difference:
            return "agrees"
        if self.unexplained:
            return "unexplained"
        return "provisional" if self.is_provisional else "explained"


def _reported(result: Decimal | None, adjustment: Decimal | None) -> Decimal:
    return plus(result or ZERO, adjustment or ZERO)


class Totals(NamedTuple):
    """Sums over rows; see `Row`."""

    accepted: Decimal
    result: Decimal
    adjustment: Decimal
    reported: Decimal
    difference: Decimal
    dead_letters: Decimal
    unexplained: Decimal
    missing: Decimal
    surplus: Decimal
    unjudged: Decimal
    taken_back: Decimal
    contested: Decimal


def totals_of(rows: Iterable[Row]) -> Totals:
    """Add up rows exactly."""
    rows = list(rows)
    return Totals(*(_sum(getattr(row, name) or ZERO for row in rows) for name in Totals._fields))


def _sum(values: Iterable[Decimal | int]) -> Decimal:
    return reduce(plus, values, ZERO)


class ZoneFit(NamedTuple):
    """
    Time zones whose days explain all differences.

    Attributes:
        moved: Records that are on another day in the first zone.
        chance: Upper bound for the probability of a fit by chance.
    """

    zones: tuple[Days, ...]
    moved: int
    chance: float


@dataclass(frozen=True, kw_only=True)
class Reconciliation:
    """
    The result of comparing an account's ledger with its reports; other attributes are arguments of `reconcile`.

    Attributes:
        periods: Compared periods, ascending.
        excluded: By kind, ascending; at most one has the kind `not begun`.
        rows: Sorted by period, brand and source.
        dead_letters: Rejected records of the compared periods that the service may have received nevertheless,
            including those without a row.
        lists_all: Whether to show the records of other accounts and, in the table, rows that agree.
    """

    account: int
    periods: tuple[Period, ...]
    excluded: tuple[Excluded, ...] = ()
    days: Days
    today: date
    settle_days: int
    rows: tuple[Row, ...]
    dead_letters: int = 0
    zone: ZoneFit | None = None
    alarm_below: Decimal = ZERO
    lists_all: bool = False

    @property
    def name(self) -> str:
        """Name of the account in the latest report."""
        name = self.periods[-1].report.source.affiliate_account_name if self.periods else ""
        return clean(name) or f"Account {self.account}"

    @property
    def span(self) -> DateRange:
        """Days from the first period to the last."""
        days = [period.days for period in self.periods]
        days += [period.days for period in (*self.not_compared, *self.not_begun)]
        return DateRange(min(part.start for part in days), max(part.end for part in days))

    def of_kind(self, kind: Kind) -> list[Excluded]:
        return [records for records in self.excluded if records.kind == kind]

    @property
    def listed(self) -> list[Excluded]:
        """The excluded records to show."""
        return [records for records in self.excluded if self.lists_all or records.kind != "of another account"]

    @property
    def not_compared(self) -> list[Excluded]:
        return self.of_kind("not compared")

    @property
    def not_begun(self) -> list[Excluded]:
        return self.of_kind("not begun")

    @property
    def unassigned(self) -> int:
        """Number of accepted records in the compared periods that belong to no known account."""
        return sum(records.accepted for records in self.of_kind("unassigned"))

    @cached_property
    def totals(self) -> Totals:
        return totals_of(self.rows)

    def count(self, status: Status) -> int:
        return self._rows_by_status[status]

    @cached_property
    def _rows_by_status(self) -> Counter[Status]:
        return Counter(row.status for row in self.rows)

    @property
    def contested(self) -> int:
        """Number of accepted records claimed by this account and another one."""
        return sum(row.contested for row in self.rows) + sum(records.contested or 0 for records in self.excluded)

    @property
    def waiting(self) -> dict[str, list[DateRange]]:
        """Periods that cannot be judged yet, by reason, ascending; `recent` ones are over and may still change."""
        unjudged = {row.days for row in self.rows if row.unjudged}
        periods = [period.days for period in self.periods]
        return {
            "recent": [days for days in periods if days in unjudged and days.end < self.today],
            "not over": [days for days in periods if days.end >= self.today],
            "not begun": [period.days for period in self.not_begun],
        }

    @property
    def not_yet_judged(self) -> list[DateRange]:
        return [days for periods in self.waiting.values() for days in periods]

    @property
    def judged(self) -> list[DateRange]:
        """Compared periods that could be judged, ascending."""
        others = set(self.not_yet_judged)
        return [period.days for period in self.periods if period.days not in others]

    @property
    def judgeable_on(self) -> date | None:
        """The first day on which all periods can be judged; None if they have been, or no such date exists."""
        waiting = self.not_yet_judged
        try:
            return waiting[-1].end + timedelta(days=days_to_settle(self.settle_days)) if waiting else None
        except OverflowError:
            return None

    @property
    def verdict(self) -> Verdict:
        """The first verdict that applies."""
        if self.count("unexplained"):
            return "differences"
        if self.not_compared or self.unassigned:
            return "incomplete"
        if self.not_yet_judged:
            return "not yet judged"
        if self.count("explained"):
            return "explained"
        return "nothing to compare" if self.is_empty else "agree"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was accepted and nothing is reported."""
        return not any(row.accepted or row.result or row.adjustment for row in self.rows)

    @property
    def is_alarmed(self) -> bool:
        """Whether more was taken back from a marketing source than `alarm_below` allows."""
        return bool(self.totals.taken_back) and any(
            totals.taken_back < self.alarm_below * totals.accepted
            for totals in (totals_of(rows) for _, rows in rows_by_pair(self.rows))
        )


def rows_by_pair(rows: Iterable[Row]) -> Iterable[tuple[Pair, Iterable[Row]]]:
    """Group rows by brand and marketing source, periods ascending."""
    return groupby(sorted(rows, key=lambda row: (row.pair.order, row.days)), key=lambda row: row.pair)


class Names:
    """The names of brands and marketing sources in the latest report that has them."""

    def __init__(self, result: Reconciliation) -> None:
        brands = [brand for period in result.periods for brand in period.report.brands]
        self._brands = {brand.id: brand.name or "" for brand in brands}
        self._sources = {
            Pair(brand.id, entry.id): entry.name or "" for brand in brands for entry in brand.marketing_sources
        }

    def brand_name(self, pair: Pair) -> str:
        return self._brands.get(pair.brand, "")

    def source_name(self, pair: Pair) -> str:
        return self._sources.get(pair, "")

    def labels(self, pair: Pair | None) -> tuple[str, str]:
        """Return the labels of brand and marketing source, with number and name; empty = all."""
        if pair is None:
            return "", ""
        source = "no media" if pair.source is None else label_of(pair.source, self.source_name(pair))
        return label_of(pair.brand, self.brand_name(pair)), source
