"""The lines of a table for a reader: marketing sources under their brands, and the totals that come after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from shipper.model import wire
from shipper.report.metrics import currencies
from shipper.report.rows import Fetched
from shipper.report.wording import named


class Line(NamedTuple):
    """
    One marketing source, or the total of a brand or of the account.

    Attributes:
        brand: Number and name.
        source: Number and name; empty in a total.
        entries: What to add, 1..n; one entry per period if it is a marketing source.
        has_next: Whether the next line is of the same brand.
    """

    kind: Literal["source", "brand", "account"]
    brand: str
    source: str
    entries: list[wire.MarketingSource]
    has_next: bool = False


# A brand's number and name, and the same of its marketing sources with their entries.
_Brands = list[tuple[str, list[tuple[str, list[wire.MarketingSource]]]]]


def lines_of(report: wire.DailyReport) -> list[Line]:
    """List the lines of one period, in the order of the document."""
    brands: _Brands = [
        (
            named(brand.id, brand.name),
            [(named(entry.id, entry.name), [entry]) for entry in brand.marketing_sources],
        )
        for brand in report.brands
    ]
    return list(_lines(brands))


def lines_over(fetched: Iterable[Fetched]) -> list[Line]:
    """List the lines of several ascending periods of one account; the latest names count."""
    entries: dict[int, dict[int, list[wire.MarketingSource]]] = {}
    names: dict[int, str] = {}
    for item in fetched:
        for brand in item.report.brands:
            names[brand.id] = named(brand.id, brand.name)
            for entry in brand.marketing_sources:
                entries.setdefault(brand.id, {}).setdefault(entry.id, []).append(entry)
    brands: _Brands = [
        (names[brand_id], [(named(source_id, found[-1].name), found) for source_id, found in sorted(sources.items())])
        for brand_id, sources in sorted(entries.items())
    ]
    return list(_lines(brands))


def _lines(brands: _Brands) -> Iterator[Line]:
    for brand, sources in brands:
        for source, entries in sources:
            yield Line("source", brand, source, entries, has_next=len(sources) > 1)
        if len(sources) > 1:
            yield Line("brand", brand, "", [entry for _, entries in sources for entry in entries])
    if len([brand for brand, sources in brands if sources]) > 1:
        yield Line("account", "", "", [entry for _, sources in brands for _, entries in sources for entry in entries])


def shows_currency(lines: Iterable[Line], reporting_currency: str | None) -> bool:
    """Tell whether the lines must say their currencies: they are not simply that of the account."""
    return any(
        name != reporting_currency or (rate is not None and rate != 1)
        for name, rate in currencies(entry for line in lines for entry in line.entries)
    )
