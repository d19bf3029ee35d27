"""How far a request has got on its connection, as the transport tells it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import httpcore

from shipper.delivery.http import FRAMING, HEAD_MAX_BYTES


class Stage(Enum):
    CONNECT = "connect"
    HANDSHAKE = "handshake"
    TUNNEL = "tunnel"  # a proxy is asked for a way to the service
    REQUEST = "request"


class Progress:
    """
    Follows one request after the other; the transport's errors alone do not tell what they are about.

    Args:
        has_proxy: Connections are to a proxy, in the first place.
    Attributes:
        stage: Of the request, or of the connection that is opened for it.
        is_at_proxy: The stage is one on the way to the proxy, or the proxy's own.
        is_reused: The connection has carried an answer before.
        is_answering: Not only that, but the answer to this request has begun.
        socket: What the newest connection stands on; None = there has been none.
    """

    def __init__(self, *, has_proxy: bool) -> None:
        self.stage = Stage.REQUEST
        self.is_at_proxy = False
        self.is_reused = False
        self.is_answering = False
        self.socket: Any = None
        self._has_proxy = has_proxy
        self._room: float = math.inf  # bytes of the answer that may still come
        self._room_for_body: float = math.inf

    def begin(self, max_answer_bytes: float = math.inf) -> None:
        """
        A request begins; if no connection is opened for it, it goes straight out.

        Args:
            max_answer_bytes: The body of the answer is read up to here.
        """
        self.stage, self.is_at_proxy, self.is_answering = Stage.REQUEST, False, False
        self._room, self._room_for_body = math.inf, HEAD_MAX_BYTES + (1 + FRAMING) * max_answer_bytes

    async def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Record an event of the transport, as the `trace` extension of httpcore."""
        if event == "connection.connect_tcp.started":
            self.stage, self.is_at_proxy, self.is_reused = Stage.CONNECT, self._has_proxy, False
        elif event == "connection.connect_tcp.complete":
            self.socket = info["return_value"]
            self._watch(self.socket)
        elif event.endswith(".start_tls.complete"):
            self._watch(info["return_value"])
        elif event == "connection.start_tls.started":
            self.stage = Stage.HANDSHAKE
        elif event == "proxy.start_tls.started":
            self.stage, self.is_at_proxy = Stage.HANDSHAKE, False
        elif event == "http11.send_request_headers.started":
            self.is_at_proxy = info["request"].method == b"CONNECT"
            self.stage = Stage.TUNNEL if self.is_at_proxy else Stage.REQUEST
        elif event == "http11.receive_response_headers.started":
            self._room = HEAD_MAX_BYTES
        elif event == "http11.receive_response_headers.complete":
            self._room = self._room_for_body

    def end(self) -> None:
        """An answer has come."""
        self.is_reused = True

    def _watch(self, stream: Any) -> None:
        """
        Watch what is read from a connection.

        An answer that is cut off and one that never began end with the same error of the library. And the library reads
        informational answers, of which none needs be the last, and what stands beside the chunks of a body for ever.
        """
        read = stream.read

        async def watched(*args: Any, **options: Any) -> bytes:
            if self._room <= 0:
                raise httpcore.RemoteProtocolError("the answer does not end")
            data: bytes = await read(*args, **options)
            self.is_answering |= bool(data)
            self._room -= len(data)
            return data

        stream.read = watched
