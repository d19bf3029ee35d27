"""The endpoint against real sockets: what goes over the wire, and what each kind of trouble is called."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest
from anyio.streams.tls import TLSStream

from shipper import __version__
from shipper.config import DeliverySettings, EndpointSettings
from shipper.delivery.endpoint import Endpoint, NoAnswerError, make_ssl_context
from shipper.errors import ConfigError
from shipper.secrets import LiteralSecret

Handler = Callable[[anyio.abc.ByteStream], Awaitable[None]]
ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
SETTINGS = DeliverySettings(connect_timeout_seconds=5.0, read_timeout_seconds=5.0)


class Server:
    """Answers each request on each connection with the next item of a script; the last one goes on for ever."""

    def __init__(self, *script: bytes | Handler) -> None:
        self.script = list(script)
        self.requests: list[bytes] = []
        self.connections = 0

    async def handle(self, stream: anyio.abc.ByteStream) -> None:
        self.connections += 1
        async with stream:
            try:
                while True:
                    self.requests.append(await read_request(stream))
                    item = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                    if callable(item):
                        await item(stream)
                    else:
                        await stream.send(item)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
                return


async def read_request(stream: anyio.abc.ByteStream) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += await stream.receive()
    return head + b"\r\n\r\n" + body


@asynccontextmanager
async def serving(server: Server, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    async def handle(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if context is None:
                await server.handle(stream)
                return
            try:
                encrypted = await TLSStream.wrap(
                    stream, ssl_context=context, server_side=True, standard_compatible=False
                )
            except (anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError):
                return
            await server.handle(encrypted)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    with anyio.fail_after(20):
        async with listener, anyio.create_task_group() as group:
            group.start_soon(listener.serve, handle)
            yield listener.extra(anyio.abc.SocketAttribute.local_port)
            group.cancel_scope.cancel()


@asynccontextmanager
async def endpoint(
    port: int, *, scheme: str = "http", host: str = "127.0.0.1", ca: Path | None = None, **changes: Any
) -> AsyncIterator[Endpoint]:
    settings = EndpointSettings(
        base_url=f"{scheme}://{host}:{port}",
        subscription_key=LiteralSecret("the-key"),
        token=LiteralSecret("the-token"),
        ca_bundle=ca,
    )
    used = Endpoint(
        settings,
        msgspec.structs.replace(SETTINGS, **changes),
        section="intake",
        ssl_context=make_ssl_context(settings),
    )
    try:
        yield used
    finally:
        await used.aclose()


async def post(used: Endpoint, body: bytes = b"[1]") -> bytes:
    return (await used.request("POST", "/x", body, max_answer_bytes=1000)).body


# The wire ------------------------------------------------------------------------------------------------------------


async def test_a_request_is_the_documented_headers_and_the_body_and_nothing_else():
    server = Server(ACCEPTED)
    async with serving(server) as port, endpoint(port) as used:
        answer = await used.request("POST", "/dim/v1/player/activities", b'{"a":1}', max_answer_bytes=100)
    (request,) = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /dim/v1/player/activities HTTP/1.1"
    assert sorted(header.lower() for header in headers) == sorted(
        [
            f"host: 127.0.0.1:{port}",
            "content-type: application/json",
            "cache-control: no-cache",
            "authorization: bearer the-token",
            "ocp-apim-subscription-key: the-key",
            f"user-agent: shipper/{__version__}",
            "content-length: 7",
        ]
    )
    assert "Authorization: Bearer the-token" in headers, "the scheme and the token as they are"
    assert body == b'{"a":1}'
    assert (answer.status, answer.content_type, answer.body) == (202, "application/json", b"{}")


async def test_nothing_of_an_answer_is_taken_over_into_the_next_request():
    cookie = ACCEPTED.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b; Path=/\r\n\r\n")
    server = Server(cookie)
    async with serving(server) as port, endpoint(port) as used:
        await post(used)
        await post(used)
    assert server.requests[0] == server.requests[1]
    assert server.connections == 1


async def test_a_redirect_is_an_answer_and_is_not_followed():
    redirect = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    server = Server(redirect, ACCEPTED)
    async with serving(server) as port, endpoint(port) as used:
        assert (await used.request("POST", "/x", b"1", max_answer_bytes=10)).status == 307
    assert len(server.requests) == 1


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(Server(ACCEPTED)) as port, endpoint(port) as used:
        assert await post(used) == b"{}"


async def test_a_large_body_arrives_whole():
    body = b"z" * 3_000_000
    server = Server(ACCEPTED)
    async with serving(server) as port, endpoint(port) as used:
        await post(used, body)
    assert server.requests[0].endswith(b"\r\n\r\n" + body)


async def test_a_chunked_answer_is_put_together():
    chunked = b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with serving(Server(chunked)) as port, endpoint(port) as used:
        assert await post(used) == b"{}"
        assert await post(used) == b"{}"


async def test_more_than_the_limit_of_an_answer_is_not_read_and_the_next_request_works():
    async def endless(stream: anyio.abc.ByteStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await stream.send(b"y" * 65_536)

    async with serving(Server(endless, ACCEPTED)) as port, endpoint(port) as used:
        assert await post(used) == b"y" * 1000
        assert await post(used) == b"{}"


# Trouble -------------------------------------------------------------------------------------------------------------


async def nothing(stream: anyio.abc.ByteStream) -> None:
    await stream.aclose()


async def half_a_head(stream: anyio.abc.ByteStream) -> None:
    await stream.send(b"HTTP/1.1 202 Acc")
    await stream.aclose()


async def half_a_body(stream: anyio.abc.ByteStream) -> None:
    await stream.send(ACCEPTED[:-1])
    await stream.aclose()


async def no_http(stream: anyio.abc.ByteStream) -> None:
    await stream.send(b"220 mail.example.com ESMTP\r\n")
    await stream.aclose()


@pytest.mark.parametrize("trouble", [nothing, half_a_head, half_a_body, no_http])
async def test_an_answer_that_is_not_whole_is_no_answer_and_the_next_request_works(trouble: Handler):
    server = Server(trouble, ACCEPTED)
    async with serving(server) as port, endpoint(port) as used:
        with pytest.raises(NoAnswerError, match=f"127.0.0.1:{port}") as caught:
            await post(used)
        assert caught.value.cause in {"remote_protocol_error", "read_error"}
        assert not caught.value.is_tls
        assert await post(used) == b"{}"
    assert len(server.requests) == 2, "a request is not repeated behind the sender's back"


async def silence(stream: anyio.abc.ByteStream) -> None:
    await anyio.sleep_forever()


async def silence_behind_the_head(stream: anyio.abc.ByteStream) -> None:
    await stream.send(ACCEPTED[:-1])
    await anyio.sleep_forever()


async def trickle(stream: anyio.abc.ByteStream) -> None:
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        await stream.send(b".")
        await anyio.sleep(0.01)


@pytest.mark.parametrize("trouble", [silence, silence_behind_the_head, trickle])
async def test_an_answer_that_does_not_come_to_its_end_is_a_timeout_and_the_next_request_works(trouble: Handler):
    async with (
        serving(Server(trouble, ACCEPTED)) as port,
        endpoint(port, read_timeout_seconds=0.1, connect_timeout_seconds=0.1) as used,
    ):
        with pytest.raises(NoAnswerError) as caught:
            await post(used)
        assert caught.value.cause == "read_timeout"
        assert await post(used) == b"{}"


async def test_nobody_there_is_a_connect_error():
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    await listener.aclose()
    async with endpoint(port) as used:
        with pytest.raises(NoAnswerError, match=f"cannot connect to http://127.0.0.1:{port}") as caught:
            await post(used)
    assert (caught.value.cause, caught.value.is_tls) == ("connect_error", False)


async def test_a_request_that_was_cancelled_leaves_a_usable_endpoint():
    server = Server(silence, ACCEPTED)
    async with serving(server) as port, endpoint(port) as used:
        async with anyio.create_task_group() as group:
            group.start_soon(post, used)
            while not server.requests:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
        assert await post(used) == b"{}"


async def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_error():
    async def answer_and_close(stream: anyio.abc.ByteStream) -> None:
        await stream.send(ACCEPTED)
        await stream.aclose()
        closed.set()

    closed = anyio.Event()
    server = Server(answer_and_close, ACCEPTED)
    async with serving(server) as port, endpoint(port) as used:
        await post(used)
        await closed.wait()
        await anyio.wait_all_tasks_blocked()
        assert await post(used) == b"{}"
    assert server.connections == 2


# TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by itself, with its key in one file."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1 "
        "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder / "certificate.pem"


@pytest.fixture
def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context


async def test_a_trusted_certificate_is_accepted(certificate: Path, server_context: ssl.SSLContext):
    server = Server(ACCEPTED)
    async with serving(server, server_context) as port, endpoint(port, scheme="https", ca=certificate) as used:
        assert await post(used) == b"{}"
        assert await post(used) == b"{}"
    assert server.connections == 1


async def test_an_unknown_certificate_is_a_fault_of_the_set_up_and_nothing_is_sent(server_context: ssl.SSLContext):
    server = Server(ACCEPTED)
    async with serving(server, server_context) as port, endpoint(port, scheme="https") as used:
        with pytest.raises(NoAnswerError, match="certificate") as caught:
            await post(used)
    assert caught.value.is_tls
    assert server.requests == []


async def test_a_certificate_for_another_host_is_a_fault_of_the_set_up(
    certificate: Path, server_context: ssl.SSLContext
):
    server = Server(ACCEPTED)
    async with (
        serving(server, server_context) as port,
        endpoint(port, scheme="https", host="localhost", ca=certificate) as used,
    ):
        with pytest.raises(NoAnswerError) as caught:
            await post(used)
    assert caught.value.is_tls
    assert server.requests == []


class Greeter(Server):
    """Speaks first, and not HTTP."""

    async def handle(self, stream: anyio.abc.ByteStream) -> None:
        await no_http(stream)


async def test_a_server_that_speaks_no_tls_is_no_certificate_that_was_refused():
    async with serving(Greeter(b"")) as port, endpoint(port, scheme="https") as used:
        with pytest.raises(NoAnswerError) as caught:
            await post(used)
    assert not caught.value.is_tls


def test_a_bundle_of_authorities_that_is_none_is_a_wrong_setting(tmp_path: Path):
    for path, data in (
        (tmp_path / "empty.pem", b""),
        (tmp_path / "text.pem", b"hello"),
        (tmp_path / "absent.pem", None),
    ):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ConfigError, match=path.name):
            make_ssl_context(EndpointSettings(base_url="https://intake.example.com", ca_bundle=path))


def test_a_plain_address_needs_no_authorities():
    assert make_ssl_context(EndpointSettings(base_url="http://127.0.0.1:9")) is None
