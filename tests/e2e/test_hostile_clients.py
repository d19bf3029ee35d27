"""Hostile clients of the admin address: pipeline and probes keep working."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest

from tests.e2e.driver import Service
from tests.e2e.files import Tail, open_files
from tests.e2e.operated import Admin

BEGINNINGS = (b"", b"G", b"GET / HTTP/1.1\r\n", b"GET /status HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"POST / HTTP/1.1\r\n")
MALFORMED = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"POST /status HTTP/1.1\r\nContent-Length: -5\r\n\r\nxxxx",
    b"POST /status HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
    b"POST /status HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"GET http://example.com/ HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    b"\0" * 5000,
)


def _address(admin: Admin) -> tuple[str, int]:
    url = httpx.URL(admin.address)
    return url.host, url.port or 80


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _hold(stack: ExitStack, admin: Admin, count: int) -> list[socket.socket]:
    """Open connections with unfinished requests."""
    held = []
    for number in range(count):
        held.append(stack.enter_context(socket.create_connection(_address(admin), timeout=10)))
        held[-1].sendall(BEGINNINGS[number % len(BEGINNINGS)])
    return held


def test_clients_with_unfinished_requests_disturb_neither_the_pipeline_nor_the_probes(
    tail: Tail, connections: ExitStack
):
    tail.append(0, 10)
    running = tail.start()
    admin = Admin(running)
    held = _hold(connections, admin, 200)
    assert admin.get("/healthz").status_code == 200, "it answers at once"
    tail.wait(10)
    for number in range(10, 20):
        _hold(connections, admin, 5)
        tail.append(number, number + 1)
        for client in held[:50]:
            with suppress(ConnectionError):  # requests that cannot become valid are disconnected
                client.sendall(b"x")
        assert admin.get("/healthz").status_code == 200
        assert admin.get("/readyz").text == "ready\n"
    tail.wait(20)
    assert admin.get("/metrics").status_code == 200
    assert running.stop(limit_s=10).returncode == 0, "they delay the shutdown"


def test_each_of_many_simultaneous_clients_is_read_before_it_can_be_disconnected(tail: Tail, connections: ExitStack):
    """One of them may be a probe. They connect while the process is suspended, after idle clients."""
    running = tail.start()
    admin = Admin(running)
    _hold(connections, admin, 40)
    running.process.send_signal(signal.SIGSTOP)
    try:
        crowd = [connections.enter_context(socket.create_connection(_address(admin), timeout=5)) for _ in range(300)]
        for client in crowd:
            client.settimeout(30)
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    finally:
        running.process.send_signal(signal.SIGCONT)
    assert {client.recv(1000)[:13] for client in crowd} == {b"HTTP/1.1 200 "}


def test_files_are_read_though_clients_outnumber_the_descriptors(tail: Tail, connections: ExitStack):
    tail.append(0, 10)
    running = tail.start(prefix=["prlimit", "--nofile=160", "--"])
    admin = Admin(running)
    tail.wait(10)
    _hold(connections, admin, 300)
    tail.deliver(10)
    tail.file.rename(tail.folder / "app.ndjson.1")
    tail.deliver(10)
    connections.close()
    running.wait_until(lambda: _answers(admin), "it answers again after they have disconnected")
    assert running.stop(limit_s=10).returncode == 0


def _answers(admin: Admin) -> bool:
    try:
        return admin.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_malformed_request_is_answered_or_disconnected_without_harm(tail: Tail):
    tail.append(0, 10)
    running = tail.start()
    admin = Admin(running)
    tail.wait(10)
    for data in MALFORMED:
        with socket.create_connection(_address(admin), timeout=10) as client:
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                answer = client.recv(100)
            except OSError:  # shutdown of a reset connection raises ENOTCONN, which is no ConnectionError
                continue  # disconnected before the request was complete
        assert not answer.startswith(b"HTTP/1.1 5"), (data[:40], answer)
        assert b"root:" not in answer
    before = len(open_files(running))
    assert admin.get("/healthz").status_code == 200
    assert len(open_files(running)) < before + len(MALFORMED) // 2  # the state store may have opened one or two files
    tail.deliver(10)
    result = running.stop()
    assert result.returncode == 0


def test_a_refused_request_names_the_limit_it_exceeds(tail: Tail):
    address = _address(Admin(tail.start()))
    own = b"Host: 127.0.0.1"
    for headers, words in (
        ([b"X: " + b"a" * 24_000], b"HTTP/1.1 431 ,16384 bytes"),
        ([b"X: y"] * 100, b"HTTP/1.1 431 ,100 headers"),
        ([b"Content-Length: 2"], b"HTTP/1.1 413 ,body"),
        ([b"Transfer-Encoding: chunked"], b"HTTP/1.1 413 ,body"),
    ):
        answer = _answer(address, own, *headers)
        assert all(word in answer for word in words.split(b",")), (headers[0][:40], answer)
    assert _answer(address, own, b"Cookie: " + b"a" * 12_000).startswith(b"HTTP/1.1 200 ")


def _answer(address: tuple[str, int], *headers: bytes, path: bytes = b"/status", version: bytes = b"1.1") -> bytes:
    """Send a request with exactly these headers and return the whole answer."""
    lines = [b"GET " + path + b" HTTP/" + version, *headers, b"Connection: close", b"", b""]
    answer = b""
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(b"\r\n".join(lines))
        while piece := client.recv(1 << 20):
            answer += piece
    return answer


PATHS = (b"/", b"/status", b"/history", b"/metrics", b"/healthz", b"/readyz", b"/nowhere")
OWN_HOSTS = (
    *("127.0.0.1", "192.0.2.7", "[::1]", "[::ffff:127.0.0.1]", "[2001:db8::1]"),
    *("localhost", "LocalHost", "localhost."),
)
FOREIGN_HOSTS = (
    *(b"rebound.example", b"127.0.0.1.example", b"localhost.example", b"xlocalhost", b"shipper.monitoring.svc"),
    *(b"[::1].example", b"127.0.0.1@x.example", b"127.0.0.1, x.example", b"localhost x.example", b"localhost/x"),
    *(b"", b" ", b":", b"127.0.0.1:", b"127.0.0.1:port", b"127.0.0.1:123456", b"127.0.0.1:1:2", b"localhost\xff"),
    *(b"::1", b"[::1", b"[]", b"[1.2.3.4]x", b"[:::]", b"a." * 200),
)


def test_dns_rebinding_gives_no_access_to_the_admin_address(tail: Tail):
    """The requests come from a browser on this machine and name the page's host."""
    running = tail.start()
    admin = Admin(running)
    address = _address(admin)
    assert b"newest_dead_letters" in _answer(address, b"Host: 127.0.0.1:%d" % address[1])
    for path in PATHS:
        answer = _answer(address, b"Host: rebound.example:%d" % address[1], path=path)
        assert answer.startswith(b"HTTP/1.1 421 "), (path, answer[:200])
        assert b"admin.hosts" in answer
        assert b"newest_dead_letters" not in answer
        assert b"rebound.example" not in answer, "the answer repeats part of the request"
        assert b"access-control" not in answer.lower()
    for host in FOREIGN_HOSTS:
        assert not _answer(address, b"Host: " + host).startswith(b"HTTP/1.1 2"), host
    assert _answer(address, version=b"1.0").startswith(b"HTTP/1.1 421 "), "a request without a host"
    two = [b"Host: 127.0.0.1", b"Host: rebound.example"]
    for headers in (two, two[::-1], [two[0], two[0]]):
        assert not _answer(address, *headers).startswith(b"HTTP/1.1 2"), headers


