"""
The charts of the page as inline SVG: registrations and revenue by brand.

Widths are percentages and heights pixels, so a chart fills the available width without scaling its text.
"""

from __future__ import annotations

import math
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

_PLOT_PX: Final = 190
_TOP_PX: Final = 20  # for the sum above the highest column
_BOTTOM_PX: Final = 24  # for the labels
_AXIS_PX: Final = 46
_BAR_PX: Final = 10
_TICKS: Final = 4
_GAP_PX: Final = 1.0
_MIN_PX: Final = 1.5  # so that values other than zero are visible
_MIN_PERCENT: Final = 0.5
_LABELS_MAX: Final = 8  # also of sums; more do not fit on a narrow screen
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)  # the last one in case the logarithm is rounded

_EntriesOf = Callable[[ReportVersion, BrandGroup | None], list[wire.MarketingSource]]


class Segment(NamedTuple):
    """A part of a column; the value is None if a figure is missing or not additive."""

    name: str
    color: str
    value: Decimal | None


class Column(NamedTuple):
    """A column of the time axis, with a dot below it if marked; the total is None if it is not additive."""

    label: str
    title: str
    segments: Sequence[Segment]
    total: Decimal | None = None
    is_marked: bool = False


def registrations(account: Account) -> Html:
    """Render registrations by brand, over time if there are several periods."""
    return section(
        "Registrations",
        secondary("By brand and period; result plus adjustment." if account.is_series else "By brand."),
        _legend(account),
        _chart(account, REGISTRATIONS, account.entries, has_totals=True),
    )


def revenue(account: Account) -> list[Html]:
    """Render the four kinds of revenue by brand, in a section for each currency."""
    names = dict.fromkeys(entry.reporting_currency for item in account.periods for entry in account.entries(item))
    return [_revenue(account, name) for name in names]


