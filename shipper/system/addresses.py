"""The addresses in the settings: what a base address may look like, and what counts as this machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from shipper.model.errors import ConfigError

_PATH: Final = "/%:@!$&'()*+,;=-._~"  # what needs no escape in one
_HOST_NAME_LENGTH: Final = 262  # with a port
_HOST_NAME: Final = r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
_DOTTED_QUAD: Final = re.compile(r"\d+\.\d+\.\d+\.\d+", re.ASCII)
_HOST: Final = re.compile(rf"(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<name>{_HOST_NAME}))(?::[0-9]{{1,5}})?", re.ASCII)


def checked_base_url(written: str, *, allow_plaintext: bool) -> str:
    """
    Tidy a base address.

    Args:
        written: Scheme, host, perhaps a port, and perhaps the path of a gateway.
        allow_plaintext: Permit `http://` to other machines than this one.
    Returns:
        The address without a trailing slash, ready for a path to be added.
    Raises:
        ConfigError: With the key `base_url`. Credentials in the address are refused and not shown.
    """

    url = _split(written, key="base_url", allow_plaintext=allow_plaintext)
    return f"{url.scheme}://{url.netloc.rstrip(':')}{quote(url.path.rstrip('/'), safe=_PATH)}"


def check_address(written: str, *, key: str, allow_plaintext: bool, is_whole: bool = True) -> None:
    """
    Check an address that is used as it is written.

    Args:
        key: The setting, relative to its section, for errors.
        allow_plaintext: Permit `http://` to other machines than this one.
        is_whole: It may have a path.
    Raises:
        ConfigError: It is none. Credentials in the address are refused and not shown.
    """
    url = _split(written, key=key, allow_plaintext=allow_plaintext)
    if not is_whole and url.path.strip("/"):
        raise _wrong(f"{written!r} goes on after the host", key)


def _split(written: str, *, key: str, allow_plaintext: bool) -> SplitResult:
    if "@" in written:
        raise _wrong("an address must not hold credentials", key)
    try:
        url = urlsplit(written)
        host, _ = url.hostname, url.port
        ascii_host(host or "")
    except ValueError as exc:
        raise _wrong(f"{written!r}: {exc}", key) from None
    if url.scheme not in ("http", "https"):
        # Not shown: it may be a secret that was written in this place.
        raise _wrong("it does not begin with https://", key)
    if not host or any(character.isspace() or not character.isprintable() for character in written):
        raise _wrong(f"{written!r} names no host", key)
    if any(mark in written for mark in "?#"):
        raise _wrong("an address with a query or fragment has no place there", key)  # it may hold a secret
    if url.scheme == "http" and not allow_plaintext and not is_loopback(host):
        raise ConfigError(
            f"{written!r} would send the credentials in clear text; use https://, "
            "or, if the way there is protected otherwise, set allow_plaintext = true",
            key=key,
        )
    return url


def _wrong(what: str, key: str) -> ConfigError:
    examples = {"proxy": "http://proxy.example.com:3128", "oauth2.token_url": "https://login.example.com/token"}
    example = examples.get(key, "https://intake.example.com")
    hint = "; write proxy_username and proxy_password beside it" if key == "proxy" and "credentials" in what else ""
    return ConfigError(f"{what}; expected an address such as {example}{hint}", key=key)


def check_listen_address(written: str, *, key: str) -> None:
    """
    Check an address to listen on; empty = none.

    Raises:
        ConfigError: It is not HOST:PORT.
    """
    try:
        if written:
            listen_address(written)
    except ValueError:
        what = f"{written!r} is no address to listen on; expected HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464"
        raise ConfigError(f'{what}, or "" for none', key=key) from None


def listen_address(written: str) -> tuple[str, int]:
    """
    Part an address to listen on into host and port.

    Raises:
        ValueError: It is none.
    """
    url = urlsplit(f"//{written}")
    if not url.hostname or url.port is None or url.netloc != written or "@" in written:
        raise ValueError(written)
    return url.hostname, url.port


def check_host_names(written: Iterable[str], *, key: str) -> None:
    """
    Check names of hosts.

    Raises:
        ConfigError: One of them is none, such as a name with a port, or a pattern.
    """
    for name in written:
        if len(name) > _HOST_NAME_LENGTH or not re.fullmatch(_HOST_NAME, name):
            raise ConfigError(f"{name!r} is not a host name; expected one such as shipper.monitoring.svc", key=key)


def host_of(header: str) -> str | None:
    """
    Return the host that a `Host` header names, without its port.

    Returns:
        A name in lower case without a dot at its end, or what is in brackets; None if it is neither.
    """
    found = _HOST.fullmatch(header) if len(header) <= _HOST_NAME_LENGTH else None
    if found is None:
        return None
    return found["literal"] or found["name"].lower().removesuffix(".")


def ascii_host(host: str) -> str:
    """
    Return a host as it goes over the wire.

    Raises:
        ValueError: It looks like an IP address and is none, or is a name that cannot be written in ASCII.
    """
    if not host.isascii():
        import idna  # needed by few

        return idna.encode(host, uts46=True).decode()
    if ":" in host or _DOTTED_QUAD.fullmatch(host):
        ipaddress.ip_address(host)
    return host


def is_address(host: str) -> bool:
    """Return whether a host is an address literal and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: 127.0.0.0/8, ::1 or `localhost`; no name is resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
