"""Run targets: generate inputs, keep those with a new outcome, and shrink those that fail."""

from __future__ import annotations

import asyncio
import atexit
import logging
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final, NamedTuple

import structlog

from tests.fuzz.mutation import Mutate

_POOL: Final = 2_000
_FAILURES_MAX: Final = 5
_LIMIT_S: Final = 20.0  # of CPU time; an input that takes longer hangs
_SHRINKING_RUNS: Final = 3_000
_SHRINKING_S: Final = 10.0

Check = Callable[[bytes], object]


class Target(NamedTuple):
    """
    Code that reads untrusted bytes, with an invariant to check.

    Attributes:
        check: Raises if an invariant is broken; returns a hashable outcome.
        seeds: Good and bad samples to start with.
        share: Relative number of executions in a run of all targets; small for expensive ones.
    """

    name: str
    check: Check
    seeds: Sequence[bytes]
    mutate: Mutate
    share: float


class Failure(NamedTuple):
    """An input that breaks an invariant, and the error."""

    data: bytes
    error: Exception
    number: int
    original_bytes: int

    @property
    def place(self) -> tuple[str, str]:
        return place_of(self.error)


class Report(NamedTuple):
    """
    Attributes:
        kinds: Number of different outcomes.
        seconds: CPU time.
    """

    executions: int
    kinds: int
    seconds: float
    failures: list[Failure]


class HangError(Exception):
    """The reader of an input does not end."""


def fuzz(target: Target, executions: int, seed: int) -> Report:
    """Run a target and shrink the failures; stop after failures at five different lines of code."""
    rng = Random(f"{seed} {target.name}")
    pool = list(target.seeds)
    outcomes: set[object] = set()
    failures: list[Failure] = []
    started = time.process_time()
    number = 0
    with quiet(), _limited():
        while number < executions and len(failures) < _FAILURES_MAX:
            is_seed = number < len(target.seeds)
            data = target.seeds[number] if is_seed else target.mutate(rng, pool[int(rng.random() * len(pool))], pool)
            number += 1
            try:
                signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
                outcome = target.check(data)
            except Exception as error:
                if place_of(error) not in {failure.place for failure in failures}:
                    smallest, error = _shrink(target.check, data, error)
                    failures.append(Failure(smallest, error, number, len(data)))
                continue
            if outcome not in outcomes:
                outcomes.add(outcome)
                if len(pool) < _POOL:
                    pool.append(data)
                else:
                    pool[int(rng.random() * _POOL)] = data
    return Report(number, len(outcomes), time.process_time() - started, failures)


def place_of(error: BaseException) -> tuple[str, str]:
    """Return what distinguishes failures: the type of the error and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, f"{frame.filename}:{frame.lineno}"


def _shrink(check: Check, data: bytes, error: Exception) -> tuple[bytes, Exception]:
    """Remove ever smaller pieces while the failure remains; then replace bytes by zeros."""
    place, best, runs = place_of(error), data, 0
    deadline = time.process_time() + _SHRINKING_S

    def failure(candidate: bytes) -> Exception | None:
        nonlocal runs
        runs += 1 if time.process_time() < deadline else _SHRINKING_RUNS
        try:
            signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
            check(candidate)
        except Exception as raised:
            return raised if place_of(raised) == place else None
        return None

    size = max(1, len(best) // 2)
    while runs < _SHRINKING_RUNS:
        at, before = 0, best
        while at < len(best) and runs < _SHRINKING_RUNS:
            candidate = best[:at] + best[at + size :]
            if raised := failure(candidate):
                best, error = candidate, raised
            else:
                at += size
        if size == 1 and best == before:
            break
        size = max(1, size // 2)
    for at in range(len(best) if runs < _SHRINKING_RUNS else 0):
        candidate = best[:at] + b"0" + best[at + 1 :]
        if best[at : at + 1] not in b"0" and (raised := failure(candidate)):
            best, error = candidate, raised
    return best, error


def write_failure(failure: Failure, target: Target, seed: int, folder: Path) -> str:
    """Write the input to a file, and return a message that says how to reproduce the failure."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}-{seed}-{failure.number}"
    path.write_bytes(failure.data)
    return "\n".join(
        [
            f"{target.name}: input {failure.number} of seed {seed} fails, {' at '.join(failure.place)}",
            *traceback.format_exception(failure.error, chain=False)[-6:],
            f"the input, shrunk from {failure.original_bytes} to {len(failure.data)} bytes:",
            f"    {failure.data!r}",
            f"repeat it: python -m tests.fuzz {target.name} --input {path}",
        ]
    )


@cache
def loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the targets that need one."""
    new = asyncio.new_event_loop()
    atexit.register(new.close)
    return new


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress all logging."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt inputs that hang; the timer is reset for each input."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        raise HangError(f"no end within {_LIMIT_S:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
