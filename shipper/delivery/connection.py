"""
An HTTP/1.1 connection to an address: opened on demand and reused for consecutive requests.

A request is a write, a read and a parser in C. It is sent unchanged: no headers are added, no redirects followed, no
cookies stored, and no proxies taken from the environment.
"""

from __future__ import annotations

import select
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
import httptools
import structlog
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSAttribute, TLSStream
from anyio.to_thread import run_sync
from msgspec.structs import replace

from shipper.config.secrets import resolve_secret
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.no_answer import HttpError, Progress, ProxyRefusedError, Route, Stage, no_answer
from shipper.delivery.tls import certificate_expiry, tls_context
from shipper.model.errors import ConfigError
from shipper.system.addresses import ascii_host
from shipper.system.files import stat_signature

log = structlog.get_logger("delivery")

T = TypeVar("T")

_READ_BYTES: Final = 65_536
_HEAD_MAX_BYTES: Final = 65_536  # of an answer: status lines and headers, including those of informational answers
_FRAMING_BYTES: Final = 8  # maximum framing per byte of the body; chunks of one byte need six
_VERSIONS: Final = {"1.0", "1.1"}  # of HTTP; the parser accepts others
_INCOMPLETE: Final = "the connection was closed before the answer was complete"
_CLOSED: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError)
_FAILURES: Final = (OSError, UnicodeError, anyio.EndOfStream, *_CLOSED, HttpError, ProxyRefusedError)


class Peer(NamedTuple):
    """The peer of a new connection."""

    address: str
    seconds: float  # from name lookup to connection


