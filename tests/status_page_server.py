"""
Serves the status page with sample documents, for tests and for viewing.

    python -m tests.status_page_server paused
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from shipper.report.formatting import format_days
from shipper.report.history import LatestFetch
from shipper.status.admin.page import render
from shipper.status.document import document as make_document
from shipper.status.live import ChartPoint, Live, PastPause, Pause
from shipper.status.overview import LetterSummary, Overview, StreamState, UnreachableInput
from shipper.status.pauses import ADVICE
from shipper.status.snapshot import Snapshot

NOW = 1_790_000_000.0
HEALTHY = Live(
    version="0.1.0",
    process_id=4711,
    command="run",
    destination="https://intake.example.com/acquisition",
    state_directory="/var/lib/shipper/malta",
    phase="running",
    started_at=NOW - 187_000,
    at=NOW,
    read=12_345_678,
    accepted=12_340_000,
    dead_lettered=0,
    duplicates=5_678,
    pending=0,
    accepted_per_second=1204.4,
    settled_bytes_per_second=402_000.0,
    latency_p50_seconds=0.0124,
    latency_p95_seconds=0.0471,
    in_flight=3,
    concurrency_limit=16,
    last_accepted_at=NOW - 1.2,
    last_pause=PastPause("throttled", NOW - 7200, NOW - 7140),
    token_expires_at=NOW + 2520,
    certificate_expires_at=NOW + 83 * 86400,
)
STREAMS = [
    StreamState(1, "/var/log/app/registrations.ndjson", 84_200_000, 84_200_000, 0, "", NOW, NOW),
    StreamState(2, "/var/log/app/registrations-2026-09-20.ndjson.gz", 9_100_000, 9_100_000, 0, "gzip", NOW, NOW),
    StreamState(3, "/srv/edge/malta/acquisition/clicks.csv", 310_000_000, 310_000_000, 0, "", NOW, NOW),
]
STATE = Overview(at=NOW, read=98_765_432, accepted=98_700_000, dead_lettered=432, duplicates=65_000, streams=STREAMS)
NOTHING = {"read": 0, "accepted": 0, "dead_lettered": 0, "duplicates": 0, "streams": []}
DAYS = date(2026, 9, 1), date(2026, 9, 20)
REPORT = to_builtins(LatestFetch(NOW - 3 * 3600, 1001, *DAYS, format_days(*DAYS)))


def document(live: Live = HEALTHY, **state: Any) -> dict[str, Any]:
    """Make an answer of `/status`; `state` overrides fields of the healthy state."""
    if live.lag_bytes:  # keep the state consistent with the process
        state = {"streams": [replace(STREAMS[0], lag_bytes=live.lag_bytes), *STREAMS[1:]]} | state
    overview = replace(STATE, **state)
    snapshot = Snapshot(at=live.at, process_id=live.process_id, live=live, state=overview)
    return make_document(snapshot) | {"report": REPORT}


def pause(reason: str, message: str) -> Pause:
    return Pause(reason, message, ADVICE[reason], since=NOW - 200, next_probe_at=NOW + 12)


FORBIDDEN = pause("forbidden", "the service denied access (HTTP 403)")
FULL = pause(
    "dead_letters_full", "1,048,600,000 bytes of dead letters are kept, and state.dead_letter_max_bytes is 1 GB"
)
BEHIND = replace(
    HEALTHY,
    pending=8_000,
    read=HEALTHY.read + 8_000,
    lag_bytes=96_500_000,
    oldest_unsettled_seconds=12.0,
)
PAUSED = replace(
    BEHIND,
    pauses=[FORBIDDEN],
    last_accepted_at=NOW - 203,
    oldest_unsettled_seconds=203.0,
    accepted_per_second=0.0,
    settled_bytes_per_second=0.0,
    in_flight=0,
)
OPEN_LINE = replace(HEALTHY, lag_bytes=10, settled_bytes_per_second=0.0, accepted_per_second=0.0)
LETTERS = {
    "dead_letters": {"country": 1_204, "btag": 310, "timestamp": 44, "json": 3},
    "dead_letter_bytes": 612_000,
    "newest_dead_letters": [
        LetterSummary(
            id=1561 - index,
            rule=rule,
            path=STREAMS[0].path,
            offset=84_100_000 - 700 * index,
            event_id=f"0d9f4c1e-7d3b-4a52-9a10-5f3c2b7a{index:04x}",
            status=status,
            delivery=delivery,
            last_at=NOW - 40 * index,
            message=message,
        )
        for index, (rule, status, delivery, message) in enumerate(
            [
                ("country", 0, "invalid", "ConsumerCountry must be two letters A-Z"),
                ("btag", 400, "rejected", ""),
                ("timestamp", 0, "invalid", "Timestamp must be a real time in the form YYYY-MM-DDThh:mm:ssZ"),
            ]
        )
    ],
}
LATE = replace(STREAMS[2], checkpoint=213_500_000, lag_bytes=96_500_000, delivered_until=NOW - 260)
LAGGING = {"streams": [LATE, STREAMS[1], STREAMS[0]]}


def history(minutes: float = 30.0, *, until: float = NOW, is_paused: bool = False) -> list[list[Any]]:
    """Make the same chart points each time: waves with a gap and a pause."""
    rng = random.Random(7)
    points = []
    for index in range(int(minutes * 30)):
        at = until - 2 * index
        wave = 1 + 0.25 * math.sin(at / 140) + rng.uniform(-0.06, 0.06)
        stops = 500 < until - at < 680 or (is_paused and until - at < 200)
        rate, slow = (0.0, None) if stops else (1204 * wave, 0.012 * wave)
        lag = int(96_500_000 * max(0.0, 1 - (until - at) / 200)) if is_paused else 0
        lag += int(30_000_000 * max(0.0, 1 - abs(until - at - 500) / 180))
        tail = slow and slow * (3.5 + rng.random())
        points.append(ChartPoint(at, rate, slow, tail, 0 if stops else round(4 * wave), lag, stops))
    return [msgspec.to_builtins(each) for each in reversed(points) if not 1290 < until - each.at < 1400]


SCENES: dict[str, tuple[dict[str, Any], list[list[Any]]]] = {
    "healthy": (document(), history()),
    "behind": (document(BEHIND, **LAGGING), history()),
    "paused": (document(PAUSED, **LAGGING), history(is_paused=True)),
    "two-pauses": (document(replace(PAUSED, pauses=[FORBIDDEN, FULL]), **LAGGING, **LETTERS), history(is_paused=True)),
    "dead-letters": (
        document(replace(HEALTHY, dead_lettered=1_561, read=HEALTHY.read + 1_561), **LETTERS),
        history(),
    ),
    "worrying": (
        document(
            replace(
                HEALTHY, token_expires_at=NOW + 100, certificate_expires_at=NOW - 3600, unreachable_bytes=1_200_000
            ),
            unreachable_bytes=1_200_000,
            unreachable=[UnreachableInput(9, "/var/log/app/gone.log", 1_200_000, NOW - 90)],
        ),
        history(3),
    ),
    "open-line": (document(OPEN_LINE), history()),
    "settings": (
        document(
            replace(
                HEALTHY,
                destination="http://127.0.0.1:8080",
                reload_error="/etc/shipper/shipper.toml: log.level: expected debug, info, warning or error",
                restart_needed=["intake.base_url", "delivery.max_concurrency"],
            )
        ),
        history(1)[:3] + history(1)[10:11] + history(1)[20:],
    ),
    "stopped": (document(replace(HEALTHY, phase="stopped", outcome="drained")), history()),
    "no-match": (
        document(
            replace(
                HEALTHY,
                unmatched=["no file matches /var/log/app/acquisitions*.ndjson: there is no folder /var/log/app"],
                read=0,
                accepted=0,
                duplicates=0,
                accepted_per_second=0.0,
                settled_bytes_per_second=0.0,
                last_accepted_at=None,
            ),
            **NOTHING,
        ),
        history(1),
    ),
    "unreadable": (
        document(
            replace(
                HEALTHY,
                lag_bytes=48_000,
                settled_bytes_per_second=0.0,
                unreadable=[
                    "/var/log/app/app.ndjson cannot be read: permission denied; it belongs to user 0, group 4 "
                    "(mode 0640), and this process runs as user 998, group 998"
                ],
                unreadable_count=3,
            )
        ),
        history(),
    ),
    "none-accepted": (
        document(
            replace(HEALTHY, read=1_561, accepted=0, dead_lettered=1_561, duplicates=0, last_accepted_at=None),
            **LETTERS,
        ),
        history(1),
    ),
    "empty": (
        {
            "live": {"phase": "starting", "at": NOW, "command": "run"},
            "headline": {"state": "busy", "title": "Starting"},
            "state": {},
            "report": None,
        },
        [],
    ),
}


class StatusServer:
    """
    Serves the page at `/` and below any path, on loopback; a context manager.

    Attributes:
        document: The answer of `/status`; `live.at` advances with each answer, as in a live process.
        is_away: Whether to close the connections of the page's polls without an answer.
        refusal: Text of an answer 500 to `/status`; empty = none.
        asked: The requested paths, in order.
    """

    def __init__(self, document: dict[str, Any], history: Sequence[list[Any]] = (), *, port: int = 0) -> None:
        self.document = document
        self.history = list(history)
        self.is_away = False
        self.refusal = ""
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def answer(self, path: str) -> tuple[str, bytes]:
        """Return content type and body."""
        self.asked.append(path)
        name, _, query = path.rpartition("/")[2].partition("?")
        if name == "status":
            return "application/json", json.dumps(self._status()).encode()
        if name == "history":
            since = float(query.partition("=")[2])
            return "application/json", json.dumps(
                [each for each in self.history if not since or each[0] > since]
            ).encode()
        return "text/html; charset=utf-8", render()[0]

    def _status(self) -> Any:
        live = self.document.get("live")
        if not isinstance(live, dict) or not isinstance(live.get("at"), float):
            return self.document
        return self.document | {"live": live | {"at": live["at"] + len(self.asked) / 1000}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, body = serving.answer(self.path)
                if serving.is_away and kind == "application/json":
                    return
                is_refused = serving.refusal and "status" in self.path
                body = serving.refusal.encode() if is_refused else body
                self.send_response(500 if is_refused else 200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", render()[1])
                self.end_headers()
                with suppress(ConnectionError):  # the tab was closed
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


if __name__ == "__main__":
    with StatusServer(*SCENES[sys.argv[1]], port=8000) as server:
        print(server.url)
        threading.Event().wait()
