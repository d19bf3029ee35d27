"""Create the endpoint under test, and its requests."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from shipper.config.secrets import LiteralSecret
from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Authorization
from shipper.delivery.endpoint import ConnectionSettings, Endpoint, NoAnswerError
from tests.servers import Origin, Reply

DELIVERY = DeliverySettings(connect_timeout_seconds=5.0, read_timeout_seconds=5.0)
AUTHORIZATION = Authorization("the-token", "the-key")
USER, PASSWORD = "proxy-user", "proxy-p\xe4ssword"
ACCESS: dict[str, Any] = {"proxy_username": USER, "proxy_password": LiteralSecret(PASSWORD)}


@asynccontextmanager
async def endpoint(
    url: str, *, delivery: dict[str, Any] | None = None, now: Callable[[], float] = anyio.current_time, **changes: Any
) -> AsyncIterator[Endpoint]:
    """Create an endpoint; `changes` are keys of its section, `delivery` those of `[delivery]`."""
    settings = EndpointSettings(base_url=url, allow_plaintext=True, **changes)
    delivery_settings = msgspec.structs.replace(DELIVERY, **(delivery or {}))
    used = Endpoint(ConnectionSettings(settings, delivery_settings, "intake"), now=now)
    try:
        with anyio.fail_after(20):
            yield used
    finally:
        await used.aclose()


@asynccontextmanager
async def reaching(
    *replies: Reply, context: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[Endpoint, Origin]]:
    """Start a service that gives these replies, and create its endpoint."""
    with Origin(*replies, context=context) as origin:
        async with endpoint(origin.url, **options) as used:
            yield used, origin


async def post(used: Endpoint, body: bytes = b"[1]", **options: Any) -> Answer:
    options = {"authorization": AUTHORIZATION, "max_answer_bytes": 1000, **options}
    return await used.request("POST", "/x", body, **options)


async def failure(used: Endpoint) -> NoAnswerError:
    with pytest.raises(NoAnswerError) as caught:
        await post(used)
    return caught.value


async def poll(condition: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.001)


class Names:
    """Replaces the name lookup of the system for some names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.lookups = 0
        self.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._lookup)

    def _lookup(self, host: str | bytes | None, port: Any, *args: Any, **options: Any) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else host or ""
        if name not in self.addresses:
            return self._real(host, port, *args, **options)
        self.lookups += 1
        if not self.addresses[name]:
            raise self.error
        return [entry for address in self.addresses[name] for entry in self._real(address, port, *args, **options)]
