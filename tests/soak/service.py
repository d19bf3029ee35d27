"""
The service of the soak, which counts distinct events and repeats, and fails on purpose: `python -m tests.soak.service`.

It prints its port and runs until it is terminated. The EventIds of `writing` let it count a thousand million events in
little memory: it stores the missing lines of each block, and only the number of a complete block.

    GET  /counts  {"events": {"0": 4000, "1": 8000}, "repeats": 0, "failures": {"503": 1}}; by writer
    POST /quiet   end of the failures, except of events that must be refused
    POST anything the answer to a batch
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from collections import Counter
from functools import partial
from itertools import groupby
from random import Random
from typing import Final

import uvloop

from tests.bench.blackhole import POISON, Connection
from tests.soak.writing import BLOCK_LINES

CHANCES: Final = {  # one of so many requests fails
    "503": 200,
    "429": 4000,  # after which nothing is sent for a second
    "slow": 200,
    "reset": 500,
    "stored_and_reset": 500,
    "hang": 4000,
}
OUTAGES: Final = ("503", "reset", "hang", "429")  # in turn, one at the end of each cycle
OUTAGE_SHARE: Final = 1 / 12
SLOW_S: Final = 0.3

_ID: Final = re.compile(rb'"EventId":"([0-9a-f]{8}-[0-9a-f]{4})')
_LINES: Final = frozenset(b"%04x" % line for line in range(BLOCK_LINES))


class Arrived:
    """
    The events that have arrived. The first group of an EventId is the number of its block, the second one the line.

    Attributes:
        events: Number of events by writer, which is the first digit of the block number.
    """

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.repeats = 0
        self._missing: dict[bytes, set[bytes]] = {}
        self._whole: set[bytes] = set()

    def add(self, body: bytes | bytearray) -> int:
        """Add the events of a batch, and return their number."""
        total = 0
        for block, ids in groupby(_ID.findall(body), key=lambda each: each[:8]):
            lines = [each[9:] for each in ids]
            new = self._add(block, lines)
            total += len(lines)
            self.events[chr(block[0])] += new
            self.repeats += len(lines) - new
        return total

    def _add(self, block: bytes, lines: list[bytes]) -> int:
        if block in self._whole:
            return 0
        missing = self._missing.setdefault(block, set(_LINES))
        before = len(missing)
        missing.difference_update(lines)
        if not missing:
            del self._missing[block]
            self._whole.add(block)
        return before - len(missing)


class Trouble:
    """
    Decides how requests fail.

    Args:
        cycle_s: Duration of a cycle, which has one outage.
    """

    def __init__(self, seed: int, cycle_s: float) -> None:
        self._rng = Random(seed)
        self._cycle_s = cycle_s
        self._begin = time.monotonic()
        self.is_over = False
        self.failures: Counter[str] = Counter()

    def next(self) -> str:
        """Return how a request fails; empty = it does not fail."""
        if self.is_over:
            return ""
        cycle, passed = divmod((time.monotonic() - self._begin) / self._cycle_s, 1)
        failure = OUTAGES[int(cycle) % len(OUTAGES)] if passed > 1 - OUTAGE_SHARE else self._draw()
        if failure:
            self.failures[failure] += 1
        return failure

    def _draw(self) -> str:
        drawn = self._rng.random()
        for failure, one_in in CHANCES.items():
            drawn -= 1 / one_in
            if drawn < 0:
                return failure
        return ""


class Failing(Connection):
    def __init__(self, arrived: Arrived, trouble: Trouble) -> None:
        super().__init__()
        self._arrived = arrived
        self._trouble = trouble

    def answer(self) -> None:
        arrived = self._arrived
        if self.route == "GET /counts":
            counts = {"events": arrived.events, "repeats": arrived.repeats, "failures": self._trouble.failures}
            self.write("200 OK", counts)
        elif self.route == "POST /quiet":
            self._trouble.is_over = True
            self.write("200 OK", {})
        else:
            self._answer_batch(self._trouble.next())

    def _answer_batch(self, failure: str) -> None:
        match failure:
            case "503":
                self.write("503 Service Unavailable", {})
            case "429":
                self.write("429 Too Many Requests\r\nRetry-After: 1", {})
            case "reset":
                self.transport.abort()
            case "hang":
                pass  # longer than the timeout of the client
            case _ if POISON in self.body:
                self.write("400 Bad Request", {"message": "no"})
            case _:
                accepted = {"accepted": self._arrived.add(self.body)}
                if failure == "stored_and_reset":
                    self.transport.abort()
                elif failure == "slow":
                    self.write_later(SLOW_S, "202 Accepted", accepted)
                else:
                    self.write("202 Accepted", accepted)


async def serve(seed: int, cycle_s: float) -> None:
    connection = partial(Failing, Arrived(), Trouble(seed, cycle_s))
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.service", description="Take, count, fail.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycle-seconds", type=float, default=60.0, help="each cycle has an outage (%(default)g)")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(args.seed, args.cycle_seconds))


if __name__ == "__main__":
    main()
