"""
Flow control for all requests to the service: concurrency, rate, pauses and probes.

While the service accepts batches, the gate admits as many requests as the concurrency limit allows, at the configured
rate. It shuts for all senders when the service asks for a wait, is unavailable, or refuses requests for a reason other
than their records. While it is shut, one sender at a time probes with its batch, in the order of arrival, so that one
bad batch cannot keep the gate shut. The first acceptance opens it; the concurrency then grows again from two.

The concurrency limit is either fixed or adapts to what the service can handle.

Source:
    Additive increase by one per round trip if the limit was reached, decrease by a tenth on congestion: Vector's
    adaptive request concurrency. Comparing the latency with a baseline without queueing: TCP Vegas. The minimum
    latency (Netflix's VegasLimit) is too low a baseline where latency varies; a long average (Gradient2Limit) includes
    our own queue. Therefore the baseline is measured again at half the concurrency when in doubt. The constants were
    chosen with the simulation in `tests/model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import Final, NamedTuple

import anyio
import structlog

from shipper.config.settings import DeliverySettings
from shipper.delivery.verdicts import Action, Verdict
from shipper.delivery.waits import full_jitter_s
from shipper.model.errors import DeliveryGaveUpError

log = structlog.get_logger("delivery")

_FLOOR: Final = 4  # latency never lowers the limit below this, where it mainly measures our own event loop
_NOISE: Final = 0.07  # standard error of the mean latency (log scale) at which a round may end
_LONGEST_ROUND: Final = 4  # round trips after which it ends anyway, so that the limit can follow
_CALM: Final = 1.25  # slowdowns up to this factor are noise, of the round and of the baseline
_SUSPICIOUS: Final = 1.4  # slowdown that is more than noise even in a single round
_PATIENCE: Final = 20  # rounds until a doubtful baseline is measured again, or the limit may exceed the ceiling
_HALVED: Final = 0.55  # if half the concurrency lowers latency to this fraction, the other half was only queueing
_DECREASE: Final = 0.9
_ANSWERS_OWED: Final = 50  # answers per congestion until its limit is tried again; keeps errors near 2 %


class ConcurrencyLimit:
    """A fixed limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # maximum number of requests in flight, at least 1

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None:
        """Record an answer without congestion; `in_flight` includes its own request."""

    def note_congestion(self, *, started_at: float, now: float) -> None:
        """Record that a request sent at `started_at` was throttled, met an overloaded service, or timed out."""


