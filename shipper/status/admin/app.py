"""The addresses that a running shipper answers at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Final

import msgspec
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from shipper.model.errors import ShipperError
from shipper.report.history import LatestFetch, latest_fetch
from shipper.status.admin import page
from shipper.status.admin.metrics import CONTENT_TYPE, Metrics
from shipper.status.board import Board
from shipper.status.document import document
from shipper.status.overview import Overview, look_at
from shipper.status.snapshot import Snapshot
from shipper.status.watch import Watch

_FRESH_S: Final = 1.0
_COST_SHARE: Final = 20  # looking into the state may take one part in so many of the time


class Admin:
    """
    Args:
        directory: The state directory; None = there is none.
        wall_time: Seconds since the epoch.
        now: A clock that does not jump, seconds.
    """

    def __init__(
        self,
        board: Board,
        watch: Watch,
        directory: Path | None,
        *,
        wall_time: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._board = board
        self._watch = watch
        self._directory = directory
        self._wall_time = wall_time
        self._now = now
        self._look = threading.Lock()
        self._state: tuple[Overview, LatestFetch | None] | None = None
        self._state_until = 0.0
        self._metrics = Metrics(lambda: board.live, lambda: self._fresh_state()[0])

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
        app.router.redirect_slashes = False  # it would read the query, which need not be text
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
        seen = Snapshot(
            at=self._wall_time(),
            process_id=live.process_id if live else 0,
            live=live,
            state=state,
            report=report,
            stuck=self._watch.stuck,
        )
        return _json(msgspec.json.encode(document(seen)))

    def _fresh_state(self) -> tuple[Overview, LatestFetch | None]:
        """Read the state, but not so often that many requests would keep it busy."""
        if self._directory is None:
            return Overview(at=self._wall_time()), None
        with self._look:
            started_at = self._now()
            if self._state is None or started_at >= self._state_until:
                now = self._wall_time()
                self._state = look_at(self._directory, now) or Overview(), latest_fetch(self._directory)
                self._state_until = started_at + max(_FRESH_S, _COST_SHARE * (self._now() - started_at))
            return self._state

    async def _history(self, request: Request) -> Response:
        try:
            since = float(request.query_params.get("since", "0"))
        except ValueError:
            since = float("nan")
        if not isfinite(since):
            return PlainTextResponse("since: expected seconds since the epoch\n", status_code=400)
        return _json(msgspec.json.encode(self._board.moments(since)))

    async def _metrics_text(self, _: Request) -> Response:
        return Response(await run_sync(self._metrics.render), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _: Request) -> Response:
        """Return whether every stage makes progress, whatever the service does."""
        if not self._watch.stuck:
            return PlainTextResponse("ok\n")
        return PlainTextResponse(f"stuck: {self._watch.stuck}\n", status_code=503)

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
