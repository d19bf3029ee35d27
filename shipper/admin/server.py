"""Serves what a running shipper shows of itself, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from shipper.addresses import listen_address
from shipper.admin.app import Admin
from shipper.serving import Server, address_of, listen, running_in_thread
from shipper.telemetry.board import Board

log = structlog.get_logger("admin")

_GRACE_SECONDS = 1


@contextmanager
def serving(
    address: str,
    board: Board,
    directory: Path,
    *,
    wall_time: Callable[[], float],
    now: Callable[[], float],
) -> Iterator[None]:
    """
    Serve while this is entered.

    Args:
        address: HOST:PORT.
        directory: The state directory.
    Raises:
        ConfigError: The address cannot be had.
    """
    host, port = listen_address(address)
    with listen(host, port, key="admin.listen") as listener:
        server = Server(
            Admin(board, directory, wall_time=wall_time, now=now).app(),
            http="httptools",
            loop="asyncio",
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        with running_in_thread(server, listener, name="admin server"):
            log.info("admin_listening", address=address_of(listener))
            yield
