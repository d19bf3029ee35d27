"""The latest snapshot, as a file in the state directory: readable by other processes, and after the end."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio.to_thread import run_sync
from msgspec.structs import replace

from shipper.status.live import Live

LIVE_FILE: Final = "live.json"
_MAX_BYTES: Final = 1 << 20
_WRITE_INTERVAL_S: Final = 1.0
_UNCHANGED_S: Final = 30.0  # so often it is written in any case, as a sign of life


class LiveFile:
    """
    Keeps the latest snapshot in a state directory, written once a second while it changes.

    It is replaced at one stroke, mode 0600; it need not survive a power failure.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._latest: Live | None = None
        self._written: Live | None = None

    def note(self, live: Live) -> None:
        """Keep a snapshot for the next write."""
        self._latest = live

    async def keep_written(self) -> None:
        """Write once a second until cancelled; the last snapshot is left to `write`."""
        while True:
            await run_sync(self.write)
            await anyio.sleep(_WRITE_INTERVAL_S)

    def write(self) -> None:
        """Write the latest snapshot if it changed; the state store is what reports a full disk."""
        live, before = self._latest, self._written
        if live is None:
            return
        if before is not None and live.at < before.at + _UNCHANGED_S and replace(live, at=before.at) == before:
            return
        temporary = self._directory / f".{LIVE_FILE}"
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(live))
            temporary.replace(self._directory / LIVE_FILE)
            self._written = live


def read_live(directory: Path) -> Live | None:
    """
    Read what the shipper of a state directory said of itself last, also after its end.

    Returns:
        None if there is nothing that can be understood, such as what another version wrote.
    """
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # a pipe would keep the reader waiting
        with open(os.open(directory / LIVE_FILE, flags), "rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=Live)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
