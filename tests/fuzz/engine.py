"""Runs targets: makes inputs, keeps those with a new outcome, and makes what fails small and repeatable."""

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
_FAILURES: Final = 5
_LIMIT_S: Final = 20.0  # of the processor's time, for one input: it hangs
_SHRINKING: Final = 3_000  # runs of the target at most
_SHRINKING_S: Final = 10.0

Check = Callable[[bytes], object]


class Target(NamedTuple):
    """
    Something that reads what others wrote.

    Attributes:
        check: Raises if something does not hold; returns what became of the input, to be hashed.
        seeds: Samples to begin with, good ones and bad ones.
        share: Of the executions of a run over all targets; dear ones have a small share.
    """

    name: str
    check: Check
    seeds: Sequence[bytes]
    mutate: Mutate
    share: float


class Failure(NamedTuple):
    """An input for which something does not hold, and the error that says so."""

    data: bytes
    error: BaseException
    number: int
    found_bytes: int

    @property
    def place(self) -> tuple[str, str]:
        """What tells one failure from another: the error's type, and the line that raised it."""
        return place_of(self.error)


class Outcome(NamedTuple):
    """
    Attributes:
        kinds: How many different things became of the inputs.
        seconds: Of the processor.
    """

    executions: int
    kinds: int
    seconds: float
    failures: list[Failure]


class HangError(Exception):
    """An input keeps its reader busy."""


def fuzz(target: Target, executions: int, seed: int) -> Outcome:
    """
    Run a target; an execution is one input that went through it, from its first byte to its last check.

    Returns:
        At most five failures, from different lines of the code, made small.
    """
    rng = Random(f"{seed} {target.name}")
    pool = list(target.seeds)
    seen: set[object] = set()
    failures: list[Failure] = []
    started = time.process_time()
    number = 0
    with quiet(), limited():
        while number < executions and len(failures) < _FAILURES:
            is_seed = number < len(target.seeds)
            data = target.seeds[number] if is_seed else target.mutate(rng, pool[int(rng.random() * len(pool))], pool)
            number += 1
            try:
                signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
                outcome = target.check(data)
            except Exception as error:
                if place_of(error) not in {failure.place for failure in failures}:
                    failures.append(_shrunk(target.check, data, error, number))
                continue
            if outcome not in seen:
                seen.add(outcome)
                _keep(pool, data, rng)
    return Outcome(number, len(seen), time.process_time() - started, failures)


def _keep(pool: list[bytes], data: bytes, rng: Random) -> None:
    if len(pool) < _POOL:
        pool.append(data)
    else:
        pool[int(rng.random() * _POOL)] = data


def place_of(error: BaseException) -> tuple[str, str]:
    """Return the error's type, and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, f"{frame.filename}:{frame.lineno}"


def _shrunk(check: Check, data: bytes, error: Exception, number: int) -> Failure:
    """Leave out what the failure does not need: ever smaller pieces, then make bytes plain."""
    wanted, best, runs = place_of(error), data, 0
    until = time.process_time() + _SHRINKING_S

    def fails(candidate: bytes) -> Exception | None:
        nonlocal runs
        runs += 1 if time.process_time() < until else _SHRINKING
        try:
            signal.setitimer(signal.ITIMER_PROF, _LIMIT_S)
            check(candidate)
        except Exception as found:
            return found if place_of(found) == wanted else None
        return None

    size = max(1, len(best) // 2)
    while runs < _SHRINKING:
        at, before = 0, best
        while at < len(best) and runs < _SHRINKING:
            candidate = best[:at] + best[at + size :]
            if found := fails(candidate):
                best, error = candidate, found
            else:
                at += size
        if size == 1 and best == before:
            break
        size = max(1, size // 2)
    for at in range(len(best) if runs < _SHRINKING else 0):
        candidate = best[:at] + b"0" + best[at + 1 :]
        if best[at : at + 1] not in b"0" and (found := fails(candidate)):
            best, error = candidate, found
    return Failure(best, error, number, len(data))


def write_failure(failure: Failure, target: Target, seed: int, folder: Path) -> str:
    """Write the input to a file, and say all that is needed to repeat it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}-{seed}-{failure.number}"
    path.write_bytes(failure.data)
    return "\n".join(
        [
            f"{target.name}: input {failure.number} of seed {seed} fails, {' at '.join(failure.place)}",
            *traceback.format_exception(failure.error, chain=False)[-6:],
            f"the input, made small ({failure.found_bytes} -> {len(failure.data)} bytes):",
            f"    {failure.data!r}",
            f"repeat it: python -m tests.fuzz {target.name} --input {path}",
        ]
    )


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of the targets that need one."""
    made = asyncio.new_event_loop()
    atexit.register(made.close)
    return made


@contextmanager
def quiet() -> Iterator[None]:
    """Let nothing be logged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def limited() -> Iterator[None]:
    """End what hangs; each input sets the clock anew."""

    def hang(_: int, frame: FrameType | None) -> None:
        raise HangError(f"it took more than {_LIMIT_S:g} s")

    before = signal.signal(signal.SIGPROF, hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
