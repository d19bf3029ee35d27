"""Run blocking calls in a thread; a stop does not wait for one that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from anyio.to_thread import run_sync

T = TypeVar("T")

_LIMIT_S: Final = 5.0


class Turns:
    """Makes one call at a time; a cancellation leaves it alone, as a read from a disk that is away may never return."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call in a thread."""
        return await run_sync(self._call, function, arguments, abandon_on_cancel=True)

    def _call(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        with self._lock:
            return function(*arguments)

    def end(self) -> bool:
        """
        Wait for a call that was left alone. Blocks.

        Returns:
            Whether it has come to an end; if not, what it works with must not be touched.
        """
        return self._lock.acquire(timeout=_LIMIT_S)
