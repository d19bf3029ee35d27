"""Observes a pipeline: a snapshot every second, and a line in the log every half minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

import anyio
import structlog
from msgspec.structs import replace

from shipper.model.group import Obstacle
from shipper.model.records import Backlog, Totals
from shipper.pipeline.settlement import Settlement
from shipper.pipeline.stages import Stages
from shipper.status.live import Live, Pause, Phase
from shipper.status.logs import take_left_out
from shipper.status.pauses import ADVICE

log = structlog.get_logger("pipeline")

LOOK_INTERVAL_S: Final = 1.0
_REPORT_INTERVAL_S: Final = 30.0
_RATE_WINDOW_S: Final = 10.0


class _Source(Protocol):
    @property
    def is_exhausted(self) -> bool: ...

    def backlog(self) -> Backlog: ...


class _Count(NamedTuple):
    """How far things were at a moment of the event loop's clock."""

    at: float
    accepted: int
    settled_bytes: int


class Observer:
    """
    Looks at the parts of a pipeline; nothing that it does changes them.

    Args:
        live: The first snapshot.
        publish: Called with every snapshot, in the event loop.
        wall_time: Seconds since the epoch.

    Attributes:
        phase, reload_error, restart_needed: For the snapshots; the pipeline sets them.
    """

    def __init__(
        self,
        live: Live,
        *,
        settlement: Settlement,
        stages: Stages,
        source: _Source,
        publish: Callable[[Live], None],
        wall_time: Callable[[], float],
    ) -> None:
        self._live = live
        self._settlement = settlement
        self._stages = stages
        self._source = source
        self._publish = publish
        self._wall_time = wall_time
        self._counts: deque[_Count] = deque([_Count(anyio.current_time(), 0, 0)])
        self._reported_at = anyio.current_time()
        self.phase: Phase = live.phase
        self.reload_error = ""
        self.restart_needed: list[str] = []

    @property
    def totals(self) -> Totals:
        """What became of the records so far."""
        return self._settlement.acks.totals

    async def run(self) -> None:
        """Look once a second until this is cancelled."""
        while True:
            self.look()
            await anyio.sleep(LOOK_INTERVAL_S)

    def look(self, outcome: str = "") -> Live:
        """Make and publish a snapshot, and write the line in the log if it is due; after the end, return the last."""
        if self._live.outcome:
            return self._live
        live = self._live = self._stages.seen(self._snapshot(outcome))
        self._publish(live)
        now = anyio.current_time()
        if now >= self._reported_at + _REPORT_INTERVAL_S:
            self._reported_at = now
            _report(live)
        return live

    def end(self, outcome: str) -> Live:
        """Make and publish the last snapshot."""
        live = self.look(outcome)
        if left_out := take_left_out():
            log.info("lines_left_out", **left_out)
        return live

    def _snapshot(self, outcome: str) -> Live:
        now, wall_now = anyio.current_time(), self._wall_time()
        totals, backlog = self.totals, self._source.backlog()
        earliest = self._note_counts(_Count(now, totals.accepted, self._settlement.settled_bytes))
        seconds = max(now - earliest.at, LOOK_INTERVAL_S)
        return replace(
            self._live,
            phase=self.phase,
            at=wall_now,
            outcome=outcome,
            input_ended=self._source.is_exhausted,
            read=totals.read,
            accepted=totals.accepted,
            dead_lettered=totals.dead_lettered,
            duplicates=totals.duplicates,
            pending=totals.pending,
            dead_letters=self._settlement.acks.reasons.copy(),
            settled_bytes=self._settlement.settled_bytes,
            total_bytes=backlog.total_bytes,
            accepted_per_second=round((totals.accepted - earliest.accepted) / seconds, 1),
            settled_bytes_per_second=round((self._settlement.settled_bytes - earliest.settled_bytes) / seconds, 1),
            lag_bytes=backlog.lag_bytes,
            unmatched=list(backlog.unmatched),
            unreadable=list(backlog.unreadable),
            unreadable_count=backlog.unreadable_count,
            has_looked=backlog.is_known,
            spool_bytes=backlog.spool_bytes,
            oldest_unsettled_seconds=self._oldest_unsettled_s(now),
            unreachable_bytes=backlog.unreachable_bytes,
            last_accepted_at=wall_now if totals.accepted > self._live.accepted else self._live.last_accepted_at,
            pauses=self._pauses(now, wall_now, backlog.group.obstacles if backlog.group else ()),
            commits=self._settlement.commits,
            group=backlog.group and replace(backlog.group, handed_over=self._settlement.handed_over),
            reload_error=self.reload_error,
            restart_needed=self.restart_needed,
        )

    def _note_counts(self, count: _Count) -> _Count:
        """Add the counts of a moment; return those at the beginning of the window."""
        self._counts.append(count)
        while self._counts[1].at <= count.at - _RATE_WINDOW_S:
            self._counts.popleft()
        return self._counts[0]

    def _oldest_unsettled_s(self, now: float) -> float | None:
        since = [each for each in (self._settlement.acks.oldest_at, self._settlement.full_since) if each is not None]
        return round(now - min(since), 3) if since else None

    def _pauses(self, now: float, wall_now: float, obstacles: Iterable[Obstacle]) -> list[Pause]:
        obstacle, since = self._settlement.obstacle, self._settlement.full_since
        found = [Pause(each.reason, each.message, ADVICE[each.reason], each.since) for each in obstacles]
        if since is not None and obstacle.reason not in {each.reason for each in found}:
            advice = ADVICE.get(obstacle.reason, "")
            found.append(Pause(obstacle.reason, obstacle.message, advice, round(wall_now - (now - since), 3)))
        return found


def _report(live: Live) -> None:
    """Write what a person who reads only the log needs to know."""
    more = {
        "paused": ", ".join(pause.reason for pause in live.pauses),
        "troubles": live.troubles,
        "left_out": take_left_out(),
    }
    log.info(
        "self_report",
        read=live.read,
        accepted=live.accepted,
        dead_lettered=live.dead_lettered,
        duplicates=live.duplicates,
        pending=live.pending,
        accepted_per_second=live.accepted_per_second,
        lag_bytes=live.lag_bytes,
        oldest_unsettled_seconds=live.oldest_unsettled_seconds,
        in_flight=live.in_flight,
        requests=sum(live.requests.values()),
        retries=sum(live.retries.values()),
        **{name: value for name, value in more.items() if value},
    )
