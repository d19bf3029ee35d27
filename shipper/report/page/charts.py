"""
Charts as inline SVG.

Widths are percentages and heights pixels, so a chart fills whatever width there is, and its text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from shipper.report.page.markup import Html, minus, tag

_PLOT_PX: Final = 190
_TOP_PX: Final = 20  # room for the sum above the highest column
_BOTTOM_PX: Final = 24  # room for the labels
_AXIS_PX: Final = 46
_TICKS: Final = 4
_GAP_PX: Final = 1.0
_LEAST_PX: Final = 1.5  # what is not zero can be seen
_LEAST_PERCENT: Final = 0.5
_LABELS_NARROW: Final = 6
_SUMS_MAX: Final = 14
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0, 20.0)  # the last one in case a logarithm was rounded

Written = Callable[[Decimal], str]


class Series(NamedTuple):
    """
    One colour of a chart.

    Attributes:
        color: The class of the colour, such as `c0`.
        values: One per column; None is missing.
    """

    name: str
    color: str
    values: list[Decimal | None]


class Column(NamedTuple):
    """
    One place on the time axis.

    Attributes:
        label: A short name of the period.
        title: Its full name.
        total: What stands above the column; None if its parts may not be added.
        is_marked: Whether it has a mark at its foot.
    """

    label: str
    title: str
    total: Decimal | None
    is_marked: bool


class _Scale(NamedTuple):
    """Ticks from `first` to `last` times `step`; zero is one of them."""

    first: int
    last: int
    step: float

    def y(self, value: float) -> float:
        return _TOP_PX + (self.last - value / self.step) / (self.last - self.first) * _PLOT_PX

    @property
    def ticks(self) -> list[float]:
        return [number * self.step for number in range(self.first, self.last + 1)]


def stacked_columns(
    series: Sequence[Series], columns: Sequence[Column], written: Written, *, caption: str, labels_max: int
) -> Html:
    """
    Draw one column per period, in which the series are stacked: upwards from zero, and what is negative downwards.

    Args:
        caption: What the chart shows, for those who cannot see it.
        labels_max: How many labels the time axis has room for on a wide screen.
    """
    stacks = [[(one, one.values[index]) for one in series] for index in range(len(columns))]
    scale = _scale_of(stacks)
    height = _TOP_PX + _PLOT_PX + _BOTTOM_PX
    axis = [
        tag("text", minus(_compact(tick)), x=_AXIS_PX - 8, y=scale.y(tick) + 3.5, text_anchor="end")
        for tick in scale.ticks
    ]
    grid = [
        tag("line", x1=0, x2="100%", y1=scale.y(tick), y2=scale.y(tick), class_="zero" if not tick else "grid")
        for tick in scale.ticks
    ]
    drawn = [
        part
        for index, (column, stack) in enumerate(zip(columns, stacks, strict=True))
        for part in _column(column, stack, scale, written, index, len(columns), labels_max)
    ]
    return tag(
        "div",
        tag("svg", *axis, width=_AXIS_PX, height=height, class_="axis", aria_hidden="true"),
        tag("svg", *grid, *drawn, width="100%", height=height, role="img", aria_label=caption),
        class_="plot",
    )


def _column(
    column: Column,
    stack: list[tuple[Series, Decimal | None]],
    scale: _Scale,
    written: Written,
    index: int,
    count: int,
    labels_max: int,
) -> list[Html]:
    band = 100 / count
    middle = f"{band * (index + 0.5):.3f}%"
    share = min(0.64, 0.1 + 0.055 * count)  # few columns are no slabs
    left, width = f"{band * (index + 0.5 - share / 2):.3f}%", f"{band * share:.3f}%"
    up = down = 0.0
    parts = []
    for one, value in stack:
        if not value:
            continue
        end = float(value) + (up if value > 0 else down)
        start, up, down = (up, end, down) if value > 0 else (down, up, end)
        top = scale.y(max(start, end))
        height = abs(scale.y(end) - scale.y(start))
        parts.append(
            tag(
                "rect",
                tag("title", f"{one.name}, {column.title}: {written(value)}"),
                x=left,
                y=top,
                width=width,
                height=max(height - _GAP_PX, _LEAST_PX),
                class_=one.color,
            )
        )
    if any(value is None for _, value in stack):
        note = tag("title", f"{column.title}: a figure is missing, or may not be added")
        parts.append(tag("text", note, "?", x=middle, y=scale.y(up) - 6, class_="gap"))
    if column.total is not None and count <= _SUMS_MAX:
        sum_class = "sum wide" if count > _LABELS_NARROW else "sum"
        parts.append(tag("text", written(column.total), x=middle, y=scale.y(up) - 6, class_=sum_class))
    foot = _TOP_PX + _PLOT_PX + 16
    every_wide = math.ceil(count / labels_max)
    every_narrow = every_wide * math.ceil(count / _LABELS_NARROW / every_wide)
    if index % every_wide == 0:
        parts.append(
            tag("text", column.label, x=middle, y=foot, class_="label wide" if index % every_narrow else "label")
        )
    if column.is_marked:
        mark = tag("title", f"{column.title}: restated")
        parts.append(tag("circle", mark, cx=middle, cy=foot + 6, r=2.5, class_="mark"))
    return parts


def bar(value: Decimal | None, values: Sequence[Decimal | None], color: str) -> Html:
    """Draw one horizontal bar on a scale that all `values` share; what is negative goes to the left of the others."""
    known = [float(one) for one in values if one is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    span = (high - low) or 1.0
    number = float(value or 0)
    left = (min(number, 0.0) - low) / span * 100
    width = max(abs(number) / span * 100, _LEAST_PERCENT) if number else 0.0
    return tag(
        "svg",
        tag("rect", x="0", y="0", width="100%", height=10, rx=2.0, class_="track"),
        tag("rect", x=f"{left:.3f}%", y="0", width=f"{width:.3f}%", height=10, rx=2.0, class_=color),
        width="100%",
        height=10,
        aria_hidden="true",
    )


def _scale_of(stacks: list[list[tuple[Series, Decimal | None]]]) -> _Scale:
    """Choose round steps that hold zero and all stacks."""
    numbers = [[float(value) for _, value in stack if value is not None] for stack in stacks]
    high = max((sum(number for number in stack if number > 0) for stack in numbers), default=0.0)
    low = min((sum(number for number in stack if number < 0) for stack in numbers), default=0.0)
    rough = ((high - low) or 1.0) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough)
    if all(number.is_integer() for stack in numbers for number in stack):
        step = math.ceil(step)
    first, last = math.floor(low / step), math.ceil(high / step)
    return _Scale(first, last if last > first else first + 1, step)


def _compact(number: float) -> str:
    """Write a tick of an axis: 12,000 is `12k`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if unit == 'k' else limit):,.6g}{unit}"
    return f"{number:,.6g}"
