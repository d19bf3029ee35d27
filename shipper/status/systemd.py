"""What systemd is told of a service of `Type=notify`: that it is ready, that it stops, that it is alive."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Final

from shipper.status.live import Live, Phase

_WORDS_INTERVAL_S: Final = 10.0
_STATES: Final[Mapping[Phase, str]] = {"running": "READY=1", "draining": "STOPPING=1", "stopped": "STOPPING=1"}


class Notifier:
    """
    Speaks to the socket that systemd named, if it did; nothing that goes wrong there matters to the service.

    Args:
        environ: `NOTIFY_SOCKET`, and `WATCHDOG_USEC` if it wants signs of life.
        now: The monotonic clock, seconds.
    Source:
        sd_notify(3).
    """

    def __init__(self, environ: Mapping[str, str], *, now: Callable[[], float]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._is_watched = "WATCHDOG_USEC" in environ
        self._now = now
        self._state = ""
        self._words_at = 0.0

    def note(self, live: Live, *, stuck: str = "") -> None:
        """
        Tell what a snapshot says; made by the loop that ships, it is a sign of life.

        Args:
            stuck: What does not come to an end, in words: then it is none.
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
            lines.append(f"STATUS=stuck: {stuck}" if stuck else f"STATUS={_words(live)}")
        self._send(lines)

    def note_reload(self) -> None:
        """Report that settings are read again."""
        self._send(["RELOADING=1", f"MONOTONIC_USEC={int(self._now() * 1e6)}"])

    def note_reloaded(self) -> None:
        """Have the next snapshot tell that it is over."""
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


def _words(live: Live) -> str:
    """Return the line that `systemctl status` shows."""
    if live.pauses:
        return f"paused: {', '.join(pause.reason for pause in live.pauses)}; {live.lag_bytes:,} bytes behind"
    figures = f"{live.accepted:,} accepted, {live.dead_lettered:,} refused, {live.lag_bytes:,} bytes behind"
    return "; ".join([f"{live.phase}: {figures}", *live.troubles[:1]]).replace("\n", " ")
