"""Serving HTTP on an address of this machine: the socket, and a server that leaves signals alone."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from shipper.addresses import host_of, is_address
from shipper.errors import ConfigError, ShipperError

_REFUSAL: Final = (
    "This address answers only requests that name it by an IP address, as localhost, or by a name it knows"
)
_NO_SNIFFING: Final = {"X-Content-Type-Options": "nosniff"}
_BACKLOG = 2048
_TICK_SECONDS = 1.0
_START_LIMIT_SECONDS = 10
_JOIN_LIMIT_SECONDS = 10


class Server(uvicorn.Server):
    """
    uvicorn's server without its logs, and without its signal handlers: it ends the process by the signal, and here that
    is others' business.

    Args:
        options: Of `uvicorn.Config`.
    Attributes:
        up: Set when connections are accepted.
    """

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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self.up.set()

    async def main_loop(self) -> None:
        """Tick once a second instead of ten times, which is most of what a server costs that nobody asks."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _TICK_SECONDS)

    def stop(self) -> None:
        """End; asked for once more, without waiting for open connections. From any thread."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._ending.set)


class HostGuard:
    """
    An application that answers only requests to an address literal or to a name of its own.

    A web page can have its own name resolved to this machine (DNS rebinding) and then reads what is served here as if
    it came from its own server. The browser still names that host; an address literal cannot be rebound.

    Args:
        names: Beside `localhost`.
        advice: What is to be done for another name, in words.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str] = (), advice: str) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower().removesuffix(".") for name in names)}
        self._refusal = PlainTextResponse(f"{_REFUSAL}; {advice}\n", status_code=421, headers=_NO_SNIFFING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if self._is_own(scope) else self._refusal
        await app(scope, receive, send)

    def _is_own(self, scope: Scope) -> bool:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        host = host_of(hosts[0].decode("latin-1")) if len(hosts) == 1 else None
        return host is not None and (host in self._names or is_address(host))


def listen(host: str, port: int, *, key: str, source: str = "") -> socket.socket:
    """
    Bind before anything else runs, so that a taken port is an error of the set-up and port 0 gets its number.

    Args:
        key, source: What is to be changed if the address cannot be had, for the error.
    Raises:
        ConfigError: It cannot.
    """
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = "is in use by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error}"
        message = f"{host}:{port} {reason}; choose another port, 0 takes any free one"
        raise ConfigError(message, key=key, source=source) from error


@contextmanager
def running_in_thread(server: Server, listener: socket.socket, *, name: str) -> Iterator[None]:
    """
    Serve in a daemon thread.

    Args:
        name: Of the thread, and for the error.
    Raises:
        ShipperError: It does not come up.
    """
    thread = threading.Thread(target=server.run, args=([listener],), name=name, daemon=True)
    thread.start()
    try:
        if not server.up.wait(_START_LIMIT_SECONDS):
            raise ShipperError(f"the {name} at {address_of(listener)} did not start; see the lines above")
        yield
    finally:
        server.stop()
        thread.join(_JOIN_LIMIT_SECONDS)


def address_of(listener: socket.socket) -> str:
    """Write where somebody listens, as an address of HTTP."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
