"""
Row `floor`: request bodies that are ready in memory, posted by httpx; `python -m tests.bench.floor FILE URL`.

Nothing is parsed, checked or remembered, so this is what reading the file, the HTTP library and the
socket cost by themselves.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

import anyio
import httpx

SENDERS = 8
EVENTS_PER_REQUEST = 1000


def request_bodies(path: Path) -> list[bytes]:
    """
    Cut the file into bodies of 1,000 events.

    Shape:
        Each body is `{"EventType":"Acquisition","events":[…]}`, the events byte for byte as in the file.
    """
    bodies = []
    with path.open("rb") as file:
        while lines := list(islice(file, EVENTS_PER_REQUEST)):
            events = b"".join(lines).rstrip(b"\n").replace(b"\n", b",")
            bodies.append(b'{"EventType":"Acquisition","events":[%b]}' % events)
    return bodies


async def post_all(bodies: list[bytes], url: str) -> int:
    """Post the bodies, one client per sender. Returns the number of events that the server took."""
    context = httpx.create_ssl_context()
    waiting = iter(bodies)  # shared, so that each body goes to the sender that is free
    accepted = 0

    async def send() -> None:
        nonlocal accepted
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(verify=context, headers=headers) as client:
            for body in waiting:
                answer = await client.post(url, content=body)
                answer.raise_for_status()
                accepted += answer.json()["accepted"]

    async with anyio.create_task_group() as tasks:
        for _ in range(SENDERS):
            tasks.start_soon(send)
    return accepted


def main() -> None:
    """Prepare, post, print the count and the seconds that posting took."""
    bodies = request_bodies(Path(sys.argv[1]))
    begin = time.perf_counter()
    accepted = anyio.run(post_all, bodies, sys.argv[2], backend_options={"use_uvloop": True})
    print(json.dumps({"accepted": accepted, "seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
