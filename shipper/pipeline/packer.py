"""
Turns chunks into batches: validates records, packs them, and opens their spans.

Input is held back, or a one-shot run ended, before an input that is almost entirely invalid fills the dead letters.
Either it does not contain records, such as another program's log or a file with wrong column names; or this machine's
clock is slow, so that valid records seem to come from the future. `MistakeCounter` detects both. `Hold` asks the
service for the time, and waits until checking again makes sense.
"""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from shipper.codec.codec import Codec
from shipper.codec.dedupe import key_of
from shipper.codec.judge import is_future_timestamp
from shipper.codec.rules import MESSAGES, latest_timestamp
from shipper.config.settings import Settings
from shipper.delivery.gate import FAIL_FAST_S
from shipper.model.errors import DeliveryGaveUpError
from shipper.model.records import Batch, Chunk, EncodedChunk, Rejection, Stream, shown
from shipper.model.units import several
from shipper.pipeline.batching import Batcher
from shipper.pipeline.senders import SenderPool
from shipper.pipeline.settlement import Settlement
from shipper.status.live import Pause
from shipper.status.pauses import ADVICE
from shipper.system.work import StuckPlace, WorkItem, at_work, recorded

log = structlog.get_logger("pipeline")

CHUNK_BUFFER: Final = 2
_SPAN_RECORDS_MAX: Final = 10_000  # so that a single span cannot exceed the memory limit by much
_FUTURE_SHARE: Final = 9  # records from the future for each other one
_STREAMS_MAX: Final = 1_000
_NO_LIMIT: Final = 1 << 62
_RECHECK_S: Final = 5.0  # between requests for the time while the clock may be wrong
_TRUST_S: Final = 60.0  # after the clock was found to be right
_SET_CLOCK_REMEDY: Final = (
    "Nothing is lost. Set this machine's clock, for example with NTP, and run the same command again; if the service's "
    "clock is wrong, or the records do come from the future, raise records.max_future_seconds"
)


