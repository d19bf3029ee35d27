"""Requests to the service: their headers, and the connection that carries them."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import anyio

from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.connection import Connection
from shipper.delivery.no_answer import NoAnswerError
from shipper.delivery.tls import make_ssl_context
from shipper.model.version import __version__

if TYPE_CHECKING:
    from shipper.delivery.credentials import Authorization

__all__ = ["Endpoint", "NoAnswerError", "compressed", "make_ssl_context", "new_traceparent"]

# Below the four minutes after which a gateway's load balancer silently forgets an idle connection.
_IDLE_S: Final = 60.0
USER_AGENT: Final = f"shipper/{__version__}"
_REQUEST_IDS: Final = (b"x-ms-request-id", b"x-request-id", b"request-id")
_FIELD: Final = re.compile(r"[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?")  # a value of a header
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Endpoint:
    """
    Sends one request after the other over one connection, which it renews from time to time.

    Args:
        section: The settings' section, `intake` or `report`, for errors.
        ssl_context: From `make_ssl_context`.
        now: Seconds on a clock that does not jump.
    Raises:
        ConfigError: The proxy's password cannot be had.
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
        self._path_prefix = urlsplit(endpoint.base_url).path
        self._authorization: Authorization | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._max_age_s = delivery.connection_max_age_seconds
        self._now = now
        self._opened_at = self._used_at = 0.0

    def __repr__(self) -> str:
        return f"<Endpoint {self._base_url}>"

    @property
    def certificate_expires_at(self) -> float | None:
        """When the service's certificate expires, seconds since the epoch; None without TLS, or before a request."""
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
            path: Behind that of the base address.
            authorization: Token and key, fit for headers.
            traceparent: The header, if it is not empty.
            encoding: Of the body, if it has one: the header Content-Encoding.
            max_answer_bytes: The body is read up to here; a longer one costs the connection.
        Raises:
            NoAnswerError: Something failed between the name lookup and the last byte of the answer.
        """
        if authorization != self._authorization:
            self._headers = self._headers_with(authorization)
            self._authorization = authorization
        headers = self._headers.copy()
        if body or method == "POST":
            headers.append((b"Content-Length", b"%d" % len(body)))
        if traceparent:
            headers.append((b"traceparent", traceparent.encode("ascii")))
        if encoding:
            headers.append((b"Content-Encoding", encoding.encode("ascii")))
        await self._renew()
        try:
            message = await self._connection.exchange(
                method, f"{self._path_prefix}{path}".encode("ascii"), headers, body, max_answer_bytes=max_answer_bytes
            )
        finally:
            self._used_at = self._now()
        return answer_of(message.status, message.headers, message.body)

    def _headers_with(self, authorization: Authorization) -> list[tuple[bytes, bytes]]:
        """
        Return the headers that all requests with an authorization have.

        Raises:
            NoAnswerError: No header can carry the token or key.
        """
        if not all(map(_FIELD.fullmatch, authorization)):
            raise NoAnswerError(
                "local_protocol_error",
                f"no header can carry the token or the subscription key for {self._base_url}; check both",
                was_sent=False,
            )
        return [
            (b"Host", self._connection.netloc),
            (b"Content-Type", b"application/json"),
            (b"Cache-Control", b"no-cache"),
            (b"Authorization", b"Bearer " + authorization.token.encode("latin-1")),
            (b"Ocp-Apim-Subscription-Key", authorization.subscription_key.encode("latin-1")),
            (b"User-Agent", USER_AGENT.encode()),
        ]

    async def _renew(self) -> None:
        """Close an old or idle connection, so that the service's address is looked up again."""
        now = self._now()
        if now - self._opened_at >= self._max_age_s or now - self._used_at >= _IDLE_S:
            await self._connection.aclose()
        if not self._connection.is_open:
            self._opened_at = now

    async def aclose(self) -> None:
        """Close the connection; the next request opens one again."""
        await self._connection.aclose()


def compressed(body: bytes) -> bytes:
    """Compress a body with gzip, as fast as possible; the same body always gives the same bytes."""
    from isal import igzip  # needed by few

    return igzip.compress(body, 1, mtime=0)


def new_traceparent(rng: Random) -> str:
    """Make the header of a new trace: version, trace id, span id, "sampled", as in W3C Trace Context."""
    return f"00-{rng.getrandbits(128) or 1:032x}-{rng.getrandbits(64) or 1:016x}-01"


def answer_of(status: int, headers: Mapping[bytes, bytes], body: bytes) -> Answer:
    """Return what the verdict needs of an answer; the names of headers are in lower case."""
    texts = {name: value.decode("latin-1") for name, value in headers.items()}
    request_id = next((texts[name] for name in _REQUEST_IDS if name in texts), "")
    return Answer(
        status=status,
        content_type=texts.get(b"content-type", "").partition(";")[0].strip().lower(),
        retry_after=texts.get(b"retry-after", ""),
        body=body,
        date=texts.get(b"date", ""),
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else "",
    )
