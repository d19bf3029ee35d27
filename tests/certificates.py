"""A test authority, TLS contexts of servers with its certificates, and the files of a client."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def context_of(authority: trustme.CA, *hosts: str, **options: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*hosts, **options).configure_cert(context)
    return context


def demanding(context: ssl.SSLContext, authority: trustme.CA, version: str) -> ssl.SSLContext:
    """Require a client certificate and one version of TLS."""
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = context.maximum_version = VERSIONS[version]
    return context


def asking(context: ssl.SSLContext, authority: trustme.CA) -> ssl.SSLContext:
    """Request a client certificate, but do not require it."""
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


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
