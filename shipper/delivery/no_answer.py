"""Explains why a request got no answer, from the error and the stage that the request had reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from enum import Enum
from typing import Final

from msgspec import Struct

from shipper.delivery.tls import os_error_text, tls_problem

# The name does not exist; other errors mean that the name server is unavailable.
_NO_SUCH_NAME: Final = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_CLOSED: Final = "the connection was closed"
# Causes that must be fixed by a person; retrying does not help.
SETUP_CAUSES: Final = {"tls", "unknown_host", "credentials"}


class Stage(Enum):
    CONNECT = "connect"
    HANDSHAKE = "handshake"
    TUNNEL = "tunnel"  # CONNECT to a proxy
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
    """The progress of the current request, which errors alone do not show."""

    stage: Stage = Stage.CONNECT
    is_at_proxy: bool = False  # the peer is the proxy, not the service
    is_reused: bool = False  # the connection has already been used for a request
    is_answering: bool = False  # a part of the answer was received

    def begin(self, *, is_at_proxy: bool) -> None:
        self.stage, self.is_at_proxy, self.is_reused = Stage.CONNECT, is_at_proxy, False


class HttpError(Exception):
    """The answer is not complete or not valid HTTP/1.1; the message quotes nothing from it."""


class ProxyRefusedError(Exception):
    """The proxy refused the request, or requires credentials (407)."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class NoAnswerError(Exception):
    """
    There was no answer, or no complete one.

    Attributes:
        cause: One word. Before the request is sent: `name_lookup`, `unknown_host`, `connect_error`, `connect_timeout`,
            `tls` (failed permanently, for instance because a certificate is not accepted), `proxy`, `credentials` (the
            proxy demands others). Afterwards: `read_timeout`, `write_timeout`, `read_error`, `remote_protocol_error`.
        step: The step that failed: `dns`, `connect` (including everything about a proxy), `tls` or `service`.
        is_stale: The request was sent over a reused connection that the peer was closing. A retry uses a new
            connection, so this cannot happen twice in a row.
        was_sent: The service may have received the request; False = certainly not.
    """

    def __init__(
        self,
        cause: str,
        message: str,
        *,
        step: str = "service",
        is_stale: bool = False,
        was_sent: bool = True,
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.step = step
        self.is_stale = is_stale
        self.was_sent = was_sent


class Route(Struct, frozen=True):
    """The route to an address, as the settings describe it."""

    address: str
    proxy: str  # its address, without credentials; empty = none
    section: str
    connect_s: float  # connect timeout
    read_s: float  # read timeout
    is_service: bool = True  # False = a token endpoint


def no_answer(error: BaseException, route: Route, progress: Progress) -> NoAnswerError:
    """Explain why there is no answer, from the error and the progress of the request."""
    errors = list(_causes(error))
    is_at_proxy, stage = progress.is_at_proxy, progress.stage
    peer = f"the proxy {route.proxy}" if is_at_proxy else route.address
    problem = tls_problem(errors, peer, route.section, is_service=route.is_service and not is_at_proxy)
    if problem:
        # In TLS 1.3, the client may already have sent the request; the server discards it unread.
        was_sent = stage in _SENT and progress.is_reused
        return NoAnswerError("tls", problem, step="connect" if is_at_proxy else "tls", was_sent=was_sent)
    if isinstance(error, TimeoutError) and not error.errno:
        return _timed_out(route, progress, peer)
    why = next((os_error_text(e) for e in reversed(errors) if isinstance(e, OSError) and e.errno), _CLOSED)
    if isinstance(error, HttpError):
        why = str(error)
    if is_at_proxy or isinstance(error, ProxyRefusedError):
        return _proxy_failed(error.status if isinstance(error, ProxyRefusedError) else 0, why, route)
    if stage in _SENT:
        cause = "remote_protocol_error" if isinstance(error, HttpError) else "read_error"
        is_stale = progress.is_reused and not progress.is_answering
        return NoAnswerError(cause, f"no answer from {peer}: {why}", is_stale=is_stale)
    if isinstance(error, UnicodeError):
        why = "it is not a valid host name"
    if any(isinstance(e, socket.gaierror | UnicodeError) for e in errors):
        is_away = any(isinstance(e, socket.gaierror) and e.errno not in _NO_SUCH_NAME for e in errors)
        cause = "name_lookup" if is_away else "unknown_host"
        return NoAnswerError(cause, f"the host of {peer} was not found: {why}", step="dns", was_sent=False)
    if stage is Stage.HANDSHAKE:
        why += "; perhaps it does not use TLS"
    return NoAnswerError("connect_error", f"cannot connect to {peer}: {why}", step=_STEPS[stage], was_sent=False)


def _timed_out(route: Route, progress: Progress, peer: str) -> NoAnswerError:
    was_sent, step = progress.stage in _SENT, _STEPS[progress.stage]
    if was_sent or progress.stage is Stage.TUNNEL:
        cause, what = "read_timeout", f"no complete answer from {peer}"
        limit = f"{route.read_s:g} s; see delivery.read_timeout_seconds"
    else:
        cause, what = "connect_timeout", f"cannot connect to {peer}"
        limit = f"{route.connect_s:g} s; see delivery.connect_timeout_seconds"
    if progress.stage is Stage.SEND:
        cause, what = "write_timeout", f"{peer} did not receive the whole request"
    if progress.is_at_proxy:
        cause, step = "proxy", "connect"
    return NoAnswerError(cause, f"{what} within {limit}", step=step, was_sent=was_sent)


def _proxy_failed(status: int, why: str, route: Route) -> NoAnswerError:
    cause = "proxy"
    if status == 407:
        what, key, cause = "requires a valid user name and password", "proxy_username", "credentials"
    elif status:
        what, key = f"refuses to connect to {route.address}, with status {status}", "proxy"
    else:
        what, key = f"cannot be used: {why}", "proxy"
    message = f"the proxy {route.proxy} {what}; see {route.section}.{key}"
    return NoAnswerError(cause, message, step="connect", was_sent=False)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, but not its context, which may be the failure of another request."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__
