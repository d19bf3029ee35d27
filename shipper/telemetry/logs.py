"""Logs: structlog to stderr, JSON lines for machines, coloured text for a terminal."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, Final, Literal, TextIO, cast

import msgspec
import structlog

_encode: Final = msgspec.json.Encoder(enc_hook=repr).encode


class ForgivingStderr:
    """Standard error that goes on, into nothing, when whoever reads it has gone: losing logs must not cost records."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _to_json(event: dict[str, Any], **_: Any) -> str:
    return _encode(event).decode()


def configure_logs(level: str, format: Literal["auto", "json", "console"]) -> None:
    """
    Set up the process's logs.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        format: `auto` is `console` on a terminal and `json` otherwise.
    """
    is_console = format == "console" or (format == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if is_console
        else structlog.processors.JSONRenderer(serializer=_to_json)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # No local variables in tracebacks: they hold records and secrets.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
            if not is_console
            else structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, ForgivingStderr())),
        cache_logger_on_first_use=True,
    )
