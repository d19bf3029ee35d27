"""The data of an account for the page: its periods, and the names and colours of its brands."""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property
from typing import Final, NamedTuple

from shipper.model import wire
from shipper.report.formatting import clean, short_period
from shipper.report.metrics import REGISTRATIONS, Metric
from shipper.report.rows import ReportVersion, are_disjoint, share_currency

COLORS: Final = tuple(f"c{number}" for number in range(7))
OTHERS_COLOR: Final = "c7"


class BrandGroup(NamedTuple):
    """A brand, or all brands that share the last colour."""

    name: str
    color: str
    ids: frozenset[int]


class Account:
    """The ascending periods of an account; `covered` is `2 of 3 periods; …` if some are missing, see `Coverage.of`."""

    def __init__(self, periods: list[ReportVersion], covered: str = "") -> None:
        self.covered = covered
        self.periods = periods
        self.latest = periods[-1]
        self.is_series = len(periods) > 1
        self.may_add_periods = are_disjoint(periods)
        self.has_one_currency = share_currency(periods)

    @property
    def all_periods(self) -> str:
        """The title of sums over the periods."""
        first, last = (short_period(self.periods[end].report.reporting_period) for end in (0, -1))
        return f"{self.covered or f'All {len(self.periods)} periods'}, {first} to {last}"

    def may_compare(self, metric: Metric) -> bool:
        """Return whether a metric can be compared or added between periods."""
        return self.has_one_currency or not metric.is_money

    @cached_property
    def brands(self) -> list[BrandGroup]:
        """All brands, by number; only those with the most registrations have their own colour."""
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
        """The series of a chart: brands with their own colour, and a group of the others."""
        others = [brand for brand in self.brands if brand.color == OTHERS_COLOR]
        if len(others) < 2:
            return self.brands
        ids = frozenset(number for brand in others for number in brand.ids)
        return [
            *(brand for brand in self.brands if brand not in others),
            BrandGroup(f"{len(others)} other brands", OTHERS_COLOR, ids),
        ]

    def entries(self, item: ReportVersion, group: BrandGroup | None = None) -> list[wire.MarketingSource]:
        """Return the marketing sources of a period, of a group of brands or of all."""
        brands = [brand for brand in item.report.brands if group is None or brand.id in group.ids]
        return [entry for brand in brands for entry in brand.marketing_sources]

    def _registrations(self, brand_id: int) -> Decimal:
        """Return a brand's registrations for the choice of colours; missing figures count as zero."""
        group = BrandGroup("", "", frozenset({brand_id}))
        totals = [REGISTRATIONS.figure(entry).total for item in self.periods for entry in self.entries(item, group)]
        return sum((total for total in totals if total is not None), Decimal(0))