def test_the_admin_address_accepts_every_ip_address_and_the_names_in_admin_hosts_as_host(tail: Tail):
    """An IP address cannot be rebound; probes use the address of a pod, and through a tunnel the port differs."""
    running = tail.start(settings={"admin.hosts": '["shipper.monitoring.svc", "Edge-1"]'})
    address = _address(Admin(running))
    for host in (*OWN_HOSTS, "shipper.monitoring.svc", "SHIPPER.monitoring.svc.", "edge-1"):
        for port in ("", f":{address[1]}", ":80", ":19464"):
            answer = _answer(address, f"Host: {host}{port}".encode())
            assert answer.startswith(b"HTTP/1.1 200 "), (host, port, answer[:200])
    for host in (b"monitoring.svc", b"x.shipper.monitoring.svc", b"edge-2"):
        assert _answer(address, b"Host: " + host).startswith(b"HTTP/1.1 421 "), host


def test_the_admin_address_accepts_the_host_name_it_listens_on(tail: Tail):
    running = tail.start(settings={"admin.listen": "localhost:0"})
    address = _address(Admin(running))
    assert _answer(address, b"Host: localhost:%d" % address[1]).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("written", ['["*"]', '["edge:9464"]', '["http://edge"]', '[""]', '["a b"]', '"a b"'])
def test_an_invalid_host_name_in_the_settings_is_refused_with_the_key(written: str, tail: Tail):
    result = tail.start(settings={"admin.hosts": written}).finish()
    result.assert_ended(2, "admin.hosts")


def test_dns_rebinding_gives_no_access_to_the_controls_of_the_sandbox(service: Service):
    """The service's own operations require a key."""
    url = httpx.URL(service.target.base_url)
    address = url.host, url.port or 80
    for path in (b"/_sandbox/", b"/_sandbox/access", b"/_sandbox/counts", b"/_sandbox/nowhere"):
        answer = _answer(address, b"Host: rebound.example", path=path)
        assert answer.startswith(b"HTTP/1.1 421 "), (path, answer[:200])
        assert service.target.subscription_key.encode() not in answer
    for host in (b"localhost", b"127.0.0.1:%d" % address[1]):
        assert _answer(address, b"Host: " + host, path=b"/_sandbox/counts").startswith(b"HTTP/1.1 200 ")
