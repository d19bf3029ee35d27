"""What differs between two versions of a report, figure by figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Final, TypeVar

from msgspec import Struct

from shipper.model import wire
from shipper.report.currencies import currency_code
from shipper.report.metrics import METRICS

_OF_THE_REQUEST: Final = ("id", "reportingTime")  # each request gets them anew, also where nothing changed

_Item = TypeVar("_Item", wire.Brand, wire.MarketingSource)


def place(*ids: int) -> str:
    """Name a place in the document by the ids of the brand and the marketing source; empty for the account."""
    return ".".join(f"{name}[id={each}]" for name, each in zip(("brands", "marketingSources"), ids, strict=False))


class Change(Struct, frozen=True):
    """
    One difference.

    Attributes:
        field: Its name in the document below the brand or marketing source, such as `netRevenue.result`. Empty if
            the whole brand or marketing source came or went.
        old: None if it was missing.
        new: None if it is missing.
        brand: Id of the brand; None if it is a field of the account.
        marketing_source: Id of the marketing source; None if it is a field of the brand or the account.
    """

    field: str
    old: Decimal | int | str | wire.Brand | wire.MarketingSource | None
    new: Decimal | int | str | wire.Brand | wire.MarketingSource | None
    brand: int | None = None
    marketing_source: int | None = None

    @property
    def path(self) -> str:
        """Where it is: `brands[id=11].marketingSources[id=50121].netRevenue.result`."""
        ids = (each for each in (self.brand, self.marketing_source) if each is not None)
        return ".".join(part for part in (place(*ids), self.field) if part)

    @property
    def is_figure(self) -> bool:
        """Whether it changes what the figures say: one of them, their currency, or a source that has some."""
        values = (self.old, self.new)
        if self.field.endswith("reportingCurrency"):
            codes = {currency_code(value) if isinstance(value, str) else None for value in values}
            return len(codes) == 2 and None not in codes
        return any(isinstance(value, Decimal) or _has_figures(value) for value in values)


def is_restated(old: wire.DailyReport, new: wire.DailyReport) -> bool:
    """Return whether a documented figure differs; names, the checksum and undocumented fields are none."""
    return any(change.is_figure for change in diff(old, new))


def _has_figures(item: object) -> bool:
    """Return whether a whole brand or marketing source has a figure that is not zero."""
    entries = item.marketing_sources if isinstance(item, wire.Brand) else [item]
    figures = [
        metric.figure(entry) for entry in entries if isinstance(entry, wire.MarketingSource) for metric in METRICS
    ]
    return any(figure.result or figure.adjustment for figure in figures)


def diff(old: wire.DailyReport, new: wire.DailyReport) -> list[Change]:
    """
    Compare two versions of a report; the report's id and time are left out.

    Brands and marketing sources are matched by their ids, whatever their order. Figures are compared as numbers: 1.50
    is 1.5. One that is missing in one version differs from any in the other.

    Returns:
        0..n changes: of the account, then brand by brand, in the order of the old version; what came is at the end.
    """
    changes = [change for change in _fields(old, new) if change.field not in _OF_THE_REQUEST]
    for brand_id, old_brand, new_brand in _matched(old.brands, new.brands):
        changes += _of_item(old_brand, new_brand, brand_id)
        if old_brand is None or new_brand is None:
            continue
        for source_id, before, after in _matched(old_brand.marketing_sources, new_brand.marketing_sources):
            changes += _of_item(before, after, brand_id, source_id)
    return changes


def _of_item(old: _Item | None, new: _Item | None, *path: int) -> Iterator[Change]:
    """Compare two versions of a brand or marketing source; `path` holds its ids from the brand down."""
    if old is None or new is None:
        yield Change("", old, new, *path)
    else:
        yield from _fields(old, new, *path)


def _fields(old: Struct, new: Struct, *path: int) -> Iterator[Change]:
    if old == new:
        return
    before, after = dict(_leaves(old)), dict(_leaves(new))
    for name in before | after:
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name), *path)


def _leaves(value: Struct, prefix: str = "") -> Iterator[tuple[str, Decimal | int | str]]:
    """Walk the fields that have a value, those of objects within included, those of lists not."""
    for attribute, name in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
        inner = getattr(value, attribute)
        if isinstance(inner, Struct):
            yield from _leaves(inner, f"{prefix}{name}.")
        elif inner is not None and not isinstance(inner, list):
            yield f"{prefix}{name}", inner


def _matched(old: Iterable[_Item], new: Iterable[_Item]) -> Iterator[tuple[int, _Item | None, _Item | None]]:
    """Pair what has the same id; where an id is there several times, in their order."""
    before, after = _numbered(old), _numbered(new)
    for key in before | after:
        yield key[0], before.get(key), after.get(key)


def _numbered(items: Iterable[_Item]) -> dict[tuple[int, int], _Item]:
    seen = Counter[int]()
    numbered = {}
    for item in items:
        numbered[item.id, seen[item.id]] = item
        seen[item.id] += 1
    return numbered
