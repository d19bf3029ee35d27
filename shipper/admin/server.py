"""Serves what a running shipper shows of itself, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shipper.addresses import listen_address
from shipper.admin.app import Admin
from shipper.serving import HostGuard, Server, address_of, listen, running_in_thread
from shipper.telemetry.board import Board

log = structlog.get_logger("admin")

_GRACE_SECONDS = 1
_CLIENTS_MAX: Final = 32  # at a time: they take descriptors, which the inputs need, too
_PATIENCE_SECONDS: Final = 10.0


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, for some clients at a time: of too many, the one that has been idle longest goes."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_request()
        if len(self.connections) > _CLIENTS_MAX:
            idle = [each for each in self.connections if isinstance(each, _Protocol) and each._waiting is not None]
            longest = min(idle, key=lambda each: each._waiting.when() if each._waiting else 0.0)
            longest._stop_waiting()  # it is still counted for a moment, but is not to be chosen again
            longest.transport.abort()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(_PATIENCE_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


@contextmanager
def serving(
    address: str,
    board: Board,
    directory: Path,
    *,
    hosts: Iterable[str],
    wall_time: Callable[[], float],
    now: Callable[[], float],
) -> Iterator[None]:
    """
    Serve while this is entered.

    Args:
        address: HOST:PORT.
        directory: The state directory.
        hosts: Names to answer to, beside the host of the address, `localhost` and address literals.
    Raises:
        ConfigError: The address cannot be had.
    """
    host, port = listen_address(address)
    with listen(host, port, key="admin.listen") as listener:
        app = Admin(board, directory, wall_time=wall_time, now=now).app()
        server = Server(
            HostGuard(app, names=[host, *hosts], advice="list further names in admin.hosts"),
            http=_Protocol,
            backlog=_CLIENTS_MAX,  # so many are accepted at a stroke, before the first of them can be cut off
            loop="asyncio",
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        with running_in_thread(server, listener, name="admin server"):
            log.info("admin_listening", address=address_of(listener))
            yield
