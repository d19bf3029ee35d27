"""Observes a pipeline: a snapshot every second, and a log line every 30 s."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import anyio
import structlog
from msgspec.structs import asdict, replace

from shipper.model.records import Backlog
from shipper.pipeline.packer import Hold
from shipper.pipeline.senders import SenderPool
from shipper.pipeline.settlement import Settlement
from shipper.sources.joined import Source
from shipper.status.live import Live, PastPause, Pause, Phase
from shipper.status.logs import take_left_out
from shipper.status.pauses import ADVICE

log = structlog.get_logger("pipeline")

SNAPSHOT_INTERVAL_S: Final = 1.0
_REPORT_INTERVAL_S: Final = 30.0
_RATE_WINDOW_S: Final = 10.0


class _Progress(NamedTuple):
    """The progress of a run at a time on the event loop's clock."""

    at: float
    accepted: int
    settled_bytes: int


class Observer:
    """Takes and publishes snapshots of a pipeline, without changing it; `live` is the initial one."""

    def __init__(
        self,
        live: Live,
        *,
        source: Source,
        hold: Hold,
        senders: SenderPool,
        settlement: Settlement,
        publish: Callable[[Live], None],
        wall_time: Callable[[], float],
    ) -> None:
        self._live = live
        self._source = source
        self._hold = hold
        self._senders = senders
        self._settlement = settlement
        self._publish = publish
        self._wall_time = wall_time
        self._progress: deque[_Progress] = deque([_Progress(anyio.current_time(), 0, 0)])
        self._reported_at = anyio.current_time()
        self.phase: Phase = live.phase
        self.reload_error = ""
        self.restart_needed: list[str] = []

    async def run(self) -> None:
        """Take a snapshot once a second until cancelled."""
        while True:
            self.update()
            await anyio.sleep(SNAPSHOT_INTERVAL_S)

    def update(self, outcome: str = "") -> Live:
        """Take and publish a snapshot, and write the log line if it is due; after the end, return the last snapshot."""
        if self._live.outcome:
            return self._live
        live = self._live = self._snapshot(outcome)
        self._publish(live)
        now = anyio.current_time()
        if now >= self._reported_at + _REPORT_INTERVAL_S:
            self._reported_at = now
            _report(live)
        return live

    def end(self, outcome: str) -> Live:
        live = self.update(outcome)
        if left_out := take_left_out():
            log.info("lines_left_out", **left_out)
        return live

    def _snapshot(self, outcome: str) -> Live:
        now, wall_now, before = anyio.current_time(), self._wall_time(), self._live
        settlement, senders, backlog = self._settlement, self._senders, self._source.backlog()
        totals, counts, gate = settlement.acks.totals, senders.counts, senders.gate
        earliest = self._earliest_progress(_Progress(now, totals.accepted, settlement.settled_bytes))
        seconds = max(now - earliest.at, SNAPSHOT_INTERVAL_S)
        p50, p95 = before.latency_p50_seconds, before.latency_p95_seconds
        if latencies := counts.take_latencies():
            p50, p95 = _quantile(latencies, 0.5), _quantile(latencies, 0.95)
        pauses = self._pauses(now, wall_now, backlog)
        group = backlog.group and replace(backlog.group, handed_over=settlement.handed_over)
        return replace(
            before,
            phase=self.phase,
            at=wall_now,
            outcome=outcome,
            input_ended=self._source.is_exhausted,
            **asdict(totals),
            ever_read=settlement.ever_read,
            **asdict(replace(backlog, group=group)),
            dead_letters=settlement.acks.reasons.copy(),
            settled_bytes=settlement.settled_bytes,
            accepted_per_second=round((totals.accepted - earliest.accepted) / seconds, 1),
            settled_bytes_per_second=round((settlement.settled_bytes - earliest.settled_bytes) / seconds, 1),
            oldest_unsettled_seconds=self._oldest_unsettled_s(now),
            last_accepted_at=wall_now if totals.accepted > before.accepted else before.last_accepted_at,
            commits=settlement.commits,
            batches=counts.batches,
            requests=dict(counts.by_status),
            retries=dict(counts.by_cause),
            latency_p50_seconds=p50,
            latency_p95_seconds=p95,
            latency_counts=counts.latency_counts.copy(),
            latency_total_seconds=counts.latency_total_s,
            in_flight=gate.in_flight,
            concurrency_limit=gate.limit.limit,
            token_expires_at=senders.token_expires_at,
            certificate_expires_at=senders.certificate_expires_at,
            pauses=pauses,
            last_pause=self._last_pause(pauses, wall_now),
            reload_error=self.reload_error,
            restart_needed=self.restart_needed,
        )

    def _earliest_progress(self, progress: _Progress) -> _Progress:
        """Append progress; return the one at the beginning of the window."""
        self._progress.append(progress)
        while self._progress[1].at <= progress.at - _RATE_WINDOW_S:
            self._progress.popleft()
        return self._progress[0]

    def _oldest_unsettled_s(self, now: float) -> float | None:
        oldest_at, blockage = self._settlement.acks.oldest_at, self._settlement.blockage
        since = [at for at in (oldest_at, blockage and blockage.since) if at is not None]
        return round(now - min(since), 3) if since else None

    def _pauses(self, now: float, wall_now: float, backlog: Backlog) -> list[Pause]:
        pauses = self._senders.pauses(now, wall_now) + self._hold.pauses(now, wall_now)
        obstacles = backlog.group.obstacles if backlog.group else ()
        group = [Pause(item.reason, item.message, ADVICE[item.reason], item.since) for item in obstacles]
        blockage = self._settlement.blockage
        if blockage is not None and blockage.reason not in {pause.reason for pause in group}:
            since = round(wall_now - (now - blockage.since), 3)
            group.append(Pause(blockage.reason, blockage.message, ADVICE.get(blockage.reason, ""), since))
        return pauses + group

    def _last_pause(self, pauses: list[Pause], wall_now: float) -> PastPause | None:
        reasons = {pause.reason for pause in pauses}
        ended = [pause for pause in self._live.pauses if pause.reason not in reasons]
        first = min(ended, key=lambda pause: pause.since, default=None)
        return PastPause(first.reason, first.since, wall_now) if first else self._live.last_pause


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _report(live: Live) -> None:
    optional = {
        "lag_records": live.group.lag_records if live.group else 0,
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
        **{name: value for name, value in optional.items() if value},
    )
