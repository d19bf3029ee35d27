"""What is sent to the service, and with which headers: one request after the other over one connection."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import anyio

from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.connection import Connection, parsed_url
from shipper.delivery.http import Message
from shipper.delivery.no_answer import NoAnswerError
from shipper.delivery.tls import make_ssl_context, without_client_certificate
from shipper.delivery.verdicts import Answer
from shipper.model.version import __version__

if TYPE_CHECKING:
    from shipper.delivery.credentials import Authorization

__all__ = ["Endpoint", "NoAnswerError", "compressed", "make_ssl_context", "new_traceparent", "post_form"]

# Below the four minutes after which a gateway's load balancer silently forgets an idle connection.
_IDLE_S: Final = 60.0
_FORM_LIMIT_S: Final = 30.0
_FORM_ANSWER_BYTES: Final = 65_536
_AGENT: Final = (b"User-Agent", f"shipper/{__version__}".encode())
_REQUEST_IDS: Final = (b"x-ms-request-id", b"x-request-id", b"request-id")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Endpoint:
    """
    Sends one request after the other over one connection.

    Args:
        section: The settings' section, `intake` or `report`, for errors.
        ssl_context: From `make_ssl_context`.
        now: Seconds on a clock that does not jump.
    Raises:
        ConfigError: The address is none, or the proxy's password cannot be had.
    """

    def __init__(
        self,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        section: str,
        ssl_context: ssl.SSLContext | None,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._connection = Connection(endpoint.base_url, endpoint, delivery, section=section, ssl_context=ssl_context)
        self._base_url = endpoint.base_url
        self._host = parsed_url(endpoint.base_url, key=f"{section}.base_url").netloc
        self._authorization: Authorization | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._max_age_s = delivery.connection_max_age_seconds
        self._now = now
        self._opened_at = self._used_at = 0.0

    def __repr__(self) -> str:
        return f"<Endpoint {self._base_url}>"

    @property
    def certificate_expires_at(self) -> float | None:
        """When the certificate expires that the service showed last, seconds since the epoch; None without TLS."""
        return self._connection.certificate_expires_at

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        authorization: Authorization,
        traceparent: str = "",
        encoding: str = "",
        max_answer_bytes: int,
    ) -> Answer:
        """
        Send a request and read the answer.

        Args:
            authorization: Token and key, fit for headers.
            traceparent: The header, if it is not empty.
            encoding: Of the body, if it has one: the header Content-Encoding.
            max_answer_bytes: The body is read up to here; a longer one costs the connection.
        Raises:
            NoAnswerError: Anything between the name lookup and the last byte of the answer went wrong.
        """
        if authorization != self._authorization:
            self._headers = self._headers_with(authorization)
            self._authorization = authorization
            self._connection.distrust_headers()
        headers = self._headers.copy()
        if body or method == "POST":
            headers.append((b"Content-Length", b"%d" % len(body)))
        if traceparent:
            headers.append((b"traceparent", traceparent.encode("ascii")))
        if encoding:
            headers.append((b"Content-Encoding", encoding.encode("ascii")))
        await self._renew()
        url = self._base_url + path
        try:
            return _answer(
                await self._connection.exchange(method, url, headers, body, max_answer_bytes=max_answer_bytes)
            )
        finally:
            self._used_at = self._now()

    def _headers_with(self, authorization: Authorization) -> list[tuple[bytes, bytes]]:
        return [
            (b"Host", self._host),
            (b"Content-Type", b"application/json"),
            (b"Cache-Control", b"no-cache"),
            (b"Authorization", b"Bearer " + authorization.token.encode("latin-1")),
            (b"Ocp-Apim-Subscription-Key", authorization.subscription_key.encode("latin-1")),
            _AGENT,
        ]

    async def _renew(self) -> None:
        """Close the connection from time to time, so that the service's address is looked up again."""
        now = self._now()
        if now - self._opened_at >= self._max_age_s or now - self._used_at >= _IDLE_S:
            await self._connection.aclose()
        if not self._connection.is_open:
            self._opened_at = now

    async def aclose(self) -> None:
        """Close the connection; the next request opens one again."""
        await self._connection.aclose()


async def post_form(
    url: str,
    fields: Mapping[str, str],
    *,
    endpoint: EndpointSettings,
    delivery: DeliverySettings,
    ssl_context: ssl.SSLContext | None,
    section: str = "intake",
) -> Answer:
    """
    Post a form to a token endpoint, over a connection of its own; a client's certificate is for the service alone.

    Args:
        url: Its scheme may be another one than the endpoint's.
        endpoint: The proxy and the authorities; not the address.
        ssl_context: From `make_ssl_context`.
    Returns:
        An answer with up to 64 KiB of the body.
    Raises:
        NoAnswerError: As for a request; after 30 s at most.
        ConfigError: The address is none, or the authorities or a password cannot be used.
    """
    if endpoint.client_certificate is not None:
        endpoint, ssl_context = without_client_certificate(endpoint), None  # one of its own is made for the connection
    body = urlencode(fields).encode()
    headers = [
        (b"Host", parsed_url(url, key=f"{section}.oauth2.token_url").netloc),
        (b"Content-Type", b"application/x-www-form-urlencoded"),
        (b"Accept", b"application/json"),
        (b"Content-Length", b"%d" % len(body)),
        _AGENT,
    ]
    connection = Connection(
        url, endpoint, delivery, section=section, ssl_context=ssl_context, limit_s=_FORM_LIMIT_S, is_service=False
    )
    try:
        return _answer(await connection.exchange("POST", url, headers, body, max_answer_bytes=_FORM_ANSWER_BYTES))
    finally:
        await connection.aclose()


def compressed(body: bytes) -> bytes:
    """Compress a body with gzip, as fast as possible; the same body always gives the same bytes."""
    from isal import igzip  # needed by few

    return igzip.compress(body, 1, mtime=0)


def new_traceparent(rng: Random) -> str:
    """Make a trace of its own for an attempt: version, trace id, span id, "sampled", as in W3C Trace Context."""
    return f"00-{rng.getrandbits(128) or 1:032x}-{rng.getrandbits(64) or 1:016x}-01"


def _answer(message: Message) -> Answer:
    headers = {name: value.decode("latin-1") for name, value in message.headers.items()}
    request_id = next((headers[name] for name in _REQUEST_IDS if name in headers), "")
    return Answer(
        status=message.status,
        content_type=headers.get(b"content-type", "").partition(";")[0].strip().lower(),
        retry_after=headers.get(b"retry-after", ""),
        body=message.body,
        date=headers.get(b"date", ""),
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else "",
    )
