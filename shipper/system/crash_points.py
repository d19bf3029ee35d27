"""
Places at which a test may end the process as a crash would, so that every order of crash and write can be tried.

`SHIPPER_CRASH_AT=name` or `name:n` ends it at the first or the n-th passing. Nobody else sets that variable.
"""

from __future__ import annotations

import os
import signal
from typing import Final, Literal

CrashPoint = Literal[
    "save.begin",  # before the transaction that moves checkpoints
    "save.written",  # of a transaction of the brokers: dead letters and counts are written, offsets are not
    "save.commit",  # at its end, not committed
    "save.done",  # committed, and nobody told
    "spool.append",  # before bytes of standard input are written
    "spool.appended",
    "spool.delete",  # before a settled segment is deleted
    "spool.deleted",  # and not forgotten yet
    "complete.delete",  # before a settled file is deleted or moved away
    "complete.taken",  # it has its private name
    "complete.done",
]

_name, _, _number = os.environ.get("SHIPPER_CRASH_AT", "").partition(":")
_NAME: Final = _name
_passings_left = int(_number or 1)


def crash_point(name: CrashPoint) -> None:
    """End the process here, by SIGKILL, if a test asked for it."""
    global _passings_left
    if name != _NAME:
        return
    _passings_left -= 1
    if _passings_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
