"""
A server that takes every batch, counts its events and forgets it: `python -m tests.bench.blackhole --port 0`.

It prints its ports, one for each manner of answering, and runs until it is ended. It reads the header block of a
request and nothing else; the body is counted as it passes, by its Content-Length, and never kept. So it costs less
than its fastest client (the table shows how much) and is not what limits a measurement.

    POST /reset      counts and CPU time start again at nought
    GET  /counts     {"requests": 1, "bytes": 357000, "events": 1000, "cpu_seconds": 0.0004}
    POST anything    202 {"accepted": 1000}

The manners: plain; tls, the same behind TLS; slow, 100 ms for each batch; faulty, one batch in a hundred is answered
503 or 429, or the connection is reset; picky, a batch that holds POISON is refused as a whole. What is not taken is
not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass
from functools import partial
from typing import cast

import trustme
import uvloop

from .measure import CA_FILE, MANNERS

SLOW_SECONDS = 0.1
FAULTY_ONE_IN = 100
POISON = b"poison-poison-poison"
EVENT_MARK = b'"EventId":'  # once in every event; within a string its quotes would be escaped
OVERLAP = max(len(EVENT_MARK), len(POISON)) - 1
MAX_HEADER_BYTES = 65536


@dataclass
class Counts:
    """What was taken since the last reset."""

    requests: int = 0
    body_bytes: int = 0
    events: int = 0
    cpu_seconds_before: float = 0.0

    def reset(self) -> None:
        """Start again at nought."""
        self.requests = self.body_bytes = self.events = 0
        self.cpu_seconds_before = time.process_time()

    def as_json(self) -> bytes:
        """Write the counts as the body of an answer."""
        cpu_seconds = time.process_time() - self.cpu_seconds_before
        return json.dumps(
            {
                "requests": self.requests,
                "bytes": self.body_bytes,
                "events": self.events,
                "cpu_seconds": round(cpu_seconds, 4),
            }
        ).encode()


class Blackhole(asyncio.Protocol):
    """One connection; requests follow one another on it."""

    def __init__(self, counts: Counts, latency_seconds: float, manner: str = "plain") -> None:
        self.counts = counts
        self.manner = manner
        self.latency_seconds = SLOW_SECONDS if manner == "slow" else latency_seconds
        self.is_poisoned = False
        self.transport: asyncio.Transport
        self.head = b""  # the part of a header block that has come so far
        self.route = b""  # method and path of the request whose body is coming
        self.body_left = 0  # bytes of that body still to come
        self.events = 0  # events seen in it
        self.tail = b""  # its last few bytes, as a mark may lie across two reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports do not derive from it

    def data_received(self, data: bytes) -> None:
        while data:
            data = self._take_body(data) if self.body_left else self._take_head(data)

    def _take_head(self, data: bytes) -> bytes:
        head, end, rest = (self.head + data).partition(b"\r\n\r\n")
        if not end:
            self.head = head
            if len(head) > MAX_HEADER_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")
            return b""
        self.head = self.tail = b""
        self.events = 0
        self.is_poisoned = False
        self.route = head[: head.find(b" HTTP/")]
        fields = head.lower()
        length = fields.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
        if b"\r\ntransfer-encoding:" in fields:
            self._refuse(b"411 Length Required")
            return b""
        self.body_left = int(length or 0)
        if not self.body_left:
            self._answer()
        return rest

    def _take_body(self, data: bytes) -> bytes:
        piece, rest = data, b""
        if len(data) > self.body_left:
            piece, rest = data[: self.body_left], data[self.body_left :]
        seam = self.tail[1 - len(EVENT_MARK) :] + piece[: len(EVENT_MARK) - 1]
        self.events += piece.count(EVENT_MARK) + seam.count(EVENT_MARK)
        if self.manner == "picky":
            self.is_poisoned |= POISON in piece or POISON in self.tail + piece[:OVERLAP]
        self.tail = (self.tail + piece[-OVERLAP:])[-OVERLAP:]
        self.counts.body_bytes += len(piece)
        self.body_left -= len(piece)
        if not self.body_left:
            self._answer()
        return rest

    def _answer(self) -> None:
        if self.route == b"POST /reset":
            self.counts.reset()
            self._write(b"200 OK", b"{}")
        elif self.route == b"GET /counts":
            self._write(b"200 OK", self.counts.as_json())
        elif self.route.startswith(b"POST "):
            self.counts.requests += 1
            if self.is_poisoned:
                self._write(b"400 Bad Request", b'{"message": "poison"}')
                return
            if self.manner == "faulty" and self.counts.requests % FAULTY_ONE_IN == 0:
                self._fail(self.counts.requests // FAULTY_ONE_IN % 3)
                return
            self.counts.events += self.events
            body = b'{"accepted": %d}' % self.events
            if self.latency_seconds:
                loop = asyncio.get_running_loop()
                loop.call_later(self.latency_seconds, self._write, b"202 Accepted", body)
            else:
                self._write(b"202 Accepted", body)
        else:
            self._write(b"404 Not Found", b"{}")

    def _write(self, status: bytes, body: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (status, len(body), body)
            )

    def _fail(self, how: int) -> None:
        if how == 0:
            self._write(b"503 Service Unavailable", b"{}")
        elif how == 1:
            self._write(b"429 Too Many Requests", b"{}")
        else:
            self.transport.abort()

    def _refuse(self, status: bytes) -> None:
        self._write(status, b"{}")
        self.transport.close()


def certified() -> ssl.SSLContext:
    """Make a certificate for this machine, and leave its authority in a file for the clients."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    CA_FILE.parent.mkdir(exist_ok=True)
    authority.cert_pem.write_to_path(str(CA_FILE))
    return context


async def serve(port: int, latency_seconds: float) -> None:
    """Listen on loopback and print the ports."""
    counts = Counts()
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(
            partial(Blackhole, counts, latency_seconds, manner),
            "127.0.0.1",
            0 if manner != "plain" else port,
            ssl=certified() if manner == "tls" else None,
        )
        for manner in MANNERS
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await servers[0].serve_forever()


def main() -> None:
    """Read the flags and serve until ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.blackhole", description="Take, count, forget.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, lets the system choose")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="wait before each answer to a batch")
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(args.port, args.latency_ms / 1000))


if __name__ == "__main__":
    main()
