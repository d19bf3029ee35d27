"""The endpoint with real sockets: requests on the wire, and the classification of errors."""

from __future__ import annotations

import gzip
import re
import socket
import ssl
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import anyio
import pytest

from shipper.config.settings import EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization
from shipper.delivery.endpoint import ConnectionSettings, Endpoint, NoAnswerError, compress
from shipper.model.version import __version__
from tests.servers import ACCEPTED, Origin, Reply, after, close, reset, stall
from tests.stage.endpoints import AUTHORIZATION, DELIVERY, endpoint, failure, poll, post, reaching
from tests.stage.loops import on_each_loop


def head_of(request: bytes) -> list[str]:
    return request.partition(b"\r\n\r\n")[0].decode().split("\r\n")


def answering(*headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", "Content-Length: 0", *headers, "", ""]).encode("latin-1")


# The wire ------------------------------------------------------------------------------------------------------------


async def test_a_request_consists_of_the_documented_headers_and_the_body():
    async with reaching() as (used, origin):
        answer = await used.request(
            "POST", "/dim/v1/player/activities", b'{"a":1}', authorization=AUTHORIZATION, max_answer_bytes=100
        )
    (request,) = origin.requests
    first, *headers = head_of(request)
    assert first == "POST /dim/v1/player/activities HTTP/1.1"
    assert sorted(headers) == sorted(
        [
            f"Host: 127.0.0.1:{origin.port}",
            "Content-Type: application/json",
            "Cache-Control: no-cache",
            "Authorization: Bearer the-token",
            "Ocp-Apim-Subscription-Key: the-key",
            f"User-Agent: shipper/{__version__}",
            "Content-Length: 7",
        ]
    )
    assert request.endswith(b'\r\n\r\n{"a":1}')
    assert (answer.status, answer.content_type, answer.body) == (202, "application/json", b"{}")


async def test_trace_and_encoding_headers_are_sent_only_with_their_request():
    async with reaching() as (used, origin):
        await post(used)
        await post(used, traceparent="00-1-2-01", encoding="gzip")
        await post(used)
    plain, traced, again = (head_of(request) for request in origin.requests)
    assert set(traced) - set(plain) == {"traceparent: 00-1-2-01", "Content-Encoding: gzip"}
    assert again == plain


async def test_each_request_has_the_current_credentials():
    old, new = Authorization("old-token", "old-key"), Authorization("new-token", "new-key")
    async with reaching() as (used, origin):
        for each in (old, Authorization(*old), new, old):
            await post(used, authorization=each)
    sent = [re.findall(r"\w+-(?:token|key)$", "\n".join(head_of(request)), re.M) for request in origin.requests]
    assert sent == [[*each] for each in (old, old, new, old)]
    assert origin.accepted == 1


async def test_a_request_without_a_body_has_no_content_length():
    async with reaching() as (used, origin):
        await used.request("GET", "/x", authorization=AUTHORIZATION, max_answer_bytes=100)
    first, *headers = head_of(origin.requests[0])
    assert first == "GET /x HTTP/1.1"
    assert not [header for header in headers if header.lower().startswith(("content-length", "transfer-encoding"))]


async def test_every_request_equals_the_first_one_after_any_answer():
    body = b"[%b]" % b",".join(b"%d" % number for number in range(100_000))
    async with reaching(ACCEPTED.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b; Path=/\r\n\r\n")) as (used, origin):
        for _ in range(3):
            await post(used, body, traceparent="00-1-2-01", encoding="gzip")
    assert len(set(origin.requests)) == 1
    assert origin.accepted == 1


async def test_a_redirect_is_not_followed():
    redirect = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    async with reaching(redirect, ACCEPTED) as (used, origin):
        assert (await post(used)).status == 307
    assert len(origin.requests) == 1


async def test_a_proxy_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with reaching() as (used, _):
        assert (await post(used)).body == b"{}"


def test_compression_is_lossless_and_deterministic():
    body = b'{"EventType":"Acquisition"}' * 1000
    packed = compress(body)
    assert gzip.decompress(packed) == body
    assert len(packed) < len(body) / 10
    assert packed[4:8] == bytes(4), "the gzip header contains a time, so two attempts would differ"
    assert compress(body) == packed
    assert gzip.decompress(compress(b"")) == b""


# Answers -------------------------------------------------------------------------------------------------------------


async def test_status_and_headers_of_an_answer_are_kept():
    told = answering(
        "Content-type: Text/HTML; charset=x",
        "RETRY-AFTER: 7",
        "Date: Sun, 06 Nov 1994 08:49:37 GMT",
        "x-request-id: 0123456789abcdef",
    )
    async with reaching(told) as (used, _):
        answer = await post(used)
    assert answer == Answer(
        200, "text/html", "7", b"", date="Sun, 06 Nov 1994 08:49:37 GMT", request_id="0123456789abcdef"
    )


@pytest.mark.parametrize(
    ("headers", "request_id"),
    [
        ((), ""),
        ((f"request-id: {'a' * 16}",), "a" * 16),
        ((f"request-id: {'a' * 16}", f"X-Request-ID: {'b' * 16}"), "b" * 16),
        ((f"request-id: {'a' * 16}", f"x-request-id: {'b' * 16}", f"x-ms-request-id: {'c' * 16}"), "c" * 16),
        (("x-request-id: 0F8FAD5B-d9cb-469f-a165-70867728950e",), "0F8FAD5B-d9cb-469f-a165-70867728950e"),
        (("x-request-id: " + "0" * 128,), "0" * 128),
        (("x-request-id: " + "0" * 129,), ""),
        (("x-request-id: brisk_heron.4016",), ""),
        (("x-request-id: briskheron4016briskheron",), ""),
        (("x-request-id: 198.18.50.89-198.18.50.89",), ""),
        (("x-request-id: 1880130258",), ""),
        (("x-request-id: two words",), ""),
        (("x-request-id: \xe9",), ""),
        (("x-request-id: <script>",), ""),
        (("x-request-id:",), ""),
    ],
)
async def test_a_request_id_is_kept_if_it_cannot_quote_a_record(headers: tuple[str, ...], request_id: str):
    async with reaching(answering(*headers)) as (used, _):
        assert (await post(used)).request_id == request_id


EARLY = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + ACCEPTED
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nRetry-After: 9\r\n\r\n"


def byte_by_byte(answer: bytes, *, pause_s: float = 0.0) -> Reply:
    def reply(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answer:
            connection.sendall(bytes([byte]))
            if pause_s:  # even a sleep of zero lets the client send its next request before the rest is there
                time.sleep(pause_s)
        if pause_s:
            stall(connection)

    return reply


@pytest.mark.parametrize(
    ("reply", "status", "body", "connections"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", 1),
        (b"HTTP/1.1 202\r\nContent-Length: 2\r\n\r\n{}", 202, b"{}", 1),
        (ACCEPTED.replace(b"\r\n", b"\n"), 202, b"{}", 1),  # lines may end without a carriage return
        (CHUNKED, 200, b"abcde", 1),
        (EARLY, 202, b"{}", 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000, 200, b"x" * 1000, 1),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"x" * 200_000, 200, b"x" * 1000, 3),
        (b"HTTP/1.1 202 Accepted\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}", 202, b"{}", 3),
        (b"HTTP/1.0 202 Accepted\r\nContent-Length: 2\r\n\r\n{}", 202, b"{}", 3),
        (after(b"HTTP/1.1 200 OK\r\n\r\nto the end", close), 200, b"to the end", 3),
        (after(b"HTTP/1.0 200 OK\r\n\r\n", close), 200, b"", 3),
        (ACCEPTED + ACCEPTED.replace(b"202", b"200"), 202, b"{}", 3),  # the rest is not read as the next answer
    ],
)
async def test_valid_answers_are_read(reply: Reply, status: int, body: bytes, connections: int):
    for form in [reply, byte_by_byte(reply)] if isinstance(reply, bytes) else [reply]:
        async with reaching(form) as (used, origin):
            answers = [await post(used) for _ in range(3)]
        assert {(answer.status, answer.body, answer.retry_after) for answer in answers} == {(status, body, "")}
        assert origin.accepted == connections or form is not reply


async def test_an_endless_head_is_an_error():
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"X-More: " + b"y" * 1000 + b"\r\n")

    async with reaching(endless, ACCEPTED) as (used, _):
        assert (await failure(used)).cause == "remote_protocol_error"
        assert (await post(used)).body == b"{}"


async def test_an_answer_is_read_up_to_the_limit_and_the_next_request_works():
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            connection.sendall(b"y" * 65_536)

    async with reaching(endless, ACCEPTED) as (used, _):
        assert (await post(used)).body == b"y" * 1000
        assert (await post(used)).body == b"{}"


@on_each_loop
@pytest.mark.parametrize(("status", "end"), [(413, stall), (413, reset), (202, stall), (202, reset)])
async def test_an_answer_sent_before_the_body_is_read_counts_but_does_not_accept_a_part(
    ca: Path, context: ssl.SSLContext | None, status: int, end: Reply
):
    class Hasty(Origin):
        def handle(self, connection: socket.socket) -> None:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 %d Hasty\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
            connection.shutdown(socket.SHUT_WR)
            end(connection)

    with Hasty(context=context) as origin:
        async with endpoint(origin.url, ca_bundle=ca) as used:
            if (status, end) == (202, reset):
                with pytest.raises(NoAnswerError, match="before the request was complete"):
                    await post(used, b"z" * 8_000_000)
            else:
                assert (await post(used, b"z" * 8_000_000)).status == status


# Trouble -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        *(close, reset, after(b"HTTP/1.1 202 Acc", close), after(ACCEPTED[:-1], close)),
        after(b"220 mail.example.com ESMTP\r\n", close),
    ],
    ids=["closed", "reset", "half a head", "half a body", "no HTTP"],
)
async def test_an_incomplete_answer_is_an_error_and_the_next_request_works(trouble: Reply):
    async with reaching(trouble, ACCEPTED) as (used, origin):
        error = await failure(used)
        assert origin.url in str(error)
        assert error.cause == ("read_error" if trouble is reset else "remote_protocol_error")
        assert (error.cause == "tls", error.is_stale, error.was_sent) == (False, False, True)
        assert (await post(used)).body == b"{}"
    assert len(origin.requests) == 2, "the endpoint itself repeats a request"


