"""Run async code on each supported event loop."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

LOOPS = ["asyncio", "uvloop", "trio"]

Run = Callable[[Callable[[], Awaitable[None]]], None]


def runner(loop: str, *, limit_s: float) -> Run:
    """Return a function that runs an async function on an event loop, with a time limit."""

    def run(main: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(limit_s):
                await main()

        backend = "trio" if loop == "trio" else "asyncio"
        anyio.run(limited, backend=backend, backend_options={"use_uvloop": True} if loop == "uvloop" else {})

    return run


def on_each_loop(test: Callable[..., Awaitable[object]]) -> Callable[..., None]:
    """Run an async test on each event loop."""

    def run(loop: str, **arguments: Any) -> None:
        runner(loop, limit_s=30)(partial(test, **arguments))

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])  # type: ignore[attr-defined]
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    run.pytestmark = getattr(test, "pytestmark", [])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop", LOOPS)(run)
