"""Hostile answers, from the socket to the verdict: none ends the run, is read for ever, or is trusted."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import chain, repeat

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Shipper
from tests.servers import ACCEPTED, Origin, Reply

CLOSING = ACCEPTED.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
DIGITS = b"9" * 5000
ZEROS = b"1" + b"0" * 400
DEEP = b"[" * 200_000
# As deep as can be parsed, which may be deeper than can be serialized.
NESTED = tuple(b'{"ok":false,"status":"x","0":%b}' % (b"[" * depth + b"]" * depth) for depth in range(900, 1_000))
FLOOD_MAX = 64 << 20  # twice the limit for an answer, plus socket buffers


def answer(body: bytes, status: bytes = b"202 Accepted", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, *headers, b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, b"", body])


# Each answers a request with one record, which is accepted at the next attempt.
ANSWERS: tuple[bytes, ...] = (
    *(answer(b'{"status":"%b"}' % DIGITS), answer(b'{"status":%b}' % DIGITS), answer(b'{"status":-%b}' % ZEROS)),
    *(answer(b'{"accepted":%b}' % number) for number in (DIGITS, ZEROS, b'"%b"' % DIGITS, b"1e400", b"-0.0")),
    *(answer(b'{"results":[{"%b":%b}]}' % (name, ZEROS)) for name in (b"status", b"code")),
    *(
        answer(body)
        for body in (b"{", DEEP, DEEP.replace(b"[", b'{"a":'), b'{"a":"\\ud800"}', b"\xff\xfe{", b"\0" * 9000, *NESTED)
    ),
    *(answer(b"", b"503 x", b"Retry-After: " + wait) for wait in (b"-1", b"nan", b"0." + b"0" * 5000, b"\xff", b"0 0")),
    answer(b"", b"503 x", b"Retry-After: Mon, 01 Jan 0001 00:00:00 +9999", b"Date: Mon, 99 Jan %b 0:0:0" % DIGITS),
    answer(b"", b"503 x", b"Date: Mon, 01 Jan 9999 00:00:00 -9999", b"Retry-After: Mon, 01 Jan 1 0:0:0 GMT"),
    *(answer(b"", status) for status in (b"000 x", b"099 x", b"999 x", b"600", DIGITS, b"20", b"-20 x", b"2e2 x")),
    *(b"HTTP/1.1 202 x\r\nContent-Length: %b\r\n\r\n" % length for length in (b"-1", DIGITS, b"1, 2", b"0x2", b"")),
    b"HTTP/1.1 202 x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
    b"HTTP/1.1 202 x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n",
    *(b"HTTP/%b 202 x\r\n\r\n" % version for version in (DIGITS, b"", b"x", b"0.0", b"0.9", b"2.0", b"9.9")),
    *(b"\0" * 5000, b"\x16\x03\x01" + bytes(300), b"HTTP/1.1 101 x\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx"),
)


def and_end(data: bytes) -> Reply:
    """Reply with these bytes and close, so that the client does not wait for more."""

    def reply(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    return reply


class Flood:
    """
    An endless reply: `head`, then `piece` for ever.

    Attributes:
        sent: Bytes sent until the connection was closed.
    """

    def __init__(self, head: bytes, piece: bytes) -> None:
        self._pieces: Iterator[bytes] = chain([head], repeat(piece * (65_536 // len(piece) + 1)))
        self.sent = 0

    def __call__(self, connection: socket.socket) -> None:
        for piece in self._pieces:
            connection.sendall(piece)
            self.sent += len(piece)
            if self.sent > FLOOD_MAX:
                connection.close()
                return


def floods() -> list[Flood]:
    chunked = b"HTTP/1.1 202 x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [
        Flood(chunked + b"2\r\n{}\r\n0\r\n", b"X-More: y\r\n"),
        Flood(chunked + b"2\r\n{}\r\n0\r\nX-More: ", b"y"),
        Flood(chunked + b"2;", b"x"),
        Flood(chunked, b"1;" + b"x" * 9000 + b"\r\n \r\n"),
        Flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        Flood(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
        Flood(b"HTTP/1.1 202 x\r\n", b"X: y\r\n"),
        Flood(b"HTTP/1.1 202 x\r\nX-", b"y"),
        Flood(b"HTTP/1.1 202 ", b"y"),
        Flood(b"", b"\r\n"),
        Flood(b"HTTP/1.1 202 x\r\n\r\n", b" "),
    ]


@pytest.mark.parametrize("between", [CLOSING, ACCEPTED], ids=["first on a connection", "later on a connection"])
def test_no_answer_ends_the_run_or_is_read_for_ever(between: bytes, shipper: Shipper, sample: Sample):
    """On new connections, and on reused ones, where a broken answer may indicate a stale connection."""
    endless = floods()
    hostile: list[Reply] = [*map(and_end, ANSWERS), *endless]
    file = shipper.write("events.ndjson", *sample.lines[: len(hostile) + 1])
    replies = [between, *chain.from_iterable((reply, between) for reply in hostile)]
    with Origin(*replies) as origin:
        shipper.target = shipper.target._replace(base_url=origin.url)
        result = shipper.backfill(
            file,
            limit_s=120,
            fresh=True,
            settings={
                "batch.max_events": 1,
                "delivery.concurrency": 1,
                "delivery.retry_initial_seconds": 0.01,
                "delivery.retry_max_seconds": 0.01,
                "delivery.fail_fast": "false",
            },
        )
    assert (result.returncode, result.counts()) == (0, (len(hostile) + 1, len(hostile) + 1, 0, 0, 0))
    # A connection closed after an answer may be reset before the answer is read; then the request is repeated.
    assert len(origin.requests) >= len(replies), "an answer was not sent"
    assert {flood.sent <= FLOOD_MAX for flood in endless} == {True}, [flood.sent for flood in endless]
    assert result.peak_bytes < 400 << 20


@pytest.mark.parametrize("expires_in", [ZEROS, b'"%b"' % ZEROS, DIGITS, b"-" + ZEROS, b"1e400", b"true", b"[]"])
def test_a_token_with_any_lifetime_is_used(expires_in: bytes, shipper: Shipper, sample: Sample):
    file = shipper.write("events.ndjson", *sample.lines[:10])
    good = answer(b'{"access_token":"a","token_type":"Bearer"}', b"200 OK")
    granted = answer(b'{"access_token":"a","token_type":"Bearer","expires_in":%b}' % expires_in, b"200 OK")
    with Origin(granted, good) as tokens, Origin() as origin:
        shipper.target = shipper.target._replace(base_url=origin.url)
        shipper.use_oauth2(token_url=f"{tokens.url}/token", client_id="x", client_secret={"env": "INTAKE_TOKEN"})
        result = shipper.backfill(file, settings={"delivery.retry_initial_seconds": 0.1})
    assert (result.returncode, result.counts()) == (0, (10, 10, 0, 0, 0))
    assert tokens.requests
