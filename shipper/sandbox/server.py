"""Runs the sandbox on a loopback address: in the foreground, or in a thread for the demo and tests."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM, Signals
from typing import Final, NamedTuple

import msgspec
from anyio import create_task_group, open_signal_receiver

from shipper.model.errors import ConfigError
from shipper.sandbox.app import create_app
from shipper.sandbox.control import Control
from shipper.sandbox.effects import TRANSPORT_EXTENSION
from shipper.sandbox.faults import FaultScript
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.service import RequestEntry, Service
from shipper.sandbox.store import EventStore
from shipper.system.addresses import is_loopback
from shipper.system.serving import BoundedProtocol, Server, address_of, listen, running_in_thread

_KEEP_ALIVE_SECONDS: Final = 120  # longer than a sender keeps an idle connection
_GRACE_SECONDS: Final = 3


class Access(NamedTuple):
    """The address and credentials that a client needs."""

    base_url: str
    subscription_key: str
    token: str


def configuration_snippet(access: Access) -> str:
    """Return the TOML sections `intake` and `report` for a sandbox."""
    # JSON strings are valid TOML.
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
    Serve until SIGINT or SIGTERM; after a second signal, do not wait for open connections.

    Args:
        announce: Called once the server accepts connections and handles signals.
        observe: Called after each request except those to the controls.
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


@contextmanager
def sandbox_in_thread(
    options: SandboxOptions, script: FaultScript | None = None, *, clock: Callable[[], float]
) -> Iterator[tuple[Access, EventStore]]:
    """Run a sandbox in a daemon thread; raise `ConfigError` as `serve`, or `ShipperError` if it does not start."""
    with (
        _prepared(options, script or FaultScript(), clock) as (server, listener, access, store),
        running_in_thread(server, listener, name="sandbox"),
    ):
        yield access, store


class _Protocol(BoundedProtocol):
    """A protocol that exposes its transport to faults, with time limits that allow long delays."""

    head_bytes = 131_072  # twice the longest token that shipper sends
    body_bytes = 256 * 1024 * 1024  # the gateway's limit is lower, and has its own error message
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
) -> Iterator[tuple[Server, socket.socket, Access, EventStore]]:
    with (
        _listen(options.host, options.port) as listener,
        EventStore(options.store_path, counts_repeats=options.repeats == "accept") as store,
    ):
        base_url = address_of(listener)
        service = Service(options, store, script, clock, observe)
        server = Server(
            create_app(service, Control(service, base_url=base_url)),
            http=_Protocol,
            date_header=False,  # the application adds it, with the service's time
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        service.stopping = server.stopping
        access = Access(base_url, options.subscription_key, service.tokens.issue())
        yield server, listener, access, store


def _listen(host: str, port: int) -> socket.socket:
    if not is_loopback(host):
        raise ConfigError(
            f"{host!r} is not a loopback address; use 127.0.0.1 or ::1, as the sandbox has no TLS and a well-known key",
            key="host",
            source="sandbox",
        )
    return listen(host, port, key="port", source="sandbox")


async def _stop_at_signal(server: Server, signals: AsyncIterator[Signals]) -> None:
    async for _ in signals:
        server.stop()
