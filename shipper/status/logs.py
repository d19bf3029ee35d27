"""
Logs: structlog to stderr, JSON lines for machines, coloured text for a terminal.

However bad a day is, the log stays readable and small: of each event, by its name, some lines are written at once and
then one every half minute, with the number of those that were left out. At level debug all are written.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final, Literal, TextIO, cast

import msgspec
import structlog
from msgspec import Struct

from shipper.model.printable import printable, printable_json
from shipper.system.stderr import ForgivingStderr

_BURST: Final = 10  # lines of an event at once
_REFILL_S: Final = 30.0  # and then one in so many seconds
_LEVELS: Final = logging.getLevelNamesMapping()

_Event = MutableMapping[str, Any]
_encode: Final = msgspec.json.Encoder(enc_hook=repr).encode


def _to_json(event: dict[str, Any], **_: Any) -> str:
    try:
        return printable_json(_encode(event).decode())
    except UnicodeEncodeError:  # a name of a file that is not UTF-8, in some message
        return _encode(_written_out(event)).decode()


def _written_out(value: Any, keep: str = "") -> Any:
    """Escape control characters in all texts of a value."""
    if isinstance(value, str):
        return printable(value, keep=keep)
    if isinstance(value, dict):
        return {_written_out(key): _written_out(each, keep) for key, each in value.items()}
    return [_written_out(each, keep) for each in value] if isinstance(value, list | tuple) else value


def _for_a_terminal(_: Any, __: str, event: _Event) -> _Event:
    """Escape control characters before the renderer for people; a traceback keeps its lines."""
    return {key: _written_out(value, "\n" if key == "exception" else "") for key, value in event.items()}


class _Allowance(Struct):
    """How many lines of an event may be written at once, as of a moment, and how many were left out."""

    lines: float
    at: float
    left_out: int = 0


class _Gate:
    """The first processor: drops what is below the level, and frequent repeats."""

    def __init__(self) -> None:
        self._allowances: dict[str, _Allowance] = {}
        self.level = logging.INFO
        self.now: Callable[[], float] = lambda: 0.0

    def __call__(self, _: Any, method: str, event: _Event) -> _Event:
        if _LEVELS[method.upper()] < self.level:
            raise structlog.DropEvent
        if self.level > logging.DEBUG:
            self._limit(event)
        return event

    def _limit(self, event: _Event) -> None:
        now = self.now()
        allowance = self._allowances.setdefault(event["event"], _Allowance(_BURST, now))
        allowance.lines = min(_BURST, allowance.lines + (now - allowance.at) / _REFILL_S)
        allowance.at = now
        if allowance.lines < 1:
            allowance.left_out += 1
            raise structlog.DropEvent
        allowance.lines -= 1
        if allowance.left_out:
            event["left_out"] = allowance.left_out
            allowance.left_out = 0

    def take_left_out(self) -> dict[str, int]:
        left_out = {name: each.left_out for name, each in list(self._allowances.items()) if each.left_out}
        for name in left_out:
            self._allowances[name].left_out = 0
        return left_out


_gate: Final = _Gate()


def set_level(level: str) -> None:
    """Write only what is at least `debug`, `info`, `warning` or `error`; holds at once, for all loggers."""
    _gate.level = _LEVELS[level.upper()]


def take_left_out() -> dict[str, int]:
    """Return how many lines of each event were left out since the last call."""
    return _gate.take_left_out()


def is_json(format: Literal["auto", "json", "console"]) -> bool:
    """Return whether logs of this format are JSON lines, with standard error as it is."""
    return format == "json" or (format == "auto" and not sys.stderr.isatty())


def configure_logs(level: str, format: Literal["auto", "json", "console"], *, now: Callable[[], float]) -> None:
    """
    Set up the process's logs.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        format: `auto` is `console` on a terminal and `json` otherwise.
        now: A clock that does not jump, seconds.
    """
    set_level(level)
    _gate.now = now
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=_to_json)
        if is_json(format)
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            _gate,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # No local variables in tracebacks: they hold records and secrets.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
            if is_json(format)
            else structlog.processors.format_exc_info,
            *([] if is_json(format) else [_for_a_terminal]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),  # what is written, the gate tells
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, ForgivingStderr())),
        cache_logger_on_first_use=True,
    )
