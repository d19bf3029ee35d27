"""
Programs that settings and options name: each runs in a process group of its own, with a small environment.

The environment of shipper may hold secrets; a program gets only a few variables, such as PATH, HOME and the locale.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Protocol

# The last is for `systemd-creds cat`, which finds by it what the unit was given.
_KEPT: Final = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "CREDENTIALS_DIRECTORY"})


class Leader(Protocol):
    """A process that was started in a session of its own."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...


def small_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a program is given."""
    return {name: value for name, value in environ.items() if name in _KEPT or name.startswith("LC_")}


def signal_group(leader: Leader, number: signal.Signals) -> None:
    """Send a signal to a process and to what it has started, also if only the latter is left."""
    if leader.returncode is not None:
        # While one of its group is left, no other process gets its id.
        with suppress(ProcessLookupError):
            os.getpgid(leader.pid)
            return  # it is another's by now
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, number)
