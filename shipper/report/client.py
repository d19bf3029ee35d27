"""
Fetches affiliate daily reports: with the endpoint, credentials, verdicts and gate by which events are delivered.

    async with ReportClient(settings.report, settings.delivery, wall_time=time.time, rng=Random()) as client:
        october = await client.fetch(1001, date(2026, 10, 1), date(2026, 10, 31))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import date
from functools import partial
from random import Random
from typing import Final, NoReturn, Self

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from anyio.to_thread import run_sync
from msgspec.structs import replace
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from shipper.config.settings import DeliverySettings, EndpointSettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import NoTokenError, credentials_of
from shipper.delivery.endpoint import Endpoint, NoAnswerError, make_ssl_context
from shipper.delivery.gate import FAIL_FAST_S, Gate, Passage
from shipper.delivery.quoting import quotation
from shipper.delivery.verdicts import Action, Verdict, judge, without_answer
from shipper.model import wire
from shipper.model.errors import NoServiceError, ReportError
from shipper.report.document import FetchedReport, read_report
from shipper.report.ranges import DateRange, check_order

log = structlog.get_logger("report")

CONCURRENCY: Final = 4
PATIENCE_S: Final = 120.0
_LOOK_S: Final = 1.0
_MAX_REPORT_BYTES: Final = 64 << 20
_WAITED_OUT: Final = {Action.RETRY, Action.THROTTLE}
_NOT_LET_IN: Final = {"token", "subscription_key", "credentials", "tls"}
_NO_REPORT: Final = "there is no such report: the service does not know the account, or report.base_url is wrong"


class _FailedError(Exception):
    """An attempt that may be repeated."""

    def __init__(self, verdict: Verdict, passage: Passage) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict
        self.passage = passage


class ReportClient:
    """
    Fetches reports, several at a time; to be used as an async context manager.

    Args:
        endpoint: The settings' section `report`.
        delivery: Timeouts and backoff.
        concurrency: Requests in flight at most.
        requests_per_second: At most; 0 = no limit. The limits of a gateway may be those of the shipping, too.
        give_up_after_s: For how long a report is asked for again where waiting may help. A longer wait is not begun.
        wall_time: Seconds since the epoch.
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
        give_up_after_s: float = PATIENCE_S,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        delivery = replace(delivery, concurrency=concurrency, rate_limit_events_per_second=requests_per_second)
        ssl_context = make_ssl_context(endpoint, "report")
        self._wall_time = wall_time
        self._patience_s = give_up_after_s
        self._failing_since: float | None = None  # whatever was asked for
        self._is_failing_fast = delivery.fail_fast
        self._gate = Gate(delivery, give_up_after_s=None, rng=rng)
        self._credentials = credentials_of(
            endpoint, delivery, section="report", ssl_context=ssl_context, wall_time=wall_time, rng=rng
        )
        self._endpoints = [
            Endpoint(endpoint, delivery, section="report", ssl_context=ssl_context) for _ in range(concurrency)
        ]
        self._idle_tx: MemoryObjectSendStream[Endpoint]
        self._idle_rx: MemoryObjectReceiveStream[Endpoint]
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<ReportClient {self._gate!r}>"

    async def __aenter__(self) -> Self:
        self._idle_tx, self._idle_rx = anyio.create_memory_object_stream[Endpoint](len(self._endpoints))
        for endpoint in self._endpoints:
            self._idle_tx.send_nowait(endpoint)
            self._stack.push_async_callback(endpoint.aclose)
        self._stack.enter_context(self._idle_tx)
        self._stack.enter_context(self._idle_rx)
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.move_on_after(1, shield=True):
            await self._stack.aclose()

    async def fetch(self, account_id: int, start: date, end: date) -> FetchedReport:
        """
        Fetch the report of one account and period.

        Args:
            account_id: The affiliate account.
            start: First day.
            end: Last day, included.
        Raises:
            NoServiceError: It could not be had, and no other could.
            ReportError: It could not be had, or is not the report that was asked for; names account and period.
        """
        path = report_path(account_id, start, end)
        named = f"account {account_id}, {DateRange(start, end)}"
        try:
            body = await self._body(path)
            return await run_sync(partial(read_report, body, account_id=account_id, fetched_at=self._wall_time()))
        except ReportError as error:
            raise type(error)(f"{named}: {error}") from None

    async def _body(self, path: str) -> bytes:
        """
        Ask until there is an answer or no patience left.

        Once nothing was had for as long as there is patience, whatever was asked for, each report is asked for once.

        Raises:
            ReportError: There is no report, or none that waiting would bring.
        """
        failing_since = math.inf

        def is_out_of_patience(state: RetryCallState) -> bool:
            nonlocal failing_since
            now = anyio.current_time()
            failing_since = min(failing_since, now)
            since = failing_since if self._failing_since is None else min(failing_since, self._failing_since)
            return now - since >= self._patience_for(_failure(state).verdict)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_FailedError),
            stop=is_out_of_patience,
            wait=self._wait_s,
            sleep=self._sleep,
            before_sleep=self._note_retry,
            retry_error_callback=self._give_up,
        )
        return await retrying(self._body_once, path)

    async def _body_once(self, path: str) -> bytes:
        """
        Ask once.

        Raises:
            _FailedError: It makes sense to ask again.
            ReportError: It does not.
        """
        verdict, body, passage = await self._attempt(path)
        if verdict.action is Action.ACCEPT:
            return body
        if verdict.action not in _WAITED_OUT:
            raise _refusal(verdict)
        if self._failing_since is None:
            self._failing_since = anyio.current_time()
        asked_s = verdict.retry_after_s or 0.0
        if asked_s > self._patience_s:
            self._gate.note_failure(verdict, passage)
            raise NoServiceError(f"{verdict.message}; it asks to wait {asked_s:g} s, which is too long")
        raise _FailedError(verdict, passage)

    def _wait_s(self, state: RetryCallState) -> float:
        return max(self._gate.backoff_s(state.attempt_number), _failure(state).verdict.retry_after_s or 0.0)

    def _note_retry(self, state: RetryCallState) -> None:
        failure = _failure(state)
        self._gate.note_failure(failure.verdict, failure.passage)
        log.info("retry_scheduled", reason=failure.verdict.reason, message=failure.verdict.message)

    async def _sleep(self, seconds: float) -> None:
        if not self._gate.reason:  # while it is shut, the waiting is done there
            await self._gate.sleep(seconds)

    def _give_up(self, state: RetryCallState) -> NoReturn:
        failure = _failure(state)
        raise self._given_up(failure.verdict, failure.passage, state.attempt_number)

    def _patience_for(self, verdict: Verdict) -> float:
        """Return how long a failure is waited out; a fault of the set-up not for long before there was an answer."""
        is_hopeless = verdict.is_set_up_fault and self._is_failing_fast
        return min(self._patience_s, FAIL_FAST_S) if is_hopeless else self._patience_s

    async def _attempt(self, path: str) -> tuple[Verdict, bytes, Passage]:
        """Ask once; a failure that is waited out is for the caller to note."""
        passage = await self._entered()
        try:
            verdict, body = await self._sent(path)
        finally:
            self._gate.leave()
        if verdict.action not in _WAITED_OUT:
            self._failing_since = None
            self._is_failing_fast = False
            note = self._gate.note_accepted if verdict.action is Action.ACCEPT else self._gate.note_answered
            note(passage)
        return verdict, body, passage

    async def _entered(self) -> Passage:
        """
        Wait until a request may be sent.

        Raises:
            NoServiceError: The answer to another request asks for a wait that is too long.
        """
        while True:
            with anyio.move_on_after(max(self._patience_s, _LOOK_S)):
                return await self._gate.enter(1)
            wait_s = self._gate.wait_s
            if wait_s > self._patience_s:
                raise NoServiceError(f"{self._gate.message}; it asks to wait {wait_s:.0f} s more, which is too long")

    def _given_up(self, verdict: Verdict, passage: Passage, attempts: int) -> ReportError:
        """Return what a report that failed for too long means for the others."""
        patience_s = self._patience_for(verdict)
        times = "once" if attempts == 1 else f"{attempts} times within {patience_s:g} s"
        message = f"{verdict.message}; it was asked for {times}"
        assert self._failing_since is not None
        has_nothing = anyio.current_time() - self._failing_since >= patience_s
        if has_nothing and (verdict.action is Action.THROTTLE or not verdict.status):
            self._gate.note_failure(verdict, passage)
            return NoServiceError(message)
        self._gate.note_answered(passage)  # the service is there: another report may fare better
        return ReportError(message)

    async def _sent(self, path: str) -> tuple[Verdict, bytes]:
        """Ask once; and once more if that may be because of the token, the key or an old connection."""
        endpoint = await self._idle_rx.receive()
        try:
            verdict, body, has_remedy = await self._sent_over(endpoint, path)
            if has_remedy:
                verdict, body, _ = await self._sent_over(endpoint, path)
            return verdict, body
        finally:
            self._idle_tx.send_nowait(endpoint)

    async def _sent_over(self, endpoint: Endpoint, path: str) -> tuple[Verdict, bytes, bool]:
        try:
            authorization = await self._credentials.authorize()
            answer = await endpoint.request(
                "GET", path, authorization=authorization, max_answer_bytes=_MAX_REPORT_BYTES + 1
            )
        except NoTokenError as error:
            action = Action.RETRY if error.reason == "token_endpoint" else Action.PAUSE
            is_set_up_fault = error.is_set_up_fault
            verdict = Verdict(
                action, error.reason, error.message, 0, error.retry_after_s, is_set_up_fault=is_set_up_fault
            )
            return verdict, b"", False
        except NoAnswerError as error:
            return without_answer(error.cause, str(error), is_tls=error.is_tls), b"", error.is_stale
        verdict = _verdict(answer, self._wall_time(), partial(quotation, authorization=authorization))
        return verdict, answer.body, self._credentials.learn(verdict.action, authorization)


