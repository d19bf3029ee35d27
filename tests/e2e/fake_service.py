"""A service that misbehaves on demand and records what it receives."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self

from tests.e2e.driver import Target

_HANG_LIMIT_S = 60


Fault = Literal["", "hang", "reset", "store_and_reset", "truncate", "stall", "trickle", "close"]


@dataclass(frozen=True)
class Reply:
    """
    The fate of one request.

    Attributes:
        fault: An additional fault.
            `hang`: no answer until `FakeService.release`.
            `reset`: the connection is reset before anything is stored.
            `store_and_reset`: it is reset after the events are stored, so the answer is lost.
            `truncate`: the connection is closed in mid-answer.
            `stall`, `trickle`: after part of the answer nothing follows, or single bytes for ever.
            `close`: the connection is closed after the answer, unannounced.
        wire: Sent instead of an answer: bytes, or a function that writes to the connection. Then it is closed.
    """

    status: int = 202
    body: bytes = b"{}"
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    fault: Fault = ""
    wire: bytes | Callable[[socket.socket], None] | None = None

    @property
    def stores(self) -> bool:
        if self.wire is not None:
            return False
        is_success = 200 <= self.status < 300 and self.content_type == "application/json"
        return self.fault == "store_and_reset" or (is_success and self.fault in {"", "hang", "close"})


OK = Reply()
HANG = Reply(fault="hang")
RESET = Reply(fault="reset")
STORE_AND_RESET = Reply(fault="store_and_reset")
WEB_PAGE = Reply(status=200, body=b"<html><h1>Please log in</h1></html>", content_type="text/html; charset=utf-8")


class FakeService:
    """
    An HTTP server in a thread; by default it stores everything.

    Attributes:
        default: The reply to a request without a planned reply, or a function that chooses one.
        bodies, headers, paths, arrived_at: Of all requests, in order of arrival.
        stored: The bodies that were stored.
        answered: Number of completed requests.
    """

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1") -> None:
        self.default: Reply | Callable[[], Reply] = OK
        self.bodies: list[bytes] = []
        self.headers: list[Message] = []
        self.paths: list[str] = []
        self.arrived_at: list[float] = []
        self.stored: list[bytes] = []
        self.answered = 0
        self._planned: list[Reply] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._is_closing = threading.Event()
        self._errors: list[BaseException] = []
        self._connections: set[socket.socket] = set()
        self._server = _Server(self, host, port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fake-service")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._released.set()
        self._server.shutdown()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()  # joins the request threads
        self._thread.join(10)
        assert not self._errors, self._errors

    @property
    def target(self) -> Target:
        host, port = self._server.server_address[:2]
        return Target(f"http://{host}:{port}", "fake-subscription-key", "fake-token")

    @property
    def requests(self) -> int:
        return len(self.bodies)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def plan(self, *replies: Reply) -> None:
        """Plan the replies to the next requests, in order of arrival."""
        with self._lock:
            self._planned.extend(replies)

    def release(self) -> None:
        """Answer all hanging requests, and later ones."""
        self._released.set()

    def event_ids(self, bodies: Iterable[bytes] | None = None) -> list[str]:
        """The EventIds of the stored bodies, or of `bodies`, in order and with repeats."""
        return [event["EventId"] for body in (self.stored if bodies is None else bodies) for event in events_of(body)]

    def holds(self, ids: Iterable[str]) -> bool:
        return set(ids) <= set(self.event_ids())

    # Called by the handlers in their threads-------------------------------------------------------------------------

    def arrived(self, headers: Message, body: bytes) -> Reply:
        with self._lock:
            self.headers.append(headers)
            self.arrived_at.append(time.monotonic())
            self.bodies.append(body)
            reply = self._next()
        if reply.fault == "hang":
            self._released.wait(_HANG_LIMIT_S)
        if reply.stores:
            with self._lock:
                self.stored.append(body)
        return reply

    def _next(self) -> Reply:
        if self._planned:
            return self._planned.pop(0)
        return self.default() if callable(self.default) else self.default

    def done(self) -> None:
        with self._lock:
            self.answered += 1

    def connected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)

    def disconnected(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    @property
    def is_closing(self) -> bool:
        return self._is_closing.is_set()

    def failed(self, error: BaseException) -> None:
        self._errors.append(error)


def is_peer_gone(connection: socket.socket) -> bool:
    """Return whether the peer has closed an idle connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def events_of(body: bytes) -> list[dict[str, object]]:
    document = json.loads(body)
    assert document["EventType"] == "Acquisition"
    return document["events"]


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, service: FakeService, host: str, port: int) -> None:
        self.service = service
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        # A shipper that was killed or timed out closes its end; every other error is a bug in the test.
        if error is not None and not isinstance(error, ConnectionError):
            self.service.failed(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.service.connected(self.connection)

    def finish(self) -> None:
        self.server.service.disconnected(self.connection)
        super().finish()

    def do_POST(self) -> None:
        service = self.server.service
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:  # the sender was killed while sending
            self.close_connection = True
            return
        service.paths.append(self.path)
        reply = service.arrived(self.headers, body)
        if reply.fault in {"reset", "store_and_reset"}:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
            self.close_connection = True
        elif reply.wire is not None:
            self.close_connection = True
            if callable(reply.wire):
                reply.wire(self.connection)
            else:
                self.wfile.write(reply.wire)
        else:
            self._answer(reply)
        service.done()

    def _answer(self, reply: Reply) -> None:
        is_cut = reply.fault in {"truncate", "stall", "trickle"}
        self.send_response(reply.status)
        for name, value in {"Content-Type": reply.content_type, **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body) + 1_000_000 * is_cut))
        self.end_headers()
        self.wfile.write(reply.body)
        while reply.fault in {"stall", "trickle"} and not self.server.service.is_closing:
            if reply.fault == "trickle":
                self.wfile.write(b" ")
            elif is_peer_gone(self.connection):
                break
            time.sleep(0.05)
        self.close_connection |= is_cut or reply.fault == "close"

    def log_message(self, format: str, *args: object) -> None:
        pass
