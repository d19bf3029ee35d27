"""The stages between the source and the settlement: the packer, the senders, and what they share."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec.structs import replace

from shipper.config.settings import Settings, require_endpoint
from shipper.delivery.credentials import ClockSkew, Credentials, NoTokenError, credentials_of
from shipper.delivery.endpoint import Endpoint, NoAnswerError, make_ssl_context
from shipper.delivery.gate import Gate
from shipper.delivery.sender import DeliveryCounts, Sender, Shared
from shipper.delivery.verdicts import ANSWER_BYTES, Action, Verdict, without_answer
from shipper.model.errors import StateInUseError
from shipper.model.records import Batch, Chunk, Settled
from shipper.model.wire import BODY_HEAD, BODY_TAIL, INTAKE_PATH
from shipper.pipeline.hold import Hold
from shipper.pipeline.packer import Packer
from shipper.pipeline.settlement import Settlement
from shipper.sources.replay import Replay
from shipper.state.stuck import Place
from shipper.status.live import Live, Pause, PauseBefore
from shipper.status.pauses import Renewal, advice_on

CHUNK_BUFFER: Final = 2
_BATCH_BUFFER: Final = 8


class Stages:
    """
    Args:
        give_up_after_s: With no acceptance for so long the run is given up; None = never.
        renewal: How the process takes over changed settings, for advice.
        wall_time: Seconds since the epoch.
        suspects: As for `Packer`.
    """

    def __init__(
        self,
        settings: Settings,
        settlement: Settlement,
        *,
        give_up_after_s: float | None,
        renewal: Renewal,
        wall_time: Callable[[], float],
        rng: Random,
        suspects: Mapping[str, Sequence[Place]],
    ) -> None:
        self._settings = settings
        self._intake = require_endpoint(settings, "intake")
        self._renewal = renewal
        self._wall_time = wall_time
        self._rng = rng
        self._gate = Gate(settings.delivery, give_up_after_s=give_up_after_s, rng=rng)
        self._skew = ClockSkew()
        self._settlement = settlement
        self._hold = self._new_hold(give_up_after_s)
        self._packer = Packer(settings, settlement, self._hold, wall_time=wall_time, suspects=suspects)
        self._renewing = anyio.CancelScope()
        self._latency: tuple[float | None, float | None] = (None, None)
        self._seen: list[Pause] = []
        self._last_pause: PauseBefore | None = None
        self._senders: list[Sender] = []
        self._batches_tx: MemoryObjectSendStream[Batch] | None = None
        self._shared: Shared
        self._new_endpoint: Callable[[], Endpoint]

    def __repr__(self) -> str:
        return f"<Stages {self._packer!r} {self._gate!r}>"

    def _new_hold(self, give_up_after_s: float | None) -> Hold:
        return Hold(
            self._settings,
            self._settlement,
            skew=self._skew,
            ask_time=self._ask_time,
            give_up_after_s=give_up_after_s,
        )

    @property
    def waits_for_input_since(self) -> float | None:
        """Since when nothing has come, on the event loop's clock; None while something is packed."""
        return self._packer.waits_for_input_since

    def open(self) -> None:
        """
        Load certificates, and the EventIds that earlier runs got accepted.

        Raises:
            ConfigError: A secret, certificate or key cannot be used.
        """
        endpoint, delivery = self._intake, self._settings.delivery
        ssl_context = make_ssl_context(endpoint, "intake")
        self._shared = Shared(
            gate=self._gate,
            credentials=self._credentials(self._settings, ssl_context),
            settings=delivery,
            counts=DeliveryCounts(),
            skew=self._skew,
            rng=self._rng,
            wall_time=self._wall_time,
            is_compressing=delivery.compression == "gzip",
        )
        self._new_endpoint = partial(Endpoint, endpoint, delivery, section="intake", ssl_context=ssl_context)
        self._senders = [Sender(self._new_endpoint(), self._shared, index) for index in range(delivery.senders)]
        self._settlement.remember_accepted()

    async def run(self, chunks_rx: MemoryObjectReceiveStream[Chunk]) -> None:
        """
        Settle chunks until there are no more.

        Raises:
            DeliveryGaveUpError: The service accepted nothing for too long.
        """
        batches_tx, batches_rx = anyio.create_memory_object_stream[Batch](min(len(self._senders), _BATCH_BUFFER))
        self._batches_tx = batches_tx
        settled_tx, settled_rx = anyio.create_memory_object_stream[Settled](2 * len(self._senders))
        with settled_rx:
            try:
                async with anyio.create_task_group() as side:
                    side.start_soon(self._keep_credentials)
                    async with anyio.create_task_group() as flow:
                        flow.start_soon(self._packer.run, chunks_rx, batches_tx)
                        with batches_rx, settled_tx:  # the clones live in the senders
                            for sender in self._senders:
                                flow.start_soon(sender.run, batches_rx.clone(), settled_tx.clone())
                        flow.start_soon(self._settlement.run, settled_rx.clone())
                    side.cancel_scope.cancel()
            finally:
                self._settlement.settle_all(settled_rx)  # after a cancellation, answers may still be queued

    async def replay(self, source: Replay, settings: Settings, reading: anyio.CancelScope) -> None:
        """
        Pack dead letters beside the input, for the same senders; returns when all are on their way.

        They have a packer of their own: they may have other rules, wait for nothing that holds the input back, and do
        not share a batch with records of it, which are deduplicated where they are not.

        Args:
            reading: Entered while letters are read.
        Raises:
            StateInUseError: There are no senders yet, or no more.
        """
        try:
            batches_tx = self._batches_tx.clone() if self._batches_tx else None
        except anyio.ClosedResourceError:
            batches_tx = None
        if batches_tx is None:
            raise StateInUseError("the running shipper is starting or ending; try again")
        packer = Packer(settings, self._settlement, self._new_hold(None), wall_time=self._wall_time, suspects=None)
        chunks_tx, chunks_rx = anyio.create_memory_object_stream[Chunk](CHUNK_BUFFER)
        with batches_tx, chunks_rx:
            async with anyio.create_task_group() as flow:
                flow.start_soon(packer.run, chunks_rx, batches_tx)
                with chunks_tx, reading:
                    await source.run(chunks_tx)

    @property
    def is_stuck(self) -> bool:
        """Whether delivery pauses, and no request is in flight whose answer could be waited for."""
        return bool(self._gate.reason) and not self._gate.in_flight

    def look_again(self) -> None:
        """Check again whether the input must be held back."""
        self._hold.look_again()

    def hurry(self) -> None:
        """Skip backoffs."""
        self._gate.hurry()

    def retry(self) -> None:
        """Try again now what is waited with, or held back."""
        self._gate.retry()
        self._hold.look_again()

    @property
    def is_failing(self) -> bool:
        """Whether nothing was accepted since an attempt failed, which is to be repeated."""
        return self._gate.failing_since is not None

    @property
    def is_probing(self) -> bool:
        """Whether delivery pauses, or input is held back, and what comes of the attempt at hand is not known yet."""
        return self._gate.is_probing or self._hold.is_looking

    async def reconfigure(self, settings: Settings) -> None:
        """
        Apply settings that were read again: all of them, or none.

        Raises:
            ConfigError: A secret, certificate or key cannot be used.
            NoTokenError: There is no token to be had.
        """
        endpoint = require_endpoint(settings, "intake")
        credentials = self._credentials(settings, make_ssl_context(endpoint, "intake"))
        await credentials.authorize()
        self._intake = endpoint
        self._shared.credentials = credentials
        self._renewing.cancel()
        self._gate.reconfigure(settings.delivery)
        self._packer.reconfigure(settings)
        self._hold.reconfigure(settings)

    def seen(self, live: Live) -> Live:
        """Add what there is to see of these stages to a snapshot; their pauses come first."""
        counts = self._shared.counts
        if latest := counts.latencies.take_latest():
            self._latency = _quantile(latest, 0.5), _quantile(latest, 0.95)
        expiries = [at for each in self._senders if (at := each.certificate_expires_at) is not None]
        pauses = [*self._pauses(live.at), *self._hold.pauses(live.at), *live.pauses]
        now = {each.reason for each in pauses}
        if over := [each for each in self._seen if each.reason not in now]:
            first = min(over, key=lambda each: each.since)
            self._last_pause = PauseBefore(first.reason, first.since, live.at)
        self._seen = pauses
        return replace(
            live,
            batches=counts.batches,
            requests=counts.by_status.copy(),
            retries=counts.by_cause.copy(),
            latency_p50_seconds=self._latency[0],
            latency_p95_seconds=self._latency[1],
            latency_counts=counts.latencies.counts.copy(),
            latency_total_seconds=counts.latencies.total_s,
            in_flight=self._gate.in_flight,
            concurrency_limit=self._gate.limit.limit,
            token_expires_at=self._shared.credentials.token_expires_at,
            certificate_expires_at=min(expiries, default=None),
            pauses=pauses,
            last_pause=self._last_pause,
        )

    def advice(self, reason: str) -> str:
        """Return what to do about a pause; empty if nothing is known."""
        return advice_on(reason, self._intake, self._renewal)

    def _pauses(self, wall_now: float) -> list[Pause]:
        gate = self._gate
        if not gate.reason:
            return []
        now = anyio.current_time()
        return [
            Pause(
                gate.reason,
                gate.what,
                self.advice(gate.reason),
                round(wall_now - (now - gate.shut_at), 3),
                wall_now + gate.wait_s,
                None if gate.gives_up_at == math.inf else round(wall_now + (gate.gives_up_at - now), 3),
            )
        ]

    async def _ask_time(self) -> Verdict | None:
        """Ask the service for its time, with a batch without events; return why that failed."""
        endpoint = self._new_endpoint()
        try:
            answer = await endpoint.request(
                "POST",
                INTAKE_PATH,
                BODY_HEAD + BODY_TAIL,
                authorization=await self._shared.credentials.authorize(),
                max_answer_bytes=ANSWER_BYTES,
            )
        except NoTokenError as error:
            return Verdict(Action.PAUSE, error.reason, error.message, is_set_up_fault=error.is_set_up_fault)
        except NoAnswerError as error:
            return without_answer(error.cause, str(error), is_tls=error.is_tls)
        finally:
            with anyio.move_on_after(1, shield=True):
                await endpoint.aclose()
        self._skew.note(answer.date, self._wall_time())
        return None

    def _credentials(self, settings: Settings, ssl_context: ssl.SSLContext | None) -> Credentials:
        return credentials_of(
            require_endpoint(settings, "intake"),
            settings.delivery,
            section="intake",
            ssl_context=ssl_context,
            wall_time=self._wall_time,
            rng=self._rng,
        )

    async def _keep_credentials(self) -> None:
        """Refresh the tokens of the current credentials, also after they were replaced, until cancelled."""
        while True:
            with anyio.CancelScope() as self._renewing:
                await self._shared.credentials.run()


def _quantile(ordered: list[float], q: float) -> float | None:
    """Return the `q` quantile; None without values."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None
