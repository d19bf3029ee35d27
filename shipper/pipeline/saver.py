"""Saves what is settled, once in each interval, and tells what is to be done when it cannot be saved."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

import anyio
import structlog
from anyio.to_thread import run_sync

from shipper.config.settings import StateSettings
from shipper.model.errors import DeliveryGaveUpError, StateError, StateUnwritableError
from shipper.model.records import Checkpoint, Totals
from shipper.state.acks import Acks, weight
from shipper.state.store import Saved

log = structlog.get_logger("pipeline")

_LEAST_PAUSE_S: Final = 0.1  # between two looks whether the dead letters have room again
_EXPIRY_INTERVAL_S: Final = 3600.0
_DAY_S: Final = 86_400.0


class StateStore(Protocol):
    """Where it is saved: the `Store`, or whoever has it."""

    def save(self, checkpoints: Iterable[Checkpoint], now_s: float) -> Saved: ...

    def expire(self, before_s: float, now_s: float) -> int: ...

    def expire_ledger(self, before_s: float, now_s: float) -> int: ...

    def accepted_ids(self) -> Iterable[bytes]: ...


class Obstacle(NamedTuple):
    """
    Why what is settled cannot be saved.

    Attributes:
        reason: One word; empty if it can be saved.
        message: What has happened and what to do.
    """

    reason: str = ""
    message: str = ""


class Saver:
    """
    Moves what is settled from the acks to the store.

    Args:
        on_saved: Called when checkpoints have moved, on disk.
        give_up_after_s: How long to wait for the store to take what is settled; None = for ever.
        wall_time: Seconds since the epoch.

    Attributes:
        obstacle: Why nothing is saved at the moment.
        full_since: When something settled could not be saved first, on the event loop's clock; None = all can.
        commits: Transactions so far.
        settled_bytes: Of all inputs.
        unsaved_bytes: What was settled and is not on disk yet holds so much memory, estimated.
    """

    def __init__(
        self,
        acks: Acks,
        store: StateStore,
        settings: StateSettings,
        *,
        on_saved: Callable[[], Awaitable[None]],
        give_up_after_s: float | None,
        wall_time: Callable[[], float],
    ) -> None:
        self._acks = acks
        self._store = store
        self._settings = settings
        self._on_saved = on_saved
        self._give_up_after_s = give_up_after_s
        self._wall_time = wall_time
        self._asked = anyio.Event()
        # Of its own: the threads of an application may all be waiting for what a save makes room for.
        self._threads = anyio.CapacityLimiter(1)
        self._unsaved: list[Checkpoint] = []
        self._ends_at = math.inf
        self._saving = anyio.CancelScope()
        self._is_stuck = False
        self.obstacle = Obstacle()
        self.full_since: float | None = None
        self.commits = 0
        self.settled_bytes = 0
        self.unsaved_bytes = 0

    def accepted_ids(self) -> Iterable[bytes]:
        """Return the EventIds that earlier runs got accepted, 16 bytes each, many at a time; the oldest first."""
        return self._store.accepted_ids()

    @property
    def has_unsaved(self) -> bool:
        """Whether something that was settled is not on disk yet."""
        return bool(self._unsaved)

    def saved(self, totals: Totals) -> Totals:
        """
        Tell what of the totals holds at the next start: what is not saved is done again, whatever has become of it.
        """
        accepted = sum(checkpoint.accepted for checkpoint in self._unsaved)
        duplicates = sum(checkpoint.duplicates for checkpoint in self._unsaved)
        dead_lettered = sum(len(checkpoint.rejections) for checkpoint in self._unsaved) + self._acks.open_rejections
        return Totals(
            read=totals.read,
            accepted=totals.accepted - accepted,
            dead_lettered=totals.dead_lettered - dead_lettered,
            duplicates=totals.duplicates - duplicates,
            pending=totals.pending + accepted + dead_lettered + duplicates,
        )

    def ask(self) -> None:
        """Save what is settled now; after a failed save, only once the interval has passed."""
        if self.full_since is None:
            self._asked.set()

    async def run(self) -> None:
        """
        Save until this is cancelled.

        Raises:
            StateError: The state store cannot be written; nothing is lost.
            DeliveryGaveUpError: It had no room for too long; what was not saved is pending.
        """
        while True:
            pause_s = self._settings.commit_interval_seconds
            with anyio.move_on_after(pause_s if self.full_since is None else max(pause_s, _LEAST_PAUSE_S)):
                await self._asked.wait()
            self._asked = anyio.Event()
            await self.save()
            self._lose_patience()

    def end_by(self, deadline: float) -> None:
        """Wait no longer than that for a save, on the event loop's clock: a stop does not hang on a disk that does."""
        self._ends_at = self._saving.deadline = deadline

    async def save(self) -> None:
        """
        Save what is settled without a gap; shielded, as a transaction that was begun must be accounted for.

        Raises:
            StateError: The state store cannot be written, or does not come to an end with it in time.
        """
        taken = self._acks.take()
        self._unsaved += taken
        self.unsaved_bytes += sum(map(weight, taken))
        if not self._unsaved or self._is_stuck:  # what is stuck may be saved yet: twice would count twice
            return
        with anyio.CancelScope(shield=True, deadline=self._ends_at) as self._saving:
            # Kept until they are on disk: a later checkpoint must not pass the dead letters of one that failed.
            try:
                saved = await run_sync(
                    self._store.save,
                    self._unsaved,
                    self._wall_time(),
                    limiter=self._threads,
                    abandon_on_cancel=True,  # only the shield's own deadline comes here
                )
            except StateUnwritableError as error:
                self._note_room(Obstacle("state_unwritable", str(error)))
                return
            for checkpoint in saved.done:
                checkpoint.stream.move_checkpoint(checkpoint.end_offset, checkpoint.tail)
                self.settled_bytes += checkpoint.end_offset - checkpoint.start_offset
            self.commits += 1
            self._unsaved = saved.waiting
            self.unsaved_bytes = sum(map(weight, saved.waiting))
            self._note_room(Obstacle("dead_letters_full" if saved.why else "", saved.why))
            if saved.done:
                await self._on_saved()
        if self._saving.cancelled_caught:
            self._is_stuck = True
            raise StateError(
                "the state could not be saved before the end: its disk does not answer. What was not saved is sent "
                "again at the next start, with the same EventIds"
            )

    def _note_room(self, obstacle: Obstacle) -> None:
        """Begin or end a pause because what is settled cannot be saved; told once each."""
        before, self.obstacle = self.obstacle, obstacle
        if obstacle.reason and self.full_since is None:
            self.full_since = anyio.current_time()
        elif not obstacle.reason:
            self.full_since = None
        if obstacle.reason != before.reason:
            if before.reason:
                log.info("delivery_resumed", reason=before.reason)
            if obstacle.reason:
                log.warning("delivery_paused", reason=obstacle.reason, message=obstacle.message)

    def _lose_patience(self) -> None:
        limit_s = self._give_up_after_s
        if limit_s is None or self.full_since is None or anyio.current_time() < self.full_since + limit_s:
            return
        raise DeliveryGaveUpError(f"nothing could be saved for {limit_s:g} s: {self.obstacle.message}")

    async def keep_expiring(self) -> None:
        """
        Remove what is past its retention, now and once an hour, until this is cancelled.

        Each transaction removes a little and waits its turn, so that saves go on between them.
        """
        settings, store = self._settings, self._store
        while settings.dead_letter_retention_days or settings.ledger_retention_days:
            await self._expire("dead_letters_expired", store.expire, settings.dead_letter_retention_days)
            await self._expire("ledger_expired", store.expire_ledger, settings.ledger_retention_days)
            await anyio.sleep(_EXPIRY_INTERVAL_S)

    async def _expire(self, event: str, expire_some: Callable[[float, float], int], days: float) -> None:
        expired = 0
        with suppress(StateUnwritableError):  # the next save tells
            while days:
                now_s = self._wall_time()
                count = await run_sync(expire_some, now_s - days * _DAY_S, now_s, limiter=self._threads)
                if not count:
                    break
                expired += count
        if expired:
            log.info(event, count=expired, retention_days=days)
