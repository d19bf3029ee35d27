"""Standard error whose reader may be slow or gone: losing diagnostics must not cost records."""

from __future__ import annotations

import os
import sys


class ForgivingStderr:
    """Discards what is written once the reader of standard error is gone."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except BlockingIOError:  # it is read too slowly, and may be read again
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
