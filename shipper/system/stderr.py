"""Writing to a standard error that is slow or closed: lost diagnostics must not cost records."""

from __future__ import annotations

import os
import sys


class ForgivingStderr:
    """Standard error, or /dev/null once the reader has gone."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except BlockingIOError:  # the reader is slow, but may catch up
            return len(text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except BlockingIOError:
            pass
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
