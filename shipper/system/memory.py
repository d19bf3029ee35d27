"""Returns freed memory to the system, where the C library is glibc; elsewhere does nothing."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 1 << 21  # more than a chunk, of which there are many
_TRIM_SECONDS: Final = 1.0


def keep_memory_together() -> None:
    """
    Let all threads take memory from one arena, as each leaves holes of its own behind bodies and long records.

    There is but one of them at a time that runs Python, so that none waits for another. What is large is mapped by
    itself: left to itself, the C library takes it from the arena as soon as the first of them was freed.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        _call("mallopt", _M_ARENA_MAX, 1)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _call("mallopt", _M_MMAP_THRESHOLD, _MAPPED_BYTES)


async def keep_memory_released() -> None:
    """Release free heap pages to the kernel from time to time."""
    import anyio
    from anyio.to_thread import run_sync

    while True:
        await anyio.sleep(_TRIM_SECONDS)
        await run_sync(_call, "malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library, if it has that; other threads run meanwhile."""
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            import ctypes

            getattr(ctypes.CDLL(None), name)(*arguments)
