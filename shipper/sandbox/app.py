"""
The sandbox's ASGI application: the service's two operations behind the gateway, the token endpoint, and the controls.

    request ──▶ route ──▶ Operation ──▶ gateway.Gateway ──▶ intake.read_batch ──▶ store.EventStore
                             │ faults, latency, log      └▶ report.build_report ◀────────┤
                             └─▶ tokens.TokenIssuer (no gateway)                         │
                    └─▶ control.Control under /_sandbox/ (no gateway, no faults) ◀───────┘
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from email.utils import formatdate
from typing import Final

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shipper.model import wire
from shipper.sandbox.control import BAD_REQUESTS, PREFIX, Control
from shipper.sandbox.effects import Connection
from shipper.sandbox.faults import Operation as OperationName
from shipper.sandbox.faults import RotateKey
from shipper.sandbox.gateway import NOT_FOUND, Refusal, refusal_response
from shipper.sandbox.service import RequestEntry, Service
from shipper.sandbox.tokens import TOKEN_PATH
from shipper.system.serving import HostGuard

_STOP_GRACE_SECONDS: Final = 0.2
_CONTROLS_ADVICE: Final = "the sandbox's controls can only be used from this machine"


def create_app(service: Service, control: Control) -> ASGIApp:
    async def not_found(request: Request, _: Exception) -> Response:
        entry = service.note("", request)
        entry.status = NOT_FOUND.status
        service.observe(entry)
        return refusal_response(NOT_FOUND)

    controls = control.routes()
    app = Starlette(
        routes=[
            Route(wire.INTAKE_PATH, Operation(service, "intake", service.intake), methods=["POST"]),
            Route(wire.REPORT_PATH, Operation(service, "report", service.report), methods=["GET"]),
            Route(TOKEN_PATH, Operation(service, "token", service.token), methods=["POST"]),
            Mount(PREFIX, HostGuard(Router(controls, redirect_slashes=False), advice=_CONTROLS_ADVICE)),
        ],
        # Like a real gateway, which matches method and path together, answer 404 to a wrong method, too.
        exception_handlers={404: not_found, 405: not_found}
        | dict.fromkeys((*BAD_REQUESTS, ClientDisconnect), _bad_request),  # the latter response is never sent
    )
    app.router.redirect_slashes = False
    for route in (*app.routes, *controls):
        if isinstance(route, Route) and route.methods:
            route.methods.discard("HEAD")  # Starlette adds it to every GET
    return _dated(app, service.clock)


class Operation:
    """An ASGI application for one operation, with faults, latency and log; `handle` answers a request."""

    def __init__(
        self, service: Service, name: OperationName, handle: Callable[[Request, RequestEntry], Awaitable[Response]]
    ) -> None:
        self._service = service
        self._name = name
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        entry = self._service.note(self._name, request)

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        connection = Connection(scope, receive, noting_send)
        started = anyio.current_time()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._end_at_stop, group.cancel_scope)
                with suppress(ClientDisconnect):
                    await self._exchange(request, entry, connection)
                group.cancel_scope.cancel()
                return
            await connection.reset()
        finally:
            entry.seconds = round(anyio.current_time() - started, 6)
            self._service.observe(entry)

    async def _end_at_stop(self, exchange: anyio.CancelScope) -> None:
        """Cancel an exchange that is still running shortly after the sandbox was asked to stop."""
        await self._service.stopping.wait()
        await anyio.sleep(_STOP_GRACE_SECONDS)
        exchange.cancel()

    async def _exchange(self, request: Request, entry: RequestEntry, connection: Connection) -> None:
        fault = self._service.faults.pick(self._name)
        if fault is not None:
            entry.fault = str(fault.__struct_config__.tag)
        if isinstance(fault, RotateKey):
            self._service.gateway.rotate_key(fault.key)
        if fault is not None and fault.when == "before" and await connection.apply(fault, None):
            return
        if self._name != "token":
            await self._lag()
        response = await self._handle(request, entry)
        if fault is not None and fault.when == "after" and await connection.apply(fault, response):
            return
        await connection.answer(response)

    async def _lag(self) -> None:
        options = self._service.options
        if options.latency_seconds or options.jitter_seconds:
            await anyio.sleep(options.latency_seconds + self._service.rng.uniform(0, options.jitter_seconds))


def _dated(app: ASGIApp, clock: Callable[[], float]) -> ASGIApp:
    """Add a `Date` header with the service's time to every response."""

    async def dated(scope: Scope, receive: Receive, send: Send) -> None:
        async def dating_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                date = formatdate(clock(), usegmt=True).encode()
                message["headers"] = [*message.get("headers", ()), (b"date", date)]
            await send(message)

        await app(scope, receive, dating_send)

    return dated


async def _bad_request(_: Request, error: Exception) -> Response:
    return refusal_response(Refusal(400, str(error)))
