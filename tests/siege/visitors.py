"""Visitors of the admin address: probes, a scrape, and hostile clients."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

from tests.campaign import Shuffled
from tests.e2e.test_hostile_clients import BEGINNINGS, FOREIGN_HOSTS, MALFORMED, PATHS
from tests.fuzz.mutation import mutator
from tests.siege.canaries import canaries_in

PROBE_S: Final = 0.5
PROBE_LIMIT_S: Final = 10.0  # on a busy machine
SCRAPE_S: Final = 3.0
_CLIENT_LIMIT_S: Final = 5.0
_PAUSE_S: Final = 0.2
_ANSWER_MAX: Final = 8 << 20
_READ_MAX: Final = 64 << 20  # unread data is in the buffers of the two sockets
_HELD: Final = 120
_CROWD: Final = 400
_REQUEST: Final = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-More: y\r\n\r\n"
_MUTATE: Final = mutator(
    words=[b"\r\n", b"\r\n\r\n", b"Host: ", b"HTTP/1.1", *PATHS, b"Content-Length: 5", b"\0", b"%00"]
)
# The start of a request, and what is then repeated endlessly.
_ENDLESS: Final = (
    (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X: " + b"a" * 65_000 + b"\r\n"),
    (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"a" * 65_000),
    (b"GET /", b"a" * 65_000),
    (b"POST /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999999999\r\n\r\n", b"a" * 65_000),
)


@dataclass
class Seen:
    """
    What the visitors observed.

    Attributes:
        probes: Number of requests for `/healthz`.
        unhealthy: The answers other than 200, with their times.
        slowest_s: Duration of the slowest probe.
        canaries: The canaries shown, by page.
        wrong: Other problems.
        clients: Number of hostile connections, by kind.
    """

    probes: int = 0
    unhealthy: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    canaries: dict[str, set[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    clients: Counter[str] = field(default_factory=Counter)
    pages: Counter[str] = field(default_factory=Counter)

    def look_for_canaries(self, where: str, data: bytes) -> None:
        if found := canaries_in(data):
            self.canaries.setdefault(where, set()).update(found)


class Visitors:
    """All visitors; each of `loops` runs in a thread until `is_over` is set."""

    def __init__(self, port: int, rng: Random, is_over: threading.Event) -> None:
        self.seen = Seen()
        self._port = port
        self._rng = rng
        self._is_over = is_over
        self._begin = time.monotonic()

    def loops(self) -> dict[str, Callable[[], None]]:
        return {"probe": self.probe, "scrape": self.scrape, "clients": self.attack}

    def probe(self) -> None:
        """Request `/healthz` like a supervisor, on a new connection each time."""
        while not self._is_over.wait(PROBE_S):
            begin = time.monotonic()
            try:
                status = str(self._get("/healthz")[0])
            except (OSError, http.client.HTTPException) as error:
                status = repr(error)
            seconds = time.monotonic() - begin
            self.seen.probes += 1
            self.seen.slowest_s = max(self.seen.slowest_s, seconds)
            if status != "200":
                self.seen.unhealthy.append(f"{status} at {begin - self._begin:.1f} s after {seconds:.1f} s")

    def scrape(self) -> None:
        """Read all pages, like monitoring and people."""
        while not self._is_over.wait(SCRAPE_S):
            for path in map(bytes.decode, PATHS):
                with suppress(OSError, http.client.HTTPException):  # the probes check that connections are accepted
                    status, body = self._get(path)
                    self.seen.pages[f"{path} {status}"] += 1
                    self.seen.look_for_canaries(path, body)

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PROBE_LIMIT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    # Attacks ----------------------------------------------------------------------------------------------------------

    def attack(self) -> None:
        """Run all kinds of attack, repeatedly."""
        rng = Random(self._rng.random())
        kinds = Shuffled(CLIENTS, rng)
        while not self._is_over.wait(_PAUSE_S):
            kind = kinds.next()
            with ExitStack() as stack, suppress(OSError):  # shipper may close the connection
                CLIENTS[kind](_Client(self, kind, stack, rng))

    def wait(self, seconds: float) -> None:
        self._is_over.wait(seconds)


class _Client:
    """The connections of one client."""

    def __init__(self, visitors: Visitors, kind: str, stack: ExitStack, rng: Random) -> None:
        self.visitors = visitors
        self.rng = rng
        self._kind = kind
        self._stack = stack

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.visitors._port), timeout=_CLIENT_LIMIT_S)
        self.visitors.seen.clients[self._kind] += 1
        return self._stack.enter_context(connection)

    def ask(self, data: bytes) -> bytes:
        """Send data and read the answer, up to the largest permitted one."""
        connection = self.connect()
        answer = b""
        with suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while len(answer) < _ANSWER_MAX and (piece := connection.recv(1 << 16)):
                answer += piece
        connection.close()
        self.visitors.seen.look_for_canaries(f"the answer to a client: {self._kind}", answer)
        return answer


def _hold(client: _Client) -> None:
    """Start requests that never end, sent a byte at a time."""
    held = []
    for number in range(_HELD):
        with suppress(OSError):
            held.append(client.connect())
            held[-1].sendall(BEGINNINGS[number % len(BEGINNINGS)])
    for _ in range(10):
        client.visitors.wait(0.3)
        for connection in held:
            with suppress(OSError):
                connection.sendall(b"x")


def _crowd(client: _Client) -> None:
    """Open many connections at once."""
    for _ in range(_CROWD):
        with suppress(OSError):
            client.connect()


def _flood(client: _Client) -> None:
    beginning, piece = client.rng.choice(_ENDLESS)
    connection = client.connect()
    connection.sendall(beginning)
    for _ in range(_READ_MAX // len(piece)):
        connection.sendall(piece)
    client.visitors.seen.wrong.append("an endless request was read endlessly")


def _malformed(client: _Client) -> None:
    for data in MALFORMED:
        answer = client.ask(data)
        if answer.startswith(b"HTTP/1.1 5") or b"root:" in answer:
            client.visitors.seen.wrong.append(f"{data[:40]!r} was answered with {answer[:200]!r}")


def _foreign(client: _Client) -> None:
    for host in client.rng.sample(FOREIGN_HOSTS, 5):
        path = client.rng.choice(PATHS)
        answer = client.ask(b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (path, host))
        if answer.startswith(b"HTTP/1.1 2"):
            client.visitors.seen.wrong.append(f"the host {host!r} was answered")


def _bodies(client: _Client) -> None:
    for head in (b"Content-Length: 90000", b"Transfer-Encoding: chunked", b"Content-Length: 5\r\nContent-Length: 6"):
        client.ask(b"POST /status HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n" + b"a" * 90_000)


def _pipelined(client: _Client) -> None:
    client.ask(_REQUEST * client.rng.choice([2, 8, 300]))


def _never_reading(client: _Client) -> None:
    for _ in range(40):
        connection = client.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 8)
    client.visitors.wait(3)


def _resetting(client: _Client) -> None:
    for _ in range(40):
        connection = client.connect()
        connection.sendall(_REQUEST)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def _mutated(client: _Client) -> None:
    for _ in range(30):
        client.ask(_MUTATE(client.rng, _REQUEST, MALFORMED))


CLIENTS: Final[dict[str, Callable[[_Client], None]]] = {
    "slow": _hold,
    "hundreds at once": _crowd,
    "headers without end": _flood,
    "no HTTP": _malformed,
    "wrong Host": _foreign,
    "bodies": _bodies,
    "pipelined": _pipelined,
    "never reading": _never_reading,
    "resetting": _resetting,
    "mutated": _mutated,
}
