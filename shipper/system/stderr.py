"""Writing to standard streams that are slow or closed: lost diagnostics must not cost records."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Write everything to /dev/null from now on, including the interpreter's final flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ForgivingStderr:
    """Standard error, or /dev/null once the reader has gone."""

    def write(self, text: str) -> int:
        _forgive(sys.stderr.write, text)
        return len(text)

    def flush(self) -> None:
        _forgive(sys.stderr.flush)


def _forgive(call: Callable[..., object], *arguments: str) -> None:
    try:
        call(*arguments)
    except BlockingIOError:
        pass  # the reader is slow, but may catch up
    except OSError:
        discard(sys.stderr)
