"""The charts of the page as inline SVG: bars of registrations and revenue by brand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from shipper.model import wire
from shipper.report.formatting import clean, period, short_figure, short_period
from shipper.report.metrics import CPA, FEES, NET_REVENUE, REGISTRATIONS, REV_SHARE, Metric, sum_of
from shipper.report.page.account import Account, BrandGroup
from shipper.report.page.markup import Html, data, secondary, section, tag, with_minus_signs
from shipper.report.rows import ReportVersion

_REVENUE: Final = (NET_REVENUE, REV_SHARE, CPA, FEES)
_MIN_PERCENT: Final = 0.5  # so that values other than zero are visible

_EntriesOf = Callable[[ReportVersion, BrandGroup | None], list[wire.MarketingSource]]


class Segment(NamedTuple):
    """A part of a bar; the value is None if a figure is missing or not additive."""

    name: str
    color: str
    value: Decimal | None


class Bar(NamedTuple):
    """The figures of a period by brand, or of one brand; the total is None if it is not additive."""

    label: str
    period: str
    segments: Sequence[Segment]
    total: Decimal | None
    is_marked: bool = False


def registrations(account: Account) -> Html:
    """Render registrations by brand and, if there are several, by period."""
    return section(
        "Registrations",
        secondary("By brand and period; result plus adjustment." if account.is_series else "By brand."),
        _legend(account),
        _chart(account, REGISTRATIONS, account.entries),
    )


def revenue(account: Account) -> list[Html]:
    """Render the four kinds of revenue by brand, in a section for each currency."""
    names = dict.fromkeys(entry.reporting_currency for item in account.periods for entry in account.entries(item))
    return [_revenue(account, name) for name in names]


def _revenue(account: Account, currency: str | None) -> Html:
    def entries(item: ReportVersion, group: BrandGroup | None) -> list[wire.MarketingSource]:
        return [entry for entry in account.entries(item, group) if entry.reporting_currency == currency]

    charts = [
        tag("div", tag("h3", metric.title), _chart(account, metric, entries), class_="panel") for metric in _REVENUE
    ]
    return section(
        f"Revenue in {clean(currency)}" if currency else "Revenue, currency not given",
        secondary("Each figure has its own scale; result plus adjustment."),
        _legend(account),
        tag("div", *charts, class_="halves"),
    )


def _legend(account: Account) -> Html | None:
    if not account.is_series:
        return None
    items = [tag("li", tag("i", class_=f"swatch {group.color}"), tag("bdi", group.name)) for group in account.groups]
    if any(item.is_restated for item in account.periods):
        items.append(tag("li", tag("i", class_="dot"), "restated period"))
    return tag("ul", *items, class_="legend")


def _chart(account: Account, metric: Metric, entries_of: _EntriesOf) -> Html:
    """Render a bar for every period or, if there is only one, for every brand."""

    def total(item: ReportVersion, group: BrandGroup | None = None) -> Decimal | None:
        entries = entries_of(item, group)
        # The figures of a brand that is not in the document are zero, not missing.
        return sum_of(metric, entries).total if entries else Decimal(0)

    bars = [
        Bar(
            short_period(item.report.reporting_period),
            period(item.report.reporting_period),
            [Segment(group.name, group.color, total(item, group)) for group in account.groups],
            total(item),
            item.is_restated,
        )
        for item in account.periods
    ]
    values = [segment.value for bar in bars for segment in bar.segments]
    if not any(values):
        return secondary("Figures are missing or cannot be added." if None in values else "All figures are zero.")
    if not account.is_series:
        title, segments = bars[0].period, bars[0].segments
        bars = [Bar(segment.name, title, [segment], segment.value) for segment in segments if segment.value != 0]
    return bar_chart(bars, metric)


def bar_chart(bars: Sequence[Bar], metric: Metric) -> Html:
    """Render horizontal bars on one scale, with negative segments to the left of zero."""
    numbers = [[float(segment.value or 0) for segment in bar.segments] for bar in bars]
    low = min(sum(number for number in row if number < 0) for row in numbers)
    high = max(sum(number for number in row if number > 0) for row in numbers)
    cells: list[Html] = []
    for bar in bars:
        mark = tag("i", class_="mark", title="restated") if bar.is_marked else None
        rectangles = _rectangles(bar, metric, low, (high - low) or 1.0)
        missing = tag("span", "missing", title=f"{bar.period}: a figure is missing or cannot be added", class_="none")
        cells += [
            tag("span", tag("bdi", bar.label), mark),
            tag("svg", *rectangles, width="100%", height=10, aria_hidden="true"),
            missing if bar.total is None else data(bar.total, short_figure(metric, bar.total)),
        ]
    return tag("div", *cells, class_="bars")


def _rectangles(bar: Bar, metric: Metric, low: float, span: float) -> list[Html]:
    up = down = 0.0
    rectangles = []
    for name, color, value in bar.segments:
        if not value:
            continue
        start = up if value > 0 else down
        end = start + float(value)
        up, down = max(up, end), min(down, end)
        left, width = (min(start, end) - low) / span * 100, abs(end - start) / span * 100
        title = tag("title", f"{name}, {bar.period}: {with_minus_signs(short_figure(metric, value))}")
        x, visible = f"{left:.3f}%", f"{max(width, _MIN_PERCENT):.3f}%"
        rectangles.append(tag("rect", title, x=x, y=0, width=visible, height=10, class_=color))
    return rectangles
