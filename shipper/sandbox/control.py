"""The sandbox's control endpoints under `/_sandbox/`: received data, faults, keys and the clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import date
from importlib.resources import files
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, to_builtins
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shipper.model.errors import ConfigError
from shipper.sandbox.faults import FaultScript, Operation, read_script
from shipper.sandbox.gateway import NOT_FOUND, bounded_body, json_response, refusal_response
from shipper.sandbox.intake import EVENT
from shipper.sandbox.options import Which
from shipper.sandbox.service import Service
from shipper.sandbox.store import StoredEvent, marketing_source_of
from shipper.sandbox.tokens import CLIENT_ID, CLIENT_SECRET, DEFAULT_SCOPE, PASSWORD, TOKEN_PATH, USERNAME

PAGE: Final = 100
PAGE_MAX: Final = 10_000
PREFIX: Final = "/_sandbox"
BAD_REQUESTS: Final = (ConfigError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of handlers that are answered with 400 and the message."""

_BODY_BYTES_MAX: Final = 1 << 20
_LINES_AT_ONCE: Final = 10_000
_RESTATED_DAYS_MAX: Final = 3_660

T = TypeVar("T")
_Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
_After = Annotated[int, Meta(ge=0, le=2**53)]


class _EventQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: _Limit = PAGE
    after: _After = 0
    day: Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")] | None = None
    brand: int | None = None
    marketing_source: int | None = None
    times_received: Annotated[int, Meta(ge=1)] = 1  # at least

    def fits(self, stored: StoredEvent) -> bool:
        if stored.times_received < self.times_received:
            return False
        if self.day is None and self.brand is None and self.marketing_source is None:
            return True
        event = EVENT.decode(stored.raw)
        return (
            self.day in {None, event.Timestamp[:10]}
            and self.brand in {None, event.BrandID}
            and self.marketing_source in {None, marketing_source_of(event.BTag)}
        )


class _RequestQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: _Limit = PAGE
    after: _After = 0
    operation: Operation | None = None
    status: int | None = None
    fault: str | None = None


class _Clock(Struct, frozen=True, forbid_unknown_fields=True):
    offset_seconds: Annotated[float, Meta(ge=-(10**9), le=10**9)]


class _Period(Struct, frozen=True, forbid_unknown_fields=True):
    start: date
    end: date


class _WhichKey(Struct, frozen=True, forbid_unknown_fields=True):
    which: Which = "primary"


