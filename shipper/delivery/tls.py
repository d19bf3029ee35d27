"""TLS: the context that the connections to an endpoint share, and why a handshake failed, in words."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from shipper.config.settings import EndpointSettings
from shipper.model.errors import ConfigError

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
# By the codes of the verification: a chain that ends with no authority that is trusted here, a certificate that is not
# for now, and one of another host.
_WAYS_OUT: Final = (
    ({18, 19, 20, 21}, "; see {}.ca_bundle"),
    ({9, 10}, "; it has to be renewed there, unless it is this machine's clock that is wrong"),
    ({62, 64}, "; check the host in {}.base_url"),
)
_NO_COMMON_VERSION: Final = re.compile(r"PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL")
_CLIENT_REFUSED: Final = re.compile(r"ALERT_(?:\w*CERTIFICATE\w*|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE)$")
_for_proxies: Final[WeakKeyDictionary[ssl.SSLContext, ssl.SSLContext]] = WeakKeyDictionary()


def is_https(address: str | None) -> bool:
    """Return whether a connection to an address, such as a proxy's that may not be there, is encrypted."""
    return address is not None and address.lower().startswith("https:")


def make_ssl_context(endpoint: EndpointSettings, section: str) -> ssl.SSLContext | None:
    """
    Make the context that all connections to an endpoint share; making one costs more than a request.

    Args:
        section: The settings' section, for errors.
    Returns:
        None if neither the address nor the proxy's is https.
    Raises:
        ConfigError: The authorities, the certificate or its key cannot be used.
    """
    return tls_context(endpoint, section) if is_https(endpoint.base_url) or is_https(endpoint.proxy) else None


def tls_context(endpoint: EndpointSettings, section: str) -> ssl.SSLContext:
    """Make a context from the settings, whatever the addresses are; arguments and errors as above."""
    try:
        return _tls_context(endpoint)
    except ConfigError as error:
        raise ConfigError(error.message, key=f"{section}.{error.key}") from error.__cause__


def without_client_certificate(endpoint: EndpointSettings) -> EndpointSettings:
    """Return the settings for peers other than the service: only the service is shown the client's certificate."""
    return replace(endpoint, client_certificate=None, client_key=None)


def proxy_context(context: ssl.SSLContext, endpoint: EndpointSettings, section: str) -> ssl.SSLContext:
    """
    Return the context for an encrypted proxy; one for all connections, as for the service.

    Args:
        context: That of the service.
    """
    if endpoint.client_certificate is None:
        return context
    if context not in _for_proxies:
        _for_proxies[context] = tls_context(without_client_certificate(endpoint), section)
    return _for_proxies[context]


def _tls_context(endpoint: EndpointSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=endpoint.ca_bundle)
    except OSError as error:  # an SSLError is one, too
        raise ConfigError(
            f"{endpoint.ca_bundle} cannot be used: {words(error)}; "
            "expected the certificates of authorities, in PEM form",
            key="ca_bundle",
        ) from error
    context.minimum_version = _VERSIONS[endpoint.tls_minimum_version]
    if endpoint.client_certificate is not None:
        _load_client_certificate(context, endpoint.client_certificate, endpoint.client_key)
    return context


def _load_client_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    # Checked one by one, as the library does not say which of the two it cannot use.
    _check_pem(certificate, b"CERTIFICATE", "client_certificate")
    key_name = "client_certificate" if key is None else "client_key"
    _check_pem(key or certificate, b"PRIVATE KEY", key_name)

    def refuse_to_ask() -> NoReturn:
        """Raise instead of asking for a password at a terminal that is not there."""
        raise ConfigError(
            f"{key or certificate} holds an encrypted key, and its password cannot be asked for; "
            "write the key without one, into a file that only its owner can read: openssl pkey -in KEY -out NEW_KEY",
            key=key_name,
        )

    try:
        context.load_cert_chain(certificate, key, password=refuse_to_ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {key or certificate} is not that of the certificate in {certificate}"
        else:
            message = f"the key in {key or certificate} or the certificate in {certificate} is damaged"
        raise ConfigError(f"{message}; write the two that belong together", key=key_name) from error


def _check_pem(path: Path, kind: bytes, key: str) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {words(error)}", key=key) from error
    if not re.search(rb"-----BEGIN [A-Z ]*%s-----" % kind, text):
        hint = "; if the key is in a file of its own, write client_key" if key == "client_certificate" else ""
        raise ConfigError(f"{path} holds no {kind.decode().lower()} in PEM form{hint}", key=key)


def tls_problem(errors: Iterable[BaseException], peer: str, section: str, *, is_service: bool) -> str:
    """
    Find the fault of the set-up that ended a handshake.

    Args:
        errors: An error and what led to it.
        peer: The address at the other end.
        section: The settings' section, for the way out.
        is_service: The peer is the service, which alone is shown a client's certificate.
    Returns:
        A sentence for a person; empty if the handshake ended for another reason, such as a closed connection.
    """
    for error in errors:
        if isinstance(error, ssl.SSLCertVerificationError):
            way_out = next((way_out for codes, way_out in _WAYS_OUT if error.verify_code in codes), "").format(section)
            return f"the certificate of {peer} is not accepted: {error.verify_message.rstrip('.')}{way_out}"
        if isinstance(error, ssl.SSLError) and _CLIENT_REFUSED.search(error.reason or ""):
            way_out = f"see {section}.client_certificate" if is_service else "only the service is shown a certificate"
            return f"{peer} does not accept this client: {words(error)}; {way_out}"
        if isinstance(error, ssl.SSLError) and _NO_COMMON_VERSION.search(error.reason or ""):
            return f"{peer} speaks no version of TLS that is accepted here; see {section}.tls_minimum_version"
    return ""


def certificate_expiry(connection: ssl.SSLObject | ssl.SSLSocket | None) -> float | None:
    """Return when the certificate of the other end expires, seconds since the epoch; None if it showed none."""
    certificate = connection.getpeercert() if connection is not None else None
    return ssl.cert_time_to_seconds(str(certificate["notAfter"])) if certificate else None


def words(error: OSError) -> str:
    """
    Describe an error of the system, without the address or path that it may hold.

    Returns:
        Such as `Connection refused`, `Name or service not known` or, of TLS, `tlsv1 alert unknown ca`.
    """
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unknown").replace("_", " ").lower()
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or type(error).__name__
    return os.strerror(error.errno)
