"""The HTTP endpoints of a running shipper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from anyio.to_thread import run_sync
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from shipper.model.errors import ShipperError
from shipper.status.admin import page
from shipper.status.admin.metrics import CONTENT_TYPE, metrics_registry
from shipper.status.document import document
from shipper.status.live import Board
from shipper.status.overview import Overview, read_overview
from shipper.status.snapshot import Snapshot
from shipper.status.watchdog import Watchdog

if TYPE_CHECKING:
    from shipper.report.history import LatestFetch

_FRESH_S: Final = 1.0
_COST_SHARE: Final = 20  # reading the state may take 1/20 of the time


class Admin:
    """The responses of the admin server; `directory` is the state directory, None = there is none."""

    def __init__(
        self,
        board: Board,
        watchdog: Watchdog,
        directory: Path | None,
        *,
        wall_time: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._board = board
        self._watchdog = watchdog
        self._directory = directory
        self._wall_time = wall_time
        self._now = now
        self._state_lock = threading.Lock()
        self._state: tuple[Overview, LatestFetch | None] | None = None
        self._state_until = 0.0
        self._registry = metrics_registry(lambda: board.live, lambda: self._fresh_state()[0])

    def app(self) -> Starlette:
        routes = {
            "/": self._page,
            "/status": self._status,
            "/history": self._history,
            "/metrics": self._metrics_text,
            "/healthz": self._health,
            "/readyz": self._readiness,
        }
        app = Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])
        app.router.redirect_slashes = False  # it would decode the query, which may not be text
        return app

    async def _page(self, _: Request) -> Response:
        document, policy = page.render()
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
        return Response(document, media_type="text/html", headers=headers)

    async def _status(self, _: Request) -> Response:
        try:
            state, report = await run_sync(self._fresh_state)
        except ShipperError as error:
            return PlainTextResponse(f"{error}\n", status_code=500)
        live = self._board.live
        snapshot = Snapshot(
            at=self._wall_time(),
            process_id=live.process_id if live else 0,
            live=live,
            state=state,
            report=report,
            stuck=self._watchdog.stuck,
        )
        return _json(msgspec.json.encode(document(snapshot)))

    def _fresh_state(self) -> tuple[Overview, LatestFetch | None]:
        """Read the state, or return a recent one, so that many requests do not keep it busy."""
        if self._directory is None:
            return Overview(at=self._wall_time()), None
        from shipper.report.history import latest_fetch  # delivering does not need reports

        with self._state_lock:
            started_at = self._now()
            if self._state is None or started_at >= self._state_until:
                now = self._wall_time()
                self._state = read_overview(self._directory, now), latest_fetch(self._directory)
                self._state_until = started_at + max(_FRESH_S, _COST_SHARE * (self._now() - started_at))
            return self._state

    async def _history(self, request: Request) -> Response:
        try:
            since = float(request.query_params.get("since", "0"))
        except ValueError:
            since = float("nan")
        if not isfinite(since):
            return PlainTextResponse("since: expected seconds since the epoch\n", status_code=400)
        return _json(msgspec.json.encode(self._board.points(since)))

    async def _metrics_text(self, _: Request) -> Response:
        return Response(await run_sync(generate_latest, self._registry), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _: Request) -> Response:
        """Answer whether all stages make progress, independently of the service."""
        if not self._watchdog.stuck:
            return PlainTextResponse("ok\n")
        return PlainTextResponse(f"stuck: {self._watchdog.stuck}\n", status_code=503)

    async def _readiness(self, _: Request) -> Response:
        live = self._board.live
        if live is None or live.phase != "running":
            return PlainTextResponse(f"{live.phase if live else 'starting'}\n", status_code=503)
        if live.pauses:
            text = "; ".join(f"{pause.reason}: {pause.message}" for pause in live.pauses)
            return PlainTextResponse(f"paused, {text}\n", status_code=503)
        troubles = "; ".join(live.troubles)
        return PlainTextResponse(f"ready, but {troubles}\n" if troubles else "ready\n")


def _json(document: bytes) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(document, media_type="application/json", headers=headers)
