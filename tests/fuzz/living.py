"""A complete shipper that runs in this process for many inputs, and its invariants."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import uvloop

from shipper import Shipper
from shipper.config.secrets import LiteralSecret
from shipper.config.settings import (
    BatchSettings,
    DeliverySettings,
    EndpointSettings,
    OAuth2Settings,
    RecordsSettings,
    Settings,
    SpoolSettings,
    StateSettings,
)
from shipper.delivery import waits
from shipper.model.records import Batch, Refusal
from tests.answer_bodies import IDS
from tests.e2e.driver import State, assert_accounted, read_state
from tests.fuzz.answers import CANARY
from tests.fuzz.engine import quiet
from tests.processes import memory_bytes
from tests.unit.test_codec import line

T = TypeVar("T")

RECORDS: Final = [line(EventId=each, ConsumerID=number, Username=CANARY) for number, each in enumerate(IDS, 1)]
DELIVERY: Final = DeliverySettings(
    concurrency=1,
    connect_timeout_seconds=0.1,
    read_timeout_seconds=0.03,
    retry_initial_seconds=0.001,
    retry_max_seconds=0.002,
    drain_timeout_seconds=0.2,
)
_LIMIT_S: Final = 20.0
_TURN_S: Final = 0.001
_LIFE: Final = 2_000  # inputs until the shipper is replaced by one with an empty state
_REQUESTED_MAX_S: Final = 0.01  # instead of an hour
_WARM: Final = 300  # inputs until memory use is stable
_GROWTH_BYTES: Final = 256 << 20


class Loop:
    """
    An event loop like that of the commands; unhandled errors fail the input.
    """

    def __init__(self) -> None:
        self._unhandled: list[str] = []
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(self._note)
        self._conversation: asyncio.Task[Any]
        self._inputs = 0
        self._resident_bytes = 0

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._unhandled.append(repr(context))
        self._conversation.cancel()

    def run(self, conversation: Coroutine[Any, Any, T]) -> T:
        """Run the conversation of an input within time and memory limits."""
        self._conversation = self._loop.create_task(asyncio.wait_for(conversation, _LIMIT_S))
        try:
            with patch.object(waits, "REQUESTED_MAX_S", _REQUESTED_MAX_S):
                outcome: T = self._loop.run_until_complete(self._conversation)
        finally:
            unhandled, self._unhandled = self._unhandled, []
            assert not unhandled, unhandled
        self._inputs += 1
        resident_bytes = memory_bytes(os.getpid())
        if self._inputs <= _WARM:
            self._resident_bytes = max(self._resident_bytes, resident_bytes)
        assert self._inputs <= _WARM or resident_bytes - self._resident_bytes < _GROWTH_BYTES, "memory grows"
        return outcome

    def close(self) -> None:
        """Cancel all tasks, because the interpreter would wait for their threads."""
        living = asyncio.all_tasks(self._loop)
        for task in living:
            task.cancel()
        if living:  # `gather` of nothing belongs to another loop
            with quiet():
                self._loop.run_until_complete(asyncio.gather(*living, return_exceptions=True))
        self._loop.close()


@cache
def loop() -> Loop:
    """Return the event loop of the conversations."""
    made = Loop()
    threading._register_atexit(made.close)  # type: ignore[attr-defined]  # other handlers run only after threads were joined
    return made


class Living:
    """
    A shipper within its `async with` block.

    Args:
        settings: Returns the settings for a state directory.
    Attributes:
        accepted, refused: Records settled by answers; totals count them slightly later.
    """

    def __init__(self, settings: Callable[[Path], Settings]) -> None:
        self._settings = settings
        self._folder: Path
        self._block: asyncio.Task[None] | None = None
        self._ready: asyncio.Event
        self._ending: asyncio.Event
        self._inputs = 0
        self._shipper: Shipper
        self.accepted = self.refused = 0
        atexit.register(self._forget)

    @property
    def gate(self) -> Any:
        return self._senders.gate

    @property
    def _senders(self) -> Any:
        assert self._shipper._pipeline is not None
        return self._shipper._pipeline.senders

    async def ship(self) -> None:
        """Ship three records, and wait until all of them are settled."""
        await self._live()
        self._inputs += 1
        self._unlearn()
        try:
            await self._shipper.send_many(RECORDS)
            while self._shipper.totals.accepted + self._shipper.totals.dead_lettered < self._inputs * len(RECORDS):
                assert self._block is not None
                if self._block.done():
                    await self._block
                await asyncio.sleep(_TURN_S)
        except BaseException:
            await self._abandon()
            raise
        totals = self._shipper.totals
        assert totals.read == totals.accepted + totals.dead_lettered + totals.duplicates + totals.pending
        assert (totals.read, totals.duplicates, totals.pending) == (self._inputs * len(RECORDS), 0, 0)
        assert not self.gate.reason, "an acceptance did not end the pause"

    def _unlearn(self) -> None:
        """Forget the size limit learned from the last input."""
        self._senders._shared.working_bytes = math.inf

    async def _live(self) -> None:
        """Start a shipper if none runs; replace it after many inputs and check its state on disk."""
        if self._block is not None and not self._block.done() and self._inputs < _LIFE:
            return
        if self._block is not None and not self._block.done():
            await self.end()
        self._forget()
        self._folder = Path(tempfile.mkdtemp(prefix="shipper-fuzz-"))
        self._ready, self._ending, self._inputs = asyncio.Event(), asyncio.Event(), 0
        self._block = asyncio.create_task(self._stay())
        while not self._ready.is_set():
            if self._block.done():
                await self._block
            await asyncio.sleep(_TURN_S)

    async def _stay(self) -> None:
        async with Shipper(self._settings(self._folder)) as self._shipper:
            for sender in self._senders._senders:
                sender._settle = partial(self._settle, sender._settle)
            self._ready.set()
            await self._ending.wait()

    def _settle(
        self, settle: Callable[..., None], accepted: Batch | None, refused: Sequence[tuple[Batch, Refusal]] = ()
    ) -> None:
        self.accepted += 0 if accepted is None else accepted.events
        self.refused += sum(batch.events for batch, _ in refused)
        settle(accepted, refused)

    async def end(self) -> None:
        """Stop the shipper, and assert that everything is settled and saved."""
        assert self._block is not None
        self._ending.set()
        await self._block
        state, summary = read_state(self._folder), self._shipper.summary
        assert summary is not None
        assert (summary.read, summary.pending) == (self._inputs * len(RECORDS), 0)
        assert (state.accepted, state.dead_lettered) == (summary.accepted, summary.dead_lettered)
        assert_accounted(None, State(), state)

    async def _abandon(self) -> None:
        """Discard the shipper, so that the next input gets a new one."""
        block, self._block = self._block, None
        if block is not None and not block.done():
            block.cancel()
            await asyncio.wait([block], timeout=_LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _forget(self) -> None:
        if self._block is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def settings_for(folder: Path, intake: EndpointSettings) -> Settings:
    """Return settings with batches of three records and short waits."""
    return Settings(
        intake=intake,
        records=RecordsSettings(dedupe_window=0, max_future_seconds=10**9),
        batch=BatchSettings(max_events=len(RECORDS), linger_seconds=0.001),
        delivery=DELIVERY,
        state=StateSettings(directory=folder, commit_interval_seconds=0.2),
        spool=SpoolSettings(fsync="never", segment_bytes=65_536, max_bytes=1 << 24),
    )


def endpoint_at(port: int, *, scheme: str = "http", token_port: int = 0) -> EndpointSettings:
    """Return an endpoint on loopback; with `token_port`, tokens come from a token endpoint."""
    return EndpointSettings(
        base_url=f"{scheme}://127.0.0.1:{port}",
        subscription_key=LiteralSecret("a-key"),
        token=None if token_port else LiteralSecret("a-token"),
        oauth2=OAuth2Settings(
            token_url=f"http://127.0.0.1:{token_port}/token", client_id="shipper", client_secret=LiteralSecret(CANARY)
        )
        if token_port
        else None,
    )
