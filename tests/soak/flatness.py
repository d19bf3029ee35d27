"""
Which curves must not grow, and the rule by which one has not.

The first quarter of a run is its warm-up. What is left is looked at by its medians, so that what lasts shortly does not
count. How much a curve grows in half a run is estimated twice: from the median of the second quarter to that of the
last, and by the Theil-Sen slope of the second half. It grows if both are more than the slack. So one that comes to rest
in the second half is flat, one that swings is, and one that rises steadily is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

_PARTS: Final = 40  # of the second half

Points = Sequence[tuple[float, float]]  # seconds since the start, value; in order


class Curve(NamedTuple):
    """
    Attributes:
        slack: So much growth in half a run is none.
        share: The same, as a part of the median of the second quarter; the larger of both holds.
        is_judged: Whether it must not grow. What others wrote, or the speed of the machine, is only shown.
    """

    name: str
    title: str
    slack: float = 0.0
    share: float = 0.0
    is_judged: bool = True


CURVES: Final = (
    Curve("rss_mib", "resident memory, MiB", 4, 0.1),  # the allocator alone lets it swing by some percent
    Curve("descriptors", "open descriptors", 3, 0.1),
    Curve("threads", "threads", 2),
    Curve("database_mib", "state.db, MiB", 1, 0.1),
    Curve("wal_mib", "state.db-wal, MiB", 1, 0.25),
    Curve("shm_kib", "state.db-shm, KiB", 32, 0.25),
    Curve("live_bytes", "live.json, bytes", 256),
    Curve("spool_mib", "spool, MiB", 16, 0.25),
    Curve("log_kib_per_minute", "log, KiB a minute", 2, 0.25),
    Curve("input_files", "files in the input folder", 4, 0.25),
    Curve("pending", "records read and not settled", 5000, 0.25),
    Curve("in_flight", "requests in flight", 4, 0.5),
    Curve("streams", "inputs remembered", 500, 0.1),
    Curve("cpu_s_per_million", "CPU s a million records", is_judged=False),  # with what else runs on the machine
    Curve("records_per_s", "records accepted a second", is_judged=False),
    Curve("lag_mib", "lag, MiB", is_judged=False),
    Curve("dead_letter_mib", "dead letters kept, MiB", is_judged=False),
    Curve("paused", "paused", is_judged=False),
)


class Judgement(NamedTuple):
    """
    What is found of a curve.

    Attributes:
        first, last: Medians of the first and of the last quarter of the run.
        slope_per_hour: Theil-Sen, of the second half.
        found_per_hour: From which steady slope on it would have been found to grow.
    """

    curve: Curve
    first: float
    last: float
    slope_per_hour: float
    found_per_hour: float
    grows: bool

    @property
    def verdict(self) -> str:
        """One word."""
        return "-" if not self.curve.is_judged else "GROWS" if self.grows else "flat"


def judge(curve: Curve, points: Points, begin: float, end: float) -> Judgement | None:
    """
    Tell whether a curve is flat.

    Args:
        begin, end: Of the run, in the time of the points.
    Returns:
        None if there are not enough points, or if it was nought all the time.
    """
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


def judge_all(looks: Sequence[tuple[float, Mapping[str, float]]], begin: float, end: float) -> list[Judgement]:
    """Judge all curves of a process."""
    found = []
    for curve in CURVES:
        points = [(at, look[curve.name]) for at, look in looks if curve.name in look]
        judgement = judge(curve, points, begin, end)
        if judgement is not None:
            found.append(judgement)
    return found


def theil_sen(points: Points) -> float:
    """The median of the slopes between all pairs of points."""
    slopes = [(y - x) / (then - at) for (at, x), (then, y) in combinations(points, 2) if then > at]
    return median(slopes) if slopes else 0.0


def _thinned(points: Points, begin: float, end: float) -> list[tuple[float, float]]:
    """Make one point, the median, of those in each part of the time."""
    parts: dict[int, list[tuple[float, float]]] = {}
    for at, value in points:
        if begin <= at <= end:
            parts.setdefault(int((at - begin) / (end - begin) * _PARTS), []).append((at, value))
    return [(median(at for at, _ in part), median(value for _, value in part)) for part in parts.values()]


def table(judgements: Sequence[Judgement]) -> str:
    """One line a curve."""
    lines = [f"{'':30}{'1st quarter':>13}{'last quarter':>13}{'an hour':>12}{'found from':>13}  verdict"]
    for each in judgements:
        numbers = f"{each.first:13,.1f}{each.last:13,.1f}{each.slope_per_hour:+12,.1f}"
        found = f"{each.found_per_hour:+13,.1f}" if each.curve.is_judged else f"{'':13}"
        lines.append(f"{each.curve.title:30}{numbers}{found}  {each.verdict}")
    return "\n".join(lines)
