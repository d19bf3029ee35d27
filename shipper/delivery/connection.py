"""
One HTTP/1.1 connection to an address: opened when it is needed, then kept for one request after the other.

A request is a write, a read and a parser in C. What the caller passes is sent as it is: no header is added, no redirect
followed, no cookie kept, and no proxy taken from the environment.
"""

from __future__ import annotations

import select
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
import httptools
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSAttribute, TLSStream

from shipper.config.secrets import resolve_secret
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.no_answer import HttpError, Progress, ProxyRefusedError, Stage, Way, no_answer
from shipper.delivery.tls import certificate_expiry, is_https, proxy_context, tls_context
from shipper.system.addresses import ascii_host

T = TypeVar("T")

_READ_BYTES: Final = 65_536
_HEAD_MAX_BYTES: Final = 65_536  # of an answer: status lines and headers, those of informational answers included
_FRAMING: Final = 8  # bytes that may frame a byte of the body: in chunks of one byte, it is six
_VERSIONS: Final = {"1.0", "1.1"}  # of HTTP; the parser accepts others, too
_CLOSED: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError)
_FAILURES: Final = (OSError, UnicodeError, anyio.EndOfStream, *_CLOSED, HttpError, ProxyRefusedError)


class Message(NamedTuple):
    """
    An answer as it came.

    Attributes:
        headers: By their names in lower case.
        is_last: The connection carries no more after it.
    """

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes
    is_last: bool


class Reached(NamedTuple):
    """
    The other end of a new connection.

    Attributes:
        address: Its IP address.
        seconds: From the lookup of the name to the connection.
    """

    address: str
    seconds: float


