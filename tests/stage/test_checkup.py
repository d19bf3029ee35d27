"""Checks of an endpoint, with real sockets and in virtual time: each step ends and reports its result."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from shipper.check.service import EMPTY_BATCH, Checkup, Item, describe_certificate, describe_expiry
from shipper.config.secrets import LiteralSecret, SecretReference
from shipper.config.settings import EndpointSettings
from tests.cases import each
from tests.servers import Origin, Proxy
from tests.stage.endpoints import DELIVERY, poll
from tests.stage.loops import in_virtual_time, on_each_loop

SECRETS = ("the-key", "the-token", "the-proxy-password")


async def look(url: str, *, asks: bool = False, **changes: Any) -> list[Item]:
    """Check an endpoint; `changes` are keys of its section."""
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
        DELIVERY,
        section="intake",
        report=items.append,
        wall_time=lambda: 1_700_000_000.0,
        rng=Random(1),
    )
    can_ask = await checkup.connect()
    assert can_ask is (not [item for item in items if item.result == "fail"])
    if asks:
        await checkup.request(EMPTY_BATCH if can_ask else None)
    assert not [item for item in items if any(secret in repr(item) for secret in SECRETS)]
    return items


def short(items: Sequence[Item]) -> list[str]:
    return [f"{item.result} {item.name.removeprefix('intake:')}" for item in items]


# Servers --------------------------------------------------------------------------------------------------------------


@on_each_loop
async def test_the_steps_are_the_same_on_every_event_loop_and_connections_are_closed(
    ca: Path, server_context: ssl.SSLContext
):
    with Origin(context=server_context) as origin:
        items = await look(origin.url, ca_bundle=ca, asks=True)
        good = ["dns", "connect", "tls", "credentials", "route", "key", "token"]
        assert short(items) == [*(f"ok {step}" for step in good), "note clock"]
        assert items[-1].what == "the service does not send its time"
        await poll(lambda: origin.closed == 2)
    assert (origin.accepted, len(origin.requests)) == (2, 1)


async def test_an_unavailable_proxy_password_is_reported(ca: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    missing = {"proxy_username": "the-user", "proxy_password": SecretReference(env="NOT_THERE")}
    with Proxy() as proxy:
        items = await look("https://127.0.0.1:9", proxy=proxy.url, ca_bundle=ca, **missing)
    assert short(items) == ["ok dns", "fail connect"]
    assert items[1].what == "intake.proxy_password: environment variable NOT_THERE is not set"


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
async def test_all_addresses_are_reported_and_tried(
    monkeypatch: pytest.MonkeyPatch, found: list[tuple[int, str]], results: list[str], words: str
):
    is_reached = results[1] != "fail connect"
    with Origin() as origin:
        with monkeypatch.context() as patched:
            resolve_to(patched, *found)
            items = await look(f"http://intake.example.com:{origin.port}")
        await poll(lambda: origin.accepted >= is_reached)
    assert short(items)[:2] == results
    addresses = ", ".join(dict.fromkeys(address for _, address in found))
    assert items[0].what == f"intake.example.com resolves to {addresses}"
    assert words in items[1].what
    if is_reached:
        assert short(items)[2] == "note tls"
        assert "clear text" in items[2].what


@on_each_loop
async def test_an_invalid_name_is_not_found():
    items = await look(f"http://{'x' * 64}.example.com")
    assert short(items) == ["fail dns"]
    assert "cannot be resolved" in items[0].what
    assert "check intake.base_url" in items[0].what


@in_virtual_time
async def test_a_step_that_hangs_is_aborted(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: object, **__: object) -> None:
        await anyio.sleep_forever()

    began_at = anyio.current_time()
    with monkeypatch.context() as patched:
        patched.setattr(anyio, "getaddrinfo", never)
        items = await look("http://intake.example.com")
    assert short(items) == ["fail dns"]
    assert "no answer within 5 s" in items[0].what
    assert anyio.current_time() == pytest.approx(began_at + 5)

    monkeypatch.setattr(anyio, "connect_tcp", never)
    items = await look("http://127.0.0.1")
    assert short(items) == ["ok dns", "fail connect"]
    assert "within 5 s" in items[1].what
    assert anyio.current_time() == pytest.approx(began_at + 10)


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
    assert describe_expiry(None if left_s is None else now + left_s, now) == (result, words)


@each(
    ("changes", "result", "words"),
    [
        ({}, "ok", "the certificate is for a.example.com, by Example Ltd, and expires in 21 days"),
        ({"notAfter": "Dec  5 22:13:19 2023 GMT"}, "note", "expires in 20 days; renew it on the service"),
        ({"subjectAltName": tuple(("DNS", name) for name in "abcd")}, "ok", "is for a, b, c, ..., by"),
        ({"subjectAltName": ()}, "ok", "is for the-subject, by"),
        ({"subjectAltName": (), "subject": ()}, "ok", "is for nobody, by"),
        ({"issuer": ((("commonName", "R3"),),)}, "ok", "by R3, and"),
        ({"issuer": ()}, "ok", "by an unnamed authority, and"),
    ],
)
def test_a_certificate_in_words(changes: dict[str, Any], result: str, words: str):
    certificate = {
        "subject": ((("commonName", "the-subject"),),),
        "issuer": ((("organizationName", "Example Ltd"),), (("commonName", "R3"),)),
        "subjectAltName": (("DNS", "a.example.com"),),
        "notAfter": "Dec  5 22:13:20 2023 GMT",
    }
    found = describe_certificate(certificate | changes, 1_700_000_000.0)
    assert found[0] == result
    assert words in found[1]
