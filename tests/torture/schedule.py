"""Schedules of faults in random order; every fault is used before any is repeated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from random import Random
from typing import Any, Final

from tests.campaign import Shuffled

_EXTRA_S: Final = 90.0  # beyond the duration, for faults without an effect so far

Fault = Callable[..., bool]


class Schedule:
    """
    A schedule of shuffled faults.

    Args:
        until: A `time.monotonic` time; afterwards only faults without an effect so far are injected, and not for long.

    Attributes:
        effects: How often each fault had an effect.
        history: The faults injected, with their times.
    """

    def __init__(self, table: Mapping[str, Fault], rng: Random, *, until: float, without: Container[str] = ()) -> None:
        self._table = {name: fault for name, fault in table.items() if name not in without}
        self._rng = rng
        self._until = until
        self._names = Shuffled(self._table, rng)
        self.effects: Counter[str] = Counter(dict.fromkeys(self._table, 0))
        self.history: list[str] = []

    @property
    def missing(self) -> list[str]:
        return [name for name, count in self.effects.items() if not count]

    @property
    def is_done(self) -> bool:
        late = time.monotonic() - self._until
        return late >= 0 and (not self.missing or late >= _EXTRA_S)

    def run_next(self, *target: Any) -> None:
        """Inject the next fault."""
        if time.monotonic() > self._until:
            self._names.keep(self.missing)
        name = self._names.next()
        has_effect = self._table[name](*target, Random(f"{self._rng.random()} {name}"))
        self.effects[name] += has_effect
        self.history.append(f"{time.monotonic():.2f} {name}{'' if has_effect else ' (no effect)'}")
