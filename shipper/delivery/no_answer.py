"""Explains why a request got no answer: from the error and how far the request had got."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from enum import Enum
from typing import Final

from msgspec import Struct

from shipper.delivery.tls import tls_problem, words

# What a name server says of a name that does not exist; a server that is away says something else.
_NO_SUCH_NAME: Final = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_CLOSED: Final = "the connection was closed"


class Stage(Enum):
    """How far a request has got."""

    CONNECT = "connect"
    HANDSHAKE = "handshake"
    TUNNEL = "tunnel"  # a proxy is asked for a way to the service
    SEND = "send"
    ANSWER = "answer"


_SENT: Final = {Stage.SEND, Stage.ANSWER}
_STEPS: Final = {
    Stage.CONNECT: "connect",
    Stage.HANDSHAKE: "tls",
    Stage.TUNNEL: "connect",
    Stage.SEND: "service",
    Stage.ANSWER: "service",
}


class Progress(Struct):
    """
    The state of the request under way; errors alone do not show what they are about.

    Attributes:
        is_at_proxy: The peer is the proxy, not the service.
        is_reused: The connection has carried an answer before.
        is_answering: The answer to this request has begun.
    """

    stage: Stage = Stage.CONNECT
    is_at_proxy: bool = False
    is_reused: bool = False
    is_answering: bool = False

    def begin(self, *, is_at_proxy: bool) -> None:
        """Note that a connection is being opened."""
        self.stage, self.is_at_proxy, self.is_reused = Stage.CONNECT, is_at_proxy, False


class HttpError(Exception):
    """What came is not a whole answer of HTTP/1.1; the text says why, and quotes nothing."""


class ProxyRefusedError(Exception):
    """The proxy refuses the request, or asks for other credentials."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class NoAnswerError(Exception):
    """
    There was no answer, or not the whole of it.

    Attributes:
        cause: One word. Before the request is sent: `name_lookup`, `unknown_host`, `connect_error`, `connect_timeout`,
            `tls`, `proxy`. After it: `read_timeout`, `write_timeout`, `read_error`, `remote_protocol_error`.
        step: What failed: `dns`, `connect` (all that is the proxy's included), `tls` or `service`.
        is_tls: TLS failed for a fault of the set-up, not of the moment, such as a certificate that is not accepted.
        is_stale: The request met a connection that had carried an answer before and was being closed by the peer. The
            next one goes over a new connection, so this does not come twice in a row.
        was_sent: The service may have taken the request; False = certainly not.
    """

    def __init__(
        self,
        cause: str,
        message: str,
        *,
        step: str = "service",
        is_tls: bool = False,
        is_stale: bool = False,
        was_sent: bool = True,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.step = step
        self.is_tls = is_tls
        self.is_stale = is_stale
        self.was_sent = was_sent


class Way(Struct, frozen=True):
    """
    The way to an address, as the settings describe it.

    Attributes:
        proxy: Its address, without credentials; empty if there is none.
        section: The settings' section, for the way out.
        connect_s, read_s: The longest waits.
        is_service: It leads to the service, and not to a token endpoint.
    """

    address: str
    proxy: str
    section: str
    connect_s: float
    read_s: float
    is_service: bool = True


def no_answer(error: BaseException, way: Way, progress: Progress) -> NoAnswerError:
    """
    Explain why there is no answer.

    Args:
        error: What ended the request.
        progress: How far it had got.
    """
    errors = list(_led_to(error))
    is_at_proxy, stage = progress.is_at_proxy, progress.stage
    peer = f"the proxy {way.proxy}" if is_at_proxy else way.address
    problem = tls_problem(errors, peer, way.section, is_service=way.is_service and not is_at_proxy)
    if problem:
        # In TLS 1.3 the client may already have sent its request, and the server throws it away unread.
        was_sent = stage in _SENT and progress.is_reused
        return NoAnswerError("tls", problem, step="connect" if is_at_proxy else "tls", is_tls=True, was_sent=was_sent)
    if isinstance(error, TimeoutError) and not error.errno:
        return _too_late(way, progress, peer)
    why = next((words(each) for each in reversed(errors) if isinstance(each, OSError) and each.errno), _CLOSED)
    if isinstance(error, HttpError):
        why = str(error)
    if is_at_proxy or isinstance(error, ProxyRefusedError):
        return _no_proxy(error.status if isinstance(error, ProxyRefusedError) else 0, why, way)
    if stage in _SENT:
        cause = "remote_protocol_error" if isinstance(error, HttpError) else "read_error"
        is_stale = progress.is_reused and not progress.is_answering
        return NoAnswerError(cause, f"no answer from {peer}: {why}", is_stale=is_stale)
    if isinstance(error, UnicodeError):
        why = "it is not a valid host name"
    if any(isinstance(each, socket.gaierror | UnicodeError) for each in errors):
        is_away = any(isinstance(each, socket.gaierror) and each.errno not in _NO_SUCH_NAME for each in errors)
        cause = "name_lookup" if is_away else "unknown_host"
        return NoAnswerError(cause, f"the host of {peer} is not found: {why}", step="dns", was_sent=False)
    if stage is Stage.HANDSHAKE:
        why += "; perhaps nothing there speaks TLS"
    return NoAnswerError("connect_error", f"cannot connect to {peer}: {why}", step=_STEPS[stage], was_sent=False)


def _too_late(way: Way, progress: Progress, peer: str) -> NoAnswerError:
    was_sent, step = progress.stage in _SENT, _STEPS[progress.stage]
    if was_sent or progress.stage is Stage.TUNNEL:
        cause, what = "read_timeout", f"no whole answer from {peer}"
        limit = f"{way.read_s:g} s; see delivery.read_timeout_seconds"
    else:
        cause, what = "connect_timeout", f"cannot connect to {peer}: nothing"
        limit = f"{way.connect_s:g} s; see delivery.connect_timeout_seconds"
    if progress.stage is Stage.SEND:
        cause, what = "write_timeout", f"{peer} did not take the whole request"
    if progress.is_at_proxy:
        cause, step = "proxy", "connect"
    return NoAnswerError(cause, f"{what} within {limit}", step=step, was_sent=was_sent)


def _no_proxy(status: int, why: str, way: Way) -> NoAnswerError:
    """`status` is that of the proxy's refusal; 0 if it is none."""
    if status == 407:
        what, key = "asks for a user and password, or for others", "proxy_username"
    elif status:
        what, key = f"refuses to connect to {way.address}, with status {status}", "proxy"
    else:
        what, key = f"cannot be used: {why}", "proxy"
    message = f"the proxy {way.proxy} {what}; see {way.section}.{key}"
    return NoAnswerError("proxy", message, step="connect", was_sent=False)


def _led_to(error: BaseException) -> Iterator[BaseException]:
    """
    Yield an error and what led to it.

    What Python notes as the context is of no use: it may be another request's failure, which the caller is just
    dealing with.
    """
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__
