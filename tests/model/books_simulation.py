"""
Random ledgers, and the reports that a platform makes of them: faithful ones, and ones with planted faults.

The platform is told here what it does wrong, so what a verdict ought to be is known without the code that judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from functools import cache
from math import prod
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from shipper.model import wire
from shipper.model.records import LedgerKey
from shipper.report.days import OFFSETS, days_of_offset
from shipper.report.ranges import DateRange
from shipper.report.reconcile.compare import reconcile
from shipper.report.reconcile.owners import Owners
from shipper.report.reconcile.rows import Hole, Pair, Period, Reconciliation
from tests.report_documents import brand, entry, report

ACCOUNT, OTHER = 1001, 2002
FIRST = date(2026, 2, 2)  # no clock changes in the days after it
DAY = timedelta(days=1)
TODAY = date(2026, 6, 1)
PAIRS = tuple(Pair(number, source) for number in (11, 12) for source in (501, 502))
_ENTRY = entry()
_REPORT = report()

Cell = tuple[date, Pair]
_NOTHING: Counter[Cell] = Counter()  # never changed


class Case(NamedTuple):
    """
    A ledger, what the platform made of it, and what was planted.

    Attributes:
        accepted: From two days before the compared days to two days after them.
        near: Records by cell that lie within two hours of the day's beginning, and of its end.
        platform: Hours that the platform's clock is ahead.
        lost, doubled: Records by cell that the platform has too few or too many, without a reason.
        late: Records that it counts a day too late, by the cell where they belong.
        taken_back: By cell, and whether by an adjustment; else by a restatement.
        sent: Refused records by cell that the platform has all the same.
        missing: A source that its report leaves out.
        unnamed: A source that no report has ever named.
        hole: A day whose report cannot be fetched.
        today: The day of the comparison.
    """

    days: list[date]
    accepted: Counter[LedgerKey]
    near: Mapping[Cell, tuple[int, int]]
    platform: int = 0
    lost: Counter[Cell] = _NOTHING
    doubled: Counter[Cell] = _NOTHING
    late: Counter[Cell] = _NOTHING
    taken_back: Mapping[Cell, tuple[int, bool]] = MappingProxyType({})
    sent: Counter[Cell] = _NOTHING
    missing: int | None = None
    unnamed: int | None = None
    hole: date | None = None
    today: date = TODAY

    @property
    def hidden(self) -> Counter[Cell]:
        """Planted losses by cell that a faithful verdict cannot pass over."""
        lost = +self.lost
        if self.missing is not None:
            for cell, count in cells(self.accepted).items():
                if cell[1].source == self.missing:
                    lost[cell] = count
        return Counter({cell: n for cell, n in lost.items() if n and cell[0] in self.days and cell[0] != self.hole})

    def judged(self, **options: object) -> Reconciliation:
        """Let it be reconciled."""
        periods = [each for each in self._periods() if each.days.start != self.hole]
        owners = Owners(named={ACCOUNT: frozenset(pair.source or 0 for pair in PAIRS) - {self.unnamed}})
        dead_letters = {key_of(cell, 12): count for cell, count in self.sent.items()}
        holes = [Hole(DateRange(self.hole, self.hole), "it is missing")] if self.hole else []
        return reconcile(
            ACCOUNT,
            periods,
            self.accepted,
            dead_letters,
            days=days_of_offset(0),
            today=self.today,
            settle_days=2,
            owners=owners,
            holes=holes,
            **options,  # type: ignore[arg-type]
        )

    @property
    def counted(self) -> Counter[Cell]:
        """What the platform counts, before it takes anything back."""
        counted = cells(self.accepted, self.platform) + self.doubled + self.sent
        counted.subtract(self.lost)
        for (day, pair), count in self.late.items():
            counted[day, pair] -= count
            counted[day + DAY, pair] += count
        return counted

    def _periods(self) -> list[Period]:
        made, counted = [], self.counted
        for day in self.days:
            now, before = {}, {}
            for pair in PAIRS:
                if pair.source in {self.missing, self.unnamed} or not counted[day, pair]:
                    continue
                count, (back, is_adjusted) = counted[day, pair], self.taken_back.get((day, pair), (0, True))
                before[pair] = (count, 0)
                now[pair] = (count, -back) if is_adjusted else (count - back, 0)
            earlier = [document(before)] if before != now else []
            made.append(Period(DateRange(day, day), document(now), earlier))
        return made


def document(figures: Mapping[Pair, tuple[int, int]]) -> wire.DailyReport:
    brands = [
        brand(*(_entry(pair, figures[pair]) for pair in figures if pair.brand == number), number=number)
        for number in dict.fromkeys(pair.brand for pair in figures)
    ]
    return replace(_REPORT, brands=brands)


def _entry(pair: Pair, figure: tuple[int, int]) -> wire.MarketingSource:
    registrations = wire.AmountPair(*map(Decimal, figure))
    return replace(_ENTRY, id=pair.source, conversions=wire.Conversions(registrations=registrations))


def key_of(cell: Cell, hour: int) -> LedgerKey:
    day, pair = cell
    return f"{day}T{hour:02}", pair.brand, "", str(pair.source)


def cells(accepted: Mapping[LedgerKey, int], offset: int = 0) -> Counter[Cell]:
    """Count records by the day of a clock, worked out anew."""
    found: Counter[Cell] = Counter()
    for (hour, number, _, media), count in accepted.items():
        found[cell_of(hour, number, media, offset)] += count
    return found


@cache
def cell_of(hour: str, number: int, media: str, offset: int) -> Cell:
    day, of_day = divmod(int(hour[11:]) + offset, 24)
    assert 0 <= of_day < 24
    return date.fromisoformat(hour[:10]) + day * DAY, Pair(number, int(media))


def ledger(rng: Random) -> Case:
    """Make a ledger whose records the platform has all."""
    days = [FIRST + at * DAY for at in range(rng.randint(2, 10))]
    accepted: Counter[LedgerKey] = Counter()
    rate = rng.choice([0.3, 2, 10, 40])  # records a day, brand and source
    for day in (FIRST + at * DAY for at in range(-2, len(days) + 2)):
        for pair in PAIRS:
            for hour, count in Counter(rng.choices(range(24), k=round(rng.expovariate(1 / rate)))).items():
                accepted[key_of((day, pair), hour)] = count
    return Case(days, accepted, near(accepted))


def near(accepted: Mapping[LedgerKey, int]) -> dict[Cell, tuple[int, int]]:
    found: dict[Cell, tuple[int, int]] = {}
    for (hour, number, _, media), count in accepted.items():
        cell = cell_of(hour, number, media, 0)
        first, last = found.get(cell, (0, 0))
        found[cell] = first + count * (int(hour[11:]) < 2), last + count * (int(hour[11:]) >= 22)
    return found


Plant = Callable[[Random, Case], Case]


def chosen(rng: Random, case: Case, at_most: int) -> list[Cell]:
    """Choose some cells that have records, and nothing planted yet."""
    taken = {*case.lost, *case.doubled, *case.taken_back, *case.sent, *case.late}
    taken |= {(day + DAY, pair) for day, pair in case.late}
    by_platform = cells(case.accepted, case.platform)
    free = [cell for cell in sorted(+by_platform) if cell[0] in case.days and cell not in taken]
    return rng.sample(free, min(len(free), rng.randint(1, at_most)))


def some(rng: Random, case: Case, at_most: int = 4) -> Counter[Cell]:
    by_platform = cells(case.accepted, case.platform)
    return Counter({cell: rng.randint(1, by_platform[cell]) for cell in chosen(rng, case, at_most)})


def losing(rng: Random, case: Case) -> Case:
    return case._replace(lost=case.lost + some(rng, case))


def doubling(rng: Random, case: Case) -> Case:
    return case._replace(doubled=case.doubled + some(rng, case))


def mixing_up(rng: Random, case: Case) -> Case:
    """Lose a record or two, and have as many too many on the day before or after: what looks like a boundary."""
    lost = some(rng, case, 1)
    for (day, pair), count in lost.items():
        other = day + rng.choice([-1, 1]) * DAY
        if other in case.days:
            case = case._replace(doubled=case.doubled + Counter({(other, pair): count}))
    return case._replace(lost=case.lost + lost)


def taking_back(rng: Random, case: Case) -> Case:
    back = {cell: (count, rng.random() < 0.5) for cell, count in some(rng, case).items()}
    return case._replace(taken_back=back)


def refusing(rng: Random, case: Case) -> Case:
    return case._replace(sent=some(rng, case))


def counting_late(rng: Random, case: Case) -> Case:
    """Let records of the last hours of a day count the day after; of which one day lies apart from other such days."""
    free = [cell for cell in chosen(rng, case, 3) if case.near[cell][1] and cell[0] + DAY in case.days]
    late: Counter[Cell] = Counter()
    for day, pair in free:
        if not any(other == pair and abs((day - when).days) < 3 for when, other in late):
            late[day, pair] = rng.randint(1, case.near[day, pair][1])
    return case._replace(late=late)


def leaving_out(rng: Random, case: Case) -> Case:
    return case._replace(missing=rng.choice(PAIRS).source)


def not_naming(rng: Random, case: Case) -> Case:
    return case._replace(unnamed=rng.choice(PAIRS).source)


def holing(rng: Random, case: Case) -> Case:
    return case._replace(hole=rng.choice(case.days))


def aging(rng: Random, case: Case) -> Case:
    """Let the comparison be made while the last days are young."""
    return case._replace(today=case.days[-1] + rng.randint(0, 1) * DAY)


def by_another_clock(rng: Random, case: Case) -> Case:
    return case._replace(platform=rng.choice([hours for hours in OFFSETS if hours]))


def is_clock_told(case: Case) -> bool:
    """Return whether the rules let the platform's clock be named, worked out anew."""
    moved: Counter[Cell] = Counter()
    offset = case.platform
    for (hour, number, _, media), count in case.accepted.items():
        day, of_day = date.fromisoformat(hour[:10]), int(hour[11:])
        later, earlier = of_day + offset >= 24, of_day + offset < 0
        boundary = day + DAY if later else day
        if (later or earlier) and boundary in case.days and boundary - DAY in case.days:
            moved[boundary, Pair(number, int(media))] += count
    chance = len(OFFSETS) * prod(1 / (count + 1) for count in moved.values())
    return moved.total() >= 20 and chance < 1e-3


