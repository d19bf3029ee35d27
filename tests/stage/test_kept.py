"""What a connection carries: the later answers tell what the first one tells, and what is no answer ends it."""

from __future__ import annotations

import socket

import msgspec
import pytest

from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization
from shipper.delivery.endpoint import Endpoint, NoAnswerError
from tests.stage.endpoints import AUTHORIZATION, endpoint, post
from tests.stage.servers import ACCEPTED, Origin, Reply, close, head_and_close, reset
from tests.stage.test_endpoint import UNFIT, half_a_body

WORDS = [
    *(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n"),
    b"HTTP/1.1 202\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 503 Unavailable\r\nRETRY-AFTER: 7\r\ncontent-type: Text/Plain; a=b\r\nContent-Length: 2\r\n\r\nno",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nRetry-After: 9\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + ACCEPTED,
    b"HTTP/1.1 200 OK\r\nX-Request-ID: r\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,
    b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000,
    b"HTTP/1.1 202 Accepted\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.0 202 Accepted\r\nContent-Length: 2\r\n\r\n{}",
]
UNTIL_THE_END = [
    b"HTTP/1.1 200 OK\r\n\r\nto the end",
    b"HTTP/1.0 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000,
]


def and_close(answer: bytes) -> Reply:
    def reply(connection: socket.socket) -> None:
        connection.sendall(answer)
        close(connection)

    return reply


def byte_by_byte(answer: bytes) -> Reply:
    def reply(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answer:
            connection.sendall(bytes([byte]))

    return reply


async def first_and_later(reply: Reply, **options: int) -> tuple[Answer, Answer]:
    """Ask for the same answer as the first one of a connection, and as a later one."""
    with Origin(reply, ACCEPTED) as origin:
        async with endpoint(origin.url) as used:
            first = await post(used, **options)
            assert (await post(used)).body == b"{}"
    with Origin(ACCEPTED, reply, ACCEPTED) as origin:
        async with endpoint(origin.url) as used:
            await post(used)
            later = await post(used, **options)
            assert origin.accepted == 1, "it was not a later one"
            assert (await post(used)).body == b"{}"
    return first, later


@pytest.mark.parametrize("form", [bytes, byte_by_byte])
@pytest.mark.parametrize("answer", WORDS)
async def test_a_later_answer_tells_what_the_first_one_tells(form: type[bytes], answer: bytes):
    first, later = await first_and_later(form(answer))
    assert first == later


@pytest.mark.parametrize("answer", UNTIL_THE_END)
async def test_an_answer_may_end_with_its_connection(answer: bytes):
    first, later = await first_and_later(and_close(answer))
    assert first == later
    assert later.body == answer.partition(b"\r\n\r\n")[2][:1000]


@pytest.mark.parametrize("trouble", [reset, head_and_close, half_a_body, b"220 mail.example.com ESMTP\r\n"])
async def test_what_is_no_answer_is_none_on_a_kept_connection_either(trouble: Reply):
    with Origin(ACCEPTED, trouble, ACCEPTED) as origin:
        async with endpoint(origin.url) as used:
            await post(used)
            with pytest.raises(NoAnswerError) as caught:
                await post(used)
            assert (await post(used)).body == b"{}"
    assert caught.value.cause == ("read_error" if trouble is reset else "remote_protocol_error")
    assert caught.value.was_sent
    assert caught.value.is_stale == (trouble is reset), "nothing had come: it may have been closed before"
    assert origin.accepted == 2


async def test_a_head_without_an_end_is_no_answer():
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"X-More: " + b"y" * 1000 + b"\r\n")

    with Origin(ACCEPTED, endless, ACCEPTED) as origin:
        async with endpoint(origin.url) as used:
            await post(used)
            with pytest.raises(NoAnswerError) as caught:
                await post(used)
            assert caught.value.cause == "remote_protocol_error"
            assert (await post(used)).body == b"{}"


async def test_what_follows_an_answer_is_not_taken_for_the_next_one():
    followed = ACCEPTED + ACCEPTED.replace(b"202", b"200")
    with Origin(ACCEPTED, followed, ACCEPTED.replace(b"202", b"503")) as origin:
        async with endpoint(origin.url) as used:
            assert [(await post(used)).status for _ in range(3)] == [202, 202, 503]
    assert origin.accepted == 2


async def test_lines_may_end_without_a_carriage_return():
    with Origin(ACCEPTED.replace(b"\r\n", b"\n")) as origin:
        async with endpoint(origin.url) as used:
            assert [(await post(used)).status for _ in range(3)] == [202] * 3
    assert origin.accepted == 1


async def test_new_credentials_that_are_not_fit_for_a_header_do_not_reach_the_wire():
    with Origin() as origin:
        async with endpoint(origin.url) as used:
            await post(used)
            await post(used)
            for unfit in (UNFIT, Authorization("a\r\nX-Injected: 1", "key")):
                with pytest.raises(NoAnswerError) as caught:
                    await post(used, authorization=unfit)
                assert caught.value.cause == "local_protocol_error"
            await post(used, authorization=AUTHORIZATION)
    assert len(origin.requests) == 3
    assert b"X-Injected" not in b"".join(origin.requests)


async def test_a_later_request_is_the_first_one_byte_for_byte():
    body = msgspec.json.encode(list(range(100_000)))
    with Origin() as origin:
        async with endpoint(origin.url) as used:
            await send_three(used, body)
    first, second, third = origin.requests
    assert first == second == third
    assert origin.accepted == 1


async def send_three(used: Endpoint, body: bytes) -> None:
    for _ in range(3):
        await post(used, body, traceparent="00-1-2-01", encoding="gzip")
