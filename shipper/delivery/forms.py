"""Posts forms to token endpoints, with httpx over our own connection."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

import httpx

from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.connection import Connection
from shipper.delivery.endpoint import USER_AGENT, answer_of
from shipper.delivery.tls import without_client_certificate

_LIMIT_S: Final = 30.0
_ANSWER_BYTES: Final = 65_536


async def post_form(
    url: str,
    fields: Mapping[str, str],
    *,
    endpoint: EndpointSettings,
    delivery: DeliverySettings,
    ssl_context: ssl.SSLContext | None,
    section: str = "intake",
) -> Answer:
    """
    Post a form to a token endpoint, over a connection of its own; a client's certificate is for the service alone.

    Args:
        url: Its scheme may be another one than the endpoint's.
        endpoint: The proxy and the authorities; not the address.
        ssl_context: From `make_ssl_context`.
    Returns:
        An answer with up to 64 KiB of the body.
    Raises:
        NoAnswerError: As for a request; after 30 s at most.
        ConfigError: The authorities or a password cannot be used.
    """
    if endpoint.client_certificate is not None:
        endpoint, ssl_context = without_client_certificate(endpoint), None  # one of its own is made for the connection
    connection = Connection(
        url, endpoint, delivery, section=section, ssl_context=ssl_context, limit_s=_LIMIT_S, is_service=False
    )
    # Made here, as the client would add headers to a request of its own.
    request = httpx.Request(
        "POST", url, data=dict(fields), headers={"Accept": "application/json", "User-Agent": USER_AGENT}
    )
    async with httpx.AsyncClient(transport=_Transport(connection), trust_env=False) as client:
        response = await client.send(request)
    return answer_of(response.status_code, dict(response.headers.raw), response.content)


class _Transport(httpx.AsyncBaseTransport):
    """Sends requests over one connection; of an answer's body, only as much is read as a token needs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        message = await self._connection.exchange(
            request.method,
            request.url.raw_path,
            request.headers.raw,
            await request.aread(),
            max_answer_bytes=_ANSWER_BYTES,
        )
        # No encoding was asked for, and none is undone.
        headers = [each for each in message.headers.items() if each[0] != b"content-encoding"]
        return httpx.Response(message.status, headers=headers, content=message.body)

    async def aclose(self) -> None:
        await self._connection.aclose()
