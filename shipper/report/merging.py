"""A marketing source that a report lists more than once: what one listing lacks is taken from another."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shipper.model import wire
from shipper.report.changes import place
from shipper.report.metrics import METRICS


class Merged(NamedTuple):
    """
    A report whose sources are listed once, unless the listings say two things of one figure.

    Attributes:
        places: Of the sources that were put together, each once.
    """

    report: wire.DailyReport
    places: tuple[str, ...] = ()


def merged(report: wire.DailyReport) -> Merged:
    """
    Put each listing of a marketing source together with the first one of the same brand and source, if they fit.

    Otherwise a source that is listed with its figures and again without them would have no sum.
    """
    firsts: dict[tuple[int, int], tuple[list[wire.MarketingSource], int]] = {}  # where the first listing stands
    places: dict[str, None] = {}
    brands: list[wire.Brand] = []
    for brand in report.brands:
        entries: list[wire.MarketingSource] = []
        for entry in brand.marketing_sources:
            found, index = firsts.setdefault((brand.id, entry.id), (entries, len(entries)))
            is_first = found is entries and index == len(entries)
            both = None if is_first else _together(found[index], entry)
            if both is None:
                entries.append(entry)
            else:
                found[index] = both
                places[place(brand.id, entry.id)] = None
        brands.append(replace(brand, marketing_sources=entries))
    return Merged(replace(report, brands=brands), tuple(places)) if places else Merged(report)


def _together(one: wire.MarketingSource, other: wire.MarketingSource) -> wire.MarketingSource | None:
    """Put two listings together; None if both have the same figure, or money in two currencies."""
    for metric in METRICS:
        mine, its = metric.figure(one), metric.figure(other)
        if (mine.result, its.result).count(None) == 0 or (mine.adjustment, its.adjustment).count(None) == 0:
            return None
    if not _has_money(one):
        one, other = other, one
    if _has_money(other) and _currency(one) != _currency(other):
        return None
    return _filled(one, other)  # type: ignore[no-any-return]


def _has_money(entry: wire.MarketingSource) -> bool:
    figures = [metric.figure(entry) for metric in METRICS if metric.is_money]
    return any(figure.result is not None or figure.adjustment is not None for figure in figures)


def _currency(entry: wire.MarketingSource) -> tuple[object, object]:
    return entry.reporting_currency, entry.exchange_rate


def _filled(value: Any, other: Any) -> Any:
    """Fill what is missing in one listing, and an empty name, from another."""
    if isinstance(value, Struct) and isinstance(other, Struct):
        fields = {name: _filled(getattr(value, name), getattr(other, name)) for name in value.__struct_fields__}
        return replace(value, **fields)
    return other if value is None or value == "" else value
