"""A fake report service in a thread, on real sockets, with scripted answers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from datetime import date
from typing import NamedTuple
from urllib.parse import parse_qs

from msgspec.structs import replace

from shipper.model import wire
from tests.report_documents import NOTHING_EARNED, brand, entry, report
from tests.servers import Listener, read_request

_PATH = re.compile(r"GET /dpm/v1/dar/(\d+)/([\d-]{10})/([\d-]{10}) HTTP/1.1\r\n")


class Asked(NamedTuple):
    """One request for a report."""

    account: int
    start: date
    end: date
    token: str
    key: str


Reply = bytes | Callable[[socket.socket], None]
Rule = Callable[[Asked], Reply | None]


class ReportService(Listener):
    """
    Answers with the same small report each time, unless the rule returns another answer.

    Attributes:
        rule: Returns the answer to a request; None = the report.
        asked: The report requests, in order of arrival.
        forms: The token requests; the answers are `token-1`, `token-2` ….
    """

    def __init__(self, rule: Rule = lambda _: None) -> None:
        super().__init__()
        self.rule = rule
        self.asked: list[Asked] = []
        self.forms: list[dict[str, list[str]]] = []

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def open_connections(self) -> int:
        return self.accepted - self.closed

    def handle(self, connection: socket.socket) -> None:
        while request := read_request(connection).decode("latin-1"):
            if request.startswith("POST /token "):
                self.forms.append(parse_qs(request.partition("\r\n\r\n")[2]))
                reply: Reply = token(f"token-{len(self.forms)}")
            else:
                asked = _asked(request)
                self.asked.append(asked)
                reply = self.rule(asked) or ok(document(asked))
            if callable(reply):
                reply(connection)
            else:
                connection.sendall(reply)


def document(asked: Asked, **changes: object) -> bytes:
    """Make the requested report; its balances are consistent, also with those of adjacent reports."""
    made = report(brand(entry(**NOTHING_EARNED)), account=asked.account, start=str(asked.start), end=str(asked.end))
    made = replace(made, opening_balance=made.outgoing_balance)
    return wire.encode_report(replace(made, **changes))


def ok(body: bytes, content_type: str = "application/json") -> bytes:
    return answer(200, body, content_type)


def answer(
    status: int,
    body: bytes = b"",
    content_type: str = "application/json",
    headers: Mapping[str, str] = {},
) -> bytes:
    fields = {"Content-Type": content_type, "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} As told\r\n{head}\r\n".encode() + body


def refusal(status: int, message: str = "", **headers: str) -> bytes:
    """Return a gateway's refusal."""
    body = json.dumps({"statusCode": status, "message": message}).encode()
    return answer(status, body, headers={name.replace("_", "-"): value for name, value in headers.items()})


def token(value: str) -> bytes:
    return ok(json.dumps({"token_type": "Bearer", "expires_in": 3600, "access_token": value}).encode())


def cut_off(connection: socket.socket) -> None:
    """Send part of an answer, then close the connection."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
    connection.shutdown(socket.SHUT_RDWR)


def _asked(request: str) -> Asked:
    found = _PATH.match(request)
    assert found is not None, request
    headers = {
        name.lower(): value for name, _, value in (line.partition(": ") for line in request.split("\r\n")[1:] if line)
    }
    return Asked(
        int(found[1]),
        date.fromisoformat(found[2]),
        date.fromisoformat(found[3]),
        headers["authorization"].removeprefix("Bearer "),
        headers["ocp-apim-subscription-key"],
    )
