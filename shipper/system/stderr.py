"""Writing to standard streams that are slow or closed: lost diagnostics must not cost records."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Write everything to /dev/null from now on, including the interpreter's final flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ForgivingStderr:
    """Standard error, or /dev/null once the reader has gone."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except BlockingIOError:  # the reader is slow, but may catch up
            return len(text)
        except OSError:
            discard(sys.stderr)
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except BlockingIOError:
            pass
        except OSError:
            discard(sys.stderr)
