"""
Logging with structlog to stderr: JSON lines, or coloured text on a terminal.

Frequent events are rate-limited to keep the log readable and small: after a burst of lines with the same event name,
one line is written every half minute, with the number of omitted ones. Level debug writes all lines.
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

_BURST: Final = 10  # lines of an event
_REFILL_S: Final = 30.0  # time per line after the burst
_LEVELS: Final = logging.getLevelNamesMapping()

_Event = MutableMapping[str, Any]
_encode: Final = msgspec.json.Encoder(enc_hook=repr).encode


def _to_json(event: dict[str, Any], **_: Any) -> str:
    try:
        return printable_json(_encode(event).decode())
    except UnicodeEncodeError:  # a file name that is not UTF-8
        return _encode(_escape(event)).decode()


def _escape(value: Any, keep: str = "") -> Any:
    if isinstance(value, str):
        return printable(value, keep=keep)
    if isinstance(value, dict):
        return {_escape(key): _escape(item, keep) for key, item in value.items()}
    return [_escape(item, keep) for item in value] if isinstance(value, list | tuple) else value


def _escape_event(_: Any, __: str, event: _Event) -> _Event:
    """Escape control characters for a terminal, except for the newlines of a traceback."""
    return {key: _escape(value, "\n" if key == "exception" else "") for key, value in event.items()}


class _TokenBucket(Struct):
    """The rate limit of one event: lines allowed at a time, and lines omitted."""

    lines: float
    at: float
    left_out: int = 0


class _Filter:
    """The first processor: drops lines below the level, and frequent repeats."""

    def __init__(self) -> None:
        self._buckets: dict[str, _TokenBucket] = {}
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
        bucket = self._buckets.setdefault(event["event"], _TokenBucket(_BURST, now))
        bucket.lines = min(_BURST, bucket.lines + (now - bucket.at) / _REFILL_S)
        bucket.at = now
        if bucket.lines < 1:
            bucket.left_out += 1
            raise structlog.DropEvent
        bucket.lines -= 1
        if bucket.left_out:
            event["left_out"] = bucket.left_out
            bucket.left_out = 0

    def take_left_out(self) -> dict[str, int]:
        left_out = {name: bucket.left_out for name, bucket in list(self._buckets.items()) if bucket.left_out}
        for name in left_out:
            self._buckets[name].left_out = 0
        return left_out


_filter: Final = _Filter()


def set_level(level: str) -> None:
    """Set the level of all loggers: `debug`, `info`, `warning` or `error`."""
    _filter.level = _LEVELS[level.upper()]


def take_left_out() -> dict[str, int]:
    """Return the number of lines omitted since the last call, by event."""
    return _filter.take_left_out()


def is_json(format: Literal["auto", "json", "console"]) -> bool:
    """Return whether this format means JSON lines, given the current standard error."""
    return format == "json" or (format == "auto" and not sys.stderr.isatty())


def configure_logs(level: str, format: Literal["auto", "json", "console"], *, now: Callable[[], float]) -> None:
    """Set up the process's logs; the format `auto` is `console` on a terminal and `json` otherwise."""
    set_level(level)
    _filter.now = now
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=_to_json)
        if is_json(format)
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            _filter,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # No local variables in tracebacks: they may contain records and secrets.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
            if is_json(format)
            else structlog.processors.format_exc_info,
            *([] if is_json(format) else [_escape_event]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),  # `_filter` applies the level
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, ForgivingStderr())),
        cache_logger_on_first_use=True,
    )
