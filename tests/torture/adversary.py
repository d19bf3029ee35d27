"""Deals the faults: each deck to its end before any fault comes again, each in a thread of its own."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

from tests.torture import faults
from tests.torture.application import RunLane
from tests.torture.exports import BackfillLane
from tests.torture.lanes import Lane
from tests.torture.live import LiveLane
from tests.torture.service import Service

_FULL_PAUSES_S: Final = 60.0  # of a run; in a shorter one there is less time between two faults
_EXTRA_S: Final = 90.0  # beyond the duration, for what has not come yet


class Deck:
    """
    Shuffled faults.

    Attributes:
        bitten: How often each one did something.
    """

    def __init__(self, table: Mapping[str, Callable[..., bool]], rng: Random, *, without: Sequence[str] = ()) -> None:
        self._table = {name: fault for name, fault in table.items() if name not in without}
        self._rng = rng
        self._left: list[str] = []
        self.bitten: Counter[str] = Counter(dict.fromkeys(self._table, 0))
        self.history: list[str] = []

    @property
    def missing(self) -> list[str]:
        return [name for name, count in self.bitten.items() if not count]

    def deal(self, *target: Any, only_missing: bool = False) -> None:
        """Deal the next fault."""
        if only_missing:
            self._left = [name for name in self._left if name in self.missing] or self.missing
        if not self._left:
            self._left = self._rng.sample(list(self._table), len(self._table))
        name = self._left.pop()
        bit = self._table[name](*target, Random(f"{self._rng.random()} {name}"))
        self.bitten[name] += bit
        self.history.append(f"{time.monotonic():.2f} {name}{'' if bit else ' (did not bite)'}")


class Adversary:
    """
    Feeds the lanes and deals the faults, until it is told that it is enough.

    Args:
        seconds: For which faults are dealt; longer, if some have not bitten by then.
    """

    def __init__(self, seed: int, service: Service, lanes: Sequence[Lane], *, seconds: float) -> None:
        self._service = service
        self._lanes = lanes
        self._until = time.monotonic() + seconds
        self._pace = min(1.0, seconds / _FULL_PAUSES_S)
        self._is_closing = threading.Event()
        self._failed = threading.Event()
        self._seed = seed
        self.errors: list[str] = []
        self.service_deck = Deck(faults.SERVICE, Random(f"{seed} service"))
        self.file_decks = {
            lane.name: Deck(
                faults.LIVE if isinstance(lane, LiveLane) else faults.FILE, Random(f"{seed} files {lane.name}")
            )
            for lane in lanes
            if isinstance(lane, RunLane)
        }
        self.lane_decks = {
            lane.name: Deck(_faults_of(lane), Random(f"{seed} {lane.name}"), without=_left_out(lane)) for lane in lanes
        }
        self._dealing = set(self.decks)
        self._producing = [threading.Thread(target=self._guard, args=(self._feed, lane)) for lane in lanes]
        self._attacking = [
            threading.Thread(target=self._guard, args=(self._attack_service,)),
            *(threading.Thread(target=self._guard, args=(self._attack, lane)) for lane in lanes),
        ]

    @property
    def decks(self) -> dict[str, Deck]:
        of_files = {_files_of(name): deck for name, deck in self.file_decks.items()}
        return {"service": self.service_deck, **of_files, **self.lane_decks}

    def run(self) -> None:
        """Begin, and come back when all faults are over; the lanes go on."""
        for thread in [*self._producing, *self._attacking]:
            thread.start()
        while self._dealing and not self._failed.is_set():
            self._failed.wait(0.1)

    def close(self) -> None:
        """Let nothing new be written, and leave the lanes alone."""
        self._is_closing.set()
        for thread in [*self._producing, *self._attacking]:
            if thread.is_alive():
                thread.join()

    def _goes_on(self, deck: Deck) -> bool:
        if self._failed.is_set() or self._is_closing.is_set():
            return False
        late = time.monotonic() - self._until
        return late < 0 or (bool(deck.missing) and late < _EXTRA_S)

    def _deal(self, deck: Deck, *target: Any) -> None:
        deck.deal(*target, only_missing=time.monotonic() > self._until)

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException:
            self.errors.append(traceback.format_exc())
            self._failed.set()

    def _attack_service(self) -> None:
        deck, rng = self.service_deck, Random(f"{self._seed} service pauses")
        while self._goes_on(deck):
            self._deal(deck, self._service)
            self._failed.wait(rng.uniform(0.3, 1.5) * self._pace)
        self._dealing.discard("service")

    def _attack(self, lane: Lane) -> None:
        deck, rng = self.lane_decks[lane.name], Random(f"{self._seed} {lane.name} pauses")
        while self._goes_on(deck):
            lane.rest(rng.uniform(0.5, 3) * self._pace)
            self._deal(deck, lane)
        self._dealing.discard(lane.name)
        while not self._is_closing.is_set() and not self._failed.is_set():
            lane.rest(0.1)

    def _feed(self, lane: Lane) -> None:
        rng, deck = Random(f"{self._seed} files pauses {lane.name}"), self.file_decks.get(lane.name)
        next_at = time.monotonic()
        while not self._is_closing.is_set() and not self._failed.is_set():
            lane.produce()
            time.sleep(0.01)
            if deck is not None and isinstance(lane, RunLane) and time.monotonic() > next_at:
                if self._goes_on(deck):
                    self._deal(deck, lane, rng.choice(lane.files))
                    next_at = time.monotonic() + rng.uniform(0.5, 2.5) * self._pace
                else:
                    self._dealing.discard(_files_of(lane.name))
        lane.finish_producing()


def _faults_of(lane: Lane) -> dict[str, Callable[..., bool]]:
    if isinstance(lane, BackfillLane):
        return {**faults.LANE, **faults.EXPORTS}
    return {**faults.LANE, **faults.RUN} if isinstance(lane, RunLane) else {**faults.LANE}


def _files_of(name: str) -> str:
    return f"files of {name}"


def _left_out(lane: Lane) -> list[str]:
    return [name for name in faults.LANE if any(name.startswith(what) for what in lane.left_out)]
