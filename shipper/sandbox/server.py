"""Runs the sandbox on a loopback address: for the command, and in a thread for the demo and the tests."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from signal import SIGINT, SIGTERM, Signals
from typing import Any, Final, NamedTuple, Self

import anyio
import msgspec
from anyio import create_task_group, open_signal_receiver

from shipper.model.errors import ConfigError
from shipper.sandbox.app import create_app
from shipper.sandbox.control import Control
from shipper.sandbox.effects import TRANSPORT_EXTENSION
from shipper.sandbox.faults import FaultScript
from shipper.sandbox.options import Repeats, SandboxOptions
from shipper.sandbox.service import RequestEntry, Service
from shipper.sandbox.store import EventStore
from shipper.system.serving import BoundedProtocol, Server, address_of, listen, running_in_thread

_KEEP_ALIVE_SECONDS: Final = 120  # well above the time that an idle sender keeps a connection
_GRACE_SECONDS: Final = 3


class Access(NamedTuple):
    """Everything that a client of a running sandbox needs."""

    base_url: str
    subscription_key: str
    token: str


def configuration_snippet(access: Access) -> str:
    """Write the two sections of a configuration that point at the sandbox, as TOML."""
    # A JSON string is a TOML basic string, too.
    base_url, subscription_key, token = (msgspec.json.encode(value).decode() for value in access)
    entries = f"base_url = {base_url}\nsubscription_key = {subscription_key}\ntoken = {token}\n"
    return f"[intake]\n{entries}\n[report]\n{entries}"


async def serve(
    options: SandboxOptions,
    script: FaultScript,
    *,
    clock: Callable[[], float],
    announce: Callable[[Access], None],
    observe: Callable[[RequestEntry], None] | None = None,
) -> None:
    """
    Serve until SIGINT or SIGTERM; a second one does not wait for open connections.

    Args:
        options: Where to listen, what to keep, and how to answer.
        script: What goes wrong from the start.
        clock: Seconds since the epoch.
        announce: Called once, when connections are accepted and a signal would already be heeded.
        observe: Called after each request but those to the controls.
    Raises:
        ConfigError: The host is not loopback, the port is in use, or the store cannot be opened.
    """
    with (
        _prepared(options, script, clock, observe) as (server, listener, access, _),
        open_signal_receiver(SIGINT, SIGTERM) as signals,
    ):
        announce(access)
        async with create_task_group() as group:
            group.start_soon(_stop_at_signal, server, signals)
            await server.serve(sockets=[listener])
            group.cancel_scope.cancel()


class SandboxThread:
    """
    A sandbox in a daemon thread, from `__enter__` to `__exit__`.

    Args:
        options: Where to listen and how to answer; by default on any free port.
        script: What goes wrong from the start; by default nothing.
        clock: Seconds since the epoch.
    Raises:
        ConfigError: On entering, as `serve`.
        ShipperError: On entering, if the server does not come up.
    """

    base_url: str
    subscription_key: str
    token: str
    store: EventStore

    def __init__(
        self,
        options: SandboxOptions | None = None,
        script: FaultScript | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._options = options or SandboxOptions(port=0)
        self._script = script or FaultScript()
        self._clock = clock
        self._exit = ExitStack()

    def __repr__(self) -> str:
        return f"<SandboxThread {getattr(self, 'base_url', 'not started')}>"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            server, listener, access, store = stack.enter_context(_prepared(self._options, self._script, self._clock))
            stack.enter_context(running_in_thread(server, listener, name="sandbox"))
            self._exit = stack.pop_all()
        self.base_url, self.subscription_key, self.token = access
        self.store = store
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def access(self) -> Access:
        """What `configuration_snippet` takes."""
        return Access(self.base_url, self.subscription_key, self.token)


class _Server(Server):
    """A server that tells the service when it is about to end."""

    def __init__(self, app: Callable[..., Any], stopping: anyio.Event, **options: Any) -> None:
        super().__init__(app, **options)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping.set()
        await super().shutdown(sockets)


class _Protocol(BoundedProtocol):
    """A protocol that also hands out its transport, for the faults that cut a connection off, or wait for long."""

    head_bytes = 131_072  # the longest token that shipper sends has half of it
    body_bytes = 256 * 1024 * 1024  # the gateway has a limit of its own, which is lower and told in its way
    pipelined = 1000
    request_seconds = 300.0
    answer_seconds = 86_400.0
    clients = 512

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT_EXTENSION: {"transport": self.transport}}


@contextmanager
def _prepared(
    options: SandboxOptions,
    script: FaultScript,
    clock: Callable[[], float],
    observe: Callable[[RequestEntry], None] | None = None,
) -> Iterator[tuple[_Server, socket.socket, Access, EventStore]]:
    with (
        _listen(options.host, options.port) as listener,
        EventStore(options.store_path, counts_repeats=options.repeats is Repeats.ACCEPT) as store,
    ):
        base_url = address_of(listener)
        service = Service(options, store, script, clock, observe)
        server = _Server(
            create_app(service, Control(service, base_url=base_url)),
            service.stopping,
            http=_Protocol,
            date_header=False,  # the application writes it, by the service's clock
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        access = Access(base_url, options.subscription_key, service.tokens.issue())
        yield server, listener, access, store


def _listen(host: str, port: int) -> socket.socket:
    try:
        is_loopback = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"{host!r} is not a loopback address; the sandbox has no TLS and a known key, use 127.0.0.1 or ::1",
            key="host",
            source="sandbox",
        )
    return listen(host, port, key="port", source="sandbox")


async def _stop_at_signal(server: _Server, signals: AsyncIterator[Signals]) -> None:
    async for _ in signals:
        server.stop()
