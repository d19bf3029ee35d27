"""A running sandbox with a manual clock, and events to send."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Self

import httpx
import msgspec

from shipper.model import wire
from shipper.sandbox.faults import FaultScript, read_rule
from shipper.sandbox.gateway import SUBSCRIPTION_KEY_HEADER
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.samples import sample_lines
from shipper.sandbox.server import sandbox_in_thread
from tests.fakes import HandClock

NOW = 1_773_577_807.25  # 2026-03-15T12:30:07.25Z
END = datetime.fromtimestamp(NOW, UTC)
REPORT = "/dpm/v1/dar/1001/2026-03-01/2026-03-31"
PATHS = {"intake": wire.INTAKE_PATH, "report": REPORT, "token": "/oauth2/v2.0/token"}
NO_EVENTS = {"requests": 0, "events_received": 0, "events_stored": 0, "duplicates": 0, "rejected": 0}


def eventually(is_so: Callable[[], object], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.005)


class Sandbox:
    """A sandbox in a thread, and a client that sends the required headers."""

    def __init__(self, options: SandboxOptions, script: FaultScript | None = None) -> None:
        self.clock = HandClock(NOW)
        self.options = options
        self._thread = sandbox_in_thread(options, script, clock=self.clock)
        self.http = httpx.Client(trust_env=False, verify=False, timeout=10)

    def __enter__(self) -> Self:
        self.access, self.store = self._thread.__enter__()
        self.base_url = self.access.base_url
        self.headers = self.access_headers()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._thread.__exit__(None, None, None)

    @property
    def port(self) -> int:
        return httpx.URL(self.base_url).port

    def renew(self) -> None:
        """Reset it to the state after a start, except the number of key rotations."""
        self.clock.now = NOW
        self.control("PUT", "clock", {"offset_seconds": self.options.clock_offset_seconds})
        self.control("DELETE", "faults")
        self.control("POST", "reset")
        self.headers = self.access_headers()

    def access_headers(self) -> dict[str, str]:
        access = self.control("GET", "access").json()
        return {
            "Content-Type": "application/json",
            "Cache-Control": "no-cache",
            "Authorization": f"Bearer {access['token']}",
            SUBSCRIPTION_KEY_HEADER: access["subscription_key"],
        }

    # Requests

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> httpx.Response:
        """Send a request with the required headers; None removes one."""
        sent = {**self.headers, **(headers or {})}
        kept = {name: value for name, value in sent.items() if value is not None}
        return self.http.request(method, self.base_url + path, content=content, headers=kept)

    def call(self, operation: str = "intake", headers: Mapping[str, str | None] | None = None) -> httpx.Response:
        """Send a valid request to the intake or the report, or an invalid one to the token endpoint."""
        method = "GET" if operation == "report" else "POST"
        return self.ask(method, PATHS[operation], body([]) if operation == "intake" else None, headers)

    def post(self, events: list[bytes], headers: Mapping[str, str | None] | None = None) -> httpx.Response:
        return self.ask("POST", wire.INTAKE_PATH, body(events), headers)

    def post_in_batches(self, events: list[bytes], size: int) -> None:
        for first in range(0, len(events), size):
            self.post(events[first : first + size])

    def raw(self, data: bytes, *, until_end: bool = True) -> bytes:
        """Send bytes, and read until the connection ends."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(data)
            received = b""
            while until_end and (part := connection.recv(65_536)):
                received += part
            return received

    def bare(self, method: str, path: str, content: bytes = b"") -> bytes:
        """Return the bytes of a valid request."""
        headers = {"Host": "sandbox", **self.headers, "Content-Length": str(len(content))}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        return "\r\n".join(lines).encode() + content

    # Controls

    def control(self, method: str, path: str, document: object = None) -> httpx.Response:
        content = document if isinstance(document, bytes) else json.dumps(document).encode() if document else None
        return self.http.request(method, f"{self.base_url}/_sandbox/{path}", content=content)

    def counts(self) -> dict[str, int]:
        return self.control("GET", "counts").json()

    def keys(self) -> dict[str, str]:
        """Return the subscription keys, by the name with which they are rotated."""
        access = self.control("GET", "access").json()
        return {"primary": access["subscription_key"], "secondary": access["secondary_key"]}

    def statuses(self, count: int, operation: str = "intake") -> list[int]:
        """Send valid requests; return the statuses of their answers."""
        return [self.call(operation).status_code for _ in range(count)]

    def events(self, query: str = "") -> list[bytes]:
        """Return the stored events as received, of all pages."""
        return [event["raw"].encode() for page in self.pages(query) for event in page]

    def pages(self, query: str = "") -> list[list[dict]]:
        pages, after = [], 0
        while after is not None:
            page = self.control("GET", f"events?{query}&after={after}").json()
            pages.append(page["events"])
            after = page["next"]
        return pages

    def stored(self) -> list[str]:
        """Return the stored EventIds in the order of arrival."""
        return self.control("GET", "event-ids").text.splitlines()

    def log(self, query: str = "") -> list[dict]:
        return self.control("GET", f"requests{query}").json()["requests"]

    def go_wrong(self, *rules: str) -> None:
        """Activate fault rules, written as for `--fault`."""
        script = [read_rule(rule, source="test") for rule in rules]
        self.control("PUT", "faults", {"fault": msgspec.to_builtins(script)}).raise_for_status()

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds


def sample(count: int, **kwargs) -> list[bytes]:
    return [line.rstrip() for line in sample_lines(count, **{"end": END, "days": 10, **kwargs})]


def body(events: list[bytes]) -> bytes:
    return wire.BODY_HEAD + b",".join(events) + wire.BODY_TAIL


def changed(event: bytes, **fields: object) -> bytes:
    """Set fields of an event; `...` removes one."""
    document = {**json.loads(event), **fields}
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode()


def event_id(event: bytes) -> str:
    return json.loads(event)["EventId"]


def gateway_answer(status: int, message: str) -> tuple[int, str, dict[str, object]]:
    """Return the expected result of `told` for a refusal."""
    return status, "application/json", {"statusCode": status, "message": message}


def assert_refused(answer: httpx.Response, words: str) -> None:
    """Check that a request was a bad one for the reason with these words."""
    assert (answer.status_code, answer.json()["statusCode"]) == (400, 400)
    assert answer.json()["message"]
    assert words in answer.json()["message"]


def told(answer: httpx.Response) -> tuple[int, str, dict[str, object]]:
    return answer.status_code, answer.headers["Content-Type"], answer.json()