@pytest.mark.parametrize(
    "trouble",
    [
        stall,
        after(ACCEPTED[:-1], stall),
        byte_by_byte(b"HTTP/1.1 200 OK\r\n" + b"X-Slow: 1\r\n" * 1000, pause_s=0.01),
        byte_by_byte(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"." * 999, pause_s=0.01),
    ],
    ids=["silence", "silence behind the head", "head byte by byte", "body byte by byte"],
)
async def test_an_answer_that_does_not_end_is_a_timeout_and_the_next_request_works(trouble: Reply):
    hasty = {"read_timeout_seconds": 0.3, "connect_timeout_seconds": 0.5}
    async with reaching(trouble, ACCEPTED, delivery=hasty) as (used, _):
        error = await failure(used)
        assert (error.cause, error.is_stale, error.was_sent) == ("read_timeout", False, True)
        assert "0.3 s" in str(error)
        assert "delivery.read_timeout_seconds" in str(error)
        assert (await post(used)).body == b"{}"


async def test_a_body_that_is_not_read_is_a_timeout_that_names_its_setting():
    class Deaf(Origin):
        def handle(self, connection: socket.socket) -> None:
            released.wait(20)

    released = threading.Event()
    with Deaf() as origin:
        async with endpoint(origin.url, delivery={"read_timeout_seconds": 0.2}) as used:
            with pytest.raises(NoAnswerError, match=r"delivery\.read_timeout_seconds") as caught:
                await post(used, b"z" * 64_000_000)
        released.set()
    assert (caught.value.cause, caught.value.was_sent) == ("write_timeout", True)


