"""Notifications to systemd for a service of `Type=notify`: ready, stopping, watchdog, and a status line."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import anyio
from anyio.to_thread import run_sync

from shipper.model.errors import StateError
from shipper.model.units import several
from shipper.status.live import Live, Phase

_STATUS_INTERVAL_S: Final = 10.0
_STATES: Final[Mapping[Phase, str]] = {"running": "READY=1", "draining": "STOPPING=1", "stopped": "STOPPING=1"}


class Notifier:
    """
    Sends to systemd's notification socket, if there is one; ignores errors.

    Args:
        environ: Contains `NOTIFY_SOCKET`, and `WATCHDOG_USEC` if the watchdog is enabled.
        count_letters: Counts the stored dead letters; blocks, and may raise StateError. None = there is no count.
    Source:
        sd_notify(3).
    """

    def __init__(
        self, environ: Mapping[str, str], *, now: Callable[[], float], count_letters: Callable[[], int] | None = None
    ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._has_watchdog = "WATCHDOG_USEC" in environ
        self._now = now
        self._count_letters = count_letters
        self._letters: int | None = None
        self._state = ""
        self._status_at = 0.0

    async def count_periodically(self) -> None:
        """Count the dead letters until cancelled; returns at once if no socket needs the number."""
        while self._address and self._count_letters is not None:
            with suppress(StateError):
                self._letters = await run_sync(self._count_letters, abandon_on_cancel=True)
            await anyio.sleep(_STATUS_INTERVAL_S)

    def notify(self, live: Live, *, stuck: str = "") -> None:
        """Report a snapshot; it is a sign of life of the main event loop, unless work is `stuck`."""
        if not self._address:
            return
        lines = ["WATCHDOG=1"] if self._has_watchdog and not stuck else []
        state = _STATES.get(live.phase, "")
        is_new, self._state = state != self._state, state
        if is_new and state:
            lines.append(state)
        if is_new or self._now() >= self._status_at + _STATUS_INTERVAL_S:
            self._status_at = self._now()
            lines.append(f"STATUS={_status(live, stuck, self._letters)}")
        self._send(lines)

    def begin_reload(self) -> None:
        """Report that the settings are being reloaded."""
        self._send(["RELOADING=1", f"MONOTONIC_USEC={int(self._now() * 1e6)}"])

    def end_reload(self) -> None:
        """Report with the next snapshot that the reload has ended."""
        self._state = ""

    def _send(self, lines: list[str]) -> None:
        if not self._address or not lines:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(lines).encode(), address)
        except OSError:
            pass


def _status(live: Live, stuck: str, letters: int | None) -> str:
    from shipper.status.headline import headline_of  # slow to import, and most processes have no socket
    from shipper.status.snapshot import Snapshot

    headline = headline_of(Snapshot(at=live.at, process_id=live.process_id, live=live, stuck=stuck))
    # The process counts a replayed letter as another record.
    refused = f"{live.dead_lettered:,} dead-lettered" if letters is None else f"{several(letters, 'dead letter')} kept"
    counts = f"{live.accepted:,} accepted, {refused}, {live.behind or 'nothing'} behind."
    return " ".join(filter(None, [f"{headline.text(live.at)}.", headline.sub, counts])).replace("\n", " ")
