"""
Rows `sandbox…`: how fast the sandbox takes batches; `python -m tests.bench.sandbox_row FILE DIRECTORY [FLAG…]`.

The sandbox runs on the core of the rows, and the client that feeds it on another one, with next to no client library,
so that the sandbox is what limits. The seconds are those of the posting, the CPU seconds those of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from .floor import request_bodies
from .rows import INTAKE_PATH, SHIPPER

CONNECTIONS = 4
START_LIMIT_SECONDS = 20


@contextmanager
def running_sandbox(directory: Path, flags: list[str]) -> Iterator[tuple[str, bytes]]:
    """Start it on the core of this process, which moves to the others. Yields its port and the headers it asks for."""
    config = directory / "sandbox.toml"
    command = [str(SHIPPER), "sandbox", "--port", "0", "--write-config", str(config), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            if others := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
                os.sched_setaffinity(0, others)
            deadline = time.monotonic() + START_LIMIT_SECONDS
            while not config.exists():
                assert process.poll() is None, "the sandbox ended"
                assert time.monotonic() < deadline, "the sandbox did not start"
                time.sleep(0.01)
            intake = tomllib.loads(config.read_text())["intake"]
            headers = (
                "Content-Type: application/json\r\nCache-Control: no-cache\r\n"
                f"Authorization: Bearer {intake['token']}\r\n"
                f"Ocp-Apim-Subscription-Key: {intake['subscription_key']}\r\n"
            )
            yield intake["base_url"].rpartition(":")[2], headers.encode()
        finally:
            process.terminate()
            process.wait(10)


async def post_all(bodies: list[bytes], port: str, headers: bytes) -> int:
    """Post the bodies over a few connections. Returns the number of events that were accepted."""
    waiting = iter(bodies)  # shared, so that each body goes to the connection that is free
    accepted = 0

    async def send() -> None:
        nonlocal accepted
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in waiting:
            head = f"POST {INTAKE_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n".encode()
            writer.writelines([head, headers, b"\r\n", body])
            answer_head = await reader.readuntil(b"\r\n\r\n")
            assert answer_head.startswith(b"HTTP/1.1 202 "), answer_head
            length = int(answer_head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            accepted += json.loads(await reader.readexactly(length))["accepted"]
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(send())
    return accepted


def main() -> None:
    """Prepare, post, print the count and what it cost."""
    file, directory, *flags = sys.argv[1:]
    bodies = request_bodies(Path(file))
    with running_sandbox(Path(directory), flags) as (port, headers):
        begin = time.perf_counter()
        accepted = uvloop.run(post_all(bodies, port, headers))
        seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"accepted": accepted, "seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}))


if __name__ == "__main__":
    main()
