"""The senders of a pipeline and their shared state: gate, credentials, counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from random import Random

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from shipper.config.settings import Settings, require_endpoint
from shipper.delivery.credentials import ClockSkew, Credentials, NoTokenError
from shipper.delivery.endpoint import ConnectionSettings, Endpoint, NoAnswerError
from shipper.delivery.gate import TICK_S, Gate
from shipper.delivery.sender import DeliveryCounts, Sender, SharedState
from shipper.delivery.verdicts import ANSWER_BYTES, Verdict, without_answer
from shipper.model.records import Batch, BatchResult
from shipper.model.wire import EMPTY_BODY, INTAKE_PATH
from shipper.status.live import Pause
from shipper.status.pauses import ReloadAdvice, advice_on


class SenderPool:
    """
    Delivers batches with several senders.

    Args:
        give_up_after_s: Give up after this time without an acceptance; None = never.
        reload_advice: How to make the process use changed settings.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        give_up_after_s: float | None,
        reload_advice: ReloadAdvice,
        wall_time: Callable[[], float],
        rng: Random,
    ) -> None:
        self._intake = require_endpoint(settings, "intake")
        self._reload_advice = reload_advice
        self._wall_time = wall_time
        self._rng = rng
        delivery = settings.delivery
        self.gate = Gate(delivery, give_up_after_s=give_up_after_s, rng=rng)
        self.skew = ClockSkew()
        self.counts = DeliveryCounts()
        connection = ConnectionSettings(self._intake, delivery, "intake")
        self._shared = SharedState(
            gate=self.gate,
            credentials=Credentials(connection, wall_time=wall_time, rng=rng),
            settings=delivery,
            counts=self.counts,
            skew=self.skew,
            rng=rng,
            wall_time=wall_time,
        )
        self._new_endpoint = partial(Endpoint, connection)
        self._senders = [Sender(self._new_endpoint(), self._shared, index) for index in range(delivery.senders)]
        self._refresh_scope = anyio.CancelScope()

    def __repr__(self) -> str:
        return f"<SenderPool {self.gate!r}>"

    def __len__(self) -> int:
        return len(self._senders)

    async def run(
        self, batches_rx: MemoryObjectReceiveStream[Batch], settled_tx: MemoryObjectSendStream[BatchResult]
    ) -> None:
        async with anyio.create_task_group() as side:
            side.start_soon(self._refresh_credentials)
            side.start_soon(self._tick)
            async with anyio.create_task_group() as sending:
                with batches_rx, settled_tx:  # the senders use clones
                    for sender in self._senders:
                        sending.start_soon(sender.run, batches_rx.clone(), settled_tx.clone())
            side.cancel_scope.cancel()

    async def _tick(self) -> None:
        while True:
            self.gate.tick()
            await anyio.sleep(TICK_S)

    async def _refresh_credentials(self) -> None:
        """Refresh the tokens of the current credentials, even after the credentials have been replaced."""
        while True:
            with anyio.CancelScope() as self._refresh_scope:
                await self._shared.credentials.run()

    async def reconfigure(self, settings: Settings) -> None:
        """Apply reloaded settings; on `ConfigError`, or `NoTokenError` from the new credentials, none of them."""
        intake = require_endpoint(settings, "intake")
        connection = ConnectionSettings(intake, settings.delivery, "intake")
        credentials = Credentials(connection, wall_time=self._wall_time, rng=self._rng)
        await credentials.authorize()
        self._intake = intake
        self._shared.credentials = credentials
        self._refresh_scope.cancel()
        self.gate.reconfigure(settings.delivery)

    async def ask_time(self) -> Verdict | None:
        """Update `skew` from the answer to an empty batch; return why that failed, or None."""
        endpoint = self._new_endpoint()
        try:
            answer = await endpoint.request(
                "POST",
                INTAKE_PATH,
                EMPTY_BODY,
                authorization=await self._shared.credentials.authorize(),
                max_answer_bytes=ANSWER_BYTES,
            )
        except (NoTokenError, NoAnswerError) as error:
            return without_answer(error)
        finally:
            with anyio.move_on_after(1, shield=True):
                await endpoint.aclose()
        self.skew.note(answer.date, self._wall_time())
        return None

    @property
    def is_stuck(self) -> bool:
        """Whether delivery is paused and no request is in flight."""
        return bool(self.gate.reason) and not self.gate.in_flight

    @property
    def token_expires_at(self) -> float | None:
        return self._shared.credentials.token_expires_at

    @property
    def certificate_expires_at(self) -> float | None:
        """Earliest expiry of the service's certificates, seconds since the epoch."""
        expiries = [sender.endpoint.certificate_expires_at for sender in self._senders]
        return min((at for at in expiries if at is not None), default=None)

    def advice(self, reason: str) -> str:
        """Return what to do about a pause; empty if there is no advice."""
        return advice_on(reason, self._intake, self._reload_advice)

    def pauses(self, now: float, wall_now: float) -> list[Pause]:
        """Return why delivery is paused; empty if it is not."""
        gate = self.gate
        if not gate.reason:
            return []
        since = round(wall_now - (now - gate.shut_at), 3)
        gives_up_at = None if gate.gives_up_at == math.inf else round(wall_now + (gate.gives_up_at - now), 3)
        return [Pause(gate.reason, gate.problem, self.advice(gate.reason), since, wall_now + gate.wait_s, gives_up_at)]
