"""Running sandboxes: one per file and set of options, reset for each test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shipper.sandbox.options import SandboxOptions
from tests.stage.sandbox.driver import Sandbox

Start = Callable[..., Sandbox]


@pytest.fixture(scope="module")
def _running() -> Iterator[dict[SandboxOptions, Sandbox]]:
    running: dict[SandboxOptions, Sandbox] = {}
    yield running
    # Each takes a moment to stop.
    with ThreadPoolExecutor(max(len(running), 1)) as pool:
        list(pool.map(Sandbox.__exit__, running.values()))


@pytest.fixture
def start(_running: dict[SandboxOptions, Sandbox]) -> Start:
    """Start a sandbox with options; tests of a file with the same options share it, reset for each."""

    def started(**options: object) -> Sandbox:
        wanted = SandboxOptions(**{"port": 0, **options})
        if wanted not in _running:
            _running[wanted] = Sandbox(wanted).__enter__()
        _running[wanted].renew()
        return _running[wanted]

    return started


@pytest.fixture
def sandbox(start: Start) -> Sandbox:
    """A sandbox with the defaults."""
    return start()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test if the server printed something, because a user would see it in the terminal."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []
