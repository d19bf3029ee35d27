"""The addresses in the settings: what a base address may look like, and what counts as this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from shipper.errors import ConfigError


def checked_base_url(written: str, *, allow_plaintext: bool) -> str:
    """
    Tidy a base address.

    Args:
        written: Scheme, host and perhaps a port.
        allow_plaintext: Permit `http://` to other machines than this one.
    Returns:
        The address without a trailing slash, ready for a path to be added.
    Raises:
        ConfigError: With the key `base_url`. Credentials in the address are refused and not shown.
    """

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{what}; expected an address such as https://intake.example.com", key="base_url")

    if "@" in written:
        raise wrong("an address must not hold credentials")
    try:
        url = urlsplit(written)
        host, _ = url.hostname, url.port
    except ValueError as exc:
        raise wrong(f"{written!r}: {exc}") from None
    if url.scheme not in ("http", "https"):
        raise wrong(f"{written!r} does not begin with https://")
    if not host or any(character.isspace() or not character.isprintable() for character in written):
        raise wrong(f"{written!r} names no host")
    if url.path.strip("/") or any(mark in written for mark in "?#"):
        raise wrong(f"{written!r} goes on after the host; paths are added, a query or fragment has no place")
    if url.scheme == "http" and not allow_plaintext and not is_loopback(host):
        raise ConfigError(
            f"{written!r} would send the credentials in clear text; use https://, "
            "or, if the way there is protected otherwise, set allow_plaintext = true",
            key="base_url",
        )
    return f"{url.scheme}://{url.netloc.rstrip(':')}"


def is_loopback(host: str) -> bool:
    """Say whether a host is this machine: 127.0.0.0/8, ::1 or `localhost`; no name is looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
