"""Fixtures for tests with real sockets: event loops, certificates and name lookup."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.stage.certificates import context_of
from tests.stage.endpoints import Names
from tests.stage.loops import LOOPS, Run, runner


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return runner(request.param, limit_s=20)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(scope="session")
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    return context_of(authority, "127.0.0.1", "::1")


@pytest.fixture(scope="session")
def client(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A client's `certificate` and `key`, both in `one` file, and the encrypted key: `sealed`."""
    folder = tmp_path_factory.mktemp("client")
    leaf = authority.issue_cert("client@example.com", common_name="the-client")
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    leaf.private_key_and_cert_chain_pem.write_to_path(str(folder / "one.pem"))
    key = load_pem_private_key(leaf.private_key_pem.bytes(), None)
    sealed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    (folder / "sealed.pem").write_bytes(sealed)
    return SimpleNamespace(
        certificate=folder / "certificate.pem",
        key=folder / "key.pem",
        one=folder / "one.pem",
        sealed=folder / "sealed.pem",
    )


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)
