"""The gate between the senders and the service: a pause holds all of them, and one of them probes."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog

log = structlog.get_logger("delivery")


class Gate:
    """
    Shared by all senders of a pipeline.

    While it is shut, the sender that shut it goes on trying its batch and the others wait; as their batches stay in
    their hands, reading stops by itself. The first acceptance opens it.

    Attributes:
        reason: Why delivery pauses, one word; empty while the gate is open.
        failing_since: When the first of the attempts failed that failed with no acceptance since; None if the last
            attempt succeeded.
    """

    def __init__(self, now: Callable[[], float] = anyio.current_time) -> None:
        self._now = now
        self._opened = anyio.Event()
        self._prober: object | None = None
        self.reason = ""
        self.failing_since: float | None = None

    def __repr__(self) -> str:
        return f"<Gate {self.reason or 'open'}>"

    async def pass_through(self, sender: object) -> None:
        """Wait until the gate is open; the prober is let through."""
        while self.reason and self._prober is not sender:
            await self._opened.wait()

    def note_failure(self) -> None:
        """An attempt failed, in whatever way."""
        if self.failing_since is None:
            self.failing_since = self._now()

    def shut(self, reason: str, message: str, prober: object) -> None:
        """Hold all senders but the prober; a new reason is told, the same one only once."""
        if not self.reason:
            self._prober = prober
            self._opened = anyio.Event()
        if self.reason != reason:
            log.warning("delivery_paused", reason=reason, message=message)
        self.reason = reason

    def open(self) -> None:
        """The service accepted a batch."""
        self.failing_since = None
        if self.reason:
            log.info("delivery_resumed", reason=self.reason)
            self.reason = ""
            self._prober = None
            self._opened.set()