def _revenue(account: Account, currency: str | None) -> Html:
    def entries(item: ReportVersion, group: BrandGroup | None) -> list[wire.MarketingSource]:
        return [entry for entry in account.entries(item, group) if entry.reporting_currency == currency]

    charts = [
        tag("div", tag("h3", metric.title), _chart(account, metric, entries, has_totals=False), class_="panel")
        for metric in _REVENUE
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


def _chart(account: Account, metric: Metric, entries_of: _EntriesOf, *, has_totals: bool) -> Html:
    """Render columns over time, or bars by brand for a single period."""

    def segment(item: ReportVersion, group: BrandGroup) -> Segment:
        entries = entries_of(item, group)
        # The figures of a brand that is not in the document are zero, not missing.
        return Segment(group.name, group.color, sum_of(metric, entries).total if entries else Decimal(0))

    columns = [
        Column(
            short_period(item.report.reporting_period),
            period(item.report.reporting_period),
            [segment(item, group) for group in account.groups],
            sum_of(metric, entries_of(item, None)).total if has_totals else None,
            item.is_restated,
        )
        for item in account.periods
    ]
    values = [segment.value for column in columns for segment in column.segments]
    if not any(values):
        return secondary("Figures are missing or cannot be added." if None in values else "All figures are zero.")
    if not account.is_series:
        return _bars(columns[0].segments, metric)
    caption = f"{metric.title} by brand, {columns[0].title} to {columns[-1].title}; the tables below have the figures."
    return stacked_columns(columns, lambda value: with_minus_signs(short_figure(metric, value)), caption=caption)


def stacked_columns(columns: Sequence[Column], format_value: Callable[[Decimal], str], *, caption: str) -> Html:
    """Render stacked columns, with negative segments below zero."""
    scale = _Scale.of(columns)
    height, foot = _TOP_PX + _PLOT_PX + _BOTTOM_PX, _TOP_PX + _PLOT_PX + 16
    axis = [
        tag("text", with_minus_signs(_compact(tick)), x=_AXIS_PX - 8, y=scale.y(tick) + 3.5, text_anchor="end")
        for tick in scale.ticks
    ]
    elements = [
        tag("line", x1=0, x2="100%", y1=scale.y(tick), y2=scale.y(tick), class_="grid" if tick else "zero")
        for tick in scale.ticks
    ]
    band = 100 / len(columns)
    width = band * min(0.64, 0.1 + 0.055 * len(columns))  # a few columns are not too wide
    labelled = math.ceil(len(columns) / _LABELS_MAX)
    for index, column in enumerate(columns):
        middle = band * (index + 0.5)
        rectangles, top = _stack(column, scale, format_value, x=f"{middle - width / 2:.3f}%", width=f"{width:.3f}%")
        elements += rectangles
        x = f"{middle:.3f}%"
        if any(segment.value is None for segment in column.segments):
            note = tag("title", f"{column.title}: a figure is missing or cannot be added")
            elements.append(tag("text", note, "?", x=x, y=top - 6, class_="gap"))
        if column.total is not None and len(columns) <= _LABELS_MAX:
            elements.append(tag("text", format_value(column.total), x=x, y=top - 6, class_="sum"))
        if index % labelled == 0:
            elements.append(tag("text", column.label, x=x, y=foot, class_="label"))
        if column.is_marked:
            mark = tag("title", f"{column.title}: restated")
            elements.append(tag("circle", mark, cx=x, cy=foot + 6, r=2.5, class_="mark"))
    return tag(
        "div",
        tag("svg", *axis, width=_AXIS_PX, height=height, class_="axis", aria_hidden="true"),
        tag("svg", *elements, width="100%", height=height, role="img", aria_label=caption),
        class_="plot",
    )


def _stack(
    column: Column, scale: _Scale, format_value: Callable[[Decimal], str], *, x: str, width: str
) -> tuple[list[Html], float]:
    """Return the rectangles of a column, and the y coordinate of its top."""
    up = down = 0.0
    rectangles = []
    for segment in column.segments:
        if not segment.value:
            continue
        start = up if segment.value > 0 else down
        end = start + float(segment.value)
        up, down = max(up, end), min(down, end)
        title = tag("title", f"{segment.name}, {column.title}: {format_value(segment.value)}")
        top, height = scale.y(max(start, end)), abs(scale.y(end) - scale.y(start))
        height = max(height - _GAP_PX, _MIN_PX)
        rectangles.append(tag("rect", title, x=x, y=top, width=width, height=height, class_=segment.color))
    return rectangles, scale.y(up)


def _bars(segments: Sequence[Segment], metric: Metric) -> Html:
    """Render horizontal bars on one scale; negative ones extend to the left."""
    known = [float(segment.value) for segment in segments if segment.value is not None]
    low = min([0.0, *known])
    span = max([0.0, *known]) - low
    cells: list[Html] = []
    for name, color, value in segments:
        if value == 0:
            continue
        number = float(value or 0)
        left = (min(number, 0.0) - low) / span * 100
        width = max(abs(number) / span * 100, _MIN_PERCENT) if number else 0.0
        bar = tag(
            "svg",
            tag("rect", x="0", y="0", width="100%", height=_BAR_PX, rx=2.0, class_="track"),
            tag("rect", x=f"{left:.3f}%", y="0", width=f"{width:.3f}%", height=_BAR_PX, rx=2.0, class_=color),
            width="100%",
            height=_BAR_PX,
            aria_hidden="true",
        )
        figure = tag("span", "missing", class_="none") if value is None else data(value, short_figure(metric, value))
        cells += [tag("bdi", name), bar, figure]
    return tag("div", *cells, class_="bars")


class _Scale(NamedTuple):
    """Ticks from `first * step` to `last * step`, including zero."""

    first: int
    last: int
    step: float

    @classmethod
    def of(cls, columns: Sequence[Column]) -> _Scale:
        """Choose round steps that cover zero and all columns."""
        numbers = [[float(part.value) for part in column.segments if part.value is not None] for column in columns]
        high = max(sum(number for number in column if number > 0) for column in numbers)
        low = min(sum(number for number in column if number < 0) for column in numbers)
        rough = ((high - low) or 1.0) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in _STEPS if factor * power >= rough)
        if all(number.is_integer() for column in numbers for number in column):
            step = math.ceil(step)
        first, last = math.floor(low / step), math.ceil(high / step)
        return cls(first, last if last > first else first + 1, step)

    def y(self, value: float) -> float:
        return _TOP_PX + (self.last - value / self.step) / (self.last - self.first) * _PLOT_PX

    @property
    def ticks(self) -> list[float]:
        return [number * self.step for number in range(self.first, self.last + 1)]


def _compact(number: float) -> str:
    """Format a tick of an axis: 12,000 becomes `12k`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):,.6g}{unit}"
    return f"{number:,.6g}"
