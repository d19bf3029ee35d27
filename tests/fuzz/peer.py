"""
A peer that answers with the bytes of an input, on a real socket, in the event loop of its client.

An input is a line that says how the connection ends, followed by pieces of bytes that are sent one by one. The body
after a blank line can get its actual length or be sent in chunks, so that a mutated body is not just truncated.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from shipper.delivery.answer import Answer

BETWEEN: Final = b"\x1e"  # pieces
LENGTH: Final = b"Content-Length: @\r\n"
CHUNKED: Final = b"Transfer-Encoding: @\r\n"
_FLOOD_BYTES: Final = 64 << 20  # twice what is read of an answer at most, plus the socket buffers
_PIECE_BYTES: Final = 65_536


class Script(NamedTuple):
    """
    What is sent, and how it ends: `close`, `reset`, `hold` (the connection stays silent), `keep` (the next request is
    answered), or `flood` (the last piece is repeated endlessly).
    """

    pieces: list[bytes]
    end: bytes

    @property
    def is_whole(self) -> bool:
        """Return whether the end of the answer is unambiguous, so that another parser finds the same."""
        return self.end not in {b"reset", b"flood"}


def script_of(data: bytes) -> Script:
    """Parse an input."""
    end, _, sent = data.partition(b"\n")
    head, blank, body = sent.partition(b"\r\n\r\n")
    if LENGTH in head + b"\r\n":
        length = len(body) - body.count(BETWEEN)
        head = (head + b"\r\n").replace(LENGTH, b"Content-Length: %d\r\n" % length, 1)[:-2]
    elif CHUNKED in head + b"\r\n":
        head = (head + b"\r\n").replace(CHUNKED, b"Transfer-Encoding: chunked\r\n", 1)[:-2]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in body.split(BETWEEN) if part) + b"0\r\n\r\n"
    known = end if end in {b"reset", b"hold", b"keep", b"flood"} else b"close"
    return Script((head + blank + body).split(BETWEEN), known)


Reply = Script | bytes


class Peer:
    """
    A server that answers each request with a script.

    Args:
        reply: Called with the head and body of each request.
        is_plain: Whether to answer any data, even if it is not HTTP.
    """

    def __init__(self, reply: Callable[[bytes], Reply], *, is_plain: bool = False) -> None:
        self.reply = reply
        self.is_plain = is_plain
        self.port = 0
        self._server: asyncio.Server  # a reference keeps it alive
        self.connections = 0

    async def listen(self) -> None:
        """Start listening, if not done yet."""
        if self.port:
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]


class _Connection(asyncio.Protocol):
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._received = b""
        self._transport: asyncio.Transport
        self._is_writable = asyncio.Event()
        self._playing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_writable.set()
        self._peer.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_writable.set()
        if self._playing is not None:
            self._playing.cancel()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        request = self._received if self._peer.is_plain else _whole_request(self._received)
        if not request or self._playing is not None:
            return
        self._received = self._received[len(request) :]
        reply = self._peer.reply(request)
        if isinstance(reply, bytes):
            self._transport.write(reply)
        else:
            self._playing = asyncio.get_running_loop().create_task(self._play(reply))

    async def _play(self, script: Script) -> None:
        for number, piece in enumerate(script.pieces):
            if number:
                await asyncio.sleep(0)
                await asyncio.sleep(0)  # the reader has run
            self._transport.write(piece)
        if script.end == b"flood":
            await self._flood(script.pieces[-1] or b"\n")
        if script.end == b"reset":
            connection: socket.socket = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        elif script.end == b"keep":
            self._playing = None
        elif script.end != b"hold":
            self._transport.close()

    async def _flood(self, piece: bytes) -> None:
        block = piece * (_PIECE_BYTES // len(piece) + 1)
        for _ in range(_FLOOD_BYTES // len(block)):
            await self._is_writable.wait()
            if self._transport.is_closing():
                return
            self._transport.write(block)
            await asyncio.sleep(0)
        raise AssertionError("an endless answer is read endlessly")


def _whole_request(received: bytes) -> bytes:
    head, blank, body = received.partition(b"\r\n\r\n")
    if not blank:
        return b""
    lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    length = int(lengths[0]) if lengths else 0
    return head + blank + body[:length] if len(body) >= length else b""


class _Bytes(io.BytesIO):
    def makefile(self, *_: object) -> io.BytesIO:
        return self

    def close(self) -> None:
        """Do nothing, because another answer may follow an informational one."""


class _Response(http.client.HTTPResponse):
    """An answer whose chunks may also end with a bare LF, as its lines may (RFC 9112, section 2.2)."""

    def _get_chunk_left(self) -> int | None:
        if self.chunk_left == 0 and self.fp.readline() in {b"\r\n", b"\n"}:
            self.chunk_left = None
        return super()._get_chunk_left()  # type: ignore[misc,no-any-return]


def read_with_http_client(script: Script, method: str) -> Answer:
    """
    Parse what was sent with the standard library instead of our parser.

    Raises:
        HTTPException, ValueError: It is invalid.
    """
    source = _Bytes(b"".join(script.pieces).lstrip(b"\r\n"))  # line ends may precede an answer
    while True:
        response = _Response(source, method=method)  # type: ignore[arg-type]
        response.begin()
        if response.status == 101 or response.status >= 200:
            break
    content_type = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    return Answer(response.status, content_type, response.getheader("Retry-After") or "", response.read())
