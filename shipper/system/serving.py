"""HTTP serving: the listening socket, a server without signal handlers, and limits on clients."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar, Final

import anyio
import uvicorn
from httptools import HttpParserError
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shipper.model.errors import ConfigError, ShipperError
from shipper.system.addresses import host_of, is_address

_REFUSAL: Final = "Requests to this address must name it by an IP address, as localhost, or by a configured host name"
_NO_SNIFFING: Final = {"X-Content-Type-Options": "nosniff"}
_PIECE_BYTES: Final = 4096
_BACKLOG: Final = 512
_PROTECTED_SECONDS: Final = 0.05
_ACCEPT_RETRY_SECONDS: Final = 0.01
_TICK_SECONDS = 1.0
_START_LIMIT_SECONDS = 10
_JOIN_LIMIT_SECONDS = 10


class Server(uvicorn.Server):
    """uvicorn's server without its logs and signal handlers; `up` is set once connections are accepted."""

    def __init__(self, app: Callable[..., Any], **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                **options,
            )
        )
        self.up = threading.Event()
        self._accepting: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stopping = anyio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections up to the limit; further ones wait in the kernel."""
        await super().startup([])
        self._loop = asyncio.get_running_loop()
        self._accepting = [self._loop.create_task(self._accept(listener)) for listener in sockets or ()]
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for listener in sockets or ():  # uvicorn would wait 0.1 s, even without connections
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # the client has gone, or no file descriptor is free
                await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            with suppress(OSError), ExitStack() as stack:
                stack.enter_context(connection)
                while not self._make_room():  # noqa: ASYNC110 connections also become evictable as time passes
                    await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                await loop.connect_accepted_socket(self._protocol, connection)
                stack.pop_all()  # owned by the transport now

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _make_room(self) -> bool:
        """Return whether another connection is allowed; if not, close one that can be evicted."""
        connections = [item for item in self.server_state.connections if isinstance(item, BoundedProtocol)]
        if not connections or len(connections) < connections[0].clients:
            return True
        evictable = [connection for connection in connections if connection.is_evictable]
        if evictable:
            min(evictable, key=BoundedProtocol.eviction_order).transport.abort()
        return False

    async def main_loop(self) -> None:
        """Tick once a second instead of ten times, which is most of the cost of an idle server."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), _TICK_SECONDS)

    def stop(self) -> None:
        """Shut down; a second call does not wait for open connections. Thread-safe."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self.stopping.set)


class BoundedProtocol(HttpToolsProtocol):
    """
    uvicorn's protocol, with limits enforced before the application sees a request.

    A request above a limit is refused and its connection closed. When a new client waits, the connection that has been
    idle longest is closed; if none is idle, the one whose answer has taken longest. New connections are protected for a
    moment, so that a probe is answered even under load.
    """

    head_bytes: ClassVar[int]  # limit of the request line and headers, exceeded by one piece at most
    head_lines: ClassVar[int] = 100  # limit of headers per request
    body_bytes: ClassVar[int]  # limit of a request's body including its framing; 0 refuses all bodies
    pipelined: ClassVar[int] = 8  # limit of requests waiting for the answer to an earlier one
    request_seconds: ClassVar[float]  # from the connection, or the last answer, to the end of a request
    answer_seconds: ClassVar[float]  # from the end of the request until the client has read the answer
    clients: ClassVar[int]  # limit of simultaneous connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._refusal = 400, ""
        self._deadline: asyncio.TimerHandle | None = None
        self._begin_head()
        self._set_deadline()
        self._protected_until = self.loop.time() + _PROTECTED_SECONDS

    def data_received(self, data: bytes) -> None:
        """Parse a head in pieces, so that limits are enforced soon after they are exceeded."""
        start = 0
        while start < len(data) and not self.transport.is_closing():
            piece = data[start : start + _PIECE_BYTES] if self._in_head else data[start:]
            start += len(piece)
            self._bytes += len(piece)
            if self._in_head and self._bytes > self.head_bytes:
                self._refusal = 431, f"The head of the request exceeds {self.head_bytes} bytes."
                self.send_400_response("")
            elif not self._in_head and self._bytes > self.body_bytes + _PIECE_BYTES:
                self._refusal = 413, f"The body of the request exceeds {self.body_bytes} bytes."
                self.send_400_response("")
            else:
                super().data_received(piece)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.head_lines:
            self._refuse(431, f"The request has more than {self.head_lines} headers.")

    def on_headers_complete(self) -> None:
        self._in_head, self._bytes = False, 0
        if not self.body_bytes and any(_announces_body(name, value) for name, value in self.headers):
            self._refuse(413, "Requests with a body are not accepted here.")
        if len(self.pipeline) >= self.pipelined:
            self._refuse(429, f"More than {self.pipelined} requests are pipelined on this connection.")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._begin_head()
        self._set_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Send the message of `_refuse` or, for malformed HTTP, uvicorn's."""
        status, reason = self._refusal
        text = f"{reason or msg}\n".encode("ascii")
        head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
        if self.cycle is None or self.cycle.response_complete:  # otherwise it would end up within another answer
            self.transport.write(STATUS_LINE[status] + head + text)
        self.transport.close()

    def _refuse(self, status: int, reason: str) -> None:
        """Abort parsing; the protocol then calls `send_400_response`."""
        self._refusal = status, reason
        raise HttpParserError(reason)

    def _begin_head(self) -> None:
        self._in_head, self._bytes = True, 0

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _set_deadline(self) -> None:
        self._clear_deadline()
        if not self.transport.is_closing():
            seconds = self.request_seconds if self._is_idle else self.answer_seconds
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def is_evictable(self) -> bool:
        return self.loop.time() > self._protected_until and not self.transport.is_closing()

    def eviction_order(self) -> tuple[bool, float]:
        """Return a sort key; the connection with the least is evicted first."""
        return not self._is_idle, self._deadline.when() if self._deadline else 0.0


