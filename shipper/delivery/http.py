"""
A connection that has carried an answer: the next requests are written to it as they are.

The HTTP library opens a connection, with all that belongs to it, and exchanges the first request. What it does for each
later one costs more than everything else that is done for a batch, except its validation; here, that is a write, a
read and a parser in C.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import httpcore
import httptools

_READ_BYTES: Final = 65_536
HEAD_MAX_BYTES: Final = 65_536  # of an answer: status line and headers, and what informational ones come before it
VERSIONS: Final = {"1.0", "1.1"}  # of HTTP; parsers take others, too
FRAMING: Final = 8  # bytes that may frame a byte of the body: in chunks of one byte, it is six


class Message(NamedTuple):
    """
    An answer as it came.

    Attributes:
        headers: By their names in lower case.
        is_last: The connection carries no more after it.
    """

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes
    is_last: bool


class NotHttpError(httpcore.RemoteProtocolError):
    """What came cannot be read, by a parser that is stricter than the library's."""


class KeptConnection:
    """
    Exchanges one request after the other.

    Args:
        stream: What the library has read an answer from, to its end.
        timeout_s: For each read and each write.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream, timeout_s: float) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._arrivals = select.poll()
        connection = told_by(stream, "socket")
        self._is_open = connection is not None and connection.fileno() >= 0
        if self._is_open:
            self._arrivals.register(connection, select.POLLIN)

    @property
    def is_silent(self) -> bool:
        """Whether the connection is open, and nothing has come that nobody asked for, such as its end."""
        return self._is_open and not self._arrivals.poll(0)

    async def exchange(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, max_answer_bytes: int
    ) -> Message:
        """
        Send a request and read the answer.

        Args:
            headers: All of them, known to be fit for HTTP.
            max_answer_bytes: The body is read up to here; then the connection carries no more.
        Raises:
            httpcore.NetworkError, httpcore.TimeoutException, httpcore.RemoteProtocolError: There is no answer, and
                the connection is of no use any more.
        """
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), target, b"".join(lines))
        with suppress(httpcore.WriteError):  # the service may have answered before it closed the connection
            await self._stream.write(head + body, self._timeout_s)
        return await self._answer(max_answer_bytes)

    async def _answer(self, max_answer_bytes: int) -> Message:
        answer = _Answer()
        while not answer.is_complete and answer.size < max_answer_bytes:
            data = await self._stream.read(_READ_BYTES, self._timeout_s)
            if not data and answer.ends_with_connection:
                break
            answer.feed(data)
        return Message(
            answer.status,
            answer.headers,
            b"".join(answer.parts)[:max_answer_bytes],
            is_last=not (answer.is_complete and not answer.is_followed and answer.keeps_connection),
        )


def is_kept(version: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a connection may carry more after an answer that has come to its own end."""
    return version == "1.1" and b"close" not in headers.get(b"connection", b"").lower()


def told_by(stream: httpcore.AsyncNetworkStream, what: str) -> Any:
    """Ask a connection for its socket or the like; None if it was just closed, and has none any more."""
    try:
        return stream.get_extra_info(what)
    except AttributeError:
        return None


class _Answer:
    """Takes in an answer piece by piece; the parser calls the methods whose names begin with `on_`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.size = 0
        self.has_head = False
        self.is_complete = False
        self.is_followed = False
        self._bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def keeps_connection(self) -> bool:
        return is_kept(self._parser.get_http_version(), self.headers)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the answer."""
        return self.has_head and b"content-length" not in self.headers and b"transfer-encoding" not in self.headers

    def feed(self, data: bytes) -> None:
        """
        Raises:
            httpcore.RemoteProtocolError: It is cut off, or no HTTP, or far more than its body.
        """
        if not data:
            raise httpcore.RemoteProtocolError("the connection was closed before the whole answer had come")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:
                raise NotHttpError("what came is not HTTP") from None
            self.is_followed = True
        self._bytes += len(data)
        if not self.is_complete and self._bytes > HEAD_MAX_BYTES + (1 + FRAMING) * self.size:
            raise httpcore.RemoteProtocolError("the head, a chunk's or the trailers of the answer do not end")

    def on_message_begin(self) -> None:
        if self.is_complete:
            self.is_followed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it is a trailer, or of what follows
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if not self.is_complete:
            if self._parser.get_http_version() not in VERSIONS:
                raise NotHttpError("the answer is of another version of HTTP")
            self.status = self._parser.get_status_code()
            self.has_head = True

    def on_body(self, part: bytes) -> None:
        if not self.is_complete:
            self.parts.append(part)
            self.size += len(part)

    def on_message_complete(self) -> None:
        if self.status < 200 and self.status != 101:  # only a word in between
            self.headers.clear()
            self.has_head = False
        else:
            self.is_complete = True
