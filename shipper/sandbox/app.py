"""
The sandbox as an application: the two operations of the service behind its gateway, and the controls beside them.

    request ──▶ route ──▶ gateway.Gateway ──▶ intake.read_batch ──▶ store.EventStore
                  │                     └───▶ report.build_report ◀────────┤
                  └─▶ /_sandbox/… (no gateway) ◀───────────────────────────┘
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import date
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shipper import wire
from shipper.errors import ConfigError
from shipper.sandbox.gateway import SECRET_MIN_BYTES, Gateway, Refusal, json_response, refusal_response
from shipper.sandbox.intake import read_batch
from shipper.sandbox.report import build_report
from shipper.sandbox.store import IN_MEMORY, EventStore, StoredEvent

DEFAULT_ACCOUNT_ID: Final = 1001
DEFAULT_PORT: Final = 8080
DEFAULT_SUBSCRIPTION_KEY: Final = "sandbox-subscription-key"

PAGE_EVENTS: Final = 100
PAGE_EVENTS_MAX: Final = 10_000
_STREAM_PAGE_EVENTS: Final = 10_000

_NOT_FOUND: Final = Refusal(404, "Resource not found")


class SandboxOptions(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a sandbox is started with.

    The secrets have defaults that anyone can read here: they keep nothing but a service on loopback that holds
    invented events, and a token outlives a restart.

    Args:
        port: 0 means any free port.
        store_path: A SQLite file, or `store.IN_MEMORY`.
    Raises:
        ConfigError: The subscription key is empty or the token secret is too short.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    account_id: int = DEFAULT_ACCOUNT_ID
    account_name: str = "Sandbox Affiliate"
    operator_name: str = "Sandbox Operator"
    subscription_key: str = DEFAULT_SUBSCRIPTION_KEY
    token_secret: str = "a-secret-only-for-sandbox-tokens-on-loopback"
    store_path: str = IN_MEMORY

    def __post_init__(self) -> None:
        if not self.subscription_key or not self.subscription_key.isascii():
            raise ConfigError("must be ASCII and not empty", key="subscription_key", source="sandbox")
        if len(self.token_secret.encode()) < SECRET_MIN_BYTES:
            raise ConfigError(f"must have at least {SECRET_MIN_BYTES} bytes", key="token_secret", source="sandbox")


def create_app(
    options: SandboxOptions, store: EventStore, *, gateway: Gateway, clock: Callable[[], float]
) -> Starlette:
    """
    Make the application.

    Args:
        options: Account and names of the report.
        store: Opened and closed by the caller.
        gateway: Judges every request to the two operations; the controls need no key and no token.
        clock: Seconds since the epoch.
    """
    sandbox = _Sandbox(options, store, gateway, clock)
    app = Starlette(
        routes=[
            Route(wire.INTAKE_PATH, sandbox.intake, methods=["POST"]),
            Route(wire.REPORT_PATH, sandbox.report, methods=["GET"]),
            Route("/_sandbox/counts", sandbox.counts, methods=["GET"]),
            Route("/_sandbox/events", sandbox.events, methods=["GET"]),
            Route("/_sandbox/events/{event_id}", sandbox.event, methods=["GET"]),
            Route("/_sandbox/event-ids", sandbox.event_ids, methods=["GET"]),
            Route("/_sandbox/reset", sandbox.reset, methods=["POST"]),
        ],
        # A gateway knows operations, not resources: a wrong method is as unknown as a wrong path.
        exception_handlers={404: _not_found, 405: _not_found},
    )
    app.router.redirect_slashes = False
    return app


class _Sandbox:
    """The handlers and what they share. They run on one event loop, so the plain counters need no lock."""

    def __init__(
        self, options: SandboxOptions, store: EventStore, gateway: Gateway, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._clock = clock
        self._source = wire.ReportSource(options.account_id, options.account_name, options.operator_name)
        self._requests = 0
        self._rejected = 0

    async def intake(self, request: Request) -> Response:
        self._requests += 1
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        refusal = self._gateway.refusal(request.headers)
        if refusal is not None:
            return refusal_response(refusal)
        batch = read_batch(body)
        if isinstance(batch, Refusal):
            return refusal_response(batch)
        added = self._store.add(batch.events)
        self._rejected += len(batch.rejected)
        return json_response({**added._asdict(), "rejected": batch.rejected}, 202)

    async def report(self, request: Request) -> Response:
        refusal = self._gateway.refusal(request.headers)
        if refusal is not None:
            return refusal_response(refusal)
        if request.path_params["account_id"] != str(self._source.affiliate_account_id):
            return refusal_response(Refusal(404, "Affiliate account not found"))
        start, end = _day(request.path_params["start"]), _day(request.path_params["end"])
        if start is None or end is None:
            return refusal_response(Refusal(400, "start_date and end_date must be dates of the form YYYY-MM-DD."))
        if start > end:
            return refusal_response(Refusal(400, "start_date must not be after end_date."))
        report = build_report(
            self._store.registrations(start.isoformat(), end.isoformat()),
            source=self._source,
            start=start,
            end=end,
            now_seconds=self._clock(),
        )
        return Response(wire.encode_report(report), media_type="application/json")

    async def counts(self, _: Request) -> Response:
        stored, duplicates = self._store.stored, self._store.duplicates
        return json_response(
            {
                "requests": self._requests,  # to the intake operation, the refused ones included
                "events_received": stored + duplicates + self._rejected,
                "events_stored": stored,
                "duplicates": duplicates,
                "rejected": self._rejected,
            }
        )

    async def events(self, request: Request) -> Response:
        limit, after = _number(request, "limit", PAGE_EVENTS), _number(request, "after", 0)
        if limit is None or after is None or not 1 <= limit <= PAGE_EVENTS_MAX:
            return refusal_response(Refusal(400, f"limit must be 1..{PAGE_EVENTS_MAX}, after a number from `next`."))
        page = self._store.page(after=after, limit=limit)
        # `next` is null on the last page: a page that is not full.
        following = page[-1].seq if len(page) == limit else None
        return json_response({"events": list(map(_shown, page)), "next": following})

    async def event(self, request: Request) -> Response:
        found = self._store.get(request.path_params["event_id"])
        return refusal_response(_NOT_FOUND) if found is None else json_response(_shown(found))

    async def event_ids(self, _: Request) -> Response:
        return StreamingResponse(self._event_id_lines(), media_type="text/plain")

    async def _event_id_lines(self) -> AsyncIterator[bytes]:
        after = 0
        while event_ids := self._store.event_ids(after=after, limit=_STREAM_PAGE_EVENTS):
            after += len(event_ids)
            yield ("\n".join(event_ids) + "\n").encode()

    async def reset(self, request: Request) -> Response:
        self._store.reset()
        self._requests = self._rejected = 0
        return await self.counts(request)


def _shown(event: StoredEvent) -> dict[str, object]:
    return {"EventId": event.event_id, "times_received": event.times_received, "raw": event.raw.decode()}


def _day(text: str) -> date | None:
    """Read `YYYY-MM-DD`, and none of the other forms of ISO 8601 that the library takes too."""
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return None
    return day if day.isoformat() == text else None


def _number(request: Request, name: str, default: int) -> int | None:
    text = request.query_params.get(name, str(default))
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


async def _not_found(_: Request, error: Exception) -> Response:
    return refusal_response(_NOT_FOUND)
