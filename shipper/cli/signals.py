"""
Handling of signals from the start of the process.

A stop signal that arrives while commands are being imported is recorded and passed to the pipeline once it runs. So the
process ends with a documented exit code, not by the signal or with a traceback.
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
_SIGNALS: Final = (*STOP_SIGNALS, signal.SIGHUP)

_SHIPPING: Final = (["run"], ["pipe"], ["backfill"], ["dead-letters", "replay"])
_DEFAULTS: Final = (signal.SIG_DFL, signal.default_int_handler)
_UNFINISHED: Final = 4  # exit code

_recorded: list[signal.Signals] = []


def record_signals() -> None:
    """Record the signals of a command that ships; signals that are ignored stay ignored."""
    if not any(sys.argv[1 : 1 + len(words)] == words for words in _SHIPPING):
        return
    for number in _SIGNALS:
        if signal.getsignal(number) in _DEFAULTS:
            signal.signal(number, _record)


def ignore_signals() -> None:
    """Ignore further signals, which could otherwise kill the process during interpreter shutdown."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _record:
            signal.signal(number, signal.SIG_IGN)


def _record(number: int, _: FrameType | None) -> None:
    if number in STOP_SIGNALS and any(earlier in STOP_SIGNALS for earlier in _recorded):
        os._exit(_UNFINISHED)  # the second one exits immediately; the state is intact
    _recorded.append(signal.Signals(number))


@contextmanager
def at_stop(callback: Callable[[], object]) -> Iterator[None]:
    """Call a function at a stop signal inside the context, or immediately if one was recorded before."""

    def record(number: int, frame: FrameType | None) -> None:
        _record(number, frame)
        callback()

    numbers = [number for number in _SIGNALS if signal.getsignal(number) is _record]
    for number in numbers:
        signal.signal(number, record)
    try:
        if _recorded:
            callback()
        yield
    finally:
        for number in numbers:
            signal.signal(number, _record)


def signals_of_pipeline(*, can_reload: bool) -> tuple[signal.Signals, ...]:
    """Return the signals to receive; without a reload, SIGHUP only if it is not ignored, as by nohup."""
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return STOP_SIGNALS if is_hangup_ignored and not can_reload else _SIGNALS


@contextmanager
def receive_signals(*numbers: signal.Signals) -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive signals in an event loop, recorded ones first; record later ones again afterwards."""
    import anyio

    try:
        with anyio.open_signal_receiver(*numbers) as signals:
            yield _after_recorded(signals)
    finally:
        record_signals()


async def _after_recorded(signals: AsyncIterator[signal.Signals]) -> AsyncIterator[signal.Signals]:
    while _recorded:
        yield _recorded.pop(0)
    async for number in signals:
        yield number
