"""Run async code on each supported event loop, or in virtual time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import pytest
import trio
from trio.testing import MockClock

T = TypeVar("T")


def on_loops(*loops: str) -> Callable[[Callable[..., Awaitable[object]]], Callable[..., None]]:
    """Run an async test on some event loops, with a time limit."""

    def decorate(test: Callable[..., Awaitable[object]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(loop: str, **arguments: Any) -> None:
            async def limited() -> None:
                with anyio.fail_after(30):
                    await test(**arguments)

            backend = "trio" if loop == "trio" else "asyncio"
            anyio.run(limited, backend=backend, backend_options={"use_uvloop": True} if loop == "uvloop" else {})

        signature = inspect.signature(test)
        loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("loop", loops)(run)

    return decorate


on_each_loop = on_loops("asyncio", "uvloop", "trio")


def in_virtual_time(main: Callable[..., Awaitable[T]]) -> Callable[..., T]:
    """Run an async test, or another function, on a clock that jumps to the next event, without threads and programs."""

    @functools.wraps(main)
    def run(*arguments: Any, **options: Any) -> T:
        return trio.run(functools.partial(main, *arguments, **options), clock=MockClock(autojump_threshold=0))

    return run