class Packer:
    """
    Packs the records of chunks into batches.

    Args:
        hold: Holds input back; None = this packer runs beside the main one, and neither holds input back nor records
            its position for the next start.
        suspects: By input, the places of records that an earlier process got stuck on.

    Attributes:
        waits_for_input_since: When it began to wait for input, on the event loop's clock; None while packing.
    """

    def __init__(
        self,
        settings: Settings,
        settlement: Settlement,
        hold: Hold | None,
        *,
        wall_time: Callable[[], float],
        suspects: Mapping[str, Sequence[StuckPlace]],
    ) -> None:
        self._suspects = suspects
        self._settlement = settlement
        self._hold = hold
        self._wall_time = wall_time
        self._records = settings.records
        self._answers_seen = 0
        self._codec = self._new_codec(settings)
        self._batcher = Batcher(
            max_events=_events_per_batch(settings),
            max_bytes=settings.batch.max_bytes,
            linger_s=settings.batch.linger_seconds,
            unique_consumers=settings.batch.unique_consumers,
        )
        self.waits_for_input_since: float | None = None

    def __repr__(self) -> str:
        return f"<Packer {self._batcher!r}>"

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, and recheck held input."""
        self._batcher.max_events = _events_per_batch(settings)
        if settings.records != self._records:
            self._records = settings.records
            self._codec = self._new_codec(settings)
        if self._hold is not None:
            self._hold.reconfigure(settings)

    def _new_codec(self, settings: Settings) -> Codec:
        return Codec(
            settings.records,
            max_record_bytes=settings.input.max_record_bytes,
            window=self._settlement.window,
            on_duplicate=self._settlement.log_duplicate,
        )

    async def run(self, chunks_rx: MemoryObjectReceiveStream[Chunk], batches_tx: MemoryObjectSendStream[Batch]) -> None:
        """Pack until the chunks end; codec and batcher never await, so both run in this task."""
        with chunks_rx, batches_tx:
            while True:
                self._apply_answers()
                if self.waits_for_input_since is None:
                    self.waits_for_input_since = anyio.current_time()
                try:
                    chunk = await self._next_chunk(chunks_rx)
                except anyio.EndOfStream:
                    break
                if chunk is None:
                    if (due_at := self._batcher.due_at) is not None and due_at <= anyio.current_time():
                        await self._flush(batches_tx)
                    continue
                self.waits_for_input_since = None
                if not self._settlement.has_skipped_chunks:
                    stream = chunk.stream
                    source = "" if self._hold is None else stream.key
                    with recorded(WorkItem("validate", stream.path, source, chunk.start_offset, chunk.end_offset)):
                        await self._pack(chunk, batches_tx)
            await self._empty(batches_tx)

    async def _next_chunk(self, chunks_rx: MemoryObjectReceiveStream[Chunk]) -> Chunk | None:
        """Wait for a chunk; return None if the open batch is due, or an answer came that events may be waiting for."""
        due_at = self._batcher.due_at
        chunk: Chunk | None = None
        has_ended = False
        with anyio.CancelScope(deadline=math.inf if due_at is None else due_at) as waiting:
            if not self._batcher.waiting_ids:
                return await chunks_rx.receive()
            async with anyio.create_task_group() as race:
                race.start_soon(self._cancel_at_answer, waiting)
                try:
                    chunk = await chunks_rx.receive()
                except anyio.EndOfStream:
                    has_ended = True
                finally:
                    race.cancel_scope.cancel()
        if has_ended:
            raise anyio.EndOfStream
        return chunk  # even if an answer arrived at the same time

    async def _cancel_at_answer(self, waiting: anyio.CancelScope) -> None:
        await self._settlement.wait_for_progress()
        waiting.cancel()

    async def _pack(self, chunk: Chunk, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        now = anyio.current_time()
        latest = self._latest_timestamp()
        path, key, offset = chunk.stream.path, chunk.stream.key, chunk.start_offset
        hold = self._hold if chunk.stream.kind != "replay" else None  # a replay creates no new dead letters
        suspects = [
            place for place in self._suspects.get(key, ()) if place.offset < chunk.end_offset and offset < place.end
        ]
        while offset < chunk.end_offset:
            if not await self._has_room(batches_tx) or chunk.stream.is_ending:
                return
            room_events = min(self._batcher.room_events, _SPAN_RECORDS_MAX)
            if suspects:
                room_events = 1
            elif hold is not None:
                room_events = min(room_events, hold.mistakes.room(chunk.stream))
            encoded: EncodedChunk | None
            if any(place.is_single and place.offset == offset for place in suspects):
                encoded = self._codec.reject_unread(chunk, offset)
            else:
                with at_work(WorkItem("validate", path, key, offset, chunk.end_offset, is_single=bool(suspects))):
                    encoded = self._codec.encode(
                        chunk, offset, room_events=room_events, room_bytes=self._batcher.room_bytes, latest=latest
                    )
            if encoded is None:
                await self._flush(batches_tx)
                continue
            if hold is not None and encoded.span.rejections and (reason := await hold.check(encoded)):
                self._codec.forget(encoded)  # it will be encoded again
                await self._empty(batches_tx)
                await hold.wait(reason)
                latest = self._latest_timestamp()
                continue
            if not self._codec.is_current(encoded):  # an answer arrived while asking for the time
                self._codec.forget(encoded)
                continue
            if hold is not None:
                hold.release(encoded)
            offset = encoded.span.end_offset
            self._settlement.open(encoded.span, now)
            self._batcher.add(encoded, now)
            while self._batcher.is_full or self._batcher.is_congested:
                await self._flush(batches_tx)

    async def _has_room(self, batches_tx: MemoryObjectSendStream[Batch]) -> bool:
        """Wait until the next records may be encoded; False = there will be no room, so skip the rest."""
        settlement, batcher = self._settlement, self._batcher
        while not settlement.has_skipped_chunks:
            self._apply_answers()  # no await between this and adding the records to the window
            if settlement.is_closed:
                settlement.has_skipped_chunks = True
            elif batcher.is_full or batcher.is_congested:
                await self._flush(batches_tx)
            elif settlement.has_room:
                return True
            elif batcher.due_at is not None and settlement.acks.totals.pending <= batcher.events:
                await settlement.save()
                if not settlement.has_room:  # only sending the open batch can make room
                    await self._flush(batches_tx)
            else:
                with anyio.CancelScope(deadline=math.inf if batcher.due_at is None else batcher.due_at) as waiting:
                    await settlement.wait_for_room()
                if waiting.cancelled_caught:
                    await self._flush(batches_tx)  # spans may be open because of events in the open batch
        return False

    def _latest_timestamp(self) -> str:
        return latest_timestamp(self._wall_time(), self._records.max_future_seconds)

    async def _empty(self, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        """Flush all events; wait for the answers that decide whether the last ones are duplicates."""
        while True:
            self._apply_answers()
            if self._batcher.due_at is not None:
                await self._flush(batches_tx)
            elif self._batcher.waiting_ids:
                await self._settlement.wait_for_progress()
            else:
                return

    async def _flush(self, batches_tx: MemoryObjectSendStream[Batch]) -> None:
        batch = self._batcher.take()
        if batch is None:
            return
        try:
            await batches_tx.send(batch)
        except anyio.BrokenResourceError:
            await anyio.sleep_forever()  # all senders have failed; their error cancels this task, too

    def _apply_answers(self) -> None:
        """Add or drop events that were waiting for an answer."""
        settlement, batcher = self._settlement, self._batcher
        if settlement.answers == self._answers_seen:
            return
        self._answers_seen = settlement.answers
        for event_id in tuple(batcher.waiting_ids):
            key = key_of(event_id)
            if settlement.window.is_accepted(key):
                for event in batcher.drop(event_id):
                    settlement.settle_duplicate(event.span, event.ordinal, event.line)
            elif not settlement.window.is_unsettled(key) and batcher.release(event_id):
                settlement.window.admit(key)  # later events with this EventId wait for its answer


def _events_per_batch(settings: Settings) -> int:
    """Limit batches to the events allowed in a second, so that a low rate is even."""
    rate = settings.delivery.rate_limit_events_per_second
    return min(settings.batch.max_events, max(1, int(rate))) if rate else settings.batch.max_events


# Holding back ---------------------------------------------------------------------------------------------------------


class HoldReason(NamedTuple):
    """Why input is held back."""

    reason: str  # a key of `pauses.ADVICE`
    message: str
    remedy: str  # what to do if the run ends because of it
    is_final: bool = False  # waiting does not help
    is_setup_problem: bool = True


class Hold:
    """
    Holds input back while it must not be settled.

    Args:
        senders: Ask the service for the time.
        give_up_after_s: How long a one-shot run waits; None = other runs, which wait indefinitely.
        give_up: Ends the run without settling more of the input.

    Attributes:
        mistakes: Counts the rejections of settled input.
    """

    def __init__(
        self,
        settings: Settings,
        settlement: Settlement,
        senders: SenderPool,
        *,
        give_up_after_s: float | None,
        give_up: Callable[[DeliveryGaveUpError], None],
    ) -> None:
        self._settings = settings
        self._settlement = settlement
        self._senders = senders
        self._give_up = give_up
        self._give_up_after_s = give_up_after_s
        self._recheck = anyio.Event()
        self._trusted_until = -math.inf
        self._reason: HoldReason | None = None
        self._since = 0.0
        self.mistakes = MistakeCounter(settings.records.mistake_limit)

    def pauses(self, now: float, wall_now: float) -> list[Pause]:
        """Return why input is held back; empty if it is not."""
        if (reason := self._reason) is None:
            return []
        ends_s = self._gives_up_at() - now
        ends_at = None if ends_s == math.inf else round(wall_now + ends_s, 3)
        since = round(wall_now - (now - self._since), 3)
        return [Pause(reason.reason, reason.message, ADVICE[reason.reason], since, gives_up_at=ends_at)]

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings; reset the counts if the rules have changed."""
        if settings.records != self._settings.records:
            self.mistakes = MistakeCounter(settings.records.mistake_limit)
        self._settings = settings
        self.recheck()

    def recheck(self) -> None:
        """Recheck held input; must also be called when a stop is requested or the input goes to another process."""
        self._recheck.set()

    @property
    def is_rechecking(self) -> bool:
        return self._reason is not None and self._recheck.is_set()

    async def check(self, encoded: EncodedChunk) -> HoldReason | None:
        """Return why a chunk with rejections must not be settled; None if it may be."""
        if run := self.mistakes.excessive_run(encoded):
            return self._invalid_input(encoded.span.stream, encoded.span.rejections[0], *run)
        records = self.mistakes.suspicious_future(encoded)
        if not records:
            return None
        reason = await self._check_clock(records)
        if reason is None:
            self.mistakes.reset_future()
        return reason

    def release(self, encoded: EncodedChunk) -> None:
        """Count a chunk that will be settled, and end the pause."""
        if self._reason is not None:
            log.info("delivery_resumed", reason=self._reason.reason)
            self._reason = None
        if encoded.span.rejections or self.mistakes.is_counting:
            self.mistakes.add(encoded)

    def _invalid_input(self, stream: Stream, first: Rejection, records: int, is_one_input: bool) -> HoldReason:
        path = shown(stream.path)
        where = f"of {path}" if is_one_input else f"of several inputs, the last of them {path},"
        why = stream.explain(first)
        why = MESSAGES[first.rule] if why == first.message else why
        broken, limit = several(records, "record"), self._settings.records.mistake_limit
        message = (
            f"{broken} {where} broke the rule {first.rule} ({why}) without a valid one in between; "
            f"records.mistake_limit is {limit:,}"
        )
        validate = (
            "producer | shipper validate -" if stream.kind == "spool" else f"shipper validate {shlex.quote(path)}"
        )
        remedy = (
            f"The rest of the input is held back. To see what is wrong, run: {validate}. Correct records.mapping, or "
            "correct or remove the input, and run the same command again; if that many records really are invalid, "
            "raise records.mistake_limit (0 = no limit)"
        )
        return HoldReason("input_unlike_records", message, remedy, is_final=True)

    async def _check_clock(self, records: int) -> HoldReason | None:
        """Ask the service for the time; return None if this machine's clock is right, or was recently."""
        if anyio.current_time() < self._trusted_until:
            return None
        problem = await self._senders.ask_time()
        skew_s = self._senders.skew.seconds
        if problem is None and skew_s <= self._settings.records.max_future_seconds:
            self._trusted_until = anyio.current_time() + _TRUST_S
            return None
        message = f"{several(records, 'record seems', 'records seem')} to come from the future"
        if problem is None:
            message += f", because this machine's clock is {skew_s:,.0f} s behind the service's"
            return HoldReason("clock", message, _SET_CLOCK_REMEDY)
        message += f", and the service's time is unknown: {problem.message}"
        return HoldReason("clock", message, _SET_CLOCK_REMEDY, is_setup_problem=problem.is_setup_problem)

    async def wait(self, reason: HoldReason) -> None:
        """Wait until rechecking makes sense, or skip the rest of the input if it never will."""
        if self._reason is None or self._reason.reason != reason.reason:
            self._since = anyio.current_time()
            log.warning("delivery_paused", reason=reason.reason, message=reason.message)
        self._reason = reason
        is_one_shot = self._give_up_after_s is not None
        if (reason.is_final and is_one_shot) or self._gives_up_at() <= anyio.current_time():
            self._give_up(DeliveryGaveUpError(reason.message, reason.remedy))
        self._recheck = anyio.Event()
        if not self._settlement.is_stopping:
            recheck_at = math.inf if reason.is_final else anyio.current_time() + _RECHECK_S
            with anyio.move_on_at(min(recheck_at, self._gives_up_at())):
                await self._recheck.wait()
        if self._settlement.is_stopping:
            self._settlement.has_skipped_chunks = True

    def _gives_up_at(self) -> float:
        """Return when a one-shot run gives up, on the event loop's clock; early for a setup fault."""
        if self._give_up_after_s is None or self._reason is None:
            return math.inf
        is_hopeless = self._reason.is_setup_problem and not self._settlement.acks.totals.accepted
        fails_fast = is_hopeless and self._settings.delivery.fail_fast
        return self._since + (min(FAIL_FAST_S, self._give_up_after_s) if fails_fast else self._give_up_after_s)