class Server(NamedTuple):
    """Where an address leads; the host is in lower case and ASCII."""

    is_tls: bool
    host: str
    port: int

    @property
    def host_and_port(self) -> str:
        """As in a CONNECT request."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def netloc(self) -> str:
        """As in a `Host` header: without the port of the scheme."""
        return self.host_and_port.removesuffix(":443" if self.is_tls else ":80")


def server_at(address: str) -> Server:
    """Return where a checked address leads."""
    url = urlsplit(address)
    is_tls = url.scheme == "https"
    return Server(is_tls, ascii_host(url.hostname or ""), url.port or (443 if is_tls else 80))


class Connection:
    """
    One connection after the other to the same address, at most one at a time.

    Args:
        address: Where it leads.
        limit_s: For each wait and for an exchange as a whole, beside the timeouts of the settings.
        is_service: It leads to the service, and not to a token endpoint.
    Attributes:
        certificate_expires_at: Of the last certificate that was shown, seconds since the epoch; None without TLS.
    Raises:
        ConfigError: The authorities, a certificate or the proxy's password cannot be used.
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
        # The read timeout is for each read: an answer that trickles would pass it for ever.
        self._limit_s = min(connect_s + 3 * read_s, limit_s)  # to connect, send, get head and body
        self._server = server_at(address)
        self._ssl_context = ssl_context
        self._proxy = server_at(endpoint.proxy) if endpoint.proxy else None
        self._proxy_context = None
        if self._proxy is not None and self._proxy.is_tls and ssl_context is not None:
            self._proxy_context = proxy_context(ssl_context, endpoint, section)
        self._proxy_headers = _proxy_headers(endpoint, section)
        is_forwarded = self._proxy is not None and not self._server.is_tls
        self._target_prefix = f"http://{self._server.netloc}".encode() if is_forwarded else b""
        self._extra_headers = self._proxy_headers if is_forwarded else []
        self._progress = Progress()
        self._stream: ByteStream | None = None
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
    ) -> Message:
        """
        Send a request and read the answer; a failure closes the connection.

        Args:
            target: The path and query.
            headers: All of them, known to be fit for HTTP.
            max_answer_bytes: The body is read up to here; a longer one costs the connection.
        Raises:
            NoAnswerError: There was none.
        """
        if self._stream is not None and self._arrivals.poll(0):
            await self.aclose()  # the other end has closed it, or has sent what nobody asked for
        lines = [b"%b: %b\r\n" % header for header in (*headers, *self._extra_headers)]
        head = b"%b %b%b HTTP/1.1\r\n%b\r\n" % (method.encode(), self._target_prefix, target, b"".join(lines))
        message = await self._explained(self._exchange(head + body, max_answer_bytes))
        self._progress.is_reused = True
        if message.is_last:
            await self.aclose()
        return message

    async def _explained(self, steps: Awaitable[T]) -> T:
        """
        Await steps on the connection, within the limit for all of them.

        Raises:
            NoAnswerError: They failed; the connection is closed.
        """
        try:
            with anyio.fail_after(self._limit_s):
                return await steps
        except BaseException as error:
            await self.aclose()
            if not isinstance(error, _FAILURES):
                raise
            raise no_answer(error, self._way, self._progress) from error

    async def _exchange(self, request: bytes, max_answer_bytes: int) -> Message:
        if self._stream is None:
            await self._connect()
            await self._secure()
        assert self._stream is not None
        self._progress.stage, self._progress.is_answering = Stage.SEND, False
        # The service may have answered before it closed the connection.
        with suppress(*_CLOSED), anyio.fail_after(self._way.read_s):
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
        return Message(
            answer.status,
            answer.headers,
            b"".join(answer.parts)[:max_answer_bytes],
            is_last=not (answer.is_complete and not answer.is_followed and answer.keeps_connection),
        )

    async def _receive(self, stream: ByteStream) -> bytes:
        """Read what has come; empty at the end of the connection."""
        try:
            with anyio.fail_after(self._way.read_s):
                data = await stream.receive(_READ_BYTES)
        except anyio.EndOfStream:
            return b""
        self._progress.is_answering = True
        return data

    # Opening ---------------------------------------------------------------------------------------------------------

    async def connect(self) -> Reached:
        """
        Open a connection, through the proxy if there is one; `exchange` does so by itself.

        Raises:
            NoAnswerError: It cannot be opened.
        """
        assert self._stream is None
        return await self._explained(self._connect())

    async def secure(self) -> ssl.SSLObject | None:
        """
        Agree on TLS over a connection that was just opened; None if it stays plain.

        Raises:
            NoAnswerError: There is no agreement.
        """
        return await self._explained(self._secure())

    async def _connect(self) -> Reached:
        server, proxy = self._server, self._proxy
        self._progress.begin(is_at_proxy=proxy is not None)
        began_at = anyio.current_time()
        with anyio.fail_after(self._way.connect_s):
            first = proxy or server
            self._stream = stream = await anyio.connect_tcp(first.host, first.port)
        seconds = anyio.current_time() - began_at
        address = self._watch(stream)
        if proxy is not None and proxy.is_tls:
            await self._encrypt(proxy, self._proxy_context)
        if proxy is not None and server.is_tls:
            await self._open_tunnel()
        self._progress.is_at_proxy = False
        return Reached(address, seconds)

    async def _secure(self) -> ssl.SSLObject | None:
        tls = await self._encrypt(self._server, self._ssl_context) if self._server.is_tls else None
        self.certificate_expires_at = certificate_expiry(tls)
        return tls

    def _watch(self, stream: SocketStream) -> str:
        """Watch for what arrives between requests; returns the address at the other end."""
        self._arrivals = select.poll()
        with _just_closed():
            self._arrivals.register(stream.extra(SocketAttribute.raw_socket), select.POLLIN)
            return str(stream.extra(SocketAttribute.remote_address, ("", 0))[0])

    async def _encrypt(self, server: Server, context: ssl.SSLContext | None) -> ssl.SSLObject:
        assert self._stream is not None
        self._progress.stage = Stage.HANDSHAKE
        with anyio.fail_after(self._way.connect_s):
            self._stream = await TLSStream.wrap(
                self._stream, hostname=server.host, ssl_context=context, standard_compatible=False
            )
        with _just_closed():
            return self._stream.extra(TLSAttribute.ssl_object)

    async def _open_tunnel(self) -> None:
        assert self._stream is not None
        self._progress.stage = Stage.TUNNEL
        target = self._server.host_and_port.encode()
        lines = [b"%b: %b\r\n" % header for header in ((b"Host", target), *self._proxy_headers)]
        with anyio.fail_after(self._way.read_s):
            await self._stream.send(b"CONNECT %b HTTP/1.1\r\n%b\r\n" % (target, b"".join(lines)))
        answer = AnswerParser()
        while not answer.has_head:
            answer.feed(await self._receive(self._stream))
        if not 200 <= answer.status < 300:
            raise ProxyRefusedError(answer.status)

    async def aclose(self) -> None:
        """Close the connection, in whatever state it is; the next exchange opens one again."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with anyio.move_on_after(1, shield=True):
                await stream.aclose()


@contextmanager
def _just_closed() -> Iterator[None]:
    """Translate the errors of asking a connection for its socket, if the event loop has just closed it."""
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
    """
    Parses an answer piece by piece; the methods whose names begin with `on_` are called by the parser in C.

    Attributes:
        is_followed: Something has come after the answer.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.size = 0
        self.has_head = False
        self.is_complete = False
        self.is_followed = False
        self._bytes = 0
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)  # RFC 9112 §2.2 permits it

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection may carry more after an answer that has come to its own end."""
        is_current = self._parser.get_http_version() == "1.1"
        return is_current and b"close" not in self.headers.get(b"connection", b"").lower()

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the answer."""
        return self.has_head and b"content-length" not in self.headers and b"transfer-encoding" not in self.headers

    def feed(self, data: bytes) -> None:
        """
        Parse what has come; empty at the end of the connection.

        Raises:
            HttpError: It is cut off, or not HTTP, or far more than its body.
        """
        if not data:
            raise HttpError("the connection was closed before the whole answer had come")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:
                raise HttpError("what came is not HTTP") from None
            self.is_followed = True
        self._bytes += len(data)
        if not self.is_complete and self._bytes > _HEAD_MAX_BYTES + (1 + _FRAMING) * self.size:
            raise HttpError("the head, a chunk's or the trailers of the answer do not end")

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.is_followed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it is a trailer, or of what follows
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if not self.is_complete:
            if self._parser.get_http_version() not in _VERSIONS:
                raise HttpError("the answer is of another version of HTTP")
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
