"""The charts of the page with their words: registrations, funnel, revenue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Final, Protocol

from shipper.model import wire
from shipper.report.metrics import (
    CLICKS,
    CPA,
    FEES,
    NET_REVENUE,
    NEW_CUSTOMERS,
    REGISTRATIONS,
    REV_SHARE,
    Metric,
    added,
    at_most,
)
from shipper.report.page.account import Account, BrandGroup
from shipper.report.page.charts import Column, Series, bar, stacked_columns
from shipper.report.page.markup import Html, data, minus, section, sub, tag
from shipper.report.rows import Fetched
from shipper.report.wording import at_a_glance, clean, number, period, short_period

_REVENUE: Final = (NET_REVENUE, REV_SHARE, CPA, FEES)
_LABELS_WIDE, _LABELS_HALF = 16, 8


def registrations(account: Account) -> Html:
    """Show registrations by brand: over time if there are several periods."""
    return section(
        "Registrations",
        sub("By brand and period, result and adjustment together." if account.is_series else "By brand."),
        _legend(account) if account.is_series else None,
        _chart(account, REGISTRATIONS, account.entries, labels_max=_LABELS_WIDE),
    )


def revenue(account: Account) -> list[Html]:
    """Show the four kinds of revenue by brand; a section for every currency, as money of two is not added."""
    names = dict.fromkeys(entry.reporting_currency for item in account.periods for entry in account.entries(item))
    return [_revenue(account, name) for name in names]


def _revenue(account: Account, currency: str | None) -> Html:
    def entries(item: Fetched, group: BrandGroup | None = None) -> list[wire.MarketingSource]:
        return [entry for entry in account.entries(item, group) if entry.reporting_currency == currency]

    charts = [
        tag("div", tag("h3", metric.title), _chart(account, metric, entries, labels_max=_LABELS_HALF), class_="panel")
        for metric in _REVENUE
    ]
    return section(
        f"Revenue in {clean(currency)}" if currency else "Revenue, currency not given",
        sub("Each figure on a scale of its own, result and adjustment together."),
        _legend(account) if account.is_series else None,
        tag("div", *charts, class_="halves"),
    )


def funnels(account: Account) -> Html:
    """Show the way from click to customer for each brand: of the latest period, and of all together."""
    latest = account.latest
    parts: list[Html | None] = [
        _panels(account, (CLICKS, REGISTRATIONS, NEW_CUSTOMERS), partial(account.entries, latest)),
    ]
    if account.is_series:
        parts.insert(0, tag("h3", period(latest.report.reporting_period)))
        parts += _funnels_over_periods(account)
    note = (
        "A customer may have come through two sources of a brand, so new depositing customers of several sources are "
        "an upper bound."
    )
    return section("From click to customer", sub(note), *parts)


def _funnels_over_periods(account: Account) -> list[Html]:
    first, last = (account.periods[end].report.reporting_period for end in (0, -1))
    if not account.may_add_periods:
        return [sub("The periods overlap, so nothing is added over them.")]

    which = account.covered or f"All {len(account.periods)} periods"

    def entries(brand: BrandGroup) -> list[wire.MarketingSource]:
        return [entry for item in account.periods for entry in account.entries(item, brand)]

    return [
        tag("h3", f"{which}, {short_period(first)} to {short_period(last)}"),
        sub(
            "Without depositing customers: each period counts its own, and one who deposits in two of them would be "
            "counted twice."
        ),
        _panels(account, (CLICKS, REGISTRATIONS), entries),
    ]


def _panels(
    account: Account, metrics: Sequence[Metric], entries_of: Callable[[BrandGroup], list[wire.MarketingSource]]
) -> Html:
    brands = [(brand, entries) for brand in account.brands if (entries := entries_of(brand))]
    steps = [[_step(metric, entries) for metric in metrics] for _, entries in brands]
    totals = [total for found in steps for total, _ in found]
    return tag(
        "div",
        *(_panel(brand, metrics, found, totals) for (brand, _), found in zip(brands, steps, strict=True)),
        class_="funnels",
    )


def _step(metric: Metric, entries: Sequence[wire.MarketingSource]) -> tuple[Decimal | None, bool]:
    """Add up one step of a funnel; answers also whether it is only an upper bound."""
    if metric.is_additive or len(entries) == 1:
        return added(metric, entries).total, False
    return at_most(metric, entries), True


def _panel(
    brand: BrandGroup,
    metrics: Sequence[Metric],
    steps: Sequence[tuple[Decimal | None, bool]],
    totals: Sequence[Decimal | None],
) -> Html:
    """
    Args:
        totals: Of all panels, for the scale of the bars.
    """
    rows = []
    before: Decimal | None = None
    previous = ""
    for metric, (total, is_bound) in zip(metrics, steps, strict=True):
        bound = "at most " if is_bound and total is not None else ""
        share = minus(f"{bound}{total / before:.1%} of {previous}") if total is not None and before else None
        rows.append(
            tag(
                "li",
                tag("span", metric.title, class_="name"),
                tag(
                    "b",
                    tag("small", bound),
                    "missing" if total is None else data(total, number(total)),
                ),
                bar(total, totals, brand.color),
                tag("span", share, class_="note"),
            )
        )
        before, previous = total, metric.title.lower()
    return tag(
        "div",
        tag("h3", tag("i", class_=f"swatch {brand.color}"), tag("bdi", brand.name)),
        tag("ol", *rows, class_="steps"),
        class_="panel funnel",
    )


class _EntriesOf(Protocol):
    def __call__(self, item: Fetched, group: BrandGroup | None = None) -> list[wire.MarketingSource]:
        """List what a chart is about: of one period, and of some brands or of all."""


def _chart(account: Account, metric: Metric, entries_of: _EntriesOf, *, labels_max: int) -> Html:
    """Draw columns over time, or bars by brand if there is one period."""
    written = partial(_written, metric)
    series = [
        Series(
            group.name,
            group.color,
            [
                # A brand that is not in a document has nothing that could be missing.
                added(metric, entries).total if (entries := entries_of(item, group)) else Decimal(0)
                for item in account.periods
            ],
        )
        for group in account.groups
    ]
    series = [one for one in series if any(value != 0 for value in one.values)]
    if not any(value for one in series for value in one.values):
        return sub("Figures are missing, or may not be added." if series else "All figures are zero.")
    if not account.is_series:
        return _bars(series, metric)
    columns = [
        Column(
            short_period(item.report.reporting_period),
            period(item.report.reporting_period),
            added(metric, entries_of(item)).total if labels_max == _LABELS_WIDE else None,
            item.is_restated,
        )
        for item in account.periods
    ]
    caption = f"{metric.title} by brand, {columns[0].title} to {columns[-1].title}; the tables below have the figures."
    return stacked_columns(series, columns, written, caption=caption, labels_max=labels_max)


def _bars(series: Sequence[Series], metric: Metric) -> Html:
    values = [one.values[0] for one in series]
    return tag(
        "div",
        *(
            cell
            for one, value in zip(series, values, strict=True)
            for cell in (
                tag("bdi", one.name),
                bar(value, values, one.color),
                tag("span", "missing", class_="none") if value is None else data(value, at_a_glance(metric, value)),
            )
        ),
        class_="bars",
    )


def _written(metric: Metric, value: Decimal) -> str:
    return minus(at_a_glance(metric, value))


def _legend(account: Account) -> Html:
    items: list[Html] = [
        tag("li", tag("i", class_=f"swatch {group.color}"), tag("bdi", group.name)) for group in account.groups
    ]
    if any(item.is_restated for item in account.periods):
        items.append(tag("li", tag("i", class_="dot"), "restated period"))
    return tag("ul", *items, class_="legend")
