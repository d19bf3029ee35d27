"""
The gate that every request passes on its way to the service.

While the service accepts batches, the gate admits as many requests as the concurrency limit allows, at the configured
rate. It shuts for all senders when the service asks for a wait, is unavailable, or refuses requests for a reason other
than their records. Then one sender at a time probes with its batch, in the order of arrival, so that one bad batch
cannot keep the gate shut. The first acceptance opens it, and the requests in flight grow again from two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final, NamedTuple

import anyio
import structlog

from shipper.config.settings import DeliverySettings
from shipper.delivery.concurrency import AdaptiveLimit, ConcurrencyLimit, FixedLimit
from shipper.delivery.verdicts import Action, Verdict
from shipper.delivery.waits import full_jitter_s
from shipper.model.errors import DeliveryGaveUpError

log = structlog.get_logger("delivery")

_OUTAGE_FAILURES: Final = 5  # in a row, of all senders: fewer are an accident
# An unavailable service is probed every few seconds: that is harmless, and its return is noticed soon. A fault that a
# person has to fix is probed less and less often.
_OUTAGE_PROBE_MAX_S: Final = 5.0
# How long a fault of the set-up is tolerated before the first acceptance: secrets may be about to be put in place.
FAIL_FAST_S: Final = 5.0
_LIMITS: Final = {"throttled", "quota"}
_PASSING: Final = {"unavailable", *_LIMITS}
_LONGEST_WAIT_WHILE_STOPPING_S: Final = 1.0
_FIX_IT: Final = (
    "To test it: shipper check --online. Nothing is lost: the same command goes on from here; with "
    "delivery.fail_fast = false it waits for the correction"
)


class Passage(NamedTuple):
    """
    A request that was admitted.

    Attributes:
        started_at: On the gate's clock, seconds.
        in_flight: Requests in flight then, this one included.
        is_probe: It was admitted through a shut gate.
    """

    started_at: float
    in_flight: int
    is_probe: bool


class Gate:
    """
    Shared by all senders of a pipeline.

    Args:
        give_up_after_s: Give the run up after this time without an acceptance; None = never. With
            `delivery.fail_fast`, a fault of the set-up before the first acceptance ends it sooner.

    Attributes:
        reason: Why delivery pauses, one word; empty while the gate is open.
        message: The same for a person.
        what: The message without advice, see `Verdict`.
        failing_since: Since when nothing was accepted: the first failure after the last acceptance or, if that came
            while the gate was held, the acceptance. None while there are no failures.
        in_flight: Requests without an answer yet.
        shut_at: When the gate was shut for this reason.
        probe_at: When the next probe may be sent, if the gate is shut.
    """

    def __init__(
        self,
        settings: DeliverySettings,
        *,
        give_up_after_s: float | None,
        rng: Random,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._settings = settings
        self._give_up_after_s = give_up_after_s
        self._rng = rng
        self._now = now
        fixed = settings.concurrency
        self.limit: ConcurrencyLimit = (
            FixedLimit(fixed) if isinstance(fixed, int) else AdaptiveLimit(settings.max_concurrency)
        )
        self._turn = anyio.Lock(fast_acquire=True)
        self._changed = anyio.Event()
        self._grown = anyio.Event()
        self._ramp = math.inf  # requests in flight at most, after a pause
        self._seconds_per_event = _seconds_per_event(settings)
        self._paced_until = -math.inf
        self._held_until = -math.inf
        self._failures = 0
        self._probes = 0
        self._refusals = 0
        self._may_fail_fast = give_up_after_s is not None and settings.fail_fast
        self._set_up_fails_since: float | None = None
        self._is_hurried = False
        self._woken = anyio.Event()  # for those who sleep
        self._is_finished = False
        self.reason = ""
        self.message = self.what = ""
        self.failing_since: float | None = None
        self.in_flight = 0
        self.shut_at = -math.inf
        self.probe_at = -math.inf

    def __repr__(self) -> str:
        return f"<Gate {self.reason or 'open'}, {self.in_flight} in flight of {self.limit.limit}>"

    # Going through -----------------------------------------------------------------------------------------------

    async def enter(self, events: int) -> Passage:
        """
        Wait until a request may be sent; the caller must call `leave` after it.

        Raises:
            DeliveryGaveUpError: Nothing was accepted for too long.
        """
        async with self._turn:  # its queue is the order in which senders probe
            while (wait_s := self._wait_s()) > 0:
                patience_s = self._patience_s()
                changed = self._changed
                with anyio.move_on_after(min(wait_s, patience_s)):
                    await changed.wait()
            now = self._now()
            if self._seconds_per_event:
                self._paced_until = max(now, self._paced_until) + events * self._seconds_per_event
            self.in_flight += 1
            return Passage(now, self.in_flight, bool(self.reason))

    @property
    def wait_s(self) -> float:
        """The least time until the next request, because the gate is shut; 0 while it is open."""
        return max(0.0, self._held_until - self._now(), self.probe_at - self._now()) if self.reason else 0.0

    def leave(self) -> None:
        """Note that a request has ended; its outcome must be noted before the next await."""
        self.in_flight -= 1
        self._tell_change()

    def _wait_s(self) -> float:
        """Return how long no request is admitted; infinite until something changes."""
        now = self._now()
        wait_s = max(self._held_until, self._paced_until) - now
        if self.reason:
            return math.inf if self.in_flight else max(wait_s, self.probe_at - now)
        return math.inf if self.in_flight >= min(self.limit.limit, self._ramp) else wait_s

    def _patience_s(self) -> float:
        """
        Return how much longer to wait for an acceptance.

        Raises:
            DeliveryGaveUpError: The time is over.
        """
        now = self._now()
        if self._gives_up_at() <= now:
            raise self._gave_up(f"nothing was accepted for {self._give_up_after_s:g} s")
        if self._fails_fast_at() <= now:
            raise self._gave_up("nothing was accepted yet", _FIX_IT)
        return self.gives_up_at - now

    def _gave_up(self, what: str, way_out: str = "") -> DeliveryGaveUpError:
        """Return the error that names the cause first; there is no advice on what passes by itself."""
        reason = "" if self.reason in _PASSING else self.reason
        cause = self.what if reason else self.message
        return DeliveryGaveUpError(f"{cause}; {what}", way_out, reason=reason)

    @property
    def gives_up_at(self) -> float:
        """When the run is given up unless something is accepted, on the gate's clock; infinite = never."""
        return min(self._gives_up_at(), self._fails_fast_at())

    def _gives_up_at(self) -> float:
        if self._give_up_after_s is None or self.failing_since is None:
            return math.inf
        return self.failing_since + self._give_up_after_s

    def _fails_fast_at(self) -> float:
        return math.inf if self._set_up_fails_since is None else self._set_up_fails_since + FAIL_FAST_S

    async def sleep(self, seconds: float) -> None:
        """Wait, but only for a moment once a stop was requested, not beyond `retry`, and not the time to give up."""
        with anyio.move_on_after(min(seconds, self._patience_s())):
            await self._woken.wait()
            if self._is_hurried:
                await anyio.sleep(self._rng.uniform(0, min(seconds, _LONGEST_WAIT_WHILE_STOPPING_S)))

    def backoff_s(self, attempt: int) -> float:
        """Draw a sender's wait after a failure; 0 while the gate is shut, as `enter` waits then."""
        return 0.0 if self.reason else self._jitter_s(attempt, self._settings.retry_max_seconds)

    # Who is needed -----------------------------------------------------------------------------------------------

    async def is_needed(self, index: int) -> bool:
        """Wait until the limit requires sender number `index` (from 0); return False if it never will."""
        while index >= self.limit.limit and not self._is_finished:
            await self._grown.wait()
        return not self._is_finished

    def finish(self) -> None:
        """Note that there are no more batches."""
        self._is_finished = True
        self._grown.set()

    def reconfigure(self, settings: DeliverySettings) -> None:
        """Apply new settings; they may end a pause, so the next probe may be sent at once."""
        self._settings = settings
        self._seconds_per_event = _seconds_per_event(settings)
        self._paced_until = self._now()
        self.probe_at = -math.inf
        self._probes = 0
        self._tell_change()

    def hurry(self) -> None:
        """Skip backoffs from now on, as a stop was requested; waits that the service asked for remain."""
        self._is_hurried = True
        self._woken.set()
        self.probe_at = min(self.probe_at, self._now() + self._jitter_s(1, _LONGEST_WAIT_WHILE_STOPPING_S))
        self._tell_change()

    def retry(self) -> None:
        """End all waits, also those that the service asked for: a person wants the next attempt now."""
        self._held_until = self.probe_at = -math.inf
        self._probes = 0
        self._woken.set()
        if not self._is_hurried:
            self._woken = anyio.Event()
        self._tell_change()

    @property
    def is_probing(self) -> bool:
        """Whether the gate is shut, and what came of the first probe since, or since a `retry`, is not known yet."""
        return bool(self.reason) and not self._probes

    # What came of it ---------------------------------------------------------------------------------------------

    def note_accepted(self, passage: Passage) -> None:
        """Note that the service accepted a batch, or a part of it."""
        self._refusals = 0
        self._may_fail_fast = False
        self._set_up_fails_since = None
        if self.failing_since is not None:
            self.failing_since = self._now()
        self._note_answer(passage)
        self._open()

    def note_answered(self, passage: Passage) -> None:
        """Note that the service refused a batch for its records: it is available and accepts our credentials."""
        self._note_answer(passage)
        if self.reason == "systematic_rejection":
            self._delay_probe(math.inf)
        else:
            self._open()

    def believed(self, records: int, passage: Passage) -> int:
        """
        Return how many refusals of records to accept as genuine, and count them.

        After too many in a row without an acceptance, the records are unlikely to be the cause. Then the gate is shut
        until something is accepted.
        """
        believed = min(records, self._settings.poison_limit - self._refusals)
        self._refusals += believed
        if believed < records:
            message = (
                f"the service refused {self._refusals} records in a row and accepted none in between "
                f"(delivery.poison_limit is {self._settings.poison_limit}); the rest stays pending. `shipper "
                "dead-letters list` shows the service's reasons; if they are justified, raise the limit"
            )
            self.note_failure(Verdict(Action.PAUSE, "systematic_rejection", message), passage)
        return believed

    def note_failure(self, verdict: Verdict, passage: Passage) -> None:
        """Note that an attempt failed for a reason other than its records."""
        now = self._now()
        self.failing_since = now if self.failing_since is None else self.failing_since
        self.message, self.what = verdict.message, verdict.what or verdict.message
        if not (verdict.is_set_up_fault and self._may_fail_fast):
            self._set_up_fails_since = None
        elif self._set_up_fails_since is None:
            self._set_up_fails_since = now
        if verdict.is_congestion and not passage.is_probe:  # a single request does not show how many are too many
            self.limit.note_congestion(started_at=passage.started_at, now=now)
        self._failures += 1
        if verdict.action is Action.RETRY or (verdict.action is Action.THROTTLE and verdict.retry_after_s is None):
            if not self.reason and self._failures < _OUTAGE_FAILURES:
                return
            self._shut("unavailable" if verdict.action is Action.RETRY else verdict.reason, verdict, passage)
        else:
            self._shut(verdict.reason, verdict, passage)

    def _shut(self, reason: str, verdict: Verdict, passage: Passage) -> None:
        now = self._now()
        self._held_until = max(self._held_until, now + (verdict.retry_after_s or 0.0))
        if self.reason and not passage.is_probe:
            return  # sent before the gate was shut: it adds nothing new
        self._delay_probe(_OUTAGE_PROBE_MAX_S if reason in _PASSING else math.inf)
        if reason != self.reason:
            self.shut_at = now
            tell = log.info if reason in _LIMITS else log.warning
            wait_s = max(self._held_until, self.probe_at) - now
            tell("delivery_paused", reason=reason, message=verdict.message, probe_in_seconds=round(wait_s, 3))
        self.reason = reason

    def _delay_probe(self, max_s: float) -> None:
        self._probes += 1
        longest_s = min(max_s, self._settings.retry_max_seconds)
        if self._is_hurried:
            longest_s = min(longest_s, _LONGEST_WAIT_WHILE_STOPPING_S)
        self.probe_at = self._now() + self._jitter_s(self._probes, longest_s)

    def _open(self) -> None:
        if self.reason and self._now() < self._held_until:
            return  # the answer to an older request ends neither the wait that was requested since nor the patience
        self.failing_since = self._set_up_fails_since = None
        self._failures = 0
        if self.reason:
            log.info("delivery_resumed", reason=self.reason)
            self.reason = self.message = self.what = ""
            self._probes = 0
            self._ramp = 2.0
        elif self._ramp < math.inf:
            self._ramp = self._ramp + 1 if self._ramp < self.limit.limit else math.inf

    def _note_answer(self, passage: Passage) -> None:
        now, before = self._now(), self.limit.limit
        self.limit.note_answer(seconds=now - passage.started_at, in_flight=passage.in_flight, now=now)
        if self.limit.limit > before:
            self._grown.set()
            self._grown = anyio.Event()

    def _jitter_s(self, attempt: int, max_s: float) -> float:
        initial_s = min(self._settings.retry_initial_seconds, max_s)
        return full_jitter_s(attempt, initial_s=initial_s, max_s=max_s, rng=self._rng)

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _seconds_per_event(settings: DeliverySettings) -> float:
    rate = settings.rate_limit_events_per_second
    return 1 / rate if rate else 0.0
