"""
The rows that are not commands of shipper: `python -m tests.bench.programs ROW ARGUMENT…`.

    codec FILE                 only validation and encoding, without start-up, network, state and reading
    floor FILE URL             ready-made request bodies posted by httpx, without parsing and state
    validate FILE              the command, whole process
    sandbox FILE FOLDER FLAG…  throughput of the sandbox with a minimal client
    broker FOLDER SAMPLE…      no row: the broker of row `kafka`, with each sample as a topic of four partitions

The sandbox runs on the core of the rows and its client on another one, so that the sandbox is the bottleneck. The
seconds are those of posting, the CPU seconds those of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tests.bench.measure import DEAD_LETTERS
from tests.processes import SHIPPER, leave_core

INTAKE_PATH: Final = "/dim/v1/player/activities"
CHUNK_BYTES: Final = 1 << 20
SENDERS: Final = 8
SANDBOX_CONNECTIONS: Final = 4


def report(accepted: int, seconds: float, **more: float) -> None:
    print(json.dumps({"accepted": accepted, "seconds": seconds, **more}))


def codec(file: str) -> None:
    from shipper.codec.codec import Codec
    from shipper.codec.dedupe import accept_events
    from shipper.codec.rules import latest_timestamp
    from shipper.config.settings import RecordsSettings
    from shipper.model.records import Chunk, Stream

    codec = Codec(RecordsSettings(), max_record_bytes=262_144)
    stream = Stream(stream_id=1, kind="file", path="sample")
    latest = latest_timestamp(time.time(), 300)
    accepted, seconds, cpu_seconds = 0, 0.0, 0.0
    with Path(file).open("rb") as lines:
        while data := lines.read(CHUNK_BYTES) + lines.readline():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            chunk = Chunk(stream=stream, start_offset=0, end_offset=len(data), data=data)
            offset = 0
            while offset < len(data):
                piece = codec.encode(chunk, offset, room_events=1000, room_bytes=999_000, latest=latest)
                assert piece is not None
                offset = piece.span.end_offset
                accept_events(codec.window, piece.span, range(piece.events - piece.waits))
                accepted += piece.events - piece.waits
            cpu_seconds += time.process_time() - cpu_begin
            seconds += time.perf_counter() - begin
    report(accepted, seconds, cpu_seconds=cpu_seconds)


def request_bodies(file: str) -> list[bytes]:
    """Split a file into request bodies of 1,000 unchanged events."""
    bodies = []
    with Path(file).open("rb") as lines:
        while some := list(islice(lines, 1000)):
            events = b"".join(some).rstrip(b"\n").replace(b"\n", b",")
            bodies.append(b'{"EventType":"Acquisition","events":[%b]}' % events)
    return bodies


def floor(file: str, url: str) -> None:
    import anyio
    import httpx

    waiting = iter(request_bodies(file))  # shared, so that each body goes to a free sender
    context = httpx.create_ssl_context()
    accepted = 0

    async def send() -> None:
        nonlocal accepted
        async with httpx.AsyncClient(verify=context, headers={"Content-Type": "application/json"}) as client:
            for body in waiting:
                answer = await client.post(url, content=body)
                answer.raise_for_status()
                accepted += answer.json()["accepted"]

    async def send_all() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(SENDERS):
                tasks.start_soon(send)

    begin = time.perf_counter()
    anyio.run(send_all, backend_options={"use_uvloop": True})
    report(accepted, time.perf_counter() - begin)


def validate(file: str) -> None:
    begin = time.perf_counter()
    done = subprocess.run([SHIPPER, "validate", file, "--format", "json"], stdout=subprocess.PIPE, check=True)
    report(json.loads(done.stdout)["good"], time.perf_counter() - begin)


def sandbox(file: str, folder: str, *flags: str) -> None:
    import uvloop

    from tests.e2e.driver import Target, sandbox_process

    waiting = iter(request_bodies(file))
    accepted = 0

    async def send(target: Target) -> None:
        nonlocal accepted
        reader, writer = await asyncio.open_connection("127.0.0.1", target.base_url.rpartition(":")[2])
        for body in waiting:
            head = (
                f"POST {INTAKE_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
                "Content-Type: application/json\r\nCache-Control: no-cache\r\n"
                f"Authorization: Bearer {target.token}\r\nOcp-Apim-Subscription-Key: {target.subscription_key}\r\n\r\n"
            )
            writer.writelines([head.encode(), body])
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 202 "), answer
            length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            accepted += json.loads(await reader.readexactly(length))["accepted"]
        writer.close()

    async def send_all(target: Target) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(SANDBOX_CONNECTIONS):
                group.create_task(send(target))

    with sandbox_process(Path(folder), *flags) as target:
        leave_core()
        begin = time.perf_counter()
        uvloop.run(send_all(target))
        seconds = time.perf_counter() - begin
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    report(accepted, seconds, cpu_seconds=usage.ru_utime + usage.ru_stime)


def broker(folder: str, *samples: str) -> None:
    """Start a broker, print its address, and run until terminated; if that is not possible, print why."""
    try:
        from tests.e2e.kafka.broker import Broker, missing
    except ImportError as error:
        print(f"needs {error.name}")
        return
    if why := missing():
        print(why)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the broker is stopped, too
    with suppress(KeyboardInterrupt), Broker(Path(folder)) as broker:
        broker.create(DEAD_LETTERS, 1, cleanup_policy="compact")
        for sample in map(Path, samples):
            broker.create(sample.stem, 4)
            with sample.open("rb") as lines:
                broker.produce(sample.stem, (line.rstrip(b"\n") for line in lines))
        print(broker.address, flush=True)
        signal.pause()


PROGRAMS: Final[dict[str, Callable[..., Any]]] = {
    program.__name__: program for program in (codec, floor, validate, sandbox, broker)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
