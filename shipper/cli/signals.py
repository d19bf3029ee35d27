"""
Signals from the first moment of the process on.

A stop that comes while the commands are still being loaded is noted, and the pipeline gets it as soon as it runs; so
it ends with a documented exit code and not by the signal, or with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_SHIPPING: Final = (["run"], ["pipe"], ["backfill"], ["dead-letters", "replay"])
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)
_LEFT_TO_DO: Final = 4  # the exit code of a stop with something left to do

_noted: list[signal.Signals] = []


def note_signals() -> None:
    """Note the signals of a command that ships from now on; those that are ignored stay so."""
    if not any(sys.argv[1 : 1 + len(words)] == words for words in _SHIPPING):
        return
    for number in (*STOP_SIGNALS, *([signal.SIGHUP] if sys.argv[1] == "run" else [])):
        if signal.getsignal(number) in _DEFAULTS:
            signal.signal(number, _note)


def ignore_signals() -> None:
    """Ignore further stops: the exit code is settled, and Python lets signals kill while the interpreter ends."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_IGN)


def _note(number: int, _: FrameType | None) -> None:
    if number in STOP_SIGNALS and any(earlier in STOP_SIGNALS for earlier in _noted):
        os._exit(_LEFT_TO_DO)  # the second one ends at once; the state is intact
    _noted.append(signal.Signals(number))


@contextmanager
def at_stop(end: Callable[[], object]) -> Iterator[None]:
    """Call something at the first stop while this is entered, also at one that was noted before."""

    def note(number: int, frame: FrameType | None) -> None:
        _note(number, frame)
        end()

    noting = [number for number in STOP_SIGNALS if signal.getsignal(number) is _note]
    for number in noting:
        signal.signal(number, note)
    try:
        if _noted:
            end()
        yield
    finally:
        for number in noting:
            signal.signal(number, _note)


@contextmanager
def received_signals(*numbers: signal.Signals) -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive signals in an event loop, first of all those that were noted before; a late one is noted again."""
    import anyio

    try:
        with anyio.open_signal_receiver(*numbers) as received:
            yield _after_noted(received)
    finally:
        note_signals()


async def _after_noted(received: AsyncIterator[signal.Signals]) -> AsyncIterator[signal.Signals]:
    while _noted:
        yield _noted.pop(0)
    async for number in received:
        yield number
