"""Posts forms to token endpoints, with httpx over our `Connection`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import httpx

from shipper.delivery.answer import Answer
from shipper.delivery.connection import Connection, ConnectionSettings
from shipper.delivery.endpoint import USER_AGENT, answer_of

_LIMIT_S: Final = 30.0
_ANSWER_BYTES: Final = 65_536


async def post_form(url: str, fields: Mapping[str, str], settings: ConnectionSettings) -> Answer:
    """
    Post a form to a token endpoint, over a new connection.

    Args:
        url: Its scheme may differ from that of the service.
    Returns:
        An answer with up to 64 KiB of the body.
    Raises:
        NoAnswerError: There was no complete answer within 30 s.
        ConfigError: The CA bundle or the proxy password cannot be used.
    """
    connection = Connection(settings, url, limit_s=_LIMIT_S)
    # Not built by the client, which would add headers.
    request = httpx.Request(
        "POST", url, data=dict(fields), headers={"Accept": "application/json", "User-Agent": USER_AGENT}
    )
    async with httpx.AsyncClient(transport=_Transport(connection), trust_env=False) as client:
        response = await client.send(request)
    return answer_of(response.status_code, dict(response.headers.raw), response.content)


class _Transport(httpx.AsyncBaseTransport):
    """Sends requests over one connection, and truncates the bodies of answers."""

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
        # We asked for no encoding, so httpx must not decode the body.
        headers = [(name, value) for name, value in message.headers.items() if name != b"content-encoding"]
        return httpx.Response(message.status, headers=headers, content=message.body)

    async def aclose(self) -> None:
        await self._connection.aclose()
