"""What a reconciliation is made of: rows of a period, brand and marketing source, and what explains them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from shipper import wire
from shipper.report.days import Days
from shipper.report.metrics import difference
from shipper.report.ranges import DateRange

Cause = Literal["restated", "adjustment", "dead_letters", "time_zone", "neighbours"]
Status = Literal["agrees", "explained", "provisional", "unexplained"]
NOTHING: Final = Decimal(0)


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
    """

    days: DateRange
    report: wire.DailyReport
    earlier: Sequence[wire.DailyReport] = ()


class Explanation(Struct, frozen=True):
    """
    What explains a difference, or a part of it.

    Attributes:
        amount: How much of it; None = it cannot be told apart.
        words: For a reader.
    """

    cause: Cause
    amount: Decimal | None
    words: str


class Row(Struct, frozen=True, kw_only=True):
    """
    One period, brand and marketing source.

    Attributes:
        accepted: What the ledger has.
        dead_letters: What was refused here.
        result, adjustment: What the report has; None where it has nothing.
        explanations: Of a difference.
        unexplained: What they leave of it.
        is_provisional: The period has not been over for long: the platform may still be counting.
    """

    days: DateRange
    pair: Pair
    accepted: int
    dead_letters: int
    result: Decimal | None
    adjustment: Decimal | None
    explanations: tuple[Explanation, ...] = ()
    unexplained: Decimal = NOTHING
    is_provisional: bool = False

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
    def status(self) -> Status:
        if not self.difference:
            return "agrees"
        if self.is_provisional:
            return "provisional"
        return "unexplained" if self.unexplained else "explained"


class Elsewhere(NamedTuple):
    """Accepted records that are not in this account's report."""

    days: DateRange
    pair: Pair
    accepted: int


class Reconciliation(Struct, frozen=True, kw_only=True):
    """
    What came of it.

    Attributes:
        periods: In ascending order, without gaps unless a report could not be had.
        days: Of which time zone they are.
        rows: Period by period, each in the order of brand and source.
        elsewhere: In the same order.
        offsets: Hours ahead of UTC, the nearest first: if the days were those of such a zone, there would be far
            fewer differences, or none.
        left: How much would then be unexplained.
        is_boundary: Whether that explains the differences; some go up and some go down, as they have to.
    """

    account: int
    periods: tuple[Period, ...]
    days: Days
    rows: tuple[Row, ...]
    elsewhere: tuple[Elsewhere, ...]
    offsets: tuple[int, ...] = ()
    left: Decimal = NOTHING
    is_boundary: bool = False

    def count(self, status: Status) -> int:
        """Count the rows of a status."""
        return sum(row.status == status for row in self.rows)

    @property
    def is_explained(self) -> bool:
        return not self.count("unexplained")
