"""
Servers in threads, on real sockets, that record what they receive: an origin and a proxy, with or without TLS.

They do not share the client's event loop, which can be asyncio's, uvloop's or trio's.
"""

from __future__ import annotations

import base64
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

import pytest

Reply = bytes | Callable[[socket.socket], None]

REPORTED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Listener:
    """
    Accepts connections and handles each in a thread.

    Attributes:
        accepted: Number of connections accepted.
        closed: Number of connections closed.
        clients: The subject of each TLS client's certificate; empty if it sent none.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._context = context
        self.host, self.port = self._socket.getsockname()[:2]
        self.accepted = 0
        self.closed = 0
        self.handshake_errors: list[str] = []
        self.clients: list[str] = []
        self._last: object = None  # the address of the connection that ends it
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name=f"{type(self).__name__}-{self.port}")]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(self._socket.family) as last:  # accepted after all others
            last.bind((self.host, 0))
            self._last = last.getsockname()
            last.connect(self._socket.getsockname())
            self._threads[0].join(10)
        self._socket.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive(), thread

    def cut(self) -> None:
        """Close all open connections."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle(self, connection: socket.socket) -> None:
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            connection, client = self._socket.accept()
            if client == self._last:
                connection.close()
                return
            with self._lock:
                self._open.add(connection)
                self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(connection,), name=f"{type(self).__name__}-connection")
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        used = connection
        try:
            with suppress(OSError):  # the client may disconnect
                if self._context is not None:
                    used = self._encrypted(connection)
                self.handle(used)
        finally:
            with self._lock:
                self._open.discard(connection)
                self._open.discard(used)
                self.closed += 1
            used.close()
            connection.close()

    def _encrypted(self, connection: socket.socket) -> ssl.SSLSocket:
        assert self._context is not None
        encrypted = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # wrapping detaches the plain socket
            self._open.add(encrypted)
        try:
            encrypted.do_handshake()
        except ssl.SSLError as error:
            self.handshake_errors.append(error.reason or "")
            encrypted.close()
            raise
        with self._lock:
            self.clients.append(_client_of(encrypted))
        return encrypted


def _client_of(connection: ssl.SSLSocket) -> str:
    subject = dict(part[0] for part in (connection.getpeercert() or {}).get("subject", ()))
    return str(subject.get("commonName", ""))


class Origin(Listener):
    """
    Answers each request with the next reply; the last reply repeats.

    Attributes:
        requests: Heads and bodies as received.
        peers: The client's certificate for each request, if it sent one.
    """

    def __init__(self, *replies: Reply, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._replies = list(replies) or [ACCEPTED]
        self.requests: list[bytes] = []
        self.peers: list[str] = []

    @property
    def scheme(self) -> str:
        return "http" if self._context is None else "https"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def handle(self, connection: socket.socket) -> None:
        while request := read_request(connection):
            with self._lock:
                self.requests.append(request)
                if isinstance(connection, ssl.SSLSocket):
                    self.peers.append(_client_of(connection))
                reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
            if callable(reply):
                reply(connection)
            else:
                connection.sendall(reply)


class BannerListener(Listener):
    """Sends a banner in plain text as soon as a client connects, like a mail server."""

    def handle(self, connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example.com ESMTP\r\n\r\n")
        stall(connection)


class ClosingListener(Listener):
    """Closes every connection immediately."""

    def handle(self, connection: socket.socket) -> None:
        pass


class SilentListener(Listener):
    """Never answers."""

    def handle(self, connection: socket.socket) -> None:
        stall(connection)


class Proxy(Listener):
    """
    Forwards requests and opens tunnels for CONNECT.

    Args:
        user, password: Required credentials.
        refusal: Answer every request with this status.
    Attributes:
        heads: Heads of the requests to the proxy itself.
    """

    def __init__(self, *, user: str = "", password: str = "", refusal: int = 0, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._expected = base64.b64encode(f"{user}:{password}".encode()) if user else b""
        self._refusal = refusal
        self.heads: list[bytes] = []

    @property
    def url(self) -> str:
        return f"{'http' if self._context is None else 'https'}://{self.host}:{self.port}"

    def handle(self, connection: socket.socket) -> None:
        while request := read_request(connection):
            head, _, body = request.partition(b"\r\n\r\n")
            self.heads.append(head)
            if self._expected and b"proxy-authorization: basic " + self._expected not in _with_lower_names(head):
                connection.sendall(_refusal(407))
            elif self._refusal:
                connection.sendall(_refusal(self._refusal))
            elif head.startswith(b"CONNECT "):
                host, _, port = head.split()[1].decode().rpartition(":")
                with socket.create_connection((host, int(port)), timeout=10) as origin:
                    origin.settimeout(None)
                    connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    _pump(connection, origin)
                return
            else:
                _forward(head, body, connection)


def _with_lower_names(head: bytes) -> list[bytes]:
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    return [name.lower() + colon + value.replace(b" Basic ", b" basic ") for name, colon, value in lines]


def _refusal(status: int) -> bytes:
    return b"HTTP/1.1 %d Refused by the proxy\r\nContent-Length: 0\r\n\r\n" % status


def _forward(head: bytes, body: bytes, connection: socket.socket) -> None:
    first, *lines = head.split(b"\r\n")
    method, target, version = first.split()
    url = urlsplit(target.decode())
    kept = [line for line in lines if not line.lower().startswith(b"proxy-")]
    path = url.path.encode()
    with socket.create_connection((url.hostname, url.port), timeout=10) as origin:
        origin.sendall(b"\r\n".join([b" ".join([method, path, version]), *kept, b"", body]))
        connection.sendall(read_request(origin))  # works for answers, too


def _pump(one: socket.socket, other: socket.socket) -> None:
    while True:
        ready = [each for each in (one, other) if isinstance(each, ssl.SSLSocket) and each.pending()]
        for each in ready or select.select([one, other], [], [])[0]:
            data = each.recv(65_536)
            if not data:
                return
            (other if each is one else one).sendall(data)


def read_request(connection: socket.socket) -> bytes:
    """Read a head and its body; return nothing if the peer disconnects first."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65_536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    length = int(lengths[0]) if lengths else 0
    while len(body) < length:
        part = connection.recv(65_536)
        if not part:
            return b""
        body += part
    return head + b"\r\n\r\n" + body


def skip_without_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address ::1")


def close(connection: socket.socket) -> None:
    """Reply by closing the connection."""
    connection.shutdown(socket.SHUT_RDWR)


def reset(connection: socket.socket) -> None:
    """Reply by resetting the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def stall(connection: socket.socket) -> None:
    """Send no reply until the client disconnects."""
    while connection.recv(65_536):
        pass


def after(data: bytes, then: Callable[[socket.socket], None]) -> Reply:
    """Return a reply that sends some bytes before another reply."""

    def reply(connection: socket.socket) -> None:
        connection.sendall(data)
        then(connection)

    return reply
