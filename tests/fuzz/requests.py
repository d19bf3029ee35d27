"""Requests to the admin address of a shipper, and to the sandbox."""

from __future__ import annotations

import atexit
import json
import re
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from shipper.sandbox.app import create_app
from shipper.sandbox.control import Control
from shipper.sandbox.faults import FaultScript
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.samples import sample_lines
from shipper.sandbox.service import Service
from shipper.sandbox.store import EventStore
from shipper.status.admin.app import Admin
from shipper.status.live import Board
from shipper.status.watchdog import Watchdog
from tests.fuzz.engine import Target, loop
from tests.fuzz.mutation import mutator

_NOW: Final = 1_773_577_807.25
_METHODS: Final = re.compile(r"[A-Z]{1,10}")

App = Callable[[Any, Any, Any], Awaitable[None]]


@cache
def _admin() -> App:
    folder = Path(tempfile.mkdtemp(prefix="shipper-fuzz-"))
    folder.rmdir()  # a shipper without state
    board = Board()
    watch = Watchdog(board, limit_s=30, now=lambda: 0.0)
    return Admin(board, watch, folder, wall_time=lambda: _NOW, now=lambda: 0.0).app()


@cache
def _sandbox() -> tuple[App, str]:
    store = EventStore()
    store.__enter__()
    atexit.register(store.__exit__, None, None, None)
    service = Service(SandboxOptions(port=0), store, FaultScript(), lambda: _NOW)
    return create_app(service, Control(service, base_url="http://127.0.0.1:1")), service.tokens.issue()


async def _ask(app: App, scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    """Send a request to an application, and assert that the answer starts once and ends once."""
    messages: list[dict[str, Any]] = []
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(parts, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    await app(scope, receive, send)
    assert [message["type"] for message in messages].count("http.response.start") == 1
    assert not messages[-1].get("more_body")
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages[1:])


def check_request(data: bytes) -> object:
    """
    Check that every request is answered without a server error.

    The input: `admin`, or anything else for the sandbox; method and target; headers, an empty line, and the body.
    """
    head, _, body = data.partition(b"\n\n")
    line, *headers = head.split(b"\n")
    which, method, target, *_ = [*line.split(b" ", 2), b"", b"", b""]
    path, _, query = target.partition(b"?")
    verb = method.decode("latin-1")
    if not _METHODS.fullmatch(verb):
        return "no request"  # the HTTP library refuses it
    app, token = (_admin(), "") if which == b"admin" else _sandbox()
    given = [(name.lower().strip(), value.strip()) for name, _, value in (each.partition(b":") for each in headers)]
    if which != b"admin":
        given.append((b"authorization", b"Bearer " + token.encode()))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": verb, "scheme": "http",
        "path": path.decode("latin-1"), "raw_path": path, "query_string": query, "root_path": "", "headers": given,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "extensions": {},
    }  # fmt: skip
    status, answer = loop().run_until_complete(_ask(app, scope, body))
    assert 200 <= status < 500 or (status == 503 and which == b"admin"), (status, answer[:200])
    return which == b"admin", status, path[:20], re.sub(rb"[0-9]+", b"0", answer[:60])


_GATE: Final = (
    b"content-type: application/json\ncache-control: no-cache\nocp-apim-subscription-key: sandbox-subscription-key"
)
_EVENTS: Final = [line.strip() for line in sample_lines(3, seed=1, end=datetime.fromtimestamp(_NOW, UTC))]
_BATCH: Final = b'{"EventType":"Acquisition","events":[' + b",".join(_EVENTS) + b"]}"
_SANDBOX: Final = (
    b"s POST /dim/v1/player/activities\n%(g)b\n\n%(b)b", b"s POST /dim/v1/player/activities\n%(g)b\n\n{}",
    b"s GET /dpm/v1/dar/1001/2026-03-01/2026-03-31\n%(g)b\n\n", b"s GET /_sandbox/events?limit=5&after=0\n\n",
    b"s POST /oauth2/v2.0/token\n\ngrant_type=client_credentials&client_id=sandbox-client&client_secret=x&scope=y",
    b'sandbox PUT /_sandbox/faults\n\n{"seed":1,"fault":[]}',
    b"s GET /_sandbox/requests?status=200&operation=intake\n\n",
    b'sandbox PUT /_sandbox/clock\n\n{"offset_seconds": 0}',
    b"s GET /_sandbox/openapi.json\n\n", b"s GET /_sandbox/counts\n\n",
    b'sandbox POST /_sandbox/restatements\n\n{"start":"2026-03-01","end":"2026-03-02"}',
    b"s GET /_sandbox/event-ids\n\n", b"s GET /absent?\xcb\n\n",
)  # fmt: skip

TARGETS: Final = (
    Target(
        "requests",
        check_request,
        [
            *(
                b"admin GET " + path + b"\n\n"
                for path in (b"/", b"/status", b"/history?since=0", b"/metrics", b"/healthz", b"/readyz")
            ),
            *(text.replace(b"%(g)b", _GATE).replace(b"%(b)b", _BATCH) for text in _SANDBOX),
        ],
        mutator(
            words=[
                *(b"?since=", b"nan", b"inf", b"1e999", b"-1", b"%00", b"%ff", b"../", b"//", b"&limit=", b"\xd9\xa3"),
                b"\n\n",
                *(b"GET ", b"HEAD ", b"PUT ", b"OPTIONS ", b"content-length: -1\n", b"content-encoding: gzip\n"),
                b"0000-00-00",
                *(b"9999-12-31", b"0001-01-01", b"9" * 30, b"after=", b"day=", b"brand=", b"times_received="),
            ],
            values=[*map(json.loads, _EVENTS[:1]), "Acquisition", "2026-13-01"],
            names=["EventType", "events", "offset_seconds", "seed", "start", "end", "which", *json.loads(_EVENTS[0])],
        ),
        share=1,
    ),
)
