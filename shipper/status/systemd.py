"""Notifies systemd, for a service of `Type=notify`: ready, stopping, alive, and the headline of the status page."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import anyio
from anyio.to_thread import run_sync

from shipper.model.errors import StateError
from shipper.model.units import several, size
from shipper.status.live import Live, Phase

_WORDS_INTERVAL_S: Final = 10.0
_STATES: Final[Mapping[Phase, str]] = {"running": "READY=1", "draining": "STOPPING=1", "stopped": "STOPPING=1"}


class Notifier:
    """
    Sends to the socket that systemd named, if any; errors there are ignored.

    Args:
        environ: `NOTIFY_SOCKET`, and `WATCHDOG_USEC` if it wants signs of life.
        now: The monotonic clock, seconds.
        count_letters: Counts the dead letters that are kept; blocks, and raises StateError. None = it cannot be known.
    Source:
        sd_notify(3).
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        now: Callable[[], float],
        count_letters: Callable[[], int] | None = None,
    ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._is_watched = "WATCHDOG_USEC" in environ
        self._now = now
        self._count_letters = count_letters
        self._letters: int | None = None
        self._state = ""
        self._words_at = 0.0

    async def keep_counted(self) -> None:
        """Count the dead letters again and again, if anybody reads the number, until this is cancelled."""
        while self._address and self._count_letters is not None:
            with suppress(StateError):
                self._letters = await run_sync(self._count_letters, abandon_on_cancel=True)
            await anyio.sleep(_WORDS_INTERVAL_S)

    def note(self, live: Live, *, stuck: str = "") -> None:
        """
        Report a snapshot; as the event loop that ships makes it, it is a sign of life.

        Args:
            stuck: What does not come to an end, in words; then it is no sign of life.
        """
        if not self._address:
            return
        lines = ["WATCHDOG=1"] if self._is_watched and not stuck else []
        state = _STATES.get(live.phase, "")
        is_new, self._state = state != self._state, state
        if is_new and state:
            lines.append(state)
        if is_new or self._now() >= self._words_at + _WORDS_INTERVAL_S:
            self._words_at = self._now()
            lines.append(f"STATUS={_words(live, stuck, self._letters)}")
        self._send(lines)

    def note_reload(self) -> None:
        """Report that settings are read again."""
        self._send(["RELOADING=1", f"MONOTONIC_USEC={int(self._now() * 1e6)}"])

    def note_reloaded(self) -> None:
        """Report with the next snapshot that the reload is over."""
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


def _words(live: Live, stuck: str, letters: int | None) -> str:
    from shipper.status.headline import headline_of  # loads much, and most processes have no socket to speak to
    from shipper.status.snapshot import Snapshot

    headline = headline_of(Snapshot(at=live.at, process_id=live.process_id, live=live, stuck=stuck))
    # The process counts a letter that is replayed once more, as another record that it has read.
    refused = f"{live.dead_lettered:,} dead-lettered" if letters is None else f"{several(letters, 'dead letter')} kept"
    counts = f"{live.accepted:,} accepted, {refused}, {size(live.lag_bytes)} behind."
    return " ".join(filter(None, [f"{headline.text(live.at)}.", headline.sub, counts])).replace("\n", " ")
