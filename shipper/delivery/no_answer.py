"""What kept an answer from coming, in words: from the library's error and how far the request had got."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from shipper.delivery.progress import Progress, Stage
from shipper.delivery.tls import tls_problem, words

# What a name server says of a name that does not exist; a server that is away says something else.
_NO_SUCH_NAME: Final = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_CLOSED: Final = "the connection was closed"
_NO_HTTP: Final = "the connection was closed before the whole answer had come, or what came is not HTTP"


class NoAnswerError(Exception):
    """
    There was no answer, or not the whole of it.

    Attributes:
        cause: One word. Before the request is sent: `name_lookup`, `unknown_host`, `connect_error`, `connect_timeout`,
            `tls`, `proxy`. After it: `read_timeout`, `write_timeout`, `read_error`, `remote_protocol_error`.
        is_tls: TLS failed for a fault of the set-up, not of the moment, such as a certificate that is not accepted.
        is_stale: The request met a connection that had carried an answer before and was being closed by the peer. The
            next one goes over a new connection, so this does not come twice in a row.
        was_sent: The service may have taken the request; False = certainly not.
    """

    def __init__(
        self, cause: str, message: str, *, is_tls: bool = False, is_stale: bool = False, was_sent: bool = True
    ) -> None:
        super().__init__(message)
        self.cause = cause
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


def no_answer(kind: str, error: BaseException, way: Way, progress: Progress) -> NoAnswerError:
    """
    Explain an error.

    Args:
        kind: The library's name for it, such as `read_error`, `connect_timeout` or, for our own limit, `timeout`.
        progress: How far the request had got.
    """
    errors = list(_led_to(error))
    peer = f"the proxy {way.proxy}" if progress.is_at_proxy else way.address
    problem = tls_problem(errors, peer, way.section, is_service=way.is_service and not progress.is_at_proxy)
    if problem:
        # In TLS 1.3 the client may already have sent its request, and the server throws it away unread.
        was_sent = progress.stage is Stage.REQUEST and progress.is_reused
        return NoAnswerError("tls", problem, is_tls=True, was_sent=was_sent)
    if kind.endswith("timeout"):
        return _too_late(kind, way, progress, peer)
    why = next((words(each) for each in reversed(errors) if isinstance(each, OSError) and each.errno), _CLOSED)
    if kind == "remote_protocol_error":
        why = _NO_HTTP
    if progress.is_at_proxy or kind == "proxy_error":
        return _no_proxy(str(error)[:3] if kind == "proxy_error" else "", why, way)
    if kind == "local_protocol_error":
        message = f"the request to {peer} is none that HTTP allows; look at the token and the subscription key"
        return NoAnswerError(kind, message, was_sent=False)
    if progress.stage is Stage.REQUEST:
        is_cut = kind in {"read_error", "remote_protocol_error"}
        is_stale = is_cut and progress.is_reused and not progress.is_answering
        return NoAnswerError(kind, f"no answer from {peer}: {why}", is_stale=is_stale)
    if isinstance(error, UnicodeError):
        why = "no name looks like that"
    if any(isinstance(each, socket.gaierror | UnicodeError) for each in errors):
        is_away = any(isinstance(each, socket.gaierror) and each.errno not in _NO_SUCH_NAME for each in errors)
        cause = "name_lookup" if is_away else "unknown_host"
        return NoAnswerError(cause, f"the host of {peer} is not found: {why}", was_sent=False)
    return NoAnswerError("connect_error", f"cannot connect to {peer}: {why}", was_sent=False)


def _too_late(kind: str, way: Way, progress: Progress, peer: str) -> NoAnswerError:
    if progress.stage in {Stage.CONNECT, Stage.HANDSHAKE}:
        cause, what = "connect_timeout", f"cannot connect to {peer}: nothing"
        limit = f"{way.connect_s:g} s; see delivery.connect_timeout_seconds"
    else:
        cause, what = "read_timeout", f"no whole answer from {peer}"
        limit = f"{way.read_s:g} s; see delivery.read_timeout_seconds"
    if kind == "write_timeout":
        cause, what = kind, f"{peer} did not take the whole request"
    if progress.is_at_proxy:
        cause = "proxy"
    return NoAnswerError(cause, f"{what} within {limit}", was_sent=progress.stage is Stage.REQUEST)


def _no_proxy(status: str, why: str, way: Way) -> NoAnswerError:
    """`status` is that of the proxy's refusal; empty if it is none."""
    if status == "407":
        what, key = "asks for a user and password, or for others", "proxy_username"
    elif status:
        what, key = f"refuses the way to {way.address} with status {status}", "proxy"
    else:
        what, key = f"cannot be used: {why}", "proxy"
    return NoAnswerError("proxy", f"the proxy {way.proxy} {what}; see {way.section}.{key}", was_sent=False)


def _led_to(error: BaseException) -> Iterator[BaseException]:
    """
    Yield an error and what led to it.

    The library cuts some causes off, but hands each of them to the error that takes its place. What Python notes as
    the context is of no use: it may be another request's failure, which the caller is just dealing with.
    """
    cause: object = error
    while isinstance(cause, BaseException):
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or next(iter(cause.args), None)
