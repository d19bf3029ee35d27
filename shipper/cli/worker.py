"""
The process of a worker: `python -m shipper.cli.worker DESCRIPTOR`, started by `shipper backfill --workers`.

Signals that a terminal or a service manager sends to every process are handled by the parent process.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from random import Random
from typing import TYPE_CHECKING

from shipper.cli import prepare_process

if TYPE_CHECKING:
    from shipper.config.settings import Settings


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    prepare_process()
    import anyio

    from shipper.cli.common import run_async
    from shipper.pipeline.channel import LostError
    from shipper.pipeline.in_workers import HURRY_SIGNAL
    from shipper.pipeline.worker import work

    async def ship() -> None:
        hurries = anyio.open_signal_receiver(HURRY_SIGNAL)
        connection = socket.socket(fileno=int(sys.argv[1]))
        await work(connection, hurries, set_up=_set_up, wall_time=time.time, rng=Random())

    code = 0
    try:
        run_async(ship)
    except* LostError:
        code = 1  # nobody is there to be told
    sys.exit(code)


def _set_up(worker: int, settings: Settings) -> None:
    """Log only warnings and errors; the starting process logs the rest for all workers."""
    import structlog

    from shipper.status.logs import configure_logs

    level = settings.log.level
    configure_logs(level if level in {"debug", "error"} else "warning", settings.log.format, now=time.monotonic)
    structlog.contextvars.bind_contextvars(worker=worker)


if __name__ == "__main__":
    main()
