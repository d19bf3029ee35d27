"""Calls of the C library, which tune the allocator of glibc so that freed memory returns to the system."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from typing import Any, Final

_M_ARENA_MAX: Final = -8
_M_MMAP_THRESHOLD: Final = -3
_M_TRIM_THRESHOLD: Final = -1
_MAPPED_BYTES: Final = 1 << 21  # more than a chunk, which is allocated often
_FETCHED_BYTES: Final = 1 << 24  # more than what is fetched from a broker at once, by default
_TRIM_SECONDS: Final = 1.0


def share_one_arena() -> None:
    """
    Let all threads share one arena, as every arena fragments where bodies and long records were freed.

    Only one thread runs Python at a time, so threads do not contend for it. Large blocks are always mapped: by default,
    the C library allocates them from the arena once the first of them has been freed.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        call_c_library("mallopt", _M_ARENA_MAX, 1)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        call_c_library("mallopt", _M_MMAP_THRESHOLD, _MAPPED_BYTES)


def reuse_fetch_buffers() -> None:
    """
    Let the arena keep the buffers of fetched messages, which are as large as `max_fetched_bytes`.

    A mapped buffer costs a page fault for every 4 KiB each time: 5 to 9 % of the time of a member.
    """
    for name, parameter in (("MMAP", _M_MMAP_THRESHOLD), ("TRIM", _M_TRIM_THRESHOLD)):
        if f"MALLOC_{name}_THRESHOLD_" not in os.environ:
            call_c_library("mallopt", parameter, _FETCHED_BYTES)


async def trim_heap_periodically() -> None:
    import anyio
    from anyio.to_thread import run_sync

    while True:
        await anyio.sleep(_TRIM_SECONDS)
        await run_sync(call_c_library, "malloc_trim", 0)


def call_c_library(name: str, *arguments: int) -> None:
    """Call a function of the C library if it exists, without holding the GIL."""
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            getattr(_c_library(), name)(*arguments)


@cache
def _c_library() -> Any:
    import ctypes

    return ctypes.CDLL(None)