def _announces_body(name: bytes, value: bytes) -> bool:
    return name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0") != b"")


class HostGuard:
    """
    ASGI middleware that accepts only requests to an address literal, `localhost` or a configured name.

    A web page can make its own host name resolve to this machine (DNS rebinding) and then read our responses as its
    own. The browser still sends that host name; an address literal cannot be rebound.

    Args:
        names: Accepted in addition to `localhost`.
        advice: How to configure another name; ends the error message.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = (), advice: str) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().removesuffix(".") for name in names)}
        self._refusal = PlainTextResponse(f"{_REFUSAL}; {advice}\n", status_code=421, headers=_NO_SNIFFING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if self._accepts(scope) else self._refusal
        await app(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        host = host_of(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        return host is not None and (host in self._names or is_address(host))


def listen(host: str, port: int, *, key: str, source: str = "") -> socket.socket:
    """
    Bind a listening socket.

    Call it before anything else starts, so that a port in use is reported as a configuration error, and the number
    chosen for port 0 is known.

    Raises:
        ConfigError: The address cannot be used; `key` and `source` name the setting.
    """
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error}"
        message = f"{host}:{port} {reason}; choose another port (0 = any free one)"
        raise ConfigError(message, key=key, source=source) from error


@contextmanager
def running_in_thread(server: Server, listener: socket.socket, *, name: str) -> Iterator[None]:
    """Serve in a daemon thread; raise ShipperError if the server does not start."""
    thread = threading.Thread(target=server.run, args=([listener],), name=name, daemon=True)
    thread.start()
    try:
        if not server.up.wait(_START_LIMIT_SECONDS):
            raise ShipperError(f"the {name} at {address_of(listener)} did not start; see the messages above")
        yield
    finally:
        server.stop()
        thread.join(_JOIN_LIMIT_SECONDS)


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