class Server(NamedTuple):
    """The server of an address; the host is in lower case and ASCII."""

    is_tls: bool
    host: str
    port: int

    @property
    def host_and_port(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def netloc(self) -> str:
        """The value of a `Host` header, without the default port."""
        return self.host_and_port.removesuffix(":443" if self.is_tls else ":80")


def server_at(address: str) -> Server:
    url = urlsplit(address)
    is_tls = url.scheme == "https"
    return Server(is_tls, ascii_host(url.hostname or ""), url.port or (443 if is_tls else 80))


class ConnectionSettings:
    """
    The settings shared by the connections to an endpoint and to its token endpoint.

    TLS contexts are created on first use, which raises a `ConfigError` if a file cannot be used.
    """

    def __init__(self, endpoint: EndpointSettings, delivery: DeliverySettings, section: str) -> None:
        self.endpoint = endpoint
        self.delivery = delivery
        self.section = section
        self._files = [
            path for path in (endpoint.ca_bundle, endpoint.client_certificate, endpoint.client_key) if path is not None
        ]
        self._signatures = [stat_signature(path) for path in self._files]

    def context(self, *, is_service: bool) -> ssl.SSLContext:
        return self.service_context if is_service else self.other_context

    async def renew_contexts(self) -> None:
        """Create the contexts again if a file has changed; keep them while it cannot be used."""
        if self._files:
            await run_sync(self._renew_contexts, abandon_on_cancel=True)  # the file system may hang

    def _renew_contexts(self) -> None:
        signatures = [stat_signature(path) for path in self._files]
        if signatures == self._signatures:
            return
        try:
            context = tls_context(self.endpoint, self.section)
        except ConfigError as error:
            log.warning("certificates_unusable", key=error.key, message=str(error))
            return
        self._signatures = signatures
        vars(self).pop("other_context", None)
        self.service_context = context
        log.info("certificates_renewed")

    @cached_property
    def service_context(self) -> ssl.SSLContext:
        """The context for the service."""
        return tls_context(self.endpoint, self.section)

    @cached_property
    def other_context(self) -> ssl.SSLContext:
        """The context for other peers, without the client certificate."""
        if self.endpoint.client_certificate is None:
            return self.service_context
        return tls_context(replace(self.endpoint, client_certificate=None, client_key=None), self.section)


class Connection:
    """
    A connection to an address, reopened as necessary.

    Args:
        address: None = the service.
        limit_s: Limit of each wait and of a whole exchange, in addition to the configured timeouts.
    Attributes:
        certificate_expires_at: Expiry of the peer's last certificate, seconds since the epoch; None without TLS.
    Raises:
        ConfigError: The CA bundle, a certificate or the proxy password cannot be used.
    """

    def __init__(
        self, settings: ConnectionSettings, address: str | None = None, *, limit_s: float = float("inf")
    ) -> None:
        endpoint, delivery, section = settings.endpoint, settings.delivery, settings.section
        connect_s = min(delivery.connect_timeout_seconds, limit_s)
        read_s = min(delivery.read_timeout_seconds, limit_s)
        is_service = address is None
        address = endpoint.base_url if address is None else address
        self._route = Route(address, endpoint.proxy or "", section, connect_s, read_s, is_service)
        # The read timeout applies to each read, so a slowly trickling answer would never exceed it.
        self._limit_s = min(connect_s + 3 * read_s, limit_s)  # for connecting, sending, head and body
        self._server = server = server_at(address)
        self._proxy = proxy = server_at(endpoint.proxy) if endpoint.proxy else None
        self._settings, self._is_service = settings, is_service
        if server.is_tls:
            settings.context(is_service=is_service)
        if proxy is not None and proxy.is_tls:
            settings.context(is_service=False)
        self._proxy_headers = _proxy_headers(endpoint, section)
        is_forwarded = proxy is not None and not server.is_tls
        self._target_prefix = f"http://{server.netloc}".encode() if is_forwarded else b""
        self._extra_headers = self._proxy_headers if is_forwarded else []
        self._progress = Progress()
        self._stream: ByteStream | None = None
        self._tcp: _Tcp | None = None  # the stream, or the one below TLS
        self._arrivals = select.poll()
        self.certificate_expires_at: float | None = None

    @property
    def netloc(self) -> bytes:
        """The value of the `Host` header."""
        return self._server.netloc.encode()

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    async def exchange(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, max_answer_bytes: int
    ) -> Answer:
        """
        Send a request and read the answer; a failure closes the connection.

        Args:
            target: Path and query.
            headers: All headers, valid for HTTP.
            max_answer_bytes: The body is truncated here; after a longer one, the connection is closed.
        Raises:
            NoAnswerError: There was no complete answer.
        """
        if self._stream is not None and self._arrivals.poll(0):
            await self.aclose()  # the peer has closed it, or has sent unsolicited data
        lines = [b"%b: %b\r\n" % header for header in (*headers, *self._extra_headers)]
        head = b"%b %b%b HTTP/1.1\r\n%b\r\n" % (method.encode(), self._target_prefix, target, b"".join(lines))
        answer, is_last = await self._with_limit(self._exchange(head + body, max_answer_bytes))
        self._progress.is_reused = True
        if is_last:
            await self.aclose()
        return answer

    async def _with_limit(self, steps: Awaitable[T]) -> T:
        """Await something within the total limit; on failure, close the connection and explain the error."""
        try:
            with anyio.fail_after(self._limit_s):
                return await steps
        except BaseException as error:
            await self.aclose()
            if not isinstance(error, _FAILURES):
                raise
            raise no_answer(error, self._route, self._progress) from error

    async def _exchange(self, request: bytes, max_answer_bytes: int) -> tuple[Answer, bool]:
        """Return the answer, and whether the connection cannot be reused."""
        if self._stream is None:
            await self._connect()
            await self._secure()
        assert self._stream is not None
        self._progress.stage, self._progress.is_answering = Stage.SEND, False
        with anyio.fail_after(self._route.read_s):
            await self._stream.send(request)
        self._progress.stage = Stage.ANSWER
        answer = AnswerParser()
        while not answer.is_complete and answer.size < max_answer_bytes:
            data = await self._receive(self._stream)
            if not data and answer.ends_with_connection:
                break
            answer.feed(data)
        if answer.status == 407 and self._proxy is not None:
            raise ProxyRefusedError(407)
        assert self._tcp is not None
        if self._tcp.is_cut and 200 <= answer.status < 300:
            raise HttpError("the connection was closed before the request was complete")
        is_last = not (answer.is_complete and not answer.has_extra_data and answer.keeps_connection)
        return Answer.of(answer.status, answer.headers, b"".join(answer.parts)[:max_answer_bytes]), is_last

    async def _receive(self, stream: ByteStream) -> bytes:
        """Receive data; b"" at the end of the connection, which TLS must have announced (RFC 9112 §9.8)."""
        try:
            with anyio.fail_after(self._route.read_s):
                data = await stream.receive(_READ_BYTES)
        except anyio.EndOfStream as end:
            if isinstance(end.__context__, ssl.SSLError):
                raise HttpError(_INCOMPLETE) from None
            return b""
        self._progress.is_answering = True
        return data

    # Opening ---------------------------------------------------------------------------------------------------------

    async def connect(self) -> Peer:
        """Open the connection, through the proxy if configured. `exchange` does this itself, with the same errors."""
        assert self._stream is None
        return await self._with_limit(self._connect())

    async def secure(self) -> ssl.SSLObject | None:
        """Negotiate TLS on a new connection; return None for plain HTTP."""
        return await self._with_limit(self._secure())

    async def _connect(self) -> Peer:
        server, proxy = self._server, self._proxy
        self._progress.begin(is_at_proxy=proxy is not None)
        started_at = anyio.current_time()
        with anyio.fail_after(self._route.connect_s):
            first = proxy or server
            self._stream = stream = await anyio.connect_tcp(first.host, first.port)
        seconds = anyio.current_time() - started_at
        address = self._watch(stream)
        if proxy is not None and proxy.is_tls:
            await self._encrypt(proxy, is_service=False)
        if proxy is not None and server.is_tls:
            await self._open_tunnel()
        self._progress.is_at_proxy = False
        return Peer(address, seconds)

    async def _secure(self) -> ssl.SSLObject | None:
        tls = await self._encrypt(self._server, is_service=self._is_service) if self._server.is_tls else None
        self.certificate_expires_at = certificate_expiry(tls)
        return tls

    def _watch(self, stream: SocketStream) -> str:
        """Watch for data between requests, and keep what arrives during them; return the peer's address."""
        self._arrivals = select.poll()
        with _translate_closed():
            self._arrivals.register(stream.extra(SocketAttribute.raw_socket), select.POLLIN)
            self._stream = self._tcp = _Tcp(stream)
            return str(stream.extra(SocketAttribute.remote_address, ("", 0))[0])

    async def _encrypt(self, peer: Server, *, is_service: bool) -> ssl.SSLObject:
        assert self._stream is not None
        self._progress.stage = Stage.HANDSHAKE
        with anyio.fail_after(self._route.connect_s):
            await self._settings.renew_contexts()
            context = self._settings.context(is_service=is_service)
            self._stream = await TLSStream.wrap(
                self._stream, hostname=peer.host, ssl_context=context, standard_compatible=False
            )
        with _translate_closed():
            return self._stream.extra(TLSAttribute.ssl_object)

    async def _open_tunnel(self) -> None:
        assert self._stream is not None
        self._progress.stage = Stage.TUNNEL
        target = self._server.host_and_port.encode()
        lines = [b"%b: %b\r\n" % header for header in ((b"Host", target), *self._proxy_headers)]
        with anyio.fail_after(self._route.read_s):
            await self._stream.send(b"CONNECT %b HTTP/1.1\r\n%b\r\n" % (target, b"".join(lines)))
        answer = AnswerParser()
        while not answer.has_head:
            answer.feed(await self._receive(self._stream))
        if not 200 <= answer.status < 300:
            raise ProxyRefusedError(answer.status)

    async def aclose(self) -> None:
        """Close the connection in any state; the next exchange reopens it."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with anyio.move_on_after(1, shield=True):
                await stream.aclose()


class _Tcp(ByteStream):
    """
    A TCP connection from which what the peer has sent can be read even if it does not read what is sent to it.

    A service may refuse a request and reset the connection before it has read the body. So sending never fails, and as
    event loops close the socket when they cannot send, the answer is then read from a copy of it.

    Attributes:
        is_cut: Not everything was sent.
    """

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        original = stream.extra(SocketAttribute.raw_socket)
        self._copy = socket.fromfd(original.fileno(), original.family, original.type)
        self.is_cut = False

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._stream.extra_attributes

    async def send(self, item: bytes) -> None:
        try:
            await self._stream.send(item)
        except _CLOSED:
            self.is_cut = True

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive(self, max_bytes: int = _READ_BYTES) -> bytes:
        try:
            return await self._stream.receive(max_bytes)
        except _CLOSED:
            with suppress(OSError):
                if data := self._copy.recv(max_bytes, socket.MSG_DONTWAIT):
                    self.is_cut = True
                    return data
            raise

    async def aclose(self) -> None:
        self._copy.close()
        await self._stream.aclose()


@contextmanager
def _translate_closed() -> Iterator[None]:
    """Translate the errors of accessing the socket of a connection that the event loop has just closed."""
    try:
        yield
    except (AttributeError, ValueError):
        raise anyio.BrokenResourceError from None


def _proxy_headers(endpoint: EndpointSettings, section: str) -> list[tuple[bytes, bytes]]:
    if endpoint.proxy_password is None:
        return []
    password = resolve_secret(endpoint.proxy_password, key=f"{section}.proxy_password")
    user = f"{endpoint.proxy_username}:{password}".encode()
    return [(b"Proxy-Authorization", b"Basic " + b64encode(user))]


class AnswerParser:
    """Parses an answer incrementally; the `on_` methods are callbacks of the C parser."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.size = 0
        self.has_head = False
        self.is_complete = False
        self.has_extra_data = False  # the peer sent data after the answer
        self._bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)  # RFC 9112 §2.2 permits it

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection can be reused after a complete answer."""
        is_current = self._parser.get_http_version() == "1.1"
        return is_current and b"close" not in self.headers.get(b"connection", b"").lower()

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the answer."""
        return self.has_head and b"content-length" not in self.headers and b"transfer-encoding" not in self.headers

    def feed(self, data: bytes) -> None:
        """Parse received data, b"" at the end of the connection; raise if it is not a valid answer."""
        if not data:
            raise HttpError(_INCOMPLETE)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:
                raise HttpError("the answer is not HTTP") from None
            self.has_extra_data = True
        self._bytes += len(data)
        if not self.is_complete and self._bytes > _HEAD_MAX_BYTES + (1 + _FRAMING_BYTES) * self.size:
            raise HttpError("the head, a chunk header or the trailers of the answer are too long")

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.has_extra_data = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # otherwise a trailer, or part of extra data
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if not self.is_complete:
            if self._parser.get_http_version() not in _VERSIONS:
                raise HttpError("the answer has an unsupported HTTP version")
            self.status = self._parser.get_status_code()
            self.has_head = True

    def on_body(self, part: bytes) -> None:
        if not self.is_complete:
            self.parts.append(part)
            self.size += len(part)

    def on_message_complete(self) -> None:
        if self.status < 200 and self.status != 101:  # informational
            self.headers.clear()
            self.has_head = False
        else:
            self.is_complete = True
