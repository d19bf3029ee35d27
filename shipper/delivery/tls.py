"""Creates TLS contexts from the settings, and explains failed handshakes."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

from shipper.config.settings import EndpointSettings
from shipper.model.errors import ConfigError

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
# Advice by verification codes: an untrusted CA, a certificate that is expired or not yet valid, the wrong host.
_ADVICE: Final = (
    ({18, 19, 20, 21}, "; see {}.ca_bundle"),
    ({9, 10}, "; renew it on the service, or correct this machine's clock"),
    ({62, 64}, "; check the host in {}.base_url"),
)
_NO_COMMON_VERSION: Final = re.compile(r"PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL")
_CLIENT_REFUSED: Final = re.compile(r"ALERT_(?:\w*CERTIFICATE\w*|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE_FAILURE)$")


def is_https(address: str | None) -> bool:
    """Return whether connections to an address are encrypted; False if there is no address."""
    return address is not None and address.lower().startswith("https:")


def tls_context(endpoint: EndpointSettings, section: str) -> ssl.SSLContext:
    """Create a context, which takes longer than a request; raise `ConfigError` if a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=endpoint.ca_bundle)
    except OSError as error:  # includes SSLError
        raise ConfigError(
            f"{endpoint.ca_bundle} cannot be used: {os_error_text(error)}; expected CA certificates in PEM form",
            key=f"{section}.ca_bundle",
        ) from error
    context.minimum_version = _VERSIONS[endpoint.tls_minimum_version]
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF  # otherwise, a connection that is cut ends like one that is closed
    if endpoint.client_certificate is not None:
        _load_client_certificate(context, endpoint.client_certificate, endpoint.client_key, section)
    return context


def _load_client_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None, section: str) -> None:
    # Check each of them, because the library does not report which one it cannot use.
    _check_pem(certificate, b"CERTIFICATE", f"{section}.client_certificate")
    key_name = f"{section}.client_certificate" if key is None else f"{section}.client_key"
    _check_pem(key or certificate, b"PRIVATE KEY", key_name)

    def refuse_to_ask() -> NoReturn:
        """Raise an error instead of asking for a password on the terminal."""
        raise ConfigError(
            f"{key or certificate} contains an encrypted key, which is not supported; write it unencrypted into a file "
            "that only its owner can read: openssl pkey -in KEY -out NEW_KEY",
            key=key_name,
        )

    try:
        context.load_cert_chain(certificate, key, password=refuse_to_ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {key or certificate} does not belong to the certificate in {certificate}"
        else:
            message = f"the key in {key or certificate} or the certificate in {certificate} is damaged"
        raise ConfigError(f"{message}; use a matching pair", key=key_name) from error


def _check_pem(path: Path, kind: bytes, key: str) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {os_error_text(error)}", key=key) from error
    if not re.search(rb"-----BEGIN [A-Z ]*%s-----" % kind, text):
        hint = "; if the key is in another file, set client_key" if key.endswith("client_certificate") else ""
        raise ConfigError(f"{path} contains no {kind.decode().lower()} in PEM form{hint}", key=key)


def tls_problem(errors: Iterable[BaseException], peer: str, section: str, *, is_service: bool) -> str:
    """
    Describe the permanent problem that made a handshake fail; return "" if the cause may be temporary.

    Args:
        errors: An error and its causes.
        is_service: The peer is the service; other peers do not get the client certificate.
    """
    for error in errors:
        if isinstance(error, ssl.SSLCertVerificationError):
            advice = next((advice for codes, advice in _ADVICE if error.verify_code in codes), "").format(section)
            return f"the certificate of {peer} is not trusted: {error.verify_message.rstrip('.')}{advice}"
        if isinstance(error, ssl.SSLError) and _CLIENT_REFUSED.search(error.reason or ""):
            advice = (
                f"see {section}.client_certificate" if is_service else "client certificates are for the service only"
            )
            return f"{peer} does not accept this client: {os_error_text(error)}; {advice}"
        if isinstance(error, ssl.SSLError) and _NO_COMMON_VERSION.search(error.reason or ""):
            return f"{peer} supports no TLS version that is accepted here; see {section}.tls_minimum_version"
    return ""


def certificate_expiry(connection: ssl.SSLObject | ssl.SSLSocket | None) -> float | None:
    """Return when the peer's certificate expires, seconds since the epoch; None if it has none."""
    certificate = connection.getpeercert() if connection is not None else None
    return ssl.cert_time_to_seconds(str(certificate["notAfter"])) if certificate else None


def os_error_text(error: OSError) -> str:
    """Describe a system error, such as `Connection refused`, without any address or path."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unknown").replace("_", " ").lower()
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or type(error).__name__
    return os.strerror(error.errno)
