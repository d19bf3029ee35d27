"""Runs async code on each of the event loops that it may meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

LOOPS = ["asyncio", "uvloop", "trio"]

Run = Callable[[Callable[[], Awaitable[None]]], None]


def runner(loop: str, *, limit_s: float) -> Run:
    """Return a function that runs an async function on an event loop, with a limit."""

    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(limit_s):
                await main()

        backend = "trio" if loop == "trio" else "asyncio"
        anyio.run(limited, backend=backend, backend_options={"use_uvloop": True} if loop == "uvloop" else {})

    return run
