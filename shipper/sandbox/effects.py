"""Applies faults to a connection."""

from __future__ import annotations

import socket
import struct
from asyncio import Transport
from typing import Final

import anyio
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from shipper.sandbox.faults import AnyFault, Delay, Drip, Hang, Html, Reset, Status, Truncate
from shipper.sandbox.gateway import Refusal, refusal_response

# Key of the connection's transport in the ASGI extensions: ASGI itself cannot reset a connection.
TRANSPORT_EXTENSION: Final = "shipper.transport"

_LOGIN_PAGE: Final = "<!doctype html><title>Sign in</title><h1>Sign in to the network</h1>\n"
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time
_WITHOUT_BODY: Final = {204, 205, 304}


class Connection:
    """One request and its response; sends the response or applies a fault."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send

    async def answer(self, response: Response) -> None:
        await response(self._scope, self._receive, self._send)

    async def apply(self, fault: AnyFault, response: Response | None) -> bool:
        """Apply a fault to the response, None = not handled yet; return whether the exchange has ended."""
        match fault:
            case Delay(seconds=seconds):
                await anyio.sleep(seconds)
                return False
            case Hang():
                await self._wait_until_the_client_leaves()
            case Reset():
                await self.reset()
            case Status():
                await self.answer(_scripted(fault))
            case Html():
                await self.answer(HTMLResponse(_LOGIN_PAGE))
            case Truncate() if response is not None:
                await self._truncate(response)
            case Drip(seconds=seconds) if response is not None:
                await self._drip(response, seconds)
            case _:
                return False
        return True

    async def _wait_until_the_client_leaves(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    @property
    def _transport(self) -> Transport:
        transport: Transport = self._scope["extensions"][TRANSPORT_EXTENSION]["transport"]
        return transport

    async def reset(self) -> None:
        """Reset the connection unless it is closing already."""
        if not self._transport.is_closing():
            raw: socket.socket = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        await self._wait_until_the_client_leaves()  # otherwise, the server would report a missing response

    async def _truncate(self, response: Response) -> None:
        await self._send_head(response)
        half = bytes(response.body[: len(response.body) // 2])
        await self._send({"type": "http.response.body", "body": half, "more_body": True})
        self._transport.close()
        await self._wait_until_the_client_leaves()

    async def _drip(self, response: Response, seconds: float) -> None:
        await self._send_head(response)
        for byte in bytes(response.body):
            await self._send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await anyio.sleep(seconds)
        await self._send({"type": "http.response.body", "body": b""})

    async def _send_head(self, response: Response) -> None:
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )


def _scripted(fault: Status) -> Response:
    if fault.status in _WITHOUT_BODY:
        return Response(status_code=fault.status)
    return refusal_response(Refusal(fault.status, fault.message, fault.retry_after))
