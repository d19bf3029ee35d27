"""Event loops, a state, a certificate, and name lookup."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from shipper.state.store import Store
from tests.certificates import context_of
from tests.stage.endpoints import Names
from tests.stage.pipelines import Maker, accounted_store


@pytest.fixture(scope="session")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    return context_of(authority, "127.0.0.1", "::1")


@pytest.fixture(params=["http", "https"])
def context(request: pytest.FixtureRequest, server_context: ssl.SSLContext) -> ssl.SSLContext | None:
    """The context of a server with or without TLS."""
    return server_context if request.param == "https" else None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A state whose counts must add up at the end."""
    with accounted_store(tmp_path) as store:
        yield store


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, store: Store) -> Maker:
    return Maker(monkeypatch, store)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)
