"""The curves of a soak as one SVG that needs nothing else: a column for each shipper, a row for each curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from tests.soak.flatness import CURVES, Judgement, Points
from tests.soak.looking import Look

_WIDTH, _HEIGHT, _GAP, _TITLE = 520, 90, 24, 16
_COLOURS: Final = {"flat": "#2563a8", "-": "#888888", "GROWS": "#c22222"}
_STYLE: Final = "text{font:11px sans-serif;fill:#333}.frame{fill:#fafafa;stroke:#dddddd}"


def draw(looks: Mapping[str, Sequence[tuple[float, Look]]], judgements: Mapping[str, Sequence[Judgement]]) -> str:
    """
    Draw all curves.

    Args:
        looks: By part, with seconds since the start.
        judgements: By part; a curve without one is not drawn.
    """
    found = {(part, each.curve.name): each for part, all_ in judgements.items() for each in all_}
    curves = [curve for curve in CURVES if any((part, curve.name) in found for part in looks)]
    panels = []
    for row, curve in enumerate(curves):
        for column, (part, seen) in enumerate(looks.items()):
            judgement = found.get((part, curve.name))
            if judgement is not None:
                points = [(at, look[curve.name]) for at, look in seen if curve.name in look]
                x, y = _GAP + column * (_WIDTH + _GAP), _GAP + row * (_HEIGHT + _TITLE + _GAP)
                panels.append(f'<g transform="translate({x},{y})">{_panel(part, judgement, points, seen[-1][0])}</g>')
    width = _GAP + len(looks) * (_WIDTH + _GAP)
    height = _GAP + len(curves) * (_HEIGHT + _TITLE + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'
    )


def _panel(part: str, judgement: Judgement, points: Points, end: float) -> str:
    """A frame from nought to the highest value, the warm-up shaded."""
    top = max(value for _, value in points) or 1.0
    bottom = min(0.0, *(value for _, value in points))
    scale_x, scale_y = _WIDTH / end, _HEIGHT / (top - bottom)
    line = " ".join(f"{at * scale_x:.1f},{_HEIGHT - (value - bottom) * scale_y:.1f}" for at, value in points)
    title = f"{part}: {judgement.curve.title}: {judgement.slope_per_hour:+,.1f} an hour, {judgement.verdict}"
    return (
        f'<text y="-4">{escape(title)}</text><text x="{_WIDTH}" y="-4" text-anchor="end">0 to {top:,.1f}</text>'
        f'<rect class="frame" width="{_WIDTH}" height="{_HEIGHT}"/>'
        f'<rect width="{_WIDTH / 4:.0f}" height="{_HEIGHT}" fill="#eeeeee"/>'
        f'<polyline points="{line}" fill="none" stroke="{_COLOURS[judgement.verdict]}"/>'
        f'<text x="0" y="{_HEIGHT + 12}">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 12}" text-anchor="end">{end / 60:.1f} minutes</text>'
    )
