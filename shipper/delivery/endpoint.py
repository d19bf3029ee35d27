"""Sends requests to the service, with their headers."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import anyio

from shipper.delivery.answer import Answer
from shipper.delivery.connection import Connection, ConnectionSettings
from shipper.delivery.no_answer import NoAnswerError
from shipper.model.version import __version__

if TYPE_CHECKING:
    from shipper.delivery.credentials import Authorization

__all__ = ["ConnectionSettings", "Endpoint", "NoAnswerError", "compress", "new_traceparent"]

# Below the four minutes after which a gateway's load balancer silently drops an idle connection.
_IDLE_S: Final = 60.0
USER_AGENT: Final = f"shipper/{__version__}"
_FIELD: Final = re.compile(r"[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?")  # a header value


class Endpoint:
    """
    Sends requests one at a time over one connection, which it renews from time to time.

    Raises:
        ConfigError: The CA bundle, a certificate or the proxy password cannot be used.
    """

    def __init__(self, settings: ConnectionSettings, *, now: Callable[[], float] = anyio.current_time) -> None:
        self._connection = Connection(settings)
        self._base_url = settings.endpoint.base_url
        self._path_prefix = urlsplit(self._base_url).path
        self._authorization: Authorization | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._max_age_s = settings.delivery.connection_max_age_seconds
        self._now = now
        self._opened_at = self._used_at = 0.0

    def __repr__(self) -> str:
        return f"<Endpoint {self._base_url}>"

    @property
    def certificate_expires_at(self) -> float | None:
        """When the service's certificate expires, seconds since the epoch; None without TLS or a connection so far."""
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
            path: Appended to the base URL.
            traceparent, encoding: The headers `traceparent` and `Content-Encoding`; empty = none.
            max_answer_bytes: The body is truncated here; after a longer one, the connection is closed.
        Raises:
            NoAnswerError: There was no complete answer, or the authorization is not valid in a header.
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
            return await self._connection.exchange(
                method, f"{self._path_prefix}{path}".encode("ascii"), headers, body, max_answer_bytes=max_answer_bytes
            )
        finally:
            self._used_at = self._now()

    def _headers_with(self, authorization: Authorization) -> list[tuple[bytes, bytes]]:
        """Return the headers of all requests with an authorization; raise if it is not valid in a header."""
        if not all(map(_FIELD.fullmatch, authorization)):
            raise NoAnswerError(
                "local_protocol_error",
                f"the token or the subscription key for {self._base_url} is not valid in a header; check both",
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
        """Close an old or idle connection, so that the next request resolves the host name again."""
        now = self._now()
        if now - self._opened_at >= self._max_age_s or now - self._used_at >= _IDLE_S:
            await self._connection.aclose()
        if not self._connection.is_open:
            self._opened_at = now

    async def aclose(self) -> None:
        """Close the connection; the next request reopens it."""
        await self._connection.aclose()


def compress(body: bytes) -> bytes:
    """Compress a body with gzip at the fastest level; the result is deterministic."""
    from isal import igzip  # imported here because it is rarely needed

    return igzip.compress(body, 1, mtime=0)


def new_traceparent(rng: Random) -> str:
    """Make the W3C Trace Context header of a new trace: version, trace id, span id, "sampled"."""
    return f"00-{rng.getrandbits(128) or 1:032x}-{rng.getrandbits(64) or 1:016x}-01"