def report_path(account_id: int, start: date, end: date) -> str:
    """
    Make the path of a report, to be appended to the base address.

    Raises:
        ReportError: `start` is after `end`.
    """
    check_order(start, end)
    return wire.REPORT_PATH.format(account_id=account_id, start=start.isoformat(), end=end.isoformat())


def _failure(state: RetryCallState) -> _FailedError:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, _FailedError)
    return error


def _refusal(verdict: Verdict) -> ReportError:
    """Return why there is no report, in terms of reports: the table of verdicts is about records."""
    if verdict.reason in _NOT_LET_IN:
        return NoServiceError(verdict.message)
    if verdict.status == 404:
        return ReportError(f"{_NO_REPORT} (HTTP 404)")
    if verdict.action in {Action.BISECT, Action.HALVE}:
        return ReportError(
            "the service refuses this account or period; it may take no range that crosses the end of a month, "
            f"then ask for each month by itself: --split month (HTTP {verdict.status})"
        )
    return ReportError(verdict.message)


def _verdict(answer: Answer, wall_time: float, quote: Callable[[str], str]) -> Verdict:
    """Return the verdict on an answer; one that claims success counts as a report until it is read."""
    if len(answer.body) > _MAX_REPORT_BYTES:
        return Verdict(Action.PAUSE, "too_large", f"the report is larger than {_MAX_REPORT_BYTES >> 20} MiB")
    if answer.status == 200 and answer.content_type != "text/html":
        return Verdict(Action.ACCEPT, status=200)
    verdict = judge(answer, events=None, section="report", wall_time=wall_time, quote=quote)
    if verdict.action is Action.ACCEPT:
        return Verdict(Action.PAUSE, "unexpected_answer", f"the service answered {answer.status} instead of a report")
    return verdict
