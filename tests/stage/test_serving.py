"""Limits of the HTTP servers of shipper on requests, answers and connections, with real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anyio
import pytest

from shipper.system.serving import BoundedProtocol, Server, listen, running_in_thread
from tests.e2e.driver import wait_until


class Protocol(BoundedProtocol):
    head_bytes = 16_384
    body_bytes = 0
    request_seconds = 60.0
    answer_seconds = 60.0
    clients = 4


class Served:
    """
    A server and its clients. It answers at once, except for `/never`, and for `/read`, where it reads endlessly.

    Attributes:
        paths: The paths of the requests that have reached the application.
    """

    def __init__(self, clients: ExitStack) -> None:
        self.paths: list[str] = []
        self.address = ("", 0)
        self._clients = clients

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/never":
            await anyio.sleep_forever()
        if scope["path"] == "/read":
            while (await receive())["type"] == "http.request":
                pass
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self, data: bytes = b"") -> socket.socket:
        """Connect a client that sends some data."""
        client = self._clients.enter_context(socket.create_connection(self.address, timeout=30))
        client.sendall(data)
        return client


@contextmanager
def served(**limits: float) -> Iterator[Served]:
    protocol = type("Limited", (Protocol,), limits)
    with ExitStack() as clients, listen("127.0.0.1", 0, key="port") as listener:
        application = Served(clients)
        application.address = listener.getsockname()[:2]
        server = Server(application, http=protocol, loop="asyncio", timeout_graceful_shutdown=0)
        with running_in_thread(server, listener, name="test server"):
            yield application


def all_of(client: socket.socket) -> bytes:
    """Read until the other end closes the connection."""
    answer = b""
    with suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            answer += piece
    return answer


REFUSED = {
    "long header": (b"GET / HTTP/1.1\r\nX: " + b"a" * 24_000 + b"\r\n\r\n", b"431"),
    "long path": (b"GET /" + b"a" * 24_000 + b" HTTP/1.1\r\n\r\n", b"431"),
    "long name": (b"GET / HTTP/1.1\r\n" + b"a" * 24_000 + b": x\r\n\r\n", b"431"),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", b"431"),
    "body": (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"413"),
    "body of a GET": (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"413"),
    "body without length": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"413"),
    "body that is asked for": (b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", b"413"),
    "no HTTP": (b"\0" * 10, b"400"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_above_a_limit_is_refused_and_reaches_no_application(name: str):
    data, status = REFUSED[name]
    with served() as server:
        answer = all_of(server.connect(data))
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close\r\n" in answer
    assert server.paths == []


def test_a_request_below_the_limits_is_answered_and_the_connection_kept():
    requests = (
        b"GET /long HTTP/1.1\r\nX: " + b"a" * 12_000 + b"\r\n\r\n",
        b"GET /many HTTP/1.1\r\n" + b"X: y\r\n" * 100 + b"\r\n",
        b"POST /empty HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    )
    with served() as server:
        client = server.connect()
        for number in range(12):
            client.sendall(requests[number % 3])
            answer = b""
            while not answer.endswith(b"\r\n\r\nok"):
                answer += (piece := client.recv(1000))
                assert piece, "the connection was closed"
    assert server.paths == ["/long", "/many", "/empty"] * 4


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"GET / HTTP/1.1\r\n", b"X-Filler: " + b"a" * 65_000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nX: ", b"a" * 65_000),
        (b"GET /", b"a" * 65_000),
        (b"POST / HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n", b"a" * 65_000),
    ],
    ids=["headers", "a header", "a path", "a body"],
)
def test_an_endless_request_is_read_up_to_the_limit(beginning: bytes, piece: bytes):
    """What a client can send beyond that is in the buffers of the two sockets."""
    sent = 0
    with served() as server:
        client = server.connect(beginning)
        with suppress(ConnectionError):
            while sent < 256 * 1024 * 1024:
                sent += client.send(piece)
    assert sent < 64 * 1024 * 1024
    assert server.paths == []


def test_pipelined_requests_are_bounded():
    with served() as server:
        client = server.connect()
        with suppress(ConnectionError):
            client.sendall(b"GET /never HTTP/1.1\r\n\r\n" + b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        assert b"200 OK" not in all_of(client)
    assert server.paths == ["/never"]


def test_a_body_is_bounded_where_bodies_are_read():
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    with served(body_bytes=100_000) as server:
        small = b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 20 + b"0\r\n\r\n"
        server.connect(small)
        client = server.connect(b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(64 * 1024):
                client.sendall(chunk)
            pytest.fail("the server reads endlessly")
    assert server.paths == ["/read", "/read"]


def test_endless_trailers_are_bounded():
    with served(body_bytes=100_000_000) as server:
        client = server.connect(b"POST /never HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        with suppress(ConnectionError):
            for _ in range(64 * 1024):
                client.sendall(b"X: y\r\n" * 1000)
            pytest.fail("the server reads endlessly")


def test_a_slowly_sent_head_is_aborted():
    with served(request_seconds=0.3) as server:
        client = server.connect(b"GET / HTTP/1.1\r\nX: ")
        client.settimeout(0.02)
        drops = 0
        while True:
            try:
                if client.recv(100) == b"":
                    break
            except TimeoutError:
                with suppress(ConnectionError):
                    client.sendall(b"x")
            except ConnectionError:
                break
            drops += 1
            assert drops < 3000, "the server waits endlessly"
    assert server.paths == []


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing asked", "kept after an answer"])
def test_an_idle_connection_is_closed(data: bytes):
    with served(request_seconds=0.2) as server:
        answer = all_of(server.connect(data))
    assert answer.endswith(b"ok") == bool(data)


def test_a_connection_whose_answer_is_never_read_is_closed_after_a_while():
    with served(answer_seconds=0.2) as server:
        assert all_of(server.connect(b"GET /never HTTP/1.1\r\n\r\n")) == b""
    assert server.paths == ["/never"]


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nX: ", b"GET /never HTTP/1.1\r\n\r\n"])
def test_of_too_many_connections_the_oldest_is_closed_and_the_newest_answered(beginning: bytes):
    """Even if all of them are being answered, as with a client that reads nothing."""
    with served() as server:
        held = [server.connect(beginning) for _ in range(4)]
        if b"/never" in beginning:  # otherwise one with an unread request would count as idle
            wait_until(lambda: len(server.paths) == 4, "all are being answered")
        client = server.connect(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert all_of(client).endswith(b"ok")
        assert all_of(held[0]) == b""
        held[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            held[1].recv(1)
