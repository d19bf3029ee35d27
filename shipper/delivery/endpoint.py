"""
One connection to the service, through httpx's transport: the only place that knows the HTTP library.

The transport is used without the client around it. So nothing is there that we would have to switch off: no
redirects, no cookies, no proxies from the environment, no headers beside the documented ones.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import anyio
import httpx

from shipper import __version__
from shipper.config import DeliverySettings, EndpointSettings
from shipper.delivery.no_answer import NoAnswerError, Way, no_answer
from shipper.delivery.progress import Progress
from shipper.delivery.tls import certificate_expiry, is_https, make_ssl_context, tls_context
from shipper.delivery.verdicts import Answer
from shipper.errors import ConfigError
from shipper.secrets import resolve_secret

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
        self._line = _Line(endpoint.base_url, endpoint, delivery, section=section, ssl_context=ssl_context)
        self._base_url = endpoint.base_url
        self._host = _url(endpoint.base_url, key=f"{section}.base_url").netloc
        self._urls: dict[str, httpx.URL] = {}
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
        return self._line.certificate_expires_at

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
        headers = self._headers.copy()
        if body or method == "POST":
            headers.append((b"Content-Length", b"%d" % len(body)))
        if traceparent:
            headers.append((b"traceparent", traceparent.encode("ascii")))
        if encoding:
            headers.append((b"Content-Encoding", encoding.encode("ascii")))
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self._base_url + path)
        await self._renew()
        try:
            return await self._line.exchange(method, url, headers, body, max_answer_bytes=max_answer_bytes)
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
            await self._line.aclose()
        if not self._line.is_open:
            self._opened_at = now

    async def aclose(self) -> None:
        """Close the connection; the next request opens one again."""
        await self._line.aclose()


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
    Post a form, such as to a token endpoint, over a connection of its own.

    Args:
        url: Its scheme may be another one than the endpoint's.
        endpoint: The proxy, the authorities and the client's certificate; not the address.
        ssl_context: From `make_ssl_context`.
    Returns:
        An answer with up to 64 KiB of the body.
    Raises:
        NoAnswerError: As for a request; after 30 s at most.
        ConfigError: The address is none, or a password, certificate or key cannot be used.
    """
    target = _url(url, key=f"{section}.oauth2.token_url")
    body = urlencode(fields).encode()
    headers = [
        (b"Host", target.netloc),
        (b"Content-Type", b"application/x-www-form-urlencoded"),
        (b"Accept", b"application/json"),
        (b"Content-Length", b"%d" % len(body)),
        _AGENT,
    ]
    line = _Line(url, endpoint, delivery, section=section, ssl_context=ssl_context, limit_s=_FORM_LIMIT_S)
    try:
        return await line.exchange("POST", target, headers, body, max_answer_bytes=_FORM_ANSWER_BYTES)
    finally:
        await line.aclose()


def compressed(body: bytes) -> bytes:
    """Compress a body with gzip, as fast as possible; the same body always gives the same bytes."""
    from isal import igzip  # needed by few

    return igzip.compress(body, 1, mtime=0)


def new_traceparent(rng: Random) -> str:
    """Make a trace of its own for an attempt: version, trace id, span id, "sampled", as in W3C Trace Context."""
    return f"00-{rng.getrandbits(128) or 1:032x}-{rng.getrandbits(64) or 1:016x}-01"


