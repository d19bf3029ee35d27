"""
At most one connection to an address: opened by the HTTP library's transport when it is needed, then kept.

The transport is used without the client around it. So nothing is there that we would have to switch off: no
redirects, no cookies, no proxies from the environment, no headers beside the documented ones.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import anyio
import httpcore
import httpx

from shipper.config.secrets import resolve_secret
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.http import VERSIONS, KeptConnection, Message, NotHttpError, is_kept, told_by
from shipper.delivery.no_answer import Way, no_answer
from shipper.delivery.progress import Progress, Stage
from shipper.delivery.tls import certificate_expiry, is_https, proxy_context, tls_context
from shipper.model.errors import ConfigError

_ProtocolErrors: Final = (httpx.ProtocolError, httpcore.ProtocolError)
_TransportErrors: Final = (
    *(httpx.TransportError, OSError, UnicodeError),
    *(httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError),
)

_parsed = lru_cache(maxsize=64)(httpx.URL)


class Connection:
    """
    One connection after the other, and what happens on them.

    Args:
        address: Where it leads, for errors.
        limit_s: For each wait and for an exchange as a whole, beside the timeouts of the settings.
        is_service: It leads to the service.
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
        is_service: bool = True,
    ) -> None:
        if ssl_context is None and (is_https(address) or is_https(endpoint.proxy)):
            ssl_context = tls_context(endpoint, section)
        connect_s = min(delivery.connect_timeout_seconds, limit_s)
        read_s = min(delivery.read_timeout_seconds, limit_s)
        self._way = Way(address, endpoint.proxy or "", section, connect_s, read_s, is_service)
        # The transport's timeouts are for each read: an answer that trickles would pass them for ever.
        self._limit_s = min(connect_s + 3 * read_s, limit_s)  # to connect, send, get head and body
        self._ssl_context = ssl_context
        self._proxy = _proxy(endpoint, section, ssl_context)
        self._progress = Progress(has_proxy=self._proxy is not None)
        timeouts = {"connect": connect_s, "read": read_s, "write": read_s, "pool": connect_s}
        self._extensions = {"timeout": timeouts, "trace": self._progress.note}
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._kept: KeptConnection | None = None
        self._keeps = self._proxy is None  # through a proxy, each request has more to it
        self.certificate_expires_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def distrust_headers(self) -> None:
        """Have the library check the headers of the next request: they are new."""
        self._kept = None

    async def exchange(
        self, method: str, url: str, headers: Sequence[tuple[bytes, bytes]], body: bytes, *, max_answer_bytes: int
    ) -> Message:
        """
        Send a request and read the answer; a failure closes the connection.

        Args:
            headers: All of them; but for numbers and the like, the same as last time, or `distrust_headers` was called.
            max_answer_bytes: The body is read up to here; a longer one costs the connection.
        Raises:
            NoAnswerError: There was none.
        """
        if self._kept is not None and not self._kept.is_silent:
            await self.aclose()
        self._progress.begin(max_answer_bytes)
        kept, target = self._kept, _parsed(url)
        try:
            with anyio.fail_after(self._limit_s):
                if kept is None:
                    message = await self._exchange_through_library(method, target, headers, body, max_answer_bytes)
                else:
                    message = await kept.exchange(
                        method, target.raw_path, headers, body, max_answer_bytes=max_answer_bytes
                    )
            if message.status == 407 and self._proxy is not None:
                raise httpx.ProxyError("407")
        except BaseException as error:
            await self.aclose()
            if not isinstance(error, _TransportErrors):
                raise
            self._keeps = self._keeps and not isinstance(error, NotHttpError)
            # What is no HTTP is quoted by the library, be it a header of ours.
            raise no_answer(_kind(error), error, self._way, self._progress) from (
                None if isinstance(error, _ProtocolErrors) else error
            )
        if message.is_last and kept is not None:  # the library knows of its own answers
            await self.aclose()
        return message

    async def _exchange_through_library(
        self, method: str, url: httpx.URL, headers: Sequence[tuple[bytes, bytes]], body: bytes, max_answer_bytes: int
    ) -> Message:
        if self._transport is None:
            self._transport = self._new_transport()
        request = httpx.Request(
            method, url, headers=headers, stream=httpx.ByteStream(body), extensions=self._extensions
        )
        try:
            response = await self._transport.handle_async_request(request)
        except AttributeError:  # a connection that was just closed has no socket any more, and the library asks for it
            is_opening = self._progress.stage is not Stage.REQUEST
            raise (httpx.ConnectError if is_opening else httpx.ReadError)("the connection was closed") from None
        version = response.extensions.get("http_version", b"").decode().removeprefix("HTTP/")
        if version not in VERSIONS:
            raise httpx.RemoteProtocolError("the answer is of another version of HTTP")
        answer_body = await _read_up_to(response, max_answer_bytes)
        await response.aclose()
        answer_headers = {name.lower(): value for name, value in response.headers.raw}
        stream = response.extensions.get("network_stream")
        if not self._progress.is_reused and stream is not None:
            self.certificate_expires_at = certificate_expiry(told_by(stream, "ssl_object"))
        self._progress.end()
        is_last = len(answer_body) >= max_answer_bytes or not is_kept(version, answer_headers)
        if self._keeps and stream is not None and not is_last:
            self._kept = KeptConnection(stream, self._way.read_s)
        return Message(response.status_code, answer_headers, answer_body, is_last=is_last)

    def _new_transport(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(
            verify=self._ssl_context or False,  # False only where there is no TLS: a plain address
            trust_env=False,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None),
            proxy=self._proxy,
        )

    async def aclose(self) -> None:
        """Close the connection, in whatever state it is; the next exchange opens one again."""
        self._kept = None
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
    url = parsed_url(endpoint.proxy, key=f"{section}.proxy")
    if url.scheme != "https":
        return httpx.Proxy(url, auth=auth)
    assert ssl_context is not None
    return httpx.Proxy(url, auth=auth, ssl_context=proxy_context(ssl_context, endpoint, section))


def parsed_url(address: str, *, key: str) -> httpx.URL:
    """
    Raises:
        ConfigError: It is none.
    """
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


def _kind(error: Exception) -> str:
    """`ConnectTimeout` -> `connect_timeout`: the library's class names, in the metrics' spelling."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError | UnicodeError):
        return "read_error"
    name = "RemoteProtocolError" if isinstance(error, NotHttpError) else type(error).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
