"""The form that is posted to a token endpoint."""

from __future__ import annotations

import ssl
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from shipper.config.settings import EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.endpoint import ConnectionSettings, NoAnswerError
from shipper.delivery.forms import post_form
from shipper.model.version import __version__
from tests.certificates import asking, context_of, demanding
from tests.servers import Origin, Proxy, stall
from tests.stage.endpoints import ACCESS, DELIVERY, PASSWORD, USER, poll

FORM = {"grant_type": "client_credentials", "client_secret": "a secret & a h\xe4lf"}


async def send_form(url: str, base_url: str = "http://127.0.0.1:9", **changes: Any) -> Answer:
    settings = EndpointSettings(base_url=base_url, **changes)
    return await post_form(url, FORM, ConnectionSettings(settings, DELIVERY, "report"))


async def test_a_form_is_posted_over_its_own_connection():
    with Origin() as origin:
        answer = await send_form(f"{origin.url}/tenant/token")
        await poll(lambda: origin.closed)
    assert (answer.status, answer.body) == (202, b"{}")
    head, _, body = origin.requests[0].partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /tenant/token HTTP/1.1"
    assert sorted(headers) == sorted(
        [
            f"Host: 127.0.0.1:{origin.port}",
            "Content-Type: application/x-www-form-urlencoded",
            "Accept: application/json",
            f"User-Agent: shipper/{__version__}",
            f"Content-Length: {len(body)}",
        ]
    )
    assert body == b"grant_type=client_credentials&client_secret=a+secret+%26+a+h%C3%A4lf"


@pytest.mark.parametrize("base_url", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["to http", "to https"])
@pytest.mark.parametrize("has_proxy", [False, True], ids=["direct", "proxy"])
async def test_a_form_is_posted_to_http_and_https_independent_of_the_service(
    authority: trustme.CA, ca: Path, client: SimpleNamespace, base_url: str, is_tls: bool, has_proxy: bool
):
    context = asking(context_of(authority, "127.0.0.1"), authority) if is_tls else None
    with Origin(context=context) as origin, Proxy(user=USER, password=PASSWORD) as proxy:
        through = {"proxy": proxy.url, **ACCESS} if has_proxy else {}
        answer = await send_form(origin.url, base_url, ca_bundle=ca, client_certificate=client.one, **through)
    assert answer.status == 202
    assert len(proxy.heads) == has_proxy
    assert origin.peers == [""] * is_tls


async def test_a_token_endpoint_that_requires_a_certificate_is_distinguished_from_such_a_service(
    authority: trustme.CA, ca: Path, client: SimpleNamespace
):
    context = demanding(context_of(authority, "127.0.0.1"), authority, "1.3")
    with (
        Origin(context=context) as origin,
        pytest.raises(NoAnswerError, match="client certificates are for the service only") as caught,
    ):
        await send_form(origin.url, ca_bundle=ca, client_certificate=client.one)
    assert caught.value.cause == "tls"
    assert origin.clients == []


async def test_a_form_trusts_the_same_certificates_as_a_request(server_context: ssl.SSLContext):
    with (
        Origin(context=server_context) as origin,
        pytest.raises(NoAnswerError, match=r"see report\.ca_bundle") as caught,
    ):
        await send_form(f"{origin.url}/token")
    assert caught.value.cause == "tls"
    assert origin.requests == []


async def test_an_answer_to_a_form_is_read_up_to_64_kib():
    with Origin(b"HTTP/1.1 200 OK\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000) as origin:
        assert len((await send_form(origin.url)).body) == 65_536


async def test_a_form_does_not_wait_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shipper.delivery.forms._LIMIT_S", 0.2)
    with Origin(stall) as origin:
        with pytest.raises(NoAnswerError, match=r"within 0\.2 s") as caught:
            await send_form(origin.url)
        await poll(lambda: origin.closed)
    assert (caught.value.cause, caught.value.was_sent) == ("read_timeout", True)
    assert "secret" not in "".join(traceback.format_exception_only(caught.value))
