"""Validation of addresses in settings and of host names in requests."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from shipper.model.errors import ConfigError

_PATH_SAFE: Final = "/%:@!$&'()*+,;=-._~"  # characters not escaped in a path
_HOST_NAME_LENGTH: Final = 262  # with a port
_HOST_NAME: Final = r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
_DOTTED_QUAD: Final = re.compile(r"\d+\.\d+\.\d+\.\d+", re.ASCII)
_HOST: Final = re.compile(rf"(?:\[(?P<literal>[0-9A-Fa-f:.]+)\]|(?P<name>{_HOST_NAME}))(?::[0-9]{{1,5}})?", re.ASCII)


def checked_base_url(address: str, *, allow_plaintext: bool) -> str:
    """
    Return a base URL without a trailing slash, ready for a path to be added.

    Args:
        address: Scheme, host, and optionally a port and the path of a gateway.
        allow_plaintext: Permit `http://` to machines other than this one.
    Raises:
        ConfigError: With the key `base_url`. Credentials in the address are rejected and not shown.
    """
    url = _split(address, key="base_url", allow_plaintext=allow_plaintext)
    return f"{url.scheme}://{url.netloc.rstrip(':')}{quote(url.path.rstrip('/'), safe=_PATH_SAFE)}"


def check_address(address: str, *, key: str, allow_plaintext: bool, allow_path: bool = True) -> None:
    """Validate the address in a setting (`key`), as `checked_base_url` does; it is used unchanged."""
    url = _split(address, key=key, allow_plaintext=allow_plaintext)
    if not allow_path and url.path.strip("/"):
        raise _invalid(f"{address!r} must not contain a path", key)


def _split(address: str, *, key: str, allow_plaintext: bool) -> SplitResult:
    if "@" in address:
        raise _invalid("an address must not contain credentials", key)
    try:
        url = urlsplit(address)
        host, _ = url.hostname, url.port
        ascii_host(host or "")
    except ValueError as exc:
        raise _invalid(f"{address!r}: {exc}", key) from None
    if url.scheme not in ("http", "https"):
        # The address is not shown: it may be a misplaced secret.
        raise _invalid("it does not begin with https://", key)
    if not host or any(character.isspace() or not character.isprintable() for character in address):
        raise _invalid(f"{address!r} does not name a host", key)
    if any(mark in address for mark in "?#"):
        raise _invalid("an address must not contain a query or fragment", key)  # not shown: it may contain a secret
    if url.scheme == "http" and not allow_plaintext and not is_loopback(host):
        raise ConfigError(
            f"{address!r} would send the credentials in clear text; use https:// "
            "or, if the connection is protected in another way, set allow_plaintext = true",
            key=key,
        )
    return url


def _invalid(problem: str, key: str) -> ConfigError:
    examples = {"proxy": "http://proxy.example.com:3128", "oauth2.token_url": "https://login.example.com/token"}
    example = examples.get(key, "https://intake.example.com")
    hint = "; use proxy_username and proxy_password" if key == "proxy" and "credentials" in problem else ""
    return ConfigError(f"{problem}; expected an address such as {example}{hint}", key=key)


def check_listen_address(address: str, *, key: str) -> None:
    """Raise ConfigError unless a listen address is HOST:PORT, or empty for none."""
    try:
        if address:
            parse_listen_address(address)
    except ValueError:
        message = f"{address!r} is not a listen address; expected HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464"
        raise ConfigError(f'{message}, or "" for none', key=key) from None


def parse_listen_address(address: str) -> tuple[str, int]:
    """Split a listen address into host and port; raise ValueError if it is invalid."""
    url = urlsplit(f"//{address}")
    if not url.hostname or url.port is None or url.netloc != address or "@" in address:
        raise ValueError(address)
    return url.hostname, url.port


def check_host_names(names: Iterable[str], *, key: str) -> None:
    """Raise ConfigError unless all are plain host names, without ports or patterns."""
    for name in names:
        if len(name) > _HOST_NAME_LENGTH or not re.fullmatch(_HOST_NAME, name):
            raise ConfigError(f"{name!r} is not a host name; expected one such as shipper.monitoring.svc", key=key)


def host_of(header: str) -> str | None:
    """Return the host in a `Host` header, in lower case and without port and final dot; None if it is invalid."""
    match = _HOST.fullmatch(header) if len(header) <= _HOST_NAME_LENGTH else None
    return match and (match["literal"] or match["name"].lower().removesuffix("."))


def ascii_host(host: str) -> str:
    """Return a host in ASCII; raise ValueError if it cannot be encoded or is an invalid IP address."""
    if not host.isascii():
        import idna  # rarely needed

        return idna.encode(host, uts46=True).decode()
    if ":" in host or _DOTTED_QUAD.fullmatch(host):
        ipaddress.ip_address(host)
    return host


def is_address(host: str) -> bool:
    """Return whether a host is an address literal rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is 127.0.0.0/8, ::1 or `localhost`; names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
