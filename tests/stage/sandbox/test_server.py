"""The server of the sandbox: where it listens, how it starts and stops."""

from __future__ import annotations

import socket
import threading
import tomllib
from functools import partial

import httpx
import pytest

from shipper.model.errors import ConfigError
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.server import Access, configuration_snippet, sandbox_in_thread
from tests.cases import each
from tests.servers import skip_without_ipv6
from tests.stage.sandbox.driver import NO_EVENTS, NOW, Sandbox

get = partial(httpx.get, trust_env=False, verify=False)
thread = partial(sandbox_in_thread, clock=lambda: NOW)


@each("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", "", "127.0.0.1:80", "[::1]", "127.1"])
def test_it_listens_only_on_loopback(host):
    with pytest.raises(ConfigError) as caught, thread(SandboxOptions(host=host, port=0)):
        pass
    assert str(caught.value).startswith(f"sandbox: host: {host!r} is not a loopback address")


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("::1", "[::1]")],
)
def test_it_listens_on_any_loopback_address(host, shown):
    if host == "::1":
        skip_without_ipv6()
    with thread(SandboxOptions(host=host, port=0)) as (sandbox, _):
        assert sandbox.base_url.startswith(f"http://{shown}:")
        assert get(f"{sandbox.base_url}/_sandbox/counts").json() == NO_EVENTS


def test_error_for_a_port_in_use_names_host_port_and_solution(sandbox: Sandbox):
    with pytest.raises(ConfigError) as caught, thread(SandboxOptions(port=sandbox.port)):
        pass
    place = f"sandbox: port: 127.0.0.1:{sandbox.port}"
    assert str(caught.value) == f"{place} is in use by another program; choose another port (0 = any free one)"


def test_port_can_be_reused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        with thread(SandboxOptions(port=port)) as (sandbox, _):
            assert sandbox.base_url == f"http://127.0.0.1:{port}"
            assert get(f"{sandbox.base_url}/_sandbox/counts").json() == NO_EVENTS


def test_thread_ends_while_a_connection_is_open_and_frees_its_port():
    threads = threading.active_count()
    with thread(SandboxOptions(port=0)) as (sandbox, _):
        idle = socket.create_connection(("127.0.0.1", httpx.URL(sandbox.base_url).port))
        with httpx.Client(trust_env=False, verify=False) as client:
            client.get(f"{sandbox.base_url}/_sandbox/counts")
    idle.close()
    assert threading.active_count() == threads
    with pytest.raises(httpx.ConnectError):
        get(sandbox.base_url)


def test_store_that_cannot_be_opened_leaves_the_port_free(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError), thread(SandboxOptions(port=port, store_path=str(tmp_path))):
        pass
    with thread(SandboxOptions(port=port)):
        pass


def test_snippet_is_toml_that_points_at_the_sandbox(sandbox: Sandbox):
    section = sandbox.access._asdict()
    assert section["base_url"] == sandbox.base_url
    assert tomllib.loads(configuration_snippet(sandbox.access)) == {"intake": section, "report": section}


@pytest.mark.parametrize("key", ['quo"te', "back\\slash", "#", "'"])
def test_snippet_can_hold_any_key(key):
    written = tomllib.loads(configuration_snippet(Access("http://127.0.0.1:1", key, "token")))
    assert written["intake"]["subscription_key"] == written["report"]["subscription_key"] == key


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /dim/v1/player/activities HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /dim/v1/player/activities HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"GET /%zz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ],
    ids=["binary", "version", "negative length", "length that is no number", "bad escape", "websocket"],
)
def test_malformed_request_is_refused_and_the_server_continues(sandbox: Sandbox, data):
    with socket.create_connection(("127.0.0.1", sandbox.port), timeout=5) as connection:
        connection.sendall(data)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 4")
    assert sandbox.counts() == NO_EVENTS


def test_server_continues_after_a_client_leaves_in_the_middle_of_a_body(sandbox: Sandbox):
    head = sandbox.bare("POST", "/dim/v1/player/activities").replace(b"Content-Length: 0", b"Content-Length: 100")
    sandbox.raw(head + b'{"EventType"', until_end=False)
    assert sandbox.call().status_code == 202
    assert sandbox.stored() == []


def test_missing_body_does_not_prevent_the_sandbox_from_stopping():
    threads = threading.active_count()
    with Sandbox(SandboxOptions(port=0)) as sandbox:
        head = sandbox.bare("POST", "/dim/v1/player/activities").replace(b"Content-Length: 0", b"Content-Length: 100")
        connection = socket.create_connection(("127.0.0.1", sandbox.port), timeout=5)
        connection.sendall(head + b"{")
        while not sandbox.log():
            pass
    with connection:
        assert threading.active_count() == threads
