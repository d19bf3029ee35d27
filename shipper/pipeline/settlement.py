"""The books of a run: what is settled, what waits to be saved, and whether more may be begun."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from shipper.config.settings import StateSettings
from shipper.model.errors import HeldBackError
from shipper.pipeline.saver import Saver, StateStore
from shipper.state.acks import Acks

MAX_HELD_BYTES: Final = 16 << 20
"""Budget of what is read and not saved: dead letters, ledger keys, chunks; without the events that are on their way."""
_SAVED_TOGETHER: Final = 8192  # entries, four records counting as one: then a save waits no longer


class Settlement:
    """
    Args:
        on_saved: Called when checkpoints have moved, on disk.
        give_up_after_s: How long to wait for the store to take what is settled; None = for ever.
        wall_time: Seconds since the epoch.

    Attributes:
        stopping: Set once nothing more is read.
        has_left_chunks: Some of what was read was left alone, and all that comes after it is to be.
        held_back: Why the run has to end before the end of its input; None if it does not.
        ending: Set once `held_back` is.
    """

    def __init__(
        self,
        store: StateStore,
        settings: StateSettings,
        *,
        on_saved: Callable[[], Awaitable[None]],
        give_up_after_s: float | None,
        wall_time: Callable[[], float],
    ) -> None:
        self._on_saved = on_saved
        self._progress = anyio.Event()
        self.acks = Acks()
        self.saver = Saver(
            self.acks,
            store,
            settings,
            on_saved=self._after_save,
            give_up_after_s=give_up_after_s,
            wall_time=wall_time,
        )
        self.stopping = anyio.Event()
        self.has_left_chunks = False
        self.held_back: HeldBackError | None = None
        self.ending = anyio.Event()
        self._asked_at = 0

    @property
    def held_bytes(self) -> int:
        """What is read and not saved holds so much memory, estimated; reading waits at `MAX_HELD_BYTES`."""
        return self.acks.held_bytes + self.saver.unsaved_bytes

    def tell_progress(self) -> None:
        """Something was settled or saved: let those look again that wait for it."""
        self._progress.set()
        self._progress = anyio.Event()

    async def until_progress(self) -> None:
        """Wait until something is settled or saved."""
        await self._progress.wait()

    def end_reading(self) -> None:
        """Nothing more is read; who waits for room need not do so any longer."""
        self.stopping.set()
        self.tell_progress()

    def leave_rest(self, why: HeldBackError | None = None) -> None:
        """Leave alone what comes next, and all that comes after it; with a reason, the run ends for it."""
        self.has_left_chunks = True
        if why is not None and self.held_back is None:
            self.held_back = why
            self.ending.set()

    async def room(self, flush: Callable[[], Awaitable[None]]) -> bool:
        """
        Wait until another span may be opened.

        Args:
            flush: Sends what the caller holds back; or spans would stay open for it.
        Returns:
            False = it may not, and for good: behind a gap nothing may be settled.
        """
        self._ask_after_much()
        while self.held_bytes >= MAX_HELD_BYTES or self.saver.full_since is not None:
            if self.saver.full_since is not None and self.stopping.is_set():
                self.has_left_chunks = True
                return False
            await flush()
            await self._next_save()
        return True

    def _ask_after_much(self) -> None:
        """Ask for a save before the interval has passed, so that a crash repeats little and little is held."""
        done = self.acks.entries + self.acks.totals.read // 4
        if done - self._asked_at >= _SAVED_TOGETHER:
            self._asked_at = done
            self.saver.ask()

    async def until_saved(self) -> None:
        """Wait until all that is settled is saved, or until a stop is asked for; then there is a last try."""
        while (self.acks.open_spans or self.saver.has_unsaved) and not self.stopping.is_set():
            await self._next_save()

    async def _next_save(self) -> None:
        """Ask for a save, and wait until something happens that the caller may wait for."""
        progress = self._progress
        self.saver.ask()
        if not self.stopping.is_set() or self.saver.full_since is None:
            await progress.wait()

    async def _after_save(self) -> None:
        self.tell_progress()
        await self._on_saved()