class Control:
    def __init__(self, service: Service, *, base_url: str) -> None:
        self._service = service
        self._base_url = base_url

    def routes(self) -> list[Route]:
        """Return the routes, relative to the prefix, and build the index that `GET /` returns."""
        handlers: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/", self.index),
            ("GET", "/access", self.access),
            ("POST", "/keys/rotate", self.rotate_key),
            ("GET", "/counts", self.counts),
            ("GET", "/events", self.events),
            ("GET", "/events/{event_id}", self.event),
            ("GET", "/event-ids", self.event_ids),
            ("GET", "/requests", self.requests),
            ("GET", "/faults", self.faults),
            ("PUT", "/faults", self.set_faults),
            ("DELETE", "/faults", self.clear_faults),
            ("GET", "/clock", self.clock),
            ("PUT", "/clock", self.set_clock),
            ("POST", "/restatements", self.restate),
            ("POST", "/reset", self.reset),
            ("GET", "/openapi.json", self.openapi),
        ]
        self._index = [
            {"method": method, "path": f"{PREFIX}{path}", "does": handler.__doc__} for method, path, handler in handlers
        ]
        return [Route(path, handler, methods=[method]) for method, path, handler in handlers]

    async def index(self, _: Request) -> Response:
        """List the controls."""
        return json_response(self._index)

    async def access(self, _: Request) -> Response:
        """Return the base URL, the keys, a token, and credentials for the token endpoint."""
        gateway = self._service.gateway
        return json_response(
            {
                "base_url": self._base_url,
                "subscription_key": gateway.keys["primary"],
                "secondary_key": gateway.keys["secondary"],
                "token": self._service.tokens.issue(),
                "token_url": f"{self._base_url}{TOKEN_PATH}",
                "client_id": CLIENT_ID,
                "client_secret": CLIENT_SECRET,
                "scope": DEFAULT_SCOPE,
                "username": USERNAME,
                "password": PASSWORD,
                "account_id": self._service.options.account_id,
            }
        )

    async def rotate_key(self, request: Request) -> Response:
        """Replace a subscription key: {"which": "primary"} or "secondary"."""
        which = await _read(request, _WhichKey, optional=True)
        return json_response({"which": which.which, "key": self._service.gateway.rotate_key(which.which)})

    async def counts(self, _: Request) -> Response:
        """Return the number of intake requests and events."""
        return json_response(self._service.counts())

    async def events(self, request: Request) -> Response:
        """List stored events: limit, after, day, brand, marketing_source, times_received (minimum)."""
        query = _query(request, _EventQuery)
        events, after = self._service.store.page(after=query.after, limit=query.limit, is_wanted=query.fits)
        return json_response({"events": list(map(_shown, events)), "next": after})

    async def event(self, request: Request) -> Response:
        """Return an event and how often its EventId was received."""
        event = self._service.store.get(request.path_params["event_id"])
        return refusal_response(NOT_FOUND) if event is None else json_response(_shown(event))

    async def event_ids(self, _: Request) -> Response:
        """List the stored EventIds as text, one per line, in order of arrival."""
        return StreamingResponse(_lines(self._service.store.event_ids()), media_type="text/plain")

    async def requests(self, request: Request) -> Response:
        """List recent requests to the operations: limit, after, operation, status, fault."""
        query = _query(request, _RequestQuery)
        entries = [
            entry
            for entry in self._service.requests
            if entry.number > query.after
            and query.operation in {None, entry.operation}
            and query.status in {None, entry.status}
            and query.fault in {None, entry.fault}
        ]
        page = entries[: query.limit]
        return json_response({"requests": page, "next": page[-1].number if len(entries) > len(page) else None})

    async def faults(self, _: Request) -> Response:
        """Return the current fault script and how often each rule was applied."""
        plan = self._service.faults
        pairs = zip(plan.script.fault, plan.applied, strict=True)
        rules = [{**to_builtins(rule), "applied": applied} for rule, applied in pairs]
        return json_response({"seed": plan.script.seed, "fault": rules, "requests_seen": plan.seen})

    async def set_faults(self, request: Request) -> Response:
        """Replace the fault script (JSON or TOML) and restart the request count at 1."""
        document = await _body(request)
        is_json = document.lstrip()[:1] == b"{"
        self._service.faults.load(read_script(document, source="the body", is_json=is_json))
        return await self.faults(request)

    async def clear_faults(self, request: Request) -> Response:
        """Remove all faults."""
        self._service.faults.load(FaultScript())
        return await self.faults(request)

    async def clock(self, _: Request) -> Response:
        """Return the service's time and its offset from the machine's clock."""
        clock = self._service.clock
        return json_response({"now": clock(), "offset_seconds": clock.offset_seconds})

    async def set_clock(self, request: Request) -> Response:
        """Set the offset of the service's clock: {"offset_seconds": 3600}."""
        self._service.clock.offset_seconds = (await _read(request, _Clock)).offset_seconds
        return await self.clock(request)

    async def restate(self, request: Request) -> Response:
        """Restate the report's figures for some days: {"start": "2026-03-01", "end": "2026-03-31"}."""
        period = await _read(request, _Period)
        days = (period.end - period.start).days + 1
        if not 1 <= days <= _RESTATED_DAYS_MAX:
            raise ConfigError(f"the period from start to end must have 1 to {_RESTATED_DAYS_MAX} days, not {days}")
        self._service.restate(period.start, period.end)
        return json_response({"days": days})

    async def reset(self, request: Request) -> Response:
        """Delete everything received and restart the fault script; keep the keys and the clock."""
        self._service.reset()
        return await self.counts(request)

    async def openapi(self, _: Request) -> Response:
        """Return the OpenAPI document of the two operations."""
        document = msgspec.json.decode(files("shipper.sandbox").joinpath("openapi.json").read_bytes())
        document["servers"][0]["url"] = self._base_url
        return json_response(document)


def _query(request: Request, kind: type[T]) -> T:
    return msgspec.convert(dict(request.query_params), kind, strict=False)


async def _body(request: Request) -> bytes:
    body = await bounded_body(request, _BODY_BYTES_MAX)
    if body is None:
        raise ConfigError(f"the body has more than {_BODY_BYTES_MAX} bytes")
    return body


async def _read(request: Request, kind: type[T], *, optional: bool = False) -> T:
    body = await _body(request)
    return msgspec.json.decode(body if body or not optional else b"{}", type=kind)


def _shown(event: StoredEvent) -> dict[str, object]:
    return {"EventId": event.event_id, "times_received": event.times_received, "raw": event.raw.decode()}


async def _lines(event_ids: list[str]) -> AsyncIterator[bytes]:
    for start in range(0, len(event_ids), _LINES_AT_ONCE):
        yield ("\n".join(event_ids[start : start + _LINES_AT_ONCE]) + "\n").encode()
