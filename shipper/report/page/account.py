"""The data of one account for the page: its periods, and the names and colours of its brands."""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property
from typing import Final, NamedTuple

from shipper.model import wire
from shipper.report.metrics import REGISTRATIONS, Metric
from shipper.report.rows import Fetched, are_disjoint, share_currency
from shipper.report.wording import clean

COLORS: Final = tuple(f"c{number}" for number in range(7))
OTHERS_COLOR: Final = "c7"


class BrandGroup(NamedTuple):
    """A brand, or all those that have no colour of their own."""

    name: str
    color: str
    ids: frozenset[int]


class Account:
    """
    Args:
        periods: 1..n versions, one per period, ascending.
        covered: What is missing of the periods that were asked for, `2 of 3 periods; …`; empty if nothing is.
    """

    def __init__(self, periods: list[Fetched], covered: str = "") -> None:
        self.covered = covered
        self.periods = periods
        self.latest = periods[-1]
        self.is_series = len(periods) > 1
        self.may_add_periods = are_disjoint(periods)
        self.has_one_currency = share_currency(periods)

    def may_compare(self, metric: Metric) -> bool:
        """Return whether a metric of one period can be compared with that of another, or added to it."""
        return self.has_one_currency or not metric.is_money

    @cached_property
    def brands(self) -> list[BrandGroup]:
        """Every brand that stands in a document, by number; all beyond the busiest ones have the same colour."""
        names = {
            brand.id: clean(brand.name) or f"Brand {brand.id}" for item in self.periods for brand in item.report.brands
        }
        by_size = sorted(names, key=lambda number: (-self._registrations(number), number))
        colors = dict(zip(sorted(by_size[: len(COLORS)]), COLORS, strict=False))
        return [
            BrandGroup(names[number], colors.get(number, OTHERS_COLOR), frozenset({number})) for number in sorted(names)
        ]

    @cached_property
    def groups(self) -> list[BrandGroup]:
        """The series of a chart: brands of a colour of their own, and the others together."""
        others = [brand for brand in self.brands if brand.color == OTHERS_COLOR]
        if len(others) < 2:
            return self.brands
        ids = frozenset(number for brand in others for number in brand.ids)
        return [
            *(brand for brand in self.brands if brand not in others),
            BrandGroup(f"{len(others)} other brands", OTHERS_COLOR, ids),
        ]

    def entries(self, item: Fetched, group: BrandGroup | None = None) -> list[wire.MarketingSource]:
        """List the marketing sources of one period; of some brands, or of all."""
        brands = [brand for brand in item.report.brands if group is None or brand.id in group.ids]
        return [entry for brand in brands for entry in brand.marketing_sources]

    def _registrations(self, brand_id: int) -> Decimal:
        """Weigh a brand; only for the choice of colours, so what is missing counts nothing."""
        group = BrandGroup("", "", frozenset({brand_id}))
        totals = [REGISTRATIONS.figure(entry).total for item in self.periods for entry in self.entries(item, group)]
        return sum((total for total in totals if total is not None), Decimal(0))
