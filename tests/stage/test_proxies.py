"""Proxies: what they see and do not see, and their errors; on all event loops."""

from __future__ import annotations

import logging
import re
import ssl
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from shipper.config.secrets import SecretReference
from shipper.model.errors import ConfigError
from tests.certificates import asking, context_of, demanding
from tests.servers import ACCEPTED, BannerListener, ClosingListener, Listener, Origin, Proxy, SilentListener, close
from tests.stage.endpoints import ACCESS, PASSWORD, USER, Names, endpoint, failure, post
from tests.stage.loops import on_each_loop


def is_clean(text: str) -> bool:
    return USER not in text and PASSWORD not in text and "roxy-auth" not in text.lower()


@on_each_loop
@pytest.mark.parametrize("is_proxy_tls", [False, True], ids=["http proxy", "https proxy"])
async def test_a_proxy_is_used_and_its_password_is_not_passed_on(
    ca: Path,
    context: ssl.SSLContext | None,
    server_context: ssl.SSLContext,
    is_proxy_tls: bool,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.DEBUG)
    with (
        Origin(context=context) as origin,
        Proxy(user=USER, password=PASSWORD, context=server_context if is_proxy_tls else None) as proxy,
    ):
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url, **ACCESS) as used:
            assert (await post(used)).body == b"{}"
            assert (await post(used)).body == b"{}"
            assert is_clean(repr(used))
    if context:
        (head,) = proxy.heads
        assert head.startswith(f"CONNECT 127.0.0.1:{origin.port} HTTP/1.1\r\n".encode())
        assert b"the-token" not in head
        assert b"the-key" not in head
        assert origin.accepted == 1
    else:
        assert [head.split(b"\r\n")[0] for head in proxy.heads] == [f"POST {origin.url}/x HTTP/1.1".encode()] * 2
    assert all(head.lower().count(b"proxy-authorization:") == 1 for head in proxy.heads)
    assert proxy.accepted == 1
    assert len(origin.requests) == 2
    names = sorted(line.split(b":")[0] for line in origin.requests[0].split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    assert names == [
        b"Authorization", b"Cache-Control", b"Content-Length", b"Content-Type", b"Host", b"Ocp-Apim-Subscription-Key",
        b"User-Agent",
    ]  # fmt: skip
    assert is_clean(caplog.text)


@on_each_loop
@pytest.mark.parametrize("is_service_plain", [False, True], ids=["https", "http"])
async def test_a_proxy_does_not_get_the_client_certificate_for_the_service(
    authority: trustme.CA, ca: Path, client: SimpleNamespace, is_service_plain: bool
):
    context = None if is_service_plain else demanding(context_of(authority, "127.0.0.1"), authority, "1.3")
    asks = asking(context_of(authority, "127.0.0.1"), authority)
    with Origin(context=context) as origin, Proxy(context=asks) as proxy:
        async with endpoint(origin.url, proxy=proxy.url, ca_bundle=ca, client_certificate=client.one) as used:
            assert (await post(used)).status == 202
    assert proxy.clients == [""]
    assert origin.clients == ([] if is_service_plain else ["the-client"])


async def test_the_password_of_a_proxy_is_read_from_its_source(monkeypatch: pytest.MonkeyPatch):
    secret = SecretReference(env="PROXY_PASSWORD")
    with Origin() as origin, Proxy(user="a", password="b") as proxy:
        with pytest.raises(ConfigError, match=r"^intake\.proxy_password: environment variable PROXY_PASSWORD"):
            async with endpoint(origin.url, proxy=proxy.url, proxy_username="a", proxy_password=secret):
                pass
        monkeypatch.setenv("PROXY_PASSWORD", "b")
        async with endpoint(origin.url, proxy=proxy.url, proxy_username="a", proxy_password=secret) as used:
            assert (await post(used)).status == 202


@on_each_loop
@pytest.mark.parametrize("access", [{}, ACCESS], ids=["no password", "wrong password"])
async def test_a_proxy_that_refuses_the_password_has_passed_nothing_on(
    ca: Path, context: ssl.SSLContext | None, access: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    with Origin(context=context) as origin, Proxy(user="another", password="another") as proxy:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url, **access) as used:
            for _ in range(2):
                error = await failure(used)
                assert error.cause == "credentials"
                assert (error.is_stale, error.was_sent) == (False, False)
                assert f"the proxy {proxy.url} requires" in str(error)
                assert "see intake.proxy_username" in str(error)
                assert is_clean("".join(traceback.format_exception_only(error)).replace("intake.proxy_username", ""))
                assert error.__cause__ is None or is_clean(repr(error.__cause__).replace("Proxy Auth", ""))
    assert len(proxy.heads) == 2
    assert origin.accepted == 0
    assert USER not in caplog.text
    assert PASSWORD not in caplog.text


@on_each_loop
async def test_a_proxy_that_refuses_the_tunnel_is_named(ca: Path, server_context: ssl.SSLContext):
    with Origin(context=server_context) as origin, Proxy(refusal=502) as proxy:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            error = await failure(used)
        assert (error.cause, error.was_sent) == ("proxy", False)
        assert str(error) == (
            f"the proxy {proxy.url} refuses to connect to {origin.url}, with status 502; see intake.proxy"
        )
    assert origin.accepted == 0


async def test_an_unreachable_proxy_is_named(names: Names, ca: Path, context: ssl.SSLContext | None):
    names.addresses["proxy.test"] = []
    with Origin() as nobody:
        pass
    with Origin(context=context) as origin:
        unknown = "http://proxy.test:3128"
        for url, words in ((nobody.url, "Connection refused"), (unknown, "Name or service not known")):
            async with endpoint(origin.url, ca_bundle=ca, proxy=url) as used:
                error = await failure(used)
            assert (error.cause, error.was_sent) == ("proxy", False)
            assert str(error) == f"the proxy {url} cannot be used: {words}; see intake.proxy"
    assert origin.accepted == 0


@on_each_loop
@pytest.mark.parametrize(
    ("peer", "words", "limit_s"),
    [
        (ClosingListener, "closed|reset", 30),
        (SilentListener, r"delivery\.read_timeout_seconds", 0.2),
        (BannerListener, "not HTTP", 30),
    ],
)
async def test_a_failing_proxy_is_named(
    ca: Path, server_context: ssl.SSLContext, peer: type[Listener], words: str, limit_s: float
):
    with Origin(context=server_context) as origin, peer() as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        async with endpoint(origin.url, ca_bundle=ca, proxy=url, delivery={"read_timeout_seconds": limit_s}) as used:
            for _ in range(2):
                error = await failure(used)
                assert re.search(words, str(error))
                assert (error.cause, error.is_stale, error.was_sent) == ("proxy", False, False)
                assert f"the proxy {url}" in str(error)
    assert proxy.accepted == 2


@on_each_loop
async def test_an_untrusted_certificate_of_a_proxy_is_distinguished_from_that_of_the_service(
    ca: Path, server_context: ssl.SSLContext
):
    untrusted = context_of(trustme.CA(), "127.0.0.1")
    with Origin(context=server_context) as origin, Proxy(context=untrusted) as proxy:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            error = await failure(used)
        assert (error.cause, error.was_sent) == ("tls", False)
        assert f"the certificate of the proxy {proxy.url} is not trusted" in str(error)
    assert (proxy.heads, origin.accepted) == ([], 0)


@on_each_loop
async def test_an_untrusted_certificate_of_the_service_is_reported_through_a_proxy_each_time(ca: Path):
    with Origin(context=context_of(trustme.CA(), "127.0.0.1")) as origin, Proxy() as proxy:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            for _ in range(3):
                error = await failure(used)
                assert (error.cause, error.was_sent) == ("tls", False)
                assert f"the certificate of {origin.url} is not trusted" in str(error)
    assert (origin.accepted, origin.requests) == (3, [])


@on_each_loop
async def test_a_tunnel_becomes_stale_like_any_connection(ca: Path, server_context: ssl.SSLContext):
    with Origin(ACCEPTED, close, ACCEPTED, context=server_context) as origin, Proxy() as proxy:
        async with endpoint(origin.url, ca_bundle=ca, proxy=proxy.url) as used:
            await post(used)
            error = await failure(used)
            assert (error.is_stale, error.was_sent) == (True, True)
            await post(used)
    assert (len(proxy.heads), len(origin.requests)) == (2, 3)
