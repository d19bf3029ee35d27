"""Serves the admin endpoints in a separate thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from shipper.status.admin.app import Admin
from shipper.status.live import Board
from shipper.status.watchdog import Watchdog
from shipper.system.addresses import parse_listen_address
from shipper.system.serving import BoundedProtocol, HostGuard, Server, address_of, listen, running_in_thread

log = structlog.get_logger("admin")

_GRACE_SECONDS = 1


class _Protocol(BoundedProtocol):
    """Limits for browsers, probes and scrapers. Connections use file descriptors, which inputs need, too."""

    head_bytes = 16_384
    body_bytes = 0
    request_seconds = 10.0
    answer_seconds = 30.0
    clients = 32


@contextmanager
def serving(
    address: str,
    board: Board,
    watchdog: Watchdog,
    directory: Path | None,
    *,
    hosts: Iterable[str],
    wall_time: Callable[[], float],
    now: Callable[[], float],
) -> Iterator[None]:
    """
    Serve until the context ends.

    Args:
        hosts: Host names to accept in addition to the host of the address, `localhost` and address literals.
    Raises:
        ConfigError: The address cannot be used.
    """
    host, port = parse_listen_address(address)
    with listen(host, port, key="admin.listen") as listener:
        app = Admin(board, watchdog, directory, wall_time=wall_time, now=now).app()
        server = Server(
            HostGuard(app, names=[host, *hosts], advice="add other names to admin.hosts"),
            http=_Protocol,
            loop="asyncio",
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        with running_in_thread(server, listener, name="admin server"):
            log.info("admin_listening", address=address_of(listener))
            yield
