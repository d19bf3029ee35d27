"""Many small cases in one test: each of them is tried, and those that fail are all named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Try a test with each case, as one test: what `parametrize` is, where a case takes less than a test of its own costs.

    It may stand above another one, for every pair of cases. What fixtures give is the same for all. None may skip.

    Args:
        names: Those arguments of the test that come from a case; several in a tuple.
        cases: One value each, or a tuple of one for each name.
    """
    keys = [names] if isinstance(names, str) else list(names)
    tuples = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert tuples, "no case at all"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tried(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            for values in tuples:
                case = dict(zip(keys, values, strict=True))
                try:
                    test(**fixtures, **case)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as failure:
                    failure.add_note(
                        "in the case " + ", ".join(f"{key} = {value!r:.500}" for key, value in case.items())
                    )
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(tuples)} cases of {test.__name__}", failures)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        tried.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # tells what fixtures it wants
        return tried

    return decorate