class MistakeCounter:
    """
    Counts the codec's consecutive rejections, without a valid record in between.

    It counts them by input, so that other busy inputs hide nothing, and in total, to detect many small inputs.

    Args:
        limit: Consecutive rejections by one rule to accept; 0 = no limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: Counter[str] = Counter()
        self._by_stream: dict[int, Counter[str]] = {}
        self._future = self._present = 0

    @property
    def is_counting(self) -> bool:
        """Whether a valid record would change a count."""
        return bool(self._all or self._by_stream or self._future)

    def room(self, stream: Stream) -> int:
        """Return how many records may be encoded next without exceeding the limit of dead letters."""
        if not self._limit:
            return _NO_LIMIT
        if not (self._all or self._by_stream or stream.mistakes):
            return self._limit
        most = max(max(counts.values(), default=0) for counts in (self._all, self._counts_of(stream)))
        return max(1, self._limit - most)

    def excessive_run(self, encoded: EncodedChunk) -> tuple[int, bool] | None:
        """
        Return the number of consecutive rejections before a chunk by the rule of its first one, if the limit is
        reached, and whether they are from one input; None if the chunk may be settled.
        """
        stream, rejections = encoded.span.stream, encoded.span.rejections
        if not self._limit or not rejections or encoded.last_good >= 0:
            return None
        rule = rejections[0].rule
        in_stream, in_total = self._counts_of(stream)[rule], self._all[rule]
        most = max(in_stream, in_total)
        return (most, in_stream >= self._limit) if most >= self._limit else None

    def suspicious_future(self, encoded: EncodedChunk) -> int:
        """Return the number of records from the future if they are nearly all; otherwise 0."""
        future, present = self._times_with(encoded)
        return future if future >= _FUTURE_SHARE * present else 0

    def add(self, encoded: EncodedChunk) -> None:
        """Count a chunk that will be settled."""
        stream, rejections = encoded.span.stream, encoded.span.rejections
        self._future, self._present = self._times_with(encoded)
        counts = self._counts_of(stream)
        if encoded.last_good >= 0:
            self._all.clear()
            counts.clear()
            rejections = rejections[bisect_right(rejections, encoded.last_good, key=attrgetter("start_offset")) :]
        rules = [rejection.rule for rejection in rejections]
        self._all.update(rules)
        counts.update(rules)
        self._by_stream.pop(stream.stream_id, None)
        if counts or stream.mistakes:
            self._by_stream[stream.stream_id] = counts
        if len(self._by_stream) > _STREAMS_MAX:
            del self._by_stream[next(iter(self._by_stream))]  # the least recently updated one

    def reset_future(self) -> None:
        """Reset the count of records from the future, because the clock is right."""
        self._future = self._present = 0

    def _times_with(self, encoded: EncodedChunk) -> tuple[int, int]:
        """Return the counts of records from the future and others, including a chunk; reset if most are not."""
        future = sum(map(is_future_timestamp, encoded.span.rejections))
        present = encoded.span.read - len(encoded.span.rejections)
        return (0, 0) if present > future else (self._future + future, self._present + present)

    def _counts_of(self, stream: Stream) -> Counter[str]:
        counts = self._by_stream.get(stream.stream_id)
        return Counter(stream.mistakes) if counts is None else counts
