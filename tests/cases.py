"""Many small cases in one test: each is run, and all failures are reported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Run a test with each case, as a single test. Use it like `parametrize` for cases cheaper than a test's overhead.

    Decorators can be stacked, for every pair of cases. All cases share their fixtures. No case may skip.

    Args:
        names: The arguments of the test that come from a case; several as a tuple.
        cases: A value for each case, or a tuple with a value for each name.
    """
    keys = [names] if isinstance(names, str) else list(names)
    tuples = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert tuples, "no cases"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_cases(**fixtures: Any) -> None:
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
        run_cases.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # for pytest's fixtures
        return run_cases

    return decorate
