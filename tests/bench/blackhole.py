"""
A server that accepts every batch, counts its events and discards it: `python -m tests.bench.blackhole`.

It prints its ports, one for each mode, and runs until it is terminated. It parses only the header of a request; the
body is counted and discarded while it is read. So it needs less CPU than its fastest client (the table shows how much)
and does not limit a measurement.

    POST /reset      reset counts and CPU time
    GET  /counts     {"requests": 1, "bytes": 357000, "events": 1000, "cpu_seconds": 0.0004}
    POST anything    202 {"accepted": 1000}

The modes: plain; tls, the same behind TLS; slow, 100 ms for each batch; faulty, one batch in a hundred is answered 503
or 429, or the connection is reset; picky, a batch that holds POISON is refused as a whole. What is refused is not
counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import ssl
import time
from functools import partial
from typing import Any, Final, cast

import trustme
import uvloop

from tests.bench.measure import MODES
from tests.processes import ROOT

CA_FILE: Final = ROOT / ".bench" / "ca.pem"
SLOW_SECONDS: Final = 0.1
FAULTY_ONE_IN: Final = 100
POISON: Final = b"poison-poison-poison"
EVENT_MARK: Final = b'"EventId":'  # once in every event; within a string its quotes would be escaped
OVERLAP: Final = max(len(EVENT_MARK), len(POISON)) - 1
MAX_HEADER_BYTES: Final = 65536


class Connection(asyncio.Protocol):
    """
    A connection of a client, with consecutive requests.

    Attributes:
        route: Method and path of the request.
        body: The part of its body that `take` keeps.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.route = ""
        self.body = bytearray()
        self._head = b""
        self._body_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from it

    def data_received(self, data: bytes) -> None:
        while data:
            if not self._body_left:
                data = self._read_head(data)
                continue
            piece, data = data[: self._body_left], data[self._body_left :]
            self._body_left -= len(piece)
            self.take(piece)
            if not self._body_left:
                self.answer()

    def _read_head(self, data: bytes) -> bytes:
        head, end, rest = (self._head + data).partition(b"\r\n\r\n")
        if not end:
            self._head = head
            if len(head) > MAX_HEADER_BYTES:
                self._refuse("431 Request Header Fields Too Large")
            return b""
        self._head = b""
        self.route = head[: head.find(b" HTTP/")].decode()
        fields = head.lower()
        if b"\r\ntransfer-encoding:" in fields:
            self._refuse("411 Length Required")
            return b""
        self._body_left = int(fields.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip() or 0)
        self.body.clear()
        self.begin()
        if not self._body_left:
            self.answer()
        return rest

    def begin(self) -> None:
        """Prepare for a body."""

    def take(self, piece: bytes) -> None:
        self.body += piece

    def answer(self) -> None:
        raise NotImplementedError

    def write(self, status: str, document: Any) -> None:
        if not self.transport.is_closing():
            body = json.dumps(document).encode()
            head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)

    def write_later(self, seconds: float, status: str, document: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, self.write, status, document)

    def _refuse(self, status: str) -> None:
        self.write(status, {})
        self.transport.close()


class Counts:
    """The counts since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests = self.bytes = self.events = 0
        self._cpu_seconds_before = time.process_time()

    def document(self) -> dict[str, float]:
        cpu_seconds = round(time.process_time() - self._cpu_seconds_before, 4)
        return {"requests": self.requests, "bytes": self.bytes, "events": self.events, "cpu_seconds": cpu_seconds}


class Blackhole(Connection):
    counts = Counts()

    def __init__(self, latency_seconds: float, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.latency_seconds = SLOW_SECONDS if mode == "slow" else latency_seconds

    def begin(self) -> None:
        self.events = 0
        self.is_poisoned = False
        self.tail = b""  # its last few bytes, because a mark may span two reads

    def take(self, piece: bytes) -> None:
        seam = self.tail[1 - len(EVENT_MARK) :] + piece[: len(EVENT_MARK) - 1]
        self.events += piece.count(EVENT_MARK) + seam.count(EVENT_MARK)
        if self.mode == "picky":
            self.is_poisoned |= POISON in piece or POISON in self.tail + piece[:OVERLAP]
        self.tail = (self.tail + piece[-OVERLAP:])[-OVERLAP:]
        self.counts.bytes += len(piece)

    def answer(self) -> None:
        counts = self.counts
        if self.route == "POST /reset":
            counts.reset()
            self.write("200 OK", {})
        elif self.route == "GET /counts":
            self.write("200 OK", counts.document())
        elif not self.route.startswith("POST "):
            self.write("404 Not Found", {})
        else:
            counts.requests += 1
            if self.is_poisoned:
                self.write("400 Bad Request", {"message": "poison"})
            elif self.mode == "faulty" and counts.requests % FAULTY_ONE_IN == 0:
                self._fail(counts.requests // FAULTY_ONE_IN % 3)
            else:
                counts.events += self.events
                accepted = {"accepted": self.events}
                if self.latency_seconds:
                    self.write_later(self.latency_seconds, "202 Accepted", accepted)
                else:
                    self.write("202 Accepted", accepted)

    def _fail(self, how: int) -> None:
        if how == 2:
            self.transport.abort()
        else:
            self.write(("503 Service Unavailable", "429 Too Many Requests")[how], {})


def certified() -> ssl.SSLContext:
    """Create a certificate for this machine, and write its authority to a file for the clients."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    CA_FILE.parent.mkdir(exist_ok=True)
    authority.cert_pem.write_to_path(str(CA_FILE))
    return context


async def serve(latency_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(
            partial(Blackhole, latency_seconds, mode), "127.0.0.1", 0, ssl=certified() if mode == "tls" else None
        )
        for mode in MODES
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await servers[0].serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.blackhole", description="Take, count, forget.")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="latency of each answer to a batch")
    latency_ms = parser.parse_args().latency_ms
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(latency_ms / 1000))


if __name__ == "__main__":
    main()
