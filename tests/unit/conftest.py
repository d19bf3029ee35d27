"""A store, and a folder with a store and a follower that a test starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shipper.state.store import Store
from tests.unit.follower_bench import Bench


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path)) as store:
        yield store


@pytest.fixture
def unmasked() -> Iterator[None]:
    """Let new files be open to all, unless they are made private."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.stop()
    bench.store.close()
