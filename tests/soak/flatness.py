"""
The curves that must not grow, and the definition of a flat curve.

The first quarter of a run is the warm-up. The rest is judged by medians, so that short peaks do not count. The growth
in half a run is estimated twice: from the median of the second quarter to that of the last, and by the Theil-Sen slope
of the second half. A curve grows if both exceed the slack. So a curve that levels off in the second half or oscillates
is flat; one that rises steadily is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

_PARTS: Final = 40  # of the second half, each reduced to one point

Look = dict[str, float]  # the values of the curves in one sample, by name
Points = Sequence[tuple[float, float]]  # seconds since the start, and value; in order


class Curve(NamedTuple):
    """
    Attributes:
        slack: Growth in half a run that does not count.
        share: The same as a fraction of the median of the second quarter; the larger one applies.
        is_judged: Whether the curve must not grow; otherwise it is only shown.
    """

    name: str
    title: str
    slack: float = 0.0
    share: float = 0.0
    is_judged: bool = True


CURVES: Final = (
    Curve("rss_mib", "resident memory, MiB", 4, 0.1),  # the allocator causes variations of some percent
    Curve("descriptors", "open descriptors", 3, 0.1),
    Curve("threads", "threads", 2),
    Curve("database_mib", "state.db, MiB", 1, 0.1),
    Curve("wal_mib", "state.db-wal, MiB", 1, 0.25),
    Curve("shm_kib", "state.db-shm, KiB", 32, 0.25),
    Curve("live_bytes", "live.json, bytes", 256),
    Curve("spool_mib", "spool, MiB", 16, 0.25),
    Curve("log_kib_per_minute", "log, KiB per minute", 2, 0.25),
    Curve("input_files", "files in the input folder", 4, 0.25),
    Curve("pending", "records read and not settled", 5000, 0.25),
    Curve("in_flight", "requests in flight", 4, 0.5),
    Curve("streams", "inputs remembered", 500, 0.1),
    Curve("cpu_s_per_million", "CPU s per million records", is_judged=False),  # depends on other load of the machine
    Curve("records_per_s", "records accepted per second", is_judged=False),
    Curve("lag_mib", "lag, MiB", is_judged=False),
    Curve("dead_letter_mib", "dead letters kept, MiB", is_judged=False),
    Curve("paused", "paused", is_judged=False),
)


class Judgement(NamedTuple):
    """
    Attributes:
        first, last: Medians of the first and the last quarter of the run.
        slope_per_hour: The Theil-Sen slope of the second half.
        found_per_hour: The smallest steady slope that counts as growth.
    """

    curve: Curve
    first: float
    last: float
    slope_per_hour: float
    found_per_hour: float
    grows: bool

    @property
    def verdict(self) -> str:
        return "-" if not self.curve.is_judged else "GROWS" if self.grows else "flat"


def judge(curve: Curve, points: Points, begin: float, end: float) -> Judgement | None:
    """Judge a curve; return None if there are too few points or all are 0."""
    half = (end - begin) / 2
    quarters = [
        [value for at, value in points if begin + number * half / 2 <= at < begin + (number + 1) * half / 2]
        for number in range(4)
    ]
    if not all(quarters[1:]) or not any(value for _, value in points):
        return None
    second, last = median(quarters[1]), median(quarters[3])
    slope = theil_sen(_thinned(points, begin + half, end))
    slack = max(curve.slack, curve.share * abs(second))
    grows = curve.is_judged and last - second > slack and slope * half > slack
    first = median(quarters[0] or quarters[1])
    return Judgement(curve, first, last, slope * 3600, slack / half * 3600, grows)


def judge_all(looks: Sequence[tuple[float, Look]], begin: float, end: float) -> list[Judgement]:
    judgements = (
        judge(curve, [(at, look[curve.name]) for at, look in looks if curve.name in look], begin, end)
        for curve in CURVES
    )
    return [each for each in judgements if each is not None]


def theil_sen(points: Points) -> float:
    """Return the median of the slopes between all pairs of points."""
    slopes = [(y - x) / (then - at) for (at, x), (then, y) in combinations(points, 2) if then > at]
    return median(slopes) if slopes else 0.0


def _thinned(points: Points, begin: float, end: float) -> list[tuple[float, float]]:
    """Reduce the points of each interval to one, the median."""
    parts: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        if begin <= at <= end:
            parts.setdefault(int((at - begin) / (end - begin) * _PARTS), []).append((at, value))
    return [(median(at for at, _ in part), median(value for _, value in part)) for part in parts.values()]


def table(judgements: Sequence[Judgement]) -> str:
    """Return a table with a line per curve."""
    lines = [f"{'':30}{'1st quarter':>13}{'last quarter':>13}{'per hour':>12}{'grows from':>13}  verdict"]
    for each in judgements:
        numbers = f"{each.first:13,.1f}{each.last:13,.1f}{each.slope_per_hour:+12,.1f}"
        found = f"{each.found_per_hour:+13,.1f}" if each.curve.is_judged else f"{'':13}"
        lines.append(f"{each.curve.title:30}{numbers}{found}  {each.verdict}")
    return "\n".join(lines)