def is_allowed(case: Case) -> bool:
    """Return whether the rule of neighbouring days lets every difference pass, worked out anew."""
    found = differences(case)
    return all(_is_excused(case, found, cell) for cell, count in found.items() if count)


def is_cancelled(case: Case) -> bool:
    """Return whether every day that differs is one of two neighbours that differ by the same, up and down."""
    found = differences(case)
    return all(_other(found, cell) for cell, count in found.items() if count)


def differences(case: Case) -> Counter[Cell]:
    """Work out what a report differs by, beyond what was refused and may have arrived."""
    expected, counted = cells(case.accepted), case.counted
    found: Counter[Cell] = Counter()
    for cell in expected.keys() | counted.keys():
        if cell[0] in case.days:
            difference = counted[cell] - expected[cell]
            found[cell] = difference - min(max(difference, 0), case.sent[cell])
    return found


def _other(found: Counter[Cell], cell: Cell) -> date | None:
    """Return the neighbour of a day that differs, if it differs by as much the other way, and no further day does."""
    day, pair = cell
    others = [day + step for step in (-DAY, DAY) if found[day + step, pair]]
    if len(others) != 1 or found[others[0], pair] != -found[cell]:
        return None
    beyond = others[0] + (others[0] - day)
    return None if found[beyond, pair] else others[0]


def _is_excused(case: Case, found: Counter[Cell], cell: Cell) -> bool:
    day, pair = cell
    other = _other(found, cell)
    if other is None:
        return False
    first, second = sorted((day, other))
    at_end, at_start = case.near.get((first, pair), (0, 0))[1], case.near.get((second, pair), (0, 0))[0]
    return -at_start <= found[second, pair] <= at_end
