"""
Row `naive`: a straightforward script, as written in an afternoon; `python -m tests.bench.naive FILE URL`.

It validates with pydantic, batches, keeps eight requests in flight and streams the file. It has no
checkpoints, dead letters or retries.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import httpx
from pydantic import BaseModel


class Event(BaseModel):
    EventId: str
    IP: str
    Timestamp: str
    BTag: str
    ConsumerID: int
    ConsumerCountry: str
    ConsumerCurrencyID: str
    Username: str
    BrandID: int
    CustomerCurrencyID: str
    ConsumerStatus: str
    AffiliateID: str
    ConsumerState: str


def batches(path: Path) -> Iterator[list[Event]]:
    with path.open() as file:
        while lines := list(islice(file, 1000)):
            yield [Event.model_validate(json.loads(line)) for line in lines]


async def ship(path: Path, url: str) -> int:
    accepted = 0
    in_flight = asyncio.Semaphore(8)

    async def post(batch: list[Event]) -> None:
        nonlocal accepted
        try:
            events = [event.model_dump() for event in batch]
            answer = await client.post(url, json={"EventType": "Acquisition", "events": events})
            answer.raise_for_status()
            accepted += answer.json()["accepted"]
        finally:
            in_flight.release()

    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as tasks:
        for batch in batches(path):
            await in_flight.acquire()
            tasks.create_task(post(batch))
    return accepted


if __name__ == "__main__":
    begin = time.perf_counter()
    accepted = asyncio.run(ship(Path(sys.argv[1]), sys.argv[2]))
    print(json.dumps({"accepted": accepted, "seconds": time.perf_counter() - begin}))
