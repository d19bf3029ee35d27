"""Posts forms, encoded by httpx, to token endpoints over our `Connection`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import httpx

from shipper.delivery.answer import Answer
from shipper.delivery.connection import Connection, ConnectionSettings
from shipper.delivery.endpoint import USER_AGENT

_LIMIT_S: Final = 30.0
_ANSWER_BYTES: Final = 65_536


async def post_form(url: str, fields: Mapping[str, str], settings: ConnectionSettings) -> Answer:
    """
    Post a form to a token endpoint, over a new connection; return an answer with up to 64 KiB of the body.

    Raises:
        NoAnswerError: There was no complete answer within 30 s.
        ConfigError: The CA bundle or the proxy password cannot be used.
    """
    request = httpx.Request(
        "POST", url, data=dict(fields), headers={"Accept": "application/json", "User-Agent": USER_AGENT}
    )
    connection = Connection(settings, url, limit_s=_LIMIT_S)
    try:
        return await connection.exchange(
            "POST", request.url.raw_path, request.headers.raw, request.read(), max_answer_bytes=_ANSWER_BYTES
        )
    finally:
        await connection.aclose()
