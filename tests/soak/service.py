"""
The service of the soak: it tells which events have arrived, how often, and it fails: `python -m tests.soak.service`.

It prints its port and runs until it is ended. EventIds are those of `writing`, so that an account of a thousand million
events takes little room: of a block, the lines that have not come; of a block that came whole, its number.

    GET  /counts  {"events": {"0": 4000, "1": 8000}, "repeats": 0, "failures": {"503": 1}}; by the writer
    POST /quiet   from now on nothing fails but what deserves it
    POST anything an answer to a batch
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from functools import partial
from itertools import groupby
from random import Random
from typing import Final

import uvloop

from tests.bench.blackhole import Blackhole, Counts
from tests.soak.writing import BLOCK_LINES, POISON

CHANCES: Final = {  # one request in so many
    "503": 200,
    "429": 4000,  # then nobody sends for a second
    "slow": 200,
    "reset": 500,
    "stored_and_reset": 500,
    "hang": 4000,
}
OUTAGES: Final = ("503", "reset", "hang", "429")  # in turn, each in the last part of a cycle
OUTAGE_SHARE: Final = 1 / 12
SLOW_S: Final = 0.3

_ID: Final = re.compile(rb'"EventId":"([0-9a-f]{8}-[0-9a-f]{4})')
_LINES: Final = frozenset(b"%04x" % line for line in range(BLOCK_LINES))


class Arrived:
    """
    Which events have arrived; the number of a block is the first group of an EventId, the line the second.

    Attributes:
        events: By the first digit of the number, which tells the writer.
    """

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.repeats = 0
        self._missing: dict[bytes, set[bytes]] = {}
        self._whole: set[bytes] = set()

    def note(self, body: bytes | bytearray) -> int:
        """Take the events of a batch, and tell how many they are."""
        count = 0
        for block, ids in groupby(_ID.findall(body), key=lambda each: each[:8]):
            lines = [each[9:] for each in ids]
            count += len(lines)
            new = self._take(block, lines)
            self.events[chr(block[0])] += new
            self.repeats += len(lines) - new
        return count

    def _take(self, block: bytes, lines: list[bytes]) -> int:
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
    Decides what goes wrong.

    Args:
        cycle_s: An outage in each.
    """

    def __init__(self, seed: int, cycle_s: float) -> None:
        self._rng = Random(seed)
        self._cycle_s = cycle_s
        self._begin = time.monotonic()
        self.is_over = False
        self.happened: Counter[str] = Counter()

    def next(self) -> str:
        """What becomes of a request; empty = it is served."""
        if self.is_over:
            return ""
        cycle, passed = divmod((time.monotonic() - self._begin) / self._cycle_s, 1)
        what = OUTAGES[int(cycle) % len(OUTAGES)] if passed > 1 - OUTAGE_SHARE else self._chance()
        if what:
            self.happened[what] += 1
        return what

    def _chance(self) -> str:
        drawn = self._rng.random()
        for what, one_in in CHANCES.items():
            drawn -= 1 / one_in
            if drawn < 0:
                return what
        return ""


class Failing(Blackhole):
    """One connection."""

    def __init__(self, arrived: Arrived, trouble: Trouble) -> None:
        super().__init__(Counts(), 0.0)
        self._arrived = arrived
        self._trouble = trouble
        self._body = bytearray()

    def _take_body(self, data: bytes) -> bytes:
        piece, rest = data[: self.body_left], data[self.body_left :]
        self._body += piece
        self.body_left -= len(piece)
        if not self.body_left:
            self._answer()
            self._body = bytearray()
        return rest

    def _answer(self) -> None:
        if self.route == b"GET /counts":
            arrived = self._arrived
            counts = {"events": arrived.events, "repeats": arrived.repeats, "failures": self._trouble.happened}
            self._write(b"200 OK", json.dumps(counts).encode())
        elif self.route == b"POST /quiet":
            self._trouble.is_over = True
            self._write(b"200 OK", b"{}")
        else:
            self._judge(self._trouble.next())

    def _judge(self, trouble: str) -> None:
        match trouble:
            case "503":
                self._write(b"503 Service Unavailable", b"{}")
            case "429":
                self._write(b"429 Too Many Requests\r\nRetry-After: 1", b"{}")
            case "reset":
                self.transport.abort()
            case "hang":
                pass  # until the client has had enough
            case _ if POISON in self._body:
                self._write(b"400 Bad Request", b'{"message": "no"}')
            case _:
                self._accept(trouble)

    def _accept(self, trouble: str) -> None:
        answer = b'{"accepted": %d}' % self._arrived.note(self._body)
        if trouble == "stored_and_reset":
            self.transport.abort()
        elif trouble == "slow":
            asyncio.get_running_loop().call_later(SLOW_S, self._write, b"202 Accepted", answer)
        else:
            self._write(b"202 Accepted", answer)


async def serve(seed: int, cycle_s: float) -> None:
    """Listen on loopback and print the port."""
    connection = partial(Failing, Arrived(), Trouble(seed, cycle_s))
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    """Read the flags and serve until ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.service", description="Take, count, fail.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycle-seconds", type=float, default=60.0, help="an outage in each (%(default)g)")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(args.seed, args.cycle_seconds))


if __name__ == "__main__":
    main()
