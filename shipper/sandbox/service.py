"""The simulated service: both operations behind the gateway, and their state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from datetime import date, timedelta
from itertools import count
from operator import itemgetter
from random import Random
from typing import Final, Literal
from urllib.parse import parse_qsl

import anyio
from msgspec import Struct, to_builtins
from starlette.requests import Request
from starlette.responses import Response

from shipper.model import wire
from shipper.sandbox.clock import ServiceClock
from shipper.sandbox.faults import FaultPlan, FaultScript, Operation
from shipper.sandbox.gateway import Gateway, Refusal, bounded_body, json_response, refusal_response
from shipper.sandbox.intake import REPEATED, Intake, read_batch
from shipper.sandbox.options import SandboxOptions
from shipper.sandbox.report import build_report
from shipper.sandbox.store import EventStore
from shipper.sandbox.tokens import TokenIssuer

_REQUESTS_KEPT: Final = 10_000
_EVENT_MARK: Final = b'"EventId"'
_FORM_BYTES_MAX: Final = 65_536


class RequestEntry(Struct, kw_only=True):
    """A request without its headers and body; the operation of an unknown path is empty."""

    number: int
    at: float  # the service's time, seconds since the epoch
    operation: Operation | Literal[""]
    method: str
    path: str
    status: int = 0  # 0 = no response, or not yet
    fault: str = ""  # the effect that was applied
    body_bytes: int = 0
    events: int = 0  # in the request; 0 = not parsed
    accepted: int = 0
    duplicates: int = 0
    rejected: int = 0
    seconds: float = 0.0


class Service:
    """
    The two operations. They run in one event loop, so the counters need no lock.

    Args:
        store: Opened and closed by the caller.
        observe: Called after each request except those to the controls.
    """

    def __init__(
        self,
        options: SandboxOptions,
        store: EventStore,
        script: FaultScript,
        machine_clock: Callable[[], float],
        observe: Callable[[RequestEntry], None] | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.rng = Random(options.seed)
        self.clock = ServiceClock(machine_clock, options.clock_offset_seconds)
        self.tokens = TokenIssuer(options, clock=self.clock, rng=self.rng)
        self.gateway = Gateway(options, tokens=self.tokens, clock=self.clock)
        self.faults = FaultPlan(script)
        self.observe = observe or (lambda entry: None)
        self.stopping = anyio.Event()  # set when the server is asked to stop
        self._source = wire.ReportSource(options.account_id, "Sandbox Affiliate", "Sandbox Operator")
        self._forget()

    def _forget(self) -> None:
        self.requests: deque[RequestEntry] = deque(maxlen=_REQUESTS_KEPT)
        self._numbers = count(1)
        self.intake_requests = 0
        self.rejected = 0
        self._swallowed = 0
        self.restated: Counter[date] = Counter()

    def note(self, operation: Operation | Literal[""], request: Request) -> RequestEntry:
        """Return the entry of a request; add it to the log if its path is known."""
        number = next(self._numbers) if operation else 0
        path: str = request.scope["path"]  # `request.url` requires a query in UTF-8
        entry = RequestEntry(number=number, at=self.clock(), operation=operation, method=request.method, path=path)
        if operation:
            self.requests.append(entry)
        self.intake_requests += operation == "intake"
        return entry

    def reset(self) -> None:
        """Delete everything received and reset all counts; keep the fault script, the keys and the clock."""
        self.store.reset()
        self.faults.restart()
        for window in (self.gateway.rate, self.gateway.quota, self.tokens.calls):
            window.reset()
        self._forget()

    def counts(self) -> dict[str, int]:
        """Return the intake's counts; without `blackhole`, `events_received` is the sum of the three after it."""
        stored, duplicates = self.store.stored, self.store.duplicates
        return {
            "requests": self.intake_requests,  # including refused ones
            "events_received": stored + duplicates + self.rejected + self._swallowed,
            "events_stored": stored,
            "duplicates": duplicates,
            "rejected": self.rejected,
        }

    def restate(self, start: date, end: date) -> None:
        self.restated.update(start + timedelta(days=day) for day in range((end - start).days + 1))

    async def intake(self, request: Request, entry: RequestEntry) -> Response:
        body = self.gateway.refusal(request.headers) or await self.gateway.read_body(request)
        if isinstance(body, Refusal):
            return refusal_response(body)
        entry.body_bytes = len(body)
        if self.options.blackhole:
            return self._swallow(body, entry)
        batch = read_batch(
            body,
            is_strict=self.options.profile == "strict",
            now_seconds=self.clock(),
            is_known=self.store.holds if self.options.repeats == "reject" else None,
        )
        if isinstance(batch, Refusal):
            return refusal_response(batch)
        return self._take(batch, entry)

    def _swallow(self, body: bytes, entry: RequestEntry) -> Response:
        entry.events = entry.accepted = body.count(_EVENT_MARK)
        self._swallowed += entry.events
        return json_response({"accepted": entry.events, "duplicates": 0, "rejected": []}, 202)

    def _take(self, batch: Intake, entry: RequestEntry) -> Response:
        entry.events = len(batch.accepted) + len(batch.rejected)
        entry.rejected = len(batch.rejected)
        self.rejected += len(batch.rejected)
        shape = self.options.answer
        if batch.rejected and (self.options.rejection == "whole" or shape in {"empty", "no-content"}):
            # The client has to find the invalid events itself.
            return refusal_response(Refusal(400, "The batch was refused: it contains an invalid event."))
        new = self.store.add(batch.accepted.values())
        entry.accepted = len(batch.accepted) if self.options.repeats == "accept" else new
        entry.duplicates = len(batch.accepted) - entry.accepted
        if shape == "per-event":
            return json_response({"results": _results(batch)}, 207)
        if shape in {"empty", "no-content"}:
            return Response(status_code=200 if shape == "empty" else 204)
        status = 201 if shape == "created" else 202
        counts = {"accepted": entry.accepted, "duplicates": entry.duplicates}
        return json_response({**counts, "rejected": batch.rejected}, status)

    async def token(self, request: Request, _: RequestEntry) -> Response:
        body = await bounded_body(request, _FORM_BYTES_MAX)
        if body is None:
            return refusal_response(Refusal(413, f"The form is too large. The limit is {_FORM_BYTES_MAX} bytes."))
        # A body that is not a form has no fields, so the response names the first missing field.
        answer = self.tokens.grant(dict(parse_qsl(body.decode("utf-8", "replace"))))
        response = json_response(answer.document, answer.status)
        response.headers.update(answer.headers)
        return response

    async def report(self, request: Request, _: RequestEntry) -> Response:
        period = self.gateway.refusal(request.headers) or self._period(request)
        if isinstance(period, Refusal):
            return refusal_response(period)
        start, end = period
        report = build_report(
            self.store.registrations(start.isoformat(), end.isoformat()),
            source=self._source,
            start=start,
            end=end,
            now_seconds=self.clock(),
            figures=self.options.figures,
            seed=self.options.seed,
            restated=self.restated,
        )
        return Response(wire.encode_report(report), media_type="application/json")

    def _period(self, request: Request) -> tuple[date, date] | Refusal:
        asked = request.path_params
        if asked["account_id"] != str(self.options.account_id):
            return Refusal(404, "Affiliate account not found")
        start, end = day(asked["start"]), day(asked["end"])
        if start is None or end is None:
            return Refusal(400, "start_date and end_date must be dates of the form YYYY-MM-DD.")
        if start > end:
            return Refusal(400, "start_date must not be after end_date.")
        if self.options.profile == "strict" and (start.year, start.month) != (end.year, end.month):
            return Refusal(400, "start_date and end_date must lie in the same calendar month.")
        return start, end


def day(text: str) -> date | None:
    """Parse `YYYY-MM-DD`; return None for anything else, including other ISO 8601 forms."""
    try:
        parsed = date.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.isoformat() == text else None


def _results(batch: Intake) -> list[dict[str, object]]:
    results: list[dict[str, object]] = [
        {"index": index, "EventId": event.EventId, "status": 202} for index, (event, _) in batch.accepted.items()
    ]
    results += [
        {**to_builtins(event), "status": 409 if event.message == REPEATED.message else 400} for event in batch.rejected
    ]
    return sorted(results, key=itemgetter("index"))
