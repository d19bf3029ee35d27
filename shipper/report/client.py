"""
A client for the affiliate daily report, built on the endpoint, credentials, verdicts and gate of event delivery.

    async with ReportClient(settings.report, settings.delivery, wall_time=time.time, rng=Random()) as client:
        october = await client.fetch(1001, date(2026, 10, 1), date(2026, 10, 31))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date
from functools import partial
from random import Random
from typing import Final, Self

import anyio
import structlog
from anyio.to_thread import run_sync
from msgspec.structs import replace

from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import Credentials, NoTokenError
from shipper.delivery.endpoint import ConnectionSettings, Endpoint, NoAnswerError
from shipper.delivery.gate import FAIL_FAST_S, Admission, Gate
from shipper.delivery.quoting import quotation
from shipper.delivery.verdicts import Action, Verdict, judge, without_answer
from shipper.model import wire
from shipper.model.errors import NoServiceError, ReportError
from shipper.report.document import FetchedReport, read_report
from shipper.report.ranges import DateRange, check_order

log = structlog.get_logger("report")

CONCURRENCY: Final = 4
GIVE_UP_AFTER_S: Final = 120.0
_GATE_CHECK_S: Final = 1.0
_MAX_REPORT_BYTES: Final = 64 << 20
_RETRIED: Final = {Action.RETRY, Action.THROTTLE}
_ACCESS_FAULTS: Final = {"token", "subscription_key", "credentials", "tls"}


class ReportClient:
    """
    Fetches reports, several at a time; use it as an async context manager.

    Args:
        concurrency: Maximum requests in flight.
        requests_per_second: Maximum rate; 0 = no limit. A gateway may count reports and deliveries together.
        give_up_after_s: How long to retry a report. If the service asks to wait longer, give up immediately.
    Raises:
        ConfigError: A secret, certificate or key cannot be used.
    """

    def __init__(
        self,
        endpoint: EndpointSettings,
        delivery: DeliverySettings,
        *,
        concurrency: int = CONCURRENCY,
        requests_per_second: float = 0.0,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        delivery = replace(delivery, concurrency=concurrency, rate_limit_events_per_second=requests_per_second)
        connection = ConnectionSettings(endpoint, delivery, "report")
        self._wall_time = wall_time
        self._give_up_after_s = give_up_after_s
        self._failing_since: float | None = None  # of all reports together
        self._fails_fast = delivery.fail_fast
        self._gate = Gate(delivery, give_up_after_s=None, rng=rng)
        self._credentials = Credentials(connection, wall_time=wall_time, rng=rng)
        self._endpoints = [Endpoint(connection) for _ in range(concurrency)]
        self._idle = list(self._endpoints)  # never empty, as the gate limits requests to the number of endpoints

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(1, shield=True):
            for endpoint in self._endpoints:
                await endpoint.aclose()

    async def fetch(self, account_id: int, start: date, end: date) -> FetchedReport:
        """
        Fetch the report of an account for the days from `start` to `end`, both included.

        Raises:
            NoServiceError: The report cannot be fetched, and neither can any other.
            ReportError: The report cannot be fetched, or the answer is not that report; names account and days.
        """
        path = report_path(account_id, start, end)
        try:
            body = await self._fetch_body(path, is_day=start == end)
            return await run_sync(partial(read_report, body, account_id=account_id, fetched_at=self._wall_time()))
        except ReportError as error:
            raise type(error)(f"account {account_id}, {DateRange(start, end)}: {error}") from None

    async def _fetch_body(self, path: str, *, is_day: bool) -> bytes:
        """Retry a report until it arrives or time is over; once no report at all arrives, request it only once."""
        failing_since = math.inf
        attempt = 0
        while True:
            attempt += 1
            verdict, body, admission = await self._attempt(path)
            if verdict.action is Action.ACCEPT:
                return body
            if verdict.action not in _RETRIED:
                raise _refusal(verdict, is_day=is_day)
            now = anyio.current_time()
            failing_since = min(failing_since, now)
            if self._failing_since is None:
                self._failing_since = now
            requested_s = verdict.retry_after_s or 0.0
            if requested_s > self._give_up_after_s:
                self._gate.note_failure(verdict, admission)
                raise NoServiceError(f"{verdict.message}; it asks to wait {requested_s:g} s, which is too long")
            if now - min(failing_since, self._failing_since) >= self._limit_s(verdict):
                raise self._give_up(verdict, admission, attempt)
            self._gate.note_failure(verdict, admission)
            log.info("retry_scheduled", reason=verdict.reason, message=verdict.message)
            if not self._gate.reason:  # otherwise, the closed gate makes the next attempt wait
                await self._gate.sleep(max(self._gate.backoff_s(attempt), requested_s))

    def _limit_s(self, verdict: Verdict) -> float:
        """Return how long to retry; short for a setup fault before the first answer."""
        is_hopeless = verdict.is_setup_problem and self._fails_fast
        return min(self._give_up_after_s, FAIL_FAST_S) if is_hopeless else self._give_up_after_s

    def _give_up(self, verdict: Verdict, admission: Admission, attempts: int) -> ReportError:
        """Return the error of a report that failed for too long, and report the result to the gate."""
        limit_s = self._limit_s(verdict)
        times = "once" if attempts == 1 else f"{attempts} times within {limit_s:g} s"
        message = f"{verdict.message}; it was requested {times}"
        assert self._failing_since is not None
        all_fail = anyio.current_time() - self._failing_since >= limit_s
        if all_fail and (verdict.action is Action.THROTTLE or not verdict.status):
            self._gate.note_failure(verdict, admission)
            return NoServiceError(message)
        self._gate.note_answered(admission)  # the service is reachable, so other reports may be available
        return ReportError(message)

    async def _attempt(self, path: str) -> tuple[Verdict, bytes, Admission]:
        """Request a report once the gate admits it; the caller reports failures that are retried to the gate."""
        admission = await self._enter_gate()
        endpoint = self._idle.pop()
        try:
            verdict, body, retry_now = await self._request(endpoint, path)
            if retry_now:  # with another token, key or connection
                verdict, body, _ = await self._request(endpoint, path)
        finally:
            self._idle.append(endpoint)
            self._gate.leave()
        if verdict.action not in _RETRIED:
            self._failing_since = None
            self._fails_fast = False
            note = self._gate.note_accepted if verdict.action is Action.ACCEPT else self._gate.note_answered
            note(admission)
        return verdict, body, admission

    async def _enter_gate(self) -> Admission:
        while True:
            with anyio.move_on_after(max(self._give_up_after_s, _GATE_CHECK_S)):
                return await self._gate.enter(1)
            wait_s = self._gate.wait_s
            if wait_s > self._give_up_after_s:
                raise NoServiceError(f"{self._gate.problem}; it asks to wait another {wait_s:.0f} s, which is too long")

    async def _request(self, endpoint: Endpoint, path: str) -> tuple[Verdict, bytes, bool]:
        """Send a request; return the verdict, the body, and whether an immediate second request may succeed."""
        try:
            authorization = await self._credentials.authorize()
            answer = await endpoint.request(
                "GET", path, authorization=authorization, max_answer_bytes=_MAX_REPORT_BYTES + 1
            )
        except NoTokenError as error:
            action = Action.RETRY if error.reason == "token_endpoint" else Action.PAUSE
            return replace(without_answer(error), action=action), b"", False
        except NoAnswerError as error:
            return without_answer(error), b"", error.is_stale
        verdict = _verdict(answer, self._wall_time(), partial(quotation, authorization=authorization))
        return verdict, answer.body, self._credentials.note_answer(verdict.action, authorization)


def report_path(account_id: int, start: date, end: date) -> str:
    """Return the path of a report below the base URL; raise ReportError if `start` is after `end`."""
    check_order(start, end)
    return wire.REPORT_PATH.format(account_id=account_id, start=start.isoformat(), end=end.isoformat())


def _refusal(verdict: Verdict, *, is_day: bool) -> ReportError:
    """Return the error of a verdict, worded for reports: the table of verdicts is about records."""
    if verdict.reason in _ACCESS_FAULTS:
        return NoServiceError(verdict.message)
    if verdict.status == 404:
        advice = "; if days without activity have none, request whole months: --split month" if is_day else ""
        return ReportError(
            "the report does not exist: the account is unknown to the service or has no report for these days, or "
            f"report.base_url is wrong (HTTP 404){advice}"
        )
    if verdict.action in {Action.BISECT, Action.HALVE}:
        return ReportError(
            "the service refuses this account or period; it may not support periods across months; if so, request "
            f"each month separately: --split month (HTTP {verdict.status})"
        )
    return ReportError(verdict.message)


def _verdict(answer: Answer, wall_time: float, quote: Callable[[str], str]) -> Verdict:
    """Return the verdict on an answer; status 200 counts as a report until it is parsed."""
    if len(answer.body) > _MAX_REPORT_BYTES:
        return Verdict(Action.PAUSE, "too_large", f"the report is larger than {_MAX_REPORT_BYTES >> 20} MiB")
    if answer.status == 200 and answer.compression:
        message = f"the answer is compressed ({answer.compression}), although the request does not ask for that"
        return Verdict(Action.PAUSE, "unreadable_answer", message, "report.base_url and proxies", status=200)
    if answer.status == 200 and answer.content_type != "text/html":
        return Verdict(Action.ACCEPT, status=200)
    verdict = judge(answer, events=None, section="report", wall_time=wall_time, quote=quote)
    if verdict.action is Action.ACCEPT:
        return Verdict(Action.PAUSE, "unexpected_answer", f"the service answered {answer.status} instead of a report")
    return verdict
