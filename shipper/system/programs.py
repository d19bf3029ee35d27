"""
Helpers to run programs named by settings and options in their own process groups.

Shipper's environment may contain secrets, so programs get only a few variables, such as PATH, HOME and the locale.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from anyio.abc import Process

# `systemd-creds cat` finds the unit's credentials through CREDENTIALS_DIRECTORY.
_INHERITED: Final = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "CREDENTIALS_DIRECTORY"})


def minimal_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to pass to a program."""
    return {name: value for name, value in environ.items() if name in _INHERITED or name.startswith("LC_")}


def signal_group(leader: Process, number: signal.Signals) -> None:
    """Send a signal to the leader of a process group and its descendants, also after the leader itself has ended."""
    if leader.returncode is not None:
        # The id is not reused while a member of the group is alive.
        with suppress(ProcessLookupError):
            os.getpgid(leader.pid)
            return  # the id belongs to another process by now
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, number)