class _Line:
    """
    At most one connection, opened when it is needed, and what happens on it.

    Args:
        address: Where it leads, for errors.
        limit_s: For each wait and for an exchange as a whole, beside the timeouts of the settings.
    """

    def __init__(
        self,
        address: str,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        section: str,
        ssl_context: ssl.SSLContext | None,
        limit_s: float = float("inf"),
    ) -> None:
        if ssl_context is None and (is_https(address) or is_https(endpoint.proxy)):
            ssl_context = tls_context(endpoint, section)
        connect_s = min(delivery.connect_timeout_seconds, limit_s)
        read_s = min(delivery.read_timeout_seconds, limit_s)
        self._way = Way(address, endpoint.proxy or "", section, connect_s, read_s)
        # The transport's timeouts are for each read: an answer that trickles would pass them for ever.
        self._limit_s = min(connect_s + 3 * read_s, limit_s)  # to connect, send, get head and body
        self._ssl_context = ssl_context
        self._proxy = _proxy(endpoint, section, ssl_context)
        self._progress = Progress(has_proxy=self._proxy is not None)
        timeouts = {"connect": connect_s, "read": read_s, "write": read_s, "pool": connect_s}
        self._extensions = {"timeout": timeouts, "trace": self._progress.note}
        self._transport: httpx.AsyncHTTPTransport | None = None
        self.certificate_expires_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def exchange(
        self, method: str, url: httpx.URL, headers: list[tuple[bytes, bytes]], body: bytes, *, max_answer_bytes: int
    ) -> Answer:
        """
        Send a request and read the answer; a failure closes the connection.

        Raises:
            NoAnswerError: There was none.
        """
        self._progress.begin()
        if self._transport is None:
            self._transport = self._new_transport()
        request = httpx.Request(
            method, url, headers=headers, stream=httpx.ByteStream(body), extensions=self._extensions
        )
        try:
            with anyio.fail_after(self._limit_s):
                response = await self._transport.handle_async_request(request)
                answer_body = await _read_up_to(response, max_answer_bytes)
                await response.aclose()
            if response.status_code == 407 and self._proxy is not None:
                raise httpx.ProxyError("407")
        except BaseException as error:
            await self.aclose()
            if not isinstance(error, httpx.TransportError | OSError | UnicodeError):
                raise
            # What is no HTTP is quoted by the library, be it a header of ours.
            raise no_answer(_kind(error), error, self._way, self._progress) from (
                None if isinstance(error, httpx.ProtocolError) else error
            )
        stream = response.extensions.get("network_stream")
        if not self._progress.is_reused and stream is not None:
            self.certificate_expires_at = certificate_expiry(stream.get_extra_info("ssl_object"))
        self._progress.end(stream)
        return _answer(response, answer_body)

    def _new_transport(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=self._ssl_context or False,  # False only where there is no TLS: a plain address
            trust_env=False,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None),
            proxy=self._proxy,
        )

    async def aclose(self) -> None:
        """Close the connection, in whatever state it is; the next exchange opens one again."""
        transport, self._transport = self._transport, None
        stream, self._progress.socket = self._progress.socket, None
        with anyio.move_on_after(1, shield=True):
            if transport is not None:
                await transport.aclose()
            if stream is not None:  # one that was not connected to its end is not known to the transport
                await stream.aclose()


def _proxy(endpoint: EndpointSettings, section: str, ssl_context: ssl.SSLContext | None) -> httpx.Proxy | None:
    if endpoint.proxy is None:
        return None
    auth = None
    if endpoint.proxy_password is not None:
        auth = (endpoint.proxy_username, resolve_secret(endpoint.proxy_password, key=f"{section}.proxy_password"))
    url = _url(endpoint.proxy, key=f"{section}.proxy")
    return httpx.Proxy(url, auth=auth, ssl_context=ssl_context if url.scheme == "https" else None)


def _url(address: str, *, key: str) -> httpx.URL:
    try:
        return httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{address!r} is no address: {error}", key=key) from None


async def _read_up_to(response: httpx.Response, max_bytes: int) -> bytes:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    parts: list[bytes] = []
    size = 0
    async for part in response.stream:
        parts.append(part)
        size += len(part)
        if size >= max_bytes:
            break
    return b"".join(parts)[:max_bytes]


def _answer(response: httpx.Response, body: bytes) -> Answer:
    headers = {name.lower(): value.decode("latin-1") for name, value in response.headers.raw}
    request_id = next((headers[name] for name in _REQUEST_IDS if name in headers), "")
    return Answer(
        status=response.status_code,
        content_type=headers.get(b"content-type", "").partition(";")[0].strip().lower(),
        retry_after=headers.get(b"retry-after", ""),
        body=body,
        date=headers.get(b"date", ""),
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else "",
    )


def _kind(error: Exception) -> str:
    """`ConnectTimeout` -> `connect_timeout`: the library's class names, in the metrics' spelling."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if not isinstance(error, httpx.TransportError):
        return "read_error"
    name = type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
