"""Hostile answers, mixed with honest ones. None is an acceptance, so that everything is delivered in the end."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

from tests.campaign import Shuffled
from tests.e2e.fake_service import RESET, WEB_PAGE, Reply
from tests.e2e.test_hostile_answers import ANSWERS, DEEP, DIGITS, ZEROS, answer, floods
from tests.e2e.test_hostile_texts import TEXT
from tests.siege.canaries import KEY, SECRET, TOKEN
from tests.torture.service import Misbehaviour, Service

_CYCLE_S: Final = 40.0
_WAVE_SHARE: Final = 0.15  # of a cycle; most answers during a wave are hostile
_IN_WAVES: Final = 0.9
_ELSE: Final = 0.2
_DRIP_S: Final = 3.0
_FEW: Final = 9  # events

_QUOTES: Final = f"{KEY} {SECRET} canary-token-1 Bearer canary-token-2 192.0.2.7 brisk_otter17 {TEXT}"


def _says(status: int, message: str, **headers: str) -> Reply:
    body = json.dumps({"statusCode": status, "message": message}).encode()
    return Reply(status=status, body=body, headers=headers)


def _wire(data: bytes | Callable[[socket.socket], None]) -> Reply:
    return Reply(wire=data)


def _drip(data: bytes) -> Callable[[socket.socket], None]:
    """Send a few bytes at a time for a while."""

    def send(connection: socket.socket) -> None:
        pause_s = _DRIP_S / len(data)
        for byte in data:
            connection.sendall(bytes((byte,)))
            time.sleep(pause_s)

    return send


def _flood(number: int, connection: socket.socket) -> None:
    floods()[number](connection)  # a new one each time, because it starts with a head


_FLOODS: Final = [_wire(partial(_flood, number)) for number in range(len(floods()))]


def _reset_within(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


_HEADS: Final = (
    b"HTTP/1.1 202 x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"HTTP/1.1 202 x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    b"HTTP/1.1 202 x\r\nContent-Type: application/json\r\nContent-Encoding: zork\r\nContent-Length: 5\r\n\r\nzork!",
    b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:9/%b\r\nContent-Length: 0\r\n\r\n" % KEY.encode(),
    b"HTTP/1.1 503 \x1b[2J%b\r\nSet-Cookie: %b\r\nContent-Length: 0\r\n\r\n" % (KEY.encode(), b"a" * 9_000),
    b"HTTP/1.1 503 x\r\n: nothing\r\n\r\n",
    b"HTTP/1.1 503 x\r\nX: a\0b\r\n folded\r\nContent-Length: 0\r\n\r\n",
)

_NO_TOKENS: Final = (
    *(b"", DEEP, b"{}", b"\xff", b"[1]", b'{"access_token":"a\\r\\nX: y"}', b'{"access_token":"\\ud800"}'),
    json.dumps({"access_token": "canary-token-x" * 90_000}).encode(),
)

# By what they attack. Requested waits are short, because shipper obeys them.
INTAKE: Final[Mapping[str, Sequence[Reply]]] = {
    "numbers, bodies, status lines": [_wire(each) for each in ANSWERS],
    "heads": [_wire(each) for each in _HEADS],
    "floods": _FLOODS,
    "slowness": [
        *(Reply(fault="trickle"), Reply(fault="stall"), Reply(fault="truncate")),
        *(_wire(_drip(each)) for each in (b"HTTP/1.1 202 Acc", b"HTTP/1.1 503 x\r\nX: y", answer(b"{")[:-1])),
    ],
    "ends": [RESET, Reply(wire=b""), _wire(_reset_within)],
    "denials in an answer of success": [
        *(
            WEB_PAGE,
            _says(200, f"failed: {TEXT}"),
            Reply(body=b'{"success":false}'),
            Reply(body=b'{"status":"zork"}'),
        ),
        *(Reply(body=json.dumps({"rejected": 10**9, "message": _QUOTES}).encode()), Reply(body=b'{"accepted":-1}')),
        Reply(status=207, body=json.dumps({"results": [{"status": _QUOTES}] * 9_000}).encode()),
    ],
    "secrets and records in a refusal": [_says(status, _QUOTES) for status in (401, 403, 404, 405, 500, 503, 599)],
    "401 for the key": [_says(401, f"Access denied due to invalid subscription key {KEY}.")],
    "waits": [
        *(_says(status, _QUOTES, **{"Retry-After": wait}) for status in (429, 503) for wait in ("0", "1", "0.5", "-9")),
        _says(403, "Out of call volume quota. Quota will be replenished in 00:00:01."),
    ],
}
# Only to batches of several records: a single refused record would correctly become a dead letter.
OF_BATCHES: Final[Mapping[str, Sequence[Reply]]] = {
    "refusals of a batch": [_says(status, _QUOTES) for status in (400, 409, 413, 422)],
}
TOKENS: Final[Mapping[str, Sequence[Reply]]] = {
    "lifetimes": [
        Reply(status=200, body=b'{"access_token":"a","token_type":"Bearer","expires_in":%b}' % each)
        for each in (ZEROS, DIGITS, b"-" + ZEROS, b"1e400", b"0", b"true", b"[]", b'"%b"' % DIGITS)
    ],
    "no tokens": [WEB_PAGE, *(Reply(status=200, body=body) for body in _NO_TOKENS)],
    "refusals": [
        Reply(status=status, body=json.dumps({"error": _QUOTES, "error_description": _QUOTES}).encode())
        for status in (400, 401, 403, 429, 500, 503)
    ],
    "floods": _FLOODS,
    "framing": [_wire(each) for each in (*ANSWERS, *_HEADS)],
    "slowness": [Reply(fault="trickle"), Reply(fault="stall"), _wire(_drip(b"HTTP/1.1 200 OK\r\nX: y"))],
}


class Hostility(Misbehaviour):
    """
    Replaces some answers by hostile ones, and nearly all during waves.

    Args:
        large: Answers to requests with more than a few events.
    """

    def __init__(
        self, kinds: Mapping[str, Sequence[Reply]], rng: Random, *, large: Mapping[str, Sequence[Reply]] | None = None
    ) -> None:
        super().__init__()
        self._large = large or {}
        self._kinds = {**kinds, **self._large}
        self._replies = {kind: Shuffled(replies, rng) for kind, replies in self._kinds.items()}
        self._rng = rng
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._picked: list[tuple[str, Misbehaviour]] = []

    @property
    def sent(self) -> Counter[str]:
        """Number of answers sent, by kind."""
        found = Counter(dict.fromkeys(self._kinds, 0))
        found.update(kind for kind, each in self._picked if each.hits)
        return found

    def pick(self) -> Misbehaviour | None:
        passed = (time.monotonic() - self._begin) / _CYCLE_S % 1
        with self._lock:
            if self._rng.random() > (_IN_WAVES if passed > 1 - _WAVE_SHARE else _ELSE):
                return None
            kind = self._rng.choice([*self._kinds])
            picked = Misbehaviour(self._replies[kind].next(), over_events=_FEW if kind in self._large else 0)
            self._picked.append((kind, picked))
            return picked


def besiege(service: Service, rng: Random) -> dict[str, Hostility]:
    """Make a service and its token endpoint hostile; return both hostilities by name."""
    service.tokens.prefix = TOKEN
    intake = service.intake.misbehaviour = Hostility(INTAKE, rng, large=OF_BATCHES)
    tokens = service.tokens.misbehaviour = Hostility(TOKENS, rng)
    return {"answers": intake, "answers of the token endpoint": tokens}


def relieve(service: Service) -> None:
    """Make the service and its token endpoint honest again."""
    service.intake.misbehaviour = service.tokens.misbehaviour = None
