"""
Hold back input that looks wrong, or while this machine's clock is wrong. In a one-shot run, end it.

`Brake` counts, and detects an input that is refused almost entirely for one reason, before it fills the dead letters.
There are two such reasons. An input may contain something else than records: another program's log, wrong column
names. Or this machine's clock is behind, so that good records seem to come from the future. `Hold` asks the service for
the time, and waits until a new check makes sense.
"""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Final, NamedTuple

import anyio
import structlog

from shipper.codec import MESSAGES, is_from_the_future
from shipper.config.settings import Settings
from shipper.delivery.credentials import ClockSkew
from shipper.delivery.gate import FAIL_FAST_S
from shipper.delivery.verdicts import Verdict
from shipper.model.errors import HeldBackError
from shipper.model.records import EncodedChunk, Stream, shown
from shipper.model.units import several
from shipper.pipeline.settlement import Settlement
from shipper.status.live import Pause
from shipper.status.pauses import ADVICE

log = structlog.get_logger("pipeline")

_FUTURE_MIN: Final = 20  # records from the future that are too many for an accident
_FUTURE_SHARE: Final = 9  # so many of them for one that is not
_STREAMS_MAX: Final = 1_000
_NO_LIMIT: Final = 1 << 62

_LOOK_S: Final = 5.0  # between two questions for the time, while the clock may be wrong
_TRUST_S: Final = 60.0  # for so long no other question is asked
_SET_THE_CLOCK: Final = (
    "Nothing is lost. Set this machine's clock, such as by NTP, and run the same command again; if the service's clock "
    "is the wrong one, or the records do come from the future, raise records.max_future_seconds"
)


class Mistakes(NamedTuple):
    """
    Refusals by one rule with no good record between them.

    Attributes:
        is_of_one: They are of one input.
    """

    rule: str
    records: int
    is_of_one: bool


