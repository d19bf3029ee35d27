"""
What a reconciliation is made of, and its verdict.

Per period, brand and marketing source there is a `Row`: what was accepted, what is reported, and what explains the
difference. `Reconciliation.verdict` is the verdict of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import reduce
from itertools import groupby
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from shipper.model import wire
from shipper.report.days import Days
from shipper.report.findings import Finding
from shipper.report.metrics import difference, plus
from shipper.report.ranges import DateRange

Cause = Literal["restated", "adjustment", "dead_letters", "time_zone", "neighbours"]
Status = Literal["agrees", "explained", "provisional", "unexplained"]
Verdict = Literal["agree", "nothing to compare", "explained", "differences", "not yet judged", "incomplete"]
NOTHING: Final = Decimal(0)
_TAKES_BACK: Final = {"restated", "adjustment"}


def days_to_settle(settle_days: int) -> int:
    """Return how many days after it a day can be judged: not before it is over."""
    return max(1, settle_days)


class Pair(NamedTuple):
    """
    A brand and a marketing source.

    Attributes:
        source: The media of the records' BTags; None if they have none.
    """

    brand: int
    source: int | None

    @property
    def place(self) -> tuple[int, bool, int]:
        """By what pairs are ordered."""
        return self.brand, self.source is None, self.source or 0


class Period(NamedTuple):
    """
    The report of one period.

    Attributes:
        earlier: Versions that were fetched before, after the end of the period, and are not the same; the latest at the
            end.
        findings: What is wrong in the report, apart from its registrations.
    """

    days: DateRange
    report: wire.DailyReport
    earlier: Sequence[wire.DailyReport] = ()
    findings: Sequence[Finding] = ()


class Hole(NamedTuple):
    """
    A period that could not be compared.

    Attributes:
        reason: Why, such as `its report could not be fetched`.
        accepted: Records of the account that the ledger has of it.
    """

    days: DateRange
    reason: str
    accepted: int = 0


class Explanation(Struct, frozen=True):
    """
    What explains a difference, or a part of it.

    Attributes:
        amount: How much of it.
        words: For a reader.
    """

    cause: Cause
    amount: Decimal
    words: str


class Row(Struct, frozen=True, kw_only=True):
    """
    One period, brand and marketing source.

    Attributes:
        accepted: What the ledger has.
        contested: How many of these another account claims, too.
        dead_letters: What was refused here and may have reached the service all the same.
        result, adjustment: What the report has; None where it has nothing.
        is_provisional: Not all days of the period have been over for long: the platform may still be counting.
        explanations: Of a difference; a provisional row has none.
        unexplained: What they leave of it.
        unjudged: What time may still explain; only of a provisional row.
    """

    days: DateRange
    pair: Pair
    accepted: int
    contested: int = 0
    dead_letters: int = 0
    result: Decimal | None
    adjustment: Decimal | None
    is_provisional: bool = False
    explanations: tuple[Explanation, ...] = ()
    unexplained: Decimal = NOTHING
    unjudged: Decimal = NOTHING

    @property
    def reported(self) -> Decimal:
        """Result and adjustment together; where the report has nothing, it says that there was nothing."""
        total = wire.AmountPair(self.result or NOTHING, self.adjustment or NOTHING).total
        assert total is not None
        return total

    @property
    def difference(self) -> Decimal:
        """How much more the report has than the ledger; below 0 = registrations are missing from the report."""
        return difference(self.reported, Decimal(self.accepted))

    @property
    def taken_back(self) -> Decimal:
        """What the platform took back of registrations that it had counted; 0 or less."""
        amounts = (each.amount for each in self.explanations if each.cause in _TAKES_BACK and each.amount < 0)
        return reduce(plus, amounts, NOTHING)

    @property
    def status(self) -> Status:
        if not self.difference:
            return "agrees"
        if self.unexplained:
            return "unexplained"
        return "provisional" if self.is_provisional else "explained"


class Elsewhere(NamedTuple):
    """
    Accepted records that are not the account's.

    Attributes:
        owner: The account that they are of; None if they are unassigned: nothing says whose they are.
        contested: How many of them the account claims, too.
    """

    days: DateRange
    pair: Pair
    owner: int | None
    accepted: int
    contested: int = 0


class Zone(NamedTuple):
    """
    A time zone whose days explain all differences.

    Attributes:
        clocks: Those that fit; all of them equally.
        moved: Records that fall into another compared day by its clock.
        chance: At most so likely would some zone fit by chance.
    """

    clocks: tuple[Days, ...]
    moved: int
    chance: float


class Reconciliation(Struct, frozen=True, kw_only=True):
    """
    What came of it.

    Attributes:
        periods: In ascending order.
        holes: In ascending order.
        later: The days after these that have not begun; of them no report was fetched.
        days: Of which time zone they are.
        today: In that zone.
        settle_days: For how long after its end a day is provisional.
        rows: Period by period, each in the order of brand and source.
        elsewhere: In the same order.
        dead_letters: Records of the account and the compared periods that were refused here and may have reached the
            service all the same, also those that no row has.
        zone: If the days of another zone explain all differences.
        alarm_below: What may be taken back of what was accepted of a marketing source without an alarm; a share of
            0 or less.
    """

    account: int
    periods: tuple[Period, ...]
    holes: tuple[Hole, ...] = ()
    later: Hole | None = None
    days: Days
    today: date
    settle_days: int
    rows: tuple[Row, ...]
    elsewhere: tuple[Elsewhere, ...] = ()
    dead_letters: int = 0
    zone: Zone | None = None
    alarm_below: Decimal = NOTHING

    def count(self, status: Status) -> int:
        return sum(row.status == status for row in self.rows)

    @property
    def unassigned(self) -> int:
        """Count the accepted records of the compared periods of which nothing says whose they are."""
        return sum(each.accepted for each in self.elsewhere if each.owner is None)

    @property
    def contested(self) -> int:
        """Count the accepted records that the account and another one claim."""
        return sum(row.contested for row in self.rows) + sum(each.contested for each in self.elsewhere)

    @property
    def is_complete(self) -> bool:
        return not self.holes

    @property
    def recent(self) -> list[DateRange]:
        """The compared periods that are over, and have differences that time may explain."""
        unjudged = {row.days for row in self.rows if row.unjudged}
        return [period.days for period in self.periods if period.days in unjudged and period.days.end < self.today]

    @property
    def unfinished(self) -> list[DateRange]:
        """The compared periods that are not over."""
        return [period.days for period in self.periods if period.days.end >= self.today]

    @property
    def not_yet_judged(self) -> list[DateRange]:
        """The periods that are to be judged another day, in ascending order."""
        return [*self.recent, *self.unfinished, *([self.later.days] if self.later else ())]

    @property
    def judged(self) -> list[DateRange]:
        """The compared periods that are not to be judged another day, in ascending order."""
        others = set(self.not_yet_judged)
        return [period.days for period in self.periods if period.days not in others]

    @property
    def again_on(self) -> date | None:
        """The day from which on all periods can be judged; None if they are judged, or the calendar has no such day."""
        waiting = self.not_yet_judged
        try:
            return waiting[-1].end + timedelta(days=days_to_settle(self.settle_days)) if waiting else None
        except OverflowError:
            return None

    @property
    def verdict(self) -> Verdict:
        """The first of these that applies."""
        if self.count("unexplained"):
            return "differences"
        if self.holes or self.unassigned:
            return "incomplete"
        if self.not_yet_judged:
            return "not yet judged"
        if self.count("explained"):
            return "explained"
        return "nothing to compare" if self.is_empty else "agree"

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was accepted and nothing is reported."""
        return not any(row.accepted or row.result or row.adjustment for row in self.rows)

    @property
    def is_alarmed(self) -> bool:
        """Return whether more was taken back of some marketing source than `alarm_below` allows."""
        ordered = sorted(self.rows, key=lambda row: row.pair.place)
        return any(self._is_alarming(rows) for _, rows in groupby(ordered, key=lambda row: row.pair))

    def _is_alarming(self, rows: Iterable[Row]) -> bool:
        rows = list(rows)
        taken_back = sum((row.taken_back for row in rows), NOTHING)
        return taken_back < self.alarm_below * sum(row.accepted for row in rows)
