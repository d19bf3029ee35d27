"""TLS contexts of servers, with certificates signed by a test authority."""

from __future__ import annotations

import ssl
from typing import Any

import trustme

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
