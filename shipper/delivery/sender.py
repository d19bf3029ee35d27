"""A sender: takes batches, delivers each of them until the service has accepted it, and settles it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream
from msgspec import Struct
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from shipper.config import DeliverySettings
from shipper.delivery.endpoint import Endpoint, NoAnswerError
from shipper.delivery.gate import Gate
from shipper.delivery.verdicts import ANSWER_BYTES, Action, Verdict, full_jitter_s, judge
from shipper.errors import DeliveryGaveUpError
from shipper.records import Batch
from shipper.wire import INTAKE_PATH

log = structlog.get_logger("delivery")

_LONGEST_WAIT_WHILE_STOPPING_S = 1.0


class DeliveryCounts(Struct):
    """What the senders of a run did; shared by them."""

    batches: int = 0
    requests: int = 0
    retries: int = 0


class _NotAcceptedError(Exception):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


class Sender:
    """
    One of a pipeline's senders; it owns its endpoint.

    Args:
        settle: Called with each accepted batch, at once: no await stands between the answer and the record of it.
        give_up_after_s: With no acceptance by any sender for so long the run is given up; None = never.
        stopping: Set when the pipeline is to end: waits are cut short then.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        gate: Gate,
        settle: Callable[[Batch], None],
        counts: DeliveryCounts,
        settings: DeliverySettings,
        *,
        give_up_after_s: float | None,
        stopping: anyio.Event,
        rng: Random,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._endpoint = endpoint
        self._gate = gate
        self._settle = settle
        self._counts = counts
        self._settings = settings
        self._give_up_after_s = give_up_after_s
        self._stopping = stopping
        self._rng = rng
        self._now = now
        self._retrying = AsyncRetrying(
            retry=retry_if_exception_type(_NotAcceptedError),
            wait=self._wait_s,
            stop=self._is_hopeless,
            sleep=self._sleep,
            before_sleep=self._tell_retry,
            retry_error_callback=self._give_up,
        )

    async def run(self, batches_rx: MemoryObjectReceiveStream[Batch]) -> None:
        """
        Deliver batches until the stream ends.

        Raises:
            DeliveryGaveUpError: The service accepted nothing for too long.
        """
        with batches_rx:
            try:
                async for batch in batches_rx:
                    try:
                        await self._attempt(batch)
                    except _NotAcceptedError as first:
                        # Only now the retry loop is worth its price; to it, the first attempt was its own.
                        await self._retrying(self._attempt, batch, [first])
            finally:
                with anyio.move_on_after(1, shield=True):
                    await self._endpoint.aclose()

    async def _attempt(self, batch: Batch, failed: list[_NotAcceptedError] | None = None) -> None:
        """Send a batch once and settle it; fails at once with an error from `failed`, which was made before."""
        if failed:
            raise failed.pop()
        await self._gate.pass_through(self)
        self._counts.requests += 1
        try:
            answer = await self._endpoint.request("POST", INTAKE_PATH, batch.body, max_answer_bytes=ANSWER_BYTES)
        except NoAnswerError as error:
            action = Action.PAUSE if error.is_tls else Action.RETRY
            verdict = Verdict(action, "tls" if error.is_tls else error.cause, str(error))
        else:
            verdict = judge(answer)
        if verdict.action is Action.ACCEPT:
            self._settle(batch)
            self._gate.open()
            self._counts.batches += 1
            log.debug("batch_sent", batch=batch.number, events=batch.events, bytes=len(batch.body))
            return
        self._gate.note_failure()
        if verdict.action is Action.PAUSE:
            self._gate.shut(verdict.reason, verdict.message, self)
        raise _NotAcceptedError(verdict)

    def _wait_s(self, state: RetryCallState) -> float:
        asked = _verdict(state).retry_after_s
        wait = (
            full_jitter_s(
                state.attempt_number,
                initial_s=self._settings.retry_initial_seconds,
                max_s=self._settings.retry_max_seconds,
                rng=self._rng,
            )
            if asked is None
            else asked
        )
        return min(wait, self._patience_s())

    def _patience_s(self) -> float:
        """Seconds until the run is given up, should nothing be accepted; infinite in a run that never gives up."""
        if self._give_up_after_s is None or self._gate.failing_since is None:
            return float("inf")
        return max(0.0, self._gate.failing_since + self._give_up_after_s - self._now())

    def _is_hopeless(self, _state: RetryCallState) -> bool:
        return self._patience_s() == 0

    def _give_up(self, state: RetryCallState) -> None:
        raise DeliveryGaveUpError(
            f"nothing was accepted for {self._give_up_after_s:g} s (delivery.give_up_after_seconds): "
            f"{_verdict(state).message}. What was not delivered stays pending; run the same command again"
        )

    async def _sleep(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._stopping.wait()
            await anyio.sleep(min(seconds, _LONGEST_WAIT_WHILE_STOPPING_S) * self._rng.random())

    async def _tell_retry(self, state: RetryCallState) -> None:
        self._counts.retries += 1
        verdict = _verdict(state)
        assert state.next_action is not None
        log.info(
            "retry_scheduled",
            reason=verdict.reason,
            message=verdict.message,
            attempt=state.attempt_number,
            wait_seconds=round(state.next_action.sleep, 3),
        )


def _verdict(state: RetryCallState) -> Verdict:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, _NotAcceptedError)
    return error.verdict