async def test_a_refused_connection_is_a_connect_error():
    with Origin() as origin:
        pass
    async with endpoint(origin.url) as used:
        error = await failure(used)
    assert str(error) == f"cannot connect to {origin.url}: Connection refused"
    assert (error.cause, error.was_sent) == ("connect_error", False)


async def test_a_connection_that_is_closed_while_it_is_opened_is_a_connect_error(monkeypatch: pytest.MonkeyPatch):
    class Closed(anyio.abc.SocketStream):
        """A stream whose socket the event loop has closed."""

        @property
        def extra_attributes(self) -> Any:
            return None.getpeername()

        async def aclose(self) -> None: ...

    Closed.__abstractmethods__ = frozenset()

    async def connect(*_: object) -> Closed:
        return Closed()

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    async with endpoint("http://127.0.0.1:1") as used:
        error = await failure(used)
    assert (error.cause, error.was_sent) == ("connect_error", False)
    assert str(error) == "cannot connect to http://127.0.0.1:1: the connection was closed"


async def test_a_host_that_accepts_no_connections_is_a_connect_timeout_that_names_its_setting():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as one, socket.socket() as two:
        for filler in (one, two):
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        async with endpoint(url, delivery={"connect_timeout_seconds": 0.2}) as used:
            error = await failure(used)
    assert (error.cause, error.was_sent) == ("connect_timeout", False)
    assert "0.2 s; see delivery.connect_timeout_seconds" in str(error)


async def test_the_endpoint_is_usable_after_a_cancelled_request():
    async with reaching(stall, ACCEPTED) as (used, origin):
        async with anyio.create_task_group() as group:
            group.start_soon(post, used)
            await poll(lambda: origin.requests)
            group.cancel_scope.cancel()
        assert (await post(used)).body == b"{}"


@pytest.mark.parametrize("unfit", [Authorization("secret-token ", "key"), Authorization("a\r\nX-secret: 1", "key")])
async def test_credentials_that_are_invalid_in_a_header_are_neither_sent_nor_shown(unfit: Authorization):
    async with reaching() as (used, origin):
        await post(used)
        with pytest.raises(NoAnswerError) as caught:
            await post(used, authorization=unfit)
        await post(used)
    assert len(origin.requests) == 2
    assert (caught.value.cause, caught.value.was_sent) == ("local_protocol_error", False)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


async def test_an_answer_that_repeats_the_request_is_not_quoted():
    async with reaching(after(b"Authorization: Bearer the-token\r\n\r\n", close)) as (used, _):
        error = await failure(used)
    assert error.cause == "remote_protocol_error"
    assert "the-token" not in "".join(traceback.format_exception(error))


def test_the_repr_of_an_endpoint_contains_only_its_address():
    settings = ConnectionSettings(EndpointSettings(base_url="http://127.0.0.1:9"), DELIVERY, "intake")
    assert repr(Endpoint(settings)) == "<Endpoint http://127.0.0.1:9>"