class AdaptiveLimit(ConcurrencyLimit):
    """
    A limit that doubles until the first sign of congestion, then approaches `max_limit` step by step.

    A latency far above the baseline, or slightly above it for many rounds, starts a probe at half the limit. The
    latency during the probe becomes the new baseline. If latency fell, our own requests were queueing, and the limit is
    lowered to the number that was actually in service. Otherwise the service itself has become slower: the limit is
    restored, and probed again some rounds later.
    """

    def __init__(self, max_limit: int) -> None:
        super().__init__(min(_FLOOR, max_limit))
        self._max_limit = self._ceiling = max_limit  # the ceiling applies while answers are owed
        self._owed_answers = self._doubtful_rounds = 0
        self._is_doubling = self._is_new_congestion = True
        self._is_used = self._is_baseline_raised = False
        self._settling_since = self._decreased_at = -math.inf
        self._logarithms: list[float] = []  # of the round's latencies; outliers affect their mean less
        self._spread, self._latency, self._baseline = 0.0, 0.0, math.inf
        self._probe: tuple[int, float] | None = None  # limit and latency before the probe

    def note_answer(self, *, seconds: float, in_flight: int, now: float) -> None:
        self._owed_answers = max(0, self._owed_answers - 1)
        if now - seconds <= self._settling_since:
            return
        self._settling_since = -math.inf
        self._is_used |= in_flight >= self.limit
        self._logarithms.append(math.log(max(seconds, 1e-6)))
        longest = self.limit * (1 if self._is_doubling and not self._probe else _LONGEST_ROUND)
        if len(self._logarithms) >= max(self.limit, min((self._spread / _NOISE) ** 2, longest)):
            self._close_round(now)

    def note_congestion(self, *, started_at: float, now: float) -> None:
        self._owed_answers = min(self._owed_answers + _ANSWERS_OWED, _ANSWERS_OWED * self._max_limit)
        if started_at < self._decreased_at:
            return
        self._decreased_at = now
        if self._is_new_congestion:
            self._ceiling = max(1, self.limit - 1)
        self._is_new_congestion = self._is_doubling = False
        self._probe = None
        self._jump(max(1, int(self.limit * _DECREASE)), now)

    def _close_round(self, now: float) -> None:
        mean = fmean(self._logarithms)
        self._spread += (math.sqrt(fmean((logarithm - mean) ** 2 for logarithm in self._logarithms)) - self._spread) / 4
        self._latency = math.exp(mean)
        if self._probe:
            self._conclude(*self._probe, now)
        elif self._is_used:
            self._adjust(now)
        self._is_new_congestion = True
        self._is_used = False
        self._logarithms.clear()

    def _adjust(self, now: float) -> None:
        if self._latency < self._baseline / _CALM:
            self._baseline = self._latency
        slowdown = self._latency / self._baseline
        self._doubtful_rounds += slowdown > _CALM or self._is_baseline_raised
        if slowdown > _SUSPICIOUS or self._doubtful_rounds >= _PATIENCE:
            self._halve(now)
        elif self._is_doubling:
            self._jump(min(2 * self.limit, self._max_limit), now)
            self._is_doubling = self.limit < self._max_limit
        elif slowdown <= _CALM:
            goal = self.limit + len(self._logarithms) // self.limit  # plus one per round trip
            self.limit = max(self.limit, min(goal, self._ceiling if self._owed_answers else self._max_limit))

    def _halve(self, now: float) -> None:
        self._probe = self.limit, self._latency
        self._jump(min(self.limit, max(_FLOOR, self.limit // 2)), now)

    def _conclude(self, limit: int, latency: float, now: float) -> None:
        fall = self._latency / latency
        self._is_doubling &= fall >= 1 / _CALM
        if fall < _HALVED and self.limit > _FLOOR:
            self._halve(now)
            return
        self._probe, self._doubtful_rounds = None, 0
        self._is_baseline_raised = self._latency > self._baseline * _CALM
        self._baseline = self._latency
        in_service = max(self.limit, math.ceil(limit * fall * _CALM))  # Little's law, with a margin for noise
        if in_service < limit:
            self._ceiling, self._owed_answers = in_service, _PATIENCE * in_service
        self._jump(min(limit, in_service), now)

    def _jump(self, limit: int, now: float) -> None:
        """Change the limit at once; the next round begins with the first answer to a request sent under it."""
        self.limit = limit
        self._settling_since = now
        self._is_used = False
        self._logarithms.clear()


_OUTAGE_FAILURES: Final = 5  # consecutive failures, across all senders, that count as an outage
# Maximum time between probes of an unavailable service: harmless for it, and its recovery is noticed soon. For problems
# that a person has to fix, the backoff grows up to `delivery.retry_max_seconds`.
_OUTAGE_PROBE_MAX_S: Final = 5.0
# How long a setup problem is tolerated before the first acceptance: secrets may still be being deployed.
FAIL_FAST_S: Final = 5.0
TICK_S: Final = 1.0
_SUSPENDED_MIN_S: Final = 2.0  # less may be due to a busy machine
_LIMITS: Final = {"throttled", "quota"}
_BRAKES: Final = {"systematic_rejection", "too_large"}  # reasons of `accept_refusals`
_PASSING: Final = {"unavailable", *_LIMITS}
_LONGEST_WAIT_WHILE_STOPPING_S: Final = 1.0
_FIX_IT: Final = (
    "To test it: shipper check --online. Nothing is lost: the same command continues from here; with "
    "delivery.fail_fast = false it waits until the problem is fixed"
)


class Admission(NamedTuple):
    """The admission of one request."""

    started_at: float  # on the gate's clock, seconds
    in_flight: int  # requests in flight at that time, including this one
    is_probe: bool  # admitted while the gate was shut


class Gate:
    """
    Admits requests; shared by all senders of a pipeline.

    Args:
        give_up_after_s: End the run after this time without an acceptance; None = never. With `delivery.fail_fast`, a
            setup problem before the first acceptance ends it sooner.

    Attributes:
        reason: Why delivery pauses, one word; empty while the gate is open.
        problem: What happened, for users.
        failing_since: Time of the first failure since the last acceptance, or of an acceptance during a wait that the
            service asked for; None while there are no failures.
        shut_at: When the gate was shut for this reason.
        probe_at: When the next probe may be sent, if the gate is shut.
    """

    def __init__(self, settings: DeliverySettings, *, give_up_after_s: float | None, rng: Random) -> None:
        self._settings = settings
        self._give_up_after_s = give_up_after_s
        self._rng = rng
        fixed = settings.concurrency
        self.limit = ConcurrencyLimit(fixed) if isinstance(fixed, int) else AdaptiveLimit(settings.max_concurrency)
        self._turn = anyio.Lock(fast_acquire=True)
        self._changed = anyio.Event()
        self._grown = anyio.Event()
        self._ramp = math.inf  # additional limit of requests in flight after a pause
        self._seconds_per_event = _seconds_per_event(settings)
        self._paced_until = -math.inf
        self._held_until = -math.inf
        self._failures = 0
        self._probes = 0
        self._refusals = 0
        self._may_fail_fast = give_up_after_s is not None and settings.fail_fast
        self._setup_fails_since: float | None = None
        self._ticked_at: float | None = None
        self._is_hurried = False
        self._woken = anyio.Event()  # interrupts `sleep`
        self._is_finished = False
        self.reason = self.problem = ""
        self.failing_since: float | None = None
        self.in_flight = 0
        self.acceptances = 0  # of batches or parts
        self.shut_at = -math.inf
        self.probe_at = -math.inf

    def __repr__(self) -> str:
        return f"<Gate {self.reason or 'open'}, {self.in_flight} in flight of {self.limit.limit}>"

    # Admission ---------------------------------------------------------------------------------------------------

    async def enter(self, events: int) -> Admission:
        """Wait until a request may be sent, then `leave` must be called; raise `DeliveryGaveUpError` in the end."""
        async with self._turn:  # senders probe in the order of this lock's queue
            while (wait_s := self._wait_s()) > 0:
                patience_s = self._patience_s()
                changed = self._changed
                with anyio.move_on_after(min(wait_s, patience_s)):
                    await changed.wait()
            now = anyio.current_time()
            if self._seconds_per_event:
                self._paced_until = max(now, self._paced_until) + events * self._seconds_per_event
            self.in_flight += 1
            return Admission(now, self.in_flight, bool(self.reason))

    def refund(self, events: int) -> None:
        """Take back what admitted events that are not sent have used of the rate limit."""
        self._paced_until -= events * self._seconds_per_event
        self._notify()

    @property
    def wait_s(self) -> float:
        """The minimum time until the next probe; 0 while the gate is open."""
        return max(0.0, max(self._held_until, self.probe_at) - anyio.current_time()) if self.reason else 0.0

    def leave(self) -> None:
        """Note that a request has ended; the caller must note its outcome before the next await."""
        self.in_flight -= 1
        self._notify()

    def _wait_s(self) -> float:
        """Return the time until the next admission; infinite = until `_changed` is set."""
        now = anyio.current_time()
        wait_s = max(self._held_until, self._paced_until) - now
        if self.reason:
            return math.inf if self.in_flight else max(wait_s, self.probe_at - now)
        return math.inf if self.in_flight >= min(self.limit.limit, self._ramp) else wait_s

    def _patience_s(self) -> float:
        """Return how much longer to wait for an acceptance; raise if that time is over."""
        if self._ticked_at is not None:
            self.tick()
        now = anyio.current_time()
        if self._fails_fast_at() <= now:
            raise self._gave_up("nothing has been accepted yet", _FIX_IT)
        if self.in_flight:  # may be accepted, such as the first request after the process was suspended
            return self._fails_fast_at() - now
        if self._gives_up_at() <= now:
            raise self._gave_up(f"nothing was accepted for {self._give_up_after_s:g} s")
        return self.gives_up_at - now

    def _gave_up(self, problem: str, remedy: str = "") -> DeliveryGaveUpError:
        reason = "" if self.reason in _PASSING else self.reason  # temporary problems need no advice
        return DeliveryGaveUpError(f"{self.problem}; {problem}", remedy, reason=reason)

    @property
    def gives_up_at(self) -> float:
        """When the run ends unless something is accepted, on the gate's clock; infinite = never."""
        return min(self._gives_up_at(), self._fails_fast_at())

    def _gives_up_at(self) -> float:
        if self._give_up_after_s is None or self.failing_since is None:
            return math.inf
        return self.failing_since + self._give_up_after_s

    def _fails_fast_at(self) -> float:
        return math.inf if self._setup_fails_since is None else self._setup_fails_since + FAIL_FAST_S

    def tick(self) -> None:
        """Note that time passes, every `TICK_S`; while the process is suspended, it does not count as failing."""
        now = anyio.current_time()
        missed_s = 0.0 if self._ticked_at is None else now - self._ticked_at - TICK_S
        self._ticked_at = now
        if missed_s > _SUSPENDED_MIN_S:
            if self.failing_since is not None:
                self.failing_since = min(now, self.failing_since + missed_s)
            if self._setup_fails_since is not None:
                self._setup_fails_since = min(now, self._setup_fails_since + missed_s)

    async def sleep(self, seconds: float) -> None:
        """Wait; end early on `hurry` (after at most 1 s), on `retry`, and when it is time to give up."""
        with anyio.move_on_after(min(seconds, self._patience_s())):
            await self._woken.wait()
            if self._is_hurried:
                await anyio.sleep(self._rng.uniform(0, min(seconds, _LONGEST_WAIT_WHILE_STOPPING_S)))

    def backoff_s(self, attempt: int) -> float:
        """Draw a sender's backoff after a failure; 0 while the gate is shut, because `enter` waits then."""
        return 0.0 if self.reason else self._jitter_s(attempt, self._settings.retry_max_seconds)

    # Control -----------------------------------------------------------------------------------------------------

    async def is_needed(self, index: int) -> bool:
        """Wait until the limit allows for sender number `index` (from 0); return False after `finish`."""
        while index >= self.limit.limit and not self._is_finished:
            await self._grown.wait()
        return not self._is_finished

    def finish(self) -> None:
        """Signal that there are no more batches."""
        self._is_finished = True
        self._grown.set()

    def reconfigure(self, settings: DeliverySettings) -> None:
        """Apply new settings, and allow a probe at once, because they may have fixed the problem."""
        self._settings = settings
        self._seconds_per_event = _seconds_per_event(settings)
        self._paced_until = anyio.current_time()
        self.probe_at = -math.inf
        self._probes = 0
        if self.reason in _BRAKES and settings.poison_limit > self._refusals:
            self._open()
        self._notify()

    def hurry(self) -> None:
        """Shorten all backoffs, because a stop was requested; waits that the service asked for remain."""
        self._is_hurried = True
        self._woken.set()
        self.probe_at = min(self.probe_at, anyio.current_time() + self._jitter_s(1, _LONGEST_WAIT_WHILE_STOPPING_S))
        self._notify()

    def retry(self) -> None:
        """End all waits, including those that the service asked for, because the user asked for an attempt now."""
        self._held_until = self.probe_at = -math.inf
        self._probes = 0
        self._woken.set()
        if not self._is_hurried:
            self._woken = anyio.Event()
        self._notify()

    @property
    def is_probing(self) -> bool:
        """Whether the gate is shut, and no probe has had a result since then or since a `retry`."""
        return bool(self.reason) and not self._probes

    # Outcomes ----------------------------------------------------------------------------------------------------

    def note_accepted(self, admission: Admission) -> None:
        """Record that the service accepted a batch, or a part of it."""
        self.acceptances += 1
        self._refusals = 0
        self._may_fail_fast = False
        self._setup_fails_since = None
        if self.failing_since is not None:
            self.failing_since = anyio.current_time()
        self._note_answer(admission)
        self._open()

    def note_answered(self, admission: Admission) -> None:
        """Record that the service refused a batch because of its records, so it is up and accepts our credentials."""
        self._note_answer(admission)
        if self.reason in _BRAKES:
            self._delay_probe(math.inf)
        else:
            self._open()

    def accept_refusals(
        self, records: int, admission: Admission, quote: Callable[[], str], *, are_too_large: bool = False
    ) -> int:
        """
        Return how many refusals of records to accept as genuine, and count them.

        After too many consecutive refusals, the records are unlikely to be the cause. Then the gate is shut until
        something is accepted.

        Args:
            quote: Returns the service's reason for the last refusal as far as it may be shown.
        """
        accepted = max(0, min(records, self._settings.poison_limit - self._refusals))
        self._refusals += accepted
        if accepted < records:
            words = quote()
            last = f', the last one with "{words}"' if words else ""
            reason = "too_large" if are_too_large else "systematic_rejection"
            message = (
                f"the service refused {self._refusals} records in a row and accepted none of them{last} "
                f"(delivery.poison_limit is {self._settings.poison_limit}); the rest stays pending"
            )
            self.note_failure(Verdict(Action.PAUSE, reason, message), admission)
        return accepted

    def note_failure(self, verdict: Verdict, admission: Admission) -> None:
        """Record that an attempt failed for a reason other than its records."""
        now = anyio.current_time()
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.problem = verdict.problem
        if not (verdict.is_setup_problem and self._may_fail_fast):
            self._setup_fails_since = None
        elif self._setup_fails_since is None:
            self._setup_fails_since = now
        if verdict.is_congestion and not admission.is_probe:  # a single request says nothing about concurrency
            self.limit.note_congestion(started_at=admission.started_at, now=now)
        self._failures += 1
        if verdict.action is Action.RETRY or (verdict.action is Action.THROTTLE and verdict.retry_after_s is None):
            if not self.reason and self._failures < _OUTAGE_FAILURES:
                return
            self._shut("unavailable" if verdict.action is Action.RETRY else verdict.reason, verdict, admission)
        else:
            self._shut(verdict.reason, verdict, admission)

    def _shut(self, reason: str, verdict: Verdict, admission: Admission) -> None:
        now = anyio.current_time()
        self._held_until = max(self._held_until, now + (verdict.retry_after_s or 0.0))
        if self.reason and not admission.is_probe:
            return  # sent before the gate was shut
        self._delay_probe(_OUTAGE_PROBE_MAX_S if reason in _PASSING else math.inf)
        if reason != self.reason:
            self.shut_at = now
            write = log.info if reason in _LIMITS else log.warning
            wait_s = max(self._held_until, self.probe_at) - now
            end = {} if self.gives_up_at == math.inf else {"ends_in_seconds": round(self.gives_up_at - now)}
            write("delivery_paused", reason=reason, message=verdict.message, probe_in_seconds=round(wait_s, 3), **end)
        self.reason = reason

    def _delay_probe(self, max_s: float) -> None:
        self._probes += 1
        longest_s = min(max_s, self._settings.retry_max_seconds)
        if self._is_hurried:
            longest_s = min(longest_s, _LONGEST_WAIT_WHILE_STOPPING_S)
        self.probe_at = anyio.current_time() + self._jitter_s(self._probes, longest_s)

    def _open(self) -> None:
        if self.reason and anyio.current_time() < self._held_until:
            return  # the answer to an older request does not end a wait that the service has asked for since
        self.failing_since = self._setup_fails_since = None
        self._failures = 0
        if self.reason:
            log.info("delivery_resumed", reason=self.reason)
            self.reason = self.problem = ""
            self._probes = 0
            self._ramp = 2.0
        elif self._ramp < math.inf:
            self._ramp = self._ramp + 1 if self._ramp < self.limit.limit else math.inf

    def _note_answer(self, admission: Admission) -> None:
        now, before = anyio.current_time(), self.limit.limit
        self.limit.note_answer(seconds=now - admission.started_at, in_flight=admission.in_flight, now=now)
        if self.limit.limit > before:
            self._grown.set()
            self._grown = anyio.Event()

    def _jitter_s(self, attempt: int, max_s: float) -> float:
        initial_s = min(self._settings.retry_initial_seconds, max_s)
        return full_jitter_s(attempt, initial_s=initial_s, max_s=max_s, rng=self._rng)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _seconds_per_event(settings: DeliverySettings) -> float:
    rate = settings.rate_limit_events_per_second
    return 1 / rate if rate else 0.0
