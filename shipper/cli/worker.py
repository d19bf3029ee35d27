"""
The process of a worker: `python -m shipper.cli.worker DESCRIPTOR`, started by `shipper backfill --workers`.

The signals that a terminal or a service manager sends to every process are the starting process's business.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from random import Random

import anyio
import structlog

from shipper.cli.common import run_async
from shipper.config import Settings
from shipper.pipeline.channel import LostError
from shipper.pipeline.in_workers import HURRY_SIGNAL
from shipper.pipeline.worker import work
from shipper.telemetry.logs import configure_logs


def _set_up(index: int, settings: Settings) -> None:
    """Write warnings and errors; what else there is to tell, the starting process tells for all workers."""
    level = settings.log.level
    configure_logs(level if level in {"debug", "error"} else "warning", settings.log.format, now=time.monotonic)
    structlog.contextvars.bind_contextvars(worker=index)


async def _work(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    await work(connection, anyio.open_signal_receiver(HURRY_SIGNAL), set_up=_set_up, wall_time=time.time, rng=Random())


def main() -> None:
    """Work until there is no more to do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    try:
        run_async(lambda: _work(int(sys.argv[1])))
    except* LostError:
        sys.exit(1)  # nobody is there to be told


if __name__ == "__main__":
    main()