class Brake:
    """
    Counts the refusals of the codec that have no good record between them.

    They count for each input by itself, so that a busy one beside it hides nothing, and for all of them together, so
    that many small ones are noticed, too. What is replayed is no input: it makes no more dead letters.

    Args:
        limit: Refusals by one rule that are believed; 0 = all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._all: Counter[str] = Counter()
        self._by_stream: dict[int, Counter[str]] = {}
        self._future = self._present = 0

    def __repr__(self) -> str:
        return f"<Brake {dict(self._all)} of {self._limit}>"

    @property
    def is_watching(self) -> bool:
        """Whether a good record would change anything."""
        return bool(self._all or self._by_stream or self._future)

    def room(self, stream: Stream) -> int:
        """Return how many records may be looked at together, so that no more than the limit become dead letters."""
        if not self._limit or stream.kind == "replay":
            return _NO_LIMIT
        if not (self._all or self._by_stream or stream.mistakes):
            return self._limit
        most = max(max(counts.values(), default=0) for counts in (self._all, self._of(stream)))
        return max(1, self._limit - most)

    def mistakes(self, piece: EncodedChunk) -> Mistakes | None:
        """Return the refusals before a piece that would be one too many by the same rule; None if it may be settled."""
        stream, rejections = piece.span.stream, piece.span.rejections
        if not self._limit or stream.kind == "replay" or not rejections or piece.last_good >= 0:
            return None
        rule = rejections[0].rule
        own, together = self._of(stream)[rule], self._all[rule]
        if max(own, together) < self._limit:
            return None
        return Mistakes(rule, max(own, together), is_of_one=own >= self._limit)

    def seems_late(self, piece: EncodedChunk) -> int:
        """Return how many records seem to come from the future, if that is nearly all of many; else 0."""
        if piece.span.stream.kind == "replay":
            return 0
        future, present = self._times_with(piece)
        return future if future >= max(_FUTURE_MIN, _FUTURE_SHARE * present) else 0

    def note(self, piece: EncodedChunk) -> None:
        """Count a piece that is to be settled."""
        stream, rejections = piece.span.stream, piece.span.rejections
        if stream.kind == "replay":
            return
        self._future, self._present = self._times_with(piece)
        own = self._of(stream)
        if piece.last_good >= 0:
            self._all.clear()
            own.clear()
            rejections = rejections[bisect_right(rejections, piece.last_good, key=attrgetter("start_offset")) :]
        rules = [rejection.rule for rejection in rejections]
        self._all.update(rules)
        own.update(rules)
        self._keep(stream, own)

    def trust_the_clock(self) -> None:
        """Forget what seemed to come from the future, as it does."""
        self._future = self._present = 0

    def _times_with(self, piece: EncodedChunk) -> tuple[int, int]:
        """Count records from the future and others, as far as they are worth counting."""
        future = sum(map(is_from_the_future, piece.span.rejections))
        present = piece.span.records - len(piece.span.rejections)
        return (0, 0) if present > future else (self._future + future, self._present + present)

    def _of(self, stream: Stream) -> Counter[str]:
        found = self._by_stream.get(stream.stream_id)
        return Counter(stream.mistakes) if found is None else found

    def _keep(self, stream: Stream, counts: Counter[str]) -> None:
        self._by_stream.pop(stream.stream_id, None)
        if counts or stream.mistakes:
            self._by_stream[stream.stream_id] = counts
        if len(self._by_stream) > _STREAMS_MAX:
            del self._by_stream[next(iter(self._by_stream))]  # the one that was noted longest ago


class Halt(NamedTuple):
    """
    Why nothing more of the input is settled.

    Attributes:
        reason: A key of `pauses.ADVICE`.
        message: What happened, for a person.
        way_out: What to do if the run ends because of it.
        is_final: Waiting alone changes nothing.
        is_set_up_fault: Somebody has to put something right.
    """

    reason: str
    message: str
    way_out: str
    is_final: bool = False
    is_set_up_fault: bool = True


class Hold:
    """
    Args:
        ask_time: Has the service's clock noted in `skew`; returns why that could not be done, None if it was.
        give_up_after_s: For how long a one-shot run waits; None = it is none, and waits for ever.
        wall_time: Seconds since the epoch.
    """

    def __init__(
        self,
        settings: Settings,
        settlement: Settlement,
        *,
        skew: ClockSkew,
        ask_time: Callable[[], Awaitable[Verdict | None]],
        give_up_after_s: float | None,
    ) -> None:
        self._settings = settings
        self._settlement = settlement
        self._skew = skew
        self._ask_time = ask_time
        self._give_up_after_s = give_up_after_s
        self._changed = anyio.Event()
        self._trusted_until = -math.inf
        self._halt: Halt | None = None
        self._since = 0.0

    def __repr__(self) -> str:
        return f"<Hold {self._halt.reason if self._halt else 'free'}>"

    def pauses(self, wall_now: float) -> list[Pause]:
        """Return why the input is held back; empty if it is not."""
        if self._halt is None:
            return []
        now, advice = anyio.current_time(), ADVICE[self._halt.reason]
        ends_s = self._gives_up_at() - now
        ends_at = None if ends_s == math.inf else round(wall_now + ends_s, 3)
        since = round(wall_now - (now - self._since), 3)
        return [Pause(self._halt.reason, self._halt.message, advice, since, gives_up_at=ends_at)]

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, and check again what is held back."""
        self._settings = settings
        self._changed.set()

    def look_again(self) -> None:
        """Check again what is held back: the input may be another process's business now."""
        self._changed.set()

    @property
    def is_looking(self) -> bool:
        """Whether what is held back is being checked again."""
        return self._halt is not None and self._changed.is_set()

    # Why -----------------------------------------------------------------------------------------------------------

    def unlike(self, stream: Stream, mistakes: Mistakes) -> Halt:
        """Return the halt for an input that is refused almost entirely."""
        path = shown(stream.path)
        where = f"of {path}" if mistakes.is_of_one else f"of several inputs, the last of them {path},"
        refused = several(mistakes.records, f"record {where} was", f"records in a row {where} were")
        message = (
            f"{refused} refused by the rule {mistakes.rule} "
            f"({MESSAGES[mistakes.rule]}), with no good one between; records.mistake_limit is "
            f"{self._settings.records.mistake_limit:,}"
        )
        validate = (
            "producer | shipper validate -" if stream.kind == "spool" else f"shipper validate {shlex.quote(path)}"
        )
        way_out = (
            f"The rest is untouched. See what is wrong with: {validate}. Fix records.mapping, or fix or remove the "
            "input, and run the same command again; if that many records really are invalid, raise "
            "records.mistake_limit (0 = no limit)"
        )
        return Halt("input_unlike_records", message, way_out, is_final=True)

    async def late_clock(self, records: int) -> Halt | None:
        """Return why it is this machine's clock that makes records seem to come from the future; None if it is not."""
        if anyio.current_time() < self._trusted_until:
            return None
        problem = await self._ask_time()
        if problem is None and self._skew.seconds <= self._settings.records.max_future_seconds:
            self._trusted_until = anyio.current_time() + _TRUST_S
            return None
        message = f"{several(records, 'record seems', 'records seem')} to come from the future"
        if problem is None:
            message += f", as this machine's clock is {self._skew.seconds:,.0f} s behind the service's"
            return Halt("clock", message, _SET_THE_CLOCK)
        message += f", and the service cannot be asked for the time: {problem.message}"
        return Halt("clock", message, _SET_THE_CLOCK, is_set_up_fault=problem.is_set_up_fault)

    # Waiting -------------------------------------------------------------------------------------------------------

    async def wait(self, halt: Halt) -> None:
        """Wait until a new check makes sense, or skip the rest of the input if it never will."""
        if self._halt is None or self._halt.reason != halt.reason:
            self._since = anyio.current_time()
            log.warning("delivery_paused", reason=halt.reason, message=halt.message)
        self._halt = halt
        is_one_shot = self._give_up_after_s is not None
        if (halt.is_final and is_one_shot) or self._gives_up_at() <= anyio.current_time():
            self._settlement.leave_rest(HeldBackError(halt.message, halt.way_out))
            return
        self._changed = anyio.Event()
        longest_s = math.inf if halt.is_final else _LOOK_S
        with anyio.move_on_at(min(anyio.current_time() + longest_s, self._gives_up_at())):
            async with anyio.create_task_group() as either:
                for event in (self._changed, self._settlement.stopping):
                    either.start_soon(_until, event, either.cancel_scope)
        if self._settlement.stopping.is_set():
            self._settlement.leave_rest()

    def end(self) -> None:
        """Report that the input is no longer held back."""
        if self._halt is not None:
            log.info("delivery_resumed", reason=self._halt.reason)
            self._halt = None

    def _gives_up_at(self) -> float:
        """Return when a one-shot run is given up, on the event loop's clock; a fault of the set-up ends it soon."""
        if self._give_up_after_s is None or self._halt is None:
            return math.inf
        is_hopeless = self._halt.is_set_up_fault and not self._settlement.acks.totals.accepted
        is_hasty = is_hopeless and self._settings.delivery.fail_fast
        return self._since + (min(FAIL_FAST_S, self._give_up_after_s) if is_hasty else self._give_up_after_s)


async def _until(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
