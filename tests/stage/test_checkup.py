"""The look at the way to an endpoint, with real sockets and in virtual time: each step ends, and says what it saw."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import pytest
import trio
import trustme
from trio.testing import MockClock

from shipper.check.service import EMPTY_BATCH, Checkup, Item, Probe, certificate_words, life_words
from shipper.config.secrets import LiteralSecret, SecretReference
from shipper.config.settings import DeliverySettings, EndpointSettings
from tests.cases import each
from tests.stage.loops import Run
from tests.stage.servers import ACCEPTED, Door, Greeter, Listener, Mute, Origin, Proxy, stall

DELIVERY = DeliverySettings(connect_timeout_seconds=5.0, read_timeout_seconds=5.0)
SECRETS = ("the-key", "the-token", "the-proxy-password")
PROXY_USER = {"proxy_username": "the-user", "proxy_password": LiteralSecret("the-proxy-password")}


async def look(
    url: str, *, delivery: dict[str, Any] | None = None, asks: bool = False, probe: Probe = EMPTY_BATCH, **changes: Any
) -> list[Item]:
    """`changes` are keys of the section, `delivery` those of that section."""
    items: list[Item] = []
    settings = EndpointSettings(
        base_url=url,
        subscription_key=LiteralSecret("the-key"),
        token=LiteralSecret("the-token"),
        allow_plaintext=True,
        **changes,
    )
    checkup = Checkup(
        settings,
        msgspec.structs.replace(DELIVERY, **(delivery or {})),
        section="intake",
        tell=items.append,
        wall_time=lambda: 1_700_000_000.0,
        rng=Random(1),
    )
    can_ask = await checkup.reach()
    assert can_ask is (not [item for item in items if item.result == "fail"])
    if asks:
        await checkup.ask(probe if can_ask else None)
    assert not [item for item in items if any(secret in repr(item) for secret in SECRETS)]
    return items


def short(items: Sequence[Item]) -> list[str]:
    return [f"{item.result} {item.name.removeprefix('intake:')}" for item in items]


# Servers --------------------------------------------------------------------------------------------------------------


def test_the_way_is_the_same_on_every_event_loop_and_its_connections_are_closed(
    run: Run, ca: Path, server_context: ssl.SSLContext
):
    async def main() -> None:
        items = await look(origin.url, ca_bundle=ca, asks=True)
        good = ["dns", "connect", "tls", "credentials", "route", "key", "token"]
        assert short(items) == [*(f"ok {step}" for step in good), "note clock"]
        assert items[-1].what == "the service does not say what time it is"
        with anyio.fail_after(10):
            while origin.closed < 2:
                await anyio.sleep(0.001)

    with Origin(context=server_context) as origin:
        run(main)
    assert (origin.accepted, len(origin.requests)) == (2, 1)


def test_an_ipv6_address_is_as_good(run: Run):
    async def main() -> None:
        items = await look(origin.url, asks=True)
        assert short(items)[:3] == ["ok dns", "ok connect", "ok tls"]
        assert items[1].what.startswith("IPv6 in ")

    try:
        server = Origin(host="::1")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server as origin:
        run(main)


def test_a_refused_batch_shows_the_way_and_a_refused_report_is_none(run: Run):
    report = Probe("GET", "/report/7", remark="a report was read", or_else="; or there is no account 7")

    async def main() -> None:
        batch = await look(origin.url, asks=True)
        assert [step for step in short(batch) if "fail" in step] == []
        assert "ok route" in short(batch)
        items = await look(origin.url, asks=True, probe=report)
        assert short(items)[-2:] == ["fail service", "note clock"]
        assert items[-2].what == "the service refuses GET /report/7 (HTTP 400)"

    with Origin(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}") as origin:
        run(main)


@pytest.mark.parametrize(
    ("status", "steps", "what"),
    [
        ("204 No Content", ["fail service"], "GET /report/7: the service answered 204 instead of a report"),
        ("403 Forbidden", ["ok route", "ok key", "fail permission"], "GET /report/7 leads to the service (HTTP 403)"),
    ],
)
def test_only_a_report_that_came_was_read(run: Run, status: str, steps: list[str], what: str):
    async def main() -> None:
        items = await look(origin.url, asks=True, probe=Probe("GET", "/report/7", remark="a report was read"))
        assert short(items)[4:-1] == steps
        assert items[4].what == what

    with Origin(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()) as origin:
        run(main)


class Refuser(Proxy):
    """Says no."""

    def __init__(self) -> None:
        super().__init__(refusal=403)


class Chatterer(Listener):
    """Its head has no end."""

    def handle(self, connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x" * 4096)


@each(
    ("kind", "words"),
    [
        (Refuser, "refuses to connect to https://127.0.0.1:9, with status 403; see intake.proxy"),
        (Greeter, "what came is not HTTP; see intake.proxy"),
        (Door, "cannot be used: "),
        (Mute, "within 0.3 s"),
        (Chatterer, "what came is not HTTP; see intake.proxy"),
    ],
)
def test_a_proxy_that_does_not_open_the_way_is_told(run: Run, kind: type[Listener], words: str):
    async def main() -> None:
        limit_s = 0.3 if kind is Mute else 30
        limits = {"connect_timeout_seconds": limit_s, "read_timeout_seconds": limit_s}
        items = await look("https://127.0.0.1:9", proxy=f"http://127.0.0.1:{proxy.port}", delivery=limits, **PROXY_USER)
        assert short(items) == ["ok dns", "fail connect"]
        assert words in items[1].what

    with kind() as proxy:
        run(main)


def test_a_proxy_that_is_spoken_to_in_tls_has_a_certificate_of_its_own(
    run: Run, authority: trustme.CA, ca: Path, server_context: ssl.SSLContext
):
    async def main() -> None:
        items = await look(origin.url, proxy=proxy.url, ca_bundle=ca, asks=True, **PROXY_USER)
        assert short(items)[:5] == ["ok dns", "ok connect", "ok tls", "ok credentials", "ok route"]
        items = await look(origin.url, proxy=stranger.url, ca_bundle=ca, **PROXY_USER)
        assert short(items) == ["ok dns", "fail connect"]
        assert f"the certificate of the proxy {stranger.url} is not accepted" in items[1].what

    other = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(other)
    user = {"user": "the-user", "password": "the-proxy-password"}
    with (
        Origin(context=server_context) as origin,
        Proxy(context=server_context, **user) as proxy,
        Proxy(context=other) as stranger,
    ):
        run(main)
    assert len(origin.requests) == 1


async def test_a_proxys_password_that_cannot_be_had_is_told(ca: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    missing = {"proxy_username": "the-user", "proxy_password": SecretReference(env="NOT_THERE")}
    with Proxy() as proxy:
        items = await look("https://127.0.0.1:9", proxy=proxy.url, ca_bundle=ca, **missing)
    assert short(items) == ["ok dns", "fail connect"]
    assert items[1].what == "intake.proxy_password: environment variable NOT_THERE is not set"


async def test_an_answer_without_end_is_no_answer():
    def endless(connection: socket.socket) -> None:
        connection.sendall(ACCEPTED.replace(b"Length: 2", b"Length: 3"))
        stall(connection)

    with Origin(endless) as origin:
        items = await look(origin.url, asks=True, delivery={"read_timeout_seconds": 0.2})
    assert short(items)[-1] == "fail service"


# Names ----------------------------------------------------------------------------------------------------------------

V4, V6 = socket.AF_INET, socket.AF_INET6


def resolve_to(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, str]) -> None:
    def getaddrinfo(host: object, port: object, *_: object, **__: object) -> list[Any]:
        assert host in {"intake.example.com", b"intake.example.com"}
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    ("found", "results", "words"),
    [
        ([(V4, "127.0.0.1")], ["ok dns", "ok connect"], "IPv4 in "),
        ([(V4, "127.0.0.2"), (V4, "127.0.0.1"), (V4, "127.0.0.1")], ["ok dns", "ok connect"], "IPv4 in "),
        ([(V6, "::1"), (V4, "127.0.0.1")], ["ok dns", "ok connect"], "IPv4 in "),
        ([(V6, "::1"), (V4, "127.0.0.2")], ["ok dns", "fail connect"], "cannot connect to http://intake"),
    ],
    ids=["one", "the second", "one family", "none"],
)
async def test_all_addresses_are_told_and_tried(
    monkeypatch: pytest.MonkeyPatch, found: list[tuple[int, str]], results: list[str], words: str
):
    is_reached = results[1] != "fail connect"
    with Origin() as origin:
        with monkeypatch.context() as patched:
            resolve_to(patched, *found)
            items = await look(f"http://intake.example.com:{origin.port}")
        with anyio.fail_after(10):
            while origin.accepted < is_reached:
                await anyio.sleep(0.001)
    assert short(items)[:2] == results
    assert items[0].what == f"intake.example.com is {', '.join(dict.fromkeys(address for _, address in found))}"
    assert words in items[1].what
    if is_reached:
        assert short(items)[2] == "note tls"
        assert "clear text" in items[2].what


def test_a_name_that_cannot_be_one_is_not_found(run: Run):
    async def main() -> None:
        items = await look(f"http://{'x' * 64}.example.com")
        assert short(items) == ["fail dns"]
        assert "is not found" in items[0].what
        assert "check intake.base_url" in items[0].what

    run(main)


def test_a_step_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(anyio, "getaddrinfo", never)
            items = await look("http://intake.example.com")
        assert short(items) == ["fail dns"]
        assert "no answer within 5 s" in items[0].what
        assert anyio.current_time() == pytest.approx(began_at + 5)

        monkeypatch.setattr(anyio, "connect_tcp", never)
        items = await look("http://127.0.0.1")
        assert short(items) == ["ok dns", "fail connect"]
        assert "nothing within 5 s" in items[1].what
        assert anyio.current_time() == pytest.approx(began_at + 10)

    async def timed() -> None:
        nonlocal began_at
        began_at = anyio.current_time()
        await main()

    began_at = 0.0
    trio.run(timed, clock=MockClock(autojump_threshold=0))


# Words ----------------------------------------------------------------------------------------------------------------


@each(
    ("left_s", "result", "words"),
    [
        (None, "ok", ""),
        (30 * 86_400, "ok", "; it expires in 30 days"),
        (2 * 86_400, "ok", "; it expires in 2 days"),
        (2 * 86_400 - 1, "ok", "; it expires in 47 h"),
        (7_200, "ok", "; it expires in 2 h"),
        (7_199, "ok", "; it expires in 119 min"),
        (119, "ok", "; it expires in 119 s"),
        (0, "note", "; it expired 0 s ago"),
        (-119, "note", "; it expired 119 s ago"),
        (-120, "note", "; it expired 2 min ago"),
        (-10 * 86_400, "note", "; it expired 10 days ago"),
    ],
)
def test_the_life_of_a_token_in_words(left_s: float | None, result: str, words: str):
    now = 1_700_000_000.0
    assert life_words(None if left_s is None else now + left_s, now) == (result, words)


@each(
    ("changes", "result", "words"),
    [
        ({}, "ok", "the certificate is for a.example.com, by Example Ltd, and expires in 21 days"),
        ({"notAfter": "Dec  5 22:13:19 2023 GMT"}, "note", "expires in 20 days: it has to be renewed there"),
        ({"subjectAltName": tuple(("DNS", name) for name in "abcd")}, "ok", "is for a, b, c, ..., by"),
        ({"subjectAltName": ()}, "ok", "is for the-subject, by"),
        ({"subjectAltName": (), "subject": ()}, "ok", "is for nobody, by"),
        ({"issuer": ((("commonName", "R3"),),)}, "ok", "by R3, and"),
        ({"issuer": ()}, "ok", "by an authority without a name, and"),
    ],
)
def test_a_certificate_in_words(changes: dict[str, Any], result: str, words: str):
    certificate = {
        "subject": ((("commonName", "the-subject"),),),
        "issuer": ((("organizationName", "Example Ltd"),), (("commonName", "R3"),)),
        "subjectAltName": (("DNS", "a.example.com"),),
        "notAfter": "Dec  5 22:13:20 2023 GMT",
    }
    found = certificate_words(certificate | changes, 1_700_000_000.0)
    assert found[0] == result
    assert words in found[1]
