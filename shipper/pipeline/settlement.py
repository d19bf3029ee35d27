"""
The last stage: counts what became of the records, and saves how far each input is settled.

The senders put what each answer settles into a stream. From that, and from what the packer finds out by itself, the
acks derive up to where each input is settled without a gap; a task saves it, once in each interval, and the source gets
the checkpoints that are on disk. The packer waits here for room and for answers.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol, TypeVar

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream
from anyio.to_thread import run_sync

from shipper.codec import Columns, DedupeWindow, accept_events, key_of, refuse_event, tally
from shipper.config.settings import StateSettings
from shipper.delivery.parts import SentEvent, event_in, sent_event, sent_events
from shipper.model.errors import DeliveryGaveUpError, HeldBackError, StateError, StateUnwritableError
from shipper.model.framing import CsvRows
from shipper.model.records import (
    Batch,
    Checkpoint,
    LedgerKey,
    Refusal,
    Rejection,
    ReplayStream,
    Settled,
    Span,
    Stream,
    Totals,
)
from shipper.pipeline.acks import Acks, weight
from shipper.state.store import Saved

log = structlog.get_logger("pipeline")

T = TypeVar("T")

MAX_HELD_BYTES: Final = 6 << 20
"""Budget of what is read and not saved: dead letters, ledger keys, chunks; without the events that are on their way."""
_SAVED_TOGETHER: Final = 8192  # entries, four records counting as one: then a save waits no longer
_LEAST_PAUSE_S: Final = 0.1  # between two looks whether the dead letters have room again
_LAST_TRIES: Final = 10
_BETWEEN_LAST_TRIES_S: Final = 0.5
_EXPIRY_INTERVAL_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_DUPLICATES_TOLD: Final = 5


class StateStore(Protocol):
    """The `Store`, or the one of a consumer group in the brokers."""

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


class Settlement:
    """
    Args:
        window: The EventIds in flight and accepted; also used by the packer's codec.
        on_saved: Called with the checkpoints that are on disk now.
        give_up_after_s: How long to wait for the store to take what is settled; None = for ever.
        wall_time: Seconds since the epoch.

    Attributes:
        acks: What is open, and the counts of this run.
        answers: How many answers have settled something.
        stopping: Set once nothing more is read.
        has_left_chunks: A chunk was skipped, so all later ones must be skipped, too.
        held_back: Why the run has to end before the end of its input; None if it does not.
        ending: Set once `held_back` is.
        obstacle: Why nothing is saved at the moment.
        full_since: When something settled could not be saved first, on the event loop's clock; None = all can.
        commits: Transactions so far.
        settled_bytes: Saved so far, of all inputs.
        handed_over: Records of streams that are over which were read and not settled.
    """

    def __init__(
        self,
        store: StateStore,
        settings: StateSettings,
        *,
        window: DedupeWindow,
        on_saved: Callable[[Sequence[Checkpoint]], Awaitable[None]],
        give_up_after_s: float | None,
        wall_time: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._on_saved = on_saved
        self._give_up_after_s = give_up_after_s
        self._wall_time = wall_time
        self._progress = anyio.Event()
        self._asked = anyio.Event()
        self._asked_at = 0
        # Of its own: the threads of an application may all be waiting for what a save makes room for.
        self._threads = anyio.CapacityLimiter(1)
        self._unsaved: list[Checkpoint] = []
        self._unsaved_bytes = 0
        self._ends_at = math.inf
        self._saving = anyio.CancelScope()
        self._is_stuck = False
        self._turn = anyio.Lock(fast_acquire=True)  # one save at a time, and none while streams are abandoned
        self._duplicates_told = 0
        self.window = window
        self.acks = Acks()
        self.answers = 0
        self.stopping = anyio.Event()
        self.has_left_chunks = False
        self.held_back: HeldBackError | None = None
        self.ending = anyio.Event()
        self.obstacle = Obstacle()
        self.full_since: float | None = None
        self.commits = 0
        self.settled_bytes = 0
        self.handed_over = 0

    def __repr__(self) -> str:
        return f"<Settlement {self.acks!r}>"

    def remember_accepted(self) -> None:
        """Add the EventIds that earlier runs got accepted to the window."""
        if self.window.is_on:
            for keys in self._store.accepted_ids():
                self.window.remember(keys)

    # Whether more may be begun -----------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Estimate the memory, in bytes, of what is read and not saved."""
        return self.acks.held_bytes + self._unsaved_bytes

    @property
    def has_room(self) -> bool:
        """Whether another span may be opened now."""
        return self.held_bytes < MAX_HELD_BYTES and self.full_since is None

    @property
    def is_shut(self) -> bool:
        """Whether there will be no room any more: a stop was asked for while nothing can be saved."""
        return self.full_since is not None and self.stopping.is_set()

    def open(self, span: Span, now: float) -> None:
        """
        Add a span, and log the records in it that a rule refused.

        Saves early where much is done, so that a crash repeats little and little is held.
        """
        if span.rejections:
            _log_refused(span)
        self.acks.open(span, now)
        self._ask_after_much()

    def _ask_after_much(self) -> None:
        done = self.acks.entries + self.acks.totals.read // 4
        if done - self._asked_at >= _SAVED_TOGETHER:
            self._asked_at = done
            self._ask()

    def _ask(self) -> None:
        """Save what is settled now; after a failed save, only once the interval has passed."""
        if self.full_since is None:
            self._asked.set()

    def leave_rest(self, why: HeldBackError | None = None) -> None:
        """Skip what comes next, and all that comes after it; with a reason, the run ends for it."""
        self.has_left_chunks = True
        if why is not None and self.held_back is None:
            self.held_back = why
            self.ending.set()

    def end_reading(self) -> None:
        """Note that nothing more is read; end waits for room."""
        self.stopping.set()
        self._tell_progress()

    def _tell_progress(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()

    async def until_progress(self) -> None:
        """Wait until something is settled or saved."""
        await self._progress.wait()

    async def until_room(self) -> None:
        """Ask for a save, and wait until something happens that may make room."""
        progress = self._progress
        self._ask()
        if not self.is_shut:
            await progress.wait()

    async def until_saved(self) -> None:
        """Wait until all that is settled is saved, or until a stop is asked for; then there is a last try."""
        while (self.acks.open_spans or self._unsaved) and not self.stopping.is_set():
            await self.until_room()

    # What became of the records ----------------------------------------------------------------------------------

    async def run(self, settled_rx: MemoryObjectReceiveStream[Settled]) -> None:
        """Settle what the senders report until they have ended."""
        with settled_rx:
            async for settled in settled_rx:
                self.settle(settled)
                self.settle_all(settled_rx)

    def settle_all(self, settled_rx: MemoryObjectReceiveStream[Settled]) -> None:
        """Settle what was reported by now."""
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while True:
                self.settle(settled_rx.receive_nowait())

    def settle(self, settled: Settled) -> None:
        """Settle what the service took or refused of a batch."""
        if settled.accepted is not None:
            self._accept(settled.accepted)
        for batch, refusal in settled.refused:
            self._refuse(batch, refusal)
        self.answers += 1
        self._tell_progress()

    def settle_duplicate(self, span: Span, ordinal: int, line: bytes) -> None:
        """Settle an event, as it would have been sent, whose EventId was accepted meanwhile."""
        if span.stream.is_over:
            return
        event = event_in(line)
        if self._duplicates_told < _DUPLICATES_TOLD:  # to find where it stands takes a while
            assert span.chunk is not None
            self.note_duplicate(event.EventId, span.stream, span.chunk.start_offset + span.bounds_of(ordinal)[0])
        self.acks.repeat(span, _ledger_key(event))
        self._tell_progress()

    def note_duplicate(self, event_id: str, stream: Stream, offset: int) -> None:
        """Log the first few duplicates; those that the codec finds are counted in their spans."""
        self._duplicates_told += 1
        if self._duplicates_told <= _DUPLICATES_TOLD:
            log.info("duplicate_skipped", event_id=event_id, path=stream.shown_path, offset=offset)

    def _accept(self, batch: Batch) -> None:
        if batch.parts[0][0].stream.kind == "replay":
            self._note_repeated(batch)
        for span, ordinals in batch.parts:
            if not span.stream.is_over:
                accept_events(self.window, span, ordinals)
        self.acks.accept(batch)

    def _note_repeated(self, batch: Batch) -> None:
        """Count replayed events that were accepted before as duplicates in the ledger; they are sent all the same."""
        spans = [span for span, ordinals in batch.parts for _ in ordinals]
        for span, event in zip(spans, sent_events(batch), strict=True):
            is_replayed = span.stream.kind == "replay" and not span.stream.is_over
            if is_replayed and self.window.is_accepted(key_of(event.EventId)):
                self.acks.note_repeated(span, _ledger_key(event))

    def _refuse(self, batch: Batch, refusal: Refusal) -> None:
        """Make a dead letter of the one event of a batch, as the record came."""
        ((span, (ordinal,)),), event = batch.parts, sent_event(batch)
        if span.stream.is_over:
            return
        assert span.chunk is not None
        start, end = span.bounds_of(ordinal)
        framing = span.stream.framing
        rejection = Rejection(
            start_offset=span.chunk.start_offset + start,
            end_offset=span.chunk.start_offset + end,
            rule=refusal.rule,
            message=refusal.message,
            raw=span.chunk.data[start:end],
            event_id=event.EventId,
            consumer_id=str(event.ConsumerID),
            status=refusal.status,
            delivery="ambiguous" if refusal.is_ambiguous else "rejected",
            attempts=refusal.attempts,
            header=framing.header if isinstance(framing, CsvRows) else b"",
        )
        refuse_event(self.window, span, event.EventId)
        self.acks.reject(span, rejection, _ledger_key(event))
        log.warning(
            "record_rejected",
            event_id=event.EventId,
            path=span.stream.shown_path,
            offset=rejection.start_offset,
            rule=refusal.rule,
            status=refusal.status,
        )

    # Saving ------------------------------------------------------------------------------------------------------

    @property
    def has_unsaved(self) -> bool:
        """Whether something that was settled is not on disk yet."""
        return bool(self._unsaved)

    def saved(self, totals: Totals) -> Totals:
        """Return what of the totals holds at the next start: what is not saved is done again."""
        accepted = sum(checkpoint.accepted for checkpoint in self._unsaved)
        duplicates = sum(checkpoint.duplicates for checkpoint in self._unsaved)
        dead_lettered = sum(len(checkpoint.rejections) for checkpoint in self._unsaved) + self.acks.open_rejections
        return Totals(
            read=totals.read,
            accepted=totals.accepted - accepted,
            dead_lettered=totals.dead_lettered - dead_lettered,
            duplicates=totals.duplicates - duplicates,
            pending=totals.pending + accepted + dead_lettered + duplicates,
        )

    async def keep_saving(self) -> None:
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
        """Set the deadline for saving, so that a hanging disk cannot block a stop."""
        self._ends_at = self._saving.deadline = deadline

    def has_unsaved_of(self, streams: Sequence[Stream]) -> bool:
        """Return whether something of streams was read and is not on disk yet."""
        return self.acks.has_open(streams) or any(each.stream in streams for each in self._unsaved)

    async def abandon(self, streams: Sequence[Stream]) -> int:
        """
        Forget what is open or not saved of streams that go to another process; answers that come later are ignored.

        Their EventIds are forgotten, too: should a stream come back, what nobody saved is no duplicate. Those of dead
        letters may also be those of records that were accepted.

        Returns:
            How many records that were.
        """
        abandoned = 0
        with anyio.CancelScope(shield=True):
            async with self._turn:
                for stream in streams:
                    stream.is_over = True
                    for span in self.acks.abandon(stream):
                        self.handed_over += span.unsettled
                        abandoned += span.records
                        self._drop(stream, span.event_keys + span.keys)
                for checkpoint in self._unsaved:
                    if checkpoint.stream.is_over:
                        self._unsaved_bytes -= weight(checkpoint)
                        abandoned += checkpoint.read
                        self._drop(checkpoint.stream, checkpoint.keys)
                self._unsaved = [each for each in self._unsaved if not each.stream.is_over]
                if not self._unsaved:  # there is nothing left whose save would end the pause
                    self._note_obstacle(Obstacle())
        self.answers += 1
        self._tell_progress()
        return abandoned

    def _drop(self, stream: Stream, keys: bytes) -> None:
        if self.window.is_on and stream.kind != "replay":
            self.window.drop(keys)

    async def save(self) -> None:
        """
        Save the gapless part. Shielded from cancellation: a started transaction must be finished and counted.

        Raises:
            StateError: The state store cannot be written, or not in time.
        """
        with anyio.CancelScope(shield=True):
            async with self._turn:
                await self._save()

    async def save_rest(self) -> None:
        """Save at the end; again a few times while nothing but another process stands in the way, as in a rebalance."""
        for _ in range(_LAST_TRIES):
            await self.save()
            if not self._unsaved or self.obstacle.reason or self._is_stuck:
                return
            with anyio.CancelScope(shield=True):
                await anyio.sleep(_BETWEEN_LAST_TRIES_S)

    async def _save(self) -> None:
        taken = self.acks.take()
        self._unsaved += taken
        self._unsaved_bytes += sum(map(weight, taken))
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
                self._note_obstacle(Obstacle(error.reason, str(error)))
                return
            self.settled_bytes += sum(each.end_offset - each.start_offset for each in saved.done)
            self.commits += 1
            self._unsaved = saved.waiting
            self._unsaved_bytes = sum(map(weight, saved.waiting))
            self._note_obstacle(Obstacle("dead_letters_full" if saved.why else "", saved.why))
            if saved.done:
                self._tell_progress()
                await self._on_saved(saved.done)
        if self._saving.cancelled_caught:
            self._is_stuck = True
            raise StateError(
                "the state could not be saved in time: its disk does not respond. What was not saved is sent again "
                "at the next start, with the same EventIds"
            )

    def _note_obstacle(self, obstacle: Obstacle) -> None:
        """Begin or end a pause because what is settled cannot be saved; logged once each."""
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

    async def between_saves(self, work: Callable[[], T]) -> T:
        """Call something that uses the store, in a thread, while nothing else does; saves wait for it."""
        return await run_sync(work, limiter=self._threads)

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


def _log_refused(span: Span) -> None:
    """Log the rules that records broke here, and where these stand; never a value of a record."""
    stream = span.stream
    path = stream.shown_path
    for each in span.rejections:
        offset = each.start_offset
        place = {"letter": stream.letter_at(offset)} if isinstance(stream, ReplayStream) else {"offset": offset}
        log.warning("record_refused", rules=list(each.faults) or [each.rule], path=path, **place, message=each.message)


def _ledger_key(event: SentEvent) -> LedgerKey | None:
    return next(iter(tally(Columns.of([event]))), None)
