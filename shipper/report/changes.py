"""Differences between two versions of a report, field by field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Final, TypeVar

from msgspec import Struct

from shipper.model import wire
from shipper.report.currencies import currency_code
from shipper.report.metrics import METRICS

_REQUEST_FIELDS: Final = ("id", "reportingTime")  # differ in every answer

Value = Decimal | int | str | wire.Brand | wire.MarketingSource | None

_Item = TypeVar("_Item", wire.Brand, wire.MarketingSource)


def element_path(*ids: int) -> str:
    """Return the path of a brand, or of one of its marketing sources, in the document; empty for the account."""
    return ".".join(f"{name}[id={number}]" for name, number in zip(("brands", "marketingSources"), ids, strict=False))


class Change(Struct, frozen=True):
    """
    A difference.

    Attributes:
        field: Name within the brand or marketing source, `netRevenue.result`; empty if a whole one was added or
            removed.
        old, new: None if missing.
        brand, marketing_source: Ids; None for a field of the account, or of the brand.
    """

    field: str
    old: Value
    new: Value
    brand: int | None = None
    marketing_source: int | None = None

    @property
    def path(self) -> str:
        """For example `brands[id=11].marketingSources[id=50121].netRevenue.result`."""
        ids = (number for number in (self.brand, self.marketing_source) if number is not None)
        return ".".join(part for part in (element_path(*ids), self.field) if part)

    @property
    def is_figure(self) -> bool:
        """Whether it changes figures: a figure, their currency, or a source that has figures."""
        values = (self.old, self.new)
        if self.field.endswith("reportingCurrency"):
            codes = {currency_code(value) if isinstance(value, str) else None for value in values}
            return len(codes) == 2 and None not in codes
        return any(isinstance(value, Decimal) or _has_figures(value) for value in values)


def is_restated(old: wire.DailyReport, new: wire.DailyReport) -> bool:
    """Return whether documented figures differ; names, the checksum and undocumented fields do not count."""
    return any(change.is_figure for change in diff(old, new))


def _has_figures(item: object) -> bool:
    """Return whether a brand or marketing source has a figure other than zero."""
    entries = item.marketing_sources if isinstance(item, wire.Brand) else [item]
    figures = [
        metric.figure(entry) for entry in entries if isinstance(entry, wire.MarketingSource) for metric in METRICS
    ]
    return any(figure.result or figure.adjustment for figure in figures)


def diff(old: wire.DailyReport, new: wire.DailyReport) -> list[Change]:
    """
    Compare two versions of a report, ignoring the report's id and time.

    Brands and marketing sources are matched by id, regardless of their order. Figures are compared as numbers: 1.50
    equals 1.5. A missing figure differs from any other.

    Returns:
        The changes of the account, then those of the brands in the order of the old version, new brands last.
    """
    changes = [change for change in _compare(old, new) if change.field not in _REQUEST_FIELDS]
    for brand_id, old_brand, new_brand in _match(old.brands, new.brands):
        changes += _compare(old_brand, new_brand, brand_id)
        if old_brand is None or new_brand is None:
            continue
        for source_id, old_entry, new_entry in _match(old_brand.marketing_sources, new_brand.marketing_sources):
            changes += _compare(old_entry, new_entry, brand_id, source_id)
    return changes


def _compare(old: Struct | None, new: Struct | None, *ids: int) -> Iterator[Change]:
    """Compare two versions of an object without its lists; `ids` are those of its brand and marketing source."""
    if old is None or new is None:
        yield Change("", old, new, *ids)  # type: ignore[arg-type]
    elif old != new:
        before, after = dict(_leaves(old)), dict(_leaves(new))
        for name in before | after:
            if before.get(name) != after.get(name):
                yield Change(name, before.get(name), after.get(name), *ids)


def _leaves(value: Struct, prefix: str = "") -> Iterator[tuple[str, Decimal | int | str]]:
    """Yield the fields that have a value, including those of nested objects, but not of lists."""
    for attribute, name in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
        inner = getattr(value, attribute)
        if isinstance(inner, Struct):
            yield from _leaves(inner, f"{prefix}{name}.")
        elif inner is not None and not isinstance(inner, list):
            yield f"{prefix}{name}", inner


def _match(old: Iterable[_Item], new: Iterable[_Item]) -> Iterator[tuple[int, _Item | None, _Item | None]]:
    """Pair items with the same id; duplicates of an id are paired in order."""
    before, after = _by_id(old), _by_id(new)
    for key in before | after:
        yield key[0], before.get(key), after.get(key)


def _by_id(items: Iterable[_Item]) -> dict[tuple[int, int], _Item]:
    counts = Counter[int]()
    by_id = {}
    for item in items:
        by_id[item.id, counts[item.id]] = item
        counts[item.id] += 1
    return by_id
