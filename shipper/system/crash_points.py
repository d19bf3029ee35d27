"""
Points at which tests kill the process, to try every order of crash and write.

`SHIPPER_CRASH_AT=name` or `name:n` kills the process the first or n-th time it reaches the point. Only tests set it.
"""

from __future__ import annotations

import os
import signal
from typing import Final, Literal

CrashPoint = Literal[
    "save.begin",  # before the transaction that moves checkpoints
    "save.written",  # in a broker transaction: dead letters and counts are written, offsets are not
    "save.commit",  # before the commit
    "save.done",  # after the commit, before it is reported
    "spool.append",  # before bytes of standard input are written
    "spool.appended",
    "spool.delete",  # before a settled segment is deleted
    "spool.deleted",  # after that, before the segment is forgotten
    "complete.delete",  # before a settled file is deleted or moved away
    "complete.taken",  # after it was renamed to its private name
    "complete.done",
]

_name, _, _number = os.environ.get("SHIPPER_CRASH_AT", "").partition(":")
_NAME: Final = _name
_passes_left = int(_number or 1)


def crash_point(name: CrashPoint) -> None:
    """Kill this process by SIGKILL if a test asked for it."""
    global _passes_left
    if name != _NAME:
        return
    _passes_left -= 1
    if _passes_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
